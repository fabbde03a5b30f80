"""LayerNorm in CUDA C++: three reads of a row, then two
=====================================================
The kernels and their predictions are in 16_layernorm.cu. This file wraps them as functions of tensors and checks them
against PyTorch. The next lesson, 17_layernorm_lengths, reads a row once; 18_layernorm_backward is the backward.

Run it:    python3 course.py run 16_layernorm
Check it:  python3 course.py check 16_layernorm
Time it:   python3 course.py bench 16_layernorm
"""

import math

from lessonkit import About, Lesson, Mutant, Prediction, Refusal, Unsupported, budget, case, cuda, expect

import torch

from problems.layer_norm import EPS, PROBLEM, inputs

kernels = cuda.extension(__file__)  # 16_layernorm.cu, built at the first call
DTYPES = (torch.float32, torch.bfloat16)


ADDED_UP = 16384  # elements that one thread adds up: over more, the fp32 sums of a row lose a digit too many


@budget(4, "one thread adds a row up in order: of 12,672 elements in 16 bits, rstd is off in its fifth digit")
def layernorm_naive(x, w, b, eps=EPS):
    """x [M, N], w [N], b [N] -> y [M, N], mean [M] and rstd [M] in fp32; float32 or bfloat16, one thread per row."""
    if x.ndim == 2 and x.shape[1] > ADDED_UP:
        raise Unsupported(f"rows past {ADDED_UP:,}: one thread adds a row up in order, and the mean loses its digits")
    return _launch(kernels, "layernorm_naive", x, w, b, eps)


def layernorm_block(x, w, b, eps=EPS):
    """As layernorm_naive, one block a row, three reads."""
    return _launch(kernels, "layernorm_block", x, w, b, eps)


def layernorm_welford(x, w, b, eps=EPS):
    """As layernorm_naive, one block a row, two reads (Welford 1962; Chan, Golub and LeVeque 1979)."""
    return _launch(kernels, "layernorm_welford", x, w, b, eps)


def _launch(module, name, x, w, b, eps):
    expect(x=x, ndim=2, dtypes=DTYPES, contiguous=True)
    expect(w=w, b=b, ndim=1, dtypes=(x.dtype,), contiguous=True)
    M, N = x.shape
    if w.shape != (N,) or b.shape != (N,):
        raise ValueError(f"w has shape {tuple(w.shape)} and b {tuple(b.shape)}, expected ({N},) for x {M} x {N}")
    y, (mean, rstd) = torch.empty_like(x), torch.empty(2, M, dtype=torch.float32, device=x.device)
    if N == 0:  # of nothing
        mean.fill_(math.nan), rstd.fill_(math.nan)
    getattr(module, f"{name}_{str(x.dtype).removeprefix('torch.')}")(x, w, b, y, mean, rstd, M, N, eps)
    return y, mean, rstd


WHOLE = tuple(each for each in PROBLEM.checks if "pad" not in each.shape)  # rows one behind the other
REFUSES = (
    Refusal("w too long", lambda f: f(inputs(8, 8)[0], *inputs(8, 12)[1:]), ValueError, "w has shape"),
    Refusal("half precision", lambda f: f(*(t.half() for t in inputs(2, 8))), TypeError, "x is torch.float16"),
    Refusal("w in 16 bits", lambda f: f(inputs(2, 8)[0], *(t.bfloat16() for t in inputs(2, 8)[1:])), TypeError, "w is"),
    Refusal("a transposed matrix", lambda f: f(inputs(8, 7)[0].t(), *inputs(7, 8)[1:]), ValueError, "contiguous"),
    Refusal("gradient lost", lambda f: f(inputs(2, 8)[0].requires_grad_(), *inputs(2, 8)[1:]), ValueError, "grad"),
)


# fmt: off
LESSON = Lesson(
    about=About(
        teaches="Welford and Chan: mean and variance in one pass that keeps its digits",
        hours=0.75,
        operator="layernorm",
        language="CUDA C++",
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=(layernorm_naive, layernorm_block, layernorm_welford),
    predicted=(
        Prediction(
            rung=layernorm_block,
            at={"M": 2048, "N": 131072},
            percent_of_limit=50,
            why="Loads are 2 bytes per lane at occupancy 0.75: one load of each thread is 3 KB in flight on an SM, "
            "where Little's law wants 25 KB.",
        ),
        Prediction(
            rung=layernorm_welford,
            at={"M": 2048, "N": 131072},
            percent_of_limit=67,
            why="Each iteration of the loop divides, and waits for the mean of the one before.",
        ),
    ),
    checks=(
        *(each for each in WHOLE if each.shape["N"] < 4096),  # v1 adds up a row, element after element
        case("one past a block", M=3, N=257),
        case("several iterations of each thread, the last one ragged", M=4, N=781),
        case("row offsets past 2^31, in rows short enough for v1 to add up", gib=120, M=2**21 + 3, N=1025),
        case("whole warps, on which requests are counted", M=64, N=256),
    ),
    benches=PROBLEM.benches[::-1],
    wrong=(
        Mutant("a row too many", "layernorm_naive_kernel", "row >= M", "row > M", "layernorm_naive", "out of bounds"),
        Mutant("variance by N - 1", "layernorm_block_kernel", "block_sum(m2, shared) / N",
               "block_sum(m2, shared) / (N - 1)", "layernorm_block", "nan"),
        Mutant("variance as E[x^2] - E[x]^2", "layernorm_block_kernel", "(widen(x[j]) - m) * (widen(x[j]) - m);",
               "widen(x[j]) * widen(x[j]) - m * m;", "layernorm_block"),
        Mutant("halves added without waiting", "block_sum", "        __syncthreads();\n        if", "        if",
               "layernorm_block", "race"),
        Mutant("the next sum begins too early", "block_sum", "    __syncthreads();  // the next", "    // the next",
               "layernorm_block", "race"),
        Mutant("the new difference twice", "layernorm_welford_kernel", "delta * (value - mine.mean)",
               "(value - mine.mean) * (value - mine.mean)", "layernorm_welford"),
        Mutant("threads merged as if their means were equal", "merge", "delta * delta * a.count * share", "0",
               "layernorm_welford"),
        Mutant("parts read before they are there", "layernorm_welford_kernel", "    __syncthreads();\n", "",
               "layernorm_welford", "race"),
    ),
    claims={"layernorm_block_kernel": ("no spills",), "layernorm_welford_kernel": ("no spills",)},
    counts={
        layernorm_naive: {"sectors a store": 31.8},
        layernorm_block: {"wavefronts a shared access": 1},
    },
    refuses=REFUSES,
    dtypes=DTYPES,
    factor=4,  # v1 adds numbers around 50 one after the other, torch adds them in a tree
)
# fmt: on

if __name__ == "__main__":
    LESSON.main()
