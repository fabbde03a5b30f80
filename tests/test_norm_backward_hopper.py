"""The norms' backward on Hopper: values, races and deadlocks emulated, mutants, machine code."""

from lessonkit import device
from lessonkit.modes import compiled
from lessonkit.modes import gluon as emulated
from lessonkit.modes.compile_server import call_in_compiler

import pytest
import torch

from course_ops.kernels import norm_backward_hopper as hopper
from course_ops.layer_norm import layer_norm_backward_cpu
from tests import kernel_copies

pytestmark = pytest.mark.kept("course_ops/*.py", "course_ops/kernels/*.py", "tests/kernel_copies.py")
emulates = pytest.mark.skipif(not device.INTERPRETED, reason="with a GPU nothing is emulated")


def gradients(module, M, N, parts, warps, centred=True, bias=True, dtype=torch.bfloat16, pad=0):
    """Ours of few columns, by `parts` programs of `warps` warps; and PyTorch's, in fp32. Rows are N + pad apart."""
    torch.manual_seed(0)
    module.programs_of = lambda *asked: (parts, warps)
    dy, x = (torch.randn(M, N + pad).to(dtype)[:, :N] for _ in range(2))
    x += torch.arange(M)[:, None] % 7
    dy += 1
    w = (torch.randn(N) + 1).to(dtype)
    mean = x.float().mean(-1) if centred else torch.zeros(M)
    rstd = torch.rsqrt((x.float() - mean[:, None]).square().mean(-1) + 1e-5)
    found = module.norm_backward_hopper(dy, x, w, mean if centred else None, rstd, bias)
    dx, dw, db = layer_norm_backward_cpu(dy, x, w, mean, rstd)
    if not centred:
        dx += rstd[:, None] * (dy.float() * w.float()).mean(-1, keepdim=True)
    return zip(found if bias else found[:2], (dx, dw, db) if bias else (dx, dw), strict=True)


def expect_right(pairs):
    for found, exact in pairs:
        torch.testing.assert_close(found.float(), exact, rtol=2**-7, atol=2**-7 * exact.abs().amax().item() / 4)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(hopper, "programs_of", hopper.programs_of)


# Four SMs are emulated: four groups of one program, two of two, one of four.
CASES = (
    {"M": 30, "N": 4224, "parts": 1, "warps": 16},  # more rows than stages
    {"M": 3, "N": 4224, "parts": 1, "warps": 8, "bias": False},  # fewer rows than SMs
    {"M": 13, "N": 6208, "parts": 1, "warps": 8, "centred": False, "bias": False},
    {"M": 9, "N": 8256, "parts": 2, "warps": 8, "dtype": torch.float16},
    {"M": 7, "N": 16640, "parts": 4, "warps": 8, "centred": False, "bias": False},
    {"M": 6, "N": 4160, "parts": 1, "warps": 8, "pad": 24},
)


@emulates
@pytest.mark.parametrize("i", range(len(CASES)))
def test_values(i):
    expect_right(gradients(hopper, **CASES[i]))


@emulates
@pytest.mark.parametrize("seed", range(1, 4))
def test_values_in_other_orders_of_the_hardware(monkeypatch, seed):
    monkeypatch.setattr(emulated, "SEED", seed)
    for i in (0, 3):
        expect_right(gradients(hopper, **CASES[i]))


