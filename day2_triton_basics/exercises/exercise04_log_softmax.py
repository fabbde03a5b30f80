"""Log-softmax from softmax
========================
log(softmax(x)) is right on paper. In fp32 exp(-104) is 0 and its log is -inf, where the answer is about -104. So the
logarithm has to be taken before anything is rounded to 0. With m = max(x):

    log(exp(x - m) / s) = (x - m) - log(s)        with s = sum(exp(x - m)), which is at least 1

lesson05_softmax's fused rung reads MN elements and writes MN. This one does too: only the last lines differ.
Predict: which of the cases does log(softmax(x)) pass?
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl


@triton.jit
def log_softmax_kernel(x_ptr, z_ptr, x_stride, N, BLOCK: tl.constexpr):  # x, z [M, N]; z is contiguous
    # A program owns one row; BLOCK is N rounded up to a power of two.
    # TODO(1): load the row, subtract its maximum, subtract the logarithm of the sum of the exponentials.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=-float("inf")).to(tl.float32)
    x -= tl.max(x)
    # exp(-inf) is 0, so the masked lanes add nothing. The logarithm is taken of the sum, which is at least 1.
    tl.store(z_ptr + row * N + cols, x - tl.log(tl.sum(tl.exp(x))), mask=mask)
    # END(1)


def log_softmax(x):
    """log(softmax(x [M, N])) over rows -> [M, N], to 65,536 columns; x may have any row stride."""
    expect(x=x, ndim=2, unit_stride=True)
    M, N = x.shape
    if N > 2**16:
        raise ValueError(f"x has {N} columns, this exercise keeps a row in registers and takes 65536 at most")
    z = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if z.numel():
        log_softmax_kernel[(M,)](x, z, x.stride(0), N, BLOCK=triton.next_power_of_2(N), num_warps=8)
    return z


# The learner's file ends here.
from lessonkit import DEVICE, case
from lessonkit.exercise import Exercise, Wrong


def inputs(M, N, scale=1.0, pad=0, dtype=torch.float32):
    # Centred at -5: a masked lane that is padded with 0 instead of -inf becomes the maximum of its row.
    return ((scale * torch.randn(M, N + pad, device=DEVICE) - 5).to(dtype)[:, :N],)


EXERCISE = Exercise(
    op=log_softmax,
    reference=lambda x: torch.log_softmax(x, 1),
    inputs=inputs,
    cases=(
        case("no rows", M=0, N=5),
        case("one column: the answer is 0", M=3, N=1),
        case("a prime width, rows further apart than they are long", M=3, N=127, pad=33),
        case("exp(x) overflows, and exp(x - max) becomes 0", M=4, N=64, scale=60.0),
        case("a wide row", M=2, N=1025),
    ),
    hints=(
        "Subtract the maximum first; pad the masked lanes so that they can neither be it nor add to the sum.",
        "log(exp(a) / s) = a - log(s): nothing is exponentiated and taken back.",
        '`x = tl.load(..., mask=mask, other=-float("inf")).to(tl.float32)`, `x -= tl.max(x)`, '
        "and store `x - tl.log(tl.sum(tl.exp(x)))`.",
    ),
    predicted=(
        "All but one. Only in the case whose scores are 60 times as large does exp(x - max) become 0, and its "
        "logarithm -inf."
    ),
    wrong=(
        Wrong(
            "the logarithm of the softmax: what was rounded to 0 has none",
            "x - tl.log(tl.sum(tl.exp(x)))",
            "tl.log(tl.exp(x) / tl.sum(tl.exp(x)))",
        ),
        Wrong("masked lanes are padded with 0, which may be the maximum and adds to the sum", '-float("inf")', "0.0"),
        Wrong("the maximum is not subtracted", "x -= tl.max(x)", "x -= 0"),
        Wrong("rows of x are taken to lie N apart", "row * x_stride", "row * N"),
        Wrong(
            "the row is loaded twice",
            "x -= tl.max(x)",
            'x -= tl.max(tl.load(x_ptr + row * x_stride + cols, mask=mask, other=-float("inf")).to(tl.float32))',
            "traffic",
        ),
    ),
)
