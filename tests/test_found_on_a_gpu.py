"""Cases of tests/fuzz/found.jsonl that only a GPU showed: what its kernels compute there, computed again on a CPU.

In all but one the kernel was right and the error budget was not. Each test computes the answer that the GPU gave, to
the bit, and holds that the budget allows it. A fault of the same size where no such rounding error can be is still
refused.
"""

from dataclasses import replace

from lessonkit.base.errors import Rejected
from lessonkit.judge import check, fuzz_cases
from lessonkit.measure import fuzz_runs

import pytest
import torch

from problems import fuzz as questions
from problems import matmul_fp8

pytestmark = pytest.mark.kept("tests/fuzz/*.jsonl", "problems/*.py", "course_ops/**/*.py")


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """Where there is a GPU too: the tensors, and the references that ask where they compute."""
    for module in (fuzz_cases, questions):
        monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    fuzz_cases._pool.cache_clear()
    yield
    fuzz_cases._pool.cache_clear()


def found(operator, nth=0, **options):
    """The call of the operator's nth case, with other options, and all that its reference is given."""
    cases = [
        f.case for f in fuzz_runs.found() if f.mode == "gpu" and f.case["operator"] == operator and "noise" in f.case
    ]
    return of_case(cases[nth] | {"options": cases[nth]["options"] | options})


def of_case(case):
    call = fuzz_cases.Call(case, "cpu")
    if not call.wanted:
        return call, call.args
    wanted, call.wanted = call.wanted, ()
    out = call.of(call.reference, call.args)
    call.wanted = wanted
    return call, (*call.args, *call.upstream(out))


def refused(truth, answer):
    with pytest.raises(Rejected, match="wrong"):
        check.compare(truth, answer)


def with_fault(answer, i, at, fault):
    spoilt = answer[i].clone()
    spoilt[at] += fault
    return (*answer[:i], spoilt, *answer[i + 1 :])


