"""Files that several processes share: nothing is believed that others could have written, and no update is lost."""

import ast
import os
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import fields
from fnmatch import fnmatch

from lessonkit.base import eviction, files
from lessonkit.commands import course_run, versions
from lessonkit.cuda import build, sass, toolchain
from lessonkit.exercise import progress, source
from lessonkit.judge import mutants, verdicts
from lessonkit.measure import beside, fuzz_runs, gpu_mutants, operator_rows, rows, sanitize, stale
from lessonkit.modes import compiled
from lessonkit.web import site
from lessonkit.web.page import pack

import pytest


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setattr(files, "CACHE", tmp_path)
    for module in (versions, site, pack):
        monkeypatch.setattr(module, "CACHE", tmp_path)
    monkeypatch.setattr(verdicts, "FOLDER", tmp_path / "verdicts")
    monkeypatch.setattr(mutants, "MUTANTS", tmp_path / "lessonkit_mutants")
    return tmp_path


def find_exercise():
    return next(exercise for exercise in source.discover() if not exercise.is_cuda)


# Part of the cache -> what takes something from it.
TAKERS = {
    "verdicts": lambda: verdicts.find("0" * 32),
    "compiled": lambda: compiled.outcome("day2_triton_basics.lesson01_vector_add", 90),
    "opcodes": lambda: sass.opcodes([b"machine code"], 90),
    "lessonkit_mutants": lambda: mutants._written({files.ROOT / "lesson.py": ""}),
    "lessonkit_answers": lambda: source.build(find_exercise(), "never imported = 1"),
    "versions": lambda: versions.overlay("3.7.1"),
    "web": lambda: site._sources_of(frozenset()),
    "pyodide-0.27.7": pack.released,
}


def is_whole(name):
    return any(fnmatch(name, pattern) for pattern in eviction.WHOLE)


def test_every_part_of_the_cache_is_here():
    assert {name for name in TAKERS if not is_whole(name)} == set(eviction.PARTS)


def test_what_the_kit_puts_into_the_cache_is_evicted():
    """Each `CACHE / "name"` of the kit; builds have names of their own, which end in a hash."""
    named = {
        node.right.value
        for path in (files.ROOT / "lessonkit").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant)
        if ast.unparse(node.left).split(".")[-1] == "CACHE"
    }
    assert named == TAKERS.keys()


@pytest.mark.parametrize("part", TAKERS)
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_nothing_is_taken_from_a_folder_that_others_may_write(cache, part, mode):
    """A verdict that another user wrote would skip a test; a module of his would be run."""
    (cache / part).mkdir()
    (cache / part).chmod(mode)
    with pytest.raises(PermissionError, match=f"other users may write to the cache's .*{part}"):
        TAKERS[part]()
    assert not list((cache / part).iterdir())


def test_no_build_is_taken_from_a_folder_that_others_may_write(cache, monkeypatch):
    monkeypatch.setattr(toolchain, "version", lambda compiler: "")
    product = build.Product("mine.txt", (("sh", "-c", 'echo > "$0"', "$out"),))
    product.folder.mkdir()
    product.path.write_text("of another user")
    product.folder.chmod(0o777)
    with pytest.raises(PermissionError, match="other users may write"):
        build.build([product])


NVCC = """#!/bin/sh
[ "$1" = --version ] && echo release 13.0, V13.0.88
echo '#$ INCLUDES="-I{folder}"' >&2
echo '#$ SYSTEM_INCLUDES="-isystem" "{folder}/cccl"' >&2
"""


@pytest.mark.parametrize("header", ["cuda.h", "cccl/cub/version.cuh", "cccl/cuda/std/__cccl/version.h"])
def test_other_headers_of_cuda_are_another_build(tmp_path, monkeypatch, header):
    """CUDA's runtime and CCCL are packages of their own: an upgrade in place leaves nvcc as it was."""
    (nvcc := tmp_path / "nvcc").write_text(NVCC.format(folder=tmp_path))
    nvcc.chmod(0o755)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: str(nvcc))
    monkeypatch.setattr(toolchain, "find_gxx", lambda: str(nvcc))
    (program := tmp_path / "p.cu").write_text("")
    place = tmp_path / header
    place.parent.mkdir(parents=True, exist_ok=True)
    keys = set()
    for text in ("#define VERSION 1", "#define VERSION 2", "#define VERSION 1"):
        place.write_text(text)
        toolchain.version.cache_clear()
        keys.add(build.cubin(program, 90).folder)
    toolchain.version.cache_clear()
    assert len(keys) == 2
    assert toolchain.release() == "13.0.88"
    toolchain.version.cache_clear()


