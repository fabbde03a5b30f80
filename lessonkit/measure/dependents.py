"""Which lessons, operators and rows depend on a function: those whose fingerprint counts it."""

import ast
import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lessonkit.base.cpp_text import definitions
from lessonkit.base.files import ROOT
from lessonkit.base.words import later
from lessonkit.lesson import kernels
from lessonkit.measure import fingerprint, operator_cases, operator_rows, rows
from lessonkit.measure.stale import device_folders

ROOMS = ("course_ops", "problems", "workloads", "day*_*", "cuda_src")
PUBLIC = later("the public function: its checks are not timed")


@dataclass(frozen=True)
class Dependent:
    """A lesson or operator that reaches a function, and which of its measured rows do."""

    function: str  # its full name: "course_ops.hopper.ring_slot", "cuda_src.16_layernorm.block_sum"
    lesson: str  # in full; of an operator "course_ops.softmax"
    through: tuple[str, ...]  # rungs or directions by name; "inputs" and "work" are of all the lesson's rows
    measured: frozenset[int]  # places among the lesson's rows

    @property
    def rows(self) -> int:
        return len(self.measured)

    @property
    def is_operator(self) -> bool:
        return operator_cases.is_operator(self.lesson)


def dependents(name: str) -> list[Dependent]:
    """Who depends on `function`, `module.function` or `path/of/file.py:function`: on every function of that name."""
    wanted = f".{name.replace('.py:', '.').replace('.cu:', '.').replace('/', '.')}"
    found = []
    for lesson, reached, measured in [*_lessons(), *_operators()]:
        for function in sorted({f for names in reached.values() for f in names if f".{f}".endswith(wanted)}):
            through = tuple(part for part, names in reached.items() if function in names)
            found.append(Dependent(function, lesson, through, _of(measured, through)))
    return found


Reached = tuple[str, dict[str, frozenset[str]], list[str]]  # name; part -> what it reaches; the part of each row


def _lessons() -> Iterator[Reached]:
    for lesson, declared in kernels():
        reached = {
            rung.__name__: fingerprint.reaches(ROOT, lesson, rung.__name__) for rung in declared.rungs
        } | fingerprint.given_reaches(ROOT, lesson)
        measured = [row for folder in device_folders() for row in rows.read(folder / f"{lesson}.csv")]
        yield lesson, reached, [row.rung for row in measured if row.kind in ("rung", "peer")]


def _operators() -> Iterator[Reached]:
    """Each public function of course_ops: a call, inputs and work may be of several entries with rows of their own."""
    measured = [row for folder in device_folders() for row in operator_rows.read(folder / operator_rows.FILE)]
    for name in dict.fromkeys(op.name for op in operator_rows.operators()):
        reached = dict[str, frozenset[str]]()
        for nth, op in enumerate(operator_rows.operators()):
            if op.name == name:
                for part, names in operator_rows.reaches(nth).items():
                    reached[part] = reached.get(part, frozenset()) | names
        timed = {each for names in reached.values() for each in names}
        reached[PUBLIC] = fingerprint.reaches(ROOT, f"course_ops.{name}", name) - timed
        yield f"course_ops.{name}", reached, [row.direction for row in measured if row.operator == name]


def _of(measured: Iterable[str], through: Iterable[str]) -> frozenset[int]:
    parts = set(through)
    every = bool(parts & set(fingerprint.GIVEN))
    return frozenset(nth for nth, part in enumerate(measured) if every or part in parts)


def all_rows(found: Iterable[Dependent]) -> int:
    """How many rows depend on these functions: a row that two of them reach counts once."""
    return len({(each.lesson, nth) for each in found for nth in each.measured})


def defined(name: str) -> list[Path]:
    """The files of lessons, problems, operators and workloads that define a function or class of this name."""
    last = re.split(r"[.:/]", name)[-1]
    python = re.compile(rf"^\s*(def|class) {re.escape(last)}\b", re.MULTILINE)
    files = [path.relative_to(ROOT) for room in ROOMS for path in sorted(ROOT.glob(f"{room}/**/*.*"))]
    return [
        path
        for path in files
        if (path.suffix == ".py" and python.search((ROOT / path).read_text()))
        or (path.suffix in (".cu", ".cuh") and last in {d.name for d in definitions((ROOT / path).read_text())})
    ]


def functions_of(module: str) -> list[str]:
    """The functions at the top of a module, named as a module or a file, of one of the rooms; none if it is no such."""
    parts = re.split(r"[./]", module.removesuffix(".py"))
    path = ROOT.joinpath(*parts).with_suffix(".py")
    if not path.is_file() or not any(Path(parts[0]).match(room) for room in ROOMS):
        return []
    return [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]


def closest(name: str) -> list[str]:
    """The three names most like this one, of all that lessons and operators reach."""
    known = {f for _, reached, _ in (*_lessons(), *_operators()) for names in reached.values() for f in names}
    last = re.split(r"[.:/]", name)[-1]
    return difflib.get_close_matches(last, {f.rpartition(".")[2] for f in known}, 3)


def is_of_the_kit(name: str) -> bool:
    """Whether a name is one of lessonkit's modules or functions, which judge lessons and are in no fingerprint."""
    module = Path(*name.replace(".py", "").replace(":", ".").replace("/", ".").split("."))
    return module.parts[0] == "lessonkit" and any(
        (ROOT / place).with_suffix(".py").is_file() for place in (module, module.parent)
    )
