"""The times of lessons and paths hold for a reader at 90 words and 8 lines of code a minute."""

import re

from lessonkit.base.files import ROOT
from lessonkit.lesson import names
from lessonkit.pages import guides, minutes, paths
from lessonkit.pages.minutes import Reading

import pytest

LESSONS = [*ROOT.glob("day*/lesson*.py"), *ROOT.glob("cuda_src/*.cu")]
TRYING = 5  # minutes at least beside the reading: predict, run, compare
LESSON = '''"""Title
=====
Seven words stand in this first docstring.
"""

import torch


# Rung 1. Four words here.
def one(x):
    """[n] -> [n]."""
    return x  # two more


# Rung 2, advanced. New: hard.
def two(x):
    return x


LESSON = Lesson(
    rungs=(one, two),
)
'''


def test_prose_and_code_are_counted_apart_without_the_declaration():
    read = minutes.of_text(LESSON, ".py")
    assert read.lines == 6 - 1  # import, two defs, two returns; the docstring of one is prose
    assert minutes.of_text("// four words of prose\nint x; // two more\n\n", ".cu") == Reading(6, 1)
    assert Reading(90, 8).minutes == 2


def test_an_advanced_part_ends_where_the_next_rung_begins():
    ((start, stop),) = minutes.advanced(LESSON)
    assert LESSON[start:].startswith("# Rung 2, advanced")
    assert LESSON[stop:].startswith("LESSON = ")
    plain = minutes.of_text(minutes._plain(LESSON), ".py")
    assert plain.lines == 3
    assert minutes.reading("day2_triton_basics.lesson04_sum").minutes < minutes.reading(
        "day2_triton_basics.lesson04_sum", advanced=True
    ).minutes  # fmt: skip


def test_a_part_of_a_lesson_is_its_top_a_rung_or_a_function():
    add = "day2_triton_basics.lesson01_vector_add"
    top, one, block = (minutes.part(add, name) for name in ("top", "add_element", "add_block"))
    assert top.lines == 0 < one.lines
    assert block.words > one.words
    helper = minutes.part("day3_matmul_tk.lesson01_matmul", "multiply_tile")
    assert 20 < helper.lines < 40
    step = minutes.part("day2_triton_basics.lesson02_common_errors", "forgotten_mask")
    assert step.lines > minutes.part("day2_triton_basics.lesson02_common_errors", "grid_rounded_down").lines
    with pytest.raises(ValueError, match="has no part 'nothing'"):
        minutes.part(add, "nothing")


@pytest.mark.parametrize("lesson", names())
def test_a_lessons_hours_follow_from_its_words_and_lines(lesson):
    """At least the reading of all of it, with advanced parts; at most twice that, and half an hour to try things."""
    hours, read = guides.about(lesson).hours, minutes.reading(lesson, advanced=True).minutes
    least, most = (read + TRYING) / 60, (2 * read + 30) / 60
    assert least <= hours <= most, f"about says {hours:g} hours, expected {least:.2f} to {most:.2f}"


@pytest.mark.parametrize("route", [route for route in paths.routes() if route.name != "11w"], ids=lambda r: r.name)
def test_a_path_gives_each_line_the_time_that_it_takes(route):
    short = [
        f"{item.lesson or [e.short for e in item.exercises]} {', '.join(item.parts)}: {item.minutes:g} minutes, "
        f"{item.least:.1f} to read"
        for item in route.items
        if item.least > item.minutes
    ]
    assert not short


@pytest.mark.parametrize("name", ["30min", "1h"])
def test_a_short_path_names_the_parts_of_each_lesson_and_leaves_time_to_run(name):
    (route,) = (route for route in paths.routes() if route.name == name)
    assert all(item.parts for item in route.items if item.lesson)
    left = sum(item.minutes - item.least for item in route.items if not item.exercises)
    assert left >= 5


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_advanced_rungs_stand_behind_the_plain_ones(path):
    marks = re.findall(r"^# Rung \d+(, advanced)?\.", path.read_text(), re.MULTILINE)
    assert marks == sorted(marks, key=bool), "an advanced rung stands before a plain one"


def test_what_is_needed_stands_before():
    """Common errors follow the first kernel, sums come before softmax, 2-D blocks before they are needed."""
    order = [name.partition(".")[2] for name in names("day2")]
    assert order[:3] == ["lesson00_program_and_block", "lesson01_vector_add", "lesson02_common_errors"]
    assert order.index("lesson04_sum") < order.index("lesson05_softmax")
    two_dimensions = re.compile(r"\[:, None\]")
    lessons = sorted(ROOT.glob("day2_*/lesson*.py"))
    assert next(p.stem for p in lessons if two_dimensions.search(p.read_text())) == order[0]
    exercises = sorted(ROOT.glob("day2_*/exercises/exercise*.py"))
    first = next(p for p in exercises if two_dimensions.search(p.read_text()))
    assert "two dimensions" in first.read_text().split('"""')[1], "the first exercise with such a block explains it"
