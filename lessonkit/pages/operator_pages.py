"""One page for each operator and GPU: the whole ladder of all its lessons, and the fastest at each shape.

Rows of one lesson at one shape come from the same rounds, and only within these a ratio is made.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lessonkit.base.markdown import markdown
from lessonkit.base.words import heads, later, listed, said, sentences, translated
from lessonkit.lesson import Lesson, shape_name, title
from lessonkit.measure import operator_rows, yardstick
from lessonkit.measure.rows import ELSEWHERE, Row
from lessonkit.measure.stale import Today, device_folders
from lessonkit.pages import pivots, plots, results, shares
from lessonkit.pages.plots import Picture
from lessonkit.pages.results import Timed

Size = tuple[str, str]  # shape and dtype, as results.place says them
Mark = Callable[[Row], str]  # what stands behind a figure: MARK if the row is old
MARK = "\\*"  # at a figure that was measured before the code changed
NAME_OF_LIMITS = "limits.md"  # the page that counts shares above 100%
UNJUDGED = "‡"  # in place of the ratio of an incomplete row
APART = "¶"  # at the ratio of a row of operators.csv whose times lie far apart
RATIOS_OF_STEPS = {"over its peers": "best peer, ms"}  # columns of steps' tables that hold ratios -> the peer's
# What a page of one operator says.
TITLE = later("{name}: every rung on {device}")
TERMS = later(
    "A rung is one version of the kernel in a lesson; a peer is a library's. A ratio is the time of the best peer over "
    "that of the fastest rung: above 1 the rung is faster. In tables of rates the fastest of a line is bold."
)
ROUNDS = later(
    "Rungs and peers of a lesson were timed in the same rounds. Rounds of different lessons differ by a few percent, "
    "so compare within a lesson."
)
LIMIT = later(
    "TB/s, copy and stream count the least bytes: each input and each result once. The streams are "
    "[measured]({streams}), and every share above 100% is [counted by its cause]({limits})."
)
ABOUT = later("\\* Measured before the code, the inputs or a peer of that row changed; the lesson's page says what.")
INCOMPLETE = later(
    "‡ Not judged: a peer's version was not recorded, or a peer could not be timed. The row is incomplete and shows no "
    "ratio until it is measured again with all of its peers. The lesson's page names the peer."
)
FROM_ELSEWHERE = later(
    "§ Timed in another lesson's rounds. The card's clock may have differed by a few percent, and so may the ratio."
)
FASTEST = later("The fastest rung at each shape")
SHARES = later("of the limit"), later("of the data sheet")
SHEET = later(
    "The share of the data sheet is of the bandwidth or the FLOPs that it states for the {card}, {stated}. Nothing "
    "exceeds it."
)
PEERS = later("Its peers, in {unit}")
LADDER = later("The whole ladder at {shape}, {dtype}")
EVERY = later("Every rung at every shape")
UNIT = later("In {unit}.")
HEADS = later(
    "operator | shape | fastest rung | rate | best peer | over it | over it, all shapes of that lesson | "
    "course_ops over its best peer"
)
MEASURED = later(
    "Rungs were measured with {versions}. With other versions they are compiled and checked without a GPU, and not "
    "timed."
)
SHIPPED = later("The last column is of course_ops: {measured}")
COMPILED = later("measured with Triton {version}.")
COMPILED_BY_TWO = later("measured with Triton {version}, but {operators} with Triton {other}.")
RANGE = later("{least} to {most} ({count} shapes)")
RANGE_OF = later("{least} to {most} ({count} of {all} shapes)")
MARKED = later(
    "{mark} Measured before the code, the inputs or a peer of that line changed; the operator's page says it."
)


@dataclass(frozen=True)
class Fastest:
    """The fastest rung at one shape, and the fastest peer beside it (results.beside)."""

    row: Row
    peer: Row | None
    rounds: tuple[Row, ...]  # all that was timed with it, and that peer

    @property
    def ratio(self) -> str:
        return ratio(self.row, self.peer)


def ratio(row: Row, peer: Row | None) -> str:
    """A row's ratio to the best peer. peer: any that was timed; beside one a row without a ratio is incomplete."""
    return f"{row.ratio_to_best_peer:.2f}" if row.ratio_to_best_peer else UNJUDGED if peer else ""


