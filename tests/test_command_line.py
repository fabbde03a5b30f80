"""The command line: what it says, and the code that it ends with."""

import dataclasses
import re
import subprocess
import sys

import lessonkit.__main__ as cli
from lessonkit import device, lesson
from lessonkit.base.files import ROOT, environment
from lessonkit.command_line import choice
from lessonkit.commands import show
from lessonkit.cuda import sass, toolchain
from lessonkit.judge import counters, verify
from lessonkit.lesson import Broken, Lesson, case, discover
from lessonkit.measure import bench, rows
from lessonkit.modes import compiled
from lessonkit.pages import report

import pytest
from typer.testing import CliRunner

invoke = CliRunner().invoke


def in_one_line(text):
    """What a box of a terminal says, however wide the terminal is."""
    return " ".join(re.sub("[╭─╮│╰╯]", " ", text).split())


def test_list_names_every_lesson(monkeypatch):
    monkeypatch.setattr(show.console, "_width", 1000)
    result = invoke(cli.app, ["list"])
    assert result.exit_code == 0
    for name, found in discover():
        assert not isinstance(found, Broken), found
        assert name in result.output
        for part in found.rungs if isinstance(found, Lesson) else found.steps:
            assert part.__name__ in result.output


def test_every_command_but_the_book_does_without_sphinx():
    code = """
import sys
for name in ("sphinx", "docutils", "myst_parser", "shibuya", "jieba"):
    sys.modules[name] = None  # its import fails
sys.argv = ["lessonkit", "list"]
import lessonkit.__main__ as cli
cli.app()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "softmax" in done.stdout


@pytest.mark.parametrize(
    ("which", "closest"), [("lesson99_softmaks", "lesson05_softmax"), ("autogard", "lesson03_autograd")]
)
def test_unknown_lesson_says_which_are_close(which, closest, monkeypatch):
    result = invoke(cli.app, ["check", which])
    assert result.exit_code == 2
    said = in_one_line(result.output)
    assert closest in said
    assert len(re.search(r"The closest: (.*?)\. All: .* list", said)[1].split(", ")) == 3


def test_a_lesson_is_found_by_its_name_its_beginning_or_a_part(monkeypatch, tmp_path):
    for stem in ("lesson01_scan", "lesson01_scan_wide", "lesson02_rope", "lesson03_prescan"):
        (tmp_path / "day8_x" / f"{stem}.py").parent.mkdir(exist_ok=True)
        (tmp_path / "day8_x" / f"{stem}.py").touch()
    monkeypatch.setattr(lesson, "ROOT", tmp_path)

    def found(which):
        return [name.removeprefix("day8_x.") for name in lesson.names(which)]

    assert found("lesson01_scan") == found("day8_x.lesson01_scan") == ["lesson01_scan"]
    assert found("lesson01") == ["lesson01_scan", "lesson01_scan_wide"]
    assert found("rope") == ["lesson02_rope"]
    assert found("scan") == ["lesson01_scan", "lesson01_scan_wide", "lesson03_prescan"]
    assert found("day8") == found("") == [path.stem for path in sorted(tmp_path.glob("*/*"))]
    assert found("x.lesson") == []


def test_a_command_for_one_lesson_says_which_there_are(monkeypatch):
    monkeypatch.setenv("TERMINAL_WIDTH", "1000")
    result = invoke(cli.app, ["diff", "vector_add", "add_element", "add_block"])
    assert result.exit_code == 2
    assert "day2_triton_basics.lesson01_vector_add" in result.output
    assert "cuda_src.02_vector_add" in result.output


@pytest.mark.alone  # all its cases, on a GPU the long ones too
def test_check_passes_and_shows_mutants():
    result = invoke(cli.app, ["check", "lesson01_vector_add"])
    assert result.exit_code == 0, result.output
    assert "NOT REJECTED" not in result.output


@pytest.mark.parametrize("words", ["check", "compile", "count", "bench", "diff"])
def test_a_broken_lesson_is_a_failure(words, monkeypatch):
    broken = [("day9.lesson01", Broken(SyntaxError("no [/b]")))]
    monkeypatch.setattr(choice, "discover", lambda which="": iter(broken))
    monkeypatch.setattr(report, "write", list)
    monkeypatch.setattr(device, "HAS_GPU", words == "bench")
    monkeypatch.setattr(toolchain, "lacks", lambda *pieces: "")
    result = invoke(cli.app, [words, "lesson01", *(["a", "b"] if words == "diff" else [])])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "day9.lesson01: cannot be imported: no [/b]" in result.output


def test_check_names_what_is_wrongly_declared(monkeypatch):
    questions = verify.questions
    mutants = [lambda name, lesson: [q for q in questions(name, lesson) if q.kind == "mutant"]]
    monkeypatch.setattr(verify, "questions", *mutants)
    ((name, right),) = discover("lesson01_vector_add")
    typo = dataclasses.replace(right, checks=(case("a typo", m=3),), wrong=())
    mutant = dataclasses.replace(right.wrong[0], old="nowhere to be found")
    stale = dataclasses.replace(right, checks=(), wrong=(mutant,), grad=None)
    monkeypatch.setattr(show.console, "_width", 1000)
    for wrong, says in ((typo, f"{name}: the case 'm=3'"), (stale, f"{name}: the mutant {mutant.why!r}: old=")):
        monkeypatch.setattr(choice, "discover", lambda which="", wrong=wrong: iter([(name, wrong)]))
        result = invoke(cli.app, ["check", name])
        assert result.exit_code == 1
        assert isinstance(result.exception, SystemExit)
        assert says in result.output


def test_check_says_where_a_lessons_own_code_fails(monkeypatch):
    """An error of a rung is a line with its place, and what else is asked of the lesson is asked."""
    ((name, right),) = discover("day2_triton_basics.lesson01_vector_add")
    add = right.rungs[0]

    def takes_one(x):
        return add(x, 0)

    for rung, says in (
        (takes_one, r"TypeError: .*takes_one\(\) takes 1 positional argument but 2 were given"),
        (lambda x, y: add(x, 0), rf"{name}: \w+: .* \((day2_triton_basics/lesson01_vector_add|tests/\w+)\.py:\d+\)"),
    ):
        broken = dataclasses.replace(right, rungs=(rung,), passes={}, predicted=(), grad=None)
        monkeypatch.setattr(choice, "discover", lambda which="", broken=broken: iter([(name, broken)]))
        monkeypatch.setattr(show.console, "_width", 1000)
        result = invoke(cli.app, ["check", name])
        assert result.exit_code == 1
        assert isinstance(result.exception, SystemExit)
        assert re.search(says, result.output), result.output
        assert "listed" in result.output


def test_check_says_once_what_is_wrong(monkeypatch):
    """A rung's wrong value, and what else is asked and wrong: words in the table, and a name at the end."""
    ((name, right),) = discover("day2_triton_basics.lesson01_vector_add")
    add = right.rungs[-1]

    def off(x, y):
        return add(x, y) + 1

    def holds(rung):
        raise AssertionError("3 of 5 wrong, the first at (0,): expected 1, got 2")

    small = tuple(each for each in right.checks if not each.gib)[:3]
    wrong = dataclasses.replace(
        right, rungs=(off,), checks=small, passes={}, predicted=(), wrong=(), grad=None, properties=(holds,), claims={}
    )
    asked = verify.questions
    kinds = ("rung", "other-dtypes", "holds")
    some = [lambda name, lesson: [q for q in asked(name, lesson) if q.kind in kinds]]
    monkeypatch.setattr(verify, "questions", *some)
    monkeypatch.setattr(choice, "discover", lambda which="": iter([(name, wrong)]))
    monkeypatch.setattr(show.console, "_width", 1000)
    result = invoke(cli.app, ["check", name])
    assert result.exit_code == 1
    assert result.output.count("the first at") == 2, result.output
    assert f"{name}-holds-off: WRONG" in result.output
    assert f"{name}: checks failed: " in result.output


