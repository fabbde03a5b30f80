"""LayerNorm in CUDA C++: three reads of a row, then two
=====================================================
The kernels and what they predict are in 10_layernorm.cu; here they are functions of tensors, checked against PyTorch.
10b_layernorm_lengths goes on from here and reads a row once; 10c_layernorm_backward is the backward.

Run it:    python cuda_src/10_layernorm.py
Check it:  python -m lessonkit check 10_layernorm
Time it:   python -m lessonkit bench 10_layernorm
"""

import math
from functools import lru_cache
from importlib import import_module

from lessonkit import DEVICE, Lesson, Mutant, Refusal, Work, by_inductor, case, cuda, expect

import torch

kernels = cuda.extension(__file__)  # 10_layernorm.cu, built at the first call
DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-5  # PyTorch's default


def reference(x, w, b, eps=EPS):
    """What PyTorch returns, and the two numbers a row that the backward needs, in fp32."""
    variance, mean = torch.var_mean(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1, correction=0)
    y = torch.nn.functional.layer_norm(x, w.shape, w, b, eps)  # reads MN (and w, b), writes MN
    return y, mean, torch.rsqrt(variance + eps)


def layernorm_naive(x, w, b, eps=EPS):
    """x [M, N], w [N], b [N] -> y [M, N], mean [M] and rstd [M] in fp32; float32 or bfloat16, one thread a row."""
    return _launch(kernels, "layernorm_naive", x, w, b, eps)


def layernorm_block(x, w, b, eps=EPS):
    """As layernorm_naive, one block a row, three reads."""
    return _launch(kernels, "layernorm_block", x, w, b, eps)


def layernorm_welford(x, w, b, eps=EPS):
    """As layernorm_naive, one block a row, two reads (Welford 1962; Chan, Golub and LeVeque 1979)."""
    return _launch(kernels, "layernorm_welford", x, w, b, eps)


def _launch(module, name, x, w, b, eps):
    expect(x=x, ndim=2, dtypes=DTYPES, contiguous=True)
    expect(w=w, b=b, ndim=1, dtypes=(x.dtype,), contiguous=True)
    M, N = x.shape
    if w.shape != (N,) or b.shape != (N,):
        raise ValueError(f"w has shape {tuple(w.shape)} and b {tuple(b.shape)}, expected ({N},) for x {M} x {N}")
    y, (mean, rstd) = torch.empty_like(x), torch.empty(2, M, dtype=torch.float32, device=x.device)
    if N == 0:  # of nothing
        mean.fill_(math.nan), rstd.fill_(math.nan)
    getattr(module, f"{name}_{str(x.dtype).removeprefix('torch.')}")(x, w, b, y, mean, rstd, M, N, eps)
    return y, mean, rstd


def inputs(M, N, dtype=torch.float32):
    # Mean 50 with a spread of about 1.5 makes E[x^2] - E[x]^2 lose three digits; the slope makes parts' means differ;
    # rows of three scales tell a row from its neighbour, and in the rows of 1/1000 eps is larger than the variance.
    x = torch.randn(M, N, device=DEVICE) + 50 + torch.linspace(-2, 2, N, device=DEVICE)
    x *= torch.tensor([1.0, 1e-3, 30.0], device=DEVICE)[torch.arange(M, device=DEVICE) % 3][:, None]
    w, b = torch.rand(N, device=DEVICE) + 0.5, torch.randn(N, device=DEVICE)
    return x.to(dtype), w.to(dtype), b.to(dtype)


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
SHAPES = ((2048, 131072), (4096, 32768), (4096, 12672), (8192, 8192), (4096, 4096), (32768, 1024), (32768, 256))
REFUSES = (
    Refusal("w too long", lambda f: f(inputs(8, 8)[0], *inputs(8, 12)[1:]), ValueError, "w has shape"),
    Refusal("half precision", lambda f: f(*(t.half() for t in inputs(2, 8))), TypeError, "x is torch.float16"),
    Refusal("w in 16 bits", lambda f: f(inputs(2, 8)[0], *(t.bfloat16() for t in inputs(2, 8)[1:])), TypeError, "w is"),
    Refusal("a transposed matrix", lambda f: f(inputs(8, 7)[0].t(), *inputs(7, 8)[1:]), ValueError, "contiguous"),
    Refusal("gradient lost", lambda f: f(inputs(2, 8)[0].requires_grad_(), *inputs(2, 8)[1:]), ValueError, "grad"),
)


def _work(M, N, dtype):
    return Work(bytes=2 * (M + 1) * N * dtype.itemsize + 8 * M, flops=8 * M * N)


# fmt: off
LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    extension=kernels,
    rungs=(layernorm_naive, layernorm_block, layernorm_welford),
    checks=(
        case("no rows: an empty grid is an error in CUDA", M=0, N=5),
        case("rows of nothing: their mean is NaN", M=3, N=0),
        case("one element a row: its spread is 0, and most threads have nothing", M=17, N=1),
        case("a prime width", M=7, N=127),
        case("one past a block", M=3, N=257),
        case("several turns of each thread, the last one ragged", M=4, N=781),
        case("row offsets past 2^31, in rows short enough for v1 to add up", gib=120, M=2**21 + 3, N=1025),
        case("whole warps, on which requests are counted", M=64, N=256),
    ),
    benches=tuple({"M": m, "N": n} for m, n in SHAPES),
    work=_work,
    wrong=(
        Mutant("a row too many", "layernorm_naive_kernel", "row >= M", "row > M", "layernorm_naive", "out of bounds"),
        Mutant("variance by N - 1", "layernorm_block_kernel", "block_sum(m2, shared) / N",
               "block_sum(m2, shared) / (N - 1)", "layernorm_block", "nan"),
        Mutant("variance as E[x^2] - E[x]^2", "layernorm_block_kernel", "(widen(x[j]) - m) * (widen(x[j]) - m);",
               "widen(x[j]) * widen(x[j]) - m * m;", "layernorm_block"),
        Mutant("halves added without waiting", "block_sum", "        __syncthreads();\n        if", "        if",
               "layernorm_block", "race"),
        Mutant("the next sum begins too early", "block_sum", "    __syncthreads();  // the next", "    // the next",
               "layernorm_block", "race"),
        Mutant("the new difference twice", "layernorm_welford_kernel", "delta * (value - mine.mean)",
               "(value - mine.mean) * (value - mine.mean)", "layernorm_welford"),
        Mutant("threads merged as if their means were equal", "merge", "delta * delta * a.count * share", "0",
               "layernorm_welford"),
        Mutant("parts read before they are there", "layernorm_welford_kernel", "    __syncthreads();\n", "",
               "layernorm_welford", "race"),
    ),
    peers=PEERS,
    claims={"layernorm_block_kernel": ("no spills",), "layernorm_welford_kernel": ("no spills",)},
    counts={
        layernorm_naive: {"sectors a store": 31.8},
        layernorm_block: {"wavefronts a shared access": 1},
    },
    properties=(shift_and_scale_change_nothing, strange_numbers_stay_in_their_row),
    refuses=REFUSES,
    dtypes=DTYPES,
    factor=4,  # v1 adds numbers around 50 one after the other, torch adds them in a tree
)
# fmt: on

if __name__ == "__main__":
    LESSON.main()
