"""Rung 5: equal shares of all heads' keys, and a second kernel that merges, a program per row."""

import math

from lessonkit import Unsupported, device, num_sms

import torch
import triton
import triton.language as tl

from problems.attention import precision
from problems.attention_decode import expect_cache

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
# Where a maximum starts. Not -inf: as long as a row has seen no key, -inf - -inf would make it NaN for good.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
TILE_BYTES = 2**14  # of K, and of V, a step: 64 keys with D = 128 in 16 bits


@triton.jit
def load_tile(base, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """ROWS rows of a head of a [B, H, S, D] tensor; zeros past S and D, which add nothing to a matmul."""
    rows, cols = row + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    # int64 before each stride: any of these may pass 2^31
    head = base + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    ptrs = head + rows.to(tl.int64) * strides[2] + cols.to(tl.int64) * strides[3]
    return tl.load(ptrs, mask=(rows < S) & (cols < D), other=0.0)


@triton.jit
def epilogue(acc, l, m, o_ptrs, lse_ptrs, inside, live):
    """Write o, and lse by the natural logarithm; zeros and -inf where a row has seen no key."""
    empty = l == 0
    factor = 1 / tl.where(empty, 1.0, l)  # a division a row, not one an element
    tl.store(o_ptrs, (acc * factor[:, None]).to(o_ptrs.dtype.element_ty), mask=inside)
    tl.store(lse_ptrs, tl.where(empty, -float("inf"), (m + tl.log2(l)) * LN2), mask=live)


@triton.jit
def owner_rows(
    o_ptr, lse_ptr, o_strides, owner, H, S_q, D,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, row=0,
):  # fmt: skip
    """Pointers to ROWS rows of an owner from `row` on: row r is query r // GROUP of the (r % GROUP)-th of its heads."""
    b, first = owner // (H // GROUP), owner % (H // GROUP) * GROUP
    rows, cols = row + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    h, i = first + rows % GROUP, rows // GROUP
    line = tl.cast(b, tl.int64) * o_strides[0] + h.to(tl.int64) * o_strides[1] + i.to(tl.int64) * o_strides[2]
    live = i < S_q
    ptrs = o_ptr + line[:, None] + cols[None, :].to(tl.int64) * o_strides[3]
    return ptrs, lse_ptr + (tl.cast(b, tl.int64) * H + h) * S_q + i, live[:, None] & (cols[None, :] < D), live


# A program owns `share` blocks of the row of all owners' blocks. An owner is a head of K and V of a sequence.
@triton.jit
def shares_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,  # q, o [B, H, S_q, D], k, v [B, H_kv, S_k, D], lse [B, H, S_q]
    lengths_ptr,  # [B]: keys in use, if RAGGED; else S_k of all
    parts_ptr, part_lse_ptr,  # [parts, USED, BLOCK_D], [parts, USED] fp32
    q_strides, k_strides, v_strides, o_strides, scale_log2, H, S_q, S_k, D, group, owners, blocks, share,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, USED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first, end = program * share, tl.minimum(program * share + share, owners * blocks)
    for owner in tl.range(first // blocks, (end - 1) // blocks + 1, num_stages=1):
        b, h_kv = owner // (H // GROUP), owner % (H // GROUP) * GROUP // group
        q_ptrs, _, inside, _ = owner_rows(q_ptr, lse_ptr, q_strides, owner, H, S_q, D, GROUP, ROWS, BLOCK_D)
        q = tl.load(q_ptrs, mask=inside, other=0.0)
        length = tl.load(lengths_ptr + b) if RAGGED else S_k
        last = length + tl.arange(0, ROWS) // GROUP - S_q if CAUSAL else length - 1 + tl.zeros([ROWS], tl.int32)
        begin, stop = tl.maximum(first - owner * blocks, 0), tl.minimum(end - owner * blocks, blocks)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        m = tl.full([ROWS], LOWEST, tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        for start in range(begin * BLOCK_N, tl.minimum(length, stop * BLOCK_N), BLOCK_N):
            k = load_tile(k_ptr, k_strides, b, h_kv, start, length, D, BLOCK_N, BLOCK_D)
            s = tl.dot(q, k.T, input_precision=PRECISION)
            s = tl.where(start + tl.arange(0, BLOCK_N)[None, :] <= last[:, None], s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
            p = tl.exp2(s * scale_log2 - m_new[:, None])
            alpha = tl.exp2(m - m_new)
            v = load_tile(v_ptr, v_strides, b, h_kv, start, length, D, BLOCK_N, BLOCK_D)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
            l = l * alpha + tl.sum(p, axis=1)
            m = m_new
        if stop - begin == blocks:  # all keys: nothing to merge
            epilogue(acc, l, m, *owner_rows(o_ptr, lse_ptr, o_strides, owner, H, S_q, D, GROUP, ROWS, BLOCK_D))
        else:
            used = tl.arange(0, ROWS) < USED
            # Parts are numbered by program + owner: from one part to the next, one of the two grows, or both.
            line = tl.cast(program + owner, tl.int64) * USED + tl.arange(0, ROWS)
            part_ptrs = parts_ptr + line[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
            epilogue(acc, l, m, part_ptrs, part_lse_ptr + line, used[:, None], used)


# A program owns a row. It loads up to AT_ONCE parts together, so that it waits for L2 once, and not once a part.
@triton.jit
def merge_rows_kernel(
    parts_ptr, part_lse_ptr, o_ptr, lse_ptr, o_strides, H, S_q, D, blocks, share,
    GROUP: tl.constexpr, USED: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    owner, row = tl.program_id(0) // (GROUP * S_q), tl.program_id(0) % (GROUP * S_q)
    writer = owner * blocks // share  # the first program that has keys of this owner
    parts = ((owner + 1) * blocks - 1) // share - writer + 1
    place = owner_rows(o_ptr, lse_ptr, o_strides, owner, H, S_q, D, GROUP, 1, BLOCK_D, row)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    m = tl.full([1], LOWEST, tl.float32)
    l = tl.zeros([1], tl.float32)
    if parts > 1:
        for start in range(0, parts, AT_ONCE):  # in this order every time: deterministic
            part = start + tl.arange(0, AT_ONCE)
            line = (writer + owner + part).to(tl.int64) * USED + row
            # Each line is read once: .cg keeps it out of L1.
            lse = tl.load(part_lse_ptr + line, mask=part < parts, other=-float("inf"), cache_modifier=".cg") * LOG2E
            o_ptrs = parts_ptr + line[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
            o = tl.load(o_ptrs, mask=(part < parts)[:, None], other=0.0, cache_modifier=".cg")
            m_new = tl.maximum(m, tl.max(lse, axis=0))  # an empty part has lse = -inf and weighs nothing
            alpha, weight = tl.exp2(m - m_new), tl.exp2(lse - m_new)
            acc = acc * alpha[:, None] + tl.sum(o * weight[:, None], axis=0)[None, :]
            l, m = l * alpha + tl.sum(weight, axis=0), m_new
        epilogue(acc, l, m, *place)


def shares(q, k, v, lengths=None, causal=True, scale=None, programs=None):
    """Attention of a few queries to a cache: o as q, and lse [B, H, S_q] in fp32.

    - q [B, H, S_q, D], k and v [B, H_kv, S_k, D]: any strides. A group of heads times S_q may have 64 rows.
    - lengths: [B] int32, how many keys of each sequence are in use, or None for all.
    - causal: the last query stands at the last key in use.
    - programs: how many. None stands for as many as run at once.

    Deterministic: parts are merged in their order.
    """
    scale = expect_cache(q, k, v, lengths, causal, scale)
    (B, H, S_q, D), (_, H_kv, S_k, _) = q.shape, k.shape
    group = H // H_kv
    if group * S_q > 64:
        raise Unsupported("more than 64 rows for one head of K and V: course_ops.attention takes those")
    o, lse = torch.empty_like(q), torch.empty(B, H, S_q, device=q.device)
    if not o.numel():
        return o, lse
    owners, used, block_d = B * H_kv, triton.next_power_of_2(group * S_q), max(16, triton.next_power_of_2(D))
    block_n, blocks, share, programs = _shares(owners, S_k, block_d * q.element_size(), programs)
    parts, part_lse = (torch.empty(programs + owners, used, *n, device=q.device) for n in ((block_d,), ()))
    shares_kernel[(programs,)](
        q, k, v, o, lse, lengths, parts, part_lse,
        q.stride(), k.stride(), v.stride(), o.stride(), scale * LOG2E.value, H, S_q, S_k, D, group,
        owners, blocks, share, causal, lengths is not None, group, max(16, used), used,
        block_n, block_d, precision(), num_warps=4, num_stages=3,
    )  # fmt: skip
    if share % blocks:
        most = min(blocks // share + 2, blocks, 16384 // block_d)
        merge_rows_kernel[(owners * group * S_q,)](
            parts, part_lse, o, lse, o.stride(), H, S_q, D, blocks, share,
            group, used, block_d, triton.next_power_of_2(most), num_warps=4,
        )  # fmt: skip
    return o, lse


# One program per SM with steps of 128 keys has as many bytes in flight as two with 64, and half as many parts and ends.
# But at the end of a head it has none in flight, so where programs have several heads there are two.
def _shares(owners, S_k, row_bytes, programs):
    """Keys of a block, blocks of an owner, blocks of a program, and programs. Shares are equal, or up to 1/16 more if
    then owners end where programs do, and parts are fewer."""
    programs_per_sm = 1 if owners <= num_sms() and device.roomy() else 2
    block_n = min(128, 2 * TILE_BYTES // (programs_per_sm * row_bytes))
    blocks = max(1, triton.cdiv(S_k, block_n))
    least = triton.cdiv(owners * blocks, programs or programs_per_sm * num_sms())
    share = next((n for n in range(least, least + least // 16 + 1) if n % blocks == 0 or blocks % n == 0), least)
    return block_n, blocks, share, triton.cdiv(owners * blocks, share)
