"""Which measured rows are of code that has changed since, and which of them can be shown to be unharmed.

A peer's row that does not say the peer's version is listed too: its shape shows no ratio until it is measured again.

A row is old if the source of its rung or peer, its inputs or its work is another one today. It is not if the machine
code is shown to be equal: recorded by one version of the compiler then and now (launches). What was shown is kept in
the row, behind the source that it was measured with, so that to ask takes a second and no compiler.

A row of operators.csv is old by its fingerprint. A changed operator is compared in the versions of PyTorch and Triton
that the row was measured with. If its launches are equal, the row gets today's fingerprint. Its inputs and peers must
have the source that they had, and its work the same figures.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lessonkit.base import renames
from lessonkit.base.files import ROOT, changing, write_atomically
from lessonkit.base.tables import head, read_csv
from lessonkit.base.words import later, said
from lessonkit.lesson import Lesson, discover, kernels, shape_name
from lessonkit.measure import fingerprint, launches, operator_rows, rows
from lessonkit.measure.rows import Row

PARTS = operator_rows.PARTS[:3]  # of a source fingerprint; a lesson's peer has a row of its own
NO_VERSION = later("a peer's version is missing")  # so its shape shows no ratio (rows.read)
NO_ROW = later("a peer was added")  # so the ratio may be to the second best
WITHOUT_A_GPU = {  # folders of reports/ that are no GPU's
    "compiled": later("what the compiler made of each rung (no GPU needed)"),
    "emulated": later("what each CUDA kernel asks of memory, counted (no GPU needed)"),
    "traces": "",
    "cpu": "",
}


@dataclass(frozen=True)
class Old:
    """A row that is to be measured again, and why."""

    device: str
    row: Row | operator_rows.Row
    why: str

    @property
    def lesson(self) -> str:
        """The lesson's name in full; empty of an operator's row."""
        return self.row.lesson if isinstance(self.row, Row) else ""

    @property
    def named(self) -> tuple[str, str, str]:
        """Lesson, rung and shape; of an operator's row the function, its direction and its shape."""
        if isinstance(self.row, operator_rows.Row):
            operator, direction, *shape = self.row.key
            return f"course_ops.{operator}", direction, " ".join(shape)
        return self.row.lesson, self.row.rung, self.row.shape

    def __str__(self) -> str:
        lesson, rung, shape = self.named
        return f"{self.device}: {lesson} {rung} at {shape}: {self.why}, measured at {self.row.commit}"


def in_words(why: str) -> str:
    """Why a row is old (Today.why_old), in the language of this process: "code and inputs changed"."""
    parts, changed, _ = why.partition(" changed")
    if not changed:
        return said(why)
    return said("{parts} changed").format(parts=said(" and ").join(map(said, parts.split(" and "))))


def device_folders() -> list[Path]:
    """The GPUs that have rows here: reports/<device>/, the one of the predictions first, then others' cards.

    What a machine without a GPU writes (cpu/) is for its owner.
    """
    found = (p for p in rows.REPORTS.glob("*") if p.is_dir() and p.name not in WITHOUT_A_GPU)
    return sorted(found, key=lambda p: (p.name != rows.MACHINE, p.name))


def released() -> list[Path]:
    """The GPUs of which a release wants every row to be of today's code: others' cards cannot be measured again."""
    return [folder for folder in device_folders() if folder.name == rows.MACHINE]