@pytest.mark.parametrize("what", ["triton", "torch", "ptxas", "TRITON_DISABLE_LINE_INFO"])
def test_compiled_figures_are_known_by_their_compilers(monkeypatch, what):
    import torch
    import triton

    asked = ("_count_here", "day2_triton_basics.lesson01_vector_add", 90)
    before = compiled._kept(*asked)
    if what == "ptxas":
        monkeypatch.setattr(toolchain, "version", lambda compiler: "another")
    elif what.startswith("TRITON"):
        monkeypatch.setenv(what, "1")
    else:
        monkeypatch.setattr({"triton": triton, "torch": torch}[what], "__version__", "another")
    assert compiled._kept(*asked) != before
    monkeypatch.undo()
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    assert compiled._kept(*asked) == before


def test_verdicts_leave_the_cache_where_nothing_is_built(cache, monkeypatch):
    """A machine without a compiler runs the interpreter alone, and keeps verdicts all the same."""
    monkeypatch.setattr(verdicts, "CACHE", cache)
    verdicts.keep("old", "test", [])
    old, stamp = cache / "verdicts" / "old.json", cache / "evicted"
    for path in (old, stamp):
        os.utime(path, (0, 0))
    verdicts.keep("new", "test", [])
    assert [path.name for path in (cache / "verdicts").iterdir()] == ["new.json"]


def test_a_book_and_its_python_stay_while_they_are_used(cache):
    """Each build of the same pages, and each book with Python, keeps what it takes for another 30 days."""
    taken, other = site._sources_of(frozenset()), cache / "web" / "of other pages"
    python, older = cache / "pyodide-0.27.7", cache / "pyodide-0.26.0"
    for path in (taken, other, python, older):
        path.mkdir()
    for name in pack.RELEASED:
        (python / name).touch()
    for path in (taken, other, python, older, cache / "evicted"):
        os.utime(path, (0, 0))
    assert pack.released() == python
    assert site._sources_of(frozenset()) == taken
    assert [path.exists() for path in (taken, other, python, older)] == [True, False, True, False]


# ---- Locks ----------------------------------------------------------------------------------------------------------


class Together:
    """A reader that returns when two have read, so that each would write over what the other adds.

    The second never comes where the first holds the lock; then the first goes on after a moment.
    """

    def __init__(self, read):
        self.read, self.both = read, threading.Barrier(2)

    def __call__(self, *args, **kwargs):
        found = self.read(*args, **kwargs)
        with suppress(threading.BrokenBarrierError):
            self.both.wait(0.2)
        return found


def row(lesson, shape):
    numbers = {"ms_p20": 1.0, "ms_p50": 1.0, "ms_p80": 1.0, "bytes": 1, "tb_per_s": 1.0, "tflop_per_s": 0.0}
    machine = dict.fromkeys(("driver", "torch", "triton", "cuda", "commit", "date", "source"), "x")
    return rows.Row(
        lesson,
        "add",
        "rung",
        shape,
        "float32",
        **numbers,
        percent_of_limit=1.0,
        ratio_to_best_peer=0.0,
        gpu="g",
        **machine,
    )


def verdict(why):
    return gpu_mutants.Judged("lesson", "rung", why, *["x"] * 10)


def save_rows(folder, monkeypatch):
    monkeypatch.setattr(rows, "REPORTS", folder)
    monkeypatch.setattr(rows, "read_all", Together(rows.read_all))
    (folder / rows.device.name()).mkdir()
    place = folder / rows.device.name() / "lesson.csv"
    return lambda word: rows.save([row("lesson", word)]), lambda: place.read_text()


def save_verdicts(folder, monkeypatch):
    monkeypatch.setattr(gpu_mutants, "read", Together(gpu_mutants.read))
    return lambda word: gpu_mutants.save(folder, verdict(word)), lambda: (folder / gpu_mutants.NAME).read_text()


def add_found(folder, monkeypatch):
    monkeypatch.setattr(fuzz_runs, "found", Together(fuzz_runs.found))
    place = folder / "found.jsonl"
    return (
        lambda word: fuzz_runs.add(fuzz_runs.Found("interpreted", {"seed": word}, "wrong", word), place),
        lambda: place.read_text(),
    )


def keep_runs(folder, monkeypatch):
    monkeypatch.setattr(course_run, "FILE", folder / "run.json")
    monkeypatch.setattr(course_run, "_load", Together(course_run._load))
    return (
        lambda word: course_run.keep(course_run.Run([word], {word: "mark"}), {}),
        lambda: (folder / "run.json").read_text(),
    )


