"""Rungs beside another process: which are repeated, what counts as different, what is kept. No GPU is used."""

import itertools
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import lessonkit.__main__ as main
from lessonkit.base import device
from lessonkit.base.errors import Missing
from lessonkit.base.files import REPORTS
from lessonkit.base.tables import read_csv
from lessonkit.commands import on_gpu
from lessonkit.lesson import discover, kernels
from lessonkit.measure import beside, operator_cases
from lessonkit.measure.beside import Repeated, measured
from lessonkit.measure.operator_cases import Chosen
from lessonkit.pages import report

import pytest
import torch
from typer.testing import CliRunner

RUNGS = {
    (name, rung.__name__): beside.kinds(name, rung.__name__) for name, lesson in kernels() for rung in lesson.rungs
}


@pytest.mark.parametrize(
    ("lesson", "rung", "kinds"),
    [
        ("day2_triton_basics.lesson01_vector_add", "add_wide", []),
        ("day2_triton_basics.lesson15_scan", "scan_look_back", ["spinning"]),
        ("day3_matmul_tk.lesson02_matmul_persistent", "warp_specialized", ["barriers"]),
        ("day4_replace_op.lesson09_flash_hopper_backward", "causal_skip", ["barriers", "early launch"]),
        ("day4_replace_op.lesson11_flash_decoding_shares", "decode", ["early launch"]),
        ("cuda_src.01_hello_cuda", "who_1d", []),
        ("cuda_src.22_hopper_matmul", "matmul_wgmma", ["barriers"]),
    ],
)
def test_what_a_neighbour_can_disturb_is_read_from_the_kernels(lesson, rung, kinds):
    assert RUNGS[lesson, rung] == kinds


def test_a_call_is_long_enough_to_be_interrupted(monkeypatch):
    """Repeated is what is timed. The check of 1040 x 72 x 32 found no fault in a kernel that has one (day 5)."""
    lesson = dict(kernels())["day3_matmul_tk.lesson02_matmul_persistent"]
    lesson = replace(lesson, dtypes=(lesson.bench_dtype,))
    rung = next(rung for rung in lesson.rungs if rung.__name__ == "warp_specialized")
    monkeypatch.setattr(beside.check, "cannot_run", lambda *asked: "")
    first, *others = (case for case, _ in beside.cases(lesson, rung))
    assert lesson.work(dtype=lesson.bench_dtype, **first.shape).flops >= 2 * 4096**3
    assert [str(case) for case in others] == [str(case) for case in reversed(lesson.checks) if case.gib <= 1]


def test_the_lesson_on_neighbours_says_what_its_rows_say():
    """The rows show both faults, and `beside` finds the second; the lesson says so, and asserts nothing else."""
    folder = REPORTS / "nvidia-h200"
    lesson = dict(discover("lesson04_neighbours"))["day5_tuning.lesson04_neighbours"]
    alone = report.kept_table(folder, lesson.steps[0].__module__, "right alone")
    wrong = [row for row in alone if row["wrong"] != "0"]
    assert [(row["the barrier is"], row["beside a neighbour"], row["only numbers"]) for row in wrong] == [
        ("made, idle", "True", "0, 1, 2, 3")
    ]
    tritons = report.kept_table(folder, lesson.steps[0].__module__, "tritons too")
    (found,) = (row for row in tritons if row["wrong calls"] != "0")
    assert (found["rung"], found["beside a neighbour"]) == ("warp_specialized", "True")
    words = " ".join(sys.modules[lesson.steps[0].__module__].__doc__.split())
    assert 15 < int(found["calls"]) / int(found["wrong calls"]) < 25
    assert "one answer in twenty is wrong" in words
    (row,) = (
        row for row in read_csv(folder / beside.NAME) if row["rung"] == "warp_specialized" and row["differ"] != "0"
    )
    assert row["case"] == "M=4096 N=4096 K=4096"
    assert f"{row['differ']} of {row['calls']} answers" in words
    assert f"a {4096**3 // (1040 * 72 * 32) // 1000},000th of the FLOPs" in words
    assert "does not show that a kernel is right" in words


