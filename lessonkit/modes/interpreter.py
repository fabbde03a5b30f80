"""Triton's interpreter, made honest: every address is checked, every byte counted, and a bf16 dot is right.

Without a GPU each program of the grid runs in turn in NumPy. That shows wrong values; it does not show a read
past the end whose value is masked off later, so the loads and stores are watched here.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lessonkit.base.device import INTERPRETED
from lessonkit.base.errors import BlockAsCondition, OutOfBounds
from lessonkit.base.files import ROOT
from lessonkit.base.traffic import Traffic, watching

import numpy as np
import torch
import triton


@dataclass(frozen=True)
class Access:
    """One load, store or atomic update of one program.

    kind       load, store or update
    argument   the kernel's argument whose tensor it touches, `tensor`
    launch     the number of the launch since watching began, from 1; `kernel` is what was launched
    program    its three ids
    line       where the kernel asks for it: (file, line)
    addresses  [*block], in bytes; where `live` is false the mask leaves the element out
    """

    kind: str
    kernel: str
    launch: int
    program: tuple[int, int, int]
    line: tuple[str, int]
    argument: str
    tensor: torch.Tensor
    addresses: np.ndarray
    live: np.ndarray


OWN = (str(Path(triton.__file__).parent), __file__)  # code between a kernel's line and the native access


def _line() -> tuple[str, int]:
    """The line of the kernel, or of a device function of a lesson, that is being interpreted."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename.startswith(OWN) or frame.f_code.co_filename.startswith("<")):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


