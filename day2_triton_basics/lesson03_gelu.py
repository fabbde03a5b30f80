"""GELU: a chain of small kernels becomes one
==========================================
gelu(x) = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) reads n elements and writes n.

    eager PyTorch    8 kernels, one per operator: 10 tensors are read, 8 are written    18n elements
    one kernel       x is read, y is written, all values between stay in registers       2n elements

Predicted gain of fusing: 9 times. On an H200, at 4.2 TB/s, n = 2^26 in bf16 (268 MB read and written) takes at least
0.064 ms.

This is PyTorch's approximate="tanh" (Hendrycks and Gimpel 2016, section 2), as GPT-2 and Gemma use it. It costs one
exponential per element. The exact form, x * Phi(x), needs erf, and differs by less than 0.0005.

New words (GLOSSARY.md): fusion.
You will be able to: count what fusion saves, write tanh without overflow, and write a first backward.
You need: lesson 1 (programs, masks). Rung 3 is advanced: skip it at the first reading.
Run it:    python3 course.py run lesson03_gelu
Check it:  python3 course.py check lesson03_gelu
Time it:   python3 course.py bench lesson03_gelu

Answer before you read on. How many tensors does x + 0.044715 * x**3 read and write in eager PyTorch? At which u does
(exp(2u) - 1) / (exp(2u) + 1) become NaN in fp32?
"""

import math

from lessonkit import About, Grad, Lesson, Mutant, Prediction, expect, stepwise

import torch
import triton
import triton.language as tl

from problems.gelu import PROBLEM

CUBIC = tl.constexpr(0.044715)
SLOPE = tl.constexpr(math.sqrt(2 / math.pi))


# Rung 1. What eager PyTorch runs for the formula as written: one kernel per operator. Each is a vector add with another
# operator in the middle. OPERATOR is a constexpr, so Triton compiles one kernel for each of its values. Between two
# kernels the whole tensor is written to memory and read back.
@triton.jit
def operator_kernel(a_ptr, b_ptr, out_ptr, n, c, OPERATOR: tl.constexpr, BLOCK: tl.constexpr):  # [n] each, c: a number
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    a = tl.load(a_ptr + offsets, mask=mask).to(tl.float32)
    if OPERATOR == "cube":
        out = a * a * a
    elif OPERATOR == "scale":
        out = a * c
    elif OPERATOR == "shift":
        out = a + c
    elif OPERATOR == "tanh":
        out = tanh(a)
    else:
        b = tl.load(b_ptr + offsets, mask=mask).to(tl.float32)
        out = a + b if OPERATOR == "add" else a * b
    tl.store(out_ptr + offsets, out, mask=mask)


@triton.jit
def tanh(u):
    # Not (e - 1) / (e + 1): past u = 44 the exponential is inf in fp32, and inf / inf is NaN.
    return 1 - 2 / (1 + tl.exp(2 * u))


@stepwise
def gelu_eager(x):
    """[...] -> [...], one kernel per operator: 10 tensors read, 8 written."""
    cube = _operator("cube", x)
    inner = _operator("add", x, _operator("scale", cube, c=CUBIC.value))
    bent = _operator("tanh", _operator("scale", inner, c=SLOPE.value))
    return _operator("scale", _operator("mul", x, _operator("shift", bent, c=1.0)), c=0.5)


def _operator(name, a, b=None, c=0.0):
    out = _prepare(a)
    if out.numel():
        operator_kernel[(triton.cdiv(a.numel(), 1024),)](a, a if b is None else b, out, a.numel(), c, name, BLOCK=1024)
    return out


# Rung 2. New: all eight operators between one load and one store, in registers. A kernel may call another @triton.jit
# function, as this one calls tanh: the compiler inlines it.
# Predicted: 2n elements in place of 18n, 9 times as fast. The error is smaller too: nothing is rounded to 16 bits
# between the operators.
@triton.jit
def gelu_fused_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # [n] each
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    y = 0.5 * x * (1 + tanh((x + x * x * x * CUBIC) * SLOPE))
    tl.store(y_ptr + offsets, y, mask=mask)


def gelu_fused(x):
    """[...] -> [...], one kernel, 1024 elements per program."""
    y = _prepare(x)
    if y.numel():
        gelu_fused_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y


