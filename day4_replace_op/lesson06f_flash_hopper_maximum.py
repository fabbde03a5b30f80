"""Flash attention on Hopper, once more: an old maximum will do
============================================================
exp(s - m) is divided by the sum of its kind, so any m gives the same O: the row's maximum is there only so that nothing
overflows. Yet whoever wants the maximum of each block waits for it, and pays for it. A thread has 64 scores of a block
of 64 x 128, and lesson 6c's machine code has 396 instructions for them:

    3.5 a score    multiply by the scale and subtract m, exp2, add to the sum, half a conversion to 16 bits         224
    the maximum    a comparison a score, and four shuffles; before the first exponential can begin                   72
    rescaling      O, 32 numbers at D = 64 (64 at D = 128), and the sum; before the product can begin                36
    the rest       barriers, descriptors, products                                                                   64

Here m is the maximum of the first block, and stays until it is too small. The sum says when: it is there anyway, and
while no thread's part of it is past 2^13, no P was past 2^13, which fp16 holds; sum and O are fp32. A warpgroup asks
itself once a block, in 15 instructions; a block whose sum is too large (or infinite) is done again with its maximum, as
its K is still there. Random scores never need that; scores that grow from block to block do, and cost a product more.
(Whether a row's maximum moves depends on its 63 neighbours too: O is the same but for rounding, not to the bit.)

You will learn: what is exact and what is only habit; rare things done again; registers across a branch.
Source: FlashAttention-4's code for Blackwell takes each block's maximum, but rescales O only when it has grown by 2^8.
Needs a Hopper GPU to run; without one the rungs are compiled, and a slow twin runs, block by block, in PyTorch.
Run it:    python day4_replace_op/lesson06f_flash_hopper_maximum.py
Check it:  python -m lessonkit check lesson06f_flash_hopper_maximum
Time it:   python -m lessonkit bench lesson06f_flash_hopper_maximum
"""

import math

from lessonkit import About, Lesson, Mutant, Unsupported, case, needs

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from course_ops import attention_forward
from course_ops.hopper import allocate_barriers as barriers
from course_ops.hopper import allocate_stages as stages
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
    hide,
    launch,
    leave,
    left,
    load_partition,
    matrix,
    packed,
    pass_turn,
    place,
    skip,
    times,
)
from problems.attention import PROBLEM, expect_heads, visible

LIMIT = gl.constexpr(0x46000000)  # the bits of 2^13


