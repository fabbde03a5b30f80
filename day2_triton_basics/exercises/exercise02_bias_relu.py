"""Bias and ReLU in one pass
=========================
torch.relu(x + bias) is two kernels. The sum reads MN elements and writes MN, the ReLU reads and writes them again: 4MN
in all. One kernel reads MN and writes MN, and N of bias, which stay in the cache. Predict the factor.

Three traps. Rows may lie further apart than N, so use the stride. The last block of a row hangs over its end. And
relu(NaN) is NaN. A comparison the wrong way round turns it into 0, and so does tl.maximum(y, 0.0) on a GPU.
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl


@triton.jit
def bias_relu_kernel(
    x_ptr,  # [M, N], rows x_stride elements apart
    bias_ptr,  # [N]
    z_ptr,  # [M, N], contiguous
    x_stride,
    N,
    BLOCK: tl.constexpr,
):
    # A program owns columns [id1 * BLOCK, (id1 + 1) * BLOCK) of row id0.
    # TODO(1): load x and bias, add in fp32, store the sum where it is not negative and 0 where it is.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask).to(tl.float32)
    y = x + tl.load(bias_ptr + cols, mask=mask).to(tl.float32)
    # y < 0 is false for NaN, so NaN takes the branch that keeps it.
    tl.store(z_ptr + row * N + cols, tl.where(y < 0, 0.0, y), mask=mask)
    # END(1)


def bias_relu(x, bias):
    """relu(x [M, N] + bias [N]) -> [M, N]; x may have any row stride."""
    expect(x=x, ndim=2, unit_stride=True)
    expect(x=x, bias=bias, same_dtype=True)
    expect(bias=bias, ndim=1, contiguous=True)
    M, N = x.shape
    z = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if z.numel():
        bias_relu_kernel[(M, triton.cdiv(N, 1024))](x, bias, z, x.stride(0), N, BLOCK=1024)
    return z


# The learner's file ends here.
from lessonkit import DEVICE, case
from lessonkit.exercise import Exercise, Wrong


def inputs(M, N, pad=0, nan=False, dtype=torch.float32):
    # Centred a little below zero, so that both branches of the ReLU are taken; the bias differs from column to column.
    x = (torch.randn(M, N + pad, device=DEVICE) - 0.3).to(dtype)[:, :N]
    if nan:
        x[0, 0] = float("nan")
    return x, torch.randn(N, device=DEVICE).to(dtype)


EXERCISE = Exercise(
    op=bias_relu,
    reference=lambda x, bias: torch.relu(x + bias),
    inputs=inputs,
    cases=(
        case("an empty tensor: nothing to launch", M=0, N=5),
        case("one element", M=1, N=1),
        case("rows lie 160 apart, 127 of them used", M=3, N=127, pad=33),
        case("relu(NaN) is NaN", M=2, N=9, nan=True),
        case("one column past a block", M=2, N=1025),
        case("many rows: the bias is read once for each", M=64, N=33),
    ),
    # Counted as if there were no cache: each of 64 rows reads the bias. On a GPU all but the first find it in L2.
    reads=2 * 64 / (64 + 1),
    hints=(
        "The grid has two axes: rows, and blocks of columns. bias is addressed by the column alone.",
        "Row r of x begins at r * x_stride, of z at r * N. One mask does for all three: cols < N.",
        "`tl.where(condition, 0.0, y)`: a comparison with NaN is false, so which condition leaves NaN alone? y < 0.",
    ),
    predicted="2: 4MN elements in two kernels, 2MN in one.",
    wrong=(
        Wrong("rows of x are taken to lie N apart", "x_ptr + row * x_stride", "x_ptr + row * N"),
        Wrong("relu(NaN) becomes 0", "tl.where(y < 0, 0.0, y)", "tl.where(y > 0, y, 0.0)"),
        Wrong(
            "tl.maximum drops NaN on a GPU, unless propagate_nan asks for it",
            "tl.where(y < 0, 0.0, y)",
            "tl.maximum(y, 0.0)",
        ),
        Wrong("every program takes the first block of columns", "tl.program_id(1)", "0", "unwritten"),
        Wrong("the bias is added after the ReLU's rounding to 16 bits", "y = x +", "y = x.to(tl.float16) +"),
        Wrong("no mask on x", "row * x_stride + cols, mask=mask", "row * x_stride + cols", "out of bounds"),
    ),
)
