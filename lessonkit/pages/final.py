"""A report of headings, paragraphs, tables and figures, as Markdown, as one HTML file, and as a PDF of A4 pages.

Works offline: HTML carries its figures inside, the PDF is drawn by matplotlib.
"""

import base64
import html
import io
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lessonkit.base.markdown import markdown
from lessonkit.measure import rows
from lessonkit.pages import plots


@dataclass(frozen=True)
class Block:
    """A heading, a paragraph, a table (its rows), a figure (its name, its data, draw(axes)), or several of these."""

    heading: str = ""
    text: str = ""
    table: tuple[dict[str, Any], ...] = ()
    figure: str = ""
    data: object = None
    draw: Callable[[Any], None] | None = None


def write(folder: Path, title: str, blocks: Sequence[Block]) -> list[Path]:
    """final_report.md, .html, .pdf and the figures beside them; returns what was written."""
    images = {b.figure: plots.plot(b.draw, b.data).png() for b in blocks if b.draw}
    made: dict[Path, str | bytes] = {folder / f"final_report.{name}.png": png for name, png in images.items()}
    made[folder / "final_report.md"] = as_markdown(title, blocks)
    made[folder / "final_report.html"] = as_html(title, blocks, images)
    made[folder / "final_report.pdf"] = as_pdf(title, blocks)
    for path, content in made.items():
        rows.write_atomically(path, content)
    return list(made)


def as_markdown(title: str, blocks: Sequence[Block]) -> str:
    parts = [f"# {title}\n"]
    for b in blocks:
        if b.heading:
            parts.append(f"## {b.heading}\n")
        if b.text:
            parts.append(f"{b.text}\n")
        if b.table:
            parts.append(markdown(b.table[0], (row.values() for row in b.table)))
        if b.figure:
            parts.append(f"![{b.figure}](final_report.{b.figure}.png)\n")
    return "\n".join(parts)


STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:24px auto;padding:0 16px;color:#1b1f24}
table{border-collapse:collapse;font-size:12px;width:100%}td,th{border-bottom:1px solid #d0d7de;padding:3px 6px;
text-align:left}th{background:#f6f8fa}img{max-width:100%}h2{margin:20px 0 6px}"""


def as_html(title: str, blocks: Sequence[Block], images: dict[str, bytes]) -> str:
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for b in blocks:
        parts += [f"<h2>{html.escape(b.heading)}</h2>"] * bool(b.heading)
        parts += [f"<p>{html.escape(b.text)}</p>"] * bool(b.text)
        if b.table:
            head = "".join(f"<th>{html.escape(key)}</th>" for key in b.table[0])
            cells = ("".join(f"<td>{html.escape(str(v))}</td>" for v in row.values()) for row in b.table)
            parts.append(f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>")
        if b.figure:
            data = base64.b64encode(images[b.figure]).decode()
            parts.append(f'<img alt="{html.escape(b.figure)}" src="data:image/png;base64,{data}">')
    head = f"<meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en>{head}{''.join(parts)}</html>\n"


WIDE, HIGH, MARGIN = 8.27, 11.69, 0.55  # A4 in inches
FIGURE = 3.6


def as_pdf(title: str, blocks: Sequence[Block]) -> bytes:
    """Blocks from the top of a page down; a block that does not fit begins the next page."""
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    out = io.BytesIO()
    pages = [Figure(figsize=(WIDE, HIGH))]
    top = HIGH - MARGIN

    def room(inches: float, with_next: float = 0) -> float:
        """Where the next block of this height begins, from the bottom of a page with room for what follows too."""
        nonlocal top
        if top - inches - with_next < MARGIN:
            pages.append(Figure(figsize=(WIDE, HIGH)))
            top = HIGH - MARGIN
        top -= inches
        return top

    def say(text: str, size: float, weight: str = "normal", columns: int = 112, with_next: float = 0) -> None:
        lines = textwrap.wrap(text, columns)
        at = room(len(lines) * size * 0.0178 + 0.06, with_next)
        pages[-1].text(MARGIN / WIDE, (at + 0.03) / HIGH, "\n".join(lines), fontsize=size, weight=weight, va="bottom",
                       linespacing=1.25)  # fmt: skip

    say(title, 15, "bold", 70)
    for b in blocks:
        if b.heading:
            room(0.1)
            say(b.heading, 11, "bold", with_next=0.5 + 0.145 * min(len(b.table), 8) + FIGURE * bool(b.draw))
        if b.text:
            say(b.text, 8.5)
        if b.table:
            _pdf_table(pages, room, b.table)
        if b.draw:
            at = room(FIGURE)
            b.draw(pages[-1].add_axes((0.1, (at + 0.75) / HIGH, 0.85, (FIGURE - 0.95) / HIGH)))
    with PdfPages(out, metadata={"Title": title, "CreationDate": None}) as pdf:
        for page in pages:
            pdf.savefig(page)
    return out.getvalue()


def _pdf_table(pages: list[Any], room: Callable[..., float], table: Sequence[dict[str, Any]]) -> None:
    """Columns as wide as what they hold, in the largest type that fits, up to 7; a line is 0.145 inches high."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    lines = [list(table[0]), *([str(v) for v in row.values()] for row in table)]

    font = FontProperties(size=10)

    def width(text: str) -> float:
        return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]) / 10

    widths = [
        max(map(width, column)) * (1.12 if i == 0 else 1.06) + 1.2 for i, column in enumerate(zip(*lines, strict=True))
    ]
    size = min(7.0, (WIDE - 2 * MARGIN) * 72 / sum(widths))
    height = len(lines) * 0.145
    at = room(height + 0.08) + height
    for n, line in enumerate(lines):
        x = MARGIN
        for text, wide in zip(line, widths, strict=True):
            pages[-1].text(x / WIDE, (at - 0.145 * (n + 0.5)) / HIGH, text, fontsize=size, va="center",
                           weight="bold" if n == 0 else "normal")  # fmt: skip
            x += wide * size / 72
