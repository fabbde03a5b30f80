"""Softmax along the rows of a matrix, and its gradient.

Forward: x [M, N] -> y [M, N] = exp(x - m) / s with m = max(x), s = sum(exp(x - m)) of each row, in x's dtype.
Backward: y, dy [M, N] -> dx [M, N] = y * (dy - d) with d = sum(y * dy) of each row, in y's dtype.
"""

import math
from importlib import import_module

from lessonkit import DEVICE, Problem, Refusal, Work, by_inductor, case

import torch

SHAPES = ((2048, 131072), (4096, 32768), (4096, 12672), (8192, 8192), (4096, 4096), (32768, 1024), (32768, 256))


def reference(x):
    return torch.softmax(x, dim=-1)  # reads MN, writes MN


def inputs(M, N, pad=0, strange=False, dtype=torch.float32):
    # Centred at -5: a lane past the end that counts as 0 would win. Rows that lie at 1000 overflow without the maximum.
    # With `pad`, stride(0) is not N. With `strange`, the first half of some rows is -inf. That is not timed: quack
    # answers NaN there, and would be left out.
    x = torch.randn(M, N + pad, device=DEVICE) * 3 - 5
    x[1::3] += 1000
    if strange:
        x[2::3, : N // 2] = -math.inf
    return (x.to(dtype)[:, :N],)


def sums_and_shifts(rung, lengths=(67, 500, 781)):
    """Rows sum to one, and softmax(x + 64) = softmax(x); x is rounded so that adding 64 is exact."""
    for N in lengths:
        x = (torch.randn(3, N, device=DEVICE) * 64).round() / 16
        torch.testing.assert_close(rung(x).sum(-1), torch.ones(3, device=DEVICE), rtol=1e-5, atol=0)
        torch.testing.assert_close(rung(x + 64), rung(x), rtol=1e-6, atol=0)


def sums_and_shifts_past_64_kb(rung):
    """The same in rows that a rung may refuse."""
    sums_and_shifts(rung, (16500,))


def strange_numbers(rung, lengths=(40, 500)):
    """One NaN or +inf makes its row NaN, a row of -inf is 0 / 0 = NaN; the rows beside them do not notice."""
    for N in lengths:
        x = inputs(6, N, strange=True)[0]
        x[0, 7], x[2, N - 1], x[3], x[4, :-1] = math.nan, math.inf, -math.inf, -math.inf
        torch.testing.assert_close(rung(x), reference(x), rtol=2e-5, atol=1e-8, equal_nan=True)


def strange_numbers_past_64_kb(rung):
    """The same in rows that a rung may refuse."""
    strange_numbers(rung, (16500,))


PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=lambda M, N, dtype, pad=0, strange=False: Work(bytes=2 * M * N * dtype.itemsize, flops=5 * M * N),
    checks=(
        case("no rows: an empty grid is an error in CUDA", M=0, N=5),
        case("no columns: torch answers with an empty tensor", M=5, N=0),
        case("a row of one is 1; 17 rows leave most of a tile empty", M=17, N=1),
        case("a prime width and a row stride that is not N", M=7, N=127, pad=3),
        case("whole vectors of 16 bytes, lanes without one, half a row of -inf", M=5, N=120, strange=True),
        case("one past a block of 256, and threads whose maximum is -inf", M=3, N=257, strange=True),
        case("several turns of each thread, the last one ragged", M=3, N=781),
        case("row offsets past 2^31", gib=120, M=65537, N=32769),
    ),
    benches=tuple({"M": m, "N": n} for m, n in SHAPES),
    peers={
        "torch": reference,
        "torch.compile": by_inductor(reference),
        "liger": lambda x: import_module("liger_kernel.ops.softmax")._softmax_forward(x)[0],  # rows to 65,536
        "quack": lambda x: import_module("quack.softmax").softmax_fwd(x),
    },
    properties=(sums_and_shifts, sums_and_shifts_past_64_kb, strange_numbers, strange_numbers_past_64_kb),
    refuses=(
        Refusal("a transposed matrix", lambda f: f(inputs(8, 8)[0].t()), ValueError, "stride 8 in its last dimension"),
        Refusal("gradient lost", lambda f: f(inputs(2, 8)[0].requires_grad_()), ValueError, "requires grad"),
    ),
)


