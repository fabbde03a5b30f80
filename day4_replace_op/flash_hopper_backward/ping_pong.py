"""Ping-pong scheduling: the consumers take turns at exponentials (rung 5 of lesson 9).

At D = 64 it gains 7% to 16% over rung 4 from S = 2048 on (predicted: 17%), at D = 128 at most 3% (predicted: 7%). Why:
two consumers that wait for each other's dS in each step reach their exponentials at the same time. Then only dP runs on
the tensor cores, and at D = 64 the exponentials take twice as long. One character is 128 cycles at D = 64, capitals are
consumer 0:

    together    tensor cores   SSssDDdd....VVvvKKkkQQqq    S, D = dP, V = dV, K = dK, Q = dQ, . = idle
                exponentials   ....eeeeeeee............    both at once; a step takes 24 characters, 3072 cycles
    ping-pong   tensor cores   SSDDvvkkqqVVKKQQssdd        each consumer's exponentials run under the other's
                exponentials   eeEEEE............ee        matmuls; a step takes 20 characters, 2560 cycles

1. An mbarrier per consumer says whose turn it is. The other consumer completes it when its own exponentials are done.
2. A wait for the other's dS of the same step would bring the two back into step. So dQ is a step late.
   The dS that it reads was written a step ago, and its barrier has usually completed. That takes a third buffer of dS.
3. -lse is added after the matmul, not before: see the comment in main_loop. S^T and dP^T are issued by one function, so
   -delta is added later, too.
"""

import math

from lessonkit import needs, num_sms

import torch
import triton
import triton.language as tl
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

from course_ops.hopper import (
    TileScheduler,
    aggregate,
    allocate_barriers,
    allocate_scheduler,
    allocate_stages,
    as_matrix,
    async_load,
    async_store,
    exp2,
    operand_a,
    ring_slot,
    tensor_descriptor,
    tile_counter,
    tile_order,
    tma_reduce_add,
)
from problems.attention import expect_plain_gradient

KEYS, STAGES = 64, 2  # keys of a consumer; blocks of Q and dO in the ring
LOG2E, LN2 = gl.constexpr(math.log2(math.e)), gl.constexpr(math.log(2))


