"""Flash attention backward on Hopper: five matmuls, TMA reduce, ping-pong
========================================================================
Ping-pong brings nothing in the forward pass (lesson 8). Here it gains 7% to 16% at D = 64 from S = 2048 on, and at most
3% at D = 128. The consumers exchange dS at each step, so without turns both compute exponentials at the same time.

You will be able to: fuse a backward pass in which many programs add to one of the three gradients. You can say for each
matmul where its operands lie and what runs meanwhile, and how fast the kernel can be at best.
You need: lesson 7 (dS = P (dP - delta)), lesson 8 (producer and consumers), day 3's lesson 9 (TMA, mbarriers).

The predictions of rungs 1 to 3 are too high: on an H200 these rungs have 65% to 91% of the predicted rate. Two costs
were counted too low, the atomics of rungs 1 and 2, and consumers that compute exponentials at the same time. A part is
not explained. The report's page says for each rung what is known.

The budget
----------
Lesson 7 does seven matmuls instead of five: the programs that own queries and the programs that own keys each compute S
and dP. A rate counts the FLOPs of five. So kernels that run at 650 TFLOP/s are reported with 5/7 of 650 = 464 TFLOP/s.
Five matmuls are enough if each CTA owns keys only. It keeps dK and dV of its keys in registers. dQ becomes a sum in
memory, to which the CTAs of all keys add.

A step is 64 queries of a tile of 128 keys at D = 128, and 128 queries at D = 64. Cycles of an SM:

                     work                                              D = 128   D = 64
    tensor cores     5 * 2 * 64 * 128 * 128 FLOPs at 4096 a cycle         2560     2560
    MUFU (exp2)      one per score, 16 a cycle                             512     1024
    ALU              4 other instructions per score, 128 lanes             256      512
    shared memory    wgmma reads 256 KB, threads and TMA write 48 KB      2432     2304
                     (D = 64: 224 and 64 KB), 128 bytes per cycle
    dQ to L2         32 KB of fp32: 13 bytes per cycle, of about 39

Tensor cores and shared memory are both busy for the whole step, so any other work costs time unless it runs under
them. On an H200 cuBLAS reaches 790 TFLOP/s. So TFLOP/s = 790 * 2560 / cycles.

Who holds what
--------------
    CTA = 1 producer warp                    2 consumer warpgroups of 4 warps, 64 keys each
          TMA loads; stores dK and dV        240 registers per thread: dK 64, dV 64, S^T 32, dP^T 32, P^T 16, dQ 32
          24 registers per thread            (dQ reuses dP^T's)

    A step of consumer c. A star is a matmul of the two operands left of it.

      shared memory                registers of consumer c
        K_c, of a tile  --+
        Q, of a step    --+-- * -->  S^T --- exp2 ---> P^T ---- * dO ---->  dV_c, kept until the tile's end
                                                        |
        dO, of a step   --+                             v
        V_c, of a tile  --+-- * -->  dP^T ----------> dS^T ---- * Q  ---->  dK_c, kept until the tile's end
                                                        |
        dS_c  <-----------------------------------------+    the only [keys, queries] matrix in shared memory
        dS_0 and dS_1   --+                                  here the consumers wait for each other
        K_0 and K_1     --+-- * -->  dQ, half c of it
        dQ_c  <----------------------+
          +--- TMA reduce --->  fp32 sum in L2, to which the CTAs of all keys of the head add

    matmul           left operand (A)      right operand (B)       accumulator
    S^T  = K  Q^T    K    shared memory    Q    shared memory      registers, 32 per thread; starts at -lse (rungs 1-4)
    dP^T = V  dO^T   V    shared memory    dO   shared memory      registers, 32; starts at -delta (rungs 1-4)
    dV  += P^T  dO   P^T  registers        dO   shared memory      registers, 64, for the whole tile
    dK  += dS^T Q    dS^T registers        Q    shared memory      registers, 64, for the whole tile
    dQ   = dS   K    dS   shared memory    K    shared memory      registers, 32; added to fp32 in memory at each step

The budget's bytes of shared memory follow from this table. An operand of a step is 16 KB there: 64 x 128 elements of
16 bits. (At D = 64 K and V of a consumer are 8 KB.) In KB for one consumer and one step:

               S^T      dP^T     dV      dK      dQ        sum    both    written: Q and dO, dS of both
    D = 128    16+16    16+16    0+16    0+16    16+16     128     256    32 + 16
    D = 64      8+16     8+16    0+16    0+16    16+16     112     224    32 + 32

S and dP are computed transposed, [keys, queries]. So the accumulators of S^T and dP^T already have the layout of the
left operands P^T and dS^T. So the matmuls for dV and dK read no scores from shared memory. Only dQ sums over the keys
of both consumers. Each consumer writes its dS^T and arrives on an mbarrier (`ds_full`). When both have arrived, each
computes half of dQ from both.

    shared memory, KB        shape; ROWS = 64, or 128 at D = 64       D = 128   D = 64    written by, then read by
      Q ring                 2 stages x ROWS x D                          32       32     TMA, wgmma of both
      dO ring                2 stages x ROWS x D                          32       32     TMA, wgmma of both
      K                      2 consumers x 64 x D                         32       16     TMA, wgmma; then dK, TMA
      V                      2 consumers x 64 x D                         32       16     TMA, wgmma; then dV, TMA
      dS                     2 buffers x 2 consumers x 64 x ROWS          32       64     consumers, wgmma of both
        from rung 5 on       3 buffers                                    48       96
      dQ, from rung 3 on     2 consumers x 64 x 64 in fp32                32       32     consumers, TMA reduce
      -lse and -delta        2 stages x 2 x ROWS in fp32                   1        2     TMA, consumers
      all, rungs 5 and 6     of 227; barriers take less than 1           209      226

The rungs
---------
Each is a complete file in flash_hopper_backward/. Read the first one, then `diff` each with the next.

1. five_matmuls: the matmuls of the table, one after the other. The threads add dQ to memory (red.global.add)
2. overlap_matmuls: each matmul is issued early and awaited late. So the tensor cores always have one
3. tma_reduce: dQ goes through shared memory, and one thread issues a TMA reduce
4. persistent_scheduler: one CTA per SM takes tiles from a counter. A tile's ends overlap with the next tile
5. ping_pong: the consumers take turns at exponentials, and dQ is a step late
6. causal_skip: at D = 128 a consumer of a causal head skips the block of queries that does not see its keys

A step at D = 128, without waits for barriers or bytes. A character is 128 cycles. The tensor cores do S, D = dP,
V = dV, K = dK and Q = dQ. Small letters are consumer 1. Both consumers do x = exp2, g = dS, a = atomics, r = one
thread's TMA reduce.

    five_matmuls       tensor cores   SSssDDdd....VVvv..KKkkQQqq......    each matmul is awaited at once
                       consumers      ........xxxx....gg........aaaaaa
    overlap_matmuls    tensor cores   DDddVVvvKKkkSSssQQqq......          S is that of the next block
                       consumers      xxxx.gg.............aaaaaa
    tma_reduce         tensor cores   DDddVVvvKKkkSSssQQqq                each step begins with the next exp2
                       consumers      xxxx.gg.............r
    persistent_scheduler has the same step; ping_pong.py draws its own.

The cycles of a step. "Drawn" is what the timeline shows. "Predicted" counts fewer atomics, or none:

    rung               drawn   predicted   why they differ
    five_matmuls       4096    3200        predicted: half of the work beside the matmuls overlaps, atomics included
    overlap_matmuls    3328    2800        the prediction counts no atomics, but 240 cycles of exchange and barriers
    tma_reduce         2560    2800        the exchange and the barriers

The same as code, in rungs 2 to 4 (each matmul starts when the one before it is done):

    tensor cores    |-- dP --|-- dV --|-- dK --|-- S of the next block --|-- dQ --|
    consumer        exp2 ....|dS ..|write dS|  wait for the other's dS   |wait ...|add dQ
    wait            until 1 is outstanding: dP   then dV                  all

In the forward pass only the rings hold the consumers together (lesson 8). One may be two blocks ahead of the other, so
they may drift apart until one computes its softmax under the other's matmuls. Here the consumers exchange dS at each
step, so they cannot drift apart. Both compute exponentials at the same time, and the tensor cores wait for both. So
ping-pong, which brings nothing in the forward pass, is expected to gain here, and most at D = 64. At D = 128 there are
half as many exponentials per FLOP, and dP covers them.

Where the predictions come from
-------------------------------
The figures are `predicted` below; the report shows them beside the rows. Cycles of a step:

    rung                   D = 128                                               D = 64
    five_matmuls           3200: 2560, half of the other work, waits             3600
    overlap_matmuls        2800: 2560, the exchange of dS, barriers              3100
    tma_reduce             2800, or 2950 if shared memory decides                3100
    persistent_scheduler   2000 cycles of each tile are hidden. A tile has S / 64 steps, so that is 7% at S = 512 and
                           2% at 2048; causal tiles have half as many steps, so twice that
    ping_pong              250 less, 7%                                          512 less, 17%
    causal_skip            10% of the matmuls at S = 512, 3% at 2048; half       nothing: every block sees a key
                           of that, as consumer 0 still does the step

Three of these percentages do not follow from the cycles beside them. 2000 of 8 * 2800 cycles are 9% at S = 512. 2800 /
2550 is 10% more. 3100 / 2588 is 20% more. The figures above stand, as they were predicted before the kernels were
timed. And at D = 128 dP covers the exponentials, so ping-pong should have nothing to save there.

Experiments
-----------
    part of the heads at a time, so that dQ's sum stays in L2    64 MB of it: 1% slower; 32 MB: 3% slower
    ping-pong at D = 128, S = 512 (rows of rungs 4 and 5)        slower: 9 dQ matmuls in 8 steps, the first unused;
                                                                 course_ops.attention uses rung 4's loop there
    the accumulator of S starts at -lse in rung 5, too           the compiler issues dP in eighths, one every 10 exp2
    80 queries per step, as FlashAttention-3 has for all keys    fewer bytes of shared memory per query, but Gluon's
                                                                 blocks are powers of 2
    a masked loop of one step with constant bounds               right and slow: see below

A trap: a causal tile has one masked block of queries at D = 64, and in rung 6 also at D = 128. If the loop over it runs
from `begin` to `begin + 1`, the compiler unrolls it. Then ptxas lacks registers for asynchronous wgmma and waits after
each one. Triton does not show ptxas's remark about it (C7511). With such a loop rung 6 has 154 waits for 154 wgmma,
without it 20 for 160 (Triton 3.6). The answer is right, so only the machine code shows it:
`tests/test_flash_hopper_backward.py` counts the waits.

Before you read on: how many bytes are added to dQ in all (S / 128 owners, 4 S D bytes each), and is L2 fast enough for
them? Which of the three gradients may differ in its bits from run to run?

course_ops.attention takes what the rungs refuse: windows, grouped heads, other lengths and head sizes. A step of its
kernel has the instructions of the last rung's step. The file cpu_model.py runs all barriers of the last rung on a CPU,
in any order of its warps.
Sources: Shah et al. 2024, FlashAttention-3, section 3.1, appendix B.1, and hopper/ of its code; Dao 2023, algorithm 2.

Run it:    python3 course.py run lesson09_flash_hopper_backward
Check it:  python3 course.py check lesson09_flash_hopper_backward
Time it:   python3 course.py bench lesson09_flash_hopper_backward
"""

