"""Programs and blocks: what is launched
=====================================
A kernel is a function that the GPU runs many times at once. Each run is a program. All programs run the same code. What
differs is a number, tl.program_id(0): from it each program computes which elements are its own. This is called SPMD
(single program, multiple data). `@triton.jit` above a Python function makes it a kernel: the first launch compiles it.
Here is a kernel, and its launch. It adds 1 to each of the n elements of x and writes the results to z:

    @triton.jit
    def plus_one_kernel(x_ptr, z_ptr, n, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)    which elements this program owns
        mask = offsets < n                                          which of them exist
        x = tl.load(x_ptr + offsets, mask=mask)                     read them
        tl.store(z_ptr + offsets, x + 1, mask=mask)                 write the results

    plus_one_kernel[(3,)](x, z, 10, BLOCK=4)                        launch 3 programs on the 10 elements of x

The square brackets of the launch hold the grid: how many programs there are. The parentheses hold the arguments. A
tensor arrives in the kernel as a pointer: the address of its first element, without shape and without strides. The
kernel adds offsets to it, counted in elements. tl.load reads the elements at these addresses, and tl.store writes
there. n arrives as an integer. BLOCK is a tl.constexpr: the compiler knows its value, and compiles the kernel again for
another value.

A program works on a block: on several elements at once. tl.arange(0, 4) is the block [0, 1, 2, 3]. Ten elements in
blocks of BLOCK = 4 need three programs:

    x          | x0  x1  x2  x3 | x4  x5  x6  x7 | x8  x9         |
    program    |       0        |       1        |       2        |    grid = (3,), 10 / 4 rounded up
    offsets    |  0   1   2   3 |  4   5   6   7 |  8   9  10  11 |    program * BLOCK + [0, 1, 2, 3]
    mask       |  1   1   1   1 |  1   1   1   1 |  1   1   0   0 |    offsets < 10

Where the mask is 0, the program loads and stores nothing. A block may have two dimensions. Here ten elements are a
matrix of 2 x 5, with blocks of 2 x 4. Row i, column j lies at offset i * 5 + j * 1: the strides are 5 and 1.

    offsets    |  0   1   2   3 |  4   5   6   7 |                     rows[:, None] * 5 + cols[None, :]
               |  5   6   7   8 |  9  10  11  12 |
    mask       |  1   1   1   1 |  1   0   0   0 |                     cols[None, :] < 5
               |  1   1   1   1 |  1   0   0   0 |
    program            0                1                              grid = (2,)

Offsets 5, 6 and 7 of the first row exist in memory, but they belong to the second row. So the mask compares columns,
not offsets.

You choose the grid and the block. What happens below that is up to the compiler and the GPU:

    GPU        SM 0, SM 1, ... SM 131          132 SMs on an H200, and one memory (HBM) for all of them
    SM         program 7, program 140, ...     several at once, in any order; a program stays on its SM until it ends
    program    warp 0, warp 1, warp 2, warp 3  4 warps; kernel[grid](..., num_warps=8) asks for 8
    warp       thread 0, ... thread 31         32 threads that run each instruction together
    thread     some elements of the block      in its registers; with BLOCK = 1024 it has 1024 / 128 = 8 elements

An SM is a streaming multiprocessor, the part of a GPU that computes. A grid may have more programs than fit on all SMs
at once: the others start when earlier ones end. Registers are the storage next to the arithmetic units, and each thread
has its own. BLOCK and the number of threads are two different numbers: the compiler spreads the elements of a block
over the threads. A position in a block is also called a lane.

New words (GLOSSARY.md): kernel, launch, program, grid, block, pointer, stride, mask, constexpr, thread, warp, lane,
SM, register, HBM, interpreted.
You will be able to: say which elements a program owns, and read the first lines of any Triton kernel.
You need: PyTorch. No GPU: without one, Triton's interpreter runs the programs one after another, in Python.
Run it:    python3 course.py run lesson00_program_and_block

Answer before you run it. How many programs do ten elements in blocks of 8 need, and how many positions of the last
block have no element?
"""

