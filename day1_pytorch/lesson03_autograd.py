"""Autograd: the tape of operators that a forward records
======================================================
Every operator on a tensor that requires a gradient appends a node to a tape: its inputs, and the tensors that it saves.
The call of backward() replays the tape from the end, each node once. So a gradient costs about two forwards, and
training needs more memory than inference by what the nodes save. A kernel's author has two duties: a correct backward,
and few saved bytes.

You will learn: a tape in 30 lines, the graph, what is saved for backward, in-place changes and version counters,
custom functions and gradcheck, Module state and hooks. Each step states a fact and asserts it.
Run it:    python3 course.py run lesson03_autograd
"""

import io
import math
import warnings
from contextlib import contextmanager

from lessonkit import DEVICE, About, Steps, Table

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.gradcheck import GradcheckError


@contextmanager
def _raises(error, says):
    """Asserts that the block raises this error with these words."""
    try:
        yield
    except error as raised:
        if says not in str(raised):
            raise AssertionError(f"expected a reason with {says!r}") from raised
    else:
        raise AssertionError(f"expected {error.__name__}: {says}")


def _shares(a, b):
    """True if both tensors are views of one storage."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class Var:
    """A value, the Vars that it came from, and for each of them how a gradient flows back: a tape in 30 lines."""

    def __init__(self, value, *parents):
        self.value, self.parents, self.grad = value, parents, torch.zeros_like(value)

    def __add__(self, other):
        # The gradient of a broadcast dimension is summed.
        return Var(
            self.value + other.value,
            (self, lambda g: g.sum_to_size(self.value.shape)),
            (other, lambda g: g.sum_to_size(other.value.shape)),
        )

    def __matmul__(self, other):
        return Var(self.value @ other.value, (self, lambda g: g @ other.value.T), (other, lambda g: self.value.T @ g))

    def tanh(self):
        y = self.value.tanh()
        return Var(y, (self, lambda g: g * (1 - y * y)))

    def sum(self):
        return Var(self.value.sum(), (self, lambda g: g.expand_as(self.value)))

    def backward(self):
        order, seen = [], set()

        def visit(v):
            if v not in seen:
                seen.add(v)
                for parent, _ in v.parents:
                    visit(parent)
                order.append(v)  # after everything that it depends on

        visit(self)
        self.grad = torch.ones_like(self.value)
        for v in reversed(order):  # so v.grad is complete: every user of v has already added its part
            for parent, pull in v.parents:
                parent.grad = parent.grad + pull(v.grad)  # added, not set: a value may be used twice


def tape():
    """A tape of 30 lines gives autograd's gradients: each value keeps its parents and how a gradient flows to them."""
    values = [torch.rand(s, dtype=torch.float64) - 0.5 for s in ((5, 3), (3, 3), (3,))]
    leaves = [v.clone().requires_grad_() for v in values]
    ours = [Var(v) for v in values]
    for x, w, b in (leaves, ours):
        hidden = (x @ w + b).tanh()
        loss = (hidden @ w + x).tanh().sum()  # x and w are used twice
        loss.backward()
    for mine, theirs in zip(ours, leaves, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def graph():
    """backward() walks grad_fn nodes from the loss to the leaves, once, and frees what they had saved."""
    x = torch.rand(3, requires_grad=True)
    y = x.exp()
    loss = (x * y).sum()
    names, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        names.add(type(node).__name__)
        todo += [parent for parent, _ in node.next_functions if parent is not None]
    assert names == {"SumBackward0", "MulBackward0", "ExpBackward0", "AccumulateGrad"}
    assert x.is_leaf  # made by the user, not by an operator
    assert x.grad_fn is None
    assert not y.is_leaf
    y.retain_grad()  # only leaves keep .grad unless asked
    loss.backward(retain_graph=True)
    torch.testing.assert_close(y.grad, x.detach())
    once = x.grad.clone()
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * once)  # gradients add up until zeroed: forgetting zero_grad is silent
    with _raises(RuntimeError, "backward through the graph a second time"):
        loss.backward()
    with torch.no_grad():
        assert (x * 2).grad_fn is None, "nothing recorded, nothing saved"
    assert _shares(y.detach(), y)
    assert not y.detach().requires_grad


def saved():
    """The tape costs memory: GELU written out keeps 3 tensors for backward, the fused operator only its input."""
    expressions = {
        "x + 1": (lambda x: x + 1, 0),
        "F.relu(x)": (F.relu, 1),  # its output: the sign tells where the gradient passes
        "F.gelu(x)": (F.gelu, 1),  # its input, which lives anyway
        "0.5 * x * (1 + erf(x / sqrt 2))": (lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), 3),
        "F.softmax(x)": (lambda x: F.softmax(x, -1), 1),  # its output
        "exp(x - max) / sum": (lambda x: (e := (x - x.amax(-1, True)).exp()) / e.sum(-1, True), 2),
    }
    rows = []
    for name, (function, expected) in expressions.items():
        x = torch.randn(256, 1024, device=DEVICE, requires_grad=True)
        kept = {}  # storage -> bytes, so that a tensor saved twice counts once

        def pack(t, kept=kept):
            kept[t.untyped_storage().data_ptr()] = t.numel() * t.element_size()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = function(x)
        large = [pointer for pointer, size in kept.items() if size == x.nbytes]
        assert len(large) == expected, (name, len(large))
        extra = sum(size for pointer, size in kept.items() if pointer not in (x.data_ptr(), out.data_ptr()))
        rows.append({"expression": name, "tensors kept": len(large), "extra bytes": extra})
    note = (
        "Extra bytes are those that neither the input nor the output holds anyway. Elementwise time is bytes over "
        "bandwidth, so whoever fuses the formula into one kernel saves this memory and the traffic to fill it."
    )
    return Table("saved-for-backward", rows, note)