def marked(line: Mapping[str, object]) -> dict[str, object]:
    """A line of a step's table with UNJUDGED where a ratio is missing beside a peer."""
    return {
        name: UNJUDGED if value == "" and line.get(RATIOS_OF_STEPS.get(name, "")) else value
        for name, value in line.items()
    }


def footnotes(page: str, language: str = "") -> str:
    """Of a page that has an incomplete row, or a peer of other rounds."""
    notes = [INCOMPLETE] * (UNJUDGED in page) + [FROM_ELSEWHERE] * (ELSEWHERE in page)
    return "".join(f"\n{translated(note, language) if language else said(note)}\n" for note in notes)


def shipped(lessons: Iterable[Lesson], row: Row, peer: Row | None, found: Iterable[operator_rows.Row]) -> float:
    """The ratio of course_ops' operator to the best peer at a rung's shape; 0 if operators.csv does not say it.

    peer: the best that lessons know there. One that operators.csv lacks counts if it is faster than those it has.
    """
    if (ours := operator_rows.of_lessons(lessons, row.shape, row.dtype, found)) is None or not ours.ratio:
        return 0.0
    known = operator_rows.peer_times(ours)
    if peer and peer.ratio_to_best_peer and peer.rung.removesuffix(ELSEWHERE) not in known:
        return min(ours.ratio, peer.ms_p50 / ours.ms)
    return ours.ratio


@dataclass(frozen=True)
class Ladder:
    """The lessons of one operator that were measured on one GPU, in the order of the course, with today's rows."""

    name: str
    lessons: tuple[Timed, ...]

    def shipped(self, best: Fastest, found: Iterable[operator_rows.Row]) -> float:
        return shipped((lesson for _, lesson, _ in self.lessons), best.row, best.peer, found)

    def fastest(self) -> list[Fastest]:
        """For each shape and dtype, in the order of the lessons."""
        best: dict[tuple[str, str], Fastest] = {}
        for _, _, found in self.lessons:
            for row in (row for row in found if row.kind == "rung"):
                key = results.place(row)
                if key not in best or row.ms_p50 < best[key].row.ms_p50:
                    rounds = tuple(r for r in found if results.place(r) == key)
                    peers = [r for r in rounds if r.kind == "peer"]
                    best[key] = Fastest(row, min(peers, key=lambda r: r.ms_p50, default=None), rounds)
        return list(best.values())

    def main(self) -> Fastest:
        """The fastest rung at the main shape."""
        size = results.main_size(self.lessons)
        return next(best for best in self.fastest() if size in (None, results.place(best.row)))

    def contested(self) -> list[Fastest]:
        """The fastest at the shapes that the lesson of the main shape's fastest rung timed.

        At others its kernel did not take part: a rung there says nothing of the operator.
        """
        lesson = self.main().row.lesson
        shapes = {results.place(row) for name, _, found in self.lessons for row in found if name == lesson}
        return [best for best in self.fastest() if results.place(best.row) in shapes]


def ladders(folder: Path) -> list[Ladder]:
    """Every operator that has rows on this machine, in the order of the course."""
    grouped: dict[str, list[Timed]] = {}
    for name, lesson, found in results.measured(folder):
        order = [rung.__name__ for rung in lesson.rungs] + list(lesson.peers) + ["copy"]
        shapes = [shape_name(shape) for shape in lesson.benches]
        mine = [row for row in found if row.rung in order and row.shape in shapes]
        mine.sort(key=lambda row: (shapes.index(row.shape), order.index(row.rung)))
        if any(row.kind == "rung" for row in mine):
            grouped.setdefault(results.operator(name), []).append((name, lesson, mine))
    return [Ladder(operator, tuple(results.beside(lessons))) for operator, lessons in grouped.items()]


