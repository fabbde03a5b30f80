"""Day 5's report and guides: they build from rows alone, and nobody typed a measured number."""

import ast
import re
from pathlib import Path

from lessonkit import report
from lessonkit.lesson import ROOT

import pytest

from day5_tuning import compared, final, lesson06_roofline, lesson08_final_report, results

MEASURED = re.compile(r"\d[\d.,]*\s?(?:%|x\b|times|us\b|ms\b|TB/s|TFLOP/s)")
WRITERS = (compared, lesson06_roofline, lesson08_final_report, results)
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


@pytest.mark.skipif(not FOLDERS, reason="no rows of a GPU")
def test_final_report_builds_from_committed_rows(tmp_path):
    title, blocks = lesson08_final_report.build(FOLDERS[0])
    made = {path.suffix: path for path in final.write(tmp_path, title, blocks)}
    assert len(re.findall(rb"/Type /Page\b", made[".pdf"].read_bytes())) <= 2
    text = made[".md"].read_text()
    for contest in results.contests(FOLDERS[0]):
        assert f"| {contest.name} |" in text
        assert f"{contest.best.ms_p50:.4g}" in text
    assert 'src="data:image/png;base64,' in made[".html"].read_text()
    assert "http" not in made[".html"].read_text()  # works offline


def test_final_report_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="no rows in"):
        lesson08_final_report.build(tmp_path)
    if FOLDERS:
        with pytest.raises(ValueError, match="no rows of 'fft'; there are"):
            lesson08_final_report.build(FOLDERS[0], "fft")
