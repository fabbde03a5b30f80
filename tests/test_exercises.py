"""Exercises: the right answer passes, every wrong one is refused by the property it names, the stub says what to do."""

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

from lessonkit import device
from lessonkit.base import files
from lessonkit.base.chips import label
from lessonkit.base.errors import Fault
from lessonkit.base.words import speaking, translated
from lessonkit.cuda import toolchain
from lessonkit.exercise import compile_check, grade, number, same, source
from lessonkit.exercise.source import Source
from lessonkit.judge import sentences
from lessonkit.modes.compiled import second_target

import pytest
import torch

pytestmark = pytest.mark.kept("*/exercises/**/*")
TRANSLATED = pytest.mark.kept("*/exercises/**/*", "locale/**/*")  # a process reads a catalogue once
ALL = source.discover()
each = pytest.mark.parametrize("exercise", ALL, ids=lambda e: e.name)
WRONG = [pytest.param(e, w, id=f"{e.name}-{w.why}") for e in ALL for w in e.exercise.wrong]
WATCHED = ("out of bounds", "traffic")  # addresses are watched in the interpreter, not on a GPU
MUL = next(e for e in ALL if e.path.stem == "exercise01_mul")


def skip_what_cannot_run(exercise):
    if exercise.is_cuda and device.HAS_GPU:
        pytest.skip("CUDA C++ exercises are emulated; with CUDA_VISIBLE_DEVICES= they are tested here too")
    if (extension := exercise.exercise.extension) and (why := extension.lacks()):
        pytest.skip(why)


def test_there_are_exercises():
    assert {e.folder for e in ALL} >= {
        "day1_pytorch",
        "day2_triton_basics",
        "day3_matmul_tk",
        "day4_replace_op",
        "day5_tuning",
        "cuda_src",
    }
    assert len(ALL) >= 30
    for exercise in ALL:
        assert source.find(exercise.short) == [exercise], (
            f"{exercise.short} has to name one exercise: the commands take it"
        )


@each
@pytest.mark.parametrize("seed", [0, pytest.param(1234, marks=pytest.mark.night)])
def test_right_answer_passes(exercise, seed):
    """The answer as it is shown, without the stub's lines."""
    skip_what_cannot_run(exercise)
    assert "stub:" not in exercise.solution
    targets = compile_check.TARGETS if seed else [second_target(exercise.name)]  # all of them at night
    verdict = grade.grade_and_compile(exercise, exercise.solution, seed=seed, targets=targets)
    assert verdict.right, verdict
    if exercise.exercise.op and device.INTERPRETED:
        assert verdict.score
    has_kernels = exercise.is_cuda or "@triton.jit" in exercise.solution
    if not has_kernels or device.HAS_GPU:
        assert not verdict.compiled
    elif compile_check.lacks_compiler() or (exercise.is_cuda and toolchain.lacks("nvcc")):
        assert verdict.compiled.startswith("right in values, not compiled here: ")
    else:
        assert verdict.compiled == f"compiled for {', '.join(map(label, targets))}"


@pytest.mark.parametrize(("exercise", "wrong"), WRONG)
def test_wrong_answer_fails(exercise, wrong):
    skip_what_cannot_run(exercise)
    if device.HAS_GPU and wrong.caught_by in WATCHED:
        pytest.skip("addresses are watched in the interpreter; on a GPU compute-sanitizer does it")
    if device.HAS_GPU and wrong.caught_by == "nan" and "other=" in wrong.old and "other=" not in wrong.new:
        pytest.skip("what masked lanes hold is NaN in the interpreter; on a GPU it may be 0")
    verdict = grade.grade(exercise, exercise.wrong(wrong))
    assert verdict.caught_by == wrong.caught_by, verdict


@each
def test_stub_fails_and_says_why(exercise):
    skip_what_cannot_run(exercise)
    verdict = grade.grade(exercise, exercise.stub)
    assert not verdict.right, "solved already"
    assert verdict.why
    assert verdict.on
    assert verdict.caught_by not in ("crash", "time")
    assert source.CUT not in exercise.stub
    assert "EXERCISE" not in exercise.stub
    if exercise.regions:
        assert exercise.untouched(exercise.stub) == list(exercise.regions)
        assert not exercise.untouched(exercise.solution)
    else:
        assert any(w.planted for w in exercise.exercise.wrong)


@TRANSLATED
@each
def test_a_stub_begun_in_chinese_is_the_stub_in_english_too(exercise):
    chinese = exercise.read(exercise.stub, partial(translated, language="zh"))
    assert chinese != exercise.stub
    assert exercise.untouched(chinese) == list(exercise.regions)
    assert exercise.is_stub(chinese)
    assert exercise.is_stub(exercise.stub)
    assert not exercise.is_stub(exercise.solution)


@each
def test_each_region_is_needed(exercise):
    """With one region left as the stub has it and all others written, the answer is refused."""
    skip_what_cannot_run(exercise)
    unseen = [exercise.wrong(w) for w in exercise.exercise.wrong if device.HAS_GPU and w.caught_by in WATCHED]
    for left in exercise.regions:
        lines = exercise.with_marks.splitlines(True)
        lines[left.start : left.stop] = left.stub
        text = "".join(line for line in lines if not re.match(r"\s*(#|//) stub:", line))
        assert text in unseen or not grade.grade(exercise, text).right, f"TODO({left.number}) need not be done"


