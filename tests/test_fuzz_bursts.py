"""Bursts of random cases: few kernels, no case twice, honest counts, nothing waits for the device, all shrunk."""

import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import chain
from random import Random

from lessonkit.base import device
from lessonkit.base.files import ROOT, environment
from lessonkit.judge import bursts, check, fuzz_cases
from lessonkit.judge.bursts import Choices, Job, NewKernel
from lessonkit.judge.fuzz_cases import Outcome
from lessonkit.measure import fuzz_pool, fuzz_runs

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import course_ops

KEPT = pytest.mark.kept("problems/*.py", "course_ops/*.py", "course_ops/kernels/*.py")
RIGHT = torch.zeros((), dtype=torch.bool, device=device.DEVICE)
SOFTMAX = Job("softmax", "forward", 0, 400, 60.0)


class Compiler:
    """Stands for Triton: a kernel for each number of columns and dtype, which takes a second."""

    def __init__(self):
        self.closed, self.seconds, self.new, self.kernels, self.dropped = False, 0.0, [], set(), 0
        self.ran = []

    def look(self, case, mode):
        x = case["tensors"]["x"]
        kernel = json.dumps([x.get("dtype"), x.get("shape", [0])[-1:]])
        if case["spoilt"]:
            self.ran.append(json.dumps(case))
            return Outcome("refused")
        if kernel not in self.kernels:
            if self.closed:
                self.dropped += 1
                raise NewKernel
            self.seconds += 1.0
            self.new.append(kernel)
            self.kernels.add(kernel)
        self.ran.append(json.dumps(case))
        return RIGHT


def burst(job=SOFTMAX, look=None, judge=fuzz_cases.run):
    said, compiler = [], Compiler()
    bursts.Bursts("cpu", compiler, said.append, look or compiler.look, judge).run(job)
    return said, compiler


def of(said, word):
    return [line[word] for line in said if word in line]


def test_cases_of_a_burst_share_kernels_and_none_comes_twice():
    """Compiling takes a second, and may take half of the time. As many cases drawn afresh need many times as many."""
    said, compiler = burst()
    afresh, random = Compiler(), Random(1)
    for _ in range(400):
        afresh.look(fuzz_cases.draw_case("softmax", "forward", Choices(2**12, random)), "cpu")
    kinds = sum(map(Counter, of(said, "judged")), Counter())
    assert kinds == {"right": 350, "refused": 50}
    assert 1 <= len(compiler.kernels) < len(afresh.kernels) / 5
    assert set(chain(*of(said, "kernels"))) == compiler.kernels
    assert len(of(said, "drawn")) == 400 + compiler.dropped, "what needs a new kernel is dropped, and not counted"
    assert len(set(compiler.ran)) == len(compiler.ran) == 400
    assert len(set(chain(*of(said, "shapes")))) > 2 * len(compiler.kernels)
    assert said[-1] == {"end": True}


def test_a_drawing_gives_its_case_again():
    said, _ = burst(replace(SOFTMAX, cases=30))
    for line in of(said, "drawn"):
        drawing = fuzz_pool._drawing(json.loads(json.dumps(line)))
        assert drawing.case == fuzz_cases.draw_case("softmax", "forward", Choices(drawing.most, None, drawing.choices))


def test_a_case_to_be_refused_takes_no_hundred_draws(monkeypatch):
    """Even where nearly all is repeated of a case that is not."""
    drawn = []
    draw_case = fuzz_cases.draw_case
    monkeypatch.setattr(fuzz_cases, "draw_case", lambda *args: drawn.append(args) or draw_case(*args))
    it = bursts.Bursts("cpu", Compiler(), lambda line: None, lambda case, mode: RIGHT)
    known = bursts._Known(bases=[it._drawn(SOFTMAX, bursts._Known(), Random(1), 0.0, spoilt=False)[0]])
    drawn.clear()
    for seed in range(40):
        assert it._drawn(SOFTMAX, known, Random(seed), 0.95, spoilt=True)[1]["spoilt"]
    assert len(drawn) <= 100


def test_what_is_doubted_is_judged_by_itself():
    """A doubt, and an error of the first look; what the judge says then counts."""
    looks = iter([torch.ones_like(RIGHT), RuntimeError("?"), *[RIGHT] * 50])

    def look(case, mode):
        if case["spoilt"]:
            return Outcome("refused")
        if isinstance(found := next(looks), Exception):
            raise found
        return found

    judged = iter([Outcome("right"), Outcome("wrong", "value: 3 of 7")])
    said, _ = burst(replace(SOFTMAX, cases=16), look, lambda case, mode: next(judged))
    assert of(said, "judged") == [{"right": 13, "refused": 2, "wrong": 1}]
    assert of(said, "again") == [2]
    assert of(said, "said") == ["value: 3 of 7"]


