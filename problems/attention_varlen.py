"""Attention of sequences of different lengths, packed one behind the other, and its gradient.

q [total_q, H, D], k [total_k, H_kv, D], v [total_k, H_kv, D_v]; cu_q, cu_k [B + 1] int32: sequence b has the rows
cu[b] to cu[b + 1] - 1. cu_k is None where keys have the lengths of the queries. longest_q, longest_k: the longest
lengths. Within a sequence all is as in problems/attention.py: o [total_q, H, D_v] and lse [H, total_q].

Lengths are written as words: "3x512+7" is three sequences of 512 and one of 7.
"""

from importlib import import_module
from itertools import pairwise

from lessonkit import DEVICE, Problem, Refusal, Work, case

import torch

from problems import attention as heads


def lengths_of(words):
    """The lengths that "3x512+7" stands for."""
    parts = (part.split("x") for part in words.split("+"))
    return [int(length) for *count, length in parts for _ in range(int(*count) if count else 1)]


def _sequences(cu_q, cu_k):
    """(rows of queries, rows of keys) of each."""
    ends = [cu.tolist() for cu in (cu_q, cu_q if cu_k is None else cu_k)]
    starts = zip(*map(pairwise, ends), strict=True)
    return [(slice(*of_q), slice(*of_k)) for of_q, of_k in starts]


def _as_heads(t):
    return t.transpose(0, 1)[None]


def _as_rows(t):
    return t[0].transpose(0, 1)


def reference(q, k, v, cu_q, cu_k, longest_q, longest_k, causal=False, window=None, scale=None, softcap=None):
    """A sequence at a time."""
    o, lse = q.new_empty(*q.shape[:2], v.shape[2]), []
    for rows, keys in _sequences(cu_q, cu_k):
        found = heads.reference(*map(_as_heads, (q[rows], k[keys], v[keys])), causal, window, scale, softcap)
        o[rows] = _as_rows(found[0])
        lse.append(found[1][0])
    wide = torch.promote_types(q.dtype, torch.float32)
    return o, torch.cat(lse, 1) if lse else torch.empty(q.shape[1::-1], dtype=wide, device=q.device)


def _cu(words):
    return torch.tensor([0, *lengths_of(words)], device=DEVICE).cumsum(0).to(torch.int32)


def inputs(
    lengths, H, D, keys=None, H_kv=None, D_v=None, causal=False, window=None, scale=None, dtype=torch.float32
):  # fmt: skip
    # As in problems/attention.py: scores are far from 0 and grow along the keys.
    of_q, of_k = lengths_of(lengths), lengths_of(keys or lengths)
    q, k, v, *_ = heads.inputs(1, H, sum(of_q), D, S_k=sum(of_k), H_kv=H_kv, D_v=D_v, layout="bshd", dtype=dtype)
    return _packed(q, k, v, lengths, keys, causal, window, scale)


def random_inputs(
    lengths, H, D, keys=None, H_kv=None, D_v=None, causal=False, window=None, scale=None, dtype=torch.float32
):  # fmt: skip
    """Scores without a trend: what libraries are timed on."""
    total_q, total_k = sum(lengths_of(lengths)), sum(lengths_of(keys or lengths))
    shapes = (total_q, H, D), (total_k, H_kv or H, D), (total_k, H_kv or H, D_v or D)
    q, k, v = (_as_heads(torch.randn(shape, device=DEVICE).to(dtype)) for shape in shapes)
    return _packed(q, k, v, lengths, keys, causal, window, scale)


def _packed(q, k, v, lengths, keys, causal, window, scale):
    cu_k, longest = keys and _cu(keys), [max(lengths_of(words)) for words in (lengths, keys or lengths)]
    return *map(_as_rows, (q, k, v)), _cu(lengths), cu_k, *longest, causal, window, scale


def work(lengths, H, D, dtype, keys=None, H_kv=None, D_v=None, causal=False, window=None, **_):
    pairs = _pairs(lengths, keys, causal, window)
    columns, rows = D + (D_v or D), H * sum(lengths_of(lengths)) + (H_kv or H) * sum(lengths_of(keys or lengths))
    return Work(bytes=rows * columns * dtype.itemsize + 4 * H * sum(lengths_of(lengths)), flops=2 * H * columns * pairs)


