"""A layer norm of your own
========================
y = (x - mean) / sqrt(var + eps) * w + b over rows, with var = mean((x - mean)^2). One kernel reads x once and writes y
once: 2MN elements. It also reads w and b for each row, from the cache. The row stays in registers between its two
reductions, so nothing is read twice.

Two traps. Lanes past N must count in neither reduction. And mean(x^2) - mean^2 loses its digits where the mean is large
beside the spread.
Predict: the relative error of mean(x^2) - mean^2 in fp32, for values around 1000 with a spread of 1.
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl


@triton.jit
def layernorm_kernel(
    x_ptr,  # [M, N], rows x_stride elements apart
    w_ptr,  # [N]
    b_ptr,  # [N]
    y_ptr,  # [M, N], contiguous
    x_stride,
    N,
    eps,
    BLOCK: tl.constexpr,
):
    # A program owns one row; BLOCK is N rounded up to a power of two.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    # TODO(1): load the row in fp32; its mean; its variance around that mean.
    # stub: x, mean, var = 0.0, 0.0, 0.0
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x) / N
    centred = tl.where(mask, x - mean, 0.0)
    var = tl.sum(centred * centred) / N
    # END(1)
    # TODO(2): normalise, scale, shift, store.
    w = tl.load(w_ptr + cols, mask=mask).to(tl.float32)
    b = tl.load(b_ptr + cols, mask=mask).to(tl.float32)
    tl.store(y_ptr + row * N + cols, (x - mean) * tl.rsqrt(var + eps) * w + b, mask=mask)
    # END(2)


def layernorm(x, w, b, eps):
    """layer norm of x [M, N] over rows with w, b [N] -> [M, N]; x may have any row stride."""
    expect(x=x, ndim=2, unit_stride=True)
    expect(x=x, w=w, b=b, same_dtype=True)
    M, N = x.shape
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if y.numel():
        layernorm_kernel[(M,)](x, w, b, y, x.stride(0), N, eps, BLOCK=triton.next_power_of_2(N))
    return y


# The learner's file ends here.
from lessonkit import DEVICE, case
from lessonkit.exercise import Exercise, Wrong


def inputs(M, N, shift=0.0, scale=1.0, pad=0, dtype=torch.float32):
    x = (scale * torch.randn(M, N + pad, device=DEVICE) + shift).to(dtype)[:, :N]
    w, b = (torch.randn(N, device=DEVICE).to(dtype) for _ in range(2))
    return x, w, b, 1e-5


EXERCISE = Exercise(
    op=layernorm,
    reference=lambda x, w, b, eps: torch.nn.functional.layer_norm(x, x.shape[1:], w, b, eps),
    inputs=inputs,
    cases=(
        case("no rows", M=0, N=5),
        case("one column: x is its own mean, the answer is b", M=3, N=1),
        case("a prime width, rows further apart than they are long", M=3, N=127, pad=33),
        case("a mean of 1000 and a spread of 1: cancellation", M=4, N=100, shift=1000.0),
        case("a spread of 0.001, where eps counts", M=4, N=64, scale=1e-3),
        case("whole rows, on which bytes are counted", M=32, N=64),
    ),
    reads=(32 + 2 * 32) / (32 + 2),  # without a cache every row reads w and b; the GPU's serves all but the first
    hints=(
        "After the mean is subtracted, lanes past N hold -mean: they have to be put back to 0 before they are squared.",
        "Divide by N, not by BLOCK, not by N - 1. eps is inside the root: `tl.rsqrt(var + eps)`.",
        "`mean = tl.sum(x) / N`, `centred = tl.where(mask, x - mean, 0.0)`, `var = tl.sum(centred * centred) / N`, and "
        "store `(x - mean) * tl.rsqrt(var + eps) * w + b`.",
    ),
    predicted=(
        "Several percent. mean(x^2) and mean^2 are about 10^6, fp32 rounds each by up to 0.03, and they differ by 1."
    ),
    wrong=(
        Wrong("lanes past the end count in the variance", "tl.where(mask, x - mean, 0.0)", "x - mean"),
        Wrong("the mean is over BLOCK lanes", "mean = tl.sum(x) / N", "mean = tl.sum(x) / BLOCK"),
        Wrong("mean(x^2) - mean^2 cancels", "tl.sum(centred * centred) / N", "tl.sum(x * x) / N - mean * mean"),
        Wrong("masked lanes take part in the sum, and hold anything", "mask=mask, other=0.0", "mask=mask", "nan"),
        Wrong("divided by N - 1", "tl.sum(centred * centred) / N", "tl.sum(centred * centred) / (N - 1)", "nan"),
        Wrong("eps is outside the root", "tl.rsqrt(var + eps)", "(1 / (tl.sqrt(var) + eps))"),
        Wrong("the shift is scaled too", "rsqrt(var + eps) * w + b", "rsqrt(var + eps) * (w + b)"),
    ),
)
