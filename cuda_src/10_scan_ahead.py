"""Prefix sums in one pass, the next tile under way
=================================================
The kernels and their predictions are in 10_scan_ahead.cu. This file wraps them as functions of tensors and checks them
against torch.cumsum. The look-back that they build on is in 09_scan_one_pass.

Run it:    python3 course.py run 10_scan_ahead
Check it:  python3 course.py check 10_scan_ahead
Time it:   python3 course.py bench 10_scan_ahead
"""

from lessonkit import DEVICE, About, Lesson, Mutant, Prediction, Refusal, case, cuda, expect

import torch

from problems.scan import PROBLEM, inputs, same_bits, wraps_around

kernels = cuda.extension(__file__)  # 10_scan_ahead.cu, built at the first call
SUFFIX = {torch.float32: "float", torch.int32: "int"}


def look_back_waves(x):
    """[n] -> [n] float32 or int32 in one pass, by persistent blocks; the same bits in every run."""
    return _scan(kernels, "look_back_waves", x)


def look_back_ahead(x):
    """[n] -> [n] float32 or int32 in one pass, the next tile loaded while this one is finished; the same bits."""
    return _scan(kernels, "look_back_ahead", x)


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


# fmt: off
LESSON = Lesson(
    about=About(
        teaches="persistent blocks; the next tile loaded while this one is finished; the same bits in every run",
        hours=1,
        operator="scan",
        language="CUDA C++",
        pictures=("look_back",),
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=(look_back_waves, look_back_ahead),
    predicted=(
        Prediction(
            rung=look_back_waves,
            at={"n": 2**28},
            percent_of_limit=80,
            why="All blocks wait for the slowest of their wave with no load in flight; look_back_ahead, which loads "
            "the next tile meanwhile, gets most of that time back.",
        ),
        Prediction(rung=look_back_ahead, at={"n": 2**28}, percent_of_limit=100),
    ),
    checks=(
        *PROBLEM.checks,
        case("emulated: a wave of 8 blocks, two of 4, and one element", n=8 * 1024 + 1),
        case("rounds enough to go around the ring, and a tail", n=21 * 1024 + 1021),
        case("the same on a GPU", gib=1, n=2**24 + 4097),
        case("more tiles than a round of 132 blocks, each of 16384", gib=1, n=5 * 132 * 16384 + 1),
        case("offsets past 2^31", gib=60, n=2**31 + 1),
        case("whole tiles, on which requests are counted", n=16 * 1024),
    ),
    wrong=(
        Mutant("the nearest predecessor forgotten", "window_sum", "k * 32 + 1;", "k * 32 + 2;", "look_back_waves"),
        Mutant("a window one tile too short", "window_sum", "back <= window", "back < window", "look_back_waves"),
        Mutant("a word read before it is there", "window_sum", "while (unsigned(word[k] >> 32) == EMPTY)",
               "while (false)", "look_back_waves"),
        Mutant("words of the last scan in scratch", "scan", "size_t(tiles) * sizeof(Word), stream", "0, stream",
               "look_back_waves", "nan"),
        Mutant("no barrier before the prefix is read", "waves_kernel", "        __syncthreads();\n", "",
               "look_back_waves", "race"),
        Mutant("no barrier before the warps' sums are read", "ahead_kernel", "        __syncthreads();\n", "",
               "look_back_ahead", "race"),
        Mutant("a tile taken before it has arrived", "ahead_kernel", "__pipeline_wait_prior(STAGES - 2);",
               "__pipeline_wait_prior(STAGES);", "look_back_ahead", "uninitialised"),
        Mutant("a slot filled before it is taken", "ahead_kernel", "fetch(round + STAGES);",
               "fetch(round + STAGES - 1);", "look_back_ahead", "uninitialised"),
    ),
    properties=(*PROBLEM.properties, wraps_around, same_bits),
    peers=PROBLEM.peers | {"CUB": _cub},
    claims={
        "waves_kernel": ("16-byte loads", "16-byte stores", "no spills"),
        "ahead_kernel": ("cp.async", "16-byte stores", "no spills"),
    },
    passes={look_back_waves: 1.0, look_back_ahead: 1.0},
    refuses=(
        *PROBLEM.refuses,
        Refusal("half precision", lambda f: f(inputs(8)[0].half()), TypeError, "x is torch.float16"),
    ),
    dtypes=tuple(SUFFIX),
)
# fmt: on

if __name__ == "__main__":
    LESSON.main()
