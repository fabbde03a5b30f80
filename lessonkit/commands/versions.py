"""Every pair of PyTorch and Triton that the course runs on: its environment, what compiles there, what checks pass.

Run as a module inside such an environment, this prints what `tried` asks for: a line of JSON for each row.

Triton 3.10 will switch fused multiply-add off by default. Its results may then differ in the last bit, and its kernels
may be slower, so a pair with Triton 3.10 also needs its rows measured anew.
"""

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from lessonkit.base import chips, eviction, files
from lessonkit.base.files import CACHE, REPORTS, ROOT, environment
from lessonkit.base.tables import read_csv, to_csv
from lessonkit.base.words import said
from lessonkit.judge import verdicts, verify
from lessonkit.lesson import Broken, Lesson, discover
from lessonkit.modes import compiled
from lessonkit.pages.targets import CONSTRAINED, INTERPRETED, NO_ROOM, NO_WHEEL, NOT_TRIED, SILENT

Pair = tuple[str, str]  # PyTorch, Triton

# The Triton that each PyTorch asks for, and the newest Triton with the PyTorch before its own.
PAIRS: tuple[Pair, ...] = (
    ("2.10.0", "3.6.0"),
    ("2.11.0", "3.6.0"),
    ("2.12.1", "3.7.1"),
    ("2.13.0", "3.7.1"),
    ("2.14.1", "3.8.0"),
    ("2.14.1", "3.9.0"),
    ("2.15.0", "3.9.0"),
)
OWN = dict(reversed(PAIRS))
# Triton 3.6's interpreter takes an array of one element for a number; NumPy 2.4 no longer does.
ALSO = {"3.6.0": ("numpy<2.4",)}
GIB = 7  # what an environment takes with PyTorch for CUDA
TABLE = REPORTS / "versions.csv"
CHECKS = ("rung", "holds", "gradients")


class NotInstalled(RuntimeError):
    """An environment could not be made; the text says why in one line."""


class Failed(RuntimeError):
    """What ran in an environment did not come to its end."""


@dataclass(frozen=True)
class Tried:
    """What a pair makes of the course. passed, failed: kernels for a target, or checks without a GPU.

    without: rungs that the target does not get, for a reason that is known. why: for a pair that was not tried.
    """

    torch: str
    triton: str
    target: str
    passed: int
    without: int
    failed: int
    why: str = ""


def label(pair: Pair) -> str:
    return said("torch {torch} with Triton {triton}").format(torch=pair[0], triton=pair[1])


def here() -> Pair:
    """The pair that this process runs on; empty names where one of the two is not installed."""
    return _installed("torch"), _installed("triton")


def _installed(name: str) -> str:
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def python(torch: str) -> Path:
    """The interpreter of PyTorch with its own Triton: an environment in the cache, made if need be.

    Raises NotInstalled.
    """
    files.need_private(CACHE / "versions")
    folder = CACHE / "versions" / f"torch-{torch}"
    executable = folder / "bin" / "python"
    others = [need for need in _needs() if need.split(">")[0] not in ("torch", "triton")]
    wanted = [f"torch=={torch}", f"triton=={OWN[torch]}", *others, *ALSO.get(OWN[torch], ())]
    if not _is_there(folder, wanted):
        free = shutil.disk_usage(CACHE).free / 2**30
        if free < GIB:
            raise NotInstalled(NO_ROOM.format(needed=GIB, free=f"{free:.1f}"))
        venv.create(folder, clear=True, with_pip=True)
        _install(folder, executable, wanted)
    eviction.used(folder)
    return executable


def overlay(triton: str) -> Path:
    """A folder with this Triton alone, made in the cache if it is not there. Raises NotInstalled."""
    files.need_private(CACHE / "versions")
    folder = CACHE / "versions" / f"triton-{triton}"
    wanted = [f"triton=={triton}"]
    if not _is_there(folder, wanted):
        shutil.rmtree(folder, ignore_errors=True)
        _install(folder, Path(sys.executable), wanted, "--no-deps", "--target", str(folder))
    eviction.used(folder)
    return folder


def _is_there(folder: Path, wanted: Sequence[str]) -> bool:
    done = folder / "installed.txt"
    return done.exists() and done.read_text() == "\n".join(wanted)


def _install(folder: Path, executable: Path, wanted: Sequence[str], *options: str) -> None:
    pip = [str(executable), "-m", "pip", "install", "--progress-bar=off", "--no-compile", *options, *wanted]
    # Without --quiet, as pip names the requirements that contradict each other among what it does.
    ended = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        shutil.rmtree(folder, ignore_errors=True)  # gigabytes, perhaps
        raise NotInstalled(reason(ended.stdout))
    files.write_atomically(folder / "installed.txt", "\n".join(wanted))


def reason(said: str) -> str:
    """Why pip did not install: its own words in one line, without addresses."""
    if cap := re.search(r"requested \(constraint\) (torch|triton)\s*([<>=!~]+\s*[\w.]+)", said):
        return CONSTRAINED.format(bound=f"{cap[1]}{cap[2]}")
    if "No matching distribution" in said:
        return NO_WHEEL
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or [SILENT]
    return re.sub(r"\S+://\S+", "...", errors[-1])[:200]


def _needs() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [need.partition(";")[0].strip() for need in project["dependencies"]]


