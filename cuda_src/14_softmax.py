"""Softmax in CUDA C++: three reads of a row, then two
===================================================
The kernels and their predictions are in 14_softmax.cu. This file wraps them as functions of tensors and checks them
against PyTorch. The next lesson, 15_softmax_lengths, reads a row once.

Run it:    python3 course.py run 14_softmax
Check it:  python3 course.py check 14_softmax
Time it:   python3 course.py bench 14_softmax
"""

from lessonkit import About, Lesson, Mutant, Prediction, Refusal, case, cuda, expect

import torch

from problems.softmax import PROBLEM, inputs, strange_numbers, sums_and_shifts

kernels = cuda.extension(__file__)  # 14_softmax.cu, built at the first call
DTYPES = (torch.float32, torch.bfloat16)


def softmax_naive(x):
    """[M, N] -> [M, N] float32 or bfloat16, one thread per row, three reads."""
    return _launch(kernels, "softmax_naive", x)


def softmax_block(x):
    """[M, N] -> [M, N] float32 or bfloat16, one block a row, three reads."""
    return _launch(kernels, "softmax_block", x)


def softmax_online(x):
    """[M, N] -> [M, N] float32 or bfloat16, one block a row, two reads (Milakov and Gimelshein 2018, algorithm 3)."""
    return _launch(kernels, "softmax_online", x)


def _launch(module, name, x):
    expect(x=x, ndim=2, dtypes=DTYPES, contiguous=True)
    y = torch.empty_like(x)
    getattr(module, f"{name}_{str(x.dtype).removeprefix('torch.')}")(x, y, *x.shape)
    return y


WHOLE = tuple(each for each in PROBLEM.checks if "pad" not in each.shape)  # rows one behind the other
REFUSES = (
    Refusal("a transposed matrix", lambda f: f(inputs(8, 7)[0].t()), ValueError, "contiguous"),
    Refusal("half precision", lambda f: f(inputs(2, 8)[0].half()), TypeError, "x is torch.float16"),
    Refusal("gradient lost", lambda f: f(inputs(2, 8)[0].requires_grad_()), ValueError, "requires grad"),
)


# fmt: off
LESSON = Lesson(
    about=About(
        teaches="three reads of a row become two: online softmax over a block",
        hours=0.75,
        operator="softmax",
        language="CUDA C++",
        pictures=("traffic",),
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=(softmax_naive, softmax_block, softmax_online),
    predicted=(
        Prediction(rung=softmax_naive, at={"M": 8192, "N": 8192}, percent_of_limit=3.1),
        Prediction(
            rung=softmax_online,
            at={"M": 2048, "N": 131072},
            percent_of_limit=67,
            why="Each iteration of the loop waits for the pair of the one before: two exponentials that no other work "
            "of the thread hides.",
        ),
    ),
    checks=(
        *WHOLE,
        case("a prime width", M=7, N=127),
        case("whole warps, on which bytes and requests are counted", M=64, N=256),
    ),
    wrong=(
        Mutant("no maximum subtracted", "softmax_naive_kernel", "m = fmaxf(m, widen(x[j]))", "m = 0",
               "softmax_naive", "nan"),
        Mutant("a row too many", "softmax_naive_kernel", "row >= M", "row > M", "softmax_naive", "out of bounds"),
        Mutant("halves added without waiting", "block_reduce", "        __syncthreads();\n        if", "        if",
               "softmax_block", "race"),
        Mutant("the next reduction begins too early", "block_reduce", "    __syncthreads();  // the next",
               "    // the next", "softmax_block", "race"),
        Mutant("sum not rescaled", "softmax_online_kernel", "pair.s * exp_(pair.m - m)", "pair.s", "softmax_online"),
        Mutant("starts at -inf", "softmax_online_kernel", "{LOWEST, 0}", "{-INFINITY, 0}", "softmax_online", "nan"),
        Mutant("pairs read before they are there", "softmax_online_kernel", "    __syncthreads();\n", "",
               "softmax_online", "race"),
    ),
    claims={"softmax_block_kernel": ("no spills",), "softmax_online_kernel": ("no spills",)},
    passes={softmax_naive: 2, softmax_block: 2, softmax_online: 1.5},
    counts={
        softmax_naive: {"sectors a request": 32},
        softmax_block: {"sectors a request": 4, "wavefronts a shared access": 1},
        softmax_online: {"sectors a request": 4},
    },
    properties=(sums_and_shifts, strange_numbers),  # v1 adds a row up in order: past 64 KB too coarse for the others
    refuses=REFUSES,
    dtypes=DTYPES,
)
# fmt: on

if __name__ == "__main__":
    LESSON.main()
