"""C = (A scale_a) (B scale_b) in e4m3 by portable kernels: pointers for any scheme of scales, TMA for those of rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from course_ops._common import fitting_stages, num_sms, roomy
from course_ops.kernels._tiles import swizzled_tile

FP8 = torch.float8_e4m3fn
GROUP = 128  # of K, and of N in B: the blocks of the blockwise scheme


@triton.jit
def outer_scales(scale_a_ptr, scale_b_ptr, rows, cols, M, N, stride_am, stride_bn, SCHEME: tl.constexpr):
    if SCHEME == "tensor":
        scale = tl.load(scale_a_ptr) * tl.load(scale_b_ptr)
    else:
        scale_a = tl.load(scale_a_ptr + rows * stride_am, mask=rows < M, other=0.0)
        scale_b = tl.load(scale_b_ptr + cols * stride_bn, mask=cols < N, other=0.0)
        scale = scale_a[:, None] * scale_b[None, :]
    return scale


# Promotion: tensor cores add fp8 products with about 14 bits (DeepSeek-V3, section 3.3.2). So after every 128 of K the
# sum is added to fp32 registers. If the scales change with k, it is multiplied by those of the block first.
@triton.jit
def pointers_kernel(
    a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, c_ptr,  # [M, K], [K, N] lying as [N, K], scales, [M, N]
    M, N, K, stride_a, stride_b, stride_am, stride_ak, stride_bk, stride_bn,  # of a and b, and of their scales
    SCHEME: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = swizzled_tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, 8)
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
        else:
            acc += tl.dot(a, b)
    if SCHEME != "blocks":
        acc *= outer_scales(scale_a_ptr, scale_b_ptr, rows, cols, M, N, stride_am, stride_bn, SCHEME)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc.to(tl.bfloat16), mask=mask)


def fp8_pointers(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, scheme: str) -> Tensor:
    """a [M, K], b [K, N] with b.t() in rows, scales of any strides -> [M, N] in bf16, summed in fp32."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=torch.bfloat16, device=a.device)
    if c.numel():
        pointers_kernel[(triton.cdiv(M, 128) * triton.cdiv(N, 128),)](
            a, b, scale_a, scale_b, c, M, N, K, a.stride(0), b.stride(1), *scale_a.stride(), *scale_b.stride(),
            scheme, BLOCK_M=128, BLOCK_N=128, BLOCK_K=GROUP, num_warps=8, num_stages=3,
        )  # fmt: skip
    return c


# Persistent, C in halves. A row of a tile is 128 bytes of 128 elements: a stage holds twice the K of bf16's.
@triton.jit
def tma_kernel(
    a_desc, b_desc, scale_a_ptr, scale_b_ptr, c_desc, M, N, K, stride_am, stride_bn,
    SCHEME: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = swizzled_tile(tile, M, N, BLOCK_M, BLOCK_N, 8)
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


def fp8_tma(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, scheme: str) -> Tensor:
    """As fp8_pointers for "tensor" and "rows", rows at multiples of 16 bytes; summed by the tensor cores alone."""
    (M, K), N, sms = a.shape, b.shape[1], num_sms(a.device)
    c = torch.empty((M, N), dtype=torch.bfloat16, device=a.device)
    wide = roomy(a.device) and triton.cdiv(M, 128) * triton.cdiv(N, 256) >= sms
    block_n, stages = (256, 3) if wide else (128, 4)
    stages = fitting_stages(stages, (128 + block_n) * GROUP, a.device, beside=128 * block_n)
    a_desc, b_desc = (TensorDescriptor.from_tensor(t, [rows, GROUP]) for t, rows in ((a, 128), (b.t(), block_n)))
    c_desc = TensorDescriptor.from_tensor(c, [128, block_n // 2])
    tma_kernel[(min(sms, triton.cdiv(M, 128) * triton.cdiv(N, block_n)),)](
        a_desc, b_desc, scale_a, scale_b, c_desc, M, N, K, scale_a.stride(0), scale_b.stride(1),
        scheme, BLOCK_M=128, BLOCK_N=block_n, BLOCK_K=GROUP, num_warps=8, num_stages=stages,
    )  # fmt: skip
    return c
