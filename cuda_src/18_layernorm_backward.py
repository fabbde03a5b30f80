"""LayerNorm backward in CUDA C++: one sum along the row, one down the column
=========================================================================
The kernels and their predictions are in 18_layernorm_backward.cu. This file wraps them as functions of tensors and
checks them against PyTorch. With the forward of the reference they are one differentiable op. The emulator has no
clusters: those rungs run on an sm_90 GPU and are compiled anywhere.

Run it:    python3 course.py run 18_layernorm_backward
Check it:  python3 course.py check 18_layernorm_backward
Time it:   python3 course.py bench 18_layernorm_backward
"""

from lessonkit import About, Grad, Lesson, Mutant, Prediction, Refusal, Unsupported, case, cuda, expect, needs

import torch

from problems import layer_norm
from problems.layer_norm import PROBLEM_BACKWARD, inputs_backward

kernels = cuda.extension(__file__)  # 18_layernorm_backward.cu, built at the first call
DTYPES = (torch.float32, torch.bfloat16)


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
    """As layernorm_backward_persistent, 2 to 16 blocks per row of at most 256 KB."""
    _up_to(x, 2**18)
    return _launch("layernorm_backward_cluster", dy, x, w, mean, rstd)


def layernorm_backward(dy, x, w, mean, rstd):
    """As layernorm_backward_naive for every M and N, each row length by the rung that suits it."""
    return _launch("layernorm_backward", dy, x, w, mean, rstd)


def _launch(name, dy, x, w, mean, rstd):
    expect(dy=dy, x=x, ndim=2, dtypes=DTYPES, same_shape=True, same_dtype=True, contiguous=True)
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
        y, mean, rstd = layer_norm.reference(x.detach(), w.detach(), b.detach())
        ctx.save_for_backward(x, w, mean, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        return layernorm_backward(dy.contiguous(), x.detach(), w.detach(), mean, rstd)


def layernorm(x, w, b):
    """x [M, N], w [N], b [N] -> [M, N], with gradients for all three."""
    return _LayerNorm.apply(x, w, b)


def _other(change):
    return lambda f: f(*change(*inputs_backward(4, 8)))


# fmt: off
LESSON = Lesson(
    about=About(
        teaches="a sum along the row and one down the column, from one read",
        hours=1.25,
        operator="layernorm backward",
        language="CUDA C++",
        pictures=("partial_gradients",),
    ),
    problem=PROBLEM_BACKWARD,
    extension=kernels,
    rungs=(layernorm_backward_naive, layernorm_backward_persistent, layernorm_backward_warp, layernorm_backward_cluster,
           layernorm_backward),
    predicted=(
        Prediction(
            rung=layernorm_backward_naive,
            at={"M": 8192, "N": 8192},
            percent_of_limit=60,
            why="The kernel for dw and db has a block for 32 columns, whose warps wait for one row after another: "
            "too few bytes are in flight.",
        ),
        Prediction(rung=layernorm_backward_persistent, at={"M": 8192, "N": 8192}, percent_of_limit=96),
        Prediction(
            rung=layernorm_backward_warp,
            at={"M": 32768, "N": 256},
            percent_of_limit=96,
            why="Cause not found. The launch that adds up the partial sums is not in the count, but it is not enough: "
            "at N = 1024, with four times the bytes, the rung is short of 96% too.",
        ),
        Prediction(
            rung=layernorm_backward_cluster,
            at={"M": 4096, "N": 32768},
            percent_of_limit=100,
            why="Every row ends in a barrier of the cluster, and its blocks wait for the slowest of them.",
        ),
        Prediction(
            rung=layernorm_backward,
            at={"M": 4096, "N": 12672},
            percent_of_limit=96,
            why="It is layernorm_backward_cluster at this length, and as slow: every row ends in a barrier of the "
            "cluster.",
        ),
    ),
    checks=(
        *(each for each in PROBLEM_BACKWARD.checks if "pad" not in each.shape),  # rows one behind the other
        case("a prime width: v1 alone", M=7, N=127),
        case("more rows than warps, so that they turn", M=150, N=120),
        case("two warps a row, several rows of each block", M=70, N=520),
        case("rows of 4 KB, the last thread without a vector", M=5, N=1028),
        case("a cluster of 8 in 32 bits, of 4 in 16", gib=1, M=300, N=32768),
        case("past 256 KB", gib=1, M=5, N=140008),
        case("row offsets past 2^31", gib=130, M=262145, N=8200 - 8),
        case("whole vectors, on which requests are counted", M=32, N=256),
    ),
    benches=PROBLEM_BACKWARD.benches[::-1],
    wrong=(
        Mutant("the mean of g forgotten", "dx_kernel", "* r * along - sum)", "* r * along)",
               "layernorm_backward_naive"),
        Mutant("sums read before they are there", "dx_kernel", "    __syncthreads();\n", "", "layernorm_backward_naive",
               "race"),
        Mutant("dw of the raw x", "dw_db_kernel", " - mean[row]) * rstd[row]", ")", "layernorm_backward_naive"),
        Mutant("dw of the last row alone", "accumulate", "dw[k][e] += d[e] * x_hat", "dw[k][e] = d[e] * x_hat",
               "layernorm_backward_warp"),
        Mutant("odd widths have no rung", "layernorm_backward", "return layernorm_backward_naive(t, stream)", "return",
               "layernorm_backward", "nan"),
        Mutant("the mean of g forgotten in each vector", "store_dx", " - means.y", "", "layernorm_backward"),
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
        Mutant("the other blocks' sums are left out", "backward_kernel", "i < parts * warps; i += 32",
               "i < warps; i += 32", "layernorm_backward_cluster"),
    ),
    claims={"backward_kernel": ("cp.async", "16-byte stores", "no spills"), "dx_kernel": ("no spills",)},
    refuses=(
        Refusal("dy of another shape", _other(lambda dy, x, *r: (dy[:2], x, *r)), ValueError, "x has shape"),
        Refusal("half precision", _other(lambda dy, x, *r: (dy.half(), x.half(), *r)), TypeError, "dy is"),
        Refusal("w too short", _other(lambda dy, x, w, *r: (dy, x, w[:7], *r)), ValueError, r"w \(7,\)"),
        Refusal("mean in 16 bits", _other(lambda *a: (*a[:3], a[3].bfloat16(), a[4])), TypeError, "mean is"),
    ),
    grad=Grad(layernorm, lambda x, w, b: layer_norm.reference(x, w, b)[0], layer_norm.inputs),
    dtypes=DTYPES,
)
# fmt: on

if __name__ == "__main__":
    LESSON.main()
