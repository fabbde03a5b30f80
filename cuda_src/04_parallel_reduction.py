"""Parallel reduction in CUDA C++: from a divergent tree to warp shuffles
======================================================================
The kernels and their predictions are in 04_parallel_reduction.cu. This file wraps them as functions of tensors and
checks them against PyTorch. On a GPU nvcc builds the kernels. Elsewhere g++ builds them, and the emulator watches
every address, barrier and race.

New words (GLOSSARY.md): bank conflict.
Run it:    python3 course.py run 04_parallel_reduction
Check it:  python3 course.py check 04_parallel_reduction
Time it:   python3 course.py bench 04_parallel_reduction
"""

from lessonkit import About, Lesson, Mutant, Prediction, Refusal, case, cuda, expect

import torch

from problems.sum import PROBLEM, inputs

kernels = cuda.extension(__file__)  # 04_parallel_reduction.cu, built at the first call


def sum_divergent(x):
    """[n] -> [] float32, a tree whose working threads are spread over all warps."""
    return _launch("sum_divergent", x)


def sum_strided(x):
    """[n] -> [] float32, the first threads work, on words that share banks."""
    return _launch("sum_strided", x)


def sum_sequential(x):
    """[n] -> [] float32, the first threads work, on neighbouring words."""
    return _launch("sum_sequential", x)


def sum_first_add(x):
    """[n] -> [] float32, two numbers per thread, added on the way in."""
    return _launch("sum_first_add", x)


def sum_unrolled(x):
    """[n] -> [] float32, the last 64 numbers by one warp without barriers of the block."""
    return _launch("sum_unrolled", x)


def sum_shuffle(x):
    """[n] -> [] float32, shuffles within warps and one barrier between them."""
    return _launch("sum_shuffle", x)


def _launch(name, x):
    expect(x=x, ndim=1, dtypes=[torch.float32], contiguous=True)
    n = x.numel()
    scratch, total = x.new_empty(n // 255 + 8), x.new_empty(())
    getattr(kernels, name)(x, scratch, total, n)
    return total


LARGE = {"n": 2**28}

LESSON = Lesson(
    about=About(
        teaches="divergence, sequential addressing, unrolling, warp shuffles",
        hours=1.5,
        star=True,
        operator="sum",
        language="CUDA C++",
        pictures=("shuffle_tree",),
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=(sum_divergent, sum_strided, sum_sequential, sum_first_add, sum_unrolled, sum_shuffle),
    predicted=(
        Prediction(
            rung=sum_divergent,
            at=LARGE,
            percent_of_limit=16.7,
            why="The prediction adds the time of the load to that of the instructions; the blocks of an SM drift "
            "apart, and one adds while another loads.",
        ),
        Prediction(
            rung=sum_strided,
            at=LARGE,
            times=(1, 1.2),
            over=sum_divergent,
            why="The bank conflicts cost more than the skipped instructions save.",
        ),
        Prediction(rung=sum_sequential, at=LARGE, percent_of_limit=25),
        Prediction(rung=sum_first_add, at=LARGE, times=(1.7, 1.95), over=sum_sequential),
        Prediction(rung=sum_unrolled, at=LARGE, times=(1.11, 1.25), over=sum_first_add),
        Prediction(rung=sum_shuffle, at=LARGE, percent_of_limit=50),
    ),
    checks=(
        *PROBLEM.checks,
        case("the second level has more than one block", n=2 * 256 * 256 + 3),
        case("one block, which is what requests and barriers are counted on", n=256),
    ),
    wrong=(
        Mutant("reads one too many", "sum_tree_kernel", "i < n ?", "i <= n ?", "sum_divergent", "out of bounds"),
        Mutant("the last number is nobody's", "sum_tree_kernel", "i < n ?", "i < n - 1 ?", "sum_sequential"),
        Mutant(
            "the tree begins before all have loaded",
            "sum_tree_kernel",
            "__syncthreads();",
            "",
            "sum_sequential",
            "race",
        ),
        Mutant("no barrier between steps", "Divergent", "__syncthreads();", "", "sum_divergent", "race"),
        Mutant("one thread too many", "Strided", "left < THREADS", "left <= THREADS", "sum_strided", "out of bounds"),
        Mutant(
            "a warp runs in step, or so they said",
            "Unrolled",
            "__syncwarp();                       // every lane",
            "// every lane",
            "sum_unrolled",
            "race",
        ),
        Mutant("blocks rounded down", "in_levels", "course::ceil_div(n, per_block)", "n / per_block", "sum_first_add"),
        Mutant("the second number alone", "sum_tree_kernel", "mine += i + ", "mine = i + ", "sum_first_add"),
        Mutant("half a warp", "warp_sum", "s = 16", "s = 8", "sum_shuffle"),
        Mutant("warps' sums read too early", "block_sum", "__syncthreads();", "", "sum_shuffle", "race"),
    ),
    claims={"sum_tree_kernel": ("no spills",), "sum_shuffle_kernel": ("no spills",)},
    passes=dict.fromkeys((sum_divergent, sum_strided, sum_sequential, sum_first_add, sum_unrolled, sum_shuffle), 1.0),
    counts={
        sum_divergent: {"sectors a load": 4.0, "wavefronts a shared access": 1.0, "barriers": 9},
        # The 8 steps load each side in 47 wavefronts (8 8 8 8 8 4 2 1) by 12 requests; 8 stores before, 1 load after.
        sum_strided: {"wavefronts a shared load": 95 / 25, "wavefronts a shared store": 55 / 20, "barriers": 9},
        sum_sequential: {"sectors a load": 4.0, "wavefronts a shared access": 1.0, "barriers": 9},
        sum_unrolled: {"wavefronts a shared access": 1.0, "barriers": 3},
        sum_shuffle: {"sectors a load": 4.0, "wavefronts a shared access": 1.0, "barriers": 1},
    },
    refuses=(
        *PROBLEM.refuses,
        Refusal("not float32", lambda f: f(inputs(8)[0].half()), TypeError, "x is torch.float16"),
    ),
    dtypes=(torch.float32,),
)

if __name__ == "__main__":
    LESSON.main()
