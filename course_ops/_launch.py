"""Launches that skip Triton's look at each argument, and what else of a call depends on its tensors' shapes alone.

`kernel[grid](*args)` asks each argument for its type and its divisibility, and looks the compiled kernel up by the
answers. That costs the host more than the launch itself. Operators of small matmuls are slower on the host than on
the GPU. They know the answers from the shapes, so a second launch with the same key takes the kernel that the first
one compiled.

A matmul is launched in two steps. prepare(a, b) chooses the tile, the grid and all constants, and returns a function.
That function only allocates, describes and launches. `remembered` keeps it for tensors that lie alike.
"""

from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

from course_ops._common import fp32_precision

_compiled: dict[object, Any] = {}
_prepared: dict[object, Any] = {}
MOST = 4096  # compiled kernels that are remembered, and prepared functions
ALIGNED = 32  # bytes: a sector of L2, the largest alignment that a choice depends on


def descriptor(kind: type, base: Tensor, shape: Any, strides: Any, block: list[int], **more: Any) -> Any:
    """A TMA descriptor of Triton's or Gluon's class, on a GPU without its checks, which _common.tma_takes makes."""
    if not base.is_cuda:
        return kind(base.as_strided(shape, strides), shape, strides, block, **more)
    made = kind.__new__(kind)
    made.__dict__.update(base=base, shape=shape, strides=strides, block_shape=block, **more)
    return made


def launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], key: tuple[Any, ...], **options: Any) -> None:
    """kernel[grid](*args, **options), faster from the second launch with this key on.

    args: every argument, constants too. The first is a tensor, or a descriptor of one. options: of the compiler, as
    num_warps. key: all that Triton specializes the kernel for. These are dtypes, constants, which tensors begin at
    multiples of 16 bytes, and integers unless the kernel says do_not_specialize.
    """
    if not _on_gpu(args):
        kernel[grid](*args, **options)
        return
    key = kernel.fn, _tensor(args).device, key, *options.values()
    compiled = _compiled.get(key)
    if compiled is None:
        if len(_compiled) >= MOST:
            _compiled.clear()
        _compiled[key] = kernel[grid](*args, **options)
    else:
        compiled[(*grid, 1, 1)[:3]](*args)


class Launch:
    """kernel[grid](*args, **options) as `launch` makes it, where a prepared function stands for the key."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.kernel, self.grid, self.options = kernel, grid, options
        self.again: Any = None
        self.device: int | None = None

    def __call__(self, *args: Any) -> None:
        if self.again is not None:
            self.again(*args, stream=_stream(self.device))
            return
        compiled = self.kernel[self.grid](*args, **self.options)
        if _on_gpu(args):
            self.again, self.device = compiled[(*self.grid, 1, 1)[:3]], _tensor(args).device.index


def _stream(device: int | None) -> Any:
    return triton.runtime.driver.active.get_current_stream(device)


def _tensor(args: tuple[Any, ...]) -> Tensor:
    first = args[0]
    tensor: Tensor = first if isinstance(first, Tensor) else first.base
    return tensor


def _on_gpu(args: tuple[Any, ...]) -> bool:
    """False where a kernel is interpreted, emulated or only compiled: a process may change between these."""
    return _tensor(args).is_cuda


def remembered(prepare: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """prepare(*tensors), or what it returned before for tensors of such dtypes that lie so, on one GPU."""
    first = tensors[0]
    assert first is not None
    if not _remembers(first):
        return prepare(*tensors)
    lies = [t if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() % ALIGNED) for t in tensors]
    key = prepare, first.device, fp32_precision(), *lies
    found = _prepared.get(key, _prepared)  # a prepared function may be None
    if found is _prepared:
        if len(_prepared) >= MOST:
            _prepared.clear()
        found = _prepared[key] = prepare(*tensors)
    return found


def _remembers(t: Tensor) -> bool:
    """Whether a tensor's device stays what it is: a GPU does, what is interpreted or compiled for may change."""
    return t.is_cuda
