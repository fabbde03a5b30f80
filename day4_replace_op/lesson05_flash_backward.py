"""Flash attention, backward: the other owner, and the op that a model calls
=========================================================================
dV = P^T dO and dK = scale dS^T Q, with P and dS as in lesson 4b, are sums over queries: their owner is a block of keys,
which keeps K and V and walks over the queries that see it. One kernel could do dQ too, with five products in all, 10
S^2 D FLOPs a head; but then the programs of all keys add to the same dQ, by atomics, in another order each time. Here
each sum has one owner who adds in one order, so that two runs agree to the bit: four products here, three in lesson 4b.
Seven for five: at the same pace 5/7 of the speed, which is counted, as is customary, by 10 S^2 D.

    causal, windows   the bounds of lesson 4 seen from the keys: queries from the key's own on, while the window holds
    grouped heads     dK and dV are sums over a group's heads too: the owner visits one after the other, no atomics
    no masks of rows  past S_q Q and dO are read as 0, and what they add is 0

You will learn: who owns a sum, operands that need no transpose, a differentiable op, what a second derivative is told.
Source: Dao 2023, FlashAttention-2, algorithm 2, its loop over key blocks without the update of dQ.
Run it:    python day4_replace_op/lesson05_flash_backward.py
Check it:  python -m lessonkit check lesson05_flash_backward
Time it:   python -m lessonkit bench lesson05_flash_backward
"""

import math

from lessonkit import Grad, Lesson, Mutant, Work, case, device, tma_takes

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from day3_matmul_tk.lesson01_matmul import precision
from day4_replace_op import heads
from day4_replace_op import lesson04b_flash_backward_queries as queries
from day4_replace_op.heads import LOG2E, load_tile, seen, store_tile, tiled
from day4_replace_op.lesson04_flash_options import attention, place
from day4_replace_op.lesson04b_flash_backward_queries import backward_queries, expect_gradient, inputs