def _pairs(lengths, keys, causal, window):
    both = zip(lengths_of(lengths), lengths_of(keys or lengths), strict=True)
    return sum(heads.pairs(S_q, S_k, causal, window) for S_q, S_k in both)


def a_sequence_is_alone(rung):
    """NaN and inf of one sequence stay there, also where a tile runs into the next: to the bit."""
    q, k, v, cu, *rest = inputs("50+70+130", 2, 16, causal=True, dtype=torch.float16)
    before = rung(q, k, v, cu, *rest)
    for value in (torch.nan, torch.inf):
        others = [t.clone() for t in (q, k, v)]
        for t in others:
            t[:50], t[120:] = value, value
        after = rung(*others, cu, *rest)
        assert torch.equal(after[0][50:120], before[0][50:120])
        assert torch.equal(after[1][:, 50:120], before[1][:, 50:120])


# ---- Peers ---------------------------------------------------------------------------------------------------------
# cuDNN is none: for packed sequences PyTorch builds its graph in each call, and the host takes far longer than the GPU.


def _both(cu_q, cu_k):
    return cu_q, cu_q if cu_k is None else cu_k


def _torch_flash(q, k, v, cu_q, cu_k, longest_q, longest_k, causal=False, window=None, scale=None):
    """What torch.nn.attention.varlen calls: FlashAttention-2."""
    o, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *_both(cu_q, cu_k), longest_q, longest_k, 0.0, causal, False, scale=scale,
        window_size_left=window and window - 1, window_size_right=None,
    )  # fmt: skip
    return o, lse


def _torch_flash_backward(grad_out, q, k, v, out, lse, cu_q, cu_k, longest_q, longest_k, causal, window, scale):
    zero = torch.zeros((), dtype=torch.uint64, device=q.device)  # no dropout
    return torch.ops.aten._flash_attention_backward(
        grad_out, q, k, v, out, lse, *_both(cu_q, cu_k), longest_q, longest_k, 0.0, causal, zero, zero, scale=scale,
        window_size_left=window and window - 1, window_size_right=None,
    )  # fmt: skip


def fa4(q, k, v, cu_q, cu_k, longest_q, longest_k, causal=False, window=None, scale=None):
    cu_q, cu_k = _both(cu_q, cu_k)
    return import_module("flash_attn.cute").flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest_q, max_seqlen_k=longest_k,
        softmax_scale=scale, causal=causal, window_size=(window and window - 1, None), return_lse=True,
    )  # fmt: skip


def fa4_backward(grad_out, q, k, v, out, lse, cu_q, cu_k, longest_q, longest_k, causal, window, scale):
    cu_q, cu_k = _both(cu_q, cu_k)
    return import_module("flash_attn.cute.interface")._flash_attn_bwd(
        q, k, v, out, grad_out, lse, softmax_scale=scale, causal=causal, window_size_left=window and window - 1,
        cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest_q, max_seqlen_k=longest_k,
    )[:3]  # fmt: skip


# ---- The problems --------------------------------------------------------------------------------------------------


def _bad(**change):
    names = "q", "k", "v", "cu_q", "cu_k", "longest_q", "longest_k"
    given = dict(zip(names, inputs("3+5", 4, 16, keys="3+5"), strict=False))
    return [change[name](t) if name in change else t for name, t in given.items()]


# fmt: off
REFUSES = (
    Refusal("three heads for two", lambda f: f(*_bad(q=lambda t: t[:, :3], k=lambda t: t[:, :2], v=lambda t: t[:, :2])),
            ValueError, "q has 3 heads, k 2"),
    Refusal("head_dim of k", lambda f: f(*_bad(k=lambda t: t[..., :8])), ValueError, "head_dim"),
    Refusal("a value too few", lambda f: f(*_bad(v=lambda t: t[1:])), ValueError, "v has shape"),
    Refusal("two dtypes", lambda f: f(*_bad(k=torch.Tensor.half)), TypeError, "k is torch.float16"),
    Refusal("long lengths", lambda f: f(*_bad(cu_q=torch.Tensor.long)), TypeError, "int64"),
    Refusal("a sequence without keys' entry", lambda f: f(*_bad(cu_k=lambda t: t[:2])), ValueError, "B \\+ 1 each"),
    Refusal("a window without causal", lambda f: f(*_bad(), window=4), ValueError, "needs causal=True"),
)
# fmt: on

