"""reports/<gpu>/operators.md: seconds of a first call of course_ops' operators, their memory, and unsteady times."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from lessonkit.base.markdown import markdown
from lessonkit.base.words import later, said
from lessonkit.measure.operator_rows import Row
from lessonkit.measure.rows import DISTURBED
from lessonkit.pages import shipped
from lessonkit.pages.operator_pages import MARK

NAME = "operators.md"
COMPILED_S = 0.1  # a first call that took longer has compiled a kernel; others found theirs compiled
TITLE = later("course_ops on {device}: first calls and peak memory")
ABOUT = later(
    "Made of [operators.csv](operators.csv). How fast the operators are beside their peers: "
    "[course_ops](../../course_ops/README.md#how-fast)."
)
CALLS = later(
    "A first call compiles the kernels that its arguments need, unless an earlier call has compiled them or Triton's "
    "cache on disk has them. The seconds are of the shapes whose first call took more than {least} s. The first calls "
    "at the other shapes found their kernels compiled. Importing `course_ops` is not counted. The rows do not say how "
    "many processes compiled at the same time: with an idle CPU a call may be faster."
)
MEMORY = later(
    "Peak memory is the most that PyTorch's allocator has allocated during one call after the first, less what it had "
    "allocated before that call. So it counts the results and the scratch memory, and not the arguments. The tensors "
    "that a forward saves are arguments of the backward. Each line has the largest figure of all shapes, in MB (10^6 "
    "bytes), and the shape that needs it."
)
OLD = later("{mark} Some of these rows were measured before the code, the inputs or a peer changed.")
APART = later("Times that lie far apart")
HOW_FAR = later(
    "A median does not show that the calls at a shape take different times. Here the slowest of the middle three "
    "fifths of the calls took more than {times} times as long as the fastest. Either another process used the "
    "GPU, or the call itself varies."
)


def page(folder: Path) -> str:
    """The page of one GPU; empty without rows of operators."""
    if not (found := shipped.rows(folder)):
        return ""
    heads = ["course_ops.", *map(said, (later("direction"), later("first calls that compiled"), later("median, s"),
                                        later("longest, s"), later("peak memory, MB"), later("at")))]  # fmt: skip
    table = markdown(heads, _lines(found))
    parts = [
        f"# {said(TITLE).format(device=folder.name)}\n",
        f"{said(ABOUT)}\n",
        f"{said(CALLS).format(least=COMPILED_S)}\n",
        f"{said(MEMORY)}\n",
        table,
        *[f"{said(OLD).format(mark=MARK)}\n"] * (MARK in table),
        *_apart(found),
    ]
    return "\n".join(parts)


def _lines(found: Sequence[Row]) -> Iterator[list[str]]:
    """Each operator and direction over all of its shapes."""
    for s, mark in shipped.summaries(found):
        mine = [row for row in found if (row.operator, row.direction) == (s.operator, s.direction) and not row.error]
        seconds = [row.first_call_s for row in mine if row.first_call_s > COMPILED_S]
        compiled = said("{count} of {all}").format(count=len(seconds), all=len(mine))
        line = [f"`{s.operator}`", s.direction, f"{compiled}{mark}"]
        line += [f"{median(seconds):.1f}", f"{max(seconds):.1f}"] if seconds else [""] * 2
        most = max(mine, key=lambda row: row.peak_memory, default=None)
        yield [*line, f"{most.peak_memory / 1e6:.4g}" if most else "", shipped.place(most) if most else ""]


def _apart(found: Sequence[Row]) -> Iterator[str]:
    """The rows whose medians say little, under a heading; nothing if there is none."""
    body = [
        [f"`{row.operator}`", row.direction, shipped.place(row), *(f"{ms:.4g}" for ms in (row.p20, row.ms, row.p80))]
        for row in found
        if row.disturbed
    ]
    if body:
        percentiles = [said("{percent}th percentile, ms").format(percent=percent) for percent in (20, 80)]
        heads = ["course_ops.", said("direction"), said("at"), percentiles[0], said("median, ms"), percentiles[1]]
        yield f"## {said(APART)}\n"
        yield f"{said(HOW_FAR).format(times=DISTURBED)}\n"
        yield markdown(heads, body)
