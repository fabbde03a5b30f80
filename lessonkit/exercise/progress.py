"""What a learner has done, kept in answers/progress.json, which git ignores, beside their answers.

The file has a record for each exercise, by its name, and the lists of OTHERS. A file without these lists, or without a
field of a record, is read as if nothing of the kind had happened.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from lessonkit.base import renames
from lessonkit.base.files import ROOT, changing, write_atomically
from lessonkit.base.words import said
from lessonkit.exercise.source import Source, discover

T = TypeVar("T")
OTHERS = ("predictions", "quizzes", "asked")  # keys that are no exercise's name: those have a dot


class Damaged(ValueError):
    """The file of progress is no longer what was written; says where it is and what to do."""


@dataclass
class Record:
    """One exercise.

    seed    of the inputs that the last answer failed on; they are asked again until it passes
    at      when a command was last about it, in seconds since 1970
    events  [seconds since 1970, what]: "hint 1", "right", or the property that refused a try
    """

    checks: int = 0
    hints: int = 0
    passed: str = ""  # the day
    seed: int | None = None
    at: float = 0
    events: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Guess:
    """A prediction that the learner wrote down.

    said  the figure with its unit, as written: "1.2ms", "x1.5"
    at    seconds since 1970
    seen  whether the lesson had run here before, which prints what was measured
    """

    lesson: str
    rung: str
    shape: str
    said: str
    at: float = 0
    seen: bool = False


@dataclass(frozen=True)
class Sitting:
    """One time that the learner answered a quiz: `answers` says of each skill what was answered, and if it is right."""

    quiz: str  # day2
    part: str  # before or after
    answers: dict[str, list[Any]]  # skill -> [what was answered, whether it is right]
    at: float = 0

    @property
    def right(self) -> int:
        return sum(bool(right) for _, right in self.answers.values())


def folder() -> Path:
    """Where the learner's files lie: answers/ in the course, or where COURSE_ANSWERS says."""
    return Path(os.environ.get("COURSE_ANSWERS") or ROOT / "answers")


def file() -> Path:
    """Where all that is kept stands."""
    return folder() / "progress.json"


def load() -> dict[str, Record]:
    """The record of each exercise that was begun, the last one last. Raises Damaged."""
    kept = _parsed(lambda raw: [(n, Record(**f)) for n, f in raw.items() if n not in OTHERS], _raw())
    return {renames.exercise(name): record for name, record in sorted(kept, key=lambda each: each[1].at)}


def guesses() -> list[Guess]:
    """All predictions, the first one first, under the names of today. Raises Damaged."""
    kept = _parsed(lambda raw: [Guess(**each) for each in raw.get("predictions", [])], _raw())
    return [replace(g, lesson=renames.lesson(g.lesson), rung=renames.rung(g.lesson, g.rung)) for g in kept]


def sittings() -> list[Sitting]:
    """All results of quizzes, the first one first. Raises Damaged."""
    return _parsed(lambda raw: [Sitting(**each) for each in raw.get("quizzes", [])], _raw())


def asked() -> list[str]:
    """The lessons before whose run the learner was asked for predictions. Raises Damaged."""
    return _parsed(lambda raw: [*map(str, raw.get("asked", []))], _raw())


def add(key: str, entry: Any) -> None:
    """Keep one more: `add("predictions", guess)`, `add("quizzes", sitting)`, `add("asked", lesson)`."""
    assert key in OTHERS
    with changing(file()):
        raw = _raw()
        raw[key] = [*raw.get(key, []), entry if isinstance(entry, str) else asdict(entry)]
        _write(raw)


def save(records: dict[str, Record]) -> None:
    """Write the records of the exercises; the lists stay as they are."""
    raw = _raw()
    _write({name: asdict(r) for name, r in records.items()} | {key: raw[key] for key in OTHERS if key in raw})


def _raw() -> dict[str, Any]:
    try:
        return _parsed(lambda text: dict(json.loads(text)), file().read_text())
    except FileNotFoundError:
        return {}


def _parsed(read: Callable[[Any], T], raw: Any) -> T:
    try:
        return read(raw)
    except (ValueError, TypeError, AttributeError) as error:
        words = said("{file} is damaged ({error}): mend it, or remove it to start anew")
        raise Damaged(words.format(file=file(), error=error)) from None


def _write(raw: dict[str, Any]) -> None:
    write_atomically(file(), json.dumps(raw, indent=1) + "\n")


def of(source: Source) -> Record:
    return load().get(source.name, Record())


def update(source: Source, event: str = "", **fields: object) -> None:
    """Change what is known of one exercise, which is then where the learner is: `update(source, "hint 2", hints=2)`."""
    with changing(file()):  # `watch` may run in one terminal, `hint` in another
        records, now = load(), time.time()
        before = asdict(records.get(source.name, Record()))
        before["events"] += [[round(now), event]] if event else []
        records[source.name] = Record(**{**before, "at": now, **fields})
        save(records)


def by_folder() -> dict[str, list[Record]]:
    """The record of every exercise that there is now, by its folder; {} where none has been begun."""
    records, found = load(), dict[str, list[Record]]()
    for source in discover():
        found.setdefault(source.folder, []).append(records.get(source.name, Record()))
    return found if any(r.checks or r.hints or r.passed for of in found.values() for r in of) else {}


def waiting(sources: Sequence[Source]) -> Source | None:
    """Where the learner is: the exercise that a command was last about, or the first after it that has not passed.

    After the last comes the first; None if all have passed.
    """
    records = load()
    state = [records.get(source.name, Record()) for source in sources]
    here = max(range(len(state)), key=lambda i: state[i].at)
    order = [*range(here, len(state)), *range(here)]
    return next((sources[i] for i in order if not state[i].passed), None)


def today() -> str:
    return date.today().isoformat()


def answer_file(source: Source) -> Path:
    """The learner's file; one that lies under an older name of the exercise is moved to the new one."""
    path = folder() / source.answer_name
    for old in () if path.exists() else renames.earlier("exercises", source.name):
        before = folder() / f"{old.replace('.', '/')}{path.suffix}"
        if before.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            before.rename(path)
            break
    return path


def start(source: Source) -> Path:
    """The learner's file, made from the stub in their language if it is not there yet."""
    path = answer_file(source)
    if not path.exists():
        write_atomically(path, source.read(source.stub))
    return path
