"""The backward of rows of 136 to 192, and of V up to 128, on Hopper: values, races and deadlocks emulated, mutants,
machine code."""

from lessonkit import device
from lessonkit.cuda import sass
from lessonkit.modes import compiled
from lessonkit.modes import gluon as emulated
from lessonkit.modes.compile_server import call_in_compiler

import pytest
import torch

from course_ops.kernels import attention_backward_192_hopper as kernel_file
from course_ops.kernels import attention_backward_hopper
from tests import kernel_copies
from tests.test_attention_backward_wide import expect_right, gradients

pytestmark = pytest.mark.kept("course_ops/*.py", "course_ops/kernels/*.py", "tests/kernel_copies.py")
emulates = pytest.mark.skipif(not device.INTERPRETED, reason="with a GPU nothing is emulated")


@pytest.fixture(autouse=True)
def _one_kernel_after_the_other(monkeypatch):
    """Interpreted, no kernel is launched early. prepare_kernel is Triton's, whose interpreter lacks the word."""
    torch.manual_seed(0)
    if device.INTERPRETED:
        monkeypatch.setattr(attention_backward_hopper, "gdc_launch_dependents", lambda: None)
        monkeypatch.setattr(attention_backward_hopper, "gdc_wait", lambda: None)


CASES = (  # B, H, S_q, D, S_k, H_kv, D_v; causal, window
    ((1, 1, 64, 192, 64, 1, 128), False, None),  # one block; the second consumer has no key
    ((2, 1, 70, 192, 333, 1, 128), False, None),  # tails of queries and of keys
    ((1, 2, 200, 192, 200, 1, 128), True, None),  # two query heads share K and V
    ((1, 4, 130, 160, 260, 2, 72), True, None),  # the rest has 32 of 64 columns; more keys than queries
    ((1, 1, 300, 192, 130, 1, 128), True, None),  # the first 170 queries see nothing
    ((1, 2, 333, 136, 333, 1, 128), True, 70),  # a window that begins within a block
    ((1, 1, 100, 192, 500, 1, 64), True, 100),  # no query sees the first keys
)


@emulates
@pytest.mark.parametrize("i", range(len(CASES)))
def test_values(i):
    dtype = (torch.bfloat16, torch.float16)[i % 2]
    expect_right(gradients(*CASES[i], dtype=dtype, backward=kernel_file.attention_backward))


@emulates
@pytest.mark.parametrize("seed", range(1, 4))
def test_values_in_other_orders_of_the_hardware(monkeypatch, seed):
    monkeypatch.setattr(emulated, "SEED", seed)
    for i in (1, 2, 5):
        expect_right(gradients(*CASES[i], backward=kernel_file.attention_backward))


MUTANTS = {  # what is wrong: (old, new, kind of Fault or "value", case)
    "dS written while dQ reads it": (
        "        mbarrier.wait(args.ds_read.index(0), step & 1 ^ 1)\n", "", "race", 2,
    ),
    "dQ of the own keys' dS alone": ("        mbarrier.wait(args.met.index(0), step & 1)\n", "", "race", 2),
    "a part of dQ written while TMA reads it": ("    tma.store_wait(1)", "    tma.store_wait(2)", "race", 2),
    "dK written while the other consumer reads K": (
        "        mbarrier.wait(args.k_read.index(0), count & 1)\n", "", "race", 2,
    ),
    "the rest is not multiplied": ("    if keys.rest is not None:", "    if False:", "value", 0),
    "the rest of dQ in the place of the other consumer's": ("128 + WHICH * 32", "128 + (1 - WHICH) * 32", "value", 2),
    "a head's dQ over the head's before": ("part + blocks\n", "part\n", "value", 2),
    "the window's end is not masked": (
        "main_loop(c, s, dk, dv, base, last, stop, part, True)",
        "main_loop(c, s, dk, dv, base, last, stop, part, False)", "value", 5,
    ),
}  # fmt: skip


@emulates
@pytest.mark.parametrize("why", MUTANTS)
def test_mutants_are_rejected(tmp_path, why):
    """By what each names, in this order of the hardware or in another."""
    old, new, kinds, i = MUTANTS[why]
    module = kernel_copies.changed(kernel_file, old, new, tmp_path)

    def run():
        expect_right(gradients(*CASES[i], backward=module.attention_backward))

    assert kernel_copies.caught_by(run, orders=8) in kinds.split()


def compiled_kernel(causal, window):
    """In the process that compiles: registers, spills, shared memory, serialized."""
    q, k, v, dout = (torch.empty(2, H, 4096, D, dtype=torch.bfloat16, device="meta")
                     for H, D in ((8, 192), (4, 192), (4, 128), (8, 128)))  # fmt: skip
    lse = torch.empty(2, 8, 4096, device="meta")
    with compiled.compiling(90) as made:
        kernel_file.attention_backward(dout, q, k, v, dout, lse, causal, window, 0.1)
        (row,) = [compiled.inspect("192", kernel, 90) for kernel in made.values() if kernel.src.fn.is_gluon()]
    return row.registers, row.spills, row.shared, bool(sass.serialized(row))


@pytest.mark.parametrize(
    ("causal", "window", "most"),
    [
        pytest.param(False, None, 48, marks=pytest.mark.night),  # 39 with Triton 3.6, 43 with 3.7
        (True, None, 200),  # outside the loop over blocks without a mask: 186 and 167
        pytest.param(True, 1024, 560, marks=pytest.mark.night),  # 257 and 525
    ],
)
def test_machine_code(causal, window, most):
    """wgmma stays asynchronous, an SM's shared memory suffices, and few values go to memory."""
    registers, spills, shared, serialized = call_in_compiler(
        "tests.test_attention_backward_192", "compiled_kernel", causal, window
    )
    assert not serialized
    assert registers <= 168
    assert spills <= most
    assert shared <= 232448
