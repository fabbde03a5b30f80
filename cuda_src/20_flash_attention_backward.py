"""Flash attention, backward, in CUDA C++: two deterministic passes, scalar and on tensor cores
============================================================================================
The kernels and their predictions are in 20_flash_attention_backward.cu and 20_attention_mma.cuh. This file wraps them
as functions of tensors and checks them against PyTorch. With the forward of course_ops they are one differentiable op,
which is checked against float64 autograd.

Run it:    python3 course.py run 20_flash_attention_backward
Check it:  python3 course.py check 20_flash_attention_backward
Time it:   python3 course.py bench 20_flash_attention_backward
"""

import math

from lessonkit import DEVICE, About, Grad, Lesson, Mutant, Prediction, Refusal, cuda, expect

import torch
import torch.nn.functional as F

from course_ops.attention import attention_forward
from problems.attention_plain import PROBLEM_BACKWARD, inputs

kernels = cuda.extension(__file__)  # 20_flash_attention_backward.cu, built at the first call


def attention_backward_scalar(q, k, v, o, lse, dout, causal=False):
    """q, k, v, o, dout [B, H, S, D], lse [B, H, S] fp32 -> dq, dk, dv; two passes on CUDA cores. D up to 128."""
    _expect(q, k, v, o, lse, dout)
    return _run("attention_backward_scalar", q, k, v, o, lse, dout, causal)


def attention_backward_mma(q, k, v, o, lse, dout, causal=False):
    """As attention_backward_scalar on tensor cores, which fp32 falls back to; D is padded to 64 or 128 in copies."""
    _expect(q, k, v, o, lse, dout)
    D = q.shape[-1]
    if q.dtype == torch.float32:
        return _run("attention_backward_scalar", q, k, v, o, lse, dout, causal)
    if D not in (64, 128):  # zeros add nothing to a product
        q, k, v, o, dout = (F.pad(t, (0, (64 if D <= 64 else 128) - D)) for t in (q, k, v, o, dout))
    grads = _run("attention_backward_mma", q, k, v, o, lse, dout, causal, 1 / math.sqrt(max(D, 1)))
    return tuple(g[..., :D].contiguous() for g in grads)


def _expect(q, k, v, o, lse, dout):
    expect(q=q, k=k, v=v, o=o, dout=dout, ndim=4, same_shape=True, same_dtype=True, contiguous=True)
    expect(lse=lse, dtypes=(torch.float32,), contiguous=True)
    if lse.shape != q.shape[:-1]:
        raise ValueError(f"lse has shape {tuple(lse.shape)}, expected {tuple(q.shape[:-1])}, one number a query")
    if q.shape[-1] > 128:
        raise ValueError(f"q has D = {q.shape[-1]}, expected at most 128: registers hold no longer row of a gradient")


