"""Day 4's forward on Hopper: the last rung does the shipped kernel's work, and each rung can be read alone."""

import ast
import re
from collections import Counter
from importlib import import_module

from lessonkit.base.files import ROOT
from lessonkit.modes import compiled
from lessonkit.modes.compile_server import call_in_compiler

import pytest
import torch

from problems.attention import inputs

FOLDER = ROOT / "day4_replace_op" / "flash_hopper"
RUNGS = [path for path in sorted(FOLDER.glob("*.py")) if path.stem not in ("cpu_model", "mutants")]
LAST, SHIPPED = "day4_replace_op.flash_hopper.causal_diagonal", "course_ops.kernels.attention_forward_hopper"


def last_rung(*args):
    return import_module(LAST).causal_diagonal(*args)


def shipped(q, k, v, causal, *_):
    return import_module(SHIPPED).attention_forward(q, k, v, causal, None, q.shape[-1] ** -0.5)


# Instructions of tensor cores, copies, barriers and the softmax. The rest is index arithmetic, which the shipped kernel
# has more of: it also takes windows and values of another head size.
WORK = ("HGMMA", "WARPGROUP", "WARPSYNC", "SYNCS", "DEPBAR", "BAR", "UTMALDG", "UTMASTG", "MUFU.EX2", "FMNMX", "FFMA",
        "FMUL", "FADD", "F2FP", "SHFL", "REDUX", "STSM", "LDS", "STS", "STG", "USETMAXREG")  # fmt: skip
# In packed sequences a consumer may have no query: it releases tiles of K and V that it does not read. Each of two
# consumers waits and arrives for K and for V there. The compiler adds a retry to each wait, and barriers of the warps.
MORE = {"BAR.SYNC.DEFER_BLOCKING": 10, "SYNCS.PHASECHK.TRANS64.TRYWAIT": 8, "SYNCS.ARRIVE.TRANS64.A1T0": 4}


def machine_code(fn, D, causal):
    """The instructions of its kernel for sm_90, without predicates. In a process that compiles."""
    with compiled.compiling(90) as made:
        made.clear()
        fn(*inputs(4, 2048 // D, 4096, D, causal=causal, dtype=torch.bfloat16))
        (kernel,) = made.values()
    with compiled.as_file(kernel.asm["cubin"]) as cubin:
        sass = re.sub(r"/\*.*?\*/", "", compiled.tool("cuobjdump", "-sass", cubin))
    return re.findall(r"^\s*(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+[^;]*?) *;", sass, re.MULTILINE)


def instructions(D, causal):
    """How often each of the WORK occurs in both."""
    found = []
    for fn in (last_rung, shipped):
        opcodes = [text.split()[0] for text in machine_code(fn, D, causal)]
        work = Counter(opcode for opcode in opcodes if opcode.startswith(WORK))
        assert {"HGMMA", "MUFU", "SYNCS", "UTMALDG", "UTMASTG"} <= {opcode.split(".")[0] for opcode in work}
        found.append(dict(work))
    return found


def exponentials_under_pv(rung, D):
    """Of each consumer's main loop: MUFU.EX2 between the wait that leaves PV unfinished, and the wait for PV."""
    fn = getattr(import_module(f"day4_replace_op.flash_hopper.{rung}"), rung)
    code = "\n".join(machine_code(fn, D, causal=False))
    return [under.count("MUFU.EX2") for under in re.findall(r"gsb0, 0x1\n(.*?)gsb0, 0x0$", code, re.S | re.M)]


@pytest.mark.night
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all keys"])
@pytest.mark.parametrize("D", [128, 64])
def test_the_last_rung_does_the_shipped_kernels_work(D, causal):
    """But for D = 64 and all keys, which three consumers compute in course_ops."""
    rung, ours = call_in_compiler("tests.test_flash_hopper", "instructions", D, causal)
    assert (Counter(rung) + Counter(MORE) == Counter(ours)) == (D == 128 or causal)


# A consumer has 64 queries and 128 keys: 64 scores per thread.
@pytest.mark.night
@pytest.mark.parametrize("D", [128, 64])
@pytest.mark.parametrize("rung", [path.stem for path in RUNGS if path.stem != "warp_specialized"])
def test_the_exponentials_run_under_pv(rung, D):
    """ptxas may move a wait for wgmma up. Above the exponentials it would take away what the rung is for."""
    if (rung, D) == ("three_consumers", 128):
        pytest.skip("a rung for D = 64")
    counts = call_in_compiler("tests.test_flash_hopper", "exponentials_under_pv", rung, D)
    assert len(counts) == (3 if rung == "three_consumers" else 2)
    assert min(counts) >= 64


@pytest.mark.parametrize("path", RUNGS, ids=lambda path: path.stem)
def test_a_rung_imports_no_other_rung(path):
    """torch, triton, the kit's face, course_ops.hopper and the problem: all else stands in the file."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes}
    ours = {name for name in names if name.split(".")[0] not in ("torch", "triton", "math")}
    assert ours == {"lessonkit", "course_ops.hopper", "problems.attention"}


def functions(path):
    return [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("warp_specialized", "overlap_softmax"),
        ("overlap_softmax", "lazy_rescaling"),
        ("lazy_rescaling", "persistent_scheduler"),
        ("persistent_scheduler", "causal_diagonal"),
        ("persistent_scheduler", "three_consumers"),
        ("overlap_softmax", "ping_pong"),
    ],
)
def test_a_rungs_functions_stand_in_the_order_of_the_rung_before(before, after):
    """So that `diff` of the two files is the lesson: what both have stands in the same order."""
    first, second = (functions(FOLDER / f"{name}.py") for name in (before, after))
    assert [name for name in first if name in second] == [name for name in second if name in first]
    assert "# New" in (FOLDER / f"{after}.py").read_text()
