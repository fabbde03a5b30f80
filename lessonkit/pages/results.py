"""The course's rows by operator: which lessons compute the same thing, in which language, and what bounds each rung."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lessonkit.base import chips
from lessonkit.base.words import later
from lessonkit.lesson import Lesson, kernels
from lessonkit.measure import rows, yardstick
from lessonkit.measure.rows import ELSEWHERE, Row
from lessonkit.pages import guides

BOUNDS = (later("launch"), later("latency"), later("compute"), later("memory"))
# Operators whose algorithms have to move more than the least bytes that the limit counts, and why.
OUT_OF_REACH = {
    "sort": later(
        "No radix sort reaches it: it reads and writes all keys once for each digit of 8 bits, and counts digits first."
    ),
    "all-reduce": later(
        "Here all ranks share the memory of one GPU, and no link is measured. No ring reaches the limit: in four ranks "
        "it reads and writes twice the least bytes."
    ),
}
LAUNCH_US = 8  # where even the limit is less, starting the kernel is what takes the time


def intensity(row: Row) -> float:
    """FLOPs for each byte that the op must move."""
    return row.tflop_per_s / row.tb_per_s if row.tb_per_s else 0.0


def card(row: Row) -> chips.Chip | None:
    """The card of a row, if the table has it."""
    return chips.of_gpu(row.gpu)


def roofs(chip: chips.Chip, dtypes: Collection[str]) -> dict[str, float]:
    """The card's rates in TFLOP/s at which these dtypes are computed: {"bf16": 989.4}."""
    names = dict.fromkeys(chips.RATES.get(dtype, "fp32") for dtype in sorted(dtypes))
    return {name: chip.flops[name] / 1e12 for name in names if name in chip.flops}


def of_sheet(row: Row) -> float:
    """The share in percent of what the card's data sheet allows at best, which nothing can exceed; 0 if unknown."""
    moved, flops = (rate * 1e9 * row.ms_p50 for rate in (row.tb_per_s, row.tflop_per_s))
    return share_of_sheet(row.gpu, moved, flops if row.kind != "limit" else 0.0, row.ms_p50, row.dtype)


def share_of_sheet(gpu: str, moved: float, flops: float, ms: float, dtype: str) -> float:
    """The same of a kernel that moves so many bytes and computes so many FLOPs in so many milliseconds."""
    if (found := chips.of_gpu(gpu)) is None or not ms:
        return 0.0
    least, _ = found.seconds(moved, flops, chips.RATES.get(dtype, "fp32"))
    return 1e5 * least / ms


def place(row: Row) -> tuple[str, str]:
    """(shape, dtype) of a row, without the options that are off: lessons that lack an option time the same there."""
    return re.sub(r" \w+=(?:False\b|(?= |$))", "", row.shape), row.dtype


def bound(row: Row) -> str:
    """What a rung waits for: at half of its limit or more it is that limit; below, something in between."""
    percent = yardstick.share(row).percent
    if row.ms_p50 * percent * 10 < LAUNCH_US:
        return "launch"
    if percent < 50:
        return "latency"
    return "compute" if row.limited_by_math else "memory"


def operator(lesson: str) -> str:
    return guides.about(lesson).operator or lesson.split(".")[-1]


def language(lesson: str) -> str:
    return guides.about(lesson).language


def measured(folder: Path) -> Iterator[tuple[str, Lesson, list[Row]]]:
    """Each kernel lesson that has rows on this machine, with those rows, in the order of the course."""
    for name, lesson in kernels():
        if found := rows.read(folder / f"{name}.csv"):
            yield name, lesson, found


Timed = tuple[str, Lesson, list[Row]]  # a lesson's name, the lesson, and its rows


def beside(lessons: Sequence[Timed]) -> list[Timed]:
    """The lessons of one operator; at each shape with the fastest peer that any of them timed there.

    A lesson that did not time that peer gets its row, marked by ELSEWHERE, and ratios to it.
    """
    peers: dict[tuple[str, str], list[Row]] = {}
    for _, _, found in lessons:
        for row in (row for row in found if row.kind == "peer"):
            peers.setdefault(place(row), []).append(row)

    def faster(mine: Sequence[Row]) -> Row | None:
        """The peer that is faster than all of these rounds' own, and is none of them."""
        own = [row for row in mine if row.kind == "peer"]
        judged = [row for row in peers.get(place(mine[0]), []) if row.ratio_to_best_peer]
        others = [row for row in judged if row.rung not in {each.rung for each in own}]
        best = min(others, key=lambda row: row.ms_p50, default=None)
        return best if best and own and all(best.ms_p50 < row.ms_p50 for row in own) else None

    made = list[Timed]()
    for name, lesson, found in lessons:
        rounds: dict[tuple[str, str], list[Row]] = {}
        for row in found:
            rounds.setdefault(place(row), []).append(row)
        all_rows = list[Row]()
        for mine in rounds.values():
            if best := faster(mine):
                all_rows += [replace(row, ratio_to_best_peer=_over(row, best)) for row in mine]
                all_rows.append(replace(best, rung=best.rung + ELSEWHERE, ratio_to_best_peer=1.0))
            else:
                all_rows += mine
        made.append((name, lesson, all_rows))
    return made


