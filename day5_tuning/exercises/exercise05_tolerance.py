"""A tolerance that you can derive: accept every right order, refuse every wrong kernel
====================================================================================
A rounding to a format has a relative rms error of C eps, C = 1 / sqrt(32 ln 2) = 0.212 (lesson02_numerics). A kernel
sums K products of normal numbers, so its results have the size sqrt(K). All errors here are relative to that size: an
error of e is an absolute error of e sqrt(K). Independent errors a and b add to sqrt(a^2 + b^2).

    one by one      after k of K terms the sum has the size sqrt(k), and each step rounds it once
    in blocks       sums of `block` terms one by one in one format, then the K / block sums one by one in another
    the result      is rounded again, to the format in which it is stored

Predict the error. Choose after how many terms a narrow accumulator must be added to a wider one, as fp8 kernels on
Hopper do every 128 terms. Derive the tolerance of a test. eps: 2^-23 in fp32, 2^-10 in fp16, 2^-7 in bf16.
"""

import math

C = 1 / math.sqrt(32 * math.log(2))


def one_by_one(K: int, eps: float) -> float:
    """The error of a sum of K terms, added one by one in a format of this eps."""
    # TODO(1): add K variances, that of step k is (C eps)^2 k; then divide by the size of the result.
    # stub: return None
    return C * eps * math.sqrt(K / 2)
    # END(1)


