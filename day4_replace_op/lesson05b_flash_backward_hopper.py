"""Flash attention, backward on Hopper: five products, and who adds to dQ
======================================================================
Lesson 5 multiplies seven times for five: S and dP are computed by the owners of queries and again by those of keys. At
the 650 TFLOP/s that its kernels might reach at best this is 5/7 of 650, 464 counted. Five products need one owner, of
keys, with whom dK and dV stay, and a dQ to which all owners of keys add. Per step of 64 queries and a tile of 128 keys
at D = 128 (128 queries at D = 64: the same numbers, but twice the exponentials), cycles of an SM:

    products       5 * 2 * 64 * 128 * 128 FLOPs, 4096 a cycle          2560
    exponentials   64 * 128, 16 a cycle                                 512    D = 64: 1024
    the rest       4 instructions a score, 128 lanes                    256             512
    shared memory  what products read, 256 KB, and 64 more, 128 a cycle 2500
    dQ             64 * 128 numbers of fp32 to L2, 32 KB                12.8 bytes a cycle, of about 39

dQ is added up in fp32 in memory, by red.global.add of 4 numbers a thread: its buffer lies in the order in which a
warpgroup's registers have it, so that a warp's 32 x 16 bytes are contiguous. Nobody waits for an addition, but their
order is another one each time: dQ is not the same to the bit. Whoever needs that calls lesson 5's, which is.

    1 warp                 asks TMA for K, V, Q, dO, stores dK and dV     24 registers a thread
    2 warpgroups (4 + 4)   64 keys each: P^T, dS^T, dV, dK, half of dQ   240: dK and dV 128, S^T and dP^T 64, P^T 16

You will learn: sums with many owners, a sum's start as a place for what is added anyway, products under everything.
Sources: Shah et al. 2024, FlashAttention-3, section 3 and its backward in hopper/; Dao 2023, algorithm 2.
Needs a Hopper GPU to run; without one the rungs are compiled, and a slow twin of all barriers runs, in any order.
Run it:    python day4_replace_op/lesson05b_flash_backward_hopper.py
Check it:  python -m lessonkit check lesson05b_flash_backward_hopper
Time it:   python -m lessonkit bench lesson05b_flash_backward_hopper
"""

import math

from lessonkit import Lesson, Mutant, Unsupported, case, needs

import torch
import torch.nn.functional as F
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from day3_matmul_tk.lesson07_gluon_matmul import barriers, stages
from day3_matmul_tk.lesson07b_gluon_persistent import Barrier, in_any_order, slot
from day4_replace_op import hopper
from day4_replace_op import lesson04b_flash_backward_queries as lesson04b
from day4_replace_op import lesson05_flash_backward as lesson05
from day4_replace_op.heads import LN2
from day4_replace_op.hopper import left, matrix
from day4_replace_op.hopper_backward import PEERS, launch, load_partition, place
from day4_replace_op.lesson06_flash_hopper import exp2


# A product adds to what its registers hold. They begin with -lse (as a score) or -delta of each query, not with 0: then
# P = 2^(scale S') and dS = P dP', and 2 numbers a query need no registers while S^T and dP^T have theirs.
@gluon.jit
def ask_scores(keys, queries, numbers, LAYOUT: gl.constexpr):
    """S^T = K Q^T or dP^T = V dO^T [keys, queries], less the queries' numbers."""
    KEYS: gl.constexpr = keys.shape[0]
    ROWS: gl.constexpr = queries.shape[0]
    start = numbers.load(LAYOUT).broadcast_to((KEYS, ROWS))
    return warpgroup_mma(keys, queries.permute((1, 0)), start, is_async=True)


