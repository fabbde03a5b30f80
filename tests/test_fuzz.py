"""The fuzzer: its cases are plain data, its judge refuses what is wrong, and what it once found stays mended."""

import json
import math
import os
import time
from dataclasses import asdict, replace
from importlib.util import find_spec
from random import Random

from lessonkit.__main__ import app
from lessonkit.base import device
from lessonkit.base.files import ROOT
from lessonkit.judge import fuzz_cases
from lessonkit.measure import fingerprint, fuzz_runs, operator_rows

import pytest
import torch
from typer.testing import CliRunner

import course_ops

QUESTIONS = fuzz_cases.questions()
ASKED = [
    (name, direction)
    for name, question in QUESTIONS.items()
    for direction in fuzz_cases.DIRECTIONS
    if direction == "forward" or question.gradients
]
MODES = ("gpu",) if device.HAS_GPU else ("cpu", "interpreted")
KEPT = pytest.mark.kept("problems/*.py", "course_ops/*.py", "course_ops/kernels/*.py", "tests/fuzz/found.jsonl")
needs_hypothesis = pytest.mark.skipif(find_spec("hypothesis") is None, reason="the extra `test` installs hypothesis")
BUSY = 300  # seconds that nothing takes, also on a busy machine
SOFTMAX = {
    "operator": "softmax", "direction": "forward", "options": {}, "seed": 0, "deterministic": True, "spoilt": "",
    "tensors": {"x": {"shape": [3, 7], "dtype": "float32", "layout": "contiguous", "values": "normal"}},
}  # fmt: skip


class Dice:
    """Choices without hypothesis: they are not shrunk."""

    def __init__(self, seed, most):
        self._random, self.most = Random(seed), most

    def integer(self, low, high):
        return self._random.randint(low, high)

    def one_of(self, options):
        return self._random.choice(options)


def test_every_operator_is_asked_in_each_direction_that_it_has():
    public = set(course_ops.__all__) - {"Unsupported", "patch", "attention_forward", "attention_backward"}
    assert set(QUESTIONS) == public
    assert public - {name for name, direction in ASKED if direction == "backward"} == {
        "attention_paged", "matmul_fp8", "quantize",
    }  # fmt: skip


@KEPT
@pytest.mark.parametrize(("operator", "direction"), ASKED, ids=lambda word: word)
def test_a_case_is_plain_data(operator, direction):
    """It survives JSON; the same dice draw it again; some are to be refused, and are."""
    spoilt = 0
    for seed in range(30):
        case = fuzz_cases.draw_case(operator, direction, Dice(seed, 300))
        assert json.dumps(case) == json.dumps(json.loads(json.dumps(case)))
        assert json.dumps(case) == json.dumps(fuzz_cases.draw_case(operator, direction, Dice(seed, 300)))
        if case["spoilt"]:
            spoilt += 1
            assert fuzz_cases.run(case, MODES[-1]).kind == "refused", case
    assert spoilt


@pytest.mark.parametrize("layout", fuzz_cases.LAYOUTS)
@pytest.mark.parametrize("shape", [(0, 3), (5,), (4, 3), (2, 3, 4), (2, 1, 3, 5)], ids=str)
def test_a_layout_changes_no_value_but_the_expanded(layout, shape):
    spec = {"shape": list(shape), "dtype": "bfloat16", "layout": layout, "values": "normal"}
    laid, plain = fuzz_cases.build(spec, 3), fuzz_cases.build(spec | {"layout": "contiguous"}, 3)
    assert laid.shape == plain.shape
    if layout.startswith("expanded"):
        assert not laid.numel() or 0 in laid.stride() or 1 in laid.shape
    else:
        assert torch.equal(laid, plain)


@pytest.mark.parametrize("kind", [*fuzz_cases.PLAIN, *fuzz_cases.TINY, *fuzz_cases.STRANGE, "large", "huge"])
def test_values_are_what_they_are_called(kind):
    for dtype in fuzz_cases.FLOATS:
        x = fuzz_cases.build({"shape": [4, 64], "dtype": dtype, "layout": "contiguous", "values": kind}, 1)
        strange = {"nan": x.isnan(), "inf": x == math.inf, "-inf": x == -math.inf, "half -inf": x == -math.inf}
        count = {"nan": 1, "inf": 1, "-inf": 1, "half -inf": 128}.get(kind, 0)
        assert int(strange.get(kind, ~x.isfinite()).sum()) == count
        assert int((~x.isfinite()).sum()) == count


