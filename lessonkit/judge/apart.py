"""A mutant in a process of its own: one that hangs, or ends in an illegal instruction, takes nothing else with it.

`python -m lessonkit.judge.apart LESSON WHY` judges one mutant and prints the verdict as a line of JSON.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Self

from lessonkit.base.errors import Rejected
from lessonkit.base.files import environment
from lessonkit.judge import check, mutants
from lessonkit.lesson import Mutant

import torch

PATIENCE = 20.0  # seconds for a rung's kernels on the small tensors of a check; right ones take milliseconds
CALL_PATIENCE = 90.0  # seconds for one call on the host, with what it compiles: loading code waits for a hung kernel
LIMIT = 600.0  # seconds for the process, with all that it compiles


@dataclass(frozen=True)
class Verdict:
    """What the checks say of a mutant."""

    caught_by: str = ""  # the property that gave it away; "" if the checks accept it
    where: str = ""  # the case that showed it
    said: str = ""

    @classmethod
    def of(cls, found: tuple[Rejected, str] | None) -> Self:
        return cls(found[0].caught_by, found[1], str(found[0])) if found else cls()

    def is_as_declared(self, mutant: Mutant) -> bool:
        return self.caught_by in mutant.caught_by.split(" or ")


def judged(name: str, mutant: Mutant) -> Verdict:
    """The verdict on a mutant of a lesson, from a new process.

    Raises RuntimeError with the end of what the process printed if it could not judge, as when the mutant does not
    compile.
    """
    command = [sys.executable, "-m", "lessonkit.judge.apart", name, mutant.why]
    try:
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return Verdict("hang", "", f"its process did not end in {LIMIT:g} s")
    if done.returncode < 0:
        return Verdict("fault", "", f"its process was ended by signal {-done.returncode}")
    if done.returncode:
        raise RuntimeError(f"{name}: the mutant {mutant.why!r} could not be judged: {done.stderr.strip()[-1000:]}")
    return Verdict(**json.loads(done.stdout.splitlines()[-1]))


def within(seconds: float, done: Callable[[], bool]) -> Callable[[], None]:
    """A wait that asks until it is done. Raises Rejected("hang") after so many seconds."""

    def wait() -> None:
        begun = time.monotonic()
        while not done():
            if time.monotonic() - begun > seconds:
                raise Rejected("hang", f"the kernel did not end in {seconds:g} s")
            time.sleep(0.001)

    return wait


class Watch:
    """Calls `late` if nobody calls `again` for so many seconds: the host itself may be stuck behind a hung kernel."""

    def __init__(self, seconds: float, late: Callable[[], None]) -> None:
        self.seconds, self.late = seconds, late
        self.again()

    def again(self) -> None:
        self.stop()
        self._timer = threading.Timer(self.seconds, self.late)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        if hasattr(self, "_timer"):
            self._timer.cancel()


def _end(verdict: Verdict) -> None:
    print(json.dumps(asdict(verdict)), flush=True)
    os._exit(0)  # an orderly end would wait for a kernel that hangs


def main(name: str, why: str) -> None:
    lesson = import_module(name).LESSON
    mutant = next(each for each in lesson.wrong if each.why == why)
    stuck = Verdict("hang", "", f"a call did not return to the host in {CALL_PATIENCE:g} s")
    watch = Watch(CALL_PATIENCE, lambda: _end(stuck))
    ended = within(PATIENCE, lambda: torch.cuda.current_stream().query())

    def finish() -> None:
        ended()
        watch.again()

    check.finish = finish
    verdict = Verdict.of(mutants.first_rejection(lesson, mutants.build(name, mutant)))
    watch.stop()
    _end(verdict)


if __name__ == "__main__":
    main(*sys.argv[1:])
