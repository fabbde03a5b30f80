"""Flash attention on Hopper, causal: the half of a block that nobody sees
======================================================================
A tile has 128 queries, a block 128 keys. The diagonal crosses a tile's last block, and of its four quarters one is seen
by nobody: the first warpgroup's 64 queries end where the block's last 64 keys begin. Lesson 6f multiplies it, masks it,
takes exponentials of -inf, and multiplies zeros by V. A head's n = S / 128 tiles have n (n + 1) / 2 blocks, and n
quarters of one are too many:

    S              512     1024    2048    4096    16384
    too much       10%     5.6%    2.9%    1.5%    0.4%

All this holds if queries and keys end together, or differ by a multiple of 128: then no block but the last is crossed.
That is known at the launch, so the kernel is compiled for it, and the loop over masked blocks that lesson 6f has before
its fast one is not in the program at all: no registers for it, no copies from its registers to the other's.

Where tiles are short, as at S = 512, bytes begin to matter too: of 0.10 ms at 340 TFLOP/s HBM needs 0.064. A tile of
four blocks has more products than bytes, a tile of one more bytes than products; the longest of all heads first, the
shortest of all last, as lesson 6c has it, is first one and then the other. With few heads at a time both are under way
together, and one's bytes come under the other's products. At the end that costs nothing: the queue's last tiles are
short all the same.

You will learn: to find work that a mask throws away, a product of half a tile, what a kernel may know when compiled.
Needs a Hopper GPU to run; without one the rungs are compiled.
Run it:    python day4_replace_op/lesson06g_flash_hopper_diagonal.py
Check it:  python -m lessonkit check lesson06g_flash_hopper_diagonal
Time it:   python -m lessonkit bench lesson06g_flash_hopper_diagonal
"""

from lessonkit import About, Lesson, Mutant, Unsupported, case, needs, num_sms

import torch
import triton
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
    KEYS,
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
from problems.attention import PROBLEM, expect_heads

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


