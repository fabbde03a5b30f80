"""Attention, forward, for Hopper: warp-specialized, persistent, with lazy rescaling (16 bits, D up to 256).

After FlashAttention-3 (Shah et al. 2024, section 3) and FlashAttention-4's conditional rescaling. The idea: the tensor
cores multiply P V of one block of keys while the other units compute the softmax of the next block:

    tensor cores   QK(0)             QK(1) PV(0)      QK(2) PV(1)      QK(3) PV(2)      ...
    other units          softmax(0)        softmax(1)       softmax(2)       softmax(3)

A CTA is a producer warp and two consumer warpgroups (three for D <= 64). Each consumer has 64 queries of a tile.

    shared memory   Q, O [consumers, 64, D]; rings of K and V [stages, keys, D] with a `full` and an `empty` barrier.
                    For D <= 64 Q has two buffers, so that the next tile's Q comes while this tile is computed.
    producer        only issues TMA loads: the next tile's K(0) and Q, then K(j) and V(j - 1) of each block, as stages
                    get empty. K(0) is first, since its stage is empty before Q is. It fetches the tile from the
                    scheduler.
    consumer        issues S(j) and O += P(j - 1) V(j - 1), and computes the softmax of S(j) while that matmul runs

Lazy rescaling: exp2(s - m) / sum(exp2(s - m)) is the same for any m, which only prevents overflow. So m is the row
maximum of the tile's first block, and stays. A consumer raises m only if some partial row sum passes 2^13: fp16 holds
65504, and l and O are fp32. It then multiplies l, O and P, which is still in fp32, by a power of two. A sum past 2^64
may be infinite, and then P is lost. The consumer computes that block again with the block's own maximum. The block's K
is still in shared memory, so the price is a second QK.

Order: the last block of keys comes first. So the blocks that need a mask, the tail and the diagonal, are a tile's
first ones. ALIGNED (causal, S_k - S_q a multiple of 128): the diagonal crosses only the last block, from corner to
corner. One of its four quarters is masked whole, so the first warpgroup computes 64 of the 128 keys:

                      keys 0 to 63    keys 64 to 127
    queries 0 to 63   masked partly   masked whole
    queries 64 to 127 no mask         masked partly

Chunks: sizes of blocks are powers of two, so a row may lie in two chunks of columns. D > 128: 128 and 64, or 128 and
128, of Q, K, V and O. S is the sum of both chunks' QK. Each chunk of O has an accumulator of its own, and a block has
64 keys. 64 < D <= 96: Q and K in 64 and 16, or 64 and 32. One chunk of 128 would multiply 96 columns as 128: on an H200
that took 10% longer. V and O have one of 128: in two chunks PV took 5% longer than in one.
D_v, the columns of V and O, may differ from D. Up to D = 192 and D_v = 128 a block has 128 keys: a QK with 128 keys
reads 0.75 of the shared memory that two with 64 read. O then has two accumulators of 64 columns. They leave through
one buffer, since shared memory has no room for two.
Softcap: S becomes tanh(S scale / softcap) before the masks, and the exponents are softcap times that.
Few queries: a warpgroup's 64 rows are then QUERIES queries of 64 / QUERIES heads that share K and V, in the order head,
query. With one query and four heads a row of Q, K and V are loaded and multiplied once for four heads, not four times.
A warpgroup without any query, at the end of a sequence, multiplies nothing.
Window: a tile ends with the first block that one of its queries sees. The blocks that the window's edge crosses come
last, and the main loop masks them.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

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
    tile_counter,
    tile_order,
)
from course_ops.kernels.attention_tiles import (
    LN2,
    LOWEST,
    empty_results,
    even_groups,
    heads_in_l2,
    hopper_takes,
    score_scales,
)
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

ROWS = 64  # of a warpgroup: queries of a head, or of several
LARGE_SUM = gl.constexpr(0x46000000)  # the bits of 2^13 in fp32
HUGE_SUM = gl.constexpr(0x5F800000)  # those of 2^64


@aggregate
class Ring:
    """Stages of one tensor in shared memory, and their barriers. A tuple has one element for each chunk of columns."""

    descs: gl.tuple
    smems: gl.tuple  # [stages, 1, .., rows, columns]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def load(self, stage, where, head, row):
        """Announce a block's bytes to `full`, and start its copy. Rows past a head's last one come as zeros.
        where: see coordinates."""
        full, first = self.full.index(stage), self.descs[0]
        if len(self.descs) == 1:
            mbarrier.expect(full, first.block_type.nbytes)
            async_load(first, coordinates(where, head, row, 0), full, self.smems[0].index(stage))
        else:
            second = self.descs[1]
            mbarrier.expect(full, first.block_type.nbytes + second.block_type.nbytes)
            async_load(first, coordinates(where, head, row, 0), full, self.smems[0].index(stage))
            column: gl.constexpr = first.block_type.shape[-1]
            async_load(second, coordinates(where, head, row, column), full, self.smems[1].index(stage))

    @gluon.jit
    def wait_full(self, step):
        """The stage of a step, when its block has come."""
        stage, parity = ring_slot(step, self.full.shape[0])
        mbarrier.wait(self.full.index(stage), parity)
        return stage

    @gluon.jit
    def wait_empty(self, step):
        """The stage of a step, when every consumer has read the block before."""
        stage, parity = ring_slot(step, self.full.shape[0])
        mbarrier.wait(self.empty.index(stage), parity ^ 1)
        return stage

    @gluon.jit
    def release(self, step):
        """This consumer has read a step's block."""
        mbarrier.arrive(self.empty.index(step % self.empty.shape[0]))


