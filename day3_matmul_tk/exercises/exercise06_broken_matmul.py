"""Debug: a matmul that is right for 256 x 256 x 16
================================================
This kernel advances its pointers instead of computing addresses in each step. Its only test is one matmul whose K is
one block, and it passes. It is wrong in three places. For each, say which K or which strides show it, then fix it.
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl


@triton.jit
def matmul_kernel(
    a_ptr,  # [M, K], element [m, k] at m * a_m + k
    b_ptr,  # [K, N], element [k, n] at k * b_k + n
    c_ptr,  # [M, N], contiguous
    M,
    N,
    K,
    a_m,
    b_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * a_m + k[None, :]
    b_ptrs = b_ptr + k[:, None] * b_k + cols[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        left = K - start
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & (k[None, :] < left), other=0.0)
        b = tl.load(b_ptrs, mask=(k[:, None] < left) & (cols[None, :] < N), other=0.0)
        acc += tl.dot(a, b)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * b_k
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, mask=(rows[:, None] < M) & (cols[None, :] < N))


def matmul(a, b):
    """a [M, K] @ b [K, N] -> [M, N], 16-bit; rows of a and b any distance apart."""
    expect(a=a, b=b, ndim=2, same_dtype=True, unit_stride=True, dtypes=[torch.float16, torch.bfloat16])
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 32))
    matmul_kernel[grid](a, b, c, M, N, K, a.stride(0), b.stride(0), BLOCK_M=32, BLOCK_N=32, BLOCK_K=16)
    return c


# The learner's file ends here.
from lessonkit import DEVICE, case
from lessonkit.exercise import Exercise, Wrong


def inputs(M, N, K, pad=0, dtype=torch.float16):
    a, b = torch.randn(M, K + pad, device=DEVICE).to(dtype), torch.randn(K, N + pad, device=DEVICE).to(dtype)
    return a[:, :K], b[:, :N]


EXERCISE = Exercise(
    op=matmul,
    reference=lambda a, b: a @ b,
    inputs=inputs,
    dtypes=(torch.float16, torch.bfloat16),
    cases=(
        case("the author's, smaller", M=64, N=64, K=16),
        case("two steps along K", M=32, N=32, K=32),
        case("the last step is short", M=32, N=32, K=24),
        case("rows further apart than they are long", M=20, N=33, K=40, pad=7),
        case("a long K: sums of 16 bits fall behind", M=16, N=16, K=2048),
    ),
    hints=(
        "Look at what matters only from the second step on: what advances, what is masked, which dtype accumulates.",
        "One block further along K is BLOCK_K elements in a row of A. How many is it in B? The index k counts from 0 "
        "in every step: what must it be compared with? What dtype has the sum between steps?",
        "`b_ptrs += BLOCK_K * b_k`; compare k with K - start; `acc += tl.dot(a, b)`, which stays fp32.",
    ),
    wrong=(
        Wrong("B's pointers move along a row", "b_ptrs += BLOCK_K * b_k", "b_ptrs += BLOCK_K", planted=True),
        Wrong(
            "k counts from 0 in every step but is compared with all of K",
            "left = K - start",
            "left = K",
            "out of bounds",
            planted=True,
        ),
        Wrong(
            "the sum is rounded to 16 bits in every step",
            "acc += tl.dot(a, b)",
            "acc = (acc + tl.dot(a, b)).to(c_ptr.dtype.element_ty).to(tl.float32)",
            planted=True,
        ),
        Wrong("rows of A are taken to lie K apart", "rows[:, None] * a_m", "rows[:, None] * K"),
        Wrong("A does not move", "        a_ptrs += BLOCK_K\n", ""),
    ),
)
