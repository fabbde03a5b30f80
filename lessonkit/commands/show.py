"""What a lesson prints when it runs: its checks, what its rungs cost, and on a GPU how fast they are."""

import os
import sys
from collections.abc import Iterable
from typing import Any

from lessonkit.base import chips, device
from lessonkit.base.errors import Missing, Unsupported
from lessonkit.base.files import REPORTS
from lessonkit.base.prose import normal
from lessonkit.base.words import later, said
from lessonkit.judge import counters
from lessonkit.judge.verify import LeftOut, Question, first_target, grad_checks, rung_checks
from lessonkit.lesson import Lesson, Steps, title
from lessonkit.measure import bench, ncu, operator_bench, operator_rows, rows
from lessonkit.measure.rows import MACHINE
from lessonkit.measure.stale import Today, released
from lessonkit.modes import compiled
from lessonkit.pages import learned, predictions, report

from rich.console import Console
from rich.progress import Progress
from rich.table import Table as RichTable
from rich.text import Text

# What is printed is data: [x^2] is no markup, [0:x:2] no emoji. As wide as the terminal or as COLUMNS says.
console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 150, markup=False, emoji=False)
MODES = {
    "cuda": later("run on the GPU"),
    "cpu": later("interpreted: no GPU was found"),
    "emulated": later("emulated: no GPU was found"),
    "meta": later("compiled only"),
}


def table(heading: str, columns: Iterable[str], body: Iterable[Iterable[Any]]) -> None:
    grid = RichTable(title=heading, title_justify="left", title_style="bold")
    for column in columns:
        grid.add_column(column, overflow="fold")
    for line in body:
        grid.add_row(*map(str, line))
    console.print(grid)


def _rule(name: str, where: str) -> None:
    console.rule(Text.assemble((said(title(name)), "bold"), f" ({where})"))


def lesson(name: str, lesson: Lesson) -> None:
    """Run a kernel lesson as far as this machine can; exit code 1 if a rung is wrong."""
    mode = device.DEVICE.type
    _rule(name, said(MODES["emulated" if lesson.extension and mode == "cpu" else mode]))
    if checks(lesson):
        raise SystemExit(1)
    if device.HAS_GPU:
        timed(name, lesson)
    else:
        if lesson.extension:
            counted(counters.rows(counters.traffic(lesson)))
        resources(name, (first_target(lesson),))  # the rest takes twice as long: `compile` shows it
        stored(name, lesson)


def checks(lesson: Lesson) -> int:
    """Check every rung on every case and the gradients; print a line a rung; return how many failed."""
    body, failures = [], 0
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(said("checking"), total=len(lesson.rungs))
        for rung in lesson.rungs:
            found = rung_checks(lesson, rung)
            failures += len(found.wrong)
            least = f"{found.moved:.2f}" if found.moved else ""
            more = said("(and {count} more)").format(count=len(found.wrong) - 1) if len(found.wrong) > 1 else ""
            words = f"{found.wrong[0]} {more}" if found.wrong else "; ".join(found.left_out | found.refused)
            body.append([rung.__name__, said("{count} passed").format(count=found.passed), words.strip(), least])
            progress.advance(task)
    wrong_or_left = said("wrong") if failures else said("left out")
    columns = [said("rung"), said("cases"), wrong_or_left, said("bytes / least")]
    table(said("checked against PyTorch"), columns, body)
    if lesson.grad and not failures:
        wrong = grad_checks(lesson)
        failures += len(wrong)
        agree = "; ".join(wrong) or said("agree with float64 autograd")
        console.print(said("gradients of {op}: {verdict}").format(op=lesson.grad.op.__name__, verdict=agree))
    return failures


