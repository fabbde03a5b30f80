"""course_ops' attention against PyTorch: values, gradients, lse, refusals, graphs, and the lessons' machine code."""

import hashlib
import inspect
import json
import math
import re
import subprocess
import sys
from contextlib import nullcontext
from unittest import mock

from lessonkit import device
from lessonkit.base.files import environment
from lessonkit.modes import compiled
from lessonkit.modes.compile_server import call_in_compiler

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import course_ops
from course_ops import testing
from course_ops.attention import BACKWARD, FORWARD, Call, Gradient, visible_pairs
from course_ops.kernels import (
    attention_backward,
    attention_backward_hopper,
    attention_backward_wide_hopper,
    attention_decode,
    attention_forward_hopper,
)
from course_ops.kernels.attention_tiles import even_groups

pytestmark = pytest.mark.kept

OPS = torch.ops.course_ops
ROUNDING = {torch.float32: 8}  # PyTorch adds in another order; 16 bits: 2


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture(params=("cuda", "torch") if device.HAS_GPU else ("interpreted", "torch"))
def dev(request):
    """Where an operator computes: by kernels (on a GPU or interpreted), or by PyTorch on a CPU."""
    with testing.interpreted() if request.param == "interpreted" else nullcontext():
        yield torch.device("cuda" if request.param == "cuda" else "cpu")


