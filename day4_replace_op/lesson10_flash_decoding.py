"""Flash decoding: one query, a long cache, and all of the GPU's memory bandwidth
==============================================================================
A model that writes asks, for each new token, one query of all keys so far. That is 4 S D FLOPs a head for 4 S D bytes
of K and V in bf16: one FLOP a byte where an H200 could do 190. So the floor is bytes: K and V read once at copy speed.
16 sequences of 8192 tokens with 8 heads of K and V, D = 128: 537 MB, 0.13 ms at 4.2 TB/s, whatever the query heads do.

Lesson 5 has a program for each query head, which walks over all keys: heads that share K and V read them once each,
and for one sequence with 32 heads 32 of 132 SMs work. Here heads that share are rows of one tile, and the keys are
shared out (Dao, Haziza, Massa and Sizov, "Flash-Decoding", 2023). A part leaves O and lse in fp32, 4 (D + 1) bytes a
row, written and read: with 512 keys and 4 rows a part, 1.6% of its K and V.

Merging is exact: parts (o_i, lse_i) make lse = log(sum exp(lse_i)) and o = sum exp(lse_i - lse) o_i, as in lesson 12.

You will learn: to count where FLOPs do not matter, heads as rows, sharing out a reduction, the last one tidies up.
Run it:    python day4_replace_op/lesson10_flash_decoding.py
Check it:  python -m lessonkit check lesson10_flash_decoding
Time it:   python -m lessonkit bench lesson10_flash_decoding
"""

import functools
import math

from lessonkit import About, Lesson, Mutant, Unsupported, num_sms

import torch
import triton
import triton.language as tl

from course_ops import attention_forward
from problems.attention import precision
from problems.attention_decode import LAST, PROBLEM, WORK, expect_cache, inputs

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
# Where a maximum starts. Not -inf: as long as a row has seen no key, -inf - -inf would make it NaN for good.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
BLOCK_N = 64  # keys a step: with D = 128 K and V of a step are 32 KB, of which two programs an SM keep four on the way


