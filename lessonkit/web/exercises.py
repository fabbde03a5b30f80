"""The page of an exercise: its task, what is to be written, the file a learner starts from, its hints, folded."""

import ast
import html
import re
from functools import cached_property

from lessonkit.base.prose import read_as
from lessonkit.base.words import translated
from lessonkit.exercise.source import Source
from lessonkit.web import places, prose

COURSE = "python3 course.py"


class Page:
    """One exercise in one language."""

    def __init__(self, source: Source, language: str) -> None:
        self.source, self.language = source, language
        self.suffix = ".cu" if source.is_cuda else ".py"

    def say(self, english: str) -> str:
        return translated(english, self.language)

    def text(self) -> str:
        source = self.source
        folder = source.path.parent.parent.name
        words = read_as(source.with_marks, self.suffix, self.say)
        first = next(part for part in prose.parts(words, self.suffix) if part.kind == prose.PROSE)
        title, task = prose.title(first.text)
        todo = "\n".join(f"{r.number}. {prose.escaped(self.say(r.task))}" for r in source.regions)
        commands = f"{COURSE} exercise next {source.short}\n{COURSE} exercise watch {source.short}"
        guide = places.relative(f"{folder}/index", places.exercise_page(source))
        start, count = translated("The file you start from", self.language), translated("Hint {number}", self.language)
        said = [
            f"# {prose.escaped(title or self.say(source.title))}",
            f"[{translated('The guide of this day', self.language)}]({guide}.md)",
            prose.markdown(task),
            *([f"## {translated('To be written', self.language)}", todo] if todo else []),
            f"## {translated('Begin', self.language)}",
            prose.fence("bash", commands),
            _folded(start, prose.code(source.stub, self.suffix), unfolded=True),
            f"## {translated('Hints', self.language)}",
            *(_folded(count.format(number=n), prose.escaped(self.say(" ".join(hint.split()))))
              for n, hint in enumerate(self.hints, 1)),
        ]  # fmt: skip
        return "\n\n".join(said) + "\n"

    @cached_property
    def hints(self) -> list[str]:
        """Read from the grader's part, which is not imported: in CUDA C++ that would compile it."""
        text = self.source.path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.keyword) and node.arg == "hints":
                return [str(hint) for hint in ast.literal_eval(node.value)]
        raise ValueError(f"{self.source.path}: its Exercise has no `hints` written out")


def _folded(summary: str, body: str, *, unfolded: bool = False) -> str:
    opened = " open" * unfolded
    return f'<details class="fold hint"{opened}><summary>{html.escape(summary)}</summary>\n\n{body}\n\n</details>'


def index(folder: str, language: str) -> str:
    """The page of all exercises of a folder."""
    here = [source for source in places.exercises() if source.name.startswith(f"{folder}.")]
    lines = [f"1. [{prose.escaped(translated(s.title, language))}]({s.path.stem}.md)" for s in here]
    toctree = "\n".join(s.path.stem for s in here)
    said = [f"# {translated('Exercises', language)}", "\n".join(lines), f"```{{toctree}}\n:hidden:\n\n{toctree}\n```"]
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(said)) + "\n"
