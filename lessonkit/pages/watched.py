"""reports/<gpu>/sanitized.md: which tool has watched which kernels of today's code, so that gaps are seen."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lessonkit.base import chips
from lessonkit.base.markdown import markdown
from lessonkit.base.words import later, listed, said, sentences
from lessonkit.lesson import Lesson
from lessonkit.measure import coverage
from lessonkit.measure.coverage import Cell

WHAT = later(
    "Each lesson and operator, and each tool. The rows: [sanitized.csv](sanitized.csv), [beside.csv](beside.csv)."
)
HOW = later(
    "`python -m lessonkit sanitize` and `python -m lessonkit beside` run what is missing. Old: code or inputs have "
    "changed since. Argued: [sanitize.toml](../../lessonkit/measure/sanitize.toml) says why the report is no error. An "
    "empty cell: the tool has nothing to watch there."
)


def page(folder: Path, lessons: Mapping[str, Lesson]) -> str:
    """The page of one GPU; of a card that the table of chips does not know, as if it could do what Hopper can."""
    chip = chips.CHIPS.get(folder.name.rpartition("-")[2])
    capability = chip.target if chip and isinstance(chip.target, int) else 90
    found = list(coverage.cells(folder, lessons.items(), capability))
    states = {(cell.name, cell.direction, cell.tool): cell.state for cell in found}
    body = [
        [f"{name} {direction}".strip(), *(states.get((name, direction, tool), "") for tool in coverage.COLUMNS)]
        for name, direction in dict.fromkeys((cell.name, cell.direction) for cell in found)
    ]
    heads = [said("lesson or operator"), *map(_head, coverage.COLUMNS)]
    title = said("Sanitizers and neighbours: what has run")
    return f"# {title}\n\n{sentences(said(WHAT), said(HOW))}\n\n{_counts(found)}\n\n" + markdown(heads, body)


def _head(tool: str) -> str:
    return said(tool) if tool == coverage.NEIGHBOUR else tool


def _counts(found: Sequence[Cell]) -> str:
    """How many cells are of today's code, a tool at a time."""
    words, parts = said("{tool} {count} of {all}"), []
    for tool in coverage.COLUMNS:
        mine = [cell for cell in found if cell.tool == tool]
        parts.append(words.format(tool=_head(tool), count=sum(not cell.again for cell in mine), all=len(mine)))
    return said("Of today's code: {counts}.").format(counts=listed(parts))
