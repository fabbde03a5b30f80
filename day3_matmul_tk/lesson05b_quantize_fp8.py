"""Quantisation to fp8: the largest number of a group decides
==========================================================
x [M, K] becomes q in e4m3 and a scale for each group, so that q * scale is x, nearly: scale = max |x| / 448, for 448 is
the largest number that e4m3 has, and q = x / scale rounded to 3 bits of mantissa. A number loses at most 1/16 of
itself, unless it is 2^15 times smaller than the largest of its group: then it becomes a multiple of 2^-9 * scale, or 0.

    scheme   group           scales in fp32         who takes them (lesson 5)
    tensor   all of x        [1, 1]                 both, per tensor
    rows     a row           [M, 1]                 both, row-wise
    blocks   1 x 128         [M, K/128]             A, blockwise: activations have outliers in some columns
    squares  128 x 128       [M/128, K/128]         B, blockwise: weights, whose transposed blocks are blocks too

x in bf16 is 2 bytes a number in, q one out. But the maximum has to be known before the first number is divided: two
kernels read x twice, 5 bytes a number; a program that holds a whole group reads it once, 3 bytes. Predicted: 1.67 times
faster, where x is larger than L2. It is one reason for small groups, and why the scale of a tensor is often the one of
the step before.

You will learn: maxima by integers, rounding that must agree to the bit, what a group costs in traffic and in digits.
Run it:    python day3_matmul_tk/lesson05b_quantize_fp8.py
Check it:  python -m lessonkit check lesson05b_quantize_fp8
Time it:   python -m lessonkit bench lesson05b_quantize_fp8
"""

import math

from lessonkit import DEVICE, FLOATS, Lesson, Mutant, Refusal, Work, by_inductor, case, expect, needs

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

FP8 = torch.float8_e4m3fn
fp8 = needs(89, "fp8 conversions", interpreted=True)


def reference(x, scheme):
    """q as its bytes, [M, K] uint8, and the scales. Reads x for the maxima, and again to divide by them."""
    (M, K), (rows, cols) = x.shape, _group(x, scheme)
    m, k = _groups(x, scheme)
    wide = F.pad(x.to(torch.promote_types(x.dtype, torch.float32)), (0, k * cols - K, 0, m * rows - M))
    wide = wide.view(m, rows, k, cols)
    most = wide.abs().amax((1, 3))
    # A group of zeros: any scale but 0. By a tensor, since PyTorch's GPU code divides by a number as * (1 / number).
    scale = torch.where(most == 0, 1.0, most / torch.full_like(most, 448))
    q = (wide / scale[:, None, :, None]).clamp(-448, 448).to(FP8)  # e4m3 has no infinity: past 464 it would be NaN
    return q.view(m * rows, k * cols)[:M, :K].contiguous().view(torch.uint8), scale


def _group(x, scheme):
    sizes = {"tensor": x.shape, "rows": (1, x.shape[1]), "blocks": (1, 128), "squares": (128, 128)}
    if scheme not in sizes:
        raise ValueError(f"scheme is {scheme!r}, expected one of {', '.join(sizes)}")
    return tuple(max(1, n) for n in sizes[scheme])


def _groups(x, scheme):
    """How many groups there are down and across."""
    return tuple(
        triton.cdiv(n, g) if n or g == 128 or scheme == "rows" else 1
        for n, g in zip(x.shape, _group(x, scheme), strict=True)
    )


# Magnitudes are compared as integers: of floats that are not negative the larger has the larger bits, and NaN is above
# infinity, so that a NaN makes its group's scale NaN, as in PyTorch; a maximum of floats would pass it over.
@triton.jit
def largest_bits(x, SQUARE: tl.constexpr):
    bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1, keep_dims=True)
    return tl.max(bits, axis=0, keep_dims=True) if SQUARE else bits


@triton.jit
def scale_of(bits):
    most = bits.to(tl.float32, bitcast=True)
    return tl.where(most == 0, 1.0, tl.div_rn(most, tl.full(most.shape, 448.0, tl.float32)))


