"""Exercise 2: bias and ReLU in one pass
=====================================
torch.relu(x + bias) is two kernels: the sum reads MN elements and writes MN, the ReLU reads and writes them again,
4MN in all. One kernel reads MN and writes MN (and N of bias, which stays in the cache): predict the factor.

Three things go wrong here: rows may lie further apart than N, so use the stride; the last block of a row hangs over
its end; and relu(NaN) is NaN, which a comparison the wrong way round turns into 0.
Run it:    python day2_triton_basics/exercises/exercise02_bias_relu.py
Hints:     in the day's README. A solution: solutions/exercise02_bias_relu.py
"""

from dataclasses import replace

from lessonkit import DEVICE, Work, case, expect, show

import torch
import triton
import triton.language as tl

from day2_triton_basics.lesson01_vector_add import LESSON


def reference(x, bias):
    return torch.relu(x + bias)


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
    # Yours:
    pass
    # End of yours.


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


def inputs(M, N, pad=0, nan=False, dtype=torch.float32):
    # Centred a little below zero, so that both branches of the ReLU are taken; the bias differs from column to column.
    x = (torch.randn(M, N + pad, device=DEVICE) - 0.3).to(dtype)[:, :N]
    if nan:
        x[0, 0] = float("nan")
    return x, torch.randn(N, device=DEVICE).to(dtype)


EXERCISE = replace(
    LESSON,
    reference=reference,
    inputs=inputs,
    rungs=(bias_relu,),
    checks=(
        case("nothing to do", M=0, N=5),
        case("one element", M=1, N=1),
        case("rows lie 160 apart, 127 of them used", M=3, N=127, pad=33),
        case("relu(NaN) is NaN", M=2, N=9, nan=True),
        case("one column past a block", M=2, N=1025),
        case("many rows: the bias is read once for each", M=64, N=33),
    ),
    work=lambda M, N, dtype, pad=0, nan=False: Work(bytes=(2 * M * N + N) * dtype.itemsize),
    # Bytes are counted as if there were no cache: x, z and, once for each row, the bias. On a GPU that one hits L2.
    passes={bias_relu: 3 * 64 / (2 * 64 + 1)},
    grad=None,
)

if __name__ == "__main__":
    raise SystemExit(show.checks("__main__", EXERCISE) > 0)
