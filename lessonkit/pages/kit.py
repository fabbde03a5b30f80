"""The tables of lessonkit/README.md: how many lines each room has, and what each module of the kit is for."""

import ast
from pathlib import Path

from lessonkit.base.files import ROOT
from lessonkit.base.markdown import markdown
from lessonkit.base.words import heads, later

KIT = ROOT / "lessonkit"
CODE = (".py", ".cu", ".cuh", ".h", ".hpp", ".cpp", ".js")
# From left to right: each imports only groups to its left. A group is a folder, or single modules.
GROUPS = (
    ("base",),
    ("lesson", "validate"),
    ("pictures",),
    ("cuda",),
    ("modes",),
    ("judge",),
    ("exercise",),
    ("measure",),
    ("pages",),
    ("web",),
    ("commands",),
    ("command_line", "__main__"),
)
LINES = later("room | lines of code, to the nearest thousand")


def lines(language: str) -> str:
    """Rounded, or each new line would make the page old."""
    rooms = ["problems", *sorted(path.name for path in ROOT.glob("day*_*")), "cuda_src", "course_ops", "workloads"]
    body = []
    for room in [*rooms, "lessonkit", "tests"]:
        files = (path for path in (ROOT / room).rglob("*") if path.suffix in CODE)
        count = sum(len(path.read_text().splitlines()) for path in files)
        body.append([f"`{room}/`", f"{round(count, -3):,}" if count >= 1000 else "< 1,000"])
    return markdown(heads(LINES, language), body)


def modules() -> str:
    """A line for each module: its group, its name, the first line of its docstring. In English, as docstrings are."""
    body = []
    for group in GROUPS:
        for name in group:
            paths = sorted((KIT / name).rglob("*.py")) or [KIT / f"{name}.py"]
            body += [[f"`{name}`", _link(path), _first_line(path)] for path in paths if path.stem != "__init__"]
    return markdown(("group", "module", "what it is for"), body)


def _link(path: Path) -> str:
    return f"[{path.stem}]({path.relative_to(KIT).as_posix()})"


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0].replace("|", "\\|")
