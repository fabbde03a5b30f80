"""Flash attention on Hopper, last part: a queue of tiles, and three warpgroups for short rows
==========================================================================================
Two things are left. Causal tiles cost between one block of keys and S / 128. Dealt out in advance (lesson 6b) somebody
has the long ones; dealt out by the hardware each is a program of its own (lesson 6), and begins and ends under nothing:
3000 cycles, beside 2100 for each of its blocks, 8.5 of them on average at S = 2048, 2.5 at S = 512. A queue has both:
programs stay, and who is free draws the next number from a counter, an atomic by the one warp that loads.

And D = 64. There a block's products take 1024 cycles and its exponentials 1024, so whatever one unit waits for the
other is lost. A warpgroup with half a row of O has registers to spare: 64 scores, 32 of P, 32 of O. So three of them,
160 registers each, fit where two were, each one thing after the other: while one waits for a product, two are left to
exponentiate, and order comes from numbers instead of from a schedule. K and V of a block now serve 192 queries.

You will learn: persistent scheduling by a counter, how one warp tells the others, registers as a budget for warps.
Source: Shah et al. 2024, FlashAttention-3, section 3, for the persistent kernel; its code has the same queue.
Needs a Hopper GPU to run; without one the rungs are compiled, and a slow twin of the queue runs, in any order.
Run it:    python day4_replace_op/lesson06c_flash_hopper_queue.py
Check it:  python -m lessonkit check lesson06c_flash_hopper_queue
Time it:   python -m lessonkit bench lesson06c_flash_hopper_queue
"""

import math
from itertools import count as numbers_from

from lessonkit import About, Lesson, Mutant, Unsupported, needs
from lessonkit.judge.simulate import Barrier, ask_for, in_any_order

import torch
import torch.nn.functional as F
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from course_ops import attention_forward
from course_ops.hopper import allocate_barriers as barriers
from course_ops.hopper import allocate_stages as stages
from course_ops.hopper import ring_slot as slot
from day4_replace_op.heads import LOWEST
from day4_replace_op.hopper import (
    BENCHES,
    CHECKS,
    ask_scores,
    ask_values,
    await_turn,
    exp2,
    hear,
    launch,
    leave,
    left,
    load_partition,
    matrix,
    pass_turn,
    place,
    skip,
    times,
)
from problems.attention import PROBLEM, expect_heads


# A row lies in four threads. Its maximum is needed at once, and costs two shuffles; its sum is not, so each thread
# keeps a part, and the parts meet at the end: [rows, keys] -> [rows, 4].
@gluon.jit
def parts(p):
    return gl.sum(gl.sum(p.reshape((p.shape[0], p.shape[1] // 8, 4, 2)), axis=3), axis=1)


@gluon.jit
def softmax(s, m, total, row, key, sizes, scale_log2, MASKED: gl.constexpr, CAUSAL: gl.constexpr):
    """P in fp32, the maximum in powers of 2, parts of the sum, and what O has to be multiplied by."""
    if MASKED:
        S_q, S_k = sizes[4], sizes[5]
        rows = row + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, s.type.layout))
        keys = key + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
        seen = (keys < S_k)[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None] + (S_k - S_q))
        s = gl.where(seen, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, axis=1) * scale_log2)
    p, old = exp2(s * scale_log2 - m_new[:, None]), exp2(m - m_new)
    kept = total * gl.convert_layout(old, gl.SliceLayout(1, total.type.layout))[:, None]
    return p, m_new, kept + parts(p), old


# Scores, softmax, O, one after the other. The stages are given back when the products that read them are over.
@gluon.jit
def one_by_one(
    q, o, m, total, smem, bars, turn, begin, end, row, key, sizes, scale_log2, LAYOUT: gl.constexpr,
    WHICH: gl.constexpr, TURNS: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    _, k_smem, v_smem, _ = smem
    _, _, k_full, k_empty, v_full, v_empty, order = bars
    STAGES: gl.constexpr = k_full.shape[0]
    for step in range(begin, end):
        stage = (turn + step) % STAGES
        await_turn(order, WHICH, turn + step, TURNS)
        s = ask_scores(q, k_smem, k_full, turn + step, LAYOUT)
        pass_turn(order, WHICH, TURNS)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(stage))
        p, m, total, old = softmax(s, m, total, row, key - step * s.shape[1], sizes, scale_log2, MASKED, CAUSAL)
        p = left(p, o, v_smem.dtype)
        o = ask_values(p, times(o, old), v_smem, v_full, turn + step)
        o, p = warpgroup_mma_wait(0, deps=(o, p))
        mbarrier.arrive(v_empty.index(stage))
    return o, m, total


