"""Every word of the glossary is used, explained in both languages, and linked where it is used first."""

import ast
import re

from lessonkit import __main__
from lessonkit.base.files import ROOT
from lessonkit.commands import show
from lessonkit.lesson import names
from lessonkit.pages import glossary, guides

import pytest
from typer.testing import CliRunner

TERMS = glossary.terms()
BOTH = sorted(glossary.PAGES)
ADD = "day2_triton_basics.lesson01_vector_add"
LESSON = (
    '"""Title\n=====\nText about an SM.\n\nYou will be able to: read.\nRun it: python x.py\n"""\n\nx = 1  # a warp\n'
)


def named(*which):
    return [next(term for term in TERMS if term.term == name) for name in which]


def test_terms_stand_once():
    assert len(TERMS) >= 50
    assert len({term.term for term in TERMS}) == len(TERMS)
    forms = [form.lower() for term in TERMS for form in term.uses]
    assert len(set(forms)) == len(forms)


def test_every_term_is_linked_at_its_first_use_in_a_lesson():
    """In the lesson's head and below the table of its guide; and no lesson before it uses the term."""
    first = {term: lesson for lesson, found in glossary.new().items() for term in found}
    assert not [term.term for term in TERMS if term not in first], "no lesson uses it: take it from the glossary"
    order = sorted(names(), key=lambda name: not name.startswith(glossary.BEFORE))
    for term, lesson in first.items():
        docstring = ast.get_docstring(ast.parse((ROOT / f"{lesson.replace('.', '/')}.py").read_text())) or ""
        (line,) = glossary._LINE.findall(f"{docstring}\n")
        assert term.term in re.split(r",\s+", line.removeprefix(glossary.HEAD).strip().removesuffix(".")), lesson
        guide = (ROOT / lesson.partition(".")[0] / "README.md").read_text()
        assert guide.count(f"(../GLOSSARY.md#{term.anchor})") >= 1, f"{term.term}: run `python -m lessonkit report`"
        assert not [earlier for earlier in order[: order.index(lesson)] if term in glossary.used(earlier)], term.term


@pytest.mark.parametrize("language", BOTH)
def test_links_into_the_glossary_find_their_word(language):
    page = glossary.PAGES[language]
    heads = re.findall(r"^### (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
    assert len(anchors) == len(heads) == len(TERMS)
    readme = guides.GUIDES[language]
    linked = {
        anchor
        for guide in [ROOT / readme, *ROOT.glob(f"*/{readme}")]
        for anchor in re.findall(rf"{re.escape(page)}#([^)]+)\)", guide.read_text())
    }
    assert linked <= anchors, linked - anchors
    assert len(linked) == len(TERMS)


@pytest.mark.release
def test_the_glossary_is_said_in_chinese():
    assert not glossary.untranslated("zh")


@pytest.mark.parametrize(
    ("term", "text", "is_used"),
    [
        ("SM", "each of 132 SMs", True),
        ("SM", "for sm_90", False),
        ("SM", "in fsm", False),
        ("warp", "Warps of 32", True),
        ("warp", "warp-specialized", False),
        ("shared memory", "through shared\nmemory", True),
        ("fusion", "one fused kernel", True),
        ("phase", "a three-phase scan", False),
        ("phase", "the phase of a barrier", True),
    ],
)
def test_what_counts_as_a_use(term, text, is_used):
    assert bool(named(term)[0].pattern.search(text)) == is_used


def test_docstrings_comments_and_what_a_lesson_teaches_are_its_prose():
    said = glossary.prose(LESSON + 'y = "a lane"\nz = About(teaches="a mask")\n')
    assert "an SM" in said
    assert "a warp" in said
    assert "a mask" in said
    assert "lane" not in said
    assert glossary.prose("x(); // one\n/* two\nthree */ y();", python=False) == "// one\n/* two\nthree */"


def test_a_ladder_is_the_prose_of_its_lesson():
    found = {path.parent.name for path in glossary.files("day4_replace_op.lesson08_flash_hopper")}
    assert found == {"day4_replace_op", "flash_hopper"}


def test_the_head_of_a_lesson_is_kept_up_to_date():
    one, two = named("SM"), named("SM", "warp")
    with_one, with_two = glossary.head(LESSON, one), glossary.head(LESSON, two)
    assert "SM.\n\nNew words (GLOSSARY.md): SM.\nYou will" in with_one
    assert "New words (GLOSSARY.md): SM, warp.\nYou will" in with_two
    assert glossary.head(with_one, two) == glossary.head(with_two, two) == with_two
    assert glossary.head(with_two, []) == LESSON
    assert "SM" not in glossary.prose(with_one.replace("Text about an SM.", ""))
    many = glossary.head(LESSON, list(TERMS))
    assert max(map(len, many.splitlines())) <= 120
    assert glossary.head(many, []) == LESSON
    assert 'All.\nNew words (GLOSSARY.md): SM.\n"""' in glossary.head('"""All.\n"""\n', one)


@pytest.mark.parametrize(
    ("which", "says", "says_not"),
    [
        ("SM", "Streaming multiprocessor", "32 threads"),
        ("smem", "", ""),
        ("spills", "registers are full", "sector"),
        ("线程块", "thread block", "sector"),
        ("multiply-add", "FLOP", "sector"),
    ],
)
def test_a_word_is_explained_in_a_terminal(which, says, says_not):
    with show.console.capture() as printed:
        done = CliRunner().invoke(__main__.app, ["words", which])
    assert done.exit_code == (0 if says else 1)
    if says:
        assert says in " ".join(printed.get().split())
        assert says_not not in printed.get()


def test_all_words_of_a_lesson_are_explained():
    found = {term.term for term in glossary.explained(ADD)}
    assert {"program", "sector", "mask"} <= found
    assert "wgmma" not in found
    assert len(list(glossary.explained(""))) == len(TERMS)
