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

from lessonkit import Lesson, Mutant, Unsupported, case, needs, num_sms

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from day4_replace_op import lesson06f_flash_hopper_maximum as lesson06f
from day4_replace_op.hopper import KEYS, launch
from day4_replace_op.lesson06_flash_hopper import parts
from day4_replace_op.lesson06f_flash_hopper_maximum import finish, first, follow, go_on, maximum_kernel, step_ahead
from problems.attention import PROBLEM, expect_heads


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
    """Lesson 4's attention by the fastest kernel that takes it: this lesson's, 6f's, 4's."""
    try:
        # At D = 64 and S = 16384 three warpgroups gain more than their tiles of 192 rows compute too much.
        if _crossed_once(q, k, causal) and (q.shape[3] > 64 or k.shape[2] <= 4096):
            few = min(8, num_sms() // max(1, triton.cdiv(q.shape[2], 128)))
            return _launch(q, k, v, causal, window, scale, STEPS=half_first, AT_ONCE=few)
    except Unsupported:
        pass
    return lesson06f.attention(q, k, v, causal, window, scale)


LESSON = Lesson(
    problem=PROBLEM,
    rungs=(one_masked, half_a_block, attention),
    checks=(
        *lesson06f.LESSON.checks,
        case("a diagonal through the corners of blocks, several tiles", B=2, H=3, S=600, D=128, causal=True),
        case("so with more keys than queries", B=1, H=4, S=200, D=64, S_k=456, H_kv=2, causal=True),
        case("so with no queries", B=1, H=2, S=0, D=64, S_k=128, causal=True),
        case("so with queries that see nothing", B=1, H=2, S=300, D=64, S_k=172, causal=True),
    ),
    benches=tuple(shape for shape in lesson06f.LESSON.benches if shape["causal"]),
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
