"""`depends`: which lessons, operators and rows a function reaches."""

from lessonkit.__main__ import app
from lessonkit.commands import show
from lessonkit.lesson import kernels
from lessonkit.measure import dependents, operator_rows

import pytest
from typer.testing import CliRunner

NORM = "day2_triton_basics.lesson08_layernorm"
ADD = "day2_triton_basics.lesson01_vector_add"
SUM = "cuda_src.16_layernorm"


@pytest.fixture(autouse=True)
def three_lessons(monkeypatch):
    found = [pair for name in (ADD, NORM, SUM) for pair in kernels(name) if pair[0] == name]
    monkeypatch.setattr(dependents, "kernels", lambda: found)


def test_inputs_are_of_every_row():
    python, cuda, operator = dependents.dependents("problems.layer_norm.inputs")
    assert (python.lesson, python.through) == (NORM, ("inputs",))
    assert (cuda.lesson, cuda.through) == (SUM, ("inputs",))
    assert (operator.lesson, operator.through[:1]) == ("course_ops.layer_norm", ("inputs",))
    assert python.rows > 0


@pytest.mark.parametrize("name", ["mean_kernel", f"{NORM}.mean_kernel", f"{NORM.replace('.', '/')}.py:mean_kernel"])
def test_a_kernel_is_of_the_rungs_that_launch_it(name):
    (only,) = dependents.dependents(name)
    assert only.through == ("layernorm_unfused",)
    assert 0 < only.rows < dependents.dependents("problems.layer_norm.inputs")[0].rows


def test_a_function_of_a_program_has_its_rows():
    (only,) = dependents.dependents("cuda_src/16_layernorm.cu:layernorm_welford_kernel")
    assert "layernorm_welford" in only.through


def test_a_shipped_kernel_has_the_rows_of_its_operator():
    (kernel,) = dependents.dependents("softmax_packed_kernel")
    assert (kernel.lesson, kernel.through) == ("course_ops.softmax", ("forward",))
    (timed,) = dependents.dependents("course_ops.softmax._softmax")
    assert 0 < kernel.rows == timed.rows
    rows = [row for f in dependents.device_folders() for row in operator_rows.read(f / operator_rows.FILE)]
    assert kernel.rows == sum((row.operator, row.direction) == ("softmax", "forward") for row in rows)


def test_a_row_that_functions_of_one_name_reach_counts_once():
    found = dependents.dependents("kernels.attention_backward_hopper.takes")
    found += dependents.dependents("kernels.attention_backward_192_hopper.takes")
    forward = dependents.dependents("kernels.attention_forward_hopper.takes")
    (backward,) = {each.measured for each in found if each.lesson == "course_ops.attention"}
    ahead = next(each.measured for each in forward if each.lesson == "course_ops.attention")
    of_attention = [each for each in found + forward if each.lesson == "course_ops.attention"]
    assert dependents.all_rows(of_attention) == len(backward | ahead) == len(backward) + len(ahead) > 0


def test_the_public_function_of_an_operator_is_known_and_no_row_is_of_it():
    (only,) = dependents.dependents("course_ops.softmax.softmax")
    assert (only.lesson, only.through, only.rows) == ("course_ops.softmax", (dependents.PUBLIC,), 0)


def said(name):
    with show.console.capture() as printed:
        done = CliRunner().invoke(app, ["depends", name])
    return done.exit_code, printed.get() + done.output


def test_what_nothing_reaches_is_said():
    code, text = said("mean_kernle")
    assert code == 1
    assert "there is no function mean_kernle. The closest: mean_kernel" in text
    code, text = said("softmax_row")  # of a lesson that is not among the three
    assert code == 1
    assert "no lesson and no operator reaches softmax_row of day2_triton_basics/lesson05_softmax.py" in text
    code, text = said("lessonkit.judge.check.check")
    assert code == 1
    assert "judges lessons" in text
    for name in ("course_ops.kernels.gelu", "course_ops/kernels/gelu.py"):
        code, text = said(name)
        assert code == 1
        assert f"{name} is a module: name one of its functions, gelu_kernel, gelu," in " ".join(text.split())
    code, text = said("mean_kernel")
    assert code == 0
    assert "what depends on mean_kernel: 1 lesson, 0 operators, " in text
