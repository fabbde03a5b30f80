"""Plain attention: softmax(q k^T / sqrt(D)) v of contiguous q, k, v [B, H, S, D] of one shape, causal or not.

PROBLEM asks for o alone, PROBLEM_LSE for o and lse, the natural logarithm of each row's sum of exponentials, [B, H, S]
in fp32. PROBLEM_BACKWARD asks for dq, dk, dv. With the options that models need: problems/attention.py.
"""

import math

from lessonkit import DEVICE, Problem, Refusal, Unsupported, Work, by_inductor, case

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from problems.attention import _sdpa_cudnn_backward, fa4, fa4_backward, precision

__all__ = ["PROBLEM", "PROBLEM_BACKWARD", "PROBLEM_LSE", "precision"]


def _by_hand(q, k, v, causal=False):
    s = (q @ k.mT) * (1 / math.sqrt(q.shape[-1]))  # writes S^2; reads and writes S^2
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)  # reads and writes S^2
    return s.softmax(-1) @ v  # reads and writes S^2; reads S^2


def reference(q, k, v, causal=False):
    """A head at a time: in float64, the matrices of all heads of a bench would not fit on the GPU."""
    o = torch.empty_like(q)
    for o1, q1, k1, v1 in zip(*(t.flatten(0, 1) for t in (o, q, k, v)), strict=True):
        o1[:] = _by_hand(q1, k1, v1, causal)
    return o


def reference_with_lse(q, k, v, causal=False):
    """o as q, and lse [B, H, S] in fp32 (float64 for float64), from scores in that dtype."""
    wide = torch.promote_types(q.dtype, torch.float32)
    hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1) & causal
    lse = torch.empty(q.shape[:-1], dtype=wide, device=q.device)
    for lse1, q1, k1 in zip(*(t.flatten(0, 1) for t in (lse, q, k)), strict=True):
        s = q1.to(wide) @ k1.to(wide).T / math.sqrt(q.shape[-1])
        lse1[:] = torch.logsumexp(s.masked_fill(hidden, -math.inf), -1)
    return reference(q, k, v, causal), lse


def inputs(B, H, S, D, causal=False, dtype=torch.float32):
    # Scores are around -sqrt(D). A key past the end, read as zeros, has a score of 0, which would drown all others.
    # Scores grow along the keys. So every block of keys brings a new maximum, and a forgotten rescaling shows.
    q, k, v = (torch.randn(B, H, S, D, device=DEVICE) + mean for mean in (1.0, -1.0, 0.5))
    k += torch.linspace(-0.5, 0.5, S, device=DEVICE)[:, None]
    return q.to(dtype), k.to(dtype), v.to(dtype), causal


def work(B, H, S, D, dtype, causal=False):
    """The op's, not the rungs': Q, K, V read and O written once; half of the products if half of the keys are seen."""
    return Work(bytes=4 * B * H * S * D * dtype.itemsize, flops=4 * B * H * S * S * D // (2 if causal else 1))


def the_past_is_alone(rung):
    """Causal: other keys and values from row 40 on leave all rows before it as they are, to the bit; not so without."""
    q, k, v, _ = inputs(1, 1, 70, 16)
    before = [rung(q, k, v, causal)[:, :, :40] for causal in (True, False)]
    k[:, :, 40:] += 3
    v[:, :, 40:] = 5
    after = [rung(q, k, v, causal)[:, :, :40] for causal in (True, False)]
    assert [torch.equal(b, a) for b, a in zip(before, after, strict=True)] == [True, False]


def _sdpa(backend):
    def peer(q, k, v, causal=False):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return peer


def _sdpa_math(q, k, v, causal=False):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


# PyTorch's two fast backends by their own names: F.scaled_dot_product_attention does not return lse.
def _flash_with_lse(q, k, v, causal=False):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]


def _cudnn_with_lse(q, k, v, causal=False):
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return o, lse.view(q.shape[:-1])


def bad(change):
    return change(*inputs(1, 2, 16, 16)[:3])


