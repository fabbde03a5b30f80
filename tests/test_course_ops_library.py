"""What a user expects of every operator of course_ops, whichever it is: devices, autocast, second derivatives, dynamic
shapes, deterministic algorithms and CUDA graphs."""

import inspect
import re
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

from lessonkit import device
from lessonkit.base.files import ROOT

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from triton.runtime import interpreter

import course_ops
from course_ops import _common, testing
from course_ops.kernels import attention_backward_hopper

pytestmark = pytest.mark.kept

GPU = device.HAS_GPU
DEVICE = device.DEVICE
FP8 = torch.float8_e4m3fn
needs_gpu = pytest.mark.skipif(not GPU, reason="no GPU")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
needs_interpreter = pytest.mark.skipif(GPU, reason="asks the interpreter, and kernels run on the GPU here")


# ---- One call of each operator ------------------------------------------------------------------------------------


def leaf(*shape, at=DEVICE, dtype=torch.float32):
    return torch.randn(shape, device=at).to(dtype).requires_grad_(dtype != FP8)


def _norm(k, at, dtype):
    N = 41 + k
    return {"x": leaf(2, 5 + 3 * k, N, at=at, dtype=dtype), "weight": leaf(N, at=at), "bias": leaf(N, at=at)}


def _add_norm(k, at, dtype):
    tensors = _norm(k, at, dtype)
    return {"x": tensors["x"], "residual": leaf(2, 5 + 3 * k, 41 + k, at=at), "weight": tensors["weight"]}


def _rms_norm(k, at, dtype):
    tensors = _norm(k, at, dtype)
    return {"x": tensors["x"], "weight": tensors["weight"]}


def _classes(k, at, dtype):
    M = 5 + 3 * k
    return {"logits": leaf(M, 33 + k, at=at, dtype=dtype), "targets": torch.arange(M, device=at) % 5}


def _last_layer(k, at, dtype):
    M, K = 6 + 3 * k, 17 + k
    targets = torch.arange(M, device=at) % 5
    return {"x": leaf(M, K, at=at, dtype=dtype), "weight": leaf(33 + k, K, at=at), "targets": targets}


def _heads(k, at, dtype):
    B, S, D = 3 + k, 70 + 5 * k, 16 + 8 * k
    q = leaf(B, 4, S, D, at=at, dtype=dtype)
    return {"q": q} | {name: leaf(B, 2, S + 7, D, at=at, dtype=dtype) for name in ("k", "v")}


def _heads_backward(k, at, dtype):
    heads = {name: t.detach() for name, t in _heads(k, at, dtype).items()}
    return {"dout": torch.randn_like(heads["q"]), **heads} | {
        "out": torch.randn_like(heads["q"]),
        "lse": torch.rand(heads["q"].shape[:-1], device=at) + 8,
    }


def _pages(k, at, dtype):
    B, blocks = 3 + k, 7 + k
    D = 24 + 8 * k
    q = torch.randn(B, 2, 4, D, device=at).to(dtype)
    caches = {name: torch.randn(B * blocks, 16, 2, D, device=at).to(dtype) for name in ("k_cache", "v_cache")}
    table = torch.arange(B * blocks, device=at).flip(0).view(B, blocks).to(torch.int32)
    lengths = torch.arange(B, device=at, dtype=torch.int32) * 16 + 5
    return {"q": q, **caches, "cache_seqlens": lengths, "block_table": table}


def _packed(k, at, dtype):
    lengths = [3 + k, 40 + 5 * k, 0, 70 + k]
    cu = torch.tensor([0, *lengths]).cumsum(0).to(at, torch.int32)
    D, heads = 16 + 8 * k, {"q": 4, "k": 2, "v": 2}
    tensors = {name: leaf(sum(lengths), H, D, at=at, dtype=dtype) for name, H in heads.items()}
    return tensors | {"cu_seqlens_q": cu, "cu_seqlens_k": cu.clone()}


def _matmul(k, at, dtype):
    return {"a": leaf(2, 9 + k, 24 + 8 * k, at=at, dtype=dtype), "b": leaf(24 + 8 * k, 40 + k, at=at, dtype=dtype)}


