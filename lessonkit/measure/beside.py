"""Repeat rungs beside another process that uses the same GPU: what is right alone may be wrong there.

The GPU switches between processes every few milliseconds. It saves an SM's state, barriers included, and restores it
later. Three faults show only then: a barrier that is initialised and never used, a wait that assumes its partner is
resident, and a kernel that starts before its predecessor has ended. Day 5's lesson on neighbours has such a kernel.

Answers have to be equal to the bit. The order of additions may vary from run to run if the rung's docstring says so
(VARIES), and that of an operator which has another kernel for torch.use_deterministic_algorithms. Then every answer has
to lie within the checker's allowance, alone and beside the other process.

Of course_ops, cases are repeated that together launch each kernel of an operator's dispatch, the largest of each.

`python -m lessonkit.measure.beside` is the neighbour: it multiplies matrices until it is killed.
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lessonkit.base import device
from lessonkit.base.errors import Missing, Unsupported
from lessonkit.base.files import changing, environment, write_atomically
from lessonkit.base.tables import read_csv, to_csv
from lessonkit.judge import check, mutants
from lessonkit.lesson import Case, Lesson, Rung, budget_of, is_stepwise, shape_name
from lessonkit.measure import operator_cases, rows

import torch

NAME = "beside.csv"
MOST = operator_cases.LARGE  # FLOPs of a call: a matmul of 4096 takes a fraction of a millisecond
VARIES = "not to the bit"  # in a rung's docstring: "Runs agree to rounding, not to the bit."
HERE = "here"  # what the neighbour says once its kernels run
# Words of what two processes can disturb: barriers in shared memory, waiting in a loop, starting before another's end.
KINDS = {
    "barriers": r"\bmbarrier\b|\bbarrier\.cluster\b|mbarrier_|\bwarp_specialize\b",
    "spinning": r"\batomic_(?:cas|xchg)\b|\batomicCAS\b|ld\.acquire|memory_order_acquire|\bgrid\.sync|\bcluster\.sync",
    "early launch": r"\blaunch_pdl\b|\bgdc_\w+|griddepcontrol|ProgrammaticStreamSerialization",
}


@dataclass(frozen=True)
class Repeated:
    """A rung on one check, called again and again, alone or beside another process; of an operator a direction.

    source   what was repeated: code and inputs
    kernels  of an operator: those that this case is repeated for
    differ   how many answers differed from the first
    varies   whether the rung says that they may
    outside  what the checker says of the elements' smallest or largest values, if some differed; "" if nothing
    """

    lesson: str
    rung: str
    kinds: str
    case: str
    dtype: str
    neighbour: bool
    calls: int
    differ: int
    varies: bool = False
    outside: str = ""
    kernels: str = ""
    source: str = ""


def kinds(name: str, rung: str) -> list[str]:
    """Which of KINDS the rung's file, or its program, names; of an operator the files that its calls reach."""
    files = operator_cases.files(name, rung) if operator_cases.is_operator(name) else mutants._files(name, rung)
    text = "\n".join(path.read_text() for path in files)
    return [kind for kind, words in KINDS.items() if re.search(words, text)]


@contextmanager
def neighbour() -> Iterator[None]:
    """Inside, another process computes on the same GPU. Raises Missing if it does not come to that."""
    command = [sys.executable, "-W", "ignore", "-m", "lessonkit.measure.beside"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment(), **pipes) as process:
        try:
            assert process.stdout
            said = ""
            while (line := process.stdout.readline()).strip() != HERE:  # libraries may have something to say first
                if not line:
                    raise Missing(f"the neighbour did not start: {said[-500:]}")
                said += line
            yield
            if process.poll() is not None:
                raise Missing(f"the neighbour ended with {process.returncode}: nothing was repeated beside it")
        finally:
            process.kill()


@dataclass(frozen=True)
class Calls:
    """What the calls of a rung answered: how many differed in a bit from the first, and each element's extremes."""

    count: int
    differ: int
    smallest: tuple[torch.Tensor, ...]
    largest: tuple[torch.Tensor, ...]


def repeat(call: Callable[[], Any], seconds: float, synchronize: Callable[[], None]) -> Calls:
    """Call again and again for so long.

    A NaN is equal to the NaN of the first. Ten calls wait in the stream at a time, as in a program that is busy.
    """
    first = [t.clone() for t in check.tensors(call())]
    smallest, largest = ([t.clone() for t in first] for _ in range(2))
    calls, differ, end = 0, torch.zeros((), dtype=torch.int64, device=first[0].device), time.monotonic() + seconds
    while calls == 0 or time.monotonic() < end:
        for _ in range(10):
            answers = check.tensors(call())
            differ += torch.stack([_differs(a, b) for a, b in zip(answers, first, strict=True)]).any()
            for low, high, answer in zip(smallest, largest, answers, strict=True):
                torch.minimum(low, answer, out=low)
                torch.maximum(high, answer, out=high)
            calls += 1
        synchronize()
    return Calls(calls, int(differ), tuple(smallest), tuple(largest))


def outside(question: check.Truth, rung: Rung, found: Calls) -> str:
    """What the checker has against the smallest or the largest values; if nothing, it accepts all answers."""
    for each in (found.smallest, found.largest):
        try:
            check.compare(question, each, slack=budget_of(rung), stepwise=is_stepwise(rung))
        except check.Rejected as why:
            return str(why)
    return ""


def _differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (check._bits(a) != check._bits(b)).any()


