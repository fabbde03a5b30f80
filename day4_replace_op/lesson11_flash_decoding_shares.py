"""Flash decoding, second half: equal shares of all keys, parts merged together, TMA
=================================================================================
Lesson 10 gives each head's keys to so many programs that SMs get nearly equal numbers of steps. Where heads are enough
that it does not split them, programs come in waves: 512 on 396 places (three programs an SM) are one wave and a third
of one, in which an SM has a program or none. Here a grid that is there at once, one or two programs an SM, takes equal
shares of one row of blocks, all heads' keys one after the other, wherever heads end (Stream-K, Osama et al. 2023, and
lesson 3 of day 3): a share may end within a head, and then its parts are merged.

One sequence of 8192 with 8 heads is 33.5 MB, 8 us of bytes, with a launch and the first answers 15. Lesson 10 takes 33:
whoever ends last merges 33 parts one after the other, and each is an answer from L2, 600 cycles. That is 10 us in which
131 SMs have nothing to do. A second kernel is another launch; but it can have a program for each row.

You will learn: a reduction in equal shares, to number parts, to count waits, TMA and NaN.
Run it:    python day4_replace_op/lesson11_flash_decoding_shares.py
Check it:  python -m lessonkit check lesson11_flash_decoding_shares
Time it:   python -m lessonkit bench lesson11_flash_decoding_shares
"""

import math

