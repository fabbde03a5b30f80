"""A run of the fuzzer: hypothesis draws cases, a process of its own runs them, failures shrink, counts are added up.

The process may die or hang: then the case that it was asked counts as a crash, and another process goes on. While it
compiles it does not hang: that may take minutes where many processes do. A failure is written to
tests/fuzz/found.jsonl, which the tests replay. Counts go to reports/fuzz.csv, where a later run goes on as long as the
operator's code is the same.
"""

import json
import os
import re
import selectors
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Self

from lessonkit.base import device
from lessonkit.base.errors import Missing
from lessonkit.base.files import REPORTS, ROOT, changing, environment, write_atomically
from lessonkit.base.tables import read_csv, to_csv
from lessonkit.judge import fuzz_cases
from lessonkit.judge.fuzz_cases import Case, Outcome
from lessonkit.measure import operator_rows, rows

FOUND = ROOT / "tests" / "fuzz" / "found.jsonl"
COUNTS = REPORTS / "fuzz.csv"
_commit = cache(rows.this_commit)  # asked for each operator, direction and mode
PATIENCE = 120.0  # seconds for one case, without those in which it compiles
COMPILING = 900.0  # seconds for one case, with those
LOOKS = 4  # at what the process does, in the time of its patience
COMPILER = re.compile(rb"/triton/compiler/|_do_compile")  # in the stacks of a process that compiles
STARTING = 600.0  # seconds for a process to import PyTorch and Triton
TURN = 100  # cases of one operator and direction before the next ones' turn


class Stuck(Exception):
    """The process does not answer in time."""


