"""Prefix sum of a row, a block at a time
======================================
y[i] = x[0] + ... + x[i]. `tl.cumsum` computes it inside a block. From block to block the program carries one number,
the sum so far. Each element is read once and written once: 2MN. Because of the carry, the blocks of a row come one
after another, and only the rows run in parallel. lesson15_scan breaks that chain.

Predict: how many programs run for a tensor of [4, 2^20], on 132 SMs.
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl


@triton.jit
def prefix_sum_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):  # [M, N] each, contiguous
    # A program owns one row and walks along it, BLOCK columns at a time.
    row = tl.program_id(0).to(tl.int64)
    # TODO(1): a carry in fp32. In each step load a block, scan it, add the carry, store, and update the carry.
    carry = 0.0
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * N + cols, tl.cumsum(x, 0) + carry, mask=cols < N)
        carry += tl.sum(x)
    # END(1)


def prefix_sum(x):
    """[M, N] -> [M, N], the inclusive sum along each row, accumulated in fp32."""
    expect(x=x, ndim=2, contiguous=True)
    y = torch.empty_like(x)
    if x.numel():
        prefix_sum_kernel[(len(x),)](x, y, x.shape[1], BLOCK=128)
    return y


# The learner's file ends here.
from lessonkit import DEVICE, case
from lessonkit.exercise import Exercise, Wrong


def inputs(M, N, dtype=torch.float32):
    return (
        (torch.rand(M, N, device=DEVICE) + 0.54).to(dtype),
    )  # a block adds about 133, which a bf16 carry past 2048 rounds to 128


EXERCISE = Exercise(
    op=prefix_sum,
    reference=lambda x: x.cumsum(1),
    inputs=inputs,
    cases=(
        case("an empty tensor: nothing to launch", M=0, N=5),
        case("one element", M=1, N=1),
        case("one block exactly", M=2, N=128),
        case("a long row", M=1, N=4096),
        case("three blocks, one of them short: two carries", M=2, N=300),
    ),
    hints=(
        "What does block k need from all blocks before it? One number.",
        "`tl.cumsum(x, 0)` is inclusive. Masked lanes must add nothing to the carry: other=0.0.",
        "carry = 0.0 before the loop; store `tl.cumsum(x, 0) + carry`; then `carry += tl.sum(x)`.",
    ),
    predicted="4, one for each row: 128 of the 132 SMs have nothing to do.",
    wrong=(
        Wrong("no carry: every block begins at 0", "tl.cumsum(x, 0) + carry", "tl.cumsum(x, 0)"),
        Wrong("the carry is only the last block's sum", "carry += tl.sum(x)", "carry = tl.sum(x)"),
        Wrong("exclusive: element i itself is missing", "tl.cumsum(x, 0) + carry", "tl.cumsum(x, 0) - x + carry"),
        Wrong(
            "the carry is added to every element before the scan", "tl.cumsum(x, 0) + carry", "tl.cumsum(x + carry, 0)"
        ),
        Wrong("all rows read the first one", "x_ptr + row * N + cols", "x_ptr + cols"),
    ),
)
