"""Mutants that one kind of GPU alone can judge: each in a process of its own, their verdicts kept and of today."""

import json
import subprocess
import sys
import threading
from dataclasses import replace

import lessonkit.__main__ as main
from lessonkit.base import device
from lessonkit.base.errors import Rejected
from lessonkit.base.files import environment
from lessonkit.commands import on_gpu
from lessonkit.judge import apart, check, mutants
from lessonkit.lesson import Mutant, discover, kernels
from lessonkit.measure import gpu_mutants, rows

import pytest
from typer.testing import CliRunner

ADD = "day2_triton_basics.lesson01_vector_add"
LESSON = dict(discover(ADD))[ADD]
WRONG = next(mutant for mutant in LESSON.wrong if mutant.caught_by != "out of bounds")
OF_ONE_LESSON = pytest.mark.kept("lessonkit/**/*.py")  # what the process of its own runs beside the lesson


@OF_ONE_LESSON
def test_a_process_of_its_own_judges_as_this_one_does():
    here = mutants.first_rejection(LESSON, mutants.build(ADD, WRONG))
    assert apart.judged(ADD, WRONG) == apart.Verdict.of(here)


@OF_ONE_LESSON
def test_a_mutant_that_cannot_be_judged_is_an_error_with_its_reason():
    with pytest.raises(RuntimeError, match=r"(?s)'none of them' could not be judged.*StopIteration"):
        apart.judged(ADD, replace(WRONG, why="none of them"))


@OF_ONE_LESSON
def test_what_does_not_end_hangs(monkeypatch):
    with pytest.raises(Rejected, match=r"did not end in 0.01 s") as hang:
        apart.within(0.01, lambda: False)()
    assert hang.value.caught_by == "hang"
    answers = iter([False, True])
    apart.within(10, lambda: next(answers))()
    monkeypatch.setattr(apart, "LIMIT", 0.01)
    assert apart.judged(ADD, WRONG).caught_by == "hang", "nor may the process be stuck anywhere else"


