"""RMSNorm: y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps) of each row (Zhang and Sennrich 2019); its gradient.

Forward: x [M, N], w [N], eps -> y [M, N] in x's dtype, rstd [M] in fp32.
Backward: dy [M, N], x [M, N], w [N], rstd [M] -> dx [M, N], dw [N] in x's dtype.
"""

import math

from lessonkit import DEVICE, Problem, Refusal, Work, by_inductor, case

import torch
import torch.nn.functional as F

# A kernel is compiled for the first shape that reaches it: that of rows in registers for 12,672 columns.
SHAPES = ((2048, 131072), (4096, 12672), (4096, 32768), (8192, 8192), (4096, 4096), (32768, 1024), (32768, 256))


def reference(x, w, eps):
    wide = x if x.dtype == torch.float64 else x.float()
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)  # reads MN, writes M; the backward needs it
    # Reads MN and N, writes MN. Written out, and not torch.nn.functional.rms_norm, for rows with an inf: here and in
    # PyTorch on a CPU inf * 0 is NaN and the others are 0. PyTorch's fused kernel for GPUs makes the whole row NaN.
    return (wide * rstd[:, None] * w.to(wide.dtype)).to(x.dtype), rstd


def inputs(M, N, pad=0, eps=1e-3, strange=False, dtype=torch.float32):
    # A mean of 1: with a mean of 0, subtracting the mean as layernorm does would change little. Rows of sizes 0.03 to
    # 30: another row's rstd is far off, and eps counts in the small ones. Rows are slices of a matrix `pad` wider.
    size = 10 ** torch.linspace(-1.5, 1.5, M, device=DEVICE)[torch.randperm(M, device=DEVICE)]
    x = torch.full((M, N + pad), 7.0, dtype=dtype, device=DEVICE)[:, :N]
    x.copy_((torch.randn(M, N, device=DEVICE) + 1) * size[:, None])
    if strange:
        x[0, N // 2], x[1, N - 1], x[2, 0], x[3] = math.nan, math.inf, -math.inf, 0.0
    return x, (torch.randn(N, device=DEVICE) * 0.5 + 1).to(dtype), eps


def finite_rows_as_torch(rung):
    """torch.nn.functional.rms_norm answers the same where a row is finite."""
    for N in (781, 16400):
        x, w, eps = inputs(6, N, strange=True)
        finite = x.isfinite().all(-1)
        expected = F.rms_norm(x, (N,), w, eps)[finite]
        torch.testing.assert_close(rung(x, w, eps)[0][finite], expected, rtol=1e-5, atol=1e-6)


def scale_invariance(rung):
    """Without eps, 4x gives the same y and a quarter of rstd, exactly: powers of two do not round."""
    for M, N in ((5, 781), (2, 16400)):
        x, w, _ = inputs(M, N)
        (y, rstd), (y4, rstd4) = rung(x, w, 0.0), rung(4 * x, w, 0.0)
        torch.testing.assert_close(y4, y, rtol=1e-6, atol=0)
        torch.testing.assert_close(4 * rstd4, rstd, rtol=1e-6, atol=0)


# At 131,072 columns PyTorch's rstd is off by 26 times the reference's error. So is a loop on a CPU that adds a row's
# squares as 128 threads do, each 1024 of them one after another. There rstd is too large in every row. The cause: the
# square of an integer ends in 00 or 01, in binary. So a long sum of squares of bf16 numbers drops bits that are rounded
# down more often than up.
def _torch(x, w, eps):
    y, rstd = torch.ops.aten._fused_rms_norm(x, x.shape[-1:], w, eps)
    return y, rstd.flatten()


def _liger(x, w, eps):
    from liger_kernel.ops.rms_norm import rms_norm_forward

    # "gemma" is the mode that multiplies by w before it rounds, as PyTorch does.
    y, _, rstd, *_ = rms_norm_forward(x, w, eps, 0.0, "gemma", None)
    return y, rstd


def _quack(x, w, eps):
    from quack.rmsnorm import rmsnorm_fwd

    y, _, rstd = rmsnorm_fwd(x, w, eps=eps, store_rstd=True)
    return y, rstd


PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=lambda M, N, dtype, **_: Work(bytes=(2 * M * N + N) * dtype.itemsize + 4 * M, flops=4 * M * N),
    checks=(
        case("no rows", M=0, N=5),
        case("no columns: the mean of nothing is NaN", M=5, N=0),
        case("rows of one: y is about the sign of x times w", M=17, N=1),
        case("a prime width, a row stride that is not N, a tile that hangs over", M=70, N=127, pad=3),
        case("NaN, inf and a row of zeros, whose rstd is eps alone", M=5, N=1025, strange=True),
        case("no eps", M=3, N=64, eps=0.0),
        case("row offsets past 2^31", gib=13, M=3, N=1000, pad=2**30),
    ),
    benches=tuple({"M": m, "N": n} for m, n in SHAPES),
    peers={"torch": _torch, "torch.compile": by_inductor(reference), "liger": _liger, "quack": _quack},
    properties=(finite_rows_as_torch, scale_invariance),
    refuses=(
        Refusal("one weight too few", lambda f: f(inputs(2, 8)[0], inputs(2, 7)[1], 0.1), ValueError, "w has shape"),
        Refusal("dtypes differ", lambda f: f(inputs(2, 8)[0], inputs(2, 8)[1].half(), 0.1), TypeError, "w is"),
        Refusal("columns apart", lambda f: f(inputs(9, 8)[0].T, inputs(8, 9)[1], 0.1), ValueError, "contiguous"),
        Refusal("not a float", lambda f: f(*(t.long() for t in inputs(2, 8)[:2]), 0.1), TypeError, "torch.int64"),
        Refusal("gradient lost", lambda f: f(inputs(2, 8)[0].requires_grad_(), *inputs(2, 8)[1:]), ValueError, "grad"),
    ),
)


