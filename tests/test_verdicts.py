"""Kept verdicts: what a verdict depends on, when it is taken, and that a failure never is."""

import ast
import subprocess
from pathlib import Path

from lessonkit.base import device
from lessonkit.base.files import ROOT, write_atomically
from lessonkit.judge import mutants, verdicts
from lessonkit.judge.verify import every_question
from lessonkit.lesson import discover, kernels

import pytest


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course of three files in a folder of its own, and an empty store. Returns a function that writes a file."""
    verdicts.forget()
    monkeypatch.setattr(verdicts, "ROOT", tmp_path)
    monkeypatch.setattr(verdicts, "FOLDER", tmp_path / ".kept")

    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        verdicts.forget()
        return tmp_path / name

    write("kit/__init__.py", "import kit.other")
    write("kit/check.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import kit.types_only\n")
    write("kit/other.py", "OTHER = 1")
    write("kit/types_only.py", "")
    write("kit/unused.py", "")
    write("day1_x/lesson01_a.py", "from kit import check\nimport torch\nother = 'day1_x.lesson02_b'\n")
    write("day1_x/lesson02_b.py", "def rung():\n    from day1_x import helper\n")
    write("day1_x/helper.py", "")
    yield write
    verdicts.forget()


LESSON = "day1_x/lesson01_a.py"


def test_imports_are_followed(course, tmp_path):
    """Also packages, imports inside functions and lessons that are named; not what only a type checker sees."""
    found = {p.relative_to(tmp_path).as_posix() for p in verdicts.closure(frozenset([tmp_path / LESSON]))}
    assert found == {
        *(LESSON, "day1_x/lesson02_b.py", "day1_x/helper.py"),
        *("kit/__init__.py", "kit/check.py", "kit/other.py"),
    }


def test_a_module_that_is_imported_by_its_name_counts(course, tmp_path):
    """Of course_ops, of the problems and of tests too. What is only named is not imported, and the kit's calls are not
    followed: a lesson's verdict would depend on each operator that the kit judges."""
    for name in (
        "course_ops/scan.py",
        "problems/scan.py",
        "tests/test_scan.py",
        "workloads/gpt.py",
        "lessonkit/fuzz.py",
    ):
        course(name, "")
    calls = 'import importlib\nimportlib.import_module("problems.scan")\nimport_module("course_ops.scan")\n'
    text = f'{calls}words = "workloads.gpt"\nimport_module("tests.test_scan")\nimport lessonkit.fuzz\n'
    test = course("tests/test_a.py", text)
    kit = course("lessonkit/fuzz.py", 'import_module("workloads.gpt")')
    found = {p.relative_to(tmp_path).as_posix() for p in verdicts.closure(frozenset([test]))}
    named = {"problems/scan.py", "course_ops/scan.py", "tests/test_scan.py"}
    assert found == {"tests/test_a.py", "lessonkit/fuzz.py", *named}
    assert verdicts.closure(frozenset([kit])) == {kit}


def test_a_file_that_is_no_python_imports_nothing(course, tmp_path):
    broken = course("day1_x/broken.py", "def (")
    assert verdicts.closure(frozenset([broken])) == {broken}


@pytest.mark.parametrize(
    ("name", "changed"),
    [(LESSON, True), ("kit/other.py", True), ("day1_x/helper.py", True), ("kit/unused.py", False), ("new.py", False)],
)
def test_a_verdict_is_known_by_all_that_is_imported(course, tmp_path, name, changed):
    before = verdicts.key("test", [tmp_path / LESSON])
    course(name, "from kit import check\nfrom day1_x import lesson02_b\nNEW = 1\n" if name == LESSON else "NEW = 1")
    assert (verdicts.key("test", [tmp_path / LESSON]) != before) == changed


def test_a_verdict_is_known_by_the_tools(course, tmp_path, monkeypatch):
    before = verdicts.key("test", [tmp_path / LESSON])
    assert verdicts.key("other test", [tmp_path / LESSON]) != before
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    verdicts.forget()
    assert verdicts.key("test", [tmp_path / LESSON]) != before


def test_a_test_without_the_mark_depends_on_every_file(course, tmp_path, request):
    """But on none that git ignores; where git knows nothing of the course, its verdict is not kept."""
    conftest = next(p for p in request.config.pluginmanager.get_plugins() if getattr(p, "TAKEN", ""))
    assert not conftest.depends_on(request.node)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    course(".gitignore", "made/")
    read_by_nobody = course("docs/page.md", "1")
    before = verdicts.key("test", conftest.depends_on(request.node))
    course("made/page.md", "1")
    assert verdicts.key("test", conftest.depends_on(request.node)) == before
    read_by_nobody.write_text("2")
    verdicts.forget()
    assert verdicts.key("test", conftest.depends_on(request.node)) != before


