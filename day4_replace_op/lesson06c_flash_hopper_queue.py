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

from lessonkit import Lesson, Mutant, Unsupported, needs
from lessonkit.judge.simulate import Barrier, ask_for, in_any_order

import torch
import torch.nn.functional as F

from course_ops import attention_forward
from course_ops.hopper import ring_slot as slot
from day4_replace_op.hopper import BENCHES, CHECKS, launch, place
from day4_replace_op.lesson06_flash_hopper import flash_kernel
from problems.attention import PROBLEM, expect_heads


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