def in_blocks(K: int, block: int, eps_inside: float, eps_outside: float) -> float:
    """The error of a sum of K terms in blocks; `block` divides K."""
    # TODO(2): K / block sums of `block` terms each, and one sum of K / block terms that have the size sqrt(block).
    # stub: return None
    return math.hypot(one_by_one(block, eps_inside), one_by_one(K // block, eps_outside))
    # END(2)


def longest_block(K: int, eps_inside: float, eps_outside: float, allowed: float) -> int:
    """The longest block, a power of 2 up to K, with at most the error that is allowed; 0 if there is none."""
    # TODO(3): the narrow format's part grows with the block, the wide one's shrinks.
    # stub: return 0
    blocks = [2**i for i in range(K.bit_length()) if K % 2**i == 0]
    return max((b for b in blocks if in_blocks(K, b, eps_inside, eps_outside) <= allowed), default=0)
    # END(3)


def tolerance(K: int, eps_sum: float, eps_stored: float) -> float:
    """The largest absolute difference that a test of 4096 results may accept; results are stored in eps_stored.

    Right is every order of additions in a format of eps_sum; the worst is one by one. The largest of 4096 errors is 4
    times the typical one. A sum with large partial sums has up to 3 times the typical error. So 12 times.
    """
    # TODO(4): the sum's error and the last rounding together, as an absolute number.
    # stub: return 1e-2
    return 12 * math.hypot(one_by_one(K, eps_sum), C * eps_stored) * math.sqrt(K)
    # END(4)


# The learner's file ends here.
from lessonkit.exercise import Exercise, Wrong, number

import torch

EPS = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}
ROWS = 4096


def _terms(K, rows=ROWS):
    """[K, rows] products, in fp32, and their exact sums."""
    products = torch.randn(K, rows) * torch.randn(K, rows)
    return products, products.double().sum(0)


def _summed(products, dtype):
    total = torch.zeros(products.shape[1], dtype=dtype)
    for term in products:
        total = (total.float() + term.float()).to(dtype) if dtype != torch.float32 else total + term
    return total


def _blocked(products, block, inside, outside):
    sums = _summed(products.unflatten(0, (-1, block)).transpose(0, 1).flatten(1), inside)
    return _summed(sums.float().view(-1, products.shape[1]), outside)


def _rms(error, K):
    return error.double().square().mean().sqrt().item() / math.sqrt(K)


def _measured(what, predicted, measured):
    """The model neglects the rounding of each product, and the jumps of eps between binades."""
    assert isinstance(predicted, int | float), f"{what}: write a number, got {predicted!r}"
    assert 0.7 < predicted / measured < 1.3, f"{what}: you predict {predicted:.2e}, measured {measured:.2e}"


def sums_one_by_one():
    """Measured, in three formats: the error grows like the root of K."""
    for dtype, K in ((torch.float32, 64), (torch.float32, 512), (torch.float16, 128), (torch.bfloat16, 128)):
        products, exact = _terms(K)
        _measured(f"{K} terms in {dtype}", one_by_one(K, EPS[dtype]), _rms(_summed(products, dtype) - exact, K))


def sums_in_blocks():
    """Measured: a narrow accumulator that is added to a wider one often, and fp32 in blocks."""
    for K, block, inside in ((512, 16, torch.bfloat16), (512, 64, torch.float16), (1024, 32, torch.float32)):
        products, exact = _terms(K)
        error = _rms(_blocked(products, block, inside, torch.float32) - exact, K)
        predicted = in_blocks(K, block, EPS[inside], EPS[torch.float32])
        _measured(f"{K} terms in blocks of {block}, {inside} inside", predicted, error)
    products, exact = _terms(512)
    error = _rms(_blocked(products, 4, torch.float32, torch.float16) - exact, 512)
    _measured("512 terms in blocks of 4, torch.float16 outside", in_blocks(512, 4, 2**-23, 2**-10), error)


def how_long_a_block():
    """The first block that is too long is refused; if no block is short enough, the answer is 0."""
    for K, inside, outside, allowed in (
        (4096, 2**-10, 2**-23, 2e-3), (4096, 2**-13, 2**-23, 2e-4), (4096, 2**-7, 2**-23, 2e-3),
        (512, 2**-23, 2**-23, 1), (4096, 2**-10, 2**-10, 1e-3), (1536, 2**-13, 2**-23, 1e-2),
    ):  # fmt: skip
        exact = 0
        for i in range(13):
            error = C * math.hypot(inside * math.sqrt(2**i / 2), outside * math.sqrt(K / 2**i / 2))
            exact = 2**i if K % 2**i == 0 and error <= allowed else exact
        what = f"K = {K}, eps {inside:.1e} inside, {outside:.1e} outside, {allowed:g} allowed"
        number(what, longest_block(K, inside, outside, allowed), exact, 0)


def _off(got, exact):
    return (got.double() - exact).abs().max().item()


def accepts_what_is_right():
    """fp32 sums in the worst order, in pairs, and by PyTorch, stored in fp32, fp16 or bf16."""
    for K in (256, 1024):
        products, exact = _terms(K)
        right = {
            "one by one": _summed(products, torch.float32),
            "in blocks of 8": _blocked(products, 8, torch.float32, torch.float32),
            "by torch": products.sum(0),
        }
        for stored in EPS:
            limit = tolerance(K, 2**-23, EPS[stored])
            assert isinstance(limit, int | float), f"write a number, got {limit!r}"
            for order, got in right.items():
                off = _off(got.to(stored), exact)
                what = f"K = {K}, fp32 sums {order}, stored in {stored}"
                assert off <= limit, f"{what}: right, off by {off:.2e}, refused by your tolerance of {limit:.2e}"


def refuses_what_is_wrong():
    """Narrow accumulators, inputs truncated to TF32, a missing product, a result stored in too narrow a format."""
    for K in (128, 1024):
        products, exact = _terms(K)
        a, b = torch.randn(K, ROWS), torch.randn(K, ROWS)
        cut = [(t.view(torch.int32) & -(2**13)).view(torch.float32) for t in (a, b)]
        forgotten = products.clone()
        forgotten[-1] = 0
        wrong = {
            "fp16 accumulators": (_summed(products, torch.float16), exact, torch.float32),
            "fp16 accumulators, stored in fp16": (_summed(products, torch.float16), exact, torch.float16),
            "bf16 accumulators": (_summed(products, torch.bfloat16), exact, torch.bfloat16),
            "the last product forgotten": (forgotten.sum(0), exact, torch.float32),
            "the last product forgotten, stored in bf16": (forgotten.sum(0).bfloat16(), exact, torch.bfloat16),
            "inputs cut to TF32": ((cut[0] * cut[1]).sum(0), (a.double() * b.double()).sum(0), torch.float32),
            "stored in fp16 on the way": (products.sum(0).half(), exact, torch.float32),
            "zeros": (torch.zeros(ROWS), exact, torch.bfloat16),
        }
        for what, (got, truth, stored) in wrong.items():
            off, limit = _off(got, truth), tolerance(K, 2**-23, EPS[stored])
            assert off > limit, f"K = {K}, {what}: off by {off:.2e}, accepted by your tolerance of {limit:.2e}"


EXERCISE = Exercise(
    claims=(sums_one_by_one, sums_in_blocks, how_long_a_block, accepts_what_is_right, refuses_what_is_wrong),
    hints=(
        "Add variances, not errors. Step k rounds a number of the size sqrt(k) once, and the result has the size "
        "sqrt(K). The terms of the outer sum are sqrt(block) large, and so is everything in it. So relative to the "
        "result it is a sum of K / block terms like any other.",
        "The sum of k for k up to K is about K^2 / 2: over K that is K / 2. Blocks: each has a relative error of its "
        "own, and independent ones keep it relative to the whole. An absolute error is the relative one times sqrt(K).",
        "C * eps * sqrt(K / 2). math.hypot(one_by_one(block, eps_inside), one_by_one(K // block, eps_outside)). max of "
        "the powers of 2 that divide K and keep in_blocks <= allowed. 12 * math.hypot(one_by_one(K, eps_sum), C * "
        "eps_stored) * math.sqrt(K).",
    ),
    wrong=(
        Wrong("every step is taken to round a sum of full size", "math.sqrt(K / 2)", "math.sqrt(K)", "sums_one_by_one"),
        Wrong("errors are added, not variances: it grows like K", "C * eps * math.sqrt(K / 2)", "C * eps * K / 2",
              "sums_one_by_one"),
        Wrong("half a unit in the last place instead of its rms", "return C * eps * math", "return 0.5 * eps * math",
              "sums_one_by_one"),
        Wrong("what happens inside the blocks is left out", "hypot(one_by_one(block, eps_inside), ", "hypot(0, ",
              "sums_in_blocks"),
        Wrong("the outer sum is taken for one of K terms", "one_by_one(K // block, eps_outside)",
              "one_by_one(K, eps_outside)", "sums_in_blocks"),
        Wrong("the two formats are exchanged", "one_by_one(block, eps_inside), one_by_one(K // block, eps_outside)",
              "one_by_one(block, eps_outside), one_by_one(K // block, eps_inside)", "sums_in_blocks"),
        Wrong("the shortest block instead of the longest", "return max((b for b", "return min((b for b",
              "how_long_a_block"),
        Wrong("the tolerance forgets how large results are", " * math.sqrt(K)\n    # END(4)", "\n    # END(4)",
              "accepts_what_is_right"),
        Wrong("the last rounding is forgotten", "math.hypot(one_by_one(K, eps_sum), C * eps_stored)",
              "one_by_one(K, eps_sum)", "accepts_what_is_right"),
        Wrong("as if the sum ran in the format of the result", "one_by_one(K, eps_sum)", "one_by_one(K, eps_stored)",
              "refuses_what_is_wrong"),
        Wrong("300 times the error, to be safe: narrow accumulators are safe too", "return 12 * math.hypot",
              "return 300 * math.hypot", "refuses_what_is_wrong"),
        Wrong("what everybody writes", "return 12 * math.hypot(one_by_one(K, eps_sum), C * eps_stored) * math.sqrt(K)",
              "return 1e-2", "accepts_what_is_right"),
    ),
)  # fmt: skip
