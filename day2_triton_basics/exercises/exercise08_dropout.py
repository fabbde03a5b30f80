"""Dropout without a mask in memory
================================
y = x / (1 - p) where a random number says keep, 0 elsewhere. A counter-based generator makes the number of element i
from (seed, i) alone: `tl.rand(seed, i)` is uniform in [0, 1). So the backward computes the same number again, and no
mask is stored. Forward and backward move 2n elements each. With a stored mask of one byte, in bf16, it is 2.5n each.

The contract: element i is kept if tl.rand(seed, i) >= p, for every block size. A dropped element is 0, also where x
is infinite.
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl


@triton.jit
def dropout_kernel(x_ptr, y_ptr, n, p, seed, BLOCK: tl.constexpr):  # [n] each
    # TODO(1): load, decide, scale what is kept, store.
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    keep = tl.rand(seed, offsets) >= p
    tl.store(y_ptr + offsets, tl.where(keep, x / (1 - p), 0.0), mask=mask)
    # END(1)


def dropout(x, p, seed):
    """[...] -> [...], each element 0 with probability p, else x / (1 - p); 0 <= p < 1; 256 elements per program."""
    expect(x=x, contiguous=True)
    y = torch.empty_like(x)
    if x.numel():
        dropout_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), p, seed, BLOCK=256)
    return y


class Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, seed):
        ctx.p, ctx.seed = p, seed
        return dropout(x, p, seed)

    @staticmethod
    def backward(ctx, dy):
        # TODO(2): dx, with the kernel that you have.
        # stub: return dy, None, None
        return dropout(dy.contiguous(), ctx.p, ctx.seed), None, None
        # END(2)


# The learner's file ends here.
from lessonkit import DEVICE, Grad, case
from lessonkit.exercise import Exercise, Wrong


@triton.jit
def rand_kernel(u_ptr, n, seed, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(u_ptr + i, tl.rand(seed, i), mask=i < n)


def reference(x, p, seed):
    u = torch.zeros(x.numel(), device=x.device)
    if x.numel():
        rand_kernel[(1,)](u, x.numel(), seed, BLOCK=triton.next_power_of_2(x.numel()))
    return torch.where(u.view(x.shape) >= p, x / (1 - p), 0.0)


def inputs(n, p=0.3, inf=False, dtype=torch.float32):
    x = torch.randn(n, device=DEVICE).to(dtype)
    if inf:
        x[:] = float("inf")
    return x, p, int(torch.randint(2**31, ()))


EXERCISE = Exercise(
    op=dropout,
    reference=reference,
    inputs=inputs,
    cases=(
        case("an empty tensor: nothing to launch", n=0),
        case("p = 0 keeps everything", n=100, p=0.0),
        case("a dropped infinity is 0, not NaN", n=64, inf=True),
        case("five blocks, the last of them short: no two draw the same numbers", n=1100),
        case("p = 0.9: the few that are kept are ten times as large", n=512, p=0.9),
    ),
    grad=Grad(lambda x, p, seed: Dropout.apply(x, p, seed), inputs=lambda n, inf=False, **rest: inputs(n, **rest)),
    hints=(
        "The random number belongs to the element, not to the lane: what is the element's index?",
        "keep has probability 1 - p, and x / (1 - p) keeps the mean. A product with 0 is NaN for an infinity: "
        "tl.where.",
        "`keep = tl.rand(seed, offsets) >= p`, store `tl.where(keep, x / (1 - p), 0.0)`. The backward is `dropout` "
        "of dy "
        "with the same p and seed: dropping is linear.",
    ),
    wrong=(
        Wrong("every block draws the same numbers", "tl.rand(seed, offsets)", "tl.rand(seed, tl.arange(0, BLOCK))"),
        Wrong("what should be dropped is kept", "offsets) >= p", "offsets) < p"),
        Wrong("what is kept is not scaled", "where(keep, x / (1 - p)", "where(keep, x"),
        Wrong(
            "a product with a mask makes NaN of a dropped infinity",
            "tl.where(keep, x / (1 - p), 0.0)",
            "keep.to(tl.float32) * (x / (1 - p))",
            "nan",
        ),
        Wrong(
            "the backward drops others than the forward",
            "ctx.p, ctx.seed), None",
            "ctx.p, ctx.seed + 1), None",
            "gradient",
        ),
    ),
)
