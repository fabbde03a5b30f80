"""Tiles: a small library of our own, and a matmul written in it
=============================================================
Lesson 1's kernel says `tl.dot(a, b, acc)` of whole tiles. In cuda_src/22 every lane is written out. ThunderKittens and
CuTe stand between the two: C++ types for tiles, whose layout belongs to the type. The header tiles.cuh is such a
library in 170 lines, made from four instructions. In lesson13_tiles.cu is a matmul in it, 12 lines long, next to the
same loop by hand.
Predicted: as many copies, ldmatrix, MMAs and stores, so the same time.

Read tiles.cuh first. Ask of each function: is it called by a lane, a warp or the block? Which line changes for another
layout? What can it not know? Then read v1 and v2 side by side, then what v3 and v4 change.

You will learn: register tiles, shared tiles and fragments. An abstraction whose sizes are known costs no instruction,
but it may cost time, and synchronisation stays outside of it.
Run it:    python3 course.py run lesson13_tiles
Check it:  python3 course.py check lesson13_tiles
Compare:   python3 course.py compile lesson13_tiles       tiles_kernel and by_hand_kernel, line by line
"""

from lessonkit import About, Lesson, Mutant, Prediction, Unsupported, case, compiled, cuda
from lessonkit.cuda import toolchain

from problems.matmul import PROBLEM_BF16, multiply_padded

kernels = cuda.extension(__file__)  # lesson13_tiles.cu, built at the first call
PIECE = 8  # elements: 16 bytes


def matmul_tiles(a, b):
    """[M, K], [K, N] -> [M, N] bfloat16, both contiguous: a plain loop over tiles."""
    return multiply_padded(kernels, "matmul_tiles", a, b, PIECE, PIECE)


def matmul_by_hand(a, b):
    """As matmul_tiles, without the library."""
    return multiply_padded(kernels, "matmul_by_hand", a, b, PIECE, PIECE)


def matmul_pipelined(a, b):
    """As matmul_tiles, with a ring of three stages."""
    return multiply_padded(kernels, "matmul_pipelined", a, b, PIECE, PIECE)


def matmul_wide(a, b):
    """As matmul_pipelined, 128 x 256 per block and 64 x 64 per warp, stored in pieces of 16 bytes."""
    return multiply_padded(kernels, "matmul_wide", a, b, PIECE, PIECE)


def the_library_costs_nothing(rung):
    """nvcc makes of v1 and of v2 equally many copies, ldmatrix, mma, barriers and stores, and registers within 4."""
    if why := toolchain.lacks("nvcc"):
        raise Unsupported(why)
    rows = [k for k in compiled.kernels(__name__) if k.rung in ("tiles_kernel", "by_hand_kernel")]
    for target in {row.target for row in rows}:
        one, two = (row for row in rows if row.target == target)
        for what in ("mma", "cp_async", "barriers", "spills", "shared", "load_bytes", "store_bytes"):
            assert getattr(one, what) == getattr(two, what), f"{what} on sm_{target}: {one} {two}"
        assert one.mma == 64, "4 x 4 products of 16 x 8 x 16 in each of 4 steps"
        assert abs(one.registers - two.registers) <= 4, f"{one.registers} and {two.registers} registers"


LARGE = {"M": 8192, "N": 8192, "K": 8192}

LESSON = Lesson(
    about=About(
        teaches="a tile library of 170 lines ([tiles.cuh](tiles.cuh)), a matmul in it "
        "([.cu](lesson13_tiles.cu)), and what it costs: no instruction, and up to 8% of the time",
        hours=0.75,
        star=True,
        operator="matmul",
        language="CUDA C++",
        pictures=("swizzle",),
    ),
    problem=PROBLEM_BF16,
    extension=kernels,
    rungs=(matmul_tiles, matmul_by_hand, matmul_pipelined, matmul_wide),
    predicted=(
        Prediction(
            rung=matmul_tiles,
            at=LARGE,
            tflop_per_s=(160, 240),
            why="The two blocks on an SM cover for each other better than assumed: one multiplies while the other "
            "waits.",
        ),
        Prediction(rung=matmul_by_hand, at=LARGE, times=1, over=matmul_tiles),
        Prediction(
            rung=matmul_pipelined,
            at=LARGE,
            tflop_per_s=480,
            why="Cause not found. It is not the wait for memory, since matmul_tiles without a ring is nearly as fast. "
            "It is not ldmatrix alone, since matmul_wide does two thirds as much and gains 15%. Nor is it the order of "
            "tiles, since 4096, where B stays in L2, is no faster.",
        ),
        Prediction(rung=matmul_wide, at=LARGE, times=(1, 1.33), over=matmul_pipelined),
    ),
    checks=(
        *PROBLEM_BF16.checks,
        case("nothing is a multiple of anything, K one past a step of 64", M=37, N=41, K=65),
        case("one past a tile down; K one piece short of a step", M=129, N=24, K=56),
        case("one piece past a tile across; as many steps as stages and one", M=20, N=136, K=200),
        case("whole tiles, on which accesses are counted", M=128, N=128, K=64),
        case("10 tiles down: a group of 8 and one of 2; two across", gib=1, M=1200, N=300, K=328),
    ),
    wrong=(
        Mutant("eight rows of B twice, eight never", "right", "lane % 16", "lane % 8", "matmul_wide"),
        Mutant("pieces of A lie unswizzled", "by_hand_kernel", "(at % 8 ^ (at / 8 & 7))", "(at % 8)", "matmul_by_hand"),
        Mutant(
            "read before all copies are there", "tiles_kernel", "__syncthreads();  // all", "//", "matmul_tiles", "race"
        ),
        Mutant(
            "the copy is not waited for",
            "pipelined_kernel",
            "tiles::wait<STAGES - 2>()",
            "tiles::wait<STAGES - 1>()",
            "matmul_pipelined",
            "uninitialised",
        ),
        Mutant("rows past the end", "Matrix", "row < rows && ", "", "matmul_tiles", "out of bounds"),
        Mutant(
            "C is laid down while others read the ring",
            "pipelined_kernel",
            "__syncthreads();  // no thread",
            "//",
            "matmul_wide",
            "race",
        ),
        Mutant(
            "left and right eight columns of A change places", "left", "lane / 16", "1 - lane / 16", "matmul_pipelined"
        ),
    ),
    properties=(*PROBLEM_BF16.properties, the_library_costs_nothing),
    claims={
        "tiles_kernel": ("mma", "cp.async", "no spills"),
        "by_hand_kernel": ("mma", "cp.async", "no spills"),
        "pipelined_kernel": ("mma", "cp.async", "no spills"),
    },
    counts={rung: {"wavefronts a shared load": 1} for rung in (matmul_tiles, matmul_by_hand, matmul_pipelined)},
)


if __name__ == "__main__":
    LESSON.main()
