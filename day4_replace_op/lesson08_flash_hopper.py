"""Flash attention on Hopper: from warp specialization to lazy rescaling
=====================================================================
You know the loop: for each block of keys S = Q K^T, online softmax, O += P V. On Hopper it runs at the speed of a plain
matmul if the tensor cores never wait. Lessons 4 and 5 leave the schedule to Triton's compiler. Here it is written out
in Gluon, after FlashAttention-3 (Shah et al. 2024, sections 3.1 and 3.2) and FlashAttention-4 (Zadouri et al. 2026).

Two predictions of this lesson failed on an H200. Ping-pong brings nothing at any shape. At D = 64 the overlap within a
consumer brings nothing either. What is known of the reasons follows the predictions.

New words (GLOSSARY.md): ping-pong.
You will be able to: keep wgmma busy under a softmax. Say which unit bounds a rung, and by how much. Find a missing
arrival or a wrong parity by its symptom.
You need: day 3, lesson 9 (TMA, mbarriers with phase and parity, wgmma, a ring with a producer warp); lesson 4 here.
A Hopper GPU runs the rungs. Without one they are compiled, their machine code is read, and a CPU model of the last
rung's barriers runs, in any order of its warps.
Run it:    python3 course.py run lesson08_flash_hopper
Check it:  python3 course.py check lesson08_flash_hopper
Time it:   python3 course.py bench lesson08_flash_hopper
Compare:   diff day4_replace_op/flash_hopper/warp_specialized.py day4_replace_op/flash_hopper/overlap_softmax.py

The budget
----------
One SM, a tile of 128 queries x a block of 128 keys, bf16, in cycles:

    unit           work                                              D = 128   D = 64
    tensor cores   two matmuls, 4 * 128 * 128 * D FLOPs, 4096 a cycle   2048     1024
    MUFU (exp2)    128 * 128, 16 a cycle                                1024     1024
    ALU            4.5 and 4 other instructions per score, 128 lanes     576      512
    L2             K and V of the block, 512 * D bytes, 39 a cycle      1680      840

The MUFU is the unit for special functions. The ALU's instructions are lesson 4's: a difference, a maximum, a sum and
half a conversion per score. The rescaling of O adds one at D = 128, and half of one at D = 64, where O is half as
large. Without L2, the first three take 3650 and 2560 cycles one after the other. Fully overlapped, they take 2048 and
1024. At D = 128 the tensor cores are the limit; at D = 64 the tensor cores and the MUFU are equally busy.

A tile has two ends, in which none of its matmuls runs: the first loads, and the way of O to memory. We count 3000
cycles for both together, beside 2048 for each of its S / 128 blocks.

HBM moves Q, K, V and O once. The shapes that are timed have 16,384 tokens and 16 heads of 128: these are 268 MB, or
0.064 ms. Their matmuls take 0.70 ms at S = 4096 and 0.087 ms at S = 512.

On an H200 cuBLAS holds about 790 TFLOP/s. So TFLOP/s = 790 * 2048 / cycles at D = 128, and 790 * 1024 / cycles at
D = 64. A kernel that uses less power may run at a higher clock, and exceed 790.

Who does what, and where the data lies
--------------------------------------
    CTA = 1 producer warp                     2 consumer warpgroups (4 warps each)
          only issues TMA loads               64 queries each: QK, softmax, PV, epilogue
          40 registers per thread             232 registers per thread: S 64, P 32, O 64, the rest addresses

    shared memory, D = 128 (192 of 227 KB)        a ring: stages with a `full` and an `empty` mbarrier each
      Q0 Q1    2 x 64 x 128      32 KB
      K ring   2 x 128 x 128     64 KB        producer: wait empty -> TMA -> (bytes arrive) full
      V ring   2 x 128 x 128     64 KB        consumer: wait full -> wgmma reads it -> arrive on empty
      O0 O1    epilogue buffers  32 KB

K and V have separate rings: QK can start before V has arrived, and K is free one softmax earlier than V. (From
lazy_rescaling on K stays until the sums are tested, since a second QK may need it.) `empty` counts one arrival per
consumer. P never touches shared memory. The accumulator of QK lies in the registers in which PV wants its left operand,
so P is packed to 16 bits and used in place.

The timeline of a CTA
---------------------
Q = Q K^T, P = P V, small letters: consumer 1, s = softmax, . = idle. A character is 128 cycles at D = 128. No role
waits for a barrier or for bytes here.

    warp_specialized   producer       K V K V ...         a K and a V a block, as soon as a stage is empty
                       tensor cores   QQQQqqqq..PPPPppppQQQQqqqq..PPPPpppp      idle when both are in their softmax
                       softmax 0      ....ssssss............ssssss........
                       softmax 1      ........ssssss............ssssss....
    overlap_softmax,   producer       K K V K V K V ...   K a block ahead of V
    consumer 0 alone   tensor cores   QQQQPPPP..QQQQPPPP..QQQQPPPP..            QK(j + 1) is issued before PV(j),
                       softmax 0      ....ssssss....ssssss....ssssss            and softmax(j + 1) runs under PV(j)
    both, in turns     tensor cores   QQQQPPPPqqqqppppQQQQPPPPqqqqpppp          the other consumer's matmuls fill the
                       softmax 0      ....ssssss..........ssssss......          idle time; ping_pong has barriers for it
                       softmax 1      ss..........ssssss..........ssss

The cycles of a block, for both consumers. "Drawn" is what the timeline shows. "Predicted" adds the waits that the last
column names, and counts one instruction per score more than the budget does:

    file               drawn   predicted   why more
    warp_specialized   2340    2900        one after the other it is 3800; about half of the softmax overlaps by chance
    overlap_softmax    2048    2400        a consumer's PV covers 512 cycles of its softmax, which takes 800; no barrier
                                           keeps the other consumer's matmuls in the remaining 300
    ping_pong          2048    2100        a wait for the other consumer in each block. This failed: see below

The rungs
---------
Each rung is a complete file in flash_hopper/ and differs from the one before by one idea, marked `# New:`. All rungs
start causal tiles in lesson 5's order: the longest first, and a few heads at a time. Predicted at S = 4096, all keys,
in TFLOP/s:

    file                      new                                                    D = 128   D = 64
    warp_specialized.py       a producer warp, two consumers; about half of the         558      404
                              softmax overlaps by chance: 2900 and 2000 cycles
    overlap_softmax.py        QK of the next block before PV: 2400 and 1700             674      476
    lazy_rescaling.py         the row maximum off the critical path: 235 cycles less    750      550
    persistent_scheduler.py   persistent CTAs, a dynamic tile scheduler: the 3000       780      590
                              cycles of a tile's ends, 4% and 6%; causal 8%
    causal_diagonal.py        causal: half of the diagonal block, 1.5%                   no change

    side branches
    three_consumers.py        of persistent_scheduler.py, D = 64: the third consumer      -      620
                              exponentiates while two wait for matmuls: 1300 cycles
    ping_pong.py              of overlap_softmax.py: two barriers make the consumers    770      476
                              issue in turns, 2100 cycles

Predicted and measured
----------------------
Where the ladder begins: at this shape lesson 4's autotuned `flash_v2` has 595 TFLOP/s and `warp_specialized` 614, so
warp specialization alone is worth 3%. Lesson 4's `tma`, whose tile is not tuned, has 478 TFLOP/s. Compared with that
one, the same rung would seem to be worth 28%. So compare with the best kernel.

Rungs of this lesson (H200, bf16, S = 4096; TFLOP/s before -> after, predicted in brackets; all rows: the report):

    QK before PV, D = 128, all keys       614 -> 685 (674)
    QK before PV, D = 64, all keys        451 -> 443 (476)   no gain
    ping-pong, D = 128, all keys          685 -> 681 (770)   no gain
    lazy rescaling, D = 128, all keys     685 -> 756 (750)   faster than FlashAttention-4, 716 in the same rounds
    persistent CTAs, S = 512, all keys    407 -> 505 (547)   without them a tile takes 15,900 cycles, where 11,700 were
                                                             counted. So its ends, 3000, are a fifth, not a quarter
    persistent CTAs, causal               677 -> 712 (731)   the gain is largest where tiles are short
    half of the diagonal block, causal    712 -> 735 (723)   a tile begins with it, and nothing runs under it
    the same kernel, all keys             779 -> 789 (780)   only the mask is new, once a tile; but S = 16384 gains 1%,
                                                             too: 815 -> 823. Cause not found

Why ping-pong gains nothing
---------------------------
The rung ping_pong has 0.99 to 1.02 times the rate of overlap_softmax at all 15 shapes. The prediction assumed that the
two consumers' order costs 300 cycles of each block. Two things speak against that:

1. There is less to gain. By its rate overlap_softmax takes 2360 cycles per block. The 3000 of a tile's ends are 90 of
   these at S = 4096. At S = 16384 they are 20 of 2240. So about 200 cycles are lost in a block, not 350.
2. The consumers seem to alternate without barriers, too. This is inferred: no clock was read in the kernel. If the
   tensor cores serve matmuls in the order of issue, the consumer that issues second waits for the first one's QK and
   PV, 1024 cycles. From then on it is that much behind, and each softmax runs under the other consumer's matmuls. The
   page's timelines are computed by this rule: a block takes 2048 cycles with ping-pong's barriers, and as many without.

Lazy rescaling does gain, since it removes instructions: 220 cycles per block, where 235 were predicted. So what a
consumer does from one QK to the next counts here, and the order in which the two issue does not. FlashAttention-3
reports a gain of ping-pong, from 570 to 620-640 TFLOP/s (section 3.1: fp16, D = 128, S = 8192). There it comes before
the overlap within a consumer (section 3.2), and here after it.

At D = 64 overlap_softmax gains nothing over warp_specialized, and loses 3% at S = 16384. By the machine code its
exponentials do run under PV. In part the prediction began too low: warp_specialized is 12% faster than predicted, so
more of its softmax overlaps by chance. The cause of the rest is not found.

A wait that ptxas moves
-----------------------
The assembler ptxas makes machine code of PTX, and may change the order of instructions. No exponential depends on PV.
So ptxas may move the wait for PV above the exponentials. Without a store between them it does (Triton 3.6 and 3.7): the
PTX has the exponentials first, and in the machine code all 66 come after the wait. So overlap_softmax and ping_pong
store their row sums, which no thread reads. lazy_rescaling stores its sums anyway. `tests/test_flash_hopper.py` counts
the exponentials under PV.

Experiments
-----------
Other versions of these kernels. Their rounds differ, so compare only within a line:

    no store, D = 128: QK before PV       610 -> 697 (674)   all keys; the exponentials stand after the wait for PV. So
                                                             the rung's gain is that of QK and PV issued together
    the same, D = 64                      451 -> 417 (476)   all keys
    no store, D = 128: ping-pong          697 -> 699 (770)   all keys; S = 16384: 697 -> 679
    persistent, tiles dealt in advance    677 -> 594 (+1%)   causal, S = 16384: short tiles wait for the long ones
    4 heads at once, not what L2 holds    722 -> 752 (722)   causal; their 128 tiles, long and short, fill the SMs
    raise m, no second QK, D = 128        459 -> 748 (755)   all keys, falling scores; cuDNN in the same rounds: 682
    the same, D = 64                      303 -> 511 (550)   falling scores; cuDNN: 476

The price of lazy rescaling
---------------------------
The loop visits the last block of keys first. So if scores fall along the keys, each block that the loop meets has a
larger maximum. The other order is no cure: then scores that rise along the keys are the bad case. A consumer that meets
such a block has a choice:

    compute the block again    a QK, a row maximum and 128 * 128 exponentials, and nothing runs under them
    raise m                    no matmul. About 190 instructions per warp at D = 128: 64 multiplications of P, 64 of O,
                               32 conversions, and the new m. With their waits 300 cycles

In reports/nvidia-h200/operators.csv the data named "falling" have weights that grow by 2^23 per block. One raise lasts
for a growth of 2^61 in bf16 (lazy_rescaling.py). So every third block raises m, which is 100 cycles per block on
average. Predicted for bf16: 5% fewer TFLOP/s than for random data. By the rows it is 0% to 4% fewer at D = 128, and 9%
to 12% at D = 64, where a block takes half as many cycles.

Experiments of your own: ping-pong's two barriers in warp_specialized.py, without the overlap within a consumer. In
lazy_rescaling.py a second QK for each large sum (HUGE_SUM = LARGE_SUM); a HEADROOM of 0 in bf16, too; STAGES = 3 at
D = 64; [232, 40] -> [224, 56] registers of consumers and producer.

Refused, since course_ops.attention takes it: other head sizes, grouped heads, windows, a diagonal across two blocks.
Before you read on: which rungs should gain more at D = 64 than at D = 128, by the two columns of the budget? Why does
overlap_softmax.py load K a block ahead of V?
"""