def in_place():
    """Every in-place change raises a version counter, and backward refuses a saved tensor whose counter has moved."""
    x = torch.rand(4, requires_grad=True)
    y = x.exp()  # d exp = exp, so backward needs y itself and saves it
    assert y._version == 0
    y.mul_(2)
    assert y._version == 1
    with _raises(RuntimeError, "modified by an inplace operation"):
        y.sum().backward()
    with _raises(RuntimeError, "leaf Variable"):
        x.add_(1)  # the gradient with respect to which x?
    # detach() shares the counter, so backward notices the change; .data does not, and the gradient is silently wrong.
    for alias, seen in ((lambda t: t.detach(), True), (lambda t: t.data, False)):
        y = x.exp()
        alias(y).zero_()
        assert (y._version == 1) is seen
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.eq(0).all(), "exp has no zero gradient anywhere: .data let a wrong one through"


class RightSoftmax(torch.autograd.Function):
    """Softmax over the last dimension: dx = y * (dy - sum(dy * y))."""

    @staticmethod
    def forward(ctx, x):
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return y * (dy - (dy * y).sum(-1, keepdim=True))


class WrongSoftmax(RightSoftmax):
    """Without the row's coupling: right where a row has one element, and it still trains a little."""

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return y * (1 - y) * dy


def gradcheck():
    """gradcheck compares a backward with finite differences in float64: a right one passes, a wrong one does not."""
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(RightSoftmax.apply, (x,))
    with _raises(GradcheckError, "Jacobian mismatch"):
        torch.autograd.gradcheck(WrongSoftmax.apply, (x,))
    torch.testing.assert_close(WrongSoftmax.apply(x), RightSoftmax.apply(x))  # both forwards agree
    # In float32 one rounding, 6e-8, is 6% of gradcheck's step of 1e-6. So even the right backward is refused.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not torch.autograd.gradcheck(RightSoftmax.apply, (x.float(),), raise_exception=False)


def modules():
    """A Module is named state: 2,474 parameters, buffers that move along, and a mode that changes the answer."""
    torch.manual_seed(0)

    def make():
        return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))

    net, x = make(), torch.randn(16, 64)
    # Linear: in * out + out; BatchNorm: a scale and a shift a channel.
    assert sum(p.numel() for p in net.parameters()) == (64 * 32 + 32) + 2 * 32 + (32 * 10 + 10) == 2474
    assert [n for n, _ in net.named_buffers()] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    # train(): batch statistics and random zeros, so two calls differ. eval(): stored statistics, and they agree.
    assert not torch.equal(net(x), net(x))
    assert net[1].num_batches_tracked == 2
    net.eval()
    assert torch.equal(net(x), net(x))
    assert net[1].num_batches_tracked == 2
    # state_dict is parameters and buffers by name; code is not in it.
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    copy = make().eval()
    assert not torch.equal(copy(x), net(x))
    copy.load_state_dict(torch.load(file, weights_only=True))  # weights_only: a checkpoint must not run code
    assert torch.equal(copy(x), net(x))
    with _raises(RuntimeError, "size mismatch"):
        nn.Linear(64, 31).load_state_dict(net[0].state_dict())
    # A tensor that is only an attribute is neither moved by .to() nor saved; register_buffer is for that.
    net.mask = torch.ones(10)
    assert "mask" not in net.state_dict()


def hooks():
    """A forward hook sees every layer's output, a tensor hook every gradient, without a change to the model."""
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    shapes = []
    handles = [m.register_forward_hook(lambda _, args, out: shapes.append(tuple(out.shape))) for m in net]
    out = net(torch.randn(3, 8))
    assert shapes == [(3, 4), (3, 4), (3, 2)]
    for handle in handles:
        handle.remove()
    seen = []
    out.register_hook(lambda gradient: seen.append(gradient.clone()))
    out.sum().backward()
    assert len(shapes) == 3
    assert torch.equal(seen[0], torch.ones(3, 2))


LESSON = Steps(
    (tape, graph, saved, in_place, gradcheck, modules, hooks),
    about=About(
        teaches="the tape: in 30 lines, then the real one; what it keeps, custom functions, `gradcheck`, modules "
        "and hooks",
        hours=1,
    ),
)

if __name__ == "__main__":
    LESSON.main()
