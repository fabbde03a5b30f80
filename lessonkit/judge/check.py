"""Is a rung right? An error budget instead of a fixed tolerance, and nothing that a value check would miss.

The exact answer is the reference computed in float64 from the same rounded inputs. A rung may be off by FACTOR
times what PyTorch itself is off by in this dtype and row. FACTOR is 2 for 16-bit dtypes and 16 for fp32. Measured on
matmuls with K up to 4096, as multiples of PyTorch's error:

    right 16-bit kernels with fp32 accumulation    1.0        16-bit accumulators     3.4 to 12
    a sequential loop in fp32                      6.4        a forgotten product     12 to 620

A result of one dimension (mean, rstd, a sum of each row) has no rows: PyTorch's error counts among elements of like
magnitude. Where PyTorch is right by luck, or because terms cancel, the budget is what fp32 rounding errors do to the
exact answer (judge.rounding).
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lessonkit.base.device import DEVICE, HAS_GPU, INTERPRETED, capability
from lessonkit.base.errors import BlockAsCondition, Fault, Misdeclared, OutOfBounds, Rejected, Unsupported
from lessonkit.base.traffic import Traffic
from lessonkit.judge import rounding
from lessonkit.lesson import Case, Lesson, Rung, Shape, budget_of, is_stepwise, shape_name, suits
from lessonkit.modes.interpreter import watched

import torch

LOOK = 2  # samples of a first look; one moves by luck a thousandth of what is usual, where all elements move together
MANY = 8  # their largest movement, so many times, is more than any element's root mean square
PART = 2**27  # elements compared at a time
SAME = 1e-12  # relative and absolute: two float64 results of one formula, computed in vectors of other lengths
finish: Callable[[], None] = torch.cuda.synchronize  # what waits for a rung's kernels; judge.apart sets a limit
ALONE = 0  # samples: how far the rounding of a gradient's operands to 16 bits puts it by itself
BETWEEN = 1.01  # what several known errors change, and a hundredth for one between two of them
FACTOR = {torch.float16: 2.0, torch.bfloat16: 2.0, torch.float32: 16.0, torch.float64: 16.0}


@dataclass(frozen=True)
class Truth:
    """One question and everything needed to judge an answer to it."""

    args: tuple[Any, ...]
    exact: tuple[torch.Tensor, ...]  # the reference in float64
    usual: tuple[torch.Tensor, ...]  # the reference in the inputs' own dtype: what PyTorch answers
    factor: float
    asked: Callable[..., Sequence[torch.Tensor]] | None = None  # the reference; without it there is no absolute floor
    beside: tuple[Callable[..., Sequence[torch.Tensor]], ...] = ()  # it too, with a rounding error as large as it gets
    operands: torch.dtype | None = None  # of 16 bits: to it a gradient's operands of matmuls are rounded
    rounded: tuple[torch.dtype | None, ...] = ()  # by result: the dtype of 16 bits that it was rounded to on its way
    operands_off: Callable[..., Sequence[torch.Tensor]] | None = None  # the reference inside products.OperandsOff
    continued: int = 1  # see rounding.moved

    _moves: dict[int, tuple[torch.Tensor, ...] | None] = field(default_factory=dict, init=False, repr=False)

    def moved(self, samples: int = rounding.SAMPLES) -> tuple[torch.Tensor, ...] | None:
        """How far fp32 rounding errors move `exact`; made for an answer that would be refused without it.

        None if nothing tells it, or if the memory does not hold what it takes.
        """
        if self.asked is None:
            return None
        if samples not in self._moves:
            try:
                self._moves[samples] = self._moved(self.args, self.exact, samples)
            except torch.OutOfMemoryError:
                self._moves[samples] = None
        return self._moves[samples]

    def moved_rows(self, i: int, rows: slice, samples: int) -> torch.Tensor | None:
        """As `moved`, of some rows of result i, if they follow from the same rows of the arguments. This is tried out.

        For a result so large that the memory does not hold what `moved` takes for all of it.
        """
        if self.asked is None:
            return None
        count = len(self.exact[i])
        args = [a[rows] if isinstance(a, torch.Tensor) and a.ndim and len(a) == count else a for a in self.args]
        try:
            with torch.no_grad():
                exact = self.asked(*map(in_float64, args))
            here = self.exact[i][rows]
            alike = exact[i].shape == here.shape and exact[i].allclose(here, rtol=SAME, atol=SAME, equal_nan=True)
            return self._moved(args, exact, samples)[i] if alike else None
        except (RuntimeError, ValueError):  # these rows do not go together with the rest, or there is no memory
            return None

    def _moved(self, args: Sequence[Any], exact: Sequence[torch.Tensor], samples: int) -> tuple[torch.Tensor, ...]:
        assert self.asked
        with torch.no_grad():
            given = [*map(in_float64, args)]
            found = rounding.moved(self.asked, given, exact, samples, self.operands, 1 / self.factor, self.continued)
            for other in self.beside:  # as far as this, and not FACTOR times as far
                share = BETWEEN / FACTOR[torch.float32]
                apart = _apart(other, args, exact)
                found = tuple(m.maximum(a * share) for m, a in zip(found, apart, strict=True))
            for move, e, dtype in zip(found, exact, self.rounded, strict=False):
                if dtype is not None:  # by half of the last place, and not by a multiple of that
                    half = torch.finfo(dtype).eps / 2
                    move += e.abs().nan_to_num(0.0, 0.0) * (half / FACTOR[torch.float32] / self.factor)
        return found

    def off(self) -> tuple[torch.Tensor, ...] | None:
        """How far the operands' rounding to 16 bits alone puts `exact`. No multiple of it, and no luck of samples."""
        if self.operands_off is None:
            return None
        if ALONE not in self._moves:
            try:
                with torch.no_grad():
                    self._moves[ALONE] = _apart(self.operands_off, self.args, self.exact)
            except torch.OutOfMemoryError:
                self._moves[ALONE] = None
        return self._moves[ALONE]


