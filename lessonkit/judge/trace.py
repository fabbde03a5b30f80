"""Which program reads and writes what, step by step: a rung under the interpreter, on small inputs."""

import ast
import inspect
import linecache
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lessonkit.base.errors import Unsupported
from lessonkit.base.words import said
from lessonkit.lesson import Lesson, Rung, Shape
from lessonkit.modes.interpreter import Access, watched

import numpy as np
import torch

SECTOR = 32  # bytes; what a GPU's memory moves at the least
WARP = 32
MOST = 5000  # steps that a page and a reader can take


@dataclass(frozen=True)
class Touched:
    """One tensor of a launch, as an argument's name, a shape and an element's bytes."""

    argument: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Step:
    """One access of one program.

    elements  the live elements' numbers, counted along the tensor's own dimensions, in the order of the lanes
    where     the same as index ranges: `0:128`, `3, 0:512`
    masked    elements of the block that the mask leaves out; lanes: all elements of the block
    sectors   the most sectors of 32 bytes that 32 neighbouring elements of the block, one warp's, lie in
    fetched   sectors of all warps together, in bytes; bytes: what was asked for
    """

    kind: str
    kernel: str
    launch: int
    program: tuple[int, ...]
    file: str
    line: int
    tensor: Touched
    elements: tuple[int, ...]
    where: str
    lanes: int
    masked: int
    sectors: int
    fetched: int
    bytes: int

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()


def rung(lesson: Lesson, name: str) -> Rung:
    """The rung of this name. Raises ValueError, which lists what there is."""
    found = {each.__name__: each for each in lesson.rungs}
    if not name:
        raise ValueError(said("name one of its rungs: {names}").format(names=", ".join(found)))
    if name not in found:
        words = said("there is no rung {name}; there are {names}")
        raise ValueError(words.format(name=repr(name), names=", ".join(found)))
    return found[name]


