"""The course's shared code: what a lesson declares, how it is checked, compiled, timed and reported.

A lesson imports this before triton (see lessonkit.device).
"""

from lessonkit import device  # isort: skip - first, before anything imports triton
from lessonkit.again import again
from lessonkit.arguments import FLOATS, Unsupported, expect, tma_takes
from lessonkit.device import DEVICE, num_sms
from lessonkit.inductor import by_inductor
from lessonkit.lesson import Case, Grad, Lesson, Mutant, Refusal, Steps, Table, Work, case, discover, needs

from lessonkit import cuda  # isort: skip - it uses what is above

__all__ = [
    "DEVICE",
    "FLOATS",
    "Case",
    "Grad",
    "Lesson",
    "Mutant",
    "Refusal",
    "Steps",
    "Table",
    "Unsupported",
    "Work",
    "again",
    "by_inductor",
    "case",
    "cuda",
    "device",
    "discover",
    "expect",
    "needs",
    "num_sms",
    "tma_takes",
]
