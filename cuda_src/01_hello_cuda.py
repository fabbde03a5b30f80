"""Hello, CUDA: who am I, and which element is mine?
==================================================
The kernels are in 01_hello_cuda.cu: every thread writes down its coordinates, in the place that its number gives it.
Here PyTorch works the same table out backwards, from the number to the coordinates, and the two must agree.

Run it:    python cuda_src/01_hello_cuda.py
Check it:  python -m lessonkit check 01_hello_cuda
"""

from math import prod

from lessonkit import DEVICE, Lesson, Mutant, Refusal, Unsupported, Work, case, cuda

import torch

kernels = cuda.extension(__file__)  # 01_hello_cuda.cu, built at the first call
FACTS = 9  # block x, y, z; thread x, y, z; the thread's number in its block; its warp; its lane


def reference(grid, block, n):
    i = torch.arange(n, device=DEVICE)
    blocks, thread = i // prod(block), i % prod(block)
    warp, lane = thread // 32, thread % 32
    return torch.stack([*_coordinates(blocks, grid), *_coordinates(thread, block), thread, warp, lane]).int()


def _coordinates(number, size):
    """Undo (z * size_y + y) * size_x + x."""
    return number % size[0], number // size[0] % size[1], number // (size[0] * size[1])


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


def inputs(grid, block, spare=0, dtype=torch.int32):
    # `spare`: so many threads at the end have no element of their own.
    return grid, block, prod(grid) * prod(block) - spare


def an_sm_holds_what_it_has(rung):
    """More threads a block, fewer blocks: never more than 2048 threads an SM, never none."""
    blocks = {threads: kernels.blocks_an_sm(threads, 0) for threads in (32, 64, 128, 256, 512, 1024)}
    assert all(count >= 1 and count * threads <= 2048 for threads, count in blocks.items()), blocks
    assert sorted(blocks.values(), reverse=True) == list(blocks.values())


ONE = (1, 1, 1)
LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    extension=kernels,
    rungs=(who_1d, who_2d, who_3d, who_groups),
    checks=(
        case("one thread", grid=ONE, block=ONE),
        case("a warp and one lane more", grid=ONE, block=(33, 1, 1)),
        case("a line, and threads without an element", grid=(5, 1, 1), block=(96, 1, 1), spare=67),
        case("nobody has an element", grid=(2, 1, 1), block=(32, 1, 1), spare=64),
        case("rows that no warp divides", grid=(3, 2, 1), block=(7, 5, 1), spare=3),
        case("layers, all six sizes different", grid=(3, 2, 4), block=(7, 5, 6), spare=1),
        case("the largest block", grid=(2, 1, 1), block=(1024, 1, 1)),
        case("the deepest block", grid=ONE, block=(4, 2, 64)),
        case("whole warps, on which requests are counted", grid=(4, 1, 1), block=(128, 1, 1)),
    ),
    benches=({"grid": (2**15, 1, 1), "block": (256, 1, 1)},),
    work=lambda grid, block, dtype, spare=0: Work(bytes=4 * FACTS * inputs(grid, block, spare)[2]),
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
    refuses=(
        # The driver of a new GPU says InvalidValue, older ones and the documentation InvalidConfiguration.
        Refusal("1025 threads", lambda f: f(ONE, (1025, 1, 1), 1), RuntimeError, "cudaErrorInvalid(Config|Value)"),
        Refusal("no block", lambda f: f((0, 1, 1), ONE, 1), RuntimeError, "cudaErrorInvalid(Config|Value)"),
    ),
    dtypes=(torch.int32,),
    bench_dtype=torch.int32,
)

if __name__ == "__main__":
    LESSON.main()
