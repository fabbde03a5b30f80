"""`run`: what it keeps when it is stopped, how it goes on, and what it shows."""

import json
import os
import re
import signal
import subprocess
import sys
from io import StringIO

import lessonkit.__main__ as cli
from lessonkit import device, lesson
from lessonkit.base.files import ROOT
from lessonkit.command_line import choice
from lessonkit.commands import course_run, running, show
from lessonkit.commands.parallel import Ended
from lessonkit.judge import verdicts
from lessonkit.lesson import Steps

import pytest
from rich.console import Console
from typer.testing import CliRunner

NAMES = ["day8_x.lesson01_one", "day8_x.lesson02_two", "day8_x.lesson03_three"]


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course of three lessons. It returns run(*words, ends={name: code}, stop=name), which gives what `run` did."""
    (tmp_path / "day8_x").mkdir()
    for name in NAMES:
        (tmp_path / f"{name.replace('.', '/')}.py").write_text("import day8_x.shared\n" if "two" in name else "")
    (tmp_path / "day8_x/shared.py").touch()
    for module in (running, course_run, lesson, verdicts):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(course_run, "FILE", tmp_path / ".course_run.json")
    monkeypatch.setattr(choice, "discover", lambda which="": [(name, Steps(())) for name in lesson.names(which)])
    monkeypatch.setattr(device, "HAS_GPU", False)
    monkeypatch.setattr(show, "console", Console(file=StringIO(), width=150, markup=False))

    def run(*words, ends=None, stop=None, by=signal.SIGINT):
        ran = []

        def run_scripts(paths, at_once, began):
            for nth, path in enumerate(paths):
                began(nth)
                if stop and path.stem.endswith(stop):
                    os.kill(os.getpid(), by)
                ran.append(path.stem.split("_")[1])
                yield Ended(nth, f"printed by {path.stem}\n".encode(), (ends or {}).get(ran[-1], 0), 60.0)

        monkeypatch.setattr(running, "run_scripts", run_scripts)
        verdicts.forget()
        with show.console.capture() as said:
            result = CliRunner().invoke(cli.app, ["run", *words])
        return ran, result.exit_code, said.get() + result.output

    run.folder = tmp_path
    yield run
    verdicts.forget()


def test_a_run_that_was_stopped_goes_on(course):
    ran, code, said = course(stop="three")
    assert (ran, code) == (["one", "two"], 130)
    assert "Stopped after 2 of 3 lessons" in said
    ran, code, said = course()
    assert (ran, code) == (["three"], 0)
    assert re.search(r"going on after 2 lessons of a run that was stopped \d+ s ago; --again starts over", said)
    assert said.count("ok, before") == 2
    ran, code, said = course()
    assert (ran, code) == (["one", "two", "three"], 0), "it had come to its end"
    assert "going on" not in said


@pytest.mark.parametrize("by", running.STOPS)
def test_each_way_to_stop(course, by):
    before = [signal.getsignal(number) for number in running.STOPS]
    assert course(stop="two", by=by)[:2] == (["one"], 130)
    assert [signal.getsignal(number) for number in running.STOPS] == before


def test_again_starts_over(course):
    course(stop="three")
    assert course("--again")[0] == ["one", "two", "three"]


def test_what_failed_runs_again(course):
    course(ends={"one": 1}, stop="three")
    ran, code, _ = course(ends={"one": 1})
    assert (ran, code) == (["one", "three"], 1)
    assert course()[0] == ["one", "two", "three"], "a run with failures comes to its end too"


def test_what_has_changed_runs_again(course):
    course(stop="three")
    (course.folder / "day8_x/shared.py").write_text("W = 4\n")  # lesson 2 imports it
    assert course(stop="three")[0] == ["two"]
    (course.folder / "day8_x/lesson01_one.py").write_text("# new\n")
    assert course()[0] == ["one", "three"]


def test_another_choice_of_lessons_keeps_the_stopped_run(course):
    course(stop="three")
    assert course("three")[0] == ["three"]
    assert course()[0] == ["three"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"m": 3}', '{"m": {"runs": [{"chosen": 3}], "seconds": {}}}'])
def test_a_damaged_file_is_ignored(course, text):
    course_run.FILE.write_text(text)
    ran, code, said = course()
    assert (ran, code) == (["one", "two", "three"], 0)
    assert said.count("is damaged") == 1
    assert "is damaged" not in course()[2]


def test_a_run_goes_on_where_nothing_can_be_kept(course, monkeypatch):
    monkeypatch.setattr(course_run, "write_atomically", lambda *words: (_ for _ in ()).throw(OSError("disk full")))
    ran, code, said = course()
    assert (ran, code) == (["one", "two", "three"], 0)
    assert "cannot be written (disk full)" in said


def test_another_machine_has_its_own_run(course, monkeypatch):
    course(stop="three")
    monkeypatch.setattr(course_run, "_machine", lambda: "other")
    assert course()[0] == ["one", "two", "three"]
    monkeypatch.undo()
    kept = json.loads((course.folder / ".course_run.json").read_text())
    assert [len(machine["runs"]) for machine in kept.values()] == [1, 0]


def test_a_part_of_a_name_says_first_which_lessons_run(course):
    (course.folder / "day9_y").mkdir()
    (course.folder / "day9_y/lesson01_one.py").touch()
    ran, code, said = course("lesson01")
    assert (ran, code) == (["one", "one"], 0)
    first = " ".join(said.partition("[1/2]")[0].split())
    assert "lesson01 names 2 lessons, and all of them run: day8_x.lesson01_one, day9_y.lesson01_one." in first
    assert first.endswith("run day8_x.lesson01_one")
    for which in ("day9", "", "all", "day8_x.lesson01_one"):
        assert "One alone" not in course(which)[2], "a day, the course and one lesson are what was asked for"


def test_a_line_when_a_lesson_ends(course, monkeypatch):
    monkeypatch.setattr(running.os, "cpu_count", lambda: 1)
    said = course(ends={"two": 3})[2]
    assert "[1/3] day8_x.lesson01_one ok 60 s, about 2 min left\n" in said
    assert "[2/3] day8_x.lesson02_two FAILED (exit 3) 60 s, about 1 min left\n" in said
    assert "[3/3] day8_x.lesson03_three ok 60 s\n" in said


def test_what_is_printed_comes_in_reading_order(capfdbinary, monkeypatch):
    monkeypatch.setattr(show, "console", Console(file=StringIO()))
    with course_run.Watch(NAMES, NAMES, {}, 3, live=True) as watch:
        for name in NAMES:
            watch.began(name)
        watch.end(NAMES[1], 0, 1, b"two ")
        assert capfdbinary.readouterr().out == b""
        watch.end(NAMES[0], 0, 1, b"one ")
        assert capfdbinary.readouterr().out == b"one two "
        watch.end(NAMES[2], 0, 1, b"three ")
    assert capfdbinary.readouterr().out == b"three "
    with course_run.Watch(NAMES, NAMES, {}, 3, live=True) as watch:
        watch.began(NAMES[1])
        watch.end(NAMES[1], 0, 1, b"two")
    assert capfdbinary.readouterr().out == b"two", "of a run that was stopped before the first ended"


def test_a_terminal_shows_a_bar(monkeypatch):
    screen = StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(show, "console", Console(file=screen, force_terminal=True, width=120, color_system=None))
    with course_run.Watch(NAMES, NAMES[1:], {NAMES[2]: 3600.0}, 1, live=True) as watch:
        watch.began(NAMES[1])
        watch.bar.refresh()
        shown = screen.getvalue()
        assert "1/3" in shown
        assert "lesson02_two" in shown
        assert "about 2.0 h left" in shown
        watch.end(NAMES[1], 0, 3600, b"")
    assert "[2/3]" not in screen.getvalue(), "the bar says it"


def test_time_left():
    known = {"a": 60.0, "b": 20.0}
    assert course_run.seconds_left(["a", "b"], {}, {}, 1) is None
    assert course_run.seconds_left([], {}, known, 1) == 0
    assert course_run.seconds_left(["a", "new"], {"b": 15.0}, known, 1) == 60 + 40 + 5
    assert course_run.seconds_left(["a", "new"], {"b": 50.0}, known, 2) == 60, "no less than the longest"
    assert [course_run.roughly(s) for s in (12.4, 300, 5400)] == ["12 s", "5 min", "1.5 h"]


def test_a_mark_sees_all_that_a_lesson_runs():
    """verdicts.closure is tested by itself; here that a mark is made of it, and that each lesson has its own."""
    names = ["day2_triton_basics.lesson01_vector_add", "day2_triton_basics.lesson03_gelu"]
    found = course_run.marks(names)
    assert len({*found.values()}) == 2
    assert found == course_run.marks(names)


def test_course_py_becomes_the_run(tmp_path):
    """So that a signal to it reaches the run: the process that was started is the one that runs lessonkit."""
    head = "def environment() -> None:"
    (tmp_path / "course.py").write_text((ROOT / "course.py").read_text().replace(head, f"{head}\n    return"))
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$$ $COURSE_PY $*"\nexit 7\n')
    python.chmod(0o755)
    env = os.environ | {"COURSE_VENV": str(tmp_path / "venv")}
    words = [sys.executable, str(tmp_path / "course.py"), "run", "day2"]
    started = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
    assert started.communicate()[0] == f"{started.pid} 1 -m lessonkit run day2\n"
    assert started.returncode == 7