@KEPT
@pytest.mark.parametrize("name", fuzz_cases.questions())
def test_the_first_look_doubts_whatever_the_judge_refuses(name, monkeypatch):
    """Of answers that are a little off, too large, of another dtype, or NaN in one place."""
    spoil = {
        "off": lambda t: t * 1.25 if t.is_floating_point() else t + 1,
        "dtype": lambda t: t.to(torch.complex64),
        "nan": lambda t: torch.where(torch.arange(t.numel(), device=t.device).view(t.shape) == 0, torch.nan, t),
    }
    right, random = getattr(course_ops, name), Random(name)
    forward = fuzz_cases.questions()[name].forward
    for kind, change in spoil.items():

        def wrong(*args, change=change, **options):
            out = check.tensors(right(*args, **options))
            return tuple(change(t.float() if t.dtype == torch.float8_e4m3fn else t) for t in out)

        refused = 0
        for _ in range(24):
            case = fuzz_cases.draw_case(name, "forward", Choices(400, random))
            if case["spoilt"]:
                continue
            with monkeypatch.context() as patch:
                patch.setattr(course_ops, forward or name, wrong)
                outcome = fuzz_cases.run(case, "cpu")
                doubted = bool(fuzz_cases.doubt(case, "cpu"))
            assert outcome.well or doubted, (kind, case)
            refused += not outcome.well
        assert refused, kind


def test_the_first_look_sees_a_changed_input(monkeypatch):
    case = {
        "operator": "softmax", "direction": "forward", "options": {}, "seed": 0, "deterministic": True, "spoilt": "",
        "tensors": {"x": {"shape": [3, 7], "dtype": "float32", "layout": "step", "values": "normal"}},
    }  # fmt: skip
    assert not fuzz_cases.doubt(case, "cpu")

    def overwrite(x):
        y = torch.softmax(x, -1)
        x[1, 2] = 5
        return y

    monkeypatch.setattr(course_ops, "softmax", overwrite)
    assert fuzz_cases.doubt(case, "cpu")


