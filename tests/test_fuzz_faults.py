"""How small a systematic fault the judge of the random cases refuses: faults planted in right operators."""

from lessonkit.judge import fuzz_cases

import pytest
import torch

import course_ops


class _Lost(torch.autograd.Function):
    """x as it is; of its gradient `share` of the elements from `start` to `stop` of dimension `dim` are lost."""

    @staticmethod
    def forward(ctx, x, dim, start, stop, share):
        ctx.part = dim, start, stop, share
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        dim, start, stop, share = ctx.part
        dx = dx.clone()
        dx.narrow(dim, start, stop - start).mul_(1 - share)
        return dx, None, None, None, None


def lost(name, dim, start, stop, share=1.0):
    """The operator with a part of one gradient lost."""
    return lambda right, given: right(**given | {name: _Lost.apply(given[name], dim, start, stop, share)})


def spec(*shape, dtype="float32", **more):
    return {"shape": list(shape), "dtype": dtype, "layout": "contiguous", "values": "normal"} | more


def attention(dtype):
    tensors = {name: spec(1, 2, 64, 32, dtype=dtype) for name in ("q", "k", "v")}
    return tensors, {"causal": False, "window": None, "scale": 32**-0.5, "softcap": None}


def alike(dtype):
    """All keys are 1 and all scores 0: a row of dQ is the sum of a row of dS, which is nearly 0."""
    tensors, options = attention(dtype)
    return tensors | {"q": tensors["q"] | {"values": "zeros"}, "k": tensors["k"] | {"values": "ones"}}, options


def capped(dtype):
    """In fp16 PyTorch overflows: the gradient of the scores, times the softcap."""
    tensors, options = attention(dtype)
    tensors["v"]["scale"] = 100
    return tensors, options | {"softcap": 1e4}


def varlen(dtype):
    ends = {"shape": [3], "dtype": "int32", "layout": "contiguous", "values": [0, 40, 72]}
    tensors = {name: spec(72, 2, 32, dtype=dtype) for name in ("q", "k", "v")}
    options = {"max_seqlen_q": 40, "max_seqlen_k": 40, "causal": False, "window": None, "scale": None, "softcap": None}
    return tensors | {"cu_seqlens_q": ends, "cu_seqlens_k": ends}, options


def paged(dtype):
    integers = {"dtype": "int32", "layout": "contiguous"}
    tensors = {"q": spec(2, 1, 2, 32, dtype=dtype)}
    tensors |= {name: spec(6, 16, 2, 32, dtype=dtype) for name in ("k_cache", "v_cache")}
    tensors["cache_seqlens"] = {"shape": [2], **integers, "values": [40, 33]}
    tensors["block_table"] = {"shape": [2, 3], **integers, "values": [[0, 2, 4], [5, 3, 1]]}
    return tensors, {"causal": True, "window": None, "scale": None, "softcap": None}


def norm(dtype):
    return {"x": spec(96, 64, dtype=dtype), "weight": spec(64, dtype=dtype)}, {"eps": 1e-5}


def layer_norm(dtype):
    tensors, options = norm(dtype)
    return tensors | {"bias": spec(64, dtype=dtype)}, options


def equal_values(dtype):
    """The variance is 0, and rstd 1e6."""
    x = spec(96, 64, dtype=dtype, layout="expanded columns")
    return {"x": x, "weight": spec(64, dtype=dtype), "bias": spec(64, dtype=dtype)}, {"eps": 1e-12}


def last_layer(dtype):
    targets = spec(48, dtype="int64", below=100, some=[], values="classes")
    return {"x": spec(48, 32, dtype=dtype), "weight": spec(100, 32, scale=0.3), "targets": targets}, {"ignore_index": 5}


def matmul(dtype):
    return {"a": spec(64, 128, dtype=dtype), "b": spec(128, 48, dtype=dtype)}, {}


def cross_entropy(dtype):
    targets = spec(48, dtype="int64", below=100, some=[], values="classes")
    return {"logits": spec(48, 100, dtype=dtype), "targets": targets}, {"ignore_index": -100, "reduction": "none"}


def a_key_less(right, given):
    return right(**given | {name: given[name][..., :-1, :] for name in ("k", "v")})


def gradient_less(keys=0, delta=False):
    """Attention right forwards; backwards dq lacks the last keys, or delta is forgotten."""

    def fault(right, given):
        q, k, v = (given[name].float() for name in ("q", "k", "v"))
        n = k.shape[2] - keys
        s = torch.cat((q @ k[:, :, :n].mT, q.detach() @ k[:, :, n:].mT), -1) * given["scale"]
        lse = s.logsumexp(-1, keepdim=True)
        o = torch.exp(s - (lse.detach() if delta else lse)) @ v
        return o.to(given["q"].dtype)

    return fault


def a_cached_key_less(right, given):
    """The last key of the last sequence is not seen, or its value is that of the key before it."""
    if "cache_seqlens" in given:
        lengths = given["cache_seqlens"].clone()
        lengths[-1] -= 1
        return right(**given | {"cache_seqlens": lengths})
    v = given["v"].clone()
    v[-1] = v[-2]
    return right(**given | {"v": v})


def a_row_masked(right, given):
    q = given["q"].clone()
    q[..., -1, :] = 0  # its scores are all equal
    return right(**given | {"q": q})


def a_term_less(right, given):
    return right(a=given["a"][:, :-1], b=given["b"][:-1])


