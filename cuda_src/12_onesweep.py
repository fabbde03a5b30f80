"""Radix sort in one sweep a digit
===================================
The kernels and their predictions are in 12_onesweep.cu. This file wraps them as functions of tensors and checks them
against torch.sort. The basic radix sort is in 11_sort.

Run it:    python3 course.py run 12_onesweep
Check it:  python3 course.py check 12_onesweep
Time it:   python3 course.py bench 12_onesweep
"""

from lessonkit import DEVICE, About, Lesson, Mutant, Prediction, case, cuda, expect

import torch

from problems.sort import PROBLEM

kernels = cuda.extension(__file__)  # 12_onesweep.cu, built at the first call
FLIP = {torch.int32: 1 << 31, torch.uint32: 0}  # inverted, the sign bit orders negative numbers before the others


def radix_ordered(keys):
    """[n] -> [n] int32 or uint32, ascending; three kernels a digit, keys put in order within a tile before writing."""
    return _sort(kernels, "radix_ordered", keys)


def onesweep(keys):
    """[n] -> [n] int32 or uint32, ascending; one kernel a digit, 256 decoupled look-backs side by side."""
    with cuda.together():
        return _sort(kernels, "onesweep", keys)


def _sort(kernels, name, keys):
    expect(keys=keys, ndim=1, dtypes=list(FLIP), contiguous=True)
    out = torch.empty_like(keys)
    scratch = torch.empty(2 * keys.numel() + 16384, dtype=torch.int32, device=keys.device)
    getattr(kernels, name)(keys, out, scratch, scratch.numel(), keys.numel(), FLIP[keys.dtype])
    return out


def _cub(keys):
    if DEVICE.type != "cuda":
        raise ImportError("CUB needs nvcc and a GPU")
    return _sort(kernels, "cub", keys)


LARGE = {"n": 2**26}

LESSON = Lesson(
    about=About(
        teaches="keys put in order before they are written, look-back for 256 digits at once",
        hours=2,
        operator="sort",
        language="CUDA C++",
        pictures=("look_back",),
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=(radix_ordered, onesweep),
    predicted=(
        Prediction(rung=radix_ordered, at=LARGE, ms=(1.3, 2.3)),
        Prediction(rung=onesweep, at=LARGE, ms=(1.0, 1.7)),
        Prediction(rung=onesweep, at=LARGE, times=1.33, over=radix_ordered),
    ),
    checks=(
        *PROBLEM.checks,
        case("emulated: three whole tiles of onesweep, and a key", n=3 * 1536 + 1),
        case("counts that a look-back word cannot hold", gib=30, n=2**30 + 1),
        case("whole tiles, on which requests are counted", n=3 * 4096),
    ),
    wrong=(
        Mutant(
            "a COUNT taken for a SUM: tiles write over each other",
            "onesweep_kernel",
            "(word[k] & SUM) != 0",
            "word[k] != EMPTY",
            "onesweep",
            "race",
        ),
        Mutant(
            "a SUM without the tile itself: two tiles write to one place",
            "onesweep_kernel",
            "SUM | (before + count)",
            "SUM | before",
            "onesweep",
            "race",
        ),
        Mutant(
            "where the tile's digit begins is not taken off",
            "onesweep_kernel",
            "before - begin",
            "before",
            "onesweep",
            "out of bounds",
        ),
        Mutant(
            "no barrier before the warps' counts are added up",
            "order",
            "    __syncthreads();\n    unsigned count",
            "    unsigned count",
            "radix_ordered",
            "race",
        ),
        Mutant("missing keys written too", "write", "if (place < keys) ", "", "radix_ordered", "out of bounds"),
        Mutant(
            "the counts of other warps left out",
            "order",
            "            next += here;\n",
            "",
            "radix_ordered",
            "race",
        ),
        Mutant(
            "digits counted without their sign",
            "onesweep_with",
            "starts, n, flip);",
            "starts, n, 0);",
            "onesweep",
            "out of bounds",
        ),
        Mutant(
            "counts of the last sort in scratch",
            "onesweep_with",
            "    CUDA_CHECK(cudaMemsetAsync(starts, 0, zeros * sizeof(unsigned), stream));\n",
            "",
            "onesweep",
            "out of bounds",
        ),
        Mutant("the last pass is missing", "onesweep_with", "pass < PASSES; pass++", "pass < 2; pass++", "onesweep"),
    ),
    peers=PROBLEM.peers | {"CUB": _cub},
    claims={
        "histogram_kernel": ("no spills",),
        "ordered_kernel": ("no spills",),
    },
)

if __name__ == "__main__":
    LESSON.main()
