"""A row's share of its limit. The limit is a yardstick and no bound: a share above 100% is marked and explained."""

import re
from collections.abc import Iterable

from lessonkit.base import chips
from lessonkit.base.words import later, said, sentences
from lessonkit.measure import rows, yardstick
from lessonkit.measure.rows import Row
from lessonkit.pages import results

BEYOND = "†"  # behind a share of more than 100%
LIMIT = later(
    "Where memory limits, the limit is the faster of two: a copy of as many bytes in the same rounds, or a stream with "
    "the same mix of reads and writes. Where arithmetic limits, it is cuBLAS's rate at a size of 8192, or cuBLAS at "
    "the same shape in the same rounds if that is faster. A kernel can exceed what was timed."
)
# Why a share may exceed 100%. Each row that does falls under the first cause that fits.
CUBLAS = later(
    "† More than 100%: the kernel computes faster than cuBLAS, both at a size of 8192 and at its own shape, if cuBLAS "
    "computes the same."
)
FEW = later(
    "† More than 100%, less than {least} MB: no stream of so few bytes was timed, so the limit is the copy alone. "
    "Starting the copy takes a good part of the copy's time."
)
SMALL = later(
    "† More than 100%, at most {l2} MB: a result of this size can stay in the L2 cache, and starting the stream or the "
    "copy takes a good part of its time. The kernel is faster than both."
)
LARGE = later("† More than 100%, more than {l2} MB: the kernel uses the memory better than the stream and the copy.")
COPY = later(
    "† More than 100%: no stream of this mix of reads and writes is known, so the limit is PyTorch's copy, half reads "
    "and half writes. A kernel that mostly reads is faster."
)
ANY = later("† More than 100%: the limit is the fastest that was timed, and no bound. This kernel is faster.")
# Columns of steps' tables that hold shares of a limit, and why a cell may exceed it.
ROOF = later(
    "† More than 100%: the roof is the rate of a large copy. Nothing empties the L2 cache between the operators of a "
    "model, so an operator can read there what the one before it has written. One that mostly reads is faster too."
)
COLUMNS = {"% of the limit": ANY, "% of its limit": ANY, "% of the limit, rung by rung": ANY, "of roof": ROOF}
NO_CARD = 60  # MB of L2 of a card that the table lacks


def percent(row: Row) -> float:
    """The share of the limit of a rung or a peer."""
    return yardstick.share(row).percent


def beyond(percent: float) -> bool:
    """Whether the share, as pages round it, is above 100%."""
    return float(f"{percent:.0f}") > 100


def of_limit(row: Row) -> str:
    """`97%`, or `103% †`. A copy is the limit, and has no share of it."""
    return "-" if row.kind == "limit" else shown(percent(row))


def shown(percent: float, digits: int = 0) -> str:
    return f"{percent:.{digits}f}%" + f" {BEYOND}" * beyond(percent)


def of_sheet(row: Row) -> str:
    """`81%` of what the card's data sheet states; empty for a card that the table lacks."""
    return f"{results.of_sheet(row):.0f}%" if results.card(row) else ""


def cause(of: str, moved: int, gpu: str) -> str:
    """Why a row that moves so many bytes can exceed its limit. of: as yardstick.Share says it."""
    chip = chips.of_gpu(gpu)
    l2 = chip.l2 if chip else NO_CARD
    if of == "cuBLAS":
        return said(CUBLAS)
    if of == "few":
        table = yardstick.streams(rows.REPORTS / gpu)
        return said(FEW).format(least=f"{table.least / 1e6:.1f}" if table else "")
    if moved <= l2 * 1e6:
        return said(SMALL).format(l2=l2)
    return said(LARGE).format(l2=l2) if of == "stream" else said(COPY)


def why(shown: Iterable[Row]) -> str:
    """A sentence for each cause of the rows that exceed their limit; empty if none does."""
    found = dict[str, None]()
    for row in (row for row in shown if row.kind != "limit"):
        share = yardstick.share(row)
        if beyond(share.percent):
            found[cause(share.of, row.bytes, row.gpu)] = None
    return sentences(*found)


def briefly(shown: Iterable[Row]) -> str:
    """One sentence for all of the rows that exceed their limit."""
    return said(ANY) * any(beyond(percent(row)) for row in shown if row.kind != "limit")


def below(shown: Iterable[Row]) -> str:
    """The paragraph below a table of these rows."""
    return f"\n{text}\n" if (text := why(shown)) else ""


def marked(column: str, cell: str) -> str:
    """A cell of a step's table, with the mark behind each share above 100%."""
    if column not in COLUMNS:
        return cell
    return re.sub(r"\b(\d+)(%|\b)(?=,|$)", lambda m: m[0] + f" {BEYOND}" * (int(m[1]) > 100), cell)
