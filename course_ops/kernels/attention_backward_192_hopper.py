"""Attention, backward, for Hopper: rows of Q and K of 136 to 192, of V up to 128; five matmuls (16 bits, windows).

As attention_backward_hopper without PING_PONG: a CTA owns 128 keys, each of its two consumer warpgroups 64 of them, and
TMA adds up dQ. attention_backward_wide_hopper does seven matmuls for these heads. Predicted, for a pair of 64 queries
and 128 keys on one SM, D = 192 and D_v = 128:

                     tensor cores     shared memory    L2
    five matmuls     3328 cycles      4032 cycles      88 KB
    seven matmuls    4608 cycles      4800 cycles      120 KB

Registers are what is short. A consumer's dK [64, 192] and dV [64, 128] in fp32 take 160 of a thread's 240. S and dP
would take 32 each. So dP is issued after the exponentials, when S has become P in 16 bits. Then dP is multiplied
by P in 16 bits. dQ [64, 96] of a consumer is computed in two parts, 64 columns and then 32. The other consumer's
matmuls run under the exponentials.

Shared memory in KB: K 48, V 32, Q 2 x 24, dO 2 x 16, dS 16, dQ's parts 2 x 24.

Rows of Q and K are split as in attention_backward_wide_hopper: the first 128 columns, and a rest of 64. Of dQ's sum
each block of 64 queries has three parts of 64 x 64, see finish_kernel. The consumers share the third one: each has
64 x 32.
"""

import triton
from torch import Tensor, empty, empty_like
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from course_ops._common import num_sms
from course_ops.hopper import (
    TileScheduler,
    accumulator,
    aggregate,
    allocate_barriers,
    allocate_scheduler,
    allocate_stages,
    as_matrix,
    operand_a,
    ring_slot,
    tensor_descriptor,
    tile_counter,
    tma_reduce_add,
)
from course_ops.kernels.attention_backward_hopper import (
    Problem,
    finish_kernel,
    opaque_zero,
    prepare_kernel,
    probabilities,
    problem_of,
    scaled,
    wait_for,
)
from course_ops.kernels.attention_backward_wide_hopper import (
    Blocks,
    accumulators,
    allocate_blocks,
    issue_sum,
    load_block,
    load_values,
)
from course_ops.kernels.attention_tiles import LN2, even_groups, heads_in_l2, hopper_takes, score_scales
from course_ops.kernels.sequences import (
    Sequences,
    coordinates,
    place_of,
    ragged_descriptor,
    records,
    whole_descriptor,
)
from course_ops.versions import async_store

ROWS, FIRST, REST, STAGES = 64, 128, 64, 2  # rows of a block, its columns, blocks of Q and dO in the ring


@aggregate
class PartitionArgs:
    """What all warps of a CTA share."""

    q: Blocks  # a ring
    do: Blocks  # a ring
    k: Blocks  # a half for each consumer; at a tile's end dK
    v: Blocks  # as k; at a tile's end dV
    start_smem: gl.shared_memory_descriptor  # [STAGES, 1, ROWS] fp32: -lse as a score
    delta_smem: gl.shared_memory_descriptor  # -delta
    ds_smem: gl.shared_memory_descriptor  # [2, ROWS, ROWS], by consumer
    q_full: gl.shared_memory_descriptor  # with -lse
    do_full: gl.shared_memory_descriptor  # with -delta
    empty: gl.shared_memory_descriptor  # both consumers have read Q and dO of a stage
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    met: gl.shared_memory_descriptor  # both consumers have written dS of a step
    ds_read: gl.shared_memory_descriptor  # both consumers have read it
    k_read: gl.shared_memory_descriptor  # both consumers have read K for the last time
    stored: gl.shared_memory_descriptor  # both consumers have written dK and dV over K and V
    sum_desc: tma.tensor_descriptor  # of dQ's sum, [parts * 64, 64] fp32
    rest_desc: tma.tensor_descriptor  # of halves of its parts
    sum_smem: gl.shared_memory_descriptor  # [2, 64, 64], a part of each consumer
    rest_smem: gl.shared_memory_descriptor  # [2, 32, 64]
    scheduler: TileScheduler
    problem: Problem
    scale_log2: gl.tensor
    cap_scale: gl.constexpr  # None: there is no softcap
    GROUP: gl.constexpr  # query heads that share a head of K and V


