"""python -m lessonkit exercise: next, check, watch, hint, reset, list."""

import os
import random
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from lessonkit.base import device, renames
from lessonkit.base.errors import BuildError, Missing
from lessonkit.base.prose import read_as
from lessonkit.base.words import counted, later, said
from lessonkit.commands import show
from lessonkit.cuda import build
from lessonkit.exercise import progress
from lessonkit.exercise.grade import Verdict, grade_apart
from lessonkit.exercise.source import Source, discover, find

import typer
from rich.syntax import Syntax

app = typer.Typer(no_args_is_help=True, help="Graded exercises: a stub to complete, hints, a solution once it passes.")
Which = Annotated[str, typer.Argument(help="mul, exercise01_mul, day2; without it the one that you are at.")]
COURSE = "python3 course.py" if "COURSE_PY" in os.environ else "python -m lessonkit"  # as the learner has called it

MEANS = {
    "out of bounds": later(
        "A lane reads or writes memory that belongs to nobody. On a GPU this may crash, or quietly work."
    ),
    "unwritten": later("The output was filled with NaN before the launch, and nobody stored there."),
    "nan": later(
        "NaN comes out where PyTorch has a number: inf - inf, 0 / 0, 0 * inf, or a lane that was never loaded."
    ),
    "value": later(
        "The budget is a few times PyTorch's own error in this dtype, so this is a mistake and no rounding."
    ),
    "dtype": later("The result has to have the dtype that PyTorch's has."),
    "shape": later("The result has to have the shape that PyTorch's has."),
    "changed input": later("An input was overwritten; whoever calls still needs it."),
    "traffic": later("The answer is right; what is asked now is how many bytes your kernel moves for it."),
    "memory": later("An allocation failed. How large are the tensors, and what grows from step to step?"),
    "processes": later("A fork that is never waited for, or that forks again, would take the machine down."),
    "compiler": later(
        "The values are right in the interpreter, which runs a kernel as Python. A GPU needs it compiled."
    ),
    "gradient": later(
        "The forward is right; the backward is compared with float64 autograd, for a random upstream gradient."
    ),
    "race": later(
        "Two threads touch one address with no barrier between, and one of them writes: any order may happen."
    ),
    "barrier": later("Some threads of the block wait at a barrier that others never reach."),
    "uninitialised": later("Shared memory is read before anybody wrote it."),
}


@app.callback()
def without_gpu() -> None:
    """Exercises are graded where every address is watched, in the interpreter and the emulator, GPU or not."""
    if device.HAS_GPU:
        command = [sys.executable, "-m", "lessonkit", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"CUDA_VISIBLE_DEVICES": ""})


def _say(text: str, style: str | None = None) -> None:
    show.console.print(text, style=style, markup=False, highlight=False)


def _some(which: str, *, one: bool = False) -> Sequence[Source]:
    """The exercises named; all of them without a name."""
    found = find(which) if which else discover()
    if not found and (now := renames.meant("exercises", which)):
        _say(said("exercise {old} is now called {new}").format(old=which, new=now))
        found = find(now)
    if not found or (one and len(found) > 1):
        names = "\n  ".join(s.name for s in found or discover())
        words = said("{which} names {count} exercises, expected one of:")
        raise typer.BadParameter(f"{words.format(which=repr(which), count=len(found))}\n  {names}")
    return found


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
    _say(_task(source))
    mine = path.read_text().splitlines()
    for region in source.regions:
        line = said(", line {number}")
        found = (line.format(number=n) for n, line_ in enumerate(mine, 1) if f"TODO({region.number})" in line_)
        _say(f"TODO({region.number}){next(found, '')}: {said(region.task)}", "bold")
    _say("\n" + said("Edit:  {path}").format(path=_shown(path)))
    _say(said("Then:  {command}   (or watch; hint, if you are stuck)").format(command=f"{COURSE} exercise check"))


def _task(source: Source) -> str:
    """The docstring, or in CUDA C++ the comment, that the file begins with."""
    text = read_as(source.with_marks, ".cu" if source.is_cuda else ".py", said)
    if source.is_cuda:
        lines = [line.removeprefix("//").removeprefix(" ") for line in text.split("\n\n")[0].splitlines()]
        return "\n".join(line for line in lines[2:] if not line.startswith("#"))
    return "\n".join(text.split('"""')[1].splitlines()[2:])


@app.command()
def check(which: Which = "") -> None:
    """Grade your answer. Exit code 0: right."""
    raise typer.Exit(int(not _check(_one(which)).right))


