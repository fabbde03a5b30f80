"""Rung 4: TMA. One thread issues the copy of a whole tile of the next step, and no thread computes addresses."""

import math

from lessonkit import device, needs

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

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
    q_desc, k_desc, v_desc, do_desc, dq_ptr,  # [B H, S, D]; K and V [B H_kv, S, D]
    lse_ptr, delta_ptr,  # [B H, S] in fp32
    scale, S, GROUP, HEADS,
    CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles, cols = S // QUERIES, tl.arange(0, D)[None, :]
    # The tiles of HEADS heads that see most keys first, then the next tiles, then the next heads.
    group, within = tl.program_id(0) // (HEADS * tiles), tl.program_id(0) % (HEADS * tiles)
    width = tl.minimum(HEADS, tl.num_programs(0) // tiles - group * HEADS)
    nth = group * HEADS + within % width
    head = nth.to(tl.int64)
    row = (tiles - 1 - within // width) * QUERIES
    rows = row + tl.arange(0, QUERIES)
    tile = (head * S + rows)[:, None] * D + cols
    q = q_desc.load([nth, row, 0]).reshape(QUERIES, D)  # New
    do = do_desc.load([nth, row, 0]).reshape(QUERIES, D)  # New
    lse, delta = tl.load(lse_ptr + head * S + rows) * LOG2E, tl.load(delta_ptr + head * S + rows)
    dq = tl.zeros([QUERIES, D], tl.float32)
    for start in range(0, row if CAUSAL else S, KEYS):  # every query of the block sees these keys
        k = k_desc.load([nth // GROUP, start, 0]).reshape(KEYS, D)  # New
        v = v_desc.load([nth // GROUP, start, 0]).reshape(KEYS, D)  # New
        p = tl.exp2(tl.dot(q, k.T, input_precision=PRECISION) * (scale * LOG2E) - lse[:, None])
        ds = p * (tl.dot(do, v.T, input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    if CAUSAL:
        for start in range(row, row + QUERIES, KEYS):  # the diagonal
            keys = start + tl.arange(0, KEYS)
            k = k_desc.load([nth // GROUP, start, 0]).reshape(KEYS, D)  # New
            v = v_desc.load([nth // GROUP, start, 0]).reshape(KEYS, D)  # New
            p = tl.exp2(tl.dot(q, k.T, input_precision=PRECISION) * (scale * LOG2E) - lse[:, None])
            p = tl.where(keys[None, :] <= rows[:, None], p, 0.0)
            ds = p * (tl.dot(do, v.T, input_precision=PRECISION) - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    tl.store(dq_ptr + tile, (dq * scale).to(q.dtype))


# A program owns dK and dV of a block of keys. It sweeps the queries of each of the GROUP heads that share these keys.
# With GROUP = 1 as a constant Triton drops the loop over heads, and ptxas serializes all wgmma: where CAUSAL in
# Triton 3.6, where not in 3.7. Its remark C7515 says so, which Triton does not show.
@triton.jit(do_not_specialize=["GROUP"])
def dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_ptr, dv_ptr,  # [B H, S, D]; K, V, dK and dV [B H_kv, S, D]
    lse_ptr, delta_ptr,  # [B H, S] in fp32
    scale, S, GROUP, HEADS,
    CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles, cols = S // KEYS, tl.arange(0, D)[None, :]
    # Of keys the first ones are seen by most queries.
    group, within = tl.program_id(0) // (HEADS * tiles), tl.program_id(0) % (HEADS * tiles)
    width = tl.minimum(HEADS, tl.num_programs(0) // tiles - group * HEADS)
    nth_kv = group * HEADS + within % width
    head_kv = nth_kv.to(tl.int64)
    key = within // width * KEYS
    keys = key + tl.arange(0, KEYS)
    tile = (head_kv * S + keys)[:, None] * D + cols
    k = k_desc.load([nth_kv, key, 0]).reshape(KEYS, D)  # New
    v = v_desc.load([nth_kv, key, 0]).reshape(KEYS, D)  # New
    dk = tl.zeros([KEYS, D], tl.float32)
    dv = tl.zeros([KEYS, D], tl.float32)
    for nth in range(GROUP):
        head = (head_kv * GROUP + nth) * S
        if CAUSAL:
            for start in range(key, key + KEYS, QUERIES):  # the diagonal
                rows = start + tl.arange(0, QUERIES)
                q = q_desc.load([nth_kv * GROUP + nth, start, 0]).reshape(QUERIES, D)  # New
                do = do_desc.load([nth_kv * GROUP + nth, start, 0]).reshape(QUERIES, D)  # New
                lse = tl.load(lse_ptr + head + rows) * LOG2E
                p = tl.exp2(tl.dot(k, q.T, input_precision=PRECISION) * (scale * LOG2E) - lse[None, :])
                p = tl.where(keys[:, None] <= rows[None, :], p, 0.0)
                delta = tl.load(delta_ptr + head + rows)
                ds = p * (tl.dot(v, do.T, input_precision=PRECISION) - delta[None, :])
                dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        for start in range(key + KEYS if CAUSAL else 0, S, QUERIES):  # these queries see every key of the block
            rows = start + tl.arange(0, QUERIES)
            q = q_desc.load([nth_kv * GROUP + nth, start, 0]).reshape(QUERIES, D)  # New
            do = do_desc.load([nth_kv * GROUP + nth, start, 0]).reshape(QUERIES, D)  # New
            lse = tl.load(lse_ptr + head + rows) * LOG2E
            p = tl.exp2(tl.dot(k, q.T, input_precision=PRECISION) * (scale * LOG2E) - lse[None, :])
            delta = tl.load(delta_ptr + head + rows)
            ds = p * (tl.dot(v, do.T, input_precision=PRECISION) - delta[None, :])
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    tl.store(dk_ptr + tile, (dk * scale).to(k.dtype))
    tl.store(dv_ptr + tile, dv.to(v.dtype))


@needs(90, "TMA", interpreted=True)
def attention_backward(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """dq, dk, dv, the same to the bit each time.

    out and lse as the forward returned them; causal, window and scale as it got them. TypeError, ValueError for what
    is not so; Unsupported for what course_ops.attention takes and this does not.
    """
    scale = expect_aligned_gradient(grad_out, q, k, v, out, lse, causal, window, scale)
    (B, H, S, D), H_kv = q.shape, k.shape[1]
    dq, dk, dv, delta = (torch.empty_like(t) for t in (q, k, v, lse))
    delta_kernel[(B * H * S // 32,)](out, grad_out, delta, 32, D)
    queries, keys, warps, stages = _dq_tile(q)
    dq_kernel[(B * H * S // queries,)](
        *_descriptors(q, k, v, grad_out, queries, keys), dq, lse, delta, scale, S, H // H_kv, _at_once(B * H, k),
        causal, queries, keys, D, precision(), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    queries, keys, warps, stages = _dkdv_tile(q)
    dkdv_kernel[(B * H_kv * S // keys,)](
        *_descriptors(q, k, v, grad_out, queries, keys), dk, dv, lse, delta, scale, S, H // H_kv, _at_once(B * H_kv, q),
        causal, queries, keys, D, precision(), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dq, dk, dv


def _descriptors(q, k, v, grad_out, queries, keys):
    """New: what TMA has to know of each tensor, [heads, S, D], and of a tile of it."""
    S, D = q.shape[2:]
    rows = (q, queries), (k, keys), (v, keys), (grad_out, queries)
    return [TensorDescriptor.from_tensor(t.view(-1, S, D), [1, n, D]) for t, n in rows]


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
