"""The backward for heads of 129 to 256 on Hopper: values, races and deadlocks emulated, mutants, machine code."""

from lessonkit import device
from lessonkit.cuda import sass
from lessonkit.modes import compiled
from lessonkit.modes import gluon as emulated
from lessonkit.modes.compile_server import call_in_compiler

import pytest
import torch
import triton

from course_ops.attention import _computed
from course_ops.kernels import attention_backward_hopper
from course_ops.kernels import attention_backward_wide_hopper as wide
from tests import kernel_copies
from tests.test_course_ops_attention import heads, near, theirs

pytestmark = pytest.mark.kept("course_ops/*.py", "course_ops/kernels/*.py", "tests/kernel_copies.py")
emulates = pytest.mark.skipif(not device.INTERPRETED, reason="with a GPU nothing is emulated")


@pytest.fixture(autouse=True)
def _one_kernel_after_the_other(monkeypatch):
    """Interpreted, no kernel is launched early. prepare_kernel is Triton's, whose interpreter lacks the word."""
    torch.manual_seed(0)
    if device.INTERPRETED:
        monkeypatch.setattr(attention_backward_hopper, "gdc_launch_dependents", lambda: None)


def gradients(shape, causal, window, mean=0.0, dtype=torch.bfloat16, backward=wide.attention_backward):
    """Ours, PyTorch's own in this dtype, and exact ones, each of q, k and v. mean: q is larger, and k smaller."""
    q, k, v = heads("cpu", *shape, dtype=dtype)
    q, k = q + mean, k - mean
    dout, scale = (torch.randn(*q.shape[:-1], v.shape[-1]) + 0.5).to(dtype), q.shape[-1] ** -0.5
    out, lse = _computed(*(t.double() for t in (q, k, v)), causal, window, scale)
    found = [backward(dout, q, k, v, out.to(dtype), lse.float(), causal, window, scale)]
    for other in (dtype, torch.float64):
        q_, k_, v_ = (t.to(other).requires_grad_() for t in (q, k, v))
        expected, _ = theirs(q_, k_, v_, causal, window, None)
        found.append([g.nan_to_num() for g in torch.autograd.grad(expected, (q_, k_, v_), dout.to(other))])
    return found


def expect_right(found):
    # delta is a sum over out as it was rounded, which PyTorch's own backward does not need: twice its budget.
    for mine, their, exact in zip(*found, strict=True):
        near(mine, their + (their - exact.to(their.dtype)), exact)


CASES = (  # B, H, S_q, D, S_k, H_kv, D_v if not D; causal, window
    ((1, 1, 64, 256, 64, 1), False, None),  # one block
    ((1, 1, 40, 136, 64, 1), True, None),  # the second consumer of dQ has no query
    ((2, 1, 70, 256, 333, 1), False, None),  # tails of queries and of keys
    ((1, 2, 200, 192, 200, 1), True, None),  # two query heads share K and V
    ((1, 4, 130, 160, 260, 2), True, None),  # the rest has 32 of 64 columns; more keys than queries
    ((1, 1, 300, 256, 130, 1), True, None),  # the first 170 queries see nothing
    ((1, 1, 300, 192, 300, 1), True, None),
    ((1, 2, 333, 256, 333, 1), True, 70),  # a window that begins within a block
    ((1, 1, 100, 192, 500, 1), True, 100),  # no query sees the first keys
    ((1, 1, 400, 200, 400, 1), True, 256),
    ((1, 1, 300, 256, 130, 1), True, 33),
    ((1, 1, 70, 256, 70, 1), False, None, 3.0),  # scores of -150: 2^-lse of a key past the last one is infinite
    ((1, 2, 200, 192, 200, 1, 128), True, None),  # V has no rest
    ((1, 1, 130, 256, 190, 1, 72), False, None),
    ((1, 1, 200, 128, 200, 1, 200), True, 70),  # K has none
)


