"""What the final report says: what was built, how fast it is, why, and what did not work. Made of rows and fields."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from lessonkit.base import device
from lessonkit.base.files import REPORTS
from lessonkit.base.words import later, listed, said, sentences, speaking
from lessonkit.exercise import progress
from lessonkit.lesson import Steps, discover, kernels, title
from lessonkit.measure import operator_rows
from lessonkit.measure.rows import ELSEWHERE, Row
from lessonkit.measure.stale import Today, device_folders
from lessonkit.pages import checked, final, guides, operator_pages, plots, predictions, shares, shipped
from lessonkit.pages.final import Block
from lessonkit.pages.operator_pages import MARK, Fastest, Ladder
from lessonkit.pages.plots import Picture
from lessonkit.pages.results import OUT_OF_REACH, Contest, bound, contests, language, measured
from lessonkit.pages.roofline import in_words as roofs_in_words
from lessonkit.pages.roofline import roofline

NEAR = 90  # percent of the limit: what is left is worth nobody's hour
EVEN = 0.97  # of the best peer: what two runs differ by
GAIN = 1.02  # over the rung before: less is nothing
WORST = 5  # operators that are listed where a library is faster: the PDF has two pages
PYTHON = ("Triton", "Gluon")  # one ladder climbs in these; an operator without them is told in its own language
OLD_SHIPS = later("\\* Some of these shapes were measured before the code, the inputs or a peer changed.")
UNSTEADY = later("¶ The times at this shape lie far apart, which a ratio of medians does not show.")
WAITS = {  # what helps, by what binds
    "memory": later("fewer bytes in all, or more of them in flight"),
    "compute": later("matmuls in flight while loads, softmax and epilogue run"),
    "latency": later("more bytes in flight: wider loads, more programs on an SM"),
    "latency beside matmuls": later(
        "more tiles than SMs, by smaller tiles or split-K; then matmuls in flight while loads and epilogue run"
    ),
    "latency beside FMAs": later("smaller tiles or parts of K, so that every SM has work, and loads under the FMAs"),
    "launch": later("fewer launches: fusion, a graph, a larger batch"),
}


def build(folder: Path, chosen: str = "", today: Today | None = None) -> tuple[str, list[Block]]:
    """(title, blocks) of the report on one machine's rows.

    chosen: the operator whose ladder is told. Raises ValueError if the machine has no rows, or none of that operator.
    """
    found, today = contests(folder), today or Today(kernels())
    if not found:
        words_ = said("no rows in {folder}: `python -m lessonkit bench` writes them on a GPU")
        raise ValueError(words_.format(folder=folder))
    by = {c.name: c for c in found}
    if chosen and chosen not in by:
        words_ = said("no rows of {operator}; there are {known}")
        raise ValueError(words_.format(operator=repr(chosen), known=", ".join(by)))
    name = chosen or next((op for op in ("attention", "matmul", "softmax") if op in by), found[0].name)
    story = {c.name: c for c in contests(folder, PYTHON)}.get(name, by[name])
    every_ladder = operator_pages.ladders(folder)
    alone = [ladder.name for ladder in every_ladder if ladder.name not in by]
    pairs = [pair for _, lesson, mine in measured(folder) for pair in predictions.compared(lesson, mine)]
    ships = shipped.rows(folder)
    slower = _slower(every_ladder, ships)
    behind = _behind(slower)
    every = [_line(c, today) for c in found]
    blocks = [
        Block(text=_measured_on(found)),
        Block(heading=said("What was found"), items=tuple(_findings(found, alone, pairs, ships))),
        *_one_ladder(story, today),
    ]
    if failed := [pair for pair in pairs if pair.off]:
        worst = sorted(failed, key=lambda pair: min(pair.ratio, 1 / pair.ratio))[:3]
        blocks.append(Block(heading=said("Predictions that failed most"), items=tuple(map(_failed, worst))))
    roof = roofline(folder)
    limits = roofs_in_words(list(roof.rows)) if roof else ""
    blocks.append(Block(heading=said("What limits, and tuning"), text=sentences(limits, _tuning(folder))))
    blocks.append(Block(heading=said("How it was checked"), items=tuple(checked.lines(folder))))
    blocks.append(Block(heading=said("Where a library is faster, and the next hour"), page=True,
                        text=sentences(_next(behind), *_left_out(slower),
                                      shares.briefly(b.row for _, b in behind[:WORST])),
                        table=tuple(_loss(*pair, today) for pair in behind[:WORST])))  # fmt: skip
    if ships:
        blocks.append(_what_ships(ships))
    legend = _marks(found, [*every, *(line for b in blocks for line in b.table if "course_ops." not in line)])
    blocks.append(Block(heading=said("Every operator"), table=tuple(every), items=(sentences(*legend),)))
    if done := progress.by_folder():
        blocks.append(
            Block(heading=said("Exercises"), text=_exercises_text(done), table=tuple(_exercises(done)), own=True)
        )
    name = said("GPU kernels in five days: what was built, how fast it is ({device})")
    return name.format(device=folder.name), blocks


def _one_ladder(story: Contest, today: Today) -> Iterator[Block]:
    """An operator's rungs at one shape: in words, as a figure, and as a table."""
    stars = [" *" * bool(today.why_old(row)) for row in story.rungs]
    data = [
        (row.lesson, f"{row.rung}{star}", shares.percent(row)) for row, star in zip(story.rungs, stars, strict=True)
    ]
    heading = said("One ladder: {operator} at {shape}, {dtype}")
    yield Block(
        heading=heading.format(operator=said(story.name), shape=story.shape, dtype=story.dtype),
        text=_story(story, today),
    )
    yield Block(figure="ladder", alt=_ladder(story, stars), data=data, draw=partial(_draw_story, story, stars))
    yield Block(table=tuple(_lessons(story, today)), items=tuple(_nothing(story, today)))


