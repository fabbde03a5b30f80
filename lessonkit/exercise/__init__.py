"""Exercises: one file holds the task, the right answer, the stub, the grader, the hints and the wrong answers.

    dayN_*/exercises/exerciseNN_name.py     (in CUDA C++ the learner's part is the .cu beside it)

    \"\"\"The task.\"\"\"                        the learner's part, down to the line CUT
    # TODO(1): what is to be written here
    # stub: return None                   what the stub has there; without this line `pass`, in C++ nothing
    return x + y                          the right answer
    # END(1)
    # The learner's file ends here.       CUT
    EXERCISE = Exercise(...)              the grader's part: a reference, cases, claims, hints, wrong answers

A stub is the learner's part with each region emptied, a wrong answer the same with one text replaced, a learner's
answer whatever they wrote; each is graded under the same grader's part (see lessonkit.exercise.source).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lessonkit.lesson import Case, Grad, Launchers, Lesson, Rung, Work
from lessonkit.validate import FLOATS

import torch


@dataclass(frozen=True)
class Wrong:
    """A tempting wrong answer: the right one with `old`, which stands there once, replaced by `new`.

    why        the mistake in words that help whoever made it
    caught_by  the property that must refuse it: a claim's name, or value, unwritten, nan, shape, dtype, changed input,
               out of bounds, traffic, gradient; in CUDA C++ also race, barrier, uninitialised, misaligned, or one of
               the exercise's `counts`; error: the answer stops with a Python error
    planted    the stub has this mistake: the exercise is to find it
    """

    why: str
    old: str
    new: str
    caught_by: str = "value"
    planted: bool = False


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """What the grader asks. Claims come first, in order; then, if there is an `op`, its cases, traffic and gradient.

    hints      three: the idea, then the indices or the formula, then nearly the code
    predicted  the answer to what the task lets the learner predict, with its reason; shown once the exercise is right
    wrong      at least three
    claims     functions that assert; the docstring's first line says what holds
    by_task    claim n judges TODO(n), and its first line would give the answer away: a refusal shows the task instead
    op, reference, inputs, cases, dtypes, factor, grad, extension    as a Lesson has them
    reads      bytes the kernels may read on the last case, as a multiple of the bytes of the tensors put in
    writes     bytes they may write, as a multiple of the bytes of the tensors that come out
    counts     metric -> the most that it may be on the last case, counted by the emulator (see judge.counters)
    """

    hints: tuple[str, str, str]
    predicted: str = ""
    wrong: tuple[Wrong, ...]
    claims: tuple[Callable[[], None], ...] = ()
    by_task: bool = False
    op: Rung | None = None
    reference: Rung | None = None
    inputs: Callable[..., tuple[Any, ...]] | None = None
    cases: tuple[Case, ...] = ()
    dtypes: tuple[torch.dtype, ...] = FLOATS
    factor: float = 1
    grad: Grad | None = None
    extension: Launchers | None = None
    reads: float = 1
    writes: float = 1
    counts: Mapping[str, float] = field(default_factory=dict)

    def lesson(self) -> Lesson:
        """The op as the lessons' own checker takes it."""
        assert self.op is not None
        assert self.reference is not None
        assert self.inputs is not None
        return Lesson(
            reference=self.reference,
            inputs=self.inputs,
            checks=self.cases,
            benches=(),
            rungs=(self.op,),
            work=lambda **shape: Work(0),
            wrong=(),
            grad=self.grad,
            dtypes=self.dtypes,
            factor=self.factor,
            extension=self.extension,
        )


def same(what: str, got: Any, expected: Any) -> None:
    """Assert equality, and say where it ends: a list or tensor's first wrong index, a shape, a value."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{what}: expected a tensor, got {got!r}"
        assert got.shape == expected.shape, f"{what}: expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
        got, expected = got.detach(), expected.detach()
        close = torch.isclose(got.double(), expected.double(), rtol=1e-5, atol=1e-6, equal_nan=True)
        if not close.all():
            first = tuple(int(i) for i in (~close).nonzero()[0])
            wrong = int((~close).sum())
            raise AssertionError(
                f"{what}: {wrong} of {close.numel()} wrong, the first at {first}: "
                f"expected {expected[first].item():.9g}, got {got[first].item():.9g}"
            )
        return
    if isinstance(expected, list) and isinstance(got, list | tuple):
        assert len(got) == len(expected), f"{what}: expected {len(expected)} of them, got {len(got)}"
        for i, (g, e) in enumerate(zip(got, expected, strict=True)):
            assert g == e, f"{what}: the first wrong one is at {i}: expected {e!r}, got {g!r}"
        return
    assert got == expected, f"{what}: expected {expected!r}, got {got!r}"


def number(what: str, got: Any, exact: float, within: float = 0.01) -> None:
    """Assert a predicted number to a relative tolerance; what is said of a wrong one does not give it away."""
    assert isinstance(got, int | float), f"{what}: write a number, got {got!r}"
    assert math.isfinite(got), f"{what}: {got} is no prediction"
    if exact and got * exact > 0:
        ratio = got / exact
        if abs(ratio - 1) <= within:
            return
        size = "a little" if 0.5 < ratio < 2 else "2 to 10 times" if 0.1 < ratio < 10 else "more than 10 times"
        raise AssertionError(f"{what}: {got:g} is {size} too {'large' if ratio > 1 else 'small'}")
    assert got == exact, f"{what}: {got:g} is wrong{', even its sign' if got * exact < 0 else ''}"
