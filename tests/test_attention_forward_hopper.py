"""The forward of course_ops.attention on Hopper, emulated: values, races, deadlocks and bytes of its own Python."""

import math
import re

from lessonkit import Mutant, device
from lessonkit.base.errors import Fault
from lessonkit.base.traffic import Traffic, watching
from lessonkit.cuda import sass
from lessonkit.judge import mutants
from lessonkit.modes import compiled
from lessonkit.modes import gluon as emulated
from lessonkit.modes.compile_server import call_in_compiler

import pytest
import torch

from course_ops.kernels import attention_forward_hopper as hopper
from problems import attention

pytestmark = pytest.mark.kept("course_ops/kernels/*.py", "course_ops/*.py")
emulated_here = pytest.mark.skipif(not device.INTERPRETED, reason="with a GPU nothing is emulated")


def case(S, D, causal=True, window=None, S_k=None, H=1, H_kv=None, D_v=None, dtype=torch.bfloat16, growth=0.0):
    """q, k, v, causal, window. growth: of the scores, from the last key to the first."""
    torch.manual_seed(0)
    q, k, v, *_ = attention.inputs(1, H, S, D, S_k=S_k, H_kv=H_kv, D_v=D_v, dtype=dtype)
    if growth:
        q, k = q.abs(), k.abs() * torch.linspace(growth, 0.1, k.shape[2])[:, None].to(dtype)
    return q, k, v, causal, window


def agrees(fn, q, k, v, causal, window):
    """Whether fn's error is at most twice that of the reference in this dtype, beside some roundings."""
    o, lse = fn(q, k, v, causal, window, q.shape[-1] ** -0.5)
    theirs, _ = attention.reference(q, k, v, causal, window)
    exact, exact_lse = attention.reference(*(t.double() for t in (q, k, v)), causal, window)
    most = 2 * (theirs.double() - exact).abs().max() + 2 * torch.finfo(q.dtype).eps * exact.abs().max()
    lse, exact_lse = (t.double().nan_to_num(nan=math.inf, neginf=-9.0) for t in (lse, exact_lse))
    right = (o.double() - exact).abs().max() <= most  # NaN is not
    return bool(right and torch.allclose(lse, exact_lse, rtol=1e-5, atol=1e-4))


CASES = {
    "D = 128, whole tiles": {"S": 256, "D": 128, "causal": False},
    "D = 128, an aligned diagonal": {"S": 300, "D": 128},
    "D = 128, more queries than keys": {"S": 300, "D": 128, "S_k": 77},
    "D = 64, three consumers": {"S": 400, "D": 64, "causal": False},
    "D = 64, scores that grow": {"S": 390, "D": 64, "growth": 8},
    "D = 192, four heads of two": {"S": 200, "D": 192, "causal": False, "S_k": 333, "H": 4, "H_kv": 2},
    "D = 192, an odd diagonal": {"S": 201, "D": 192, "S_k": 333},
    "D = 192, an aligned diagonal": {"S": 256, "D": 192, "dtype": torch.float16},
    "D = 192, a row without keys": {"S": 200, "D": 192, "S_k": 70},
    "D = 160 in chunks of 128 and 64": {"S": 130, "D": 160},
    "D = 72, Q and K in chunks of 64 and 16": {"S": 200, "D": 72, "S_k": 300},
    "D = 80, an aligned diagonal": {"S": 300, "D": 80, "growth": 3},
    "D = 96, Q and K in chunks of 64 and 32": {"S": 200, "D": 96, "causal": False, "S_k": 333, "H": 4, "H_kv": 2},
    "D = 96, a block is done again": {"S": 130, "D": 96, "S_k": 400, "growth": 20, "dtype": torch.float16},
    "D = 136": {"S": 70, "D": 136, "causal": False},
    "D = 200 in chunks of 128 and 128": {"S": 130, "D": 200, "S_k": 190},
    "D = 256": {"S": 257, "D": 256, "causal": False},
    "D = 256, causal": {"S": 300, "D": 256},
    "D = 256, more queries than keys": {"S": 300, "D": 256, "S_k": 100},
    "D = 256, scores that grow": {"S": 130, "D": 256, "S_k": 400, "growth": 3},
    "D = 256, a block is done again": {"S": 130, "D": 256, "S_k": 400, "growth": 20},
    "D = 192, a block is done again": {"S": 130, "D": 192, "S_k": 400, "growth": 20},
    "D_v = 128 beside D = 192": {"S": 300, "D": 192, "D_v": 128, "H": 2, "H_kv": 1},
    "D_v = 128, an aligned diagonal": {"S": 512, "D": 192, "D_v": 128, "S_k": 384},
    "D_v = 128, all keys": {"S": 200, "D": 192, "D_v": 128, "S_k": 333, "causal": False, "dtype": torch.float16},
    "D_v = 128, scores that grow": {"S": 130, "D": 192, "D_v": 128, "S_k": 500, "growth": 3},
    "D_v = 128, a block is done again": {"S": 130, "D": 192, "D_v": 128, "S_k": 500, "growth": 20},
    "D_v = 128, a window": {"S": 450, "D": 192, "D_v": 128, "window": 150},
    "D_v = 72 beside D = 136": {"S": 300, "D": 136, "D_v": 72},
    "D_v = 64 beside D = 192": {"S": 300, "D": 192, "D_v": 64, "S_k": 411},
    "D_v = 64 beside D = 128": {"S": 300, "D": 128, "D_v": 64},
    "D_v = 256 beside D = 64": {"S": 130, "D": 64, "D_v": 256, "S_k": 190},
    "D_v = 136 beside D = 72": {"S": 130, "D": 72, "D_v": 136, "window": 40},
    "D_v = 40 beside D = 256": {"S": 130, "D": 256, "D_v": 40, "causal": False},
    "a window of 1": {"S": 200, "D": 128, "window": 1},
    "a window within a block": {"S": 450, "D": 64, "window": 50},
    "a window of a block": {"S": 450, "D": 128, "window": 128},
    "a window past a block": {"S": 450, "D": 128, "window": 131},
    "a window longer than the keys": {"S": 300, "D": 128, "window": 10**12},
    "a window, more keys than queries": {"S": 200, "D": 128, "S_k": 530, "window": 100},
    "a window, more queries than keys": {"S": 450, "D": 64, "S_k": 333, "window": 150},
    "a window, D = 192": {"S": 450, "D": 192, "window": 130},
    "a window of 64 keys, D = 256": {"S": 333, "D": 256, "window": 64},
    "a window, scores that grow": {"S": 450, "D": 128, "window": 200, "growth": 8},
    "a window, a block is done again": {"S": 450, "D": 192, "window": 200, "growth": 20},
}


