"""A row's share of its limit. The limit is a yardstick and no bound: a share above 100% is marked and explained."""

import re
from collections.abc import Iterable, Sequence

from lessonkit.base.words import later, said, sentences
from lessonkit.measure import yardstick
from lessonkit.measure.rows import Row
from lessonkit.measure.yardstick import Streams
from lessonkit.pages import results

BEYOND = "†"  # behind a share of more than 100%
COMPUTE = later(
    "† More than 100%: where arithmetic limits, the limit is cuBLAS's rate at a size of 8192. At its own shape the "
    "kernel computes faster."
)
SMALL = later(
    "† More than 100%, at most {l2} MB: a result of this size can stay in the L2 cache, and starting the copy takes a "
    "good part of the copy's time."
)
LARGE = later(
    "† More than 100%: where memory limits, the limit is PyTorch's copy, half reads and half writes. A kernel that "
    "mostly reads is faster, and so is one that uses the memory better than this copy."
)
STREAM = later("† More than 100% of a stream: the kernel uses the memory better than the stream that was timed.")
ANY = later(
    "† More than 100%: the limit is what was timed, and no bound. A kernel can use the memory better than the stream "
    "or the copy, and matmuls of some shapes are faster than cuBLAS's of 8192."
)
# Columns of steps' tables that hold shares of a limit, and why a cell may exceed it.
EITHER = later(
    "† More than 100%: a kernel that mostly reads can be faster than a copy, and matmuls of some shapes than cuBLAS's "
    "of 8192."
)
ROOF = later(
    "† More than 100%: the roof is the rate of a large copy. Nothing empties the L2 cache between the operators of a "
    "model, so an operator can read there what the one before it has written. One that mostly reads is faster too."
)
COLUMNS = {"% of the limit": EITHER, "% of its limit": EITHER, "% of the limit, rung by rung": EITHER, "of roof": ROOF}
NO_CARD = 60  # MB of L2 of a card that the table lacks


def beyond(row: Row) -> bool:
    """Whether the share, as pages round it, is above 100%. A copy is the limit, and has no share of it."""
    return row.kind != "limit" and float(f"{row.percent_of_limit:.0f}") > 100


def of_limit(row: Row) -> str:
    """`97%`, or `103% †`."""
    if row.kind == "limit":
        return "-"
    return f"{row.percent_of_limit:.0f}%" + f" {BEYOND}" * beyond(row)


def of_stream(row: Row, table: Streams) -> str:
    """The share of a stream with the row's mix of reads and writes; empty where arithmetic limits, or if unknown."""
    percent = _of_stream(row, table)
    return f"{percent:.0f}%" + f" {BEYOND}" * _faster_than_its_stream(row, table) if percent else ""


def percent(row: Row, table: Streams | None) -> float:
    """The share of a stream where the table has one, and else of the limit of the row's own rounds."""
    return (_of_stream(row, table) if table else 0.0) or row.percent_of_limit


def _of_stream(row: Row, table: Streams) -> float:
    if row.kind == "limit" or row.limited_by_math:
        return 0.0
    return table.percent(row.ms_p50, row.bytes, yardstick.of_lesson(row.lesson, row.shape))


def _faster_than_its_stream(row: Row, table: Streams | None) -> bool:
    return table is not None and _of_stream(row, table) >= 100.5


def why(shown: Iterable[Row], table: Streams | None = None) -> str:
    """A sentence for each kind of the rows that exceed their limit, or the table's streams; empty if none does."""
    found, shown = dict[str, None](), list(shown)
    for row in filter(beyond, shown):
        chip = results.card(row)
        l2 = chip.l2 if chip else NO_CARD
        if row.limited_by_math:
            found[said(COMPUTE)] = None
        elif row.bytes <= l2 * 1e6:
            found[said(SMALL).format(l2=l2)] = None
        else:
            found[said(LARGE)] = None
    if any(_faster_than_its_stream(row, table) for row in shown):
        found[said(STREAM)] = None
    return sentences(*found)


def briefly(shown: Sequence[Row], table: Streams | None = None) -> str:
    """One sentence for all of the rows that exceed their limit; if the table has a row's stream, that is its limit."""
    streamed = [row for row in shown if table and _of_stream(row, table)]
    others = any(beyond(row) for row in shown if row not in streamed)
    faster = any(_faster_than_its_stream(row, table) for row in streamed)
    return said(ANY) if others and faster else said(EITHER) * others + said(STREAM) * faster


def below(shown: Iterable[Row], table: Streams | None = None) -> str:
    """The paragraph below a table of these rows. table: the streams whose shares it shows too."""
    return f"\n{text}\n" if (text := why(shown, table)) else ""


def marked(column: str, cell: str) -> str:
    """A cell of a step's table, with the mark behind each share above 100%."""
    if column not in COLUMNS:
        return cell
    return re.sub(r"\b(\d+)(%|\b)(?=,|$)", lambda m: m[0] + f" {BEYOND}" * (int(m[1]) > 100), cell)
