"""Transpose in CUDA C++: coalescing, bank conflicts, padding, swizzling
=====================================================================
The kernels and their predictions are in 13_transpose.cu. This file wraps them as functions of tensors and checks them
against PyTorch. On a GPU nvcc builds the kernels. Elsewhere g++ builds them, and the emulator watches every address,
barrier and race. The counts at the end of this file, sectors a request and wavefronts a shared access, are the lesson.

Run it:    python3 course.py run 13_transpose
Check it:  python3 course.py check 13_transpose
Time it:   python3 course.py bench 13_transpose
"""

from lessonkit import About, Lesson, Mutant, Prediction, cuda, expect

import torch

from problems.transpose import PROBLEM

kernels = cuda.extension(__file__)  # 13_transpose.cu, built at the first call


def transpose_read(x):
    """[M, N] -> [N, M] float32, warps read along rows of x and write down columns of y."""
    return _launch("transpose_read", x)


def transpose_write(x):
    """[M, N] -> [N, M] float32, warps write along rows of y and read down columns of x."""
    return _launch("transpose_write", x)


def transpose_tile(x):
    """[M, N] -> [N, M] float32, tiles of 32 x 32 pass through shared memory, their columns through one bank."""
    return _launch("transpose_tile", x)


def transpose_padded(x):
    """[M, N] -> [N, M] float32, a tile's rows are 33 words apart."""
    return _launch("transpose_padded", x)


def transpose_swizzled(x):
    """[M, N] -> [N, M] float32, a tile's rows are permuted by XOR."""
    return _launch("transpose_swizzled", x)


def transpose_vectorized(x):
    """[M, N] -> [N, M] float32, 16 bytes an access where M, N and the address allow, else as transpose_swizzled."""
    return _launch("transpose_vectorized", x)


def transpose_down(x):
    """[M, N] -> [N, M] float32, as transpose_vectorized, tiles one below the other: whole rows are written at once."""
    return _launch("transpose_down", x)


def transpose_any(x):
    """[M, N] -> [N, M] float32, as transpose_down; where no float4 may be, by tiles of 64 x 64."""
    return _launch("transpose_any", x)


def _launch(name, x):
    expect(x=x, ndim=2, dtypes=[torch.float32], contiguous=True)
    M, N = x.shape
    y = x.new_empty(N, M)
    getattr(kernels, name)(x, y, M, N)
    return y


TILES = (transpose_tile, transpose_padded, transpose_swizzled)
RUNGS = (transpose_read, transpose_write, *TILES, transpose_vectorized, transpose_down, transpose_any)

LARGE = {"M": 16384, "N": 16384}

LESSON = Lesson(
    about=About(
        teaches="coalescing counted in sectors, shared memory, bank conflicts, padding, swizzles",
        hours=1.5,
        star=True,
        operator="transpose",
        language="CUDA C++",
        pictures=("banks",),
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=RUNGS,
    predicted=(
        Prediction(
            rung=transpose_read,
            at=LARGE,
            percent_of_limit=25,
            why="A write of 4 bytes probably costs L2 more than the one slot of the count, since it has to be "
            "merged with the rest of its sector.",
        ),
        Prediction(rung=transpose_write, at=LARGE, tb_per_s=1.8),
        Prediction(rung=transpose_tile, at=LARGE, tb_per_s=1.8),
        Prediction(rung=transpose_padded, at=LARGE, percent_of_limit=90),
        Prediction(rung=transpose_swizzled, at=LARGE, times=1, over=transpose_padded),
        Prediction(rung=transpose_vectorized, at=LARGE, percent_of_limit=100),
        Prediction(rung=transpose_down, at=LARGE, times=(1.01, 1.03), over=transpose_vectorized),
        Prediction(
            rung=transpose_any,
            at={"M": 8191, "N": 8193},
            percent_of_limit=(90, 100),
            why="Sectors that are written in part cost more than the ninth that was counted: at M = N = 8192 "
            "transpose_padded, with the same accesses on whole sectors, loses much less.",
        ),
    ),
    wrong=(
        Mutant("M for N", "transpose_read_kernel", "x[r * N + c]", "x[r * M + c]", "transpose_read", "out of bounds"),
        Mutant(
            "the last row hangs over", "transpose_read_kernel", "r < M", "r <= M", "transpose_read", "out of bounds"
        ),
        Mutant("the last column is nobody's", "transpose_write_kernel", "c < N", "c < N - 1", "transpose_write", "nan"),
        Mutant(
            "columns read before rows are there",
            "transpose_tile_kernel",
            "__syncthreads();",
            "",
            "transpose_tile",
            "race",
        ),
        Mutant(
            "the edges changed places",
            "transpose_tile_kernel",
            "from.column + c < N && from.row + lane < M",
            "from.column + c < M && from.row + lane < N",
            "transpose_padded",
            "uninitialised",
        ),
        Mutant("a swizzle that is no permutation", "Swizzled", "c ^ r", "c & r", "transpose_swizzled", "race"),
        Mutant(
            "swizzled on one side only",
            "transpose_vectorized_kernel",
            "tile[wide_at(c, j)]",
            "tile[c * SQUARES + j]",
            "transpose_vectorized",
            "uninitialised",
        ),
        Mutant(
            "squares not turned",
            "transpose_vectorized_kernel",
            "v[0].x, v[1].x, v[2].x, v[3].x",
            "v[0].x, v[0].y, v[0].z, v[0].w",
            "transpose_vectorized",
        ),
        Mutant(
            "16 bytes wherever x begins",
            "quads_fit",
            "aligned(x)",
            "true",
            "transpose_vectorized",
            "misaligned",
        ),
        Mutant("one row of tiles", "corner_down", "blockIdx.x % down", "blockIdx.x % 1", "transpose_down", "race"),
        Mutant(
            "a column too few",
            "transpose_wide_kernel",
            "column + c < N) y[",
            "column + c + 1 < N) y[",
            "transpose_any",
            "nan",
        ),
        Mutant("no barrier", "transpose_wide_kernel", "__syncthreads();", "", "transpose_any", "race"),
    ),
    claims={
        "transpose_tile_kernel": ("no spills",),
        "transpose_vectorized_kernel": ("16-byte loads", "16-byte stores", "no spills"),
        "transpose_wide_kernel": ("no spills",),
    },
    passes=dict.fromkeys(RUNGS, 1.0),
    counts={
        transpose_read: {"sectors a load": 4.0, "sectors a store": 32.0},
        transpose_write: {"sectors a load": 32.0, "sectors a store": 4.0},
        transpose_tile: {"sectors a request": 4.0, "wavefronts a shared store": 1.0, "wavefronts a shared load": 32.0},
        transpose_padded: {"sectors a request": 4.0, "wavefronts a shared access": 1.0},
        transpose_swizzled: {"sectors a request": 4.0, "wavefronts a shared access": 1.0},
        transpose_vectorized: {"sectors a request": 16.0, "wavefronts a shared access": 4.0},
        transpose_down: {"sectors a request": 16.0, "wavefronts a shared access": 4.0},
        transpose_any: {"sectors a request": 16.0, "wavefronts a shared access": 4.0},
    },
)

if __name__ == "__main__":
    LESSON.main()
