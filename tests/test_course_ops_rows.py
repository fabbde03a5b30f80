"""The row and elementwise operators of course_ops against PyTorch: by PyTorch on the CPU, and by their kernels.

Kernels run on the GPU if there is one, otherwise in the interpreter, which has 4 SMs: so a long row there is longer
than they hold.
"""

import math
import re
from contextlib import contextmanager, nullcontext
from importlib import import_module

from lessonkit import DEVICE, device
from lessonkit.base import chips
from lessonkit.modes import compiled, interpreter
from lessonkit.modes.compile_server import call_in_compiler

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.library import opcheck
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import course_ops
from course_ops import testing
from course_ops._common import num_sms
from course_ops.kernels import _rows
from course_ops.kernels._rows import (
    Choice,
    Rows,
    beside_chunks,
    choose,
    common_multiple_of,
    mean_of,
    sides,
    whole_chunks,
)

pytestmark = pytest.mark.kept

CPU = torch.device("cpu")
EPS = torch.finfo(torch.float32).eps


@contextmanager
def kernels():
    """Inside, kernels compute: on the GPU, or interpreted, every address checked."""
    with nullcontext() if device.HAS_GPU else testing.interpreted(), interpreter.watched():
        yield DEVICE


@pytest.fixture(params=["pytorch", "kernels"])
def where(request):
    """The device of the tensors: the CPU, where PyTorch computes, or where kernels do."""
    with kernels() if request.param == "kernels" else nullcontext(CPU) as at:
        yield at


@pytest.fixture
def by_kernels():
    with kernels() as at:
        yield at


def rows(*shape, dtype=torch.float32, at=CPU, shift=0.0, pad=0):
    """Rows of sizes 1/16, 1/4, 1 and 4, so that one taken for its neighbour shows, and `pad` elements between them."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) + shift
    if x.ndim > 1:
        x = x * 4.0 ** (torch.arange(shape[-2]) % 4 - 2)[:, None]
    return F.pad(x.to(at, dtype), (0, pad))[..., : shape[-1]]


def weights(n, dtype=torch.float32, at=CPU):
    generator = torch.Generator().manual_seed(n)
    return ((torch.rand(n, generator=generator) + 0.5).to(at, dtype), torch.randn(n, generator=generator).to(at, dtype))


def results(f, tensors, dtype=None):
    """What f answers, and the gradients of its inputs that are floats, with upstream gradients that are not centred."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() if t.is_floating_point() else t for t in tensors]
    out = f(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    upstream = [torch.randn(o.shape, generator=torch.Generator().manual_seed(7)) + 0.5 for o in out]
    upstream = [u.to(torch.bfloat16).to(o.device, o.dtype) for u, o in zip(upstream, out, strict=True)]
    # Where rows are far apart, the gradient's rows are, by another stride.
    upstream = [F.pad(u, (0, 3))[..., : u.shape[-1]] if u.ndim == 2 else u for u in upstream]
    wanted = [t for t in leaves if t.requires_grad]
    return *(o.detach() for o in out), *torch.autograd.grad(out, wanted, upstream)


def no_worse(ours, theirs, *tensors):
    """ours(*tensors), and its gradients, are at most twice as far from float64 as what PyTorch computes."""
    found, peer = results(ours, tensors), results(theirs, tensors)
    truth = results(theirs, tensors, torch.float64)
    assert len(found) == len(truth)
    for f, p, t in zip(found, peer, truth, strict=True):
        assert f.shape == t.shape
        assert torch.equal(f.isnan(), t.isnan())
        f, p, t = (v.double().nan_to_num() for v in (f, p, t))
        if t.numel():
            # Where the truth is 0, a fused multiply-add leaves the rounding of what cancels.
            size = t.abs().max() or max(leaf.abs().max() for leaf in tensors if leaf.is_floating_point())
            # With one element a row the variance is 0, and rstd = 1 / sqrt(1e-5) multiplies that rounding.
            floor = 16 * EPS * size * (316 if tensors[0].shape[-1] == 1 else 1)
            assert (f - t).abs().max() <= 2 * (p - t).abs().max() + floor
    return found


def softmax(x):
    return torch.softmax(x, -1)


def layer_norm(x, w, b):
    return F.layer_norm(x, w.shape, w, b)


def rms_norm(x, w):
    return F.rms_norm(x, w.shape, w, 1e-3)


def our_rms_norm(x, w):
    return course_ops.rms_norm(x, w, 1e-3)


def gelu(x):
    return F.gelu(x, approximate="tanh")


def add_norm(x, residual, w, b):
    total = residual + x
    return F.layer_norm(total, w.shape, w, b).to(x.dtype), total


# Each kernel of each list, by the interpreter's 4 SMs, in float32. (M, N); the last one is read twice.
SOFTMAX = ((17, 1), (7, 127), (3, 5000), (2, 16400), (1, 114689))
LAYER_NORM = ((2, 1), (37, 101), (3, 2049), (2, 4000), (2, 5000), (1, 12672), (1, 16387), (1, 32769))
RMS_NORM = ((17, 1), (37, 127), (3, 5000), (1, 16385), (1, 65537))
ADD_NORM = ((2, 1), (37, 101), (3, 5000), (2, 8193), (2, 16385), (1, 32769))
CROSS_ENTROPY = ((3, 1), (5, 7), (17, 1000), (65, 1025), (65, 1028), (5, 1153), (2, 16411))


@pytest.mark.parametrize("shape", SOFTMAX)
def test_softmax(where, shape):
    no_worse(course_ops.softmax, softmax, rows(*shape, at=where, shift=5))


@pytest.mark.parametrize("shape", LAYER_NORM)
def test_layer_norm(where, shape):
    x, (w, b) = rows(*shape, at=where, shift=8), weights(shape[1], at=where)
    no_worse(course_ops.layer_norm, layer_norm, x, w, b)


@pytest.mark.parametrize("shape", RMS_NORM)
def test_rms_norm(where, shape):
    no_worse(our_rms_norm, rms_norm, rows(*shape, at=where, shift=1), weights(shape[1], at=where)[0])


@pytest.mark.parametrize("shape", ADD_NORM)
def test_add_norm(where, shape):
    x, residual = rows(*shape, at=where, shift=1), rows(shape[0] + 1, shape[1], at=where, shift=-3)[1:]
    no_worse(course_ops.add_norm, add_norm, x, residual, *weights(shape[1], at=where))


@pytest.mark.parametrize("n", [1, 1021, 2049])
def test_gelu(where, n):
    x = rows(n, at=where) * 3
    x[::17] *= 30  # a tanh by a quotient overflows there
    no_worse(course_ops.gelu, gelu, x)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", CROSS_ENTROPY)
def test_cross_entropy(where, shape, reduction):
    if reduction != "none" and shape not in CROSS_ENTROPY[1:3]:
        pytest.skip("the reduction is PyTorch's: two shapes do")
    logits, targets = rows(*shape, at=where, shift=-8), torch.arange(shape[0], device=where) * 7919 % shape[1]
    targets[2::5] = -100
    no_worse(
        lambda x: course_ops.cross_entropy(x, targets, reduction=reduction),
        lambda x: F.cross_entropy(x, targets, reduction=reduction),
        logits,
    )


@pytest.mark.parametrize(
    ("op", "direction", "kernel"),
    [
        (op, direction, choice.launch.__name__)
        for op in ("softmax", "layer_norm", "rms_norm", "add_norm")
        for direction in ("FORWARD", "BACKWARD")
        for choice in getattr(import_module(f"course_ops.{op}"), direction)
        if not choice.launch.__name__.endswith("_shifted")
    ],
)
def test_each_kernel_by_itself(by_kernels, monkeypatch, op, direction, kernel):
    """More rows than programs, rows and gradients further apart than they are long, several parts or blocks a row."""
    module = import_module(f"course_ops.{op}")
    (choice,) = (c for c in getattr(module, direction) if c.launch.__name__ == kernel)
    monkeypatch.setattr(module, direction, (Choice(choice.launch, lambda r: True, ""),))
    m = 9 if direction == "BACKWARD" else 3
    n = 4090 if op in ("softmax", "rms_norm") else 5000
    if not choice.takes(Rows(m, n, 4, num_sms(by_kernels))):
        n = 2000
    x, (w, b) = rows(m, n, at=by_kernels, shift=2, pad=5), weights(n, at=by_kernels)
    ours, theirs, args = {
        "softmax": (course_ops.softmax, softmax, (x,)),
        "layer_norm": (course_ops.layer_norm, layer_norm, (x, w, b)),
        "rms_norm": (our_rms_norm, rms_norm, (x, w)),
        "add_norm": (course_ops.add_norm, add_norm, (x, rows(m, n, at=by_kernels, shift=-3, pad=2), w, b)),
    }[op]
    no_worse(ours, theirs, *args)


def taken(op, direction, *shapes, itemsize=4, sms=4):
    choices = getattr(import_module(f"course_ops.{op}"), direction)
    return [choose(choices, Rows(m, n, itemsize, sms)).__name__.removeprefix(f"{op}_") for m, n in shapes], choices


def test_rows_whose_last_block_would_end_past_an_int32_are_refused():
    for N in (2**31 - 2**15, 2**31):
        assert Rows.of(torch.empty(1, N, dtype=torch.bfloat16, device="meta")).N == N
    with pytest.raises(ValueError, match=r"x has rows of 2147483647 elements: .* pad them"):
        Rows.of(torch.empty(1, 2**31 - 1, dtype=torch.bfloat16, device="meta"))


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        ("softmax", SOFTMAX),
        ("layer_norm", LAYER_NORM),
        ("rms_norm", RMS_NORM),
        ("add_norm", ADD_NORM),
        ("cross_entropy", CROSS_ENTROPY),
    ],
)
def test_every_kernel_of_every_list_is_tested(op, shapes):
    for direction in ("FORWARD", "BACKWARD") if op != "cross_entropy" else ("FORWARD",):
        found, choices = taken(op, direction, *shapes)
        every = {choice.launch.__name__.removeprefix(f"{op}_") for choice in choices}
        assert set(found) == {name for name in every if not name.endswith("shifted")}  # ODD_ROWS are of 16 bits


