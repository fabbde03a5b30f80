"""`exercise` as a learner uses it: what next, check, watch, hint, reset and list say, and what they remember."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from lessonkit import device
from lessonkit.base import files
from lessonkit.base.files import environment
from lessonkit.base.words import speaking
from lessonkit.commands import exercises
from lessonkit.cuda import build, toolchain
from lessonkit.exercise import desk, grade, progress, source

import pytest
from typer.testing import CliRunner

pytestmark = pytest.mark.kept("*/exercises/**/*")
WHOLE = pytest.mark.kept("*/exercises/**/*", "lessonkit/**/*.py")  # of a process that runs the whole command line
LACKS = toolchain.lacks("g++", "Python.h", "ninja")
MUL = source.find("day2_triton_basics.exercise01_mul")[0]


@pytest.fixture
def answers(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_ANSWERS", str(tmp_path))
    monkeypatch.setattr(exercises.show.console, "_width", 200)
    return tmp_path


def run(*words):
    """As in a terminal, in this process; returns (exit code, what was printed)."""
    with exercises.show.console.capture() as printed:
        done = CliRunner().invoke(exercises.app, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, printed.get() + done.output


interpreted = pytest.mark.skipif(device.HAS_GPU, reason="the command hides the GPU from a process of its own")


@interpreted
def test_a_learners_way(answers, monkeypatch):
    """next, a failed check, hints, a mistake that is recognised, the right answer, the solution, reset."""
    code, text = run("next", "exercise01_mul")
    assert code == 0
    assert "TODO(1)" in text
    mine = progress.answer_file(MUL)
    assert mine.read_text() == MUL.stub

    code, text = run("check", "mul")
    assert code == 1
    assert "never written" in text
    assert "TODO(1) is as it was" in text
    seed = progress.of(MUL).seed
    assert seed is not None

    for level in (1, 2, 3, 3):
        _, text = run("hint", "mul")
        assert f"hint {level} of 3" in text
    assert progress.of(MUL).hints == 3

    monkeypatch.setattr(grade, "PATIENCE", 30.0)  # a busy machine may take longer than a learner should wait
    mine.write_text(MUL.wrong(MUL.exercise.wrong[0]))
    code, text = run("check", "mul")
    assert code == 1
    assert "of y_ptr, whose shape is (1,)" in text
    assert MUL.exercise.wrong[0].why in text
    assert progress.of(MUL).seed == seed, "the question that was failed is asked again"

    mine.write_text(MUL.solution)
    code, text = run("check", "mul")
    assert code == 0
    assert "One solution" in text
    assert "1.00 times" in text
    record = progress.of(MUL)
    assert (record.checks, record.hints, record.seed) == (3, 3, None)
    events = [what for _, what in record.events]
    assert events == ["unwritten", "hint 1", "hint 2", "hint 3", "out of bounds", "right"]
    assert record.passed

    _, text = run("list", "day2")
    assert "with 3 hints" in text
    run("reset", "mul")
    assert mine.read_text() == MUL.stub
    assert mine.with_name(mine.name + ".old").read_text() == MUL.solution
    assert not progress.of(MUL).passed
    assert progress.of(MUL).hints == 3


@interpreted
@pytest.mark.kept("*/exercises/**/*", "locale/**/*")
def test_a_learner_who_reads_chinese(answers, monkeypatch):
    """The stub and the solution have Chinese comments; begun in one language, it is checked in the other."""
    mine = progress.answer_file(MUL)
    with speaking("zh"):
        run("next", "mul")
        assert "# TODO(1): 哪些元素是这个 program 的？" in mine.read_text()
    _, text = run("check", "mul")
    assert "TODO(1) is as it was (and 1 more)" in text
    run("reset", "mul")
    assert not mine.with_name(mine.name + ".old").exists(), "nothing had been written"
    assert mine.read_text() == MUL.stub
    mine.write_text(MUL.wrong(MUL.exercise.wrong[0]))
    with speaking("zh"):
        code, text = run("check", "mul")
    assert code == 1
    assert "落在这次启动的所有张量之外；第一个是 y_ptr 的第 1 号元素" in text
    mine.write_text(MUL.solution)
    with speaking("zh"):
        code, text = run("check", "mul")
    assert code == 0
    assert "# TODO(2): 从 dz 和前向保存的内容返回 dx 和 dy。" in text


@interpreted
def test_watch_grades_each_save(answers, monkeypatch):
    """Saved wrong, saved right, ended by Ctrl-C: three verdicts, the stub's first."""
    path = progress.start(MUL)
    saves = [MUL.wrong(MUL.exercise.wrong[2]), MUL.solution]

    def save(seconds):
        if not saves:
            raise KeyboardInterrupt
        path.write_text(saves.pop(0))
        os.utime(path, ns=(0, len(saves)))

    monkeypatch.setattr(exercises.time, "sleep", save)
    code, text = run("watch", "mul")
    assert code == 0
    assert text.index("TODO(1) is as it was") < text.index("value:") < text.index("One solution")


