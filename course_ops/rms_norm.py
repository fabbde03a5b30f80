"""RMSNorm over the last dimension."""

import math

import torch
from torch import Tensor
from torch.library import custom_op

from course_ops._common import as_rows, expect_eps, expect_rows, on_device, runs_kernel
from course_ops._registration import once_differentiable
from course_ops.kernels import rms_norm as kernels
from course_ops.kernels._norm_backward import walks
from course_ops.kernels._norm_backward_shifted import norm_backward_shifted_takes
from course_ops.kernels._rows import Choice, Rows, choose
from course_ops.kernels.norm_backward_hopper import norm_backward_hopper, norm_backward_hopper_takes

FORWARD = (
    Choice(
        kernels.rms_norm_shifted,
        lambda r: r.shifted and r.N > 2048 and kernels.rms_norm_shifted_parts(r).fits(r, warps_per_sm=16),
        "rows of an odd length start where no wide load can: 16 bytes are counted from the tensor's start",
    ),
    Choice(
        kernels.rms_norm_packed,
        lambda r: r.N <= 2048 or (r.N <= 8192 and not r.ragged and r.itemsize == 2),
        "rows in the registers of one program",
    ),
    Choice(kernels.rms_norm_chunks, lambda r: r.bytes <= 65536, "a power of two would waste too many lanes"),
    Choice(
        kernels.rms_norm_split,
        lambda r: kernels.rms_norm_parts(r).fits(r, warps_per_sm=32),
        "longer rows are still read once: programs of 8 KB share two rows",
    ),
    Choice(kernels.rms_norm_two_pass, lambda r: True, "any length, x is read twice"),
)
BACKWARD = (
    Choice(kernels.rms_norm_backward_persistent, lambda r: r.N <= 2048, "tiles of several short rows"),
    Choice(
        kernels.rms_norm_backward_shifted,
        norm_backward_shifted_takes,
        "a program's rows start at the same place between two multiples of 16 bytes",
    ),
    Choice(
        kernels.rms_norm_backward_walk,
        lambda r: walks(r.N, r.itemsize, bias=False),
        "the next rows are on their way to shared memory",
    ),
    Choice(kernels.rms_norm_backward_group, lambda r: True, "programs share a row; two launches if it is too long"),
)


def rms_norm(x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, differentiable.

    x: [..., N] in float32, float16 or bfloat16; any N, any strides. weight: [N] of x's dtype or float32. eps: 0 or
    more. None stands for torch.finfo(torch.float32).eps in every dtype, as torch.nn.functional.rms_norm computes.
    Returns a contiguous tensor of x's shape and dtype; statistics and sums are fp32, and the result is rounded once,
    after the weight. Saves x and 4 bytes per row for the backward; weight's gradient is added up in the same order in
    every run.
    TypeError for another dtype, ValueError for a scalar, another shape of weight or a negative eps.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019, section 4.
    """
    expect_rows(x, weight=weight)
    if eps is None:
        eps = torch.finfo(torch.float32).eps
    expect_eps(eps)
    return _rms_norm(x, weight, eps)[0]


@custom_op("course_ops::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows = as_rows(x)
    if not runs_kernel(x):
        rstd = torch.rsqrt(rows.float().square().mean(-1) + eps)
        return (rows.float() * rstd[:, None] * weight.float()).to(x.dtype).view(x.shape), rstd
    with on_device(x):
        y, rstd = choose(FORWARD, Rows.of(rows))(rows, weight.contiguous(), eps)
    return y.view(x.shape), rstd


@custom_op("course_ops::rms_norm_backward", mutates_args=())
def _rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    drows, rows = as_rows(dy), as_rows(x)
    if not runs_kernel(x):
        n, g = rows.float() * rstd[:, None], drows.float() * weight.float()
        dx = rstd[:, None] * (g - n * (g * n).mean(-1, keepdim=True))
        return dx.to(x.dtype).view(x.shape), (drows.float() * n).sum(0).to(weight.dtype)
    with on_device(x):
        w = weight.contiguous()
        if norm_backward_hopper_takes(drows, rows, bias=False):
            dx, dw, _ = norm_backward_hopper(drows, rows, w, None, rstd)
        else:
            dx, dw = choose(BACKWARD, Rows.of(rows, drows))(drows, rows, w, rstd)
    return dx.view(x.shape), dw


_rms_norm.register_fake(
    lambda x, weight, eps: (x.new_empty(x.shape), x.new_empty(math.prod(x.shape[:-1]), dtype=torch.float32))
)
_rms_norm_backward.register_fake(lambda dy, x, weight, rstd: (x.new_empty(x.shape), weight.new_empty(weight.shape)))


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


_rms_norm.register_autograd(
    lambda ctx, dy, _: (*_rms_norm_backward(dy, *ctx.saved_tensors), None), setup_context=_setup
)
once_differentiable(_rms_norm_backward, "rms_norm", "torch.nn.functional.rms_norm")
