"""Softmax backward: a dot product and a subtraction
==================================================
y = softmax(x) of a row. Let g = dloss/dy, the gradient that autograd passes in, and dx = dloss/dx, the one asked for.
The Jacobian of softmax is dy_i/dx_j = y_i (1[i = j] - y_j), where 1[i = j] is 1 if i = j and 0 elsewhere. So:

    dx_j = sum_i g_i dy_i/dx_j = sum_i g_i y_i 1[i = j] - sum_i g_i y_i y_j        (the first sum is g_j y_j)
         = y_j (g_j - d)       with d = sum_i g_i y_i, one value per row

No N x N matrix is needed, and x is not needed either: y is enough. In the code g is called dy.

    kernel 1 of 3    reads y and dy, writes their product    3MN
    kernel 2 of 3    reads the product for its row sum d      MN
    kernel 3 of 3    reads y and dy, writes dx               3MN
    one kernel       reads y and dy, writes dx               3MN

On an H200, at 4.2 TB/s, 8192 x 8192 in bf16 (403 MB read and written) takes at least 0.096 ms.

You will be able to: derive a backward kernel, fuse it, and make it the backward of a torch.autograd.Function.
You need: lesson 5 (softmax). lesson16_rows_of_any_length shows what to do with rows that are too long for one program.
Run it:    python3 course.py run lesson06_softmax_backward
Check it:  python3 course.py check lesson06_softmax_backward
Time it:   python3 course.py bench lesson06_softmax_backward

Answer before you read on. All elements of dy are equal: what is dx? Which value must padding lanes hold for d?
"""

from lessonkit import About, Grad, Lesson, Mutant, Prediction, Unsupported, case, expect

import torch
import triton
import triton.language as tl

from problems.softmax import PROBLEM, PROBLEM_BACKWARD, logits


# Rung 1. A kernel for each step: the product y * dy, its sum along the row, the result. The product goes through memory
# in fp32. Rounded to 16 bits, it would leave its error in d, and so in dy - d.
# Predicted: 3 + 1 + 3 = 7MN elements, 2.33 times the least, if all is fp32. In bf16 an fp32 element counts as two, so
# the product costs 2MN to write and 2MN to read: 9MN, 3 times the least.
@triton.jit
def step_kernel(
    y_ptr, dy_ptr, dx_ptr, p_ptr, d_ptr, N, stride_y, stride_dy, stride_dx, STEP: tl.constexpr, BLOCK_N: tl.constexpr
):  # y, dy, dx, p (contiguous, fp32): [M, N]; d (fp32): [M]
    row = tl.program_id(0).to(tl.int64)
    d = tl.load(d_ptr + row) if STEP == "finish" else 0.0
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < N
        if STEP == "sum":
            # Padding lanes hold 0, which adds nothing to a sum.
            d += tl.sum(tl.load(p_ptr + row * N + cols, mask=mask, other=0.0), axis=0)
        else:
            y = tl.load(y_ptr + row * stride_y + cols, mask=mask).to(tl.float32)
            dy = tl.load(dy_ptr + row * stride_dy + cols, mask=mask).to(tl.float32)
            if STEP == "multiply":
                tl.store(p_ptr + row * N + cols, y * dy, mask=mask)
            else:
                tl.store(dx_ptr + row * stride_dx + cols, y * (dy - d), mask=mask)
    if STEP == "sum":
        tl.store(d_ptr + row, d)


def backward_unfused(y, dy):
    """y, dy [M, N] -> dx [M, N], three kernels with one program per row."""
    (dx, strides), (M, N) = _prepare(y, dy), y.shape
    if dx.numel():
        p, d = torch.empty(M, N, dtype=torch.float32, device=y.device), torch.empty(M, device=y.device)
        for step in ("multiply", "sum", "finish"):
            step_kernel[(M,)](y, dy, dx, p, d, N, *strides, step, BLOCK_N=1024)
    return dx


