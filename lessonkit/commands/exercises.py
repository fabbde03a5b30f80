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
    "out of bounds": "A lane reads or writes memory that belongs to nobody. On a GPU this may crash, or quietly work.",
    "unwritten": "The output was filled with NaN before the launch, and nobody stored there.",
    "nan": "NaN comes out where PyTorch has a number: inf - inf, 0 / 0, 0 * inf, or a lane that was never loaded.",
    "value": "The budget is a few times PyTorch's own error in this dtype, so this is a mistake and no rounding.",
    "dtype": "The result has to have the dtype that PyTorch's has.",
    "shape": "The result has to have the shape that PyTorch's has.",
    "changed input": "An input was overwritten; whoever calls still needs it.",
    "traffic": "The answer is right; what is asked now is how many bytes your kernel moves for it.",
    "memory": "An allocation failed. How large are the tensors, and what grows from step to step?",
    "processes": "A fork that is never waited for, or that forks again, would take the machine down.",
    "compiler": "The values are right in the interpreter, which runs a kernel as Python. A GPU needs it compiled.",
    "gradient": "The forward is right; the backward is compared with float64 autograd, for a random upstream gradient.",
    "race": "Two threads touch one address with no barrier between, and one of them writes: any order may happen.",
    "barrier": "Some threads of the block wait at a barrier that others never reach.",
    "uninitialised": "Shared memory is read before anybody wrote it.",
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
        _say(f"exercise {which} is now called {now}")
        found = find(now)
    if not found or (one and len(found) > 1):
        names = "\n  ".join(s.name for s in found or discover())
        raise typer.BadParameter(f"{which!r} names {len(found)} exercises, expected one of:\n  {names}")
    return found


def _one(which: str) -> Source:
    """The exercise named; of a folder (day2), or of all, the one that the learner is at."""
    is_folder = len(found := find(which)) > 1 and all(s.name.startswith(which) for s in found)
    if which and not is_folder:
        return _some(which, one=True)[0]
    if not (source := progress.waiting(_some(which))):
        _say("Every one of them has passed. `exercise list` shows the hints that you took.", "green")
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
    show.console.rule(source.title)
    _say(_task(source))
    mine = path.read_text().splitlines()
    for region in source.regions:
        at = next((f", line {n}" for n, line in enumerate(mine, 1) if f"TODO({region.number})" in line), "")
        _say(f"TODO({region.number}){at}: {region.task}", "bold")
    _say(f"\nEdit:  {_shown(path)}\nThen:  {COURSE} exercise check   (or watch; hint, if you are stuck)")


def _task(source: Source) -> str:
    """The docstring, or in CUDA C++ the comment, that the file begins with."""
    text = source.with_marks
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
    progress.update(source, checks=record.checks + 1, seed=None if verdict.right else seed)
    show.console.rule(f"{source.path.stem}: {source.title}")
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
    effort = f"{_counted(record.checks + 1, 'check')} and {_counted(record.hints, 'hint')}"
    _say(f"\nRight, after {effort} ({took:.1f} s). One solution:", "bold green")
    show.console.print(Syntax(_solution(source), "cpp" if source.is_cuda else "python", background_color="default"))
    _say(f"Next:  {COURSE} exercise next")
    return verdict


def _build_emulator(source: Source) -> None:
    """Build what every answer is compiled and linked with: grading, whose time is limited, is not to wait for it."""
    with suppress(Missing, BuildError):  # the verdict says so
        products = build.emulated_extension(source.path.with_suffix(".cu")).after
        if not all(product.path.exists() for product in products):
            _say("The emulator is built first; this happens once and takes about half a minute.", "dim")
            build.build(products)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


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
        _say(f"      {MEANS[verdict.caught_by]}")
    if todo := source.untouched(answer):
        more = f" (and {len(todo) - 1} more)" if len(todo) > 1 else ""
        _say(f"      TODO({todo[0].number}) is as it was{more}: {todo[0].task}", "yellow")
    if verdict.mistake:
        _say(f"      Others who saw exactly this had made this mistake: {verdict.mistake}.", "yellow")
    _say(f"\nEdit:  {_shown(path)}\nStuck: {COURSE} exercise hint {source.short}")


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
                _say("\nwatching: save the file to have it graded again, Ctrl-C to end", "dim")
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
        progress.update(source, hints=given)
    for number, text in enumerate(hints[:given], 1):
        _say(f"hint {number} of {len(hints)}: {text}", "bold" if number == given else "dim")


@app.command()
def reset(which: Annotated[str, typer.Argument(help="The exercise to begin anew.")]) -> None:
    """Put the stub back. What you had is kept beside it; the exercise counts as not passed, hints stay counted."""
    (source,) = _some(which, one=True)
    path = progress.answer_file(source)
    if path.exists() and path.read_text() != source.stub:
        old = path.with_name(path.name + ".old")
        shutil.move(path, old)
        _say(f"What you had is in {_shown(old)}.")
    progress.start(source)
    progress.update(source, passed="", seed=None)
    _say(f"{_shown(path)} is the stub again.")


@app.command(name="list")
def list_exercises(which: Which = "") -> None:
    """List exercises, which of them passed, and how many checks and hints they took."""
    records = progress.load()
    chosen = _some(which)
    body = []
    for source in chosen:
        record = records.get(source.name, progress.Record())
        state = f"passed {record.passed}" if record.passed else "begun" if record.checks else ""
        body.append([source.name, source.title, state, record.checks or "", record.hints or ""])
    show.table("exercises", ["name", "about", "", "checks", "hints"], body)
    passed = [records[s.name] for s in chosen if s.name in records and records[s.name].passed]
    _say(f"{len(passed)} of {len(chosen)} passed, with {sum(r.hints for r in passed)} hints.")