def test_every_gluon_rung_is_repeated():
    """All of them hand shared memory over by mbarriers."""
    left = [key for key, kinds in RUNGS.items() if "flash_hopper" in key[0] and "barriers" not in kinds]
    assert not left


def test_a_bit_that_differs_counts_once_a_call():
    """NaN equals the same NaN; a negative zero is no zero."""
    answers = itertools.cycle([torch.tensor([float("nan"), 0.0])] * 3 + [torch.tensor([float("nan"), -0.0])] * 2)
    found = beside.repeat(lambda: next(answers), 0.0, lambda: None)
    assert (found.count, found.differ) == (10, 4)
    same = torch.ones(4)
    found = beside.repeat(lambda: (same, same), 0.0, lambda: None)
    assert (found.count, found.differ) == (10, 0)


SCAN = "day2_triton_basics.lesson15_scan"


@pytest.mark.parametrize(("error", "refused"), [(1e-7, False), (1e-2, True), (float("nan"), True)])
def test_every_answer_has_to_lie_within_the_checkers_allowance(error, refused):
    """Each element's smallest and largest value of all calls are compared: one wrong answer of many is found."""
    lesson = dict(kernels())[SCAN]
    rung = next(rung for rung in lesson.rungs if rung.__name__ == "scan_look_back")
    question = beside.check.truth(lesson, {"n": 74962}, torch.float32)  # as on the GPU
    right, calls = question.usual[0], itertools.count()
    wrong = right.clone()
    wrong[-1] *= 1 + error
    found = beside.repeat(lambda: wrong if next(calls) == 5 else right, 0.0, lambda: None)
    assert found.differ == 1
    assert bool(beside.outside(question, rung, found)) == refused


ALONE = Repeated("day.a", "rung", "barriers", "n=8", "float32", False, 100, 0)
BESIDE = replace(ALONE, neighbour=True)


@pytest.mark.parametrize(
    ("alone", "busy", "says"),
    [
        ({}, {}, ""),
        ({}, {"differ": 1}, "differ beside another process; its docstring does not say"),
        ({"differ": 3}, {"differ": 9}, "differ alone; its docstring does not say"),
        ({"differ": 3, "varies": True}, {"differ": 9, "varies": True}, ""),
        ({"varies": True}, {"differ": 9, "varies": True}, ""),
        ({"differ": 3, "varies": True, "outside": "2e-3 off"}, {"varies": True}, "wrong alone: 2e-3 off"),
        ({"varies": True}, {"differ": 1, "varies": True, "outside": "2e-3 off"}, "beside another process: 2e-3 off"),
    ],
    ids=["right", "differs beside", "differs alone", "may differ", "only beside", "wrong alone", "wrong beside"],
)
def test_answers_are_equal_or_the_rung_says_that_they_vary(alone, busy, says):
    wrong = beside.wrong([replace(BESIDE, **busy), replace(ALONE, **alone)])
    assert says in wrong
    assert bool(wrong) == bool(says)


def test_the_scan_that_looks_back_says_that_its_order_varies():
    rungs = {rung.__name__: beside.varies(rung) for rung in dict(kernels())[SCAN].rungs}
    assert [name for name, varies in rungs.items() if varies] == ["scan_look_back"]


def test_what_is_repeated_again_replaces_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(beside.rows, "machine", lambda: {"gpu": "some-gpu"})
    beside.save(tmp_path, [ALONE, BESIDE])
    beside.save(tmp_path, [replace(ALONE, rung="other"), replace(BESIDE, rung="other")])
    beside.save(tmp_path, [replace(ALONE, calls=7), BESIDE])
    kept = read_csv(tmp_path / beside.NAME)
    assert [(row["rung"], row["neighbour"], row["calls"]) for row in kept] == [
        ("other", "False", "100"),
        ("other", "True", "100"),
        ("rung", "False", "7"),
        ("rung", "True", "100"),
    ]


