"""Flash decoding: one query, a long cache, and all of the GPU's memory bandwidth
==============================================================================
A model that writes text asks, for each new token, one query of all keys so far. You will be able to say why such a
kernel has to be measured in TB/s, and to spread a reduction over all SMs. You need lesson 5: online softmax, and lse.

Budget, of a head of K and V in bf16, with S keys: 4 S D bytes, and 4 S D FLOPs for each query head that shares it. That
is one FLOP per byte and query head, where an H200 can do 190 FLOPs per byte. So the floor is bytes: K and V read once.

    B = 16, 8 heads of K and V, S = 8192, D = 128      537 MB    0.13 ms at 4.2 TB/s, for 8 or 32 query heads
    B = 1, the same                                     34 MB    0.008 ms; with a launch and the latency of the
                                                                 first loads 0.015, with a second launch 0.018

Lesson 5 has a program for each query head, which visits all keys. Query heads that share K and V read them once each,
and for one sequence with 32 heads 32 of 132 SMs work. Flash-Decoding (Dao, Haziza, Massa and Sizov 2023) changes both:

    rows of a tile        h0 h1 h2 h3 | 12 empty rows    the 4 query heads that share a K head, one query each: a tensor
                                                         core's tile has 16 rows anyway
    keys of one K head    |  part 0   |  part 1   |  part 2   |  part 3   |    a program each, on any SM
                                |           |           |           |
    partial results        o_0, lse_0  o_1, lse_1  o_2, lse_2  o_3, lse_3      fp32, 4 (D + 1) bytes per row
                                |           |           |           |
                                +-----------+-----+-----+-----------+
                                                  |
    merge                  lse = log(sum exp(lse_i)),  o = sum exp(lse_i - lse) o_i

Merging is exact, as in lesson 12. With parts of 512 keys and 4 rows, partial results written and read are 1.6% of K
and V. Of the report's peers, FA4 does not split keys on Hopper, so with one sequence it uses few SMs.

Refused: lengths of single sequences (lesson 11), other head sizes, strides, more than 64 rows (course_ops.attention).
Before you read on: why do 4 query heads cost no more than one? Which barrier and which memory ordering stand before the
merge in `flash_decode`? Why is its result the same each time, although the program that merges is not?

Run it:    python3 course.py run lesson10_flash_decoding
Check it:  python3 course.py check lesson10_flash_decoding
Time it:   python3 course.py bench lesson10_flash_decoding
"""

import functools
import math

from lessonkit import About, Lesson, Mutant, Prediction, Refusal, Unsupported, case, num_sms

import torch
import triton
import triton.language as tl

from problems.attention import precision
from problems.attention_decode import LAST, PROBLEM, WORK, expect_cache, inputs

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
# Where a maximum starts. Not -inf: as long as a row has seen no key, -inf - -inf would make it NaN for good.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
KEYS = 64  # a step: with D = 128 its K and V are 32 KB, and two programs an SM have four such steps in flight


@triton.jit
def epilogue(acc, l, m, o_ptrs, lse_ptrs, live):
    """Write o, and lse by the natural logarithm; zeros and -inf where a row has seen no key."""
    empty = l == 0
    factor = 1 / tl.where(empty, 1.0, l)  # a division a row, not one an element
    tl.store(o_ptrs, (acc * factor[:, None]).to(o_ptrs.dtype.element_ty), mask=live[:, None])
    tl.store(lse_ptrs, tl.where(empty, -float("inf"), (m + tl.log2(l)) * LN2), mask=live)


