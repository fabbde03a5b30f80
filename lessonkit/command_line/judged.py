"""mutants, sanitize, beside: what only a GPU can judge of a kernel."""

from functools import partial
from typing import Annotated

from lessonkit.base import device
from lessonkit.base.words import said
from lessonkit.command_line import choice
from lessonkit.command_line.outcome import end, mistakes
from lessonkit.command_line.panels import MEASURE, LessonOrOperator, Which
from lessonkit.commands import on_gpu, show
from lessonkit.measure import sanitize

import typer

app = typer.Typer()
measure = partial(app.command, rich_help_panel=MEASURE)


@measure(name="mutants")
def judge_mutants(
    which: Which = "",
    again: Annotated[bool, typer.Option("--again", help="Judge also those that have a verdict of today.")] = False,
    workers: Annotated[int, typer.Option(help="So many at a time, each in a process of its own.")] = 4,
) -> None:
    """Judge wrong kernels that only this kind of GPU runs, each in a process of its own, and keep the verdicts.

    `check` judges all others, on any machine.
    """
    which = choice.meant(which)
    if not device.HAS_GPU:
        show.console.print(said("No GPU was found: these mutants are of kernels that run on one kind of GPU only."))
        return
    failed: list[str] = []
    lessons = list(choice.with_kernels(which, failed))
    end([*failed, *on_gpu.judged(lessons, again, workers)])


@measure(name="sanitize")
def run_sanitizers(
    which: LessonOrOperator = "",
    tool: Annotated[list[str] | None, typer.Option(help=f"Only this: {', '.join(sanitize.ALL)}.")] = None,
    rung: Annotated[
        str, typer.Option(help="Only this rung of the lesson, or this direction of the operator: forward, backward.")
    ] = "",
    shape: Annotated[
        str, typer.Option(help="One case in place of the checks: 'B=1 H=3 S=384 D=128 causal=True'.")
    ] = "",
    sms: Annotated[
        int, typer.Option(help="Fill so many SMs: with few, a small shape gives a persistent program several tiles.")
    ] = 0,
) -> None:
    """Run every kernel under compute-sanitizer's tools and Triton's own; a report needs a reason in sanitize.toml.

    Lessons by their checks, operators by small cases that launch each kernel of their dispatch. Rows are kept.
    """
    tools = tool or [*sanitize.ALL]
    if unknown := [each for each in tools if each not in sanitize.ALL]:
        known = ", ".join(sanitize.ALL)
        raise typer.BadParameter(said("{what}: there are {known}").format(what=f"--tool {unknown[0]}", known=known))
    which = choice.watched(which, rung)
    with mistakes("--"):
        part = sanitize.Part(rung, sanitize.shape_of(shape), sms)
    if not device.HAS_GPU:
        show.console.print(sanitize.lacks(tools[0]))
        return
    failed: list[str] = []
    lessons = choice.lessons_and_operators(which, failed)
    end([*failed, *on_gpu.sanitized(lessons, tools, part)])


@measure(name="beside")
def repeat_beside(
    which: LessonOrOperator = "",
    seconds: Annotated[float, typer.Option(help="For each rung, alone and again beside the other process.")] = 5.0,
    rung: Annotated[
        str, typer.Option(help="Only this rung of the lesson, or this direction of the operator: forward, backward.")
    ] = "",
    alone: Annotated[
        bool, typer.Option(help="Count alone first. On a GPU that others use meanwhile nobody is alone.")
    ] = True,
) -> None:
    """Repeat rungs with barriers, spinning or early launch beside a process that uses the same GPU; write rows.

    Operators too, by large cases that launch each kernel of their dispatch.
    """
    which = choice.watched(which, rung)
    if not device.HAS_GPU:
        show.console.print(said("No GPU was found: there is nothing that two processes could share."))
        return
    failed: list[str] = []
    lessons = choice.lessons_and_operators(which, failed)
    end([*failed, *on_gpu.repeated(lessons, seconds, rung, alone)])
