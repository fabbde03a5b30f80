"""Flash attention on Hopper, second half: warpgroups that take turns, and a grid that stays
========================================================================================
Lesson 6's two warpgroups drift: while both exponentiate the tensor cores stand still, and while both have asked for
products the exponential units do. FlashAttention-3 makes them take turns (Shah et al. 2024, section 3.1, "pingpong"):
a warpgroup asks for its products only when the other has asked for its own. Then one multiplies while the other
exponentiates, and the longer of the two decides: at D = 128 a block's 2048 cycles of products, each warpgroup's 1024
under the 900 that the other's softmax takes.

The rest is at a tile's ends. A program of 16 blocks (S = 2048) begins with loads, scores and a softmax under which
nothing runs, and ends with a product and a store: about 3000 cycles of 36,000. Programs that stay load the next tile's
Q, K and V under the end of this one. Lesson 6c has the last part: tiles that do not all cost the same.

You will learn: turns by two barriers, and why every step must take one; when a grid should stay; to run a kernel's
barriers on a CPU, in any order.
Needs a Hopper GPU to run; without one the rungs are compiled, and a slow twin of all barriers runs, whose partitions
take turns in any order: its mutants are the mistakes that on a GPU hang, or are wrong once a week.
Run it:    python day4_replace_op/lesson06b_flash_hopper_turns.py
Check it:  python -m lessonkit check lesson06b_flash_hopper_turns
Time it:   python -m lessonkit bench lesson06b_flash_hopper_turns
"""

import math

from lessonkit import About, Lesson, Mutant, Unsupported, needs
from lessonkit.judge.simulate import FREE, Barrier, ask_for, in_any_order

import torch
import torch.nn.functional as F
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from course_ops import attention_forward
from course_ops.hopper import allocate_barriers as barriers
from course_ops.hopper import allocate_stages as stages
from course_ops.hopper import ring_slot as slot
from day4_replace_op import heads
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


# Rung 3. New: turns. Every step takes one, also those of the diagonal that are done one by one: a warpgroup may have
# more of them than the other, but steps they have equally many, and a turn that only one takes is waited for for ever.
# Predicted: 2100 cycles a block at D = 128, at best 780 TFLOP/s; at D = 64 nothing, as there each unit is busy with one
# warpgroup or the other anyway.
@needs(90, "TMA and wgmma", only=True)
def turns(q, k, v, causal=False, window=None, scale=None):
    """q [B, H, S_q, D], k and v [B, H_kv, S_k, D], fp16 or bf16, D at most 128 -> o as q, lse [B, H, S_q] in fp32."""
    return launch(flash_kernel, q, k, v, causal, window, scale, AHEAD=True, TURNS=True)


# Rung 4. New: a grid that stays, a program an SM, each with every 132nd tile. Predicted: where all tiles cost the same,
# 3000 cycles of 36,000 at S = 2048, 8%, of 272,000 at 16384 1%. Causal tiles cost between one block and S / 128, and
# whoever has drawn the short ones waits for the others at the end: lesson 6c.
@needs(90, "TMA and wgmma", only=True)
def stays(q, k, v, causal=False, window=None, scale=None):
    """As turns; what this is not for takes lesson 4's, as in lesson 6."""
    try:
        return launch(flash_kernel, q, k, v, causal, window, scale, STAYS=True, AHEAD=True, TURNS=True)
    except Unsupported:
        return attention_forward(q, k, v, causal=causal, window=window, scale=scale)


# The slow twin: what lies between the barriers is PyTorch, small (2 x 8 queries, 8 keys, 2 stages, 3 programs) so that
# rings turn often. Partitions are generators that yield (barrier, parity) where the kernel waits for a barrier, and
# FREE where it waits for a product, which until then reads its tiles. Day 3's in_any_order runs any that need not wait.