def file_name(operator: str) -> str:
    """attention_dq_alone.md: no spaces, small letters."""
    return f"{re.sub(r'[^a-z0-9]+', '_', operator.lower()).strip('_')}.md"


def pages(folder: Path, today: Today) -> dict[Path, str | Picture]:
    """The pages of one GPU, and their pictures."""
    made: dict[Path, str | Picture] = {}
    for ladder in ladders(folder):
        path = folder / file_name(ladder.name)
        picture = _picture(ladder)
        if picture:
            made[path.with_suffix(".png")] = picture
        made[path] = _page(ladder, folder.name, today, picture is not None)
    return made


def _page(ladder: Ladder, device: str, today: Today, picture: bool) -> str:
    main = results.main_size(ladder.lessons)
    old = {row: bool(today.why_old(row)) for _, _, found in ladder.lessons for row in found}

    def mark(row: Row) -> str:
        return f" {MARK}" if old[row] else ""

    parts = [
        f"# {said(TITLE).format(name=said(ladder.name), device=device)}\n",
        "\n".join(f"- {words}" for words in _how_to_read(ladder.name, old))
        + (f"\n\n{said(ABOUT)}" if any(old.values()) else "")
        + "\n",
        f"## {said(FASTEST)}\n",
        _fastest(ladder, mark) + shares.below(best.row for best in ladder.fastest()),
    ]
    if peers := [row for best in ladder.fastest() for row in best.rounds if row.kind == "peer"]:
        unit = pivots.unit(row for _, _, found in ladder.lessons for row in found)
        parts += [
            f"## {said(PEERS).format(unit=unit)}\n",
            pivots.pivot(peers, lambda row: f"{pivots.rate(row, unit)}{mark(row)}"),
        ]
    if picture:
        alt = plots.alt(said(ladder.name), ladder.main().rounds)
        parts.append(f"![{alt}]({file_name(ladder.name)[:-3]}.png)\n")
    if main and len(ladder.lessons) > 1:
        parts += [f"## {said(LADDER).format(shape=main[0], dtype=main[1])}\n", _rungs(ladder, main, mark)]
    parts.append(f"## {said(EVERY)}\n")
    for name, lesson, found in ladder.lessons:
        rungs = _lesson(found, [rung.__name__ for rung in lesson.rungs], mark)
        parts.append(f"### [{said(title(name))}]({name}.md) ({results.language(name)})\n\n{rungs}")
    page = "\n".join(parts)
    return page + footnotes(page)


def _how_to_read(operator: str, found: Collection[Row]) -> list[str]:
    """What the words and columns of a page mean."""
    counted = said(LIMIT).format(streams=f"{yardstick.LESSON}.md", limits=NAME_OF_LIMITS)
    limit = sentences(said(shares.LIMIT), counted, said(results.OUT_OF_REACH.get(operator, "")))
    return [said(TERMS), said(ROUNDS), limit, *_sheet(found)]


def _fastest(ladder: Ladder, mark: Mark) -> str:
    body = []
    for best in ladder.fastest():
        row, peer = best.row, best.peer
        rung = f"`{row.rung}` ({results.language(row.lesson)})"
        line = [" ".join(results.place(row)), rung, f"{row.ms_p50:.4g}{mark(row)}", row.rate]
        line += [*_shares(row), peer.rung if peer else ""]
        body.append([*line, f"{peer.ms_p50:.4g}{mark(peer)}" if peer else "", best.ratio])
    heads = [said("shape"), said("rung"), "ms", said("rate"), *map(said, SHARES)]
    return markdown([*heads, said("best peer"), said("its ms"), said("ratio")], body)


def _shares(row: Row) -> list[str]:
    """Cells: of the row's limit, and of what the data sheet states."""
    return [shares.of_limit(row), shares.of_sheet(row)]


