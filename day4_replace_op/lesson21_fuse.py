"""Fused operators: less HBM traffic instead of faster traffic
===========================================================
An operator that waits for memory, replaced one for one, can at best reach copy speed. Fused with its neighbours it does
not move the bytes at all. Three fusions for lesson 15's GPT, and what lesson 16's count predicts of each, a step of
32,768 tokens at 4.2 TB/s:

    add + norm (19, 20)               12 bytes per element instead of 24, 16 instead of 44       10 ms -> 4 ms
                                      backward
    linear + GELU (day 3, 4 and 5)    GELU in the matmul's epilogue, its bias's gradient        4.5 ms -> 3 ms
                                      in the kernel that computes dz
    logits + loss                     a part of the rows at a time: the logits are written      14 ms -> 3 ms
                                      in bf16, read, and overwritten by their gradient; no
                                      logits are kept for a backward

The third fusion also moves work from the backward into the forward. The loss ends the forward, so the gradient of the
logits is known up to a factor as soon as the loss is. The backward needs it for two matmuls alone. The forward runs
them at once, and the backward multiplies by the factor. Liger's kernels do so. Wijmans et al. (Cut Your Losses, 2024)
never write logits at all. LinearCrossEntropy below shows the idea in PyTorch.

All three are operators of course_ops, with the kernels of the lessons named above: add_norm, linear with an activation,
linear_cross_entropy. FusedTrunk, FusedMLP and FusedReadout in workloads/gpt.py, 30 lines, put them into the model.
FusedTrunk replaces the loop over blocks, since a norm is fused with the addition before it, across blocks too.

Predicted for all three and attention: attention's 9 to 11 ms become 5 to 6, and the matmuls' 35 ms stay. Of 75 ms 53
remain, so 1.4 times the tokens per second. Lesson 22 measures it.

You will learn: what can be fused across a residual, a backward inside a forward, an operator with an option.
Run it:    python3 course.py run lesson21_fuse
"""

from unittest import mock

from lessonkit import DEVICE, About, Steps, Table, Unsupported

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck

from course_ops.testing import kernels
from workloads.gpt import GPU, TINY, batches, make, train, variant


class LinearCrossEntropy(torch.autograd.Function):
    """x [M, K], weight [V, K], targets [M] -> mean loss of x W^T, `rows` rows of logits at a time.

    Both gradients are made in the forward: dlogits = (softmax(logits) - one_hot(targets)) / M, dx = dlogits W, and
    dW = dlogits^T x, added up over the parts. Kept: dx and dW, and no logits.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, rows):
        loss, dx, dw = x.new_zeros(()), torch.empty_like(x), torch.zeros_like(weight)
        for part in range(0, len(x), rows):
            x1, targets1 = x[part : part + rows], targets[part : part + rows, None]
            logits = x1 @ weight.t()
            log_p = logits.log_softmax(-1)
            loss -= log_p.gather(1, targets1).sum() / len(x)
            dlogits = log_p.exp().scatter_add(1, targets1, -torch.ones_like(x1[:, :1])) / len(x)
            dx[part : part + rows] = dlogits @ weight
            dw += dlogits.t() @ x1
        ctx.save_for_backward(dx, dw)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        dx, dw = ctx.saved_tensors
        return dloss * dx, dloss * dw, None, None


def _operator_calls():
    """An operator, its arguments, and the same in PyTorch; with sizes of 37 and 131 no tile is full."""
    x, delta = torch.randn(2, 3, 37, device=DEVICE) + 2, torch.randn(2, 3, 37, device=DEVICE)
    w, b, bias = torch.rand(37, device=DEVICE) + 0.5, torch.randn(37, device=DEVICE), torch.randn(131, device=DEVICE)
    weight, targets = torch.randn(131, 37, device=DEVICE), torch.tensor([0, 130, -100, 7, 7, 9], device=DEVICE)
    ours = torch.ops.course_ops
    yield (
        ours.add_norm.default,
        (delta, x, w, b, 1e-5),
        lambda d, x, w, b, eps: (F.layer_norm(x + d, (37,), w, b, eps), x + d),
    )
    yield (
        ours.linear.default,
        (x.view(6, 37), weight, bias, None, "gelu_tanh", True),
        lambda x, w, b, *_: (F.gelu(F.linear(x, w, b), approximate="tanh"),),
    )
    yield (
        ours.linear_cross_entropy.default,
        (x.view(6, 37), weight, targets, -100, True),
        lambda x, w, t, *_: (F.cross_entropy(x @ w.t(), t),),
    )


def a_backward_inside_a_forward():
    """Two rows of logits at a time, with gradients made in the forward: loss and gradients equal PyTorch's."""
    x, weight = (torch.randn(n, 37, device=DEVICE, dtype=torch.float64, requires_grad=True) for n in (5, 131))
    targets = torch.tensor([0, 130, 7, 7, 9], device=DEVICE)
    found = []
    for loss in (LinearCrossEntropy.apply(x, weight, targets, 2), F.cross_entropy(x @ weight.t(), targets)):
        found.append((loss, *torch.autograd.grad(3 * loss, (x, weight))))
    torch.testing.assert_close(*found)


