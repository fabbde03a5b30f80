"""LayerNorm: the mean and the spread of every row
==================================================
x is a matrix of M rows and N columns. In each row y = (x - mean) * rstd * w + b (Ba, Kiros and Hinton 2016). Here mean
and variance are those of the row, and rstd = 1 / sqrt(variance + eps) is the reciprocal of its standard deviation. Each
row also loads w and b, N elements each. Caches serve all rows but the first.

    three kernels    x is read for the mean, for the variance and for the result; y is written    4MN elements
    one kernel       x is read once and stays in registers; y is written                          2MN elements

On an H200, at 4.2 TB/s, 8192 x 8192 in bf16 (268 MB) takes at least 0.064 ms.

The second subject is precision. The variance is also E[x^2] - E[x]^2, the mean of the squares minus the square of the
mean, which needs one pass only. In fp32 it loses its digits when the mean is large beside the spread (the standard
deviation). With mean 1000 and spread 1, x^2 is about 1,000,000. There neighbouring fp32 values lie 0.06 apart, and the
variance is 1.

You will be able to: fuse passes over a row, and compute a variance in one pass that keeps its digits.
You need: lesson 5 (softmax). Lesson 9 is the backward; lesson16_rows_of_any_length has short and long rows.
Run it:    python3 course.py run lesson08_layernorm
Check it:  python3 course.py check lesson08_layernorm
Time it:   python3 course.py bench lesson08_layernorm

Answer before you read on. A row has 5 elements and a block 8 lanes. The padding is loaded as 0: what is it after the
mean is subtracted? Two chunks of the same length hold only ones and only threes: what is the variance of both together?
"""

import math
from functools import partial

from lessonkit import About, Lesson, Mutant, Prediction, Unsupported, case, expect

import torch
import triton
import triton.language as tl

from problems.layer_norm import EPS, PROBLEM


# Rung 1. The definition, a kernel for each step: mean, rstd, result. A program owns a row and walks over it in blocks.
# Predicted: x is read three times, 4MN elements through HBM (the GPU's memory), twice the least.
@triton.jit
def mean_kernel(x_ptr, mean_ptr, N, stride_x, BLOCK: tl.constexpr):  # x [M, N], mean [M]
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(mean_ptr + row, tl.sum(total, axis=0) / N)


@triton.jit
def rstd_kernel(x_ptr, mean_ptr, rstd_ptr, N, stride_x, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    mean = tl.load(mean_ptr + row)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=0.0).to(tl.float32)
        # N = 5 in a block of 8, mean 3:    loaded     1  2  3  4  5  0  0  0
        #                                   - mean    -2 -1  0  1  2 -3 -3 -3    the padding would count
        #                                   where     -2 -1  0  1  2  0  0  0
        centred = tl.where(cols < N, x - mean, 0.0)  # the padding is 0, and 0 - mean is not
        squares += centred * centred
    tl.store(rstd_ptr + row, tl.rsqrt(tl.sum(squares, axis=0) / N + eps))


@triton.jit
def normalize_kernel(x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, N, stride_x, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N)
        tl.store(y_ptr + row * N + cols, normalize(x, mean, rstd, w_ptr, b_ptr, cols, cols < N), mask=cols < N)


@triton.jit
def normalize(x, mean, rstd, w_ptr, b_ptr, cols, mask):
    # Every row loads w and b: evict_last keeps them in the caches longer than x and y.
    w = tl.load(w_ptr + cols, mask=mask, eviction_policy="evict_last").to(tl.float32)
    b = tl.load(b_ptr + cols, mask=mask, eviction_policy="evict_last").to(tl.float32)
    return (x.to(tl.float32) - mean) * rstd * w + b


def layernorm_unfused(x, w, b, eps=EPS):
    """x [M, N], w [N], b [N] -> y [M, N], mean [M] and rstd [M] in fp32; three kernels."""
    M, N, y, mean, rstd = _prepare(x, w, b)
    if y.numel():
        mean_kernel[(M,)](x, mean, N, x.stride(0), BLOCK=1024)
        rstd_kernel[(M,)](x, mean, rstd, N, x.stride(0), eps, BLOCK=1024)
        normalize_kernel[(M,)](x, w, b, y, mean, rstd, N, x.stride(0), BLOCK=1024)
    return y, mean, rstd


