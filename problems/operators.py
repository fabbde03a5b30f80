"""How `course_ops` answers the problems: one entry for each public operator and direction, the most important first.

`python -m lessonkit bench ops` times each at the shapes of the zoo beside its peers. A call here is the operator's own
custom op, as the public function calls it after its checks: it gives what the problem asks for (rstd, lse) too.
"""

from functools import lru_cache
from types import SimpleNamespace

from lessonkit import DEVICE, Operator

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from course_ops.add_norm import _add_norm, _add_norm_backward
from course_ops.attention import _attention, _attention_backward
from course_ops.attention_paged import _attention_paged
from course_ops.attention_varlen import _attention_varlen, _attention_varlen_backward
from course_ops.cross_entropy import _cross_entropy, _cross_entropy_backward
from course_ops.dropout import _dropout
from course_ops.gelu import _gelu, _gelu_backward
from course_ops.grouped_matmul import _grouped_matmul
from course_ops.layer_norm import _layer_norm, _layer_norm_backward
from course_ops.linear import _backward as _linear_gradients
from course_ops.linear import _linear
from course_ops.linear_cross_entropy import _linear_cross_entropy, _scaled
from course_ops.matmul import _matmul
from course_ops.matmul_fp8 import _matmul_fp8
from course_ops.quantize import _quantize
from course_ops.rms_norm import _rms_norm, _rms_norm_backward
from course_ops.scan import _scan
from course_ops.softmax import _softmax, _softmax_backward
from problems import (
    add_norm,
    attention,
    attention_decode,
    attention_paged,
    attention_varlen,
    cross_entropy,
    dropout,
    gelu,
    grouped_matmul,
    layer_norm,
    linear,
    linear_cross_entropy,
    matmul,
    matmul_fp8,
    quantize,
    rms_norm,
    scan,
    softmax,
    zoo,
)

# ---- Attention: data of its own -----------------------------------------------------------------------------------


def random_heads(B, H, S, D, S_k=None, H_kv=None, causal=False, window=None, scale=None, D_v=None, dtype=torch.float32):
    """Scores without a trend: what libraries are timed on."""
    S_k, H_kv = S if S_k is None else S_k, H_kv or H
    shapes = (B, H, S, D), (B, H_kv, S_k, D), (B, H_kv, S_k, D_v or D)
    return *(torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes), causal, window, scale


def falling_heads(
    B, H, S, D, S_k=None, H_kv=None, causal=False, window=None, scale=None, D_v=None, dtype=torch.float32
):
    """Scores that fall by 8 every 64 keys. A kernel that walks from the last key to the first meets a new maximum in
    every block, and can skip no rescaling."""
    q, k, *rest = random_heads(B, H, S, D, S_k, H_kv, causal, window, scale, D_v, dtype)
    span = k.shape[2] / 8 / D**0.5
    k += torch.linspace(span / 2, -span / 2, k.shape[2], device=DEVICE)[:, None].to(dtype)
    return q + 1, k, *rest


def random_gradient(
    B, H, S, D, S_k=None, H_kv=None, causal=False, window=None, scale=None, D_v=None, dtype=torch.float32
):
    return _with_gradient(*random_heads(B, H, S, D, S_k, H_kv, causal, window, scale, D_v, dtype))


def falling_gradient(
    B, H, S, D, S_k=None, H_kv=None, causal=False, window=None, scale=None, D_v=None, dtype=torch.float32
):
    return _with_gradient(*falling_heads(B, H, S, D, S_k, H_kv, causal, window, scale, D_v, dtype))


def _with_gradient(q, k, v, *given):
    grad_out = torch.randn(*q.shape[:-1], v.shape[-1], device=DEVICE).to(q.dtype)
    if DEVICE.type == "meta":
        return grad_out, q, k, v, torch.zeros_like(grad_out), torch.zeros(q.shape[:-1], device=DEVICE), *given
    wide = torch.float32 if DEVICE.type == "cuda" else torch.float64
    out, lse = attention.reference(*(t.to(wide) for t in (q, k, v)), *given)
    return grad_out, q, k, v, out.to(q.dtype), lse.float(), *given


def random_cache(B, H, S_k, D, H_kv=None, S=1, causal=True, scale=None, dtype=torch.float32):
    q, k, v, *_ = random_heads(B, H, S, D, S_k, H_kv, dtype=dtype)
    return q, k, v, None, causal, scale


def random_pages(
    B, H, S_k, D, H_kv=None, block_size=16, S=1, spread="", causal=True, window=None, scale=None, D_v=None,
    paged=True, dtype=torch.float32,
):  # fmt: skip
    """As the problem's inputs, of which nothing is NaN: one pass over gigabytes less."""
    return attention_paged.inputs(
        B, H, S_k, D, H_kv, block_size, S, spread, causal, window, scale, D_v, paged, poison=False, dtype=dtype
    )


