"""Rows as a table: a line for each shape, a column for each contender, the fastest of a line in bold."""

from collections.abc import Callable, Iterable, Sequence

from lessonkit.base.markdown import markdown
from lessonkit.base.words import said
from lessonkit.measure.rows import Row
from lessonkit.pages import results

Cell = Callable[[Row], str]


def pivot(found: Sequence[Row], cell: Cell, more: Callable[[Sequence[Row]], Iterable[str]] | None = None,
          heads: Sequence[str] = (), order: Sequence[str] = ()) -> str:  # fmt: skip
    """The rows by shape, in their order. `more` makes further cells of a line from its rows, under `heads`.

    order: of the columns; those that it lacks come last, as the rows have them.
    """
    at: dict[tuple[str, str], dict[str, Row]] = {}
    for row in found:
        at.setdefault(results.place(row), {})[row.rung] = row
    every = {row.rung: row.kind for row in found}
    kinds = {name: every[name] for name in [*order, *every] if name in every}
    dtypes = {row.dtype for row in found}
    body = []
    for (shape, dtype), line in at.items():
        racing = [row for row in line.values() if row.kind != "limit"]
        first = min(racing, key=lambda row: row.ms_p50, default=None)
        cells = [cell(line[name]) if name in line else "" for name in kinds]
        cells = [f"**{text}**" if line.get(name) is first and text else text
                 for name, text in zip(kinds, cells, strict=True)]  # fmt: skip
        where = shape if len(dtypes) == 1 else f"{shape} {dtype}"
        body.append([where, *cells, *(more(list(line.values())) if more else ())])
    names = [f"`{name}`" if kind == "rung" else name for name, kind in kinds.items()]
    return markdown([said("shape"), *names, *heads], body)


def rated(found: Iterable[Row], unit: str) -> list[Row]:
    """The rows that have a rate in this unit: a copy moves bytes and computes nothing."""
    return [row for row in found if row.kind != "limit" or unit == "TB/s"]


def unit(found: Iterable[Row]) -> str:
    """The one unit of a table: FLOPs where they limit most of the rungs, else the least bytes."""
    rungs = [row.limited_by_math for row in found if row.kind == "rung"]
    return "TFLOP/s" if 2 * sum(rungs) > len(rungs) else "TB/s"


def rate(row: Row, unit: str) -> str:
    """The row's rate in this unit, without it. A copy has bytes alone."""
    value = row.tflop_per_s if unit == "TFLOP/s" else row.tb_per_s
    return f"{value:.3g}" if value and value < 100 else f"{value:.0f}" if value else ""
