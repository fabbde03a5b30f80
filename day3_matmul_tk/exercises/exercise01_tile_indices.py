"""Tile indices: which part of C does a program own?
=================================================
A program owns one tile of C = A B and goes along K. The work is to compute addresses: of the tile's rows and columns,
and of the blocks of A [BLOCK_M, BLOCK_K] and B [BLOCK_K, BLOCK_N] in each step. Here the sizes are whole multiples of
the blocks, so there are no masks. The strides are arbitrary, so a transposed operand costs nothing.

Predict: the elements of A and B that a grid of tiles loads, as multiples of their sizes. (Each row of tiles reads B
again.)
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl


@triton.jit
def matmul_kernel(
    a_ptr,  # [M, K], element [m, k] at m * a_m + k * a_k
    b_ptr,  # [K, N], element [k, n] at k * b_k + n * b_n
    c_ptr,  # [M, N], contiguous
    N,
    K,
    a_m,
    a_k,
    b_k,
    b_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # TODO(1): the rows [BLOCK_M] and columns [BLOCK_N] of this program's tile. Programs go along a row of tiles first.
    # stub: rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    pid, tiles_n = tl.program_id(0), N // BLOCK_N
    rows = (pid // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (pid % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    # END(1)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        # TODO(2): load the block of A and the block of B for k in [start, start + BLOCK_K), and add their product.
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + rows[:, None] * a_m + k[None, :] * a_k)
        b = tl.load(b_ptr + k[:, None] * b_k + cols[None, :] * b_n)
        acc = tl.dot(a, b, acc)
        # END(2)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc)


def matmul(a, b):
    """a [M, K] @ b [K, N] -> [M, N], 16-bit, any strides; M and N multiples of 32, K of 16."""
    expect(a=a, b=b, ndim=2, same_dtype=True, dtypes=[torch.float16, torch.bfloat16])
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    grid = ((M // 32) * (N // 32),)
    matmul_kernel[grid](a, b, c, N, K, *a.stride(), *b.stride(), BLOCK_M=32, BLOCK_N=32, BLOCK_K=16)
    return c


# The learner's file ends here.
from lessonkit import DEVICE, case
from lessonkit.exercise import Exercise, Wrong


def inputs(M, N, K, transposed=False, dtype=torch.float16):
    a, b = torch.randn(M, K, device=DEVICE).to(dtype), torch.randn(K, N, device=DEVICE).to(dtype)
    return (a.T.contiguous().T, b.T.contiguous().T) if transposed else (a, b)


EXERCISE = Exercise(
    op=matmul,
    reference=lambda a, b: a @ b,
    inputs=inputs,
    dtypes=(torch.float16, torch.bfloat16),
    cases=(
        case("one tile, one step", M=32, N=32, K=16),
        case("one tile, three steps along K", M=32, N=32, K=48),
        case("more tiles along N than along M", M=64, N=96, K=32),
        case("A and B are stored transposed", M=64, N=32, K=32, transposed=True),
        case("2 x 2 tiles, on which bytes are counted", M=64, N=64, K=64),
    ),
    reads=2,
    hints=(
        "Number the tiles on paper for 2 rows and 3 columns of tiles. Row and column of tile 4?",
        "Row of tiles: pid // tiles_n, column: pid % tiles_n, tiles_n = N // BLOCK_N. A vector [:, None] runs down, "
        "[None, :] runs along.",
        "`a_ptr + rows[:, None] * a_m + k[None, :] * a_k`, `b_ptr + k[:, None] * b_k + cols[None, :] * b_n` with "
        "`k = start + tl.arange(0, BLOCK_K)`; `acc = tl.dot(a, b, acc)`.",
    ),
    predicted="A is loaded N / BLOCK_N times, once for each column of tiles, and B is loaded M / BLOCK_M times.",
    wrong=(
        Wrong(
            "tiles are counted along M",
            "tiles_n = tl.program_id(0), N // BLOCK_N",
            "tiles_n = tl.program_id(0), 2",
            "out of bounds",
        ),
        Wrong(
            "row and column of tiles are exchanged",
            "(pid // tiles_n) * BLOCK_M",
            "(pid % tiles_n) * BLOCK_M",
            "out of bounds",
        ),
        Wrong("every step takes the first block of K", "k = start + tl", "k = tl"),
        Wrong("B is addressed as if it were row-major", "cols[None, :] * b_n", "cols[None, :]"),
        Wrong(
            "A's strides are exchanged",
            "rows[:, None] * a_m + k[None, :] * a_k",
            "rows[:, None] * a_k + k[None, :] * a_m",
        ),
        Wrong("each product replaces the one before", "tl.dot(a, b, acc)", "tl.dot(a, b)"),
    ),
)
