"""Softmax in CUDA C++ at every row length: a row is read once
===========================================================
The kernels and what they predict are in 09b_softmax_lengths.cu: a row stays in the registers of a block, of a few
lanes, of a cluster of blocks. The cluster is no part of the emulator: it runs on an sm_90 GPU and is compiled anywhere.

Run it:    python cuda_src/09b_softmax_lengths.py
Check it:  python -m lessonkit check 09b_softmax_lengths
Time it:   python -m lessonkit bench 09b_softmax_lengths
"""

from importlib import import_module

from lessonkit import Lesson, Mutant, Unsupported, case, cuda, needs

first = import_module("cuda_src.09_softmax")
kernels = cuda.extension(__file__)  # 09b_softmax_lengths.cu, built at the first call


def softmax_registers(x):
    """[M, N] -> [M, N] float32 or bfloat16, one block a row of at most 64 KB."""
    _up_to(x, 2**16, "all that the registers of one block hold")
    return first._launch(kernels, "softmax_registers", x)


def softmax_lanes(x):
    """[M, N] -> [M, N] float32 or bfloat16, 1 to 32 lanes a row of at most 2 KB."""
    _up_to(x, 2**11, "four vectors a lane of one warp")
    return first._launch(kernels, "softmax_lanes", x)


@needs(90, "thread block clusters")
def softmax_cluster(x):
    """[M, N] -> [M, N] float32 or bfloat16, 2 to 8 blocks a row of at most 512 KB."""
    _up_to(x, 2**19, "all that the registers of 8 blocks hold")
    return first._launch(kernels, "softmax_cluster", x)


def softmax(x):
    """[M, N] -> [M, N] float32 or bfloat16, for every M and N, each row length by the rung that suits it."""
    return first._launch(kernels, "softmax", x)


def _up_to(x, most, why):
    if x.ndim == 2 and x.shape[1] * x.element_size() > most:
        raise Unsupported(f"rows past {most // 1024} KB: {why}")


def _whole(kernel, *claims):
    """Claims of the instances for rows that are whole vectors; the others go element by element, and may spill."""
    return tuple(f"{kernel}<{dtype}, true>: {claim}" for dtype in ("float", "__nv_bfloat16") for claim in claims)


# fmt: off
LESSON = Lesson(
    reference=first.reference,
    inputs=first.inputs,
    extension=kernels,
    rungs=(softmax_registers, softmax_lanes, softmax_cluster, softmax),
    checks=(
        case("no rows", M=0, N=5),
        case("no columns", M=5, N=0),
        case("a row of one: a lane a row, in fp32 four rows share 16 bytes", M=17, N=1),
        case("a prime width: no vector is aligned, no lane count fits", M=7, N=127),
        case("whole vectors, the last lanes without one; half a row of -inf", M=5, N=120, strange=True),
        case("two warps, ragged: their pairs meet in shared memory", M=3, N=1037, strange=True),
        case("past 8 KB in whole vectors", M=2, N=4104),
        case("past 64 KB: two chunks, the second ragged, half of the row -inf", M=3, N=17003, strange=True),
        case("one cluster of 8, and of 4 in 16 bits", gib=1, M=5, N=65536),
        case("past 512 KB", gib=1, M=3, N=262153),
        case("row offsets past 2^31, in a block", gib=120, M=262145, N=8200),
        case("and in a cluster", gib=120, M=65537, N=32776),
        case("whole vectors, on which bytes and requests are counted", M=32, N=256),
    ),
    benches=tuple({"M": m, "N": n} for m, n in first.SHAPES),
    work=first._work,
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
    ),
    peers=first.PEERS,
    claims={
        "softmax_registers_kernel": _whole("softmax_registers_kernel", "16-byte loads", "16-byte stores", "no spills"),
        "softmax_lanes_kernel": ("16-byte loads", "16-byte stores", "no spills", "no shared memory"),
        "softmax_cluster_kernel": _whole("softmax_cluster_kernel", "no spills"),
    },
    passes={softmax_registers: 1, softmax_lanes: 1, softmax: 1},
    counts={softmax_registers: {"sectors a request": 16}, softmax_lanes: {"sectors a request": 16, "barriers": 0}},
    properties=(first.sums_and_shifts, first.strange_numbers),
    refuses=first.REFUSES,
    dtypes=first.DTYPES,
)
# fmt: on

if __name__ == "__main__":
    LESSON.main()
