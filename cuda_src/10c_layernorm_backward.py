"""LayerNorm backward in CUDA C++: one sum along the row, one down the column
=========================================================================
The kernels and what they predict are in 10c_layernorm_backward.cu; here they are functions of tensors, checked against
PyTorch, and with the forward of 10b_layernorm_lengths one differentiable op. The cluster is no part of the emulator.

Run it:    python cuda_src/10c_layernorm_backward.py
Check it:  python -m lessonkit check 10c_layernorm_backward
Time it:   python -m lessonkit bench 10c_layernorm_backward
"""

from importlib import import_module

from lessonkit import DEVICE, Grad, Lesson, Mutant, Refusal, Unsupported, Work, by_inductor, case, cuda, expect, needs

import torch

from problems import layer_norm

forward = import_module("cuda_src.10_layernorm")
lengths = import_module("cuda_src.10b_layernorm_lengths")
kernels = cuda.extension(__file__)  # 10c_layernorm_backward.cu, built at the first call


def reference(dy, x, w, mean, rstd):
    """The three formulas in fp32 (or wider); mean and rstd are what the forward saved."""
    wide = torch.promote_types(x.dtype, torch.float32)
    g = dy.to(wide) * w.to(wide)
    x_hat = (x.to(wide) - mean[:, None]) * rstd[:, None]
    c1, c2 = (g * x_hat).mean(-1, keepdim=True), g.mean(-1, keepdim=True)
    dx = rstd[:, None] * (g - x_hat * c1 - c2)  # reads 2MN, writes MN
    dw, db = (dy.to(wide) * x_hat).sum(0), dy.to(wide).sum(0)  # reads 2MN
    return dx.to(x.dtype), dw.to(x.dtype), db.to(x.dtype)


def layernorm_backward_naive(dy, x, w, mean, rstd):
    """dy [M, N], x [M, N], w [N], mean [M], rstd [M] (fp32) -> dx [M, N], dw [N], db [N]; two kernels, 5MN."""
    return _launch("layernorm_backward_naive", dy, x, w, mean, rstd)


def layernorm_backward_persistent(dy, x, w, mean, rstd):
    """As layernorm_backward_naive in one pass; rows that are a multiple of 16 bytes, to 16 KB."""
    _up_to(x, 2**14)
    return _launch("layernorm_backward_persistent", dy, x, w, mean, rstd)


def layernorm_backward_warp(dy, x, w, mean, rstd):
    """As layernorm_backward_persistent, a warp a row of at most 2 KB."""
    _up_to(x, 2**11)
    return _launch("layernorm_backward_warp", dy, x, w, mean, rstd)


@needs(90, "thread block clusters")
def layernorm_backward_cluster(dy, x, w, mean, rstd):
    """As layernorm_backward_persistent, 2 to 16 blocks a row of at most 256 KB."""
    _up_to(x, 2**18)
    return _launch("layernorm_backward_cluster", dy, x, w, mean, rstd)


def layernorm_backward(dy, x, w, mean, rstd):
    """As layernorm_backward_naive for every M and N, each row length by the rung that suits it."""
    return _launch("layernorm_backward", dy, x, w, mean, rstd)


def _launch(name, dy, x, w, mean, rstd):
    expect(dy=dy, x=x, ndim=2, dtypes=forward.DTYPES, same_shape=True, same_dtype=True, contiguous=True)
    expect(w=w, ndim=1, dtypes=(x.dtype,), contiguous=True)
    expect(mean=mean, rstd=rstd, ndim=1, dtypes=(torch.float32,), same_shape=True, contiguous=True)
    M, N = x.shape
    if w.shape != (N,) or mean.shape != (M,):
        raise ValueError(f"w {tuple(w.shape)}, mean {tuple(mean.shape)}: expected ({N},), ({M},) for x {M} x {N}")
    dtype = str(x.dtype).removeprefix("torch.")
    dx, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty_like(w)
    scratch = getattr(kernels, f"layernorm_backward_scratch_{dtype}")(M, N)
    partials = torch.empty(scratch, dtype=torch.float32, device=x.device)
    getattr(kernels, f"{name}_{dtype}")(dy, x, w, mean, rstd, dx, dw, db, partials, M, N)
    return dx, dw, db


