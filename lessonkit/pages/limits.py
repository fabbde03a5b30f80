"""reports/<gpu>/limits.md: every share of a limit above 100%, by its cause."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lessonkit.base.markdown import markdown
from lessonkit.base.words import later, said, sentences
from lessonkit.measure import operator_rows, yardstick
from lessonkit.measure.yardstick import Share
from lessonkit.pages import operator_pages, results, shares

NAME = operator_pages.NAME_OF_LIMITS
KINDS = (later("rungs of lessons"), later("peers of lessons"), later("operators of course_ops"))
TITLE = later("Shares of the limit above 100% on {device}")
COUNTED = later(
    "The first table counts the rows that are shown at more than 100%. Each falls under one cause. Its last line is of "
    "the column `percent_of_limit` of the CSV files instead, whose limit is the copy alone, or cuBLAS's rate at a size "
    "of 8192 alone. The rows are those of lessons and of [operators.csv](operators.csv)."
)
SHEET = later("No row exceeds what the card's data sheet states: the highest share of it is {most}.")
EVERY = later("Every such row")


@dataclass(frozen=True)
class Timed:
    """One row of either file. stored: its column percent_of_limit."""

    kind: str
    who: str
    shape: str
    moved: int
    gpu: str
    share: Share
    stored: float
    of_sheet: float

    @property
    def above(self) -> bool:
        return shares.beyond(self.share.percent)

    @cached_property
    def cause(self) -> str:
        return shares.cause(self.share.of, self.moved, self.gpu)


def timed(folder: Path) -> Iterator[Timed]:
    """The rungs, peers and operators of one GPU that have a time."""
    kinds = {"rung": KINDS[0], "peer": KINDS[1]}
    for name, _, found in results.measured(folder):
        for row in (row for row in found if row.kind in kinds):
            who = f"{name.split('.')[1]}: {row.rung}"
            yield Timed(kinds[row.kind], who, f"{row.shape} {row.dtype}", row.bytes, row.gpu, yardstick.share(row),
                        row.percent_of_limit, results.of_sheet(row))  # fmt: skip
    for each in operator_rows.read(folder / operator_rows.FILE):
        if each.ms and not each.error:
            shape = " ".join(part for part in each.key[2:] if part != "random")
            yield Timed(KINDS[2], f"{each.operator} {each.direction}", shape, each.bytes, each.device,
                        yardstick.share_of_operator(each), each.percent_of_limit,
                        results.share_of_sheet(each.device, each.bytes, each.flops, each.ms, each.dtype))  # fmt: skip


def page(folder: Path) -> str:
    """The page of one GPU; empty where nothing was timed."""
    if not (every := list(timed(folder))):
        return ""
    above = sorted((row for row in every if row.above), key=lambda row: -row.share.percent)
    causes = list(dict.fromkeys(row.cause for row in above))

    def line(nth: str, head: str, found: list[Timed], figure: str) -> list[str]:
        return [nth, head, *(str(sum(row.kind == kind for row in found)) for kind in KINDS), figure]

    body = []
    for nth, cause in enumerate(causes, 1):
        mine = [row for row in above if row.cause == cause]
        body.append(line(str(nth), cause, mine, shares.shown(mine[0].share.percent)))
    alone = [row for row in every if shares.beyond(row.stored)]
    most = max((row.stored for row in alone), default=0.0)
    body += [
        line("", said("in all"), above, shares.shown(above[0].share.percent) if above else ""),
        line("", said("rows with a time"), every, ""),
        line("", said("more than 100% of the stored limit"), alone, shares.shown(most) if alone else ""),
    ]
    sheet = said(SHEET).format(most=f"{max(row.of_sheet for row in every):.0f}%")
    parts = [
        f"# {said(TITLE).format(device=folder.name)}",
        sentences(said(shares.LIMIT), said(COUNTED), sheet),
        markdown(["", said("cause"), *map(said, KINDS), said("most")], body) + f"\n{said(shares.ANY)}",
    ]
    if above:
        lines = [[row.who, row.shape, f"{row.moved / 1e6:.1f}", shares.shown(row.share.percent),
                  f"{row.of_sheet:.0f}%", str(causes.index(row.cause) + 1)] for row in above]  # fmt: skip
        heads = [said("row"), said("shape"), "MB", *map(said, operator_pages.SHARES), said("cause")]
        parts += [f"## {said(EVERY)}", markdown(heads, lines) + f"\n{said(shares.ANY)}"]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"