@pytest.mark.parametrize(
    ("op", "direction", "expected"),
    [
        ("softmax", "FORWARD", ["packed", "packed", "chunks", "split", "two_pass"]),
        (
            "softmax",
            "BACKWARD",
            ["backward_packed", "backward_packed", "backward_chunks", "backward_split", "backward_two_pass"],
        ),
        ("layer_norm", "FORWARD", ["tile", "packed", "chunks", "split", "two_pass"]),
        (
            "layer_norm",
            "BACKWARD",
            ["backward_registers", "backward_walk", "backward_group", "backward_group", "backward_group"],
        ),
        ("rms_norm", "FORWARD", ["packed", "packed", "chunks", "split", "two_pass"]),
        (
            "rms_norm",
            "BACKWARD",
            ["backward_persistent", "backward_walk", "backward_walk", "backward_group", "backward_group"],
        ),
        ("add_norm", "FORWARD", ["packed", "packed", "chunks", "split", "_add_then_norm"]),
        (
            "add_norm",
            "BACKWARD",
            ["backward_packed", "backward_walk", "backward_group", "backward_group", "backward_group"],
        ),
        ("cross_entropy", "FORWARD", ["packed", "warp", "warp", "split", "split"]),
    ],
)
def test_kernels_of_an_h200(op, direction, expected):
    """16-bit rows, 132 SMs. These are the reports' shapes: another kernel would make them slower."""
    shapes = ((32768, 1024), (8192, 8192), (4096, 12672), (2048, 131072), (1, 20_000_000))
    assert taken(op, direction, *shapes, itemsize=2, sms=132)[0] == expected


