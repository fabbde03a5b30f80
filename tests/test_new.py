"""`new`: a lesson is begun in three places, and nothing that stands there is touched."""

import ast

from lessonkit.commands import new

import pytest

FIRST = "day2_triton_basics.lesson01_vector_add"
NAME = "day2_triton_basics.lesson18_silu"


@pytest.fixture
def course(tmp_path):
    for folder in ("day2_triton_basics", "problems", "paths"):
        (tmp_path / folder).mkdir()
    (tmp_path / "problems" / "gelu.py").write_text("PROBLEM = 1\n")
    (tmp_path / new.WHOLE_COURSE).write_text(f'plan = [\n    "{FIRST}",\n    "last",\n]\n')
    return tmp_path


def test_a_lesson_is_begun_in_three_places(course):
    lesson, problem, path = new.lesson(NAME, "silu", FIRST, course)
    assert path.read_text() == f'plan = [\n    "{FIRST}",\n    "{NAME}",\n    "last",\n]\n'
    assert "from problems.silu import PROBLEM" in lesson.read_text()
    assert "lessonkit check lesson18_silu" in lesson.read_text()
    for file in (lesson, problem):
        left = {"FOLDER", "STEM", "WORD", "TITLE"} & set(file.read_text().split())
        assert not left
        ast.parse(file.read_text())
    functions = {node.name for node in ast.walk(ast.parse(lesson.read_text())) if isinstance(node, ast.FunctionDef)}
    assert functions == {"silu_kernel", "silu"}


def test_a_problem_that_is_there_is_kept(course):
    assert course / "problems" / "gelu.py" not in new.lesson(NAME, "gelu", FIRST, course)
    assert (course / "problems" / "gelu.py").read_text() == "PROBLEM = 1\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("lesson18_silu", "gelu", FIRST), "name: 'lesson18_silu' is not like"),
        (("day9_more.lesson01_a", "gelu", FIRST), "name: there is no folder 'day9_more'"),
        ((NAME, "../gelu", FIRST), "problem: '../gelu' cannot be a file"),
        ((NAME, "gelu", "lesson99"), "after: paths/11w.toml has no line with 'lesson99'"),
    ],
)
def test_a_name_that_does_not_do_writes_nothing(course, arguments, says):
    with pytest.raises(ValueError, match=says):
        new.lesson(*arguments, course)
    assert len(list(course.rglob("*.*"))) == 2


def test_a_lesson_that_cannot_be_begun_leaves_nothing(course, monkeypatch):
    write = new.write_atomically

    def full(path, text):
        if path.name == "11w.toml":
            raise OSError(28, "No space left on device", str(path))
        write(path, text)

    monkeypatch.setattr(new, "write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        new.lesson(NAME, "silu", FIRST, course)
    assert len(list(course.rglob("*.*"))) == 2


def test_a_lesson_that_is_there_is_kept(course):
    lesson, *_ = new.lesson(NAME, "silu", FIRST, course)
    lesson.write_text("mine")
    with pytest.raises(ValueError, match="is there already"):
        new.lesson(NAME, "silu", FIRST, course)
    assert lesson.read_text() == "mine"