def _sheet(found: Collection[Row]) -> list[str]:
    """A sentence with the rates of the card's data sheet that the rows' dtypes are held against; none if unknown."""
    if (chip := results.card(next(iter(found)))) is None:
        return []
    rates = results.roofs(chip, {row.dtype for row in found})
    stated = [f"{chip.bandwidth / 1e12:g} TB/s", *(f"{rate:.0f} TFLOP/s ({name})" for name, rate in rates.items())]
    return [said(SHEET).format(card=chip.name, stated=", ".join(stated))]


def _rungs(ladder: Ladder, main: tuple[str, str], mark: Mark) -> str:
    """One line a rung at one shape. A lesson's first rung has none before it: the lesson starts over."""
    body = []
    for name, lesson, found in ladder.lessons:
        before, peer = None, next((row for row in found if (*results.place(row), row.kind) == (*main, "peer")), None)
        for row in results.ladder(lesson, found, *main):
            over = f"{before.ms_p50 / row.ms_p50:.2f}{mark(before) or mark(row)}" if before else ""
            line = [f"[{name.split('.')[1]}]({name}.md)", f"`{row.rung}`", f"{row.ms_p50:.4g}{mark(row)}", row.rate]
            body.append([*line, *_shares(row), over, ratio(row, peer)])
            before = row
    heads = [said("lesson"), said("rung"), "ms", said("rate"), *map(said, SHARES), said("over the rung before")]
    shown = [row for _, lesson, found in ladder.lessons for row in results.ladder(lesson, found, *main)]
    return markdown([*heads, said("over the best peer")], body) + shares.below(shown)


def _lesson(found: Sequence[Row], order: Sequence[str], mark: Mark) -> str:
    """Shapes as rows: the rungs in their order, the best peer, and the fastest rung over it."""
    unit = pivots.unit(found)
    at: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        at.setdefault(results.place(row), []).append(row)

    def more(line: Sequence[Row]) -> list[str]:
        peers = [row for row in at[results.place(line[0])] if row.kind == "peer"]
        best = min(peers, key=lambda row: row.ms_p50, default=None)
        first = min(line, key=lambda row: row.ms_p50)
        return [f"{best.rung} {pivots.rate(best, unit)}{mark(best)}" if best else "", ratio(first, best)]

    rungs = [row for row in found if row.kind == "rung"]
    heads = [said("best peer"), said("ratio")]
    return f"{said(UNIT).format(unit=unit)}\n\n" + pivots.pivot(
        rungs, lambda row: f"{pivots.rate(row, unit)}{mark(row)}", more, heads, order
    )


def _picture(ladder: Ladder) -> Picture | None:
    """The rate over the sequence length: the fastest rung and the peers of its rounds."""
    rows = [row for best in ladder.fastest() for row in best.rounds]
    if pivots.unit(rows) != "TFLOP/s":
        return None
    ours = {best.row for best in ladder.fastest()}
    points = [
        ("the course", row) if row in ours else (row.rung, row) for row in rows if row.kind == "peer" or row in ours
    ]
    return plots.over_length(ladder.name, points, ours=("the course",))


def cards(today: Today) -> str:
    """reports/cards.md: a line for each operator, a column for each card that has rows."""
    folders = device_folders()
    every = [{ladder.name: ladder for ladder in ladders(folder)} for folder in folders]
    body, old, shown = list[list[str]](), False, list[Row]()
    for name in dict.fromkeys(name for found in every for name in found):
        main = results.main_size(next(found[name].lessons for found in every if name in found))
        there = [
            {results.place(best.row): best for best in found[name].fastest()} if name in found else {}
            for found in every
        ]
        size = _shared(there, main)
        line = [said(name), " ".join(size)]
        for folder, here in zip(folders, there, strict=True):
            best = here.get(size)
            mark = f" {MARK}" if best and today.why_old(best.row) else ""
            old |= bool(mark)
            shown += [best.row] if best else []
            page = f"[{said('page')}]({folder.name}/{file_name(name)})"
            line.append(said("{figures} ({page})").format(figures=_of_a_card(best) + mark, page=page) if best else "")
        body.append(line)
    about = said(
        "The fastest rung of each operator at one shape: its rate, the share of that card's own limit, and in brackets "
        "the share of what the card's data sheet states. The last figure says how many times as fast as the best peer "
        "it is. Cards were measured on different machines, with the versions that their pages name. An empty cell was "
        "not measured there."
    )
    table = markdown([said("operator"), said("shape"), *(folder.name for folder in folders)], body)
    marked = said("{mark} Measured before the code or the inputs changed.").format(mark=MARK)
    notes = shares.below(shown) + footnotes(table) + f"\n{marked}\n" * old
    return f"# {said('Every card')}\n\n{about}\n\n{table}{notes}"