@pytest.mark.parametrize("op", ["softmax", "layer_norm", "rms_norm"])
def test_thousands_of_steps_lose_no_digits(by_kernels, op):
    """A row of two values, over and over: each step adds the same, which a sum of one level rounds the same way."""
    n = 4_000_000
    x = torch.tensor([0.3, -0.4], device=by_kernels).repeat(n // 2).view(1, n)
    w, b = torch.ones(n, device=by_kernels), torch.zeros(n, device=by_kernels)
    kernels = import_module(f"course_ops.kernels.{op}")
    if op == "softmax":
        found = kernels.softmax_two_pass(x)
        found = found, kernels.softmax_backward_two_pass(found, x)
        wide = x.double().requires_grad_()
        y = torch.softmax(wide, -1)
        expected = y.detach(), torch.autograd.grad(y, wide, x.double())[0]
    elif op == "layer_norm":
        found = (kernels.layer_norm_two_pass(x, w, b, 0.0)[0],)
        expected = (F.layer_norm(x.double(), (n,), eps=0.0),)
    else:
        found = (kernels.rms_norm_two_pass(x, w, 0.0)[0],)
        expected = (F.rms_norm(x.double(), (n,), eps=0.0),)
    for f, e in zip(found, expected, strict=True):
        assert ((f - e) / e).abs().max() < 20 * EPS


@pytest.mark.skipif(not device.HAS_GPU, reason="rows longer than a GPU's registers")
@pytest.mark.parametrize("op", ["softmax", "layer_norm", "rms_norm"])
def test_rows_longer_than_a_gpu(op):
    n = 20_000_000
    w, b = weights(n, at=DEVICE)
    ours, theirs, args = {
        "softmax": (course_ops.softmax, softmax, ()),
        "layer_norm": (course_ops.layer_norm, layer_norm, (w, b)),
        "rms_norm": (our_rms_norm, rms_norm, (w,)),
    }[op]
    no_worse(ours, theirs, rows(2, n, at=DEVICE, shift=1), *args)


# Rows that lie within a few chunks of 8 elements, fill one program, lack one element of it, or have several parts.
ODD_ROWS = (1, 7, 9, 15, 17, 255, 2049, 4095, 4097, 5001, 9217)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", ODD_ROWS)
def test_rows_of_an_odd_length(by_kernels, monkeypatch, n, dtype):
    """Eleven rows start at each of the eight places between two multiples of 16 bytes; NaN lies between padded rows."""
    for op in ("softmax", "layer_norm", "rms_norm"):
        module = import_module(f"course_ops.{op}")
        (launch,) = (c.launch for c in module.FORWARD if c.launch.__name__.endswith("_shifted"))
        monkeypatch.setattr(module, "FORWARD", (Choice(launch, lambda r: True, ""),))
    x, (w, b) = rows(11, n, dtype=dtype, at=by_kernels, shift=2), weights(n, dtype, by_kernels)
    y, dy = torch.softmax(x, -1), rows(11, n, dtype=dtype, at=by_kernels, shift=1)
    delta = (y.double() * dy.double()).sum(-1, keepdim=True)
    backward = import_module("course_ops.kernels.softmax").softmax_backward_shifted
    for spaced in (lambda t: t, between_nans):
        for ours, theirs, args in (
            (course_ops.softmax, softmax, ()),
            (course_ops.layer_norm, layer_norm, (w, b)),
            (lambda x, w: course_ops.layer_norm(x, w), lambda x, w: F.layer_norm(x, w.shape, w), (w,)),
            (our_rms_norm, rms_norm, (w,)),
        ):
            found = no_worse(ours, theirs, spaced(x), *args)
            assert all(f.dtype == dtype for f in found)
        expected = (y.double() * (dy.double() - delta)).to(dtype)
        eps = torch.finfo(dtype).eps
        atol = float(eps * eps * (y * dy).abs().max())
        torch.testing.assert_close(backward(spaced(y), spaced(dy)), expected, rtol=eps, atol=atol)
        torch.testing.assert_close(backward(y, between_nans(dy)), expected, rtol=eps, atol=atol)


@pytest.mark.parametrize("column", [0, 7, 1000, -1])
def test_the_sides_of_an_odd_row_count_in_softmaxs_gradient(by_kernels, column):
    """One column has all the probability, beside the whole chunks or in one: dx is dy - dy there, and 0 elsewhere."""
    y = torch.zeros(9, 2049, dtype=torch.bfloat16, device=by_kernels)
    y[:, column] = 1
    dy = rows(9, 2049, dtype=torch.bfloat16, at=by_kernels)
    backward = choose(import_module("course_ops.softmax").BACKWARD, Rows.of(y, dy))
    assert backward.__name__ == "softmax_backward_shifted"
    assert not backward(y, dy).any()


@triton.jit
def columns_kernel(w_ptr, found_ptr, N, begin, LANES: tl.constexpr):
    """found = w of a row that starts at `begin`, by the part that this program is."""
    begin, part = begin + tl.zeros([], tl.int64), tl.program_id(0)
    at, inside = whole_chunks(begin, N, part, LANES, 8)
    tl.store(found_ptr + (at - begin), beside_chunks(w_ptr, begin, part, inside, LANES, 8), mask=inside)
    side, mine = sides(begin, N, part, 8)
    tl.store(found_ptr + (side - begin), tl.load(w_ptr + (side - begin), mask=mine).to(tl.float32), mask=mine)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [1, 7, 9, 15, 17, 255, 1023, 1041])
def test_columns_beside_rows_that_start_anywhere(by_kernels, n, dtype):
    """To the bit and each once, wherever the row starts; addresses past w's end are errors."""
    w = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(by_kernels, dtype)
    for begin in range(8):
        found = torch.full((n,), float("nan"), device=by_kernels)
        columns_kernel[(triton.cdiv(n, 512),)](w, found, n, begin, LANES=64, num_warps=1)
        assert torch.equal(found, w.float())


@pytest.mark.parametrize("stream", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [2049, 4097, 7003])
def test_a_stream_beside_rows_of_an_odd_length(by_kernels, n, stream):
    """NaN lies between the stream's rows; its dtype is that of the weights."""
    x, residual = rows(11, n, dtype=torch.bfloat16, at=by_kernels), rows(11, n, dtype=stream, at=by_kernels, shift=2)
    w, b = weights(n, stream, by_kernels)
    chosen = choose(import_module("course_ops.add_norm").FORWARD, Rows.of(x, between_nans(residual)))
    assert chosen.__name__ == "add_norm_shifted"
    for bias in (b, None):
        y, total = course_ops.add_norm(x, between_nans(residual), w, bias)
        assert torch.equal(total, residual + x)
        expected = F.layer_norm(total.double(), (n,), w.double(), None if bias is None else b.double())
        torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=float(2**-16 * expected.abs().max()))


def between_nans(x):
    """x with 8 elements of NaN after each row."""
    return F.pad(x, (0, 8), value=float("nan"))[:, : x.shape[1]]


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "add_norm"])
@pytest.mark.parametrize(
    ("m", "n", "dtype"),
    [
        *((m, 2049, torch.bfloat16) for m in (1, 7, 8, 9, 67)),
        (9, 2051, torch.float32),
        (11, 2059, torch.float16),
        (7, 12003, torch.bfloat16),
        (9, 12003, torch.float32),
    ],
)
def test_the_norms_gradients_of_rows_that_start_anywhere(by_kernels, op, m, n, dtype):
    """One program a row, and several. NaN and infinity lie between the rows, and no gradient has them."""
    x, dy, dtotal = (rows(m, n, dtype=dtype, at=by_kernels, shift=shift) for shift in (2, 1, -1))
    (w, _), bias = weights(n, dtype, by_kernels), op != "rms_norm"
    mean = x.float().mean(1) if bias else None
    rstd = torch.rsqrt(x.float().var(1, correction=0) + 1e-5)
    beside = between_nans(dy), F.pad(x, (0, 16), value=float("inf"))[:, :n]
    beside = (beside[0], between_nans(dtotal), beside[1]) if op == "add_norm" else beside
    backward = choose(import_module(f"course_ops.{op}").BACKWARD, Rows.of(*beside[::-1]))
    assert backward.__name__ == f"{op}_backward_shifted"
    args = (*beside, w, *((mean,) if bias else ()), rstd, *((True,) if bias else ()))
    found = backward(*args)
    for first, second in zip(found, backward(*args), strict=True):
        assert torch.equal(first, second)

    g, x_hat = dy.double() * w.double(), (x.double() - (mean.double()[:, None] if bias else 0)) * rstd.double()[:, None]
    dx = g - x_hat * (g * x_hat).mean(1, keepdim=True) - (g.mean(1, keepdim=True) if bias else 0)
    dx = dx * rstd.double()[:, None] + (dtotal.double() if op == "add_norm" else 0)
    sums = (dy.double() * x_hat).sum(0), dy.double().sum(0)
    expected = (dx,) * (1 + (op == "add_norm")) + sums[: 1 + bias]
    for ours, theirs in zip(found, expected, strict=True):
        error = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-4
        torch.testing.assert_close(ours.double(), theirs, rtol=error, atol=error * float(theirs.abs().max()) / 64)


