"""C++ as text: what is code and what a comment or a string, which definition stands where, which headers it includes.

The one place where the kit splits C++. Every function keeps offsets: a blanked text is as long as the text.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

# A comment (which a backslash at its end continues), a raw string, a string, a character; in 1'000 the sign is none.
_NO_CODE = re.compile(
    r"""//(?:\\\n|[^\n])*|/\*.*?\*/|R"(?P<tag>[^\s()\\]{0,16})\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'""",
    re.DOTALL,
)
_INCLUDED = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_MACRO = re.compile(r"^[ \t]*#[ \t]*(?:define[ \t]+(\w+))?(?:[^\n\\]|\\.|\\\n)*", re.MULTILINE)
_TRANSPARENT = re.compile(r"^\s*(?:inline\s+)?(?:namespace\b[\w:\s]*|extern\s*)$")
_NAMED = re.compile(r"\b(?:struct|class|enum(?:\s+class)?|union|namespace|using|concept)\s+(\w+)")


@dataclass(frozen=True)
class Definition:
    """What is defined at the top of a file, or in a namespace there: text[start:stop]."""

    name: str
    start: int
    stop: int


def without_comments(text: str) -> str:
    """The text with its comments blanked out."""
    return _NO_CODE.sub(lambda found: _blank(found) if found[0].startswith(("//", "/*")) else found[0], text)


def comments(text: str) -> list[tuple[int, int]]:
    """Where each comment begins and ends."""
    return [found.span() for found in _NO_CODE.finditer(text) if found[0].startswith(("//", "/*"))]


def bare(text: str) -> str:
    """The text with its comments, strings and characters blanked out: what is left are names and signs."""
    return _NO_CODE.sub(_blank, text)


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])


def local_files(source: Path, headers: Path) -> list[Path]:
    """A program and the files that it includes by "name", directly or not, from its own folder or from `headers`."""
    found, todo = list[Path](), [source]
    while todo:
        path = todo.pop()
        if path not in found and path.is_file():
            found.append(path)
            places = ([path.parent / name, headers / name] for name in _INCLUDED.findall(path.read_text()))
            todo += [place for place in (next((p for p in each if p.is_file()), None) for each in places) if place]
    return found


def definitions(text: str) -> list[Definition]:
    """Every definition in order; one name may be there several times (overloads, specialisations, #if branches)."""
    quiet = bare(text)
    found = [Definition(m[1], m.start(), m.end()) for m in _MACRO.finditer(quiet) if m[1]]
    quiet = _MACRO.sub(_blank, quiet)
    start, depth, opened = 0, 0, False  # of the definition at hand; has it had a brace?
    for at, letter in enumerate(quiet):
        if letter == "{" and depth == 0 and _TRANSPARENT.match(quiet[start:at]):
            start = at + 1
        elif letter in "{(":
            depth, opened = depth + 1, opened or letter == "{"
        elif letter in "})":
            if depth == 0:  # the end of a namespace
                start, opened = at + 1, False
                continue
            depth -= 1
        ends = letter == ";" or (letter == "}" and opened and not re.match(r"\s*[;,)({]|\s*catch\b", quiet[at + 1 :]))
        if depth == 0 and ends:
            found += _definition(quiet, start, at + 1)
            start, opened = at + 1, False
    return found


def _definition(quiet: str, start: int, stop: int) -> list[Definition]:
    start += len(quiet[start:stop]) - len(quiet[start:stop].lstrip())
    head = re.sub(r"\b(?:__\w+__|alignas|decltype|requires)\s*\((?:[^()]|\([^()]*\))*\)", " ", quiet[start:stop])
    head = re.split(r"[{=]", re.sub(r"^\s*template\s*<(?:[^<>]|<[^<>]*>)*>", " ", head))[0]
    found = _NAMED.search(head) if "(" not in head else re.search(r"(\w+)\s*(?:<[^()]*>)?\s*\(", head)
    found = found or re.search(r"(\w+)\s*(?:\[[^\]]*\]\s*)*;?\s*$", head)
    return [Definition(found[1], start, stop)] if found else []


def tokens(text: str) -> list[str]:
    """Words and signs; layout does not count."""
    return re.findall(r"\w+|[^\w\s]", text)


@lru_cache(None)
def codes(text: str) -> dict[str, list[str]]:
    """Every definition of a file: name -> the code of each that has this name, comments and layout aside."""
    plain, found = without_comments(text), dict[str, list[str]]()
    for d in definitions(text):
        found.setdefault(d.name, []).append(" ".join(tokens(plain[d.start : d.stop])))
    return found


def reached(files: Iterable[Path], words: Iterable[str]) -> dict[str, str]:
    """Every definition that the words name, directly or through others: name -> its code, comments and layout aside."""
    return reached_in([path.read_text() for path in files], words)


def reached_in(texts: Iterable[str], words: Iterable[str]) -> dict[str, str]:
    """As `reached`, of the texts of files."""
    known: dict[str, list[str]] = {}
    for text in texts:
        for name, found in codes(text).items():
            known.setdefault(name, []).extend(found)
    code: dict[str, str] = {}
    todo = sorted(known.keys() & set(words))
    while todo:
        name = todo.pop()
        if name not in code:
            code[name] = "\n".join(known[name])
            todo += sorted(set(re.findall(r"\w+", code[name])) & known.keys())
    return code
