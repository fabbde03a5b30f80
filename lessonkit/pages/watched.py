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
    "A line for each lesson and each operator of `course_ops`, a column for each tool. The rows are in "
    "[sanitized.csv](sanitized.csv) and [beside.csv](beside.csv). `python -m lessonkit sanitize` and `python -m "
    "lessonkit beside` run what is missing."
)
WATCHES = {  # what a column is of; Day 5's lesson on sanitizers shows each
    "memcheck": later("addresses in global, shared and local memory: outside of every allocation, or misaligned"),
    "racecheck": later("shared memory: two threads access one byte, at least one of them writes, and no barrier is "
                       "between them"),
    "initcheck": later("global memory that is read before anything has written it"),
    "synccheck": later("barriers that some threads never reach, and wrong masks of lanes"),
    "consan": later("Triton's own: shared memory of TMA, wgmma and mbarriers, and a deadlock of mbarriers"),
    "iisan": later("Triton's own: the innermost coordinate of a TMA copy has to be a multiple of 16 bytes"),
    coverage.NEIGHBOUR: later("no sanitizer: kernels with mbarriers, with loops that wait for other programs or with "
                              "early launches are repeated while another process uses the GPU; their answers have to "
                              "stay the same. Those of lesson02_matmul_persistent's `warp_specialized` do not: a fault "
                              "of Triton, which day 5's lesson04_neighbours explains"),
}  # fmt: skip
ARGUED, UNARGUED = later("n argued"), later("**n not argued**")
CELLS = {  # what a cell says
    coverage.CLEAN: later("today's code has run under the tool, which reported nothing"),
    ARGUED: later("the tool reported n times, and [sanitize.toml](../../lessonkit/measure/sanitize.toml) says for "
                      "each report why it is no error"),
    UNARGUED: later("reports that nothing explains yet: each is an error, or its argument is missing"),
    coverage.OLD: later("the code or the inputs have changed since the run"),
    coverage.NOT_RUN: later("no run is stored"),
}  # fmt: skip
EMPTY = later("An empty cell: the tool has nothing to watch there.")


def page(folder: Path, lessons: Mapping[str, Lesson]) -> str:
    """The page of one GPU."""
    found = cells(folder, lessons)
    states = {(cell.name, cell.direction, cell.tool): cell.state for cell in found}
    body = [
        [_label(name, direction), *(states.get((name, direction, tool), "") for tool in coverage.COLUMNS)]
        for name, direction in dict.fromkeys((cell.name, cell.direction) for cell in found)
    ]
    return "\n".join([
        f"# {said('Sanitizers and neighbours: what has run')}\n",
        f"{said(WHAT)}\n",
        f"{counts(found)}\n",
        markdown([said("tool"), said("what it watches")], ([_head(t), said(what)] for t, what in WATCHES.items())),
        markdown([said("cell"), said("meaning")], ([said(state), said(what)] for state, what in CELLS.items())),
        f"{said(EMPTY)}\n",
        markdown([said("lesson or operator"), *map(_head, coverage.COLUMNS)], body),
    ])  # fmt: skip


def _label(name: str, direction: str) -> str:
    """Of a row: a day's lesson without its day, so that a phone shows a column beside it."""
    folder, _, stem = name.partition(".")
    return f"{stem if folder.startswith('day') else name} {direction}".strip()


def cells(folder: Path, lessons: Mapping[str, Lesson]) -> list[Cell]:
    """Of one GPU; of a card that the table of chips does not know, as if it could do what Hopper can."""
    chip = chips.of_gpu(folder.name)
    capability = chip.target if chip and isinstance(chip.target, int) else 90
    return list(coverage.cells(folder, lessons.items(), capability))


def _head(tool: str) -> str:
    return said(tool) if tool == coverage.NEIGHBOUR else tool


def counts(found: Sequence[Cell]) -> str:
    """How many cells are of today's code, a tool at a time, and which tools have reports without an argument."""
    words, parts, open_ = said("{tool} {count} of {all}"), [], []
    for tool in coverage.COLUMNS:
        mine = [cell for cell in found if cell.tool == tool]
        parts.append(words.format(tool=_head(tool), count=sum(not cell.again for cell in mine), all=len(mine)))
        if errors := sum(cell.counts[-1] for cell in mine if not cell.again):
            open_.append(f"{_head(tool)} {errors}")
    ran = said("Of today's code ran: {counts}.").format(counts=listed(parts))
    unargued = said("Reports that are not argued: {counts}.").format(counts=listed(open_) if open_ else said("none"))
    return sentences(ran, unargued)
