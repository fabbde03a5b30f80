"""The backward for heads up to 128 on Hopper, emulated: plain, causal, and windows. Each CTA has one tile here."""

import re

from lessonkit import device
from lessonkit.modes import gluon as emulated
from lessonkit.modes.compile_server import call_in_compiler

import pytest
import torch

from course_ops.attention import _computed
from course_ops.kernels import attention_backward_hopper as hopper
from tests import kernel_copies
from tests.test_course_ops_attention import heads, near, theirs
from tests.test_flash_hopper_backward import main_loops

pytestmark = [
    pytest.mark.kept("course_ops/*.py", "course_ops/kernels/*.py", "tests/kernel_copies.py"),
    pytest.mark.skipif(not device.INTERPRETED, reason="with a GPU nothing is emulated"),
]


def nothing():
    """Interpreted, no kernel is launched early."""


nothing.__module__ = "triton.language.extra.libdevice"  # of which a kernel's hash is not made


def prepared(monkeypatch, module):
    """A CTA for each tile: after a tile's last step S is that of an old Q, over which the next tile's may be loaded; it
    is not used, but reading it is a race. finish_kernel and prepare_kernel are Triton's, whose interpreter lacks words.
    """
    monkeypatch.setattr(module, "num_sms", lambda device: 1000)
    for name in ("gdc_wait", "gdc_launch_dependents"):
        monkeypatch.setattr(module, name, nothing)


def expect_right(shape, causal, window, dtype=torch.bfloat16, backward=hopper.attention_backward):
    torch.manual_seed(0)
    q, k, v = heads("cpu", *shape, dtype=dtype)
    dout, scale = (torch.randn(*q.shape[:-1], v.shape[-1]) + 0.5).to(dtype), q.shape[-1] ** -0.5
    out, lse = _computed(*(t.double() for t in (q, k, v)), causal, window, scale)
    found = [backward(dout, q, k, v, out.to(dtype), lse.float(), causal, scale, window)]
    for other in (dtype, torch.float64):
        q_, k_, v_ = (t.to(other).requires_grad_() for t in (q, k, v))
        expected, _ = theirs(q_, k_, v_, causal, window, None)
        found.append([g.nan_to_num() for g in torch.autograd.grad(expected, (q_, k_, v_), dout.to(other))])
    for mine, their, exact in zip(*found, strict=True):
        near(mine, their + (their - exact.to(their.dtype)), exact)


CASES = (  # B, H, S_q, D, S_k, H_kv, D_v if not D; causal, window
    ((1, 1, 200, 128, 333, 1), False, None),
    ((1, 2, 600, 64, 600, 1), True, None),
    ((1, 2, 600, 128, 600, 2), True, 70),  # few steps: no ping-pong
    ((1, 1, 600, 128, 600, 1), True, 450),  # ping-pong, and consumer 1 leaves out an unseen block
    ((1, 2, 600, 128, 700, 1), True, 450),  # the late dQ of a head that ends before the last block
    ((1, 2, 600, 64, 700, 1), True, 33),
    ((1, 1, 700, 96, 130, 1), True, 33),  # the first 570 queries see nothing
    ((1, 2, 100, 128, 900, 1), True, 64),  # no query sees the first keys
    ((1, 2, 900, 64, 900, 1), True, 256),
    ((1, 2, 200, 128, 333, 1, 64), True, None),
    ((1, 1, 300, 40, 200, 1, 104), False, None),
    ((1, 2, 200, 24, 200, 2, 64), True, 70),
    ((1, 1, 600, 96, 600, 1), True, None),  # 96 of a tile's 128 columns are multiplied
    ((1, 2, 200, 72, 333, 1, 88), False, None),
    ((1, 1, 1100, 64, 200, 1), True, None),  # ping-pong of D = 64
)


@pytest.mark.parametrize("i", range(len(CASES)))
def test_values(monkeypatch, i):
    prepared(monkeypatch, hopper)
    expect_right(*CASES[i], (torch.bfloat16, torch.float16)[i % 2])


# B, H, S_q, D, S_k, H_kv; causal, window: in the first a tile has one step, and in the next more than the ring holds.
TILES = (
    ((1, 2, 100, 40, 400, 2), False, None),
    ((1, 3, 300, 64, 300, 3), True, None),
    ((1, 4, 300, 64, 400, 2), True, 70),
)


def with_several_tiles(monkeypatch, module, folder, sms):
    """A copy without S of an old Q, on so many SMs."""
    module = kernel_copies.changed(module, "ring_slot(step + 1, ", "ring_slot(min(step + 1, self.end - 1), ", folder)
    prepared(monkeypatch, module)
    monkeypatch.setattr(module, "num_sms", lambda device: sms)
    return module


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("i", range(len(TILES)))
def test_several_tiles_of_a_cta(monkeypatch, tmp_path, i, seed):
    """With few queries K and V of two tiles are in shared memory."""
    module = with_several_tiles(monkeypatch, hopper, tmp_path, sms=1 + seed)
    monkeypatch.setattr(emulated, "SEED", seed)
    expect_right(*TILES[i], backward=module.attention_backward)