def a_class_less(right, given):
    logits = given["logits"].clone()
    logits[:, 0] = -torch.inf
    kept = given["targets"] != 0
    return torch.where(kept, right(**given | {"logits": logits}), right(**given))


FAULTS = {  # name: (operator, its call, direction, dtypes, the fault)
    "a key less": ("attention", attention, "forward", "both", a_key_less),
    "scale 2% off": ("attention", attention, "forward", "float32", lambda f, g: f(**g | {"scale": 1.02 * g["scale"]})),
    "scale 4% off": ("attention", attention, "forward", "bfloat16", lambda f, g: f(**g | {"scale": 1.04 * g["scale"]})),
    "a row masked": ("attention", attention, "forward", "both", a_row_masked),
    "dk of a tile": ("attention", attention, "backward", "both", lost("k", 2, 0, 16)),
    "dv of a tile": ("attention", attention, "backward", "both", lost("v", 2, 48, 64)),
    "dq of a row": ("attention", attention, "backward", "both", lost("q", 2, 63, 64)),
    "dk 5% off": ("attention", attention, "backward", "float32", lost("k", 2, 0, 64, 0.05)),
    "dk 10% off": ("attention", attention, "backward", "bfloat16", lost("k", 2, 0, 64, 0.1)),
    "dq lacks a key": ("attention", attention, "backward", "both", gradient_less(keys=1)),
    "dq lacks a block of keys": ("attention", attention, "backward", "both", gradient_less(keys=16)),
    "no delta": ("attention", attention, "backward", "both", gradient_less(delta=True)),
    "dq 1% off": ("attention", attention, "backward", "float32", lost("q", 2, 0, 64, 0.01)),
    "dq lacks a key, alike": ("attention", alike, "backward", "both", gradient_less(keys=1)),
    "dq lacks a block of keys, alike": ("attention", alike, "backward", "both", gradient_less(keys=16)),
    "no delta, alike": ("attention", alike, "backward", "both", gradient_less(delta=True)),
    "dk of a tile, capped": ("attention", capped, "backward", "float16", lost("k", 2, 0, 16)),
    "dk 5% off, capped": ("attention", capped, "backward", "float16", lost("k", 2, 0, 64, 0.05)),
    "dq of a row, capped": ("attention", capped, "backward", "float16", lost("q", 2, 63, 64)),
    "a sequence's key less": ("attention_varlen", varlen, "forward", "both", a_cached_key_less),
    "dq 1% off in sequences": ("attention_varlen", varlen, "backward", "float32", lost("q", 0, 0, 72, 0.01)),
    "dk of a sequence's tile": ("attention_varlen", varlen, "backward", "both", lost("k", 0, 0, 16)),
    "a cached key less": ("attention_paged", paged, "forward", "both", a_cached_key_less),
    "dw 2% off": ("layer_norm", layer_norm, "backward", "float32", lost("weight", 0, 0, 64, 0.02)),
    "dbias of a column": ("layer_norm", layer_norm, "backward", "both", lost("bias", 0, 63, 64)),
    "dx of a column, equal values": ("layer_norm", equal_values, "backward", "float32", lost("x", 1, 63, 64)),
    "dx of a row, equal values": ("layer_norm", equal_values, "backward", "float32", lost("x", 0, 95, 96)),
    "dx of a row": ("rms_norm", norm, "backward", "both", lost("x", 0, 95, 96)),
    "dw 1% off": ("rms_norm", norm, "backward", "float32", lost("weight", 0, 0, 64, 0.01)),
    "a term less": ("matmul", matmul, "forward", "both", a_term_less),
    "1e-3 off": ("matmul", matmul, "forward", "float32", lambda f, g: f(**g) * 1.001),
    "db of a tile": ("matmul", matmul, "backward", "both", lost("b", 0, 0, 16)),
    "a class less": ("cross_entropy", cross_entropy, "forward", "both", a_class_less),
    "loss 1e-3 off": ("cross_entropy", cross_entropy, "forward", "both", lambda f, g: f(**g) + 1e-3),
    "dw of a tile, fp32 weight": ("linear_cross_entropy", last_layer, "backward", "both", lost("weight", 0, 0, 16)),
    "dx of a tile, fp32 weight": ("linear_cross_entropy", last_layer, "backward", "both", lost("x", 0, 32, 48)),
    "dx 5% off": ("cross_entropy", cross_entropy, "backward", "both", lost("logits", 0, 0, 48, 0.05)),
}
ASKED = [(name, dtype) for name, (*_, which, _) in FAULTS.items()
         for dtype in (("float32", "bfloat16") if which == "both" else (which,))]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), ASKED)
def test_a_small_systematic_fault_is_refused(monkeypatch, name, dtype):
    operator, call, direction, _, fault = FAULTS[name]
    tensors, options = call(dtype)
    case = {"operator": operator, "direction": direction, "tensors": tensors, "options": options, "noise": "pool"}
    case |= {"seed": 3, "deterministic": True, "spoilt": ""}
    if direction == "backward":
        case |= {"wanted": [n for n in fuzz_cases.questions()[operator].gradients if n in tensors]}
        case |= {"upstream": {"layout": "contiguous", "values": "normal"}}
    assert fuzz_cases.run(case, "cpu").kind == "right"
    question = fuzz_cases.questions()[operator]
    shown = (question.forward if direction == "forward" else "") or operator
    right = getattr(course_ops, shown)
    monkeypatch.setattr(course_ops, shown, lambda **given: fault(right, given))
    outcome = fuzz_cases.run(case, "cpu")
    assert outcome.kind == "wrong", outcome.said