# Rung 2's loop: O's product with a block is asked for after the scores of the next, so the tensor cores have both
# before anybody waits, and the softmax of the scores, which come first, runs while O's product may still be under way.
@gluon.jit
def step_ahead(
    q, o, m, total, smem, bars, turn, begin, end, row, key, sizes, scale_log2, LAYOUT: gl.constexpr,
    WHICH: gl.constexpr, TURNS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    _, k_smem, v_smem, _ = smem
    _, q_empty, k_full, k_empty, v_full, v_empty, order = bars
    STAGES: gl.constexpr = k_full.shape[0]
    KEYS: gl.constexpr = k_smem.shape[3]
    await_turn(order, WHICH, turn + begin, TURNS)
    s = ask_scores(q, k_smem, k_full, turn + begin, LAYOUT)
    pass_turn(order, WHICH, TURNS)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index((turn + begin) % STAGES))
    p, m, total, old = softmax(s, m, total, row, key - begin * KEYS, sizes, scale_log2, True, CAUSAL)
    p, o = left(p, o, v_smem.dtype), times(o, old)
    for step in range(begin + 1, end):
        await_turn(order, WHICH, turn + step, TURNS)
        s = ask_scores(q, k_smem, k_full, turn + step, LAYOUT)
        o = ask_values(p, o, v_smem, v_full, turn + step - 1)
        pass_turn(order, WHICH, TURNS)
        s = warpgroup_mma_wait(1, deps=(s,))  # of two products one may be unfinished: the later one, O's
        mbarrier.arrive(k_empty.index((turn + step) % STAGES))
        next_p, m, total, old = softmax(s, m, total, row, key - step * KEYS, sizes, scale_log2, False, CAUSAL)
        o, p = warpgroup_mma_wait(0, deps=(o, p))
        mbarrier.arrive(v_empty.index((turn + step - 1) % STAGES))
        p, o = left(next_p, o, v_smem.dtype), times(o, old)
    mbarrier.arrive(q_empty.index(WHICH))  # a product early, so that the next tile's Q is here when this one is stored
    o = ask_values(p, o, v_smem, v_full, turn + end - 1)
    o, p = warpgroup_mma_wait(0, deps=(o, p))
    mbarrier.arrive(v_empty.index((turn + end - 1) % STAGES))
    return o, m, total


