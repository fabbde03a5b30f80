"""Vector add: one program owns one block
=======================================
z = x + y reads 2n elements and writes n. No traffic can be saved, so the lesson is about moving 3n elements well.
On an H200 a copy reaches 4.2 TB/s. At that rate n = 2^28 in bf16 (2 bytes each, 1.6 GB in all) takes 0.38 ms.

Memory moves in sectors of 32 bytes. A thread can load up to 16 bytes with one instruction. A program has 4 warps, 128
threads, unless num_warps says otherwise, and the compiler spreads the elements of a block over them:

    the rung       block    per thread and tensor in bf16
    add_element        1    1 thread of 32 has 2 bytes; 30 of the 32 bytes of its sector are not used
    add_block        128    1 element, 2 bytes; the 32 threads of a warp use 2 whole sectors
    add_wide        1024    8 elements, 16 bytes with one instruction; a warp uses 16 whole sectors

New words (GLOSSARY.md): sector, coalesced access, latency, bandwidth, bytes in flight, rung, copy speed.
You will be able to: write a kernel with program ids, offsets and masks; say how wide its accesses are.
You need: lesson 0 (programs, blocks, masks). `LESSON`, at the end, declares what the tests check: skip it at the first
reading.
Run it:    python3 course.py run lesson01_vector_add
Check it:  python3 course.py check lesson01_vector_add
Time it:   python3 course.py bench lesson01_vector_add

Answer before you read on. n = 98,432 and BLOCK = 1024: how many programs are launched, and how many lanes of the last
program have no element? What happens to z if the number of programs is rounded down?
"""

from lessonkit import About, Grad, Lesson, Mutant, Prediction, Unsupported, expect

import torch
import triton
import triton.language as tl

from problems.vector_add import PROBLEM


# Rung 1. One element per program: the direct translation of `for i in range(n): z[i] = x[i] + y[i]`.
# A program has at least one warp. This one uses 1 of the 32 threads, and 2 bytes of each sector of 32.
# Predicted: far from the memory limit. It launches n programs where n / 1024 suffice.
@triton.jit
def add_element_kernel(x_ptr, y_ptr, z_ptr):  # [n] each
    i = tl.program_id(0).to(tl.int64)
    tl.store(z_ptr + i, tl.load(x_ptr + i) + tl.load(y_ptr + i))


def add_element(x, y):
    """[...] + [...] -> [...], one program per element."""
    z = _prepare(x, y)
    if z.numel() >= 2**31:
        raise Unsupported("a grid has at most 2^31 - 1 programs, and this rung wants one an element")
    if z.numel():
        add_element_kernel[(z.numel(),)](x, y, z, num_warps=1)
    return z


# Rung 2. New: a program owns a block of 128 elements, one for each of its 128 threads. Neighbouring threads touch
# neighbouring addresses, so the 32 loads of a warp become one request (coalescing). The last block hangs over the end,
# so it needs the mask.
# Predicted by Little's law: full bandwidth needs bandwidth * latency bytes in flight. A load takes about 800 ns, and
# 4.2 TB/s * 800 ns is 3.4 MB, 25 KB on each of 132 SMs. An SM holds up to 2048 threads. Each has two loads of 2 bytes
# in flight, 8 KB in all: a third of a copy's speed.
@triton.jit
def add_block_kernel(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    # int64 before the multiplication: past 2^31 elements a 32-bit offset turns negative.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(z_ptr + offsets, x + y, mask=mask)


def add_block(x, y):
    """[...] + [...] -> [...], 128 elements per program, one per thread."""
    z = _prepare(x, y)
    if z.numel():
        add_block_kernel[(triton.cdiv(z.numel(), 128),)](x, y, z, z.numel(), BLOCK=128)
    return z


# Rung 3. New: rung 2's kernel with a block of 1024 elements for the same 128 threads, 8 per thread. These are
# neighbours and the pointers are aligned, so the compiler loads them as 16 bytes at once.
# Predicted: the speed of a copy. 2048 threads with two loads of 16 bytes have 64 KB in flight on an SM; 25 KB suffice.
def add_wide(x, y):
    """[...] + [...] -> [...], 1024 elements per program, 16 bytes per thread and tensor."""
    z = _prepare(x, y)
    if z.numel():
        add_block_kernel[(triton.cdiv(z.numel(), 1024),)](x, y, z, z.numel(), BLOCK=1024)
    return z


def _prepare(x, y):
    """z, uninitialised. `expect` refuses inputs that the kernels do not take, and names them."""
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


# The answers: 97 programs, since 96 * 1024 = 98,304, and 896 lanes of the last one have no element. Rounded down, 96
# programs leave the last 128 elements of z as they were.
LARGE = {"n": 2**28}

LESSON = Lesson(
    about=About(
        teaches="program ids, offsets, masks, wide accesses, bytes in flight",
        hours=0.75,
        star=True,
        operator="vector add",
        pictures=("warp_sectors",),
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
        Mutant("a difference", "add_element_kernel", "+ tl.load(y_ptr + i)", "- tl.load(y_ptr + i)", "add_element"),
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
