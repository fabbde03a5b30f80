"""Flash attention, backward: the other owner, and the op that a model calls
=========================================================================
dV = P^T dO and dK = scale dS^T Q, with P and dS as in lesson 6, are sums over queries: their owner is a block of keys,
which keeps K and V and walks over the queries that see it. One kernel could do dQ too, with five products in all, 10
S^2 D FLOPs a head; but then the programs of all keys add to the same dQ, by atomics, in another order each time. Here
each sum has one owner who adds in one order, so that two runs agree to the bit: four products here, three in lesson 6.
Seven for five: at the same pace 5/7 of the speed, which is counted, as is customary, by 10 S^2 D.

    causal, windows   the bounds of lesson 5 seen from the keys: queries from the key's own on, while the window holds
    grouped heads     dK and dV are sums over a group's heads too: the owner visits one after the other, no atomics
    no masks of rows  past S_q Q and dO are read as 0, and what they add is 0

You will learn: who owns a sum, operands that need no transpose, a differentiable op, what a second derivative is told.
Source: Dao 2023, FlashAttention-2, algorithm 2, its loop over key blocks without the update of dQ.
Run it:    python day4_replace_op/lesson07_flash_backward.py
Check it:  python -m lessonkit check lesson07_flash_backward
Time it:   python -m lessonkit bench lesson07_flash_backward
"""

import math