@gluon.jit
def attend_partition(
    shared, WHICH: gl.constexpr, AHEAD: gl.constexpr, TURNS: gl.constexpr, CAUSAL: gl.constexpr, QUEUE: gl.constexpr
):
    descs, smem, bars, queue, sizes, lse_ptr, scale_log2 = shared
    q_desc, k_desc, _, _ = descs
    q_full, q_empty, _, _, _, _, _ = bars
    S_q, S_k = sizes[4], sizes[5]
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    D: gl.constexpr = q_desc.block_type.shape[3]
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    WGS: gl.constexpr = q_full.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    turn, count, nth = 0, 0, hear(0, queue, QUEUE)
    while nth < sizes[0] * sizes[2]:
        batch, head, row, steps = place(nth, sizes, CAUSAL, WGS * ROWS, KEYS)
        row += WHICH * ROWS
        key = (steps - 1) * KEYS
        hidden, masked = 0, 1  # blocks of keys that no query here sees; and those that not every query sees: the tail,
        if CAUSAL:  # and what the diagonal crosses
            masked = min(steps, max(1, steps - (row + S_k - S_q + 1) // KEYS))
        if CAUSAL and WGS > 2:  # the queries of two warpgroups are as many as a block's keys
            hidden = max(0, min(steps - 1, steps - (row + ROWS + S_k - S_q + KEYS - 1) // KEYS))
        m = gl.full((ROWS,), LOWEST, gl.float32, ROW)
        total = parts(gl.zeros((ROWS, KEYS), gl.float32, LAYOUT))
        o = gl.zeros((ROWS, D), gl.float32, OUT)
        q = matrix(smem[0].index(WHICH))
        for step in range(hidden):
            skip(bars, turn + step)
        mbarrier.wait(q_full.index(WHICH), count & 1)
        o, m, total = one_by_one(
            q, o, m, total, smem, bars, turn, hidden, masked - 1 if AHEAD else masked, row, key, sizes, scale_log2,
            LAYOUT, WHICH, TURNS, True, CAUSAL,
        )  # fmt: skip
        if not AHEAD:
            o, m, total = one_by_one(
                q, o, m, total, smem, bars, turn, masked, steps, row, key, sizes, scale_log2, LAYOUT,
                WHICH, TURNS, False, CAUSAL,
            )  # fmt: skip
        elif steps > 0:
            o, m, total = step_ahead(
                q, o, m, total, smem, bars, turn, masked - 1, steps, row, key, sizes, scale_log2, LAYOUT,
                WHICH, TURNS, CAUSAL,
            )  # fmt: skip
        if not AHEAD or steps == 0:
            mbarrier.arrive(q_empty.index(WHICH))
        turn += steps
        count += 1
        nth = hear(count, queue, QUEUE)
        leave(o, m, total, descs, smem, lse_ptr, WHICH, batch, head, row, sizes)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "H", "all_heads", "at_once", "S_q", "S_k"])
def flash_kernel(
    q_desc, k_desc, v_desc, o_desc,  # of [B, H, S_q, D], twice [B, H_kv, S_k, D], [B, H, S_q, D]
    lse_ptr, counter_ptr,  # [B, H, S_q] in fp32; one int32, 0, if there is a queue
    scale_log2, tiles, H, all_heads, at_once, S_q, S_k, GROUP: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr, WGS: gl.constexpr, QUEUE: gl.constexpr, AHEAD: gl.constexpr, TURNS: gl.constexpr = False,
):  # fmt: skip
    descs = q_desc, k_desc, v_desc, o_desc
    smem = stages(q_desc, WGS), stages(k_desc, STAGES), stages(v_desc, STAGES), stages(o_desc, WGS)
    bars = (
        barriers(WGS, 1), barriers(WGS, 1),  # a warpgroup's Q: come, done with
        barriers(STAGES, 1), barriers(STAGES, WGS), barriers(STAGES, 1), barriers(STAGES, WGS),  # K: come, read; V
        barriers(2, 1) if TURNS else None,  # whose turn it is (lesson 6b)
    )  # fmt: skip
    if TURNS:
        mbarrier.arrive(bars[6].index(0))  # the first turn
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queue = numbers, barriers(2, 1) if QUEUE else None, counter_ptr
    sizes = tiles, H, all_heads, at_once, S_q, S_k
    shared = descs, smem, bars, queue, sizes, lse_ptr, scale_log2
    if WGS == 2:
        gl.warp_specialize(
            [
                (attend_partition, (shared, 0, AHEAD, TURNS, CAUSAL, QUEUE)),
                (attend_partition, (shared, 1, AHEAD, TURNS, CAUSAL, QUEUE)),
                (load_partition, (descs, smem, bars, queue, sizes, GROUP, CAUSAL, QUEUE)),
            ],
            [4, 1], [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend_partition, (shared, 0, AHEAD, TURNS, CAUSAL, QUEUE)),
                (attend_partition, (shared, 1, AHEAD, TURNS, CAUSAL, QUEUE)),
                (attend_partition, (shared, 2, AHEAD, TURNS, CAUSAL, QUEUE)),
                (load_partition, (descs, smem, bars, queue, sizes, GROUP, CAUSAL, QUEUE)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip


# Rung 5. New: the queue. Predicted: causal the 3000 cycles of each tile, 14% at D = 128 and S = 2048, 36% at 512, 2% at
# 16384; where tiles cost the same, nothing. And no turns: of a causal tile's steps one warpgroup has more that are
# masked, and to take turns is to wait for each other.
@needs(90, "TMA and wgmma", only=True)
def queued(q, k, v, causal=False, window=None, scale=None):
    """q [B, H, S_q, D], k and v [B, H_kv, S_k, D], fp16 or bf16, D at most 128 -> o as q, lse [B, H, S_q] in fp32."""
    return launch(flash_kernel, q, k, v, causal, window, scale, QUEUE=True, AHEAD=True)


# Rung 6. New: three warpgroups, where O leaves the registers for it. Predicted: by lesson 6's count 1024 cycles a block
# of 128 queries are the floor at D = 64 and 1700 what two warpgroups take; with a third, 1300.
@needs(90, "TMA and wgmma", only=True)
def three_warpgroups(q, k, v, causal=False, window=None, scale=None):
    """As queued, D at most 64."""
    return launch(flash_kernel, q, k, v, causal, window, scale, QUEUE=True, WGS=3, AHEAD=False)


@needs(90, "TMA and wgmma", only=True)
def attention(q, k, v, causal=False, window=None, scale=None):
    """The faster of the two; what they are not for (fp32, windows, D past 128, strides of TMA) takes lesson 4's."""
    # 192 rows that see 1 to 192 keys of the last two blocks compute all 256: causal that is 33% more than 128 rows do
    # at S = 1024, 11% at 2048, where the third warpgroup gains 4%; at 16384 it gains 11%.
    wide = q.shape[-1] <= 64 and not (causal and k.ndim == 4 and k.shape[2] <= 2048)
    try:
        return (three_warpgroups if wide else queued)(q, k, v, causal, window, scale)
    except Unsupported:
        return attention_forward(q, k, v, causal=causal, window=window, scale=scale)


# The slow twin: three programs, of each the warp that loads and three warpgroups, in any order. What is new is between
# them, so a tile, of 3 x 8 queries, is attended to at once.
def twin(q, k, v, causal=False, window=None, scale=None):
    """As attention, without windows, in any dtype: the counter, the numbers told, and Q."""
    scale = expect_heads(q, k, v, causal, window, scale)
    B, H, S_q, _ = q.shape
    o, lse = torch.zeros(q.shape), torch.zeros(B, H, S_q)  # on the CPU, step by step
    sizes = -(-S_q // 24), H, B * H, 2, S_q, k.shape[2]
    counter, copies, partitions = numbers_from(3), [], []
    q_pad, k, v = (t.float().cpu() for t in (F.pad(q * scale, (0, 0, 0, 24)), k, v))
    for program in range(3):
        partitions += _program(program, counter, copies, sizes, q_pad, k, v, o, lse, causal)
    in_any_order(partitions, copies)
    return o.to(q), lse.to(q.device)


def _program(program, counter, copies, sizes, q, k, v, o, lse, causal):
    tiles, _, all_heads, _, S_q, S_k = sizes
    group = q.shape[1] // k.shape[1]
    kept = 2
    numbers, told = [None] * kept, [Barrier(1) for _ in range(kept)]
    q_smem = [torch.full((8, q.shape[3]), math.nan) for _ in range(3)]
    q_full, q_empty = ([Barrier(1) for _ in range(3)] for _ in range(2))

    def tell(count, nth):
        numbers[count % kept] = nth
        told[count % kept].arrive()

    def load_partition():
        count, nth = 0, program
        while nth < tiles * all_heads:
            tell(count, nth)
            b, h, row, _ = place.fn(nth, sizes, causal, 24, 8)
            for which in range(3):
                yield q_empty[which], count & 1 ^ 1
                ask_for(copies, q_full[which], (q_smem[which], q[b, h, row + 8 * which :][:8]))
            nth, count = next(counter), count + 1
        tell(count, nth)

    def attend_partition(which):
        for count in numbers_from():
            stage, parity = slot.fn(count, kept)
            yield told[stage], parity
            nth = numbers[stage]
            if nth >= tiles * all_heads:
                return
            b, h, row, _ = place.fn(nth, sizes, causal, 24, 8)
            yield q_full[which], count & 1
            s = q_smem[which] @ k[b, h // group].T
            q_empty[which].arrive()
            rows = torch.arange(row + 8 * which, row + 8 * which + 8)[:, None]
            s[causal & (torch.arange(S_k) > rows + S_k - S_q)] = -math.inf
            n = max(0, min(8, S_q - row - 8 * which))
            inside, p = (b, h, slice(row + 8 * which, row + 8 * which + n)), s.softmax(-1).nan_to_num()
            o[inside] += (p @ v[b, h // group])[:n]  # twice, if a tile is drawn twice
            lse[inside] += s.logsumexp(-1)[:n]

    return [load_partition(), *map(attend_partition, range(3))]


LESSON = Lesson(
    about=About(
        teaches="a queue of tiles, for causal ones cost more or less; three warpgroups where registers allow",
        hours=0.5,
        operator="attention",
        language="Gluon",
    ),
    problem=PROBLEM,
    rungs=(queued, three_warpgroups, attention),
    checks=CHECKS,
    benches=(*BENCHES, {"B": 32, "H": 12, "S": 1024, "D": 64, "causal": True}),  # the last is lesson 10's GPT
    cpu_model=twin,
    wrong=(
        Mutant("a number over one that somebody has not heard", "_program", "kept = 2", "kept = 1", "twin", "barrier"),
        Mutant("nobody says that it is over", "_program", "        tell(count, nth)\n\n", "\n", "twin", "barrier"),
        Mutant("a counter for each program", "twin", "_program(program, counter,", "_program(program, numbers_from(3),",
               "twin"),
        Mutant("the first tiles are drawn again", "twin", "numbers_from(3)", "numbers_from()", "twin"),
        Mutant("the next tile's Q over this one's", "_program", "yield q_empty[which], count & 1 ^ 1",
               "yield q_empty[which], 2", "twin", "barrier"),
    ),
    claims=dict.fromkeys((queued, three_warpgroups), ("wgmma", "tma", "no spills")),
    dtypes=(torch.float16, torch.bfloat16),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