def _linear(k, at, dtype):
    M, N, K = 9 + k, 40 + 8 * k, 24 + 8 * k
    shapes = {"x": (2, M, K), "weight": (N, K), "bias": (N,), "residual": (2, M, N)}
    return {name: leaf(*shape, at=at, dtype=dtype) for name, shape in shapes.items()}


def _groups(k, at, dtype):
    x, w = leaf(12 + k, 24 + 8 * k, at=at, dtype=dtype), leaf(3, 24 + 8 * k, 40 + 8 * k, at=at, dtype=dtype).detach()
    return {"x": x, "w": w, "offsets": torch.tensor([0, 2, 7, 11], dtype=torch.int32, device=at)}


def _fp8(k, at, dtype):
    M, N, K = 9 + k, 40 + k, 144 + 16 * k
    return {
        "a": leaf(M, K, at=at, dtype=FP8),
        "a_scale": torch.rand(M, 1, device=at),
        "b": leaf(N, K, at=at, dtype=FP8).t(),
        "b_scale": torch.rand(1, N, device=at),
    }


def _one(k, at, dtype):
    return {"x": leaf(9 + 3 * k, 41 + k, at=at, dtype=dtype)}


def _vector(k, at, dtype):
    return {"x": leaf(4000 + k, at=at, dtype=dtype)}


def _no_gradient(k, at, dtype):
    return {"x": leaf(9 + 3 * k, 141 + k, at=at, dtype=dtype).detach()}


# Name: the call, its tensors (of the k-th size, on a device, in a dtype).
CALLS = {
    "softmax": (course_ops.softmax, _one),
    "gelu": (course_ops.gelu, _one),
    "dropout": (lambda x: course_ops.dropout(x, 0.5, seed=7), _one),
    "scan": (course_ops.scan, _vector),
    "layer_norm": (course_ops.layer_norm, _norm),
    "rms_norm": (course_ops.rms_norm, _rms_norm),
    "add_norm": (lambda **t: course_ops.add_norm(**t)[0], _add_norm),
    "cross_entropy": (course_ops.cross_entropy, _classes),
    "linear_cross_entropy": (course_ops.linear_cross_entropy, _last_layer),
    "attention": (lambda **t: course_ops.attention(**t, causal=True), _heads),
    "attention_forward": (lambda **t: course_ops.attention_forward(**t, causal=True)[0], _heads),
    "attention_backward": (lambda **t: course_ops.attention_backward(**t, causal=True)[0], _heads_backward),
    "attention_paged": (course_ops.attention_paged, _pages),
    "attention_varlen": (
        lambda **t: course_ops.attention_varlen(**t, max_seqlen_q=99, max_seqlen_k=99, causal=True),
        _packed,
    ),
    "matmul": (course_ops.matmul, _matmul),
    "linear": (lambda **t: course_ops.linear(**t, activation="gelu_tanh"), _linear),
    "grouped_matmul": (course_ops.grouped_matmul, _groups),
    "matmul_fp8": (course_ops.matmul_fp8, _fp8),
    "quantize": (lambda x: course_ops.quantize(x, "blocks")[1], _no_gradient),
}
each = pytest.mark.parametrize("name", CALLS)
WITHOUT_GRADIENT = ("attention_backward", "attention_paged", "matmul_fp8", "quantize")
differentiable = [name for name in CALLS if name not in WITHOUT_GRADIENT]
# Where the second derivative is right, since the first is made of operators that have one.
ANY_ORDER = {"matmul", "scan", "dropout", "grouped_matmul"}


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


def made(name, k=0, at=DEVICE, dtype=torch.float32):
    if name in ("matmul_fp8", "quantize") and at.type == "cuda" and device.capability() < 89:
        pytest.skip("a GPU without fp8")
    return CALLS[name][1](k, at, dtype)


def results(name, tensors):
    """The result and, where there is one, the gradient of each tensor."""
    out = CALLS[name][0](**tensors)
    wanted = [t for t in tensors.values() if t.requires_grad]
    return [out, *(torch.autograd.grad(out.sum(), wanted) if out.requires_grad else ())]


