"""Cross-entropy of logits and class indices: loss = log(sum_j exp(x_j)) - x_target of each row; its gradient.

Forward: logits [M, V], targets [M] int64 -> loss [M] and lse = log(sum_j exp(x_j)) [M], both in fp32. A target of -100
is ignored (loss 0); any other that is no class gives NaN.
Backward: dloss [M] fp32, logits [M, V], targets [M], lse [M] -> dlogits [M, V] in the logits' dtype.
"""

import math
from importlib import import_module

from lessonkit import DEVICE, Problem, Refusal, Unsupported, Work, by_inductor, case

import torch
from torch.utils.weak import WeakTensorKeyDictionary


def reference(logits, targets):
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = x.amax(-1)
    lse = top + (x - top[:, None]).exp().sum(-1).log()
    return torch.nn.functional.cross_entropy(x, targets, reduction="none"), lse


def inputs(M, V, pad=0, skip=0, strange=False, dtype=torch.float32):
    # Centred at -8: a lane past the end that counts as 0 would be the largest of its row. With pad or skip, x is a
    # slice of a wider matrix, so stride(0) is not V and rows start anywhere.
    x = torch.randn(M, skip + V + pad, device=DEVICE) * 3 - 8
    if strange:
        # Without the maximum rows at 3000 overflow (lse - logit loses digits there) and rows at -110 are log(0). The
        # first half of some rows is -inf, as a masked vocabulary is. Not all peers get these right.
        x[1::4] += 3008
        x[2::4] -= 102
        x[3::4, : skip + V // 2] = -math.inf
    targets = V - 1 - torch.arange(M, device=DEVICE) * 7919 % V  # the last column first: it lies in the partial block
    targets[2::5] = -100
    return x.to(dtype)[:, skip : skip + V], targets


def _torch(logits, targets):
    log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
    return torch.nn.functional.nll_loss(log_p, targets, reduction="none"), logits[:, 0] - log_p[:, 0]


_LIGERS = WeakTensorKeyDictionary()  # logits -> the copy that Liger writes into


def _liger(logits, targets):
    """The loss alone, rounded to the logits' dtype; None for lse.

    Liger writes into the logits: zeros where a row has no target, and the gradient if one is asked for. So the forward
    has a copy of the logits, made at the first call. Why Liger is no peer of the backward: see PROBLEM_BACKWARD.
    """
    forward = import_module("liger_kernel.ops.cross_entropy").cross_entropy_forward
    if logits not in _LIGERS:
        _LIGERS[logits] = logits.clone()
    return forward(_LIGERS[logits], targets, None, -100, 0.0, 0.0, "none", None, False)[0], None


def _quack(logits, targets):
    from quack.cross_entropy import cross_entropy_fwd

    if logits.shape[1] * logits.element_size() % 16:
        raise Unsupported("quack's rows start at multiples of 16 bytes")
    return cross_entropy_fwd(logits, targets, return_lse=True)


def strange_numbers(rung):
    """NaN and inf as in PyTorch; a target that is no class gives NaN, whatever lies at that address."""
    nan, inf = math.nan, math.inf
    x = torch.tensor([[1, nan, 2], [1, inf, 2], [-inf] * 3, [1, -inf, 2], [3e38, -3e38, 0]], device=DEVICE)
    for target in (0, 1, -100):
        targets = torch.full([5], target, device=DEVICE)
        torch.testing.assert_close(rung(x, targets), reference(x, targets), rtol=1e-6, atol=0, equal_nan=True)
    for target in (-1, 3, -101, 2**40):
        loss, lse = rung(x[3:4], torch.tensor([target], device=DEVICE))
        assert loss.isnan().all()
        assert lse.isfinite().all()


def shift_invariance(rung):
    """loss(x + 1024) = loss(x), to the last digits; x is rounded so that adding 1024 is exact."""
    x = (torch.randn(3, 781, device=DEVICE) * 64).round() / 16
    targets = torch.tensor([0, 780, 5], device=DEVICE)
    torch.testing.assert_close(rung(x + 1024, targets)[0], rung(x, targets)[0], rtol=1e-6, atol=0)


PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=lambda M, V, dtype, **_: Work(bytes=M * (V * dtype.itemsize + 8 + 4 + 4), flops=4 * M * V),
    checks=(
        case("nothing to do", M=0, V=8),
        case("one class: the loss is exactly 0", M=3, V=1, strange=True),
        case("rows shorter than a warp or a 16-byte chunk, some across two chunks", M=5, V=7, strange=True),
        case("one past a block of 1024", M=4, V=1025, strange=True),
        case("rows that start at every place within a 16-byte chunk", M=17, V=1153, strange=True),
        case("no row starts at a multiple of 16 bytes", M=4, V=2051, pad=4, skip=1, strange=True),
        case("a row past element 2^31", gib=50, M=3, V=5003, pad=2**30),
    ),
    benches=tuple(
        {"M": M, "V": V} for M, V in ((4096, 32768), (4096, 50257), (8192, 128256), (2048, 131072), (32768, 1024))
    ),
    peers={"torch": _torch, "torch.compile": by_inductor(_torch), "liger": _liger, "quack": _quack},
    properties=(strange_numbers, shift_invariance),
    refuses=(
        Refusal("a target too many", lambda f: f(inputs(2, 8)[0], inputs(3, 8)[1]), ValueError, "targets has 3"),
        Refusal("no classes", lambda f: f(torch.ones(2, 0, device=DEVICE), inputs(2, 8)[1]), ValueError, "no classes"),
        Refusal("probabilities", lambda f: f(*inputs(2, 8)[:1] * 2), TypeError, "targets is torch.float32"),
        Refusal("column-major", lambda f: f(inputs(8, 8)[0].t(), inputs(8, 8)[1]), ValueError, "contiguous"),
        Refusal("no backward", lambda f: f(inputs(2, 8)[0].requires_grad_(), inputs(2, 8)[1]), ValueError, "grad"),
    ),
)


