"""Sum: all elements of a vector added up.

x [n], contiguous, floating-point -> [] in x's dtype; added in fp32 at least.
"""

import math

from lessonkit import DEVICE, Problem, Refusal, Work, by_inductor, case

import torch

from problems.cub import cub_sum


def reference(x):
    return x.sum()  # reads n, writes 1


def inputs(n, start=0, dtype=torch.float32):
    # Centred at 1, not 0: the sum grows with n, so that a 16-bit accumulator gets stuck and a lost block shows.
    # start: so many elements into an allocation.
    return ((torch.randn(start + n, device=DEVICE) + 1).to(dtype)[start:],)


def work(n, dtype, start=0):
    return Work(bytes=(n + 1) * dtype.itemsize, flops=n)


def strange_numbers(rung):
    """NaN and inf pass through, inf - inf is NaN, -0 sums to +0 (the accumulator starts at +0), nothing sums to 0."""
    for values in ([1.0, math.nan], [math.inf, 1.0], [-math.inf, 1.0], [math.inf, -math.inf], [-0.0], []):
        x = torch.tensor(values, device=DEVICE)
        got = rung(x)
        torch.testing.assert_close(got, reference(x), equal_nan=True)
        assert got.item() != 0 or not torch.signbit(got).item()


def nan_and_infinity(rung):
    """One NaN or infinity anywhere is the sum, opposite ones are NaN, and the neighbours do not count."""
    for n in (1, 257, 1021, 9001):
        for i in (0, n // 2, n - 1):
            for value in (math.nan, math.inf, -math.inf):
                (x,) = inputs(n)
                x[i] = value
                assert torch.equal(rung(x).isnan(), x.sum().isnan()), f"{value} at {i} of {n}"
                assert torch.equal(rung(x).isinf(), x.sum().isinf()), f"{value} at {i} of {n}"
    x = torch.ones(600, device=DEVICE)
    x[3], x[599] = math.inf, -math.inf
    assert rung(x).isnan()
    x[3] = x[599] = math.nan
    assert rung(x[4:599]) == 595, "read past what it was given"


def wherever_it_lies(rung):
    """A tensor that begins `start` floats past a multiple of 16 bytes has a head, a body and a tail, no more."""
    for start in range(4):
        for n in (0, 1, 2, 3, 4, 5, 11, 4099):
            x = torch.full((start + n + 1,), math.nan, device=DEVICE)
            x[start : start + n] = torch.arange(1, n + 1, device=DEVICE) % 7
            assert rung(x[start : start + n]) == (torch.arange(1, n + 1) % 7).sum(), f"start {start}, n {n}"


PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=work,
    checks=(
        case("nothing to add up: 0, and an empty grid is an error in CUDA", n=0),
        case("one element: no whole tile, no whole vector", n=1),
        case("three: a tail without a body", n=3),
        case("one warp and one lane more", n=33),
        case("one past a block of 256", n=257),
        case("a prime: no block divides it", n=1021),
        case("one past a block of 4096", n=4097),
        case("exactly one tile of 8192: its tail is empty", n=8192),
        case("one past it, and not where a vector of 16 bytes may be", n=8193, start=1),
        case("offsets past 2^31 (the sum overflows fp16, as PyTorch's does)", gib=40, n=2**31 + 1),
    ),
    benches=tuple({"n": n} for n in (2**20, 2**22, 2**24, 2**26, 2**28)),
    bench_dtype=torch.float32,
    peers={"torch": torch.sum, "torch.compile": by_inductor(lambda x: x.sum()), "CUB": cub_sum},
    properties=(strange_numbers, nan_and_infinity, wherever_it_lies),
    refuses=(
        Refusal("a matrix", lambda f: f(inputs(8)[0].view(2, 4)), ValueError, "expected 1"),
        Refusal("not a float", lambda f: f(torch.arange(8, device=DEVICE)), TypeError, "x is torch.int64"),
        Refusal("every second element", lambda f: f(inputs(8)[0][::2]), ValueError, "contiguous"),
        Refusal("gradient lost", lambda f: f(inputs(8)[0].requires_grad_()), ValueError, "requires grad"),
    ),
)