def _what_ships(ships: Sequence[operator_rows.Row]) -> Block:
    """course_ops over its peers, with the marks that its table uses."""
    lines = tuple(_shipped(ships))
    cells = "".join(cell for line in lines for cell in line.values())
    marks = [said(text) for text in (UNSTEADY, OLD_SHIPS) if text[: text.index(" ")] in cells]
    return Block(
        heading=said("What ships"),
        text=sentences(*_ships(ships)),
        table=lines,
        items=(sentences(*marks),) * bool(marks),
    )


def pages(folder: Path, today: Today) -> dict[Path, str | Picture]:
    """The report that is kept beside one machine's rows, without what is a learner's own."""
    if not contests(folder):
        return {}
    name, blocks = build(folder, today=today)
    figures = {folder / final.picture(b): plots.plot(b.draw, b.data) for b in blocks if b.draw}
    return {folder / "final_report.md": final.as_markdown(name, blocks)} | figures


def write_report(chosen: str = "") -> list[Path]:
    """Write it from this machine's rows, or where it has none from committed ones; without a GPU to reports/cpu.

    In English: the PDF's font has no other letters.
    """
    own = REPORTS / device.name()
    source = own if any(measured(own)) else next(iter(device_folders()), own)
    with speaking("en"):
        return final.write(own, *build(source, chosen))


# ---- Page one: what was found ---------------------------------------------------------------------------------------


def _measured_on(found: Sequence[Contest]) -> str:
    where = said(
        "Measured on {gpu}, driver {driver}, CUDA {cuda}, torch {torch}, triton {triton}. A rung is one version of a "
        "kernel in a lesson, and a peer is a library's kernel ({peers}). Times are medians with the L2 flushed, of "
        "rungs and peers in the same rounds. A ratio is a peer's time over ours: above 1 ours is faster."
    ).format(**vars(found[0].best), peers=listed(_packages(found)))
    return sentences(where, said(shares.LIMIT))


def _packages(found: Sequence[Contest]) -> list[str]:
    """Of the peers, with their versions: a package may be named with a dash or an underscore."""
    rows = (row for c in found for _, _, mine in c.lessons for row in mine if row.kind == "peer")
    return sorted({each for row in rows for each in row.peer_version.replace("_", "-").split(", ") if each})


def _ratio(row: Row) -> float:
    """As pages round it: what is counted is what is shown."""
    return round(row.ratio_to_best_peer, 2)


def _percent(row: Row) -> float:
    """The share of the limit with the decimal that tells on which side of NEAR it is."""
    return round(shares.percent(row), 1)


def _share(row: Row) -> str:
    """`97%`, `89.9%` beside NEAR, or `103% †`."""
    percent = _percent(row)
    return shares.shown(percent, digits=int(abs(percent - NEAR) < 1))


