"""Naive attention: an S x S matrix through HBM, fused away step by step
=====================================================================
O = softmax(Q K^T / sqrt(D)) V for each of B H heads; Q, K, V and O are [S, D]. The two matmuls take 4 S^2 D FLOPs a
head on 4 S D elements, so S FLOPs per element. An H200 (800 TFLOP/s, 4.2 TB/s) does 190 FLOPs in the time of one byte,
380 in the time of a 16-bit element. So arithmetic decides from about S = 400 on. But between the matmuls stand S x S
scores and S x S weights, each S / D times as large as Q. A kernel that works on them reads S^2 elements and writes S^2.
The HBM traffic of each rung, an arrow for each S^2 elements:

    attention_steps                  attention_fused_softmax            attention_recomputed

    kernel         HBM               kernel               HBM           kernel                    HBM
    [ Q K^T   ] ===> S x S           [ Q K^T         ] ===> S x S       [ Q K^T, max and sum ] ---> lse
    [ scale   ] <=== S x S           [ scale, mask,  ] <=== S x S       [ Q K^T, exp, P V    ] <--- lse
    [         ] ===> S x S           [       softmax ] ===> S x S       [                    ] ---> O
    [ mask    ] <=== S x S           [ P V           ] <=== S x S
    [         ] ===> S x S           [               ] ---> O
    [ softmax ] <=== S x S
    [         ] ===> S x S           ===>  S^2 elements
    [ P V     ] <=== S x S           --->  S or S D elements
    [         ] ---> O

The budget of a head with a mask, S = 4096, D = 128, in bf16:

    rung                         passes over S^2    bytes      at 4.2 TB/s    its matmuls take
    attention_steps              8                  268 MB     64 us          11 us
    attention_fused_softmax      4                  134 MB     32 us          11 us
    attention_recomputed         0                  some MB    0              16 us

Memory grows like S^2 too. With 16 heads a matrix is 0.5 GB at S = 4096 and 8.6 GB at 16384 (lesson 2).

The report's peer torch.compile is fast without a mask, since Inductor recognises these lines of PyTorch as attention
and calls a fused kernel. With this mask they match none of its patterns, and it writes the matrix.

You will learn: where attention's time and memory go, what fusion saves, and when recomputing is cheaper.
Run it:    python3 course.py run lesson01_attention
Check it:  python3 course.py check lesson01_attention
Time it:   python3 course.py bench lesson01_attention
"""

import math

from lessonkit import About, Lesson, Mutant, Prediction, expect, stepwise

import torch
import triton
import triton.language as tl

from problems.attention_plain import PROBLEM, precision


