"""Attention: softmax(scale q k^T) v, with grouped heads, causal masks and windows; forward and backward.

The docstring of `attention` has the conventions of all functions here.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from course_ops._common import (
    FLOATS,
    Unsupported,
    expect,
    expect_bool,
    expect_device,
    expect_int,
    expect_number,
    expect_tensor,
    on_device,
    runs_kernel,
)
from course_ops._registration import cast_under_autocast, once_differentiable
from course_ops.kernels import attention_backward as portable_backward
from course_ops.kernels import attention_backward_192_hopper as backward_192
from course_ops.kernels import attention_backward_hopper as hopper_backward
from course_ops.kernels import attention_backward_wide_hopper as wide_backward
from course_ops.kernels import attention_decode as decode
from course_ops.kernels import attention_forward as portable
from course_ops.kernels import attention_forward_hopper as hopper
from course_ops.kernels.attention_tiles import empty_out
from course_ops.kernels.sequences import Sequences

MAX_HEAD_DIM = 256


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """out [B, H, S_q, D_v] of q [B, H, S_q, D], k [B, H_kv, S_k, D], v [B, H_kv, S_k, D_v]; differentiable once.

    All three have one dtype: fp32, fp16 or bf16, on the CPU float64 too. Any strides, D and D_v from 1 to 256; D_v may
    differ from D. Under torch.autocast all three are cast to its dtype, except float64. The matmuls of fp32 are exact
    unless torch.set_float32_matmul_precision allows TF32.

    H is a multiple of H_kv, and query head h reads head h * H_kv // H of k and v. Positions end together: query i
    stands at key i + S_k - S_q.

    - causal: query i sees keys up to i + S_k - S_q. So the mask is aligned at the lower right corner. PyTorch's
      is_causal is aligned at the upper left. For S_q = S_k they are the same.
    - window: of these keys a query sees only the last `window`. It needs causal=True.
    - scale: a positive number. None stands for 1 / sqrt(D).
    - softcap: scores become softcap * tanh(scores / softcap) before they are masked (Gemma 2). It is positive, or None
      for scores as they are. On Hopper tanh has a relative error up to 2^-11, and the portable kernel computes the
      backward of head sizes above 128.

    A query that sees no key has out = 0 and no gradient.

    Raises TypeError for a dtype or the type of an option, ValueError for a shape, a device or a value, Unsupported for
    a head size.

    Under torch.use_deterministic_algorithms the gradient of q is the same to the bit each time, and slower. A FLOP
    counter is told 2 D + 2 D_v FLOPs forward and 6 D + 4 D_v backward for each pair of a query and a key that it sees.

    Sources: Dao et al. 2022, FlashAttention; Dao 2023, FlashAttention-2; Shah et al. 2024, FlashAttention-3.
    """
    _expect_types(causal, window, scale, softcap, q=q, k=k, v=v)
    return torch.ops.course_ops.attention(q, k, v, causal, window, scale, softcap)[0]


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """As attention, with lse [B, H, S_q] in fp32 (float64 for float64), which has no gradient.

    lse is the natural logarithm of the sum of a row's exponentials. A query that sees no key has lse = -inf.
    Results over parts of the keys are merged by lse: lse = log(sum exp(lse_i)), out = sum exp(lse_i - lse) out_i.
    Conventions, errors and sources as in course_ops.attention.
    """
    _expect_types(causal, window, scale, softcap, q=q, k=k, v=v)
    return torch.ops.course_ops.attention(q, k, v, causal, window, scale, softcap)


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients dq, dk and dv of attention, in the shapes of q, k and v.

    dout is the gradient of out, in its shape. out and lse are what attention_forward returned for q, k and v. They may
    also be merged over more keys than k has, as in ring attention. Then dk and dv are the gradients of the keys in k,
    and dq is the part of q's gradient that comes from these keys.
    Conventions, errors and sources as in course_ops.attention.
    """
    _expect_types(causal, window, scale, softcap, dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    return torch.ops.course_ops.attention_backward(dout, q, k, v, out, lse, causal, window, scale, softcap)


# ---- Dispatch: FORWARD and BACKWARD list the kernels in order, and the first whose condition holds is launched -----
#
#     forward     condition
#     decode      few queries (H / H_kv * S_q <= 64 rows) of 64 keys or more; no window, no packed sequences
#     hopper      sm_90, 16 bits, D and D_v multiples of 8, strides that TMA takes
#     portable    none: it runs from sm_80 on, in fp32 too, with D and D_v <= 256 and any strides
#
#     backward    condition
#     hopper      as forward, D and D_v <= 128; not under torch.use_deterministic_algorithms, since the order in which
#                 this kernel adds up dQ varies
#     hopper_192  as hopper, D from 136 to 192 and D_v up to 128; no softcap
#     wide        as forward, D or D_v from 136 to 256; no softcap
#     portable    none
#
# wide and portable are deterministic: their gradients are the same to the bit each time.


class Call(NamedTuple):
    """The arguments of a forward call. sequences: of rows that are packed (attention_varlen), as [1, H, total, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    window: int | None
    scale: float
    softcap: float | None = None
    sequences: Sequences | None = None


class Gradient(NamedTuple):
    """The arguments of a backward call."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    causal: bool
    window: int | None
    scale: float
    softcap: float | None = None
    sequences: Sequences | None = None


def _few_queries(c: Call) -> bool:
    H, S_q, H_kv, S_k = *c.q.shape[1:3], *c.k.shape[1:3]
    return c.sequences is None and c.window is None and H // H_kv * S_q <= decode.most_rows(c.q) and S_k >= 64


def _on_hopper(c: Call) -> bool:
    return hopper.takes(c.q, c.k, c.v)


def _gradient_on_hopper(c: Gradient) -> bool:
    nondeterministic = not torch.are_deterministic_algorithms_enabled()
    return nondeterministic and hopper_backward.takes(*c[:4])


def _gradient_of_192(c: Gradient) -> bool:
    nondeterministic = not torch.are_deterministic_algorithms_enabled()
    return nondeterministic and c.softcap is None and backward_192.takes(*c[:4])


def _gradient_of_long_heads(c: Gradient) -> bool:
    return c.softcap is None and wide_backward.takes(*c[:4])


FORWARD: tuple[tuple[str, Callable[[Call], bool], Callable[[Call], tuple[Tensor, Tensor]]], ...] = (
    ("decode", _few_queries, lambda c: decode.attention_decode(*c[:4], c.scale, softcap=c.softcap)),
    ("hopper", _on_hopper, lambda c: hopper.attention_forward(*c)),
    ("portable", lambda c: True, lambda c: portable.attention_forward(*c)),
)
BACKWARD: tuple[tuple[str, Callable[[Gradient], bool], Callable[[Gradient], tuple[Tensor, Tensor, Tensor]]], ...] = (
    ("hopper", _gradient_on_hopper,
     lambda c: hopper_backward.attention_backward(*c[:6], c.causal, c.scale, c.window, *c[9:])),
    ("hopper_192", _gradient_of_192, lambda c: backward_192.attention_backward(*c[:9], c.sequences)),
    ("wide", _gradient_of_long_heads, lambda c: wide_backward.attention_backward(*c[:9], c.sequences)),
    ("portable", lambda c: True, lambda c: portable_backward.attention_backward(*c)),
)  # fmt: skip


def launch_forward(call: Call) -> tuple[Tensor, Tensor]:
    """out and lse by the first kernel of FORWARD that takes the call."""
    return next(launch for _, takes, launch in FORWARD if takes(call))(call)


def launch_backward(call: Gradient) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv by the first kernel of BACKWARD that takes the call."""
    return next(launch for _, takes, launch in BACKWARD if takes(call))(call)


# ---- The operators -----------------------------------------------------------------------------------------------


def _expect_types(causal, window, scale, softcap, **tensors) -> None:
    """What PyTorch's dispatcher would refuse with a RuntimeError, before it is asked."""
    for name, t in tensors.items():
        expect_tensor(name, t)
    expect_bool(causal=causal)
    if window is not None:
        expect_int(window=window)
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None:
            expect_number(**{name: number})


def _checked(q, k, v, causal, window, scale, softcap, **more) -> float:
    """The scale, or the error that a bad argument deserves. more: what else has q's dimensions and dtype."""
    dtypes = FLOATS if runs_kernel(q) else (*FLOATS, torch.float64)
    expect(q=q, k=k, v=v, **more, ndim=4, same_dtype=True, dtypes=dtypes)
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"v has shape {tuple(v.shape)}, but k has {tuple(k.shape)}: a value belongs to each key")
    (B, H, _, D), (B_kv, H_kv, _, D_kv) = q.shape, k.shape
    if (B_kv, D_kv) != (B, D):
        raise ValueError(f"k is {tuple(k.shape)}, q {tuple(q.shape)}: batch (first) and head_dim (last) must agree")
    if H_kv == 0 or H % H_kv:
        raise ValueError(f"q has {H} heads, k {H_kv}: expected 1 or more in k, and a multiple of them in q")
    if not 0 < D <= MAX_HEAD_DIM:
        raise Unsupported(f"q has head_dim {D}, expected 1 to {MAX_HEAD_DIM}: no kernel has another")
    if not 0 < (D_v := v.shape[-1]) <= MAX_HEAD_DIM:
        raise Unsupported(f"v has head_dim {D_v}, expected 1 to {MAX_HEAD_DIM}: no kernel has another")
    return checked_scale(D, causal, window, scale, softcap)


