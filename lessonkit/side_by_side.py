"""Scripts side by side, each forked from a process that has imported PyTorch: seconds of each are saved."""

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

PRELOAD = ["lessonkit.show", "lessonkit.report"]


def side_by_side(paths: Sequence[Path], at_once: int) -> Iterator[tuple[bytes, int, float]]:
    """(what it printed, exit code, seconds) of each script, in order. Not for a GPU, which survives no fork."""
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload(PRELOAD)
    began: dict[int, float] = {}
    done: dict[int, tuple[int, float]] = {}
    running: dict[int, BaseProcess] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for turn in range(len(paths)):
                while turn not in done:
                    while len(running) < at_once and len(began) < len(paths):
                        nth, began[nth] = len(began), time.monotonic()
                        running[nth] = fork.Process(target=_script, args=(str(paths[nth]), f"{folder}/{nth}"))
                        running[nth].start()
                    wait([process.sentinel for process in running.values()])
                    for nth, process in list(running.items()):
                        if process.exitcode is not None:
                            done[nth] = process.exitcode, time.monotonic() - began[nth]
                            del running[nth]
                yield Path(folder, str(turn)).read_bytes(), *done[turn]
        finally:
            for process in running.values():
                process.kill()


def _script(path: str, printed: str) -> None:
    with open(printed, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [path]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a forked process ends without
