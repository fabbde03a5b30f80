"""Paths through the course, one for each time that a reader has: paths/*.toml says the steps and what is handed in.

All else is taken from where it stands: titles and hours from lessons, Chinese words from the catalogue, exercises from
their folders. A lesson or an exercise that is not there, or minutes that do not add up, raise ValueError. A part with
more or less than its hours is a warning (`Route.warnings`), so that a new exercise does not stop `report`.

    minutes = 60                            of the whole path; or `hours = [6, 8]`, the least and most of a day or week
    [[part]]
    plan = [
      "day2_triton_basics.lesson04_sum",    a lesson, for as long as it says
      { lesson = "...", minutes = 8, parts = ["top", "add_block"], en = "which parts of it", zh = "..." },
      { exercises = ["mul"] },              so many times 20 minutes
      { exercises = ["day2"] },             those of a folder that the path names nowhere else
      { exercises = ["day2"], hours = 1 },  as many of them as fit
      { minutes = 30, en = "anything else", zh = "..." },
    ]
    commands = ["check lesson04_sum"]       after `python3 course.py`
    hand_in, checklist = [{ en = "...", zh = "..." }]
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from lessonkit.base.files import ROOT
from lessonkit.base.words import translated
from lessonkit.exercise import source
from lessonkit.exercise.source import Source
from lessonkit.pages import guides, minutes
from lessonkit.pages.guides import GUIDES

FOLDER = ROOT / "paths"
EXERCISE = 20  # minutes, for a reader of the lesson
WRITING = 5  # minutes at least, behind the reading of an exercise's task
Words = dict[str, str]  # by language


@dataclass(frozen=True)
class Item:
    """A line of a plan: a lesson or parts of it, exercises (`boxed`: as many as fit), or only what the text says."""

    minutes: float
    lesson: str = ""
    parts: tuple[str, ...] = ()  # of the lesson, where it is not read as a whole
    exercises: tuple[Source, ...] = ()
    boxed: bool = False
    text: Words = field(default_factory=dict)

    @property
    def least(self) -> float:
        """The minutes that it takes to read, by the pace of pages.minutes; an exercise takes more than its task."""
        if self.lesson and not self.parts:
            return minutes.reading(self.lesson).minutes
        if self.lesson:
            return sum(minutes.part(self.lesson, part).minutes for part in self.parts)
        tasks = [minutes.of_text(each.stub, ".cu" if each.is_cuda else ".py") for each in self.exercises]
        return sum(task.minutes + WRITING for task in tasks) if not self.boxed else 0


@dataclass(frozen=True)
class Part:
    """Some minutes, a day that has a guide of its own (`day`), or `units` weeks. `stage`: what begins with it."""

    title: Words
    items: tuple[Item, ...]
    commands: tuple[str, ...] = ()
    hand_in: tuple[Words, ...] = ()
    checklist: tuple[Words, ...] = ()
    stage: Words = field(default_factory=dict)
    units: int = 1
    day: bool = False

    @property
    def minutes(self) -> float:
        return sum(item.minutes for item in self.items)


@dataclass(frozen=True)
class Route:
    """A path. `hours`: the least and the most of a unit; nothing where the whole is counted in minutes."""

    name: str
    title: Words
    ends: Words
    about: Words
    hours: tuple[float, ...]
    parts: tuple[Part, ...]

    @property
    def items(self) -> list[Item]:
        return [item for part in self.parts for item in part.items]

    @property
    def warnings(self) -> list[str]:
        """A line for each part whose hours are outside the limits: the file, the part, and what to move where."""
        if not self.hours:
            return []
        found = []
        for part in self.parts:
            takes, (low, high) = part.minutes / 60, (limit * part.units for limit in self.hours)
            room = {p.title["en"]: self.hours[1] * p.units - p.minutes / 60 for p in self.parts if p is not part}
            where = (max if takes > high else min)(room, key=room.__getitem__, default="")
            if low <= takes <= high:
                continue
            if takes < low:
                todo = f"move {low - takes:.2g} hours or more here" + (f" from {where!r}, the fullest" if where else "")
            elif where and room[where] > 0:
                todo = f"move {takes - high:.2g} hours or more to {where!r}, which has room for {room[where]:.2g}"
            else:
                todo = f"move {takes - high:.2g} hours or more to a new part, as no other has room"
            said = f"{part.title['en']!r} takes {takes:.4g} hours, expected {low:g} to {high:g}"
            found.append(f"paths/{self.name}.toml: {said}: {todo}")
        return found

    @property
    def lessons(self) -> list[str]:
        return [item.lesson for item in self.items if item.lesson]

    @property
    def exercises(self) -> list[Source]:
        return [exercise for item in self.items for exercise in item.exercises]


def teaches(lesson: str, language: str) -> str:
    """What a lesson teaches, with its links as seen from paths/."""
    folder = lesson.partition(".")[0]
    links = r"\]\((?!\.\./|https?:)"  # those into the folder lead from paths/ there
    return re.sub(links, f"](../{folder}/", translated(guides.about(lesson).teaches, language))


def routes() -> list[Route]:
    """All paths, the shortest first."""
    return [load(path) for path in sorted(FOLDER.glob("*.toml"), key=lambda p: ("nhdw".index(p.stem[-1]), p.stem))]


def load(path: Path) -> Route:
    data = tomllib.loads(path.read_text())
    try:
        named = {s.name for part in data["part"] for item in part["plan"] for s in _named(item)}
        parts = tuple(_part(part, named) for part in data["part"])
        hours = tuple(data.get("hours", ()))
        if not hours and (total := sum(part.minutes for part in parts)) != data["minutes"]:
            raise ValueError(f"its steps take {total:g} minutes, not {data['minutes']}")
    except ValueError as why:
        raise ValueError(f"{path.name}: {why}") from None
    return Route(path.stem, data["title"], data["ends"], data["about"], hours, parts)


def _named(item: Any) -> Iterator[Source]:
    """The exercises that an item names one by one."""
    for word in item.get("exercises", ()) if isinstance(item, dict) else ():
        yield from (s for s in source.find(word) if s.short == word)


def _part(data: dict[str, Any], named: set[str]) -> Part:
    words: Words = data.get("title") or {
        language: (ROOT / data["guide"] / readme).read_text().splitlines()[0].removeprefix("# ")
        for language, readme in GUIDES.items()
    }
    plan = tuple(_item({"lesson": item} if isinstance(item, str) else item, named) for item in data["plan"])
    commands, hand_in, checklist = (tuple(data.get(key, ())) for key in ("commands", "hand_in", "checklist"))
    weeks, stage = data.get("weeks", 1), data.get("stage", {})
    return Part(words, plan, commands, hand_in, checklist, stage, weeks, "guide" in data)


@lru_cache(None)
def _title(text: str) -> str:
    """The first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]


def _item(data: dict[str, Any], named: set[str]) -> Item:
    given = data.get("minutes") or 60 * data.get("hours", 0)
    text = {language: data[language] for language in GUIDES if language in data}
    if lesson := data.get("lesson", ""):
        folder, _, stem = lesson.partition(".")
        if not (file := ROOT / folder / f"{stem}.py").exists():
            raise ValueError(f"there is no lesson {lesson!r}; a lesson is FOLDER.FILE without .py")
        text = text or {"en": _title(file.read_text()), "zh": teaches(lesson, "zh")}
        return Item(given or 60 * guides.about(lesson).hours, lesson, tuple(data.get("parts", ())), text=text)
    if not (words := data.get("exercises", ())):
        return Item(given, text=text)
    found: list[Source] = []
    for word in words:
        if not list(ROOT.glob(f"{word}*/README.md")) and [s.short for s in source.find(word)] != [word]:
            raise ValueError(f"there is no exercise {word!r}")
        found += [s for s in source.find(word) if s.short == word or s.name not in named]
    time = given or EXERCISE * len(found)
    return Item(time if found else 0, "", (), tuple(found), boxed=bool(given) and len(found) > 1, text=text)