def marked():
    """(test file, pattern) of every `kept` in the suite."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.kept":
                yield from ((path.name, ast.literal_eval(arg)) for arg in node.args)


def test_each_pattern_of_a_mark_names_files_and_no_bytecode(request):
    """One that names nothing would keep a verdict whatever changes; bytecode changes while nothing does."""
    conftest = next(p for p in request.config.pluginmanager.get_plugins() if getattr(p, "TAKEN", ""))
    found = {(test, pattern): conftest.matching(pattern) for test, pattern in marked()}
    assert len(found) > 50
    assert not [asked for asked, files in found.items() if not files]
    assert not [path for files in found.values() for path in files if path.suffix == ".pyc" or ".venv" in path.parts]


def test_what_was_read_has_to_be_unchanged(course, tmp_path):
    row, key = course("reports/rows.csv", "1"), verdicts.key("test", [tmp_path / LESSON])
    with verdicts.watching() as read:
        assert row.read_text() == "1"
        sorted((tmp_path / "reports").iterdir())
        (tmp_path / "written.txt").write_text("not read")
        write_atomically(tmp_path / "replaced.txt", (tmp_path / "written.txt").read_text())
        assert (tmp_path / "replaced.txt").read_text() == "not read"
    assert read == {row, row.parent}
    assert not verdicts.find(key)
    verdicts.keep(key, "test", read)
    assert verdicts.find(key)
    course("reports/other.csv", "")
    assert not verdicts.find(key), "another file in the folder that was listed"
    (tmp_path / "reports/other.csv").unlink()
    course("reports/rows.csv", "2")
    assert not verdicts.find(key)
    course("reports/rows.csv", "1")
    assert verdicts.find(key)
    verdicts._place(key).write_text("{")
    assert not verdicts.find(key), "a damaged verdict is none"


SUITE = """
from pathlib import Path
import pytest
pytestmark = pytest.mark.kept
def test_holds(): assert not Path(__file__).with_name("broken").exists()
def test_always_fails(): assert False
def test_puts_back(monkeypatch): monkeypatch.setattr("os.replace", None)
@pytest.fixture(scope="module")
def row():
    print("made once more")
    return Path(__file__).with_name("row").read_text()
def test_row_is_read(row): pass
def test_row_was_read(row): pass
@pytest.mark.night
def test_long(): pass
"""


@pytest.mark.kept("tests/conftest.py", "lessonkit/**/*.py")
def test_a_pass_is_taken_and_a_failure_is_not(tmp_path, monkeypatch, capsys, request):
    """The suite's own conftest, on a suite of six tests in a course of its own: twice, with another row, then the
    night's. What is taken makes no fixture, and what a module's fixture reads counts for all tests that use it."""
    monkeypatch.setattr(verdicts, "ROOT", tmp_path)
    monkeypatch.setattr(verdicts, "FOLDER", tmp_path / ".kept")
    (tmp_path / "test_small_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    kept\n    night\n")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    conftest = next(p for p in request.config.pluginmanager.get_plugins() if getattr(p, "TAKEN", ""))
    monkeypatch.setattr(conftest.device, "HAS_GPU", False)  # a GPU's verdicts are not kept
    said = []
    for row, more in (("1", []), ("1", []), ("2", []), ("2", ["--all"])):
        (tmp_path / "row").write_text(row)
        verdicts.forget()
        words = ["--noconftest", f"--rootdir={tmp_path}", "-pno:cacheprovider", "-s", str(tmp_path), *more]
        pytest.main(words, [conftest])
        said.append(capsys.readouterr().out)
    verdicts.forget()
    assert "1 failed, 4 passed, 1 deselected" in said[0], said[0]
    assert "1 failed, 1 deselected, 4 taken" in said[1], said[1]
    assert "1 ran, 4 taken from earlier runs" in said[1]
    assert "1 failed, 2 passed, 1 deselected, 2 taken" in said[2], said[2]
    assert "1 failed, 5 passed" in said[3], said[3]
    assert ["made once more" in each for each in said] == [True, False, True, True]


def test_every_question_is_in_a_tier():
    """Each lesson has questions, each mutant and each rung its own, and none is asked twice."""
    asked = every_question()
    assert {question.tier for question in asked} == {"push", "night"}
    assert len({str(question) for question in asked}) == len(asked)
    assert {question.lesson for question in asked} == {name for name, _ in discover()}
    for name, lesson in kernels():
        mine = [question for question in asked if question.lesson == name]
        assert {q.subject for q in mine if q.kind in ("mutant", "cpu-model-mutant")} == {m.why for m in lesson.wrong}
        assert {q.subject for q in mine if q.kind == "rung"} == {r.__name__ for r in lesson.rungs}
        push = {(q.kind, q.subject) for q in mine if q.tier == "push"}
        first = mutants.one_of_each(lesson.wrong)  # the night asks those that have a process of their own
        asked_first = [m for m in first if not (device.HAS_GPU and mutants.is_of_one_gpu(name, m))]
        assert {m.where for m in asked_first} == {
            m.where for m in lesson.wrong if {("mutant", m.why), ("cpu-model-mutant", m.why)} & push
        }
        assert not lesson.properties or ("holds", lesson.rungs[-1].__name__) in push
        assert lesson.extension or not lesson.claims or ("machine-code", "") in push


def test_a_program_of_each_tier_has_its_mutants(monkeypatch):
    """Those that a push asks are built without those of the night, and none is left out."""
    ((name, lesson),) = kernels("02_vector_add")
    texts = mutants._texts(name, lesson.wrong[0].rung)
    push, night = (mutants._programs(name, texts, each) for each in (True, False))
    assert len(push) == len({mutant.where for mutant in lesson.wrong}) < len(lesson.wrong)
    assert len({*push, *night}) == len(lesson.wrong)


def test_what_answers_a_question_is_no_page_or_plot():
    """A change to a page's words asks no question again."""
    files = {
        p.relative_to(ROOT).as_posix()
        for p in verdicts.closure(frozenset([Path(__file__).with_name("test_lessons.py")]))
    }
    assert "lessonkit/judge/check.py" in files
    apart = ("commands/show", "pages/report", "pages/plots", "measure/bench", "commands/doctor", "pages/paths")
    assert all((ROOT / f"lessonkit/{name}.py").exists() for name in apart)
    assert not files & {f"lessonkit/{name}.py" for name in apart}


def test_a_module_of_the_kit_that_is_named_without_its_group_counts():
    lesson = verdicts.closure(frozenset([ROOT / "day4_replace_op" / "lesson25_trace.py"]))  # from lessonkit import rows
    assert ROOT / "lessonkit" / "measure" / "rows.py" in lesson
