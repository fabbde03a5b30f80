"""bench, report, stale, renew: rows, the pages made of them, and which are old."""

import os
from functools import partial
from typing import Annotated

from lessonkit.base import device
from lessonkit.base.words import counted, said
from lessonkit.command_line import choice
from lessonkit.command_line.outcome import end, list_written, mistakes, say_written, warn
from lessonkit.command_line.panels import MEASURE, Which
from lessonkit.commands import on_gpu, renew, show
from lessonkit.lesson import kernels
from lessonkit.measure import gpu_mutants, operator_rows, stale
from lessonkit.pages import final_report, paths, report

import typer

app = typer.Typer()
measure = partial(app.command, rich_help_panel=MEASURE)


@measure()
def bench(
    which: Which = "",
    operators: Annotated[
        list[str] | None, typer.Argument(help="After `ops`: operators of course_ops (softmax), or all.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="`ops` stops after so many; the same command goes on.")] = 60.0,
    workers: Annotated[int, typer.Option(help="`ops`: processes that compile ahead of what is timed.")] = 0,
    release: Annotated[
        bool, typer.Option("--release", help="`ops`: list the shapes without a row of this code.")
    ] = False,
) -> None:
    """Time rungs beside their peers and write rows, pages and plots; `bench ops`: course_ops at the shapes of models.

    Without a GPU it says so and writes nothing.
    """
    if which == "ops":
        return _bench_operators(operators or [], minutes, workers, release)
    if operators:
        words = said("{names}: one name of lessons; operators are named after `bench ops`")
        raise typer.BadParameter(words.format(names=" ".join(operators)))
    which = choice.meant(which)
    if not device.HAS_GPU:
        show.console.print(
            said("No GPU was found: interpreter timings say nothing about speed, so nothing is written.")
        )
        return
    failed: list[str] = []
    for name, lesson in choice.with_kernels(which, failed):
        if wrong := show.timed(name, lesson):
            failed.append(f"{name}: {wrong} NOT TIMED")
    say_written(report.write())
    end(failed)


def _bench_operators(names: list[str], minutes: float, workers: int, release: bool) -> None:
    """Time what of course_ops has no row of today's code, or with `release` list it and fail if there is any."""
    known = {operator.name for operator in operator_rows.operators()}
    if wrong := sorted(set(names) - known):
        words = said("course_ops has no {wrong} to be timed. It has {known}")
        raise typer.BadParameter(words.format(wrong=", ".join(wrong), known=", ".join(sorted(known))))
    if release:
        lines = show.missing_operators(names)
        end(lines)
    if not device.HAS_GPU:
        show.console.print(said("No GPU was found: nothing is timed. `bench ops --release` lists what has no row."))
        return
    on_gpu.timed(names, minutes, workers)


@measure(name="report")
def write_report(
    which: Annotated[str, typer.Argument(help="Nothing, or `final`: the report that day 5 ends with.")] = "",
    operator: Annotated[str, typer.Option(help="The operator that the final report is about.")] = "",
) -> None:
    """Rebuild every page, plot and results block from the rows; `report final`: the final report."""
    if which not in ("", "final"):
        words = said("{which}: there is `report`, and `report final`")
        raise typer.BadParameter(words.format(which=repr(which)))
    if which:
        with mistakes():
            made = final_report.write_report(operator)
        return list_written(made)
    with show.console.status(said("making pages")):
        changed = report.write()
    list_written(changed)
    warn(paths.routes())
    if old := stale.old():
        words = said("{count} rows are to be measured again; the pages mark them, `stale` says why.")
        show.console.print(words.format(count=len(old)), style="yellow")


@measure(name="stale")
def list_stale(
    release: Annotated[
        bool, typer.Option("--release", help="Of the GPU that a release is measured on; old rows are exit code 1.")
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Add what this machine's compilers make of the rows.")
    ] = False,
) -> None:
    """List measured rows whose code has changed or which lack a peer's version; machine code is compared first."""
    if shown := stale.show_equal():
        words = said("{count} rows: machine code shown to be equal, and kept so in their files")
        show.console.print(words.format(count=shown))
        say_written(report.write())
    if record:
        words = said("{count} rows: what the compilers of this machine make of them, added")
        show.console.print(words.format(count=stale.record()))
    folders = stale.released() if release else stale.device_folders()
    old = stale.old(folders)
    body = ([each.device, *each.named, stale.in_words(each.why), each.row.commit] for each in old)
    titles = [said("device"), said("lesson"), said("rung"), said("shape"), said("why"), said("measured at")]
    show.table(counted(len(old), said("1 row to measure again"), said("{count} rows to measure again")), titles, body)
    tables = stale.old_tables(folders)
    for line in tables:
        show.console.print(said("old table: {line}").format(line=line))
    verdicts = list(gpu_mutants.old(kernels()))
    for line in verdicts:
        show.console.print(said("no verdict of today on a mutant: {line}").format(line=line))
    raise typer.Exit(int(release and bool(old or tables or verdicts)))


@measure(name="renew")
def measure_again(
    minutes: Annotated[float, typer.Option(help="Stop after so many; the same command goes on.")] = 25.0,
    workers: Annotated[int, typer.Option(help="So many processes call and draw at a time; 0: one a core.")] = 0,
    share: Annotated[
        str, typer.Option(help="2/3: the second third, where CUDA_VISIBLE_DEVICES gives each run a GPU of its own.")
    ] = "1/1",
) -> None:
    """Measure again on this GPU what `stale` lists: rows, tables, mutants, operators; then draw random cases.

    What has to be compiled is called first, many at a time. Of the time left before the random cases, a fifth goes to
    sanitizers and neighbours that were not run on today's code. The cheapest come first. Each gets at most a quarter of
    that fifth. Afterwards: `report`, and `stale --record`.
    """
    nth, _, of = share.partition("/")
    if not (nth.isdecimal() and of.isdecimal() and 1 <= int(nth) <= int(of)):
        raise typer.BadParameter(said("--share is {share}, expected 1/2 for the first of two").format(share=share))
    if not device.HAS_GPU:
        show.console.print(said("No GPU was found: nothing is measured. `stale` lists what is old."))
        return
    workers = workers or max(1, len(os.sched_getaffinity(0)) // int(of))
    end(renew.run(minutes, workers, partial(print, flush=True), int(nth), int(of)))
