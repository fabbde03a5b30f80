"""course_ops' matmul family against PyTorch: values, gradients, refusals, graphs, and the lessons' machine code."""

import collections
import inspect
import itertools
import math
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

from lessonkit import device
from lessonkit.modes import compiled
from lessonkit.modes.compile_server import call_in_compiler

import pytest
import torch
import torch.nn.functional as F
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import course_ops
from course_ops import _launch, _registration, testing
from course_ops.kernels import (
    _matmul_hopper,
    _matmul_plan,
    matmul_aligned,
    matmul_fp32_hopper,
    matmul_hopper,
    matmul_skinny,
    matmul_split_k,
)
from course_ops.kernels import linear as linear_kernels
from course_ops.kernels import matmul as portable
from course_ops.kernels import quantize as quantize_kernels
from course_ops.kernels._matmul_plan import aligned_rows
from course_ops.matmul import kernel_for
from course_ops.versions import HAS_REMOTE_ARRIVE

pytestmark = pytest.mark.kept

DEVICE = device.DEVICE
FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPS = torch.ops.course_ops
needs_fp8 = pytest.mark.skipif(device.HAS_GPU and device.capability() < 89, reason="a GPU without fp8")


def large(*cases):
    """Cases that reach the persistent kernels of a GPU and would take the interpreter minutes."""
    return [pytest.param(*case, marks=pytest.mark.skipif(not device.HAS_GPU, reason="no GPU")) for case in cases]


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture(params=("cuda", "torch") if device.HAS_GPU else ("interpreted", "torch"))
def dev(request):
    """Where an operator computes: by kernels (on a GPU or interpreted), or by PyTorch on a CPU."""
    with testing.interpreted() if request.param == "interpreted" else nullcontext():
        yield torch.device("cuda" if request.param == "cuda" else "cpu")


def near(ours, theirs, exact):
    """Our error against float64 is at most twice PyTorch's own, and a rounding or two of the largest value.

    In fp32 more: eight, as PyTorch adds in another order, and NumPy, which multiplies for the interpreter, one after
    another; on a GPU, where sums have thousands of terms, as many as their square root's half.
    """
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    if exact.numel():
        rounding = torch.finfo(ours.dtype).eps * exact.abs().max()
        roundings = 1 if ours.dtype != torch.float32 else 32 if ours.is_cuda else 8
        most = 2 * (theirs.double() - exact).abs().max() + roundings * rounding
        assert (ours.double() - exact).abs().max() <= most


def matrix(rows, cols, dev, dtype=torch.float32, transposed=False, pad=0):
    shape = (cols, rows + pad) if transposed else (rows, cols + pad)
    whole = torch.randn(shape, device=dev).to(dtype)
    return whole[:, :rows].t() if transposed else whole[:, :cols]


SHAPES = (
    ((0, 3, 4), "", 0),
    ((3, 5, 0), "", 0),
    ((1, 1, 1), "", 0),
    ((13, 37, 71), "ab", 1),
    ((1, 67, 131), "b", 0),  # matvec
    ((1, 67, 40), "", 0),
    ((5, 264, 640), "b", 0),  # TMA; a tile that three programs share
    ((16, 296, 128), "", 0),
    ((6, 70, 530), "a", 0),  # rows that begin at multiples of 4 bytes
    ((6, 68, 532), "b", 2),
    ((131, 40, 33), "", 0),  # pointers
    ((136, 72, 80), "ab", 8),  # TMA
    ((130, 73, 71), "", 0),  # TMA after copies
    *large(
        ((200, 1000, 1000), "", 0),  # K in parts
        ((1544, 6152, 72), "", 0),  # more tiles than SMs; the second begins in the middle of the ring
        ((1544, 6152, 328), "ab", 8),
        ((5000, 5000, 5000), "", 0),  # copies with aligned rows
        ((4008, 5000, 5000), "ab", 0),
    ),
)


