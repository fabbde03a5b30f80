"""Systems for which Triton has no wheel: its interpreter with ours in place of the compiled extension."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

from lessonkit.base import device, libtriton
from lessonkit.base.files import ROOT, environment
from lessonkit.exercise.source import Source
from lessonkit.judge import verify
from lessonkit.lesson import discover

import numpy as np
import pytest
import torch
import triton

native = import_module("triton._C.libtriton")
BITS = ("ADD", "AND", "OR", "XOR", "XCHG")
LESSON = "day2_triton_basics.lesson01_vector_add"
# A system without fork, users, process groups and locks, as Windows is.
BARE = """
import multiprocessing, os, signal, sys
for name in ("fork", "getuid", "getgid", "killpg", "setpgid", "setsid"):
    delattr(os, name)
for name in ("alarm", "SIGHUP", "SIGALRM"):
    delattr(signal, name)
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
multiprocessing.get_all_start_methods = lambda: ["spawn"]
"""


@pytest.fixture(scope="session")
def python_files(tmp_path_factory):
    """A folder with the Python files of Triton and nothing compiled, and what makes this system a bare one."""
    folder, there = tmp_path_factory.mktemp("packages"), Path(triton.__file__).parent
    for path in there.rglob("*.py"):
        copy = folder / "triton" / path.relative_to(there)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.symlink_to(path)
    (folder / "sitecustomize.py").write_text(BARE)
    return folder


def run_without_extension(python_files, *words, **more):
    env = environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", **more)
    env["PYTHONPATH"] += f":{python_files}"
    done = subprocess.run([sys.executable, *words], env=env, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


# ---- The functions, beside those of the compiled extension ----------------------------------------------------------


def pointers(tensor, at):
    return np.asarray(tensor.data_ptr() + tensor.element_size() * at, dtype=np.uint64)


def both(call, dtype, seed, elements=256):
    """What a function of the interpreter answers, and leaves in memory: the extension's and ours."""
    found = []
    for module in (native.interpreter, libtriton):
        rng = np.random.default_rng(seed)
        memory = torch.from_numpy(rng.integers(0, 100, elements).astype(dtype))
        answer = call(module, memory, rng)
        found.append((answer, memory.numpy()))
    return found


def assert_same(found):
    (theirs, left), (ours, right) = found
    np.testing.assert_array_equal(left, right)
    if theirs is not None:
        assert (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape)
        np.testing.assert_array_equal(theirs, ours)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "float16", "int32", "float32", "int64", "float64"])
def test_loads_and_stores_are_the_extension_s(dtype):
    def load(module, memory, rng):
        at, mask = rng.integers(0, 256, (8, 16)), rng.random((8, 16)) < 0.7
        at[~mask] += 2**40  # nobody may touch what is masked off
        return module.load(pointers(memory, at), mask, np.full((8, 16), 7).astype(dtype), np.dtype(dtype))

    def store(module, memory, rng):
        at, mask = rng.integers(0, 64, (8, 16)), rng.random((8, 16)) < 0.7  # addresses come more than once
        at[~mask] -= 2**40
        module.store(pointers(memory, at), rng.integers(0, 100, (8, 16)).astype(dtype), mask)

    for seed in range(5):
        assert_same(both(load, dtype, seed))
        assert_same(both(store, dtype, seed))


