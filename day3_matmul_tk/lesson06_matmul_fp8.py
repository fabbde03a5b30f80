"""Matmul in fp8: twice the FLOPs, half the bytes, and scales that make 8 bits enough
==================================================================================
The format e4m3 has 4 bits of exponent and 3 of mantissa. 448 is its largest value, 2^-9 its smallest. So A is stored as
q_a * s_a, q in fp8 and s an fp32 scale that maps the largest value of a group to 448 (lesson 7). With smaller groups an
outlier costs less accuracy. But the matmul has more to do, since it must multiply by the scales:

    scheme      scale_a [M or 1, K/128 or 1]   scale_b [K/128 or 1, N or N/128 or 1]   where they are multiplied in
    per tensor  [1, 1]                         [1, 1]                                  once a tile, in the epilogue
    row-wise    [M, 1]                         [1, N]                                  once a tile, in the epilogue
    blockwise   [M, K/128]                     [K/128, N/128]                          every 128 of K

Predicted against bf16: an SM's tensor cores do 4096 multiply-adds per cycle instead of 2048, and an element is one
byte. So a step takes half the time, to load and to multiply: twice the speed, 1400 TFLOP/s where bf16 has 700 (lesson
4), if the power limit allows it. The balance with L2 does not change: tiles of 128 x 256 need 48 bytes per cycle for
each SM, and L2 gives 39 (lesson 1), 81% of the peak. B must be stored as [N, K]: wgmma can read 16-bit tiles
transposed, but not 8-bit ones.

You will learn: what a scale may depend on, how tensor cores accumulate, and how promotion restores the lost digits.
Run it:    python3 course.py run lesson06_matmul_fp8
Check it:  python3 course.py check lesson06_matmul_fp8
Time it:   python3 course.py bench lesson06_matmul_fp8
"""

from lessonkit import About, Lesson, Mutant, Prediction, Unsupported, device, needs, num_sms, tma_takes

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from problems.matmul_fp8 import GROUP, PROBLEM, scheme_of

fp8 = needs(89, "fp8 tensor cores", interpreted=True)


