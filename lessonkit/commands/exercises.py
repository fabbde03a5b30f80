"""python -m lessonkit exercise: next, check, watch, hint, reset, list."""

import difflib
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from lessonkit.base import device, renames
from lessonkit.base.prose import flowed, wrapped
from lessonkit.base.words import said
from lessonkit.commands import show
from lessonkit.exercise import desk, progress
from lessonkit.exercise.grade import Verdict
from lessonkit.exercise.source import Source, discover, find

import typer
from rich.syntax import Syntax

app = typer.Typer(no_args_is_help=True, help="Graded exercises: a stub to complete, hints, a solution once it passes.")
Which = Annotated[str, typer.Argument(help="mul, exercise01_mul, day2; without it the one that you are at.")]
COURSE = "python3 course.py" if "COURSE_PY" in os.environ else "python -m lessonkit"  # as the learner has called it

MOST = 10  # names in one message
MARKS = {"held": "  ok  ", "refused": "  no  ", "right": ""}
STYLES = {"held": "green", "refused": "bold red", "why": "red", "help": "yellow", "right": "bold green"}


@app.callback()
def without_gpu() -> None:
    """Exercises are graded where every address is watched, in the interpreter and the emulator, GPU or not."""
    if device.HAS_GPU:
        command = [sys.executable, "-m", "lessonkit", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"CUDA_VISIBLE_DEVICES": ""})


def _say(text: str, style: str | None = None) -> None:
    show.console.print(text, style=style, markup=False, highlight=False)


def _say_behind(mark: str, text: str, style: str | None) -> None:
    """Say a text behind a mark, with each of its lines as far to the right as the first."""
    room = show.console.width - len(mark)
    lines = [part for line in text.split("\n") for part in wrapped(line, room, room)]
    _say("\n".join(f"{' ' * len(mark) if nth else mark}{line}" for nth, line in enumerate(lines)), style)


def _some(which: str, *, one: bool = False) -> Sequence[Source]:
    """The exercises named; all of them without a name."""
    found = find(which) if which else discover()
    if not found and (now := renames.meant("exercises", which)):
        _say(said("exercise {old} is now called {new}").format(old=which, new=now))
        found = find(now)
    if not found:
        raise typer.BadParameter(_unknown(which))
    if one and len(found) > 1:
        names = [s.name for s in found[:MOST]]
        if more := len(found) - len(names):
            names.append(said("and {count} more").format(count=more))
        words = said("{which} names {count} exercises, expected one of:")
        raise typer.BadParameter("\n  ".join([words.format(which=repr(which), count=len(found)), *names]))
    return found


def _unknown(which: str) -> str:
    """Say that no exercise is called so, and which names are nearest."""
    names = {name: source.name for source in discover() for name in (source.short, source.path.stem, source.name)}
    close = dict.fromkeys(names[near] for near in difflib.get_close_matches(which, names, n=3 * MOST, cutoff=0.6))
    words = said("there is no exercise {which}").format(which=repr(which))
    if close:
        return "\n  ".join([said("{problem}; did you mean:").format(problem=words), *list(close)[:5]])
    command = f"`{COURSE} exercise list`"
    return said("{problem}; {command} shows all names").format(problem=words, command=command)


def _one(which: str) -> Source:
    """The exercise named; of a folder (day2), or of all, the one that the learner is at."""
    is_folder = len(found := find(which)) > 1 and all(s.name.startswith(which) for s in found)
    if which and not is_folder:
        return _some(which, one=True)[0]
    if not (source := progress.waiting(_some(which))):
        _say(said("Every one of them has passed. `exercise list` shows the hints that you took."), "green")
        raise typer.Exit
    return source


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


@app.command(name="next")
def next_exercise(which: Which = "") -> None:
    """Open an exercise, without a name the one you are at or the next: make its file and show the task."""
    source = _one(which)
    path = progress.start(source)
    progress.update(source)
    show.console.rule(said(source.title))
    _say(flowed(desk.task(source), show.console.width))
    mine = path.read_text().splitlines()
    if source.regions:
        _say("")
    for region in source.regions:
        line = said(", line {number}")
        found = (line.format(number=n) for n, line_ in enumerate(mine, 1) if f"TODO({region.number})" in line_)
        words = said("TODO({number}){line}: {task}")
        _say_behind("", words.format(number=region.number, line=next(found, ""), task=said(region.task)), "bold")
    _say("\n" + said("Edit:  {path}").format(path=_shown(path)))
    _say(said("Then:  {command}   (or watch; hint, if you are stuck)").format(command=f"{COURSE} exercise check"))


