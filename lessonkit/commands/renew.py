"""Measure again, on this machine's GPU, what is no longer of today's code, as far as the minutes reach.

That is what `stale` lists: rows and tables of lessons, verdicts on mutants, rows of operators. A fifth of the time that
is left goes to sanitizers and neighbours that have not been run on today's code, many at a time, the cheapest first.
The rest goes to random cases. Mutants come first, since what is called after them fills the GPU's memory. Then all that
will be timed is called by many processes at once: a shape costs a second to time and up to a minute to compile. Then
one thing after the other is timed, with nothing beside it.

A process of its own does each thing, this module as a script, since a kernel may hang or break the CUDA context. What
is measured is kept at once, so a run that was stopped loses what it was at.

On a machine with several GPUs one run for each measures a share of all: the second of two takes every other task.
"""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from lessonkit.base import device, process
from lessonkit.base.files import REPORTS, environment
from lessonkit.commands import show
from lessonkit.judge import fuzz_cases
from lessonkit.lesson import Steps, kernels
from lessonkit.measure import (
    bench,
    coverage,
    fuzz_pool,
    gpu_mutants,
    operator_bench,
    operator_rows,
    sanitize,
    stale,
)
from lessonkit.measure.sanitize import Part

MUTANTS = "mutants"  # in place of a step
AHEAD = 1 / 3  # of the minutes at most: then what is compiled is timed
WATCHED = 1 / 5  # of the minutes that are left then, for sanitizers and neighbours
ONE = 1 / 4  # of these at most for one of them: what hangs leaves time for others
CASES = 10_000  # of each operator and direction, as a release wants them


@dataclass(frozen=True)
class Task:
    """What one process measures again: a step of a lesson, all rows of one (step: ""), or its mutants (MUTANTS)."""

    lesson: str
    step: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.lesson, self.step)))

    @property
    def timed(self) -> bool:
        return self.step != MUTANTS

    def command(self, how: str) -> list[str]:
        if not self.timed:
            return [sys.executable, "-m", "lessonkit", "mutants", self.lesson]
        return [sys.executable, "-m", __name__, how, self.lesson, self.step]


def old() -> list[Task]:
    """What `stale` lists of the lessons, for the GPU of this machine; each lesson once, and each step."""
    folder = REPORTS / device.name()
    today = stale.Today(kernels())
    tables = [Task(lesson, step) for _, lesson, step in stale.tables([folder])]
    lessons = [Task(each.lesson) for each in stale.old([folder], today) if each.lesson]
    lacking = [
        Task(name, MUTANTS)
        for name, mutant in gpu_mutants.of_one_gpu(today.lessons.items(), device.capability())
        if not gpu_mutants.fresh(folder, name, mutant) and not gpu_mutants.lacks(name, mutant)
    ]
    return list(dict.fromkeys([*lacking, *tables, *lessons]))


@dataclass(frozen=True)
class Watch:
    """A sanitizer, or a neighbour, for a part of a lesson or for an operator's direction."""

    name: str
    tool: str
    part: Part

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, str(self.part), self.tool)))

    def run(self, folder: Path, seconds: float) -> list[str]:
        """Run it in a process of its own, which ends after the seconds at the latest, and keep what it says; faults."""
        if self.tool == coverage.NEIGHBOUR:
            command = [sys.executable, "-m", "lessonkit", "beside", self.name, "--rung", self.part.rung, "--no-alone"]
            code, out, err = process.output(command, seconds, **environment())
            return [f"{self}: {' '.join((out + err).split())[-300:]}"] if code else []
        try:
            _, errors = sanitize.watched(folder, self.name, self.tool, self.part, sanitize.argued(), seconds)
        except sanitize.NotUnderstood as why:
            return [str(why)]
        return [f"{self}: {report.kernel}: {report.what}" for report in errors]


def unwatched() -> list[Watch]:
    """What no row of today's code is of, on the GPU of this machine: one tool after the other, the cheapest first."""
    every = coverage.cells(REPORTS / device.name(), kernels(), device.capability())
    lacks = {tool: sanitize.lacks(tool) for tool in sanitize.ALL}
    found = [cell for cell in every if cell.again and not lacks.get(cell.tool)]
    found.sort(key=lambda cell: (coverage.CHEAPEST.index(cell.tool), cell.cost))
    return [Watch(cell.name, cell.tool, part) for cell in found for part in cell.again]


