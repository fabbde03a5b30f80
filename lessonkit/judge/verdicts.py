"""Verdicts that are kept: a test whose code, inputs and tools are what they were has passed, and is not run again.

A verdict is known by the test's name, the content of every file that its code reaches through imports, the versions of
everything installed, and the compilers. What a test reads beside that (a guide, a stored row, a list of files) is seen
while it runs, and has to be unchanged too. Only a pass is kept, and never a GPU's: a race may show in the next run.
"""

import ast
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from lessonkit.base import device, eviction
from lessonkit.base.files import BY_NAME, CACHE, ROOT, need_private, write_atomically
from lessonkit.cuda import build, toolchain

FOLDER = CACHE / "verdicts"
SETTINGS = ("TRITON_", "LESSONKIT_", "COURSE_EMU", "CXX", "CUDA_HOME", "THUNDERKITTENS_ROOT")
_LESSON = re.compile(r"(?:day\d\w*|cuda_src)(?:\.\w+)+")


def key(test: str, files: Iterable[Path]) -> str:
    """What a verdict is known by: the test's name, its files and all that they import, and the tools."""
    return hashlib.sha256("\n".join([test, tools(), code(frozenset(files))]).encode()).hexdigest()[:32]


@cache
def code(files: frozenset[Path]) -> str:
    """A hash of these files and of every file of the course that they import."""
    known = files if files == everything() else closure(files)
    lines = [f"{path.relative_to(ROOT)} {content(path)}" for path in sorted(known)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@cache
def tools() -> str:
    """Everything that may change a verdict and is no file of the course."""
    compilers = [tool for tool in (toolchain.find_gxx(), toolchain.find_nvcc()) if tool]
    installed = sorted({f"{d.metadata['Name']} {d.version}" for d in distributions()})
    settings = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(SETTINGS)]
    said = [sys.version, platform.machine(), device.name(), *map(toolchain.version, compilers), *installed, *settings]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def find(key: str) -> bool:
    """Has it passed, with all that it read as it is now? PermissionError if other users may write verdicts here."""
    need_private(FOLDER)
    try:
        kept = json.loads(_place(key).read_text())
        eviction.used(_place(key))
        return all(_state(ROOT / name) == state for name, state in kept["read"].items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def keep(key: str, test: str, read: Iterable[Path]) -> None:
    need_private(FOLDER)
    states = {str(path.relative_to(ROOT)): _state(path) for path in sorted(read)}
    write_atomically(_place(key), json.dumps({"test": test, "read": states}))
    eviction.evict(CACHE)


def _place(key: str) -> Path:
    return FOLDER / f"{key}.json"


def _state(path: Path) -> str:
    """A file's content, or the names in a folder."""
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir() if not p.name.startswith((".", "__pycache__")))
        return hashlib.sha256("\n".join(names).encode()).hexdigest()
    return content(path) if path.exists() else "gone"


# ---- What a file imports --------------------------------------------------------------------------------------------


@cache
def content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def forget() -> None:
    """Read every file anew: for a process under which files change, as tests do."""
    for known in (code, content, closure, everything, imported, _files, tools):
        known.cache_clear()


@cache
def everything() -> frozenset[Path]:
    """Every file of the course that git does not ignore; none where git knows nothing of the course."""
    asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return frozenset()
    return frozenset(path for name in listed.split("\0") if name and (path := ROOT / name).is_file())


@cache
def closure(files: frozenset[Path]) -> frozenset[Path]:
    """These files and every file of the course that they import or include, directly or not; nothing is run."""
    found: set[Path] = set()
    todo = list(files)
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            todo += imported(path)
    return frozenset(found)


@cache
def imported(path: Path) -> tuple[Path, ...]:
    """The files of the course that this one names: modules, the .cu beside a lesson, its headers, the emulator's."""
    if path.suffix in (".cu", ".cuh", ".h"):
        return (*build.local_files(path), *build.emulator_files(), build.SOURCES / "binding.cpp")
    if path.suffix != ".py":
        return ()
    found = [p for name in _named(path) for p in _files(name)]
    if (program := path.with_suffix(".cu")).exists():
        found.append(program)
    return tuple(found)