@pytest.mark.parametrize(
    ("n", "pads", "dtypes", "expected"),
    [
        (4095, (0, 8), (torch.bfloat16, torch.bfloat16), 8),
        (4094, (0, 0), (torch.float16, torch.float16), 4),
        (4100, (16, 0), (torch.bfloat16, torch.bfloat16), 2),
        (4096, (0, 0), (torch.bfloat16, torch.bfloat16), 1),
        (4095, (0, 4), (torch.float32, torch.bfloat16), 4),
        (4095, (0, 4), (torch.bfloat16, torch.bfloat16), 1),  # the two rows of one number start at different places
    ],
)
def test_how_far_apart_rows_start_alike(n, pads, dtypes, expected):
    x, dy = (torch.empty(9, n + pad, dtype=dtype)[:, :n] for pad, dtype in zip(pads, dtypes, strict=True))
    assert Rows.of(x, dy).period == expected
    if expected > 1:
        start = [x.stride(0) * row * x.element_size() % 16 for row in range(9)]
        assert start[0] == start[expected] not in start[1:expected]


@pytest.mark.parametrize(
    ("n", "pad", "start", "dtype", "expected"),
    [
        (4095, 0, 0, torch.bfloat16, True),
        (4095, 8, 0, torch.float16, True),
        (4095, 1, 0, torch.bfloat16, False),  # x's rows start at other places than the result's
        (4095, 0, 1, torch.bfloat16, False),  # x itself starts at none
        (4096, 0, 0, torch.bfloat16, False),
        (4095, 0, 0, torch.float32, False),
    ],
)
def test_which_rows_are_shifted(n, pad, start, dtype, expected):
    x = torch.empty(3 * (n + pad) + start, dtype=dtype)[start:].view(3, n + pad)[:, :n]
    assert Rows.of(x).shifted == expected
    assert Rows.of(torch.empty(3, n, dtype=dtype), x).shifted == expected
    taken = choose(import_module("course_ops.softmax").FORWARD, Rows.of(x)).__name__
    assert (taken == "softmax_shifted") == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(where, dtype):
    x, other = (rows(6, 133, dtype=dtype, at=where, shift=s) for s in (1, 2))
    w, b = weights(133, dtype, where)
    for ours, theirs, args in (
        (course_ops.softmax, softmax, (x,)),
        (course_ops.gelu, gelu, (x,)),
        (course_ops.layer_norm, layer_norm, (x, w, b)),
        (our_rms_norm, rms_norm, (x, w)),
        (course_ops.add_norm, add_norm, (x, other, w, b)),
    ):
        found = no_worse(ours, theirs, *args)
        assert all(f.dtype == dtype for f in found)
    targets = torch.arange(6, device=where)
    found = no_worse(
        lambda x: course_ops.cross_entropy(x, targets),
        lambda x: F.cross_entropy(x.to(torch.promote_types(x.dtype, torch.float32)), targets),
        x,
    )
    assert [f.dtype for f in found] == [torch.float32, dtype]


@pytest.mark.parametrize("n", [101, 8200])
def test_fp32_stream_and_weights_beside_16_bits(where, n):
    """As under autocast: the residual and the weights are float32, the branch and the norm have 16 bits."""
    x, residual = rows(2, n, dtype=torch.bfloat16, at=where), rows(2, n, at=where, shift=2)
    w, b = weights(n, at=where)
    found = results(course_ops.add_norm, (x, residual, w, b))
    assert [f.dtype for f in found] == [torch.bfloat16, torch.float32, torch.bfloat16] + [torch.float32] * 3
    truth = results(add_norm, (x.double(), residual.double(), w.double(), b.double()))
    for f, t in zip(found, truth, strict=True):
        near = 2 * EPS if f.dtype == torch.float32 else torch.finfo(f.dtype).eps
        torch.testing.assert_close(f.double(), t, rtol=near, atol=float(32 * near * t.abs().max()))
    for ours, theirs, more in ((course_ops.layer_norm, layer_norm, (w, b)), (our_rms_norm, rms_norm, (w,))):
        found = results(ours, (x, *more))
        truth = results(theirs, (x.double(), *(m.double() for m in more)))
        assert [f.dtype for f in found] == [torch.bfloat16] * 2 + [torch.float32] * len(more)
        for f, t in zip(found, truth, strict=True):
            near = torch.finfo(f.dtype).eps
            torch.testing.assert_close(f.double(), t, rtol=near, atol=float(32 * near * t.abs().max()))


@pytest.mark.parametrize("n", [101, 2100, 5000, 16400])
def test_norms_without_bias(where, n):
    x, (w, _) = rows(1 if n > 10000 else 2, n, at=where, shift=3), weights(n, at=where)
    no_worse(lambda x, w: course_ops.layer_norm(x, w), lambda x, w: F.layer_norm(x, w.shape, w), x, w)
    no_worse(
        lambda x, r, w: course_ops.add_norm(x, r, w),
        lambda x, r, w: (F.layer_norm(x + r, w.shape, w), x + r),
        x, x.flip(0), w,
    )  # fmt: skip


def test_leading_dimensions_and_strides(where):
    w, b = weights(37, at=where)
    targets = torch.arange(6, device=where).view(2, 3)
    for x in (
        rows(2, 3, 40, at=where)[..., :37],  # rows further apart than they are long
        rows(2, 37, 3, at=where).transpose(1, 2),  # neighbours far apart
        rows(1, 1, 37, at=where).expand(2, 3, 37),
        rows(2, 3, 75, at=where)[..., 1::2],  # every second column
    ):
        no_worse(course_ops.softmax, softmax, x)
        no_worse(course_ops.gelu, gelu, x)
        no_worse(course_ops.layer_norm, layer_norm, x, w, b)
        no_worse(our_rms_norm, rms_norm, x, w)
        no_worse(course_ops.add_norm, add_norm, x, x, w, b)
        no_worse(
            lambda x: course_ops.cross_entropy(x, targets, reduction="none"),
            lambda x: F.cross_entropy(x.flatten(0, 1), targets.flatten(), reduction="none").view(2, 3),
            x,
        )
        assert course_ops.dropout(x, 0.5, seed=1).is_contiguous()
    assert course_ops.softmax(rows(37, at=where)).shape == (37,)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), (2, 0, 5)])
