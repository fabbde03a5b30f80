"""A report of headings, paragraphs, tables and figures, as Markdown, as one HTML file, and as a PDF of A4 pages.

Works offline: HTML carries its figures inside, the PDF is drawn by matplotlib.
"""

import base64
import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lessonkit.base.files import write_atomically
from lessonkit.base.markdown import markdown
from lessonkit.pages import plots


@dataclass(frozen=True)
class Block:
    """A heading, a paragraph, a list, a table (its rows), a figure (name, alt text, data, draw(axes)), or several.

    page: begins a new page. own: a learner's alone, which the page that is kept in the repository leaves out.
    In a table a cell of `**words**` is bold; in text and lists `words` are code. A star that is shown is `\\*`.
    """

    heading: str = ""
    text: str = ""
    items: tuple[str, ...] = ()
    table: tuple[dict[str, Any], ...] = ()
    figure: str = ""
    alt: str = ""
    data: object = None
    draw: Callable[[Any], None] | None = None
    page: bool = False
    own: bool = False


def picture(block: Block) -> str:
    """The file of a block's figure."""
    return f"final_report.{block.figure}.png"


def write(folder: Path, title: str, blocks: Sequence[Block]) -> list[Path]:
    """final_report.md, .html, .pdf and the figures beside them; returns what was written."""
    images = {picture(b): plots.plot(b.draw, b.data).png() for b in blocks if b.draw}
    made: dict[Path, str | bytes] = {folder / name: png for name, png in images.items()}
    made[folder / "final_report.md"] = as_markdown(title, blocks)
    made[folder / "final_report.html"] = as_html(title, blocks, images)
    made[folder / "final_report.pdf"] = as_pdf(title, blocks)
    for path, content in made.items():
        write_atomically(path, content)
    return list(made)


def as_markdown(title: str, blocks: Sequence[Block]) -> str:
    """The page, without what is a learner's own."""
    parts = [f"# {title}\n"]
    for b in (b for b in blocks if not b.own):
        if b.heading:
            parts.append(f"## {b.heading}\n")
        if b.text:
            parts.append(f"{b.text}\n")
        if b.table:
            parts.append(markdown(b.table[0], (row.values() for row in b.table)))
        if b.items:
            parts.append("".join(f"- {item}\n" for item in b.items))
        if b.figure:
            parts.append(f"![{b.alt}]({picture(b)})\n")
    return "\n".join(parts)


STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:24px auto;padding:0 16px;color:#1b1f24}
table{border-collapse:collapse;font-size:12px;width:100%}td,th{border-bottom:1px solid #d0d7de;padding:3px 6px;
text-align:left}th{background:#f6f8fa}img{max-width:100%}h2{margin:20px 0 6px}"""


def as_html(title: str, blocks: Sequence[Block], images: dict[str, bytes]) -> str:
    """One file that holds its figures."""
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for b in blocks:
        parts += [f"<h2>{html.escape(b.heading)}</h2>"] * bool(b.heading)
        parts += [f"<p>{_marked(b.text)}</p>"] * bool(b.text)
        if b.table:
            head = "".join(f"<th>{html.escape(key)}</th>" for key in b.table[0])
            cells = ("".join(f"<td>{_marked(str(v))}</td>" for v in row.values()) for row in b.table)
            parts.append(f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>")
        if b.items:
            parts.append(f"<ul>{''.join(f'<li>{_marked(item)}</li>' for item in b.items)}</ul>")
        if b.figure:
            data = base64.b64encode(images[picture(b)]).decode()
            parts.append(f'<img alt="{html.escape(b.alt)}" src="data:image/png;base64,{data}">')
    head = f"<meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en>{head}{''.join(parts)}</html>\n"


def _marked(text: str) -> str:
    """Text in HTML: **bold** and `code`."""
    bold = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(unlinked(text)))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", bold).replace("\\*", "*")


def _unmarked(text: str) -> str:
    """Text as a PDF shows it."""
    return unlinked(text).replace("**", "").replace("`", "").replace("\\*", "*")


def unlinked(text: str) -> str:
    """The words of links, whose targets are another folder's."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)


WIDE, HIGH, MARGIN = 8.27, 11.69, 0.5  # A4 in inches
FIGURE = 1.95
TEXT, SIZE, SMALL = 7.4, 6.6, 5.6  # points, of a paragraph, of a table, and of a long one
LONG = 4  # lines


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

    def say(text: str, size: float, weight: str = "normal", with_next: float = 0) -> None:
        lines = _wrapped(_unmarked(text), (WIDE - 2 * MARGIN) * 72 / size, weight == "bold")
        at = room(len(lines) * size * 0.0178 + 0.05, with_next)
        pages[-1].text(MARGIN / WIDE, (at + 0.03) / HIGH, "\n".join(lines), fontsize=size, weight=weight, va="bottom",
                       linespacing=1.25)  # fmt: skip

    say(title, 12.5, "bold")
    for b in blocks:
        if b.page and top < HIGH - MARGIN:
            pages.append(Figure(figsize=(WIDE, HIGH)))
            top = HIGH - MARGIN
        if b.heading:
            room(0.07)
            say(b.heading, 10.5, "bold", with_next=0.4 + 0.12 * min(len(b.table), 8) + FIGURE * bool(b.draw))
        if b.text:
            say(b.text, TEXT)
        if b.table:
            _pdf_table(pages, room, b.table)
        for item in b.items:
            say(f"\u2022 {item}", TEXT)
        if b.draw:
            at = room(FIGURE)
            b.draw(pages[-1].add_axes((0.09, (at + 0.72) / HIGH, 0.86, (FIGURE - 0.82) / HIGH)))
    with PdfPages(out, metadata={"Title": title, "CreationDate": None}) as pdf:
        for page in pages:
            pdf.savefig(page)
    return out.getvalue()


@cache
def _width(text: str, bold: bool) -> float:
    """In units of the type's size."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=10, weight="bold" if bold else "normal")
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]) / 10


