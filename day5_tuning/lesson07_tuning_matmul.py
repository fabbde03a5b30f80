"""Tuning, matmul: tile, warps, stages, order
===========================================
The parameters of day 3's tile loop, and the term of the model that each one changes. One step of a tile is 64 of K. It
takes these cycles of an SM (4096 FLOPs per cycle, 64 bytes per cycle from L2):

    multiply   BLOCK_M * BLOCK_N * 64 / 2048, twice that without wgmma          the tile
    load       2 (BLOCK_M + BLOCK_N) * 64 / 64                                  the tile: large ones load less per FLOP
    wait       1000 / (stages - 1)                                              stages, which take shared memory
               one stage: 1000 + load + load / 2 (into shared memory) + multiply, one after the other
    spills     128 bytes per warp each, 64 a cycle                              warps: BM BN / 32 warps sums per thread

Programs on one SM share its time for multiply, load and spills; their waits overlap. A step takes about as long as the
largest term. Then

    waves      tiles / (132 resident), rounded up, times K / 64 steps and 2000 cycles of ends
    memory     each wave reads GROUP rows of tiles and as many columns as make up the wave. The order changes bytes,
               not cycles: at 8192, in tiles of 128 x 256, 2.4 GB in groups of 1 and 1.5 GB in groups of 8

Predict before you run, for 1024, 2048 and 8192: the best tile, and where a third and a fourth stage matter.
You will learn: why the best tile changes with the size, what spills do, which parameter to try next.
Run it:    python3 course.py run lesson07_tuning_matmul      (compiled and predicted; on a GPU timed, two minutes)
"""

import math

from lessonkit import About, Steps, device, specimen
from lessonkit.measure.sweeps import FAMILY, Figures, Sweep, figures, rank_correlation, show, together, waves
from lessonkit.pages.compared import comparisons

from problems.matmul import empty_product

MATMUL = specimen("day3_matmul_tk.lesson01_matmul", "LESSON")
grouped_kernel = specimen("day3_matmul_tk.lesson01_matmul", "grouped_kernel")
LATENCY = 1000  # cycles of a load from L2 or memory, under load
LAUNCH = 2.0  # microseconds
ENDS = 2000  # cycles of a tile before its first matmul step and after its last


def launch(args, config):
    """C = A B for a, b of any strides."""
    a, b = args
    c = empty_product(a, b)
    tiles = math.ceil(c.shape[0] / config["BLOCK_M"]) * math.ceil(c.shape[1] / config["BLOCK_N"])
    grouped_kernel[(tiles,)](
        a, b, c, *c.shape, a.shape[1], *a.stride(), *b.stride(), c.stride(0),
        config["BLOCK_M"], config["BLOCK_N"], 64, "ieee", config["GROUP"],
        num_warps=config["num_warps"], num_stages=config["num_stages"],
    )  # fmt: skip
    return c


TILES = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (64, 256, 4), (64, 256, 8),
         (128, 256, 8), (256, 128, 8), (256, 256, 8), (128, 256, 4))  # fmt: skip
NAMES = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "GROUP")
SWEPT = tuple(
    dict(zip(NAMES, values, strict=True))
    for values in (
        *((*tile, 3, 8) for tile in TILES),
        *((128, 128, 8, stages, 8) for stages in (1, 2, 4, 5)),
        *((128, 256, 8, 4, group) for group in (1, 8, 32)),
    )
)


def predict(size, config, k: Figures, machine):
    """Microseconds, and the largest of the terms above."""
    M, N, K = size["M"], size["N"], size["K"]
    m, n, group, stages = (config[key] for key in ("BLOCK_M", "BLOCK_N", "GROUP", "num_stages"))
    tiles_m, tiles_n = math.ceil(M / m), math.ceil(N / n)
    tiles = tiles_m * tiles_n
    shared = max(1, min(k.resident, math.ceil(tiles / machine.sms)))  # programs that share an SM
    multiply = 2 * m * n * 64 / machine.tensor * (1 if k.wgmma else 2)
    load = 2 * (m + n) * 64 / 64
    step, limit = together(
        {
            "tensor cores": shared * multiply,
            "L2": shared * load,
            "waiting": LATENCY + 1.5 * load + multiply if stages == 1 else LATENCY / (stages - 1),
            "spills": shared * k.spills * k.warps * 128 / 64,
        }
    )
    turns = waves(tiles, shared, machine.sms)
    cycles = turns * (K / 64 * step + ENDS)
    running = shared * machine.sms
    wide = min(tiles_n, running / min(group, tiles_m))
    high = min(tiles_m, running / wide)
    moved = turns * 2 * K * (high * m + wide * n) + 2 * M * N
    us, whole = together({limit: cycles / machine.clock * 1e6, "memory": moved / machine.memory * 1e6})
    return us + LAUNCH, whole


