"""Translations: what is found in the sources, what catalogues have, and that a lesson read in other words stays one."""

import ast
import re

from lessonkit.base import prose, words
from lessonkit.base.cpp_text import tokens, without_comments
from lessonkit.pages import catalogues

import pytest

ROOMS = tuple(catalogues.ROOMS)
MARK = "译文："
WORDS = "把每个元素都读一次，再写一次；"


def foreign(message):
    """Other words for a message, of about its length, with all that a translation keeps."""
    return MARK + re.sub(r"(?<= )[a-z]{4,}(?= )", "一个词", message) + WORDS


def assert_same_python(text, read):
    """Node by node the same, but for docstrings and strings that were translated."""
    docstrings = set()
    for old, new in zip(*(list(ast.walk(ast.parse(each))) for each in (text, read)), strict=True):
        assert type(old) is type(new)
        if isinstance(new, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(new) is not None:
            docstrings.add(new.body[0].value)
        simple = {name: value for name, value in vars(old).items() if isinstance(value, str | int | float | bool)}
        is_prose = new in docstrings or (isinstance(new, ast.Constant) and str(new.value).startswith(MARK))
        for name in simple.keys() - {"lineno", "col_offset", "end_lineno", "end_col_offset"}:
            assert is_prose or vars(new)[name] == simple[name], f"line {old.lineno}: {simple[name]}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_file_in_other_words_has_the_same_code(room):
    for path in catalogues.sources(room):
        text = path.read_text()
        read = prose.read_as(text, path.suffix, foreign)
        if path.suffix == ".py":
            assert_same_python(text, read)
        else:
            assert tokens(without_comments(read)) == tokens(without_comments(text)), path


def test_every_catalogue_has_the_messages_of_today():
    wrong = catalogues.outdated("zh")
    assert not wrong, f"python -m lessonkit translate brings them up to date: {wrong}"


@pytest.mark.parametrize("name", words.CATALOGUES)
def test_a_translation_keeps_code_numbers_and_links(name):
    found = {}
    for message in catalogues.load(name, "zh"):
        if message.id and message.string and not message.fuzzy:
            found[message.id] = catalogues.faults(message.id, message.string)
    assert not (bad := {english: lost for english, lost in found.items() if lost}), bad


@pytest.mark.release
@pytest.mark.parametrize("name", words.CATALOGUES)
def test_a_release_has_every_translation(name):
    waiting = catalogues.waiting(name, "zh")
    assert not waiting, f"{name}: {len(waiting)} messages: python -m lessonkit translate --missing lists them"
