"""Which pictures there are, and how one becomes an SVG or an HTML fragment."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from lessonkit.base.errors import Misdeclared
from lessonkit.lesson import Broken, discover
from lessonkit.pictures.draw import NORMAL, TITLE, Canvas, Say, say
from lessonkit.pictures.moving import Figure

Draw = Callable[[Canvas, str], None]  # on a canvas, for the lesson of this name
MODULES = ("row_kernels", "matmul", "kittens", "attention", "cuda_kernels", "machine")


@dataclass(frozen=True)
class Picture:
    """One picture of one lesson. name: as the lesson's `about` has it; a figure moves in the page, if there is one."""

    name: str
    lesson: str
    heading: Say
    description: Say
    draw: Draw
    figure: Figure | None = None

    def title(self, language: str = "en") -> str:
        return self.heading.to(language)

    def canvas(self, language: str = "en") -> Canvas:
        """The drawing with its labels, before it is an SVG."""
        canvas = Canvas(language, self.name)
        canvas.paragraph(self.heading, TITLE, "bold")
        canvas.gap(6)
        self.draw(canvas, self.lesson)
        return canvas

    def svg(self, language: str = "en") -> str:
        return self.canvas(language).svg(self.title(language), self.description.to(language))

    def moving(self, language: str = "en") -> str:
        """The figure that moves as an HTML fragment: a div, its data and its script; "" if there is none."""
        return self.figure.fragment(self.title(language), language) if self.figure else ""


@dataclass(frozen=True)
class _Kind:
    heading: Say
    description: Say
    draw: Draw
    figure: Figure | None


_KINDS: dict[str, _Kind] = {}


def picture(heading: str, description: str, figure: Figure | None = None) -> Callable[[Draw], Draw]:
    """Register a function as the picture of its name."""

    def register(draw: Draw) -> Draw:
        _KINDS[draw.__name__] = _Kind(say(heading), say(description), draw, figure)
        return draw

    return register


@cache
def kinds() -> dict[str, _Kind]:
    for module in MODULES:
        importlib.import_module(f"lessonkit.pictures.{module}")
    return _KINDS


def of(lesson: str) -> list[Picture]:
    """The pictures that a lesson names, in its order. Raises Misdeclared for a name that no picture has."""
    found = dict(discover(lesson))
    if lesson not in found:
        raise Misdeclared(f"there is no lesson {lesson!r}: name one in full, as `python -m lessonkit list` does")
    declared = found[lesson]
    if isinstance(declared, Broken):
        raise Misdeclared(f"{lesson} cannot be imported: {declared.error}")
    pictures = []
    for name in declared.about.pictures if declared.about else ():
        if name not in kinds():
            raise Misdeclared(f"{lesson} names the picture {name!r}; there are {', '.join(sorted(kinds()))}")
        kind = kinds()[name]
        pictures.append(Picture(name, lesson, kind.heading, kind.description, kind.draw, kind.figure))
    return pictures


def all_pictures() -> list[Picture]:
    """The pictures of all lessons, in reading order."""
    named = [name for name, lesson in discover() if not isinstance(lesson, Broken)]
    return [picture for name in named for picture in of(name)]


def caption(canvas: Canvas, english: str, **values: object) -> None:
    """A line or two below the drawing."""
    canvas.gap(2)
    canvas.paragraph(say(english, **values), NORMAL, "faint")
