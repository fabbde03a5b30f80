"""Attention, forward, in portable Triton: every option, every GPU (FlashAttention-2: Dao 2023, algorithm 1).

A program owns a tile of queries and walks over the blocks of keys that some of its queries see. Blocks that all of
them see need no mask; only the window's edge, the diagonal and the tail are masked.
"""

import triton
import triton.language as tl
from torch import Tensor

from course_ops._common import architecture, fp32_precision, roomy, tma_takes
from course_ops.kernels.attention_tiles import (
    LN2,
    LOWEST,
    capped,
    empty_results,
    heads_in_l2,
    key_bounds,
    load_tile,
    online_softmax,
    score_scales,
    store_tile,
    tile_descriptors,
    tile_widths,
    visible,
)
from course_ops.kernels.sequences import Sequences, find_tile, grid_tiles, skip_rows


@triton.jit
def attend_blocks(
    acc, l, m, q_tile, k, v, k_strides, v_strides, b, h_kv, rows, start_at, stop_at, S_k, D, D_v, offset,
    window, scale_log2, cap_scale, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take some blocks of keys into acc [BLOCK_M, BLOCK_V], the row sums l and maxima m [BLOCK_M], in powers of 2."""
    for start in range(start_at, stop_at, BLOCK_N):
        k_tile = load_tile(k, k_strides, b, h_kv, start, S_k, D, BLOCK_N, BLOCK_D, TMA)
        s = capped(tl.dot(q_tile, k_tile.T, input_precision=PRECISION), cap_scale)
        if MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            s = tl.where(visible(rows[:, None], keys[None, :], S_k, offset, window, CAUSAL, WINDOW), s, -float("inf"))
        p, m, alpha = online_softmax(s, m, scale_log2)
        v_tile = load_tile(v, v_strides, b, h_kv, start, S_k, D_v, BLOCK_N, BLOCK_V, TMA)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
        l = l * alpha + tl.sum(p, axis=1)
    return acc, l, m


@triton.jit
def attention_kernel(
    q, k, v, o,  # [B, H, S_q, D], [B, H_kv, S_k, D] and D_v, [B, H, S_q, D_v]: pointers, or descriptors if TMA
    lse_ptr,  # [B, H, S_q] in fp32
    q_strides, k_strides, v_strides, o_strides,
    scale_log2, cap_scale, window, B, H, S_q, S_k, D, D_v, GROUP, HEADS_AT_ONCE,  # cap_scale: None without a softcap
    cu_q_ptr, cu_k_ptr,  # None, or of B sequences packed in one: S_q and S_k are totals then
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    line = S_q
    b, h, row, q_begin, S_q, k_begin, S_k = find_tile(
        cu_q_ptr, cu_k_ptr, B, H, S_q, S_k, HEADS_AT_ONCE, BLOCK_M, CAUSAL, False
    )
    if cu_q_ptr is not None:
        if row >= S_q:
            return
        q, o = skip_rows(q, q_strides, q_begin), skip_rows(o, o_strides, q_begin)
        k, v = skip_rows(k, k_strides, k_begin), skip_rows(v, v_strides, k_begin)
        lse_ptr += q_begin
    rows = row + tl.arange(0, BLOCK_M)
    offset = S_k - S_q
    edges = key_bounds(row, S_q, S_k, offset, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    q_tile = load_tile(q, q_strides, b, h, row, S_q, D, BLOCK_M, BLOCK_D, TMA)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for part in tl.static_range(3):  # the window's edge, the blocks without masks, the diagonal and the tail
        if part > 0 or WINDOW:
            acc, l, m = attend_blocks(
                acc, l, m, q_tile, k, v, k_strides, v_strides, b, h // GROUP, rows,
                edges[part], tl.minimum(edges[part + 1], edges[3]), S_k, D, D_v, offset, window, scale_log2, cap_scale,
                CAUSAL, WINDOW, part != 1, TMA, BLOCK_N, BLOCK_D, BLOCK_V, PRECISION,
            )  # fmt: skip
    empty = l == 0
    store_tile(o, acc / tl.where(empty, 1.0, l)[:, None], o_strides, b, h, row, S_q, D_v, BLOCK_M, BLOCK_V, TMA)
    lse = tl.where(empty, -float("inf"), (m + tl.log2(l)) * LN2)
    tl.store(lse_ptr + (tl.cast(b, tl.int64) * H + h) * line + rows, lse, mask=rows < S_q)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float, softcap: float | None = None,
    sequences: Sequences | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [B, H, S_q, D], k [B, H_kv, S_k, D], v [B, H_kv, S_k, D_v] -> o [B, H, S_q, D_v], lse [B, H, S_q] in fp32.

    fp32, fp16 or bf16, D and D_v up to 256, any strides. window needs causal. scale and softcap: positive.
    sequences: of rows that are packed, B = 1; positions end together in each.
    """
    (B, H, S_q, D), (_, H_kv, S_k, D_v) = q.shape, v.shape
    o, lse = empty_results(q, D_v)
    if not o.numel():
        return o, lse
    tma = sequences is None and architecture(q.device) >= 90 and tma_takes(q, k, v, o)
    block_m, block_n, warps, stages = tile_shape(q, v)
    (block_d, block_v), group = tile_widths(k, v), H // H_kv
    tiles_of = (block_m, block_d), (block_n, block_d), (block_n, block_v), (block_m, block_v)
    at_once = min(B * H, group * heads_in_l2(S_k * (block_d + block_v) * q.element_size(), q.device))
    B, tiles, cu_q, cu_k = grid_tiles(B, S_q, block_m, sequences)
    attention_kernel[(H * tiles,)](
        *tile_descriptors((q, k, v, o), tiles_of, tma), lse,
        q.stride(), k.stride(), v.stride(), o.stride(), *score_scales(scale, softcap), window or 0,
        B, H, S_q, S_k, D, D_v, group, at_once, cu_q, cu_k, causal, window is not None,
        tma, block_m, block_n, block_d, block_v, fp32_precision(), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return o, lse


def tile_shape(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """Queries, keys, warps and stages: scores and O fill the registers, the stages shared memory."""
    large, D = roomy(q.device), max(q.shape[-1], v.shape[-1])
    if q.element_size() == 4:
        return (64, 64, 8, 1) if D <= 128 else (32, 32, 4, 1)
    if D > 128:
        return (128, 64, 8, 2) if large else (64, 32, 4, 2)
    return (128, 128, 8, 2) if large else (128, 64, 4 if D <= 64 else 8, 2)
