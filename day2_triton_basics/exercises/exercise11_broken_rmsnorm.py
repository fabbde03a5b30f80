"""Debug: an RMS norm that passed on the author's machine
======================================================
y = x / sqrt(mean(x^2) + eps) * w. The author tried it on x = torch.randn(8, 1024) in float32, contiguous and with a
power of two as its width, and it was right. It is wrong in three ways that this input cannot show. Find the lines, and
say for each which input makes it fail. Then mend them: `check` shows one at a time.
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl


@triton.jit
def rmsnorm_kernel(x_ptr, w_ptr, y_ptr, x_stride, N, eps, BLOCK: tl.constexpr):  # x, y [M, N], w [N]; y is contiguous
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / N + eps)
    w = tl.load(w_ptr + cols, mask=mask).to(tl.float32)
    tl.store(y_ptr + row * N + cols, x * scale * w, mask=mask)


def rmsnorm(x, w, eps):
    """RMS norm of x [M, N] over rows, w [N] -> [M, N]; x may have any row stride."""
    expect(x=x, ndim=2, unit_stride=True)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        M, N = x.shape
        rmsnorm_kernel[(M,)](x, w, y, x.stride(0), N, eps, BLOCK=triton.next_power_of_2(N))
    return y


# The learner's file ends here.
from lessonkit import DEVICE, case
from lessonkit.exercise import Exercise, Wrong


def inputs(M, N, pad=0, scale=1.0, dtype=torch.float32):
    x = (scale * torch.randn(M, N + pad, device=DEVICE)).to(dtype)[:, :N]
    return x, (torch.rand(N, device=DEVICE) + 0.5).to(dtype), 1e-6


def reference(x, w, eps):
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + eps) * w).to(x.dtype)


EXERCISE = Exercise(
    op=rmsnorm,
    reference=reference,
    inputs=inputs,
    cases=(
        case("the author's input, smaller", M=4, N=64),
        case("a width that is no power of two", M=3, N=100),
        case("a view of wider rows", M=3, N=64, pad=36),
        case("values to 300: their squares are too large for fp16", M=2, N=128, scale=100.0),
        case("values so small that eps counts", M=2, N=64, scale=1e-4),
        case("whole rows, on which bytes are counted", M=32, N=64),
    ),
    dtypes=(torch.float32, torch.float16),
    reads=(32 + 32) / (32 + 1),
    hints=(
        "What do N = 1024, contiguous and float32 each hide? A mask, a stride, a conversion.",
        "Which number divides the sum where BLOCK is not N? How far apart do rows of a view lie? In which dtype is x "
        "* x?",
        "Divide by N; address rows of x by x_stride; `.to(tl.float32)` right after the load of x.",
    ),
    wrong=(
        Wrong("the mean is over BLOCK lanes", "tl.sum(x * x) / N", "tl.sum(x * x) / BLOCK", planted=True),
        Wrong("rows of x are taken to lie N apart", "x_ptr + row * x_stride", "x_ptr + row * N", planted=True),
        Wrong("squares in 16 bits overflow", "other=0.0).to(tl.float32)", "other=0.0)", planted=True),
        Wrong("rows of y lie as far apart as those of x", "y_ptr + row * N", "y_ptr + row * x_stride", "out of bounds"),
        Wrong("no mask on the store", "x * scale * w, mask=mask", "x * scale * w", "out of bounds"),
    ),
)
