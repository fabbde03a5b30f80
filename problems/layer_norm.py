"""LayerNorm: y = (x - mean) * rstd * w + b, the mean and rstd of each row (Ba, Kiros and Hinton 2016); its gradient.

Forward: x [M, N], w [N], b [N] -> y [M, N] in x's dtype, mean [M] and rstd [M] in fp32; the variance is divided by N.
Backward: dy [M, N], x [M, N], w [N], mean [M], rstd [M] -> dx [M, N], dw [N], db [N] in x's dtype.
"""

import math
from functools import lru_cache
from importlib import import_module

from lessonkit import DEVICE, Problem, Refusal, Work, by_inductor, case

import torch

EPS = 1e-5  # PyTorch's default


def reference(x, w, b, eps=EPS):
    """What PyTorch returns, and the two statistics of a row that the backward needs, in fp32."""
    variance, mean = torch.var_mean(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1, correction=0)
    y = torch.nn.functional.layer_norm(x, w.shape, w, b, eps)  # reads MN (and w, b), writes MN
    return y, mean, torch.rsqrt(variance + eps)


def inputs(M, N, dtype=torch.float32, pad=0):
    # Mean 50 with a spread of about 1.5 makes E[x^2] - E[x]^2 lose three digits. The slope makes chunks' means differ.
    # Three scales tell a row from its neighbour. In rows of scale 1/1000, eps is larger than the variance.
    x = torch.randn(M, N, device=DEVICE) + 50 + torch.linspace(-2, 2, N, device=DEVICE)
    x *= torch.tensor([1.0, 1e-3, 30.0], device=DEVICE)[torch.arange(M, device=DEVICE) % 3][:, None]
    wide = torch.empty(M, N + pad, dtype=dtype, device=DEVICE)[:, :N]  # rows N + pad apart
    wide.copy_(x)
    # w in eighths, dy in 8 bits: dy * w is exact, so that a GPU's fused multiply-add makes dy * w - dy * w 0 too.
    w, b = ((torch.rand(N, device=DEVICE) + 0.5) * 8).round() / 8, torch.randn(N, device=DEVICE)
    return wide, w.to(dtype), b.to(dtype)


def shift_and_scale_change_nothing(rung):
    """LayerNorm of 4x + 8 is LayerNorm of x, as far as eps allows."""
    x, w, b = inputs(4, 300)
    y, mean, rstd = rung(x[::3].contiguous(), w, b, eps=0.0)
    y2, mean2, rstd2 = rung(4 * x[::3] + 8, w, b, eps=0.0)
    torch.testing.assert_close(y2, y, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close((mean2, rstd2), (4 * mean + 8, rstd / 4), rtol=1e-4, atol=1e-5)


def strange_numbers_stay_in_their_row(rung):
    """A NaN or an infinity makes its own row NaN, as in PyTorch, and no other."""
    x, w, b = inputs(5, 68)
    x[1, 3], x[3, 66] = math.nan, math.inf
    y = rung(x, w, b)[0]
    torch.testing.assert_close(y, reference(x, w, b)[0], rtol=1e-3, atol=1e-3, equal_nan=True)
    assert y[[1, 3]].isnan().all() and y[[0, 2, 4]].isfinite().all()  # noqa: PT018


def _torch(x, w, b):
    y, mean, rstd = torch.native_layer_norm(x, w.shape, w, b, EPS)
    return y, mean.flatten(), rstd.flatten()


def _liger(x, w, b):
    y, _, mean, rstd, *_ = import_module("liger_kernel.ops.layer_norm").layer_norm_forward(x, w, b, EPS)
    return y, mean, rstd


# quack's forward takes fp32 weights: converted once, not in every call. A tensor's hash is its identity.
_fp32 = lru_cache(maxsize=64)(torch.Tensor.float)


def _quack(x, w, b):
    forward = import_module("quack.rmsnorm").layernorm_fwd
    y, rstd, mean = forward(x, _fp32(w), _fp32(b), EPS, return_rstd=True, return_mean=True)
    return y, mean, rstd


PEERS = {"torch": _torch, "torch.compile": by_inductor(reference), "liger": _liger, "quack": _quack}

REFUSES = (
    Refusal("not a matrix", lambda f: f(torch.ones(8, device=DEVICE), *inputs(2, 8)[1:]), ValueError, "expected 2"),
    Refusal("w too short", lambda f: f(inputs(2, 8)[0], *inputs(2, 7)[1:]), ValueError, "w has 7 elements"),
    Refusal("w in fp64", lambda f: f(inputs(2, 8)[0], *(t.double() for t in inputs(2, 8)[1:])), TypeError, "w is"),
    Refusal("every second column", lambda f: f(inputs(2, 8)[0][:, ::2], *inputs(2, 4)[1:]), ValueError, "stride 2"),
    Refusal("gradient lost", lambda f: f(inputs(2, 8)[0].requires_grad_(), *inputs(2, 8)[1:]), ValueError, "grad"),
)


def work(M, N, dtype, pad=0):
    return Work(bytes=2 * (M + 1) * N * dtype.itemsize + 8 * M, flops=8 * M * N)


# Rows of every length: many a program, one a program, one shared by several programs.
SHAPES = ((32768, 256), (32768, 1024), (4096, 4096), (8192, 8192), (4096, 12672), (4096, 32768), (2048, 131072))
PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=work,
    checks=(
        case("no rows: an empty grid is an error in CUDA", M=0, N=5),
        case("rows of nothing: their mean is NaN", M=3, N=0),
        case("one element a row: the variance is 0 and eps alone is left", M=17, N=1),
        case("a prime: 27 of 128 lanes are padding", M=5, N=101),
        case("rows 3 elements apart, so that most are not aligned", M=4, N=1025, pad=3),
        case("whole vectors of 16 bytes, and a part of a warp without one", M=15, N=120),
        case("one past a block of 4096: a last chunk of one element", M=4, N=4097),
        case("a row past element 2^31", gib=13, M=3, N=5, pad=2**30),
        case("four chunks, the last ragged", M=3, N=12672),
    ),
    benches=tuple({"M": m, "N": n} for m, n in SHAPES),
    peers=PEERS,
    properties=(shift_and_scale_change_nothing, strange_numbers_stay_in_their_row),
    refuses=REFUSES,
)