def cases(lesson: Lesson, rung: Rung) -> Iterator[tuple[Case, torch.dtype]]:
    """What to repeat, best first: a bench shape with at most MOST FLOPs, and then the checks, the largest first.

    A call of microseconds is hardly ever on an SM when the GPU switches: day 5's lesson counts it. In the dtype that is
    timed or, if it is not checked, the last.
    """
    dtype = lesson.bench_dtype if lesson.bench_dtype in lesson.dtypes else lesson.dtypes[-1]
    work = {shape_name(shape): lesson.work(dtype=lesson.bench_dtype, **shape) for shape in lesson.benches}
    long = [shape for shape in lesson.benches if work[shape_name(shape)].flops <= MOST]
    long.sort(key=lambda shape: (work[shape_name(shape)].flops, work[shape_name(shape)].bytes))
    timed = [Case("as it is timed", shape) for shape in long[-1:] if dtype == lesson.bench_dtype]
    for case in (*timed, *reversed([case for case in lesson.checks if case.gib <= 1])):
        if not check.cannot_run(lesson, rung, case, dtype):
            yield case, dtype


@dataclass(frozen=True)
class _Question:
    """What is repeated. about: the fields of a Repeated that do not depend on the answers."""

    lesson: Lesson
    rung: Rung
    args: Callable[[], tuple[Any, ...]]
    mode: Callable[[], AbstractContextManager[None]]
    about: dict[str, Any]

    def repeated(self, seconds: float, *, beside: bool) -> Repeated:
        with self.mode():
            args = self.args()
            counted = repeat(partial(self.rung, *args), seconds, torch.cuda.synchronize)
            refused = outside(check.judge(self.lesson, args), self.rung, counted) if counted.differ else ""
        counts: dict[str, Any] = {"calls": counted.count, "differ": counted.differ, "outside": refused}
        return Repeated(**self.about, **counts, neighbour=beside)


def measured(
    lessons: Sequence[tuple[str, Lesson]], seconds: float, only: str = "", *, alone: bool = True
) -> Iterator[list[Repeated]]:  # fmt: skip
    """The rungs with what a neighbour can disturb: all alone, then all beside one. A GPU is needed.

    What is yielded is whole: all cases of a rung, which share the seconds. only: the rungs of that name. alone: False
    leaves that half out, on a GPU that other processes use meanwhile.
    """
    asked = [
        found
        for name, lesson in lessons
        for rung in lesson.rungs
        if only in ("", rung.__name__) and kinds(name, rung.__name__) and (found := _questions(name, lesson, rung))
    ]
    for beside in (False, True) if alone else (True,):
        with neighbour() if beside and asked else nullcontext():
            for each in asked:
                yield [question.repeated(seconds / len(each), beside=beside) for question in each]


def _questions(name: str, lesson: Lesson, rung: Rung) -> list[_Question]:
    label = rung.__name__
    about: dict[str, Any] = {"lesson": name, "rung": label, "kinds": ", ".join(kinds(name, label))}
    about |= {"source": operator_cases.source(name, label)}
    if operator_cases.is_operator(name):
        return [
            _Question(
                lesson, rung, partial(each.inputs, lesson), each.mode,
                about | {"case": str(each), "dtype": each.dtype, "varies": each.varies or varies(rung),
                         "kernels": ", ".join(each.kernels)},
            )
            for each in operator_cases.chosen(name, label, large=True)
        ]  # fmt: skip
    if (taken := _taken(lesson, rung)) is None:
        return []
    case, dtype = taken
    about |= {"case": str(case), "dtype": str(dtype).removeprefix("torch."), "varies": varies(rung)}
    return [_Question(lesson, rung, partial(check.inputs, lesson, case.shape, dtype), nullcontext, about)]


def varies(rung: Rung) -> bool:
    """Whether its docstring says that the order of its additions varies from run to run."""
    return VARIES in (rung.__doc__ or "")


def _taken(lesson: Lesson, rung: Rung) -> tuple[Case, torch.dtype] | None:
    """The first of the cases that the rung takes; its kernels are compiled then."""
    for case, dtype in cases(lesson, rung):
        with suppress(Unsupported):
            rung(*check.inputs(lesson, case.shape, dtype))
            return case, dtype
    return None


def by_case(found: list[Repeated]) -> list[list[Repeated]]:
    """Of each case what was counted, alone or not; a case that was not repeated beside a process has not been asked."""
    of_rungs: dict[tuple[str, ...], list[Repeated]] = {}
    for each in found:
        of_rungs.setdefault((each.lesson, each.rung, each.case, each.dtype), []).append(each)
    return [counts for counts in of_rungs.values() if any(each.neighbour for each in counts)]


def wrong(counts: list[Repeated]) -> str:
    """What is wrong with a rung that was repeated beside another process, or alone; an empty string if nothing is.

    Answers that differ need a rung that says so, and have to lie within the checker's allowance.
    """
    for each in sorted(counts, key=lambda each: each.neighbour):
        name, where = f"{each.lesson}.{each.rung}", "beside another process" if each.neighbour else "alone"
        if each.outside:
            return f"{name}: wrong {where}: {each.outside}"
        if each.differ and not each.varies:
            return (
                f"{name}: {each.differ} of {each.calls} answers differ {where}; its docstring does not say {VARIES!r}"
            )
    return ""


def save(folder: Path, found: list[Repeated]) -> None:
    """Keep what was repeated, in place of what was known of the same rung."""
    about = rows.machine()
    new = [asdict(each) | about for each in found]
    again = {(each.lesson, each.rung) for each in found}
    with changing(folder / NAME):
        before = [dict.fromkeys(new[0], "") | row for row in read_csv(folder / NAME)]
        kept = [row for row in before if (row["lesson"], row["rung"]) not in again]
        write_atomically(folder / NAME, to_csv([*kept, *new]))


def main() -> None:
    a = torch.randn(4096, 4096, device=device.DEVICE).bfloat16()
    a @ a
    torch.cuda.synchronize()
    print(HERE, flush=True)
    while True:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