@app.command()
def check(which: Which = "") -> None:
    """Grade your answer. Exit code 0: right."""
    raise typer.Exit(int(not _check(_one(which)).right))


def _check(source: Source) -> Verdict:
    if show.console.is_terminal:
        _say(said("grading") + " ...", "dim")
    verdict, lines = desk.check(source, lambda words: _say(words, "dim"))
    show.console.rule(f"{source.path.stem}: {said(source.title)}")
    for line in lines:
        if line.kind == "right":
            _say("")
        _say_behind(MARKS.get(line.kind, "      "), line.text, STYLES.get(line.kind))
    if not verdict.right:
        _say("\n" + said("Edit:  {path}").format(path=_shown(progress.answer_file(source))))
        _say(said("Stuck: {command}").format(command=f"{COURSE} exercise hint {source.short}"))
        return verdict
    language = "cpp" if source.is_cuda else "python"
    show.console.print(Syntax(desk.solution(source), language, background_color="default", word_wrap=True))
    _say(said("Next:  {command}").format(command=f"{COURSE} exercise next"))
    return verdict


@app.command()
def watch(which: Which = "") -> None:
    """Grade each time you save, go on to the next exercise when one passes; Ctrl-C ends it."""
    source, seen = _one(which), -1
    path = progress.start(source)
    try:
        while True:
            with suppress(FileNotFoundError):  # some editors move a file away before they write it anew
                changed = path.stat().st_mtime_ns
            if changed != seen:
                seen = changed
                if _check(source).right and (following := _one(which)) != source:
                    source = following
                    next_exercise(source.name)
                    path = progress.answer_file(source)
                    changed = seen = path.stat().st_mtime_ns
                _say("\n" + said("watching: save the file to have it graded again, Ctrl-C to end"), "dim")
            time.sleep(0.3)
    except KeyboardInterrupt:
        _say("")


@app.command()
def hint(which: Which = "") -> None:
    """Show one hint more: the idea, then the indices or the formula, then nearly the code."""
    source = _one(which)
    taken = len(desk.hints(source, more=False))
    hints = desk.hints(source, more=True)
    show.console.rule(f"{source.path.stem}: {said(source.title)}")
    for words in hints:
        _say_behind("", words, "bold" if words == hints[-1] else "dim")
    if len(hints) == taken:
        whole = source.path.with_suffix(".cu") if source.is_cuda else source.path
        _say("\n" + said("There is no further hint. The right answer is in {path}.").format(path=_shown(whole)))


@app.command()
def reset(which: Annotated[str, typer.Argument(help="The exercise to begin anew.")]) -> None:
    """Put the stub back. What you had is kept beside it; the exercise counts as not passed, hints stay counted."""
    (source,) = _some(which, one=True)
    if old := desk.reset(source):
        _say(said("What you had is in {path}.").format(path=_shown(old)))
    _say(said("{path} is the stub again.").format(path=_shown(progress.answer_file(source))))


@app.command(name="list")
def list_exercises(which: Which = "") -> None:
    """List exercises, which of them passed, and how many checks and hints they took."""
    records = progress.load()
    chosen = _some(which)
    body = []
    for source in chosen:
        record = records.get(source.name, progress.Record())
        passed = said("passed {day}").format(day=record.passed) if record.passed else ""
        state = passed or (said("begun") if record.checks else "")
        body.append([source.name, said(source.title), state, record.checks or "", record.hints or ""])
    columns = [said("name"), said("about"), "", said("checks"), said("hints")]
    show.table(said("exercises"), columns, body)
    done = [records[s.name] for s in chosen if s.name in records and records[s.name].passed]
    words = said("{passed} of {count} passed, with {hints} hints.")
    _say(words.format(passed=len(done), count=len(chosen), hints=sum(r.hints for r in done)))
