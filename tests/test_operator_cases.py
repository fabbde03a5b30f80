"""The cases of operators for sanitizers and neighbours: they launch each kernel, and the call works. No GPU is used."""

import ast
import json

from lessonkit.base import device
from lessonkit.base.files import ROOT
from lessonkit.measure import beside, operator_cases, operator_rows, sanitize
from lessonkit.measure.operator_cases import Chosen

import pytest
import torch

from course_ops.testing import interpreted

QUICK = ("course_ops.softmax", "course_ops.matmul", "course_ops.scan")  # the others are asked each night
ALL = [(name, lesson.rungs[0].__name__) for name, lesson in operator_cases.lessons()]
OTHER_CARDS = {"matmul_fp8.tma_kernel"}  # on Hopper other kernels serve all calls
INTERPRETED = 10**7  # FLOPs of a case that is interpreted here; without such a case the smallest one is
pytestmark = [
    pytest.mark.kept("course_ops/*.py", "course_ops/kernels/*.py", "problems/*.py"),
    pytest.mark.skipif(device.HAS_GPU, reason="kernels are interpreted, and cases are those of Hopper"),
]
each = pytest.mark.parametrize(
    ("name", "direction"),
    [pytest.param(*key, marks=[pytest.mark.night] * (key[0] not in QUICK), id=" ".join(key)) for key in ALL],
)


def defined(module):
    """The kernels that a file of course_ops/kernels defines."""
    tree = ast.parse((ROOT / f"course_ops/kernels/{module}.py").read_text())
    return {
        f"{module}.{each.name}"
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef) and each.name.endswith("_kernel")
    }


def launched(names, *, large):
    return {
        kernel
        for name, direction in names
        for case in operator_cases.chosen(name, direction, large=large)
        for kernel in case.kernels
    }


def test_every_operator_that_is_timed_is_asked():
    assert {(f"course_ops.{op.name}", op.direction) for op in operator_rows.operators()} == set(ALL)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("module", ["softmax", "scan", "matmul_skinny", "matmul_hopper", "matmul_stream_k_hopper"])
def test_the_cases_launch_each_kernel_of_a_file(module, large):
    assert defined(module) <= launched([key for key in ALL if key[0] in QUICK], large=large)


@pytest.mark.night
@pytest.mark.parametrize("large", [False, True])
def test_the_cases_launch_each_kernel_there_is(large):
    every = {kernel for path in ROOT.glob("course_ops/kernels/*.py") for kernel in defined(path.stem)}
    assert launched(ALL, large=large) == every - OTHER_CARDS


def operator(name, direction):
    (lesson,) = (each for _, each in operator_cases.lessons(name) if each.rungs[0].__name__ == direction)
    return lesson


def cost(lesson, case):
    work = lesson.work(dtype=getattr(torch, case.dtype), **case.shape)
    return work.flops + operator_cases.BYTE * work.bytes


def test_a_case_for_a_neighbour_is_long_and_one_for_a_sanitizer_short():
    """A call of microseconds is hardly ever on an SM when the GPU switches (day 5's lesson on neighbours)."""
    matmul = operator("course_ops.matmul", "forward")
    small, large = (operator_cases.chosen("course_ops.matmul", "forward", large=large) for large in (False, True))
    assert max(cost(matmul, case) for case in large) > beside.MOST / 2
    assert all(cost(matmul, case) <= beside.MOST for case in large)
    assert {str(case) for case in matmul.checks if not case.gib and case.shape["M"]} - set(map(str, small)) == {
        "M=3 N=5 K=0"
    }, "the checks are asked too, but for the one that launches nothing"
    of_benches = [case for case in small if case.kernels == ("matmul_hopper.persistent_kernel",)]
    assert max(cost(matmul, case) for case in of_benches) < cost(matmul, large[0]) / 10


def test_an_operator_that_asks_for_an_order_may_vary_without_it():
    """The rest answers with the same bits each time, as course_ops' guide says."""
    found = {
        (name, case.deterministic): case.varies
        for name in QUICK
        for case in operator_cases.chosen(name, "forward", large=True)
    }
    assert [key for key, varies in found.items() if varies] == [("course_ops.scan", False)]
    assert ("course_ops.scan", True) in found


@each
def test_the_driver_calls_the_operator_as_the_tools_will(name, direction, monkeypatch, capsys):
    """Interpreted, where it launches other kernels: that the call works is what is asked."""
    cases = operator_cases.chosen(name, direction, large=False)
    assert cases
    lesson = operator(name, direction)
    by_cost = sorted(cases, key=lambda case: cost(lesson, case))
    short = [case for case in by_cost if cost(lesson, case) <= INTERPRETED] or by_cost[:1]
    waited = []
    monkeypatch.setattr(sanitize.torch.cuda, "synchronize", lambda: waited.append(1))
    monkeypatch.setattr(sanitize.faulthandler, "dump_traceback_later", lambda *args, **more: None)
    with interpreted():
        sanitize.main(name, sanitize.Part(direction), short)
    assert len(waited) == len(short)
    assert sanitize.DONE in capsys.readouterr().out


def test_what_is_handed_to_the_driver_is_what_was_chosen(monkeypatch):
    """It travels as JSON; a shape that is given takes the place of all."""
    case = Chosen({"n": 8}, "float32", ("a", "b"), deterministic=True, varies=False)
    monkeypatch.setattr(operator_cases, "chosen", lambda name, direction, large: (case, case))
    commands = []
    monkeypatch.setattr(sanitize.toolchain, "find_tool", lambda tool: tool)
    said = f"{sanitize.DONE}\n========= ERROR SUMMARY: 0 errors\n"
    monkeypatch.setattr(
        sanitize.process, "output", lambda command, seconds, **env: (commands.append(command), said, "")
    )
    for shape in ({}, {"n": 3}):
        assert not sanitize.run("course_ops.scan", "memcheck", sanitize.Part("forward", shape))
    sent = [[Chosen(**each) for each in json.loads(command[-1])] for command in commands]
    assert [[(c.shape, c.dtype, c.deterministic) for c in cases] for cases in sent] == [
        [({"n": 8}, "float32", True)] * 2,
        [({"n": 3}, "float32", True)],
    ]


@pytest.mark.parametrize(
    ("name", "direction", "kinds"),
    [
        ("course_ops.gelu", "forward", []),
        ("course_ops.scan", "forward", ["spinning"]),
        ("course_ops.attention", "forward", ["barriers", "early launch"]),
        ("course_ops.matmul", "forward", ["barriers", "spinning"]),
    ],
)
def test_what_a_neighbour_can_disturb_is_read_from_what_a_call_reaches(name, direction, kinds):
    assert beside.kinds(name, direction) == kinds


def test_a_fingerprint_is_of_one_direction():
    found = {key: operator_cases.source(*key) for key in ALL}
    assert all(found.values())
    assert found["course_ops.softmax", "forward"] != found["course_ops.softmax", "backward"]
