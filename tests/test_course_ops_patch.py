"""course_ops.patch: which modules it replaces, that they compute the same, and that it is undone."""

import copy
import inspect
import pickle
from importlib import import_module

from lessonkit import device

import pytest
import torch
from torch import nn

import course_ops

pytestmark = pytest.mark.kept
REPLACEMENTS = import_module("course_ops.patch").REPLACEMENTS  # the package's name of it is the function
ALL = (nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.CrossEntropyLoss, nn.Linear)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 16),
            nn.LayerNorm(16),
            nn.GELU(approximate="tanh"),
            nn.RMSNorm(16),
            nn.Linear(16, 8, bias=False),
        )
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, targets):
        return self.loss(self.body(x), targets)


def make():
    torch.manual_seed(0)
    model = Model().to(device.DEVICE)
    return model, (torch.randn(6, 8, device=device.DEVICE), torch.arange(6, device=device.DEVICE))


def test_a_patched_model_computes_the_same_and_is_itself_again_afterwards():
    model, batch = make()
    classes, parameters = [type(m) for m in model.modules()], list(model.parameters())
    loss = model(*batch)
    gradients = torch.autograd.grad(loss, parameters)
    with course_ops.patch(model, ALL) as patched:
        assert [(r.module, r.now.removeprefix("course_ops.")) for r in patched.rows] == [
            ("body.0", "linear"), ("body.1", "layer_norm"), ("body.2", "gelu"), ("body.3", "rms_norm"),
            ("body.4", "linear"), ("loss", "cross_entropy"),
        ]  # fmt: skip
        assert all(isinstance(m, old) for m, old in zip(model.modules(), classes, strict=True))
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        ours = model(*batch)
        torch.testing.assert_close(ours, loss)
        for a, b in zip(torch.autograd.grad(ours, parameters), gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(*batch)
        torch.testing.assert_close(compiled, loss)
        copy.deepcopy(model)
    assert [type(m) for m in model.modules()] == classes
    patched.undo()
    assert [type(m) for m in model.modules()] == classes


def test_linear_is_left_alone_unless_it_is_asked_for():
    model, _ = make()
    patched = course_ops.patch(model)
    assert type(model.body[0]) is nn.Linear
    assert "body.1: LayerNorm -> course_ops.layer_norm" in str(patched) == repr(patched)
    patched.undo()
    patched.undo()
    assert type(model.body[1]) is nn.LayerNorm


def test_what_no_kernel_takes_stays_and_the_list_says_why():
    odd = nn.ModuleList([
        nn.LayerNorm((2, 3)), nn.LayerNorm(4, elementwise_affine=False), nn.LayerNorm(4).double(), nn.GELU(),
        nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(weight=torch.ones(3)),
        nn.Dropout(0.1, inplace=True),
    ])  # fmt: skip
    before = [type(m) for m in odd]
    patched = course_ops.patch(odd, (*ALL, nn.Dropout))
    words = ("2 dimensions", "no weight", "float64", "erf", "smoothing", "class weights", "in place")
    assert [type(m) for m in odd] == before
    assert all(word in row.why for word, row in zip(words, patched.rows, strict=True)), str(patched)


def test_losses_of_other_layouts_are_pytorchs():
    loss = nn.CrossEntropyLoss()
    logits, targets = torch.randn(2, 3, 5), torch.randint(3, (2, 5))
    with course_ops.patch(loss):
        assert torch.equal(loss(logits, targets), nn.CrossEntropyLoss()(logits, targets))
        probabilities = torch.rand(4, 3)
        assert torch.equal(
            loss(logits[0].t()[:4], probabilities), nn.CrossEntropyLoss()(logits[0].t()[:4], probabilities)
        )
        assert loss(logits[0].t().bfloat16(), targets[0]).dtype == torch.bfloat16


def test_linear_under_autocast_is_in_autocasts_dtype():
    linear = nn.Linear(8, 4).to(device.DEVICE)
    with course_ops.patch(linear, [nn.Linear]), torch.autocast(device.DEVICE.type, torch.bfloat16):
        assert linear(torch.randn(3, 8, device=device.DEVICE)).dtype == torch.bfloat16


def test_a_gelu_of_a_float64_model_stays():
    """It has no parameter that would say so."""
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU(approximate="tanh")).double()
    with course_ops.patch(model) as patched:
        assert [row.why.split()[0] for row in patched.rows] == ["torch.float64"]
        model(torch.ones(1, 2, dtype=torch.float64, device="cpu"))


