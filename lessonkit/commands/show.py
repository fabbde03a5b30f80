"""What a lesson prints when it runs: its checks, what its rungs cost, and on a GPU how fast they are."""

import os
import sys
from collections.abc import Iterable
from typing import Any

from lessonkit.base import chips, device
from lessonkit.base.errors import Missing, Unsupported
from lessonkit.base.files import REPORTS
from lessonkit.judge import counters
from lessonkit.judge.verify import LeftOut, Question, grad_checks, rung_checks
from lessonkit.lesson import Lesson, Steps, shape_name, title
from lessonkit.measure import bench, ncu, operator_bench, operator_rows, rows
from lessonkit.measure.stale import Today, device_folders
from lessonkit.modes import compiled
from lessonkit.pages import predictions, report
from lessonkit.pages.predictions import MACHINE

from rich.console import Console
from rich.progress import Progress
from rich.table import Table as RichTable
from rich.text import Text

# What is printed is data: [x^2] is no markup, [0:x:2] no emoji. As wide as the terminal or as COLUMNS says.
console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 150, markup=False, emoji=False)
MODES = {"cuda": "run on the GPU", "cpu": "interpreted: no GPU was found", "meta": "compiled only"}


def table(heading: str, columns: Iterable[str], body: Iterable[Iterable[Any]]) -> None:
    grid = RichTable(title=heading, title_justify="left", title_style="bold")
    for column in columns:
        grid.add_column(column, overflow="fold")
    for line in body:
        grid.add_row(*map(str, line))
    console.print(grid)


def _rule(name: str, where: str) -> None:
    console.rule(Text.assemble((title(name), "bold"), f" ({where})"))


def lesson(name: str, lesson: Lesson) -> None:
    """Run a kernel lesson as far as this machine can; exit code 1 if a rung is wrong."""
    mode = MODES[device.DEVICE.type]
    _rule(name, mode.replace("interpreted", "emulated") if lesson.extension else mode)
    if checks(lesson):
        raise SystemExit(1)
    if device.HAS_GPU:
        timed(name, lesson)
    else:
        if lesson.extension:
            counted(counters.rows(counters.traffic(lesson)))
        resources(name, (90,))  # the rest takes twice as long: `compile` shows it
        stored(name, lesson)


def checks(lesson: Lesson) -> int:
    """Check every rung on every case and the gradients; print a line a rung; return how many failed."""
    body, failures = [], 0
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("checking", total=len(lesson.rungs))
        for rung in lesson.rungs:
            found = rung_checks(lesson, rung)
            failures += len(found.wrong)
            least = f"{found.moved:.2f}" if found.moved else ""
            more = f" (and {len(found.wrong) - 1} more)" if len(found.wrong) > 1 else ""
            said = found.wrong[0] + more if found.wrong else "; ".join(found.left_out | found.refused)
            body.append([rung.__name__, f"{found.passed} passed", said, least])
            progress.advance(task)
    table("checked against PyTorch", ["rung", "cases", "wrong" if failures else "left out", "bytes / least"], body)
    if lesson.grad and not failures:
        wrong = grad_checks(lesson)
        failures += len(wrong)
        console.print(f"gradients of {lesson.grad.op.__name__}: {'; '.join(wrong) or 'agree with float64 autograd'}")
    return failures


def questions(asked: Iterable[Question]) -> list[str]:
    """Ask them in turn, print a line for each, and return those that are not answered well."""
    body, failed = [], []
    with Progress(console=console, transient=True) as progress:
        todo = list(asked)
        task = progress.add_task("asking", total=len(todo))
        for question in todo:
            progress.update(task, advance=1, description=f"{question.kind} {question.subject}"[:60])
            try:
                answer = "ok", question.ask() or ""
            except LeftOut as why:
                answer = "left out", str(why)
            except Exception as wrong:
                said = str(wrong) if isinstance(wrong, AssertionError) else f"{type(wrong).__name__}: {wrong}"
                answer = "WRONG", said
                failed.append(f"{question}: {said}")
            body.append([question.kind, question.subject, *answer])
    table("also asked", ["question", "of", "", ""], body)
    return failed


