"""How fast the operators of course_ops are: from operators.csv, or else from the lessons whose last rungs they ship.

The README of course_ops has a line an operator (`brief`), its GUIDE a line for each direction with the worst shape.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lessonkit.base.markdown import markdown
from lessonkit.base.words import heads, later, listed, translated
from lessonkit.lesson import kernels
from lessonkit.measure import operator_rows
from lessonkit.measure.operator_rows import Summary
from lessonkit.measure.stale import Today, device_folders
from lessonkit.pages import operator_pages, results
from lessonkit.pages.operator_pages import APART, MARK, UNJUDGED

# The operators of results.OPERATORS that each function computes, forward first.
SHIPPED = {
    "attention": ("attention", "attention backward", "decoding"),
    "softmax": ("softmax", "softmax backward"),
    "layer_norm": ("layernorm", "layernorm backward"),
    "rms_norm": ("rmsnorm", "rmsnorm backward"),
    "add_norm": ("add + layernorm", "add + layernorm backward"),
    "cross_entropy": ("cross-entropy", "cross-entropy backward"),
    "gelu": ("GELU",),
    "dropout": ("dropout",),
    "matmul": ("matmul", "skinny matmul"),
    "linear": ("epilogue", "epilogue backward"),
    "grouped_matmul": ("grouped matmul",),
    "matmul_fp8": ("fp8 matmul",),
    "quantize": ("quantisation",),
    "scan": ("scan",),
}
LANGUAGES = ("Triton", "Gluon")  # what course_ops' kernels are written in
HEADS = later("course_ops. | operator | shape | ms | best peer | its ms | ratio")
MARKED = later("{mark} Measured before the code, the inputs or a peer of that line changed.")
FROM_LESSONS = later("""\
Rows of the lessons at large shapes: the fastest rung there, whose kernel is in this package, beside the fastest peer
that was timed in the same rounds. Above a ratio of 1 ours is faster. The host's time of a call is not in the rows: it
is hidden behind a kernel that takes longer, and shows at small shapes (day 1, lesson 8 measures it).
""")
FROM_ROWS = later("""\
[operators.csv](../reports/{device}/operators.csv) has each operator, timed in the same rounds as its peers. The
shapes are sizes of published models, sizes that hurt, and random ones that change with each release. A ratio is
the fastest peer's time over ours: above 1 ours is faster. Shapes under 20 microseconds have rows and are not judged
here. The host's time of a call is not in the rows: it is hidden behind a kernel that takes longer. The rows were
{measured}
""")
MORE = later("[Seconds of a first call, and peak memory](../reports/{device}/operators.md).")
UNSTEADY = later(
    "{mark} The times at this shape lie far apart, which a ratio of medians does not show: "
    "[the times](../reports/{device}/operators.md)."
)
NO_RATIO = later(
    "{mark} No ratio at so many shapes: no peer takes the shape, or one was not installed, or the operator failed. The "
    "columns `absent` and `error` of operators.csv say which."
)
FURTHER = later(
    "Not among the peers of this table: {peers}. Rungs of lessons were timed beside it, and the operator's page in "
    "[reports](../reports/README.md) holds the fastest rung against it."
)
FURTHER_PEER = later("{peer} (`{operator}`)")
HEADS_OF_ROWS = later(
    "course_ops. | direction | shapes | mean ratio | worst | at | its best peer | under 0.97 | no ratio"
)
BRIEF = later(
    "{device}: the fastest peer's time over ours, so above 1 ours is faster. A cell has the geometric mean over the "
    "shapes, and the worst shape in brackets. [Every ratio](GUIDE.md) says which shape and which peer that "
    "is."
)
SOME_OLD = later("{mark} Some of these shapes were measured before the code, the inputs or a peer changed.")
SOME_APART = later("{mark} The times at this shape lie far apart.")
DECODING = later("decoding")
NOT_MEASURED = later("No GPU has been measured yet.")


def brief(language: str) -> str:
    """A line for each operator, for each GPU with an operators.csv."""
    parts = []
    for folder in device_folders():
        cells: dict[str, dict[str, str]] = {}
        for s, mark in summaries(rows(folder)):
            as_forward = s.direction == DECODING  # a line of its own
            name = f"`{s.operator}`" + f" {translated(DECODING, language)}" * as_forward
            cell = f"{s.mean:.2f} ({worst(s)[0]}){mark}" if s.shapes else ""
            cells.setdefault(name, {})["forward" if as_forward else s.direction] = cell
        if cells:
            heads = ["course_ops.", translated("forward", language), translated("backward", language)]
            body = ([name, *(cell.get(head, "") for head in ("forward", "backward"))] for name, cell in cells.items())
            table = markdown(heads, body)
            marked = ((MARK, SOME_OLD), (APART, SOME_APART))
            notes = [translated(note, language).format(mark=mark) for mark, note in marked if mark in table]
            about = translated(BRIEF, language).format(device=folder.name)
            parts.append(
                "\n".join([f"{about}\n", table, *[(" " if language == "en" else "").join(notes) + "\n"] * bool(notes)])
            )
    return "\n".join(parts) or f"{translated(NOT_MEASURED, language)}\n"


def speed(language: str, today: Today) -> str:
    """A table for each GPU: of operators.csv where there is one, else of the lessons' rows."""
    parts = []
    for folder in device_folders():
        table = from_rows(folder, language) or from_lessons(folder, language, today)
        if table:
            parts.append(f"### {folder.name}\n\n{table}")
    return "\n".join(parts) or f"{translated(NOT_MEASURED, language)}\n"


