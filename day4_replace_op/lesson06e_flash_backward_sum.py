"""Flash attention, backward on Hopper, second half: TMA adds
============================================================
Lesson 6d's threads add dQ themselves: 32 instructions of 512 bytes a step and warpgroup, which leave an SM at 32 to 64
bytes a cycle, and a warp that has asked for as many as a queue holds stands still. FlashAttention-3 lets TMA add
(cp.reduce.async.bulk): a warpgroup writes its part to shared memory, one thread asks, and all go on. That costs shared
memory 500 cycles beside 2432, 32 KB written and 32 KB read a step; but nobody waits for a queue.

Whoever adds, S / 128 owners add 4 S D bytes each: S^2 D / 32 a head, 17 GB for 16 heads at S = 16384 and D = 128, in
8 ms of products. If L2's adders do less than these 2.1 TB/s, they are the limit.

You will learn: a sum in memory that nobody waits for, why two that do the same should not do it at the same time.
Needs a Hopper GPU; without one the rungs are compiled, and a twin of all barriers runs, slow and in any order.
Run it:    python day4_replace_op/lesson06e_flash_backward_sum.py
Check it:  python -m lessonkit check lesson06e_flash_backward_sum
Time it:   python -m lessonkit bench lesson06e_flash_backward_sum
"""

import math
from contextlib import suppress
from itertools import count as numbers_from

from lessonkit import About, Lesson, Mutant, Unsupported, needs
from lessonkit.judge.simulate import FREE, Barrier, ask_for, in_any_order

import torch
import torch.nn.functional as F
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from course_ops.hopper import allocate_barriers as barriers
from course_ops.hopper import allocate_stages as stages
from course_ops.hopper import exp2
from course_ops.hopper import ring_slot as slot
from course_ops.kernels import attention_backward as portable
from day4_replace_op.heads import LN2
from day4_replace_op.hopper import BENCHES, hear, left, matrix
from day4_replace_op.hopper_backward import (
    CHECKS,
    ask_dq,
    ask_scores,
    await_scores,
    bounds,
    hidden_zero,
    launch,
    load_partition,
    pass_by,
    place,
    share,
)
from day4_replace_op.hopper_dq import add_dq
from problems.attention import PROBLEM_BACKWARD, expect_gradient, inputs_backward


@gluon.jit
def probabilities(s, starts, key, row, sizes, scale_log2, MASKED: gl.constexpr, CAUSAL: gl.constexpr):
    p = exp2(s * scale_log2 if starts is None else s * scale_log2 + starts)
    if MASKED:
        S_q, S_k = sizes[4], sizes[5]
        keys = gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, s.type.layout))[:, None]
        if CAUSAL:  # this includes the tail: who sees keys past S_k is past S_q
            rows = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))[None, :]
            p = gl.where(keys <= rows + (row + S_k - S_q - key), p, 0.0)
        else:
            p = gl.where(keys < S_k - key, p, 0.0)
    return p


