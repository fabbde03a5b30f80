"""Bursts of random cases by many processes at once (judge.bursts), their counts, and their failures shrunk.

Each process has the GPU by turns. Processes are shared among operators and directions by what is missing: the cases
left, times the seconds that a case took so far. So all counts are full at about the same time. A process rather stays
where it has kernels. A process that dies or hangs is asked again, by another one, for each case that was under way.
"""

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from lessonkit.judge import bursts
from lessonkit.judge.bursts import Drawing, Job
from lessonkit.judge.fuzz_cases import Case, Outcome
from lessonkit.measure import fuzz_runs
from lessonkit.measure.fuzz_runs import COUNTS, FOUND, Count, Found, Stuck, Worker

BURST = 1000  # cases of one operator and direction before a process takes the next
LEAST = 2 * bursts.GROUP  # as long as so many are left
BURST_S = 25.0  # seconds of one burst at most
CASE_S = 0.1  # seconds of a process for a case of an operator and direction that never ran
STAYS = 2.0  # a process leaves an operator that it has kernels of for one that misses more than twice as much
SAVING_S = 10.0  # seconds between two writes of a count
ENDING_S = 10.0  # seconds that a failure may shrink beyond the time of the run
SHRINKING = 120  # cases to shrink a failure with
Say = Callable[[str], None]


