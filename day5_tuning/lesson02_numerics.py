"""Numerics: the rounding error of a correct kernel, and the tolerance that follows from it
========================================================================================
Rounding a number once moves it by up to half a unit in its last place, and the variance of that error is a twelfth of a
unit squared. Let the mantissa m be spread evenly over the logarithm. Then the mean of 1/m^2 is 3 / (8 ln 2), and the
relative rms error of one rounding is

    C * eps = eps / sqrt(32 ln 2) = 0.212 eps           (eps is 2^-23, 2^-10, 2^-7, 2^-3 in fp32, tf32, bf16, e4m3)

Everything else follows by adding variances. A sum of K random products has the size sqrt(K). Its error relative to that
size:

    what is rounded                           relative error               K = 4096, eps = 2^-23
    both inputs, once                         sqrt(2) C eps                3.6e-8, whatever K is
    the output, once                          C eps                        2.5e-8, whatever K is
    a sum one by one                          C eps sqrt(K / 2)            1.1e-6
    a sum of sums of B, B = 64                C eps sqrt(K / 2B)           1.4e-7
    a sum in pairs, pairs of pairs ...        C eps sqrt(log2 K)           8.8e-8
    terms of one sign, cut off, not rounded   eps K / (8 ln 2)             8.8e-5: a bias grows like K, not its root

You will learn: which rounding decides in fp32, tf32, bf16 and fp8, and what the order of a sum changes. Also where
lessonkit's factors of 2 and 16 come from, and why a fixed tolerance refuses right kernels and accepts wrong ones.
Source: Higham, "Accuracy and Stability of Numerical Algorithms", 2002, chapters 2 and 4; the constant is derived here.
Run it:    python3 course.py run lesson02_numerics
"""

import math
from fractions import Fraction
from functools import cache

from lessonkit import DEVICE, About, Steps, Table, check, specimen
from lessonkit.base.device import HAS_GPU

import torch
import triton
import triton.language as tl

MATMUL = specimen("day3_matmul_tk.lesson01_matmul", "LESSON")
pipelined = specimen("day3_matmul_tk.lesson01_matmul", "pipelined")
C = 1 / math.sqrt(32 * math.log(2))
EPS = {"fp32": 2**-23, "tf32": 2**-10, "fp16": 2**-10, "bf16": 2**-7, "e4m3": 2**-3, "e5m2": 2**-2}
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn,
         "e5m2": torch.float8_e5m2}  # fmt: skip
ROWS = 1024  # sums to take an rms over: known to 1 / sqrt(2 * 1024), 2%


def _rounded(x, kind):
    """x in float64, rounded to a format. tf32 keeps 10 bits of fp32's 23: nearest, as cvt.rna.tf32 does."""
    if kind == "tf32":
        return ((x.float().view(torch.int32) + 2**12) & -(2**13)).view(torch.float32).double()
    return x.to(TORCH[kind]).double()


def _rms(x):
    return x.double().square().mean().sqrt().item()


def _products(K):
    """a, b [ROWS, K] in float64, normal, representable in fp32: the terms of a sum then have no error of their own."""
    torch.manual_seed(K)
    return (torch.randn(ROWS, K, device=DEVICE).double() for _ in range(2))


def fp64_is_the_truth():
    """An exact sum in fractions says how good fp64 is: 2^29 times better than fp32, whatever K; so it is our truth."""
    a, b = (t[:8].tolist() for t in _products(1024))
    exact = [sum(Fraction(x) * Fraction(y) for x, y in zip(*pair, strict=True)) for pair in zip(a, b, strict=True)]
    got = (torch.tensor(a, dtype=torch.float64) * torch.tensor(b, dtype=torch.float64)).sum(1).tolist()
    error = max(abs(float(Fraction(sum_) - want)) for sum_, want in zip(got, exact, strict=True)) / 32
    assert error < 1e-6 * C * EPS["fp32"] * math.sqrt(512)  # a millionth of what is measured below