@emulated_here
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.night) for seed in range(1, 6))])
@pytest.mark.parametrize("name", CASES)
def test_it_is_right_in_every_order(monkeypatch, name, seed):
    monkeypatch.setattr(emulated, "SEED", seed)
    assert agrees(hopper.attention_forward, *case(**CASES[name]))


@emulated_here
@pytest.mark.parametrize("D", [128, 192])
def test_bytes_of_a_window_are_those_of_its_keys(D):
    """Keys that no query of a tile sees are not loaded, so the bytes grow with the window and not with its square."""
    S, window = 1024, 200
    rows, keys = 2 * hopper.ROWS, hopper.blocks_of_keys(D, D)[0]
    watching.append(Traffic())
    try:
        hopper.attention_forward(*case(S, D, window=window), 0.1)
    finally:
        traffic = watching.pop()
    blocks = 0
    for first in range(0, S, rows):
        blocks += -(-(first + rows) // keys) - max(0, first - window + 1) // keys
    assert traffic.read == 2 * D * (S + 2 * keys * blocks)
    assert traffic.read < 2 * D * S * (1 + 2 * (window + rows + 2 * keys) / rows)


MANY = {"S": 200, "D": 64, "causal": False, "H": 12}  # tiles of a CTA
WIDE, EDGE = {"S": 300, "D": 256, "S_k": 400}, {"S": 450, "D": 192, "window": 200}
WRONG = (  # why, function, old, new, case, and what finds it: "value" or the fault's words
    ("Q's first columns twice", "issue_qk", "warpgroup_mma(q[1]", "warpgroup_mma(q[0]", WIDE, "value"),
    ("S without the first columns", "issue_qk", "s, is_async=True)", "s, use_acc=False, is_async=True)", WIDE, "value"),
    ("V's first columns twice", "issue_pv", "v.smems[1]", "v.smems[0]", WIDE, "value"),
    ("O's other chunk is not rescaled", "scale_chunks", "scale_rows(o[1], factor)", "o[1]",
     WIDE | {"growth": 3}, "value"),
    ("the second chunk over the first", "epilogue", "i * args.o_descs[0].block_type.shape[-1]", "0", WIDE, "value"),
    ("the second chunk of K is the first", "load", "= first.block_type.shape[-1]", "= 0", WIDE, "value"),
    ("one chunk's bytes", "load", "nbytes + second.block_type.nbytes", "nbytes", WIDE, "arrivals|over|for ever"),
    ("V is returned while PV reads it", "wait_pv", "wait(0, deps=(o[0], o[1]", "wait(1, deps=(o[0], o[1]", WIDE,
     "this is over: a wgmma of"),
    ("O is written while TMA reads it", "epilogue", "tma.store_wait(0)", "pass", WIDE, "this is over: TMA reads"),
    ("threads write O, TMA reads it unfenced", "epilogue", "fence_async_shared()", "pass", WIDE, "no fence_async_sha"),
    ("Q comes before its buffer is returned", "producer_partition", "stage), parity ^ 1)", "stage), parity)", MANY,
     "value|for ever|over|arrivals"),
    ("Q's buffers are one", "q_stage", "return buffer * self.CONSUMERS + consumer", "return consumer", MANY,
     "value|for ever|over|arrivals"),
    ("a mailbox of two slots beside two buffers of Q", "attention_hopper_kernel", "counter_ptr, Q_BUFFERS)",
     "counter_ptr)", MANY, "value|for ever|over|arrivals"),
    ("a block above the diagonal is not returned", "consumer_partition", "range(unseen)", "range(0)", WIDE,
     "value|for ever|over"),
    ("a window of one key more", "first_key", "+ 1 - self", "- self", EDGE, "value"),
    ("the edge is not masked", "main_loop", "block, True)", "block, False)", EDGE, "value"),
    ("whole blocks begin a key early", "consumer_partition", "+ QUERIES - 1)", "+ QUERIES - 65)", EDGE, "value"),
    ("done again without its mask", "next_block", "c.args.cap_scale)\n            if EDGE:",
     "c.args.cap_scale)\n            if False:", EDGE | {"growth": 20}, "value"),
    ("the last block is left out", "consumer_partition", "max(0, first_key) // KEYS",
     "max(0, first_key + KEYS) // KEYS", EDGE, "value"),
    ("blocks before the window are not returned", "consumer_partition", "range(end, blocks)", "range(end, end)",
     EDGE | {"H": 3}, "for ever"),
    ("the diagonal's blocks have no window", "apply_causal_mask", "if problem.window is None", "if True",
     {"S": 200, "D": 192, "S_k": 233, "window": 30}, "value"),
    ("the first block has no window", "apply_mask", "if problem.window is None", "if True",
     {"S": 200, "D": 128, "window": 30}, "value"),
)  # fmt: skip


@emulated_here
@pytest.mark.parametrize(("why", "function", "old", "new", "shape", "found_by"), WRONG, ids=[w[0] for w in WRONG])
def test_a_wrong_kernel_is_found(why, function, old, new, shape, found_by):
    wrong = mutants.build(hopper.__name__, Mutant(why, function, old, new, "attention_forward"))
    args = case(**shape)
    try:
        assert not agrees(wrong, *args), "accepted"
        said = "value"
    except Fault as fault:
        said = str(fault)
    assert re.search(found_by, said), said


# ---- What the compiler makes of it ---------------------------------------------------------------------------------


def resources(D, causal, window, D_v):
    """[registers of a CTA, shared memory, serialized?, spills]. In a process that compiles."""
    q, k, v = (torch.empty(2, H, 4096, N, dtype=torch.bfloat16, device="meta") for H, N in ((8, D), (2, D), (2, D_v)))
    with compiled.compiling(90) as made:
        made.clear()
        hopper.attention_forward(q, k, v, causal, window, 0.1)
        (each,) = made.values()
    kernel = compiled.inspect("", each, 90)
    return [kernel.registers * 32 * kernel.warps, kernel.shared, sass.serialized(kernel), kernel.spills]


NIGHT = pytest.mark.night
SHAPES = (
    pytest.param(192, True, None, 192, marks=NIGHT), (256, False, None, 256),
    pytest.param(256, True, None, 256, marks=NIGHT), (192, True, None, 128),
    pytest.param(192, False, None, 128, marks=NIGHT), pytest.param(192, True, 1024, 128, marks=NIGHT),
    *(pytest.param(D, True, 1024, D, marks=NIGHT) for D in (64, 128, 192, 256)),
)  # fmt: skip


@pytest.mark.parametrize(("D", "causal", "window", "D_v"), SHAPES)
def test_it_fits_on_an_sm_and_its_matmuls_overlap(D, causal, window, D_v):
    """D = 256 and windows may spill scalars of a tile, outside the loops over blocks; the others spill nothing."""
    registers, shared, serialized, spills = call_in_compiler(
        "tests.test_attention_forward_hopper", "resources", D, causal, window, D_v
    )
    assert registers <= 65536
    assert shared <= 232448
    assert not serialized
    assert spills == 0 or D == 256 or window
