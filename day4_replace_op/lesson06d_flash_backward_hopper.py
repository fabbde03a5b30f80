"""Flash attention, backward on Hopper: five products, and who adds to dQ
======================================================================
Lesson 5 multiplies seven times for five: S and dP are computed by the owners of queries and again by those of keys. At
the 650 TFLOP/s that its kernels might reach at best this is 5/7 of 650, 464 counted. Five products need one owner, of
keys, with whom dK and dV stay, and a dQ to which all owners of keys add. Per step of 64 queries and a tile of 128 keys
at D = 128 (128 queries at D = 64: the same numbers, but twice the exponentials), cycles of an SM:

    products       5 * 2 * 64 * 128 * 128 FLOPs, 4096 a cycle          2560    D = 64: 2560
    exponentials   64 * 128, 16 a cycle                                 512            1024
    the rest       4 instructions a score, 128 lanes                    256             512
    shared memory  products read 256 KB, 48 are written, 128 a cycle   2432            2304
    dQ             64 * 128 numbers of fp32 to L2, 32 KB               13 bytes a cycle, of about 39

dQ is added up in fp32 in memory, by red.global.add of 4 numbers a thread: its buffer lies in the order in which a
warpgroup's registers have it, so that a warp's 32 x 16 bytes are contiguous. Nobody waits for an addition, but their
order is another one each time: dQ is not the same to the bit. Whoever needs that calls lesson 5's, which is.

    1 warp                 asks TMA for K, V, Q, dO, stores dK and dV     24 registers a thread
    2 warpgroups (4 + 4)   64 keys each: P^T, dS^T, dV, dK, half of dQ   240: dK and dV 128, S^T and dP^T 64, P^T 16

You will learn: sums with many owners, a sum's start as a place for what is added anyway, products under everything.
Sources: Shah et al. 2024, FlashAttention-3, section 3 and its backward in hopper/; Dao 2023, algorithm 2.
Needs a Hopper GPU to run; without one the rungs are compiled, and a slow twin of all barriers runs, in any order.
Run it:    python day4_replace_op/lesson06d_flash_backward_hopper.py
Check it:  python -m lessonkit check lesson06d_flash_backward_hopper
Time it:   python -m lessonkit bench lesson06d_flash_backward_hopper
"""

from lessonkit import About, Lesson, Mutant, Unsupported, needs

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from course_ops import attention_backward
from course_ops.hopper import allocate_barriers as barriers
from course_ops.hopper import allocate_stages as stages
from course_ops.hopper import exp2
from course_ops.hopper import ring_slot as slot
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
from problems.attention import PROBLEM_BACKWARD, inputs_backward


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


# Rung 1. Five products and three trades, each thing after the other; the two warpgroups meet once a step. Predicted:
# 2560 cycles of products and, as warpgroups are not in step between their meetings, half of the 770 for the rest, with
# the waits for products' ends: 3200 cycles a step at D = 128, four fifths of the 790 TFLOP/s that tensor cores hold.
@needs(90, "TMA and wgmma", only=True)
def five_products(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """As lesson 5's attention_backward, for fp16 and bf16, D at most 128, no window; dq not the same to the bit."""
    return launch(backward_kernel, grad_out, q, k, v, out, lse, causal, window, scale, AHEAD=False)


# Rung 2. New: products in flight under all that is none. Predicted: 2800 cycles a step; what remains are the meeting,
# the barriers, and shared memory, which is busy for as long as the tensor cores are.
@needs(90, "TMA and wgmma", only=True)
def ahead(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """As five_products; what this is not for (fp32, windows, D past 128, strides that TMA refuses) takes lesson 5's."""
    try:
        return launch(backward_kernel, grad_out, q, k, v, out, lse, causal, window, scale, AHEAD=True)
    except Unsupported:
        return attention_backward(grad_out, q, k, v, out, lse, causal=causal, window=window, scale=scale)


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


LESSON = Lesson(
    about=About(
        teaches="the backward in Gluon, five products instead of seven, dQ added up in memory by all owners of keys",
        hours=1.5,
        operator="attention backward",
        language="Gluon",
    ),
    problem=PROBLEM_BACKWARD,
    rungs=(five_products, ahead),
    checks=CHECKS,
    benches=BENCHES[::2],
    wrong=(
        Mutant("the diagonal is not masked", "probabilities", "keys <= rows + (", "keys <= rows + 64 + (", "ahead"),
        Mutant("P where dS belongs", "walk", "ds = (p * dp)", "ds = (p)", "five_products"),
        Mutant("no scale", "multiply_partition", "dk * (scale_log2 * LN2)", "dk", "ahead"),
        Mutant("one head for its group", "multiply_partition", "in range(GROUP)", "in range(1)", "ahead"),
        Mutant("both have the upper keys", "multiply_partition", "key += WHICH * KEYS", "key += 0", "ahead"),
        Mutant("delta left out", "walk", "ask_scores(v, do, delta_smem.index(stage)",
               "ask_scores(v, do, start_smem.index(stage)", "five_products"),
    ),
    claims={
        five_products: ("backward_kernel: wgmma", "backward_kernel: tma", "backward_kernel: 16-byte stores"),
        ahead: tuple(f"backward_kernel: {c}" for c in ("wgmma", "tma", "no spills", "16-byte stores")),
    },
    properties=(keys_are_the_same_each_time, one_query_one_key),
    dtypes=(torch.float16, torch.bfloat16),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