@pytest.mark.skipif(device.HAS_GPU, reason="bytes are counted in the interpreter")
@pytest.mark.parametrize("off", [0.9, 1.0, 1.1])
def test_check_judges_the_bytes_that_a_rung_moves(off, monkeypatch):
    """What `passes` says is judged as the tests judge it: the table would show 1.00 beside 0.90 and end well."""
    ((name, right),) = discover("day2_triton_basics.lesson01_vector_add")
    rung = right.rungs[-1]
    small = tuple(each for each in right.checks if not each.gib)[-1:]
    lesson = dataclasses.replace(right, rungs=(rung,), checks=small, passes={rung: off * right.passes[rung]}, grad=None)
    monkeypatch.setattr(verify, "questions", lambda name, lesson: [])
    monkeypatch.setattr(choice, "discover", lambda which="": iter([(name, lesson)]))
    monkeypatch.setattr(show.console, "_width", 1000)
    result = invoke(cli.app, ["check", name])
    assert result.exit_code == int(off != 1), result.output
    assert ("`passes` says" in result.output) == (off != 1)


@pytest.mark.parametrize("command", ["check", "compile", "count", "count --ncu", "run"])
def test_an_unknown_lesson_is_a_mistake(command):
    assert invoke(cli.app, [*command.split(), "lesson99"]).exit_code == 2


