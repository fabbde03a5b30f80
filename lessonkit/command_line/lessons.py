"""read, run, check, words, trace, diff, picture: what can be done with a lesson."""

import difflib
from functools import partial
from pathlib import Path
from typing import Annotated

from lessonkit import pictures
from lessonkit.base.errors import Misdeclared
from lessonkit.base.files import write_atomically
from lessonkit.base.words import language, said
from lessonkit.command_line import choice
from lessonkit.command_line.outcome import end, mistakes
from lessonkit.command_line.panels import LEARN, Which
from lessonkit.commands import exercises, languages, running, show, tracing
from lessonkit.judge import trace, verify
from lessonkit.lesson import title
from lessonkit.pages import glossary, rung_source

import typer

app = typer.Typer()
learn = partial(app.command, rich_help_panel=LEARN)

learn()(languages.read)


@learn()
def run(
    which: Which = "",
    again: Annotated[bool, typer.Option("--again", help="Start over, also where a stopped run has been.")] = False,
) -> None:
    """Run lessons in order, each as its own script, and say what ran, what was left out and why.

    A run that was stopped goes on where it was. Ctrl-C ends the lessons that run; the exit code is then 130.
    """
    running.run(which, choice.lessons(which), again)


@learn()
def check(which: Which = "") -> None:
    """Ask all that the tests ask of a lesson: rungs against PyTorch, mutants, machine code, guides."""
    failed: list[str] = []
    for name, lesson in choice.with_kernels(which, failed):
        show.console.rule(said(title(name)))
        try:
            wrong = show.checks(lesson)
        except Exception as error:  # of a rung, of a reference that is not written yet, of a compiler
            said_by = "" if isinstance(error, Misdeclared) else f"{name}: "
            failed.append(f"{said_by}{show.raised(error)}")
            asked = [q for q in verify.questions(name, lesson) if q.kind in ("listed", "declared")]
            failed += show.questions(asked)
            continue
        if wrong:
            failed.append(said("{name}: checks failed: {count}").format(name=name, count=wrong))
        failed += show.questions(q for q in verify.questions(name, lesson) if q.kind not in show.CHECKED)
    end(failed)


@learn(name="words")
def explain_words(
    which: Annotated[str, typer.Argument(help="A word, or a lesson for all words of its text; nothing: all.")] = "",
) -> None:
    """Explain the words of the course: `words SM`, `words lesson05_softmax`."""
    if not (found := list(glossary.explained(which))):
        words = said("{which} is no word of the glossary and no lesson: `words` lists the words")
        end([words.format(which=repr(which))])
    first = {term: lesson for lesson, terms in glossary.new().items() for term in terms}
    body = ([*dict.fromkeys([said(t.term), t.term])] for t in found)
    named = (" ".join(each) for each in body)
    lines = ([name, said(t.says), first.get(t, "").partition(".")[2]] for name, t in zip(named, found, strict=True))
    show.table(said("words of the course"), [said("word"), said("what it means"), said("first in")], lines)


@learn(name="trace")
def trace_rung(
    lesson: Annotated[str, typer.Argument(help="lesson01_vector_add")],
    rung: Annotated[str, typer.Argument(help="One of its rungs: add_block; without it they are listed.")] = "",
    shape: Annotated[list[str] | None, typer.Argument(help="Sizes: n=300; others as in the smallest check.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write an HTML page with a slider over the steps here.")] = None,
) -> None:
    """Show step by step which program of a rung reads and writes what, in the interpreter: `n=300` says how much."""
    exercises.without_gpu()
    steps_alone = said("{name} has steps and no rungs: there is nothing to trace")
    name, found = choice.one_with_rungs(lesson, steps_alone)
    with mistakes(f"{name}: "):
        heading, steps = tracing.traced(found, rung, shape or [])
    if page:
        return tracing.write_page(page, heading, steps)
    tracing.print_steps(heading, steps)


@learn()
def diff(
    lesson: Annotated[str, typer.Argument(help="lesson01_vector_add")],
    old: Annotated[str, typer.Argument(help="One of its rungs: add_element; without it they are listed.")] = "",
    new: Annotated[str, typer.Argument(help="The rung to compare it with: add_block.")] = "",
) -> None:
    """Show what changes from one rung to another: the wrapper and the kernels that it launches."""
    steps_alone = said("{name} has steps and no rungs: there is nothing to compare")
    name, found = choice.one_with_rungs(lesson, steps_alone)
    with mistakes(f"{name}: "):
        before, after = (rung_source.lines(name, trace.rung(found, rung).__name__, said) for rung in (old, new))
    styles = {"+": "green", "-": "red"}
    for line in difflib.unified_diff(before, after, old, new, lineterm="", n=2):
        show.console.print(line, style=styles.get(line[0]), highlight=False)


@learn()
def picture(
    which: Which,
    out: Annotated[Path, typer.Option("--out", help="The folder that gets one SVG a picture.")] = Path("pictures"),
) -> None:
    """Draw the explanatory pictures of lessons as SVG files: `picture lesson05_softmax --lang zh`."""
    drawn = [each for name, _ in choice.lessons(which) for each in pictures.of(name)]
    for each in drawn:
        path = out / f"{each.lesson.partition('.')[2]}.{each.name}.svg"
        write_atomically(path, each.svg(language()))
        show.console.print(f"{path}: {each.title(language())}")
    if not drawn:
        words = said("no lesson of {which} names a picture: a lesson does so by `pictures` of its `about`")
        end([words.format(which=repr(which))])
