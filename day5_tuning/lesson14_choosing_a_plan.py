"""Choosing a plan by a cost model: which tile, alone or in pairs, whole waves or Stream-K
=======================================================================================
Lesson 7 swept the configurations of one matmul at one shape. A library is called with shapes that were never swept. So
it needs a rule: it estimates the cycles of each plan, and launches the plan with the fewest. `course_ops.matmul` does
so for 16 bits on Hopper. The model is one page, course_ops/kernels/_matmul_plan.py. It asks three questions.

How long is a step? Each SM multiplies a tile of C by steps of 64 along K. While its tensor cores multiply one step, TMA
copies the next from L2. So a step takes the longer of the two:

    MMAs      tile rows * tile columns * 64 multiply-adds, 2048 a cycle
    copies    (tile rows + tile columns) * 2.3 cycles, or 3.8 where rows do not begin at 32-byte sectors of L2

Can two CTAs share a copy? Two tiles, one above the other, multiply the same block of B. Two CTAs on two SMs can be a
pair: one copy from L2 arrives in both (TMA multicast). Then each copies half of B's rows, and a stage is free again
when the consumers of both have read it. Gluon has what a pair needs from Triton 3.8 on:

    copies in a pair    (tile rows + tile columns / 2) * 2.3 cycles, or 3.8; 30 cycles more a step

How full is the machine? Whole tiles run in waves, one tile an SM, and the last wave may be nearly empty. Stream-K deals
out the steps of the last two waves in equal shares. A digit is the tile that an SM multiplies, a dot is an idle step:

    whole tiles   SM 0  000000000333333333      Stream-K   SM 0  000000000111111
                  SM 1  111111111444444444                 SM 1  111222222222333
                  SM 2  222222222.........                 SM 2  333333444444444

A model that chooses has to rank plans. It need not predict a time. So it is judged by what its choice loses, and not
by how many cycles it is off. The table "estimated and measured" shows both for the shapes of operators.csv. The model
leaves out the launch, and that the clock falls under load.

You will learn: to write a model that chooses, to say what it leaves out, to judge it by its choices.
Run it:    python3 course.py run lesson14_choosing_a_plan      (no kernel runs; it reads the stored rows)
Source: Osama et al., "Stream-K: Work-Centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU",
        PPoPP 2023, section 5.2.
"""

import math
import re
import statistics

from lessonkit import About, Steps, Table
from lessonkit.measure import operator_rows

from course_ops.kernels import _matmul_plan as model

SMS = 132  # of an H200
SHAPES = ((4096, 4096, 4096), (5000, 5000, 5000), (3000, 7000, 2048), (8192, 512, 8192))  # M, N, K


def shares_fill_the_last_wave():
    """Five tiles of nine steps on three SMs: two waves take 18 steps, and equal shares take 15."""
    tiles, steps, sms = 5, 9, 3
    waves = math.ceil(tiles / sms)
    whole = waves * steps
    shares = math.ceil(tiles * steps / sms)
    assert (whole, shares) == (18, 15)
    idle = 1 - tiles * steps / (whole * sms)
    assert round(idle, 3) == 0.167
    print(f"  whole tiles: {whole} steps, {idle:.0%} of them idle; Stream-K: {shares} steps, and two tiles are shared")


def a_step_is_the_longer_of_two():
    """A larger tile copies fewer rows for each multiply-add. Rows that begin within a sector make copies the longer.

    In a pair the copies are shorter than the MMAs again.
    """
    table = []
    for block_m, block_n in model.TILES:
        rows = block_m + block_n
        mma = model.mma_cycles(block_m, block_n)
        table.append({"tile": f"{block_m} x {block_n}", "MMA cycles": round(mma),
                      "copy cycles": round(rows * model.ROW), "shifted": round(rows * model.SHIFTED_ROW),
                      "shifted, in a pair": round((block_m + block_n / 2) * model.SHIFTED_ROW),
                      "rows a million multiply-adds": round(1e6 * rows / (block_m * block_n * model.STEP), 1),
                      })  # fmt: skip
    by = {row["tile"]: row for row in table}
    assert by["128 x 256"]["MMA cycles"] > by["128 x 256"]["copy cycles"]
    assert by["128 x 256"]["MMA cycles"] < by["128 x 256"]["shifted"]
    assert by["128 x 256"]["MMA cycles"] > by["128 x 256"]["shifted, in a pair"]
    assert min(table, key=lambda row: row["shifted"] / row["MMA cycles"])["tile"] == "192 x 256"  # least bound by L2
    return Table("a step", table, "Shifted: rows of A and of B begin within a sector of L2.")


