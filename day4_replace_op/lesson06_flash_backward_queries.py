"""Flash attention, backward of the queries: the scores a second time
=================================================================
The forward does not keep P. You will be able to compute it again from lse, and to say what a softmax's gradient needs
beside it: one value per row. You need lesson 5.

The forward's lse gives P = exp(scale Q K^T - lse), without another row maximum or row sum. The softmax's Jacobian of
S x S values a query is not needed either. One value per query stands for it, delta = rowsum(dO * O). (Dao et al. 2022,
section 3.1 and algorithm 4; Dao 2023, algorithm 2.)

    dP = dO V^T        dS = P * (dP - delta)        dQ = scale dS K                                     this lesson
    dV = P^T dO                                     dK = scale dS^T Q                                   lesson 7

Why one value is enough: for one query let g_j = dO . V_j be the gradient of its weight p_j. A softmax has
dp_j / ds_k = p_j ([j = k] - p_k). So

    dS_k = sum over j of g_j p_j ([j = k] - p_k)  =  p_k (g_k - sum over j of p_j g_j)
    sum over j of p_j g_j  =  dO . (sum over j of p_j V_j)  =  dO . O  =  delta

The sum over all keys is a dot product of two rows of D values, and the forward has computed O.

dQ is a sum over keys. So a program owns a block of queries, as in lesson 5, and sweeps the keys that they see:

    P and dS of one causal head in blocks: x computed, m computed and masked, . not visible to any query

                 keys ->                                 masked: all 16 blocks, each with a mask
    query    row 0   m . . .
             row 1   x m . .   a program owns a row      skipped: 10 blocks, of which 4 with a mask
             row 2   x x m .   of blocks: it keeps
             row 3   x x x m   Q, dO and dQ, and         K and V of a block are loaded once: V for dP, K for the scores
                               sweeps K and V ->         and, as the right operand, for dQ

Budget, a block of 128 x 128 scores at D = 128 and at D = 64, in cycles of an SM:

    three matmuls, 6 * 128 * 128 * D FLOPs, 4096 a cycle     3072   1536    the forward has two
    exponentials, 128 * 128, 16 a cycle                      1024   1024
    three instructions per score, 128 lanes                   384    384    score - lse in one multiply-add, dP - delta,
                                                                            times P; no maximum, no rescaling

With nothing overlapped that is 4480 and 2944 cycles: 790 * 3072 / 4480 = 542 TFLOP/s, and 412; with all overlapped 790.
Memory: lse and delta, 8 bytes per query, where P at S = 4096 in bf16 would be 32 MB per head.

Each rung is a complete kernel for contiguous tensors with a K and V for each head. S is a multiple of 128, D a power of
two up to 128. course_ops.attention takes windows, grouped heads, other lengths and strides.

Before you read on: the forward rescales O in each step. Why does dQ need no rescaling? Which rounding does delta see
that PyTorch's own backward does not?

Run it:    python3 course.py run lesson06_flash_backward_queries
Check it:  python3 course.py check lesson06_flash_backward_queries
Time it:   python3 course.py bench lesson06_flash_backward_queries
"""

import math

from lessonkit import About, Lesson, Mutant, Prediction, Refusal, Unsupported, Work, case, device, needs

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
def delta_kernel(out_ptr, do_ptr, delta_ptr, ROWS: tl.constexpr, D: tl.constexpr):  # [B H S, D] twice, [B H S] in fp32
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tile = rows[:, None] * D + tl.arange(0, D)[None, :]
    o_tile, do_tile = tl.load(out_ptr + tile), tl.load(do_ptr + tile)
    tl.store(delta_ptr + rows, tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), axis=1))