def close(found, expected):
    """Up to the roundings of bf16 and another order of additions, of the largest value."""
    found, expected = found.detach().float(), expected.detach().float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * float(expected.abs().max()))


def test_every_operator_is_asked():
    others = {"Unsupported", "patch"}
    assert set(CALLS) == set(course_ops.__all__) - others - {"__version__"}


# ---- Devices ------------------------------------------------------------------------------------------------------


@contextmanager
def launches(monkeypatch):
    """Inside, operators launch their kernels and no program of them runs. Yields the devices that were current then."""
    entered, seen = [], []

    @contextmanager
    def on_device(x):
        entered.append(x.device)
        yield
        entered.pop()

    for path in Path(course_ops.__file__).parent.glob("*.py"):
        module = import_module(f"course_ops.{path.stem}")
        if hasattr(module, "on_device"):
            monkeypatch.setattr(module, "on_device", on_device)
    monkeypatch.setattr(
        interpreter.GridExecutor, "__call__", lambda self, *args, **kwargs: seen.append(entered and entered[-1])
    )
    with testing.interpreted():
        yield seen


@needs_interpreter
@each
def test_every_launch_is_on_the_device_of_its_tensors(monkeypatch, name):
    tensors = made(name)
    with launches(monkeypatch) as seen:
        results(name, tensors)
    assert seen
    assert all(at == torch.device("cpu") for at in seen), "a launch outside on_device goes to the current GPU"


def test_the_guard_makes_the_tensors_gpu_the_current_one(monkeypatch):
    """Tensors of two GPUs, and no GPU; the first is the current one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    first, second = (SimpleNamespace(is_cuda=True, device=torch.device("cuda", i)) for i in (0, 1))
    guard = _common.on_device(second)
    assert isinstance(guard, torch.cuda.device)
    assert guard.idx == 1
    assert not isinstance(_common.on_device(first), torch.cuda.device)


@needs_two
@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_the_second_gpu_are_computed_there(name, dtype):
    """And as on the first, while the first is the current one."""
    first = made(name, at=torch.device("cuda", 0), dtype=dtype)
    second = {n: t.detach().to("cuda:1").requires_grad_(t.requires_grad) for n, t in first.items()}
    with torch.cuda.device(0):
        expected, found = results(name, first), results(name, second)
    torch.cuda.synchronize(1)
    for f, e in zip(found, expected, strict=True):
        assert f.device == torch.device("cuda", 1)
        close(f.cpu(), e.cpu())
    assert torch.cuda.current_device() == 0


def tensor_arguments():
    return [
        (name, argument)
        for name in CALLS
        for argument in list(CALLS[name][1](0, torch.device("meta"), torch.float32))[1:]
    ]


@pytest.mark.parametrize(("name", "argument"), tensor_arguments())
def test_tensors_of_two_devices_are_an_error_that_names_both(name, argument):
    tensors = made(name, at=torch.device("cpu"))
    elsewhere = torch.device("cuda", 0) if GPU else torch.device("meta")
    tensors[argument] = tensors[argument].detach().to(elsewhere)
    with pytest.raises(ValueError, match=rf"\b{argument} is on {elsewhere}\b.*: move one of them") as error:
        CALLS[name][0](**tensors)
    assert "on cpu" in str(error.value)


@pytest.mark.parametrize(
    "words",
    ["move one of them", "must be a torch.Tensor", "as x, or torch.float32", 'matmul.fp32_precision == "tf32"'],
)
def test_what_operators_say_alike_is_written_once(words):
    package = ROOT / "course_ops"
    assert sum(path.read_text().count(words) for path in package.rglob("*.py")) == 1


# ---- Autocast -----------------------------------------------------------------------------------------------------

CAST = {
    "attention", "attention_forward", "attention_backward", "attention_varlen", "matmul", "linear", "grouped_matmul"
}  # fmt: skip


def cast(t, dtype):
    return t.detach().to(dtype).requires_grad_(t.requires_grad)


@pytest.fixture(params=["pytorch", "kernels"])
def where(request):
    """Where an operator computes: PyTorch on the CPU, or by its kernels."""
    if request.param == "pytorch":
        yield torch.device("cpu")
    else:
        with testing.kernels():
            yield DEVICE


@pytest.mark.parametrize("name", sorted(CAST))
def test_matmuls_are_in_autocasts_dtype_whatever_their_tensors_are(where, name):
    """float32 weights beside 16-bit activations, too; the gradients have the tensors' own dtypes."""
    tensors = made(name, at=where)
    first, *others = (n for n in tensors if n not in ("lse", "offsets", "cu_seqlens_q", "cu_seqlens_k"))
    mixed = tensors | {first: cast(tensors[first], torch.float16)}
    rounded = tensors | {n: cast(tensors[n], torch.bfloat16) for n in (first, *others)}
    expected = results(name, rounded)
    for given in (tensors, mixed):
        with torch.autocast(where.type, torch.bfloat16):
            out = CALLS[name][0](**given)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, expected[0], rtol=0.05, atol=0.05)
        wanted = [t for t in given.values() if t.requires_grad]
        for t, g, e in zip(wanted, torch.autograd.grad(out.sum(), wanted) if wanted else (), expected[1:], strict=True):
            assert g.dtype == t.dtype
            torch.testing.assert_close(g.float(), e.float(), rtol=0.1, atol=0.1)