def timed(name: str, lesson: Lesson) -> int:
    """Time the lesson beside its peers and keep the rows; return how many contenders failed."""
    said: list[str] = []
    with console.status("timing rungs and peers"):
        found = bench.bench(name, lesson, said.append)
    for line in said:
        console.print(line, style="dim")
    body = [
        [r.shape, r.rung, f"{r.ms_p50:.4g}", r.rate, f"{r.percent_of_limit:.0f}%", r.ratio_to_best_peer or ""]
        for r in found
        if r.kind != rows.ABSENT
    ]
    table("measured", ["shape", "", "ms", "rate", "of the limit", "over best peer"], body)
    if found:
        console.print(f"rows in {rows.save(found)}", style="dim")
    if printed := bench.printed(lesson):
        table("measured by the program itself", printed.rows[0], (row.values() for row in printed.rows))
        console.print(f"rows in {report.save_table(name, printed, device.name())}", style="dim")
    return sum("NOT TIMED" in line for line in said)


def stored(name: str, lesson: Lesson) -> None:
    """What an H200 measured for the rungs, beside what the lesson predicts, for a reader without a GPU.

    At the shapes of the predictions; where there are none, at the shape that moves most bytes.
    """
    found = [row for row in rows.read(REPORTS / MACHINE / f"{name}.csv") if row.kind == "rung"]
    if not found:
        return
    largest = max(found, key=lambda row: row.bytes).shape
    shapes = list(dict.fromkeys(shape_name(said.at) for said in lesson.predicted)) or [largest]
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
    columns = ["shape", "rung", "ms", "over rung before", "rate", "of limit", "predicted", "measured / predicted"]
    heading = f"stored from a GPU (none here): reports/{MACHINE}"
    if len(shapes) == 1:  # it stands above the table, which is then narrower
        heading, columns, body = f"{heading}, {shapes[0]}", columns[1:], [line[1:] for line in body]
    table(heading, columns, body)
    if old:
        console.print("* measured before the code of this rung changed", style="dim")


def missing_operators(names: list[str]) -> list[str]:
    """A line for each shape of course_ops' operators without a row of today's code, or with one that has no ratio."""
    asked, lines = operator_rows.cases(names), list[str]()
    for folder in device_folders():
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
    with console.status("compiling"):
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
    table("compiled (no GPU needed)", columns, ([getattr(k, c) for c in columns] for k in found))
    if without := compiled.unfit(name, targets):
        table("no kernel", ["rung", "target", "why"], ([u.rung, u.target, u.why] for u in without))


def counted(found: list[dict[str, Any]]) -> None:
    """What emulated CUDA kernels ask of memory (counters.rows)."""
    if found:
        columns = [c for c in found[0] if any(row[c] for row in found)]
        table("counted on the last check", columns, ([row[c] for c in columns] for row in found))


def counted_by_ncu(names: list[str]) -> bool:
    """What the GPU's counters say of CUDA kernels, beside what the emulator said; False if they say nothing."""
    with console.status("running every rung under ncu"):
        said = ncu.count(names)
    for line in said:
        console.print(line, style="dim")
    body = ncu.compared(ncu.path(rows.REPORTS / device.name()), names)
    if body:
        apart = [row for row in body if row["ratio"] != "1.00"]
        heading = f"{len(body)} figures; not the same:"
        table(heading, body[0], (row.values() for row in apart))
    return bool(body)


def steps(name: str, lesson: Steps) -> None:
    """Run a lesson of steps; a failed assertion ends it with a traceback and exit code 1."""
    _rule(name, f"tensors on {device.DEVICE}")
    for step in lesson.steps:
        claim = (step.__doc__ or step.__name__).strip().splitlines()[0]
        console.print(f"\n{step.__name__}: {claim}", style="bold", highlight=False)
        try:
            measured = step()
        except Unsupported as why:  # here, for want of a package
            console.print(f"  left out: {why}", highlight=False)
            continue
        if measured is not None and measured.rows:
            table(measured.name, measured.rows[0], (row.values() for row in measured.rows))
            console.print(measured.note, highlight=False)
            report.save_table(name, measured, device.name(), step.__name__)
    for folder in report.device_folders():
        for compare in lesson.compares:
            if found := compare(folder):
                table(f"{folder.name}: {found.name}", found.rows[0], (row.values() for row in found.rows))
                console.print(found.note, highlight=False)


def from_a_gpu(lesson: str, name: str) -> None:
    """Print a step's table as a GPU measured it, on a machine that has none."""
    if found := report.committed(lesson, name):
        table(f"{name}, as committed from a GPU (none here)", found[0], (row.values() for row in found))
    else:
        print(f"  checked in the interpreter; no GPU here, and no figures of one are committed yet for {name!r}")