def _findings(
    found: Sequence[Contest],
    alone: Sequence[str],
    pairs: Sequence[predictions.Compared],
    ships: Sequence[operator_rows.Row],
) -> Iterator[str]:
    """Three sentences: against libraries, against the machine, against the predictions.

    alone: operators that no library has.
    """
    raced = sorted((c for c in found if c.best.ratio_to_best_peer), key=lambda c: c.best.ratio_to_best_peer)
    ahead = [c for c in raced if _ratio(c.best) >= 1]
    lost = [f"{said(c.name)} {_ratio(c.best):.2f}{_reached(c, ships)}" for c in raced if _ratio(c.best) < EVEN]
    unjudged = [said(c.name) for c in found if c not in raced]
    top = listed(f"{said(c.name)} {_ratio(c.best):.2f}" for c in reversed(ahead[-3:]))
    words = said(
        "Against the best library: of {judged} operators {ahead} are at least as fast at their main shape (most: "
        "{top}), and {even} are behind by no more than two runs differ, which is {spread}."
    ).format(
        judged=len(raced), ahead=len(ahead), top=top, even=len(raced) - len(ahead) - len(lost),
        spread=f"{1 - EVEN:.0%}",
    )  # fmt: skip
    slower = said("Slower: {operators}.").format(operators=listed(lost))
    blank = said("Not judged, since a peer's version or time is missing: {operators}.")
    without = said("No library has {operators}.").format(operators=listed(map(said, alone), ";")) * bool(alone)
    yield sentences(words, slower * bool(lost), blank.format(operators=listed(unjudged)) * bool(unjudged), without)
    near = [c for c in found if _percent(c.best) >= NEAR]
    far = sorted((c for c in found if c not in near), key=lambda c: _percent(c.best))
    below = listed(f"{said(c.name)} {_share(c.best)}" for c in far)
    words = said("Against the machine: {near} of {all} reach {percent}% of their limit.")
    words = words.format(near=len(near), all=len(found), percent=NEAR)
    reach = listed(said(c.name) for c in far if c.name in OUT_OF_REACH)
    never = said("The limit counts the least bytes, which no algorithm of {operators} reaches (each page says why).")
    never = never.format(operators=reach) * bool(reach)
    yield sentences(words, said("Below: {operators}.").format(operators=below) * bool(far), never)
    if pairs:
        held = [pair for pair in pairs if not pair.off]
        fast = sum(pair.ratio > 1 for pair in pairs if pair.off)
        yield said(
            "Against the predictions: {held} of {all} rates are within {tolerance}; {higher} are higher and {lower} "
            "lower, each with its reason on the lesson's page."
        ).format(
            held=len(held), all=len(pairs), tolerance=f"{predictions.TOLERANCE:.0%}", higher=fast,
            lower=len(pairs) - len(held) - fast,
        )  # fmt: skip


def _reached(c: Contest, ships: Sequence[operator_rows.Row]) -> str:
    """What course_ops' operator reaches at the same shape, in brackets."""
    reached = operator_pages.shipped((lesson for _, lesson, _ in c.lessons), c.best, c.peer, ships)
    return f" ({said('`course_ops`: {ratio}').format(ratio=f'{reached:.2f}')})" if reached else ""


def _story(c: Contest, today: Today) -> str:
    first, last = c.rungs[0], c.best
    words = said("From {first_rate} (`{first}`) to {rate} (`{rung}`, {language}), {share} of its limit.").format(
        first_rate=first.rate, first=first.rung, rate=last.rate, rung=last.rung, language=language(last.lesson),
        share=_share(last),
    )  # fmt: skip
    if c.peer:
        peer = said("The best library, {peer}, runs at {rate}, {share}.")
        peer = peer.format(peer=c.peer.rung, rate=c.peer.rate, share=_share(c.peer))
        words = sentences(words, peer)
    old = said(operator_pages.ABOUT) * bool(_mark(today, *c.rungs, c.peer))
    return sentences(words, shares.briefly([*c.rungs, *([c.peer] if c.peer else [])]), old)


def _ladder(c: Contest, stars: Sequence[str]) -> str:
    """The figure in words. stars: a star for each rung whose row is old."""
    rungs = listed(f"{row.rung} {shares.percent(row):.0f}{star}" for row, star in zip(c.rungs, stars, strict=True))
    words = said("{operator}, % of the limit, rung by rung: {rungs}.")
    return words.format(operator=said(c.name), rungs=rungs)