def test_no_rows_and_no_columns_are_as_pytorch_has_them(where, shape):
    x, (w, b) = rows(*shape, at=where), weights(shape[-1], at=where)
    no_worse(course_ops.softmax, softmax, x)
    no_worse(course_ops.gelu, gelu, x)
    assert course_ops.dropout(x, 0.5).shape == shape
    for f, args in (
        (course_ops.layer_norm, (x, w, b)),
        (our_rms_norm, (x, w)),
        (course_ops.add_norm, (x, x.clone(), w, b)),
    ):
        *_, dw = results(f, args)
        assert torch.equal(dw, torch.zeros_like(w))  # a sum of no rows, or of no columns
    if shape[-1]:
        targets = torch.zeros(shape[:-1], dtype=torch.long, device=where)
        assert course_ops.cross_entropy(x, targets).isnan()  # as F.cross_entropy: the mean of nothing
        assert course_ops.cross_entropy(x, targets, reduction="sum") == 0


def test_strange_values_stay_in_their_row(where):
    """NaN and inf do what they do in PyTorch, and the rows beside them do not notice."""
    w, b = weights(67, at=where)
    x = rows(6, 67, at=where)
    x[0, 3], x[2, 66], x[4, 1:], x[5] = math.nan, math.inf, -math.inf, -math.inf
    torch.testing.assert_close(course_ops.softmax(x), softmax(x), equal_nan=True)
    torch.testing.assert_close(course_ops.layer_norm(x, w, b), layer_norm(x, w, b), equal_nan=True)
    found = course_ops.cross_entropy(x, torch.zeros(6, dtype=torch.long, device=where), reduction="none")
    assert found.isnan().tolist() == [True, False, True, False, False, True]
    found = course_ops.cross_entropy(x.repeat(11, 16)[:, :1028], torch.arange(66, device=where), reduction="none")
    assert found.isnan().tolist() == 11 * [True, False, True, False, False, True]
    strange = torch.tensor([math.nan, math.inf, -math.inf, 1e20, -1e20, 0.0], device=where)
    torch.testing.assert_close(course_ops.gelu(strange), gelu(strange), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rms_norm_without_eps_is_pytorchs(where, dtype):
    """It is float32's in every dtype. The rows are so small that bfloat16's own would make them a tenth as large."""
    x, (w, _) = (rows(4, 33, at=where) * 1e-2).to(dtype), weights(33, dtype, at=where)
    torch.testing.assert_close(course_ops.rms_norm(x, w), F.rms_norm(x, (33,), w))


def test_unused_results_of_add_norm(where):
    """The sum after the last norm is read by nothing, and a norm may be, too."""
    args = [rows(3, 21, at=where).requires_grad_(), rows(3, 21, at=where, shift=1).requires_grad_()]
    args += [w.requires_grad_() for w in weights(21, at=where)]
    for used in range(2):
        found, expected = (
            torch.autograd.grad(f(*args)[used].square().sum(), args[:2]) for f in (course_ops.add_norm, add_norm)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ignore_index", [-100, 0, 3, 1000])
def test_rows_of_the_ignored_class_do_not_count(where, ignore_index):
    for shape in ((7, 11), (3, 1100)):  # the tile of rows hangs over; a row a program
        logits, targets = rows(*shape, at=where), torch.arange(shape[0], device=where) % 11
        no_worse(
            lambda x, t=targets: course_ops.cross_entropy(x, t, ignore_index=ignore_index),
            lambda x, t=targets: F.cross_entropy(x, t, ignore_index=ignore_index),
            logits,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logit", [1e3, 1e8, 3e15, -1e30])
def test_equal_logits_have_equal_gradients_however_large_they_are(where, logit, dtype):
    for V in (5, 1153):
        logits = torch.full((2, V), logit, dtype=dtype, device=where, requires_grad=True)
        targets = torch.tensor([0, V - 1], device=where)
        (found,) = torch.autograd.grad(course_ops.cross_entropy(logits, targets), logits)
        (expected,) = torch.autograd.grad(F.cross_entropy(logits, targets), logits)
        torch.testing.assert_close(found, expected, rtol=2e-6 if dtype == torch.float32 else 0.01, atol=0)


def test_a_target_that_is_no_class(where):
    for target in (-1, 11, -101, 2**40):
        logits = rows(2, 11, at=where).requires_grad_()
        loss = course_ops.cross_entropy(logits, torch.tensor([3, target], device=where), reduction="none")
        assert loss.isnan().tolist() == [False, True]
        (dlogits,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))
        assert dlogits.isnan().any(1).tolist() == [False, True]
    assert course_ops.cross_entropy(rows(2, 5, at=where), torch.full((2,), -100, device=where)).isnan()


def test_gradient_of_logits_lies_as_the_logits(where):
    """Rows start as those of the logits do within 16 bytes, and rows that share memory get gradients of their own."""
    targets = torch.arange(5, device=where)
    wide = rows(5, 24, at=where)[:, :17].requires_grad_()
    (found,) = torch.autograd.grad(course_ops.cross_entropy(wide, targets), wide)
    torch.testing.assert_close(found, torch.autograd.grad(F.cross_entropy(wide, targets), wide)[0])
    saved = torch.rand(5, device=where), wide.detach(), targets, torch.rand(5, 2, device=where), -100
    assert torch.ops.course_ops.cross_entropy_backward(*saved).stride() == (20, 1)  # 17 and 3 more, as 24 is 17 and 7
    shared = rows(1, 17, at=where).expand(5, 17).detach().requires_grad_()
    (found,) = torch.autograd.grad(course_ops.cross_entropy(shared, targets), shared)
    (expected,) = torch.autograd.grad(F.cross_entropy(shared, targets), shared)
    torch.testing.assert_close(found, expected)
    odd = rows(5 * 17 + 1, at=where)[1:].view(5, 17).requires_grad_()  # no row at a multiple of 16 bytes
    (found,) = torch.autograd.grad(course_ops.cross_entropy(odd, targets), odd)
    torch.testing.assert_close(found, torch.autograd.grad(F.cross_entropy(odd, targets), odd)[0])


# ---- Dropout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2**40 + 5])
def test_dropout_is_the_same_everywhere(by_kernels, seed):
    """A kernel's mask is the one that PyTorch computes, in every dtype, and the gradient's mask is the result's."""
    for n in (1, 4099):
        keep = import_module("course_ops.dropout").keep_mask(n, 0.3, seed, CPU)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.ones(n, dtype=dtype, device=by_kernels, requires_grad=True)
            y = course_ops.dropout(x, 0.3, seed=seed)
            assert torch.equal(y.cpu() != 0, keep)
            y.sum().backward()
            assert torch.equal(x.grad, y)
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / 0.7))


def test_dropout_by_pytorch_is_philox(where):
    """Published answers of Philox4x32-10 (Random123, kat_vectors), and the mask that they make."""
    philox = import_module("course_ops.dropout")._philox
    low = 0xFFFFFFFF
    for counter, key, answer in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((low, low, low, low), (low, low), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ):
        assert tuple(int(w) for w in philox(tuple(torch.tensor(c) for c in counter), key)) == answer
    kept = course_ops.dropout(torch.ones(4, device=where), 0.6, seed=0) != 0
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert kept.tolist() == [w >= round(0.6 * 2**32) for w in words]


