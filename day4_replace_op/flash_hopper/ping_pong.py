"""Flash attention on Hopper: ping-pong scheduling.

A side branch of overlap_softmax.py, after FlashAttention-3 (section 3.1). Two barriers make the consumers issue in
turns, so that one multiplies while the other computes exponentials. It brings nothing: 770 TFLOP/s were predicted at
D = 128, and an H200 has 681, where overlap_softmax has 685. At all 15 shapes of lesson 8 the two are within 2%.

    tensor cores  QQQQPPPPqqqqppppQQQQPPPPqqqqpppp      capitals: consumer 0, small: consumer 1
    softmax 0     ....ssssss..........ssssss......      period: 16 characters = 2048 cycles at D = 128
    softmax 1     ss..........ssssss..........ssss

Why a gain was predicted: by lesson 8's budget a consumer's PV takes 512 cycles at D = 128, and its softmax 800. So PV
alone does not cover the softmax: 300 cycles of it must run under the other consumer's matmuls. The two barriers see to
that. They also add a wait for the other consumer to each step. In overlap_softmax.py only the rings hold the consumers
together: one is at most as many blocks ahead of the other as a ring has stages, 2 at D = 128.

Why there is none, as far as it is known: the consumers of overlap_softmax.py seem to reach this picture without
barriers. The one that issues second waits for the first one's matmuls, and stays behind by as much. Lesson 8 says what
speaks for that. FlashAttention-3 has named barriers in place of these mbarriers.

In the backward pass the same idea gains 7% to 16% at D = 64 from S = 2048 on (lesson 9). There the consumers exchange
dS at each step. So they cannot drift apart by themselves, and without turns both exponentiate at the same time.
"""

import math

from lessonkit import needs, num_sms

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
from problems.attention import expect_plain

ROWS, KEYS = gl.constexpr(64), gl.constexpr(128)  # queries of a consumer, keys of a block
CONSUMERS = gl.constexpr(2)
LOWEST = gl.constexpr(torch.finfo(torch.float32).min)  # where a row's maximum starts: -inf - -inf would be NaN
LOG2E, LN2 = math.log2(math.e), gl.constexpr(math.log(2))
# The accumulator of QK [ROWS, KEYS]: warp w has rows 16 w to 16 w + 15, and four neighbouring threads share a row.
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))


@aggregate
class Ring:
    """Stages of one tensor in shared memory, and their barriers."""

    desc: tma.tensor_descriptor
    smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor | gl.constexpr  # None: every stage is loaded once

    @gluon.jit
    def load(self, stage, batch, head, row):
        """Announce a block's bytes to `full`, and start its copy. Rows past a head's last one come as zeros."""
        mbarrier.expect(self.full.index(stage), self.desc.block_type.nbytes)
        async_load(
            self.desc, [batch, head, row, 0], self.full.index(stage), self.smem.index(stage)
        )  # fmt: skip

    @gluon.jit
    def wait_full(self, step):
        """The stage of a step, when its block has come."""
        stage, parity = ring_slot(step, self.full.shape[0])
        mbarrier.wait(self.full.index(stage), parity)
        return stage

    @gluon.jit
    def wait_empty(self, step):
        """The stage of a step, when every consumer has read the block before. The first round need not wait."""
        stage, parity = ring_slot(step, self.full.shape[0])
        mbarrier.wait(self.empty.index(stage), parity ^ 1)
        return stage

    @gluon.jit
    def release(self, step):
        """This consumer has read a step's block."""
        mbarrier.arrive(self.empty.index(step % self.empty.shape[0]))


@aggregate
class Problem:
    """Sizes, and which tile is which. CAUSAL tiles see 1 to S_k / KEYS blocks of keys, so the longest come first."""

    tiles: gl.tensor  # of a head
    H: gl.tensor
    all_heads: gl.tensor  # B * H
    heads_at_once: gl.tensor
    S_q: gl.tensor
    S_k: gl.tensor
    CAUSAL: gl.constexpr

    @gluon.jit
    def tile(self, index):
        """Of the index-th tile: batch, head, its first query, and how many blocks of keys its queries see."""
        if self.CAUSAL:
            head, rank = tile_order(index, self.tiles, self.all_heads, self.heads_at_once)
            tile = self.tiles - 1 - rank
            end = min(self.S_k, max(0, (tile + 1) * (CONSUMERS * ROWS) + self.S_k - self.S_q))
        else:
            head, tile, end = index // self.tiles, index % self.tiles, self.S_k
        return head // self.H, head % self.H, tile * (CONSUMERS * ROWS), (end + KEYS - 1) // KEYS


