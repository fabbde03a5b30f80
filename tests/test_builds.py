"""The kit's builder: compilers found or missed in one line, each program built once, whoever asks for it."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib

import lessonkit.base.device as device
from lessonkit.base import eviction, files
from lessonkit.base.files import ROOT
from lessonkit.cuda import build, toolchain
from lessonkit.judge import check
from lessonkit.lesson import kernels

import pybind11
import pytest
import torch

LACKS_NINJA = toolchain.lacks("ninja")


@pytest.fixture
def anew(tmp_path, monkeypatch):
    """An empty cache; programs that know no --version count as compilers."""
    monkeypatch.setattr(files, "CACHE", tmp_path)
    monkeypatch.setattr(toolchain, "version", lambda compiler: "")
    return tmp_path


@pytest.mark.skipif(bool(LACKS_NINJA), reason=LACKS_NINJA)
def test_two_processes_build_once(anew):
    """The second waits at the lock and finds the file there."""
    log = anew / "log"
    command = ("sh", "-c", 'echo built >> "$0"; sleep 1; echo done > "$1"', str(log), "$out")
    product = build.Product("once.txt", (command,))
    both = [threading.Thread(target=build.build, args=([build.Product("once.txt", (command,))],)) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert log.read_text() == "built\n"
    assert product.path.read_text() == "done\n"


OLD = 31 * eviction.DAY


def aged(path, seconds):
    os.utime(path, (at := time.time() - seconds, at))
    return path


@pytest.mark.skipif(bool(LACKS_NINJA), reason=LACKS_NINJA)
def test_what_is_unused_leaves_the_cache(anew):
    """At the next build, once a day; not what is used or locked, nor what is not the course's."""
    product = {
        name: build.Product(f"{name}.txt", (("touch", "$out", name),)) for name in ("old", "used", "locked", "new")
    }
    build.build(product[name] for name in ("old", "used", "locked"))
    folder = {name: product[name].folder for name in product}
    texts = [anew / f"{part}/{name}" for part in eviction.PARTS for name in ("old", "young")]
    texts += [anew / f"pyodide-{name}" for name in ("old", "young")]
    foreign = anew / "holiday-0123456789abcdef"
    for path in (*texts, foreign):
        path.mkdir(parents=True)
    for path in (*(folder[name] for name in ("old", "used", "locked")), foreign, *texts[::2]):
        aged(path, OLD)
    aged(anew / "evicted", 2 * eviction.DAY)
    build.build([product["used"]])
    assert folder["old"].exists(), "nothing is built, so nothing is removed"
    with (folder["locked"] / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build.build([product["new"]])
    assert [name for name in product if folder[name].exists()] == ["used", "locked", "new"]
    assert [path for path in (*texts, foreign) if path.exists()] == [*texts[1::2], foreign]
    build.build([product["old"]])
    assert folder["locked"].exists(), "once a day"


def test_ninjas_own_words_are_kept(anew, monkeypatch):
    """Where it did not come to start a compiler, nobody else can say why."""
    (ninja := anew / "ninja").write_text("#!/bin/sh\necho no space left\nexit 1\n")
    ninja.chmod(0o755)
    monkeypatch.setattr(toolchain, "find_ninja", lambda: str(ninja))
    with pytest.raises(build.BuildError, match=r"none\.txt:\nno space left"):
        build.build([build.Product("none.txt", (("true",),))])


ELSEWHERE = """
import sys
from pathlib import Path
from lessonkit.cuda import build
import pybind11
source = build.SOURCES / "02_vector_add.cu"
products = [build.emulated_extension(source), build.emulated_program(source, sanitized=True)]
products += [build.cubin(source, 90), build.extension(source)] if "nvcc" in sys.argv else []
assert all(str(Path.cwd()) in str(p.commands) for p in products)
print(*[p.path for p in products])
pybind11.__version__ = "another"
print(build.binding().path)
"""


@pytest.mark.skipif(bool(toolchain.lacks("g++", "Python.h")), reason="what g++ would be told")
@pytest.mark.kept("lessonkit/**/*.py", "cuda_src/**/*")
def test_another_clone_and_environment_find_the_same_builds(tmp_path):
    """What is built does not depend on the folders of the course and of pybind11, but does on pybind11's version."""
    shutil.copytree(ROOT / "lessonkit", tmp_path / "lessonkit")
    shutil.copytree(build.SOURCES, tmp_path / "cuda_src")
    (tmp_path / "pybind11").mkdir()
    (tmp_path / "pybind11/__init__.py").write_text(
        f"__version__ = {pybind11.__version__!r}\ndef get_include(): return {str(tmp_path)!r}\n"
    )
    source = build.SOURCES / "02_vector_add.cu"
    here = [build.emulated_extension(source), build.emulated_program(source, sanitized=True)]
    nvcc = [] if toolchain.lacks("nvcc") else ["nvcc"]
    here += [build.cubin(source, 90), build.extension(source)] if nvcc else []
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "COURSE_CACHE": str(files.CACHE)}
    command = [sys.executable, "-c", ELSEWHERE, *nvcc]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    there, other_pybind = done.stdout.splitlines()
    assert there.split() == [str(p.path) for p in here]
    assert other_pybind != str(build.binding().path)


