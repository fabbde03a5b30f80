"""What the final report says: what was built, how fast it is, why, and what did not work. Made of rows and fields."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from lessonkit.base import device
from lessonkit.base.files import REPORTS
from lessonkit.exercise import progress
from lessonkit.lesson import Steps, discover, title
from lessonkit.measure.rows import Row
from lessonkit.measure.stale import device_folders
from lessonkit.pages import final, guides, operators, plots, predictions
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
    "memory": "fewer bytes in all, or more of them in flight",
    "compute": "matmuls that run under what is none",
    "latency": "more bytes in flight: longer loads, more programs an SM",
    "latency beside matmuls": "matmuls in flight while the softmax, the mask or the epilogue run",
    "launch": "fewer launches: fusion, a graph, a larger batch",
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
    blocks = [
        Block(text=_measured_on(found)),
        Block(heading="What was found", items=tuple(_findings(found, pairs))),
        Block(heading=f"One ladder: {story.name} at {story.shape}, {story.dtype}", text=_story(story)),
        Block(figure="ladder", data=data, draw=partial(_draw_story, story)),
        Block(table=tuple(_lessons(story)), items=tuple(_nothing(story))),
    ]
    if failed := [pair for pair in pairs if pair.off]:
        worst = sorted(failed, key=lambda pair: min(pair.ratio, 1 / pair.ratio))[:4]
        blocks.append(Block(heading="Predictions that failed most", table=tuple(map(_failed, worst))))
    blocks.append(Block(heading="Where a library is faster, and the next hour", text=_next(behind), page=True,
                        table=tuple(map(_loss, behind[:6]))))  # fmt: skip
    if roof := roofline(folder):
        blocks.append(Block(heading="What limits", text=roof.note))
    blocks.append(Block(heading="Tuning: predicted and measured", text=_tuning(folder)))
    blocks.append(Block(heading="Every operator", table=tuple(map(_line, found)), text=_legend()))
    if done := progress.by_folder():
        blocks.append(Block(heading="Exercises", text=_exercises_text(done), table=tuple(_exercises(done)), own=True))
    return f"GPU kernels in five days: what was built, how fast it is ({folder.name})", blocks


def pages(folder: Path) -> dict[Path, str | Picture]:
    """The report that is kept beside one machine's rows, without what is a learner's own."""
    if not contests(folder):
        return {}
    name, blocks = build(folder)
    figures = {folder / final.picture(b): plots.plot(b.draw, b.data) for b in blocks if b.draw}
    return {folder / "final_report.md": final.as_markdown(name, blocks)} | figures


def write_report(chosen: str = "") -> list[Path]:
    """Write it from this machine's rows, or where it has none from committed ones; without a GPU to reports/cpu."""
    own = REPORTS / device.name()
    source = own if any(measured(own)) else next(iter(device_folders()), own)
    return final.write(own, *build(source, chosen))


# ---- Page one: what was found ---------------------------------------------------------------------------------------


def _measured_on(found: Sequence[Contest]) -> str:
    row = found[0].best
    return (
        f"Measured on {row.gpu}, driver {row.driver}, CUDA {row.cuda}, torch {row.torch}, triton {row.triton}. "
        "Medians, L2 flushed, rungs and peers interleaved, each result checked. The limit is a copy of as many "
        "bytes, or the FLOPs at cuBLAS's rate, in the same rounds."
    )