def reference(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """The formulas above, a head at a time: dq as q, dk and dv as k."""
    (B, H, S_q, D), (_, H_kv, S_k, _) = q.shape, k.shape
    dq, delta = queries.reference(grad_out, q, k, v, out, lse, causal, window, scale)
    scale, hidden = scale or 1 / math.sqrt(D), ~heads.visible(S_q, S_k, causal, window, q.device)
    dk, dv = torch.zeros(2, *k.shape, dtype=lse.dtype, device=q.device)
    for b, h in ((b, h) for b in range(B) for h in range(H)):
        kv = b, h * H_kv // H
        p = torch.exp(q[b, h] @ k[kv].T * scale - lse[b, h, :, None]).masked_fill(hidden, 0)
        ds = p * (grad_out[b, h] @ v[kv].T - delta[b, h, :, None])
        dk[kv] += ds.to(q.dtype).T @ q[b, h] * scale
        dv[kv] += p.to(q.dtype).T @ grad_out[b, h]
    return dq, dk.to(q.dtype), dv.to(q.dtype)


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
    """dq, dk, dv of lesson 4's attention, the same to the bit each time.

    grad_out, q, out [B, H, S_q, D], k, v [B, H_kv, S_k, D] in one dtype, any strides; lse [B, H, S_q] in fp32,
    contiguous; out and lse as attention() returned them, causal, window and scale as it got them. TypeError,
    ValueError for what is not so.
    """
    return _run(grad_out, q, k, v, out, lse, causal, window, scale, 3)


def _run(grad_out, q, k, v, out, lse, causal, window, scale, features):
    scale = expect_gradient(grad_out, q, k, v, out, lse, causal, window, scale)
    of_q = queries.masked, queries.skipped, queries.skipped, backward_queries
    dq, delta = of_q[features](grad_out, q, k, v, out, lse, causal, window, scale)
    dk, dv, (B, H, S_q, D), (_, H_kv, S_k, _) = torch.empty_like(k), torch.empty_like(v), q.shape, k.shape
    if not q.numel() or not k.numel():
        return dq, dk.zero_(), dv.zero_()
    block_m, block_n, warps, stages = _tiles(q)
    if D > 128 and features < 2:
        stages = 1  # with two, and transposes, what Triton 3.6 makes for sm_90 differs from run to run: a race
    tma = features > 2 and device.architecture() >= 90 and tma_takes(q, k, v, grad_out)
    block_d = max(16, triton.next_power_of_2(D))
    at_once = min(B * H_kv, heads.at_once(2 * (H // H_kv) * S_q * block_d * q.element_size()))
    dkdv_kernel[(B * H_kv * triton.cdiv(S_k, block_n),)](
        *tiled((q, k, v, grad_out), (block_m, block_n, block_n, block_m), tma), dk, dv, lse, delta,
        q.stride(), k.stride(), v.stride(), grad_out.stride(), dk.stride(), dv.stride(),
        scale, scale * LOG2E.value, window or 0, B, H, S_q, S_k, D, H // H_kv, at_once, causal, window is not None,
        features > 0, features > 0 and causal, features > 1, tma, block_m, block_n, block_d, precision(),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dq, dk, dv


def _tiles(q):
    """Queries, keys, warps and stages. dk, dv and two tiles of scores fill the registers, K, V and stages the rest."""
    hopper, D = device.architecture() >= 90, q.shape[-1]
    if q.element_size() == 4:
        return (64, 64, 8, 1) if D <= 64 else (32, 32, 4, 1)
    return (64, 128, 8, 2) if (128 if hopper else 64) >= D else (32, 64, 8, 2 if hopper or D <= 128 else 1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, window, scale):
        out, lse = attention(q, k, v, causal, window, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = causal, window, scale
        return out

    @staticmethod
    @once_differentiable  # a second derivative would silently leave out what these kernels depend on: an error instead
    def backward(ctx, grad_out):
        return *attention_backward(grad_out, *ctx.saved_tensors, *ctx.options), None, None, None


def flash_attention(q, k, v, causal=False, window=None, scale=None):
    """q [B, H, S_q, D], k, v [B, H_kv, S_k, D] -> out [B, H, S_q, D], differentiable once; as lesson 4's attention."""
    return _Attention.apply(q, k, v, causal, window, scale)


def usual(q, k, v, causal=False, window=None, scale=None):
    return heads.reference(q, k, v, causal, window, scale)[0]


def _work(B, H, S, D, dtype, S_k=None, H_kv=None, causal=False, window=None, scale=None, layout=""):
    """Q, O, dO, K, V and lse read, dQ, dK and dV written; five products of each seen pair."""
    S_k = S if S_k is None else S_k
    bytes = B * D * (4 * H * S + 4 * (H_kv or H) * S_k) * dtype.itemsize + 4 * B * H * S
    return Work(bytes=bytes, flops=10 * B * H * D * heads.pairs(S, S_k, causal, window))


def same_each_time(rung):
    """Two runs agree to the bit: every sum has one owner, who adds in one order. (Atomics on dq would not.)"""
    args = inputs(1, 4, 70, 16, H_kv=1, causal=True, dtype=torch.float16)
    assert all(torch.equal(a, b) for a, b in zip(rung(*args), rung(*args), strict=True))


def what_is_not_seen_has_no_gradient(rung):
    """P's rows sum to 1, so dV sums to what dO sums to; and with a window of 20, queries from 100 on see no key before
    81, so that these have no gradient from them."""
    grad_out, *rest = inputs(1, 2, 150, 16, causal=True, window=20)
    torch.testing.assert_close(rung(grad_out, *rest)[2].sum(2), grad_out.sum(2), rtol=1e-4, atol=1e-4)
    grad_out[:, :, :100] = 0
    dk, dv = rung(grad_out, *rest)[1:]
    assert [int((t != 0).any(-1).nonzero()[:, -1].min()) for t in (dk, dv)] == [81, 81]


def the_second_derivative_is_refused(rung):
    """Asked for one, autograd says so; it does not answer without the part that went through these kernels."""
    q, k, v, *_ = heads.inputs(1, 1, 8, 16)
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
    reference=reference,
    inputs=inputs,
    rungs=(masked, skipped, transposed, attention_backward),
    checks=(*queries.CHECKS, case("the bytes are counted here: 6 of 8 tiles", B=1, H=1, S=256, D=16, causal=True)),
    benches=queries.BENCHES,
    work=_work,
    wrong=WRONG,
    peers=heads.BACKWARD_PEERS,
    claims={
        transposed: ("dkdv_kernel: wgmma", "dq_kernel: wgmma"),
        attention_backward: ("dkdv_kernel: wgmma", "dkdv_kernel: tma"),
    },
    # Parts of S D numbers: lesson 4b's 9 or 8 and its rows; K, V, dK and dV, and Q and dO for both blocks of keys or
    # 1.5 times, with their two numbers a row. Of 8 parts and lse.
    passes={
        masked: (9 + 3 / 8 + 4 + 4 + 4 / 8) / 8.125,
        skipped: (8 + 3 / 8 + 4 + 3 + 3 / 8) / 8.125,
        attention_backward: (8 + 3 / 8 + 4 + 3 + 3 / 8) / 8.125,
    },
    # delta is a sum over O as it was rounded to 16 bits; PyTorch's own backward rounds P instead. Where a query sees
    # few keys, dP - delta is a small difference, and that rounding was found to count for 1.5 times the usual budget.
    factor=2,
    properties=(same_each_time, what_is_not_seen_has_no_gradient, the_second_derivative_is_refused),
    refuses=queries.REFUSES,
    grad=Grad(flash_attention, usual, heads.inputs, factor=1.25),  # on a GPU 2.3 times were seen
)

if __name__ == "__main__":
    LESSON.main()