def twin(q, k, v, causal=False, window=None, scale=None):
    """As stays, without windows, in any dtype: all loops and barriers, one wait at a time."""
    scale = expect_heads(q, k, v, causal, window, scale)
    B, H, S_q, _ = q.shape
    o, lse = torch.zeros(q.shape), torch.full((B, H, S_q), -math.inf)  # on the CPU, step by step
    tiles = -(-S_q // 16)
    for program in range(3):
        mine = range(program, tiles * B * H, 3)
        _program(mine, (tiles, H, B * H, 2, S_q, k.shape[2]), q * scale, k, v, o, lse, causal)
    return o.to(q), lse.to(q.device)


def _program(mine, sizes, q, k, v, o, lse, causal):
    S_q, S_k, D, group = sizes[4], sizes[5], q.shape[3], q.shape[1] // k.shape[1]
    tiles = [place.fn(nth, sizes, causal, 16, 8) for nth in mine]
    q, k, v = (F.pad(t.float().cpu(), (0, 0, 0, -t.shape[2] % 16)) for t in (q, k, v))  # with zeros, as TMA does
    q_smem, k_smem, v_smem = (torch.full((2, 8, D), math.nan) for _ in range(3))
    q_full, q_empty, k_full, v_full, order = ([Barrier(1), Barrier(1)] for _ in range(5))
    k_empty, v_empty = ([Barrier(2), Barrier(2)] for _ in range(2))
    order[0].arrive()
    copies = []  # on their way

    def load_partition():
        turn = 0
        for tile, (b, h, row, steps) in enumerate(tiles):
            for which in range(2):
                yield q_empty[which], tile & 1 ^ 1
                ask_for(copies, q_full[which], (q_smem[which], q[b, h, row + 8 * which :][:8]))
            for step in range(steps + 1):
                if step < steps:
                    stage, parity = slot.fn(turn + step, 2)
                    yield k_empty[stage], parity ^ 1
                    ask_for(copies, k_full[stage], (k_smem[stage], k[b, h // group, 8 * (steps - 1 - step) :][:8]))
                if step > 0:
                    stage, parity = slot.fn(turn + step - 1, 2)
                    yield v_empty[stage], parity ^ 1
                    ask_for(copies, v_full[stage], (v_smem[stage], v[b, h // group, 8 * (steps - step) :][:8]))
            turn += steps

    def attend_partition(which):
        turn = 0
        for tile, (b, h, row, steps) in enumerate(tiles):
            rows = torch.arange(row + 8 * which, row + 8 * which + 8)[:, None]
            m, total, acc, p = torch.full((8, 1), heads.LOWEST.value), torch.zeros(8, 1), torch.zeros(8, D), None
            yield q_full[which], tile & 1
            for step in range(steps + 1):  # the last one only adds the last P V
                stage, parity = slot.fn(turn + step, 2)
                before, before_parity = slot.fn(turn + step - 1, 2)
                if step < steps:
                    yield order[which], turn + step & 1
                    yield k_full[stage], parity
                if step > 0:
                    yield v_full[before], before_parity
                if step < steps:
                    order[1 - which].arrive()
                    yield FREE
                    s = q_smem[which] @ k_smem[stage].T
                    k_empty[stage].arrive()
                    if step == steps - 1:
                        q_empty[which].arrive()
                    keys = 8 * (steps - 1 - step) + torch.arange(8)
                    s[(keys >= S_k) | (causal & (keys > rows + S_k - S_q))] = -math.inf
                if step > 0:
                    yield FREE
                    acc += p @ v_smem[before]
                    v_empty[before].arrive()
                if step < steps:
                    m, m_old = torch.maximum(m, s.amax(1, keepdim=True)), m
                    p, old = torch.exp(s - m), torch.exp(m_old - m)
                    total, acc = total * old + p.sum(1, keepdim=True), acc * old
            if steps == 0:
                q_empty[which].arrive()
            turn += steps
            inside = slice(row + 8 * which, min(row + 8 * which + 8, S_q))
            n = max(0, inside.stop - inside.start)
            o[b, h, inside] = torch.where(total == 0, 0, acc / total)[:n].to(o)
            lse[b, h, inside] = (m + total.log())[:n, 0].to(lse)

    in_any_order([attend_partition(0), attend_partition(1), load_partition()], copies)


LESSON = Lesson(
    about=About(
        teaches="two warpgroups that take turns, a grid that stays; its barriers on a CPU",
        hours=0.75,
        operator="attention",
        language="Gluon",
    ),
    problem=PROBLEM,
    rungs=(turns, stays),
    checks=CHECKS,
    benches=BENCHES,
    cpu_model=twin,
    wrong=(
        Mutant("nobody has the first turn", "_program", "order[0].arrive()", "order[0]", "twin", "barrier"),
        Mutant("a step that passes no turn", "_program", "order[1 - which].arrive()",
               "order[1 - which].arrive() if step or which else None", "twin", "barrier"),
        Mutant("K read before it has come", "_program", "yield k_full[stage], parity", "yield FREE", "twin", "nan"),
        Mutant("empty when one of two has read", "_program", "([Barrier(2), Barrier(2)]", "([Barrier(1), Barrier(1)]",
               "twin", "barrier"),
        Mutant("V given back before the product is over", "_program", "acc += p @ v_smem[before]",
               "v_empty[before].arrive(); yield FREE; v_empty[before].missing += 1; acc += p @ v_smem[before]",
               "twin", "nan"),
        Mutant("always the first Q", "_program", "q_full[which], tile & 1", "q_full[which], 0", "twin", "barrier"),
    ),
    claims=dict.fromkeys((turns, stays), ("wgmma", "tma", "no spills")),
    dtypes=(torch.float16, torch.bfloat16),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