class BurstWorker(Worker):
    """The process that runs bursts."""

    module = bursts.__name__

    def __init__(self, mode: str, patience: float = fuzz_runs.PATIENCE) -> None:
        super().__init__(mode, patience)
        self._read = b""  # and not yet handed on

    def started(self) -> subprocess.Popen[str]:
        return self._process or self._start()

    def lines(self, job: Job) -> Iterator[dict[str, Any]]:
        """What the process says of a burst, to its end; at last {"died": why} if it did not come to that."""
        process = self.started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(asdict(job)) + "\n")
            process.stdin.flush()
            while line := self._line():
                said: dict[str, Any] = json.loads(line)
                if "end" in said:
                    return
                yield said
        except BrokenPipeError:
            pass
        except Stuck as stuck:
            self.stop()
            yield {"died": str(stuck)}
            return
        why = f"the process ended with {process.wait()}: {self._last_words()}"
        self.stop()
        yield {"died": why}

    def _line(self) -> bytes:
        """The next line; empty if the process has ended. Stuck if it says nothing in time.

        Not by readline: where that has read ahead, nobody could see that there is a line.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        while b"\n" not in self._read:
            self._wait()
            if not (more := os.read(self._process.stdout.fileno(), 2**16)):
                return b""
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return line

    def stop(self) -> None:
        super().stop()
        self._read = b""


@dataclass
class Tally:
    """What was counted of one operator and direction in this run."""

    count: Count  # of today's code, of all runs
    unsaved: Count  # of these, what is not in the file yet
    begun_with: int  # cases
    older: tuple[int, float] = (0, 0.0)  # cases and seconds of other code, which tell how long a case takes
    promised: int = 0  # cases of bursts that are under way
    under_way: int = 0  # bursts
    bursts: int = 0
    saved: float = 0.0  # when
    shapes: set[str] = field(default_factory=set)
    kernels: set[str] = field(default_factory=set)
    faults: dict[str, Found] = field(default_factory=dict)

    def missing_s(self, cases: int) -> float:
        """Seconds of a process that the cases up to so many will take, at the pace so far."""
        ran, seconds = self.older[0] + self.count.cases, self.older[1] + self.count.seconds
        return (cases - self.count.cases) * (seconds / max(ran, 1) if seconds else CASE_S)


class Run:
    """A run of many processes. Each thread drives one of them; what they share is held under a lock."""

    def __init__(
        self, todo: list[Count], cases: int, seconds: float, say: Say, *, path: Path = COUNTS, found_path: Path = FOUND,
        worker: Callable[[str], BurstWorker] = BurstWorker, judge: Callable[[str], Worker] = Worker,
    ) -> None:  # fmt: skip
        self.cases, self.end, self.say = cases, time.monotonic() + seconds, say
        self.path, self.found_path, self.worker, self.judge = path, found_path, worker, judge
        known = fuzz_runs.counts(path)
        before = {count.key: known.get(count.key, count) for count in todo}
        self.begun = {count.key: count for count in todo}
        self.tallies = [
            Tally(mine, count, mine.cases, fuzz_runs.other_code(known.values(), count))
            for mine, count in zip(before.values(), todo, strict=True)
        ]
        self.lock = Lock()
        self.shrinking = ThreadPoolExecutor(1)  # one failure after the other, while the processes go on
        self.shrinks: list[Future[None]] = []

    def run(self, workers: int) -> list[Found]:
        with self.shrinking, ThreadPoolExecutor(workers) as pool:
            for done in [pool.submit(self._drive) for _ in range(workers)]:
                done.result()
        for shrink in self.shrinks:
            shrink.result()
        return [each for tally in self.tallies for each in tally.faults.values()]

    def _drive(self) -> None:
        """One process, burst after burst, until every count is full or the time is over."""
        mine = Counter[tuple[str, ...]]()  # bursts that this process ran: it has kernels of these
        workers: dict[str, BurstWorker] = {}
        try:
            while (taken := self._next(mine)) is not None:
                tally, job = taken
                mine[tally.count.key] += 1
                mode = tally.count.mode
                worker = workers.setdefault(mode, self.worker(mode))
                self._burst(tally, job, worker)
        finally:
            for worker in workers.values():
                worker.stop()

    def _next(self, mine: Counter[tuple[str, ...]]) -> tuple[Tally, Job] | None:
        """The operator and direction that misses the most seconds for each process that it then has."""
        with self.lock:
            left = self.end - time.monotonic()
            waiting = [t for t in self.tallies if t.count.cases + t.promised < self.cases]
            if left <= 0 or not waiting:
                return None

            def misses(tally: Tally) -> float:
                stays = STAYS if tally.count.key in mine else 1.0
                return stays * tally.missing_s(self.cases) / (tally.under_way + 1)

            tally = max(waiting, key=misses)
            count = tally.count
            left_over = self.cases - count.cases - tally.promised
            n = min(BURST, left_over, max(LEAST, left_over // 2))  # at the end several processes share what is left
            # The seeds of a later run are others, since it begins with more cases.
            seed = 1000 * tally.begun_with + tally.bursts
            tally.promised += n
            tally.under_way += 1
            tally.bursts += 1
            return tally, Job(count.operator, count.direction, seed, n, min(BURST_S, left))

    def _burst(self, tally: Tally, job: Job, worker: BurstWorker) -> None:
        worker.started()
        start = time.monotonic()
        under_way = list[Drawing]()
        left = job.cases  # of what was promised
        for line in worker.lines(job):
            if "drawn" in line:
                under_way.append(_drawing(line["drawn"]))
            elif "failed" in line:
                self._failed(tally, _drawing(line["failed"]), Outcome(line["kind"], line["said"]))
            elif "judged" in line:
                kinds = Counter[str](line["judged"])
                left -= kinds.total()
                self._count(tally, kinds, time.monotonic() - start, line["shapes"], line["kernels"])
                start, under_way = time.monotonic(), []
            else:
                left -= len(under_way)
                self._died(tally, worker.mode, under_way, line["died"], time.monotonic() - start)
        with self.lock:
            tally.promised -= left
            tally.under_way -= 1
            self._save(tally)

    def _count(self, tally: Tally, kinds: Counter[str], seconds: float, shapes: list[str], kernels: list[str]) -> None:
        with self.lock:
            new_shapes, new_kernels = set(shapes) - tally.shapes, set(kernels) - tally.kernels
            tally.shapes |= new_shapes
            tally.kernels |= new_kernels
            new = replace(self.begun[tally.count.key], shapes=len(new_shapes), kernels=len(new_kernels))
            new = new.plus(kinds, seconds)
            tally.promised -= kinds.total()
            tally.count, tally.unsaved = tally.count.with_those_of(new), tally.unsaved.with_those_of(new)
            if time.monotonic() > tally.saved + SAVING_S:
                self._save(tally)

    def _save(self, tally: Tally) -> None:
        fuzz_runs.counted(tally.unsaved, self.path)
        tally.unsaved, tally.saved = self.begun[tally.count.key], time.monotonic()

    def _died(self, tally: Tally, mode: str, under_way: list[Drawing], why: str, seconds: float) -> None:
        """Ask again for each case that was under way, one by one, and count what is found; none is left out."""
        kinds, failed = Counter[str](), False
        with self.judge(mode) as judge:
            for drawing in under_way:
                outcome = judge.ask(drawing.case)
                kinds[outcome.kind] += 1
                if not outcome.well:
                    failed = True
                    self._failed(tally, drawing, outcome)
        if not failed and under_way:
            kinds["right"] -= 1
            kinds["crash"] += 1
            alone = f"{why}; each of the {len(under_way)} cases under way is right by itself, this is the last"
            self._failed(tally, under_way[-1], Outcome("crash", alone), shrink=False)
        self._count(tally, kinds, seconds, [], [])

    def _failed(self, tally: Tally, drawing: Drawing, outcome: Outcome, *, shrink: bool = True) -> None:
        """Keep a failure, shrunk, if its fault is new."""
        failure = Found(tally.count.mode, drawing.case, outcome.kind, outcome.said)
        with self.lock:
            if failure.fault in tally.faults:
                return
            tally.faults[failure.fault] = failure
        self.say(failure.in_words)  # now, in case that the run is stopped while it shrinks
        if shrink:
            self.shrinks.append(self.shrinking.submit(self._shrink, tally, drawing, failure))
        else:
            self._keep(failure)

    def _shrink(self, tally: Tally, drawing: Drawing, failure: Found) -> None:
        smallest = failure
        if time.monotonic() < self.end + ENDING_S:
            with self.judge(tally.count.mode) as judge:
                smallest = shrunk(drawing, failure, judge.ask, until=self.end + ENDING_S)
        with self.lock:
            tally.faults[failure.fault] = smallest
        self._keep(smallest)
        if smallest != failure:
            self.say(smallest.in_words)

    def _keep(self, failure: Found) -> None:
        with self.lock:
            fuzz_runs.add(failure, self.found_path)


def _drawing(said: dict[str, Any]) -> Drawing:
    return Drawing(**said | {"choices": tuple(said["choices"])})


def shrunk(
    drawing: Drawing, failure: Found, ask: Callable[[Case], Outcome], *, until: float
) -> Found:  # fmt: skip
    """The same fault of a simpler case: fewer choices, each as small as it may be, in SHRINKING tries and that time."""
    asked, nth, last = {json.dumps(failure.case)}, 0, 0  # last: the place that was simplified last
    while True:
        for choices in _simpler(drawing.choices, nth):
            simpler = replace(drawing, choices=choices)
            if (name := json.dumps(simpler.case)) in asked:
                continue
            if len(asked) > SHRINKING or time.monotonic() > until:
                return failure
            asked.add(name)
            outcome = ask(simpler.case)
            found = Found(failure.mode, simpler.case, outcome.kind, outcome.said)
            if not outcome.well and found.fault == failure.fault:
                drawing, failure, last = simpler.settled, found, nth
                break
        else:
            nth = (nth + 1) % len(drawing.choices)
            if nth == last:
                return failure


def _simpler(choices: tuple[int, ...], nth: int) -> Iterator[tuple[int, ...]]:
    """With a smaller choice in that place, also where the next is then one too many; and without it."""
    before, value, after = choices[:nth], choices[nth], choices[nth + 1 :]
    for smaller in dict.fromkeys((0, value // 2, value - 1)):
        if abs(smaller) < abs(value):
            yield *before, smaller, *after
            yield *before, smaller, *after[1:]
    yield *before, *after


def run(
    names: list[str], modes: list[str], cases: int, seconds: float, workers: int, say: Say, *,
    path: Path = COUNTS, found_path: Path = FOUND,
) -> list[Found]:  # fmt: skip
    """As fuzz_runs.run, in bursts by so many processes."""
    return Run(fuzz_runs.asked(names, modes), cases, seconds, say, path=path, found_path=found_path).run(workers)
