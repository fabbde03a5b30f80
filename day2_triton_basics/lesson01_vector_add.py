"""Vector add: one program owns one block
=======================================
z = x + y reads 2n elements and writes n. There is nothing to save, so the whole lesson is about asking for those
3n elements well. At 4.2 TB/s, n = 2^28 in bf16 (1.6 GB in all) cannot take less than 0.38 ms.

You will learn: program ids, offsets, masks, wide accesses, and what a launch costs.
Run it:    python day2_triton_basics/lesson01_vector_add.py
Check it:  python -m lessonkit check lesson01_vector_add
Time it:   python -m lessonkit bench lesson01_vector_add
"""

from lessonkit import About, Grad, Lesson, Mutant, Prediction, Unsupported, expect

import torch
import triton
import triton.language as tl

from problems.vector_add import PROBLEM


# Rung 1. One element a program: the direct translation of `for i in range(n): z[i] = x[i] + y[i]`.
# A program is at least one warp of 32 threads that moves memory in 32-byte sectors; this one uses one thread and
# 2 of the 32 bytes. Predicted: n programs to launch where n/1024 would do, so far from the memory limit.
@triton.jit
def add_element_kernel(x_ptr, y_ptr, z_ptr):  # [n] each
    i = tl.program_id(0).to(tl.int64)
    tl.store(z_ptr + i, tl.load(x_ptr + i) + tl.load(y_ptr + i))


def add_element(x, y):
    """[...] + [...] -> [...], one program an element."""
    z = _prepare(x, y)
    if z.numel() >= 2**31:
        raise Unsupported("a grid has at most 2^31 - 1 programs, and this rung wants one an element")
    if z.numel():
        add_element_kernel[(z.numel(),)](x, y, z, num_warps=1)
    return z


# Rung 2. New: a block of offsets a program, one for each of its 128 threads. Neighbouring threads touch neighbouring
# addresses, so that a warp's 32 loads become one request (coalescing). The last block hangs over the end: hence the
# mask. Predicted by Little's law: bytes in flight = bandwidth * latency; 4.2 TB/s at about 800 ns are 3.4 MB, 25 KB
# for each of 132 SMs. An SM holds 2048 threads, and with two 2-byte loads each that is 8 KB: under half of copy speed.
@triton.jit
def add_block_kernel(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    # int64 before the multiplication: past 2^31 elements a 32-bit offset turns negative.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(z_ptr + offsets, x + y, mask=mask)


def add_block(x, y):
    """[...] + [...] -> [...], 128 elements a program, one a thread."""
    z = _prepare(x, y)
    if z.numel():
        add_block_kernel[(triton.cdiv(z.numel(), 128),)](x, y, z, z.numel(), BLOCK=128)
    return z


# Rung 3. New: eight elements a thread, which the compiler loads as 16 bytes at once, since they are neighbours and the
# pointers are aligned. n = 98,432 = 96 * 1024 + 128 leaves 896 lanes of the last block without an element. Predicted:
# 64 KB in flight where 25 KB do, so copy speed.
def add_wide(x, y):
    """[...] + [...] -> [...], 1024 elements a program, 16 bytes a thread and tensor."""
    z = _prepare(x, y)
    if z.numel():
        add_block_kernel[(triton.cdiv(z.numel(), 1024),)](x, y, z, z.numel(), BLOCK=1024)
    return z


def _prepare(x, y):
    expect(x=x, y=y, same_shape=True, same_dtype=True, contiguous=True)
    return torch.empty_like(x)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return add_wide(x, y)

    @staticmethod
    def backward(ctx, dz):
        return dz, dz


def add(x, y):
    """x + y with a gradient: dx = dy = dz, no kernel needed."""
    return _Add.apply(x, y)


LARGE = {"n": 2**28}

LESSON = Lesson(
    about=About(
        teaches="program ids, offsets, masks, wide accesses, what a launch costs",
        hours=0.75,
        star=True,
        operator="vector add",
    ),
    problem=PROBLEM,
    rungs=(add_element, add_block, add_wide),
    predicted=(
        Prediction(rung=add_block, at=LARGE, percent_of_limit=32),
        Prediction(rung=add_wide, at=LARGE, percent_of_limit=100),
    ),
    wrong=(
        Mutant(
            "mask lets one lane too many through",
            "add_block_kernel",
            "offsets < n",
            "offsets <= n",
            "add_block",
            "out of bounds",
        ),
        Mutant("mask stops one lane early", "add_block_kernel", "offsets < n", "offsets < n - 1", "add_block", "nan"),
        Mutant("x twice", "add_block_kernel", "tl.load(y_ptr + offsets", "tl.load(x_ptr + offsets", "add_wide"),
        Mutant(
            "grid rounded down",
            "add_block",
            "triton.cdiv(z.numel(), 128)",
            "max(1, z.numel() // 128)",
            "add_block",
            "nan",
        ),
    ),
    claims={add_wide: ("16-byte loads", "16-byte stores", "no spills")},
    passes={add_element: 1.0, add_block: 1.0, add_wide: 1.0},
    grad=Grad(add),
)

if __name__ == "__main__":
    LESSON.main()
