"""Launches that skip Triton's look at each argument, where a key says what that look would find.

`kernel[grid](*args)` asks each argument for its type and its divisibility, and looks the compiled kernel up by the
answers. That costs the host more than the launch itself. Operators of small matmuls are slower on the host than on
the GPU. They know the answers from the shapes, so a second launch with the same key takes the kernel that the first
one compiled.
"""

from typing import Any

from torch import Tensor

_compiled: dict[object, Any] = {}
MOST = 4096  # compiled kernels that are remembered


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
    first = args[0]
    tensor: Tensor = first if isinstance(first, Tensor) else first.base
    if not tensor.is_cuda:  # interpreted, emulated or only compiled: a process may change between these
        kernel[grid](*args, **options)
        return
    key = kernel.fn, tensor.device, key, *options.values()
    compiled = _compiled.get(key)
    if compiled is None:
        if len(_compiled) >= MOST:
            _compiled.clear()
        _compiled[key] = kernel[grid](*args, **options)
    else:
        compiled[(*grid, 1, 1)[:3]](*args)