# What the extension takes of each type.
UPDATES = {
    dtype: ["FADD"] if dtype[0] == "f" else [*BITS, *(["UMAX", "UMIN"] if dtype[0] == "u" else ["MAX", "MIN"])]
    for dtype in ("int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
}


@pytest.mark.parametrize(("dtype", "op"), [(dtype, op) for dtype, ops in UPDATES.items() for op in ops])
def test_atomic_updates_are_the_extension_s(dtype, op):
    def update(module, memory, rng):
        at, mask = rng.choice(many, 64, replace=many < 64), rng.random(64) < 0.7
        old = module.atomic_rmw(
            getattr(module.RMW_OP, op), pointers(memory, at), rng.integers(0, 100, 64).astype(dtype), mask,
            native.interpreter.MEM_SEMANTIC.RELAXED,
        )  # fmt: skip
        return np.where(mask, old, 0).astype(dtype)  # the extension leaves the others as they were

    for many in (200, 7):  # an address each; several with one address, which see each other
        assert_same(both(update, dtype, many))


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32"])
def test_compare_and_swap_is_the_extension_s(dtype):
    def swap(module, memory, rng):
        at = rng.integers(0, 16, 64)
        expected = np.where(rng.random(64) < 0.5, memory.numpy()[at], 0).astype(dtype)
        return module.atomic_cas(
            pointers(memory, at), expected, rng.integers(0, 100, 64).astype(dtype),
            native.interpreter.MEM_SEMANTIC.ACQUIRE_RELEASE,
        )  # fmt: skip

    for seed in range(5):
        assert_same(both(swap, dtype, seed))


def test_integers_do_not_add_as_floating_point():
    at = np.zeros(1, np.uint64)
    with pytest.raises(TypeError, match="held as uint16"):
        libtriton.atomic_rmw(libtriton.RMW_OP.FADD, at, np.zeros(1, np.uint16), np.ones(1, bool), None)


def test_types_are_the_extension_s():
    kinds = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.int64]
    tensors = [torch.zeros(4).to(kind) for kind in kinds]
    for argument in (0, 1, -1, 2**31, -(2**31) - 1, 2**63, 2**64, True, "x", np.int32(3), *tensors):
        said = []
        for module in (native, libtriton):
            try:
                said.append(module.native_specialize_impl(triton.backends.compiler.BaseBackend, argument, 0, 0, 0))
            except (TypeError, OverflowError) as error:
                said.append(type(error))
        assert said[0] == said[1], argument


def test_what_is_not_here_can_be_named_and_not_called():
    part = libtriton._Part("triton._C.libtriton.ir")
    assert part.MEM_SEMANTIC.RELAXED is part.MEM_SEMANTIC.RELAXED is not part.MEM_SEMANTIC.ACQUIRE
    assert not hasattr(part, "__path__")
    with pytest.raises(RuntimeError, match=r"^triton\._C\.libtriton\.ir\.builder is part of Triton's compiler"):
        part.builder()


# ---- The course on such a system ------------------------------------------------------------------------------------


def test_this_system_has_the_extension():
    assert device.HAS_COMPILER
    assert not libtriton.stand_in()
    assert sys.modules[libtriton.EXTENSION].__file__


def test_without_triton_the_command_is_named(monkeypatch):
    monkeypatch.setattr(libtriton, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"python3 course\.py doctor"):
        libtriton.stand_in()


def test_a_lesson_runs_without_the_extension(python_files):
    """It is checked as ever, and says that it is not compiled."""
    code, said = run_without_extension(python_files, f"{LESSON.replace('.', '/')}.py")
    assert code == 0, said
    assert "right in values; not compiled here" in said
    assert "checked against PyTorch" in said
    assert "Traceback" not in said


@pytest.mark.night
@pytest.mark.kept
@pytest.mark.parametrize("day", ["day2", "day3", "day4"])
def test_a_day_is_right_without_the_extension(python_files, day):
    """What a push asks of each lesson, but what a compiler answers; at most that is left out."""
    code, said = run_without_extension(python_files, __file__, day)
    assert code == 0, said


@pytest.mark.night
@pytest.mark.kept
def test_an_exercise_is_graded_without_the_extension(python_files, tmp_path):
    source = Source(ROOT / "day2_triton_basics" / "exercises" / "exercise01_mul.py")
    answer = tmp_path / source.answer_name
    answer.parent.mkdir()
    for text, words in ((source.stub, "TODO(1) is as it was"), (source.solution, "Right, after 2 checks")):
        answer.write_text(text)
        command = ("-m", "lessonkit", "exercise", "check", source.short)
        code, said = run_without_extension(python_files, *command, COURSE_ANSWERS=str(tmp_path))
        assert words in said
        assert code == (text != source.solution)


def ask(day):
    """Ask each lesson of a day, and say what is wrong; how a fresh process of this file begins."""
    assert not device.HAS_COMPILER
    torch.set_num_threads(1)
    wrong, asked = [], 0
    for name, lesson in discover(day):
        for question in verify.questions(name, lesson):
            if question.tier != verify.PUSH or question.kind == "listed":
                continue
            try:
                question.ask()
                asked += 1
            except verify.LeftOut:
                continue
            except Exception as why:
                wrong.append(f"{question}: {type(why).__name__}: {why}")
    assert asked
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    ask(sys.argv[1])
