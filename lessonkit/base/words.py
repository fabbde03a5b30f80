"""Words in another language: English stands in the source, Chinese in gettext catalogues (locale/zh_CN/LC_MESSAGES).

What the catalogues lack is shown in English; `pytest --release` is red for it. `said` is for what a command says: in
the language of `--lang`, which stands in COURSE_LANG, or of the system (LANG=zh_CN.UTF-8).
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from lessonkit.base.files import ROOT

LANGUAGES = {"zh": "zh_CN"}  # as `--lang` has it -> as gettext names it
NAMES = {"en": "English", "zh": "简体中文"}  # what each calls itself
# A message that is in several rooms stands in the first of them.
CATALOGUES = ("course", "kit", "day1", "day2", "day3", "day4", "day5", "cuda", "ops")


def catalogue(name: str, language: str) -> Path:
    return ROOT / "locale" / LANGUAGES[language] / "LC_MESSAGES" / f"{name}.po"


def language() -> str:
    """The language of what commands say: "en", or one of LANGUAGES."""
    asked = (os.environ.get(name) for name in ("COURSE_LANG", "LC_ALL", "LC_MESSAGES", "LANG"))
    wanted = next(filter(None, asked), "en")
    return next((short for short in LANGUAGES if wanted == short or wanted.startswith(f"{short}_")), "en")


@cache
def _known(name: str, language: str) -> dict[str, str]:
    from babel.messages.pofile import read_po  # English, and whoever only imports this, does without

    if not (path := catalogue(name, language)).exists():
        return {}
    with path.open("rb") as file:
        return {str(m.id): str(m.string) for m in read_po(file) if m.id and m.string and not m.fuzzy}


def _catalogues(language: str) -> Iterator[dict[str, str]]:
    return (_known(name, language) for name in CATALOGUES)


def translated(english: str, language: str) -> str:
    """The text in a language ("en", "zh"); in English where no catalogue has a translation."""
    if language == "en":
        return english
    return next((known[english] for known in _catalogues(language) if english in known), english)


def said(english: str) -> str:
    """What a command says, in the language of this process; figures are filled in after it, with `.format(n=2)`."""
    return translated(english, language())


@contextmanager
def speaking(wanted: str) -> Iterator[None]:
    """Say all in a language, in what this process starts too; "" leaves it as it is."""
    before = os.environ.get("COURSE_LANG")
    if wanted:
        os.environ["COURSE_LANG"] = wanted
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("COURSE_LANG", None)
        else:
            os.environ["COURSE_LANG"] = before


def sentences(*texts: str) -> str:
    """Sentences one after another; Chinese has no space between them."""
    return ("" if language() == "zh" else " ").join(filter(None, texts))


def listed(items: Iterable[str], mark: str = ",", wanted: str = "") -> str:
    """Items one after another; Chinese has marks of its own. mark: "," or ";"; wanted: the language, if not today's."""
    return ({",": "、", ";": "；"}[mark] if (wanted or language()) == "zh" else f"{mark} ").join(items)


def heads(english: str, wanted: str) -> list[str]:
    """The heads of a table, which are one message: `later("lesson | hours")`. A head alone has several translations."""
    return translated(english, wanted).split(" | ")


def counted(number: int, one: str, many: str) -> str:
    """`counted(n, said("1 hint"), said("{count} hints"))`."""
    return one if number == 1 else many.format(count=number)


def later(english: str) -> str:
    """Marks a text of a table that `said` says where it is shown."""
    return english


def retold(text: str, templates: Iterable[str], language: str, part: Callable[[str, str], str] = translated) -> str:
    """A stored English text in another language, by the template that made it: `later("it refuses: {error}")`.

    What stands for a name in braces is translated too, if a catalogue has it. A text of no template stays as it is.
    part: what says it instead, in the language.
    """
    for template in templates:
        pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+?)", re.escape(template))
        if found := re.fullmatch(pattern, text, re.DOTALL):
            named = {name: part(value, language) for name, value in found.groupdict().items()}
            return translated(template, language).format(**named)
    return translated(text, language)


def missing(texts: list[str], language: str) -> list[str]:
    """The English texts that no catalogue has."""
    return [text for text in texts if not any(text in known for known in _catalogues(language))]
