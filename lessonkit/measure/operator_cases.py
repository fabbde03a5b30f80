"""Cases of course_ops for sanitizers and neighbours: together they launch each kernel of an operator's dispatch.

No case is listed here. Candidates are the checks of the operator's problems, the shapes that it is timed at, and the
lengths of rows that course_ops.testing names. A process of the `compiled` mode calls the operator with each. Tensors
have no data there, and a launch is noted, not compiled: an operator takes seconds.

Of the candidates those stay that launch a kernel which none before them has launched. One that is too large is halved,
size by size, as long as it still launches that kernel.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from lessonkit.base import device
from lessonkit.base.files import ROOT
from lessonkit.judge import check
from lessonkit.lesson import Lesson, Operator, Shape, shape_name
from lessonkit.measure import fingerprint, operator_rows
from lessonkit.modes import compiled
from lessonkit.modes.compile_server import call_in_compiler

import torch

SMALL, LARGE = 2**28, 2**38  # of a call, in FLOPs: for tools that are a thousand times slower; for a neighbour
BYTE = 200  # FLOPs that Hopper does while it moves one byte
ASKS = "are_deterministic_algorithms_enabled"  # what of torch an operator asks that has an order of its own then
PACKAGE = f"{compiled.COURSE_OPS}."


@dataclass(frozen=True)
class Chosen:
    """A case, and the kernels that no case before it launches.

    deterministic  whether it is called under torch.use_deterministic_algorithms
    varies         whether the operator asks for that and is not: its answers agree to rounding
    """

    shape: Shape
    dtype: str
    kernels: tuple[str, ...]
    deterministic: bool
    varies: bool

    def __str__(self) -> str:
        return shape_name(self.shape) + " deterministic" * self.deterministic

    def inputs(self, lesson: Lesson) -> tuple[Any, ...]:
        return check.inputs(lesson, self.shape, getattr(torch, self.dtype))

    @contextmanager
    def mode(self) -> Iterator[None]:
        """What PyTorch is set to inside."""
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(self.deterministic or before, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


def lessons(which: str = "") -> list[tuple[str, Lesson]]:
    """Each operator and direction as a lesson of one rung, which has the direction's name.

    which: course_ops.softmax; course_ops, or nothing: all.
    """
    return [
        (f"{PACKAGE}{op.name}", _as_lesson(op))
        for op in {(op.name, op.direction): op for op in operator_rows.operators() if op.data == "random"}.values()
        if which in ("", compiled.COURSE_OPS, f"{PACKAGE}{op.name}")
    ]


def _as_lesson(op: Operator) -> Lesson:
    @wraps(op.call)
    def answer(*args: Any) -> Any:
        return op.call(*args)

    answer.__name__ = op.direction
    answer.__doc__ = getattr(import_module(compiled.COURSE_OPS), op.name).__doc__
    return Lesson(problem=op.problem, rungs=(answer,), wrong=())


def is_operator(name: str) -> bool:
    return name.startswith(PACKAGE)


@cache
def source(name: str, rung: str) -> str:
    """Hashes of what is run, and of its inputs: of a rung, of all rungs of a lesson (rung: ""), of an operator."""
    if is_operator(name):
        of_it = [i for i, op in enumerate(operator_rows.operators()) if _is(op, name, rung)]
        return "+".join(".".join(operator_rows.source(i).split(".")[:2]) for i in of_it)
    rungs = [rung] if rung else [each.__name__ for each in import_module(name).LESSON.rungs]
    return f"{fingerprint.together(ROOT, name, rungs)}.{fingerprint.given(ROOT, name).partition('.')[0]}"


@cache
def files(name: str, direction: str) -> list[Path]:
    """The files of course_ops that an operator's calls reach."""
    op = next(op for op in operator_rows.operators() if _is(op, name, direction))
    modules = {
        reached.rpartition(".")[0] for reached in fingerprint.reaches(ROOT, op.call.__module__, op.call.__name__)
    }
    paths = sorted(ROOT / f"{module.replace('.', '/')}.py" for module in modules if module.startswith(PACKAGE))
    return [path for path in paths if path.exists()]


def _is(op: Operator, name: str, direction: str) -> bool:
    return (f"{PACKAGE}{op.name}", op.direction, op.data) == (name, direction, "random")


@cache
def chosen(name: str, direction: str, *, large: bool) -> tuple[Chosen, ...]:
    """The cases of an operator, each in one of its dtypes; on this machine's GPU, or Hopper.

    Not large: every check of the problem too, as of a lesson.
    """
    here = device.capability() or 90
    target = max((t for t in compiled.TARGETS if isinstance(t, int) and t <= here), default=90)
    found = call_in_compiler(__name__, "_chosen_here", name.removeprefix(PACKAGE), direction, large, target)
    return tuple(Chosen(**each | {"kernels": tuple(each["kernels"])}) for each in found)