def reference_backward(y, dy):
    wide = torch.promote_types(y.dtype, torch.float32)  # rounded to 16 bits, y * dy would leave its error in dy - d
    y, dy, dtype = y.to(wide), dy.to(wide), y.dtype
    return (y * (dy - (y * dy).sum(-1, keepdim=True))).to(dtype)


def logits(M, N, pad=0, dtype=torch.float32):
    return (torch.randn(M, N + pad, device=DEVICE).to(dtype)[:, :N],)


def inputs_backward(M, N, pad=0, dtype=torch.float32):
    # dy is centred at 1, so leaving out d is loud; further off, peers that round y * dy to 16 bits would be refused.
    # Only y comes from a slice (pad): a stride taken for the other shows.
    dy = (torch.randn(M, N, device=DEVICE) + 1).to(dtype)
    return torch.softmax(logits(M, N + pad)[0], -1).to(dtype)[:, :N], dy


def sums(rung):
    """sum(dx) = d - d sum(y) = 0; the gradient of sum(y), always one, is zero; of twice the gradient, twice dx."""
    for N in (781, 16781):
        y, dy = inputs_backward(3, N)
        torch.testing.assert_close(rung(y, dy).sum(-1), torch.zeros(3, device=DEVICE), rtol=0, atol=1e-5)
        torch.testing.assert_close(rung(y, torch.full_like(dy, 7.0)), torch.zeros_like(y), rtol=0, atol=2e-6)
        torch.testing.assert_close(rung(y, 2 * dy), 2 * rung(y, dy), rtol=0, atol=0)


def strange_gradients(rung):
    """NaN or inf in dy makes its row what IEEE arithmetic makes of it: inf - inf is NaN, and so is 0 * inf."""
    for N in (40, 16781):
        y, dy = inputs_backward(4, N)
        y[3, 5], dy[0, 7], dy[1, N - 1], dy[3, 5] = 0.0, torch.nan, torch.inf, -torch.inf
        torch.testing.assert_close(rung(y, dy), reference_backward(y, dy), rtol=1e-4, atol=1e-8, equal_nan=True)


def _liger(y, dy):
    settings = import_module("liger_kernel.ops.utils").calculate_settings(y.shape[1])  # refuses rows past 65,536
    return import_module("liger_kernel.ops.softmax")._softmax_backward(dy, y, *settings, False)


def _with(change):
    """A call with these arguments after one change."""
    return lambda f: f(*change(*inputs_backward(8, 8)))


PROBLEM_BACKWARD = Problem(
    reference=reference_backward,
    inputs=inputs_backward,
    work=lambda M, N, dtype, pad=0: Work(bytes=3 * M * N * dtype.itemsize, flops=4 * M * N),
    checks=(
        case("nothing to do", M=0, N=5),
        case("y = 1: dx = dy - dy is exactly 0; 17 rows leave most of a tile empty", M=17, N=1),
        case("a prime width, and rows of y that lie further apart than those of dy", M=7, N=127, pad=3),
        case("row offsets past 2^31", gib=130, M=65537, N=32769),
    ),
    benches=tuple({"M": m, "N": n} for m, n in SHAPES),
    peers={
        "torch": lambda y, dy: torch._softmax_backward_data(dy, y, -1, y.dtype),
        "torch.compile": by_inductor(reference_backward),
        "liger": _liger,
        "quack": lambda y, dy: import_module("quack.softmax").softmax_bwd(dy, y),
    },
    properties=(sums, strange_gradients),
    refuses=(
        Refusal("shapes differ", _with(lambda y, dy: (y, dy[:, :7])), ValueError, "dy has shape"),
        Refusal("transposed", _with(lambda y, dy: (y.t(), dy.t())), ValueError, "in its last dimension"),
        Refusal("dtypes differ", _with(lambda y, dy: (y, dy.half())), TypeError, "dy is torch"),
    ),
)