REFUSES = (
    Refusal("three dimensions", lambda f: f(*bad(lambda q, k, v: (q[0], k[0], v[0]))), ValueError, "q has 3 dim"),
    Refusal("S of k differs", lambda f: f(*bad(lambda q, k, v: (q, k[:, :, :3], v))), ValueError, "k has shape"),
    Refusal("two dtypes", lambda f: f(*bad(lambda q, k, v: (q.half(), k, v))), TypeError, "k is torch.float32"),
    Refusal("transposed", lambda f: f(*bad(lambda q, k, v: (q.mT, k.mT, v.mT))), ValueError, "contiguous"),
    Refusal("gradient lost", lambda f: f(*bad(lambda q, k, v: (q.requires_grad_(), k, v))), ValueError, "requires"),
)

PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=work,
    checks=(
        case("no tokens: an empty grid is an error in CUDA", B=1, H=2, S=0, D=16),
        case("one token: the softmax is 1, all other keys of the tile must not count", B=2, H=1, S=1, D=16),
        case("one past a tile, D that needs padding", B=1, H=1, S=65, D=40),
        case("causal, two tiles: the second sees all of the first", B=1, H=2, S=70, D=32, causal=True),
        case("offsets past 2^31 in the scores", gib=16, B=1, H=9, S=16384, D=16),
        case("on which bytes are counted: two tiles each way, masked", B=1, H=1, S=96, D=24, causal=True),
    ),
    benches=tuple(
        {"B": 16384 // S, "H": 16, "S": S, "D": 128, "causal": causal}
        for S, causal in ((512, False), (2048, False), (2048, True), (4096, False), (16384, False))
    ),
    peers={
        "torch": _by_hand,
        "torch.compile": by_inductor(_by_hand),
        "SDPA math": _sdpa_math,
        "SDPA flash": _sdpa(SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN": _sdpa(SDPBackend.CUDNN_ATTENTION),
        "FA4": lambda q, k, v, causal=False: fa4(q, k, v, causal)[0],
    },
    properties=(the_past_is_alone,),
    refuses=REFUSES,
    factor=2,  # a score of 190 is off by 0.5 in 16 bits; of 2^18 rows some have bad luck where PyTorch had good
)


def weights_sum_to_one(rung):
    """If every value is the same row, so is every output, also where scores pass 88 and exp would overflow."""
    q, k, v, _ = inputs(1, 2, 37, 32)
    q, v[:] = -20 * q, torch.randn(32, device=DEVICE)
    for causal in (False, True):
        try:
            torch.testing.assert_close(rung(q, k, v, causal)[0], v, atol=1e-5, rtol=1e-5)
        except Unsupported:
            half = v.bfloat16()
            torch.testing.assert_close(rung(q.bfloat16(), k.bfloat16(), half, causal)[0], half, atol=1e-2, rtol=1e-2)


def scores_past_88(rung):
    """o and lse where exp(score) overflows in fp32: the maximum has to be taken off first."""
    q, k, v, causal = inputs(1, 1, 35, 64)
    # In fp32 alone: in 16 bits PyTorch's own scores are off by 0.5, and no error can be told.
    found = rung(-20 * q, k, v, causal)
    torch.testing.assert_close(found, reference_with_lse(-20 * q, k, v, causal), rtol=1e-4, atol=1e-4)


PROBLEM_LSE = Problem(
    reference=reference_with_lse,
    inputs=inputs,
    work=work,
    checks=(
        case("no tokens: an empty grid is an error in CUDA", B=1, H=2, S=0, D=16),
        case("one token: the softmax is 1, all other keys of the block must not count", B=2, H=1, S=1, D=16),
        case("one key past a tile of 32, a query past a tile of 8", B=1, H=1, S=33, D=20),
        case("causal, and D that needs no padding", B=1, H=1, S=47, D=64, causal=True),
        case("a tile of 64 and a tail; two heads, so that one head's keys are not the other's", B=1, H=2, S=70, D=32),
        case("causal past a tile: the second tile is masked for some warps", B=1, H=1, S=70, D=16, causal=True),
        case("several tiles of everything", gib=0.5, B=2, H=3, S=517, D=128),
        case("several tiles of everything, causal", gib=0.5, B=2, H=3, S=517, D=64, causal=True),
        case("S = 2048, causal, D padded", gib=0.9, B=1, H=2, S=2048, D=80, causal=True),
        case("a whole tile of everything, on which accesses are counted", B=1, H=1, S=64, D=64),
    ),
    benches=(  # small: at 1 TFLOP/s a kernel without tiles takes half a second
        {"B": 8, "H": 16, "S": 1024, "D": 128, "causal": False},
        {"B": 4, "H": 16, "S": 2048, "D": 128, "causal": False},
        {"B": 4, "H": 16, "S": 2048, "D": 128, "causal": True},
        {"B": 2, "H": 16, "S": 4096, "D": 128, "causal": False},
        {"B": 1, "H": 4, "S": 16384, "D": 128, "causal": True},
        {"B": 4, "H": 32, "S": 2048, "D": 64, "causal": False},
    ),
    peers={"SDPA flash": _flash_with_lse, "SDPA cuDNN": _cudnn_with_lse, "FA4": fa4},
    properties=(weights_sum_to_one, scores_past_88),
    refuses=REFUSES,
    factor=2,
)


# ---- The gradient -------------------------------------------------------------------------------------------------


def reference_backward(q, k, v, o, lse, dout, causal=False):
    """dq, dk, dv from what the forward pass kept, with everything S x S written down, a head at a time."""
    S, D = q.shape[-2:]
    hidden = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1) & causal
    grads = []
    for q1, k1, v1, o1, lse1, dout1 in zip(*(t.flatten(0, 1) for t in (q, k, v, o, lse, dout)), strict=True):
        s = (q1 @ k1.T) / math.sqrt(D)
        p = torch.exp(s - lse1[:, None]).masked_fill(hidden, 0).to(q.dtype)
        delta = (dout1 * o1).sum(-1, keepdim=True)
        ds = p * (dout1 @ v1.T - delta) / math.sqrt(D)
        grads.append((ds @ k1, ds.T @ q1, p.T @ dout1))
    return tuple(torch.stack(parts).view_as(q) for parts in zip(*grads, strict=True))