# ---- How each problem is answered ---------------------------------------------------------------------------------


def attention_forward_call(q, k, v, causal, window, scale):
    return _attention(q, k, v, causal, window, scale)


def attention_backward_call(grad_out, q, k, v, out, lse, causal, window, scale):
    return _attention_backward(grad_out, q, k, v, out, lse, causal, window, scale)


def decoding_call(q, k, v, lengths, causal, scale):
    return _attention(q, k, v, causal, None, scale)


def attention_paged_call(q, k_cache, v_cache, lengths, table, causal, window, scale):
    return _attention_paged(q, k_cache, v_cache, lengths, table, causal, window, scale)


def varlen_forward_call(q, k, v, cu_q, cu_k, longest_q, longest_k, causal, window, scale):
    cu_k = cu_q if cu_k is None else cu_k
    return _attention_varlen(q, k, v, cu_q, cu_k, longest_q, longest_k, causal, window, scale)


def varlen_backward_call(
    grad_out, q, k, v, out, lse, cu_q, cu_k, longest_q, longest_k, causal, window, scale
):  # fmt: skip
    cu_k = cu_q if cu_k is None else cu_k
    given = grad_out, q, k, v, out, lse, cu_q, cu_k, longest_q, longest_k
    return _attention_varlen_backward(*given, causal, window, scale)


def matmul_call(a, b):
    return _matmul(a, b)


def matmul_backward_call(dc, a, b):
    return _matmul(dc, b.t()), _matmul(a.t(), dc)


def softmax_call(x):
    return _softmax(x)


def softmax_backward_call(y, dy):
    return _softmax_backward(y, dy)


def layer_norm_call(x, w, b):
    return _layer_norm(x, w, b, layer_norm.EPS)


def layer_norm_backward_call(dy, x, w, mean, rstd):
    return _layer_norm_backward(dy, x, w, mean, rstd, True)


def rms_norm_call(x, w, eps):
    return _rms_norm(x, w, eps)


def rms_norm_backward_call(dy, x, w, rstd):
    return _rms_norm_backward(dy, x, w, rstd)


def add_norm_call(x, delta, w, b):
    y, total, mean, rstd = _add_norm(delta, x, w, b, add_norm.EPS)
    return total, y, mean, rstd


def add_norm_backward_call(dtotal, dy, total, w, mean, rstd):
    ddelta, dx, dw, db = _add_norm_backward(dy, dtotal, total, w, mean, rstd, True)
    return dx, ddelta, dw, db


_PAIRS = WeakTensorKeyDictionary()  # lse [M] -> lse [M, 2] as the operator keeps it; made at the first call, not timed


def cross_entropy_call(logits, targets):
    loss, lse = _cross_entropy(logits, targets, -100)
    return loss, lse[:, 0]


def cross_entropy_backward_call(dloss, logits, targets, lse):
    if lse not in _PAIRS:
        _PAIRS[lse] = torch.stack((lse, torch.zeros_like(lse)), 1)
    return _cross_entropy_backward(dloss, logits, targets, _PAIRS[lse], -100)


def linear_cross_entropy_call(x, w, targets):
    return _linear_cross_entropy(x, w, targets, -100, False)[0]


def linear_cross_entropy_backward_call(x, w, targets):
    """One step's loss and gradients: the forward makes them at once, and the backward multiplies them by dloss = 1."""
    loss, dx, dw, rows = _linear_cross_entropy(x, w, targets, -100, True)
    return loss, _scaled(dx, 1 / rows), _scaled(dw, 1 / rows)


def linear_call(x, w, bias, residual):
    return _linear(x, w, bias, residual, "gelu_tanh", False)[0]


def linear_backward_call(dy, x, w, z):
    saved = SimpleNamespace(saved_tensors=(x, w, z), needs_input_grad=(True, True, True, False), gelu=True)
    return _linear_gradients(saved, dy, None)[:3]


def matmul_fp8_call(a, b, scale_a, scale_b):
    return _matmul_fp8(a, scale_a, b, scale_b)


def quantize_call(x, scheme):
    q, scale = _quantize(x, scheme)
    return q.view(torch.uint8), scale


def grouped_matmul_call(x, w, offsets):
    return _grouped_matmul(x, w, offsets)


def grouped_matmul_backward_call(dy, w, offsets):
    return _grouped_matmul(dy, w.transpose(1, 2), offsets)


def gelu_call(x):
    return _gelu(x)


def gelu_backward_call(dy, x):
    return _gelu_backward(dy, x)


@lru_cache(maxsize=4)
def _seed(seed):
    return torch.tensor(seed)


def dropout_call(x, p, seed):
    return _dropout(x, p, _seed(seed))


