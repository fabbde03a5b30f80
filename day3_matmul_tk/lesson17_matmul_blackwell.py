"""Matmul on Blackwell: tcgen05, tensor memory, commits, pairs of CTAs
===================================================================
Lesson 9's C = A B for sm_100. The ring, TMA and the mbarriers are Hopper's. What is new is where the accumulator lies,
which thread issues an MMA, and how other warps learn that it is complete.

New words (GLOSSARY.md): tensor memory, tcgen05, commit.
You will be able to: write a matmul for tcgen05, and name the mbarriers of a tile and what completes each. You can say
what tensor memory and pairs of CTAs are for.
You need: lesson 9. A B200 (sm_100) runs the rungs. None was at hand, so no figure of this lesson is measured. Without
one the rungs are compiled and their machine code is counted. They also run on the CPU, in any order of their warps,
copies and MMAs, and a race or a deadlock there is an error.
Run it:    python3 course.py run lesson17_matmul_blackwell
Check it:  python3 course.py check lesson17_matmul_blackwell
Compile:   python3 course.py compile lesson17_matmul_blackwell
Compare:   diff day3_matmul_tk/matmul_hopper/warp_specialized.py day3_matmul_tk/matmul_blackwell/warp_specialized.py

Budget. One SM of a B200, one step of K (64) of a tile of 128 x 256, bf16:

    unit           work                                          cycles
    tensor cores   128 * 256 * 64 multiply-adds, 4096 a cycle       512    half of Hopper's
    L2             48 KB at Hopper's 39 bytes per cycle            1260    B200's rate is not in its data sheet
    latency        until a load's first bytes arrive                800    Hopper's
    tile's ends    fill the ring 1500, write C 3000                4500    Hopper's, once a tile

The data sheet's 2250 TFLOP/s on 148 SMs are 4096 multiply-adds per cycle at 1.86 GHz. At 4096 cubed there are 512
tiles, four rounds of 148 SMs, and 13.5% of the SMs have none. So TFLOP/s is at most 1946 * 512 / (cycles per step). The
tensor cores are twice as fast as Hopper's, and a tile's bytes are the same: 96 bytes per cycle keep them busy. That is
why a pair of CTAs shares B.

Five terms:
    tensor memory   256 KB per SM beside registers and shared memory: 128 rows ("lanes") x 512 columns of 32 bits. A
                    kernel allocates columns. MMAs accumulate there; a warp reads its quarter of the rows.
    tcgen05.mma     128 x N x 16, N up to 256, A and B from shared memory. One thread issues it for the CTA, and it is
                    asynchronous. MMAs of one thread run in the order in which they were issued.
    commit          tells an mbarrier to count one arrival when all MMAs that the same thread issued before it are
                    complete. It takes the place of `warpgroup_mma_wait`, and any warp may wait for it.
    tcgen05.ld      tensor memory to registers. Four warps read 128 rows; warp w reads rows 32 w to 32 w + 31.
    pair            two CTAs of a cluster on two SMs, which multiply 256 x N together (cta_group::2).

What changed against Hopper:

                     Hopper: wgmma                           Blackwell: tcgen05
    accumulator      registers, 128 a thread for 64 x 256    tensor memory, 256 of 512 columns for 128 x 256
    issued by        all 128 threads of a warpgroup          one thread
    its end          warpgroup_mma_wait, by those threads    a commit arrives on an mbarrier, for any warp
    stage released   by an arrival of each consumer          by the commit of the MMA that read it
    epilogue         in the consumers, after their MMAs      in four other warps, under the next tile's MMAs
    largest tile     128 x 256 for two warpgroups            128 x 256 for a CTA, 256 x 256 for a pair

Tensor memory with two accumulators. Each warp of the epilogue sees its own 32 rows alone:

               columns 0 to 255        256 to 511
    row    0   tile 0, 2, 4, ...       tile 1, 3, 5, ...     epilogue, warp 0
          32                                                 epilogue, warp 1
          64                                                 epilogue, warp 2
          96                                                 epilogue, warp 3

Four mbarriers, and the direction in which each says that something is over:

    mbarrier   one for each   a phase completes by                    waited for by
    full       stage          the bytes that TMA was asked for        mma
    empty      stage          the commit of the MMA that read it      producer
    ready      accumulator    the commit after a tile's last MMA      epilogue
    drained    accumulator    the epilogue's arrival                  mma

Each rung is a complete file in matmul_blackwell/ and differs from an earlier one by one idea. These predictions for a
B200 are not measured. The lower rate takes Hopper's L2, the upper one an L2 that keeps up:

    file                  new                                               cycles per step   TFLOP/s at 4096 cubed
    tma.py                TMA, tcgen05, a commit, one after the other       680 to 1310       760 to 1470
    ring.py               four stages, released by commits                  580 to 1330       750 to 1710
    warp_specialized.py   producer, mma and epilogue warps                  580 to 1330       750 to 1710
    persistent.py         one CTA for each SM; the accumulator again        560 to 1310       760 to 1780
    two_accumulators.py   the epilogue under the next tile's MMAs           512 to 1260       790 to 1950
    two_ctas.py           from warp_specialized.py: two CTAs share B        580 to 910        1090 to 1710

tma.py asks for 82 KB of shared memory and 256 columns, so two of its CTAs share an SM, and one loads while the other
multiplies. That is why the plainest rung is not far behind.

Experiments: change one thing, predict, then `compile`, and `bench` on a B200.
    STAGES = 3 in two_accumulators.py         is a load of two steps ahead early enough for an MMA of 512 cycles?
    BLOCK_N = 128 in two_accumulators.py      how many accumulators would fit, and what does L2 say of the tile?
    two_ctas.py with tiles in turn            needs Triton 3.8: which mbarrier must the second CTA reach?
Mistakes worth making without a GPU: matmul_blackwell/mutants.py lists wrong versions of each rung. Which are races, and
which are deadlocks? Write it down, then `python3 course.py mutants lesson17_matmul_blackwell`.

Three questions before you read on. Why does `empty` count one arrival here and two on Hopper? In persistent.py mma
waits for `drained` before its first tile: for which parity, and why does it pass? Why does a pair have one `full` for a
stage, and an `empty` in each CTA?
"""

