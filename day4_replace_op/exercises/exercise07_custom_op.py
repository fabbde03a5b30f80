"""An operator of your own: SwiGLU, as PyTorch has to see it
========================================================
Llama's MLP is down(silu(gate) * up). In eager PyTorch, silu and the product read or write five tensors in memory; one
kernel reads or writes three. But a launch is invisible to autograd and to torch.compile. An operator is a kernel and
three things beside it: a fake (shape, dtype, strides, without data), what to save, and a backward. Here the backward is
a kernel again, and so an operator with a fake of its own. With s = sigmoid(gate), y = gate s up, and the derivative of
gate s is s (1 + gate (1 - s)).

Predict: how many tensors a backward in one kernel reads or writes, and how many autograd's own.

Source: torch.library's documentation; Shazeer, "GLU variants improve transformer", 2020.
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, y_ptr, n, BLOCK: tl.constexpr):  # [n] each
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    gate = tl.load(gate_ptr + offsets, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask).to(tl.float32)
    tl.store(y_ptr + offsets, gate * tl.sigmoid(gate) * up, mask=mask)


@triton.jit
def swiglu_backward_kernel(dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, n, BLOCK: tl.constexpr):  # [n] each
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    dy = tl.load(dy_ptr + offsets, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + offsets, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask).to(tl.float32)
    s = tl.sigmoid(gate)
    # TODO(1): the gradients of gate and of up.
    # stub: dgate, dup = dy, dy
    dgate = dy * up * s * (1 + gate * (1 - s))
    dup = dy * gate * s
    # END(1)
    tl.store(dgate_ptr + offsets, dgate, mask=mask)
    tl.store(dup_ptr + offsets, dup, mask=mask)


# Named after this file, so that two versions of it never answer for each other.
@custom_op(f"{__name__}::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [...] of one shape and dtype, any strides -> silu(gate) * up [...], contiguous; differentiable once."""
    expect(gate=gate, up=up, same_shape=True, same_dtype=True, differentiable=True)
    y = gate.new_empty(gate.shape)
    if n := y.numel():
        swiglu_kernel[(triton.cdiv(n, 1024),)](gate.contiguous(), up.contiguous(), y, n, BLOCK=1024)
    return y


@custom_op(f"{__name__}::swiglu_backward", mutates_args=())
def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """dy [...] contiguous, gate and up as they were -> dgate, dup [...], contiguous."""
    expect(dy=dy, same_shape=True, contiguous=True)
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    if n := dy.numel():
        grid = (triton.cdiv(n, 1024),)
        swiglu_backward_kernel[grid](dy, gate.contiguous(), up.contiguous(), dgate, dup, n, BLOCK=1024)
    return dgate, dup


@swiglu.register_fake
def _(gate, up):
    # TODO(2): a tensor that looks as swiglu's result will: shape, dtype and strides.
    # stub: return None
    return gate.new_empty(gate.shape)
    # END(2)


@swiglu_backward.register_fake
def _(dy, gate, up):
    # TODO(3): two that look as swiglu_backward's results will.
    # stub: return None, None
    return gate.new_empty(gate.shape), up.new_empty(up.shape)
    # END(3)


def setup_context(ctx, inputs, output):
    # TODO(4): save what the backward needs, and no more.
    ctx.save_for_backward(*inputs)
    # END(4)


def gradients(ctx, dy):
    # TODO(5): call swiglu_backward; one gradient for each input, in their order. dy may have any strides.
    # stub: return dy, dy
    gate, up = ctx.saved_tensors
    return swiglu_backward(dy.contiguous(), gate, up)
    # END(5)


swiglu.register_autograd(gradients, setup_context=setup_context)


# The learner's file ends here.
import warnings

from lessonkit import DEVICE
from lessonkit.exercise import Exercise, Wrong, same

from torch.library import opcheck


def _plain(gate, up):
    return torch.nn.functional.silu(gate) * up


def _inputs():
    """Contiguous; the two halves of one projection; and a transposed gate, whose strides the result does not have."""
    yield "contiguous", torch.randn(3, 37, device=DEVICE), torch.randn(3, 37, device=DEVICE) + 1
    yield "two halves of one tensor", *torch.randn(5, 26, device=DEVICE).chunk(2, -1)
    yield "a transposed gate", torch.randn(7, 4, device=DEVICE).t(), torch.randn(4, 7, device=DEVICE)


def values():
    """The result is PyTorch's, whatever the strides."""
    for what, gate, up in _inputs():
        same(f"y, {what}", swiglu(gate, up), _plain(gate, up))


def _look(op, *args):
    """What the results are like, with data and without."""
    for where in (DEVICE, "meta"):
        results = op(*(t.to(where) for t in args))
        results = results if isinstance(results, tuple) else (results,)
        assert all(isinstance(t, Tensor) for t in results), f"the fake of {op._name} returned {results}"
        yield [{"shape": tuple(t.shape), "dtype": t.dtype, "strides": t.stride()} for t in results]


def looks():
    """Without data results have the shape, dtype and strides that they have with data."""
    for what, *pair in _inputs():
        for dtype in (torch.float32, torch.bfloat16):
            gate, up = (t.to(dtype) for t in pair)
            real, fake = _look(swiglu, gate, up)
            same(f"y, {what}", fake, real)
            real, fake = _look(swiglu_backward, torch.ones_like(up), gate, up)
            same(f"dgate, dup, {what}", fake, real)