def _shared(there: Sequence[Mapping[Size, Fastest]], main: Size | None) -> Size:
    """The size that most cards have measured: of several the main one, or else the largest."""

    def rank(size: Size) -> tuple[int, bool, int]:
        having = [here[size].row.bytes for here in there if size in here]
        return len(having), size == main, max(having)

    return max((size for here in there for size in here), key=rank)


def _of_a_card(best: Fastest) -> str:
    over = said("{ratio} of {peer}").format(ratio=best.ratio, peer=best.peer.rung) if best.peer else ""
    sheet = f" ({found})" if (found := shares.of_sheet(best.row)) else ""
    return f"`{best.row.rung}` {best.row.rate}, {shares.of_limit(best.row)}{sheet}" + f", {over}" * bool(over)


def compiled_with(found: Sequence[operator_rows.Row], language: str) -> str:
    """Which Triton the rows of course_ops were measured with, and which operators with another."""
    by: dict[str, list[str]] = {}
    for row in found:
        version = row.versions.partition("triton ")[2].partition(",")[0]
        by.setdefault(version, []).append(f"`{row.operator}` {row.direction}")
    usual, *others = sorted(by, key=lambda version: -len(by[version]))
    if not others:
        return translated(COMPILED, language).format(version=usual)
    operators = listed(sorted({name for version in others for name in by[version]}), wanted=language)
    return translated(COMPILED_BY_TWO, language).format(version=usual, operators=operators, other=", ".join(others))


def overview(language: str, today: Today) -> str:
    """README's results: a line for each operator, at the largest shape that most of its lessons time."""
    parts = []
    for folder in device_folders():
        body, used = [], set[str]()
        ships = operator_rows.read(folder / operator_rows.FILE)
        for ladder in ladders(folder):
            all_shapes, best, contested = ladder.fastest(), ladder.main(), ladder.contested()
            row, peer = best.row, best.peer
            used |= {f"torch {b.row.torch.partition('+')[0]}, Triton {b.row.triton}" for b in all_shapes}
            ratios = [b.row.ratio_to_best_peer for b in contested if b.row.ratio_to_best_peer]
            old = f" {MARK}" * any(today.why_old(r) for b in all_shapes for r in (b.row, b.peer) if r)
            link = f"[{ladder.name}](reports/{folder.name}/{file_name(ladder.name)}){old}"
            line = [link, " ".join(results.place(row)), f"`{row.rung}` ({results.language(row.lesson)})", row.rate]
            line += [peer.rung if peer else "", best.ratio]
            every = best.ratio
            if len(ratios) > 1:
                words = RANGE if len(ratios) == len(contested) else RANGE_OF
                every = translated(words, language).format(
                    least=f"{min(ratios):.2f}", most=f"{max(ratios):.2f}", count=len(ratios), all=len(contested)
                )
            reached = ladder.shipped(best, ships)
            body.append([*line, every, f"{reached:.2f}" if reached else ""])
        if body:
            marked = f"\n{translated(MARKED, language).format(mark=MARK)}\n" * any(MARK in line[0] for line in body)
            measured = translated(MEASURED, language).format(versions="; ".join(sorted(used)))
            if ships:
                measured += f"\n\n{translated(SHIPPED, language).format(measured=compiled_with(ships, language))}"
            table = markdown(heads(HEADS, language), body)
            parts.append(f"### {folder.name}\n\n{measured}\n\n{table}{footnotes(table, language)}{marked}")
    return "\n".join(parts) or "No GPU has been measured yet.\n"
