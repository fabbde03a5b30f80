"""Vector add: z = x + y, elementwise.

x, y [n], contiguous, of one floating-point dtype -> z [n] of that dtype.
"""

from lessonkit import DEVICE, Problem, Refusal, Work, by_inductor, case

import torch


def reference(x, y):
    return x + y  # reads 2n, writes n


def inputs(n, start=0, dtype=torch.float32):
    # Two different distributions, so that x + x or y + y is not x + y. start: so many elements into an allocation.
    x, y = torch.randn(start + n, device=DEVICE).to(dtype), (torch.randn(start + n, device=DEVICE) + 3).to(dtype)
    return x[start:], y[start:]


def work(n, dtype, start=0):
    return Work(bytes=3 * n * dtype.itemsize, flops=n)


PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=work,
    checks=(
        case("nothing to do: an empty grid is an error in CUDA", n=0),
        case("one element: most lanes of a block are masked, and there is no whole vector", n=1),
        case("three: a tail without a body", n=3),
        case("one past a block of 256", n=257),
        case("a prime: no block divides it", n=1021),
        case("exactly one block of 1024", n=1024),
        case("one past that block", n=1025),
        case("inputs that do not begin at a multiple of 16 bytes", n=1000, start=1),
        case("offsets past 2^31", gib=80, n=2**31 + 1),
    ),
    benches=tuple({"n": n} for n in (98432, 2**20, 2**22, 2**24, 2**26, 2**28)),
    peers={"torch": torch.add, "torch.compile": by_inductor(lambda x, y: x + y)},
    refuses=(
        Refusal("shapes differ", lambda f: f(*inputs(8)[:1], inputs(9)[1]), ValueError, "y has shape"),
        Refusal("dtypes differ", lambda f: f(inputs(8)[0], inputs(8)[1].half()), TypeError, "y is"),
        Refusal("not a float", lambda f: f(*(t.long() for t in inputs(8))), TypeError, "x is torch.int64"),
        Refusal("not a tensor", lambda f: f([1.0], inputs(1)[1]), TypeError, "x must be a torch.Tensor"),
        Refusal("every second element", lambda f: f(*(t[::2] for t in inputs(8))), ValueError, "contiguous"),
        Refusal("gradient lost", lambda f: f(inputs(8)[0].requires_grad_(), inputs(8)[1]), ValueError, "requires grad"),
    ),
)
