"""Words in another language: English stands in the source, Chinese in a gettext catalogue, locale/zh_CN/*/course.po.

What the catalogue lacks is shown in English; `pytest --release` is red for it.
"""

from functools import cache

from lessonkit.base.files import ROOT

CATALOGUES = {"zh": ROOT / "locale" / "zh_CN" / "LC_MESSAGES" / "course.po"}


@cache
def _known(language: str) -> dict[str, str]:
    from babel.messages.pofile import read_po  # English, and whoever only imports this, does without

    with CATALOGUES[language].open("rb") as file:
        return {str(m.id): str(m.string) for m in read_po(file) if m.id and m.string and not m.fuzzy}


def translated(english: str, language: str) -> str:
    """The text in a language ("en", "zh"); in English where the catalogue has no translation."""
    return english if language == "en" else _known(language).get(english, english)


def missing(texts: list[str], language: str) -> list[str]:
    """The English texts that a catalogue does not have."""
    return [text for text in texts if text not in _known(language)]
