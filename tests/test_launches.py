"""The record of what the GPU is given: blind to names and layout of the source, and to nothing else."""

from lessonkit.cuda import build, toolchain
from lessonkit.measure import launches, operator_rows
from lessonkit.modes import compile_server

import pytest

pytestmark = pytest.mark.kept("lessonkit/**/*.py", "problems/*.py", "course_ops/**/*.py")
NVCC = toolchain.lacks("nvcc", "g++", "ninja")
LESSON = """\
from lessonkit import DEVICE, Lesson, Work
import torch
import triton
import triton.language as tl


@triton.jit
def scale_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, at < n) * 2, at < n)


def scale(x):
    y = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), 256, num_warps=4)
    return y


def inputs(n, dtype):
    return (torch.randn(n, device=DEVICE).mul_(3).to(dtype),)


def missing(x):
    import no_such_package


def reads(x):
    return [0][int(x[0])]


LESSON = Lesson(
    reference=lambda x: 2 * x, inputs=inputs, checks=(), benches=({"n": 4096},), rungs=(scale, reads), wrong=(),
    work=lambda n, dtype: Work(2 * n * dtype.itemsize),
    peers={"torch": lambda x: x * 2, "torch.compile": lambda x: torch.compile(lambda x: x * 2)(x), "no": missing},
)
"""
SAME = {
    "other names and layout": (("at = tl", "here = tl"), ("+ at", "+ here"), ("at < n", "here < n")),
    "a kernel of another name": (("scale_kernel", "twice_kernel"),),
    "a comment, further down": (("def scale(x):", "# why\n\n\n\ndef scale(x):\n    'What.'"),),
}
OTHER = {
    "machine code": (("* 2, at", "* 3, at"),),
    "grid": (("x.numel(), 256),)", "x.numel(), 256), 1 + 1)"),),
    "warps": (("num_warps=4", "num_warps=8"),),
    "a scalar": (("x, y, x.numel(), 256", "x, y, x.numel() - 16, 256"),),
    "an operator": (("empty_like(x)", "zeros_like(x)"),),
    "dtypes": (("empty_like(x)", "empty_like(x, dtype=torch.float32)"),),
    "strides": (("torch.randn(n, device=DEVICE)", "torch.randn(2 * n, device=DEVICE)[::2]"),),
    "inputs": (("mul_(3)", "mul_(4)"),),
    "work": (("Work(2 * n", "Work(3 * n"),),
}