# ---- In a process of the `compiled` mode ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Candidate:
    op: Operator
    shape: Shape
    dtype: torch.dtype
    cost: float
    check: bool

    @property
    def order(self) -> tuple[float, bool, str]:
        return self.cost, self.dtype != self.op.problem.bench_dtype, str(self.shape)


def _chosen_here(name: str, direction: str, large: bool, target: int) -> list[dict[str, Any]]:
    found: list[Chosen] = []
    reached: set[str] = set()
    limit = LARGE if large else SMALL
    asked = mock.patch.object(torch, ASKS, wraps=torch.are_deterministic_algorithms_enabled)
    launchers = import_module("course_ops.testing").launchers()
    with compiled.compiling(target), _noted() as launched, launchers, asked as asks:

        def kernels(candidate: _Candidate) -> tuple[str, ...]:
            launched.clear()
            asks.reset_mock()
            try:
                candidate.op.call(*candidate.op.problem.inputs(dtype=candidate.dtype, **candidate.shape))
            except Exception:  # refused, or the host asks for data
                return ()
            return tuple(dict.fromkeys(launched))

        def reaches(kernel: str, candidate: _Candidate) -> bool:
            return kernel in kernels(candidate)

        def keep(each: _Candidate, new: Sequence[str], deterministic: bool) -> None:
            reached.update(new)
            varies = asks.called and not deterministic
            dtype = str(each.dtype).removeprefix("torch.")
            found.append(Chosen(each.shape, dtype, tuple(new), deterministic, varies))

        candidates = _candidates(name, direction)
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            for each in _in_order(candidates, limit, large=large or deterministic):
                every = kernels(each)
                new = [kernel for kernel in every if kernel not in reached]
                if every and not new and each.check and not large and not deterministic:
                    keep(each, (), deterministic)
                for kernel in new:
                    if kernel not in reached:  # by a smaller case, for the kernel before it
                        smaller = _halved(each, limit, partial(reaches, kernel))
                        keep(smaller, [k for k in kernels(smaller) if k not in reached], deterministic)
        torch.use_deterministic_algorithms(False)
    return [asdict(each) for each in found]


@contextmanager
def _noted() -> Iterator[list[str]]:
    """Inside, a launch only writes down which kernel it is of."""
    from triton.runtime.jit import JITFunction

    launched: list[str] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        launched.append(f"{self.fn.__module__.rpartition('.')[2]}.{self.__name__}")

    with mock.patch.object(JITFunction, "run", run):
        yield launched


def _candidates(name: str, direction: str) -> list[_Candidate]:
    every = [op for op in operator_rows.operators() if op.name == name and op.data == "random"]
    lengths = import_module("course_ops.testing").LENGTHS.get(name, ())
    found: list[_Candidate] = []
    for op in (op for op in every if op.direction == direction):
        own = op.problem.checks
        checks = own or [case for other in every for case in other.problem.checks]  # gradients are asked at benches
        shapes = [(case.shape, dtype) for case in checks if not case.gib for dtype in op.problem.dtypes]
        least = len(shapes)
        bench = op.dtype or op.problem.bench_dtype
        shapes += [(shape, bench) for shape in op.shapes]
        shapes += [(dict(zip(own[0].shape, (1, N), strict=True)), bench) for N in lengths if own]
        for i, (shape, dtype) in enumerate(shapes):
            try:
                inspect.signature(op.problem.inputs).bind(dtype=dtype, **shape)
                work = op.problem.work(dtype=dtype, **shape)
            except TypeError:  # another direction's word
                continue
            cost = work.flops + BYTE * work.bytes
            found.append(_Candidate(op, shape, dtype, cost, check=i < least and dtype == bench))
    return found


def _in_order(candidates: Sequence[_Candidate], limit: float, *, large: bool) -> list[_Candidate]:
    """The checks first and then the smallest; for a neighbour the largest within the limit, then what is beyond it."""
    by_cost = sorted(candidates, key=lambda each: each.order)
    if not large:
        return sorted(by_cost, key=lambda each: not each.check)
    within = [each for each in by_cost if each.cost <= limit]
    return [*reversed(within), *by_cost[len(within) :]]


def _halved(candidate: _Candidate, limit: float, still: Callable[[_Candidate], bool]) -> _Candidate:
    """The candidate with smaller sizes, the largest halved first, down to the limit or as far as it will go."""
    while candidate.cost > limit:
        sizes = {k: n for k, n in candidate.shape.items() if isinstance(n, int) and not isinstance(n, bool) and n > 1}
        for word in sorted(sizes, key=lambda word: -sizes[word]):
            shape = candidate.shape | {word: sizes[word] // 2}
            work = candidate.op.problem.work(dtype=candidate.dtype, **shape)
            smaller = _Candidate(candidate.op, shape, candidate.dtype, work.flops + BYTE * work.bytes, candidate.check)
            if smaller.cost < candidate.cost and still(smaller):
                candidate = smaller
                break
        else:
            break
    return candidate
