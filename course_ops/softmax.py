"""Softmax over the last dimension."""

import torch
from torch import Tensor
from torch.library import custom_op

from course_ops._common import as_rows, expect_rows, on_device, runs_kernel
from course_ops._registration import once_differentiable
from course_ops.kernels import softmax as kernels
from course_ops.kernels._rows import Choice, Rows, choose

FORWARD = (
    Choice(
        kernels.softmax_shifted,
        lambda r: r.shifted and r.N > 2048 and kernels.softmax_shifted_parts(r).fits(r, warps_per_sm=16),
        "rows of an odd length start where no wide load can: 16 bytes are counted from the tensor's start",
    ),
    Choice(
        kernels.softmax_packed,
        lambda r: r.bytes <= 16384 or (r.bytes <= 65536 and not (r.ragged and r.bytes <= 40960)),
        "a row, or several, in the registers of one program",
    ),
    Choice(
        kernels.softmax_chunks,
        lambda r: r.bytes <= 40960,
        "a power of two would waste too many lanes, and two rows in chunks fit on an SM",
    ),
    Choice(
        kernels.softmax_split,
        lambda r: kernels.softmax_parts(r).fits(r, warps_per_sm=28),
        "longer rows are still read once: programs of 4 KB share a row, as far as the registers of all SMs hold it",
    ),
    Choice(kernels.softmax_two_pass, lambda r: True, "any length, x is read twice"),
)
BACKWARD = (
    Choice(
        kernels.softmax_backward_shifted,
        lambda r: r.shifted and r.N > 2048 and kernels.softmax_backward_shifted_parts(r).fits(r, warps_per_sm=16),
        "as forward",
    ),
    Choice(
        kernels.softmax_backward_packed,
        lambda r: r.bytes <= 16384 or (r.bytes <= 65536 and not r.ragged),
        "as forward",
    ),
    Choice(kernels.softmax_backward_chunks, lambda r: r.bytes <= 65536, "as forward"),
    Choice(
        kernels.softmax_backward_split,
        lambda r: kernels.softmax_backward_parts(r).fits(r, warps_per_sm=16),
        "as forward; y and dy take twice the registers, so an SM holds fewer warps",
    ),
    Choice(kernels.softmax_backward_two_pass, lambda r: True, "any length, y and dy are read twice"),
)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension, differentiable.

    x: [..., N] in float32, float16 or bfloat16; any N, any strides. Returns a contiguous tensor of x's shape and dtype;
    sums are fp32. A row with a NaN or +inf, or of nothing but -inf, becomes NaN, as in PyTorch.
    TypeError for another dtype, ValueError for a scalar.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
    """
    expect_rows(x)
    return _softmax(x)


@custom_op("course_ops::softmax", mutates_args=())
def _softmax(x: Tensor) -> Tensor:
    if not runs_kernel(x):
        return torch.softmax(x.float(), -1).to(x.dtype).contiguous()
    rows = as_rows(x)
    with on_device(x):
        return choose(FORWARD, Rows.of(rows))(rows).view(x.shape)


@custom_op("course_ops::softmax_backward", mutates_args=())
def _softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    if not runs_kernel(y):
        y32, dy32 = y.float(), dy.float()
        return (y32 * (dy32 - (y32 * dy32).sum(-1, keepdim=True))).to(y.dtype).contiguous()
    rows, drows = as_rows(y), as_rows(dy)
    with on_device(y):
        return choose(BACKWARD, Rows.of(rows, drows))(rows, drows).view(y.shape)


_softmax.register_fake(lambda x: x.new_empty(x.shape))
_softmax_backward.register_fake(lambda y, dy: y.new_empty(y.shape))
_softmax.register_autograd(
    lambda ctx, dy: _softmax_backward(*ctx.saved_tensors, dy),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)
once_differentiable(_softmax_backward, "softmax", "torch.softmax")