from lessonkit import About, Lesson, Mutant, Unsupported, case, device, num_sms, shared_memory, tma_takes

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from course_ops import attention_forward
from problems.attention import precision
from problems.attention_decode import LAST, PROBLEM, WORK, expect_cache, inputs

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
# Where a maximum starts. Not -inf: as long as a row has seen no key, -inf - -inf would make it NaN for good.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
TILE = 2**14  # bytes of K, and of V, a step: 64 keys with D = 128 in 16 bits


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
def shares_kernel(
    q_ptr, k, v, o_ptr, lse_ptr, lengths_ptr,  # q, o [B, H, S_q, D], k, v [B, H_kv, S_k, D]; [B], or S_k of all
    parts_ptr, part_lse_ptr,  # [parts, USED, BLOCK_D], [parts, USED] fp32
    q_strides, k_strides, v_strides, o_strides, scale_log2, H, S_q, S_k, D, GROUP, owners, blocks, share,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, TMA: tl.constexpr, EARLY: tl.constexpr, TOGETHER: tl.constexpr,
    ROWS: tl.constexpr, USED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    program = tl.program_id(0)
    first, end = program * share, tl.minimum(program * share + share, owners * blocks)
    for owner in tl.range(first // blocks, (end - 1) // blocks + 1, num_stages=1):
        b, h_kv = owner // (H // TOGETHER), owner % (H // TOGETHER) * TOGETHER // GROUP
        q_ptrs, _, inside, _ = rows_of(q_ptr, lse_ptr, q_strides, owner, H, S_q, D, TOGETHER, ROWS, BLOCK_D)
        q = tl.load(q_ptrs, mask=inside, other=0.0)
        length = tl.load(lengths_ptr + b) if RAGGED else S_k
        last = length + tl.arange(0, ROWS) // TOGETHER - S_q if CAUSAL else length - 1 + tl.zeros([ROWS], tl.int32)
        begin, stop = tl.maximum(first - owner * blocks, 0), tl.minimum(end - owner * blocks, blocks)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        m = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for start in range(begin * BLOCK_N, tl.minimum(length, stop * BLOCK_N), BLOCK_N):
            keys = load_tile(k, k_strides, b, h_kv, start, length, D, BLOCK_N, BLOCK_D, TMA)
            s = tl.dot(q, keys.T, input_precision=PRECISION)
            s = tl.where(start + tl.arange(0, BLOCK_N)[None, :] <= last[:, None], s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
            p = tl.exp2(s * scale_log2 - m_new[:, None])
            old = tl.exp2(m - m_new)
            values = load_tile(v, v_strides, b, h_kv, start, length, D, BLOCK_N, BLOCK_D, TMA)
            if TMA and RAGGED:  # TMA knows where the cache ends, not where a sequence does; 0 times NaN is NaN
                values = tl.where(start + tl.arange(0, BLOCK_N)[:, None] < length, values, 0.0)
            acc = tl.dot(p.to(values.dtype), values, acc * old[:, None], input_precision=PRECISION)
            total = total * old + tl.sum(p, axis=1)
            m = m_new
        if stop - begin == blocks:  # all keys: nothing to merge
            finish(acc, total, m, *rows_of(o_ptr, lse_ptr, o_strides, owner, H, S_q, D, TOGETHER, ROWS, BLOCK_D))
        else:
            used = tl.arange(0, ROWS) < USED
            # Parts are numbered by program + owner: from one to the next one of the two grows, or both do.
            line = tl.cast(program + owner, tl.int64) * USED + tl.arange(0, ROWS)
            part_ptrs = parts_ptr + line[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
            finish(acc, total, m, part_ptrs, part_lse_ptr + line, used[:, None], used)


# A program a row. All its parts at a time, up to AT_ONCE: whoever merges waits once, not once a part.
@triton.jit
def merge_rows_kernel(
    parts_ptr, part_lse_ptr, o_ptr, lse_ptr, o_strides, H, S_q, D, blocks, share,
    EARLY: tl.constexpr, TOGETHER: tl.constexpr, USED: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    owner, row = tl.program_id(0) // (TOGETHER * S_q), tl.program_id(0) % (TOGETHER * S_q)
    writer = owner * blocks // share  # the first program that has keys of this owner
    parts = ((owner + 1) * blocks - 1) // share - writer + 1
    place = rows_of(o_ptr, lse_ptr, o_strides, owner, H, S_q, D, TOGETHER, 1, BLOCK_D, row)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    m = tl.full([1], LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    if EARLY:
        gdc_wait()
    if parts > 1:
        for start in range(0, parts, AT_ONCE):  # in this order every time: deterministic
            part = start + tl.arange(0, AT_ONCE)
            line = (writer + owner + part).to(tl.int64) * USED + row
            # .cg reads from L2, where all SMs meet: where a program began early, an L1 line could be older.
            lse = tl.load(part_lse_ptr + line, mask=part < parts, other=-float("inf"), cache_modifier=".cg") * LOG2E
            o_ptrs = parts_ptr + line[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
            o = tl.load(o_ptrs, mask=(part < parts)[:, None], other=0.0, cache_modifier=".cg")
            m_new = tl.maximum(m, tl.max(lse, axis=0))  # of an empty part lse is -inf, and it weighs nothing
            old, new = tl.exp2(m - m_new), tl.exp2(lse - m_new)
            acc = acc * old[:, None] + tl.sum(o * new[:, None], axis=0)[None, :]
            total, m = total * old + tl.sum(new, axis=0), m_new
        finish(acc, total, m, *place)


# Rung 5. New: equal shares, and merging in a second kernel, a row a program, which asks for all its parts at once.
# Predicted: copy speed where lesson 10 has a wave and a bit of heads that it does not split, of 512 heads 10% or more;
# of one sequence of 8192 10 us for merging become a launch and two answers, 3 us.
# Tried instead: the last one merges, 64 KB of parts at a time. With 4 rows a head that gained 4 of 28 us; with 32 rows
# it took 57 us for 38, for it is still one SM.
def shares(q, k, v, lengths=None, causal=True, scale=None):
    """As lesson 10's flash_decode; a group of heads times S_q may have 64 rows. A part in fp32 for each program and
    each head of K and V. Deterministic: parts are merged in their order, not in that of their ends."""
    return _run(q, k, v, lengths, causal, scale)


# Rung 6. New: TMA, for 16 bits and strides that it takes: one thread asks for a tile, and 128 keys are 361 instructions
# a warp instead of 651. Predicted: some percent; bytes decide. Measured: 2 to 3% at D = 64, else 1% or nothing.
def tma(q, k, v, lengths=None, causal=True, scale=None):
    """As shares."""
    return _run(q, k, v, lengths, causal, scale, tma=True)


# Rung 7. New: programmatic dependent launch. Whoever merges is started while the first kernel works, fills what room it
# leaves, and waits for its end. Predicted: the 1 to 2 us from one kernel's end to another's begin. (Behind rung 5's
# kernel it gains nothing; why has not been found out.)
def decode(q, k, v, lengths=None, causal=True, scale=None):
    """As shares, for any S_q: more rows than a tile has are no decoding, but attention."""
    if q.ndim == k.ndim == 4 and q.shape[1] * q.shape[2] > 64 * max(1, k.shape[1]):
        if lengths is not None:
            raise Unsupported("more than 64 rows for one head of K and V: pass a sequence at a time")
        return attention_forward(q, k, v, causal=causal, scale=scale)
    return _run(q, k, v, lengths, causal, scale, tma=True, early=device.architecture() >= 90)


# One program an SM with steps of 128 keys has as many bytes on their way as two with 64, and half as many parts and
# ends. But while it ends a head nothing is on its way, so where programs have several heads there are two.
def _run(q, k, v, lengths, causal, scale, tma=False, early=False, programs=None):
    scale = expect_cache(q, k, v, lengths, causal, scale)
    (B, H, S_q, D), (_, H_kv, S_k, _) = q.shape, k.shape
    group = H // H_kv
    if group * S_q > 64:
        raise Unsupported("more than 64 rows for one head of K and V: lesson 10 takes those")
    o, lse = torch.empty_like(q), torch.empty(B, H, S_q, device=q.device)
    if not o.numel():
        return o, lse
    used, block_d = triton.next_power_of_2(group * S_q), max(16, triton.next_power_of_2(D))
    owners = B * H // group
    each = 1 if owners <= num_sms() and shared_memory() > 9 * TILE else 2  # programs an SM
    block_n = min(128, 2 * TILE // (each * q.element_size() * block_d))
    blocks = max(1, triton.cdiv(S_k, block_n))
    share = _share(owners, blocks, programs or each * num_sms())
    programs = triton.cdiv(owners * blocks, share)
    parts, part_lse = (torch.empty(programs + owners, used, *n, device=q.device) for n in ((block_d,), ()))
    tma = tma and q.element_size() == 2 and device.architecture() >= 90 and tma_takes(k, v)
    early = early and not device.INTERPRETED
    shares_kernel[(programs,)](
        q, *_tiled((k, v), (block_n, block_n), tma), o, lse, lengths, parts, part_lse,
        q.stride(), k.stride(), v.stride(), o.stride(), scale * LOG2E.value, H, S_q, S_k, D, group,
        owners, blocks, share, causal, lengths is not None, tma, early, group, max(16, used), used,
        block_n, block_d, precision(), num_warps=4, num_stages=3,
    )  # fmt: skip
    if share % blocks:
        most = min(blocks // share + 2, blocks, 16384 // block_d)
        merge_rows_kernel[(owners * group * S_q,)](
            parts, part_lse, o, lse, o.stride(), H, S_q, D, blocks, share,
            early, group, used, block_d, triton.next_power_of_2(most), num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return o, lse


def _tiled(tensors, rows, tma):
    """Descriptors of [B, H, S, D] tensors for tiles of so many rows each, or the tensors."""
    if not tma:
        return tensors
    block_d = max(16, triton.next_power_of_2(tensors[0].shape[-1]))
    return [TensorDescriptor.from_tensor(t, [1, 1, n, block_d]) for t, n in zip(tensors, rows, strict=True)]


def _share(owners, blocks, programs):
    """Blocks a program: equal shares, or up to 1/16 more if then heads end where programs do, and parts are fewer."""
    least = triton.cdiv(owners * blocks, programs)
    return next((n for n in range(least, least + least // 16 + 1) if n % blocks == 0 or blocks % n == 0), least)


def shares_change_nothing(rung):
    """Any shares: the same answer, up to rounding; and the same bits each time."""
    q, k, v, *_ = inputs(2, 4, 333, 16, H_kv=2, S=3)
    args = q, k, v, None, True, None
    for programs in (4, 6, 12):  # of 4 heads with 3 blocks each: a head, 2 blocks, a block
        torch.testing.assert_close(_run(*args, programs=programs), rung(*args), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(rung(*args), rung(*args), strict=True))


# Of the last check, each of four parts has 33 numbers for each of four rows, written and read.
MOVED = 1 + 2 * 4 * 4 * 33 * 4 / WORK(**LAST, dtype=torch.float16).bytes

LESSON = Lesson(
    about=About(
        teaches="equal shares of all heads' keys; a row a program to merge; TMA, and NaN past a sequence's end",
        hours=0.5,
        operator="decoding",
    ),
    problem=PROBLEM,
    rungs=(shares, tma, decode),
    checks=(
        case("shares of 2 blocks, heads of 3: parts of one and of two heads", B=4, H=8, S_k=257, D=24, H_kv=1),
        *PROBLEM.checks,
    ),
    wrong=(
        Mutant("nobody merges", "merge_rows_kernel", "parts > 1", "parts > 99", "shares", "nan"),
        Mutant("parts count alike", "merge_rows_kernel", "tl.exp2(lse - m_new)", "(lse > -1e30).to(tl.float32)",
               "shares"),
        Mutant("all parts but the first", "merge_rows_kernel", "tl.arange(0, AT_ONCE)", "1 + tl.arange(0, AT_ONCE)",
               "decode"),
        Mutant("a share ends a block early", "shares_kernel", "* share + share,", "* share + share - 1,",
               "shares", "nan"),
        Mutant("two parts, one number", "shares_kernel", "tl.cast(program + owner,", "tl.cast(program,",
               "shares", "nan"),
        Mutant("values past the length weigh 0", "shares_kernel", "if TMA and RAGGED", "if False", "decode", "nan"),
    ),
    claims={shares: ("shares_kernel: mma", "shares_kernel: 16-byte loads", "no spills"),
        decode: ("shares_kernel: mma", "shares_kernel: tma", "no spills")},
    passes=dict.fromkeys((shares, tma, decode), MOVED),
    properties=(shares_change_nothing,),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
