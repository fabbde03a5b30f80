"""What the exercises of day 2 and their grader use of PyTorch, in NumPy: a browser's Python has no PyTorch.

`stand_in()` puts this module where `torch` would be. Tensors lie in memory as PyTorch's do: Triton's interpreter finds
them by `data_ptr` and strides. 16-bit types are computed in float32 and rounded once, as PyTorch does on a CPU. Each
operation goes through `_Op`, by which dispatch modes see it. Those that references of exercises use have a gradient.
What is not here raises AttributeError, which names it.
"""

# mypy: disable-error-code="no-any-return, operator, type-var"

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

nan, inf = math.nan, math.inf
__version__ = "in NumPy"
contiguous_format = "contiguous"
AcceleratorError = type("AcceleratorError", (RuntimeError,), {})
OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})


# ---- Types and devices ----------------------------------------------------------------------------------------------


class dtype:
    """A type of elements. kept: NumPy's type in memory; computed: in which NumPy computes."""

    def __init__(self, name: str, kept: type, computed: type | None = None, rank: int = 0) -> None:
        self.name, self.kept, self.computed, self.rank = name, np.dtype(kept), np.dtype(computed or kept), rank
        self.itemsize = self.kept.itemsize
        self.is_floating_point = self.computed.kind == "f"
        self.is_complex = False

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    def __reduce__(self) -> str:
        return self.name


bool_ = dtype("bool", np.bool_, rank=0)
uint8, int8 = dtype("uint8", np.uint8, rank=1), dtype("int8", np.int8, rank=2)
uint16, int16 = dtype("uint16", np.uint16, rank=3), dtype("int16", np.int16, rank=3)
int32, int64 = dtype("int32", np.int32, rank=4), dtype("int64", np.int64, rank=5)
float16 = half = dtype("float16", np.float16, np.float32, rank=6)
bfloat16 = dtype("bfloat16", np.uint16, np.float32, rank=6)
float32 = float_ = dtype("float32", np.float32, rank=7)
float64 = double = dtype("float64", np.float64, rank=8)
long = int64
# Named by tables of the kit; no tensor of these is made here.
float8_e4m3fn, float8_e5m2 = dtype("float8_e4m3fn", np.uint8), dtype("float8_e5m2", np.uint8)
_OF_NUMPY = {np.dtype(t): d for t, d in ((np.bool_, bool_), (np.uint8, uint8), (np.int8, int8), (np.uint16, uint16),
             (np.int16, int16), (np.int32, int32), (np.int64, int64), (np.float16, float16), (np.float32, float32),
             (np.float64, float64))}  # fmt: skip


def finfo(kind: dtype) -> SimpleNamespace:
    if kind is bfloat16:
        return SimpleNamespace(eps=2.0**-7, tiny=2.0**-126, max=(2 - 2.0**-7) * 2.0**127, min=-(2 - 2.0**-7) * 2.0**127)
    found = np.finfo(kind.kept)
    return SimpleNamespace(eps=float(found.eps), tiny=float(found.tiny), max=float(found.max), min=float(found.min))


class device:
    def __init__(self, type: str = "cpu") -> None:
        self.type = str(getattr(type, "type", type))

    def __repr__(self) -> str:
        return self.type

    def __eq__(self, other: object) -> bool:
        return self.type == str(getattr(other, "type", other))

    def __hash__(self) -> int:
        return hash(self.type)


CPU = device("cpu")


class Size(tuple[int, ...]):
    def numel(self) -> int:
        return math.prod(self)


def _narrow(values: np.ndarray, kind: dtype) -> np.ndarray:
    """Values as memory holds them; bfloat16 is rounded to nearest even."""
    if kind is not bfloat16:
        with np.errstate(all="ignore"):
            return values.astype(kind.kept)
    shape, values = values.shape, np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16).reshape(shape)


