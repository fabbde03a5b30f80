"""Wrong kernels, made from the right ones by changing one line, to prove that the checks can tell."""

import ast
import hashlib
import importlib.util
import inspect
import sys
import tempfile
from pathlib import Path

from lessonkit.arguments import Unsupported
from lessonkit.check import Rejected, cannot_run, check
from lessonkit.device import HAS_GPU
from lessonkit.lesson import Lesson, Mutant, Rung
from lessonkit.rows import write_atomically

import torch


def build(name: str, mutant: Mutant) -> Rung:
    """Return the mutant's rung from a copy of the lesson's source with the one change.

    Raises ValueError if `old` is not exactly once in `where`: the lesson has moved on and the mutant has not.
    """
    source = inspect.getsource(sys.modules[name])
    function = next(
        (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == mutant.where), None
    )
    if function is None or function.end_lineno is None:
        raise ValueError(f"{name}: mutant {mutant.why!r} names {mutant.where!r}, which is no function of the lesson")
    lines = source.splitlines(keepends=True)
    body = "".join(lines[function.lineno - 1 : function.end_lineno])
    if body.count(mutant.old) != 1:
        raise ValueError(
            f"{name}: {mutant.old!r} stands {body.count(mutant.old)} times in {mutant.where}, expected once"
        )
    changed = body.replace(mutant.old, mutant.new)
    text = "".join(lines[: function.lineno - 1]) + changed + "".join(lines[function.end_lineno :])
    # Triton reads a kernel's source from its file, so the mutant needs one too.
    folder = Path(tempfile.gettempdir()) / "lessonkit_mutants"
    folder.mkdir(exist_ok=True)
    stem = f"mutant_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    path = folder / f"{stem}.py"
    if not path.exists():  # another process may be reading it
        write_atomically(path, text)
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    spec.loader.exec_module(module)
    rung: Rung = getattr(module, mutant.rung)
    return rung


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


def unseen(mutant: Mutant) -> str:
    """Why this machine cannot see what is wrong with a mutant, or an empty string."""
    watched = mutant.caught_by == "out of bounds" and HAS_GPU
    return "addresses are watched in the interpreter; on a GPU compute-sanitizer does it" if watched else ""