def one_by_one(a, b):
    """a @ b in fp32, a fused multiply-add after the other along K: float64 holds each product of fp32 exactly."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for k in range(a.shape[1]):
        total = (total + a[:, k : k + 1].double() * b[k : k + 1].double()).float().double()
    return total.float()


def test_the_gradient_of_a_softmax_is_that_of_the_rounded_result():
    call, given = found("softmax")
    x, dy = given
    y = torch.softmax(x.float(), -1).half()
    wide, dy32 = y.float(), dy.float()
    dx = (wide * (dy32 - (wide * dy32).sum(-1, keepdim=True))).half()
    assert dx[142, 6].item() == pytest.approx(-0.0386657715, rel=1e-9)  # on the H200; of the exact y -0.0367
    # PyTorch on a GPU rounds y dy to fp16; by chance that is nearer to the gradient of the exact y.
    products = (wide * dy32).half().float()
    theirs = (products - wide * products.sum(-1, keepdim=True)).half()
    truth = call.truth(given, (y, dx))
    truth = replace(truth, usual=(truth.usual[0], theirs))
    check.compare(truth, (y, dx))
    fault = dx[142, 6].item() + 0.0367107588
    calm = (truth.usual[1].double() - truth.exact[1]).abs().amax(-1).argmin()
    refused(truth, with_fault((y, dx), 1, (calm, 6), fault))


@pytest.mark.parametrize(("nth", "row", "on_the_h200"), [(0, 108, -26752), (2, 12, 15040)])
def test_fp8_tensor_cores_cut_the_sums(nth, row, on_the_h200):
    """The exact sums are -28613 and 15461."""
    _, (a, b, scale_a, scale_b) = found("matmul_fp8", nth)
    exact = matmul_fp8.reference(a.double(), b.double(), scale_a.double(), scale_b.double())
    answer = matmul_fp8.on_hopper(a, b, scale_a, scale_b)
    assert answer[row, 0] == on_the_h200
    truth = check.Truth((a, b, scale_a, scale_b), (exact,), (answer,), 1, lambda *args: (matmul_fp8.reference(*args),))
    check.compare(truth, (answer,))
    calm = ((answer.double() - exact).abs() + exact.abs()).argmin().item()
    refused(truth, with_fault((answer,), 0, (calm, 0), (answer.double() - exact)[row, 0]))


@pytest.mark.parametrize("scheme", ["tensor", "rows", "blocks"])
def test_the_model_of_the_tensor_core_adds_what_the_reference_adds(scheme):
    """Numbers of one sign and of like size: what is cut off is small."""
    torch.manual_seed(0)
    for M, N, K in ((5, 7, 0), (3, 24, 64), (9, 300, 400)):
        a, b, *scales = matmul_fp8.inputs(M, N, K, scheme)
        a, b = (t.view(torch.uint8).bitwise_and(127).view(torch.float8_e4m3fn) for t in (a, b.t()))
        expected = matmul_fp8.reference(a, b.t(), *scales)
        torch.testing.assert_close(matmul_fp8.on_hopper(a, b.t(), *scales), expected, rtol=0.02, atol=0)


def test_sums_that_come_down_from_larger_ones_keep_their_rounding():
    call, given = found("grouped_matmul")
    x, w, offsets = given[:3]
    y = torch.zeros(4, 16)
    y[2:3] = one_by_one(x[2:3], w[0])
    assert y[2, 12].item() == pytest.approx(-14.8326435, abs=1e-7)  # on the H200; exactly -14.8307507
    call.wanted = ()
    truth = call.truth((x, w, offsets))
    check.compare(truth, (y,))
    # The same terms in pairs that cancel: no partial sum is much larger than the result.
    order = torch.stack((torch.arange(204), 407 - torch.arange(204)), 1).flatten()
    paired = w[:, order]
    truth = call.truth((x, paired, offsets))
    y[2:3] = one_by_one(x[2:3], paired[0])
    check.compare(truth, (y,))
    refused(truth, with_fault((y,), 0, (2, 12), -14.8326435 + 14.8307507))


def test_the_gradient_of_attention_follows_from_its_own_result():
    """O is a sum of 440 equal terms, which round alike. delta = dO O inherits that, and dQ is exactly 0."""
    call, given = found("attention")
    _, k, v, dout = (t.detach() for t in given)
    o = (one_by_one(torch.ones(1, 440), v[0, 0]) / 440).expand(1, 3, 432, 128).contiguous()
    dp = torch.cat([one_by_one(dout[0, h], v[0, 0, :1].t()) for h in range(3)]).view(1, 3, 432, 1)
    ds = (dp - (dout * o).sum(-1, keepdim=True)) / 440
    scale = call.case["options"]["scale"]
    dq = (ds.double() * k[0, 0].double().sum(0)).float() * scale
    assert dq[0, 2, 7, 0].item() == pytest.approx(-0.000379178, rel=0.05)  # on the H200; exactly -1e-13
    dk = torch.zeros_like(k)
    truth = call.truth(given, (o, dq, dk))
    check.compare(truth, (o, dq, dk))
    # Not by a wider budget: the gradient that follows from this O is the one that was answered.
    of_another = call.truth(given, (v.mean(2, keepdim=True).expand_as(o), dq, dk))
    near, far = ((dq[0, 2, 7].double() - t.exact[1][0, 2, 7]).abs().max() for t in (truth, of_another))
    assert near < far / 4
    refused(truth, with_fault((o, dq, dk), 1, (0, 2, 7, 0), 0.005))


def test_the_heads_of_a_group_add_up_their_gradient_one_after_the_other():
    """All keys are 0, so all of P is 1 / 109: dV of a key is a sum of 12288 equal terms, of three heads."""
    cases = [f.case for f in fuzz_runs.found() if f.case["operator"] == "attention"]
    case = next(c for c in cases if c["tensors"]["q"]["shape"] == [1, 3, 4096, 16])
    k, v = (case["tensors"][name] | {"shape": [1, 1, 109, 16], "values": "zeros"} for name in "kv")
    call, given = of_case(case | {"tensors": {**case["tensors"], "k": k, "v": v}})
    o, dk, dv = call.truth(given).usual
    truth = call.truth(given, (o,))
    off = one_by_one(torch.full((1, 12288), 1 / 109), torch.ones(12288, 1)).item()
    assert 1 - off / (12288 / 109) == pytest.approx(1.76e-4, rel=0.01)
    truth = replace(truth, usual=(o, dk, truth.exact[2].float()))  # as a sum in a tree would be
    dv = torch.full_like(dv, off)
    check.compare(truth, (o, dk, dv))
    refused(replace(truth, continued=1), (o, dk, dv))  # more than the sum of one head may be off
    refused(truth, (o, dk, 1.001 * dv))


def test_a_gradient_where_pytorch_overflows_may_be_off_by_its_rounding():
    """All keys are 1: dQ is the sum of a row of dS, each rounded to fp16. PyTorch overflows at dS times the softcap."""
    call, given = found("attention", 1)
    q, k, v, dout = (t[0, 0].detach().double() for t in given)
    o = call.truth(given).usual[0]
    scale = call.case["options"]["scale"]
    p = torch.softmax(q @ k.t() * scale, -1)  # a softcap of 10000 changes nothing in it
    ds = (p * (dout @ v.t() - (dout * o[0, 0].double()).sum(-1, keepdim=True))).half().double()
    dq, dk = (t.half()[None, None] for t in (ds @ k * scale, ds.t() @ q * scale))
    assert dq[0, 0, 0, 2].item() == pytest.approx(-0.00801849)  # on the H200, from its own O, -0.00532531738
    truth = call.truth(given, (o, dq, dk))
    assert not truth.usual[1].isfinite().any()

    def judged(*answer):
        check.compare(fuzz_cases._forgiving(call.without_overflow(truth, answer), answer), answer)

    judged(o, dq, dk)
    tile = dk.clone()
    tile[:, :, :16] = 0
    for wrong in ((o, dq + 0.03, dk), (o, dq, 1.02 * dk), (o, dq, tile), (o, dq, dk + 0.1)):
        with pytest.raises(Rejected, match="wrong"):
            judged(*wrong)


def test_the_fp8_reference_is_the_tensor_core_on_hopper(monkeypatch):
    """Row 7 of a comes down from 64818 to 38, so that what is cut off is 3% of the sum."""
    call, given = found("matmul_fp8", 1)
    exact = matmul_fp8.reference(*(t.double() for t in given))
    answer = matmul_fp8.on_hopper(*given)
    assert exact[7, 26].item() == pytest.approx(-1825078.357, rel=1e-9)
    assert answer[7, 26] == -1769472  # as on the H200; in fp32 -1826816
    fp32 = call.truth(given)
    refused(fp32, (answer,))
    monkeypatch.setattr(questions, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(questions, "capability", lambda: 90)
    truth = call.truth(given)
    assert torch.equal(truth.usual[0], answer)
    check.compare(truth, (answer,))
    calm = ((answer.double() - exact).abs() + exact.abs()).amax(-1).argmin().item()
    refused(truth, with_fault((answer,), 0, (calm, 0), -1769472 + 1825078))


def test_an_infinity_where_pytorch_overflows_before_it_is_right():
    """The sum is 81919: inf in fp16, to which PyTorch adds the residual's -inf. In fp32 it is a number."""
    call, given = found("linear")
    x, w, bias, _ = (t.double() for t in given)
    assert torch.nn.functional.linear(x, w, bias)[8, 171].item() == pytest.approx(81918.7076)
    truth = call.truth(given)
    assert truth.exact[0][8, 171] == -torch.inf
    assert truth.usual[0][8, 171].isnan()

    def judged(value):
        answer = truth.usual[0].clone()
        answer[8, 171] = value
        check.compare(fuzz_cases._forgiving(truth, (answer,)), (answer,))

    judged(-torch.inf)
    for wrong in (torch.inf, 0.0, -65504.0):
        with pytest.raises(Rejected, match="wrong"):
            judged(wrong)