def test_the_last_layer_under_autocast_multiplies_in_its_dtype_and_keeps_fp32_weights(where):
    tensors = made("linear_cross_entropy", at=where)
    rounded = tensors | {"x": cast(tensors["x"], torch.bfloat16)}
    expected = results("linear_cross_entropy", rounded)
    with torch.autocast(where.type, torch.bfloat16):
        found = results("linear_cross_entropy", tensors)
    assert [t.dtype for t in found] == [torch.float32] * 3
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["softmax", "gelu", "dropout", "scan", "layer_norm", "rms_norm", "add_norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_operators_do_under_autocast_what_they_do_without(where, name, dtype):
    tensors = made(name, at=where, dtype=dtype)
    expected = CALLS[name][0](**tensors)
    with torch.autocast(where.type, torch.bfloat16):
        found = CALLS[name][0](**tensors)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)


def test_fp8_under_autocast_is_multiplied_as_without():
    tensors = made("matmul_fp8", at=torch.device("cpu"))
    expected = course_ops.matmul_fp8(**tensors)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(course_ops.matmul_fp8(**tensors), expected)


def test_float64_stays_under_autocast():
    q = torch.randn(1, 1, 4, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert course_ops.attention(q, q, q).dtype == torch.float64


def test_tensors_of_two_dtypes_without_autocast_are_an_error_still():
    a, b = torch.randn(3, 4), torch.randn(4, 5).bfloat16()
    with pytest.raises(TypeError, match=r"b is torch\.bfloat16, but a is torch\.float32"):
        course_ops.matmul(a, b)


@pytest.mark.parametrize("name", sorted(CAST))
def test_autocast_inside_a_compiled_function(name):
    tensors = made(name, at=torch.device("cpu"))

    def step(tensors):
        with torch.autocast("cpu", torch.bfloat16):
            return CALLS[name][0](**tensors)

    torch._dynamo.reset()
    out = torch.compile(step, backend="aot_eager", fullgraph=True)(tensors)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, step(tensors))


# ---- Second derivatives -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in differentiable if name not in ANY_ORDER])
def test_a_second_derivative_is_an_error_with_advice(name):
    tensors = made(name, at=torch.device("cpu"))
    wanted = next(t for t in tensors.values() if t.requires_grad)
    (first,) = torch.autograd.grad(CALLS[name][0](**tensors).square().sum(), wanted, create_graph=True)
    called = name.removesuffix("_forward")
    with pytest.raises(RuntimeError, match=rf"course_ops\.{called}.* has no second derivative: .* call .* instead"):
        torch.autograd.grad(first.sum(), wanted)


def test_a_second_derivative_of_a_loss_that_is_linear_in_it_is_an_error_with_advice():
    """The gradients are made in the forward: to autograd they are constants."""
    tensors = made("linear_cross_entropy", at=torch.device("cpu"))
    course_ops.linear_cross_entropy(**tensors).backward(create_graph=True)
    with pytest.raises(RuntimeError, match=r"course_ops\.linear_cross_entropy has no second derivative"):
        tensors["x"].grad.sum().backward()