def plans_in_order():
    """At 4096^3 waves of large tiles are nearly full. Where the last wave would be empty, shares or small tiles win.

    At 5000^3 rows begin within a sector, so pairs win.
    """
    table = []
    for M, N, K in SHAPES:
        asked = M, N, K, K * 2 % model.SECTOR == 0, N * 2 % model.SECTOR == 0, SMS
        chosen = model.best_plan(*asked, pairs=True)
        every = sorted(model.plans(*asked, pairs=True), key=lambda plan: plan.cycles)
        for plan in every[:4]:
            tiles = math.ceil(M / (plan.ctas * plan.block_m)) * math.ceil(N / plan.block_n)  # or pairs of tiles
            table.append({"M x N x K": f"{M} x {N} x {K}", "tile": tile_of(plan), "tiles": plan.ctas * tiles,
                          "waves": round(tiles / (SMS // plan.ctas), 2), "in shares": plan.ctas * plan.shared_tiles,
                          "cycles": round(plan.cycles), "chosen": "yes" if plan == chosen else ""})  # fmt: skip
        assert chosen.cycles <= every[0].cycles / model.LEAD
    assert model.best_plan(5000, 5000, 5000, False, False, SMS, pairs=True).ctas == 2
    return Table("plans", table, f"The four plans of the fewest estimated cycles, on {SMS} SMs.")


def tile_of(plan):
    return f"{plan.block_m} x {plan.block_n}" + ", in pairs" * (plan.ctas == 2)


def estimated_beside_measured(folder):
    """Every row of a 16-bit matmul that this model plans: what it estimated, what was measured, what was lost."""
    table = []
    for row in operator_rows.read(folder / operator_rows.FILE):
        sizes = re.fullmatch(r"M=(\d+) N=(\d+) K=(\d+)(?: transposed=([ab]))?", row.shape)
        if (row.operator, row.direction, row.dtype) != ("matmul", "forward", "bfloat16") or not sizes or not row.ms:
            continue
        M, N, K = map(int, sizes.groups()[:3])
        widths = M if sizes[4] == "a" else K, K if sizes[4] == "b" else N
        asked = M, N, K, *(width * 2 % model.SECTOR == 0 for width in widths), SMS
        one_wave = math.ceil(M / 128) * math.ceil(N / 256) < SMS  # then another kernel may divide K
        pairs = tuple(map(int, re.search(r"triton (\d+)\.(\d+)", row.versions).groups())) >= (3, 8)
        copies = any(model.copies_that_pay(*asked, pairs=pairs))  # of the operands, which come first
        if one_wave or N % 8 or K % 8 or copies:
            continue
        plan = model.best_plan(*asked, pairs=pairs)
        table.append({"shape": row.shape, "tile": tile_of(plan), "in shares": plan.ctas * plan.shared_tiles,
                      "estimated cycles": round(plan.cycles), "measured us": round(1e3 * row.ms, 1),
                      "cycles a ns": round(plan.cycles / row.ms / 1e6, 2), "over the best peer": row.ratio or "",
                      })  # fmt: skip
    if not table:
        return None
    table.sort(key=lambda row: row["cycles a ns"])
    tenths = statistics.quantiles((row["cycles a ns"] for row in table), n=10)
    note = (
        "A model without error would have the same cycles a ns in each row: the clock's. Here the median is "
        f"{tenths[4]:.2f}, and eight rows of ten lie between {tenths[0]:.2f} and {tenths[8]:.2f}. Below the median a "
        "kernel was slower than estimated, above it faster."
    )
    return Table("estimated and measured", table, note)


LESSON = Steps(
    about=About(
        teaches="a cost model chooses a matmul's tile and how tiles are dealt out: MMA or L2, pairs, waves, Stream-K; "
        "its error at the shapes of operators.csv",
        hours=0.5,
    ),
    steps=(shares_fill_the_last_wave, a_step_is_the_longer_of_two, plans_in_order),
    compares=(estimated_beside_measured,),
)

if __name__ == "__main__":
    LESSON.main()
