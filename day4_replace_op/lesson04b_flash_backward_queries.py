"""Flash attention, backward of the queries: the scores a second time
=================================================================
P is not kept, so the backward computes it again: from the scores and lse, P = exp(scale Q K^T - lse), with no maximum
and no sum to look for. With delta = rowsum(dO * O), one number a query that stands for the softmax's whole Jacobian
(Dao et al. 2022, section 3.1 and algorithm 4; Dao 2023, algorithm 2):

    dP = dO V^T        dS = P * (dP - delta)        dQ = scale dS K                                     this lesson
    dV = P^T dO                                     dK = scale dS^T Q                                   lesson 5

dQ is a sum over keys: its owner is a block of queries, which walks over the keys that it sees, as in lesson 4. Three
products, 6 S^2 D FLOPs a head, where the forward has two, and by lesson 3's count per tile of 128 x 128 scores the
exponentials and three instructions a score (less a row's number in one multiply-add, dP - delta, its product with P),
no maximum, no rescaling. Memory: lse and delta, 8 bytes a query, where P at S = 4096 in bf16 would be 32 MB a head.

You will learn: a softmax's gradient from one number a row, recomputation, what a loop without a rescaling saves.
Run it:    python day4_replace_op/lesson04b_flash_backward_queries.py
Check it:  python -m lessonkit check lesson04b_flash_backward_queries
Time it:   python -m lessonkit bench lesson04b_flash_backward_queries
"""

import math

from lessonkit import About, Lesson, Mutant, Work, device, tma_takes

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from problems.attention import (
    PROBLEM_BACKWARD,
    expect_gradient,
    inputs_backward,
    pairs,
    precision,
    reference,
    reference_queries,
)

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


# The kernel of all rungs; SKIP and TMA are what rungs 2 and 3 switch on.
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