# Two values of each row: lse / unit, which is lse in the unit of the scores, and delta = rowsum(dO * O). Both are
# stored negative, since they are added later. The next kernel may start while this one ends (programmatic dependent
# launch). It waits for the results with gdc_wait. This kernel and finish_kernel go from the last head to the first:
# what was written last is still in L2.
@triton.jit
def prepare_kernel(
    out, dout, lse_ptr, start_ptr, delta_ptr, sum_ptr,  # [B, H, S, D] twice, [B H, S] three times, [B H S D] in fp32
    out_strides, dout_strides, unit, H, S, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    nth = tl.num_programs(0) - 1 - tl.program_id(0)
    head, rows = (nth // (S // ROWS)).to(tl.int64), nth % (S // ROWS) * ROWS + tl.arange(0, ROWS)
    at, cols = rows[:, None].to(tl.int64), tl.arange(0, D)[None, :]
    o_tile = tl.load(out + head // H * out_strides[0] + head % H * out_strides[1] + at * out_strides[2] + cols)
    do_tile = tl.load(dout + head // H * dout_strides[0] + head % H * dout_strides[1] + at * dout_strides[2] + cols)
    tl.store(start_ptr + head * S + rows, -tl.load(lse_ptr + head * S + rows) / unit)
    tl.store(delta_ptr + head * S + rows, -tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), axis=1))
    tl.store(sum_ptr + (head * S + at) * D + cols, tl.zeros([ROWS, D], tl.float32))


# dQ's sum lies in parts of 64 x 64. A part has the order of a warpgroup's registers, so that adding is contiguous. Its
# dimensions: warp (4), column block (8), thread (8 x 4), then the thread's 2 rows, 8 apart, by 2 columns.
@triton.jit
def finish_kernel(dq, sum_ptr, dq_strides, scale, H, S, D: tl.constexpr):
    gdc_wait()
    parts, nth = S // 64 * (D // 64), tl.num_programs(0) - 1 - tl.program_id(0)
    head, part = (nth // parts).to(tl.int64), nth % parts
    x = tl.load(sum_ptr + (head * parts + part) * 4096 + tl.arange(0, 4096)).reshape(4, 8, 8, 4, 2, 2)
    x = x.permute(0, 4, 2, 1, 3, 5).reshape(64, 64) * scale
    rows = (part // (D // 64) * 64 + tl.arange(0, 64)[:, None]).to(tl.int64)
    cols = part % (D // 64) * 64 + tl.arange(0, 64)[None, :]
    head_ptr = dq + head // H * dq_strides[0] + head % H * dq_strides[1]
    tl.store(head_ptr + rows * dq_strides[2] + cols, x.to(dq.dtype.element_ty))


@aggregate
class PartitionArgs:
    """What all warps of a CTA share."""

    q_smem: gl.shared_memory_descriptor  # [STAGES, 1, 1, ROWS, D]
    do_smem: gl.shared_memory_descriptor
    start_smem: gl.shared_memory_descriptor  # [STAGES, 1, ROWS] fp32: -lse
    delta_smem: gl.shared_memory_descriptor  # -delta
    k_smem: gl.shared_memory_descriptor  # [2, 1, 1, KEYS, D], a consumer's half each; at a tile's end dK
    v_smem: gl.shared_memory_descriptor  # at a tile's end dV
    ds_smem: gl.shared_memory_descriptor  # [3 buffers * 2 consumers, KEYS, ROWS]
    q_full: gl.shared_memory_descriptor  # with -lse
    do_full: gl.shared_memory_descriptor  # with -delta
    empty: gl.shared_memory_descriptor  # both consumers have read Q and dO of a stage
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor  # both consumers have written dS of a step
    k_read: gl.shared_memory_descriptor  # both consumers have read K for the last time
    stored: gl.shared_memory_descriptor  # both consumers have written dK and dV
    turn: gl.shared_memory_descriptor  # New: one a consumer: it may issue exponentials
    sum_desc: tma.tensor_descriptor  # dQ's sum, fp32 [B H S D / 64, 64]
    sum_smem: gl.shared_memory_descriptor  # [2, 64, 64], a consumer's each
    scheduler: TileScheduler
    scale_log2: gl.tensor
    S: gl.tensor
    heads: gl.tensor  # B * H
    H: gl.tensor
    heads_at_once: gl.tensor
    CAUSAL: gl.constexpr

    @gluon.jit
    def num_tiles(self):
        return self.S // (2 * self.k_smem.shape[3]) * self.heads

    @gluon.jit
    def tile(self, index):
        """The index-th tile. CAUSAL: a head's first keys, which most queries see, come first."""
        tiles = self.S // (2 * self.k_smem.shape[3])
        if self.CAUSAL:
            head, rank = tile_order(index, tiles, self.heads, self.heads_at_once)
            begin = rank * 2 * self.k_smem.shape[3] // self.q_smem.shape[3]
        else:
            head, rank, begin = index // tiles, index % tiles, 0
        return Tile(head=head, key=rank * 2 * self.k_smem.shape[3], begin=begin)


@aggregate
class Tile:
    """2 KEYS keys of a head, and the first block of queries that sees one of them."""

    head: gl.tensor  # of B * H
    key: gl.tensor
    begin: gl.tensor | gl.constexpr


@aggregate
class RowBlocks:
    """Q with -lse of its rows, or dO with -delta of its rows, as the producer loads them."""

    desc: tma.tensor_descriptor
    values_desc: tma.tensor_descriptor
    smem: gl.shared_memory_descriptor
    values_smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor

    @gluon.jit
    def load(self, stage, head, H, row):
        full = self.full.index(stage)
        mbarrier.expect(full, self.desc.block_type.nbytes + self.values_desc.block_type.nbytes)
        async_load(self.desc, [head // H, head % H, row, 0], full, self.smem.index(stage))
        async_load(self.values_desc, [head, row], full, self.values_smem.index(stage))


@aggregate
class KeyTiles:
    """K or V, and its gradient, which leaves through the same shared memory."""

    desc: tma.tensor_descriptor
    grad_desc: tma.tensor_descriptor
    smem: gl.shared_memory_descriptor  # [2, 1, 1, KEYS, D]
    full: gl.shared_memory_descriptor

    @gluon.jit
    def load(self, tile, H):
        mbarrier.expect(self.full.index(0), 2 * self.desc.block_type.nbytes)
        for half in gl.static_range(2):
            coord = [tile.head // H, tile.head % H, tile.key + half * self.smem.shape[3], 0]
            async_load(self.desc, coord, self.full.index(0), self.smem.index(half))

    @gluon.jit
    def store_gradient(self, tile, H):
        for half in gl.static_range(2):
            coord = [tile.head // H, tile.head % H, tile.key + half * self.smem.shape[3], 0]
            async_store(self.grad_desc, coord, self.smem.index(half))


# The producer also stores dK and dV: the consumers have no registers to spare for addresses. A tile's K and V
# overwrite the dK and dV of the tile before, so they wait for that store. Its first Q and dO need not wait.
@gluon.jit
def producer_partition(args, q, do, k, v):
    ROWS: gl.constexpr = args.q_smem.shape[3]
    gdc_wait()
    gdc_launch_dependents()
    step, count, index = 0, 0, gl.program_id(0)
    before = args.tile(index)
    while index < args.num_tiles():
        args.scheduler.publish(index, count)
        tile = args.tile(index)
        first = step
        for block in range(tile.begin, args.S // ROWS):
            stage, parity = ring_slot(step, args.q_full.shape[0])
            mbarrier.wait(args.empty.index(stage), parity ^ 1)
            q.load(stage, tile.head, args.H, block * ROWS)
            do.load(stage, tile.head, args.H, block * ROWS)
            if step == first:
                if count > 0:
                    store_gradients(args, k, v, before, count - 1)
                k.load(tile, args.H)
                v.load(tile, args.H)
            step += 1
        before = tile
        count += 1
        index = args.scheduler.fetch(args.num_tiles())
    args.scheduler.publish(index, count)
    store_gradients(args, k, v, before, count - 1)


@gluon.jit
def store_gradients(args, k, v, tile, count):
    mbarrier.wait(args.stored.index(0), count & 1)
    k.store_gradient(tile, args.H)
    v.store_gradient(tile, args.H)
    tma.store_wait(0)


@gluon.jit
def issue_scores(keys, queries, LAYOUT: gl.constexpr):
    """Issue S^T = K Q^T or dP^T = V dO^T [keys, queries]."""
    KEYS: gl.constexpr = keys.shape[0]
    ROWS: gl.constexpr = queries.shape[0]
    zeros = gl.zeros((KEYS, ROWS), gl.float32, LAYOUT)
    return warpgroup_mma(keys, queries.permute((1, 0)), zeros, use_acc=False, is_async=True)


# A zero that the compiler cannot know. Without it the addresses of K and V in shared memory, 16 registers of wgmma's
# descriptors, are computed before the loop and kept.
@gluon.jit
def opaque_zero(x):
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def probabilities(s, starts, key, row, args, MASKED: gl.constexpr):
    """P^T [keys, queries] of a block of scores; key, row: the block's first ones."""
    p = exp2(s * args.scale_log2 + starts)
    if MASKED:
        keys = gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, s.type.layout))[:, None]
        rows = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))[None, :]
        p = gl.where(keys <= rows + (row - key), p, 0.0)
    return p


# New: dQ is a step late, so both consumers may still read the dS of two steps while a third is written: three buffers.
@gluon.jit
def share_ds(args, ds, step, WHICH: gl.constexpr):
    """Write a consumer's dS^T of a step to shared memory, for both consumers' dQ."""
    args.ds_smem.index(step % 3 * 2 + WHICH).store(ds)
    fence_async_shared()
    mbarrier.arrive(args.ds_full.index(step % 2))


# Both consumers' dS times all 128 keys. A consumer has half of the step's dQ: 64 queries x 64 columns if D is 128, else
# 64 of 128 queries. wgmma reads dS [keys, queries] as its transpose.
@gluon.jit
def issue_dq(args, step, zero, WHICH: gl.constexpr):
    """Issue a consumer's half of a step's dQ = dS K, [64, 64]."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    dq = gl.zeros((64, 64), gl.float32, LAYOUT)
    for half in gl.static_range(2):
        ds, k = args.ds_smem.index(step % 3 * 2 + half), as_matrix(args.k_smem.index(half + zero))
        if k.shape[1] == 128:
            k = k.slice(WHICH * 64, 64, dim=1)
        else:
            ds = ds.slice(WHICH * 64, 64, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=half > 0, is_async=True)
    return dq


@gluon.jit
def add_dq(args, dq, part, WHICH: gl.constexpr):
    """Add a consumer's dQ [64, 64] to a part of the sum in memory, in the order of its registers."""
    x = dq.reshape((4, 2, 8, 8, 4, 2)).permute((0, 3, 2, 4, 1, 5))
    tma.store_wait(0)  # TMA has read what it added a step ago
    args.sum_smem.index(WHICH).store(x.reshape((64, 64)))
    fence_async_shared()
    tma_reduce_add(args.sum_desc, [part * 64, 0], args.sum_smem.index(WHICH))


@aggregate
class ConsumerTile:
    """A consumer's KEYS keys of a tile."""

    WHICH: gl.constexpr
    args: PartitionArgs
    key: gl.tensor  # the first key
    first: gl.tensor  # New: the ring's step of the tile's first block of queries
    end: gl.tensor  # the step after its last one
    base: gl.tensor  # a block's number plus base is its step
    part: gl.tensor  # the part of dQ's sum that has the head's first rows and this consumer's half


@gluon.jit
def main_loop(c, s, dk, dv, begin, end, MASKED: gl.constexpr):
    """Steps with blocks begin to end. s: S^T of the first one, complete. Returns S^T of block end, dK, dV."""
    args = c.args
    WHICH: gl.constexpr = c.WHICH
    LAYOUT: gl.constexpr = s.type.layout
    WIDE: gl.constexpr = args.q_smem.shape[4] > 64
    for block in range(begin, end):
        step, zero = c.base + block, opaque_zero(c.base + block)
        stage, parity = ring_slot(step, args.q_full.shape[0])
        after, parity_after = ring_slot(step + 1, args.q_full.shape[0])
        k, v = as_matrix(args.k_smem.index(WHICH + zero)), as_matrix(args.v_smem.index(WHICH + zero))
        q, do = as_matrix(args.q_smem.index(stage)), as_matrix(args.do_smem.index(stage))
        mbarrier.wait(args.do_full.index(stage), parity)
        dp = issue_scores(v, do, LAYOUT)  # New: without -delta
        # New: -lse is loaded after this wait. The compiler moves no load above a wait, so all of dP is issued before
        # the first exponential. If S began with -lse, it would issue an eighth of dP every ten exponentials.
        mbarrier.wait(args.turn.index(WHICH), step & 1)
        starts = args.start_smem.index(stage).load(LAYOUT)
        p = probabilities(s, starts, c.key, block * args.q_smem.shape[3], args, MASKED)
        p_left = operand_a(p, dv, args.q_smem.dtype)
        dv = warpgroup_mma(p_left, do, dv, is_async=True)
        if not WIDE:
            mbarrier.arrive(args.turn.index(1 - WHICH))  # New: D = 64: exponentials alone
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = (p * (dp + args.delta_smem.index(stage).load(LAYOUT))).to(args.q_smem.dtype)
        share_ds(args, ds, step, WHICH)
        if WIDE:
            mbarrier.arrive(args.turn.index(1 - WHICH))  # New: D = 128: exponentials and dS
        ds = operand_a(ds, dk, args.q_smem.dtype)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        dv, p_left = warpgroup_mma_wait(1, deps=(dv, p_left))
        mbarrier.wait(args.ds_full.index((step + 1) % 2), (step - 1) // 2 & 1, pred=step > c.first)
        dq = issue_dq(args, step + 2, zero, WHICH)  # New: of the step before; + 2 is - 1 in a ring of three
        mbarrier.wait(args.q_full.index(after), parity_after, pred=step + 1 < c.end)
        s_after = issue_scores(k, as_matrix(args.q_smem.index(after)), LAYOUT)
        dq, dk, ds = warpgroup_mma_wait(1, deps=(dq, dk, ds))
        mbarrier.arrive(args.empty.index(stage))
        if step > c.first:  # New
            add_dq(args, dq, c.part + 2 * (block - 1), WHICH)
        s = warpgroup_mma_wait(0, deps=(s_after,))
    return s, dk, dv


@gluon.jit
def first_scores(c, step, LAYOUT: gl.constexpr):
    """S^T of a step, complete."""
    args, zero = c.args, opaque_zero(step)
    stage, parity = ring_slot(step, args.q_smem.shape[0])
    mbarrier.wait(args.q_full.index(stage), parity, pred=step < c.end)
    s = issue_scores(as_matrix(args.k_smem.index(c.WHICH + zero)), as_matrix(args.q_smem.index(stage)), LAYOUT)
    return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def consumer_partition(args, WHICH: gl.constexpr):
    ROWS: gl.constexpr = args.q_smem.shape[3]
    KEYS: gl.constexpr = args.k_smem.shape[3]
    D: gl.constexpr = args.k_smem.shape[4]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    first, count, index = 0, 0, args.scheduler.receive(0)
    while index < args.num_tiles():
        tile = args.tile(index)
        blocks = args.S // ROWS
        end = first + blocks - tile.begin
        c = ConsumerTile(
            WHICH=WHICH, args=args, key=tile.key + WHICH * KEYS, first=first, end=end, base=first - tile.begin,
            part=tile.head * blocks * 2 + WHICH,
        )  # fmt: skip
        dk, dv = gl.zeros((KEYS, D), gl.float32, OUT), gl.zeros((KEYS, D), gl.float32, OUT)
        mbarrier.wait(args.k_full.index(0), count & 1)
        s = first_scores(c, first, LAYOUT)
        mbarrier.wait(args.v_full.index(0), count & 1)
        begin = tile.begin
        if args.CAUSAL:
            # Not begin + 1 (D = 64): in an unrolled loop of one step ptxas may wait after each wgmma (remark C7511).
            whole = gl.cdiv(tile.key + 2 * KEYS - 1, ROWS)
            s, dk, dv = main_loop(c, s, dk, dv, begin, whole, True)
            begin = whole
        s, dk, dv = main_loop(c, s, dk, dv, begin, blocks, False)
        zero = opaque_zero(end)
        mbarrier.wait(args.ds_full.index((end - 1) % 2), (end - 1) // 2 & 1)  # New: the last step's dQ
        dq = issue_dq(args, end - 1, zero, WHICH)
        add_dq(args, warpgroup_mma_wait(0, deps=(dq,)), c.part + 2 * (blocks - 1), WHICH)
        # dK and dV go where K and V were. This half of V is read by this consumer alone; K is read by both.
        mbarrier.arrive(args.k_read.index(0))
        as_matrix(args.v_smem.index(WHICH + zero)).store(dv.to(args.v_smem.dtype))
        mbarrier.wait(args.k_read.index(0), count & 1)
        as_matrix(args.k_smem.index(WHICH + zero)).store((dk * (args.scale_log2 * LN2)).to(args.k_smem.dtype))
        fence_async_shared()
        mbarrier.arrive(args.stored.index(0))
        first = end
        count += 1
        index = args.scheduler.receive(count)
    tma.store_wait(0)  # TMA still adds from shared memory, which ends with the CTA


@gluon.jit(do_not_specialize=["S", "heads", "H", "heads_at_once"])
def backward_kernel(
    q_desc, do_desc, start_desc, delta_desc,  # of [B, H, S, D] twice, [B H, S] twice
    k_desc, v_desc, dk_desc, dv_desc,  # of [B, H, S, D]
    sum_desc, counter_ptr,  # of dQ's sum, fp32 [B H S D / 64, 64]; the scheduler's counter
    scale_log2, S, heads, H, heads_at_once, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], q_desc.dtype)
    args = PartitionArgs(
        q_smem=allocate_stages(q_desc, STAGES), do_smem=allocate_stages(do_desc, STAGES),
        start_smem=allocate_stages(start_desc, STAGES), delta_smem=allocate_stages(delta_desc, STAGES),
        k_smem=allocate_stages(k_desc, 2), v_smem=allocate_stages(v_desc, 2),
        ds_smem=gl.allocate_shared_memory(q_desc.dtype, [6, KEYS, ROWS], LAYOUT),  # New: three buffers
        q_full=allocate_barriers(STAGES, 1), do_full=allocate_barriers(STAGES, 1), empty=allocate_barriers(STAGES, 2),
        k_full=allocate_barriers(1, 1), v_full=allocate_barriers(1, 1), ds_full=allocate_barriers(2, 2),
        k_read=allocate_barriers(1, 2), stored=allocate_barriers(1, 2), turn=allocate_barriers(2, 1),
        sum_desc=sum_desc, sum_smem=allocate_stages(sum_desc, 2), scheduler=allocate_scheduler(counter_ptr),
        scale_log2=scale_log2, S=S, heads=heads, H=H, heads_at_once=heads_at_once, CAUSAL=CAUSAL,
    )  # fmt: skip
    mbarrier.arrive(args.turn.index(0))  # New: consumer 0 begins
    q = RowBlocks(desc=q_desc, values_desc=start_desc, smem=args.q_smem, values_smem=args.start_smem, full=args.q_full)
    do = RowBlocks(
        desc=do_desc, values_desc=delta_desc, smem=args.do_smem, values_smem=args.delta_smem, full=args.do_full
    )  # fmt: skip
    k = KeyTiles(desc=k_desc, grad_desc=dk_desc, smem=args.k_smem, full=args.k_full)
    v = KeyTiles(desc=v_desc, grad_desc=dv_desc, smem=args.v_smem, full=args.v_full)
    gl.warp_specialize([
        (consumer_partition, (args, 0)),
        (consumer_partition, (args, 1)),
        (producer_partition, (args, q, do, k, v)),
    ], [4, 1], [240, 24])  # fmt: skip


@needs(90, "TMA and wgmma", only=True)
def ping_pong(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """dq, dk, dv [B, H, S, D] of attention. fp16 or bf16, D of 64 or 128, S a multiple of 128, no window."""
    scale = expect_plain_gradient(grad_out, q, k, v, out, lse, causal, window, scale)
    (B, H, S, D), block = q.shape, 8192 // q.shape[3]  # block: 64 x 64 elements of dQ for each consumer
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    start, delta, total = (torch.empty(B * H, S * n, device=q.device) for n in (1, 1, D))
    prepare_kernel[(B * H * S // 32,)](  # New: lse in units of LN2
        out, grad_out, lse, start, delta, total, out.stride(), grad_out.stride(), LN2.value, H, S, 32, D
    )
    # Causal: a few heads at a time, so that long and short tiles run side by side. 16 if what 32 heads share
    # fits into 25 MiB, less than half of the L2 of an H200. That is 8 S D bytes of Q, dO and the sum of dQ for a head,
    # so S D <= 102400. Otherwise 8.
    backward_kernel[(min(S // (2 * KEYS) * B * H, num_sms()),)](
        *(tensor_descriptor(t, [1, 1, block, D]) for t in (q, grad_out)),
        *(tensor_descriptor(t, [1, block], swizzled=False) for t in (start, delta)),
        *(tensor_descriptor(t, [1, 1, KEYS, D]) for t in (k, v, dk, dv)),
        tensor_descriptor(total.view(-1, 64), [64, 64], swizzled=False), tile_counter(q.device),
        scale_log2=scale * LOG2E.value, S=S, heads=B * H, H=H, heads_at_once=min(B * H, 16 if S * D <= 102400 else 8),
        CAUSAL=causal, STAGES=STAGES, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    finish_kernel[(B * H * S * D // 4096,)](dq, total, dq.stride(), scale, H, S, D, launch_pdl=True)
    return dq, dk, dv
