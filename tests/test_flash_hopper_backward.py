"""Day 4's backward on Hopper: wgmma stays asynchronous in every rung, and the last rung has the shipped main loops."""

import re
from collections import Counter
from contextlib import contextmanager
from importlib import import_module

from lessonkit.measure import rows
from lessonkit.modes import compiled
from lessonkit.modes.compile_server import call_in_compiler

import pytest
import torch

from problems.attention import inputs_backward

FOLDER = "day4_replace_op.flash_hopper_backward"
RUNGS = ("five_matmuls", "overlap_matmuls", "tma_reduce", "persistent_scheduler", "ping_pong", "causal_skip")
SHIPPED = "course_ops.kernels.attention_backward_hopper"
# What a step does. Addresses and loop counters are left out: the shipped kernel takes longer keys than queries, too.
WORK = ("HGMMA", "WARPGROUP", "MUFU", "F2FP", "FMUL", "FADD", "FFMA", "FSEL")
WORK += ("LDS", "STS", "STSM", "LDL", "STL", "SYNCS", "BAR", "UTMAREDG", "DEPBAR")


def shipped(*args):
    *tensors, causal, _window, _scale = args
    return import_module(SHIPPED).attention_backward(*tensors, causal, tensors[1].shape[-1] ** -0.5)


@contextmanager
def gluon_kernel(name, D, causal):
    """The rung's or the shipped Gluon kernel for sm_90, as Triton compiled it. In a process that compiles."""
    fn = shipped if name == "shipped" else getattr(import_module(f"{FOLDER}.{name}"), name)
    with compiled.compiling(90) as made:
        made.clear()
        fn(*inputs_backward(4, 2048 // D, 4096, D, causal=causal, dtype=torch.bfloat16))
        (kernel,) = (kernel for kernel in made.values() if kernel.src.fn.is_gluon())
        yield kernel


def matmuls_and_waits(name, D, causal):
    with gluon_kernel(name, D, causal) as kernel:
        counted = compiled.inspect(name, kernel, 90)
    return counted.wgmma, counted.waits


def machine_code(name, D, causal):
    """Its instructions as (address, text)."""
    with gluon_kernel(name, D, causal) as kernel, compiled.as_file(kernel.asm["cubin"]) as cubin:
        sass = compiled.tool("cuobjdump", "-sass", cubin)
    return [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(\S.*?) *;", sass)]


def opcode(text):
    return re.match(r"(?:@!?U?P\w+ )?([A-Z]\w*)", text)[1]


def main_loops(code):
    """What each loop over blocks of queries executes: the shortest loops that contain a step's 32 wgmma."""
    index, found = {at: i for i, (at, _) in enumerate(code)}, []
    for end, (_, text) in enumerate(code):
        jump = re.search(r"\bBRA\b.* (0x[0-9a-f]+)$", text)
        begin = index.get(int(jump[1], 16), end) if jump else end
        ops = Counter(opcode(t) for _, t in code[begin : end + 1])
        if ops["HGMMA"] == 32 and "EXIT" not in ops and not any(begin <= b and e <= end for b, e, _ in found):
            found.append((begin, end, ops))
    return [{op: ops[op] for op in WORK} for _, _, ops in found]


CASES = [
    pytest.param(name, D, causal, marks=() if (name, causal) == ("causal_skip", True) else pytest.mark.night)
    for name in RUNGS
    for D in (128, 64)
    for causal in (True, False)
]


@pytest.mark.parametrize(("name", "D", "causal"), CASES)
def test_wgmma_is_asynchronous(name, D, causal):
    """ptxas waits after each wgmma where it lacks registers; a kernel then takes 1.3 times as long, and is right."""
    wgmma, waits = call_in_compiler("tests.test_flash_hopper_backward", "matmuls_and_waits", name, D, causal)
    assert 0 < waits < wgmma / 2


@pytest.mark.night
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all keys"])
@pytest.mark.parametrize("D", [128, 64])
def test_the_last_rung_has_the_shipped_kernels_main_loops(D, causal):
    """Masked and unmasked, of both consumers. The shipped kernel also masks keys past the last one."""
    rung, ours = (
        main_loops(call_in_compiler("tests.test_flash_hopper_backward", "machine_code", name, D, causal))
        for name in ("causal_skip", "shipped")
    )
    if not causal:
        ours = [loop for loop in ours if not loop["FSEL"]]
    assert len(rung) == (4 if causal else 2)
    assert rung == ours


@pytest.mark.release
def test_what_the_lessons_say_of_ping_pong():
    """In front of both lessons, of ping_pong.py in both folders, and where lesson 5 is held against lesson 4."""
    ms = {}
    for lesson in ("lesson04_flash_v2", "lesson05_flash_options", "lesson08_flash_hopper",
                   "lesson09_flash_hopper_backward"):  # fmt: skip
        found = rows.read(rows.REPORTS / rows.MACHINE / f"day4_replace_op.{lesson}.csv")
        ms[lesson[:8]] = {(row.rung, row.shape): row.ms_p50 for row in found}

    def gains(lesson, before, **wanted):
        """rung ping_pong over an earlier one, at each shape with these sizes."""
        of = ms[lesson]
        for rung, shape in of:
            sizes = dict(size.split("=") for size in shape.split())
            if rung == "ping_pong" and wanted.items() <= sizes.items():
                yield int(sizes["S"]), of[before, shape] / of[rung, shape]

    assert {f"{gain:.2f}" for _, gain in gains("lesson08", "overlap_softmax")} <= {"0.99", "1.00", "1.01", "1.02"}
    long = [gain for S, gain in gains("lesson09", "persistent_scheduler", D="64") if S >= 2048]
    assert (f"{min(long):.2f}", f"{max(long):.2f}") == ("1.07", "1.16")
    assert f"{max(gain for _, gain in gains('lesson09', 'persistent_scheduler', D='128')):.2f}" in ("1.02", "1.03")
    at = "B=4 H=16 S=4096 D=128"
    (general,) = (t for (rung, shape), t in ms["lesson05"].items() if rung == "attention" and at in shape
                  and "causal=True" not in shape)  # fmt: skip
    (plain,) = (t for (rung, shape), t in ms["lesson04"].items() if rung == "flash_v2" and at in shape)
    assert f"{1 - plain / general:.0%}" == "16%"
