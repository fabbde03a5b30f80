"""Calls that decide once: what a call chooses by how its tensors lie is prepared, and then only launched.

`kernel[grid](*args)` asks each argument for its type and its divisibility, and looks the compiled kernel up by the
answers. That costs the host more than the launch itself. Operators of small matmuls are slower on the host than on
the GPU. All those answers follow from how the tensors of the call lie, so they are found once:

    def prepare(a, b):                      # chooses the kernel, the tile, the grid and all constants
        go = launcher(kernel, grid, num_warps=4)

        def run(a, b):                      # only allocates, describes and launches
            c = a.new_empty(M, N)
            go(a, b, c, *sizes)
            return c

        return run

    c = remembered(prepare, a, b)(a, b)
"""

from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

from course_ops._common import fp32_precision

_prepared: dict[object, Any] = {}
MOST = 4096  # prepared functions that are remembered
ALIGNED = 32  # bytes: a sector of L2, the largest alignment that a choice depends on


def describing(kind: type, shape: Any, strides: Any, block: list[int], **more: Any) -> Callable[[Tensor], Any]:
    """A function that makes TMA descriptors of tensors that lie alike, of Triton's or Gluon's class.

    On a GPU it leaves out the class's checks, which _common.tma_takes makes.
    """
    fields = {"base": None, "shape": shape, "strides": strides, "block_shape": block, **more}
    new = kind.__new__

    def describe(base: Tensor) -> Any:
        if not base.is_cuda:
            return kind(base.as_strided(shape, strides), shape, strides, block, **more)
        made = new(kind)
        made.__dict__.update(fields)
        made.base = base
        return made

    return describe


def launcher(kernel: Any, grid: tuple[int, ...], **options: Any) -> Callable[..., None]:
    """A function of the kernel's arguments, constants too, for a prepared function to launch kernel[grid] with.

    All its calls on a GPU specialize the kernel alike, so the second takes what the first one compiled. The first
    argument is a tensor, or a descriptor of one. options: of the compiler, as num_warps. A profiler's hooks are
    called by Triton's own launch. So is each kernel that is interpreted, emulated or only compiled.
    """
    runtime = triton.knobs.runtime
    again: tuple[Any, ...] | None = None

    def launch(*args: Any) -> None:
        nonlocal again
        if again is None or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            compiled, device = kernel[grid](*args, **options), _device(args[0])
            if device is not None:
                stream_of = triton.runtime.driver.active.get_current_stream
                again = compiled.run, *(*grid, 1, 1)[:3], stream_of, device, compiled.function, compiled.packed_metadata
        else:
            run, x, y, z, stream_of, device, function, metadata = again
            run(x, y, z, stream_of(device), function, metadata, None, None, None, *args)

    return launch


def _device(first: Any) -> int | None:
    """The number of the GPU that holds a tensor, or a descriptor's tensor; None elsewhere."""
    tensor: Tensor = first if isinstance(first, Tensor) else first.base
    return tensor.device.index if tensor.is_cuda else None


def remembered(prepare: Callable[..., Any], *given: Tensor | bool | None) -> Any:
    """prepare(*given), or what it returned before for tensors of such dtypes that lie so, on one GPU.

    given: a tensor first. Other values than tensors count as they are.
    """
    first = given[0]
    assert isinstance(first, Tensor)
    if not _remembers(first):
        return prepare(*given)
    lies = [(t.dtype, t.shape, t.stride(), t.data_ptr() % ALIGNED) if isinstance(t, Tensor) else t for t in given]
    key = prepare, first.get_device(), fp32_precision(), *lies
    found = _prepared.get(key, _prepared)  # a prepared function may be None
    if found is _prepared:
        if len(_prepared) >= MOST:
            _prepared.clear()
        found = _prepared[key] = prepare(*given)
    return found


def _remembers(t: Tensor) -> bool:
    """Whether a tensor's device stays what it is: a GPU does, what is interpreted or compiled for may change."""
    return t.is_cuda
