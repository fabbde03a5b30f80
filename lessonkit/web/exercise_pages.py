"""The page of an exercise: its task, what is to be written, the file a learner starts from, its hints, folded."""

import ast
import html
import json
import re
from functools import cached_property

from lessonkit.base.words import translated
from lessonkit.exercise.source import Source
from lessonkit.web import myst, places
from lessonkit.web.page import pack

COURSE = "python3 course.py"
LIMIT = 180  # seconds for an answer that a page grades: a browser is slower than the terminal


class Page:
    """One exercise in one language. python: megabytes of Python that the page can load to grade it; 0: it cannot."""

    def __init__(self, source: Source, language: str, python: float = 0) -> None:
        self.source, self.language, self.python = source, language, python
        self.suffix = ".cu" if source.is_cuda else ".py"

    def say(self, english: str) -> str:
        return translated(english, self.language)

    def text(self) -> str:
        source = self.source
        words = source.read(source.with_marks, self.say)
        first = next(part for part in myst.parts(words, self.suffix) if part.kind == myst.PROSE)
        title, task = myst.title(first.text)
        todo = "\n".join(f"{r.number}. {myst.escaped(_sentence(self.say(r.task)))}" for r in source.regions)
        commands = f"{COURSE} exercise next {source.short}\n{COURSE} exercise watch {source.short}"
        guide = places.relative(f"{source.folder}/index", places.exercise_page(source))
        start = html.escape(translated("The file you start from", self.language))
        count = html.escape(translated("Hint {number}", self.language))
        said = [
            f"# {myst.escaped(title or self.say(source.title))}",
            f"[{translated('The guide of this day', self.language)}]({guide}.md)",
            myst.markdown(task),
            *([f"## {translated('To be written', self.language)}", todo] if todo else []),
            f"## {translated('Your answer', self.language)}",
            f'<div class="exercise" data-exercise="{source.name}"{_python(self.python)} '
            f'data-words="{attribute(self.words())}"></div>',
            '<div class="exercise-terminal">',
            myst.fence("bash", commands),
            self._why_terminal(),
            myst.folded(start, myst.code(source.read(source.stub, self.say), self.suffix), "hint", unfolded=True),
            *(myst.folded(count.format(number=n), myst.escaped(self.say(" ".join(hint.split()))), "hint")
              for n, hint in enumerate(self.hints, 1)),
            "</div>",
        ]  # fmt: skip
        return "\n\n".join(said) + "\n"

    def _why_terminal(self) -> str:
        served = translated("`python3 course.py web` serves this page with an editor that grades.", self.language)
        if self.python:
            alone = translated(
                "At a web address the page grades by itself, with Python in the browser. A page from a file cannot.",
                self.language,
            )
        elif self.source.folder == pack.FOLDER:
            alone = translated(
                "This copy of the book was built without Python for pages, so the page itself cannot grade.",
                self.language,
            )
        else:
            alone = translated(
                "The page itself cannot grade: the Python of browsers has no PyTorch, which this exercise needs.",
                self.language,
            )
        return f"{served} {alone}"

    def words(self) -> dict[str, object]:
        """What static/exercise.js says."""
        return {
            "editor": translated("Your answer", self.language),
            "keys": translated("Tab indents, Escape and then Tab leaves the editor, Ctrl+Enter checks.", self.language),
            "check": translated("Check", self.language),
            "hint": translated("Hint", self.language),
            "reset": translated("Begin anew", self.language),
            "surely": translated("Put the stub back? What you have is kept beside it.", self.language),
            "loading": translated("one moment", self.language),
            "checking": translated("It is being graded; the first time takes longest.", self.language),
            "file": translated("Your file: {file}", self.language),
            "browser": translated("This browser keeps your answer", self.language),
            "checks": translated("checks: {count}", self.language),
            "passed": _passed(self.language),
            "solution": translated("One solution", self.language),
            "printed": translated("Your answer printed:", self.language),
            "changed": translated("Your file has changed since this page read it.", self.language),
            "take": translated("Take the file's text", self.language),
            "keep": translated("Keep this text", self.language),
            "load": translated("Write and check it here: loads {size} MB of Python, once", self.language).format(
                size=f"{self.python:.0f}"
            ),
            "limit": LIMIT,
            "status": status_words(self.language)
            | {"time": translated("it has not ended after {seconds} s: which loop never ends?", self.language).format(
                seconds=LIMIT)},
        }  # fmt: skip

    @cached_property
    def hints(self) -> list[str]:
        """Read from the grader's part, which is not imported: in CUDA C++ that would compile it."""
        text = self.source.path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.keyword) and node.arg == "hints":
                return [str(hint) for hint in ast.literal_eval(node.value)]
        raise ValueError(f"{self.source.path}: its Exercise has no `hints` written out")


def status_words(language: str) -> dict[str, str]:
    """What a page says where the server has not answered: by the status, 0 for none."""
    lost = translated("The server has ended: start it again, then load this page again.", language)
    other = translated("This page is of an earlier server: copy your text, then load the page again.", language)
    return {
        "0": lost, "403": other, "404": other, "421": other,
        "409": translated("Another answer is being graded: try again in a moment.", language),
        "413": translated("An answer of this size is not taken.", language),
        "502": translated("The grader has ended unexpectedly: try again.", language),
    }  # fmt: skip


def _sentence(text: str) -> str:
    """In the file it follows `# TODO(1): `."""
    return text[:1].upper() + text[1:]


def _passed(language: str) -> str:
    return translated("passed {day}", language)


def attribute(data: object) -> str:
    return html.escape(json.dumps(data, ensure_ascii=False))


def _python(size: float) -> str:
    """The attribute that says where a page of an exercise finds Python."""
    return f' data-python="../../../{pack.PLACE}/"' * bool(size)


def index(folder: str, language: str, python: float = 0) -> str:
    """The page of all exercises of a folder."""
    here = [source for source in places.exercises() if source.folder == folder]
    lines = [f"1. [{myst.escaped(translated(s.title, language))}]({s.path.stem}.md)" for s in here]
    toctree = "\n".join(s.path.stem for s in here)
    words = attribute({"passed": _passed(language)})
    listed = (
        f'<div class="exercise-list" data-folder="{folder}"{_python(python)} data-words="{words}">\n\n'
        f"{chr(10).join(lines)}\n\n</div>"
    )
    said = [f"# {translated('Exercises', language)}", listed, f"```{{toctree}}\n:hidden:\n\n{toctree}\n```"]
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(said)) + "\n"
