"""The kit's modules stand in groups that import only groups to their left, without a cycle, lazy imports included."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import lessonkit
from lessonkit.base import cpp_text
from lessonkit.base.files import BY_NAME, ROOT, environment
from lessonkit.lesson import kernels as lesson_kernels
from lessonkit.lesson import names
from lessonkit.pages import kit
from lessonkit.pages.kit import GROUPS

import pytest

KIT = ROOT / "lessonkit"
FACE = "lessonkit"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(KIT.rglob("*.py"))}


def group(module: str) -> int:
    first = module.split(".")[1]
    return next(i for i, names in enumerate(GROUPS) if first in names)  # the face, lessonkit/__init__.py, has none


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of the repository that a file imports anywhere: at its top, in functions, for type checkers."""
    return frozenset(imported(MODULES[module].read_text(), module))


def imported(text: str, module: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: a relative import hides which group it is from"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in whole}
    return {name for name in found if (ROOT / name.split(".")[0]).is_dir()}


def order(graph: dict[str, set[str]]) -> list[str]:
    return list(TopologicalSorter(graph).static_order())


def test_every_module_has_a_group_and_a_line_in_the_table():
    table = kit.modules()
    for module, path in MODULES.items():
        assert module == FACE or group(module) >= 0, module
        assert path.stem == "__init__" or f"({path.relative_to(KIT).as_posix()}) | " in table, module
    assert " |  |" not in table, "a module says in its docstring what it is for"


def test_every_room_has_its_lines():
    rooms = {line.split("`")[1] for line in kit.lines("en").splitlines()[2:]}
    assert rooms >= {"problems/", "course_ops/", "lessonkit/", "cuda_src/", "tests/"}


@pytest.mark.parametrize("module", [m for m in MODULES if m != FACE])
def test_a_module_imports_only_groups_to_its_left(module):
    for other in imports(module):
        assert other in MODULES, f"{module} imports {other}: the kit knows lessons by their names alone"
        assert other != FACE, f"{module} imports from the face, which imports it: name the module in its group"
        assert group(other) <= group(module), f"{module} imports {other}, whose group stands to its right"


def test_there_is_no_cycle():
    order({module: set(imports(module)) for module in MODULES})


def test_imports_are_found_wherever_they_stand():
    text = "def f():\n    from lessonkit.pages import report\n    import lessonkit.lesson\nif TYPE_CHECKING:\n"
    text += "    from lessonkit.cuda.extension import Extension\n"
    assert imported(text, "x") == {"lessonkit.pages.report", "lessonkit.lesson", "lessonkit.cuda.extension"}
    with pytest.raises(CycleError):
        order({"a": {"b"}, "b": {"c"}, "c": {"a"}})


def test_a_declaration_loads_the_command_line_by_its_name_alone():
    """LESSON.main() is the one import that points to the right; no other module of a group loads one by its name."""
    for module, path in MODULES.items():
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        named = [c.args[0].value for c in calls if c.args and isinstance(c.args[0], ast.Constant)]
        loaded = {name for name in named if isinstance(name, str) and name in MODULES}
        assert loaded == ({"lessonkit.commands.show"} if module == "lessonkit.lesson" else set()), module


@pytest.mark.parametrize("name", BY_NAME)
def test_lessons_name_modules_without_their_group(name):
    assert getattr(lessonkit, name).__name__ == f"lessonkit.{BY_NAME[name]}.{name}"


def test_a_name_that_the_kit_does_not_have_is_an_error():
    with pytest.raises(ImportError, match="no_such_module"):
        from lessonkit import no_such_module  # noqa: F401


@pytest.mark.kept("course_ops/**/*.py", "lessonkit/**/*.py")
def test_course_ops_loads_no_kit():
    code = "import course_ops, sys; print([name for name in sys.modules if name.split('.')[0] == 'lessonkit'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


# Imports a package with all its modules, and prints what was compiled meanwhile: kernels by Triton's own report, which
# tells of kernels from its cache too, and all else by the compiler's process.
COUNTS = """
import importlib, json, pkgutil, sys, torch, triton

compiled = []
triton.knobs.compilation.listener = lambda *, src, **more: compiled.append(src.name)
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
sys.addaudithook(lambda event, given: compiled.append(str(given[0])) if event in STARTS else None)
package = importlib.import_module(sys.argv[1])
modules = [each.name for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
for name in modules:
    importlib.import_module(name)
print(json.dumps([len(modules), compiled]))
"""
COMPILES = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def kernel(x):
    tl.store(x, 1)

triton.compile(ASTSource(kernel, {"x": "*i32"}), target=GPUTarget("cuda", 90, 32))
"""
BUILDS = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', ''])"  # stands for nvcc


def compiled_at_import(package: str, folder: Path) -> list[object]:
    """How many modules a package has, and the names of what their import compiles, in a fresh process."""
    env = environment(TRITON_CACHE_DIR=f"{folder}/cache")
    env["PYTHONPATH"] = f"{folder}:{env['PYTHONPATH']}"
    command = [sys.executable, "-c", COUNTS, package]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.mark.kept("course_ops/**/*.py")
def test_course_ops_compiles_nothing_when_it_is_imported(tmp_path):
    """Nor while the operators are defined, which the import does."""
    modules = len(list((ROOT / "course_ops").rglob("*.py"))) - 1  # __init__.py is the package
    assert compiled_at_import("course_ops", tmp_path) == [modules, []]


@pytest.mark.kept
@pytest.mark.parametrize(("text", "name"), [(COMPILES, "kernel"), (BUILDS, sys.executable)], ids=["triton", "process"])
def test_what_a_module_compiles_when_it_is_imported_is_counted(text, name, tmp_path):
    (tmp_path / "rash").mkdir()
    (tmp_path / "rash/__init__.py").touch()
    (tmp_path / "rash/kernels.py").write_text(text)
    modules, compiled = compiled_at_import("rash", tmp_path)
    assert modules == 1
    assert name in compiled


# ---- Lessons: importing one loads no file of another ----

PROGRAMS = tuple(sorted([*ROOT.glob("cuda_src/[0-9]*.cu"), *ROOT.glob("day*_*/lesson*.cu")]))
FOR_BOTH = {"kittens_driver.cuh"}  # finds the driver for ThunderKittens' header, and teaches nothing
SCRIPTS = tuple(module_name(path) for path in sorted(ROOT.glob("day*_*/*.py")))  # lessons, and what is a notebook too


def file_of(module: str) -> Path | None:
    """The file of a module of the repository; None of a package or of one from outside."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    return path if path.is_file() else None


def named(text: str) -> set[str]:
    """Modules that a file imports anywhere, also by import_module("...")."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import hides what it is from"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if file_of(name) else str(node.module) for name in whole}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
    return found


def loads(lesson: str) -> set[str]:
    """What a lesson imports of others, whatever stands in between: lessons, and the rungs in their folders.

    Its own folder is named as the lesson is, without its number. The kit knows lessons by name alone.
    """
    seen, todo = set[str](), [lesson]
    while todo:
        path = file_of(module := todo.pop())
        if path and module not in seen and module.split(".")[0] != "lessonkit":
            seen.add(module)
            todo += named(path.read_text())
    own = re.sub(r"\.lesson\d+_", ".", lesson)
    in_rooms = {module for module in seen - {lesson} if re.match(r"day\d_|cuda_src\.", module)}
    return {module for module in in_rooms if not module.startswith(f"{own}.")}


def shares(program: Path, others: Iterable[Path] = PROGRAMS) -> set[str]:
    """What a program includes from lessons' folders that others include too; cuda_src/include/ is for all."""

    def own(path: Path) -> set[Path]:
        shared = ROOT / "cuda_src/include"
        files = set(cpp_text.local_files(path, shared)) - {path}
        return {file for file in files if file.parent != shared and file.name not in FOR_BOTH}

    theirs = {file for other in others if other != program for file in {other, *own(other)}}
    return {file.name for file in own(program) & theirs}


def broken() -> dict[str, set[str]]:
    """What each lesson loads of others."""
    found = {lesson: loads(lesson) for lesson in {*names(), *SCRIPTS}}
    for program in PROGRAMS:
        found[module_name(program)] |= shares(program)
    return {lesson: others for lesson, others in found.items() if others}


@pytest.mark.parametrize(
    "line",
    [
        "from day4_replace_op.flash_hopper.ping_pong import ping_pong",
        "from day4_replace_op.flash_hopper import ping_pong",
        "import_module('day4_replace_op.flash_hopper.ping_pong')",
        "from day4_replace_op import lesson08_flash_hopper",
    ],
)
def test_a_rung_of_another_lesson_is_seen(monkeypatch, tmp_path, line):
    (tmp_path / "gelu.py").write_text(line)
    real = file_of
    monkeypatch.setitem(globals(), "file_of", lambda m: tmp_path / "gelu.py" if m.endswith("_gelu") else real(m))
    assert "day4_replace_op.flash_hopper.ping_pong" in loads("day2_triton_basics.lesson03_gelu")


@pytest.mark.parametrize("folder", ["cuda_src", "day3_matmul_tk"])
@pytest.mark.parametrize("include", ["other.cuh", "other.cu"])
def test_a_header_of_another_program_is_seen(folder, include, tmp_path):
    place = tmp_path / folder
    place.mkdir()
    program, other = place / "lesson01_one.cu", place / "other.cu"
    (place / "other.cuh").write_text("")
    program.write_text(f'#include "{include}"\n#include "course.cuh"\n')
    other.write_text('#include "other.cuh"\n')
    assert include in shares(program, [program, other])
    program.write_text('#include "course.cuh"\n')
    assert not shares(program, [program, other])


def test_a_lesson_loads_no_other_lesson():
    found = broken()
    assert not found, f"copy the lines, or move them to a problem, to the kit or to course_ops: {found}"


# Imports each lesson in a process of its own, forked where the common packages are loaded, and prints what it loads.
LOADED = """
import json, os, sys
import torch, triton, lessonkit
from importlib import import_module
from lessonkit.lesson import kernels as lesson_kernels
from lessonkit.lesson import names

before, found = {*sys.modules}, {}
for name in names():
    read, write = os.pipe()
    if not os.fork():
        try:
            import_module(name)
            answer = [module for module in sys.modules if module not in before]
        except BaseException as error:
            answer = repr(error)
        with os.fdopen(write, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found[name] = json.load(pipe)
    os.wait()
json.dump(found, sys.stdout)
"""


def specimens(lesson: str) -> set[str]:
    """The lessons that a lesson's file names to take a rung from, to measure or to inspect it."""
    tree = ast.parse((ROOT / f"{lesson.replace('.', '/')}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    taken = [c.args[0] for c in calls if ast.unparse(c.func) == "specimen"]
    return {arg.value for arg in taken if isinstance(arg, ast.Constant)}


def of_lesson(module: str, lesson: str) -> bool:
    """Whether a module is a lesson's own: its file, its rungs, or the package that these are in."""
    folder = re.sub(r"\.lesson\d+_", ".", lesson)
    return module in (lesson, folder, lesson.partition(".")[0]) or module.startswith(f"{folder}.")


@pytest.mark.night
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process for each lesson is forked")
def test_a_lesson_loads_no_other_lesson_in_a_process_of_its_own():
    """By whatever way, also through the kit. What it takes by `specimen` may come; a lesson with rungs takes none."""
    done = subprocess.run([sys.executable, "-c", LOADED], env=environment(), capture_output=True, text=True)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 100
    for lesson, loaded in found.items():
        assert isinstance(loaded, list), f"{lesson}: {loaded}"
        taken = specimens(lesson)
        others = {
            module
            for module in loaded
            if re.match(r"day\d_|cuda_src", module) and not any(of_lesson(module, each) for each in {lesson, *taken})
        }
        assert not others, f"{lesson} loads {', '.join(sorted(others))}"
    with_rungs = {name for name, lesson in lesson_kernels() if lesson.rungs}
    assert not {lesson for lesson in found if specimens(lesson)} & with_rungs
