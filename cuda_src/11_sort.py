"""Sorting 32-bit keys: bitonic networks, then radix sort
==========================================================
The kernels and their predictions are in 11_sort.cu. This file wraps them as functions of tensors and checks them
against torch.sort. The fast one is 12_onesweep.

Run it:    python3 course.py run 11_sort
Check it:  python3 course.py check 11_sort
Time it:   python3 course.py bench 11_sort
"""

from lessonkit import About, Lesson, Mutant, Prediction, case, cuda, expect

import torch

from problems.sort import PROBLEM

kernels = cuda.extension(__file__)  # 11_sort.cu, built at the first call
FLIP = {torch.int32: 1 << 31, torch.uint32: 0}  # inverted, the sign bit orders negative numbers before the others


def bitonic(keys):
    """[n] -> [n] int32 or uint32, ascending; log2(n) (log2(n) + 1) / 2 steps, each through all of memory."""
    return _sort(kernels, "bitonic", keys)


def bitonic_shared(keys):
    """[n] -> [n] int32 or uint32, ascending; the steps within 2048 keys take place in shared memory."""
    return _sort(kernels, "bitonic_shared", keys)


def radix(keys):
    """[n] -> [n] int32 or uint32, ascending; four digits, three kernels each: count, scan, scatter."""
    return _sort(kernels, "radix", keys)


def _sort(kernels, name, keys):
    expect(keys=keys, ndim=1, dtypes=list(FLIP), contiguous=True)
    out = torch.empty_like(keys)
    scratch = torch.empty(2 * keys.numel() + 16384, dtype=torch.int32, device=keys.device)
    getattr(kernels, name)(keys, out, scratch, scratch.numel(), keys.numel(), FLIP[keys.dtype])
    return out


LARGE = {"n": 2**26}

LESSON = Lesson(
    about=About(
        teaches="bitonic networks, then radix sort: fewer passes over memory",
        hours=1.5,
        star=True,
        operator="sort",
        language="CUDA C++",
        pictures=("bitonic",),
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=(bitonic, bitonic_shared, radix),
    predicted=(
        Prediction(rung=bitonic, at=LARGE, ms=45),
        Prediction(rung=bitonic_shared, at=LARGE, ms=17, why="The steps within shared memory were counted as free."),
        Prediction(
            rung=radix,
            at=LARGE,
            ms=0.8,
            why="The 32 keys of a warp go to up to 32 sectors, so the writes move far more than the 4 bytes of "
            "each key.",
        ),
    ),
    checks=(*PROBLEM.checks, case("whole tiles, on which requests are counted", n=4096)),
    benches=PROBLEM.benches[:-1],  # 2^28 keys would take the bitonic network most of a second
    wrong=(
        Mutant("compares past the end", "bitonic_step_kernel", "right < n", "right <= n", "bitonic", "out of bounds"),
        Mutant("no mirror image in the first step", "long_steps", "half == run / 2", "false", "bitonic"),
        Mutant("stops when runs of n / 2 are sorted", "bitonic", "run < 2 * n", "run < n", "bitonic"),
        Mutant(
            "missing keys are small",
            "bitonic_tile_kernel",
            ": ~flip",
            ": flip",
            "bitonic_shared",
        ),
        Mutant(
            "no barrier between steps",
            "bitonic_tile_kernel",
            "half /= 2) {\n            __syncthreads();",
            "half /= 2) {",
            "bitonic_shared",
            "race",
        ),
        Mutant("the sign is a number", "compare_exchange", "(a ^ flip) > (b ^ flip)", "a > b", "bitonic_shared"),
        Mutant(
            "ranks within a warp only: the warps' keys fall on one another",
            "scatter_kernel",
            "place += count;",
            "",
            "radix",
            "race",
        ),
        Mutant(
            "no barrier before the warps' counts are read",
            "scatter_kernel",
            "flip);\n    __syncthreads();\n    unsigned place",
            "flip);\n    unsigned place",
            "radix",
            "race",
        ),
        Mutant(
            "missing keys written too", "scatter_kernel", "+ tile.place(k) < n", "+ 0 < n", "radix", "out of bounds"
        ),
    ),
    claims={
        "bitonic_step_kernel": ("no spills", "no shared memory"),
        "bitonic_tile_kernel": ("no spills",),
        "scatter_kernel": ("no spills",),
    },
)

if __name__ == "__main__":
    LESSON.main()