def inputs_backward(B, H, S, D, causal=False, dtype=torch.float32):
    # As in the forward pass; v and dout have means, so that dP and delta are large and leaving delta out shows.
    q, k, v, _ = inputs(B, H, S, D, causal, dtype=dtype)
    dout = (torch.randn(B, H, S, D, device=DEVICE) + 0.5).to(dtype)
    wide = torch.float32 if DEVICE.type == "cuda" else torch.float64  # S x S in float64 would take seconds on a GPU
    o, lse = reference_with_lse(q.to(wide), k.to(wide), v.to(wide), causal)
    return q, k, v, o.to(dtype), lse.float(), dout, causal


def same_each_time(rung):
    """Two runs agree to the bit: every sum has one owner, which adds in one order. (Atomics on dq would not.)"""
    args = inputs_backward(1, 2, 45, 32, True, dtype=torch.bfloat16)
    for first, second in zip(rung(*args), rung(*args), strict=True):
        assert torch.equal(first, second)


def zero_where_nothing_can_change(rung):
    """One token, or equal keys: P does not depend on q, so dq is 0 up to the rounding of dP - delta; dv is dout."""
    q, k, v, o, lse, dout, _ = inputs_backward(1, 2, 1, 16)
    dq, dk, dv = rung(q, k, v, o, lse, dout)
    assert max(dq.abs().max(), dk.abs().max()) < 1e-4
    assert (dv - dout).abs().max() < 1e-4
    q, k, v, _, _, dout, _ = inputs_backward(1, 1, 40, 16)
    k[:] = k[:, :, :1]
    o, lse = reference_with_lse(q, k, v)
    assert rung(q, k, v, o, lse, dout)[0].abs().max() < 1e-4


