"""Softmax in CUDA C++ at every row length: a row is read once
===========================================================
The kernels and their predictions are in 15_softmax_lengths.cu. A row stays in the registers of a block, of a few
lanes, or of a cluster of blocks. The emulator has no clusters: those rungs run on an sm_90 GPU and are compiled
anywhere.

Run it:    python3 course.py run 15_softmax_lengths
Check it:  python3 course.py check 15_softmax_lengths
Time it:   python3 course.py bench 15_softmax_lengths
"""

from lessonkit import About, Lesson, Mutant, Prediction, Refusal, Unsupported, case, cuda, expect, needs

import torch

from problems.softmax import PROBLEM, inputs

kernels = cuda.extension(__file__)  # 15_softmax_lengths.cu, built at the first call
DTYPES = (torch.float32, torch.bfloat16)


def softmax_registers(x):
    """[M, N] -> [M, N] float32 or bfloat16, one block a row of at most 64 KB."""
    _up_to(x, 2**16, "all that the registers of one block hold")
    return _launch(kernels, "softmax_registers", x)


def softmax_lanes(x):
    """[M, N] -> [M, N] float32 or bfloat16, 1 to 32 lanes a row of at most 2 KB."""
    _up_to(x, 2**11, "four vectors a lane of one warp")
    return _launch(kernels, "softmax_lanes", x)


@needs(90, "thread block clusters")
def softmax_cluster(x):
    """[M, N] -> [M, N] float32 or bfloat16, 2 to 8 blocks per row of at most 512 KB."""
    _up_to(x, 2**19, "all that the registers of 8 blocks hold")
    return _launch(kernels, "softmax_cluster", x)


def softmax(x):
    """[M, N] -> [M, N] float32 or bfloat16, for every M and N, each row length by the rung that suits it."""
    return _launch(kernels, "softmax", x)


def _launch(module, name, x):
    expect(x=x, ndim=2, dtypes=DTYPES, contiguous=True)
    y = torch.empty_like(x)
    getattr(module, f"{name}_{str(x.dtype).removeprefix('torch.')}")(x, y, *x.shape)
    return y


def _up_to(x, most, why):
    if x.ndim == 2 and x.shape[1] * x.element_size() > most:
        raise Unsupported(f"rows past {most // 1024} KB: {why}")


def _whole(kernel, *claims):
    """Claims of the instances for rows that are whole vectors; the others go element by element, and may spill."""
    return tuple(f"{kernel}<{dtype}, true>: {claim}" for dtype in ("float", "__nv_bfloat16") for claim in claims)


WHOLE = tuple(each for each in PROBLEM.checks if "pad" not in each.shape)  # rows one behind the other
REFUSES = (
    Refusal("a transposed matrix", lambda f: f(inputs(8, 7)[0].t()), ValueError, "contiguous"),
    Refusal("half precision", lambda f: f(inputs(2, 8)[0].half()), TypeError, "x is torch.float16"),
    Refusal("gradient lost", lambda f: f(inputs(2, 8)[0].requires_grad_()), ValueError, "requires grad"),
)


# fmt: off
LESSON = Lesson(
    about=About(
        teaches="rows in registers, in a few lanes, in a cluster of blocks",
        hours=1,
        operator="softmax",
        language="CUDA C++",
        pictures=("row_on_chip",),
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=(softmax_registers, softmax_lanes, softmax_cluster, softmax),
    predicted=(
        Prediction(rung=softmax_registers, at={"M": 8192, "N": 8192}, percent_of_limit=100),
        Prediction(rung=softmax_lanes, at={"M": 32768, "N": 256}, percent_of_limit=100),
        Prediction(rung=softmax_cluster, at={"M": 2048, "N": 131072}, percent_of_limit=(80, 95)),
        Prediction(rung=softmax, at={"M": 4096, "N": 32768}, percent_of_limit=100),
    ),
    checks=(
        *WHOLE,
        case("a prime width: no vector is aligned, no lane count fits", M=7, N=127),
        case("two warps, ragged: their pairs meet in shared memory", M=3, N=1037, strange=True),
        case("past 8 KB in whole vectors", M=2, N=4104),
        case("past 64 KB: two chunks, the second ragged, half of the row -inf", M=3, N=17003, strange=True),
        case("one cluster of 8, and of 4 in 16 bits", gib=1, M=5, N=65536),
        case("past 512 KB", gib=1, M=3, N=262153),
        case("row offsets past 2^31, in a block", gib=120, M=262145, N=8200),
        case("and in a cluster", gib=120, M=65537, N=32776),
        case("whole vectors, on which bytes and requests are counted", M=32, N=256),
    ),
    wrong=(
        Mutant("padding counts as 0", "softmax_registers_kernel", "-INFINITY", "0.0f", "softmax_registers"),
        Mutant("pairs read before they are there", "softmax_registers_kernel", "    __syncthreads();\n", "",
               "softmax_registers", "race"),
        Mutant("each lane keeps its own maximum", "pair_of", "m = lanes_max<LANES>(m);", "", "softmax_lanes"),
        Mutant("rows past M are read", "softmax_lanes_kernel", "row < M ? vectors : 0", "vectors", "softmax_lanes",
               "out of bounds"),
        Mutant("float4 wherever a row begins", "whole_vectors", "n % VEC<T> == 0 && ", "", "softmax_lanes",
               "misaligned"),
        Mutant("a warp is forgotten", "merge_all", "i < count", "i < count - 1", "softmax_registers"),
        Mutant("chunks replace each other", "softmax_rest_kernel", "merge(pair, pair_of<T>(v))", "pair_of<T>(v)",
               "softmax"),
        Mutant("the other blocks' pairs are left out", "softmax_cluster_kernel", "merge_all(pairs, parts * warps)",
               "merge_all(pairs, warps)", "softmax_cluster", "nan"),  # of a row whose first block has -inf alone
    ),
    claims={
        "softmax_registers_kernel": _whole("softmax_registers_kernel", "16-byte loads", "16-byte stores", "no spills"),
        "softmax_lanes_kernel": ("16-byte loads", "16-byte stores", "no spills", "no shared memory"),
        "softmax_cluster_kernel": _whole("softmax_cluster_kernel", "no spills"),
    },
    passes={softmax_registers: 1, softmax_lanes: 1, softmax: 1},
    counts={softmax_registers: {"sectors a request": 16}, softmax_lanes: {"sectors a request": 16, "barriers": 0}},
    refuses=REFUSES,
    dtypes=DTYPES,
)
# fmt: on

if __name__ == "__main__":
    LESSON.main()
