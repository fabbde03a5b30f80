"""Attention: softmax(scale q k^T) v, with the options of models, and its gradient.

q [B, H, S_q, D]; k and v [B, H_kv, S_k, D]. H is a multiple of H_kv: query head h reads head h * H_kv // H of k and v.

- causal: query i sees keys j <= i + S_k - S_q, so the last query sees all keys. PyTorch's is_causal aligns the first
  query with the first key, which is the same only if S_q = S_k.
- window: of these keys a query sees the last `window`. It needs causal=True.
- scale: positive, None for 1 / sqrt(D).
- softcap: scores become softcap * tanh(scores / softcap) before the mask.
- The head size of v, D_v, may differ from D. Kernels of lessons have neither this nor softcap.

Results: o [B, H, S_q, D_v], and lse [B, H, S_q] in fp32, the natural logarithm of each row's sum of exponentials. A
query that sees no key gets o = 0 and lse = -inf.
"""

import math
from importlib import import_module

from lessonkit import DEVICE, Problem, Refusal, Unsupported, Work, case, device, expect, tma_takes

import torch

from problems.matmul import precision

__all__ = ["PROBLEM", "PROBLEM_BACKWARD", "precision"]


def reference(q, k, v, causal=False, window=None, scale=None, softcap=None):
    """A head at a time; q [B, H, S_q, D], k [.., D], v [B, H_kv, S_k, D_v] -> o [B, H, S_q, D_v], lse [B, H, S_q]."""
    (B, H, S_q, D), (_, H_kv, S_k, D_v) = q.shape, v.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    o, lse = q.new_zeros(B, H, S_q, D_v), torch.empty(B, H, S_q, dtype=wide, device=q.device)
    hidden = ~visible(S_q, S_k, causal, window, q.device)
    for b, h in ((b, h) for b in range(B) for h in range(H)):
        s = (q[b, h] @ k[b, h * H_kv // H].T) * (1 / math.sqrt(D) if scale is None else scale)
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        s = s.masked_fill(hidden, -math.inf)
        lse[b, h] = torch.logsumexp(s.to(wide), -1)
        p = s.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0)  # of a row that sees nothing it is 0 / 0
        o[b, h] = p @ v[b, h * H_kv // H]
    return o, lse


def visible(S_q, S_k, causal, window, device):
    """Which key each query sees, [S_q, S_k]; the last query stands at the last key."""
    ahead = torch.arange(S_k, device=device) - (torch.arange(S_q, device=device)[:, None] + S_k - S_q)
    return (ahead <= (0 if causal else S_k + S_q)) & (ahead > -(window or S_k + S_q))


def expect_heads(q, k, v, causal, window, scale, **more):
    """The scale, or the error that a bad argument deserves. more: what else has q's dimensions and dtype."""
    expect(q=q, k=k, v=v, **more, ndim=4, same_dtype=True)
    if k.shape != v.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}, but k has {tuple(k.shape)}: a value belongs to each key")
    (B, H, _, D), (B_kv, H_kv, _, D_kv) = q.shape, k.shape
    if (B_kv, D_kv) != (B, D):
        raise ValueError(f"k is {tuple(k.shape)}, q {tuple(q.shape)}: batch (first) and head_dim (last) must agree")
    if H_kv == 0 or H % H_kv:
        raise ValueError(f"q has {H} heads, k {H_kv}: expected a multiple, so that each serves as many")
    if not 0 < D <= 256:
        raise ValueError(f"q has head_dim {D}, expected 1 to 256: registers hold no longer row of the output")
    if window is not None and not (causal and window > 0):
        raise ValueError(f"window = {window}, causal = {causal}: a window is 1 or more keys, and needs causal=True")
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale = {scale}, expected a positive number: to negate the scores, pass -q")
    return 1 / math.sqrt(D) if scale is None else scale


def expect_plain(q, k, v, causal, window, scale, *, head_dims=(64, 128), masks=(False, True)):
    """As expect_heads, for the rungs of a ladder on Hopper; Unsupported for all but the case that they show."""
    scale = expect_heads(q, k, v, causal, window, scale)
    (H, S_q, D), (H_kv, S_k) = q.shape[1:], k.shape[1:3]
    plain = q.element_size() == 2 and D in head_dims and H_kv == H and window is None and tma_takes(q, k, v)
    if not plain or causal not in masks or (causal and (S_k - S_q) % 128):
        raise Unsupported(
            f"for 16 bits, D of {' or '.join(map(str, head_dims))}, a K and V for each head, rows that TMA can copy, "
            f"{'causal if S_k - S_q is a multiple of 128' if True in masks else 'not causal'}, no window; "
            "course_ops.attention takes the rest"
        )
    if device.INTERPRETED or device.architecture() != 90:
        raise Unsupported("wgmma is an instruction of Hopper (sm_90a); course_ops.attention takes other GPUs")
    return scale


def inputs(
    B, H, S, D, S_k=None, H_kv=None, causal=False, window=None, scale=None, layout="bhsd", D_v=None, dtype=torch.float32
):
    # Scores are far from 0, so that a key that is not there (a score of 0) would drown the others. They grow along the
    # keys, so that every block brings a new maximum. layout: of memory; "wide" takes every second element.
    def make(H, S, mean, D=D):
        t = torch.randn(B, H, S, D, device=DEVICE) + mean
        t = t.to(dtype)
        if layout == "bshd":
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.stack([t, t + 1], -1)[..., 0] if layout == "wide" else t

    S_k = S if S_k is None else S_k
    q, k, v = make(H, S, 1.0), make(H_kv or H, S_k, -1.0), make(H_kv or H, S_k, 0.5, D_v or D)
    k += torch.linspace(-0.5, 0.5, S_k, device=DEVICE)[:, None].to(dtype)
    return q, k, v, causal, window, scale


def work(B, H, S, D, dtype, S_k=None, H_kv=None, causal=False, window=None, D_v=None, **_):
    S_k, columns = S if S_k is None else S_k, D + (D_v or D)
    bytes = B * (H * S + (H_kv or H) * S_k) * columns * dtype.itemsize + 4 * B * H * S
    return Work(bytes=bytes, flops=2 * B * H * columns * pairs(S, S_k, causal, window))


def pairs(S, S_k, causal, window):
    """How many (query, key) are seen: what FLOPs are counted by."""
    last = [min(S_k, max(0, i + 1 + S_k - S)) if causal else S_k for i in range(S)]
    return sum(min(n, window or n) for n in last)


def what_is_not_seen_does_not_matter(rung):
    """Causal: other keys from 200 on leave rows before 200 as they are, to the bit. With a window of 50, other keys
    before 100 leave rows from 150 on as they are."""
    q, k, v, *_ = inputs(1, 1, 300, 16, dtype=torch.float16)
    for window, rows, changed in ((None, slice(200), slice(200, 300)), (50, slice(150, 300), slice(100))):
        before = rung(q, k, v, True, window)[0]
        other = k.clone(), v.clone()
        for t in other:
            t[:, :, changed] += 3
        assert torch.equal(rung(q, *other, True, window)[0][:, :, rows], before[:, :, rows])
        assert not torch.equal(rung(q, *other, True, window)[0], before)


def no_key_no_nan(rung):
    """Queries that see no key: zeros and -inf, as documented; also where there is no key at all."""
    for S, S_k in ((200, 70), (3, 0)):
        out, lse = rung(*inputs(1, 2, S, 16, S_k=S_k, causal=True))
        assert (out[:, :, : S - S_k] == 0).all()
        assert (lse[:, :, : S - S_k] == -math.inf).all()
        assert lse[:, :, S - S_k :].isfinite().all()


# PyTorch's two fast backends by their own names: F.scaled_dot_product_attention does not return lse.
def _sdpa_flash(q, k, v, causal=False, window=None, scale=None):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False,
        scale=scale, window_size_left=window and window - 1, window_size_right=None,
    )  # fmt: skip
    return o.transpose(1, 2), lse


