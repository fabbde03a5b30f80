"""Rows of reports/<device>/operators.csv: how good course_ops is, beside its peers, at the shapes of the zoo."""

import hashlib
import inspect
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lessonkit.base.files import ROOT, changing, write_atomically
from lessonkit.base.tables import read_csv, to_csv
from lessonkit.base.words import later
from lessonkit.lesson import Lesson, Operator, Problem, Shape, Work, shape_name
from lessonkit.measure import fingerprint
from lessonkit.measure.rows import far_apart, may_be_the_best

FILE = "operators.csv"
BETWEEN = " | "  # entries of one cell
BEHIND = 0.97  # of the best peer
TIMES = 3  # a judged shape that is behind is timed so often, and the row in the middle counts
JUDGED_MS = 0.02  # shorter calls are reported and not judged: a launch takes a good part of them
PROVENANCE = ("fingerprint", "machine", "seal")  # say which code a row is of; the other columns are what was measured
PARTS = (later("code"), later("inputs"), later("work"), later("peers"))  # of a fingerprint

Key = tuple[str, str, str, str, str]  # operator, direction, shape, dtype, data


@dataclass(frozen=True, kw_only=True)
class Row:
    """An operator at one shape. A figure that there is not is 0 here and empty in the file."""

    operator: str
    direction: str
    shape: str
    dtype: str
    data: str
    ms: float = 0.0
    p20: float = 0.0
    p80: float = 0.0
    best_peer: str = ""
    best_peer_ms: float = 0.0
    ratio: float = 0.0  # the best peer's ms over ours
    ratios: str = ""  # "0.951 | 0.963 | 0.958": of each time, where a shape that is behind was timed TIMES times
    percent_of_limit: float = 0.0  # of limit_ms; pages show yardstick.share_of_operator
    limit_ms: float = 0.0  # a copy of as many bytes, timed in the same rounds; or the FLOPs at the matmul rate
    bytes: int
    flops: int
    first_call_s: float = 0.0  # compiles what no earlier shape of the process has compiled
    peak_memory: int = 0  # bytes of results and scratch at the worst moment of a later call (memory.peak_bytes)
    peers: str = ""  # "FA4 0.8353 | SDPA cuDNN 0.91": every peer with its ms
    absent: str = ""  # "quack: refuses, ... | liger: not installed": every other peer, and why
    error: str = ""  # why there is no time, or why it does not count
    versions: str
    device: str
    commit: str
    date: str
    fingerprint: str  # of the code that was timed, or of later code whose machine code was shown to be equal (stale)
    machine: str = ""  # launches.marks_of_operators
    seal: str = ""  # a hash of what was measured: a figure that is changed by accident no longer fits it

    @property
    def key(self) -> Key:
        return self.operator, self.direction, self.shape, self.dtype, self.data

    @property
    def judged(self) -> bool:
        return bool(self.ratio) and not self.error and self.ms >= JUDGED_MS

    @property
    def behind(self) -> bool:
        return self.judged and self.ratio < BEHIND

    @property
    def disturbed(self) -> bool:
        """Whether the times of its calls lie far apart: another process used the GPU, or the call itself varies."""
        return far_apart(self.p20, self.p80)

    def sealed(self) -> "Row":
        """The row with the seal that fits it."""
        named = {name: value for name, value in asdict(self).items() if name not in PROVENANCE}
        if not self.ratios:
            del named["ratios"]
        measured = map(str, named.values())
        return replace(self, seal=hashlib.sha256("|".join(measured).encode()).hexdigest()[:10])


@dataclass(frozen=True)
class Case:
    """An operator and one of its shapes."""

    operator: Operator
    shape: Shape

    @cached_property
    def key(self) -> Key:
        op = self.operator
        return op.name, op.direction, shape_name(self.shape), str(self.dtype).removeprefix("torch."), op.data

    @property
    def dtype(self) -> Any:
        return self.operator.dtype or self.operator.problem.bench_dtype

    @property
    def peers(self) -> dict[str, Any]:
        return {**self.operator.problem.peers, **self.operator.peers}

    def inputs(self) -> tuple[Any, ...]:
        made: tuple[Any, ...] = (self.operator.inputs or self.operator.problem.inputs)(dtype=self.dtype, **self.shape)
        return made

    def work(self) -> Work:
        return (self.operator.work or self.operator.problem.work)(dtype=self.dtype, **self.shape)


def operators() -> tuple[Operator, ...]:
    found: tuple[Operator, ...] = import_module("problems.operators").OPERATORS
    return found


