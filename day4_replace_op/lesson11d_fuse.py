"""Fused operators: what pays is what crosses the bus less often
=============================================================
Replaced one for one, an operator that waits for memory can only reach the speed of memory. Fused with its neighbours it
need not move the bytes at all. Three fusions for lesson 10's GPT, and what lesson 10b's count predicts of each, a step
of 32,768 tokens at 4.2 TB/s:

    add + norm (11b, 11c)              12 bytes an element where 24 were, 16 on the way back     10 ms -> 4 ms
    linear + GELU (day 3, 4 and 4b)    GELU in the matmul's epilogue, its bias's gradient        4.5 ms -> 3 ms
                                       while dz is made; the products backward are cuBLAS's
    logits + loss                      a part of the rows at a time: the logits are written      14 ms -> 3 ms
                                       in bf16, read, and overwritten by their gradient; no
                                       logits are kept for a backward

The last one is more than an order of two operators: the loss ends the forward, so the gradient of the logits is known
up to a factor as soon as the loss is, and all that a backward wants of it are two products with it. They are made at
once, the factor is applied when it comes (Liger's kernels do so; Wijmans et al., Cut Your Losses, 2024, go further and
never write logits). With attention's 9 to 11 ms become 5 to 6, the matmuls' 35 ms stay as they are, and of 75 ms 53
should be left: 1.4 times the tokens a second. Lesson 11e measures.

You will learn: what may be fused across a residual, a backward inside a forward, an operator with an option.
Run it:    python day4_replace_op/lesson11d_fuse.py
"""

import math
from unittest import mock

from lessonkit import DEVICE, Steps, Table, Unsupported, num_sms

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn
from torch.library import custom_op, opcheck
from torch.utils.flop_counter import register_flop_formula

from day2_triton_basics.lesson12b_cross_entropy_wide import cross_entropy_split
from day2_triton_basics.lesson13_cross_entropy_backward import backward_wide
from day3_matmul_tk import lesson04_matmul_epilogue as epilogue
from day3_matmul_tk.lesson04b_matmul_epilogue_backward import dz_and_sums_kernel
from day4_replace_op import lesson11b_add_norm as norm_forward
from day4_replace_op import lesson11c_add_norm_backward as norm_backward
from day4_replace_op.lesson10_gpt import GPU, MLP, TINY, Attention, Readout, Trunk, batches, make, train
from day4_replace_op.lesson10c_operators import only_differentiable
from day4_replace_op.lesson11_replace_op import TritonAttention, TritonLayerNorm, replaced

CHUNK = 2**29  # logits at a time: 1 GiB in bf16


def _rows(x):
    """[..., N] -> [M, N], contiguous."""
    return x.contiguous().view(-1, x.shape[-1])


