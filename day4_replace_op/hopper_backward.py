"""What lessons 6d and 6e share: products asked for, which tile comes when, the warp that loads, the launch.

A program's 9 warps share a tile of 128 keys of a head of K and V: two warpgroups own 64 each, one warp asks TMA for
what they need. Shared memory: K and V as [2, 1, 1, 64, D], blocks of Q and dO as [STAGES, 1, 1, ROWS, D], their rows'
numbers as [STAGES, 1, ROWS], dS as [2 * 2, 64, ROWS], by the step's parity and by who wrote it; three
buffers by turns if dQ is a step late.
"""

from lessonkit import case

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from course_ops.hopper import ring_slot as slot
from day4_replace_op import heads
from day4_replace_op.hopper import describe, draw, matrix, num_sms, refuse_others, tell, zero
from day4_replace_op.hopper_dq import add_dq, finish_kernel, prepare_kernel
from problems.attention import BACKWARD_CHECKS, expect_gradient

KEYS, STAGES = 64, 2  # keys of a warpgroup, blocks of Q and dO at a time


# A product adds to what its registers hold. They may begin with -lse (as a score) or -delta of each query, not with 0:
# then P = 2^(scale S') and dS = P dP', and 2 numbers a query need no registers while S^T and dP^T have theirs.
@gluon.jit
def ask_scores(keys, queries, numbers, LAYOUT: gl.constexpr):
    """S^T = K Q^T or dP^T = V dO^T [keys, queries], less the queries' numbers, if there are any."""
    KEYS: gl.constexpr = keys.shape[0]
    ROWS: gl.constexpr = queries.shape[0]
    start = gl.zeros((KEYS, ROWS), gl.float32, LAYOUT)
    if numbers is not None:
        start = numbers.load(LAYOUT).broadcast_to((KEYS, ROWS))
    return warpgroup_mma(keys, queries.permute((1, 0)), start, use_acc=numbers is not None, is_async=True)


@gluon.jit
def await_scores(
    smem, bars, turn, turns, zero, LAYOUT: gl.constexpr, WHICH: gl.constexpr, LATE: gl.constexpr
):  # fmt: skip
    """S^T of a step, asked for when its Q has come."""
    q_smem, _, start_smem, _, k_smem, _, _ = smem
    stage, parity = slot(turn, q_smem.shape[0])
    mbarrier.wait(bars[0].index(stage), parity, pred=turn < turns)
    k, q = matrix(k_smem.index(WHICH + zero)), matrix(q_smem.index(stage))
    return ask_scores(k, q, None if LATE else start_smem.index(stage), LAYOUT)


# A zero that the compiler cannot know. Without it the places of K and V in shared memory, 16 registers of wgmma's
# descriptors, are computed before the loop and kept; and before the first tile's, if a tile's begin or end has none.
@gluon.jit
def hidden_zero(x):
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], gl.int32, False, 1)


# What both warpgroups' dQ needs of this one. Two buffers by turns: who has come to a step's meeting has multiplied the
# dS of the step before, so nobody reads what is overwritten after it. (If dQ is a step late, three.)
@gluon.jit
def share(ds, ds_smem, at, met, WHICH: gl.constexpr):
    ds_smem.index(at + WHICH).store(ds)
    fence_async_shared()
    mbarrier.arrive(met)


# Both warpgroups' dS, times all 128 keys, for a half of the step's dQ: 64 queries x 64 columns of D if D is 128, else
# 64 of 128 queries. wgmma reads dS [keys, queries] as its transpose.
@gluon.jit
def ask_dq(ds_smem, at, k_smem, zero, WHICH: gl.constexpr, HALVES: gl.constexpr = 2):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    dq = gl.zeros((64, 64), gl.float32, LAYOUT)
    for half in gl.static_range(HALVES):
        ds, k = ds_smem.index(at + half), matrix(k_smem.index(half + zero))
        if k.shape[1] == 128:
            k = k.slice(WHICH * 64, 64, dim=1)
        else:
            ds = ds.slice(WHICH * 64, 64, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=half > 0, is_async=True)
    return dq


