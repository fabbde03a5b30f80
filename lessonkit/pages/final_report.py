"""What the final report says: what was built, how fast it is, why, and what did not work. Made of rows and fields."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from lessonkit.base import device
from lessonkit.base.files import REPORTS
from lessonkit.base.words import later, listed, said, sentences, speaking
from lessonkit.exercise import progress
from lessonkit.lesson import Steps, discover, title
from lessonkit.measure.rows import Row
from lessonkit.measure.stale import device_folders
from lessonkit.measure.yardstick import Streams, streams
from lessonkit.pages import final, guides, operators, plots, predictions, shares
from lessonkit.pages.final import Block
from lessonkit.pages.operators import Fastest
from lessonkit.pages.plots import Picture
from lessonkit.pages.results import Contest, bound, contests, language, measured
from lessonkit.pages.roofline import roofline

NEAR = 90  # percent of the limit: what is left is worth nobody's hour
EVEN = 0.97  # of the best peer: what two runs differ by
GAIN = 1.02  # over the rung before: less is nothing
PYTHON = ("Triton", "Gluon")  # one ladder climbs in these; an operator without them is told in its own language
WAITS = {  # what helps, by what binds
    "memory": later("fewer bytes in all, or more of them in flight"),
    "compute": later("matmuls that run under what is none"),
    "latency": later("more bytes in flight: longer loads, more programs an SM"),
    "latency beside matmuls": later("matmuls in flight while the softmax, the mask or the epilogue run"),
    "launch": later("fewer launches: fusion, a graph, a larger batch"),
}


def build(folder: Path, chosen: str = "") -> tuple[str, list[Block]]:
    """(title, blocks) of the report on one machine's rows.

    chosen: the operator whose ladder is told. Raises ValueError if the machine has no rows, or none of that operator.
    """
    found = contests(folder)
    if not found:
        raise ValueError(f"no rows in {folder}: `python -m lessonkit bench` writes them on a GPU")
    by = {c.name: c for c in found}
    if chosen and chosen not in by:
        raise ValueError(f"no rows of {chosen!r}; there are {', '.join(by)}")
    name = chosen or next((op for op in ("attention", "matmul", "softmax") if op in by), found[0].name)
    story = {c.name: c for c in contests(folder, PYTHON)}.get(name, by[name])
    pairs = [pair for _, lesson, mine in measured(folder) for pair in predictions.compared(lesson, mine)]
    behind = list(_behind(folder))
    data = [(row.lesson, row.rung, row.percent_of_limit) for row in story.rungs]
    table = streams(folder)
    blocks = [
        Block(text=_measured_on(found)),
        Block(heading=said("What was found"), items=tuple(_findings(found, pairs))),
        Block(
            heading=said("One ladder: {operator} at {shape}, {dtype}").format(
                operator=said(story.name), shape=story.shape, dtype=story.dtype
            ),
            text=_story(story),
        ),
        Block(figure="ladder", alt=_ladder(story), data=data, draw=partial(_draw_story, story)),
        Block(table=tuple(_lessons(story)), items=tuple(_nothing(story))),
    ]
    if failed := [pair for pair in pairs if pair.off]:
        worst = sorted(failed, key=lambda pair: min(pair.ratio, 1 / pair.ratio))[:4]
        blocks.append(Block(heading=said("Predictions that failed most"), table=tuple(map(_failed, worst))))
    blocks.append(Block(heading=said("Where a library is faster, and the next hour"), page=True,
                        text=sentences(_next(behind), shares.briefly([best.row for _, best in behind[:6]])),
                        table=tuple(map(_loss, behind[:6]))))  # fmt: skip
    if roof := roofline(folder):
        blocks.append(Block(heading=said("What limits"), text=roof.note))
    blocks.append(Block(heading=said("Tuning: predicted and measured"), text=_tuning(folder)))
    blocks.append(
        Block(heading=said("Every operator"), table=tuple(_line(c, table) for c in found), text=_legend(found, table))
    )
    if done := progress.by_folder():
        blocks.append(
            Block(heading=said("Exercises"), text=_exercises_text(done), table=tuple(_exercises(done)), own=True)
        )
    name = said("GPU kernels in five days: what was built, how fast it is ({device})")
    return name.format(device=folder.name), blocks


def pages(folder: Path) -> dict[Path, str | Picture]:
    """The report that is kept beside one machine's rows, without what is a learner's own."""
    if not contests(folder):
        return {}
    name, blocks = build(folder)
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
    return said(
        "Measured on {gpu}, driver {driver}, CUDA {cuda}, torch {torch}, triton {triton}. Medians, L2 flushed, rungs "
        "and peers interleaved, each result checked. The limit is a copy of as many bytes in the same rounds, or the "
        "FLOPs at cuBLAS's rate at a size of 8192."
    ).format(**vars(found[0].best))


def _findings(found: Sequence[Contest], pairs: Sequence[predictions.Compared]) -> Iterator[str]:
    """Three sentences: against libraries, against the machine, against the predictions."""
    raced = sorted((c for c in found if c.best.ratio_to_best_peer), key=lambda c: c.best.ratio_to_best_peer)
    ahead = [c for c in raced if c.best.ratio_to_best_peer >= 1]
    lost = [f"{said(c.name)} {c.best.ratio_to_best_peer:.2f}" for c in raced if c.best.ratio_to_best_peer < EVEN]
    top = listed(f"{said(c.name)} {c.best.ratio_to_best_peer:.2f}" for c in reversed(ahead[-3:]))
    words = said(
        "Against the best library: {ahead} of {all} operators are at least as fast at their main shape (most: {top}), "
        "{even} are behind by less than two runs differ."
    ).format(ahead=len(ahead), all=len(raced), top=top, even=len(raced) - len(ahead) - len(lost))
    slower = said("Slower: {operators}.").format(operators=listed(lost))
    yield sentences(words, slower * bool(lost))
    near = [c for c in found if c.best.percent_of_limit >= NEAR]
    far = sorted((c for c in found if c not in near), key=lambda c: c.best.percent_of_limit)
    below = listed(f"{said(c.name)} {c.best.percent_of_limit:.0f}%" for c in far)
    words = said("Against the machine: {near} of {all} reach {percent}% of their limit.")
    words = words.format(near=len(near), all=len(found), percent=NEAR)
    yield sentences(words, said("Below: {operators}.").format(operators=below) * bool(far))
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


def _story(c: Contest) -> str:
    first, last = c.rungs[0], c.best
    words = said("From {first_rate} (`{first}`) to {rate} (`{rung}`, {language}), {share} of its limit.").format(
        first_rate=first.rate, first=first.rung, rate=last.rate, rung=last.rung, language=language(last.lesson),
        share=shares.of_limit(last),
    )  # fmt: skip
    if c.peer:
        peer = said("The best library, {peer}, runs at {rate}, {share}.")
        peer = peer.format(peer=c.peer.rung, rate=c.peer.rate, share=shares.of_limit(c.peer))
        words = sentences(words, peer)
    return sentences(words, shares.why([*c.rungs, *([c.peer] if c.peer else [])]))


def _ladder(c: Contest) -> str:
    """The figure in words."""
    rungs = listed(f"{row.rung} {row.percent_of_limit:.0f}" for row in c.rungs)
    words = said("{operator}, % of the limit, rung by rung: {rungs}.")
    return words.format(operator=said(c.name), rungs=rungs)


def _draw_story(c: Contest, axes: Any) -> None:
    c.bars(axes)
    if c.peer:
        axes.text(-0.4, c.peer.percent_of_limit + 1, c.peer.rung, fontsize=7)
    axes.set_xticks(range(len(c.rungs)), [row.rung for row in c.rungs], rotation=35, ha="right", fontsize=6)
    axes.set_xlim(-0.6, len(c.rungs) - 0.4)
    axes.tick_params(axis="y", labelsize=7)


def _lessons(c: Contest) -> Iterator[dict[str, str]]:
    """What each lesson of the ladder teaches, and how far its fastest rung there gets."""
    for name in dict.fromkeys(row.lesson for row in c.rungs):
        best = min((row for row in c.rungs if row.lesson == name), key=lambda row: row.ms_p50)
        yield {
            said("lesson"): name.split(".")[1], said("what it teaches"): _plain(said(guides.about(name).teaches)),
            said("fastest rung"): best.rung, said("rate"): best.rate, said("of limit"): shares.of_limit(best),
            said("over peer"): f"{best.ratio_to_best_peer:.2f}" if best.ratio_to_best_peer else "",
        }  # fmt: skip


def _plain(text: str) -> str:
    """Without links, whose targets are another folder's."""
    return re.sub(r" ?\(\[[^]]*\]\([^)]*\)\)|\[([^]]*)\]\([^)]*\)", r"\1", text)


