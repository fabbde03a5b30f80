"""Attention of few queries to many keys, in portable Triton: decoding, bound by reading K and V once.

Query heads that share K and V are rows of one tile. An owner is a (batch, K head) pair. The blocks of keys of all
owners stand in one row. Each program takes an equal share of the row, wherever owners end (Flash-Decoding: Dao, Haziza,
Massa and Sizov 2023; Stream-K: Osama et al. 2023). An owner with keys in several shares has a partial result of each,
with its lse; merge_kernel adds them up. Programs, shares and parts of one owner:

    blocks     0 0 0 0 0 0 0 1 1 1 1 1 1 1 2 2 2 2 2 2 2     owners 0 to 2 of 7 blocks
    programs   0 0 0 0 0 1 1 1 1 1 2 2 2 2 2 3 3 3 3 3 4     5 blocks a share: owner 1 has parts of programs 1 and 2
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from course_ops._common import (
    architecture,
    fitting_stages,
    fp32_precision,
    num_sms,
    roomy,
    starts_early,
    tma_takes,
)
from course_ops.kernels.attention_tiles import (
    LN2,
    LOG2E,
    LOWEST,
    capped,
    empty_results,
    load_tile,
    online_softmax,
    score_scales,
    tile_descriptors,
    tile_width,
    tile_widths,
)

MAX_ROWS = 64  # query heads of a K head, times queries
TILE_BYTES = 2**14  # of K, and of V, a step: 64 keys with D = 128 in 16 bits
AHEAD = 2  # steps of K and V on the way while one is computed, where shared memory holds them


@triton.jit
def epilogue(acc, l, m, o_ptrs, lse_ptrs, inside, live):
    """Write o, and lse by the natural logarithm; zeros and -inf where no key was seen."""
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


@triton.jit
def store_part(
    acc, l, m, parts_ptr, part_lse_ptr, program, owner, ROWS: tl.constexpr, USED: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """Write what a program has of an owner's rows. Parts are numbered by program + owner: from one part to the next,
    one of the two grows, or both."""
    used = tl.arange(0, ROWS) < USED
    line = tl.cast(program + owner, tl.int64) * USED + tl.arange(0, ROWS)
    part_ptrs = parts_ptr + line[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    epilogue(acc, l, m, part_ptrs, part_lse_ptr + line, used[:, None], used)


@triton.jit
def decode_kernel(
    q_ptr, k, v, o_ptr, lse_ptr, lengths_ptr,  # q, o [B, H, S_q, D or D_v], k, v [B, H_kv, S_k, D or D_v]; [B] or None
    parts_ptr, part_lse_ptr,  # [parts, USED, BLOCK_V], [parts, USED] fp32
    q_strides, k_strides, v_strides, o_strides, scale_log2, cap_scale, H, S_q, S_k, D, D_v, group,
    owners, blocks, share,  # cap_scale: None without a softcap; D_v: None if it is D
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, TMA: tl.constexpr, EARLY_MERGE: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, USED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    if D_v is None:
        D_v = D
    if EARLY_MERGE:
        gdc_launch_dependents()
    program = tl.program_id(0)
    first, end = program * share, tl.minimum(program * share + share, owners * blocks)
    for owner in tl.range(first // blocks, (end - 1) // blocks + 1, num_stages=1):
        b, h_kv = owner // (H // GROUP), owner % (H // GROUP) * GROUP // group
        q_ptrs, _, inside, _ = owner_rows(q_ptr, lse_ptr, q_strides, owner, H, S_q, D, GROUP, ROWS, BLOCK_D)
        q = tl.load(q_ptrs, mask=inside, other=0.0)
        length = tl.load(lengths_ptr + b) if RAGGED else S_k
        last = length + tl.arange(0, ROWS) // GROUP - S_q if CAUSAL else length - 1 + tl.zeros([ROWS], tl.int32)
        begin, stop = tl.maximum(first - owner * blocks, 0), tl.minimum(end - owner * blocks, blocks)
        acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
        m = tl.full([ROWS], LOWEST, tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        for start in range(begin * BLOCK_N, tl.minimum(length, stop * BLOCK_N), BLOCK_N):
            keys = load_tile(k, k_strides, b, h_kv, start, length, D, BLOCK_N, BLOCK_D, TMA)
            s = capped(tl.dot(q, keys.T, input_precision=PRECISION), cap_scale)
            s = tl.where(start + tl.arange(0, BLOCK_N)[None, :] <= last[:, None], s, -float("inf"))
            p, m, alpha = online_softmax(s, m, scale_log2)
            values = load_tile(v, v_strides, b, h_kv, start, length, D_v, BLOCK_N, BLOCK_V, TMA)
            if TMA and RAGGED:  # TMA knows where the cache ends, not where a sequence does; 0 times NaN is NaN
                values = tl.where(start + tl.arange(0, BLOCK_N)[:, None] < length, values, 0.0)
            acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision=PRECISION)
            l = l * alpha + tl.sum(p, axis=1)
        if stop - begin == blocks:  # all keys: nothing to merge
            epilogue(acc, l, m, *owner_rows(o_ptr, lse_ptr, o_strides, owner, H, S_q, D_v, GROUP, ROWS, BLOCK_V))
        else:
            store_part(acc, l, m, parts_ptr, part_lse_ptr, program, owner, ROWS, USED, BLOCK_V)


@triton.jit
def merge_parts(
    parts_ptr, part_lse_ptr, place, first, parts, row,
    USED: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Write a row of an owner, from its parts first to first + parts - 1. place: as owner_rows gives it."""
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    m = tl.full([1], LOWEST, tl.float32)
    l = tl.zeros([1], tl.float32)
    for start in range(0, parts, AT_ONCE):  # in this order every time: deterministic
        part = start + tl.arange(0, AT_ONCE)
        line = (first + part).to(tl.int64) * USED + row
        # .cg reads from L2, where all SMs meet: where a program began early, an L1 line could be older.
        lse = tl.load(part_lse_ptr + line, mask=part < parts, other=-float("inf"), cache_modifier=".cg") * LOG2E
        o_ptrs = parts_ptr + line[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
        o = tl.load(o_ptrs, mask=(part < parts)[:, None], other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(lse, axis=0))  # an empty part has lse = -inf and weighs nothing
        alpha, weight = tl.exp2(m - m_new), tl.exp2(lse - m_new)
        acc = acc * alpha[:, None] + tl.sum(o * weight[:, None], axis=0)[None, :]
        l, m = l * alpha + tl.sum(weight, axis=0), m_new
    epilogue(acc, l, m, *place)


@triton.jit
def merge_kernel(
    parts_ptr, part_lse_ptr, o_ptr, lse_ptr, o_strides, H, S_q, D, blocks, share,
    EARLY: tl.constexpr, GROUP: tl.constexpr, USED: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A program a row. It loads up to AT_ONCE parts together, so that it waits for memory once, not once a part."""
    owner, row = tl.program_id(0) // (GROUP * S_q), tl.program_id(0) % (GROUP * S_q)
    writer = owner * blocks // share  # the first program that has keys of this owner
    parts = ((owner + 1) * blocks - 1) // share - writer + 1
    place = owner_rows(o_ptr, lse_ptr, o_strides, owner, H, S_q, D, GROUP, 1, BLOCK_D, row)
    if EARLY:
        gdc_wait()
    if parts > 1:
        merge_parts(parts_ptr, part_lse_ptr, place, writer + owner, parts, row, USED, BLOCK_D, AT_ONCE)


def attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    lengths: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """q [B, H, S_q, D], k [B, H_kv, S_k, D], v [B, H_kv, S_k, D_v] -> o [B, H, S_q, D_v], lse [B, H, S_q] in fp32.

    fp32, fp16 or bf16, any strides. H / H_kv * S_q is at most most_rows of q, D and D_v at most 256.

    - lengths: [B] int32, how many keys of each sequence are in use, or None for all.
    - causal: the last query stands at the last key in use.

    Deterministic: parts are merged in their order.
    """
    (B, H, S_q, D), (_, H_kv, S_k, D_v) = q.shape, v.shape
    group = H // H_kv
    o, lse = empty_results(q, D_v)
    if not o.numel():
        return o, lse
    used, (block_d, block_v) = triton.next_power_of_2(group * S_q), tile_widths(k, v)
    owners = B * H // group
    # One program an SM, with steps of 128 keys, has as many bytes in flight as two with 64, and half as many parts. But
    # at the end of an owner it has none in flight, so where programs have several owners there are two.
    programs_per_sm = 1 if owners <= num_sms(q.device) and roomy(q.device) else 2
    block_n = min(128, 2 * TILE_BYTES // (programs_per_sm * q.element_size() * max(block_d, block_v)))
    blocks = max(1, triton.cdiv(S_k, block_n))
    share = share_of(owners, blocks, programs_per_sm * num_sms(q.device))
    programs = triton.cdiv(owners * blocks, share)
    parts, part_lse = (torch.empty(programs + owners, used, *n, device=q.device) for n in ((block_v,), ()))
    tma = q.element_size() == 2 and architecture(q.device) >= 90 and tma_takes(k, v)
    early = starts_early(q.device)
    decode_kernel[(programs,)](
        q, *tile_descriptors((k, v), ((block_n, block_d), (block_n, block_v)), tma), o, lse, lengths, parts, part_lse,
        q.stride(), k.stride(), v.stride(), o.stride(), *score_scales(scale, softcap), H, S_q, S_k, D,
        None if D_v == D else D_v, group, owners, blocks, share, causal, lengths is not None, tma, early, group,
        max(16, used), used, block_n, block_d, block_v, fp32_precision(), num_warps=4,
        num_stages=1 + steps_ahead(q, max(16, used), block_n, block_d, block_v),
    )  # fmt: skip
    if share % blocks:
        most = min(blocks // share + 2, blocks, 16384 // block_v)
        merge_kernel[(owners * group * S_q,)](
            parts, part_lse, o, lse, o.stride(), H, S_q, D_v, blocks, share,
            early, group, used, block_v, triton.next_power_of_2(most), num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return o, lse


def most_rows(q: Tensor) -> int:
    """Query heads of a K head, times queries, of a tile: fewer if wide rows would leave no room for K and V."""
    fitting = 2 * TILE_BYTES // (tile_width(q.shape[-1]) * q.element_size())
    return MAX_ROWS if roomy(q.device) else min(MAX_ROWS, fitting)


def steps_ahead(q: Tensor, rows: int, block_n: int, block_d: int, block_v: int) -> int:
    """Steps of K and V that fit beside Q's tile and its probabilities, AHEAD at most."""
    step, beside = block_n * (block_d + block_v), rows * (block_d + block_n)
    return fitting_stages(AHEAD, step * q.element_size(), q.device, beside * q.element_size())


def share_of(owners: int, blocks: int, programs: int) -> int:
    """Blocks per program: equal shares, or up to 1/16 more if owners then end where programs do, so fewer parts."""
    least = triton.cdiv(owners * blocks, programs)
    return next((n for n in range(least, least + least // 16 + 1) if n % blocks == 0 or blocks % n == 0), least)