# AHEAD is rung 2: each product is asked for as soon as what it multiplies is there and waited for as late as its result
# is needed, so that the tensor cores have one while a warpgroup does anything else: dP under the exponentials, dV under
# dS, dK and the next S while the warpgroups meet. After the last step S is one of an old Q, for nobody: a branch around
# it would cost every step.
@gluon.jit
def walk(
    s, dk, dv, smem, bars, total, part, base, _top, begin, end, _first, turns, key, sizes, scale_log2,
    LAYOUT: gl.constexpr, WHICH: gl.constexpr, AHEAD: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    q_smem, do_smem, start_smem, delta_smem, k_smem, v_smem, ds_smem = smem
    q_full, do_full, empty, _, _, meet, _, _, _ = bars
    part += WHICH
    for block in range(begin, end):
        turn = base + block
        stage, parity = slot(turn, q_full.shape[0])
        after, parity_after = slot(turn + 1, q_full.shape[0])
        zero, at = hidden_zero(turn), turn % 2 * 2
        k, v = matrix(k_smem.index(WHICH + zero)), matrix(v_smem.index(WHICH + zero))
        q, do = matrix(q_smem.index(stage)), matrix(do_smem.index(stage))
        if AHEAD:
            scores = s
        else:
            mbarrier.wait(q_full.index(stage), parity)
            scores = ask_scores(k, q, start_smem.index(stage), LAYOUT)
            scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.wait(do_full.index(stage), parity)
        dp = ask_scores(v, do, delta_smem.index(stage), LAYOUT)
        if not AHEAD:
            dp = warpgroup_mma_wait(0, deps=(dp,))
        # S has begun with its queries' numbers.
        p = probabilities(scores, None, key, block * q_smem.shape[3], sizes, scale_log2, MASKED, CAUSAL)
        p_left = left(p, dv, q_smem.dtype)
        dv = warpgroup_mma(p_left, do, dv, is_async=True)
        if AHEAD:
            dp = warpgroup_mma_wait(1, deps=(dp,))
        else:
            dv, p_left = warpgroup_mma_wait(0, deps=(dv, p_left))
        ds = (p * dp).to(q_smem.dtype)
        share(ds, ds_smem, at, meet.index(turn % 2), WHICH)
        ds = left(ds, dk, q_smem.dtype)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        if AHEAD:
            dv, p_left = warpgroup_mma_wait(1, deps=(dv, p_left))
            mbarrier.wait(q_full.index(after), parity_after, pred=turn + 1 < turns)
            s_after = ask_scores(k, matrix(q_smem.index(after)), start_smem.index(after), LAYOUT)
        else:
            dk, ds = warpgroup_mma_wait(0, deps=(dk, ds))
        mbarrier.wait(meet.index(turn % 2), turn // 2 & 1)
        dq = ask_dq(ds_smem, at, k_smem, zero, WHICH)
        if AHEAD:
            dq, dk, ds, s = warpgroup_mma_wait(0, deps=(dq, dk, ds, s_after))
        else:
            dq = warpgroup_mma_wait(0, deps=(dq,))
        mbarrier.arrive(empty.index(stage))
        add_dq(dq, part + 2 * block, total, WHICH)
    return s, dk, dv


@gluon.jit
def multiply_partition(
    shared, WHICH: gl.constexpr, WALK: gl.constexpr, GROUP: gl.constexpr, AHEAD: gl.constexpr, LATE: gl.constexpr,
    CAUSAL: gl.constexpr, QUEUE: gl.constexpr, SKIP: gl.constexpr,
):  # fmt: skip
    smem, bars, total, queue, sizes, scale_log2 = shared
    q_smem, _, _, _, k_smem, v_smem, ds_smem = smem
    _, _, _, k_full, v_full, meet, read, stored, _ = bars
    ROWS: gl.constexpr = q_smem.shape[3]
    KEYS: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    OWN: gl.constexpr = SKIP and CAUSAL and ROWS == KEYS and (GROUP == 1 or not LATE)
    first, count, nth = 0, 0, hear(0, queue, QUEUE)
    while nth < sizes[0] * sizes[2]:
        batch, head_kv, key, begin, whole, blocks = place(nth, sizes, CAUSAL, ROWS, KEYS)
        key += WHICH * KEYS
        turns = first + (blocks - begin) * GROUP  # one more, at least: some query sees a tile's first key
        own, top, zero = begin, begin if GROUP > 1 else None, hidden_zero(first) if QUEUE else 0
        if OWN:
            own, whole = bounds(key, blocks, sizes, ROWS, KEYS)
        dk, dv = gl.zeros((KEYS, D), gl.float32, OUT), gl.zeros((KEYS, D), gl.float32, OUT)
        mbarrier.wait(k_full.index(0), count & 1)
        s = gl.zeros((KEYS, ROWS), gl.float32, LAYOUT)
        if AHEAD and own == begin:
            s = warpgroup_mma_wait(0, deps=(await_scores(smem, bars, first, turns, zero, LAYOUT, WHICH, LATE),))
        mbarrier.wait(v_full.index(0), count & 1)
        base, part = first - begin, (batch * sizes[1] + head_kv) * GROUP * blocks * 2
        for _each in range(GROUP):
            if OWN and WHICH == 1 and own > begin:
                s = pass_by(smem, bars, total, part + 2 * begin + 1, base + begin, turns, LAYOUT, LATE)
            s, dk, dv = WALK(
                s, dk, dv, smem, bars, total, part, base, top, own, whole, first, turns, key, sizes, scale_log2,
                LAYOUT, WHICH, AHEAD, True, CAUSAL,
            )  # fmt: skip
            s, dk, dv = WALK(
                s, dk, dv, smem, bars, total, part, base, top, gl.maximum(own, whole), blocks, first, turns, key,
                sizes, scale_log2, LAYOUT, WHICH, AHEAD, False, CAUSAL,
            )  # fmt: skip
            base, part = base + blocks - begin, part + 2 * blocks
        zero = hidden_zero(turns)
        if LATE:
            mbarrier.wait(meet.index((turns - 1) % 2), (turns - 1) // 2 & 1)
            dq = ask_dq(ds_smem, (turns - 1) % (ds_smem.shape[0] // 2) * 2, k_smem, zero, WHICH)
            add_dq(warpgroup_mma_wait(0, deps=(dq,)), part - 2 + WHICH, total, WHICH)
        # dK and dV go where K and V were. This half of V nobody else reads; of K both read all.
        mbarrier.arrive(read.index(0))
        matrix(v_smem.index(WHICH + zero)).store(dv.to(v_smem.dtype))
        mbarrier.wait(read.index(0), count & 1)
        matrix(k_smem.index(WHICH + zero)).store((dk * (scale_log2 * LN2)).to(k_smem.dtype))
        fence_async_shared()
        mbarrier.arrive(stored.index(0))
        first = turns
        count += 1
        nth = hear(count, queue, QUEUE)
    tma.store_wait(0)  # if TMA adds: shared memory goes when the program ends


@gluon.jit(do_not_specialize=["tiles", "H_kv", "all_heads", "at_once", "S_q", "S_k"])
def backward_kernel(
    q_desc, do_desc, start_desc, delta_desc,  # of [B, H, S_q, D] twice, [B H, rows] twice
    k_desc, v_desc, dk_desc, dv_desc,  # of [B, H_kv, S_k, D]
    sum_desc, sum_ptr, counter_ptr,  # of dQ: B H rows D numbers of fp32; one int32, 0, if there is a queue
    scale_log2, tiles, H_kv, all_heads, at_once, S_q, S_k, GROUP: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr, QUEUE: gl.constexpr, LATE: gl.constexpr, AHEAD: gl.constexpr, WALK: gl.constexpr = walk,
    TMA_ADDS: gl.constexpr = False, SKIP: gl.constexpr = False,
):  # fmt: skip
    descs = q_desc, do_desc, start_desc, delta_desc, k_desc, v_desc, dk_desc, dv_desc
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], q_desc.dtype)
    smem = (
        stages(q_desc, STAGES), stages(do_desc, STAGES), stages(start_desc, STAGES), stages(delta_desc, STAGES),
        stages(k_desc, 2), stages(v_desc, 2),
        gl.allocate_shared_memory(q_desc.dtype, [6 if LATE else 4, KEYS, ROWS], LAYOUT),
    )  # fmt: skip
    bars = (
        barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 2),  # Q comes, dO comes, both have read both
        barriers(1, 1), barriers(1, 1),  # K and V come
        barriers(2, 2), barriers(1, 2), barriers(1, 2),  # both have: written dS, read K, left dK and dV
        barriers(2, 1) if LATE else None,  # whose turn it is, in lesson 6e
    )  # fmt: skip
    if LATE:
        mbarrier.arrive(bars[8].index(0))  # the first turn
    total = sum_desc, sum_ptr, stages(sum_desc, 2) if TMA_ADDS else None
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queue = numbers, barriers(2, 1) if QUEUE else None, counter_ptr
    sizes = tiles, H_kv, all_heads, at_once, S_q, S_k
    shared = smem, bars, total, queue, sizes, scale_log2
    gl.warp_specialize(
        [
            (multiply_partition, (shared, 0, WALK, GROUP, AHEAD, LATE, CAUSAL, QUEUE, SKIP)),
            (multiply_partition, (shared, 1, WALK, GROUP, AHEAD, LATE, CAUSAL, QUEUE, SKIP)),
            (load_partition, (descs, smem, bars, queue, sizes, GROUP, CAUSAL, QUEUE)),
        ],
        [4, 1],
        [240, 24],
    )


def keys_are_the_same_each_time(rung):
    """dK and dV agree to the bit in two runs, as their sums have one owner; dQ's additions come in any order."""
    args = inputs_backward(1, 4, 300, 64, H_kv=1, causal=True, dtype=torch.float16)
    assert all(torch.equal(a, b) for a, b in zip(rung(*args)[1:], rung(*args)[1:], strict=True))


def one_query_one_key(rung):
    """P is 1 and dP is delta: dV is dO, to the bit, and the others are 0."""
    grad_out, q, k, v, *_ = inputs_backward(1, 1, 1, 64, causal=True, dtype=torch.float16)
    dq, dk, dv = rung(grad_out, q, k, v, v, (q.float() * k.float()).sum(-1) / 8, True)
    assert torch.equal(dv, grad_out)
    assert max(dq.abs().max(), dk.abs().max()) < 1e-4


# Rung 3. New: TMA adds, from 32 KB more of shared memory. Predicted: 2950 cycles a step if shared memory is what limits
# it, 2800 and no change if the tensor cores are, fewer if the threads' own additions stood in their way. They did:
# against FlashAttention-4 in the same rounds, D = 128, 7% at S = 512, 14% at 2048 and 4096, 20% at 16384.
@needs(90, "TMA and wgmma", only=True)
def tma_adds(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """As lesson 6d's five_products."""
    return launch(backward_kernel, grad_out, q, k, v, out, lse, causal, window, scale, AHEAD=True, TMA_ADDS=True)


# Rung 4. New: lesson 6c's queue. A program that stays has the next tile's first block there when this tile's dK and dV
# leave. Predicted: 2000 cycles of a tile, whose steps take 3500: 7% at S = 512, 2% at 2048, causal nearly twice that.
# Measured: 4% and 3%, causal 5% and 3%.
@needs(90, "TMA and wgmma", only=True)
def queued(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """As lesson 6d's five_products."""
    return launch(backward_kernel, grad_out, q, k, v, out, lse, causal, window, scale, **QUEUED)


# Rung 5. New: turns. Two warpgroups that meet at each step exponentiate at the same time, and then nobody asks for
# products. If they may drift, chance decides whether they end in step, or one exponentiates under the other's products.
# So dQ is a step late, from a third buffer of dS: its meeting was a step ago. And a barrier for each says whose turn it
# is: at D = 128 for exponentials and dS; at D = 64, where these take too long, for exponentials. Predicted, of a step:
# at D = 64 512 of 3100 cycles, the half of the exponentials that dP does not hide; at D = 128 dS and the wait for its
# product, 250 of 3500. Measured from S = 2048 on: D = 64 15 to 17% (causal 10 to 22), D = 128 1 to 4% (0 to 2).
@gluon.jit
def walk_in_turns(
    s, dk, dv, smem, bars, total, part, base, top, begin, end, first, turns, key, sizes, scale_log2,
    LAYOUT: gl.constexpr, WHICH: gl.constexpr, AHEAD: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    q_smem, do_smem, start_smem, delta_smem, k_smem, v_smem, ds_smem = smem
    q_full, do_full, empty, _, _, meet, _, _, order = bars
    BUFFERS: gl.constexpr = ds_smem.shape[0] // 2
    WIDE: gl.constexpr = q_smem.shape[4] > 64
    part += WHICH
    for block in range(begin, end):
        turn, zero = base + block, hidden_zero(base + block)
        stage, parity = slot(turn, q_full.shape[0])
        after, parity_after = slot(turn + 1, q_full.shape[0])
        k, v = matrix(k_smem.index(WHICH + zero)), matrix(v_smem.index(WHICH + zero))
        q, do = matrix(q_smem.index(stage)), matrix(do_smem.index(stage))
        mbarrier.wait(do_full.index(stage), parity)
        dp = ask_scores(v, do, None, LAYOUT)
        # The queries' numbers are loaded here: as no load moves to before a wait, all of dP is asked for before the
        # exponentials. When S began with them, the compiler asked for an eighth of dP every ten exponentials.
        mbarrier.wait(order.index(WHICH), turn & 1)
        starts = start_smem.index(stage).load(LAYOUT)
        p = probabilities(s, starts, key, block * q_smem.shape[3], sizes, scale_log2, MASKED, CAUSAL)
        p_left = left(p, dv, q_smem.dtype)
        dv = warpgroup_mma(p_left, do, dv, is_async=True)
        if not WIDE:
            mbarrier.arrive(order.index(1 - WHICH))
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = (p * (dp + delta_smem.index(stage).load(LAYOUT))).to(q_smem.dtype)
        share(ds, ds_smem, turn % BUFFERS * 2, meet.index(turn % 2), WHICH)
        if WIDE:
            mbarrier.arrive(order.index(1 - WHICH))
        ds = left(ds, dk, q_smem.dtype)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        dv, p_left = warpgroup_mma_wait(1, deps=(dv, p_left))
        mbarrier.wait(meet.index((turn + 1) % 2), (turn - 1) // 2 & 1, pred=turn > first)
        dq = ask_dq(ds_smem, (turn + BUFFERS - 1) % BUFFERS * 2, k_smem, zero, WHICH)
        mbarrier.wait(q_full.index(after), parity_after, pred=turn + 1 < turns)
        s_after = ask_scores(k, matrix(q_smem.index(after)), None, LAYOUT)
        dq, dk, ds = warpgroup_mma_wait(1, deps=(dq, dk, ds))
        mbarrier.arrive(empty.index(stage))
        if turn > first:
            at_begin = 2 * top if MASKED and top is not None and block == top else 0  # the head before has it
            add_dq(dq, part + 2 * block - 2 - at_begin, total, WHICH)
        s = warpgroup_mma_wait(0, deps=(s_after,))
    return s, dk, dv


QUEUED = {"AHEAD": True, "TMA_ADDS": True, "QUEUE": True}
TURNS = {**QUEUED, "LATE": True, "WALK": walk_in_turns}


@needs(90, "TMA and wgmma", only=True)
def in_turns(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """As lesson 6d's five_products."""
    return launch(backward_kernel, grad_out, q, k, v, out, lse, causal, window, scale, **TURNS)


# Rung 6. New: causal, D = 128: of a tile's first 64 queries the second warpgroup's 64 keys are seen by none. It passes
# by, with zeros for the other's dQ. Predicted: 10% of the products at S = 512 (4 of 40 steps of a warpgroup), 3% at
# 2048, and less of the time, as the other's step is as long as it was. Measured: 1% of queued at 512, 2% of in_turns
# from 2048 on. What is left (lesson 9): FlashAttention-4 is 12% faster at D = 64, causal, S = 512, 6% at 1024; at D =
# 128 2% at 16384, causal, and not causal 1 to 2% from 2048 on. There it has 80 queries a step and reads 37 KB of shared
# memory for 10 of them, not 40; told to have 64, it is as fast as this, to 1%. Gluon's blocks are powers of 2.
# (Tried: a part of the heads after the other, so that dQ's sum stays in L2. 64 MB of it are 1% slower, 32 MB 3%.)
@needs(90, "TMA and wgmma", only=True)
def attention_backward(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None, deterministic=False):
    """dq, dk, dv of lesson 4's attention, in turns, or where tiles are short without.

    grad_out, q, out [B, H, S_q, D], k, v [B, H_kv, S_k, D] in one dtype, any strides; lse [B, H, S_q] in fp32,
    contiguous; all as attention() got or returned it, or TypeError, ValueError. dq is the same to the bit each time if
    deterministic; that, and what this is not for (fp32, windows, D past 128, strides of TMA), takes lesson 5's.
    """
    short = q.ndim == 4 and q.shape[3] > 64 and q.shape[2] <= 512  # beside 8 steps a dQ more at a tile's end counts
    more = {**(QUEUED if short else TURNS), "SKIP": True}
    with suppress(Unsupported):
        if not deterministic:
            return launch(backward_kernel, grad_out, q, k, v, out, lse, causal, window, scale, **more)
    scale = expect_gradient(grad_out, q, k, v, out, lse, causal, window, scale)
    return portable.attention_backward(grad_out, q, k, v, out, lse, causal, window, scale)


def twin(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """As attention_backward, slow and small (2 x 8 keys, 8 queries, 2 stages), in any dtype, without windows."""
    scale = expect_gradient(grad_out, q, k, v, out, lse, causal, window, scale)
    (B, _, S_q, _), (_, H_kv, S_k, _) = q.shape, k.shape
    grad, q, k, v, out, lse = (t.float().cpu() for t in (grad_out, q, k, v, out, lse))  # step by step
    delta = F.pad((grad * out).sum(-1), (0, -S_q % 8))[..., None]
    start = F.pad(lse.masked_fill(lse == -math.inf, 1e30), (0, -S_q % 8), value=1e30)[..., None]
    q, do, k, v = (F.pad(t, (0, 0, 0, -t.shape[2] % 16)) for t in (q, grad, k, v))  # with zeros, as TMA does
    dq, dk, dv = torch.zeros_like(q), torch.full_like(k, math.nan), torch.full_like(v, math.nan)
    sizes = -(-S_k // 16), H_kv, B * H_kv, 2, S_q, S_k
    counter, copies, partitions = numbers_from(2), [], []  # copies on their way
    for program in range(2):
        partitions += _program(program, counter, copies, sizes, q * scale, do, start, delta, k, v, dq, dk, dv, causal)
    in_any_order(partitions, copies)
    return (dq[:, :, :S_q] * scale).to(grad_out), dk[:, :, :S_k].to(grad_out), dv[:, :, :S_k].to(grad_out)


def _program(program, counter, copies, sizes, q, do, start, delta, k, v, dq, dk, dv, causal):
    tiles, _, all_heads, _, S_q, S_k = sizes
    D, group = q.shape[3], q.shape[1] // k.shape[1]
    late, buffers = D <= 64, 3 if D <= 64 else 2
    k_smem, v_smem = (torch.full((2, 8, D), math.nan) for _ in range(2))
    q_smem, do_smem = (torch.full((2, 8, D + 1), math.nan) for _ in range(2))  # with their rows' numbers
    ds_smem, numbers = torch.full((buffers, 2, 8, 8), math.nan), [None] * 2
    told, q_full, do_full, (k_full, v_full), order = ([Barrier(1), Barrier(1)] for _ in range(5))
    empty, meet, (read, stored) = ([Barrier(2), Barrier(2)] for _ in range(3))
    order[0].arrive()

    def tell(count, nth):
        numbers[count % 2] = nth
        told[count % 2].arrive()

    def store(count, batch, head_kv, key):
        yield stored, count & 1
        dk[batch, head_kv, key : key + 16], dv[batch, head_kv, key : key + 16] = k_smem.view(16, D), v_smem.view(16, D)

    def load_partition():
        turn, count, nth, before = 0, 0, program, None
        while nth < tiles * all_heads:
            tell(count, nth)
            first, (batch, head_kv, key, begin, _, blocks) = turn, place.fn(nth, sizes, causal, 8, 8)
            for head in range(head_kv * group, head_kv * group + group):
                for block in range(begin, blocks):
                    stage, parity = slot.fn(turn, 2)
                    of = batch, head, slice(8 * block, 8 * block + 8)
                    yield empty[stage], parity ^ 1
                    ask_for(copies, q_full[stage], (q_smem[stage], torch.cat([q[of], start[of]], 1)))
                    ask_for(copies, do_full[stage], (do_smem[stage], torch.cat([do[of], delta[of]], 1)))
                    if turn == first:
                        if count > 0:
                            yield from store(count - 1, *before)
                        ask_for(copies, k_full, (k_smem.view(16, D), k[batch, head_kv, key:][:16]))
                        ask_for(copies, v_full, (v_smem.view(16, D), v[batch, head_kv, key:][:16]))
                    turn += 1
            before, nth, count = (batch, head_kv, key), next(counter), count + 1
        tell(count, nth)
        if before:
            yield from store(count - 1, *before)

    def multiply_partition(which):
        first = 0
        for count in numbers_from():
            yield told[count % 2], count // 2 & 1
            if numbers[count % 2] >= tiles * all_heads:
                return
            where = place.fn(numbers[count % 2], sizes, causal, 8, 8)
            first = yield from multiply_tile(which, first, count, *where)

    def multiply_tile(which, first, count, batch, head_kv, key, begin, whole, blocks):
        mine, turns = key + 8 * which + torch.arange(8)[:, None], first + (blocks - begin) * group
        own = max(0, key + 8 * which + S_q - S_k) // 8 if causal and (group == 1 or not late) else begin
        half, (dk, dv) = slice(which * D // 2, D if which else D // 2), torch.zeros(2, 8, D)
        yield k_full, count & 1
        yield q_full[first % 2], first // 2 & 1
        yield FREE
        s = k_smem[which] @ q_smem[first % 2, :, :D].T
        yield v_full, count & 1
        for turn in range(first, turns + late):  # the last one, if late, only adds the last dQ
            now = turn - late  # the step whose dQ this is
            (stage, parity), (after, parity_after) = slot.fn(turn, 2), slot.fn(turn + 1, 2)
            block = begin + (turn - first) % (blocks - begin)
            seen = turn < turns and block >= own
            if turn < turns:
                yield (do_full if seen else q_full)[stage], parity
                if late:
                    yield order[which], turn & 1
                ds = torch.zeros(8, 8)
                if seen:
                    p = torch.exp(s - q_smem[stage, :, D])
                    if block < whole:
                        p = p.masked_fill(mine > 8 * block + torch.arange(8) + S_k - S_q if causal else mine >= S_k, 0)
                    yield FREE
                    ds = p * (v_smem[which] @ do_smem[stage, :, :D].T - do_smem[stage, :, D])
                ds_smem[turn % buffers, which] = ds
                meet[turn % 2].arrive()
                if late:
                    order[1 - which].arrive()
            if seen:
                yield FREE
                dv += p @ do_smem[stage, :, :D]
            if now >= first:
                yield meet[now % 2], now // 2 & 1
            if turn + 1 < turns:
                yield q_full[after], parity_after
            yield FREE
            if now >= first:
                head, row = (now - first) // (blocks - begin), 8 * (begin + (now - first) % (blocks - begin))
                of_both = ds_smem[now % buffers].view(16, 8).T @ k_smem.view(16, D)[:, half]
                dq[batch, head_kv * group + head, row : row + 8, half] += of_both
            if turn < turns:
                dk += ds @ q_smem[stage, :, :D]
                empty[stage].arrive()
                yield FREE
                s = k_smem[which] @ q_smem[after, :, :D].T
        read.arrive()
        v_smem[which] = dv
        yield read, count & 1
        k_smem[which] = dk
        stored.arrive()
        return turns

    return [multiply_partition(0), multiply_partition(1), load_partition()]


def deterministic_is_deterministic(_rung):
    """Asked for that, the last rung's dQ agrees to the bit in two runs; others cannot be asked."""
    args = inputs_backward(1, 4, 300, 64, H_kv=1, causal=True, dtype=torch.float16)
    first, second = (attention_backward(*args, deterministic=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


LESSON = Lesson(
    about=About(
        teaches="who adds, threads or TMA; a queue of tiles; two warpgroups that take turns; all its barriers on a CPU",
        hours=0.5,
        operator="attention backward",
        language="Gluon",
    ),
    problem=PROBLEM_BACKWARD, checks=CHECKS, benches=BENCHES,
    rungs=(tma_adds, queued, in_turns, attention_backward), cpu_model=twin,
    wrong=(
        Mutant("the meeting is not waited for", "_program", "yield meet[now % 2], now // 2 & 1\n            if turn",
               "yield FREE\n            if turn", "twin"),
        Mutant("dS in a buffer less", "_program", "3 if D <= 64 else 2", "2 if D <= 64 else 1", "twin"),
        Mutant("Q given back before dK", "_program", "dv += p @ do_smem[stage, :, :D]",
               "dv += p @ do_smem[stage, :, :D]; empty[stage].arrive(); empty[stage].missing += 1", "twin", "nan"),
        Mutant("dK over K that the other still reads", "_program", "yield read, count & 1", "yield FREE", "twin"),
        Mutant("another tile begins a ring of its own", "_program", "slot.fn(turn, 2), slot",
               "slot.fn(turn - first, 2), slot", "twin", "barrier"),
        Mutant("stored when K is read", "_program", "yield stored, count", "yield read, count", "twin"),
        Mutant("nobody passes the turn", "_program", "order[1 - which].arrive()", "pass", "twin", "barrier"),
    ),
    claims=dict.fromkeys(  # of the first shape that is timed, D = 128; at D = 64 a tile has a few registers too many
        (tma_adds, queued, in_turns), tuple(f"backward_kernel: {c}" for c in ("wgmma", "tma", "no spills"))
    ),
    properties=(keys_are_the_same_each_time, one_query_one_key, deterministic_is_deterministic),
    dtypes=(torch.float16, torch.bfloat16),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