@pytest.mark.parametrize("command", ["bench", "beside", "sanitize", "mutants", "versions"])
def test_an_unknown_lesson_is_a_mistake_without_a_gpu_too(command, monkeypatch):
    monkeypatch.setattr(device, "HAS_GPU", False)
    assert invoke(cli.app, [command, "lesson99"]).exit_code == 2


@pytest.mark.parametrize("command", ["beside", "sanitize"])
def test_an_unknown_rung_is_a_mistake_without_a_gpu_too(command, monkeypatch):
    monkeypatch.setattr(device, "HAS_GPU", False)
    assert invoke(cli.app, [command, "lesson01_vector_add", "--rung", "nothing"]).exit_code == 2
    assert invoke(cli.app, [command, "lesson01_vector_add", "--rung", "add_block"]).exit_code == 0


def test_count_is_of_cuda_lessons(monkeypatch):
    monkeypatch.setattr(report, "write", lambda: pytest.fail("wrote pages"))
    result = invoke(cli.app, ["count", "lesson05_softmax"])
    assert result.exit_code == 2
    assert "no CUDA C++ lesson matches 'lesson05_softmax'" in in_one_line(result.output)


@pytest.mark.skipif(device.HAS_GPU, reason="CUDA C++ is emulated where there is no GPU")
@pytest.mark.parametrize("command", ["compile lesson01_vector_add", "count 02_vector_add"])
def test_what_a_command_writes_is_said_in_one_line(command, monkeypatch):
    """The rows that change, and the pages; where nothing changes, nothing."""
    monkeypatch.setattr(toolchain, "lacks", lambda *pieces: "")
    monkeypatch.setattr(compiled, "compile_ahead", lambda names, targets: None)
    monkeypatch.setattr(compiled, "kernels", lambda name, targets: [])
    monkeypatch.setattr(sass, "broken_claims", lambda name, claimed, found: [])
    monkeypatch.setattr(counters, "traffic", lambda lesson: [])
    monkeypatch.setattr(counters, "rows", lambda found: [])
    monkeypatch.setattr(counters, "broken_counts", lambda name, lesson, found: [])
    monkeypatch.setattr(show, "resources", lambda name, targets: None)
    monkeypatch.setattr(show.console, "_width", 1000)
    rows_, pages = ROOT / "reports" / "rows.csv", [ROOT / "reports" / f"{n}.md" for n in range(4)]
    for saved, made, says in (
        ([rows_], pages, ["wrote reports/rows.csv, reports/0.md, reports/1.md (and 2 more)"]),
        ([], pages[:1], ["wrote reports/0.md"]),
        ([], [], []),
    ):
        for save in ("save_compiled", "save_emulated"):
            monkeypatch.setattr(report, save, lambda *given, saved=saved: saved)
        monkeypatch.setattr(report, "write", lambda made=made: made)
        result = invoke(cli.app, command.split())
        assert result.exit_code == 0, result.output
        assert [line for line in result.output.splitlines() if "wrote" in line] == says


