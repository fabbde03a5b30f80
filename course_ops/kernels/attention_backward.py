"""Attention, backward, in portable Triton: every option, every GPU, the same to the bit each time.

Two kernels without atomics (Dao 2023, FlashAttention-2, algorithm 2, in two loops):

    dq_kernel      a program owns a block of queries, loops over the keys that it sees, and sums dQ = scale dS K
    dkdv_kernel    a program owns a block of keys, loops over the queries that see it, and sums dK = scale dS^T Q
                   and dV = P^T dO

Both compute S = scale Q K^T, P = exp(S - lse) and dS = P * (dO V^T - delta), so there are seven matmuls and not five.
The softmax's Jacobian shrinks to delta = rowsum(dO * O). With a softcap, S = cap T, T = tanh(scale / cap Q K^T),
and dS is multiplied by tanh's derivative, 1 - T^2.
"""

import triton
import triton.language as tl
from torch import Tensor, empty_like

from course_ops._common import architecture, fp32_precision, roomy, shared_memory, tma_takes
from course_ops.kernels.attention_tiles import (
    LOG2E,
    capped,
    heads_in_l2,
    key_bounds,
    load_tile,
    score_scales,
    store_tile,
    tile_descriptors,
    tile_widths,
    visible,
)
from course_ops.kernels.sequences import Sequences, find_tile, grid_tiles, skip_rows


@triton.jit
def delta_kernel(
    out, dout, delta_ptr,  # [B, H, S_q, D_v] twice, [B, H, S_q] in fp32
    out_strides, dout_strides, H, S_q, D_v, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S_q, BLOCK_M)
    head, row = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * BLOCK_M
    o_tile = load_tile(out, out_strides, head // H, head % H, row, S_q, D_v, BLOCK_M, BLOCK_V, False)
    do_tile = load_tile(dout, dout_strides, head // H, head % H, row, S_q, D_v, BLOCK_M, BLOCK_V, False)
    rows = row + tl.arange(0, BLOCK_M)
    delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), axis=1)
    tl.store(delta_ptr + head * S_q + rows, delta, mask=rows < S_q)


