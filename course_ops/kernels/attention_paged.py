"""Decoding from pages of keys and values, in portable Triton: bound by reading the keys in use once.

Query heads that share K and V are rows of one tile, as in attention_decode. An owner is a sequence, a K head and a tile
of rows. Its work is its start and its steps. A step is BLOCK_N keys, from the first key that its window shows to the
last in use. The start stands for an owner's first loads: they take as long as START steps, with nothing else on the
way. Lengths are on the GPU, so the programs divide the work there, and the host waits for nothing. Each program adds up
the work of all sequences, takes an equal share of it, wherever owners end, and finds where its share begins. So
sequences of unequal length keep every SM busy to the end. An owner with steps in several shares has a part in each.

    work       s s 0 0 0 0 0 s s 1 s s 2 2 2 2 2 2 2 2     owners 0 to 2 of 5, 1 and 8 steps, each with its start
    programs   0 0 0 0 0 1 1 1 1 1 2 2 2 2 2 3 3 3 3 3     5 a share: owners 0 and 2 have two parts each
A share that would begin within a start begins where the start does.

Where no table has more than ALONE steps, a program has one owner: all its steps take less time than a second start and
the merge of two parts. No work is divided then, and nothing is merged. Fewer owners than half of the SMs are divided
from half as many steps on, since most SMs would have no work.

The table of pages is read a step ahead, so that the address of a key never waits for it. Pointers load the keys, with a
mask at a sequence's end. TMA is no faster here, and it does not know where a sequence ends.

Sources: Kwon et al. 2023, PagedAttention; Dao, Haziza, Massa and Sizov 2023, Flash-Decoding; Osama et al. 2023,
Stream-K.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from course_ops._common import fp32_precision, num_sms, starts_early
from course_ops.kernels.attention_decode import (
    TILE_BYTES,
    epilogue,
    merge_parts,
    most_rows,
    owner_rows,
    steps_ahead,
    store_part,
)
from course_ops.kernels.attention_tiles import (
    LOWEST,
    capped,
    online_softmax,
    score_scales,
    tile_widths,
)

PROGRAMS_PER_SM = 2  # one loads while the other begins or ends an owner
ALONE = 8  # steps that one program does at least as fast as several, with the merge
START = tl.constexpr(2)  # steps in the time of an owner's first loads: its length, its queries and page, its keys


@triton.jit
def work_of(length, capacity, S_q, window, BLOCK_N: tl.constexpr):
    """(keys in use, the first that some query sees, steps) of a sequence; without a key it has a step of nothing."""
    length = tl.minimum(tl.maximum(length, 0), capacity)
    low = length * 0
    if window is not None:
        low = tl.maximum(length - S_q + 1 - window, 0)
    return length, low, tl.maximum(tl.cdiv(length, BLOCK_N) - low // BLOCK_N, 1)


@triton.jit
def share_of(total, most, B, owners, programs, part_weight):
    """The work of a program: as choose_share has it."""
    least = tl.cdiv(total, programs)
    least = tl.maximum(least, tl.ceil(tl.sqrt(total.to(tl.float32) * part_weight)).to(tl.int32))
    near = least + tl.arange(0, 128)
    even = (near % most == 0) | (most % near == 0)
    even = even & (near <= least + least // 16) & (total == most * B * owners)
    found = tl.min(tl.where(even, near, least + 128), axis=0)
    return tl.where(found < least + 128, found, least)


@triton.jit
def find_share(
    lengths_ptr, capacity, S_q, window, B, owners, programs, program, part_weight,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """(owner, step) where a program's share begins, and where the next one's does.

    All lengths at once: in a loop over them Triton 3.7 loses what it knows of the addresses of K, and 16-byte loads.
    """
    b = tl.arange(0, BLOCK_B)
    _, _, steps = work_of(tl.load(lengths_ptr + b, mask=b < B, other=0), capacity, S_q, window, BLOCK_N)
    work = tl.where(b < B, steps + START, 0)  # of one owner of each sequence
    ends = tl.cumsum(work, axis=0) * owners
    total = tl.sum(work, axis=0) * owners
    share = share_of(total, tl.max(work, axis=0), B, owners, programs, part_weight)
    owner, step = place_of(tl.minimum(program * share, total), work, ends, owners, B)
    next_owner, next_step = place_of(tl.minimum(program * share + share, total), work, ends, owners, B)
    return owner, step, next_owner, next_step


@triton.jit
def place_of(at, work, ends, owners, B):
    """(owner, step) of a place in the row of all work; within a start, and at the end of the row, step is 0."""
    here = (ends - work * owners <= at) & (at < ends)  # the sequence that has it, if there is one
    of_owner = tl.maximum(tl.sum(tl.where(here, work, 0), axis=0), 1)
    within = at - tl.sum(tl.where(here, ends - work * owners, 0), axis=0)
    before = tl.sum(((ends <= at) & (work > 0)).to(tl.int32), axis=0)  # sequences
    unit = tl.where(before < B, within // of_owner, 0)
    return before * owners + unit, tl.where(before < B, tl.maximum(within - unit * of_owner - START, 0), 0)


@triton.jit
def pages_of(table_ptr, b, start, low, length, window, PAGE: tl.constexpr, PAGES: tl.constexpr, BLOCK_N: tl.constexpr):
    """The PAGES pages of a step, each of BLOCK_N // PAGES of its keys; a scalar if there is one."""
    if PAGE is None:  # each sequence has its keys in one piece
        return b
    elif PAGES == 1:
        return tl.load(table_ptr + start // PAGE, mask=start < length, other=0)
    else:
        firsts = start + tl.arange(0, PAGES) * (BLOCK_N // PAGES)
        inside = firsts < length
        if window is not None:
            inside = inside & (firsts + BLOCK_N // PAGES > low)
        return tl.load(table_ptr + firsts // PAGE, mask=inside, other=0)


@triton.jit
def load_keys(
    ptr, strides, pages, h, start, low, length, window, D,
    PAGE: tl.constexpr, PAGES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Keys or values from `start` on of a head; zeros before low and from length on."""
    place, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    first, slots = 0 * start, place  # the first key's slot in its page, and those of all keys from there
    if PAGE is None:
        first = start
    elif PAGES == 1:
        first = start % PAGE
    elif PAGES < BLOCK_N:  # a step begins where a page does
        slots = place % PAGE
    else:
        slots = (start + place) % PAGE
    if PAGE is not None and PAGES > 1:  # keys of one page share its number, so its address is computed once
        pages = pages[:, None].broadcast_to(PAGES, BLOCK_N // PAGES).reshape(BLOCK_N)
    # One comparison an element: a column past D has no keys. Each further term costs an instruction a load.
    inside = place[:, None] < tl.where(cols < D, length - start, 0)[None, :]
    if window is not None:
        inside = inside & (place >= low - start)[:, None]
    # int64 before each stride: any of these may pass 2^31
    lines = pages.to(tl.int64) * strides[0] + tl.cast(first, tl.int64) * strides[2] + slots.to(tl.int64) * strides[2]
    ptrs = ptr + h.to(tl.int64) * strides[1] + lines[:, None] + cols[None, :].to(tl.int64) * strides[3]
    return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def paged_step(
    acc, m, l, q, k_ptr, v_ptr, k_strides, v_strides, pages, h, start, low, length, last, window, num_pages,
    scale_log2, cap_scale, D, D_v, PAGE: tl.constexpr, PAGES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc, m and l with the keys of a step."""
    pages = tl.minimum(pages.to(tl.uint32, bitcast=True), num_pages - 1)  # a wrong entry reads a page that is there
    keys = load_keys(k_ptr, k_strides, pages, h, start, low, length, window, D, PAGE, PAGES, BLOCK_N, BLOCK_D)
    s = capped(tl.dot(q, keys.T, input_precision=PRECISION), cap_scale)
    at = start + tl.arange(0, BLOCK_N)[None, :]
    seen = at <= last[:, None]
    if window is not None:
        seen = seen & (at > last[:, None] - window)
    s = tl.where(seen, s, -float("inf"))
    p, m, alpha = online_softmax(s, m, scale_log2)
    values = load_keys(v_ptr, v_strides, pages, h, start, low, length, window, D_v, PAGE, PAGES, BLOCK_N, BLOCK_V)
    acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m, l * alpha + tl.sum(p, axis=1)


@triton.jit
def paged_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,  # q, o [B, H, S_q, D or D_v]; k, v [pages, H_kv, PAGE, D or D_v]
    lengths_ptr, table_ptr,  # [B], [B, blocks] int32
    spans_ptr, parts_ptr, part_lse_ptr,  # [owners, 2] int32; [parts, USED, BLOCK_V], [parts, USED] fp32; or None
    q_strides, k_strides, v_strides, o_strides, table_stride, scale_log2, cap_scale, window,
    B, H, S_q, D, D_v, num_pages, capacity, tiles, part_weight,  # cap_scale, window, D_v: None where there is none
    CAUSAL: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, EARLY_MERGE: tl.constexpr, DIVIDED: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, USED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    if D_v is None:
        D_v = D
    if EARLY_MERGE:
        gdc_launch_dependents()
    program, owners = tl.program_id(0), H // GROUP * tiles  # owners of a sequence
    owner, step, next_owner, next_step = program, 0, program + 1, 0
    if DIVIDED:
        owner, step, next_owner, next_step = find_share(
            lengths_ptr, capacity, S_q, window, B, owners, tl.num_programs(0), program, part_weight, BLOCK_N, BLOCK_B
        )
    for place in tl.range(owner, tl.where(next_step > 0, next_owner + 1, next_owner), num_stages=1):
        b, unit = place // owners, place % owners
        given = tl.load(lengths_ptr + b)
        length, low, steps = work_of(given, capacity, S_q, window, BLOCK_N)
        begin, stop = tl.where(place == owner, step, 0), tl.where(place == next_owner, next_step, steps)
        head, h, row = b * (H // GROUP) + unit // tiles, unit // tiles, unit % tiles * USED
        q_ptrs, _, inside, _ = owner_rows(q_ptr, lse_ptr, q_strides, head, H, S_q, D, GROUP, ROWS, BLOCK_D, row)
        q = tl.load(q_ptrs, mask=inside, other=0.0)
        last = length - 1 + tl.zeros([ROWS], tl.int32)
        if CAUSAL:
            last = length + (row + tl.arange(0, ROWS)) // GROUP - S_q
        acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
        m = tl.full([ROWS], LOWEST, tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        table = table_ptr + b.to(tl.int64) * table_stride
        first = low // BLOCK_N * BLOCK_N
        start = first + begin * BLOCK_N
        finish = tl.minimum(length, first + stop * BLOCK_N)
        pages = pages_of(table, b, start, low, length, window, PAGE, PAGES, BLOCK_N)
        outside = (pages < 0) | (pages >= num_pages)
        for at in range(start, finish, BLOCK_N):
            ahead = pages_of(table, b, at + BLOCK_N, low, length, window, PAGE, PAGES, BLOCK_N)
            acc, m, l = paged_step(
                acc, m, l, q, k_ptr, v_ptr, k_strides, v_strides, pages, h, at, low, length, last, window, num_pages,
                scale_log2, cap_scale, D, D_v, PAGE, PAGES, BLOCK_N, BLOCK_D, BLOCK_V, PRECISION,
            )  # fmt: skip
            pages = ahead
            outside = outside | (pages < 0) | (pages >= num_pages)
        broken = (given < 0) | (given > capacity)
        if PAGE is not None:
            broken = broken | ((outside if PAGES == 1 else tl.max(outside.to(tl.int32), axis=0) > 0) & (length > 0))
        l = tl.where(broken, float("nan"), l)  # a table or a length that is wrong: the result says so
        o_rows = owner_rows(o_ptr, lse_ptr, o_strides, head, H, S_q, D_v, GROUP, ROWS, BLOCK_V, row)
        if not DIVIDED:
            epilogue(acc, l, m, *o_rows)
        else:
            if stop - begin == steps:  # all keys: nothing to merge
                epilogue(acc, l, m, *o_rows)
            else:
                store_part(acc, l, m, parts_ptr, part_lse_ptr, program, place, ROWS, USED, BLOCK_V)
            if begin == 0:
                tl.store(spans_ptr + 2 * place, program)
            if stop == steps:
                tl.store(spans_ptr + 2 * place + 1, program)


@triton.jit
def paged_merge_kernel(
    spans_ptr, parts_ptr, part_lse_ptr, o_ptr, lse_ptr, o_strides, H, S_q, D, tiles, rows,
    EARLY: tl.constexpr, GROUP: tl.constexpr, USED: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A program a row. It writes nothing where one program had all keys of the row's owner."""
    place, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    rows_of = owner_rows(
        o_ptr, lse_ptr, o_strides, place // tiles, H, S_q, D, GROUP, 1, BLOCK_D, place % tiles * USED + row
    )
    if EARLY:
        gdc_wait()
    first = tl.load(spans_ptr + 2 * place, cache_modifier=".cg")
    parts = tl.load(spans_ptr + 2 * place + 1, cache_modifier=".cg") - first + 1
    if parts > 1:
        merge_parts(parts_ptr, part_lse_ptr, rows_of, first + place, parts, row, USED, BLOCK_D, AT_ONCE)


def attention_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    table: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """q [B, H, S_q, D], k [pages, H_kv, page, D], v [pages, H_kv, page, D_v] -> o [B, H, S_q, D_v], lse in fp32.

    fp32, fp16 or bf16, any strides; D and D_v at most 256. lengths [B] int32. table [B, n] int32, n * page keys at most
    of each sequence; None: sequence b has page b. Deterministic: parts are merged in their order.
    """
    (B, H, S_q, D), (num_pages, H_kv, page, D_v) = q.shape, v.shape
    o = q.new_empty(B, S_q, H, D_v).transpose(1, 2)  # a token's heads side by side, as in the cache
    lse = torch.empty(B, H, S_q, device=q.device)
    if not o.numel():
        return o, lse
    group = H // H_kv
    used = min(most_rows(q), triton.next_power_of_2(group * S_q))
    tiles, (block_d, block_v) = triton.cdiv(group * S_q, used), tile_widths(k, v)
    owners, sms = B * H_kv * tiles, num_sms(q.device)
    # A step's K and V fill at most three tiles: two, or three where one of them has rows twice as wide as the other.
    most_keys = 3 * TILE_BYTES // ((block_d + block_v) * q.element_size())
    block_n = min(128, triton.next_power_of_2(most_keys + 1) // 2)
    ahead = steps_ahead(q, max(16, used), block_n, block_d, block_v)
    # A step's keys lie in one page, or in a few whole ones; where neither size divides the other, each has its own.
    pages = 1 if page % block_n == 0 else block_n // page if block_n % page == 0 else block_n
    capacity = page if table is None else page * table.shape[1] if num_pages else 0
    most_steps = max(1, triton.cdiv(capacity, block_n))
    programs = min(PROGRAMS_PER_SM * sms, owners * most_steps)
    divided = most_steps > (ALONE if 2 * owners >= sms else ALONE // 2) or owners > programs
    spans = parts = part_lse = None
    if divided:
        spans = torch.empty(owners, 2, dtype=torch.int32, device=q.device)
        parts, part_lse = (torch.empty(programs + owners, used, *n, device=q.device) for n in ((block_v,), ()))
    weight = part_weight(used * block_v * 4, block_n * (block_d + block_v) * q.element_size(), sms)
    early = starts_early(q.device)
    paged_kernel[(programs if divided else owners,)](
        q, k, v, o, lse, lengths, lengths if table is None else table, spans, parts, part_lse,
        q.stride(), k.stride(), v.stride(), o.stride(), 0 if table is None else table.stride(0),
        *score_scales(scale, softcap), window, B, H, S_q, D, None if D_v == D else D_v, num_pages, capacity, tiles,
        weight, causal, None if table is None else page, pages, early, divided, group, max(16, used), used, block_n,
        block_d, block_v, max(128, triton.next_power_of_2(B)), fp32_precision(), num_warps=4, num_stages=1 + ahead,
    )  # fmt: skip
    if not divided:
        return o, lse
    # One sequence may have all programs, divided among its K heads.
    at_once = triton.next_power_of_2(min(programs // (H_kv * tiles) + 2, 16384 // block_v))
    paged_merge_kernel[(owners * min(used, group * S_q),)](
        spans, parts, part_lse, o, lse, o.stride(), H, S_q, D_v, tiles, min(used, group * S_q),
        early, group, used, block_v, at_once, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return o, lse


# ---- The model: waves and bytes ----------------------------------------------------------------------------------
#
# All programs run at once, so there is one wave, and it ends when the largest share does: equal shares are best. Only
# two things speak for fewer, larger shares. A part is written and read again through L2. And where all sequences are
# alike, shares that end where owners end have no parts to merge.


def part_weight(part_bytes: int, step_bytes: int, sms: int) -> float:
    """w, where shares of sqrt(w * steps) cost least if memory's rate is no limit.

    A share of n steps takes n * step_bytes / r, r the rate of an SM alone. All steps have steps / n parts, whose bytes
    go to L2 and back at a rate R: 2 * part_bytes * steps / (n * R). The sum is least at n^2 = 2 * steps * part_bytes /
    step_bytes * r / R. An SM alone gets about twice its share of memory's rate, and L2 has about 1.5 of that rate.
    """
    return 2 * part_bytes / step_bytes * (2 / sms) / 1.5


def choose_share(steps: list[int], owners: int, programs: int, weight: float) -> int:
    """The work of a program, of sequences with `owners` owners of so many steps each: as share_of on the GPU.

    An equal share for each program, or the share whose parts cost no more than they save. Where all sequences are
    alike up to 1/16 more, if then owners end where programs do.
    """
    work = [n + START.value for n in steps]
    total, most = owners * sum(work), max(work)
    least = max(triton.cdiv(total, programs), math.ceil((total * weight) ** 0.5))
    if min(work) < most:
        return least
    near = range(least, min(least + least // 16 + 1, least + 128))
    return next((n for n in near if n % most == 0 or most % n == 0), least)
