"""ThunderKittens: a matmul at the speed of cuBLAS from a tile library
===================================================================
ThunderKittens is a C++ library of headers: tiles in registers, shared and global memory, and what warps do to them. The
kernels of this lesson and their predictions are in lesson14_thunderkittens_matmul.cu. They are a plain loop, wgmma, TMA
with two buffers, a producer and two consumers, the library's load-compute-store-finish template, and that template's
loop written out. Lesson 13 builds the first third of such a library, and cuda_src/22 and 23 are the same ladder without
one. The mark to reach is cuBLAS. M = N = K = 4096 is 137 GFLOP: 0.17 to 0.2 ms at the 700 to 800 TFLOP/s that an H200
sustains.

Get it. Version 2 is headers only: nothing is installed. `source env.src; python setup.py install` belongs to the first
version and fails today. The package "kittens" is unrelated:

    git clone https://github.com/HazyResearch/ThunderKittens
    git -C ThunderKittens checkout 0b55588d2769dde0c7a9a606ffc015b0ca7a9551  # what this lesson was written with
    export THUNDERKITTENS_ROOT=$PWD/ThunderKittens          # `python3 course.py doctor` says whether it is found

nvcc gets two include folders, -DKITTENS_HOPPER and -arch=sm_90a (the line stands at the top of the .cu). Its own
kernels are built by `make` in their folders under kernels/.

Inputs past its limits give no error, so the launchers take care of them. A tensor map takes a matrix's columns in
panels of 64. A last panel that is not whole reads and overwrites the start of the next row, so K and N are padded to
multiples of 64. Rows need no padding: a tile's rows past the matrix arrive as zeros and are not stored. Tiles that
threads load and store have a mask for rows and none for columns. Register tiles stored straight to memory have no mask
at all. So the first two rungs pad N to 128.

You will learn: what a tile library does for you, what it leaves to you (all synchronisation), how to read its template.
Run it:    python3 course.py run lesson14_thunderkittens_matmul
Check it:  python3 course.py check lesson14_thunderkittens_matmul         a Hopper GPU; without one, the next line
Read it:   python3 course.py compile lesson14_thunderkittens_matmul       registers and instructions, no GPU needed
"""

from lessonkit import About, Lesson, Mutant, Prediction, case, cuda, needs

from problems.matmul import PROBLEM_BF16, multiply_padded

kernels = cuda.extension(__file__)  # lesson14_thunderkittens_matmul.cu, built at the first call
PANEL = 64  # columns


@needs(90, "ThunderKittens as built for Hopper", only=True)
def matmul_loop(a, b):
    """[M, K], [K, N] -> [M, N] bfloat16, both contiguous: a loop over tiles, mma.sync from registers."""
    return multiply_padded(kernels, "matmul_loop", a, b, PANEL, 2 * PANEL)


@needs(90, "ThunderKittens, wgmma", only=True)
def matmul_wgmma(a, b):
    """As matmul_loop; wgmma reads both tiles from shared memory."""
    return multiply_padded(kernels, "matmul_wgmma", a, b, PANEL, 2 * PANEL)


@needs(90, "ThunderKittens, TMA and wgmma", only=True)
def matmul_double_buffer(a, b):
    """As matmul_wgmma; TMA loads the next pair of tiles meanwhile."""
    return multiply_padded(kernels, "matmul_double_buffer", a, b, PANEL, PANEL)


@needs(90, "ThunderKittens, TMA and wgmma", only=True)
def matmul_specialized(a, b):
    """A producer and two consumers around a ring of four stages, a tile of 128 x 256."""
    return multiply_padded(kernels, "matmul_specialized", a, b, PANEL, PANEL)


@needs(90, "ThunderKittens, TMA and wgmma", only=True)
def matmul_template(a, b):
    """As matmul_specialized, by the library's load-compute-store-finish template, persistent."""
    return multiply_padded(kernels, "matmul_template", a, b, PANEL, PANEL)


