"""Attention of packed sequences: values against each sequence alone; Hopper's kernels emulated, and wrong ones."""

import math
from contextlib import nullcontext, suppress

from lessonkit import device
from lessonkit.base.errors import Fault
from lessonkit.cuda import sass
from lessonkit.modes import compiled
from lessonkit.modes import gluon as emulated
from lessonkit.modes.compile_server import call_in_compiler

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import course_ops
from course_ops import testing
from course_ops.attention import BACKWARD, FORWARD, Call, Gradient
from course_ops.attention_varlen import _as_heads, _as_rows, _computed, _computed_gradient
from course_ops.kernels import attention_backward_192_hopper as backward_192
from course_ops.kernels import attention_backward_hopper as backward_hopper
from course_ops.kernels import attention_backward_wide_hopper as wide_backward
from course_ops.kernels import attention_forward_hopper as forward_hopper
from course_ops.kernels import sequences
from course_ops.kernels.sequences import Sequences
from problems import attention_varlen as problem
from tests import kernel_copies
from tests.test_attention_backward_window import nothing
from tests.test_course_ops_attention import chosen, near

pytestmark = pytest.mark.kept(
    "course_ops/kernels/*.py", "course_ops/*.py", "problems/attention_varlen.py", "tests/kernel_copies.py"
)
emulated_here = pytest.mark.skipif(not device.INTERPRETED, reason="with a GPU nothing is emulated")
OPS = torch.ops.course_ops


@pytest.fixture(params=("cuda", "torch") if device.HAS_GPU else ("interpreted", "torch"))
def dev(request):
    """Where an operator computes: by kernels (on a GPU or interpreted), or by PyTorch on a CPU."""
    with testing.interpreted() if request.param == "interpreted" else nullcontext():
        yield torch.device("cuda" if request.param == "cuda" else "cpu")


def packed(lengths, H=2, D=16, keys=None, H_kv=None, D_v=None, dtype=torch.float32, at="cpu"):
    """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k; one tensor of lengths if keys is None."""
    torch.manual_seed(0)
    of_q, of_k = problem.lengths_of(lengths), problem.lengths_of(keys or lengths)
    sizes = (of_q, H, D, 0.5), (of_k, H_kv or H, D, -0.5), (of_k, H_kv or H, D_v or D, 0.5)
    q, k, v = ((torch.randn(sum(n), heads, columns) + mean).to(at, dtype) for n, heads, columns, mean in sizes)
    cu_q, cu_k = (torch.tensor([0, *of]).cumsum(0).to(at, torch.int32) for of in (of_q, of_k))
    return q, k, v, cu_q, cu_q if keys is None else cu_k, max(of_q, default=0), max(of_k, default=0)


CASES = (
    ({"lengths": "5+0+129+1+0", "H": 4, "H_kv": 2}, {"causal": True}),
    ({"lengths": "5+0+70", "keys": "0+9+37"}, {"causal": True}),  # no keys, no queries, more queries than keys
    ({"lengths": "67+130", "keys": "90+133", "H_kv": 1, "D": 24, "D_v": 40}, {"causal": True, "window": 50}),
    ({"lengths": "3x96", "D": 8}, {"scale": 0.3}),
    ({"lengths": "40+33", "keys": "70+20", "D": 20}, {"softcap": 3.0}),
    ({"lengths": "300x1+30", "H": 1}, {"causal": True}),  # more sequences than a program counts at a time
    ({"lengths": "1x150"}, {"causal": True, "window": 7, "softcap": 1.0}),
    ({"lengths": "2x0"}, {}),
    ({"lengths": "2x0", "keys": "3+0"}, {}),
    ({"lengths": "70+5", "keys": "37+9"}, {"causal": True, "window": 2**31 - 1}),
)


def answers(f, given, options, dtype):
    """out, dq, dk and dv of f at tensors of a dtype."""
    tensors = [t.to(dtype).requires_grad_() for t in given[:3]]
    out = f(*tensors, *given[3:], **options)
    dout = torch.cos(torch.arange(out.numel(), device=out.device)).view_as(out) + 0.5
    grads = torch.autograd.grad(out, tensors, dout.to(out.dtype))
    return [out.detach(), *(g.nan_to_num() for g in grads)]  # PyTorch: NaN for queries that see nothing


