"""Operators of our own: attention, LayerNorm, GELU and cross-entropy as PyTorch sees them
======================================================================================
A kernel becomes an operator by three declarations (day 1, lesson 8): a schema, read from type hints; a fake, which says
shapes, dtypes and strides without data; and a backward, here an operator itself, so that a compiler sees one node in
either direction. Two more, for whoever profiles: its FLOPs, which a FLOP counter asks for, and its bytes, which are
those of its arguments and results.

What each keeps for its backward, a token, with D features, H heads and V classes in bf16:

    attention        q, k, v, out and lse    8 D + 4 H bytes; the T x T weights are computed again
    layernorm        x, mean, rstd           2 D + 8 bytes; y is computed again, if anybody wants it
    gelu             x                       2 bytes a feature
    cross_entropy    logits, lse             2 V + 4 bytes; the softmax, 4 V more in eager PyTorch, is computed again

An operator costs about 12 us of the host's time a call, 22 us with a gradient (day 1's reports): nothing where a kernel
takes 100 us, and all there is to see where it takes 5.

You will learn: operators that survive autograd, torch.compile and opcheck; what to save; results that share memory.
Run it:    python day4_replace_op/lesson10c_operators.py
"""

from lessonkit import DEVICE, Steps

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.library import custom_op, opcheck
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from day2_triton_basics.lesson02_gelu import gelu_backward_kernel, gelu_lean
from day2_triton_basics.lesson07b_layernorm_lengths import layernorm_forward
from day2_triton_basics.lesson08b_layernorm_backward_lengths import layernorm_backward as norm_backward
from day2_triton_basics.lesson12b_cross_entropy_wide import cross_entropy_split
from day2_triton_basics.lesson13_cross_entropy_backward import backward_wide
from day4_replace_op import lesson06e_flash_backward_sum as hopper_backward
from day4_replace_op import lesson06g_flash_hopper_diagonal as hopper


