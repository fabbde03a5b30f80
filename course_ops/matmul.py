"""matmul: C = A B for 2-D and batched A, differentiable."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from course_ops._common import Unsupported, expect, left_operand, num_sms, on_device, runs_kernel
from course_ops._launch import remembered
from course_ops._registration import cast_under_autocast, unobserved
from course_ops.kernels import matmul as portable
from course_ops.kernels import (
    matmul_aligned,
    matmul_fp32_hopper,
    matmul_hopper,
    matmul_skinny,
    matmul_split_k,
    matmul_stream_k_hopper,
    matmul_tiles_hopper,
)
from course_ops.kernels._matmul_plan import aligned_rows, plan_pays


class Kernel(NamedTuple):
    """One row of a dispatch table: the first whose condition holds computes the result."""

    name: str
    takes: Callable[[Tensor, Tensor], bool]
    prepare: Callable[[Tensor, Tensor], Callable[[Tensor, Tensor], Tensor]]  # for operands that lie as these do
    why: str

    def launch(self, a: Tensor, b: Tensor) -> Tensor:
        return self.prepare(a, b)(a, b)


def _always(launch: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Callable[..., Tensor]]:
    """The `prepare` of a kernel that prepares nothing."""
    return lambda a, b: launch


def _one_wave(a: Tensor, b: Tensor) -> bool:
    """At most one tile an SM, and no plan of other tiles is faster. Up to 64 rows skinny is, if K needs few parts."""
    (M, K), N = a.shape, b.shape[1]
    if M <= 32 or not matmul_hopper.takes(a, b):
        return False
    sms = num_sms(a.device)
    chosen = matmul_split_k.choose(M, N, K, sms)
    if chosen is None:
        return False
    if M <= 128:
        return M > 64 or chosen[2] < 0.9 * matmul_skinny.plan(M, N, K, sms, b.stride(0) == 1)[1]
    return not plan_pays(chosen[0], chosen[1], M, N, K, aligned_rows(a), aligned_rows(b), sms)


DISPATCH = (
    Kernel(
        "zeros", lambda a, b: not (len(a) and b.shape[1] and a.shape[1]), _always(portable.zeros), "nothing to add up"
    ),
    Kernel("split_k", _one_wave, matmul_split_k.prepare, "Hopper, C of one wave: tile and split of K fit it"),
    Kernel("skinny", lambda a, b: len(a) <= 128, matmul_skinny.prepare, "few rows: reading B is all the time"),
    Kernel(
        "aligned_copies",
        lambda a, b: any(matmul_aligned.which(a, b)),
        lambda a, b: matmul_aligned.prepare(a, b, lambda a, b: kernel_for(a, b).prepare(a, b)),
        "Hopper, 16 bits: copies of A or B that TMA cannot read, or whose sectors of L2 cost more; then as below",
    ),
    Kernel(
        "tiles_hopper",
        matmul_tiles_hopper.pays,
        matmul_tiles_hopper.prepare,
        "Hopper, 16 bits: a tile of another width or of 256 rows has fewer or fuller waves",
    ),
    Kernel(
        "stream_k_hopper",
        matmul_stream_k_hopper.pays,
        matmul_stream_k_hopper.prepare,
        "Hopper, 16 bits: the last wave would be short, or rows of both begin within a sector of L2",
    ),
    Kernel("hopper", matmul_hopper.takes, matmul_hopper.prepare, "Hopper, 16 bits: persistent, warp-specialized"),
    Kernel(
        "fp32_hopper",
        matmul_fp32_hopper.pays,
        matmul_fp32_hopper.prepare,
        "Hopper, exact fp32: FMAs of 16 x 8 elements a thread, or of smaller tiles; a producer warp loads",
    ),
    Kernel(
        "ieee", portable.ieee_pays, _always(portable.matmul_ieee), "exact fp32: FMAs, many of a tile for each thread"
    ),
    Kernel(
        "tma",
        portable.tma_pays,
        _always(portable.matmul_tma),
        "Hopper or later; copies rows that are not 16-byte aligned",
    ),
    Kernel("pointers", lambda a, b: True, _always(portable.matmul_pointers), "any GPU, any strides"),
)


def kernel_for(a: Tensor, b: Tensor) -> Kernel:
    """The kernel that computes a [M, K] times b [K, N]."""
    return next(kernel for kernel in DISPATCH if kernel.takes(a, b))


def prepare(a: Tensor, b: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The product of operands that lie as a [M, K] and b [K, N] do, on the current device."""
    return kernel_for(a, b).prepare(a, b)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] b [K, N] on the current device; for operators that hold a matmul."""
    if not runs_kernel(a):
        return left_operand(a) @ b
    product: Tensor = remembered(prepare, a, b)(a, b)
    return product


def _product(a: Tensor, b: Tensor) -> Tensor:
    with on_device(a):
        return multiply(a, b)


_matmul = torch.library.custom_op("course_ops::matmul", _product, mutates_args=())


@_matmul.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


# The gradients are matmuls of transposed views, which every kernel takes as they lie; so second gradients exist too.
def _backward(ctx: Any, dc: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    needs_a, needs_b = ctx.needs_input_grad
    return _matmul(dc, b.t()) if needs_a else None, _matmul(a.t(), dc) if needs_b else None


_matmul.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
cast_under_autocast(_matmul, "a", "b")


@register_flop_formula(torch.ops.course_ops.matmul)
def _flops(a_shape: Any, b_shape: Any, *_: Any, **__: Any) -> int:
    return int(2 * a_shape[0] * a_shape[1] * b_shape[1])


def as_matrix(x: Tensor) -> Tensor:
    """[..., K] -> [rows, K]; a view where strides allow it."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product a @ b, accumulated in fp32.

    a: [..., M, K], b: [K, N], both fp32, fp16 or bf16 on one device, any strides. Returns [..., M, N] in their dtype.
    Under torch.autocast both are cast to its dtype first, so that dtypes may differ.
    Memory: the result, and copies of a and b, as large as they are. On Hopper a matrix is copied if its rows begin at
    no multiple of 16 bytes. In 16 bits 32 bytes count as well, if the copy is estimated to save time. On other GPUs b
    is copied in exact fp32 if it lies transposed.
    In fp32 the products are exact (IEEE) unless torch.set_float32_matmul_precision allows TF32. Differentiable in both,
    any order.
    Raises TypeError for a dtype, ValueError for a shape or a device, Unsupported for a batch of b.
    On Hopper in 16 bits it is faster with Triton 3.8 or later, where two CTAs can share the blocks of b.
    Sources: Stream-K (Osama et al. 2023) for few rows and for short last waves; CUTLASS's warp-specialized persistent
    kernel for Hopper, and its clusters of two CTAs.
    """
    expect(a=a, b=b, same_dtype=True)
    if b.ndim > 2:
        raise Unsupported(f"b has {b.ndim} dimensions {tuple(b.shape)}: call torch.bmm, or grouped_matmul for many b")
    if a.ndim < 2 or b.ndim < 2:
        raise ValueError(
            f"a {tuple(a.shape)}, b {tuple(b.shape)}: expected [..., M, K] and [K, N]; add a dimension of 1"
        )
    if a.shape[-1] != b.shape[0]:
        raise ValueError(f"a has {a.shape[-1]} columns and b {b.shape[0]} rows: make them equal (is one transposed?)")
    call = _product if unobserved(a, b) else _matmul
    return call(as_matrix(a), b).view(*a.shape[:-1], b.shape[1])