def save_versions(folder, monkeypatch):
    monkeypatch.setattr(versions, "TABLE", folder / "versions.csv")
    monkeypatch.setattr(versions, "read_csv", Together(versions.read_csv))
    return (
        lambda word: versions.save([versions.not_tried((f"9.{ord(word)}", "9.0"), word)]),
        lambda: (folder / "versions.csv").read_text(),
    )


def keep_operators(folder, monkeypatch):
    monkeypatch.setattr(operator_rows, "read", Together(operator_rows.read))
    words = {field.name: "" for field in fields(operator_rows.Row)} | {"bytes": 1, "flops": 1}
    return (
        lambda word: operator_rows.keep(folder / "operators.csv", operator_rows.Row(**words | {"shape": word})),
        lambda: (folder / "operators.csv").read_text(),
    )


def save_repeated(folder, monkeypatch):
    monkeypatch.setattr(beside, "read_csv", Together(beside.read_csv))
    return (
        lambda word: beside.save(folder, [beside.Repeated(word, *["x"] * 4, True, 1, 0)]),
        lambda: (folder / beside.NAME).read_text(),
    )


def save_watched(folder, monkeypatch):
    monkeypatch.setattr(sanitize, "read_csv", Together(sanitize.read_csv))
    monkeypatch.setattr(sanitize.operator_cases, "source", lambda name, rung: "x")
    return (
        lambda word: sanitize.save(folder, word, "memcheck", Counter(), []),
        lambda: (folder / sanitize.NAME).read_text(),
    )


def count_cases(folder, monkeypatch):
    monkeypatch.setattr(fuzz_runs, "counts", Together(fuzz_runs.counts))
    place = folder / "fuzz.csv"
    known = {"mode": "cpu", "device": "cpu", "cases": 1, "versions": "x", "code": "x", "commit": "x"}
    return (
        lambda word: fuzz_runs.counted(fuzz_runs.Count(operator=word, direction="forward", **known), place),
        lambda: place.read_text(),
    )


def learn(folder, monkeypatch):
    """`watch` in one terminal, `hint` of another exercise in the other."""
    monkeypatch.setenv("COURSE_ANSWERS", str(folder))
    monkeypatch.setattr(progress, "_raw", Together(progress._raw))
    exercises = dict(zip("QZ", source.discover(), strict=False))
    return lambda word: progress.update(exercises[word], word), lambda: (folder / "progress.json").read_text()


def predict(folder, monkeypatch):
    monkeypatch.setenv("COURSE_ANSWERS", str(folder))
    monkeypatch.setattr(progress, "_raw", Together(progress._raw))
    return lambda word: progress.add("asked", word), lambda: (folder / "progress.json").read_text()


SAVERS = [
    save_rows, save_verdicts, add_found, keep_runs, save_versions, keep_operators, save_repeated, save_watched,
    count_cases, learn, predict,
]  # fmt: skip


@pytest.mark.parametrize("saver", SAVERS)
def test_two_that_write_at_once_lose_nothing(tmp_path, monkeypatch, saver):
    save, text = saver(tmp_path, monkeypatch)
    both = [threading.Thread(target=save, args=(word,)) for word in ("Q", "Z")]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert "Q" in text()
    assert "Z" in text()
    assert not [path for path in tmp_path.rglob("*") if "lock" in path.name], "the lock leaves no file"


def test_rows_that_are_measured_while_marks_are_made_are_kept(tmp_path, monkeypatch):
    """Compiling for the marks takes minutes."""
    monkeypatch.setattr(rows, "REPORTS", tmp_path)
    monkeypatch.setattr(stale, "device_folders", lambda: [tmp_path / rows.device.name()])
    monkeypatch.setattr(stale, "kernels", lambda: [("lesson", None)])
    rows.save([row("lesson", "n=1"), row("lesson", "n=2")])

    def measured_meanwhile(name, wanted):
        rows.save([row("lesson", "n=3")])
        return ["mark" for _ in wanted]

    monkeypatch.setattr(stale.launches, "marks", measured_meanwhile)
    assert stale._with_marks(lambda row: row.shape == "n=1", lambda row, mark: stale.replace(row, machine=mark)) == 1
    kept = {each.shape: each.machine for each in rows.read_all(tmp_path / rows.device.name() / "lesson.csv")}
    assert kept == {"n=1": "mark", "n=2": "", "n=3": ""}
