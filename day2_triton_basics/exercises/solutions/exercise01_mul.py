"""Exercise 1: multiply, closed book
=================================
Write lesson01_vector_add's second rung again for z = x * y, without looking: offsets, mask, two loads, one store.
Then its gradient: dx = dz * y and dy = dz * x need no new kernel, only the right operands.

Predict: bytes moved, as a multiple of the 3n elements that the op needs (the last column of the table says).
Run it:    python day2_triton_basics/exercises/exercise01_mul.py
Hints:     in the day's README. A solution: solutions/exercise01_mul.py
"""

from dataclasses import replace

from lessonkit import Grad, expect, show

import torch
import triton
import triton.language as tl

from day2_triton_basics.lesson01_vector_add import LESSON


def reference(x, y):
    return x * y


@triton.jit
def mul_kernel(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):  # [n] each; a program owns BLOCK elements
    # Yours:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(z_ptr + offsets, x * y, mask=mask)
    # End of yours.


def mul(x, y):
    """[...] * [...] -> [...], 1024 elements a program."""
    expect(x=x, y=y, same_shape=True, same_dtype=True, contiguous=True)
    z = torch.empty_like(x)
    if z.numel():
        mul_kernel[(triton.cdiv(z.numel(), 1024),)](x, y, z, z.numel(), BLOCK=1024)
    return z


class _Mul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return mul(x, y)

    @staticmethod
    def backward(ctx, dz):
        # Yours:
        x, y = ctx.saved_tensors
        return mul(dz, y), mul(dz, x)
        # End of yours.


def mul_with_grad(x, y):
    """x * y with a gradient."""
    return _Mul.apply(x, y)


EXERCISE = replace(LESSON, reference=reference, rungs=(mul,), passes={mul: 1.0}, grad=Grad(mul_with_grad))

if __name__ == "__main__":
    raise SystemExit(show.checks("__main__", EXERCISE) > 0)
