"""Tuning, softmax: how many rows, how many warps
==============================================
A model of the machine excludes bad configurations before the clock chooses among the good ones. Take a kernel that
reads a tile, waits, computes and writes it (day 2's packed softmax). Three quantities decide, and the compiler gives
the first before anything runs:

    resident   programs an SM holds: as many as its registers allow, at most 64 warps, at most 32 programs
    in flight  resident * its bytes: Little's law wants bandwidth * latency, 4.2 TB/s * 800 ns / 132 = 25 KB per SM
    waves      programs / (132 * resident), rounded up: the last wave costs as much as a full one

    memory     bytes / bandwidth                                                              8192 x 8192, bf16: 64 us
    issue      elements * 16 instructions / (132 SMs * 128 lanes per cycle)                                        33 us
    latency    waves * (1.2 us until data arrives + reductions + one program's own instructions and bytes)
    time       close to the largest; where two are close, both cost: the fourth root of the sum of fourth powers

    8192 columns, a row of 16 KB per program     1 warp     spills
                                               4 warps    128 bytes per thread, about 72 registers: 7 programs, 112 KB
                                                          in flight
                                               32 warps   16 bytes per thread: 2 programs (64 warps), 32 KB in flight

The model finds two kinds of bad configuration: those that spill, and those with too many warps. It does not order the
good ones, which lie within a few percent of each other: see the rank correlations in reports/. And it fails for few
warps with many elements each. It ranks four short rows on one warp first, and one long row on four, but both are slow:
see `costs` in reports/. Their registers leave room for 12 and for 8 of the 64 warps that an SM can hold. Each warp
loads, then computes, then stores. A scheduler with two or three warps often has none that is ready, while `issue`
assumes that one always is.

Predict before you run, for each of the three lengths below: the best number of warps, and the worst.
You will learn: to write a model on one page, to rank with it, to read in a heat map what the model misses.
Run it:    python3 course.py run lesson06_tuning      (compiled and predicted; on a GPU timed, a minute)
Matmul: lesson07_tuning_matmul. Flash attention: lesson08_tuning_attention. Autotune itself: lesson09_autotune.
"""

from lessonkit import About, Steps, device, specimen
from lessonkit.measure.sweeps import FAMILY, H200, Figures, Sweep, figures, rank_correlation, show, together, waves
from lessonkit.pages.compared import comparisons

import torch
import triton

SOFTMAX = specimen("day2_triton_basics.lesson16_rows_of_any_length", "LESSON")
softmax_packed_kernel = specimen("day2_triton_basics.lesson16_rows_of_any_length", "softmax_packed_kernel")
CLOCK = 1.9e9  # a kernel that waits for memory draws little power, so the clock is high
LATENCY = 1.2e-6  # seconds, with memory busy: from a program's first load to its first byte, and for its last store
INSTRUCTIONS = 16  # per element: converted to fp32 twice, minus m, scaled, exp2 twice, summed, compared, rounded
LAUNCH = 2.0  # microseconds between the events when the kernel does nothing
REDUCTION = 150  # cycles of a maximum or a sum among the lanes of a warp; as much again through shared memory


def launch(args, config):
    """Softmax of [M, N] with ROWS rows per program and `warps` warps; blocks are rows rounded up."""
    (x,) = args
    y, (M, N) = torch.empty_like(x), x.shape
    softmax_packed_kernel[(triton.cdiv(M, config["ROWS"]),)](
        x, y, M, N, x.stride(0), y.stride(0), config["ROWS"], triton.next_power_of_2(N), num_warps=config["num_warps"]
    )
    return y


def configs(size):
    """Those with 8 to 256 elements per thread: fewer make short loads, more do not fit into registers."""
    return [
        {"ROWS": r, "num_warps": w}
        for r in (1, 4)
        for w in (1, 2, 4, 8, 16, 32)
        if 8 <= r * triton.next_power_of_2(size["N"]) / (32 * w) <= 256 and (r == 1 or r * size["N"] <= 16384)
    ]