@emulates
@pytest.mark.parametrize("i", range(len(CASES)))
def test_values(i):
    expect_right(gradients(*CASES[i], dtype=(torch.bfloat16, torch.float16)[i % 2]))


@emulates
@pytest.mark.parametrize("seed", range(1, 5))
def test_values_in_other_orders_of_the_hardware(monkeypatch, seed):
    monkeypatch.setattr(emulated, "SEED", seed)
    for i in (3, 6, 7):
        expect_right(gradients(*CASES[i]))


@emulates
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 64)])
def test_the_same_to_the_bit_in_any_order(monkeypatch, causal, window):
    found = []
    for seed in (0, 7):
        monkeypatch.setattr(emulated, "SEED", seed)
        torch.manual_seed(0)
        found.append(gradients((1, 2, 200, 192, 200, 1), causal, window, dtype=torch.float16)[0])
    assert all(map(torch.equal, *found))


# ---- Mutants -----------------------------------------------------------------------------------------------------

MUTANTS = {  # what is wrong: (old, new, kind of Fault or "value", case)
    "K released before dQ is summed": (
        "wait_for(0, sums, (ds, s_after))\n        s = done[1]\n        mbarrier.arrive(args.k_empty",
        "wait_for(1, sums, (ds, s_after))\n        s = done[1]\n        mbarrier.arrive(args.k_empty", "race", 6,
    ),
    "V released before dP is there": (
        "dp, p = warpgroup_mma_wait(0", "dp, p = warpgroup_mma_wait(1", "race", 5,
    ),
    "the last S reads a block that has not come": (
        "parity_after, pred=block + 1 < end)", "parity_after, pred=block + 1 < stop)", "race", 6,
    ),
    "blocks before the window are not passed": (
        "    pass_blocks(args, cta_begin, cta_begin, begin)\n", "", "barrier", 9,
    ),
    "an arrival that no consumer gives": (
        "q_empty=allocate_barriers(STAGES, 1),", "q_empty=allocate_barriers(STAGES, 2),", "barrier", 6,
    ),
    "dO released while dV reads it": (
        "wait_for(0, sums, (p, s_after))",
        "wait_for(4, sums, (p, s_after))", "race", 6,
    ),
    "Q released while dK reads it": (
        "wait_for(0, sums, (ds, dp_after))",
        "wait_for(4, sums, (ds, dp_after))", "race", 6,
    ),
    "P^T written over what is not read yet": (
        "        mbarrier.wait(args.p_empty.index(buffer), p_parity ^ 1)\n", "", "race", 6,
    ),
    "P^T read before it is written": (
        "        mbarrier.wait(args.p_full.index(buffer), p_parity)\n", "", "race", 6,
    ),
    "TMA stores what no fence made visible": (
        "    fence_async_shared()\n    async_store", "    async_store", "race", 0,
    ),
    "the CTA ends while TMA reads": ("    tma.store_wait(0)\n", "", "race", 0),
    "one announcement of two": (
        "q_full=allocate_barriers(2, 2), do_full", "q_full=allocate_barriers(2, 1), do_full", "race barrier", 0,
    ),
    "the rest is not multiplied": (
        "    if b.rest is not None:\n        x, y", "    if False:\n        x, y", "value", 0,
    ),
    "no masks of dQ's last blocks": (
        "begin, whole, last, end = args.problem.key_blocks(row, ROWS)",
        "begin, whole, last, end = args.problem.key_blocks(row, ROWS)\n    last = end", "value", 11,
    ),
    "dQ's diagonal one block late": (
        "last = max(first, min(end, max(0, at + 1) // ROWS))", "last = max(first, min(end, max(0, at + ROWS) // ROWS))",
        "value", 6,
    ),
    "dQ's window begins a block late": (
        "first = (max(0, at + ROWS - self.window) + ROWS - 1) // ROWS", "first = max(0, at + 1 - self.window) // ROWS",
        "value", 7,
    ),
    "dK's diagonal is not masked": (
        "first = min(blocks, (max(0, at + ROWS - 1) + ROWS - 1) // ROWS)", "first = begin", "value", 6,
    ),
    "dK's window ends a block early": (
        "(max(0, at + ROWS - 1 + self.window) + ROWS - 1) // ROWS))", "max(0, at + self.window) // ROWS))", "value", 7,
    ),
    "dK's window is not masked": (
        "last = max(first, min(end, max(0, at + self.window) // ROWS))", "last = end", "value", 7,
    ),
    "a window one key too long": ("(ahead > -self.window)", "(ahead >= -self.window)", "value", 7),
    "a head's dK and dV alone": ("        base += end - begin\n", "", "value race barrier", 3),
    "a tile that no query sees": ("end = min(blocks, max(begin + 1, (max(0, at + ROWS - 1 + self.window)",
                                  "end = min(blocks, max(begin, (max(0, at + ROWS - 1 + self.window)", "barrier", 8),
    "K and V of another head": ("head_kv = head // args.problem.GROUP", "head_kv = head % args.problem.GROUP",
                                "value", 4),
    "dK not scaled": ("args.v, 0, scaled(sums, scale)", "args.v, 0, sums", "value", 0),
    "dQ not scaled": ("args.q, WHICH, scaled(sums, scale)", "args.q, WHICH, sums", "value", 0),
    "no delta": ("        dp += args.delta_smem", "        dp += 0 * args.delta_smem", "value", 0),
}  # fmt: skip


