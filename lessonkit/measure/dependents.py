"""Which lessons and rows depend on a function: those whose fingerprint counts it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lessonkit.base.files import ROOT
from lessonkit.lesson import kernels
from lessonkit.measure import fingerprint, rows
from lessonkit.measure.stale import device_folders


@dataclass(frozen=True)
class Dependent:
    """A lesson whose rungs, inputs or work reach a function, and how many measured rows these have."""

    function: str  # its full name: "course_ops.hopper.ring_slot", "cuda_src.16_layernorm.block_sum"
    lesson: str
    through: tuple[str, ...]  # rungs by name; "inputs" and "work" are of all the lesson's rows
    rows: int


def dependents(name: str) -> list[Dependent]:
    """Who depends on `function`, `module.function` or `path/of/file.py:function`: on every function of that name."""
    wanted = f".{name.replace('.py:', '.').replace('.cu:', '.').replace('/', '.')}"
    found = []
    for lesson, declared in kernels():
        reached = {
            rung.__name__: fingerprint.reaches(ROOT, lesson, rung.__name__) for rung in declared.rungs
        } | fingerprint.given_reaches(ROOT, lesson)
        measured = [row for folder in device_folders() for row in rows.read(folder / f"{lesson}.csv")]
        for function in sorted({f for names in reached.values() for f in names if f".{f}".endswith(wanted)}):
            through = tuple(part for part, names in reached.items() if function in names)
            found.append(Dependent(function, lesson, through, _count(measured, through)))
    return found


def _count(measured: Iterable[rows.Row], through: Iterable[str]) -> int:
    parts = set(through)
    every = bool(parts & set(fingerprint.GIVEN))
    return sum(1 for row in measured if row.kind in ("rung", "peer") and (every or row.rung in parts))


def is_of_the_kit(name: str) -> bool:
    """Whether a name is one of lessonkit's modules or functions, which judge lessons and are in no fingerprint."""
    module = Path(*name.replace(".py", "").replace(":", ".").replace("/", ".").split("."))
    return module.parts[0] == "lessonkit" and any(
        (ROOT / place).with_suffix(".py").is_file() for place in (module, module.parent)
    )
