"""Transpose: x [M, N] in fp32, contiguous -> y [N, M], contiguous, bit by bit the same elements."""

from lessonkit import DEVICE, Problem, Refusal, Work, case

import torch


def reference(x):
    return x.T.contiguous()  # reads MN, writes MN


def inputs(M, N, start=0, dtype=torch.float32):
    # All different, so that an element in a wrong place is a wrong value. `start`: so many floats into an allocation.
    return (torch.randn(start + M * N, device=DEVICE)[start:].view(M, N),)


def bits_stay(rung):
    """Every bit pattern arrives as it was: NaN with its payload, -0, denormals, infinities."""
    bits = torch.randint(-(2**31), 2**31 - 1, (36, 68), device=DEVICE).int()
    assert torch.equal(rung(bits.view(torch.float32)).view(torch.int32), bits.T)


PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=lambda M, N, dtype, start=0: Work(bytes=2 * M * N * dtype.itemsize),
    checks=(
        case("no rows: an empty grid is an error in CUDA", M=0, N=5),
        case("one element", M=1, N=1),
        case("one row, longer than a tile", M=1, N=67),
        case("one column", M=67, N=1),
        case("nothing is a multiple of 4, M and N differ", M=37, N=101),
        case("multiples of 4, and tiles that hang over both edges", M=68, N=132),
        case("multiples of 4, where no float4 may be", M=36, N=40, start=1),
        case("more tiles down than 65535, the end of a grid's second dimension", gib=1, M=4 * 2**20 + 64, N=4),
        case("one less than tiles of 64 hold down, one more across", M=127, N=65),
        case("offsets past 2^31", gib=60, M=2**16 + 1, N=2**15),
        case("whole tiles, on which requests are counted", M=64, N=128),
    ),
    benches=(
        *({"M": n, "N": n} for n in (1024, 2048, 4096, 8192, 16384)),
        {"M": 8191, "N": 8193},
    ),
    peers={"torch": lambda x: x.T.contiguous()},
    properties=(bits_stay,),
    refuses=(
        Refusal("a vector", lambda f: f(inputs(2, 4)[0].view(-1)), ValueError, "x has 1 dimension"),
        Refusal("not float32", lambda f: f(inputs(2, 4)[0].half()), TypeError, "x is torch.float16"),
        Refusal("a view of another", lambda f: f(inputs(2, 4)[0].T), ValueError, "contiguous"),
        Refusal("gradient lost", lambda f: f(inputs(2, 4)[0].requires_grad_()), ValueError, "requires grad"),
    ),
    dtypes=(torch.float32,),
    bench_dtype=torch.float32,
)