def scan_call(x):
    return _scan(x, False)


def scan_backward_call(dy):
    return _scan(dy, True)


# ---- The list -----------------------------------------------------------------------------------------------------

_RANDOM = zoo.random_shapes(zoo.version())


def _entry(name, direction, problem, call, **more):
    """An operator at the zoo's shapes, at those that its problem times in lessons, and at the release's random ones."""
    listed = zoo.SHAPES[name, direction] + problem.benches + _RANDOM.get((name, direction), ())
    return Operator(name=name, direction=direction, problem=problem, call=call, shapes=listed, **more)


_ATTENTION, _GRADIENT = {"inputs": random_heads}, {"inputs": random_gradient}

OPERATORS = (
    _entry("attention", "forward", attention.PROBLEM, attention_forward_call, **_ATTENTION),
    _entry("matmul", "forward", matmul.PROBLEM, matmul_call),
    _entry("attention", "backward", attention.PROBLEM_BACKWARD, attention_backward_call, **_GRADIENT),
    _entry("rms_norm", "forward", rms_norm.PROBLEM, rms_norm_call),
    _entry("layer_norm", "forward", layer_norm.PROBLEM, layer_norm_call),
    _entry("softmax", "forward", softmax.PROBLEM, softmax_call),
    _entry("cross_entropy", "forward", cross_entropy.PROBLEM, cross_entropy_call),
    _entry("rms_norm", "backward", rms_norm.PROBLEM_BACKWARD, rms_norm_backward_call),
    _entry("layer_norm", "backward", layer_norm.PROBLEM_BACKWARD, layer_norm_backward_call),
    _entry("cross_entropy", "backward", cross_entropy.PROBLEM_BACKWARD, cross_entropy_backward_call),
    _entry("linear", "forward", linear.PROBLEM, linear_call),
    _entry("attention", "decoding", attention_decode.PROBLEM, decoding_call, inputs=random_cache),
    _entry("attention_paged", "forward", attention_paged.PROBLEM, attention_paged_call, inputs=random_pages),
    _entry("attention_varlen", "forward", attention_varlen.PROBLEM, varlen_forward_call,
           inputs=attention_varlen.random_inputs),
    _entry("attention_varlen", "backward", attention_varlen.PROBLEM_BACKWARD, varlen_backward_call,
           inputs=attention_varlen.random_gradient),
    _entry("matmul_fp8", "forward", matmul_fp8.PROBLEM, matmul_fp8_call),
    _entry("linear", "backward", linear.PROBLEM_BACKWARD, linear_backward_call),
    _entry("softmax", "backward", softmax.PROBLEM_BACKWARD, softmax_backward_call),
    _entry("add_norm", "forward", add_norm.PROBLEM, add_norm_call),
    _entry("add_norm", "backward", add_norm.PROBLEM_BACKWARD, add_norm_backward_call),
    _entry("grouped_matmul", "forward", grouped_matmul.PROBLEM, grouped_matmul_call),
    _entry("linear_cross_entropy", "backward", linear_cross_entropy.PROBLEM_BACKWARD,
           linear_cross_entropy_backward_call),
    Operator(
        name="attention", direction="forward", problem=attention.PROBLEM, call=attention_forward_call, data="falling",
        shapes=zoo.SHAPES["attention", "forward"][:12], **_ATTENTION | {"inputs": falling_heads},
    ),
    Operator(
        name="attention", direction="backward", problem=attention.PROBLEM_BACKWARD, call=attention_backward_call,
        data="falling", shapes=zoo.SHAPES["attention", "forward"][:8], **_GRADIENT | {"inputs": falling_gradient},
    ),
    _entry("quantize", "forward", quantize.PROBLEM, quantize_call),
    _entry("gelu", "forward", gelu.PROBLEM, gelu_call),
    _entry("gelu", "backward", gelu.PROBLEM_BACKWARD, gelu_backward_call),
    _entry("dropout", "forward", dropout.PROBLEM, dropout_call),
    _entry("dropout", "backward", dropout.PROBLEM_BACKWARD, dropout_call),
    _entry("scan", "forward", scan.PROBLEM, scan_call),
    _entry("scan", "backward", scan.PROBLEM_BACKWARD, scan_backward_call),
    _entry("matmul", "backward", matmul.PROBLEM_BACKWARD, matmul_backward_call),
    _entry("grouped_matmul", "backward", grouped_matmul.PROBLEM_BACKWARD, grouped_matmul_backward_call),
    _entry("linear_cross_entropy", "forward", linear_cross_entropy.PROBLEM, linear_cross_entropy_call),
    Operator(
        name="matmul", direction="forward", problem=matmul.PROBLEM, call=matmul_call, dtype=torch.float32,
        shapes=zoo.MATMULS_FP32,
    ),
)  # fmt: skip