MUTANTS = {  # what is wrong: (old, new, kinds of Fault or "value", case)
    "a stage is released before dx is computed": (
        "        a = -(c1 / N)", "        mbarrier.arrive(empty.index(stage))\n        a = -(c1 / N)",
        "race barrier", 0,
    ),
    "no stage is released": ("        mbarrier.arrive(empty.index(stage))\n", "", "barrier", 0),
    "a row is not waited for": (
        "        mbarrier.wait(full.index(ahead_stage), ahead_parity, there)\n", "", "race barrier", 0,
    ),
    "half of the bytes are waited for": ("BYTES: gl.constexpr = 2 *", "BYTES: gl.constexpr = 1 *", "race barrier", 0),
    "the mean of the row before": ("next_mean if AHEAD else mean", "mean", "value", 3),
    "the mean of the next row": ("next_mean if AHEAD else mean", "next_mean", "value", 0),
    "parts begin at one column": ("% PARTS * (FULL * BLOCK + LAST)", "% PARTS * 0", "value", 3),
    "one part's sums alone": ("gl.where(slots < PARTS, (words >> 32)", "gl.where(slots < 1, (words >> 32)", "value", 3),
    "c2 is forgotten": ("        b = -(c2 / N) * rstd", "        b = -(c2 / N) * 0.0", "value", 0),
    "dw of the last row alone": ("return dw + scaled * centred", "return scaled * centred", "value", 0),
    "w of the first block in each": (
        "w_smem.index(chunk), begin + chunk * BLOCK, N, WARPS),)", "w_smem.index(chunk), begin, N, WARPS),)",
        "value", 3,
    ),
    "x in the first block's place": ("async_load(x_desc, [row, at, 0]", "async_load(x_desc, [row, 0, 0]", "value", 3),
}  # fmt: skip


@emulates
@pytest.mark.parametrize("why", MUTANTS)
def test_mutants_are_rejected(tmp_path, why):
    """By what each names, in this order of the hardware or in another."""
    old, new, kinds, i = MUTANTS[why]
    module = kernel_copies.changed(hopper, old, new, tmp_path)
    found = kernel_copies.caught_by(lambda: expect_right(gradients(module, **CASES[i])), orders=4)
    assert found in kinds.split()


# ---- Machine code ------------------------------------------------------------------------------------------------


def compiled_kernel(N, centred):
    """In the process that compiles: registers, spills, shared memory, bytes of the widest load and store."""
    x, stats = torch.empty(999, N, dtype=torch.bfloat16, device="meta"), torch.empty(999, device="meta")
    with compiled.compiling(90) as made:
        hopper.norm_backward_hopper(x, x, x[0], stats if centred else None, stats, centred)
    row = compiled.inspect("norms", made["norm_backward_hopper_kernel"], 90)
    return [row.registers, row.spills, row.shared, row.load_bytes, row.store_bytes]


@pytest.mark.night
@pytest.mark.parametrize(
    ("N", "centred", "most"),
    [
        (12672, True, 2),  # none with Triton 3.6, 2 with 3.7
        (18944, True, 0),
        (16384, False, 0),
        (32768, False, 0),
    ],
)
def test_machine_code(N, centred, most):
    """Next to no spills; 16 bytes a thread; shared memory as a block of sm_90 has."""
    registers, spills, shared, load, store = call_in_compiler(
        "tests.test_norm_backward_hopper", "compiled_kernel", N, centred
    )
    assert spills <= most
    assert (load, store) == (16, 16)
    assert registers * 32 * (16 + 4 if registers < 128 else 8 + 4) <= 65536
    assert shared <= 232448


@pytest.mark.parametrize(
    ("M", "N", "bias", "expected"),
    [
        (5440, 12672, True, (1, 16)),
        (4096, 18944, True, (2, 8)),
        (4096, 16384, False, (1, 16)),
        (2048, 32768, False, (3, 8)),
        (8192, 8192, True, None),  # whole rows in registers are as fast
        (2048, 32768, True, None),
        (5440, 12672, False, None),
        (4096, 131072, False, None),
        (5440, 12680, True, None),  # TMA sees a row as a matrix of 64 columns or more
        (100, 12672, True, None),  # a row of its own for each SM: parts of a row are sooner done
    ],
)
def test_rows_of_an_h200_that_it_takes(monkeypatch, M, N, bias, expected):
    """Each was measured, but for the last two."""
    monkeypatch.setattr(hopper, "runs_gluon", lambda x: True)
    monkeypatch.setattr(hopper, "num_sms", lambda device: 132)
    monkeypatch.setattr(hopper, "tma_takes", lambda *tensors: True)
    x = torch.empty(M, N, dtype=torch.bfloat16, device="meta")
    assert hopper.norm_backward_hopper_takes(x, x, bias) == (expected is not None)
    assert expected is None or hopper.programs_of(N, bias) == expected
