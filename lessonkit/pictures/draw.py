"""A small vocabulary to draw with: boxes, arrows, lanes of a timeline, grids, labels; the result is one SVG.

A canvas is 360 units wide, the width of a phone, and grows downwards. Colours are CSS variables with a light and a dark
value (`prefers-color-scheme`); a page may set them itself. The canvas keeps the box of each label, so that a test sees
labels that overlap or are cut off.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

from lessonkit.base.words import translated

WIDTH, MARGIN = 360, 8
SMALLEST, NORMAL, TITLE = 8.0, 11.0, 13.0
# kind: fill in light and in dark. Labels are in --ink on each of them.
KINDS = {
    "a": ("#b9d9f7", "#1d4f80"),
    "b": ("#fbd3a1", "#7d4a0c"),
    "c": ("#c3e6bd", "#2a6130"),
    "d": ("#dccbf2", "#553a80"),
    "e": ("#f6bcc4", "#862b3c"),
    "off": ("#e3e6ea", "#3a424c"),
    "none": ("none", "none"),
}
INK, FAINT, PAPER = ("#1a1f26", "#eef1f5"), ("#6a737d", "#a3adb8"), ("#ffffff", "#14181d")
BOLD = 1.13  # how much wider bold text is
_CENTRE = 0.36  # from a line's middle to its baseline, in font sizes


@dataclass(frozen=True)
class Say:
    """Words of a picture: English, with {fields}; the catalogue has them in other languages.

    Without values the fields stay: the script of a moving figure fills them.
    """

    english: str
    values: tuple[tuple[str, Any], ...] = ()

    def to(self, language: str) -> str:
        template = translated(self.english, language)
        return template.format(**dict(self.values)) if self.values else template


def say(english: str, **values: Any) -> Say:
    return Say(english, tuple(values.items()))


Words = Say | str  # a str is the same in all languages: a name of the code, a number


def text_width(text: str, size: float) -> float:
    """About how wide a sans-serif font sets a text, by a wide one (DejaVu Sans); Chinese characters are square."""
    return size * sum(_em(letter) for letter in text)


def _em(letter: str) -> float:
    if unicodedata.east_asian_width(letter) in "WF" or letter == "…":
        return 1.0
    if letter in "iljftr.,:;|!'()[] ":
        return 0.37
    if letter in "mwMW@%":
        return 0.95
    return 0.72 if letter.isupper() or letter in "+=<>×→≥≤" else 0.62


@dataclass(frozen=True)
class Label:
    """The place of one line of text."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Label") -> bool:
        across = min(self.right, other.right) - max(self.left, other.left)
        return across > 0.5 and min(self.bottom, other.bottom) - max(self.top, other.top) > 0.5


Span = tuple[float, float, str, Words]  # of a lane: start, length, kind, label


