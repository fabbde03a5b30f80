"""course_ops.linear_cross_entropy: its loss and gradients are those of a linear and F.cross_entropy, in any parts."""

from contextlib import nullcontext
from importlib import import_module

from lessonkit import DEVICE

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import course_ops
from course_ops.testing import kernels

pytestmark = pytest.mark.kept
op = torch.ops.course_ops.linear_cross_entropy.default
both = pytest.mark.parametrize("mode", [nullcontext, kernels], ids=["by PyTorch on a CPU", "by kernels"])


def inputs(dtype=torch.float32, stream=None):
    """x [2, 3, 37], weight [131, 37], targets [2, 3], one of them ignored."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 37, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(131, 37, device=DEVICE).to(stream or dtype).requires_grad_()
    return x, weight, torch.tensor([[0, 130, -100], [7, 7, 9]], device=DEVICE)


def usual(x, weight, targets, ignore_index=-100):
    logits = x.flatten(0, 1).double() @ weight.double().t()
    return F.cross_entropy(logits, targets.flatten(), ignore_index=ignore_index)


@both
@pytest.mark.parametrize("rows", [1, 2, 6])
@pytest.mark.parametrize(
    ("dtype", "stream"), [(torch.float32, None), (torch.bfloat16, torch.float32), (torch.float16, None)]
)
def test_loss_and_gradients(mode, rows, dtype, stream, monkeypatch):
    monkeypatch.setattr(import_module("course_ops.linear_cross_entropy"), "_parts", lambda *given: -(-6 // rows))
    x, weight, targets = inputs(dtype, stream)
    with mode():
        loss = course_ops.linear_cross_entropy(x, weight, targets)
        found = torch.autograd.grad(3 * loss, (x, weight))
    assert loss.dtype == torch.float32
    assert [t.dtype for t in found] == [x.dtype, weight.dtype]
    expected = usual(x, weight, targets)
    rtol, atol = (2e-4, 2e-6) if dtype == torch.float32 else (2e-2, 2e-2)
    torch.testing.assert_close(loss.double(), expected, rtol=rtol, atol=atol)
    for ours, exact in zip(found, torch.autograd.grad(3 * expected, (x, weight)), strict=True):
        torch.testing.assert_close(ours, exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("M", "V", "K", "dtype", "gradients", "parts"),
    [
        (8192, 128256, 4096, torch.bfloat16, True, 1),  # logits of 2.1 GB; dW in float32 has as many bytes
        (8193, 128256, 4096, torch.bfloat16, True, 2),
        (8192, 128256, 4096, torch.float32, True, 2),
        (8192, 128256, 4096, torch.bfloat16, False, 2),
        (32768, 50257, 768, torch.bfloat16, True, 4),
        (0, 131, 8, torch.float32, True, 1),
    ],
)
def test_how_many_parts_the_rows_are_made_into(M, V, K, dtype, gradients, parts):
    x, weight = (torch.empty(n, K, dtype=dtype, device="meta") for n in (M, V))
    assert import_module("course_ops.linear_cross_entropy")._parts(x, weight, gradients) == parts


@both
def test_another_target_may_be_ignored_and_one_that_is_no_class_is_nan(mode):
    x, weight, targets = inputs()
    with mode():
        found = course_ops.linear_cross_entropy(x, weight, targets.clamp(min=0), ignore_index=7)
        torch.testing.assert_close(found.double(), usual(x, weight, targets.clamp(min=0), 7), rtol=1e-5, atol=1e-6)
        assert course_ops.linear_cross_entropy(x, weight, targets + 1).isnan()


@both
def test_equal_logits_are_equally_likely_however_large_they_are(mode):
    for value in (1.0, 1e8, 1e15):
        x, weight = torch.full((2, 8), value, device=DEVICE), torch.ones(131, 8, device=DEVICE).requires_grad_()
        with mode():
            loss = course_ops.linear_cross_entropy(x, weight, torch.tensor([0, 7], device=DEVICE))
            (dw,) = torch.autograd.grad(loss, weight)
        expected = torch.full((131, 8), value / 131, device=DEVICE)
        expected[[0, 7]] -= value / 2
        torch.testing.assert_close(dw, expected, rtol=2e-5, atol=0)


@both
def test_only_the_gradients_that_are_wanted_are_made(mode):
    x, weight, targets = inputs()
    with mode():
        with torch.no_grad(), FlopCounterMode(display=False) as flops:
            course_ops.linear_cross_entropy(x, weight, targets)
        assert flops.get_total_flops() == 2 * 6 * 37 * 131
        loss = course_ops.linear_cross_entropy(x, weight.detach(), targets)
        assert torch.autograd.grad(loss, x)[0].shape == x.shape
        unasked = op(x.detach().view(6, 37), weight.detach(), targets.view(6), -100, False)
        assert [t.numel() for t in unasked] == [1, 0, 0, 1]
        with pytest.raises(ValueError, match="gradients must be True"):
            op(x.view(6, 37), weight, targets.view(6), -100, False)


@both
def test_schema_fake_and_gradient_agree(mode):
    x, weight, targets = inputs()
    with mode():
        leaf = x.detach().view(6, 37).requires_grad_()
        assert set(opcheck(op, (leaf, weight, targets.view(6), -100, True)).values()) == {"SUCCESS"}
        compiled = torch.compile(course_ops.linear_cross_entropy, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, weight, targets), course_ops.linear_cross_entropy(x, weight, targets))


@both
def test_rows_of_no_columns(mode):
    """All logits are 0, so that each class is as likely as another."""
    x, weight = torch.empty(2, 3, 0, device=DEVICE), torch.empty(7, 0, device=DEVICE)
    with mode():
        loss = course_ops.linear_cross_entropy(x, weight, torch.ones(2, 3, dtype=torch.long, device=DEVICE))
    torch.testing.assert_close(loss.cpu(), torch.tensor(7.0).log())


def test_bad_arguments():
    x, weight, targets = (t.detach() for t in inputs())
    for args, error, says in (
        ((x.double(), weight, targets), TypeError, "x is torch.float64"),
        ((x, weight.half(), targets), TypeError, "weight is torch.float16"),
        ((x, weight[:, 1:], targets), ValueError, r"expected \[..., K\] and \[V, K\]"),
        ((x, weight[:0], targets), ValueError, "V > 0"),
        ((x, weight, targets[0]), ValueError, "one target a row"),
        ((x, weight, targets.int()), TypeError, "targets is torch.int32"),
    ):
        with pytest.raises(error, match=says):
            course_ops.linear_cross_entropy(*args)


@both
@pytest.mark.parametrize("stream", [torch.float16, torch.float32], ids=str)
def test_float16_keeps_small_probabilities_and_takes_a_scaled_loss(mode, stream):
    """Of 2,000 rows a mean's dlogits are below float16's smallest number where a class has p < 6e-5."""
    torch.manual_seed(0)
    x = torch.randn(2000, 16, device=DEVICE).half().requires_grad_()
    weight = (3 * torch.randn(500, 16, device=DEVICE)).to(stream).requires_grad_()
    targets = torch.randint(500, (2000,), device=DEVICE)
    exact = torch.autograd.grad(F.cross_entropy(x.double() @ weight.half().double().t(), targets), (x, weight))
    exact = [g.float() for g in exact]
    for scale in (1.0, 2.0**16, 2.0**20):
        with mode():
            loss = course_ops.linear_cross_entropy(x, weight, targets)
            found = torch.autograd.grad(scale * loss, (x, weight))
        for ours, expected in zip(found, exact, strict=True):
            if scale == 1.0 and ours.dtype == torch.float16:
                continue  # the gradient itself is below float16's smallest numbers: hence the scale
            assert (ours.float() / scale - expected).norm() < 2e-3 * expected.norm()