def test_dropout_statistics(where):
    n, p = 2**14, 0.3
    kept = [course_ops.dropout(torch.ones(n, device=where), p, seed=s) != 0 for s in (1, 1, 2)]
    assert torch.equal(kept[0], kept[1])
    assert abs(int(kept[0].sum()) - n * (1 - p)) < 5 * math.sqrt(n * p * (1 - p))
    same = p * p + (1 - p) ** 2
    for other in (kept[2], kept[0].roll(1), kept[0].roll(4)):
        assert abs(int((kept[0] == other).sum()) - n * same) < 5 * math.sqrt(n * same * (1 - same))


def test_dropout_extremes(where):
    x = torch.tensor([1.5, -math.inf, math.nan, 3.0], device=where)
    assert course_ops.dropout(x, 0.0, seed=3) is x
    assert course_ops.dropout(x, 0.5, training=False) is x
    with pytest.raises(TypeError, match=r"x is torch\.int64"):  # in training or not
        course_ops.dropout(torch.arange(3, device=where), 0.5, training=False)
    assert torch.equal(course_ops.dropout(x, 1.0, seed=3), torch.zeros_like(x))
    hair = 1 - 2.0**-40  # its threshold must not wrap to 0
    assert torch.equal(course_ops.dropout(torch.ones(64, device=where), hair, seed=3), torch.zeros(64, device=where))
    dropped = course_ops.dropout(torch.full((64,), math.inf, device=where), 0.5, seed=3)
    assert set(dropped.tolist()) == {0.0, math.inf}


def test_dropout_draws_seeds_from_pytorch(where):
    x = torch.ones(256, device=where)
    torch.manual_seed(5)
    first, second = (course_ops.dropout(x, 0.5) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(course_ops.dropout(x, 0.5), first)
    assert not torch.equal(first, second)
    with torch.device("meta"):  # the default device of new tensors
        assert torch.equal(course_ops.dropout(x, 0.5, seed=3), course_ops.dropout(x, 0.5, seed=3))
        course_ops.dropout(x, 0.5)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: course_ops.dropout(x, 0.5), fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(x), compiled(x))  # not one seed, kept in the graph


# ---- As PyTorch sees them -------------------------------------------------------------------------------------------


def calls(at):
    """Each operator with small arguments: no tile is full."""
    x, (w, b) = rows(2, 3, 37, at=at), weights(37, at=at)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    logits, targets = rows(5, 131, at=at).requires_grad_(), torch.tensor([0, 130, -100, 7, 7], device=at)
    ops = torch.ops.course_ops
    saved = (x.detach(), w.detach(), *(torch.rand(6, device=at) for _ in range(2)))
    return {
        "softmax": (ops.softmax, (x,), course_ops.softmax, (x,)),
        "layer_norm": (ops.layer_norm, (*leaves, 1e-5), course_ops.layer_norm, leaves),
        "layer_norm without bias": (ops.layer_norm, (x, w, None, 1e-5), course_ops.layer_norm, (x, w)),
        "rms_norm": (ops.rms_norm, (x, w, 1e-5), course_ops.rms_norm, (x, w)),
        "gelu": (ops.gelu, (x,), course_ops.gelu, (x,)),
        "dropout": (ops.dropout, (x, 0.3, torch.tensor(7)), lambda x: course_ops.dropout(x, 0.3, seed=7), (x,)),
        "add_norm": (
            ops.add_norm,
            (x, rows(2, 3, 37, at=at).requires_grad_(), w, b, 1e-5),
            course_ops.add_norm,
            (x, x, w, b),
        ),
        "cross_entropy": (ops.cross_entropy, (logits, targets, -100), course_ops.cross_entropy, (logits, targets)),
        "softmax_backward": (ops.softmax_backward, (saved[0], saved[0]), None, ()),
        "layer_norm_backward": (ops.layer_norm_backward, (saved[0], *saved, True), None, ()),
        "rms_norm_backward": (ops.rms_norm_backward, (saved[0], *saved[:3]), None, ()),
        "gelu_backward": (ops.gelu_backward, (saved[0], saved[0]), None, ()),
        "add_norm_backward": (ops.add_norm_backward, (saved[0], saved[0], *saved, False), None, ()),
        "cross_entropy_backward": (
            ops.cross_entropy_backward,
            (torch.rand(5, device=at), logits.detach(), targets, torch.rand(5, 2, device=at), -100),
            None,
            (),
        ),
    }


NAMES = tuple(calls(torch.device("meta")))