def expected(*args, **options):
    return problem.reference(*args, **options)[0]


@pytest.mark.parametrize("i", range(len(CASES)))
def test_each_sequence_is_computed_as_if_it_were_alone(dev, i):
    shape, options = CASES[i]
    given = packed(**shape, at=dev)
    mine = answers(course_ops.attention_varlen, given, options, torch.float32)
    theirs, exact = (answers(expected, given, options, dtype) for dtype in (torch.float32, torch.float64))
    for found in zip(mine, theirs, exact, strict=True):
        near(*found, size=2.0)
    found, lse = OPS.attention_varlen(*given, *options_of(**options))
    lse_exact = problem.reference(*given, **options)[1]
    assert torch.equal(found, mine[0])
    assert torch.equal(lse == -math.inf, lse_exact == -math.inf)
    torch.testing.assert_close(lse.nan_to_num(neginf=0), lse_exact.nan_to_num(neginf=0), rtol=1e-5, atol=1e-5)


def options_of(causal=False, window=None, scale=None, softcap=None):
    return causal, window, scale, softcap


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("i", [0, 1, 2])
def test_16_bits_err_no_more_than_pytorchs(dev, i, dtype):
    shape, options = CASES[i]
    given = packed(**shape, dtype=dtype, at=dev)
    mine = answers(course_ops.attention_varlen, given, options, dtype)
    theirs, exact = (answers(expected, given, options, d) for d in (dtype, torch.float64))
    for m, t, e in zip(mine, theirs, exact, strict=True):
        near(m, t + (t - e.to(dtype)), e, size=2.0)


def test_nan_and_inf_stay_in_their_sequence(dev):
    q, k, v, cu, _, *longest = packed("50+70+130", at=dev)
    before = answers(course_ops.attention_varlen, (q, k, v, cu, cu, *longest), {"causal": True}, torch.float32)
    for value in (math.nan, math.inf):
        others = [t.clone() for t in (q, k, v)]
        for t in others:
            t[:50], t[120:] = value, value
        after = answers(course_ops.attention_varlen, (*others, cu, cu, *longest), {"causal": True}, torch.float32)
        assert all(torch.equal(a[50:120], b[50:120]) for a, b in zip(after, before, strict=True))


def test_operators_are_sound(dev):
    given = packed("9+0+5", keys="4+3+5", H=4, H_kv=2, D=8, D_v=24, at=dev)
    tensors = [t.requires_grad_() for t in given[:3]]
    torch.library.opcheck(OPS.attention_varlen, (*tensors, *given[3:], True, 3))
    q, k, v = (t.detach() for t in tensors)
    out, lse = OPS.attention_varlen(q, k, v, *given[3:], True)
    torch.library.opcheck(OPS.attention_varlen_backward, (torch.randn_like(out), q, k, v, out, lse, *given[3:], True))


def test_float64_on_a_cpu():
    q, k, v, *rest = packed("3+0+4", keys="5+2+4", H=2, H_kv=1, D=4, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda *t: course_ops.attention_varlen(*t, *rest, causal=True, softcap=0.7),
        [t.requires_grad_() for t in (q, k, v)],
    )


def test_flops_are_those_of_visible_pairs():
    q, k, v, *rest = packed("4+9+0", H=4, H_kv=2, D=8, D_v=24)
    with FlopCounterMode(display=False) as flops:
        course_ops.attention_varlen(q.requires_grad_(), k, v, *rest, causal=True).sum().backward()
    assert flops.get_total_flops() == 4 * (10 + 45) * (2 * 8 + 2 * 24 + 6 * 8 + 4 * 24)
    meta = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in (q.detach(), k, v, *rest)]
    with FlopCounterMode(display=False) as flops:
        course_ops.attention_varlen(*meta)
    assert flops.get_total_flops() == 4 * 3 * 81 * (2 * 8 + 2 * 24)  # lengths are not known: the longest


def refused(which, change, **options):
    def call():
        given = list(packed("3+5", keys="4+6", H=4))
        given[which] = change(given[which])
        course_ops.attention_varlen(*given, **options)

    return call


