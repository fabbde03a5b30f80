"""What the steps of a lesson print: a plain f-string in the lesson, the reader's language on the terminal.

A measured table is of its step's source, so a step says nothing of languages. Its lines are read from the source as
templates, `f"  {len(spans)} spans in {path}"` as "{spans} spans in {path}". They stand in the catalogues, and what a
step prints is translated by the template that made it.
"""

import ast
import builtins
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from lessonkit.base.words import language, retold, said

LONGEST = 2000  # characters: a longer text is another program's output


def templates(text: str) -> list[str]:
    """The lines that a Python file prints, and the words that it chooses between inside of them; each once."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    printed = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print" and call.args]
    found = [each for call in sorted(printed, key=lambda call: call.lineno) for each in _lines(call.args[0])]
    return [line for line in dict.fromkeys(found) if re.search(r"[A-Za-z]{3}", _literal(line))]  # others are data


def _literal(line: str) -> str:
    return re.sub(r"\{\w+\}", "", line)


def _lines(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield from _lines(node.body)
        yield from _lines(node.orelse)
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _lines(value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _without_braces(node.value, node)
    elif isinstance(node, ast.JoinedStr):
        yield from _without_braces(_template(node), *node.values)
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                yield from _lines(part.value)


def _without_braces(line: str, *parts: ast.expr) -> Iterator[str]:
    """The line, unless a brace in it stands for itself: then it is no template, and stays English."""
    if not any(isinstance(part, ast.Constant) and re.search("[{}]", str(part.value)) for part in parts):
        yield line.strip()


def _template(node: ast.JoinedStr) -> str:
    """The f-string with a name in each pair of braces: the first that stands in it, and a number behind the second."""
    line, names = "", list[str]()
    for part in node.values:
        if isinstance(part, ast.Constant):
            line += str(part.value)
        elif isinstance(part, ast.FormattedValue):
            name = next(_names(part.value), "value")
            names.append(name)
            line += f"{{{name}{names.count(name) if names.count(name) > 1 else ''}}}"
    return line


def _names(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield from (name for part in (node.body, node.orelse) for name in _names(part))
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and not hasattr(builtins, inner.id):
            yield inner.id.strip("_")


class _Retelling:
    """Standard output that says each text in a language. `print` writes a text at once."""

    def __init__(self, out: Any, lines: list[str], part: Callable[[str], str]) -> None:
        self.out, self.lines, self.part = out, lines, part

    def write(self, text: str) -> int:
        line = text.strip()
        if line and len(line) <= LONGEST:
            text = text.replace(line, retold(line, self.lines, language(), lambda value, _: self.part(value)), 1)
        return int(self.out.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.out, name)


@contextmanager
def translated_lines(path: Path, part: Callable[[str], str] = said) -> Iterator[None]:
    """What a file prints here is said in the reader's language, as far as the catalogues have it.

    part: says in the reader's language what stands in a line for an expression.
    """
    if language() == "en":
        yield
        return
    # The one with the most words first: "loss {a} -> {b}" would take "loss 2 -> 1 (epoch 3)" too.
    lines = sorted(templates(path.read_text()), key=lambda line: -len(_literal(line)))
    with redirect_stdout(_Retelling(sys.stdout, lines, part)):
        yield
