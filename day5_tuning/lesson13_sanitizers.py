"""Sanitizers: five kernels with one bug each, and which tool can see it
=====================================================================
A sanitizer reports only what it watches. A clean run under the wrong tool proves nothing. Here each kernel has one bug.
The steps show what this course's interpreter and emulator say of it without a GPU.

What NVIDIA's tools watch by their documentation, and Triton's by its compiler's source:

    memcheck    addresses of global, shared and local memory: outside every allocation, or misaligned
    racecheck   shared memory: two threads, one byte, at least one write, no barrier between them
    initcheck   global memory that is read before anything has written it
    synccheck   barriers that some threads never reach, and wrong masks of lanes
    consan      Triton: shared and tensor memory of TMA, wgmma and mbarriers; a deadlock of mbarriers
    iisan       Triton: the innermost coordinate of a TMA copy, which has to be a multiple of 16 bytes

Predict before you run: for each of the five kernels, does the interpreter or the emulator stop? Does the answer differ?
You will learn: to choose the tool by the kind of memory, and to know which bugs no tool here can see.
Run it:    python3 course.py run lesson13_sanitizers
On a GPU:  python3 course.py sanitize lesson05_softmax        every tool around every rung of a lesson
           python3 course.py sanitize course_ops.softmax      and around each kernel of an operator
What has run on today's code, and what has not: reports/nvidia-h200/sanitized.md
"""

import subprocess
import sys

from lessonkit import DEVICE, About, Steps, Table, cuda
from lessonkit.base.device import HAS_GPU, INTERPRETED
from lessonkit.base.errors import Fault, OutOfBounds
from lessonkit.cuda import toolchain
from lessonkit.judge.check import poisoned_empty
from lessonkit.measure import sanitize
from lessonkit.modes.interpreter import watched

import pytest
import torch
import triton
import triton.language as tl

kernels = cuda.extension(__file__)


# ---- 1. Out of bounds -----------------------------------------------------------------------------------------------
@triton.jit
def scale_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # x, y [n]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=at <= n), mask=at < n)  # the bug: <=


def _scale():
    x = torch.ones(100, device=DEVICE)
    y = torch.empty_like(x)
    scale_kernel[(1,)](x, y, 100, BLOCK=128)
    return y


def out_of_bounds():
    """The load reads element 100 of 100, and the store drops it: the answer is right, and the access is not.

    The interpreter compares each address with the tensor that it belongs to. memcheck knows allocations, not tensors.
    PyTorch's allocator puts many tensors into one: PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives each its own.
    """
    if INTERPRETED:
        with pytest.raises(OutOfBounds), watched():
            _scale()
    if not HAS_GPU:  # no address is compared outside `watched`, and the answer hides the bug
        assert torch.equal(_scale(), torch.full((100,), 2.0, device=DEVICE))


# ---- 2. Uninitialised -----------------------------------------------------------------------------------------------
@triton.jit
def sum_kernel(x_ptr, total_ptr, n, BLOCK: tl.constexpr):  # x [n], total [1], which the caller must set to 0
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(total_ptr, tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0)))


def _sum(new):
    x = torch.ones(100, device=DEVICE)
    total = new(1, device=DEVICE)
    sum_kernel[(4,)](x, total, 100, BLOCK=32)
    return total.item()


def uninitialised():
    """torch.empty sets nothing. A fresh page is often 0, so a first run is often right.

    The checks of this course fill what torch.empty returns with NaN: a value that nothing wrote then reaches the
    result. initcheck reports the read itself, in global memory alone. On a GPU no tool reports a read of shared memory
    that nothing wrote.
    """
    assert _sum(torch.zeros) == 100
    with poisoned_empty():
        total = _sum(lambda *size, **where: torch.empty(*size, **where))
    assert total != total, "NaN is unequal to itself"


# ---- 3. A race between programs -------------------------------------------------------------------------------------
@triton.jit
def count_kernel(total_ptr):  # total [1]: every program adds 1
    tl.store(total_ptr, tl.load(total_ptr) + 1)  # the bug: three steps, where tl.atomic_add is one


def race_between_programs():
    """The interpreter runs one program after the other. It counts right, and no test on a CPU can fail.

    The emulator orders accesses by what synchronises them, not by when they ran. It reports the race in CUDA C++ in
    any order of the blocks. racecheck watches shared memory alone, and this is global memory: it stays silent.
    """
    if INTERPRETED:
        total = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        with watched():
            count_kernel[(8,)](total)
        assert total.item() == 8, "green, and wrong on a GPU"
    _emulated("race", lambda: kernels.count_blocks(torch.zeros(1, dtype=torch.int32)))


