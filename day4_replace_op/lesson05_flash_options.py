"""Flash attention for models: causal, windows, grouped heads, any length, width and stride
=======================================================================================
What a model asks of attention beside softmax(Q K^T) V. You will be able to replace a mask by the bounds of a loop, to
say what a row without keys answers, and to order programs of unequal length. You need lesson 4.

    causal              query i of S_q sees keys j <= i + S_k - S_q. This is aligned at the lower right corner: the last
                        query sees all keys, as with a cache of keys. flash-attn since 2.1 does so too. PyTorch's
                        is_causal aligns at the upper left, which is the same only if S_q = S_k. Half of the FLOPs.
    window              at most the last `window` keys up to one's own position: S * window scores instead of S^2 / 2
    grouped heads       H query heads share H_kv heads of K and V (GQA; MQA if H_kv = 1): fewer bytes of K and V
    any S_q, S_k, D     tails masked; D up to 256, padded to a power of two on the chip, never in memory
    any strides         as a projection leaves it, [B, S, H, D] seen through transpose(1, 2), without a copy
    lse                 natural logarithm, [B, H, S_q] in fp32: what the backward (6), split keys (10), rings (12) need

A query that sees no key (S_q > S_k, causal) gets zeros and lse = -inf, not NaN: an empty sum is 0.

A mask costs instructions, so only the blocks that need one should have one. A head with 4 blocks of queries and 6 of
keys:

    x computed    m computed and masked    . left out

                       causal           causal, a window of 3 blocks
            keys       0 1 2 3 4 5      0 1 2 3 4 5
    queries 0          x x m . . .      x x m . . .
            1          x x x m . .      m x x m . .
            2          x x x x m .      . m x x m .
            3          x x x x x m      . . m x x m      begin: block 2, first: 3, last: 5, end: 6

Budget, for S = 4096, D = 128, causal, tiles of 128 x 128. A row of tiles has 32 blocks of keys. A program that visits
all of them masks 32. A program that skips the blocks wholly in the future visits 16.5 on average and masks one. Lesson
4 counts the cycles of a block: 2048 of matmuls and 1856 of other instructions, 1600 without the two instructions of a
mask. So with nothing overlapped a kernel that masks every block runs at 790 * 2048 / 3904 = 414 TFLOP/s. Half of these
FLOPs are for masked scores and do not count, which leaves 207 TFLOP/s.

Lesson 4 chooses its tile by timing. Here it is fixed: 128 x 128 in three stages, which at D = 128 fill shared memory (Q
32 KB, K and V 3 * 64 KB). With two stages the loads of a block have to wait until the block two before it has been
used. Lesson 4's `tma` has two stages, and its `flash_v2` chooses three at this shape, so their rows show what the third
is worth. Day 5's lesson 8 sweeps it. Compare this lesson with `flash_v2`, not with `tma`.

The tile does not explain all. With all keys `attention` has 502 TFLOP/s at B=4 H=16 S=4096, and `flash_v2` 595. Day 5's
lesson 8 times lesson 4's kernel with this lesson's tile there, and it is as fast as `flash_v2`. So 16% are the price of
what this lesson adds: three loops in place of one, and strides and lengths that the kernel learns when it runs. Which
of these costs how much was not measured. Lesson 8 begins again from `flash_v2`, with the plain case.

Each rung is a complete file in flash_options/, and its new lines are marked `# New:`; `diff` two neighbours.

    masked.py           every block is visited and masked. Causal attention costs as much as full attention.
    skipped.py          the bounds of the loop come from the tile's first and last query: 16.5 of 32 blocks, and with a
                        window of 1024 keys 9 at most
    edges.py            the loop in three: the window's edge, the blocks without a mask, the diagonal with the tail
    longest_first.py    programs start in the order of their number, so the longest tiles get the first numbers. In
                        rung 3 the last program has the longest tile, and starts when the others are nearly done. At
                        S = 16384 and 16 heads this tile has 128 blocks, and each SM has 16 * 8256 / 132 = 1000 in
                        all: 12% more time. With the longest first, the last tile has one block. K and V of all heads
                        would not fit into L2, so the order holds within as many heads as fit.
    attention.py        TMA where the strides allow it, as in lesson 4: 3648 cycles per block with all keys, 443 TFLOP/s

Before you read on: with S_q = 3 and S_k = 10, which keys does query 0 see, here and with PyTorch's is_causal? What is
the softmax of an empty row, and why does the answer matter to a ring of GPUs?

New words (GLOSSARY.md): GQA.
Run it:    python3 course.py run lesson05_flash_options
Check it:  python3 course.py check lesson05_flash_options
Time it:   python3 course.py bench lesson05_flash_options
Compare:   diff day4_replace_op/flash_options/skipped.py day4_replace_op/flash_options/edges.py
"""

import math
from unittest import mock

from lessonkit import DEVICE, About, Lesson, Mutant, Prediction, Unsupported, device
from lessonkit.modes.interpreter import watched

import torch

from day4_replace_op.flash_options.attention import attention, tile
from day4_replace_op.flash_options.edges import edges
from day4_replace_op.flash_options.longest_first import longest_first
from day4_replace_op.flash_options.masked import masked
from day4_replace_op.flash_options.skipped import skipped
from problems.attention import PROBLEM, inputs, visible


