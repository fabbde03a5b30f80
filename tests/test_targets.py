"""Every card: the table of chips, what is compiled for which target, and names that Triton has renamed."""

import ast
import re
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

from lessonkit import __main__ as command_line
from lessonkit.base import chips, device
from lessonkit.base.files import REPORTS, ROOT
from lessonkit.base.tables import head, read_csv
from lessonkit.commands import show
from lessonkit.lesson import Prediction, Work, names
from lessonkit.lesson import kernels as lesson_kernels
from lessonkit.measure import fingerprint
from lessonkit.modes import compiled
from lessonkit.modes.compile_server import call_in_compiler
from lessonkit.pages import card as cards
from lessonkit.pages import targets

import pytest
import torch
from typer.testing import CliRunner

import course_ops
from course_ops import _common
from course_ops import versions as names_of_gluon

CARDS = list(chips.CHIPS)
AMD_ASSEMBLY = """
mm:
\tglobal_load_dwordx2 v[0:1], v[2:3], off
\tbuffer_load_dwordx4 v[4:7], v8, s[0:3], 0 offen
\tbuffer_load_dwordx4 v8, s[0:3], 0 offen lds
\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], 0
\ts_barrier
\ts_nop 1
\tglobal_store_short v[0:1], v2, off
\ts_endpgm
    .group_segment_fixed_size: 16384
    .sgpr_count:     22
    .vgpr_count:     132
    .vgpr_spill_count: 3
"""


@pytest.fixture
def card(monkeypatch):
    return lambda name: monkeypatch.setenv(chips.CHOICE, name)


@pytest.mark.parametrize(
    ("target", "warps", "registers", "shared", "programs"),
    [
        (86, 1, 16, 0, 16),  # blocks
        (89, 4, 32, 0, 12),  # 48 warps
        (120, 4, 32, 99 * 1024, 1),  # 99 KB and 1 KB of the system's are all of an SM
        ("gfx942", 4, 128, 0, 4),  # 512 registers a lane of each of 4 SIMDs
        ("gfx942", 4, 129, 0, 3),  # in units of 8: 136
        ("gfx942", 4, 32, 40_000, 1),  # LDS of 64 KB
        ("gfx950", 4, 32, 40_000, 4),  # of 160 KB
    ],
)
def test_an_sm_holds_what_its_own_limits_allow(target, warps, registers, shared, programs):
    assert chips.first(target).resident(warps, registers, shared) == programs


@pytest.mark.parametrize("name", CARDS)
def test_a_card_fits_its_own_limits(name):
    chip = chips.CHIPS[name]
    assert chip.shared_block + chip.reserved <= chip.shared
    assert chip.resident(1, 8, chip.shared_block) == 1
    assert chip.flops["fp32"] <= chip.flops["bf16"]


def test_your_card_is_named_in_one_place(card):
    assert chips.of(89).name == "RTX 4090"
    card("l40s")
    assert chips.of(89).name == "L40S"
    assert chips.of(90).name == "H200 SXM", "of a card that compiles other code nothing is said"
    assert chips.first(89).name == "RTX 4090"
    card("gtx1080")
    with pytest.raises(ValueError, match=r"^COURSE_GPU=gtx1080: no card .*lessonkit/base/chips.py"):
        chips.of(89)
    with pytest.raises(ValueError, match="no card has target 70"):
        chips.first(70)


