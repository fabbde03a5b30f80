"""Prefix sums in one pass: decoupled look-back
===============================================
The kernels and their predictions are in 09_scan_one_pass.cu. This file wraps them as functions of tensors and checks
them against torch.cumsum. How one block scans is in 08_scan.

Run it:    python3 course.py run 09_scan_one_pass
Check it:  python3 course.py check 09_scan_one_pass
Time it:   python3 course.py bench 09_scan_one_pass
"""

from lessonkit import DEVICE, About, Lesson, Mutant, Prediction, Refusal, case, cuda, expect

import torch

from problems.scan import PROBLEM, inputs, wraps_around

kernels = cuda.extension(__file__)  # 09_scan_one_pass.cu, built at the first call
SUFFIX = {torch.float32: "float", torch.int32: "int"}


def propagate(x):
    """[n] -> [n] float32 or int32: scan tiles, scan their sums, add those: 4n of traffic."""
    return _scan(kernels, "propagate", x)


def reduce_then_scan(x):
    """[n] -> [n] float32 or int32: sum tiles, scan the sums, scan tiles from there: 3n of traffic."""
    return _scan(kernels, "reduce_then_scan", x)


def look_back(x):
    """[n] -> [n] float32 or int32 in one pass, 2n of traffic. The last bits of float sums may differ between runs."""
    with cuda.together():
        return _scan(kernels, "look_back", x)


def _scan(kernels, name, x):
    expect(x=x, ndim=1, dtypes=list(SUFFIX), contiguous=True)
    y = torch.empty_like(x)
    scratch = torch.empty(x.numel() // 512 + 1024, dtype=x.dtype, device=x.device)
    getattr(kernels, f"{name}_{SUFFIX[x.dtype]}")(x, y, scratch, scratch.numel(), x.numel())
    return y


def _cub(x):
    if DEVICE.type != "cuda":
        raise ImportError("CUB needs nvcc and a GPU")
    return _scan(kernels, "cub", x)


LARGE = {"n": 2**28}

LESSON = Lesson(
    about=About(
        teaches="blocks that wait for blocks: decoupled look-back, fences",
        hours=1.5,
        operator="scan",
        language="CUDA C++",
        pictures=("look_back", "traffic"),
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=(propagate, reduce_then_scan, look_back),
    predicted=(
        Prediction(rung=propagate, at=LARGE, percent_of_limit=50),
        Prediction(rung=reduce_then_scan, at=LARGE, times=1.33, over=propagate),
        Prediction(rung=look_back, at=LARGE, times=(1.2, 1.5), over=reduce_then_scan),
    ),
    checks=(
        *PROBLEM.checks,
        case("35 tiles and a tail: more than one window to look back over", n=35 * 8192 + 1021),
        case("three levels of sums", gib=1, n=2**24 + 4097),
        case("offsets past 2^31", gib=60, n=2**31 + 1),
        case("whole tiles, on which requests are counted", n=16 * 4096),
    ),
    wrong=(
        Mutant("a SUM taken for a PREFIX", "look_back", "== PREFIX)", "!= EMPTY)", "look_back"),
        Mutant("the nearest predecessor forgotten", "look_back", "last = tile - 1", "last = tile - 2", "look_back"),
        Mutant(
            "lanes past the nearest prefix counted too",
            "look_back",
            "known & (prefix ^ (prefix - 1));",
            "known;",
            "look_back",
        ),
        Mutant(
            "the prefix without the tile itself",
            "look_back_kernel",
            "PREFIX, prefix + tile_sum",
            "PREFIX, prefix",
            "look_back",
        ),
        Mutant(
            "no barrier before the prefix is read",
            "look_back_kernel",
            "    __syncthreads();\n    part.store",
            "    part.store",
            "look_back",
            "race",
        ),
        Mutant(
            "words of the last scan in scratch",
            "look_back_with",
            "    CUDA_CHECK(cudaMemsetAsync(words, 0, size_t(tiles) * sizeof(Word), stream));\n",
            "",
            "look_back",
            "nan",
        ),
        Mutant("the first tile's sum added to itself", "add_kernel", "sums[tile - 1]", "sums[tile]", "propagate"),
        Mutant("the prefix itself is left out", "look_back", "(prefix ^ (prefix - 1))", "(prefix - 1)", "look_back"),
        Mutant(
            "a tile's own sum in its prefix",
            "scan_from_kernel",
            "sums[blockIdx.x - 1]",
            "sums[blockIdx.x]",
            "reduce_then_scan",
        ),
    ),
    properties=(*PROBLEM.properties, wraps_around),
    peers=PROBLEM.peers | {"CUB": _cub},
    claims={
        "propagate_kernel": ("16-byte loads", "16-byte stores", "no spills"),
        "reduce_kernel": ("16-byte loads", "no spills"),
        "look_back_kernel": ("16-byte loads", "16-byte stores", "no spills"),
    },
    passes={propagate: 2.0, reduce_then_scan: 1.5, look_back: 1.0},
    refuses=(
        *PROBLEM.refuses,
        Refusal("half precision", lambda f: f(inputs(8)[0].half()), TypeError, "x is torch.float16"),
    ),
    dtypes=(torch.float32, torch.int32),
)

if __name__ == "__main__":
    LESSON.main()
