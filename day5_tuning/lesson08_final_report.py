"""The final report: everything measured, one operator's story, what limits, what to try next
==========================================================================================
The last deliverable of the course: one or two pages that somebody who was not there can act on. A good one says what
was measured on what, how far each result is from the best that exists and from what the machine can do, which
prediction was wrong and by how much, and what the next hour should go into. It is written from rows, never by hand:

    python -m lessonkit report final                       Markdown, HTML and PDF under reports/<device>/
    python -m lessonkit report final --operator softmax    with another operator's story

from the learner's own rows; where there is no GPU, from the committed ones. What the learner's exercises took, hints
among it, stands at its end. This lesson also compares everything with
everything (compare_all): each operator in all the languages of the course, beside the best peer, and draws the ladder
of each operator in one picture.

Predict before you run: in which operator did the last rung gain most over the first? Where does a peer still win?
You will learn: to report a performance result so that it can be trusted, and contradicted.
Run it:    python day5_tuning/lesson08_final_report.py
"""

import importlib
import inspect
import math
import re
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

from lessonkit import About, Steps, Table, device, report, rows
from lessonkit.exercise import progress
from lessonkit.pages import final
from lessonkit.pages.final import Block
from lessonkit.pages.results import bound, contests, language, measured
from lessonkit.pages.roofline import draw_roofline, roofline

SWEEPS = {"softmax": "lesson05_tuning", "matmul": "lesson05b_tuning_matmul", "attention": "lesson05c_tuning_attention"}
NEXT = {  # what helps, by what binds
    "memory": "fewer bytes: fuse it with a neighbour, or narrower numbers",
    "compute": "more overlap: what is not tensor cores' under what is",
    "latency": "more in flight: bytes a thread, programs an SM; fewer waits",
    "launch": "fewer launches: fusion, a graph, or a larger batch",
}


def compare_all(folder):
    """Each operator in each language of the course, beside the best peer, at the largest shape that most measured."""
    table = []
    for c in contests(folder):
        line = {"operator": c.name, "shape": f"{c.shape} {c.dtype}"}
        for tongue in ("Triton", "CUDA C++", "Gluon", "ThunderKittens"):
            mine = [row.ms_p50 for row in c.rungs if language(row.lesson) == tongue]
            line[f"{tongue}, ms"] = f"{min(mine):.4g}" if mine else ""
        line["best peer, ms"] = f"{c.peer.ms_p50:.4g} ({c.peer.rung})" if c.peer else ""
        line["over its peers"] = f"{c.best.ratio_to_best_peer:.2f}" if c.best.ratio_to_best_peer else ""
        line["% of the limit"] = f"{c.best.percent_of_limit:.0f}"
        table.append(line)
    note = "The fastest rung in each language. Over its peers: the fastest of all against the best in the same rounds."
    return Table("compare all", table, note) if table else None


def ladders(folder):
    """The ladder of each operator: every rung's share of its limit, in the order of the course."""
    found = contests(folder)
    table = []
    for c in found:
        rungs = ", ".join(f"{row.rung} {row.percent_of_limit:.0f}" for row in c.rungs)
        peer = f"{c.peer.rung} {c.peer.percent_of_limit:.0f}" if c.peer else ""
        table.append(
            {
                "operator": c.name,
                "shape": f"{c.shape} {c.dtype}",
                "% of the limit, rung by rung": rungs,
                "best peer": peer,
            }
        )

    def draw(figure):
        lines = math.ceil(len(found) / 5)
        figure.set_size_inches(16, 2.6 * lines)
        for i, c in enumerate(found):
            axes = figure.add_subplot(lines, 5, i + 1)
            c.bars(axes)
            names = [row.rung[:18] for row in c.rungs]
            axes.set_xticks(range(len(names)), names, rotation=50, ha="right", fontsize=5)
            axes.set_title(f"{c.name}\n{c.shape[:40]}", fontsize=7)
            axes.set_ylim(0, 112)
            axes.tick_params(axis="y", labelsize=6)

    note = "The limit: a copy of as many bytes, or cuBLAS's rate. A colour a lesson; the dashed line is the best peer."
    return Table("ladders", table, note, draw=draw) if table else None


# ---- The report -----------------------------------------------------------------------------------------------------


