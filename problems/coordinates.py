"""Coordinates: which block, thread, warp and lane has element i of a launch.

Inputs: grid and block, three sizes each (x, y, z), and n. The result is [9, n] int32. Rows 0 to 2 are the block's x, y
and z, rows 3 to 5 the thread's. Then come the thread's number in its block, its warp, and its lane. Blocks and threads
are numbered along x, then y, then z.
"""

from math import prod

from lessonkit import DEVICE, Problem, Refusal, Work, case

import torch

FACTS = 9  # block x, y, z; thread x, y, z; the thread's number in its block; its warp; its lane


def reference(grid, block, n):
    i = torch.arange(n, device=DEVICE)
    blocks, thread = i // prod(block), i % prod(block)
    warp, lane = thread // 32, thread % 32
    return torch.stack([*_coordinates(blocks, grid), *_coordinates(thread, block), thread, warp, lane]).int()


def _coordinates(number, size):
    """Undo (z * size_y + y) * size_x + x."""
    return number % size[0], number // size[0] % size[1], number // (size[0] * size[1])


def inputs(grid, block, spare=0, dtype=torch.int32):
    # `spare`: so many threads at the end have no element of their own.
    return grid, block, prod(grid) * prod(block) - spare


ONE = (1, 1, 1)
PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=lambda grid, block, dtype, spare=0: Work(bytes=4 * FACTS * inputs(grid, block, spare)[2]),
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
    refuses=(
        # The driver of a new GPU says InvalidValue, older ones and the documentation InvalidConfiguration.
        Refusal("1025 threads", lambda f: f(ONE, (1025, 1, 1), 1), RuntimeError, "cudaErrorInvalid(Config|Value)"),
        Refusal("no block", lambda f: f((0, 1, 1), ONE, 1), RuntimeError, "cudaErrorInvalid(Config|Value)"),
    ),
    dtypes=(torch.int32,),
    bench_dtype=torch.int32,
)