# Causal, D = 128: a tile's upper 64 keys may come after all 64 queries of its first step, of no other. Then P, dS of
# warpgroup 1 are 0. It shares zeros; what remains are its half of dQ, from the other's dS, and S of the next step. As
# this is before the loop, not a branch in it, no other step pays for it.
@gluon.jit
def bounds(key, blocks, sizes, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """Of a warpgroup's own keys: the first block of queries that sees one, and the first that needs no mask."""
    ahead = key + sizes[4] - sizes[5]
    return min(blocks, max(0, ahead) // ROWS), min(blocks, (max(0, ahead + KEYS - 1) + ROWS - 1) // ROWS)


@gluon.jit
def pass_by(smem, bars, total, part, turn, turns, LAYOUT: gl.constexpr, LATE: gl.constexpr):
    """Warpgroup 1's step with a block that sees none of its keys: S^T of the next. If LATE, it is a tile's first."""
    k_smem, ds_smem = smem[4], smem[6]
    q_full, _, empty, _, _, meet, _, _, order = bars
    KEYS: gl.constexpr = ds_smem.shape[1]
    ROWS: gl.constexpr = ds_smem.shape[2]
    at, zero = turn % (ds_smem.shape[0] // 2) * 2, hidden_zero(turn)
    stage, parity = slot(turn, q_full.shape[0])
    mbarrier.wait(q_full.index(stage), parity)  # given back sooner, it would count for the block that was there before
    if LATE:
        mbarrier.wait(order.index(1), turn & 1)
    share(gl.zeros((KEYS, ROWS), ds_smem.dtype, LAYOUT), ds_smem, at, meet.index(turn % 2), 1)
    if LATE:
        mbarrier.arrive(order.index(0))
    s = await_scores(smem, bars, turn + 1, turns, zero, LAYOUT, 1, LATE)
    if LATE:
        s = warpgroup_mma_wait(0, deps=(s,))
    else:
        mbarrier.wait(meet.index(turn % 2), turn // 2 & 1)
        dq, s = warpgroup_mma_wait(0, deps=(ask_dq(ds_smem, at, k_smem, zero, 1, HALVES=1), s))
        add_dq(dq, part, total, 1)
    mbarrier.arrive(empty.index(stage))
    return s


# What all partitions agree on. Causal: the first keys, which most queries see, first; lesson 4's order of heads.
@gluon.jit
def place(nth, sizes, CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """Of the nth tile: batch, head, the first of its 2 KEYS keys; of its queries' blocks the first that sees one of
    these, the first of those that need no mask, and the end."""
    tiles, heads, all_heads, at_once, S_q, S_k = sizes
    blocks = (S_q + ROWS - 1) // ROWS
    if CAUSAL:
        first = nth // (at_once * tiles) * at_once
        width, within = min(at_once, all_heads - first), nth % (at_once * tiles)
        each, key = first + within % width, within // width * 2 * KEYS
        begin = min(blocks, max(0, key + S_q - S_k) // ROWS)
        whole = min(blocks, (max(0, key + 2 * KEYS - 1 + S_q - S_k) + ROWS - 1) // ROWS)
    else:
        each, key, begin = nth // tiles, nth % tiles * 2 * KEYS, 0
        whole = blocks if key + 2 * KEYS > S_k else 0
    return each // heads, each % heads, key, begin, whole, blocks


# The owner walks over the queries of all heads of a group, so these share a ring. This warp stores, too: what it knows
# of addresses would cost the others registers that they do not have. A tile's K and V come into the place from which
# the one before it is stored, but its first block of queries need not wait for that.
@gluon.jit
def load_partition(descs, smem, bars, queue, sizes, GROUP: gl.constexpr, CAUSAL: gl.constexpr, QUEUE: gl.constexpr):
    q_desc, do_desc, start_desc, delta_desc, k_desc, v_desc, _, _ = descs
    q_smem, do_smem, start_smem, delta_smem, k_smem, v_smem, _ = smem
    q_full, do_full, empty, k_full, v_full, _, _, stored, _ = bars
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    gdc_wait()
    gdc_launch_dependents()
    turn, count, nth = 0, 0, gl.program_id(0)
    before = 0, 0, 0
    while nth < sizes[0] * sizes[2]:
        if QUEUE:
            tell(nth, count, queue)
        batch, head_kv, key, begin, _whole, blocks = place(nth, sizes, CAUSAL, ROWS, KEYS)
        first = turn
        for head in range(head_kv * GROUP, head_kv * GROUP + GROUP):
            row = batch * sizes[1] * GROUP + head
            for block in range(begin, blocks):
                stage, parity = slot(turn, q_full.shape[0])
                mbarrier.wait(empty.index(stage), parity ^ 1)
                load_block(q_desc, q_smem, start_desc, start_smem, q_full, stage, batch, head, row, block * ROWS)
                load_block(do_desc, do_smem, delta_desc, delta_smem, do_full, stage, batch, head, row, block * ROWS)
                if turn == first:
                    if count > 0:
                        store_tile(descs, smem, stored, count - 1, before)
                    load_halves(k_desc, k_smem, k_full.index(0), batch, head_kv, key)
                    load_halves(v_desc, v_smem, v_full.index(0), batch, head_kv, key)
                turn += 1
        before = batch, head_kv, key
        count += 1
        nth = draw(nth, queue, sizes, QUEUE)
    if QUEUE:
        tell(nth, count, queue)
    store_tile(descs, smem, stored, count - 1, before)


@gluon.jit
def store_tile(descs, smem, stored, count, where):
    _, _, _, _, _, _, dk_desc, dv_desc = descs
    _, _, _, _, k_smem, v_smem, _ = smem
    batch, head_kv, key = where
    mbarrier.wait(stored.index(0), count & 1)
    for half in gl.static_range(2):
        coord = [batch, head_kv, key + half * k_smem.shape[3], 0]
        tma.async_copy_shared_to_global(dk_desc, coord, k_smem.index(half))
        tma.async_copy_shared_to_global(dv_desc, coord, v_smem.index(half))
    tma.store_wait(0)


@gluon.jit
def load_halves(desc, smem, full, batch, head, row):
    mbarrier.expect(full, 2 * desc.block_type.nbytes)
    for half in gl.static_range(2):
        coord = [batch, head, row + half * desc.block_type.shape[2], 0]
        tma.async_copy_global_to_shared(desc, coord, full, smem.index(half))


@gluon.jit
def load_block(desc, smem, numbers_desc, numbers_smem, full, stage, batch, head, row, first):
    mbarrier.expect(full.index(stage), desc.block_type.nbytes + numbers_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [batch, head, first, 0], full.index(stage), smem.index(stage))
    tma.async_copy_global_to_shared(numbers_desc, [row, first], full.index(stage), numbers_smem.index(stage))


def launch(kernel, grad_out, q, k, v, out, lse, causal, window, scale, *, QUEUE=False, LATE=False, **options):
    """Check the arguments, prepare, walk, finish."""
    scale = expect_gradient(grad_out, q, k, v, out, lse, causal, window, scale)
    (B, H, S_q, D), (_, H_kv, S_k, _) = q.shape, k.shape
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    refuse_others(window, 128, q, k, v, grad_out, dk, dv)
    width = 64 if D <= 64 else 128
    block = 8192 // width  # queries of a step: 64 x 64 numbers of dQ for each warpgroup
    rows, tiles, group = triton.cdiv(S_q, block) * block, triton.cdiv(S_k, 2 * KEYS), H // H_kv
    starts, deltas, total = (torch.empty(B * H, rows * n, device=q.device) for n in (1, 1, width))
    unit = heads.LN2.value if LATE else scale  # added to scaled scores, as powers of 2; or to scores
    prepare_kernel[(B * H * rows // 32,)](
        out, grad_out, lse, starts, deltas, total, out.stride(), grad_out.stride(), unit, H, S_q, rows, D, 32, width
    )
    # Few heads at a time, so that long and short tiles are under way together: 128 heads of S = 512, first all their
    # long tiles, take 18% longer. 16 if L2 holds twice what their programs share (Q, dO, twice as much of dQ), else 8;
    # with less a group's end is felt. Most counts of heads are multiples of these, or the last group has few.
    at_once = min(B * H_kv, 16 if heads.at_once(8 * group * S_q * width) >= 32 else 8)
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    programs = min(tiles * B * H_kv, num_sms()) if QUEUE else tiles * B * H_kv
    kernel[(programs,)](
        describe(q, block, width), describe(grad_out, block, width),
        *(TensorDescriptor(t, list(t.shape), list(t.stride()), [1, block], plain) for t in (starts, deltas)),
        *(describe(t, KEYS, width) for t in (k, v, dk, dv)),
        TensorDescriptor.from_tensor(total.view(-1, 64), [64, 64], plain), total, zero(q) if QUEUE else total,
        scale * heads.LOG2E.value, tiles, H_kv, B * H_kv, at_once, S_q, S_k, group, causal, STAGES, QUEUE, LATE,
        num_warps=4, launch_pdl=True, **options,
    )  # fmt: skip
    finish_kernel[(B * H * rows * width // 4096,)](
        dq, total, dq.stride(), scale, H, S_q, rows, D, width, launch_pdl=True
    )
    return dq, dk, dv


CHECKS = (
    *(c for c in BACKWARD_CHECKS if not c.shape.get("window")),
    case("grouped heads, odd lengths, several heads' steps in one ring", B=1, H=6, S=77, D=64, S_k=150, H_kv=2),
    case("keys of two tiles, queries of one block", B=1, H=2, S=20, D=32, S_k=160, H_kv=1, causal=True),
    case("three programs and more for each SM", gib=0.6, B=4, H=34, S=400, D=64, S_k=300),
    case("so causal", gib=0.6, B=4, H=34, S=400, D=128, S_k=500, causal=True),
    case("so in groups, the keys fewer", gib=0.6, B=2, H=64, S=500, D=128, S_k=400, H_kv=16, causal=True),
)