def gradient():
    """Both gradients are those of float64 autograd; after sum() too, where dy is one number seen n times."""
    for what, gate, up in _inputs():
        for loss in (lambda y: (y * torch.linspace(-1, 2, y.numel(), device=DEVICE).view(y.shape)).sum(), torch.sum):
            leaves = [t.detach().requires_grad_() for t in (gate, up)]
            exact = [t.detach().double().requires_grad_() for t in (gate, up)]
            found = torch.autograd.grad(loss(swiglu(*leaves)), leaves)
            right = torch.autograd.grad(loss(_plain(*exact)), exact)
            for name, f, r in zip(("gate", "up"), found, right, strict=True):
                same(f"the gradient of {name}, {what}", f, r)


def _first_line(error):
    return str(error).strip().splitlines()[0].replace(f"{__name__}_", "")


def checked():
    """opcheck finds that schema, fakes and gradients agree with what the operators do."""
    for what, gate, up in _inputs():
        leaves = gate.detach().requires_grad_(), up.detach().requires_grad_()
        calls = (swiglu, leaves), (swiglu_backward, (torch.ones(gate.shape, device=DEVICE), gate, up))
        for op, args in calls:
            with warnings.catch_warnings(action="ignore"):  # autograd's, of the error that is told below
                results = opcheck(op, args, raise_exception=False)
            for test, result in results.items():
                assert result == "SUCCESS", f"{test} of {op._name}, {what}: {_first_line(result)}"


def one_graph():
    """torch.compile sees one graph, in it one node that is swiglu, and answers as eager does."""
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph

    def block(gate, up):
        return swiglu(gate.tanh(), up).relu()

    _, *pair = next(_inputs())
    leaves = [t.requires_grad_() for t in pair]
    torch._dynamo.reset()
    compiled, eager = torch.compile(block, backend=backend, fullgraph=True)(*leaves), block(*leaves)
    same("the compiled result", compiled, eager)
    for name, f, r in zip(
        ("gate", "up"), *(torch.autograd.grad(y.sum(), leaves) for y in (compiled, eager)), strict=True
    ):
        same(f"the compiled gradient of {name}", f, r)
    nodes = [sum("swiglu" in str(node.target) for node in graph.graph.nodes) for graph in graphs]
    same("nodes that are swiglu, by graphs", nodes, [1])


EXERCISE = Exercise(
    claims=(values, looks, gradient, checked, one_graph),
    hints=(
        "A compiler plans memory from the fake alone: the same shape, dtype and strides as the real result. What does "
        "the backward read that only the forward had?",
        "The real result is contiguous even where gate is not. y = gate s up is a product: dup = dy gate s, dgate = dy "
        "up times the derivative of gate s. After sum() dy is one number with stride 0.",
        "`return gate.new_empty(gate.shape)` (empty_like would keep gate's strides); `ctx.save_for_backward(*inputs)`; "
        "`return swiglu_backward(dy.contiguous(), *ctx.saved_tensors)`; dgate = dy * up * s * (1 + gate * (1 - s)).",
    ),
    predicted=(
        "5 in one kernel: dy, gate, up, and the two gradients. Autograd runs three kernels of 3 tensors each, so 9."
    ),
    wrong=(
        Wrong(
            "the fake has gate's strides, the result has not",
            "    return gate.new_empty(gate.shape)\n    # END(2)",
            "    return torch.empty_like(gate)\n    # END(2)",
            "looks",
        ),
        Wrong(
            "the fake is in fp32 whatever gate is",
            "    return gate.new_empty(gate.shape)\n    # END(2)",
            "    return gate.new_empty(gate.shape, dtype=torch.float32)\n    # END(2)",
            "looks",
        ),
        Wrong("the gate's own slope is forgotten", "* s * (1 + gate * (1 - s))", "* s", "gradient"),
        Wrong("the sigmoid's derivative in place of SiLU's", "s * (1 + gate * (1 - s))", "s * (1 - s)", "gradient"),
        Wrong(
            "the gradients are exchanged",
            "return swiglu_backward(dy.contiguous(), gate, up)",
            "return swiglu_backward(dy.contiguous(), gate, up)[::-1]",
            "gradient",
        ),
        Wrong(
            "y is saved in place of up",
            "ctx.save_for_backward(*inputs)",
            "ctx.save_for_backward(inputs[0], output)",
            "gradient",
        ),
        Wrong(
            "after sum() dy is one number seen n times: not contiguous", "dy.contiguous(), gate", "dy, gate", "error"
        ),
        Wrong(
            "the backward's fake is made of dy's number of elements alone",
            "return gate.new_empty(gate.shape), up",
            "return gate.new_empty(gate.numel()), up",
            "looks",
        ),
        Wrong(
            "the result is written over gate, and the schema says that nothing is",
            "y = gate.new_empty(gate.shape)",
            "y = gate.detach() if gate.is_contiguous() else gate.new_empty(gate.shape)",
            "error",
        ),
        Wrong(
            "the backward launches its kernel and does not call the operator: a tracer has no data for it",
            "return swiglu_backward(dy.contiguous(), gate, up)",
            "dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)\n"
            "    args = dy.contiguous(), gate.contiguous(), up.contiguous(), dgate, dup, dy.numel()\n"
            "    swiglu_backward_kernel[(triton.cdiv(dy.numel(), 1024),)](*args, BLOCK=1024)\n"
            "    return dgate, dup",
            "checked",
        ),
    ),
)
