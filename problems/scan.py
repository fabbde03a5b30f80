"""Scan: prefix sums, y[i] = x[0] + ... + x[i].

x [n], contiguous -> y [n] in x's dtype; floating-point sums are kept in fp32 at least, int32 sums wrap around.
"""

import math

from lessonkit import DEVICE, Problem, Refusal, Work, by_inductor, case

import torch

from problems.cub import cub_scan, cub_scan_reversed


def reference(x):
    # Reads n, writes n. Summed in fp32 at least: PyTorch's CUDA scan of bf16 adds in bf16, too coarse to judge by.
    wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
    return x.cumsum(0, dtype=wide).to(x.dtype)


def inputs(n, start=0, dtype=torch.float32):
    # Drifts to about -1000, so that a lost block shows ever after; no further, for fp16 ends at -65504. Down, not up: a
    # negative sum has its top bit set, which must not reach the state beside it. Integers differ in sign, so that their
    # sums stay below 2^31. start: so many elements into an allocation.
    if dtype == torch.int32:
        return (torch.randint(-1000, 1000, (start + n,), device=DEVICE, dtype=dtype)[start:],)
    return ((torch.randn(start + n, device=DEVICE) / 4 - min(0.25, 1024 / max(n, 1))).to(dtype)[start:],)


def work(n, dtype, start=0):
    return Work(bytes=2 * n * dtype.itemsize, flops=n)


def strange_numbers(rung):
    """From the first NaN on all is NaN; after inf all is inf, until -inf makes it NaN; what came before is finite."""
    x = inputs(9000)[0]
    for i, value in ((8500, -math.inf), (4200, math.inf), (100, math.nan)):
        x[i] = value
        torch.testing.assert_close(rung(x), reference(x), equal_nan=True, rtol=1e-4, atol=1e-4)


# For the rungs that take int32, and for those that add in an order that depends on n alone.
def wraps_around(rung):
    """int32 sums past 2^31 wrap, as torch.cumsum's do."""
    x = torch.full((9000,), 2_000_000_011, dtype=torch.int32, device=DEVICE)
    assert torch.equal(rung(x), torch.cumsum(x.long(), 0).to(torch.int32))


def same_bits(rung):
    """The order of the additions does not depend on which program comes first: the same bits in every run."""
    (x,) = inputs(9000)
    assert torch.equal(rung(x), rung(x))


PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=work,
    checks=(
        case("nothing to do: an empty grid is an error in CUDA", n=0),
        case("one element, no predecessor", n=1),
        case("one more than a warp", n=33),
        case("a prime: no block divides it", n=1021),
        case("one past a block of 1024: the first sum that is passed on", n=1025),
        case("one past a tile of 4096", n=4097),
        case("one past a tile of 8192", n=8193),
        case("a vector that does not begin at a multiple of 16 bytes", n=4100, start=1),
    ),
    benches=tuple({"n": n} for n in (98432, 2**20, 2**22, 2**24, 2**26, 2**28)),
    bench_dtype=torch.float32,
    peers={"torch": lambda x: x.cumsum(0), "torch.compile": by_inductor(lambda x: x.cumsum(0)), "CUB": cub_scan},
    properties=(strange_numbers,),
    refuses=(
        Refusal("a matrix", lambda f: f(inputs(8)[0].view(2, 4)), ValueError, "expected 1"),
        Refusal("64-bit integers", lambda f: f(torch.arange(8, device=DEVICE)), TypeError, "x is torch.int64"),
        Refusal("not a tensor", lambda f: f([1.0]), TypeError, "x must be a torch.Tensor"),
        Refusal("every second element", lambda f: f(inputs(8)[0][::2]), ValueError, "contiguous"),
        Refusal("gradient lost", lambda f: f(inputs(8)[0].requires_grad_()), ValueError, "requires grad"),
    ),
)


def reference_backward(dy):
    """dx[i] = dy[i] + ... + dy[n - 1]: a scan from the other end."""
    return reference(dy.flip(0)).flip(0)


# Asked of course_ops alone; its tests hold the small cases.
PROBLEM_BACKWARD = Problem(
    reference=reference_backward,
    inputs=inputs,
    work=work,
    bench_dtype=torch.float32,
    peers={
        "torch": reference_backward,
        "torch.compile": by_inductor(reference_backward),
        "CUB": cub_scan_reversed,
    },
)