@kernels()
def operators_are_sound():
    """Values and gradients equal PyTorch's, opcheck passes; the loss in parts equals the loss of all rows at once."""
    for op, args, usual in _operator_calls():
        leaves = [a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        wanted = [a for a in leaves if isinstance(a, Tensor) and a.requires_grad]
        expected = usual(*leaves)
        found = op(*leaves)[: len(expected)]
        upstream = [torch.randn_like(t) for t in expected]
        results = [(*out, *torch.autograd.grad(out, wanted, upstream)) for out in (found, expected)]
        torch.testing.assert_close(*results, rtol=2e-4, atol=2e-5)
        assert set(opcheck(op, tuple(leaves)).values()) == {"SUCCESS"}
    whole = op(*leaves)
    with mock.patch("course_ops.linear_cross_entropy.CHUNK", 2 * 131):  # two rows at a time
        torch.testing.assert_close(op(*leaves), whole)


@kernels()
def swapped():
    """The fused model has the same loss, with the stream in fp32 and the rest in bf16 (autocast), or all in fp32."""
    model, batch = make(TINY), next(batches(TINY, 1))
    loss = model(*batch)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with variant(model, "fused") as patched:
        ours = model(*batch)
        torch.testing.assert_close(ours, loss, rtol=1e-5, atol=0)
        found = torch.autograd.grad(ours, list(model.parameters()))
        torch.testing.assert_close(found, gradients, rtol=1e-3, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(model(*batch), loss, rtol=1e-5, atol=0)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            mixed = model(*batch)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        torch.testing.assert_close(mixed, model(*batch), rtol=5e-3, atol=0)
    return Table("replaced", [row._asdict() for row in patched.rows if "blocks.1" not in row.module])


@kernels()
def compiles():
    """One graph holds each operator, and compiled gradients equal eager's."""
    model, batch = make(TINY), next(batches(TINY, 1))
    with variant(model, "fused"):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="inductor" if GPU else "aot_eager", fullgraph=True)
        gradients = (torch.autograd.grad(f(*batch), list(model.parameters())) for f in (compiled, model))
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


@kernels()
def same_curve():
    """Twenty steps of the tiny GPT with ours, from the same seed on the same batches, have the same losses."""
    if GPU:
        raise Unsupported("in 16 bits 32 tokens a step say little: lesson 22 compares 200 steps of a large model")
    model = make(TINY)
    with variant(model, "fused"):
        ours = train(model, TINY)
    torch.testing.assert_close(ours, train(make(TINY), TINY), rtol=1e-4, atol=0)  # rounding: 1e-6, see TINY


LESSON = Steps(
    (a_backward_inside_a_forward, operators_are_sound, swapped, compiles, same_curve),
    about=About(
        teaches="linear with GELU, logits with loss, a residual stream through all blocks; a backward inside a forward",
        hours=1,
        star=True,
    ),
    alone=GPU,
    nightly=(same_curve,),
)

if __name__ == "__main__":
    LESSON.main()
