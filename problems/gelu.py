"""GELU in its tanh form: gelu(x) = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))).

x [n], contiguous, floating-point -> y [n] in x's dtype. PyTorch's approximate="tanh" (Hendrycks and Gimpel 2016).
"""

import math

from lessonkit import DEVICE, Problem, Refusal, Work, by_inductor, case

import torch


def reference(x):
    return torch.nn.functional.gelu(x, approximate="tanh")  # reads n, writes n


def inputs(n, dtype=torch.float32):
    # 3 * randn puts most elements where the curve bends. Every 17th is 30 times larger: exp(2u) overflows there, and
    # a tanh that divides inf by inf returns NaN.
    x = torch.randn(n, device=DEVICE) * 3
    x[::17] *= 30
    return (x.to(dtype),)


def strange_numbers(rung):
    """NaN stays, inf stays, -inf is 0 * -inf = NaN as in PyTorch, and so far out that x^3 overflows gelu is x or -0."""
    x = torch.tensor([math.nan, math.inf, -math.inf, 1e20, -1e20, 3e4, -3e4, 0.0], device=DEVICE)
    torch.testing.assert_close(rung(x), reference(x), rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(rung(x.half()), reference(x.half()), rtol=1e-6, atol=0, equal_nan=True)


PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=lambda n, dtype: Work(bytes=2 * n * dtype.itemsize, flops=10 * n),
    checks=(
        case("nothing to do", n=0),
        case("one element, the rest of the block masked", n=1),
        case("a prime: no block divides it", n=1021),
        case("one past a block", n=1025),
        case("offsets past 2^31", gib=120, n=2**31 + 1),
    ),
    benches=tuple({"n": n} for n in (2**20, 2**22, 2**24, 2**26, 2**28)),
    peers={"torch": reference, "torch.compile": by_inductor(reference)},
    properties=(strange_numbers,),
    refuses=(
        Refusal("not a float", lambda f: f(torch.arange(8, device=DEVICE)), TypeError, "x is torch.int64"),
        Refusal("every second element", lambda f: f(inputs(8)[0][::2]), ValueError, "contiguous"),
        Refusal("gradient lost", lambda f: f(inputs(8)[0].requires_grad_()), ValueError, "requires grad"),
    ),
)


def reference_backward(dy, x):
    return torch.ops.aten.gelu_backward(dy, x, approximate="tanh")  # reads 2n, writes n


def inputs_backward(n, dtype=torch.float32):
    (x,) = inputs(n, dtype)
    return torch.randn(n, device=DEVICE).add(0.5).to(dtype), x


# Asked of course_ops alone; its tests hold the small cases.
PROBLEM_BACKWARD = Problem(
    reference=reference_backward,
    inputs=inputs_backward,
    work=lambda n, dtype: Work(bytes=3 * n * dtype.itemsize, flops=20 * n),
    peers={"torch": reference_backward, "torch.compile": by_inductor(reference_backward)},
)