@interpreted
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("    z = torch.empty_like(x)\n", "    z = torch.empty_like(x\n", "line 3"),
        ("mask = offsets < n", "mask = ofsets < n", "NameError"),
        ("    return z\n", "", "returned None"),
        (
            "z = torch.empty_like(x)",
            "z = torch.empty_like(x)\n    import os, signal; os.kill(os.getpid(), 9)",
            "SIGKILL",
        ),
        (
            "z = torch.empty_like(x)",
            "z = torch.empty_like(x)\n    while True: pass",
            "has not ended",
        ),
        ("z = torch.empty_like(x)", "z = torch.zeros(2**32)", "memory: an answer may have 4 GiB"),
        ("z = torch.empty_like(x)", "z = [bytearray(2**26) for _ in iter(int, 1)]", "memory: an answer may have 4 GiB"),
        (
            "z = torch.empty_like(x)",
            "import os\n    while True: os.fork()",
            "processes: it has started more than 64 processes",
        ),
        (
            "mask = offsets < n",
            "mask = 0 <= offsets < n",
            "error: your file:20: a block of shape (1024,) is no single truth value",
        ),
        (
            "mask = offsets < n",
            "mask = offsets < n\n    for _ in range(n):\n        break",
            "unsupported AST node type: Break in line 22: break",
        ),
    ],
    ids=["syntax", "name", "none", "crash", "endless", "memory", "objects", "forks", "block", "compiler"],
)
def test_accidents_are_said_in_words(answers, monkeypatch, old, new, says):
    if says == "has not ended":  # grading the others takes 2 s of CPU, more where others work too
        monkeypatch.setattr(grade, "LIMIT", 2.0)
    path = progress.start(MUL)
    path.write_text(MUL.solution.replace(old, new))
    code, text = run("check", "mul")
    assert code == 1
    assert says in text
    assert re.search(r"^ +no +\S", text, re.M), "it says what was refused"
    assert "lessonkit_answers" not in text


@interpreted
@pytest.mark.skipif(not hasattr(grade.signal, "SIGUSR1"), reason="no such signal here")
def test_an_endless_answer_is_told_its_line(monkeypatch):
    endless = MUL.solution.replace("z = torch.empty_like(x)", "z = torch.empty_like(x)\n    while True: pass")
    for limit in (4.0, 20.0, 60.0):  # on a busy machine the answer begins late
        monkeypatch.setattr(grade, "LIMIT", limit)
        verdict = grade.grade_apart(MUL, endless, seed=0)
        assert verdict.caught_by == "time"
        if "When it was stopped" in verdict.why:
            break
    assert verdict.why.endswith("it was in line 31: while True: pass")


@interpreted
def test_other_work_on_the_processors_does_not_refuse_an_answer(monkeypatch):
    """The clock runs on while the answer waits for its turn."""
    monkeypatch.setattr(grade, "LIMIT", 0.01)
    monkeypatch.setattr(grade, "WAITING", 100_000)
    for used, caught_by in ((math.inf, "time"), (0.0, "")):
        monkeypatch.setattr(grade, "_processor_seconds", lambda session, used=used: used)
        assert grade.grade_apart(MUL, MUL.solution, seed=0).caught_by == caught_by


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
def test_processor_seconds_of_a_session_grow():
    before, own = grade._processor_seconds(os.getsid(0)), time.process_time()
    while time.process_time() < own + 0.2:
        pass
    assert grade._processor_seconds(os.getsid(0)) >= before + 0.1


ENDLESS = """z = torch.empty_like(x)
    from lessonkit.cuda import build
    build.build([build.Product("none.txt", (("sh", "-c", "echo $$ > PID; exec sleep 100"),))])"""
built = pytest.mark.skipif(bool(LACKS), reason=LACKS)


@interpreted
@built
def test_a_compiler_ends_with_the_answer_that_is_too_slow(answers, monkeypatch):
    """Ninja gives each a process group of its own; left alone it would write into the next build's folder."""
    monkeypatch.setattr(files, "CACHE", answers)
    monkeypatch.setattr(toolchain, "version", lambda compiler: "")
    endless = ENDLESS.replace("PID", str(pid := answers / "pid"))
    answer = MUL.solution.replace("z = torch.empty_like(x)", endless)
    for limit in (2.0, 10.0, 60.0):  # on a busy machine the compiler begins late
        monkeypatch.setattr(grade, "LIMIT", limit)
        assert grade.grade_apart(MUL, answer, seed=0).caught_by == "time"
        if pid.exists():
            break
    command_line, until = Path(f"/proc/{int(pid.read_text())}/cmdline"), time.monotonic() + 60
    while command_line.exists() and command_line.read_text():  # of what has ended and nobody has asked for it is empty
        assert time.monotonic() < until
        time.sleep(0.05)