def near(ours, theirs, exact, size=0.0):
    """Our error against float64 is at most twice PyTorch's own, and some roundings of the largest value, or of size."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    if exact.numel():
        rounding = torch.finfo(ours.dtype).eps * exact.abs().max().clamp(min=size)
        most = 2 * (theirs.double() - exact).abs().max() + ROUNDING.get(ours.dtype, 2) * rounding
        assert (ours.double() - exact).abs().max() <= most


def heads(dev, B, H, S_q, D, S_k=None, H_kv=None, D_v=None, dtype=torch.float32, layout="bhsd"):
    """q, k, v with scores far from 0. layout: of memory; "wide" has every second element."""

    def make(H, S, mean, D=D):
        t = (torch.randn(B, H, S, D, device=dev) + mean).to(dtype)
        if layout == "bshd":
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.stack([t, t + 1], -1)[..., 0] if layout == "wide" else t

    S_k = S_q if S_k is None else S_k
    return make(H, S_q, 0.5), make(H_kv or H, S_k, -0.5), make(H_kv or H, S_k, 0.5, D_v or D)


def mask(S_q, S_k, causal, window, dev):
    """Which keys each query sees, written as in the documentation."""
    at = torch.arange(S_q, device=dev)[:, None] + S_k - S_q
    keys = torch.arange(S_k, device=dev)
    return (
        torch.ones_like(keys * at, dtype=torch.bool) & ((keys <= at) | (not causal)) & (keys > at - (window or 2**30))
    )


def theirs(q, k, v, causal, window, scale):
    """PyTorch: out and lse in the dtype of q, zeros and -inf where no key is visible."""
    seen = mask(q.shape[2], k.shape[2], causal, window, q.device)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    s = (q @ k.mT).float() if q.dtype != torch.float64 else q @ k.mT
    s = (s * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(~seen, -math.inf)
    return torch.where(seen.any(-1, keepdim=True), out, 0), s.logsumexp(-1)


CASES = (  # B, H, S_q, D, S_k, H_kv, D_v if not D; causal, window, scale, layout
    ((1, 2, 0, 16, 5, 1), True, None, None, "bhsd"),  # no queries
    ((2, 2, 3, 16, 0, 2), False, None, None, "bhsd"),  # no keys: zeros and -inf
    ((0, 2, 3, 16, 3, 2), False, None, None, "bhsd"),
    ((1, 1, 1, 1, 1, 1), True, None, None, "bhsd"),
    ((2, 4, 7, 16, 7, 2), False, None, 0.3, "bhsd"),
    ((1, 2, 70, 24, 37, 1), True, None, None, "bhsd"),  # the first 33 queries see nothing
    ((1, 3, 131, 24, 131, 1), True, None, None, "bshd"),  # primes, as a projection leaves them
    ((1, 2, 67, 16, 90, 1), True, 9, None, "bhsd"),
    ((1, 1, 150, 16, 150, 1), True, 77, None, "bhsd"),  # a window that begins within a block
    ((1, 1, 40, 20, 40, 1), True, 1, None, "wide"),  # each query sees itself: out is v
    ((1, 1, 20, 256, 23, 1), True, None, None, "bhsd"),
    ((2, 4, 1, 16, 300, 2), True, None, None, "bhsd"),  # decoding
    ((1, 8, 3, 24, 290, 1), False, None, 0.5, "bshd"),
    ((1, 4, 70, 24, 90, 2, 40), True, None, None, "bhsd"),  # values longer than keys
    ((1, 2, 67, 40, 67, 1, 16), True, 9, 0.3, "bshd"),
    ((1, 1, 20, 192, 23, 1, 128), True, None, None, "wide"),
    ((2, 4, 1, 16, 300, 2, 40), True, None, None, "bshd"),
    ((1, 2, 3, 16, 0, 2, 24), False, None, None, "bhsd"),
    ((1, 2, 130, 16, 90, 1), True, 2**31 - 1, None, "bhsd"),  # as if there were no window
)
DECODED = (11, 12, 16)


def gradient_of_out(q, v):
    return torch.randn(*q.shape[:-1], v.shape[-1], device=q.device)


@pytest.mark.parametrize("i", range(len(CASES)))
def test_forward_errs_no_more_than_pytorch(dev, i):
    shape, causal, window, scale, layout = CASES[i]
    q, k, v = heads(dev, *shape, layout=layout)
    out, lse = course_ops.attention_forward(q, k, v, causal=causal, window=window, scale=scale)
    expected, exact = (theirs(*(t.to(d) for t in (q, k, v)), causal, window, scale) for d in (q.dtype, torch.float64))
    near(out, expected[0], exact[0])
    assert torch.equal(lse == -math.inf, exact[1] == -math.inf)
    near(*(t.nan_to_num(neginf=0.0) for t in (lse, expected[1], exact[1])))
    assert torch.equal(course_ops.attention(q, k, v, causal=causal, window=window, scale=scale), out)


@pytest.mark.parametrize("i", range(len(CASES)))
def test_gradients_err_no_more_than_pytorchs(dev, i):
    shape, causal, window, scale, layout = CASES[i]
    q, k, v = (t.requires_grad_() for t in heads(dev, *shape, layout=layout))
    dout = gradient_of_out(q, v) + 0.5
    options = {"causal": causal, "window": window, "scale": scale}
    ours = torch.autograd.grad(course_ops.attention(q, k, v, **options), (q, k, v), dout)
    found = []
    for dtype in (q.dtype, torch.float64):
        q_, k_, v_ = (t.detach().to(dtype).requires_grad_() for t in (q, k, v))
        out, _ = theirs(q_, k_, v_, causal, window, scale)
        grads = torch.autograd.grad(out, (q_, k_, v_), dout.to(dtype))
        found.append([g.nan_to_num() for g in grads])  # PyTorch: NaN for queries that see nothing
    size = (
        float(dout.abs().amax() * v.detach().abs().amax()) if dout.numel() * v.numel() else 0.0
    )  # of dP, where dP - delta is 0
    for mine, their, exact in zip(ours, *found, strict=True):
        near(mine, their, exact, size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("i", [5, 6, 7, 11, 13, 14, 15, 16])
def test_16_bits_err_no_more_than_pytorchs(dev, dtype, i):
    shape, causal, window, scale, layout = CASES[i]
    q, k, v = (t.requires_grad_() for t in heads(dev, *shape, layout=layout, dtype=dtype))
    dout = gradient_of_out(q, v).to(dtype)
    out = course_ops.attention(q, k, v, causal=causal, window=window, scale=scale)
    found = [(out, *torch.autograd.grad(out, (q, k, v), dout))]
    for wide in (dtype, torch.float64):
        q_, k_, v_ = (t.detach().to(wide).requires_grad_() for t in (q, k, v))
        out, _ = theirs(q_, k_, v_, causal, window, scale)
        found.append((out, *(g.nan_to_num() for g in torch.autograd.grad(out, (q_, k_, v_), dout.to(wide)))))
    # delta is a sum over out as it was rounded, which PyTorch's own backward does not need: twice its budget.
    for mine, their, exact in zip(*found, strict=True):
        near(mine, their + (their - exact.to(dtype)), exact)


def capped(q, k, v, causal, window, scale, softcap):
    """As theirs, out alone, with softcap * tanh(scores / softcap)."""
    seen = mask(q.shape[2], k.shape[2], causal, window, q.device)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    p = (softcap * torch.tanh(s / softcap)).masked_fill(~seen, -1e30).softmax(-1)  # -inf alone has no gradient
    return torch.where(seen.any(-1, keepdim=True), p @ v, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [0.5, 3.0, 50.0])
@pytest.mark.parametrize("i", [4, 5, 7, 10, 11, 12, 14])
def test_softcap_and_its_gradients_are_right(dev, i, softcap, dtype):
    shape, causal, window, scale, layout = CASES[i]
    q, k, v = (t.requires_grad_() for t in heads(dev, *shape, layout=layout, dtype=dtype))
    dout, options = gradient_of_out(q, v).to(dtype), {"causal": causal, "window": window, "scale": scale}
    out = course_ops.attention(q, k, v, **options, softcap=softcap)
    found = [(out, *torch.autograd.grad(out, (q, k, v), dout))]
    for wide in (dtype, torch.float64):
        q_, k_, v_ = (t.detach().to(wide).requires_grad_() for t in (q, k, v))
        out = capped(q_, k_, v_, causal, window, scale, softcap)
        found.append((out, *(g.nan_to_num() for g in torch.autograd.grad(out, (q_, k_, v_), dout.to(wide)))))
    for mine, their, exact in zip(*found, strict=True):
        near(mine, their + (their - exact.to(dtype)), exact)
    assert softcap == 50 or not torch.allclose(found[0][0], course_ops.attention(q, k, v, **options), atol=1e-3)


def test_softcap_is_not_computed_by_the_wide_backward(monkeypatch):
    monkeypatch.setattr(attention_forward_hopper, "takes", lambda *args: True)
    monkeypatch.setattr(attention_backward_wide_hopper, "takes", lambda *args: True)
    q, k, v = heads("cpu", 1, 2, 100, 256)
    for softcap, kernel in ((None, "wide"), (50.0, "portable")):
        assert chosen(FORWARD, Call(q, k, v, True, None, 0.25, softcap)) == "hopper"
        assert chosen(BACKWARD, Gradient(q, q, k, v, q, q[..., 0], True, None, 0.25, softcap)) == kernel


@pytest.mark.skipif(not device.HAS_GPU or device.architecture() != 90, reason="wgmma needs a Hopper GPU")
@pytest.mark.parametrize("softcap", [1.0, 20.0, 50.0])
@pytest.mark.parametrize(
    ("shape", "causal", "window"),
    [
        ((2, 4, 640, 128, 640, 2), True, None), ((1, 4, 1000, 128, 700, 4), False, None),
        ((2, 4, 333, 64, 500, 4), True, 100), ((1, 4, 700, 256, 700, 2), True, 300),
        ((1, 2, 2500, 64, 2500, 1), False, None),
    ],
)  # fmt: skip
def test_softcap_and_its_gradients_are_right_on_hopper(shape, causal, window, softcap):
    q, k, v = (t.requires_grad_() for t in heads("cuda", *shape, dtype=torch.bfloat16))
    dout = gradient_of_out(q, v).bfloat16()
    out = course_ops.attention(q, k, v, causal=causal, window=window, softcap=softcap)
    found = [(out, *torch.autograd.grad(out, (q, k, v), dout))]
    for wide in (torch.bfloat16, torch.float64):
        q_, k_, v_ = (t.detach().to(wide).requires_grad_() for t in (q, k, v))
        out = capped(q_, k_, v_, causal, window, None, softcap)
        found.append((out, *(g.nan_to_num() for g in torch.autograd.grad(out, (q_, k_, v_), dout.to(wide)))))
    for mine, their, exact in zip(*found, strict=True):
        near(mine, their + (their - exact.to(torch.bfloat16)), exact)


@pytest.mark.skipif(not device.HAS_GPU or device.architecture() != 90, reason="wgmma needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 4, 512, 128, 512, 4), (2, 4, 640, 128, 512, 2), (3, 8, 1000, 128, 1500, 2), (1, 6, 77, 64, 150, 2),
        (2, 4, 300, 96, 300, 4), (4, 34, 400, 64, 300, 34), (1, 2, 2500, 64, 2500, 1), (1, 2, 40, 32, 160, 1),
        (2, 4, 600, 128, 600, 1), (1, 2, 5000, 64, 5000, 2), (16, 16, 400, 128, 272, 8), (2, 4, 640, 128, 640, 2, 64),
        (2, 4, 500, 40, 700, 4, 96), (2, 4, 640, 192, 640, 4, 128), (2, 8, 700, 192, 1000, 4, 128),
        (1, 4, 512, 64, 512, 4, 256),
    ],
)  # fmt: skip
def test_hoppers_kernels_are_taken_and_right(dtype, causal, shape):
    q, k, v = heads("cuda", *shape, dtype=dtype)
    scale = q.shape[-1] ** -0.5
    dout = gradient_of_out(q, v).to(dtype)
    out, lse = course_ops.attention_forward(q, k, v, causal=causal)
    assert chosen(FORWARD, Call(q, k, v, causal, None, scale)) == "hopper"
    short, short_v = q.shape[-1] <= 128, v.shape[-1] <= 128
    kernel = ("hopper" if short else "hopper_192") if short_v else "wide"
    assert chosen(BACKWARD, Gradient(dout, q, k, v, out, lse, causal, None, scale)) == kernel
    ours = (out, *course_ops.attention_backward(dout, q, k, v, out, lse, causal=causal))
    found = []
    for wide in (dtype, torch.float64):
        q_, k_, v_ = (t.detach().to(wide).requires_grad_() for t in (q, k, v))
        expected, _ = theirs(q_, k_, v_, causal, None, None)
        found.append((expected, *(g.nan_to_num() for g in torch.autograd.grad(expected, (q_, k_, v_), dout.to(wide)))))
    for mine, their, exact in zip(ours, *found, strict=True):
        near(mine, their + (their - exact.to(dtype)), exact)
    # Scores that grow from block to block: the maximum of the first block does not do (lazy rescaling). A little more
    # in each block, so that P is scaled, and so much that a block is done again.
    q, rest = q.abs(), k.abs()
    for last in (8, 60):
        k = rest * torch.linspace(0.1, last, k.shape[2], device="cuda").to(dtype)[:, None].flip(0)
        out, _ = course_ops.attention_forward(q, k, v, causal=causal)
        near(out, *(theirs(*(t.to(d) for t in (q, k, v)), causal, None, None)[0] for d in (dtype, torch.float64)))


@pytest.mark.skipif(not device.HAS_GPU or device.architecture() != 90, reason="wgmma needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "causal", "window"),
    [
        ((2, 8, 640, 192, 640, 2), True, None), ((2, 4, 640, 192, 500, 4), False, None),
        ((1, 6, 1000, 256, 1500, 2), True, None), ((2, 4, 513, 256, 513, 4), False, None),
        ((1, 4, 700, 160, 700, 1), True, None), ((1, 4, 300, 200, 130, 4), True, None),
        ((2, 4, 640, 136, 77, 2), False, None), ((2, 34, 1024, 192, 1024, 34), True, None),
        *(((2, 4, 1500, D, 1500, 2), True, window) for D in (64, 96, 128, 192, 256) for window in (1, 100, 128, 700)),
        ((1, 8, 700, 128, 3000, 4), True, 300), ((1, 8, 3000, 128, 700, 4), True, 300),
        ((1, 8, 700, 256, 3000, 4), True, 300), ((1, 8, 3000, 64, 700, 4), True, 10**10),
        *(((2, 4, 1000, 192, 1100, 2, 128), True, window) for window in (None, 1, 100, 300)),
        ((2, 4, 1000, 192, 1000, 4, 128), True, None), ((2, 4, 1000, 192, 700, 4, 128), False, None),
        ((1, 4, 700, 128, 700, 1, 200), True, 130), ((1, 4, 700, 256, 700, 1, 64), True, None),
    ],
    ids=str,
)  # fmt: skip
def test_hoppers_forward_is_right_for_wide_heads_and_windows(dtype, shape, causal, window):
    """Forward: friendly scores, then those that raise a row's maximum, then those for which a block is done again."""
    q, k, v = heads("cuda", *shape, dtype=dtype)
    assert chosen(FORWARD, Call(q, k, v, causal, window, 1.0)) == "hopper"
    q_rest, k_rest = q.abs(), k.abs()
    for last in (None, 8, 60):
        if last:
            growth = torch.linspace(0.1, last, k.shape[2], device="cuda").to(dtype)[:, None].flip(0)
            q, k = q_rest, k_rest * growth
        out, lse = course_ops.attention_forward(q, k, v, causal=causal, window=window)
        expected, exact = (theirs(*(t.to(d) for t in (q, k, v)), causal, window, None) for d in (dtype, torch.float64))
        near(out, expected[0], exact[0])
        assert torch.equal(lse == -math.inf, exact[1] == -math.inf)
        torch.testing.assert_close(lse.double(), exact[1], rtol=1e-5, atol=1e-4)