SWEEP = Sweep(
    lesson=MATMUL,
    module=__name__,
    sizes=tuple({"M": n, "N": n, "K": n} for n in (1024, 2048, 8192)),
    configs=lambda size: SWEPT,
    launch=launch,
    predict=predict,
    axes=lambda c: (
        f"{c['BLOCK_M']} x {c['BLOCK_N']}",
        f"{c['num_warps']} warps, {c['num_stages']} stages, groups of {c['GROUP']}",
    ),
)
compile_here = SWEEP.compile_here


def swept():
    """Every configuration: compiled, predicted, and on a GPU checked and timed, interleaved within a size."""
    return SWEEP.step()


def _row(n, tile, warps, stages=3, group=8):
    """A configuration's row, with the compiler's figures."""
    config = {"BLOCK_M": tile[0], "BLOCK_N": tile[1], "num_warps": warps, "num_stages": stages, "GROUP": group}
    return next(r for r in SWEEP.compiled() if r["size"] == f"M={n} N={n} K={n}" and SWEEP.config(r) == config)


def small_tiles_starve_on_l2():
    """64 x 64 multiplies 128 cycles per step and loads 256. More programs per SM do not help: they share its loads."""
    row = _row(8192, (64, 64), 4)
    assert figures(row).resident >= 3
    assert SWEEP.predicted(row)[1] == "L2"
    assert SWEEP.predicted(row)[0] > 1.5 * SWEEP.predicted(_row(8192, (128, 256), 8))[0]


def large_tiles_leave_sms_idle():
    """128 x 256 is best at 8192, but at 1024 it makes 32 tiles for 132 SMs, where 64 x 64 makes 256."""
    assert SWEEP.predicted(_row(8192, (128, 256), 8))[0] < SWEEP.predicted(_row(8192, (128, 128), 8))[0]
    assert SWEEP.predicted(_row(1024, (128, 256), 8))[0] > 1.3 * SWEEP.predicted(_row(1024, (64, 64), 4))[0]


def sums_must_fit_into_registers():
    """128 x 256 on 4 warps: 256 sums per thread and 255 registers. On 8 warps 128 sums, and no spills."""
    assert figures(_row(8192, (128, 256), 8)).spills == 0
    row = _row(8192, (128, 256), 4)
    assert figures(row).registers == 255 and figures(row).spills > 0  # noqa: PT018
    assert SWEEP.predicted(row)[0] > SWEEP.predicted(_row(8192, (128, 256), 8))[0]


def stages_pay_until_the_wait_is_hidden():
    """Each stage of 128 x 128 is 32 KB: one hides no latency, two hide half, three hide all."""
    us = [SWEEP.predicted(_row(8192, (128, 128), 8, stages))[0] for stages in (1, 2, 3, 4, 5)]
    shared = [figures(_row(8192, (128, 128), 8, stages)).shared for stages in (1, 2, 3, 4, 5)]
    assert shared == [stages * 2**15 for stages in (1, 2, 3, 4, 5)]
    assert us[0] > us[1] >= us[2]
    assert us[3] / us[4] < 1.05


def order_is_worth_bytes():
    """Groups of 1 move 1.6 times the bytes of groups of 8; that takes time only where memory is nearly the limit."""
    one, eight = (SWEEP.predicted(_row(8192, (128, 256), 8, 4, g))[0] for g in (1, 8))
    assert 1.0 < one / eight < 1.3


def the_best_moves_with_size_and_gpu():
    """Four GPUs run the same code: fewer SMs, slower memory, and on an H20 a quarter of the tensor cores."""
    for machine in FAMILY:
        best = [show(SWEEP, SWEEP.ranked(size, machine)[0]) for size in SWEEP.sizes]
        print(f"  {machine.name:10} {'; '.join(best)}")
    last = [row for row in SWEEP.compiled() if row["size"].startswith("M=8192")]
    orders = {machine.name: [SWEEP.predicted(row, machine)[0] for row in last] for machine in FAMILY}
    print(f"  order on an H20 against an H200's: {rank_correlation(orders['H20'], orders['H200']):.2f}")
    assert rank_correlation(orders["H100 SXM"], orders["H200"]) > 0.9


STEPS = (
    swept,
    small_tiles_starve_on_l2,
    large_tiles_leave_sms_idle,
    sums_must_fit_into_registers,
    stages_pay_until_the_wait_is_hidden,
    order_is_worth_bytes,
    the_best_moves_with_size_and_gpu,
)

# The answers for an H200: at 1024 128 x 128 and 64 x 128 are within 1%, and at 2048 and 8192 128 x 256 is best. For
# 128 x 128 the third stage saves a fifth to a third of the time at each size. The fourth saves a tenth at 1024. At the
# other two it costs 14% and 5%: an SM holds two programs with three stages, and one with four. The model gives 256 x
# 128 the time of 128 x 256, but it takes 19% to 30% more: probably since its wgmma instructions are half as wide (8 a
# step, not 4).
LESSON = Steps(
    STEPS,
    about=About(teaches="tiles, warps, stages, order: tensor cores, L2, waiting, spills", hours=1, star=True),
    compares=comparisons(SWEEP),
    alone=device.HAS_GPU,
    nightly=STEPS,
)

if __name__ == "__main__":
    LESSON.main()