@dataclass
class _Watch:
    """Stands where Triton keeps its native load/store module."""

    native: Any
    traffic: Traffic
    observe: Callable[[Access], None] | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # by the name of the kernel's argument
    argument: str = ""  # the one from which the addresses of this access were computed, if that is known
    poison: int = 0  # which garbage a masked element of a load without `other` holds
    padded: bool = False  # whether the load that is being made has an `other`: a scalar 0 gets lost on its way
    _spans: list[tuple[int, int]] = field(default_factory=list)

    def begin(self, tensors: dict[str, torch.Tensor]) -> None:
        """A launch begins: these are what it may touch, each from its first byte to the end of its last element."""
        self.tensors, self._spans = tensors, []
        for t in tensors.values():
            if t.numel():
                last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
                self._spans.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()))

    def _check(self, what: str, ptrs: np.ndarray, mask: np.ndarray, size: int) -> int:
        addresses = ptrs[np.broadcast_to(mask, ptrs.shape).astype(bool)].astype(np.int64)
        legal = np.zeros(addresses.shape, dtype=bool)
        for begin, end in self._spans:
            legal |= (addresses >= begin) & (addresses + size <= end)
        if not legal.all():
            wrong = int(np.count_nonzero(~legal))
            first = int(addresses[~legal][0])
            near = min(self.tensors, key=lambda name: abs(first - self.tensors[name].data_ptr()), default="")
            where = ""
            if name := self.argument or near:
                t = self.tensors[name]
                element = (first - t.data_ptr()) // t.element_size()
                where = f": the first is element {element} of {name}, whose shape is {tuple(t.shape)}"
            raise OutOfBounds(
                f"{wrong} of {addresses.size} lanes {what} outside every tensor of the launch{where}: mask them"
            )
        if self.observe:
            self._tell(what, ptrs, mask)
        return int(addresses.size) * size

    def _tell(self, what: str, ptrs: np.ndarray, mask: np.ndarray) -> None:
        from triton.runtime import interpreter

        live = np.broadcast_to(mask, ptrs.shape).astype(bool)
        first = int(ptrs[live][0]) if live.any() else 0
        begins = {name: t.data_ptr() for name, t in self.tensors.items() if t.data_ptr() <= first}
        name = self.argument or max(begins, key=lambda name: begins[name], default="")
        if self.observe and name:
            self.observe(
                Access(
                    what,
                    self.traffic.launches[-1],
                    len(self.traffic.launches),
                    interpreter.interpreter_builder.grid_idx,
                    _line(),
                    name,
                    self.tensors[name],
                    ptrs.astype(np.int64),
                    live,
                )
            )

    def load(self, ptrs: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.traffic.read += self._check("load", ptrs, mask, np.dtype(dtype).itemsize)
        return self.native.load(ptrs, mask, other, dtype)

    def poisoning(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """The interpreter's masked load, which without `other` gives 0, as undefined as the contract says."""
        from triton.runtime.interpreter import TensorHandle

        def poisoned(ptrs: Any, mask: Any, other: Any, *rest: Any, **options: Any) -> Any:
            if other is None and not self.padded and not np.all(mask.data):
                kind = ptrs.get_element_ty()
                other = TensorHandle(garbage(kind, ptrs.data.shape, self.poison), kind)
            return load(ptrs, mask, other, *rest, **options)

        return poisoned

    def noting_other(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """tl.load that says first whether it has an `other`."""

        def noted(semantic: Any, ptr: Any, mask: Any, other: Any, *options: Any) -> Any:
            self.padded = other is not None
            try:
                return load(semantic, ptr, mask, other, *options)
            finally:
                self.padded = False

        return noted

    def store(self, ptrs: Any, value: Any, mask: Any) -> Any:
        self.traffic.written += self._check("store", ptrs, mask, value.dtype.itemsize)
        return self.native.store(ptrs, value, mask)

    def atomic_rmw(self, op: Any, ptrs: Any, value: Any, mask: Any, sem: Any) -> Any:
        self.traffic.written += self._check("update", ptrs, mask, value.dtype.itemsize)
        return self.native.atomic_rmw(op, ptrs, value, mask, sem)

    def atomic_cas(self, ptrs: Any, expected: Any, value: Any, sem: Any) -> Any:
        self.traffic.written += self._check("update", ptrs, np.ones(ptrs.shape, bool), value.dtype.itemsize)
        return self.native.atomic_cas(ptrs, expected, value, sem)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def converted(self, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Give each argument a pointer type of its own: what is computed from a pointer keeps the type's identity."""
        from triton import language as tl

        def convert_marked(arg: Any) -> Any:
            pointer = convert(arg)
            if hasattr(arg, "data_ptr"):
                names = (name for name, t in self.tensors.items() if t.data_ptr() == arg.data_ptr())
                pointer.type = pointer.handle.dtype = tl.pointer_type(pointer.type.element_ty)
                pointer.type.argument = next(names, "")
            return pointer

        return convert_marked

    def noting_whose(self, access: Callable[..., Any], at: int) -> Callable[..., Any]:
        """An access of the interpreter that says first of which argument its operand number `at` is a pointer."""

        def noted(*operands: Any, **options: Any) -> Any:
            self.argument = getattr(operands[at].dtype, "argument", "")
            return access(*operands, **options)

        return noted


def garbage(kind: Any, shape: tuple[int, ...], poison: int) -> Any:
    """What undefined elements of a Triton type hold, in NumPy's type for it.

    Of an integer its largest value, which is odd. Of a float NaN if `poison` is even; tl.max and tl.min drop NaN, so if
    it is odd the largest value and the smallest in turn.
    """
    from triton import language as tl
    from triton.runtime.interpreter import _get_np_dtype

    usual = _get_np_dtype(kind)
    if kind.is_floating() and not np.issubdtype(usual, np.floating):  # the bits of bfloat16 and float8
        exact = getattr(torch, {"bf16": "bfloat16", "fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2"}[kind.name])
        largest, nan = torch.finfo(exact).max, torch.tensor(torch.nan).to(exact).view(KINDS[kind.primitive_bitwidth])
        pair = torch.tensor([largest, -largest]).to(exact).view(KINDS[kind.primitive_bitwidth]).numpy()
        return np.resize(pair if poison % 2 else nan.numpy(), shape).astype(usual)
    if kind.is_floating():
        most = np.finfo(usual).max
        return np.resize(np.array([most, -most] if poison % 2 else [np.nan], usual), shape)
    return np.full(shape, True if kind == tl.int1 or usual == np.bool_ else np.iinfo(usual).max, usual)


KINDS = {8: torch.uint8, 16: torch.uint16}
POINTER = {"create_masked_load": 0, "create_masked_store": 0, "create_atomic_cas": 0, "create_atomic_rmw": 1}


@contextmanager
def watched(observe: Callable[[Access], None] | None = None, *, poison: int = 0) -> Iterator[Traffic]:
    """Check and count every access of the kernels launched inside, and tell `observe` of each.

    On a GPU it watches nothing.

    What a load leaves undefined is garbage (see `garbage`): a result that depends on it is wrong.
    """
    traffic = Traffic()
    if not INTERPRETED:
        yield traffic
        return
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    watch = _Watch(interpreter._interpreter, traffic, observe, poison=poison)
    launch = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        traffic.launches.append(self.fn.__name__)
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        addressed = {k: a for k, a in given.items() if hasattr(a, "data_ptr") or hasattr(a, "block_shape")}
        watch.begin({k: getattr(a, "base", a) for k, a in addressed.items()})
        return launch(self, *args, **kwargs)

    builder, convert = interpreter.interpreter_builder, interpreter._implicit_cvt
    accesses = {name: getattr(builder, name) for name in POINTER}
    watching_them = {**accesses, "create_masked_load": watch.poisoning(accesses["create_masked_load"])}
    interpreter._interpreter, interpreter.GridExecutor.__call__ = watch, call
    interpreter._implicit_cvt = watch.converted(convert)
    load = "_load_legacy" if hasattr(TritonSemantic, "_load_legacy") else "load"  # one with `load` from Triton 3.8 on
    loads = getattr(TritonSemantic, load)
    setattr(TritonSemantic, load, watch.noting_other(loads))
    for name, access in watching_them.items():
        setattr(builder, name, watch.noting_whose(access, POINTER[name]))
    watching.append(traffic)
    try:
        yield traffic
    finally:
        watching.pop()
        for name, access in accesses.items():
            setattr(builder, name, access)
        interpreter._implicit_cvt = convert
        setattr(TritonSemantic, load, loads)
        interpreter._interpreter, interpreter.GridExecutor.__call__ = watch.native, launch


def _widen(bits: Any) -> Any:
    """bfloat16 bits -> float32, exactly."""
    return (np.asarray(bits).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _narrow(values: Any) -> Any:
    """float32 -> bfloat16 bits, rounded to nearest even as the GPU does."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy().reshape(values.shape)


def mend_errors() -> None:
    """Let a launch raise what this module finds in a kernel, and not Triton's error that wraps it."""
    from triton.runtime import interpreter
    from triton.runtime.errors import InterpreterError

    launch = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return launch(self, *args, **kwargs)
        except InterpreterError as error:
            cause: BaseException | None = error
            while isinstance(cause, InterpreterError):  # one for each function between the kernel and the mistake
                cause = cause.__cause__
            if isinstance(cause, OutOfBounds | BlockAsCondition):
                raise cause from None
            raise

    interpreter.GridExecutor.__call__ = call


def mend_conditions() -> None:
    """Refuse a block of several elements where Python asks for one truth value: `if block`, `a and b`, `min(a, b)`.

    To the interpreter each such block is true (Triton 3.6.0 and 3.7.1). A compiler refuses `if`, and for the others
    works element by element.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def truth(self: Any) -> bool:
        data = self.handle.data
        if data.size == 1:
            return bool(data)
        if sys._getframe(1).f_code.co_filename.startswith(OWN[0]):  # Triton's `if other`: whether there is one
            return True
        file, line = _line()
        place = Path(file)
        place = place.relative_to(ROOT) if place.is_relative_to(ROOT) else place
        raise BlockAsCondition(
            f"{place}:{line}: a block of shape {data.shape} is no single truth value, which if, while, and, or, not, "
            "min and max need. Choose for each element with tl.where, join masks with &, | and ~, compare with "
            "tl.minimum and tl.maximum, or reduce the block to one value with tl.max"
        )

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__bool__", truth)

    interpreter._patch_lang_tensor = patch_tensor


def mend_bfloat16() -> None:
    """Make bfloat16 arithmetic right under the interpreter.

    NumPy has no bfloat16, so the interpreter holds its 16 bits as integers. Then x + y, exp(x), tl.sum(x) or
    tl.dot(a, b) compute with those integers: dot errors of 1e10, seen in Triton 3.7.1 and 3.9.0. A conversion from
    float32 truncates. Here operands are widened to float32 first, which is exact, and a result is rounded once. tl.sum
    rounds after each of its additions, as compiled code does.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def is_bf16(x: Any) -> bool:
        return isinstance(x, handle) and x.dtype.scalar == tl.bfloat16

    def widen(x: Any) -> Any:
        return handle(_widen(x.data), tl.float32) if is_bf16(x) else x

    def arithmetic(native: Any) -> Any:
        def mended(self: Any, *operands: Any) -> Any:
            out = native(self, *map(widen, operands))
            if is_bf16(operands[0]) and out.data.dtype == np.float32 and native.__name__ != "create_dot":
                return handle(_narrow(out.data), tl.bfloat16)
            return out

        return mended

    def conversion(native: Any) -> Any:
        def mended(self: Any, src: Any, dst_type: Any, *rounding: Any) -> Any:
            if dst_type.scalar == tl.bfloat16 and not is_bf16(src):
                return handle(_narrow(src.data), tl.bfloat16)
            return native(self, widen(src), dst_type, *rounding)

        return mended

    def constant(self: Any, value: float) -> Any:
        return handle(_narrow(np.array([value])), tl.bfloat16)

    def total(self: Any, x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return native_sum(self, x)
        bits = x.handle.data
        parts = np.moveaxis(bits, self.axis, 0) if self.axis is not None else bits.reshape(-1)
        while len(parts) > 1:  # a power of 2
            first, second = np.split(parts, 2)
            parts = _narrow(_widen(first) + _widen(second))
        kept = np.expand_dims(parts[0], self.axis if self.axis is not None else tuple(range(bits.ndim)))
        return self.to_tensor(kept if self.keep_dims else parts[0], x.dtype)

    native_sum, interpreter.ReduceOps.sum = interpreter.ReduceOps.sum, total
    builder.get_bf16 = constant  # a scalar beside a bf16 tensor: the interpreter has none
    for name in ("binary_op", "unary_op", "create_fma", "create_clampf", "create_dot"):
        setattr(builder, name, arithmetic(getattr(builder, name)))
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(builder, name, conversion(getattr(builder, name)))


def mend_float8() -> None:
    """Make conversions to and from float8 right under the interpreter: PyTorch's, which round to nearest even.

    The interpreter's own cut the mantissa off, and read e4m3's NaN as 480 (seen in Triton 3.7.1).
    """
    from triton import language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    kinds = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def wide(x: Any) -> Any:
        if (kind := kinds.get(x.dtype.scalar)) is None:
            return x
        bits = torch.from_numpy(np.ascontiguousarray(x.data)).view(kind)
        return handle(bits.float().numpy().reshape(x.data.shape), tl.float32)

    def conversion(native: Any) -> Any:
        def mended(self: Any, src: Any, dst_type: Any, *rounding: Any) -> Any:
            src = wide(src)
            if (kind := kinds.get(dst_type.scalar)) is None:
                return src if src.dtype == dst_type.scalar else native(self, src, dst_type, *rounding)
            values = native(self, src, tl.float32).data if src.dtype != tl.float32 else src.data
            bits = torch.from_numpy(np.ascontiguousarray(values)).to(kind).view(torch.uint8)
            return handle(bits.numpy().reshape(values.shape), dst_type.scalar)

        return mended

    def dot(native: Any) -> Any:
        return lambda self, a, b, *rest: native(self, wide(a), wide(b), *rest)

    builder.create_dot = dot(builder.create_dot)
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(builder, name, conversion(getattr(builder, name)))


def mend_masks() -> None:
    """Let a comparison of scalars be a part of a block's mask, as in `(rows < M) & (program == 0)`.

    The interpreter spreads it over the block as integers, since it keeps the operands' type for the comparison's. The
    loads and stores of Triton 3.9 take only booleans for a mask.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    native = builder.create_splat

    def splat(self: Any, type_or_shape: Any, scalar: Any) -> Any:
        return native(self, type_or_shape, handle(scalar.data, tl.int1) if scalar.data.dtype == np.bool_ else scalar)

    builder.create_splat = splat


def mend_nan() -> None:
    """Let maximum, minimum and clamp treat NaN as a GPU does: they drop it, unless propagate_nan asks for it.

    The interpreter keeps it (Triton 3.7.1). The compiled code is max.f32 and min.f32, or, with PropagateNan.ALL,
    max.NaN.f32 and min.NaN.f32. tl.max and tl.min are made of the first two. The interpreter's drop NaN, too.
    """
    from triton._C.libtriton import ir
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    native = builder.create_clampf

    def clamp(self: Any, x: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
        if propagate_nan == ir.PROPAGATE_NAN.ALL:
            return native(self, x, low, high, propagate_nan)
        return self.create_minnumf(self.create_maxnumf(x, low), high)

    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    builder.create_clampf = clamp


def mend_calls() -> None:
    """Let a call of a device function (tl.sum, tl.cdiv, a lesson's helper) cost no more than the call.

    At each call the interpreter puts its functions into triton.language again, and looks through all of it for that.
    This takes half a millisecond, a third of the time of a kernel with reductions (Triton 3.7.1). Here, what is there
    already stays. Also, for each tensor that it makes, the interpreter writes a table of all dtypes, to look one up.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        modules = [m for m in fn.__globals__.values() if m is tl or m is tl.core]
        signs = [tl.tensor.__str__, *(m.range for m in modules)]  # Triton's own, unless patched
        if modules and all(sign.__module__ == interpreter.__name__ for sign in signs):
            return interpreter._LangPatchScope()
        return patch(fn)

    look_up = cache(interpreter._get_np_dtype)

    def np_dtype(kind: Any) -> Any:
        return np.dtype(np.uint64) if kind.scalar.is_ptr() else look_up(kind.scalar)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, np_dtype


def mend_types() -> None:
    """Let a tensor that the interpreter makes cost no more than its array.

    For each one Triton builds the type of its block anew, and a tuple of constants for its shape: a quarter of the time
    of a kernel (Triton 3.7.1). Both depend on element type and shape alone, so they are made once.
    """
    from triton import language as tl

    block, tensor = tl.core.block_type, tl.core.tensor
    make_block, make_tensor = block.__init__, tensor.__init__

    def new(cls: Any, element_ty: Any, shape: Any) -> Any:
        try:
            return vars(element_ty)["blocks"][tuple([s if s.__class__ is int else s.value for s in shape])]
        except (KeyError, TypeError, AttributeError):  # the first of its kind, or a mistake, which Triton names
            return object.__new__(cls)

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        if "name" not in vars(self):
            make_block(self, element_ty, shape)
            self.dims = tuple([s if s.__class__ is int else s.value for s in self.shape])
            vars(element_ty).setdefault("blocks", {})[self.dims] = self

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if (known := vars(type).get("of_its_tensors")) is None:
            make_tensor(self, handle, type)
            type.of_its_tensors = {key: value for key, value in vars(self).items() if key != "handle"}
        else:
            self.handle = handle
            vars(self).update(known)

    block.__new__, block.__init__, tensor.__init__ = new, init_block, init_tensor


def mend_operators() -> None:
    """Let an operator on two tensors of one type cost no more than NumPy's.

    Triton asks for each operator which type the result has and to which shape both operands are broadcast. It compares
    shapes as tuples of constants, and types by their names. That takes half the time of a kernel (Triton 3.7.1). Where
    both operands have the same type there is nothing to ask.
    """
    from triton import language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    dtype, tensor = tl.core.dtype, tl.core.tensor
    check_types, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    same_dtype, block = dtype.__eq__, tl.core.block_type

    def same(self: Any, other: Any) -> Any:
        return self is other or (self.name == other.name if other.__class__ is dtype else same_dtype(self, other))

    def types_checked(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        both = lhs.__class__ is tensor and rhs.__class__ is tensor and not div_or_mod
        if both and lhs.type is rhs.type and not lhs.type.scalar.is_ptr():
            return lhs, rhs
        return check_types(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        if not (lhs.type.is_block() and rhs.type.is_block()):
            return (lhs, rhs) if lhs.type.is_block() == rhs.type.is_block() else broadcast(self, lhs, rhs)
        left, right = lhs.type.dims, rhs.type.dims
        if left == right:
            return lhs, rhs
        if len(left) != len(right) or any(a != b and 1 not in (a, b) for a, b in zip(left, right, strict=True)):
            return broadcast(self, lhs, rhs)
        shape = [b if a == 1 else a for a, b in zip(left, right, strict=True)]
        return self.broadcast_impl_shape(lhs, shape), self.broadcast_impl_shape(rhs, shape)

    def patch_attribute(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def with_semantic(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        scope.set_attr(obj, name, with_semantic)

    dtype.__eq__, interpreter._patch_attr = same, patch_attribute
    block.with_element_ty = lambda self, scalar_ty: block(scalar_ty, [*self.dims])
    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value = types_checked, broadcasted


if INTERPRETED:
    mend_errors()
    mend_conditions()
    mend_bfloat16()
    mend_float8()
    mend_masks()
    mend_nan()
    mend_calls()
    mend_types()
    mend_operators()