import math

from lessonkit import About, Lesson, Mutant, Prediction, Refusal, Unsupported, case

import torch

from day4_replace_op.flash_hopper_backward.causal_skip import causal_skip
from day4_replace_op.flash_hopper_backward.cpu_model import causal_skip_on_cpu
from day4_replace_op.flash_hopper_backward.five_matmuls import five_matmuls
from day4_replace_op.flash_hopper_backward.overlap_matmuls import overlap_matmuls
from day4_replace_op.flash_hopper_backward.persistent_scheduler import persistent_scheduler
from day4_replace_op.flash_hopper_backward.ping_pong import ping_pong
from day4_replace_op.flash_hopper_backward.tma_reduce import tma_reduce
from problems.attention import PROBLEM_BACKWARD, inputs_backward

_CLAIMS = tuple(f"backward_kernel: {c}" for c in ("wgmma", "tma", "no spills"))
RUNGS = five_matmuls, overlap_matmuls, tma_reduce, persistent_scheduler, ping_pong, causal_skip


def _sizes(D, S, causal):
    return {"B": 16384 // S, "H": 2048 // D, "S": S, "D": D, "causal": causal}


AT_128, AT_64 = _sizes(128, 4096, causal=False), _sizes(64, 4096, causal=False)
SHORT, SHORT_CAUSAL = _sizes(128, 512, causal=False), _sizes(128, 512, causal=True)
PREDICTED = (
    Prediction(
        rung=five_matmuls,
        at=AT_128,
        tflop_per_s=632,
        why="The consumers stay in step, so neither hides the other's work. A step takes 2560 + 512 + 256 cycles, and "
        "500 to 1000 for atomics: 32 KB at 32 to 64 bytes per cycle. That is 3800 to 4300, or 470 to 530 TFLOP/s.",
    ),
    Prediction(
        rung=five_matmuls,
        at=AT_64,
        tflop_per_s=562,
        why="As at D = 128: 2560 + 1024 + 512 cycles one after the other, and 500 to 1000 of atomics.",
    ),
    Prediction(
        rung=overlap_matmuls,
        at=AT_128,
        tflop_per_s=722,
        why="The atomics are half of it: `tma_reduce`, which has none, is faster by as much. The rest is missing in "
        "`tma_reduce`, too, and its cause is not found.",
    ),
    Prediction(
        rung=overlap_matmuls,
        at=AT_64,
        tflop_per_s=652,
        why="The atomics are half of it: `tma_reduce`, which has none, is faster by as much. Both consumers also "
        "exponentiate at the same time. `ping_pong`, where they take turns, is faster again.",
    ),
    Prediction(rung=tma_reduce, at=AT_128, tflop_per_s=(686, 722)),
    Prediction(
        rung=tma_reduce,
        at=AT_64,
        tflop_per_s=652,
        why="Both consumers exponentiate at the same time. `ping_pong`, where they take turns, is faster by more than "
        "half of the difference.",
    ),
    Prediction(
        rung=persistent_scheduler,
        at=SHORT,
        times=1.07,
        over=tma_reduce,
        why="In part, because the count has the steps alone: `prepare_kernel` and `finish_kernel` move 470 MB beside "
        "them, or 0.11 ms, which the rung leaves as it is. The rest is not explained.",
    ),
    Prediction(
        rung=persistent_scheduler,
        at=SHORT_CAUSAL,
        times=1.14,
        over=tma_reduce,
        why="In part, as for all keys: 0.11 ms are not of the steps. The rest is not explained.",
    ),
    Prediction(rung=persistent_scheduler, at=_sizes(128, 2048, causal=False), times=1.02, over=tma_reduce),
    Prediction(
        rung=ping_pong,
        at=AT_128,
        times=1.07,
        over=persistent_scheduler,
        why="At D = 128 dP of both consumers takes 512 cycles, as long as the exponentials of both. So these run under "
        "dP without turns, too.",
    ),
    Prediction(rung=ping_pong, at=AT_64, times=1.17, over=persistent_scheduler),
    Prediction(
        rung=causal_skip,
        at=SHORT_CAUSAL,
        times=1.05,
        over=ping_pong,
        why="In part, because 0.11 ms are not of the steps: `prepare_kernel` and `finish_kernel`. The rest is not "
        "explained.",
    ),
    Prediction(rung=causal_skip, at=_sizes(128, 2048, causal=True), times=1.015, over=ping_pong),
)


def keys_are_the_same_each_time(rung):
    """dK and dV agree to the bit in two runs, as their sums have one owner; dQ's additions come in any order."""
    args = inputs_backward(1, 4, 384, 64, causal=True, dtype=torch.float16)
    assert all(torch.equal(a, b) for a, b in zip(rung(*args)[1:], rung(*args)[1:], strict=True))


def keys_all_alike(rung):
    """P is 1 / S and dP is delta: each row of dV is the mean of dO, dQ and dK are 0."""
    grad_out, q, k, v, *_ = inputs_backward(1, 2, 128, 64, dtype=torch.float16)
    k, v = (t[:, :, :1].expand_as(t).contiguous() for t in (k, v))
    lse = ((q.double() * k.double()).sum(-1) / 8 + math.log(128)).float()
    dq, dk, dv = rung(grad_out, q, k, v, v, lse)
    torch.testing.assert_close(dv.float(), grad_out.float().mean(2, keepdim=True).expand_as(dv), rtol=2e-3, atol=2e-3)
    assert max(dq.abs().max(), dk.abs().max()) < 1e-2


def later_keys_have_no_gradient(rung):
    """Causal: if only queries before 200 have a gradient, keys from 200 on have none, to the bit."""
    grad_out, *rest = inputs_backward(1, 2, 384, 128, causal=True, dtype=torch.float16)
    grad_out[:, :, 200:] = 0
    for t in rung(grad_out, *rest)[1:]:
        assert (t[:, :, 200:] == 0).all()
        assert (t[:, :, :200] != 0).any(-1).all()


# The answers: S^2 D / 32 bytes for each head. L2 delivers 39 bytes per cycle, and dQ needs 13. Only dQ may differ:
# many CTAs add to it.
LESSON = Lesson(
    about=About(
        teaches="backward in Gluon: five matmuls and where their operands lie, overlap, TMA reduce, ping-pong, causal",
        hours=6.25,
        operator="attention backward",
        language="Gluon",
        pictures=("five_matmuls", "backward_timeline", "fragment"),
    ),
    problem=PROBLEM_BACKWARD,
    rungs=RUNGS,
    predicted=PREDICTED,
    cpu_model=causal_skip_on_cpu,
    checks=(
        case("one tile, one block of queries", B=1, H=1, S=128, D=64),
        case("one tile, causal: both blocks of queries are on the diagonal", B=1, H=2, S=128, D=128, causal=True),
        case("three tiles, and a ring that comes round", B=1, H=2, S=384, D=128),
        case("causal, a block of queries as long as a tile; a scale", B=2, H=3, S=384, D=64, causal=True, scale=0.3),
        case("as a projection leaves it", B=1, H=2, S=256, D=128, layout="bshd", causal=True),
        case("three tiles and more for each SM", gib=0.6, B=4, H=34, S=384, D=64),
        case("so causal", gib=0.6, B=4, H=34, S=512, D=128, causal=True),
        case("the last one, in all dtypes", B=1, H=1, S=256, D=128),
    ),
    benches=(
        *(_sizes(128, S, causal) for S in (512, 2048, 4096, 16384) for causal in (False, True)),
        *(_sizes(64, S, causal) for S in (512, 2048, 4096, 16384) for causal in (False, True)),
    ),
    refuses=(
        *PROBLEM_BACKWARD.refuses,
        Refusal("a window", lambda f: f(*inputs_backward(1, 1, 128, 64, causal=True, window=9, dtype=torch.float16)),
                Unsupported, "course_ops.attention"),
        Refusal("fewer heads of k", lambda f: f(*inputs_backward(1, 4, 128, 64, H_kv=2, dtype=torch.float16)),
                Unsupported, "course_ops.attention"),
        Refusal("an odd length", lambda f: f(*inputs_backward(1, 1, 100, 64, dtype=torch.float16)),
                Unsupported, "S a multiple of 128"),
        Refusal("fp32", lambda f: f(*inputs_backward(1, 1, 128, 64)), Unsupported, "for 16 bits"),
    ),
    wrong=(
        # The kernels themselves; an H200 judges them, each in a process of its own.
        Mutant("P where dS belongs", "main_loop", "ds = (p * dp)", "ds = (p)", "five_matmuls"),
        Mutant("lse where delta belongs", "main_loop", "issue_scores(v, do, args.delta_smem",
               "issue_scores(v, do, args.start_smem", "five_matmuls"),
        Mutant("dQ's sum begins with ones", "prepare_kernel", "tl.zeros([ROWS, D], tl.float32)",
               "tl.full([ROWS, D], 1.0, tl.float32)", "five_matmuls"),
        Mutant("dQ in another order than it was added", "finish_kernel", "x.permute(0, 4, 2, 1, 3, 5)",
               "x.permute(0, 4, 2, 1, 5, 3)", "five_matmuls"),
        Mutant("the next S is of the same Q", "main_loop", "ring_slot(step + 1,", "ring_slot(step,", "overlap_matmuls",
               "value or nan"),
        Mutant("both consumers add to the same half of dQ", "add_dq", "[part * 64, 0]", "[part // 2 * 128, 0]",
               "tma_reduce"),
        Mutant("each tile begins a ring of its own", "consumer_partition", "first = end", "first = 0",
               "persistent_scheduler", "hang or value or nan"),
        Mutant("the next tile's K is not waited for", "consumer_partition",
               "mbarrier.wait(args.k_full.index(0), count & 1)", "pass", "persistent_scheduler", "value or nan"),
        Mutant("no consumer begins", "backward_kernel", "mbarrier.arrive(args.turn.index(0))", "pass", "ping_pong",
               "hang"),
        Mutant("the late dQ goes to this step's queries", "main_loop", "2 * (block - 1)", "2 * block", "ping_pong"),
        Mutant("the last dQ goes to the next head", "consumer_partition", "c.part + 2 * (blocks - 1)",
               "c.part + 2 * blocks", "ping_pong"),
        Mutant("a key sees one query too few", "probabilities", "keys <= rows + (", "keys < rows + (", "causal_skip"),
        Mutant("delta left out", "main_loop", "dp + args.delta_smem.index(stage).load(LAYOUT)", "dp", "causal_skip"),
        Mutant("dK without the scale", "consumer_partition", "dk * (args.scale_log2 * LN2)", "dk", "causal_skip"),
        Mutant("both consumers mask for the lower keys", "consumer_partition", "tile.key + WHICH * KEYS", "tile.key",
               "causal_skip"),
        Mutant("the skipped block's dS is not 0", "skip_block", "gl.zeros((KEYS, ROWS), args.ds_smem.dtype, LAYOUT)",
               "gl.full((KEYS, ROWS), 1.0, args.ds_smem.dtype, LAYOUT)", "causal_skip"),
        Mutant("the skipped block's turn is kept", "skip_block", "mbarrier.arrive(args.turn.index(0))", "pass",
               "causal_skip", "hang"),
        Mutant("a stage is released by three", "backward_kernel", "empty=allocate_barriers(STAGES, 2)",
               "empty=allocate_barriers(STAGES, 3)", "causal_skip", "hang"),
        Mutant("K is read by three", "backward_kernel", "k_read=allocate_barriers(1, 2)",
               "k_read=allocate_barriers(1, 3)", "causal_skip", "hang"),
        Mutant("the producer waits for the other phase", "producer_partition", "parity ^ 1", "parity", "causal_skip",
               "hang"),
        # The CPU model of the last rung.
        Mutant("the meeting is not waited for", "_cta", "yield ds_full[late % 2], late // 2 & 1", "yield FREE",
               "causal_skip_on_cpu"),
        Mutant("two buffers of dS", "_cta", "o.q.shape[-1], 3", "o.q.shape[-1], 2", "causal_skip_on_cpu"),
        Mutant("Q is released before dK", "_cta", "dv += p @ do_smem[stage, :, :D]",
               "dv += p @ do_smem[stage, :, :D]; empty[stage].arrive(); empty[stage].missing += 1",
               "causal_skip_on_cpu", "nan"),
        Mutant("dK over K that the other still reads", "_cta", "yield k_read, count & 1", "yield FREE",
               "causal_skip_on_cpu"),
        Mutant("another tile begins a ring of its own", "_cta", "= ring_slot.fn(step, 2), ring_slot",
               "= ring_slot.fn(step - first, 2), ring_slot", "causal_skip_on_cpu", "barrier"),
        Mutant("stored when K is read", "_cta", "yield stored, count", "yield k_read, count", "causal_skip_on_cpu"),
        Mutant("the turn is never passed", "_cta", "turn[1 - which].arrive()", "pass", "causal_skip_on_cpu", "barrier"),
    ),
    claims=dict.fromkeys(RUNGS, _CLAIMS)
    | dict.fromkeys(RUNGS[:2], (*_CLAIMS, "backward_kernel: 16-byte stores"))  # the atomics that add dQ
    | {causal_skip: _CLAIMS[:2]},  # Triton 3.6 spills a few bytes outside the main loops
    properties=(keys_are_the_same_each_time, keys_all_alike, later_keys_have_no_gradient),
    dtypes=(torch.float16, torch.bfloat16),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