def test_a_gradient_that_is_rounded_before_the_upstream_is_not_exactly_zero():
    """All rows of weight are equal: dx is the sum of a row of the logits' gradient, each of them rounded to bf16."""
    call, given = found("linear_cross_entropy")
    x, w, targets = (t.detach() for t in given[:3])
    M, V = len(x), len(w)
    p = torch.softmax((x @ w.t()).float(), -1)
    dlogits = ((p - torch.nn.functional.one_hot(targets, V)) / M).bfloat16()
    dx = dlogits @ w * given[3]
    assert dx[0, 0].item() == pytest.approx(7.96318054e-05, rel=1e-6)  # on the H200; exactly 3e-17
    assert (dlogits.double().sum(-1) != 0).all()
    truth = call.truth(given)
    check.compare(truth, (truth.usual[0], dx, truth.usual[2]))
    refused(truth, with_fault((truth.usual[0], dx, truth.usual[2]), 1, (0, 0), 0.01))
    # In float64 it is the gradient of the plain loss.
    x, w = (t.double().requires_grad_() for t in (x, w))
    loss = torch.nn.functional.cross_entropy(x @ w.t(), targets)
    plain = torch.autograd.grad(loss, (x, w), given[3].double())
    for mine, theirs in zip(truth.exact[1:], plain, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-14, rtol=1e-10)


