"""Which lessons, operators or card the words of a command mean; other words are a mistake, said with the closest."""

import difflib
from collections.abc import Iterator

from lessonkit.base import chips, renames
from lessonkit.base.words import said
from lessonkit.command_line.outcome import end, mistakes
from lessonkit.commands import exercises, show
from lessonkit.lesson import Broken, Lesson, Steps, discover, kernels, names
from lessonkit.measure import operator_cases, operator_rows
from lessonkit.modes import compiled

import typer


def lessons(which: str) -> list[tuple[str, Lesson | Steps | Broken]]:
    """The lessons that this word names."""
    return list(discover(meant(which)))


def meant(which: str) -> str:
    """What `names` takes for this word: "" of all, today's name of an old one. A word of no lesson is a mistake."""
    which = "" if which == "all" else which
    if names(which):
        return which
    if now := renames.meant("lessons", which):
        show.console.print(said("lesson {old} is now called {new}").format(old=which, new=now))
        return now
    close = ", ".join(_closest(which))
    words = said("no lesson matches {which}. Days: day1 to day5, cuda. The closest: {close}. All: {command}")
    raise typer.BadParameter(words.format(which=repr(which), close=close, command=f"{exercises.COURSE} list"))


def watched(which: str, rung: str) -> str:
    """As meant, of operators too: course_ops, or course_ops.softmax. A rung that none of these has is a mistake."""
    operators = which.partition(".")[0] == compiled.COURSE_OPS
    which = which if operators else meant(which)
    found = operator_cases.lessons(which)
    if operators and not found:
        known = sorted({operator.name for operator in operator_rows.operators()})
        words = said("course_ops has no {wrong}. It has {known}")
        raise typer.BadParameter(words.format(wrong=which.partition(".")[2], known=", ".join(known)))
    lessons = () if operators or not rung else kernels(which)
    if rung and not any(rung == each.__name__ for _, lesson in (*found, *lessons) for each in lesson.rungs):
        none, here = (
            said("{option}: no lesson has a rung of that name"),
            said("{option}: {which} has no rung of that name"),
        )
        raise typer.BadParameter((here if which else none).format(option=f"--rung {rung}", which=which))
    return which


def _closest(which: str) -> list[str]:
    """The three lessons whose names are most like this one."""

    def likeness(name: str) -> float:
        stem = name.partition(".")[2]
        spelt = (name, stem, stem.partition("_")[2])
        return max(difflib.SequenceMatcher(None, which, each).ratio() for each in spelt)

    return sorted(names(), key=likeness, reverse=True)[:3]


def with_kernels(which: str, failed: list[str]) -> Iterator[tuple[str, Lesson]]:
    """The lessons chosen that have rungs. One that cannot be imported is a failure, steps alone are said to be such."""
    chosen = lessons(which)
    for name, lesson in chosen:
        if isinstance(lesson, Broken):
            failed.append(not_imported(name, lesson))
        elif isinstance(lesson, Lesson):
            yield name, lesson
    if all(isinstance(lesson, Steps) for _, lesson in chosen):
        words = said("Steps without rungs; running them checks what they claim: {command}")
        show.console.print(words.format(command=f"{exercises.COURSE} run {which}"))


def lessons_and_operators(which: str, failed: list[str]) -> list[tuple[str, Lesson]]:
    """The lessons chosen that have rungs, and the operators: each direction of one as a lesson of one rung."""
    lessons = () if which.partition(".")[0] == compiled.COURSE_OPS else with_kernels(which, failed)
    return [*lessons, *operator_cases.lessons(which)]


def one(which: str) -> tuple[str, Lesson | Steps]:
    """The one lesson that is named."""
    (name, found), *more = lessons(which)
    if more:
        several = ", ".join([name, *(other for other, _ in more)])
        words = said("{which} names {count} lessons, expected one: {several}")
        raise typer.BadParameter(words.format(which=repr(which), count=len(more) + 1, several=several))
    if isinstance(found, Broken):
        end([not_imported(name, found)])
    return name, found


def one_with_rungs(which: str, otherwise: str) -> tuple[str, Lesson]:
    """The one lesson that is named. If it has no rungs, that is a mistake; `otherwise` says so of its {name}."""
    name, found = one(which)
    if isinstance(found, Steps):
        raise typer.BadParameter(otherwise.format(name=name))
    return name, found


def not_imported(name: str, lesson: Broken) -> str:
    return said("{name}: cannot be imported: {error}").format(name=name, error=lesson.error)


def card(name: str) -> chips.Chip | None:
    """The card of this name, if it is one. What the table does not have is said in the words of the command line."""
    with mistakes():
        return chips.find(name) if name else None
