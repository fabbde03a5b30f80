"""Exercise 4: log-softmax from softmax
====================================
log(softmax(x)) is right on paper. In fp32 exp(-104) is 0 and its log is -inf, where the answer is about -104: so the
logarithm has to be taken before anything is rounded to 0. With m = max(x): (x - m) - log(sum(exp(x - m))).

lesson03_softmax's fused rung reads MN elements and writes MN. This one does too: only the last lines differ.
Predict: which of the checks below does log(softmax(x)) pass?
Run it:    python day2_triton_basics/exercises/exercise04_log_softmax.py
Hints:     in the day's README. A solution: solutions/exercise04_log_softmax.py
"""

from dataclasses import replace

from lessonkit import DEVICE, case, expect, show

import torch
import triton
import triton.language as tl

from day2_triton_basics.lesson03_softmax import LESSON


def reference(x):
    return torch.log_softmax(x, 1)


@triton.jit
def log_softmax_kernel(x_ptr, z_ptr, x_stride, N, BLOCK: tl.constexpr):  # x, z [M, N]; z is contiguous
    # A program owns one row; BLOCK is N rounded up to a power of two.
    # Yours:
    pass
    # End of yours.


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


def inputs(M, N, scale=1.0, pad=0, dtype=torch.float32):
    # Centred at -5: a masked lane that is padded with 0 instead of -inf becomes the maximum of its row.
    return ((scale * torch.randn(M, N + pad, device=DEVICE) - 5).to(dtype)[:, :N],)


EXERCISE = replace(
    LESSON,
    reference=reference,
    inputs=inputs,
    rungs=(log_softmax,),
    checks=(
        case("no rows", M=0, N=5),
        case("one column: the answer is 0", M=3, N=1),
        case("a prime width, rows further apart than they are long", M=3, N=127, pad=33),
        case("exp(x) overflows, and exp(x - max) becomes 0", M=4, N=64, scale=60.0),
        case("a wide row", M=2, N=1025),
    ),
    passes={log_softmax: 1.0},
    work=lambda M, N, dtype, scale=1.0, pad=0: LESSON.work(M=M, N=N, dtype=dtype),
    grad=None,
)

if __name__ == "__main__":
    raise SystemExit(show.checks("__main__", EXERCISE) > 0)
