"""Attention, backward, for Hopper: five matmuls, dQ added up by TMA (16 bits, D up to 128, windows).

After FlashAttention-3 (Shah et al. 2024, appendix B.1). The idea: each pair of a query block and a key block computes S
and dP once, and all three gradients use them. A CTA owns a tile of 128 keys of one head of K and V, and so dK and dV of
these keys. It loops over the blocks of queries that see the tile, of all query heads that share it. Each of its two
consumer warpgroups has 64 of the keys. One step, in all of it transposed:

    S^T  = K Q^T       P^T  = exp(scale S^T - lse)
    dP^T = V dO^T      dS^T = P^T * (dP^T - delta)
    dV  += P^T dO      in registers: the consumer's own 64 keys
    dK  += dS^T Q      in registers
    dQ   = dS K        over all 128 keys: needs the other consumer's dS too, and all CTAs add to the same dQ

    producer    loads K and V of a tile, and a ring of Q and dO with lse and delta of their rows; stores dK and dV
    consumers   write dS to shared memory, meet at a barrier, and each computes half of dQ with all 128 keys
    TMA         adds dQ to a sum in fp32 in global memory; the order varies, so dQ may differ in its last bits

Shared memory: K and V [TILES * 2 consumers, 64, D], Q and dO [STAGES, ROWS, D], dS [buffers * 2 consumers, 64, ROWS],
and a part of dQ's sum for each consumer. ROWS is 64 if D = 128, and 128 if D <= 64: 64 x 64 elements of dQ for each
consumer. TILES is 2 where there is room: D <= 64 without PING_PONG. Then K and V of the next tile come under the last
steps of this one.

Heads of 72 to 96 lie in tiles of 128 columns, as TMA copies powers of two, but 96 columns are multiplied: one matmul
takes 64, another 32. Of dQ consumer 1 has the 32. Counted, cycles of a step:

                                       128 columns    96
    tensor cores                       2560           1920
    shared memory, 128 bytes a cycle   2944           2368    wgmma's operands, dS, dQ's parts, TMA

PING_PONG: with a barrier in each step both consumers would compute exponentials at the same time, and issue no matmul.
So they take turns at the exponentials. dQ is computed one step late, after the barrier of the step before.

Before it, prepare_kernel computes lse and delta of each row in the form that is added, and clears the sum. After it,
finish_kernel scales the sum to dQ.
"""

import triton
import triton.language as tl
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
    exp2,
    operand_a,
    ring_slot,
    tanh,
    tensor_descriptor,
    tile_counter,
    tile_order,
    tma_reduce_add,
)
from course_ops.kernels.attention_tiles import LN2, even_groups, heads_in_l2, hopper_takes, load_tile, score_scales
from course_ops.kernels.sequences import (
    Sequences,
    coordinates,
    place_of,
    ragged_descriptor,
    records,
    sequence_of_tile,
    skip_rows,
    unit_of_work,
    whole_descriptor,
)
from course_ops.versions import async_load, async_store

KEYS, STAGES = 64, 2  # keys of a warpgroup, blocks of Q and dO in the ring