@gluon.jit
def producer_partition(args, descs):
    q_descs, do_descs, start_desc, delta_desc, k_descs, v_descs, dk_descs, dv_descs = descs
    GROUP: gl.constexpr = args.GROUP
    ROWS: gl.constexpr = args.q.first.shape[-2]
    gdc_wait()
    gdc_launch_dependents()
    step, count, index = 0, 0, gl.program_id(0)
    before = 0, 0, 0
    if args.problem.records_ptr is not None:
        before = 0, 0, 0, 0  # a sequence without rows: a CTA without a tile stores nothing
    while index < args.problem.num_tiles():
        args.scheduler.publish(index, count)
        problem, within = problem_of(args.problem, args.problem.work(index))
        batch, head_kv, key, begin, _whole, _last, end = problem.tile(within, ROWS, ROWS)
        queries, keys = place_of(batch, problem.q_end, problem.S_q), place_of(batch, problem.k_end, problem.S_k)
        first = step
        for head in range(head_kv * GROUP, head_kv * GROUP + GROUP):
            values = problem.blocks_before(batch, head, problem.blocks(ROWS), GROUP, ROWS)
            for block in range(begin, end):
                stage, parity = ring_slot(step, args.q_full.shape[0])
                mbarrier.wait(args.empty.index(stage), parity ^ 1)
                load_block(q_descs, args.q, stage, args.q_full.index(stage), queries, head, block * ROWS)
                load_values(start_desc, args.start_smem.index(stage), args.q_full.index(stage), values + block)
                load_block(do_descs, args.do, stage, args.do_full.index(stage), queries, head, block * ROWS)
                load_values(delta_desc, args.delta_smem.index(stage), args.do_full.index(stage), values + block)
                if step == first:
                    if count > 0:
                        store_tile(args, dk_descs, dv_descs, count - 1, before)
                    for half in gl.static_range(2):
                        load_block(k_descs, args.k, half, args.k_full.index(0), keys, head_kv, key + half * ROWS)
                        load_block(v_descs, args.v, half, args.v_full.index(0), keys, head_kv, key + half * ROWS)
                step += 1
        before = (batch, head_kv, key) if problem.q_end is None else (keys[0], keys[1], head_kv, key)
        count += 1
        index = args.scheduler.fetch(args.problem.num_tiles())
    args.scheduler.publish(index, count)
    store_tile(args, dk_descs, dv_descs, count - 1, before)


@gluon.jit
def store_tile(args, dk_descs, dv_descs, count, before):
    if len(before) == 3:
        where, head_kv, key = (before[0],), before[1], before[2]
    else:
        where, head_kv, key = (before[0], before[1]), before[2], before[3]
    mbarrier.wait(args.stored.index(0), count & 1)
    for half in gl.static_range(2):
        row = key + half * args.k.first.shape[-2]
        async_store(dk_descs[0], coordinates(where, head_kv, row, 0), args.k.first.index(half))
        async_store(
            dk_descs[1], coordinates(where, head_kv, row, args.k.first.shape[-1]), args.k.rest.index(half)
        )  # fmt: skip
        async_store(dv_descs[0], coordinates(where, head_kv, row, 0), args.v.first.index(half))
    tma.store_wait(0)


# An accumulator begins with -lse (as a score) or -delta of each query: see attention_backward_hopper.
@gluon.jit
def issue_scores(keys, i, queries, j, values, LAYOUT: gl.constexpr):
    """Issue S^T = K Q^T or dP^T = V dO^T [keys, queries], plus the queries' values."""
    ROWS: gl.constexpr = queries.first.shape[-2]
    s = values.load(LAYOUT).broadcast_to((ROWS, ROWS))
    x, y = as_matrix(keys.first.index(i)), as_matrix(queries.first.index(j))
    s = warpgroup_mma(x, y.permute((1, 0)), s, is_async=True)
    if keys.rest is not None:
        x, y = as_matrix(keys.rest.index(i)), as_matrix(queries.rest.index(j))
        s = warpgroup_mma(x, y.permute((1, 0)), s, is_async=True)
    return s