def checked_scale(D, causal, window, scale, softcap) -> float:
    """What scores are multiplied by, or the error that a bad number deserves."""
    if window is not None and not (causal and window > 0):
        raise ValueError(f"window = {window}, causal = {causal}: a window is 1 or more keys, and needs causal=True")
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale = {scale}, expected a positive number: to negate the scores, pass -q")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap = {softcap}, expected a positive number, or None for scores as they are")
    return 1 / D**0.5 if scale is None else scale  # math.sqrt would compile a graph for each D


def at_most(window: int | None, keys: int) -> int | None:
    """The same window for a kernel, which adds it to positions in int32: no query sees more than all keys."""
    return None if window is None else max(1, min(window, keys))


def _checked_gradient(dout, q, k, v, out, lse, causal, window, scale, softcap) -> float:
    """As _checked, for a backward."""
    scale = _checked(q, k, v, causal, window, scale, softcap, dout=dout, out=out)
    expect_from_forward(dout, q, v, out, lse, q.shape[:-1], "attention returned it for this q and v")
    return scale


def expect_from_forward(dout, q, v, out, lse, lse_shape, origin: str) -> None:
    """Check what a forward gave, and the gradient of it, against q and v. origin: who gives such shapes."""
    expect(lse=lse, dtypes=(_lse_dtype(q),))
    expect_device(q=q, lse=lse)
    of_out = torch.Size((*q.shape[:-1], v.shape[-1]))
    for name, t, shape in (("dout", dout, of_out), ("out", out, of_out), ("lse", lse, lse_shape)):
        if t.shape != shape:
            raise ValueError(f"{name} has shape {tuple(t.shape)}, expected {tuple(shape)}: as {origin}")


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@custom_op("course_ops::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor,
    causal: bool = False, window: int | None = None, scale: float | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    scale = _checked(q, k, v, causal, window, scale, softcap)
    if not runs_kernel(q):
        return _computed(q, k, v, causal, window, scale, softcap)
    with on_device(q):
        return launch_forward(Call(q, k, v, causal, at_most(window, k.shape[2]), scale, softcap))


@custom_op("course_ops::attention_backward", mutates_args=())
def _attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool = False, window: int | None = None, scale: float | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scale = _checked_gradient(dout, q, k, v, out, lse, causal, window, scale, softcap)
    if not runs_kernel(q):
        return _computed_gradient(dout, q, k, v, out, lse, causal, window, scale, softcap)
    window = at_most(window, k.shape[2])
    with on_device(q):
        return launch_backward(Gradient(dout, q, k, v, out, lse.contiguous(), causal, window, scale, softcap))


@_attention.register_fake
def _(q, k, v, causal=False, window=None, scale=None, softcap=None):
    _checked(q, k, v, causal, window, scale, softcap)
    return empty_out(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=_lse_dtype(q))


@_attention_backward.register_fake
def _(dout, q, k, v, out, lse, causal=False, window=None, scale=None, softcap=None):
    _checked_gradient(dout, q, k, v, out, lse, causal, window, scale, softcap)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.options = inputs[3:]


def _gradients(ctx, dout, _dlse):
    if dout is None:
        return (None,) * 7
    return *torch.ops.course_ops.attention_backward(dout, *ctx.saved_tensors, *ctx.options), *(None,) * 4


_attention.register_autograd(_gradients, setup_context=_save)
once_differentiable(
    _attention_backward,
    "attention",
    "torch.nn.functional.scaled_dot_product_attention inside torch.nn.attention.sdpa_kernel(SDPBackend.MATH)",
)
cast_under_autocast(_attention, "q", "k", "v")
cast_under_autocast(_attention_backward, "dout", "q", "k", "v", "out")


# ---- FLOPs --------------------------------------------------------------------------------------------------------


def visible_pairs(S_q: int, S_k: int, causal: bool = False, window: int | None = None) -> int:
    """How many (query, key) pairs are visible. What is masked is no work, though a kernel computes part of it."""
    if not causal:
        return S_q * S_k
    # From the first query that sees a key on, query i sees i + 1 + S_k - S_q keys, up to S_k; at most `window` of them.
    fewest = max(1, S_k - S_q + 1)
    width = S_k if window is None else min(window, S_k)
    growing = max(0, width - fewest + 1)  # queries that see fewer than `width` keys, and the first that sees as many
    full = S_k - max(fewest - 1, width)
    return (fewest + width) * growing // 2 + full * width


@register_flop_formula(torch.ops.course_ops.attention)
def _(q, k, v, causal=False, window=None, scale=None, *args, out_shape=None, **kwargs) -> int:
    """Two matmuls for each visible pair. (PyTorch's own formula counts all pairs, masked or not.)"""
    B, H, S_q, D = q
    return B * H * (2 * D + 2 * v[3]) * visible_pairs(S_q, k[2], causal, window)


@register_flop_formula(torch.ops.course_ops.attention_backward)
def _(dout, q, k, v, out, lse, causal=False, window=None, scale=None, *args, out_shape=None, **kwargs) -> int:
    """Five matmuls for each visible pair, though the portable kernels do seven: three of D columns, two of D_v."""
    B, H, S_q, D = q
    return B * H * (6 * D + 4 * v[3]) * visible_pairs(S_q, k[2], causal, window)


# ---- CPU tensors: PyTorch, a head of k and v at a time, in fp32 or float64 ----------------------------------------


def _hidden(S_q: int, S_k: int, causal: bool, window: int | None) -> Tensor:
    """Which key each query does not see, [S_q, S_k]."""
    ahead = torch.arange(S_k) - (torch.arange(S_q)[:, None] + S_k - S_q)
    hidden = torch.zeros(S_q, S_k, dtype=torch.bool)
    if causal:
        hidden |= ahead > 0
    if window is not None:
        hidden |= ahead <= -window
    return hidden


def _capped(s: Tensor, softcap: float | None) -> Tensor:
    return s if softcap is None else softcap * torch.tanh(s / softcap)


def _computed(q, k, v, causal, window, scale, softcap=None):
    """out and lse."""
    (B, _, S_q, _), (_, H_kv, S_k, _), group, wide = q.shape, k.shape, q.shape[1] // k.shape[1], _lse_dtype(q)
    out, lse = empty_out(q, v.shape[-1]), torch.empty(q.shape[:-1], dtype=wide)
    hidden = _hidden(S_q, S_k, causal, window)
    for b, h in ((b, h) for b in range(B) for h in range(H_kv)):
        heads = slice(h * group, h * group + group)
        s = _capped(q[b, heads].to(wide) @ k[b, h].to(wide).T * scale, softcap).masked_fill(hidden, -math.inf)
        lse[b, heads] = torch.logsumexp(s, -1)
        p = torch.exp(s - lse[b, heads, :, None]).masked_fill(hidden, 0)  # a row without keys: -inf - -inf is NaN
        out[b, heads] = (p @ v[b, h].to(wide)).to(q.dtype)
    return out, lse


def _computed_gradient(dout, q, k, v, out, lse, causal, window, scale, softcap=None):
    """dq as q, dk and dv as k and v."""
    (B, _, S_q, _), (_, H_kv, S_k, _), group, wide = q.shape, k.shape, q.shape[1] // k.shape[1], _lse_dtype(q)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    hidden = _hidden(S_q, S_k, causal, window)
    for b, h in ((b, h) for b in range(B) for h in range(H_kv)):
        heads = slice(h * group, h * group + group)
        q_wide, do_wide = q[b, heads].to(wide), dout[b, heads].to(wide)
        k_wide, v_wide = k[b, h].to(wide), v[b, h].to(wide)
        s = _capped(q_wide @ k_wide.T * scale, softcap)
        p = torch.exp(s - lse[b, heads, :, None]).masked_fill(hidden, 0)
        delta = (do_wide * out[b, heads].to(wide)).sum(-1, keepdim=True)
        ds = p * (do_wide @ v_wide.T - delta) * scale
        if softcap is not None:
            ds *= 1 - (s / softcap).square()  # tanh's derivative
        dq[b, heads] = (ds @ k_wide).to(q.dtype)
        dk[b, h] = torch.einsum("gqk,gqd->kd", ds, q_wide).to(k.dtype)
        dv[b, h] = torch.einsum("gqk,gqd->kd", p, do_wide).to(v.dtype)
    return dq, dk, dv
