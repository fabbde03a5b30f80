"""Green but wrong: what a passing run does not show
=================================================
lesson02_common_errors has the errors inside a kernel. These are around it:

- a wrapper that is right for most inputs only
- a race and a compiler, which the interpreter does not have
- a check that accepts zeros or NaN
- a clock that times the launch and not the work

In each step something wrong passes first. The step asserts that it passes, shows why that says nothing, and mends it.

Predict before you run: of 64 programs that each do z += 1 without an atomic, how many additions does the interpreter
count? How many of 65,536 does a GPU?
You will be able to: say which tool sees which error. You will try every check on a wrong answer first.
You need: lesson 1 (programs, masks), lesson 2 (errors inside a kernel).
Run it:    python3 course.py run lesson17_green_but_wrong
"""

import time
from contextlib import nullcontext

from lessonkit import DEVICE, About, Steps, Table, check
from lessonkit.base.device import HAS_GPU, INTERPRETED
from lessonkit.base.errors import BlockAsCondition
from lessonkit.modes.compile_server import call_in_compiler

import pytest
import torch
import triton
import triton.language as tl


# One program takes all of x.
@triton.jit
def double_kernel(x_ptr, z_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(z_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n)


def _double_in_place(x):
    x = x.contiguous()  # a copy if x is a transpose: then `x` is no longer the caller's tensor
    double_kernel[(1,)](x, x, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))


def _double_in_place_mended(x):
    y = x.contiguous()
    double_kernel[(1,)](y, y, y.numel(), BLOCK=triton.next_power_of_2(y.numel()))
    if y is not x:
        x.copy_(y)


def kernel_writes_into_a_copy():
    """x.contiguous() may be a copy: a kernel that writes there works for every contiguous input, and for no other."""
    plain, turned = torch.randn(3, 5, device=DEVICE), torch.randn(5, 3, device=DEVICE).t()
    was = plain.clone(), turned.clone()
    _double_in_place(plain)
    _double_in_place(turned)
    assert torch.equal(plain, 2 * was[0])
    assert torch.equal(turned, was[1])  # the second call had no effect at all
    _double_in_place_mended(turned)
    assert torch.equal(turned, 2 * was[1])


def _double_centred(x):
    x -= x.mean()  # meant as a temporary, but `-=` writes into the caller's tensor
    z = torch.empty_like(x)
    double_kernel[(1,)](x, z, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))
    return z


def wrapper_changes_its_input():
    """`x -= ...` changes the caller's tensor; the result is right, so only a check of the inputs can see it."""
    x = torch.randn(8, device=DEVICE) + 3
    torch.testing.assert_close(_double_centred(x.clone()), 2 * (x - x.mean()))
    with pytest.raises(check.Rejected, match="changed input"):
        check.answer(_double_centred, (x,))
    check.answer(lambda x: _double_centred(x.clone()), (x,))  # `x = x - x.mean()` in the wrapper does the same


@triton.jit
def count_kernel(z_ptr, ATOMIC: tl.constexpr):
    if ATOMIC:
        tl.atomic_add(z_ptr, 1)
    else:
        tl.store(z_ptr, tl.load(z_ptr) + 1)  # two programs read the same value: one addition is lost


def accumulated_without_an_atomic():
    """Programs run at the same time: load, add, store loses additions on a GPU, and never in the interpreter."""
    programs = 64 if INTERPRETED else 2**16
    z = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    count_kernel[(programs,)](z, ATOMIC=False)
    # The interpreter runs one program after another, so it loses nothing. Look in the kernel for an address that two
    # programs store to. compute-sanitizer's racecheck cannot see it either: it checks shared memory only.
    assert z.item() == programs if INTERPRETED else z.item() < programs
    count_kernel[(programs,)](z.zero_(), ATOMIC=True)
    assert z.item() == programs


# Five kernels that Triton's interpreter runs like any Python. The compiler knows types and no values, and refuses them.
# lessonkit makes the interpreter refuse two of them: a block of 16 elements is no truth value.
SCALE = 3.0
SCALE_CONSTEXPR = tl.constexpr(3.0)


@triton.jit
def if_on_a_block_kernel(x_ptr, z_ptr, n):
    i = tl.arange(0, 16)
    if i < n:  # 16 answers to one `if`: use mask=i < n
        tl.store(z_ptr + i, tl.load(x_ptr + i))


@triton.jit
def type_changes_kernel(x_ptr, z_ptr, n):
    total = 0  # an int that becomes a block of floats: start from tl.zeros([16], tl.float32)
    for start in range(0, n, 16):
        total += tl.load(x_ptr + start + tl.arange(0, 16))
    tl.store(z_ptr + tl.arange(0, 16), total)


@triton.jit
def global_kernel(x_ptr, z_ptr, n):
    tl.store(z_ptr, SCALE * tl.load(x_ptr))  # may change after compilation: pass it, or make it a tl.constexpr


@triton.jit
def break_kernel(x_ptr, z_ptr, n):
    for i in range(n):
        if i == 3:
            break  # put the condition into the bound, a `while`, or a mask
        tl.store(z_ptr + i, tl.load(x_ptr + i))


