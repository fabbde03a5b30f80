"""Rung 3: dkdv_kernel computes P^T = exp(K Q^T) and dS^T, [keys, queries]: the left operands of dV and dK.

A wgmma takes its left operand from registers, where the matmul before has left it. A transposed operand has to go
through shared memory.
"""

import math

from lessonkit import device

import torch
import triton
import triton.language as tl

from problems.attention import expect_aligned_gradient, precision

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def delta_kernel(out_ptr, do_ptr, delta_ptr, ROWS: tl.constexpr, D: tl.constexpr):  # [B H S, D] twice, [B H S] in fp32
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tile = rows[:, None] * D + tl.arange(0, D)[None, :]
    o, do = tl.load(out_ptr + tile), tl.load(do_ptr + tile)
    tl.store(delta_ptr + rows, tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1))


# A program owns dQ of a block of queries and sweeps all keys (lesson 6).
@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr,  # [B H, S, D]; K and V [B H_kv, S, D]
    lse_ptr, delta_ptr,  # [B H, S] in fp32
    scale, S, GROUP, HEADS,
    CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles, cols = S // QUERIES, tl.arange(0, D)[None, :]
    # The tiles of HEADS heads that see most keys first, then the next tiles, then the next heads.
    group, within = tl.program_id(0) // (HEADS * tiles), tl.program_id(0) % (HEADS * tiles)
    width = tl.minimum(HEADS, tl.num_programs(0) // tiles - group * HEADS)
    head = (group * HEADS + within % width).to(tl.int64)
    row = (tiles - 1 - within // width) * QUERIES
    rows = row + tl.arange(0, QUERIES)
    tile = (head * S + rows)[:, None] * D + cols
    q, do = tl.load(q_ptr + tile), tl.load(do_ptr + tile)
    lse, delta = tl.load(lse_ptr + head * S + rows) * LOG2E, tl.load(delta_ptr + head * S + rows)
    dq = tl.zeros([QUERIES, D], tl.float32)
    for start in range(0, row if CAUSAL else S, KEYS):  # every query of the block sees these keys
        tile_kv = (head // GROUP * S + start + tl.arange(0, KEYS))[:, None] * D + cols
        k, v = tl.load(k_ptr + tile_kv), tl.load(v_ptr + tile_kv)
        p = tl.exp2(tl.dot(q, k.T, input_precision=PRECISION) * (scale * LOG2E) - lse[:, None])
        ds = p * (tl.dot(do, v.T, input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    if CAUSAL:
        for start in range(row, row + QUERIES, KEYS):  # the diagonal
            keys = start + tl.arange(0, KEYS)
            tile_kv = (head // GROUP * S + keys)[:, None] * D + cols
            k, v = tl.load(k_ptr + tile_kv), tl.load(v_ptr + tile_kv)
            p = tl.exp2(tl.dot(q, k.T, input_precision=PRECISION) * (scale * LOG2E) - lse[:, None])
            p = tl.where(keys[None, :] <= rows[:, None], p, 0.0)
            ds = p * (tl.dot(do, v.T, input_precision=PRECISION) - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    tl.store(dq_ptr + tile, (dq * scale).to(q.dtype))


# A program owns dK and dV of a block of keys. It sweeps the queries of each of the GROUP heads that share these keys.
# New: with GROUP = 1 as a constant Triton drops the loop over heads, and ptxas serializes all wgmma where CAUSAL (in
# Triton 3.6; the next rung in 3.7 where not). Its remark C7515 says so, which Triton does not show.
@triton.jit(do_not_specialize=["GROUP"])
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr,  # [B H, S, D]; K, V, dK and dV [B H_kv, S, D]
    lse_ptr, delta_ptr,  # [B H, S] in fp32
    scale, S, GROUP, HEADS,
    CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles, cols = S // KEYS, tl.arange(0, D)[None, :]
    # Of keys the first ones are seen by most queries.
    group, within = tl.program_id(0) // (HEADS * tiles), tl.program_id(0) % (HEADS * tiles)
    width = tl.minimum(HEADS, tl.num_programs(0) // tiles - group * HEADS)
    head_kv = (group * HEADS + within % width).to(tl.int64)
    key = within // width * KEYS
    keys = key + tl.arange(0, KEYS)
    tile = (head_kv * S + keys)[:, None] * D + cols
    k, v = tl.load(k_ptr + tile), tl.load(v_ptr + tile)
    dk = tl.zeros([KEYS, D], tl.float32)
    dv = tl.zeros([KEYS, D], tl.float32)
    for nth in range(GROUP):
        head = (head_kv * GROUP + nth) * S
        if CAUSAL:
            for start in range(key, key + KEYS, QUERIES):  # the diagonal
                rows = start + tl.arange(0, QUERIES)
                tile_q = (head + rows)[:, None] * D + cols
                q, do = tl.load(q_ptr + tile_q), tl.load(do_ptr + tile_q)
                lse = tl.load(lse_ptr + head + rows) * LOG2E
                p = tl.exp2(tl.dot(k, q.T, input_precision=PRECISION) * (scale * LOG2E) - lse[None, :])  # New
                p = tl.where(keys[:, None] <= rows[None, :], p, 0.0)  # New
                delta = tl.load(delta_ptr + head + rows)
                ds = p * (tl.dot(v, do.T, input_precision=PRECISION) - delta[None, :])  # New
                dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)  # New
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)  # New
        for start in range(key + KEYS if CAUSAL else 0, S, QUERIES):  # these queries see every key of the block
            rows = start + tl.arange(0, QUERIES)
            tile_q = (head + rows)[:, None] * D + cols
            q, do = tl.load(q_ptr + tile_q), tl.load(do_ptr + tile_q)
            lse = tl.load(lse_ptr + head + rows) * LOG2E
            p = tl.exp2(tl.dot(k, q.T, input_precision=PRECISION) * (scale * LOG2E) - lse[None, :])  # New
            delta = tl.load(delta_ptr + head + rows)
            ds = p * (tl.dot(v, do.T, input_precision=PRECISION) - delta[None, :])  # New
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)  # New
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)  # New
    tl.store(dk_ptr + tile, (dk * scale).to(k.dtype))
    tl.store(dv_ptr + tile, dv.to(v.dtype))


def transposed(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """As masked."""
    scale = expect_aligned_gradient(grad_out, q, k, v, out, lse, causal, window, scale)
    (B, H, S, D), H_kv = q.shape, k.shape[1]
    dq, dk, dv, delta = (torch.empty_like(t) for t in (q, k, v, lse))
    delta_kernel[(B * H * S // 32,)](out, grad_out, delta, 32, D)
    queries, keys, warps, stages = _dq_tile(q)
    dq_kernel[(B * H * S // queries,)](
        q, k, v, grad_out, dq, lse, delta, scale, S, H // H_kv, _at_once(B * H, k),
        causal, queries, keys, D, precision(), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    queries, keys, warps, stages = _dkdv_tile(q)
    dkdv_kernel[(B * H_kv * S // keys,)](
        q, k, v, grad_out, dk, dv, lse, delta, scale, S, H // H_kv, _at_once(B * H_kv, q),
        causal, queries, keys, D, precision(), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dq, dk, dv


def _at_once(heads, tensor):
    """How many heads to work on at a time, so that what their programs share, two tensors, fills half of L2."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size if device.HAS_GPU else 2**16 if device.INTERPRETED else 2**26
    return min(heads, max(1, l2 // 2 // (2 * tensor[0, 0].numel() * tensor.element_size())))


def _dq_tile(q):
    """Queries, keys, warps, stages: dq and two tiles of scores in registers, Q, dO and the stages in shared memory."""
    if q.element_size() == 4:
        return (64, 64, 8, 1) if q.shape[-1] <= 64 else (32, 32, 4, 1)
    return (128, 64, 8, 2) if device.roomy() or q.shape[-1] <= 64 else (64, 64, 8, 2)


def _dkdv_tile(q):
    """Queries, keys, warps and stages: dk, dv and two tiles of scores in registers, K, V and the stages in shared."""
    if q.element_size() == 4:
        return (64, 64, 8, 1) if q.shape[-1] <= 64 else (32, 32, 4, 1)
    return (64, 128, 8, 2) if device.roomy() or q.shape[-1] <= 64 else (32, 64, 8, 2)
