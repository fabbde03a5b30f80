"""Common errors: each one made on purpose, then mended
====================================================
Most first kernels fail in one of the ways below. Most of these errors raise nothing: the kernel runs and the numbers
are wrong, sometimes only at some sizes. Each step makes one error and asserts what you then see: the message, or the
wrong value. Then it mends the error and asserts that it is gone.

Predict before you run: which of the steps end in an error message, and which in a wrong number without one? The answer
stands at the end of the file.
New words (GLOSSARY.md): reduction.
You will be able to: recognise each error by what it looks like, and name the check that finds it.
You need: lessons 0 and 1. lesson17_green_but_wrong has the errors around a kernel.
Run it:    python3 course.py run lesson02_common_errors
"""

import re

from lessonkit import DEVICE, About, Steps, expect
from lessonkit.base.device import INTERPRETED
from lessonkit.base.errors import OutOfBounds
from lessonkit.modes.interpreter import watched

import torch
import triton
import triton.language as tl


def _fails(call, error, says):
    """Assert that `call` raises `error` with a text that matches `says`, and show it: this is what you will see."""
    try:
        call()
    except error as raised:
        seen = str(raised).strip().splitlines()[-1]
        assert re.search(says, seen), f"expected {says!r}, got {seen!r}"
        print(f"  {type(raised).__name__}: {seen}")
    else:
        raise AssertionError(f"nothing was raised; expected {error.__name__}: {says}")


def _unwritten(n):
    """An output full of NaN, so that an element which no program writes shows: torch.empty may hold plausible data."""
    return torch.full((n,), float("nan"), device=DEVICE)


# The kernel that several steps launch, rightly and wrongly. One program owns BLOCK elements.
@triton.jit
def double_kernel(x_ptr, z_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(z_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask=mask), mask=mask)


def block_not_a_power_of_two():
    """tl.arange takes powers of two only: round the block up and mask the rest."""
    x, z = torch.randn(100, device=DEVICE), _unwritten(100)
    _fails(lambda: double_kernel[(1,)](x, z, 100, BLOCK=100), triton.TritonError, "must be a power of 2")
    double_kernel[(1,)](x, z, 100, BLOCK=triton.next_power_of_2(100))
    assert torch.equal(z, 2 * x)


@triton.jit
def double_runtime_kernel(x_ptr, z_ptr, n):
    offsets = tl.arange(0, n)  # n is a runtime value; a shape must be known when the kernel is compiled
    tl.store(z_ptr + offsets, 2 * tl.load(x_ptr + offsets))


def runtime_value_as_a_shape():
    """A shape must be `tl.constexpr`; a length that varies stays a runtime argument and goes into the mask."""
    x, z = torch.randn(64, device=DEVICE), _unwritten(64)
    _fails(lambda: double_runtime_kernel[(1,)](x, z, 64), triton.TritonError, "must be of type tl.constexpr")
    double_kernel[(1,)](x, z, 64, BLOCK=64)
    assert torch.equal(z, 2 * x)


@triton.jit
def double_unmasked_kernel(x_ptr, z_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z_ptr + offsets, 2 * tl.load(x_ptr + offsets))


def forgotten_mask():
    """Without a mask the last block reads and writes past the end: 28 lanes of 128, usually without a message."""
    # A GPU rarely faults here, because allocations are padded and another tensor follows. The interpreter finds it:
    # the checks of every lesson run inside watched(). On a GPU, `compute-sanitizer python your_script.py` does.
    if not INTERPRETED:
        print("  left out on a GPU: the store would overwrite other tensors. Run with CUDA_VISIBLE_DEVICES= to see it.")
        return
    x, z = torch.randn(100), _unwritten(100)
    with watched():  # 12 of the 28, if z happens to begin at the next multiple of 64 bytes, behind element 112
        _fails(lambda: double_unmasked_kernel[(1,)](x, z, BLOCK=128), OutOfBounds, "(12|28) of 128 lanes load outside")
        double_kernel[(1,)](x, z, 100, BLOCK=128)