def test_a_prediction_is_of_the_card():
    h200, rtx = chips.CHIPS["h200"], chips.CHIPS["rtx4090"]
    assert h200.seconds(4.8e9, 1e9, "bf16") == (pytest.approx(1e-3), "memory")
    assert rtx.seconds(1e6, 165.2e9, "bf16") == (pytest.approx(1e-3), "compute")
    assert chips.CHIPS["a100"].seconds(1, 19.5e9, "fp8")[0] == pytest.approx(1e-3), "without fp8, as fp32"
    lesson = dict(lesson_kernels("day3_matmul_tk.lesson01_matmul"))["day3_matmul_tk.lesson01_matmul"]
    (line,) = targets.roofline(rtx, [("matmul", lesson)])
    assert line[-1] == "compute"
    assert len(targets.floors(lesson)[0]) == 2 + len(chips.TARGETS)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("nvidia-h200", "h200"),
        ("AMD Instinct MI300X", "mi300x"),
        *((chip.name, key) for key, chip in chips.CHIPS.items()),
    ],
)
def test_a_card_is_found_by_each_of_its_names(name, key):
    assert chips.find(name) is chips.CHIPS[key]


@pytest.mark.parametrize("name", ["RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB", "NVIDIA H100 PCIe", "rtx 4060"])
def test_a_card_that_is_like_one_of_the_table_is_another(name):
    with pytest.raises(ValueError, match=r"no card is called '.*'. The closest: (RTX 4090|A100|H100)"):
        chips.find(name)


def test_a_card_that_is_not_compiled_is_no_target(card):
    assert not chips.CHIPS["rx7900xtx"].compiled
    assert "gfx1100" not in chips.TARGETS
    assert all(chips.first(target).compiled for target in chips.TARGETS)
    card("RX 7900 XTX")
    ended = CliRunner().invoke(command_line.app, ["compile", "lesson01_vector_add"])
    assert ended.exit_code == 2
    assert "gfx1100" in ended.output


def lesson_of(rungs, predicted, passes):
    """An op that reads and writes n bytes and computes nothing."""
    return SimpleNamespace(
        rungs=rungs, predicted=predicted, passes=passes, benches=({"n": 480}, {"n": 4_800_000}),
        work=lambda n, dtype: Work(bytes=n), inputs=SimpleNamespace(__module__="problems.made_up"),
        bench_dtype=torch.bfloat16, extension=None,
    )  # fmt: skip


def test_predictions_for_an_h200_become_those_of_a_card():
    """By hand: 4.8 MB take 1 us on an H200, and 4.762 us on a card with 1.008 TB/s."""

    def slow(): ...
    def twice(): ...
    def timed(): ...
    def counted(): ...
    def faster_than_counted(): ...
    def silent(): ...

    at = {"n": 4_800_000}
    predicted = (
        Prediction(rung=slow, at=at, percent_of_limit=(40, 50)),
        Prediction(rung=twice, at=at, times=2, over=slow),
        Prediction(rung=timed, at=at, ms=0.004),
        Prediction(rung=faster_than_counted, at=at, times=1.5, over=counted),
    )
    rungs = (slow, twice, timed, counted, faster_than_counted, silent)
    rtx = chips.find("RTX 4090")
    found = [*cards.rungs(rtx, "made.up", lesson_of(rungs, predicted, {counted: 3.0}))]
    assert [each.line[4:6] for each in found] == [
        ["9.524 to 11.9", "40% to 50%"],
        ["4.762 to 5.952", "80% to 100%"],
        ["19.05", "25%"],
        ["14.29", "33%"],
        ["9.524", "50%"],
        ["", ""],
    ]
    assert {each.bound for each in found} == {"memory"}
    assert found[3].why == "moves 3 times the least bytes"
    assert all(each.floor == pytest.approx(4.8e6 / 1.008e12) for each in found)


