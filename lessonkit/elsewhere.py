"""Ask a process whose lane is `compiled`: there tensors have shapes but no data, and a launch only compiles.

Whether a process interprets is settled when it imports Triton, so one that does cannot compile, and asks another.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any


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


class _Compiler:
    """The process of the `compiled` lane. It stays for the next lesson: PyTorch is imported once, not for each."""

    def __init__(self) -> None:
        env = environment(LESSONKIT_LANE="compiled", CUDA_VISIBLE_DEVICES="")
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        command = [sys.executable, "-m", "lessonkit.elsewhere"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.errors, text=True, env=env)

    def call(self, module: str, function: str, args: Sequence[Any]) -> Any:
        """The function's answer. RuntimeError with the compiler's last words, which may have ended it."""
        ask, answer = self.process.stdin, self.process.stdout
        assert ask is not None
        assert answer is not None
        with suppress(BrokenPipeError):
            print(json.dumps([module, function, args]), file=ask, flush=True)
        if line := answer.readline():
            said, failed = json.loads(line)
            if failed:
                raise RuntimeError(f"in {module}.{function}:\n{failed[-2000:]}")
            return said
        self.process.wait()
        _compiler.cache_clear()
        self.errors.seek(0)
        raise RuntimeError(f"{module}.{function} ended the compiler:\n{self.errors.read()[-2000:]}")


@cache
def _compiler(thread: int) -> _Compiler:
    return _Compiler()


def _serve() -> None:
    """Answer each line of a function and its arguments with a line of what it says, and of what went wrong."""
    answers, sys.stdout = sys.stdout, sys.stderr  # a lesson may print
    for line in sys.stdin:
        module, function, args = json.loads(line)
        try:
            said = getattr(import_module(module), function)(*args), ""
        except Exception:
            said = None, traceback.format_exc()
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