def test_the_gradient_of_an_fp32_weight_is_a_matmul_in_16_bits():
    """The logits' gradient of class 116 is -1 in all nine rows, and 9 x 4.125 lies between two numbers of bf16."""
    call, given = found("linear_cross_entropy", 1)
    x, w, targets = (t.detach() for t in given[:3])
    assert x.dtype == torch.bfloat16
    assert w.dtype == torch.float32
    assert (targets == 116).all()
    p = torch.softmax((x @ w.bfloat16().t()).float(), -1)[:, 116]
    dlogits = (p - 1).bfloat16()
    assert (dlogits == -1).all()
    sums = (dlogits.double()[:, None] * x.double()).sum(0)
    assert sums[0] == -37.125
    assert sums[0].bfloat16() == -37
    truth = call.truth(given)
    dw = truth.usual[2].clone()
    dw[116] = sums.bfloat16().float() * (given[3] / 9)
    assert dw[116, 0].item() == pytest.approx(0.00166878011, rel=1e-6)  # on the H200; exactly 0.00167439666
    answer = (*truth.usual[:2], dw)
    check.compare(truth, answer)
    # PyTorch rounds 1 / 9 up, the sum of nine down, and is right by luck.
    assert ((truth.usual[2][116] / truth.exact[2][116] - 1).abs() < 1e-4).all()
    off = 0.00166878011 - 0.00167439666
    refused(truth, with_fault(answer, 2, (116, 0), 2 * off))
    refused(truth, with_fault(answer, 2, (3, 0), off))  # of a class that no row has
    refused(truth, (*answer[:2], 0.99 * dw))
    # Of an x in fp32 nothing is rounded to 16 bits.
    tensors = call.case["tensors"]
    call, given = of_case(call.case | {"tensors": tensors | {"x": tensors["x"] | {"dtype": "float32"}}})
    truth = call.truth(given)
    refused(truth, with_fault(truth.usual, 2, (116, 0), off))


