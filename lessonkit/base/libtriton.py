"""What Triton's interpreter needs of its compiled extension, in NumPy, for systems for which Triton has no wheel.

On macOS and Windows `course.py` unpacks the Python files of Triton's Linux wheel. They import `triton._C.libtriton`,
which is the compiler in C++, four functions that the interpreter reaches memory by, and one that names an argument's
type. Here are these five. All else can be named, as Triton does while it is imported, but not called. Kernels are then
interpreted and never compiled.
"""

import os
import sys
from collections.abc import Callable
from enum import Enum
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

EXTENSION = "triton._C.libtriton"
PARTS = ("ir", "gluon_ir", "passes", "llvm", "linear_layout", "nvidia", "amd", "proton", "gsan_testing", "interpreter")
RMW_OP = Enum("RMW_OP", ["ADD", "FADD", "AND", "OR", "XOR", "XCHG", "MAX", "MIN", "UMAX", "UMIN"])
UPDATES: dict[RMW_OP, Callable[[Any, Any], Any]] = {
    RMW_OP.ADD: np.add,
    RMW_OP.FADD: np.add,
    RMW_OP.AND: np.bitwise_and,
    RMW_OP.OR: np.bitwise_or,
    RMW_OP.XOR: np.bitwise_xor,
    RMW_OP.XCHG: lambda old, new: new,
    RMW_OP.MAX: lambda old, new: np.where(old < new, new, old),
    RMW_OP.MIN: lambda old, new: np.where(old > new, new, old),
}
UPDATES |= {RMW_OP.UMAX: UPDATES[RMW_OP.MAX], RMW_OP.UMIN: UPDATES[RMW_OP.MIN]}  # their operands are unsigned


def stand_in() -> bool:
    """Stand in for the extension if Triton's Python files are here without it; return whether that is so.

    To be called before anything imports Triton. Raises ModuleNotFoundError where there is no Triton at all.
    """
    found = find_spec("triton")
    if found is None:
        raise ModuleNotFoundError(
            "no Triton here: `python3 course.py doctor` installs it, or its Python files on macOS and Windows",
            name="triton",
        )
    folders = [Path(folder, "_C") for folder in found.submodule_search_locations or ()]
    if any((folder / f"libtriton{suffix}").exists() for folder in folders for suffix in EXTENSION_SUFFIXES):
        return False
    package, extension = ModuleType("triton._C"), _Part(EXTENSION)
    package.libtriton = extension  # type: ignore[attr-defined]
    sys.modules |= {package.__name__: package, EXTENSION: extension}
    for name in PARTS:
        part = sys.modules[f"{EXTENSION}.{name}"] = _Part(f"{EXTENSION}.{name}")
        setattr(extension, name, part)
    for function in (getenv, getenv_bool, get_cache_invalidating_env_vars, native_specialize_impl):
        setattr(extension, function.__name__, function)
    for name in ("RMW_OP", "load", "store", "atomic_rmw", "atomic_cas"):
        setattr(sys.modules[f"{EXTENSION}.interpreter"], name, globals()[name])
    return True


class _Name(type):
    """What the extension has under a name: a class, a function or an enumeration, whose members are such names too."""

    def __getattr__(cls, name: str) -> "_Name":
        if name.startswith("_"):
            raise AttributeError(name)
        member = _Name(name, (), {"__module__": f"{cls.__module__}.{cls.__name__}"})
        setattr(cls, name, member)  # a member is compared by what it is
        return member

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{cls.__module__}.{cls.__name__} is part of Triton's compiler, which is not here")


class _Part(ModuleType):
    """A module of the extension, where every name can be found."""

    def __getattr__(self, name: str) -> _Name:
        if name.startswith("_"):
            raise AttributeError(name)
        member = _Name(name, (), {"__module__": self.__name__})
        setattr(self, name, member)
        return member


# ---- Settings and types ---------------------------------------------------------------------------------------------


def getenv(key: str, default: str | None = None) -> str | None:
    return os.environ.get(key, default)


def getenv_bool(key: str, default: bool) -> bool:
    return os.environ[key].lower() in ("1", "true", "on", "yes", "y") if key in os.environ else default


def get_cache_invalidating_env_vars() -> dict[str, str]:
    return {}