def _check(source: Source) -> Verdict:
    path, record = progress.start(source), progress.of(source)
    seed = random.SystemRandom().randrange(2**31) if record.seed is None else record.seed
    answer = path.read_text()
    if source.is_cuda:
        _build_emulator(source)
    began = time.monotonic()
    verdict = grade_apart(source, answer, seed=seed)
    took = time.monotonic() - began
    event = "right" if verdict.right else verdict.caught_by
    progress.update(source, event, checks=record.checks + 1, seed=None if verdict.right else seed)
    show.console.rule(f"{source.path.stem}: {said(source.title)}")
    for held in verdict.held:
        _say(f"  ok  {held}", "green")
    if not verdict.right:
        _explain(source, path, answer, verdict)
        return verdict
    if verdict.score:
        _say(f"  ok  {verdict.score}", "green")
    if verdict.compiled:
        _say(f"  ok  {verdict.compiled}", "green")
    if not record.passed:
        progress.update(source, passed=progress.today())
    checks = counted(record.checks + 1, said("1 check"), said("{count} checks"))
    hints = counted(record.hints, said("1 hint"), said("{count} hints"))
    words = said("Right, after {checks} and {hints} ({seconds} s). One solution:")
    right = words.format(checks=checks, hints=hints, seconds=f"{took:.1f}")
    _say(f"\n{right}", "bold green")
    show.console.print(Syntax(_solution(source), "cpp" if source.is_cuda else "python", background_color="default"))
    _say(said("Next:  {command}").format(command=f"{COURSE} exercise next"))
    return verdict


def _build_emulator(source: Source) -> None:
    """Build what every answer is compiled and linked with: grading, whose time is limited, is not to wait for it."""
    with suppress(Missing, BuildError):  # the verdict says so
        products = build.emulated_extension(source.path.with_suffix(".cu")).after
        if not all(product.path.exists() for product in products):
            _say(said("The emulator is built first; this happens once and takes about half a minute."), "dim")
            build.build(products)


def _solution(source: Source) -> str:
    """The regions of the right answer; all of it where the exercise was to find a mistake."""
    if not source.regions:
        return source.solution
    lines = source.with_marks.splitlines()
    parts = []
    for r in source.regions:
        parts += [lines[r.start - 1], *(line for line in lines[r.start : r.stop] if " stub: " not in line), ""]
    return "\n".join(parts)


def _explain(source: Source, path: Path, answer: str, verdict: Verdict) -> None:
    _say(f"  no  {verdict.on}", "bold red")
    _say(f"      {verdict.caught_by}: {verdict.why}", "red")
    if verdict.caught_by in MEANS:
        _say(f"      {said(MEANS[verdict.caught_by])}")
    if todo := source.untouched(answer):
        more = said("(and {count} more)").format(count=len(todo) - 1) if len(todo) > 1 else ""
        words = said("TODO({number}) is as it was{more}: {task}")
        left = words.format(number=todo[0].number, more=f" {more}" * bool(more), task=said(todo[0].task))
        _say(f"      {left}", "yellow")
    if verdict.mistake:
        words = said("Others who saw exactly this had made this mistake: {mistake}.")
        _say(f"      {words.format(mistake=said(verdict.mistake))}", "yellow")
    _say("\n" + said("Edit:  {path}").format(path=_shown(path)))
    _say(said("Stuck: {command}").format(command=f"{COURSE} exercise hint {source.short}"))


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
    given = progress.of(source).hints
    hints = source.exercise.hints
    if given < len(hints):
        given += 1
        progress.update(source, f"hint {given}", hints=given)
    for number, text in enumerate(hints[:given], 1):
        words = said("hint {number} of {count}: {text}").format(number=number, count=len(hints), text=said(text))
        _say(words, "bold" if number == given else "dim")


@app.command()
def reset(which: Annotated[str, typer.Argument(help="The exercise to begin anew.")]) -> None:
    """Put the stub back. What you had is kept beside it; the exercise counts as not passed, hints stay counted."""
    (source,) = _some(which, one=True)
    path = progress.answer_file(source)
    if path.exists() and path.read_text() != source.stub:
        old = path.with_name(path.name + ".old")
        shutil.move(path, old)
        _say(said("What you had is in {path}.").format(path=_shown(old)))
    progress.start(source)
    progress.update(source, passed="", seed=None)
    _say(said("{path} is the stub again.").format(path=_shown(path)))


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
