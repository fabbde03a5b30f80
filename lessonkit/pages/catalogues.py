"""The catalogues of translations: what today's sources say, and what of it has been translated.

A catalogue a room, locale/zh_CN/LC_MESSAGES/ROOM.po, so that several people translate at once. Each message stands in
one catalogue: the first of base.words.CATALOGUES in whose files it is. A paragraph that changes keeps its old
translation as a draft (`fuzzy`, with the old English in a comment), which counts as missing.
"""

import ast
import difflib
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from io import BytesIO
from pathlib import Path

from lessonkit.base import printed, prose
from lessonkit.base.files import ROOT, write_atomically
from lessonkit.base.words import CATALOGUES, LANGUAGES, catalogue, later, missing, said, translated
from lessonkit.exercise import quiz
from lessonkit.lesson import names
from lessonkit.pages import glossary, guides
from lessonkit.pictures.draw import say
from lessonkit.pictures.registry import caption, picture

from babel.messages.catalog import Catalog, Message
from babel.messages.pofile import read_po, write_po

ROOMS = {
    "day1": ("day1_*",),
    "day2": ("day2_*",),
    "day3": ("day3_*",),
    "day4": ("day4_*",),
    "day5": ("day5_*",),
    "cuda": ("cuda_src",),
    "ops": ("course_ops", "problems", "workloads"),
}
SUFFIXES = (".py", ".cu", ".cuh")
SKIPPED = ("emulator",)  # for those who write it, not for those who learn

# Calls that take messages -> which of their arguments these are.
MARKS = {said: (0,), later: (0,), translated: (0,), say: (0,), caption: (1,), picture: (0, 1)}
PLACES = {mark.__name__: places for mark, places in MARKS.items()}
PANELS = ("learn", "measure", "write")  # `@learn()` in lessonkit/command_line makes a function a command
BEFORE = "before: "  # the English that a draft translates, in a comment: Babel reads no `#| msgid`
Found = dict[str, str]  # message -> the file that has it first


def sources(room: str) -> list[Path]:
    """The files of a room: lessons first, then ladders and exercises."""
    folders = (folder for pattern in ROOMS[room] for folder in sorted(ROOT.glob(pattern)))
    files = (p for folder in folders for p in sorted(folder.rglob("*"), key=lambda p: (len(p.parts), p)))
    return [p for p in files if p.suffix in SUFFIXES and not set(SKIPPED) & set(p.relative_to(ROOT).parts)]


def today() -> dict[str, Found]:
    """Catalogue -> the messages of today's sources; each in one catalogue."""
    rooms = {"course": _course, "kit": _kit} | {room: _room(room) for room in ROOMS}
    found: dict[str, Found] = {}
    known = set[str]()
    for name in CATALOGUES:
        found[name] = {}
        for message, path in rooms[name]():
            if message not in known:
                known.add(message)
                found[name][message] = path.relative_to(ROOT).as_posix()
    return found


def _room(room: str) -> Callable[[], Iterator[tuple[str, Path]]]:
    def found() -> Iterator[tuple[str, Path]]:
        lessons = {ROOT / f"{name.replace('.', '/')}.py" for name in names()}
        for path in sources(room):
            yield from ((message, path) for message in messages(path))
            if path in lessons:
                yield from ((line, path) for line in printed.templates(path.read_text()))
        if test := quiz.files().get(room):
            yield from ((message, test) for message in quiz.messages(test))

    return found


@cache
def _messages(text: str, suffix: str) -> list[str]:
    return prose.messages(text, suffix)


def _course() -> Iterator[tuple[str, Path]]:
    """What tables of lessons and the glossary say."""
    for name in names():
        yield guides.about(name).teaches, ROOT / f"{name.replace('.', '/')}.py"
    for word in glossary.words():
        yield word, glossary.SOURCE


def _kit() -> Iterator[tuple[str, Path]]:
    """What commands and pages say: the calls of MARKS, docstrings of commands, the help of arguments and options."""
    for path in sorted((ROOT / "lessonkit").rglob("*.py")):
        yield from ((message, path) for message in spoken(path.read_text()))