@triton.jit
def chained_kernel(x_ptr, z_ptr, n):
    i = tl.arange(0, 16)
    # Write (0 <= i) & (i < n). Not `and`: Triton's interpreter takes `a and b` for b, and lessonkit's refuses it.
    tl.store(z_ptr + i, tl.load(x_ptr + i), mask=0 <= i < n)


@triton.jit
def mended_kernel(x_ptr, z_ptr, n):
    i = tl.arange(0, 16)
    total = tl.zeros([16], tl.float32)
    for start in range(0, tl.minimum(n, 48), 16):
        total += tl.load(x_ptr + start + i, mask=(i >= 0) & (start + i < n), other=0)
    tl.store(z_ptr + i, SCALE_CONSTEXPR * total, mask=i < n)


REFUSED = {
    if_on_a_block_kernel: "Boolean value of Tensor with more than one value is ambiguous",
    type_changes_kernel: "Loop-carried variable total has initial type int32",
    global_kernel: "Cannot access global variable SCALE",
    break_kernel: "unsupported AST node type: Break",
    chained_kernel: "simultaneous multiple comparison is not supported",
}


STOPPED = (if_on_a_block_kernel, chained_kernel)  # by lessonkit's interpreter


def _compile_for_hopper():
    """What the compiler says to each kernel above ("" if it compiles); no GPU needed, nothing is interpreted."""
    seen = {}
    for kernel in (*REFUSED, mended_kernel):
        source = triton.compiler.ASTSource(kernel, {"x_ptr": "*fp32", "z_ptr": "*fp32", "n": "i32"})
        try:
            triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32))
            seen[kernel.__name__] = ""
        except triton.CompilationError as error:
            seen[kernel.__name__] = str(error).strip().splitlines()[-1]
    return seen


def refused_by_the_compiler_only():
    """A kernel that runs interpreted may not compile: `course.py compile` asks, and needs no GPU."""
    if INTERPRETED:
        for kernel in REFUSED:
            with pytest.raises(BlockAsCondition) if kernel in STOPPED else nullcontext():
                kernel[(1,)](torch.randn(64), torch.empty(64), 16)
    # A process interprets or compiles from its import of Triton on, so another process calls the compiler here.
    seen = call_in_compiler(__name__, "_compile_for_hopper")
    assert seen.pop("mended_kernel") == ""
    for kernel, says in REFUSED.items():
        assert says in seen[kernel.__name__], seen
    return Table(
        "refused",
        [{"kernel": k, "the compiler": s[:90]} for k, s in seen.items()],
        "Triton's interpreter runs all five. lessonkit's refuses if_on_a_block_kernel and chained_kernel.",
    )


def tolerance_that_accepts_zeros():
    """Softmax over 8192 columns is below 0.01 nearly everywhere: atol=1e-2 accepts a kernel that returns zeros."""
    x = torch.rand(4, 8192, device=DEVICE)
    right, zeros = torch.softmax(x, 1), torch.zeros_like(x)
    assert torch.allclose(zeros, right, atol=1e-2)
    # Measure the error against float64, and allow the error that PyTorch itself has. Try it on a wrong answer first.
    truth = check.Truth((x,), (torch.softmax(x.double(), 1),), (right,), factor=1)
    with pytest.raises(check.Rejected, match="32768 of 32768 wrong"):
        check.compare(truth, zeros)
    check.compare(truth, right)


def check_that_accepts_nan():
    """Every comparison with NaN is false, so `if error > tolerance: fail` passes a kernel that wrote nothing."""
    right = torch.randn(16, device=DEVICE)
    never_written = torch.full_like(right, float("nan"))
    error = (never_written - right).abs().max()
    assert not error > 1e-3  # "not too large", so the check passes
    assert not error <= 1e-3  # "small enough" fails it, as it should: state what is right, not what is wrong
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(never_written, right)


def launch_timed_by_the_host_clock():
    """A launch returns before the GPU is done: a host clock times the launch. Synchronize, or record events."""
    if not HAS_GPU:
        print("  GPU only: the interpreter returns when the work is done, so there is nothing to get wrong.")
        return None
    x = torch.randn(8192, 8192, device=DEVICE)
    x @ x  # the first call also loads the library
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    clock = time.perf_counter()
    start.record()
    x @ x
    end.record()
    launched = 1e3 * (time.perf_counter() - clock)
    torch.cuda.synchronize()
    waited = 1e3 * (time.perf_counter() - clock)
    assert launched < 0.5 * waited
    times = {"host, not waited for": launched, "host, synchronized": waited, "events": start.elapsed_time(end)}
    rows = [{"clock": clock, "ms": round(ms, 3)} for clock, ms in times.items()]
    return Table("clocks", rows, "One fp32 matmul of 8192 three ways; the first is the time of its launch.")


# The answers: the interpreter counts all 64, because it runs one program after another. A GPU counts fewer than
# 65,536. How many depends on which programs read the same value at the same time.
LESSON = Steps(
    about=About(teaches="errors around a kernel, which a passing run does not show", hours=0.75, star=True),
    steps=(
        kernel_writes_into_a_copy,
        wrapper_changes_its_input,
        accumulated_without_an_atomic,
        refused_by_the_compiler_only,
        tolerance_that_accepts_zeros,
        check_that_accepts_nan,
        launch_timed_by_the_host_clock,
    ),
)

if __name__ == "__main__":
    LESSON.main()
