"""Residual addition and LayerNorm of the sum."""

import math

import torch
from torch import Tensor
from torch.library import custom_op

from course_ops._common import (
    as_rows,
    expect,
    expect_dtype_of,
    expect_eps,
    expect_rows,
    in_one_dtype,
    on_device,
    runs_kernel,
)
from course_ops._registration import once_differentiable
from course_ops.kernels import add_norm as kernels
from course_ops.kernels._norm_backward import walks
from course_ops.kernels._norm_backward_shifted import norm_backward_shifted_takes
from course_ops.kernels._rows import Choice, Rows, choose
from course_ops.kernels.layer_norm import layer_norm_parts, layer_norm_shifted_parts
from course_ops.layer_norm import FORWARD as NORM_FORWARD
from course_ops.layer_norm import layer_norm_backward_cpu, layer_norm_cpu


def _add_then_norm(x, residual, w, b, eps):
    total = residual + x
    y, mean, rstd = choose(NORM_FORWARD, Rows.of(total))(total, w, b, eps)
    return y.to(x.dtype), total, mean, rstd


FORWARD = (
    Choice(
        kernels.add_norm_shifted,
        lambda r: r.shifted and r.N > 2048 and layer_norm_shifted_parts(r).fits(r, warps_per_sm=12),
        "rows of an odd length start where no wide load can: 16 bytes are counted from the tensor's start",
    ),
    Choice(kernels.add_norm_packed, lambda r: r.N <= 8192, "rows in the registers of one program"),
    Choice(kernels.add_norm_chunks, lambda r: r.N <= 16384, "a power of two would waste too many lanes"),
    Choice(
        kernels.add_norm_split,
        lambda r: layer_norm_parts(r).fits(r, warps_per_sm=8),
        "programs of 4096 columns share a row, up to about a million columns",
    ),
    Choice(_add_then_norm, lambda r: True, "an addition, then layer_norm's kernel for that length"),
)
BACKWARD = (
    Choice(kernels.add_norm_backward_packed, lambda r: r.N <= 2048, "tiles of several short rows"),
    Choice(
        kernels.add_norm_backward_shifted,
        norm_backward_shifted_takes,
        "a program's rows start at the same place between two multiples of 16 bytes",
    ),
    Choice(
        kernels.add_norm_backward_walk,
        lambda r: walks(r.N, r.itemsize, bias=True),
        "the next rows are on their way to shared memory",
    ),
    Choice(kernels.add_norm_backward_group, lambda r: True, "programs share a row; two launches if it is too long"),
)


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(LayerNorm(residual + x), residual + x), the step between two branches of a transformer, differentiable.

    x: [..., N] in float32, float16 or bfloat16, what a branch returned; any N, any strides. residual: of x's shape, in
    x's dtype or float32. Under autocast the stream is float32. weight [N], and bias [N] or None: of x's dtype or
    float32.
    Returns the norm in x's dtype and the sum in residual's, both contiguous. The sum is rounded to residual's dtype
    before it is normalised. Saves the sum, weight and 8 bytes per row for the backward.
    TypeError for another dtype, ValueError for another shape or a negative eps.
    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016, section 3.
    """
    expect_rows(x, weight=weight, bias=bias)
    expect(x=x, residual=residual, same_shape=True)
    expect_dtype_of(x, residual=residual)
    expect_eps(eps)
    return _add_norm(x, residual, *in_one_dtype(weight, bias), eps)[:2]


@custom_op("course_ops::add_norm", mutates_args=())
def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not runs_kernel(x):
        total = (residual + x).contiguous()
        y, mean, rstd = layer_norm_cpu(as_rows(total).float(), weight, bias, eps, x.shape)
        return y.to(x.dtype), total, mean, rstd
    args = as_rows(x), as_rows(residual), weight.contiguous(), None if bias is None else bias.contiguous(), eps
    with on_device(x):
        y, total, mean, rstd = choose(FORWARD, Rows.of(*args[:2]))(*args)
    return y.view(x.shape), total.view(x.shape), mean, rstd


@custom_op("course_ops::add_norm_backward", mutates_args=())
def _add_norm_backward(
    dy: Tensor, dtotal: Tensor, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    args = *map(as_rows, (dy, dtotal, total)), weight.contiguous(), mean, rstd
    if runs_kernel(total):
        with on_device(total):
            dx, dresidual, dw, db = choose(BACKWARD, Rows.of(args[2], *args[:2]))(*args, bias)
    else:
        dresidual, dw, db = layer_norm_backward_cpu(args[0], *args[2:])
        dresidual += args[1]
        dx, dresidual = dresidual.to(dy.dtype, copy=True), dresidual.to(total.dtype)
        dw, db = dw.to(weight.dtype), db.to(weight.dtype)
    return dx.view(total.shape), dresidual.view(total.shape), dw, db if bias else weight.new_empty(0)


@_add_norm.register_fake
def _(x, residual, weight, bias, eps):
    statistics = (x.new_empty(math.prod(x.shape[:-1]), dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), residual.new_empty(x.shape), *statistics


@_add_norm_backward.register_fake
def _(dy, dtotal, total, weight, mean, rstd, bias):
    dweights = weight.new_empty(weight.shape), weight.new_empty(weight.shape if bias else 0)
    return dy.new_empty(total.shape), total.new_empty(total.shape), *dweights


def _setup(ctx, inputs, output):
    _, total, mean, rstd = output
    ctx.save_for_backward(total, inputs[2], mean, rstd)
    ctx.bias, ctx.dtype = inputs[3] is not None, inputs[0].dtype
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dy, dtotal, *_):
    total = ctx.saved_tensors[0]
    # A result that nothing reads has no gradient: the sum after the last norm, for one.
    dy = torch.zeros_like(total, dtype=ctx.dtype) if dy is None else dy
    dtotal = torch.zeros_like(total) if dtotal is None else dtotal
    dx, dresidual, dw, db = _add_norm_backward(dy, dtotal, *ctx.saved_tensors, ctx.bias)
    return dx, dresidual, dw, db if ctx.bias else None, None


_add_norm.register_autograd(_gradients, setup_context=_setup)
once_differentiable(_add_norm_backward, "add_norm", "residual + x and torch.nn.functional.layer_norm")