# Both consumers' dS times columns of all 128 keys. The matmul reads dS [keys, queries] as its transpose.
@gluon.jit
def issue_dq(args, keys, zero, COLUMNS: gl.constexpr, WHICH: gl.constexpr):
    dq = gl.zeros((64, COLUMNS), gl.float32, accumulator(COLUMNS))
    for half in gl.static_range(2):
        k = as_matrix(keys.index(half + zero)).slice(WHICH * COLUMNS, COLUMNS, dim=1)
        dq = warpgroup_mma(args.ds_smem.index(half + zero).permute((1, 0)), k, dq, use_acc=half > 0, is_async=True)
    return dq


@gluon.jit
def add_dq(desc, dq, row, smem):
    """Add columns of a consumer's dQ to rows of the sum from `row` on, in the order of its registers."""
    COLUMNS: gl.constexpr = dq.shape[1]
    x = dq.reshape((4, 2, 8, COLUMNS // 8, 4, 2)).permute((0, 3, 2, 4, 1, 5))
    tma.store_wait(1)  # of two parts TMA may still add the other one
    smem.store(x.reshape((COLUMNS, 64)))
    fence_async_shared()
    tma_reduce_add(desc, [row, 0], smem)


# The compiler would keep P as wgmma's operand, and each element in a register of its own for the product with dP. To
# the compiler this is a new P, which lies in pairs as the operand does, in the same registers.
@gluon.jit
def opaque_pairs(x):
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)


@aggregate
class ConsumerTile:
    """A consumer warpgroup's share of a tile: 64 keys."""

    WHICH: gl.constexpr
    args: PartitionArgs
    problem: Problem
    end: gl.tensor  # the ring's step after the tile's last one
    key: gl.tensor  # the first key


# The last step computes S of its own block again, which is not used: a branch around it would cost every step.
@gluon.jit
def main_loop(c, s, dk, dv, base, begin, end, part, MASKED: gl.constexpr):
    args = c.args
    WHICH: gl.constexpr = c.WHICH
    LAYOUT: gl.constexpr = s.type.layout
    ROWS: gl.constexpr = s.shape[0]
    for block in range(begin, end):
        step = base + block
        stage, parity = ring_slot(step, args.q_full.shape[0])
        after, parity_after = ring_slot(min(step + 1, c.end - 1), args.q_full.shape[0])
        zero = opaque_zero(step)
        p, _ = probabilities(s, None, c, block * ROWS, MASKED)
        p = p.to(args.q.first.dtype)
        mbarrier.wait(args.do_full.index(stage), parity)
        p_left = operand_a(p, dv[0], args.q.first.dtype)
        dv = issue_sum(p_left, args.do, stage, dv)
        dp = issue_scores(args.v, WHICH + zero, args.do, stage, args.delta_smem.index(stage), LAYOUT)
        dv, done = wait_for(0, dv, (p_left, dp))
        dp, p = done[1], opaque_pairs(p)
        ds = (p.to(gl.float32) * dp).to(args.q.first.dtype)
        mbarrier.wait(args.ds_read.index(0), step & 1 ^ 1)
        args.ds_smem.index(WHICH + zero).store(ds)
        fence_async_shared()
        mbarrier.arrive(args.met.index(0))
        ds = operand_a(ds, dk[0], args.q.first.dtype)
        dk = issue_sum(ds, args.q, stage, dk)
        mbarrier.wait(args.met.index(0), step & 1)
        dq = issue_dq(args, args.k.first, zero, 64, WHICH)
        dk, done = wait_for(0, dk, (dq, ds))
        rest = issue_dq(args, args.k.rest, zero, 32, WHICH)
        row = (part + block) * 192
        add_dq(args.sum_desc, done[0], row + WHICH * 64, args.sum_smem.index(WHICH + zero))
        mbarrier.wait(args.q_full.index(after), parity_after)
        s_after = issue_scores(args.k, WHICH + zero, args.q, after, args.start_smem.index(after), LAYOUT)
        rest = warpgroup_mma_wait(2, deps=(rest,))
        mbarrier.arrive(args.ds_read.index(0))
        add_dq(args.rest_desc, rest, row + 128 + WHICH * 32, args.rest_smem.index(WHICH + zero))
        s = warpgroup_mma_wait(0, deps=(s_after,))
        mbarrier.arrive(args.empty.index(stage))
    return s, dk, dv


@gluon.jit
def consumer_partition(args, WHICH: gl.constexpr):
    GROUP: gl.constexpr = args.GROUP
    ROWS: gl.constexpr = args.q.first.shape[-2]
    LAYOUT: gl.constexpr = accumulator(ROWS)
    first, count, work = 0, 0, args.problem.work(args.scheduler.receive(0))
    while work[0] < args.problem.num_tiles():
        problem, index = problem_of(args.problem, work)
        batch, head_kv, key, begin, whole, last, stop = problem.tile(index, ROWS, ROWS)
        end = first + (stop - begin) * GROUP  # at least one step: some query sees a tile's first key
        blocks = problem.blocks(ROWS)
        c = ConsumerTile(WHICH=WHICH, args=args, problem=problem, end=end, key=key + WHICH * ROWS)
        dk, dv = accumulators(args.k), accumulators(args.v)
        stage, parity = ring_slot(first, args.q_full.shape[0])
        zero = opaque_zero(first)
        mbarrier.wait(args.k_full.index(0), count & 1)
        mbarrier.wait(args.q_full.index(stage), parity)
        s = issue_scores(args.k, WHICH + zero, args.q, stage, args.start_smem.index(stage), LAYOUT)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.wait(args.v_full.index(0), count & 1)
        base, part = first - begin, problem.blocks_before(batch, head_kv * GROUP, blocks, GROUP, ROWS)
        for _head in range(GROUP):
            s, dk, dv = main_loop(c, s, dk, dv, base, begin, whole, part, True)
            if problem.window is None:
                s, dk, dv = main_loop(c, s, dk, dv, base, whole, stop, part, False)
            else:
                last = gl.maximum(whole, last)
                s, dk, dv = main_loop(c, s, dk, dv, base, whole, last, part, False)
                s, dk, dv = main_loop(c, s, dk, dv, base, last, stop, part, True)
            base, part = base + stop - begin, part + blocks
        # dK and dV go where K and V were. This half of V is read by this consumer alone; K is read by both.
        mbarrier.arrive(args.k_read.index(0))
        own = WHICH + opaque_zero(end)
        as_matrix(args.v.first.index(own)).store(dv[0].to(args.v.first.dtype))
        mbarrier.wait(args.k_read.index(0), count & 1)
        dk = scaled(dk, args.scale_log2 * LN2)
        as_matrix(args.k.first.index(own)).store(dk[0].to(args.k.first.dtype))
        as_matrix(args.k.rest.index(own)).store(dk[1].to(args.k.first.dtype))
        fence_async_shared()
        mbarrier.arrive(args.stored.index(0))
        first = end
        count += 1
        work = args.problem.work(args.scheduler.receive(count))
    tma.store_wait(0)  # TMA still adds from shared memory, which ends with the CTA


@gluon.jit(do_not_specialize=["tiles", "H_kv", "all_heads", "heads_at_once", "S_q", "S_k", "window"])
def attention_backward_192_kernel(
    q_desc, q_rest, do_desc,  # of [B, H, S_q, D] twice, [B, H, S_q, D_v]
    k_desc, k_rest, v_desc, dk_desc, dk_rest, dv_desc,  # of [B, H_kv, S_k, D or D_v]
    start_desc, delta_desc,  # of [blocks, ROWS] fp32
    sum_desc, rest_desc,  # of dQ's sum, B H rows 192 elements of fp32, and of halves of its parts
    counter_ptr,  # the scheduler's
    records_ptr,  # None, or of packed sequences: S_q and S_k are totals then, and all_heads is H_kv
    scale_log2, tiles, H_kv, all_heads, heads_at_once, S_q, S_k, window, GROUP: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    if records_ptr is not None:
        tiles = gl.load(records_ptr)
    ROWS: gl.constexpr = q_desc.block_type.shape[-2]
    SQUARE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    args = PartitionArgs(
        q=allocate_blocks(q_desc, q_rest, STAGES), do=allocate_blocks(do_desc, None, STAGES),
        k=allocate_blocks(k_desc, k_rest, 2), v=allocate_blocks(v_desc, None, 2),
        start_smem=allocate_stages(start_desc, STAGES), delta_smem=allocate_stages(delta_desc, STAGES),
        ds_smem=gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, ROWS], SQUARE),
        q_full=allocate_barriers(STAGES, 2), do_full=allocate_barriers(STAGES, 2),  # a block and its values
        empty=allocate_barriers(STAGES, 2), k_full=allocate_barriers(1, 2), v_full=allocate_barriers(1, 2),
        met=allocate_barriers(1, 2), ds_read=allocate_barriers(1, 2), k_read=allocate_barriers(1, 2),
        stored=allocate_barriers(1, 2), sum_desc=sum_desc, rest_desc=rest_desc,
        sum_smem=allocate_stages(sum_desc, 2), rest_smem=allocate_stages(rest_desc, 2),
        scheduler=allocate_scheduler(counter_ptr),
        problem=Problem(
            tiles=tiles, H_kv=H_kv, all_heads=all_heads, heads_at_once=heads_at_once, S_q=S_q, S_k=S_k, window=window,
            CAUSAL=CAUSAL, records_ptr=records_ptr, q_end=None, k_end=None, number=None,
        ),
        scale_log2=scale_log2, cap_scale=None, GROUP=GROUP,
    )  # fmt: skip
    descs = (
        (q_desc, q_rest), (do_desc, None), start_desc, delta_desc, (k_desc, k_rest), (v_desc, None),
        (dk_desc, dk_rest), (dv_desc, None),
    )  # fmt: skip
    gl.warp_specialize([
        (consumer_partition, (args, 0)),
        (consumer_partition, (args, 1)),
        (producer_partition, (args, descs)),
    ], [4, 1], [240, 24])  # fmt: skip