def _nothing(c: Contest) -> Iterator[str]:
    """The rungs that brought nothing here, against the one before them; a lesson that starts over is no loss."""
    steps = [(b, a.ms_p50 / b.ms_p50, a) for a, b in pairwise(c.rungs)]
    times = said("{rung} {times} times {before}")
    found = [
        times.format(rung=b.rung, times=f"{gain:.2f}", before=a.rung)
        for b, gain, a in steps
        if 1 / GAIN**4 < gain < GAIN
    ]
    if found:
        words = said("What brought nothing at this shape: {rungs}. Some bring it at others: the lessons say where.")
        yield words.format(rungs=listed(found, ";"))


def _line(c: Contest, table: Streams | None) -> dict[str, str]:
    """table: of streams, if the machine has one."""
    best = c.best
    ratio = f"{best.ratio_to_best_peer:.2f}" if best.ratio_to_best_peer else ""
    return {
        said("operator"): said(c.name), said("shape"): f"{c.shape} {_short(c.dtype)}",
        said("fastest rung"): f"{best.rung} ({language(best.lesson)})", said("rate"): best.rate,
        said("of limit"): (table and shares.of_stream(best, table)) or shares.of_limit(best),
        said("best peer"): _peer(best, c),
        said("over it"): f"**{ratio}**" if 0 < best.ratio_to_best_peer < EVEN else ratio,
    }  # fmt: skip


