"""The grader of exercise04_missing_barrier.cu."""

from lessonkit import DEVICE, case, cuda
from lessonkit.exercise import Exercise, Wrong

import torch

kernels = cuda.extension(__file__)


def smooth(x, turns):
    y = torch.empty_like(x)
    kernels.smooth(x, y, x.numel(), turns)
    return y


def reference(x, turns):
    wide = torch.nn.functional.pad(x, (1, 1))
    return (wide[:-2] + wide[1:-1] + wide[2:]) / 3


EXERCISE = Exercise(
    op=smooth,
    reference=reference,
    inputs=lambda n, turns, dtype: (torch.randn(n, device=DEVICE), turns),
    extension=kernels,
    dtypes=(torch.float32,),
    cases=(
        case("one element, both neighbours outside", n=1, turns=1),
        case("one turn: near is used once", n=128, turns=1),
        case("the second block has one element, which the first needs, too", n=129, turns=1),
        case("two blocks of one turn, the second short", n=150, turns=1),
        case("three turns in one block: near is used again", n=300, turns=3),
        case("the block walks on past the end: threads without an element must wait too", n=100, turns=3),
        case("whole turns, on which barriers are counted", n=512, turns=2),
    ),
    reads=(512 + 3 + 3) / 512,
    counts={"barriers": 8},
    hints=(
        "A barrier belongs between a write and another thread's read, and between a read and another thread's next "
        "write.",
        "Thread t reads near[t] and near[t + 2], which its neighbours wrote in this turn and will write again in the "
        "next.",
        "One `__syncthreads();` after the three writes, one after the line that reads: both inside the loop, where "
        "every "
        "thread of the block comes by.",
    ),
    wrong=(
        Wrong(
            "read before all have written",
            "        __syncthreads();  // all of near is there\n",
            "",
            "race",
            planted=True,
        ),
        Wrong(
            "written again before all have read",
            "        __syncthreads();  // nobody needs near any more\n",
            "",
            "race",
            planted=True,
        ),
        Wrong(
            "only threads that have an element come to the barrier",
            "        __syncthreads();  // nobody needs near any more\n",
            "        if (i < n) __syncthreads();\n",
            "race",
        ),
        Wrong(
            "a warp's barrier does not hold the others",
            "        __syncthreads();  // all of near is there\n",
            "        __syncwarp();\n",
            "race",
        ),
        Wrong(
            "one barrier more than needed",
            "__syncthreads();  // all of near is there",
            "__syncthreads(); __syncthreads();",
            "barriers",
        ),
    ),
)
