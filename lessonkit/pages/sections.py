"""A page of this machine that several lessons write, each its own sections."""

import re
from collections.abc import Mapping
from pathlib import Path

from lessonkit.base.files import write_atomically
from lessonkit.measure.rows import machine


def write_sections(page: Path, title: str, sections: Mapping[str, str]) -> str:
    """Put sections (heading -> Markdown) into a page; the others stay. Returns all of it.

    The file is replaced in one step, so that a stopped run leaves the old one.
    """
    text = page.read_text() if page.exists() else ""
    kept = dict(part.split("\n", 1) for part in re.split("^## ", text, flags=re.MULTILINE)[1:])
    about = machine()
    head = f"# {title}: {about['gpu']}\n\n{about['date']}, commit {about['commit']}.\n"
    body = [f"## {name}\n\n{text.strip()}\n" for name, text in (kept | dict(sections)).items()]
    everything = "\n".join([head, *body])
    write_atomically(page, everything)
    return everything