# The first warpgroup's first block: scores, P and O's product with 64 of its 128 keys. Its P is of another size than
# those that follow, so the first of them is asked for here, and not by the loop.
@gluon.jit
def half_first(
    q, o, m, total, smem, bars, turn, begin, end, row, key, sizes, scale_log2, LAYOUT: gl.constexpr,
    WHICH: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    if WHICH == 0:
        ROWS: gl.constexpr = q.shape[0]
        KEYS: gl.constexpr = smem[1].shape[3] // 2
        HALF: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
        none = parts(gl.zeros((ROWS, KEYS), gl.float32, HALF))
        low = gl.convert_layout(m, gl.SliceLayout(1, HALF))
        p, o, high, some = first(q, o, low, none, smem, bars, turn, row, key, sizes, scale_log2, HALF, CAUSAL)
        m, total = gl.convert_layout(high, m.type.layout), gl.convert_layout(some, total.type.layout)
        if end > 1:
            whole, o, m, total = follow(q, p, o, m, total, smem, bars, turn + 1, scale_log2, LAYOUT, WHICH)
            o, m, total = go_on(q, whole, o, m, total, smem, bars, turn, 1, end, scale_log2, LAYOUT, WHICH)
        else:
            o = finish(p, o, smem, bars, turn, WHICH)
    else:
        o, m, total = step_ahead(
            q, o, m, total, smem, bars, turn, begin, end, row, key, sizes, scale_log2, LAYOUT, WHICH, CAUSAL
        )
    return o, m, total


def _crossed_once(q, k, causal):
    """Whether the diagonal crosses no block of keys but a tile's last one."""
    return causal and q.ndim == k.ndim == 4 and (k.shape[2] - q.shape[2]) % KEYS == 0


def _launch(q, k, v, causal, window, scale, **options):
    expect_heads(q, k, v, causal, window, scale)
    if not _crossed_once(q, k, causal):
        raise Unsupported(f"for causal attention whose queries and keys differ by a multiple of {KEYS}")
    return launch(maximum_kernel, q, k, v, causal, window, scale, QUEUE=True, DEPTH=4, ALIGNED=True, **options)


# Rung 9. New: no loop over masked blocks, for there is one, with which the fast loop begins anyway. Predicted: nothing
# at D = 128, where its registers sufficed; at D = 64, whose fast loop had 24 copies of registers, 1%. Measured: 5 to 8%
# at D = 64, 4% at S = 512. What is left out is a part of the program, copies, and what begins and ends a loop that runs
# no times, once for each of many short tiles; which of these is how much has not been found out.
@needs(90, "TMA and wgmma", only=True)
def one_masked(q, k, v, causal=False, window=None, scale=None):
    """As lesson 6f's old_maximum, causal, S_k - S_q a multiple of 128."""
    return _launch(q, k, v, causal, window, scale)


# Rung 10. New: the first warpgroup's half of that block. Predicted: the table above, if the two warpgroups share the
# tensor cores' time; the first now waits for the second, by no more than the ring's depth. Measured: 5% at 512, 4% at
# 2048, 2% at 4096. A tile begins with this block, and nothing of its warpgroup runs under it, so that not only work is
# saved but the time of half a chain; at 512, where tiles are one to four blocks, the other's whole block hides a part.
@needs(90, "TMA and wgmma", only=True)
def half_a_block(q, k, v, causal=False, window=None, scale=None):
    """As one_masked."""
    return _launch(q, k, v, causal, window, scale, STEPS=half_first)


# Rung 11. New: few heads at a time: 8, or fewer if their tiles are more than SMs. Predicted: at S = 512 the 0.01 ms by
# which half_a_block is above its products' 0.09; nothing from S = 4096 on, where most tiles are long. Measured
# at D = 128: 7% at 512, 4% from 2048 on, also at 16384, where it is one head for lesson 4's three. Their K and V are 24
# MB, and L2's 60 MB are two halves: perhaps what SMs of both read lies in it twice. At D = 64 next to nothing.
@needs(90, "TMA and wgmma", only=True)
def attention(q, k, v, causal=False, window=None, scale=None):
    """Lesson 4's attention by the fastest kernel that takes it: this lesson's, 6f's, or what course_ops has."""
    try:
        # At D = 64 and S = 16384 three warpgroups gain more than their tiles of 192 rows compute too much.
        if _crossed_once(q, k, causal) and (q.shape[3] > 64 or k.shape[2] <= 4096):
            few = min(8, num_sms() // max(1, triton.cdiv(q.shape[2], 128)))
            return _launch(q, k, v, causal, window, scale, STEPS=half_first, AT_ONCE=few)
    except Unsupported:
        pass
    wide = q.shape[-1] <= 64 and not (causal and k.ndim == 4 and k.shape[2] < 2048)  # as in lesson 6f
    try:
        more = {"WGS": 3} if wide else {}
        return launch(maximum_kernel, q, k, v, causal, window, scale, QUEUE=True, DEPTH=4, **more)
    except Unsupported:
        return attention_forward(q, k, v, causal=causal, window=window, scale=scale)


LESSON = Lesson(
    about=About(
        teaches="causal: half a block that nobody sees; what a kernel may know when compiled; few heads at a time",
        hours=0.5,
        operator="attention",
        language="Gluon",
    ),
    problem=PROBLEM,
    rungs=(one_masked, half_a_block, attention),
    checks=(
        *CHECKS,
        case("scores that outgrow the first block's maximum", B=1, H=2, S=200, D=64, S_k=700, scale=4.0),
        case("so causal, by a diagonal across two blocks", B=1, H=2, S=150, D=64, S_k=250, causal=True, scale=4.0),
        case("a diagonal through the corners of blocks, several tiles", B=2, H=3, S=600, D=128, causal=True),
        case("so with more keys than queries", B=1, H=4, S=200, D=64, S_k=456, H_kv=2, causal=True),
        case("so with no queries", B=1, H=2, S=0, D=64, S_k=128, causal=True),
        case("so with queries that see nothing", B=1, H=2, S=300, D=64, S_k=172, causal=True),
    ),
    benches=(
        *(shape for shape in BENCHES if shape["causal"]),
        {"B": 32, "H": 12, "S": 1024, "D": 64, "causal": True},  # lesson 10's GPT
    ),
    wrong=(
        Mutant("the other warpgroup's half", "half_first", "WHICH == 0", "WHICH == 1", "half_a_block"),
        Mutant("the half is not in the sum", "half_first", "gl.convert_layout(some, total.type.layout)", "total",
               "half_a_block"),
        Mutant("whatever the diagonal crosses", "_crossed_once", "(k.shape[2] - q.shape[2]) % KEYS == 0", "True",
               "half_a_block"),
    ),
    claims=dict.fromkeys((one_masked, half_a_block), ("wgmma", "tma", "no spills")),
    dtypes=(torch.float16, torch.bfloat16),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