def questions(asked: Iterable[Question]) -> list[str]:
    """Ask them in turn, print a line for each, and return those that are not answered well."""
    body, failed = [], []
    with Progress(console=console, transient=True) as progress:
        todo = list(asked)
        task = progress.add_task(said("asking"), total=len(todo))
        for question in todo:
            progress.update(task, advance=1, description=f"{question.kind} {question.subject}"[:60])
            try:
                answer = "ok", question.ask() or ""
            except LeftOut as why:
                answer = said("left out"), str(why)
            except Exception as wrong:
                words = str(wrong) if isinstance(wrong, AssertionError) else f"{type(wrong).__name__}: {wrong}"
                answer = said("WRONG"), words
                failed.append(f"{question}: {words}")
            body.append([question.kind, question.subject, *answer])
    table(said("also asked"), [said("question"), said("of"), "", ""], body)
    return failed


def timed(name: str, lesson: Lesson) -> int:
    """Time the lesson beside its peers and keep the rows; return how many contenders failed."""
    lines: list[str] = []
    with console.status(said("timing rungs and peers")):
        found = bench.bench(name, lesson, lines.append)
    for line in lines:
        console.print(line, style="dim")
    body = [
        [r.shape, r.rung, f"{r.ms_p50:.4g}", r.rate, f"{r.percent_of_limit:.0f}%", r.ratio_to_best_peer or ""]
        for r in found
        if r.kind != rows.ABSENT
    ]
    columns = [said("shape"), "", "ms", said("rate"), said("of the limit"), said("over best peer")]
    table(said("measured"), columns, body)
    if found:
        console.print(said("rows in {path}").format(path=rows.save(found)), style="dim")
    if printed := bench.printed(lesson):
        table(said("measured by the program itself"), printed.rows[0], (row.values() for row in printed.rows))
        path = report.save_table(name, printed, device.name())
        console.print(said("rows in {path}").format(path=path), style="dim")
    return sum("NOT TIMED" in line for line in lines)


def stored(name: str, lesson: Lesson) -> None:
    """What an H200 measured for the rungs, beside what the lesson predicts, for a reader without a GPU.

    At the shapes of the predictions; where there are none, at the shape that moves most bytes.
    """
    found = [row for row in rows.read(REPORTS / MACHINE / f"{name}.csv") if row.kind == "rung"]
    if not found:
        return
    shapes = learned.shown_shapes(lesson, found)
    pairs = {(pair.row.rung, pair.row.shape): pair for pair in predictions.compared(lesson, found)}
    at = {(row.rung, row.shape): row for row in found}
    today = Today([(name, lesson)])
    body, old = list[list[str]](), False
    for shape in shapes:
        before = None
        for rung in lesson.rungs:
            if (row := at.get((rung.__name__, shape))) is None:
                continue
            pair, mark = pairs.get((row.rung, shape)), "*" if today.why_old(row) else ""
            old |= bool(mark)
            times = f"{before.ms_p50 / row.ms_p50:.3g}x" if before else ""
            predicted = [pair.how, f"{pair.ratio:.2f}"] if pair else ["", ""]
            ms = f"{row.ms_p50:.4g}{mark}"
            body.append([shape, row.rung, ms, times, row.rate, f"{row.percent_of_limit:.0f}%", *predicted])
            before = row
    columns = [said("shape"), said("rung"), "ms", said("over rung before"), said("rate"), said("of the limit")]
    columns += [said("predicted"), said("measured / predicted")]
    heading = said("stored from a GPU (none here): {path}").format(path=f"reports/{MACHINE}")
    if len(shapes) == 1:  # it stands above the table, which is then narrower
        heading, columns, body = f"{heading}, {shapes[0]}", columns[1:], [line[1:] for line in body]
    table(heading, columns, body)
    if old:
        console.print(said("* measured before the code of this rung changed"), style="dim")


def missing_operators(names: list[str]) -> list[str]:
    """A line for each shape of course_ops' operators of which a release lacks a row of today's code, or its ratio."""
    asked, lines = operator_rows.cases(names), list[str]()
    for folder in released():
        found = operator_rows.read(folder / operator_rows.FILE)
        missing = operator_rows.missing(found, asked)
        lines += [f"{folder.name}: {' '.join(case.key)}: no row of this code" for case in missing]
        known = {case.key for case in asked} - {case.key for case in missing}
        lines += [f"{folder.name}: {operator_bench.said(row)}" for row in found if row.key in known and not row.ratio]
    return lines