def _findings(found: Sequence[Contest], pairs: Sequence[predictions.Compared]) -> Iterator[str]:
    """Three sentences: against libraries, against the machine, against the predictions."""
    raced = sorted((c for c in found if c.best.ratio_to_best_peer), key=lambda c: c.best.ratio_to_best_peer)
    ahead = [c for c in raced if c.best.ratio_to_best_peer >= 1]
    lost = [f"{c.name} {c.best.ratio_to_best_peer:.2f}" for c in raced if c.best.ratio_to_best_peer < EVEN]
    top = ", ".join(f"{c.name} {c.best.ratio_to_best_peer:.2f}" for c in reversed(ahead[-3:]))
    said = f"Against the best library: {len(ahead)} of {len(raced)} operators are at least as fast at their main shape"
    said += f" (most: {top}), {len(raced) - len(ahead) - len(lost)} are behind by less than two runs differ."
    yield f"{said} Slower: {', '.join(lost)}." if lost else said
    near = [c for c in found if c.best.percent_of_limit >= NEAR]
    far = sorted((c for c in found if c not in near), key=lambda c: c.best.percent_of_limit)
    below = ", ".join(f"{c.name} {c.best.percent_of_limit:.0f}%" for c in far)
    said = f"Against the machine: {len(near)} of {len(found)} reach {NEAR}% of their limit."
    yield f"{said} Below: {below}." if far else said
    if pairs:
        held = [pair for pair in pairs if not pair.off]
        fast = sum(pair.ratio > 1 for pair in pairs if pair.off)
        yield (
            f"Against the predictions: {len(held)} of {len(pairs)} rates are within {predictions.TOLERANCE:.0%}; "
            f"{fast} are higher and {len(pairs) - len(held) - fast} lower, each with its reason on the lesson's page."
        )


def _story(c: Contest) -> str:
    end = f"`{c.best.rung}`, {language(c.best.lesson)}"
    said = f"From {c.rungs[0].rate} (`{c.rungs[0].rung}`) to {c.best.rate} ({end}), {c.best.percent_of_limit:.0f}% of "
    said += "its limit."
    if c.peer:
        said += f" The best library, {c.peer.rung}, runs at {c.peer.rate}, {c.peer.percent_of_limit:.0f}%."
    return said


def _draw_story(c: Contest, axes: Any) -> None:
    c.bars(axes)
    if c.peer:
        axes.text(-0.4, c.peer.percent_of_limit + 1, c.peer.rung, fontsize=7)
    axes.set_xticks(range(len(c.rungs)), [row.rung for row in c.rungs], rotation=35, ha="right", fontsize=6)
    axes.set_xlim(-0.6, len(c.rungs) - 0.4)
    axes.set_ylabel("% of the limit, a colour a lesson", fontsize=7)
    axes.tick_params(axis="y", labelsize=7)


def _lessons(c: Contest) -> Iterator[dict[str, str]]:
    """What each lesson of the ladder teaches, and how far its fastest rung there gets."""
    for name in dict.fromkeys(row.lesson for row in c.rungs):
        best = min((row for row in c.rungs if row.lesson == name), key=lambda row: row.ms_p50)
        yield {
            "lesson": name.split(".")[1], "what it teaches": _plain(guides.about(name).teaches),
            "fastest rung": best.rung, "rate": best.rate, "of limit": f"{best.percent_of_limit:.0f}%",
            "over peer": f"{best.ratio_to_best_peer:.2f}" if best.ratio_to_best_peer else "",
        }  # fmt: skip


def _plain(text: str) -> str:
    """Without links, whose targets are another folder's."""
    return re.sub(r" ?\(\[[^]]*\]\([^)]*\)\)|\[([^]]*)\]\([^)]*\)", r"\1", text)


def _nothing(c: Contest) -> Iterator[str]:
    """The rungs that brought nothing here, against the one before them; a lesson that starts over is no loss."""
    steps = [(b, a.ms_p50 / b.ms_p50, a) for a, b in pairwise(c.rungs)]
    found = [f"{b.rung} {gain:.2f} times {a.rung}" for b, gain, a in steps if 1 / GAIN**4 < gain < GAIN]
    if found:
        yield f"What brought nothing at this shape: {'; '.join(found)}. Some bring it at others: the lessons say where."


def _line(c: Contest) -> dict[str, str]:
    best = c.best
    ratio = f"{best.ratio_to_best_peer:.2f}" if best.ratio_to_best_peer else ""
    return {
        "operator": c.name, "shape": f"{c.shape} {_short(c.dtype)}",
        "fastest rung": f"{best.rung} ({language(best.lesson)})", "rate": best.rate,
        "of limit": f"{best.percent_of_limit:.0f}%", "best peer": _peer(best, c),
        "over it": f"**{ratio}**" if 0 < best.ratio_to_best_peer < EVEN else ratio,
    }  # fmt: skip


