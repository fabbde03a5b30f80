"""Add and LayerNorm, backward: the norm's kernel adds both gradients
==================================================================
total = x + delta, y = LayerNorm(total) w + b. Two gradients arrive: dy through the norm, dtotal along the stream.

    dx = ddelta = dtotal + rstd (g - x_hat mean(g x_hat) - mean(g))      g = dy w
    dw = sum over rows of dy x_hat      db = sum over rows of dy

The bytes per element, with the stream in fp32 and the rest in bf16:

    PyTorch                                                              one kernel
    dy to fp32                                                      6    reads dtotal 4, dy 2, total 4
    dx of the norm                                                 12    writes dx 4, ddelta 2
    dw and db, which read the same two tensors again                8
    the sum of the two gradients                                   12
    ddelta to bf16                                                  6
                                                                   44                               16

Predicted: 2.75 times as fast. GPT-2 small's 24 norms on [32768, 768] (403 MB, 0.096 ms at 4.2 TB/s) take 4 ms less a
step.

You will learn: where autograd's own additions can go, one result in two dtypes, the differentiable op.
Run it:    python3 course.py run lesson20_add_norm_backward
Check it:  python3 course.py check lesson20_add_norm_backward
Time it:   python3 course.py bench lesson20_add_norm_backward
"""

from lessonkit import About, Grad, Lesson, Mutant, Prediction, case, expect, num_sms

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_ops.kernels._rows import Rows, choose
from course_ops.kernels.add_norm import add_norm_packed
from course_ops.layer_norm import BACKWARD as LAYER_NORM_BACKWARD
from problems.add_norm import EPS, PROBLEM, PROBLEM_BACKWARD


# Rung 1. Day 2's norm, from course_ops, and what autograd runs around it: casts, and the sum of the stream's two
# gradients.
def norm_then_add(dtotal, dy, total, w, mean, rstd):
    """dtotal, total [M, N] of the stream's dtype, dy [M, N], w [N], mean, rstd [M] fp32 -> dx as dtotal, ddelta as dy,
    dw, db [N]. Raises ValueError or TypeError for other shapes and dtypes."""
    M, _, _, _, _, _ = _prepare(dtotal, dy, total, w, mean, rstd)
    backward = choose(LAYER_NORM_BACKWARD, Rows.of(total))
    dx, dw, db = backward(dy.to(total.dtype), total, w, mean, rstd, True)
    dx = dtotal + dx if M else dx
    return dx, dx.to(dy.dtype, copy=True), dw, db


# Rung 2. New: the kernel that computes dx also adds dtotal, and stores dx in both dtypes. The rest is day 2's kernel:
# as many programs as fit, dw and db of all their rows in registers, partial sums added in a fixed order. Predicted: 16
# bytes per element, not 44. A program has no loads in flight while it computes; only the SM's other programs have.
@triton.jit
def row_sums(g, x_hat):
    c1, c2 = tl.split(tl.sum(tl.join(g * x_hat, g), axis=1))  # [ROWS, BLOCK_N, 2] -> [ROWS] each
    return c1[:, None], c2[:, None]


@triton.jit
def add_partials_kernel(
    partial_dw_ptr, partial_db_ptr, dw_ptr, db_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):  # partial [P, N] in fp32 -> [N]
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    dw = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P).to(tl.int64)[:, None]
        mask = (p < P) & (cols < N)
        dw += tl.load(partial_dw_ptr + p * N + cols, mask=mask, other=0.0)
        db += tl.load(partial_db_ptr + p * N + cols, mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(dw, axis=0, keep_dims=True), mask=cols < N)
    tl.store(db_ptr + cols, tl.sum(db, axis=0, keep_dims=True), mask=cols < N)