@aggregate
class Problem:
    """Sizes, and which tile is which. CAUSAL tiles see 1 to S_k / KEYS blocks of keys, so the longest come first.

    If sequences are packed, a kernel has a Problem with the sums over all of them, and one of each tile's sequence.
    """

    tiles: gl.tensor  # of a head
    H: gl.tensor  # heads, or packs of heads
    all_heads: gl.tensor  # B * H
    heads_at_once: gl.tensor
    S_q: gl.tensor
    S_k: gl.tensor
    window: gl.tensor | gl.constexpr  # or None
    CAUSAL: gl.constexpr
    QUERIES: gl.constexpr  # of a warpgroup, each in ROWS / QUERIES heads: a pack
    records_ptr: gl.tensor | gl.constexpr  # None, or of packed sequences (sequences.records)
    q_end: gl.tensor | gl.constexpr  # None, or where the tile's sequence ends among all rows
    k_end: gl.tensor | gl.constexpr

    @gluon.jit
    def num_tiles(self):
        return self.tiles * self.all_heads

    @gluon.jit
    def work(self, index):
        return unit_of_work(self.records_ptr, index, self.tiles, self.H)

    @gluon.jit
    def tile(self, index, TILE_QUERIES: gl.constexpr, KEYS: gl.constexpr):
        """Of the index-th tile: batch, head, its first query, how many blocks of keys its queries see, and where these
        end, in blocks."""
        if self.CAUSAL:
            head, rank = tile_order(index, self.tiles, self.all_heads, self.heads_at_once)
            tile = self.tiles - 1 - rank
            end = min(self.S_k, max(0, (tile + 1) * TILE_QUERIES + self.S_k - self.S_q))
        else:
            head, tile, end = index // self.tiles, index % self.tiles, self.S_k
        last = (end + KEYS - 1) // KEYS
        blocks = last
        if self.window is not None:
            blocks = last - max(0, self.first_key(tile * TILE_QUERIES)) // KEYS
        return head // self.H, head % self.H, tile * TILE_QUERIES, blocks, last

    @gluon.jit
    def queries(self, row, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
        """The query of each of a warpgroup's rows; row: its first one."""
        rows = gl.arange(0, ROWS, layout=LAYOUT)
        return row + (rows if self.QUERIES == ROWS else rows % self.QUERIES)

    @gluon.jit
    def first_key(self, row):
        """Where a query's window begins; negative if before the first key."""
        return row + (self.S_k - self.S_q + 1 - self.window)


@gluon.jit
def problem_of(problem, work):
    """The problem that a unit of work belongs to, and its index there."""
    if problem.records_ptr is None:
        return problem, work[0]
    else:
        index, q_end, S_q, k_end, S_k, first, tiles, _number = work
        of_sequence = Problem(
            tiles=tiles, H=problem.H, all_heads=problem.all_heads, heads_at_once=problem.heads_at_once, S_q=S_q,
            S_k=S_k, window=problem.window, CAUSAL=problem.CAUSAL, QUERIES=problem.QUERIES,
            records_ptr=problem.records_ptr, q_end=q_end, k_end=k_end,
        )  # fmt: skip
        return of_sequence, index - first


@aggregate
class PartitionArgs:
    """What all warps of a CTA share."""

    q: Ring  # of consumer c's n-th tile: stage c of buffer n % buffers
    k: Ring
    v: Ring
    o_descs: gl.tuple
    o_smems: gl.tuple  # as q's
    largest_sums: gl.shared_memory_descriptor  # [CONSUMERS, 4 warps] int32
    scheduler: TileScheduler
    problem: Problem
    lse_ptr: gl.tensor
    scale_log2: gl.tensor
    cap_scale: gl.tensor | gl.constexpr  # None without a softcap, see score_scales
    CONSUMERS: gl.constexpr

    @gluon.jit
    def q_stage(self, consumer, count):
        """Where a consumer's Q of the CTA's tile number `count` lies, and the parity of its `full`."""
        buffer, parity = ring_slot(count, self.q.full.shape[0] // self.CONSUMERS)
        return buffer * self.CONSUMERS + consumer, parity


@gluon.jit
def producer_partition(args, GROUP: gl.constexpr):
    q, k, v = args.q, args.k, args.v
    CONSUMERS: gl.constexpr = args.CONSUMERS
    PACK: gl.constexpr = q.descs[0].block_type.shape[-3]
    QUERIES: gl.constexpr = args.problem.QUERIES
    KEYS: gl.constexpr = k.descs[0].block_type.shape[-2]
    step, count, index = 0, 0, gl.program_id(0)
    while index < args.problem.num_tiles():
        args.scheduler.publish(index, count)
        problem, within = problem_of(args.problem, args.problem.work(index))
        batch, head, row, blocks, last = problem.tile(within, CONSUMERS * QUERIES, KEYS)
        queries, keys = place_of(batch, problem.q_end, problem.S_q), place_of(batch, problem.k_end, problem.S_k)
        if blocks > 0:
            k.load(k.wait_empty(step), keys, head // GROUP, (last - 1) * KEYS)
        for consumer in gl.static_range(CONSUMERS):
            stage, parity = args.q_stage(consumer, count)
            mbarrier.wait(q.empty.index(stage), parity ^ 1)
            q.load(stage, queries, head * PACK, row + consumer * QUERIES)
        for block in range(1, blocks + 1):  # K of a block, then V of the one before: the order in which they are needed
            if block < blocks:
                stage = k.wait_empty(step + block)
                k.load(stage, keys, head // GROUP, (last - 1 - block) * KEYS)
            stage = v.wait_empty(step + block - 1)
            v.load(stage, keys, head // GROUP, (last - block) * KEYS)
        step += blocks
        count += 1
        index = args.scheduler.fetch(args.problem.num_tiles())
    args.scheduler.publish(index, count)


@gluon.jit
def issue_qk(q, k, step, KEYS: gl.constexpr):
    """Issue S = Q K^T [rows, KEYS] with a block's first KEYS keys."""
    ROWS: gl.constexpr = q[0].shape[0]
    stage = k.wait_full(step)
    s = gl.zeros((ROWS, KEYS), gl.float32, accumulator(KEYS))
    keys = first_rows(as_matrix(k.smems[0].index(stage)), KEYS)
    s = warpgroup_mma(q[0], keys.permute((1, 0)), s, use_acc=False, is_async=True)
    if len(q) > 1:
        keys = first_rows(as_matrix(k.smems[1].index(stage)), KEYS)
        s = warpgroup_mma(q[1], keys.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def capped(s, cap_scale):
    return s if cap_scale is None else tanh(s * cap_scale)


@gluon.jit
def issue_pv(p, o, v, step):
    """Issue O += P V with a block's first keys, as many as P has, one matmul for each chunk. P and O: registers."""
    stage = v.wait_full(step)
    first = multiply_chunk(p, o[0], v.smems[0].index(stage))
    if len(o) == 1:
        return (first,)
    else:
        return (first, multiply_chunk(p, o[1], v.smems[1].index(stage)))


@gluon.jit
def multiply_chunk(p, o, tile):
    p = gl.convert_layout(p, gl.DotOperandLayout(0, o.type.layout, 2))  # another name only
    return warpgroup_mma(p, first_rows(as_matrix(tile), p.shape[1]), o, is_async=True)


@gluon.jit
def wait_pv(o, p):
    """O and P, when no matmul is on its way."""
    if len(o) == 1:
        first, p = warpgroup_mma_wait(0, deps=(o[0], p))
        return (first,), p
    else:
        first, second, p = warpgroup_mma_wait(0, deps=(o[0], o[1], p))
        return (first, second), p


@gluon.jit
def first_rows(tile, ROWS: gl.constexpr):
    return tile.slice(0, ROWS, dim=0) if tile.shape[0] > ROWS else tile


# A row lies in four threads. Its sum is needed at the end only, so each thread keeps a part: [rows, keys] -> [rows, 4].
@gluon.jit
def partial_sums(p):
    return gl.sum(gl.sum(p.reshape((p.shape[0], p.shape[1] // 8, 4, 2)), axis=3), axis=1)


@gluon.jit
def scale_rows(x, factor):
    """x [rows, columns] times a factor a row; both have a row in the same threads, so nothing moves."""
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def scale_chunks(o, factor):
    return (scale_rows(o[0], factor),) if len(o) == 1 else (scale_rows(o[0], factor), scale_rows(o[1], factor))


# As operand_a, in assembly, or the compiler merges the conversions of both branches of next_block into one behind them.
# Then 64 fp32 values are alive across the branch instead of 32 registers of 16-bit pairs, and three consumers spill.
@gluon.jit
def packed_operand_a(p, o, dtype: gl.constexpr):
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, o[0].type.layout, 2)
    if dtype == gl.bfloat16:
        p = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [p], gl.bfloat16, True, 2)
    else:
        p = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [p], gl.float16, True, 2)
    return gl.convert_layout(p, LAYOUT)


# Thread t of the four that share a row has the columns 8 j + b + 2 t, b = 0 or 1. So keys & ~6, which is 8 j + b, is a
# constant of the register that holds the column. And keys & 6, which is 2 t, is one value for the whole thread. A
# comparison is then one instruction with a constant.
@gluon.jit
def apply_mask(s, row, key, problem):
    """-inf where a query does not see a key; row, key: the block's first ones. With few registers."""
    rows = problem.queries(row, s.shape[0], gl.SliceLayout(1, s.type.layout))
    keys = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    last = rows * 0 + (problem.S_k - 1 - key)
    if problem.CAUSAL:
        last = gl.minimum(last, rows + (problem.S_k - problem.S_q - key))
    s = gl.where((keys & ~6)[None, :] <= last[:, None] - (keys & 6)[None, :], s, float("-inf"))
    return s if problem.window is None else apply_window(s, row, key, problem)


@gluon.jit
def apply_window(s, row, key, problem):
    """As apply_mask, for keys before a query's window alone."""
    rows = problem.queries(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
    keys = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    first = rows + (problem.first_key(row) - key)
    return gl.where((keys & ~6)[None, :] >= first[:, None] - (keys & 6)[None, :], s, float("-inf"))


@gluon.jit
def apply_causal_mask(s, row, key, problem):
    """As apply_mask, if CAUSAL, in the loop over blocks on the diagonal."""
    rows = problem.queries(row, s.shape[0], gl.SliceLayout(1, s.type.layout))
    keys = key + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    seen = (keys < problem.S_k)[None, :]
    seen = seen & (keys[None, :] <= rows[:, None] + (problem.S_k - problem.S_q))
    s = gl.where(seen, s, float("-inf"))
    return s if problem.window is None else apply_window(s, row, key, problem)


@gluon.jit
def online_softmax(s, m, l, scale_log2):
    """P in fp32, the new row maximum in powers of 2, partial row sums, and alpha, by which O has to be multiplied."""
    m_new = gl.maximum(m, gl.max(s, axis=1) * scale_log2)
    p, alpha = exp2(s * scale_log2 - m_new[:, None]), exp2(m - m_new)
    kept = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None]
    return p, m_new, kept + partial_sums(p), alpha


# The largest partial sum, by way of shared memory, one value a warp. Positive floats compare as their bits do, and for
# integers a warp has a reduction instruction. A sum that is NaN or infinite has larger bits, too.
@gluon.jit
def record_largest_sum(sums, largest_sums):
    bits = sums.to(gl.int32, bitcast=True)
    largest_sums.store(gl.max(bits.reshape((4, bits.shape[0] * bits.shape[1] // 4)), axis=1))


@gluon.jit
def largest_sum(largest_sums):
    return gl.max(largest_sums.load(gl.BlockedLayout([4], [32], [4], [0])), axis=0)


# P in fp32 holds 2^127, so a larger m takes a multiplication and no second QK. P in bf16 has fp32's exponents, so m
# is raised by 48 more than needed: the next time is when exponentials have grown by 2^61. P in fp16 ends at 2^-24.
@gluon.jit
def raise_maximum(p, o, m, l, sums, dtype: gl.constexpr):
    """P, O and l of a larger m, which makes a row's largest partial sum 2^-HEADROOM, or up to twice that."""
    HEADROOM: gl.constexpr = 48 if dtype == gl.bfloat16 else 0
    largest = gl.convert_layout(gl.max(sums, axis=1), m.type.layout)
    exponent = (largest.to(gl.int32, bitcast=True) >> 23) - 127
    m_new = m + gl.maximum(exponent + HEADROOM, 0).to(gl.float32)
    alpha = exp2(m - m_new)
    return scale_rows(p, alpha), scale_chunks(o, alpha), m_new, scale_rows(l, alpha)


@aggregate
class ConsumerTile:
    """A consumer warpgroup's share of a tile, 64 queries, and where the tile's blocks of keys are."""

    WHICH: gl.constexpr  # of the CTA's consumers
    args: PartitionArgs
    problem: Problem
    q_stage: gl.tensor
    q: gl.tuple  # [ROWS, columns]
    k: Ring
    v: Ring
    step: gl.tensor  # the rings' step of block 0
    row: gl.tensor  # the first query
    key: gl.tensor  # the first key of block 0; each block is before the last one


@gluon.jit
def masked_blocks(c, o, m, l, begin, end):
    """Blocks on the diagonal: QK, softmax, PV, one after the other. A stage is released when its matmul is over."""
    KEYS: gl.constexpr = c.k.descs[0].block_type.shape[-2]
    for block in range(begin, end):
        s = warpgroup_mma_wait(0, deps=(issue_qk(c.q, c.k, c.step + block, KEYS),))
        c.k.release(c.step + block)
        s = apply_causal_mask(capped(s, c.args.cap_scale), c.row, c.key - block * KEYS, c.problem)
        p, m, l, alpha = online_softmax(s, m, l, c.args.scale_log2)
        p = operand_a(p, o[0], c.v.smems[0].dtype)
        o = issue_pv(p, scale_chunks(o, alpha), c.v, c.step + block)
        o, p = wait_pv(o, p)
        c.v.release(c.step + block)
    return o, m, l


@gluon.jit
def first_block(c, o, m, l, block, KEYS: gl.constexpr):
    """Prologue: QK and the softmax of the last block that the diagonal or the tail crosses, which gives m. P is left
    for next_block. KEYS: all of the block's keys, or its first half."""
    key = c.key - block * c.k.descs[0].block_type.shape[-2]
    s = warpgroup_mma_wait(0, deps=(issue_qk(c.q, c.k, c.step + block, KEYS),))
    c.k.release(c.step + block)
    s = apply_mask(capped(s, c.args.cap_scale), c.row, key, c.problem)
    p, m, l, alpha = online_softmax(s, m, l, c.args.scale_log2)
    return packed_operand_a(p, o, c.v.smems[0].dtype), scale_chunks(o, alpha), m, l


@gluon.jit
def next_block(c, p, o, m, l, block, EDGE: gl.constexpr):
    """QK of a block, and its softmax under PV of the block before. K is released after the test of the sums.

    EDGE: the window's edge may cross the block.
    """
    KEYS: gl.constexpr = c.k.descs[0].block_type.shape[-2]
    step, key = c.step + block, c.key - block * KEYS
    dtype: gl.constexpr = c.v.smems[0].dtype
    largest_sums = c.args.largest_sums.index(c.WHICH)
    s = issue_qk(c.q, c.k, step, KEYS)
    o = issue_pv(p, o, c.v, step - 1)
    s = warpgroup_mma_wait(len(o), deps=(s,))  # the last matmuls, PV, may be unfinished: one for each chunk
    s = capped(s, c.args.cap_scale)
    if EDGE:
        s = apply_window(s, c.row, key, c.problem)
    p_new = exp2(s * c.args.scale_log2 - m[:, None])
    sums = partial_sums(p_new)
    record_largest_sum(sums, largest_sums)
    o, p = wait_pv(o, p)
    p_packed = packed_operand_a(p_new, o, dtype)
    largest = largest_sum(largest_sums)
    if largest > LARGE_SUM:  # rare; the same branch for all 4 warps
        if largest > HUGE_SUM:  # P may be infinite
            s = capped(warpgroup_mma_wait(0, deps=(issue_qk(c.q, c.k, step, KEYS),)), c.args.cap_scale)
            if EDGE:
                s = apply_window(s, c.row, key, c.problem)
            p_new, m, l, alpha = online_softmax(s, m, l, c.args.scale_log2)
            p_packed, o = packed_operand_a(p_new, o, dtype), scale_chunks(o, alpha)
        else:
            p_new, o, m, l = raise_maximum(p_new, o, m, l + sums, sums, dtype)
            p_packed = packed_operand_a(p_new, o, dtype)
    else:
        l += sums
    c.v.release(step - 1)
    c.k.release(step)
    return p_packed, o, m, l


@gluon.jit
def main_loop(c, p, o, m, l, begin, edge, end):
    """Blocks begin + 1 to end - 1, and the drain. P is that of block `begin`. The window's edge may cross blocks from
    `edge` on."""
    for block in range(begin + 1, edge):
        p, o, m, l = next_block(c, p, o, m, l, block, False)
    if c.problem.window is not None:
        for block in range(edge, end):
            p, o, m, l = next_block(c, p, o, m, l, block, True)
    return drain(c, p, o, c.step + end - 1), m, l


@gluon.jit
def drain(c, p, o, step):
    """The last PV. Q is released a matmul early, so that the next tile's Q is loaded under the epilogue."""
    c.args.q.release(c.q_stage)
    o, p = wait_pv(issue_pv(p, o, c.v, step), p)
    c.v.release(step)
    return o


# The first warpgroup's half of the diagonal block. Its P has another shape than those of whole blocks, so the first
# whole block is computed here, and not by the loop.
@gluon.jit
def half_block_first(c, o, m, l, end):
    HALF_KEYS: gl.constexpr = c.k.descs[0].block_type.shape[-2] // 2
    HALF: gl.constexpr = accumulator(HALF_KEYS)
    ROWS: gl.constexpr = m.shape[0]
    no_sums = partial_sums(gl.zeros((ROWS, HALF_KEYS), gl.float32, HALF))
    m_half = gl.convert_layout(m, gl.SliceLayout(1, HALF))
    p, o, m_half, l_half = first_block(c, o, m_half, no_sums, 0, HALF_KEYS)
    m, l = gl.convert_layout(m_half, m.type.layout), gl.convert_layout(l_half, l.type.layout)
    if end > 1:
        p_whole, o, m, l = next_block(c, p, o, m, l, 1, False)
        o, m, l = main_loop(c, p_whole, o, m, l, 1, end, end)
    else:
        o = drain(c, p, o, c.step)
    return o, m, l


@gluon.jit
def consumer_partition(args, WHICH: gl.constexpr, ALIGNED: gl.constexpr):
    CAUSAL: gl.constexpr = args.problem.CAUSAL
    WINDOW: gl.constexpr = args.problem.window is not None
    CONSUMERS: gl.constexpr = args.CONSUMERS
    QUERIES: gl.constexpr = args.problem.QUERIES
    ROWS: gl.constexpr = args.q.descs[0].block_type.shape[-3] * QUERIES
    KEYS: gl.constexpr = args.k.descs[0].block_type.shape[-2]
    LAYOUT: gl.constexpr = accumulator(KEYS)
    step, count, work = 0, 0, args.problem.work(args.scheduler.receive(0))
    while work[0] < args.problem.num_tiles():
        problem, index = problem_of(args.problem, work)
        batch, head, row, blocks, last = problem.tile(index, CONSUMERS * QUERIES, KEYS)
        row += WHICH * QUERIES
        key = (last - 1) * KEYS
        # Block 0 is the last one of the keys. What becomes of the blocks, in the order in which they come:
        #   0 .. unseen - 1           released unread: no query of this warpgroup sees a key of them
        #   unseen .. masked - 2      masked_blocks: the diagonal crosses them
        #   masked - 1                first_block: the last that the diagonal or the tail crosses
        #   masked .. edge - 1        main_loop, without a mask
        #   edge .. end - 1           main_loop, where the window's edge may cross them
        #   end .. blocks - 1         released unread: before the window of each query
        unseen, masked, edge, end = 0, 1, blocks, blocks
        if CAUSAL and not ALIGNED:
            masked = min(blocks, max(1, last - (row + problem.S_k - problem.S_q + 1) // KEYS))
        if CAUSAL and CONSUMERS * QUERIES > KEYS:
            unseen = max(0, min(blocks - 1, last - (row + QUERIES + problem.S_k - problem.S_q + KEYS - 1) // KEYS))
        if WINDOW:
            first_key = problem.first_key(row)
            end = max(masked, min(blocks, last - max(0, first_key) // KEYS))
            edge = max(masked, min(end, last - (max(0, first_key + QUERIES - 1) + KEYS - 1) // KEYS))
        if row >= problem.S_q:  # the sequence's end: no query of this warpgroup
            unseen, end = blocks, blocks
        m = gl.full((ROWS,), LOWEST, gl.float32, gl.SliceLayout(1, LAYOUT))
        l = partial_sums(gl.zeros((ROWS, KEYS), gl.float32, LAYOUT))
        o = zero_chunks(args.v.descs, ROWS)
        q_stage, parity = args.q_stage(WHICH, count)
        q = matrices_of(args.q.smems, q_stage)
        c = ConsumerTile(
            WHICH=WHICH, args=args, problem=problem, q_stage=q_stage, q=q, k=args.k, v=args.v, step=step, row=row,
            key=key,
        )  # fmt: skip
        for block in range(unseen):
            release_unread(c, block)
        mbarrier.wait(args.q.full.index(q_stage), parity)
        if CAUSAL and not ALIGNED:
            o, m, l = masked_blocks(c, o, m, l, unseen, masked - 1)
        if unseen < blocks:
            if ALIGNED and WHICH == 0:
                o, m, l = half_block_first(c, o, m, l, blocks)
            else:
                p, o, m, l = first_block(c, o, m, l, masked - 1, KEYS)
                o, m, l = main_loop(c, p, o, m, l, masked - 1, edge, end)
        else:
            args.q.release(q_stage)
        if WINDOW:
            for block in range(end, blocks):
                release_unread(c, block)
        step, count = step + blocks, count + 1
        work = args.problem.work(args.scheduler.receive(count))  # a record is loaded under the epilogue
        epilogue(args, problem, o, m, l, batch, head, row, WHICH)
    tma.store_wait(0)


@gluon.jit
def zero_chunks(descs, ROWS: gl.constexpr):
    """Accumulators of zeros, one for each chunk."""
    FIRST: gl.constexpr = descs[0].block_type.shape[-1]
    first = gl.zeros((ROWS, FIRST), gl.float32, accumulator(FIRST))
    if len(descs) == 1:
        return (first,)
    else:
        SECOND: gl.constexpr = descs[1].block_type.shape[-1]
        return (first, gl.zeros((ROWS, SECOND), gl.float32, accumulator(SECOND)))


@gluon.jit
def matrices_of(smems, stage):
    """A stage's chunks as [rows, columns] each."""
    first = as_rows(smems[0].index(stage))
    return (first,) if len(smems) == 1 else (first, as_rows(smems[1].index(stage)))


@gluon.jit
def as_rows(tile):
    """A shared tile [1, .., heads, queries, columns] as [heads * queries, columns]."""
    return tile.reshape((tile.shape[-3] * tile.shape[-2], tile.shape[-1]))


@gluon.jit
def release_unread(c, block):
    """Release a block's stages without reading them. The consumer first waits until the block has come: otherwise its
    arrival would count for the block before."""
    c.k.wait_full(c.step + block)
    c.k.release(c.step + block)
    c.v.wait_full(c.step + block)
    c.v.release(c.step + block)


# O has a buffer of its own: the next tile's Q may be coming into that of this tile. A query without visible keys has
# O = 0 and lse = -inf.
@gluon.jit
def epilogue(args, problem, o, m, l, batch, head, row, WHICH: gl.constexpr):
    l = gl.convert_layout(gl.sum(l, axis=1), m.type.layout)
    empty = l == 0
    PACK: gl.constexpr = args.q.descs[0].block_type.shape[-3]
    LAYOUT: gl.constexpr = m.type.layout
    rows = problem.queries(row, m.shape[0], LAYOUT)
    lse = gl.where(empty, -float("inf"), (m + gl.log2(l)) * LN2)
    S_q, lse_ptr = args.problem.S_q, args.lse_ptr
    heads = (batch * problem.H + head) * PACK + gl.arange(0, m.shape[0], layout=LAYOUT) // problem.QUERIES
    if problem.q_end is not None:
        lse_ptr += problem.q_end - problem.S_q
    gl.store(lse_ptr + heads.to(gl.int64) * S_q + rows, lse, mask=rows < problem.S_q)
    factor = 1 / gl.where(empty, 1.0, l)
    for i in gl.static_range(len(o)):
        # The store of the tile before ran during this whole tile. Two chunks of equal width have one buffer.
        tma.store_wait(0)
        out = args.o_smems[i].index(WHICH)
        as_rows(out).store(scale_rows(o[i], factor).to(out.dtype))
        fence_async_shared()
        where = place_of(batch, problem.q_end, problem.S_q)
        column = i * args.o_descs[0].block_type.shape[-1]
        async_store(args.o_descs[i], coordinates(where, head * PACK, row, column), out)


@gluon.jit
def allocate_ring(desc, rest, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring of blocks of one or two chunks; a stage is empty when so many consumers have read it."""
    descs, smems = chunks(desc, rest), (allocate_stages(desc, STAGES),)
    if rest is not None:
        smems = (smems[0], allocate_stages(rest, STAGES))
    full, empty = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, CONSUMERS)
    return Ring(descs=descs, smems=smems, full=full, empty=empty)


@gluon.jit
def chunks(first, second):
    return (first,) if second is None else (first, second)


@gluon.jit
def allocate_out(desc, rest, CONSUMERS: gl.constexpr):
    """Shared memory of O, for each chunk. Chunks of equal width share it, as there is no more."""
    first = allocate_stages(desc, CONSUMERS)
    if rest is None:
        return (first,)
    elif rest.block_type.shape[-1] == desc.block_type.shape[-1]:
        return (first, first)
    else:
        return (first, allocate_stages(rest, CONSUMERS))


@gluon.jit(do_not_specialize=["tiles", "H", "all_heads", "heads_at_once", "S_q", "S_k", "window"])
def attention_hopper_kernel(
    q_desc, k_desc, v_desc, o_desc,  # of the first chunk of columns of q, k [.., D] and v, o [.., D_v]
    q_rest, k_rest, v_rest, o_rest,  # of the second chunk of columns, or None
    lse_ptr, counter_ptr,  # [B, H, S_q] in fp32; the scheduler's counter
    records_ptr,  # None, or of packed sequences: S_q and S_k are totals then, and all_heads is H
    scale_log2, cap_scale,  # see score_scales
    tiles, H, all_heads, heads_at_once, S_q, S_k, window, GROUP: gl.constexpr, CAUSAL: gl.constexpr,
    Q_BUFFERS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    ALIGNED: gl.constexpr,
):  # fmt: skip
    if records_ptr is not None:
        tiles = gl.load(records_ptr)
    QUERIES: gl.constexpr = q_desc.block_type.shape[-2]
    args = PartitionArgs(
        q=allocate_ring(q_desc, q_rest, Q_BUFFERS * CONSUMERS, 1), k=allocate_ring(k_desc, k_rest, K_STAGES, CONSUMERS),
        v=allocate_ring(v_desc, v_rest, V_STAGES, CONSUMERS),
        o_descs=chunks(o_desc, o_rest), o_smems=allocate_out(o_desc, o_rest, CONSUMERS),
        largest_sums=gl.allocate_shared_memory(gl.int32, [CONSUMERS, 4], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        scheduler=allocate_scheduler(counter_ptr, Q_BUFFERS),
        problem=Problem(
            tiles=tiles, H=H, all_heads=all_heads, heads_at_once=heads_at_once, S_q=S_q, S_k=S_k, window=window,
            CAUSAL=CAUSAL, QUERIES=QUERIES, records_ptr=records_ptr, q_end=None, k_end=None,
        ),
        lse_ptr=lse_ptr, scale_log2=scale_log2, cap_scale=cap_scale, CONSUMERS=CONSUMERS,
    )  # fmt: skip
    # The first partition runs in the kernel's own warps. Registers per thread: 128 * (232 + 232 + 40) <= 65536 with two
    # consumers, 128 * (168 + 160 + 160 + 24) = 65536 with three.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer_partition, (args, 0, ALIGNED)),
            (consumer_partition, (args, 1, ALIGNED)),
            (producer_partition, (args, GROUP)),
        ], [4, 1], [232, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer_partition, (args, 0, ALIGNED)),
            (consumer_partition, (args, 1, ALIGNED)),
            (consumer_partition, (args, 2, ALIGNED)),
            (producer_partition, (args, GROUP)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """What hopper_takes asks, with rows up to 256."""
    return hopper_takes(256, q, k, v)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float, softcap: float | None = None,
    sequences: Sequences | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [B, H, S_q, D], k [B, H_kv, S_k, D], v [B, H_kv, S_k, D_v] -> o [B, H, S_q, D_v], lse [B, H, S_q] in fp32.

    Tensors that `takes` takes. window needs causal. sequences: of rows that are packed, B = 1; positions end together
    in each.
    """
    (B, H, S_q, D), (_, H_kv, S_k, D_v) = q.shape, v.shape
    o, lse = empty_results(q, D_v)
    group, (keys, *buffers) = H // H_kv, blocks_of_keys(D, D_v)
    longest_q, longest_k, in_step = S_q, S_k, (S_k - S_q) % 128 == 0
    if sequences is not None:
        longest_q, longest_k = sequences.longest_q, sequences.longest_k
        in_step = sequences.q.data_ptr() == sequences.k.data_ptr()  # so all lengths are alike
    count, mean = (B, S_q) if sequences is None else (sequences.count, S_q / sequences.count)
    pack = heads_of_a_tile(group, mean, H * count, num_sms(q.device))
    consumers, aligned = variant(longest_k, max(D, D_v), keys, causal, window, in_step and pack == 1)
    queries, packs = ROWS // pack, H // pack  # of a warpgroup; of all heads
    if aligned:
        # Few heads at a time: tiles bound by compute and short ones, bound by bytes, are then under way together.
        at_once = even_groups(B * H, max(1, min(8, num_sms(q.device) // max(1, triton.cdiv(longest_q, 128)))))
    else:
        at_once = group // pack * even_groups(B * H_kv, heads_in_l2(2 * longest_k * (D + D_v), q.device))
    if sequences is None:
        listed, tiles, descriptor = None, triton.cdiv(S_q, consumers * queries), whole_descriptor
    else:
        listed, tiles = records(sequences.q, sequences.k, S_q, consumers * queries)
        descriptor = ragged_descriptor
    columns, v_columns = chunk_widths(D), value_chunk_widths(D, D_v)
    tensors = (
        (q, queries, pack, *columns), (k, keys, 1, *columns), (v, keys, 1, *v_columns), (o, queries, pack, *v_columns)
    )  # fmt: skip
    descs = (descriptor(t, n, first, heads) for t, n, heads, first, _ in tensors)
    rest_descs = (descriptor(t, n, rest, heads) if rest else None for t, n, heads, _, rest in tensors)
    if window is not None:
        window = min(window, S_k)  # no query sees more, and an int32 holds it
    attention_hopper_kernel[(min(tiles * B * packs, num_sms(q.device)),)](
        *descs, *rest_descs, lse, tile_counter(q.device), listed, *score_scales(scale, softcap),
        tiles, packs, B * packs, at_once, S_q, S_k, window, group // pack, causal, *buffers, consumers, aligned,
         num_warps=4,
    )  # fmt: skip
    return o, lse


def heads_of_a_tile(group: int, mean: float, tiles: int, sms: int) -> int:
    """How many heads of a group share a tile. It is one, unless a mean sequence's queries fill at most half a tile, and
    one head a tile makes more tiles than there are SMs. TMA copies powers of two: the largest that divides the group.
    """
    return min(ROWS, group & -group) if mean <= ROWS and tiles > sms else 1


def chunk_widths(D: int) -> tuple[int, int]:
    """The widths of the chunks that hold D columns of Q and K: powers of two, the second may be 0."""
    if 64 < D <= 96:
        return 64, (16 if D <= 80 else 32)
    return chunks_of_128(D)


def value_chunk_widths(D: int, D_v: int) -> tuple[int, int]:
    """As chunk_widths, for V and O."""
    return (64, 64) if 128 < D <= 192 and 64 < D_v <= 128 else chunks_of_128(D_v)


def chunks_of_128(columns: int) -> tuple[int, int]:
    """One chunk of 64 or 128 columns, or one of 128 and one of 64 or 128."""
    if columns <= 128:
        return (64 if columns <= 64 else 128), 0
    return 128, (64 if columns <= 192 else 128)


def blocks_of_keys(D: int, D_v: int) -> tuple[int, int, int, int]:
    """Keys of a block, the buffers of Q, and the stages of K and of V: what fits beside O.

    A second Q gains where a tile's own work is short. On an H200, without a mask, it brought 10% at D = 64 and S = 512,
    and about 1% at S = 4096. With a causal mask and at D = 128 it brought nothing.
    """
    longer = max(D, D_v)
    if longer <= 64:
        return 128, 2, 4, 4
    if D <= 192 and D_v <= 128:
        return 128, 1, 2, 2
    return 64, 1, *((3, 2) if longer <= 192 else (2, 2))


def variant(S_k: int, D: int, keys: int, causal: bool, window: int | None, in_step: bool) -> tuple[int, bool]:
    """How many consumer warpgroups, and whether the kernel for aligned diagonals. D: of the longer rows. in_step:
    S_k - S_q is a multiple of 128.

    D <= 64 leaves registers for a third consumer. Causal, its tiles of 192 queries compute more of the diagonal's
    blocks in vain, which is a third more work at S = 1024 and little at 16384. A block of 64 keys has as many as a
    warpgroup has queries, so that none is computed in vain.
    """
    if window is not None or keys == 64:
        return 2, False
    if causal and in_step and (D > 64 or S_k <= 4096):
        return 2, True
    return (3 if D <= 64 and not (causal and S_k < 2048) else 2), False