# Rung 2. New: a block as wide as the row. x is read once, and both passes over it are passes over registers.
# Predicted: 2MN elements, half of rung 1's time. A row of N = 4096 is 32 elements for each of 128 threads. At N = 32768
# a program has 1024 threads, and each needs more than 32 registers. A second program does not fit into the 65,536 of
# an SM. So no loads are in flight there while the program computes.
@triton.jit
def layernorm_row_kernel(
    x_ptr,  # [M, N], rows stride_x elements apart
    w_ptr, b_ptr,  # [N] each
    y_ptr,  # [M, N]
    mean_ptr, rstd_ptr,  # [M] each, fp32
    N, stride_x, eps, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / N
    centred = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=0) / N + eps)
    tl.store(y_ptr + row * N + cols, normalize(x, mean, rstd, w_ptr, b_ptr, cols, mask), mask=mask)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


def layernorm_row(x, w, b, eps=EPS):
    """As layernorm_unfused, one kernel, one program per row; N up to 32768."""
    M, N, y, mean, rstd = _prepare(x, w, b)
    if N > 32768:
        raise Unsupported(f"a row of {N} does not fit one block: at most 32768")
    if y.numel():
        block = triton.next_power_of_2(N)
        warps = min(32, max(1, block // 1024))  # 32 elements per thread: four 16-byte loads in bf16
        layernorm_row_kernel[(M,)](x, w, b, y, mean, rstd, N, x.stride(0), eps, BLOCK_N=block, num_warps=warps)
    return y, mean, rstd


# Rung 3, advanced. New: a loop over the row in chunks, so any length will do. Each chunk has a count n, a mean and m2,
# the sum of (x - mean)^2. Two chunks a and b are merged by Chan, Golub and LeVeque ("Updating formulae and a pairwise
# algorithm for computing sample variances", 1979, eq. 1.5).
#
# The sum of (x - p)^2 over a chunk is least where p is its mean. Elsewhere it is larger by n (p - mean)^2. Here p is
# the mean of a and b together. With delta = mean_b - mean_a, p lies delta n_b / n from mean_a, and delta n_a / n from
# mean_b:
#
#     m2 = m2_a + n_a (delta n_b / n)^2 + m2_b + n_b (delta n_a / n)^2        both have n = n_a + n_b elements
#        = m2_a + m2_b + delta^2 n_a n_b / n
#
# For the chunks [1, 1] and [3, 3] this gives m2 = 0 + 0 + 2^2 * 2 * 2 / 4 = 4. The variance of [1, 1, 3, 3] is
# 4 / 4 = 1.
#
# What is squared is always a difference, x - mean or delta, and never x itself. So no digits are lost.
# Predicted: x is loaded twice, 3MN elements. The second read comes soon after the first and finds most of the row
# in the 60 MB of L2. So the time is between rung 2's and 1.5 times that: 0.67 to 1 times its speed.
@triton.jit
def layernorm_chunked_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, N, stride_x, eps, BLOCK: tl.constexpr
):  # shapes as in rung 2
    row = tl.program_id(0).to(tl.int64)
    count, mean, m2 = 0.0, 0.0, 0.0
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=0.0).to(tl.float32)
        chunk_count = tl.minimum(N - start, BLOCK).to(tl.float32)
        chunk_mean = tl.sum(x, axis=0) / chunk_count
        centred = tl.where(cols < N, x - chunk_mean, 0.0)
        delta = chunk_mean - mean
        m2 += tl.sum(centred * centred, axis=0) + delta * delta * (count * chunk_count / (count + chunk_count))
        count += chunk_count
        mean += delta * (chunk_count / count)
    rstd = tl.rsqrt(m2 / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N)
        tl.store(y_ptr + row * N + cols, normalize(x, mean, rstd, w_ptr, b_ptr, cols, cols < N), mask=cols < N)


def layernorm_chunked(x, w, b, eps=EPS):
    """As layernorm_unfused, one kernel, one program per row, any N: x is read twice."""
    M, N, y, mean, rstd = _prepare(x, w, b)
    if y.numel():
        layernorm_chunked_kernel[(M,)](x, w, b, y, mean, rstd, N, x.stride(0), eps, BLOCK=4096, num_warps=8)
    return y, mean, rstd


