"""What is drawn for each public operator of `course_ops`, and how its problem answers that.

The variable of an operator's name says which calls are legal; `python -m lessonkit fuzz` draws from them. Tensors are
named as the function's parameters are. The first choice of each is the simplest: a failure shrinks towards it.
"""

import math

from lessonkit import DEVICE
from lessonkit.base.device import capability
from lessonkit.judge.fuzz_cases import FLOATS, PLAIN, STRANGE, TINY, Drawn, Question, spoilt_tensors, tensor

import torch

import course_ops
from problems import add_norm as add_norms
from problems import attention as attentions
from problems import attention_paged as attentions_paged
from problems import attention_varlen as attentions_varlen
from problems import cross_entropy as cross_entropies
from problems import dropout as dropouts
from problems import gelu as gelus
from problems import grouped_matmul as grouped_matmuls
from problems import layer_norm as layer_norms
from problems import linear as linears
from problems import linear_cross_entropy as linear_cross_entropies
from problems import matmul as matmuls
from problems import matmul_fp8 as matmuls_fp8
from problems import quantize as quantizes
from problems import rms_norm as rms_norms
from problems import scan as scans
from problems import softmax as softmaxes

ALL = (*PLAIN, *TINY, *STRANGE, "large", "huge")
SUMS = (*PLAIN, *TINY, "nan", "inf", "-inf")  # sums of huge numbers depend on the order of additions
FP8 = "float8_e4m3fn"


# ---- Sizes ----------------------------------------------------------------------------------------------------------