def _up_to(x, most):
    if x.ndim == 2 and (not x.numel() or x.shape[1] * x.element_size() > most):
        raise Unsupported(f"no rows, or rows past {most // 1024} KB: more than this rung's registers hold")
    if x.ndim == 2 and x.shape[1] * x.element_size() % 16:
        raise Unsupported("rows that are no multiple of 16 bytes: cp.async copies 16 aligned bytes at a time")


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        y, mean, rstd = lengths.layernorm(x.detach(), w.detach(), b.detach())
        ctx.save_for_backward(x, w, mean, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        return layernorm_backward(dy.contiguous(), x.detach(), w.detach(), mean, rstd)


def layernorm(x, w, b):
    """x [M, N], w [N], b [N] -> [M, N], with gradients for all three."""
    return _LayerNorm.apply(x, w, b)


def inputs(M, N, dtype=torch.float32):
    # The forward's x has rows of three scales and a large mean, so a row taken for its neighbour shows. dy is not
    # centred: with a mean of 0 a forgotten mean(g) would hide in the noise.
    x, w, b = layer_norm.inputs(M, N, dtype)
    _, mean, rstd = layer_norm.reference(x, w, b)
    # Every dy * w is exact, 8 bits times 4: in a row of one element dx is dy * w - dy * w = 0, and a compiler that
    # fuses the second product into the subtraction, unrounded, would leave the first one's rounding.
    dy = (torch.randn(M, N, device=DEVICE) + 0.5).bfloat16().to(dtype)
    return dy, x, ((w * 8).round() / 8).to(dtype), mean, rstd


def dx_is_orthogonal(rung):
    """y does not change when a row is shifted or stretched, so dx . 1 and dx . x_hat are 0 in every row (eps aside)."""
    dy, x, w, mean, rstd = inputs(4, 300)
    dx = rung(dy, x, w, mean, rstd)[0][::3].double()
    x_hat = ((x - mean[:, None]) * rstd[:, None])[::3].double()
    for along in (torch.ones_like(x_hat), x_hat):
        assert ((dx * along).sum(1).abs() < 1e-3 * dx.abs().sum(1)).all()


def _torch(dy, x, w, mean, rstd):
    return torch.ops.aten.native_layer_norm_backward(dy, x, w.shape, mean, rstd, w, w, [True] * 3)


PEERS = {
    "torch": _torch,
    "torch.compile": by_inductor(reference),
    "liger": lambda dy, x, w, *s: import_module("liger_kernel.ops.layer_norm").layer_norm_backward(dy, x, w, w, *s),
    "quack": lambda dy, x, w, mean, rstd: import_module("quack.rmsnorm").layernorm_bwd(x, w, dy, rstd, mean),
}


def _work(M, N, dtype):
    return Work(bytes=3 * (M + 1) * N * dtype.itemsize + 8 * M, flops=14 * M * N)


def _other(change):
    return lambda f: f(*change(*inputs(4, 8)))


# fmt: off
LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    extension=kernels,
    rungs=(layernorm_backward_naive, layernorm_backward_persistent, layernorm_backward_warp, layernorm_backward_cluster,
           layernorm_backward),
    checks=(
        case("no rows: dw and db are sums of nothing, 0", M=0, N=8),
        case("rows of nothing", M=3, N=0),
        case("one element a row: dx is 0", M=17, N=1),
        case("a prime width: v1 alone", M=7, N=127),
        case("more rows than warps, so that they turn", M=150, N=120),
        case("two warps a row, several turns of each block", M=70, N=520),
        case("rows of 4 KB, the last thread without a vector", M=5, N=1028),
        case("a cluster of 8 in 32 bits, of 4 in 16", gib=1, M=300, N=32768),
        case("past 256 KB", gib=1, M=5, N=140008),
        case("row offsets past 2^31", gib=130, M=262145, N=8200 - 8),
        case("whole vectors, on which requests are counted", M=32, N=256),
    ),
    benches=tuple({"M": m, "N": n} for m, n in reversed(layer_norm.SHAPES)),
    work=_work,
    wrong=(
        Mutant("the mean of g forgotten", "dx_kernel", "* r * along - sum)", "* r * along)",
               "layernorm_backward_naive"),
        Mutant("sums read before they are there", "dx_kernel", "    __syncthreads();\n", "", "layernorm_backward_naive",
               "race"),
        Mutant("dw of the raw x", "dw_db_kernel", " - mean[row]) * rstd[row]", ")", "layernorm_backward_naive"),
        Mutant("dw of the last row alone", "accumulate", "dw[k][e] += d[e] * x_hat", "dw[k][e] = d[e] * x_hat",
               "layernorm_backward_warp"),
        Mutant("warps replace each other's sums", "backward_kernel", "add_to<T>(block, n, i == 0,",
               "add_to<T>(block, n, true,", "layernorm_backward_warp"),
        Mutant("warps add at the same time", "backward_kernel",
               "if (i == warp) add_to<T>(block, n, i == 0, dw, db, share);\n            __syncthreads();",
               "if (i == warp) add_to<T>(block, n, i == 0, dw, db, share);", "layernorm_backward_warp", "race"),
        Mutant("the row is used before it has come", "backward_kernel",
               "        __pipeline_wait_prior(STAGES - 1);\n", "", "layernorm_backward_persistent", "uninitialised"),
        Mutant("sums read too early", "backward_kernel", "[warp] = all;\n            __syncthreads();", "[warp] = all;",
               "layernorm_backward_persistent", "race"),
        Mutant("one place for two rows' sums", "backward_kernel", "if (lane == 0) sums[turn % 2][warp] = all;",
               "if (lane == 0) sums[0][warp] = all;", "layernorm_backward_persistent", "uninitialised"),
        Mutant("the last block forgotten", "add_partials_kernel", "i < blocks", "i < blocks - 1",
               "layernorm_backward_persistent"),
    ),
    peers=PEERS,
    claims={"backward_kernel": ("cp.async", "16-byte stores", "no spills"), "dx_kernel": ("no spills",)},
    properties=(dx_is_orthogonal,),
    refuses=(
        Refusal("dy of another shape", _other(lambda dy, x, *r: (dy[:2], x, *r)), ValueError, "x has shape"),
        Refusal("half precision", _other(lambda dy, x, *r: (dy.half(), x.half(), *r)), TypeError, "dy is"),
        Refusal("w too short", _other(lambda dy, x, w, *r: (dy, x, w[:7], *r)), ValueError, r"w \(7,\)"),
        Refusal("mean in 16 bits", _other(lambda *a: (*a[:3], a[3].bfloat16(), a[4])), TypeError, "mean is"),
    ),
    grad=Grad(layernorm, lambda x, w, b: layer_norm.reference(x, w, b)[0], layer_norm.inputs),
    dtypes=forward.DTYPES,
)
# fmt: on

if __name__ == "__main__":
    LESSON.main()