@pytest.mark.parametrize("first", ["x", "weight"])
@pytest.mark.parametrize("second", ["x", "weight"])
def test_a_second_derivative_that_may_be_unused_is_an_error_too(first, second):
    tensors = made("linear_cross_entropy", at=torch.device("cpu"))
    loss = course_ops.linear_cross_entropy(**tensors)
    (gradient,) = torch.autograd.grad(loss, tensors[first], create_graph=True)
    with pytest.raises(RuntimeError, match=r"course_ops\.linear_cross_entropy has no second derivative"):
        torch.autograd.grad(gradient.sum(), tensors[second], allow_unused=True)


def test_a_derivative_of_attention_backward_is_an_error_with_advice():
    tensors = made("attention_backward", at=torch.device("cpu"))
    tensors["q"].requires_grad_()
    dq = course_ops.attention_backward(**tensors)[0]
    with pytest.raises(RuntimeError, match=r"course_ops\.attention has no second derivative"):
        dq.sum().backward()


def test_a_second_derivative_of_a_linear_layer_with_a_bias_is_an_error():
    x, w, b = (t.requires_grad_() for t in (torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)))
    (db,) = torch.autograd.grad(course_ops.linear(x, w, b).square().sum(), b, create_graph=True)
    with pytest.raises(RuntimeError, match=r"course_ops\.linear with a bias or an activation has no second"):
        db.sum().backward()


PLAIN = {
    "matmul": lambda a, b: a @ b,
    "scan": lambda x: x.cumsum(0),
    "linear": lambda x, weight: F.linear(x, weight),
}


@pytest.mark.parametrize("name", PLAIN)
def test_second_derivatives_where_there_are(name):
    tensors = {n: t for n, t in made(name, at=torch.device("cpu")).items() if n not in ("bias", "residual")}
    call = course_ops.linear if name == "linear" else CALLS[name][0]
    second = []
    for function in (call, PLAIN[name]):
        x = next(iter(tensors.values()))
        (first,) = torch.autograd.grad(function(**tensors).pow(3).mean(), x, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), list(tensors.values())))
    for f, e in zip(*second, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-3, atol=1e-3)


def test_a_loss_is_differentiated_once_with_create_graph_as_without():
    tensors = made("linear_cross_entropy", at=torch.device("cpu"))
    loss = course_ops.linear_cross_entropy(**tensors)
    wanted = [tensors["x"], tensors["weight"]]
    once = torch.autograd.grad(loss, wanted, retain_graph=True)
    again = torch.autograd.grad(loss, wanted, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


# ---- Forward-mode derivatives, and tensors of other layouts ---------------------------------------------------------


@pytest.mark.parametrize("name", differentiable)
def test_a_tangent_is_an_error_that_says_so(name):
    tensors = {n: t.detach() for n, t in made(name, at=torch.device("cpu")).items()}
    call, expected = CALLS[name][0], CALLS[name][0](**tensors)
    leaves = [n for n in made(name, at=torch.device("cpu")) if tensors[n].is_floating_point() and n != "w"]
    with forward_ad.dual_level():
        torch.testing.assert_close(call(**tensors), expected)  # no tangent
        for leaf in leaves:
            dual = forward_ad.make_dual(tensors[leaf], torch.ones_like(tensors[leaf]))
            with pytest.raises(RuntimeError, match=rf"^{leaf} has a tangent, and course_ops has no forward-mode"):
                call(**tensors | {leaf: dual})
    first = leaves[0]
    with pytest.raises(RuntimeError, match=f"^{first} has a tangent"):
        torch.func.jvp(lambda t: call(**tensors | {first: t}), (tensors[first],), (tensors[first],))


def test_inside_a_dual_level_a_function_is_compiled_as_one_graph():
    torch._dynamo.reset()
    compiled = torch.compile(course_ops.gelu, backend="eager", fullgraph=True)
    x = torch.randn(5)
    with forward_ad.dual_level():
        torch.testing.assert_close(compiled(x), course_ops.gelu(x))


@each
def test_a_sparse_tensor_is_an_error_that_says_what_to_call(name):
    tensors = made(name, at=torch.device("cpu"))
    first = next(iter(tensors))
    if tensors[first].dtype == FP8:
        pytest.skip("PyTorch makes no sparse fp8")
    with pytest.raises(TypeError, match=rf"^{first} has layout torch.sparse_coo: call {first}.to_dense\(\)"):
        CALLS[name][0](**tensors | {first: tensors[first].detach().to_sparse()})


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_a_nested_tensor_is_an_error(layout):
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(4)], layout=layout)
    for call in (course_ops.gelu, lambda x: course_ops.attention(x, x, x)):
        with pytest.raises(TypeError, match=r"is a nested tensor: pass the tensors of"):
            call(nested)


