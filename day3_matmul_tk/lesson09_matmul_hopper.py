"""Matmul on Hopper: TMA, mbarriers, wgmma, warp specialization
=============================================================
The same C = A B, one level below Triton. In Gluon (triton.experimental.gluon) the language is Python and a program owns
a tile. You write down what Triton's compiler decides: layouts, shared memory, barriers, and which warp does what.

New words (GLOSSARY.md): swizzle, prologue, mbarrier, phase.
You will be able to: write a matmul at cuBLAS's speed whose schedule you chose yourself, and name the parity of every
wait. You can say which mistakes hang, and which give wrong values.
You need: lessons 1 and 2. A Hopper GPU runs the rungs. Without one they are compiled, their machine code is read, and a
CPU model of the mbarriers of persistent.py runs, in any order of its warps.
Run it:    python3 course.py run lesson09_matmul_hopper
Check it:  python3 course.py check lesson09_matmul_hopper
Time it:   python3 course.py bench lesson09_matmul_hopper
Compare:   diff day3_matmul_tk/matmul_hopper/tma.py day3_matmul_tk/matmul_hopper/ring.py

Budget. One SM, one step of K (64) of a tile of 128 x 256, bf16:

    unit           work                                           cycles
    tensor cores   128 * 256 * 64 multiply-adds, 2048 per cycle   1024
    L2             48 KB of A and B, 39 bytes per cycle           1260, if every SM gets only its share of L2
    latency        until a load's first bytes arrive              600 to 1000
    tile's ends    fill the ring 1500, convert and write C 3000   4500 once per tile; at K = 4096 a tile has 64 steps

Lesson 2 predicted 1260 cycles for such a step, 650 TFLOP/s, and its rungs are faster than that. So the predictions here
count the 1024 cycles of the tensor cores, except for tma.py, which overlaps nothing.

cuBLAS holds about 790 TFLOP/s on an H200. We count that as 1024 cycles per step, so TFLOP/s is about
790 * 1024 / (cycles per step). (If the tensor cores never wait, that is a clock of 1.46 GHz. A kernel that needs less
power than cuBLAS may run at up to 1.98 GHz.)

Six terms:
    producer  with warp specialization each warp has one role. A producer warp only starts loads. A consumer warpgroup
              (4 warps) only multiplies and stores. A CTA is CUDA's word for Triton's program.
    TMA       copies a box of a matrix between global and shared memory. One thread starts it; no thread carries data.
              A descriptor made on the host holds the matrix's address, shape, strides and the box. Past the end of the
              matrix TMA reads zeros and writes nothing, so no kernel here has a mask.
    mbarrier  8 bytes of shared memory that count arrivals and bytes. When both are complete, its phase flips. Phases
              are numbered 0, 1, 2, ...; a wait names the parity (0 or 1) of the phase whose end it needs. Waiting for
              parity 1 on a new mbarrier returns at once: the phase before the first counts as complete.
    wgmma     a warpgroup (4 warps) multiplies 64 x N x 16 straight from shared memory into fp32 registers. (A may also
              be in registers, as P is in day 4's attention.) It is asynchronous: `warpgroup_mma` issues,
              `warpgroup_mma_wait(n)` waits until at most n still run.
    layout    which thread holds which element. wgmma fixes that of the accumulator: NVMMADistributedLayout.
    swizzle   shared memory has 32 banks of 4 bytes, and each serves one access at a time. Rows of 128 bytes would put
              a column into the same banks. So TMA permutes the 16-byte pieces of each row as it writes, and wgmma reads
              them in that order. NVMMASharedLayout names the swizzle on both sides. 64 elements of 16 bits are 128
              bytes, the widest row that a swizzle takes.

The blocks of a step lie in a stage of shared memory, and several stages form a ring, which is used again and again.
Here is a ring of four stages over six steps. Step n uses stage n % 4. A consumer waits for parity n // 4 & 1 of the
stage's mbarrier `full`: the blocks have arrived. The producer waits for the other parity of its mbarrier `empty`: the
consumers have read the blocks of the round before. In the picture [P4] is the load of step 4 into its stage, and [C4]
is the MMA that reads it:

    step n                         0       1       2       3       4       5
    producer waits empty[stage]    0, p1   1, p1   2, p1   3, p1   0, p0   1, p0     p1, p0: the parity of the wait
    consumers wait full[stage]     0, p0   1, p0   2, p0   3, p0   0, p1   1, p1

    stage 0    [P0..][C0..][P4..]            [C4..]                time ->
    stage 1     [P1..]     [C1..][P5..]            [C5..]
    stage 2      [P2..]          [C2..]
    stage 3       [P3..]               [C3..]
    full[0]    00000^11111111111^222222222222222222222222          the phase in progress; ^ all announced bytes arrived
    empty[0]   00000000000^11111111111111111111111^222222          ^ both consumers have arrived

P0 waits for parity 1 of empty[0] and passes at once: the phase before the first counts as complete. P4 waits for
parity 0, the phase that C0 completes. A wait for the wrong parity either passes too early, which gives wrong values, or
waits for a flip that never comes, which hangs.

Each rung is a complete file in matmul_hopper/ and differs from the one before by one idea. The page in reports/ has
these predictions in TFLOP/s beside the measured rates:

    file                 new                                             predicted cycles at M = N = K = 4096
    tma.py               TMA, an mbarrier, wgmma, one after the other    3200 a step: latency, L2, tensor cores
    ring.py              four stages, loads three steps ahead            1024 + 100 to 200 a step
    async_wgmma.py       one MMA in flight                               1024 a step, and 5% to 7% for a tile's ends
    warp_specialized.py  one producer warp, two consumer warpgroups      0 to 2% fewer
    persistent.py        one CTA for each SM; C is stored while the      4% fewer
                         next tile is multiplied
    tile_choice.py       128 columns where 256 leave SMs idle            the same; at M = N = K = 1024 3/4 of the time

Two of these predictions are wrong. The range of ring.py leaves out the tile's ends, which the range of async_wgmma.py
includes: 4500 cycles in 64 steps are 70 a step. With them it is 1194 to 1294 cycles a step, or 625 to 677 TFLOP/s. And
in the rows warp_specialized.py is slower than async_wgmma.py, not faster. The page does not show this failure, since
the predicted 735 to 765 TFLOP/s include rates below that of async_wgmma.py. The cause is not known.

Experiments: change one thing, predict, then `bench`.
    STAGES = 3 in async_wgmma.py              is a load of two steps ahead still early enough?
    GROUP = 1 in persistent.py                which bytes does L2 no longer serve?
    warpgroup_mma_wait(0) in persistent.py    how much of the waits do two warpgroups hide by themselves?
    [232, 40] -> [208, 88] registers          of a consumer's and the producer's threads: what does `compile` say of
                                              spills? A consumer's accumulator takes 128
Mistakes worth making on an H200: matmul_hopper/mutants.py lists wrong versions of each rung. Which hang, and which give
wrong values? Write it down, then `python3 course.py mutants lesson09_matmul_hopper`.

Two questions before you read on. Why does tma.py need no mbarrier that says a stage is empty? In persistent.py a
consumer also arrives on `empty` after its loop over steps. What happens without it, and in which round of tiles?
"""

