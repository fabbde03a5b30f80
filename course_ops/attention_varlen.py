"""Attention of sequences of different lengths that are packed into one tensor; forward and backward.

The docstring of `attention_varlen` has the conventions of all functions here. lse is [H, total_q].
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from course_ops._common import FLOATS, expect, expect_device, expect_int, on_device, runs_kernel
from course_ops._registration import cast_under_autocast, once_differentiable
from course_ops.attention import (
    Call,
    Gradient,
    _expect_types,
    _lse_dtype,
    at_most,
    expect_from_forward,
    launch_backward,
    launch_forward,
    visible_pairs,
)
from course_ops.attention import _checked as _checked_heads
from course_ops.attention import _computed as _computed_heads
from course_ops.attention import _computed_gradient as _computed_gradient_of_heads
from course_ops.kernels.attention_tiles import empty_out
from course_ops.kernels.sequences import Sequences


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """out [total_q, H, D_v] of packed q [total_q, H, D], k [total_k, H_kv, D], v [total_k, H_kv, D_v].

    The sequences lie one behind the other. Sequence b has rows cu_seqlens[b] to cu_seqlens[b + 1] - 1. It may have no
    queries, no keys, or neither. A query sees only keys of its own sequence.
    cu_seqlens_q, cu_seqlens_k: [B + 1] int32 on the same device, ascending from 0 to total_q and total_k; never copied
    to the host. Where queries and keys have the same lengths, pass the same tensor: that case is faster.
    max_seqlen_q, max_seqlen_k: the longest lengths, by which a kernel is chosen. Results do not depend on them.
    On a GPU lengths are not checked: if cu_seqlens do not ascend from 0 to the totals, the call is undefined.

    Differentiable once in q, k and v. NaN and inf stay in their sequence.
    dtypes, strides, heads, options, autocast, errors and sources as in course_ops.attention.
    """
    _expect_types(causal, window, scale, softcap, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    for name, t, heads in (("q", q, "H"), ("k", k, "H_kv"), ("v", v, "H_kv")):
        if t.ndim != 3:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}, expected [total, {heads}, head_dim]: pack the sequences one "
                "behind the other, without a dimension of their own"
            )
    for name, n in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not isinstance(n, int | torch.SymInt):
            raise TypeError(f"{name} is {n!r}, expected an int: a number on the host, not a tensor")
        expect_int(**{name: n})
    options = causal, window, scale, softcap
    return torch.ops.course_ops.attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options
    )[0]


def _as_heads(t: Tensor) -> Tensor:
    """A view [1, H, total, D] of [total, H, D]."""
    return t.transpose(0, 1)[None]


def _as_rows(t: Tensor) -> Tensor:
    """The view back."""
    return t[0].transpose(0, 1)


def _checked(q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, causal, window, scale, softcap, **more):
    """The scale, or the error that a bad argument deserves. more: what else has q's dimensions and dtype."""
    expect(q=q, k=k, v=v, **more, ndim=3, same_dtype=True, dtypes=(*FLOATS, torch.float64))
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"v has shape {tuple(v.shape)}, but k has {tuple(k.shape)}: a value belongs to each key")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k is {tuple(k.shape)}, q {tuple(q.shape)}: head_dim (last) must agree")
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        expect(**{name: cu}, ndim=1, dtypes=(torch.int32,))
    expect_device(q=q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    (entries_q,), (entries_k,) = cu_seqlens_q.shape, cu_seqlens_k.shape
    if entries_q != entries_k or entries_q < 1:
        raise ValueError(f"cu_seqlens_q has {entries_q} entries, cu_seqlens_k {entries_k}: expected B + 1 each")
    if min(longest_q, longest_k) < 0:
        raise ValueError(f"max_seqlen_q = {longest_q}, max_seqlen_k = {longest_k}: expected the longest lengths")
    return _checked_heads(*map(_as_heads, (q, k, v)), causal, window, scale, softcap)


def _checked_gradient(dout, q, k, v, out, lse, *given):
    """As _checked, for a backward."""
    scale = _checked(q, k, v, *given, dout=dout, out=out)
    expect_from_forward(dout, q, v, out, lse, q.shape[1::-1], "attention_varlen returned it")
    return scale


@custom_op("course_ops::attention_varlen", mutates_args=())
def _attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    causal: bool = False, window: int | None = None, scale: float | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    given = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    scale = _checked(q, k, v, *given, causal, window, scale, softcap)
    if not runs_kernel(q):
        return _computed(q, k, v, given, causal, window, scale, softcap)
    window = at_most(window, len(k))
    with on_device(q):
        call = Call(*map(_as_heads, (q, k, v)), causal, window, scale, softcap, given.contiguous())
        out, lse = launch_forward(call)
    return _as_rows(out), lse[0]


@custom_op("course_ops::attention_varlen_backward", mutates_args=())
def _attention_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    causal: bool = False, window: int | None = None, scale: float | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    given = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    scale = _checked_gradient(dout, q, k, v, out, lse, *given, causal, window, scale, softcap)
    if not runs_kernel(q):
        return _computed_gradient(dout, q, k, v, out, lse, given, causal, window, scale, softcap)
    window = at_most(window, len(k))
    with on_device(q):
        heads = map(_as_heads, (dout, q, k, v, out))
        call = Gradient(*heads, lse.contiguous()[None], causal, window, scale, softcap, given.contiguous())
        dq, dk, dv = launch_backward(call)
    return _as_rows(dq), _as_rows(dk), _as_rows(dv)


@_attention_varlen.register_fake
def _(q, k, v, cu_q, cu_k, longest_q, longest_k, causal=False, window=None, scale=None, softcap=None):
    _checked(q, k, v, cu_q, cu_k, longest_q, longest_k, causal, window, scale, softcap)
    return _empty_out(q, v), q.new_empty(q.shape[1::-1], dtype=_lse_dtype(q))


@_attention_varlen_backward.register_fake
def _(
    dout, q, k, v, out, lse, cu_q, cu_k, longest_q, longest_k, causal=False, window=None, scale=None, softcap=None
):  # fmt: skip
    _checked_gradient(dout, q, k, v, out, lse, cu_q, cu_k, longest_q, longest_k, causal, window, scale, softcap)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _empty_out(q: Tensor, v: Tensor) -> Tensor:
    return _as_rows(empty_out(_as_heads(q), v.shape[-1]))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:5])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.options = inputs[5:]


