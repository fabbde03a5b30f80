"""C = A B on Hopper where rows begin within a sector of L2: first a copy whose rows begin at sectors, if that pays.

Each tile reads its rows of A and B from L2, and a matrix is read by many tiles. Rows that begin within a sector cost
1.7 times as much each time. A copy is read and written once. TMA cannot read rows that begin at no multiple of 16 bytes
at all, so a matrix of such rows is copied whatever the model says.
"""

import math
from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from course_ops._common import cdiv, num_sms, runs_gluon
from course_ops._launch import launcher
from course_ops.kernels._matmul_hopper import wgmma_takes
from course_ops.kernels._matmul_plan import aligned_rows, copies_that_pay
from course_ops.kernels.matmul import tma_pays

ROWS, COLS = 8, 1024  # elements of a program of copy_kernel: eight loads of 16 bytes for each thread of four warps


# A matrix is given as its rows, and its columns and strides in units of elements. So the compiler knows how many bytes
# can be copied at a time: 16 for units of 8.
@triton.jit
def copy_block(block, from_ptr, to_ptr, sizes, UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The block-th ROWS x COLS of a matrix, counted along the rows."""
    rows, units, stride_from, stride_to = sizes
    across = tl.cdiv(units * UNIT, COLS)
    row = (block // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = block % across * COLS + tl.arange(0, COLS)[None, :]
    mask = (row < rows) & (col < units * UNIT)
    x = tl.load(from_ptr + row * (stride_from * UNIT) + col, mask=mask)
    tl.store(to_ptr + row * (stride_to * UNIT) + col, x, mask=mask)


# Two matrices in one launch, or one: the first `blocks` programs copy the first.
@triton.jit
def copy_kernel(
    a_ptr, b_ptr, a_to_ptr, b_to_ptr, a_sizes, b_sizes, blocks,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < blocks:
        copy_block(program, a_ptr, a_to_ptr, a_sizes, A_UNIT, ROWS, COLS)
    else:
        copy_block(program - blocks, b_ptr, b_to_ptr, b_sizes, B_UNIT, ROWS, COLS)


def copier(*matrices: Tensor) -> Callable[..., list[Tensor]]:
    """A function that copies one or two 16-bit matrices that lie as these do. The copies lie as _as_copied says."""
    stored = [_stored(t) for t in matrices]
    units = [math.gcd(8, t.shape[1], t.stride(0)) for t in stored]
    sizes = [
        (len(t), t.shape[1] // unit, t.stride(0) // unit, _room(t).stride(0) // unit)
        for t, unit in zip(stored, units, strict=True)
    ]
    strides = [_as_copied(t).stride() for t in matrices]
    blocks = [cdiv(len(t), ROWS) * cdiv(t.shape[1], COLS) for t in stored]
    # A thread of copy_kernel owns eight neighbouring elements. In units of one element it would load them one by one.
    # PyTorch's copy does that better: there neighbouring threads own neighbouring elements.
    by_kernel = [i for i, unit in enumerate(units) if unit > 1]
    if by_kernel:
        first, last = by_kernel[0], by_kernel[-1]
        constants = sizes[first], sizes[last], blocks[first], units[first], units[last], ROWS, COLS
        go = launcher(copy_kernel, (sum(blocks[i] for i in by_kernel),))

    def copies(*matrices: Tensor) -> list[Tensor]:
        made = [t.new_empty_strided(t.shape, stride) for t, stride in zip(matrices, strides, strict=True)]
        for i, unit in enumerate(units):
            if unit == 1:
                made[i].copy_(matrices[i])
        if by_kernel:
            go(matrices[first], matrices[last], made[first], made[last], *constants)
        return made

    return copies


def _stored(t: Tensor) -> Tensor:
    """A matrix as its rows lie in memory."""
    return t if t.stride(1) == 1 else t.t()


def _room(stored: Tensor) -> Tensor:
    """As large as a matrix, uninitialised, with rows that begin at multiples of 128 bytes."""
    rows, cols = stored.shape
    return stored.new_empty(rows, cols + -cols % 64)[:, :cols]


def _as_copied(t: Tensor) -> Tensor:
    """As large as a matrix, uninitialised; its rows, or its columns if it lies so, begin at multiples of 128 bytes."""
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
    copied = which(a, b)

    def of_copied(a: Tensor, b: Tensor) -> list[Tensor]:
        return [t for t, it_is in zip((a, b), copied, strict=True) if it_is]

    copies = copier(*of_copied(a, b))
    product = prepare_product(*(_as_copied(t) if it_is else t for t, it_is in zip((a, b), copied, strict=True)))

    def run(a: Tensor, b: Tensor) -> Tensor:
        made = copies(*of_copied(a, b))
        return product(made[0] if copied[0] else a, made[-1] if copied[1] else b)

    return run