def operators(found: list[operator_rows.Row]) -> None:
    """What the rows of course_ops' operators say."""
    body = [
        [
            f"{s.operator} {s.direction}",
            s.shapes,
            s.failed or "",
            f"{s.mean:.2f}" if s.shapes else "",
            f"{s.worst.ratio:.2f} {s.worst.shape}" if s.worst else "",
            f"{s.share_behind:.0%}",
        ]
        for s in operator_rows.summaries(found)
    ]
    table("course_ops over its best peer", ["", "shapes", "failed", "mean", "worst", "under 0.97"], body)


def resources(name: str, targets: tuple[chips.Target, ...] = compiled.TARGETS) -> None:
    """What the compiler made of the rungs: nothing here needs a GPU."""
    with console.status(said("compiling")):
        try:
            found = compiled.kernels(name, targets)
        except Missing as missing:
            return console.print(str(missing), style="yellow")
    columns = [
        "rung",
        "kernel",
        "target",
        "warps",
        "registers",
        "spills",
        "shared",
        "occupancy",
        "load_bytes",
        "store_bytes",
    ]
    table(said("compiled (no GPU needed)"), columns, ([getattr(k, c) for c in columns] for k in found))
    if without := compiled.unfit(name, targets):
        table(
            said("no kernel"), [said("rung"), said("target"), said("why")], ([u.rung, u.target, u.why] for u in without)
        )


def counted(found: list[dict[str, Any]]) -> None:
    """What emulated CUDA kernels ask of memory (counters.rows)."""
    if found:
        columns = [c for c in found[0] if any(row[c] for row in found)]
        table(said("counted on the last check"), columns, ([row[c] for c in columns] for row in found))


def counted_by_ncu(names: list[str]) -> bool:
    """What the GPU's counters say of CUDA kernels, beside what the emulator said; False if they say nothing."""
    with console.status("running every rung under ncu"):
        lines = ncu.count(names)
    for line in lines:
        console.print(line, style="dim")
    body = ncu.compared(ncu.path(rows.REPORTS / device.name()), names)
    if body:
        apart = [row for row in body if row["ratio"] != "1.00"]
        heading = f"{len(body)} figures; not the same:"
        table(heading, body[0], (row.values() for row in apart))
    return bool(body)


def steps(name: str, lesson: Steps) -> None:
    """Run a lesson of steps; a failed assertion ends it with a traceback and exit code 1."""
    _rule(name, said("tensors on {device}").format(device=device.DEVICE))
    for step in lesson.steps:
        claim = normal((step.__doc__ or step.__name__).strip().partition("\n\n")[0])
        console.print(f"\n{step.__name__}: {said(claim)}", style="bold", highlight=False)
        try:
            measured = step()
        except (Missing, Unsupported) as why:  # here, for want of a package or a compiler
            console.print(f"  {said('left out')}: {why}", highlight=False)
            continue
        if measured is not None and measured.rows:
            table(measured.name, measured.rows[0], (row.values() for row in measured.rows))
            console.print(said(measured.note), highlight=False)
            report.save_table(name, measured, device.name(), step.__name__)
    for folder in report.device_folders():
        for compare in lesson.compares:
            if found := compare(folder):
                table(f"{folder.name}: {found.name}", found.rows[0], (row.values() for row in found.rows))
                console.print(said(found.note), highlight=False)


def from_a_gpu(lesson: str, name: str) -> None:
    """Print a step's table as a GPU measured it, on a machine that has none."""
    if found := report.committed(lesson, name):
        heading = said("{name}, as committed from a GPU (none here)").format(name=name)
        table(heading, found[0], (row.values() for row in found))
    else:
        words = said("checked in the interpreter; no GPU here, and no figures of one are committed yet for {name}")
        print(f"  {words.format(name=repr(name))}")
