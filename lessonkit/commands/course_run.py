"""What `run` keeps and shows: which lessons have ended well, so that a stopped run goes on, and how long is left."""

import json
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from lessonkit.base import device
from lessonkit.base.files import ROOT, changing, write_atomically
from lessonkit.base.words import said
from lessonkit.commands import show
from lessonkit.judge import verdicts

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

FILE = ROOT / ".course_run.json"


# ---- What is kept ---------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A run that has not come to its end.

    chosen  its lessons
    done    lesson that ended well -> the mark of the files that it ran
    at      when this was written, in seconds since 1970
    """

    chosen: list[str]
    done: dict[str, str] = field(default_factory=dict)
    at: float = 0

    def unchanged(self, marks: Mapping[str, str]) -> list[str]:
        """The lessons that it has done and whose files are as they were."""
        return [name for name in self.chosen if self.done.get(name) == marks[name]]


@dataclass
class Kept:
    """What is known of one machine: runs that were stopped, and the seconds that lessons took there."""

    runs: list[Run] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def run_of(self, chosen: Sequence[str]) -> Run:
        """The stopped run of this choice of lessons, or a new one."""
        return next((run for run in self.runs if run.chosen == [*chosen]), Run([*chosen]))


def load() -> Kept:
    """What is kept of this machine. A damaged file is ignored, and a line says so."""
    return _load().get(_machine(), Kept())


def keep(run: Run, seconds: Mapping[str, float]) -> None:
    """Write how far a run is; one that has done nothing, or has come to its end (no `done`), is forgotten."""
    run.at = time.time()
    try:
        with changing(FILE):
            everything = _load(warn=False)
            kept = everything.setdefault(_machine(), Kept())
            kept.runs = [other for other in kept.runs if other.chosen != run.chosen] + [run] * bool(run.done)
            kept.seconds |= seconds
            write_atomically(FILE, json.dumps({machine: asdict(each) for machine, each in everything.items()}) + "\n")
    except OSError as why:
        words = said("{file} cannot be written ({why}): a stopped run will not go on where it was.")
        show.console.print(words.format(file=FILE, why=why))


def _load(*, warn: bool = True) -> dict[str, Kept]:
    try:
        return {machine: _kept(raw) for machine, raw in json.loads(FILE.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError, KeyError) as why:
        if warn:
            words = said("{file} is damaged ({why}) and ignored: the run starts with the first lesson.")
            show.console.print(words.format(file=FILE, why=why))
        return {}


def _kept(raw: dict[str, Any]) -> Kept:
    runs = [Run([*map(str, run["chosen"])], dict(run["done"]), float(run["at"])) for run in raw["runs"]]
    return Kept(runs, {name: float(seconds) for name, seconds in raw["seconds"].items()})


def _machine() -> str:
    return f"{platform.node()} {device.name()}"


# ---- Has a lesson changed? ------------------------------------------------------------------------------------------


def marks(names: Iterable[str]) -> dict[str, str]:
    """Lesson -> hash of its file and of all files of the course that it imports. Data that it reads does not count."""
    return {name: verdicts.code(frozenset({ROOT / f"{name.replace('.', '/')}.py"}))[:16] for name in names}


# ---- What is shown --------------------------------------------------------------------------------------------------


def seconds_left(
    todo: Iterable[str], running: Mapping[str, float], known: Mapping[str, float], at_once: int
) -> float | None:
    """How long the rest takes, or None where no lesson has been timed.

    todo: what has not begun; running: lesson -> seconds so far; known: lesson -> seconds that it takes. A lesson that
    is not known takes as long as the average of those that are.
    """
    if not known:
        return None
    average = sum(known.values()) / len(known)
    rest = [known.get(name, average) for name in todo]
    rest += [max(0.0, known.get(name, average) - so_far) for name, so_far in running.items()]
    return max([sum(rest) / at_once, *rest]) if rest else 0.0


def roughly(seconds: float) -> str:
    """20 s, 5 min, 1.5 h."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


class Watch:
    """Shows a run: a bar on a terminal, else a line when a lesson ends; what lessons print comes in reading order.

    all_names: the run's lessons; todo: those that are left; known: lesson -> seconds that it took before.
    at_once: how many run side by side. live: a bar may be drawn, because lessons do not write to the terminal.
    """

    def __init__(
        self, all_names: Sequence[str], todo: Sequence[str], known: Mapping[str, float], at_once: int, live: bool
    ) -> None:
        self.total, self.ended = len(all_names), len(all_names) - len(todo)
        self.todo, self.at_once = [*todo], at_once
        self.before, self.now = dict(known), dict[str, float]()
        self.running: dict[str, float] = {}  # since when
        self.printed: dict[str, bytes] = {}
        self.turns = [*todo]
        self.bar: Progress | None = None
        if live and show.console.is_terminal and not show.console.is_dumb_terminal:
            name = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
            columns = (BarColumn(), MofNCompleteColumn(), _Left(self), name)
            self.bar = Progress(*columns, console=show.console, transient=True, expand=True)
            self.task = self.bar.add_task("", total=self.total, completed=self.ended)

    def __enter__(self) -> "Watch":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()
        for printed in self.printed.values():  # of lessons that ended before their turn
            _write(printed)

    def began(self, name: str) -> None:
        self.todo.remove(name)
        self.running[name] = time.monotonic()
        self._update()

    def end(self, name: str, code: int, seconds: float, printed: bytes) -> None:
        """A lesson has ended, with what it printed."""
        self.running.pop(name, None)
        self.ended += 1
        self.now[name] = seconds
        self.printed[name] = printed
        if self.bar:
            self.bar.stop()  # else it would stand in the middle of what is printed
        while self.turns and self.turns[0] in self.printed:
            _write(self.printed.pop(self.turns.pop(0)))
        if self.bar:
            self.bar.start()
        else:
            left = self.left()
            line = f"[{self.ended}/{self.total}] {name} {verdict(code)} {seconds:.0f} s"
            show.console.print(line + (f", {left}" if left else ""), highlight=False, soft_wrap=True)
        self._update()

    def left(self) -> str:
        if self.ended == self.total:
            return ""
        now = time.monotonic()
        running = {name: now - since for name, since in list(self.running.items())}
        left = seconds_left([*self.todo], running, self.before | self.now, self.at_once)
        return "" if left is None else said("about {time} left").format(time=roughly(left))

    def _update(self) -> None:
        if self.bar:
            names = ", ".join(name.partition(".")[2] for name in self.running)
            self.bar.update(self.task, completed=self.ended, description=names)


class _Left(ProgressColumn):
    """The time left, drawn anew while nothing happens."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def render(self, task: Task) -> Text:
        return Text(self.watch.left())


def verdict(code: int) -> str:
    return "ok" if code == 0 else said("FAILED (exit {code})").format(code=code)


def _write(printed: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(printed)
    sys.stdout.flush()
