"""Masks for odd shapes
====================
A matmul of 33 x 65 x 19 is no multiple of the tile in any direction. Rows and columns past the end may hold any values,
as long as they are not stored, but the kernel must not read outside. K is different: every element of C is a sum over
all of the block's k, so both blocks must be 0 past K.

Predict: of the multiplications of a 33 x 65 x 19 matmul in blocks of 32, 32 and 16, how many are wasted?
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl


@triton.jit
def matmul_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [K, N]
    c_ptr,  # [M, N]; all contiguous
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        # TODO(1): load both blocks, safe at both of their edges.
        # stub: a = tl.load(a_ptr + rows[:, None] * K + k[None, :])
        # stub: b = tl.load(b_ptr + k[:, None] * N + cols[None, :])
        a = tl.load(a_ptr + rows[:, None] * K + k[None, :], mask=(rows[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + cols[None, :], mask=(k[:, None] < K) & (cols[None, :] < N), other=0.0)
        # END(1)
        acc = tl.dot(a, b, acc)
    # TODO(2): store what exists.
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, mask=(rows[:, None] < M) & (cols[None, :] < N))
    # END(2)


def matmul(a, b):
    """a [M, K] @ b [K, N] -> [M, N], 16-bit, contiguous, any sizes."""
    expect(a=a, b=b, ndim=2, same_dtype=True, contiguous=True, dtypes=[torch.float16, torch.bfloat16])
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    if c.numel():
        grid = (triton.cdiv(M, 32), triton.cdiv(N, 32))
        matmul_kernel[grid](a, b, c, M, N, K, BLOCK_M=32, BLOCK_N=32, BLOCK_K=16)
    return c


# The learner's file ends here.
from lessonkit import DEVICE, case
from lessonkit.exercise import Exercise, Wrong


def inputs(M, N, K, dtype=torch.float16):
    return torch.randn(M, K, device=DEVICE).to(dtype), torch.randn(K, N, device=DEVICE).to(dtype)


EXERCISE = Exercise(
    op=matmul,
    reference=lambda a, b: a @ b,
    inputs=inputs,
    dtypes=(torch.float16, torch.bfloat16),
    cases=(
        case("no rows", M=0, N=5, K=3),
        case("K = 0: the answer is 0", M=3, N=5, K=0),
        case("one element", M=1, N=1, K=1),
        case("whole tiles, and K hangs over", M=32, N=32, K=17),
        case("all three hang over", M=33, N=65, K=19),
        case("2 x 2 tiles, on which bytes are counted", M=64, N=64, K=64),
    ),
    reads=2,
    hints=(
        "Two masks for each load, joined with `&`: one for its rows, one for its columns.",
        "A needs rows < M and k < K, B needs k < K and cols < N, C needs rows < M and cols < N. other=0.0 for the "
        "loads.",
        "`mask=(rows[:, None] < M) & (k[None, :] < K), other=0.0`; the same for B with (k[:, None] < K) & "
        "(cols[None, :] < N).",
    ),
    predicted="79%: 64 * 96 * 32 multiplications are done, and 33 * 65 * 19 are needed.",
    wrong=(
        Wrong(
            "A has no mask along K: it reads the next row",
            "mask=(rows[:, None] < M) & (k[None, :] < K), other",
            "mask=(rows[:, None] < M), other",
            "out of bounds",
        ),
        Wrong(
            "B has no mask along K",
            "mask=(k[:, None] < K) & (cols",
            "mask=(k[:, None] < K + BLOCK_K) & (cols",
            "out of bounds",
        ),
        Wrong("A has no mask along M", "mask=(rows[:, None] < M) & (k[None", "mask=(k[None", "out of bounds"),
        Wrong(
            "the store has no mask along N: it writes into the next row",
            "acc, mask=(rows[:, None] < M) & (cols[None, :] < N)",
            "acc, mask=(rows[:, None] < M) & (cols[None, :] < N + BLOCK_N)",
            "out of bounds",
        ),
        Wrong("the last block of K is left out", "range(0, K, BLOCK_K)", "range(0, K - BLOCK_K + 1, BLOCK_K)"),
    ),
)