@needs(90, "ThunderKittens, TMA and wgmma", only=True)
def matmul_persistent(a, b):
    """As matmul_template; its loops are written out so that the consumers do not wait for each other."""
    return multiply_padded(kernels, "matmul_persistent", a, b, PANEL, PANEL)


LARGE = {"M": 8192, "N": 8192, "K": 8192}

LESSON = Lesson(
    about=About(
        teaches="the ladder in ThunderKittens ([.cu](lesson14_thunderkittens_matmul.cu)), from a plain loop to "
        "its template and past it",
        hours=1.5,
        star=True,
        operator="matmul",
        language="ThunderKittens",
        pictures=("kittens_tiles", "kittens_ends"),
    ),
    problem=PROBLEM_BF16,
    extension=kernels,
    rungs=(matmul_loop, matmul_wgmma, matmul_double_buffer, matmul_specialized, matmul_template, matmul_persistent),
    predicted=(
        Prediction(rung=matmul_loop, at=LARGE, tflop_per_s=(100, 250)),
        Prediction(rung=matmul_wgmma, at=LARGE, tflop_per_s=(250, 400)),
        Prediction(rung=matmul_double_buffer, at=LARGE, tflop_per_s=(500, 600)),
        Prediction(rung=matmul_specialized, at=LARGE, tflop_per_s=(600, 700)),
        Prediction(rung=matmul_template, at=LARGE, tflop_per_s=(650, 750)),
        Prediction(rung=matmul_persistent, at=LARGE, times=1.02, over=matmul_template),
    ),
    checks=(
        *PROBLEM_BF16.checks,
        case("nothing is a multiple of anything", M=67, N=37, K=41),
        case("one past a tile down, one panel of four across", M=129, N=64, K=64),
        case("tiles that hang over: 1 of 2 halves, 5 of 8 panels", M=192, N=320, K=192),
        case("more steps than stages, twice round, tails everywhere", M=391, N=777, K=1111),
        case("17 tiles down: a group of 16 and one of 1", gib=1, M=2060, N=600, K=128),
        case("more tiles than SMs: the grid comes round, and again", gib=1, M=3001, N=5003, K=136),
    ),
    wrong=(
        Mutant(
            "both consumers multiply the same rows",
            "load_stage",
            "CONSUMERS * row + i",
            "CONSUMERS * row",
            "matmul_persistent",
        ),
        Mutant("panels that overlap", "store_panels", "N / 64 * col + i", "col + i", "matmul_specialized", "nan"),
        Mutant(
            "both warpgroups store the upper half",
            "loop_kernel",
            "2 * row + half, col",
            "2 * row, col",
            "matmul_loop",
            "nan",
        ),
        Mutant(
            "the last group as high as the others", "place", "rest % rows", "rest % GROUP", "matmul_persistent", "nan"
        ),
        Mutant(
            "sums go on into the next tile",
            "multiply_stages",
            "warpgroup::mm_AB",
            "warpgroup::mma_AB",
            "matmul_persistent",
            "value or nan",
        ),
        Mutant("a tile too few", "MatmulTemplate", "task >= ", "task + 1 >= ", "matmul_template", "nan"),
        Mutant(
            "always the first buffer's rows of b",
            "double_buffer_kernel",
            "s.b[step % 2]);",
            "s.b[0]);",
            "matmul_double_buffer",
        ),
        Mutant(
            "both warpgroups multiply the upper half",
            "wgmma_kernel",
            "a_smem[half], b_smem);",
            "a_smem[0], b_smem);",
            "matmul_wgmma",
        ),
    ),
    claims={
        "loop_kernel": ("mma", "16-byte loads", "no spills"),
        "wgmma_kernel": ("wgmma", "16-byte loads", "no spills"),
        "double_buffer_kernel": ("wgmma", "tma", "no spills"),
        "specialized_kernel": ("wgmma", "tma", "no spills"),
        "kernel": ("wgmma", "tma", "no spills"),  # the template's
        "persistent_kernel": ("wgmma", "tma", "no spills"),
    },
)


if __name__ == "__main__":
    LESSON.main()