def test_occupancy_is_that_of_the_card(monkeypatch, tmp_path):
    """One kernel, compiled for sm_89: two cards with this target, of which one has an SM that is made up."""
    monkeypatch.setattr(targets, "FOLDER", tmp_path)
    (tmp_path / "made.up.csv").write_text(
        '# {"unfit": [["rung", 120, "too much shared memory"]]}\n'
        "rung,target,warps,registers,shared\nrung,89,8,64,0\nrung,89,8,128,0\nrung,90,8,255,0\n"
    )

    def rung(): ...

    lesson = lesson_of((rung,), (), {})
    rtx = chips.find("rtx4090")
    assert [each.occupancy for each in cards.rungs(rtx, "made.up", lesson)] == [pytest.approx(1 / 3)]
    large = replace(rtx, registers=131072)
    assert [each.occupancy for each in cards.rungs(large, "made.up", lesson)] == [pytest.approx(2 / 3)]
    (unfit,) = cards.rungs(chips.find("RTX 5080"), "made.up", lesson)
    assert (unfit.why, unfit.share) == ("no kernel: too much shared memory", None)
    lesson.extension = object()
    (unfit,) = cards.rungs(chips.find("MI300X"), "made.up", lesson)
    assert "NVIDIA alone" in unfit.why


def test_the_command_shows_a_card(monkeypatch):
    monkeypatch.setattr(show.console, "_width", 200)
    ended = CliRunner().invoke(command_line.app, ["chip", "RTX 4090", "lesson05_softmax"])
    assert ended.exit_code == 0
    assert "RTX 4090, predicted, not measured: day2_triton_basics.lesson05_softmax" in ended.output
    assert "266.3" in ended.output, "8192 x 8192 in bf16, read and written, at 1.008 TB/s"
    monkeypatch.setattr(device, "HAS_GPU", False)  # with one its own card is shown
    table = CliRunner().invoke(command_line.app, ["chip"])
    assert all(key in table.output for key in chips.CHIPS)
    unknown = CliRunner().invoke(command_line.app, ["chip", "RTX 4060"])
    assert unknown.exit_code == 2
    assert "RTX 4070" in unknown.output


@pytest.mark.parametrize("shared", [101376, 166912, 232448])
def test_stages_fit_the_chip(monkeypatch, shared):
    """At Hopper's limit what was measured there; elsewhere no more than a block may have."""
    monkeypatch.setattr(device, "shared_memory", lambda: shared)
    monkeypatch.setattr(_common, "shared_memory", lambda _: shared)
    for stages, size, beside in ((4, 36864, 0), (5, 40960, 0), (3, 49152, 32768), (4, 32768, 49152)):
        fitting = device.fitting_stages(stages, size, beside)
        assert fitting == _common.fitting_stages(stages, size, torch.device("cpu"), beside)
        assert fitting == stages if shared == 232448 else fitting * size + beside + 1024 <= shared


def test_amd_assembly_is_read():
    kernel = compiled._amd_row("rung", "mm", "gfx942", AMD_ASSEMBLY, 4)
    assert (kernel.registers, kernel.spills, kernel.shared, kernel.occupancy) == (132, 3, 16384, 0.375)
    assert (kernel.load_bytes, kernel.store_bytes, kernel.mma, kernel.cp_async) == (16, 2, 1, 1)
    assert (kernel.barriers, kernel.instructions) == (1, 7)


def test_what_amd_lacks_is_said_in_one_line():
    error = RuntimeError("LLD failed to link")
    assert compiled._why_not_amd(error) == "", "an error that nothing explains is a failure"
    error.add_note("error: invalid instruction\n mov.b32 s2, v4;")
    assert compiled._why_not_amd(error) == "has inline PTX, NVIDIA's assembly"
    pipelined = RuntimeError("PassManager::run failed")
    pipelined.add_note("error: 'tt.elementwise_inline_asm' op pipeliner doesn't know how to predicate this op.")
    assert compiled._why_not_amd(pipelined) == "has inline PTX, NVIDIA's assembly"
    assert "launched early" in compiled._why_not_amd(KeyError("Keyword argument launch_pdl was specified"))


