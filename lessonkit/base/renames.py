"""What lessons, rungs, exercises and reports were called: renames.toml carries rows, progress and names along.

    [lessons]    "day2_triton_basics.lesson05_sum" = "day2_triton_basics.lesson04_sum"
    [rungs]      "day3_matmul_tk.lesson09_matmul_hopper: in_flight" = "async_wgmma"
    [exercises]  "day2_triton_basics.exercise01_old" = "day2_triton_basics.exercise01_mul"
    [reports]    "counts" = "ncu"

A rung stands under any name of its lesson. Chains (a -> b -> c) are followed to their end.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from lessonkit.base.files import ROOT

REPORTS = "reports"
FILE = ROOT / REPORTS / "renames.toml"
KINDS = ("lessons", "rungs", "exercises", "reports")


class Circle(ValueError):
    """A name leads back to itself."""


def lesson(name: str) -> str:
    """What the lesson is called now."""
    return _now("lessons", name)


def rung(lesson_: str, name: str) -> str:
    """What a rung is called now; `lesson_` may be an old name."""
    now = lesson(lesson_)
    return _end(_rungs(text()).get(now, {}), name, f"of {now} ")


def exercise(name: str) -> str:
    """What the exercise is called now."""
    return _now("exercises", name)


def meant(kind: str, asked: str) -> str:
    """The full new name for an old one, or for the part of it behind the folder; "" where nothing was called so."""
    known = _known()[kind]
    old = next((o for o in known if asked in (o, o.rpartition(".")[2])), "")
    return _now(kind, old) if old else ""


def earlier(kind: str, name: str) -> list[str]:
    """The names that something had before."""
    return list(_before(text(), kind).get(name, ()))


def place(path: Path) -> Path:
    """Where a report lies: at its name, else at a name that it had."""
    if path.exists():
        return path
    owner, _, table = path.stem.rpartition(".")  # of a step's table: LESSON.TABLE.csv
    olds = [*earlier("lessons", path.stem), *earlier("reports", path.stem)]
    olds += [f"{old}.{table}" for old in earlier("lessons", owner)]
    places = (path.with_name(f"{old}{path.suffix}") for old in olds)
    return next((here for here in places if here.exists()), path)


def relinked(page: Path, content: str) -> str:
    """A page's text with its links to what has another name now."""
    return re.sub(r"(?<=\]\()[^)#\s:]+", lambda found: link(page, found[0]), content)


def link(page: Path, target: str) -> str:
    """Where a page's link leads now: to a lesson's file, an exercise's, or a report of one."""
    old = Path(os.path.normpath(page.parent / target))
    try:
        inside = old.relative_to(ROOT)
    except ValueError:
        return target
    if inside.parts[0] == REPORTS:
        owner, _, part = inside.stem.rpartition(".")  # LESSON, or LESSON.TABLE
        named = f"{lesson(owner)}.{part}" if lesson(owner) != owner else lesson(inside.stem)
        new = old.with_name(f"{_now('reports', named)}{old.suffix}")
    elif inside.parent.name == "exercises":
        named = exercise(f"{inside.parts[0]}.{inside.stem}")
        new = ROOT / named.partition(".")[0] / "exercises" / f"{named.partition('.')[2]}{old.suffix}"
    else:
        named = ".".join(inside.with_suffix("").parts)
        if (now := lesson(named)) == named:
            return target  # README.zh-CN.md: a dot in a file's name is none of a lesson's
        new = ROOT / f"{now.replace('.', '/')}{old.suffix}"
    return target if new == old or old.suffix == "" else os.path.relpath(new, page.parent)


def known() -> bool:
    """Whether anything was ever renamed."""
    return any(_known().values())


def _now(kind: str, name: str) -> str:
    return _end(_known()[kind], name)


def _end(known: Mapping[str, str], name: str, whose: str = "") -> str:
    seen = [name]
    while seen[-1] in known:
        following = known[seen[-1]]
        if following in seen:
            raise Circle(f"{FILE.name}: {' -> '.join([*seen, following])} {whose}goes in a circle")
        seen.append(following)
    return seen[-1]


def _known() -> Mapping[str, Mapping[str, str]]:
    return _parsed(text())


def text() -> str:
    """The file as it stands."""
    return FILE.read_text() if FILE.exists() else ""


@lru_cache(8)
def _parsed(content: str) -> Mapping[str, Mapping[str, str]]:
    found = tomllib.loads(content)
    if unknown := set(found) - set(KINDS):
        raise ValueError(f"{FILE.name}: {', '.join(sorted(unknown))} is none of {', '.join(KINDS)}")
    return {kind: found.get(kind, {}) for kind in KINDS}


@lru_cache(8)
def _rungs(content: str) -> Mapping[str, Mapping[str, str]]:
    """For each lesson of today, its rungs that had another name."""
    known = _parsed(content)
    found: dict[str, dict[str, str]] = {}
    for key, new in known["rungs"].items():
        owner, _, old = key.partition(": ")
        found.setdefault(_end(known["lessons"], owner), {})[old] = new
    return found


@lru_cache(32)
def _before(content: str, kind: str) -> Mapping[str, list[str]]:
    """For each name of today, those that came before it."""
    known = _parsed(content)[kind]
    found: dict[str, list[str]] = {}
    for old in known:
        found.setdefault(_end(known, old), []).append(old)
    return found