class Today:
    """The fingerprints of this checkout, each computed once."""

    def __init__(self, lessons: Iterable[tuple[str, Lesson]]) -> None:
        self.lessons = dict(lessons)
        self.known: dict[tuple[str, str], str] = {}
        self.given: dict[str, str] = {}
        self.beside: dict[Path, dict[str, set[str]]] = {}  # a file of rows: at each shape the rungs and peers in it

    def source(self, row: Row) -> str:
        """The row's fingerprint today; "" if the lesson no longer has such a rung or peer."""
        key = row.lesson, row.rung
        if key not in self.known:
            try:
                if row.lesson not in self.given:
                    self.given[row.lesson] = fingerprint.given(ROOT, row.lesson)
                code = fingerprint.code(ROOT, row.lesson, row.rung, peer=row.kind != "rung")
                self.known[key] = f"{code}.{self.given[row.lesson]}"
            except fingerprint.NotFound:
                self.known[key] = ""
        return self.known[key]

    def lacks_a_peer(self, row: Row, lesson: Lesson) -> bool:
        """Whether the lesson declares a peer that has at this shape neither a time nor a reason why there is none."""
        path = rows.REPORTS / row.gpu / f"{row.lesson}.csv"
        if path not in self.beside:
            self.beside[path] = {}
            for each in rows.read_all(path):
                self.beside[path].setdefault(each.shape, set()).add(each.rung)
            for line in read_csv(path.with_name("absent.csv")):
                if renames.lesson(line["lesson"]) == row.lesson:
                    self.beside[path].setdefault(line["shape"], set()).add(line["peer"])
        there = self.beside[path].get(row.shape)
        return there is not None and not lesson.peers.keys() <= there

    def why_old(self, row: Row) -> str:
        """What has changed since the row was measured; "" if nothing has, or nothing that the GPU would notice."""
        row = replace(row, rung=row.rung.removesuffix(rows.ELSEWHERE))
        lesson = self.lessons.get(row.lesson)
        if row.kind == "limit" or lesson is None:
            return "" if lesson else later("no such lesson")
        names = lesson.peers if row.kind != "rung" else [rung.__name__ for rung in lesson.rungs]
        if row.rung not in names:
            return later("no such rung") if row.kind == "rung" else later("no such peer")
        if row.shape not in map(shape_name, lesson.benches):
            return later("this shape is no longer timed")
        now = self.source(row)
        if row.is_of(now):
            return NO_ROW if row.kind == "rung" and self.lacks_a_peer(row, lesson) else ""
        then = row.source.split()[0] if row.source else ""
        changed = [p for p, a, b in zip(PARTS, then.split("."), now.split("."), strict=False) if a != b]
        return f"{' and '.join(changed) or 'code'} changed"


def old(folders: Iterable[Path] | None = None, today: Today | None = None) -> list[Old]:
    """Every row that is old or of no version, by device and lesson, then those of operators at shapes still timed."""
    today, folders = today or Today(kernels()), list(device_folders() if folders is None else folders)
    of_lessons = [
        Old(folder.name, row, why)
        for folder in folders
        for name in today.lessons
        for row in rows.read(folder / f"{name}.csv")
        if (why := today.why_old(row) or NO_VERSION * row.of_no_version)
    ]
    cases = operator_rows.by_key()
    return of_lessons + [
        Old(folder.name, row, f"{' and '.join(changed)} changed")
        for folder in folders
        for row in operator_rows.read(folder / operator_rows.FILE)
        if row.key in cases and (changed := operator_rows.changed(row, cases[row.key]))
    ]


def show_equal() -> int:
    """Compare the machine code of old rows with today's, keep what is equal in their files, and return how many are.

    A row whose record is of another compiler than this machine has cannot be shown equal.
    """
    today = Today(kernels())

    def asked(row: Row) -> bool:
        return bool(row.machine) and today.why_old(row).endswith("changed")

    def changed(row: Row, mark: str) -> Row:
        equal = launches.shown_equal(row.machine, mark)
        return replace(row, source=f"{row.source} ={today.source(row)}") if equal else row

    cases = operator_rows.by_key()

    def operator_asked(row: operator_rows.Row) -> bool:
        if not (row.machine and row.key in cases and _versions_are_here(row)):
            return False
        work, parts = cases[row.key].work(), operator_rows.changed(row, cases[row.key])
        return bool(parts) and {*parts} <= {"code", "work"} and (row.bytes, row.flops) == (work.bytes, work.flops)

    def operator_changed(row: operator_rows.Row, mark: str) -> operator_rows.Row:
        equal = launches.shown_equal(row.machine, mark)
        return replace(row, fingerprint=operator_rows.today(cases[row.key])) if equal else row

    return _with_marks(asked, changed) + _operators_with_marks(operator_asked, operator_changed)


