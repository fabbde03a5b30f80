"""Flash decoding, second half: equal shares of all keys, parts merged together, TMA
=================================================================================
Lesson 10 divides the keys of each head. You will be able to divide the keys of all heads into equal shares instead. You
will number the parts that arise, and say how often a merge waits for memory.

Lesson 10 leaves two costs. Where heads are many, it does not split them, and programs run in waves. An H200 has room
for 396 programs at once, three an SM. So 512 programs are a full wave and one of 116 programs, in which an SM has one
program or none. Where lesson 10 does split, one program merges the parts of a head one after another.

Here all heads' blocks of keys stand in one row. The programs take equal shares of it, wherever heads end. This is
Stream-K (Osama et al. 2023, and lesson 3 of day 3). There are one or two programs per SM, all resident at once. A share
may end within a head: then its parts are merged.

    blocks      0 0 0 0 0 0 0 1 1 1 1 1 1 1 2 2 2 2 2 2 2      heads of K and V 0 to 2, 7 blocks of keys each
    programs    0 0 0 0 0 1 1 1 1 1 2 2 2 2 2 3 3 3 3 3 4      5 blocks a share
    parts       0 0 0 0 0 1 1 2 2 2 3 3 3 3 4 5 5 5 5 5 6      part = program + head: from one part to the next, one of
                                                               the two grows, or both. Numbers may stay unused

Budget, at 4.2 TB/s. One sequence of 8192 with 8 heads is 34 MB: 8 us of bytes, 15 with a launch and the first loads.
Lesson 10 adds a merge: its last program waits for L2 32 times, once a part, and 32 * 600 cycles are 11 us in which 124
SMs are idle. A second kernel is another launch and two waits, 3 us; but it can have a program for each row.

Each rung is a complete file in flash_decoding_shares/, and its new lines are marked `# New:`; `diff` two neighbours.

    shares.py    equal shares; a second kernel merges: one program per row loads all parts at once
    tma.py       one thread issues the copy of a tile. In machine code 128 keys are 361 instructions per warp, not 651.
                 But bytes decide, so a gain of some percent
    decode.py    programmatic dependent launch. The merging programs start while the first kernel runs, take the room
                 that it leaves, and wait for its end. Predicted gain: the 1 to 2 us between one kernel's end and the
                 next one's begin

Experiments (H200, one sequence of 8192, D = 128; us before -> after):

    the last program merges, 64 KB of parts at a time, 4 rows per head   28 -> 24
    the same with 32 rows per head                                       38 -> 57    it is still one SM
    decode's launch behind shares_kernel, not behind TMA                 no gain. Cause not found

Refused: more than 64 rows, which course_ops.attention takes.
Before you read on: TMA returns zeros past the cache, but not past the length of a sequence. Which of K and V has to be
masked then, and why only one of them?

Run it:    python3 course.py run lesson11_flash_decoding_shares
Check it:  python3 course.py check lesson11_flash_decoding_shares
Time it:   python3 course.py bench lesson11_flash_decoding_shares
Compare:   diff day4_replace_op/flash_decoding_shares/shares.py day4_replace_op/flash_decoding_shares/tma.py
"""

from lessonkit import About, Lesson, Mutant, Prediction, Refusal, Unsupported, case

import torch

from day4_replace_op.flash_decoding_shares.decode import decode
from day4_replace_op.flash_decoding_shares.shares import shares
from day4_replace_op.flash_decoding_shares.tma import tma
from problems.attention_decode import LAST, PROBLEM, WORK, inputs


def shares_change_nothing(rung):
    """Any shares: the same answer, up to rounding; and the same bits each time."""
    q, k, v, *_ = inputs(2, 4, 333, 16, H_kv=2, S=3, dtype=torch.float16)
    for programs in (4, 6, 12):  # of 4 heads with 3 blocks each: a head, 2 blocks, a block
        torch.testing.assert_close(shares(q, k, v, programs=programs), rung(q, k, v), rtol=2e-3, atol=2e-3)
    assert all(torch.equal(a, b) for a, b in zip(rung(q, k, v), rung(q, k, v), strict=True))


# Of the last check, each of four parts has 33 values for each of four rows, written and read.
MOVED = 1 + 2 * 4 * 4 * 33 * 4 / WORK(**LAST, dtype=torch.float16).bytes


def _at(B, S_k=8192, D=128, H_kv=8):
    return {"B": B, "H": 32, "S_k": S_k, "D": D, "H_kv": H_kv, "S": 1}


# The answer: V. A key past the end has weight 0 whatever K holds, since its score is replaced by -inf. But 0 times a
# NaN in V is NaN.
LESSON = Lesson(
    about=About(
        teaches="equal shares of all heads' keys; a row a program to merge; TMA, and NaN past a sequence's end",
        hours=1.5,
        operator="decoding",
        pictures=("split_kv",),
    ),
    problem=PROBLEM,
    rungs=(shares, tma, decode),
    predicted=(
        Prediction(
            rung=shares,
            at=_at(B=1),
            ms=0.026,  # lesson 10's row, 0.033, less 10 us of merging, and 3 more
            why="The 3 us of the second kernel do not show: this is lesson 10's time less the 10 us of merging. Equal "
            "shares may save as much.",
        ),
        Prediction(rung=shares, at=_at(B=16, H_kv=32), percent_of_limit=100),
        Prediction(rung=tma, at=_at(B=16, D=64), times=(1.01, 1.05), over=shares),
        Prediction(rung=decode, at=_at(B=1), ms=(0.024, 0.025)),
    ),
    checks=(
        case("shares of 2 blocks, heads of 3: parts of one and of two heads", B=4, H=8, S_k=257, D=24, H_kv=1),
        *PROBLEM.checks,
    ),
    wrong=(
        Mutant("nobody merges", "merge_rows_kernel", "parts > 1", "parts > 99", "shares", "nan"),
        Mutant("parts count alike", "merge_rows_kernel", "tl.exp2(lse - m_new)", "(lse > -1e30).to(tl.float32)",
               "shares"),
        Mutant("all parts but the first", "merge_rows_kernel", "tl.arange(0, AT_ONCE)", "1 + tl.arange(0, AT_ONCE)",
               "decode"),
        Mutant("a share ends a block early", "shares_kernel", "* share + share,", "* share + share - 1,",
               "shares", "nan"),
        Mutant("two parts, one number", "shares_kernel", "tl.cast(program + owner,", "tl.cast(program,",
               "shares", "nan"),
        Mutant("values past the length weigh 0", "shares_kernel", "if TMA and RAGGED", "if False", "decode", "nan"),
        Mutant("values past the length weigh 0, in tma", "shares_kernel", "if RAGGED:", "if False:", "tma", "nan"),
    ),
    refuses=(
        *PROBLEM.refuses,
        Refusal("65 rows", lambda f: f(*inputs(1, 1, 64, 16, S=65)), Unsupported, "course_ops.attention"),
    ),
    claims={shares: ("shares_kernel: mma", "shares_kernel: 16-byte loads", "no spills"),
        decode: ("shares_kernel: mma", "shares_kernel: tma", "no spills")},
    passes=dict.fromkeys((shares, tma, decode), MOVED),
    properties=(shares_change_nothing,),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