def test_random_numbers_come_from_a_pool_and_are_copies():
    """No two seeds give the same, also where the pool begins anew; what an operator overwrites is not the pool."""
    spec = {"shape": [300, 40], "dtype": "float32", "layout": "contiguous", "values": "normal"}
    a, again = fuzz_cases.build(spec, 5), fuzz_cases.build(spec, 5)
    assert torch.equal(a, again)
    again.fill_(torch.nan)
    assert torch.equal(fuzz_cases.build(spec, 5), a)
    assert not torch.equal(fuzz_cases.build(spec, 6), a)
    wraps = next(seed for seed in range(10**6) if 0 < fuzz_cases.POOL - seed * 2654435761 % fuzz_cases.POOL < 12000)
    assert abs(fuzz_cases.build(spec, wraps).std().item() - 1) < 0.05
    long = fuzz_cases.build(spec | {"shape": [fuzz_cases.POOL + 7], "layout": "contiguous"}, 1)
    assert torch.equal(long[:7], long[-7:])


def test_a_case_that_says_nothing_of_noise_has_the_numbers_that_it_was_found_with():
    case = SOFTMAX | {"seed": 11}
    (found,), (new,) = fuzz_cases.Call(case, "cpu").args, fuzz_cases.Call(case | {"noise": "pool"}, "cpu").args
    assert torch.equal(found.cpu(), torch.randn(3, 7, generator=torch.Generator().manual_seed(11)))
    assert not torch.equal(found, new)


def wrong(monkeypatch, function):
    monkeypatch.setattr(course_ops, "softmax", function)
    return fuzz_cases.run(SOFTMAX, "cpu")


def test_the_judge_tells_right_from_wrong(monkeypatch):
    def refuse(x):
        raise ValueError("x is not to my taste")

    def overwrite(x):
        return x.copy_(torch.softmax(x, -1))

    assert fuzz_cases.run(SOFTMAX, "cpu").kind == "right"
    assert wrong(monkeypatch, lambda x: torch.softmax(x, 0)).said.startswith("value")
    assert wrong(monkeypatch, lambda x: torch.softmax(x, -1).half()).said.startswith("dtype")
    assert wrong(monkeypatch, overwrite).said.startswith("changed input")
    assert wrong(monkeypatch, refuse).kind == "false alarm"
    assert wrong(monkeypatch, lambda x: x.nothing).kind == "crash"


def test_a_refusal_names_an_argument(monkeypatch):
    spoilt = SOFTMAX | {"spoilt": "x", "tensors": {"x": SOFTMAX["tensors"]["x"] | {"dtype": "int64"}}}
    assert fuzz_cases.run(spoilt, "cpu").kind == "refused"
    for function, said in ((lambda x: x, "was answered"), (lambda x: torch.zeros(2).view(3), "Traceback")):
        monkeypatch.setattr(course_ops, "softmax", function)
        assert said in fuzz_cases.run(spoilt, "cpu").said

    def vague(x):
        raise ValueError("that does not do")

    monkeypatch.setattr(course_ops, "softmax", vague)
    assert "no argument is named" in fuzz_cases.run(spoilt, "cpu").said


def test_a_process_that_dies_or_hangs_is_a_crash_and_another_goes_on(monkeypatch):
    ready = "import faulthandler, signal; faulthandler.register(signal.SIGUSR2); print('ready', flush=True); "
    dies = "import os, sys; sys.stdin.readline(); print('Illegal instruction', file=sys.stderr, flush=True); os.abort()"
    hangs = "import sys, time; sys.stdin.readline(); time.sleep(600)"
    answers = 'print(\'["right", ""]\', flush=True); input()'
    command = []
    popen = fuzz_runs.subprocess.Popen
    monkeypatch.setattr(fuzz_runs.subprocess, "Popen", lambda args, **more: popen([args[0], "-c", command[-1]], **more))
    with fuzz_runs.Worker("cpu") as worker:
        for code, patience, kind, said in (
            (dies, BUSY, "crash", "Illegal instruction"),
            (hangs, 4, "crash", "hang"),
            (answers, BUSY, "right", ""),
        ):
            command.append(ready + code)
            worker.patience = patience
            outcome = worker.ask(SOFTMAX)
            assert outcome.kind == kind
            assert said in outcome.said