def grid_rounded_down():
    """n // BLOCK programs leave the tail unwritten: use triton.cdiv. Only an output filled with NaN shows it surely."""
    x, z = torch.randn(1000, device=DEVICE), _unwritten(1000)
    double_kernel[(1000 // 128,)](x, z, 1000, BLOCK=128)
    assert z.isnan().nonzero().flatten().tolist() == list(range(896, 1000))
    double_kernel[(triton.cdiv(1000, 128),)](x, z, 1000, BLOCK=128)
    assert torch.equal(z, 2 * x)


# One program owns one row.
@triton.jit
def row_max_kernel(x_ptr, z_ptr, stride, N, PAD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    tl.store(z_ptr + row, tl.max(tl.load(x_ptr + row * stride + cols, mask=cols < N, other=PAD)))


def padding_takes_part():
    """Masked lanes take part in a reduction: pad with its neutral element, -inf for max, +inf for min, 0 for sum."""
    # All elements are negative here. In a row of 100 from randn the maximum is positive, and the error does not show.
    # Without `other`, masked lanes are undefined on a GPU and 0 in the interpreter.
    x, z = torch.rand(4, 100, device=DEVICE) - 5, _unwritten(4)
    row_max_kernel[(4,)](x, z, 100, 100, PAD=0.0, BLOCK=128)
    assert z.eq(0).all()
    row_max_kernel[(4,)](x, z, 100, 100, PAD=float("-inf"), BLOCK=128)
    assert torch.equal(z, x.amax(1))


def rows_taken_as_contiguous():
    """A slice or a transpose is not contiguous in memory: pass x.stride(0), or refuse it with a clear error."""
    x, z = torch.randn(4, 160, device=DEVICE)[:, :100], _unwritten(4)  # rows of 100 that lie 160 apart
    row_max_kernel[(4,)](x, z, x.shape[1], 100, PAD=float("-inf"), BLOCK=128)
    assert z[0] == x[0].max()  # row 0 is right with any stride: test more than one
    assert not torch.equal(z, x.amax(1))
    row_max_kernel[(4,)](x, z, x.stride(0), 100, PAD=float("-inf"), BLOCK=128)
    assert torch.equal(z, x.amax(1))
    _fails(lambda: expect(x=x, contiguous=True), ValueError, r"not contiguous \(strides \(160, 1\)\)")


@triton.jit
def offset_kernel(z_ptr, row, stride, WIDE: tl.constexpr):
    if WIDE:
        row = row.to(tl.int64)
    tl.store(z_ptr, row * stride)


def offset_past_int32():
    """Ids and small integers are 32 bits: row * stride past 2^31 turns negative. Widen before the multiplication."""
    z = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    offset_kernel[(1,)](z, 50_000, 50_000, WIDE=False)
    assert z.item() == 50_000 * 50_000 - 2**32 < 0  # as an address: far in front of the tensor
    offset_kernel[(1,)](z, 50_000, 50_000, WIDE=True)
    assert z.item() == 50_000 * 50_000


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, CAST: tl.constexpr):  # [16, 16] each
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(c_ptr + at, tl.dot(a, b.to(a.dtype) if CAST else b))


@triton.jit
def half_kernel(x_ptr, z_ptr):
    tl.store(z_ptr, tl.load(x_ptr) / 2)


def dtypes_mixed():
    """tl.dot refuses fp16 times fp32; a store converts to the pointer's dtype silently."""
    a, b = (torch.randn(16, 16, device=DEVICE).to(d) for d in (torch.float16, torch.float32))
    c = torch.empty(16, 16, device=DEVICE)
    _fails(lambda: dot_kernel[(1,)](a, b, c, CAST=False), triton.TritonError, "must be same dtype. Got fp16 and fp32")
    dot_kernel[(1,)](a, b, c, CAST=True)
    torch.testing.assert_close(c, a.float() @ b.half().float(), rtol=1e-4, atol=1e-4)
    three = torch.tensor([3], device=DEVICE)
    z = torch.empty_like(three)  # the usual cause: an output made like an integer input
    half_kernel[(1,)](three, z)
    assert z.item() == 1
    half_kernel[(1,)](three, z := torch.empty_like(three, dtype=torch.float32))
    assert z.item() == 1.5


# One program adds up all 16 columns, a row at a time.
@triton.jit
def column_sum_kernel(x_ptr, z_ptr, M, ACC: tl.constexpr):  # [M, 16] -> [16]
    cols = tl.arange(0, 16)
    total = tl.zeros([16], ACC)
    for m in range(M):
        total += tl.load(x_ptr + m * 16 + cols)
    tl.store(z_ptr + cols, total)


def accumulated_in_16_bits():
    """A 16-bit sum stands still where the next number is 2 away: accumulate in fp32, round once at the end."""
    # fp16 keeps 11 significant bits and stops at 2^11; bf16 keeps 8 and stops at 2^8, after 256 ones.
    for dtype, narrow, stop in ((torch.float16, tl.float16, 2048), (torch.bfloat16, tl.bfloat16, 256)):
        x, z = torch.ones(64, 16, device=DEVICE, dtype=dtype), _unwritten(16)
        x[0] = stop
        column_sum_kernel[(1,)](x, z, 64, ACC=narrow)
        assert z.eq(stop).all()  # 63 ones added, all lost
        column_sum_kernel[(1,)](x, z, 64, ACC=tl.float32)
        assert z.eq(stop + 63).all()


@triton.jit
def relu_kernel(x_ptr, z_ptr, KEEP: tl.constexpr):  # [16] -> [16]
    x = tl.load(x_ptr + tl.arange(0, 16))
    y = tl.where(x < 0, 0.0, x) if KEEP else tl.where(x > 0, x, 0.0)
    tl.store(z_ptr + tl.arange(0, 16), y)


def nan_lost_in_a_comparison():
    """Every comparison with NaN is false: order it so that NaN takes the branch which keeps it, as PyTorch does."""
    # tl.maximum(x, 0.0) loses NaN on a GPU too, unless it is given propagate_nan=tl.PropagateNan.ALL.
    x, z = torch.randn(16, device=DEVICE), _unwritten(16)
    x[3] = float("nan")
    relu_kernel[(1,)](x, z, KEEP=False)
    assert x.relu()[3].isnan()
    assert z[3] == 0  # the model's NaN is gone, and with it the sign that something broke
    relu_kernel[(1,)](x, z, KEEP=True)
    torch.testing.assert_close(z, x.relu(), equal_nan=True)


def tensor_on_the_wrong_device():
    """Triton names a CPU tensor by its position among the arguments, if at all; a wrapper can name it properly."""
    elsewhere = torch.ones(4, device="meta" if INTERPRETED else "cpu")
    if not INTERPRETED:
        _fails(lambda: double_kernel[(1,)](elsewhere, elsewhere, 4, BLOCK=4), ValueError, "Pointer argument")
    _fails(lambda: expect(weight=elsewhere), ValueError, f"weight is on {elsewhere.device}, but")
    expect(weight=torch.ones(4, device=DEVICE))


# What shows each error:
#
#     a message from compiler or interpreter   block_not_a_power_of_two, runtime_value_as_a_shape, dtypes_mixed (tl.dot)
#     a message at the launch                  tensor_on_the_wrong_device (from `expect`, or from Triton)
#     a message from watched() alone           forgotten_mask
#     a wrong number, and no message           grid_rounded_down, padding_takes_part, rows_taken_as_contiguous,
#                                              offset_past_int32, accumulated_in_16_bits, nan_lost_in_a_comparison,
#                                              and a store in dtypes_mixed
LESSON = Steps(
    about=About(teaches="each error inside a kernel, made on purpose, then mended", hours=0.75, star=True),
    steps=(
        block_not_a_power_of_two,
        runtime_value_as_a_shape,
        forgotten_mask,
        grid_rounded_down,
        padding_takes_part,
        rows_taken_as_contiguous,
        offset_past_int32,
        dtypes_mixed,
        accumulated_in_16_bits,
        nan_lost_in_a_comparison,
        tensor_on_the_wrong_device,
    ),
)

if __name__ == "__main__":
    LESSON.main()
