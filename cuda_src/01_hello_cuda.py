"""Hello, CUDA: a thread's coordinates, and the element that it owns
=================================================================
The kernels are in 01_hello_cuda.cu. Every thread writes its coordinates, in the place that its number gives it. Here
PyTorch computes the same table in the other direction, from the number to the coordinates, and the two must agree.

Run it:    python3 course.py run 01_hello_cuda
Check it:  python3 course.py check 01_hello_cuda
"""

from lessonkit import DEVICE, About, Lesson, Mutant, Unsupported, cuda

import torch

from problems.coordinates import FACTS, PROBLEM

kernels = cuda.extension(__file__)  # 01_hello_cuda.cu, built at the first call


def who_1d(grid, block, n):
    """(blocks, 1, 1), (threads, 1, 1), n -> [9, n] int32, thread i in column i."""
    _flat(grid, block, 1)
    out = _table(n)
    kernels.who_1d(out, n, grid[0], block[0])
    return out


def who_2d(grid, block, n):
    """(x, y, 1), (x, y, 1), n -> [9, n] int32, numbered along x, then along y."""
    _flat(grid, block, 2)
    out = _table(n)
    kernels.who_2d(out, n, *grid[:2], *block[:2])
    return out


def who_3d(grid, block, n):
    """(x, y, z), (x, y, z), n -> [9, n] int32, numbered along x, then y, then z."""
    out = _table(n)
    kernels.who_3d(out, n, *grid, *block)
    return out


def who_groups(grid, block, n):
    """(x, y, z), (x, y, z), n -> [9, n] int32, the numbers taken from cooperative groups."""
    out = _table(n)
    kernels.who_groups(out, n, *grid, *block)
    return out


def _flat(grid, block, dimensions):
    if any(size != 1 for size in (*grid[dimensions:], *block[dimensions:])):
        raise Unsupported(f"this rung numbers {dimensions} dimension(s), and this launch has more")


def _table(n):
    return torch.empty(FACTS, n, dtype=torch.int32, device=DEVICE)


def an_sm_holds_what_it_has(rung):
    """More threads per block, fewer blocks: never more than 2048 threads per SM, never none."""
    blocks = {threads: kernels.blocks_an_sm(threads, 0) for threads in (32, 64, 128, 256, 512, 1024)}
    assert all(count >= 1 and count * threads <= 2048 for threads, count in blocks.items()), blocks
    assert sorted(blocks.values(), reverse=True) == list(blocks.values())


LESSON = Lesson(
    about=About(
        teaches="`__global__`, launches, the coordinates of thread, warp, block and grid, errors of a launch, "
        "occupancy",
        hours=1,
        star=True,
        operator="thread indices",
        language="CUDA C++",
        pictures=("coordinates",),
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=(who_1d, who_2d, who_3d, who_groups),
    wrong=(
        Mutant("one more than there are, in the next row", "write_down", "i >= n", "i > n", "who_1d", "race"),
        Mutant("one too many left out", "write_down", "i >= n", "i + 1 >= n", "who_1d"),
        Mutant(
            "blocks on top of each other", "who_1d_kernel", "int64_t(blockIdx.x) * blockDim.x + ", "", "who_1d", "race"
        ),
        Mutant(
            "columns before rows",
            "who_2d_kernel",
            "threadIdx.y * blockDim.x + threadIdx.x",
            "threadIdx.x * blockDim.y + threadIdx.y",
            "who_2d",
        ),
        Mutant("the lane from threadIdx.x alone", "write_down", "int(thread % 32)", "int(threadIdx.x % 32)", "who_2d"),
        Mutant(
            "layers as large as rows",
            "who_3d_kernel",
            "(threadIdx.z * blockDim.y + threadIdx.y)",
            "(threadIdx.z * blockDim.x + threadIdx.y)",
            "who_3d",
            "race",
        ),
        Mutant(
            "y and z of the grid changed places",
            "who_groups_kernel",
            "at.z) * grid.y + at.y",
            "at.y) * grid.z + at.z",
            "who_groups",
        ),
    ),
    properties=(an_sm_holds_what_it_has,),
    claims={"who_1d_kernel": ("no spills", "no shared memory"), "who_3d_kernel": ("no spills", "no shared memory")},
    passes=dict.fromkeys((who_1d, who_2d, who_3d, who_groups), 1.0),
    counts={rung: {"sectors a store": 4.0} for rung in (who_1d, who_2d, who_3d, who_groups)},
)

if __name__ == "__main__":
    LESSON.main()