def _short(dtype: str) -> str:
    return dtype.replace("bfloat", "bf").replace("float8_e4m3fn", "fp8").replace("float", "fp")


def _peer(best: Row, c: Contest) -> str:
    return c.peer.rung if c.peer and best.ratio_to_best_peer else ""


def _failed(pair: predictions.Compared) -> dict[str, str]:
    return {
        "lesson": pair.row.lesson.split(".")[1], "rung": pair.row.rung, "predicted": pair.how.replace("`", ""),
        "measured / predicted": f"{pair.ratio:.2f}", "why": pair.said.why,
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
        "operator": name, "shape": f"{row.shape} {_short(row.dtype)}",
        "fastest rung": f"{row.rung} ({language(row.lesson)})", "over peer": f"{row.ratio_to_best_peer:.2f}",
        "lost, us": f"{1000 * _lost(best):.0f}",
        "peer": best.peer.rung if best.peer else "", "of limit": f"{row.percent_of_limit:.0f}%",
        "room to it": f"{max(100 / row.percent_of_limit, 1):.2f}x", "bound by": bound(row),
    }  # fmt: skip


def _next(behind: Sequence[tuple[str, Fastest]]) -> str:
    if not behind:
        return "At no shape is a library faster than the fastest rung by more than two runs differ."
    name, best = behind[0]
    row, peer = best.row, best.peer.rung if best.peer else "a peer"
    what = bound(row)
    advice = WAITS["latency beside matmuls" if what == "latency" and row.limited_by_math else what]
    return (
        "Each operator at the shape where a call loses the most time to a library. The next hour should go to "
        f"{name} at {row.shape}: {peer} is {1 / row.ratio_to_best_peer:.2f} times as fast, and {_room(row)} Bound by "
        f"{what}: try {advice}."
    )


def _room(row: Row) -> str:
    left = 100 / row.percent_of_limit
    return f"the limit leaves {left:.2f} times." if left > 100 / NEAR else "it is near its limit already."


def _tuning(folder: Path) -> str:
    """One sentence on each sweep."""
    said = []
    for name, steps in discover("day5"):
        compares = steps.compares if isinstance(steps, Steps) else ()
        for table in (compare(folder) for compare in compares if compare.__name__ == "ranking"):
            if table:
                costs, order = (
                    [float(r[key].rstrip("%")) for r in table.rows] for key in ("costs", "rank correlation")
                )
                said.append(
                    f"{title(name).split(':')[0]}: rank correlation {min(order):.2f} to {max(order):.2f}; the model's "
                    f"first choice costs {min(costs):.1f}% to {max(costs):.1f}% ({len(table.rows)} sizes)."
                )
    if not said:
        return "No sweep was measured here yet: run day 5's lessons on tuning on this GPU."
    return "A model of one page ranked the configurations of each sweep before they were timed. " + " ".join(said)


def _legend() -> str:
    return f"Bold: more than the spread of two runs behind the best peer (below {EVEN:.2f})."


def _exercises_text(done: dict[str, list[Any]]) -> str:
    """From the learner's progress: what passed, and with how much help."""
    records = [record for of in done.values() for record in of]
    passed = [record for record in records if record.passed]
    return (
        f"{len(passed)} of {len(records)} passed, {sum(not record.hints for record in passed)} of them without a hint; "
        f"{sum(r.hints for r in records)} hints and {sum(r.checks for r in records)} checks in all."
    )


def _exercises(done: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """A column a day."""
    yield {"": "passed"} | {day: f"{sum(bool(r.passed) for r in of)} of {len(of)}" for day, of in done.items()}
    yield {"": "hints used"} | {day: sum(r.hints for r in of) for day, of in done.items()}