# A row lies in four threads. Its maximum is needed at once, and costs two shuffles; its sum is not, so each thread
# keeps a part, and the parts meet at the end: [rows, keys] -> [rows, 4].
@gluon.jit
def parts(p):
    return gl.sum(gl.sum(p.reshape((p.shape[0], p.shape[1] // 8, 4, 2)), axis=3), axis=1)


@gluon.jit
def masked_softmax(s, m, total, row, key, sizes, scale_log2, MASKED: gl.constexpr, CAUSAL: gl.constexpr):
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
        p, m, total, old = masked_softmax(s, m, total, row, key - step * s.shape[1], sizes, scale_log2, MASKED, CAUSAL)
        p = left(p, o, v_smem.dtype)
        o = ask_values(p, times(o, old), v_smem, v_full, turn + step)
        o, p = warpgroup_mma_wait(0, deps=(o, p))
        mbarrier.arrive(v_empty.index(stage))
    return o, m, total


@gluon.jit
def softmax(s, m, total, scale_log2):
    """P in fp32, the maximum in powers of 2, parts of the sum, and what O has to be multiplied by."""
    m_new = gl.maximum(m, gl.max(s, axis=1) * scale_log2)
    p, old = exp2(s * scale_log2 - m_new[:, None]), exp2(m - m_new)
    kept = total * gl.convert_layout(old, gl.SliceLayout(1, total.type.layout))[:, None]
    return p, m_new, kept + parts(p), old


# The largest part of a sum, by way of shared memory, a number a warp. Positive numbers compare as their bits do, and
# for integers a warp has an instruction.
@gluon.jit
def report(part, reports):
    bits = part.to(gl.int32, bitcast=True)
    reports.store(gl.max(bits.reshape((4, bits.shape[0] * bits.shape[1] // 4)), axis=1))


@gluon.jit
def too_large(reports):
    return gl.max(reports.load(gl.BlockedLayout([4], [32], [4], [0])), axis=0) > LIMIT


# The last masked block gives the maximum.
@gluon.jit
def first(q, o, m, total, smem, bars, at, row, key, sizes, scale_log2, LAYOUT: gl.constexpr, CAUSAL: gl.constexpr):
    s = warpgroup_mma_wait(0, deps=(ask_scores(q, smem[1], bars[2], at, LAYOUT),))
    mbarrier.arrive(bars[3].index(at % bars[3].shape[0]))
    p, m, total, old = softmax(hide(s, row, key, sizes, CAUSAL), m, total, scale_log2)
    return packed(p, o, smem[2].dtype), times(o, old), m, total


# Then scores a step ahead, as in lesson 6: block `at`'s, under O's product of the one before. K waits for the sum.
@gluon.jit
def follow(q, p, o, m, total, smem, bars, at, scale_log2, LAYOUT: gl.constexpr, WHICH: gl.constexpr):
    _, k_smem, v_smem, _ = smem
    _, _, k_full, k_empty, v_full, v_empty, reports = bars
    reports = reports.index(WHICH)
    s = ask_scores(q, k_smem, k_full, at, LAYOUT)
    o = ask_values(p, o, v_smem, v_full, at - 1)
    s = warpgroup_mma_wait(1, deps=(s,))
    next_p = exp2(s * scale_log2 - m[:, None])
    part = parts(next_p)
    report(part, reports)
    o, p = warpgroup_mma_wait(0, deps=(o, p))
    next_left = packed(next_p, o, v_smem.dtype)
    if too_large(reports):
        s = warpgroup_mma_wait(0, deps=(ask_scores(q, k_smem, k_full, at, LAYOUT),))
        next_p, m, total, old = softmax(s, m, total, scale_log2)
        next_left, o = packed(next_p, o, v_smem.dtype), times(o, old)
    else:
        total += part
    mbarrier.arrive(v_empty.index((at - 1) % v_empty.shape[0]))
    mbarrier.arrive(k_empty.index(at % k_empty.shape[0]))
    return next_left, o, m, total


# From block begin + 1 on, P of the one before in hand.
@gluon.jit
def go_on(q, p, o, m, total, smem, bars, turn, begin, end, scale_log2, LAYOUT: gl.constexpr, WHICH: gl.constexpr):
    for step in range(begin + 1, end):
        p, o, m, total = follow(q, p, o, m, total, smem, bars, turn + step, scale_log2, LAYOUT, WHICH)
    return finish(p, o, smem, bars, turn + end - 1, WHICH), m, total


@gluon.jit
def finish(p, o, smem, bars, at, WHICH: gl.constexpr):
    mbarrier.arrive(bars[1].index(WHICH))
    o, p = warpgroup_mma_wait(0, deps=(ask_values(p, o, smem[2], bars[4], at), p))
    mbarrier.arrive(bars[5].index(at % bars[5].shape[0]))
    return o


@gluon.jit
def step_ahead(
    q, o, m, total, smem, bars, turn, begin, end, row, key, sizes, scale_log2, LAYOUT: gl.constexpr,
    WHICH: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    key -= begin * smem[1].shape[3]
    p, o, m, total = first(q, o, m, total, smem, bars, turn + begin, row, key, sizes, scale_log2, LAYOUT, CAUSAL)
    return go_on(q, p, o, m, total, smem, bars, turn, begin, end, scale_log2, LAYOUT, WHICH)


@gluon.jit
def attend_partition(
    shared, WHICH: gl.constexpr, CAUSAL: gl.constexpr, QUEUE: gl.constexpr, STEPS: gl.constexpr, ALIGNED: gl.constexpr
):
    descs, smem, bars, queue, sizes, lse_ptr, scale_log2 = shared
    q_desc, k_desc, _, _ = descs
    S_q, S_k = sizes[4], sizes[5]
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    D: gl.constexpr = q_desc.block_type.shape[3]
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    WGS: gl.constexpr = bars[0].shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    turn, count, nth = 0, 0, hear(0, queue, QUEUE)
    while nth < sizes[0] * sizes[2]:
        batch, head, row, steps = place(nth, sizes, CAUSAL, WGS * ROWS, KEYS)
        row += WHICH * ROWS
        key = (steps - 1) * KEYS
        hidden, masked = 0, 1
        if CAUSAL and not ALIGNED:
            masked = min(steps, max(1, steps - (row + S_k - S_q + 1) // KEYS))
        if CAUSAL and WGS > 2:
            hidden = max(0, min(steps - 1, steps - (row + ROWS + S_k - S_q + KEYS - 1) // KEYS))
        m = gl.full((ROWS,), LOWEST, gl.float32, gl.SliceLayout(1, LAYOUT))
        total = parts(gl.zeros((ROWS, KEYS), gl.float32, LAYOUT))
        o = gl.zeros((ROWS, D), gl.float32, OUT)
        q = matrix(smem[0].index(WHICH))
        for step in range(hidden):
            skip(bars, turn + step)
        mbarrier.wait(bars[0].index(WHICH), count & 1)
        if CAUSAL and not ALIGNED:
            o, m, total = one_by_one(
                q, o, m, total, smem, bars, turn, hidden, masked - 1, row, key, sizes, scale_log2, LAYOUT,
                WHICH, False, True, CAUSAL,
            )  # fmt: skip
        if steps > 0:
            o, m, total = STEPS(
                q, o, m, total, smem, bars, turn, masked - 1, steps, row, key, sizes, scale_log2, LAYOUT, WHICH, CAUSAL
            )
        else:
            mbarrier.arrive(bars[1].index(WHICH))
        turn, count = turn + steps, count + 1
        nth = hear(count, queue, QUEUE)
        leave(o, m, total, descs, smem, lse_ptr, WHICH, batch, head, row, sizes)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "H", "all_heads", "at_once", "S_q", "S_k"])
def maximum_kernel(  # lesson 6's arguments
    q_desc, k_desc, v_desc, o_desc, lse_ptr, counter_ptr, scale_log2, tiles, H, all_heads, at_once, S_q, S_k,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr, QUEUE: gl.constexpr,
    STEPS: gl.constexpr = step_ahead, ALIGNED: gl.constexpr = False,  # lesson 6g's
):  # fmt: skip
    descs = q_desc, k_desc, v_desc, o_desc
    smem = stages(q_desc, WGS), stages(k_desc, STAGES), stages(v_desc, STAGES), stages(o_desc, WGS)
    bars = (
        barriers(WGS, 1), barriers(WGS, 1), barriers(STAGES, 1), barriers(STAGES, WGS), barriers(STAGES, 1),
        barriers(STAGES, WGS), gl.allocate_shared_memory(gl.int32, [WGS, 4], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )  # fmt: skip
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queue = numbers, barriers(2, 1), counter_ptr
    sizes = tiles, H, all_heads, at_once, S_q, S_k
    shared = descs, smem, bars, queue, sizes, lse_ptr, scale_log2
    if WGS == 2:
        gl.warp_specialize([
            (attend_partition, (shared, 0, CAUSAL, QUEUE, STEPS, ALIGNED)),
            (attend_partition, (shared, 1, CAUSAL, QUEUE, STEPS, ALIGNED)),
            (load_partition, (descs, smem, bars, queue, sizes, GROUP, CAUSAL, QUEUE)),
        ], [4, 1], [232, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (attend_partition, (shared, 0, CAUSAL, QUEUE, STEPS, ALIGNED)),
            (attend_partition, (shared, 1, CAUSAL, QUEUE, STEPS, ALIGNED)),
            (attend_partition, (shared, 2, CAUSAL, QUEUE, STEPS, ALIGNED)),
            (load_partition, (descs, smem, bars, queue, sizes, GROUP, CAUSAL, QUEUE)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip


# Rung 7. New: the maximum of the first block stays. Predicted: of a thread's 396 instructions for 64 scores of D = 64
# 312 stay, and between a product's end and the first exponential nothing is left, where a warpgroup waited 235 cycles
# for 32 comparisons one after the other and two shuffles, of the 1700 that a block takes: a tenth, at D = 128 also.
@needs(90, "TMA and wgmma", only=True)
def old_maximum(q, k, v, causal=False, window=None, scale=None):
    """q [B, H, S_q, D], k and v [B, H_kv, S_k, D], fp16 or bf16, D at most 128 -> o as q, lse [B, H, S_q] in fp32."""
    return launch(maximum_kernel, q, k, v, causal, window, scale, QUEUE=True, DEPTH=4)


# Rung 8. New: three warpgroups that are a step ahead: 64 scores, 32 of P in flight, 32 of O and 20 more fit into 160
# registers. Predicted, against lesson 6c's, one thing after the other: no wait for O's product, 320 cycles of 2400.
@needs(90, "TMA and wgmma", only=True)
def three_ahead(q, k, v, causal=False, window=None, scale=None):
    """As old_maximum, D at most 64."""
    return launch(maximum_kernel, q, k, v, causal, window, scale, QUEUE=True, WGS=3, DEPTH=4)


@needs(90, "TMA and wgmma", only=True)
def attention(q, k, v, causal=False, window=None, scale=None):
    """The faster of the two; what they are not for (fp32, windows, D past 128, strides of TMA) takes lesson 4's."""
    wide = q.shape[-1] <= 64 and not (causal and k.ndim == 4 and k.shape[2] < 2048)  # at 1024 three do a third more
    try:
        return (three_ahead if wide else old_maximum)(q, k, v, causal, window, scale)
    except Unsupported:
        return attention_forward(q, k, v, causal=causal, window=window, scale=scale)


# The slow twin: rows and keys eight by eight, last keys first, and 64 is too large a sum.
def twin(q, k, v, causal=False, window=None, scale=None):
    """As attention, without windows, in any dtype."""
    scale = expect_heads(q, k, v, causal, window, scale)
    (S_q, S_k), group = (q.shape[2], k.shape[2]), q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    o, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
    seen = visible(S_q, S_k, causal, None, q.device)
    for row in range(0, S_q, 8):
        rows = slice(row, row + 8)
        s = (q[:, :, rows].double() @ k.mT) * scale
        m = s.new_full((*s.shape[:3], 1), heads.LOWEST.value)
        total, acc = torch.zeros_like(m), torch.zeros_like(q[:, :, rows], dtype=m.dtype)
        for key in reversed(range(0, S_k, 8)):
            keys = slice(key, key + 8)
            p = torch.exp(s[..., keys] - m)
            if p.sum(-1).max() > 64:  # or infinite, where a row has seen no key yet
                exact = s[..., keys].masked_fill(~seen[rows, keys], -math.inf)
                m, old = torch.maximum(m, exact.amax(-1, keepdim=True)), m
                p, old = torch.exp(exact - m), torch.exp(old - m)
                total, acc = total * old, acc * old
            total, acc = total + p.sum(-1, keepdim=True), acc + p @ v[:, :, keys]
        o[:, :, rows], lse[:, :, rows] = torch.where(total == 0, 0, acc / total), (m + total.log())[..., 0]
    return o, lse


LESSON = Lesson(
    about=About(
        teaches="forward again: softmax by an old maximum, and what that saves between a product and its exponentials",
        hours=0.5,
        operator="attention",
        language="Gluon",
    ),
    problem=PROBLEM,
    rungs=(old_maximum, three_ahead, attention),
    checks=(
        *CHECKS,
        case("scores that outgrow the first block's maximum", B=1, H=2, S=200, D=64, S_k=700, scale=4.0),
        case("so causal, by a diagonal across two blocks", B=1, H=2, S=150, D=64, S_k=250, causal=True, scale=4.0),
    ),
    benches=(*BENCHES, {"B": 32, "H": 12, "S": 1024, "D": 64, "causal": True}),  # the last is lesson 10's GPT
    cpu_model=twin,
    wrong=(
        Mutant("O keeps the old maximum", "twin", "total * old, acc * old", "total * old, acc", "twin"),
        Mutant("the sum keeps the old maximum", "twin", "total * old, acc * old", "total, acc * old", "twin"),
        Mutant("only the first block is done again", "twin", "p.sum(-1).max() > 64", "key + 8 >= S_k", "twin", "nan"),
        Mutant("done again without the mask", "twin", ".masked_fill(~seen[rows, keys], -math.inf)", "", "twin"),
    ),
    claims=dict.fromkeys((old_maximum, three_ahead), ("wgmma", "tma", "no spills")),
    dtypes=(torch.float16, torch.bfloat16),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