@custom_op("course::add_norm", mutates_args=())
def add_norm(x: Tensor, delta: Tensor, w: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, delta [..., N], w, b [N] -> x + delta as x, its norm as delta, mean and rstd of each row in fp32."""
    total, y, mean, rstd = norm_forward.add_norm(_rows(x), _rows(delta), w, b, eps)
    return total.view(x.shape), y.view(x.shape), mean, rstd


@custom_op("course::add_norm_backward", mutates_args=())
def add_norm_backward(
    dtotal: Tensor, dy: Tensor, total: Tensor, w: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx, ddelta, dw, db = norm_backward.add_norm_backward(*map(_rows, (dtotal, dy, total)), w, mean, rstd)
    return dx.view(total.shape), ddelta.view(total.shape), dw, db


@add_norm.register_fake
def _(x, delta, w, b, eps):
    rows = (x.new_empty(x.shape[:-1].numel(), dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), delta.new_empty(x.shape), *rows


@add_norm_backward.register_fake
def _(dtotal, dy, total, w, mean, rstd):
    return total.new_empty(total.shape), dy.new_empty(total.shape), torch.empty_like(w), torch.empty_like(w)


def _save_add_norm(ctx, inputs, output):
    total, _, mean, rstd = output
    ctx.save_for_backward(total, inputs[2], mean, rstd)
    only_differentiable(ctx, mean, rstd)


def _add_norm_gradients(ctx, dtotal, dy, *_):
    total, *saved = ctx.saved_tensors
    dtotal = torch.zeros_like(total) if dtotal is None else dtotal  # the stream ends in the last norm
    return *add_norm_backward(dtotal, dy, total, *saved), None


add_norm.register_autograd(_add_norm_gradients, setup_context=_save_add_norm)


@custom_op("course::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K], w [N, K], bias [N] -> gelu(z) and z = x W^T + bias, [..., N] each."""
    z = x.new_empty(*x.shape[:-1], len(w))
    return epilogue.linear_gelu(_rows(x), w, bias, save=_rows(z)).view(z.shape), z


@custom_op("course::gelu_bias_backward", mutates_args=())
def gelu_bias_backward(dy: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """dy, z [..., N] -> dz and, added up on the way, dbias [N]."""
    dy, dz, (M, N) = _rows(dy), torch.empty_like(z), _rows(z).shape
    programs = max(1, min(triton.cdiv(M, 32), 8 * num_sms() // max(1, triton.cdiv(N, 128))))
    partial = (torch.empty if M else torch.zeros)((programs, N), dtype=torch.float32, device=z.device)
    if z.numel():
        grid = (triton.cdiv(N, 128), programs)
        dz_and_sums_kernel[grid](dy, z, dz, partial, M, N, dy.stride(0), BLOCK_M=32, BLOCK_N=128)
    return dz, partial.sum(0).to(z.dtype)


@linear_gelu.register_fake
def _(x, w, bias):
    return tuple(x.new_empty(*x.shape[:-1], w.shape[0]) for _ in range(2))


gelu_bias_backward.register_fake(lambda dy, z: (torch.empty_like(z), z.new_empty(z.shape[-1])))


def _save_linear_gelu(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2], output[1])
    only_differentiable(ctx, output[1])


def _linear_gelu_gradients(ctx, dy, _):
    x, w, z = ctx.saved_tensors
    dz, dbias = gelu_bias_backward(dy, z)
    return dz @ w, dz.flatten(0, -2).t() @ x.flatten(0, -2), dbias  # cuBLAS: K = 32,768 of dW wants its split-K


linear_gelu.register_autograd(_linear_gelu_gradients, setup_context=_save_linear_gelu)


@custom_op("course::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(x: Tensor, w: Tensor, targets: Tensor, gradients: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K], w [V, K], targets [M] -> mean loss of x W^T in fp32, dx, dw (empty without `gradients`).

    Products are in x's dtype, dw is added up in fp32 and given in w's. A target of -100 has no loss.
    """
    parts = max(1, triton.cdiv(len(x) * len(w), CHUNK))
    weight, count = w.to(x.dtype), (targets != -100).sum()
    each = count.float().reciprocal().expand(len(x)).contiguous()  # of the mean, by a row's loss
    loss, dw = x.new_zeros((), dtype=torch.float32), None
    dx = x.new_empty(x.shape if gradients else 0)
    chunks = (t.chunk(parts) for t in (x, targets, each, dx if gradients else x))
    for x1, targets1, each1, dx1 in zip(*chunks, strict=True):
        logits = x1 @ weight.t()
        losses, lse = cross_entropy_split(logits, targets1)
        loss += losses.sum()
        if gradients:
            dlogits = backward_wide(each1, logits, targets1, lse, in_place=True)
            torch.mm(dlogits, weight, out=dx1)
            product = dlogits.t() @ x1
            dw = product.float() if dw is None else dw.add_(product)
        logits = dlogits = None  # or the next part's would be made beside this one's
    return loss / count, dx, dw.to(w.dtype) if gradients else w.new_empty(0)


@linear_cross_entropy.register_fake
def _(x, w, targets, gradients):
    loss = x.new_empty((), dtype=torch.float32)
    return loss, x.new_empty(x.shape if gradients else 0), w.new_empty(w.shape if gradients else 0)


def _save_linear_cross_entropy(ctx, inputs, output):
    ctx.save_for_backward(*output[1:])
    only_differentiable(ctx, *output[1:])
    if not inputs[3]:
        raise ValueError("a loss that is differentiated needs gradients=True")


def _scaled_gradients(ctx, dloss, *_):
    dx, dw = ctx.saved_tensors
    return dloss * dx, dloss * dw, None, None


linear_cross_entropy.register_autograd(_scaled_gradients, setup_context=_save_linear_cross_entropy)


# For counters. dz W and dz^T x of the MLP are PyTorch's own products, and counted as such.
register_flop_formula(torch.ops.course.linear_gelu)(lambda x, w, *_, out_shape=None: 2 * math.prod(x) * w[0])


@register_flop_formula(torch.ops.course.linear_cross_entropy)
def _(x, w, targets, gradients, out_shape=None):
    return (6 if gradients else 2) * x[0] * x[1] * w[0]


# ---- Into the model -----------------------------------------------------------------------------------------------


class FusedTrunk(Trunk):
    def forward(self, x):
        norms = [n for block in self.blocks for n in (block.norm1, block.norm2)] + [self.norm]
        branches = [f for block in self.blocks for f in (block.attention, block.mlp)]
        y = norms[0](x)
        for branch, norm in zip(branches, norms[1:], strict=True):  # the next norm, over the edge of a block too
            x, y, _, _ = add_norm(x, branch(y), norm.weight, norm.bias, norm.eps)
        return y


class FusedMLP(MLP):
    def forward(self, x):
        return self.narrow(linear_gelu(x, self.widen.weight.to(x.dtype), self.widen.bias.to(x.dtype))[0])


class FusedReadout(Readout):
    def forward(self, x, targets=None):
        if targets is None:
            return super().forward(x)
        return linear_cross_entropy(x.flatten(0, 1), self.weight, targets.flatten(), torch.is_grad_enabled())[0]


FUSED = {
    Trunk: FusedTrunk,
    Attention: TritonAttention,
    nn.LayerNorm: TritonLayerNorm,  # of the first block; the others are fused
    MLP: FusedMLP,
    Readout: FusedReadout,
}


# ---- Claims -------------------------------------------------------------------------------------------------------


def _operator_calls():
    """An operator, its arguments, and PyTorch's words for it; 37 and 131: no tile is full."""
    x, delta = torch.randn(2, 3, 37, device=DEVICE) + 2, torch.randn(2, 3, 37, device=DEVICE)
    w, b, bias = torch.rand(37, device=DEVICE) + 0.5, torch.randn(37, device=DEVICE), torch.randn(131, device=DEVICE)
    weight, targets = torch.randn(131, 37, device=DEVICE), torch.tensor([0, 130, -100, 7, 7, 9], device=DEVICE)
    yield add_norm, (x, delta, w, b, 1e-5), lambda x, d, w, b, eps: (x + d, F.layer_norm(x + d, (37,), w, b, eps))
    yield linear_gelu, (x, weight, bias), lambda x, w, b: (F.gelu(F.linear(x, w, b), approximate="tanh"),)
    yield (
        linear_cross_entropy,
        (x.view(6, 37), weight, targets, True),
        lambda x, w, t, _: (F.cross_entropy(x @ w.t(), t),),
    )


def operators_are_sound():
    """Values and gradients are PyTorch's, opcheck agrees; a loss in parts is the loss at once."""
    for op, args, usual in _operator_calls():
        leaves = [a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        wanted = [a for a in leaves if isinstance(a, Tensor) and a.requires_grad]
        expected = usual(*leaves)
        found = op(*leaves)[: len(expected)]
        upstream = [torch.randn_like(t) for t in expected]
        results = [(*out, *torch.autograd.grad(out, wanted, upstream)) for out in (found, expected)]
        torch.testing.assert_close(*results, rtol=2e-4, atol=2e-5)
        assert set(opcheck(op, tuple(leaves)).values()) == {"SUCCESS"}
    whole = linear_cross_entropy(*leaves)
    with mock.patch(f"{__name__}.CHUNK", 2 * 131):  # two rows at a time
        torch.testing.assert_close(linear_cross_entropy(*leaves), whole)


def swapped():
    """With the stream in fp32 and the rest in bf16, as autocast has it on a GPU, or all in fp32: the same loss."""
    model, batch = make(TINY), next(batches(TINY, 1))
    loss = model(*batch)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with replaced(model, FUSED) as rows:
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
    return Table("replaced", [row for row in rows if "blocks.1" not in row["module"]])


def compiles():
    """One graph, in it each operator, and compiled gradients are eager's."""
    model, batch = make(TINY), next(batches(TINY, 1))
    with replaced(model, FUSED):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="inductor" if GPU else "aot_eager", fullgraph=True)
        gradients = (torch.autograd.grad(f(*batch), list(model.parameters())) for f in (compiled, model))
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def same_curve():
    """Twenty steps of the tiny GPT with ours, from the same seed on the same batches: the same loss, step by step."""
    if GPU:
        raise Unsupported("in 16 bits 32 tokens a step say little: lesson 11e compares 200 steps of a large model")
    model = make(TINY)
    with replaced(model, FUSED):
        ours = train(model, TINY)
    torch.testing.assert_close(ours, train(make(TINY), TINY), rtol=1e-4, atol=0)  # rounding: 1e-6, see TINY


LESSON = Steps((operators_are_sound, swapped, compiles, same_curve), alone=GPU, nightly=(same_curve,))

if __name__ == "__main__":
    LESSON.main()
