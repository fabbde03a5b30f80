"""Quantisation to fp8: each group's largest value sets its scale
==============================================================
Quantisation turns x [M, K] into q in e4m3 and a scale for each group: q * scale is close to x. The scale is max |x| /
448, since 448 is e4m3's largest value, and q is x / scale rounded to 3 bits of mantissa. An element is off by at most
1/16 of itself. One that is 2^15 times smaller than the largest of its group becomes a multiple of 2^-9 * scale, or 0.

    scheme   group           scales in fp32         used for (lesson 6)
    tensor   all of x        [1, 1]                 both, per tensor
    rows     a row           [M, 1]                 both, row-wise
    blocks   1 x 128         [M, K/128]             A, blockwise: activations have outliers in some columns
    squares  128 x 128       [M/128, K/128]         B, blockwise: weights, whose transposed blocks are blocks too

x in bf16 is 2 bytes per element read, and q one byte written. But the maximum must be known before the first element is
divided. Two kernels read x twice: 5 bytes per element. A program that holds a whole group reads it once: 3 bytes.
Predicted: 1.67 times as fast, where x is larger than L2. This is one reason for small groups. It is also why training
often takes a tensor's scale from the step before.

You will learn: maxima by integers, rounding that must agree to the bit, what a group costs in traffic and in digits.
Run it:    python3 course.py run lesson07_quantize_fp8
Check it:  python3 course.py check lesson07_quantize_fp8
Time it:   python3 course.py bench lesson07_quantize_fp8
"""

from lessonkit import About, Lesson, Mutant, Prediction, expect, needs

import torch
import triton
import triton.language as tl

from problems.quantize import FP8, PROBLEM, group_counts, group_shape

fp8 = needs(89, "fp8 conversions", interpreted=True)


# Magnitudes are compared as integers: of two floats that are not negative, the larger one has the larger bits. NaN is
# above infinity, so a NaN makes its group's scale NaN, as in PyTorch. A maximum of floats would ignore it.
@triton.jit
def largest_bits(x, SQUARE: tl.constexpr):
    bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1, keep_dims=True)
    return tl.max(bits, axis=0, keep_dims=True) if SQUARE else bits


@triton.jit
def scale_of(bits):
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full(bits.shape, 448.0, tl.float32))
    return tl.where(scale == 0, 1.0, scale)  # of zeros, or of numbers so small that the quotient is one


