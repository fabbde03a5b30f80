"""Five matmuls: one pass over the score matrix makes dQ, dK and dV (rung 1 of lesson 9).

A CTA has a tile of 128 keys. Each of its two consumer warpgroups keeps dK and dV of 64 keys in registers. For each
block of queries the consumers compute S and dP once, and all three gradients from them. Many CTAs have a share of one
dQ, so they add it up in fp32 in global memory (red.global.add). A consumer issues a matmul, and waits for it before it
does anything else.
"""

import math

from lessonkit import needs

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
    aggregate,
    allocate_barriers,
    allocate_stages,
    as_matrix,
    async_load,
    async_store,
    exp2,
    operand_a,
    ring_slot,
    tensor_descriptor,
    tile_order,
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
    ds_smem: gl.shared_memory_descriptor  # [2 buffers * 2 consumers, KEYS, ROWS]
    q_full: gl.shared_memory_descriptor  # with -lse
    do_full: gl.shared_memory_descriptor  # with -delta
    empty: gl.shared_memory_descriptor  # both consumers have read Q and dO of a stage
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor  # both consumers have written dS of a step
    k_read: gl.shared_memory_descriptor  # both consumers have read K for the last time
    stored: gl.shared_memory_descriptor  # both consumers have written dK and dV
    sum_ptr: gl.tensor  # dQ's sum, fp32 [B H S D]
    scale_log2: gl.tensor
    S: gl.tensor
    heads: gl.tensor  # B * H
    H: gl.tensor
    heads_at_once: gl.tensor
    CAUSAL: gl.constexpr

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


# The producer also stores dK and dV: the consumers have no registers to spare for addresses.
@gluon.jit
def producer_partition(args, q, do, k, v):
    ROWS: gl.constexpr = args.q_smem.shape[3]
    gdc_wait()
    gdc_launch_dependents()
    tile = args.tile(gl.program_id(0))
    k.load(tile, args.H)
    v.load(tile, args.H)
    for block in range(tile.begin, args.S // ROWS):
        stage, parity = ring_slot(block - tile.begin, args.q_full.shape[0])
        mbarrier.wait(args.empty.index(stage), parity ^ 1)
        q.load(stage, tile.head, args.H, block * ROWS)
        do.load(stage, tile.head, args.H, block * ROWS)
    store_gradients(args, k, v, tile)


@gluon.jit
def store_gradients(args, k, v, tile):
    mbarrier.wait(args.stored.index(0), 0)
    k.store_gradient(tile, args.H)
    v.store_gradient(tile, args.H)
    tma.store_wait(0)


# An accumulator may begin with -lse (as a score) or -delta of each query instead of 0. Then P is
# 2^(scale_log2 S') and dS = P dP'. The rows' values need no registers of their own.
@gluon.jit
def issue_scores(keys, queries, values_smem, LAYOUT: gl.constexpr):
    """Issue S^T = K Q^T or dP^T = V dO^T [keys, queries], plus a value for each query."""
    KEYS: gl.constexpr = keys.shape[0]
    ROWS: gl.constexpr = queries.shape[0]
    start = values_smem.load(LAYOUT).broadcast_to((KEYS, ROWS))
    return warpgroup_mma(keys, queries.permute((1, 0)), start, is_async=True)


# A zero that the compiler cannot know. Without it the addresses of K and V in shared memory, 16 registers of wgmma's
# descriptors, are computed before the loop and kept.
@gluon.jit
def opaque_zero(x):
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def probabilities(s, key, row, args, MASKED: gl.constexpr):
    """P^T [keys, queries] of a block of scores; key, row: the block's first ones."""
    p = exp2(s * args.scale_log2)
    if MASKED:
        keys = gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, s.type.layout))[:, None]
        rows = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))[None, :]
        p = gl.where(keys <= rows + (row - key), p, 0.0)
    return p


