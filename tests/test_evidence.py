"""What a learner writes down before looking, and what `progress` makes of it: predictions, tries, hints, quizzes."""

import json
from types import SimpleNamespace

import lessonkit.__main__ as cli
from lessonkit.base import renames
from lessonkit.commands import course_run, evidence, show
from lessonkit.exercise import progress, source
from lessonkit.exercise.progress import Guess, Record, Sitting
from lessonkit.lesson import discover
from lessonkit.pages import learned

import pytest
from typer.testing import CliRunner

SOFTMAX = "day2_triton_basics.lesson05_softmax"
MUL = source.find("mul")[0]


@pytest.fixture
def answers(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_ANSWERS", str(tmp_path))
    monkeypatch.setattr(show.console, "_width", 200)
    monkeypatch.setattr(course_run, "FILE", tmp_path / "run.json")
    return tmp_path


def run(*words):
    with show.console.capture() as printed:
        done = CliRunner().invoke(cli.app, words, env={"TERMINAL_WIDTH": "1000"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, printed.get() + done.output


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [("1.2ms", 1.2, "ms"), ("350 us", 350, "us"), ("3.9tb/s", 3.9, "TB/s"), ("x1.5", 1.5, "x"), ("2x", 2, "x"),
     ("85%", 85, "%"), ("600TFLOP/s", 600, "TFLOP/s"), ("2least", 2, "least")],
)  # fmt: skip
def test_how_a_prediction_is_written(text, value, unit):
    assert learned.parsed(text) == (value, unit)


@pytest.mark.parametrize("text", ["", "fast", "1.2", "0ms", "x2ms", "-1ms", "1.2 minutes"])
def test_what_is_no_prediction_is_refused_with_examples(text):
    with pytest.raises(ValueError, match=r"x1\.5"):
        learned.parsed(text)


@pytest.mark.parametrize(
    ("said", "off"),
    [("2ms", 2), ("500us", 0.5), ("x2", 2), ("x4", 1), ("2TB/s", 2), ("30%", 2), ("50TFLOP/s", 2), ("3least", 3)],
)
def test_a_prediction_is_held_against_the_stored_row(said, off, monkeypatch):
    """The row: 1 ms, 4 TB/s, 100 TFLOP/s, 60% of the limit; the rung before it takes 4 ms."""
    row = SimpleNamespace(rung="fast", shape="n=8", ms_p50=1.0, tb_per_s=4.0, tflop_per_s=100.0, percent_of_limit=60.0,
                          gpu="none", limited_by_math=False, bytes=4 * 10**9)  # fmt: skip
    rows = [SimpleNamespace(**{**vars(row), "rung": "slow", "ms_p50": 4.0}), row]
    monkeypatch.setattr(learned, "stored", lambda lesson: ("nvidia-h200", rows))

    def slow():
        """A rung."""

    def fast():
        """A rung."""

    lesson = SimpleNamespace(rungs=[slow, fast], passes={fast: 1.0})
    found = learned.answered(Guess("day2.x", "fast", "n=8", said), lesson)
    assert found.off == pytest.approx(off)
    assert found.factor == pytest.approx(max(off, 1 / off))


def test_a_file_of_before_is_read_and_keeps_its_records(answers):
    old = {"checks": 3, "hints": 1, "passed": "2026-01-01", "seed": None, "at": 1.0}
    (answers / "progress.json").write_text(json.dumps({MUL.name: old}))
    assert progress.of(MUL) == Record(**old)
    assert (progress.guesses(), progress.sittings(), progress.asked()) == ([], [], [])
    progress.add("predictions", Guess(SOFTMAX, "softmax_row", "", "2least"))
    progress.update(MUL, "hint 2", hints=2)
    assert [g.said for g in progress.guesses()] == ["2least"]
    record = progress.of(MUL)
    assert (record.checks, record.hints, [what for _, what in record.events]) == (3, 2, ["hint 2"])
    assert list(progress.load()) == [MUL.name], "predictions are no exercise"


@pytest.mark.parametrize("content", ["[1", '{"predictions": [{"rung": 1}]}', '{"predictions": 3}', "[]]", "3"])
def test_a_damaged_file_says_where_it_is(answers, content):
    (answers / "progress.json").write_text(content)
    with pytest.raises(progress.Damaged, match=r"progress\.json is damaged"):
        progress.guesses()


def test_a_prediction_follows_its_lessons_new_name(answers, monkeypatch):
    progress.add("predictions", Guess("day2_triton_basics.lesson99_old", "softmax_row", "", "1least"))
    monkeypatch.setattr(renames, "text", lambda: f'[lessons]\n"day2_triton_basics.lesson99_old" = "{SOFTMAX}"\n')
    assert progress.guesses()[0].lesson == SOFTMAX


def test_predicted_and_measured_stand_side_by_side(answers):
    for words in (["x2"], ["x40"], ["N=4096", "40us"], ["1least"]):
        code, text = run("predict", "lesson05_softmax", "softmax_row", *words)
        assert code == 0, text
    assert "the first prediction counts" in run("predict", "lesson05_softmax", "softmax_row", "x3")[1]
    code, text = run("progress")
    assert code == 0
    assert "nvidia-h200" in text
    (line,) = (line for line in text.splitlines() if "x2" in line and "M=8192 N=8192" in line)
    assert "too" in line or "right" in line
    assert "x40" not in text, "the first prediction counts"
    assert "M=4096 N=4096" in text
    assert "half are within" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["softmax_row"], "there is no terminal to ask in"),
        (["softmax_row", "fast"], "is no prediction"),
        (["softmax_row", "1ms", "2ms"], "several predictions"),
        (["softmax_wrong", "1ms"], "there are softmax_unfused"),
        (["softmax_row", "N=3", "1ms"], "expected one of: M=4096 N=32768"),
    ],
)
def test_a_prediction_that_cannot_be_kept_says_why(answers, words, says):
    code, text = run("predict", "lesson05_softmax", *words)
    assert code == 2
    assert says in " ".join(text.replace("│", " ").split())
    assert not progress.guesses()