def reference_backward(dloss, logits, targets, lse):
    p = torch.exp(logits - lse[:, None])  # reads MV (lse is fp32, so p is too)
    p.scatter_add_(1, targets.clamp(min=0)[:, None], -torch.ones_like(p[:, :1]))
    return (p * dloss.where(targets != -100, 0)[:, None]).to(logits.dtype)  # writes MV


def logits_and_targets(M, V, pad=0, skip=0, dtype=torch.float32):
    # Narrow, so that p is not all 0 and 1. The dlogits of a row sum to 0: a lost target shows in the sum. With pad or
    # skip, x is a slice of a wider matrix, so stride(0) is not V and the first row starts anywhere.
    x = (torch.randn(M, skip + V + pad, device=DEVICE) * 2 - 8).to(dtype)[:, skip : skip + V]
    targets = V - 1 - torch.arange(M, device=DEVICE) * 7919 % V  # the last column first: it lies in a partial block
    targets[2::5] = -100
    return x, targets


def inputs_backward(M, V, pad=0, skip=0, dtype=torch.float32):
    x, targets = logits_and_targets(M, V, pad, skip, dtype)
    lse = torch.logsumexp(x.float(), -1)
    return torch.randn(M, device=DEVICE), x, targets, lse


def _one_expression(dloss, logits, targets, lse):
    p = torch.exp(logits - lse[:, None])
    hit = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return ((p - hit.float()) * dloss.where(targets != -100, 0)[:, None]).to(logits.dtype)


def _quack_backward(dloss, logits, targets, lse):
    from quack.cross_entropy import cross_entropy_bwd

    if logits.shape[1] * logits.element_size() % 16:
        raise Unsupported("quack's rows start at multiples of 16 bytes")
    return cross_entropy_bwd(logits, targets, dloss, lse)


def rows_sum_to_zero(rung):
    """softmax sums to 1 and onehot to 1, so a row of dlogits sums to 0; an ignored row is 0 throughout."""
    dloss, x, targets, lse = inputs_backward(4, 781)
    dx = rung(dloss, x, targets, lse)
    torch.testing.assert_close(dx.sum(-1), torch.zeros(4, device=DEVICE), rtol=0, atol=1e-5)
    assert (dx[2] == 0).all()
    assert (dx[[0, 1, 3]] != 0).all()


def no_class_no_gradient(rung):
    """A target that is no class: NaN in all its row, and in no other."""
    dloss, x, targets, lse = inputs_backward(3, 64)
    targets[1] = 64
    dx = rung(dloss, x, targets, lse)
    assert dx[1].isnan().all()
    assert dx[[0, 2]].isfinite().all()


def _with(change):
    """A call with these arguments after one change."""
    return lambda f: f(*change(*inputs_backward(8, 8)))


PROBLEM_BACKWARD = Problem(
    reference=reference_backward,
    inputs=inputs_backward,
    work=lambda M, V, dtype, **_: Work(bytes=M * (2 * V * dtype.itemsize + 8 + 4 + 4), flops=4 * M * V),
    checks=(
        case("nothing to do", M=0, V=8),
        case("one class: p is 1 and the gradient 0", M=3, V=1),
        case("rows shorter than a chunk, some across two", M=5, V=7),
        case("rows that start at every place within a chunk", M=17, V=1153),
        case("no row starts at a multiple of 16 bytes", M=4, V=2051, pad=4, skip=1),
        case("a row past element 2^31", gib=60, M=3, V=5003, pad=2**30),
    ),
    # The odd width first: that is where the claims of 16-byte accesses are examined.
    benches=tuple(
        {"M": M, "V": V} for M, V in ((4096, 50257), (4096, 32768), (8192, 128256), (2048, 131072), (32768, 1024))
    ),
    # Liger is no peer here. Its forward writes softmax - onehot over the logits, and its backward multiplies that by
    # dloss. From logits and lse it would have to copy the logits, compute the loss again and then multiply: 7 passes
    # over [M, V] (2 + 3 + 2), where 2 answer this question. Where the loss and all gradients are asked together, in
    # problems/linear_cross_entropy.py, Liger is a peer.
    peers={
        "torch": reference_backward,
        "torch.compile": by_inductor(_one_expression),
        "quack": _quack_backward,
    },
    properties=(rows_sum_to_zero, no_class_no_gradient),
    refuses=(
        Refusal("dloss of a mean", _with(lambda dloss, *r: (dloss.mean(), *r)), ValueError, "dloss has 0"),
        Refusal("a lse too few", _with(lambda *a: (*a[:3], a[3][:7])), ValueError, "lse has 7 rows"),
        Refusal("lse in 16 bits", _with(lambda *a: (*a[:3], a[3].half())), TypeError, "lse is"),
    ),
)
