"""GELU and its derivative in one pass each
========================================
gelu(x) = x Phi(x), where Phi(x) = (1 + erf(x / sqrt 2)) / 2. Spelled out, five operators move 10n elements. One kernel
moves 2n. By the product rule its derivative is Phi(x) + x phi(x), with phi(x) = exp(-x^2 / 2) / sqrt(2 pi). The
backward reads x and dy and writes dx. Only x is saved for it.

Predict: gelu'(x) at 0, at -10 and at 10, and where it is smallest. Then: bytes of forward and backward together.
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl


@triton.jit
def gelu_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # [n] each; computed in fp32
    # TODO(1): x Phi(x), computed with tl.erf.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    tl.store(y_ptr + offsets, x * 0.5 * (1 + tl.erf(x * 0.7071067811865476)), mask=mask)
    # END(1)


@triton.jit
def gelu_backward_kernel(x_ptr, dy_ptr, dx_ptr, n, BLOCK: tl.constexpr):  # [n] each; computed in fp32
    # TODO(2): dy (Phi(x) + x phi(x)).
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    dy = tl.load(dy_ptr + offsets, mask=mask).to(tl.float32)
    cdf = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    pdf = tl.exp(-0.5 * x * x) * 0.3989422804014327
    tl.store(dx_ptr + offsets, dy * (cdf + x * pdf), mask=mask)
    # END(2)


def gelu(x):
    """gelu(x [...]) -> [...], the exact one (erf), 512 elements per program."""
    expect(x=x, contiguous=True)
    y = torch.empty_like(x)
    if x.numel():
        gelu_kernel[(triton.cdiv(x.numel(), 512),)](x, y, x.numel(), BLOCK=512)
    return y


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return gelu(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        if x.numel():
            gelu_backward_kernel[(triton.cdiv(x.numel(), 512),)](x, dy.contiguous(), dx, x.numel(), BLOCK=512)
        return dx


# The learner's file ends here.
from lessonkit import DEVICE, Grad, case
from lessonkit.exercise import Exercise, Wrong


def inputs(n, dtype=torch.float32):
    return ((3 * torch.randn(n, device=DEVICE)).to(dtype),)  # both tails are there: the tanh form is off at 2 to 3


EXERCISE = Exercise(
    op=gelu,
    reference=torch.nn.functional.gelu,
    inputs=inputs,
    cases=(
        case("an empty tensor: nothing to launch", n=0),
        case("one element", n=1),
        case("two blocks and one more", n=1025),
    ),
    grad=Grad(lambda x: Gelu.apply(x)),
    hints=(
        "Convert to fp32 before erf and exp; tl.store converts back to what z points to.",
        "1 / sqrt 2 = 0.7071067811865476 and 1 / sqrt(2 pi) = 0.3989422804014327. The product rule: (x Phi)' = Phi + "
        "x phi.",
        "`cdf = 0.5 * (1 + tl.erf(x * 0.7071067811865476))`; store `x * cdf`. Backward: "
        "`pdf = tl.exp(-0.5 * x * x) * 0.3989422804014327`; store `dy * (cdf + x * pdf)`.",
    ),
    predicted=(
        "1/2 at 0, nearly 0 at -10, nearly 1 at 10. It is smallest at x = -sqrt(2), where it is -0.129. Forward and "
        "backward move 5n elements: 2n and 3n."
    ),
    wrong=(
        Wrong(
            "the tanh approximation is another function",
            "x * 0.5 * (1 + tl.erf(x * 0.7071067811865476))",
            "x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))",
        ),
        Wrong(
            "erf is given x, not x / sqrt 2",
            "0.5 * (1 + tl.erf(x * 0.7071067811865476)), mask",
            "0.5 * (1 + tl.erf(x)), mask",
        ),
        Wrong("the product rule's second term is missing", "cdf + x * pdf", "cdf", "gradient"),
        Wrong("dy is loaded and not used", "dy * (cdf", "(cdf", "gradient"),
        Wrong("the density is not divided by sqrt(2 pi)", " * 0.3989422804014327", "", "gradient"),
    ),
)
