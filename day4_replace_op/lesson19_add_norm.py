"""Add and LayerNorm in one kernel: the residual stream is read and written once
============================================================================
Between two matmuls a transformer computes x = x + delta, y = LayerNorm(x) w + b. Under autocast the residual stream x
is fp32, while a matmul's output delta and its input y are bf16. PyTorch runs three kernels, with the norm in fp32 and a
cast after it:

    add    reads x 4, delta 2, writes x 4         10 bytes per element
    norm   reads x 4, writes y 4                   8
    cast   reads y 4, writes y 2                   6        24 bytes; in one kernel x 4, delta 2, x 4, y 2: 12

Predicted: 2 times as fast. If all is bf16 there is no cast, and 10 bytes become 8. GPT-2 small runs it 24 times a step
on [32768, 768] (302 MB, 0.072 ms at 4.2 TB/s), so a forward takes 1.7 ms less. Lesson 20 is the backward.

A fusion must keep one rounding: the sum is rounded to the stream's dtype before it is normalised, as in PyTorch.
Otherwise forward and backward would normalise different values.

You will learn: which roundings a fusion must keep, and kernels that mix dtypes.
Run it:    python3 course.py run lesson19_add_norm
Check it:  python3 course.py check lesson19_add_norm
Time it:   python3 course.py bench lesson19_add_norm
"""

import math
from functools import partial

from lessonkit import About, Lesson, Mutant, Prediction, case, expect

import torch
import triton
import triton.language as tl

from course_ops.kernels._rows import Rows, choose
from course_ops.layer_norm import FORWARD as LAYER_NORM
from problems.add_norm import EPS, PROBLEM


# Rung 1. An add kernel, a norm kernel and a cast, as in PyTorch; the norm is day 2's, from course_ops.
@triton.jit
def add_kernel(x_ptr, delta_ptr, total_ptr, N, stride_x, stride_delta, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N).to(tl.float32)
        delta = tl.load(delta_ptr + row * stride_delta + cols, mask=cols < N).to(tl.float32)
        tl.store(total_ptr + row * N + cols, x + delta, mask=cols < N)


def add_then_norm(x, delta, w, b, eps=EPS):
    """x (fp32, or as delta) and delta [M, N], w and b [N] as x -> x + delta as x, its norm as delta, mean and rstd [M].

    Raises ValueError or TypeError for other shapes and dtypes.
    """
    M, N, total, y, mean, rstd = _prepare(x, delta, w, b)
    if y.numel():
        add_kernel[(M,)](x, delta, total, N, x.stride(0), delta.stride(0), BLOCK=1024)
        normed, mean, rstd = choose(LAYER_NORM, Rows.of(total))(total, w, b, eps)
        y.copy_(normed)
    return total, y, mean, rstd


# Rung 2. New: a program owns a tile of rows, as in course_ops' layer_norm. It loads x and delta, adds them, rounds the
# sum to the stream's dtype, stores it, and normalises it from registers.
# Predicted: 12 bytes per element instead of rung 1's 24, or 8 instead of 10 if all is bf16.
@triton.jit
def normalize(x, mean, rstd, w_ptr, b_ptr, cols, mask):
    # Every row reads w and b, so they should stay in the caches while x and y stream through.
    w = tl.load(w_ptr + cols, mask=mask, eviction_policy="evict_last").to(tl.float32)
    b = tl.load(b_ptr + cols, mask=mask, eviction_policy="evict_last").to(tl.float32)
    return (x.to(tl.float32) - mean) * rstd * w + b


@triton.jit
def add_norm_kernel(
    x_ptr, delta_ptr, w_ptr, b_ptr,  # [M, N], [M, N], rows stride_x and stride_delta apart, [N], [N]
    total_ptr, y_ptr, mean_ptr, rstd_ptr,  # [M, N], [M, N], [M] and [M] in fp32
    M, N, stride_x, stride_delta, eps, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + rows * stride_delta + cols, mask=mask, other=0.0).to(tl.float32)
    total = (x + delta).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + rows * N + cols, total, mask=mask)
    mean = tl.sum(total.to(tl.float32), axis=1, keep_dims=True) / N
    centred = tl.where(cols < N, total.to(tl.float32) - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / N + eps)
    y = normalize(total, mean, rstd, w_ptr, b_ptr, cols, cols < N)
    tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + rows, mean, mask=rows < M)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)


