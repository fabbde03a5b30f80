"""Day 5's report and guides: they build from rows alone, and nobody typed a measured number."""

import ast
import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

from lessonkit.base.files import ROOT
from lessonkit.exercise import progress, source
from lessonkit.pages import compared, final, final_report, operator_pages, report, results, roofline, shipped

import pytest

from day5_tuning import lesson12_final_report

MEASURED = re.compile(r"\d[\d.,]*\s?(?:%|x\b|times|us\b|ms\b|TB/s|TFLOP/s)")
WRITERS = (compared, final_report, lesson12_final_report, results, roofline)
GUIDES = sorted((ROOT / "day5_tuning").glob("README*.md"))
FOLDERS = [folder for folder in report.device_folders() if any(results.measured(folder))]


@pytest.mark.parametrize("module", WRITERS, ids=lambda m: m.__name__.split(".")[-1])
def test_text_of_a_report_has_no_typed_measurement(module):
    """Every figure in a generated sentence is computed: the sentences themselves hold none."""
    tree = ast.parse(Path(module.__file__).read_text())
    docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree)
                  if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)}  # fmt: skip
    formats = {id(part) for node in ast.walk(tree) if isinstance(node, ast.FormattedValue) and node.format_spec
               for part in ast.walk(node.format_spec)}  # fmt: skip
    for node in ast.walk(tree):
        text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in formats
        if text and node.value not in docstrings:
            assert not MEASURED.search(node.value), f"line {node.lineno}: {node.value!r}"


@pytest.mark.parametrize("guide", GUIDES, ids=lambda p: p.name)
def test_numbers_of_the_guide_are_the_lessons(guide):
    """A number with a unit in the guide is a prediction that a lesson states, or stands in a row."""
    known = "".join(path.read_text() for path in (ROOT / "day5_tuning").glob("*.py"))
    known += "".join(path.read_text() for folder in FOLDERS for path in folder.glob("day5_tuning.*.csv"))
    for number in MEASURED.findall(guide.read_text()):
        assert number in known, f"{guide.name} says {number!r}, and no lesson or row does"


BEGUN = (
    ("day1", 0, {"checks": 4, "hints": 2, "passed": "2026-01-01"}),
    ("day1", 1, {"checks": 1, "passed": "2026-01-01"}),
    ("day1", 2, {"checks": 7, "hints": 3}),
    ("mul", 0, {"checks": 1, "passed": "2026-01-02"}),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The report of a learner who has begun four exercises, and one that is gone: suffix -> file. It takes seconds.

    "own" is the text with what is kept of no learner's page, the exercises."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COURSE_ANSWERS", str(tmp_path_factory.mktemp("answers")))
        for name, nth, record in BEGUN:
            progress.update(source.find(name)[nth], **record)
        gone = progress.Record(checks=1, hints=3, passed="x")
        progress.save(progress.load() | {"day1_pytorch.exercise99_gone": gone})
        title, blocks = final_report.build(FOLDERS[0])
        files = {path.suffix: path for path in final.write(tmp_path_factory.mktemp("report"), title, blocks)}
        return files | {"own": final.as_markdown("", [dataclasses.replace(b, own=False) for b in blocks])}


@pytest.fixture(autouse=True)
def nothing_begun(tmp_path, monkeypatch):
    """A learner's own progress is theirs: each test begins with none."""
    monkeypatch.setenv("COURSE_ANSWERS", str(tmp_path / "answers"))


@pytest.mark.skipif(not FOLDERS, reason="no rows of a GPU")
def test_final_report_builds_from_committed_rows(made):
    assert len(re.findall(rb"/Type /Page\b", made[".pdf"].read_bytes())) <= 2
    text = made[".md"].read_text()
    for contest in results.contests(FOLDERS[0]):
        assert f"| {contest.name} | {contest.shape} " in text, contest.name
        assert contest.best.rate in text
    ships = text.split("## What ships")[1].split("\n## ")[0]
    for s, _ in shipped.summaries(shipped.rows(FOLDERS[0])):
        assert (f"| {s.operator} | {s.direction} |" in ships) == bool(s.behind), s
    assert 'src="data:image/png;base64,' in made[".html"].read_text()
    assert "http" not in made[".html"].read_text()  # works offline


@pytest.mark.skipif(not FOLDERS, reason="no rows of a GPU")
def test_an_old_row_is_marked_and_says_nothing_of_its_rung():
    """`skipped` and `longest_first` bring nothing without a causal mask; of an old row that is not said."""
    story = next(c for c in results.contests(FOLDERS[0], final_report.PYTHON) if c.name == "attention")
    for old, said in (("none", {"skipped", "longest_first"}), ("skipped", {"longest_first"}), ("edges", {"skipped"})):
        today = SimpleNamespace(why_old=lambda row, old=old: "code changed" * (row.rung == old))
        (words,) = final_report._nothing(story, today)
        assert {name for name in ("skipped", "longest_first") if f"{name} 1." in words} == said
        assert (operator_pages.MARK in final_report._story(story, today)) == (old != "none")


@pytest.mark.skipif(not FOLDERS, reason="no rows of a GPU")
def test_a_gain_over_an_old_row_is_marked():
    ladder = next(each for each in operator_pages.ladders(FOLDERS[0]) if each.name == "attention")
    main = results.main_size(ladder.lessons)
    mark = operator_pages.MARK
    lines = operator_pages._rungs(ladder, main, lambda row: f" {mark}" * (row.rung == "skipped"))
    marked = {line.split("`")[1]: line.count(mark) for line in lines.splitlines() if mark in line}
    assert marked == {"skipped": 2, "edges": 1}  # its time and its gain; the gain over it


def test_final_report_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="no rows in"):
        final_report.build(tmp_path)
    if FOLDERS:
        with pytest.raises(ValueError, match="no rows of 'fft'; there are"):
            final_report.build(FOLDERS[0], "fft")


@pytest.mark.skipif(not FOLDERS, reason="no rows of a GPU")
def test_final_report_says_what_exercises_took(made):
    """Passed of all and hints by day, from the progress file; an exercise that is gone does not count."""
    text = made["own"].split("## Exercises")[1]
    assert "## Exercises" not in made[".md"].read_text(), "the page that is kept has nothing of a learner's own"
    days = list(dict.fromkeys(e.folder for e in source.discover()))
    sizes = [len(source.find(day)) for day in days]
    assert f"3 of {sum(sizes)} passed, 2 of them without a hint; 5 hints and 13 checks in all." in text
    assert [line for line in text.splitlines() if line.startswith("|")] == [
        f"|  | {' | '.join(days)} |",
        "|" + "---|" * (len(days) + 1),
        f"| passed | {' | '.join(f'{p} of {n}' for p, n in zip([2, 1, *[0] * len(days)], sizes, strict=False))} |",
        f"| hints used | {' | '.join(map(str, [5, *[0] * (len(days) - 1)]))} |",
    ]
    assert "hints and 13 checks" in made[".html"].read_text()


@pytest.mark.skipif(not FOLDERS, reason="no rows of a GPU")
def test_final_report_says_nothing_where_no_exercise_was_begun():
    headings = [block.heading for block in final_report.build(FOLDERS[0])[1]]
    assert "Where a library is faster, and the next hour" in headings
    assert "Exercises" not in headings
    progress.start(source.find("mul")[0])
    progress.update(source.find("mul")[0])  # opened, and nothing tried
    assert "Exercises" not in [block.heading for block in final_report.build(FOLDERS[0])[1]]
    progress.update(source.find("mul")[0], checks=1)
    assert "Exercises" in [block.heading for block in final_report.build(FOLDERS[0])[1]]
