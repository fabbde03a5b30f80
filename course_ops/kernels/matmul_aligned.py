"""C = A B on Hopper where rows begin within a sector of L2: first a copy whose rows begin at sectors, if that pays.

Each tile reads its rows of A and B from L2, and a matrix is read by many tiles. Rows that begin within a sector cost
1.7 times as much each time. A copy is read and written once, at the speed of memory. TMA cannot read rows that begin at
no multiple of 16 bytes at all, so a matrix of such rows is copied whatever the model says.
"""

import math
from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from course_ops._common import cdiv, num_sms, runs_gluon
from course_ops.kernels._matmul_hopper import wgmma_takes
from course_ops.kernels._matmul_plan import aligned_rows, copies_that_pay
from course_ops.kernels.matmul import tma_pays


# Sizes along a row in units of elements: so the compiler knows how many bytes can be copied at a time, 16 for 8.
@triton.jit
def copy_kernel(
    from_ptr, to_ptr, rows, units, stride_from, stride_to, UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # [rows, UNIT * units] each
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    mask = (row < rows) & (col < units * UNIT)
    x = tl.load(from_ptr + row * (stride_from * UNIT) + col, mask=mask)
    tl.store(to_ptr + row * (stride_to * UNIT) + col, x, mask=mask)


def aligned_copy(t: Tensor) -> Tensor:
    """A copy of a 16-bit matrix whose rows, or columns if it lies so, begin at multiples of 128 bytes."""
    stored = t if t.stride(1) == 1 else t.t()
    rows, cols = stored.shape
    copy = _room(stored)
    unit = math.gcd(8, cols, stored.stride(0))
    if unit == 1:  # a thread of copy_kernel owns eight elements; of PyTorch's, neighbouring threads own neighbours
        copy.copy_(stored)
    else:
        copy_kernel[(cdiv(rows, 8), cdiv(cols, 1024))](
            stored, copy, rows, cols // unit, stored.stride(0) // unit, copy.stride(0) // unit, unit, ROWS=8, COLS=1024
        )
    return copy if stored is t else copy.t()


def _room(stored: Tensor) -> Tensor:
    """As large as a matrix, uninitialised, with rows that begin at multiples of 128 bytes."""
    rows, cols = stored.shape
    return stored.new_empty(rows, cols + -cols % 64)[:, :cols]


def _as_copied(t: Tensor) -> Tensor:
    """A matrix that lies as aligned_copy(t)."""
    return _room(t) if t.stride(1) == 1 else _room(t.t()).t()


def which(a: Tensor, b: Tensor) -> tuple[bool, bool]:
    """Whether to copy a, and b, for the Hopper kernels: what TMA cannot read, and what the model says."""
    (M, K), N = a.shape, b.shape[1]
    lies = all(t.element_size() == 2 and 1 in t.stride() for t in (a, b))
    if N % 8 or not lies or not runs_gluon(a):
        return False, False
    must_a, must_b = not wgmma_takes(a), not wgmma_takes(b)
    if (must_a or must_b) and not tma_pays(a, b):
        return False, False
    sms = num_sms(a.device)
    may_a, may_b = copies_that_pay(M, N, K, must_a or aligned_rows(a), must_b or aligned_rows(b), sms)
    return must_a or may_a, must_b or may_b


def prepare(
    a: Tensor, b: Tensor, prepare_product: Callable[[Tensor, Tensor], Callable[[Tensor, Tensor], Tensor]]
) -> Callable[[Tensor, Tensor], Tensor]:
    """A product after the copies that pay, for operands that lie as a and b do.

    The copies take as much memory as the matrices, until the product is launched.
    """
    copy_a, copy_b = which(a, b)
    product = prepare_product(_as_copied(a) if copy_a else a, _as_copied(b) if copy_b else b)
    return lambda a, b: product(aligned_copy(a) if copy_a else a, aligned_copy(b) if copy_b else b)