def _apart(
    other: Callable[..., Sequence[torch.Tensor]], args: Sequence[Any], exact: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    pairs = zip(other(*map(in_float64, args)), exact, strict=True)
    return tuple((o.double() - e.double()).abs().nan_to_num(0.0, 0.0) for o, e in pairs)


def tensors(value: Any) -> tuple[torch.Tensor, ...]:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def in_float64(value: Any) -> Any:
    """An argument of a reference for the exact answer; what is no floating-point tensor stays as it is."""
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def truth(lesson: Lesson, shape: Shape, dtype: torch.dtype, *, seed: int = 0) -> Truth:
    """Make the inputs of a case and the exact answer to them. Raises Misdeclared as `_inputs` does."""
    return judge(lesson, inputs(lesson, shape, dtype, seed=seed))


def inputs(lesson: Lesson, shape: Shape, dtype: torch.dtype, *, seed: int = 0) -> tuple[Any, ...]:
    """The inputs of a case alone. Raises Misdeclared as `_inputs` does."""
    torch.manual_seed(seed)
    return _inputs(lesson, lesson.inputs, shape, dtype)


def _inputs(lesson: Lesson, make: Rung, shape: Shape, dtype: torch.dtype) -> tuple[Any, ...]:
    """make(dtype=dtype, **shape), with NaN where `make` leaves memory as it is, between the rows of a padded input.

    Raises Misdeclared if the case has an argument that `make` does not take.
    """
    signature = inspect.signature(make)
    try:
        signature.bind(dtype=dtype, **shape)
    except TypeError as why:
        module = getattr(lesson.rungs[-1] if lesson.rungs else make, "__module__", "")
        takes = ", ".join(name for name in signature.parameters if name != "dtype")
        raise Misdeclared(
            f"{module}: the case {shape_name(shape)!r}: {why}; the lesson's inputs take {takes}"
        ) from None
    with poisoned_empty():
        made: tuple[Any, ...] = make(dtype=dtype, **shape)
    return made


def judge(lesson: Lesson, args: tuple[Any, ...]) -> Truth:
    """The exact answer to inputs already made."""
    with torch.no_grad():
        exact = tensors(lesson.reference(*map(in_float64, args)))
        usual = tensors(lesson.reference(*args))
    return Truth(args, exact, usual, lesson.factor, lambda *asked: tensors(lesson.reference(*asked)))


def compare(truth: Truth, answer: Any, *, slack: float = 1, stepwise: bool = False) -> None:
    """Raise Rejected unless the answer has the right shapes and dtypes and lies within `slack` times the error budget.

    stepwise: each step of the answer was rounded to its dtype.
    """
    got = tensors(answer)
    if len(got) != len(truth.exact):
        raise Rejected("shape", f"{len(got)} results, expected {len(truth.exact)}")
    for i, (g, exact, usual) in enumerate(zip(got, truth.exact, truth.usual, strict=True)):
        which = f"result {i}: " if len(got) > 1 else ""
        if g.shape != exact.shape:
            raise Rejected("shape", f"{which}{tuple(g.shape)}, expected {tuple(exact.shape)}")
        if g.dtype != usual.dtype:
            raise Rejected("dtype", f"{which}{g.dtype}, expected {usual.dtype}")
        _compare_values(which, g, exact, usual, slack * truth.factor, Floor(truth, i), stepwise=stepwise)


def suspected(truth: Truth, answer: Any) -> torch.Tensor:
    """Whether `compare` may refuse the answer: one bool on the answer's device, which nothing here waits for.

    It knows no absolute floor: some right answers are suspected, and no wrong one is not.
    """
    got = tensors(answer)
    device = truth.exact[0].device if truth.exact else None
    alike = [(e.shape, u.dtype) for e, u in zip(truth.exact, truth.usual, strict=True)]
    if [(g.shape, g.dtype) for g in got] != alike:
        return torch.ones((), dtype=torch.bool, device=device)
    found = [torch.zeros((), dtype=torch.bool, device=device)]
    for g, exact, usual in zip(got, truth.exact, truth.usual, strict=True):
        if not g.numel():
            continue
        if g.is_floating_point():
            look = _first_look(g, exact, usual, truth.factor)
            found.append((look.wrong | look.strange).any())
        else:
            found.append((g != usual).any())
    return torch.stack(found).any()


@dataclass(frozen=True)
class _Look:
    """Floating-point results beside the truth, element by element, by the budget without a floor."""

    finite: torch.Tensor  # in PyTorch's answer and the exact one: only finite values have an error
    strange: torch.Tensor  # an infinity is either there or not; a NaN too
    error: torch.Tensor
    limit: torch.Tensor

    @property
    def wrong(self) -> torch.Tensor:
        return self.error > self.limit


def _first_look(got: torch.Tensor, exact: torch.Tensor, usual: torch.Tensor, factor: float) -> _Look:
    finite = usual.isfinite() & exact.isfinite()
    strange = (got.isnan() != usual.isnan()) | (got.isinf() != usual.isinf()) | (got.isinf() & (got != usual))
    error = torch.where(finite, (got.double() - exact).abs(), 0.0)
    limit = factor * torch.where(finite, _budget(got.dtype, exact, usual, finite), 0.0)
    return _Look(finite, strange, error, limit)


@dataclass(frozen=True)
class Floor:
    """How far each element of result i, or of a part of it, moves; called with how many samples. None: not known."""

    truth: Truth
    i: int
    at: tuple[int | slice, ...] = ()  # the part: at[0] of the result, at[1] of that, ...

    def __call__(self, samples: int) -> torch.Tensor | None:
        found = self.truth.off() if samples == ALONE else self.truth.moved(samples)
        if found is not None:
            part = found[self.i]
            for each in self.at:
                part = part[each]
            return part
        (rows,) = self.at if len(self.at) == 1 else (None,)
        return self.truth.moved_rows(self.i, rows, samples) if samples != ALONE and isinstance(rows, slice) else None

    def of(self, part: int | slice) -> "Floor":
        return replace(self, at=(*self.at, part))


def _compare_values(
    which: str,
    got: torch.Tensor,
    exact: torch.Tensor,
    usual: torch.Tensor,
    factor: float,
    floor: Floor,
    *,
    stepwise: bool,
) -> None:
    if got.numel() == 0:
        return
    if got.ndim and got.numel() > PART:  # in equal parts: a dozen float64 temporaries of each
        if len(got) == 1:
            _compare_values(f"{which}in 0: ", got[0], exact[0], usual[0], factor, floor.of(0), stepwise=stepwise)
            return
        count, start = -(-got.numel() // PART), 0
        for g, e, u in zip(got.chunk(count), exact.chunk(count), usual.chunk(count), strict=True):
            part = floor.of(slice(start, start + len(g)))
            _compare_values(f"{which}from {start} on: ", g, e, u, factor, part, stepwise=stepwise)
            start += len(g)
        return
    if not got.is_floating_point():
        wrong = got != usual
        limit = torch.zeros_like(wrong, dtype=torch.float64)
    else:
        look = _first_look(got, exact, usual, factor)
        finite, strange, error, limit = look.finite, look.strange, look.error, look.limit
        if bool((got.isnan() & ~usual.isnan()).any()):
            first = _first(got.isnan() & ~usual.isnan())
            raise Rejected("nan", f"{which}NaN at {first}: computed from a NaN, or never written")
        wrong = look.wrong | strange
        for samples in (LOOK, rounding.SAMPLES):  # a few, many times as far, tell what is far off; all take longer
            if not bool((wrong & ~strange).any()) or (moved := floor(samples)) is None:
                break
            moved = MANY * moved.amax().expand_as(moved) if samples == LOOK else moved
            budget = _budget(got.dtype, exact, usual, finite, moved, stepwise=stepwise)
            allowed = factor * torch.where(finite, budget, 0.0)
            if samples == LOOK and bool(((error > allowed) | strange).any()):
                break
            if samples > LOOK:
                limit, wrong = allowed, wrong & ((error > allowed) | strange)
        if bool((wrong & ~strange).any()) and (off := floor(ALONE)) is not None:
            info = torch.finfo(got.dtype)  # the result is rounded, too
            alone = torch.where(finite, BETWEEN * off + info.eps * exact.abs() + info.tiny, 0.0)
            limit = torch.maximum(limit, alone)
            wrong = wrong & ((error > limit) | strange)
    if bool(wrong.any()):
        first = _first(wrong)
        values = f"expected {exact[first].item():.9g}, got {got[first].item():.9g}"
        if bool(exact[first].isfinite() & got[first].isfinite()):  # an infinity or a NaN is off by no number
            values += f", more off than {limit[first].item():.3g}"
        numbers = f"{int(wrong.sum())} of {wrong.numel()} wrong{_within(wrong)}, the first at {first}"
        raise Rejected("value", f"{which}{numbers}: {values}")


def _budget(
    dtype: torch.dtype,
    exact: torch.Tensor,
    usual: torch.Tensor,
    finite: torch.Tensor,
    moved: torch.Tensor | None = None,
    *,
    stepwise: bool = False,
) -> torch.Tensor:
    """FACTOR times PyTorch's largest error beside the element, and its rounding; and FACTOR times how far it moves.

    Beside it stands its row, with no less than a typical row's error (luck happens). In one dimension it is its like:
    elements of its magnitude, or if it is known how far they move, those that move as far. There the last rounding,
    which each element has of its own, is no error of the others.
    """
    error = torch.where(finite, (usual.double() - exact).abs(), 0.0)
    info = torch.finfo(usual.dtype)
    rounded = info.eps * torch.where(finite, exact.abs(), 0.0) + info.tiny
    if error.ndim > 1:
        rows = error.amax(-1, keepdim=True)
        beside = torch.maximum(rows, rows.median())
    elif moved is None:
        beside = _of_its_like(error, rounded)
    else:
        beside = _of_its_like((error - rounded / 2).clamp(min=0), moved)
    budget = FACTOR[dtype] * (beside + rounded)
    if moved is None:
        return budget
    steps = info.eps / rounding.FP32.eps
    return budget + moved * (FACTOR[dtype] * steps if stepwise else FACTOR[torch.float32] * min(1.0, steps))


def _of_its_like(error: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """For each element the largest error among those of like size: those within a factor of 2, and some within 4.

    There is a group for each exponent of float64 from 2^-1000 on: how many are used, the host need not know.
    """
    groups = torch.frexp(size.clamp(min=2.0**-1000)).exponent.flatten().long() + 1001
    largest = error.new_zeros(2027).scatter_reduce_(0, groups, error.flatten(), "amax")
    return largest.unfold(0, 3, 1).amax(1)[groups - 1].view(error.shape)


def _first(wrong: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in wrong.nonzero()[0])


def _within(wrong: torch.Tensor) -> str:
    """The smallest box that holds what is wrong, as a slice: a tail, a block or a row is seen at a glance."""
    at = wrong.nonzero()
    low, high = at.amin(0).tolist(), (at.amax(0) + 1).tolist()
    if not low or all(a == 0 and b == n for a, b, n in zip(low, high, wrong.shape, strict=True)):
        return ""
    return f", all in [{', '.join(f'{a}:{b}' for a, b in zip(low, high, strict=True))}]"


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Inside, torch.empty is filled with NaN (integers: their maximum), so that what a kernel never writes shows.

    torch.utils.deterministic.fill_uninitialized_memory, which is on by default, does it in deterministic mode.
    """
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])


def _bits(t: torch.Tensor) -> torch.Tensor:
    """A copy that can be compared where NaN equals NaN: [*shape, bytes of an element].

    A tensor may count as contiguous though a dimension of size 1 has any stride; a copy's strides are the usual ones.
    """
    return t.detach().clone(memory_format=torch.contiguous_format).unsqueeze(-1).view(torch.uint8)


def _as_it_is(t: torch.Tensor) -> torch.Tensor:
    """A copy of all the memory that t lies in, seen as t sees it: also of rows that overlap or lie apart."""
    memory = t.untyped_storage().clone()
    return t.new_empty(0).set_(memory, t.storage_offset(), t.size(), t.stride())


def answer(rung: Rung, args: tuple[Any, ...], *, poison: int = 0) -> tuple[Any, Traffic]:
    """Run a rung once, watched, on inputs that it must leave alone. poison: see interpreter.garbage."""
    with left_alone(args), _watched(poison=poison) as traffic:
        result = rung(*args)
    return result, traffic


@contextmanager
def left_alone(args: Sequence[Any]) -> Iterator[None]:
    """Rejected if a tensor of args is not what it was, to the bit.

    All of them are put back first: whoever is called next gets what it should.
    """
    before = {i: _as_it_is(a) for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
    yield
    changed = [i for i, was in before.items() if not torch.equal(_bits(args[i]), _bits(was))]
    for i in changed:
        args[i].untyped_storage().copy_(before[i].untyped_storage())
    if changed:
        raise Rejected("changed input", f"argument {changed[0]} is not what it was")


@contextmanager
def _watched(poison: int = 0) -> Iterator[Traffic]:
    """Inside, addresses are watched and new memory is NaN; what a kernel does wrong there is Rejected."""
    try:
        with poisoned_empty(), watched(poison=poison) as traffic:
            yield traffic
            if HAS_GPU:
                finish()
    except OutOfBounds as error:
        raise Rejected("out of bounds", str(error)) from error
    except BlockAsCondition as error:
        raise Rejected("error", str(error)) from error
    except Fault as fault:
        raise Rejected(fault.kind, str(fault)) from fault
    except RuntimeError as error:
        if not _is_fault(error):
            raise
        raise Rejected("fault", str(error).splitlines()[0]) from error


def _is_fault(error: RuntimeError) -> bool:
    """Whether a kernel ended in an error, an illegal instruction or address: this process has then lost the GPU."""
    return isinstance(error, torch.AcceleratorError) or str(error).startswith("Triton Error [CUDA]")


def check(lesson: Lesson, rung: Rung, shape: Shape, dtype: torch.dtype) -> Traffic:
    """Raise Rejected if the rung is wrong on this case; return the bytes it moved (counted without a GPU)."""
    question = _remembered(lesson, shape, dtype)
    try:
        result, traffic = answer(rung, question.args)
    except Unsupported:
        raise
    except BaseException:
        _truths.clear()  # the inputs may be half overwritten
        raise
    compare(question, result, slack=budget_of(rung), stepwise=is_stepwise(rung))
    return traffic


_truths: dict[Any, tuple[Lesson, Truth, torch.Tensor]] = {}
REMEMBERED = 64


def _remembered(lesson: Lesson, shape: Shape, dtype: torch.dtype) -> Truth:
    """truth(), made once for the rungs and mutants that are asked one after the other. A GPU's memory is left alone."""
    if HAS_GPU:
        return truth(lesson, shape, dtype)
    key = id(lesson), tuple(shape.items()), dtype
    if key not in _truths:
        question = truth(lesson, shape, dtype)
        while len(_truths) >= REMEMBERED:
            del _truths[next(iter(_truths))]
        _truths[key] = lesson, question, torch.get_rng_state()  # the lesson is held, so that its id stays its own
    _, question, random_state = _truths[key]
    torch.set_rng_state(random_state)
    return question


def check_grad(lesson: Lesson, shape: Shape, dtype: torch.dtype, *, seed: int = 0) -> None:
    """The differentiable op: its result and the gradient of every floating-point input, within the same budget.

    Forward and backward are watched as a rung is, and must leave the inputs and the upstream gradients alone.
    """
    assert lesson.grad is not None
    reference = lesson.grad.reference or lesson.reference
    torch.manual_seed(seed)
    args = _inputs(lesson, lesson.grad.inputs or lesson.inputs, shape, dtype)
    # The upstream gradient is random: a sum of ones would hide a wrong Jacobian (softmax's would be all zeros).
    shapes = [(t.shape, t.dtype) for t in tensors(reference(*args)) if t.is_floating_point()]
    # In 8 bits its product with a short weight is exact: where a gradient is 0, fused multiply-adds must not matter.
    upstream = [torch.randn(s, device=DEVICE).bfloat16().to(d) for s, d in shapes]
    given = (*args, *upstream)

    def backward(fn: Rung, *given: Any) -> tuple[torch.Tensor, ...]:
        leaves = [a.detach() if isinstance(a, torch.Tensor) else a for a in given[: len(args)]]
        wanted = [a.requires_grad_() for a in leaves if isinstance(a, torch.Tensor) and a.is_floating_point()]
        with torch.enable_grad():
            out = tensors(fn(*leaves))
            floats = [t for t in out if t.is_floating_point()]
            grads = torch.autograd.grad(floats, wanted, given[len(args) :], allow_unused=True)
        return (
            *(t.detach() for t in out),
            *(g if g is not None else torch.zeros_like(w) for g, w in zip(grads, wanted, strict=True)),
        )

    exact, usual = backward(reference, *map(in_float64, given)), backward(reference, *given)
    with left_alone(given), _watched():
        got = backward(lesson.grad.op, *given)
    asked = partial(backward, reference)
    compare(Truth(given, exact, usual, lesson.factor * lesson.grad.factor, asked), got)


def dtypes(lesson: Lesson, case: Case) -> Sequence[torch.dtype]:
    """One for long offsets, which any shows. Interpreted, the 16-bit types take turns: each case in fp32 and one."""
    if case.gib > 1:
        return lesson.dtypes[-1:]
    first, *others = lesson.dtypes
    if INTERPRETED and len(others) > 1:
        return first, others[lesson.checks.index(case) % len(others)]
    return lesson.dtypes


def cannot_run(lesson: Lesson, rung: Rung, case: Case, dtype: torch.dtype) -> str:
    """Why this machine cannot check this case, or an empty string."""
    if case.gib and not HAS_GPU:
        return f"needs a GPU with {case.gib:g} GiB"
    if case.gib and torch.cuda.mem_get_info()[1] < case.gib * 2**30:
        return f"needs {case.gib:g} GiB of GPU memory"
    if not suits(rung, capability()) and not (INTERPRETED and getattr(rung, "interpreted", False)):
        what = getattr(rung, "needs_what", "")
        return f"needs sm_{getattr(rung, 'needs', 0)}" + (f": {what}" if what else "")
    return lesson.extension.lacks() if lesson.extension else ""


__all__ = ["Rejected", "Truth", "Unsupported", "answer", "check", "check_grad", "compare", "truth"]