@triton.jit
def quantized(x, scale):
    # div_rn: / may be off by a bit, and a value near the middle of two e4m3 values would then round to the other one.
    q = tl.div_rn(x, scale + tl.zeros_like(x))
    return tl.clamp(q, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


# Rung 1. Two kernels. In the first all programs with a part of a group combine their maxima by an atomic. The second
# divides. Predicted: 5 bytes per element of x in bf16, 1.67 times the least.
@triton.jit
def largest_kernel(
    x_ptr, bits_ptr, M, K, stride_x, stride_g, GROUP_M, GROUP_K,  # x [M, K]; bits of each group's maximum, int32, 0
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    ks = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    x = tl.load(x_ptr + rows * stride_x + ks, mask=(rows < M) & (ks < K), other=0.0).to(tl.float32)
    bits = largest_bits(x, SQUARE)
    first = rows if not SQUARE else tl.program_id(0).to(tl.int64) * BLOCK_M + tl.zeros((1, 1), tl.int64)
    at = first // GROUP_M * stride_g + tl.program_id(1) * BLOCK_K // GROUP_K
    tl.atomic_max(bits_ptr + at, bits, mask=first < M, sem="relaxed")


@triton.jit
def divide_kernel(
    x_ptr, bits_ptr, q_ptr, scale_ptr, M, K, stride_x, stride_g, GROUP_M, GROUP_K,  # as above; q [M, K], scales
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    k = tl.program_id(1) * BLOCK_K
    ks = k + tl.arange(0, BLOCK_K)[None, :]
    mask = (rows < M) & (ks < K)
    x = tl.load(x_ptr + rows * stride_x + ks, mask=mask, other=0.0).to(tl.float32)
    at = rows // GROUP_M * stride_g + k // GROUP_K
    scale = scale_of(tl.load(bits_ptr + at, mask=rows < M, other=0))
    tl.store(q_ptr + rows * K + ks, quantized(x, scale), mask=mask)
    tl.store(scale_ptr + at, scale, mask=(rows < M) & (rows % GROUP_M == 0) & (k % GROUP_K == 0))  # one of them does


@fp8
def quantize_twice(x, scheme):
    """x [M, K] -> q [M, K] e4m3 seen as uint8, scales in fp32; scheme: tensor, rows, blocks, squares. Reads x twice."""
    (M, K), group, q, scale = _prepare(x, scheme)
    if x.numel():
        square = group[0] > 1
        block = (32, 128) if group[1] == 128 else (4, 1024)  # whole groups across, or parts of one
        grid = triton.cdiv(M, block[0]), triton.cdiv(K, block[1])
        bits = torch.zeros(scale.shape, dtype=torch.int32, device=x.device)
        largest_kernel[grid](x, bits, M, K, x.stride(0), scale.stride(0), *group, *block, square)
        divide_kernel[grid](x, bits, q, scale, M, K, x.stride(0), scale.stride(0), *group, *block)
    return q.view(torch.uint8), scale


# Rung 2. New: a tile that holds whole groups, so the maximum is known while x is still in registers. Predicted: 3 bytes
# an element. A group larger than a tile (a tensor, a very long row) still takes two kernels.
@triton.jit
def quantize_kernel(
    x_ptr, q_ptr, scale_ptr, M, K, stride_x, stride_g,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    ks = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    mask = (rows < M) & (ks < K)
    x = tl.load(x_ptr + rows * stride_x + ks, mask=mask, other=0.0).to(tl.float32)
    scale = scale_of(largest_bits(x, SQUARE))
    tl.store(q_ptr + rows * K + ks, quantized(x, scale), mask=mask)
    group = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64) if SQUARE else rows
    tl.store(scale_ptr + group * stride_g + tl.program_id(1), scale, mask=group * (BLOCK_M if SQUARE else 1) < M)


@fp8
def quantize(x, scheme):
    """As quantize_twice; reads x once, unless a group is larger than a tile of 16384 elements."""
    (M, K), group, q, scale = _prepare(x, scheme)
    if scheme == "tensor" or group[1] > 16384:
        return quantize_twice(x, scheme)
    if x.numel():
        cols = triton.next_power_of_2(group[1])
        rows = 128 if scheme == "squares" else max(1, 4096 // cols)
        grid = triton.cdiv(M, rows), triton.cdiv(K, group[1])
        quantize_kernel[grid](
            x, q, scale, M, K, x.stride(0), scale.stride(0), rows, cols, scheme == "squares",
            num_warps=min(16, max(4, rows * cols // 1024)),
        )  # fmt: skip
    return q.view(torch.uint8), scale


def _prepare(x, scheme):
    expect(x=x, ndim=2, unit_stride=True)
    scale = torch.empty(group_counts(x, scheme), dtype=torch.float32, device=x.device)
    if not x.numel():
        scale.fill_(1.0)
    return x.shape, group_shape(x, scheme), torch.empty(x.shape, dtype=FP8, device=x.device), scale


# fmt: off
WRONG = (
    Mutant("/ 2^9, not / 448", "scale_of", "448.0", "512.0", "quantize"),
    Mutant("the sign kept", "largest_bits", "tl.abs(x)", "x", "quantize"),
    Mutant("groups of another row", "divide_kernel", "rows // GROUP_M * stride_g", "rows // GROUP_M", "quantize_twice"),
    Mutant("no scale for zeros", "scale_of", "scale == 0", "scale < 0", "quantize"),
    Mutant("the row's end from the next row", "quantize_kernel", "(ks < K)", "(ks <= K)", "quantize", "out of bounds"),
)
# fmt: on

ROWS = {"M": 8192, "K": 8192, "scheme": "rows"}

LESSON = Lesson(
    about=About(
        teaches="from bf16 to fp8: maxima by integers, one read or two, rounding that agrees to the bit",
        hours=0.5,
        operator="quantisation",
        pictures=("quantisation_blocks",),
    ),
    problem=PROBLEM,
    rungs=(quantize_twice, quantize),
    predicted=(
        Prediction(rung=quantize_twice, at=ROWS, percent_of_limit=60),
        Prediction(rung=quantize, at=ROWS, times=1.67, over=quantize_twice),
    ),
    wrong=WRONG,
    claims={quantize: ("quantize_kernel: 16-byte loads", "quantize_kernel: no spills")},
    passes={quantize_twice: 1.67, quantize: 1.0},
)

if __name__ == "__main__":
    LESSON.main()