def chosen(table, call):
    return next(name for name, takes, _ in table if takes(call))


@pytest.mark.skipif(device.HAS_GPU, reason="a GPU may have another kernel")
def test_which_kernel_is_interpreted():
    with testing.interpreted():
        for i, (shape, causal, window, _, layout) in enumerate(CASES):
            call = Call(*heads("cpu", *shape, layout=layout), causal, window, 1.0)
            if call.q.numel():
                assert chosen(FORWARD, call) == ("decode" if i in DECODED else "portable")


@pytest.mark.parametrize("most", [1, 4, 8, 16])
def test_groups_of_heads_are_even(most):
    """As many groups as with `most` heads each, and the last is smaller by less than a head for each other group."""
    for heads in range(1, 70):
        each = even_groups(heads, most)
        groups = math.ceil(heads / each)
        assert each <= most
        assert groups == math.ceil(heads / most)
        assert each * groups - heads < groups
    assert even_groups(0, most) == 0


@pytest.mark.parametrize(
    ("B", "H", "H_kv", "S", "groups"),
    [
        (5, 12, 2, 4096, [5, 5]),
        (1, 8, 8, 4096, [8]),
        (9, 4, 2, 4096, [6, 6, 6]),
        (16, 8, 8, 512, [32, 32, 32, 32]),  # four tiles each: 33 heads have a tile for each of 132 SMs
    ],
)
def test_the_backward_on_hopper_works_on_even_groups(monkeypatch, B, H, H_kv, S, groups):
    """Ten heads are two groups of five. In one of eight and one of two, too few long tiles would be left at the end."""
    launched, kernel = mock.MagicMock(), attention_backward_hopper.attention_backward_hopper_kernel
    names = inspect.signature(kernel.fn).parameters
    monkeypatch.setattr(attention_backward_hopper, "attention_backward_hopper_kernel", launched)
    monkeypatch.setattr(attention_backward_hopper, "heads_in_l2", lambda *_: 0)  # at most eight long ones, on any GPU
    monkeypatch.setattr(attention_backward_hopper, "num_sms", lambda _: 132)
    for other in ("prepare_kernel", "finish_kernel"):
        monkeypatch.setattr(attention_backward_hopper, other, mock.MagicMock())
    q, k = (torch.empty(B, heads, S, 128, dtype=torch.bfloat16) for heads in (H, H_kv))
    lse = torch.empty(B, H, S)
    attention_backward_hopper.attention_backward(q, q, k, k, q, lse, True, 0.1)
    arguments = dict(zip(names, launched.__getitem__.return_value.call_args.args, strict=False))
    each, heads = arguments["heads_at_once"], arguments["all_heads"]
    assert [min(each, heads - first) for first in range(0, heads, each)] == groups