@triton.jit
def load_tile(source, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    """Rows from `row` on of a head of a [B, H, S, D] tensor; zeros past S and D, which add nothing to a product."""
    if TMA:
        return source.load([b, h, row, 0]).reshape(ROWS, BLOCK_D)
    else:
        ptrs, inside = tile_ptrs(source, strides, b, h, row, S, D, ROWS, BLOCK_D)
        return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def tile_ptrs(base, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    rows, cols = row + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    # int64 before each stride: any of these may pass 2^31
    head = base + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    ptrs = head + rows.to(tl.int64) * strides[2] + cols.to(tl.int64) * strides[3]
    return ptrs, (rows < S) & (cols < D)


@triton.jit
def finish(acc, total, m, o_ptrs, lse_ptrs, inside, live):
    """o, and lse by the natural logarithm; zeros and -inf where nothing was seen."""
    empty = total == 0
    factor = 1 / tl.where(empty, 1.0, total)  # a division a row, not one a number
    tl.store(o_ptrs, (acc * factor[:, None]).to(o_ptrs.dtype.element_ty), mask=inside)
    tl.store(lse_ptrs, tl.where(empty, -float("inf"), (m + tl.log2(total)) * LN2), mask=live)


@triton.jit
def merge_parts(parts_ptr, part_lse_ptr, owner, splits, used, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    m = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for part in range(splits):  # in this order every time: deterministic
        line = (owner.to(tl.int64) * splits + part) * ROWS + rows
        # .cg reads from L2, where all SMs meet: an L1 line could be older.
        lse = tl.load(part_lse_ptr + line, mask=rows < used, other=-float("inf"), cache_modifier=".cg") * LOG2E
        ptrs = parts_ptr + line[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
        o = tl.load(ptrs, mask=rows[:, None] < used, other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, lse)  # of an empty part lse is -inf, and it weighs nothing
        old, new = tl.exp2(m - m_new), tl.exp2(lse - m_new)
        acc, total, m = acc * old[:, None] + o * new[:, None], total * old + new, m_new
    return acc, total, m


@triton.jit
def rows_of(
    o_ptr, lse_ptr, o_strides, owner, H, S_q, D,
    TOGETHER: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, row=0,
):  # fmt: skip
    """Where ROWS rows of an owner, from `row` on, lie: r is query r // TOGETHER of the r % TOGETHER-th of its heads."""
    b, first = owner // (H // TOGETHER), owner % (H // TOGETHER) * TOGETHER
    rows, cols = row + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    h, i = first + rows % TOGETHER, rows // TOGETHER
    line = tl.cast(b, tl.int64) * o_strides[0] + h.to(tl.int64) * o_strides[1] + i.to(tl.int64) * o_strides[2]
    live = i < S_q
    ptrs = o_ptr + line[:, None] + cols[None, :].to(tl.int64) * o_strides[3]
    return ptrs, lse_ptr + (tl.cast(b, tl.int64) * H + h) * S_q + i, live[:, None] & (cols[None, :] < D), live


@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, lengths_ptr,  # q, o [B, H, S_q, D], k, v [B, H_kv, S_k, D]; [B], or S_k of all
    parts_ptr, part_lse_ptr, count_ptr,  # [programs, ROWS, BLOCK_D], [programs, ROWS] fp32; [owners], 0 between calls
    q_strides, k_strides, v_strides, o_strides, scale_log2, H, S_q, S_k, D, GROUP, splits, steps,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, ONE_LAUNCH: tl.constexpr, SPLIT: tl.constexpr, TOGETHER: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    owner, part = tl.program_id(0) // splits, tl.program_id(0) % splits
    b, h_kv = owner // (H // TOGETHER), owner % (H // TOGETHER) * TOGETHER // GROUP
    q_ptrs, _, inside, _ = rows_of(q_ptr, lse_ptr, q_strides, owner, H, S_q, D, TOGETHER, ROWS, BLOCK_D)
    q = tl.load(q_ptrs, mask=inside, other=0.0)
    length = tl.load(lengths_ptr + b) if RAGGED else S_k
    last = length + tl.arange(0, ROWS) // TOGETHER - S_q if CAUSAL else length - 1 + tl.zeros([ROWS], tl.int32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    m = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(part * steps * BLOCK_N, tl.minimum(length, (part + 1) * steps * BLOCK_N), BLOCK_N):
        k = load_tile(k_ptr, k_strides, b, h_kv, start, length, D, BLOCK_N, BLOCK_D, False)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tl.where(start + tl.arange(0, BLOCK_N)[None, :] <= last[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
        p = tl.exp2(s * scale_log2 - m_new[:, None])
        old = tl.exp2(m - m_new)
        v = load_tile(v_ptr, v_strides, b, h_kv, start, length, D, BLOCK_N, BLOCK_D, False)
        acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
        total = total * old + tl.sum(p, axis=1)
        m = m_new
    o_ptrs, lse_ptrs, inside, live = rows_of(o_ptr, lse_ptr, o_strides, owner, H, S_q, D, TOGETHER, ROWS, BLOCK_D)
    if SPLIT:
        line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        part_ptrs = parts_ptr + line[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
        finish(acc, total, m, part_ptrs, part_lse_ptr + line, live[:, None], live)
        if ONE_LAUNCH:
            tl.debug_barrier()  # one thread counts: the others' stores must be done
            # Release: a part is there before it is counted. Acquire: whoever counts last sees every part.
            if tl.atomic_add(count_ptr + owner, 1, sem="acq_rel", scope="gpu") == splits - 1:
                acc, total, m = merge_parts(parts_ptr, part_lse_ptr, owner, splits, TOGETHER * S_q, ROWS, BLOCK_D)
                finish(acc, total, m, o_ptrs, lse_ptrs, inside, live)
                tl.store(count_ptr + owner, 0)  # ready for the next call
    else:
        finish(acc, total, m, o_ptrs, lse_ptrs, inside, live)


@triton.jit
def merge_kernel(
    parts_ptr, part_lse_ptr, o_ptr, lse_ptr, o_strides, H, S_q, D, splits,
    TOGETHER: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    owner = tl.program_id(0)
    o_ptrs, lse_ptrs, inside, live = rows_of(o_ptr, lse_ptr, o_strides, owner, H, S_q, D, TOGETHER, ROWS, BLOCK_D)
    acc, total, m = merge_parts(parts_ptr, part_lse_ptr, owner, splits, TOGETHER * S_q, ROWS, BLOCK_D)
    finish(acc, total, m, o_ptrs, lse_ptrs, inside, live)


# Rung 1. A program a query head and all its keys, one row of a tile of 16 in use. Predicted, for one sequence of 8192
# keys with 32 heads: 32 programs on 132 SMs, and each of 8 heads of K and V asked for 4 times.
def a_head(q, k, v, lengths=None, causal=True, scale=None):
    """q [B, H, S_q, D], k and v [B, H_kv, S_k, D], any strides; lengths [B] int32: keys in use, or None for all.
    -> o as q, lse [B, H, S_q] in fp32. causal: the last query stands at the last key in use."""
    return _run(q, k, v, lengths, causal, scale, packed=False)


# Rung 2. New: the heads that share K and V are rows of one tile; a tensor core's tile has 16 rows anyway. Predicted: K
# and V are asked for once; but there are 4 times fewer programs, so a short batch gets slower, a long one faster.
def packed(q, k, v, lengths=None, causal=True, scale=None):
    """As a_head; a group of heads times S_q may have 64 rows."""
    return _run(q, k, v, lengths, causal, scale)


# Rung 3. New: keys shared out, so that any batch fills the GPU; a second kernel merges. Predicted: copy speed, less the
# second launch, from some MB of K and V on.
def split(q, k, v, lengths=None, causal=True, scale=None):
    """As packed; B H splits (D + 1) numbers of scratch in fp32."""
    return _run(q, k, v, lengths, causal, scale, splitting=True)


# Rung 4. New: whoever finishes a head's last part merges them all, and no second launch is waited for. Predicted: some
# 3 us less, which is what 12 MB of K and V take. More rows than a tile go to lesson 5: they are no decoding.
def flash_decode(q, k, v, lengths=None, causal=True, scale=None):
    """As a_head, for any S_q. Deterministic: parts are merged in their order, not in that of their ends."""
    if q.ndim == 4 and k.ndim == 4 and lengths is None and q.shape[1] * q.shape[2] > 64 * max(1, k.shape[1]):
        return attention_forward(q, k, v, causal=causal, scale=scale)
    return _run(q, k, v, lengths, causal, scale, splitting=True, one_launch=True)


def _run(q, k, v, lengths, causal, scale, packed=True, splitting=False, one_launch=False, splits=None):
    scale = expect_cache(q, k, v, lengths, causal, scale)
    (B, H, S_q, D), (_, H_kv, S_k, _) = q.shape, k.shape
    together = H // H_kv if packed else 1
    if together * S_q > 64:
        raise Unsupported("more than 64 rows for one head of K and V: for lesson 5, a sequence each if lengths differ")
    o, lse = torch.empty_like(q), torch.empty(B, H, S_q, device=q.device)
    if not o.numel():
        return o, lse
    rows, block_d = max(16, triton.next_power_of_2(together * S_q)), max(16, triton.next_power_of_2(D))
    owners, blocks = B * H // together, max(1, triton.cdiv(S_k, BLOCK_N))
    steps = triton.cdiv(blocks, splits or (_splits(owners, blocks) if splitting else 1))
    splits, parts, part_lse, count = triton.cdiv(blocks, steps), None, None, None
    if splits > 1:
        parts, part_lse = (torch.empty(owners * splits, rows, *n, device=q.device) for n in ((block_d,), ()))
    if splits > 1 and one_launch:
        stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
        count = counters(q.device, stream, triton.next_power_of_2(owners))
    sizes = {"TOGETHER": together, "ROWS": rows, "BLOCK_D": block_d}
    decode_kernel[(owners * splits,)](
        q, k, v, o, lse, lengths, parts, part_lse, count, q.stride(), k.stride(), v.stride(), o.stride(),
        scale * LOG2E.value, H, S_q, S_k, D, H // H_kv, splits, steps,
        causal, lengths is not None, one_launch, splits > 1, **sizes,
        BLOCK_N=BLOCK_N, PRECISION=precision(), num_warps=4, num_stages=3 if q.element_size() * block_d <= 256 else 2,
    )  # fmt: skip
    if splits > 1 and not one_launch:
        merge_kernel[(owners,)](parts, part_lse, o, lse, o.stride(), H, S_q, D, splits, **sizes)
    return o, lse


def _splits(owners, blocks):
    """Parts of a head's keys: as few steps for the slowest SM, of two programs, as may be; 1.5 are a part's ends."""
    rounds = {n: math.ceil(owners * n / (2 * num_sms())) for n in range(1, min(blocks, 128) + 1)}
    return min(rounds, key=lambda n: rounds[n] * (math.ceil(blocks / n) + 1.5))


@functools.cache
def counters(device, stream, size):  # calls on one stream run one after another, on two they would share counts
    return torch.zeros(size, dtype=torch.int32, device=device)


def splits_change_nothing(rung):
    """One part or many: the same answer, up to rounding; and the same bits each time."""
    q, k, v, *_ = inputs(2, 4, 333, 16, H_kv=2, S=3)
    args = q, k, v, None, True, None
    for splits in (1, 2, 6):
        torch.testing.assert_close(_run(*args, splitting=True, splits=splits), rung(*args), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(rung(*args), rung(*args), strict=True))


# fmt: off
WRONG = (
    Mutant("old parts are not rescaled", "merge_parts", "acc * old[:, None] +", "acc +", "split"),
    Mutant("parts count alike", "merge_parts", "tl.exp2(lse - m_new)", "tl.exp2(m_new - m_new)", "flash_decode"),
    Mutant("keys past the length count", "decode_kernel", "length - 1 + tl.zeros", "S_k - 1 + tl.zeros", "packed"),
    Mutant("a step too few", "decode_kernel", "* steps * BLOCK_N)", "* steps * BLOCK_N - BLOCK_N)", "split"),
    Mutant("the counter stays", "decode_kernel", "tl.store(count_ptr + owner, 0)", "pass", "flash_decode", "nan"),
    Mutant("every query sees all keys", "flash_decode", "causal, scale, split", "False, scale, split", "flash_decode"),
)
# fmt: on


def _passes(reads, splits):
    """K and V so many times, Q, O and lse once, and of each part 33 numbers for each of four rows, there and back."""
    least = WORK(**LAST, dtype=torch.float16).bytes
    return (least + (reads - 1) * 2 * 512 * 32 * 2 + (splits > 1) * splits * 2 * 4 * 33 * 4) / least


LESSON = Lesson(
    about=About(
        teaches="one query, a long cache: bytes decide; heads as rows, keys shared out, the last program merges",
        hours=0.75,
        operator="decoding",
    ),
    problem=PROBLEM,
    rungs=(a_head, packed, split, flash_decode),
    wrong=WRONG,
    claims={flash_decode: ("decode_kernel: mma", "decode_kernel: 16-byte loads", "decode_kernel: no spills")},
    passes={a_head: _passes(4, 1), packed: _passes(1, 1), split: _passes(1, 8), flash_decode: _passes(1, 8)},
    properties=(splits_change_nothing,),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
