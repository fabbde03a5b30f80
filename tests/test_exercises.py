"""Exercises: a starter fails for a stated reason, its solution passes, and tempting wrong answers do not."""

import importlib.util
import os
import re
import subprocess
import sys

from lessonkit import check, device, mutants, show
from lessonkit.lesson import ROOT, Lesson, Mutant, Steps

import pytest
import torch

STARTERS = sorted(ROOT.glob("day*_*/exercises/exercise*.py"))
NAMES = [path.stem for path in STARTERS]
each = pytest.mark.parametrize("path", STARTERS, ids=NAMES)
YOURS = re.compile(r"# Yours:\n.*?# End of yours\.", re.DOTALL)

# What a learner may well hand in, and the property that must refuse it. Not in the exercises: it would be a hint.
WRONG = {
    "exercise01_mul": (
        Mutant(
            "one mask is missing", "mul_kernel", "y_ptr + offsets, mask=mask", "y_ptr + offsets", "mul", "out of bounds"
        ),
        Mutant("adds", "mul_kernel", "x * y", "x + y", "mul"),
    ),
    "exercise02_bias_relu": (
        Mutant("rows taken as contiguous", "bias_relu_kernel", "row * x_stride", "row * N", "bias_relu"),
        Mutant(
            "relu(NaN) becomes 0",
            "bias_relu_kernel",
            "tl.where(y < 0, 0.0, y)",
            "tl.where(y > 0, y, 0.0)",
            "bias_relu",
        ),
        Mutant("the first block of columns again", "bias_relu_kernel", "tl.program_id(1)", "0", "bias_relu", "nan"),
    ),
    "exercise03_column_sum": (
        Mutant(
            "a 16-bit accumulator",
            "column_sum_kernel",
            "tl.zeros([BLOCK_M, BLOCK_N], tl.float32)",
            "tl.zeros([BLOCK_M, BLOCK_N], z_ptr.dtype.element_ty)",
            "column_sum",
        ),
        Mutant("stops after one block of rows", "column_sum_kernel", "range(0, M, BLOCK_M)", "range(1)", "column_sum"),
        Mutant("no mask on the rows", "column_sum_kernel", "(rows[:, None] < M) & ", "", "column_sum", "out of bounds"),
    ),
    "exercise04_log_softmax": (
        Mutant(
            "log(softmax(x))",
            "log_softmax_kernel",
            "x - tl.log(tl.sum(tl.exp(x)))",
            "tl.log(tl.exp(x) / tl.sum(tl.exp(x)))",
            "log_softmax",
        ),
        Mutant("padded with 0", "log_softmax_kernel", '-float("inf")', "0.0", "log_softmax"),
    ),
}
MUTANTS = [pytest.param(name, m, id=f"{name}-{m.why}") for name, wrong in WRONG.items() for m in wrong]


def load(path):
    """Import a file by its path. Triton reads a kernel's source from there."""
    name = f"{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def take(steps):
    for step in steps.steps:
        assert step.__doc__
        step()


def solution_of(path):
    return path.parent / "solutions" / path.name


def test_there_are_exercises():
    assert {path.parent.parent.name for path in STARTERS} >= {"day1_pytorch", "day2_triton_basics"}
    assert set(WRONG) <= set(NAMES)


@each
def test_starter_fails_cleanly(path):
    """Every part of it is still to be done, and says so by a failed check, not by a crash."""
    exercise = load(path).EXERCISE
    if isinstance(exercise, Lesson):
        for rung in exercise.rungs:
            assert mutants.first_rejection(exercise, rung), f"{rung.__name__} is solved already"
    else:
        assert isinstance(exercise, Steps)
        with pytest.raises((AssertionError, RuntimeError)):
            take(exercise)


@each
def test_solution_passes(path):
    exercise = load(solution_of(path)).EXERCISE
    if isinstance(exercise, Steps):
        return take(exercise)
    cases = show.small(exercise.checks)
    for rung in exercise.rungs:
        assert mutants.first_rejection(exercise, rung) is None
        if device.INTERPRETED and rung in exercise.passes:
            moved = check.check(exercise, rung, cases[-1].shape, torch.float32)
            least = exercise.work(dtype=torch.float32, **cases[-1].shape).bytes
            assert (moved.read + moved.written) / least == pytest.approx(exercise.passes[rung], rel=0.06)
    if exercise.grad:
        for case in cases:
            check.check_grad(exercise, case.shape, torch.float32)


@each
def test_solution_differs_only_where_it_should(path):
    starter, solution = path.read_text(), solution_of(path).read_text()
    assert YOURS.search(starter)
    assert YOURS.sub("", starter) == YOURS.sub("", solution)


@pytest.mark.parametrize(("name", "mutant"), MUTANTS)
def test_tempting_answer_is_refused(name, mutant):
    if mutant.caught_by == "out of bounds" and device.HAS_GPU:
        pytest.skip("addresses are watched in the interpreter; on a GPU compute-sanitizer does it")
    module = load(solution_of(STARTERS[NAMES.index(name)]))
    found = mutants.first_rejection(module.EXERCISE, mutants.build(module.__name__, mutant))
    assert found is not None, f"accepted: {mutant.why}"
    assert found[0].caught_by == mutant.caught_by, found[0]


@pytest.mark.parametrize("part", ["# Yours:\n        return None, None", "# Yours:\n        return dy"])
def test_unsolved_backward_is_refused(part, tmp_path):
    """The forward is done and the backward is not: the gradient has to be looked at too."""
    path = next(p for p in STARTERS if part in p.read_text())
    forward, backward = (list(YOURS.findall(p.read_text())) for p in (solution_of(path), path))
    text = path.read_text().replace(backward[0], forward[0])
    (tmp_path / path.name).write_text(text)
    exercise = load(tmp_path / path.name).EXERCISE
    if isinstance(exercise, Steps):
        with pytest.raises((AssertionError, RuntimeError)):
            take(exercise)
    else:
        assert mutants.first_rejection(exercise, exercise.rungs[0]) is None
        with pytest.raises(check.Rejected):
            check.check_grad(exercise, exercise.checks[1].shape, torch.float32)


def test_runs_as_a_script(tmp_path):
    """As a learner runs it, from anywhere: exit code 1 and the reason, no traceback."""
    script = STARTERS[NAMES.index("exercise01_mul")]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "never written" in done.stdout
    assert "Traceback" not in done.stderr