def test_a_loss_under_autocast_is_fp32():
    loss, logits, targets = nn.CrossEntropyLoss(), torch.randn(5, 7).bfloat16(), torch.arange(5)
    with torch.autocast("cpu", torch.bfloat16):
        expected = loss(logits, targets)
        with course_ops.patch(loss):
            torch.testing.assert_close(loss(logits, targets), expected)  # dtypes too
    assert expected.dtype == torch.float32


class Scaled(nn.Module):
    def forward(self, x):
        return 2 * x


class Added(Scaled):
    def forward(self, x):
        return x + x

    def refuses(self):
        return "in evaluation mode" if not self.training else ""


def test_a_models_own_modules_become_the_subclass_that_is_given():
    model = nn.ModuleList([Scaled(), Scaled().eval(), nn.GELU(approximate="tanh")])
    with course_ops.patch(model, (), {Scaled: Added}) as patched:
        assert [(row.module, row.now, row.why) for row in patched.rows] == [
            ("0", "Added", ""), ("1", "", "in evaluation mode")
        ]  # fmt: skip
        assert [type(m) for m in model] == [Added, Scaled, nn.GELU]
    assert [type(m) for m in model] == [Scaled, Scaled, nn.GELU]


def test_forwards_name_their_parameters_as_pytorch_does():
    for old, (new, *_) in REPLACEMENTS.items():
        assert list(inspect.signature(new.forward).parameters) == list(inspect.signature(old.forward).parameters)


def test_what_no_kernel_takes_is_computed_by_pytorch():
    """Which dtypes a module meets is known in the call alone."""
    model, (x, targets) = make()
    with course_ops.patch(model, (*ALL, nn.Dropout)):
        model.double()
        assert model(x.double(), targets).dtype == torch.float64
    norm, x = nn.RMSNorm(8, device="cpu", dtype=torch.bfloat16), torch.randn(2, 8, device="cpu")
    expected = norm(x)
    with course_ops.patch(norm):
        assert torch.equal(norm(x), expected)
    dropout, integers = nn.Dropout(0.5).eval(), torch.arange(3)
    with course_ops.patch(dropout, (nn.Dropout,)):
        assert dropout(integers) is integers


@pytest.mark.parametrize("again", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_second_patch_says_that_it_is_one(again):
    model, _ = make()
    with course_ops.patch(model):
        patched = again(model)
        second = course_ops.patch(patched)
        assert "body.1: LayerNorm stays: already patched" in str(second)
        assert "Linear" not in str(second)  # not asked for
        second.undo()
        assert type(patched.body[1]) is REPLACEMENTS[nn.LayerNorm].new


def test_refused():
    with pytest.raises(TypeError, match="expected a subclass"):
        course_ops.patch(Scaled(), (), {Scaled: nn.GELU})
    with pytest.raises(TypeError, match=r"classes is GELU, expected a sequence of classes: pass \(GELU,\)"):
        course_ops.patch(nn.GELU(), nn.GELU)
    with pytest.raises(TypeError, match="classes is None, expected a sequence of classes: leave it out"):
        course_ops.patch(nn.GELU(), None)
    for classes in ("GELU", 3):
        with pytest.raises(TypeError, match=f"classes is {classes!r}, expected a sequence of classes: pass"):
            course_ops.patch(nn.GELU(), classes)
    for others in ([nn.GELU], nn.GELU):
        with pytest.raises(TypeError, match="expected a mapping"):
            course_ops.patch(nn.GELU(), (), others)
    for old, new in (("GELU", nn.GELU), (nn.GELU, "GELU"), (int, bool)):
        with pytest.raises(TypeError, match="expected a subclass"):
            course_ops.patch(nn.GELU(), (), {old: new})
    with pytest.raises(TypeError, match="got Tensor"):
        course_ops.patch(torch.ones(2))
    with pytest.raises(ValueError, match="Conv2d"):
        course_ops.patch(nn.Conv2d(1, 1, 1), [nn.Conv2d])
