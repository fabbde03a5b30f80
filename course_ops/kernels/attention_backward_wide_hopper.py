"""Attention, backward, for Hopper and heads of 129 to 256: two kernels, seven matmuls (16 bits, windows too).

Why two kernels, and not one with five matmuls as up to D = 128? The sums of 64 keys, dK and dV [64, 256] in fp32, take
half of an SM's registers. So a CTA cannot own more keys, and L2 has to serve many bytes for each of them. For a pair of
64 queries and 64 keys, one kernel with five matmuls would load 64 KB of Q and dO, and L2 would add up 64 KB of dQ. Two
kernels compute S and dP twice. The first loads 32 KB of K and V for dQ, since its CTA owns 128 queries. The second
loads 64 KB of Q and dO for dK and dV. Predicted:

                       bytes, D = 256    FLOPs     at 5 TB/s of L2    at 600 TFLOP/s
    five matmuls       128 KB            10.5 M    3.5 us             2.3 us            limited by L2
    seven matmuls      96 KB             14.7 M    2.6 us             3.2 us            limited by tensor cores

Nothing is added up in memory, so the gradients are the same to the bit each time.

- query_kernel: a CTA owns 128 queries. A consumer warpgroup owns 64 of them and their dQ. It computes S = Q K^T and
  dP = dO V^T, and sums dQ += dS K. P and dS stay in registers.
- key_kernel: a CTA owns 64 keys. Consumer 0 computes S^T = K Q^T and P^T, and sums dV += P^T dO. Consumer 1 computes
  dP^T = V dO^T, gets P^T through shared memory, and sums dK += dS^T Q.

Blocks have 64 rows. Their columns are split: the first 128, and a rest of 64 (D <= 192) or 128. Rows of up to 128, as
those of V where D = 192 and D_v = 128, have no rest: then three of the seven matmuls take two thirds of the time.

Shared memory in KB           D = 192    D = 256
    query_kernel    Q, dO          96        128
                    K, V       2 x 48    64 + 32    of K two blocks, of V as many as fit
    key_kernel      K, V           48         64
                    Q, dO      3 x 48     2 x 64
                    P              16         16    two buffers
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

from course_ops.hopper import (
    accumulator,
    aggregate,
    allocate_barriers,
    allocate_stages,
    as_matrix,
    exp2,
    operand_a,
    ring_slot,
    tensor_descriptor,
    tile_order,
)
from course_ops.kernels.attention_backward_hopper import opaque_zero, prepare_kernel, scaled, wait_for
from course_ops.kernels.attention_tiles import LN2, LOG2E, even_groups, heads_in_l2, hopper_takes
from course_ops.kernels.sequences import (
    Sequences,
    coordinates,
    place_of,
    ragged_descriptor,
    records,
    unit_of_work,
    whole_descriptor,
)
from course_ops.versions import async_load, async_store

ROWS, FIRST = 64, 128  # queries or keys of a block, its first columns


@aggregate
class Problem:
    """Sizes and masks of a CTA's sequence. Query i stands at key i + S_k - S_q."""

    H: gl.tensor
    S_q: gl.tensor
    S_k: gl.tensor
    window: gl.tensor
    GROUP: gl.constexpr  # query heads that share a head of K and V
    CAUSAL: gl.constexpr
    WINDOW: gl.constexpr
    q_end: gl.tensor | gl.constexpr  # None, or where a packed sequence ends among all rows
    k_end: gl.tensor | gl.constexpr
    number: gl.tensor | gl.constexpr  # None, or the packed sequence's

    @gluon.jit
    def queries(self, batch):
        return place_of(batch, self.q_end, self.S_q)

    @gluon.jit
    def keys(self, batch):
        return place_of(batch, self.k_end, self.S_k)

    @gluon.jit
    def blocks_before(self, batch, head, ROWS: gl.constexpr):
        """Blocks of rows' values before those of a query head."""
        blocks = (max(1, self.S_q) + ROWS - 1) // ROWS
        if self.q_end is None:
            return (batch * self.H + head) * blocks
        else:
            return ((self.q_end - self.S_q) // ROWS + self.number) * self.H + head * blocks

    @gluon.jit
    def key_blocks(self, row, ROWS: gl.constexpr):
        """(begin, first, last, end) of ROWS queries from `row` on: some query sees blocks begin to end, which is at
        least one; blocks first to last need no mask."""
        blocks, at = (max(1, self.S_k) + ROWS - 1) // ROWS, row + self.S_k - self.S_q
        begin, first, last, end = 0, 0, self.S_k // ROWS, blocks
        if self.WINDOW:
            begin = min(blocks - 1, max(0, at - self.window + 1) // ROWS)
            first = (max(0, at + ROWS - self.window) + ROWS - 1) // ROWS
        if self.CAUSAL:  # the last keys, too: a query that sees keys past S_k is past S_q
            end = min(blocks, max(begin + 1, (max(0, at + ROWS) + ROWS - 1) // ROWS))
            first = min(first, end)
            last = max(first, min(end, max(0, at + 1) // ROWS))
        return begin, first, last, end

    @gluon.jit
    def query_blocks(self, key, ROWS: gl.constexpr):
        """As key_blocks, of ROWS keys from `key` on. What is summed for keys past S_k is not stored."""
        blocks, at = (max(1, self.S_q) + ROWS - 1) // ROWS, key + self.S_q - self.S_k
        begin, first, last, end = 0, 0, blocks, blocks
        if self.CAUSAL:
            begin = min(blocks - 1, max(0, at) // ROWS)
            first = min(blocks, (max(0, at + ROWS - 1) + ROWS - 1) // ROWS)
        if self.WINDOW:
            end = min(blocks, max(begin + 1, (max(0, at + ROWS - 1 + self.window) + ROWS - 1) // ROWS))
            first = min(first, end)
            last = max(first, min(end, max(0, at + self.window) // ROWS))
        return begin, first, last, end

    @gluon.jit
    def visible(self, rows, keys):
        """rows [:, None] and keys [None, :], or transposed."""
        ahead = keys - rows - (self.S_k - self.S_q)
        mask = keys < self.S_k
        if self.CAUSAL:
            mask = mask & (ahead <= 0)
        if self.WINDOW:
            mask = mask & (ahead > -self.window)
        return mask


# ---- Blocks of 64 rows in two parts ------------------------------------------------------------------------------


@aggregate
class Blocks:
    """Blocks in shared memory, [COUNT, 1, .., ROWS, 128] and [COUNT, 1, .., ROWS, 64 or 128]."""

    first: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor | gl.constexpr  # None of rows up to 128


@gluon.jit
def allocate_blocks(desc, rest_desc, COUNT: gl.constexpr):
    rest = None
    if rest_desc is not None:
        rest = allocate_stages(rest_desc, COUNT)
    return Blocks(first=allocate_stages(desc, COUNT), rest=rest)


@gluon.jit
def either(desc, other):
    return other if desc is None else desc


@gluon.jit
def load_block(descs, blocks, i, full, where, head, row):
    """TMA copies rows from `row` on to block i. Its bytes are announced here. where: see coordinates."""
    desc, rest_desc = descs
    if rest_desc is None:
        mbarrier.expect(full, desc.block_type.nbytes)
        async_load(desc, coordinates(where, head, row, 0), full, blocks.first.index(i))
    else:
        mbarrier.expect(full, desc.block_type.nbytes + rest_desc.block_type.nbytes)
        async_load(desc, coordinates(where, head, row, 0), full, blocks.first.index(i))
        async_load(rest_desc, coordinates(where, head, row, desc.block_type.shape[-1]), full, blocks.rest.index(i))


@gluon.jit
def load_values(desc, smem, full, block):
    """A value for each row of a block, of [blocks, ROWS]."""
    mbarrier.expect(full, desc.block_type.nbytes)
    async_load(desc, [block, 0], full, smem)


@gluon.jit
def store_block(descs, blocks, i, sums, where, head, row):
    """A consumer writes its sums over block i, which it alone has read, and TMA stores them."""
    desc, rest_desc = descs
    as_matrix(blocks.first.index(i)).store(sums[0].to(blocks.first.dtype))
    if rest_desc is not None:
        as_matrix(blocks.rest.index(i)).store(sums[1].to(blocks.rest.dtype))
    fence_async_shared()
    async_store(desc, coordinates(where, head, row, 0), blocks.first.index(i))
    if rest_desc is not None:
        async_store(rest_desc, coordinates(where, head, row, desc.block_type.shape[-1]), blocks.rest.index(i))
    tma.store_wait(0)


@gluon.jit
def issue_scores(a, i, b, j, LAYOUT: gl.constexpr):
    """Issue A B^T [ROWS, ROWS] of block i of `a` and block j of `b`; the width is `b`'s, which is loaded."""
    ROWS: gl.constexpr = a.first.shape[-2]
    s = gl.zeros((ROWS, ROWS), gl.float32, LAYOUT)
    x, y = as_matrix(a.first.index(i)), as_matrix(b.first.index(j))
    s = warpgroup_mma(x, y.permute((1, 0)), s, use_acc=False, is_async=True)
    if b.rest is not None:
        x, y = as_matrix(a.rest.index(i)), as_matrix(b.rest.index(j))
        s = warpgroup_mma(x, y.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def issue_sum(left, b, j, sums):
    """Issue sums += left B of block j of `b`; left [ROWS, ROWS] lies in registers."""
    first = warpgroup_mma(left, as_matrix(b.first.index(j)), sums[0], is_async=True)
    if len(sums) == 1:
        return (first,)
    else:
        return (first, warpgroup_mma(left, as_matrix(b.rest.index(j)), sums[1], is_async=True))


@gluon.jit
def accumulators(blocks):
    """Zeros for the sums of a block's rows."""
    ROWS: gl.constexpr = blocks.first.shape[-2]
    N: gl.constexpr = blocks.first.shape[-1]
    first = gl.zeros((ROWS, N), gl.float32, accumulator(N))
    if blocks.rest is None:
        return (first,)
    else:
        M: gl.constexpr = blocks.rest.shape[-1]
        return (first, gl.zeros((ROWS, M), gl.float32, accumulator(M)))


# ---- dQ ----------------------------------------------------------------------------------------------------------


@aggregate
class QueryArgs:
    """What all warps of a CTA of query_kernel share."""

    q: Blocks  # a block for each consumer; at the end dQ
    do: Blocks
    k: Blocks  # a ring
    v: Blocks  # a ring
    start_smem: gl.shared_memory_descriptor  # [2, 1, ROWS] fp32: -lse in powers of 2
    delta_smem: gl.shared_memory_descriptor  # -delta
    q_full: gl.shared_memory_descriptor  # with -lse
    do_full: gl.shared_memory_descriptor  # with -delta
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor  # both consumers have read the block
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    problem: Problem
    scale_log2: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor  # the first of the CTA's queries

    @gluon.jit
    def range(self):
        """The blocks of keys that some query of the CTA sees."""
        ROWS: gl.constexpr = self.q.first.shape[-2]
        begin, _, _, end = self.problem.key_blocks(self.row, ROWS)
        _, _, _, last_end = self.problem.key_blocks(self.row + ROWS, ROWS)
        return begin, max(end, last_end)


@gluon.jit
def query_producer(args, descs):
    q_descs, do_descs, k_descs, v_descs, start_desc, delta_desc = descs
    ROWS: gl.constexpr = args.q.first.shape[-2]
    gdc_wait()
    gdc_launch_dependents()
    head, queries, keys = args.head, args.problem.queries(args.batch), args.problem.keys(args.batch)
    values = args.problem.blocks_before(args.batch, head, ROWS) + args.row // ROWS
    for half in gl.static_range(2):
        row = args.row + half * ROWS
        load_block(q_descs, args.q, half, args.q_full.index(half), queries, head, row)
        load_values(start_desc, args.start_smem.index(half), args.q_full.index(half), values + half)
    begin, end = args.range()
    head_kv = head // args.problem.GROUP
    for block in range(begin, end):
        step = block - begin
        stage, parity = ring_slot(step, args.k_full.shape[0])
        mbarrier.wait(args.k_empty.index(stage), parity ^ 1)
        load_block(k_descs, args.k, stage, args.k_full.index(stage), keys, head_kv, block * ROWS)
        if step == 0:
            for half in gl.static_range(2):
                row = args.row + half * ROWS
                load_block(do_descs, args.do, half, args.do_full.index(half), queries, head, row)
                load_values(delta_desc, args.delta_smem.index(half), args.do_full.index(half), values + half)
        stage, parity = ring_slot(step, args.v_full.shape[0])
        mbarrier.wait(args.v_empty.index(stage), parity ^ 1)
        load_block(v_descs, args.v, stage, args.v_full.index(stage), keys, head_kv, block * ROWS)


# dP runs under the exponentials, dQ and the next S follow each other. The other consumer's matmuls run under the rest.
# `end` is the CTA's, so that the last S is of a block that has come; it is not used.
@gluon.jit
def add_keys(args, s, sums, deltas, row, cta_begin, begin, stop, end, WHICH: gl.constexpr, MASKED: gl.constexpr):
    LAYOUT: gl.constexpr = s.type.layout
    ROWS: gl.constexpr = s.shape[0]
    for block in range(begin, stop):
        step, mine = block - cta_begin, WHICH + opaque_zero(block)
        k_stage, _ = ring_slot(step, args.k_full.shape[0])
        k_after, parity_after = ring_slot(step + 1, args.k_full.shape[0])
        v_stage, v_parity = ring_slot(step, args.v_full.shape[0])
        mbarrier.wait(args.v_full.index(v_stage), v_parity)
        dp = issue_scores(args.do, mine, args.v, v_stage, LAYOUT)
        # The next two waits return at once. No instruction moves across: all of dP is issued before the exponentials,
        # which are complete before dP is awaited. Without them the compiler mixes them, or delays them.
        mbarrier.wait(args.v_full.index(v_stage), v_parity)
        starts = args.start_smem.index(WHICH).reshape((ROWS,)).load(gl.SliceLayout(1, LAYOUT))
        p = exp2(s * args.scale_log2 + starts[:, None])
        if MASKED:
            rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
            keys = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
            p = gl.where(args.problem.visible(rows, keys), p, 0.0)
        mbarrier.wait(args.v_full.index(v_stage), v_parity)
        dp, p = warpgroup_mma_wait(0, deps=(dp, p))
        mbarrier.arrive(args.v_empty.index(v_stage))
        ds = operand_a(p * (dp + deltas[:, None]), sums[0], args.k.first.dtype)
        sums = issue_sum(ds, args.k, k_stage, sums)
        mbarrier.wait(args.k_full.index(k_after), parity_after, pred=block + 1 < end)
        s_after = issue_scores(args.q, mine, args.k, k_after, LAYOUT)
        sums, done = wait_for(0, sums, (ds, s_after))
        s = done[1]
        mbarrier.arrive(args.k_empty.index(k_stage))
    return s, sums


# After the last block of consumer 0 the CTA may have one more. Nothing is loaded over it, so it is not released.
@gluon.jit
def pass_blocks(args, cta_begin, begin, stop):
    """Release blocks before the window that the other consumer's queries see alone."""
    for block in range(begin, stop):
        stage, parity = ring_slot(block - cta_begin, args.k_full.shape[0])
        mbarrier.wait(args.k_full.index(stage), parity)  # released earlier, it would count for the block before
        mbarrier.arrive(args.k_empty.index(stage))
        stage, parity = ring_slot(block - cta_begin, args.v_full.shape[0])
        mbarrier.wait(args.v_full.index(stage), parity)
        mbarrier.arrive(args.v_empty.index(stage))


@gluon.jit
def query_consumer(args, dq_descs, scale, WHICH: gl.constexpr):
    ROWS: gl.constexpr = args.q.first.shape[-2]
    LAYOUT: gl.constexpr = accumulator(ROWS)
    row = args.row + WHICH * ROWS
    cta_begin, cta_end = args.range()
    begin, whole, last, end = args.problem.key_blocks(row, ROWS)
    sums = accumulators(args.q)
    pass_blocks(args, cta_begin, cta_begin, begin)
    stage, parity = ring_slot(begin - cta_begin, args.k_full.shape[0])
    mbarrier.wait(args.q_full.index(WHICH), 0)
    mbarrier.wait(args.k_full.index(stage), parity)
    s = warpgroup_mma_wait(0, deps=(issue_scores(args.q, WHICH, args.k, stage, LAYOUT),))
    mbarrier.wait(args.do_full.index(WHICH), 0)
    deltas = args.delta_smem.index(WHICH).reshape((ROWS,)).load(gl.SliceLayout(1, LAYOUT))
    if args.problem.WINDOW:
        s, sums = add_keys(
            args, s, sums, deltas, row, cta_begin, begin, whole, cta_end, WHICH, True
        )  # fmt: skip
    s, sums = add_keys(
        args, s, sums, deltas, row, cta_begin, whole, last, cta_end, WHICH, False
    )  # fmt: skip
    s, sums = add_keys(args, s, sums, deltas, row, cta_begin, last, end, cta_end, WHICH, True)
    store_block(dq_descs, args.q, WHICH, scaled(sums, scale), args.problem.queries(args.batch), args.head, row)


@gluon.jit(do_not_specialize=["tiles", "H", "all_heads", "heads_at_once", "S_q", "S_k", "window"])
def query_kernel(
    q_desc, q_rest, do_desc, do_rest, dq_desc, dq_rest,  # of [B, H, S_q, D]
    k_desc, k_rest, v_desc, v_rest,  # of [B, H_kv, S_k, D]
    start_desc, delta_desc,  # of [blocks, ROWS] fp32
    records_ptr,  # None, or of packed sequences: S_q and S_k are totals then, and all_heads is one sequence's
    scale, scale_log2, tiles, H, all_heads, heads_at_once, S_q, S_k, window, GROUP: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = q_desc.block_type.shape[-2]
    if records_ptr is None:
        index, q_end, k_end, number = gl.program_id(0), None, None, None
    else:
        work = unit_of_work(records_ptr, gl.program_id(0), gl.load(records_ptr), H)
        index, q_end, S_q, k_end, S_k, first, tiles, number = work
        index -= first
    if CAUSAL:  # the last queries see most keys
        line, rank = tile_order(index, tiles, all_heads, heads_at_once)
        tile = tiles - 1 - rank
    else:
        line, tile = index // tiles, index % tiles
    args = QueryArgs(
        q=allocate_blocks(q_desc, q_rest, 2), do=allocate_blocks(do_desc, do_rest, 2),
        k=allocate_blocks(k_desc, k_rest, K_STAGES), v=allocate_blocks(v_desc, v_rest, V_STAGES),
        start_smem=allocate_stages(start_desc, 2), delta_smem=allocate_stages(delta_desc, 2),
        q_full=allocate_barriers(2, 2), do_full=allocate_barriers(2, 2),  # a block and its values: two announcements
        k_full=allocate_barriers(K_STAGES, 1), k_empty=allocate_barriers(K_STAGES, 2),
        v_full=allocate_barriers(V_STAGES, 1), v_empty=allocate_barriers(V_STAGES, 2),
        problem=Problem(
            H=H, S_q=S_q, S_k=S_k, window=window, GROUP=GROUP, CAUSAL=CAUSAL, WINDOW=WINDOW, q_end=q_end, k_end=k_end,
            number=number,
        ),
        scale_log2=scale_log2, batch=line // H, head=line % H, row=tile * 2 * ROWS,
    )  # fmt: skip
    descs = (q_desc, q_rest), (do_desc, do_rest), (k_desc, k_rest), (v_desc, v_rest), start_desc, delta_desc
    gl.warp_specialize([
        (query_consumer, (args, (dq_desc, dq_rest), scale, 0)),
        (query_consumer, (args, (dq_desc, dq_rest), scale, 1)),
        (query_producer, (args, descs)),
    ], [4, 1], [240, 24])  # fmt: skip


# ---- dK and dV ---------------------------------------------------------------------------------------------------


@aggregate
class KeyArgs:
    """What all warps of a CTA of key_kernel share."""

    k: Blocks  # one; read by consumer 0 alone, at the end dV, which may have the longer rows
    v: Blocks  # one; read by consumer 1 alone, at the end dK, likewise
    q: Blocks  # a ring
    do: Blocks  # a ring
    start_smem: gl.shared_memory_descriptor  # [STAGES, 1, ROWS] fp32: -lse in powers of 2
    delta_smem: gl.shared_memory_descriptor  # -delta
    p_smem: gl.shared_memory_descriptor  # [2, ROWS, ROWS]: P^T of a step
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor  # with -lse
    q_empty: gl.shared_memory_descriptor  # consumer 1 has read the block, after it has got P^T from consumer 0
    do_full: gl.shared_memory_descriptor  # with -delta
    do_empty: gl.shared_memory_descriptor  # both consumers have read the block
    p_full: gl.shared_memory_descriptor  # consumer 0 has written P^T
    p_empty: gl.shared_memory_descriptor  # consumer 1 has read it
    problem: Problem
    scale_log2: gl.tensor
    batch: gl.tensor
    head_kv: gl.tensor
    key: gl.tensor  # the first of the CTA's keys


@gluon.jit
def key_producer(args, descs):
    q_descs, do_descs, k_descs, v_descs, start_desc, delta_desc = descs
    GROUP: gl.constexpr = args.problem.GROUP
    ROWS: gl.constexpr = args.q.first.shape[-2]
    queries, keys = args.problem.queries(args.batch), args.problem.keys(args.batch)
    load_block(k_descs, args.k, 0, args.k_full.index(0), keys, args.head_kv, args.key)
    load_block(v_descs, args.v, 0, args.v_full.index(0), keys, args.head_kv, args.key)
    begin, _, _, end = args.problem.query_blocks(args.key, ROWS)
    step = 0
    for head in range(args.head_kv * GROUP, args.head_kv * GROUP + GROUP):
        values = args.problem.blocks_before(args.batch, head, ROWS)
        for block in range(begin, end):
            stage, parity = ring_slot(step, args.q_full.shape[0])
            mbarrier.wait(args.q_empty.index(stage), parity ^ 1)
            load_block(q_descs, args.q, stage, args.q_full.index(stage), queries, head, block * ROWS)
            load_values(start_desc, args.start_smem.index(stage), args.q_full.index(stage), values + block)
            mbarrier.wait(args.do_empty.index(stage), parity ^ 1)
            load_block(do_descs, args.do, stage, args.do_full.index(stage), queries, head, block * ROWS)
            load_values(delta_desc, args.delta_smem.index(stage), args.do_full.index(stage), values + block)
            step += 1
    gdc_wait()  # for query_kernel: what comes after this kernel reads dQ


# dV and the next S follow each other; consumer 1's matmuls run under the exponentials. The S after the last step is
# that of an old Q, and not used.
@gluon.jit
def add_queries(args, s, sums, base, begin, stop, steps, MASKED: gl.constexpr):
    """Consumer 0: S^T of the step after the last one, and dV."""
    LAYOUT: gl.constexpr = s.type.layout
    ROWS: gl.constexpr = s.shape[0]
    for block in range(begin, stop):
        step = base + block
        stage, parity = ring_slot(step, args.q_full.shape[0])
        after, parity_after = ring_slot(step + 1, args.q_full.shape[0])
        buffer, p_parity = ring_slot(step, 2)
        starts = args.start_smem.index(stage).reshape((ROWS,)).load(gl.SliceLayout(0, LAYOUT))
        p = exp2(s * args.scale_log2 + starts[None, :])
        if MASKED:
            rows = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
            keys = args.key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
            p = gl.where(args.problem.visible(rows, keys), p, 0.0)
        p = p.to(args.q.first.dtype)
        mbarrier.wait(args.p_empty.index(buffer), p_parity ^ 1)
        args.p_smem.index(buffer).store(p)
        mbarrier.arrive(args.p_full.index(buffer))
        p = operand_a(p, sums[0], args.q.first.dtype)
        mbarrier.wait(args.do_full.index(stage), parity)
        sums = issue_sum(p, args.do, stage, sums)
        mbarrier.wait(args.q_full.index(after), parity_after, pred=step + 1 < steps)
        s_after = issue_scores(args.k, 0, args.q, after, LAYOUT)
        sums, done = wait_for(0, sums, (p, s_after))
        s = done[1]
        mbarrier.arrive(args.do_empty.index(stage))
    return s, sums


@gluon.jit
def value_consumer(args, dv_descs):
    """Consumer 0: S^T, P^T and dV."""
    ROWS: gl.constexpr = args.q.first.shape[-2]
    LAYOUT: gl.constexpr = accumulator(ROWS)
    begin, whole, last, end = args.problem.query_blocks(args.key, ROWS)
    sums = accumulators(args.do)
    mbarrier.wait(args.k_full.index(0), 0)
    mbarrier.wait(args.q_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=(issue_scores(args.k, 0, args.q, 0, LAYOUT),))
    base, steps = -begin, (end - begin) * args.problem.GROUP
    for _head in range(args.problem.GROUP):
        if args.problem.CAUSAL:
            s, sums = add_queries(args, s, sums, base, begin, whole, steps, True)
        s, sums = add_queries(args, s, sums, base, whole, last, steps, False)
        if args.problem.WINDOW:
            s, sums = add_queries(args, s, sums, base, last, end, steps, True)
        base += end - begin
    store_block(dv_descs, args.k, 0, sums, args.problem.keys(args.batch), args.head_kv, args.key)


@gluon.jit
def key_consumer(args, dk_descs, scale):
    """Consumer 1: dP^T, dS^T and dK. It needs no mask: where P is 0, dS is."""
    ROWS: gl.constexpr = args.q.first.shape[-2]
    LAYOUT: gl.constexpr = accumulator(ROWS)
    begin, _, _, end = args.problem.query_blocks(args.key, ROWS)
    sums = accumulators(args.q)
    mbarrier.wait(args.v_full.index(0), 0)
    mbarrier.wait(args.do_full.index(0), 0)
    dp = warpgroup_mma_wait(0, deps=(issue_scores(args.v, 0, args.do, 0, LAYOUT),))
    steps = (end - begin) * args.problem.GROUP
    for step in range(steps):
        stage, parity = ring_slot(step, args.q_full.shape[0])
        after, parity_after = ring_slot(step + 1, args.q_full.shape[0])
        buffer, p_parity = ring_slot(step, 2)
        dp += args.delta_smem.index(stage).reshape((ROWS,)).load(gl.SliceLayout(0, LAYOUT))[None, :]
        mbarrier.arrive(args.do_empty.index(stage))
        mbarrier.wait(args.p_full.index(buffer), p_parity)
        ds = args.p_smem.index(buffer).load(LAYOUT).to(gl.float32) * dp
        mbarrier.arrive(args.p_empty.index(buffer))
        ds = operand_a(ds, sums[0], args.q.first.dtype)
        mbarrier.wait(args.q_full.index(stage), parity)
        sums = issue_sum(ds, args.q, stage, sums)
        mbarrier.wait(args.do_full.index(after), parity_after, pred=step + 1 < steps)
        dp_after = issue_scores(args.v, 0, args.do, after, LAYOUT)
        sums, done = wait_for(0, sums, (ds, dp_after))
        dp = done[1]
        mbarrier.arrive(args.q_empty.index(stage))
    store_block(dk_descs, args.v, 0, scaled(sums, scale), args.problem.keys(args.batch), args.head_kv, args.key)


@gluon.jit(do_not_specialize=["tiles", "H", "all_heads", "heads_at_once", "S_q", "S_k", "window"])
def key_kernel(
    q_desc, q_rest, do_desc, do_rest,  # of [B, H, S_q, D]
    k_desc, k_rest, v_desc, v_rest, dk_desc, dk_rest, dv_desc, dv_rest,  # of [B, H_kv, S_k, D]
    start_desc, delta_desc,  # of [blocks, ROWS] fp32
    records_ptr,  # None, or of packed sequences: S_q and S_k are totals then, and all_heads is one sequence's
    scale, scale_log2, tiles, H, all_heads, heads_at_once, S_q, S_k, window, GROUP: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = q_desc.block_type.shape[-2]
    SQUARE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if records_ptr is None:
        index, q_end, k_end, number = gl.program_id(0), None, None, None
    else:
        work = unit_of_work(records_ptr, gl.program_id(0), gl.load(records_ptr), H // GROUP)
        index, k_end, S_k, q_end, S_q, first, tiles, number = work
        index -= first
    if CAUSAL:  # the first keys are seen by most queries
        line, tile = tile_order(index, tiles, all_heads, heads_at_once)
    else:
        line, tile = index // tiles, index % tiles
    args = KeyArgs(
        k=allocate_blocks(k_desc, either(k_rest, dv_rest), 1), v=allocate_blocks(v_desc, either(v_rest, dk_rest), 1),
        q=allocate_blocks(q_desc, q_rest, STAGES), do=allocate_blocks(do_desc, do_rest, STAGES),
        start_smem=allocate_stages(start_desc, STAGES), delta_smem=allocate_stages(delta_desc, STAGES),
        p_smem=gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, ROWS], SQUARE),
        k_full=allocate_barriers(1, 1), v_full=allocate_barriers(1, 1),
        q_full=allocate_barriers(STAGES, 2), q_empty=allocate_barriers(STAGES, 1),  # full: a block and its values
        do_full=allocate_barriers(STAGES, 2), do_empty=allocate_barriers(STAGES, 2),
        p_full=allocate_barriers(2, 1), p_empty=allocate_barriers(2, 1),
        problem=Problem(
            H=H, S_q=S_q, S_k=S_k, window=window, GROUP=GROUP, CAUSAL=CAUSAL, WINDOW=WINDOW, q_end=q_end, k_end=k_end,
            number=number,
        ),
        scale_log2=scale_log2, batch=line // (H // GROUP), head_kv=line % (H // GROUP), key=tile * ROWS,
    )  # fmt: skip
    descs = (q_desc, q_rest), (do_desc, do_rest), (k_desc, k_rest), (v_desc, v_rest), start_desc, delta_desc
    gl.warp_specialize([
        (value_consumer, (args, (dv_desc, dv_rest))),
        (key_consumer, (args, (dk_desc, dk_rest), scale)),
        (key_producer, (args, descs)),
    ], [4, 1], [240, 24])  # fmt: skip


# ---- The launches ------------------------------------------------------------------------------------------------


def takes(dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """What hopper_takes asks, with rows from 136 to 256: shorter ones have attention_backward_hopper."""
    return max(q.shape[-1], v.shape[-1]) > 128 and hopper_takes(256, q, k, v, dout)


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, window: int | None, scale: float, sequences: Sequences | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k [.., D] and v, out, dout [.., D_v] as in the forward, that `takes` takes -> dq as q, dk and dv as k, v.

    lse [B, H, S_q] in fp32, contiguous. Deterministic. Rows up to 128 have no rest; TMA fills the columns past a row's
    end with zeros, and stores none of them. sequences: of rows that are packed, B = 1.
    """
    (B, H, S_q, D), (_, H_kv, S_k, D_v) = q.shape, v.shape
    dq, dk, dv = empty_like(q), empty_like(k), empty_like(v)
    group, wide = H // H_kv, max(D, D_v) > 192
    tiles, key_tiles, blocks = (triton.cdiv(n, rows) for n, rows in ((S_q, 2 * ROWS), (S_k, ROWS), (S_q, ROWS)))
    longest_q, longest_k, descriptor = S_q, S_k, whole_descriptor
    listed, listed_keys, cu_q, count = None, None, None, None
    if sequences is not None:
        cu_q, count, longest_q, longest_k = sequences.q, sequences.count, sequences.longest_q, sequences.longest_k
        listed, tiles = records(sequences.q, sequences.k, S_q, 2 * ROWS)
        listed_keys, key_tiles = records(sequences.k, sequences.q, S_k, ROWS)
        blocks, descriptor = S_q // ROWS + count, ragged_descriptor
    starts, deltas = (empty(B * H * blocks, ROWS, device=q.device) for _ in range(2))
    prepare_kernel[(B * H * blocks * ROWS // 32,)](
        out, dout, lse, starts, deltas, None, out.stride(), dout.stride(), LN2.value, H, S_q, blocks * ROWS, D_v,
        cu_q, count, 32, 256, ROWS, 256,
    )  # fmt: skip
    widths = (0, FIRST), (FIRST, 128 if wide else 64)
    queries, grads, keys, values, dqs, dks, dvs = (
        [descriptor(t, ROWS, width) if t.shape[-1] > column else None for column, width in widths]
        for t in (q, dout, k, v, dq, dk, dv)
    )
    of_rows = [tensor_descriptor(t, [1, ROWS], swizzled=False) for t in (starts, deltas)]
    sizes = S_q, S_k, window or 0, group, causal, window is not None
    at_once = group * even_groups(B * H_kv, heads_in_l2(2 * longest_k * (D + D_v), q.device))
    query_kernel[(B * H * tiles,)](
        *queries, *grads, *dqs, *keys, *values, *of_rows, listed, scale, scale * LOG2E.value, tiles, H, B * H, at_once,
        *sizes, 2, 1 if wide else 2, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    at_once = even_groups(B * H_kv, heads_in_l2(2 * group * longest_q * (D + D_v), q.device))
    key_kernel[(B * H_kv * key_tiles,)](
        *queries, *grads, *keys, *values, *dks, *dvs, *of_rows, listed_keys, scale, scale * LOG2E.value, key_tiles, H,
        B * H_kv, at_once, *sizes, 2 if wide else 3, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return dq, dk, dv