from lessonkit import DEVICE, About, Steps

import torch
import triton
import triton.language as tl


def _ten():
    """The ten elements of every step: 0, 10, 20, ... 90. DEVICE is the GPU, or the CPU where there is none."""
    return torch.arange(10, device=DEVICE) * 10


def _show(offsets, mask):
    """Print one line per program: its offsets and its mask."""
    for program, (mine, exists) in enumerate(zip(offsets.tolist(), mask.tolist(), strict=True)):
        print(f"  program {program}   offsets {mine}   mask {exists}")


@triton.jit
def who_kernel(z_ptr):
    tl.store(z_ptr + tl.program_id(0), 100 + tl.program_id(0))


def one_function_many_programs():
    """`kernel[(3,)](z)` runs the function three times, and each program sees another tl.program_id(0): 0, 1 and 2."""
    z = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    who_kernel[(3,)](z)
    print(f"  z = {z.tolist()}")
    assert z.tolist() == [100, 101, 102]


@triton.jit
def third_kernel(x_ptr, z_ptr):
    tl.store(z_ptr, tl.load(x_ptr + 2))  # z_ptr itself is the address of z[0]


def a_tensor_arrives_as_a_pointer():
    """`x_ptr + 2` is the address of the third element: offsets count elements, and the kernel knows no shape."""
    x, z = _ten(), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    third_kernel[(1,)](x, z)
    assert z.item() == x[2] == 20
    third_kernel[(1,)](x[5:], z)  # the pointer of a slice is the address of its own first element
    assert z.item() == x[7] == 70
    third_kernel[(1,)](x[::3], z)  # x[::3] is 0, 30, 60, 90, but the pointer does not tell: its stride is 3
    assert z.item() == x[2] != x[::3][2]


@triton.jit
def owner_kernel(offsets_ptr, mask_ptr, n, BLOCK: tl.constexpr):  # offsets, mask: [programs, BLOCK]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # tl.arange(0, 4) gives the block [0, 1, 2, 3]
    mask = offsets < n
    tl.store(offsets_ptr + offsets, offsets)  # no mask here: both tables have room for all 12
    tl.store(mask_ptr + offsets, mask.to(tl.int32))


def a_program_owns_a_block():
    """Ten elements in blocks of 4: three programs, and the last one has two elements and two that do not exist."""
    programs = triton.cdiv(10, 4)  # divided and rounded up: 10 // 4 would leave out elements 8 and 9
    offsets, mask = (torch.zeros(programs, 4, dtype=torch.int32, device=DEVICE) for _ in range(2))
    owner_kernel[(programs,)](offsets, mask, 10, BLOCK=4)
    _show(offsets, mask)
    assert offsets.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]


@triton.jit
def plus_one_kernel(x_ptr, z_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=-7)  # where the mask is false, x is -7, and memory is not read
    tl.store(z_ptr + offsets, x + 1, mask=mask)  # where the mask is false, nothing is written


def a_mask_stops_what_does_not_exist():
    """The block of the last program hangs over the end, and the mask keeps it from elements 10 and 11."""
    x, z = _ten(), torch.full((12,), -1, device=DEVICE)  # two more elements than the kernel may write
    plus_one_kernel[(3,)](x, z, 10, BLOCK=4)
    print(f"  z = {z.tolist()}")
    assert z[:10].tolist() == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91]
    assert z[10:].tolist() == [-1, -1]


def each_constexpr_compiles_a_kernel():
    """BLOCK = 8 is compiled as another kernel. It needs two programs, not three, and the answer is the same."""
    x, z = _ten(), torch.full((10,), -1, device=DEVICE)
    for BLOCK, programs in ((4, 3), (8, 2), (16, 1)):  # powers of two: tl.arange takes no others
        assert triton.cdiv(10, BLOCK) == programs
        plus_one_kernel[(programs,)](x, z.fill_(-1), 10, BLOCK=BLOCK)
        assert torch.equal(z, x + 1)