@pytest.mark.parametrize(
    ("old", "new"),
    [("    at, _ = ring_slot(count, args.k_full.shape[0])\n    for half", "    at = 0\n    for half"),
     ("half = count % 2 * 2", "half = 0 * count"),
     ("    tma.store_wait(0)\n\n\n@gluon.jit\ndef load_halves", "\n\n@gluon.jit\ndef load_halves")],
    ids=["dK and dV of another tile", "K and V of another tile", "loaded over what TMA stores"],
)  # fmt: skip
def test_mutants_of_several_tiles_are_rejected(monkeypatch, tmp_path, old, new):
    module = with_several_tiles(monkeypatch, kernel_copies.changed(hopper, old, new, tmp_path), tmp_path, sms=1)
    assert kernel_copies.caught_by(lambda: expect_right(*TILES[1], backward=module.attention_backward), orders=4)


MUTANTS = {  # what is wrong: (old, new, kind of Fault or "value", case)
    "the window's edge is not masked": ("whole, last = min(whole, end), self.first_past(key, end, ROWS)",
                                        "whole, last = min(whole, end), end", "value", 8),
    "a consumer's edge is not masked": ("            last = self.first_past(key, end, ROWS)\n",
                                        "            last = end\n", "value", 3),
    "a window one key too long": ("keys > rows + (row + S_k - S_q - key - c",
                                  "keys >= rows + (row + S_k - S_q - key - c", "value", 3),
    "a window ends a block early": ("(max(0, ahead + 2 * KEYS - 1) + ROWS - 1) // ROWS))", "max(0, ahead) // ROWS))",
                                    "value", 8),
    "a tile that no query sees has no step": ("max(begin + 1, (max(0, ahead + 2", "max(begin, (max(0, ahead + 2",
                                              "barrier", 7),
    "the late dQ of a head as without a window": ("unseen = blocks - stop + begin", "unseen = begin", "value", 4),
    "no columns past 64 in the scores": ("        return warpgroup_mma(k, q.permute((1, 0)), s, is_async=True)",
                                         "        return s", "value", 12),
    "a short part of dQ read as a whole one": ("16 * (COLUMNS - 64))", "1024)", "value", 12),
    "values of a head over the head's before": ("line = head * rows\n", "line = 0 * head\n", "value", 1),
    "delta without its sign": ("deltas_ptr + line + at, -tl.sum(", "deltas_ptr + line + at, tl.sum(", "value", 0),
    "the last dQ as without a window": ("part -= 2 * (blocks - stop)", "part -= 0", "value", 4),
}  # fmt: skip


@pytest.mark.parametrize("why", MUTANTS)
def test_mutants_are_rejected(monkeypatch, tmp_path, why):
    old, new, kind, i = MUTANTS[why]
    module = kernel_copies.changed(hopper, old, new, tmp_path)
    prepared(monkeypatch, module)
    found = kernel_copies.caught_by(lambda: expect_right(*CASES[i], backward=module.attention_backward))
    assert found == kind


def compiled_kernel(D, H_kv, window):
    """In the process that compiles: machine code, shared memory, whether wgmma is serialized."""
    from lessonkit.cuda import sass
    from lessonkit.modes import compiled

    q = torch.empty(2, 8, 4096, D, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(2, 8, 4096, device="meta")
    with compiled.compiling(90) as made:
        hopper.attention_backward(q, q, q[:, :H_kv], q[:, :H_kv], q, lse, True, 0.1, window)
        kernel = made["attention_backward_hopper_kernel"]
        row = compiled.inspect("hopper", kernel, 90)
        with compiled.as_file(kernel.asm["cubin"]) as cubin:
            text = compiled.tool("cuobjdump", "-sass", cubin)
    code = [(int(at, 16), line) for at, line in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(\S.*?) *;", text)]
    return [code, row.shared, bool(sass.serialized(row))]


@pytest.mark.parametrize(
    ("D", "H_kv", "window"),
    [pytest.param(D, H_kv, window, marks=() if (D, H_kv, window) == (128, 8, 1024) else pytest.mark.night)
     for D in (64, 128) for H_kv in (8, 2) for window in (256, 1024)],
)  # fmt: skip
def test_machine_code(D, H_kv, window):
    """wgmma stays asynchronous with a window, too, and the loops without masks spill nothing or little.

    Grouped heads need more registers. With Triton 3.7 a step of the loop loads up to 13 of them back, with 3.6 up to 8.
    Without groups it loads none, or with 3.6 at D = 64 one. A step takes some thousand cycles.
    """
    code, shared, serialized = call_in_compiler(
        "tests.test_attention_backward_window", "compiled_kernel", D, H_kv, window
    )
    assert not serialized
    assert shared <= 232448
    whole = [loop for loop in main_loops(code) if not loop["FSEL"]]
    assert len(whole) == 2  # of each consumer
    most = 13 if H_kv == 2 else 1 if D == 64 else 0
    assert all(max(loop["LDL"], loop["STL"]) <= most for loop in whole)
