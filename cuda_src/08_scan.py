"""Prefix sums inside a block: Hillis-Steele, Blelloch, warp shuffles
=====================================================================
The kernels and their predictions are in 08_scan.cu. This file wraps them as functions of tensors and checks them
against torch.cumsum. How to scan across blocks in one pass is in 09_scan_one_pass.

Run it:    python3 course.py run 08_scan
Check it:  python3 course.py check 08_scan
Time it:   python3 course.py bench 08_scan
"""

from lessonkit import About, Lesson, Mutant, Prediction, Refusal, case, cuda, expect

import torch

from problems.scan import PROBLEM, inputs, same_bits, wraps_around

kernels = cuda.extension(__file__)  # 08_scan.cu, built at the first call
SUFFIX = {torch.float32: "float", torch.int32: "int"}


def hillis_steele(x):
    """[n] -> [n] float32 or int32: each step adds the neighbour twice as far to the left, 10 n adds in a block."""
    return _scan("hillis_steele", x)


def blelloch(x):
    """[n] -> [n] float32 or int32: up a tree and down again, 2 n adds, with bank conflicts."""
    return _scan("blelloch", x)


def blelloch_padded(x):
    """[n] -> [n] float32 or int32: the same tree with an unused word after every 32."""
    return _scan("blelloch_padded", x)


def shuffle(x):
    """[n] -> [n] float32 or int32: from register to register within a warp, one barrier a block."""
    return _scan("shuffle", x)


def _scan(name, x):
    expect(x=x, ndim=1, dtypes=list(SUFFIX), contiguous=True)
    y = torch.empty_like(x)
    scratch = torch.empty(x.numel() // 512 + 64, dtype=x.dtype, device=x.device)
    getattr(kernels, f"{name}_{SUFFIX[x.dtype]}")(x, y, scratch, scratch.numel(), x.numel())
    return y


LARGE = {"n": 2**28}

LESSON = Lesson(
    about=About(
        teaches="Hillis-Steele, Blelloch, shuffles: work against steps against conflicts",
        hours=1.25,
        star=True,
        operator="scan",
        language="CUDA C++",
        pictures=("block_scan",),
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=(hillis_steele, blelloch, blelloch_padded, shuffle),
    predicted=(
        Prediction(
            rung=hillis_steele,
            at=LARGE,
            ms=1.7,
            why="One load of 4 bytes per thread does not keep memory busy: shuffle, with hardly any work in shared "
            "memory, takes about twice its 4n too.",
        ),
        Prediction(
            rung=blelloch,
            at=LARGE,
            ms=2.1,
            why="As in hillis_steele; and the count of wavefronts has no time for the waits at 22 barriers, after "
            "most of which a few warps work alone.",
        ),
        Prediction(
            rung=blelloch_padded,
            at=LARGE,
            ms=1.4,
            why="As in hillis_steele; and the padded indices more than double the kernel's instructions (see "
            "reports/compiled).",
        ),
        Prediction(
            rung=shuffle,
            at=LARGE,
            ms=1.02,
            why="A thread loads one element, so an SM has 8 KB in flight where Little's law wants 25 KB; and no "
            "byte is asked for while a block scans.",
        ),
    ),
    checks=(
        *PROBLEM.checks,
        case("nine blocks and a tail", n=9 * 1024 + 7),
        case("three levels of sums", gib=1, n=2**22 + 1),
        case("offsets past 2^31", gib=60, n=2**31 + 1),
        case("whole blocks, on which requests are counted", n=32 * 1024),
    ),
    wrong=(
        Mutant("one thread too many", "shuffle_kernel", "i < n ? x[i]", "i <= n ? x[i]", "shuffle", "out of bounds"),
        Mutant("the last element is nobody's", "shuffle_kernel", "if (i < n) y", "if (i < n - 1) y", "shuffle", "nan"),
        Mutant(
            "no barrier before the warps' sums are read",
            "shuffle_kernel",
            "    __syncthreads();\n",
            "",
            "shuffle",
            "race",
        ),
        Mutant("always the same row", "hillis_steele_kernel", "now = 1 - now;", "", "hillis_steele"),
        Mutant("one step too few", "hillis_steele_kernel", "step < BLOCK", "step < BLOCK / 2", "hillis_steele"),
        Mutant(
            "no barrier going down",
            "blelloch_kernel",
            "stride > 0; stride /= 2) {\n        __syncthreads();",
            "stride > 0; stride /= 2) {",
            "blelloch",
            "race",
        ),
        Mutant("exclusive, not inclusive", "blelloch_kernel", "at(t) + x_low", "at(t)", "blelloch_padded"),
        Mutant(
            "padding forgotten in the allocation",
            "blelloch_kernel",
            "BLOCK + (PADDED ? BLOCK / 32 : 0)",
            "BLOCK",
            "blelloch_padded",
            "out of bounds",
        ),
        Mutant("sums not scanned", "add_offsets_kernel", "sums[blockIdx.x - 1]", "sums[blockIdx.x]", "shuffle"),
    ),
    properties=(*PROBLEM.properties, wraps_around, same_bits),
    claims={"hillis_steele_kernel": ("no spills",), "shuffle_kernel": ("no spills",)},
    passes={hillis_steele: 2.0, blelloch: 2.0, blelloch_padded: 2.0, shuffle: 2.0},
    refuses=(
        *PROBLEM.refuses,
        Refusal("half precision", lambda f: f(inputs(8)[0].half()), TypeError, "x is torch.float16"),
    ),
    dtypes=(torch.float32, torch.int32),
)

if __name__ == "__main__":
    LESSON.main()