def reference_backward(dy, x, w, rstd):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    n = x.to(wide) * rstd[:, None]  # each of these lines reads and writes MN of fp32, or two of them
    g = dy.to(wide) * w.to(wide)
    dx = rstd[:, None] * (g - n * (g * n).mean(-1, keepdim=True))
    dw = (dy.to(wide) * n).sum(0)
    return dx.to(x.dtype), dw.to(w.dtype)


def inputs_backward(M, N, pad=0, strange=False, dtype=torch.float32):
    # The means of dy along rows and along columns are not 0, nor those of n. So the mean of g * n, which dx subtracts,
    # is large, and dw, a sum of M products, too. One left out or added twice shows. The row stride is not that of x.
    x, w, eps = inputs(M, N, pad, strange=strange, dtype=dtype)
    dy = torch.full((M, N + pad + min(pad, 5)), 7.0, dtype=dtype, device=DEVICE)[:, :N]
    dy.copy_(torch.randn(M, N, device=DEVICE) + 0.5)
    if strange:
        dy[4, 0] = -torch.inf
    return dy, x, w, torch.rsqrt(x.float().square().mean(-1) + eps)


def same_each_time(rung):
    """Two runs agree to the bit: dw, a sum over rows, is added up in a fixed order."""
    for M, N in ((133, 781), (9, 9001)):
        args = inputs_backward(M, N)
        for first, second in zip(rung(*args), rung(*args), strict=True):
            assert torch.equal(first, second)


def work_backward(M, N, dtype, **_):
    return Work(bytes=(3 * M * N + 2 * N) * dtype.itemsize + 4 * M, flops=9 * M * N)


def _torch_backward(dy, x, w, rstd):
    return torch.ops.aten._fused_rms_norm_backward(dy, x, x.shape[-1:], rstd[:, None], w, [True, True])


def _liger_backward(dy, x, w, rstd):
    from liger_kernel.ops.rms_norm import rms_norm_backward
    from liger_kernel.ops.utils import calculate_settings

    # Casting mode 1 is "gemma", which multiplies by w before it rounds, as PyTorch does; not in place of dy.
    return rms_norm_backward(dy, x, w, rstd, 0.0, 1, *calculate_settings(x.shape[1]), False, None)


def _quack_backward(dy, x, w, rstd):
    from quack.rmsnorm import rmsnorm_bwd

    return rmsnorm_bwd(x, w, dy, rstd)[:2]


def _with(change):
    """A call with these arguments after one change."""
    return lambda f: f(*change(*inputs_backward(8, 8)))


PROBLEM_BACKWARD = Problem(
    reference=reference_backward,
    inputs=inputs_backward,
    work=work_backward,
    checks=(
        case("no rows: dw is a sum of nothing, zero", M=0, N=5),
        case("no columns", M=5, N=0),
        case("rows of one", M=17, N=1),
        case("a prime width, a row stride that is not N, a tile that hangs over", M=70, N=127, pad=3),
        case("NaN and inf in x, -inf in dy: whole rows of dx, single columns of dw", M=5, N=1025, strange=True),
        case("row offsets past 2^31", gib=25, M=3, N=1000, pad=2**30),
    ),
    benches=PROBLEM.benches,
    peers={
        "torch": _torch_backward,
        "torch.compile": by_inductor(reference_backward),
        "liger": _liger_backward,
        "quack": _quack_backward,
    },
    properties=(same_each_time,),
    refuses=(
        Refusal("dy of another shape", _with(lambda dy, *r: (dy[:2], *r)), ValueError, "x has shape"),
        Refusal("one rstd too few", _with(lambda *a: (*a[:3], a[3][:7])), ValueError, "rstd has shape"),
        Refusal("rstd in 16 bits", _with(lambda *a: (*a[:3], a[3].half())), TypeError, "rstd is"),
        Refusal("strided", _with(lambda dy, x, *r: (dy.T, x.T, *r)), ValueError, "stride"),
        Refusal("not a float", _with(lambda *a: [t.long() for t in a]), TypeError, "torch.int64"),
        Refusal("gradient lost", _with(lambda dy, *r: (dy.requires_grad_(), *r)), ValueError, "grad"),
    ),
)