class Worker:
    """The process that runs cases of one mode; it is started when it is first asked, and after it died."""

    module = fuzz_cases.__name__

    def __init__(self, mode: str, patience: float = PATIENCE, compiling: float = COMPILING) -> None:
        self.mode, self.patience, self.compiling = mode, patience, compiling
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    def ask(self, case: Case) -> Outcome:
        """What the process says of a case; a crash if it dies of it, or does not answer in time."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(case) + "\n")
            process.stdin.flush()
            self._wait()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        except Stuck as stuck:
            self.stop()
            return Outcome("crash", str(stuck))
        if line:
            outcome = Outcome(*json.loads(line))
            if outcome.kind == "crash" and self.mode == "gpu":
                self.stop()  # after an illegal address the process has lost the GPU
            return outcome
        said = f"the process ended with {process.wait()}: {self._last_words()}"
        self.stop()
        return Outcome("crash", said)

    def _start(self) -> subprocess.Popen[str]:
        self._errors = TemporaryFile("w+")  # noqa: SIM115 - closed by stop()
        hidden = {} if self.mode == "gpu" else {"CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", self.module, self.mode],
            env=environment(OMP_NUM_THREADS="1", **hidden),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        assert self._process.stdout is not None
        if not self._says_something(STARTING) or self._process.stdout.readline().strip() != fuzz_cases.READY:
            raise RuntimeError(f"the process that runs cases did not start: {self._last_words()}")
        return self._process

    def _says_something(self, seconds: float) -> bool:
        """Whether there is a line to be read, or the process has ended, in time."""
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            return bool(ready.select(seconds))

    def _wait(self) -> None:
        """Until there is a line to be read, or the process has ended. Stuck if it hangs, or compiles for too long."""
        start, idle = time.monotonic(), 0
        while not self._says_something(self.patience / LOOKS):
            idle = 0 if self._compiles() else idle + 1
            if idle >= LOOKS:
                raise Stuck(f"hang: no answer in {time.monotonic() - start:.0f} s, and no kernel is being compiled")
            if time.monotonic() - start > self.compiling:
                raise Stuck(f"slow: kernels are being compiled for {self.compiling:g} s")

    def _compiles(self) -> bool:
        """Whether the process is inside Triton's compiler now, by its stacks."""
        assert self._process is not None
        assert self._errors is not None
        file = self._errors.fileno()
        before = os.fstat(file).st_size
        self._process.send_signal(fuzz_cases.WHERE)
        for _ in range(10):
            time.sleep(0.1)
            # Not by read: the process writes where its file stands, which is this one.
            if COMPILER.search(os.pread(file, 2**20, before)):
                return True
        return False

    def _last_words(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(0)
        return self._errors.read().strip()[-500:]

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        if self._errors is not None:
            self._errors.close()
        self._process = self._errors = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


# ---- Found cases ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A case that failed, shrunk; where, and what was said of it then. open: why it still fails, if it does."""

    mode: str
    case: Case
    kind: str
    said: str
    open: str = ""

    @property
    def in_words(self) -> str:
        """What was said, and the case for `fuzz --replay`."""
        about = f"{self.case['operator']} {self.case['direction']}, {self.mode}: {self.kind}: {self.said}"
        return f"{about}\n{json.dumps(self.case)}"

    @property
    def fault(self) -> str:
        """Cases with one fault say the same but for numbers."""
        lines = [line for line in self.said.strip().splitlines() if line.strip()] or [""]
        head = lines[0] if self.kind in ("wrong", "false alarm") else lines[-1]
        if self.kind == "wrong":  # "value: 3 of 7 wrong, ...": the property alone, and what follows a refusal
            head = head if head.startswith("refusal") else head.partition(":")[0]
        return f"{self.kind}: {re.sub(r'[0-9][0-9.e+-]*', '#', head)[:80]}"


def found(path: Path = FOUND) -> list[Found]:
    return [Found(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def add(new: Found, path: Path = FOUND) -> None:
    with changing(path):
        kept = found(path)
        if any((new.mode, new.case) == (old.mode, old.case) for old in kept):
            return
        write_atomically(path, "".join(json.dumps(asdict(each)) + "\n" for each in (*kept, new)))


# ---- Counts ---------------------------------------------------------------------------------------------------------


NUMBERS = ("cases", "shapes", "kernels", "refused", "wrong", "crashes", "false_alarms")


@dataclass(frozen=True, kw_only=True)
class Count:
    """Cases of one operator and direction, in one mode, with the operator's code and the versions of its compilers."""

    operator: str
    direction: str
    mode: str
    device: str
    cases: int = 0  # run; those that only shrink a failure are not counted
    shapes: int = 0  # in bursts: of the arguments, different ones; a later run that meets one again counts it again
    kernels: int = 0  # in bursts: that these compiled, different ones; likewise
    refused: int = 0  # of these, calls that must be refused, and were
    wrong: int = 0
    crashes: int = 0
    false_alarms: int = 0  # legal calls that were refused
    seconds: float = 0.0
    versions: str
    code: str  # of the operator, through every import: a change of anything else keeps the count
    commit: str  # of the last run

    @property
    def key(self) -> tuple[str, ...]:
        return self.operator, self.direction, self.mode, self.device, self.versions, self.code

    def plus(self, kinds: Counter[str], seconds: float) -> "Count":
        return replace(
            self,
            cases=self.cases + kinds.total(),
            refused=self.refused + kinds["refused"],
            wrong=self.wrong + kinds["wrong"] + kinds["broken reference"],
            crashes=self.crashes + kinds["crash"],
            false_alarms=self.false_alarms + kinds["false alarm"],
            seconds=round(self.seconds + seconds, 1),
        )

    def with_those_of(self, other: "Count") -> "Count":
        sums = {name: getattr(self, name) + getattr(other, name) for name in NUMBERS}
        return replace(other, **sums | {"seconds": round(self.seconds + other.seconds, 1)})


def counts(path: Path = COUNTS) -> dict[tuple[str, ...], Count]:
    numbers: dict[str, Any] = {"seconds": float} | dict.fromkeys(NUMBERS, int)
    read = (Count(**{name: numbers.get(name, str)(value) for name, value in row.items()}) for row in read_csv(path))
    return {count.key: count for count in read}


def counted(new: Count, path: Path = COUNTS) -> Count:
    """Put what is counted of `new` to what is known of the same code; another process may have counted meanwhile."""
    with changing(path):
        known = counts(path)
        before = known.get(new.key)
        known[new.key] = new if before is None else before.with_those_of(new)
        write_atomically(path, to_csv([asdict(each) for _, each in sorted(known.items())]))
    return known[new.key]


def begun(operator: str, direction: str, mode: str) -> Count:
    """The count of today's code on this machine, with nothing in it."""
    where = device.name() if mode == "gpu" else "cpu"
    versions = " ".join(f"{name} {metadata.version(name)}" for name in ("torch", "triton", "hypothesis"))
    return Count(
        operator=operator, direction=direction, mode=mode, device=where, versions=versions,
        code=operator_rows.code(operator), commit=_commit(),
    )  # fmt: skip


def table(todo: list[Count], path: Path = COUNTS) -> list[tuple[Count, int]]:
    """What is known of each: the count of today's code, and how many cases ran of other code or by other versions."""
    known = counts(path)
    found = []
    for new in todo:
        found.append((known.get(new.key, new), other_code(known.values(), new)[0]))
    return found


def other_code(known: Iterable[Count], new: Count) -> tuple[int, float]:
    """Cases and seconds of other code or other versions, which do not count for `new`."""
    others = [c for c in known if c.key[:4] == new.key[:4] and c.key != new.key]
    return sum(c.cases for c in others), sum(c.seconds for c in others)


# ---- Drawing --------------------------------------------------------------------------------------------------------


def need_hypothesis() -> None:
    """Raise Missing, with the command that mends it."""
    if find_spec("hypothesis") is None:
        raise Missing(
            "hypothesis is not installed: it draws the cases. Install the extra `test`: pip install -e '.[test]'"
        )


@dataclass
class _ByHypothesis:
    """Draws for fuzz_cases.draw_case."""

    data: Any
    most: int

    def integer(self, low: int, high: int) -> int:
        drawn: int = self.data.draw(self._strategies.integers(low, high))
        return drawn

    def one_of(self, options: Any) -> Any:
        return options[self.integer(0, len(options) - 1)]

    @property
    def _strategies(self) -> Any:
        return import_module("hypothesis.strategies")


class _Failed(AssertionError):
    pass


def drawn(
    operator: str, direction: str, mode: str, ask: Callable[[Case], Outcome], n: int, seed: int, until: float
) -> tuple[Counter[str], list[Found]]:
    """Run up to n new cases before the time `until`; kinds of outcome, and a shrunk case of each fault.

    After a failure the rest is drawn anew; a fault that has been found is counted, and not shrunk again.
    """
    drawing = _Drawing(operator, direction, mode, ask, n, seed, until)
    while not drawing.is_over:
        before = drawing.kinds.total()
        failure = drawing.first_fault()
        if failure is not None:
            drawing.faults[failure.fault] = failure
        elif drawing.kinds.total() == before:
            break
    return drawing.kinds, list(drawing.faults.values())


@dataclass
class _Drawing:
    """What `drawn` asks for, and what it has found so far: how many cases of each kind, and the faults."""

    operator: str
    direction: str
    mode: str
    ask: Callable[[Case], Outcome]
    n: int
    seed: int
    until: float
    kinds: Counter[str] = field(default_factory=Counter)
    faults: dict[str, Found] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.kinds.total() >= self.n or time.monotonic() >= self.until

    def first_fault(self) -> Found | None:
        """Run and count cases up to the first fault that is not known, and shrink that."""
        hypothesis = import_module("hypothesis")
        shrinking = list[Found]()

        def one(data: Any) -> None:
            if not shrinking and self.is_over:
                return
            case = fuzz_cases.draw_case(self.operator, self.direction, _ByHypothesis(data, fuzz_cases.MOST[self.mode]))
            outcome = self.ask(case)
            if not shrinking:
                self.kinds[outcome.kind] += 1
            failure = Found(self.mode, case, outcome.kind, outcome.said)
            if outcome.well or failure.fault in self.faults or (shrinking and shrinking[0].fault != failure.fault):
                return
            shrinking.append(failure)
            raise _Failed(failure.fault)

        limited = hypothesis.settings(
            max_examples=self.n - self.kinds.total(), database=None, deadline=None, print_blob=False,
            report_multiple_bugs=False, phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        seeded = hypothesis.seed(self.seed + self.kinds.total())
        test = limited(seeded(hypothesis.given(hypothesis.strategies.data())(one)))
        # The shrunk case raises, or Flaky is raised where a fault does not come again: that is kept all the same.
        expected = (_Failed, import_module("hypothesis.errors").Flaky, BaseExceptionGroup)
        with import_module("hypothesis.reporting").with_reporter(lambda text: None), suppress(*expected):
            test()
        return shrinking[-1] if shrinking else None


def asked(names: list[str], modes: list[str]) -> list[Count]:
    """Each operator and direction in each mode, with nothing counted yet. names: of these alone."""
    questions = fuzz_cases.questions()
    return [
        begun(name, direction, mode)
        for mode in modes
        for name in names or questions
        for direction in fuzz_cases.DIRECTIONS
        if direction == "forward" or questions[name].gradients
    ]


def run(
    names: list[str], modes: list[str], cases: int, seconds: float, say: Callable[[str], None], *,
    path: Path = COUNTS, found_path: Path = FOUND,
) -> list[Found]:  # fmt: skip
    """Until each operator and direction has so many cases of today's code in each mode, or the time is over."""
    need_hypothesis()
    todo = asked(names, modes)
    end, failures = time.monotonic() + seconds, list[Found]()
    workers = {mode: Worker(mode) for mode in modes}
    try:
        while todo and time.monotonic() < end:
            for new in list(todo):
                known = counts(path)
                count = known.get(new.key, new)
                if count.cases >= cases:
                    todo.remove(new)
                    continue
                start = time.monotonic()
                if start >= end:
                    break
                kinds, faults = drawn(
                    count.operator, count.direction, count.mode, workers[count.mode].ask,
                    min(TURN, cases - count.cases), count.cases, end,
                )  # fmt: skip
                counted(new.plus(kinds, time.monotonic() - start), path)
                for each in faults:
                    add(each, found_path)
                    say(each.in_words)
                failures += faults
                if not kinds:
                    todo.remove(new)
    finally:
        for worker in workers.values():
            worker.stop()
    return failures
