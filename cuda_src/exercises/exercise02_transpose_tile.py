"""The grader of exercise02_transpose_tile.cu."""

from lessonkit import DEVICE, case, cuda
from lessonkit.exercise import Exercise, Wrong

import torch

kernels = cuda.extension(__file__)


def transpose(x):
    y = torch.empty(x.shape[1], x.shape[0], device=x.device)
    kernels.transpose(x, y, *x.shape)
    return y


EXERCISE = Exercise(
    op=transpose,
    reference=lambda x: x.T.contiguous(),
    inputs=lambda rows, cols, dtype: (torch.randn(rows, cols, device=DEVICE),),
    extension=kernels,
    dtypes=(torch.float32,),
    cases=(
        case("one element", rows=1, cols=1),
        case("one tile and a bit, wide", rows=5, cols=33),
        case("one tile and a bit, tall", rows=40, cols=7),
        case("2 x 3 whole tiles, on which sectors and wavefronts are counted", rows=64, cols=96),
    ),
    counts={"sectors a request": 4, "wavefronts a shared access": 1},
    hints=(
        "In both loops threadIdx.x must run along memory. What changes between them is the block's corner.",
        "Read x at row blockIdx.y * TILE + i, column blockIdx.x * TILE + threadIdx.x. Write y at row blockIdx.x * "
        "TILE + i, "
        "column blockIdx.y * TILE + threadIdx.x. Word [i][j] of a tile with rows of n words lies in bank (n i + j) "
        "mod 32.",
        "`tile[TILE][TILE + 1]`; store tile[i][threadIdx.x], `__syncthreads();`, load tile[threadIdx.x][i].",
    ),
    predicted="32 with rows of 32 words, 1 with rows of 33.",
    wrong=(
        Wrong("no barrier between writing and reading the tile", "    __syncthreads();\n", "", "race"),
        Wrong(
            "rows of 32 words: a column is one bank",
            "tile[TILE][TILE + 1]",
            "tile[TILE][TILE]",
            "wavefronts a shared access",
        ),
        Wrong(
            "rows of 34 words: two by two in a bank",
            "tile[TILE][TILE + 1]",
            "tile[TILE][TILE + 2]",
            "wavefronts a shared access",
        ),
        Wrong("the tile is written as it was read", "tile[threadIdx.x][i];", "tile[i][threadIdx.x];", "uninitialised"),
        Wrong("the bounds of x are asked for y", "from < cols && to < rows", "from < rows && to < cols", "race"),
        Wrong(
            "no tile: it writes down columns, 32 sectors a request",
            "tile[i][threadIdx.x] = x[r * cols + c];",
            "y[c * rows + r] = tile[i][threadIdx.x] = x[r * cols + c];",
            "traffic",
        ),
    ),
)
