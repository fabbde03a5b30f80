"""Matmul with an epilogue, backward: what to save, where to fuse, and a custom operator
=====================================================================================
y = gelu(z) + residual, z = x W^T + bias [M, N]. With dz = dy * gelu'(z):

    dx = dz W  [M, K]      dW = dz^T x  [N, K]      dbias = sum over rows of dz  [N]      dresidual = dy

Two matmuls of 2MNK FLOPs, and HBM traffic around them. (Lesson 4: a pass over MN elements costs 167/K of a matmul.) Two
things to choose:

- What to save? gelu' needs z, and z cannot be computed from y, since GELU is not monotone. Saving z costs the forward
  one pass, 167/K of a matmul, and MN elements of memory. Recomputing it costs a matmul. At K = 4096 that is 4% against
  100%, so z is saved, unless memory is short.
- Where to compute dz? If both matmuls compute it from dy and z while they load, dz is never written. But an element is
  computed again for each of the K/128 tiles that use it, and two operands come from L2 instead of one. A kernel of its
  own reads dy and z and writes dz: 3 passes, 6% of the matmuls at K = 4096.

A third place is the best: the kernel that computes dy. In an MLP that is the matmul dout W2. There dz is an epilogue
and costs one pass, over z. That needs both layers in one operator, as in fused MLPs.

You will learn: how to choose what a backward saves, column sums on the way, an autograd Function and an operator.
Run it:    python3 course.py run lesson05_matmul_epilogue_backward
Check it:  python3 course.py check lesson05_matmul_epilogue_backward
Time it:   python3 course.py bench lesson05_matmul_epilogue_backward
"""

import math

from lessonkit import DEVICE, About, Grad, Lesson, Mutant, Prediction, expect, num_sms

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op, opcheck

from course_ops import matmul
from problems.linear import PROBLEM_BACKWARD, inputs, inputs_backward, reference

# gelu(z) = z / (1 + exp2(LINEAR z + CUBIC z^3)): the tanh form with its constants folded (day 2, lesson 3).
LINEAR = tl.constexpr(-2 * math.sqrt(2 / math.pi) * math.log2(math.e))
CUBIC = tl.constexpr(LINEAR.value * 0.044715)
LN2 = tl.constexpr(math.log(2))


# gelu(z) = z s with s = 1 / (1 + exp2(g)), g = LINEAR z + CUBIC z^3; ds/dz = -s (1 - s) ln(2) dg/dz.
@triton.jit
def slope(z):
    s = 1 / (1 + tl.exp2(z * (z * z * CUBIC + LINEAR)))
    return s - z * s * (1 - s) * (z * z * (3 * CUBIC) + LINEAR) * LN2