def rows(folder: Path) -> list[operator_rows.Row]:
    """Of operators.csv, without shapes that are asked no longer: the random ones of the last release."""
    asked = operator_rows.by_key()
    return [row for row in operator_rows.read(folder / operator_rows.FILE) if row.key in asked]


def summaries(found: Sequence[operator_rows.Row]) -> list[tuple[Summary, str]]:
    """Each operator and direction over all of its shapes; with MARK if the code of one of them has changed since.

    Operators come in the order of the rows, and the directions of one stand together.
    """
    missing = operator_rows.missing(found, operator_rows.cases())
    old = {case.key[:2] for case in missing if case.key in {row.key for row in found}}
    every = operator_rows.summaries(found)
    place = list(dict.fromkeys(s.operator for s in every))
    every.sort(key=lambda s: place.index(s.operator))
    return [(s, f" {MARK}" * ((s.operator, s.direction) in old)) for s in every]


def from_rows(folder: Path, language: str) -> str:
    """Each operator and direction: geometric mean, the worst shape, what is behind the peers."""
    body = []
    for s, mark in summaries(rows(folder)):
        line = [f"`{s.operator}`", s.direction, f"{s.shapes}{mark}", f"{s.mean:.2f}" if s.shapes else ""]
        line += [*worst(s), f"{s.share_behind:.0%}"] if s.worst else [""] * 4
        body.append([*line, f"{s.failed} {UNJUDGED}" if s.failed else ""])
    if not body:
        return ""
    table = markdown(heads(HEADS_OF_ROWS, language), body)
    tell = partial(translated, language=language)
    named = (tell(FURTHER_PEER).format(peer=peer, operator=operator) for operator, peer in further_peers())
    further = listed(named, wanted=language)
    notes = [
        tell(MORE).format(device=folder.name),
        *[tell(FURTHER).format(peers=further)] * bool(further),
        *[tell(NO_RATIO).format(mark=UNJUDGED)] * (UNJUDGED in table),
        *[tell(UNSTEADY).format(mark=APART, device=folder.name)] * (APART in table),
        *[tell(MARKED).format(mark=MARK)] * (MARK in table),
    ]
    measured = operator_pages.compiled_with(rows(folder), language)
    return "\n".join(
        [tell(FROM_ROWS).format(device=folder.name, measured=measured), table, *(f"{note}\n" for note in notes)]
    )


def worst(s: Summary) -> list[str]:
    """Cells: the ratio at the worst shape, that shape, and its best peer."""
    if s.worst is None:
        return [""] * 3
    return [f"{s.worst.ratio:.2f}" + f" {APART}" * s.worst.disturbed, place(s.worst), s.worst.best_peer]


def place(row: operator_rows.Row) -> str:
    """Shape, dtype and data, if these are not random."""
    return f"{row.shape} {row.dtype}" + f", {row.data}" * (row.data != "random")


def further_peers() -> list[tuple[str, str]]:
    """(operator, peer) of each peer that only lessons time."""
    found = dict[tuple[str, str], None]()
    for op in operator_rows.operators():
        for _, lesson in kernels():
            if operator_rows.is_asked(op, lesson):
                mine = {**op.problem.peers, **op.peers}
                found |= dict.fromkeys((op.name, peer) for peer in lesson.peers if peer not in mine)
    return list(found)


def from_lessons(folder: Path, language: str, today: Today) -> str:
    """Each operator at the largest shape that most of its lessons measured, beside its best peer.

    ms: of the fastest rung there, whose kernel course_ops ships. ratio: the peer's ms over ours.
    """
    found = {contest.name: contest for contest in results.contests(folder, LANGUAGES)}
    body = []
    for function, names in SHIPPED.items():
        for contest in (found[name] for name in names if name in found):
            best, peer = contest.best, contest.peer
            if peer is None:
                continue
            old = f" {MARK}" * bool(today.why_old(best) or today.why_old(peer))
            line = [f"`{function}`", contest.name, f"{contest.shape} {contest.dtype}", f"{best.ms_p50:.4g}{old}"]
            body.append([*line, peer.rung, f"{peer.ms_p50:.4g}", operator_pages.ratio(best, peer)])
    if not body:
        return ""
    marked = f"\n{translated(MARKED, language).format(mark=MARK)}\n" * any(line[3].endswith(MARK) for line in body)
    table = markdown(heads(HEADS, language), body)
    return translated(FROM_LESSONS, language) + "\n" + table + operator_pages.footnotes(table, language) + marked