from lessonkit import About, Lesson, Prediction, case

import torch

from day3_matmul_tk.matmul_blackwell.mutants import WRONG
from day3_matmul_tk.matmul_blackwell.persistent import persistent
from day3_matmul_tk.matmul_blackwell.ring import ring
from day3_matmul_tk.matmul_blackwell.tma import tma_and_tcgen05
from day3_matmul_tk.matmul_blackwell.two_accumulators import two_accumulators
from day3_matmul_tk.matmul_blackwell.two_ctas import two_ctas
from day3_matmul_tk.matmul_blackwell.warp_specialized import warp_specialized
from problems.matmul import PROBLEM, TMA_CHECKS

RUNGS = (tma_and_tcgen05, ring, warp_specialized, persistent, two_accumulators, two_ctas)
MIDDLE = {"M": 4096, "N": 4096, "K": 4096}
SHOWN = ("4 tcgen05.mma", "4 tcgen05.ld", "tma", "mbarriers", "no spills")


# The answers: `empty` counts the commit of the MMA that read the stage. On Hopper each of two consumers arrives. mma
# waits for parity 1, the phase before the first, which counts as complete. A pair has one `full`, since its first CTA
# issues the MMA when the blocks of both CTAs have arrived. It has an `empty` in each CTA, since each producer fills
# its own CTA's stage, and the commit arrives in both.
LESSON = Lesson(
    about=About(
        teaches="tensor memory, tcgen05 and its commits, epilogue warps, two accumulators, two CTAs that share B",
        hours=3,
        operator="matmul",
        language="Gluon",
        pictures=("two_accumulators",),
    ),
    problem=PROBLEM,
    rungs=RUNGS,
    predicted=(
        Prediction(card="b200", rung=tma_and_tcgen05, at=MIDDLE, tflop_per_s=(760, 1470)),
        Prediction(card="b200", rung=ring, at=MIDDLE, tflop_per_s=(750, 1710)),
        Prediction(card="b200", rung=warp_specialized, at=MIDDLE, tflop_per_s=(750, 1710)),
        Prediction(card="b200", rung=persistent, at=MIDDLE, tflop_per_s=(760, 1780)),
        Prediction(card="b200", rung=two_accumulators, at=MIDDLE, tflop_per_s=(790, 1950)),
        Prediction(card="b200", rung=two_ctas, at=MIDDLE, tflop_per_s=(1090, 1710)),
    ),
    checks=(
        *PROBLEM.checks,
        *TMA_CHECKS,
        case(
            "9 tiles down: groups of 8 and of 16 and one row of tiles more; 7 rounds of the grid", M=1030, N=520, K=72
        ),
        case("4 rounds of the grid, the second begins in the middle of the ring", M=600, N=776, K=200),
        case("17 tiles down: a group of 16 and one of 1", gib=0.1, M=2054, N=520, K=72),
        case("offsets past 2^31", gib=60, M=70_001, N=32_000, K=32_000),
    ),
    wrong=WRONG,
    claims={
        tma_and_tcgen05: (*SHOWN, "1 tcgen05.commit", "256 columns of tensor memory"),
        ring: (*SHOWN, "2 tcgen05.commit", "256 columns of tensor memory"),
        warp_specialized: (*SHOWN, "2 tcgen05.commit", "256 columns of tensor memory"),
        persistent: (*SHOWN, "2 tcgen05.commit", "256 columns of tensor memory"),
        two_accumulators: (*SHOWN, "2 tcgen05.commit", "512 columns of tensor memory"),
        two_ctas: (
            *SHOWN,
            "4 tcgen05.mma of two CTAs",
            "2 tcgen05.commit",
            "256 columns of tensor memory",
        ),
    },
    dtypes=(torch.float16, torch.bfloat16),
)

if __name__ == "__main__":
    LESSON.main()
