"""Every pair of PyTorch and Triton that the course runs on: its environment, what compiles there, what checks pass.

Run as a module inside such an environment, this prints what `tried` asks for, as JSON.
"""

import json
import subprocess
import sys
import tomllib
import venv
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lessonkit.base import chips, eviction, files
from lessonkit.base.files import CACHE, REPORTS, ROOT, environment
from lessonkit.base.tables import read_csv, to_csv
from lessonkit.judge import verify
from lessonkit.lesson import kernels
from lessonkit.modes import compiled
from lessonkit.pages.targets import INTERPRETED

PAIRS = {
    "2.10.0": "3.6.0",
    "2.11.0": "3.6.0",
    "2.12.1": "3.7.0",
    "2.13.0": "3.7.1",
    "2.14.1": "3.8.0",
    "2.15.0": "3.9.0",
}
TABLE = REPORTS / "versions.csv"
CHECKS = ("rung", "holds", "gradients")


class Failed(RuntimeError):
    """An environment could not be made, or what ran in it did not come to its end."""


@dataclass(frozen=True)
class Tried:
    """What a pair makes of the course. passed, failed: kernels for a target, or checks without a GPU.

    without: rungs that the target does not get, for a reason that is known.
    """

    torch: str
    triton: str
    target: str
    passed: int
    without: int
    failed: int


def python(torch: str) -> Path:
    """The interpreter of a pair's environment, which is made in the cache if it is not there. Raises Failed."""
    folder = CACHE / "versions" / f"torch-{torch}-triton-{PAIRS[torch]}"
    done, executable = folder / "installed.txt", folder / "bin" / "python"
    others = [need for need in _needs() if need.split(">")[0] not in ("torch", "triton")]
    wanted = "\n".join([f"torch=={torch}", f"triton=={PAIRS[torch]}", *others])
    if not (done.exists() and done.read_text() == wanted):
        venv.create(folder, clear=True, with_pip=True)
        pip = [str(executable), "-m", "pip", "install", "--quiet", "--no-compile", *wanted.split("\n")]
        ended = subprocess.run(pip, stderr=subprocess.PIPE, text=True)
        if ended.returncode:
            raise Failed(f"torch {torch} with Triton {PAIRS[torch]} cannot be installed: {ended.stderr[-500:]}")
        files.write_atomically(done, wanted)
    eviction.used(folder)
    return executable


def _needs() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [need.partition(";")[0].strip() for need in project["dependencies"]]


def tried(torch: str, which: str, targets: Sequence[chips.Target], checks: bool) -> tuple[list[Tried], list[str]]:
    """Compile the lessons chosen for the targets and run their checks with a pair; its rows, and what failed."""
    asked = json.dumps([which, list(targets), checks])
    env = environment(CUDA_VISIBLE_DEVICES="", TRITON_CACHE_DIR=str(CACHE / "versions" / f"kernels-{PAIRS[torch]}"))
    ended = subprocess.run([python(torch), "-m", __name__, asked], env=env, capture_output=True, text=True, cwd=ROOT)
    try:
        rows, words = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise Failed(f"torch {torch} with Triton {PAIRS[torch]}: {ended.stderr[-1500:]}") from None
    return [Tried(**row) for row in rows], words


def save(rows: Iterable[Tried]) -> None:
    """Put rows in the table, in place of those of the same versions and target."""
    at = {(row.torch, row.triton, row.target): asdict(row) for row in rows}
    kept = [row for row in read_csv(TABLE) if (row["torch"], row["triton"], row["target"]) not in at]
    order = [*map(str, chips.TARGETS), INTERPRETED]
    every = sorted([*kept, *at.values()], key=lambda row: (_number(row["torch"]), order.index(row["target"])))
    files.write_atomically(TABLE, to_csv(every))


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _here(which: str, targets: Sequence[chips.Target], checks: bool) -> tuple[list[Tried], list[str]]:
    import torch
    import triton

    pair = torch.__version__.partition("+")[0], triton.__version__
    chosen = [(name, lesson) for name, lesson in kernels(which) if not lesson.extension]
    names = [name for name, _ in chosen] + [compiled.COURSE_OPS] * (not which)
    compiled.compile_ahead(names, targets)
    rows, words = [], list[str]()
    for target in targets:
        count: Counter[str] = Counter()
        for name in names:
            try:
                found = compiled.outcome(name, target)
            except RuntimeError as why:
                said = [f"{name} for {chips.label(target)}: {str(why)[-300:]}"]
            else:
                count.update(passed=len(found.kernels), without=len(found.unfit))
                said = [f"{name}: {line}" for line in found.failed]
            count["failed"] += len(said)
            words += said
        rows.append(Tried(*pair, str(target), count["passed"], count["without"], count["failed"]))
    if checks:
        count = Counter()
        questions = [q for name, lesson in chosen for q in verify.questions(name, lesson)]
        for question in (q for q in questions if q.kind in CHECKS and q.tier == verify.PUSH):
            try:
                question.ask()
                count["passed"] += 1
            except verify.LeftOut:
                count["without"] += 1
            except Exception as why:
                count["failed"] += 1
                words.append(f"{question}: {str(why)[:300]}")
        rows.append(Tried(*pair, INTERPRETED, count["passed"], count["without"], count["failed"]))
    return rows, words


if __name__ == "__main__":
    asked: list[Any] = json.loads(sys.argv[1])
    found, said = _here(*asked)
    print(json.dumps([[asdict(row) for row in found], said]))
