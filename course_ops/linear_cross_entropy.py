"""The last layer of a language model and its loss, a part of the rows at a time."""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from course_ops._common import (
    as_rows,
    expect,
    expect_device,
    expect_dtype_of,
    expect_int,
    left_operand,
    num_sms,
    on_device,
    runs_gluon,
    runs_kernel,
)
from course_ops._registration import cast_under_autocast, once
from course_ops.cross_entropy import _cross_entropy, _cross_entropy_backward
from course_ops.kernels import linear_cross_entropy as kernels
from course_ops.kernels._matmul_hopper import wgmma_takes
from course_ops.kernels._matmul_plan import aligned_rows, best_epilogue_plan
from course_ops.kernels.cross_entropy import cross_entropy_backward
from course_ops.kernels.matmul_hopper import takes
from course_ops.kernels.matmul_tiles_hopper import by_plan
from course_ops.matmul import as_matrix, multiply

CHUNK = 2**29  # logits at a time: 1 GiB in 16 bits
# What float16 keeps of the gradients is `rows` / count times that of the sum over all rows. With 1 row, as the mean has
# it, probabilities below count * 2^-25 would become 0. With all rows, dW of a class that all rows share could overflow.
ROWS = 256
INSTEAD = "torch.nn.functional.linear and torch.nn.functional.cross_entropy"


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """cross_entropy(x W^T, targets), the mean over the targets that are not ignored, differentiable in x and weight.

    x: [..., K] in float32, float16 or bfloat16. The matmuls are in its dtype, or in autocast's under torch.autocast.
    weight: [V, K] in x's dtype or float32. targets: [...] int64; a target that is no class gives NaN. Returns a scalar
    in float32.
    The logits exist for a part of the rows at a time, 1 GiB in 16 bits, and nothing of them is kept. Several parts need
    a sum of dW in float32. The logits of 2 K rows, or of K in float32, take no more memory than that sum. So up to that
    many rows are one part where a gradient is wanted. The logits' gradient is known up to a factor as soon as the loss
    is. So the forward makes dx and dW at once if a gradient is wanted, and keeps them. The backward multiplies them by
    that factor in float32. They are kept up to 256 times as large as those of the mean, so that small gradients do not
    become 0 in float16. x and weight are kept too, as torch.nn.functional.linear keeps them.
    TypeError for another dtype, ValueError for another shape.
    Source: Hsu et al., "Liger Kernel", 2024, section 3.2 (FusedLinearCrossEntropy).
    """
    expect(x=x)
    expect(x=x, weight=weight)
    expect(targets=targets, dtypes=(torch.int64,))
    expect_dtype_of(x, weight=weight)
    expect_int(ignore_index=ignore_index)
    if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != weight.shape[1] or len(weight) == 0:
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)}: expected [..., K] and [V, K], V > 0 "
            "(is weight transposed?)"
        )
    if targets.shape != x.shape[:-1]:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}, expected x's {tuple(x.shape)} without the last dimension: "
            "pass one target a row"
        )
    expect_device(x=x, targets=targets)
    gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _linear_cross_entropy(as_matrix(x), weight, targets.reshape(-1), ignore_index, gradients)[0]