@pytest.mark.parametrize("name", NAMES)
def test_schema_fake_and_gradient_agree(where, name):
    op, args, *_ = calls(where)[name]
    assert set(opcheck(op.default, args).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", [name for name in NAMES if "backward" not in name and " " not in name])
def test_a_compiled_graph_has_the_same_gradients(name):
    _, _, function, args = calls(DEVICE)[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found, expected = (
        torch.autograd.grad([o.sum() for o in (out if isinstance(out, tuple) else (out,))], args[0])
        for out in (compiled(*args), function(*args))
    )
    torch.testing.assert_close(found, expected)


def test_meta_tensors():
    """Shapes without data: what torch.device("meta") and fake tensors are for."""
    x = torch.empty(2, 3, 37, dtype=torch.bfloat16, device="meta")
    w = torch.empty(37, dtype=torch.bfloat16, device="meta")
    assert course_ops.softmax(x).shape == course_ops.gelu(x).shape == course_ops.rms_norm(x, w).shape == x.shape
    assert course_ops.layer_norm(x, w, w).dtype == torch.bfloat16
    y, total = course_ops.add_norm(x, x.float(), w)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert course_ops.cross_entropy(x, torch.empty(2, 3, dtype=torch.long, device="meta")).shape == ()


X, W = torch.ones(2, 8), torch.ones(8)
REFUSED = {
    "softmax of integers": (lambda: course_ops.softmax(X.long()), TypeError, "x is torch.int64, this operator takes"),
    "softmax of a scalar": (lambda: course_ops.softmax(X[0, 0]), ValueError, "x is a scalar"),
    "softmax of a list": (lambda: course_ops.softmax([1.0]), TypeError, "x must be a torch.Tensor"),
    "gelu in float64": (lambda: course_ops.gelu(X.double()), TypeError, "x is torch.float64"),
    "weight too short": (
        lambda: course_ops.layer_norm(X, W[:7], W),
        ValueError,
        r"weight has shape \(7,\), expected \(8,",
    ),
    "bias too long": (lambda: course_ops.layer_norm(X, W, torch.ones(9)), ValueError, r"bias has shape \(9,\)"),
    "weight narrower than x": (
        lambda: course_ops.rms_norm(X, W.half()),
        TypeError,
        "weight is torch.float16, expected",
    ),
    "weight elsewhere": (
        lambda: course_ops.rms_norm(X, W.to("meta")),
        ValueError,
        "weight is on meta, but x is on cpu",
    ),
    "residual of another shape": (lambda: course_ops.add_norm(X, X[:1], W, W), ValueError, "residual has shape"),
    "residual narrower than x": (
        lambda: course_ops.add_norm(X, X.half(), W, W),
        TypeError,
        "residual is torch.float16",
    ),
    "p": (lambda: course_ops.dropout(X, 1.5), ValueError, "p is 1.5, expected a probability"),
    "p is NaN": (lambda: course_ops.dropout(X, math.nan), ValueError, "p is nan"),
    "seed": (lambda: course_ops.dropout(X, 0.5, seed=-1), ValueError, "seed is -1, expected an int from 0"),
    "a bool for a seed": (lambda: course_ops.dropout(X, 0.5, seed=True), TypeError, "seed is True, expected an int"),
    "no bool": (lambda: course_ops.dropout(X, 0.5, training=None), TypeError, "training is None, expected True"),
    "a float for a seed": (lambda: course_ops.dropout(X, 0.5, seed=1.0), TypeError, "seed is 1.0, expected an int"),
    "targets of another shape": (
        lambda: course_ops.cross_entropy(X, torch.zeros(3, dtype=torch.long)),
        ValueError,
        r"targets has shape \(3,\), expected logits' \(2, 8\) without the last",
    ),
    "probabilities for targets": (
        lambda: course_ops.cross_entropy(X, X),
        TypeError,
        "targets is torch.float32, expected class indices .* for probabilities call",
    ),
    "classes in the middle": (
        lambda: course_ops.cross_entropy(torch.ones(2, 8, 5), torch.zeros(2, 5, dtype=torch.long)),
        ValueError,
        r"logits\.movedim\(1, -1\) moves them",
    ),
    "no classes": (
        lambda: course_ops.cross_entropy(X[:, :0], torch.zeros(2, dtype=torch.long)),
        ValueError,
        "logits has no classes",
    ),
    "a reduction that is none": (
        lambda: course_ops.cross_entropy(X, torch.zeros(2, dtype=torch.long), reduction="max"),
        ValueError,
        "reduction is 'max', expected one of mean, sum, none",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what):
    call, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        call()


def test_the_same_bits_each_time(by_kernels):
    """Sums over rows are added up in a fixed order."""
    for shape in ((133, 781), (9, 4500)) if device.HAS_GPU else ((9, 30),):
        x, (w, b) = rows(*shape, at=by_kernels), weights(shape[1], at=by_kernels)
        for f, args in (
            (course_ops.layer_norm, (x, w, b)),
            (our_rms_norm, (x, w)),
            (course_ops.add_norm, (x, x, w, b)),
        ):
            for first, second in zip(results(f, args), results(f, args), strict=True):
                assert torch.equal(first, second)


@pytest.mark.night
@pytest.mark.parametrize("target", [80, 90])
def test_kernels_compile(target):
    """For real GPUs too, with and without a bias, in 16 and 32 bits, at lengths for every kernel. They fit there."""
    names, too_large = call_in_compiler("tests.test_course_ops_rows", "compiled_kernels", target)
    assert names == sorted(KERNELS)
    assert not too_large


KERNELS = {
    *("softmax_packed_kernel", "softmax_chunks_kernel", "softmax_split_kernel", "softmax_two_pass_kernel"),
    *("softmax_backward_packed_kernel", "softmax_backward_chunks_kernel"),
    *("softmax_backward_split_kernel", "softmax_backward_two_pass_kernel"),
    *("layer_norm_packed_kernel", "layer_norm_chunks_kernel", "layer_norm_split_kernel", "layer_norm_two_pass_kernel"),
    *("layer_norm_backward_kernel", "norm_backward_walk_kernel", "norm_backward_group_kernel", "sum_partials_kernel"),
    *("rms_norm_packed_kernel", "rms_norm_chunks_kernel", "rms_norm_split_kernel", "rstd_kernel", "scale_kernel"),
    "rms_norm_backward_persistent_kernel",
    *("softmax_shifted_kernel", "softmax_backward_shifted_kernel", "layer_norm_shifted_kernel"),
    *("rms_norm_shifted_kernel", "norm_backward_shifted_walk_kernel", "norm_backward_shifted_group_kernel"),
    "sum_shifted_kernel",
    *("add_norm_kernel", "add_norm_backward_kernel", "gelu_kernel", "gelu_backward_kernel", "dropout_kernel"),
    *("cross_entropy_packed_kernel", "cross_entropy_chunks_kernel", "cross_entropy_registers_kernel", "merge_kernel"),
    "cross_entropy_backward_kernel",
}


def compiled_kernels(target):
    """In a process that only compiles: the names of the kernels that every choice of every list launches.

    And which of them, at what length, take more shared memory or registers than the target has: these are refused only
    where they are launched.
    """
    names, too_large, card = set(), [], chips.of(target)
    for dtype in (torch.float32, torch.bfloat16):
        # Among them the longest rows that a program holds, that programs share, and that they walk over.
        for n in (7, 2048, 3000, 5001, 6000, 8192, 12001, 16384, 40000, 800_000, 1_000_003, 20_000_000):
            x, w = torch.empty(100, n, dtype=dtype, device="meta"), torch.empty(n, dtype=dtype, device="meta")
            m, targets = x[:, 0].float().contiguous(), torch.empty(100, dtype=torch.long, device="meta")
            for bias in (w, None):
                chosen = {
                    "softmax": ((x,), (x, x)),
                    "layer_norm": ((x, w, bias, 1e-5), (x, x, w, m, m, bias is not None)),
                    "rms_norm": ((x, w, 1e-5), (x, x, w, m)),
                    "add_norm": ((x, x.float(), w, bias, 1e-5), (x, x.float(), x.float(), w, m, m, bias is not None)),
                    "cross_entropy": ((x, targets, -100), ()),
                }
                for op, arguments in chosen.items():
                    for direction, args in zip(("FORWARD", "BACKWARD"), arguments, strict=True):
                        if args:
                            choices = getattr(import_module(f"course_ops.{op}"), direction)
                            with compiled.compiling(target) as made:
                                choose(choices, Rows.of(x))(*args)
                            names |= set(made)
                            for kernel in (compiled.inspect(op, each, target) for each in made.values()):
                                held = kernel.registers * 32 * kernel.warps
                                if kernel.shared > card.shared_block or held > 65536:
                                    what = f"{kernel.kernel}: {kernel.shared} bytes, {held} registers"
                                    too_large.append(f"{op}, N={n}, {dtype}, {what}")
        kernels = {op: import_module(f"course_ops.kernels.{op}") for op in ("gelu", "dropout", "cross_entropy")}
        with compiled.compiling(target) as made:
            kernels["gelu"].gelu_backward(x, kernels["gelu"].gelu(x))
            kernels["dropout"].dropout(x, 0.5, 7)
            kernels["cross_entropy"].cross_entropy_split(x[:4], targets[:4], -100)
            kernels["cross_entropy"].cross_entropy_registers(x[:4, :1152], targets[:4], -100)
            kernels["cross_entropy"].cross_entropy_backward(m, x, targets, m, -100, x)
        names |= set(made)
    return sorted(names), too_large


def test_the_mean_of_equal_values_is_that_value():
    """The interpreter divides as a CPU does, so this looks into the compiled kernels: each mean is rounded once."""
    exact = call_in_compiler("tests.test_course_ops_rows", "exact_means", 90)
    means = {"layer_norm_split": 2, "layer_norm_shifted": 2}  # of a part, and of the row
    assert len(exact) == 6
    assert exact == {name: means.get(name, 1) for name in exact}


def exact_means(target):
    """In a process that only compiles: of each kernel that centres a row, how many quotients are rounded once.

    An exact division, or 1 divided by a count, which mean_of goes on from.
    """
    layer_norms, add_norms = (import_module(f"course_ops.kernels.{op}") for op in ("layer_norm", "add_norm"))
    found = {}
    with compiled.compiling(target) as made:
        for launch, n in (
            (layer_norms.layer_norm_tile, 9),
            (layer_norms.layer_norm_packed, 4096),
            (layer_norms.layer_norm_chunks, 3000),
            (layer_norms.layer_norm_split, 40000),
            (layer_norms.layer_norm_shifted, 9001),
            (add_norms.add_norm_packed, 4096),
        ):
            x, w = (torch.empty(*shape, n, dtype=torch.bfloat16, device="meta") for shape in ((100,), ()))
            made.clear()
            launch(x, *(x,) * (launch is add_norms.add_norm_packed), w, w, 1e-12)
            (kernel,) = made.values()
            ptx = kernel.asm["ptx"]
            ones = re.findall(r"mov\.b32\s+(%\w+), 0f3F800000;", ptx)
            inverses = sum(len(re.findall(rf"div\.full\.f32\s+%\w+, {one},", ptx)) for one in ones)
            found[launch.__name__] = inverses + ptx.count("div.rn.f32")
    return found


@triton.jit
def means_kernel(totals_ptr, means_ptr, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(means_ptr + at, mean_of(tl.load(totals_ptr + at), count))


@pytest.mark.parametrize("count", [1, 2, 3, 9, 768, 896, 4095, 50257, 131072, 199999])
def test_a_mean_is_rounded_once(count, by_kernels, monkeypatch):
    """As a CPU divides. Interpreted, with the steps of the compiled kernels and a multiply-add that rounds once."""
    monkeypatch.setattr(_rows, "_INTERPRETED", tl.constexpr(False))
    monkeypatch.setattr(InterpreterBuilder, "create_fma", fused)
    totals = rows(4, 1024, at=by_kernels).flatten() * count
    totals[:5] = torch.tensor([0.0, 100.0 * count, -torch.finfo(torch.float32).max, 2.0**-100, torch.nan])
    means = torch.empty_like(totals)
    means_kernel[(1,)](totals, means, count, len(totals))
    expected = (totals.cpu() / count).to(by_kernels)  # PyTorch on a GPU multiplies by the reciprocal of a number
    assert torch.equal(means.view(torch.int32)[:4], expected.view(torch.int32)[:4])
    assert means[4].isnan()
    assert torch.equal(means.view(torch.int32)[5:], expected.view(torch.int32)[5:])


def fused(self, x, y, z):
    """x y is exact in 64 bits. So is its sum with z for Newton's remainder and for the quotient's."""
    wide = x.data.astype("float64") * y.data.astype("float64") + z.data.astype("float64")
    return TensorHandle(wide.astype("float32"), z.dtype.scalar)


def test_weights_beside_rows_of_an_odd_length_take_16_bytes_a_load():
    """But for the elements on either side of a row's whole chunks: one load of w, and one of b."""
    for name, (wide, others) in call_in_compiler("tests.test_course_ops_rows", "loads_of_weights", 90).items():
        tensors = 1 if "rms" in name else 2
        chunks = 4 if "bfloat16" in name else 8  # each thread has four chunks of x, beside as many bytes or twice
        assert (wide, others) == (2 * chunks * tensors, tensors), name


def loads_of_weights(target):
    """In a process that only compiles: the loads of 16 bytes, and the other ones, of w beside odd rows."""
    norms, found = import_module("course_ops.kernels.layer_norm"), {}
    rms, add = import_module("course_ops.kernels.rms_norm"), import_module("course_ops.kernels.add_norm")
    with compiled.compiling(target) as made:
        for dtype in (torch.bfloat16, torch.float32):
            x, w = (torch.empty(*s, 9001, dtype=d, device="meta") for s, d in (((100,), torch.bfloat16), ((), dtype)))
            for launch, args in (
                (norms.layer_norm_shifted, (x, w, w, 1e-5)),
                (rms.rms_norm_shifted, (x, w, 1e-5)),
                (add.add_norm_shifted, (x, x.to(dtype), w, w, 1e-5)),
            ):
                made.clear()
                launch(*args)
                (kernel,) = made.values()
                loads = re.findall(r"ld\.global\S*evict_last\S*", kernel.asm["ptx"])
                wide = sum(".v4.b32" in load for load in loads)
                found[f"{launch.__name__}, {dtype}"] = wide, len(loads) - wide
    return found


def test_rows_that_start_at_multiples_of_4_bytes_are_stored_as_they_are_loaded():
    """Each thread stores the columns that it has loaded, so that no row passes through shared memory in between."""
    assert not call_in_compiler("tests.test_course_ops_rows", "rows_moved_between_threads", 90)


def rows_moved_between_threads(target):
    """In a process that only compiles: which norms change the layout of a 16-bit tensor."""
    x, w, m = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((100, 2730), (2730,), (100,)))
    m, found = m.float(), []
    norms = {op: import_module(f"course_ops.kernels.{op}") for op in ("layer_norm", "rms_norm")}
    with compiled.compiling(target) as made:
        for launch, args in (
            (norms["layer_norm"].layer_norm_chunks, (x, w, w, 1e-5)),
            (norms["layer_norm"].layer_norm_backward_walk, (x, x, w, m, m, True)),
            (norms["layer_norm"].layer_norm_backward_group, (x, x, w, m, m, True)),
            (norms["rms_norm"].rms_norm_chunks, (x, w, 1e-5)),
            (norms["rms_norm"].rms_norm_backward_walk, (x, x, w, m)),
        ):
            made.clear()
            launch(*args)
            moves = [re.findall(r"convert_layout .*tensor<\d+xbf16,", each.asm["ttgir"]) for each in made.values()]
            found += [launch.__name__] * any(moves)
    return found


@pytest.mark.parametrize(
    ("lengths", "told"),
    [((3008, 3008), 1), ((3000, 3000), 8), ((3000, 3008), 8), ((3008, 3012), 4), ((3002, 3000), 2), ((3001, 3008), 1)],
    ids=str,
)
def test_the_compiler_is_told_what_divides_all_lengths_of_a_row(lengths, told):
    """Nothing if it is 16, which Triton tells it anyway: those kernels stay as they are."""
    assert common_multiple_of(*lengths) == told
    assert all(length % told == 0 for length in lengths)