@OF_ONE_LESSON
def test_a_call_that_does_not_return_to_the_host_hangs():
    """A process of its own, since the verdict ends it. The call sleeps for longer than the test may take."""
    code = (
        "import time; from lessonkit.judge import apart, mutants; apart.CALL_PATIENCE = 0.1;"
        "mutants.first_rejection = lambda *a: time.sleep(3600);"
        f"apart.main({ADD!r}, {WRONG.why!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=600)
    assert json.loads(done.stdout.splitlines()[-1])["caught_by"] == "hang", done.stderr


@OF_ONE_LESSON
def test_a_call_in_time_sets_the_watch_again():
    late = threading.Event()
    watch = apart.Watch(3600, late.set)
    first = watch._timer
    watch.again()
    assert first.finished.is_set()
    assert not watch._timer.finished.is_set()
    watch.stop()
    assert watch._timer.finished.is_set()
    assert not late.is_set()


@pytest.mark.parametrize(
    ("said", "caught_by"),
    [("Triton Error [CUDA]: an illegal instruction was encountered\nmore", "fault"), ("out of memory", "")],
)
def test_an_error_of_the_gpu_is_a_fault_and_no_other_is(said, caught_by):
    def rung(x, y):
        raise RuntimeError(said)

    args = LESSON.inputs(8)
    with pytest.raises((Rejected, RuntimeError)) as error:
        check.answer(rung, args)
    assert getattr(error.value, "caught_by", "") == caught_by


def test_either_of_two_properties_may_be_declared():
    either = replace(WRONG, caught_by="value or nan")
    assert apart.Verdict("nan").is_as_declared(either)
    assert not apart.Verdict("hang").is_as_declared(either)
    assert not apart.Verdict().is_as_declared(either)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A GPU's folder with one row of the lesson's rung, whose mutants only this GPU can judge."""
    monkeypatch.setattr(rows, "REPORTS", tmp_path)
    monkeypatch.setitem(vars(getattr(sys.modules[ADD], WRONG.rung)), "needs", 90)
    monkeypatch.setattr(gpu_mutants.rows, "read", lambda path: [replace(A_ROW, rung=WRONG.rung)] * path.exists())
    path = tmp_path / rows.MACHINE
    rows.write_atomically(path / f"{ADD}.csv", "")
    return path


A_ROW = rows.Row(*["", "", "rung", "", ""], *[0.0] * 3, 0, *[0.0] * 4, *[""] * 8)


def judged(**changes):
    where = ("gpu", "1", "2", "3", "4", "abc", "2026-01-01")
    found = gpu_mutants.Judged(ADD, WRONG.rung, WRONG.why, WRONG.caught_by, "n=1", *where, "")
    return replace(found, **({"source": gpu_mutants.source(ADD, WRONG)} | changes))


def test_a_release_wants_a_verdict_of_today_on_each(folder):
    lessons = [(ADD, replace(LESSON, wrong=(WRONG,)))]
    assert list(gpu_mutants.old(lessons)) == [f"{rows.MACHINE}: {ADD}: {WRONG.why}"]
    gpu_mutants.save(folder, judged(source="another"))
    assert list(gpu_mutants.old(lessons)) == [f"{rows.MACHINE}: {ADD}: {WRONG.why}"], "of code that is no longer there"
    gpu_mutants.save(folder, judged())
    assert not list(gpu_mutants.old(lessons))
    assert len(gpu_mutants.read(folder)) == 1, "a new verdict replaces the one before"
    other = replace(WRONG, new=f"{WRONG.new} ")
    assert list(gpu_mutants.old([(ADD, replace(LESSON, wrong=(other,)))])), "the change counts, not its name alone"


def test_a_verdict_that_is_not_as_declared_is_told(folder):
    lessons = [(ADD, replace(LESSON, wrong=(WRONG,)))]
    gpu_mutants.save(folder, judged())
    assert not list(gpu_mutants.contradicted(lessons))
    gpu_mutants.save(folder, judged(caught_by=""))
    assert list(gpu_mutants.contradicted(lessons)) == [
        f"{rows.MACHINE}: {ADD}: {WRONG.why}: caught by nothing, declared {WRONG.caught_by!r}"
    ]


def test_only_rungs_that_need_a_gpu_are_judged_apart():
    found = {name for name, _ in gpu_mutants.of_one_gpu(kernels("day"), 90)}
    assert ADD not in found
    assert any("matmul" in name for name in found)
    assert not gpu_mutants.of_one_gpu(kernels(ADD), 90)
    assert not gpu_mutants.of_one_gpu([(ADD, replace(LESSON, wrong=(Mutant("", "", "", "", "nothing"),)))], 90)


KITTENS = "day3_matmul_tk.lesson14_thunderkittens_matmul"


def test_a_mutant_that_this_machine_lacks_something_for_is_left_out_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(on_gpu, "REPORTS", tmp_path)
    monkeypatch.setattr(device, "HAS_GPU", True)
    monkeypatch.setattr(device, "capability", lambda: 90)
    monkeypatch.setattr(device, "name", lambda: "some-gpu")
    monkeypatch.setattr(check, "capability", lambda: 90)
    monkeypatch.delenv("THUNDERKITTENS_ROOT", raising=False)
    monkeypatch.setattr(gpu_mutants, "judge", lambda *mutant: pytest.fail("judged"))
    done = CliRunner().invoke(main.app, ["mutants", KITTENS])
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    mutants_of = dict(discover(KITTENS))[KITTENS].wrong
    assert said.count("left out: no ThunderKittens in THUNDERKITTENS_ROOT") == len(mutants_of)


def test_what_only_watched_addresses_show_is_no_gpus_to_judge():
    """And the interpreter or the emulator can: no such mutant is of a rung that they cannot run."""
    found = [(n, m) for n, lesson in kernels() for m in lesson.wrong if m.caught_by == mutants.OUT_OF_BOUNDS]
    rungs = {(n, m.why): getattr(sys.modules[n], m.rung) for n, m in found}
    needing = [key for key, rung in rungs.items() if getattr(rung, "needs", 0)]
    assert needing, "as lesson07_quantize_fp8's"
    assert all(rungs[key].interpreted for key in needing)
    assert not [m for n, m in found if mutants.is_of_one_gpu(n, m)]


def test_kept_verdicts_are_as_the_lessons_say():
    contradictions = list(gpu_mutants.contradicted(kernels()))
    assert not contradictions, "\n".join(contradictions)


@pytest.mark.release
def test_every_mutant_of_a_gpu_has_a_verdict_of_today():
    old = list(gpu_mutants.old(kernels()))
    assert not old, f"on the GPU: `python -m lessonkit mutants`: {old}"