def test_float64_on_a_cpu():
    for D_v in (3, 8):
        q, k, v = (t.double().requires_grad_() for t in heads("cpu", 1, 4, 5, 8, S_k=7, H_kv=2, D_v=D_v))
        for softcap in (None, 0.7):
            options = {"causal": True, "window": 3, "softcap": softcap}
            assert torch.autograd.gradcheck(lambda *t, o=options: course_ops.attention(*t, **o), (q, k, v))
    out, lse = course_ops.attention_forward(q, k, v, causal=True)
    expected = theirs(q, k, v, True, None, None)
    torch.testing.assert_close((out, lse), expected)


def test_two_halves_of_the_keys_are_merged_by_lse(dev):
    """And their backward, given the whole's out and lse, adds up to the whole's: what a ring does."""
    q, k, v = heads(dev, 1, 4, 40, 16, S_k=70, H_kv=2)
    dout = torch.randn_like(q)
    whole, lse = course_ops.attention_forward(q, k, v, scale=0.4)
    halves = [(k[:, :, part], v[:, :, part]) for part in (slice(33), slice(33, None))]
    parts = [course_ops.attention_forward(q, *kv, scale=0.4) for kv in halves]
    merged = torch.stack([part_lse for _, part_lse in parts]).logsumexp(0)
    out = sum((part_lse - merged).exp()[..., None] * part for part, part_lse in parts)
    torch.testing.assert_close((out, merged), (whole, lse), rtol=1e-5, atol=1e-5)
    grads = [course_ops.attention_backward(dout, q, *kv, whole, lse, scale=0.4) for kv in halves]
    dq, dk, dv = course_ops.attention_backward(dout, q, k, v, whole, lse, scale=0.4)
    joined = grads[0][0] + grads[1][0], torch.cat([g[1] for g in grads], 2), torch.cat([g[2] for g in grads], 2)
    torch.testing.assert_close(joined, (dq, dk, dv), rtol=1e-5, atol=1e-5)


def test_what_is_not_seen_does_not_matter(dev):
    """To the bit: other keys in the future, or before the window, change nothing, and get no gradient."""
    q, k, v = heads(dev, 1, 1, 150, 16)
    for window, rows, changed in ((None, slice(100), slice(100, 150)), (20, slice(100, 150), slice(80))):
        before = course_ops.attention(q, k, v, causal=True, window=window)
        k_, v_ = k.clone(), v.clone()
        k_[:, :, changed], v_[:, :, changed] = k_[:, :, changed] + 3, 7.0
        k_.requires_grad_(), v_.requires_grad_()
        after = course_ops.attention(q, k_, v_, causal=True, window=window)
        assert torch.equal(after[:, :, rows], before[:, :, rows])
        assert not torch.equal(after, before)
        after[:, :, rows].sum().backward()
        assert not k_.grad[:, :, changed].any()
        assert not v_.grad[:, :, changed].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # by pointers, and by TMA
