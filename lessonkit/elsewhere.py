"""Ask a process whose lane is `compiled`: there tensors have shapes but no data, and a launch only compiles.

Whether a process interprets is settled when it imports Triton, so one that does cannot compile, and asks another.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

SHARED = "LESSONKIT_COMPILER"  # where a process that outlives this one listens


def elsewhere(module: str, function: str, *args: Any) -> Any:
    """What module.function(*args) answers there; arguments and answer travel as JSON.

    Each thread that asks has a process of its own. Raises RuntimeError with the traceback from there.
    """
    return _compiler(threading.get_ident()).call(module, function, args)


def environment(**more: str) -> dict[str, str]:
    """For a process that settles for itself whether it interprets, and finds this course from any folder."""
    from lessonkit.lesson import ROOT

    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))} | more


class Compiler:
    """A process of the `compiled` lane, until this one ends. PyTorch is imported once, not for each lesson."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.address = f"{self.folder.name}/socket"
        env = environment(LESSONKIT_LANE="compiled", CUDA_VISIBLE_DEVICES="")
        command = [sys.executable, "-m", "lessonkit.elsewhere", self.address]
        with open(_errors(self.address), "w") as errors:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=errors, stderr=errors, env=env)


class _Asking:
    """A line to such a process: one of its own, or the one that it was told of."""

    def __init__(self) -> None:
        self.own = None if SHARED in os.environ else Compiler()
        self.address = self.own.address if self.own else os.environ[SHARED]
        while not Path(self.address).exists() and not (self.own and self.own.process.poll()):
            time.sleep(0.02)  # until PyTorch is imported

    def call(self, module: str, function: str, args: Sequence[Any]) -> Any:
        """The function's answer. RuntimeError with the compiler's last words, which may have ended it."""
        try:
            with Client(self.address) as line:
                line.send_bytes(json.dumps([module, function, args]).encode())
                said, failed = json.loads(line.recv_bytes())
        except (OSError, EOFError):
            _compiler.cache_clear()
            os.environ.pop(SHARED, None)  # the next who asks starts another one
            errors = Path(_errors(self.address)).read_text()
            raise RuntimeError(f"{module}.{function} ended the compiler:\n{errors[-2000:]}") from None
        if failed:
            raise RuntimeError(f"in {module}.{function}:\n{failed[-2000:]}")
        return said


def _errors(address: str) -> str:
    return f"{address}.errors"


@cache
def _compiler(thread: int) -> _Asking:
    return _Asking()


def _serve(address: str) -> None:
    """Answer whoever connects, with what a function says and what went wrong, until stdin ends with its owner."""

    def follow() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=follow, daemon=True).start()
    with Listener(address, backlog=8) as listener:
        while True:
            with listener.accept() as line, suppress(EOFError, BrokenPipeError):
                module, function, args = json.loads(line.recv_bytes())
                try:
                    said = getattr(import_module(module), function)(*args), ""
                except Exception:
                    said = None, traceback.format_exc()
                line.send_bytes(json.dumps(said).encode())


if __name__ == "__main__":
    _serve(sys.argv[1])
