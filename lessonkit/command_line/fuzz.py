"""fuzz: operators on random cases, or one case again."""

import json
import os
from functools import partial
from typing import Annotated

from lessonkit.base import device
from lessonkit.base.errors import Missing
from lessonkit.base.words import said
from lessonkit.command_line.outcome import end
from lessonkit.command_line.panels import WRITE
from lessonkit.commands import show
from lessonkit.judge import fuzz_cases
from lessonkit.measure import fuzz_pool, fuzz_runs

import typer

app = typer.Typer()
write = partial(app.command, rich_help_panel=WRITE)


@write(name="fuzz")
def fuzz_operators(
    operators: Annotated[list[str] | None, typer.Argument(help="Of course_ops (softmax); nothing: all.")] = None,
    cases: Annotated[
        int, typer.Option(help="For each operator, direction and mode; earlier runs of the same code count.")
    ] = 500,
    seconds: Annotated[float, typer.Option(help="Stop after so many; the same command goes on.")] = 600.0,
    workers: Annotated[
        int,
        typer.Option(
            help="Processes that run cases in bursts; 0: one case after another; -1: one a core, without a GPU 0."
        ),
    ] = -1,
    mode: Annotated[
        list[str] | None, typer.Option(help="cpu (PyTorch computes), interpreted or gpu; nothing: what there is.")
    ] = None,
    replay: Annotated[str, typer.Option(help="Run this case, as JSON, and draw none.")] = "",
) -> None:
    """Call course_ops with random cases: shapes, strides, dtypes, values, options, and calls that must be refused.

    Counts are added to reports/fuzz.csv. Each fault's smallest case is added to tests/fuzz/found.jsonl.
    """
    case = _case(replay) if replay else None
    names, modes = operators or [], mode or (["gpu"] if device.HAS_GPU else ["cpu", "interpreted"])
    known = fuzz_cases.questions()
    if wrong := sorted({*names, *([case["operator"]] if case else [])} - set(known)):
        words = said("course_ops has no {wrong}. It has {known}")
        raise typer.BadParameter(words.format(wrong=", ".join(wrong), known=", ".join(sorted(known))))
    if wrong := sorted(set(modes) - set(fuzz_cases.MODES)):
        words = said("{wrong} is no mode: {known}")
        raise typer.BadParameter(words.format(wrong=", ".join(wrong), known=", ".join(fuzz_cases.MODES)))
    if "gpu" in modes and not device.HAS_GPU:
        raise typer.BadParameter(said("mode gpu needs a GPU, and none was found"))
    failed: list[str] = []
    if case:
        for each in modes:
            with fuzz_runs.Worker(each) as worker:
                outcome = worker.ask(case)
            print(f"{each}: {outcome.kind} {outcome.said}", flush=True)
            failed += [] if outcome.well else [f"{each}: {outcome.kind}"]
        end(failed)
    try:
        workers = (len(os.sched_getaffinity(0)) if device.HAS_GPU else 0) if workers < 0 else workers
        say = partial(print, flush=True)
        if workers:
            failures = fuzz_pool.run(names, modes, cases, seconds, workers, say)
        else:
            failures = fuzz_runs.run(names, modes, cases, seconds, say)
    except Missing as missing:
        end([str(missing)])
    title = [said("operator"), said("direction"), said("mode"), said("cases"), said("of older code"), said("shapes")]
    title += [said("kernels"), said("refused"), said("wrong"), said("crashes"), said("false alarms"), said("seconds")]
    fuzzed = [[c.operator, c.direction, c.mode, c.cases, older, c.shapes, c.kernels, c.refused, c.wrong, c.crashes,
               c.false_alarms, c.seconds] for c, older in fuzz_runs.table(fuzz_runs.asked(names, modes))]  # fmt: skip
    show.table(said("cases of today's code"), title, fuzzed)
    end([f"{each.case['operator']}: {each.fault}" for each in failures])


def _case(text: str) -> fuzz_cases.Case:
    """The case that `--replay` names. What is no case is said in the words of the command line."""
    try:
        case: fuzz_cases.Case = json.loads(text)
    except ValueError as why:
        raise typer.BadParameter(said("--replay takes a case as JSON: {why}").format(why=why)) from None
    if not isinstance(case, dict) or (lacks := [key for key in fuzz_cases.KEYS if key not in case]):
        words = said("--replay takes a case as tests/fuzz/found.jsonl has it; this one lacks {keys}")
        raise typer.BadParameter(words.format(keys=", ".join(lacks if isinstance(case, dict) else fuzz_cases.KEYS)))
    if case["direction"] not in fuzz_cases.DIRECTIONS:
        words = said("{wrong} is no direction: {known}")
        raise typer.BadParameter(words.format(wrong=repr(case["direction"]), known=", ".join(fuzz_cases.DIRECTIONS)))
    return case
