"""One random call of a public operator, as plain data: how it is built, run and judged.

A case is a dictionary that JSON takes: operator, direction, tensors (shape, dtype, layout, values), options, seed. It
is drawn from problems/fuzz.py. It is judged as a rung is: within the error budget against float64, no address outside a
tensor, no result left unwritten, no input changed. A call that no operator takes must be refused, in words.

`python -m lessonkit.judge.fuzz_cases MODE` is the process that runs cases: one line of JSON in, one line out. Modes:
`cpu` (PyTorch computes), `interpreted`, `gpu`.
"""

import faulthandler
import json
import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from inspect import signature
from typing import Any, Protocol

from lessonkit.base.device import DEVICE
from lessonkit.base.errors import Rejected
from lessonkit.judge import check, products

import torch

MODES = ("cpu", "interpreted", "gpu")
DIRECTIONS = ("forward", "backward")
KEYS = ("operator", "direction", "tensors", "options", "seed", "deterministic", "spoilt")  # of every case
# Elements of a case's largest tensor: the interpreter runs one program after another.
MOST = {"cpu": 2**16, "interpreted": 2**15, "gpu": 2**22}

SPOILS = 7  # a choice from 0 to this: this one spoils the case
SMALLER = (2.0**-4, 2.0**-8, 2.0**-12)  # upstream gradients, where PyTorch overflows with those of the case
POOL = 2**22 + 9001  # random numbers that tensors take theirs from

READY = "ready"
WHERE = signal.SIGUSR2  # a process that runs cases answers it with its stacks, on stderr; LLVM takes SIGUSR1

Spec = dict[str, Any]  # of a tensor
Case = dict[str, Any]


class Draw(Protocol):
    """Where choices come from: hypothesis, or a test's dice."""

    most: int  # elements

    def integer(self, low: int, high: int) -> int: ...

    def one_of(self, options: Sequence[Any]) -> Any: ...