def _gradients(ctx, dout, _dlse):
    if dout is None:
        return (None,) * 11
    return *torch.ops.course_ops.attention_varlen_backward(dout, *ctx.saved_tensors, *ctx.options), *(None,) * 8


_attention_varlen.register_autograd(_gradients, setup_context=_save)
once_differentiable(
    _attention_varlen_backward,
    "attention_varlen",
    "torch.nn.functional.scaled_dot_product_attention for each sequence, inside "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)",
)
cast_under_autocast(_attention_varlen, "q", "k", "v")
cast_under_autocast(_attention_varlen_backward, "dout", "q", "k", "v", "out")


# ---- FLOPs: of the lengths, if these can be read -------------------------------------------------------------------


def _pairs(cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int, causal: bool, window: int | None) -> int:
    """Visible pairs of all sequences. Of tensors without values: as if each were as long as the longest."""
    if cu_q.device.type == "meta" or isinstance(cu_q, FakeTensor):
        return (cu_q.shape[0] - 1) * visible_pairs(longest_q, longest_k, causal, window)
    lengths = zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True)
    return sum(visible_pairs(S_q, S_k, causal, window) for S_q, S_k in lengths)


@register_flop_formula(torch.ops.course_ops.attention_varlen, get_raw=True)
def _(q, k, v, cu_q, cu_k, longest_q, longest_k, causal=False, window=None, *args, **kwargs) -> int:
    """Two matmuls for each visible pair."""
    return q.shape[1] * 2 * (q.shape[2] + v.shape[2]) * _pairs(cu_q, cu_k, longest_q, longest_k, causal, window)


@register_flop_formula(torch.ops.course_ops.attention_varlen_backward, get_raw=True)
def _(dout, q, k, v, out, lse, cu_q, cu_k, longest_q, longest_k, causal=False, window=None, *args, **kwargs) -> int:
    """Five matmuls for each visible pair: three of D columns, two of D_v."""
    columns = 6 * q.shape[2] + 4 * v.shape[2]
    return q.shape[1] * columns * _pairs(cu_q, cu_k, longest_q, longest_k, causal, window)


# ---- CPU tensors: PyTorch, a sequence at a time --------------------------------------------------------------------


def _rows_of_each(q: Tensor, k: Tensor, given: Sequences) -> list[tuple[slice, slice]]:
    """Each sequence's rows of queries and of keys."""
    for name, cu, total, longest in (
        ("cu_seqlens_q", given.q, len(q), given.longest_q),
        ("cu_seqlens_k", given.k, len(k), given.longest_k),
    ):
        ends = cu.tolist()
        if ends != sorted(ends) or ends[0] != 0 or ends[-1] != total:
            raise ValueError(f"{name} is {ends}: expected 0 <= ... <= {total}, ascending, from 0 to the number of rows")
        if max((end - begin for begin, end in pairwise(ends)), default=0) > longest:
            raise ValueError(
                f"{name} is {ends}, but {name.replace('cu_seqlens', 'max_seqlen')} is {longest}: pass more"
            )
    pairs = zip(pairwise(given.q.tolist()), pairwise(given.k.tolist()), strict=True)
    return [(slice(*of_q), slice(*of_k)) for of_q, of_k in pairs]


def _computed(q, k, v, given, *options):
    """out and lse."""
    out, lse = _empty_out(q, v), torch.empty(q.shape[1::-1], dtype=_lse_dtype(q))
    for rows, keys in _rows_of_each(q, k, given):
        found = _computed_heads(_as_heads(q[rows]), _as_heads(k[keys]), _as_heads(v[keys]), *options)
        out[rows], lse[:, rows] = _as_rows(found[0]), found[1][0]
    return out, lse


def _computed_gradient(dout, q, k, v, out, lse, given, *options):
    """dq as q, dk and dv as k and v."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for rows, keys in _rows_of_each(q, k, given):
        of_q = [_as_heads(t[rows]) for t in (dout, q, out)]
        of_k = [_as_heads(t[keys]) for t in (k, v)]
        found = _computed_gradient_of_heads(*of_q[:2], *of_k, of_q[2], lse[None, :, rows], *options)
        dq[rows], dk[keys], dv[keys] = map(_as_rows, found)
    return dq, dk, dv