def test_a_gradient_of_equal_rows_may_be_off_by_the_rounding_of_its_terms():
    """All 14 rows of weight are equal, and so are their probabilities: dx is 14 rounded terms, which cancel."""
    call, given = found("linear_cross_entropy", 2)
    x, w, targets, upstream = (t.detach() for t in given)
    assert (w == w[0]).all()
    p = torch.softmax((x @ w.bfloat16().t()).float(), -1)
    assert (p[43] == p[43, 0]).all()
    counted = targets != 0
    dlogits = (p - torch.nn.functional.one_hot(targets, 14)).bfloat16() * counted[:, None]
    dx = ((dlogits.double() @ w.bfloat16().double()).bfloat16().float() * (upstream / counted.sum())).bfloat16()
    assert dx[43, 0].item() == pytest.approx(-3.93390656e-06, rel=1e-6)  # on the H200; exactly 0
    truth = call.truth(given)
    assert (truth.exact[1].abs() < 1e-18).all()
    truth = replace(truth, usual=(truth.usual[0], torch.zeros_like(dx), truth.usual[2]))  # PyTorch is right by luck
    answer = truth.usual[0], dx, truth.usual[2]
    check.compare(truth, answer)
    # Each of the 14 may be off by half of its last place. That is five times as much, and what a few samples of random
    # errors allow is sometimes less than dx.
    for times in (-4, 4):
        check.compare(truth, with_fault((answer[0], torch.zeros_like(dx), answer[2]), 1, (43, 0), times * dx[43, 0]))
    for times in (-7, 7):
        refused(truth, with_fault((answer[0], torch.zeros_like(dx), answer[2]), 1, (43, 0), times * dx[43, 0]))
    # A row that does not count has no gradient, and no class may be forgotten.
    ignored = int((~counted).nonzero()[0])
    refused(truth, with_fault(answer, 1, (ignored, 0), dx[43, 0]))
    a_class_less = dlogits.clone()
    a_class_less[:, -1] = 0
    refused(truth, (answer[0], (a_class_less @ w.bfloat16()) * (upstream / counted.sum()).bfloat16(), answer[2]))


def test_a_mean_in_fp32_moves_what_is_nearly_the_mean():
    """Half of the row adds up to 240,000, where fp32 values are 1/64 apart, and the other half takes that away."""
    call, given = found("layer_norm", 1)
    x, w = given
    at, N, wide = 108672, len(x), x.double()
    half = wide[: N // 2].sum().item()
    off = 8.83e-8  # of the H200's mean
    assert off < 6 * 2.0**-7 / N
    assert 2.0**17 < half < 2.0**18

    def normalised(wide, off):
        rstd = torch.rsqrt(wide.var(correction=0) + call.case["options"]["eps"])
        return ((wide - wide.mean() - off) * rstd * w.double()).bfloat16()

    y = normalised(wide, off)
    assert y[at].item() == pytest.approx(1.98371708e-07, rel=1e-8)  # on the H200; exactly 2.0375e-07
    check.compare(call.truth(given), (y,))
    refused(call.truth(given), with_fault((y,), 0, at, 1e-6))
    # Of values so small that eps outweighs their variance, a mean that is off by as many roundings changes less.
    small = x * 2.0**-20
    y = normalised(small.double(), 0.0)
    refused(call.truth((small, w)), with_fault((y,), 0, at, 2.0375e-07 - 1.98371708e-07))


def test_the_mean_of_equal_values_may_be_their_neighbour():
    """3 v is rounded, and a third of it is not v. The variance is 9e-16 then, beside an eps of 1e-12."""
    call, given = found("layer_norm", 2)
    x, w, _, dy = (t.detach() for t in given)
    mean = ((x[:, 0] + x[:, 2] + x[:, 1]) / 3)[:, None]
    assert (mean[1] - x[1, 0]).item() == -(2.0**-25)
    x_hat = (x - mean) * torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + 1e-12)
    rstd = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + 1e-12)
    g = dy * w
    dx = rstd * (g - x_hat * (g * x_hat).mean(-1, keepdim=True) - g.mean(-1, keepdim=True))
    assert dx[1, 0].item() == pytest.approx(1537384.75, rel=1e-6)  # on the H200; exactly 1536809.73
    truth = call.truth(given)
    y, _, dw, db = truth.usual
    check.compare(truth, (y, dx, dw, db))
    refused(truth, (y, 1.01 * dx, dw, db))
    call, given = found("layer_norm", 2, eps=1e-5)
    truth = call.truth(given)
    check.compare(truth, truth.usual)
    refused(truth, with_fault(truth.usual, 1, (1, 0), truth.usual[1][1, 0].item() * (1537384.75 / 1536809.73 - 1)))