# Rung 3, advanced. New: fewer instructions. (1 + tanh(u)) / 2 is the logistic function of 2u:
#
#     gelu(x) = x / (1 + exp(-2u)) = x / (1 + exp2(-2u log2(e)))        exp2 is the exponential that the hardware has
#
# and the constants fold into two. In sm_90's machine code 21 instructions per element become 12.
# Predicted: a few percent, to a copy's speed. At 4.2 TB/s and about 1.7 GHz each of the 132 SMs has to finish 4.7
# elements of bf16 per cycle (2 bytes in, 2 bytes out). An SM issues 4 warp instructions per cycle, one for each of 128
# threads. That leaves 27 instructions per element: 21 are close to it, 12 are not.
LINEAR = tl.constexpr(-2 * SLOPE.value * math.log2(math.e))
LINEAR_CUBIC = tl.constexpr(LINEAR.value * CUBIC.value)


@triton.jit
def gelu_lean_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # [n] each
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    # No overflow: for x far below 0, exp2 is inf and x / inf is -0. For x far above 0, exp2 is 0 and x / 1 is x.
    y = x / (1 + tl.exp2(x * (x * x * LINEAR_CUBIC + LINEAR)))
    tl.store(y_ptr + offsets, y, mask=mask)


def gelu_lean(x):
    """[...] -> [...], one kernel, 1024 elements per program, 12 instructions per element, not 21."""
    y = _prepare(x)
    if y.numel():
        gelu_lean_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y


# The backward computes s = logistic(2u) again from x. Only x is saved, and 3n elements are moved, not 4n. By the
# product rule, and because ds/dt = s (1 - s) for s = logistic(t):
#
#     y = x s,    dy/dx = s + x s (1 - s) d(2u)/dx
@triton.jit
def gelu_backward_kernel(x_ptr, dy_ptr, dx_ptr, n, BLOCK: tl.constexpr):  # [n] each
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    dy = tl.load(dy_ptr + offsets, mask=mask).to(tl.float32)
    s = 1 / (1 + tl.exp2(x * (x * x * LINEAR_CUBIC + LINEAR)))
    slope = (x * x * (3 * CUBIC) + 1) * (2 * SLOPE)
    tl.store(dx_ptr + offsets, dy * (s + x * s * (1 - s) * slope), mask=mask)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return gelu_lean(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        if x.numel():
            gelu_backward_kernel[(triton.cdiv(x.numel(), 1024),)](x, dy.contiguous(), dx, x.numel(), BLOCK=1024)
        return dx


def gelu(x):
    """GELU (tanh form) of a contiguous tensor, with a gradient. Saves x alone for the backward."""
    return _Gelu.apply(x)


def _prepare(x):
    expect(x=x, contiguous=True)
    return torch.empty_like(x)


LARGE = {"n": 2**28}

# The answers: it reads 4 tensors and writes 3, in three kernels (cube, scale, add). From u = 44.4 on exp(2u) is inf
# in fp32, and inf / inf is NaN.
LESSON = Lesson(
    about=About(
        teaches="fusing a chain of operators; tanh without overflow; a first backward",
        hours=0.75,
        star=True,
        operator="GELU",
        pictures=("traffic",),
    ),
    problem=PROBLEM,
    rungs=(gelu_eager, gelu_fused, gelu_lean),
    predicted=(
        Prediction(rung=gelu_fused, at=LARGE, times=9, over=gelu_eager),
        Prediction(rung=gelu_lean, at=LARGE, percent_of_limit=100),
    ),
    wrong=(
        Mutant(
            "tanh by a quotient that overflows",
            "tanh",
            "1 - 2 / (1 + tl.exp(2 * u))",
            "(tl.exp(2 * u) - 1) / (tl.exp(2 * u) + 1)",
            "gelu_fused",
            "nan",
        ),
        Mutant("the 2 of exp(2u) forgotten", "tanh", "tl.exp(2 * u)", "tl.exp(u)", "gelu_eager"),
        Mutant("a digit lost in the constant", "gelu_fused_kernel", "CUBIC", "0.04715", "gelu_fused"),
        Mutant("exp2 fed as if it were exp", "gelu_lean_kernel", "+ LINEAR)", "- 2 * SLOPE)", "gelu_lean"),
        Mutant(
            "mask lets one lane too many through",
            "gelu_lean_kernel",
            "offsets < n",
            "offsets <= n",
            "gelu_lean",
            "out of bounds",
        ),
        Mutant(
            "grid rounded down",
            "gelu_lean",
            "triton.cdiv(x.numel(), 1024)",
            "max(1, x.numel() // 1024)",
            "gelu_lean",
            "nan",
        ),
    ),
    claims={gelu_lean: ("16-byte loads", "16-byte stores", "no spills", "no shared memory")},
    passes={gelu_eager: 9.0, gelu_fused: 1.0, gelu_lean: 1.0},
    grad=Grad(gelu),
)

if __name__ == "__main__":
    LESSON.main()
