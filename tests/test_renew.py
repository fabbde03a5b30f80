"""`renew`: what it finds to be old, in which order it measures that, and what it says of what failed."""

import itertools
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import lessonkit.__main__ as cli
from lessonkit.base import device
from lessonkit.base.tables import read_csv, with_head
from lessonkit.commands import renew, show
from lessonkit.judge import fuzz_cases
from lessonkit.lesson import Steps, Table, kernels
from lessonkit.measure import beside, coverage, fingerprint, operator_cases, operator_rows, rows, sanitize, stale
from lessonkit.pages import watched

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

    def run(tasks, minutes=1.0, cases=(), watches=(), share=(1, 1)):
        done, log = [], tmp_path / "log"

        def command(task, how):
            code = f"open({str(log)!r}, 'a').write({f'{how}: {task}'!r} + chr(10)); {tasks[task]}"
            return [sys.executable, "-c", code]

        def drawn(names, modes, cases, seconds, workers, say):
            assert names == list(fuzz_cases.questions())[share[0] - 1 :: share[1]]
            assert modes == ["gpu"]
            assert 0 < seconds < 60 * minutes
            done.append("random cases")
            return []

        monkeypatch.setattr(renew.Task, "command", command)

        def watched(watch, folder, seconds):
            done.append(f"{watch}: {seconds:.3g} s")
            return [fault for other, fault in watches if other == watch and fault]

        monkeypatch.setattr(renew, "old", lambda: list(tasks))
        monkeypatch.setattr(renew, "unwatched", lambda: [watch for watch, _ in watches])
        monkeypatch.setattr(renew.Watch, "run", watched)
        monkeypatch.setattr(renew.operator_bench, "Processes", Processes(done))
        monkeypatch.setattr(operator_rows, "cases", lambda: list(cases))
        monkeypatch.setattr(operator_rows, "pending", lambda known, asked: asked)
        monkeypatch.setattr(renew.fuzz_pool, "run", drawn)
        failed = renew.run(minutes, 3, lambda line: None, *share)
        lines = log.read_text().splitlines() if log.exists() else []
        return failed, lines, done

    return run


def test_all_is_called_before_anything_is_timed(renewed):
    table, lesson, mutants = (
        renew.Task(TRAIN, "speed"), renew.Task(SOFTMAX), renew.Task("a", renew.MUTANTS)
    )  # fmt: skip
    failed, lines, done = renewed(dict.fromkeys((mutants, table, lesson), "pass"))
    assert failed == []
    assert lines[0] == f"judge: {mutants}"  # before others fill the GPU's memory
    assert sorted(lines[1:3]) == sorted(f"ahead: {task}" for task in (table, lesson))
    assert lines[3:] == [f"time: {table}", f"time: {lesson}"]
    assert done == ["ahead: 0 shapes", "random cases"]


def test_two_shares_are_all_and_no_task_is_in_both(renewed):
    tasks = {renew.Task(name): "pass" for name in "abc"}
    watches = [(renew.Watch(f"course_ops.{name}", "memcheck", renew.Part("forward")), "") for name in ("gelu", "scan")]
    of_two = []
    for share in ((1, 2), (2, 2)):
        failed, lines, done = renewed(tasks, cases=["a shape", "another", "a third"], watches=watches, share=share)
        assert not [line for line in failed if "shapes" not in line]
        timed = [line for line in lines if line.startswith("time")]
        of_two.append((timed, done[0], [line.partition(" forward")[0] for line in done if "memcheck" in line]))
    assert of_two == [
        (["time: a", "time: c"], "ahead: 2 shapes", ["course_ops.gelu"]),
        (["time: a", "time: c", "time: b"], "ahead: 1 shapes", ["course_ops.scan"]),
    ], "the log is of both"


@pytest.mark.parametrize("share", ["0/2", "3/2", "1", "a/b", "1/0"])
def test_a_share_that_there_is_not_is_refused(share):
    done = CliRunner().invoke(cli.app, ["renew", "--share", share])
    assert done.exit_code == 2
    assert "expected 1/2 for the first of two" in " ".join(done.output.replace("│", " ").split())


def test_what_fails_is_said_and_the_rest_is_measured(renewed):
    broken, judged, right = renew.Task("broken"), renew.Task("judged", renew.MUTANTS), renew.Task("right")
    failed, lines, done = renewed({broken: "raise SystemExit('no kernel')", judged: "1 / 0", right: "pass"})
    assert [line.partition(":")[0] for line in failed] == ["judged mutants", "broken"]
    assert "ZeroDivisionError" in failed[0]
    assert "no kernel" in failed[1]
    assert lines[-1] == "time: right"
    assert done[-1] == "random cases"