# Rung 1. A kernel for each: dz, then dbias from dz. The two matmuls are course_ops.matmul's. Predicted: 4 passes beside
# two matmuls at 700 TFLOP/s. At K = 2048 that is 2 * 700 / (2 + 4 * 0.08) = 602 TFLOP/s.
@triton.jit
def dz_kernel(dy_ptr, z_ptr, dz_ptr, M, N, stride_dy, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # [M, N] each
    tiles_n = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    z = tl.load(z_ptr + rows * N + cols, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(dz_ptr + rows * N + cols, dy * slope(z), mask=mask)


@triton.jit
def column_sums_kernel(dz_ptr, partial_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # dz [M, N]; partial [programs, N] in fp32: a program's sums over the rows that it reads
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(tl.program_id(1) * BLOCK_M, M, tl.num_programs(1) * BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
        total += tl.load(dz_ptr + rows * N + cols, mask=(rows < M) & (cols < N), other=0.0).to(tl.float32)
    partial = partial_ptr + tl.program_id(1) * N + cols
    tl.store(partial, tl.sum(total, axis=0, keep_dims=True), mask=cols < N)


def backward_unfused(dy, x, w, z):
    """dy, z [M, N], x [M, K], w [N, K] -> dx [M, K], dw [N, K], dbias [N]. TypeError, ValueError otherwise."""
    (M, N), dz, partial = _prepare(dy, x, w, z)
    if z.numel():
        grid = (triton.cdiv(M, 32) * triton.cdiv(N, 128),)
        dz_kernel[grid](dy, z, dz, M, N, dy.stride(0), BLOCK_M=32, BLOCK_N=128)
        column_sums_kernel[(triton.cdiv(N, 128), len(partial))](dz, partial, M, N, BLOCK_M=32, BLOCK_N=128)
    return matmul(dz, w), matmul(dz.t(), x), partial.sum(0).to(z.dtype)


# Rung 2. New: a program walks down its columns and adds up dz while dz is in registers: 3 passes. The values that
# add up to dbias are never rounded to 16 bits, and without atomics its order is the same every time.
@triton.jit
def dz_and_sums_kernel(
    dy_ptr, z_ptr, dz_ptr, partial_ptr, M, N, stride_dy, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # as above
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(tl.program_id(1) * BLOCK_M, M, tl.num_programs(1) * BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
        mask = (rows < M) & (cols < N)
        z = tl.load(z_ptr + rows * N + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        dz = dy * slope(z)
        tl.store(dz_ptr + rows * N + cols, dz, mask=mask)
        total += dz
    partial = partial_ptr + tl.program_id(1) * N + cols
    tl.store(partial, tl.sum(total, axis=0, keep_dims=True), mask=cols < N)


def backward_fused(dy, x, w, z):
    """As backward_unfused."""
    (M, N), dz, partial = _prepare(dy, x, w, z)
    if z.numel():
        dz_and_sums_kernel[(triton.cdiv(N, 128), len(partial))](
            dy, z, dz, partial, M, N, dy.stride(0), BLOCK_M=32, BLOCK_N=128
        )
    # partial has 9 to 33 rows at the bench shapes: to add them up costs nothing compared with MN.
    return matmul(dz, w), matmul(dz.t(), x), partial.sum(0).to(z.dtype)


def _prepare(dy, x, w, z):
    expect(dy=dy, z=z, ndim=2, same_shape=True, same_dtype=True, unit_stride=True)
    expect(dy=dy, x=x, w=w, ndim=2, same_dtype=True, unit_stride=True)
    expect(z=z, contiguous=True)
    (M, N), K = z.shape, x.shape[1]
    if x.shape != (M, K) or w.shape != (N, K):
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)}: expected [M, K], [N, K] for z {M, N} [M, N]")
    programs = max(1, min(triton.cdiv(M, 32), 8 * num_sms() // max(1, triton.cdiv(N, 128))))
    partial = (torch.empty if M else torch.zeros)((programs, N), dtype=torch.float32, device=z.device)
    return (M, N), torch.empty_like(z), partial


def _forward(x, w, bias, residual):
    """y and z, by course_ops' version of lesson 4's last kernel."""
    expect(x=x, w=w, ndim=2, same_dtype=True)
    expect(x=x, bias=bias, same_dtype=True)
    if w.shape[1] != x.shape[1] or bias.shape != (len(w),):
        raise ValueError(
            f"x {tuple(x.shape)}, w {tuple(w.shape)}, bias {tuple(bias.shape)}: expected [M, K], [N, K], [N]"
        )
    return torch.ops.course_ops.linear(x, w, bias, residual, "gelu_tanh", True)


# For autograd in eager mode: a forward, a backward, and the tensors that pass between them.
class _LinearGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias, residual):
        y, z = _forward(x, w, bias, residual)
        ctx.save_for_backward(x, w, z)
        return y

    @staticmethod
    def backward(ctx, dy):
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()  # the gradient of y.sum() is one value, expanded
        needs_residual = ctx.needs_input_grad[3]
        return *backward_fused(dy, *ctx.saved_tensors), dy if needs_residual else None


def linear_gelu(x, w, bias, residual=None):
    """gelu(x W^T + bias) + residual with gradients; of the intermediates only z is saved for the backward."""
    return _LinearGelu.apply(x, w, bias, residual)


# And as an operator with a schema, for torch.compile and export, which need shapes without running it (day 1, lesson
# 8). Here a saved tensor must be a result. The backward is an operator too, so that it can be traced. The namespace is
# the module's name: tests import copies of this file, and each copy needs a namespace of its own.
SPACE = __name__.rpartition(".")[2]


@custom_op(f"{SPACE}::linear_gelu", mutates_args=())
def _op(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    return _forward(x.detach(), w.detach(), bias.detach(), residual)


@custom_op(f"{SPACE}::linear_gelu_backward", mutates_args=())
def _op_backward(dy: Tensor, x: Tensor, w: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return backward_fused(dy.contiguous(), x, w, z)


@_op.register_fake
def _(x, w, bias, residual):
    return x.new_empty(x.shape[0], w.shape[0]), x.new_empty(x.shape[0], w.shape[0])


@_op_backward.register_fake
def _(dy, x, w, z):
    return x.new_empty(x.shape), w.new_empty(w.shape), w.new_empty(w.shape[0])


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.residual = inputs[3] is not None


def _operator_backward(ctx, dy, _):
    return *_op_backward(dy, *ctx.saved_tensors), dy if ctx.residual else None


_op.register_autograd(_operator_backward, setup_context=_setup_context)


def _with_residual(M, N, K, dtype, pad=0):
    return inputs(M, N, K, residual=True, dtype=dtype, pad=pad)


def operator_is_sound(rung):
    """opcheck: the operator's schema, fake and gradient agree with its results; its gradients are the Function's."""
    if rung is not backward_fused:
        return
    args = [t.requires_grad_() for t in _with_residual(9, 40, 24, torch.float32)]
    assert set(opcheck(_op, tuple(args)).values()) == {"SUCCESS"}
    assert set(opcheck(_op_backward, tuple(t.detach() for t in inputs_backward(9, 40, 24))).values()) == {"SUCCESS"}
    dy = torch.randn(9, 40, device=DEVICE)
    ours, same = (torch.autograd.grad(y, args, dy) for y in (_op(*args)[0], linear_gelu(*args)))
    torch.testing.assert_close(ours, same, rtol=0, atol=0)


# fmt: off
WRONG = (
    Mutant("log2 taken for log: a slope without ln 2", "slope", "* LN2", "", "backward_unfused"),
    Mutant("the slope of relu", "slope", "s - z * s *", "s - 0 * s *", "backward_fused"),
    Mutant("every second tile of rows left out", "dz_and_sums_kernel", "tl.num_programs(1) * BLOCK_M",
           "2 * tl.num_programs(1) * BLOCK_M", "backward_fused", "nan"),
    Mutant("sums in 16 bits", "column_sums_kernel", "total +=", "total = total.to(tl.bfloat16).to(tl.float32) +",
           "backward_unfused"),
    Mutant("dy's rows N apart", "dz_and_sums_kernel", "rows * stride_dy", "rows * N", "backward_fused"),
)
# fmt: on

SQUARE = {"M": 8192, "N": 8192, "K": 2048}

LESSON = Lesson(
    about=About(
        teaches="what a backward saves, column sums on the way, an autograd Function and an operator",
        hours=0.5,
        operator="epilogue backward",
    ),
    problem=PROBLEM_BACKWARD,
    rungs=(backward_unfused, backward_fused),
    predicted=(
        Prediction(rung=backward_unfused, at=SQUARE, tflop_per_s=602),
        Prediction(rung=backward_fused, at=SQUARE, times=1.04, over=backward_unfused),
    ),
    wrong=WRONG,
    claims={backward_fused: ("dz_and_sums_kernel: 16-byte loads", "dz_and_sums_kernel: no spills")},
    properties=(operator_is_sound,),
    grad=Grad(linear_gelu, reference, _with_residual),
)

if __name__ == "__main__":
    LESSON.main()