@triton.jit
def place(program, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """The tile (row, column) that a program computes."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = program // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)  # the last group may be lower
    within = program % (GROUP * tiles_n)
    return first + within % height, within // height


# The matmul of rungs 1 to 4: one program for each tile of 128 x 128, and 128 bytes of K a step.
@triton.jit
def fp8_kernel(
    a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, c_ptr,  # [M, K], [K, N] stored as [N, K], scales as above, [M, N]
    M, N, K, stride_a, stride_b, stride_am, stride_ak, stride_bk, stride_bn,  # of a and b, and of their scales
    SCHEME: tl.constexpr, PROMOTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = place(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, 8)
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        ks = step * BLOCK_K + tl.arange(0, BLOCK_K)
        a_mask, b_mask = (rows[:, None] < M) & (ks[None, :] < K), (ks[:, None] < K) & (cols[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * stride_a + ks[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + ks[:, None] + cols[None, :] * stride_b, mask=b_mask, other=0.0)
        if SCHEME == "blocks":
            scale_a = tl.load(scale_a_ptr + rows * stride_am + step * stride_ak, mask=rows < M, other=0.0)
            scale_b = tl.load(scale_b_ptr + step * stride_bk + tile_n * stride_bn)  # a tile is as wide as a block of B
            acc += tl.dot(a, b) * (scale_a * scale_b)[:, None]
        elif PROMOTE:
            acc += tl.dot(a, b)  # the step's sum alone, which the threads add to acc in fp32
        else:
            acc = tl.dot(a, b, acc)
    if SCHEME != "blocks":
        acc *= outer_scales(scale_a_ptr, scale_b_ptr, rows, cols, M, N, stride_am, stride_bn, SCHEME)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc.to(tl.bfloat16), mask=mask)


@triton.jit
def outer_scales(scale_a_ptr, scale_b_ptr, rows, cols, M, N, stride_am, stride_bn, SCHEME: tl.constexpr):
    if SCHEME == "tensor":
        scale = tl.load(scale_a_ptr) * tl.load(scale_b_ptr)
    else:
        scale_a = tl.load(scale_a_ptr + rows * stride_am, mask=rows < M, other=0.0)
        scale_b = tl.load(scale_b_ptr + cols * stride_bn, mask=cols < N, other=0.0)
        scale = scale_a[:, None] * scale_b[None, :]
    return scale


# Rung 1. Lesson 1's kernel with another dtype: tl.dot takes fp8. One multiplication by s_a s_b in the epilogue.
@fp8
def fp8_tensor(a, b, scale_a, scale_b):
    """a [M, K], b [K, N] (b.t() contiguous) in e4m3, fp32 scales [1, 1] -> [M, N] in bf16.

    TypeError, ValueError for other arguments; Unsupported for the other schemes' scales.
    """
    return _launch(a, b, scale_a, scale_b, {"tensor"})


# Rung 2. New: one scale for each row of A and each column of B. These are the finest scales that do not change within a
# sum: the sum over k of (q_a s_m) (q_b s_n) is s_m s_n times the sum of q_a q_b. Predicted: the same time.
@fp8
def fp8_rows(a, b, scale_a, scale_b):
    """As fp8_tensor, and scales [M, 1] and [1, N]."""
    return _launch(a, b, scale_a, scale_b, {"tensor", "rows"})


# Rung 3. New: promotion. Hopper's tensor cores accumulate fp8 products with about 14 bits (DeepSeek-V3, section 3.3.2).
# Each wgmma aligns its 32 products and the sum to the largest of them, and truncates the rest. It does not round, so a
# sum of one sign loses up to 2^-13 of itself each time, 1% after the 128 times of K = 4096.
# So every 128 of K the sum is added to an accumulator in fp32 registers and starts at 0 again: 4 truncations, not 128.
# The costs are 16,384 additions, 128 cycles of an SM beside 512 of its tensor cores, and a second set of registers, so
# 128 x 256 does not fit. Predicted: 20% slower.
@fp8
def fp8_promoted(a, b, scale_a, scale_b):
    """As fp8_rows, added up in fp32."""
    return _launch(a, b, scale_a, scale_b, {"tensor", "rows"}, promote=True)


# Rung 4. New: scales that change with k. They need the promotion anyway, and its addition becomes a multiply-add, by
# s_a[m, k/128] s_b[k/128, n/128]. Predicted: the time of rung 3.
@fp8
def fp8_blocks(a, b, scale_a, scale_b):
    """As fp8_rows, and scales [M, K/128] and [K/128, N/128] (rounded up), each any strides."""
    return _launch(a, b, scale_a, scale_b, {"tensor", "rows", "blocks"}, promote=True)


def _launch(a, b, scale_a, scale_b, schemes, promote=False):
    scheme, (M, K), N = scheme_of(a, b, scale_a, scale_b), a.shape, b.shape[1]
    if scheme not in schemes:
        raise Unsupported(f"this rung takes the scales of {' and '.join(sorted(schemes))}: not of {scheme}")
    c = torch.empty((M, N), dtype=torch.bfloat16, device=a.device)
    if c.numel():
        fp8_kernel[(triton.cdiv(M, 128) * triton.cdiv(N, 128),)](
            a, b, scale_a, scale_b, c, M, N, K, a.stride(0), b.stride(1), *scale_a.stride(), *scale_b.stride(),
            scheme, promote, BLOCK_M=128, BLOCK_N=128, BLOCK_K=GROUP, num_warps=8, num_stages=3,
        )  # fmt: skip
    return c


# Rung 5. New: a persistent kernel, TMA, C in halves (lesson 2), and tiles of 128 x 256 where there are enough of them.
# A row of a tile is 128 bytes again, now 128 elements, so a stage holds twice the K of bf16. Block scales stay with
# rung 4's kernel: this one has no registers for a second accumulator of 128 x 256.
# Predicted: lesson 2's gain: 81% of the peak for 128 x 256, where 128 x 128 has 61%. That is 1.33 times rung 1.
@triton.jit
def fp8_persistent_kernel(
    a_desc, b_desc, scale_a_ptr, scale_b_ptr, c_desc, M, N, K, stride_am, stride_bn,
    SCHEME: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = place(tile, M, N, BLOCK_M, BLOCK_N, 8)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        rows = row.to(tl.int64) + tl.arange(0, BLOCK_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            acc = tl.dot(a_desc.load([row, step * BLOCK_K]), b_desc.load([col, step * BLOCK_K]).T, acc)
        halves = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        for half in tl.static_range(2):
            start = col + half * (BLOCK_N // 2)
            cols = start + tl.arange(0, BLOCK_N // 2)
            scales = outer_scales(scale_a_ptr, scale_b_ptr, rows, cols, M, N, stride_am, stride_bn, SCHEME)
            c_desc.store([row, start], (halves[half] * scales).to(tl.bfloat16))


@fp8
def matmul_fp8(a, b, scale_a, scale_b):
    """As fp8_blocks; with row-wise and per-tensor scales the tensor cores alone accumulate (fast accumulation)."""
    scheme, (M, K), N = scheme_of(a, b, scale_a, scale_b), a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=torch.bfloat16, device=a.device)
    if scheme == "blocks" or not tma_takes(a, b.t(), c):
        return fp8_blocks(a, b, scale_a, scale_b)
    wide = device.roomy() and triton.cdiv(M, 128) * triton.cdiv(N, 256) >= num_sms()
    block_n, stages = (256, 3) if wide else (128, 4)
    stages = device.fitting_stages(stages, (128 + block_n) * GROUP, 128 * block_n)
    a_desc, b_desc = (TensorDescriptor.from_tensor(t, [rows, GROUP]) for t, rows in ((a, 128), (b.t(), block_n)))
    c_desc = TensorDescriptor.from_tensor(c, [128, block_n // 2])
    fp8_persistent_kernel[(min(num_sms(), triton.cdiv(M, 128) * triton.cdiv(N, block_n)),)](
        a_desc, b_desc, scale_a, scale_b, c_desc, M, N, K, scale_a.stride(0), scale_b.stride(1),
        scheme, BLOCK_M=128, BLOCK_N=block_n, BLOCK_K=GROUP, num_warps=8, num_stages=stages,
    )  # fmt: skip
    return c


# fmt: off
WRONG = (
    Mutant("one row's scale for all", "outer_scales", "rows * stride_am", "rows * 0", "fp8_rows"),
    Mutant("the last step alone", "fp8_kernel", "acc += tl.dot(a, b)  #", "acc = tl.dot(a, b)  #", "fp8_promoted"),
    Mutant("the first scales of K for all", "fp8_kernel", "step * stride_ak", "0 * stride_ak", "fp8_blocks"),
    Mutant("scales of one step on all before", "fp8_kernel", "acc += tl.dot(a, b) *", "acc = (acc + tl.dot(a, b)) *",
           "matmul_fp8"),
    Mutant("the tail of K from the next row", "fp8_kernel", "(ks[None, :] < K)", "(ks[None, :] < K + 1)", "fp8_tensor",
           "out of bounds"),
    Mutant("a block of B for all of N", "fp8_kernel", "tile_n * stride_bn", "0 * stride_bn", "fp8_blocks"),
)
# fmt: on

TENSOR = {"M": 8192, "N": 8192, "K": 8192, "scheme": "tensor"}
ROWS = {"M": 8192, "N": 8192, "K": 8192, "scheme": "rows"}

LESSON = Lesson(
    about=About(
        teaches="scales per tensor, row and block; how tensor cores accumulate, and how to get lost digits back",
        hours=0.75,
        operator="fp8 matmul",
        pictures=("quantisation_blocks",),
    ),
    problem=PROBLEM,
    rungs=(fp8_tensor, fp8_rows, fp8_promoted, fp8_blocks, matmul_fp8),
    predicted=(
        Prediction(rung=fp8_tensor, at=TENSOR, tflop_per_s=1400),
        Prediction(rung=fp8_rows, at=TENSOR, times=1, over=fp8_tensor),
        Prediction(
            rung=fp8_promoted,
            at=ROWS,
            times=0.8,
            over=fp8_rows,
            why="The second set of sums also takes the registers of the second program on the SM, which had "
            "covered the first one's waits.",
        ),
        Prediction(rung=fp8_blocks, at=ROWS, times=1, over=fp8_promoted),
        Prediction(rung=matmul_fp8, at=TENSOR, times=1.33, over=fp8_tensor),
    ),
    wrong=WRONG,
    claims={
        fp8_rows: ("wgmma", "no spills"),
        fp8_blocks: ("wgmma",),
        matmul_fp8: tuple(f"fp8_persistent_kernel: {c}" for c in ("wgmma", "tma", "no spills")),
    },
    passes={fp8_tensor: 1.0, matmul_fp8: 1.0},
)

if __name__ == "__main__":
    LESSON.main()