def _over(row: Row, peer: Row) -> float:
    """A row's ratio to a peer of other rounds; a row that is incomplete stays without one."""
    return round(peer.ms_p50 / row.ms_p50, 3) if row.ratio_to_best_peer else 0.0


def largest(found: Sequence[Row], rung: str) -> Row | None:
    """The rung's row at its largest shape."""
    return max((row for row in found if row.rung == rung), key=lambda row: row.bytes, default=None)


def ladder(lesson: Lesson, found: Sequence[Row], shape: str, dtype: str) -> list[Row]:
    """The lesson's rungs at one shape, in order; those that do not take it are missing."""
    at = {row.rung: row for row in found if (*place(row), row.kind) == (shape, dtype, "rung")}
    return [at[rung.__name__] for rung in lesson.rungs if rung.__name__ in at]


@dataclass(frozen=True)
class Contest:
    """One operator at the largest shape that most of its lessons measured, beside the peers that were timed there.

    shape: as `place` says it.
    """

    name: str
    shape: str
    dtype: str
    lessons: tuple[Timed, ...]

    @cached_property
    def rungs(self) -> list[Row]:
        return [row for _, lesson, found in self.lessons for row in ladder(lesson, found, self.shape, self.dtype)]

    @cached_property
    def best(self) -> Row:
        return min(self.rungs, key=lambda row: row.ms_p50)

    @cached_property
    def peer(self) -> Row | None:
        """The best peer beside the fastest rung (`beside`)."""
        mine = [r for name, _, found in self.lessons for r in found if name == self.best.lesson]
        peers = [r for r in mine if (*place(r), r.kind) == (*place(self.best), "peer")]
        return min(peers, key=lambda row: row.ms_p50, default=None)

    def bars(self, axes: Any) -> None:
        """Each rung's share of its limit; a colour a lesson, the best peer a dashed line."""
        lessons = list(dict.fromkeys(row.lesson for row in self.rungs))
        colours = [f"C{lessons.index(row.lesson) % 10}" for row in self.rungs]
        axes.bar(range(len(self.rungs)), [yardstick.share(row).percent for row in self.rungs], color=colours)
        axes.set_ylabel("% of the limit, a colour a lesson", fontsize=7)
        if self.peer:
            axes.axhline(yardstick.share(self.peer).percent, linestyle="--", color="k", linewidth=1)


def contests(folder: Path, languages: Collection[str] = ()) -> list[Contest]:
    """The operators that have rows and a peer on this machine, in the order of the course.

    languages: lessons of these alone; all if empty.
    """
    every, grouped = dict[str, list[Timed]](), dict[str, list[Timed]]()
    for timed in measured(folder):
        every.setdefault(operator(timed[0]), []).append(timed)
    for op, lessons in every.items():
        if mine := [timed for timed in beside(lessons) if not languages or language(timed[0]) in languages]:
            grouped[op] = mine
    peers = {op for op, lessons in grouped.items() if any(r.kind == "peer" for _, _, found in lessons for r in found)}
    sizes = {op: main_size(lessons) for op, lessons in grouped.items() if op in peers}
    return [Contest(op, *size, tuple(grouped[op])) for op, size in sizes.items() if size]


def main_size(lessons: Sequence[tuple[str, Lesson, Sequence[Row]]]) -> tuple[str, str] | None:
    """(shape, dtype) as `place` says it: the largest that most of the lessons' last rungs were timed at."""
    sizes, work = Counter[tuple[str, str]](), dict[tuple[str, str], tuple[int, float]]()
    for _, lesson, found in lessons:
        last = [row for row in found if row.rung == lesson.rungs[-1].__name__]
        sizes.update(map(place, last))
        work |= {place(row): (row.bytes, row.tflop_per_s * row.ms_p50) for row in last}
    return max(sizes, key=lambda size: (sizes[size], *work[size]), default=None)