@custom_op("course::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """q [B, H, S_q, D], k and v [B, H_kv, S_k, D] -> out as q, lse [B, H, S_q] in fp32; causal at the lower right."""
    return hopper.attention(q, k, v, causal, window, scale)


@custom_op("course::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, window: int | None, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return hopper_backward.attention_backward(dout, q, k, v, out, lse, causal, window, scale)


@attention.register_fake
def _(q, k, v, causal, window=None, scale=None):
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@attention_backward.register_fake
def _(dout, q, k, v, *saved):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def only_differentiable(ctx, *others):
    """Of an operator's results these have no gradient, and none is made up: autograd would fill it with zeros."""
    ctx.mark_non_differentiable(*others)
    ctx.set_materialize_grads(False)


def _save_attention(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output)
    only_differentiable(ctx, output[1])
    ctx.options = inputs[3:]


def _attention_gradients(ctx, dout, _):
    return *attention_backward(dout, *ctx.saved_tensors, *ctx.options), None, None, None


attention.register_autograd(_attention_gradients, setup_context=_save_attention)


@register_flop_formula(torch.ops.course.attention)
def _(q, k, v, *options, out_shape=None, **named):
    return 4 * q[0] * q[1] * q[2] * k[2] * q[3]


@register_flop_formula(torch.ops.course.attention_backward)
def _(dout, q, k, v, *saved, out_shape=None, **named):
    return 10 * q[0] * q[1] * q[2] * k[2] * q[3]


@custom_op("course::layernorm", mutates_args=())
def layernorm(x: Tensor, w: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., N], w and b [N] -> y as x; mean and rstd of each row in fp32."""
    y, mean, rstd = layernorm_forward(x.contiguous().view(-1, len(w)), w, b, eps)
    return y.view(x.shape), mean, rstd


@custom_op("course::layernorm_backward", mutates_args=())
def layernorm_backward(dy: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db = norm_backward(*(t.contiguous().view(-1, len(w)) for t in (dy, x)), w, mean, rstd)
    return dx.view(x.shape), dw.clone(), db.clone()  # two halves of one tensor, and results must not share memory


@layernorm.register_fake
def _(x, w, b, eps):
    rows = x.shape[:-1].numel()
    return x.new_empty(x.shape), *(x.new_empty(rows, dtype=torch.float32) for _ in range(2))


@layernorm_backward.register_fake
def _(dy, x, w, mean, rstd):
    return x.new_empty(x.shape), torch.empty_like(w), torch.empty_like(w)


def _save_layernorm(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2], *output[1:])
    only_differentiable(ctx, *output[1:])


layernorm.register_autograd(
    lambda ctx, dy, *_: (*layernorm_backward(dy, *ctx.saved_tensors), None), setup_context=_save_layernorm
)


@custom_op("course::gelu", mutates_args=())
def gelu(x: Tensor) -> Tensor:
    """[...] -> [...], the tanh form."""
    return gelu_lean(x.contiguous())


@custom_op("course::gelu_backward", mutates_args=())
def gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        grid = (triton.cdiv(x.numel(), 1024),)
        gelu_backward_kernel[grid](x.contiguous(), dy.contiguous(), dx, x.numel(), BLOCK=1024)
    return dx


gelu.register_fake(lambda x: x.new_empty(x.shape))
gelu_backward.register_fake(lambda dy, x: x.new_empty(x.shape))
gelu.register_autograd(
    lambda ctx, dy: gelu_backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@custom_op("course::cross_entropy", mutates_args=())
def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """logits [M, V], targets [M] -> loss and lse [M] in fp32; a target of -100 has no loss."""
    loss, lse = cross_entropy_split(logits, targets)
    return loss.clone(), lse.clone()


@custom_op("course::cross_entropy_backward", mutates_args=())
def cross_entropy_backward(dloss: Tensor, logits: Tensor, targets: Tensor, lse: Tensor) -> Tensor:
    return backward_wide(dloss.contiguous(), logits, targets, lse)


@cross_entropy.register_fake
def _(logits, targets):
    return tuple(logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(2))


cross_entropy_backward.register_fake(lambda dloss, logits, targets, lse: torch.empty_like(logits))


def _save_cross_entropy(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])
    only_differentiable(ctx, output[1])


cross_entropy.register_autograd(
    lambda ctx, dloss, _: (cross_entropy_backward(dloss, *ctx.saved_tensors), None), setup_context=_save_cross_entropy
)


def mean_loss(logits, targets):
    """As F.cross_entropy: the mean over all tokens that have a target."""
    return cross_entropy(logits, targets)[0].sum() / (targets != -100).sum()


# ---- Claims -------------------------------------------------------------------------------------------------------


def _operator_calls():
    """An operator, its arguments, and what PyTorch answers; sizes at which no tile is full."""
    q, k, v = (torch.randn(2, h, s, 64, device=DEVICE) for h, s in ((4, 3), (2, 5), (2, 5)))
    x, w, b = torch.randn(2, 3, 37, device=DEVICE), torch.rand(37, device=DEVICE) + 0.5, torch.randn(37, device=DEVICE)
    logits, targets = torch.randn(5, 131, device=DEVICE), torch.tensor([0, 130, -100, 7, 7], device=DEVICE)
    seen = torch.ones(3, 5, dtype=torch.bool, device=DEVICE).tril(2)  # lower right: is_causal=True would be upper left
    yield attention, (q, k, v, True), F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    yield layernorm, (x, w, b, 1e-5), F.layer_norm(x, (37,), w, b)
    yield gelu, (x,), F.gelu(x, approximate="tanh")
    yield cross_entropy, (logits, targets), F.cross_entropy(logits, targets, reduction="none")


def operators_are_sound():
    """Each answers as PyTorch does, and opcheck finds schema, fake and gradient in agreement with what it does."""
    for op, args, expected in _operator_calls():
        found = op(*args)
        torch.testing.assert_close(found if isinstance(found, Tensor) else found[0], expected, rtol=1e-4, atol=1e-5)
        leaves = [a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        assert set(opcheck(op, tuple(leaves)).values()) == {"SUCCESS"}


def work_is_known():
    """A FLOP counter sees ours as it sees SDPA: 4 S^2 D a head forward and, with QK^T again, 10 S^2 D backward."""
    q, k, v = (torch.randn(1, 2, 16, 64, device=DEVICE, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as flops:
        out, _ = attention(q, k, v, True)
        out.sum().backward()
    assert flops.get_total_flops() == 14 * 2 * 16**2 * 64


LESSON = Steps((operators_are_sound, work_is_known))

if __name__ == "__main__":
    LESSON.main()