def takes(dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """What hopper_takes asks, with rows of Q and K from 136 to 192, and rows of V up to 128."""
    return q.shape[-1] > FIRST and v.shape[-1] <= FIRST and hopper_takes(FIRST + REST, q, k, v, dout)


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, window: int | None, scale: float, sequences: Sequences | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k [.., D] and v, out, dout [.., D_v] as in the forward, that `takes` takes -> dq as q, dk and dv as k, v.

    lse [B, H, S_q] in fp32, contiguous. dk and dv are deterministic, dq is not. sequences: of rows that are packed,
    B = 1.
    """
    (B, H, S_q, D), (_, H_kv, S_k, D_v) = q.shape, v.shape
    dq, dk, dv = empty_like(q), empty_like(k), empty_like(v)
    width, group, tiles, blocks = FIRST + REST, H // H_kv, triton.cdiv(S_k, 2 * ROWS), triton.cdiv(S_q, ROWS)
    longest, listed, cu_q, count, descriptor = S_q, None, None, None, whole_descriptor
    if sequences is not None:
        longest, cu_q, count, descriptor = sequences.longest_q, sequences.q, sequences.count, ragged_descriptor
        listed, tiles = records(sequences.k, sequences.q, S_k, 2 * ROWS)
        blocks = S_q // ROWS + count
    starts, deltas = (empty(B * H * blocks, ROWS, device=q.device) for _ in range(2))
    total = empty(B * H * blocks * width, 64, device=q.device)
    prepare_kernel[(B * H * blocks * ROWS // 32,)](
        out, dout, lse, starts, deltas, total, out.stride(), dout.stride(), scale, H, S_q, blocks * ROWS, D_v,
        cu_q, count, 32, FIRST, ROWS, width,
    )  # fmt: skip
    first, rest = ([descriptor(t, ROWS, columns) for t in (q, dout, k, v, dk, dv)] for columns in (FIRST, REST))
    few = 16 if heads_in_l2(8 * group * longest * width, q.device) >= 32 else 8  # see attention_backward_hopper
    at_once = even_groups(B * H_kv, max(few, num_sms(q.device) // max(1, tiles)))
    attention_backward_192_kernel[(min(tiles * B * H_kv, num_sms(q.device)),)](
        first[0], rest[0], first[1], first[2], rest[2], first[3], first[4], rest[4], first[5],
        *(tensor_descriptor(t, [1, ROWS], swizzled=False) for t in (starts, deltas)),
        *(tensor_descriptor(total, [n, 64], swizzled=False) for n in (64, 32)), tile_counter(q.device), listed,
        score_scales(scale, None)[0], tiles, H_kv, B * H_kv, at_once, S_q, S_k, window, group, causal, STAGES,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    finish_kernel[(B * H * blocks * 3,)](
        dq, total, dq.stride(), scale, H, S_q, blocks * ROWS, D, cu_q, count, width, width, launch_pdl=True
    )
    return dq, dk, dv