def native_specialize_impl(
    backend: object, argument: Any, is_const: bool, specialize: bool, align: bool
) -> tuple[str, None]:
    """The type of an integer, or of the pointer to a tensor, in Triton's words: "i32", "*bf16"."""
    from triton._utils import canonicalize_ptr_dtype

    if hasattr(argument, "data_ptr"):
        return canonicalize_ptr_dtype(argument.dtype, is_const), None
    if isinstance(argument, bool):
        return "u1", None
    if not isinstance(argument, int):
        raise TypeError(f"failed to specialize argument of type: {type(argument).__name__}")
    for name, least, most in (("i32", -(2**31), 2**31), ("i64", -(2**63), 2**63), ("u64", 0, 2**64)):
        if least <= argument < most:
            return name, None
    raise OverflowError("integer to be specialized too large to represent")


# ---- Memory. Programs of a grid run one after the other, so an update needs no lock. -------------------------------


class _Memory:
    """The process's memory from an address on, as NumPy sees it: element i begins i bytes after it."""

    def __init__(self, first: int, last: int, dtype: np.dtype[Any]) -> None:
        shape = (last - first + 1,)
        self.__array_interface__ = {
            "version": 3, "data": (first, False), "shape": shape, "strides": (1,), "typestr": dtype.str
        }  # fmt: skip


def _seen(addresses: Any, dtype: Any) -> tuple[Any, Any]:
    """Memory as an array, and where these addresses are in it. Only what is indexed is touched."""
    first, last = int(addresses.min()), int(addresses.max())
    return np.asarray(_Memory(first, last, np.dtype(dtype))), (addresses - np.uint64(first)).astype(np.int64)


def load(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
    """What is at the pointers where the mask is set, elsewhere `other`."""
    pointers, chosen = np.asarray(pointers, np.uint64), np.flatnonzero(mask)
    out = np.array(other, dtype=dtype, order="C").reshape(pointers.shape)
    if chosen.size:
        memory, at = _seen(pointers.reshape(-1)[chosen], dtype)
        out.reshape(-1)[chosen] = memory[at]
    return out


def store(pointers: Any, value: Any, mask: Any) -> None:
    """Put values where the pointers point and the mask is set. Of two values for one address the last one stays."""
    pointers, value, chosen = np.asarray(pointers, np.uint64), np.asarray(value), np.flatnonzero(mask)
    if chosen.size:
        memory, at = _seen(pointers.reshape(-1)[chosen], value.dtype)
        memory[at] = value.reshape(-1)[chosen]


def atomic_rmw(op: RMW_OP, pointers: Any, value: Any, mask: Any, semantic: object) -> Any:
    """Update each element in turn; return what was there before, and zeros where the mask is not set."""
    pointers, value, chosen = np.asarray(pointers, np.uint64), np.asarray(value), np.flatnonzero(mask)
    if op is RMW_OP.FADD and value.dtype.kind != "f":
        raise TypeError(f"no atomic addition of floating-point numbers that are held as {value.dtype}")
    out = np.zeros(value.size, value.dtype)
    if chosen.size:
        memory, at = _seen(pointers.reshape(-1)[chosen], value.dtype)
        values = value.reshape(-1)[chosen]
        for turn in _turns(at):
            out[chosen[turn]] = old = memory[at[turn]]
            with np.errstate(all="ignore"):
                memory[at[turn]] = UPDATES[op](old, values[turn])
    return out.reshape(value.shape)


def atomic_cas(pointers: Any, expected: Any, desired: Any, semantic: object) -> Any:
    """Put `desired` where each element has the bits of `expected`; return what was there before."""
    pointers, expected, desired = np.asarray(pointers, np.uint64), np.asarray(expected), np.asarray(desired)
    bits = np.dtype(f"u{expected.dtype.itemsize}")
    wanted, new = (np.ascontiguousarray(each).reshape(-1).view(bits) for each in (expected, desired))
    out = np.empty(wanted.size, bits)
    memory, at = _seen(pointers.reshape(-1), bits)
    for turn in _turns(at):
        out[turn] = old = memory[at[turn]]
        memory[at[turn]] = np.where(old == wanted[turn], new[turn], old)
    return out.view(expected.dtype).reshape(expected.shape)


def _turns(at: Any) -> list[Any]:
    """The elements that can be updated at once: all, or where two have one address, one after the other."""
    every = np.arange(at.size)
    return [every] if np.unique(at).size == at.size else list(every.reshape(-1, 1))
