"""Add and LayerNorm in one kernel: the residual stream crosses the bus once
========================================================================
Between two matmuls a transformer does x = x + delta, y = LayerNorm(x) w + b. Under autocast the stream x is fp32, what
a matmul gives (delta) and takes (y) is bf16, and PyTorch runs three kernels, norm in fp32 and a cast behind it:

    add    reads x 4, delta 2, writes x 4         10 bytes an element
    norm   reads x 4, writes y 4                   8
    cast   reads y 4, writes y 2                   6        24 bytes; in one kernel x 4, delta 2, x 4, y 2: 12

Predicted: 2 times; where all is bf16 there is no cast, and 10 bytes become 8. GPT-2 small does it 24 times a step, on
[32768, 768] (302 MB, 0.072 ms at 4.2 TB/s): 1.7 ms less forward. Lesson 11c goes back.

You will learn: what a fusion may change (the sum is rounded to the stream's dtype before it is normalised, as PyTorch
does, or forward and backward would see different numbers), kernels that mix dtypes.
Run it:    python day4_replace_op/lesson11b_add_norm.py
Check it:  python -m lessonkit check lesson11b_add_norm
Time it:   python -m lessonkit bench lesson11b_add_norm
"""

import math

from lessonkit import DEVICE, Lesson, Mutant, Refusal, Work, by_inductor, case, expect

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from day2_triton_basics.lesson07_layernorm import normalize, prepare
from day2_triton_basics.lesson07b_layernorm_lengths import layernorm_forward
from problems.layer_norm import EPS

HALVES = (torch.float16, torch.bfloat16)


def reference(x, delta, w, b, eps=EPS):
    """The new stream, its norm, and the two numbers a row that the backward needs, in fp32."""
    total = x + delta  # reads 2MN, writes MN; a stream in fp32 stays so
    variance, mean = torch.var_mean(total.to(torch.promote_types(x.dtype, torch.float32)), dim=-1, correction=0)
    y = F.layer_norm(total, w.shape, w, b, eps).to(delta.dtype)  # reads MN, writes MN; and again, if it is a cast
    return total, y, mean, torch.rsqrt(variance + eps)