def _wide(t: "Tensor") -> np.ndarray:
    """The values of a tensor as NumPy computes with them."""
    if t.dtype is bfloat16:
        return np.asarray(t.kept.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return t.kept.astype(t.dtype.computed) if t.dtype.computed != t.dtype.kept else t.kept


# ---- Operations, and who sees them ----------------------------------------------------------------------------------


class _Packet:
    """An operation under its name, as `torch.ops.aten` has it."""

    def __init__(self, name: str) -> None:
        self.__name__ = name


class _Aten:
    @cache  # noqa: B019  one for the process
    def __getattr__(self, name: str) -> _Packet:
        return _Packet(name)


_modes: list[Any] = []
_grad = [True]


class TorchDispatchMode:
    """Inside, each operation is handed to `__torch_dispatch__`; what that calls is not."""

    def __enter__(self) -> Any:
        _modes.append(self)
        return self

    def __exit__(self, *why: object) -> None:
        _modes.pop()


class _Op:
    """An operation. view: its result is the operand's memory. back: (grad, result, *args) -> gradients of args."""

    def __init__(self, name: str, compute: Callable[..., Any], back: Callable[..., Any] | None, view: bool) -> None:
        self.overloadpacket, self._name, self.compute, self.back = getattr(aten, name), name, compute, back
        alias = SimpleNamespace(is_write=False) if view else None
        self._schema = SimpleNamespace(returns=[SimpleNamespace(alias_info=alias)] * 2)

    def name(self) -> str:
        return self._name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _modes:
            mode = _modes.pop()
            try:
                return mode.__torch_dispatch__(self, (), args, kwargs)
            finally:
                _modes.append(mode)
        out = self.compute(*args, **kwargs)
        if _grad[0] and isinstance(out, Tensor) and not self._name.endswith("_") and any(_needs(a) for a in args):
            out.requires_grad = out.is_floating_point()
            out.made_by = partial(self._back, out, args)
        return out

    def _back(self, out: "Tensor", args: tuple[Any, ...], grad: "Tensor") -> list[tuple["Tensor", "Tensor"]]:
        if self.back is None:
            raise NotImplementedError(f"{self._name} has no gradient in a page: write the backward as a kernel")
        with no_grad():
            grads = self.back(grad, out, *args)
        return [(a, _shrunk(g, a)) for a, g in zip(args, grads, strict=False) if _needs(a) and g is not None]


aten = _Aten()


def _needs(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _shrunk(grad: "Tensor", like: "Tensor") -> "Tensor":
    """A gradient of what was broadcast, summed to the operand's shape and in its type."""
    while grad.ndim > like.ndim:
        grad = grad.sum(0)
    for at, size in enumerate(like.shape):
        if size == 1 and grad.shape[at] != 1:
            grad = grad.sum(at, keepdim=True)
    return grad.to(like.dtype)


def op(name: str, back: Callable[..., Any] | None = None, *, view: bool = False) -> Callable[..., _Op]:
    return lambda compute: _Op(name, compute, back, view)


def _common(args: Sequence[Any]) -> dtype:
    """The type of a result, by PyTorch's rule: dimensions first, then scalars of a higher kind."""

    def kind(d: dtype) -> int:
        return 2 if d.is_floating_point else 0 if d is bool_ else 1

    def join(a: dtype | None, b: dtype) -> dtype:
        if a is None or a is b:
            return b
        if {a, b} == {float16, bfloat16}:
            return float32
        return a if a.rank >= b.rank else b

    found: dtype | None = None
    for group in (
        [a.dtype for a in args if isinstance(a, Tensor) and a.ndim],
        [a.dtype for a in args if isinstance(a, Tensor) and not a.ndim],
        [bool_ if isinstance(a, bool) else int64 if isinstance(a, int) else float32
         for a in args if isinstance(a, bool | int | float)],
    ):  # fmt: skip
        here: dtype | None = None
        for each in group:
            here = join(here, each)
        if here is not None and (found is None or kind(here) > kind(found)):
            found = here
    assert found is not None
    return found


def _values(args: Sequence[Any], kind: dtype) -> list[Any]:
    return [_wide(a).astype(kind.computed, copy=False) if isinstance(a, Tensor)
            else kind.computed.type(a) if kind.is_floating_point else a for a in args]  # fmt: skip


def _new(values: Any, kind: dtype) -> "Tensor":
    return Tensor(np.asarray(_narrow(np.asarray(values), kind)), kind)


def _arithmetic(name: str, function: Callable[..., Any], back: Any = None, *, true: bool = False) -> _Op:
    """An operation element by element whose result has its operands' common type. true: floating-point in any case."""

    def compute(*args: Any) -> Any:
        args = tuple(a.item() if isinstance(a, np.generic) else a for a in args)
        kind = _common(args)
        kind = float32 if true and not kind.is_floating_point else kind
        with np.errstate(all="ignore"):
            return _new(function(*_values(args, kind)), kind)

    return _Op(name, compute, back, view=False)


def _comparison(name: str, function: Callable[..., Any]) -> _Op:
    def compute(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return _new(function(*_values(args, _common(args))), bool_)

    return _Op(name, compute, None, view=False)


add = _arithmetic("add", np.add, lambda g, out, a, b: (g, g))
sub = _arithmetic("sub", np.subtract, lambda g, out, a, b: (g, -g))
mul = _arithmetic("mul", np.multiply, lambda g, out, a, b: (g * b, g * a))
div = _arithmetic("div", np.divide, lambda g, out, a, b: (g / b, -g * a / (b * b)), true=True)
neg = _arithmetic("neg", np.negative, lambda g, out, a: (-g,))
pow = _arithmetic("pow", np.power)
remainder = _arithmetic("remainder", np.mod)
floor_divide = _arithmetic("floor_divide", np.floor_divide)
maximum, minimum = _arithmetic("maximum", np.maximum), _arithmetic("minimum", np.minimum)
copysign = _arithmetic("copysign", np.copysign)
abs = _arithmetic("abs", np.abs)
square = _arithmetic("square", np.square, lambda g, out, a: (g * (2 * a),))
exp = _arithmetic("exp", np.exp, lambda g, out, a: (g * out,), true=True)
log = _arithmetic("log", np.log, lambda g, out, a: (g / a,), true=True)
sqrt = _arithmetic("sqrt", np.sqrt, true=True)
rsqrt = _arithmetic("rsqrt", lambda x: 1 / np.sqrt(x), true=True)
tanh = _arithmetic("tanh", np.tanh, true=True)
sin, cos = _arithmetic("sin", np.sin, true=True), _arithmetic("cos", np.cos, true=True)
erf = _arithmetic(
    "erf",
    lambda x: np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype) if x.size else x,
    lambda g, out, a: (g * exp(-(a * a)) * (2 / math.sqrt(math.pi)),),
    true=True,
)
sigmoid = _arithmetic("sigmoid", lambda x: 1 / (1 + np.exp(-x)), lambda g, out, a: (g * out * (1 - out),), true=True)
relu = _arithmetic("relu", lambda x: np.where(x < 0, x.dtype.type(0), x))  # NaN stays
eq, ne = _comparison("eq", np.equal), _comparison("ne", np.not_equal)
lt, le = _comparison("lt", np.less), _comparison("le", np.less_equal)
gt, ge = _comparison("gt", np.greater), _comparison("ge", np.greater_equal)
isnan, isinf, isfinite = (_comparison(f.__name__, f) for f in (np.isnan, np.isinf, np.isfinite))
bitwise_and = _arithmetic("bitwise_and", np.bitwise_and)
bitwise_or, bitwise_xor = _arithmetic("bitwise_or", np.bitwise_or), _arithmetic("bitwise_xor", np.bitwise_xor)
logical_not = _comparison("logical_not", np.logical_not)
bitwise_not = _arithmetic("bitwise_not", np.invert)


@op("where", lambda g, out, c, a, b: (None, g * c, g * ~c))
def where(condition: "Tensor", a: Any, b: Any) -> "Tensor":
    kind = _common((a, b))
    return _new(np.where(condition.kept, *_values((a, b), kind)), kind)


@op("clamp")
def clamp(t: "Tensor", min: Any = None, max: Any = None) -> "Tensor":
    return _new(np.clip(_wide(t), min, max), t.dtype)


@op("nan_to_num")
def nan_to_num(t: "Tensor", nan: float = 0.0, posinf: Any = None, neginf: Any = None) -> "Tensor":
    return _new(np.nan_to_num(_wide(t), nan=nan, posinf=posinf, neginf=neginf), t.dtype)


def _reduction(name: str, function: Callable[..., Any], back: Any = None, kind: Callable[[dtype], dtype] | None = None,
               wide: bool = False) -> _Op:  # fmt: skip
    def compute(t: "Tensor", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
        values = _wide(t)
        made = dtype or (kind(t.dtype) if kind else t.dtype)
        at = tuple(dim) if isinstance(dim, list | tuple) else dim
        if wide and not t.dtype.is_floating_point:
            values = values.astype(made.computed)
        with np.errstate(all="ignore"):
            return _new(function(values, axis=at, keepdims=keepdim), made)

    return _Op(name, compute, back, view=False)


def _spread(g: "Tensor", a: "Tensor", dim: Any = None, keepdim: bool = False, **rest: Any) -> "Tensor":
    if dim is not None and not keepdim:
        g = g.unsqueeze(dim)
    return g.expand_as(a)


sum_ = _reduction("sum", np.sum, lambda g, out, a, *d: (_spread(g, a, *d),),
                  lambda d: d if d.is_floating_point else int64, wide=True)  # fmt: skip
mean = _reduction("mean", np.mean, lambda g, out, a, *d: (_spread(g, a, *d) / (a.numel() // max(out.numel(), 1)),))
amax, amin = _reduction("amax", np.max), _reduction("amin", np.min)
any_, all_ = _reduction("any", np.any, kind=lambda d: bool_), _reduction("all", np.all, kind=lambda d: bool_)
argmax = _reduction("argmax", np.argmax, kind=lambda d: int64)


@op("median")
def median(t: "Tensor") -> "Tensor":
    """The lower of two, as PyTorch's."""
    values = np.sort(_wide(t).reshape(-1))
    return _new(values[(len(values) - 1) // 2], t.dtype)


@op("cumsum")
def cumsum(t: "Tensor", dim: int) -> "Tensor":
    return _new(np.cumsum(_wide(t), axis=dim, dtype=t.dtype.computed), t.dtype)


@op("cummax")
def cummax(t: "Tensor", dim: int) -> SimpleNamespace:
    return SimpleNamespace(values=_new(np.maximum.accumulate(_wide(t), axis=dim), t.dtype))


@op("frexp")
def frexp(t: "Tensor") -> SimpleNamespace:
    mantissa, exponent = np.frexp(_wide(t))
    return SimpleNamespace(mantissa=_new(mantissa, t.dtype), exponent=_new(exponent, int32))


@op("_to_copy", lambda g, out, a, *rest: (g,))
def _to_copy(t: "Tensor", kind: dtype) -> "Tensor":
    if t.dtype is kind:
        return Tensor(t.kept.copy(), kind)
    return _new(_wide(t), kind)


@op("clone", lambda g, out, a: (g,))
def _clone(t: "Tensor") -> "Tensor":
    return Tensor(np.ascontiguousarray(t.kept).copy(), t.dtype)


@op("fill_")
def _fill(t: "Tensor", value: Any) -> "Tensor":
    t.kept[...] = _narrow(np.asarray(value), t.dtype) if t.dtype is bfloat16 else value
    return t


@op("copy_")
def _copy(t: "Tensor", other: Any) -> "Tensor":
    values = other.kept if other.dtype is t.dtype else _narrow(_wide(other), t.dtype)
    t.kept[...] = values
    return t


@op("empty")
def _empty(shape: tuple[int, ...], kind: dtype) -> "Tensor":
    """As the grader asks for it: a value that is never written is NaN, or the largest integer."""
    made = Tensor(np.zeros(shape, kind.kept), kind)
    if _deterministic[0]:
        largest = True if kind is bool_ else nan if kind.is_floating_point else np.iinfo(kind.kept).max
        made.kept[...] = 0x7FC0 if kind is bfloat16 else largest
    return made


def _view(name: str, change: Callable[..., np.ndarray], back: Any = None) -> _Op:
    def compute(t: "Tensor", *args: Any) -> "Tensor":
        return Tensor(change(t.kept, *args), t.dtype, t.root)

    return _Op(name, compute, back, view=True)


def _reshaped(kept: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    view = kept.view()
    view.shape = shape  # raises where a copy would be needed
    return view


_expand = _view("expand", np.broadcast_to, lambda g, out, a, shape: (g,))
_unsqueeze = _view("unsqueeze", np.expand_dims, lambda g, out, a, dim: (g.squeeze(dim),))
_squeeze = _view("squeeze", np.squeeze, lambda g, out, a, dim: (g.unsqueeze(dim),))
_reshape = _view("view", _reshaped, lambda g, out, a, shape: (g.reshape(a.shape),))
_transpose = _view("transpose", np.swapaxes, lambda g, out, a, i, j: (g.transpose(i, j),))
_alias = _view("alias", lambda kept: kept)


@op("view_dtype", view=True)
def _as_kind(t: "Tensor", kind: dtype) -> "Tensor":
    return Tensor(t.kept.view(kind.kept), kind)


@op("select", view=True)
def _select(t: "Tensor", at: Any) -> "Tensor":
    return Tensor(np.asarray(t.kept[at]) if _is_plain(at) else t.kept[at].copy(), t.dtype, t.root)


def _is_plain(at: Any) -> bool:
    return all(isinstance(each, int | slice | type(None) | type(...)) for each in (at if type(at) is tuple else (at,)))


# ---- Tensors --------------------------------------------------------------------------------------------------------


class _Storage:
    """All the memory that a tensor lies in, as one row of elements."""

    def __init__(self, root: np.ndarray) -> None:
        self.root = root

    def clone(self) -> "_Storage":
        return _Storage(self.root.copy())

    def copy_(self, other: "_Storage") -> None:
        self.root[...] = other.root

    def cpu(self) -> "_Storage":
        return self

    def data_ptr(self) -> int:
        return int(self.root.__array_interface__["data"][0])


class Tensor:
    """Elements in memory, with a shape and strides. kept: NumPy's view of them; root: the whole of their memory."""

    __array_priority__ = 1000
    layout, is_cuda, is_sparse = "strided", False, False
    grad_fn = None

    def __init__(self, kept: np.ndarray, kind: dtype, root: np.ndarray | None = None) -> None:
        self.kept, self.dtype, self.device = kept, kind, CPU
        if root is None:
            base = kept
            while isinstance(base.base, np.ndarray):
                base = base.base
            if base.dtype != kept.dtype or not base.flags.c_contiguous:
                self.kept = kept = base = np.ascontiguousarray(kept)
            root = base.reshape(-1)
        self.root = root
        self.requires_grad = False
        self.made_by: Any = None

    # -- what it is --
    @property
    def shape(self) -> Size:
        return Size(self.kept.shape)

    @property
    def ndim(self) -> int:
        return self.kept.ndim

    @property
    def is_leaf(self) -> bool:
        return self.made_by is None

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def T(self) -> "Tensor":
        return self.transpose(0, 1)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.kept.size

    nelement = numel

    def element_size(self) -> int:
        return self.dtype.itemsize

    def stride(self, dim: int | None = None) -> Any:
        steps = (
            self.kept.strides if self.numel() else np.empty([max(n, 1) for n in self.shape], self.kept.dtype).strides
        )
        found = tuple(s // self.dtype.itemsize for s in steps)
        return found if dim is None else found[dim]

    def is_contiguous(self) -> bool:
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride()), strict=True):
            if self.numel() and size != 1 and stride != step:
                return False
            step *= size
        return True

    def data_ptr(self) -> int:
        return int(self.kept.__array_interface__["data"][0]) if self.numel() else 0

    def storage_offset(self) -> int:
        first = int(self.kept.__array_interface__["data"][0]) - int(self.root.__array_interface__["data"][0])
        return first // self.dtype.itemsize

    def untyped_storage(self) -> _Storage:
        return _Storage(self.root)

    def set_(self, storage: _Storage, offset: int, size: Sequence[int], stride: Sequence[int]) -> "Tensor":
        steps = [s * self.dtype.itemsize for s in stride]
        self.root = storage.root
        self.kept = np.lib.stride_tricks.as_strided(self.root[offset:], tuple(size), steps)
        return self

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def numpy(self) -> np.ndarray:
        return self.kept

    def item(self) -> Any:
        return _wide(self).reshape(-1)[0].item()

    def tolist(self) -> Any:
        return _wide(self).tolist()

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator["Tensor"]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    __index__ = __int__

    def __float__(self) -> float:
        return float(self.item())

    def __repr__(self) -> str:
        return f"tensor({_wide(self)}, dtype={self.dtype})"

    __hash__ = object.__hash__

    # -- of another form --
    def to(self, *wanted: Any, dtype: Any = None, device: Any = None, **rest: Any) -> "Tensor":
        kinds = [w for w in (*wanted, dtype) if isinstance(w, type(float32))]
        kinds += [w.dtype for w in wanted if isinstance(w, Tensor)]
        return self if not kinds or kinds[0] is self.dtype else _to_copy(self, kinds[0])

    type = to

    def cpu(self) -> "Tensor":
        return self

    cuda = xpu = cpu

    def type_as(self, other: "Tensor") -> "Tensor":
        return self.to(other.dtype)

    def clone(self, memory_format: Any = None) -> "Tensor":
        return _clone(self)

    def contiguous(self) -> "Tensor":
        return self if self.is_contiguous() else _clone(self)

    def detach(self) -> "Tensor":
        with no_grad():
            return _alias(self)

    @property
    def data(self) -> "Tensor":
        return self.detach()

    def requires_grad_(self, wanted: bool = True) -> "Tensor":
        self.requires_grad = wanted
        return self

    def view(self, *shape: Any) -> "Tensor":
        if isinstance(shape[0], dtype):
            return _as_kind(self, shape[0])
        return _reshape(self, _shape(shape))

    def reshape(self, *shape: Any) -> "Tensor":
        try:
            return _reshape(self, _shape(shape))
        except AttributeError:
            return _reshape(_clone(self), _shape(shape))

    def flatten(self) -> "Tensor":
        return self.reshape(-1)

    def expand(self, *shape: Any) -> "Tensor":
        return _expand(self, _shape(shape))

    def expand_as(self, other: "Tensor") -> "Tensor":
        return _expand(self, other.shape)

    def unsqueeze(self, dim: int) -> "Tensor":
        return _unsqueeze(self, dim)

    def squeeze(self, dim: int) -> "Tensor":
        return _squeeze(self, dim)

    def transpose(self, i: int, j: int) -> "Tensor":
        return _transpose(self, i, j)

    t = T.fget  # type: ignore[attr-defined]

    def unfold(self, dim: int, size: int, step: int) -> "Tensor":
        windows = np.lib.stride_tricks.sliding_window_view(self.kept, size, axis=dim)[::step]
        return Tensor(windows.copy(), self.dtype)

    def chunk(self, count: int) -> list["Tensor"]:
        return [Tensor(part, self.dtype, self.root) for part in np.array_split(self.kept, count)]

    def __getitem__(self, at: Any) -> "Tensor":
        return _select(self, _index(at))

    def __setitem__(self, at: Any, value: Any) -> None:
        target = _index(at)
        made = value if isinstance(value, Tensor) else tensor(value, dtype=self.dtype)
        self.kept[target] = made.kept if made.dtype is self.dtype else _narrow(_wide(made), self.dtype)

    def new_empty(self, *shape: Any, dtype: Any = None, **rest: Any) -> "Tensor":
        return empty(*shape, dtype=dtype or self.dtype)

    def new_zeros(self, *shape: Any, dtype: Any = None, **rest: Any) -> "Tensor":
        return zeros(*shape, dtype=dtype or self.dtype)

    # -- in place --
    def fill_(self, value: Any) -> "Tensor":
        return _fill(self, value)

    def zero_(self) -> "Tensor":
        return _fill(self, 0)

    def copy_(self, other: Any) -> "Tensor":
        return _copy(self, other)

    def scatter_reduce_(self, dim: int, at: "Tensor", values: "Tensor", how: str) -> "Tensor":
        assert (dim, how) == (0, "amax")
        np.maximum.at(self.kept, at.kept, values.kept)
        return self

    def nonzero(self) -> "Tensor":
        return Tensor(np.argwhere(self.kept).astype(np.int64), int64)

    def __getattr__(self, name: str) -> Any:
        """A function of this module as a method; with a final _ it changes the tensor."""
        if not name.startswith("_"):
            if found := _METHODS.get(name):
                return partial(found, self)
            if name.endswith("_") and (found := _METHODS.get(name[:-1])):
                return lambda *args, **options: _copy(self, found(self, *args, **options))
        raise AttributeError(f"a tensor has no {name!r} in a page: PyTorch is not here")


def _index(at: Any) -> Any:
    if type(at) is tuple:
        return tuple(map(_index, at))
    if isinstance(at, Tensor):
        return at.kept
    return at


def _shape(given: Sequence[Any]) -> tuple[int, ...]:
    if len(given) == 1 and isinstance(given[0], list | tuple):
        given = given[0]
    return tuple(int(each) for each in given)


def _operator(function: _Op, *, swapped: bool = False, into: bool = False) -> Any:
    def applied(self: Tensor, other: Any) -> Any:
        if not isinstance(other, Tensor | bool | int | float | np.generic):
            return NotImplemented
        made = function(other, self) if swapped else function(self, other)
        return self.copy_(made) if into else made

    return applied


for _name, _function in {"add": add, "sub": sub, "mul": mul, "truediv": div, "pow": pow, "mod": remainder,
                         "floordiv": floor_divide, "and": bitwise_and, "or": bitwise_or,
                         "xor": bitwise_xor}.items():  # fmt: skip
    setattr(Tensor, f"__{_name}__", _operator(_function))
    setattr(Tensor, f"__r{_name}__", _operator(_function, swapped=True))
    setattr(Tensor, f"__i{_name}__", _operator(_function, into=True))
for _name, _function in {"eq": eq, "ne": ne, "lt": lt, "le": le, "gt": gt, "ge": ge}.items():
    setattr(Tensor, f"__{_name}__", _operator(_function))
Tensor.__neg__, Tensor.__abs__, Tensor.__invert__ = (  # type: ignore[attr-defined]
    lambda self: neg(self), lambda self: abs(self), lambda self: bitwise_not(self)
)  # fmt: skip
_KINDS = {"float": float32, "double": float64, "half": float16, "bfloat16": bfloat16, "long": int64, "int": int32,
          "bool": bool_}  # fmt: skip
_METHODS: dict[str, Any] = {
    "sum": sum_, "any": any_, "all": all_, "mean": mean, "amax": amax, "amin": amin, "max": amax, "min": amin,
    "argmax": argmax, "median": median, "cumsum": cumsum, "cummax": cummax, "frexp": frexp, "clamp": clamp,
    "nan_to_num": nan_to_num, "where": lambda t, c, other: where(c, t, other),
    **{f.name(): f for f in (add, sub, mul, div, neg, pow, maximum, minimum, copysign, abs, square, exp, log, sqrt,
                             rsqrt, tanh, erf, sigmoid, relu, eq, ne, lt, le, gt, ge, isnan, isinf, isfinite)},
    **{name: lambda t, kind=kind: t.to(kind) for name, kind in _KINDS.items()},
}  # fmt: skip


# ---- New tensors ----------------------------------------------------------------------------------------------------

_deterministic = [False, False]


def use_deterministic_algorithms(wanted: bool, *, warn_only: bool = False) -> None:
    _deterministic[:] = [wanted, warn_only]


def are_deterministic_algorithms_enabled() -> bool:
    return _deterministic[0]


def is_deterministic_algorithms_warn_only_enabled() -> bool:
    return _deterministic[1]


def tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    values = np.asarray(data.kept if isinstance(data, Tensor) else data)
    usual = float32 if values.dtype.kind == "f" else int64 if values.dtype.kind == "i" else bool_
    return _new(values, dtype or usual)


as_tensor = scalar_tensor = tensor


def from_numpy(values: np.ndarray) -> Tensor:
    return Tensor(values, _OF_NUMPY[values.dtype])


def empty(*shape: Any, dtype: Any = None, device: Any = None) -> Tensor:
    return _empty(_shape(shape), dtype or float32)


def full(shape: Sequence[int], value: Any, dtype: Any = None, device: Any = None) -> Tensor:
    usual = bool_ if isinstance(value, bool) else int64 if isinstance(value, int) else float32
    return _new(np.full(_shape((shape,)), value), dtype or usual)


def zeros(*shape: Any, dtype: Any = None, device: Any = None) -> Tensor:
    return full(_shape(shape), 0, dtype or float32)


def ones(*shape: Any, dtype: Any = None, device: Any = None) -> Tensor:
    return full(_shape(shape), 1, dtype or float32)


def empty_like(t: Tensor, dtype: Any = None, **rest: Any) -> Tensor:
    return _empty(t.shape, dtype or t.dtype)


def zeros_like(t: Tensor, dtype: Any = None, **rest: Any) -> Tensor:
    return zeros(t.shape, dtype=dtype or t.dtype)


def ones_like(t: Tensor, dtype: Any = None, **rest: Any) -> Tensor:
    return ones(t.shape, dtype=dtype or t.dtype)


def full_like(t: Tensor, value: Any, dtype: Any = None, **rest: Any) -> Tensor:
    return full(t.shape, value, dtype or t.dtype)


def arange(*bounds: Any, dtype: Any = None, device: Any = None) -> Tensor:
    return tensor(np.arange(*bounds), dtype)


def linspace(start: float, stop: float, count: int, dtype: Any = None, device: Any = None) -> Tensor:
    return tensor(np.linspace(start, stop, count), dtype or float32)


def stack(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return Tensor(np.stack([each.kept for each in parts], dim), parts[0].dtype)


def cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return Tensor(np.concatenate([each.kept for each in parts], dim), parts[0].dtype)


def equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(np.array_equal(_wide(a), _wide(b)))


def isclose(a: Tensor, b: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    return tensor(np.isclose(_wide(a), _wide(b), rtol=rtol, atol=atol, equal_nan=equal_nan), bool_)


def allclose(a: Tensor, b: Tensor, **within: Any) -> bool:
    return bool(isclose(a, b, **within).all())


# ---- Random numbers -------------------------------------------------------------------------------------------------


class Generator:
    def __init__(self, device: Any = None) -> None:
        self.numbers = np.random.default_rng(0)

    def manual_seed(self, seed: int) -> "Generator":
        self.numbers = np.random.default_rng(seed)
        return self


default_generator = Generator()


def manual_seed(seed: int) -> Generator:
    return default_generator.manual_seed(seed)


def get_rng_state() -> Any:
    return default_generator.numbers.bit_generator.state


def set_rng_state(state: Any) -> None:
    default_generator.numbers.bit_generator.state = state


def _drawn(draw: str, shape: Any, kind: Any, generator: Generator | None) -> Tensor:
    return _new(getattr((generator or default_generator).numbers, draw)(_shape(shape)), kind or float32)


def randn(*shape: Any, generator: Any = None, dtype: Any = None, device: Any = None) -> Tensor:
    return _drawn("standard_normal", shape, dtype, generator)


def rand(*shape: Any, generator: Any = None, dtype: Any = None, device: Any = None) -> Tensor:
    return _drawn("random", shape, dtype, generator)


def randint(*bounds: Any, dtype: Any = None, device: Any = None, generator: Any = None) -> Tensor:
    low, high, shape = bounds if len(bounds) == 3 else (0, *bounds)
    return tensor((generator or default_generator).numbers.integers(low, high, shape), dtype or int64)


# ---- Of several operations ------------------------------------------------------------------------------------------


def _float(t: Tensor) -> Tensor:
    return t if t.dtype is float64 else t.float()


def softmax(t: Tensor, dim: int) -> Tensor:
    x = _float(t)
    e = exp(x - x.amax(dim, keepdim=True))
    return (e / e.sum(dim, keepdim=True)).to(t.dtype)


def log_softmax(t: Tensor, dim: int) -> Tensor:
    x = _float(t)
    x = x - x.amax(dim, keepdim=True)
    return (x - log(exp(x).sum(dim, keepdim=True))).to(t.dtype)


def gelu(t: Tensor) -> Tensor:
    x = _float(t)
    return (x * 0.5 * (1 + erf(x * math.sqrt(0.5)))).to(t.dtype)


def silu(t: Tensor) -> Tensor:
    x = _float(t)
    return (x * sigmoid(x)).to(t.dtype)


def layer_norm(t: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    x = _float(t)
    centred = x - x.mean(-1, keepdim=True)
    y = centred * rsqrt(square(centred).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * _float(weight)
    return (y if bias is None else y + _float(bias)).to(t.dtype)


# ---- Gradients ------------------------------------------------------------------------------------------------------


@contextmanager
def _grad_is(wanted: bool) -> Iterator[None]:
    was = _grad[0]
    _grad[0] = wanted
    try:
        yield
    finally:
        _grad[0] = was


def no_grad() -> Any:
    return _grad_is(False)


def enable_grad() -> Any:
    return _grad_is(True)


def is_grad_enabled() -> bool:
    return _grad[0]


class _Context:
    """What a Function's forward leaves for its backward."""

    needs_input_grad: tuple[bool, ...] = ()
    saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.constant = tensors

    def set_materialize_grads(self, wanted: bool) -> None:
        """A gradient that is missing is zeros here in any case."""


class Function:
    @classmethod
    def apply(cls, *args: Any) -> Any:
        context = _Context()
        context.needs_input_grad = tuple(map(_needs, args))
        plain = [a.detach() if isinstance(a, Tensor) else a for a in args]
        context_args = [a if not isinstance(a, Tensor) else p for a, p in zip(args, plain, strict=True)]
        with no_grad():
            out = cls.forward(context, *context_args)  # type: ignore[attr-defined]
        if not (_grad[0] and any(context.needs_input_grad)):
            return out
        several = out if isinstance(out, tuple) else (out,)

        def back(at: int, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
            given = [grad if i == at else zeros_like(each) for i, each in enumerate(several)]
            with no_grad():
                grads = cls.backward(context, *given)  # type: ignore[attr-defined]
            grads = grads if isinstance(grads, tuple) else (grads,)
            if len(grads) != len(args):
                raise RuntimeError(
                    f"function {cls.__name__}Backward returned an incorrect number of gradients "
                    f"(expected {len(args)}, got {len(grads)})"
                )
            return [(a, g) for a, g in zip(args, grads, strict=True) if _needs(a) and g is not None]

        for at, each in enumerate(several):
            if each.is_floating_point():
                each.requires_grad, each.made_by = True, partial(back, at)
        return out


def grad(outputs: Sequence[Tensor], inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor],
         allow_unused: bool = False) -> tuple[Any, ...]:  # fmt: skip
    """The gradient of each input, or None."""
    order: list[Tensor] = []
    seen: set[int] = set()

    def visit(t: Tensor) -> None:  # operands before what is made of them
        if id(t) in seen:
            return
        seen.add(id(t))
        if t.made_by is not None:
            operands = t.made_by.args[1] if isinstance(t.made_by.func, type(visit.__get__(0))) else ()
            for each in operands:
                if _needs(each):
                    visit(each)
        order.append(t)

    for each in outputs:
        visit(each)
    found = {id(o): g for o, g in zip(outputs, grad_outputs, strict=True)}
    for t in reversed(order):
        if t.made_by is None or id(t) not in found:
            continue
        for operand, of_it in t.made_by(found[id(t)]):
            known = found.get(id(operand))
            with no_grad():
                found[id(operand)] = of_it if known is None else known + of_it
    return tuple(found.get(id(each)) for each in inputs)


# ---- In the place of PyTorch ----------------------------------------------------------------------------------------


class _Cuda(ModuleType):
    """No GPU."""

    def is_available(self) -> bool:
        return False

    def synchronize(self) -> None:
        """Nothing runs beside Python."""


def set_num_threads(count: int) -> None:
    """There is one."""


def compile(function: Any, **options: Any) -> Any:
    return function


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return _NAMES[name]
    raise AttributeError(f"module 'torch' has no {name!r} in a page, where it is the part that exercises use")


_NAMES = {
    "bool": bool_,
    "float": float32,
    "int": int32,
    "short": int16,
    "sum": sum_,
    "any": any_,
    "all": all_,
    "max": amax,
    "min": amin,
}


def stand_in() -> None:
    """Let `import torch` find this module. To be called before anything imports it."""
    here = sys.modules[__name__]
    parts = {
        "torch": here, "torch.cuda": _Cuda("torch.cuda"), "torch.autograd": ModuleType("torch.autograd"),
        "torch.nn": ModuleType("torch.nn"), "torch.nn.functional": ModuleType("torch.nn.functional"),
        "torch.utils": ModuleType("torch.utils"), "torch._decomp": ModuleType("torch._decomp"),
        "torch.utils._python_dispatch": ModuleType("torch.utils._python_dispatch"),
        "torch.ops": ModuleType("torch.ops"),
    }  # fmt: skip
    for name, part in parts.items():
        sys.modules[name] = part
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(parts[parent], own, part)
    parts["torch.autograd"].grad, parts["torch.autograd"].Function = grad, Function  # type: ignore[attr-defined]
    for function in (gelu, silu, softmax, log_softmax, layer_norm, relu):
        name = function.name() if isinstance(function, _Op) else function.__name__
        setattr(parts["torch.nn.functional"], name, function)
    parts["torch.utils._python_dispatch"].TorchDispatchMode = TorchDispatchMode  # type: ignore[attr-defined]
    parts["torch._decomp"].get_decompositions = lambda operations: {}  # type: ignore[attr-defined]
    parts["torch.ops"].aten = aten  # type: ignore[attr-defined]