@interpreted
@built
def test_the_emulator_is_built_before_the_time_counts(answers, monkeypatch):
    asked = []
    monkeypatch.setattr(files, "CACHE", answers)
    monkeypatch.setattr(build, "build", lambda products: asked.extend(p.name for p in products))
    monkeypatch.setattr(desk, "grade_apart", lambda *a, **k: asked.append("grade") or grade.Verdict())
    code, text = run("check", "scale_rows")
    assert code == 0
    assert "built first" in text
    assert asked == ["libemu.so", "binding.o", "prefix.h.gch", "grade"]


def test_a_gpu_is_hidden(monkeypatch):
    """Where there is one, the command begins again without it: exercises are graded where every address is watched."""
    called = []
    monkeypatch.setattr(exercises.device, "HAS_GPU", True)
    monkeypatch.setattr(exercises.os, "execve", lambda *words: called.append(words))
    monkeypatch.setattr(exercises.sys, "argv", ["lessonkit", "exercise", "list"])
    exercises.without_gpu()
    ((_, words, env),) = called
    assert words[1:] == ["-m", "lessonkit", "exercise", "list"]
    assert env["CUDA_VISIBLE_DEVICES"] == ""


def test_two_commands_at_a_time_keep_both_records(answers):
    """Each reads the file, changes its own exercise and writes all: without a lock the other's change is lost."""
    change = "from lessonkit.exercise import progress, source\n(one,) = source.find({name!r})\n"
    change += "for n in range(1, 101): progress.update(one, hints=n)"
    names = ("day2_triton_basics.exercise01_mul", "day2_triton_basics.exercise02_bias_relu")
    env = environment(COURSE_ANSWERS=str(answers))
    both = [subprocess.Popen([sys.executable, "-c", change.format(name=name)], env=env) for name in names]
    assert [process.wait() for process in both] == [0, 0]
    assert {name: record.hints for name, record in progress.load().items()} == dict.fromkeys(names, 100)


@pytest.mark.parametrize("text", ["{", json.dumps({"x": {"unknown": 1}})])
def test_progress_that_is_damaged_is_refused(answers, text):
    (answers / "progress.json").write_text(text)
    with pytest.raises(progress.Damaged, match="mend it, or remove it"):
        progress.load()