def _short(dtype: str) -> str:
    return dtype.replace("bfloat", "bf").replace("float8_e4m3fn", "fp8").replace("float", "fp")


def _peer(best: Row, c: Contest) -> str:
    return c.peer.rung if c.peer and best.ratio_to_best_peer else ""


def _failed(pair: predictions.Compared) -> dict[str, str]:
    return {
        said("lesson"): pair.row.lesson.split(".")[1], said("rung"): pair.row.rung,
        said("predicted"): pair.how.replace("`", ""), said("measured / predicted"): f"{pair.ratio:.2f}",
        said("why"): said(pair.said.why),
    }  # fmt: skip


# ---- Page two: what did not work, and what next ---------------------------------------------------------------------


def _behind(folder: Path) -> Iterator[tuple[str, Fastest]]:
    """Each operator at the shape where a call of its fastest rung loses the most time to the best peer, most first."""
    worst = []
    for ladder in operators.ladders(folder):
        slower = [best for best in ladder.fastest() if 0 < best.row.ratio_to_best_peer < EVEN]
        if slower:
            worst.append((ladder.name, max(slower, key=_lost)))
    yield from sorted(worst, key=lambda pair: -_lost(pair[1]))


def _lost(best: Fastest) -> float:
    """Milliseconds of a call."""
    return best.row.ms_p50 * (1 - best.row.ratio_to_best_peer)


def _loss(pair: tuple[str, Fastest]) -> dict[str, str]:
    """A line for an operator's worst shape; the room to its limit is what the next hour can gain."""
    name, best = pair
    row = best.row
    return {
        said("operator"): said(name), said("shape"): f"{row.shape} {_short(row.dtype)}",
        said("fastest rung"): f"{row.rung} ({language(row.lesson)})",
        said("over peer"): f"{row.ratio_to_best_peer:.2f}",
        said("lost, us"): f"{1000 * _lost(best):.0f}",
        said("peer"): best.peer.rung if best.peer else "", said("of limit"): shares.of_limit(row),
        said("room to it"): f"{max(100 / row.percent_of_limit, 1):.2f}x", said("bound by"): said(bound(row)),
    }  # fmt: skip


def _next(behind: Sequence[tuple[str, Fastest]]) -> str:
    if not behind:
        return said("At no shape is a library faster than the fastest rung by more than two runs differ.")
    name, best = behind[0]
    row, what = best.row, bound(best.row)
    advice = WAITS["latency beside matmuls" if what == "latency" and row.limited_by_math else what]
    left = 100 / row.percent_of_limit
    near, far = said("it is near its limit already"), said("the limit leaves {left} times").format(left=f"{left:.2f}")
    return said(
        "Each operator at the shape where a call loses the most time to a library. The next hour should go to "
        "{operator} at {shape}: {peer} is {times} times as fast, and {room}. Bound by {what}: try {advice}."
    ).format(
        operator=said(name), shape=row.shape, peer=best.peer.rung if best.peer else said("a peer"),
        times=f"{1 / row.ratio_to_best_peer:.2f}", room=far if left > 100 / NEAR else near, what=said(what),
        advice=said(advice),
    )  # fmt: skip


def _tuning(folder: Path) -> str:
    """One sentence on each sweep."""
    told = [said("A model of one page ranked the configurations of each sweep before they were timed.")]
    for name, steps in discover("day5"):
        compares = steps.compares if isinstance(steps, Steps) else ()
        for table in (compare(folder) for compare in compares if compare.__name__ == "ranking"):
            if table:
                costs, order = (
                    [float(r[key].rstrip("%")) for r in table.rows] for key in ("costs", "rank correlation")
                )
                words = said(
                    "{lesson}: rank correlation {least} to {most}; the model's first choice costs {cheapest}% to "
                    "{dearest}% ({count} sizes)."
                )
                told.append(words.format(
                    lesson=re.split("[:：]", said(title(name)))[0], least=f"{min(order):.2f}", most=f"{max(order):.2f}",
                    cheapest=f"{min(costs):.1f}", dearest=f"{max(costs):.1f}", count=len(table.rows),
                ))  # fmt: skip
    if len(told) == 1:
        return said("No sweep was measured here yet: run day 5's lessons on tuning on this GPU.")
    return sentences(*told)


def _legend(found: Sequence[Contest], table: Streams | None) -> str:
    bold = said("Bold: more than the spread of two runs behind the best peer (below {ratio}).")
    stream = said("Here the limit of memory is a stream with the same mix of reads and writes.")
    words = [bold.format(ratio=f"{EVEN:.2f}"), *([stream] if table else [])]
    return sentences(*words, shares.briefly([c.best for c in found], table))


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
