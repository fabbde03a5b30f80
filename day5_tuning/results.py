"""The course's rows by operator: which lessons compute the same thing, in which language, and what bounds each rung."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lessonkit import rows
from lessonkit.lesson import Lesson, kernels
from lessonkit.rows import Row

# The first pattern that a lesson's file matches names its operator; one that matches none is an operator by itself.
OPERATORS = {
    "vector add": r"vector_add", "GELU": r"gelu", "sum": r"_sum$|reduction", "argmax": r"argmax",
    "softmax backward": r"softmax_backward", "softmax": r"softmax", "layernorm backward": r"layernorm_backward",
    "layernorm": r"layernorm", "rmsnorm backward": r"rmsnorm_backward", "rmsnorm": r"rmsnorm", "dropout": r"dropout",
    "cross-entropy backward": r"cross_entropy_backward", "cross-entropy": r"cross_entropy", "scan": r"scan",
    "sort": r"sort|onesweep", "transpose": r"transpose", "quantisation": r"quantize", "fp8 matmul": r"fp8",
    "skinny matmul": r"skinny", "grouped matmul": r"grouped", "epilogue backward": r"epilogue_backward",
    "epilogue": r"epilogue", "fp32 matmul": r"matrix_multiply", "matmul": r"matmul|gluon|tiles",
    "attention backward": r"(flash|attention).*backward", "decoding": r"decoding", "attention": r"attention|flash",
}  # fmt: skip
LAUNCH_US = 8  # where even a copy of the bytes takes less, starting it is what takes the time


@dataclass(frozen=True)
class Standing:
    """A rung at one shape beside its limits."""

    row: Row
    copy_ms: float

    @property
    def intensity(self) -> float:
        """FLOPs for each byte that the op must move."""
        return self.row.tflop_per_s / self.row.tb_per_s if self.row.tb_per_s else 0.0

    @property
    def bound(self) -> str:
        """What the rung waits for: at half of a limit or more it is that limit; below, something in between."""
        if self.copy_ms and self.copy_ms * 1e3 < LAUNCH_US:
            return "launch"
        if self.row.percent_of_limit < 50:
            return "latency"
        return "compute" if self.row.limited_by_math else "memory"


def operator(lesson: str) -> str:
    stem = lesson.split(".")[-1]
    return next((op for op, pattern in OPERATORS.items() if re.search(pattern, stem)), stem)


def language(lesson: str) -> str:
    if "gluon" in lesson:
        return "Gluon"
    if "thunderkittens" in lesson:
        return "ThunderKittens"
    return "CUDA C++" if lesson.startswith("cuda_src") or lesson.endswith("tiles") else "Triton"


def measured(folder: Path) -> Iterator[tuple[str, Lesson, list[Row]]]:
    """Each kernel lesson that has rows on this machine, with those rows, in the order of the course."""
    for name, lesson in kernels():
        if found := rows.read(folder / f"{name}.csv"):
            yield name, lesson, found


def largest(found: Sequence[Row], rung: str) -> Row | None:
    """The rung's row at its largest shape."""
    return max((row for row in found if row.rung == rung), key=lambda row: row.bytes, default=None)


def standing(found: Sequence[Row], row: Row) -> Standing:
    copies = [other.ms_p50 for other in found if other.kind == "limit" and other.shape == row.shape]
    return Standing(row, min(copies, default=0.0))


def ladder(lesson: Lesson, found: Sequence[Row], shape: str) -> list[Row]:
    """The lesson's rungs at one shape, in order; those that do not take it are missing."""
    at = {row.rung: row for row in found if row.shape == shape and row.kind == "rung"}
    return [at[rung.__name__] for rung in lesson.rungs if rung.__name__ in at]