def shape(lesson: Lesson, words: Iterable[str]) -> dict[str, Any]:
    """`n=300` in the words of the lesson's inputs; the rest is as in the smallest of its checks. Raises ValueError."""
    usual = {name: p.default for name, p in inspect.signature(lesson.inputs).parameters.items() if name != "dtype"}
    takes, given = [*usual], {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            words_ = said("{word}: write NAME=VALUE, with a name of {names}")
            raise ValueError(words_.format(word=repr(word), names=", ".join(takes)))
        if name not in takes:
            words_ = said("the inputs of this lesson take no {name}; they take {names}")
            raise ValueError(words_.format(name=repr(name), names=", ".join(takes)))
        try:
            given[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            given[name] = text  # a word, as `layout=rows`

    def order(at: Shape) -> tuple[bool, int]:
        """Shapes with a size of 1 show little; among the others the one that moves least comes first."""
        return 1 in at.values(), lesson.work(dtype=lesson.bench_dtype, **at).bytes

    fit = (each.shape for each in lesson.checks if 0 not in each.shape.values() and not each.gib)
    smallest: Shape = min(fit, key=order, default={})
    for name, value in given.items():
        if type((usual | dict(smallest))[name]) is int and type(value) is not int:
            words_ = said("{given} is no size: write a whole number")
            raise ValueError(words_.format(given=f"{name}={value!r}"))
    return dict(smallest) | given


def trace(lesson: Lesson, run: Rung, at: dict[str, Any]) -> list[Step]:
    """Every access of a rung on these inputs, in the order of the programs.

    Raises ValueError where the inputs do not fit the lesson, are too large, or the rung has no Triton kernel.
    """
    if lesson.extension:
        raise ValueError(
            said("its kernels are CUDA C++, and only Triton's can be traced: `count` shows their accesses")
        )
    torch.manual_seed(0)
    try:
        args = lesson.inputs(dtype=lesson.bench_dtype, **at)
    except (TypeError, ValueError, RuntimeError) as why:
        words = said("the inputs cannot be made from {sizes}: {why}")
        raise ValueError(words.format(sizes=at, why=why)) from None
    steps: list[Step] = []

    def observe(access: Access) -> None:
        if len(steps) == MOST:
            words = said("{rung} makes more than {most} accesses at {sizes}: choose a smaller shape")
            raise TooLong(words.format(rung=run.__name__, most=MOST, sizes=at))
        steps.append(_step(access))

    try:
        with watched(observe):
            run(*args)
    except (TooLong, Unsupported) as why:
        raise ValueError(str(why)) from None
    except Exception as why:  # Triton's interpreter wraps what is raised inside a kernel
        cause: BaseException | None = why
        while cause and not isinstance(cause, TooLong):
            cause = cause.__cause__
        if cause is None:
            raise
        raise ValueError(str(cause)) from None
    if not steps:
        words = said("{rung} runs no Triton kernel on {sizes} here: there is nothing to trace")
        raise ValueError(words.format(rung=run.__name__, sizes=at))
    return steps


class TooLong(Exception):
    """A trace has more steps than can be shown."""


def _step(access: Access) -> Step:
    tensor, size = access.tensor, access.tensor.element_size()
    addresses, live = access.addresses.ravel(), access.live.ravel()
    # From the beginning of the memory that holds the tensor: a GPU's allocator aligns that, this machine's may not.
    start = tensor.untyped_storage().data_ptr()
    per_warp = [
        len(np.unique((addresses[i : i + WARP] - start)[live[i : i + WARP]] // SECTOR))
        for i in range(0, len(addresses), WARP)
    ]
    at = coordinates((addresses[live] - tensor.data_ptr()) // size, tuple(tensor.shape), tensor.stride())
    elements = np.ravel_multi_index(at, tuple(tensor.shape)) if at and at[0].size else np.zeros(int(live.sum()), int)
    program: tuple[int, ...] = access.program
    while len(program) > 1 and program[-1] == 0:
        program = program[:-1]
    return Step(
        access.kind,
        access.kernel,
        access.launch,
        program,
        *access.line,
        Touched(access.argument, tuple(tensor.shape), size),
        tuple(map(int, elements)),
        "; ".join(filter(None, [", ".join(ranges(at)), _gaps(at)])) if live.any() else "nothing",
        live.size,
        int(live.size - live.sum()),
        max(per_warp),
        sum(per_warp) * SECTOR,
        int(live.sum()) * size,
    )


def coordinates(offsets: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Each dimension's index of elements that lie so many elements behind a tensor's first."""
    found = [np.zeros_like(offsets) for _ in shape]
    rest = offsets
    for d in sorted(range(len(shape)), key=lambda d: -strides[d]):
        if strides[d] > 0 and shape[d] > 1:
            found[d] = np.minimum(rest // strides[d], shape[d] - 1)
            rest = rest - found[d] * strides[d]
    return tuple(found)


def ranges(at: tuple[np.ndarray, ...]) -> list[str]:
    """Each dimension's indices as a slice; one index stands alone."""
    shown = []
    for indices in at:
        there = np.unique(indices)
        first, last, steps = int(there[0]), int(there[-1]), np.unique(np.diff(there))
        if first == last:
            shown.append(str(first))
        else:
            step = f":{steps[0]}" if len(steps) == 1 and steps[0] > 1 else ""
            shown.append(f"{first}:{last + 1}{step}")
    return shown


def _gaps(at: tuple[np.ndarray, ...]) -> str:
    """What index ranges alone do not say: that some of their elements are left out."""
    if not at:
        return ""
    inside = int(np.prod([len(np.unique(indices)) for indices in at]))
    scattered = any(len(np.unique(np.diff(np.unique(indices)))) > 1 for indices in at)
    there = len(np.unique(np.stack(at), axis=1)[0])
    return f"{there} of them" if there < inside or scattered else ""


def lines(steps: Iterable[Step]) -> dict[tuple[str, int], str]:
    """The lines of code that the steps stand on, in the order of the files."""
    return dict(sorted({(Path(s.file).name, s.line): s.source for s in steps}.items()))


@dataclass
class Total:
    """What all programs did to one argument: bytes asked for, and bytes in whole sectors, warp by warp."""

    reads: int = 0
    writes: int = 0
    asked: int = 0
    fetched: int = 0
    masked: int = 0


def totals(steps: Iterable[Step]) -> dict[tuple[str, str], Total]:
    """By kernel and argument."""
    found: dict[tuple[str, str], Total] = {}
    for step in steps:
        total = found.setdefault((step.kernel, step.tensor.argument), Total())
        total.reads += step.kind == "load"
        total.writes += step.kind != "load"
        total.asked += step.bytes
        total.fetched += step.fetched
        total.masked += step.masked
    return found