def only_seen_blocks_cost(rung):
    """FLOPs and bytes read are those of the blocks in which a query sees a key, counted from the mask."""
    if not device.INTERPRETED:
        raise Unsupported("FLOPs and bytes are counted in the interpreter")
    for S, S_k, causal, window in ((256, 512, False, None), (300, 600, True, None), (520, 520, True, 100)):
        args = inputs(1, 1, S, 16, S_k=S_k, causal=causal, window=window, dtype=torch.float16)
        block_m, block_n, *_ = tile(args[0])
        mask = visible(S, S_k, causal, window, DEVICE)
        blocks = [b.any() for rows in mask.split(block_m) for b in rows.split(block_n, dim=1)]
        visited = len(blocks) if rung is masked else int(sum(blocks))
        flops, read = _counted(lambda args=args: rung(*args))
        assert flops == 4 * visited * block_m * block_n * 16
        assert read <= (S + 2 * visited * block_n) * 16 * 2  # a tail is read only as far as it goes


def _counted(call):
    """(FLOPs of the matmuls, bytes read) of a call, in the interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder

    native, flops = InterpreterBuilder.create_dot, 0

    def create_dot(self, a, b, *rest):
        nonlocal flops
        flops += 2 * math.prod(a.data.shape) * b.data.shape[1]
        return native(self, a, b, *rest)

    with mock.patch.object(InterpreterBuilder, "create_dot", create_dot), watched() as traffic:
        call()
    return flops, traffic.read


# fmt: off
WRONG = (
    Mutant("aligned at the upper left", "attention_kernel", "offset = S_k - S_q", "offset = 0 * S_k", "attention"),
    Mutant("the window's first block left out", "bounds", "row + offset - window + 1", "row + offset", "edges"),
    Mutant("the window's edge is not masked", "bounds", "row + BLOCK_M + offset - window",
           "row + offset - window", "edges"),
    Mutant("the diagonal is not masked", "bounds", "row + offset + 1", "row + BLOCK_M + offset", "edges"),
    Mutant("a block too few", "bounds", "row + BLOCK_M, S_q) + offset", "row + BLOCK_M, S_q) + offset - 1",
           "skipped"),
    Mutant("a maximum that begins at -inf", "attention_kernel", "LOWEST, tl", '-float("inf"), tl', "masked", "nan"),
    Mutant("heads dealt out in turn", "attention_kernel", "h // GROUP", "h % (H // GROUP)", "attention"),
    Mutant("the last group as large as the others", "attention_kernel", "tl.minimum(HEADS, B * H - group * HEADS)",
           "HEADS", "longest_first", "out of bounds"),
    Mutant("a key past the last one is seen", "visible", "keys < S_k", "keys <= S_k", "masked"),
)
# fmt: on

CAUSAL, LONG = ({"B": 16384 // S, "H": 16, "S": S, "D": 128, "H_kv": None, "causal": True, "window": None}
                for S in (4096, 16384))  # fmt: skip

# The answers: query 0 sees keys 0 to 7 here, since j <= 0 + 10 - 3, and key 0 alone with is_causal. An empty row
# gives zeros and lse = -inf. A GPU of a ring whose keys a query does not see then has weight exp(-inf) = 0 in the
# merge, where NaN would spoil the sum.
LESSON = Lesson(
    about=About(
        teaches="causal, windows, grouped heads, D to 256, any length and stride, lse; blocks skipped, edges "
        "masked, order",
        hours=1.75,
        star=True,
        operator="attention",
        pictures=("causal_blocks", "traffic"),
    ),
    problem=PROBLEM,
    rungs=(masked, skipped, edges, longest_first, attention),
    predicted=(
        Prediction(
            rung=masked,
            at=CAUSAL,
            tflop_per_s=207,
            why="A causal mask costs more than two instructions a score: as many blocks with all keys, where only the "
            "tail is tested, take 1.43 ms, and causal 1.75 ms.",
        ),
        Prediction(rung=skipped, at=CAUSAL, times=1.94, over=masked),
        Prediction(
            rung=edges,
            at=CAUSAL,
            times=1.07,
            over=skipped,
            why="As for `masked`: the mask that is left out costs 0.32 of 1.75 ms there, 18%, not 7%.",
        ),
        Prediction(rung=longest_first, at=LONG, times=1.12, over=edges, why="The cause is not known."),
        Prediction(rung=attention, at={**CAUSAL, "causal": False}, tflop_per_s=443),
    ),
    wrong=WRONG,
    claims={masked: ("wgmma",), edges: ("wgmma", "cp.async"), attention: ("wgmma", "tma")},
    # Four parts: Q and O, and K and V 3 times, or 6 of 9 blocks of them; lse is 1/33 of it all.
    passes={masked: (2 + 6 + 0.125) / 4.125, edges: (2 + 4 + 0.125) / 4.125, attention: (2 + 4 + 0.125) / 4.125},
    properties=(only_seen_blocks_cost, *PROBLEM.properties),
)

if __name__ == "__main__":
    LESSON.main()