# ---- 4. A race in shared memory -------------------------------------------------------------------------------------
def race_in_shared_memory():
    """Triton places the barriers of a block itself, so its language cannot leave one out. CUDA C++ and Gluon can.

    racecheck reports this race. It does not follow every mbarrier: on kernels that hand shared memory from TMA to wgmma
    it also reports accesses which an mbarrier orders. Each such report needs an argument by the memory model. The
    arguments stand in lessonkit/measure/sanitize.toml, and tests read the barriers that they name in the PTX.
    Triton's consan follows mbarriers. TRITON_INSTRUMENTATION_MODE=consan compiles it into Gluon kernels.
    """
    _emulated("race", lambda: kernels.reverse(torch.ones(256), torch.empty(256)))


# ---- 5. A barrier in a branch ---------------------------------------------------------------------------------------
def barrier_in_a_branch():
    """Half of the block waits at one barrier and half at another. On a GPU this may hang, or go on.

    synccheck reports the divergent threads. No tool that watches addresses or values can see it.
    """
    _emulated("barrier", lambda: kernels.half_barrier(torch.empty(256)))


def _emulated(kind, call):
    """The emulator ends the launch with a fault of this kind. On a GPU nothing is launched: it might not end."""
    if HAS_GPU:
        return
    if why := kernels.lacks():
        print(f"  left out: {why}")
        return
    with pytest.raises(Fault) as fault:
        call()
    assert fault.value.kind == kind
    print(f"  {kind}: {fault.value}")


# ---- What each can see ----------------------------------------------------------------------------------------------
SEEN = (
    # bug, without a GPU, compute-sanitizer, Triton's instrumentation
    ("out of bounds", "interpreter, emulator", "memcheck, past the allocation", ""),
    ("misaligned", "emulator", "memcheck", "iisan, of TMA's coordinates"),
    ("uninitialised, global memory", "NaN in fresh tensors, emulator", "initcheck", ""),
    ("uninitialised, shared memory", "emulator", "", ""),
    ("race between programs, global memory", "emulator; the interpreter is green", "", "gsan, from Triton 3.9 on"),
    ("race in shared memory", "emulator", "racecheck", "consan"),
    ("barrier that some threads never reach", "emulator", "synccheck", "consan, of mbarriers"),
)


def what_each_can_see():
    """No column is full. A kernel is clean only where the tool that watches its kind of memory has run."""
    heads = ("bug", "without a GPU", "compute-sanitizer, by its documentation", "Triton, by its source")
    table = [dict(zip(heads, row, strict=True)) for row in SEEN]
    assert all(any(row[head] == "" for row in table) for head in heads[2:])
    return Table("what each can see", table, "An empty cell: nothing there watches this kind of memory.")


def under_the_tools():
    """On a GPU the two Triton kernels that end run under memcheck and initcheck, and their reports are printed."""
    for tool, name in (("memcheck", "_scale"), ("initcheck", "uninitialised")):
        if why := sanitize.lacks(tool):
            print(f"  {tool}: left out, {why}")
            continue
        call = "_scale()" if name == "_scale" else "_sum(torch.empty)"
        code = f"from day5_tuning.lesson13_sanitizers import _scale, _sum; import torch; {call}"
        around = [toolchain.find_tool("compute-sanitizer"), "--tool", tool, *sanitize.TOOLS[tool]]
        done = subprocess.run([*around, sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
        for report, count in sanitize.parsed(tool, done.stdout + done.stderr).items():
            print(f"  {tool}: {report.kernel}: {report.what}, {count} times")


# The answers: the interpreter stops at the first kernel alone, and only inside `watched`. The emulator stops at the
# last three. The first kernel's answer is right. The second's depends on what its memory held: 100 if that was 0, NaN
# if it was NaN. The third's is right in the interpreter alone.
LESSON = Steps(
    about=About(
        teaches="five kernels with one bug each, and what interpreter, emulator, compute-sanitizer and Triton's own "
        "instrumentation can see of it",
        hours=0.75,
    ),
    steps=(
        out_of_bounds,
        uninitialised,
        race_between_programs,
        race_in_shared_memory,
        barrier_in_a_branch,
        what_each_can_see,
        under_the_tools,
    ),
)

if __name__ == "__main__":
    LESSON.main()