REFUSED = (
    (refused(0, lambda t: t[:, :3]), ValueError, "q has 3 heads, k 4"),
    (refused(0, lambda t: t[None]), ValueError, r"expected \[total, H, head_dim\]: pack the sequences"),
    (refused(1, lambda t: t[..., :8]), ValueError, "head_dim"),
    (refused(2, lambda t: t[1:]), ValueError, "v has shape"),
    (refused(1, torch.Tensor.half), TypeError, "k is torch.float16"),
    (refused(3, torch.Tensor.long), TypeError, "cu_seqlens_q is torch.int64"),
    (refused(4, list), TypeError, "cu_seqlens_k must be a torch.Tensor"),
    (refused(4, lambda t: t[:2]), ValueError, r"cu_seqlens_q has 3 entries, cu_seqlens_k 2: expected B \+ 1 each"),
    (refused(4, lambda t: t.to("meta")), ValueError, "cu_seqlens_k is on meta"),
    (refused(3, lambda t: t + 1), ValueError, r"cu_seqlens_q is \[1, 4, 9\]: expected .* from 0 to the number"),
    (refused(4, lambda t: t.flip(0)), ValueError, r"cu_seqlens_k is \[10, 4, 0\]: expected"),
    (refused(5, lambda n: 4), ValueError, "max_seqlen_q is 4: pass more"),
    (refused(6, lambda n: torch.tensor(9)), TypeError, "a number on the host"),
    (refused(5, lambda n: -1), ValueError, "max_seqlen_q = -1"),
    (refused(5, lambda n: 2**63), ValueError, "max_seqlen_q is 9223372036854775808, expected an int of 64 bits"),
    (refused(5, lambda n: n, window=4), ValueError, "needs causal=True"),
    (refused(5, lambda n: n, softcap=0.0), ValueError, "softcap = 0.0"),
)


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_packed_sequences_take_hoppers_kernels_and_never_decoding(monkeypatch):
    monkeypatch.setattr(forward_hopper, "takes", lambda *args: True)
    monkeypatch.setattr(backward_hopper, "takes", lambda *args: True)
    q, k, v, *given = packed("1+1", keys="100+100", H=4)
    heads, of = [_as_heads(t) for t in (q, k, v)], Sequences(*given)
    assert chosen(FORWARD, Call(*heads, True, None, 0.25, None, of)) == "hopper"  # never decode
    assert chosen(BACKWARD, Gradient(heads[0], *heads, heads[0], None, True, None, 0.25, None, of)) == "hopper"
    monkeypatch.setattr(backward_hopper, "takes", lambda *args: False)
    monkeypatch.setattr(wide_backward, "takes", lambda *args: True)
    assert chosen(BACKWARD, Gradient(heads[0], *heads, heads[0], None, True, None, 0.25, None, of)) == "wide"
    assert chosen(BACKWARD, Gradient(heads[0], *heads, heads[0], None, True, None, 0.25, 9.0, of)) == "portable"


# ---- Hopper's kernels ----------------------------------------------------------------------------------------------


def on_hopper(monkeypatch, forward=forward_hopper, backward=backward_hopper):
    """(out, lse), and (dq, dk, dv) of what the forward returned, by modules of Hopper's kernels.

    The backward has a CTA for each tile, as in tests/test_attention_backward_window.py.
    """
    monkeypatch.setattr(backward, "num_sms", lambda device: 1000, raising=False)
    for name in ("gdc_wait", "gdc_launch_dependents"):
        monkeypatch.setattr(backward_hopper, name, nothing)  # of prepare_kernel and finish_kernel
        monkeypatch.setattr(backward, name, nothing)

    def attend(q, k, v, *given, causal=False, window=None, softcap=None):
        heads = [_as_heads(t) for t in (q, k, v)]
        scale = q.shape[-1] ** -0.5
        out, lse = forward.attention_forward(*heads, causal, window, scale, softcap, Sequences(*given))
        return _as_rows(out), lse[0]

    def gradients(dout, q, k, v, out, lse, *given, causal=False, window=None, softcap=None):
        heads = [_as_heads(t) for t in (dout, q, k, v, out)]
        scale = q.shape[-1] ** -0.5
        numbers = (causal, scale, window, softcap)
        if not hasattr(backward, "attention_backward_hopper_kernel"):  # the wide one, which has no softcap
            numbers = (causal, window, scale)
        found = backward.attention_backward(*heads, lse[None], *numbers, Sequences(*given))
        return tuple(map(_as_rows, found))

    return attend, gradients


