"""The course's shared code: what a lesson declares, how it is checked, compiled, timed and reported.

A lesson imports this before triton (see lessonkit.base.device). README.md says in which groups the modules stand.
"""

from importlib import import_module
from types import ModuleType

from lessonkit.base import device  # isort: skip - first, before anything imports triton
from lessonkit.base.device import DEVICE, num_sms, shared_memory
from lessonkit.base.errors import Unsupported
from lessonkit.base.files import BY_NAME
from lessonkit.lesson import (
    About,
    Case,
    Grad,
    Lesson,
    Mutant,
    Operator,
    Prediction,
    Problem,
    Refusal,
    Steps,
    Table,
    Work,
    budget,
    case,
    discover,
    needs,
    specimen,
    stepwise,
)
from lessonkit.modes import gluon as _gluon  # noqa: F401  a launch of a Gluon kernel goes there without a GPU
from lessonkit.modes.inductor import by_inductor, by_search
from lessonkit.modes.opaque import opaque
from lessonkit.validate import FLOATS, expect, runs_on, tma_takes

from lessonkit import cuda  # isort: skip - it uses what is above

__all__ = [
    "DEVICE",
    "FLOATS",
    "About",
    "Case",
    "Grad",
    "Lesson",
    "Mutant",
    "Operator",
    "Prediction",
    "Problem",
    "Refusal",
    "Steps",
    "Table",
    "Unsupported",
    "Work",
    "budget",
    "by_inductor",
    "by_search",
    "case",
    "cuda",
    "device",
    "discover",
    "expect",
    "needs",
    "num_sms",
    "opaque",
    "runs_on",
    "shared_memory",
    "specimen",
    "stepwise",
    "tma_takes",
]


def __getattr__(name: str) -> ModuleType:
    if name not in BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{BY_NAME[name]}.{name}")