def size(draw, most, least=0):
    """Small numbers, one beside a power of two, a multiple of 8, or any."""
    most = max(most, least)
    kind = draw.one_of(("small", "power", "eights", "any"))
    if kind == "small":
        return draw.integer(least, max(least, min(most, 20)))
    if kind == "power":
        return min(most, max(least, 2 ** draw.integer(0, max(1, most).bit_length()) + draw.integer(-1, 1)))
    if kind == "eights":
        return min(most, max(least, 8 * draw.integer(0, max(1, min(most, 512) // 8))))
    return draw.integer(least, most)


def rows(draw, least=0):
    """[..., N]: any number of dimensions in front, few rows if they are long."""
    N = size(draw, draw.most, least)
    M = size(draw, min(300, draw.most // max(1, N)))
    return draw.one_of(((M, N), (N,) if M else (0, N), (2, M // 2, N), (1, M, 1, N), (M, 1, N)))


def wide(t):
    return t.to(torch.promote_types(t.dtype, torch.float32))


def in_one_dtype(x, *others):
    """As they are if their dtypes are alike, else all in fp32 or wider."""
    alike = all(t is None or t.dtype == x.dtype for t in others)
    return (x, *others) if alike else (wide(x), *(t if t is None else wide(t) for t in others))


# ---- Rows -----------------------------------------------------------------------------------------------------------


def _softmax(draw):
    tensors = {"x": tensor(draw, rows(draw), values=ALL)}
    return Drawn(tensors, spoilt=[("x", {"shape": []}), *spoilt_tensors(tensors, {"x": FLOATS})])


class _SoftmaxKept(torch.autograd.Function):
    """Softmax, and its gradient as of an operator that has kept the result `kept`."""

    @staticmethod
    def forward(ctx, x, kept):
        y = softmaxes.reference(x)
        ctx.save_for_backward(y if kept is None else kept.to(y.dtype))
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return torch._softmax_backward_data(dy, y, -1, y.dtype), None


def softmax_reference(x, kept=None):
    return _SoftmaxKept.apply(x, kept)


# In fp16 the gradient of the exact result and that of the result rounded differ by more than any kernel's error: dy - d
# may cancel to a thousandth of dy. PyTorch keeps the rounded result too.
softmax = Question(_softmax, softmax_reference, ("x",), keeps=0)


def weighted(draw, shape, *names):
    """x, and weights of x's dtype or float32; what would be wrong with them."""
    tensors = {"x": tensor(draw, shape, values=(*PLAIN, *TINY, "nan", "inf", "-inf", "large"))}
    legal = {"x": FLOATS}
    for name in names:
        legal[name] = (tensors["x"]["dtype"], "float32")
        tensors[name] = tensor(draw, shape[-1:], legal[name], ("normal", "ones", "shifted"))
        if name == "bias" and draw.one_of((False, True)):
            tensors[name] = None
    spoilt = [(name, {"shape": [shape[-1] + 1]}) for name in names if tensors[name]]
    spoilt += [(name, {"shape": [1, shape[-1]]}) for name in names if tensors[name]]
    return tensors, [*spoilt, *spoilt_tensors(tensors, legal), ("x", {"shape": []})]


def _layer_norm(draw):
    tensors, spoilt = weighted(draw, rows(draw, 1), "weight", "bias")
    return Drawn(tensors, {"eps": draw.one_of((1e-5, 1e-12, 1e-3, 1.0))}, spoilt)


def layer_norm_reference(x, weight, bias, eps):
    given = in_one_dtype(x, weight, bias)
    return layer_norms.reference(*given, eps)[0].to(x.dtype)


class _MeanOff(torch.autograd.Function):
    """LayerNorm and its gradient in float64, from means that are wrong by as much as a tree of fp32 sums may be.

    share: the logarithm of how many roundings they are off, from 0 for one of them to 1 for all of the tree's.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, eps, sign, share):
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        roundings = (x.shape[-1] - 1).bit_length() + (x.shape[-1] > 1)  # the levels of the tree, and the division
        one = min(1, roundings) * torch.finfo(torch.float32).eps / 2 * rows.abs().mean(-1)
        mean = rows.mean(-1) + sign * max(1, roundings) ** share * one
        centred = rows - mean[:, None]
        rstd = torch.rsqrt(centred.square().mean(-1) + eps)
        ctx.save_for_backward(rows, weight, mean, rstd)
        ctx.bias = bias is not None
        y = centred * rstd[:, None] * weight + (bias if ctx.bias else 0)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        dx, dw, db = layer_norms.reference_backward(dy.reshape(ctx.saved_tensors[0].shape), *ctx.saved_tensors)
        return dx.view(dy.shape), dw, db if ctx.bias else None, None, None, None


# A kernel's mean may be off by more than PyTorch's, which adds in another order. That counts where x is nearly the mean
# and in rows of many columns. It also counts in rows of equal values if eps is as small: in fp32 3 v / 3 may not be v.
# With a mean that is d off, dx of such a row is r (g - mean g) - mean g d^2 r^3, where r is 1 / sqrt(d^2 + eps). The
# first term moves one way as d grows. The second is largest at d^2 = 2 eps, and the two may cancel. So the largest d is
# not always the worst. One in 32 steps is a tenth larger than the last, and no d between changes 1% more than both.
def layer_norm_mean_off(sign, share=1.0):
    return lambda x, weight, bias, eps: _MeanOff.apply(x, weight, bias, eps, sign, share)


MEANS_OFF = [(sign, step / 32) for sign in (-1, 1) for step in range(33)]

layer_norm = Question(
    _layer_norm,
    layer_norm_reference,
    ("x", "weight", "bias"),
    beside=tuple(layer_norm_mean_off(*each) for each in MEANS_OFF),
)


def _rms_norm(draw):
    tensors, spoilt = weighted(draw, rows(draw, 1), "weight")
    return Drawn(tensors, {"eps": draw.one_of((1e-5, 1e-3, 1.0))}, spoilt)


def rms_norm_reference(x, weight, eps):
    return rms_norms.reference(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), weight, eps)[0].view(x.shape)


rms_norm = Question(_rms_norm, rms_norm_reference, ("x", "weight"))


def _add_norm(draw):
    shape = rows(draw, 1)
    tensors, spoilt = weighted(draw, shape, "weight", "bias")
    legal = (tensors["x"]["dtype"], "float32")
    tensors["residual"] = tensor(draw, shape, legal, (*PLAIN, *TINY, "nan", "inf", "large"))
    spoilt += [("residual", {"shape": [*shape[:-1], shape[-1] + 1]})]
    spoilt += spoilt_tensors(tensors, {"x": FLOATS, "residual": legal})
    return Drawn(tensors, {"eps": draw.one_of((1e-5, 1e-3, 1.0))}, spoilt)


class _GradientOf(torch.autograd.Function):
    """The value of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx, value, other):
        return value.clone()

    @staticmethod
    def backward(ctx, dvalue):
        return None, dvalue


def add_norm_reference(x, residual, weight, bias, eps, kept=None):
    """kept: the operator's own total. y's gradient is computed from that, as one that is read again."""
    y, total = add_norm_of_exact_total(x, residual, weight, bias, eps)
    if kept is None:
        return y, total
    own = _GradientOf.apply(kept.to(total.dtype), total)
    return _GradientOf.apply(y.detach(), layer_norm_reference(own, weight, bias, eps).to(y.dtype)), total


def add_norm_of_exact_total(x, residual, weight, bias, eps):
    if bias is not None and weight.dtype == bias.dtype == residual.dtype:
        return add_norms.reference(residual, x, weight, bias, eps)[1::-1]
    total = residual + x
    return layer_norm_reference(total, weight, bias, eps).to(x.dtype), total


def add_norm_mean_off(sign, share=1.0):
    def mean_off(x, residual, weight, bias, eps):
        total = residual + x
        return layer_norm_mean_off(sign, share)(total, weight, bias, eps), total

    return mean_off


add_norm = Question(
    _add_norm,
    add_norm_reference,
    ("x", "residual", "weight", "bias"),
    keeps=1,
    beside=tuple(add_norm_mean_off(*each) for each in MEANS_OFF),
)


def _cross_entropy(draw):
    shape = rows(draw, 1)
    ignore = draw.one_of((-100, 0, -1, 5))
    strays = draw.one_of(((), ((shape[-1], 0.1),), ((-7, 0.1), (2**40, 0.1))))
    tensors = {
        "logits": tensor(draw, shape, values=(*PLAIN, *TINY, *STRANGE, "large")),
        "targets": tensor(draw, shape[:-1], ("int64",), ("classes",)) | {"below": shape[-1]},
    }
    tensors["targets"]["some"] = [[ignore, draw.one_of((0.0, 0.2, 1.0))], *map(list, strays)]
    spoilt = [("targets", {"shape": [*shape[:-1], 3]}), ("logits", {"shape": [*shape[:-1], 0]}), ("reduction", "some")]
    spoilt += spoilt_tensors(tensors, {"logits": FLOATS, "targets": ("int64",)})
    options = {"ignore_index": ignore, "reduction": draw.one_of(("none", "sum", "mean"))}
    return Drawn(tensors, options, spoilt)


def cross_entropy_reference(logits, targets, ignore_index, reduction):
    V, ignored = logits.shape[-1], targets == ignore_index
    stray = ~ignored & ((targets < 0) | (targets >= V))
    classes = targets.masked_fill(stray | ignored, 0)
    loss = cross_entropies.reference(logits.reshape(-1, V), classes.reshape(-1))[0].view(targets.shape)
    loss = torch.where(ignored, 0.0, loss * torch.where(stray, math.nan, 1.0))
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (~ignored).sum()


cross_entropy = Question(_cross_entropy, cross_entropy_reference, ("logits",))


# ---- Elements -------------------------------------------------------------------------------------------------------


def any_shape(draw):
    return draw.one_of((rows(draw)[-1:], rows(draw), ()))


def _gelu(draw):
    tensors = {"x": tensor(draw, any_shape(draw), values=ALL)}
    return Drawn(tensors, spoilt=spoilt_tensors(tensors, {"x": FLOATS}))


gelu = Question(_gelu, gelus.reference, ("x",))


def _dropout(draw):
    tensors = {"x": tensor(draw, any_shape(draw), values=(*PLAIN, *TINY, "nan", "inf", "large"))}
    options = {"p": draw.one_of((0.5, 0.0, 1.0, 0.1, 1 - 2.0**-40, 2.0**-33, 0.999))}
    options |= {"training": draw.one_of((True, True, True, False))}
    options["seed"] = draw.one_of((draw.integer(0, 9), draw.integer(0, 2**63 - 1), 2**32, 2**63 - 1))
    spoilt = [("p", p) for p in (-0.1, 1.5, math.nan)] + [("seed", s) for s in (-1, 2**63, 1.0, "1")]
    return Drawn(tensors, options, spoilt + spoilt_tensors(tensors, {"x": FLOATS}))


def dropout_reference(x, p, training, seed):
    return dropouts.reference(x, p, seed) if training and p else x


dropout = Question(_dropout, dropout_reference, ("x",))


def _scan(draw):
    n = size(draw, draw.most)
    tensors = {"x": tensor(draw, (n,), values=SUMS)}
    spoilt = [("x", {"shape": [n, 1]}), ("x", {"shape": []}), *spoilt_tensors(tensors, {"x": FLOATS})]
    return Drawn(tensors, {"reverse": draw.one_of((False, True))}, spoilt)


def scan_reference(x, reverse):
    return scans.reference_backward(x) if reverse else scans.reference(x)


# Sums that come down from larger ones keep the rounding of those, and the budget is of sums of their own size.
scan = Question(_scan, scan_reference, ("x",), factor=4)


# ---- Matmuls --------------------------------------------------------------------------------------------------------


def sizes(draw, least=0):
    """M, N, K of a matmul that the draw's mode can do soon."""
    M = size(draw, 300, least)
    N = size(draw, min(600, draw.most // max(1, M)), least)
    return M, N, size(draw, min(600, draw.most // max(1, M, N)), least)


def alike(draw, shapes, values=SUMS):
    """Tensors of one dtype, and what would be wrong with them."""
    tensors = {name: tensor(draw, shape, values=values) for name, shape in shapes.items()}
    dtype = draw.one_of(FLOATS)
    for spec in tensors.values():
        spec["dtype"] = dtype
    return tensors, spoilt_tensors(tensors, dict.fromkeys(shapes, (dtype,)))


def _matmul(draw):
    M, N, K = sizes(draw)
    a = draw.one_of(((M, K), (2, M // 2, K), (1, M, 1, K)))
    tensors, spoilt = alike(draw, {"a": a, "b": (K, N)})
    spoilt += [("b", {"shape": [K + 1, N]}), ("b", {"shape": [2, K, N]}), ("b", {"shape": [K]}), ("a", {"shape": [K]})]
    return Drawn(tensors, {}, spoilt)


matmul = Question(_matmul, matmuls.reference, ("a", "b"))


def _linear(draw):
    M, N, K = sizes(draw)
    x = draw.one_of(((M, K), (K,), (2, M // 2, K)))
    tensors, spoilt = alike(draw, {"x": x, "weight": (N, K), "bias": (N,), "residual": (*x[:-1], N)})
    for name in ("bias", "residual"):
        if draw.one_of((False, True)):
            tensors[name] = None
    spoilt = [(name, change) for name, change in spoilt if tensors[name]]
    spoilt += [("weight", {"shape": [N, K + 1]}), ("activation", "relu")]
    spoilt += [(name, {"shape": [N + 1]}) for name in ("bias", "residual") if tensors[name]]
    return Drawn(tensors, {"activation": draw.one_of((None, "gelu_tanh"))}, spoilt)


def linear_reference(x, weight, bias, residual, activation):
    if activation and bias is not None:
        return linears.reference(x, weight, bias, residual)
    y = torch.nn.functional.linear(x, weight, bias)
    y = gelus.reference(y) if activation else y
    return y if residual is None else y + residual


linear = Question(_linear, linear_reference, ("x", "weight", "bias", "residual"))


def _grouped_matmul(draw):
    T, N, K = sizes(draw)
    E = draw.integer(1, 9)
    ends = sorted(draw.integer(0, T) for _ in range(E + 1))
    tensors, spoilt = alike(draw, {"x": (T, K), "w": (E, K, N)})
    tensors["offsets"] = {
        "shape": [E + 1],
        "dtype": "int32",
        "layout": draw.one_of(("contiguous", "step")),
        "values": ends,
    }
    spoilt += [("w", {"shape": [E, K + 1, N]}), ("w", {"shape": [E + 1, K, N]}), ("w", {"shape": [K, N]})]
    spoilt += [("x", {"shape": [1, T, K]}), ("w", {"requires_grad": True}), ("offsets", {"dtype": "int64"})]
    return Drawn(tensors, {}, [*spoilt, ("offsets", {"instead": ends}), ("offsets", {"device": "meta"})])


def grouped_matmul_reference(x, w, offsets):
    return grouped_matmuls.reference(x, w, offsets)


grouped_matmul = Question(_grouped_matmul, grouped_matmul_reference, ("x",))


def _linear_cross_entropy(draw):
    M, V, K = sizes(draw, 1)
    x = draw.one_of(((M, K), (K,), (2, M // 2, K), (M, 1, K)))
    tensors = {"x": tensor(draw, x, values=(*PLAIN, *TINY, "nan"))}
    legal = (tensors["x"]["dtype"], "float32")
    tensors["weight"] = tensor(draw, (V, K), legal, ("normal", "falling rows"))  # of equal rows dx is 0
    tensors["weight"]["scale"] = 2 / math.sqrt(K)
    ignore = draw.one_of((-100, 0, 5))
    tensors["targets"] = tensor(draw, x[:-1], ("int64",), ("classes",)) | {"below": V}
    tensors["targets"]["some"] = [[ignore, draw.one_of((0.0, 0.2, 1.0))], [V, draw.one_of((0.0, 0.0, 0.1))]]
    spoilt = spoilt_tensors(tensors, {"x": FLOATS, "weight": legal, "targets": ("int64",)})
    spoilt += [("weight", {"shape": [V, K + 1]}), ("weight", {"shape": [0, K]}), ("targets", {"shape": [*x[:-1], 1]})]
    return Drawn(tensors, {"ignore_index": ignore}, spoilt)


class _AtOnce(torch.autograd.Function):
    """A result whose gradient is made at once, rounded to the inputs' dtype, and multiplied by the upstream later."""

    @staticmethod
    def forward(ctx, x, weight, loss_of):
        with torch.enable_grad():
            leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = loss_of(*leaves)
        ctx.save_for_backward(*torch.autograd.grad(loss, leaves))
        return loss.detach()

    @staticmethod
    def backward(ctx, dloss):
        return *(dloss * g for g in ctx.saved_tensors), None


def linear_cross_entropy_reference(x, weight, targets, ignore_index):
    # As the problem's reference: logits in x's dtype, the loss in fp32 at least. It takes classes and -100 alone. Of
    # equal rows of weight dx is 0, but for the rounding of the logits' gradient: of the same numbers as the operator's.
    def loss(x, weight):
        logits = x.reshape(-1, x.shape[-1]) @ weight.to(x.dtype).t()
        return cross_entropy_reference(wide(logits), targets.reshape(-1), ignore_index, "mean")

    return _AtOnce.apply(x, weight, loss)


# Beside a 16-bit x the gradient of an fp32 weight is a matmul's result in x's dtype, PyTorch's too. Of equal rows of
# weight, as an expanded one has them, dx is 0: a sum of equal terms that cancel.
linear_cross_entropy = Question(
    _linear_cross_entropy,
    linear_cross_entropy_reference,
    ("x", "weight"),
    factor=linear_cross_entropies.LUCK,
    multiplied="x",
    cancels=True,
)


# ---- In 8 bits ------------------------------------------------------------------------------------------------------


def _quantize(draw):
    M = size(draw, 300)
    shape = M, size(draw, min(2000, draw.most // max(1, M)))
    tensors = {"x": tensor(draw, shape, values=(*PLAIN, "nan", "inf", "-inf", "large", "huge"))}
    spoilt = [("x", {"shape": [*shape, 1]}), ("x", {"requires_grad": True}), ("scheme", "columns"), ("scheme", None)]
    options = {"scheme": draw.one_of(("rows", "tensor", "blocks", "squares"))}
    return Drawn(tensors, options, spoilt + spoilt_tensors(tensors, {"x": FLOATS}))


def quantize_reference(x, scheme):
    if not x.numel():  # the problem's has a row or a column of scales more there, or less
        M, K = x.shape
        m, k = -(-M // 128), -(-K // 128)
        shape = {"tensor": (1, 1), "rows": (M, 1), "blocks": (M, k), "squares": (m, k)}[scheme]
        return x.to(quantizes.FP8), torch.ones(shape, dtype=wide(x).dtype, device=x.device)
    q, scale = quantizes.reference(x, scheme)
    return q.view(quantizes.FP8), scale


quantize = Question(_quantize, quantize_reference)


def _matmul_fp8(draw):
    M, N, K = sizes(draw)
    scheme = draw.one_of(("tensor", "rows", "blocks"))
    k, n = -(-K // 128), -(-N // 128)
    of_a, of_b = {"tensor": ((1, 1), (1, 1)), "rows": ((M, 1), (1, N)), "blocks": ((M, k), (k, n))}[scheme]
    plain = ("normal", "ones", "zeros", "equal rows", "mixed")
    tensors = {
        name: tensor(draw, shape, (FP8,), plain) | {"scale": 60} for name, shape in (("a", (M, K)), ("b", (K, N)))
    }
    for name, shape in (("a_scale", of_a), ("b_scale", of_b)):
        tensors[name] = tensor(draw, shape, ("float32",), ("normal", "ones", "mixed")) | {"positive": True}
    spoilt = [("b", {"shape": [K + 1, N]}), ("a_scale", {"shape": [M + 1, 2]}), ("b_scale", {"requires_grad": True})]
    legal = {"a": (FP8,), "b": (FP8,), "a_scale": ("float32",), "b_scale": ("float32",)}
    return Drawn(tensors, {}, spoilt + spoilt_tensors(tensors, legal))


def matmul_fp8_reference(a, a_scale, b, b_scale):
    if a.dtype == torch.float8_e4m3fn and DEVICE.type == "cuda" and capability() == 90:
        return matmuls_fp8.on_hopper(a, b, a_scale, b_scale)
    return matmuls_fp8.reference(a, b, a_scale, b_scale)


matmul_fp8 = Question(_matmul_fp8, matmul_fp8_reference)


# ---- Attention ------------------------------------------------------------------------------------------------------


def _attention(draw):
    D = draw.one_of((64, 128, 16, 1, 8, 40, 80, 96, 112, 192, 256, draw.integer(1, 256)))
    H_kv = draw.integer(1, 3)
    B, H = draw.integer(0, 2) if draw.integer(0, 9) == 9 else draw.integer(1, 2), H_kv * draw.integer(1, 4)
    D_v = draw.one_of((D, D, 128, draw.integer(1, 256)))
    most = max(1, min(4096, draw.most // (max(D, D_v) * H)))
    S_q, S_k = size(draw, most), size(draw, most)
    S_q, S_k = draw.one_of(((S_q, S_q), (S_q, S_k), (1, S_k)))
    shapes = {"q": (B, H, S_q, D), "k": (B, H_kv, S_k, D), "v": (B, H_kv, S_k, D_v)}
    tensors, spoilt = alike(draw, shapes, PLAIN + TINY)
    for name in tensors:
        if name != "v" and tensors[name]["values"] in ("shifted", "mixed"):  # scores in the hundreds have few digits
            tensors[name]["values"] = "normal"
        tensors[name]["layout"] = draw.one_of((tensors[name]["layout"], "heads", "contiguous"))
    causal = draw.one_of((False, True))
    window = draw.one_of((None, None, 1, draw.integer(1, max(1, S_k)), 2**31 - 1)) if causal else None
    options = {"causal": causal, "window": window, "scale": draw.one_of((None, None, 0.01, 0.5 / D**0.5, 2 / D**0.5))}
    options["softcap"] = draw.one_of((None, None, 50.0, 3.0, 1e4))
    spoilt += [
        ("k", {"shape": [B, H_kv, S_k + 1, D]}),
        ("q", {"shape": [B, H, S_q, D + 1]}),
        ("q", {"shape": [B, S_q, D]}),
    ]
    spoilt += [
        ("window", 0),
        ("window", -3),
        ("window", 2.5),
        ("scale", "1"),
        ("scale", 0.0),
        ("scale", -1.0),
        ("scale", math.inf),
        ("scale", math.nan),
        ("softcap", 0.0),
        ("softcap", -50.0),
        ("softcap", "50"),
    ]
    spoilt += [("v", {"shape": [B, H_kv, S_k + 1, D_v]}), *([] if causal else [("window", 4)])]
    if H_kv > 1:
        spoilt.append(("q", {"shape": [B, H + 1, S_q, D]}))
    return Drawn(tensors, options, spoilt)


class _Kept(torch.autograd.Function):
    """o as it is; its gradient as of an operator that has kept the result `kept`, and takes dout * o from that."""

    @staticmethod
    def forward(ctx, o, lse, kept):
        ctx.save_for_backward(torch.zeros_like(o) if kept is None else o - kept.to(o.dtype))
        return o.clone()

    @staticmethod
    def backward(ctx, dout):
        return dout, (dout * ctx.saved_tensors[0]).sum(-1), None


def attention_reference(q, k, v, causal, window, scale, softcap=None, kept=None):
    if not len(q):  # without heads the problem's has no graph
        return q[..., :1].expand(*q.shape[:-1], v.shape[-1]).clone()
    o, lse = attentions.reference(q, k, v, causal, window, scale, softcap)
    return _Kept.apply(o, lse.to(o.dtype).masked_fill(lse == -math.inf, 0), kept)


def heads_of_a_group(q, k, **_):
    """q [B or tokens, H, ..], k [.., H_kv, ..]: dK and dV of a head are sums over the queries of so many heads."""
    return q.shape[1] // k.shape[1] if k.shape[1] else 1


def keys_of_another(draw, drawn):
    """How many of the first keys are in another call, as in ring attention; 0: none. All queries see all of these."""
    (S_q, S_k), options = (drawn.tensors[name]["shape"][2] for name in ("q", "k")), drawn.options
    most = S_k - S_q + 1 if options["causal"] else S_k
    return draw.one_of((0, draw.integer(1, most))) if most > 0 and options["window"] is None else 0


class _AsFarOff(torch.autograd.Function):
    """Zeros in the shape of q; their gradient g puts q's off by half of its last place: `share` of |g|."""

    @staticmethod
    def forward(ctx, q, share):
        ctx.share = share
        return torch.zeros_like(q)

    @staticmethod
    def backward(ctx, g):
        return g.abs() * ctx.share, None


def attention_in_parts(first, dtype):
    """Attention over the first keys and over the others, merged by lse; each backward gets the merged out and lse.

    Then the reference with each part's o and dq off by half of its last place in dtype, as those are that are added up.
    A part's o is that of columns that hold v for the keys of this part alone. Its dq is the gradient of columns that
    are 0 in q and likewise hold k.
    """

    class InParts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, causal, options):
            parts = (k[:, :, :first], v[:, :, :first], False), (k[:, :, first:], v[:, :, first:], causal)
            found = [course_ops.attention_forward(q, *kv, causal=c, **options) for *kv, c in parts]
            lse = torch.logsumexp(torch.stack([part for _, part in found]), 0)
            wide = [o.to(lse.dtype) * (part - lse)[..., None].exp() for o, part in found]
            out = sum(wide).masked_fill(lse[..., None] == -math.inf, 0).to(q.dtype)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.parts, ctx.options = parts, options
            return out

        @staticmethod
        def backward(ctx, dout):
            q, _, _, out, lse = ctx.saved_tensors
            found = [
                course_ops.attention_backward(dout, q, *kv, out, lse, causal=c, **ctx.options) for *kv, c in ctx.parts
            ]
            (dq, *of_first), (dq_others, *of_others) = found
            dk, dv = (torch.cat(pair, 2) for pair in zip(of_first, of_others, strict=True))
            return (dq.to(lse.dtype) + dq_others).to(q.dtype), dk, dv, None, None

    def asked(q, k, v, causal, window, **options):
        return InParts.apply(q, k, v, causal, options)

    def rounded(q, k, v, causal, window, scale, **options):
        def and_parts(t):
            first_ones = (torch.arange(t.shape[2], device=t.device) < first)[:, None]
            return torch.cat([t, t.masked_fill(~first_ones, 0), t.masked_fill(first_ones, 0)], -1)

        half, scale = torch.finfo(dtype).eps / 2, q.shape[-1] ** -0.5 if scale is None else scale
        of_parts = attentions.reference(q, k, and_parts(v), causal, window, scale, options.get("softcap"))[0]
        wide_q = torch.cat([q, *(_AsFarOff.apply(q, half) for _ in range(2))], -1)
        o = attention_reference(wide_q, and_parts(k), v, causal, window, scale, **options)
        return o + half * of_parts[..., v.shape[-1] :].abs().unflatten(-1, (2, -1)).sum(-2).detach()

    return asked, rounded


# The backward computes P from lse, which is rounded to fp32: another error as large as that of a score. In 16 bits the
# forward needs the factor too: a kernel rounds P = exp(s - m) where scores are nearly equal and PyTorch's P all round
# to 1 / n. If the rows of v cancel, PyTorch is right by luck, and a kernel's arithmetic is off by 1.4 times a budget of
# factor 1, once in 6000 cases. The price: a scale that is 2% off passes in bf16, and 4% is refused.
# A row of dS adds up to 0: where keys are alike, dq is what the rounding of dS leaves. Where queries are alike too, all
# rows are, and PyTorch may be right in each by the same luck.
attention = Question(
    _attention, attention_reference, ("q", "k", "v"), factor=4, keeps=0, cancels=True, continued=heads_of_a_group,
    divided=keys_of_another, in_parts=attention_in_parts,
)  # fmt: skip


def _attention_paged(draw):
    D = draw.one_of((64, 128, 16, 1, 8, 40, 80, 96, 192, 256, draw.integer(1, 256)))
    D_v = draw.one_of((D, D, 128, draw.integer(1, 256)))
    H_kv, B, S_q = draw.integer(1, 3), draw.integer(0, 4), draw.one_of((1, 1, 2, 7, 20))
    H = H_kv * draw.integer(1, 5)
    block_size = draw.one_of((16, 64, 32, 128, 256, 1, 5, draw.integer(1, 100)))
    most = max(1, min(2048, draw.most // (max(D, D_v) * H_kv)) // block_size)
    max_blocks = draw.integer(0, most)
    paged = draw.one_of((True, True, True, False))
    num_blocks = draw.integer(1, most) if paged else B
    capacity = block_size * (max_blocks if paged else 1)
    lengths = [draw.one_of((capacity, size(draw, capacity), 0, min(1, capacity))) for _ in range(B)]
    shape = (num_blocks, block_size, H_kv)
    shapes = {"q": (B, S_q, H, D), "k_cache": (*shape, D), "v_cache": (*shape, D_v)}
    tensors, spoilt = alike(draw, shapes, PLAIN + TINY)
    for name in tensors:
        if name != "v_cache" and tensors[name]["values"] in ("shifted", "mixed"):  # as for attention
            tensors[name]["values"] = "normal"
        tensors[name]["layout"] = draw.one_of((tensors[name]["layout"], "heads", "contiguous"))
    integers = {"dtype": "int32", "layout": draw.one_of(("contiguous", "step", "padded"))}
    entries = [[draw.integer(0, num_blocks - 1) for _ in range(max_blocks)] for _ in range(B)] if paged else None
    tensors["cache_seqlens"] = {"shape": [B], **integers, "values": lengths}
    tensors["block_table"] = {"shape": [B, max_blocks], **integers, "values": entries} if paged else None
    causal = draw.one_of((True, True, False))
    window = draw.one_of((None, None, 1, draw.integer(1, max(1, capacity)), 2**31 - 1)) if causal else None
    options = {"causal": causal, "window": window, "scale": draw.one_of((None, None, 0.01, 2 / D**0.5))}
    options["softcap"] = draw.one_of((None, None, 50.0, 3.0))
    spoilt += [("k_cache", {"shape": [*shape, D + 1]}), ("v_cache", {"shape": [num_blocks + 1, *shape[1:], D_v]})]
    spoilt += [("q", {"shape": [B, S_q, D]}), ("k_cache", {"requires_grad": True}), ("window", 0), ("window", 2.5)]
    spoilt += [("scale", -1.0), ("scale", "1"), ("softcap", 0.0), ("cache_seqlens", {"dtype": "int64"})]
    spoilt += [("cache_seqlens", {"device": "meta"}), ("cache_seqlens", {"shape": [B, 1]})]
    if H_kv > 1:
        spoilt.append(("q", {"shape": [B, S_q, H + 1, D]}))
    if paged:
        spoilt += [("block_table", {"dtype": "int64"}), ("block_table", {"device": "meta"})]
    if paged and num_blocks != B:
        spoilt.append(("block_table", {"instead": None}))
    return Drawn(tensors, options, spoilt)


def attention_paged_reference(q, k_cache, v_cache, cache_seqlens, block_table, causal, window, scale, softcap):
    given = (causal, window, scale, softcap)
    return attentions_paged.reference(q, k_cache, v_cache, cache_seqlens, block_table, *given)[0]


attention_paged = Question(_attention_paged, attention_paged_reference, factor=4)


def _attention_varlen(draw):
    D, H_kv = draw.one_of((64, 128, 16, 1, 40, 96, 192, draw.integer(1, 256))), draw.integer(1, 2)
    H, D_v, B = H_kv * draw.integer(1, 3), draw.one_of((D, D, draw.integer(1, 256))), draw.integer(0, 6)
    most = max(1, min(1000, draw.most // (max(D, D_v) * H * max(1, B))))
    of_q = [draw.one_of((0, 1, size(draw, most), size(draw, most))) for _ in range(B)]
    of_k = draw.one_of((of_q, [draw.one_of((n, size(draw, most))) for n in of_q]))
    shapes = {"q": (sum(of_q), H, D), "k": (sum(of_k), H_kv, D), "v": (sum(of_k), H_kv, D_v)}
    tensors, spoilt = alike(draw, shapes, ("normal", "ones", "zeros"))
    for name, lengths in (("cu_seqlens_q", of_q), ("cu_seqlens_k", of_k)):
        ends = [sum(lengths[:b]) for b in range(B + 1)]
        layout = draw.one_of(("contiguous", "step"))
        tensors[name] = {"shape": [B + 1], "dtype": "int32", "layout": layout, "values": ends}
        spoilt += [(name, {"dtype": "int64"}), (name, {"instead": ends}), (name, {"device": "meta"})]
    causal = draw.one_of((False, True))
    window = draw.one_of((None, None, 1, draw.integer(1, most), 10**6)) if causal else None
    options = {"max_seqlen_q": max(of_q, default=0), "max_seqlen_k": max(of_k, default=0), "causal": causal}
    options |= {"window": window, "scale": draw.one_of((None, 0.5 / D**0.5)), "softcap": draw.one_of((None, 3.0, 50.0))}
    spoilt += [("window", 0), ("scale", 0.0), ("softcap", -1.0), ("max_seqlen_q", -1), ("max_seqlen_k", "9")]
    spoilt += [("q", {"shape": [sum(of_q), H, D + 1]}), ("q", {"shape": [sum(of_q), D]})]
    spoilt += [("v", {"shape": [sum(of_k) + 1, H_kv, D_v]}), *([] if causal else [("window", 4)])]
    return Drawn(tensors, options, spoilt)


def attention_varlen_reference(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window, scale, softcap=None, kept=None
):  # fmt: skip
    given = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window, scale, softcap
    if not len(q):
        return q[..., :1].expand(*q.shape[:-1], v.shape[-1]).clone()
    o, lse = attentions_varlen.reference(q, k, v, *given)
    return _Kept.apply(o, lse.to(o.dtype).masked_fill(lse == -math.inf, 0).t(), kept)


attention_varlen = Question(
    _attention_varlen, attention_varlen_reference, ("q", "k", "v"), factor=4, keeps=0, cancels=True,
    continued=heads_of_a_group,
)  # fmt: skip
