"""Scripts side by side, forked from a process that has imported PyTorch, and compiled for by one that stays."""

import atexit
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from lessonkit.elsewhere import SHARED, Compiler

PRELOAD = ["lessonkit.show", "lessonkit.report"]


def side_by_side(paths: Sequence[Path], at_once: int) -> Iterator[tuple[bytes, int, float]]:
    """(what it printed, exit code, seconds) of each script, in order. Not for a GPU, which survives no fork."""
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload(PRELOAD)
    compilers = [Compiler() for _ in range(min(at_once, len(paths)))]
    began: dict[int, float] = {}
    done: dict[int, tuple[int, float]] = {}
    running: dict[int, tuple[BaseProcess, Compiler]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for turn in range(len(paths)):
                while turn not in done:
                    while compilers and len(began) < len(paths):
                        nth, compiler = len(began), compilers.pop()
                        args = (str(paths[nth]), f"{folder}/{nth}", compiler.address)
                        running[nth] = fork.Process(target=_script, args=args), compiler
                        began[nth] = time.monotonic()
                        running[nth][0].start()
                    wait([process.sentinel for process, _ in running.values()])
                    for nth, (process, compiler) in list(running.items()):
                        if process.exitcode is not None:
                            done[nth] = process.exitcode, time.monotonic() - began[nth]
                            compilers.append(compiler if compiler.process.poll() is None else Compiler())
                            del running[nth]
                yield Path(folder, str(turn)).read_bytes(), *done[turn]
        finally:
            for process, compiler in running.values():
                process.kill()
                compilers.append(compiler)
            for compiler in compilers:
                compiler.process.kill()


def _script(path: str, printed: str, compiler: str) -> None:
    with open(printed, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ[SHARED] = compiler
    sys.argv = [path]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a forked process ends without
