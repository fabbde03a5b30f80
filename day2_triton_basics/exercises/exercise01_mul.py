"""Multiply, closed book
=====================
Write lesson01_vector_add's second rung again for z = x * y, without looking: offsets, mask, two loads, one store.
Then its gradient: dx = dz * y and dy = dz * x need no new kernel, only the right operands.

Predict: bytes moved, as a multiple of the 3n elements that the op needs. The check shows the count once you pass.
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl


@triton.jit
def mul_kernel(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):  # [n] each; a program owns BLOCK elements
    # TODO(1): which elements are this program's, which of them exist? Two loads, one store.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(z_ptr + offsets, x * y, mask=mask)
    # END(1)


def mul(x, y):
    """[...] * [...] -> [...], 1024 elements per program."""
    expect(x=x, y=y, same_shape=True, same_dtype=True, contiguous=True)
    z = torch.empty_like(x)
    if z.numel():
        mul_kernel[(triton.cdiv(z.numel(), 1024),)](x, y, z, z.numel(), BLOCK=1024)
    return z


class Mul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return mul(x, y)

    @staticmethod
    def backward(ctx, dz):
        # TODO(2): return dx and dy, from dz and what forward saved.
        # stub: return None, None
        x, y = ctx.saved_tensors
        return mul(dz, y), mul(dz, x)
        # END(2)


# The learner's file ends here.
from lessonkit import Grad, case
from lessonkit.exercise import Exercise, Wrong

from problems.vector_add import inputs


def mul_with_grad(x, y):
    return Mul.apply(x, y)


EXERCISE = Exercise(
    op=mul,
    reference=lambda x, y: x * y,
    inputs=inputs,
    cases=(
        case("an empty tensor: nothing to launch", n=0),
        case("one element", n=1),
        case("one past a block", n=1025),
        case("three blocks, the last of them short", n=2500),
    ),
    grad=Grad(mul_with_grad),
    hints=(
        "Three questions: which elements are mine? Which of them exist? What do I load, what do I store?",
        "Program p owns elements p * BLOCK to p * BLOCK + BLOCK - 1: `tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)`. "
        "The mask is a comparison with n. The backward has x and y in `ctx.saved_tensors`.",
        "`mask = offsets < n`, then `tl.load(x_ptr + offsets, mask=mask)`, the same for y, and "
        "`tl.store(z_ptr + offsets, x * y, mask=mask)`. Backward: `return mul(dz, y), mul(dz, x)`.",
    ),
    predicted="1: each of the 3n elements is moved once.",
    wrong=(
        Wrong("one load has no mask", "y_ptr + offsets, mask=mask", "y_ptr + offsets", "out of bounds"),
        Wrong("the store has no mask", "x * y, mask=mask", "x * y", "out of bounds"),
        Wrong("it adds", "x * y, mask", "x + y, mask"),
        Wrong("every program takes the first block", "tl.program_id(0).to(tl.int64) * BLOCK + ", "", "unwritten"),
        Wrong("the mask leaves out the last element", "offsets < n", "offsets < n - 1", "unwritten"),
        Wrong("the two gradients are exchanged", "mul(dz, y), mul(dz, x)", "mul(dz, x), mul(dz, y)", "gradient"),
        Wrong("PyTorch does the work", "    expect(x=x", "    return x * y\n    expect(x=x", "traffic"),
    ),
)
