"""Which kernels each sanitizer has watched, and which were repeated beside a neighbour, by the rows of one GPU.

A row without a fingerprint, or with that of other code or inputs, is old.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from lessonkit.base import renames
from lessonkit.base.tables import dicts, read_csv
from lessonkit.base.words import later, said
from lessonkit.lesson import Lesson, suits
from lessonkit.measure import beside, operator_cases, sanitize
from lessonkit.measure.sanitize import Part

NEIGHBOUR = later("neighbour")  # in place of a tool
COLUMNS = (*sanitize.ALL, NEIGHBOUR)
# By the time that one takes: instrumented kernels are compiled anew, and racecheck takes minutes.
CHEAPEST = ("memcheck", "initcheck", "synccheck", NEIGHBOUR, "iisan", "consan", "racecheck")
CLEAN, OLD, NOT_RUN = later("clean"), later("old"), later("not run")
SOME, ARGUED, ERRORS = later("{count} of {all} rungs"), later("{count} argued"), later("**{count} not argued**")


@dataclass(frozen=True)
class Cell:
    """A lesson, or an operator and its direction, and a tool.

    again   what has to run before the cell is of today's code; nothing, if it is
    counts  rungs that have a row, and all; reports that are argued, and that are not
    cost    what its checks ask of the GPU, in FLOPs
    """

    name: str
    direction: str
    tool: str
    again: tuple[Part, ...]
    counts: tuple[int, int, int, int]
    cost: float

    @property
    def state(self) -> str:
        """In the language of this process."""
        run, every, argued, errors = self.counts
        if run < every:
            return said(SOME).format(count=run, all=every) if run else said(NOT_RUN)
        if self.again:
            return said(OLD)
        found = [said(words).format(count=count) for words, count in ((ERRORS, errors), (ARGUED, argued)) if count]
        return ", ".join(found) or said(CLEAN)


def cells(folder: Path, lessons: Iterable[tuple[str, Lesson]], capability: int) -> Iterator[Cell]:
    """Of each lesson with a rung for such a GPU, and of each operator: the tools that have something to watch."""
    watched, repeated = _watched(folder), _repeated(folder)
    for name, lesson in (*lessons, *operator_cases.lessons()):
        rungs = [rung.__name__ for rung in lesson.rungs if suits(rung, capability)]
        if not rungs:
            continue
        subject = name, rungs[0] if operator_cases.is_operator(name) else "", _cost(lesson)
        for tool in sanitize.TOOLS if lesson.extension else sanitize.ALL:
            yield _cell(subject, tool, rungs, watched.get((name, tool), []))
        if disturbed := [rung for rung in rungs if beside.kinds(name, rung)]:
            yield _cell(subject, NEIGHBOUR, disturbed, repeated.get((name, NEIGHBOUR), []))


def _cost(lesson: Lesson) -> float:
    shapes = [case.shape for case in lesson.checks if not case.gib] or lesson.benches[:1]
    works = [lesson.work(dtype=lesson.bench_dtype, **shape) for shape in shapes]
    return sum(work.flops + operator_cases.BYTE * work.bytes for work in works) or inf


@dataclass(frozen=True)
class _Row:
    part: Part
    source: str
    what: str  # a report; "" if there is none
    right: bool  # or the report is argued


def _cell(subject: tuple[str, str, float], tool: str, rungs: Sequence[str], rows: Sequence[_Row]) -> Cell:
    name, direction, cost = subject
    if direction:
        rows = [row for row in rows if row.part.rung == direction]
    fresh = [row for row in rows if row.source and row.source == _today(name, row.part)]
    lacking: list[Part] = []
    run = 0
    for rung in rungs:
        mine = [row for row in rows if row.part.rung in ("", rung)]
        run += bool(mine)
        if not any(row in fresh for row in mine):
            lacking += [row.part for row in mine] or [Part(rung)]
    if not rows and not direction:
        lacking = [Part()]
    reports = [row for row in fresh if row.what]
    argued = sum(row.right for row in reports)
    again = {str(part): part for part in lacking}
    return Cell(name, direction, tool, tuple(again.values()), (run, len(rungs), argued, len(reports) - argued), cost)


def _today(name: str, part: Part) -> str:
    try:
        return operator_cases.source(name, part.rung)
    except ValueError:  # no such rung any more
        return ""


def _watched(folder: Path) -> dict[tuple[str, str], list[_Row]]:
    found: dict[tuple[str, str], list[_Row]] = {}
    kept = dicts(sanitize.marked(folder, sanitize.argued()))  # by today's list, whatever it was when they were kept
    for row in kept:
        part = Part.of(row.get("part") or "")
        part = Part(renames.rung(row["lesson"], part.rung) if part.rung else "", part.shape, part.sms)
        new = _Row(part, row.get("source") or "", row["what"], row["argued"] == "yes")
        found.setdefault((renames.lesson(row["lesson"]), row["tool"]), []).append(new)
    return found


def _repeated(folder: Path) -> dict[tuple[str, str], list[_Row]]:
    found: dict[tuple[str, str], list[_Row]] = {}
    for row in read_csv(folder / beside.NAME):
        differs = row["differ"] != "0" and row.get("varies") != "True"
        what = row.get("outside") or "answers differ" * differs
        new = _Row(Part(renames.rung(row["lesson"], row["rung"])), row.get("source") or "", what, right=False)
        found.setdefault((renames.lesson(row["lesson"]), NEIGHBOUR), []).append(new)
    return found
