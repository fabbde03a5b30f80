"""How fast a GPU streams as many bytes with the same mix of reads and writes: what a memory-bound kernel can reach.

The figures are those of the table `streams` of day 1's lesson on memory. How much of its bytes an operator writes
follows from the shapes of its results; the rest it reads. `python -m lessonkit.measure.yardstick` lists the rows of
operators.csv that are under the bar.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lessonkit.base import renames
from lessonkit.base.tables import read_csv
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
Point = tuple[float, float]


@dataclass(frozen=True)
class Streams:
    """What one GPU does. lines: the share of the bytes that is written -> (bytes, seconds) by size; both ascend."""

    lines: dict[float, tuple[Point, ...]]

    def seconds(self, moved: float, written: float) -> float:
        """The time of a stream over so many bytes, of which so many are written; 0 if it is smaller than all timed."""
        if moved < min(line[0][0] for line in self.lines.values()):
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
    lines: dict[float, list[Point]] = {}
    for row in read_csv(renames.place(folder / FILE)):
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
    found = _lessons()[lesson]
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
