"""Flash attention on Hopper: a product under the softmax
=======================================================
Lesson 4's kernel leaves the order of things to Triton's compiler. Here it is written out in Gluon (day 3, lesson 7), as
FlashAttention-3 has it (Shah et al. 2024, section 3), because order is what is left to gain. A program has a tile of
128 queries; for each block of 128 keys an SM has to do, at D = 128 and at D = 64, cycles:

    products       4 * 128 * 128 * D FLOPs, 4096 a cycle                          2048    1024
    exponentials   128 * 128, 16 a cycle                                          1024    1024
    the rest       5.5 and 5 instructions a score, 128 lanes                       700     640

One after the other that is 3800 and 2700 cycles; under each other 2048 and 1024, as the first two run in units of their
own: 1.8 and 2.6 times as fast at most. At D = 128 an H200's tensor cores do about 790 TFLOP/s for as long as power
lasts (cuBLAS), so that is the floor's speed, it was thought; 6f and 6g reach 807 at S = 16384. At D = 64 products and
exponentials take the same time, and one has to hide the other without a gap.

    1 warp                 asks TMA for Q, K and V                     40 registers a thread
    2 warpgroups (4 + 4)   64 queries each: scores, softmax, O        232: 64 scores, 32 of P, 64 of O at D = 128

You will learn: trades for warps, wgmma with its left side in registers, a product in flight under a softmax.
Needs a Hopper GPU to run; without one the rungs are compiled and their machine code is read.
Run it:    python day4_replace_op/lesson06_flash_hopper.py
Check it:  python -m lessonkit check lesson06_flash_hopper
Time it:   python -m lessonkit bench lesson06_flash_hopper
"""

from lessonkit import About, Lesson, Mutant, Unsupported, needs

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from course_ops import attention_forward
from course_ops.hopper import allocate_barriers as barriers
from course_ops.hopper import allocate_stages as stages
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
from problems.attention import PROBLEM


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


# Rung 1. Trades: one warp loads, so that the others never wait for an address, and two warpgroups attend, each to 64
# queries and each one thing after the other. Nothing makes one multiply while the other exponentiates, but nothing
# keeps them in step either: predicted, half of the softmax is hidden by chance, 2900 cycles of a block's 3800 at D =
# 128, and 2000 of 2700 at D = 64.
@needs(90, "TMA and wgmma", only=True)
def specialized(q, k, v, causal=False, window=None, scale=None):
    """q [B, H, S_q, D], k and v [B, H_kv, S_k, D], fp16 or bf16, D at most 128 -> o as q, lse [B, H, S_q] in fp32."""
    return launch(flash_kernel, q, k, v, causal, window, scale, AHEAD=False)


# Rung 2. New: scores a step ahead. A warpgroup has 64 scores and 64 numbers of O a thread in flight, and 32 registers
# of P that the second product reads. Predicted: the tensor cores find the next product queued when one ends, and stand
# still only while both warpgroups exponentiate: 2400 cycles at D = 128, 1700 at D = 64.
@needs(90, "TMA and wgmma", only=True)
def ahead(q, k, v, causal=False, window=None, scale=None):
    """As specialized; what this is not for (fp32, windows, D past 128, strides that TMA refuses) takes lesson 4's."""
    try:
        return launch(flash_kernel, q, k, v, causal, window, scale, AHEAD=True)
    except Unsupported:
        return attention_forward(q, k, v, causal=causal, window=window, scale=scale)


LESSON = Lesson(
    about=About(
        teaches="in Gluon: trades for warps, P from registers, a product in flight under a softmax",
        hours=1.5,
        star=True,
        operator="attention",
        language="Gluon",
    ),
    problem=PROBLEM,
    rungs=(specialized, ahead),
    checks=CHECKS,
    benches=BENCHES[::2],
    wrong=(
        Mutant("the diagonal is not masked", "softmax", "rows[:, None] + (S_k", "rows[:, None] + 64 + (S_k", "ahead"),
        Mutant("one masked block too few", "attend_partition", "row + S_k - S_q + 1", "row + S_k - S_q + 64", "ahead"),
        Mutant("the last V is the first", "step_ahead", "v_full, turn + end - 1)", "v_full, turn + begin)", "ahead"),
        Mutant("O is not rescaled", "step_ahead", "left(next_p, o, v_smem.dtype), times(o, old)",
               "left(next_p, o, v_smem.dtype), o", "ahead"),
        Mutant("a part of the sum is forgotten", "parts", "axis=3", "axis=3) * 0 + gl.max(p.reshape((p.shape[0], "
               "p.shape[1] // 8, 4, 2)), axis=3", "specialized"),
        Mutant("both have the upper half's Q", "attend_partition", "smem[0].index(WHICH)", "smem[0].index(0)",
               "specialized"),
    ),
    claims=dict.fromkeys((specialized, ahead), ("wgmma", "tma", "no spills")),
    dtypes=(torch.float16, torch.bfloat16),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
