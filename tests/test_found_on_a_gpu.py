"""Cases of tests/fuzz/found.jsonl that only a GPU showed: what its kernels compute there, computed again on a CPU.

In each the kernel was right and the error budget was not. Each test computes the answer that the GPU gave, to the bit,
and holds that the budget allows it. A fault of the same size where no such rounding error can be is still refused.
"""

from dataclasses import replace

from lessonkit.base.errors import Rejected
from lessonkit.judge import check, fuzz
from lessonkit.measure import fuzzing

import pytest
import torch

from problems import matmul_fp8

pytestmark = pytest.mark.kept("tests/fuzz/*.jsonl", "problems/*.py")


def found(operator):
    """The call of the operator's case, and all that its reference is given."""
    cases = [
        f.case for f in fuzzing.found() if f.mode == "gpu" and f.case["operator"] == operator and "noise" in f.case
    ]
    call = fuzz.Call(cases[0], "cpu")
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


def test_fp8_tensor_cores_cut_the_sums():
    _, (a, b, scale_a, scale_b) = found("matmul_fp8")
    exact = matmul_fp8.reference(a.double(), b.double(), scale_a.double(), scale_b.double())
    answer = matmul_fp8.on_hopper(a, b, scale_a, scale_b)
    assert answer[108, 0] == -26752  # on the H200; in fp32 -28672
    truth = check.Truth((a, b, scale_a, scale_b), (exact,), (answer,), 1, lambda *args: (matmul_fp8.reference(*args),))
    check.compare(truth, (answer,))
    calm = ((answer.double() - exact).abs() + exact.abs()).argmin().item()
    refused(truth, with_fault((answer,), 0, (calm, 0), (answer.double() - exact)[108, 0]))


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
    refused(truth, with_fault((o, dq, dk), 1, (0, 2, 7, 0), 0.00379178))