@dataclass
class Canvas:
    """What a picture draws on. `y` is where the next part may begin; parts move it down."""

    language: str = "en"
    name: str = "picture"  # of the picture: a page may show several, and an id stands once in it
    y: float = MARGIN
    parts: list[str] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    cramped: list[str] = field(default_factory=list)  # labels that are wider than their boxes
    said: list[Say] = field(default_factory=list)
    lowest: float = 0.0

    def words(self, words: Words) -> str:
        if isinstance(words, str):
            return words
        self.said.append(words)
        return words.to(self.language)

    def text(
        self, x: float, y: float, words: Words, size: float = NORMAL, anchor: str = "start", kind: str = "ink"
    ) -> None:
        """One line, y is its middle. kind: ink, faint or bold."""
        line = self.words(words)
        wide = text_width(line, size) * (BOLD if kind == "bold" else 1)
        left = x - wide * {"start": 0, "middle": 0.5, "end": 1}[anchor]
        self.labels.append(Label(line, left, y - size * 0.42, left + wide, y + size * 0.42))
        base = y + _CENTRE * size
        self.parts.append(
            f'<text class="{kind}" x="{x:.1f}" y="{base:.1f}" font-size="{size:g}" text-anchor="{anchor}">'
            f"{escape(line)}</text>"
        )
        self._down(y + size / 2)

    def paragraph(self, words: Words, size: float, kind: str = "ink") -> None:
        """Words over the canvas's width, in as many lines as they need."""
        for line in wrapped(self.words(words), size * (BOLD if kind == "bold" else 1), WIDTH - 2 * MARGIN):
            self.text(MARGIN, self.y + size * 0.65, line, size, kind=kind)
            self.y += size * 1.3

    def gap(self, height: float) -> None:
        self.y += height

    def box(
        self, x: float, y: float, w: float, h: float, kind: str = "a", label: Words = "", size: float = NORMAL
    ) -> None:
        """A rectangle with a label in its middle, which is set smaller where it would not fit."""
        thin = " thin" if min(w, h) < 6 else ""  # an outline would hide so small a colour
        self.parts.append(
            f'<rect class="k-{kind}{thin}" x="{x:.1f}" y="{y:.1f}" width="{max(w, 0.5):.1f}" height="{h:.1f}" '
            f'rx="{min(2, w / 4, h / 4):.2g}"/>'
        )
        if label:
            shown = self.words(label)
            fits = max(SMALLEST, min(size, size * (w - 2) / max(text_width(shown, size), 1), h))
            if text_width(shown, fits) > w:
                self.cramped.append(shown)
            self.text(x + w / 2, y + h / 2, shown, fits, "middle")
        self._down(y + h)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="3 2"' if dashed else ""
        self.parts.append(
            f'<path class="line" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"{dash} marker-end="url(#{self._head})"/>'
        )
        self._down(max(y1, y2))

    def line(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="3 2"' if dashed else ""
        self.parts.append(f'<path class="line" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"{dash}/>')
        self._down(max(y1, y2))

    def grid(
        self, x: float, y: float, cell: tuple[float, float], kinds: Sequence[Sequence[str]],
        labels: Sequence[Sequence[Words]] = (), size: float = NORMAL,
    ) -> None:  # fmt: skip
        """Cells of one size, (width, height); kinds and labels are tables of rows."""
        for r, row in enumerate(kinds):
            for column, kind in enumerate(row):
                label = labels[r][column] if labels else ""
                self.box(x + column * cell[0], y + r * cell[1], cell[0], cell[1], kind, label, size)

    def lane(self, name: Words, spans: Iterable[Span], scale: float, left: float = 76, height: float = 20) -> None:
        """One line of a timeline: a name, and spans (start, length, kind, label) in units of which one is `scale`."""
        if name:
            shown = self.words(name)
            size = min(NORMAL, NORMAL * (left - MARGIN - 4) / max(text_width(shown, NORMAL), 1))
            self.text(MARGIN, self.y + height / 2, shown, max(size, SMALLEST))
        top = self.y
        for start, length, kind, label in spans:
            self.box(left + start * scale, top, length * scale, height, kind, label, NORMAL)
        self.y = top + height + 3

    def legend(self, entries: Sequence[tuple[str, Words]]) -> None:
        """What the colours mean, in as many lines as they need."""
        x, top = float(MARGIN), self.y
        for kind, words in entries:
            shown = self.words(words)
            wide = 16 + text_width(shown, NORMAL) + 10
            if x + wide > WIDTH and x > MARGIN:
                x, top = MARGIN, top + 15
            self.box(x, top + 2, 11, 11, kind)
            self.text(x + 15, top + 7.5, shown, NORMAL)
            x += wide
        self.y = top + 18

    @property
    def _head(self) -> str:
        return f"lk-head-{self.name}"

    def _down(self, y: float) -> None:
        self.lowest = max(self.lowest, y)

    @property
    def height(self) -> float:
        return max(self.y, self.lowest) + MARGIN

    def svg(self, title: str, description: str) -> str:
        """The whole picture, with title and description for screen readers."""
        language = {"en": "en", "zh": "zh-CN"}[self.language]
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="lk-picture" viewBox="0 0 {WIDTH} {self.height:.0f}" '
            f'width="100%" role="img" lang="{language}" style="max-width:{2 * WIDTH}px">'
            f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
            f"<style>{STYLE}</style>"
            f'<defs><marker id="{self._head}" viewBox="0 0 6 6" refX="5.5" refY="3" markerWidth="6" markerHeight="6" '
            'orient="auto"><path class="head" d="M0 0L6 3L0 6z"/></marker></defs>'
            f'<rect class="paper" width="{WIDTH}" height="{self.height:.0f}"/>{"".join(self.parts)}</svg>\n'
        )


def wrapped(text: str, size: float, width: float) -> list[str]:
    """Lines no wider than `width`: broken at spaces, and before any Chinese character but punctuation."""
    lines, line = list[str](), ""
    for piece in _pieces(text):
        if line and text_width((line + piece).rstrip(), size) > width:
            lines.append(line.rstrip())
            line = piece.lstrip()
        else:
            line += piece
    return [*lines, line.rstrip()]


def _pieces(text: str) -> list[str]:
    pieces, word = list[str](), ""
    for letter in text:
        wide = unicodedata.east_asian_width(letter) in "WF"
        if wide and unicodedata.category(letter).startswith("P"):
            word += letter  # a comma stays with the word before it
        elif wide:
            if word:
                pieces.append(word)
            word = letter
        elif letter == " ":
            pieces.append(word + " ")
            word = ""
        elif word and unicodedata.east_asian_width(word[-1]) in "WF":
            pieces.append(word)
            word = letter
        else:
            word += letter
    return [*pieces, word]


def _colours(theme: int) -> str:
    pairs = {"ink": INK, "faint": FAINT, "paper": PAPER, **KINDS}
    return "".join(f"--lk-{name}:{colours[theme]};" for name, colours in pairs.items())


# In a page whose reader chooses between light and dark, whatever the system prefers.
THEMES = "".join(f"html.{name} .lk-picture{{{_colours(n)}}}" for n, name in enumerate(("light", "dark")))
STYLE = (
    f".lk-picture{{{_colours(0)}font-family:system-ui,sans-serif;background:var(--lk-paper)}}"
    f"@media(prefers-color-scheme:dark){{.lk-picture{{{_colours(1)}}}}}"
    ".lk-picture text{fill:var(--lk-ink)}.lk-picture .faint{fill:var(--lk-faint)}.lk-picture .bold{font-weight:600}"
    ".lk-picture .paper{fill:var(--lk-paper)}.lk-picture .head{fill:var(--lk-ink)}"
    ".lk-picture .line{stroke:var(--lk-ink);fill:none;stroke-width:1}"
    + "".join(
        f".lk-picture .k-{kind}{{fill:var(--lk-{kind});stroke:var(--lk-faint);stroke-width:.6}}" for kind in KINDS
    )
    + ".lk-picture .thin{stroke:none}"
)
