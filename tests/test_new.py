"""`new`: a lesson is begun in three places (in CUDA C++ in four), and nothing that stands there is touched."""

import ast
import dataclasses
import sys
import types

from lessonkit.base import device
from lessonkit.commands import new
from lessonkit.cuda import toolchain
from lessonkit.judge import verify
from lessonkit.pages import guides, minutes

import pytest
import torch

FIRST = "day2_triton_basics.lesson01_vector_add"
NAME = "day2_triton_basics.lesson18_silu"
PROGRAM = "cuda_src.02_vector_add"


@pytest.fixture
def course(tmp_path):
    for folder in ("day2_triton_basics", "cuda_src", "problems", "paths"):
        (tmp_path / folder).mkdir()
    (tmp_path / "problems" / "gelu.py").write_text("PROBLEM = 1\n")
    (tmp_path / "problems" / "zoo.py").write_text("HEADS = 1\n")
    for name in (FIRST, PROGRAM):
        (tmp_path / f"{name.replace('.', '/')}.py").touch()
    (tmp_path / new.WHOLE_COURSE).write_text(f'plan = [\n    "{FIRST}",\n    "{PROGRAM}",\n]\n')
    return tmp_path


def test_a_lesson_is_begun_in_three_places(course):
    lesson, problem, path = new.lesson(NAME, "silu", FIRST, course)
    assert path.read_text() == f'plan = [\n    "{FIRST}",\n    "{NAME}",\n    "{PROGRAM}",\n]\n'
    assert "from problems.silu import PROBLEM" in lesson.read_text()
    assert "course.py check lesson18_silu" in lesson.read_text()
    for file in (lesson, problem):
        left = {"FOLDER", "STEM", "WORD", "TITLE"} & set(file.read_text().split())
        assert not left
        ast.parse(file.read_text())
    functions = {node.name for node in ast.walk(ast.parse(lesson.read_text())) if isinstance(node, ast.FunctionDef)}
    assert functions == {"silu_kernel", "silu"}


def test_a_lesson_in_cuda_has_a_program_too(course):
    lesson, program, problem, path = new.lesson("cuda_src.03_silu", "silu", PROGRAM, course)
    assert path.read_text().endswith(f'    "{PROGRAM}",\n    "cuda_src.03_silu",\n]\n')
    assert (program, problem) == (lesson.with_suffix(".cu"), course / "problems" / "silu.py")
    ast.parse(lesson.read_text())
    assert "kernels.silu(x, y, y.numel())" in lesson.read_text()
    assert "void silu(const float* x, float* y, int64_t n, cudaStream_t stream)" in program.read_text()
    assert 'fprintf(stderr, "%s\\n", error.what());' in program.read_text()


@pytest.mark.skipif(bool(toolchain.lacks("g++", "Python.h", "ninja")), reason="needs g++, Python.h and ninja")
def test_a_program_that_was_begun_is_built_and_copies(course, monkeypatch, tmp_path):
    """Each line that `new` leaves open in it is named, and what it wrote runs."""
    lesson, _, problem, _ = new.lesson("cuda_src.03_silu", "silu", PROGRAM, course)
    for place, module in ((problem, "problems.silu"), (lesson, "cuda_src.03_silu")):
        made = types.ModuleType(module)
        made.__file__ = str(place)
        monkeypatch.setitem(sys.modules, module, made)
        exec(compile(place.read_text(), place, "exec"), vars(made))
    begun = sys.modules["cuda_src.03_silu"].LESSON
    monkeypatch.setattr(verify, "ROOT", course)
    left = verify.unwritten("cuda_src.03_silu", begun)
    assert any(line.startswith("cuda_src/03_silu.cu:4: ") for line in left)
    x = torch.randn(1025, device=device.DEVICE)
    assert torch.equal(begun.rungs[0](x), x)


def test_a_lesson_that_was_begun_is_not_ready(course, monkeypatch):
    """Each line that `new` leaves open is named with its place, and so is each thing that is not declared."""
    made = new.lesson(NAME, "silu", FIRST, course)
    texts = "".join(path.read_text() for path in made)
    assert all(words in texts for words in verify.PLACEHOLDERS)
    for place, module in ((made[1], "problems.silu"), (made[0], NAME)):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        exec(compile(place.read_text(), place, "exec"), vars(sys.modules[module]))
    monkeypatch.setattr(verify, "ROOT", course)
    begun = sys.modules[NAME].LESSON
    with pytest.raises(AssertionError) as error:
        verify.listed(NAME, begun)
    left = str(error.value).splitlines()[1:]
    assert len(left) == len(verify.PLACEHOLDERS)
    assert "day2_triton_basics/lesson18_silu.py:1: " in left[0]
    assert any(line.startswith("problems/silu.py:") and "NotImplementedError" in line for line in left)
    both = dataclasses.replace(begun, refuses=())
    with pytest.raises(AssertionError, match=r"0 mutants(.|\n)*in `refuses`"):
        verify.declared(NAME, both)


def test_a_lesson_that_was_begun_refuses_and_has_its_least_hours(course, monkeypatch):
    lesson, problem, _ = new.lesson(NAME, "silu", FIRST, course)
    assert "expect(x=x, contiguous=True)" in lesson.read_text()
    assert 'Refusal("every second element"' in problem.read_text()
    hours = guides._about(lesson.read_text()).hours
    read = minutes.of_text(lesson.read_text(), ".py").minutes
    assert (read + 5) / 60 <= hours <= (2 * read + 30) / 60


def test_a_problem_that_is_there_is_kept(course):
    assert course / "problems" / "gelu.py" not in new.lesson(NAME, "gelu", FIRST, course)
    assert (course / "problems" / "gelu.py").read_text() == "PROBLEM = 1\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("lesson18_silu", "gelu", FIRST), "name: 'lesson18_silu' is not like"),
        (("day9_more.lesson01_a", "gelu", FIRST), "name: there is no folder 'day9_more'"),
        (("cuda_src.lesson21_silu", "gelu", FIRST), "or in CUDA C.. like cuda_src.25_silu"),
        (("cuda_src.02_silu", "gelu", FIRST), "cuda_src/02_vector_add.py is there.* 03$"),
        (("day2_triton_basics.lesson01_silu", "gelu", FIRST), "lesson01_vector_add.py is there.* lesson02"),
        ((NAME, "zoo", FIRST), "problem: problems/zoo.py binds no PROBLEM"),
        ((NAME, "../gelu", FIRST), "problem: '../gelu' cannot be a file"),
        ((NAME, "gelu", "lesson99"), "after: paths/11w.toml has no line with 'lesson99'"),
    ],
)
def test_a_name_that_does_not_do_writes_nothing(course, arguments, says):
    with pytest.raises(ValueError, match=says):
        new.lesson(*arguments, course)
    assert len(list(course.rglob("*.*"))) == 5


def test_a_lesson_that_cannot_be_begun_leaves_nothing(course, monkeypatch):
    write = new.write_atomically

    def full(path, text):
        if path.name == "11w.toml":
            raise OSError(28, "No space left on device", str(path))
        write(path, text)

    monkeypatch.setattr(new, "write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        new.lesson(NAME, "silu", FIRST, course)
    assert len(list(course.rglob("*.*"))) == 5


def test_a_lesson_that_is_there_is_kept(course):
    lesson, *_ = new.lesson(NAME, "silu", FIRST, course)
    lesson.write_text("mine")
    with pytest.raises(ValueError, match="is there already"):
        new.lesson(NAME, "silu", FIRST, course)
    assert lesson.read_text() == "mine"