def test_lengths_of_a_cache(dtype):
    """Keys past a sequence's length, here NaN, are not read; each sequence is computed as if it were alone."""
    with testing.kernels():
        q, k, v = heads(device.DEVICE, 4, 4, 2, 16, S_k=300, H_kv=2, dtype=dtype)
        lengths = torch.tensor([0, 1, 130, 300], dtype=torch.int32, device=device.DEVICE)
        for b, n in enumerate(lengths.tolist()):
            k[b, :, n:], v[b, :, n:] = math.nan, math.nan
        found = attention_decode.attention_decode(q, k, v, True, 0.25, lengths)
        for b, n in enumerate(lengths.tolist()):
            one = slice(b, b + 1)
            alone = course_ops.attention_forward(q[one], k[one, :, :n], v[one, :, :n], causal=True, scale=0.25)
            close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 4e-3}
            torch.testing.assert_close(tuple(t[one] for t in found), alone, **close)


def test_the_backward_of_fixed_order_is_the_same_each_time(dev):
    q, k, v = heads(dev, 1, 4, 70, 16, H_kv=1)
    dout, (out, lse) = torch.randn_like(q), course_ops.attention_forward(q, k, v, causal=True)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (course_ops.attention_backward(dout, q, k, v, out, lse, causal=True) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, first, second))


def test_operators_are_sound(dev):
    """opcheck: schema, fake and gradient agree with what the operators do; no result shares memory."""
    q, k, v = heads(dev, 1, 2, 9, 8, S_k=11, H_kv=1)
    dout, (out, lse) = torch.randn_like(q), course_ops.attention_forward(q, k, v)
    torch.library.opcheck(OPS.attention, tuple(t.requires_grad_() for t in (q, k, v)))
    torch.library.opcheck(OPS.attention, (q.detach().mT, k.detach()[..., :9, :].mT, v.detach()[..., :9, :].mT, True, 3))
    torch.library.opcheck(OPS.attention_backward, tuple(t.detach() for t in (dout, q, k, v, out, lse)))
    for layout in ("bhsd", "bshd", "wide"):
        given = heads(dev, 1, 2, 9, 8, S_k=11, H_kv=1, D_v=24, layout=layout)
        torch.library.opcheck(OPS.attention, tuple(t.requires_grad_() for t in given))


def test_in_a_compiled_graph(dev):
    q, k, v = (t.requires_grad_() for t in heads(dev, 1, 2, 9, 8))

    def loss(q, k, v):
        return course_ops.attention(q, k, v, causal=True, scale=0.5).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected, found = (torch.autograd.grad(f(q, k, v), (q, k, v)) for f in (loss, compiled))
    torch.testing.assert_close(found, expected)


def test_flops_are_those_of_visible_pairs():
    for S_q, S_k in ((0, 3), (3, 0), (1, 1), (4, 4), (4, 9), (9, 4)):
        for causal, window in ((False, None), *((True, w) for w in (None, 1, 3, 4, 20))):
            expected = int(mask(S_q, S_k, causal, window, "cpu").sum())
            assert visible_pairs(S_q, S_k, causal, window) == expected
    q, k, v = (t.requires_grad_() for t in heads("cpu", 2, 4, 16, 8, H_kv=2))
    for causal, pairs in ((False, 256), (True, 136)):
        with FlopCounterMode(display=False) as flops:
            course_ops.attention(q, k, v, causal=causal).sum().backward()
        assert flops.get_total_flops() == 14 * 2 * 4 * 8 * pairs
    q, k, v = (t.requires_grad_() for t in heads("cpu", 2, 4, 16, 8, H_kv=2, D_v=24))
    with FlopCounterMode(display=False) as flops:
        course_ops.attention(q, k, v).sum().backward()
    assert flops.get_total_flops() == 2 * 4 * 256 * (8 * 8 + 6 * 24)


