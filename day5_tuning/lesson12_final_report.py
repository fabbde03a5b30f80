"""The final report: what was measured, what limits it, what to try next
=====================================================================
The last deliverable of the course is a report of one or two pages. Its reader did not take part. It says:

- what was measured, and on which machine
- how far each result is from the best peer and from the machine's limit
- which predictions were wrong, and by how much
- what to spend the next hour on

It is generated from rows (lessonkit/pages/final_report.py) and kept as reports/<device>/final_report.md:

    python3 course.py report final                         Markdown, HTML and PDF under reports/<device>/
    python3 course.py report final --operator softmax      with another operator's ladder

The rows are your own; without a GPU they are the committed ones, and reports/nvidia-h200/final_report.md is the result.
The report ends with the number of tries and hints that your exercises took. No program can write three things: which
operator you chose and why, what surprised you, and what you would try next. Add these in a summary of your own. This
lesson makes two tables besides. `compare_all` compares each operator in all languages of the course with the best peer.
`ladders` lists each operator's rungs, and draws the longest ladders in one picture.

Predict before you run: in which operator does the last rung gain most over the first? Where is a peer still faster?
You will be able to: report a performance result so that others can trust it and check it.
You need: lesson 10 (the roofline, and what a limit is).
Run it:    python3 course.py run lesson12_final_report
"""

import re

from lessonkit import About, Steps, Table, report
from lessonkit.base.words import speaking
from lessonkit.lesson import kernels
from lessonkit.measure.stale import Today
from lessonkit.pages import shares
from lessonkit.pages.final_report import build, write_report
from lessonkit.pages.results import contests, language, measured

LARGE = 8  # how many ladders are drawn: those with the most rungs


def compare_all(folder):
    """Each operator in each language, beside the best peer, at the largest shape that most rungs were measured at."""
    table = []
    for c in contests(folder):
        line = {"operator": c.name, "shape": f"{c.shape} {c.dtype}"}
        for tongue in ("Triton", "CUDA C++", "Gluon", "ThunderKittens"):
            mine = [row.ms_p50 for row in c.rungs if language(row.lesson) == tongue]
            line[f"{tongue}, ms"] = f"{min(mine):.4g}" if mine else ""
        line["best peer, ms"] = f"{c.peer.ms_p50:.4g} ({c.peer.rung})" if c.peer else ""
        line["over its peers"] = f"{c.best.ratio_to_best_peer:.2f}" if c.best.ratio_to_best_peer else ""
        line["% of the limit"] = f"{shares.percent(c.best):.0f}"
        table.append(line)
    note = (
        "The fastest rung in each language. Over its peers: the fastest of all against the best in the same rounds. "
        "The limit: a copy of as many bytes, or the FLOPs at cuBLAS's rate."
    )
    return Table("compare all", table, note) if table else None


def ladders(folder):
    """The ladder of each operator: every rung's share of its limit, in the order of the course."""
    found, today = contests(folder), Today(kernels())
    table = []
    for c in found:
        rungs = ", ".join(f"{row.rung} {shares.percent(row):.0f}{' *' * bool(today.why_old(row))}" for row in c.rungs)
        peer = f"{c.peer.rung} {shares.of_limit(c.peer)}" if c.peer else ""
        table.append(
            {
                "operator": c.name,
                "shape": f"{c.shape} {c.dtype}",
                "% of the limit, rung by rung": rungs,
                "best peer": peer,
            }
        )

    def draw(figure):
        longest = sorted(found, key=lambda c: -len(c.rungs))[:LARGE]
        figure.set_size_inches(14, 3.6 * LARGE / 2)
        for i, c in enumerate(longest):
            axes = figure.add_subplot(LARGE // 2, 2, i + 1)
            c.bars(axes)
            axes.set_xticks(range(len(c.rungs)), [row.rung for row in c.rungs], rotation=45, ha="right", fontsize=7)
            axes.set_title(f"{c.name}, {c.shape}", fontsize=9)
            axes.set_ylim(0, 112)

    note = (
        "The limit: a copy of as many bytes, or cuBLAS's rate. Drawn are the longest; a colour a lesson, the dashed "
        "line is the best peer. A star: measured before the code of that rung changed; today's code waits for a GPU."
    )
    return Table("ladders", table, note, draw=draw) if table else None


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
    with speaking("en"):
        assert any(block.heading.startswith(f"One ladder: {other} at ") for block in build(folders[0], other)[1])


# The answers for an H200: in the sum. Day 2's last rung is 300 times as fast as its first, a single program. At their
# main shapes a peer is still more than 3% faster in cross-entropy, rmsnorm, softmax, all-reduce and quantisation, and
# in the backward of softmax and of add + layernorm. The report's section "What was found" has the ratios.
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
