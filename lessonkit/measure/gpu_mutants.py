"""Verdicts on mutants that one kind of GPU alone can judge, and which of them are of today's code.

reports/<gpu>/mutants.csv has a row for each. A verdict is old if the rung, the inputs or the mutant is another today.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from lessonkit.base import renames
from lessonkit.base.files import ROOT, changing, write_atomically
from lessonkit.base.tables import read_csv, to_csv
from lessonkit.judge import apart, mutants
from lessonkit.lesson import Lesson, Mutant, suits
from lessonkit.measure import fingerprint, rows, stale

NAME = "mutants.csv"


@dataclass(frozen=True)
class Judged:
    """One mutant and what the checks said of it on one GPU."""

    lesson: str
    rung: str
    mutant: str  # Mutant.why
    caught_by: str
    case: str  # the check that rejected it
    gpu: str
    driver: str
    torch: str
    triton: str
    cuda: str
    commit: str
    date: str
    source: str


def of_one_gpu(lessons: Iterable[tuple[str, Lesson]], capability: int) -> list[tuple[str, Mutant]]:
    """The mutants that GPUs of this capability can judge, and no machine without one."""
    return [
        (name, mutant)
        for name, lesson in lessons
        for mutant in lesson.wrong
        if mutants.is_of_one_gpu(name, mutant) and suits(getattr(sys.modules[name], mutant.rung), capability)
    ]


def lacks(name: str, mutant: Mutant) -> str:
    """Why this machine cannot judge the mutant though its GPU could, as without ThunderKittens; or an empty string."""
    module = sys.modules[name]
    return mutants.cannot_judge(module.LESSON, getattr(module, mutant.rung), mutant)


def source(name: str, mutant: Mutant) -> str:
    """What a verdict is of: the rung's source through every import, the inputs, and the change."""
    code = fingerprint.code(ROOT, name, mutant.rung)
    inputs = fingerprint.given(ROOT, name).partition(".")[0]
    change = hashlib.sha256("\n".join((mutant.where, mutant.old, mutant.new)).encode()).hexdigest()[:8]
    return f"{code}.{inputs}.{change}"


def read(folder: Path) -> list[Judged]:
    """The verdicts of one GPU, under the names that lessons and rungs have today."""
    found = [Judged(**{f.name: row[f.name] for f in fields(Judged)}) for row in read_csv(folder / NAME)]
    return [replace(j, lesson=renames.lesson(j.lesson), rung=renames.rung(j.lesson, j.rung)) for j in found]


def judge(name: str, mutant: Mutant) -> Judged:
    """Judge a mutant on this machine's GPU. Raises RuntimeError as apart.judged does."""
    verdict = apart.judged(name, mutant)
    what = (name, mutant.rung, mutant.why, verdict.caught_by, verdict.where)
    return Judged(*what, **rows.machine(), source=source(name, mutant))


def save(folder: Path, new: Judged) -> None:
    """Keep a verdict in place of that on the same mutant."""
    with changing(folder / NAME):
        kept = [each for each in read(folder) if (each.lesson, each.mutant) != (new.lesson, new.mutant)]
        merged = sorted([*kept, new], key=lambda each: each.lesson)
        write_atomically(folder / NAME, to_csv(map(asdict, merged)))


def fresh(folder: Path, name: str, mutant: Mutant) -> Judged | None:
    """The verdict on today's mutant; None if there is none."""
    kept = next((j for j in read(folder) if (j.lesson, j.mutant) == (name, mutant.why)), None)
    return kept if kept and kept.source == source(name, mutant) else None


def old(lessons: Iterable[tuple[str, Lesson]]) -> Iterator[str]:
    """What a release lacks: a verdict of today on each mutant of a rung that it has rows of."""
    lessons = list(lessons)
    for folder in stale.released():
        for name, lesson in lessons:
            timed = {row.rung for row in rows.read(folder / f"{name}.csv") if row.kind == "rung"}
            for mutant in lesson.wrong:
                if mutant.rung in timed and mutants.is_of_one_gpu(name, mutant) and not fresh(folder, name, mutant):
                    yield f"{folder.name}: {name}: {mutant.why}"


def contradicted(lessons: Iterable[tuple[str, Lesson]]) -> Iterator[str]:
    """Verdicts of today that are not what the lesson says."""
    lessons = list(lessons)
    for folder in stale.device_folders():
        for name, lesson in lessons:
            for mutant in lesson.wrong:
                judged = fresh(folder, name, mutant) if mutants.is_of_one_gpu(name, mutant) else None
                if judged and not apart.Verdict(judged.caught_by).is_as_declared(mutant):
                    said = judged.caught_by or "nothing"
                    yield f"{folder.name}: {name}: {mutant.why}: caught by {said}, declared {mutant.caught_by!r}"
