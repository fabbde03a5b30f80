"""Add and LayerNorm: total = x + delta, y = LayerNorm(total) w + b, with each row's mean and rstd; and the gradients.

x [M, N] is the residual stream, in fp32 or in delta's dtype. delta [M, N] is what a branch adds to it. w and b [N] have
x's dtype. Results: total as x, y as delta, mean and rstd [M] in fp32. PROBLEM_BACKWARD: dtotal, dy, total, w, mean,
rstd -> dx as dtotal, ddelta as dy, dw, db.
"""

import math

from lessonkit import DEVICE, Problem, Refusal, Work, by_inductor, case

import torch
import torch.nn.functional as F

EPS = 1e-5  # PyTorch's default


def reference(x, delta, w, b, eps=EPS):
    """The new stream, its norm, and the two numbers per row that the backward needs, in fp32."""
    total = x + delta  # reads 2MN, writes MN; a stream in fp32 stays so
    variance, mean = torch.var_mean(total.to(torch.promote_types(x.dtype, torch.float32)), dim=-1, correction=0)
    y = F.layer_norm(total, w.shape, w, b, eps).to(delta.dtype)  # reads MN, writes MN; and again, if it is a cast
    return total, y, mean, torch.rsqrt(variance + eps)


def inputs(M, N, stream=False, dtype=torch.float32, pad=0):
    # As day 2's norm. Rows have three scales, so that a row read in place of its neighbour shows. The mean is so large
    # that a variance by E[x^2] loses its digits. With a mean and a spread of delta's own, a forgotten delta shows.
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


def work(M, N, dtype, stream=False, pad=0):
    own = 4 if stream else dtype.itemsize
    return Work(bytes=M * N * 2 * (own + dtype.itemsize) + 2 * N * own + 8 * M, flops=9 * M * N)


# GPT-2 small's stream at 32 x 1024 tokens, and wider rows.
SHAPES = tuple(
    {"M": m, "N": n, "stream": s} for m, n, s in ((32768, 768, True), (32768, 768, False), (16384, 4096, True))
)
PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=work,
    checks=(
        case("no rows", M=0, N=5),
        case("rows of nothing", M=3, N=0),
        case("one element a row: the variance is 0 and eps alone is left", M=2, N=1),
        case("a prime: 27 of 128 lanes are padding; 37 rows leave the third tile of 16 hanging over", M=37, N=101),
        case("the stream in fp32, delta in 16 bits, as under autocast", M=37, N=101, stream=True),
        case("rows 3 elements apart, so that most are not aligned", M=5, N=1025, pad=3, stream=True),
        case("one past the longest row of one kernel", M=2, N=16385),
        case("a row past element 2^31", gib=40, M=3, N=5, pad=2**30),
    ),
    benches=SHAPES,
    peers={"torch": reference, "torch.compile": by_inductor(reference)},
    properties=(the_sum_is_pytorchs,),
    refuses=REFUSES,
)


# ---- The gradient -------------------------------------------------------------------------------------------------


def reference_backward(dtotal, dy, total, w, mean, rstd):
    """In fp32 or wider; mean and rstd are what the forward saved."""
    wide = torch.promote_types(total.dtype, torch.float32)
    g, x_hat = dy.to(wide) * w.to(wide), (total.to(wide) - mean[:, None]) * rstd[:, None]
    c1, c2 = (g * x_hat).mean(-1, keepdim=True), g.mean(-1, keepdim=True)
    dx = dtotal.to(wide) + rstd[:, None] * (g - x_hat * c1 - c2)
    dw, db = (dy.to(wide) * x_hat).sum(0), dy.to(wide).sum(0)
    return dx.to(total.dtype), dx.to(dy.dtype), dw.to(w.dtype), db.to(w.dtype)


def inputs_backward(M, N, stream=False, dtype=torch.float32, pad=0):
    # The forward's sums. The two gradients are of the same size, so that neither hides the other. The mean of dy is not
    # 0: a forgotten mean(g) would hide in the noise. An element of dy has 8 bits (day 2, lesson 8).
    x, delta, w, b = inputs(M, N, stream, dtype, pad)
    total, _, mean, rstd = reference(x, delta, w, b)
    dy = (torch.randn(M, N + pad, device=DEVICE) + 0.5).bfloat16().to(dtype)[:, :N]
    dtotal = (torch.randn(M, N + pad, device=DEVICE) * rstd.clamp(max=1e3)[:, None]).to(total.dtype)[:, :N]
    return dtotal, dy, total, w, mean, rstd


def the_stream_passes_through(rung):
    """With dy = 0 the stream's gradient is dtotal, to the bit, in both dtypes; and dw, db are 0."""
    dtotal, dy, *saved = inputs_backward(5, 67, stream=True, dtype=torch.bfloat16)
    dx, ddelta, dw, db = rung(dtotal, torch.zeros_like(dy), *saved)
    assert torch.equal(dx, dtotal)
    assert torch.equal(ddelta, dtotal.bfloat16())
    assert not dw.any()
    assert not db.any()


REFUSES_BACKWARD = (
    Refusal(
        "dy of another shape",
        lambda f: f(inputs_backward(3, 8)[0], inputs_backward(2, 8)[1], *inputs_backward(3, 8)[2:]),
        ValueError,
        "dy has shape",
    ),
    Refusal(
        "w too short",
        lambda f: f(*inputs_backward(2, 8)[:3], *inputs_backward(2, 7)[3:]),
        ValueError,
        "expected \\(8,\\)",
    ),
    Refusal(
        "16-bit mean",
        lambda f: f(*inputs_backward(2, 8)[:4], *(t.half() for t in inputs_backward(2, 8)[4:])),
        TypeError,
        "mean is",
    ),
    Refusal(
        "gradient of another dtype",
        lambda f: f(inputs_backward(2, 8)[0].half(), *inputs_backward(2, 8)[1:]),
        TypeError,
        "dtotal is torch.float16",
    ),
    Refusal(
        "transposed",
        lambda f: f(inputs_backward(8, 8)[0].t(), *inputs_backward(8, 8)[1:]),
        ValueError,
        "dtotal has stride 8",
    ),
)


def work_backward(M, N, dtype, stream=False, pad=0):
    own = 4 if stream else dtype.itemsize
    return Work(bytes=M * N * (3 * own + 2 * dtype.itemsize) + 3 * N * own + 8 * M, flops=16 * M * N)


PROBLEM_BACKWARD = Problem(
    reference=reference_backward,
    inputs=inputs_backward,
    work=work_backward,
    checks=(
        case("no rows: dw and db are 0", M=0, N=5),
        case("one element a row", M=2, N=1),
        case("a prime, and 37 rows leave the third tile of 16 hanging over", M=37, N=101),
        case("the stream in fp32, the rest in 16 bits, as under autocast", M=37, N=101, stream=True),
        case("rows 3 elements apart, so that most are not aligned", M=5, N=1025, pad=3, stream=True),
        case("more tiles than programs, so that some walk", M=27, N=600),
        case("the widest block, half of it padding: one stage in fp32", M=2, N=4097),
        case("one past it", M=2, N=8193),
        case("more tiles than a GPU has programs", gib=0.9, M=9001, N=1000, stream=True),
        case("a row past element 2^31", gib=60, M=3, N=5, pad=2**30),
    ),
    benches=SHAPES,
    peers={"torch": reference_backward, "torch.compile": by_inductor(reference_backward)},
    properties=(the_stream_passes_through,),
    refuses=REFUSES_BACKWARD,
)
