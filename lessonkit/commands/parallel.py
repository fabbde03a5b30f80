"""Scripts side by side, forked from a process that has imported PyTorch, and compiled for by one that stays."""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lessonkit.base import device
from lessonkit.modes.compile_server import SHARED, Compiler

PRELOAD = ["lessonkit.commands.show", "lessonkit.pages.report"]


@dataclass(frozen=True)
class Ended:
    """The nth script has ended."""

    nth: int
    printed: bytes
    code: int
    seconds: float


def run_scripts(
    paths: Sequence[Path], at_once: int, began: Callable[[int], None] = lambda nth: None
) -> Generator[Ended]:
    """Run scripts, and yield each when it ends. Not for a GPU, which survives no fork.

    began: told the number of a script that starts. Closing the iterator ends what runs.
    """
    context: Any = multiprocessing.get_context("forkserver" if device.FORKS else "spawn")
    if device.FORKS:
        context.set_forkserver_preload(PRELOAD)
    compilers = [_compiler() for _ in range(min(at_once, len(paths)))]
    running: dict[int, tuple[BaseProcess, Compiler | None, float]] = {}
    todo = list(enumerate(paths))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            while todo or running:
                while compilers and todo:
                    (nth, path), compiler = todo.pop(0), compilers.pop()
                    address = compiler.address if compiler else ""
                    process = context.Process(target=_script, args=(str(path), f"{folder}/{nth}", address))
                    running[nth] = process, compiler, time.monotonic()
                    process.start()
                    began(nth)
                wait([script.sentinel for script, _, _ in running.values()])
                for nth, (script, compiler, since) in list(running.items()):
                    if script.exitcode is not None:
                        ended = compiler is None or compiler.process.poll() is not None
                        compilers.append(_compiler() if ended else compiler)
                        del running[nth]
                        printed = Path(folder, str(nth))
                        said = printed.read_bytes() if printed.exists() else b""
                        yield Ended(nth, said, script.exitcode, time.monotonic() - since)
        finally:
            for script, compiler, _ in running.values():
                _end(script)
                compilers.append(compiler)
            for compiler in filter(None, compilers):
                compiler.process.kill()


def _compiler() -> Compiler | None:
    """A process that compiles for a script, where Triton can."""
    return Compiler() if device.HAS_COMPILER else None


def _end(process: BaseProcess) -> None:
    """Kill a script and the programs that it has started."""
    if process.pid is not None:
        with suppress(ProcessLookupError, AttributeError):  # Windows has no groups of processes
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # one that has no group of its own yet
        process.join()


def _script(path: str, printed: str, compiler: str) -> None:
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # Ctrl-C is for the run, which then ends this script and what it has started
    with open(printed, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {SHARED: compiler} if compiler else {}
    sys.argv = [path]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a forked process ends without