def of_equal_values(call, given, off):
    """What a kernel answers in fp32 to a row of equal values, from a mean that is `off` of them."""
    tensors = {name: t.detach() for name, t in zip(call.names, given, strict=False)}
    x, w, bias, dy = tensors["x"], tensors["weight"], tensors.get("bias"), given[-1]
    centred = x - (x + off)
    rstd = torch.rsqrt(centred.square().mean() + call.case["options"]["eps"])
    x_hat, g = centred * rstd, dy * w
    y = x_hat * w if bias is None else x_hat * w + bias
    return (y, rstd * (g - x_hat * (g * x_hat).mean() - g.mean()), dy * x_hat, *(() if bias is None else (dy,)))


def of_exact_means(truth):
    """PyTorch's answers on the H200. On a CPU its mean of equal values is off, too."""
    return replace(truth, usual=tuple(e.to(u.dtype) for e, u in zip(truth.exact, truth.usual, strict=True)))


def test_a_mean_that_is_less_far_off_may_change_more():
    """In column 501 what the mean does to rstd and to the rest of dx cancels where it is six places off, not at one."""
    call, given = found("layer_norm", 3)
    place = 2.0**-23
    assert (given[0] == given[0][0]).all()
    assert 1 < given[0][0] < 2
    answer = of_equal_values(call, given, place)
    assert answer[1][501].item() == pytest.approx(25327.1973, rel=1e-6)  # on the H200; exactly 25261.1646
    truth = of_exact_means(call.truth(given))
    for off in range(-6, 7):  # ten roundings of 2^-24 of 1.2466 at most
        check.compare(truth, of_equal_values(call, given, off * place))
    for off in (-7, 7):
        refused(truth, of_equal_values(call, given, off * place))
    refused(truth, with_fault(answer, 1, 501, 500.0))
    # With another eps the mean's error is nothing beside it.
    call, given = found("layer_norm", 3, eps=1e-5)
    truth = of_exact_means(call.truth(given))
    answer = of_equal_values(call, given, place)
    check.compare(truth, answer)
    refused(truth, with_fault(answer, 1, 501, answer[1][501].item() * (25327.1973 / 25261.1646 - 1)))


def test_the_mean_that_changes_most_is_two_eps_off():
    """dy w is g everywhere: dx is 0, and with a mean that is d off -g d^2 / (d^2 + eps)^1.5, up to -0.385 g / 1e-6."""
    (case,) = (
        f.case for f in fuzz_runs.found() if f.mode == "interpreted" and f.case["tensors"]["x"]["shape"] == [2048]
    )
    call, given = of_case(case)
    place, g = 2.0**-21, given[1][0].item()
    assert 4 < given[0][0] < 8
    most = g * 2 / 3**1.5 / 1e-6
    truth = call.truth(given)
    for off in range(-6, 7):
        answer = of_equal_values(call, given, off * place)
        check.compare(truth, answer)
        assert answer[1].abs().max() <= most * (1 + 1e-6)
    worst = of_equal_values(call, given, 3 * place)
    assert worst[1][0].item() == pytest.approx(-232834.985, rel=1e-6)  # of the operator on a CPU
    assert truth.moved()[1].max() * 16 == pytest.approx(most, rel=0.01)
    for fault in (worst[1] * 1.02, worst[1] - most):
        refused(truth, (worst[0], fault, worst[2]))