# Rung 3 in plain PyTorch, with the same loop and names, to step through in a debugger.
def chunked_model(x, w, b, eps=EPS, BLOCK=1024):
    M, N = x.shape
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    means, rstds = torch.full((2, M), math.nan, device=x.device)
    for row in range(M if N else 0):
        count, mean, m2 = 0.0, 0.0, 0.0
        for start in range(0, N, BLOCK):
            chunk = x[row, start : start + BLOCK].float()
            chunk_count = float(len(chunk))
            chunk_mean = chunk.sum() / chunk_count
            delta = chunk_mean - mean
            m2 += ((chunk - chunk_mean) ** 2).sum() + delta * delta * (count * chunk_count / (count + chunk_count))
            count += chunk_count
            mean += delta * (chunk_count / count)
        means[row], rstds[row] = mean, torch.rsqrt(m2 / N + eps)
        y[row] = ((x[row].float() - mean) * rstds[row] * w.float() + b.float()).to(x.dtype)
    return y, means, rstds


def _prepare(x, w, b):
    expect(x=x, ndim=2, unit_stride=True)
    expect(w=w, b=b, ndim=1, same_shape=True, contiguous=True)
    expect(x=x, w=w, b=b, same_dtype=True)
    if w.shape[0] != x.shape[1]:
        raise ValueError(f"w has {w.shape[0]} elements, but a row of x has {x.shape[1]}: make them equal")
    M, N = x.shape
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    make = torch.empty if N else partial(torch.full, fill_value=math.nan)  # as torch.var_mean has it
    mean, rstd = (make((M,), dtype=torch.float32, device=x.device) for _ in range(2))
    return M, N, y, mean, rstd


# fmt: off
WRONG = (
    Mutant("variance as E[x^2] - E[x]^2", "layernorm_row_kernel", "tl.sum(centred * centred, axis=0) / N",
           "tl.maximum(tl.sum(x * x, axis=0) / N - mean * mean, 0.0)", "layernorm_row"),
    Mutant("padding counted as zeros", "layernorm_row_kernel", "tl.where(mask, x - mean, 0.0)", "x - mean",
           "layernorm_row"),
    Mutant("chunks merged as if their means were equal", "layernorm_chunked_kernel", "delta * delta *", "0.0 *",
           "layernorm_chunked"),
    Mutant("a ragged chunk weighs as much as a full one", "layernorm_chunked_kernel", "tl.minimum(N - start, BLOCK)",
           "tl.minimum(BLOCK, BLOCK)", "layernorm_chunked"),
    Mutant("rows taken to be N apart", "mean_kernel", "row * stride_x", "row * N", "layernorm_unfused",
           "nan"),
)
# fmt: on


# The answers: the padding is 0 - mean = -mean, and its square would count. `tl.where` makes it 0 again. The variance of
# both chunks together is 1, since each element lies 1 from the common mean of 2.
LESSON = Lesson(
    about=About(
        teaches="mean and variance in one pass that keeps its digits",
        hours=1,
        star=True,
        operator="layernorm",
        pictures=("traffic",),
    ),
    problem=PROBLEM,
    rungs=(layernorm_unfused, layernorm_row, layernorm_chunked),
    predicted=(
        Prediction(rung=layernorm_unfused, at={"M": 8192, "N": 8192}, percent_of_limit=50),
        Prediction(rung=layernorm_row, at={"M": 8192, "N": 8192}, times=2, over=layernorm_unfused),
        Prediction(rung=layernorm_chunked, at={"M": 8192, "N": 8192}, times=(0.67, 1), over=layernorm_row),
    ),
    checks=(
        *PROBLEM.checks,
        case("the bytes are counted here", M=40, N=520),
    ),
    benches=tuple({"M": m, "N": n} for m, n in ((4096, 4096), (8192, 8192), (4096, 32768))),
    wrong=WRONG,
    claims={layernorm_row: ("16-byte loads", "16-byte stores", "no spills"), layernorm_chunked: ("no spills",)},
    passes={layernorm_unfused: 3.0, layernorm_row: 2.0, layernorm_chunked: 2.5},
    passes_why="The interpreter has no cache, so w and b count for every row: as many bytes as x and y together. "
    "Without them the three rungs move 2, 1 and 1.5 times the least, as the text predicts.",
    cpu_model=chunked_model,
)

if __name__ == "__main__":
    LESSON.main()