def spoken(text: str) -> Iterator[str]:
    """The messages of a file of the kit."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call | ast.FunctionDef))
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            given = [node.args[at] for at in PLACES.get(name, ()) if at < len(node.args)]
            given += [keyword.value for keyword in node.keywords if keyword.arg == "help"]
            given = [one for each in given for one in _either(each)]
            yield from (each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str))
        elif any(map(_is_command, node.decorator_list)) or "typer." in ast.unparse(node.args):
            yield from help_paragraphs(ast.get_docstring(node) or "")


def _either(node: ast.expr) -> list[ast.expr]:
    """Both sides of `a if x else b`."""
    return [*_either(node.body), *_either(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def _is_command(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    if isinstance(called, ast.Name):
        return called.id in PANELS
    return isinstance(called, ast.Attribute) and called.attr in ("command", "callback")


def help_paragraphs(text: str) -> list[str]:
    return [prose.normal(paragraph) for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


# ---- What the catalogues have ----


def load(name: str, language: str) -> Catalog:
    """A catalogue as it stands; an empty one if there is none."""
    path = catalogue(name, language)
    if path.exists():
        with path.open("rb") as file:
            return read_po(file)
    return _empty(name, language, datetime.now(UTC))


def _empty(name: str, language: str, since: datetime | str) -> Catalog:
    return Catalog(
        locale=LANGUAGES[language],
        header_comment=f"# {name}.po: `python -m lessonkit translate` brings it up to date.",
        project="gpu-kernel-course",
        version="1",
        msgid_bugs_address="CONTRIBUTING.md",
        creation_date=since,
        last_translator="see CONTRIBUTING.md",
        language_team=LANGUAGES[language],
        fuzzy=False,
    )


def updated(language: str) -> dict[Path, str]:
    """Every catalogue with exactly the messages of today's sources, in their order.

    A translation goes with its message into another catalogue. A new message whose like has gone gets the translation
    of that one as a draft.
    """
    wanted = today()
    old = {name: load(name, language) for name in CATALOGUES}
    memory = {str(m.id): m for loaded in old.values() for m in loaded if m.id and m.string}
    live = {message for found in wanted.values() for message in found}
    made = {}
    for name in CATALOGUES:
        gone = [str(m.id) for m in old[name] if m.id and m.string and m.id not in live]
        fresh = _empty(name, language, old[name].creation_date)
        for message, path in wanted[name].items():
            before = memory.get(message)
            if before is None and (near := difflib.get_close_matches(message, gone, 1)):
                draft = memory[near[0]].string
                fresh.add(message, draft, [(path, 0)], flags=["fuzzy"], auto_comments=[BEFORE + near[0]])
            elif before is None:
                fresh.add(message, "", [(path, 0)])
            else:
                flags = ["fuzzy"] if before.fuzzy else []
                notes = [" ".join(before.auto_comments)] if before.fuzzy else []  # a long one stands in several lines
                fresh.add(message, before.string, [(path, 0)], flags=flags, auto_comments=notes)
        made[catalogue(name, language)] = written(fresh)
    return made


def written(loaded: Catalog) -> str:
    """The text of a catalogue's file."""
    out = BytesIO()
    write_po(out, loaded, width=110, ignore_obsolete=True)
    return out.getvalue().decode()


def update(language: str) -> None:
    for path, text in updated(language).items():
        write_atomically(path, text)


def waiting(name: str, language: str) -> list[Message]:
    """The messages of a catalogue that have no translation, or a draft."""
    return [message for message in load(name, language) if message.id and (not message.string or message.fuzzy)]


def messages(path: Path) -> list[str]:
    """The messages of one file."""
    return _messages(path.read_text(), path.suffix)


def untranslated(path: Path, language: str) -> list[str]:
    """The messages of one file that are shown in English."""
    return missing(messages(path), language)


def outdated(language: str) -> dict[str, tuple[list[str], list[str]]]:
    """Catalogue -> messages of today's sources that it lacks, and messages it has that no source says any more."""
    found = {}
    for name, wanted in today().items():
        have = {str(message.id) for message in load(name, language) if message.id}
        lacks, over = [m for m in wanted if m not in have], sorted(have - wanted.keys())
        if lacks or over:
            found[name] = (lacks, over)
    return found


# ---- What a translation must keep ----

_KEPT = {
    "the placeholder": re.compile(r"\{\w*(?:[:!.][^{}]*)?\}|%[sd]"),
    "the code": re.compile(r"`[^`]+`"),
    "the link": re.compile(r"(?<=\])\([^)\s]+\)|https?://[^\s)>]+"),
    "the number": re.compile(r"(?<![A-Za-z\d])\d+(?:[.,]\d+)*"),
    "the name": re.compile(r"[A-Za-z]\w*_\w+"),
}


def faults(english: str, chinese: str) -> list[str]:
    """What of a message its translation has lost: placeholders, code, links, numbers, names."""
    found = []
    for what, pattern in _KEPT.items():
        lost = set(pattern.findall(english)) - set(pattern.findall(chinese.replace(".zh-CN.md", ".md")))
        found += [f"{what} {each} is missing" for each in sorted(lost)]
    return found