@triton.jit
def add_norm_backward_kernel(
    dtotal_ptr, dy_ptr, total_ptr, w_ptr, mean_ptr, rstd_ptr,  # [M, N] three times, [N], [M], [M]
    dx_ptr, ddelta_ptr, partial_dw_ptr, partial_db_ptr,  # [M, N], [M, N], [programs, N] twice, fp32
    M, N, stride_dtotal, stride_dy, stride_total,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    cols = tl.arange(0, BLOCK_N)[None, :]
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    dw = tl.zeros((ROWS, BLOCK_N), tl.float32)
    db = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for tile in tl.range(program, tl.cdiv(M, ROWS), programs, num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)[:, None]  # int64, as program is
        mask = (rows < M) & (cols < N)
        dtotal = tl.load(dtotal_ptr + rows * stride_dtotal + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        total = tl.load(total_ptr + rows * stride_total + cols, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        x_hat = (total - mean) * rstd  # in the padding dy is 0, and so is every product below
        g = dy * w
        c1, c2 = row_sums(g, x_hat)
        dx = dtotal + rstd * (g - x_hat * (c1 / N) - c2 / N)
        tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(ddelta_ptr + rows * N + cols, dx.to(ddelta_ptr.dtype.element_ty), mask=mask)
        dw += dy * x_hat
        db += dy
    tl.store(partial_dw_ptr + program * N + cols, tl.sum(dw, axis=0, keep_dims=True), mask=cols < N)
    tl.store(partial_db_ptr + program * N + cols, tl.sum(db, axis=0, keep_dims=True), mask=cols < N)


def add_norm_backward_fused(dtotal, dy, total, w, mean, rstd):
    """As norm_then_add, in one pass for N up to 8192; longer rows call rung 1."""
    return _fused(dtotal, dy, total, w, mean, rstd, stages=1)


# Rung 3. New: num_stages=3. The compiler turns the three loads into cp.async, two tiles ahead. At N = 768 and 10 bytes
# an element that is 15 KB per program. Five programs per SM have 77 KB in flight, where memory needs 25 (Little's law,
# day 2, lesson 16). Predicted: copy speed. Longer rows get fewer stages, since three of 8192 exceed an SM's shared
# memory. At N = 4096 on an H200, this rung gains nothing over the last one: 2.92 and 2.93 TB/s. torch.compile runs at
# 3.39. Past 2048 columns course_ops takes another kernel: 3.89 TB/s. Its programs walk over many rows, with the next
# ones on their way to shared memory.
def add_norm_backward(dtotal, dy, total, w, mean, rstd):
    """As add_norm_backward_fused, with the next rows in flight to shared memory."""
    width = dtotal.element_size() + dy.element_size() + total.element_size()
    tile = max(1024, triton.next_power_of_2(max(1, dy.shape[-1]))) * width
    return _fused(dtotal, dy, total, w, mean, rstd, stages=max(1, min(3, 98304 // tile)))


def _fused(dtotal, dy, total, w, mean, rstd, stages):
    M, N, dx, ddelta, dw, db = _prepare(dtotal, dy, total, w, mean, rstd)
    if N > 8192:
        return norm_then_add(dtotal, dy, total, w, mean, rstd)
    if dx.numel():
        block = triton.next_power_of_2(N)
        rows = max(1, 1024 // block)
        # 8 elements per thread: dw and db are 16 of its registers, and 96 in all leave room for 20 warps on an SM.
        warps = min(16, rows * block // 256)
        programs = min(triton.cdiv(M, rows), num_sms() * max(1, 20 // warps))
        partial_dw, partial_db = torch.empty((2, programs, N), dtype=torch.float32, device=dx.device)
        add_norm_backward_kernel[(programs,)](
            dtotal, dy, total, w, mean, rstd, dx, ddelta, partial_dw, partial_db, M, N,
            dtotal.stride(0), dy.stride(0), total.stride(0), rows, block, stages,
            num_warps=warps, maxnreg=96 if warps < 16 else 128,
        )  # fmt: skip
        add_partials_kernel[(triton.cdiv(N, 32),)](partial_dw, partial_db, dw, db, programs, N, BLOCK_P=64, BLOCK_N=32)
    return dx, ddelta, dw, db


def _prepare(dtotal, dy, total, w, mean, rstd):
    expect(total=total, dtotal=dtotal, dy=dy, ndim=2, same_shape=True, unit_stride=True)
    expect(total=total, dtotal=dtotal, w=w, same_dtype=True)
    expect(mean=mean, rstd=rstd, ndim=1, same_shape=True, contiguous=True, dtypes=(torch.float32,))
    M, N = total.shape
    if w.shape != (N,) or mean.shape != (M,):
        raise ValueError(f"w {tuple(w.shape)}, mean {tuple(mean.shape)}: expected ({N},), ({M},) for total {M} x {N}")
    if total.dtype not in (dy.dtype, torch.float32):
        raise TypeError(f"total is {total.dtype}, dy {dy.dtype}: the stream is of dy's dtype, or float32")
    make = torch.empty if M else torch.zeros  # a sum of no rows is 0
    new = (torch.empty((M, N), dtype=t.dtype, device=t.device) for t in (dtotal, dy))
    return M, N, *new, *(make(N, dtype=w.dtype, device=w.device) for _ in range(2))


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delta, w, b):
        y, total, mean, rstd = add_norm_packed(delta, x, w, b, EPS)
        ctx.save_for_backward(total, w, mean, rstd)
        return total, y

    @staticmethod
    def backward(ctx, dtotal, dy):
        return add_norm_backward(dtotal.contiguous(), dy.contiguous(), *ctx.saved_tensors)


def add_norm(x, delta, w, b):
    """x + delta and its LayerNorm, as lesson 19, with gradients. Saves the sum, w and 8 bytes per row."""
    return _AddNorm.apply(x, delta, w, b)


def usual(x, delta, w, b):
    """The reference for autograd."""
    total = x + delta
    return total, F.layer_norm(total, w.shape, w, b).to(delta.dtype)


# fmt: off
WRONG = (
    Mutant("the stream's gradient is lost", "add_norm_backward_kernel", "dx = dtotal + rstd", "dx = rstd",
           "add_norm_backward"),
    Mutant("the mean of g forgotten", "add_norm_backward_kernel", " - c2 / N", "", "add_norm_backward_fused"),
    Mutant("autograd's sum is left out", "norm_then_add", "dtotal + dx", "dx", "norm_then_add"),
    Mutant("dtotal added to what the norm passes on", "add_norm_backward_kernel", "db += dy", "db += dy + dtotal",
           "add_norm_backward"),
    Mutant("dtotal's rows N apart", "add_norm_backward_kernel", "rows * stride_dtotal", "rows * N",
           "add_norm_backward"),
    Mutant("every second tile skipped", "add_norm_backward_kernel", "programs, num_stages", "2 * programs, num_stages",
           "add_norm_backward", "nan"),
    Mutant("rows past the last", "add_norm_backward_kernel", "(rows < M) & (cols < N)", "(rows < M + 1) & (cols < N)",
           "add_norm_backward", "out of bounds"),
)
# fmt: on

GPT = {"M": 32768, "N": 768, "stream": True}

LESSON = Lesson(
    about=About(
        teaches="the sum of two gradients fused into the norm, one result in two dtypes, asynchronous copies",
        hours=0.75,
        operator="add + layernorm backward",
        pictures=("partial_gradients",),
    ),
    problem=PROBLEM_BACKWARD,
    rungs=(norm_then_add, add_norm_backward_fused, add_norm_backward),
    predicted=(
        Prediction(
            rung=norm_then_add,
            at=GPT,
            percent_of_limit=44,  # 16 of 36 bytes
            why="Its norm is day 2's kernel, at 70% to 80% of copy speed (rows of day 2, lesson 9). So its 12 bytes "
            "take as long as 15 to 17. Cause of the rest not found: not spills, N = 4096 has none and loses as much.",
        ),
        Prediction(
            rung=add_norm_backward_fused,
            at=GPT,
            times=2.75,
            over=norm_then_add,
            why="That counts PyTorch's 44 bytes. Rung 1 moves 36, since its kernel computes dw and db from the same "
            "loads: 2.25 times.",
        ),
        Prediction(
            rung=add_norm_backward,
            at=GPT,
            percent_of_limit=100,
            why="Cause not found: the rows of an SM are loaded ahead, and no registers are spilled.",
        ),
    ),
    checks=(*PROBLEM_BACKWARD.checks, case("the bytes are counted here", M=64, N=768, stream=True)),
    wrong=WRONG,
    claims={
        add_norm_backward_fused: ("add_norm_backward_kernel: 16-byte loads", "add_norm_backward_kernel: no spills"),
        add_norm_backward: ("add_norm_backward_kernel: cp.async", "add_norm_backward_kernel: no spills"),
    },
    passes={add_norm_backward_fused: 1.38, add_norm_backward: 1.38},
    passes_why="The interpreter counts w for every program, and the partial sums of 20 programs, written and read, "
    "beside only 64 rows.",
    grad=Grad(add_norm, usual, PROBLEM.inputs),
)

if __name__ == "__main__":
    LESSON.main()