def test_a_backward_is_asked_with_what_was_merged_over_more_keys(monkeypatch):
    """As in ring attention; a backward that goes by the keys that it has itself is found out."""
    cases = (fuzz_cases.draw_case("attention", "backward", Dice(seed, 300)) for seed in range(500))
    divided = [case for case in cases if case.get("divided") and case["tensors"]["k"]["shape"][2] > case["divided"]]
    assert any(case["options"]["causal"] for case in divided)
    case = next(case for case in divided if case["wanted"] == ["q", "k", "v"] and case["tensors"]["q"]["shape"][0])
    case |= {"upstream": {"layout": "contiguous", "values": "normal"}}
    for spec in case["tensors"].values():
        spec |= {"layout": "contiguous", "values": "normal", "dtype": "float32"}
    assert fuzz_cases.run(case, MODES[-1]).kind == "right"
    backward = course_ops.attention_backward

    def by_its_own_keys(dout, q, k, v, out, lse, **options):
        return backward(dout, q, k, v, *course_ops.attention_forward(q, k, v, **options), **options)

    monkeypatch.setattr(course_ops, "attention_backward", by_its_own_keys)
    assert fuzz_cases.run(case, MODES[-1]).kind == "wrong"


def answers_after(monkeypatch, doing, seconds):
    """Processes that spend so many seconds in a function of that name, in a thread as a backward is."""
    code = f"""
import faulthandler, signal, sys, threading, time
def {doing}(): time.sleep({seconds})
faulthandler.register(signal.SIGUSR2)
print("ready", flush=True)
for line in sys.stdin:
    thread = threading.Thread(target={doing}); thread.start(); thread.join()
    print('["right", ""]', flush=True)
"""
    popen = fuzz_runs.subprocess.Popen
    monkeypatch.setattr(fuzz_runs.subprocess, "Popen", lambda args, **more: popen([args[0], "-c", code], **more))


@pytest.mark.parametrize(
    ("doing", "seconds", "said", "patience", "compiling"),
    [
        ("_do_compile", 12, "", 2, BUSY),  # with the looks at its stacks, patience of 2 s ends after 6 s
        ("_do_compile", 600, "slow", 2, 8),
        ("launch", 600, "hang", 2, BUSY),
        ("launch", 0, "", BUSY, BUSY),
    ],
)
def test_a_process_that_compiles_does_not_hang(monkeypatch, doing, seconds, said, patience, compiling):
    """It is waited for beyond its patience, up to a limit of its own."""
    answers_after(monkeypatch, doing, seconds)
    with fuzz_runs.Worker("cpu", patience=patience, compiling=compiling) as worker:
        outcome = worker.ask(SOFTMAX)
    assert outcome.kind == ("crash" if said else "right")
    assert outcome.said.startswith(said)


def test_the_process_that_runs_cases_says_where_it_is():
    """And goes on."""
    with fuzz_runs.Worker("cpu") as worker:
        assert worker.ask(SOFTMAX).well
        assert not worker._compiles()
        assert b"most recent call first" in os.pread(worker._errors.fileno(), 2**16, 0)
        assert worker.ask(SOFTMAX).well


@needs_hypothesis
def test_a_failure_shrinks_and_the_rest_is_drawn(tmp_path):
    """An operator that is wrong where a row is longer than 5: the smallest such case, once, and all cases counted."""

    def ask(case):
        long = case["tensors"]["x"]["shape"][-1:] > [5]
        return fuzz_cases.Outcome("wrong", "value: 3 of 7 wrong") if long else fuzz_cases.Outcome("right")

    kinds, faults = fuzz_runs.drawn("softmax", "forward", "cpu", ask, 60, 0, math.inf)
    assert kinds.total() == 60
    assert kinds["wrong"] > 1
    assert [each.case["tensors"]["x"]["shape"][-1] for each in faults] == [6]
    for each in (*faults, *faults):
        fuzz_runs.add(each, tmp_path / "found.jsonl")
    assert fuzz_runs.found(tmp_path / "found.jsonl") == faults


@needs_hypothesis
def test_a_second_run_goes_on(tmp_path, monkeypatch):
    seeds = []
    monkeypatch.setattr(
        fuzz_runs.Worker, "ask", lambda self, case: seeds.append(json.dumps(case)) or fuzz_cases.Outcome("right")
    )
    for n in (5, 5, 8):
        fuzz_runs.run(["scan"], ["cpu"], n, 60, print, path=tmp_path / "c.csv", found_path=tmp_path / "f.jsonl")
    assert [count.cases for count in fuzz_runs.counts(tmp_path / "c.csv").values()] == [8, 8]
    assert len(seeds) == 16


