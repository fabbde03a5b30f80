"""GELU in its tanh form, and its gradient: (1 + tanh(u)) / 2 is the logistic function of 2u."""

import math

import torch
import triton
import triton.language as tl

CUBIC = tl.constexpr(0.044715)
SLOPE = tl.constexpr(math.sqrt(2 / math.pi))
# exp(t) is exp2(t log2(e)), the one exponential that the hardware has, and every constant folds into two.
LINEAR = tl.constexpr(-2 * SLOPE.value * math.log2(math.e))
LINEAR_CUBIC = tl.constexpr(LINEAR.value * CUBIC.value)


@triton.jit
def gelu_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # [n] each
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    # Saturates by itself: far below zero exp2 is inf and x / inf is -0; far above it is 0 and x / 1 is x.
    y = x / (1 + tl.exp2(x * (x * x * LINEAR_CUBIC + LINEAR)))
    tl.store(y_ptr + offsets, y, mask=mask)


def gelu(x):
    """x, contiguous, of any shape -> y as x; 1024 elements per program."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        gelu_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y


# s = logistic(2u) is computed again from x:    y = x s,   dy/dx = s + x s (1 - s) d(2u)/dx
@triton.jit
def gelu_backward_kernel(x_ptr, dy_ptr, dx_ptr, n, BLOCK: tl.constexpr):  # [n] each
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    dy = tl.load(dy_ptr + offsets, mask=mask).to(tl.float32)
    s = 1 / (1 + tl.exp2(x * (x * x * LINEAR_CUBIC + LINEAR)))
    slope = (x * x * (3 * CUBIC) + 1) * (2 * SLOPE)
    tl.store(dx_ptr + offsets, dy * (s + x * s * (1 - s) * slope), mask=mask)


def gelu_backward(dy, x):
    """dy, x, contiguous, of one shape -> dx as x."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel():
        gelu_backward_kernel[(triton.cdiv(x.numel(), 1024),)](x, dy, dx, x.numel(), BLOCK=1024)
    return dx
