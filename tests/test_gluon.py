"""Gluon kernels on the CPU (lessonkit.modes.gluon): values, and each kind of mistake in a kernel of its own.

The kernels here are mistakes that a rung's mutants cannot make, and the vocabulary that only Hopper's rungs use.
"""

import ast
import inspect
from contextlib import nullcontext, suppress
from pathlib import Path

from lessonkit import DEVICE, Mutant, device
from lessonkit.base.errors import Fault, Unsupported
from lessonkit.base.files import ROOT
from lessonkit.judge import apart, check, mutants, verify
from lessonkit.modes import gluon as emulated

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import allocate_tensor_memory, tcgen05_commit, tcgen05_mma
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from course_ops.hopper import allocate_barriers, allocate_stages, async_load, async_store, tensor_descriptor
from course_ops.versions import HAS_PAIRS, load_tensor_memory, tensor_memory_layout
from day3_matmul_tk import lesson09_matmul_hopper, lesson17_matmul_blackwell
from problems import matmul

pytestmark = [
    pytest.mark.kept,
    pytest.mark.skipif(not device.INTERPRETED, reason="with a GPU nothing is emulated"),
]


@gluon.jit
def copy_kernel(x_desc, y_desc, FENCED: gl.constexpr, WAITS: gl.constexpr, ANNOUNCED: gl.constexpr):
    """A block through shared memory and the threads."""
    smem = allocate_stages(x_desc, 2)
    bars = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    if FENCED:
        fence_async_shared()
    mbarrier.expect(bars.index(0), ANNOUNCED * x_desc.block_type.nbytes)
    async_load(x_desc, [0, 0], bars.index(0), smem.index(0))
    if WAITS:
        mbarrier.wait(bars.index(0), 0)
    smem.index(1).store(smem.index(0).load(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    fence_async_shared()
    async_store(y_desc, [0, 0], smem.index(1))
    tma.store_wait(0)


def copied(x, fenced=True, waits=True, announced=1):
    y = torch.full_like(x, torch.nan)
    descriptors = (tensor_descriptor(t, [16, 64]) for t in (x, y))
    copy_kernel[(1,)](*descriptors, fenced, waits, announced, num_warps=4)
    return y


def test_a_block_is_copied_and_no_more_than_there_is():
    """Past the end of the matrix zeros come in, and nothing goes out."""
    x = torch.randn(13, 40, device=DEVICE).half()
    assert torch.equal(copied(x), x)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"waits": False}, "race", "copy_kernel reads shared memory .* nothing says that this is over: TMA writes"),
        ({"fenced": False}, "race", "no fence_async_shared after this: copy_kernel sets the count"),
        (
            {"announced": 2},
            "barrier",
            "wait for each other, for ever: copy_kernel waits for parity 0 of number 0 of mbarriers",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_each_mistake_has_its_words(options, kind, says):
    with pytest.raises(Fault, match=says) as found:
        copied(torch.zeros(16, 64, device=DEVICE).half(), **options)
    assert found.value.kind == kind


@gluon.jit
def write(smem, bars, VALUE: gl.constexpr):
    smem.store(gl.zeros((16, 64), gl.float16, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])) + VALUE)
    mbarrier.arrive(bars.index(0))


@gluon.jit
def both_write_kernel(x_desc, ORDERED: gl.constexpr):
    """Two partitions write to one place. ORDERED: the kernel waits for neither, but each has half of it."""
    smem, bars = allocate_stages(x_desc, 2), allocate_barriers(1, 2)
    if ORDERED:
        gl.warp_specialize([(write, (smem.index(0), bars, 0)), (write, (smem.index(1), bars, 1))], [4], [40])
    else:
        gl.warp_specialize([(write, (smem.index(0), bars, 0)), (write, (smem.index(0), bars, 1))], [4], [40])
    mbarrier.wait(bars.index(0), 0)


def test_partitions_may_not_write_to_one_place_unordered():
    desc = tensor_descriptor(torch.zeros(16, 64, device=DEVICE).half(), [16, 64])
    both_write_kernel[(1,)](desc, True, num_warps=4)
    with pytest.raises(Fault, match=r"write writes shared memory .* this is over: write writes"):
        both_write_kernel[(1,)](desc, False, num_warps=4)