# Rung 1. A kernel for each line of PyTorch. A program of scores_kernel computes a tile of scores from BLOCK_M queries
# and BLOCK_N keys. It needs no loop: a sum of D terms is one tl.dot.
@triton.jit
def scores_kernel(
    q_ptr, k_ptr, s_ptr,  # [BH, S, D], [BH, S, D], [BH, S, S]
    S, D, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(S, BLOCK_N)
    tiles = tl.cdiv(S, BLOCK_M) * tiles_n
    head = (tl.program_id(0) // tiles).to(tl.int64)  # int64: BH * S * S passes 2^31 at 8 heads of 16384
    rows = tl.program_id(0) % tiles // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    keys = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    q = load_rows(q_ptr + head * S * D, rows, S, D, BLOCK_D)
    k = load_rows(k_ptr + head * S * D, keys, S, D, BLOCK_D)
    s = tl.dot(q, k.T, input_precision=PRECISION)
    inside = (rows[:, None] < S) & (keys[None, :] < S)
    tl.store(s_ptr + head * S * S + rows[:, None].to(tl.int64) * S + keys[None, :], s, mask=inside)


@triton.jit
def load_rows(ptr, rows, S, D, BLOCK_D: tl.constexpr):
    """Rows of a [S, D] matrix, D padded to BLOCK_D; zeros outside, which add nothing to a dot product."""
    cols = tl.arange(0, BLOCK_D)
    return tl.load(ptr + rows[:, None] * D + cols[None, :], mask=(rows[:, None] < S) & (cols[None, :] < D), other=0.0)


@triton.jit
def elementwise_kernel(s_ptr, scale, S, STEP: tl.constexpr, BLOCK: tl.constexpr):  # s: [BH * S, S], in place
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, S, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        s = tl.load(s_ptr + row * S + cols, mask=cols < S)
        s = tl.where(cols > row % S, -float("inf"), s) if STEP == "mask" else s * scale
        tl.store(s_ptr + row * S + cols, s, mask=cols < S)


@triton.jit
def softmax_kernel(s_ptr, scale, S, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):  # s: [BH * S, S], in place
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    s = tl.load(s_ptr + row * S + cols, mask=cols < S, other=-float("inf")).to(tl.float32) * scale
    if CAUSAL:
        s = tl.where(cols > row % S, -float("inf"), s)
    p = tl.exp(s - tl.max(s, axis=0))  # no row is empty: a query sees itself
    tl.store(s_ptr + row * S + cols, p / tl.sum(p, axis=0), mask=cols < S)


@triton.jit
def weighted_sum_kernel(
    p_ptr, v_ptr, o_ptr,  # [BH, S, S], [BH, S, D], [BH, S, D]
    S, D, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S, BLOCK_M)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, S, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = (rows[:, None] < S) & (keys[None, :] < S)
        p_ptrs = p_ptr + head * S * S + rows[:, None].to(tl.int64) * S + keys[None, :]
        p = tl.load(p_ptrs, mask=inside, other=0.0)
        acc = tl.dot(p, load_rows(v_ptr + head * S * D, keys, S, D, BLOCK_D), acc, input_precision=PRECISION)
    store_rows(o_ptr + head * S * D, acc, rows, S, D, BLOCK_D)


@triton.jit
def store_rows(ptr, x, rows, S, D, BLOCK_D: tl.constexpr):
    cols = tl.arange(0, BLOCK_D)
    tl.store(ptr + rows[:, None] * D + cols[None, :], x, mask=(rows[:, None] < S) & (cols[None, :] < D))


@stepwise
def attention_steps(q, k, v, causal=False, fused=False):
    """q, k, v [B, H, S, D] contiguous -> o [B, H, S, D]; B H S S elements of scratch. D at most 256."""
    o, (B, H, S, D), blocks = _prepare(q, k, v)
    if o.numel():
        s = q.new_empty(B, H, S, S)
        scores_kernel[(B * H * triton.cdiv(S, 64) ** 2,)](q, k, s, S, D, *blocks)
        scale, block = 1 / math.sqrt(D), triton.next_power_of_2(S)
        for step in () if fused else ("scale", "mask")[: 1 + causal]:
            elementwise_kernel[(B * H * S,)](s, scale, S, step, BLOCK=1024)
        scale = scale if fused else 1.0
        softmax_kernel[(B * H * S,)](s, scale, S, causal and fused, block, num_warps=max(1, min(16, block // 512)))
        weighted_sum_kernel[(B * H * triton.cdiv(S, 64),)](s, v, o, S, D, *blocks)
    return o


# Rung 2. New: the softmax kernel scales and masks the row while it has it in registers. Predicted: with a mask 4 passes
# over S^2 instead of 8, so half of the time; without one 4 instead of 6, so two thirds. Both hold as long as the passes
# take longer than the matmuls.
@stepwise  # the check expects one rounding for each step: scores and weights pass through memory in q's dtype
def attention_fused_softmax(q, k, v, causal=False):
    """As attention_steps, in three kernels: matmul, softmax with scale and mask, matmul."""
    return attention_steps(q, k, v, causal, fused=True)


# Rung 3. New: no S x S matrix. A softmax needs two values per row, its maximum m and its sum l of exp(score - m). One
# value holds both: the logsumexp, lse = m + log(l), since exp(score - lse) is the weight. The first kernel computes the
# scores for lse alone. The second one computes them again, turns them into weights, and multiplies by V. Predicted:
# 6 S^2 D FLOPs instead of 4, and no S^2 bytes. At S = 4096, D = 128 that is 16 us of matmuls a head, instead of 11 us
# of matmuls and 32 us of traffic. (Each 64 queries read all keys, but from L2.) Lesson 3 computes the scores only once.
@triton.jit
def logsumexp_kernel(
    q_ptr, k_ptr, lse_ptr,  # [BH, S, D], [BH, S, D], [BH, S] in fp32
    scale, S, D, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S, BLOCK_M)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr + head * S * D, rows, S, D, BLOCK_D)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, S, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        s = masked_scores(q, k_ptr + head * S * D, rows, keys, scale, S, D, CAUSAL, BLOCK_D, PRECISION)
        m_new = tl.maximum(m, tl.max(s, axis=1))  # finite from the first block on: key 0 is visible to every query
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(s - m_new[:, None]), axis=1)
        m = m_new
    tl.store(lse_ptr + head * S + rows, m + tl.log(total), mask=rows < S)


@triton.jit
def masked_scores(
    q, k_ptr, rows, keys, scale, S, D, CAUSAL: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr
):
    s = tl.dot(q, load_rows(k_ptr, keys, S, D, BLOCK_D).T, input_precision=PRECISION) * scale
    seen = keys[None, :] < S
    if CAUSAL:
        seen = seen & (keys[None, :] <= rows[:, None])
    return tl.where(seen, s, -float("inf"))


@triton.jit
def recompute_kernel(
    q_ptr, k_ptr, v_ptr, lse_ptr, o_ptr, scale, S, D, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S, BLOCK_M)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr + head * S * D, rows, S, D, BLOCK_D)
    lse = tl.load(lse_ptr + head * S + rows, mask=rows < S, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, S, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        s = masked_scores(q, k_ptr + head * S * D, rows, keys, scale, S, D, CAUSAL, BLOCK_D, PRECISION)
        p = tl.exp(s - lse[:, None]).to(q.dtype)
        acc = tl.dot(p, load_rows(v_ptr + head * S * D, keys, S, D, BLOCK_D), acc, input_precision=PRECISION)
    store_rows(o_ptr + head * S * D, acc, rows, S, D, BLOCK_D)


def attention_recomputed(q, k, v, causal=False):
    """As attention_steps; B H S elements of scratch, in fp32."""
    o, (B, H, S, D), blocks = _prepare(q, k, v)
    if o.numel():
        lse = torch.empty(B, H, S, device=q.device)
        grid = (B * H * triton.cdiv(S, 64),)
        logsumexp_kernel[grid](q, k, lse, 1 / math.sqrt(D), S, D, causal, *blocks)
        recompute_kernel[grid](q, k, v, lse, o, 1 / math.sqrt(D), S, D, causal, *blocks)
    return o


def _prepare(q, k, v):
    """The output, the shape, and the tile: 64 queries, 64 keys, D padded to what tl.dot takes."""
    expect(q=q, k=k, v=v, ndim=4, same_shape=True, same_dtype=True, contiguous=True)
    if not 0 < q.shape[-1] <= 256:
        raise ValueError(f"q has D = {q.shape[-1]}, expected 1 to 256: a row of a head is one tile wide")
    return torch.empty_like(q), q.shape, (64, 64, max(16, triton.next_power_of_2(q.shape[-1])), precision())


LONG = {"B": 4, "H": 16, "S": 4096, "D": 128, "causal": False}

LESSON = Lesson(
    about=About(
        teaches="naive attention counted in passes over S x S; fusing the softmax; no matrix at all, for a "
        "third matmul",
        hours=1,
        star=True,
        operator="attention",
        pictures=("traffic",),
    ),
    problem=PROBLEM,
    rungs=(attention_steps, attention_fused_softmax, attention_recomputed),
    predicted=(
        Prediction(
            rung=attention_steps, at=LONG, ms=3.07,  # 6 passes over 33.5 MB per head, 64 heads, at 4.2 TB/s
            why="The two kernels with matmuls do not overlap their traffic with the 11 us of matmuls: 48 + 11 us a "
            "head instead of 48, and 3.8 ms in all.",
        ),
        Prediction(rung=attention_fused_softmax, at=LONG, times=1.5, over=attention_steps),
        Prediction(
            rung=attention_recomputed, at=LONG, ms=1.03,  # 6 S^2 D FLOPs a head at 800 TFLOP/s
            why="It counts matmuls alone. Two exponentials a score add 9 us a head, at 16 a cycle and SM, and about 15 "
            "other instructions a score 8 us: 33 us in all, 2.1 ms. Lesson 4 counts them.",
        ),
    ),
    wrong=(
        Mutant("a query does not see itself", "elementwise_kernel", "cols > row % S", "cols >= row % S",
               "attention_steps", "nan"),
        Mutant("padding counts as a score of 0", "softmax_kernel", 'other=-float("inf")', "other=0.0",
               "attention_fused_softmax"),
        Mutant("scaled by D", "attention_steps", "1 / math.sqrt(D)", "1 / D", "attention_fused_softmax"),
        Mutant("keys past the end count", "masked_scores", "keys[None, :] < S", "keys[None, :] >= 0",
               "attention_recomputed"),
        Mutant("the sum is not rescaled", "logsumexp_kernel", "total * tl.exp(m - m_new)", "total",
               "attention_recomputed"),
        Mutant("rows past the end are read", "load_rows", "(rows[:, None] < S) & ", "", "attention_recomputed",
               "out of bounds"),
    ),
    claims={attention_recomputed: ("wgmma", "16-byte loads", "no spills")},
    passes={attention_steps: 8 + 1.75, attention_fused_softmax: 4 + 1.75, attention_recomputed: 2.28},
    passes_why="At S = 4 D a pass over the S x S matrix moves as much as Q, K, V and O together. The first matmul "
    "reads Q and K twice (+1), the second V twice (+0.5), and O is written (+0.25). The last rung reads K again.",
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