from lessonkit import About, Lesson, Prediction, Refusal, Unsupported, case

import torch

from day4_replace_op.flash_hopper.causal_diagonal import causal_diagonal
from day4_replace_op.flash_hopper.cpu_model import cpu_model
from day4_replace_op.flash_hopper.lazy_rescaling import lazy_rescaling
from day4_replace_op.flash_hopper.mutants import OF_THE_KERNELS, OF_THE_MODEL
from day4_replace_op.flash_hopper.overlap_softmax import overlap_softmax
from day4_replace_op.flash_hopper.persistent_scheduler import persistent_scheduler
from day4_replace_op.flash_hopper.ping_pong import ping_pong
from day4_replace_op.flash_hopper.three_consumers import three_consumers
from day4_replace_op.flash_hopper.warp_specialized import warp_specialized
from problems.attention import PROBLEM, inputs

RUNGS = (
    warp_specialized,
    overlap_softmax,
    ping_pong,
    lazy_rescaling,
    persistent_scheduler,
    three_consumers,
    causal_diagonal,
)


def masked_keys_do_not_matter(rung):
    """Causal: other keys from 200 on leave rows before 200 as they are, to the bit."""
    q, k, v, *_ = inputs(1, 1, 300, 64, dtype=torch.float16)
    before, other = rung(q, k, v, True)[0], (k.clone(), v.clone())
    for t in other:
        t[:, :, 200:] += 3
    after = rung(q, *other, True)[0]
    assert torch.equal(after[:, :, :200], before[:, :, :200])
    assert not torch.equal(after, before)


