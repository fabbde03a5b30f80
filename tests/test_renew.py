"""`renew`: what it finds to be old, in which order it measures that, and what it says of what failed."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import lessonkit.__main__ as cli
from lessonkit.base import device
from lessonkit.commands import renew, show
from lessonkit.lesson import Steps, Table
from lessonkit.measure import fingerprint, operator_rows, rows, stale

import pytest
from typer.testing import CliRunner

TRAIN, SOFTMAX = "day4_replace_op.lesson22_train", "day2_triton_basics.lesson05_softmax"


class Processes:
    """Stands for operator_bench.Processes: says what it was asked."""

    def __init__(self, done):
        self.done = done

    def __call__(self, workers, minutes):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def ahead(self, cases):
        self.done.append(f"ahead: {len(cases)} shapes")

    def timed(self, case):
        self.done.append("time: a shape")


@pytest.fixture
def renewed(tmp_path, monkeypatch):
    """Renew with these tasks, as {task: what its process does}; returns (what failed, what was done, in order)."""

    def run(tasks, minutes=1.0, cases=()):
        done, log = [], tmp_path / "log"

        def command(task, how):
            code = f"open({str(log)!r}, 'a').write({f'{how}: {task}'!r} + chr(10)); {tasks[task]}"
            return [sys.executable, "-c", code]

        def drawn(names, modes, cases, seconds, workers, say):
            assert names == []
            assert modes == ["gpu"]
            assert 0 < seconds < 60 * minutes
            done.append("random cases")
            return []

        monkeypatch.setattr(renew.Task, "command", command)
        monkeypatch.setattr(renew, "old", lambda: list(tasks))
        monkeypatch.setattr(renew.operator_bench, "Processes", Processes(done))
        monkeypatch.setattr(operator_rows, "cases", lambda: list(cases))
        monkeypatch.setattr(operator_rows, "missing", lambda known, asked: asked)
        monkeypatch.setattr(renew.fuzz_bursts, "run", drawn)
        failed = renew.run(minutes, 3, lambda line: None)
        lines = log.read_text().splitlines() if log.exists() else []
        return failed, lines, done

    return run


def test_all_is_called_before_anything_is_timed(renewed):
    table, lesson, mutants = (
        renew.Task(TRAIN, "speed"), renew.Task(SOFTMAX), renew.Task("a", renew.MUTANTS)
    )  # fmt: skip
    failed, lines, done = renewed(dict.fromkeys((mutants, table, lesson), "pass"))
    assert failed == []
    assert sorted(lines[:3]) == sorted(f"ahead: {task}" for task in (mutants, table, lesson))
    assert lines[3:] == [f"time: {table}", f"time: {lesson}"]  # mutants are judged beside the rest, and once
    assert done == ["ahead: 0 shapes", "random cases"]


def test_what_fails_is_said_and_the_rest_is_measured(renewed):
    broken, judged, right = renew.Task("broken"), renew.Task("judged", renew.MUTANTS), renew.Task("right")
    failed, lines, done = renewed({broken: "raise SystemExit('no kernel')", judged: "1 / 0", right: "pass"})
    assert [line.partition(":")[0] for line in failed] == ["judged mutants", "broken"]
    assert "ZeroDivisionError" in failed[0]
    assert "no kernel" in failed[1]
    assert lines[-1] == "time: right"
    assert done[-1] == "random cases"


def runs(pid):
    """Whether the process runs: one that has ended and has not been waited for does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_what_there_was_no_time_for_is_said(renewed, tmp_path):
    start = time.monotonic()
    long, after = renew.Task("long"), renew.Task("after")
    # What the process has started ends with it, or it would run beside what is timed next.
    own = tmp_path / "started"
    sleeps = f"open({str(own)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {'import os, time; ' + sleeps!r}])"
    failed, lines, done = renewed({long: starts, after: "pass"}, minutes=0.1, cases=["a shape"])
    assert time.monotonic() - start < 30
    assert failed == ["long: no time was left", "after: no time was left", "1 shapes of operators: no time was left"]
    assert "time: after" not in lines
    assert "random cases" not in done
    assert not runs(int(own.read_text()))


def test_what_stale_lists_is_measured_again(tmp_path, monkeypatch):
    """A row, a table and a mutant's verdict of older code, each in the folder of this GPU."""
    monkeypatch.setattr(renew, "REPORTS", tmp_path)
    monkeypatch.setattr(device, "name", lambda: "a-gpu")
    monkeypatch.setattr(device, "capability", lambda: 90)
    (tmp_path / "a-gpu").mkdir()
    head = {"step": "speed", "source": "older"}
    rows.write_atomically(tmp_path / "a-gpu" / f"{TRAIN}.speed.csv", rows.with_head(head, "a\n1\n"))
    head = {"step": "counted", "source": fingerprint.step(stale.ROOT, TRAIN, "counted")}
    rows.write_atomically(tmp_path / "a-gpu" / f"{TRAIN}.counted.csv", rows.with_head(head, "a\n1\n"))
    measured = rows.read(stale.rows.REPORTS / rows.MACHINE / f"{SOFTMAX}.csv")
    older = [replace(row, source="a.b.c", machine="") for row in measured]
    rows.write_atomically(tmp_path / "a-gpu" / f"{SOFTMAX}.csv", rows.as_csv(older))
    found = renew.old()
    assert renew.Task(SOFTMAX) in found
    assert renew.Task(TRAIN, "speed") in found
    assert renew.Task(TRAIN, "counted") not in found
    assert renew.MUTANTS in {task.step for task in found}
    assert len(found) == len(set(found))


def test_ahead_keeps_nothing(monkeypatch):
    kept = []

    def one():
        return Table("one", [{"a": 1}])

    module = type(sys)("day9.lesson01_steps")
    module.LESSON = Steps((one,))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(show.report, "save_table", lambda *words: kept.append(words))
    renew.main("ahead", module.__name__, "one")
    assert kept == []
    renew.main("time", module.__name__, "one")
    assert [(words[0], words[1].name, words[3]) for words in kept] == [(module.__name__, "one", "one")]


@pytest.mark.skipif(device.HAS_GPU, reason="it would measure for minutes")
def test_without_a_gpu_nothing_is_measured():
    done = CliRunner().invoke(cli.app, ["renew"])
    assert done.exit_code == 0
    assert "No GPU" in done.output