from lessonkit import About, Lesson, Prediction, case

import torch

from day3_matmul_tk.matmul_hopper.async_wgmma import async_wgmma
from day3_matmul_tk.matmul_hopper.cpu_model import cpu_model
from day3_matmul_tk.matmul_hopper.mutants import WRONG
from day3_matmul_tk.matmul_hopper.persistent import persistent
from day3_matmul_tk.matmul_hopper.ring import ring
from day3_matmul_tk.matmul_hopper.tile_choice import tile_choice
from day3_matmul_tk.matmul_hopper.tma import tma_and_wgmma
from day3_matmul_tk.matmul_hopper.warp_specialized import warp_specialized
from problems.matmul import LLM, PROBLEM, SEARCHED, TMA_CHECKS

RUNGS = (tma_and_wgmma, ring, async_wgmma, warp_specialized, persistent, tile_choice)
SMALL, MIDDLE = ({"M": n, "N": n, "K": n} for n in (1024, 4096))


# The answers: tma.py waits for its MMA before it loads again. Without the arrival, the stage of a tile's
# last step never becomes empty: the producer waits for it for ever in the second round of tiles.
LESSON = Lesson(
    about=About(
        teaches="layouts, TMA, mbarriers and their phases, a ring of stages, MMAs in flight, warp specialization, a "
        "persistent kernel",
        hours=3,
        star=True,
        operator="matmul",
        language="Gluon",
        pictures=("ring",),
    ),
    problem=PROBLEM,
    rungs=RUNGS,
    predicted=(
        Prediction(
            rung=tma_and_wgmma,
            at=MIDDLE,
            tflop_per_s=250,
            why="250 counts 1024 cycles per step as 790 TFLOP/s, which is a clock of 1.46 GHz. Below its power limit "
            "an H200 runs at up to 1.98 GHz, where 3200 cycles are 342 TFLOP/s. The rows record no clock. So L2 may "
            "also deliver a stage in less than 1260 cycles.",
        ),
        Prediction(rung=ring, at=MIDDLE, tflop_per_s=(660, 720)),
        Prediction(rung=async_wgmma, at=MIDDLE, tflop_per_s=(735, 750)),
        Prediction(rung=warp_specialized, at=MIDDLE, tflop_per_s=(735, 765)),
        Prediction(rung=persistent, at=MIDDLE, tflop_per_s=(765, 795)),
        Prediction(rung=tile_choice, at=SMALL, times=1.33, over=persistent),
    ),
    checks=(
        *PROBLEM.checks,
        *TMA_CHECKS,
        case("9 tiles down: a group of 8 and one of 1", gib=0.1, M=1030, N=520, K=520),
        case("17 tiles down: a group of 16 and one of 1", gib=0.1, M=2054, N=520, K=72),
        case("two rounds of the grid, the second begins in the middle of the ring", gib=0.1, M=1544, N=3080, K=72),
        case("two rounds of the grid, each turns the ring twice", gib=0.1, M=1544, N=3080, K=520),
        case("4 rounds of 6 steps; two groups of 16 rows of tiles", gib=1.5, M=4096, N=4096, K=328),
        case("offsets past 2^31", gib=60, M=70_001, N=32_000, K=32_000),
    ),
    benches=(
        *PROBLEM.benches,
        *({"M": m, "N": n, "K": k} for m, n, k in LLM if m == 4096 and n != k),
    ),
    peers=PROBLEM.peers | SEARCHED,
    cpu_model=cpu_model,
    wrong=WRONG,
    claims=dict.fromkeys(RUNGS, ("wgmma", "tma", "no spills")),
    dtypes=(torch.float16, torch.bfloat16),
)

if __name__ == "__main__":
    LESSON.main()