@custom_op("course_ops::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, gradients: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [M, K], weight [V, K], targets [M] -> loss, dx, dw, rows: the mean, and the gradients of `rows` times the mean.

    dx is as x, dw as weight; both are empty without `gradients`. rows is a scalar, and loss too.
    """
    parts = _parts(x, weight, gradients)
    w, count = weight.to(x.dtype), (targets != ignore_index).sum()
    rows = count.float().clamp(1, ROWS)  # dx and dW are of `rows` times the mean
    each = (rows / count).expand(len(x)).contiguous()  # d (rows * mean) / d a row's loss
    loss, dw = x.new_zeros((), dtype=torch.float32), None
    dx = x.new_empty(x.shape if gradients else 0)
    chunks = (t.chunk(parts) for t in (x, targets, each, dx if gradients else x))
    for x1, targets1, each1, dx1 in zip(*chunks, strict=True):
        logits = _logits(x1, w)
        losses, lse = _cross_entropy(logits, targets1, ignore_index)
        loss += losses.sum()
        if gradients:
            dlogits = _logits_gradient(each1, logits, targets1, lse, ignore_index)
            if _odd(logits) and runs_kernel(x1) and takes(dlogits, w):
                with on_device(x1):
                    dx1.copy_(multiply(dlogits, w))
                    product = multiply(dlogits.t(), x1)
            else:
                torch.mm(left_operand(dlogits), w, out=dx1)
                product = left_operand(dlogits.t()) @ x1
            if dw is None:
                dw = product.float() if parts > 1 else product
            else:
                dw += product
        logits = dlogits = None  # or the next part's would be made beside this one's
    return loss / count, dx, weight.new_empty(0) if dw is None else dw.to(weight.dtype), rows


def _parts(x: Tensor, weight: Tensor, gradients: bool) -> int:
    """Of the rows. One, if the logits take no more bytes than float32's sum of dW, which several parts need."""
    logits = len(x) * len(weight)
    if gradients and logits * x.element_size() <= 4 * weight.numel():
        return 1
    return max(1, -(-logits // CHUNK))


# Neither TMA nor cuBLAS's fast kernels write rows that begin anywhere, as those of 50257 elements do. So the logits'
# rows begin at multiples of 128 bytes. What lies between two rows is neither written nor read.
def _logits(x: Tensor, w: Tensor) -> Tensor:
    """x W^T [M, V] with rows at multiples of 128 bytes."""
    (M, V), pad = (len(x), len(w)), -len(w) % (128 // x.element_size())
    logits = x.new_empty(M, V + pad)[:, :V]
    if _odd(logits) and M and runs_kernel(x) and runs_gluon(x) and wgmma_takes(x, w):
        with on_device(x):
            shape = M, V, x.shape[1], aligned_rows(x), aligned_rows(w), num_sms(x.device)
            return by_plan(x, w.t(), best_epilogue_plan(*shape), logits)
    return torch.mm(left_operand(x), w.t(), out=logits)


def _odd(logits: Tensor) -> bool:
    """Whether rows of V elements would not begin at multiples of 16 bytes."""
    return logits.shape[1] * logits.element_size() % 16 != 0


def _logits_gradient(dloss: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, ignore_index: int) -> Tensor:
    """On a GPU it overwrites the logits."""
    if not runs_kernel(logits):
        return _cross_entropy_backward(dloss, logits, targets, lse, ignore_index)
    rows = as_rows(logits)
    with on_device(logits):
        return cross_entropy_backward(dloss, rows, targets.contiguous(), lse, ignore_index, rows)


@_linear_cross_entropy.register_fake
def _(x, weight, targets, ignore_index, gradients):
    loss, rows = (x.new_empty((), dtype=torch.float32) for _ in range(2))
    return loss, x.new_empty(x.shape if gradients else 0), weight.new_empty(weight.shape if gradients else 0), rows


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    if not inputs[4]:
        raise ValueError("gradients must be True where a gradient is wanted: call course_ops.linear_cross_entropy")
    ctx.save_for_backward(*output[1:], *inputs[:2])  # inputs: to lead autograd from a gradient to the error of `once`
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


@custom_op("course_ops::linear_cross_entropy_backward", mutates_args=())
def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient [...], contiguous, times a scalar in float32. In float16 the factor might be inf."""
    if runs_kernel(gradient):
        with on_device(gradient):
            return kernels.scaled(gradient, factor)
    return torch.mul(gradient, factor.expand(gradient.ndim * (1,)), out=torch.empty_like(gradient))


@_scaled.register_fake
def _(gradient, factor):
    return torch.empty_like(gradient)


def _gradients(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dx, dw, rows, *inputs = ctx.saved_tensors
    factor = dloss.detach() / rows  # detached: _scaled has no derivative
    dx, dw = (_scaled(g, factor) if needed else None for g, needed in zip((dx, dw), ctx.needs_input_grad, strict=False))
    if torch.is_grad_enabled():  # create_graph=True: to autograd what was saved are constants, with derivatives of 0
        dx, dw = (None if g is None else once("linear_cross_entropy", INSTEAD, g, dloss, *inputs) for g in (dx, dw))
    return dx, dw, None, None, None


_linear_cross_entropy.register_autograd(_gradients, setup_context=_setup)
cast_under_autocast(_linear_cross_entropy, "x")


@register_flop_formula(torch.ops.course_ops.linear_cross_entropy)
def _flops(x_shape: Any, weight_shape: Any, targets: Any, ignore_index: Any, gradients: bool, **_: Any) -> int:
    return int((6 if gradients else 2) * x_shape[0] * x_shape[1] * weight_shape[0])