@triton.jit
def quantized(x, scale):
    # div_rn: / may be off by a bit, and a number near the middle of two of e4m3's would then go to the other one.
    q = tl.div_rn(x, scale + tl.zeros_like(x))
    return tl.clamp(q, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


# Rung 1. Two kernels: maxima, to which all programs with a part of a group contribute by an atomic; then the division.
# Predicted: 5 bytes a number of x in bf16, 1.67 times the least.
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


# Rung 2. New: a tile that holds whole groups, so that the maximum is known while x is still in registers. Predicted: 3
# bytes a number. A group larger than a tile (a tensor, a very long row) still takes two kernels.
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
    """As quantize_twice; reads x once, unless a group is larger than a tile of 16384 numbers."""
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
    scale = torch.empty(_groups(x, scheme), dtype=torch.float32, device=x.device)
    if not x.numel():
        scale.fill_(1.0)
    return x.shape, _group(x, scheme), torch.empty(x.shape, dtype=FP8, device=x.device), scale


def inputs(M, K, scheme="blocks", dtype=torch.float32, pad=0):
    # Magnitudes from 2^-12 to 2^12 in neighbouring blocks: a neighbour's maximum is far off. And a row of zeros.
    x = torch.randn(M, K + pad, device=DEVICE)
    x *= torch.exp2(torch.arange(M, device=DEVICE) * 5 % 13 - 6.0)[:, None]
    x *= torch.exp2(torch.arange(K + pad, device=DEVICE) // 64 * 7 % 13 - 6.0)
    x[1:2] = 0
    return x.to(dtype)[:, :K], scheme


def _work(M, K, dtype, scheme="blocks", pad=0):
    scales = math.prod(_groups(torch.empty(M, K, device="meta"), scheme))
    return Work(bytes=M * K * (dtype.itemsize + 1) + 4 * scales, flops=3 * M * K)


def little_is_lost(rung):
    """Off by 1/16 of itself or half of e4m3's smallest step at most; and the fewer in a group, the fewer zeros."""
    x, _ = inputs(256, 256, dtype=torch.bfloat16)
    zeros = []
    for scheme in ("tensor", "rows", "blocks"):
        (q, scale), (rows, cols) = rung(x, scheme), _group(x, scheme)
        scale = scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[:256, :256].double()
        q = q.view(FP8)
        error = (q.double() * scale - x.double()).abs()
        assert (error <= (x.double().abs() / 16).maximum(scale * 2**-10) * 1.0001).all()
        zeros.append(int((q.float() == 0).sum()))
    assert zeros[0] > zeros[1] > zeros[2]


def strange_numbers(rung):
    """A NaN makes its group NaN; in a group with an infinity the others are 0 and the infinity NaN: as in PyTorch."""
    x, scheme = inputs(4, 300)
    x[0, 5], x[2, 200], x[3, 299] = math.nan, math.inf, -math.inf
    (q, scale), (q2, scale2) = rung(x, scheme), reference(x, scheme)
    torch.testing.assert_close(scale, scale2, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(q.view(FP8).float(), q2.view(FP8).float(), rtol=0, atol=0, equal_nan=True)


# fmt: off
WRONG = (
    Mutant("/ 2^9, not / 448", "scale_of", "448.0", "512.0", "quantize"),
    Mutant("the sign kept", "largest_bits", "tl.abs(x)", "x", "quantize"),
    Mutant("groups of another row", "divide_kernel", "rows // GROUP_M * stride_g", "rows // GROUP_M", "quantize_twice"),
    Mutant("no scale for zeros", "scale_of", "most == 0", "most < 0", "quantize"),
    Mutant("the row's end from the next row", "quantize_kernel", "(ks < K)", "(ks <= K)", "quantize", "out of bounds"),
)
REFUSES = (
    Refusal("no such scheme", lambda f: f(inputs(2, 8)[0], "columns"), ValueError, "expected one of"),
    Refusal("every second column", lambda f: f(inputs(2, 8)[0][:, ::2], "rows"), ValueError, "stride 2"),
    Refusal("integers", lambda f: f(torch.ones(2, 8, dtype=torch.int32, device=DEVICE), "rows"), TypeError, "x is"),
    Refusal("gradient lost", lambda f: f(inputs(2, 8)[0].requires_grad_(), "rows"), ValueError, "grad"),
)
# fmt: on

LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    rungs=(quantize_twice, quantize),
    checks=(
        case("no rows", M=0, K=5),
        case("rows of nothing", M=3, K=0, scheme="rows"),
        case("one number", M=1, K=1, scheme="tensor"),
        case("a prime: the last group is cut", M=37, K=131),
        case("squares cut on both sides", M=130, K=259, scheme="squares"),
        case("rows 3 numbers apart; a row in many parts", M=5, K=1021, scheme="rows", pad=3),
        case("all programs contribute to one maximum", M=70, K=300, scheme="tensor"),
        case("a row longer than a tile", M=2, K=16400, scheme="rows"),
        case("past element 2^31", gib=60, M=2**18 + 1, K=2**13 + 1),
        case("the bytes are counted here", M=64, K=512),
    ),
    benches=tuple({"M": 8192, "K": 8192, "scheme": s} for s in ("tensor", "rows", "blocks", "squares")),
    work=_work,
    wrong=WRONG,
    peers={"torch": reference, "torch.compile": by_inductor(reference)},
    claims={quantize: ("quantize_kernel: 16-byte loads", "quantize_kernel: no spills")},
    passes={quantize_twice: 1.67, quantize: 1.0},
    properties=(little_is_lost, strange_numbers),
    refuses=REFUSES,
    dtypes=FLOATS,
)

if __name__ == "__main__":
    LESSON.main()