# A row's two values, negative because they are added: lse, in units of what it is added to, and delta = rowsum(dO * O).
# A row that sees no key, or is past the last one, gets -1e30, so that its P are 0. sum_ptr may be None. This kernel
# and finish_kernel go from the last head to the first: what was written last is still in L2.
@triton.jit
def prepare_kernel(
    out, dout, lse_ptr, starts_ptr, deltas_ptr, sum_ptr,  # [B, H, S_q, D_v] twice, [B, H, S_q]; [B H, rows] twice, dQ's
    out_strides, dout_strides, unit, H, S_q, rows, D_v,
    cu_ptr, B,  # None, or of B packed sequences
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    tiles, nth = rows // BLOCK_M, tl.num_programs(0) - 1 - tl.program_id(0)
    head, row = (nth // tiles).to(tl.int64), nth % tiles * BLOCK_M
    end = S_q
    if cu_ptr is not None:
        begin, end, row, line, stored = padded_row(cu_ptr, B, H, head, row, ROWS)
        if row >= stored:
            return
        out, dout, lse_ptr = skip_rows(out, out_strides, begin), skip_rows(dout, dout_strides, begin), lse_ptr + begin
    o_tile = load_tile(out, out_strides, head // H, head % H, row, end, D_v, BLOCK_M, BLOCK_D, False)
    do_tile = load_tile(dout, dout_strides, head // H, head % H, row, end, D_v, BLOCK_M, BLOCK_D, False)
    at = row + tl.arange(0, BLOCK_M)
    lse = tl.load(lse_ptr + head * S_q + at, mask=at < end, other=float("-inf"))
    if cu_ptr is None:
        line = head * rows
    tl.store(starts_ptr + line + at, tl.where(lse == float("-inf"), -1e30, -lse / unit))
    tl.store(deltas_ptr + line + at, -tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), axis=1))
    if sum_ptr is not None:
        if COLUMNS > BLOCK_D:  # D is longer than D_v
            nth = tl.arange(0, BLOCK_M * 64)
            for part in tl.static_range(COLUMNS // 64):
                tl.store(
                    sum_ptr + (line + row) * COLUMNS + part * BLOCK_M * 64 + nth, tl.zeros([BLOCK_M * 64], tl.float32)
                )  # fmt: skip
        else:
            inside, nth = None, tl.arange(0, BLOCK_M * BLOCK_D)
            if COLUMNS < BLOCK_D:  # a tile has the size of one part of the sum, and each second part is a short one
                inside = (row % 64 == 0) | (nth < 64 * (COLUMNS - 64))
            tl.store(
                sum_ptr + (line + row) * BLOCK_D + nth, tl.zeros([BLOCK_M * BLOCK_D], tl.float32), mask=inside
            )  # fmt: skip


# Packed sequences have their values and sums in blocks of their own, in the order sequence, head, block. Of a sequence
# without queries there is a block, too, as a tile has at least one step.
@triton.jit
def padded_row(cu_ptr, B, H, head, row, ROWS: tl.constexpr):
    """Of a row of a head among all blocks of ROWS: its sequence's first row and length, the row there, where the head's
    rows begin in values and sums, and how many these are with padding."""
    b, begin, length, first = sequence_of_tile(cu_ptr, B, row // ROWS, ROWS)
    stored = tl.cdiv(tl.maximum(length, 1), ROWS) * ROWS
    line = (begin // ROWS + b).to(tl.int64) * H * ROWS + head * stored
    return begin, length, first + row % ROWS, line, stored


# dQ's sum lies in parts of 64 x 64. A part is in the order of a warpgroup's registers, so that adding is contiguous:
# warp (4), column block (8), thread (8 x 4), then the thread's 4 elements of that block. These are in 2 rows, 8 apart,
# and 2 columns. With 96 columns each second part is 64 x 32, in the first half of its place. With 192 columns each
# third part is two of 64 x 32.
@triton.jit
def finish_kernel(
    dq, sum_ptr, dq_strides, scale, H, S_q, rows, D, cu_ptr, B, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    gdc_wait()
    parts, nth = rows // 64 * (BLOCK_D // 64), tl.num_programs(0) - 1 - tl.program_id(0)
    head, part = (nth // parts).to(tl.int64), nth % parts
    first = head * parts
    if cu_ptr is not None:
        begin, S_q, row, line, _ = padded_row(
            cu_ptr, B, H, head, part // (BLOCK_D // 64) * 64, 64 if BLOCK_D > 64 else 128
        )
        if row >= S_q:
            return
        first, part = line // 64 * (BLOCK_D // 64), row // 64 * (BLOCK_D // 64) + part % (BLOCK_D // 64)
        dq = skip_rows(dq, dq_strides, begin)
    at, inside = tl.arange(0, 4096), None
    if COLUMNS < BLOCK_D:
        of_warp = tl.where(part % 2 == 0, 1024, 16 * (COLUMNS - 64))  # values
        at, inside = at // 1024 * of_warp + at % 1024, at % 1024 < of_warp
    if BLOCK_D == 192:
        halves = at // 512 % 2 * 2048 + at // 1024 * 512 + at % 512
        at = tl.where(part % 3 == 2, halves, at)
    x = tl.load(sum_ptr + (first + part) * 4096 + at, mask=inside).reshape(4, 8, 8, 4, 2, 2)
    x = x.permute(0, 4, 2, 1, 3, 5).reshape(64, 64) * scale
    at = part // (BLOCK_D // 64) * 64 + tl.arange(0, 64)[:, None]
    cols = part % (BLOCK_D // 64) * 64 + tl.arange(0, 64)[None, :]
    ptrs = dq + head // H * dq_strides[0] + head % H * dq_strides[1] + at.to(tl.int64) * dq_strides[2]
    tl.store(ptrs + cols.to(tl.int64) * dq_strides[3], x.to(dq.dtype.element_ty), mask=(at < S_q) & (cols < D))


@aggregate
class Problem:
    """Sizes, and which tile is which. CAUSAL: the first keys are seen by most queries, so they come first.

    If sequences are packed, a kernel has a Problem with the sums over all of them, and one of each tile's sequence.
    """

    tiles: gl.tensor  # of a head of K and V
    H_kv: gl.tensor
    all_heads: gl.tensor  # B * H_kv
    heads_at_once: gl.tensor
    S_q: gl.tensor
    S_k: gl.tensor
    window: gl.tensor | gl.constexpr  # None, or how many keys a query sees
    CAUSAL: gl.constexpr
    records_ptr: gl.tensor | gl.constexpr  # None, or of packed sequences (sequences.records)
    q_end: gl.tensor | gl.constexpr  # None, or where the tile's sequence ends among all rows
    k_end: gl.tensor | gl.constexpr
    number: gl.tensor | gl.constexpr  # None, or the sequence's

    @gluon.jit
    def num_tiles(self):
        return self.tiles * self.all_heads

    @gluon.jit
    def work(self, index):
        return unit_of_work(self.records_ptr, index, self.tiles, self.H_kv)

    @gluon.jit
    def blocks(self, ROWS: gl.constexpr):
        """Blocks of queries. A sequence without queries has one, which adds nothing: each tile has a step."""
        S_q = self.S_q
        if self.q_end is not None:
            S_q = max(1, S_q)
        return (S_q + ROWS - 1) // ROWS

    @gluon.jit
    def blocks_before(self, batch, head, blocks, GROUP: gl.constexpr, ROWS: gl.constexpr):
        """Blocks of rows' values, and of dQ's sum, before those of a query head."""
        if self.q_end is None:
            return (batch * self.H_kv * GROUP + head) * blocks
        else:
            return ((self.q_end - self.S_q) // ROWS + self.number) * self.H_kv * GROUP + head * blocks

    @gluon.jit
    def tile(self, index, ROWS: gl.constexpr, KEYS: gl.constexpr):
        """The index-th tile: its batch, its head and the first of its 2 * KEYS keys, then four blocks of queries.

        These are the first block that sees a key of the tile, the first that needs no mask, the next that does, and
        the end.
        """
        blocks = self.blocks(ROWS)
        if self.CAUSAL:
            head, rank = tile_order(index, self.tiles, self.all_heads, self.heads_at_once)
            key = rank * 2 * KEYS
            begin = min(blocks, max(0, key + self.S_q - self.S_k) // ROWS)
            whole = min(blocks, (max(0, key + 2 * KEYS - 1 + self.S_q - self.S_k) + ROWS - 1) // ROWS)
        else:
            head, key, begin = index // self.tiles, index % self.tiles * 2 * KEYS, 0
            whole = blocks if key + 2 * KEYS > self.S_k else 0
        last, end = blocks, blocks
        if self.window is not None:  # a tile that no query sees has a step, too
            ahead = key + self.S_q - self.S_k + self.window
            end = min(blocks, max(begin + 1, (max(0, ahead + 2 * KEYS - 1) + ROWS - 1) // ROWS))
            whole, last = min(whole, end), self.first_past(key, end, ROWS)
        return head // self.H_kv, head % self.H_kv, key, begin, whole, last, end

    @gluon.jit
    def own_blocks(self, key, end, ROWS: gl.constexpr, KEYS: gl.constexpr):
        """Of a warpgroup's own KEYS keys: the first block that sees one of them, the first that needs no mask, and the
        next one that does."""
        ahead, last = key + self.S_q - self.S_k, end
        if self.window is not None:
            last = self.first_past(key, end, ROWS)
        return min(end, max(0, ahead) // ROWS), min(end, (max(0, ahead + KEYS - 1) + ROWS - 1) // ROWS), last

    @gluon.jit
    def first_past(self, key, end, ROWS: gl.constexpr):
        """The first block with a query whose window begins after `key`."""
        return min(end, max(0, key + self.S_q - self.S_k + self.window) // ROWS)


@gluon.jit
def problem_of(problem, work):
    """The problem that a unit of work belongs to, and its index there."""
    if problem.records_ptr is None:
        return problem, work[0]
    else:
        index, k_end, S_k, q_end, S_q, first, tiles, number = work
        of_sequence = Problem(
            tiles=tiles, H_kv=problem.H_kv, all_heads=problem.all_heads, heads_at_once=problem.heads_at_once, S_q=S_q,
            S_k=S_k, window=problem.window, CAUSAL=problem.CAUSAL, records_ptr=problem.records_ptr, q_end=q_end,
            k_end=k_end, number=number,
        )  # fmt: skip
        return of_sequence, index - first


@aggregate
class PartitionArgs:
    """What all warps of a CTA share."""

    q_smem: gl.shared_memory_descriptor  # [STAGES, 1, 1, ROWS, D]
    do_smem: gl.shared_memory_descriptor
    start_smem: gl.shared_memory_descriptor  # [STAGES, 1, ROWS] fp32: -lse
    delta_smem: gl.shared_memory_descriptor  # -delta
    k_smem: gl.shared_memory_descriptor  # [TILES * 2, 1, 1, KEYS, D], a consumer's half each; at a tile's end dK
    v_smem: gl.shared_memory_descriptor  # at a tile's end dV
    ds_smem: gl.shared_memory_descriptor  # [buffers * 2, KEYS, ROWS], by step and by consumer
    q_full: gl.shared_memory_descriptor  # with -lse
    do_full: gl.shared_memory_descriptor  # with -delta
    empty: gl.shared_memory_descriptor  # both consumers have read Q and dO of a stage
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    met: gl.shared_memory_descriptor  # both consumers have written dS of a step
    k_read: gl.shared_memory_descriptor  # both consumers have read K for the last time
    stored: gl.shared_memory_descriptor  # both consumers have written dK and dV over K and V
    turn: gl.shared_memory_descriptor | gl.constexpr  # None, or if PING_PONG a consumer's turn at exponentials
    sum_desc: tma.tensor_descriptor  # of dQ's sum, [parts * 64, 64] fp32
    sum_smem: gl.shared_memory_descriptor  # [2, 64, 64], a part of each consumer
    rest_desc: tma.tensor_descriptor | gl.constexpr  # None, or of short parts, [.., 64] in blocks of 32
    scheduler: TileScheduler
    problem: Problem
    scale_log2: gl.tensor
    cap_scale: gl.tensor | gl.constexpr  # None without a softcap, see score_scales
    GROUP: gl.constexpr  # query heads that share a head of K and V
    PING_PONG: gl.constexpr
    COLUMNS: gl.constexpr  # that are multiplied; the tiles' others are zeros


@aggregate
class RowBlocks:
    """Q or dO, and a value for each of their rows, as the producer loads them."""

    desc: tma.tensor_descriptor
    values_desc: tma.tensor_descriptor
    smem: gl.shared_memory_descriptor
    values_smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor

    @gluon.jit
    def load(self, stage, where, head, row, line, column):
        """A block from `row` on, and its rows' values from `column` on in a line of theirs. where: see coordinates."""
        mbarrier.expect(self.full.index(stage), self.desc.block_type.nbytes + self.values_desc.block_type.nbytes)
        async_load(
            self.desc, coordinates(where, head, row, 0), self.full.index(stage), self.smem.index(stage)
        )  # fmt: skip
        async_load(
            self.values_desc, [line, column], self.full.index(stage), self.values_smem.index(stage)
        )  # fmt: skip


# The producer stores dK and dV, too: the consumers have no registers to spare for addresses. A tile's K and V are
# loaded over the dK and dV of the tile before, but its first block of queries need not wait for that store. With two
# TILES in shared memory they are loaded over those of two tiles before. The tile before is stored when as many blocks
# are loaded as the ring holds: then the consumers have no more steps of it.
@gluon.jit
def producer_partition(args, descs):
    q_desc, do_desc, start_desc, delta_desc, k_desc, v_desc, dk_desc, dv_desc = descs
    GROUP: gl.constexpr = args.GROUP
    ROWS: gl.constexpr = q_desc.block_type.shape[-2]
    KEYS: gl.constexpr = k_desc.block_type.shape[-2]
    TILES: gl.constexpr = args.k_full.shape[0]
    q = RowBlocks(
        desc=q_desc, values_desc=start_desc, smem=args.q_smem, values_smem=args.start_smem, full=args.q_full
    )  # fmt: skip
    do = RowBlocks(
        desc=do_desc, values_desc=delta_desc, smem=args.do_smem, values_smem=args.delta_smem, full=args.do_full
    )  # fmt: skip
    gdc_wait()
    gdc_launch_dependents()
    step, count, index = 0, 0, gl.program_id(0)
    before = 0, 0, 0
    if args.problem.records_ptr is not None:
        before = 0, 0, 0, 0  # a sequence without rows: a CTA without a tile stores nothing
    while index < args.problem.num_tiles():
        args.scheduler.publish(index, count)
        problem, within = problem_of(args.problem, args.problem.work(index))
        batch, head_kv, key, begin, _whole, _last, end = problem.tile(within, ROWS, KEYS)
        queries, keys = place_of(batch, problem.q_end, problem.S_q), place_of(batch, problem.k_end, problem.S_k)
        first, last_before_store = step, step + min((end - begin) * GROUP, args.q_full.shape[0]) - 1
        for head in range(head_kv * GROUP, head_kv * GROUP + GROUP):
            line = batch * problem.H_kv * GROUP + head
            if problem.q_end is not None:  # values lie in lines of a block each
                line = problem.blocks_before(batch, head, problem.blocks(ROWS), GROUP, ROWS)
            for block in range(begin, end):
                stage, parity = ring_slot(step, args.q_full.shape[0])
                mbarrier.wait(args.empty.index(stage), parity ^ 1)
                if problem.q_end is None:
                    q.load(stage, queries, head, block * ROWS, line, block * ROWS)
                    do.load(stage, queries, head, block * ROWS, line, block * ROWS)
                else:
                    q.load(stage, queries, head, block * ROWS, line + block, 0)
                    do.load(stage, queries, head, block * ROWS, line + block, 0)
                if step == first:
                    if TILES == 1 and count > 0:
                        store_tile(args, dk_desc, dv_desc, count - 1, before)
                    load_halves(k_desc, args.k_smem, args.k_full, count, keys, head_kv, key)
                    load_halves(v_desc, args.v_smem, args.v_full, count, keys, head_kv, key)
                if TILES == 2 and count > 0 and step == last_before_store:
                    store_tile(args, dk_desc, dv_desc, count - 1, before)
                step += 1
        before = (batch, head_kv, key) if problem.q_end is None else (keys[0], keys[1], head_kv, key)
        count += 1
        index = args.scheduler.fetch(args.problem.num_tiles())
    args.scheduler.publish(index, count)
    store_tile(args, dk_desc, dv_desc, count - 1, before)


@gluon.jit
def store_tile(args, dk_desc, dv_desc, count, before):
    if len(before) == 3:
        where, head_kv, key = (before[0],), before[1], before[2]
    else:
        where, head_kv, key = (before[0], before[1]), before[2], before[3]
    mbarrier.wait(args.stored.index(0), count & 1)
    at, _ = ring_slot(count, args.k_full.shape[0])
    for half in gl.static_range(2):
        coord = coordinates(where, head_kv, key + half * args.k_smem.shape[-2], 0)
        async_store(dk_desc, coord, args.k_smem.index(at * 2 + half))
        async_store(dv_desc, coord, args.v_smem.index(at * 2 + half))
    tma.store_wait(0)


@gluon.jit
def load_halves(desc, smem, full, count, where, head, row):
    at, _ = ring_slot(count, full.shape[0])
    mbarrier.expect(full.index(at), 2 * desc.block_type.nbytes)
    for half in gl.static_range(2):
        coord = coordinates(where, head, row + half * desc.block_type.shape[-2], 0)
        async_load(desc, coord, full.index(at), smem.index(at * 2 + half))


# An accumulator may begin with -lse (as a score) or -delta of each query instead of 0. Then P is
# 2^(scale_log2 S') and dS = P dP'. The rows' values need no registers while the accumulators of S^T and dP^T are in
# use.
@gluon.jit
def issue_scores(keys, queries, values, LAYOUT: gl.constexpr, COLUMNS: gl.constexpr):
    """Issue S^T = K Q^T or dP^T = V dO^T [keys, queries], plus the queries' values, if there are any. This is as many
    matmuls as a sum has parts."""
    KEYS: gl.constexpr = keys.shape[0]
    ROWS: gl.constexpr = queries.shape[0]
    start = gl.zeros((KEYS, ROWS), gl.float32, LAYOUT)
    if values is not None:
        start = values.load(LAYOUT).broadcast_to((KEYS, ROWS))
    if keys.shape[1] == COLUMNS:
        return warpgroup_mma(keys, queries.permute((1, 0)), start, use_acc=values is not None, is_async=True)
    else:
        REST: gl.constexpr = COLUMNS - 64
        k, q = keys.slice(0, 64, dim=1), queries.slice(0, 64, dim=1)
        s = warpgroup_mma(k, q.permute((1, 0)), start, use_acc=values is not None, is_async=True)
        k, q = keys.slice(64, REST, dim=1), queries.slice(64, REST, dim=1)
        return warpgroup_mma(k, q.permute((1, 0)), s, is_async=True)


# dK and dV of a consumer: one part, or if 96 of 128 columns are in use one of 64 and one of 32.
@gluon.jit
def zero_sums(KEYS: gl.constexpr, D: gl.constexpr, COLUMNS: gl.constexpr):
    if COLUMNS == D:
        return (gl.zeros((KEYS, D), gl.float32, accumulator(D)),)
    else:
        REST: gl.constexpr = COLUMNS - 64
        first = gl.zeros((KEYS, 64), gl.float32, accumulator(64))
        return (first, gl.zeros((KEYS, REST), gl.float32, accumulator(REST)))


@gluon.jit
def issue_sums(left, right, sums):
    """Issue sums += left times right [queries, columns], a matmul for each part."""
    if len(sums) == 1:
        return (warpgroup_mma(left, right, sums[0], is_async=True),)
    else:
        first = warpgroup_mma(left, right.slice(0, 64, dim=1), sums[0], is_async=True)
        rest = right.slice(64, sums[1].shape[1], dim=1)
        return (first, warpgroup_mma(left, rest, sums[1], is_async=True))


@gluon.jit
def wait_for(PENDING: gl.constexpr, sums, others):
    """Wait until all but the last PENDING matmuls are done: `sums` and `others`, tuples, as they are then."""
    found = warpgroup_mma_wait(PENDING, deps=sums + others)
    return found[: len(sums)], found[len(sums) :]


@gluon.jit
def store_sums(smem, sums):
    if len(sums) == 1:
        smem.store(sums[0].to(smem.dtype))
    else:
        smem.slice(0, 64, dim=1).store(sums[0].to(smem.dtype))
        smem.slice(64, sums[1].shape[1], dim=1).store(sums[1].to(smem.dtype))


@gluon.jit
def scaled(sums, scale):
    return (sums[0] * scale,) if len(sums) == 1 else (sums[0] * scale, sums[1] * scale)


# A zero that the compiler cannot know. Without it, the compiler computes the addresses of K and V in shared memory
# before the loop and keeps them, also between tiles: 16 registers of wgmma's descriptors.
@gluon.jit
def opaque_zero(x):
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], gl.int32, False, 1)


# Both consumers' dS times all 128 keys, for a part of the step's dQ. It is 64 queries x 64 columns of D if D is 128, of
# 96 columns 64 and 32, and else 64 of 128 queries. The matmul reads dS [keys, queries] as its transpose.
@gluon.jit
def issue_dq(args, buffer, zero, WHICH: gl.constexpr, HALVES: gl.constexpr = 2):
    COLUMNS: gl.constexpr = args.COLUMNS - 64 if WHICH == 1 and args.COLUMNS > 64 else 64
    dq = gl.zeros((64, COLUMNS), gl.float32, accumulator(COLUMNS))
    for half in gl.static_range(HALVES):
        ds, k = args.ds_smem.index(buffer + half), as_matrix(args.k_smem.index(half + zero))
        if k.shape[1] == 128:
            k = k.slice(WHICH * 64, COLUMNS, dim=1)
        else:
            ds = ds.slice(WHICH * 64, 64, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=half > 0, is_async=True)
    return dq


@gluon.jit
def add_dq(args, dq, part, WHICH: gl.constexpr):
    """Add a consumer's dQ [64, 64 or 32] to a part of the sum, in the order of its registers."""
    COLUMNS: gl.constexpr = dq.shape[1]
    x = dq.reshape((4, 2, 8, COLUMNS // 8, 4, 2)).permute((0, 3, 2, 4, 1, 5))
    smem, desc = args.sum_smem.index(WHICH), args.sum_desc
    if COLUMNS < 64:
        smem, desc = smem.slice(0, COLUMNS), args.rest_desc
    tma.store_wait(0)  # TMA has read what it added a step ago
    smem.store(x.reshape((COLUMNS, 64)))
    fence_async_shared()
    tma_reduce_add(desc, [part * 64, 0], smem)


# Steps alternate between two buffers. A consumer that has arrived at a step's barrier has multiplied the dS of the step
# before. So both consumers have read what is overwritten next. With PING_PONG dQ is a step late, and buffers are three.
@gluon.jit
def share_ds(args, ds, buffer, met, WHICH: gl.constexpr):
    args.ds_smem.index(buffer + WHICH).store(ds)
    fence_async_shared()
    mbarrier.arrive(met)


@gluon.jit
def probabilities(s, starts, c, row, MASKED: gl.constexpr):
    """P^T [keys, queries] of S^T that has begun with `starts` (None), or has not; row: the block's first one. And what
    dP - delta is multiplied by: P^T, or with a softcap P^T times tanh's derivative, 1 - tanh^2."""
    scale_log2, key = c.args.scale_log2, c.key
    if c.args.cap_scale is not None:
        s = tanh(s * c.args.cap_scale)
    p = exp2(s * scale_log2 if starts is None else s * scale_log2 + starts)
    if MASKED:
        S_q, S_k = c.problem.S_q, c.problem.S_k
        keys = gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, s.type.layout))[:, None]
        if c.problem.CAUSAL:  # this includes the tail: a query that sees keys past S_k is past S_q
            rows = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))[None, :]
            p = gl.where(keys <= rows + (row + S_k - S_q - key), p, 0.0)
            if c.problem.window is not None:
                p = gl.where(keys > rows + (row + S_k - S_q - key - c.problem.window), p, 0.0)
        else:
            p = gl.where(keys < S_k - key, p, 0.0)
    return p, p if c.args.cap_scale is None else p * (1 - s * s)


@aggregate
class ConsumerTile:
    """A consumer warpgroup's share of a tile: 64 keys."""

    WHICH: gl.constexpr
    args: PartitionArgs
    problem: Problem
    first: gl.tensor  # the ring's step of the tile's first block of queries
    end: gl.tensor  # the step after its last one
    key: gl.tensor  # the first key
    half: gl.tensor | gl.constexpr  # None, or of two TILES in shared memory the first half of this one
    begin: gl.tensor | gl.constexpr  # each head's first block of queries, if GROUP > 1
    unseen: gl.tensor | gl.constexpr  # if there is a window, each head's blocks before the first and after the last one

    @gluon.jit
    def slot_after(self, step):
        return ring_slot(step + 1, self.args.q_full.shape[0])


@gluon.jit
def first_half(c, step):
    """Where the tile's K and V begin in shared memory, by an opaque zero."""
    half = opaque_zero(step)
    if c.half is not None:
        half += c.half
    return half


@gluon.jit
def issue_first_scores(c, step, zero, LAYOUT: gl.constexpr):
    """Issue S^T of a step when its Q has come."""
    args = c.args
    stage, parity = ring_slot(step, args.q_smem.shape[0])
    mbarrier.wait(args.q_full.index(stage), parity, pred=step < c.end)
    k, q = as_matrix(args.k_smem.index(c.WHICH + zero)), as_matrix(args.q_smem.index(stage))
    return issue_scores(k, q, first_values(args, stage), LAYOUT, args.COLUMNS)


@gluon.jit
def first_values(args, stage):
    """What S^T begins with. Under a tanh -lse cannot be added, and PING_PONG adds it later."""
    values = None  # no conditional expression: Triton 3.6 wants a tensor on both of its sides
    if not args.PING_PONG and args.cap_scale is None:
        values = args.start_smem.index(stage)
    return values


# Each matmul is issued as soon as its operands are there, and awaited when its result is needed. dP runs under the
# exponentials, dV under dS, and dK and the next S while the consumers meet. After the last step S is computed from an
# old Q and is not used: a branch around it would cost every step.
@gluon.jit
def main_loop(c, s, dk, dv, base, begin, end, part, MASKED: gl.constexpr):
    args = c.args
    WHICH: gl.constexpr = c.WHICH
    LAYOUT: gl.constexpr = s.type.layout
    part += WHICH
    for block in range(begin, end):
        step = base + block
        stage, parity = ring_slot(step, args.q_full.shape[0])
        after, parity_after = c.slot_after(step)
        zero, buffer = first_half(c, step), step % 2 * 2
        k, v = as_matrix(args.k_smem.index(WHICH + zero)), as_matrix(args.v_smem.index(WHICH + zero))
        q, do = as_matrix(args.q_smem.index(stage)), as_matrix(args.do_smem.index(stage))
        mbarrier.wait(args.do_full.index(stage), parity)
        dp = issue_scores(v, do, args.delta_smem.index(stage), LAYOUT, args.COLUMNS)
        starts = None
        if args.cap_scale is not None:
            starts = args.start_smem.index(stage).load(LAYOUT)
        p, p_capped = probabilities(s, starts, c, block * args.q_smem.shape[-2], MASKED)
        p_left = operand_a(p, dv[0], args.q_smem.dtype)
        dv = issue_sums(p_left, do, dv)
        dp = warpgroup_mma_wait(len(dv), deps=(dp,))
        ds = (p_capped * dp).to(args.q_smem.dtype)
        share_ds(args, ds, buffer, args.met.index(step % 2), WHICH)
        ds = operand_a(ds, dk[0], args.q_smem.dtype)
        dk = issue_sums(ds, q, dk)
        dv, _ = wait_for(len(dk), dv, (p_left,))
        mbarrier.wait(args.q_full.index(after), parity_after, pred=step + 1 < c.end)
        q = as_matrix(args.q_smem.index(after))
        s_after = issue_scores(k, q, first_values(args, after), LAYOUT, args.COLUMNS)
        mbarrier.wait(args.met.index(step % 2), step // 2 & 1)
        dq = issue_dq(args, buffer, zero, WHICH)
        dk, done = wait_for(0, dk, (dq, ds, s_after))
        s = done[2]
        mbarrier.arrive(args.empty.index(stage))
        add_dq(args, done[0], part + 2 * block, WHICH)
    return s, dk, dv


# As main_loop, with dQ a step late, and turns: at D = 128 for the exponentials and dS, at D = 64, where these together
# take too long, for the exponentials.
@gluon.jit
def ping_pong_loop(c, s, dk, dv, base, begin, end, part, MASKED: gl.constexpr):
    args = c.args
    WHICH: gl.constexpr = c.WHICH
    LAYOUT: gl.constexpr = s.type.layout
    BUFFERS: gl.constexpr = args.ds_smem.shape[0] // 2
    WIDE: gl.constexpr = args.q_smem.shape[-1] > 64
    part += WHICH
    for block in range(begin, end):
        step, zero = base + block, first_half(c, base + block)
        stage, parity = ring_slot(step, args.q_full.shape[0])
        after, parity_after = c.slot_after(step)
        k, v = as_matrix(args.k_smem.index(WHICH + zero)), as_matrix(args.v_smem.index(WHICH + zero))
        q, do = as_matrix(args.q_smem.index(stage)), as_matrix(args.do_smem.index(stage))
        mbarrier.wait(args.do_full.index(stage), parity)
        dp = issue_scores(v, do, None, LAYOUT, args.COLUMNS)
        # -lse is loaded here: as no load moves to before a wait, all of dP is issued before the exponentials. If S
        # began with -lse, the compiler would issue an eighth of dP every ten exponentials.
        mbarrier.wait(args.turn.index(WHICH), step & 1)
        starts = args.start_smem.index(stage).load(LAYOUT)
        p, p_capped = probabilities(s, starts, c, block * args.q_smem.shape[-2], MASKED)
        p_left = operand_a(p, dv[0], args.q_smem.dtype)
        dv = issue_sums(p_left, do, dv)
        if not WIDE:
            mbarrier.arrive(args.turn.index(1 - WHICH))
        dp = warpgroup_mma_wait(len(dv), deps=(dp,))
        ds = (p_capped * (dp + args.delta_smem.index(stage).load(LAYOUT))).to(args.q_smem.dtype)
        share_ds(args, ds, step % BUFFERS * 2, args.met.index(step % 2), WHICH)
        if WIDE:
            mbarrier.arrive(args.turn.index(1 - WHICH))
        ds = operand_a(ds, dk[0], args.q_smem.dtype)
        dk = issue_sums(ds, q, dk)
        dv, _ = wait_for(len(dk), dv, (p_left,))
        mbarrier.wait(args.met.index((step + 1) % 2), (step - 1) // 2 & 1, pred=step > c.first)
        dq = issue_dq(args, (step + BUFFERS - 1) % BUFFERS * 2, zero, WHICH)
        mbarrier.wait(args.q_full.index(after), parity_after, pred=step + 1 < c.end)
        s_after = issue_scores(k, as_matrix(args.q_smem.index(after)), None, LAYOUT, args.COLUMNS)
        dk, done = wait_for(len(dk), dk, (dq, ds))
        mbarrier.arrive(args.empty.index(stage))
        if step > c.first:
            # At a head's first block the late dQ belongs to the head before.
            skipped = 2 * c.begin if MASKED and c.begin is not None and block == c.begin else 0
            if c.unseen is not None and c.begin is not None:
                skipped = 2 * c.unseen if block == c.begin else 0
            add_dq(args, done[0], part + 2 * block - 2 - skipped, WHICH)
        s = warpgroup_mma_wait(0, deps=(s_after,))
    return s, dk, dv


# Causal, D = 128: a tile's upper 64 keys may come after all 64 queries of its first step, of no other step. Then P and
# dS of consumer 1 are 0: it shares zeros, and what remains are its half of dQ, from the other's dS, and the next S. As
# this is before the loop, not a branch in it, no other step pays for it.
@gluon.jit
def unseen_block(c, part, step, LAYOUT: gl.constexpr):
    """Consumer 1's step with a block that sees none of its keys: returns S^T of the next."""
    args = c.args
    KEYS: gl.constexpr = args.ds_smem.shape[1]
    ROWS: gl.constexpr = args.ds_smem.shape[2]
    buffer, zero = step % (args.ds_smem.shape[0] // 2) * 2, first_half(c, step)
    stage, parity = ring_slot(step, args.q_full.shape[0])
    mbarrier.wait(args.q_full.index(stage), parity)  # released earlier, it would count for the block before
    if args.PING_PONG:
        mbarrier.wait(args.turn.index(1), step & 1)
    share_ds(args, gl.zeros((KEYS, ROWS), args.ds_smem.dtype, LAYOUT), buffer, args.met.index(step % 2), 1)
    if args.PING_PONG:
        mbarrier.arrive(args.turn.index(0))
    s = issue_first_scores(c, step + 1, zero, LAYOUT)
    if args.PING_PONG:
        s = warpgroup_mma_wait(0, deps=(s,))
    else:
        mbarrier.wait(args.met.index(step % 2), step // 2 & 1)
        dq, s = warpgroup_mma_wait(0, deps=(issue_dq(args, buffer, zero, 1, HALVES=1), s))
        add_dq(args, dq, part, 1)
    mbarrier.arrive(args.empty.index(stage))
    return s


@gluon.jit
def consumer_partition(args, WHICH: gl.constexpr):
    GROUP: gl.constexpr = args.GROUP
    PING_PONG: gl.constexpr = args.PING_PONG
    ROWS: gl.constexpr = args.q_smem.shape[-2]
    KEYS: gl.constexpr = args.k_smem.shape[-2]
    D: gl.constexpr = args.k_smem.shape[-1]
    LAYOUT: gl.constexpr = accumulator(ROWS)
    OWN: gl.constexpr = args.problem.CAUSAL and ROWS == KEYS and (GROUP == 1 or not PING_PONG)  # see unseen_block
    LOOP: gl.constexpr = ping_pong_loop if PING_PONG else main_loop
    TILES: gl.constexpr = args.k_full.shape[0]
    first, count, work = 0, 0, args.problem.work(args.scheduler.receive(0))
    while work[0] < args.problem.num_tiles():
        problem, index = problem_of(args.problem, work)
        batch, head_kv, key, begin, whole, last, stop = problem.tile(index, ROWS, KEYS)
        key += WHICH * KEYS
        end = first + (stop - begin) * GROUP  # at least one step: some query sees a tile's first key
        own, half = begin, None
        if TILES == 2:
            half = count % 2 * 2
        if OWN:
            own, whole, last = problem.own_blocks(key, stop, ROWS, KEYS)
        blocks, unseen = stop, None
        if problem.window is not None:
            blocks = problem.blocks(ROWS)
            unseen = blocks - stop + begin
        c = ConsumerTile(
            WHICH=WHICH, args=args, problem=problem, first=first, end=end, key=key, half=half,
            begin=begin if GROUP > 1 else None, unseen=unseen,
        )  # fmt: skip
        dk, dv = zero_sums(KEYS, D, args.COLUMNS), zero_sums(KEYS, D, args.COLUMNS)
        at, parity = ring_slot(count, TILES)
        mbarrier.wait(args.k_full.index(at), parity)
        s = gl.zeros((KEYS, ROWS), gl.float32, LAYOUT)
        if own == begin:
            s = warpgroup_mma_wait(0, deps=(issue_first_scores(c, first, first_half(c, first), LAYOUT),))
        mbarrier.wait(args.v_full.index(at), parity)
        base, part = first - begin, problem.blocks_before(batch, head_kv * GROUP, blocks, GROUP, ROWS) * 2
        for _head in range(GROUP):
            if OWN and WHICH == 1 and own > begin:
                s = unseen_block(c, part + 2 * begin + 1, base + begin, LAYOUT)
            s, dk, dv = LOOP(c, s, dk, dv, base, own, whole, part, True)
            if problem.window is None:
                s, dk, dv = LOOP(c, s, dk, dv, base, gl.maximum(own, whole), stop, part, False)
            else:
                last = gl.maximum(gl.maximum(own, whole), last)
                s, dk, dv = LOOP(c, s, dk, dv, base, gl.maximum(own, whole), last, part, False)
                s, dk, dv = LOOP(c, s, dk, dv, base, last, stop, part, True)
            base, part = base + stop - begin, part + 2 * blocks
        zero = first_half(c, end)
        if PING_PONG:  # the last step's dQ
            mbarrier.wait(args.met.index((end - 1) % 2), (end - 1) // 2 & 1)
            dq = issue_dq(args, (end - 1) % (args.ds_smem.shape[0] // 2) * 2, zero, WHICH)
            if problem.window is not None:
                part -= 2 * (blocks - stop)
            add_dq(args, warpgroup_mma_wait(0, deps=(dq,)), part - 2 + WHICH, WHICH)
        # dK and dV go where K and V were. This half of V is read by this consumer alone; K is read by both.
        mbarrier.arrive(args.k_read.index(0))
        store_sums(as_matrix(args.v_smem.index(WHICH + zero)), dv)
        mbarrier.wait(args.k_read.index(0), count & 1)
        scale = args.scale_log2 * LN2
        if args.cap_scale is not None:
            scale *= args.cap_scale
        store_sums(as_matrix(args.k_smem.index(WHICH + zero)), scaled(dk, scale))
        fence_async_shared()
        mbarrier.arrive(args.stored.index(0))
        first = end
        count += 1
        work = args.problem.work(args.scheduler.receive(count))
    tma.store_wait(0)  # TMA still adds from shared memory, which ends with the CTA


@gluon.jit(do_not_specialize=["tiles", "H_kv", "all_heads", "heads_at_once", "S_q", "S_k", "window"])
def attention_backward_hopper_kernel(
    q_desc, do_desc, start_desc, delta_desc,  # of [B, H, S_q, D] twice, [B H, rows] twice
    k_desc, v_desc, dk_desc, dv_desc,  # of [B, H_kv, S_k, D]
    sum_desc, rest_desc,  # of dQ's sum, B H rows D elements of fp32, and None or of its short parts
    counter_ptr,  # the scheduler's
    records_ptr,  # None, or of packed sequences: S_q and S_k are totals then, and all_heads is H_kv
    scale_log2, cap_scale,  # see score_scales
    tiles, H_kv, all_heads, heads_at_once, S_q, S_k, window, GROUP: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr, PING_PONG: gl.constexpr, COLUMNS: gl.constexpr,
    TILES: gl.constexpr,  # of K and V in shared memory
):  # fmt: skip
    if records_ptr is not None:
        tiles = gl.load(records_ptr)
    ROWS: gl.constexpr = q_desc.block_type.shape[-2]
    KEYS: gl.constexpr = k_desc.block_type.shape[-2]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_smem, do_smem = allocate_stages(q_desc, STAGES), allocate_stages(do_desc, STAGES)
    start_smem, delta_smem = allocate_stages(start_desc, STAGES), allocate_stages(delta_desc, STAGES)
    k_smem, v_smem = allocate_stages(k_desc, 2 * TILES), allocate_stages(v_desc, 2 * TILES)
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [6 if PING_PONG else 4, KEYS, ROWS], LAYOUT)
    q_full, do_full, empty = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 2)
    k_full, v_full = allocate_barriers(TILES, 1), allocate_barriers(TILES, 1)
    met, k_read, stored = allocate_barriers(2, 2), allocate_barriers(1, 2), allocate_barriers(1, 2)
    turn = allocate_barriers(2, 1) if PING_PONG else None
    if PING_PONG:
        mbarrier.arrive(turn.index(0))  # consumer 0 begins
    args = PartitionArgs(
        q_smem=q_smem, do_smem=do_smem, start_smem=start_smem, delta_smem=delta_smem, k_smem=k_smem, v_smem=v_smem,
        ds_smem=ds_smem, q_full=q_full, do_full=do_full, empty=empty, k_full=k_full, v_full=v_full,
        met=met, k_read=k_read, stored=stored, turn=turn, sum_desc=sum_desc, sum_smem=allocate_stages(sum_desc, 2),
        rest_desc=rest_desc, scheduler=allocate_scheduler(counter_ptr),
        problem=Problem(
            tiles=tiles, H_kv=H_kv, all_heads=all_heads, heads_at_once=heads_at_once, S_q=S_q, S_k=S_k, window=window,
            CAUSAL=CAUSAL, records_ptr=records_ptr, q_end=None, k_end=None, number=None,
        ),
        scale_log2=scale_log2, cap_scale=cap_scale, GROUP=GROUP, PING_PONG=PING_PONG, COLUMNS=COLUMNS,
    )  # fmt: skip
    descs = q_desc, do_desc, start_desc, delta_desc, k_desc, v_desc, dk_desc, dv_desc
    gl.warp_specialize([
        (consumer_partition, (args, 0)),
        (consumer_partition, (args, 1)),
        (producer_partition, (args, descs)),
    ], [4, 1], [240, 24])  # fmt: skip


def takes(dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """What hopper_takes asks, with rows up to 128."""
    return hopper_takes(128, q, k, v, dout)


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sequences: Sequences | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [.., D] and v, out, dout [.., D_v] as in the forward, that `takes` takes -> dq as q, dk and dv as k, v.

    lse [B, H, S_q] in fp32, contiguous. dk and dv are deterministic, dq is not. Tiles are as wide as the longer rows
    need. TMA fills the shorter ones with zeros, and stores no column past their end. sequences: of rows that are
    packed, B = 1.
    """
    (B, H, S_q, D), (_, H_kv, S_k, D_v) = q.shape, v.shape
    dq, dk, dv = empty_like(q), empty_like(k), empty_like(v)
    width = 64 if max(D, D_v) <= 64 else 128
    columns = 96 if 64 < max(D, D_v) <= 96 else width  # that are multiplied
    # With few steps per tile, the late dQ's extra matmul at its end counts, and at D = 64 that K and V are waited for.
    longest = S_q if sequences is None else sequences.longest_q
    most = longest if window is None else min(longest, window + 2 * KEYS)  # queries that see a tile
    ping_pong = most > (1024 if width == 64 else 512)
    block = 8192 // width  # queries of a step: 64 x 64 elements of dQ for each consumer
    rows, tiles, group = triton.cdiv(S_q, block) * block, triton.cdiv(S_k, 2 * KEYS), H // H_kv
    listed, cu_q, count, descriptor = None, None, None, whole_descriptor
    if sequences is not None:
        listed, tiles = records(sequences.k, sequences.q, S_k, 2 * KEYS)
        cu_q, count, descriptor = sequences.q, sequences.count, ragged_descriptor
        rows = (S_q // block + count) * block
    starts, deltas, total = (empty(B * H, rows * n, device=q.device) for n in (1, 1, width))
    unit = (
        scale if not ping_pong and softcap is None else LN2.value
    )  # added to scaled scores, as powers of 2; or to scores
    prepare_kernel[(B * H * rows // 32,)](
        out, dout, lse, starts, deltas, total, out.stride(), dout.stride(), unit, H, S_q, rows, D_v, cu_q, count,
        32, width, block, columns,
    )  # fmt: skip
    # Few heads at a time, so that long and short tiles run at the same time. There are 16 if L2 holds twice what their
    # programs share: Q, dO, and twice as much of dQ. Otherwise 8. Of short heads, as many as have a tile for each SM.
    few = 16 if heads_in_l2(8 * group * longest * width, q.device) >= 32 else 8
    at_once = even_groups(B * H_kv, max(few, num_sms(q.device) // max(1, tiles)))
    values = [t if sequences is None else t.view(-1, block) for t in (starts, deltas)]
    of_rest = None
    if columns < width:
        of_rest = tensor_descriptor(total.view(-1, 64), [columns - 64, 64], swizzled=False)
    attention_backward_hopper_kernel[(min(tiles * B * H_kv, num_sms(q.device)),)](
        *(descriptor(t, block, width) for t in (q, dout)),
        *(tensor_descriptor(t, [1, block], swizzled=False) for t in values),
        *(descriptor(t, KEYS, width) for t in (k, v, dk, dv)),
        tensor_descriptor(total.view(-1, 64), [64, 64], swizzled=False), of_rest, tile_counter(q.device), listed,
        *score_scales(scale, softcap), tiles, H_kv, B * H_kv, at_once, S_q, S_k, window, group, causal, STAGES,
        ping_pong, columns, 1 if width > 64 or ping_pong else 2,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    finish_kernel[(B * H * rows * width // 4096,)](
        dq, total, dq.stride(), scale, H, S_q, rows, D, cu_q, count, width, columns, launch_pdl=True
    )
    return dq, dk, dv