def test_rows_of_an_older_command_stay_beside_new_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(beside.rows, "machine", lambda: {"gpu": "some-gpu"})
    (tmp_path / beside.NAME).write_text("lesson,rung,neighbour,calls,differ\nday.a,other,False,9,0\n")
    beside.save(tmp_path, [ALONE, replace(BESIDE, outside="2e-3 off")])
    assert [row["outside"] for row in read_csv(tmp_path / beside.NAME)] == ["", "", "2e-3 off"]


def process(monkeypatch, code):
    """The neighbour is this Python program."""
    popen, started = subprocess.Popen, []

    def start(command, **more):
        started.append(popen([sys.executable, "-c", code], **more))
        return started[-1]

    monkeypatch.setattr(beside.subprocess, "Popen", start)
    return started


def test_a_neighbour_that_does_not_come_is_an_error(monkeypatch):
    process(monkeypatch, "raise SystemExit('no GPU here')")
    with pytest.raises(Missing, match="did not start: no GPU here"), beside.neighbour():
        pytest.fail("nothing is repeated beside nobody")


def test_a_neighbour_may_have_something_to_say_before_it_is_there(monkeypatch):
    """PyTorch warns at its import of packages that it does not like; stderr comes with stdout."""
    process(monkeypatch, "import time\nprint('FutureWarning: pynvml')\nprint('here', flush=True)\ntime.sleep(60)")
    with beside.neighbour():
        pass


@pytest.mark.parametrize("only", ["", "scan_look_back"])
def test_rungs_are_repeated_alone_and_then_beside_one_neighbour(monkeypatch, only):
    """It takes seconds to start. So all lessons share it; two of them may have rungs of one name."""
    name, lesson = SCAN, dict(kernels())[SCAN]
    neighbours = []
    monkeypatch.setattr(beside, "neighbour", lambda: nullcontext(neighbours.append(1)))
    monkeypatch.setattr(beside, "kinds", lambda name, rung: ["spinning"])
    monkeypatch.setattr(beside, "repeat", lambda call, seconds, synchronize: beside.Calls(7, 0, (), ()))
    monkeypatch.setattr(beside, "_taken", lambda lesson, rung: (lesson.checks[0], torch.float32))
    monkeypatch.setattr(beside.operator_cases, "source", lambda name, rung: f"{name} {rung}")
    found = [each for (each,) in beside.measured([(name, lesson), ("day.b", lesson)], 0.0, only)]
    assert all(each.source == f"{each.lesson} {each.rung}" for each in found)
    rungs = [(of, rung.__name__) for of in (name, "day.b") for rung in lesson.rungs if only in ("", rung.__name__)]
    assert [(each.lesson, each.rung, each.neighbour) for each in found] == [
        (*r, n) for n in (False, True) for r in rungs
    ]
    assert neighbours == [1]
    assert beside.by_case(found) == [[each for each in found if (each.lesson, each.rung) == rung] for rung in rungs]
    assert beside.by_case(found[:-1]) == beside.by_case(found)[:-1], "alone says nothing"
    beside_alone = [each for (each,) in beside.measured([(name, lesson)], 0.0, only, alone=False)]
    assert beside_alone == [each for each in found if each.neighbour and each.lesson == name]