@aggregate
class PartitionArgs:
    """What all warps of a CTA share."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    o_desc: tma.tensor_descriptor
    q_smem: gl.shared_memory_descriptor  # [CONSUMERS, 1, 1, ROWS, D]
    k_smem: gl.shared_memory_descriptor  # [STAGES, 1, 1, KEYS, D]
    v_smem: gl.shared_memory_descriptor
    o_smem: gl.shared_memory_descriptor  # as q_smem
    q_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    written_only: gl.shared_memory_descriptor  # [CONSUMERS, ROWS, 4] fp32, and no thread reads it
    may_issue: gl.shared_memory_descriptor  # New: of each consumer; a phase ends when the other has issued its matmuls
    problem: Problem
    lse_ptr: gl.tensor
    scale_log2: gl.tensor

    @gluon.jit
    def q_ring(self):
        return Ring(desc=self.q_desc, smem=self.q_smem, full=self.q_full, empty=None)

    @gluon.jit
    def k_ring(self):
        return Ring(desc=self.k_desc, smem=self.k_smem, full=self.k_full, empty=self.k_empty)

    @gluon.jit
    def v_ring(self):
        return Ring(desc=self.v_desc, smem=self.v_smem, full=self.v_full, empty=self.v_empty)


@aggregate
class ConsumerTile:
    """A consumer warpgroup's share of a tile, 64 queries, and where the tile's blocks of keys are."""

    WHICH: gl.constexpr  # of the CTA's consumers
    args: PartitionArgs
    q: gl.shared_memory_descriptor  # [ROWS, D]
    k: Ring
    v: Ring
    row: gl.tensor  # the first query
    key: gl.tensor  # the first key of block 0; each block is before the last one


# ---- Producer -------------------------------------------------------------------------------------------------------


@gluon.jit
def producer_partition(args):
    load_tile(args, gl.program_id(0))


@gluon.jit
def load_tile(args, index):
    """Issue all loads of a tile: Q of each consumer, then K and V of its blocks."""
    q, k, v = args.q_ring(), args.k_ring(), args.v_ring()
    batch, head, row, blocks = args.problem.tile(index)
    for consumer in gl.static_range(CONSUMERS):
        q.load(consumer, batch, head, row + consumer * ROWS)
    for block in range(blocks + 1):  # K of a block, then V of the one before: the order in which they are needed
        if block < blocks:
            k.load(k.wait_empty(block), batch, head, (blocks - 1 - block) * KEYS)
        if block > 0:
            v.load(v.wait_empty(block - 1), batch, head, (blocks - block) * KEYS)


# ---- Consumer -------------------------------------------------------------------------------------------------------


@gluon.jit
def issue_qk(c, step):
    """Issue S = Q K^T [ROWS, KEYS] of the block that a step of the K ring brings."""
    stage = c.k.wait_full(step)
    zeros = gl.zeros((ROWS, KEYS), gl.float32, SCORES)
    return warpgroup_mma(c.q, as_matrix(c.k.smem.index(stage)).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def issue_pv(c, p, o, step):
    """Issue O += P V of the block that a step of the V ring brings. P and O are in registers."""
    stage = c.v.wait_full(step)
    return warpgroup_mma(p, as_matrix(c.v.smem.index(stage)), o, is_async=True)


@gluon.jit
def apply_mask(s, row, key, problem):
    """-inf where a query does not see a key; row, key: the block's first ones."""
    rows = row + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, s.type.layout))
    keys = key + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    visible = (keys < problem.S_k)[None, :]
    if problem.CAUSAL:
        visible = visible & (keys[None, :] <= rows[:, None] + (problem.S_k - problem.S_q))
    return gl.where(visible, s, float("-inf"))


