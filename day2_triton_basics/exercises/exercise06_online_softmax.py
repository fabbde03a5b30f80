"""Softmax of a row that does not fit: the online maximum
======================================================
Maximum, sum and division are three passes: 3MN read, MN written. Maximum and sum can share one. Keep the maximum m of
the blocks so far, and the sum s of exp(x - m). When a block brings a larger maximum m_new, s has to be rescaled:

    exp(x - m_new) = exp(x - m) exp(m - m_new)        so every term of s changes by the same factor

Then 2MN are read and MN written. Flash attention is the same step, with vectors in place of s.

Predict: time over that of three passes, and over that of a row that stays in registers.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def softmax_kernel(x_ptr, y_ptr, x_stride, N, BLOCK: tl.constexpr):  # x, y [M, N]; y is contiguous
    # A program owns one row and walks along it twice, BLOCK columns at a time.
    row = tl.program_id(0).to(tl.int64)
    m = LOWEST  # the maximum so far; not -inf, since after a block that is all -inf, exp(-inf - -inf) is NaN
    s = 0.0  # the sum so far of exp(x - m)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=-float("inf")).to(tl.float32)
        # TODO(1): the new maximum; the old sum on its scale; the block's exponentials added.
        larger = tl.maximum(m, tl.max(x))
        s = s * tl.exp(m - larger) + tl.sum(tl.exp(x - larger))
        m = larger
        # END(1)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        # TODO(2): load the block again, store exp(x - m) / s.
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N).to(tl.float32)
        tl.store(y_ptr + row * N + cols, tl.exp(x - m) / s, mask=cols < N)
        # END(2)


def softmax(x):
    """softmax(x [M, N]) over rows of any length -> [M, N]; x may have any row stride."""
    expect(x=x, ndim=2, unit_stride=True)
    M, N = x.shape
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if y.numel():
        softmax_kernel[(M,)](x, y, x.stride(0), N, BLOCK=128)
    return y


# The learner's file ends here.
from lessonkit import DEVICE, case
from lessonkit.exercise import Exercise, Wrong


def inputs(M, N, rising=0.0, pad=0, hidden=0, dtype=torch.float32):
    # Centred at -5, so that 0 is larger than all of a short row. Rising: each block brings a larger maximum.
    ramp = torch.linspace(0, rising, N + pad, device=DEVICE)
    x = (torch.randn(M, N + pad, device=DEVICE) - 5 + ramp).to(dtype)[:, :N]
    x[:, :hidden] = -float("inf")
    return (x,)


EXERCISE = Exercise(
    op=softmax,
    reference=lambda x: torch.softmax(x, 1),
    inputs=inputs,
    cases=(
        case("no rows", M=0, N=5),
        case("one column: the answer is 1", M=3, N=1),
        case("one block, rows further apart than they are long", M=2, N=100, pad=28),
        case("three blocks, one of them short", M=2, N=300, rising=5.0),
        case("a mask hides the first block: all of it is -inf", M=2, N=300, hidden=128),
        case("the maximum grows from block to block, to where exp overflows", M=2, N=513, rising=200.0),
        case("and shrinks", M=2, N=512, rising=-200.0),
    ),
    reads=2,
    hints=(
        "exp(x - m_old) = exp(x - m_new) * exp(m_new - m_old): a sum on the old scale becomes one on the new by a "
        "factor.",
        "`tl.maximum(m, tl.max(x))` is the new maximum. m starts at the lowest finite value, as in lesson05_softmax: "
        "exp(m - larger) is then 0 after the first block, and not NaN after a block that is all -inf.",
        "s = s * exp(m - larger) + sum(exp(x - larger)), then m = larger. Second loop: exp(x - m) / s.",
    ),
    predicted=(
        "3/4 of three passes (3MN elements over 4MN) and 3/2 of a row in registers (2MN), if memory is the limit."
    ),
    wrong=(
        Wrong("the old sum is not brought to the new scale", "s * tl.exp(m - larger) +", "s +"),
        Wrong("the maximum is only the last block's", "tl.maximum(m, tl.max(x))", "tl.max(x) + 0 * m", "nan"),
        Wrong("the maximum starts at -inf: a first block of -inf gives NaN", "m = LOWEST", 'm = -float("inf")', "nan"),
        Wrong("the factor the wrong way round", "tl.exp(m - larger) +", "tl.exp(larger - m) +", "nan"),
        Wrong(
            "the block's exponentials are on the old scale",
            "tl.sum(tl.exp(x - larger))",
            "tl.sum(tl.exp(x - m))",
        ),
        Wrong("masked lanes count: padded with 0", 'mask=cols < N, other=-float("inf")', "mask=cols < N, other=0.0"),
        Wrong(
            "the second loop takes the first block again",
            "x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N).to",
            "x = tl.load(x_ptr + row * x_stride + cols - start, mask=cols < N).to",
        ),
        Wrong("nothing is divided by the sum", "tl.exp(x - m) / s", "tl.exp(x - m)"),
    ),
)
