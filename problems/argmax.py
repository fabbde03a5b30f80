"""Argmax along the rows of a matrix: the index of the first maximum.

x [M, N], floating-point -> [M] int64. The first of equals wins, NaN counts as the maximum and the first NaN wins, -0
equals +0.
"""

import math

from lessonkit import DEVICE, FLOATS, Problem, Refusal, Work, by_inductor, case

import torch


def reference(x):
    return x.argmax(-1)  # reads MN, writes M


def inputs(M, N, dtype=torch.float32):
    # Centred at -8, so that padding with 0 would win. Clamped, so that a sixth of a row is its maximum and the first
    # must be found. Every fourth row has its maximum in the last column alone, where a tail could be lost.
    x = (torch.randn(M, N, device=DEVICE) * 2 - 8).clamp(max=-6)
    x[::4, -1] = -1
    return (x.to(dtype),)


def torchs_rules(rung):
    """The first NaN wins, also over an earlier inf; the first of equals; -0 equals 0; a row of -inf has its first."""
    for n in (3, 5000):
        x = inputs(6, n)[0]
        x[0, n // 2 :] = math.nan
        x[0, 0] = math.inf
        x[1] = -math.inf
        x[2] = torch.zeros(n, device=DEVICE)
        x[2, 0] = -0.0
        x[3, 1:] = -torch.tensor(math.nan, device=DEVICE)  # a NaN with its sign set is a NaN too
        x[4] = math.inf
        for dtype in FLOATS:
            torch.testing.assert_close(rung(x.to(dtype)), reference(x.to(dtype)))


def rows_with_gaps(rung):
    """A slice of a wider matrix: the row stride is not N, and what lies between rows is not looked at."""
    wide = inputs(5, 700)[0]
    wide[:, 600:] = math.inf
    torch.testing.assert_close(rung(wide[:, 3:600]), reference(wide[:, 3:600]))


PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=lambda M, N, dtype: Work(bytes=M * N * dtype.itemsize + 8 * M, flops=M * N),
    checks=(
        case("no rows", M=0, N=5),
        case("one element", M=1, N=1),
        case("a prime width, rows that do not fill a program", M=7, N=127),
        case("steps that are all full", M=5, N=1024),
        case("nine rows, two a program: the last program has one", M=9, N=513),
        case("one past a step: the last column has a step of its own", M=4, N=2049),
        case("a long row: several steps, several splits, the last one short", M=3, N=10007),
        case("columns past 2^31", gib=60, M=1, N=2**31 + 1),
    ),
    benches=tuple(
        {"M": M, "N": N}
        for M, N in ((4096, 4096), (8192, 8192), (4096, 32768), (2048, 131072), (64, 1048576), (32768, 1024))
    ),
    peers={"torch": reference, "torch.compile": by_inductor(reference)},
    properties=(torchs_rules, rows_with_gaps),
    refuses=(
        Refusal("no columns", lambda f: f(torch.empty(3, 0, device=DEVICE)), ValueError, "no columns"),
        Refusal("a vector", lambda f: f(inputs(1, 8)[0][0]), ValueError, "expected 2"),
        Refusal("not a float", lambda f: f(inputs(1, 8)[0].long()), TypeError, "x is torch.int64"),
        Refusal("every second column", lambda f: f(inputs(2, 8)[0][:, ::2]), ValueError, "stride 2"),
    ),
)
