"""`run`: lessons as scripts, one after the other or side by side, and what became of each."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import NoReturn

from lessonkit.base import device
from lessonkit.base.files import ROOT, environment
from lessonkit.base.words import counted, said
from lessonkit.commands import course_run, evidence, exercises, show
from lessonkit.commands.parallel import run_scripts
from lessonkit.lesson import Broken, Lesson, Steps
from lessonkit.pages import report

import typer

# What Ctrl-C, kill, and a closed terminal send. Windows has no SIGHUP.
STOPS = tuple(each for each in signal.Signals if each.name in ("SIGINT", "SIGTERM", "SIGHUP"))


def run(which: str, found: Sequence[tuple[str, Lesson | Steps | Broken]], again: bool) -> NoReturn:
    """Run the lessons found for a word, or go on with a run that was stopped; `again` starts over."""
    chosen = [name for name, _ in found]
    if len(found) == 1:
        evidence.ask_before_run(*found[0])
    elif which not in ("", "all") and not any(name.startswith((f"{which}_", f"{which}.")) for name in chosen):
        words = said("{which} names {count} lessons, and all of them run: {names}. One alone: {command}")
        command = f"{exercises.COURSE} run {chosen[0]}"
        names_ = ", ".join(chosen)
        show.console.print(words.format(which=which, count=len(chosen), names=names_, command=command), highlight=False)
    kept, marks = course_run.load(), course_run.marks(chosen)
    before = [] if again else _ended_before(kept.run_of(chosen), marks)
    this = course_run.Run(chosen, {name: marks[name] for name in before})
    course_run.keep(this, {})
    ended = dict.fromkeys(before, (0, ""))
    stopped = _run_the_rest(this, kept.seconds, marks, ended)
    _say_what_became(chosen, before, ended)
    if len(chosen) == 1:
        evidence.after_run(chosen[0])
    if stopped:
        words = said("Stopped after {done} of {count} lessons. The same command goes on; --again starts over.")
        show.console.print(words.format(done=len(ended), count=len(chosen)))
        raise typer.Exit(130)
    _say_where_times_are()
    raise typer.Exit(int(any(code for code, _ in ended.values())))


def _ended_before(stopped_run: course_run.Run, marks: dict[str, str]) -> list[str]:
    """The lessons that a stopped run has ended and that are as they were; says how many."""
    before = stopped_run.unchanged(marks)
    if before:
        since = course_run.roughly(max(0.0, time.time() - stopped_run.at))
        many = counted(len(before), said("1 lesson"), said("{count} lessons"))
        words = said("going on after {many} of a run that was stopped {since} ago; --again starts over")
        show.console.print(words.format(many=many, since=since))
    return before


def _run_the_rest(
    this: course_run.Run, known: dict[str, float], marks: dict[str, str], ended: dict[str, tuple[int, str]]
) -> bool:
    """Run the lessons of `this` that are not in `ended`, and put them there; True if a signal stopped that.

    ended: exit code and time by lesson. known: the seconds of earlier runs.
    """
    todo = [name for name in this.chosen if name not in ended]
    at_once = 1 if device.HAS_GPU else min(8, os.cpu_count() or 1)
    watch = course_run.Watch(this.chosen, todo, known, at_once, live=not device.HAS_GPU)
    handlers = {number: signal.signal(number, _stop) for number in STOPS}
    try:
        with watch, closing(_scripts(todo, at_once, watch.began)) as running:
            for name, code, seconds, printed in running:
                ended[name] = code, f"{seconds:.0f} s"
                if code == 0:
                    this.done[name] = marks[name]
                    course_run.keep(this, {name: seconds})
                watch.end(name, code, seconds, printed)
        this.done = {}
        course_run.keep(this, {})
    except KeyboardInterrupt:
        return True
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return False


def _say_what_became(chosen: Sequence[str], before: Sequence[str], ended: dict[str, tuple[int, str]]) -> None:
    """A table of the lessons that have ended, in their order."""
    summary = [
        [name, said("ok, before") if name in before else course_run.verdict(ended[name][0]), ended[name][1]]
        for name in chosen
        if name in ended
    ]
    many = counted(len(summary), said("1 lesson"), said("{count} lessons"))
    heading = said("{lessons}, {mode}").format(lessons=many, mode=said(show.MODES[device.DEVICE.type]))
    show.table(heading, [said("lesson"), "", said("time")], summary)


def _say_where_times_are() -> None:
    """On a GPU the pages of the rows that were measured are written first."""
    if device.HAS_GPU:
        report.write()
        show.console.print(said("reports and plots: {page}").format(page="reports/README.md"))
        return
    words = said("No GPU: kernels were interpreted and compiled, not timed. Committed measurements: {page}")
    if not device.HAS_COMPILER:
        words = said("No GPU: kernels were interpreted, not compiled or timed. Committed measurements: {page}")
    show.console.print(words.format(page="reports/README.md"))


def _stop(number: int, frame: object) -> NoReturn:
    """End a run in order, which a second Ctrl-C does not disturb."""
    for each in STOPS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _scripts(names: list[str], at_once: int, began: Callable[[str], None]) -> Generator[tuple[str, int, float, bytes]]:
    """Run lessons' scripts; (name, exit code, seconds, what it printed) of each when it ends.

    On a GPU one after the other, or each would time the others too, and each prints by itself.
    """
    scripts = [ROOT / f"{name.replace('.', '/')}.py" for name in names]
    if device.HAS_GPU:
        for name, script in zip(names, scripts, strict=True):
            began(name)
            start = time.monotonic()
            done = subprocess.run([sys.executable, str(script)], env=environment())
            yield name, done.returncode, time.monotonic() - start, b""
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": str(show.console.width)}
    os.environ |= {"FORCE_COLOR": "1"} if show.console.is_terminal else {}
    with closing(run_scripts(scripts, at_once, lambda nth: began(names[nth]))) as running:
        for ended in running:
            yield names[ended.nth], ended.code, ended.seconds, ended.printed
