"""Parallel reduction, continued: every byte in flight, one launch
================================================================
The kernels and their predictions are in 07_reduction_one_launch.cu. This file wraps them as functions of tensors and
checks them against PyTorch. On a GPU nvcc builds the kernels. Elsewhere g++ builds them, and the emulator watches
every address, barrier and race.

Run it:    python3 course.py run 07_reduction_one_launch
Check it:  python3 course.py check 07_reduction_one_launch
Time it:   python3 course.py bench 07_reduction_one_launch
"""

from functools import cache

from lessonkit import DEVICE, About, Lesson, Mutant, Prediction, Refusal, case, cuda, expect

import torch

from problems.sum import PROBLEM, inputs

kernels = cuda.extension(__file__)  # 07_reduction_one_launch.cu, built at the first call
SCRATCH = 16384  # as in the .cu


def sum_vectorized(x):
    """[n] -> [] float32, 16 bytes per load by as many blocks as fit, and a second launch for their sums."""
    return _launch("sum_vectorized", x)


def sum_atomic(x):
    """[n] -> [] float32, each block adds its sum to the result: rounded in another order in every run."""
    return _launch("sum_atomic", x)


def sum_cooperative(x):
    """[n] -> [] float32, all blocks wait for each other, then the first adds their sums."""
    return _launch("sum_cooperative", x)


def sum_last_block(x):
    """[n] -> [] float32, the block that finishes last adds the sums of all, in their order."""
    expect(x=x, ndim=1, dtypes=[torch.float32], contiguous=True)
    total = x.new_empty(())
    kernels.sum_last_block(x, x.new_empty(SCRATCH), _ticket(), total, x.numel())
    return total


def _ticket():
    # A launch leaves the ticket at 0 again. Launches on two streams may overlap, so each stream has its own; and the
    # emulator stops a launch where it finds a fault, whatever the ticket is then.
    return _ticket_of(torch.cuda.current_stream()) if DEVICE.type == "cuda" else torch.zeros(1, dtype=torch.int32)


@cache
def _ticket_of(stream):
    return torch.zeros(1, dtype=torch.int32, device=stream.device)


def _cub(x):
    """CUB's DeviceReduce::Sum, which exists in C++ only."""
    return _launch("cub_sum", x)


def _launch(name, x):
    expect(x=x, ndim=1, dtypes=[torch.float32], contiguous=True)
    total = x.new_empty(())
    getattr(kernels, name)(x, x.new_empty(SCRATCH), total, x.numel())
    return total


def the_same_every_time(rung):
    """Equal bits in every run, but for atomic additions, whose order is not defined."""
    (x,) = inputs(40_000)
    assert rung is sum_atomic or len({rung(x).item() for _ in range(4)}) == 1


RUNGS = (sum_vectorized, sum_atomic, sum_cooperative, sum_last_block)

SMALL = {"n": 2**20}

LESSON = Lesson(
    about=About(
        teaches="bytes in flight, atomics, cooperative launches, the last block's ticket",
        hours=1,
        star=True,
        operator="sum",
        language="CUDA C++",
        pictures=("shuffle_tree",),
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=RUNGS,
    predicted=(
        Prediction(rung=sum_vectorized, at={"n": 2**28}, percent_of_limit=100),
        Prediction(rung=sum_atomic, at=SMALL, times=1.3, over=sum_vectorized),
        Prediction(rung=sum_cooperative, at=SMALL, times=(0.87, 0.93), over=sum_atomic),
        Prediction(rung=sum_last_block, at=SMALL, times=1, over=sum_cooperative),
    ),
    checks=(
        *PROBLEM.checks,
        case("a prime, in the middle of a block's piece", n=10_007),
        case("more pieces than blocks: the grid-stride loop turns twice, for some", n=165_891),
        case("whole pieces, on which requests are counted", n=65536),
    ),
    wrong=(
        Mutant("asks past the end", "thread_sum", "i + k * THREADS < quads", "i < n", "sum_atomic", "out of bounds"),
        Mutant(
            "reads past the tail",
            "thread_sum",
            "tail + threadIdx.x < n",
            "tail + threadIdx.x <= n",
            "sum_atomic",
            "out of bounds",
        ),
        Mutant("one head too few", "thread_sum", "threadIdx.x < head", "threadIdx.x + 1 < head", "sum_vectorized"),
        Mutant("no head", "thread_sum", "% 4), n)", "% 1), n)", "sum_last_block", "misaligned"),
        Mutant(
            "the loop turns once", "thread_sum", "i += int64_t(gridDim.x)", "i += n + int64_t(gridDim.x)", "sum_atomic"
        ),
        Mutant(
            "the sum is not zero before",
            "sum_atomic",
            "CUDA_CHECK(cudaMemsetAsync(sum, 0, sizeof(float), stream));",
            "",
            "sum_atomic",
            "nan",
        ),
        Mutant(
            "the first block does not wait",
            "sum_cooperative_kernel",
            "cooperative_groups::this_grid().sync();",
            "",
            "sum_cooperative",
            "race",
        ),
        Mutant(
            "the ticket may be seen before the sum",
            "sum_last_block_kernel",
            "__threadfence();  // New",
            "// New",
            "sum_last_block",
            "race",
        ),
        Mutant(
            "the first block believes to be the last",
            "sum_last_block_kernel",
            "== gridDim.x - 1;",
            "== 0;",
            "sum_last_block",
            "race",
        ),
        Mutant(
            "threads ask before the answer is there",
            "sum_last_block_kernel",
            "__syncthreads();",
            "",
            "sum_last_block",
            "race",
        ),
    ),
    properties=(*PROBLEM.properties, the_same_every_time),
    peers=PROBLEM.peers | {"CUB": _cub},
    claims={f"{rung.__name__}_kernel": ("16-byte loads", "no spills") for rung in RUNGS},
    passes=dict.fromkeys(RUNGS, 1.0),
    counts={
        sum_vectorized: {"sectors a load": 16.0, "launches": 2},
        sum_atomic: {"sectors a load": 16.0, "launches": 1, "atomics": 8},
        sum_cooperative: {"sectors a load": 16.0, "launches": 1},
        sum_last_block: {"sectors a load": 16.0, "launches": 1, "atomics": 8},
    },
    refuses=(
        *PROBLEM.refuses,
        Refusal("not float32", lambda f: f(inputs(8)[0].half()), TypeError, "x is torch.float16"),
    ),
    dtypes=(torch.float32,),
)

if __name__ == "__main__":
    LESSON.main()
