"""grouped_matmul: each group of rows times its own matrix, as in a mixture of experts."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from course_ops._common import expect, expect_device, left_operand, on_device, runs_kernel
from course_ops._registration import cast_under_autocast
from course_ops.kernels import grouped_matmul as kernels
from course_ops.quantize import refuse_gradient


@torch.library.custom_op("course_ops::grouped_matmul", mutates_args=())
def _grouped_matmul(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    if not runs_kernel(x):
        return _on_cpu(x, w, offsets)
    if not (x.shape[0] and w.shape[2]):
        return x.new_empty(x.shape[0], w.shape[2])
    # Dispatch: TMA in 16 bits, from Hopper on, where rows are 16-byte aligned; pointers for the rest.
    launch = kernels.grouped_tma if kernels.tma_fits(x, w) else kernels.grouped_pointers
    with on_device(x):
        return launch(x, w, offsets.contiguous())


def _on_cpu(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    y, ends = x.new_zeros(x.shape[0], w.shape[2]), offsets.tolist()
    if ends != sorted(ends) or ends[0] < 0 or ends[-1] > len(x):
        raise ValueError(f"offsets {ends}: expected 0 <= offsets[0] <= ... <= offsets[E] <= {len(x)}, the rows of x")
    for e, (begin, end) in enumerate(pairwise(ends)):
        y[begin:end] = left_operand(x[begin:end]) @ w[e]
    return y


@_grouped_matmul.register_fake
def _(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])


# dx is a grouped matmul with each w[e] transposed. dw[e] would be one over groups of K, for which there is no kernel.
def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
    w, offsets = ctx.saved_tensors
    return _grouped_matmul(dy, w.transpose(1, 2), offsets), None, None


_grouped_matmul.register_autograd(_backward, setup_context=_setup_context)
cast_under_autocast(_grouped_matmul, "x", "w")


@register_flop_formula(torch.ops.course_ops.grouped_matmul)
def _flops(x_shape: Any, w_shape: Any, *_: Any, **__: Any) -> int:
    """As if every row were in a group: the offsets are not known."""
    return int(2 * x_shape[0] * x_shape[1] * w_shape[2])


def grouped_matmul(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """y[offsets[e] : offsets[e + 1]] = x[offsets[e] : offsets[e + 1]] @ w[e] for each group e, in one launch.

    x: [T, K], w: [E, K, N], both fp32, fp16 or bf16, any strides; w[e] may be the .t() of a contiguous [N, K]. Under
    torch.autocast both are cast to its dtype. fp32 is exact unless torch.set_float32_matmul_precision allows TF32.
    offsets: [E + 1] int32 on the same device, ascending, within 0 to T; never copied to the host. Rows before
    offsets[0] and from offsets[E] on belong to no group: they are zeros. On a GPU offsets are not checked: if they
    descend, y is undefined, but nothing outside of it is touched. Differentiable in x; not in w.
    Raises TypeError for a dtype, ValueError for a shape, a device or a w that requires grad.
    Source: Gale et al. 2022, MegaBlocks, section 3 (why groups of unequal size should not be padded).
    """
    expect(x=x, ndim=2)
    expect(w=w, ndim=3)
    expect(x=x, w=w, same_dtype=True)
    expect(offsets=offsets, ndim=1, dtypes=(torch.int32,))
    expect_device(x=x, offsets=offsets)
    (T, K), E = x.shape, len(w)
    if w.shape[1] != K:
        raise ValueError(f"x has {K} columns and w[e] {w.shape[1]} rows: make them equal (is w transposed?)")
    if len(offsets) != E + 1 or (T and not E):
        raise ValueError(f"{len(offsets)} offsets for {E} group(s) and {T} rows: expected E + 1 offsets, and E > 0")
    refuse_gradient("grouped_matmul", w=w)
    return _grouped_matmul(x, w, offsets)
