"""What a wrapper says to a bad argument: which one, what is wrong, what to do."""

from collections.abc import Sequence

from lessonkit.base.device import DEVICE, HAS_GPU, INTERPRETED, capability
from lessonkit.base.errors import Unsupported

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def runs_on(target: int, what: str) -> None:
    """Raise Unsupported on a GPU of another capability, where the compiler may not refuse the kernel but abort."""
    if HAS_GPU and capability() != target:
        raise Unsupported(f"this kernel needs {what}, which sm_{target} has; this GPU is sm_{capability()}")


def tma_takes(*tensors: torch.Tensor) -> bool:
    """Can TMA copy these as they lie: neighbours next to each other, base and other strides multiples of 16 bytes?"""

    def fits(t: torch.Tensor) -> bool:
        *outer, inner = t.stride()
        steps = [stride * t.element_size() for stride in outer]
        return inner == 1 and t.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps)

    return all(t.numel() > 0 and fits(t) for t in tensors)


def expect(
    *,
    ndim: int | None = None,
    dtypes: Sequence[torch.dtype] = FLOATS,
    same_shape: bool = False,
    same_dtype: bool = False,
    unit_stride: bool = False,
    contiguous: bool = False,
    differentiable: bool = False,
    **tensors: torch.Tensor,
) -> None:
    """Check the tensors, given by name, against what a kernel takes: `expect(x=x, y=y, same_shape=True)`.

    - ndim: dimensions that each must have
    - dtypes: those that are allowed
    - same_shape, same_dtype: as the first tensor has it
    - unit_stride: neighbours in the last dimension are neighbours in memory
    - contiguous: the whole tensor is contiguous
    - differentiable: the caller provides a backward, so an input may require grad

    Raises TypeError for a wrong type or dtype, ValueError for a wrong device, shape, stride or grad flag.
    """
    first_name, first = next(iter(tensors.items()))
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}: wrap it in torch.as_tensor")
        if t.device.type != DEVICE.type:
            why = "no GPU was found, so kernels run in the interpreter" if INTERPRETED else "kernels run on the GPU"
            raise ValueError(f"{name} is on {t.device}, but {why}: pass {name}.to({DEVICE.type!r})")
        if t.dtype not in dtypes:
            names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise TypeError(f"{name} is {t.dtype}, this kernel takes {names}: convert it with {name}.to(...)")
        if ndim is not None and t.ndim != ndim:
            raise ValueError(f"{name} has {t.ndim} dimension(s) {tuple(t.shape)}, expected {ndim}: reshape it first")
        if same_shape and t.shape != first.shape:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}, but {first_name} has {tuple(first.shape)}: make them equal"
            )
        if same_dtype and t.dtype != first.dtype:
            raise TypeError(f"{name} is {t.dtype}, but {first_name} is {first.dtype}: convert one of them")
        if unit_stride and t.ndim and t.shape[-1] > 1 and t.stride(-1) != 1:
            raise ValueError(
                f"{name} has stride {t.stride(-1)} in its last dimension, expected 1: call {name}.contiguous()"
            )
        if contiguous and not t.is_contiguous():
            raise ValueError(f"{name} is not contiguous (strides {t.stride()}): call {name}.contiguous()")
        if t.requires_grad and torch.is_grad_enabled() and not differentiable:
            raise ValueError(
                f"{name} requires grad, but this rung has no backward: "
                f"pass {name}.detach(), or call the lesson's autograd op"
            )