HOPPER = {
    "an aligned diagonal, empty ones": ({"lengths": "300+0+64+129", "D": 128, "H_kv": 1}, {"causal": True}),
    "other lengths of keys": ({"lengths": "300+1+64+0", "keys": "100+70+0+50", "D": 128, "H": 1}, {"causal": True}),
    "all keys, three consumers": ({"lengths": "200+30", "keys": "100+270", "D": 64, "H": 1}, {}),
    "a window": ({"lengths": "200+70", "keys": "200+130", "D": 64, "H_kv": 1}, {"causal": True, "window": 50}),
    "grouped heads, late dQ": ({"lengths": "600+130", "D": 128, "H_kv": 1}, {"causal": True}),
    "a window, late dQ": ({"lengths": "600+130", "keys": "600+30", "D": 128}, {"causal": True, "window": 300}),
    "one after the other": ({"lengths": "40x5", "D": 128, "H": 1}, {"causal": True}),
    "a softcap": ({"lengths": "300+129", "D": 128, "H_kv": 1}, {"causal": True, "softcap": 3.0}),
    "a softcap, late dQ, a window": (
        {"lengths": "600+70", "D": 128, "H": 1},
        {"causal": True, "softcap": 3.0, "window": 450},
    ),
    "a softcap, D = 64": ({"lengths": "200+70", "keys": "100+333", "D": 64, "H": 1}, {"softcap": 1.0}),
    "more keys, D_v of 64": ({"lengths": "70+200", "keys": "333+201", "D": 128, "D_v": 64, "H": 1}, {"causal": True}),
}
PACKED = {  # several heads share a tile
    "four heads": ({"lengths": "6x1+70+9", "keys": "6x130+300+3", "D": 128, "H": 8, "H_kv": 2}, {"causal": True}),
    "two of six heads, a window": (
        {"lengths": "3x1+70+0+33", "keys": "3x200+300+20+70", "D": 64, "H": 6, "H_kv": 1},
        {"causal": True, "window": 50},
    ),
    "64 heads, three consumers": ({"lengths": "2+1", "keys": "140+0", "D": 64, "H": 64, "H_kv": 1}, {}),
    "D = 192, D_v = 128, same lengths": ({"lengths": "3x5+70", "D": 192, "D_v": 128, "H_kv": 1}, {"causal": True}),
    "D = 256": ({"lengths": "5+40", "keys": "130+70", "D": 256, "H": 8, "H_kv": 1}, {"causal": True}),
}
WIDE = {
    "D = 192, a window": ({"lengths": "200+70", "keys": "200+130", "D": 192, "H": 1}, {"causal": True, "window": 50}),
    "D = 256": ({"lengths": "130+5+70", "D": 256, "H": 1}, {"causal": True}),
    "D = 192, D_v = 128": ({"lengths": "300+129", "D": 192, "D_v": 128, "H_kv": 1}, {"causal": True}),
    "D = 256, other lengths of keys": ({"lengths": "70+1+64+0+9", "keys": "100+70+0+50+65", "D": 256}, {}),
    "D = 256, a neighbour's blocks": ({"lengths": "40x5+70", "D": 256, "H_kv": 1}, {"causal": True}),
}
OF_192 = {
    "192: grouped heads": ({"lengths": "300+129", "D": 192, "D_v": 128, "H_kv": 1}, {"causal": True}),
    "192: other lengths of keys": ({"lengths": "70+1+64+0+9", "keys": "100+70+0+50+65", "D": 160, "D_v": 72}, {}),
    "192: a window": ({"lengths": "200+70", "keys": "200+130", "D": 192, "D_v": 128}, {"causal": True, "window": 50}),
}


def agrees(attend, shape, options, dtype):
    """Whether the forward is within twice PyTorch's own error, beside some roundings."""
    given = packed(**shape, dtype=dtype)
    out, lse = attend(*given, **options)
    theirs, _ = problem.reference(*given, **options)
    exact, exact_lse = problem.reference(*(t.double() for t in given[:3]), *given[3:], **options)
    most = 2 * (theirs.double() - exact).abs().max() + 2 * torch.finfo(dtype).eps * exact.abs().max()
    right = (out.double() - exact).abs().max() <= most  # NaN is not
    lse, exact_lse = (t.double().nan_to_num(nan=math.inf, neginf=-9.0) for t in (lse, exact_lse))
    return bool(right and torch.allclose(lse, exact_lse, rtol=1e-5, atol=1e-4))


