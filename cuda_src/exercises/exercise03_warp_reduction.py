"""The grader of exercise03_warp_reduction.cu."""

from lessonkit import DEVICE, case, cuda
from lessonkit.exercise import Exercise, Wrong

import torch

kernels = cuda.extension(__file__)


def row_sum(x):
    total = torch.empty(len(x), device=x.device)
    kernels.row_sum(x, total, *x.shape)
    return total


EXERCISE = Exercise(
    op=row_sum,
    reference=lambda x: x.sum(1),
    inputs=lambda rows, cols, dtype: (torch.rand(rows, cols, device=DEVICE) + 0.5,),
    extension=kernels,
    dtypes=(torch.float32,),
    cases=(
        case("one element: 31 lanes add nothing, and take part", rows=1, cols=1),
        case("no columns: the sum is 0, not unwritten", rows=3, cols=0),
        case("a lane more than a warp; a last block with one row", rows=5, cols=33),
        case("whole warps, on which requests are counted", rows=8, cols=96),
    ),
    counts={"sectors a load": 4, "stores": 8, "shared loads": 0, "barriers": 0},
    hints=(
        "After a step with distance d, lane l holds the sum of its own and lane l + d's. Which distances make 32 "
        "lanes one?",
        "`__shfl_down_sync(ALL, mine, distance)` is the register of lane + distance. The loop over columns ends at "
        "different "
        "turns for different lanes; the shuffles come after it, where all lanes meet.",
        "for (distance = 16; distance > 0; distance /= 2) mine += __shfl_down_sync(ALL, mine, distance); lane 0 "
        "stores.",
    ),
    predicted=(
        "5 loads, 5 stores and 5 barriers. Before each step the sums are stored and a barrier waits for them. Each "
        "step loads once. The lane's own sum stays in a register, and the last sum needs no store to shared memory."
    ),
    wrong=(
        Wrong("half a warp: 16 lanes are never added", "int distance = 16;", "int distance = 8;"),
        Wrong("the last step is missing", "distance > 0", "distance > 1"),
        Wrong("every lane takes every column", "int c = lane; c < cols; c += 32", "int c = 0; c < cols; c++", "value"),
        Wrong(
            "each lane takes neighbouring columns: sectors are asked for again and again",
            "for (int c = lane; c < cols; c += 32)",
            "for (int c = lane * ((cols + 31) / 32); c < min(cols, (lane + 1) * ((cols + 31) / 32)); c++)",
            "sectors a load",
        ),
        Wrong("all lanes store, and only one of them has the sum", "if (lane == 0) sum[row]", "sum[row]", "race"),
        Wrong("a row too many", "row >= rows", "row > rows", "out of bounds"),
    ),
)