def test_a_kernel_over_its_target_s_shared_memory_is_a_failure(monkeypatch):
    made = SimpleNamespace(
        metadata=SimpleNamespace(name="k", shared=101377),
        src=SimpleNamespace(fn=SimpleNamespace(is_gluon=lambda: False)),
        asm={"ttgir": ""},
    )
    (said,) = compiled._wrong("rung", 120, made, 101377)
    assert said == "rung for sm_120: k asks for 101377 bytes of shared memory a block; the chip has 101376"
    assert not compiled._wrong("rung", 100, made, 101377)
    monkeypatch.setattr(compiled, "_launched", lambda *asked: ([("rung", made)] * 2, [], ["f"]))
    assert compiled._count_here("lesson", 120) == {"kernels": 1, "unfit": 0, "failed": ("f", said, said)}


def test_an_outcome_is_kept_until_its_sources_change(monkeypatch, tmp_path):
    name, asked = "day2_triton_basics.lesson01_vector_add", []
    answer = {"kernels": [], "unfit": [{"rung": "r", "target": 120, "why": "w"}], "failed": ["f"]}
    monkeypatch.setattr(compiled, "call_in_compiler", lambda *args: asked.append(args) or answer)
    monkeypatch.setattr(compiled.files, "CACHE", tmp_path)
    first = compiled.outcome(name, 120)
    assert first == compiled.outcome(name, 120) == compiled.Outcome((), (compiled.Unfit("r", 120, "w"),), ("f",))
    assert len(asked) == 1
    with pytest.raises(RuntimeError, match=f"{name} does not compile: f"):
        compiled.kernels.__wrapped__(name, (120,))
    compiled.outcome(name, 89)
    sources = compiled._sources(name)
    assert {path.name for path in sources} >= {"lesson01_vector_add.py", "vector_add.py"}
    monkeypatch.setattr(compiled, "_sources", lambda name: sources[:-1])
    compiled.outcome(name, 120)
    assert len(asked) == 3


def test_another_operator_makes_no_kernel_of_a_lesson_old():
    """hopper.py takes one module of course_ops, whose __init__ takes all."""
    compiled._sources.cache_clear()
    ladder = {path.name for path in compiled._sources("day4_replace_op.lesson08_flash_hopper")}
    assert {"lazy_rescaling.py", "hopper.py", "versions.py"} < ladder
    assert "scan.py" not in ladder
    assert "scan.py" in {path.name for path in compiled._sources(compiled.COURSE_OPS)}


@pytest.mark.kept
@pytest.mark.parametrize(
    ("name", "target"), [("day3_matmul_tk.lesson08_grouped_matmul", 120), ("day3_matmul_tk.lesson01_matmul", "gfx942")]
)
def test_rungs_fit_a_target(name, target):
    """Two that need it most; each night asks all, for every target."""
    found = compiled.outcome(name, target)
    assert found.kernels
    assert not found.failed, "\n".join(found.failed)


@pytest.mark.kept
def test_a_tile_that_was_tuned_for_one_target_is_not_taken_for_the_next():
    """One process compiles for both; the autotuner keeps its choice by shape and dtype."""
    asked = "day3_matmul_tk.lesson01_matmul", ("autotuned",)
    for target in (90, 120):
        found = call_in_compiler(compiled.__name__, "_compile_here", asked[0], target, asked[1])
        assert not found["failed"], target


@pytest.mark.parametrize("name", [compiled.COURSE_OPS, "day2_triton_basics.lesson01_vector_add"])
def test_a_refusal_is_a_reason_and_no_failure(monkeypatch, name):
    """course_ops refuses by an error of its own."""
    refusal = compiled.Unsupported if name != compiled.COURSE_OPS else course_ops.Unsupported

    def refuse():
        raise refusal("fp8 needs compute capability 8.9")

    monkeypatch.setattr(compiled, "_calls", lambda *asked: [("rung", "", [refuse])])
    monkeypatch.setattr(compiled, "compiling", lambda target: nullcontext({}))
    found = compiled._compile_here(name, 86, ())
    why = {"rung": "rung", "target": 86, "why": "fp8 needs compute capability 8.9"}
    assert found == {"kernels": (), "unfit": (why,), "failed": ()}