def _sdpa_cudnn(q, k, v, causal=False, window=None, scale=None):
    if window:
        raise Unsupported("cuDNN's backend in PyTorch has no window")
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return o, lse.view(q.shape[:-1])


def fa4(q, k, v, causal=False, window=None, scale=None):
    """FlashAttention in CuTe's Python, as of 2026; the package is flash-attn-4."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    forward, window_size = import_module("flash_attn.cute").flash_attn_func, (window and window - 1, None)
    o, lse = forward(q, k, v, softmax_scale=scale, causal=causal, window_size=window_size, return_lse=True)
    return o.transpose(1, 2), lse


PEERS = {"SDPA flash": _sdpa_flash, "SDPA cuDNN": _sdpa_cudnn}


def bad(change):
    return change(*inputs(1, 4, 8, 16)[:3])


# fmt: off
REFUSES = (
    Refusal("three heads for two", lambda f: f(*bad(lambda q, k, v: (q[:, :3], k[:, :2], v[:, :2]))),
            ValueError, "q has 3 heads, k 2"),
    Refusal("head_dim of 257", lambda f: f(*inputs(1, 1, 2, 257)), ValueError, "head_dim 257, expected 1 to 256"),
    Refusal("head_dim of k", lambda f: f(*bad(lambda q, k, v: (q, k[..., :8], v[..., :8]))), ValueError, "head_dim"),
    Refusal("a value too few", lambda f: f(*bad(lambda q, k, v: (q, k, v[:, :, 1:]))), ValueError, "v has shape"),
    Refusal("two dtypes", lambda f: f(*bad(lambda q, k, v: (q, k.half(), v))), TypeError, "k is torch.float16"),
    Refusal("another device", lambda f: f(*bad(lambda q, k, v: (q, k.to("meta"), v))), ValueError, "k is on meta"),
    Refusal("a window without causal", lambda f: f(*bad(lambda *t: t), window=4), ValueError, "needs causal=True"),
    Refusal("a negative scale", lambda f: f(*bad(lambda *t: t), scale=-1.0), ValueError, "pass -q"),
    Refusal("gradient lost", lambda f: f(*bad(lambda q, k, v: (q.requires_grad_(), k, v))), ValueError, "requires"),
)
# fmt: on


def _bench(D, S, causal=True, H_kv=None, window=None, H=None):
    return {"B": 16384 // S, "H": H or 2048 // D, "S": S, "D": D, "H_kv": H_kv, "causal": causal, "window": window}


CHECKS = (
    case("no queries: an empty grid is an error in CUDA", B=1, H=2, S=0, D=16),
    case("no keys: zeros and -inf", B=1, H=2, S=3, D=16, S_k=0),
    case("one query of a long cache, heads in groups of two", B=2, H=4, S=1, D=16, S_k=131, H_kv=2, causal=True),
    case("more queries than keys: the first 33 see nothing", B=1, H=1, S=70, D=16, S_k=37, causal=True),
    case(
        "one key past a tile, D of 96 in a tile of 128, as a projection leaves it", B=1, H=2, S=129, D=96, layout="bshd"
    ),
    case("primes, causal, one K and V for all heads", B=1, H=3, S=131, D=24, H_kv=1, causal=True),
    case("a window that begins within a block and ends before the tail", B=1, H=1, S=300, D=16, causal=True, window=77),
    case("a window of one: o is v", B=1, H=1, S=67, D=16, S_k=90, causal=True, window=1),
    case("every second number; a scale of one's own", B=1, H=1, S=65, D=40, layout="wide", scale=0.3, causal=True),
    case("D = 256, and fewer queries than keys", B=1, H=1, S=40, D=256, S_k=70, causal=True),
    case("three heads, of which two at once fit into the interpreter's L2", B=1, H=3, S=100, D=16, causal=True),
    case("rows past 2^31 numbers", gib=70, B=1, H=8200, S=2100, D=128, layout="bshd", H_kv=410, causal=True),
    case("keys past 2^31 numbers", gib=70, B=1, H=8200, S=1, D=128, S_k=2100),
    case("the bytes are counted here: 6 of 9 blocks of 128 by 128", B=1, H=1, S=384, D=16, causal=True),
)

BENCHES = (
    *(_bench(D, S) for D, S in ((128, 512), (128, 2048), (128, 4096), (128, 16384), (64, 2048), (64, 16384))),
    *(_bench(D, 4096, causal=False) for D in (64, 128)),
    *(_bench(128, 4096, H=32, H_kv=8), _bench(128, 16384, window=1024), _bench(96, 4096, H=16), _bench(256, 4096)),
)

PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=work,
    checks=CHECKS,
    benches=BENCHES,
    peers={**PEERS, "FA4": fa4},
    properties=(what_is_not_seen_does_not_matter, no_key_no_nan),
    refuses=REFUSES,
)

# ---- The gradient: dq, dk, dv of grad_out, from q, k, v and what the forward returned ------------------------------


def reference_queries(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """dq [B, H, S_q, D] and delta = rowsum(grad_out * out) [B, H, S_q], a head at a time."""
    (B, H, S_q, D), (_, H_kv, S_k, _) = q.shape, k.shape
    scale, hidden = scale or 1 / math.sqrt(D), ~visible(S_q, S_k, causal, window, q.device)
    dq, delta = torch.empty_like(q), (grad_out.to(lse.dtype) * out).sum(-1)
    for b, h in ((b, h) for b in range(B) for h in range(H)):
        kv = b, h * H_kv // H
        p = torch.exp(q[b, h] @ k[kv].T * scale - lse[b, h, :, None]).masked_fill(hidden, 0)
        ds = p * (grad_out[b, h] @ v[kv].T - delta[b, h, :, None])
        dq[b, h] = ds.to(q.dtype) @ k[kv] * scale
    return dq, delta


def reference_backward(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """dq as q, dk and dv as k, a head at a time; P = exp(scores - lse), dS = P (dP - delta)."""
    (B, H, S_q, D), (_, H_kv, S_k, _) = q.shape, k.shape
    dq, delta = reference_queries(grad_out, q, k, v, out, lse, causal, window, scale)
    scale, hidden = scale or 1 / math.sqrt(D), ~visible(S_q, S_k, causal, window, q.device)
    dk, dv = (torch.zeros(t.shape, dtype=lse.dtype, device=q.device) for t in (k, v))
    for b, h in ((b, h) for b in range(B) for h in range(H)):
        kv = b, h * H_kv // H
        p = torch.exp(q[b, h] @ k[kv].T * scale - lse[b, h, :, None]).masked_fill(hidden, 0)
        ds = p * (grad_out[b, h] @ v[kv].T - delta[b, h, :, None])
        dk[kv] += ds.to(q.dtype).T @ q[b, h] * scale
        dv[kv] += p.to(q.dtype).T @ grad_out[b, h]
    return dq, dk.to(q.dtype), dv.to(q.dtype)


def expect_gradient(grad_out, q, k, v, out, lse, causal, window, scale):
    """The scale, or the error that a bad argument of a backward deserves."""
    scale = expect_heads(q, k, v, causal, window, scale, grad_out=grad_out, out=out)
    expect(lse=lse, ndim=3, dtypes=(torch.float32,), contiguous=True)
    for name, t, shape in (("grad_out", grad_out, q.shape), ("out", out, q.shape), ("lse", lse, q.shape[:-1])):
        if t.shape != shape:
            raise ValueError(f"{name} has shape {tuple(t.shape)}, but attention returned {tuple(shape)} for this q")
    return scale


def expect_plain_gradient(grad_out, q, k, v, out, lse, causal, window, scale):
    """As expect_gradient, for the rungs of a ladder on Hopper; Unsupported for all but the case that they show."""
    scale = expect_gradient(grad_out, q, k, v, out, lse, causal, window, scale)
    plain = q.shape == k.shape and q.shape[3] in (64, 128) and q.shape[2] % 128 == 0 and window is None
    if not plain or q.element_size() != 2 or not tma_takes(grad_out, q, k, v, out):
        raise Unsupported(
            "for 16 bits, D of 64 or 128, k as long as q, S a multiple of 128, a K and V for each head, rows that TMA "
            "can copy, no window; course_ops.attention takes the rest"
        )
    if device.INTERPRETED or device.architecture() != 90:
        raise Unsupported("wgmma is an instruction of Hopper (sm_90a); course_ops.attention takes other GPUs")
    return scale


def expect_aligned_gradient(grad_out, q, k, v, out, lse, causal, window, scale):
    """As expect_gradient, for the rungs of a ladder in Triton; Unsupported for all but the case that they show."""
    scale = expect_gradient(grad_out, q, k, v, out, lse, causal, window, scale)
    S, D = q.shape[2:]
    plain = q.numel() and k.shape[2] == S and S % 128 == 0 and D in (16, 32, 64, 128) and window is None
    if not plain or not all(t.is_contiguous() for t in (grad_out, q, k, v, out)):
        raise Unsupported(
            "for contiguous tensors, k as long as q, S a multiple of 128, D of 16, 32, 64 or 128, no window; "
            "course_ops.attention takes the rest"
        )
    return scale


def inputs_backward(*sizes, dtype=torch.float32, **options):
    # As in the forward; grad_out has a mean, so that delta is large, and leaving it out shows.
    q, k, v, *given = inputs(*sizes, dtype=dtype, **options)
    like = q if q.shape[-1] == v.shape[-1] else q.new_empty(*q.shape[:-1], v.shape[-1])
    grad_out = torch.empty_like(like).copy_(torch.randn(like.shape, device=DEVICE) + 0.5)
    if DEVICE.type == "meta":
        return grad_out, q, k, v, torch.empty_like(like), torch.empty(q.shape[:-1], device=DEVICE), *given
    wide = torch.float32 if DEVICE.type == "cuda" else torch.float64  # S x S in float64 would take seconds on a GPU
    out, lse = reference(*(t.to(wide) for t in (q, k, v)), *given)
    return grad_out, q, k, v, out.to(dtype), lse.float(), *given


def work_backward(B, H, S, D, dtype, S_k=None, H_kv=None, causal=False, window=None, D_v=None, **_):
    """Q, O, dO, K, V and lse read, dQ, dK and dV written; five matmuls for each visible pair."""
    S_k, D_v = S if S_k is None else S_k, D_v or D
    bytes = 2 * B * (D + D_v) * (H * S + (H_kv or H) * S_k) * dtype.itemsize + 4 * B * H * S
    return Work(bytes=bytes, flops=B * H * (6 * D + 4 * D_v) * pairs(S, S_k, causal, window))


def _sdpa_flash_backward(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    if window:
        raise Unsupported("this entry into FlashAttention-2 has no window")
    S_q, S_k, zero = q.shape[2], k.shape[2], torch.zeros((), dtype=torch.uint64, device=q.device)  # no dropout
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse, None, None, S_q, S_k, 0.0, causal, zero, zero, scale=scale
    )


def _sdpa_cudnn_backward(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    if window:
        raise Unsupported("cuDNN's backend in PyTorch has no window")
    S_q, S_k, zero = q.shape[2], k.shape[2], torch.zeros((), dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad_out, q, k, v, out, lse[..., None], zero, zero, None, None, None, S_q, S_k, 0.0, causal, scale=scale
    )


def fa4_backward(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    q, k, v, out, grad_out = (t.transpose(1, 2) for t in (q, k, v, out, grad_out))
    backward = import_module("flash_attn.cute.interface")._flash_attn_bwd
    left = window and window - 1
    gradients = backward(q, k, v, out, grad_out, lse, softmax_scale=scale, causal=causal, window_size_left=left)
    return tuple(t.transpose(1, 2) for t in gradients[:3])


BACKWARD_PEERS = {"SDPA flash": _sdpa_flash_backward, "SDPA cuDNN": _sdpa_cudnn_backward, "FA4": fa4_backward}


def what_is_not_seen_has_no_gradient(rung):
    """P's rows sum to 1, so dV sums to what dO sums to. With a window of 20, queries from 100 on see no key before 81,
    so they give these keys no gradient."""
    grad_out, *rest = inputs_backward(1, 2, 150, 16, causal=True, window=20)
    torch.testing.assert_close(rung(grad_out, *rest)[2].sum(2), grad_out.sum(2), rtol=1e-4, atol=1e-4)
    grad_out[:, :, :100] = 0
    dk, dv = rung(grad_out, *rest)[1:]
    assert [int((t != 0).any(-1).nonzero()[:, -1].min()) for t in (dk, dv)] == [81, 81]


def _bad_gradient(which, change):
    args = list(inputs_backward(1, 2, 8, 16))
    args[which] = change(args[which])
    return args


# fmt: off
BACKWARD_REFUSES = (
    Refusal("lse of another shape", lambda f: f(*_bad_gradient(5, lambda t: t[..., 1:].clone())),
            ValueError, "lse has shape"),
    Refusal("lse in 16 bits", lambda f: f(*_bad_gradient(5, lambda t: t.half())), TypeError, "lse is torch.float16"),
    Refusal("a gradient of another dtype", lambda f: f(*_bad_gradient(0, lambda t: t.half())),
            TypeError, "grad_out is"),
    Refusal("a gradient for fewer heads", lambda f: f(*_bad_gradient(0, lambda t: t[:, :1])),
            ValueError, "grad_out has shape"),
    Refusal("a window without causal", lambda f: f(*_bad_gradient(0, lambda t: t)[:6], window=3),
            ValueError, "needs causal"),
    Refusal("head_dim of 257", lambda f: f(*inputs_backward(1, 1, 2, 257)), ValueError, "expected 1 to 256"),
)
# fmt: on

BACKWARD_CHECKS = (
    case("no queries: gradients of nothing", B=1, H=2, S=0, D=16),
    case("no keys: zeros", B=1, H=2, S=3, D=16, S_k=0),
    case("seven tokens, nearly everything padding", B=1, H=1, S=7, D=16),
    case("one query of a cache, heads in groups of two", B=2, H=4, S=1, D=16, S_k=70, H_kv=2, causal=True),
    case("more queries than keys: those that see nothing have no gradient", B=1, H=1, S=70, D=16, S_k=37, causal=True),
    case("one past a tile, D of 96, as a projection leaves it", B=1, H=2, S=65, D=96, layout="bshd"),
    case("primes, causal, one K and V for all heads, a scale", B=1, H=3, S=131, D=24, H_kv=1, causal=True, scale=0.3),
    case("a window that begins within a block", B=1, H=1, S=150, D=16, causal=True, window=77),
    case("more keys than queries, a window of 9", B=1, H=2, S=67, D=16, S_k=90, H_kv=1, causal=True, window=9),
    case("every second number", B=1, H=1, S=40, D=20, layout="wide", causal=True),
    case("D = 256", B=1, H=1, S=40, D=256, S_k=45, causal=True),
    case("many tiles of everything", gib=0.9, B=2, H=8, S=1021, D=128, H_kv=2, causal=True, window=333),
    case("the bytes are counted here: the diagonal and whole tiles", B=1, H=1, S=256, D=16, causal=True),
)

_SIZES = (128, 2048, False), (128, 4096, True), (128, 16384, True), (64, 4096, False), (64, 16384, True)
BACKWARD_BENCHES = (
    *({"B": 16384 // S, "H": 2048 // D, "S": S, "D": D, "causal": causal} for D, S, causal in _SIZES),
    {"B": 4, "H": 32, "S": 4096, "D": 128, "H_kv": 8, "causal": True},
)

PROBLEM_BACKWARD = Problem(
    reference=reference_backward,
    inputs=inputs_backward,
    work=work_backward,
    checks=BACKWARD_CHECKS,
    benches=BACKWARD_BENCHES,
    peers=BACKWARD_PEERS,
    properties=(what_is_not_seen_has_no_gradient,),
    refuses=BACKWARD_REFUSES,
    # delta is a sum over O as it was rounded to 16 bits; PyTorch's own backward rounds P instead. Where a query sees
    # few keys, dP - delta is a small difference, and that rounding takes up to 1.5 times the usual budget.
    factor=2,
)
