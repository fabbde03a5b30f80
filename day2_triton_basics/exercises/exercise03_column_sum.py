"""Sum the columns
===============
z[n] = sum over m of x[m, n]: the gradient of a bias, and half of a norm's backward. It must read MN elements and
write N, so one read of x is the whole cost.

A reduction along a row gives each program contiguous memory. Down a column, neighbours are a whole row apart. So let a
program own a block of neighbouring columns and walk down the rows: each step is still one wide load.

The block has two dimensions. rows[:, None] is a column of row numbers, cols[None, :] is a row of column numbers, and
an operation on both gives every pair:

    100 * rows[:, None] + cols[None, :]      rows = [0, 1], cols = [4, 5, 6], and rows lie 100 apart

        row 0       4    5    6
        row 1     104  105  106

Predict: what does a program that owns a single column read, in 32-byte sectors, for the 2 bytes that it uses?
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl


@triton.jit
def column_sum_kernel(
    x_ptr,  # [M, N], rows `stride` elements apart
    z_ptr,  # [N]
    stride,
    M,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # A program owns BLOCK_N columns and walks down all the rows, BLOCK_M at a time.
    # TODO(1): keep running sums in fp32, add BLOCK_M rows in each step of a loop, store N sums.
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # One running sum in fp32 for each lane of the block. The rows of the block are added once, after the loop.
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, M, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (rows[:, None] < M) & (cols[None, :] < N)
        total += tl.load(x_ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    tl.store(z_ptr + cols, tl.sum(total, 0), mask=cols < N)
    # END(1)


def column_sum(x):
    """[M, N] -> [N], the sum of each column, accumulated in fp32; x may have any row stride."""
    expect(x=x, ndim=2, unit_stride=True)
    M, N = x.shape
    z = torch.empty(N, dtype=x.dtype, device=x.device)
    if N:
        column_sum_kernel[(triton.cdiv(N, 64),)](x, z, x.stride(0), M, N, BLOCK_M=32, BLOCK_N=64)
    return z


# The learner's file ends here.
from lessonkit import DEVICE, case
from lessonkit.exercise import Exercise, Wrong


def inputs(M, N, pad=0, dtype=torch.float32):
    # Between 0.5 and 0.9, and below the first quarter of the rows a 64th of that: a sum in 16 bits drops it all.
    x = torch.rand(M, N + pad, device=DEVICE) * 0.4 + 0.5
    x[M // 4 :] /= 64
    return (x.to(dtype)[:, :N],)


EXERCISE = Exercise(
    op=column_sum,
    reference=lambda x: x.sum(0),
    inputs=inputs,
    cases=(
        case("no rows: the sum is 0, not unwritten", M=0, N=5),
        case("one element", M=1, N=1),
        case("rows lie 100 apart, 65 of them used: one column past a block", M=7, N=65, pad=35),
        case("one row past a block of rows, one column short of two blocks", M=33, N=127),
        case("a long column: 16-bit accumulators stop growing", M=4097, N=64),
    ),
    hints=(
        "Neighbouring lanes must differ in the column. Masked lanes take part in the sum: which `other` does no harm?",
        "`rows[:, None] * stride + cols[None, :]` is a block of addresses; two masks are joined with `&`.",
        "Start from `tl.zeros([BLOCK_M, BLOCK_N], tl.float32)`, add a masked load (other=0.0) in each step of "
        "`for start in range(0, M, BLOCK_M)`, and store `tl.sum(total, 0)` once, after the loop.",
    ),
    predicted="One sector of 32 bytes in each row: 16 times the 2 bytes that it uses.",
    wrong=(
        Wrong(
            "the running sums have 16 bits",
            "tl.zeros([BLOCK_M, BLOCK_N], tl.float32)",
            "tl.zeros([BLOCK_M, BLOCK_N], z_ptr.dtype.element_ty)",
        ),
        Wrong("masked lanes take part in the sum, and hold anything", "mask=mask, other=0.0", "mask=mask", "nan"),
        Wrong("the loop stops after one block of rows", "range(0, M, BLOCK_M)", "range(1)"),
        Wrong("the rows have no mask", "(rows[:, None] < M) & ", "", "out of bounds"),
        Wrong("rows are taken to lie N apart", "rows[:, None] * stride", "rows[:, None] * N"),
        Wrong("it sums along the rows of the block", "tl.sum(total, 0)", "tl.sum(total, 1)", "error"),
    ),
)