# Both warpgroups' dS, times all 128 keys, for a half of the step's dQ: 64 queries x 64 columns of D if D is 128, else
# 64 of 128 queries. wgmma reads dS [keys, queries] as its transpose.
@gluon.jit
def ask_dq(ds_smem, at, k_smem, zero, WHICH: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    dq = gl.zeros((64, 64), gl.float32, LAYOUT)
    for half in gl.static_range(2):
        ds, k = ds_smem.index(at + half), matrix(k_smem.index(half + zero))
        if k.shape[1] == 128:
            k = k.slice(WHICH * 64, 64, dim=1)
        else:
            ds = ds.slice(WHICH * 64, 64, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=half > 0, is_async=True)
    return dq


# A thread has numbers of rows r and r + 8, columns c and c + 1, of each 8 columns. In this order they are neighbours.
@gluon.jit
def add_dq(ptr, dq):
    x = dq.reshape((4, 2, 8, 8, 4, 2)).permute((0, 3, 2, 4, 1, 5)).reshape((4096,))
    gl.atomic_add(ptr + gl.arange(0, 4096, layout=x.type.layout), x, sem="relaxed")


@gluon.jit
def probabilities(s, key, row, sizes, scale_log2, MASKED: gl.constexpr, CAUSAL: gl.constexpr):
    p = exp2(s * scale_log2)
    if MASKED:
        S_q, S_k = sizes[4], sizes[5]
        keys = gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, s.type.layout))[:, None]
        if CAUSAL:  # this includes the tail: who sees keys past S_k is past S_q
            rows = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))[None, :]
            p = gl.where(keys <= rows + (row + S_k - S_q - key), p, 0.0)
        else:
            p = gl.where(keys < S_k - key, p, 0.0)
    return p


# What both warpgroups' dQ needs of this one. Two buffers by turns: who has come to a step's meeting has multiplied the
# dS of the step before, so nobody reads what is overwritten after it.
@gluon.jit
def share(ds, ds_smem, at, meet, WHICH: gl.constexpr):
    ds_smem.index(at + WHICH).store(ds)
    fence_async_shared()
    mbarrier.arrive(meet.index(0))