# ---- Options of a wrong type --------------------------------------------------------------------------------------

NORMS = ("layer_norm", "rms_norm", "add_norm")
ATTENTIONS = ("attention", "attention_forward", "attention_backward", "attention_paged", "attention_varlen")
LOSSES = ("cross_entropy", "linear_cross_entropy")
WRONG = [
    *((name, {"eps": eps}, TypeError) for name in NORMS for eps in ("a", True)),
    *((name, {"eps": eps}, ValueError) for name in NORMS for eps in (-1e-5, float("nan"))),
    *((name, {"eps": None}, TypeError) for name in NORMS if name != "rms_norm"),
    *((name, {"ignore_index": i}, TypeError) for name in LOSSES for i in (None, 0.5)),
    *((name, {"ignore_index": 2**63}, ValueError) for name in LOSSES),
    *(("dropout", {"p": p}, TypeError) for p in ("a", None, torch.tensor(0.5))),
    ("scan", {"reverse": 1}, TypeError),
    *((name, {"causal": c}, TypeError) for name in ATTENTIONS for c in ("yes", None, 1)),
    *((name, {"causal": True, "window": w}, e) for name in ATTENTIONS
      for w, e in ((True, TypeError), (2.0, TypeError), (2**63, ValueError))),
    *((name, {"causal": True, "scale": s}, TypeError) for name in ATTENTIONS for s in ("1", True)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "error"), WRONG, ids=str)
def test_an_option_of_a_wrong_type_is_an_error_with_its_name(name, options, error):
    tensors = {n: t.detach() for n, t in made(name, at=torch.device("cpu")).items()}
    tensors |= {"max_seqlen_q": 99, "max_seqlen_k": 99} if name == "attention_varlen" else {}
    *_, option = options
    with pytest.raises(error, match=rf"^{option} is "):
        getattr(course_ops, name)(**tensors, **options)


def test_a_weight_that_is_not_there_is_an_error_that_says_what_to_pass():
    x = torch.ones(2, 7)
    for call in (course_ops.layer_norm, course_ops.rms_norm, lambda x, w: course_ops.add_norm(x, x, w)):
        with pytest.raises(TypeError, match=r"^weight must be a torch.Tensor, got NoneType: pass torch.ones\(7\)"):
            call(x, None)
    with pytest.raises(TypeError, match=r"^weight must be a torch.Tensor, got NoneType"):
        course_ops.linear(x, None)


def test_options_are_given_by_name():
    """scan(x, -1) would be a sum from the other end, and linear's fourth argument differs from that of its operator."""
    for call, options in ((course_ops.scan, ["reverse"]), (course_ops.linear, ["activation", "residual"])):
        parameters = inspect.signature(call).parameters
        assert [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY] == options


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "attention_paged"])
def test_help_has_the_rules_of_attention(name):
    text = " ".join(inspect.getdoc(getattr(course_ops, name)).split())
    if name == "attention":
        for rule in ("H is a multiple of H_kv", "h * H_kv // H", "sees no key has out = 0 and no gradient", "Sources:"):
            assert rule in text
    else:
        assert "errors and sources as in course_ops.attention" in text