CHECKS = (
    case("no rows at all", lengths="2x0", H=2, D=16),
    case("sequences of one", lengths="70x1", H=2, D=16, causal=True),
    case("empty ones, one past a tile, grouped heads", lengths="5+0+129+1+0", H=4, D=16, H_kv=2, causal=True),
    case("no keys, no queries, more queries than keys", lengths="5+0+70", keys="0+9+37", H=2, D=16, causal=True),
    case("one long and many short", lengths="300+40x3", H=1, D=16, causal=True),
    case("equal lengths, all keys", lengths="3x96", H=2, D=24),
    case("other lengths of keys, a window, D_v of 40", lengths="67+130", keys="90+133", H=2, D=24, H_kv=1, D_v=40,
         causal=True, window=50),
    case("D = 256, a scale", lengths="40+3", H=1, D=256, scale=0.3),
    case("more sequences than a program counts at a time", lengths="300x2+33", H=1, D=16, causal=True),
)  # fmt: skip

PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=work,
    checks=CHECKS,
    peers={"torch varlen": _torch_flash, "FA4": fa4},
    properties=(a_sequence_is_alone,),
    refuses=REFUSES,
)


def reference_backward(
    grad_out, q, k, v, out, lse, cu_q, cu_k, longest_q, longest_k, causal=False, window=None, scale=None
):  # fmt: skip
    """dq as q, dk as k, dv as v; a sequence at a time."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for rows, keys in _sequences(cu_q, cu_k):
        of_q = [_as_heads(t[rows]) for t in (grad_out, q, out)]
        found = heads.reference_backward(
            *of_q[:2], _as_heads(k[keys]), _as_heads(v[keys]), of_q[2], lse[None, :, rows], causal, window, scale
        )
        dq[rows], dk[keys], dv[keys] = map(_as_rows, found)
    return dq, dk, dv


def inputs_backward(*sizes, dtype=torch.float32, **options):
    # As in the forward; grad_out has a mean, so that delta is large, and leaving it out shows.
    return _with_gradient(0.5, *inputs(*sizes, dtype=dtype, **options))


def random_gradient(*sizes, dtype=torch.float32, **options):
    return _with_gradient(0.0, *random_inputs(*sizes, dtype=dtype, **options))


def _with_gradient(mean, q, k, v, *given):
    grad_out = (torch.randn(*q.shape[:2], v.shape[2], device=DEVICE) + mean).to(q.dtype)
    if DEVICE.type == "meta":
        return grad_out, q, k, v, torch.empty_like(grad_out), torch.empty(q.shape[1::-1], device=DEVICE), *given
    wide = torch.float32 if DEVICE.type == "cuda" else torch.float64
    out, lse = reference(*(t.to(wide) for t in (q, k, v)), *given)
    return grad_out, q, k, v, out.to(q.dtype), lse.float(), *given


def work_backward(lengths, H, D, dtype, keys=None, H_kv=None, D_v=None, causal=False, window=None, **_):
    """Q, O, dO, K, V and lse read, dQ, dK and dV written; five matmuls for each visible pair."""
    total_q, total_k, D_v = sum(lengths_of(lengths)), sum(lengths_of(keys or lengths)), D_v or D
    bytes = 2 * (D + D_v) * (H * total_q + (H_kv or H) * total_k) * dtype.itemsize + 4 * H * total_q
    return Work(bytes=bytes, flops=H * (6 * D + 4 * D_v) * _pairs(lengths, keys, causal, window))


PROBLEM_BACKWARD = Problem(
    reference=reference_backward,
    inputs=inputs_backward,
    work=work_backward,
    checks=CHECKS,
    peers={"torch varlen": _torch_flash_backward, "FA4": fa4_backward},
    factor=2,  # as in problems/attention.py
)
