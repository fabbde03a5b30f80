"""Wrong kernels, made from the right ones by changing one line, to prove that the checks can tell."""

import ast
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from lessonkit.base import device, eviction
from lessonkit.base.cpp_text import definitions
from lessonkit.base.errors import Misdeclared, Rejected, Unsupported
from lessonkit.base.files import need_private, write_atomically
from lessonkit.cuda.build import MUTANTS, SHARED, TOGETHER, local_files
from lessonkit.judge.check import cannot_run, check
from lessonkit.lesson import Lesson, Mutant, Rung, suits

import torch

OUT_OF_BOUNDS = "out of bounds"


def build(name: str, mutant: Mutant) -> Rung:
    """Return the mutant's rung from a copy of the lesson's source with the one change.

    Raises Misdeclared if `old` is not exactly once in `where`, or there is no such function or rung: the lesson has
    changed and the mutant has not.
    """
    lesson = _written(changed(_texts(name, mutant.rung), name, mutant))
    if lesson.with_suffix(".cu").exists() and not device.HAS_GPU:
        together = _programs(name, _texts(name, mutant.rung), mutant in one_of_each(sys.modules[name].LESSON.wrong))
        TOGETHER.update(dict.fromkeys((program for program, _ in together), together))
    stem = lesson.stem
    spec = importlib.util.spec_from_file_location(stem, lesson)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    spec.loader.exec_module(module)
    if not hasattr(module, mutant.rung):
        raise Misdeclared(f"{name}: the mutant {mutant.why!r}: rung={mutant.rung!r} is no function of the lesson")
    rung: Rung = getattr(module, mutant.rung)
    return rung


def _texts(name: str, rung: str) -> tuple[tuple[Path, str], ...]:
    return tuple((path, path.read_text()) for path in _files(name, rung))


def changed(before: tuple[tuple[Path, str], ...], name: str, mutant: Mutant) -> dict[Path, str]:
    """The texts of the lesson with the one change."""
    said = f"{name}: the mutant {mutant.why!r}"
    texts = dict(before)
    places = [(path, *span) for path, text in before for span in _spans(path, text, mutant.where)]
    if not places:
        raise Misdeclared(f"{said}: where={mutant.where!r} is no function of the lesson")
    counts = [texts[path][start:stop].count(mutant.old) for path, start, stop in places]
    if sum(counts) != 1:
        advice = "write more of the line" if sum(counts) else "write the line as it is now"
        raise Misdeclared(
            f"{said}: old={mutant.old!r} stands {sum(counts)} times in {mutant.where}, expected once; {advice}"
        )
    path, start, stop = places[counts.index(1)]
    text = texts[path]
    texts[path] = text[:start] + text[start:stop].replace(mutant.old, mutant.new) + text[stop:]
    return texts


def _written(texts: dict[Path, str]) -> Path:
    """The lesson of these texts. Triton reads a kernel's source from its file, and a program lies beside its lesson."""
    stem = f"mutant_{hashlib.sha256(repr(sorted(texts.values())).encode()).hexdigest()[:16]}"
    need_private(MUTANTS)
    for path, text in texts.items():
        file = MUTANTS / stem / (path.name if path.suffix == ".cuh" else f"{stem}{path.suffix}")
        if not file.exists():  # another process may be reading it
            write_atomically(file, text)
    eviction.used(MUTANTS / stem)
    return MUTANTS / stem / f"{stem}.py"


def one_of_each(wrong: Sequence[Mutant]) -> tuple[Mutant, ...]:
    """The first mutant of each function: what a push asks; the night asks the others."""
    first: dict[str, Mutant] = {}
    for mutant in wrong:
        first.setdefault(mutant.where, mutant)
    return tuple(first.values())


@cache
def _programs(name: str, texts: tuple[tuple[Path, str], ...], each: bool) -> tuple[tuple[Path, str], ...]:
    """(program, rung) of the mutants of the lesson that are one_of_each, or of all others: each are built as one.

    What has no place in the lesson is left out.
    """
    found, wrong = [], sys.modules[name].LESSON.wrong
    for mutant in wrong:
        with suppress(ValueError):
            if (mutant in one_of_each(wrong)) == each:
                found.append((_written(changed(texts, name, mutant)).with_suffix(".cu").resolve(), mutant.rung))
    return tuple(found)


def _files(name: str, rung: str) -> list[Path]:
    """The rung's file and, if its kernels are CUDA C++, the program beside it with the headers that are its own.

    The rung's file is the lesson, or one of the lesson's folder: day4/lesson08_flash_hopper.py declares the rungs of
    day4/flash_hopper/.
    """
    place = getattr(getattr(sys.modules[name], rung, None), "__module__", name)
    inside = place.startswith(f"{name.partition('.')[0]}.")
    lesson = Path(inspect.getfile(sys.modules[place if inside and place in sys.modules else name]))
    if not (program := lesson.with_suffix(".cu")).exists():
        return [lesson]
    return [lesson, *(path for path in local_files(program) if path.name not in SHARED)]


@cache
def _spans(path: Path, text: str, where: str) -> list[tuple[int, int]]:
    """Where what has this name begins and ends: the first such function in Python, each such definition in C++."""
    if path.suffix != ".py":
        return [(d.start, d.stop) for d in definitions(text) if d.name == where]
    functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == where)
    lines = text.splitlines(keepends=True)
    return [
        (sum(map(len, lines[: f.lineno - 1])), sum(map(len, lines[: f.end_lineno]))) for f in functions if f.end_lineno
    ][:1]


def cannot_judge(lesson: Lesson, rung: Rung, mutant: Mutant) -> str:
    """Why this machine cannot tell that the mutant is wrong, or an empty string."""
    emulated = lesson.extension and (suits(rung, 0) or getattr(rung, "interpreted", False))
    if device.HAS_GPU and emulated:
        return "this mutant is emulated; on a GPU it would be a build by nvcc"
    if (
        device.HAS_GPU
        and getattr(rung, "interpreted", False)
        and {*mutant.caught_by.split(" or ")} & {"race", "barrier"}
    ):
        return "races and deadlocks are found without a GPU, in any order of the hardware"
    if device.HAS_GPU and mutant.caught_by == OUT_OF_BOUNDS:
        return "addresses are watched in the interpreter; on a GPU compute-sanitizer does it"
    return cannot_run(lesson, rung, lesson.checks[0], lesson.dtypes[0])


def is_of_one_gpu(name: str, mutant: Mutant) -> bool:
    """Whether the mutant's rung runs on some GPUs only, as TMA and wgmma do, and a GPU can tell what is wrong.

    Addresses are watched in the interpreter and the emulator alone: "out of bounds" is theirs.
    """
    return getattr(getattr(sys.modules[name], mutant.rung, None), "needs", 0) > 0 and mutant.caught_by != OUT_OF_BOUNDS


def first_rejection(lesson: Lesson, rung: Rung) -> tuple[Rejected, str] | None:
    """Run the lesson's checks until one rejects the rung; return the rejection and the case that gave it."""
    for dtype in sorted(lesson.dtypes, key=lambda d: d != torch.float32):  # fp32 first: it sees the smallest errors
        for case in lesson.checks:
            if case.gib > 1 or cannot_run(lesson, rung, case, dtype):
                continue
            try:
                check(lesson, rung, case.shape, dtype)
            except Rejected as rejected:
                return rejected, f"{case} {dtype}"
            except Unsupported:
                continue
    return None
