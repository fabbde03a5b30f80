"""The grader of exercise01_scale_rows.cu."""

from lessonkit import DEVICE, case, cuda
from lessonkit.exercise import Exercise, Wrong

import torch

kernels = cuda.extension(__file__)


def scale_rows(x, s):
    y = torch.empty(x.shape, device=x.device)
    kernels.scale_rows(x, s, y, *x.shape, x.stride(0))
    return y


def inputs(rows, cols, pad=0, dtype=torch.float32):
    return torch.randn(rows, cols + pad, device=DEVICE)[:, :cols], torch.rand(rows, device=DEVICE) + 0.5


EXERCISE = Exercise(
    op=scale_rows,
    reference=lambda x, s: x * s[:, None],
    inputs=inputs,
    extension=kernels,
    dtypes=(torch.float32,),
    cases=(
        case("one element: 255 threads have none", rows=1, cols=1),
        case("more columns than rows, both hang over", rows=9, cols=65),
        case("more rows than columns", rows=70, cols=3),
        case("rows begin 40 apart, 33 of them used", rows=5, cols=33, pad=7),
        case("130 blocks along a column", rows=1040, cols=2),
        case("130 blocks along a row", rows=2, cols=4160),
        case("whole patches, on which sectors are counted", rows=16, cols=64),
    ),
    # Without a cache every element asks for its row's s: one word for a whole warp, which one sector serves.
    reads=2 * 16 * 64 / (16 * 64 + 16),
    counts={"sectors a store": 4},
    hints=(
        "threadIdx.x is the index that runs inside a warp: it must be the one that runs along a row of memory.",
        "column = blockIdx.x * blockDim.x + threadIdx.x, row the same with y. x is addressed by pitch, y by cols. "
        "Grid: course::ceil_div(cols, 32) by course::ceil_div(rows, 8).",
        "`if (r < rows && c < cols) y[r * cols + c] = x[r * pitch + c] * s[r];`",
    ),
    predicted="32: neighbours would be a row apart, so each thread would need a sector of its own.",
    wrong=(
        Wrong("threads past the last column are not sent away", "r < rows && c < cols", "r < rows", "out of bounds"),
        Wrong("threads past the last row are not sent away", "r < rows && c < cols", "c < cols", "out of bounds"),
        Wrong("rows of x are taken to lie cols apart", "x[r * pitch + c]", "x[r * cols + c]"),
        Wrong("blocks rounded down", "course::ceil_div(rows, 8)", "std::max<int64_t>(1, rows / 8)", "unwritten"),
        Wrong("scaled by the column's number", "+ c] * s[r]", "+ c] * s[c % rows]"),
        Wrong(
            "neighbouring threads are a row apart: 32 sectors a request",
            "const int64_t c = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;\n"
            "    const int64_t r = int64_t(blockIdx.y) * blockDim.y + threadIdx.y;",
            "const int t = threadIdx.y * 32 + threadIdx.x;\n"
            "    const int64_t c = int64_t(blockIdx.x) * 32 + t / 8;\n"
            "    const int64_t r = int64_t(blockIdx.y) * 8 + t % 8;",
            "sectors a store",
        ),
    ),
)
