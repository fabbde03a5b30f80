"""What a row is held against: the fastest that its GPU was timed to move as many bytes, or to multiply.

Where memory limits, that is the faster of two: a copy of as many bytes in the same rounds, and a stream with the same
mix of reads and writes. Streams are those of the table `streams` of day 1's lesson on memory. How much of its bytes an
operator writes follows from the shapes of its results; the rest it reads. Where arithmetic limits, it is the faster of
cuBLAS's rate at a size of 8192, and cuBLAS at the row's own shape in the same rounds, where it is a peer.

Rows keep what was timed: `percent_of_limit` is of the copy, or of the rate at 8192. Shares are computed from it when
they are shown, so a new table of streams needs no new rows. `python -m lessonkit.measure.yardstick` lists the rows of
operators.csv that are under the bar.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from lessonkit.base import renames
from lessonkit.base.tables import dicts
from lessonkit.judge.check import tensors
from lessonkit.lesson import Lesson, Shape, kernels, shape_name
from lessonkit.measure import operator_rows, rows
from lessonkit.measure.operator_rows import Key

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

LESSON = "day1_pytorch.lesson09_memory_by_measurement"
FILE = f"{LESSON}.streams.csv"
JUDGED_BYTES = 64e6  # what is smaller takes a good part of its time to start
BAR, BAR_OF_NORMS = 92, 85  # percent of the stream; of the norms' backward
# Peers that ask cuBLAS the row's own question, some with an epilogue in further launches.
CUBLAS = ("torch", "torch, fast accumulation", "torch.mm, a loop", "torch.bmm", "cuBLASLt")
Point = tuple[float, float]


@dataclass(frozen=True)
class Streams:
    """What one GPU does. lines: the share of the bytes that is written -> (bytes, seconds) by size; both ascend."""

    lines: dict[float, tuple[Point, ...]]

    @property
    def least(self) -> float:
        """The bytes of the smallest stream that was timed."""
        return min(line[0][0] for line in self.lines.values())

    def seconds(self, moved: float, written: float) -> float:
        """The time of a stream over so many bytes, of which so many are written; 0 if it is smaller than all timed."""
        if moved < self.least:
            return 0.0
        return _between([(share, _at(line, moved)) for share, line in self.lines.items()], written / moved)

    def percent(self, ms: float, moved: float, written: float | None) -> float:
        """The share in percent of the stream's rate that a kernel of `ms` reaches; 0 if it is not known."""
        return 0.0 if written is None else 100 * self.seconds(moved, written) / (ms * 1e-3)


def _at(line: Sequence[Point], moved: float) -> float:
    """Past the largest size the rate stays what it is there."""
    last, took = line[-1]
    return took * moved / last if moved > last else _between(line, moved)


