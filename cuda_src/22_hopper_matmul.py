"""Matmul on Hopper, first half: FMA, mma.sync, TMA and wgmma, warp specialization
===============================================================================
x @ w.T in bf16 with fp32 sums. The kernels and their predictions are in 22_hopper_matmul.cu. This file wraps them as
functions of tensors and checks them against PyTorch. On a GPU nvcc builds all of them. Elsewhere g++ builds FMA and
mma.sync, and the emulator watches every address, barrier and race. The rungs that need Hopper are compiled there, and
their machine code is checked.

Run it:    python3 course.py run 22_hopper_matmul
Check it:  python3 course.py check 22_hopper_matmul
Time it:   python3 course.py bench 22_hopper_matmul
"""

from lessonkit import About, Lesson, Mutant, Prediction, Unsupported, cuda, expect, needs

import torch
import torch.nn.functional as F

from problems.matmul_nt import PROBLEM

kernels = cuda.extension(__file__)  # 22_hopper_matmul.cu, built at the first call


def matmul_fma(x, w):
    """[M, K], [N, K] -> [M, N] bfloat16, tiles of 32 x 32 in shared memory, no tensor cores."""
    if x.ndim == w.ndim == 2 and x.shape[0] * w.numel() > 2**37:
        raise Unsupported("this rung would take seconds: it has no tensor cores")
    return _run("matmul_fma", x, w, 1)


def matmul_mma(x, w):
    """[M, K], [N, K] -> [M, N] bfloat16 by mma.sync; x and w are copied where K is no multiple of 8."""
    return _run("matmul_mma", x, w)


@needs(90, "TMA and wgmma", only=True)
def matmul_wgmma(x, w):
    """As matmul_mma, by TMA and wgmma; a block loads and multiplies one after the other."""
    return _run("matmul_wgmma", x, w)


@needs(90, "TMA and wgmma", only=True)
def matmul_specialized(x, w):
    """As matmul_wgmma, with a producer warp and two consumer warpgroups around a ring of 4 stages."""
    return _run("matmul_specialized", x, w)


def _run(name, x, w, multiple=8):
    _expect(x, w)
    k = x.shape[1]
    x, w = (_aligned(t, multiple) for t in (x, w))
    c = x.new_empty(x.shape[0], w.shape[0])
    getattr(kernels, name)(x, w, c, *c.shape, k + -k % multiple)
    return c


def _expect(x, w):
    """The checks of every rung."""
    expect(x=x, w=w, ndim=2, dtypes=[torch.bfloat16], contiguous=True)
    if x.shape[1] != w.shape[1]:
        raise ValueError(
            f"w has {w.shape[1]} columns, expected as many as x has: {x.shape[1]}; it is [N, K], not [K, N]"
        )


def _aligned(t, multiple):
    """The matrix, or a copy whose rows begin at multiples of 16 bytes: 16-byte copies and TMA know no others."""
    if t.shape[1] % multiple:
        return F.pad(t, (0, -t.shape[1] % multiple))  # zeros add nothing to a product
    return t.clone() if t.data_ptr() % (2 * multiple) else t


LARGE = {"M": 8192, "N": 8192, "K": 8192}

LESSON = Lesson(
    about=About(
        teaches="mma.sync, then TMA, mbarriers and wgmma, warp specialization",
        hours=1.75,
        operator="matmul",
        language="CUDA C++",
        pictures=("ring",),
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=(matmul_fma, matmul_mma, matmul_wgmma, matmul_specialized),
    predicted=(
        Prediction(
            rung=matmul_fma,
            at={"M": 4096, "N": 4096, "K": 4096},
            tflop_per_s=5.1,
            why="A thread has 4 elements of C, so one of the two words serves four FMAs, and fewer than two are "
            "read for each.",
        ),
        Prediction(rung=matmul_mma, at=LARGE, tflop_per_s=(300, 450)),
        Prediction(rung=matmul_wgmma, at=LARGE, tflop_per_s=(450, 600)),
        Prediction(rung=matmul_specialized, at=LARGE, tflop_per_s=(600, 700)),
    ),
    wrong=(
        Mutant(
            "multiplied before the tiles are whole",
            "matmul_fma_kernel",
            "__syncthreads();  // the tiles",
            "//",
            "matmul_fma",
            "race",
        ),
        Mutant(
            "overwritten while others multiply",
            "matmul_fma_kernel",
            "__syncthreads();  // and read",
            "//",
            "matmul_fma",
            "race",
        ),
        Mutant(
            "A's rows past the end", "matmul_fma_kernel", "row0 + i < m &&", "true &&", "matmul_fma", "out of bounds"
        ),
        Mutant(
            "the last column is nobody's",
            "matmul_fma_kernel",
            "col0 + x < n)",
            "col0 + x < n - 1)",
            "matmul_fma",
            "nan",
        ),
        Mutant("only the last tile counts", "matmul_fma_kernel", "sum[i] +=", "sum[i] =", "matmul_fma"),
        Mutant(
            "read before the copy has come",
            "matmul_mma_kernel",
            "__pipeline_wait_prior(1)",
            "__pipeline_wait_prior(2)",
            "matmul_mma",
            "uninitialised",
        ),
        Mutant(
            "the next copy into tiles in use",
            "matmul_mma_kernel",
            "__syncthreads();  // before",
            "//",
            "matmul_mma",
            "race",
        ),
        Mutant("K's tail from the next row", "copy_tile", "&& k0 + piece * 8 < k", "", "matmul_mma", "out of bounds"),
        Mutant("an odd row's pairs", "store_pair", "n % 2 == 0", "true", "matmul_mma", "out of bounds"),
        Mutant(
            "the lower 64 rows are the upper ones again",
            "matmul_wgmma_kernel",
            "a_from + half * DESCRIPTOR_64_ROWS",
            "a_from",
            "matmul_wgmma",
        ),
        Mutant(
            "both consumers multiply the same rows",
            "matmul_specialized_kernel",
            "tile_descriptor(s.a[0] + warpgroup * 64 * BK)",
            "tile_descriptor(s.a[0])",
            "matmul_specialized",
        ),
    ),
    claims={
        "matmul_fma_kernel": ("no spills",),
        "matmul_mma_kernel": ("mma", "cp.async", "no spills"),
        "matmul_wgmma_kernel": ("wgmma", "tma", "no spills"),
        "matmul_specialized_kernel": ("wgmma", "tma", "no spills"),
    },
    counts={matmul_fma: {"wavefronts a shared access": 1.0}, matmul_mma: {"wavefronts a shared load": 1.0}},
)

if __name__ == "__main__":
    LESSON.main()