@WHOLE
def test_progress_that_is_damaged_is_said_in_a_line(tmp_path):
    (tmp_path / "progress.json").write_text("{")
    env = environment(COURSE_ANSWERS=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "lessonkit", "exercise", "list"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert re.fullmatch(r"\S*progress.json is damaged \(.*\): mend it, or remove it to start anew\n", done.stderr)


@interpreted
def test_unknown_exercise_names_those_there_are(answers):
    code, text = run("check", "nothing_like_it")
    assert code == 2
    assert "exercise list" in text
    assert "exercise01_mul" not in text, "45 names help nobody"
    assert run("list", "nothing_like_it")[0] == 2


@interpreted
@pytest.mark.parametrize(
    ("typed", "meant"), [("softmaxx", "exercise04_log_softmax"), ("exercise01_mull", "exercise01_mul")]
)
def test_a_typo_names_the_nearest(answers, typed, meant):
    code, text = run("next", typed)
    assert code == 2
    assert meant in text
    assert "stream_overlap" not in text


@interpreted
def test_a_name_of_many_is_cut_short(answers):
    _, text = run("next", "exercise")
    assert text.count("exercise0") == exercises.MOST
    assert "and 35 more" in text


@interpreted
@pytest.mark.parametrize("width", [60, 100])
def test_a_task_fills_the_terminal(answers, monkeypatch, width):
    """A paragraph is filled anew: no line that is cut is followed by a short rest of it. Code keeps its lines."""
    monkeypatch.setattr(exercises.show.console, "_width", width)
    _, text = run("next", "column_sum")
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    at = next(n for n, line in enumerate(lines) if line.startswith("A reduction along a row"))
    paragraph = lines[at : lines.index("", at)]
    for line, following in itertools.pairwise(paragraph):
        assert len(line) + 1 + len(following.split()[0]) > width, line
    assert "        row 0       4    5    6" in lines


@interpreted
def test_the_last_hint_says_where_the_answer_is(answers):
    for _ in range(3):
        _, text = run("hint", "mul")
        assert "no further hint" not in text
    assert "exercise01_mul: Multiply" in text
    _, text = run("hint", "mul")
    assert "The right answer is in" in text
    assert progress.of(MUL).hints == 3


@interpreted
def test_a_mistake_is_named_while_a_todo_is_open(answers, monkeypatch):
    """TODO(1) is wrong: that is said, and not that TODO(2) is open; once TODO(1) is right, TODO(2) is what is said."""
    monkeypatch.setattr(grade, "PATIENCE", 30.0)
    wrong, path = MUL.exercise.wrong[0], progress.start(MUL)
    todo = MUL.regions[1:]
    half_done = MUL.right_elsewhere(todo)
    assert half_done.count(wrong.old) == 1
    path.write_text(half_done.replace(wrong.old, wrong.new))
    _, text = run("check", "mul")
    assert wrong.why in text
    assert "what you have written. TODO(2) is still to be done" in text
    path.write_text(half_done)
    _, text = run("check", "mul")
    assert "TODO(2) is as it was" in text
    assert "Others who saw" not in text


@WHOLE
def test_runs_from_the_command_line(tmp_path):
    """The whole command in a process of its own, in any folder; as course.py calls it, its advice can be typed."""
    env = environment(COURSE_ANSWERS=str(tmp_path), COURSE_PY="1")
    words = [sys.executable, "-m", "lessonkit", "exercise", "check", "mul"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "never written" in done.stdout
    assert "Stuck: python3 course.py exercise hint" in done.stdout
    assert "Traceback" not in done.stderr
    done = subprocess.run([*words[:-1], "nothing_like_it"], env=env, capture_output=True, text=True)
    assert "Usage: python3 course.py exercise check" in done.stderr


@interpreted
def test_a_folder_names_its_first_that_has_not_passed(answers):
    """`next day2`, and `watch day2` after a pass, stay in the folder; a part of several names is still refused."""
    first, second, *others = source.find("day2")
    assert (first, progress.load()) == (MUL, {})
    assert first.title in run("next", "day2")[1]
    progress.update(first, passed="2026-01-01")
    assert second.title in run("next", "day2")[1]
    for exercise in (second, *others):
        progress.update(exercise, passed="2026-01-01")
    code, text = run("next", "day2")
    assert code == 0
    assert "has passed" in text
    code, text = run("next", "softmax")
    assert code == 2
    assert "names 2 exercises" in text


@interpreted
def test_without_a_name_it_is_where_the_learner_is(answers):
    """What was opened by its name, until it passes; then the next, and after the last the first."""
    assert source.discover()[0].title in run("next")[1]
    _, text = run("next", "split_k")
    (exercise,) = source.find("split_k")
    mine = progress.answer_file(exercise).read_text().splitlines()
    for n, line in re.findall(r"TODO\((\d)\), line (\d+)", text):
        assert f"TODO({n})" in mine[int(line) - 1], "lines are those of the learner's file"
    assert len(re.findall(r"TODO\(\d\), line", text)) == 3
    assert "exercise04_split_k" in run("check")[1]
    assert "hint 1 of 3" in run("hint")[1]
    assert progress.of(exercise).hints == 1
    progress.update(exercise, passed="2026-01-01")
    assert source.find("fused_epilogue")[0].title in run("next")[1]
    progress.update(source.discover()[-1], passed="2026-01-01")
    assert source.discover()[0].title in run("next")[1]


@interpreted
def test_reset_twice_keeps_what_was_written(answers):
    path = progress.start(MUL)
    path.write_text(MUL.solution)
    for _ in range(2):
        run("reset", "mul")
    assert path.with_name(path.name + ".old").read_text() == MUL.solution


@interpreted
def test_watch_waits_for_an_editor_that_moves_the_file_away(answers, monkeypatch):
    path, seen = progress.start(MUL), []

    def save(seconds):
        seen.append(path.exists())
        if len(seen) == 1:
            path.unlink()
        if len(seen) == 2:
            path.write_text(MUL.solution)
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(exercises.time, "sleep", save)
    _, text = run("watch", "mul")
    assert seen == [True, False, True]
    assert "One solution" in text


@interpreted
def test_watch_goes_on_in_the_folder(answers, monkeypatch):
    """Once the first of day 2 passes, its second is opened."""
    path = progress.start(MUL)
    path.write_text(MUL.solution)

    def stop(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(exercises.time, "sleep", stop)
    _, text = run("watch", "day2")
    assert text.index("One solution") < text.index(source.find("day2")[1].title)


@interpreted
def test_advice_names_the_module_where_course_py_did_not_call(answers, monkeypatch):
    monkeypatch.setattr(exercises, "COURSE", "python -m lessonkit")
    assert "Then:  python -m lessonkit" in run("next", "mul")[1]