def test_a_file_that_cannot_be_written_is_said_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    there = tmp_path / "file" / "learner.json"
    command = [sys.executable, "-m", "lessonkit", "progress", "--json", "--out", str(there)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{there}: ")
    assert len(done.stderr.splitlines()) == 1


def test_all_is_every_lesson():
    assert [name for name, _ in choice.lessons("all")] == [name for name, _ in discover()]


def test_check_of_steps_says_how_to_run_them():
    result = invoke(cli.app, ["check", "day1_pytorch.lesson03_autograd"])
    assert result.exit_code == 0
    assert "run day1_pytorch.lesson03_autograd" in result.output


def test_bench_fails_if_a_contender_is_wrong(monkeypatch):
    said = ["add at n=64: left out, no", "add at n=64: NOT TIMED, wrong after the rounds: value: [1]"]
    monkeypatch.setattr(device, "HAS_GPU", True)
    monkeypatch.setattr(report, "write", list)
    monkeypatch.setattr(bench, "bench", lambda name, lesson, say: [say(line) for line in said] and [])
    result = invoke(cli.app, ["bench", "lesson01_vector_add"])
    assert result.exit_code == 1
    assert said[1] in result.output
    said.pop()
    assert invoke(cli.app, ["bench", "lesson01_vector_add"]).exit_code == 0


@pytest.mark.skipif(device.HAS_GPU, reason="this machine can time")
def test_bench_without_a_gpu_writes_nothing(monkeypatch):
    monkeypatch.setattr(rows, "save", lambda found: pytest.fail("wrote rows"))
    result = invoke(cli.app, ["bench"])
    assert result.exit_code == 0
    assert "No GPU" in result.output


def test_diff_shows_the_idea():
    result = invoke(cli.app, ["diff", "lesson01_vector_add", "add_element", "add_block"])
    assert result.exit_code == 0
    assert "+    mask = offsets < n" in result.output


@pytest.mark.parametrize("second", ["nothing", "torch", "LESSON", "add_block_kernel"])
def test_diff_takes_rungs_alone_and_says_which_there_are(second):
    result = invoke(cli.app, ["diff", "lesson01_vector_add", "add_element", second])
    assert result.exit_code == 2
    assert f"no rung '{second}'; there are add_element, add_block, add_wide" in in_one_line(result.output)


def test_diff_finds_rungs_in_a_lessons_folder():
    result = invoke(cli.app, ["diff", "lesson08_flash_hopper", "warp_specialized", "overlap_softmax"])
    assert result.exit_code == 0
    assert "+def overlap_softmax" in result.output
    assert "+def drain(c, p, o, step):" in result.output


def test_what_is_printed_is_no_markup():
    with show.console.capture() as printed:
        show.table("E[x^2] [/b]", ["a[bold]"], [["x[0:x:2] [/]"]])
    assert all(text in printed.get() for text in ("E[x^2] [/b]", "a[bold]", "x[0:x:2] [/]"))


@pytest.mark.night  # its modes are tried by day 1's first lesson too
def test_doctor_says_what_is_missing():
    result = invoke(cli.app, ["doctor"])
    assert result.exit_code in (0, 1)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert f"mode: {'run' if device.HAS_GPU else 'interpreted'}" in result.output