def _draw_story(c: Contest, stars: Sequence[str], axes: Any) -> None:
    c.bars(axes)
    if c.peer:
        axes.text(-0.4, shares.percent(c.peer) + 1, c.peer.rung, fontsize=7)
    names = [f"{row.rung}{star}" for row, star in zip(c.rungs, stars, strict=True)]
    axes.set_xticks(range(len(c.rungs)), names, rotation=35, ha="right", fontsize=6)
    axes.set_xlim(-0.6, len(c.rungs) - 0.4)
    axes.tick_params(axis="y", labelsize=7)


def _lessons(c: Contest, today: Today) -> Iterator[dict[str, str]]:
    """What each lesson of the ladder teaches, and how far its fastest rung there gets."""
    for name in dict.fromkeys(row.lesson for row in c.rungs):
        best = min((row for row in c.rungs if row.lesson == name), key=lambda row: row.ms_p50)
        yield {
            said("lesson"): name.split(".")[1], said("what it teaches"): _plain(said(guides.about(name).teaches)),
            said("fastest rung"): best.rung, said("rate"): f"{best.rate}{_mark(today, best)}",
            said("of limit"): _share(best), said("over peer"): operator_pages.ratio(best, c.peer),
        }  # fmt: skip


def _mark(today: Today, *rows: Row | None) -> str:
    """What stands behind a figure of rows of which one is old."""
    return f" {MARK}" * any(today.why_old(row) for row in rows if row)


def _plain(text: str) -> str:
    """Without links, whose targets are another folder's."""
    return re.sub(r" ?\(\[[^]]*\]\([^)]*\)\)|\[([^]]*)\]\([^)]*\)", r"\1", text)


def _nothing(c: Contest, today: Today) -> Iterator[str]:
    """The rungs that brought nothing here, against the one before them in the same lesson.

    Not by old rows: what such a rung brings is not known.
    """
    pairs = [(a, b) for a, b in pairwise(c.rungs) if a.lesson == b.lesson and not _mark(today, a, b)]
    steps = [(b, a.ms_p50 / b.ms_p50, a) for a, b in pairs]
    times = said("{rung} {times} times {before}")
    found = [
        times.format(rung=b.rung, times=f"{gain:.2f}", before=a.rung)
        for b, gain, a in steps
        if 1 / GAIN**4 < gain < GAIN
    ]
    if found:
        words = said("What brought nothing at this shape: {rungs}. Some bring it at others: the lessons say where.")
        yield words.format(rungs=listed(found, ";"))


def _line(c: Contest, today: Today) -> dict[str, str]:
    best, ratio = c.best, operator_pages.ratio(c.best, c.peer)
    return {
        said("operator"): said(c.name), said("shape"): f"{c.shape} {_short(c.dtype)}",
        said("fastest rung"): f"{best.rung} ({language(best.lesson)})",
        said("rate"): f"{best.rate}{_mark(today, best, c.peer)}",
        said("of limit, sheet"): ", ".join(filter(None, (_share(best), shares.of_sheet(best)))),
        said("best peer"): c.peer.rung if c.peer else "",
        said("over it"): f"**{ratio}**" if 0 < _ratio(best) < EVEN else ratio,
    }  # fmt: skip


def _short(dtype: str) -> str:
    return dtype.replace("bfloat", "bf").replace("float8_e4m3fn", "fp8").replace("float", "fp")


def _failed(pair: predictions.Compared) -> str:
    """The rates in the unit of what limits the row; their ratio is of what was measured."""
    row = pair.row
    rate, unit = (row.tflop_per_s, "TFLOP/s") if row.limited_by_math else (row.tb_per_s, "TB/s")
    words = said("`{rung}` ({lesson}): predicted {predicted} {unit}, measured {measured}, a ratio of {ratio}.")
    return sentences(
        words.format(
            rung=row.rung, lesson=row.lesson.split(".")[1], predicted=pair.rate(rate), measured=f"{rate:.3g}",
            unit=unit, ratio=f"{pair.ratio:.2f}",
        ),
        said(pair.said.why),
    )  # fmt: skip


# ---- Page two: what did not work, and what next ---------------------------------------------------------------------


Slower = tuple[str, Fastest, float]  # an operator, a shape of it, and what course_ops reaches there; 0 if unknown


