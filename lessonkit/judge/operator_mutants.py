"""Mutants of the operators that are shipped: a copy of course_ops with one change, in a process of its own.

tests/operators/softmax.py declares what is asked of course_ops/kernels/softmax.py, as lessons do, and its mutants.
Importing an operator registers it once and for all. So each copy is imported in a process of its own, forked from one
that has imported PyTorch and Triton. There Triton interprets, on a machine with a GPU too.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lessonkit.base.files import ROOT, environment
from lessonkit.judge import check, mutants
from lessonkit.judge.apart import Verdict
from lessonkit.lesson import Lesson, Mutant

import torch

PACKAGE = "course_ops"
SECONDS = 20  # of a core, not of a clock, for one case: a kernel that takes longer waits for what never comes
VERDICT = "verdict.json"


def declared(module: str) -> dict[str, Lesson]:
    """What a module of tests/operators asks of an operator, by name: FORWARD, BACKWARD."""
    return {key: value for key, value in vars(import_module(module)).items() if isinstance(value, Lesson)}


def verdicts(module: str) -> dict[tuple[str, str], Verdict]:
    """The verdict on each mutant that the module declares, by (name of the declaration, the mutant's `why`).

    Raises Misdeclared if a mutant's line is not in the operator's files, RuntimeError if the judging process fails.
    """
    with TemporaryDirectory() as folder:
        asked, names = [], []
        for key, operator in declared(module).items():
            for i, mutant in enumerate(operator.wrong):
                place = Path(folder, f"{key}{i}")
                write(place, module, mutant)
                asked.append([str(place), module, key, i])
                names.append((key, mutant.why))
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(asked),
            env=environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"the mutants of {module} were not judged:\n{done.stderr[-2000:]}")
        return dict(zip(names, (Verdict(**said) for said in json.loads(done.stdout)), strict=True))


def write(place: Path, module: str, mutant: Mutant) -> None:
    """Copy course_ops into the folder `place`, with the mutant's one change."""
    shutil.copytree(ROOT / PACKAGE, place / PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "*.md"))
    before = tuple((path, path.read_text()) for path in sorted(ROOT.glob(f"{PACKAGE}/kernels/*.py")))
    for path, text in mutants.changed(before, module, mutant).items():
        (place / path.relative_to(ROOT)).write_text(text)


# ---- In the process that judges -------------------------------------------------------------------------------------


def _judge_all(asked: list[list[Any]]) -> list[dict[str, str]]:
    for name in ("triton.language", "lessonkit"):  # once, for all the processes that are forked from here
        import_module(name)
    check.answer(torch.empty_like, (torch.empty(1),))  # and what PyTorch imports when it fills an empty tensor
    return [_judge_in_fork(*each) for each in asked]


def _judge_in_fork(place: str, module: str, key: str, i: int) -> dict[str, str]:
    """The fields of a Verdict. caught_by is also "error": what the copy or the process says that is no rejection."""
    child = os.fork()
    if child == 0:
        try:
            verdict = _judge(place, module, key, i)
        except BaseException as error:
            verdict = Verdict("error", said=f"{type(error).__name__}: {error}")
        try:
            Path(place, VERDICT).write_text(json.dumps(asdict(verdict)))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        ended = os.WTERMSIG(status)
        hangs = ended == signal.SIGVTALRM
        verdict = Verdict("hang", said=f"{SECONDS} s") if hangs else Verdict("error", said=signal.Signals(ended).name)
        return asdict(verdict)
    said: dict[str, str] = json.loads(Path(place, VERDICT).read_text())
    return said


def _judge(place: str, module: str, key: str, i: int) -> Verdict:
    sys.path.insert(0, place)
    operator = declared(module)[key]
    assert str(import_module(PACKAGE).__file__).startswith(place), "course_ops was imported before its copy"
    (rung,) = operator.rungs
    return Verdict.of(mutants.first_rejection(operator, _limited(rung)))


def _limited(rung: Callable[..., Any]) -> Callable[..., Any]:
    """The rung; the process ends where one call of it takes longer than SECONDS of a core."""

    @wraps(rung)
    def limited(*args: Any) -> Any:
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        try:
            return rung(*args)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    return limited


if __name__ == "__main__":
    print(json.dumps(_judge_all(json.load(sys.stdin))))
