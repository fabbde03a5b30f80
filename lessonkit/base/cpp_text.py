"""Reading a .cu as text: which function, struct, constant or macro stands where."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_QUIET = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
_MACRO = re.compile(r"^[ \t]*#[ \t]*(?:define[ \t]+(\w+))?(?:[^\n\\]|\\.|\\\n)*", re.MULTILINE)
_TRANSPARENT = re.compile(r"^\s*(?:inline\s+)?(?:namespace\b[\w:\s]*|extern\s*\"\s*\"\s*)$")
_NAMED = re.compile(r"\b(?:struct|class|enum(?:\s+class)?|union|namespace|using|concept)\s+(\w+)")


@dataclass(frozen=True)
class Definition:
    """What is defined at the top of a file, or in a namespace there: text[start:stop]."""

    name: str
    start: int
    stop: int


def without_comments(text: str, *, strings: bool = True) -> str:
    """The text with comments blanked out, and the inside of strings too if not `strings`; every offset stays."""

    def blank(found: re.Match[str]) -> str:
        if found[0].startswith(("//", "/*")):
            return re.sub(r"[^\n]", " ", found[0])
        return found[0] if strings else found[0][0] + " " * (len(found[0]) - 2) + found[0][-1]

    return _QUIET.sub(blank, text)


def definitions(text: str) -> list[Definition]:
    """Every definition in order; one name may be there several times (overloads, specialisations, #if branches)."""
    quiet = without_comments(text, strings=False)
    found = [Definition(m[1], m.start(), m.end()) for m in _MACRO.finditer(quiet) if m[1]]
    quiet = _MACRO.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), quiet)
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


def codes(text: str) -> dict[str, list[str]]:
    """Every definition of a file: name -> the code of each that has this name, comments and layout aside."""
    plain, found = without_comments(text), dict[str, list[str]]()
    for d in definitions(text):
        found.setdefault(d.name, []).append(" ".join(tokens(plain[d.start : d.stop])))
    return found


def reach(known: Mapping[str, str], words: Iterable[str]) -> dict[str, str]:
    """Of name -> code what the words name, directly or through others."""
    code: dict[str, str] = {}
    todo = sorted(known.keys() & set(words))
    while todo:
        name = todo.pop()
        if name not in code:
            code[name] = known[name]
            todo += sorted(set(re.findall(r"\w+", code[name])) & known.keys())
    return code


def reached(files: list[Path], words: set[str]) -> dict[str, str]:
    """Every definition that the words name, directly or through others: name -> its code, comments and layout aside."""
    known: dict[str, list[str]] = {}
    for path in files:
        for name, found in codes(path.read_text()).items():
            known.setdefault(name, []).extend(found)
    return reach({name: "\n".join(found) for name, found in known.items()}, words)
