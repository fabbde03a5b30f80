"""Several GPUs: an all-reduce by hand, all reading from all, then the ring
========================================================================
The kernels are in 21_multi_gpu.cu. Here 2 to 8 ranks share one memory, so that the algorithms are checked against
PyTorch on any machine. The kernels, steps and flags are the same, and only the links are missing. The program itself
runs them across NVLink on a machine with 2 GPUs, beside copies between the GPUs and NCCL's all-reduce.

Between two H200 a copy stays below the link's rate, because packets have headers. Loads are no slower than stores, so
enough of them are in flight. On 2 GPUs the ring with flags is ahead of NCCL at 2^20 floats and at 2^26. At 2^14 floats
the launches and the latency of each message decide, and NCCL is ahead.

Run it:    python3 course.py run 21_multi_gpu
Check it:  python3 course.py check 21_multi_gpu
Time it:   the compile and run lines at the top of 21_multi_gpu.cu, with 2 GPUs
"""

from lessonkit import About, Lesson, Mutant, Prediction, cuda, expect

import torch

from problems.all_reduce import PROBLEM

kernels = cuda.extension(__file__)  # 21_multi_gpu.cu, built at the first call
BLOCKS = 128  # flags per rank, as in 21_ring.cuh


def read_all(x):
    """[ranks, n] -> [ranks, n] float32: every rank reads the data of all and sums them."""
    return _all_reduce(kernels.read_all, x)


def ring_steps(x):
    """[ranks, n] -> [ranks, n] float32: reduce-scatter and all-gather along the ring, a launch for each step."""
    return _all_reduce(kernels.ring_steps, x)


def ring_flags(x):
    """[ranks, n] -> [ranks, n] float32: the ring in one launch, neighbours agree by flags."""
    return _all_reduce(kernels.ring_flags, x)


def _all_reduce(launch, x):
    expect(x=x, dtypes=[torch.float32], ndim=2, contiguous=True)
    ranks, n = x.shape
    y, inbox = torch.empty_like(x), torch.empty_like(x)
    flags = torch.zeros(ranks, BLOCKS, dtype=torch.int32, device=x.device)
    launch(x, y, inbox, flags, ranks, n)
    return y


SHARED = {"ranks": 4, "n": 2**24}  # four ranks in the memory of one GPU

LESSON = Lesson(
    about=About(
        teaches="several GPUs: peer copies, a ring all-reduce by hand beside NCCL",
        hours=1,
        star=True,
        operator="all-reduce",
        language="CUDA C++",
        pictures=("ring_all_reduce",),
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=(read_all, ring_steps, ring_flags),
    predicted=(  # the bytes of `passes`, below, at the speed of memory
        Prediction(
            rung=read_all,
            at=SHARED,
            percent_of_limit=40,
            why="Cause not found: accesses are 16 bytes wide and without spills, and by the count enough bytes are in "
            "flight.",
        ),
        Prediction(
            rung=ring_steps,
            at=SHARED,
            percent_of_limit=50,
            why="Each step is a launch of its own, and the GPU runs empty between two; ring_flags moves the same "
            "bytes in one launch and takes less time.",
        ),
        Prediction(
            rung=ring_flags,
            at=SHARED,
            percent_of_limit=50,
            why="In each of the 6 steps a block waits for its neighbour's flag, and has no load in flight meanwhile. "
            "What that costs was not measured alone.",
        ),
    ),
    prints="Between GPUs, which the rows above are not: there all ranks share one memory.",
    wrong=(
        Mutant("the first rank stands for all", "read_all_kernel", "(p.x[r]) + q", "(p.x[0]) + q", "read_all"),
        Mutant(
            "what has come is not added", "send_chunk", "0 < step && step < k", "1 < step && step < k", "ring_steps"
        ),
        Mutant(
            "the sum travels one step less",
            "send_chunk",
            "whole = step == k - 1",
            "whole = step == k - 2",
            "ring_steps",
            "nan",
        ),
        Mutant(
            "chunks go round the other way",
            "send_chunk",
            "(rank - step + 2 * k) % k",
            "(rank + step) % k",
            "ring_steps",
            "nan",
        ),
        Mutant("the last step is missing", "ring_steps", "step < steps", "step < steps - 1", "ring_steps", "nan"),
        Mutant(
            "nobody waits for the left neighbour",
            "ring_flags_kernel",
            "if (step > 0) wait(p.flags[rank] + block, base + step);",
            "",
            "ring_flags",
            "race",
        ),
        Mutant(
            "waits for one step less",
            "ring_flags_kernel",
            "block, base + step)",
            "block, base + step - 1)",
            "ring_flags",
            "race",
        ),
        Mutant("the flag before the data", "signal", "__syncthreads();", "", "ring_flags", "race"),
        Mutant(
            "one's own flag", "ring_flags_kernel", "signal(p.flags[right]", "signal(p.flags[rank]", "ring_flags", "race"
        ),
    ),
    claims={
        "read_all_kernel": ("16-byte loads", "16-byte stores", "no spills"),
        "ring_step_kernel": ("16-byte loads", "16-byte stores", "no spills"),
        "ring_flags_kernel": ("16-byte loads", "16-byte stores", "no spills"),
    },
    # Of 4 ranks: each reads 4n and writes n. In the ring 6 + 5 (k - 2) = 16 quarters of n are read or written.
    passes={read_all: 2.5, ring_steps: 2.0, ring_flags: 2.0},
)

if __name__ == "__main__":
    LESSON.main()