def agrees_backward(gradients, shape, options, dtype):
    """As agrees, for dq, dk and dv."""
    q, k, v, *given = packed(**shape, dtype=dtype)
    dout = (torch.randn(*q.shape[:-1], v.shape[-1]) + 0.5).to(dtype)
    out, lse = _computed(q.double(), k.double(), v.double(), Sequences(*given), *whole(q, **options))
    mine = gradients(dout, q, k, v, out.to(dtype), lse.float(), *given, **options)
    found = []
    for other in (dtype, torch.float64):
        tensors = [t.to(other) for t in (dout, q, k, v, out)]
        found.append(_computed_gradient(*tensors, lse.to(other), Sequences(*given), *whole(q, **options)))
    for m, t, e in zip(mine, *found, strict=True):
        most = 4 * (t.double() - e).abs().max() + 4 * torch.finfo(dtype).eps * e.abs().max()
        if not (m.double() - e).abs().max() <= most:
            return False
    return True


def whole(q, causal=False, window=None, softcap=None):
    return causal, window, q.shape[-1] ** -0.5, softcap


@emulated_here
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.night) for seed in range(1, 5))])
@pytest.mark.parametrize("name", HOPPER | PACKED | WIDE)
def test_the_forward_on_hopper_is_right_in_every_order(monkeypatch, name, seed):
    monkeypatch.setattr(emulated, "SEED", seed)
    shape, options = (HOPPER | PACKED | WIDE)[name]
    assert agrees(on_hopper(monkeypatch)[0], shape, options, (torch.bfloat16, torch.float16)[seed % 2])


@emulated_here
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.night) for seed in range(1, 5))])
@pytest.mark.parametrize("name", HOPPER | WIDE | OF_192)
def test_the_backward_on_hopper_is_right_in_every_order(monkeypatch, name, seed):
    monkeypatch.setattr(emulated, "SEED", seed)
    shape, options = (HOPPER | WIDE | OF_192)[name]
    backward = backward_hopper if name in HOPPER else wide_backward if name in WIDE else backward_192
    assert agrees_backward(
        on_hopper(monkeypatch, backward=backward)[1], shape, options, (torch.bfloat16, torch.float16)[seed % 2]
    )


@emulated_here
def test_nan_of_a_neighbour_is_not_read_on_hopper(monkeypatch):
    """Where a tile runs into the next sequence its rows are zeros: 0 x NaN would be NaN."""
    attend, gradients = on_hopper(monkeypatch)
    q, k, v, *given = packed("50+70+130", D=64, dtype=torch.bfloat16)
    out, lse = attend(q, k, v, *given, causal=True)
    expected = gradients(torch.ones_like(q), q, k, v, out, lse, *given, causal=True)
    for t in (q, k, v):
        t[:50], t[120:] = math.nan, math.nan
    dout = torch.full_like(q, math.nan)
    dout[50:120] = 1
    poisoned, lse = attend(q, k, v, *given, causal=True)
    assert torch.equal(poisoned[50:120], out[50:120])
    found = gradients(dout, q, k, v, poisoned, lse, *given, causal=True)
    assert all(torch.equal(f[50:120], e[50:120]) for f, e in zip(found[1:], expected[1:], strict=True))
    torch.testing.assert_close(found[0][50:120], expected[0][50:120], rtol=1e-2, atol=1e-2)  # dQ is added in any order


@emulated_here
def test_ctas_without_a_tile_end(monkeypatch):
    """A grid has room for a tile of each sequence, as lengths are on the device."""
    attend, gradients = on_hopper(monkeypatch)
    shape, options = {"lengths": "30x0+64", "D": 128, "H": 1}, {"causal": True}
    assert agrees(attend, shape, options, torch.bfloat16)
    assert agrees_backward(gradients, shape, options, torch.bfloat16)