def _slower(ladders: Iterable[Ladder], ships: Sequence[operator_rows.Row]) -> list[Slower]:
    """The shapes where the best peer is faster than the fastest rung, of those that the rung's lesson timed.

    The one where a call loses the most time comes first.
    """
    found = [
        (ladder.name, best, ladder.shipped(best, ships))
        for ladder in ladders
        for best in ladder.contested()
        if 0 < _ratio(best.row) < EVEN
    ]
    return sorted(found, key=lambda each: -_lost(each[1]))


def _covered(reached: float) -> bool:
    """Whether what ships is not behind."""
    return round(reached, 2) >= EVEN


def _behind(slower: Sequence[Slower]) -> list[tuple[str, Fastest]]:
    """Each operator at the first of these shapes at which what ships is behind too, or nothing ships."""
    worst: dict[str, Fastest] = {}
    for name, best, reached in slower:
        if not _covered(reached):
            worst.setdefault(name, best)
    return list(worst.items())


def _left_out(slower: Sequence[Slower]) -> Iterator[str]:
    covered = [each for each in slower if _covered(each[2])]
    if covered:
        first = {name: reached for name, _, reached in reversed(covered)}
        yield said(
            "Left out: {count} shapes at which the operator of `course_ops` is not behind. Its ratio at the worst of "
            "them, for each operator: {operators}."
        ).format(
            count=len(covered),
            operators=listed(f"{said(name)} {reached:.2f}" for name, reached in reversed(first.items())),
        )  # fmt: skip


def _lost(best: Fastest) -> float:
    """Milliseconds of a call."""
    return best.row.ms_p50 * (1 - best.row.ratio_to_best_peer)


def _loss(name: str, best: Fastest, today: Today) -> dict[str, str]:
    """A line for an operator's worst shape; the room to its limit is what the next hour can gain."""
    row = best.row
    return {
        said("operator"): said(name), said("shape"): f"{row.shape} {_short(row.dtype)}",
        said("fastest rung"): f"{row.rung} ({language(row.lesson)})",
        said("over peer"): f"{best.ratio}{_mark(today, row, best.peer)}",
        said("lost, us"): f"{1000 * _lost(best):.0f}",
        said("peer"): best.peer.rung if best.peer else "", said("of limit"): _share(row),
        said("room to it"): f"{max(100 / _percent(row), 1):.2f}x" * (name not in OUT_OF_REACH),
        said("bound by"): said(bound(row)),
    }  # fmt: skip


def _next(behind: Sequence[tuple[str, Fastest]]) -> str:
    if not behind:
        return said("At no shape is a library faster than the fastest rung by more than two runs differ.")
    name, best = behind[0]
    row, what = best.row, bound(best.row)
    beside = "FMAs" if row.dtype == "float32" else "matmuls"  # fp32 has no tensor cores
    advice = WAITS[f"latency beside {beside}" if what == "latency" and row.limited_by_math else what]
    left = 100 / _percent(row)
    room = said("the limit leaves room for {left} times its speed").format(left=f"{left:.2f}")
    room = room if left > 100 / NEAR else said("it is near its limit already")
    return said(
        "For each operator the shape at which a call loses the most time to a library, among those that the lesson of "
        "its fastest rung timed. Among lessons, the next hour should go to {operator} at {shape}: {peer} is {times} "
        "times as fast, and {room}. Bound by {what}: try {advice}."
    ).format(
        operator=said(name), shape=row.shape, peer=best.peer.rung if best.peer else said("a peer"),
        times=f"{1 / row.ratio_to_best_peer:.2f}", room=room, what=said(what), advice=said(advice),
    )  # fmt: skip