def predict(size, config, k: Figures, machine):
    """Microseconds, and the largest of the terms above."""
    M, N, rows = size["M"], size["N"], config["ROWS"]
    programs, elements = -(-M // rows), rows * N
    issue = elements * INSTRUCTIONS / 128 / CLOCK  # of one program; an SM issues four warp instructions per cycle
    transfer = 4 * elements / 64 / CLOCK  # in and out, at what an SM can take
    chain = LATENCY + 2 * REDUCTION * (1 + (k.warps > rows)) / CLOCK + issue + transfer
    spilled = programs * k.spills * k.warps * 128  # a spill is 4 bytes for each of 32 lanes
    us, limit = together(
        {
            "spills" if k.spills else "memory": (4 * M * N + spilled) / machine.memory * 1e6,
            "issue": programs * issue / machine.sms * 1e6,
            "latency": waves(programs, k.resident, machine.sms) * chain * 1e6,
        }
    )
    return us + LAUNCH, limit


SWEEP = Sweep(
    lesson=SOFTMAX,
    module=__name__,
    sizes=({"M": 32768, "N": 1024}, {"M": 8192, "N": 8192}, {"M": 4096, "N": 32768}),
    configs=configs,
    launch=launch,
    predict=predict,
    axes=lambda c: (f"{c['ROWS']} rows", f"{c['num_warps']} warps"),
)
compile_here = SWEEP.compile_here


def swept():
    """Every configuration: compiled, predicted, and on a GPU checked and timed, interleaved within a size."""
    return SWEEP.step()


def _row(size, **config):
    """A configuration's row, with the compiler's figures."""
    return next(row for row in SWEEP.compiled() if row["size"] == size and SWEEP.config(row) == config)


LONG = "M=8192 N=8192"


def four_warps_a_row():
    """Rows of 8192, the first of three: 4 warps, 64 elements per thread, several programs, over 64 KB in flight."""
    k = figures(_row(LONG, ROWS=1, num_warps=4))
    assert k.spills == 0
    assert k.resident * 16384 > 64 * 1024  # over twice what Little's law wants
    assert SWEEP.predicted(_row(LONG, ROWS=1, num_warps=4))[1] == "memory"


def a_warp_a_row():
    """The second: 1 warp. 256 elements per thread are more than its 255 registers, so some spill to memory."""
    k = figures(_row(LONG, ROWS=1, num_warps=1))
    assert k.registers == 255 and k.spills > 0  # noqa: PT018
    assert SWEEP.predicted(_row(LONG, ROWS=1, num_warps=1))[0] > SWEEP.predicted(_row(LONG, ROWS=1, num_warps=4))[0]


def thirty_two_warps_a_row():
    """The third: 32 warps. At most two such programs fit, 32 KB are in flight, and every reduction has all 32 warps."""
    k = figures(_row(LONG, ROWS=1, num_warps=32))
    assert k.resident <= 2
    us, limit = SWEEP.predicted(_row(LONG, ROWS=1, num_warps=32))
    assert limit == "latency" and us > SWEEP.predicted(_row(LONG, ROWS=1, num_warps=4))[0]  # noqa: PT018


def few_warps_an_sm():
    """Four short rows on one warp, or one long row on four: registers leave room for at most a third of 64 warps."""
    for size, rows, warps in (("M=32768 N=1024", 4, 1), ("M=4096 N=32768", 1, 4)):
        assert 8 <= warps * figures(_row(size, ROWS=rows, num_warps=warps)).resident <= 64 / 3


def the_best_moves_with_size_and_gpu():
    """Longer rows need more warps; on a GPU with slower memory more configurations are good, with fewer SMs fewer."""
    for machine in FAMILY:
        best = []
        for size in SWEEP.sizes:
            ranked = SWEEP.ranked(size, machine)
            us = [SWEEP.predicted(row, machine)[0] for row in ranked]
            within = sum(t < 1.05 * us[0] for t in us)
            best.append(f"{show(SWEEP, ranked[0])} ({within} of {len(us)} within 5%)")
        print(f"  {machine.name:10} {'; '.join(best)}")
    mine = [row for row in SWEEP.compiled() if row["size"] == LONG]
    order = [[SWEEP.predicted(row, machine)[0] for row in mine] for machine in (H200, FAMILY[2])]
    assert rank_correlation(*order) > 0.5


STEPS = (
    swept,
    four_warps_a_row,
    a_warp_a_row,
    thirty_two_warps_a_row,
    few_warps_an_sm,
    the_best_moves_with_size_and_gpu,
)

# The answers for an H200, in number of warps: at 1024 columns 1 or 2 are best for one row, and 16 for four rows are
# worst. At 8192 columns 2 to 16 lie within 2%, and 32 are worst. At 32,768 columns 8 are best, and 32 are worst.
LESSON = Steps(
    STEPS,
    about=About(
        teaches="softmax: rows and warps; resident programs, bytes in flight, waves; the model, the sweep, the "
        "heat map",
        hours=1,
        star=True,
        pictures=("occupancy",),
    ),
    compares=comparisons(SWEEP),
    alone=device.HAS_GPU,
    nightly=STEPS,
)

if __name__ == "__main__":
    LESSON.main()