@pytest.fixture(scope="module")
def marks(tmp_path_factory):
    """name -> the marks of its lesson, all from one compiler."""
    folder = tmp_path_factory.mktemp("lessons")
    names = {}
    for i, (name, edits) in enumerate(({"base": ()} | SAME | OTHER).items()):
        text = LESSON
        for old, new in edits:
            assert old in text, (name, old)
            text = text.replace(old, new)
        names[name] = f"some_lesson{i}"
        (folder / f"some_lesson{i}.py").write_text(text)
    wanted = [("scale", False, "n=4096"), ("torch", True, "n=4096"), ("torch.compile", True, "n=4096")]
    wanted += [("no", True, "n=4096"), ("reads", False, "n=4096"), ("scale", False, "n=7"), ("nobody", False, "n=4096")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.delenv(compile_server.SHARED, raising=False)
        patch.setattr(compile_server, "_idle", [])
        return {name: launches.marks(module, wanted) for name, module in names.items()}


def test_a_mark_names_its_compiler(marks):
    scale, *peers = marks["base"]
    assert scale.startswith("triton-")
    assert [mark.split("-")[0] for mark in peers[:2]] == ["torch", "torch"]
    assert len({scale, *peers[:2]}) == 3


def test_what_cannot_be_recorded_is_empty(marks):
    """A package that is missing, a host that reads data, a shape or a rung that the lesson does not have."""
    assert marks["base"][3:] == ["", "", "", ""]


@pytest.mark.parametrize("name", SAME)
def test_the_same_work_has_the_same_mark(marks, name):
    assert marks[name] == marks["base"]


@pytest.mark.parametrize("name", OTHER)
def test_other_work_has_another_mark(marks, name):
    assert marks[name][0] != marks["base"][0]
    assert marks[name][0]


@pytest.mark.night
@pytest.mark.skipif(bool(NVCC), reason=NVCC)
def test_the_mark_of_a_program_in_cuda_is_nvccs():
    shape = "n=98432"
    marks = launches.marks("cuda_src.02_vector_add", [(r, False, shape) for r in ("add_one", "add_vectorized")])
    assert all(mark.startswith(f"nvcc-{toolchain.release()}=") for mark in marks)
    assert len(set(marks)) == 2


def test_a_launcher_that_a_macro_writes_is_its_template(tmp_path, monkeypatch):
    """Else every change in the program would be one of each launcher."""
    program = tmp_path / "p.cu"
    text = "__global__ void a_kernel() {}\n__global__ void b_kernel() {}\n"
    text += "template <class T> void a(int n) { a_kernel<<<n, 1>>>(); }\n"
    text += "template <class T> void b() { b_kernel<<<1, 1>>>(); }\n"
    monkeypatch.setattr(launches, "_cubin", lambda path: [("a_kernel", "1"), ("b_kernel", "2")])
    monkeypatch.setattr(build, "cubin", lambda *asked: None)
    monkeypatch.setattr(build, "build", lambda products: [program])

    def mark(text, name):
        program.write_text(text)
        launches._launcher.cache_clear()
        return launches._launcher(program, name)

    before = mark(text, "a_float32")
    assert mark(text.replace("<<<1, 1>>>", "<<<2, 1>>>"), "a_float32") == before
    assert mark(text.replace("<<<n, 1>>>", "<<<n, 2>>>"), "a_float32") != before
    assert mark(text, "b_float32") != before
    assert mark(text, "nobody_knows") not in (before, mark(text, "b_float32")), "all of the program"
    launches._launcher.cache_clear()


# ---- Operators of course_ops --------------------------------------------------------------------------------------

OPERATOR = """\
import torch
import triton
import triton.language as tl
from torch.library import custom_op

from course_ops import _common, _launch, testing
from lessonkit import DEVICE, Operator
from lessonkit.measure import launches, operator_rows

_counters = {}


@triton.jit
def scale_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, at < n) * 2, at < n)


def block_of(n):
    return 256 if n > 1024 else 128


def counter(x):
    if x.device not in _counters:
        _counters[x.device] = torch.zeros(1, device=x.device)
    return _counters[x.device]


@custom_op(f"course_ops_test::{__name__}", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    assert _common.runs_kernel(x)
    counter(x)
    block, y = block_of(x.numel()), torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), block),)
    _launch.launcher(scale_kernel, grid, num_warps=4)(x, y, x.numel(), block)
    return torch.mm(y, y)


def refuses(x):
    raise ValueError("x is refused")


def reads(x):
    return [0][int(x[0, 0])]


def inputs(n, dtype):
    return (torch.randn(n, n, device=DEVICE).to(dtype),)


def marks(calls):
    found = []
    with launches.recording() as events, testing.launchers():
        for call, n in calls:
            given = {"call": globals()[call], "inputs": inputs, "dtype": torch.bfloat16}
            operator = Operator(name="scale", direction="forward", problem=None, shapes=(), **given)
            case = operator_rows.Case(operator, {"n": n})
            found.append(launches._mark_of(case, events))
    return found
"""
CALLS = [("scale", 64), ("scale", 64), ("scale", 16), ("refuses", 64), ("reads", 64)]
REFACTORED = {
    "names and layout": (("at = tl", "here = tl"), ("+ at", "+ here"), ("at < n", "here < n")),
    "a function of its own": (
        ("    return torch.mm(y, y)", "    return product(y)\n\n\ndef product(y):\n    return torch.mm(y, y)"),
    ),
    "Triton's own launch": (
        ("_launch.launcher(scale_kernel, grid, num_warps=4)(x, y, x.numel(), block)",
         "scale_kernel[grid](x, y, x.numel(), BLOCK=block, num_warps=4)"),
    ),
    "memory from another function": (("torch.empty_like(x)", "x.new_empty(x.shape)"),),
    "another checked argument": (("def scale(x: torch.Tensor)", "def scale(x: torch.Tensor, checked: bool = True)"),),
    "no counter": (("    counter(x)\n", ""),),
}  # fmt: skip
OTHERS = {
    "a kernel": (("* 2, at", "* 3, at"),),
    "a grid": (("block),)", "block) + 1,)"),),
    "warps": (("num_warps=4", "num_warps=8"),),
    "a plan": (("256 if n", "512 if n"),),
    "a library's call": (("torch.mm(y, y)", "torch.mm(y, y.t())"),),
    "a pass more": (("return torch.mm(y, y)", "return torch.mm(y, y).mul_(2)"),),
    "memory that is filled": (("empty_like", "zeros_like"),),
}


@pytest.fixture(scope="module")
def operators_marks(tmp_path_factory):
    """name -> the marks of CALLS in its version of the operator."""
    folder = tmp_path_factory.mktemp("operators")
    names = {}
    for i, (name, edits) in enumerate(({"base": ()} | REFACTORED | OTHERS).items()):
        text = OPERATOR
        for old, new in edits:
            assert old in text, (name, old)
            text = text.replace(old, new)
        names[name] = f"some_operator{i}"
        (folder / f"some_operator{i}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.delenv(compile_server.SHARED, raising=False)
        patch.setattr(compile_server, "_idle", [])
        return {name: compile_server.call_in_compiler(module, "marks", CALLS) for name, module in names.items()}


def test_an_operators_mark_does_not_depend_on_earlier_calls(operators_marks):
    """What the first call of a process makes, and later ones find, is not timed."""
    first, second, small, refused, reading = operators_marks["base"]
    assert first == second
    assert first.startswith("triton-")
    assert small != first
    assert (refused, reading) == ("", "")


@pytest.mark.parametrize("name", REFACTORED)
def test_a_refactored_operator_has_the_same_mark(operators_marks, name):
    assert operators_marks[name] == operators_marks["base"]


@pytest.mark.parametrize("name", OTHERS)
def test_an_operator_that_gives_the_gpu_something_else_has_another_mark(operators_marks, name):
    mark = operators_marks[name][0]
    assert mark
    assert mark != operators_marks["base"][0]


def test_operators_can_be_recorded():
    """A row without a record is measured again after each change of its source."""
    cheap = ("softmax", "gelu", "scan", "dropout")  # the others compile for long; the night asks them all
    keys = {case.key[:2]: case.key for case in operator_rows.cases() if case.key[0] in cheap}
    assert all(launches.marks_of_operators(list(keys.values())))


@pytest.mark.night
def test_each_operator_and_direction_can_be_recorded():
    keys = {(*case.key[:2], *case.key[3:]): case.key for case in operator_rows.cases()}
    marks = dict(zip(keys, launches.marks_of_operators(list(keys.values())), strict=True))
    assert not [key for key, mark in marks.items() if not mark]
