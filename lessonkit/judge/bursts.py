"""Random cases in bursts: many cases on few compiled kernels, so that a GPU spends its time on cases.

Nearly each case that is drawn afresh needs a kernel that no case before it had: a row's length, the alignment of a
stride and an option decide what is compiled. So most cases here repeat some of the choices of an earlier case, and
draw the others anew. One that would need a new kernel is dropped before anything runs; it does not count. New kernels
come from cases drawn afresh, as long as compiling takes no more than COMPILING of an operator's time.

Cases are looked at in groups (fuzz_cases.doubt), for which the host waits once; what is doubted is judged by itself.

`python -m lessonkit.judge.bursts MODE` is the process that runs bursts. A line of JSON in, a Job, starts one. Lines
out: {"drawn": case, choices} before it is run, {"judged": ...} after each group, {"failed": ...}, {"end": true}.
"""

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from random import Random
from typing import Any
from unittest import mock

from lessonkit.base.device import DEVICE
from lessonkit.judge import check, fuzz_cases
from lessonkit.judge.fuzz_cases import Case, Outcome

import torch

COMPILING = 1 / 3  # of an operator's time may go into new kernels
GROUP = 64  # cases that the host waits for together
KEEPS = (0.5, 0.7, 0.85, 0.95)  # how much a case repeats of an earlier one, most often what needs no new kernel
WIDE = 2**16  # a choice among so many is a seed, which no kernel depends on: it is drawn anew
BASES = 32  # the latest cases drawn afresh, which others repeat
LARGE = 16  # one case in so many may have tensors of fuzz_cases.MOST elements; the others of a sixteenth
RESERVED = 4 * 2**30  # bytes of the GPU that a process keeps between groups; others run beside it
SPOILT = 8  # one case in so many is to be refused
TRIES = 200  # cases dropped in a row before a new kernel is compiled anyway


class NewKernel(Exception):
    """The call needs a kernel that is not compiled yet."""


class Kernels:
    """Inside, what Triton compiles is counted, and while `closed` a call that needs a new kernel raises NewKernel."""

    def __init__(self) -> None:
        self.closed = False
        self.seconds = 0.0  # spent on compiling
        self.new: list[str] = []  # a digest of each kernel since this list was emptied

    @contextmanager
    def counted(self) -> Iterator["Kernels"]:
        from triton.runtime.jit import JITFunction

        compile_ = JITFunction._do_compile

        def counting(jitted: Any, key: Any, *args: Any, **named: Any) -> Any:
            if self.closed:
                raise NewKernel(jitted.__name__)
            start = time.monotonic()
            made = compile_(jitted, key, *args, **named)
            self.seconds += time.monotonic() - start
            self.new.append(digest([jitted.__module__, jitted.__name__, str(key)]))
            return made

        with mock.patch.object(JITFunction, "_do_compile", counting):
            yield self


class Choices:
    """Draws for fuzz_cases.draw_case, written down. Each repeats that of `base` with a probability, as far as it may.

    Seeds do not. Without a source of random numbers all are repeated, and what comes after the last is the least.
    """

    def __init__(self, most: int, random: Random | None, base: Sequence[int] = (), keep: float = 1.0) -> None:
        self.most, self.random, self.base, self.keep = most, random, base, keep
        self.made: list[int] = []

    def integer(self, low: int, high: int) -> int:
        nth, chosen = len(self.made), low
        if nth < len(self.base) and self._repeats(high - low):
            chosen = min(high, max(low, self.base[nth]))
        elif self.random is not None:  # randint takes ten times as long
            among = high - low + 1
            chosen = low + int(among * self.random.random()) if among < WIDE else self.random.randint(low, high)
        self.made.append(chosen)
        return chosen

    def _repeats(self, among: int) -> bool:
        return self.random is None or (among < WIDE and self.random.random() < self.keep)

    def one_of(self, options: Sequence[Any]) -> Any:
        return options[self.integer(0, len(options) - 1)]


@dataclass(frozen=True)
class Drawing:
    """The choices that give a case again."""

    operator: str
    direction: str
    most: int
    choices: tuple[int, ...]

    @property
    def case(self) -> Case:
        return fuzz_cases.draw_case(self.operator, self.direction, Choices(self.most, None, self.choices))

    @property
    def settled(self) -> "Drawing":
        """The same case by choices that are each within its bounds."""
        draw = Choices(self.most, None, self.choices)
        fuzz_cases.draw_case(self.operator, self.direction, draw)
        return replace(self, choices=tuple(draw.made))


@dataclass(frozen=True)
class Job:
    """A burst: so many cases, or as many as the seconds allow."""

    operator: str
    direction: str
    seed: int
    cases: int
    seconds: float


@dataclass
class _Known:
    """What this process knows of an operator and direction, and the time that it took."""

    bases: list[Drawing] = field(default_factory=list)
    seconds: float = 0.0
    compiling: float = 0.0  # of these
    ran: Counter[float] = field(default_factory=Counter)  # by how much was repeated: cases without a new kernel
    tried: Counter[float] = field(default_factory=Counter)

    def keep(self, random: Random) -> float:
        """How much to repeat, by the share of cases that could be run so far."""
        return random.choices(KEEPS, [(self.ran[keep] + 1) / (self.tried[keep] + 2) for keep in KEEPS])[0]

    @property
    def may_compile(self) -> bool:
        return not self.bases or self.compiling < COMPILING * self.seconds


Look = Callable[[Case, str], Outcome | torch.Tensor]
Judge = Callable[[Case, str], Outcome]