def _named(path: Path) -> list[str]:
    """What `_names` finds in a file, kept by the file's content: parsing the course takes seconds."""
    need_private(FOLDER)
    in_the_kit = path.is_relative_to(ROOT / "lessonkit")
    known_by = sys.version, content(Path(__file__)), str(in_the_kit), content(path)
    asked = hashlib.sha256(" ".join(known_by).encode()).hexdigest()
    place = FOLDER / f"{asked[:32]}.names.json"
    try:
        found: list[str] = json.loads(place.read_text())
        eviction.used(place)
        return found
    except (OSError, ValueError):
        pass
    try:
        found = sorted({*_names(ast.parse(path.read_bytes()), in_the_kit=in_the_kit)})
    except (SyntaxError, ValueError):  # it cannot be imported, and so imports nothing
        found = []
    write_atomically(place, json.dumps(found))
    return found


def _names(tree: ast.AST, *, in_the_kit: bool) -> Iterator[str]:
    """Modules, and what may be one: `from a import b` is a.b too, "day4.lesson" perhaps imported by its name.

    import_module("course_ops.scan") in a lesson, a problem or a test names a module. The kit's own calls are left out:
    it imports operators and their problems late, to judge them, and each lesson's verdict would depend on all of them.
    A test for which the kit imports them names these files in `kept`.
    """
    for node in _run(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _LESSON.fullmatch(node.value):
            yield node.value
        elif not in_the_kit and isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those for type checkers alone."""
    todo = [node]
    while todo:
        node = todo.pop()
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield node
            todo += ast.iter_child_nodes(node)


@cache
def _files(module: str) -> tuple[Path, ...]:
    """The files that importing a module of the course runs: its packages' and its own; none for another's module."""
    place, found = ROOT, []
    head, _, tail = module.partition(".")
    if head == "lessonkit" and (group := BY_NAME.get(tail.partition(".")[0])):
        module = f"{head}.{group}.{tail}"
    for part in module.split("."):
        place /= part
        if (place / "__init__.py").exists():
            found.append(place / "__init__.py")
        elif place.with_suffix(".py").exists():
            found.append(place.with_suffix(".py"))
        elif not place.is_dir():
            break
    return tuple(found)


# ---- What a test reads ----------------------------------------------------------------------------------------------

_reads: list[tuple[set[Path], set[Path]]] = []  # read, and written
_hooked: list[bool] = []


@contextmanager
def watching() -> Iterator[set[Path]]:
    """Inside, files and folders of the course that this process reads are collected, but not what it writes itself."""
    if not _hooked:
        sys.addaudithook(_see)
        _hooked.append(True)
    seen: tuple[set[Path], set[Path]] = set(), set()
    _reads.append(seen)
    try:
        yield seen[0]
    finally:
        _reads.pop()  # the innermost; one that is equal to it may stand before


def _see(event: str, args: tuple[object, ...]) -> None:
    if not _reads or event not in ("open", "os.listdir", "os.scandir", "os.rename"):
        return
    name = args[1 if event == "os.rename" else 0]
    if not isinstance(name, (str, os.PathLike)):
        return
    path = os.path.abspath(os.fspath(name))
    if not path.startswith(f"{ROOT}{os.sep}") or "/." in path[len(str(ROOT)) :] or "__pycache__" in path:
        return
    is_written = event == "os.rename" or (event == "open" and not _is_read(args))
    for read, written in _reads:
        if is_written:
            written.add(Path(path))
            read -= {Path(path), Path(os.path.abspath(str(args[0])))}  # and the temporary file that took its name
        elif Path(path) not in written:
            read.add(Path(path))


def _is_read(args: tuple[object, ...]) -> bool:
    mode = args[1] if len(args) > 1 else "r"
    return not isinstance(mode, str) or not set("wax+") & set(mode)
