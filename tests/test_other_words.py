"""The course in other words: each page has the figures that it had, for none is read out of prose."""

import codecs
import re
import shutil
import subprocess
import sys

from lessonkit.base import prose
from lessonkit.base.files import ROOT, environment

import pytest

KEPT = re.compile(r"(\{[^}]*\}|`[^`]*`|\[[^\]]*\]\([^)]*\)|\d[\d,.]*)")  # code, links and figures
OF_LESSONS = re.compile(r"(day\d|cuda_src/(?!emulator)|problems/).*\.(py|cu|cuh)")
LINES = re.compile(r"lessonkit/README.*")  # it counts the lines of files, which other words break elsewhere
# Pictures are no tables: some draw a number that a lesson's text states, and fail if it says it otherwise.
REPORT = """
import sys
from pathlib import Path
from lessonkit.pictures import numbers
numbers.ROOT = Path(sys.argv.pop())
from lessonkit.__main__ import app
app(["report"])
"""


def in_other_words(text: str) -> str:
    parts = enumerate(KEPT.split(text))  # every second one is kept
    return "".join(part if nth % 2 else codecs.encode(part, "rot13") for nth, part in parts)


def facts(text: str) -> list[list[str]]:
    """The cells of a page's tables that are figures, by line."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line if re.fullmatch(r"[\s\d.,%*+-]*\d[\s\d.,%*+-]*", cell)] for line in lines]


@pytest.mark.night
def test_no_page_has_other_figures(tmp_path):
    """Docstrings, comments and the declarations' sentences of all lessons, programs and problems are replaced."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    names, changed = [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()], 0
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if OF_LESSONS.fullmatch(name):
            before = (ROOT / name).read_text()
            after = prose.read_as(before, (ROOT / name).suffix, in_other_words)
            (tmp_path / name).write_text(after)
            changed += after != before
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    assert changed > 200
    env = environment() | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", REPORT, str(ROOT)], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert not done.returncode, done.stdout[-2000:] + done.stderr[-2000:]
    pages = [name for name in names if name.endswith(".md") and not LINES.fullmatch(name)]
    texts = {name: ((ROOT / name).read_text(), (tmp_path / name).read_text()) for name in pages}
    assert sum(before != after for before, after in texts.values()) > 100, "the pages are written anew"
    other = [name for name, (before, after) in texts.items() if facts(before) != facts(after)]
    assert not other, f"a figure there is read out of prose: {', '.join(other)}"
