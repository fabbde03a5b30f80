"""ThunderKittens: a matmul at the speed of cuBLAS in words for tiles
==================================================================
A library of headers whose words are tiles in registers, shared and global memory and what warps do to them. The kernels
of this lesson, and what each predicts, are in lesson09_thunderkittens_matmul.cu: a plain loop, wgmma, the copy engine
with two buffers, a producer and two consumers, the library's load-compute-store-finish template, and that loop written
out. Lesson 8 builds the first third of such a library; cuda_src/13 and 13b are the same ladder without one. The bar is
cuBLAS: at M = N = K = 4096 137 GFLOP, at the 700 to 800 TFLOP/s that an H200 sustains 0.17 to 0.2 ms.

Get it. Version 2 is headers only: nothing is installed. `source env.src; python setup.py install`, which older
instructions (and the library's first version) have, no longer exists, and a package "kittens" is another thing. Today:

    git clone https://github.com/HazyResearch/ThunderKittens
    git -C ThunderKittens checkout 0b55588                  # what this lesson was written with, April 2026
    export THUNDERKITTENS_ROOT=$PWD/ThunderKittens          # `python -m lessonkit doctor` says whether it is found

nvcc gets two include folders, -DKITTENS_HOPPER and -arch=sm_90a (the line stands at the top of the .cu). Its own
kernels are built by `make` in their folders under kernels/.

Its limits give no error, so they are dealt with here. Tensor maps take a matrix's columns in panels of 64, and a last
panel that is not whole reads and overwrites the start of the next row: K and N are padded to multiples of 64. Rows need
not be: what a tile has below the last arrives as zeros and is not stored. Tiles loaded and stored by threads count rows
too but no columns at all, and register tiles stored straight to memory count nothing; the first two rungs pad N to 128.

You will learn: what a tile library takes from you and what it leaves (all the waiting); how to read its template.
Run it:    python day3_matmul_tk/lesson09_thunderkittens_matmul.py
Check it:  python -m lessonkit check lesson09_thunderkittens_matmul       a Hopper GPU; without one, the next line
Read it:   python -m lessonkit compile lesson09_thunderkittens_matmul     registers and instructions, no GPU needed
"""

from lessonkit import About, Lesson, Mutant, Prediction, case, cuda, needs

from problems.matmul import PROBLEM_BF16, multiply_padded

kernels = cuda.extension(__file__)  # lesson09_thunderkittens_matmul.cu, built at the first call
PANEL = 64  # columns


@needs(90, "ThunderKittens as built for Hopper", only=True)
def matmul_loop(a, b):
    """[M, K], [K, N] -> [M, N] bfloat16, both contiguous: a loop over tiles, mma.sync from registers."""
    return multiply_padded(kernels, "matmul_loop", a, b, PANEL, 2 * PANEL)


@needs(90, "ThunderKittens, wgmma", only=True)
def matmul_wgmma(a, b):
    """As matmul_loop, the warpgroups' matrix unit reading both tiles from shared memory."""
    return multiply_padded(kernels, "matmul_wgmma", a, b, PANEL, 2 * PANEL)


@needs(90, "ThunderKittens, TMA and wgmma", only=True)
def matmul_double_buffer(a, b):
    """As matmul_wgmma, the copy engine loading the next pair of tiles meanwhile."""
    return multiply_padded(kernels, "matmul_double_buffer", a, b, PANEL, PANEL)


@needs(90, "ThunderKittens, TMA and wgmma", only=True)
def matmul_specialized(a, b):
    """A producer and two consumers around a ring of four stages, a tile of 128 x 256."""
    return multiply_padded(kernels, "matmul_specialized", a, b, PANEL, PANEL)


@needs(90, "ThunderKittens, TMA and wgmma", only=True)
def matmul_template(a, b):
    """The same by the library's load-compute-store-finish template, on a grid that stays."""
    return multiply_padded(kernels, "matmul_template", a, b, PANEL, PANEL)


@needs(90, "ThunderKittens, TMA and wgmma", only=True)
def matmul_persistent(a, b):
    """As matmul_template, its loops written out so that the consumers do not wait for each other."""
    return multiply_padded(kernels, "matmul_persistent", a, b, PANEL, PANEL)


LARGE = {"M": 8192, "N": 8192, "K": 8192}

LESSON = Lesson(
    about=About(
        teaches="the ladder in ThunderKittens ([.cu](lesson09_thunderkittens_matmul.cu)), from a plain loop to "
        "its template and past it",
        hours=1.5,
        star=True,
        operator="matmul",
        language="ThunderKittens",
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
        Mutant("panels that overlap", "store_panels", "N / 64 * col + i", "col + i", "matmul_specialized"),
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
        ),
        Mutant("a tile too few", "MatmulTemplate", "task >= ", "task + 1 >= ", "matmul_template", "nan"),
        Mutant(
            "always the first buffer's rows of b",
            "double_buffer_kernel",
            "s.b[step % 2]);",
            "s.b[0]);",
            "matmul_double_buffer",
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