@pytest.mark.parametrize(("shape", "transposed", "pad"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matmul(dev, dtype, shape, transposed, pad):
    M, N, K = shape
    a, b = matrix(M, K, dev, dtype, "a" in transposed, pad), matrix(K, N, dev, dtype, "b" in transposed, pad)
    near(course_ops.matmul(a, b), a @ b, a.double() @ b.double())


def test_matmul_of_a_batch_and_of_one_element_expanded(dev):
    a, b = torch.randn(2, 3, 5, device=dev), torch.randn(5, 4, device=dev)
    torch.testing.assert_close(course_ops.matmul(a, b), a @ b)
    torch.testing.assert_close(course_ops.matmul(a[:, :0], b), a[:, :0] @ b)
    ones = torch.ones(1, 1, device=dev).expand(130, 70)
    torch.testing.assert_close(course_ops.matmul(ones, ones.t()), torch.full((130, 130), 70.0, device=dev))


@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
@pytest.mark.parametrize(
    ("M", "N", "K", "pad"), [(130, 70, 67, 0), (128, 64, 80, 0), (100, 96, 64, 3), (65, 64, 64, 16)]
)
@testing.kernels()
def test_exact_fp32_copies_what_is_no_multiple_of_16(transposed, M, N, K, pad):
    a = matrix(M, K, DEVICE, transposed="a" in transposed, pad=pad)
    b = matrix(K, N, DEVICE, transposed="b" in transposed)
    near(portable.matmul_ieee(a, b), a @ b, a.double() @ b.double())


@testing.kernels()
def test_exact_fp32_multiplies_rows_of_b(monkeypatch):
    """B that lies transposed is copied: the kernel reads its columns from shared memory 4 bytes at a time."""
    seen = []

    class Launched:
        def __getitem__(self, grid):
            return lambda a, b, *arguments, **options: seen.append((a, b))

    monkeypatch.setattr(portable, "pointers_kernel", Launched())
    a, b = torch.randn(128, 64, device=DEVICE), torch.randn(80, 64, device=DEVICE)
    portable.matmul_ieee(a, b.t())
    assert seen[0][0] is a
    assert seen[0][1].stride() == (80, 1)
    assert torch.equal(seen[0][1], b.t())


@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
@pytest.mark.parametrize("tile", matmul_fp32_hopper.TILES, ids=str)
@pytest.mark.parametrize(("M", "N", "K", "pad"), [(130, 300, 164, 0), (70, 100, 67, 3)])
@testing.kernels()
def test_exact_fp32_on_hopper_takes_any_size_and_strides(monkeypatch, transposed, tile, M, N, K, pad):
    monkeypatch.setattr(matmul_fp32_hopper, "best_tile", lambda *_: tile)
    a = matrix(M, K, DEVICE, transposed="a" in transposed, pad=pad)
    b = matrix(K, N, DEVICE, transposed="b" in transposed)
    near(matmul_fp32_hopper.matmul_fp32(a, b), a @ b, a.double() @ b.double())


@pytest.mark.parametrize(
    ("M", "N", "tile", "why"),
    [
        (512, 512, (32, 64), "one tile an SM"),
        (1024, 1024, (64, 64), "256 tiles: two on an SM"),
        (1024, 3072, (64, 64), "six tiles of an SM take turns; of 128 x 256 a quarter of the SMs would have none"),
        (2048, 2048, (128, 256), "128 tiles, of which each has an SM"),
        (8192, 8192, (128, 256), "many tiles for each SM: the fewest loads an FMA"),
    ],
)
def test_the_tile_of_exact_fp32_on_hopper(M, N, tile, why):
    assert matmul_fp32_hopper.best_tile(M, N, 132) == tile, why


def resources_of_fp32() -> dict:
    """By tile and by what lies transposed: the spills of the kernel for Hopper. In the process that compiles."""
    found = {}
    for tile in ((128, 256), (64, 128)):
        matmul_fp32_hopper.best_tile = lambda *_, tile=tile: tile
        for transposed in ("", "a", "b", "ab"):
            a, b = (
                matrix(256, 256, "meta", transposed="a" in transposed),
                matrix(256, 256, "meta", transposed="b" in transposed),
            )
            with compiled.compiling(90) as made:
                matmul_fp32_hopper.matmul_fp32(a, b)
            (kernel,) = made.values()
            found[f"{tile} {transposed}"] = compiled.inspect("matmul", kernel, 90).spills
    return found


def test_exact_fp32_on_hopper_stays_in_registers():
    found = call_in_compiler("tests.test_course_ops_matmul", "resources_of_fp32")
    assert len(found) == 8
    assert not any(found.values()), found


def test_inf_and_nan_stay_in_their_row_and_column(dev):
    a, b = torch.randn(16, 40, device=dev), torch.randn(40, 24, device=dev)
    a[1, 39], b[1, 4] = math.inf, math.nan
    torch.testing.assert_close(course_ops.matmul(a, b), a @ b, equal_nan=True)


@pytest.mark.parametrize("K", [13, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_cpu_what_lies_behind_a_row_stays_out_of_the_product(dtype, K):
    """oneDNN reads on: the next row's values, and those between two rows."""
    x = torch.full((168, K + 9), math.nan, dtype=dtype)[:, :K].fill_(1)
    weight, bias = torch.ones(64, K, dtype=dtype), torch.ones(64, dtype=dtype)
    offsets = torch.tensor([0, 100, 168], dtype=torch.int32)

    def products(left):
        leaf = torch.ones(168, 40, dtype=dtype, requires_grad=True)
        y = course_ops.linear(leaf, torch.ones(K, 40, dtype=dtype), torch.ones(K, dtype=dtype))
        return {
            "matmul": course_ops.matmul(left, weight.t()),
            "linear": course_ops.linear(left, weight, bias, activation="gelu_tanh"),
            "linear's dx": torch.autograd.grad(y, leaf, left)[0],
            "grouped_matmul": course_ops.grouped_matmul(left, weight.t().expand(2, K, 64).contiguous(), offsets),
        }

    for name, y in products(x).items():
        assert y.isfinite().all(), name
    row_with_nan = x.contiguous()
    row_with_nan[5] = math.nan
    for name, y in products(row_with_nan).items():
        assert y.isnan().any(1).nonzero().tolist() == [[5]], name


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [
        ((0, 8, 8), "zeros"),
        ((1, 4096, 4096), "skinny"),
        ((64, 14336, 4096), "skinny"),
        ((64, 4864, 896), "skinny"),
        ((64, 896, 4864), "split_k"),
        ((128, 4096, 4096), "split_k"),
        ((128, 28672, 8192), "split_k"),
        ((1024, 1024, 1024), "split_k"),
        ((3000, 1000, 8), "split_k"),
        ((4096, 4096, 4096), "hopper"),
        ((8192, 50304, 768), "hopper"),
        ((5000, 5000, 5000), "stream_k_hopper" if HAS_REMOTE_ARRIVE else "aligned_copies"),
        ((732, 6592, 1586), "aligned_copies"),
        ((1000, 1001, 999), "tma"),
        ((300, 40, 35), "pointers"),
    ],
)
def test_which_kernel_on_hopper(monkeypatch, shape, kernel):
    monkeypatch.setattr(matmul_hopper, "runs_gluon", lambda _: True)
    monkeypatch.setattr(matmul_aligned, "runs_gluon", lambda _: True)
    for name in ("matmul", "kernels.matmul_aligned"):
        monkeypatch.setattr(sys.modules[f"course_ops.{name}"], "num_sms", lambda _: 132)
    M, N, K = shape
    a, b = (
        torch.empty(M, K, dtype=torch.bfloat16, device="meta"),
        torch.empty(K, N, dtype=torch.bfloat16, device="meta"),
    )
    assert kernel_for(a, b).name == kernel
    if kernel == "hopper":
        assert kernel_for(a, torch.empty_like(b, dtype=torch.bfloat16).t().contiguous().t()).name == kernel
        assert kernel_for(a.float(), b.float()).name == "ieee"
        monkeypatch.setattr(matmul_fp32_hopper, "runs_gluon", lambda _: True)
        assert kernel_for(a.float(), b.float()).name == "fp32_hopper"
        for module in (portable, matmul_fp32_hopper):
            monkeypatch.setattr(module, "fp32_precision", lambda: "tf32")
        assert kernel_for(a.float(), b.float()).name == "tma"
        monkeypatch.undo()
        monkeypatch.setattr("course_ops.kernels.matmul.architecture", lambda _: 80)
        monkeypatch.setattr("course_ops._common.architecture", lambda _: 80)
        assert kernel_for(a, b).name == "pointers"


@pytest.mark.parametrize(
    ("shape", "n_major", "per_tile"),
    [
        ((48, 4800, 1600), True, 1),  # few steps: a part would cost more than it saves
        ((16, 4096, 4096), True, 1),  # B's bytes from memory take as long with more programs
        ((48, 24576, 6144), True, 1),  # 96 tiles: no second program has room
        ((24, 928, 12648), False, 3),  # 15 tiles of many steps; all SMs would be 8 parts, which are added up in a row
        ((64, 128256, 4096), True, 0),  # more tiles than SMs
        ((48, 5120, 27648), True, 2),  # 40 tiles of 128 columns
    ],
)
def test_how_many_programs_share_a_tile_of_few_rows(shape, n_major, per_tile):
    assert matmul_skinny.plan(*shape, 132, n_major)[0] == per_tile


@pytest.mark.parametrize(
    ("shape", "block_n"),
    [
        ((48, 5120, 27648), 128),  # 80 tiles of 64 columns: A would come from L2 80 times
        ((48, 4800, 1600), 64),  # 38 of 128 columns leave SMs idle
        ((64, 28672, 8192), 256),  # the fewest tiles, and yet one for each SM
        ((32, 5120, 27648), 64),  # half of the rows: memory is slower than L2
        ((128, 5120, 27648), 64),
    ],
)
def test_tiles_of_33_to_64_rows_are_wider_where_l2_is_the_slowest(shape, block_n):
    assert matmul_skinny._tma_tile(*shape, 132, True)[0] == block_n


@pytest.mark.parametrize(
    ("shape", "tile", "programs"),
    [
        ((14, 2640, 871), (16, 32, 256), 28 * 6),
        ((40, 3001, 1001), (64, 32, 128), 32 * 6),
        ((100, 1500, 2001), (128, 64, 64), 32 * 4),
        ((14, 2640, 50257), (16, 32, 256), 4 * 132),  # more tiles than programs: equal shares of all steps
        ((14, 2640, 872), (16, 128, 64), 132),  # B can be copied 16 bytes at a time, but A cannot
        ((2, 16034, 822, 0, "a"), (16, 32, 256), 26 * 5),  # 4 bytes at a time
        ((14, 2640, 872, 2, ""), (16, 128, 64), 132),  # of A 4 bytes at a time
        ((105, 11608, 12678, 0, ""), (128, 64, 64), 132),  # registers of one program fill an SM
    ],
)
def test_how_many_programs_share_tiles_of_few_rows_that_are_loaded_element_by_element(
    monkeypatch, shape, tile, programs
):
    launched = []

    class Launched:
        def __getitem__(self, grid):
            return lambda *arguments, **options: launched.append((grid, arguments[9:12]))

    monkeypatch.setattr(matmul_skinny, "stream_k_kernel", Launched())
    for name in ("num_sms", "architecture", "shared_memory"):
        value = {"num_sms": 132, "architecture": 90, "shared_memory": 232448}[name]
        monkeypatch.setattr(matmul_skinny, name, lambda _, value=value: value)
    M, K, N, pad, transposed = (*shape, *(1, "")[len(shape) - 3 :])
    a, b = matrix(M, K, "meta", torch.bfloat16, bool(transposed), pad), torch.empty(K, N, dtype=torch.bfloat16)
    matmul_skinny.matmul_skinny(a, b)
    assert launched == [((programs,), tile)]


@pytest.mark.parametrize(
    ("shape", "strides", "dtype", "units"),
    [
        ((2, 16034), (1, 2), torch.bfloat16, (2, 1)),
        ((16034, 822), (822, 1), torch.bfloat16, (1, 2)),
        ((40, 872), (872, 1), torch.bfloat16, (1, 8)),
        ((40, 872), (872, 1), torch.float32, (1, 1)),
        ((40, 872), (873, 1), torch.bfloat16, (1, 1)),
        ((40, 871), (872, 1), torch.bfloat16, (1, 1)),  # a thread would load beyond the row
        ((40, 872), (3488, 4), torch.bfloat16, (1, 1)),
    ],
)
def test_how_many_elements_a_thread_can_load_at_once(shape, strides, dtype, units):
    t = torch.empty(2**21, dtype=dtype, device="meta").as_strided(shape, strides)
    for lies, expected in ((t, units), (t.t(), units[::-1])):
        assert matmul_skinny._units(lies) == expected


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("cols", "begin"), [(1032, 8), (1586, 0), (1031, 0), (1032, 3)])
@testing.kernels()
def test_a_copy_with_aligned_rows(cols, begin, transposed):
    t = matrix(40, cols, DEVICE, torch.bfloat16)[:, begin:]
    t = t.t() if transposed else t
    other = matrix(1030, 9, DEVICE, torch.bfloat16).t()
    for given in ([t], [t, other], [other, t]):
        copies = matmul_aligned.copier(*given)(*given)
        for copy, of in zip(copies, given, strict=True):
            assert torch.equal(copy, of)
            assert (min(copy.stride()), max(copy.stride()) % 64) == (1, 0)
            assert aligned_rows(copy)
    assert not aligned_rows(t)


@pytest.mark.parametrize(
    ("a_rows", "b_rows", "copies"),
    [(1586, 1586, (True, True)), (1600, 1586, (False, True)), (1600, 1600, (False, False))],
)
def test_what_tma_cannot_read_is_copied(monkeypatch, a_rows, b_rows, copies):
    monkeypatch.setattr(matmul_aligned, "runs_gluon", lambda _: True)
    monkeypatch.setattr(matmul_aligned, "num_sms", lambda _: 132)
    a = torch.empty(732, a_rows, dtype=torch.bfloat16, device="meta")[:, :1586]
    b = torch.empty(6592, b_rows, dtype=torch.bfloat16, device="meta")[:, :1586].t()
    assert matmul_aligned.which(a, b) == copies
    assert matmul_aligned.which(a[:, :40], b[:40]) == (False, False), "copies cost more than they save"


@pytest.mark.parametrize("copied", [(True, False), (False, True), (True, True)])
def test_a_product_of_copies(monkeypatch, copied):
    a, b = matrix(16, 24, DEVICE, torch.bfloat16), matrix(40, 25, DEVICE, torch.bfloat16)[:, :24].t()
    monkeypatch.setattr(matmul_aligned, "which", lambda a, b: copied)
    seen = []
    with testing.kernels():
        matmul_aligned.prepare(a, b, lambda *_: lambda *operands: seen.extend(operands))(a, b)
    for operand, given, is_copied in zip(seen, (a, b), copied, strict=True):
        assert torch.equal(operand, given)
        assert aligned_rows(operand) if is_copied else operand is given


def loads_of(case):
    """Kinds of loads from global memory in the PTX of a kernel, without the partial sums'. In a compiling process."""
    from lessonkit.modes import compiled

    with compiled.compiling(90) as made:
        if case == "copies":
            a, b = matrix(3000, 3000, "meta", torch.bfloat16), matrix(200, 5000, "meta", torch.bfloat16)
            matmul_aligned.copier(a, b)(a, b)
        else:
            a = matrix(2, 16034, "meta", torch.bfloat16, "a" in case)
            matmul_skinny.matmul_skinny(a, matrix(16034, 822, "meta", torch.bfloat16))
        (kernel,) = made.values()
    return sorted(
        set(re.findall(r"(?:ld\.global|cp\.async\.c[ag])[\w.]*", kernel.asm["ptx"])) - {"ld.global.cg.v4.b32"}
    )


@pytest.mark.parametrize(
    ("case", "loads"),
    [
        ("copies", ["ld.global.v4.b32"]),
        ("few rows", ["cp.async.ca.shared.global"]),
        pytest.param("few rows, a", ["cp.async.ca.shared.global"], marks=pytest.mark.night),
    ],
)
def test_rows_that_begin_at_multiples_of_4_bytes_are_not_loaded_element_by_element(case, loads):
    assert call_in_compiler("tests.test_course_ops_matmul", "loads_of", case) == loads


# The host's time by what it does, which is the same on every machine. Launches are counted, not made.
@pytest.mark.skipif(device.HAS_GPU, reason="stands for a GPU of 132 SMs")
@pytest.mark.parametrize(("M", "N", "K"), [(24, 12648, 928), (413, 840, 1720), (2048, 3072, 768)])
def test_a_second_backward_of_linear_plans_nothing(monkeypatch, M, N, K):
    counts = collections.Counter()

    class Launched:
        def __getitem__(self, grid):
            return lambda *arguments, **options: counts.update(["launches"])

    def counted(name, fn):
        return lambda *arguments, **options: (counts.update([name]), fn(*arguments, **options))[1]

    for name, module in list(sys.modules.items()):
        if name.startswith("course_ops."):
            for attribute in vars(module).copy():
                if attribute.endswith("_kernel") and "kernels." in name:
                    monkeypatch.setattr(module, attribute, Launched())
            if hasattr(module, "num_sms"):
                monkeypatch.setattr(module, "num_sms", lambda _: 132)
            if hasattr(module, "runs_gluon"):
                monkeypatch.setattr(module, "runs_gluon", lambda _: True)
    matmul = sys.modules["course_ops.matmul"]
    monkeypatch.setattr(_launch, "_remembers", lambda _: True)
    monkeypatch.setattr(_launch, "_prepared", {})
    monkeypatch.setattr(
        matmul, "DISPATCH", [kernel._replace(takes=counted("choices", kernel.takes)) for kernel in matmul.DISPATCH]
    )
    monkeypatch.setattr(_matmul_plan, "plans", counted("plans", _matmul_plan.plans))
    monkeypatch.setattr(matmul_split_k, "_cycles", counted("plans", matmul_split_k._cycles))
    for cached in (_matmul_plan.best_plan, matmul_split_k.choose, _matmul_hopper.layout_of):
        cached.cache_clear()

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
            counts.update(["operators"] * (operator.namespace == "course_ops"))
            return operator(*arguments, **(keywords or {}))

    with testing.interpreted():
        x, weight, bias = (torch.empty(*s, dtype=torch.bfloat16, requires_grad=True) for s in ((M, K), (N, K), (N,)))
        y = course_ops.linear(x, weight, bias, activation="gelu_tanh")
        dy = torch.empty_like(y)

        def backward():
            torch.autograd.grad(y, (x, weight, bias), dy, retain_graph=True)

        backward()
        assert counts["choices"] > 0
        layouts = _matmul_hopper.layout_of.cache_info().misses
        if M > 128:  # few rows: no Hopper matmul, dW is made beside dz
            assert counts["plans"] > 0
            assert layouts > 0
        counts.clear()
        with Operators():
            backward()
        # One makes dz, its sums, and dW of few rows; dx and other dW have their own. 4: programs' sums are added up.
        assert counts == {"launches": 2 if M <= 128 else 3 if M <= 512 else 4, "operators": 1}
        assert _matmul_hopper.layout_of.cache_info().misses == layouts
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            backward()
        finally:
            sys.setprofile(None)
        most = 170 if HAS_REMOTE_ARRIVE else 160  # a cluster's launch asks for more
        assert calls < most, "functions of Python, each of which costs the host about 0.1 us or more"


def test_a_second_launch_takes_the_compiled_kernel(monkeypatch):
    driver = SimpleNamespace(get_current_stream=lambda device: ("stream of", device))
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    seen = []

    class Compiled:
        function, packed_metadata = "function", "metadata"

        def run(self, *args):
            seen.append(("again", *args))

    class Jitted:
        def __getitem__(self, grid):
            return lambda *args, **options: (seen.append(("first", grid, args, options)), Compiled())[1]

    device = SimpleNamespace(index=1)
    on_gpu, elsewhere = (SimpleNamespace(base=SimpleNamespace(is_cuda=gpu, device=device)) for gpu in (True, False))
    for first, calls in ((on_gpu, ["first", "again", "again"]), (elsewhere, ["first"] * 3)):
        seen.clear()
        go = _launch.launcher(Jitted(), (7,), num_warps=4)
        for number in range(3):
            go(first, number)
        assert [each[0] for each in seen] == calls
        assert seen[0][1:] == ((7,), (first, 0), {"num_warps": 4})
        if first is on_gpu:
            assert seen[1][1:] == (7, 1, 1, ("stream of", 1), "function", "metadata", None, None, None, first, 1)
    hook = triton.knobs.runtime.launch_exit_hook
    go(on_gpu, 0)
    hook.add(print)
    try:
        seen.clear()
        go(on_gpu, 1)
        assert seen[0][0] == "first", "Triton's own launch calls a profiler's hooks"
    finally:
        hook.remove(print)
    go(on_gpu, 2)
    assert seen[1][0] == "again"


# What is left out of a launch is the host's work in Python: these are the names of Triton that it relies on.
def test_a_compiled_kernel_runs_by_the_arguments_of_this_triton():
    from triton.compiler import CompiledKernel
    from triton.runtime import jit

    order = "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,"
    assert order in inspect.getsource(jit)
    assert isinstance(CompiledKernel.run, property)
    assert triton.knobs.runtime.launch_enter_hook.calls == []


def test_what_is_prepared_is_remembered_for_tensors_that_lie_alike(monkeypatch):
    monkeypatch.setattr(_launch, "_remembers", lambda _: True)
    monkeypatch.setattr(_launch, "_prepared", {})
    made = []

    def prepare(*tensors):
        made.append(tensors)

    base = torch.zeros(40, 64, dtype=torch.bfloat16)
    a, b = base[:8, :32], base[8:16, :32]
    for others in ((), (None,), (b,), (b[:4],), (b.t(),), (b[:, 8:24],), (b[:, :16],), (b.half(),)):
        made.clear()
        for first in (a, b, a):
            assert _launch.remembered(prepare, first, *others) is None
        assert made == [(a, *others)], "what is prepared may be None, and is remembered, too"
    with monkeypatch.context() as patched:
        patched.setattr(_launch, "fp32_precision", lambda: "tf32")
        made.clear()
        _launch.remembered(prepare, a)
        assert len(made) == 1
    made.clear()
    for flag in (True, False, True):
        _launch.remembered(prepare, a, flag)
    assert made == [(a, True), (a, False)]
    monkeypatch.setattr(_launch, "_remembers", lambda _: False)
    for _ in range(2):
        made.clear()
        _launch.remembered(prepare, a)
        assert len(made) == 1, "without a GPU nothing is remembered"


def test_what_has_to_see_an_operator(monkeypatch):
    x = torch.ones(2, 2)
    assert not _registration.unobserved(x), "not on a GPU"
    monkeypatch.setattr(_registration, "_plain_on_gpu", lambda t: True)
    assert _registration.unobserved(x, None)
    assert not _registration.unobserved(x, torch.ones(2, requires_grad=True))
    with monkeypatch.context() as patched:
        patched.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
        assert not _registration.unobserved(x)
    with FlopCounterMode(display=False):
        assert not _registration.unobserved(x)
    with torch.profiler.profile():
        assert not _registration.unobserved(x)

    def within(row):
        assert not _registration.unobserved(row)
        return row

    torch.func.vmap(within)(x)
    torch.jit.trace(within, x, check_trace=False)  # the check calls it outside of the tracer


def test_a_view_with_the_negative_bit_is_not_passed_to_a_kernel_as_it_is(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    z = torch.randn(2, 3, dtype=torch.complex64)
    assert _registration.unobserved(z.imag)
    assert not _registration.unobserved(z.conj().imag)


def leaf(*shape, dev, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, device=dev) * scale).to(dtype).requires_grad_()


def gradients_are_near(ours, theirs, *leaves):
    """ours(*leaves) and its gradients against PyTorch's in the same dtype and in float64."""
    exact = [t.detach().double().requires_grad_() for t in leaves]
    y, y_torch, y_exact = ours(*leaves), theirs(*leaves), theirs(*exact)
    near(y, y_torch, y_exact)
    dy = torch.randn_like(y) + 0.5
    for mine, other, truth in zip(
        torch.autograd.grad(y, leaves, dy),
        torch.autograd.grad(y_torch, leaves, dy),
        torch.autograd.grad(y_exact, exact, dy.double()),
        strict=True,
    ):
        near(mine, other, truth)


@pytest.mark.parametrize(("M", "N", "K"), [(7, 5, 3), (150, 70, 40)])
def test_matmul_gradients(dev, M, N, K):
    gradients_are_near(course_ops.matmul, torch.matmul, leaf(M, K, dev=dev), leaf(K, N, dev=dev))


def test_matmul_second_gradients(dev):
    a, b = leaf(3, 4, dev=dev, dtype=torch.float32), leaf(4, 5, dev=dev)
    first = torch.autograd.grad(course_ops.matmul(a, b).pow(2).sum(), a, create_graph=True)[0]
    expected = torch.autograd.grad((a @ b).pow(2).sum(), a, create_graph=True)[0]
    for of in (a, b):
        torch.testing.assert_close(*(torch.autograd.grad(g.sum(), of, retain_graph=True)[0] for g in (first, expected)))


def reference_linear(activation):
    def linear(x, weight, bias=None, residual=None):
        y = F.linear(x, weight, bias)
        y = F.gelu(y, approximate="tanh") if activation else y
        return y if residual is None else y + residual

    return linear


@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
@pytest.mark.parametrize("extra", ["", "bias", "bias residual", "residual"])
@pytest.mark.parametrize(("M", "N", "K"), [(5, 40, 24), (136, 72, 64), (131, 37, 19), *large((2060, 4104, 16))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear(dev, dtype, M, N, K, extra, activation):
    leaves = [leaf(M, K, dev=dev, dtype=dtype), leaf(N, K, dev=dev, dtype=dtype, scale=1.5 / math.sqrt(K))]
    leaves += [leaf(N, dev=dev, dtype=dtype)] if "bias" in extra else []
    leaves += [leaf(M, N, dev=dev, dtype=dtype)] if "residual" in extra else []

    def named(of):
        rest = leaves[2:]
        return lambda x, w, *more: of(
            x, w, more[0] if "bias" in extra else None, more[-1] if rest and "residual" in extra else None
        )

    gradients_are_near(
        named(lambda x, w, bias, residual: course_ops.linear(x, w, bias, activation=activation, residual=residual)),
        named(reference_linear(activation)),
        *leaves,
    )


@pytest.mark.parametrize("activation", [False, True])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 72, 136), (37, 200, 392), (128, 64, 8)])
def test_dw_of_few_rows_is_made_beside_dz(monkeypatch, M, N, K, activation):
    dy = matrix(M, N + 8, DEVICE, torch.bfloat16)[:, :N]
    x, z = matrix(M, K, DEVICE, torch.bfloat16), matrix(M, N, DEVICE, torch.bfloat16) if activation else None
    monkeypatch.setattr(linear_kernels, "num_sms", lambda _: 2)  # parts of two column blocks, and of one
    with testing.kernels():
        found = linear_kernels.prepare_outer(dy, x, z)(dy, x, z)
    dz = dy.float() if z is None else torch.ops.aten.gelu_backward(dy.float(), z.float(), approximate="tanh")
    for each, exact in zip(found, (dz, dz.sum(0), dz.bfloat16().float().t() @ x.float()), strict=True):
        torch.testing.assert_close(each.float(), exact, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize(("M", "N"), [(129, 40), (300, 24), (600, 40)])
def test_sums_of_a_small_matrix_take_one_launch(M, N):
    dy, z = matrix(M, N, DEVICE, torch.bfloat16), matrix(M, N, DEVICE, torch.bfloat16)
    with testing.kernels():
        dz, sums = linear_kernels.prepare_gelu_backward(dy, z)(dy, z)
        plain = linear_kernels.prepare_column_sums(dy)(dy)
    exact = torch.ops.aten.gelu_backward(dy.float(), z.float(), approximate="tanh")
    torch.testing.assert_close(dz.float(), exact, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(sums.float(), exact.sum(0), rtol=2**-7, atol=2**-3)
    torch.testing.assert_close(plain.float(), dy.float().sum(0), rtol=2**-7, atol=2**-3)
    block_m, *_ = linear_kernels._block(M, N, 132)
    assert (linear_kernels._partial_rows(z, block_m) == 1) == (M <= 512)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_linear_on_a_cpu_is_rounded_once(dtype):
    x, w, bias, residual = (torch.randn(*shape).to(dtype) for shape in ((33, 70), (40, 70), (40,), (33, 40)))
    found = course_ops.linear(x, w, bias, activation="gelu_tanh", residual=residual)
    exact = reference_linear("gelu_tanh")(*(t.double() for t in (x, w, bias, residual)))
    mantissa, exponent = torch.frexp(exact.abs())
    ulp = torch.ldexp(torch.full_like(mantissa, torch.finfo(dtype).eps), exponent - 1)
    assert ((found.double() - exact).abs() <= 0.51 * ulp + 1e-5).all()


def test_linear_of_many_dimensions_without_rows_and_of_strided_tensors(dev):
    x, w, bias = torch.randn(2, 3, 8, device=dev), torch.randn(5, 8, device=dev), torch.randn(5, device=dev)
    torch.testing.assert_close(course_ops.linear(x, w, bias), F.linear(x, w, bias))
    torch.testing.assert_close(course_ops.linear(x[0, 0], w, bias), F.linear(x[0, 0], w, bias))
    torch.testing.assert_close(course_ops.linear(x[:, :0], w, bias, activation="gelu_tanh"), x.new_empty(2, 0, 5))
    torch.testing.assert_close(course_ops.linear(x[..., :0], w[:, :0], bias), bias.expand(2, 3, 5).clone())
    wide, turned = torch.randn(131, 16, device=dev)[:, ::2], torch.randn(8, 5, device=dev).t()
    scattered = torch.randn(10, device=dev)[::2]
    torch.testing.assert_close(course_ops.linear(wide, turned, scattered), F.linear(wide, turned, scattered))


def test_linear_computes_only_the_gradients_that_are_wanted(dev):
    x, w, bias = torch.randn(3, 4, device=dev), leaf(5, 4, dev=dev), torch.randn(5, device=dev)
    with FlopCounterMode(display=False) as counter:
        course_ops.linear(x, w, bias, activation="gelu_tanh").sum().backward()
    assert counter.get_total_flops() == 2 * (2 * 3 * 4 * 5)
    assert w.grad is not None


def test_flops_of_matmul_and_its_backward(dev):
    with FlopCounterMode(display=False) as counter:
        course_ops.matmul(leaf(3, 4, dev=dev), leaf(4, 5, dev=dev)).sum().backward()
    assert counter.get_total_flops() == 3 * (2 * 3 * 4 * 5)


# ---- fp8 ----------------------------------------------------------------------------------------------------------


def uneven(M, K, dev, dtype=torch.float32):
    """Magnitudes from 2^-12 to 2^12 in neighbouring blocks, and a row of zeros."""
    x = torch.randn(M, K, device=dev) * torch.exp2(torch.arange(K, device=dev) // 64 * 7 % 13 - 6.0)
    x *= torch.exp2(torch.arange(M, device=dev) * 5 % 13 - 6.0)[:, None]
    x[1:2] = 0
    return x.to(dtype)


def spread(q, scale, rows, cols):
    return q.float() * scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[: len(q), : q.shape[1]]


@needs_fp8
@pytest.mark.parametrize(("scheme", "shape"), [
    ("tensor", (70, 300)), ("rows", (5, 1021)), ("blocks", (37, 131)), ("squares", (130, 259)), ("rows", (2, 16400)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantize(dev, scheme, shape, dtype):
    x = uneven(*shape, dev, dtype)
    q, scale = course_ops.quantize(x, scheme)
    rows, cols = {"tensor": shape, "rows": (1, shape[1]), "blocks": (1, 128), "squares": (128, 128)}[scheme]
    assert (q.dtype, q.shape, scale.dtype) == (FP8, x.shape, torch.float32)
    assert scale.shape == (-(-shape[0] // rows), -(-shape[1] // cols))
    lost = (spread(q, scale, rows, cols) - x.float()).abs()
    step = spread(torch.ones_like(q, dtype=torch.float32), scale, rows, cols)
    assert (lost <= (x.float().abs() / 16).maximum(step * 2**-10) * 1.0001).all()
    largest = q.float().abs().max() if scheme == "tensor" else q[0, :128].float().abs().max()
    assert largest == 448 or scheme in ("rows", "squares")
    cpu_q, cpu_scale = OPS.quantize(x.cpu(), scheme) if dev.type == "cuda" else (q, scale)
    assert torch.equal(cpu_scale, scale.cpu())
    assert torch.equal(cpu_q.float(), q.cpu().float())


def test_quantize_refuses_more_columns_than_a_grid_has_programs():
    for scheme, K in (("blocks", 65535 * 128 + 1), ("tensor", 65535 * 1024 + 1)):
        x = torch.empty(1, K, dtype=torch.bfloat16, device="meta")
        with pytest.raises(ValueError, match=f"x has {K} columns, expected at most {K - 1}: view it as more rows"):
            quantize_kernels.quantize(x, scheme)


@needs_fp8
def test_quantize_strange_numbers_and_nothing(dev):
    x = uneven(4, 300, dev)
    x[0, 5], x[2, 200] = math.nan, math.inf
    q, scale = course_ops.quantize(x.t().contiguous().t(), "blocks")
    assert scale[0, 0].isnan()
    assert q[0, :128].float().isnan().all()
    assert scale[2, 1].isinf()
    assert q[2, 200].float().isnan()
    assert not q[2, 201].float().any()
    assert (scale[1] == 1).all()
    assert not q[1].float().any()
    tiny = torch.tensor([[3e-43, 0, 1e-44, -3e-43]], device=dev)  # the largest / 448 is 0
    for scheme in ("rows", "tensor", "blocks", "squares"):
        q, scale = course_ops.quantize(tiny, scheme)
        assert (scale == 1).all()
        assert not q.float().any()
    for scheme, shape in (("rows", (3, 1)), ("tensor", (1, 1)), ("blocks", (3, 0)), ("squares", (1, 0))):
        q, scale = course_ops.quantize(torch.empty(3, 0, device=dev), scheme)
        assert q.shape == (3, 0)
        assert scale.shape == shape
        assert (scale == 1).all()


@needs_fp8
@pytest.mark.parametrize(
    ("M", "N", "K"), [(37, 131, 71), (5, 133, 135), (40, 264, 272), (0, 5, 16), (3, 5, 0), (1, 1, 1),
    *large((200, 520, 1040), (1544, 6280, 272))],
)  # fmt: skip
@pytest.mark.parametrize("scheme", ["tensor", "rows", "blocks"])
def test_matmul_fp8(dev, M, N, K, scheme):
    def quantized(rows, scheme):
        q = (torch.randn(rows, K, device=dev) * 60).clamp(-448, 448).to(FP8)
        shape = {
            "tensor": (1, 1),
            "rows": (rows, 1),
            "blocks": (rows, -(-K // 128)),
            "squares": (-(-rows // 128), -(-K // 128)),
        }
        return q, torch.rand(shape[scheme], device=dev).exp2() / 448

    (a, a_scale), (w, w_scale) = quantized(M, scheme), quantized(N, "squares" if scheme == "blocks" else scheme)
    across = {"tensor": (M, K), "rows": (1, K), "blocks": (1, 128)}[scheme]
    down = {"tensor": (N, K), "rows": (1, K), "blocks": (128, 128)}[scheme]
    wide = spread(a, a_scale, *across), spread(w, w_scale, *down)
    c = course_ops.matmul_fp8(a, a_scale, w.t(), w_scale.t())
    near(c, (wide[0] @ wide[1].t()).bfloat16(), wide[0].double() @ wide[1].double().t())
    torch.testing.assert_close(
        course_ops.matmul_fp8(a, a_scale, w.t().contiguous(), w_scale.t()), c, rtol=0.01, atol=0.01
    )


@needs_fp8
def test_quantize_and_matmul_fp8_fit_together(dev):
    x, w = torch.randn(20, 256, device=dev), torch.randn(136, 256, device=dev)
    for of_x, of_w in (("tensor", "tensor"), ("rows", "rows"), ("blocks", "squares")):
        (a, a_scale), (b, b_scale) = course_ops.quantize(x, of_x), course_ops.quantize(w, of_w)
        error = course_ops.matmul_fp8(a, a_scale, b.t(), b_scale.t()).float() - x @ w.t()
        assert error.norm() < 0.06 * (x @ w.t()).norm()


# ---- grouped and scan ---------------------------------------------------------------------------------------------


def by_groups(x, w, offsets):
    y, ends = x.new_zeros(len(x), w.shape[2]), offsets.tolist()
    parts = [x[begin:end] @ w[e] for e, (begin, end) in enumerate(itertools.pairwise(ends))]
    return torch.cat([y[: ends[0]], *parts, y[ends[-1] :]])


@pytest.mark.parametrize(("ends", "K", "N", "transposed"), [
    ((0, 13, 13, 40), 24, 16, False), ((0, 50, 150), 70, 33, False), ((0, 20, 90), 72, 40, True),
    ((3, 5, 5), 8, 8, True),
    ((0, 5), 0, 8, False), ((0, 0, 1), 1, 1, False), ((20, 60, 130), 24, 72, False), ((0, 0), 4, 5, False),
    *large(((5, 1200, 1200, 1263, 4000), 136, 1024, False)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_matmul(dev, dtype, ends, K, N, transposed):
    T = ends[-1] + (7 if ends[0] else 0)
    x = leaf(T, K, dev=dev, dtype=dtype)
    w = torch.randn(len(ends) - 1, *((N, K) if transposed else (K, N)), device=dev).to(dtype)
    w = w.transpose(1, 2) if transposed else w
    offsets = torch.tensor(ends, dtype=torch.int32, device=dev)
    if not T:
        assert course_ops.grouped_matmul(x, w, offsets).shape == (0, N)
        return
    exact = x.detach().double().requires_grad_()
    y, y_torch, y_exact = (f(i, v, offsets) for f, i, v in (
        (course_ops.grouped_matmul, x, w), (by_groups, x, w), (by_groups, exact, w.double())))  # fmt: skip
    near(y, y_torch, y_exact)
    assert not y[: ends[0]].any()
    assert not y[ends[-1] :].any()
    dy = torch.randn_like(y)
    near(
        torch.autograd.grad(y, x, dy)[0],
        torch.autograd.grad(y_torch, x, dy)[0],
        torch.autograd.grad(y_exact, exact, dy.double())[0],
    )


@pytest.mark.parametrize("n", [0, 1, 1021, 8192, 3 * 8192 + 5])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scan(dev, n, deterministic, dtype):
    x = (torch.randn(n, device=dev) / 4 - min(0.25, 1024 / max(n, 1))).to(dtype)
    torch.use_deterministic_algorithms(deterministic)
    try:
        ours, back = course_ops.scan(x), course_ops.scan(x, reverse=True)
    finally:
        torch.use_deterministic_algorithms(False)
    for y, of in ((ours, x), (back.flip(0), x.flip(0))):
        exact, theirs = of.double().cumsum(0), of.float().cumsum(0).to(dtype)
        # An interpreted program adds a tile's 8192 elements one after another: sqrt(n) / 2 roundings of fp32.
        slack = torch.full_like(theirs, 1e-5 * (exact.abs().max() if n else 0), dtype=torch.float32)
        assert (
            y.dtype == dtype
            and ((y.double() - exact).abs() <= 2 * (theirs.double() - exact).abs().max().nan_to_num() + slack).all()
            if n
            else y.shape == (0,)
        )


def test_scan_of_a_stride_and_its_gradients(dev):
    x = torch.randn(60, device=dev)[::2].requires_grad_()
    assert torch.allclose(course_ops.scan(x), x.cumsum(0), atol=1e-5)
    dy = torch.randn(30, device=dev)
    ours = torch.autograd.grad(course_ops.scan(x), x, dy)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(x.cumsum(0), x, dy)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not device.HAS_GPU, reason="no GPU")
@pytest.mark.parametrize(("M", "N", "K"), [(16, 4096, 4096), (200, 1000, 4096)])
def test_kernels_that_meet_in_memory_can_be_captured_and_share_the_gpu(M, N, K):
    """Stream-K and split-K in a CUDA graph, replayed beside calls on another stream: always the same bits."""
    a, b = matrix(M, K, DEVICE, torch.bfloat16), matrix(K, N, DEVICE, torch.bfloat16)
    expected = course_ops.matmul(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = course_ops.matmul(a, b)
    side, results = torch.cuda.Stream(), []
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        graph.replay()
        results.append(captured.clone())
        with torch.cuda.stream(side):
            results.append(course_ops.matmul(a, b))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


# ---- Operators as PyTorch sees them -------------------------------------------------------------------------------


EXAMPLES = (
    "matmul",
    "linear",
    "linear_plain",
    "linear_epilogue_backward",
    "linear_bias_backward",
    pytest.param("quantize", marks=needs_fp8),
    pytest.param("matmul_fp8", marks=needs_fp8),
    "grouped_matmul",
    "scan",
)


def examples():
    """{name: (public function, arguments, the operator, its arguments)}; leaves require grad where there is one."""
    x, w, bias, residual = (
        leaf(9, 24, dev=DEVICE),
        leaf(40, 24, dev=DEVICE),
        leaf(40, dev=DEVICE),
        leaf(9, 40, dev=DEVICE),
    )
    experts = torch.randn(2, 24, 8, device=DEVICE)
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
    (a, a_scale), (b, b_scale) = (course_ops.quantize(t.detach().cpu(), "rows") for t in (x, w))
    fp8 = tuple(t.to(DEVICE) for t in (a, a_scale, b.t(), b_scale.t()))
    vector = leaf(300, dev=DEVICE)
    return {
        "matmul": (course_ops.matmul, (x, w.t()), OPS.matmul, (x, w.t())),
        "linear": (
            lambda *given: course_ops.linear(*given[:3], activation="gelu_tanh", residual=given[3]),
            (x, w, bias, residual), OPS.linear,
            (x, w, bias, residual, "gelu_tanh", True),
        ),
        "linear_plain": (course_ops.linear, (x, w), OPS.linear, (x, w, None, None, "", False)),
        "linear_epilogue_backward": (None, (), OPS.linear_epilogue_backward, (residual.detach(), residual.detach())),
        "linear_bias_backward": (None, (), OPS.linear_epilogue_backward, (residual.detach(), None)),
        "quantize": (course_ops.quantize, (x.detach(), "blocks"), OPS.quantize, (x.detach(), "squares")),
        "matmul_fp8": (course_ops.matmul_fp8, fp8, OPS.matmul_fp8, fp8),
        "grouped_matmul": (course_ops.grouped_matmul, (x, experts, offsets), OPS.grouped_matmul, (x, experts, offsets)),
        "scan": (course_ops.scan, (vector,), OPS.scan, (vector, False)),
    }  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_operator_is_sound(dev, name):
    _, _, operator, args = examples()[name]
    args = tuple(a.detach().to(dev).requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if name == "matmul_fp8":  # test_schema compares arguments, and PyTorch cannot compare float8 on a CPU
        checks.remove("test_schema")
    assert set(torch.library.opcheck(operator.default, args, test_utils=checks).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if "backward" not in str(name)])
def test_compiled_as_one_graph(name):
    fn, args, *_ = examples()[name]
    torch._dynamo.reset()
    eager, compiled = fn(*args), torch.compile(fn, fullgraph=True, backend="aot_eager")(*args)
    for ours, theirs in zip(*((t if isinstance(t, tuple) else (t,)) for t in (compiled, eager)), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float())
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    if leaves:
        grads = (torch.autograd.grad(y.pow(2).sum(), leaves) for y in (compiled, eager))
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs)


def offsets(*ends):
    return torch.tensor(ends, dtype=torch.int32)


X, W = torch.randn(4, 6), torch.randn(5, 6)
Q, S = torch.zeros(4, 6).to(FP8), torch.ones(1, 1)
ONE = torch.ones(1, 6, 3)  # w of one group
REFUSED = (
    (lambda: course_ops.matmul(X, W), ValueError, "a has 6 columns and b 5 rows"),
    (lambda: course_ops.matmul(X, W.t().half()), TypeError, "b is torch.float16"),
    (lambda: course_ops.matmul(X.double(), W.t().double()), TypeError, "a is torch.float64"),
    (lambda: course_ops.matmul(X, W.t()[None]), course_ops.Unsupported, "torch.bmm"),
    (lambda: course_ops.matmul(X[0], W.t()), ValueError, "add a dimension"),
    (lambda: course_ops.linear(X, W.t()), ValueError, r"weight \(6, 5\)"),
    (lambda: course_ops.linear(X, W, torch.ones(4)), ValueError, r"bias has shape \(4,\)"),
    (lambda: course_ops.linear(X, W, residual=torch.ones(4, 4)), ValueError, "residual has shape"),
    (lambda: course_ops.linear(X, W, activation="gelu"), course_ops.Unsupported, "gelu_tanh"),
    (lambda: course_ops.quantize(X, "columns"), ValueError, "expected one of tensor, rows"),
    (lambda: course_ops.quantize(X[None], "rows"), ValueError, "x has 3 dimension"),
    (lambda: course_ops.quantize(X.clone().requires_grad_(), "rows"), ValueError, "quantize has no gradient"),
    (lambda: course_ops.matmul_fp8(X, S, Q.t(), S), TypeError, "a is torch.float32"),
    (lambda: course_ops.matmul_fp8(Q, S, Q, S), ValueError, "a has 6 columns and b 4 rows"),
    (lambda: course_ops.matmul_fp8(Q, torch.ones(3, 1), Q.t(), S), ValueError, "expected one of"),
    (lambda: course_ops.matmul_fp8(Q, S.clone().requires_grad_(), Q.t(), S), ValueError, "a_scale requires grad"),
    (lambda: course_ops.grouped_matmul(X, torch.ones(2, 5, 3), offsets(0, 2, 4)), ValueError, r"w\[e\] 5 rows"),
    (lambda: course_ops.grouped_matmul(X, torch.ones(2, 6, 3), offsets(0, 4)), ValueError, "2 offsets for 2 group"),
    (lambda: course_ops.grouped_matmul(X, torch.ones(2, 6, 3), offsets(0, 3, 2)), ValueError, r"offsets \[0, 3, 2\]"),
    (lambda: course_ops.grouped_matmul(X, ONE, torch.tensor([0, 4])), TypeError, "offsets is torch.int64"),
    (lambda: course_ops.grouped_matmul(X, ONE.clone().requires_grad_(), offsets(0, 4)), ValueError, "w requires grad"),
    (lambda: course_ops.scan(X), ValueError, r"expected \[n\]: for sums along a dimension call torch.cumsum"),
    (lambda: course_ops.scan(torch.arange(3)), TypeError, "x is torch.int64"),
)  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


# ---- The lessons' machine code ------------------------------------------------------------------------------------

BF16 = torch.bfloat16
TENSORS = {"tensor": 4096, "rows": 4096, "blocks": 8192}  # a kernel for each scheme


def same_code_cases():
    """{case: (the lesson's rung, the operator's launcher, arguments)}, made in a compiling process."""
    from course_ops.kernels import grouped_matmul, linear, matmul_fp8_hopper, scan
    from day2_triton_basics import lesson15_scan
    from day3_matmul_tk import (
        lesson01_matmul,
        lesson02_matmul_persistent,
        lesson03_matmul_skinny,
        lesson04_matmul_epilogue,
        lesson06_matmul_fp8,
        lesson08_grouped_matmul,
        lesson09_matmul_hopper,
        lesson10_matmul_small_outputs,
        lesson12_matmul_fp8_blocks,
    )

    launch = {kernel.name: kernel.launch for kernel in sys.modules["course_ops.matmul"].DISPATCH}

    def operands(M, N, K, transposed=""):
        return lesson10_matmul_small_outputs.LESSON.inputs(M, N, K, dtype=BF16, transposed=transposed)

    def fp8(scheme):
        kernel = matmul_fp8_hopper.fp8_promote_hopper if scheme == "blocks" else matmul_fp8_hopper.fp8_sum_hopper
        n = TENSORS[scheme]
        args = lesson06_matmul_fp8.LESSON.inputs(n, n, n, scheme)
        return lesson12_matmul_fp8_blocks.matmul_fp8, lambda *args: kernel(*args, scheme), args

    hopper, skinny = lesson09_matmul_hopper.tile_choice, lesson03_matmul_skinny.matmul_skinny
    epilogue = lesson04_matmul_epilogue
    return {
        "hopper": lambda: (hopper, launch["hopper"], operands(4096, 4096, 4096)),
        "hopper, narrow tiles": lambda: (hopper, launch["hopper"], operands(1024, 1024, 1024)),
        "split K": lambda: (lesson10_matmul_small_outputs.fitted, launch["split_k"], operands(128, 4096, 14336, "b")),
        "one wave": lambda: (lesson10_matmul_small_outputs.fitted, launch["split_k"], operands(1024, 1024, 1024)),
        "Stream-K": lambda: (skinny, launch["skinny"], operands(16, 8192, 4096, "b")),
        "one row": lambda: (skinny, launch["skinny"], operands(1, 4096, 4096, "b")),
        "TMA": lambda: (lesson02_matmul_persistent.matmul, launch["tma"], operands(1024, 1024, 1024)),
        "pointers": lambda: (lesson01_matmul.pipelined, launch["pointers"], operands(300, 40, 35)),
        "fp8 tensor": lambda: fp8("tensor"),
        "fp8 rows": lambda: fp8("rows"),
        "fp8 blocks": lambda: fp8("blocks"),
        "linear": lambda: (
            epilogue.linear_gelu,
            lambda *given: linear.prepare_tma(*given, None, True)(*given, None),
            epilogue.LESSON.inputs(8192, 4096, 4096, residual=True, dtype=BF16),
        ),
        "grouped": lambda: (
            lesson08_grouped_matmul.grouped_matmul,
            grouped_matmul.grouped_tma,
            lesson08_grouped_matmul.LESSON.inputs(8192, 8, 4096, 4096, dtype=BF16),
        ),
        "scan": lambda: (lesson15_scan.scan_look_back, scan.scan_look_back, lesson15_scan.inputs(2**20)),
    }


CASES = (
    "hopper", "hopper, narrow tiles", "split K", "one wave", "Stream-K", "one row", "TMA",
    "pointers", "scan",
    "fp8 tensor", "fp8 rows", "fp8 blocks", "linear", "grouped",
)  # fmt: skip


@pytest.mark.night
@pytest.mark.parametrize("case", CASES)
def test_a_lessons_last_rung_is_the_operators_kernel(case):
    """Compiled for sm_90 both are the same machine code with the same grid, warps and shared memory."""
    theirs, ours = call_in_compiler("tests.test_course_ops_matmul", "launches_of", case)
    assert theirs
    if case == "split K" and triton.__version__.startswith("3.6."):
        # It numbers registers by how arguments reach a partition: the lesson passes classes, the operator tuples.
        theirs, ours = ([launch[1:] for launch in launches] for launches in (theirs, ours))
    assert ours == theirs


def launches_of(case):
    """What lesson and operator launch: [machine code, grid, warps, shared memory] each. In a compiling process."""
    from lessonkit.measure.launches import recording

    found = []
    with recording() as events:
        rung, launcher, args = same_code_cases()[case]()
        for launch in (rung, launcher):
            events.clear()
            launch(*args)
            found.append([list(map(str, event[2:6])) for event in events if event[0] == "kernel"])
    return found
