"""What the answers of quizzes are computed from: what lessons count, stored rows, a card's data sheet, PyTorch."""

import ast
import contextlib
import io
from collections.abc import Mapping
from functools import cache
from typing import Any

from lessonkit.base import chips
from lessonkit.base.errors import Misdeclared
from lessonkit.base.files import REPORTS
from lessonkit.lesson import Lesson, discover
from lessonkit.measure import rows
from lessonkit.measure.rows import MACHINE


def compute(expression: str, code: str, given: Mapping[str, Any]) -> Any:
    """The value of an expression, after `code` has run. `given`: its names beside those of NAMES."""
    names: dict[str, Any] = {**NAMES, **given}
    if "torch" in expression or code:
        import torch

        names["torch"] = torch
    if code:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, "shown", "exec"), names)
    return eval(compile(ast.parse(expression.strip(), mode="eval"), "fact", "eval"), names)


def ms(lesson: str, rung: str, shape: str) -> float:
    """The stored time of an H200. Raises Misdeclared if there is none."""
    for row in rows.read(REPORTS / MACHINE / f"{lesson}.csv"):
        if (row.rung, row.shape) == (rung, shape):
            return row.ms_p50
    raise Misdeclared(f"{lesson} has no row of {rung} at {shape} on {MACHINE}: name one that is stored")


@cache
def _lesson(name: str) -> Lesson:
    ((_, found),) = discover(name)
    if not isinstance(found, Lesson):
        raise Misdeclared(f"{name} has no rungs")
    return found


def moved(lesson: str, rung: str) -> float:
    """The bytes that a rung moves over the least, which the tests count in the interpreter."""
    return next(times for each, times in _lesson(lesson).passes.items() if each.__name__ == rung)


def counted(lesson: str, rung: str, what: str) -> float:
    """What the tests count of a rung's accesses in the emulator: sectors a request, wavefronts."""
    return next(counts[what] for each, counts in _lesson(lesson).counts.items() if each.__name__ == rung)


def least_bytes(lesson: str, **shape: Any) -> int:
    found = _lesson(lesson)
    return found.work(dtype=found.bench_dtype, **shape).bytes


NAMES: dict[str, Any] = {
    "cdiv": lambda a, b: -(-a // b),
    "h200": chips.CHIPS["h200"],
    "ms": ms,
    "moved": moved,
    "counted": counted,
    "least_bytes": least_bytes,
}
