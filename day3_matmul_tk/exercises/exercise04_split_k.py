"""Split-K: work for all SMs when C is small
=========================================
C = A B of 128 x 128 is one tile: one SM works and 131 are idle, however long K is. Split K into S pieces, and let S
programs work on the same tile. Each writes its partial sums, in fp32, to parts [S, M, N], and a second kernel adds the
parts. The price is 4 S MN bytes written and read again. The gain is up to S times the SMs:

    K         |  split 0  |  split 1  |  split 2  |        S = 3
    parts        [M, N]      [M, N]      [M, N]            fp32, one for each split
    C            [M, N] = the sum of the parts, in a fixed order

Predict: for M = N = 128 and S = 32, bytes of the parts over bytes of A and B in bf16 at K = 16384.
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl


@triton.jit
def partial_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [K, N]
    parts_ptr,  # [S, M, N] fp32; all contiguous
    M,
    N,
    K,
    per_split,  # k of a split: a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # TODO(1): the first k of this split, and the k after its last. The last split ends at K.
    # stub: begin, end = 0, K
    begin = split * per_split
    end = min(begin + per_split, K)
    # END(1)
    for start in range(begin, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + rows[:, None] * K + k[None, :], mask=(rows[:, None] < M) & (k[None, :] < end), other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + cols[None, :], mask=(k[:, None] < end) & (cols[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
    # TODO(2): store this split's partial sums at their place in parts.
    at = split * M * N + rows[:, None] * N + cols[None, :]
    tl.store(parts_ptr + at, acc, mask=(rows[:, None] < M) & (cols[None, :] < N))
    # END(2)


@triton.jit
def add_parts_kernel(parts_ptr, c_ptr, size, S, BLOCK: tl.constexpr):  # [S, size] fp32 -> [size]
    # TODO(3): add S parts in fp32, round once.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(S):
        total += tl.load(parts_ptr + split * size + at, mask=at < size, other=0.0)
    tl.store(c_ptr + at, total, mask=at < size)
    # END(3)


def matmul(a, b, S):
    """a [M, K] @ b [K, N] -> [M, N], 16-bit, contiguous, K cut into S pieces."""
    expect(a=a, b=b, ndim=2, same_dtype=True, contiguous=True, dtypes=[torch.float16, torch.bfloat16])
    (M, K), N = a.shape, b.shape[1]
    parts = torch.empty(S, M, N, dtype=torch.float32, device=a.device)
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    per_split = triton.cdiv(triton.cdiv(K, S), 16) * 16
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 32), S)
    partial_kernel[grid](a, b, parts, M, N, K, per_split, BLOCK_M=32, BLOCK_N=32, BLOCK_K=16)
    add_parts_kernel[(triton.cdiv(M * N, 256),)](parts, c, M * N, S, BLOCK=256)
    return c


# The learner's file ends here.
from lessonkit import DEVICE, case
from lessonkit.exercise import Exercise, Wrong


def inputs(M, N, K, S, dtype=torch.float16):
    return torch.randn(M, K, device=DEVICE).to(dtype), torch.randn(K, N, device=DEVICE).to(dtype), S


EXERCISE = Exercise(
    op=matmul,
    reference=lambda a, b, S: a @ b,
    inputs=inputs,
    dtypes=(torch.float16, torch.bfloat16),
    cases=(
        case("one split", M=32, N=32, K=32, S=1),
        case("two splits of two steps each", M=32, N=32, K=64, S=2),
        case("K does not divide, C hangs over", M=33, N=20, K=75, S=3),
        case("more splits than steps: the last must still write zeros", M=16, N=16, K=40, S=5),
        case("one tile, four splits, on which bytes are counted", M=32, N=32, K=256, S=4),
    ),
    reads=1 + 4 * 4 / (2 * 2 * 256 / 32),  # A and B once, and S parts of 4 bytes
    writes=1 + 4 * 4 / 2,
    hints=(
        "Each split owns a piece of K and a part of its own. No program adds to another program's part.",
        "Split s owns k in [s * per_split, min((s + 1) * per_split, K)); its part begins at s * M * N. A split whose "
        "range is "
        "empty stores zeros.",
        "`at = split * M * N + rows[:, None] * N + cols[None, :]`; in the second kernel a loop "
        "`for split in range(S): total += tl.load(parts_ptr + split * size + at, ...)`.",
    ),
    predicted=(
        "1/4: 2 MiB of parts over 8 MiB of A and B. They are written and read, so they add half of the "
        "traffic of A and B."
    ),
    wrong=(
        Wrong("every split does all of K", "begin = split * per_split", "begin = 0", "value"),
        Wrong("the end of a split is not the beginning of the next", "min(begin + per_split, K)", "K", "value"),
        Wrong("all splits write the same part", "at = split * M * N +", "at = 0 * split +", "nan"),
        Wrong("the sum leaves out the last part", "for split in range(S)", "for split in range(S - 1)"),
        Wrong(
            "it adds to parts, which were not set to zero",
            "    tl.store(parts_ptr + at, acc, mask=",
            "    acc += tl.load(parts_ptr + at, mask=(rows[:, None] < M) & (cols[None, :] < N))\n"
            "    tl.store(parts_ptr + at, acc, mask=",
            "nan",
        ),
        Wrong("the last split reads past K", "min(begin + per_split, K)", "begin + per_split", "out of bounds"),
    ),
)
