"""quantize: x to fp8 (e4m3) with a scale for the tensor, each row, each 1 x 128 block or each 128 x 128 square."""

import torch
import torch.nn.functional as F
from torch import Tensor

from course_ops._common import Unsupported, architecture, expect, on_device, runs_kernel
from course_ops.kernels import quantize as kernels
from course_ops.kernels.quantize import FP8, group_shape, scale_shape

SCHEMES = ("tensor", "rows", "blocks", "squares")


@torch.library.custom_op("course_ops::quantize", mutates_args=())
def _quantize(x: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    if not runs_kernel(x):
        return _on_cpu(x, scheme)
    require_fp8(x)
    with on_device(x):
        return kernels.quantize(x if x.stride(1) == 1 else x.contiguous(), scheme)


def _on_cpu(x: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    (M, K), (rows, cols), (m, k) = x.shape, group_shape(x, scheme), scale_shape(x, scheme)
    if not x.numel():
        return torch.empty(x.shape, dtype=FP8, device=x.device), torch.ones(m, k, device=x.device)
    wide = F.pad(x.float(), (0, k * cols - K, 0, m * rows - M)).view(m, rows, k, cols)
    scale = wide.abs().amax((1, 3)) / 448
    scale = torch.where(scale == 0, 1.0, scale)  # of zeros, or of numbers so small that the quotient is one
    q = (wide / scale[:, None, :, None]).clamp(-448, 448).to(FP8)  # e4m3 has no infinity: past 464 it would be NaN
    return q.view(m * rows, k * cols)[:M, :K].contiguous(), scale


@_quantize.register_fake
def _(x: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=FP8), x.new_empty(scale_shape(x, scheme), dtype=torch.float32)


def require_fp8(x: Tensor) -> None:
    """Raise Unsupported where a kernel would run on an NVIDIA GPU without fp8."""
    if runs_kernel(x) and 0 < architecture(x.device) < 89:
        raise Unsupported(f"fp8 needs compute capability 8.9, the GPU has {architecture(x.device) / 10}: use bf16")


def refuse_gradient(operator: str, **tensors: Tensor) -> None:
    """Raise ValueError if autograd would expect a gradient that the operator does not have."""
    for name, t in tensors.items():
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, but {operator} has no gradient for it: pass {name}.detach()")


def quantize(x: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """x [M, K] -> q [M, K] in e4m3 and fp32 scales: q * scale is about x, and the largest |q| of a group is 448.

    scheme     group       scales                taken by matmul_fp8 as
    "tensor"   all of x    [1, 1]                scale of a or, transposed, of b
    "rows"     a row       [M, 1]                scale of a or, transposed, of b
    "blocks"   1 x 128     [M, ceil(K/128)]      scale of a
    "squares"  128 x 128   [ceil(M/128), ...]    transposed, scale of b: quantize(w, "squares") of w [N, K]

    x: fp32, fp16 or bf16, any strides. An element loses at most 1/16 of itself, or half of 2^-9 scales if it is tiny.
    A group of zeros has scale 1, and so has a group of fp32 whose largest magnitude is below 3.2e-43: its q is 0. NaN
    makes its group NaN. An infinity makes its group's scale inf, itself NaN, and the others of its group 0.
    Not differentiable. K is at most 65535 * 128 ("blocks", "squares") or 65535 * 1024 ("rows", "tensor").
    Raises TypeError for a dtype, ValueError for a shape, another scheme or a wanted gradient, Unsupported before sm_89.
    Source: DeepSeek-V3, section 3.3.2 (blocks for activations, squares for weights).
    """
    expect(x=x, ndim=2)
    if scheme not in SCHEMES:
        raise ValueError(f"scheme is {scheme!r}: expected one of {', '.join(SCHEMES)}")
    refuse_gradient("quantize", x=x)
    return _quantize(x, scheme)
