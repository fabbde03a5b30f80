"""course_ops' README: its table has every operator, from rows of lessons whose kernels are shipped."""

from lessonkit.base import words
from lessonkit.lesson import kernels
from lessonkit.measure.stale import Today
from lessonkit.pages import guides, report, results, shipped

import pytest

import course_ops

# No lesson has rows of these: parts of attention, decoding from pages, packed sequences, an operator made of others'
# kernels, and what is no operator.
WITHOUT_ROWS = {
    "attention_forward",
    "attention_backward",
    "attention_paged",
    "attention_varlen",
    "linear_cross_entropy",
    "patch",
    "Unsupported",
}


def test_every_operator_is_in_the_table_or_known_to_have_no_rows():
    assert set(shipped.SHIPPED) == set(course_ops.__all__) - WITHOUT_ROWS
    known = {guides.about(name).operator for name, _ in kernels()}
    assert {name for names in shipped.SHIPPED.values() for name in names} <= known


@pytest.mark.parametrize("folder", report.device_folders(), ids=lambda p: p.name)
def test_rows_are_of_kernels_that_are_shipped(folder):
    for contest in results.contests(folder, shipped.LANGUAGES):
        assert {results.language(name) for name, _, _ in contest.lessons} <= set(shipped.LANGUAGES), contest.name


@pytest.mark.parametrize("language", words.NAMES)
def test_a_ratio_is_the_peers_time_over_ours(language):
    today = Today(kernels())
    text = "".join(shipped.from_lessons(folder, language, today) for folder in report.device_folders())
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert {line[0].strip("`") for line in lines} == set(shipped.SHIPPED)
    for line in lines:
        if line[6].strip() == "‡":
            continue  # a declared peer was not there
        ours, theirs, ratio = (float(line[i].removesuffix(f" {shipped.MARK}")) for i in (3, 5, 6))
        assert abs(theirs / ours / ratio - 1) < 0.02, line