def test_a_second_derivative_is_an_error():
    q, k, v = (t.requires_grad_() for t in heads("cpu", 1, 1, 4, 8))
    (dq,) = torch.autograd.grad(course_ops.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        dq.sum().backward()


def refused(change=lambda q, k, v: (q, k, v), **options):
    return lambda: course_ops.attention(*change(*heads("cpu", 1, 4, 8, 16)), **options)


def refused_gradient(which, change, **options):
    def call():
        q, k, v = heads("cpu", 1, 4, 8, 16)
        args = [torch.zeros_like(q), q, k, v, *course_ops.attention_forward(q, k, v)]
        args[which] = change(args[which])
        course_ops.attention_backward(*args, **options)

    return call


REFUSED = (
    (refused(lambda q, k, v: (q[:, :3], k[:, :2], v[:, :2])), ValueError, "q has 3 heads, k 2"),
    (refused(lambda q, k, v: (q[0], k[0], v[0])), ValueError, "q has 3 dimension"),
    (refused(lambda q, k, v: (t.expand(1, 4, 8, 272) for t in (t[..., :1] for t in (q, k, v)))),
     course_ops.Unsupported, "head_dim 272, expected 1 to 256"),
    (refused(lambda q, k, v: (q[..., :0], k[..., :0], v[..., :0])), ValueError, "head_dim 0, expected 1 to 256"),
    (refused(lambda q, k, v: (q, k[:, :0], v[:, :0])), ValueError, "q has 4 heads, k 0: expected 1 or more in k"),
    (refused(lambda q, k, v: (q, k[..., :8], v[..., :8])), ValueError, "head_dim"),
    (refused(lambda q, k, v: (q, k, v[:, :, 1:])), ValueError, "v has shape"),
    (refused(lambda q, k, v: (q, k, v[..., :1].expand(1, 4, 8, 272))), course_ops.Unsupported, "v has head_dim 272"),
    (refused(lambda q, k, v: (q, k, v[..., :0])), course_ops.Unsupported, "v has head_dim 0"),
    (refused_gradient(0, lambda t: t[..., :8]), ValueError, "dout has shape"),
    (refused_gradient(3, lambda t: t[..., :8]), ValueError, "dout has shape"),
    (refused(lambda q, k, v: (q, k.half(), v)), TypeError, "k is torch.float16, but q"),
    (refused(lambda q, k, v: (q.long(), k, v)), TypeError, "q is torch.int64"),
    (refused(lambda q, k, v: (q, k.to("meta"), v)), ValueError, "k is on meta"),
    (refused(window=4), ValueError, "needs causal=True"),
    (refused(window=0, causal=True), ValueError, "1 or more keys"),
    (refused(scale=-1.0), ValueError, "pass -q"),
    (refused(softcap=0.0), ValueError, "softcap = 0.0, expected a positive"),
    (refused(softcap="50"), TypeError, "softcap is '50'"),
    (refused(scale=math.nan), ValueError, "positive number"),
    (refused_gradient(5, lambda t: t[..., 1:]), ValueError, "lse has shape"),
    (refused_gradient(5, torch.Tensor.half), TypeError, "lse is torch.float16"),
    (refused_gradient(5, lambda t: t.to("meta")), ValueError, "lse is on meta"),
    (refused_gradient(0, torch.Tensor.half), TypeError, "dout is torch.float16"),
    (refused_gradient(0, lambda t: t[:, :1]), ValueError, "dout has shape"),
    (refused_gradient(0, lambda t: t, window=3), ValueError, "needs causal"),
)  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_kernels_refuse_float64():
    with testing.kernels(), pytest.raises(TypeError, match="q is torch"):
        course_ops.attention(*(t.double() for t in heads(device.DEVICE, 1, 1, 4, 8)))


# ---- transformers --------------------------------------------------------------------------------------------------


def models():
    """GPT-2 and Llama (grouped heads), small and random."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 97}
    ends = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.2}
    gpt2 = transformers.GPT2Config(**sizes, **ends, n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    llama = transformers.LlamaConfig(
        **sizes, **ends, num_key_value_heads=2, intermediate_size=64, max_position_embeddings=64
    )
    for config in (gpt2, llama):
        yield transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().to(device.DEVICE)


def test_models_of_transformers_answer_as_with_sdpa():
    """Logits, gradients and generated tokens are sdpa's; a padded prompt's logits are those of the prompt alone."""
    import course_ops.transformers as ours

    tokens = torch.randint(1, 97, (2, 11), device=device.DEVICE)
    padded, attention_mask = tokens.clone(), torch.ones_like(tokens)
    padded[1, :4], attention_mask[1, :4] = 0, 0
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    for model in models():
        ours.register()
        found = []
        for name in ("sdpa", ours.NAME):
            model.set_attn_implementation(name)
            out = model(tokens, labels=tokens)
            grads = torch.autograd.grad(out.loss, list(model.parameters()))
            with torch.no_grad():
                left = model(padded, attention_mask=attention_mask, position_ids=positions).logits[1, 4:]
                new = model.generate(tokens[:1], max_new_tokens=4, do_sample=False)
            found.append((out.logits.detach(), *grads, left, new))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


TOKENS = torch.zeros(1, 2, 6, 8)
REFUSED_BY_MODELS = (
    ({"dropout": 0.1}, None, "set it to 0"),
    ({"position_bias": TOKENS}, None, "position_bias is not there"),
    ({"cu_seq_lens_q": torch.tensor([0, 2, 6])}, None, "call course_ops.attention_varlen"),
    ({}, torch.tensor([[1, 1, 0, 1, 1, 1]]), "sequence 0 has a hole"),
    ({}, torch.zeros(1, 1, 6, 6), r"expected \(1, 6\)"),
)


@pytest.mark.parametrize(("options", "padding", "words"), REFUSED_BY_MODELS, ids=[w for *_, w in REFUSED_BY_MODELS])
def test_models_are_told_what_is_not_there(options, padding, words):
    from course_ops.transformers import model_attention

    with pytest.raises(ValueError, match=words):
        model_attention(torch.nn.Identity(), TOKENS, TOKENS, TOKENS, padding, **options)


SMALL = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 97, "intermediate_size": 64,
    "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.2,
    "max_position_embeddings": 64,
}  # fmt: skip
WINDOWED = SMALL | {"num_key_value_heads": 2, "sliding_window": 4}
ALONE = WINDOWED | {"sliding_window": 1}  # a token sees itself
GEMMA_2 = WINDOWED | {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}
CHUNKED = SMALL | {
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size_mlp": 64, "attention_chunk_size": 4,
    "num_local_experts": 1,
}  # fmt: skip


def model_of(config, options, kind="AutoModelForCausalLM"):
    """A small random model of transformers, by the name of its config; attention is computed by transformers."""
    import course_ops.transformers as ours

    transformers = pytest.importorskip("transformers")
    ours.register()
    torch.manual_seed(0)
    made = getattr(transformers, kind).from_config(
        getattr(transformers, config)(**options), attn_implementation="eager"
    )
    return made.eval().to(device.DEVICE)


def answers_as_eager(model, ask):
    from course_ops.transformers import NAME

    found = []
    for name in ("eager", NAME):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found.append(ask(model))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "options"),
    [("LlamaConfig", SMALL), ("MistralConfig", WINDOWED), ("Gemma2Config", GEMMA_2)],
    ids=["full", "window", "hybrid with softcap"],
)
def test_models_with_windows_and_soft_caps_answer_as_eager(config, options):
    model = model_of(config, options)
    tokens = torch.randint(1, 97, (2, 11), device=device.DEVICE)
    padding = torch.ones_like(tokens)
    padding[1, :4] = 0
    answers_as_eager(model, lambda m: m(tokens).logits)
    answers_as_eager(model, lambda m: m(tokens[:1, :1]).logits)
    for given in ({}, {"attention_mask": padding}):
        answers_as_eager(model, lambda m, given=given: m.generate(tokens, max_new_tokens=6, do_sample=False, **given))
    answers_as_eager(model, lambda m: m.generate(tokens[:1, :2], max_new_tokens=6, do_sample=False))


def test_a_window_of_1_is_taken():
    """Generated tokens are those of eager without a cache: the cache of such a window in transformers keeps all keys.

    A position that sees a padded key alone has no answer.
    """
    from course_ops.transformers import NAME

    model = model_of("MistralConfig", ALONE)
    tokens = torch.randint(1, 97, (2, 11), device=device.DEVICE)
    padding = torch.ones_like(tokens)
    padding[1, :4] = 0
    answers_as_eager(model, lambda m: m(tokens).logits)
    answers_as_eager(model, lambda m: m(tokens[:1, :1]).logits)
    answers_as_eager(model, lambda m: m(tokens, attention_mask=padding).logits[padding.bool()])
    for given in ({}, {"attention_mask": padding}):
        found = []
        for name, cache in (("eager", False), (NAME, False), (NAME, True)):
            model.set_attn_implementation(name)
            found.append(model.generate(tokens, max_new_tokens=6, do_sample=False, use_cache=cache, **given))
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


def test_encoders_and_cross_attention_answer_as_eager():
    tokens = torch.randint(1, 97, (2, 11), device=device.DEVICE)
    padding = torch.ones_like(tokens)
    padding[1, 7:] = 0
    bert = model_of("BertConfig", SMALL | {"attention_probs_dropout_prob": 0.0}, "AutoModel")
    answers_as_eager(bert, lambda m: m(tokens, attention_mask=padding).last_hidden_state[padding.bool()])
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in
             (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    ends = {"bos_token_id": 0, "eos_token_id": None, "forced_eos_token_id": None, "pad_token_id": 0}
    bart = model_of(
        "BartConfig",
        sizes | ends | {"vocab_size": 97, "d_model": 32, "init_std": 0.2, "decoder_start_token_id": 2},
        "AutoModelForSeq2SeqLM",
    )
    answers_as_eager(bart, lambda m: m(tokens, attention_mask=padding, decoder_input_ids=tokens[:, :5]).logits)
    answers_as_eager(bart, lambda m: m.generate(tokens, attention_mask=padding, max_new_tokens=4, do_sample=False))


def packed(model, tokens):
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]], device=tokens.device)
    return model(tokens, position_ids=positions, use_cache=False)


MASKS_REFUSED = (
    ("LlamaConfig", SMALL, packed),
    ("MistralConfig", WINDOWED, packed),
    ("Llama4TextConfig", CHUNKED, lambda m, t: m(t)),
    ("Llama4TextConfig", CHUNKED | {"attention_chunk_size": 1}, lambda m, t: m(t)),
    ("Llama4TextConfig", CHUNKED, lambda m, t: m.generate(t[:, :2], max_new_tokens=6, do_sample=False)),
)


@pytest.mark.parametrize(
    ("config", "options", "ask"), MASKS_REFUSED, ids=["packed", "window", "chunks", "chunks of 1", "generated"]
)
def test_a_mask_that_the_operator_lacks_is_an_error(config, options, ask):
    from course_ops.transformers import NAME

    model = model_of(config, options)
    model.set_attn_implementation(NAME)
    tokens = torch.randint(1, 97, (1, 11), device=device.DEVICE)
    with torch.no_grad(), pytest.raises(ValueError, match=r"packed sequences, of chunks.* use attn_implementation"):
        ask(model, tokens)


@pytest.mark.parametrize("first", [3, 1])
def test_a_static_cache_is_an_error(first):
    from course_ops.transformers import NAME

    model = model_of("LlamaConfig", SMALL)
    model.set_attn_implementation(NAME)
    tokens = torch.randint(1, 97, (1, first), device=device.DEVICE)
    with pytest.raises(ValueError, match="as a static cache has them, are not there: use a dynamic cache"):
        model.generate(tokens, max_new_tokens=3, do_sample=False, cache_implementation="static")


def blocks(*ids):
    return {"block_sequence_ids": torch.tensor([ids], device=device.DEVICE)}


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (blocks(-1, -1, -1, -1), False),
        (blocks(-1, 0, 0, -1), True),
        (blocks(0, 0, 0, 0), True),  # all tokens see all, and the layers are causal
        ({"or_mask_function": lambda b, h, q, k: k < 2}, True),
    ],
    ids=["text", "image", "prefix", "function"],
)
def test_tokens_that_see_later_ones_are_an_error(options, refused):
    from course_ops.transformers import NAME

    model = model_of("LlamaConfig", SMALL)
    model.set_attn_implementation(NAME)
    from transformers.masking_utils import create_causal_mask

    given = model.config, torch.zeros(1, 4, 32, device=device.DEVICE), None, None
    if refused:
        with pytest.raises(ValueError, match="tokens that see later ones"):
            create_causal_mask(*given, **options)
    else:
        assert create_causal_mask(*given, **options) is None


def test_the_first_versions_5_of_transformers_give_the_positions_of_the_cache():
    masking = pytest.importorskip("transformers.masking_utils")
    from course_ops.transformers import model_mask

    def mask(kv_length, function=masking.causal_mask_function):
        positions = torch.arange(3, 6, device=device.DEVICE)
        return model_mask(batch_size=1, cache_position=positions, kv_length=kv_length, mask_function=function)

    assert mask(6) is None
    assert mask(6, masking.sliding_window_causal_mask_function(2)) is None
    assert mask(9, masking.bidirectional_mask_function) is None
    with pytest.raises(ValueError, match="a static cache"):
        mask(9)


@pytest.mark.parametrize(("config", "options"), [("LlamaConfig", SMALL), ("MistralConfig", WINDOWED)])
def test_a_model_is_compiled_as_one_graph(config, options):
    from course_ops.transformers import NAME

    model = model_of(config, options)
    model.set_attn_implementation(NAME)
    tokens = torch.randint(1, 97, (2, 11), device=device.DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found, expected = (m(tokens, use_cache=False).logits for m in (compiled, model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_without_transformers_the_error_says_how_to_install_it(monkeypatch):
    from course_ops.transformers import register

    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    with pytest.raises(ImportError, match="pip install 'transformers>=5'"):
        register()


# ---- The lessons' machine code -------------------------------------------------------------------------------------


def sized(S, D, causal, H_kv=None, S_k=None, dtype="bfloat16", window=None, B=2, H=8):
    return {
        "B": B, "H": H, "S": S, "D": D, "S_k": S_k, "H_kv": H_kv, "causal": causal, "dtype": dtype, "window": window
    }  # fmt: skip


FORWARD_NIGHT = [
    *(("forward", sized(4096, D, causal, H_kv)) for D in (64, 128) for causal in (False, True) for H_kv in (8, 2)),
    ("forward", sized(512, 128, True)),
    ("forward", sized(16384, 64, True)),
    *(("forward", sized(1000, D, True, S_k=1500, dtype="float16")) for D in (64, 96, 128)),
    *(("forward", sized(1024, D, True, 2, dtype="float32")) for D in (64, 256)),
    *(("forward", sized(1024, D, True, 2, window=256)) for D in (128, 256)),
    ("decode", sized(1, 128, True, H=32, H_kv=8, S_k=8192)),
    ("decode", sized(4, 64, True, H=32, H_kv=8, S_k=8192)),
    ("decode", sized(1, 128, True, H=32, H_kv=32, S_k=8192, B=16)),
]


@pytest.mark.night
@pytest.mark.parametrize("cases", [FORWARD_NIGHT], ids=["forward"])
def test_a_lessons_last_rung_is_the_operators_kernel(cases):
    """Compiled for sm_90 both have the same PTX or the same SASS, and the same grid, warps and shared memory.

    PTX may name and order values in another way, for the same SASS; and of one PTX, ptxas makes another schedule now
    and then. Neither counts the names and places of parameters. Decoding is compared. Rungs on Hopper take the plain
    case only: tests/test_flash_hopper.py and tests/test_last_rungs.py compare them.
    """
    command = [sys.executable, "-c", "from tests.test_course_ops_attention import print_launches; print_launches()"]
    env = environment(LESSONKIT_MODE="compiled", CUDA_VISIBLE_DEVICES="", TRITON_DISABLE_LINE_INFO="1")
    answer = subprocess.run(command, input=json.dumps(cases), env=env, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-2000:]
    for (what, sizes), found in zip(cases, json.loads(answer.stdout), strict=True):
        for ours, lessons in zip(found["operator"], found["lesson"], strict=what != "forward"):
            assert ours[2:] == lessons[2:], (what, sizes)
            assert ours[0] == lessons[0] or ours[1] == lessons[1], (what, sizes)
        on_hopper = sizes["dtype"] != "float32" and what != "decode"
        assert any("hopper" in name for name in found["names"]) == on_hopper
        if what == "forward" and on_hopper:
            assert found["spills"] == 0 or sizes["D"] == 256 or sizes["window"], sizes  # there, scalars of a tile


def print_launches():
    """In a process of its own: for each case on stdin what course_ops and the lesson launch, as JSON."""
    from lessonkit.measure import launches
    from lessonkit.modes import compiled

    from triton.runtime.jit import JITFunction

    from course_ops.attention import launch_forward
    from day4_replace_op import lesson11_flash_decoding_shares as shares
    from problems.attention import PROBLEM

    made, answers = [], []

    def launched(self, *args, **options):
        made.append(record(self, *args, **options))

    def code(kernel):
        """PTX and SASS as hashes, without the kernel's name and the numbers or addresses of its parameters."""
        with compiled.as_file(kernel.asm["cubin"]) as cubin:
            sass = re.sub(r"c\[0x0\]\s*\[0x[0-9a-f]+\](.*?);.*", r"c\1;", compiled.tool("cuobjdump", "-sass", cubin))
        ptx = re.sub(r"_param_\d+", "_param", kernel.asm["ptx"])
        ptx = "\n".join(line for line in ptx.splitlines() if not line.strip().startswith((".param", "//")))
        plain = (text.replace(kernel.metadata.name, "kernel") for text in (ptx, sass))
        return [hashlib.sha256(text.encode()).hexdigest() for text in plain]

    with launches.recording() as events:
        record = JITFunction.run
        for what, sizes in json.load(sys.stdin):
            q, k, v, causal, window, _ = PROBLEM.inputs(**sizes | {"dtype": getattr(torch, sizes["dtype"])})
            call = Call(q, k, v, causal, window, q.shape[-1] ** -0.5)
            lesson = {
                "forward": lambda: None,
                "decode": lambda c=call: shares.decode(*c[:3], None, c.causal),
            }[what]
            answer = {}
            for name, fn in (("lesson", lesson), ("operator", lambda c=call: launch_forward(c))):
                events.clear(), made.clear()
                with mock.patch.object(JITFunction, "run", launched):
                    fn()
                kernels = [event for event in events if event[0] == "kernel"]
                answer[name] = [(*code(m), *map(str, e[3:7])) for m, e in zip(made, kernels, strict=True)]
            rows = [compiled.inspect(what, kernel, launches.TARGET) for kernel in made]
            answers.append(answer | {"names": [row.kernel for row in rows], "spills": sum(row.spills for row in rows)})
    print(json.dumps(answers))


def compile_fp32_gradients(D: int, window: int | None) -> list[tuple[str, int]]:
    """(kernel, its spills) of the backward in fp32, for Hopper. In the process that compiles."""
    q, out = (torch.empty(2, 4, 192, D, device="meta") for _ in range(2))
    k, v = (torch.empty(2, 2, 192, D, device="meta") for _ in range(2))
    with compiled.compiling(90) as made:
        attention_backward.attention_backward(out, q, k, v, out, q[..., 0].contiguous(), True, window, 0.1)
    return [(name, compiled.inspect("backward", kernel, 90).spills) for name, kernel in made.items()]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_gradients_in_fp32_stay_in_registers(D, window):
    """FMAs are unrolled: in tiles that are too large each thread keeps kilobytes in local memory."""
    found = dict(call_in_compiler("tests.test_course_ops_attention", "compile_fp32_gradients", D, window))
    assert {"dq_kernel", "dkdv_kernel"} <= found.keys()
    assert max(found.values()) <= 16, found