# Rung 1. A program owns a query head: one row of 16 is in use, and each of the GROUP heads that share K and V loads
# them. Predicted: a quarter of copy speed for groups of 4.
@triton.jit
def a_head_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,  # q, o [B H, S_q, D], k, v [B H_kv, S_k, D], lse [B H, S_q] in fp32
    scale_log2, S_q, S_k, GROUP,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    line, live = head * S_q + rows, rows < S_q
    q = tl.load(q_ptr + line[:, None] * D + cols, mask=live[:, None], other=0.0)
    last = S_k - S_q + rows if CAUSAL else S_k - 1 + rows * 0  # the last key that each row sees
    acc = tl.zeros([ROWS, D], tl.float32)
    m = tl.full([ROWS], LOWEST, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for start in range(0, S_k, KEYS):
        keys = start + tl.arange(0, KEYS)
        tile = (head // GROUP * S_k + keys)[:, None] * D + cols
        k = tl.load(k_ptr + tile, mask=keys[:, None] < S_k, other=0.0)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tl.where(keys[None, :] <= last[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
        p = tl.exp2(s * scale_log2 - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        v = tl.load(v_ptr + tile, mask=keys[:, None] < S_k, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        l = l * alpha + tl.sum(p, axis=1)
        m = m_new
    epilogue(acc, l, m, o_ptr + line[:, None] * D + cols, lse_ptr + line, live)


def a_head(q, k, v, lengths=None, causal=True, scale=None):
    """q [B, H, S_q, D], k and v [B, H_kv, S_k, D] -> o as q, lse [B, H, S_q] in fp32. lengths: None. causal: the last
    query stands at the last key."""
    scale_log2 = _expect_plain(q, k, v, lengths, causal, scale) * LOG2E.value
    (B, H, S_q, D), (H_kv, S_k) = q.shape, k.shape[1:3]
    o, lse = torch.empty_like(q), torch.empty(B, H, S_q, device=q.device)
    rows = max(16, triton.next_power_of_2(S_q))
    a_head_kernel[(B * H,)](
        q, k, v, o, lse, scale_log2, S_q, S_k, H // H_kv, causal, rows, KEYS, D, precision(),
        num_warps=4, num_stages=_stages(q),
    )  # fmt: skip
    return o, lse


# Rung 2. The heads that share K and V are rows of one tile, so K and V are loaded once. But there are GROUP times fewer
# programs: a small batch gets slower, and a large one faster. Predicted: copy speed for 16 sequences, 128 programs.
@triton.jit
def packed_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,  # q, o [B H, S_q, D], k, v [B H_kv, S_k, D], lse [B H, S_q] in fp32
    scale_log2, S_q, S_k, USED,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head_kv = tl.program_id(0).to(tl.int64)  # New: the program owns a K head and all rows of its query heads
    rows, cols = tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    line, live = head_kv * USED + rows, rows < USED  # New: USED = GROUP S_q of them, one after another in memory
    q = tl.load(q_ptr + line[:, None] * D + cols, mask=live[:, None], other=0.0)
    last = S_k - S_q + rows % S_q if CAUSAL else S_k - 1 + rows * 0  # New: a row is a head, and one of S_q queries
    acc = tl.zeros([ROWS, D], tl.float32)
    m = tl.full([ROWS], LOWEST, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for start in range(0, S_k, KEYS):
        keys = start + tl.arange(0, KEYS)
        tile = (head_kv * S_k + keys)[:, None] * D + cols  # New
        k = tl.load(k_ptr + tile, mask=keys[:, None] < S_k, other=0.0)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tl.where(keys[None, :] <= last[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
        p = tl.exp2(s * scale_log2 - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        v = tl.load(v_ptr + tile, mask=keys[:, None] < S_k, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        l = l * alpha + tl.sum(p, axis=1)
        m = m_new
    epilogue(acc, l, m, o_ptr + line[:, None] * D + cols, lse_ptr + line, live)


def packed(q, k, v, lengths=None, causal=True, scale=None):
    """As a_head; the rows of a K head, H / H_kv S_q, are at most 64."""
    scale_log2 = _expect_plain(q, k, v, lengths, causal, scale) * LOG2E.value
    (B, H, S_q, D), (H_kv, S_k) = q.shape, k.shape[1:3]
    o, lse = torch.empty_like(q), torch.empty(B, H, S_q, device=q.device)
    used = H // H_kv * S_q
    packed_kernel[(B * H_kv,)](
        q, k, v, o, lse, scale_log2, S_q, S_k, used, causal, max(16, triton.next_power_of_2(used)), KEYS, D,
        precision(), num_warps=4, num_stages=_stages(q),
    )  # fmt: skip
    return o, lse


# Rung 3. The keys of a head are divided into parts, a program each, so that any batch fills the GPU. A second kernel
# merges the partial results. Predicted: copy speed, less the second launch, from some MB of K and V on.
@triton.jit
def split_kernel(
    q_ptr, k_ptr, v_ptr, parts_ptr, part_lse_ptr,  # New: [programs, ROWS, D] and [programs, ROWS] in fp32
    scale_log2, S_q, S_k, USED, splits, steps,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head_kv, part = (tl.program_id(0) // splits).to(tl.int64), tl.program_id(0) % splits  # New
    rows, cols = tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    line, live = head_kv * USED + rows, rows < USED
    q = tl.load(q_ptr + line[:, None] * D + cols, mask=live[:, None], other=0.0)
    last = S_k - S_q + rows % S_q if CAUSAL else S_k - 1 + rows * 0
    acc = tl.zeros([ROWS, D], tl.float32)
    m = tl.full([ROWS], LOWEST, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for start in range(part * steps * KEYS, tl.minimum(S_k, (part + 1) * steps * KEYS), KEYS):  # New: `steps` steps
        keys = start + tl.arange(0, KEYS)
        tile = (head_kv * S_k + keys)[:, None] * D + cols
        k = tl.load(k_ptr + tile, mask=keys[:, None] < S_k, other=0.0)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tl.where(keys[None, :] <= last[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
        p = tl.exp2(s * scale_log2 - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        v = tl.load(v_ptr + tile, mask=keys[:, None] < S_k, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        l = l * alpha + tl.sum(p, axis=1)
        m = m_new
    part_line = tl.program_id(0).to(tl.int64) * ROWS + rows  # New
    epilogue(acc, l, m, parts_ptr + part_line[:, None] * D + cols, part_lse_ptr + part_line, live)


@triton.jit
def merge_parts(parts_ptr, part_lse_ptr, head_kv, splits, USED, ROWS: tl.constexpr, D: tl.constexpr):
    """The parts of a K head added up, always in their order; acc, l and m as at the end of a loop over all keys."""
    rows, cols = tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    acc = tl.zeros([ROWS, D], tl.float32)
    m = tl.full([ROWS], LOWEST, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for part in range(splits):
        line = (head_kv * splits + part) * ROWS + rows
        # Each line is read once: .cg keeps it out of L1.
        lse = tl.load(part_lse_ptr + line, mask=rows < USED, other=-float("inf"), cache_modifier=".cg") * LOG2E
        ptrs = parts_ptr + line[:, None] * D + cols
        o = tl.load(ptrs, mask=rows[:, None] < USED, other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, lse)  # an empty part has lse = -inf and weighs nothing
        alpha, weight = tl.exp2(m - m_new), tl.exp2(lse - m_new)
        acc, l, m = acc * alpha[:, None] + o * weight[:, None], l * alpha + weight, m_new
    return acc, l, m


@triton.jit
def merge_kernel(
    parts_ptr, part_lse_ptr, o_ptr, lse_ptr, splits, USED, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    head_kv = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    line = head_kv * USED + rows
    acc, l, m = merge_parts(parts_ptr, part_lse_ptr, head_kv, splits, USED, ROWS, D)
    epilogue(acc, l, m, o_ptr + line[:, None] * D + cols, lse_ptr + line, rows < USED)


def split(q, k, v, lengths=None, causal=True, scale=None, parts=None):
    """As packed. parts: of a head's keys, or as many as fill the GPU; each takes ROWS (D + 1) fp32 of scratch."""
    scale_log2 = _expect_plain(q, k, v, lengths, causal, scale) * LOG2E.value
    (B, H, S_q, D), (H_kv, S_k) = q.shape, k.shape[1:3]
    o, lse = torch.empty_like(q), torch.empty(B, H, S_q, device=q.device)
    used = H // H_kv * S_q
    rows, (splits, steps) = max(16, triton.next_power_of_2(used)), _splits(B * H_kv, S_k, parts)
    partial, part_lse = (torch.empty(B * H_kv * splits, rows, *n, device=q.device) for n in ((D,), ()))
    split_kernel[(B * H_kv * splits,)](
        q, k, v, partial, part_lse, scale_log2, S_q, S_k, used, splits, steps, causal, rows, KEYS, D, precision(),
        num_warps=4, num_stages=_stages(q),
    )  # fmt: skip
    merge_kernel[(B * H_kv,)](partial, part_lse, o, lse, splits, used, rows, D)
    return o, lse


# Rung 4. The program that finishes the last part of a head merges them all. That saves the second launch, 3 us, in
# which 12 MB of K and V can be read.
@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, parts_ptr, part_lse_ptr,
    count_ptr,  # New: [B H_kv], 0 between calls
    scale_log2, S_q, S_k, USED, splits, steps,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head_kv, part = (tl.program_id(0) // splits).to(tl.int64), tl.program_id(0) % splits
    rows, cols = tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    line, live = head_kv * USED + rows, rows < USED
    q = tl.load(q_ptr + line[:, None] * D + cols, mask=live[:, None], other=0.0)
    last = S_k - S_q + rows % S_q if CAUSAL else S_k - 1 + rows * 0
    acc = tl.zeros([ROWS, D], tl.float32)
    m = tl.full([ROWS], LOWEST, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for start in range(part * steps * KEYS, tl.minimum(S_k, (part + 1) * steps * KEYS), KEYS):
        keys = start + tl.arange(0, KEYS)
        tile = (head_kv * S_k + keys)[:, None] * D + cols
        k = tl.load(k_ptr + tile, mask=keys[:, None] < S_k, other=0.0)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tl.where(keys[None, :] <= last[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
        p = tl.exp2(s * scale_log2 - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        v = tl.load(v_ptr + tile, mask=keys[:, None] < S_k, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        l = l * alpha + tl.sum(p, axis=1)
        m = m_new
    part_line = tl.program_id(0).to(tl.int64) * ROWS + rows
    epilogue(acc, l, m, parts_ptr + part_line[:, None] * D + cols, part_lse_ptr + part_line, live)
    tl.debug_barrier()  # New: one thread counts, so the stores of all others must be done
    # New: release, so that a part is visible before it is counted; acquire, so that the last program sees every part.
    if tl.atomic_add(count_ptr + head_kv, 1, sem="acq_rel", scope="gpu") == splits - 1:
        acc, l, m = merge_parts(parts_ptr, part_lse_ptr, head_kv, splits, USED, ROWS, D)
        epilogue(acc, l, m, o_ptr + line[:, None] * D + cols, lse_ptr + line, live)
        tl.store(count_ptr + head_kv, 0)  # New: ready for the next call


def flash_decode(q, k, v, lengths=None, causal=True, scale=None, parts=None):
    """As split. Deterministic: parts are merged in their order, not in the order in which programs end."""
    scale_log2 = _expect_plain(q, k, v, lengths, causal, scale) * LOG2E.value
    (B, H, S_q, D), (H_kv, S_k) = q.shape, k.shape[1:3]
    o, lse = torch.empty_like(q), torch.empty(B, H, S_q, device=q.device)
    used = H // H_kv * S_q
    rows, (splits, steps) = max(16, triton.next_power_of_2(used)), _splits(B * H_kv, S_k, parts)
    partial, part_lse = (torch.empty(B * H_kv * splits, rows, *n, device=q.device) for n in ((D,), ()))
    stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
    count = counters(q.device, stream, triton.next_power_of_2(B * H_kv))
    decode_kernel[(B * H_kv * splits,)](
        q, k, v, o, lse, partial, part_lse, count, scale_log2, S_q, S_k, used, splits, steps,
        causal, rows, KEYS, D, precision(), num_warps=4, num_stages=_stages(q),
    )  # fmt: skip
    return o, lse


@functools.cache
def counters(device, stream, size):  # calls on one stream run one after another, on two they would share counts
    return torch.zeros(size, dtype=torch.int32, device=device)


def _splits(heads, S_k, parts):
    """Parts of a head's keys, and steps of a part. The slowest SM, with two programs at a time, has as few steps as may
    be; the begin and the end of a part take as long as 1.5 steps."""
    blocks = triton.cdiv(S_k, KEYS)
    rounds = {n: math.ceil(heads * n / (2 * num_sms())) for n in range(1, min(blocks, 128) + 1)}
    steps = triton.cdiv(blocks, parts or min(rounds, key=lambda n: rounds[n] * (math.ceil(blocks / n) + 1.5)))
    return triton.cdiv(blocks, steps), steps


def _stages(q):
    return 3 if q.element_size() * q.shape[-1] <= 256 else 2


def _expect_plain(q, k, v, lengths, causal, scale):
    """The scale; Unsupported for all but the case that the rungs show."""
    scale = expect_cache(q, k, v, lengths, causal, scale)
    (_, H, S_q, D), (_, H_kv, S_k, _) = q.shape, k.shape
    plain = q.numel() and S_k and H // H_kv * S_q <= 64 and D in (16, 32, 64, 128, 256) and lengths is None
    if not plain or not all(t.is_contiguous() for t in (q, k, v)):
        raise Unsupported(
            "for contiguous tensors, D a power of two from 16 to 256, at most 64 rows (query heads of a K head, times "
            "queries), no lengths: lesson 11 takes lengths, course_ops.attention takes the rest"
        )
    return scale


def splits_change_nothing(rung):
    """One part or many: the same answer, up to rounding; and the same bits each time."""
    q, k, v, *_ = inputs(2, 4, 333, 16, H_kv=2, S=3)
    for parts in (1, 2, 6):
        torch.testing.assert_close(split(q, k, v, parts=parts), rung(q, k, v), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(rung(q, k, v), rung(q, k, v), strict=True))


# fmt: off
WRONG = (
    Mutant("old parts are not rescaled", "merge_parts", "acc * alpha[:, None] +", "acc +", "split"),
    Mutant("parts count alike", "merge_parts", "tl.exp2(lse - m_new)", "tl.exp2(m_new - m_new)", "flash_decode"),
    Mutant("keys past the length count", "packed_kernel", "S_k - S_q + rows % S_q", "S_k + rows % S_q", "packed"),
    Mutant("a step too few", "split_kernel", "+ 1) * steps * KEYS)", "+ 1) * steps * KEYS - KEYS)", "split"),
    Mutant("the counter stays", "decode_kernel", "tl.store(count_ptr + head_kv, 0)", "pass", "flash_decode", "nan"),
    Mutant("every query sees all keys", "flash_decode", "causal, rows", "False, rows", "flash_decode"),
    Mutant("each query head has keys of its own", "a_head_kernel", "head // GROUP * S_k", "head * S_k", "a_head",
           "out of bounds"),
    Mutant("the rows of one query only", "packed_kernel", "rows < USED", "rows < S_q", "packed", "nan"),
    Mutant("one part a head", "merge_kernel", "head_kv, splits, USED", "head_kv, 1, USED", "split"),
)
CHECKS = (
    case("one past a step, eight heads on one", B=2, H=8, S_k=65, D=32, H_kv=1),
    case("three queries on a cache: each sees one key more", B=1, H=4, S_k=130, D=16, H_kv=2, S=3),
    case("three queries, two keys: the first sees nothing", B=1, H=4, S_k=2, D=16, H_kv=2, S=3),
    case("three queries that see all keys", B=2, H=4, S_k=140, D=16, H_kv=2, S=3, causal=False),
    case("D = 256, a K and V for each head", B=1, H=2, S_k=70, D=256),
    case("more than 2^31 elements of K", gib=70, B=33, H=8, S_k=65536, D=128),
    case("many parts", gib=0.5, B=3, H=32, S_k=10_007, D=128, H_kv=4),
    case("the bytes are counted here: 8 steps, 8 parts on the interpreter's 4 SMs", **LAST),
)
# fmt: on


def _passes(reads, splits):
    """K and V so many times, Q, O and lse once, and of each part 33 values for each of four rows, written and read."""
    least = WORK(**LAST, dtype=torch.float16).bytes
    return (least + (reads - 1) * 2 * 512 * 32 * 2 + (splits > 1) * splits * 2 * 4 * 33 * 4) / least


SIXTEEN, ONE = ({"B": B, "H": 32, "S_k": 8192, "D": 128, "H_kv": 8, "S": 1} for B in (16, 1))

LESSON = Lesson(
    about=About(
        teaches="one query, a long cache: bytes decide; heads as rows, keys shared out, the last program merges",
        hours=1,
        operator="decoding",
        pictures=("split_kv",),
    ),
    problem=PROBLEM,
    rungs=(a_head, packed, split, flash_decode),
    predicted=(
        Prediction(
            rung=a_head,
            at=SIXTEEN,
            percent_of_limit=25,
            why="2.1 GB in 0.34 ms are 6.3 TB/s, more than HBM has: heads that run side by side find K and V in L2.",
        ),
        *(Prediction(rung=rung, at=SIXTEEN, percent_of_limit=100) for rung in (packed, split, flash_decode)),
        Prediction(
            rung=split,
            at=ONE,
            ms=0.018,
            why="A program of merge_kernel loads its 32 parts one after another. Lesson 11 loads them at once: 22 us.",
        ),
        Prediction(
            rung=flash_decode,
            at=ONE,
            ms=0.015,
            why="As in `split`: the last program of a head waits 32 times for L2, 600 cycles each, which is 11 us.",
        ),
    ),
    checks=CHECKS,
    wrong=WRONG,
    refuses=(
        *PROBLEM.refuses,
        Refusal(
            "lengths of sequences", lambda f: f(*inputs(2, 4, 64, 16, ragged=True)), Unsupported, "lesson 11 takes"
        ),
        Refusal("65 rows", lambda f: f(*inputs(1, 1, 64, 16, S=65)), Unsupported, "course_ops.attention"),
    ),
    claims={flash_decode: ("decode_kernel: mma", "decode_kernel: 16-byte loads", "decode_kernel: no spills")},
    passes={a_head: _passes(4, 1), packed: _passes(1, 1), split: _passes(1, 8), flash_decode: _passes(1, 8)},
    properties=(splits_change_nothing,),
)

if __name__ == "__main__":
    LESSON.main()
