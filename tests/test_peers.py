"""Peers that are more than one call of a library: what they compute, and what they say where they cannot run."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from lessonkit import DEVICE, by_search
from lessonkit.base.files import ROOT
from lessonkit.cuda import build, toolchain
from lessonkit.measure import fingerprint

import pytest
import torch

from problems import attention_plain, cub, linear, matmul, quack_search, scan
from problems import sum as sums

CUB = ((sums.PROBLEM, cub.cub_sum), (scan.PROBLEM, cub.cub_scan), (scan.PROBLEM_BACKWARD, cub.cub_scan_reversed))
on_a_gpu = pytest.mark.skipif(DEVICE.type != "cuda" or bool(cub.kernels.lacks()), reason="needs a GPU and nvcc")


@pytest.mark.parametrize(("problem", "peer"), CUB)
def test_cub_is_a_peer_of_sum_and_scan(problem, peer):
    assert problem.peers["CUB"] is peer


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a machine without a GPU")
@pytest.mark.parametrize(("problem", "peer"), CUB)
def test_cub_is_absent_without_a_gpu(problem, peer):
    """An ImportError: then a row says that the peer was not there, and shows no ratio."""
    with pytest.raises(ImportError, match="CUB needs nvcc and a GPU"):
        peer(*problem.inputs(8))


@pytest.mark.parametrize(("problem", "peer"), CUB)
def test_cub_without_nvcc_says_how_to_mend_it(monkeypatch, problem, peer):
    monkeypatch.setattr(cub, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(cub, "_lacks", lambda: "no nvcc: install it")
    with pytest.raises(ImportError, match=r"CUB is C\+\+: no nvcc: install it"):
        peer(*problem.inputs(8))


@pytest.mark.parametrize(("problem", "peer"), CUB)
def test_what_cub_is_called_with(monkeypatch, problem, peer):
    """Scratch of as many bytes as CUB wants for this n, and of one byte where it wants none."""
    launchers = {peer.__name__.removeprefix("cub_"): problem.reference}
    called = []

    class Kernels:
        def __getattr__(self, name):
            if name.endswith("_scratch"):
                return lambda n: n // 8

            def launch(x, y, scratch, size, n):
                called.append((tuple(y.shape), y.dtype, scratch.dtype, scratch.numel() == size, size, n))
                y.copy_(launchers[name](x))

            return launch

    monkeypatch.setattr(cub, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(cub, "kernels", Kernels())
    monkeypatch.setattr(cub, "_lacks", lambda: "")
    cub._scratch.cache_clear()
    for n, size in ((96, 12), (1, 1)):
        (x,) = problem.inputs(n)
        right = problem.reference(x)
        torch.testing.assert_close(peer(x), right)
        assert called.pop() == (tuple(right.shape), torch.float32, torch.uint8, True, size, n)
    cub._scratch.cache_clear()
    with pytest.raises(ValueError, match=r"not for torch\.float16"):
        peer(problem.inputs(8)[0].half())


@on_a_gpu
@pytest.mark.parametrize("n", [0, 1, 1021, 8193, 2**24 + 1])
@pytest.mark.parametrize(("problem", "peer"), CUB)
def test_cub_agrees_with_the_reference(problem, peer, n):
    (x,) = problem.inputs(n)
    right = problem.reference(x.double())
    torch.testing.assert_close(peer(x).double(), right, rtol=1e-5, atol=1e-5 * max(1.0, n**0.5))


def test_cudnn_is_a_peer_of_the_plain_backward(monkeypatch):
    """With the arguments in the order of PyTorch's function, and lse as [B, H, S, 1]."""
    given = attention_plain.inputs_backward(1, 2, 5, 8, causal=True)
    q, k, v, o, lse, dout, _ = given
    asked = []

    def backward(*args, scale):
        asked.append((args, scale))
        return attention_plain.reference_backward(*given)

    name = "_scaled_dot_product_cudnn_attention_backward"
    monkeypatch.setitem(torch.ops.aten.__dict__, name, backward)
    got = attention_plain.PROBLEM_BACKWARD.peers["SDPA cuDNN"](*given)
    ((args, scale),) = asked
    assert [id(t) for t in args[:5]] == [id(t) for t in (dout, q, k, v, o)]
    assert args[5].shape == (1, 2, 5, 1)
    assert args[5].data_ptr() == lse.data_ptr()
    assert (args[11:15], scale) == ((5, 5, 0.0, True), None)
    assert len(got) == 3