# A row lies in four threads: thread t has the columns 8 j + 2 t and 8 j + 2 t + 1 for all j. The row's sum is needed at
# the end only, so each thread keeps a part: [rows, keys] -> [rows, 4].
@gluon.jit
def partial_sums(p):
    return gl.sum(gl.sum(p.reshape((p.shape[0], p.shape[1] // 8, 4, 2)), axis=3), axis=1)


@gluon.jit
def scale_rows(o, factor):
    """O [rows, D] times a factor per row. Both have a row in the same threads, so no value moves between threads."""
    return o * gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout))[:, None]


@gluon.jit
def online_softmax(s, m, l, scale_log2):
    """P in fp32, the new row maximum times scale_log2, partial row sums, and alpha, the factor that rescales O."""
    m_new = gl.maximum(m, gl.max(s, axis=1) * scale_log2)
    p, alpha = exp2(s * scale_log2 - m_new[:, None]), exp2(m - m_new)
    kept = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None]
    return p, m_new, kept + partial_sums(p), alpha


# New: wait_for_turn and pass_turn. Both consumers have the same number of blocks, or one would wait for ever.
@gluon.jit
def wait_for_turn(c, block):
    """Until the other consumer has issued the matmuls of its block; consumer 0 begins."""
    mbarrier.wait(c.args.may_issue.index(c.WHICH), block & 1)


@gluon.jit
def pass_turn(c):
    """Let the other consumer issue."""
    mbarrier.arrive(c.args.may_issue.index(1 - c.WHICH))


@gluon.jit
def prologue(c, o, m, l):
    """QK and softmax of block 0, which needs a mask. P is left for the first step."""
    wait_for_turn(c, 0)  # New
    s = issue_qk(c, 0)
    pass_turn(c)  # New
    s = warpgroup_mma_wait(0, deps=(s,))
    c.k.release(0)
    s = apply_mask(s, c.row, c.key, c.args.problem)
    p, m, l, alpha = online_softmax(s, m, l, c.args.scale_log2)
    return operand_a(p, o, c.v.smem.dtype), scale_rows(o, alpha), m, l


@gluon.jit
def step(c, p, o, m, l, block):
    """QK of a block, and its softmax under PV of the block before. A stage is released when its matmul is over."""
    wait_for_turn(c, block)  # New
    s = issue_qk(c, block)
    o = issue_pv(c, p, o, block - 1)
    pass_turn(c)  # New
    s = warpgroup_mma_wait(1, deps=(s,))  # of two matmuls one may be unfinished: the later one, PV
    c.k.release(block)
    p_new, m, l, alpha = online_softmax(s, m, l, c.args.scale_log2)
    # ptxas would move the wait for PV above the exponentials. It moves no wait above a store, and l is their sum.
    c.args.written_only.index(c.WHICH).store(l)
    o, p = warpgroup_mma_wait(0, deps=(o, p))
    c.v.release(block - 1)
    return operand_a(p_new, o, c.v.smem.dtype), scale_rows(o, alpha), m, l


@gluon.jit
def main_loop(c, p, o, m, l, blocks):
    """Blocks 1 to blocks - 1, which need no mask."""
    for block in range(1, blocks):
        p, o, m, l = step(c, p, o, m, l, block)
    return drain(c, p, o, blocks - 1), m, l


# The PV that no step has issued.
@gluon.jit
def drain(c, p, o, step):
    """PV of the last block."""
    o, p = warpgroup_mma_wait(0, deps=(issue_pv(c, p, o, step), p))
    c.v.release(step)
    return o


@gluon.jit
def consumer_partition(args, WHICH: gl.constexpr):
    attend_tile(args, gl.program_id(0), WHICH)


@gluon.jit
def attend_tile(args, index, WHICH: gl.constexpr):
    """Attention of a consumer's 64 queries of a tile."""
    D: gl.constexpr = args.q_desc.block_type.shape[3]
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    batch, head, row, blocks = args.problem.tile(index)
    m = gl.full((ROWS,), LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
    l = partial_sums(gl.zeros((ROWS, KEYS), gl.float32, SCORES))
    o = gl.zeros((ROWS, D), gl.float32, OUT)
    c = ConsumerTile(
        WHICH=WHICH, args=args, q=as_matrix(args.q_smem.index(WHICH)), k=args.k_ring(), v=args.v_ring(),
        row=row + WHICH * ROWS, key=(blocks - 1) * KEYS,
    )  # fmt: skip
    mbarrier.wait(args.q_full.index(WHICH), 0)
    if blocks > 0:
        p, o, m, l = prologue(c, o, m, l)
        o, m, l = main_loop(c, p, o, m, l, blocks)
    epilogue(c, o, m, l, batch, head)


# A query without visible keys has O = 0 and lse = -inf.
@gluon.jit
def epilogue(c, o, m, l, batch, head):
    """O / l in 16 bits by way of shared memory and a TMA store, and lse by plain stores."""
    args, S_q = c.args, c.args.problem.S_q
    l = gl.convert_layout(gl.sum(l, axis=1), m.type.layout)
    empty = l == 0
    rows = c.row + gl.arange(0, ROWS, layout=m.type.layout)
    lse = gl.where(empty, -float("inf"), (m + gl.log2(l)) * LN2)
    gl.store(args.lse_ptr + (batch * args.problem.H + head).to(gl.int64) * S_q + rows, lse, mask=rows < S_q)
    out = args.o_smem.index(c.WHICH)
    as_matrix(out).store(scale_rows(o, 1 / gl.where(empty, 1.0, l)).to(out.dtype))
    fence_async_shared()
    async_store(args.o_desc, [batch, head, c.row, 0], out)
    tma.store_wait(0)


# ---- Launch ---------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["tiles", "H", "all_heads", "heads_at_once", "S_q", "S_k"])
def flash_kernel(
    q_desc, k_desc, v_desc, o_desc,  # of [B, H, S_q, D], twice [B, H, S_k, D], [B, H, S_q, D]
    lse_ptr,  # [B, H, S_q] in fp32
    scale_log2, tiles, H, all_heads, heads_at_once, S_q, S_k, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    args = PartitionArgs(
        q_desc=q_desc, k_desc=k_desc, v_desc=v_desc, o_desc=o_desc,
        q_smem=allocate_stages(q_desc, CONSUMERS), k_smem=allocate_stages(k_desc, STAGES),
        v_smem=allocate_stages(v_desc, STAGES), o_smem=allocate_stages(o_desc, CONSUMERS),
        q_full=allocate_barriers(CONSUMERS, 1),
        k_full=allocate_barriers(STAGES, 1), k_empty=allocate_barriers(STAGES, CONSUMERS),
        v_full=allocate_barriers(STAGES, 1), v_empty=allocate_barriers(STAGES, CONSUMERS),
        written_only=gl.allocate_shared_memory(
            gl.float32, [CONSUMERS, ROWS, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        ),
        may_issue=allocate_barriers(CONSUMERS, 1),  # New
        problem=Problem(
            tiles=tiles, H=H, all_heads=all_heads, heads_at_once=heads_at_once, S_q=S_q, S_k=S_k, CAUSAL=CAUSAL
        ),
        lse_ptr=lse_ptr, scale_log2=scale_log2,
    )  # fmt: skip
    mbarrier.arrive(args.may_issue.index(0))  # New: consumer 0 issues first
    # The first partition runs in the kernel's own warps. Registers per thread: 128 * (232 + 232 + 40) <= 65536, as the
    # producer's warp takes the registers of a warpgroup.
    gl.warp_specialize([
        (consumer_partition, (args, 0)),
        (consumer_partition, (args, 1)),
        (producer_partition, (args,)),
    ], [4, 1], [232, 40])  # fmt: skip


@needs(90, "TMA and wgmma", only=True)
def ping_pong(q, k, v, causal=False, window=None, scale=None):
    """q [B, H, S_q, D], k and v [B, H, S_k, D] in 16 bits, D = 64 or 128 -> o as q, lse [B, H, S_q] in fp32."""
    scale = expect_plain(q, k, v, causal, window, scale)  # the rest: course_ops.attention
    (B, H, S_q, D), S_k = q.shape, k.shape[2]
    o, lse = torch.empty_like(q), torch.empty(B, H, S_q, device=q.device)
    stages = 4 if D == 64 else 2  # what fits beside Q and O
    tiles = triton.cdiv(S_q, 128)
    # Causal: as many heads at a time as the SMs have places for all of their tiles, 8 at most. So long tiles, bound by
    # compute, and short ones, bound by bytes, run side by side.
    heads_at_once = min(B * H, max(1, min(8, num_sms() // tiles)))
    descs = [tensor_descriptor(t, [1, 1, rows, D]) for t, rows in ((q, 64), (k, 128), (v, 128), (o, 64))]
    flash_kernel[(tiles * B * H,)](
        *descs, lse, scale * LOG2E, tiles=tiles, H=H, all_heads=B * H, heads_at_once=heads_at_once,
        S_q=S_q, S_k=S_k, CAUSAL=causal, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return o, lse