def cases(names: Sequence[str] = (), every: Iterable[Operator] | None = None) -> list[Case]:
    """The shapes to be timed, round robin over the operators: a short run covers each. names: of these alone."""
    each = [
        list({shape_name(shape): Case(op, shape) for shape in (plain(op, s) for s in op.shapes)}.values())
        for op in (operators() if every is None else every)
        if not names or op.name in names
    ]
    return [case for one_of_each in zip_longest(*each) for case in one_of_each if case]


def by_key() -> dict[Key, Case]:
    """Every case that is to be timed, by its key."""
    return {case.key: case for case in cases()}


def plain(operator: Operator, shape: Shape) -> Shape:
    """A shape without what is the inputs' default anyway: one name for one question."""
    takes = inspect.signature(operator.inputs or operator.problem.inputs).parameters
    return {name: value for name, value in shape.items() if name not in takes or not _same(takes[name].default, value)}


def _same(default: Any, value: Any) -> bool:
    return value is None or (type(default) is type(value) and bool(default == value))


# ---- Fingerprints -----------------------------------------------------------------------------------------------


@cache
def source(operator: int) -> str:
    """Hashes of an operator's code, inputs, work and peers, with dots between; `operator`: its place in the list."""
    op = operators()[operator]
    module, bound = _home(op.problem)
    peers = [fingerprint.problem(ROOT, module, bound, "peers"), *map(_function, op.peers.values())]
    parts = (
        _function(op.call),
        _function(op.inputs) if op.inputs else fingerprint.problem(ROOT, module, bound, "inputs"),
        _function(op.work) if op.work else fingerprint.problem(ROOT, module, bound, "work"),
        hashlib.sha256(" ".join(peers).encode()).hexdigest(),
    )
    return ".".join(part[:8] for part in parts)


@cache
def reaches(operator: int) -> dict[str, frozenset[str]]:
    """The full names of what the hashes of an operator's code, inputs and work count, by its direction and these."""
    op = operators()[operator]
    module, bound = _home(op.problem)

    def names(function: Any) -> frozenset[str]:
        return fingerprint.reaches(ROOT, function.__module__, function.__name__)

    return {
        op.direction: names(op.call),
        "inputs": names(op.inputs) if op.inputs else fingerprint.problem_reaches(ROOT, module, bound, "inputs"),
        "work": names(op.work) if op.work else fingerprint.problem_reaches(ROOT, module, bound, "work"),
    }


@cache
def code(operator: str) -> str:
    """A hash of what an operator's calls run, forward and backward, through every import."""
    calls = {_function(op.call) for op in operators() if op.name == operator}
    return hashlib.sha256(" ".join(sorted(calls)).encode()).hexdigest()[:12]


def _function(function: Any) -> str:
    return fingerprint.source(ROOT, function.__module__, function.__name__)


def _home(problem: Problem) -> tuple[str, str]:
    """The module of problems/ that binds a problem, and its name there."""
    for name, module in list(sys.modules.items()):
        if name.startswith("problems."):
            for bound, value in vars(module).items():
                if value is problem:
                    return name, bound
    raise LookupError("a problem that no module of problems/ binds has no fingerprint: give it a name there")


def today(case: Case) -> str:
    """The fingerprint of a case in this checkout."""
    return source(next(i for i, op in enumerate(operators()) if op is case.operator))


def changed(row: Row, case: Case) -> list[str]:
    """The parts of a row's fingerprint that are others in this checkout."""
    parts = zip(PARTS, row.fingerprint.split("."), today(case).split("."), strict=False)
    return [part for part, then, now in parts if then != now]


# ---- The file -----------------------------------------------------------------------------------------------------


def read(path: Path) -> list[Row]:
    types: dict[str, Any] = {f.name: f.type for f in fields(Row)}
    return [
        Row(**{name: types[name](value or ("" if types[name] is str else 0)) for name, value in raw.items()})
        for raw in read_csv(path)
    ]


def keep(path: Path, row: Row) -> None:
    """Put a row into the file, in place of the one that it measures again."""
    with changing(path):
        found = {each.key: each for each in read(path)} | {row.key: row.sealed()}
        write_atomically(path, as_csv(found.values()))


def as_csv(rows: Iterable[Row]) -> str:
    return to_csv({name: value or "" for name, value in vars(row).items()} for row in rows)


def missing(found: Iterable[Row], asked: Iterable[Case]) -> list[Case]:
    """The cases without a row of today's code."""
    known = {(row.key, row.fingerprint) for row in found}
    return [case for case in asked if (case.key, today(case)) not in known]


def pending(found: Sequence[Row], asked: Sequence[Case]) -> list[Case]:
    """What is to be timed: cases without a row of today's code; then those that are behind, if they were timed once."""
    once = {(row.key, row.fingerprint) for row in found if row.behind and not row.ratios}
    return [*missing(found, asked), *(case for case in asked if (case.key, today(case)) in once)]


