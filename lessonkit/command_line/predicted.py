"""chip, compile, count: what is known of kernels without running them on a GPU."""

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

from lessonkit.base import chips, device
from lessonkit.base.errors import Missing
from lessonkit.base.words import language, said
from lessonkit.command_line import choice
from lessonkit.command_line.outcome import end, say_written
from lessonkit.command_line.panels import MEASURE, Which
from lessonkit.commands import exercises, show
from lessonkit.cuda import sass, toolchain
from lessonkit.judge import counters
from lessonkit.judge.sentences import told
from lessonkit.measure import ncu
from lessonkit.modes import compiled
from lessonkit.pages import card, report, targets

import typer

app = typer.Typer()
measure = partial(app.command, rich_help_panel=MEASURE)


@measure()
def chip(
    name: Annotated[
        str, typer.Argument(help='Your card, "RTX 4090"; nothing: COURSE_GPU\'s, this GPU, or the table.')
    ] = "",
    which: Which = "",
) -> None:
    """Show what the lessons predict for a card, by its data sheet: its limits, its roofline, and each rung's time."""
    mine = choice.card(name or os.environ.get(chips.CHOICE, "") or (device.name() if device.HAS_GPU else ""))
    legend = said(
        "TB/s of memory; L2 in MB; fp32 to fp8 in TFLOP/s; shared: bytes of shared memory, of a block and of an SM; "
        "registers and threads of an SM; all from the data sheets"
    )
    titles = [*map(said, targets.CARD_TITLES)]
    show.table(said("cards"), titles, targets.cards([mine] if mine else chips.CHIPS.values(), language()), legend)
    if not mine:
        words = said("What is predicted for one of them: {command}")
        show.console.print(words.format(command=f'{exercises.COURSE} chip "RTX 4090"'))
        return
    failed: list[str] = []
    lessons = list(choice.with_kernels(which, failed))
    titles = [said("lesson"), said("largest shape"), said("FLOPs per byte"), said("TFLOP/s at most")]
    titles += [said("us at least"), said("bound by")]
    show.table(said("{card}: roofline").format(card=mine.name), titles, targets.roofline(mine, lessons, language()))
    for lesson, each in lessons:
        if body := [rung.line for rung in card.rungs(mine, lesson, each)]:
            heading = said("{card}, predicted, not measured: {lesson}").format(card=mine.name, lesson=lesson)
            show.table(heading, [*map(said, card.TITLES)], body)
    show.console.print(
        said(
            "A prediction is a share of the data sheet's rate, as the lesson says it of an H200; what `bench` measures "
            "on your card is held against a copy, or cuBLAS, in the same rounds."
        )
    )
    if not mine.compiled:
        words = said("Nothing is compiled for {target}: no registers and no occupancy.")
        show.console.print(words.format(target=chips.label(mine.target)))
    end(failed)


@measure(name="compile")
def compile_lessons(which: Which = "") -> None:
    """Compile every rung for NVIDIA and AMD (no GPU needed), test its claims, and write reports/compiled.

    All lessons, and `course_ops`: the operators too. With COURSE_GPU, for that card alone, and nothing is written.
    """
    broken: list[str] = []
    mine = choice.card(os.environ.get(chips.CHOICE, ""))
    if mine and not mine.compiled:
        words = said("{card}: nothing is compiled for {target}")
        raise typer.BadParameter(words.format(card=f"{chips.CHOICE}={mine.name}", target=chips.label(mine.target)))
    wanted = (mine.target,) if mine else compiled.TARGETS
    chosen = [] if which == compiled.COURSE_OPS else list(choice.with_kernels(which, broken))
    names = [name for name, lesson in chosen if not lesson.extension]
    if which in ("", "all", compiled.COURSE_OPS):
        names.insert(0, compiled.COURSE_OPS)  # takes longest
    with show.console.status(said("compiling")):
        compiled.compile_ahead(names, wanted)
    claimed = {name: lesson.claimed() for name, lesson in chosen}
    written: list[Path] = []
    for name in dict.fromkeys([*claimed, *names]):
        try:
            show.resources(name, wanted)
        except RuntimeError as why:
            broken.append(str(why))
            continue
        with suppress(Missing):  # show.resources has said what
            broken += sass.broken_claims(name, claimed.get(name, {}), compiled.kernels(name, wanted))
            if not mine:
                written += report.save_compiled(name)
    if not mine:
        say_written([*written, *report.write()])
    end(broken)


@measure()
def count(
    which: Which = "cuda",
    by_ncu: Annotated[
        bool, typer.Option("--ncu", help="On a GPU: ask its counters by Nsight Compute instead.")
    ] = False,
) -> None:
    """Count what emulated CUDA kernels ask of memory, test what lessons say of it, and write reports/emulated."""
    broken: list[str] = []
    chosen = [(name, lesson) for name, lesson in choice.with_kernels(which, broken) if lesson.extension]
    if not chosen and not broken:
        raise typer.BadParameter(said("no CUDA C++ lesson matches {which}").format(which=repr(which)))
    if by_ncu:
        if why := ncu.lacks():
            show.console.print(told(why))
            return
        if not show.counted_by_ncu([name for name, _ in chosen]):
            broken.append(said("ncu counted nothing"))
        say_written(report.write())
        end(broken)
    why = said("On this machine kernels run on the GPU; with CUDA_VISIBLE_DEVICES= they are emulated and counted.")
    if device.HAS_GPU or (why := toolchain.lacks("g++", "Python.h", "ninja")):
        show.console.print(told(why))
        return
    written: list[Path] = []
    for name, lesson in chosen:
        found = counters.traffic(lesson)
        broken += counters.broken_counts(name, lesson, found)
        show.counted(lines := counters.rows(found))
        written += report.save_emulated(name, lines)
    say_written([*written, *report.write()])
    end(broken)