# Two buffers: a consumer that has arrived at a step's ds_full has read the dS of the step before.
@gluon.jit
def share_ds(args, ds, step, WHICH: gl.constexpr):
    """Write a consumer's dS^T of a step to shared memory, for both consumers' dQ."""
    args.ds_smem.index(step % 2 * 2 + WHICH).store(ds)
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
        ds, k = args.ds_smem.index(step % 2 * 2 + half), as_matrix(args.k_smem.index(half + zero))
        if k.shape[1] == 128:
            k = k.slice(WHICH * 64, 64, dim=1)
        else:
            ds = ds.slice(WHICH * 64, 64, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=half > 0, is_async=True)
    return dq


@gluon.jit
def add_dq(args, dq, part, WHICH: gl.constexpr):
    """Add a consumer's dQ [64, 64] to a part of the sum in memory, in the order of its registers."""
    x = dq.reshape((4, 2, 8, 8, 4, 2)).permute((0, 3, 2, 4, 1, 5)).reshape((4096,))
    elements = part.to(gl.int64) * 4096 + gl.arange(0, 4096, layout=x.type.layout)
    gl.atomic_add(args.sum_ptr + elements, x, sem="relaxed")


@aggregate
class ConsumerTile:
    """A consumer's KEYS keys of a tile."""

    WHICH: gl.constexpr
    args: PartitionArgs
    key: gl.tensor  # the first key
    begin: gl.tensor | gl.constexpr  # the first block of queries
    part: gl.tensor  # the part of dQ's sum that has the head's first rows and this consumer's half


