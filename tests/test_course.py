"""course.py: its exit status, and what a failed installation leaves behind. No environment is really made."""

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from lessonkit.base.files import ROOT

import pytest


@pytest.fixture
def load(monkeypatch):
    """course.py as a module of its own, for this COURSE_VENV."""

    def load(folder):
        monkeypatch.setenv("COURSE_VENV", str(folder))
        spec = importlib.util.spec_from_file_location("course_under_test", ROOT / "course.py")
        course = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(course)
        return course

    return load


def files(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def half_made(folder, **kwargs):
    """venv.create as it fails on Debian without python3-venv: pip cannot be put there."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    (folder / "lib64").symlink_to("lib")
    (folder / "pyvenv.cfg").touch()
    raise subprocess.CalledProcessError(1, "ensurepip")


@pytest.mark.parametrize(
    ("codes", "status"),
    [((), 0), ((0, 0), 0), ((0, 1, 2), 1), ((0, 5, 1), 5), ((0, -11, 0), 139), ((-9,), 137), ((0, -2, 1), 130)],
)
def test_the_first_failure_is_the_exit_status(load, tmp_path, codes, status):
    assert load(tmp_path).exit_status(*codes) == status


@pytest.mark.parametrize("ended", ["pytest", "mypy", "ruff"])
def test_a_check_that_a_signal_ends_is_a_failure(load, tmp_path, monkeypatch, ended, capsys):
    course = load(tmp_path / "venv")
    course.VENV.mkdir()  # where there is a browser, a note of its packages is left there
    monkeypatch.setattr(course, "environment", lambda: None)

    def run(command, **kwargs):
        return subprocess.CompletedProcess(command, -11 * (ended == command[2]), f"{command[2]}'s words")

    monkeypatch.setattr(course.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["course.py", "test", "--all"])
    assert course.main() == 139
    assert "mypy: mypy's words" in capsys.readouterr().out


def test_words_behind_test_go_to_pytest(load, tmp_path, monkeypatch):
    course, commands = load(tmp_path / "venv"), []
    course.VENV.mkdir()
    monkeypatch.setattr(course, "environment", lambda: None)
    monkeypatch.setattr(
        course.subprocess,
        "run",
        lambda command, **kwargs: commands.append(command) or subprocess.CompletedProcess(command, 0, ""),
    )
    monkeypatch.setattr(sys, "argv", ["course.py", "test", "--all", "-k", "softmax"])
    assert course.main() == 0
    assert [command[-3:] for command in commands if "pytest" in command] == [["--all", "-k", "softmax"]]


def test_what_mypy_finds_is_kept_for_other_clones(load, tmp_path, monkeypatch):
    course, folders = load(tmp_path / "venv"), {}

    def run(command, env=None, **kwargs):
        folders[command[2]] = (env or {}).get("MYPY_CACHE_DIR")
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(course.subprocess, "run", run)
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
    assert course.test([]) == 0
    assert folders["mypy"] == str(tmp_path / "mypy")


def test_bytecode_goes_into_the_environment_where_it_may_not_lie_beside_the_sources(load, tmp_path, monkeypatch):
    course = load(tmp_path)
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    assert course.variables() == dict(course.os.environ)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in course.variables()
    assert course.variables()["PYTHONPYCACHEPREFIX"] == str(tmp_path / "bytecode")


def test_a_failed_installation_leaves_only_what_was_there(load, tmp_path, monkeypatch):
    """A folder that course.py makes goes again; an empty one that was there stays, and is empty."""
    (empty := tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new", empty):
        course = load(folder)
        monkeypatch.setattr(course.venv, "create", half_made)
        with pytest.raises(SystemExit, match="apt install python3-venv"):
            course.environment()
    assert list(tmp_path.iterdir()) == [empty]
    assert not list(empty.iterdir())


@pytest.mark.parametrize("there", ["notes.txt", "pyvenv.cfg", "bin/python"])
def test_a_folder_that_is_no_environment_is_refused_untouched(load, tmp_path, monkeypatch, there):
    (tmp_path / there).parent.mkdir(exist_ok=True)
    (tmp_path / there).write_text("mine")
    before = files(tmp_path)
    course = load(tmp_path)
    monkeypatch.setattr(course.venv, "create", lambda *args, **kwargs: pytest.fail("written into"))
    monkeypatch.setattr(course.subprocess, "run", lambda *args, **kwargs: pytest.fail("installed into"))
    with pytest.raises(SystemExit, match="set COURSE_VENV to a folder that does not exist"):
        course.environment()
    assert files(tmp_path) == before


def test_a_failed_pip_leaves_the_environment(load, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    for name in ("bin/python", "pyvenv.cfg"):
        (tmp_path / name).write_text("mine")
    before, commands = files(tmp_path), []

    def fail(command, **kwargs):
        commands.append(command)
        raise subprocess.CalledProcessError(-15, command)

    course = load(tmp_path)
    monkeypatch.setattr(course, "PYTHON", Path(tmp_path, "bin", "python"))
    monkeypatch.setattr(course.subprocess, "run", fail)
    monkeypatch.setattr(sys, "argv", ["course.py", "test"])
    assert course.main() == 143
    assert files(tmp_path) == before
    assert "--no-compile" in commands[0]


def hashes_of(package):
    """All that the lock file lists of it."""
    text = (ROOT / "requirements" / "course.txt").read_text()
    (block,) = re.findall(rf"^{package}==.*(?:\n +--hash=.*)+", text, re.M)
    return {*re.findall(r"--hash=\S+", block)}


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_where_triton_has_no_wheel_its_python_files_are_unpacked(load, tmp_path, monkeypatch, platform):
    """In the locked version, by its hashes, in place of an older one, and without what was compiled for Linux."""
    course, packages, downloads = load(tmp_path), tmp_path / "packages", []
    locked = []
    (packages / "triton").mkdir(parents=True)
    (packages / "triton" / "old.py").touch()
    (packages / "triton-3.0.0.dist-info").mkdir()
    wheel = ["triton/__init__.py", "triton/_C/libtriton.so", "triton-9.9.9.dist-info/METADATA", "LICENSE"]

    def run(command, **kwargs):
        if "download" in command:
            downloads.append(command)
            locked.append(Path(command[command.index("--requirement") + 1]).read_text())
            folder = next(word.removeprefix("--dest=") for word in command if word.startswith("--dest="))
            with zipfile.ZipFile(Path(folder, "triton-9.9.9-cp311-manylinux.whl"), "w") as made:
                for name in [*wheel, "triton-9.9.9.dist-info/RECORD"]:
                    made.writestr(name, "")
        return subprocess.CompletedProcess(command, 0, f"{packages}\n")

    monkeypatch.setattr(course, "make_venv", lambda: None)
    monkeypatch.setattr(course.subprocess, "run", run)
    monkeypatch.setattr(course.sys, "platform", platform)
    course.environment()
    if platform == "linux":
        assert not downloads
        assert {*files(packages)} == {"triton/old.py"}
        return
    (command,) = downloads
    (pinned,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("triton==")]
    assert command[1:3] == ["-m", "pip"]
    assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} <= {*command}
    assert locked[0].startswith(f"{pinned} ")
    assert "sys_platform" not in locked[0]
    assert {*re.findall(r"--hash=\S+", locked[0])} == hashes_of("triton")
    assert {*files(packages)} == {wheel[0], wheel[2]}