def one_rounding():
    """Rounding once costs 0.212 eps in every format: fp8 keeps 3 bits and is 2.7% off, bf16 0.17%, tf32 0.02%."""
    x, table = next(_products(256)), []
    for kind, eps in EPS.items():
        # Numbers under 2^-6 (e4m3) have even fewer bits. Scaled, as in fp8's use, few numbers are that small.
        scaled = x * 64 if kind == "e4m3" else x
        source = (scaled * math.pi) if kind == "fp32" else scaled  # fp32 numbers have nothing left to round to fp32
        measured = _rms(_rounded(source, kind) - source) / _rms(source)
        table.append(_row({"format": kind, "eps": f"2^{round(math.log2(eps))}"}, C * eps, measured))
    return Table("one rounding", table, "Relative, rms; predicted: eps / sqrt(32 ln 2).")


def _row(about, predicted, measured, within=0.15):
    """A line of a table of errors; the prediction must hold."""
    assert abs(measured / predicted - 1) < within, (about, predicted, measured)
    return about | {"predicted": f"{predicted:.2e}", "measured": f"{measured:.2e}",
                    "measured / predicted": f"{measured / predicted:.2f}"}  # fmt: skip


# A sum of K products for each row, in blocks: tl.sum chooses the order inside a block, the loop that of the blocks.
@triton.jit
def row_dot_kernel(a_ptr, b_ptr, y_ptr, K, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):
    # a, b: [rows, K] in fp32, y: [rows] in fp32. A program owns ROWS rows.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], ACC)
    for start in range(0, K, BLOCK):
        at = rows[:, None] * K + start + tl.arange(0, BLOCK)[None, :]
        total += tl.sum(tl.load(a_ptr + at) * tl.load(b_ptr + at), axis=1).to(ACC)
    tl.store(y_ptr + rows, total.to(tl.float32))