def test_the_search_of_torch_compile_times_nothing_but_the_kernels(monkeypatch):
    """No CUDA graph, whose copies of the arguments would count; no choice that was made beside other processes."""
    asked = []

    def compiled(function, **options):
        asked.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    peer = by_search(lambda a, b: a + b)
    assert not asked, "importing a problem compiles nothing"
    assert peer(1, 2) == peer(2, 1) == 3
    ((dynamic, options),) = [(each["dynamic"], each["options"]) for each in asked]
    assert not dynamic
    assert options["max_autotune"]
    assert not options.get("triton.cudagraphs")
    assert not options["autotune_local_cache"]
    assert not options["fx_graph_cache"]
    assert options.keys() <= set(torch._inductor.list_options()), "these names are Inductor's"


def test_the_search_is_a_peer_of_the_lesson_alone():
    """At four shapes; the zoo has more than a search of each leaves time for."""
    lesson = import_module("day3_matmul_tk.lesson04_matmul_epilogue").LESSON
    assert lesson.peers.keys() - linear.PROBLEM.peers.keys() == {"torch.compile max-autotune"}
    assert len(lesson.benches) == 4


@pytest.fixture
def a_quack(monkeypatch):
    """A package with the names that the search takes from quack 0.6.5; the tuner keeps what it was given."""

    class Tuned:
        keys = ("split_k",)

        @staticmethod
        def fn(a, b, c, config):
            c.copy_(a @ b)

    class Tuner:
        def __init__(self, configs, fn, **options):
            self.configs, self.fn, self.options = [each["config"] for each in configs], fn, options

        def __call__(self, a, b, c):
            self.fn(a, b, c, config=self.configs[0])

    of = {
        "autotuner": {"AutotuneConfig": dict, "autotune": lambda configs, **o: lambda fn: Tuner(configs, fn, **o)},
        "gemm_config": {"GemmConfig": dict},
        "gemm_interface": {"gemm_tuned": Tuned, "prune_invalid_gemm_configs": "prune"},
    }
    for name, bound in {"": {}, **of}.items():
        module = ModuleType(f"quack.{name}".rstrip("."))
        vars(module).update(bound)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    quack_search._tuner.cache_clear()
    yield
    quack_search._tuner.cache_clear()


@pytest.mark.usefixtures("a_quack")
def test_quack_searches_six_configurations_and_no_disk():
    tuner = quack_search._tuner()
    assert tuner is quack_search._tuner(), "what it found is kept"
    assert len({tuple(config.items()) for config in tuner.configs}) == 6
    assert {(c["tile_m"] % 64, c["tile_n"] % 16, c["is_dynamic_persistent"]) for c in tuner.configs} == {(0, 0, False)}
    assert not any(c["pingpong"] and c["tile_m"] * c["tile_n"] > 192 * 128 for c in tuner.configs), "no registers left"
    assert tuner.options == {
        "key": ("split_k",),
        "prune_configs_by": {"early_config_prune": "prune"},
        "cache_results": False,
    }


@pytest.mark.usefixtures("a_quack")
@pytest.mark.parametrize("name", [
    "day3_matmul_tk.lesson09_matmul_hopper", "cuda_src.22_hopper_matmul", "cuda_src.23_hopper_matmul_persistent",
])  # fmt: skip
def test_the_searched_quack_is_a_peer_of_hoppers_matmuls(name):
    lesson = import_module(name).LESSON
    peer = lesson.peers["quack, fastest of six"]
    args = lesson.inputs(M=24, N=16, K=8, dtype=torch.float32)
    torch.testing.assert_close(peer(*args), lesson.reference(*args))
    assert fingerprint.packages(ROOT, name, "quack, fastest of six", peer) >= {"quack"}


def test_the_zoos_matmuls_have_quack_as_it_comes():
    assert set(matmul.PROBLEM.peers) == {"torch", "quack"}


@pytest.mark.night
@pytest.mark.skipif(bool(toolchain.lacks("nvcc", "g++", "ninja")), reason="no nvcc")
def test_cub_compiles_for_a_gpu_and_only_forwards():
    """Every launcher that cub.py calls is bound, and no kernel is written here."""
    text = Path(cub.kernels.source).read_text()
    assert "__global__" not in text
    for name in ("sum", "scan", "scan_reversed"):
        assert f'bind(m, "{name}", {name});' in text
        assert f'bind(m, "{name}_scratch", {name}_scratch);' in text
    (cubin,) = build.build([build.cubin(cub.kernels.source, 90)])
    code = cubin.read_bytes()
    assert all(name in code for name in (b"DeviceReduce", b"DeviceScan", b"reverse_iterator"))