def _wrapped(text: str, wide: float, bold: bool) -> list[str]:
    """Lines that are no wider than this, in units of the type's size; a longer word stands alone."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and _width(longer, bold) > wide:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _columns(lines: Sequence[Sequence[str]], wide: float) -> list[float]:
    """Widths of columns that fit into `wide`: each as wide as what it holds, or the widest ones cut to one width."""
    gap = 1.3
    natural = [
        1.05 * max(_width(text, i == 0) for i, text in enumerate(column)) + gap for column in zip(*lines, strict=True)
    ]
    most = max(natural)
    while sum(min(width, most) for width in natural) > wide and most > 4:
        most *= 0.98
    return [min(width, most) for width in natural]


def _pdf_table(pages: list[Any], room: Callable[..., float], table: Sequence[dict[str, Any]]) -> None:
    """Columns as wide as what they hold; what is wider than the page allows is wrapped."""
    size = SMALL if len(table) > LONG else SIZE
    high = size * 0.0178
    lines = [list(table[0]), *([str(v) for v in row.values()] for row in table)]
    plain = [[_unmarked(text) for text in line] for line in lines]
    widths = _columns(plain, (WIDE - 2 * MARGIN) * 72 / size)
    cells = [[_wrapped(text, wide - 1.2, n == 0) for text, wide in zip(line, widths, strict=True)]
             for n, line in enumerate(plain)]  # fmt: skip
    heights = [max(map(len, line)) * high + 0.01 for line in cells]
    at = room(sum(heights) + 0.07) + sum(heights) + 0.02
    for n, (line, said, height) in enumerate(zip(cells, lines, heights, strict=True)):
        x = MARGIN
        for text, cell, wide in zip(line, said, widths, strict=True):
            weight = "bold" if n == 0 or cell.startswith("**") else "normal"
            for i, words in enumerate(text):  # on one base line, whatever its letters
                y = at - 0.09 - i * high
                pages[-1].text(x / WIDE, y / HIGH, words, fontsize=size, va="baseline", weight=weight)
            x += wide * size / 72
        at -= height
        if n == 0:
            _rule(pages[-1], at + 0.015)


def _rule(page: Any, at: float) -> None:
    """A thin line across the page."""
    axes = page.add_axes((MARGIN / WIDE, at / HIGH, 1 - 2 * MARGIN / WIDE, 0.001))
    axes.axhline(0, color="0.6", linewidth=0.6)
    axes.axis("off")