def reference_backward(dy, x, w, mean, rstd):
    """The three formulas in fp32 (or wider); mean and rstd are what the forward saved."""
    wide = torch.promote_types(x.dtype, torch.float32)
    g = dy.to(wide) * w.to(wide)
    x_hat = (x.to(wide) - mean[:, None]) * rstd[:, None]
    c1, c2 = (g * x_hat).mean(-1, keepdim=True), g.mean(-1, keepdim=True)
    dx = rstd[:, None] * (g - x_hat * c1 - c2)  # reads 2MN, writes MN
    dw, db = (dy.to(wide) * x_hat).sum(0), dy.to(wide).sum(0)  # reads 2MN
    return dx.to(x.dtype), dw.to(x.dtype), db.to(x.dtype)


def inputs_backward(M, N, dtype=torch.float32, pad=0):
    # The forward's x has rows of three scales and a large mean, so a row read in place of its neighbour shows. The mean
    # of dy is not 0: a forgotten c2 would hide in the noise.
    x, w, b = inputs(M, N, dtype, pad)
    _, mean, rstd = reference(x, w, b)
    dy = torch.empty(M, N + pad, dtype=dtype, device=DEVICE)[:, :N]
    dy.copy_((torch.randn(M, N, device=DEVICE) + 0.5).bfloat16())  # 8 bits: every dy * w is exact, see `inputs`
    return dy, x, w, mean, rstd


def dx_is_orthogonal(rung):
    """y does not change when a row is shifted or stretched, so dx . 1 and dx . x_hat are 0 in every row (eps aside)."""
    dy, x, w, mean, rstd = inputs_backward(4, 300)
    dx = rung(dy, x, w, mean, rstd)[0][::3].double()
    x_hat = ((x - mean[:, None]) * rstd[:, None])[::3].double()
    for along in (torch.ones_like(x_hat), x_hat):
        assert ((dx * along).sum(1).abs() < 1e-3 * dx.abs().sum(1)).all()


def _torch_backward(dy, x, w, mean, rstd):
    return torch.ops.aten.native_layer_norm_backward(dy, x, w.shape, mean, rstd, w, w, [True] * 3)


def work_backward(M, N, dtype, pad=0):
    return Work(bytes=3 * (M + 1) * N * dtype.itemsize + 8 * M, flops=14 * M * N)


def _with(change):
    """A call with these arguments after one change."""
    return lambda f: f(*change(*inputs_backward(8, 8)))


PROBLEM_BACKWARD = Problem(
    reference=reference_backward,
    inputs=inputs_backward,
    work=work_backward,
    checks=(
        case("no rows: dw and db are sums of nothing, 0", M=0, N=5),
        case("rows of nothing", M=3, N=0),
        case("one element a row: dx is 0", M=17, N=1),
        case("a prime, and 37 rows leave the second tile of 32 hanging over", M=37, N=101),
        case("rows 3 elements apart, so that most are not aligned", M=5, N=1025, pad=3),
        case("a row past element 2^31", gib=25, M=3, N=5, pad=2**30),
    ),
    benches=tuple({"M": m, "N": n} for m, n in SHAPES),
    peers={
        "torch": _torch_backward,
        "torch.compile": by_inductor(reference_backward),
        "liger": lambda dy, x, w, *s: import_module("liger_kernel.ops.layer_norm").layer_norm_backward(dy, x, w, w, *s),
        "quack": lambda dy, x, w, mean, rstd: import_module("quack.rmsnorm").layernorm_bwd(x, w, dy, rstd, mean),
    },
    properties=(dx_is_orthogonal,),
    refuses=(
        Refusal("shapes differ", _with(lambda dy, x, *r: (dy[:2], x, *r)), ValueError, "x has shape"),
        Refusal("w too short", _with(lambda dy, x, w, *r: (dy, x, w[:7], *r)), ValueError, "expected \\(8,\\)"),
        Refusal("fp16 mean", _with(lambda *a: (*a[:3], *(t.half() for t in a[3:]))), TypeError, "mean is"),
        Refusal("transposed", _with(lambda dy, *r: (dy.T, *r)), ValueError, "dy has stride 8"),
    ),
)