@triton.jit
def add_keys(
    dq, q_tile, do_tile, lse, delta, k, v, k_strides, v_strides, b, h_kv, rows, start_at, stop_at,
    S_k, D, D_v, offset, window, scale_log2, cap_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dq [BLOCK_M, BLOCK_D] of a block of queries what some blocks of keys have for them."""
    for start in range(start_at, stop_at, BLOCK_N):
        k_tile = load_tile(k, k_strides, b, h_kv, start, S_k, D, BLOCK_N, BLOCK_D, TMA)
        v_tile = load_tile(v, v_strides, b, h_kv, start, S_k, D_v, BLOCK_N, BLOCK_V, TMA)
        s = capped(tl.dot(q_tile, k_tile.T, input_precision=PRECISION), cap_scale)
        p = tl.exp2(s * scale_log2 - lse[:, None])
        if MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            p = tl.where(visible(rows[:, None], keys[None, :], S_k, offset, window, CAUSAL, WINDOW), p, 0.0)
        ds = p * (tl.dot(do_tile, v_tile.T, input_precision=PRECISION) - delta[:, None])
        if cap_scale is not None:
            ds *= 1 - s * s
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq


@triton.jit
def dq_kernel(
    q, k, v, dout,  # [B, H, S_q, D], [B, H_kv, S_k, D] and D_v, [B, H, S_q, D_v]: pointers, or descriptors if TMA
    dq_ptr, lse_ptr, delta_ptr,  # [B, H, S_q, D], twice [B, H, S_q] in fp32
    q_strides, k_strides, v_strides, dout_strides, dq_strides,
    scale, scale_log2, cap_scale, window, B, H, S_q, S_k, D, D_v, GROUP, HEADS_AT_ONCE,
    cu_q_ptr, cu_k_ptr,  # None, or of B sequences packed in one: S_q and S_k are totals then
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    line = S_q
    b, h, row, q_begin, S_q, k_begin, S_k = find_tile(
        cu_q_ptr, cu_k_ptr, B, H, S_q, S_k, HEADS_AT_ONCE, BLOCK_M, CAUSAL, False
    )
    if cu_q_ptr is not None:
        if row >= S_q:
            return
        q, dq_ptr = skip_rows(q, q_strides, q_begin), skip_rows(dq_ptr, dq_strides, q_begin)
        k, v = skip_rows(k, k_strides, k_begin), skip_rows(v, v_strides, k_begin)
        dout = skip_rows(dout, dout_strides, q_begin)
        lse_ptr, delta_ptr = lse_ptr + q_begin, delta_ptr + q_begin
    rows = row + tl.arange(0, BLOCK_M)
    offset = S_k - S_q
    edges = key_bounds(row, S_q, S_k, offset, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    q_tile = load_tile(q, q_strides, b, h, row, S_q, D, BLOCK_M, BLOCK_D, TMA)
    do_tile = load_tile(dout, dout_strides, b, h, row, S_q, D_v, BLOCK_M, BLOCK_V, TMA)
    head = (tl.cast(b, tl.int64) * H + h) * line
    lse = tl.load(lse_ptr + head + rows, mask=rows < S_q, other=0.0) * LOG2E
    delta = tl.load(delta_ptr + head + rows, mask=rows < S_q, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # The window's edge, the blocks without masks, the diagonal and the tail; of FMAs one loop over all, with masks.
    SCALAR: tl.constexpr = dq_ptr.dtype.element_ty == tl.float32 and PRECISION == "ieee"
    for part in tl.static_range(1 if SCALAR else 3):
        if part > 0 or WINDOW or SCALAR:
            dq = add_keys(
                dq, q_tile, do_tile, lse, delta, k, v, k_strides, v_strides, b, h // GROUP, rows,
                edges[part], tl.minimum(edges[3 if SCALAR else part + 1], edges[3]), S_k, D, D_v, offset, window,
                scale_log2, cap_scale, CAUSAL, WINDOW, part != 1, TMA, BLOCK_N, BLOCK_D, BLOCK_V, PRECISION,
            )  # fmt: skip
    store_tile(dq_ptr, dq * scale, dq_strides, b, h, row, S_q, D, BLOCK_M, BLOCK_D, False)


@triton.jit
def query_bounds(
    key, S_q, S_k, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(begin, first, last, end): queries begin to end see some key of the block; first to last, whole blocks, see all.

    Past S_q dO is 0, so the tail needs no mask."""
    begin, first, last, end = 0, 0, S_q, S_q
    if CAUSAL:
        begin = tl.maximum(0, key - offset) // BLOCK_M * BLOCK_M
        first = tl.cdiv(tl.maximum(0, key + BLOCK_N - 1 - offset), BLOCK_M) * BLOCK_M
    if WINDOW:
        end = tl.minimum(S_q, tl.minimum(key + BLOCK_N, S_k) - 1 + window - offset)
        last = tl.maximum(first, tl.maximum(0, tl.minimum(S_q, key + window - offset)) // BLOCK_M * BLOCK_M)
    return begin, first, last, end


@triton.jit
def add_queries(
    dk, dv, k_tile, v_tile, q, dout, q_strides, dout_strides, lse_ptr, delta_ptr, b, h, H, line, keys,
    start_at, stop_at, S_q, S_k, D, D_v, offset, window, scale_log2, cap_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dk [BLOCK_N, BLOCK_D] and dv [BLOCK_N, BLOCK_V] of keys what some blocks of queries have for them.
    line: rows of a head in lse and delta.

    P and dS are computed transposed, one row per key, because wgmma cannot transpose a left operand in registers."""
    for start in range(start_at, stop_at, BLOCK_M):
        q_tile = load_tile(q, q_strides, b, h, start, S_q, D, BLOCK_M, BLOCK_D, TMA)
        do_tile = load_tile(dout, dout_strides, b, h, start, S_q, D_v, BLOCK_M, BLOCK_V, TMA)
        rows = start + tl.arange(0, BLOCK_M)
        head = (tl.cast(b, tl.int64) * H + h) * line
        lse = tl.load(lse_ptr + head + rows, mask=rows < S_q, other=0.0) * LOG2E
        deltas, inside = delta_ptr + head + rows, rows < S_q  # loaded where needed: 16 registers for a long time
        s = capped(tl.dot(k_tile, q_tile.T, input_precision=PRECISION), cap_scale)
        p = tl.exp2(s * scale_log2 - lse[None, :])
        if MASKED:
            p = tl.where(visible(rows[None, :], keys[:, None], S_k, offset, window, CAUSAL, WINDOW), p, 0.0)
        ds = p * (tl.dot(v_tile, do_tile.T, input_precision=PRECISION) - tl.load(deltas, inside, 0.0)[None, :])
        if cap_scale is not None:
            ds *= 1 - s * s
        dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def dkdv_kernel(
    q, k, v, dout, dk_ptr, dv_ptr,  # [B, H, S_q, D], [B, H_kv, S_k, D] and D_v, [B, H, S_q, D_v]; as k, as v
    lse_ptr, delta_ptr,  # [B, H, S_q] in fp32
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    scale, scale_log2, cap_scale, window, B, H, S_q, S_k, D, D_v, GROUP, HEADS_AT_ONCE,
    cu_q_ptr, cu_k_ptr,  # None, or of B sequences packed in one: S_q and S_k are totals then
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    line = S_q
    b, h_kv, key, k_begin, S_k, q_begin, S_q = find_tile(
        cu_k_ptr, cu_q_ptr, B, H // GROUP, S_k, S_q, HEADS_AT_ONCE, BLOCK_N, CAUSAL, True
    )
    if cu_k_ptr is not None:
        if key >= S_k:
            return
        q, dout = skip_rows(q, q_strides, q_begin), skip_rows(dout, dout_strides, q_begin)
        k, dk_ptr = skip_rows(k, k_strides, k_begin), skip_rows(dk_ptr, dk_strides, k_begin)
        v, dv_ptr = skip_rows(v, v_strides, k_begin), skip_rows(dv_ptr, dv_strides, k_begin)
        lse_ptr, delta_ptr = lse_ptr + q_begin, delta_ptr + q_begin
    keys = key + tl.arange(0, BLOCK_N)
    offset = S_k - S_q
    edges = query_bounds(key, S_q, S_k, offset, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    k_tile = load_tile(k, k_strides, b, h_kv, key, S_k, D, BLOCK_N, BLOCK_D, TMA)
    v_tile = load_tile(v, v_strides, b, h_kv, key, S_k, D_v, BLOCK_N, BLOCK_V, TMA)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    # The diagonal, the blocks without masks, the window's edge; of FMAs one loop over all, with masks.
    SCALAR: tl.constexpr = dk_ptr.dtype.element_ty == tl.float32 and PRECISION == "ieee"
    for h in range(h_kv * GROUP, h_kv * GROUP + GROUP):  # heads that share K and V, one after the other
        for part in tl.static_range(1 if SCALAR else 3):
            if part == 1 or (part == 0 and CAUSAL) or (part == 2 and WINDOW) or SCALAR:
                dk, dv = add_queries(
                    dk, dv, k_tile, v_tile, q, dout, q_strides, dout_strides, lse_ptr, delta_ptr, b, h, H, line,
                    keys,
                    edges[part], tl.minimum(edges[3 if SCALAR else part + 1], edges[3]), S_q, S_k, D, D_v, offset,
                    window, scale_log2, cap_scale, CAUSAL, WINDOW, part != 1, TMA, BLOCK_M, BLOCK_D, BLOCK_V, PRECISION,
                )  # fmt: skip
    store_tile(dk_ptr, dk * scale, dk_strides, b, h_kv, key, S_k, D, BLOCK_N, BLOCK_D, False)
    store_tile(dv_ptr, dv, dv_strides, b, h_kv, key, S_k, D_v, BLOCK_N, BLOCK_V, False)


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, window: int | None, scale: float, softcap: float | None = None,
    sequences: Sequences | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k [.., D] and v, out, dout [.., D_v] as in the forward, any strides -> dq as q, dk and dv as k, v.

    lse [B, H, S_q] in fp32, contiguous. What the forward kernel takes, D and D_v up to 256. Deterministic.
    sequences: of rows that are packed, B = 1.
    """
    dk, dv = empty_like(k), empty_like(v)
    dq, delta = _queries(dout, q, k, v, out, lse, causal, window, scale, softcap, sequences)
    if not q.numel() or not k.numel():
        return dq, dk.zero_(), dv.zero_()
    (B, H, S_q, D), (_, H_kv, S_k, D_v) = q.shape, v.shape
    block_m, block_n, warps, stages = keys_tile_shape(q, v)
    tma = sequences is None and not scalar(q) and architecture(q.device) >= 90 and tma_takes(q, k, v, dout)
    (block_d, block_v), group = tile_widths(k, v), H // H_kv
    tiles_of = (block_m, block_d), (block_n, block_d), (block_n, block_v), (block_m, block_v)
    at_once = min(B * H_kv, heads_in_l2(group * S_q * (block_d + block_v) * q.element_size(), q.device))
    B, tiles, cu_q, cu_k = grid_tiles(B, S_k, block_n, sequences)
    dkdv_kernel[(H_kv * tiles,)](
        *tile_descriptors((q, k, v, dout), tiles_of, tma), dk, dv, lse, delta,
        q.stride(), k.stride(), v.stride(), dout.stride(), dk.stride(), dv.stride(),
        scale, *score_scales(scale, softcap), window or 0, B, H, S_q, S_k, D, D_v, group, at_once, cu_q, cu_k,
        causal, window is not None, tma, block_m, block_n, block_d, block_v, fp32_precision(),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dq, dk, dv


def _queries(dout, q, k, v, out, lse, causal, window, scale, softcap, sequences):
    """dq as q, and delta [B, H, S_q] in fp32."""
    (B, H, S_q, D), (_, H_kv, S_k, D_v) = q.shape, v.shape
    dq, delta, (block_d, block_v) = empty_like(q), empty_like(lse), tile_widths(k, v)
    if not dq.numel():
        return dq, delta
    delta_kernel[(B * H * triton.cdiv(S_q, 32),)](
        out, dout, delta, out.stride(), dout.stride(), H, S_q, D_v, 32, block_v
    )  # fmt: skip
    block_m, block_n, warps, stages = queries_tile_shape(q, v)
    tiles_of = (block_m, block_d), (block_n, block_d), (block_n, block_v), (block_m, block_v)
    tma = sequences is None and not scalar(q) and architecture(q.device) >= 90 and tma_takes(q, k, v, dout)
    at_once = min(B * H, H // H_kv * heads_in_l2(S_k * (block_d + block_v) * q.element_size(), q.device))
    B, tiles, cu_q, cu_k = grid_tiles(B, S_q, block_m, sequences)
    dq_kernel[(H * tiles,)](
        *tile_descriptors((q, k, v, dout), tiles_of, tma), dq, lse, delta,
        q.stride(), k.stride(), v.stride(), dout.stride(), dq.stride(),
        scale, *score_scales(scale, softcap), window or 0, B, H, S_q, S_k, D, D_v, H // H_kv, at_once, cu_q, cu_k,
        causal, window is not None, tma, block_m, block_n, block_d, block_v, fp32_precision(),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dq, delta


# Queries, keys, warps and stages of tiles that FMAs multiply.
SMALL, SMALLEST = (32, 32, 8, 1), (16, 16, 4, 1)


def scalar(q: Tensor) -> bool:
    """Whether FMAs compute, not tensor cores. A thread unrolls a tile's products: small tiles keep them in registers.

    Larger ones, three loops in place of one, or operands by TMA cost kilobytes of local memory a thread, and up to half
    a minute of compiling.
    """
    return q.element_size() == 4 and fp32_precision() == "ieee"


def queries_tile_shape(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """dq_kernel's queries, keys, warps and stages: dq and two tiles of scores in registers, the rest shared."""
    large, D = roomy(q.device), max(q.shape[-1], v.shape[-1])
    if scalar(q):
        return SMALL if large or D <= 128 else SMALLEST
    if q.element_size() == 4:
        return (64, 64, 8, 1) if D <= 64 else (32, 32, 4, 1)
    if D > 128:
        return (128, 32, 8, 2) if large else (64, 32, 8, 1)
    return (128, 64, 8, 2) if large or D <= 64 else (64, 64, 8, 2)


def keys_tile_shape(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """dkdv_kernel's queries, keys, warps and stages: dk, dv and two tiles of scores fill the registers."""
    large, D = roomy(q.device), max(q.shape[-1], v.shape[-1])
    if scalar(q):
        return SMALL if large or D <= 128 else SMALLEST
    if q.element_size() == 4:
        return (64, 64, 8, 1) if D <= 64 else (32, 32, 4, 1)
    if D > 128 and shared_memory(q.device) < 2**17:
        return 32, 32, 4, 1
    return (64, 128, 8, 2) if (128 if large else 64) >= D else (32, 64, 8, 2 if large or D <= 128 else 1)