def add_norm(x, delta, w, b, eps=EPS):
    """As add_then_norm, in one kernel for N up to 16384; longer rows call add_then_norm."""
    M, N, total, y, mean, rstd = _prepare(x, delta, w, b)
    if N > 16384:
        return add_then_norm(x, delta, w, b, eps)
    if y.numel():
        block = triton.next_power_of_2(N)
        rows = max(1, 2048 // block)  # 16 elements per thread, two rows of 768 for 4 warps
        add_norm_kernel[(triton.cdiv(M, rows),)](
            x, delta, w, b, total, y, mean, rstd, M, N, x.stride(0), delta.stride(0), eps, rows, block,
            num_warps=rows * block // 512,
        )  # fmt: skip
    return total, y, mean, rstd


def _prepare(x, delta, w, b):
    expect(x=x, delta=delta, ndim=2, same_shape=True, unit_stride=True)
    if x.dtype not in (delta.dtype, torch.float32):
        raise TypeError(f"x is {x.dtype}, delta {delta.dtype}: the stream is of delta's dtype, or float32")
    expect(w=w, b=b, ndim=1, same_shape=True, contiguous=True)
    expect(x=x, w=w, b=b, same_dtype=True)
    M, N = x.shape
    if len(w) != N:
        raise ValueError(f"w has {len(w)} elements, but a row of x has {N}: make them equal")
    total, y = (torch.empty((M, N), dtype=t.dtype, device=t.device) for t in (x, delta))
    make = torch.empty if N else partial(torch.full, fill_value=math.nan)  # as torch.var_mean has it
    mean, rstd = (make((M,), dtype=torch.float32, device=x.device) for _ in range(2))
    return M, N, total, y, mean, rstd


# fmt: off
WRONG = (
    Mutant("the old stream is normalised", "add_norm_kernel", "total = (x + delta).to(total_ptr.dtype.element_ty)",
           "total = x.to(total_ptr.dtype.element_ty)", "add_norm"),
    Mutant("padding counted as zeros", "add_norm_kernel", "tl.where(cols < N, total.to(tl.float32) - mean, 0.0)",
           "total.to(tl.float32) - mean", "add_norm"),
    Mutant("delta's rows N apart", "add_norm_kernel", "rows * stride_delta", "rows * N", "add_norm"),
    Mutant("the tile's last rows are not there", "add_norm_kernel", "(rows < M) & (cols < N)",
           "(rows < M + 1) & (cols < N)", "add_norm", "out of bounds"),
    Mutant("the stream is kept, not the sum", "add_kernel", "x + delta, mask", "x, mask", "add_then_norm"),
    Mutant("written over its input", "add_norm", "    if N > 16384:", "    total = x\n    if N > 16384:", "add_norm",
           "changed input"),
)
# fmt: on

GPT = {"M": 32768, "N": 768}

LESSON = Lesson(
    about=About(
        teaches="add and LayerNorm in one kernel, in two dtypes; which rounding may not change",
        hours=0.75,
        operator="add + layernorm",
        pictures=("traffic",),
    ),
    problem=PROBLEM,
    rungs=(add_then_norm, add_norm),
    predicted=(
        Prediction(rung=add_then_norm, at={**GPT, "stream": True}, percent_of_limit=50),
        Prediction(rung=add_norm, at={**GPT, "stream": True}, times=2.0, over=add_then_norm),
        Prediction(
            rung=add_norm,
            at={**GPT, "stream": False},
            times=1.25,
            over=add_then_norm,
            why="Rung 1's y.copy_ copies even when there is nothing to cast: 14 bytes per element, not 10, and 14 / 8 "
            "is 1.75 times.",
        ),
    ),
    checks=(*PROBLEM.checks, case("the bytes are counted here", M=40, N=768, stream=True)),
    wrong=WRONG,
    claims={add_norm: ("16-byte loads", "16-byte stores", "no spills")},
    passes={add_then_norm: 2.13, add_norm: 1.31},
    passes_why="On a stream in fp32. The interpreter has no cache, so it also counts w and b, 8 bytes for each pair of "
    "rows: 16 instead of 12. Rung 1: 10, and 16 with w and b for each row; its cast is PyTorch's and not counted here.",
)

if __name__ == "__main__":
    LESSON.main()