@gluon.jit
def mma_kernel(a_desc, b_desc, c_desc, EARLY: gl.constexpr):
    """One MMA of 128 x 64 x 64, twice: C is twice A B."""
    a_smem, b_smem, c_smem = allocate_stages(a_desc, 1), allocate_stages(b_desc, 1), allocate_stages(c_desc, 1)
    full, done = allocate_barriers(1, 1).index(0), allocate_barriers(1, 1).index(0)
    acc = allocate_tensor_memory(gl.float32, [128, 64], tensor_memory_layout(128, 64))
    mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    async_load(a_desc, [0, 0], full, a_smem.index(0))
    async_load(b_desc, [0, 0], full, b_smem.index(0))
    mbarrier.wait(full, 0)
    tcgen05_mma(a_smem.index(0), b_smem.index(0), acc, use_acc=False)
    tcgen05_commit(done, pred=EARLY)
    tcgen05_mma(a_smem.index(0), b_smem.index(0), acc)
    tcgen05_commit(done, pred=not EARLY)
    mbarrier.wait(done, 0)
    c_smem.index(0).store(load_tensor_memory(acc).to(c_desc.dtype))
    fence_async_shared()
    async_store(c_desc, [0, 0], c_smem.index(0))
    tma.store_wait(0)


def multiplied(early):
    a, b = (torch.randn(n, 64, device=DEVICE).half() for n in (128, 64))
    c = torch.full((128, 64), torch.nan, device=DEVICE).half()
    mma_kernel[(1,)](*(tensor_descriptor(t, list(t.shape)) for t in (a, b, c)), early, num_warps=4)
    return c, (2 * (a.float() @ b.float())).half()


def test_a_commit_says_that_all_mmas_before_it_are_complete():
    torch.manual_seed(0)
    torch.testing.assert_close(*multiplied(early=False), rtol=2e-3, atol=2e-2)


def test_a_commit_says_nothing_of_an_mma_after_it():
    with pytest.raises(Fault, match=r"reads tensor memory .* this is over: an MMA of mma_kernel writes"):
        multiplied(early=True)


@pytest.mark.parametrize("seed", range(5))
def test_a_right_kernel_is_right_in_every_order(monkeypatch, seed):
    monkeypatch.setattr(emulated, "SEED", seed)
    for rung in lesson17_matmul_blackwell.RUNGS[2:]:
        a, b = matmul.inputs(300, 520, 520, dtype=torch.bfloat16)
        with nullcontext() if HAS_PAIRS else suppress(Unsupported):  # pairs of CTAs before Triton 3.7
            torch.testing.assert_close(rung(a, b), matmul.reference(a, b), rtol=1e-2, atol=2e-2)


@pytest.mark.night
@pytest.mark.parametrize("seed", range(1, 9))
def test_a_wrong_kernel_is_wrong_in_every_order(monkeypatch, seed):
    monkeypatch.setattr(emulated, "SEED", seed)
    lesson, name = lesson17_matmul_blackwell.LESSON, lesson17_matmul_blackwell.__name__
    for mutant in lesson.wrong:
        wrong = mutants.build(name, mutant)
        if not mutants.cannot_judge(lesson, wrong, mutant):
            verdict = apart.Verdict.of(mutants.first_rejection(lesson, wrong))
            assert verdict.is_as_declared(mutant), f"{mutant.why}: {verdict}"


@pytest.mark.parametrize("rung", lesson09_matmul_hopper.RUNGS[:5], ids=lambda rung: rung.__name__)
def test_the_hopper_ladder_is_right(rung):
    """wgmma and registers. Each rung's own Python runs, barriers and all."""
    for shape in ({"M": 129, "N": 264, "K": 136}, {"M": 40, "N": 72, "K": 1000}, {"M": 300, "N": 520, "K": 328}):
        check.check(lesson09_matmul_hopper.LESSON, rung, shape, torch.bfloat16)


@pytest.mark.parametrize(
    ("rung", "where"), [("async_wgmma", "matmul_kernel"), ("warp_specialized", "consumer"), ("persistent", "consumer")]
)
def test_a_stage_of_hopper_that_is_released_while_wgmma_reads_it_is_a_race(rung, where):
    wrong = Mutant("released too early", where, "warpgroup_mma_wait(1,", "warpgroup_mma_wait(2,", rung)
    a, b = matmul.inputs(64, 64, 1000, dtype=torch.bfloat16)
    with pytest.raises(Fault, match=r"this is over: a wgmma of .* reads shared memory"):
        mutants.build(lesson09_matmul_hopper.__name__, wrong)(a, b)


@gluon.jit
def unknown_word_kernel(x_desc):
    gl.histogram(gl.zeros((64,), gl.int32, gl.BlockedLayout([1], [32], [4], [0])), 8)