def _by_hand_backward(q, k, v, o, lse, dout, causal=False):
    """The S x S matrices in memory, P among them as the forward pass of naive attention would have kept it."""
    s = (q / math.sqrt(q.shape[-1])) @ k.mT
    if causal:
        s.masked_fill_(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    p = s.softmax(-1)
    ds = torch.ops.aten._softmax_backward_data(dout @ v.mT, p, -1, p.dtype) / math.sqrt(q.shape[-1])
    return ds @ k, ds.mT @ q, p.mT @ dout


def _sdpa_flash_backward(q, k, v, o, lse, dout, causal=False):
    S, zero = q.shape[-2], torch.zeros((), dtype=torch.uint64, device=q.device)  # no dropout, so no random state
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, o, lse, None, None, S, S, 0.0, causal, zero, zero
    )


def _cudnn_backward(q, k, v, o, lse, dout, causal=False):
    return _sdpa_cudnn_backward(dout, q, k, v, o, lse, causal)


def _fa4_backward(q, k, v, o, lse, dout, causal=False):
    return fa4_backward(dout, q, k, v, o, lse, causal)


def _bad_gradient(which, change):
    args = list(inputs_backward(1, 2, 5, 5))
    args[which] = change(args[which])
    return args


PROBLEM_BACKWARD = Problem(
    reference=reference_backward,
    inputs=inputs_backward,
    work=lambda B, H, S, D, dtype, causal=False: Work(
        bytes=8 * B * H * S * D * dtype.itemsize + 4 * B * H * S,
        flops=10 * B * H * S * S * D // (2 if causal else 1),
    ),
    checks=(
        case("no tokens: an empty grid is an error in CUDA", B=1, H=2, S=0, D=16),
        case("seven tokens, nearly everything masked; with one, dq is 0: a property", B=1, H=1, S=7, D=16),
        case("one past a tile of 32, and past a tile of 8", B=1, H=1, S=33, D=20),
        case("causal, and D that needs no padding", B=1, H=1, S=47, D=64, causal=True),
        case("a tile of 64 and a tail; two heads", B=1, H=2, S=70, D=32),
        case("causal past a tile: some warps skip tiles", B=1, H=1, S=70, D=16, causal=True),
        case("several tiles of everything", gib=0.5, B=2, H=3, S=517, D=128),
        case("several tiles of everything, causal", gib=0.5, B=2, H=3, S=517, D=64, causal=True),
        case("several tiles of everything, causal, wide", gib=0.5, B=1, H=3, S=389, D=128, causal=True),
        case("a whole tile of everything, on which accesses are counted", B=1, H=1, S=64, D=64),
    ),
    benches=(
        {"B": 16, "H": 16, "S": 1024, "D": 128, "causal": False},
        {"B": 8, "H": 16, "S": 2048, "D": 128, "causal": False},
        {"B": 4, "H": 16, "S": 4096, "D": 128, "causal": True},
        {"B": 8, "H": 32, "S": 2048, "D": 64, "causal": False},
        {"B": 4, "H": 32, "S": 4096, "D": 64, "causal": True},
    ),
    peers={
        "torch naive": _by_hand_backward,
        "SDPA flash": _sdpa_flash_backward,
        "SDPA cuDNN": _cudnn_backward,
        "FA4": _fa4_backward,
    },
    properties=(same_each_time, zero_where_nothing_can_change),
    refuses=(
        Refusal("lse of another shape", lambda f: f(*_bad_gradient(4, lambda t: t[..., 1:])), ValueError, "lse"),
        Refusal("lse in 16 bits", lambda f: f(*_bad_gradient(4, lambda t: t.half())), TypeError, "lse is torch.fl"),
        Refusal("dout transposed", lambda f: f(*_bad_gradient(5, lambda t: t.mT)), ValueError, "dout"),
        Refusal("o of another dtype", lambda f: f(*_bad_gradient(3, lambda t: t.half())), TypeError, "o is"),
    ),
)