from lessonkit import About, Grad, Lesson, Mutant, device, tma_takes

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from course_ops import attention_forward
from problems.attention import PROBLEM, PROBLEM_BACKWARD, expect_gradient, inputs, inputs_backward, precision

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def load_tile(source, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    """Rows from `row` on of a head of a [B, H, S, D] tensor; zeros past S and D, which add nothing to a product."""
    if TMA:
        return source.load([b, h, row, 0]).reshape(ROWS, BLOCK_D)
    else:
        ptrs, inside = tile_ptrs(source, strides, b, h, row, S, D, ROWS, BLOCK_D)
        return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def store_tile(target, x, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        target.store([b, h, row, 0], x.to(target.dtype).reshape(1, 1, ROWS, BLOCK_D))
    else:
        ptrs, inside = tile_ptrs(target, strides, b, h, row, S, D, ROWS, BLOCK_D)
        tl.store(ptrs, x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def tile_ptrs(base, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    rows, cols = row + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    # int64 before each stride: any of these may pass 2^31
    head = base + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    ptrs = head + rows.to(tl.int64) * strides[2] + cols.to(tl.int64) * strides[3]
    return ptrs, (rows < S) & (cols < D)


@triton.jit
def seen(rows, keys, S_k, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether this key is one of this query's, of rows [:, None] and keys [None, :] or the other way round."""
    ahead = keys - (rows + offset)
    mask = keys < S_k
    if CAUSAL:
        mask = mask & (ahead <= 0)
    if WINDOW:
        mask = mask & (ahead > -window)
    return mask


@triton.jit
def place(B, H, S_q, HEADS, BLOCK_M: tl.constexpr, LONGEST_FIRST: tl.constexpr):
    """The batch, the head and the first query of a program."""
    tiles = tl.cdiv(S_q, BLOCK_M)
    program = tl.program_id(0)
    if LONGEST_FIRST:
        group = program // (HEADS * tiles)
        within = program - group * HEADS * tiles
        heads = tl.minimum(HEADS, B * H - group * HEADS)
        head, tile = group * HEADS + within % heads, tiles - 1 - within // heads
    else:
        head, tile = program // tiles, program % tiles
    return head // H, head % H, tile * BLOCK_M


# ---- dq, as in lesson 6 -------------------------------------------------------------------------------------------


@triton.jit
def bounds(
    row, S_q, S_k, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SKIP: tl.constexpr, EDGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(begin, first, last, end): keys from begin to end are seen by a query of the tile, those from first to last, in
    whole blocks, by all of them."""
    begin, end = 0, S_k
    if SKIP and CAUSAL:
        end = tl.minimum(S_k, tl.minimum(row + BLOCK_M, S_q) + offset)  # what the last query of the tile sees
    if SKIP and WINDOW:
        begin = tl.maximum(0, row + offset - window + 1) // BLOCK_N * BLOCK_N  # what the first one sees
    first, last = begin, begin
    if EDGES:
        last = (tl.minimum(S_k, tl.maximum(0, row + offset + 1)) if CAUSAL else S_k) // BLOCK_N * BLOCK_N
    if EDGES and WINDOW:
        first = tl.cdiv(tl.maximum(0, row + BLOCK_M + offset - window), BLOCK_N) * BLOCK_N
        last = tl.maximum(first, last)
    return begin, first, last, end


@triton.jit
def delta_kernel(
    out, do, delta_ptr,  # [B, H, S_q, D] twice, [B, H, S_q] in fp32
    out_strides, do_strides, H, S_q, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S_q, BLOCK_M)
    head, row = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * BLOCK_M
    o_tile = load_tile(out, out_strides, head // H, head % H, row, S_q, D, BLOCK_M, BLOCK_D, False)
    do_tile = load_tile(do, do_strides, head // H, head % H, row, S_q, D, BLOCK_M, BLOCK_D, False)
    rows = row + tl.arange(0, BLOCK_M)
    delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), axis=1)
    tl.store(delta_ptr + head * S_q + rows, delta, mask=rows < S_q)


@triton.jit
def add_keys(
    dq, q_tile, do_tile, lse, delta, k, v, k_strides, v_strides, b, h_kv, rows, start_at, stop_at,
    S_k, D, offset, window, scale_log2, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dq [BLOCK_M, BLOCK_D] of a block of queries what some blocks of keys have for them."""
    for start in range(start_at, stop_at, BLOCK_N):
        k_tile = load_tile(k, k_strides, b, h_kv, start, S_k, D, BLOCK_N, BLOCK_D, TMA)
        v_tile = load_tile(v, v_strides, b, h_kv, start, S_k, D, BLOCK_N, BLOCK_D, TMA)
        p = tl.exp2(tl.dot(q_tile, k_tile.T, input_precision=PRECISION) * scale_log2 - lse[:, None])
        if MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            p = tl.where(seen(rows[:, None], keys[None, :], S_k, offset, window, CAUSAL, WINDOW), p, 0.0)
        ds = p * (tl.dot(do_tile, v_tile.T, input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq


@triton.jit
def dq_kernel(
    q, k, v, do,  # [B, H, S_q, D], twice [B, H_kv, S_k, D], [B, H, S_q, D]: pointers, or descriptors if TMA
    dq_ptr, lse_ptr, delta_ptr,  # [B, H, S_q, D], twice [B, H, S_q] in fp32
    q_strides, k_strides, v_strides, do_strides, dq_strides,
    scale, scale_log2, window, B, H, S_q, S_k, D, GROUP, AT_ONCE, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SKIP: tl.constexpr, LONGEST_FIRST: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b, h, row = place(B, H, S_q, AT_ONCE, BLOCK_M, LONGEST_FIRST)
    rows = row + tl.arange(0, BLOCK_M)
    offset = S_k - S_q
    edges = bounds(row, S_q, S_k, offset, window, CAUSAL, WINDOW, SKIP, SKIP, BLOCK_M, BLOCK_N)
    q_tile = load_tile(q, q_strides, b, h, row, S_q, D, BLOCK_M, BLOCK_D, TMA)
    do_tile = load_tile(do, do_strides, b, h, row, S_q, D, BLOCK_M, BLOCK_D, TMA)
    head = (tl.cast(b, tl.int64) * H + h) * S_q
    lse = tl.load(lse_ptr + head + rows, mask=rows < S_q, other=0.0) * LOG2E
    delta = tl.load(delta_ptr + head + rows, mask=rows < S_q, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in tl.static_range(3):
        if part == 2 or (SKIP and (part == 1 or WINDOW)):
            dq = add_keys(
                dq, q_tile, do_tile, lse, delta, k, v, k_strides, v_strides, b, h // GROUP, rows,
                edges[part], tl.minimum(edges[part + 1], edges[3]), S_k, D, offset, window, scale_log2,
                CAUSAL, WINDOW, part != 1, TMA, BLOCK_N, BLOCK_D, PRECISION,
            )  # fmt: skip
    store_tile(dq_ptr, dq * scale, dq_strides, b, h, row, S_q, D, BLOCK_M, BLOCK_D, False)


def _gradient_of_queries(grad_out, q, k, v, out, lse, causal, window, scale, skip, tma):
    """dq as q, and delta as lse."""
    (B, H, S_q, D), (_, H_kv, S_k, _) = q.shape, k.shape
    dq, delta, block_d = torch.empty_like(q), torch.empty_like(lse), max(16, triton.next_power_of_2(D))
    if not dq.numel():
        return dq, delta
    delta_kernel[(B * H * triton.cdiv(S_q, 32),)](
        out, grad_out, delta, out.stride(), grad_out.stride(), H, S_q, D, 32, block_d
    )
    block_m, block_n, warps, stages = _query_tiles(q)
    at_once = min(B * H, H // H_kv * _at_once(2 * S_k * block_d * q.element_size()))
    dq_kernel[(B * H * triton.cdiv(S_q, block_m),)](
        *_tiled((q, k, v, grad_out), (block_m, block_n, block_n, block_m), tma), dq, lse, delta,
        q.stride(), k.stride(), v.stride(), grad_out.stride(), dq.stride(),
        scale, scale * LOG2E.value, window or 0, B, H, S_q, S_k, D, H // H_kv, at_once, causal, window is not None,
        skip, skip and causal, tma, block_m, block_n, block_d, precision(), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dq, delta


def _query_tiles(q):
    """Queries, keys, warps and stages: dq and two tiles of scores in registers, Q, dO and stages in shared memory."""
    if q.element_size() == 4:
        return (64, 64, 8, 1) if q.shape[-1] <= 64 else (32, 32, 4, 1)
    if q.shape[-1] > 128:
        return (128, 32, 8, 2) if device.roomy() else (64, 32, 8, 1)
    return (128, 64, 8, 2) if device.roomy() or q.shape[-1] <= 64 else (64, 64, 8, 2)


# ---- dk and dv -----------------------------------------------------------------------------------------------------


@triton.jit
def query_bounds(
    key, S_q, S_k, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SKIP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(begin, first, last, end): queries from begin to end see a key of the block, those from first to last, in whole
    blocks, all of them. Past S_q dO is 0, so that the tail needs no mask."""
    begin, first, last, end = 0, S_q, S_q, S_q
    if SKIP:
        first = begin
        if CAUSAL:
            begin = tl.maximum(0, key - offset) // BLOCK_M * BLOCK_M
            first = tl.cdiv(tl.maximum(0, key + BLOCK_N - 1 - offset), BLOCK_M) * BLOCK_M
        if WINDOW:
            end = tl.minimum(S_q, tl.minimum(key + BLOCK_N, S_k) - 1 + window - offset)
            last = tl.maximum(first, tl.maximum(0, tl.minimum(S_q, key + window - offset)) // BLOCK_M * BLOCK_M)
    return begin, first, last, end


@triton.jit
def add_queries(
    dk, dv, k_tile, v_tile, q, do, q_strides, do_strides, lse_ptr, delta_ptr, b, h, H, keys, start_at, stop_at,
    S_q, S_k, D, offset, window, scale_log2, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv [BLOCK_N, BLOCK_D] of a block of keys what some blocks of queries have for them."""
    for start in range(start_at, stop_at, BLOCK_M):
        q_tile = load_tile(q, q_strides, b, h, start, S_q, D, BLOCK_M, BLOCK_D, TMA)
        do_tile = load_tile(do, do_strides, b, h, start, S_q, D, BLOCK_M, BLOCK_D, TMA)
        rows = start + tl.arange(0, BLOCK_M)
        head = (tl.cast(b, tl.int64) * H + h) * S_q
        lse = tl.load(lse_ptr + head + rows, mask=rows < S_q, other=0.0) * LOG2E
        deltas, there = delta_ptr + head + rows, rows < S_q  # read where needed: a row's number is 16 registers here
        if TRANSPOSED:
            p = tl.exp2(tl.dot(k_tile, q_tile.T, input_precision=PRECISION) * scale_log2 - lse[None, :])
            if MASKED:
                p = tl.where(seen(rows[None, :], keys[:, None], S_k, offset, window, CAUSAL, WINDOW), p, 0.0)
            ds = p * (tl.dot(v_tile, do_tile.T, input_precision=PRECISION) - tl.load(deltas, there, 0.0)[None, :])
        else:
            p = tl.exp2(tl.dot(q_tile, k_tile.T, input_precision=PRECISION) * scale_log2 - lse[:, None])
            if MASKED:
                p = tl.where(seen(rows[:, None], keys[None, :], S_k, offset, window, CAUSAL, WINDOW), p, 0.0)
            ds = (p * (tl.dot(do_tile, v_tile.T, input_precision=PRECISION) - tl.load(deltas, there, 0.0)[:, None])).T
            p = p.T
        dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


# The kernel of all rungs; SKIP, TRANSPOSED and TMA are what rungs 2, 3 and 4 switch on.
@triton.jit
def dkdv_kernel(
    q, k, v, do, dk_ptr, dv_ptr,  # [B, H, S_q, D], twice [B, H_kv, S_k, D], as q; as k twice
    lse_ptr, delta_ptr,  # [B, H, S_q] in fp32
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
    scale, scale_log2, window, B, H, S_q, S_k, D, GROUP, AT_ONCE, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SKIP: tl.constexpr, LONGEST_FIRST: tl.constexpr, TRANSPOSED: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b, h_kv, key = place(B, H // GROUP, S_k, AT_ONCE, BLOCK_N, LONGEST_FIRST)
    if LONGEST_FIRST:
        key = (tl.cdiv(S_k, BLOCK_N) - 1) * BLOCK_N - key  # of keys the first ones are seen by most
    keys = key + tl.arange(0, BLOCK_N)
    offset = S_k - S_q
    edges = query_bounds(key, S_q, S_k, offset, window, CAUSAL, WINDOW, SKIP, BLOCK_M, BLOCK_N)
    k_tile = load_tile(k, k_strides, b, h_kv, key, S_k, D, BLOCK_N, BLOCK_D, TMA)
    v_tile = load_tile(v, v_strides, b, h_kv, key, S_k, D, BLOCK_N, BLOCK_D, TMA)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for h in range(h_kv * GROUP, h_kv * GROUP + GROUP):
        for part in tl.static_range(3):  # the diagonal, the blocks without masks, the window's edge
            if (part == 0 and (CAUSAL or not SKIP)) or (SKIP and (part == 1 or (part == 2 and WINDOW))):
                dk, dv = add_queries(
                    dk, dv, k_tile, v_tile, q, do, q_strides, do_strides, lse_ptr, delta_ptr, b, h, H, keys,
                    edges[part], tl.minimum(edges[part + 1], edges[3]), S_q, S_k, D, offset, window, scale_log2,
                    CAUSAL, WINDOW, part != 1, TRANSPOSED, TMA, BLOCK_M, BLOCK_D, PRECISION,
                )  # fmt: skip
    store_tile(dk_ptr, dk * scale, dk_strides, b, h_kv, key, S_k, D, BLOCK_N, BLOCK_D, False)
    store_tile(dv_ptr, dv, dv_strides, b, h_kv, key, S_k, D, BLOCK_N, BLOCK_D, False)


# Rung 1. All queries for each block of keys, all masked; P and dS as the forward has them, queries down, so that both
# are transposed to be multiplied.
def masked(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """grad_out, q, out [B, H, S_q, D], k, v [B, H_kv, S_k, D], lse [B, H, S_q] in fp32 -> dq as q, dk, dv as k."""
    return _run(grad_out, q, k, v, out, lse, causal, window, scale, 0)


# Rung 2. New: bounds, and the keys that most queries see first. Predicted: causal half of the time.
def skipped(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """As masked."""
    return _run(grad_out, q, k, v, out, lse, causal, window, scale, 1)


# Rung 3. New: dV and dK want P^T and dS^T, so K Q^T and V dO^T are computed, keys down. A wgmma takes its left operand
# from registers, where the last product left it; a transposed one has to go through shared memory, 128 x 64 numbers
# twice a step, written and read, and all warps wait for each other. Predicted: those 64 KB a step, 500 cycles of shared
# memory's 128 bytes a cycle beside 2048 of products at D = 128: a fifth less.
def transposed(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """As masked."""
    return _run(grad_out, q, k, v, out, lse, causal, window, scale, 2)


# Rung 4. New: descriptors, where the tensors allow; one thread asks for Q and dO of the next step.
def attention_backward(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """dq, dk, dv of lesson 5's attention, the same to the bit each time.

    grad_out, q, out [B, H, S_q, D], k, v [B, H_kv, S_k, D] in one dtype, any strides; lse [B, H, S_q] in fp32,
    contiguous; out and lse as attention() returned them, causal, window and scale as it got them. TypeError,
    ValueError for what is not so.
    """
    return _run(grad_out, q, k, v, out, lse, causal, window, scale, 3)


def _run(grad_out, q, k, v, out, lse, causal, window, scale, features):
    scale = expect_gradient(grad_out, q, k, v, out, lse, causal, window, scale)
    tma = features > 2 and device.architecture() >= 90 and tma_takes(q, k, v, grad_out)
    dq, delta = _gradient_of_queries(grad_out, q, k, v, out, lse, causal, window, scale, features > 0, tma)
    dk, dv, (B, H, S_q, D), (_, H_kv, S_k, _) = torch.empty_like(k), torch.empty_like(v), q.shape, k.shape
    if not q.numel() or not k.numel():
        return dq, dk.zero_(), dv.zero_()
    block_m, block_n, warps, stages = _key_tiles(q)
    if D > 128 and features < 2:
        stages = 1  # with two, and transposes, what Triton 3.6 makes for sm_90 differs from run to run: a race
    block_d = max(16, triton.next_power_of_2(D))
    at_once = min(B * H_kv, _at_once(2 * (H // H_kv) * S_q * block_d * q.element_size()))
    dkdv_kernel[(B * H_kv * triton.cdiv(S_k, block_n),)](
        *_tiled((q, k, v, grad_out), (block_m, block_n, block_n, block_m), tma), dk, dv, lse, delta,
        q.stride(), k.stride(), v.stride(), grad_out.stride(), dk.stride(), dv.stride(),
        scale, scale * LOG2E.value, window or 0, B, H, S_q, S_k, D, H // H_kv, at_once, causal, window is not None,
        features > 0, features > 0 and causal, features > 1, tma, block_m, block_n, block_d, precision(),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dq, dk, dv


def _tiled(tensors, rows, tma):
    """Descriptors of [B, H, S, D] tensors for tiles of so many rows each, or the tensors."""
    if not tma:
        return tensors
    block_d = max(16, triton.next_power_of_2(tensors[0].shape[-1]))
    return [TensorDescriptor.from_tensor(t, [1, 1, n, block_d]) for t, n in zip(tensors, rows, strict=True)]


def _at_once(bytes_a_head):
    """How many heads to work on at a time, so that what their programs share, bytes_a_head each, fills half of L2."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size if device.HAS_GPU else 2**16 if device.INTERPRETED else 2**26
    return max(1, l2 // 2 // max(1, bytes_a_head))


def _key_tiles(q):
    """Queries, keys, warps and stages. dk, dv and two tiles of scores fill the registers, K, V and stages the rest."""
    large, D = device.roomy(), q.shape[-1]
    if q.element_size() == 4:
        return (64, 64, 8, 1) if D <= 64 else (32, 32, 4, 1)
    if D > 128 and device.shared_memory() < 2**17:
        return 32, 32, 4, 1
    return (64, 128, 8, 2) if (128 if large else 64) >= D else (32, 64, 8, 2 if large or D <= 128 else 1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, window, scale):
        out, lse = attention_forward(q, k, v, causal=causal, window=window, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = causal, window, scale
        return out

    @staticmethod
    @once_differentiable  # a second derivative would silently leave out what these kernels depend on: an error instead
    def backward(ctx, grad_out):
        return *attention_backward(grad_out, *ctx.saved_tensors, *ctx.options), None, None, None


def flash_attention(q, k, v, causal=False, window=None, scale=None):
    """q [B, H, S_q, D], k, v [B, H_kv, S_k, D] -> out [B, H, S_q, D], differentiable once; as lesson 5's attention."""
    return _Attention.apply(q, k, v, causal, window, scale)


def usual(q, k, v, causal=False, window=None, scale=None):
    return PROBLEM.reference(q, k, v, causal, window, scale)[0]


def same_each_time(rung):
    """Two runs agree to the bit: every sum has one owner, who adds in one order. (Atomics on dq would not.)"""
    args = inputs_backward(1, 4, 70, 16, H_kv=1, causal=True, dtype=torch.float16)
    assert all(torch.equal(a, b) for a, b in zip(rung(*args), rung(*args), strict=True))


def the_second_derivative_is_refused(rung):
    """Asked for one, autograd says so; it does not answer without the part that went through these kernels."""
    q, k, v, *_ = inputs(1, 1, 8, 16)
    loss = flash_attention(q.requires_grad_(), k, v).square().sum()
    (dq,) = torch.autograd.grad(loss, q, create_graph=True)
    said = ""
    try:
        dq.sum().backward()
    except RuntimeError as error:
        said = str(error)
    assert "once_differentiable" in said


# fmt: off
WRONG = (
    Mutant("delta left out", "add_queries", "- tl.load(deltas, there, 0.0)[:, None]", "", "masked"),
    Mutant("no scale", "dkdv_kernel", "dk * scale", "dk", "masked"),
    Mutant("P where dS belongs", "add_queries", "ds.to(q_tile.dtype)", "p.to(q_tile.dtype)", "transposed"),
    Mutant("lse past the end is read", "add_queries", "lse_ptr + head + rows, mask=rows < S_q",
           "lse_ptr + head + rows, mask=rows < S_q + 1", "masked", "out of bounds"),
    Mutant("the diagonal is not masked", "dkdv_kernel", "WINDOW, part != 1", "WINDOW, part > 1", "skipped", "nan"),
    Mutant("a block of queries too few", "query_bounds", "key - offset) //", "key - offset + BLOCK_M) //", "skipped"),
    Mutant("one head for its whole group", "dkdv_kernel", "h_kv * GROUP + GROUP)", "h_kv * GROUP + 1)", "transposed"),
)
# fmt: on

LESSON = Lesson(
    about=About(
        teaches="dK and dV, whose owner is a block of keys; no atomics, no transposes; the differentiable op",
        hours=1,
        star=True,
        operator="attention backward",
    ),
    problem=PROBLEM_BACKWARD,
    rungs=(masked, skipped, transposed, attention_backward),
    wrong=WRONG,
    claims={
        transposed: ("dkdv_kernel: wgmma", "dq_kernel: wgmma"),
        attention_backward: ("dkdv_kernel: wgmma", "dkdv_kernel: tma"),
    },
    # Parts of S D numbers: lesson 6's 9 or 8 and its rows; K, V, dK and dV, and Q and dO for both blocks of keys or
    # 1.5 times, with their two numbers a row. Of 8 parts and lse.
    passes={
        masked: (9 + 3 / 8 + 4 + 4 + 4 / 8) / 8.125,
        skipped: (8 + 3 / 8 + 4 + 3 + 3 / 8) / 8.125,
        attention_backward: (8 + 3 / 8 + 4 + 3 + 3 / 8) / 8.125,
    },
    properties=(same_each_time, *PROBLEM_BACKWARD.properties, the_second_derivative_is_refused),
    grad=Grad(flash_attention, usual, inputs, factor=1.25),  # on a GPU 2.3 times were seen
)

if __name__ == "__main__":
    LESSON.main()