# A zero that the compiler cannot know. Without it the places of K and V in shared memory, 16 registers of wgmma's
# descriptors, are computed before the loop and kept.
@gluon.jit
def unknown_zero(x):
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def one_by_one(
    s, dk, dv, smem, bars, dq_ptr, base, begin, end, turns, key, sizes, scale_log2, LAYOUT: gl.constexpr,
    WHICH: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    q_smem, do_smem, start_smem, delta_smem, k_smem, v_smem, ds_smem = smem
    q_full, q_empty, do_full, do_empty, _, _, meet, _, _ = bars
    dq_ptr += (begin * 2 + WHICH) * 4096
    for block in range(begin, end):
        turn = base + block
        stage, parity = slot(turn, q_full.shape[0])
        zero, at, row = unknown_zero(turn), turn % 2 * 2, block * q_smem.shape[3]
        k, v = matrix(k_smem.index(WHICH + zero)), matrix(v_smem.index(WHICH + zero))
        q, do = matrix(q_smem.index(stage)), matrix(do_smem.index(stage))
        mbarrier.wait(q_full.index(stage), parity)
        scores = ask_scores(k, q, start_smem.index(stage), LAYOUT)
        mbarrier.wait(do_full.index(stage), parity)
        dp = ask_scores(v, do, delta_smem.index(stage), LAYOUT)
        scores, dp = warpgroup_mma_wait(0, deps=(scores, dp))
        p = probabilities(scores, key, row, sizes, scale_log2, MASKED, CAUSAL)
        ds = (p * dp).to(q_smem.dtype)
        share(ds, ds_smem, at, meet, WHICH)
        p, ds = left(p, dv, q_smem.dtype), left(ds, dk, q_smem.dtype)
        dv = warpgroup_mma(p, do, dv, is_async=True)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        dv, dk, p, ds = warpgroup_mma_wait(0, deps=(dv, dk, p, ds))
        mbarrier.arrive(do_empty.index(stage))
        mbarrier.arrive(q_empty.index(stage))
        mbarrier.wait(meet.index(0), turn & 1)
        dq = ask_dq(ds_smem, at, k_smem, zero, WHICH)
        add_dq(dq_ptr, warpgroup_mma_wait(0, deps=(dq,)))
        dq_ptr += 2 * 4096
    return s, dk, dv


# Rung 2's loop. Each product is asked for as soon as what it multiplies is there, and waited for as late as its result
# is needed, so that the tensor cores have one while a warpgroup does anything else: dP under the exponentials, dV under
# dS, dK while the warpgroups meet, the next S under dQ's additions. After the last step S is that of an old Q, for
# nobody: a branch around it would cost every step.
@gluon.jit
def step_ahead(
    s, dk, dv, smem, bars, dq_ptr, base, begin, end, turns, key, sizes, scale_log2, LAYOUT: gl.constexpr,
    WHICH: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    q_smem, do_smem, start_smem, delta_smem, k_smem, v_smem, ds_smem = smem
    q_full, q_empty, do_full, do_empty, _, _, meet, _, _ = bars
    dq_ptr += (begin * 2 + WHICH) * 4096
    for block in range(begin, end):
        turn = base + block
        stage, parity = slot(turn, q_full.shape[0])
        after, parity_after = slot(turn + 1, q_full.shape[0])
        zero, at, row = unknown_zero(turn), turn % 2 * 2, block * q_smem.shape[3]
        k, v = matrix(k_smem.index(WHICH + zero)), matrix(v_smem.index(WHICH + zero))
        q, do = matrix(q_smem.index(stage)), matrix(do_smem.index(stage))
        mbarrier.wait(do_full.index(stage), parity)
        dp = ask_scores(v, do, delta_smem.index(stage), LAYOUT)
        p = probabilities(s, key, row, sizes, scale_log2, MASKED, CAUSAL)
        p_left = left(p, dv, q_smem.dtype)
        dv = warpgroup_mma(p_left, do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = (p * dp).to(q_smem.dtype)
        share(ds, ds_smem, at, meet, WHICH)
        ds = left(ds, dk, q_smem.dtype)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        dv, p_left = warpgroup_mma_wait(1, deps=(dv, p_left))
        mbarrier.arrive(do_empty.index(stage))
        mbarrier.wait(meet.index(0), turn & 1)
        dq = ask_dq(ds_smem, at, k_smem, zero, WHICH)
        mbarrier.wait(q_full.index(after), parity_after, pred=turn + 1 < turns)
        s = ask_scores(k, matrix(q_smem.index(after)), start_smem.index(after), LAYOUT)
        dq, dk, ds = warpgroup_mma_wait(1, deps=(dq, dk, ds))
        mbarrier.arrive(q_empty.index(stage))
        add_dq(dq_ptr, dq)
        dq_ptr += 2 * 4096
        s = warpgroup_mma_wait(0, deps=(s,))
    return s, dk, dv


@gluon.jit
def multiply_partition(
    smem, bars, sizes, dq_ptr, scale_log2, WHICH: gl.constexpr, GROUP: gl.constexpr, AHEAD: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    q_smem, _, start_smem, _, k_smem, v_smem, _ = smem
    q_full, _, _, _, k_full, v_full, _, read, stored = bars
    ROWS: gl.constexpr = q_smem.shape[3]
    KEYS: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    batch, head_kv, key, begin, whole, blocks = place(gl.program_id(0), sizes, CAUSAL, ROWS, KEYS)
    key += WHICH * KEYS
    turns = (blocks - begin) * GROUP
    dk, dv = gl.zeros((KEYS, D), gl.float32, OUT), gl.zeros((KEYS, D), gl.float32, OUT)
    mbarrier.wait(k_full.index(0), 0)
    s = 0
    if AHEAD:
        mbarrier.wait(q_full.index(0), 0)
        s = ask_scores(matrix(k_smem.index(WHICH)), matrix(q_smem.index(0)), start_smem.index(0), LAYOUT)
        s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.wait(v_full.index(0), 0)
    walk: gl.constexpr = step_ahead if AHEAD else one_by_one
    base = -begin
    for each in range(GROUP):
        head = (batch * sizes[1] + head_kv) * GROUP + each
        ptr = dq_ptr + head.to(gl.int64) * blocks * 2 * 4096
        s, dk, dv = walk(
            s, dk, dv, smem, bars, ptr, base, begin, whole, turns, key, sizes, scale_log2, LAYOUT,
            WHICH, True, CAUSAL,
        )  # fmt: skip
        s, dk, dv = walk(
            s, dk, dv, smem, bars, ptr, base, gl.maximum(begin, whole), blocks, turns, key, sizes, scale_log2,
            LAYOUT, WHICH, False, CAUSAL,
        )  # fmt: skip
        base += blocks - begin
    # dK and dV go where K and V were. This half of V nobody else reads; of K both read all.
    mbarrier.arrive(read.index(0))
    matrix(v_smem.index(WHICH)).store(dv.to(v_smem.dtype))
    mbarrier.wait(read.index(0), 0)
    matrix(k_smem.index(WHICH)).store((dk * (scale_log2 * LN2)).to(k_smem.dtype))
    fence_async_shared()
    mbarrier.arrive(stored.index(0))


@gluon.jit(do_not_specialize=["tiles", "H_kv", "all_heads", "at_once", "S_q", "S_k"])
def backward_kernel(
    q_desc, do_desc, start_desc, delta_desc,  # of [B, H, S_q, D] twice, [B H, rows] twice
    k_desc, v_desc, dk_desc, dv_desc,  # of [B, H_kv, S_k, D]
    dq_ptr,  # B H rows D numbers of fp32
    scale_log2, tiles, H_kv, all_heads, at_once, S_q, S_k, GROUP: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    descs = q_desc, do_desc, start_desc, delta_desc, k_desc, v_desc, dk_desc, dv_desc
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], q_desc.dtype)
    smem = (
        stages(q_desc, STAGES), stages(do_desc, STAGES), stages(start_desc, STAGES), stages(delta_desc, STAGES),
        stages(k_desc, 2), stages(v_desc, 2), gl.allocate_shared_memory(q_desc.dtype, [4, KEYS, ROWS], LAYOUT),
    )  # fmt: skip
    bars = (
        barriers(STAGES, 1), barriers(STAGES, 2), barriers(STAGES, 1), barriers(STAGES, 2),  # Q: come, read by both; dO
        barriers(1, 1), barriers(1, 1),  # K and V come
        barriers(1, 2), barriers(1, 2), barriers(1, 2),  # both have: written dS, read K, left dK and dV
    )  # fmt: skip
    sizes = tiles, H_kv, all_heads, at_once, S_q, S_k
    gl.warp_specialize(
        [
            (multiply_partition, (smem, bars, sizes, dq_ptr, scale_log2, 0, GROUP, AHEAD, CAUSAL)),
            (multiply_partition, (smem, bars, sizes, dq_ptr, scale_log2, 1, GROUP, AHEAD, CAUSAL)),
            (load_partition, (descs, smem, bars, sizes, GROUP, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )


# Rung 1. Five products and three trades, each thing after the other; the two warpgroups meet once a step. Predicted:
# 2560 cycles of products, and of 770 for the rest and the waits between half, as warpgroups are not in step: 3100
# cycles a step at D = 128, 82% of the 790 TFLOP/s that the tensor cores hold.
@needs(90, "TMA and wgmma", only=True)
def five_products(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """As lesson 5's attention_backward, for fp16 and bf16, D at most 128, no window; dq not the same to the bit."""
    return launch(backward_kernel, grad_out, q, k, v, out, lse, causal, window, scale, AHEAD=False)


# Rung 2. New: products in flight under all that is none. Predicted: 2750 cycles a step; what remains are the meeting,
# the barriers and shared memory, which is busy for as long as the tensor cores are.
@needs(90, "TMA and wgmma", only=True)
def attention_backward(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None, deterministic=False):
    """dq, dk, dv of lesson 4's attention.

    grad_out, q, out [B, H, S_q, D], k, v [B, H_kv, S_k, D] in one dtype, any strides; lse [B, H, S_q] in fp32,
    contiguous; out and lse as attention() returned them, causal, window and scale as it got them. dk and dv are the
    same to the bit each time, dq only if deterministic. That, and what this is not for (fp32, windows, D past 128,
    strides that TMA refuses), takes lesson 5's. TypeError, ValueError for what is not so.
    """
    try:
        if not deterministic:
            return launch(backward_kernel, grad_out, q, k, v, out, lse, causal, window, scale, AHEAD=True)
    except Unsupported:
        pass
    return lesson05.attention_backward(grad_out, q, k, v, out, lse, causal, window, scale)


# The slow twin: what lies between the barriers is PyTorch, small (2 x 8 keys, 8 queries, 2 stages) so that rings turn
# often. As lesson 6b's: partitions yield (barrier, parity) where the kernel waits for a barrier, FREE where it waits
# for a product, which until then reads its tiles; any that need not wait may run next.
FREE = Barrier(1), 1


def twin(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """As attention_backward, without windows, in any dtype: all loops and barriers, one wait at a time."""
    scale = lesson04b.expect_gradient(grad_out, q, k, v, out, lse, causal, window, scale)
    (B, _, S_q, _), (_, H_kv, S_k, _) = q.shape, k.shape
    delta = F.pad((grad_out.float() * out.float()).sum(-1), (0, -S_q % 8))[..., None]
    start = F.pad(lse.masked_fill(lse == -math.inf, 1e30), (0, -S_q % 8), value=1e30)[..., None]
    q, do, k, v = (F.pad(t.float(), (0, 0, 0, -t.shape[2] % 16)) for t in (q, grad_out, k, v))  # zeros, as TMA does
    dq, dk, dv = torch.zeros_like(q), torch.full_like(k, math.nan), torch.full_like(v, math.nan)
    tiles = -(-S_k // 16)
    for program in range(tiles * B * H_kv):
        sizes = tiles, H_kv, B * H_kv, 2, S_q, S_k
        _program(place.fn(program, sizes, causal, 8, 8), sizes, q * scale, do, start, delta, k, v, dq, dk, dv, causal)
    return (dq[:, :, :S_q] * scale).to(grad_out), dk[:, :, :S_k].to(grad_out), dv[:, :, :S_k].to(grad_out)


def _program(where, sizes, q, do, start, delta, k, v, dq, dk, dv, causal):
    batch, head_kv, key, begin, whole, blocks = where
    S_q, S_k, D, group = sizes[4], sizes[5], q.shape[3], q.shape[1] // k.shape[1]
    k_smem, v_smem = (torch.full((2, 8, D), math.nan) for _ in range(2))
    q_smem, do_smem = (torch.full((2, 8, D + 1), math.nan) for _ in range(2))  # with their rows' numbers
    ds_smem = torch.full((2, 2, 8, 8), math.nan)
    q_full, do_full, (k_full, v_full) = ([Barrier(1), Barrier(1)] for _ in range(3))
    q_empty, do_empty = ([Barrier(2), Barrier(2)] for _ in range(2))
    meet, read, stored = (Barrier(2) for _ in range(3))
    copies = []  # on their way

    def load(smem, full, box):
        full.arrive(expect=1)
        smem.fill_(math.nan)
        copies.append((smem, box, full))

    def load_partition():
        load(k_smem.view(16, D), k_full, k[batch, head_kv, key:][:16])
        turn = 0
        for head in range(head_kv * group, head_kv * group + group):
            for block in range(begin, blocks):
                stage, parity = slot.fn(turn, 2)
                rows = slice(8 * block, 8 * block + 8)
                yield q_empty[stage], parity ^ 1
                load(q_smem[stage], q_full[stage], torch.cat([q[batch, head, rows], start[batch, head, rows]], 1))
                if turn == 0:
                    load(v_smem.view(16, D), v_full, v[batch, head_kv, key:][:16])
                yield do_empty[stage], parity ^ 1
                load(do_smem[stage], do_full[stage], torch.cat([do[batch, head, rows], delta[batch, head, rows]], 1))
                turn += 1
        yield stored, 0
        dk[batch, head_kv, key : key + 16], dv[batch, head_kv, key : key + 16] = k_smem.view(16, D), v_smem.view(16, D)

    def multiply_partition(which):
        mine, turns = key + 8 * which + torch.arange(8)[:, None], (blocks - begin) * group
        dk, dv = torch.zeros(2, 8, D)
        yield k_full, 0
        yield q_full[0], 0
        yield FREE
        s = k_smem[which] @ q_smem[0, :, :D].T - q_smem[0, :, D]
        yield v_full, 0
        for turn in range(turns):
            (stage, parity), (after, parity_after) = slot.fn(turn, 2), slot.fn(turn + 1, 2)
            head, block = head_kv * group + turn // (blocks - begin), begin + turn % (blocks - begin)
            p = torch.exp(s)
            if block < whole:
                rows = 8 * block + torch.arange(8)
                p = p.masked_fill(mine > rows + S_k - S_q if causal else mine >= S_k, 0)
            yield do_full[stage], parity
            numbers = do_smem[stage, :, D].clone()
            yield FREE
            ds = p * (v_smem[which] @ do_smem[stage, :, :D].T - numbers)
            ds_smem[turn % 2, which] = ds
            meet.arrive()
            yield FREE
            dv += p @ do_smem[stage, :, :D]
            do_empty[stage].arrive()
            yield meet, turn & 1
            if turn + 1 < turns:
                yield q_full[after], parity_after
            numbers = q_smem[after, :, D].clone()
            yield FREE
            half = slice(which * D // 2, D if which else D // 2)
            dq[batch, head, 8 * block : 8 * block + 8, half] += (
                ds_smem[turn % 2].view(16, 8).T @ k_smem.view(16, D)[:, half]
            )
            dk += ds @ q_smem[stage, :, :D]
            q_empty[stage].arrive()
            yield FREE
            s = k_smem[which] @ q_smem[after, :, :D].T - numbers
        read.arrive()
        v_smem[which] = dv
        yield read, 0
        k_smem[which] = dk
        stored.arrive()

    in_any_order([multiply_partition(0), multiply_partition(1), load_partition()], copies)


BENCHES = tuple(shape for shape in hopper.BENCHES if shape["H"] == 32 or shape["D"] == 64 or shape["S"] > 512)
LESSON = Lesson(
    reference=lesson05.reference,
    inputs=lesson04b.inputs,
    rungs=(five_products, attention_backward),
    checks=(
        *(c for c in lesson04b.CHECKS if not c.shape.get("window")),
        case("grouped heads, odd lengths, steps of several heads in one ring", B=1, H=6, S=77, D=64, S_k=150, H_kv=2),
        case("keys that nobody sees", B=1, H=2, S=20, D=32, S_k=60, H_kv=1, causal=True),
    ),
    benches=BENCHES,
    work=lesson05.LESSON.work,
    twin=twin,
    wrong=(
        Mutant("the meeting is not waited for", "_program", "yield meet, turn & 1", "yield FREE", "twin", "nan"),
        Mutant("dS in one buffer", "_program", "ds_smem[turn % 2, which] = ds", "ds_smem[:, which] = ds", "twin"),
        Mutant(
            "Q given back before dK",
            "_program",
            "do_empty[stage].arrive()",
            "do_empty[stage].arrive(); q_empty[stage].arrive(); q_empty[stage].missing += 1",
            "twin",
            "nan",
        ),
        Mutant("dK over K that the other still reads", "_program", "yield read, 0", "yield FREE", "twin"),
        Mutant("V read before it has come", "_program", "yield v_full, 0", "yield FREE", "twin", "nan"),
        Mutant(
            "another head begins a ring of its own",
            "_program",
            "slot.fn(turn, 2), slot",
            "slot.fn(turn % (blocks - begin), 2), slot",
            "twin",
        ),
    ),
    peers=PEERS,
    claims=dict.fromkeys((five_products, attention_backward), ("backward_kernel: wgmma", "backward_kernel: tma")),
    factor=2,  # as lesson 5's
    properties=(),
    refuses=lesson04b.REFUSES,
    dtypes=(torch.float16, torch.bfloat16),
)

if __name__ == "__main__":
    LESSON.main()