def _run(name, q, k, v, o, lse, dout, causal, scale=None):
    B, H, S, D = q.shape
    dq, dk, dv = torch.empty_like(q), torch.empty_like(q), torch.empty_like(q)
    stats = torch.empty(2, B * H, -(-S // 128) * 128, device=q.device)  # lse and rowsum(dO * O), with room for a tile
    if q.numel():
        launch = getattr(kernels, f"{name}_{str(q.dtype).removeprefix('torch.')}")
        launch(q, k, v, o, lse, dout, dq, dk, dv, stats, B * H, S, D, causal, scale or 1 / math.sqrt(D))
    return dq, dk, dv


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        o, lse = attention_forward(q, k, v, causal=causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal = causal
        return o

    @staticmethod
    def backward(ctx, dout):
        q, k, v, o, lse = (t.detach() for t in ctx.saved_tensors)
        return *attention_backward_mma(q, k, v, o, lse, dout.contiguous(), ctx.causal), None


def attention(q, k, v, causal=False):
    """q, k, v [B, H, S, D] -> o by course_ops, differentiable by attention_backward_mma."""
    return _Attention.apply(q, k, v, causal)


def written_out(q, k, v, causal=False):
    """What autograd goes through to judge `attention`: the S x S matrices in memory."""
    s = q @ k.mT / math.sqrt(q.shape[-1])
    hidden = torch.ones_like(s, dtype=torch.bool).triu(1) & causal
    return s.masked_fill(hidden, -math.inf).softmax(-1) @ v


FULL = {"B": 8, "H": 16, "S": 2048, "D": 128, "causal": False}

LESSON = Lesson(
    about=About(
        teaches="recompute what was not kept: two deterministic passes",
        hours=1.75,
        operator="attention backward",
        language="CUDA C++",
        pictures=("backward_sweeps",),
    ),
    problem=PROBLEM_BACKWARD,
    extension=kernels,
    rungs=(attention_backward_scalar, attention_backward_mma),
    predicted=(
        Prediction(
            rung=attention_backward_scalar,
            at=FULL,
            tflop_per_s=4.6,
            why="As in the forward pass, the count takes a wavefront for each word; neighbouring words probably "
            "come in one wide load.",
        ),
        Prediction(rung=attention_backward_mma, at=FULL, tflop_per_s=(190, 385)),
    ),
    wrong=(
        Mutant(
            "delta left out", "attention_backward_kernel", "p * (dp - ", "p * (dp - 0 * ", "attention_backward_scalar"
        ),
        Mutant(
            "no scale", "attention_backward_kernel", "T(acc1[c] * scale)", "T(acc1[c])", "attention_backward_scalar"
        ),
        Mutant(
            "causal mask off by one",
            "attention_backward_kernel",
            "key <= query",
            "key < query",
            "attention_backward_scalar",
        ),
        Mutant(
            "delta of the key's row",
            "attention_backward_kernel",
            "delta[head * PS + query]",
            "delta[head * PS + row]",
            "attention_backward_scalar",
        ),
        Mutant(
            "a tile is overwritten while it is read",
            "attention_backward_kernel",
            "__syncthreads();  // all have read the tile before this one",
            "",
            "attention_backward_scalar",
            "race",
        ),
        Mutant("rows past the end", "copy_rows", "row < live", "true", "attention_backward_mma", "out of bounds"),
        Mutant(
            "P where dS belongs",
            "attention_backward_mma_kernel",
            "as_left<T, M, COLS>(left, ds)",
            "as_left<T, M, COLS>(left, p)",
            "attention_backward_mma",
        ),
        Mutant(
            "a wait for all but the last copy",
            "attention_backward_mma_kernel",
            "__pipeline_wait_prior(0)",
            "__pipeline_wait_prior(1)",
            "attention_backward_mma",
            "uninitialised",
        ),
        Mutant(
            "causal: the diagonal's tile begins too late",
            "attention_backward_mma_kernel",
            "first / COLS : 0",
            "first / COLS + 1 : 0",
            "attention_backward_mma",
            "race",
        ),
    ),
    claims={
        "attention_backward_kernel": ("no spills",),
        "attention_backward_mma_kernel": ("mma", "cp.async", "16-byte stores", "no spills"),
    },
    counts={attention_backward_scalar: {"wavefronts a shared access": 1.0}},
    refuses=(
        *PROBLEM_BACKWARD.refuses,
        Refusal("D past 128", lambda f: f(*_wide()), ValueError, "at most 128"),
    ),
    # At least seven tokens: with one, dP - delta is 0, with two it nearly cancels, and delta has O's rounding. For the
    # same reason the factor: dQ shows what delta inherits from O in 16 bits.
    grad=Grad(attention, written_out, lambda S, **shape: inputs(S=S and max(S, 7), **shape), factor=2),
)


def _wide():
    t = torch.zeros(1, 1, 4, 130, device=DEVICE)
    return t, t, t, t, t[..., 0].contiguous(), t


if __name__ == "__main__":
    LESSON.main()
