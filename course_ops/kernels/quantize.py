"""x -> e4m3 and a scale for each group: the group's largest magnitude becomes 448, e4m3's largest number."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from course_ops._common import Unsupported, triton_interprets
from course_ops.kernels._rows import common_multiple_of, in_chunks, multiple, widen

FP8 = torch.float8_e4m3fn
_INTERPRETED = tl.constexpr(triton_interprets())


# Magnitudes are compared as integers. Of two floats that are not negative, the larger has the larger bits. The bits of
# NaN are above those of infinity. So a NaN makes its group's scale NaN, as in PyTorch; a maximum of floats drops NaN.
@triton.jit
def magnitude(x):
    return tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def largest_bits(bits, SQUARE: tl.constexpr):
    bits = tl.max(bits, axis=1, keep_dims=True)
    return tl.max(bits, axis=0, keep_dims=True) if SQUARE else bits


@triton.jit
def scale_of(bits):
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full(bits.shape, 448.0, tl.float32))
    return tl.where(scale == 0, 1.0, scale)  # of zeros, or of numbers so small that the quotient is one


# The fp32 quotient must be rounded correctly. If it were off by one bit near the middle of two values of e4m3, it would
# be rounded to the wrong one. An exact division, div_rn, costs 30 instructions per element. This is Markstein's way: x
# times 1/scale, with one division for a group, and then a correction by the remainder that this leaves.
@triton.jit
def quantized(x, scale):
    if _INTERPRETED:  # its fma rounds twice
        q = tl.div_rn(x, scale + tl.zeros_like(x))
    else:
        # Scales below 2^-60 are made larger, and x with them, or the remainder would lose its last bits below 2^-126.
        up = tl.where(scale < 2.0**-60, 2.0**64, 1.0)
        divisor = scale * up
        # x and 1/scale are negated, so that q = -0 keeps its sign: a remainder of 0 is +0, and times -1/scale it is -0.
        # Times 1/scale it would be +0, and -0 + 0 is +0.
        inverse = tl.div_rn(tl.full(scale.shape, -1.0, tl.float32), divisor)
        # Of an infinite scale the inverse is 0, and so is the quotient of a finite x; inf times 0 is NaN, as it should.
        divisor = tl.where(inverse == 0, 0.0, divisor)
        x = x * -up
        q = x * inverse
        q = tl.fma(tl.fma(q, tl.broadcast_to(divisor, x.shape), x), tl.broadcast_to(inverse, x.shape), q)
    return tl.clamp(q, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


# A program holds whole groups, so that the maximum is known while x is still in registers: x is read once. It holds
# them as CHUNKS tiles, all of them loaded before the first use: STEP_M rows or STEP_K columns on from one to the next.
@triton.jit
def quantize_kernel(
    x_ptr, q_ptr, scale_ptr, M, K, stride_x, stride_g, sixteen,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr, STEP_M: tl.constexpr, STEP_K: tl.constexpr,
    SQUARE: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    K, stride_x = multiple(K, MULTIPLE), multiple(stride_x, MULTIPLE)
    SHARED: tl.constexpr = SQUARE or STEP_K > 0  # all tiles are one group, or the same rows
    TALL: tl.constexpr = STEP_M * (CHUNKS - 1) + BLOCK_M
    WIDE: tl.constexpr = STEP_K * (CHUNKS - 1) + BLOCK_K
    rows = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, BLOCK_M)[:, None]
    ks = tl.program_id(1) * WIDE + tl.arange(0, BLOCK_K)[None, :]
    tiles = ()
    for chunk in tl.static_range(CHUNKS):
        row, k = rows + chunk * STEP_M, ks + chunk * STEP_K
        tile = tl.load(x_ptr + row * stride_x + k, mask=(row < M) & (k < K), other=0.0, eviction_policy="evict_first")
        tiles = tiles + (tile,)  # noqa: RUF005
    bits = magnitude(tiles[0])
    if SHARED:
        for chunk in tl.static_range(1, CHUNKS):
            bits = tl.maximum(bits, magnitude(tiles[chunk]))
    scale = scale_of(largest_bits(bits, SQUARE))
    for chunk in tl.static_range(CHUNKS):
        row, k = rows + chunk * STEP_M, ks + chunk * STEP_K
        if not SHARED and chunk > 0:
            scale = scale_of(largest_bits(magnitude(tiles[chunk]), SQUARE))
        q = quantized(widen(tiles[chunk], sixteen), scale)
        tl.store(q_ptr + row * K + k, q, mask=(row < M) & (k < K))
        if not SHARED or chunk == 0:
            group = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64) if SQUARE else row
            here = group * (TALL if SQUARE else 1) < M
            tl.store(scale_ptr + group * stride_g + tl.program_id(1), scale, mask=here)


# A group larger than a tile takes two kernels: maxima, to which all programs with a part of it contribute by an atomic;
# then the division.
@triton.jit
def largest_kernel(
    x_ptr, bits_ptr, M, K, stride_x, stride_g, GROUP_M, GROUP_K,  # x [M, K]; bits of each group's maximum, int32, 0
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SQUARE: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    K, stride_x = multiple(K, MULTIPLE), multiple(stride_x, MULTIPLE)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    ks = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    x = tl.load(x_ptr + rows * stride_x + ks, mask=(rows < M) & (ks < K), other=0.0)
    bits = largest_bits(magnitude(x), SQUARE)
    first = rows if not SQUARE else tl.program_id(0).to(tl.int64) * BLOCK_M + tl.zeros((1, 1), tl.int64)
    at = first // GROUP_M * stride_g + tl.program_id(1) * BLOCK_K // GROUP_K
    # One thread of a program does it. A look at the maximum before, to spare it, would be every warp's.
    tl.atomic_max(bits_ptr + at, bits, mask=first < M, sem="relaxed")


@triton.jit
def divide_kernel(
    x_ptr, bits_ptr, q_ptr, scale_ptr, M, K, stride_x, stride_g, GROUP_M, GROUP_K,  # as above; q [M, K], scales
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    K, stride_x = multiple(K, MULTIPLE), multiple(stride_x, MULTIPLE)
    # Backwards: what the maxima have read last is still in the L2.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCK_M
    rows = row + tl.arange(0, BLOCK_M)[:, None]
    k = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_K
    ks = k + tl.arange(0, BLOCK_K)[None, :]
    mask = (rows < M) & (ks < K)
    x = tl.load(x_ptr + rows * stride_x + ks, mask=mask, other=0.0).to(tl.float32)
    at = rows // GROUP_M * stride_g + k // GROUP_K
    scale = scale_of(tl.load(bits_ptr + at, mask=rows < M, other=0))
    tl.store(q_ptr + rows * K + ks, quantized(x, scale), mask=mask)
    tl.store(scale_ptr + at, scale, mask=(rows < M) & (rows % GROUP_M == 0) & (k % GROUP_K == 0))  # one of them does


def group_shape(x: Tensor, scheme: str) -> tuple[int, int]:
    """Rows and columns of a group."""
    sizes = {"tensor": tuple(x.shape), "rows": (1, x.shape[1]), "blocks": (1, 128), "squares": (128, 128)}
    rows, cols = sizes[scheme]
    return max(1, rows), max(1, cols)


def scale_shape(x: Tensor, scheme: str) -> tuple[int, int]:
    """Groups down and across. An empty [M, K] still has the scales of its rows, and one of the tensor."""
    if scheme == "tensor":
        return 1, 1
    rows, cols = group_shape(x, scheme)
    down, across = triton.cdiv(x.shape[0], rows), triton.cdiv(x.shape[1], cols)
    return down, 1 if scheme == "rows" else across


def quantize(x: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """x [M, K], unit last stride -> q [M, K] e4m3, scales in fp32. Reads x once unless a group passes 16384 columns."""
    (M, K), group = x.shape, group_shape(x, scheme)
    most = 65535 * (128 if group[1] == 128 else 1024)  # the grid's second axis has so many programs
    if most < K:
        raise Unsupported(f"x has {K} columns, expected at most {most}: view it as more rows of fewer columns")
    q = torch.empty(x.shape, dtype=FP8, device=x.device)
    scale = torch.empty(scale_shape(x, scheme), dtype=torch.float32, device=x.device)
    if not x.numel():
        scale.fill_(1.0)
    elif scheme == "tensor" or group[1] > 16384:
        _two_passes(x, q, scale, group)
    else:
        block, chunks, step, warps = _tiles(group, x.element_size())
        quantize_kernel[triton.cdiv(M, step[0] * (chunks - 1) + block[0]), triton.cdiv(K, group[1])](
            x, q, scale, M, K, x.stride(0), scale.stride(0), 16, *block, chunks, *step, group[0] > 1,
            common_multiple_of(K, x.stride(0)), num_warps=warps,
        )  # fmt: skip
    return q, scale


def _tiles(group: tuple[int, int], itemsize: int) -> tuple[tuple[int, int], int, tuple[int, int], int]:
    """Rows and columns of a tile, tiles of a program, how far apart they are, warps."""
    if group == (128, 128):
        return (32, 128), 4, (32, 0), 16
    if group[1] == 128:
        return (16, 128), 2, (16, 0), 4
    if group[1] <= 1024:  # several rows
        cols = triton.next_power_of_2(group[1])
        return (2048 // cols, cols), 1, (0, 0), 4
    plan = in_chunks(group[1], itemsize)
    return (1, plan.block), plan.count, (0, plan.block), plan.warps


def _two_passes(x: Tensor, q: Tensor, scale: Tensor, group: tuple[int, int]) -> None:
    (M, K), block = x.shape, (32, 128) if group[1] == 128 else (4, 1024)  # whole groups across, or parts of one
    grid = triton.cdiv(M, block[0]), triton.cdiv(K, block[1])
    bits = torch.zeros(scale.shape, dtype=torch.int32, device=x.device)
    known = common_multiple_of(K, x.stride(0))
    args = M, K, x.stride(0), scale.stride(0), *group, *block
    largest_kernel[grid](x, bits, *args, group[0] > 1, known, num_warps=8)
    divide_kernel[grid](x, bits, q, scale, *args, known, num_warps=8)