def absences(row: Row) -> dict[str, str]:
    """Peer -> why it was not timed."""
    return dict((entry.split(": ", 1)) for entry in row.absent.split(BETWEEN) if entry)


def peer_times(row: Row) -> dict[str, float]:
    entries = (entry.rpartition(" ") for entry in row.peers.split(BETWEEN) if entry)
    return {name: float(ms) for name, _, ms in entries}


def ratio(row: Row) -> float:
    """What a row's ratio must be; 0 where there is none: without all of the peers the best is not known."""
    times = peer_times(row)
    incomplete = any(map(may_be_the_best, absences(row).values()))
    return 0.0 if row.error or incomplete or not (times and row.ms) else round(min(times.values()) / row.ms, 3)


def faults(found: Sequence[Row]) -> list[str]:
    """What in rows does not fit the rest: each figure that can be computed from others is."""
    asked = by_key()
    said = []
    for row in found:
        times, wrong = peer_times(row), list[str]()
        if row.sealed() != row:
            wrong.append("the seal does not fit")
        if not row.p20 <= row.ms <= row.p80:
            wrong.append("p20, ms, p80 are out of order")
        best = min(times, key=lambda name: times[name], default="")
        if (row.best_peer, row.best_peer_ms) != (best, times.get(best, 0.0)):
            wrong.append(f"the best peer is {best!r}")
        if abs(row.ratio - ratio(row)) > 1e-9:
            wrong.append(f"ratio is {row.ratio}, not {ratio(row)}")
        of_all = sorted(map(float, filter(None, row.ratios.split(BETWEEN))))
        if of_all and (len(of_all) != TIMES or of_all[TIMES // 2] != row.ratio):
            wrong.append(f"ratio is {row.ratio}, not in the middle of {row.ratios}")
        if row.ms and abs(row.percent_of_limit - round(100 * row.limit_ms / row.ms, 1)) > 1e-9:
            wrong.append(f"percent_of_limit is {row.percent_of_limit}")
        if not (row.ms or row.error):
            wrong.append("neither a time nor an error")
        if case := asked.get(row.key):
            work = case.work()
            if (row.bytes, row.flops) != (work.bytes, work.flops):
                wrong.append(f"bytes and flops are {row.bytes}, {row.flops}, not {work.bytes}, {work.flops}")
            if row.ms and row.fingerprint == today(case) and set(times) | set(absences(row)) != set(case.peers):
                wrong.append(f"peers are {sorted(case.peers)}: each is timed or absent")
        said += [f"{' '.join(row.key)}: {what}" for what in wrong]
    keys = [row.key for row in found]
    return said + [f"{' '.join(key)}: {keys.count(key)} rows" for key in dict.fromkeys(keys) if keys.count(key) > 1]


def is_asked(operator: Operator, lesson: Lesson) -> bool:
    """Whether an operator computes what a lesson asks: names of lessons' operators are others, so the problem says it.

    A lesson with a reference of its own asks something else.
    """
    return lesson.problem is operator.problem and lesson.reference is operator.problem.reference


def of_lessons(lessons: Iterable[Lesson], shape: str, dtype: str, found: Iterable[Row]) -> Row | None:
    """The row of the operator that computes what these lessons ask, at a shape that one of them times so named."""
    lessons, by = list(lessons), {row.key: row for row in found}
    named = next((each for lesson in lessons for each in lesson.benches if shape_name(each) == shape), None)
    for op in operators():
        if named is not None and any(is_asked(op, lesson) for lesson in lessons):
            row = by.get(Case(op, plain(op, named)).key)
            if row and row.dtype == dtype:
                return row
    return None


# ---- What the rows say ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """One operator and direction: ratios to the best peer over all judged shapes."""

    operator: str
    direction: str
    shapes: int
    short: int  # below JUDGED_MS
    failed: int  # with an error, or without all peers
    mean: float  # geometric; 0 without a judged shape
    worst: Row | None
    behind: int  # shapes under BEHIND

    @property
    def share_behind(self) -> float:
        return self.behind / self.shapes if self.shapes else 0.0


def summaries(found: Iterable[Row]) -> list[Summary]:
    """For each operator and direction, in the order of the rows."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        groups.setdefault((row.operator, row.direction), []).append(row)
    made = []
    for (operator, direction), rows in groups.items():
        judged = [row for row in rows if row.judged]
        mean = math.exp(sum(math.log(row.ratio) for row in judged) / len(judged)) if judged else 0.0
        made.append(
            Summary(
                operator,
                direction,
                shapes=len(judged),
                short=sum(bool(row.ratio) and not row.judged for row in rows),
                failed=sum(not row.ratio for row in rows),
                mean=mean,
                worst=min(judged, key=lambda row: row.ratio, default=None),
                behind=sum(row.behind for row in judged),
            )
        )
    return made
