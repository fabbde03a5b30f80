"""Tuning, flash attention: tensor cores and exponentials, one or two programs per SM
==================================================================================
A step of day 4's loop attends BLOCK_M queries to BLOCK_N keys. In cycles of an SM:

    matmuls       4 BLOCK_M BLOCK_N D / 4096                   128 x 128, D = 128: 2048      D = 64: 1024
    exponentials  BLOCK_M BLOCK_N / 16, and 3.5 instructions per score, 1 an element of O, at 128 a cycle:
                                                               1024 + 448 + 128 = 1600                1536
    load          4 BLOCK_N D bytes of K and V, at 64 a cycle  1024                          512

A program alone does the first two one after the other, so its step is their sum. Two programs on an SM (4 warps each,
64 or 128 queries, fewer registers) can overlap:

    one program     tensor cores   MMMM....MMMM....        two programs   tensor cores   MMMMmmmmMMMMmmmm
                    exponentials   ....EEEE....EEEE                       exponentials   eeeeEEEEeeeeEEEE

The step of both is then twice the longer of the two, or one program's chain. A tall tile loads K and V less often. A
small one starts sooner, and two of it fit on an SM. The model lets all warps of a program run in step. With 8 warps
they need not: one warpgroup can multiply while the other computes exponentials. That term is missing.

    step   close to the largest of  resident * matmuls, resident * exponentials, resident * load,
           matmuls + exponentials (a program's own chain), and 1000 / (stages - 1) of waiting

Predict before you run, for D = 64 and 128: which tile is best, and what limits it, the matmuls or everything else?
You will learn: why only more overlap can make attention faster, and why D = 64 and 128 need different tiles.
Run it:    python3 course.py run lesson08_tuning_attention      (compiled and predicted; on a GPU timed, two minutes)
"""

import math

from lessonkit import About, Steps, device, specimen
from lessonkit.measure.sweeps import FAMILY, SHARED, Figures, Sweep, figures, show, together, waves
from lessonkit.pages.compared import comparisons

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

FLASH = specimen("day4_replace_op.lesson04_flash_v2", "LESSON")
tma_kernel = specimen("day4_replace_op.lesson04_flash_v2", "tma_kernel")
LOG2E = math.log2(math.e)
CLOCK = 1.65e9  # higher than a matmul's 1.5 GHz: tensor cores that wait take less power
LATENCY, ENDS, LAUNCH = 1000, 3000, 2.0  # cycles, cycles of a program around its loop, microseconds
NAMES = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
SWEPT = (
    (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 4, 3), (128, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2),
    (128, 128, 8, 3), (128, 128, 4, 2), (256, 64, 8, 2),
)  # fmt: skip


def launch(args, config):
    """o, lse of attention over q, k, v [B, H, S, D], through the TMA."""
    q, k, v = args
    B, H, S, D = q.shape
    o, lse = torch.empty_like(q), torch.empty(q.shape[:-1], device=q.device)
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    descs = [
        TensorDescriptor.from_tensor(t.flatten(0, 1), [1, rows, D]) for t, rows in ((q, m), (k, n), (v, n), (o, m))
    ]
    tma_kernel[(B * H * triton.cdiv(S, m),)](
        *descs, lse, LOG2E / math.sqrt(D), S, D, m, n, "ieee",
        num_warps=config["num_warps"], num_stages=config["num_stages"],
    )  # fmt: skip
    return o, lse


def configs(size):
    """The tiles that fit into shared memory: Q, and K and V for each stage."""
    found = [dict(zip(NAMES, values, strict=True)) for values in SWEPT]
    return [c for c in found if 2 * size["D"] * (c["BLOCK_M"] + 2 * c["num_stages"] * c["BLOCK_N"]) < SHARED - 1024]


def predict(size, config, k: Figures, machine):
    """Microseconds, and the largest of the terms above."""
    B, H, S, D = (size[key] for key in "BHSD")
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    programs = B * H * math.ceil(S / m)
    shared = max(1, min(k.resident, math.ceil(programs / machine.sms)))
    products = 4 * m * n * D / machine.tensor
    scalar = m * n / 16 + 3.5 * m * n / 128 + m * D / 128
    step, limit = together(
        {
            "tensor cores": shared * products,
            "exponentials": shared * scalar,
            "L2": shared * 4 * n * D / 64,
            "own chain": products + scalar,
            "waiting": LATENCY / (config["num_stages"] - 1),
            "spills": shared * k.spills * k.warps * 128 / 64,
        }
    )
    cycles = waves(programs, shared, machine.sms) * (math.ceil(S / n) * step + ENDS)
    return cycles / CLOCK * 1e6 + LAUNCH, limit


