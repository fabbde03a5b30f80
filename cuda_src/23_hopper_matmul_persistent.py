"""Matmul on Hopper, second half: a persistent kernel, clusters that share loads
=============================================================================
x @ w.T in bf16 with fp32 sums, at the speed of cuBLAS. The kernels and their predictions are in
23_hopper_matmul_persistent.cu. This file wraps them as functions of tensors and checks them against PyTorch. Without a
GPU only the schedule runs, in the emulator. The rungs that need Hopper are compiled, and their machine code is
checked.

Run it:    python3 course.py run 23_hopper_matmul_persistent
Check it:  python3 course.py check 23_hopper_matmul_persistent
Time it:   python3 course.py bench 23_hopper_matmul_persistent
"""

from lessonkit import About, Lesson, Mutant, Prediction, Unsupported, case, cuda, expect, needs

import torch

from problems.matmul_nt import PROBLEM

kernels = cuda.extension(__file__)  # 23_hopper_matmul_persistent.cu, built at the first call


def matmul_schedule(x, w):
    """[M, K], [N, K] -> [M, N] bfloat16: the persistent grid and its order of tiles, with plain arithmetic."""
    if x.ndim == w.ndim == 2 and x.shape[0] * w.numel() > 2**37:
        raise Unsupported("this rung would take seconds: it has no tensor cores")
    return _run("matmul_schedule", x, w)


@needs(90, "TMA and wgmma", only=True)
def matmul_persistent(x, w):
    """[M, K], [N, K] -> [M, N] bfloat16, a block an SM; copies x and w where rows are not 16-byte aligned."""
    return _run("matmul_persistent", x, w)


@needs(90, "TMA and wgmma", only=True)
def matmul_cluster(x, w):
    """As matmul_persistent, in clusters of two blocks that load half of their common tile of w each."""
    return _run("matmul_cluster", x, w)


def _run(name, x, w):
    _expect(x, w)
    c = x.new_empty(x.shape[0], w.shape[0])
    getattr(kernels, name)(x, w, c, *c.shape, x.shape[1])
    return c


def _expect(x, w):
    """The checks of every rung."""
    expect(x=x, w=w, ndim=2, dtypes=[torch.bfloat16], contiguous=True)
    if x.shape[1] != w.shape[1]:
        raise ValueError(
            f"w has {w.shape[1]} columns, expected as many as x has: {x.shape[1]}; it is [N, K], not [K, N]"
        )


LARGE = {"M": 8192, "N": 8192, "K": 8192}

LESSON = Lesson(
    about=About(
        teaches="a persistent grid, clusters that share loads, to the speed of cuBLAS",
        hours=1.75,
        operator="matmul",
        language="CUDA C++",
        pictures=("multicast",),
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=(matmul_schedule, matmul_persistent, matmul_cluster),
    predicted=(
        Prediction(
            rung=matmul_schedule,
            at={"M": 4096, "N": 4096, "K": 4096},
            tflop_per_s=0.8,
            why="The count takes a clock of 1.7 GHz; at 1.98 GHz, the most that an H200 allows, the same count gives "
            "0.93.",
        ),
        Prediction(rung=matmul_persistent, at=LARGE, tflop_per_s=(630, 735)),
        Prediction(rung=matmul_cluster, at=LARGE, times=1, over=matmul_persistent),
    ),
    checks=(
        *PROBLEM.checks,
        case("3 tiles down in groups of 4, more tiles than the emulated machine's 32 blocks", M=48, N=16 * 13, K=8),
        case("6 tiles down: a group of 4 and one of 2", M=96, N=100, K=9),
        case("more tiles than blocks: the grid comes round, and again", gib=1, M=3001, N=5003, K=136),
        case("as many tiles down as a group has, and a cluster's lower block without rows", gib=1, M=2100, N=300, K=64),
    ),
    benches=(*PROBLEM.benches, {"M": 16384, "N": 16384, "K": 16384}),
    wrong=(
        Mutant(
            "the grid comes only once",
            "matmul_schedule_kernel",
            "i += gridDim.x",
            "i += 1 << 30",
            "matmul_schedule",
            "nan",
        ),
        Mutant(
            "every other round is left out",
            "matmul_schedule_kernel",
            "i += gridDim.x",
            "i += 2 * gridDim.x",
            "matmul_schedule",
            "nan",
        ),
        Mutant(
            "the last group as high as the others", "place", "rest % rows", "rest % group", "matmul_schedule", "nan"
        ),
        Mutant(
            "every group is the first",
            "place",
            "int(first + rest % rows)",
            "int(rest % rows)",
            "matmul_schedule",
            "nan",
        ),
        Mutant(
            "down and across change places",
            "matmul_schedule_kernel",
            "tiles_m, tiles_n, SMALL_GROUP",
            "tiles_n, tiles_m, SMALL_GROUP",
            "matmul_schedule",
            "nan",
        ),
        Mutant("a row too many", "matmul_schedule_kernel", "row >= m", "row > m", "matmul_schedule", "out of bounds"),
        Mutant("the last product is left out", "matmul_schedule_kernel", "j < k", "j < k - 1", "matmul_schedule"),
        Mutant(
            "a tile's panels are stored over each other",
            "matmul_persistent_kernel",
            "c_col + 64 * q",
            "c_col",
            "matmul_persistent",
            "value or nan",  # TMA writes the panels in any order, and C's other columns stay as they were
        ),
        Mutant(
            "both blocks send the same part of B",
            "matmul_persistent_kernel",
            "P::N + rank_m * B_ROWS",
            "P::N",
            "matmul_cluster",
        ),
    ),
    claims={"matmul_persistent_kernel": ("wgmma", "tma", "no spills")},
)

if __name__ == "__main__":
    LESSON.main()