# Rung 1. A program has a block of queries. It visits every block of keys, and masks each of them.
@triton.jit
def masked_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr,  # [B H, S, D] five times, [B H, S] twice in fp32
    scale, S, CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles, cols = S // ROWS, tl.arange(0, D)[None, :]
    head, row = (tl.program_id(0) // tiles).to(tl.int64) * S, tl.program_id(0) % tiles * ROWS
    rows = row + tl.arange(0, ROWS)
    tile = (head + rows)[:, None] * D + cols
    q, do = tl.load(q_ptr + tile), tl.load(do_ptr + tile)
    lse, delta = tl.load(lse_ptr + head + rows) * LOG2E, tl.load(delta_ptr + head + rows)
    dq = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, S, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = tl.load(k_ptr + (head + keys)[:, None] * D + cols)
        v = tl.load(v_ptr + (head + keys)[:, None] * D + cols)
        p = tl.exp2(tl.dot(q, k.T, input_precision=PRECISION) * (scale * LOG2E) - lse[:, None])
        if CAUSAL:
            p = tl.where(keys[None, :] <= rows[:, None], p, 0.0)
        ds = p * (tl.dot(do, v.T, input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    tl.store(dq_ptr + tile, (dq * scale).to(q.dtype))


def masked(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """grad_out, q, k, v, out [B, H, S, D], lse [B, H, S] fp32 -> dq as q, delta as lse."""
    scale, dq, delta = _prepared(grad_out, q, k, v, out, lse, causal, window, scale)
    S, D, (rows, keys) = *q.shape[2:], _block(q)
    masked_kernel[(delta.numel() // rows,)](
        q, k, v, grad_out, dq, lse, delta, scale, S, causal, rows, keys, D, precision(), num_warps=8, num_stages=2
    )
    return dq, delta


# Rung 2. New: lesson 5's bounds and its order of programs. A block of queries sees all keys before its first query,
# some of the keys up to its last query, and none after it. At S = 4096, causal, that is 16.5 of 32 blocks on average.
@triton.jit
def skipped_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr,  # [B H, S, D] five times, [B H, S] twice in fp32
    scale, S, HEADS, CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tiles, cols = S // ROWS, tl.arange(0, D)[None, :]
    # New: the longest tiles of HEADS heads first, then those of the next heads.
    group, within = tl.program_id(0) // (HEADS * tiles), tl.program_id(0) % (HEADS * tiles)
    width = tl.minimum(HEADS, tl.num_programs(0) // tiles - group * HEADS)
    head = (group * HEADS + within % width).to(tl.int64) * S
    row = (tiles - 1 - within // width) * ROWS
    rows = row + tl.arange(0, ROWS)
    tile = (head + rows)[:, None] * D + cols
    q, do = tl.load(q_ptr + tile), tl.load(do_ptr + tile)
    lse, delta = tl.load(lse_ptr + head + rows) * LOG2E, tl.load(delta_ptr + head + rows)
    dq = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, row if CAUSAL else S, KEYS):  # New: every query sees these keys
        keys = start + tl.arange(0, KEYS)
        k = tl.load(k_ptr + (head + keys)[:, None] * D + cols)
        v = tl.load(v_ptr + (head + keys)[:, None] * D + cols)
        p = tl.exp2(tl.dot(q, k.T, input_precision=PRECISION) * (scale * LOG2E) - lse[:, None])
        ds = p * (tl.dot(do, v.T, input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    if CAUSAL:
        for start in range(row, row + ROWS, KEYS):  # New: the diagonal
            keys = start + tl.arange(0, KEYS)
            k = tl.load(k_ptr + (head + keys)[:, None] * D + cols)
            v = tl.load(v_ptr + (head + keys)[:, None] * D + cols)
            p = tl.exp2(tl.dot(q, k.T, input_precision=PRECISION) * (scale * LOG2E) - lse[:, None])
            p = tl.where(keys[None, :] <= rows[:, None], p, 0.0)
            ds = p * (tl.dot(do, v.T, input_precision=PRECISION) - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    tl.store(dq_ptr + tile, (dq * scale).to(q.dtype))


def skipped(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """As masked."""
    scale, dq, delta = _prepared(grad_out, q, k, v, out, lse, causal, window, scale)
    S, D, (rows, keys) = *q.shape[2:], _block(q)
    skipped_kernel[(delta.numel() // rows,)](
        q, k, v, grad_out, dq, lse, delta, scale, S, _at_once(q), causal, rows, keys, D, precision(),
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return dq, delta


# Rung 3. New: TMA. A tile of K lies in shared memory once, and one matmul reads it as K^T, another as K.
@triton.jit
def backward_queries_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_ptr, lse_ptr, delta_ptr,  # [B H, S, D] five times, [B H, S] twice in fp32
    scale, S, HEADS, CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tiles, cols = S // ROWS, tl.arange(0, D)[None, :]
    group, within = tl.program_id(0) // (HEADS * tiles), tl.program_id(0) % (HEADS * tiles)
    width = tl.minimum(HEADS, tl.num_programs(0) // tiles - group * HEADS)
    nth = group * HEADS + within % width
    head = nth.to(tl.int64) * S
    row = (tiles - 1 - within // width) * ROWS
    rows = row + tl.arange(0, ROWS)
    tile = (head + rows)[:, None] * D + cols
    q, do = q_desc.load([nth, row, 0]).reshape(ROWS, D), do_desc.load([nth, row, 0]).reshape(ROWS, D)  # New
    lse, delta = tl.load(lse_ptr + head + rows) * LOG2E, tl.load(delta_ptr + head + rows)
    dq = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, row if CAUSAL else S, KEYS):
        k = k_desc.load([nth, start, 0]).reshape(KEYS, D)  # New
        v = v_desc.load([nth, start, 0]).reshape(KEYS, D)  # New
        p = tl.exp2(tl.dot(q, k.T, input_precision=PRECISION) * (scale * LOG2E) - lse[:, None])
        ds = p * (tl.dot(do, v.T, input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    if CAUSAL:
        for start in range(row, row + ROWS, KEYS):
            keys = start + tl.arange(0, KEYS)
            k = k_desc.load([nth, start, 0]).reshape(KEYS, D)  # New
            v = v_desc.load([nth, start, 0]).reshape(KEYS, D)  # New
            p = tl.exp2(tl.dot(q, k.T, input_precision=PRECISION) * (scale * LOG2E) - lse[:, None])
            p = tl.where(keys[None, :] <= rows[:, None], p, 0.0)
            ds = p * (tl.dot(do, v.T, input_precision=PRECISION) - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    tl.store(dq_ptr + tile, (dq * scale).to(q.dtype))


@needs(90, "TMA", interpreted=True)
def backward_queries(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """As masked: dq, and delta = rowsum(grad_out * out), which dk and dv need too.

    out and lse as the forward returned them; causal, window and scale as it got them. TypeError, ValueError for what is
    not so; Unsupported for what course_ops.attention takes and this does not.
    """
    scale, dq, delta = _prepared(grad_out, q, k, v, out, lse, causal, window, scale)
    S, D, (rows, keys) = *q.shape[2:], _block(q)
    descs = (
        TensorDescriptor.from_tensor(t.view(-1, S, D), [1, n, D])
        for t, n in ((q, rows), (k, keys), (v, keys), (grad_out, rows))
    )
    backward_queries_kernel[(delta.numel() // rows,)](
        *descs, dq, lse, delta, scale, S, _at_once(q), causal, rows, keys, D, precision(), num_warps=8, num_stages=2
    )
    return dq, delta


def _prepared(grad_out, q, k, v, out, lse, causal, window, scale):
    """The scale, dq without values, and delta; Unsupported for all but the case that the rungs show."""
    scale = expect_gradient(grad_out, q, k, v, out, lse, causal, window, scale)
    S, D = q.shape[2:]
    plain = q.shape == k.shape and q.numel() and S % 128 == 0 and D in (16, 32, 64, 128) and window is None
    if not plain or not all(t.is_contiguous() for t in (grad_out, q, k, v, out)):
        raise Unsupported(
            "for contiguous tensors, k as long as q, S a multiple of 128, D of 16, 32, 64 or 128, a K and V for each "
            "head, no window; course_ops.attention takes the rest"
        )
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    delta_kernel[(delta.numel() // 32,)](out, grad_out, delta, 32, D)
    return scale, dq, delta


def _at_once(q):
    """How many heads to work on at a time, so that their K and V fill half of L2."""
    B, H, S, D = q.shape
    l2 = torch.cuda.get_device_properties(0).L2_cache_size if device.HAS_GPU else 2**16 if device.INTERPRETED else 2**26
    return min(B * H, max(1, l2 // 2 // (2 * S * D * q.element_size())))


def _block(q):
    """Queries and keys: dq and two blocks of scores in registers, Q, dO and two stages of K and V in shared memory."""
    if q.element_size() == 4:
        return (64, 32) if q.shape[-1] <= 64 else (32, 32)
    return (128, 64) if device.roomy() or q.shape[-1] <= 64 else (64, 64)


def _work(B, H, S, D, dtype, S_k=None, H_kv=None, causal=False, window=None, scale=None, layout=""):
    """Q, O, dO, K, V and lse read, dQ and delta written; three matmuls for each visible pair."""
    seen = pairs(S, S if S_k is None else S_k, causal, window)
    kv = (H_kv or H) * (S if S_k is None else S_k)
    return Work(bytes=B * D * (4 * H * S + 2 * kv) * dtype.itemsize + 8 * B * H * S, flops=6 * B * H * D * seen)


def same_each_time(rung):
    """Two runs agree to the bit."""
    args = inputs_backward(1, 2, 128, 16, causal=True, dtype=torch.float16)
    assert all(torch.equal(a, b) for a, b in zip(rung(*args), rung(*args), strict=True))


def one_key_one_answer(rung):
    """If all keys are equal, or a query sees one key only, P does not depend on q: dq is 0."""
    grad_out, q, k, v, _, _, *_ = inputs_backward(1, 1, 128, 16)
    k[:] = k[:, :, :1]
    out, lse = reference(q, k, v, True)
    assert rung(grad_out, q, k, v, out, lse, True)[0].abs().max() < 1e-4


# fmt: off
WRONG = (
    Mutant("delta left out", "masked_kernel", "- delta[:, None]", "- 0 * delta[:, None]", "masked"),
    Mutant("delta of dO alone", "delta_kernel", "o_tile.to(tl.float32) * do", "do", "masked"),
    Mutant("no scale", "masked_kernel", "(dq * scale)", "dq", "masked"),
    Mutant("lse as it is, powers of 2 expected", "skipped_kernel", "+ rows) * LOG2E", "+ rows)", "skipped"),
    Mutant("the diagonal is left out", "skipped_kernel", "range(row, row + ROWS, KEYS)", "range(row, row, KEYS)",
           "skipped"),
    Mutant("the last group as large as the others", "skipped_kernel",
           "tl.minimum(HEADS, tl.num_programs(0) // tiles - group * HEADS)", "HEADS", "skipped", "out of bounds"),
    Mutant("the diagonal's keys are those before it", "backward_queries_kernel", "range(row, row + ROWS, KEYS)",
           "range(row - KEYS, row + ROWS - KEYS, KEYS)", "backward_queries"),
)
CHECKS = (
    case("one block of queries", B=1, H=2, S=128, D=16),
    case("three heads, of which two at once fit into the interpreter's L2 in 16 bits: a last group of one",
         B=1, H=3, S=256, D=16, causal=True),
    case("D = 64, causal", B=1, H=1, S=128, D=64, causal=True),
    case("a scale, D = 128", B=2, H=1, S=256, D=128, causal=True, scale=0.3),
    case("all keys", B=1, H=1, S=256, D=32),
    case("three tiles and more for each SM", gib=0.6, B=4, H=34, S=512, D=128, causal=True),
    case("the bytes are counted here: the diagonal and whole tiles", B=1, H=1, S=256, D=16, causal=True),
)
# fmt: on

CAUSAL, LONG = ({"B": 16384 // S, "H": 16, "S": S, "D": 128, "causal": True} for S in (4096, 16384))

# The answers: lse is final. So P of a block is right at once. delta is a sum over O as it was rounded to 16 bits.
# PyTorch's own backward rounds P instead.
LESSON = Lesson(
    about=About(
        teaches="a softmax's gradient from one number a row; dQ, whose owner is a block of queries",
        hours=0.75,
        operator="attention, dQ alone",
        pictures=("backward_sweeps",),
    ),
    problem=PROBLEM_BACKWARD,
    reference=reference_queries,
    rungs=(masked, skipped, backward_queries),
    predicted=(
        Prediction(rung=masked, at={"B": 4, "H": 32, "S": 4096, "D": 64, "causal": False}, tflop_per_s=(412, 790)),
        Prediction(rung=skipped, at=CAUSAL, times=1.94, over=masked),
        Prediction(rung=backward_queries, at=LONG, tflop_per_s=(542, 790)),
    ),
    work=_work,
    checks=CHECKS,
    benches=tuple(shape for shape in PROBLEM_BACKWARD.benches if not shape.get("H_kv")),
    wrong=WRONG,
    refuses=(
        *PROBLEM_BACKWARD.refuses,
        Refusal(
            "a window",
            lambda f: f(*inputs_backward(1, 1, 128, 16, causal=True, window=9)),
            Unsupported,
            "course_ops.attention",
        ),
        Refusal("an odd length", lambda f: f(*inputs_backward(1, 1, 100, 16)), Unsupported, "S a multiple of 128"),
    ),
    claims={
        masked: ("masked_kernel: wgmma",),
        backward_queries: ("backward_queries_kernel: wgmma", "backward_queries_kernel: tma"),
    },
    # Parts of S D elements: O and dO for delta. Then Q, dO and dq, and K and V twice each or 1.5 times. A row's two
    # values, written and read, are 4 / 32 of a part each.
    passes={masked: (5 + 4 + 3 / 8) / 6.25, skipped: (5 + 3 + 3 / 8) / 6.25, backward_queries: (5 + 3 + 3 / 8) / 6.25},
    properties=(same_each_time, one_key_one_answer),
    peers={},
)

if __name__ == "__main__":
    LESSON.main()