@dataclass
class Drawn:
    """A legal call, and how it may be spoilt.

    tensors   by parameter; None for one that is left out
    options   the other arguments
    spoilt    (parameter, what its spec or value becomes): each alone makes the call one to be refused
    """

    tensors: dict[str, Spec | None]
    options: dict[str, Any] = field(default_factory=dict)
    spoilt: list[tuple[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Question:
    """How one public operator is fuzzed (problems/fuzz.py).

    draw        a legal call
    reference   called with the function's arguments by name: what the problem says is right
    gradients   the tensors that the operator is differentiable in; none: there is no backward to ask for
    forward     the function asked forwards, where another one than the differentiable says more
    factor      the problem's, or a wider one for a stated reason
    keeps       the gradient is a function of the operator's own result of that index, which is judged by itself: the
                reference takes `kept`, that result, or None before there is one
    beside      the reference with a rounding error as large as it gets: an answer may be off by what that changes. For
                errors whose effect is not proportional to them, as that of a mean on a variance of about 0; also with
                smaller errors, where the largest is not the one that changes most
    multiplied  the tensor in whose dtype all matmuls of the gradients are, where the others may be wider. A gradient
                that is wider is rounded to it on its way
    cancels     sums of the gradients' matmuls cancel, and what is left is the rounding of an operand to 16 bits. It may
                be as large as products.OperandsOff says, also where PyTorch is right by luck in each row. That of
                `rounding.moved` is a few samples': in some of many elements all of them are small
    continued   of the tensors by name: a kernel adds up the terms of so many of the reference's matmuls in a gradient
                one after the other
    divided     for a backward that takes another call's result: draws after how many keys a case is divided, 0: not
    in_parts    of that number, and of the dtype of results: the function that is asked in the operator's place, and the
                reference with the results of the parts rounded, as one of `beside`
    """

    draw: Callable[[Draw], Drawn]
    reference: Callable[..., Any]
    gradients: tuple[str, ...] = ()
    forward: str = ""
    factor: float = 1
    keeps: int | None = None
    beside: tuple[Callable[..., Any], ...] = ()
    multiplied: str = ""
    cancels: bool = False
    continued: Callable[..., int] | None = None
    divided: Callable[[Draw, Drawn], int] | None = None
    in_parts: Callable[[int, torch.dtype], tuple[Callable[..., Any], Callable[..., Any]]] | None = None


@cache
def questions() -> dict[str, Question]:
    """By operator: one for each public name that problems/operators.py says how to call."""
    found = import_module("problems.fuzz")
    return {op.name: getattr(found, op.name) for op in import_module("problems.operators").OPERATORS}


# ---- Drawing --------------------------------------------------------------------------------------------------------

LAYOUTS = (
    "contiguous", "offset", "padded", "sliced", "step", "transposed", "permuted", "heads", "rows apart", "expanded",
    "expanded columns",
)  # fmt: skip
PLAIN = (
    "normal",
    "ones",
    "zeros",
    "equal rows",
    "mixed",
    "rising",
    "falling",
    "rising rows",
    "falling rows",
    "shifted",
)
TINY = ("denormal",)
STRANGE = ("nan", "inf", "-inf", "half -inf")
FLOATS = ("float32", "float16", "bfloat16")
NO_FLOATS = ("int64", "int32", "bool", "complex64")


def tensor(draw: Draw, shape: Sequence[int], dtypes: Sequence[str] = FLOATS, values: Sequence[str] = PLAIN) -> Spec:
    """A tensor of that shape; dtype, values and where they lie are drawn."""
    return {
        "shape": list(shape),
        "dtype": draw.one_of(dtypes),
        "layout": draw.one_of(LAYOUTS),
        "values": draw.one_of(values),
    }


def draw_case(operator: str, direction: str, draw: Draw) -> Case:
    """A case of an operator. One in eight is spoilt, and must be refused."""
    question = questions()[operator]
    drawn = question.draw(draw)
    case: Case = {"operator": operator, "direction": direction, "tensors": drawn.tensors, "options": drawn.options}
    case |= {"noise": "pool"}
    case |= {"seed": draw.integer(0, 2**16), "deterministic": draw.one_of((True, False)), "spoilt": ""}
    if direction == "backward":
        there = [name for name in question.gradients if drawn.tensors[name] is not None]
        left_out = draw.one_of((None, *there)) if len(there) > 1 else None
        case["wanted"] = [name for name in there if name != left_out]
        case["upstream"] = {"layout": draw.one_of(LAYOUTS), "values": draw.one_of(("normal", "ones", "mixed", "zeros"))}
    if drawn.spoilt and draw.integer(0, SPOILS) == SPOILS:
        name, change = draw.one_of(drawn.spoilt)
        case["spoilt"] = name
        if name in case["tensors"]:
            case["tensors"] = case["tensors"] | {name: (case["tensors"][name] or {}) | change}
        else:
            case["options"] = case["options"] | {name: change}
    if direction == "backward" and question.divided and not case["spoilt"]:
        case["divided"] = question.divided(draw, drawn)
    return case


def spoilt_tensors(tensors: dict[str, Spec | None], legal: dict[str, Sequence[str]]) -> list[tuple[str, Any]]:
    """What is never legal: a dtype that the operator does not take there, another device, no tensor at all.

    legal: the dtypes that each tensor may have.
    """
    found: list[tuple[str, Any]] = []
    for i, (name, dtypes) in enumerate(legal.items()):
        if tensors[name] is None:
            continue
        found += [(name, {"dtype": dtype}) for dtype in (*FLOATS, *NO_FLOATS) if dtype not in dtypes]
        found.append((name, {"instead": [1.0]}))
        if i:
            found.append((name, {"device": "meta"}))
    return found


# ---- Building -------------------------------------------------------------------------------------------------------


def build(spec: Spec | None, seed: int, noise: str = "pool") -> Any:
    """The tensor of a spec, on DEVICE; the same values on each device, but for the last bits of some.

    noise: where a case says that its random numbers come from; the oldest found ones say nothing.
    """
    if spec is None:
        return None
    if "instead" in spec:
        return spec["instead"]
    dtype = getattr(torch, spec["dtype"])
    made = _values(spec, dtype, _Pooled(seed) if noise == "pool" else _Generated(seed))
    to = torch.device(spec.get("device", DEVICE))
    if to.type == "cuda" and not made.is_cuda:  # from pinned memory the copy waits in the stream; the host goes on
        made = made.pin_memory()
    made = made.to(to, non_blocking=True)
    laid = _laid(made, spec["layout"])
    return laid.requires_grad_() if spec.get("requires_grad") else laid


class _Noise(Protocol):
    """The random numbers of one tensor."""

    def normal(self, shape: Sequence[int]) -> torch.Tensor: ...

    def exponents(self, shape: Sequence[int]) -> torch.Tensor:
        """Between -3 and 2."""

    def place(self, n: int) -> int:
        """Below n."""


class _Generated:
    """Made anew on the CPU."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def exponents(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(shape).uniform_(-3, 2, generator=self.generator)

    def place(self, n: int) -> int:
        return int(torch.randint(n, (), generator=self.generator))


class _Pooled:
    """Parts of a pool that stays on the device: a case costs no draws of the host, and no copy to the device."""

    def __init__(self, seed: int) -> None:
        self.at = seed * 2654435761 % POOL  # the parts of two seeds in a row begin far from each other

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        pool, n = _pool(), math.prod(shape)
        parts = [pool[self.at : self.at + n]]
        while (left := n - sum(map(len, parts))) > 0:
            parts.append(pool[:left])
        self.at = (self.at + n) % POOL
        return torch.cat(parts).view(tuple(shape))  # a copy

    def exponents(self, shape: Sequence[int]) -> torch.Tensor:
        share: torch.Tensor = torch.special.ndtr(self.normal(shape))  # even, where x is normal
        return 5 * share - 3

    def place(self, n: int) -> int:
        return self.at % n


@cache
def _pool() -> torch.Tensor:
    return torch.randn(POOL, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def _values(spec: Spec, dtype: torch.dtype, noise: _Noise) -> torch.Tensor:
    shape, kind = spec["shape"], spec["values"]
    if isinstance(kind, list):  # given, one by one
        return torch.tensor(kind, dtype=dtype).view(shape)
    if not (dtype.is_floating_point or dtype.is_complex):
        generator = torch.Generator().manual_seed(noise.place(2**31))
        classes = spec.get("below", 2)
        drawn = torch.randint(0, max(1, classes), shape, generator=generator)
        for value, share in spec.get("some", ()):
            drawn[torch.rand(shape, generator=generator) < share] = value
        return drawn.to(dtype)
    x = noise.normal(shape)
    info = torch.finfo(dtype)
    if x.numel():
        x = _shaped(x, kind, info, noise)
    if "scale" in spec:
        x *= spec["scale"]
    if spec.get("positive"):
        x = x.abs() + 0.01
    return x.clamp(-448, 448).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def _shaped(x: torch.Tensor, kind: str, info: torch.finfo, noise: _Noise) -> torch.Tensor:
    columns = x.shape[-1] if x.ndim else 1
    rows = x.shape[-2] if x.ndim > 1 else 1
    slopes = {"rising": 1.0, "falling": -1.0}
    if kind in slopes:
        return x / 4 + slopes[kind] * torch.linspace(-4, 4, columns, device=x.device).view(x.shape[-1:])
    if kind.removesuffix(" rows") in slopes and rows > 1:
        slope = slopes[kind.removesuffix(" rows")]
        return x / 4 + slope * torch.linspace(-4, 4, rows, device=x.device)[:, None]
    if kind == "ones" or kind == "zeros":
        return torch.full_like(x, float(kind == "ones"))
    if kind == "equal rows":
        return x.flatten()[:columns].expand(x.shape).clone() if x.ndim else x
    if kind == "mixed":
        return x * 10.0 ** noise.exponents(x.shape)
    if kind == "shifted":
        return x + 100
    if kind == "denormal":
        return x * (info.tiny / 4)
    if kind == "large":
        return x * (5e3 if info.max < 1e5 else 1e15)
    if kind == "huge":
        return x * (info.max / 16)
    at = noise.place(x.numel())
    if kind in ("nan", "inf", "-inf"):
        x.view(-1)[at] = float(kind)
    if kind == "half -inf" and x.ndim:
        x[..., : columns // 2] = -torch.inf
    return x


def _laid(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, lying otherwise, amid NaN (integers: -1). Expanded: the first row or column throughout."""
    shape = tuple(t.shape)
    if t.device.type == "meta" or not shape or layout == "contiguous":
        return t
    columns = shape[-1]
    if layout == "expanded" and t.numel():
        return t[:1].clone().expand(shape)
    if layout == "expanded columns" and t.numel():
        return t[..., :1].clone().expand(shape)
    if layout == "offset":
        view = _poison((t.numel() + 3,), t)[3:].view(shape)
    elif layout == "padded":
        view = _poison((*shape[:-1], columns + 3), t)[..., :columns]
    elif layout == "sliced":
        view = _poison((shape[0] + 2, *shape[1:-1], columns + 9) if len(shape) > 1 else (columns + 9,), t)
        view = view[1:-1, ..., 1 : columns + 1] if len(shape) > 1 else view[1 : columns + 1]
    elif layout == "step":
        view = _poison((*shape[:-1], 2 * columns), t)[..., ::2]
    elif layout == "rows apart":
        view = _poison((2 * shape[0], *shape[1:]), t)[::2]
    elif layout == "transposed" and len(shape) > 1:
        view = _poison((*shape[:-2], columns, shape[-2]), t).transpose(-1, -2)
    elif layout == "heads" and len(shape) > 2:
        view = _poison((*shape[:-3], shape[-2], shape[-3], columns), t).transpose(-2, -3)
    elif layout == "permuted":
        view = _poison(shape[::-1], t).permute(*reversed(range(len(shape))))
    else:
        return t
    return view.copy_(t)


def _poison(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    if like.dtype == torch.bool:
        return torch.ones(*shape, dtype=torch.bool, device=like.device)
    size = like.element_size()
    return torch.full((*shape, size), 255, dtype=torch.uint8, device=like.device).view(like.dtype).view(*shape)


# ---- Running and judging --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """kind: right, refused (rightly), wrong, false alarm (a legal call was refused), crash, or broken reference."""

    kind: str
    said: str = ""

    @property
    def well(self) -> bool:
        return self.kind in ("right", "refused")


@dataclass(frozen=True)
class _Asked:
    """What check.judge takes of a problem."""

    reference: Callable[..., Any]
    factor: float


class Call:
    """A case with its tensors, ready to be asked of the operator and of the reference."""

    def __init__(self, case: Case, mode: str) -> None:
        self.case = case = json.loads(json.dumps(case))  # as it is replayed
        question, backward = questions()[case["operator"]], case["direction"] == "backward"
        operators = import_module("course_ops")
        self.function = getattr(operators, (question.forward if not backward else "") or case["operator"])
        self.beside, self.multiplied, self.cancels = question.beside, question.multiplied, question.cancels
        self.inside = import_module("course_ops.testing").interpreted if mode == "interpreted" else nullcontext
        self.noise = case.get("noise", "")
        specs = enumerate(case["tensors"].items(), case["seed"])
        self.tensors = {name: build(spec, seed, self.noise) for seed, (name, spec) in specs}
        self.names = [name for name, t in self.tensors.items() if t is not None]
        self.left_out = {name: None for name, t in self.tensors.items() if t is None}
        self.args = tuple(self.tensors[name] for name in self.names)
        self.wanted = case["wanted"] if backward else ()
        self.factor, self.reference = question.factor, question.reference
        self.keeps = question.keeps if self.wanted else None
        self.continued = question.continued
        self.rounded_parts: list[Callable[..., Any]] = []
        if question.in_parts and case.get("divided"):
            self.function, *self.rounded_parts = question.in_parts(case["divided"], self.args[0].dtype)

    def upstream(self, out: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """A gradient for each result, given by the case; none in a forward."""
        kind = self.case.get("upstream", {})
        specs = [{"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch."), **kind} for t in out]
        if not self.wanted:
            return ()
        return tuple(build(spec, seed, self.noise) for seed, spec in enumerate(specs, self.case["seed"] + 100))

    def of(self, f: Callable[..., Any], given: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """What f answers to the tensors given, in order; then, by the upstream gradients behind them, its gradients."""
        leaves = {name: t.detach() for name, t in zip(self.names, given, strict=False)}
        if not self.wanted:
            return tuple(map(_bytes, check.tensors(f(**leaves, **self.left_out, **self.case["options"]))))
        with torch.enable_grad():
            leaves |= {name: leaves[name].requires_grad_() for name in self.wanted}
            out = check.tensors(f(**leaves, **self.left_out, **self.case["options"]))
            upstream = given[len(self.names) :] or self.upstream(out)
            pairs = [(o, up) for o, up in zip(out, upstream, strict=True) if o.requires_grad]
            leaf = [leaves[name] for name in self.wanted]
            ends, ups = zip(*pairs, strict=True) if pairs else ((), ())
            found = torch.autograd.grad(ends, leaf, ups, allow_unused=True) if pairs else [None] * len(leaf)
        zeros = (torch.zeros_like(leaves[name]) for name in self.wanted)
        return *(t.detach() for t in out), *(z if g is None else g for g, z in zip(found, zeros, strict=True))

    def answer(self, *given: Any) -> tuple[torch.Tensor, ...]:
        """The operator's. Where new memory is NaN, deterministic algorithms are on: some kernels run only without."""
        if not self.case["deterministic"]:
            torch.use_deterministic_algorithms(False)
        return self.of(self.function, given)

    def truth(self, given: tuple[Any, ...], answer: Sequence[torch.Tensor] = ()) -> check.Truth:
        """answer: the operator's, for a reference whose gradients follow from what the operator has kept."""
        asked = _Asked(lambda *args: self._referred(answer, args), self.factor)
        truth = check.judge(asked, given)  # type: ignore[arg-type]
        matmuls = (self.tensors[self.multiplied],) if self.multiplied else self.args
        dtypes = {t.dtype for t in matmuls if t.is_floating_point()}
        narrow = self.wanted and len(dtypes) == 1 and dtypes <= {torch.float16, torch.bfloat16}
        operands = dtypes.pop() if narrow else None
        wider = [t.is_floating_point() and t.itemsize > 2 for t in truth.usual]
        first = len(wider) - len(self.wanted)  # of the gradients
        rounded = tuple(operands if w and i >= first else None for i, w in enumerate(wider)) if self.multiplied else ()
        beside: list[Callable[..., Any]] = [partial(self._of, f) for f in self.beside]
        beside += [lambda *args, f=f: self._referred(answer, args, f) for f in self.rounded_parts]
        off = partial(self._operands_off, operands, answer) if operands and self.cancels else None
        continued = self.continued(**self.tensors) if self.continued else 1
        return replace(
            truth, beside=tuple(beside), operands=operands, rounded=rounded, operands_off=off, continued=continued
        )  # fmt: skip

    def _of(self, f: Callable[..., Any], *given: Any) -> tuple[torch.Tensor, ...]:
        return self.of(f, given)

    def _operands_off(
        self, dtype: torch.dtype, answer: Sequence[torch.Tensor], *given: Any
    ) -> tuple[torch.Tensor, ...]:
        with products.OperandsOff(dtype):
            return self._referred(answer, given)

    def _referred(
        self, answer: Sequence[torch.Tensor], given: tuple[Any, ...], reference: Callable[..., Any] | None = None
    ) -> tuple[torch.Tensor, ...]:
        reference = reference or self.reference
        if self.keeps is None or not answer:
            return self.of(reference, given)
        return self.of(partial(reference, kept=answer[self.keeps]), given)

    def without_overflow(self, truth: check.Truth, answer: Sequence[torch.Tensor]) -> check.Truth:
        """The truth, with PyTorch's gradients by a smaller upstream, scaled up, where they overflow on their way.

        A gradient is linear in the upstream, and the exact answer has no rounding to 16 bits that a budget is made of.
        """
        usual, n = list(truth.usual), len(self.wanted)
        for smaller in SMALLER:
            lost = [e.isfinite() & ~u.isfinite() for e, u in zip(truth.exact[-n:], usual[-n:], strict=True)]
            if not n or not any(bool(each.any()) for each in lost):
                break
            given = *truth.args[: len(self.names)], *(up * smaller for up in truth.args[len(self.names) :])
            found = self._referred(answer, given)[-n:]
            usual[-n:] = [torch.where(where, g / smaller, u)
                          for where, g, u in zip(lost, found, usual[-n:], strict=True)]  # fmt: skip
        return replace(truth, usual=tuple(usual))


def doubt(case: Case, mode: str) -> Outcome | torch.Tensor:
    """A first look at a case, without a wait for the device: of a spoilt one its outcome, else a bool that stays there.

    It is true of whatever `run` would not call right, and of some right answers too: ask `run` of these.
    """
    call = Call(case, mode)
    if case["spoilt"]:
        return _refusal(call)
    before = [check._bits(t) for t in call.args]
    with call.inside(), check.poisoned_empty():
        answer = call.answer(*call.args)
    given = call.args + call.upstream(answer[: len(answer) - len(call.wanted)])
    changed = [(check._bits(t) != b).any() for t, b in zip(call.args, before, strict=True)]
    return torch.stack([check.suspected(call.truth(given, answer), answer), *changed]).any()


def run(case: Case, mode: str) -> Outcome:
    """Build a case, call the operator, and judge what it did."""
    call = Call(case, mode)
    if case["spoilt"]:
        return _refusal(call)
    try:
        args = call.args
        if call.wanted:
            with torch.no_grad():
                wanted, call.wanted = call.wanted, ()
                like = call.of(call.reference, args)
            call.wanted = wanted
            args += call.upstream(like)
        truth = call.truth(args)
    except Exception:
        return Outcome("broken reference", traceback.format_exc(limit=-3))
    try:
        with call.inside():
            answer, _ = check.answer(call.answer, args)
        if call.keeps is not None and _alike(answer[call.keeps], truth.usual[call.keeps]):
            truth = call.truth(args, answer)
        check.compare(_forgiving(call.without_overflow(truth, answer), answer), answer)
    except Rejected as rejected:
        return Outcome("crash" if rejected.caught_by in ("fault", "hang") else "wrong", str(rejected))
    except (TypeError, ValueError) as error:
        return Outcome("false alarm", f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-2)}")
    except Exception:
        return Outcome("crash", traceback.format_exc(limit=-3))
    return Outcome("right")


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """A tensor in 8 bits as its bytes, as problems ask for it; with one NaN, whatever its sign."""
    if t.dtype != torch.float8_e4m3fn:
        return t
    found = t.view(torch.uint8)
    return found.masked_fill(found & 127 == 127, 127)


def _forgiving(truth: check.Truth, answer: Sequence[torch.Tensor]) -> check.Truth:
    """The truth, with this answer in PyTorch's place where PyTorch's is infinite or NaN, and neither's is wrong.

    PyTorch may overflow on its way to a result: it answers NaN where it adds an infinity to that. And near the dtype's
    largest number one of two right sums may be infinite.
    """
    if [(t.shape, t.dtype) for t in answer] != [(t.shape, t.dtype) for t in truth.usual]:
        return truth
    pairs = zip(answer, truth.exact, truth.usual, strict=True)
    usual = tuple(_forgiven(*each) if each[0].is_floating_point() else each[2] for each in pairs)
    return replace(truth, usual=usual)


def _forgiven(got: torch.Tensor, exact: torch.Tensor, usual: torch.Tensor) -> torch.Tensor:
    end = 0.98 * torch.finfo(usual.dtype).max
    at_the_end = (exact.abs() > end) & (got.double() * exact.sign() > end) & (usual.double() * exact.sign() > end)
    rounded = exact.to(usual.dtype)
    overflowed = exact.isfinite() & rounded.isfinite() & got.isfinite() & ~usual.isfinite()
    too_large = exact.isfinite() & rounded.isinf() & (got == rounded)
    infinite = exact.isinf() & usual.isnan() & (got == exact)
    return torch.where(at_the_end | too_large | infinite, got, torch.where(overflowed, rounded, usual))


def _refusal(call: Call) -> Outcome:
    case = call.case
    try:
        with call.inside():
            call.function(**call.tensors, **case["options"])
    except (TypeError, ValueError) as error:
        named = [name for name in signature(call.function).parameters if re.search(rf"\b{name}\b", str(error))]
        if named:
            return Outcome("refused", str(error))
        return Outcome("wrong", f"refusal: no argument is named: {type(error).__name__}: {error}")
    except Exception:
        return Outcome("crash", f"refusal: {case['spoilt']}: {traceback.format_exc(limit=-3)}")
    return Outcome("wrong", f"refusal: {case['spoilt']} is spoilt, and the call was answered")


def say_where() -> None:
    """From now on this process answers WHERE, also while its stderr is redirected."""
    faulthandler.register(WHERE, os.fdopen(os.dup(2), "w"))


def main(mode: str) -> None:
    """Say READY, then answer each line of standard input."""
    say_where()
    for name in ("course_ops.testing", "problems.fuzz", "problems.operators"):
        import_module(name)
    print(READY, flush=True)
    for line in sys.stdin:
        outcome = run(json.loads(line), mode)
        print(json.dumps([outcome.kind, outcome.said]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