def no_key_no_nan(rung):
    """Queries that see no key: zeros and -inf, as documented."""
    out, lse = rung(*inputs(1, 2, 300, 64, S_k=172, causal=True, dtype=torch.float16))
    assert (out[:, :, :128] == 0).all()
    assert (lse[:, :, :128] == -torch.inf).all()
    assert lse[:, :, 128:].isfinite().all()


def _refuses(why, *sizes, dtype=torch.float16, **options):
    return Refusal(
        why, lambda f: f(*inputs(*sizes, dtype=dtype, **options)), Unsupported, "course_ops.attention takes the rest"
    )


AT_128 = {"B": 4, "H": 16, "S": 4096, "D": 128, "causal": False}
AT_64 = {"B": 4, "H": 32, "S": 4096, "D": 64, "causal": False}
PREDICTED_128 = {  # TFLOP/s
    warp_specialized: 558, overlap_softmax: 674, ping_pong: 770, lazy_rescaling: 750, persistent_scheduler: 780,
    causal_diagonal: 780,
}  # fmt: skip
PREDICTED_64 = {
    warp_specialized: 404, overlap_softmax: 476, ping_pong: 476, lazy_rescaling: 550, persistent_scheduler: 590,
    three_consumers: 620,
}  # fmt: skip

# The answers: lazy_rescaling.py and persistent_scheduler.py, predicted by 16% and 7% where D = 128 has 11% and 4%. They
# save as many cycles there, of fewer cycles in all. Measured: 13% and 11%, and 10% and 3%. QK of block j + 1 is issued
# before PV of block j, so its K is needed before that V.
LESSON = Lesson(
    about=About(
        teaches="in Gluon: a producer warp, softmax under matmuls, lazy rescaling, a tile scheduler, half a block",
        hours=6.75,
        star=True,
        operator="attention",
        language="Gluon",
        pictures=(
            "hopper_roles", "hopper_timeline", "ping_pong", "lazy_rescaling", "persistent_scheduler", "causal_schedule",
            "causal_blocks", "diagonal_quarters", "fragment",
        ),
    ),
    problem=PROBLEM,
    rungs=RUNGS,
    predicted=(
        *(Prediction(rung=rung, at=AT_128, tflop_per_s=figure) for rung, figure in PREDICTED_128.items()),
        *(Prediction(rung=rung, at=AT_64, tflop_per_s=figure) for rung, figure in PREDICTED_64.items()),
    ),
    checks=(
        case("one key past a block, as a projection leaves it", B=1, H=2, S=129, D=128, layout="bshd"),
        case("fewer queries than keys, both in one block", B=2, H=1, S=40, D=128, S_k=70),
        case("one query of a cache, at its last key", B=2, H=4, S=3, D=64, S_k=131, causal=True),
        case("primes, causal, three blocks and more than the rings have stages", B=1, H=3, S=691, D=128, causal=True),
        case("a scale of one's own", B=1, H=1, S=65, D=64, scale=0.3, causal=True),
        case("scores that outgrow the first block's maximum", B=1, H=2, S=200, D=64, S_k=700, scale=4.0),
        case("so causal", B=1, H=2, S=150, D=64, S_k=662, causal=True, scale=4.0),
        case("that outgrow it by less, so that P, O and l are scaled", B=1, H=2, S=200, D=64, S_k=700, scale=1.5),
        case("that outgrow it by more than fp32 holds", B=1, H=2, S=200, D=64, S_k=700, scale=16.0),
        case("a diagonal through the corners of blocks, several tiles", B=2, H=3, S=600, D=128, causal=True),
        case("more keys than queries", B=1, H=4, S=200, D=64, S_k=456, causal=True),
        case("more queries than keys: the first 128 see nothing", B=1, H=2, S=300, D=64, S_k=172, causal=True),
        case("three tiles and more for each SM", gib=0.5, B=4, H=34, S=400, D=64, S_k=300),
        case("so causal, with tiles that see no key", gib=0.5, B=4, H=34, S=400, D=128, S_k=272, causal=True),
        case("rows past 2^31 elements", gib=110, B=1, H=8200, S=2100, D=128, layout="bshd", causal=True),
        case("keys past 2^31 elements", gib=70, B=1, H=8200, S=1, D=128, S_k=2100),
    ),
    benches=(
        *({"B": 16384 // S, "H": 16, "S": S, "D": 128, "causal": causal}
          for causal in (True, False) for S in (512, 2048, 4096, 16384)),
        *({"B": 16384 // S, "H": 32, "S": S, "D": 64, "causal": causal}
          for causal in (True, False) for S in (2048, 4096, 16384)),
        {"B": 32, "H": 12, "S": 1024, "D": 64, "causal": True},  # lesson 15's GPT
    ),
    properties=(masked_keys_do_not_matter, no_key_no_nan),
    refuses=(
        *PROBLEM.refuses,
        _refuses("another head size", 1, 2, 128, 96),
        _refuses("grouped heads", 1, 4, 128, 64, H_kv=2),
        _refuses("a window", 1, 2, 128, 64, causal=True, window=50),
        _refuses("a diagonal across two blocks", 1, 2, 128, 64, S_k=200, causal=True),
        _refuses("fp32", 1, 2, 128, 64, dtype=torch.float32),
        _refuses("every second element", 1, 2, 128, 64, layout="wide"),
        _refuses("no queries", 1, 2, 0, 64),
    ),
    cpu_model=cpu_model,
    wrong=(*OF_THE_KERNELS, *OF_THE_MODEL),
    claims=dict.fromkeys(RUNGS, ("wgmma", "tma", "no spills")),
    dtypes=(torch.float16, torch.bfloat16),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