def test_a_fifth_of_what_is_left_goes_to_sanitizers_before_the_random_cases(renewed, monkeypatch):
    """Each of them gets a quarter of that at most, so that one which hangs leaves time for others."""
    clock = itertools.count(1000.0, 1e-6)  # nothing here takes time
    monkeypatch.setattr(renew.time, "monotonic", lambda: next(clock))
    clean, wrong = (renew.Watch("course_ops.scan", tool, renew.Part("forward")) for tool in ("memcheck", "racecheck"))
    failed, _, done = renewed({}, minutes=100, watches=[(clean, ""), (wrong, "a race")])
    assert failed == ["a race"]
    assert done == [
        *("ahead: 0 shapes", "course_ops.scan forward memcheck: 300 s", "course_ops.scan forward racecheck: 300 s"),
        "random cases",
    ]


def test_sanitizers_end_when_their_time_does_and_too_long_is_no_failure(monkeypatch):
    now, ran = [0.0], []

    def takes(watch, folder, seconds):
        ran.append((watch.tool, seconds))
        now[0] += seconds
        return ["ended after so many seconds"]

    monkeypatch.setattr(renew.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(renew.Watch, "run", takes)
    said = []
    watches = [renew.Watch("a", str(i), renew.Part()) for i in range(9)]
    assert renew.watch(watches, Path(), 100.0, 1, said.append) == []
    assert ran == [(str(i), 25.0) for i in range(4)]
    assert all(line.endswith("not to its end") for line in said)


@pytest.fixture
def some_gpu(tmp_path, monkeypatch):
    """A GPU like Hopper with one lesson and one operator; its folder."""
    lesson = next(each for each in kernels() if each[0] == SCAN)
    operators = operator_cases.lessons("course_ops.gelu")
    monkeypatch.setattr(coverage.operator_cases, "lessons", lambda: operators)
    monkeypatch.setattr(renew, "kernels", lambda: [lesson])
    monkeypatch.setattr(renew, "REPORTS", tmp_path)
    monkeypatch.setattr(device, "name", lambda: "some-gpu")
    monkeypatch.setattr(device, "capability", lambda: 90)
    monkeypatch.setattr(sanitize, "lacks", lambda tool: "not here" * (tool in sanitize.INSTRUMENTED))
    monkeypatch.setattr(sanitize.rows, "machine", lambda: {"gpu": "some-gpu"})
    (tmp_path / "some-gpu").mkdir()
    return tmp_path / "some-gpu"


def states(folder):
    """{(lesson or operator, direction): {tool: what the page says}}."""
    found = {}
    for cell in coverage.cells(folder, renew.kernels(), 90):
        found.setdefault((cell.name, cell.direction), {})[cell.tool] = cell.state
    return found


SCAN = "day2_triton_basics.lesson15_scan"
GELU = ("course_ops.gelu", "forward")


def test_what_never_ran_is_run_the_cheapest_tool_first(some_gpu):
    assert set(states(some_gpu)[SCAN, ""].values()) == {"not run"}
    assert set(states(some_gpu)[SCAN, ""]) == set(coverage.COLUMNS)
    assert coverage.NEIGHBOUR not in states(some_gpu)[GELU]
    found = renew.unwatched()
    tools = list(dict.fromkeys(each.tool for each in found))
    assert tools == [tool for tool in coverage.CHEAPEST if tool not in sanitize.INSTRUMENTED]
    assert [str(each) for each in found if each.tool == "memcheck"] == [
        "course_ops.gelu forward memcheck",
        f"{SCAN} memcheck",
        "course_ops.gelu backward memcheck",  # its problem has no checks
    ]


def test_what_a_tool_said_of_todays_code_is_in_the_table(some_gpu, monkeypatch):
    race = sanitize.Report("racecheck", "scan_kernel", "Race reported between Write access and Read access")
    known = [sanitize.Argued(("scan_kernel",), "racecheck", ("Write access", "Read access"), "Why.")]
    sanitize.save(some_gpu, SCAN, "memcheck", Counter(), known)
    sanitize.save(some_gpu, SCAN, "racecheck", Counter({race: 3}), [])
    assert states(some_gpu)[SCAN, ""]["racecheck"] == "**1 not argued**"
    monkeypatch.setattr(sanitize, "argued", lambda: known)  # since then it has been argued
    sanitize.save(some_gpu, SCAN, "synccheck", Counter({replace(race, tool="synccheck"): 1}), known)
    sanitize.save(some_gpu, GELU[0], "memcheck", Counter(), known, renew.Part("forward"))
    sanitize.save(some_gpu, SCAN, "initcheck", Counter(), known, renew.Part("scan_look_back", {"n": 8}, 2))
    found = states(some_gpu)
    of_scan = {"memcheck": "clean", "racecheck": "1 argued", "synccheck": "**1 not argued**"}
    rungs = len(dict(renew.kernels())[SCAN].rungs)
    assert found[SCAN, ""].items() >= (of_scan | {"initcheck": f"1 of {rungs} rungs"}).items()
    assert found[GELU]["memcheck"] == "clean"
    assert found["course_ops.gelu", "backward"]["memcheck"] == "not run"
    left = [str(each) for each in renew.unwatched() if each.name == SCAN and each.tool != coverage.NEIGHBOUR]
    assert len(left) == rungs - 1, "what one tool has not seen"
    assert all(line.endswith("initcheck") for line in left)


def test_rows_without_a_fingerprint_or_of_other_code_are_old(some_gpu, monkeypatch):
    (some_gpu / sanitize.NAME).write_text(
        f"lesson,part,gpu,tool,kernel,what,count,argued\n{SCAN},,some-gpu,memcheck,,,0,\n"
        f"{SCAN},scan_look_back n=8 sms=2,some-gpu,racecheck,,,0,\n"
    )
    (some_gpu / beside.NAME).write_text(
        "lesson,rung,kinds,case,dtype,neighbour,calls,differ\n"
        + "".join(
            f"{SCAN},{rung.__name__},spinning,n=8,float32,{busy},9,0\n"
            for rung in dict(renew.kernels())[SCAN].rungs
            for busy in (False, True)
        )
    )
    found = states(some_gpu)[SCAN, ""]
    assert found["memcheck"] == found[coverage.NEIGHBOUR] == "old"
    assert found["racecheck"].startswith("1 of")
    again = [str(each) for each in renew.unwatched() if each.name == SCAN]
    assert f"{SCAN} memcheck" in again
    assert f"{SCAN} scan_look_back n=8 sms=2 racecheck" in again, "the part that was asked before"
    sanitize.save(some_gpu, SCAN, "memcheck", Counter(), [])
    assert states(some_gpu)[SCAN, ""]["memcheck"] == "clean"
    assert len(read_csv(some_gpu / sanitize.NAME)) == 2, "and the older row of the other tool is still read"
    monkeypatch.setattr(operator_cases, "source", lambda name, rung: "another.code")
    assert states(some_gpu)[SCAN, ""]["memcheck"] == "old"


def test_the_page_counts_what_is_of_today(some_gpu):
    sanitize.save(some_gpu, SCAN, "memcheck", Counter(), [])
    page = watched.page(some_gpu, dict(renew.kernels()))
    assert "memcheck 1 of 3, racecheck 0 of 3" in page
    assert f"| {SCAN.partition('.')[2]} | clean | not run |" in page
    assert "| course_ops.gelu backward | not run | not run | not run | not run | not run | not run |  |" in page


def test_a_neighbour_is_asked_by_its_command(some_gpu, monkeypatch):
    commands = []
    monkeypatch.setattr(
        renew.process, "output", lambda command, seconds, **env: (commands.append(command), "", "no GPU")
    )
    renew.Watch("course_ops.scan", coverage.NEIGHBOUR, renew.Part("forward")).run(some_gpu, 9.0)
    assert commands[0][-5:] == ["beside", "course_ops.scan", "--rung", "forward", "--no-alone"]


def runs(pid):
    """Whether the process runs: one that has ended and has not been waited for does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_what_there_was_no_time_for_is_said(renewed, tmp_path):
    long, after = renew.Task("long"), renew.Task("after")
    # What the process has started ends with it, or it would run beside what is timed next.
    own = tmp_path / "started"
    sleeps = f"open({str(own)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {'import os, time; ' + sleeps!r}])"
    for minutes in (0.1, 0.5, 2.5):  # on a busy machine the process begins late
        start = time.monotonic()
        failed, lines, done = renewed({long: starts, after: "pass"}, minutes=minutes, cases=["a shape"])
        if own.exists():
            break
    assert time.monotonic() - start < 60 * minutes + 30
    assert failed == ["long: no time was left", "after: no time was left", "1 shapes of operators: no time was left"]
    assert "time: after" not in lines
    assert "random cases" not in done
    pid = int(own.read_text())
    until = time.monotonic() + 30
    while runs(pid) and time.monotonic() < until:  # what is killed takes a moment to end
        time.sleep(0.01)
    assert not runs(pid)


def test_what_stale_lists_is_measured_again(tmp_path, monkeypatch):
    """A row, a table and a mutant's verdict of older code, each in the folder of this GPU."""
    monkeypatch.setattr(renew, "REPORTS", tmp_path)
    monkeypatch.setattr(device, "name", lambda: "a-gpu")
    monkeypatch.setattr(device, "capability", lambda: 90)
    (tmp_path / "a-gpu").mkdir()
    head = {"step": "speed", "source": "older"}
    rows.write_atomically(tmp_path / "a-gpu" / f"{TRAIN}.speed.csv", with_head(head, "a\n1\n"))
    head = {"step": "counted", "source": fingerprint.step(stale.ROOT, TRAIN, "counted")}
    rows.write_atomically(tmp_path / "a-gpu" / f"{TRAIN}.counted.csv", with_head(head, "a\n1\n"))
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