def test_the_cases_of_an_operator_share_the_seconds_and_are_kept_together(monkeypatch, repeated, tmp_path):
    """Two cases of a direction, one of them in deterministic mode: rows of both, in place of earlier ones."""
    small = Chosen({"n": 8}, "float32", ("scan.look_back_kernel",), deterministic=False, varies=True)
    cases = (small, replace(small, kernels=("scan.block_sums_kernel",), deterministic=True, varies=False))
    modes, seconds_of = [], []

    def repeat(call, seconds, synchronize):
        modes.append(torch.are_deterministic_algorithms_enabled())
        seconds_of.append(seconds)
        return beside.Calls(7, 0, (), ())

    monkeypatch.setattr(beside, "neighbour", nullcontext)
    monkeypatch.setattr(beside, "repeat", repeat)
    monkeypatch.setattr(beside.operator_cases, "chosen", lambda name, direction, large: cases)
    lessons = operator_cases.lessons("course_ops.scan")
    for found in (measured(lessons, 6.0, "forward"), measured(lessons, 6.0, "forward")):
        repeated[:] = [each for whole in found for each in whole]
        beside.save(tmp_path, repeated)
    assert modes[:4] == [False, True] * 2
    assert set(seconds_of) == {3.0}
    assert [(each.case, each.neighbour, each.varies) for each in repeated] == [
        (case, neighbour, varies)
        for neighbour in (False, True)
        for case, varies in (("n=8", True), ("n=8 deterministic", False))
    ]
    assert len(beside.by_case(repeated)) == 2
    rows = read_csv(tmp_path / beside.NAME)
    assert [row["kernels"] for row in rows] == ["scan.look_back_kernel", "scan.block_sums_kernel"] * 2
    assert {row["source"] for row in rows} == {operator_cases.source("course_ops.scan", "forward")}
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_neighbour_that_ends_is_an_error(monkeypatch):
    started = process(monkeypatch, "print('here', flush=True)")
    with pytest.raises(Missing, match="ended with 0"), beside.neighbour():
        started[0].wait()


def test_a_neighbour_is_there_inside_and_gone_after(monkeypatch):
    started = process(monkeypatch, "print('here', flush=True)\nwhile True: pass")
    with beside.neighbour():
        assert started[0].poll() is None
    assert started[0].returncode is not None


@pytest.fixture
def repeated(monkeypatch, tmp_path):
    """A machine with a GPU, where one rung is repeated; `beside` says how it went."""
    found = [ALONE, BESIDE]
    monkeypatch.setattr(on_gpu, "REPORTS", tmp_path)
    monkeypatch.setattr(device, "HAS_GPU", True)
    monkeypatch.setattr(device, "name", lambda: "some-gpu")
    monkeypatch.setattr(beside.rows, "machine", lambda: {"gpu": "some-gpu"})
    monkeypatch.setattr(beside, "measured", lambda lessons, seconds, rung, alone: ([each] for each in found))
    return found


@pytest.mark.parametrize(("differ", "status"), [(0, 0), (2, 1)])
def test_the_command_fails_where_a_neighbour_changes_an_answer(repeated, tmp_path, differ, status):
    repeated[1] = replace(BESIDE, differ=differ)
    done = CliRunner().invoke(main.app, ["beside", "lesson01_vector_add"])
    assert done.exit_code == status, done.output
    assert f"beside another process: {differ} of 100" in " ".join(done.output.split())
    assert len(read_csv(tmp_path / "some-gpu" / beside.NAME)) == 2


def test_what_is_whole_is_kept_where_the_command_is_stopped(repeated, tmp_path, monkeypatch):
    """The second rung has been repeated alone when the process dies."""

    def dies(lessons, seconds, rung, alone):
        yield from ([ALONE], [replace(ALONE, rung="other")], [BESIDE])
        raise KeyboardInterrupt

    monkeypatch.setattr(beside, "measured", dies)
    CliRunner().invoke(main.app, ["beside", "lesson01_vector_add"])
    assert [row["rung"] for row in read_csv(tmp_path / "some-gpu" / beside.NAME)] == ["rung", "rung"]


@pytest.mark.skipif(device.HAS_GPU, reason="a machine without a GPU")
def test_without_a_gpu_one_line_says_so():
    done = CliRunner().invoke(main.app, ["beside"])
    assert done.exit_code == 0
    assert "No GPU was found" in done.output