def _ships(ships: Sequence[operator_rows.Row]) -> Iterator[str]:
    """course_ops beside its peers: how many are nowhere behind. What is stands in the table."""
    found = [s for s, _ in shipped.summaries(ships) if s.shapes]
    means = [s.mean for s in found if not s.behind]
    words = said(
        "A line for each operator and direction of `course_ops` that is below {even} of its best peer at some shape, "
        "with the geometric mean over all of its shapes. The other {ahead} of {all} have means of {least} to {most} "
        "([every line]({page}))."
    )
    yield words.format(
        even=operator_rows.BEHIND, ahead=len(means), all=len(found), least=f"{min(means, default=0):.2f}",
        most=f"{max(means, default=0):.2f}", page="../../course_ops/GUIDE.md#every-ratio",
    )  # fmt: skip
    judged = [row for row in ships if row.judged and row.ratio < operator_rows.BEHIND]
    if judged:
        most = max(judged, key=lambda row: row.ms - row.best_peer_ms)
        words = said(
            "Of what ships, the next hour should go to `{operator}` {direction} at {shape}: a call loses {us} us to "
            "{peer} ({ratio})."
        )
        yield words.format(
            operator=most.operator, direction=most.direction, shape=f"{most.shape} {_short(most.dtype)}",
            us=f"{1000 * (most.ms - most.best_peer_ms):.0f}", peer=most.best_peer, ratio=f"{most.ratio:.2f}",
        )  # fmt: skip
    if further := shipped.further_peers():
        words = said("Not among these peers: {peers}. Lessons are timed beside it.")
        yield words.format(peers=listed(f"{peer} (`{operator}`)" for operator, peer in further))


def _shipped(ships: Sequence[operator_rows.Row]) -> Iterator[dict[str, str]]:
    """A line for each operator and direction that is behind at some shape."""
    for s, mark in shipped.summaries(ships):
        if s.behind:
            ratio, at, peer = shipped.worst(s)
            yield {
                "course_ops.": s.operator, said("direction"): s.direction, said("shapes"): f"{s.shapes}{mark}",
                said("mean"): f"{s.mean:.2f}", said("worst"): ratio, said("at"): _short(at),
                said("best peer"): peer, said("below {even}").format(even=operator_rows.BEHIND):
                f"{s.share_behind:.0%}",
            }  # fmt: skip


def _tuning(folder: Path) -> str:
    """One sentence on each sweep."""
    told = [said("A cost model ranked the configurations of each sweep before they were timed. Rank correlation 1 is "
                 "the measured order.")]  # fmt: skip
    for name, steps in discover("day5"):
        compares = steps.compares if isinstance(steps, Steps) else ()
        for table in (compare(folder) for compare in compares if compare.__name__ == "ranking"):
            if table:
                costs, order = (
                    [float(r[key].rstrip("%")) for r in table.rows] for key in ("costs", "rank correlation")
                )
                words = said(
                    "{lesson}: rank correlation {least} to {most}; its first choice is {cheapest}% to {dearest}% "
                    "slower than the best ({count} sizes)."
                )
                told.append(words.format(
                    lesson=re.split("[:：]", said(title(name)))[0], least=f"{min(order):.2f}", most=f"{max(order):.2f}",
                    cheapest=f"{min(costs):.1f}", dearest=f"{max(costs):.1f}", count=len(table.rows),
                ))  # fmt: skip
    if len(told) == 1:
        return said("No sweep was measured here yet: run day 5's lessons on tuning on this GPU.")
    return sentences(*told)


def _marks(found: Sequence[Contest], lines: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """What the marks in tables of lessons' rows mean. found: what is shown of all operators."""
    cells = "".join(cell for line in lines for cell in line.values())
    bold = said("Bold: more than the spread of two runs behind the best peer (below {ratio}).")
    yield bold.format(ratio=f"{EVEN:.2f}")
    if beyond := shares.briefly(c.best for c in found):
        yield beyond
    notes = {
        operator_pages.UNJUDGED: operator_pages.INCOMPLETE,
        ELSEWHERE: operator_pages.FROM_ELSEWHERE,
        MARK: operator_pages.ABOUT,
    }
    yield from (said(text) for mark, text in notes.items() if mark in cells)


def _exercises_text(done: dict[str, list[Any]]) -> str:
    """From the learner's progress: what passed, and with how much help."""
    records = [record for of in done.values() for record in of]
    passed = [record for record in records if record.passed]
    return said(
        "{passed} of {all} passed, {alone} of them without a hint; {hints} hints and {checks} checks in all."
    ).format(
        passed=len(passed), all=len(records), alone=sum(not record.hints for record in passed),
        hints=sum(r.hints for r in records), checks=sum(r.checks for r in records),
    )  # fmt: skip


def _exercises(done: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """A column a day."""
    yield {"": "passed"} | {day: f"{sum(bool(r.passed) for r in of)} of {len(of)}" for day, of in done.items()}
    yield {"": "hints used"} | {day: sum(r.hints for r in of) for day, of in done.items()}