def test_counts_add_up(monkeypatch):
    monkeypatch.setattr(fuzz_runs.metadata, "version", lambda name: "1")
    count = fuzz_runs.begun("scan", "forward", "cpu").plus(fuzz_runs.Counter(right=7, refused=2, wrong=1, crash=3), 1.5)
    assert (count.cases, count.refused, count.wrong, count.crashes, count.false_alarms) == (13, 2, 1, 3, 0)
    assert replace(count, cases=0).key == count.key
    assert set(asdict(count)) >= {"versions", "commit", "seconds"}


@needs_hypothesis
def test_a_count_goes_on_in_another_commit_until_the_code_of_the_operator_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz_runs.Worker, "ask", lambda self, case: fuzz_cases.Outcome("right"))
    counted = []
    for commit, code in (("a", "one"), ("b", "one"), ("b", "two")):
        monkeypatch.setattr(fuzz_runs, "_commit", lambda commit=commit: commit)
        monkeypatch.setattr(fuzz_runs.operator_rows, "code", lambda operator, code=code: code)
        fuzz_runs.run(["quantize"], ["cpu"], 6, 60, print, path=tmp_path / "c.csv", found_path=tmp_path / "f.jsonl")
        counted.append([(c.code, c.cases) for c in fuzz_runs.counts(tmp_path / "c.csv").values()])
    assert counted == [[("one", 6)], [("one", 6)], [("one", 6), ("two", 6)]]


def test_cases_of_older_code_are_told_apart_and_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz_runs.metadata, "version", lambda name: "1")
    for code, cases in (("one", 7), ("two", 5)):
        monkeypatch.setattr(fuzz_runs.operator_rows, "code", lambda operator, code=code: code)
        new = fuzz_runs.begun("quantize", "forward", "cpu")
        fuzz_runs.counted(replace(new, cases=cases), tmp_path / "c.csv")
    other = fuzz_runs.begun("scan", "forward", "cpu")
    assert [(c.cases, older) for c, older in fuzz_runs.table([new, other], tmp_path / "c.csv")] == [(5, 7), (0, 0)]


def test_the_code_of_an_operator_reaches_its_kernels():
    for name in fuzz_cases.questions():
        call = next(op.call for op in operator_rows.operators() if op.name == name)
        assert any(".kernels." in each for each in fingerprint.reaches(ROOT, call.__module__, call.__name__)), name


def test_without_hypothesis_the_command_names_the_extra(monkeypatch):
    monkeypatch.setattr(fuzz_runs, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["fuzz", "scan", "--cases", "1", "--workers", "0"])  # bursts do without
    assert done.exit_code == 1
    assert "extra `test`" in " ".join(done.output.split())


def test_an_unknown_operator_is_refused():
    done = CliRunner().invoke(app, ["fuzz", "softmex"])
    assert done.exit_code == 2
    assert "softmax" in done.output


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("{bad", "takes a case as JSON"),
        ("[]", "this one lacks operator, direction"),
        ('{"operator": "softmax"}', "this one lacks direction, tensors"),
        (json.dumps(SOFTMAX | {"operator": "softmx"}), "course_ops has no softmx"),
        (json.dumps(SOFTMAX | {"direction": "sideways"}), "is no direction: forward, backward"),
    ],
)
def test_what_is_no_case_is_refused_before_a_process_starts(case, says, monkeypatch):
    monkeypatch.setattr(fuzz_runs, "Worker", lambda mode: pytest.fail("a process was started"))
    done = CliRunner().invoke(app, ["fuzz", "--replay", case])
    assert done.exit_code == 2
    assert says in " ".join(done.output.replace("│", " ").split())


@KEPT
@pytest.mark.parametrize("nth", range(len(fuzz_runs.found())))
def test_what_was_found_is_mended(nth):
    found = fuzz_runs.found()[nth]
    for mode in MODES:
        if found.mode == "gpu" and mode != "gpu":
            continue  # kernels of one GPU
        outcome = fuzz_cases.run(found.case, mode)
        assert outcome.well or (found.open and mode == found.mode), f"{mode}: {outcome.said}"


@pytest.mark.night
@needs_hypothesis
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("operator", "direction"), ASKED, ids=lambda word: word)
def test_random_cases(operator, direction, mode):
    with fuzz_runs.Worker(mode) as worker:
        n = 500 if mode == MODES[-1] else 100
        tonight = int(time.time() // 86400)  # a seed that is another each day
        kinds, faults = fuzz_runs.drawn(operator, direction, mode, worker.ask, n, tonight, math.inf)
    assert kinds.total() == n
    assert not faults, "\n".join(f"{each.fault}: {json.dumps(each.case)}" for each in faults)