# Rung 1. A kernel for each, as PyTorch has it; the norm is day 2's.
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

    ValueError, TypeError for what is not so.
    """
    M, N, total, y, mean, rstd = _prepare(x, delta, w, b)
    if y.numel():
        add_kernel[(M,)](x, delta, total, N, x.stride(0), delta.stride(0), BLOCK=1024)
        normed, mean, rstd = layernorm_forward(total, w, b, eps)
        y.copy_(normed)
    return total, y, mean, rstd


# Rung 2. New: day 2's tile of rows (lesson 7b), which loads both, adds, rounds the sum as it will be read again, and
# stores it while it has its mean and its spread. Predicted: 12 bytes where rung 1 moves 24, or 8 where that moves 10.
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
    """As add_then_norm, in one kernel for N up to 16384; a longer row takes the two."""
    M, N, total, y, mean, rstd = _prepare(x, delta, w, b)
    if N > 16384:
        return add_then_norm(x, delta, w, b, eps)
    if y.numel():
        block = triton.next_power_of_2(N)
        rows = max(1, 2048 // block)  # 16 elements a thread, two rows of 768 for 4 warps
        add_norm_kernel[(triton.cdiv(M, rows),)](
            x, delta, w, b, total, y, mean, rstd, M, N, x.stride(0), delta.stride(0), eps, rows, block,
            num_warps=rows * block // 512,
        )  # fmt: skip
    return total, y, mean, rstd


def _prepare(x, delta, w, b):
    expect(x=x, delta=delta, ndim=2, same_shape=True, unit_stride=True)
    if x.dtype not in (delta.dtype, torch.float32):
        raise TypeError(f"x is {x.dtype}, delta {delta.dtype}: the stream is of delta's dtype, or float32")
    M, N, total, mean, rstd = prepare(x, w, b)
    return M, N, total, torch.empty((M, N), dtype=delta.dtype, device=x.device), mean, rstd


def inputs(M, N, stream=False, dtype=torch.float32, pad=0):
    # As day 2's norm: rows of three scales, so that one taken for its neighbour shows, around a mean that a variance
    # by E[x^2] would not survive. delta has a mean and a spread of its own, or a forgotten one would be noise.
    x = torch.randn(M, N, device=DEVICE) + torch.linspace(-2, 2, N, device=DEVICE)
    x = (x + 8) * torch.tensor([1.0, 0.25, 4.0], device=DEVICE)[torch.arange(M, device=DEVICE) % 3][:, None]
    delta = torch.randn(M, N + pad, device=DEVICE).mul_(2).add_(torch.linspace(1, -1, N + pad, device=DEVICE))
    # w in eighths: dy * w is then exact, so that a GPU's fused multiply-add makes dy * w - dy * w 0 too (day 2, 7).
    w, b = ((torch.rand(N, device=DEVICE) + 0.5) * 8).round() / 8, torch.randn(N, device=DEVICE)
    own = torch.float32 if stream else dtype  # of the stream and of the weights: as under autocast
    rows = torch.empty(M, N + pad, dtype=own, device=DEVICE)[:, :N]
    rows.copy_(x)
    return rows, delta.to(dtype)[:, :N], w.to(own), b.to(own)


def the_sum_is_pytorchs(rung):
    """The stream is added as PyTorch adds, to the last bit, in every pair of dtypes; a row of NaN is alone."""
    for dtype, stream in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        args = x, delta, _, _ = inputs(5, 67, stream, dtype)
        delta[1, 66] = math.nan
        total, y, _, _ = rung(*args)
        assert torch.equal(total.isnan(), (x + delta).isnan())
        assert torch.equal(total.nan_to_num(), (x + delta).nan_to_num())
        assert y.isnan().all(1).tolist() == [False, True, False, False, False]


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
REFUSES = (
    Refusal("shapes differ", lambda f: f(inputs(2, 8)[0], *inputs(3, 8)[1:]), ValueError, "delta has shape"),
    Refusal("w too short", lambda f: f(*inputs(2, 8)[:2], *inputs(2, 7)[2:]), ValueError, "w has 7 elements"),
    Refusal("a stream narrower than delta", lambda f: f(*(t.half() for t in inputs(2, 8)[:1]), inputs(2, 8)[1],
            *(t.half() for t in inputs(2, 8)[2:])), TypeError, "or float32"),
    Refusal("w as delta", lambda f: f(*inputs(2, 8, True, torch.half)[:2], *inputs(2, 8, False, torch.half)[2:]),
            TypeError, "w is torch.float16"),
    Refusal("transposed", lambda f: f(inputs(8, 8)[0].t(), *inputs(8, 8)[1:]), ValueError, "x has stride 8"),
    Refusal("gradient lost", lambda f: f(inputs(2, 8)[0].requires_grad_(), *inputs(2, 8)[1:]), ValueError, "grad"),
)
# fmt: on


def _work(M, N, dtype, stream=False, pad=0):
    own = 4 if stream else dtype.itemsize
    return Work(bytes=M * N * 2 * (own + dtype.itemsize) + 2 * N * own + 8 * M, flops=9 * M * N)


LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    rungs=(add_then_norm, add_norm),
    checks=(
        case("no rows", M=0, N=5),
        case("rows of nothing", M=3, N=0),
        case("one element a row: the variance is 0 and eps alone is left", M=2, N=1),
        case("a prime: 27 of 128 lanes are padding; 37 rows leave the third tile of 16 hanging over", M=37, N=101),
        case("the stream in fp32, delta in 16 bits, as under autocast", M=37, N=101, stream=True),
        case("rows 3 elements apart, so that most are not aligned", M=5, N=1025, pad=3, stream=True),
        case("one past the longest row of one kernel", M=2, N=16385),
        case("a row past element 2^31", gib=40, M=3, N=5, pad=2**30),
        case("the bytes are counted here", M=40, N=768, stream=True),
    ),
    benches=tuple(
        {"M": m, "N": n, "stream": s} for m, n, s in ((32768, 768, True), (32768, 768, False), (16384, 4096, True))
    ),
    work=_work,
    wrong=WRONG,
    peers={"torch": reference, "torch.compile": by_inductor(reference)},
    claims={add_norm: ("16-byte loads", "16-byte stores", "no spills")},
    # On a stream in fp32. The interpreter has no cache, so it also counts w and b, 8 bytes for each pair of rows, which
    # makes 16 of 12. Rung 1: 10 and 12; its cast is PyTorch's, which is not counted here.
    passes={add_then_norm: 1.8, add_norm: 1.31},
    properties=(the_sum_is_pytorchs,),
    refuses=REFUSES,
)

if __name__ == "__main__":
    LESSON.main()