class Bursts:
    """Runs bursts in this process. look, judge: fuzz_cases.doubt and fuzz_cases.run, or a test's."""

    def __init__(
        self, mode: str, kernels: Kernels, say: Callable[[dict[str, Any]], None], look: Look = fuzz_cases.doubt,
        judge: Judge = fuzz_cases.run,
    ) -> None:  # fmt: skip
        self.mode, self.kernels, self.say, self.look, self.judge = mode, kernels, say, look, judge
        self._known: dict[tuple[str, str], _Known] = {}
        self._seen: set[str] = set()  # no case is run twice
        self._at = 0.0, 0.0  # the clock, and the seconds of compiling, when they were last looked at

    def run(self, job: Job) -> None:
        known = self._known.setdefault((job.operator, job.direction), _Known())
        random = Random(f"{job.operator} {job.direction} {job.seed}")
        self._at = time.monotonic(), self.kernels.seconds
        done, until = 0, time.monotonic() + job.seconds
        while done < job.cases and time.monotonic() < until:
            group = self._group(job, known, random, min(GROUP, job.cases - done), until)
            done += len(group)
            self._judged(group)
        self.say({"end": True})

    def _pass_time(self, known: _Known) -> None:
        before, self._at = self._at, (time.monotonic(), self.kernels.seconds)
        known.seconds += self._at[0] - before[0]
        known.compiling += self._at[1] - before[1]

    def _group(
        self, job: Job, known: _Known, random: Random, n: int, until: float
    ) -> list[tuple[Drawing, Case, Outcome | torch.Tensor]]:  # fmt: skip
        """Up to n cases that are under way, each with what a first look says of it."""
        group: list[tuple[Drawing, Case, Outcome | torch.Tensor]] = []
        dropped = 0
        while len(group) < n and time.monotonic() < until:
            self._pass_time(known)
            afresh = known.may_compile or dropped >= TRIES
            keep = 0.0 if afresh else known.keep(random)
            drawing, case = self._drawn(job, known, random, keep, spoilt=len(group) % SPOILT == SPOILT - 1)
            if (name := digest(case)) in self._seen:
                dropped += 1
                continue
            self.say({"drawn": vars(drawing)})
            self.kernels.closed = not afresh
            known.tried[keep] += 1
            try:
                found = self.look(case, self.mode)
            except NewKernel:
                dropped += 1
                continue
            except torch.OutOfMemoryError:  # other processes have their share of the GPU
                torch.cuda.empty_cache()
                dropped += 1
                continue
            except Exception:  # judged by itself, it says what is wrong
                found = torch.ones((), dtype=torch.bool, device=DEVICE)
            finally:
                self.kernels.closed = False
            self._seen.add(name)
            known.ran[keep] += 1
            group.append((drawing, case, found))
            if afresh and not case["spoilt"]:
                known.bases = [*known.bases, drawing][-BASES:]
            dropped = 0
        return group

    def _drawn(
        self, job: Job, known: _Known, random: Random, keep: float, *, spoilt: bool
    ) -> tuple[Drawing, Case]:  # fmt: skip
        """A case drawn afresh or after an earlier one; to be refused or not."""
        while True:
            if keep:
                base = random.choice(known.bases)
                draw = Choices(base.most, random, base.choices, keep)
            else:
                draw = Choices(fuzz_cases.MOST[self.mode] // (1 if random.randrange(LARGE) == 0 else LARGE), random)
            case = fuzz_cases.draw_case(job.operator, job.direction, draw)
            if spoilt and not case["spoilt"]:  # the last choice said so: another one, and what follows from it
                draw = Choices(draw.most, random, (*draw.made[:-1], fuzz_cases.SPOILS))
                case = fuzz_cases.draw_case(job.operator, job.direction, draw)
            if bool(case["spoilt"]) == spoilt:
                return Drawing(job.operator, job.direction, draw.most, tuple(draw.made)), case

    def _judged(self, group: Sequence[tuple[Drawing, Case, Outcome | torch.Tensor]]) -> None:
        """Wait for a group, and say what became of it."""
        looks = [found for _, _, found in group if isinstance(found, torch.Tensor)]
        doubted = iter(torch.stack(looks).tolist() if looks else ())
        kinds, again = Counter[str](), 0
        for drawing, case, found in group:
            outcome = found if isinstance(found, Outcome) else Outcome("right")
            if isinstance(found, torch.Tensor) and next(doubted):
                again += 1
                outcome = self.judge(case, self.mode)
            kinds[outcome.kind] += 1
            if not outcome.well:
                self.say({"failed": vars(drawing), "kind": outcome.kind, "said": outcome.said})
        shapes = {digest([spec and spec["shape"] for spec in case["tensors"].values()]) for _, case, _ in group}
        if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > RESERVED:
            torch.cuda.empty_cache()
        self.say({"judged": kinds, "again": again, "kernels": self.kernels.new, "shapes": sorted(shapes)})
        self.kernels.new = []


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def main(mode: str) -> None:
    """Say READY, then run a burst for each line of standard input."""
    fuzz_cases.say_where()
    for name in ("course_ops.testing", "problems.fuzz", "problems.operators"):
        import_module(name)
    with check.poisoned_empty():  # the first time PyTorch imports its compiler's settings, which takes seconds
        pass
    with Kernels().counted() as kernels:
        bursts = Bursts(mode, kernels, lambda line: print(json.dumps(line), flush=True))
        print(fuzz_cases.READY, flush=True)
        for line in sys.stdin:
            bursts.run(Job(**json.loads(line)))


if __name__ == "__main__":
    main(sys.argv[1])