# x and z: [M, N]. A program owns all rows of COLS columns.
@triton.jit
def copy_kernel(x_ptr, z_ptr, offsets_ptr, mask_ptr, M, N, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.arange(0, ROWS)  # [ROWS]
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)  # [COLS]
    mask = (rows[:, None] < M) & (cols[None, :] < N)  # [ROWS, 1] and [1, COLS] make [ROWS, COLS], as in PyTorch
    offsets = rows[:, None] * row + cols[None, :] * col  # row, col: the strides of x
    tl.store(z_ptr + rows[:, None] * N + cols[None, :], tl.load(x_ptr + offsets, mask=mask), mask=mask)
    # The two tables below are [programs, ROWS, COLS], so that each program writes its block of offsets and of masks.
    place = (tl.program_id(0) * ROWS + rows[:, None]) * COLS + tl.arange(0, COLS)[None, :]
    tl.store(offsets_ptr + place, offsets)
    tl.store(mask_ptr + place, mask.to(tl.int32))


def a_block_may_have_two_dimensions():
    """rows[:, None] and cols[None, :] make a block of 2 x 4. Strides say where a row and a column continue."""
    x = _ten().reshape(2, 5)
    for name, matrix in (("x", x), ("x.T.contiguous().T", x.T.contiguous().T)):
        z = torch.full((2, 5), -1, device=DEVICE)
        offsets, mask = (torch.zeros(2, 2, 4, dtype=torch.int32, device=DEVICE) for _ in range(2))
        copy_kernel[(2,)](matrix, z, offsets, mask, 2, 5, *matrix.stride(), ROWS=2, COLS=4)
        print(f"  {name}   strides {matrix.stride()}")
        _show(offsets, mask)
        assert torch.equal(z, x)
        assert mask.tolist() == [[[1, 1, 1, 1]] * 2, [[1, 0, 0, 0]] * 2]
        rows, cols = torch.arange(2, device=DEVICE)[:, None], torch.arange(8, device=DEVICE)[None, :]
        expected = rows * matrix.stride(0) + cols * matrix.stride(1)  # [2, 8]: the blocks side by side
        assert torch.equal(torch.cat([*offsets], 1), expected.to(torch.int32))


@triton.jit
def sum_kernel(x_ptr, z_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0)  # 0 does not change a sum
    tl.store(z_ptr + tl.program_id(0), tl.sum(x))  # the block becomes one value


def programs_meet_in_memory():
    """A program cannot see the values of another. It stores its part, and the next launch finds it in memory."""
    # The order of the programs is not fixed, but a launch begins after the launch before it has ended.
    x, parts, total = _ten(), torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.zeros(1, device=DEVICE)
    sum_kernel[(3,)](x, parts, 10, BLOCK=4)
    sum_kernel[(1,)](parts, total, 3, BLOCK=4)
    print(f"  parts = {parts.tolist()}   total = {total.item():g}")
    assert parts.tolist() == [60, 220, 170]
    assert total.item() == x.sum() == 450


# The answer: two programs, and 6 positions of the second block have no element.
LESSON = Steps(
    about=About(
        teaches="what is launched: programs, blocks, masks, pointers, on ten elements",
        hours=0.5,
        star=True,
        pictures=("grid_and_mask",),
    ),
    steps=(
        one_function_many_programs,
        a_tensor_arrives_as_a_pointer,
        a_program_owns_a_block,
        a_mask_stops_what_does_not_exist,
        each_constexpr_compiles_a_kernel,
        a_block_may_have_two_dimensions,
        programs_meet_in_memory,
    ),
)

if __name__ == "__main__":
    LESSON.main()