def test_one_is_asked_once_and_only_at_a_terminal(answers, monkeypatch):
    ((name, lesson),) = discover("lesson05_softmax")
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail("asked without a terminal"))
    evidence.ask_before_run(name, lesson)
    monkeypatch.setattr(evidence, "can_ask", lambda: True)
    said = iter(["0.5ms", "what", "x2", ""])
    prompts = []
    monkeypatch.setattr("builtins.input", lambda prompt: prompts.append(prompt) or next(said))
    with show.console.capture():
        evidence.ask_before_run(name, lesson)
        evidence.ask_before_run(name, lesson)
    assert [(g.rung, g.said) for g in progress.guesses()] == [("softmax_unfused", "0.5ms"), ("softmax_row", "x2")]
    assert "softmax_online" in prompts[-1]
    assert len(prompts) == 4


def test_ci_is_never_asked(monkeypatch):
    monkeypatch.setattr(evidence.sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(evidence.sys, "stdout", SimpleNamespace(isatty=lambda: True))
    monkeypatch.delenv("CI", raising=False)
    assert evidence.can_ask()
    monkeypatch.setenv("CI", "true")
    assert not evidence.can_ask()


def test_a_prediction_after_the_run_is_marked_and_does_not_count(answers, monkeypatch):
    monkeypatch.setattr(evidence, "_has_run", lambda name: True)
    run("predict", "lesson05_softmax", "softmax_row", "x2.6")
    _, text = run("progress")
    assert "softmax_row*" in text
    assert "half are within" not in text


def learner(folder, name, before, after, *, off, checks):
    """The file of a learner who got so many of two questions right before and after."""
    sittings = [
        Sitting("day2", part, {skill: ["a", nth < right] for nth, skill in enumerate(["masks", "grids"])})
        for part, right in (("before", before), ("after", after))
    ]
    data = {
        "course": "gpu-kernels", "version": learned.VERSION, "learner": name,
        "predictions": [{"lesson": SOFTMAX, "off": off, "seen": False}],
        "exercises": {MUL.name: vars(Record(checks=checks, hints=1, passed="x", events=[[0, "value"], [1, "right"]]))},
        "quizzes": [vars(each) for each in sittings],
    }  # fmt: skip
    path = folder / f"{name}.json"
    path.write_text(json.dumps(data))
    return path


def test_a_class_is_summed_up(answers):
    files = [learner(answers, "Ada", 0, 2, off=4, checks=2), learner(answers, "Bo", 1, 2, off=0.5, checks=6)]
    code, text = run("progress", *map(str, files))
    assert code == 0, text
    lines = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    assert "2 learners: Ada, Bo" in lines
    assert "day2 all questions 2 25% 100% +75%" in lines
    assert "day2 grids 2 0% 100% +100%" in lines
    assert "day2_triton_basics 2 2 3.00x" in lines
    assert f"{MUL.name} 2 2 4 1 value 2" in lines


def test_a_file_of_ones_own_can_be_handed_in(answers):
    progress.update(MUL, "value", checks=1)
    progress.update(MUL, "hint 1", hints=1)
    run("predict", "lesson05_softmax", "softmax_row", "1least")
    code, text = run("progress", "--out", str(answers / "ada.json"), "--name", "Ada")
    assert (code, "ada.json" in text) == (0, True)
    code, text = run("progress", str(answers / "ada.json"))
    assert code == 0
    assert "1 learner: Ada" in text
    assert "value 1" in text
    assert json.loads(run("progress", "--json")[1])["exercises"][MUL.name]["hints"] == 1
    _, text = run("progress")
    assert "value 1" in text


@pytest.mark.parametrize("content", ["[]", "{}", '{"course": "gpu-kernels", "version": 99}', "no json"])
def test_a_file_of_nobody_is_refused(answers, content):
    (answers / "x.json").write_text(content)
    code, text = run("progress", str(answers / "x.json"))
    assert code == 2
    said = " ".join(text.replace("│", " ").split())
    assert "is no file of a learner" in said or "cannot be read" in said
