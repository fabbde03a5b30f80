"""Quantisation to fp8: x [M, K] -> q [M, K] in e4m3, seen as uint8, and an fp32 scale for each group, max |x| / 448.

The scheme says what a group is: tensor (all of x), rows, blocks (1 x 128), squares (128 x 128).
"""

import math

from lessonkit import DEVICE, FLOATS, Problem, Refusal, Work, by_inductor, case

import torch
import torch.nn.functional as F
import triton

FP8 = torch.float8_e4m3fn


def reference(x, scheme):
    """q as its bytes, [M, K] uint8, and the scales. Reads x for the maxima, and again to divide by them."""
    (M, K), (rows, cols) = x.shape, group_shape(x, scheme)
    m, k = group_counts(x, scheme)
    wide = F.pad(x.to(torch.promote_types(x.dtype, torch.float32)), (0, k * cols - K, 0, m * rows - M))
    wide = wide.view(m, rows, k, cols)
    most = wide.abs().amax((1, 3))
    scale = most / torch.full_like(most, 448)  # a tensor: PyTorch's GPU code divides by a number as * (1 / number)
    scale = torch.where(scale == 0, 1.0, scale)  # of a group of zeros, or of numbers below 3.2e-43
    q = (wide / scale[:, None, :, None]).clamp(-448, 448).to(FP8)  # e4m3 has no infinity: past 464 it would be NaN
    return q.view(m * rows, k * cols)[:M, :K].contiguous().view(torch.uint8), scale


def group_shape(x, scheme):
    sizes = {"tensor": x.shape, "rows": (1, x.shape[1]), "blocks": (1, 128), "squares": (128, 128)}
    if scheme not in sizes:
        raise ValueError(f"scheme is {scheme!r}, expected one of {', '.join(sizes)}")
    return tuple(max(1, n) for n in sizes[scheme])


def group_counts(x, scheme):
    """How many groups there are down and across."""
    return tuple(
        triton.cdiv(n, g) if n or g == 128 or scheme == "rows" else 1
        for n, g in zip(x.shape, group_shape(x, scheme), strict=True)
    )


def inputs(M, K, scheme="blocks", dtype=torch.float32, pad=0):
    # Magnitudes from 2^-12 to 2^12 in neighbouring blocks: a neighbour's maximum is far off. And a row of zeros.
    x = torch.randn(M, K + pad, device=DEVICE)
    x *= torch.exp2(torch.arange(M, device=DEVICE) * 5 % 13 - 6.0)[:, None]
    x *= torch.exp2(torch.arange(K + pad, device=DEVICE) // 64 * 7 % 13 - 6.0)
    x[1:2] = 0
    return x.to(dtype)[:, :K], scheme


def _work(M, K, dtype, scheme="blocks", pad=0):
    scales = math.prod(group_counts(torch.empty(M, K, device="meta"), scheme))
    return Work(bytes=M * K * (dtype.itemsize + 1) + 4 * scales, flops=3 * M * K)


def little_is_lost(rung):
    """Off by 1/16 of itself or half of e4m3's smallest step at most; and the fewer in a group, the fewer zeros."""
    x, _ = inputs(256, 256, dtype=torch.bfloat16)
    zeros = []
    for scheme in ("tensor", "rows", "blocks"):
        (q, scale), (rows, cols) = rung(x, scheme), group_shape(x, scheme)
        scale = scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[:256, :256].double()
        q = q.view(FP8)
        error = (q.double() * scale - x.double()).abs()
        assert (error <= (x.double().abs() / 16).maximum(scale * 2**-10) * 1.0001).all()
        zeros.append(int((q.float() == 0).sum()))
    assert zeros[0] > zeros[1] > zeros[2]


def strange_numbers(rung):
    """A NaN makes its group NaN; in a group with an infinity the others are 0 and the infinity NaN: as in PyTorch.

    A group of numbers below 3.2e-43 has a scale of 1: their quotient by 448 is 0.
    """
    x, scheme = inputs(4, 300)
    x[1] = 1e-44
    x[0, 5], x[2, 200], x[3, 299] = math.nan, math.inf, -math.inf
    (q, scale), (q2, scale2) = rung(x, scheme), reference(x, scheme)
    torch.testing.assert_close(scale, scale2, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(q.view(FP8).float(), q2.view(FP8).float(), rtol=0, atol=0, equal_nan=True)


# fmt: off
REFUSES = (
    Refusal("no such scheme", lambda f: f(inputs(2, 8)[0], "columns"), ValueError, "expected one of"),
    Refusal("every second column", lambda f: f(inputs(2, 8)[0][:, ::2], "rows"), ValueError, "stride 2"),
    Refusal("integers", lambda f: f(torch.ones(2, 8, dtype=torch.int32, device=DEVICE), "rows"), TypeError, "x is"),
    Refusal("gradient lost", lambda f: f(inputs(2, 8)[0].requires_grad_(), "rows"), ValueError, "grad"),
)
# fmt: on

PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=_work,
    checks=(
        case("no rows", M=0, K=5),
        case("rows of nothing", M=3, K=0, scheme="rows"),
        case("one number", M=1, K=1, scheme="tensor"),
        case("a prime: the last group is cut", M=37, K=131),
        case("squares cut on both sides", M=130, K=259, scheme="squares"),
        case("rows 3 numbers apart; a row in many parts", M=5, K=1021, scheme="rows", pad=3),
        case("all programs contribute to one maximum", M=70, K=300, scheme="tensor"),
        case("a row longer than a tile", M=2, K=16400, scheme="rows"),
        case("past element 2^31", gib=60, M=2**18 + 1, K=2**13 + 1),
        case("the bytes are counted here", M=64, K=512),
    ),
    benches=tuple({"M": 8192, "K": 8192, "scheme": s} for s in ("tensor", "rows", "blocks", "squares")),
    peers={"torch": reference, "torch.compile": by_inductor(reference)},
    properties=(little_is_lost, strange_numbers),
    refuses=REFUSES,
    dtypes=FLOATS,
)