# ---- Dynamic shapes -----------------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_second_shape_compiles_nothing(name, backend):
    """All sizes change at once, forward and backward."""
    torch._dynamo.reset()
    counter, counts = CompileCounterWithBackend(backend), []
    compiled = torch.compile(CALLS[name][0], backend=counter, dynamic=True, fullgraph=True)
    for k in range(4):
        tensors = made(name, k, at=torch.device("cpu"))
        out, expected = compiled(**tensors), CALLS[name][0](**tensors)
        torch.testing.assert_close(out, expected)
        if out.requires_grad:
            out.sum().backward()
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1, counts


# ---- Exported programs, and vmap ----------------------------------------------------------------------------------


class Calls(torch.nn.Module):
    """An operator as a model of its own."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, **tensors):
        return CALLS[self.name][0](**tensors)


@each
def test_an_exported_program_holds_the_operator_and_computes_the_same(name):
    tensors = {n: t.detach() for n, t in made(name, at=torch.device("cpu")).items()}
    program = torch.export.export(Calls(name), (), tensors)
    assert any(str(node.target).startswith("course_ops.") for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(**tensors), CALLS[name][0](**tensors))


@each
def test_vmap_computes_each_of_a_batch(name):
    given = [{n: t.detach() for n, t in made(name, at=torch.device("cpu")).items()} for _ in range(2)]
    first = next(iter(given[0]))
    batch = torch.stack([tensors[first] for tensors in given])
    found = torch.func.vmap(lambda t: CALLS[name][0](**given[0] | {first: t}))(batch)
    for one, expected in zip(found, batch, strict=True):
        torch.testing.assert_close(one, CALLS[name][0](**given[0] | {first: expected}))


# ---- Deterministic algorithms -------------------------------------------------------------------------------------


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_backward_that_adds_in_any_order_is_not_taken_then(monkeypatch):
    monkeypatch.setattr(attention_backward_hopper, "takes", lambda *args: True)
    tensors = made("attention_backward", at=torch.device("cpu"))
    attention = import_module("course_ops.attention")  # the package's name of it is the function
    call = attention.Gradient(*tensors.values(), causal=True, window=None, scale=1.0)
    chosen = []
    for mode in (nullcontext, deterministic):
        with mode():
            chosen.append(next(name for name, takes, _ in attention.BACKWARD if takes(call)))
    assert chosen == ["hopper", "portable"]


@needs_interpreter
def test_the_scan_that_adds_in_any_order_is_not_taken_then(monkeypatch):
    def refused(*args):
        raise AssertionError("not deterministic")

    monkeypatch.setattr(import_module("course_ops.scan"), "scan_look_back", refused)
    with deterministic(), testing.interpreted():
        x = torch.rand(3000)
        torch.testing.assert_close(course_ops.scan(x), x.cumsum(0))


def test_no_other_kernel_adds_floats_in_any_order():
    """Atomic additions of the sources: of counters, which are integers, and of dQ."""
    here = Path(course_ops.__file__).parent
    found = {
        path.name
        for path in here.rglob("*.py")
        if re.search(r"\b(tma_reduce_add|atomic_add|async_atomic_add)\(", path.read_text())
    }
    counters = {"matmul_split_k.py", "hopper.py"}
    assert found == counters | {"attention_backward_hopper.py", "attention_backward_192_hopper.py"}


@needs_gpu
@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_are_the_same_to_the_bit_under_deterministic_algorithms(monkeypatch, name, dtype):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # an old PyTorch's own matmuls ask for it
    tensors = made(name, k=8, dtype=dtype)
    with deterministic():
        first, second = results(name, tensors), results(name, tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- CUDA graphs --------------------------------------------------------------------------------------------------

WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__index__")


@needs_interpreter
@each
def test_no_launcher_reads_a_tensor_on_the_host(monkeypatch, name):
    """It would wait for the GPU, and a CUDA graph cannot be captured then. The seed of dropout is the host's own."""

    def refuse(self, *args, **kwargs):
        raise AssertionError("the host waits for a value")

    tensors = made(name)
    with launches(monkeypatch) as seen:
        for method in WAITS:
            monkeypatch.setattr(torch.Tensor, method, refuse)
        if name != "dropout":
            monkeypatch.setattr(torch.Tensor, "__int__", refuse)
        results(name, tensors)
        monkeypatch.undo()
    assert seen