def test_the_mean_of_two_million_values_moves_their_gradient():
    call, given = found("add_norm")
    tensors = dict(zip(call.names, given, strict=False))
    total = (tensors["x"] + tensors["residual"]).detach()[0].double()
    dy = given[len(call.names)][0].double()
    off = -3.093e-7  # of the H200's mean
    rstd = torch.rsqrt(total.var(correction=0) + call.case["options"]["eps"])
    dw = (dy * (total - total.mean() - off) * rstd).float()
    assert dw[70].item() == pytest.approx(-0.00110090559, rel=1e-8)  # on the H200; exactly -0.00110070808
    truth = call.truth(given)
    answer = (*truth.usual[:4], dw, truth.usual[5])
    check.compare(truth, answer)
    refused(truth, with_fault(answer, 4, dy.abs().argmin(), 2e-7))


def test_a_gradient_of_16_bits_is_rounded_before_its_matmul():
    """Column 4 of dx: 328 products of up to 300, of which 2.8 is left. fp16 rounds z and its gradient."""
    call, given = found("linear", 1)
    x, w, bias, _, dy = (t.detach().double() for t in given)
    z = (x @ w.t() + bias).half().double().requires_grad_()
    y = torch.nn.functional.gelu(z, approximate="tanh")
    dz = torch.autograd.grad(y, z, dy)[0].half().double()
    dx = (dz @ w).half()
    assert dx[0, 4, 4].item() == pytest.approx(2.27148438)  # on the H200; exactly 2.84341346
    truth = call.truth(given)
    answer = (truth.usual[0], dx, *truth.usual[2:])
    check.compare(truth, answer)
    # Column 2 of weight is nearly 0.
    refused(truth, with_fault(answer, 1, (0, 4, 2), 2.84341346 - 2.27148438))


def test_the_gradient_of_scores_is_rounded_before_its_matmul():
    """Ten keys near 4 for all features: dQ is what rounding to bf16 leaves of a sum of dS, which is nearly 0."""
    call, given = found("attention", 2)
    q, k, v, dout = (t.detach().double() for t in given)
    at, scale = (1, 1, 9), call.case["options"]["scale"]
    keys, values, upstream = k[1, 0, :10], v[1, 0, :10], dout[at]
    p = torch.softmax(keys @ q[at] * scale, -1)
    # delta = dO O follows from the O that the H200 rounded: of this one the exact gradient is known.
    delta = ((p * (values @ upstream)) @ keys[:, 0] * scale + 0.00555668397) / (p @ keys[:, 0] * scale)
    o = call.truth(given).exact[0].clone()
    o[at] += upstream * (delta - upstream @ o[at]) / upstream.square().sum()
    ds = (p * (values @ upstream - delta)).bfloat16().double()
    truth = call.truth(given, (o,))
    assert truth.exact[1][at][0].item() == pytest.approx(-0.00555668397, rel=1e-6)
    dq = truth.usual[1].clone()
    dq[at] = (ds @ keys * scale).bfloat16()
    assert dq[at][0].item() == pytest.approx(-0.0135498047)  # on the H200
    answer = (truth.usual[0], dq, truth.usual[2])
    check.compare(truth, answer)
    # Query 0 sees one key: its dS is 0.
    refused(truth, with_fault(answer, 1, (1, 1, 0, 0), -0.0135498047 + 0.00555668397))