@pytest.mark.night
@pytest.mark.kept
@pytest.mark.parametrize("target", chips.TARGETS, ids=chips.label)
@pytest.mark.parametrize("name", [*names("day2"), *names("day3"), *names("day4"), compiled.COURSE_OPS])
def test_every_rung_and_operator_fits_or_says_why_not(name, target):
    if name != compiled.COURSE_OPS and name not in dict(lesson_kernels(name)):
        return
    found = compiled.outcome(name, target)
    assert not found.failed, "\n".join(found.failed)


@pytest.mark.night
@pytest.mark.kept
def test_every_kernel_of_course_ops_is_compiled():
    """By one of the calls of course_ops.testing, for sm_90."""
    there = set()
    for path in (ROOT / "course_ops" / "kernels").glob("*.py"):
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        there |= {f.name for f in functions if f.decorator_list and f.name.endswith("_kernel")}
    assert there == {each.kernel for each in compiled.outcome(compiled.COURSE_OPS, 90).kernels}


def test_no_compiled_row_is_over_its_target_s_shared_memory():
    of_target = {str(target): chips.first(target) for target in chips.TARGETS}
    paths = sorted((REPORTS / "compiled").glob("*.csv"))
    assert len(paths) > 50
    for path in paths:
        for row in read_csv(path):
            assert int(row["shared"]) <= of_target[row["target"]].shared_block, f"{path.name}: {row}"
        for rung, target, why in head(path).get("unfit", ()):
            assert str(target) in of_target, path.name
            assert rung, path.name
            assert re.fullmatch(".+", why), path.name


def test_gluon_has_the_newest_names():
    there = SimpleNamespace(async_copy=1), SimpleNamespace(async_copy=2, async_load=3)
    asked = [[(module, "async_load"), (module, "async_copy")] for module in there]
    assert [names_of_gluon._first(*places) for places in asked] == [1, 3], "a removed name may still be bound"
    has = {name for name in names_of_gluon.__all__ if name.startswith("HAS_")}
    assert {getattr(names_of_gluon, name) for name in has} <= {True, False}
    lacking = {name for name in names_of_gluon.__all__ if getattr(names_of_gluon, name) is None}
    assert lacking <= {"allocate_mbarrier"}, "Triton 3.6 lacks no other"
    assert all(callable(getattr(names_of_gluon, name)) for name in {*names_of_gluon.__all__} - has - lacking)


def test_functions_that_count_as_they_were_are_still_there():
    for module, code in fingerprint.THEN.items():
        then = {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
        assert then <= set(vars(import_module(module))), "a function that is gone needs no earlier words"
        counted = fingerprint._Walk(ROOT).module(module)
        assert {name: len(counted.statements[name]) for name in then} == dict.fromkeys(then, 1)


def test_attention_gives_the_inputs_and_the_work_of_the_words_that_count():
    """The earlier words, run in the module of today, beside its functions."""
    attention = import_module("problems.attention")
    then = dict(vars(attention))
    exec(compile(fingerprint.THEN["problems.attention"], "then", "exec"), then)
    for shape in (
        {"B": 1, "H": 2, "S": 5, "D": 8},
        {"B": 2, "H": 4, "S": 3, "D": 8, "S_k": 7, "H_kv": 2, "causal": True, "window": 2, "layout": "bshd"},
    ):
        sizes = {name: value for name, value in shape.items() if name != "layout"}
        for work in ("work", "work_backward"):
            now = getattr(attention, work)(dtype=torch.float16, **sizes)
            assert now == then[work](dtype=torch.float16, **sizes)
        for inputs in ("inputs", "inputs_backward"):
            both = []
            for ask in (getattr(attention, inputs), then[inputs]):
                torch.manual_seed(0)
                both.append(ask(*(shape[n] for n in "BHSD"), **{n: v for n, v in shape.items() if n not in "BHSD"}))
            for one, other in zip(*both, strict=True):
                assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