@needs_gpu
@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cuda_graph_of_forward_and_backward_computes_with_new_values(name, dtype):
    tensors = made(name, k=8, dtype=dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles
            results(name, tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(name, tensors)
    floats = [t for t in tensors.values() if t.dtype in (torch.float32, torch.bfloat16)]
    for _ in range(3):
        with torch.no_grad():
            for t in floats:
                t.copy_(torch.rand_like(t) + 0.5)
        for f in found:
            f.detach().zero_()
        graph.replay()
        for f, e in zip(found, results(name, tensors), strict=True):
            close(f, e)


def test_a_mask_that_a_cuda_graph_would_repeat_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    course_ops.dropout(torch.ones(3, device="cpu"), 0.5)  # no GPU's stream
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x = torch.ones(3, device="cpu")
    with pytest.raises(RuntimeError, match=r"a CUDA graph would repeat one mask: pass seed"):
        course_ops.dropout(x, 0.5)
    assert course_ops.dropout(x, 0.5, training=False) is x
    monkeypatch.setattr(import_module("course_ops.dropout"), "_dropout", lambda x, p, seed: seed)
    assert int(course_ops.dropout(x, 0.5, seed=3)) == 3


@needs_gpu
def test_a_cuda_graph_does_not_capture_a_seed_that_it_draws():
    x = torch.ones(3, device=DEVICE)
    course_ops.dropout(x, 0.5)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="would repeat one mask"), torch.cuda.graph(graph):
        course_ops.dropout(x, 0.5)


# ---- Precision of fp32 matmuls --------------------------------------------------------------------------------------

SETTINGS = {  # attributes of torch and what they are set to, in order -> what PyTorch's matmuls of fp32 are on a GPU
    (): "ieee",
    (("backends.cuda.matmul.fp32_precision", "tf32"),): "tf32",
    (("backends.cuda.matmul.fp32_precision", "ieee"),): "ieee",
    (("backends.fp32_precision", "tf32"),): "tf32",
    (("backends.fp32_precision", "tf32"), ("backends.cuda.matmul.fp32_precision", "ieee")): "ieee",
    (("backends.fp32_precision", "tf32"), ("backends.cuda.matmul.fp32_precision", "none")): "tf32",
    (("set_float32_matmul_precision", "high"),): "tf32",
    (("set_float32_matmul_precision", "medium"),): "tf32",
    (("set_float32_matmul_precision", "high"), ("set_float32_matmul_precision", "highest")): "ieee",
    (("set_float32_matmul_precision", "high"), ("backends.cuda.matmul.fp32_precision", "ieee")): "ieee",
}


@pytest.fixture
def default_precision():
    """PyTorch's settings of fp32 as they are when it is imported, before the test and after it."""

    def reset():
        torch.set_float32_matmul_precision("highest")
        torch.backends.fp32_precision = "none"
        torch.backends.cudnn.fp32_precision = "none"
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.backends.mkldnn.matmul.fp32_precision = "none"

    reset()
    yield
    reset()
    assert torch.get_float32_matmul_precision() == "highest", "PyTorch's own getter works again"


@pytest.mark.usefixtures("default_precision")
@pytest.mark.parametrize(("settings", "expected"), SETTINGS.items(), ids=str)
@pytest.mark.parametrize("asked", ["course_ops._common.fp32_precision", "problems.matmul.precision"])
def test_fp32_matmuls_are_as_precise_as_pytorchs(settings, expected, asked):
    module, name = asked.rsplit(".", 1)
    for path, value in settings:
        *outer, last = path.split(".")
        owner = torch
        for part in outer:
            owner = getattr(owner, part)
        if callable(getattr(owner, last, None)):
            getattr(owner, last)(value)
        else:
            setattr(owner, last, value)
    assert getattr(import_module(module), name)() == expected


@needs_interpreter
@pytest.mark.usefixtures("default_precision")
def test_kernels_run_where_tf32_is_set_by_backend():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    for name in ("matmul", "attention"):
        tensors = made(name)
        with testing.kernels():
            found = results(name, tensors)
        for ours, expected in zip(found, results(name, tensors), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-2)
