"""C = A B by portable kernels: pointers for any strides, TMA descriptors from Hopper on."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from course_ops._common import architecture, cdiv, fp32_precision, num_sms, shared_memory, tma_takes
from course_ops.kernels._tiles import multiply_tile, predicted_cycles, swizzled_tile


# A program computes one tile; programs are ordered in groups of 8 rows of tiles, for L2.
@triton.jit
def pointers_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = swizzled_tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    multiply_tile(
        a_ptr, b_ptr, c_ptr, tile_m, tile_n, M, N, K,
        stride_am, stride_ak, stride_bk, stride_bn, stride_cm, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip


def matmul_pointers(a: Tensor, b: Tensor) -> Tensor:
    """[M, K], [K, N] -> [M, N], any strides. 4 stages of 32 KB, fewer on a GPU with less shared memory."""
    c = a.new_empty(a.shape[0], b.shape[1])
    block = (128, 128, 64) if a.element_size() == 2 else (64, 64, 32)  # fp32 operands take more registers
    if c.numel():
        pointers_kernel[(cdiv(c.shape[0], block[0]) * cdiv(c.shape[1], block[1]),)](
            a, b, c, *c.shape, a.shape[1], *a.stride(), *b.stride(), c.stride(0), *block, fp32_precision(), 8,
            num_warps=8, num_stages=min(4, shared_memory(a.device) // ((128 + 128) * 64 * 2)),
        )  # fmt: skip
    return c


# fp32 without TF32 has no tensor cores: each thread multiplies a part of the tile by FMAs. A small tile leaves room for
# many programs on an SM. While one waits at a barrier, the others multiply. If B lay transposed, a thread would read
# shared memory in pieces of 4 bytes, so B is copied. Triton copies 16 bytes at a time only where it knows that sizes
# and strides are multiples of 16.
IEEE_TILE, IEEE_LARGE_TILE = (64, 64, 16), (128, 64, 16)


def matmul_ieee(a: Tensor, b: Tensor) -> Tensor:
    """[M, K], [K, N] -> [M, N] in fp32, exact, any strides. Copies what is no multiple of 16, and b if transposed."""
    (M, K), N, c = a.shape, b.shape[1], a.new_empty(a.shape[0], b.shape[1])
    k = _to_16(K)
    transposed = a.stride(1) != 1
    a = _fitted(a, _to_16(M) if transposed else M, k, a.stride(0) == 1 and transposed)
    b = _fitted(b, k, _to_16(N), False)
    out = c if c.shape == (len(a), b.shape[1]) else c.new_empty(len(a), b.shape[1])
    tile, sms = IEEE_TILE, num_sms(a.device)
    if transposed:
        tiles = IEEE_LARGE_TILE, IEEE_TILE
        tile = min(tiles, key=lambda t: cdiv(cdiv(M, t[0]) * cdiv(N, t[1]), sms) * t[0] * t[1])
    pointers_kernel[(cdiv(len(a), tile[0]) * cdiv(b.shape[1], tile[1]),)](
        a, b, out, *out.shape, k, *a.stride(), *b.stride(), out.stride(0), *tile, "ieee", 8, num_warps=4, num_stages=4
    )
    return c if out is c else c.copy_(out[:M, :N])


def _to_16(n: int) -> int:
    return n + -n % 16


def _fitted(t: Tensor, rows: int, cols: int, by_columns: bool) -> Tensor:
    """t if it is rows x cols and its rows, or columns, begin at multiples of 64 bytes; else a copy with zeros."""
    outer, inner = t.stride()[::-1] if by_columns else t.stride()
    if t.shape == (rows, cols) and inner == 1 and outer % 16 == 0 and t.data_ptr() % 16 == 0:
        return t
    new = t.new_empty if t.shape == (rows, cols) else t.new_zeros
    copy = new(cols, _to_16(rows)).t()[:rows] if by_columns else new(rows, _to_16(cols))[:, :cols]
    copy[: t.shape[0], : t.shape[1]] = t
    return copy


def ieee_pays(a: Tensor, b: Tensor) -> bool:
    """Whether matmul_ieee takes them: fp32, exact, and no side so small that a copy costs."""
    large = min(a.shape[0], b.shape[1], a.shape[1]) >= 64
    return a.dtype == torch.float32 and fp32_precision() == "ieee" and large and architecture(a.device) >= 80


# Persistent: a program an SM. flatten makes one pipelined loop of tiles and steps, so that the next tile's loads run
# under this tile's epilogue. C is stored in halves: a whole tile's staging would take a stage of the ring.
@triton.jit
def tma_kernel(
    a_desc, b_desc, c_desc,  # [M, K] or, if A_T, [K, M]; [K, N] or, if B_T, [N, K]; [M, N]
    M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    A_T: tl.constexpr, B_T: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = swizzled_tile(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            k = step * BLOCK_K
            # .T is free: wgmma reads a 16-bit tile in either order from shared memory.
            a = a_desc.load([k, row]).T if A_T else a_desc.load([row, k])
            b = b_desc.load([col, k]).T if B_T else b_desc.load([k, col])
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        # A thread holds columns of both halves, so the split moves nothing between threads.
        left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
        c_desc.store([row, col], left.to(c_desc.dtype))
        c_desc.store([row, col + BLOCK_N // 2], right.to(c_desc.dtype))


TMA_TILES = ((128, 256, 64), (128, 128, 64), (64, 128, 128))


def matmul_tma(a: Tensor, b: Tensor) -> Tensor:
    """[M, K], [K, N] -> [M, N], K > 0. What TMA cannot copy in place (rows not 16-byte aligned) is copied first."""
    c = a.new_empty(a.shape[0], b.shape[1])
    a, b = (t if tma_takes(t) or tma_takes(t.t()) else _aligned_like(t).copy_(t) for t in (a, b))
    out = c if tma_takes(c) else _aligned_like(c)
    m, n, k = block = _tma_tile(a, c)
    a_t, b_t = a.stride(-1) != 1, b.stride(-1) != 1
    stages = (shared_memory(a.device) - 1024 - m * n * a.element_size() // 2) // ((m + n) * k * a.element_size())
    tma_kernel[(min(num_sms(a.device), cdiv(c.shape[0], m) * cdiv(c.shape[1], n)),)](
        TensorDescriptor.from_tensor(a.t() if a_t else a, [k, m] if a_t else [m, k]),
        TensorDescriptor.from_tensor(b.t() if b_t else b, [n, k] if b_t else [k, n]),
        TensorDescriptor.from_tensor(out, [m, n // 2]),
        *c.shape, a.shape[1], *block, fp32_precision(), 16, a_t, b_t,
        num_warps=8 if m > 64 or a.element_size() != 2 else 4, num_stages=max(1, min(4, stages)),
    )  # fmt: skip
    return c if out is c else c.copy_(out)


def _tma_tile(a: Tensor, c: Tensor) -> tuple[int, int, int]:
    """The tile of least predicted time; in fp32, where operands take registers, always the small one."""
    if a.element_size() != 2:
        return 64, 64, 32
    sms = num_sms(a.device)
    return min(TMA_TILES, key=lambda tile: predicted_cycles(*c.shape, a.shape[1], *tile, sms))


def _aligned_like(t: Tensor) -> Tensor:
    """As large as t, uninitialised, with rows that begin at multiples of 16 bytes."""
    return t.new_empty(t.shape[0], t.shape[1] + -t.shape[1] % 8)[:, : t.shape[1]]


def tma_pays(a: Tensor, b: Tensor) -> bool:
    """Whether matmul_tma is the portable kernel to take: TMA exists, and no side is so small that a copy costs."""
    return min(a.shape[0], b.shape[1], a.shape[1]) >= 64 and architecture(a.device) >= 90


def zeros(a: Tensor, b: Tensor) -> Tensor:
    """[M, N] of zeros: the sum over no elements."""
    return torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