SWEEP = Sweep(
    lesson=FLASH,
    module=__name__,
    sizes=(
        {"B": 4, "H": 32, "S": 4096, "D": 64},
        {"B": 4, "H": 16, "S": 4096, "D": 128},
        {"B": 1, "H": 16, "S": 1024, "D": 128},
    ),
    configs=configs,
    launch=launch,
    predict=predict,
    axes=lambda c: (f"{c['BLOCK_M']} x {c['BLOCK_N']}", f"{c['num_warps']} warps, {c['num_stages']} stages"),
)
compile_here = SWEEP.compile_here
WIDE = "B=4 H=16 S=4096 D=128"


def swept():
    """Every configuration: compiled, predicted, and from sm_90 on checked and timed, interleaved within a size."""
    if device.HAS_GPU and device.capability() < 90:
        print("  needs sm_90: the TMA")
        return None
    return SWEEP.step()


def _row(size, *config):
    """A configuration's row, with the compiler's figures."""
    wanted = dict(zip(NAMES, config, strict=True))
    return next(row for row in SWEEP.compiled() if row["size"] == size and SWEEP.config(row) == wanted)


def one_program_takes_turns_with_itself():
    """128 x 128 on 8 warps is alone on its SM at D = 128. By the model both parts add up: 56% of the peak at best."""
    row = _row(WIDE, 128, 128, 8, 2)
    assert figures(row).resident == 1
    assert SWEEP.predicted(row)[1] == "own chain"


def two_programs_take_turns_with_each_other():
    """64 queries on 4 warps fit twice: while one multiplies, the other exponentiates; but each loads K and V."""
    row = _row(WIDE, 64, 64, 4, 3)
    assert figures(row).resident >= 2
    assert SWEEP.predicted(row)[1] != "own chain"


def too_many_queries_a_warp():
    """128 x 128 on 4 warps: 128 elements of O, 128 scores and their 16-bit copies a thread spill."""
    row = _row(WIDE, 128, 128, 4, 2)
    assert figures(row).registers >= 254 and figures(row).spills > 0  # noqa: PT018
    assert SWEEP.predicted(row)[0] > SWEEP.predicted(_row(WIDE, 128, 128, 8, 2))[0]


def the_best_moves_with_size_and_gpu():
    """D = 64 has half the FLOPs for as many exponentials; a short sequence has too few tall tiles for a GPU."""
    table = SWEEP.compiled()
    for machine in FAMILY:
        best = []
        for size in SWEEP.sizes:
            row = SWEEP.ranked(size, machine)[0]
            best.append(f"{show(SWEEP, row)}: {SWEEP.predicted(row, machine)[1]}")
        print(f"  {machine.name:10} {'; '.join(best)}")
    narrow = [SWEEP.predicted(row)[1] for row in table if row["size"].endswith("D=64") and not int(row["spills"])]
    assert "tensor cores" not in narrow  # whatever the tile: at D = 64 exponentials are the longer half


STEPS = (
    swept,
    one_program_takes_turns_with_itself,
    two_programs_take_turns_with_each_other,
    too_many_queries_a_warp,
    the_best_moves_with_size_and_gpu,
)

# The answers for an H200: at D = 64 64 x 128 on 4 warps is best, and the exponentials limit it. At D = 128 128 x 128
# on 8 warps in 3 stages is best. By the model the program's own chain limits it, matmuls and exponentials together. Yet
# at S = 4096 it takes 24% less time than the model says, probably since its two warpgroups do not run in step.
LESSON = Steps(
    STEPS,
    about=About(
        teaches="matmuls and exponentials alternate; two programs on an SM", hours=0.75, pictures=("two_programs",)
    ),
    compares=comparisons(SWEEP),
    alone=device.HAS_GPU,
    nightly=STEPS,
)

if __name__ == "__main__":
    LESSON.main()
