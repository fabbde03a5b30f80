"""Rung 4: the tiles that see most keys start first, of as many heads at a time as fit into L2."""

import math

from lessonkit import device

import torch
import triton
import triton.language as tl

from problems.attention import expect_heads, precision

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
# Where a maximum starts. Not -inf: as long as a row has seen no key, -inf - -inf would make it NaN for good.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def tile_ptrs(base, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to ROWS rows of a head of a [B, H, S, D] tensor, and which of them are inside of it."""
    rows, cols = row + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    # int64 before each stride: any of these may pass 2^31
    head = base + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    ptrs = head + rows.to(tl.int64) * strides[2] + cols.to(tl.int64) * strides[3]
    return ptrs, (rows < S) & (cols < D)


@triton.jit
def visible(rows, keys, S_k, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether each query of rows [:, None] sees each key of keys [None, :]."""
    ahead = keys - (rows + offset)
    mask = keys < S_k
    if CAUSAL:
        mask = mask & (ahead <= 0)
    if WINDOW:
        mask = mask & (ahead > -window)
    return mask


@triton.jit
def bounds(
    row, S_q, S_k, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(begin, first, last, end): keys from begin to end are seen by a query of the tile, those from first to last, in
    whole blocks, by all of them."""
    begin, end = 0, S_k
    if CAUSAL:
        end = tl.minimum(S_k, tl.minimum(row + BLOCK_M, S_q) + offset)  # what the last query of the tile sees
    if WINDOW:
        begin = tl.maximum(0, row + offset - window + 1) // BLOCK_N * BLOCK_N  # what the first one sees
    first = begin
    last = (tl.minimum(S_k, tl.maximum(0, row + offset + 1)) if CAUSAL else S_k) // BLOCK_N * BLOCK_N
    if WINDOW:
        first = tl.cdiv(tl.maximum(0, row + BLOCK_M + offset - window), BLOCK_N) * BLOCK_N
        last = tl.maximum(first, last)
    return begin, first, last, end


# A program owns BLOCK_M queries of a head. GROUP heads of Q share a head of K and V. HEADS heads of Q are worked on at
# a time; `group` numbers these sets of HEADS heads.
@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr,  # [B, H, S_q, D], twice [B, H_kv, S_k, D], [B, H, S_q, D]
    lse_ptr,  # [B, H, S_q] in fp32
    q_strides, k_strides, v_strides, o_strides,
    scale_log2, window, B, H, S_q, S_k, D, GROUP, HEADS, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S_q, BLOCK_M)
    program = tl.program_id(0)
    if CAUSAL:  # New: the last tiles of HEADS heads, then the tiles before these; then the next heads
        group = program // (HEADS * tiles)
        within = program - group * HEADS * tiles
        width = tl.minimum(HEADS, B * H - group * HEADS)
        head, nth = group * HEADS + within % width, tiles - 1 - within // width
    else:
        head, nth = program // tiles, program % tiles
    b, h, row = head // H, head % H, nth * BLOCK_M
    rows = row + tl.arange(0, BLOCK_M)
    offset = S_k - S_q
    limits = bounds(row, S_q, S_k, offset, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    q_ptrs, q_inside = tile_ptrs(q_ptr, q_strides, b, h, row, S_q, D, BLOCK_M, BLOCK_D)
    q = tl.load(q_ptrs, mask=q_inside, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    h_kv = h // GROUP
    # 0 the window's edge, 1 the blocks that every query sees, which need no mask, 2 the diagonal and the tail
    for part in tl.static_range(3):
        if part > 0 or WINDOW:
            for start in range(limits[part], tl.minimum(limits[part + 1], limits[3]), BLOCK_N):
                k_ptrs, k_inside = tile_ptrs(k_ptr, k_strides, b, h_kv, start, S_k, D, BLOCK_N, BLOCK_D)
                k = tl.load(k_ptrs, mask=k_inside, other=0.0)
                s = tl.dot(q, k.T, input_precision=PRECISION)
                if part != 1:
                    keys = start + tl.arange(0, BLOCK_N)
                    mask = visible(rows[:, None], keys[None, :], S_k, offset, window, CAUSAL, WINDOW)
                    s = tl.where(mask, s, -float("inf"))
                m_new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
                p = tl.exp2(s * scale_log2 - m_new[:, None])
                alpha = tl.exp2(m - m_new)
                v_ptrs, v_inside = tile_ptrs(v_ptr, v_strides, b, h_kv, start, S_k, D, BLOCK_N, BLOCK_D)
                v = tl.load(v_ptrs, mask=v_inside, other=0.0)
                acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
                l = l * alpha + tl.sum(p, axis=1)
                m = m_new
    empty = l == 0
    o = acc / tl.where(empty, 1.0, l)[:, None]
    o_ptrs, o_inside = tile_ptrs(o_ptr, o_strides, b, h, row, S_q, D, BLOCK_M, BLOCK_D)
    tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=o_inside)
    lse = tl.where(empty, -float("inf"), (m + tl.log2(l)) * LN2)
    tl.store(lse_ptr + (tl.cast(b, tl.int64) * H + h) * S_q + rows, lse, mask=rows < S_q)


def longest_first(q, k, v, causal=False, window=None, scale=None):
    """As masked."""
    scale = expect_heads(q, k, v, causal, window, scale)
    (B, H, S_q, D), (H_kv, S_k) = q.shape, k.shape[1:3]
    o, lse = torch.empty_like(q), torch.empty(B, H, S_q, device=q.device)
    if not o.numel():
        return o, lse
    (block_m, block_n, warps, stages), block_d = tile(q), max(16, triton.next_power_of_2(D))
    group = H // H_kv
    heads = min(B * H, group * at_once(2 * S_k * block_d * q.element_size()))
    attention_kernel[(B * H * triton.cdiv(S_q, block_m),)](
        q, k, v, o, lse, q.stride(), k.stride(), v.stride(), o.stride(), scale * LOG2E.value, window or 0,
        B, H, S_q, S_k, D, group, heads, causal, window is not None,
        block_m, block_n, block_d, precision(), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return o, lse


def at_once(bytes_a_head):
    """New: how many K heads to work on at a time, so that their K and V, bytes_a_head each, fill half of L2."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size if device.HAS_GPU else 2**16 if device.INTERPRETED else 2**26
    return max(1, l2 // 2 // max(1, bytes_a_head))


def tile(q):
    """Queries, keys, warps and stages: the scores and O in registers, the stages in shared memory."""
    if q.element_size() == 4:
        return (64, 64, 8, 1) if q.shape[-1] <= 128 else (32, 32, 4, 1)
    if q.shape[-1] > 128:
        return (128, 64, 8, 2) if device.roomy() else (64, 32, 4, 2)
    return (128, 128, 8, 3) if device.roomy() else (128, 64, 4 if q.shape[-1] <= 64 else 8, 2)
