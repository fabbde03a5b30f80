"""Ask a process whose mode is `compiled`: there tensors have shapes but no data, and a launch only compiles.

Whether a process interprets is settled when it imports Triton, so one that does cannot compile, and asks another.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from lessonkit.base.files import environment
from lessonkit.cuda import toolchain

SHARED = "LESSONKIT_COMPILER"  # where a process that outlives this one listens


def call_in_compiler(module: str, function: str, *args: Any) -> Any:
    """What module.function(*args) answers there; arguments and answer travel as JSON.

    Threads that ask at the same time have a process each. Raises RuntimeError with the traceback from there, or with
    the last words of a process that did not survive it; the next to ask then starts another. Raises Missing where
    Triton has no compiler.
    """
    toolchain.need("Triton")
    own = None if SHARED in os.environ else _idle_compiler()
    address = own.address if own else os.environ[SHARED]
    try:
        with Client(address) as line:
            line.send_bytes(json.dumps([module, function, args]).encode())
            said, failed = json.loads(line.recv_bytes())
    except (OSError, EOFError):
        os.environ.pop(SHARED, None)
        errors = Path(address + ERRORS)
        failed = errors.read_text() if errors.exists() else "its owner has ended it"
        raise RuntimeError(f"{module}.{function} ended the compiler:\n{failed[-2000:]}") from None
    if own:
        _idle.append(own)
    if failed:
        raise RuntimeError(f"in {module}.{function}:\n{failed[-2000:]}")
    return said


class Compiler:
    """A process of the `compiled` mode, until this one ends. PyTorch is imported once, not for each lesson."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.address = f"{self.folder.name}/socket"
        env = environment(LESSONKIT_MODE="compiled", CUDA_VISIBLE_DEVICES="")
        # It listens from the start, though it imports PyTorch first: nobody waits for it to appear, or for the dead.
        with socket.socket(socket.AF_UNIX) as at, open(self.address + ERRORS, "w") as errors:
            at.bind(self.address)
            at.listen()
            command = [sys.executable, "-m", "lessonkit.modes.compile_server", str(at.fileno())]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=errors, stderr=errors, env=env, pass_fds=[at.fileno()]
            )


ERRORS = ".errors"  # beside the socket
_idle: list[Compiler] = []


def _idle_compiler() -> Compiler:
    try:
        return _idle.pop()
    except IndexError:
        return Compiler()


def _serve(listening: socket.socket) -> None:
    """Answer whoever connects, with what a function says and what went wrong, until stdin ends with its owner."""

    def follow() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=follow, daemon=True).start()
    while True:
        with Connection(listening.accept()[0].detach()) as line, suppress(EOFError, BrokenPipeError):
            module, function, args = json.loads(line.recv_bytes())
            try:
                said = getattr(import_module(module), function)(*args), ""
            except Exception:
                said = None, traceback.format_exc()
            line.send_bytes(json.dumps(said).encode())


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
