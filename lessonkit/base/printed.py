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
from functools import cached_property
from pathlib import Path
from typing import Any

from lessonkit.base.words import language, retold, said

SAYING = ("print", "Missing", "Unsupported")  # calls whose first argument a reader sees
LONGEST = 2000  # characters: a longer text is another program's output


def templates(text: str) -> list[str]:
    """The lines that a Python file prints, why it leaves things out, and the words in these; each once.

    An f-string that begins with two spaces is a line too, wherever it stands. Only lessons of steps print.
    """
    nodes = list(ast.walk(ast.parse(text)))
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args]
    called = {call: ast.unparse(call.func) for call in calls}
    if not {"print", "Steps"} & set(called.values()):
        return []
    lines = [call.args[0] for call in calls if called[call] in SAYING]
    lines += [node for node in nodes if isinstance(node, ast.JoinedStr) and ast.unparse(node)[2:4] == "  "]
    found = [each for node in sorted(lines, key=lambda node: node.lineno) for each in _lines(node)]
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


class Reader:
    """Says in the reader's language what a lesson's file prints.

    part: what stands in a line for an expression, in that language.
    """

    def __init__(self, path: Path, part: Callable[[str], str] = said) -> None:
        self.path, self.part = path, part

    @cached_property
    def templates(self) -> tuple[list[str], list[str]]:
        """Those of several lines, and those of one. English needs none, so the file is read where another is spoken."""
        # The one with the most words first: "loss {a} -> {b}" would take "loss 2 -> 1 (epoch 3)" too.
        lines = sorted(templates(self.path.read_text()), key=lambda line: -len(_literal(line)))
        return [each for each in lines if "\n" in each], [each for each in lines if "\n" not in each]

    def told(self, text: str) -> str:
        if language() == "en":
            return text
        texts, lines = self.templates
        told = self._by(texts, text)
        return told if told != text else "\n".join(self._by(lines, line) for line in text.split("\n"))

    def _by(self, lines: list[str], text: str) -> str:
        line = text.strip()
        if not line or len(line) > LONGEST:
            return text
        return text.replace(line, retold(line, lines, language(), self._value), 1)

    def _value(self, value: str, _: str) -> str:
        """`Unsupported: why` by its end."""
        kind, colon, why = value.partition(": ")
        return told if (told := self.part(value)) != value else f"{kind}{colon}{said(why)}" if why else value


class _Retelling:
    """Standard output that says each text in the reader's language. `print` writes a text at once."""

    def __init__(self, out: Any, told: Callable[[str], str]) -> None:
        self.out, self.told = out, told

    def write(self, text: str) -> int:
        return int(self.out.write(self.told(text)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.out, name)


@contextmanager
def retelling(reader: Reader) -> Iterator[None]:
    """What is printed here is said in the reader's language, as far as the catalogues have it."""
    if language() == "en":
        yield
        return
    with redirect_stdout(_Retelling(sys.stdout, reader.told)):
        yield