def _process(pair: Pair) -> tuple[Path, dict[str, str]]:
    """The interpreter that runs a pair, and its environment. The running one if it is the pair. Raises NotInstalled."""
    torch, triton = pair
    settings = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if pair == here():
        return Path(sys.executable), environment(**settings)
    executable = python(torch)
    # What was found is kept for each pair, since it may depend on both; machine code for each Triton.
    own = CACHE / "versions" / f"torch-{torch}-triton-{triton}"
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    code = CACHE / "versions" / f"kernels-{triton}"
    for folder in (own, code):
        eviction.used(folder)
    settings["COURSE_CACHE"] = str(own)
    if triton != here()[1]:  # the running Triton's machine code lies where it always does
        settings["TRITON_CACHE_DIR"] = str(code)
    env = environment(**settings)
    if triton != OWN[torch]:
        env["PYTHONPATH"] += f"{os.pathsep}{overlay(triton)}"
    return executable, env


def tried(pair: Pair, which: str, targets: Sequence[chips.Target], checks: bool) -> Iterator[tuple[Tried, list[str]]]:
    """Run the checks of the lessons chosen with a pair, compile them for the targets: each row, and what failed of it.

    Raises NotInstalled, or Failed after the rows that were found.
    """
    asked = json.dumps([which, list(targets), checks])
    executable, env = _process(pair)
    command = [str(executable), "-m", __name__, asked]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT) as running,
    ):
        assert running.stdout
        for line in running.stdout:
            row, words = json.loads(line)
            if (row["torch"], row["triton"]) != pair:
                raise Failed(f"its environment has {label((row['torch'], row['triton']))}")
            yield Tried(**row), words
        if running.wait():
            errors.seek(0)
            raise Failed(errors.read()[-1500:])


def save(rows: Iterable[Tried]) -> None:
    """Put rows in the table, in place of those of the same versions and target.

    A pair that was tried, now or before, has no row that says why it was not.
    """
    with files.changing(TABLE):
        _save(rows)


def _save(rows: Iterable[Tried]) -> None:
    at = {(row.torch, row.triton, row.target): asdict(row) for row in rows}
    kept = [row | {"why": row.get("why", "")} for row in read_csv(TABLE)]
    kept = [row for row in kept if (row["torch"], row["triton"], row["target"]) not in at]
    every: list[dict[str, Any]] = [*kept, *at.values()]
    known = {(row["torch"], row["triton"]) for row in every if row["target"] != NOT_TRIED}
    every = [row for row in every if row["target"] != NOT_TRIED or (row["torch"], row["triton"]) not in known]
    order = [*map(str, chips.TARGETS), INTERPRETED, NOT_TRIED]
    every.sort(key=lambda row: (_number(row["torch"]), _number(row["triton"]), order.index(row["target"])))
    files.write_atomically(TABLE, to_csv(every))


def not_tried(pair: Pair, why: str) -> Tried:
    return Tried(*pair, NOT_TRIED, 0, 0, 0, " ".join(why.split()))


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


# ---- Inside an environment ------------------------------------------------------------------------------------------


def _here(which: str, targets: Sequence[chips.Target], checks: bool) -> Iterator[tuple[Tried, list[str]]]:
    pair = here()
    found = dict(discover(which))
    broken = [f"{name}: cannot be imported: {each.error}" for name, each in found.items() if isinstance(each, Broken)]
    chosen = {name: each for name, each in found.items() if isinstance(each, Lesson) and not each.extension}
    if checks:
        yield _checked(pair, list(chosen), broken)
    # The operators first, for they take longest: the others then fill what is left of each core's time.
    names = [compiled.COURSE_OPS] * (not which) + [*chosen]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        counts = [(target, [(name, pool.submit(compiled.count, name, target)) for name in names]) for target in targets]
        for target, counting in counts:
            yield _compiled(pair, target, counting, broken)


def _compiled(
    pair: Pair, target: chips.Target, counting: Iterable[tuple[str, Future[compiled.Count]]], broken: list[str]
) -> tuple[Tried, list[str]]:
    passed, without, words = 0, 0, list(broken)
    for name, future in counting:
        try:
            count = future.result()
        except RuntimeError as why:
            words.append(f"{name} for {chips.label(target)}: {str(why)[-300:]}")
        else:
            passed, without = passed + count.kernels, without + count.unfit
            words += [f"{name}: {line}" for line in count.failed]
    return Tried(*pair, str(target), passed, without, len(words)), words


def _checked(pair: Pair, names: Sequence[str], broken: list[str]) -> tuple[Tried, list[str]]:
    """The checks of these lessons by a process a core. Each is forked from this one, which has imported them."""
    passed, without, words = 0, 0, list(broken)
    verdicts.tools()  # once, for all
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=fork) as pool:
        for ok, left_out, said in pool.map(_answers, names):
            passed, without, words = passed + ok, without + left_out, words + said
    return Tried(*pair, INTERPRETED, passed, without, len(words)), words


def _answers(name: str) -> tuple[int, int, list[str]]:
    """How many checks of a lesson passed and were left out, and what is wrong. A pass is kept, as the suite's are."""
    passed, without, words = 0, 0, list[str]()
    for question in verify.questions(name, import_module(name).LESSON):
        if question.kind not in CHECKS or question.tier != verify.PUSH:
            continue
        key = verdicts.key(f"{__name__} {question}", [ROOT / f"{name.replace('.', '/')}.py", Path(verify.__file__)])
        if verdicts.find(key):
            passed += 1
            continue
        try:
            with verdicts.watching() as read:
                question.ask()
        except verify.LeftOut:
            without += 1
        except Exception as why:
            words.append(f"{question}: {str(why)[:300]}")
        else:
            passed += 1
            verdicts.keep(key, str(question), read)
    return passed, without, words


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a lesson prints is no answer
    asked: list[Any] = json.loads(sys.argv[1])
    for row, words in _here(*asked):
        print(json.dumps([asdict(row), words]), file=answers, flush=True)
