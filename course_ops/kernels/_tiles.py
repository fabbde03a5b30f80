"""What the matmul kernels share: the order of tiles, an estimate of a tile's time, zeros that calls share."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def swizzled_tile(index, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """The tile (row, column) that comes index-th: down GROUP rows of tiles, then to the next column of tiles."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = index // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)  # the last group may be lower
    within = index % (GROUP * tiles_n)
    return first + within % height, within // height


@triton.jit
def multiply_tile(
    a_ptr, b_ptr, c_ptr,  # [M, K], [K, N], [M, N]
    tile_m, tile_n, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of C by pointers and masks, for any strides of A and B."""
    # int64 before any stride: a row number times a stride passes 2^31 as soon as the matrix does.
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + ks[None, :].to(tl.int64) * stride_ak
    b_ptrs = b_ptr + ks[:, None].to(tl.int64) * stride_bk + cols[None, :] * stride_bn
    a_step = tl.full([], BLOCK_K, tl.int64) * stride_ak
    b_step = tl.full([], BLOCK_K, tl.int64) * stride_bk
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        # Past K both operands are 0: one alone would not do, since 0 * inf is NaN.
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & (ks[None, :] < K - k), other=0)
        b = tl.load(b_ptrs, mask=(ks[:, None] < K - k) & (cols[None, :] < N), other=0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += a_step
        b_ptrs += b_step
    c_ptrs = c_ptr + rows[:, None] * stride_cm + cols[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def predicted_cycles(M: int, N: int, K: float, block_m: int, block_n: int, block_k: float, sms: int) -> float:
    """Cycles of a 16-bit matmul on Hopper if only tensor cores and L2 cost time. It ranks tiles; it predicts no time.

    For 8-bit operands pass half of K and of block_k: a step of as many bytes takes as long.
    """
    tiles = math.ceil(M / block_m) * math.ceil(N / block_n)
    share = min(64, 5120 / min(tiles, sms))  # bytes per cycle from L2; an SM takes no more than 64
    step = max(block_m * block_n * block_k / 2048, 2 * (block_m + block_n) * block_k / share)
    step += 300  # wait for a stage and issue its MMA: why steps should not be short
    ends = 1500 + 2 * block_m * block_n / share  # until the first operands arrive, and to write C
    return math.ceil(tiles / sms) * (math.ceil(K / block_k) * step + ends)


def stream_zeros(x: Tensor, count: int, kind: object) -> Tensor:
    """int32 zeros that the calls on this stream share, for kernels that leave them ready for the next call.

    Calls on one stream run one after another. A CUDA graph, which may be replayed at any time, gets zeros of its own.
    """
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=x.device)
    stream = triton.runtime.driver.active.get_current_stream(x.device.index) if x.is_cuda else 0
    key = x.device, stream, count, kind
    zeros = _zeros.get(key)
    if zeros is None:
        zeros = _zeros[key] = torch.zeros(count, dtype=torch.int32, device=x.device)
    return zeros


_zeros: dict[object, Tensor] = {}
