"""predict, quiz, progress, web: what a learner answers, in the terminal and in the book."""

from functools import partial
from pathlib import Path
from typing import Annotated

from lessonkit.base.words import said
from lessonkit.command_line import choice
from lessonkit.command_line.outcome import mistakes
from lessonkit.command_line.panels import LEARN
from lessonkit.commands import evidence, web

import typer

app = typer.Typer()
learn = partial(app.command, rich_help_panel=LEARN)


@learn()
def predict(
    lesson: Annotated[str, typer.Argument(help="lesson05_softmax")],
    rung: Annotated[str, typer.Argument(help="One of its rungs; nothing: you are asked for each.")] = "",
    words: Annotated[
        list[str] | None, typer.Argument(help="1.2ms, 3TB/s, 85%, x1.5, 2least; before it sizes: M=4096.")
    ] = None,
) -> None:
    """Write down what you expect of a rung before you look: `predict lesson05_softmax softmax_row x2`.

    ms, us, TB/s, TFLOP/s, % of the limit, x: times as fast as the rung before, least: times the least bytes.
    """
    steps_alone = said("{name} has steps and no rungs: there is nothing to predict")
    name, found = choice.one_with_rungs(lesson, steps_alone)
    with mistakes(f"{name}: "):
        evidence.predict(name, found, rung, words or [])


@learn(name="quiz")
def take_quiz(
    name: Annotated[str, typer.Argument(help="day1 to day5, cuda; nothing: which there are.")] = "",
    part: Annotated[str, typer.Argument(help="before or after: the same skills, other questions.")] = "before",
    answers: Annotated[str, typer.Option(help='One a question, with commas: "1, 2, 3, a". Nothing is asked.')] = "",
    only_show: Annotated[bool, typer.Option("--show", help="Print the questions and ask nothing.")] = False,
) -> None:
    """Take the short test of a day, before it and after it: predict a number, find the bug, choose the repair.

    Answers are judged by the lessons' own numbers and kernels. `progress` shows before and after side by side.
    """
    with mistakes():
        if not name:
            return evidence.quizzes()
        if only_show:
            return evidence.show_questions(name, part)
        evidence.take(name, part, answers)


@learn(name="progress")
def show_progress(
    files: Annotated[list[Path] | None, typer.Argument(help="Files of learners: a summary of the class.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is kept as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write it to this file, for your teacher.")] = None,
    name: Annotated[str, typer.Option(help="Your name in that file.")] = "",
) -> None:
    """Show your predictions against what was measured, tries and hints of exercises, and quizzes before and after."""
    if files:
        with mistakes():
            return evidence.of_class(files)
    if as_json or out:
        return evidence.write(name, out)
    evidence.mine()


@learn(name="web")
def web_edition(
    build: Annotated[Path | None, typer.Option(help="Write the book to this folder instead of serving it.")] = None,
    port: Annotated[int, typer.Option(help="Serve on this port of the loopback address; 0: any free one.")] = 0,
) -> None:
    """Build the course as a book in English and Chinese, and serve it on this machine."""
    raise typer.Exit(web.run(build, port))