def watch(
    wanted: Sequence[Watch], folder: Path, seconds: float, workers: int, say: Callable[[str], None]
) -> list[str]:  # fmt: skip
    """Run them, so many at a time, until the seconds are over; what failed, in a line each. Too long is no failure."""
    end = time.monotonic() + seconds

    def one(each: Watch) -> list[str]:
        began = time.monotonic()
        limit = min(end - began, seconds * ONE)
        if limit < 1:
            return []
        faults = each.run(folder, limit)
        took = time.monotonic() - began
        say(f"{each}: {took:.0f} s" + ", not to its end" * (took >= limit))
        faults = faults if took < limit else []
        for fault in faults:  # now, in case that the run is stopped
            say(fault)
        return faults

    with ThreadPoolExecutor(workers) as pool:
        return [fault for faults in pool.map(one, wanted) for fault in faults]


def run(minutes: float, workers: int, say: Callable[[str], None], nth: int = 1, of: int = 1) -> list[str]:
    """Measure until all is of today's code or the minutes are over; what failed, in a line each. nth, of: the share."""
    end, mine = time.monotonic() + 60 * minutes, slice(nth - 1, None, of)
    tasks, path = old()[mine], REPORTS / device.name() / operator_rows.FILE
    cases = operator_rows.pending(operator_rows.read(path), operator_rows.cases())[mine]
    watches = unwatched()[mine]  # now: other shares go by the same list
    say(f"to be measured: of lessons {len(tasks)}, shapes of operators {len(cases)}")
    failed: list[str] = []
    judged, timed = [task for task in tasks if not task.timed], [task for task in tasks if task.timed]
    until = time.monotonic() + 60 * minutes * AHEAD
    failed += [why for why in _at_once(judged, "judge", workers, until, say) if why]
    with operator_bench.Processes(max(1, workers // 2), minutes) as processes:
        with ThreadPoolExecutor(1) as beside:
            compiled = beside.submit(processes.ahead, cases)
            _at_once(timed, "ahead", workers, until, say)
            compiled.result()
        failed += [why for task in timed if (why := _done(task, "time", end, say))]
        left = (end - time.monotonic()) / 60
        done = operator_bench.run(cases, processes.timed, path, left, say=say) if left > 0 else 0
    if done < len(cases):
        failed.append(f"{len(cases) - done} shapes of operators: no time was left")
    if (seconds := end - time.monotonic()) > 0:
        failed += watch(watches, REPORTS / device.name(), seconds * WATCHED, workers, say)
    if (seconds := end - time.monotonic()) > 0:
        names = list(fuzz_cases.questions())[mine]
        failures = fuzz_pool.run(names, ["gpu"], CASES, seconds, workers, say)
        failed += [f"{each.case['operator']}: {each.fault}" for each in failures]
    return failed


def _at_once(tasks: Iterable[Task], how: str, workers: int, until: float, say: Callable[[str], None]) -> list[str]:
    """Do so many at a time; of each why it failed, or an empty string."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda task: _done(task, how, until, say), tasks))


def _done(task: Task, how: str, until: float, say: Callable[[str], None]) -> str:
    """Run a task's process; why it failed, with its last words, or an empty string."""
    start = time.monotonic()
    if until - start < 1:
        return f"{task}: no time was left"
    code, out, err = process.output(task.command(how), until - start, **environment())
    if time.monotonic() >= until:
        return f"{task}: no time was left"
    say(f"{task}, {how}: {time.monotonic() - start:.0f} s, exit code {code}")
    return f"{task}: {' '.join((out + err).split())[-300:]}" if code else ""


# ---- In a process of its own ----------------------------------------------------------------------------------------


def main(how: str, name: str, step: str = "") -> None:
    """Time a step or all rows of a lesson and keep them; "ahead": once, and nothing is kept."""
    lesson = import_module(name).LESSON
    if step:
        one = next(each for each in lesson.steps if each.__name__ == step)
        if how == "ahead":
            one()
        else:
            show.steps(name, Steps((one,), about=lesson.about))
    elif how == "ahead":
        bench.bench(name, lesson, lambda line: None)
    elif show.timed(name, lesson):
        sys.exit(f"{name}: a rung was not timed")


if __name__ == "__main__":
    main(*sys.argv[1:])
