"""Exercise 3: sum the columns
===========================
z[n] = sum over m of x[m, n]: the gradient of a bias, and half of a norm's backward. It must read MN elements and
write N, so one read of x is the whole cost.

A reduction along a row gives each program contiguous memory. Down a column, neighbours are a whole row apart: let a
program own a block of neighbouring columns and walk down the rows, so that each step is still one wide load.
Predict: what does a program that owns a single column read, in 32-byte sectors, for 2 bytes that it wants?
Run it:    python day2_triton_basics/exercises/exercise03_column_sum.py
Hints:     in the day's README. A solution: solutions/exercise03_column_sum.py
"""

from dataclasses import replace

from lessonkit import DEVICE, Work, case, expect, show

import torch
import triton
import triton.language as tl

from day2_triton_basics.lesson01_vector_add import LESSON


def reference(x):
    return x.sum(0)


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
    # Yours:
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # One running sum in fp32 for each lane of the block; the rows of the block meet once, after the loop.
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, M, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (rows[:, None] < M) & (cols[None, :] < N)
        total += tl.load(x_ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    tl.store(z_ptr + cols, tl.sum(total, 0), mask=cols < N)
    # End of yours.


def column_sum(x):
    """[M, N] -> [N], the sum of each column, accumulated in fp32; x may have any row stride."""
    expect(x=x, ndim=2, unit_stride=True)
    M, N = x.shape
    z = torch.empty(N, dtype=x.dtype, device=x.device)
    if N:
        column_sum_kernel[(triton.cdiv(N, 64),)](x, z, x.stride(0), M, N, BLOCK_M=32, BLOCK_N=64)
    return z


def inputs(M, N, pad=0, dtype=torch.float32):
    # Between 0.5 and 0.9: past 256, where bf16 counts in twos, a 16-bit accumulator drops all that is added.
    return ((torch.rand(M, N + pad, device=DEVICE) * 0.4 + 0.5).to(dtype)[:, :N],)


EXERCISE = replace(
    LESSON,
    reference=reference,
    inputs=inputs,
    rungs=(column_sum,),
    checks=(
        case("no rows: the sum is 0, not unwritten", M=0, N=5),
        case("one element", M=1, N=1),
        case("rows lie 100 apart, 65 of them used: one column past a block", M=7, N=65, pad=35),
        case("one row past a block of rows", M=33, N=3),
        case("a long column: 16-bit accumulators stop growing", M=24577, N=64),
    ),
    work=lambda M, N, dtype, pad=0: Work(bytes=(M * N + N) * dtype.itemsize, flops=M * N),
    passes={column_sum: 1.0},
    grad=None,
)

if __name__ == "__main__":
    raise SystemExit(show.checks("__main__", EXERCISE) > 0)