def test_records_list_each_tile_once_the_longest_sequence_first():
    """The longest sequence first; each tile once; where nothing is left, no record."""
    lengths, keys = [130, 0, 300, 64], [10, 700, 40, 40]
    own, other = (torch.tensor([0, *of]).cumsum(0).to(device.DEVICE, torch.int32) for of in (lengths, keys))
    with testing.kernels():
        listed, most = sequences.records(own, other, sum(lengths), 128)
    table = listed.view(-1, 8)
    assert most == sum(lengths) // 128 + 4
    assert table[0, 0] == 2 + 3 + 1
    expected = (
        [(430, 300, 790 - 40, 40, 0, 3, 2)] * 3 + [(494, 64, 790, 40, 3, 1, 3)] + [(130, 130, 10, 10, 4, 2, 0)] * 2
    )
    assert [tuple(row) for row in table[1:7, :7].tolist()] == expected


KEYS, PLAIN = HOPPER["other lengths of keys"], HOPPER["an aligned diagonal, empty ones"]
LAST_LONG = ({"lengths": "30+300", "D": 128, "H": 1}, {"causal": True})
CAPPED = HOPPER["a softcap"]
LATE, MANY = HOPPER["grouped heads, late dQ"], HOPPER["one after the other"]
PACK, WIDE_KEYS = PACKED["four heads"], WIDE["D = 256, other lengths of keys"]
WIDE_MANY = WIDE["D = 256, a neighbour's blocks"]
EMPTY = ({"lengths": "30x0+64", "D": 128, "H": 1}, {"causal": True})
WRONG = {  # why: module, old, new, forward or backward, case
    "a tile is stored whole": (sequences, "H, limit, D], strides", "H, limit + 64, D], strides", 0, LAST_LONG),
    "dK is stored whole": (sequences, "H, limit, D], strides", "H, limit + 64, D], strides", 1, LAST_LONG),
    "a row late": (sequences, "- where[1] + row, column", "- where[1] + row + 1, column", 0, PLAIN),
    "a record is one too early": (sequences, "(1 + min(index // heads", "(min(index // heads", 0, PLAIN),
    "keys end where queries do": (forward_hopper, "problem.k_end, problem", "problem.q_end, problem", 0, KEYS),
    "lse of another sequence": (forward_hopper, "+= problem.q_end - problem.S_q", "+= problem.q_end", 0, LAST_LONG),
    "lse over the next one": (forward_hopper, "mask=rows < problem.S_q", "mask=rows < args.problem.S_q", 0, LAST_LONG),
    "tiles of all sequences": (forward_hopper, "of_sequence, index - first", "of_sequence, index", 0, PLAIN),
    "masks of all rows": (forward_hopper, "S_k=S_k, window=problem", "S_k=problem.S_k, window=problem", 0, KEYS),
    "lengths of keys as of queries": (backward_hopper, "index, k_end, S_k, q_end, S_q, first",
                                      "index, q_end, S_q, k_end, S_k, first", 1, KEYS),
    "values of another head": (backward_hopper, "GROUP + head * blocks\n", "GROUP + head\n", 1, LATE),
    "blocks of the sequence before": (backward_hopper, "// ROWS + self.number)", "// ROWS)", 1, MANY),
    "no cap": (forward_hopper, "s = capped(s, c.args.cap_scale)\n", "s = s\n", 0, CAPPED),
    "the mask under the cap": (forward_hopper, "apply_mask(capped(s, c.args.cap_scale), c.row, key, c.problem)",
                               "capped(apply_mask(s, c.row, key, c.problem), c.args.cap_scale)", 0, CAPPED),
    "no derivative of tanh": (backward_hopper, "p * (1 - s * s)", "p", 1, CAPPED),
    "dK without the scale": (backward_hopper, "scale *= args.cap_scale", "scale *= 1", 1, CAPPED),
    "no step without queries": (backward_hopper, "S_q = max(1, S_q)", "S_q = S_q", 1, KEYS),
    "Q of other heads": (forward_hopper, "queries, head * PACK", "queries, head", 0, PACK),
    "a query for each row of a pack": (forward_hopper, "rows % self.QUERIES", "rows", 0, PACK),
    "lse of the first head": (forward_hopper, "// problem.QUERIES", "* 0", 0, PACK),
    "wide: dK of the first sequence": (wide_backward, "index, k_end, S_k, q_end, S_q", "index, q_end, S_q, k_end, S_k",
                                       1, WIDE_KEYS),
    "wide: no step without keys": (wide_backward, "(max(1, self.S_k) + ROWS", "(self.S_k + ROWS", 1, WIDE_KEYS),
    "wide: values of the sequence before": (wide_backward, "// ROWS + self.number)", "// ROWS)", 1, WIDE_MANY),
    "wide: tiles of all sequences": (wide_backward, "index -= first\n    if CAUSAL:  # the first keys",
                                     "index += 0\n    if CAUSAL:  # the first keys", 1, WIDE_MANY),
    "no record behind the last": (sequences, "tl.where(word == 5, B, 0)", "tl.where(word == 5, B, 9)", 1, WIDE_MANY),
}  # fmt: skip