@emulates
@pytest.mark.parametrize("why", MUTANTS)
def test_mutants_are_rejected(tmp_path, why):
    """By what each names, in this order of the hardware or in another."""
    old, new, kinds, i = MUTANTS[why]
    module = kernel_copies.changed(wide, old, new, tmp_path)

    def run():
        expect_right(gradients(*CASES[i], backward=module.attention_backward))

    assert kernel_copies.caught_by(run, orders=8) in kinds.split()


# ---- Machine code ------------------------------------------------------------------------------------------------


def compiled_kernels(D, causal, window):
    """In the process that compiles: [name, registers, spills, shared memory, serialized] of both kernels."""
    q, lse = (torch.empty(*shape, dtype=dtype, device="meta") for shape, dtype in (
        ((2, 8, 4096, D), torch.bfloat16), ((2, 8, 4096), torch.float32)))  # fmt: skip
    k = q[:, :4]
    with compiled.compiling(90) as made:
        wide.attention_backward(q, q, k, k, q, lse, causal, window, 0.1)
        rows = [compiled.inspect("wide", kernel, 90) for kernel in made.values() if kernel.src.fn.is_gluon()]
    return [[row.kernel, row.registers, row.spills, row.shared, bool(sass.serialized(row))] for row in rows]


@pytest.mark.parametrize(
    ("D", "causal", "window"),
    [
        pytest.param(D, causal, window, marks=() if (D, causal) == (256, True) and not window else pytest.mark.night)
        for D in (192, 256)
        for causal, window in ((False, None), (True, None), (True, 1024))
    ],
)
def test_machine_code(D, causal, window):
    """wgmma stays asynchronous, an SM's shared memory suffices, and accumulators stay in registers.

    Triton 3.6 lets the masked tiles at the edges of a window reload their positions: 25 registers, kept in memory.
    """
    rows = call_in_compiler("tests.test_attention_backward_wide", "compiled_kernels", D, causal, window)
    assert [row[0] for row in rows] == ["query_kernel", "key_kernel"]
    for name, registers, spills, shared, serialized in rows:
        assert not serialized, name
        assert registers <= 168
        reloads = bool(window) and triton.__version__.startswith("3.6.")
        assert spills <= (50 if reloads else 16), name  # outside the loop over tiles without a mask
        assert shared <= 232448