def test_a_word_that_is_not_known_is_named():
    desc = tensor_descriptor(torch.zeros(16, 64, device=DEVICE).half(), [16, 64])
    with pytest.raises(NotImplementedError, match=r"histogram is not among the words .* add it there"):
        unknown_word_kernel[(1,)](desc, num_warps=4)


@gluon.jit
def flag_kernel(x_ptr, flags_ptr, BEFORE: gl.constexpr):
    """A CTA adds 1 to the block of the CTA that is BEFORE numbers before, when that one has set its flag."""
    i = gl.program_id(0)
    if i > 0:
        asm: gl.constexpr = "ld.acquire.gpu.global.b32 $0, [$1];"
        while gl.inline_asm_elementwise(asm, "=r,l", [flags_ptr + (i - BEFORE)], gl.int32, False, 1) == 0:
            pass
        block = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
        gl.store(x_ptr + 128 * i + block, gl.load(x_ptr + 128 * (i - BEFORE) + block) + 1)
    gl.atomic_xchg(flags_ptr + i, 1, sem="release", scope="gpu")


def test_ctas_meet_in_global_memory_in_the_order_of_their_numbers():
    x, flags = torch.zeros(4, 128, device=DEVICE), torch.zeros(4, dtype=torch.int32, device=DEVICE)
    flag_kernel[(4,)](x, flags, 1, num_warps=4)
    assert x[:, 5].tolist() == [0, 1, 2, 3]
    assert flags.all()


def test_a_cta_that_waits_for_itself_waits_for_ever():
    x, flags = torch.zeros(4, 128, device=DEVICE), torch.zeros(4, dtype=torch.int32, device=DEVICE)
    with pytest.raises(Fault, match="flag_kernel waits for a flag in global memory") as found:
        flag_kernel[(4,)](x, flags, 0, num_warps=4)
    assert found.value.kind == "barrier"


# ---- The Blackwell ladder, beside its lesson ------------------------------------------------------------------------


def test_each_rung_of_the_blackwell_ladder_has_a_race_and_a_deadlock():
    lesson = lesson17_matmul_blackwell.LESSON
    found = {rung.__name__: "" for rung in lesson.rungs}
    for mutant in lesson.wrong:
        found[mutant.rung] += f" {mutant.caught_by}"
    assert {rung for rung, kinds in found.items() if "race" in kinds and "barrier" in kinds} == {*found}
    assert all(sum(m.rung == rung for m in lesson.wrong) >= 3 for rung in found)


def test_rungs_of_the_blackwell_ladder_share_no_main_loop():
    """Each file is complete: it imports the vocabulary, its problem and the kit, and no other file of its folder."""
    for rung in lesson17_matmul_blackwell.RUNGS:
        path = Path(inspect.getfile(rung))
        assert path.parent == ROOT / "day3_matmul_tk" / "matmul_blackwell"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert str(node.module).split(".")[0] in ("lessonkit", "triton", "course_ops", "problems"), path.name


def test_on_another_gpu_the_questions_are_left_out(monkeypatch):
    lesson = lesson17_matmul_blackwell.LESSON
    of = {mutant.caught_by: mutant for mutant in lesson.wrong}
    monkeypatch.setattr(check, "INTERPRETED", False)
    monkeypatch.setattr(check, "capability", lambda: 90)
    says = "needs sm_100: TMA and tensor memory"
    assert check.cannot_run(lesson, lesson.rungs[0], lesson.checks[0], torch.bfloat16) == says
    assert mutants.cannot_judge(lesson, lesson.rungs[0], of["value"]) == says
    monkeypatch.setattr(device, "HAS_GPU", True)
    assert "found without a GPU" in mutants.cannot_judge(lesson, lesson.rungs[0], of["race"])


def test_its_machine_code_is_that_of_its_own_target():
    assert verify.first_target(lesson17_matmul_blackwell.LESSON) == 100
    assert verify.first_target(lesson09_matmul_hopper.LESSON) == 90


def test_another_gpu_is_refused_before_anything_is_compiled(monkeypatch):
    """On sm_120 the compiler would abort the process."""
    monkeypatch.setattr("lessonkit.validate.HAS_GPU", True)
    monkeypatch.setattr("lessonkit.validate.capability", lambda: 120)
    monkeypatch.setattr(emulated.JITFunction, "run", lambda *args, **more: pytest.fail("launched"))
    a, b = matmul.inputs(128, 128, 64, dtype=torch.bfloat16)
    for rung in lesson17_matmul_blackwell.RUNGS:
        with pytest.raises(Unsupported, match="needs tensor memory, which sm_100 has; this GPU is sm_120"):
            rung(a, b)