def copies(folder, module, old, new):
    """The Hopper kernels, with one change in one of the files."""
    changed, *kernels = (
        kernel_copies.changed(each, old, new, folder) if each is module else kernel_copies.same(each, folder)
        for each in (sequences, forward_hopper, backward_hopper, wide_backward)
    )
    for kernel in kernels:
        for name, value in vars(sequences).items():
            if vars(kernel).get(name) is value:
                setattr(kernel, name, vars(changed)[name])
    return kernels


@emulated_here
@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_kernel_is_found(monkeypatch, tmp_path, why):
    module, old, new, direction, (shape, options) = WRONG[why]
    forward, *backwards = copies(tmp_path, module, old, new)
    backward = backwards[(shape, options) in WIDE.values()]
    run = on_hopper(monkeypatch, forward, backward)[direction]
    with suppress(Fault, IndexError, ZeroDivisionError):  # they find it, too
        assert not (agrees, agrees_backward)[direction](run, shape, options, torch.bfloat16)


@emulated_here
def test_the_copies_are_right_without_a_change(monkeypatch, tmp_path):
    attend, gradients = on_hopper(monkeypatch, *copies(tmp_path, None, "", "")[:2])
    assert agrees(attend, *LAST_LONG, torch.bfloat16)
    assert agrees_backward(gradients, *LAST_LONG, torch.bfloat16)


# ---- What the compiler makes of it ---------------------------------------------------------------------------------


def resources(D, causal, window, softcap):
    """[shared memory, serialized?, spills] of the forward and, to D = 128, the backward. In a process that compiles."""
    q, k = (torch.empty(8192, H, D, dtype=torch.bfloat16, device="meta") for H in (8, 2))
    cu = torch.empty(5, dtype=torch.int32, device="meta")
    heads, of = [_as_heads(t) for t in (q, k, k)], Sequences(cu, cu, 4096, 4096)
    found = []
    with compiled.compiling(90) as made:
        made.clear()
        forward_hopper.attention_forward(*heads, causal, window, 0.1, softcap, of)
        if D <= 128:
            lse = torch.empty(1, 8, 8192, device="meta")
            backward_hopper.attention_backward(heads[0], *heads, heads[0], lse, causal, 0.1, window, softcap, of)
        for name in ("attention_hopper_kernel", "attention_backward_hopper_kernel")[: 2 if D <= 128 else 1]:
            kernel = compiled.inspect("", made[name], 90)
            found.append([kernel.shared, sass.serialized(kernel), kernel.spills])
    return found


NIGHT = pytest.mark.night


@pytest.mark.parametrize(
    ("D", "causal", "window", "softcap"),
    [
        (128, True, None, None), pytest.param(128, False, None, None, marks=NIGHT),
        pytest.param(64, True, None, None, marks=NIGHT), pytest.param(64, False, None, None, marks=NIGHT),
        pytest.param(128, True, 1024, None, marks=NIGHT), pytest.param(192, True, None, None, marks=NIGHT),
        pytest.param(256, True, None, None, marks=NIGHT), (128, True, None, 50.0),
        pytest.param(64, False, None, 50.0, marks=NIGHT), pytest.param(256, True, 1024, 50.0, marks=NIGHT),
    ],
)  # fmt: skip
def test_it_fits_on_an_sm_and_its_matmuls_overlap(D, causal, window, softcap):
    forward, *backward = call_in_compiler("tests.test_attention_varlen", "resources", D, causal, window, softcap)
    assert all(shared <= 232448 and not serialized for shared, serialized, _ in (forward, *backward))
    assert forward[2] == 0 or D == 256