class Waits(TorchDispatchMode):
    """Inside, what would make the host wait for a GPU is an error."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("shape", [(0,), (9,), (), (4, 33)], ids=str)
def test_the_comparison_of_the_first_look_does_not_wait(shape, dtype):
    """Groups of like magnitude too, which `compare` shares."""
    exact = (torch.randn(shape, dtype=torch.float64) * 100).to(torch.float64 if dtype.is_floating_point else dtype)
    usual = exact.to(dtype)
    truth = check.Truth((), (exact,), (usual,), 1.0)
    with Waits():
        doubted = check.suspected(truth, (usual.clone(),))
        wrong = check.suspected(truth, (usual + usual.abs().amax() if usual.numel() else usual,))
    assert not doubted
    assert bool(wrong) == bool(usual.numel())


# ---- Processes ------------------------------------------------------------------------------------------------------


class Judge:
    """Stands for the process that judges one case."""

    def __init__(self, mode):
        self.mode = mode

    def ask(self, case):
        long = case["tensors"]["x"].get("shape", [0])[-1:] > [5]
        return Outcome("crash", "illegal address") if long and not case["spoilt"] else Outcome("right")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


BUSY = 300  # seconds that nothing takes, also on a busy machine


def run(tmp_path, monkeypatch, code, cases=40, judge=Judge, patience=BUSY):
    """A run of one operator by processes that execute this code instead of bursts.main."""
    popen = fuzz_runs.subprocess.Popen
    start = "import faulthandler, json, os, signal, sys, time\nfaulthandler.register(signal.SIGUSR2)\n"
    start += "print('ready', flush=True)\nfor line in sys.stdin:\n  job = json.loads(line)\n"
    monkeypatch.setattr(
        fuzz_runs.subprocess, "Popen", lambda args, **more: popen([args[0], "-c", start + code], **more)
    )
    todo, said = [fuzz_runs.begun("softmax", "forward", "cpu")], []
    it = fuzz_pool.Run(
        todo, cases, BUSY, said.append, path=tmp_path / "c.csv", found_path=tmp_path / "f.jsonl",
        worker=lambda mode: fuzz_pool.BurstWorker(mode, patience=patience), judge=judge,
    )  # fmt: skip
    found = it.run(2)
    (count,) = fuzz_runs.counts(tmp_path / "c.csv").values()
    return found, count, said


JUDGED = "  said = {'judged': {'right': job['cases']}, 'shapes': ['a', 'b'], 'kernels': ['k']}\n"
JUDGED += "  print(json.dumps(said), flush=True)\n"
END = "  print(json.dumps({'end': 1}), flush=True)\n"
DRAWN = "  for nth in (2, 3):\n    drawn = {'operator': 'softmax', 'direction': 'forward', 'most': 400}\n"
DRAWN += "    print(json.dumps({'drawn': drawn | {'choices': [nth, 0, 9]}}), flush=True)\n"


def test_counts_go_on_and_shapes_and_kernels_of_a_run_count_once(tmp_path, monkeypatch):
    """40 cases in bursts of 15 by two processes; then another run, which has nothing to do until it is asked for 50."""
    monkeypatch.setattr(fuzz_pool, "BURST", 15)
    _, count, _ = run(tmp_path, monkeypatch, JUDGED + END)
    assert (count.cases, count.shapes, count.kernels) == (40, 2, 1)
    _, count, _ = run(tmp_path, monkeypatch, JUDGED + END)
    assert (count.cases, count.shapes, count.kernels) == (40, 2, 1)
    _, count, _ = run(tmp_path, monkeypatch, JUDGED + END, cases=50)
    assert (count.cases, count.shapes, count.kernels) == (50, 4, 2)


@pytest.mark.parametrize(("end", "why"), [("  os._exit(3)\n", "ended with 3"), ("  time.sleep(600)\n", "hang")])
def test_cases_under_way_in_a_process_that_dies_are_asked_one_by_one(tmp_path, monkeypatch, end, why):
    """Both are right by themselves: the death counts as a crash all the same, and the last case is kept."""

    class Right(Judge):
        def ask(self, case):
            return Outcome("right")

    once = tmp_path / "once"
    code = f"  first = not os.path.exists({str(once)!r}); open({str(once)!r}, 'a').close()\n"
    code += "  if first:\n" + "".join(f"  {line}\n" for line in (DRAWN + end).splitlines())
    found, count, said = run(tmp_path, monkeypatch, code + JUDGED + END, 12, Right, 3 if why == "hang" else BUSY)
    assert (count.cases, count.crashes) == (12, 1)
    assert [each.kind for each in found] == ["crash"]
    assert why in said[0]
    assert "right by itself" in said[0]
    assert fuzz_runs.found(tmp_path / "f.jsonl") == found


def test_a_burst_that_compiles_beyond_its_patience_is_no_crash(tmp_path, monkeypatch):
    """With the looks at its stacks, patience of 1 s ends after 5 s."""
    code = "  def _do_compile():\n    time.sleep(10)\n  _do_compile()\n"
    found, count, _ = run(tmp_path, monkeypatch, code + JUDGED + END, cases=12, patience=1)
    assert (found, count.cases, count.crashes) == ([], 12, 0)


def test_a_failure_is_shrunk_kept_once_and_can_be_replayed(tmp_path, monkeypatch):
    """Softmax of more than 5 columns crashes: the smallest such case."""
    choices = next(
        tuple(draw.made)
        for seed in range(1000)
        if (draw := Choices(4000, Random(seed)))
        and Judge("cpu").ask(fuzz_cases.draw_case("softmax", "forward", draw)).kind == "crash"
    )
    drawing = {"operator": "softmax", "direction": "forward", "most": 4000, "choices": choices}
    code = f"  print(json.dumps({{'failed': {drawing!r}, 'kind': 'crash', 'said': 'illegal address'}}), flush=True)\n"
    code += JUDGED.replace("'right': job['cases']", "'crash': 1, 'right': job['cases'] - 1")
    monkeypatch.setattr(fuzz_pool, "BURST", 20)
    found, count, said = run(tmp_path, monkeypatch, code + END)
    assert (count.cases, count.crashes) == (40, 2)
    first, last = (json.loads(each.splitlines()[-1]) for each in said)
    assert first == fuzz_cases.draw_case("softmax", "forward", Choices(4000, None, choices))
    assert [each.case for each in found] == [last]
    assert last["tensors"]["x"]["shape"][-1] == 6


def test_a_process_goes_on_while_a_failure_shrinks(tmp_path, monkeypatch):
    """The judge, in which it shrinks, waits until all cases are counted."""
    counted = []

    class Patient(Judge):
        def ask(self, case):
            for _ in range(10 * BUSY):
                if sum(c.cases for c in fuzz_runs.counts(tmp_path / "c.csv").values()) >= 40:
                    counted.append(True)
                    return Outcome("crash", "illegal address")
                time.sleep(0.1)
            return Outcome("right")

    drawing = {"operator": "softmax", "direction": "forward", "most": 400, "choices": (2, 0, 9)}
    code = f"  print(json.dumps({{'failed': {drawing!r}, 'kind': 'crash', 'said': 'illegal address'}}), flush=True)\n"
    code += JUDGED.replace("'right': job['cases']", "'crash': 1, 'right': job['cases'] - 1")
    monkeypatch.setattr(fuzz_pool, "BURST", 20)
    found, count, _ = run(tmp_path, monkeypatch, code + END, judge=Patient)
    assert (count.cases, len(found), counted[0]) == (40, 1, True)


def test_processes_are_shared_by_what_is_missing(tmp_path):
    """Of 16 processes: cases left times the seconds of a case so far, also of older code; one stays where it was."""
    todo = [replace(fuzz_runs.begun(name, "forward", "cpu"), versions="1") for name in ("softmax", "gelu", "scan")]
    fast, slow, full = (replace(c, cases=n, seconds=10.0) for c, n in zip(todo, (2000, 100, 5000), strict=True))
    for count in (fast, replace(slow, versions="0"), full):
        fuzz_runs.counted(count, tmp_path / "c.csv")
    made = {"path": tmp_path / "c.csv", "found_path": tmp_path / "f.jsonl"}
    it = fuzz_pool.Run(todo, 5000, 60, print, **made)
    assert [round(t.missing_s(5000)) for t in it.tallies] == [15, 500, 0]
    it.tallies[1].count = replace(slow, cases=1000, seconds=0)  # 4000 left, at 20 / s in the mean of both
    it.tallies[1].older = 0, 50.0
    taken = Counter(it._next(Counter())[1].operator for _ in range(4))
    assert taken == {"gelu": 4}  # 200 s, and at most 100 for another process
    it = fuzz_pool.Run(todo, 5000, 60, print, **made)
    it.tallies[0].older = 0, 990.0  # 0.5 s a case: 1500 s beside 500
    taken = Counter(it._next(Counter())[1].operator for _ in range(4))
    assert taken == {"softmax": 3, "gelu": 1}
    it.tallies[1].under_way = 0
    assert it._next(Counter())[1].operator == "gelu"
    it.tallies[0].under_way = it.tallies[1].under_way = 3  # 375 s for one more, and 125
    assert it._next(Counter({it.tallies[1].count.key: 1}))[1].operator == "softmax"
    it.tallies[0].under_way = 7
    assert it._next(Counter({it.tallies[1].count.key: 1}))[1].operator == "gelu"


@KEPT
def test_a_process_runs_bursts_of_every_operator(tmp_path):
    """By PyTorch on the CPU: each case is right or rightly refused."""
    with fuzz_pool.BurstWorker("cpu") as worker:
        for name, question in fuzz_cases.questions().items():
            for direction in fuzz_cases.DIRECTIONS[: 2 if question.gradients else 1]:
                lines = list(worker.lines(Job(name, direction, 1, 8, 60.0)))
                assert sum(map(Counter, of(lines, "judged")), Counter()) == {"right": 7, "refused": 1}, lines[-1]


COUNTED = """
import torch, course_ops
from course_ops import _common
from lessonkit.judge.bursts import Kernels, NewKernel
from lessonkit.modes import compiled

def softmax(columns, backward=False):
    made.clear()  # or a launch of the same function would do nothing
    x = torch.empty(4, columns, device="cpu", requires_grad=backward)
    with _common.interpreting():
        y = course_ops.softmax(x)
        if backward:
            y.backward(torch.empty_like(y))

with compiled.compiling(90) as made, Kernels().counted() as kernels:
    softmax(64)
    softmax(64)
    softmax(48)  # a power of two covers it, and 16 divides it: the same kernel
    first = len(kernels.new)
    kernels.closed = True
    softmax(64)
    refused = 0
    for columns, backward in ((63, False), (64, True)):
        try:
            softmax(columns, backward)
        except NewKernel:
            refused += 1
    kernels.closed = False
    softmax(63)
    print(first, refused, len(set(kernels.new)), kernels.seconds > 0)
"""


@pytest.mark.skipif(not device.HAS_COMPILER, reason="Triton has no compiler here")
def test_kernels_are_counted_and_refused_where_triton_compiles():
    """Forward, and in a backward that the autograd engine runs."""
    env = environment(LESSONKIT_MODE="compiled", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-W", "ignore", "-c", COUNTED]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "2", "2", "True"], done.stderr[-2000:]