@each
def test_declares_enough(exercise):
    declared = exercise.exercise
    assert len(declared.hints) == 3
    assert all(declared.hints)
    assert len({w.why for w in declared.wrong}) == len(declared.wrong) >= 3
    assert declared.claims or declared.op
    assert [r.number for r in exercise.regions] == list(range(1, len(exercise.regions) + 1))


def test_answers_lie_where_no_other_user_writes():
    assert files.CACHE in Path(source.build(MUL, MUL.solution).__file__).parents


def test_drift_is_an_error(tmp_path):
    """A wrong answer or a region that the file has left behind stops the suite, not the learner."""
    with pytest.raises(ValueError, match="stands 0 times"):
        MUL.wrong(source.Wrong("gone", "no such text", ""))
    path = tmp_path / "day" / "exercises" / "exercise01_x.py"
    path.parent.mkdir(parents=True)
    path.write_text(f"# TODO(1): a task\npass\n{source.CUT}\n")
    with pytest.raises(ValueError, match="has no line"):
        Source(path).regions  # noqa: B018
    path.write_text("pass\n")
    with pytest.raises(ValueError, match="is missing"):
        Source(path).stub  # noqa: B018


def in_chinese(refused):
    with speaking("zh"):
        return re.search("[\u4e00-\u9fff]", sentences.told(str(refused)))


@TRANSLATED
@pytest.mark.parametrize("wrong", [0, 2])
def test_why_an_answer_is_refused_is_said_in_chinese(wrong):
    verdict = grade.grade(MUL, MUL.wrong(MUL.exercise.wrong[wrong]))
    assert in_chinese(verdict.why) or device.HAS_GPU
    assert sentences.told(f"n=1: {verdict.why}") == f"n=1: {verdict.why}"


@TRANSLATED
@pytest.mark.parametrize(
    ("got", "exact", "says"),
    [(8, 4, "2 to 10 times too large"), (3, 4, "a little too small"), (None, 4, "write a number"), (-4, 4, "sign"),
     (float("nan"), 4, "no prediction"), (400, 4, "more than 10 times"), (1, 0, "is wrong")],
)  # fmt: skip
def test_number_does_not_give_itself_away(got, exact, says):
    with pytest.raises(AssertionError, match=says) as refused:
        number("bytes", got, exact)
    assert f"{exact}" not in str(refused.value).replace(str(got), "")
    assert in_chinese(refused.value)
    number("bytes", 4.01, 4)


@TRANSLATED
def test_same_says_the_first_difference():
    for got, expected, says in (
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), r"first at \(1,\): expected 3, got 2"),
        (torch.zeros(2), torch.zeros(3), "expected shape"),
        (None, torch.zeros(3), "expected a tensor"),
        ([1, 2], [1, 3], "at 1: expected 3, got 2"),
        ([1], [1, 3], "expected 2 of them"),
        (1, 2, "expected 2, got 1"),
    ):
        with pytest.raises(AssertionError, match=says) as refused:
            same("x", got, expected)
        assert in_chinese(refused.value)
    same("x", [1, 2], [1, 2])


def test_a_mistake_is_not_taken_for_another():
    """Two wrong answers are refused in the same words, but for numbers: each is named, and what is neither is not."""
    (exercise,) = source.find("scale_rows")
    skip_what_cannot_run(exercise)
    columns, rows, *_ = exercise.exercise.wrong
    for wrong in (columns, rows):
        verdict = grade.grade(exercise, exercise.wrong(wrong), seed=3)
        assert grade.recognised(exercise, verdict, 3) == wrong.why
        further_down = replace(verdict, why=verdict.why.replace("your file:1", "your file:2"))
        assert grade.recognised(exercise, further_down, 3) == wrong.why
    assert grade.recognised(exercise, replace(verdict, why=re.sub(r"\d+", "7", verdict.why)), 3) == ""


@pytest.mark.parametrize("distance", [16, 24, 4096])
def test_a_fault_reads_the_same_wherever_tensors_lie(distance):
    """Also where the heap puts one so close behind another that it is nearer to the wrong address."""
    (exercise,) = source.find("scale_rows")
    skip_what_cannot_run(exercise)
    module = source.build(exercise, exercise.wrong(exercise.exercise.wrong[0]))
    memory = torch.ones(distance + 1)
    with pytest.raises(Fault, match=r"92 bytes past the end of x \[1 x 1 float32\]"):
        module.EXERCISE.op(memory[:1].view(1, 1), memory[distance:])


@pytest.mark.parametrize(("end", "says"), [("os._exit(3)", "exit code 3"), ("os.kill(os.getpid(), 9)", "SIGKILL")])
def test_a_dead_worker_is_killed_before_its_number_is_free(monkeypatch, end, says):
    """Once it has been waited for, its process group's number may be that of another."""
    kill, groups = os.killpg, []

    def killpg(group, number):
        os.waitid(os.P_PID, group, os.WEXITED | os.WNOWAIT)  # ChildProcessError if it was waited for already
        groups.append(group)
        kill(group, number)

    monkeypatch.setattr(grade.os, "killpg", killpg)
    verdict = grade.grade_apart(MUL, f"import os\n{end}\n", seed=0)
    assert (verdict.caught_by, verdict.why) == ("crash", f"the process that ran it died ({says})")
    assert len(groups) == 1
