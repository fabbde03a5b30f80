"""A program in a process of its own, with a time limit: what it prints, and nothing that it started is left running."""

import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from lessonkit.base.files import ROOT


def output(command: Sequence[str], seconds: float, **env: str) -> tuple[int, str, str]:
    """Exit code (124 if it took too long), stdout and stderr of a program, which is ended with all that it started."""
    given = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    with subprocess.Popen(command, env=given, cwd=ROOT, start_new_session=True, **pipes) as running:
        try:
            out, err = running.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            out, err = running.communicate()
            return 124, out, f"{err}\nended after {seconds:.0f} s"
        return running.returncode, out, err