def build(folder, chosen=""):
    """(title, blocks) of the report on one machine's rows. ValueError if it has none, or none of that operator."""
    found = contests(folder)
    if not found:
        raise ValueError(f"no rows in {folder}: `python -m lessonkit bench` writes them on a GPU")
    by = {c.name: c for c in found}
    if chosen and chosen not in by:
        raise ValueError(f"no rows of {chosen!r}; there are {', '.join(by)}")
    story = by[chosen or next((op for op in ("attention", "matmul", "softmax") if op in by), found[0].name)]
    data = [(row.lesson, row.rung, row.percent_of_limit) for row in story.rungs]
    blocks = [
        Block(text=_summary(found)),
        Block(heading="Performance", table=tuple(_performance(found))),
        Block(heading=f"One operator: {story.name}", text=_story(story)),
        Block(figure="ladder", data=data, draw=partial(_draw_story, story)),
        Block(heading="Tuning: predicted and measured", text=_tuning_text(folder), table=tuple(_tuning(folder))),
        Block(heading="What limits", text=_limits(found, story)),
        Block(heading="What to try next", table=tuple(_next(found))),
    ]
    if roof := roofline(folder):
        drawn = partial(draw_roofline, table=roof.rows, roof=_copy_speed(found))
        blocks.insert(-1, Block(figure="roofline", data=roof.rows, draw=drawn))
    if done := progress.by_folder():
        blocks.append(Block(heading="Exercises", text=_exercises_text(done), table=tuple(_exercises(done))))
    return f"GPU kernels in five days: final report, {folder.name}", blocks


def _copy_speed(found):
    return max(row.tb_per_s for c in found for _, _, mine in c.lessons for row in mine if row.kind == "limit")


def _summary(found):
    row, raced = found[0].best, [c for c in found if c.best.ratio_to_best_peer]
    wins = sum(c.best.ratio_to_best_peer >= 1 for c in raced)
    return (
        f"Measured on {row.gpu}, driver {row.driver}, CUDA {row.cuda}, torch {row.torch}, triton {row.triton}: "
        "medians, L2 flushed, rungs and peers in turns, each result checked before and after. "
        f"{len(found)} operators, each at the largest shape that most of its lessons measured. In {wins} of "
        f"{len(raced)} the best rung is at least as fast as the best library."
    )


def _performance(found):
    for c in found:
        best, first = c.best, c.rungs[0]
        dtype = c.dtype.replace("bfloat", "bf").replace("float", "fp")
        yield {
            "operator": c.name, "shape": f"{c.shape} {dtype}",
            "best rung": f"{best.rung} ({language(best.lesson)})", "ms": f"{best.ms_p50:.4g}", "rate": best.rate,
            "% of limit": f"{best.percent_of_limit:.0f}", "over first": f"{first.ms_p50 / best.ms_p50:.1f}x",
            "over peer": f"{best.ratio_to_best_peer:.2f}x" if best.ratio_to_best_peer else "", "bound by": bound(best),
        }  # fmt: skip


def _idea(row):
    """The first sentence of what the rung's comment in its lesson says is new, or nothing."""
    source = inspect.getsource(importlib.import_module(row.lesson))
    for comment, code in re.findall(r"((?:^# .*\n)+)(.*?)(?=^# Rung|^LESSON)", source, re.MULTILINE | re.DOTALL):
        prose = " ".join(re.findall(r"# ?(.*)", comment))
        said = re.match(r"Rung \d+\.\s*(?:New(?:, [^:]*)?:)?\s*(.*?)\.(?:\s|$)", prose)
        if said and re.search(rf"^def {row.rung}\b", code, re.MULTILINE):
            return said[1]
    return ""


def _story(c):
    said = f"{c.shape}, {c.dtype}. The course begins at {c.rungs[0].ms_p50:.4g} ms ({c.rungs[0].rung}) and ends at "
    said += f"{c.best.ms_p50:.4g} ms, {c.best.rate} ({c.best.rung}, {language(c.best.lesson)}). "
    if pairs := [(a, b) for a, b in pairwise(c.rungs) if a.lesson == b.lesson]:
        before, rung = max(pairs, key=lambda pair: pair[0].ms_p50 / pair[1].ms_p50)
        idea = _idea(rung)
        said += f"The largest step was {rung.rung}, {before.ms_p50 / rung.ms_p50:.1f} times" + (
            f": {idea}. " if idea else ". "
        )
    if c.peer:
        said += f"The best peer, {c.peer.rung}, takes {c.peer.ms_p50:.4g} ms. "
    return said + f"At {c.best.percent_of_limit:.0f}% of its limit the best rung is bound by {bound(c.best)}."


def _draw_story(c, axes):
    c.bars(axes)
    if c.peer:
        axes.text(-0.4, c.peer.percent_of_limit + 1, c.peer.rung, fontsize=7)
    axes.set_xticks(range(len(c.rungs)), [row.rung for row in c.rungs], rotation=35, ha="right", fontsize=6)
    axes.set_ylabel("% of the limit", fontsize=8)
    axes.tick_params(axis="y", labelsize=7)