def test_a_cache_that_others_may_write_is_refused(anew, monkeypatch):
    """Whatever lies in it is executed. The folder is as it was afterwards."""
    mine = build.Product("mine.txt", (("sh", "-c", 'echo > "$0"', "$out"),))
    mode = anew.stat().st_mode
    for change, says in (
        (lambda: anew.chmod(0o777), "other users may write"),
        (lambda: anew.chmod(0o1777), "other users may write"),
        (lambda: (anew.chmod(0o775), monkeypatch.setattr(files.os, "getgid", lambda: -2)), "other users may write"),
        (lambda: (anew.chmod(mode), monkeypatch.setattr(files.os, "getuid", lambda: -2)), "belongs to user"),
    ):
        change()
        with pytest.raises(PermissionError, match=f"{says}.*COURSE_CACHE"):
            build.build([mine])
        assert not list(anew.iterdir())
    monkeypatch.undo()
    monkeypatch.setattr(files, "CACHE", anew / "new" / "one")
    files.need_private()
    assert files.CACHE.stat().st_mode & 0o777 == 0o700


def test_mutants_are_the_users_own():
    assert files.CACHE in build.MUTANTS.parents


def test_the_compiler_that_is_advised_is_the_courses():
    """Into this Python, and in the version that `course.py` installs."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["nvcc"]
    assert re.findall(r"'(.*?)'", toolchain.NVCC_PACKAGES) == [line.partition(";")[0] for line in extra]
    assert f"{toolchain.PIP} {toolchain.NVCC_PACKAGES}" == toolchain.COMMANDS["nvcc"]


def test_nvcc_is_not_enough(tmp_path, monkeypatch):
    """It calls g++."""
    (tmp_path / "p.cu").write_text("")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(toolchain, "find_gxx", lambda: "")
    with pytest.raises(toolchain.Missing, match=r"no g\+\+"):
        build.cubin(tmp_path / "p.cu", 90)


@pytest.mark.parametrize(
    ("piece", "says"), [("nvcc", "-m pip install 'nvidia-cuda-nvcc==13.0.*'"), ("g++", "apt install g++")]
)
def test_a_missing_compiler_is_one_line(monkeypatch, tmp_path, piece, says):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(toolchain, "USUAL", str(tmp_path))
    assert says in toolchain.lacks(piece)
    assert "\n" not in toolchain.lacks(piece)
    with pytest.raises(toolchain.Missing, match=piece[0]):
        toolchain.need(piece)
    _, lesson = next((n, lesson) for n, lesson in kernels() if lesson.extension)
    said = check.cannot_run(lesson, lesson.rungs[0], lesson.checks[0], torch.float32)
    assert said == toolchain.lacks("nvcc" if device.HAS_GPU else "g++")


def test_nvcc_of_the_pip_packages_is_found(monkeypatch, tmp_path):
    nvcc = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    (lib := tmp_path / "nvidia" / "cu13" / "lib").mkdir()
    (lib / "libcublas.so").touch()
    nvcc.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(toolchain, "USUAL", str(tmp_path))
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
    assert toolchain.find_nvcc() == str(nvcc)
    assert toolchain.link_flags(str(nvcc), ["cublas", "nowhere"]) == [f"-L{lib}", "-lcublas"]
    assert toolchain.link_flags("/usr/local/cuda/bin/nvcc", ["nowhere"]) == []


def test_architectures():
    assert [toolchain.architecture(c) for c in (80, 89, 90, 100)] == ["sm_80", "sm_89", "sm_90a", "sm_100a"]


def test_a_program_on_thunderkittens_is_known_by_its_headers(tmp_path, monkeypatch):
    source, root = tmp_path / "p.cu", tmp_path / "kittens"
    source.write_text('// Needs: ThunderKittens Hopper\n#include "kittens.cuh"\n')
    monkeypatch.setattr(toolchain, "version", lambda compiler: "")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(toolchain, "find_gxx", lambda: "g++")
    monkeypatch.setenv("THUNDERKITTENS_ROOT", str(root))
    assert "git clone" in toolchain.lacks("ThunderKittens")
    assert "\n" not in toolchain.lacks("ThunderKittens")
    with pytest.raises(toolchain.Missing, match="THUNDERKITTENS_ROOT"):
        build.cubin(source, 90)
    (root / "include").mkdir(parents=True)
    (root / "include/kittens.cuh").write_text("// one")
    assert not toolchain.lacks("ThunderKittens")
    assert toolchain.lacks("Hopper") == ("" if device.capability() == 90 else toolchain.MEND["Hopper"])
    before = build.cubin(source, 90)
    folder = before.folder
    assert {"-DKITTENS_HOPPER", f"-I{root}/include", "-arch=sm_90a"} < set(before.commands[0])
    assert "-DKITTENS_AMPERE" in build.cubin(source, 80).commands[0]
    (root / "include/kittens.cuh").write_text("// two")
    assert build.cubin(source, 90).folder != folder, "another commit is another program"
    source.write_text("")
    assert not any("KITTENS" in word for word in build.cubin(source, 90).commands[0])


@pytest.mark.skipif(bool(toolchain.lacks("nvcc", "g++")), reason="what nvcc would be told")
def test_a_linked_program_is_for_one_architecture_alone(tmp_path):
    """`-arch=sm_90a` adds PTX for compute_90, where Hopper's own instructions are errors."""
    (tmp_path / "p.cu").write_text("")
    command = build.program(tmp_path / "p.cu").commands[0]
    machine = toolchain.architecture()
    assert f"-gencode=arch={machine.replace('sm', 'compute')},code={machine}" in command
    assert not any(word.startswith("-arch") for word in command)