def record() -> int:
    """Add this machine's compilers to the records of rows that are of today's code; return how many rows gained one.

    To be done before another version is installed: it is what later code can be compared with.
    """
    today, here = Today(kernels()), [f"{compiler}=" for compiler in launches.compilers()]

    def asked(row: Row) -> bool:
        return row.kind in ("rung", "peer") and not today.why_old(row) and not any(c in row.machine for c in here)

    def changed(row: Row, mark: str) -> Row:
        return replace(row, machine=f"{row.machine} {mark}".strip()) if mark else row

    cases = operator_rows.by_key()

    def operator_asked(row: operator_rows.Row) -> bool:
        if row.machine or row.key not in cases or not _versions_are_here(row):
            return False
        return not operator_rows.changed(row, cases[row.key])

    def operator_changed(row: operator_rows.Row, mark: str) -> operator_rows.Row:
        return replace(row, machine=mark)

    return _with_marks(asked, changed) + _operators_with_marks(operator_asked, operator_changed)


def _versions_are_here(row: operator_rows.Row) -> bool:
    """Whether an operator's row was measured with the PyTorch and the Triton of this process."""
    triton, torch, _ = launches.compilers()
    then = {version.partition("+")[0].replace(" ", "-") for version in row.versions.split(", ")}
    return {triton, torch} <= then


def _with_marks(asked: Callable[[Row], bool], changed: Callable[[Row, str], Row]) -> int:
    """Replace the rows that are asked for by what `changed` makes of them and of their marks here; how many differ."""

    def marks(name: str, old: Sequence[Row]) -> list[str]:
        return launches.marks(name, [(row.rung, row.kind == "peer", row.shape) for row in old])

    return sum(
        _in_file(folder / f"{name}.csv", rows.read_all, rows.as_csv, asked, partial(marks, name), changed)
        for folder in device_folders()
        for name, _ in kernels()
    )


def _operators_with_marks(
    asked: Callable[[operator_rows.Row], bool], changed: Callable[[operator_rows.Row, str], operator_rows.Row]
) -> int:
    """As _with_marks, of the rows of operators."""

    def marks(old: Sequence[operator_rows.Row]) -> list[str]:
        return launches.marks_of_operators([row.key for row in old])

    return sum(
        _in_file(folder / operator_rows.FILE, operator_rows.read, operator_rows.as_csv, asked, marks, changed)
        for folder in device_folders()
    )


R = TypeVar("R", Row, operator_rows.Row)


def _in_file(
    path: Path,
    read: Callable[[Path], list[R]],
    as_csv: Callable[[Iterable[R]], str],
    asked: Callable[[R], bool],
    marks: Callable[[Sequence[R]], list[str]],
    changed: Callable[[R, str], R],
) -> int:
    """Replace the rows of one file that are asked for by what `changed` makes of them and of their marks."""
    if not (old := [row for row in read(path) if asked(row)]):
        return 0
    new = {row: changed(row, mark) for row, mark in zip(old, marks(old), strict=True)}
    differ = sum(row != before for before, row in new.items())
    if differ:
        with changing(path):  # compiling took minutes: rows may have been measured meanwhile
            write_atomically(path, as_csv(new.get(row, row) for row in read(path)))
    return differ


def table_is_old(lesson: str, about: dict[str, Any]) -> bool:
    """Whether the step that measured a table has changed since, by the table's head."""
    if not (then := about.get("source")):
        return False  # which step it was is not known
    try:
        now = fingerprint.step(ROOT, lesson, about["step"])
    except fingerprint.NotFound:
        return True
    return bool(then != now)


def old_tables(folders: Iterable[Path]) -> list[str]:
    """The tables of steps that have changed since they were measured: device/lesson.table."""
    return [f"{path.parent.name}/{path.stem}" for path, _, _ in tables(folders)]


def tables(folders: Iterable[Path]) -> Iterator[tuple[Path, str, str]]:
    """(file, lesson, step) of each table that is old; of what a program printed the step is empty."""
    lessons = {name for name, _ in discover()}
    for folder in folders:
        for path in sorted(folder.glob("*.*.*.csv")):
            about, lesson = head(path), renames.lesson(path.stem.rsplit(".", 1)[0])
            if lesson in lessons and table_is_old(lesson, about):
                yield path, lesson, about["step"]