# Rung 2. New: one kernel, in which a program holds its row of y and of dy in registers. Two inputs take twice the
# registers of the forward. So a thread holds 8 elements of each, where in lesson 5 it holds 16 of x.
# Predicted: 3MN elements, in bf16 a third of rung 1's time.
@triton.jit
def backward_row_kernel(y_ptr, dy_ptr, dx_ptr, N, stride_y, stride_dy, stride_dx, BLOCK_N: tl.constexpr):  # [M, N] each
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    y = tl.load(y_ptr + row * stride_y + cols, mask=cols < N, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * stride_dy + cols, mask=cols < N, other=0.0).to(tl.float32)
    d = tl.sum(y * dy, axis=0)
    tl.store(dx_ptr + row * stride_dx + cols, y * (dy - d), mask=cols < N)


def backward_row(y, dy):
    """y, dy [M, N] -> dx [M, N], one program per row of at most 32,768 columns."""
    (dx, strides), (M, N) = _prepare(y, dy), y.shape
    if N > 32768:
        raise Unsupported("rows past 32,768 do not fit into registers: course_ops.softmax takes them")
    if dx.numel():
        block = triton.next_power_of_2(N)
        backward_row_kernel[(M,)](y, dy, dx, N, *strides, block, num_warps=max(1, min(32, block // 256)))
    return dx


def _prepare(y, dy):
    expect(y=y, dy=dy, ndim=2, same_shape=True, same_dtype=True, unit_stride=True)
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    return dx, (y.stride(0), dy.stride(0), dx.stride(0))


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.softmax(x, -1)  # course_ops.softmax has kernels for both directions
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        # The kernel takes rows whose columns are neighbours. The gradient of y.sum() is one element with strides of 0.
        return backward_row(y, dy if dy.stride(-1) == 1 else dy.contiguous())


def softmax(x):
    """Softmax over the last dimension of [M, N], with a gradient. Saves y alone for the backward."""
    return _Softmax.apply(x)


# The answers: dx is 0. If all of dy is g, then d = g, because y sums to 1: to raise all of x alike changes no softmax.
# Padding lanes hold 0 for d, which is a sum.
LESSON = Lesson(
    about=About(
        teaches="two inputs, one row sum: dx = y (dy - sum(dy y))",
        hours=0.5,
        star=True,
        operator="softmax backward",
        pictures=("traffic",),
    ),
    problem=PROBLEM_BACKWARD,
    rungs=(backward_unfused, backward_row),
    predicted=(
        Prediction(rung=backward_unfused, at={"M": 8192, "N": 8192}, percent_of_limit=33),
        Prediction(rung=backward_row, at={"M": 8192, "N": 8192}, times=3, over=backward_unfused),
    ),
    checks=(
        *PROBLEM_BACKWARD.checks,
        case("the longest row", M=1, N=32768),
        case("several blocks, the last one hanging over; bytes are counted here", M=9, N=1500),
    ),
    wrong=(
        Mutant("d left out", "backward_row_kernel", "(dy - d)", "dy", "backward_row"),
        Mutant("d of y alone", "backward_row_kernel", "y * dy, axis=0", "y, axis=0", "backward_row"),
        Mutant("only the last block's d", "step_kernel", "d +=", "d =", "backward_unfused"),
        Mutant("dy's stride for y", "backward_row_kernel", "row * stride_y", "row * stride_dy", "backward_row"),
        Mutant(
            "no mask",
            "backward_row_kernel",
            "cols, y * (dy - d), mask=cols < N",
            "cols, y * (dy - d)",
            "backward_row",
            "out of bounds",
        ),
    ),
    claims={backward_row: ("16-byte loads", "16-byte stores")},
    passes={backward_unfused: 3, backward_row: 1},
    grad=Grad(softmax, reference=PROBLEM.reference, inputs=logits),
)

if __name__ == "__main__":
    LESSON.main()
