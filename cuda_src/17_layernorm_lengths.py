"""LayerNorm in CUDA C++ at every row length: x is read once, w and b from the caches
==================================================================================
The kernels and their predictions are in 17_layernorm_lengths.cu. A row stays in the registers of a block, of a few
lanes, or of a cluster of blocks. The emulator has no clusters: those rungs run on an sm_90 GPU and are compiled
anywhere.

Run it:    python3 course.py run 17_layernorm_lengths
Check it:  python3 course.py check 17_layernorm_lengths
Time it:   python3 course.py bench 17_layernorm_lengths
"""

import math

from lessonkit import About, Lesson, Mutant, Prediction, Refusal, Unsupported, case, cuda, expect, needs

import torch

from problems.layer_norm import EPS, PROBLEM, inputs

kernels = cuda.extension(__file__)  # 17_layernorm_lengths.cu, built at the first call
DTYPES = (torch.float32, torch.bfloat16)


def layernorm_registers(x, w, b, eps=EPS):
    """x [M, N], w [N], b [N] -> y [M, N], mean [M] and rstd [M] in fp32; float32 or bfloat16, rows to 64 KB."""
    _up_to(x, 2**16)
    return _launch(kernels, "layernorm_registers", x, w, b, eps)


def layernorm_lanes(x, w, b, eps=EPS):
    """As layernorm_registers, 1 to 32 lanes a row of at most 2 KB."""
    _up_to(x, 2**11)
    return _launch(kernels, "layernorm_lanes", x, w, b, eps)


@needs(90, "thread block clusters")
def layernorm_cluster(x, w, b, eps=EPS):
    """As layernorm_registers, 2 to 8 blocks per row; rows that are a multiple of 16 bytes, to 512 KB."""
    _up_to(x, 2**19, whole=True)
    return _launch(kernels, "layernorm_cluster", x, w, b, eps)


def layernorm(x, w, b, eps=EPS):
    """As layernorm_registers for every M and N, each row length by the rung that suits it."""
    return _launch(kernels, "layernorm", x, w, b, eps)


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


def _up_to(x, most, whole=False):
    if x.ndim == 2 and x.shape[1] * x.element_size() > most:
        raise Unsupported(f"rows past {most // 1024} KB: more than this rung's registers hold")
    if whole and x.ndim == 2 and x.shape[1] * x.element_size() % 16:
        raise Unsupported("rows that are no multiple of 16 bytes: here every load and store is 16 aligned bytes")


def _whole(kernel, *claims):
    """Claims of the instances for rows that are whole vectors; the others go element by element, and may spill."""
    return tuple(f"{kernel}<{dtype}, true>: {claim}" for dtype in ("float", "__nv_bfloat16") for claim in claims)


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
        teaches="x read once at any length: registers, lanes, clusters",
        hours=1,
        operator="layernorm",
        language="CUDA C++",
        pictures=("row_on_chip",),
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=(layernorm_registers, layernorm_lanes, layernorm_cluster, layernorm),
    predicted=(
        Prediction(rung=layernorm_registers, at={"M": 8192, "N": 8192}, percent_of_limit=97),
        Prediction(rung=layernorm_lanes, at={"M": 32768, "N": 256}, percent_of_limit=100),
        Prediction(
            rung=layernorm_cluster,
            at={"M": 2048, "N": 131072},
            percent_of_limit=100,
            why="No block stores before the whole row has come, so an SM's loads and stores do not overlap.",
        ),
        Prediction(rung=layernorm, at={"M": 4096, "N": 32768}, percent_of_limit=90),
    ),
    checks=(
        *WHOLE,
        case("a prime width: no vector is aligned, no lane count fits", M=7, N=127),
        case("two warps, ragged", M=3, N=1037),
        case("two warps in whole vectors", M=5, N=1048),
        case("past 64 KB: two chunks, the second ragged", M=3, N=17003),
        case("one cluster of 8 in 32 bits, of 4 in 16", gib=1, M=300, N=65536),
        case("past 512 KB", gib=1, M=3, N=262147),
        case("row offsets past 2^31, in a block", gib=120, M=262145, N=8200),
        case("and in a cluster", gib=120, M=65537, N=32776),
        case("whole vectors, on which requests are counted", M=32, N=256),
    ),
    benches=PROBLEM.benches[::-1],
    wrong=(
        Mutant("the padding has a spread", "stats_of", "if (share.whole ? there > 0 : e < there) ", "",
               "layernorm_registers"),
        Mutant("parts read before they are there", "layernorm_registers_kernel", "    __syncthreads();\n", "",
               "layernorm_registers", "race"),
        Mutant("warps merged as if their means were equal", "merge_all",
               "(parts[i].x - mean) * (parts[i].x - mean) * parts[i].z", "0", "layernorm_registers"),
        Mutant("rows past M are read", "layernorm_lanes_kernel", "row < M ? vectors : 0", "vectors", "layernorm_lanes",
               "out of bounds"),
        Mutant("w for every vector is the first", "store_share", "load_constant(w, i, share)",
               "load_constant(w, share.first, share)", "layernorm_registers"),
        Mutant("chunks replace each other", "layernorm_rest_kernel", "mine = merge(mine, ",
               "mine = merge(Stats{0, 0, 0}, ", "layernorm"),
        Mutant("the other blocks' parts are left out", "layernorm_cluster_kernel",
               "merge_all(parts, blocks * warps, n)", "merge_all(parts, warps, n)", "layernorm_cluster"),
    ),
    claims={
        "layernorm_registers_kernel": (
            *_whole("layernorm_registers_kernel", "16-byte loads", "16-byte stores"),
            "layernorm_registers_kernel<__nv_bfloat16, true>: no spills",
        ),
        "layernorm_cluster_kernel": ("layernorm_cluster_kernel<__nv_bfloat16>: no spills",),
    },
    counts={layernorm_registers: {"sectors a load": 16}, layernorm_lanes: {"barriers": 0}},
    refuses=REFUSES,
    dtypes=DTYPES,
)
# fmt: on

if __name__ == "__main__":
    LESSON.main()