def _tuning(folder):
    for op, stem in SWEEPS.items():
        ranking = importlib.import_module(f"day5_tuning.{stem}").LESSON.compares[0](folder)
        for row in ranking.rows if ranking else []:
            yield {
                "sweep": op, "size": row["size"], "of": row["configurations"],
                "rank correlation": row["rank correlation"], "median error": row["median error of the time"],
                "best": row["best, measured"], "predicted best costs": row["costs"], "worst": row["worst over best"],
            }  # fmt: skip


def _tuning_text(folder):
    lines = list(_tuning(folder))
    if not lines:
        return "No sweep was measured here yet: run day 5's lessons on tuning on this GPU."
    costs, order = (
        [float(row[key].rstrip("%")) for row in lines] for key in ("predicted best costs", "rank correlation")
    )
    return (
        f"{len(lines)} sweeps. A model of a page, fed with what the compiler made of each configuration, ranked them "
        f"with a correlation from {min(order)} to {max(order)}; to take its first choice without measuring costs from "
        f"{min(costs):.1f}% to {max(costs):.1f}% over the best there is."
    )


def _limits(found, story):
    bounds = Counter(bound(c.best) for c in found)
    said = ", ".join(f"{count} by {what}" for what, count in bounds.most_common())
    text = f"Of {len(found)} operators at these shapes the best rung is bound: {said}. "
    kernels = rows.read_csv(report.REPORTS / "compiled" / f"{story.best.lesson}.csv")
    if mine := [k for k in kernels if k["rung"] == story.best.rung and k["target"] == "90"]:
        k = max(mine, key=lambda k: int(k["instructions"]))
        unit = "on tensor cores" if int(k["wgmma"]) or int(k["mma"]) else "without tensor cores"
        text += f"{k['kernel']}: {k['registers']} registers a thread, {k['shared']} bytes of shared memory, so "
        text += f"{float(k['occupancy']):.0%} occupancy on sm_90; {k['spills']} spills; {unit}. "
    return text + f"What {story.name} would gain from: {NEXT[bound(story.best)]}."


def _next(found):
    """Where the last rungs of an operator's last lesson are furthest behind a peer."""
    behind = []
    for c in found:
        _, lesson, measured_rows = c.lessons[-1]
        last = [r for r in measured_rows if r.rung == lesson.rungs[-1].__name__ and 0 < r.ratio_to_best_peer < 1]
        if last:
            behind.append((c.name, min(last, key=lambda r: r.ratio_to_best_peer)))
    for op, row in sorted(behind, key=lambda item: item[1].ratio_to_best_peer)[:6]:
        yield {
            "operator": op, "rung and shape": f"{row.rung}, {row.shape}",
            "of its peer": f"{row.ratio_to_best_peer:.2f}x", "% of limit": f"{row.percent_of_limit:.0f}",
            "bound by": bound(row), "try": NEXT[bound(row)],
        }  # fmt: skip


def _exercises_text(done):
    """From the learner's progress: what passed, and with how much help."""
    records = [record for of in done.values() for record in of]
    passed = [record for record in records if record.passed]
    return (
        f"{len(passed)} of {len(records)} passed, {sum(not record.hints for record in passed)} of them without a hint; "
        f"{sum(r.hints for r in records)} hints and {sum(r.checks for r in records)} checks in all."
    )


def _exercises(done):
    """A column a day."""
    yield {"": "passed"} | {day: f"{sum(bool(r.passed) for r in of)} of {len(of)}" for day, of in done.items()}
    yield {"": "hints used"} | {day: sum(r.hints for r in of) for day, of in done.items()}


def write_report(chosen: str = "") -> list[Path]:
    """Write it from this machine's rows, or where it has none from committed ones; without a GPU to reports/cpu."""
    own = report.REPORTS / device.name()
    source = own if any(measured(own)) else next(iter(report.device_folders()), own)
    return final.write(own, *build(source, chosen))


def the_report_builds():
    """From committed rows in seconds, without a GPU: Markdown, HTML, and a PDF of at most two pages."""
    folders = [folder for folder in report.device_folders() if any(measured(folder))]
    if not folders:
        print("  no rows of a GPU yet")
        return
    made = write_report()
    for path in made:
        print(f"  {path}")
    assert len(re.findall(rb"/Type /Page\b", made[-1].read_bytes())) <= 2
    other = contests(folders[0])[0].name
    assert other in "".join(block.heading for block in build(folders[0], other)[1])


LESSON = Steps(
    about=About(
        teaches="compare_all, every ladder in one picture, the report of one or two pages",
        hours=0.5,
        star=True,
    ),
    steps=(the_report_builds,),
    compares=(compare_all, ladders),
)

if __name__ == "__main__":
    LESSON.main()
