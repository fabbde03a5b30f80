"""`depends`: which lessons and rows a function reaches."""

from lessonkit.__main__ import app
from lessonkit.commands import show
from lessonkit.lesson import kernels
from lessonkit.measure import dependents

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
    (python, cuda) = dependents.dependents("problems.layer_norm.inputs")
    assert (python.lesson, python.through) == (NORM, ("inputs",))
    assert (cuda.lesson, cuda.through) == (SUM, ("inputs",))
    assert python.rows > 0


@pytest.mark.parametrize("name", ["mean_kernel", f"{NORM}.mean_kernel", f"{NORM.replace('.', '/')}.py:mean_kernel"])
def test_a_kernel_is_of_the_rungs_that_launch_it(name):
    (only,) = dependents.dependents(name)
    assert only.through == ("layernorm_unfused",)
    assert 0 < only.rows < dependents.dependents("problems.layer_norm.inputs")[0].rows


def test_a_function_of_a_program_has_its_rows():
    (only,) = dependents.dependents("cuda_src/16_layernorm.cu:layernorm_welford_kernel")
    assert "layernorm_welford" in only.through


def said(name):
    with show.console.capture() as printed:
        done = CliRunner().invoke(app, ["depends", name])
    return done.exit_code, printed.get() + done.output


def test_what_nothing_reaches_is_said():
    code, text = said("nobody")
    assert code == 1
    assert "no lesson's rungs, inputs or work reach nobody" in text
    code, text = said("lessonkit.judge.check.check")
    assert code == 1
    assert "judges lessons" in text
    assert said("mean_kernel")[0] == 0