def _row_dot(a, b, block, acc=tl.float32):
    y = torch.empty(ROWS, device=DEVICE)
    rows = ROWS if DEVICE.type == "cpu" else 64  # interpreted, one program: its cost is the loop
    row_dot_kernel[(ROWS // rows,)](a.float().contiguous(), b.float().contiguous(), y, a.shape[1], rows, block, acc)
    return y


@cache
def _one_by_one(K):
    return _row_dot(*_products(K), 1)


def order_of_additions():
    """Added one by one, the error grows like sqrt(K); in sums of 64, as a tile's loop adds, it is 8 times smaller."""
    table = []
    for K in (256, 1024, 4096):
        a, b = _products(K)
        exact = (a * b).sum(1)
        for name, block, steps in (("one by one", 1, K), ("sums of 64", 64, K / 64)):
            got = _one_by_one(K) if block == 1 else _row_dot(a, b, block)
            measured = _rms(got.double() - exact) / math.sqrt(K)
            # Two more errors: each product is rounded once, and a block's own sum is taken here as in pairs.
            inner = 1 + (math.log2(block) if block > 1 else 0)
            table.append(_row({"order": name, "K": K}, C * EPS["fp32"] * math.sqrt(steps / 2 + inner), measured, 0.3))
    return Table("order of additions", table, "fp32, of sqrt(K).", x="K", y="measured", by="order")


def narrow_accumulators():
    """A 16-bit accumulator has its own eps in the formula: at K = 256 bf16 is off by 2% of a typical sum, fp16 by 0.2%.

    That is why tl.dot accumulates in fp32 whatever it multiplies.
    """
    a, b = _products(256)
    exact, table = (a * b).sum(1), []
    for kind, acc in (("fp16", tl.float16), ("bf16", tl.bfloat16)):
        measured = _rms(_row_dot(a, b, 1, acc).double() - exact) / 16
        # Each product is rounded too, before it is added: K roundings of size 1 beside K of size sqrt(k).
        table.append(_row({"accumulator": kind, "K": 256}, C * EPS[kind] * math.sqrt(128 + 1), measured, 0.25))
    return Table("narrow accumulators", table, "One by one, of sqrt(K).")


def cutting_off_is_a_bias():
    """Sums of one sign that are truncated, not rounded, lose eps K / (8 ln 2): a bias grows like K.

    Tensor cores align the products of a step and truncate them. For fp8, Hopper keeps about 14 bits (day 3,
    lesson06_matmul_fp8), so every few steps the partial sums must be added to fp32 sums in registers.
    """
    table = []
    for K in (256, 1024, 4096):
        terms = torch.rand(256, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).float().double()
        cut = nearest = torch.zeros(256, dtype=torch.float64)
        for k in range(K):
            # float64 holds the sum of two fp32 numbers here exactly; fp32 keeps 29 bits less.
            cut = ((cut + terms[:, k]).view(torch.int64) & -(2**29)).view(torch.float64)
            nearest = (nearest + terms[:, k]).float().double()
        exact = terms.sum(1)
        bias = ((exact - cut) / exact).mean().item()
        table.append(_row({"sum": "cut off", "K": K}, EPS["fp32"] * K / (8 * math.log(2)), bias, 0.25))
        off = _rms((exact - nearest) / exact)
        table.append(_row({"sum": "nearest", "K": K}, C * EPS["fp32"] * math.sqrt(K / 3), off, 0.4))
    return Table("cut off or rounded", table, "Numbers from 0 to 1, fp32, relative.", x="K", y="measured", by="sum")


def formats_of_the_inputs():
    """Rounded inputs cost sqrt(2) C eps of the result, the same for every K: tf32 0.03%, bf16 0.23%, fp8 3.8%.

    So where TF32 is the default for fp32 matmuls, the error is hundreds to thousands of times that of fp32.
    """
    table = []
    for K in (256, 4096):
        a, b = _products(K)
        exact = (a * b).sum(1)
        for kind in ("tf32", "fp16", "bf16", "e4m3"):
            scale = 64 if kind == "e4m3" else 1
            got = (_rounded(a * scale, kind) * _rounded(b * scale, kind)).sum(1) / scale**2
            table.append(_row({"inputs": kind, "K": K}, math.sqrt(2) * C * EPS[kind], _rms(got - exact) / math.sqrt(K)))
    return Table("rounded inputs", table, "The rest in fp64; of sqrt(K), the size of the result.")


def whole_products():
    """A matmul of rounded inputs is off by its last rounding alone, if it adds in fp32: C eps of bf16, whatever K is.

    The exact answer is computed from the rounded inputs, as in lessonkit's checks. So the error is the kernel's, not
    the format's.
    """
    table, kinds = [], [("fp16", "highest"), ("bf16", "highest")]
    kinds += [("fp32", "high")] if HAS_GPU else []  # TF32 is a GPU's
    for K in (256, 1024, 4096):
        for kind, precision in kinds:
            torch.manual_seed(0)
            a, b = (torch.randn(*shape, device=DEVICE).to(TORCH[kind]) for shape in ((128, K), (K, 128)))
            torch.set_float32_matmul_precision(precision)
            got = {"torch": a @ b}
            if HAS_GPU:
                got["Triton"] = pipelined(a, b)
            torch.set_float32_matmul_precision("highest")
            exact = a.double() @ b.double()
            tf32 = kind == "fp32"
            # TF32 rounds its inputs, or truncates them. Truncated, each is off by eps / (4 ln 2) in one direction, 2.4
            # times as much.
            predicted = math.sqrt(2) * C * EPS["tf32"] if tf32 else C * EPS[kind]
            for who, c in got.items():
                off = _rms(c.double() - exact) / math.sqrt(K)
                about = {"product": f"{who}, {'tf32' if tf32 else kind}", "K": K}
                table.append(_row(about, predicted, off, 2 if tf32 else 0.15))
    return Table("whole products", table, "[128, K] by [K, 128], of sqrt(K).", x="K", y="measured", by="product")


def why_the_budget_is_2_and_16():
    """lessonkit allows PyTorch's own error in this row, times 2 in 16 bits and times 16 in fp32; the reasons."""
    K, rows = 4096, []
    # 16 bits: the last rounding dominates, and all kernels make the same one. The error of fp32 sums, in any order, is
    # far below it, that of a 16-bit accumulator far above. The factor 2 lies between and allows for chance.
    last, one_by_one = C * EPS["bf16"], C * EPS["fp32"] * math.sqrt(K / 2)
    narrow = C * EPS["bf16"] * math.sqrt(K / 2)
    assert last + one_by_one < check.FACTOR[torch.bfloat16] * last < narrow
    rows.append({"dtype": "bf16", "right, worst order": 1 + one_by_one / last, "factor": 2, "wrong": narrow / last})
    # fp32: the orders differ. Between the best and one by one lies a factor of sqrt(K / 2 / log2 K): 13 at K = 4096, 16
    # at K = 6500.
    best = C * EPS["fp32"] * math.sqrt(math.log2(K))
    inputs_cut = math.sqrt(2) * C * EPS["tf32"]
    assert one_by_one / best < check.FACTOR[torch.float32] < inputs_cut / best
    rows.append({"dtype": "fp32", "right, worst order": one_by_one / best, "factor": 16, "wrong": inputs_cut / best})
    rows = [{key: f"{v:.3g}" if isinstance(v, float) else v for key, v in row.items()} for row in rows]
    return Table("the budget", rows, "Over the least error at K = 4096. Wrong: a 16-bit accumulator; TF32 for fp32.")


def a_fixed_tolerance_refuses_right_kernels():
    """assert_close's defaults in fp32 (1.3e-6 relative, 1e-5 absolute) refuse many right sums of 4096 products.

    A sum near zero has nearly the same absolute error as any other, so its relative error has no bound. The allowed
    error of a sum follows from its terms, not from its value.
    """
    K = 4096
    a, b = _products(K)
    exact, got = (a * b).sum(1), _one_by_one(K).double()
    refused = ((got - exact).abs() > 1e-5 + 1.3e-6 * exact.abs()).double().mean().item()
    # The partial sums are a random walk, and each step adds an error of C eps of the partial sum.
    walk = torch.randn(20_000, 64, dtype=torch.float64).cumsum(1) * math.sqrt(K / 64)
    sigma = C * EPS["fp32"] * math.sqrt(K) * walk.square().mean(1).sqrt()
    predicted = (torch.randn_like(sigma) * sigma).abs() > 1e-5 + 1.3e-6 * walk[:, -1].abs()
    predicted = predicted.double().mean().item()
    print(f"  {refused:.0%} of {ROWS} right sums refused; predicted {predicted:.0%}")
    assert refused > 0.15
    assert abs(refused - predicted) < 0.08
    question = check.truth(MATMUL, {"M": 16, "N": 16, "K": 1024}, torch.float32)
    x, y = question.args
    one_by_one = torch.zeros_like(question.usual[0])
    for k in range(1024):
        one_by_one += x[:, k, None] * y[None, k]
    check.compare(question, one_by_one)  # the budget takes the worst right order


LESSON = Steps(
    about=About(
        teaches="one constant predicts the error of every format and order of addition; why the course's budget "
        "is 2 and 16",
        hours=1,
        star=True,
    ),
    steps=(
        fp64_is_the_truth,
        one_rounding,
        order_of_additions,
        narrow_accumulators,
        cutting_off_is_a_bias,
        formats_of_the_inputs,
        whole_products,
        why_the_budget_is_2_and_16,
        a_fixed_tolerance_refuses_right_kernels,
    ),
    nightly=(order_of_additions,),
)

if __name__ == "__main__":
    LESSON.main()
