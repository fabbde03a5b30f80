"""The course's grader in a page: Python's end of static/python.js.

`answer` takes the requests that a server's grader takes, and is that grader: lessonkit.web.grader. What it needs of the
system is put in place first. A page has no PyTorch, no compiled Triton and no other processes.
"""

import io
import json
import os
import shutil
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

COURSE = Path(__file__).parent
ANSWERS = COURSE / "answers"


def begin() -> None:
    """To be called once, before the first request."""
    os.environ |= {"COURSE_CACHE": str(COURSE / "cache"), "COURSE_ANSWERS": str(ANSWERS), "CUDA_VISIBLE_DEVICES": ""}
    os.chdir(COURSE)
    import torch_in_numpy

    torch_in_numpy.stand_in()
    for name in ("_multiprocessing", "_posixshmem"):
        sys.modules.setdefault(name, _Nothing(name))
    from lessonkit.base import words
    from lessonkit.base.words import said
    from lessonkit.exercise import compile_check, desk

    for module, name, here in (
        (words, "_known", _catalogue),
        (desk, "grade_apart", _graded),
        (compile_check, "lacks_compiler", lambda: said("a browser has no compiler")),
    ):
        setattr(module, name, here)
    warnings.simplefilter("ignore")


class _Nothing(ModuleType):
    """A module of the standard library that Pyodide leaves out, and that is only imported here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _catalogue(name: str, language: str) -> dict[str, str]:
    """What lessonkit.base.words knows; the page has the messages that it may need, of all catalogues in one file."""
    if not _catalogues:
        _catalogues.update(json.loads((COURSE / "words.json").read_text()))
    found: dict[str, str] = _catalogues.get(language, {})
    return found


_catalogues: dict[str, dict[str, str]] = {}


def _graded(source: Any, answer: str, *, seed: int) -> Any:
    """In this process: the page ends its worker if an answer does not end."""
    from dataclasses import replace

    from lessonkit.exercise import grade
    from lessonkit.exercise.source import Source

    source = Source(source.path)
    verdict = grade.grade_and_compile(source, answer, seed=seed)
    if verdict.right or not grade.is_own(source, answer, verdict, seed):
        return verdict
    mistake = grade.recognised(source, verdict, seed, within=grade.PATIENCE)
    return replace(verdict, mistake=mistake, is_own=True)


def answer(request: str, kept: str) -> str:
    """The answer to a request, and what the page is to keep: the learner's files, by name. All are JSON."""
    from lessonkit.web import grader

    shutil.rmtree(ANSWERS, ignore_errors=True)
    for name, text in json.loads(kept).items():
        path = ANSWERS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    printed = io.BytesIO()
    with io.TextIOWrapper(printed, write_through=True) as into, redirect_stdout(into), redirect_stderr(into):
        try:
            made = grader.answer(json.loads(request), printed)
        except Exception as error:
            made = {"error": f"{type(error).__name__}: {error}"}
    files = {path.relative_to(ANSWERS).as_posix(): path.read_text() for path in ANSWERS.rglob("*") if path.is_file()}
    return json.dumps({"answer": made, "kept": files})