@gluon.jit
def main_loop(c, dk, dv, begin, end, LAYOUT: gl.constexpr, MASKED: gl.constexpr):
    """Steps with blocks begin to end."""
    args = c.args
    WHICH: gl.constexpr = c.WHICH
    for block in range(begin, end):
        step, zero = block - c.begin, opaque_zero(block)
        stage, parity = ring_slot(step, args.q_full.shape[0])
        k, v = as_matrix(args.k_smem.index(WHICH + zero)), as_matrix(args.v_smem.index(WHICH + zero))
        q, do = as_matrix(args.q_smem.index(stage)), as_matrix(args.do_smem.index(stage))
        mbarrier.wait(args.q_full.index(stage), parity)
        s = issue_scores(k, q, args.start_smem.index(stage), LAYOUT)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.wait(args.do_full.index(stage), parity)
        dp = issue_scores(v, do, args.delta_smem.index(stage), LAYOUT)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        p = probabilities(s, c.key, block * args.q_smem.shape[3], args, MASKED)
        p_left = operand_a(p, dv, args.q_smem.dtype)
        dv = warpgroup_mma(p_left, do, dv, is_async=True)
        dv, p_left = warpgroup_mma_wait(0, deps=(dv, p_left))
        ds = (p * dp).to(args.q_smem.dtype)
        share_ds(args, ds, step, WHICH)
        ds = operand_a(ds, dk, args.q_smem.dtype)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        dk, ds = warpgroup_mma_wait(0, deps=(dk, ds))
        mbarrier.wait(args.ds_full.index(step % 2), step // 2 & 1)
        dq = issue_dq(args, step, zero, WHICH)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        mbarrier.arrive(args.empty.index(stage))
        add_dq(args, dq, c.part + 2 * block, WHICH)
    return dk, dv


@gluon.jit
def consumer_partition(args, WHICH: gl.constexpr):
    ROWS: gl.constexpr = args.q_smem.shape[3]
    KEYS: gl.constexpr = args.k_smem.shape[3]
    D: gl.constexpr = args.k_smem.shape[4]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    tile = args.tile(gl.program_id(0))
    blocks = args.S // ROWS
    c = ConsumerTile(
        WHICH=WHICH, args=args, key=tile.key + WHICH * KEYS, begin=tile.begin,
        part=tile.head * blocks * 2 + WHICH,
    )  # fmt: skip
    dk, dv = gl.zeros((KEYS, D), gl.float32, OUT), gl.zeros((KEYS, D), gl.float32, OUT)
    mbarrier.wait(args.k_full.index(0), 0)
    mbarrier.wait(args.v_full.index(0), 0)
    begin = tile.begin
    if args.CAUSAL:
        # The first block that needs no mask. It is computed from the keys. At D = 64 begin + 1 would make a loop of one
        # step, which the compiler unrolls. Then ptxas may have too few registers for asynchronous wgmma, and waits
        # after each one (its remark C7511).
        whole = gl.cdiv(tile.key + 2 * KEYS - 1, ROWS)
        dk, dv = main_loop(c, dk, dv, begin, whole, LAYOUT, True)
        begin = whole
    dk, dv = main_loop(c, dk, dv, begin, blocks, LAYOUT, False)
    zero = opaque_zero(blocks)
    # dK and dV go where K and V were. This half of V is read by this consumer alone; K is read by both.
    mbarrier.arrive(args.k_read.index(0))
    as_matrix(args.v_smem.index(WHICH + zero)).store(dv.to(args.v_smem.dtype))
    mbarrier.wait(args.k_read.index(0), 0)
    as_matrix(args.k_smem.index(WHICH + zero)).store((dk * (args.scale_log2 * LN2)).to(args.k_smem.dtype))
    fence_async_shared()
    mbarrier.arrive(args.stored.index(0))


@gluon.jit(do_not_specialize=["S", "heads", "H", "heads_at_once"])
def backward_kernel(
    q_desc, do_desc, start_desc, delta_desc,  # of [B, H, S, D] twice, [B H, S] twice
    k_desc, v_desc, dk_desc, dv_desc,  # of [B, H, S, D]
    sum_ptr,  # dQ's sum, fp32 [B H S D]
    scale_log2, S, heads, H, heads_at_once, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], q_desc.dtype)
    args = PartitionArgs(
        q_smem=allocate_stages(q_desc, STAGES), do_smem=allocate_stages(do_desc, STAGES),
        start_smem=allocate_stages(start_desc, STAGES), delta_smem=allocate_stages(delta_desc, STAGES),
        k_smem=allocate_stages(k_desc, 2), v_smem=allocate_stages(v_desc, 2),
        ds_smem=gl.allocate_shared_memory(q_desc.dtype, [4, KEYS, ROWS], LAYOUT),
        q_full=allocate_barriers(STAGES, 1), do_full=allocate_barriers(STAGES, 1), empty=allocate_barriers(STAGES, 2),
        k_full=allocate_barriers(1, 1), v_full=allocate_barriers(1, 1), ds_full=allocate_barriers(2, 2),
        k_read=allocate_barriers(1, 2), stored=allocate_barriers(1, 2),
        sum_ptr=sum_ptr,
        scale_log2=scale_log2, S=S, heads=heads, H=H, heads_at_once=heads_at_once, CAUSAL=CAUSAL,
    )  # fmt: skip
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
def five_matmuls(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """dq, dk, dv [B, H, S, D] of attention. fp16 or bf16, D of 64 or 128, S a multiple of 128, no window."""
    scale = expect_plain_gradient(grad_out, q, k, v, out, lse, causal, window, scale)
    (B, H, S, D), block = q.shape, 8192 // q.shape[3]  # block: 64 x 64 elements of dQ for each consumer
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    start, delta, total = (torch.empty(B * H, S * n, device=q.device) for n in (1, 1, D))
    prepare_kernel[(B * H * S // 32,)](
        out, grad_out, lse, start, delta, total, out.stride(), grad_out.stride(), scale, H, S, 32, D
    )
    # Causal: a few heads at a time, so that long and short tiles run side by side. 16 if what 32 heads share
    # fits into 25 MiB, less than half of the L2 of an H200. That is 8 S D bytes of Q, dO and the sum of dQ for a head,
    # so S D <= 102400. Otherwise 8.
    backward_kernel[(S // (2 * KEYS) * B * H,)](
        *(tensor_descriptor(t, [1, 1, block, D]) for t in (q, grad_out)),
        *(tensor_descriptor(t, [1, block], swizzled=False) for t in (start, delta)),
        *(tensor_descriptor(t, [1, 1, KEYS, D]) for t in (k, v, dk, dv)),
        total,
        scale_log2=scale * LOG2E.value, S=S, heads=B * H, H=H, heads_at_once=min(B * H, 16 if S * D <= 102400 else 8),
        CAUSAL=causal, STAGES=STAGES, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    finish_kernel[(B * H * S * D // 4096,)](dq, total, dq.stride(), scale, H, S, D, launch_pdl=True)
    return dq, dk, dv
