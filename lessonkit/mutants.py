"""Wrong kernels, made from the right ones by changing one line, to prove that the checks can tell."""

import ast
import hashlib
import importlib.util
import inspect
import sys
from pathlib import Path

from lessonkit import device
from lessonkit.arguments import Unsupported
from lessonkit.check import Rejected, cannot_run, check
from lessonkit.cuda.build import MUTANTS, SHARED, local_files, need_private_cache
from lessonkit.cuda.source import definitions
from lessonkit.lesson import Lesson, Mutant, Rung, suits
from lessonkit.rows import write_atomically

import torch


def build(name: str, mutant: Mutant) -> Rung:
    """Return the mutant's rung from a copy of the lesson's source with the one change.

    Raises ValueError if `old` is not exactly once in `where`: the lesson has moved on and the mutant has not.
    """
    texts = {path: path.read_text() for path in _files(name)}
    places = [(path, *span) for path, text in texts.items() for span in _spans(path, text, mutant.where)]
    if not places:
        raise ValueError(f"{name}: mutant {mutant.why!r} names {mutant.where!r}, which is no function of the lesson")
    counts = [texts[path][start:stop].count(mutant.old) for path, start, stop in places]
    if sum(counts) != 1:
        raise ValueError(f"{name}: {mutant.old!r} stands {sum(counts)} times in {mutant.where}, expected once")
    path, start, stop = places[counts.index(1)]
    text = texts[path]
    texts[path] = text[:start] + text[start:stop].replace(mutant.old, mutant.new) + text[stop:]
    # Triton reads a kernel's source from its file, so the mutant needs one too, and a program lies beside its lesson.
    stem = f"mutant_{hashlib.sha256(repr(sorted(texts.values())).encode()).hexdigest()[:16]}"
    need_private_cache()
    folder = MUTANTS / stem
    for path, text in texts.items():
        file = folder / (path.name if path.suffix == ".cuh" else f"{stem}{path.suffix}")
        if not file.exists():  # another process may be reading it
            write_atomically(file, text)
    spec = importlib.util.spec_from_file_location(stem, folder / f"{stem}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    spec.loader.exec_module(module)
    rung: Rung = getattr(module, mutant.rung)
    return rung


def _files(name: str) -> list[Path]:
    """The lesson and, if its kernels are CUDA C++, the program beside it with the headers that are its own."""
    lesson = Path(inspect.getfile(sys.modules[name]))
    if not (program := lesson.with_suffix(".cu")).exists():
        return [lesson]
    return [lesson, *(path for path in local_files(program) if path.name not in SHARED)]


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
    if device.HAS_GPU and mutant.caught_by == "out of bounds":
        return "addresses are watched in the interpreter; on a GPU compute-sanitizer does it"
    return cannot_run(lesson, rung, lesson.checks[0], lesson.dtypes[0])


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
