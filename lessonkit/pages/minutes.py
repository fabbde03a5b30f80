"""How long a lesson takes to read: its words at 90 a minute and its lines of code at 8, the pace of a careful reader.

Prose is in docstrings and comments, code is every other line that is not blank. A declaration (`LESSON = ...`) says
what the tests check: it is skipped at the first reading, and so are the parts that a lesson calls advanced, from
`# Rung 4, advanced.` to the next rung. CUDA C++ and the rungs of a ladder count with the lesson that declares them.
"""

import ast
import io
import re
import tokenize
from dataclasses import dataclass
from functools import cache

from lessonkit.base.cpp_text import comments
from lessonkit.pages import glossary

WORDS, LINES = 90, 8  # a minute
_WORD = re.compile(r"[A-Za-z0-9][\w'.,/-]*")
_ADVANCED = re.compile(r"^(?:#|//) (?:Rung \d+|v\d+), advanced\.", re.MULTILINE)
_PART = re.compile(r"^(?:# Rung \d+|// v\d+\.|LESSON = )", re.MULTILINE)


@dataclass(frozen=True)
class Reading:
    """What there is to read, in words of prose and lines of code."""

    words: int = 0
    lines: int = 0

    @property
    def minutes(self) -> float:
        return self.words / WORDS + self.lines / LINES

    def __add__(self, other: "Reading") -> "Reading":
        return Reading(self.words + other.words, self.lines + other.lines)


def reading(lesson: str, *, advanced: bool = False) -> Reading:
    """Of a lesson; with its advanced parts or without."""
    total = Reading()
    for path in glossary.files(lesson):
        total += of_text(_plain(path.read_text()) if not advanced else path.read_text(), path.suffix)
    return total


def advanced(text: str) -> list[tuple[int, int]]:
    """Where the advanced parts of a file begin and end."""
    found = []
    for mark in _ADVANCED.finditer(text):
        following = _PART.search(text, mark.end())
        found.append((mark.start(), following.start() if following else len(text)))
    return found


def _plain(text: str) -> str:
    for start, stop in reversed(advanced(text)):
        text = text[:start] + text[stop:]
    return text


@cache
def of_text(text: str, suffix: str) -> Reading:
    """Of one file, without its declaration."""
    return _of_python(text) if suffix == ".py" else _of_cpp(text)


def _of_python(text: str) -> Reading:
    text = re.split(r"^LESSON = ", text, maxsplit=1, flags=re.MULTILINE)[0]
    lines = {nth for nth, line in enumerate(text.splitlines(), 1) if line.strip()}
    prose = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            prose.append(token.string)
            if not token.line[: token.start[1]].strip():
                lines.discard(token.start[0])
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (said := ast.get_docstring(node)):
            prose.append(said)
            first = node.body[0]
            lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return Reading(sum(len(_WORD.findall(each)) for each in prose), len(lines))


def _of_cpp(text: str) -> Reading:
    prose, code, at = [], "", 0
    for start, stop in comments(text):
        prose.append(text[start:stop])
        code += text[at:start]
        at = stop
    code += text[at:]
    return Reading(
        sum(len(_WORD.findall(each)) for each in prose), sum(bool(line.strip()) for line in code.splitlines())
    )


def part(lesson: str, name: str) -> Reading:
    """Of a part of a lesson: "top", its first docstring; or a rung, from `# Rung 2` to the next one; or a step.

    Raises ValueError if the lesson has no such part.
    """
    text = glossary.files(lesson)[0].read_text()
    tree = ast.parse(text)
    if name == "top":
        return Reading(len(_WORD.findall(ast.get_docstring(tree) or "")))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        raise ValueError(f"{lesson} has no part {name!r}: write top, or a rung, a step or a function of it")
    lines = text.splitlines(True)
    marks = [nth for nth, line in enumerate(lines) if re.match(r"# Rung \d+|LESSON = ", line)]
    at = functions[name].lineno - 1
    if earlier := [mark for mark in marks if mark < at]:  # of a rung all from its comment to the next rung
        return of_text("".join(lines[earlier[-1] : min(mark for mark in marks if mark > at)]), ".py")
    start = at  # else the function, with the kernels that stand directly above it
    for node in reversed([n for n in tree.body if n.lineno - 1 < at]):
        if not (isinstance(node, ast.FunctionDef) and node.decorator_list and start == at):
            break
        start = node.decorator_list[0].lineno - 1
    while start and lines[start - 1].startswith(("#", "@")):
        start -= 1
    return of_text("".join(lines[start : functions[name].end_lineno]), ".py")