# Rung 1. Every block of keys, all masked.
def masked(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """grad_out, q, out [B, H, S_q, D], k, v [B, H_kv, S_k, D], lse [B, H, S_q] fp32 -> dq as q, delta as lse."""
    return _run(grad_out, q, k, v, out, lse, causal, window, scale, 0)


# Rung 2. New: lesson 4's bounds and its order of programs. Predicted: causal 16.5 blocks of 32 at S = 4096.
def skipped(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """As masked."""
    return _run(grad_out, q, k, v, out, lse, causal, window, scale, 1)


# Rung 3. New: descriptors, where the tensors allow: the compiler sees K once in shared memory, read there as K^T by one
# product and as K by another.
def backward_queries(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """dq of lesson 4's attention, and delta = rowsum(grad_out * out), which dk and dv need too.

    grad_out, q, out [B, H, S_q, D], k, v [B, H_kv, S_k, D] in one dtype, any strides; lse [B, H, S_q] in fp32,
    contiguous; out and lse as attention() returned them, causal, window and scale as it got them. TypeError,
    ValueError for what is not so.
    """
    return _run(grad_out, q, k, v, out, lse, causal, window, scale, 2)


def _run(grad_out, q, k, v, out, lse, causal, window, scale, features):
    scale = expect_gradient(grad_out, q, k, v, out, lse, causal, window, scale)
    (B, H, S_q, D), (_, H_kv, S_k, _) = q.shape, k.shape
    dq, delta, block_d = torch.empty_like(q), torch.empty_like(lse), max(16, triton.next_power_of_2(D))
    if not dq.numel():
        return dq, delta
    delta_kernel[(B * H * triton.cdiv(S_q, 32),)](
        out, grad_out, delta, out.stride(), grad_out.stride(), H, S_q, D, 32, block_d
    )
    block_m, block_n, warps, stages = _tiles(q)
    tma = features > 1 and device.architecture() >= 90 and tma_takes(q, k, v, grad_out)
    at_once = min(B * H, H // H_kv * _at_once(2 * S_k * block_d * q.element_size()))
    dq_kernel[(B * H * triton.cdiv(S_q, block_m),)](
        *_tiled((q, k, v, grad_out), (block_m, block_n, block_n, block_m), tma), dq, lse, delta,
        q.stride(), k.stride(), v.stride(), grad_out.stride(), dq.stride(),
        scale, scale * LOG2E.value, window or 0, B, H, S_q, S_k, D, H // H_kv, at_once, causal, window is not None,
        features > 0, features > 0 and causal, tma, block_m, block_n, block_d, precision(),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dq, delta


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


def _tiles(q):
    """Queries, keys, warps and stages: dq and two tiles of scores in registers, Q, dO and stages in shared memory."""
    if q.element_size() == 4:
        return (64, 64, 8, 1) if q.shape[-1] <= 64 else (32, 32, 4, 1)
    if q.shape[-1] > 128:
        return (128, 32, 8, 2) if device.roomy() else (64, 32, 8, 1)
    return (128, 64, 8, 2) if device.roomy() or q.shape[-1] <= 64 else (64, 64, 8, 2)


def _work(B, H, S, D, dtype, S_k=None, H_kv=None, causal=False, window=None, scale=None, layout=""):
    """Q, O, dO, K, V and lse read, dQ and delta written; three products of each seen pair."""
    seen = pairs(S, S if S_k is None else S_k, causal, window)
    kv = (H_kv or H) * (S if S_k is None else S_k)
    return Work(bytes=B * D * (4 * H * S + 2 * kv) * dtype.itemsize + 8 * B * H * S, flops=6 * B * H * D * seen)


def same_each_time(rung):
    """Two runs agree to the bit."""
    args = inputs_backward(1, 2, 70, 16, H_kv=1, causal=True, dtype=torch.float16)
    assert all(torch.equal(a, b) for a, b in zip(rung(*args), rung(*args), strict=True))


def one_key_one_answer(rung):
    """Where all keys are equal P does not depend on q, and where one is seen neither: dq is 0."""
    grad_out, q, k, v, _, _, *_ = inputs_backward(1, 1, 40, 16)
    k[:] = k[:, :, :1]
    out, lse = reference(q, k, v, True)
    assert rung(grad_out, q, k, v, out, lse, True)[0].abs().max() < 1e-4


# fmt: off
WRONG = (
    Mutant("delta left out", "add_keys", "- delta[:, None]", "- 0 * delta[:, None]", "masked"),
    Mutant("delta of dO alone", "delta_kernel", "o_tile.to(tl.float32) * do", "do", "masked"),
    Mutant("no scale", "dq_kernel", "dq * scale", "dq", "masked"),
    Mutant("lse as it is, powers of 2 expected", "dq_kernel", "other=0.0) * LOG2E", "other=0.0)", "skipped"),
    Mutant("the diagonal is not masked", "dq_kernel", "part != 1", "part < 1", "skipped", "nan"),
    Mutant("P where dS belongs", "add_keys", "ds.to(k_tile.dtype)", "p.to(k_tile.dtype)", "backward_queries"),
)
# fmt: on

LESSON = Lesson(
    about=About(
        teaches="a softmax's gradient from one number a row; dQ, whose owner is a block of queries",
        hours=0.75,
        operator="attention, dQ alone",
    ),
    problem=PROBLEM_BACKWARD,
    reference=reference_queries,
    rungs=(masked, skipped, backward_queries),
    work=_work,
    wrong=WRONG,
    claims={masked: ("dq_kernel: wgmma",), backward_queries: ("dq_kernel: wgmma", "dq_kernel: tma")},
    # Parts of S D numbers: O and dO for delta, then Q, dO and dq, K and V twice each or 1.5 times; a row's two numbers
    # written and read are 4 / 32 of a part each.
    passes={masked: (5 + 4 + 3 / 8) / 6.25, skipped: (5 + 3 + 3 / 8) / 6.25, backward_queries: (5 + 3 + 3 / 8) / 6.25},
    properties=(same_each_time, one_key_one_answer),
    peers={},
)

if __name__ == "__main__":
    LESSON.main()
