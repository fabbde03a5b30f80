"""RMSNorm: a row's mean square, and one pass in place of two
=========================================================
y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps) of each row. RMSNorm is LayerNorm without the mean, so one sum is
enough. At least MN elements are read and MN are written. Every row also loads w, N elements, which stay in L2.

    two kernels    x is read for rstd; x is read again and y is written    3MN through HBM
    one kernel     x is read once, y is written once                       2MN through HBM

Predicted gain of one kernel: 1.5 times. On an H200, at 4.2 TB/s, 8192 x 8192 in bf16 (268 MB) takes at least 0.064 ms.

You will be able to: fuse a statistic with its use, and count what a shared weight costs.
You need: lesson 5 (a row in registers) or lesson 8 (LayerNorm). lesson16_rows_of_any_length shows what to do with rows
that are too long for one program, or too short.
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019, section 4.
Run it:    python3 course.py run lesson10_rmsnorm
Check it:  python3 course.py check lesson10_rmsnorm
Time it:   python3 course.py bench lesson10_rmsnorm

Answer before you read on. How often is w loaded if M = 8192? A row has 5 elements and a block 8 lanes: what must the
other 3 lanes hold, and by what is the sum divided?
"""

from lessonkit import About, Lesson, Mutant, Prediction, Unsupported, case, expect

import torch
import triton
import triton.language as tl

from problems.rms_norm import PROBLEM


# Rung 1. Two kernels, one for the statistic and one for the result. Both walk along the row in blocks: any N will do.
# Predicted: 3MN elements through HBM (the GPU's memory), 1.5 times the least. Each row also loads all of w, from L2.
@triton.jit
def rstd_kernel(x_ptr, rstd_ptr, N, stride, eps, BLOCK_N: tl.constexpr):  # x: [M, N], rstd: [M]
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2^31
    squares = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < N, other=0.0).to(tl.float32)
        squares += x * x
    tl.store(rstd_ptr + row, tl.rsqrt(tl.sum(squares, axis=0) / N + eps))


@triton.jit
def scale_kernel(x_ptr, w_ptr, y_ptr, rstd_ptr, N, stride, BLOCK_N: tl.constexpr):  # y: [M, N]
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < N).to(tl.float32)
        w = tl.load(w_ptr + cols, mask=cols < N).to(tl.float32)
        tl.store(y_ptr + row * N + cols, x * rstd * w, mask=cols < N)


def unfused(x, w, eps):
    """x [M, N], w [N] -> y [M, N], rstd [M] fp32; two kernels, one program per row in each."""
    y, rstd, (M, N) = _prepare(x, w)
    if M:
        rstd_kernel[(M,)](x, rstd, N, x.stride(0), eps, BLOCK_N=1024)
        scale_kernel[(M,)](x, w, y, rstd, N, x.stride(0), BLOCK_N=1024)
    return y, rstd


# Rung 2. New: the row is one block, so x stays in registers between the sum and the scaling.
# Predicted: 2MN elements through HBM, 1.5 times as fast as rung 1. The kernel also loads MN elements of w, from L2.
# Short rows are slow. At N = 256 a program loads 512 bytes of x in bf16, and an SM of an H200 holds at most 32
# programs. That is 16 KB in flight, where Little's law asks for 25 KB. Liger gives a program 16 such rows. Lesson 16
# shows this step for softmax: from softmax_row to softmax_packed.
@triton.jit
def row_kernel(x_ptr, w_ptr, y_ptr, rstd_ptr, N, stride, eps, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < N, other=0.0).to(tl.float32)  # padding lanes add 0
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    w = tl.load(w_ptr + cols, mask=cols < N).to(tl.float32)
    tl.store(y_ptr + row * N + cols, x * rstd * w, mask=cols < N)
    tl.store(rstd_ptr + row, rstd)


def one_row(x, w, eps):
    """x [M, N], w [N] -> y [M, N], rstd [M] fp32; one program per row of at most 32,768 columns, 32 per thread."""
    y, rstd, (M, N) = _prepare(x, w)
    block = triton.next_power_of_2(max(N, 1))
    if N > 32768:
        raise Unsupported("rows past 32,768 would spill, with 64 elements per thread: course_ops.rms_norm takes them")
    if M:
        warps = max(1, block // 1024)
        row_kernel[(M,)](x, w, y, rstd, N, x.stride(0), eps, BLOCK_N=block, num_warps=warps)
    return y, rstd


def _prepare(x, w):
    expect(x=x, ndim=2, unit_stride=True)
    expect(x=x, w=w, same_dtype=True, unit_stride=True)
    if w.shape != x.shape[1:]:
        raise ValueError(f"w has shape {tuple(w.shape)}, expected {tuple(x.shape[1:])}, one weight per column of x")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, torch.empty(x.shape[0], dtype=torch.float32, device=x.device), x.shape


# The answers: w is loaded 8192 times, once for each row. The other 3 lanes hold 0, and the sum is divided by N = 5,
# not by 8.
LESSON = Lesson(
    about=About(
        teaches="a row's statistic and its use in one pass; what a weight that all rows share costs",
        hours=0.5,
        operator="rmsnorm",
        pictures=("traffic",),
    ),
    problem=PROBLEM,
    rungs=(unfused, one_row),
    predicted=(
        Prediction(rung=unfused, at={"M": 8192, "N": 8192}, percent_of_limit=67),
        Prediction(rung=one_row, at={"M": 8192, "N": 8192}, times=1.5, over=unfused),
    ),
    checks=(
        *PROBLEM.checks,
        case("the longest row", M=2, N=32768),
        case("bytes are counted here", M=203, N=1000),
    ),
    wrong=(
        Mutant("the sum, not the mean", "row_kernel", "axis=0) / N + eps", "axis=0) + eps", "one_row"),
        Mutant("divided by the padded width", "row_kernel", "axis=0) / N", "axis=0) / BLOCK_N", "one_row"),
        Mutant("eps added after the root", "row_kernel", "/ N + eps)", "/ N) + eps", "one_row"),
        Mutant("only the last block's squares", "rstd_kernel", "squares += x * x", "squares = x * x", "unfused"),
        Mutant("x read as if contiguous", "row_kernel", "row * stride", "row * N", "one_row"),
        Mutant(
            "lanes past the end",
            "row_kernel",
            "x * rstd * w, mask=cols < N",
            "x * rstd * w",
            "one_row",
            "out of bounds",
        ),
    ),
    claims={one_row: ("16-byte loads", "16-byte stores", "no spills")},
    passes={unfused: 2.0, one_row: 1.5},
    passes_why="The interpreter has no cache, so w counts for every row. Without w these are 1.5 and 1.",
)

if __name__ == "__main__":
    LESSON.main()
