"""Answers of exercises and quizzes, graded in a process beside the server: `Grader` there, `main` in the process.

The process imports PyTorch once and has no threads, so it can fork. Each answer is graded in a child of it, by the
function and within the limits of the terminal's command, and progress goes to the same file.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from datetime import date
from pathlib import Path
from typing import IO, Any

from lessonkit.base.files import ROOT, write_atomically
from lessonkit.base.words import said

Answer = dict[str, Any]
PRINTED = 4000  # characters of what an answer has printed that are shown
WAIT = 3.0  # seconds for the request before


class Busy(RuntimeError):
    """Another answer is being graded."""


class Ended(RuntimeError):
    """The process has ended before it answered; the next request begins another."""


class Grader:
    """The server's end. It answers one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def begin(self) -> subprocess.Popen[str]:
        """Start the process, if it is not running: its imports take some seconds."""
        if self._process is None or self._process.poll() is not None:
            # Where every address is watched, GPU or not.
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lessonkit.web.grader"], cwd=ROOT, env=environment, encoding="utf-8",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        return self._process

    def ask(self, request: Answer) -> Answer:
        """What the process answers. Raises Busy, Ended."""
        if not self._lock.acquire(timeout=WAIT):
            raise Busy
        try:
            process = self.begin()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            self._lock.release()
        if not line:
            raise Ended
        answer: Answer = json.loads(line)
        return answer

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def answer(request: Answer, printed: IO[bytes]) -> Answer:
    """What becomes of a request. Its fields are `do`, `exercise`, `language`, and what the learner has written.

    `seen` is the text that the page got from the file. Where the file has another by now, another editor has saved
    it: nothing is overwritten, and the page is told.
    """
    from lessonkit.exercise import desk, progress, source  # PyTorch, which the server does without

    os.environ["COURSE_LANG"] = "zh" if request.get("language") == "zh" else "en"
    if request.get("do") == "quiz":
        return _quiz(request)
    if request.get("do") == "list":
        return {"passed": {name: record.passed for name, record in progress.load().items() if record.passed}}
    found = {each.name: each for each in source.discover()}.get(str(request.get("exercise")))
    if found is None:
        return {"error": said("There is no exercise of this name.")}
    made: Answer = {}
    match request.get("do"):
        case "open":
            pass
        case "hint":
            desk.hints(found, more=True)
        case "reset":
            desk.reset(found)
        case "check":
            text, now = str(request["answer"]), _text(found)
            if now not in (request.get("seen"), text):
                return {"changed": now}
            write_atomically(progress.answer_file(found), text)
            printed.seek(0)
            printed.truncate()
            verdict, lines = desk.check(found)
            made = {"right": verdict.right, "lines": [[line.kind, line.text] for line in lines],
                    "printed": _tail(printed)}  # fmt: skip
        case _:
            return {"error": said("The page asks what this server does not know: load it again.")}
    record = progress.of(found)
    return made | {
        "answer": _text(found),
        "file": _shown(progress.answer_file(found)),
        "checks": record.checks,
        "passed": record.passed,
        "hints": desk.hints(found, more=False),
        "solution": desk.solution(found) if record.passed else "",
    }


def _quiz(request: Answer) -> Answer:
    """What was answered is kept, as the terminal keeps it. Without answers: the first sitting of this part."""
    from lessonkit.exercise import progress, quiz
    from lessonkit.pages import learned

    try:
        questions = quiz.load(str(request.get("quiz")), str(request.get("part")))
        first = learned.sat(progress.sittings()).get(questions[0].quiz, {}).get(questions[0].part)
        if "answers" not in request:
            day = date.fromtimestamp(first.at).isoformat() if first else ""
            return {"day": day, "right": first.right if first else 0, "count": len(questions)}
        marks = learned.sit(questions, [str(each) for each in request["answers"]])
    except ValueError as why:
        return {"error": str(why)}
    return {"right": [mark.right for mark in marks], "again": first is not None, "file": _shown(progress.file())}


def _shown(file: Path) -> str:
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def _text(found: Any) -> str:
    """The learner's file, or what it would begin as."""
    from lessonkit.exercise import progress

    file = progress.answer_file(found)
    text: str = file.read_text() if file.exists() else found.read(found.stub)
    return text


def _tail(printed: IO[bytes]) -> str:
    printed.seek(0, os.SEEK_END)
    printed.seek(max(0, printed.tell() - PRINTED))
    return printed.read().decode(errors="replace")


def main() -> None:
    """Answer requests, a line of JSON each, until the server ends. What answers print does not meet its answers."""
    with tempfile.TemporaryFile() as printed, os.fdopen(os.dup(0)) as asked, os.fdopen(os.dup(1), "w") as said_back:
        nothing = os.open(os.devnull, os.O_RDONLY)
        for mine, taken in ((nothing, 0), (printed.fileno(), 1), (printed.fileno(), 2)):
            os.dup2(mine, taken)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a child is ended, it does not exit
        for line in asked:
            try:
                made = answer(json.loads(line), printed)
            except Exception as error:  # damaged progress, a file that cannot be written: the page says it
                made = {"error": f"{type(error).__name__}: {error}"}
            said_back.write(json.dumps(made) + "\n")
            said_back.flush()


if __name__ == "__main__":
    main()
