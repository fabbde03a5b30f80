"""A built book without bytes that show nothing: they hold up the first paint where a host does not compress."""

import re
from collections.abc import Iterator
from pathlib import Path

from lessonkit.pictures.draw import THEMES

from pygments.token import STANDARD_TYPES

_CODE = re.compile(r'<div class="highlight">.*?</pre>', re.DOTALL)
_WORD = re.compile(r"[\w-]+")
_BEGUN = re.compile(r"(?<![\w-])([A-Za-z][\w-]*-)\$\{")  # `exercise-${kind}`, in a script: any class that begins so
_TOKEN = re.compile(r"/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|[;{}]", re.DOTALL)
_CLASS = re.compile(r"\.((?:\\.|[\w-])+)")
_DEFINED = re.compile(r"(--[\w-]+)\s*:((?:\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|[^;{}\"'])*)(?:;|(?=\})|$)")
_ASKED = re.compile(r"var\(\s*(--[\w-]+)")
NESTED = ("@media", "@supports", "@layer")


def trim(book: Path) -> None:
    """Leave in each style of a built book what its pages can use, and add the pictures' colours.

    Code in pages loses the marks of words that have no colour of their own: a fifth of a lesson's page.
    """
    static = book / "_static"
    styles = {path: path.read_text() for path in static.glob("*.css")}
    course = static / "course.css"
    if course in styles and THEMES not in styles[course]:
        styles[course] += THEMES
    pages = [path.read_text() for path in book.rglob("*.html")]
    scripts = {path.read_text() for path in static.glob("*.js")}
    classes = set[str]()
    for page in pages:
        for names in re.findall(r'class=(?:"([^"]*)"|([\w-]+))', page):
            classes.update(" ".join(names).split())
        scripts.update(re.findall(r"<script(?![^>]*json)[^>]*>(.*?)</script>", page, re.DOTALL))
    begun = set[str]()
    for script in scripts:
        classes.update(_WORD.findall(script))
        begun.update(_BEGUN.findall(script))
    classes.update(name for text in styles.values() for name in _CLASS.findall(text) if name.startswith(tuple(begun)))
    trimmed = {path: without_classes(text, classes) for path, text in styles.items()}
    asked = _variables("\n".join(trimmed.values()), {style for page in pages for style in _inline(page)}, scripts)
    for path, text in trimmed.items():
        path.write_text(_DEFINED.sub(lambda found: found[0] if found[1] in asked else "", text))
    coloured = set(re.findall(r"\.highlight \.(\w+)", trimmed.get(static / "pygments.css", "")))
    plain = "|".join(kind for kind in STANDARD_TYPES.values() if kind and kind not in coloured)
    word = re.compile(rf'<span class="(?:{plain})">([^<]*)</span>')
    for path in book.rglob("*.html"):
        text = path.read_text()
        less = _CODE.sub(lambda found: word.sub(r"\1", found[0]), text)
        if less != text:
            path.write_text(less)


def _inline(page: str) -> list[str]:
    return re.findall(r"<style>(.*?)</style>", page, re.DOTALL) + re.findall(r'style="([^"]*)"', page)


def without_classes(css: str, known: set[str]) -> str:
    """The style without selectors that name a class of no page."""
    kept = []
    for head, body in _statements(css):
        if body is None:
            kept.append(f"{head};")
        elif head.startswith(NESTED):
            if inside := without_classes(body, known):
                kept.append(f"{head}{{{inside}}}")
        elif head.startswith("@"):
            kept.append(f"{head}{{{body}}}")
        elif selectors := [each for each in _selectors(head) if _names(each) <= known]:
            kept.append(f"{','.join(selectors)}{{{body}}}")
    return "".join(kept)


def _statements(css: str) -> Iterator[tuple[str, str | None]]:
    """Each statement of the outermost level: its head, and what its braces hold."""
    start = depth = inside = 0
    for token in _TOKEN.finditer(css):
        if token[0] == "{":
            depth += 1
            if depth == 1:
                inside = token.end()
        elif token[0] == "}":
            depth -= 1
            if depth == 0:
                yield _plain(css[start : inside - 1]), css[inside : token.start()]
                start = token.end()
        elif token[0] == ";" and depth == 0:
            yield _plain(css[start : token.start()]), None
            start = token.end()


def _plain(head: str) -> str:
    return re.sub(r"/\*.*?\*/", "", head, flags=re.DOTALL).strip()


def _selectors(head: str) -> list[str]:
    """Split at the commas that no parenthesis holds."""
    parts, depth = [""], 0
    for letter in head:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _names(selector: str) -> set[str]:
    """The classes that an element must have. One in :not(), :is() or an attribute is no condition."""
    bare = re.sub(r"\[[^\]]*\]", "", selector)
    while (shorter := re.sub(r":(?:not|is|where|has)\([^()]*\)", "", bare)) != bare:
        bare = shorter
    return {re.sub(r"\\(.)", r"\1", name) for name in _CLASS.findall(bare)}


def _variables(style: str, inline: set[str], scripts: set[str]) -> set[str]:
    """The variables that a property or a script asks for, or a variable that is asked for.

    A script may ask for `--chart-${n}`: for all that begin like this.
    """
    defined: dict[str, list[str]] = {}
    for name, value in _DEFINED.findall(style):
        defined.setdefault(name, []).append(value)
    asked = set(_ASKED.findall(_DEFINED.sub("", style)))
    for text in inline:
        asked.update(_ASKED.findall(text))
    for begin in {name for script in scripts for name in re.findall(r"--[\w-]+", script)}:
        asked.update(name for name in defined if name == begin or (begin.endswith("-") and name.startswith(begin)))
    left = list(asked)
    while left:
        for value in defined.get(left.pop(), []):
            more = set(_ASKED.findall(value)) - asked
            asked |= more
            left += more
    return asked