def test_a_sum_of_scores_gradients_that_is_zero_may_be_off_by_their_rounding():
    """All scores are 0 and all keys 1: dQ is scale times a sum of 64 dS, which are rounded to bf16 and cancel."""
    call, given = found("attention_varlen")
    q, k, v, *_, dout = (t.detach() for t in given)
    rows, at, scale = slice(41, 105), (55, 2, 0), call.case["options"]["scale"]
    assert not q.any()
    assert (k == 1).all()
    assert (dout == 1).all()
    o = call.of(call.reference, given)[0]
    o[rows] = v[rows].float().mean(0).bfloat16()
    dp = (dout[rows].double() @ v[rows, 0].double().T).view(64, 3, 64)
    delta = (dout[rows].double() * o[rows].double()).sum(-1, keepdim=True)
    ds = (dp - delta) / 64

    def dq_from(ds):
        dq = truth.exact[1].bfloat16()
        dq[rows] = (ds.bfloat16().double() @ k[rows, 0].double() * scale).bfloat16()
        return dq

    truth = call.truth(given, (o,))
    assert truth.exact[1][at].item() == pytest.approx(4.78899228e-05, rel=1e-6)
    dq, dk = dq_from(ds), truth.usual[2]
    assert dq[at].item() == pytest.approx(-7.58171082e-05, rel=1e-8)  # on the H200
    # All rows are alike: in all of them PyTorch is right by luck.
    assert (ds == ds[0, 0]).all()
    truth = replace(truth, usual=(truth.usual[0], truth.exact[1].bfloat16(), dk))
    check.compare(truth, (o, dq, dk))
    # It is 1.1 standard deviations of such a sum off. Seven are allowed, and three occur once in 400 sums.
    off = dq[at].item() - truth.exact[1][at].item()
    places = 2.0 ** (ds[14, 2].abs().log2().floor() - 7)
    assert abs(off) / (scale * (places.square() / 12).sum().sqrt()) == pytest.approx(1.14, abs=0.01)
    for times in (-5, 5):
        check.compare(truth, with_fault((o, truth.usual[1], dk), 1, at, times * off))
    for times in (-7, 7):
        refused(truth, with_fault((o, truth.usual[1], dk), 1, at, times * off))
    refused(truth, with_fault((o, dq, dk), 1, (40, 2, 0), off))  # a sequence of one key: its dS is 0
    refused(truth, with_fault((o, dq, dk), 2, (60, 0, 5), off))  # all q are 0, and so is dK
    # No key, no block of them and no delta may be forgotten. Nor may one be 1% off.
    a_key_less, a_block_less = ds.clone(), ds.clone()
    a_key_less[..., -1] = 0
    a_block_less[..., 48:] = 0
    for fault in (a_key_less, a_block_less, dp / 64, (dp - 1.01 * delta) / 64, (1.01 * dp - delta) / 64):
        refused(truth, (o, dq_from(fault), dk))


def test_quantised_zeros_keep_their_sign():
    """A remainder of +0 times 1 / scale, added to q = -0, is +0. With x and 1 / scale negated q stays -0."""
    call, (x,) = found("quantize")
    truth = call.truth((x,))
    assert x[49, 137] == 0
    assert truth.usual[0][49, 137] == 128
    scale = truth.usual[1].float()

    def fma(a, b, c):  # float64 holds the product
        return (a.double() * b.double() + c.double()).float()

    def corrected(x, inverse, sign):
        q = x * inverse
        q = fma(fma(-sign * q, scale, x), inverse, q)
        return q.to(torch.float8_e4m3fn).view(torch.uint8)

    without = corrected(x.float(), 1 / scale, 1)
    assert (without != truth.usual[0]).nonzero().tolist() == [[49, 137]]  # on the H200
    refused(truth, (without, scale))
    check.compare(truth, (corrected(-x.float(), -1 / scale, -1), scale))


@pytest.mark.parametrize(("operator", "nth"), [("layer_norm", 0), ("layer_norm", 2), ("add_norm", 0)])
def test_with_a_mean_off_by_nothing_the_norm_is_the_reference(operator, nth):
    call, given = found(operator, nth, eps=1e-3)
    few = tuple(t[..., :64].detach().double() for t in given)
    off = {"layer_norm": questions.layer_norm_mean_off, "add_norm": questions.add_norm_mean_off}[operator](0)
    for mine, theirs in zip(call.of(off, few), call.of(call.reference, few), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
