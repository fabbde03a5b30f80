"""matmul_fp8: the product of two e4m3 matrices with their scales, in bf16."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from course_ops._common import architecture, expect, expect_device, on_device, runs_gluon, runs_kernel, tma_takes
from course_ops._registration import cast_under_autocast
from course_ops.kernels import matmul_fp8 as portable
from course_ops.kernels import matmul_fp8_hopper as hopper
from course_ops.kernels.matmul_fp8 import FP8, GROUP
from course_ops.quantize import refuse_gradient, require_fp8


class Kernel(NamedTuple):
    """One row of the dispatch table: the first that has the scheme and whose condition holds computes the result."""

    name: str
    schemes: tuple[str, ...]
    takes: Callable[[Tensor, Tensor], bool]
    launch: Callable[..., Tensor]
    why: str


def _by_tma(a: Tensor, b: Tensor) -> bool:
    """Rows of a, b.t() and the bf16 result begin at multiples of 16 bytes, and TMA exists."""
    return architecture(a.device) >= 90 and tma_takes(a, b.t()) and b.shape[1] % 8 == 0


def _hopper(a: Tensor, b: Tensor) -> bool:
    return runs_gluon(a) and _by_tma(a, b)


DISPATCH = (
    Kernel("promote_hopper", ("blocks",), _hopper, hopper.fp8_promote_hopper, "one consumer promotes, one multiplies"),
    Kernel("sum_hopper", ("tensor", "rows"), _hopper, hopper.fp8_sum_hopper, "scales once a tile: tensor cores add up"),
    Kernel("tma", ("tensor", "rows"), _by_tma, portable.fp8_tma, "the same on a GPU without wgmma"),
    Kernel("pointers", ("tensor", "rows", "blocks"), lambda a, b: True, portable.fp8_pointers, "any rows; promotes"),
)


def kernel_for(a: Tensor, b: Tensor, scheme: str) -> Kernel:
    """The kernel that computes a [M, K] times b [K, N] with the scales of the scheme."""
    return next(kernel for kernel in DISPATCH if scheme in kernel.schemes and kernel.takes(a, b))


@torch.library.custom_op("course_ops::matmul_fp8", mutates_args=())
def _matmul_fp8(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    if not runs_kernel(a):
        return (_dequantized(a, a_scale) @ _dequantized(b, b_scale)).bfloat16()
    require_fp8(a)
    a = a if a.stride(1) == 1 else a.contiguous()
    b = b if b.stride(0) == 1 else b.t().contiguous().t()  # wgmma transposes 16-bit blocks on its way, not 8-bit ones
    scheme = scheme_of(a, a_scale, b, b_scale)
    with on_device(a):
        return kernel_for(a, b, scheme).launch(a, b, a_scale, b_scale, scheme)


@_matmul_fp8.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)


cast_under_autocast(_matmul_fp8)  # nothing is cast, and autocast is off inside


@register_flop_formula(torch.ops.course_ops.matmul_fp8)
def _flops(a_shape: Any, a_scale_shape: Any, b_shape: Any, *_: Any, **__: Any) -> int:
    return int(2 * a_shape[0] * a_shape[1] * b_shape[1])


def _dequantized(q: Tensor, scale: Tensor) -> Tensor:
    """q * scale in fp32, each scale over its part of q: 128 or all rows and columns, or one."""
    for dim, n in enumerate(q.shape):
        if 1 < scale.shape[dim] < n:
            scale = scale.repeat_interleave(GROUP, dim).narrow(dim, 0, n)
    return q.float() * scale


def scheme_of(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> str:
    """The scheme that the scales' shapes belong to; "tensor" before "rows" before "blocks" where several do."""
    (M, K), N = a.shape, b.shape[1]
    k, n = -(-K // GROUP), -(-N // GROUP)
    schemes = {"tensor": ((1, 1), (1, 1)), "rows": ((M, 1), (1, N)), "blocks": ((M, k), (k, n))}
    for scheme, shapes in schemes.items():
        if (a_scale.shape, b_scale.shape) == shapes:
            return scheme
    raise ValueError(
        f"a_scale {tuple(a_scale.shape)}, b_scale {tuple(b_scale.shape)}: expected one of {schemes}; "
        "quantize(w, ...) of w [N, K] gives b's transposed"
    )


def matmul_fp8(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """(a * a_scale) @ (b * b_scale) -> [M, N] in bf16.

    a: [M, K], b: [K, N], both e4m3; fastest with b = w.t() of w [N, K], other layouts are copied. Scales in fp32, any
    strides, as quantize makes them (b's transposed):
        per tensor [1, 1] and [1, 1];  row-wise [M, 1] and [1, N];  blockwise [M, K/128] and [K/128, N/128], rounded up.
    Blockwise sums are in fp32. Per tensor and row-wise the tensor cores add up by themselves (about 14 bits on Hopper),
    except where rows are not 16-byte aligned. Not differentiable.
    Raises TypeError for a dtype, ValueError for a shape or a wanted gradient, Unsupported before sm_89.
    Source: DeepSeek-V3, section 3.3.2 (blockwise scales, promotion).
    """
    expect(a=a, b=b, ndim=2, dtypes=(FP8,))
    expect(a_scale=a_scale, b_scale=b_scale, ndim=2, dtypes=(torch.float32,))
    expect_device(a=a, b=b, a_scale=a_scale, b_scale=b_scale)
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a has {a.shape[1]} columns and b {b.shape[0]} rows: make them equal (is b w.t()?)")
    scheme_of(a, a_scale, b, b_scale)
    refuse_gradient("matmul_fp8", a=a, a_scale=a_scale, b=b, b_scale=b_scale)
    return _matmul_fp8(a, a_scale, b, b_scale)