def _between(points: Sequence[Point], x: float) -> float:
    """On the straight line between the two points beside x; the outermost point beyond them."""
    at = bisect_left([place for place, _ in points], x)
    if at in (0, len(points)):
        return points[min(at, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[at - 1 : at + 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def streams(folder: Path) -> Streams | None:
    """The table of one GPU; None if it was not measured there."""
    place = renames.place(folder / FILE)
    return _streams(place.read_text()) if place.exists() else None


@lru_cache(8)
def _streams(text: str) -> Streams | None:
    lines: dict[float, list[Point]] = {}
    for row in dicts(text):
        reads, writes, moved = int(row["reads"]), int(row["writes"]), int(row["MB"]) * 2**20
        lines.setdefault(writes / (reads + writes), []).append((moved, moved / (float(row["GB_per_s"]) * 1e9)))
    return Streams({share: tuple(sorted(lines[share])) for share in sorted(lines)}) if lines else None


# ---- What is written ------------------------------------------------------------------------------------------------


def _written(inputs: Any, answers: Sequence[Callable[..., Any]], dtype: torch.dtype, shape: Shape) -> int | None:
    """The bytes of the results of the first answer that tells their shapes without data; None if none does.

    Each sequence of a batch has results of its own, of the same shapes: one is asked, since references loop over heads.
    """
    batch = shape.get("B", 1)
    for answer in answers:
        with suppress(DataDependentOutputException, DynamicOutputShapeException), FakeTensorMode(), torch.no_grad():
            results = tensors(answer(*inputs(dtype=dtype, **shape | ({"B": 1} if batch > 1 else {}))))
            found: int = max(batch, 1) * sum(t.numel() * t.element_size() for t in results)
            return found
    return None


@cache
def _lessons() -> dict[str, Lesson]:
    return dict(kernels())


@cache
def of_lesson(lesson: str, shape: str) -> int | None:
    """The bytes that a lesson's operator writes at one of its bench shapes; None if that is not known."""
    if (found := _lessons().get(lesson)) is None:
        return None
    calls = [op.call for op in operator_rows.operators() if op.problem is found.problem]
    at = {shape_name(each): each for each in found.benches}.get(shape)
    return None if at is None else _written(found.inputs, (found.reference, *calls[:1]), found.bench_dtype, at)


@cache
def of_operator(key: Key) -> int | None:
    """The bytes that an operator of course_ops writes at a shape of operators.csv; None if that is not known."""
    case = operator_rows.by_key().get(key)
    if case is None:
        return None
    op = case.operator
    return _written(op.inputs or op.problem.inputs, (op.problem.reference, op.call), case.dtype, case.shape)


# ---- Shares ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What a row reaches of its limit, and what limits it.

    of: "stream" (or the copy, if it is faster), "copy" (no stream is known), "few" (a copy; the smallest stream that
    was timed moves more) or "cuBLAS".
    """

    percent: float
    of: str


def share(row: rows.Row) -> Share:
    """Of a rung or a peer of a lesson."""
    folder = rows.REPORTS / row.gpu
    if row.limited_by_math:
        return _of_arithmetic(row.percent_of_limit, row.ms_p50, _cublas(folder / f"{row.lesson}.csv").get(row.shape))
    return _of_memory(row.percent_of_limit, row.ms_p50, row.bytes, folder, lambda: of_lesson(row.lesson, row.shape))


def share_of_operator(row: operator_rows.Row) -> Share:
    """Of an operator of course_ops."""
    if rows.limited_by_math(row.flops, row.bytes, row.dtype):
        times = [ms for peer, ms in operator_rows.peer_times(row).items() if peer in CUBLAS]
        return _of_arithmetic(row.percent_of_limit, row.ms, min(times, default=None))
    folder = rows.REPORTS / row.device
    return _of_memory(row.percent_of_limit, row.ms, row.bytes, folder, lambda: of_operator(row.key))


def _of_arithmetic(stored: float, ms: float, cublas: float | None) -> Share:
    return Share(min(stored, 100 * cublas / ms) if cublas else stored, "cuBLAS")


def _of_memory(stored: float, ms: float, moved: int, folder: Path, written: Callable[[], int | None]) -> Share:
    if (table := streams(folder)) is None:
        return Share(stored, "copy")
    if moved < table.least:
        return Share(stored, "few")
    percent = table.percent(ms, moved, written())
    return Share(min(stored, percent), "stream") if percent else Share(stored, "copy")


def _cublas(path: Path) -> dict[str, float]:
    """Shape -> the time of the fastest peer of a lesson's rows that is cuBLAS."""
    place = renames.place(path)
    return _fastest_cublas(place, place.stat().st_mtime_ns) if place.exists() else {}


@lru_cache(512)
def _fastest_cublas(path: Path, _changed: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows.read(path):
        if row.kind == "peer" and row.rung in CUBLAS:
            found[row.shape] = min(row.ms_p50, found.get(row.shape, row.ms_p50))
    return found


# ---- The bar --------------------------------------------------------------------------------------------------------


def bar(row: operator_rows.Row) -> int:
    return BAR_OF_NORMS if row.operator.endswith("norm") and row.direction == "backward" else BAR


def under_the_bar(folder: Path) -> list[tuple[operator_rows.Row, float]]:
    """Each memory-bound row of JUDGED_BYTES or more that is under its bar, with its percentage; the lowest first.

    Raises FileNotFoundError if the GPU has no table of streams.
    """
    table = streams(folder)
    if table is None:
        raise FileNotFoundError(f"{folder / FILE}: the step `streams` of that lesson measures it, on a GPU")
    timed = [row for row in operator_rows.read(folder / operator_rows.FILE) if row.ms and not row.error]
    large = [row for row in timed if row.bytes >= JUDGED_BYTES]
    judged = [row for row in large if not rows.limited_by_math(row.flops, row.bytes, row.dtype)]
    shares = [(row, table.percent(row.ms, row.bytes, of_operator(row.key))) for row in judged]
    return sorted(((row, share) for row, share in shares if 0 < share < bar(row)), key=lambda pair: pair[1])


def main() -> None:
    for row, share in under_the_bar(rows.REPORTS / rows.MACHINE):
        print(f"{share:5.1f}% of the stream, bar {bar(row)}%: {' '.join(row.key)}")


if __name__ == "__main__":
    main()
