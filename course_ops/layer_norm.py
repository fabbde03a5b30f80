"""LayerNorm over the last dimension."""

import math

import torch
from torch import Tensor
from torch.library import custom_op

from course_ops._common import as_rows, expect_eps, expect_rows, in_one_dtype, on_device, runs_kernel
from course_ops._registration import once_differentiable
from course_ops.kernels import layer_norm as kernels
from course_ops.kernels._norm_backward import walks
from course_ops.kernels._norm_backward_shifted import norm_backward_shifted_takes
from course_ops.kernels._rows import Choice, Rows, choose
from course_ops.kernels.norm_backward_hopper import norm_backward_hopper, norm_backward_hopper_takes

FORWARD = (
    Choice(
        kernels.layer_norm_shifted,
        lambda r: r.shifted and r.N > 2048 and kernels.layer_norm_shifted_parts(r).fits(r, warps_per_sm=12),
        "rows of an odd length start where no wide load can: 16 bytes are counted from the tensor's start",
    ),
    Choice(
        kernels.layer_norm_tile, lambda r: r.N <= 2048 and not (r.ragged and r.N > 1024), "several short rows a program"
    ),
    Choice(
        kernels.layer_norm_packed,
        lambda r: r.N <= 8192 and not r.ragged,
        "16-bit rows stay 16 bits wide: four rows on an SM",
    ),
    Choice(kernels.layer_norm_chunks, lambda r: r.N <= 16384, "a power of two would waste too many lanes"),
    Choice(
        kernels.layer_norm_split,
        lambda r: kernels.layer_norm_parts(r).fits(r, warps_per_sm=8),
        "programs of 4096 columns share a row, up to about a million columns",
    ),
    Choice(kernels.layer_norm_two_pass, lambda r: True, "any length, x is read twice"),
)
BACKWARD = (
    Choice(kernels.layer_norm_backward_registers, lambda r: r.N <= 2048, "the next rows wait in registers"),
    Choice(
        kernels.layer_norm_backward_shifted,
        norm_backward_shifted_takes,
        "a program's rows start at the same place between two multiples of 16 bytes",
    ),
    Choice(
        kernels.layer_norm_backward_walk,
        lambda r: walks(r.N, r.itemsize, bias=True),
        "the next rows are on their way to shared memory",
    ),
    Choice(kernels.layer_norm_backward_group, lambda r: True, "programs share a row; two launches if it is too long"),
)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, differentiable.

    x: [..., N] in float32, float16 or bfloat16; any N, any strides. weight [N], and bias [N] or None: of x's dtype or
    float32. Returns a contiguous tensor of x's shape and dtype; statistics and sums are fp32, and variance is centred,
    so a large mean costs no digits. Saves x and 8 bytes per row for the backward; weight's and bias's gradients are
    added up in the same order in every run.
    TypeError for another dtype, ValueError for a scalar, another shape of weight or bias or a negative eps.
    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016, section 3.
    """
    expect_rows(x, weight=weight, bias=bias)
    expect_eps(eps)
    return _layer_norm(x, *in_one_dtype(weight, bias), eps)[0]


@custom_op("course_ops::layer_norm", mutates_args=())
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    if not runs_kernel(x):
        return layer_norm_cpu(as_rows(x), weight, bias, eps, x.shape)
    rows, w, b = as_rows(x), weight.contiguous(), None if bias is None else bias.contiguous()
    with on_device(x):
        y, mean, rstd = choose(FORWARD, Rows.of(rows))(rows, w, b, eps)
    return y.view(x.shape), mean, rstd


@custom_op("course_ops::layer_norm_backward", mutates_args=())
def _layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if not runs_kernel(x):
        dx, dw, db = layer_norm_backward_cpu(as_rows(dy), as_rows(x), weight, mean, rstd)
        return dx.to(x.dtype).view(x.shape), dw.to(weight.dtype), db.to(weight.dtype) if bias else weight.new_empty(0)
    drows, rows, w = as_rows(dy), as_rows(x), weight.contiguous()
    with on_device(x):
        hopper = bias and norm_backward_hopper_takes(drows, rows, bias)
        backward = norm_backward_hopper if hopper else choose(BACKWARD, Rows.of(rows, drows))
        dx, dw, db = backward(drows, rows, w, mean, rstd, bias)
    return dx.view(x.shape), dw, db if bias else weight.new_empty(0)


def layer_norm_cpu(rows: Tensor, weight: Tensor, bias: Tensor | None, eps: float, shape: torch.Size) -> tuple:
    """[M, N], computed in fp32 and rounded once -> y of that shape, mean and rstd [M]."""
    x = rows.float()
    mean = x.mean(-1)
    centred = x - mean[:, None]
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    y = centred * rstd[:, None] * weight.float()
    y = y if bias is None else y + bias.float()
    return y.to(rows.dtype).view(shape), mean, rstd


def layer_norm_backward_cpu(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple:
    """[M, N] twice, [N], [M] twice -> dx, dw, db in fp32."""
    g, x_hat = dy.float() * weight.float(), (x.float() - mean[:, None]) * rstd[:, None]
    c1, c2 = (g * x_hat).mean(-1, keepdim=True), g.mean(-1, keepdim=True)
    return rstd[:, None] * (g - x_hat * c1 - c2), (dy.float() * x_hat).sum(0), dy.float().sum(0)


@_layer_norm.register_fake
def _(x, weight, bias, eps):
    rows = math.prod(x.shape[:-1])
    return x.new_empty(x.shape), *(x.new_empty(rows, dtype=torch.float32) for _ in range(2))


@_layer_norm_backward.register_fake
def _(dy, x, weight, mean, rstd, bias):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape if bias else 0)


def _setup(ctx, inputs, output):
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight, *output[1:])
    ctx.bias = bias is not None
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx, dy, *_):
    dx, dw, db = _layer_norm_backward(dy, *ctx.saved_tensors, ctx.bias)
    return dx, dw, db if ctx.bias else None, None


_layer_norm.register_autograd(_gradients, setup_context=_setup)
once_differentiable(_layer_norm_backward, "layer_norm", "torch.nn.functional.layer_norm")
