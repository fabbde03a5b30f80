"""Which page of the book a file of the repository becomes, and Markdown whose links lead there."""

import posixpath
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path, PurePosixPath

from lessonkit.base.files import REPORTS, ROOT
from lessonkit.exercise import quiz, source
from lessonkit.lesson import names
from lessonkit.measure.stale import device_folders
from lessonkit.pages.guides import GUIDES

_TRANSLATED = ".zh-CN.md"
_LINK = re.compile(r"(?<!\\)(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_IMAGE = re.compile(r'(<img src=")(?![a-z]+:)([^"]+)"')
_CODE = re.compile(r"(^(?:```|~~~).*?^(?:```|~~~)\s*$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_OTHER = re.compile(r" ?(?:简体中文|中文|English)[:：] ?\[[^\]]*\]\([^)]*\)[.。]? ?")
HOME = "index"  # lessonkit/web/start.py writes it
COURSE = "course"  # the README of the course


def guides() -> list[Path]:
    """The English pages, written by hand or by `report`, without those that a lesson's page shows.

    A guide has a translation beside it. What a lesson writes about the machine it ran on has none, and gets no page.
    """
    tops = ("README.md", "SYLLABUS.md", "GLOSSARY.md", "CONTRIBUTING.md", "CHANGELOG.md")
    found = [ROOT / name for name in tops if (ROOT / name).exists()]
    for folder in ("day*", "cuda_src", "course_ops", "lessonkit", "paths"):
        found += [p for p in sorted(ROOT.glob(f"{folder}/*.md")) if p.with_name(p.stem + _TRANSLATED).exists()]
    found += [ROOT / "reports/README.md", ROOT / "reports/compiled/targets.md"]
    lessons = set(names())
    found += [p for folder in device_folders() for p in sorted(folder.glob("*.md")) if p.stem not in lessons]
    return [path for path in found if path.exists() and not path.name.endswith(_TRANSLATED)]


def page(path: Path) -> str:
    """The page of a guide: README.md stands at the head of its folder, that of the course beside the start page."""
    if path == ROOT / "README.md":
        return COURSE
    name = path.relative_to(ROOT).with_suffix("")
    return (name.with_name(HOME) if name.name == "README" else PurePosixPath(name.as_posix().lower())).__str__()


def lesson_page(lesson: str) -> str:
    return lesson.replace(".", "/")


def exercise_page(exercise: source.Source) -> str:
    return f"{exercise.folder}/exercises/{exercise.path.stem}"


def quiz_page(folder: str, part: str) -> str:
    return f"{folder}/quiz_{part}"


def heading(folder: str, language: str) -> str:
    """What the guide of a folder is called in its heading, up to the colon: Day 2."""
    guide = ROOT / folder / GUIDES[language]
    return re.split("[:：]", guide.read_text().partition("\n")[0].removeprefix("# "), maxsplit=1)[0]


@cache
def exercises() -> list[source.Source]:
    return source.discover()


@cache
def pages() -> dict[str, str]:
    """File of the repository -> its page."""
    found = {path.relative_to(ROOT).as_posix(): page(path) for path in guides()}
    for lesson in names():
        file = lesson.replace(".", "/")
        shown = [f"{file}.py", f"{file}.cu", f"reports/compiled/{lesson}.md", f"reports/emulated/{lesson}.md"]
        shown += [f"reports/{folder.name}/{lesson}.md" for folder in device_folders()]
        found |= dict.fromkeys(shown, lesson_page(lesson))
    for each in exercises():
        relative = each.path.relative_to(ROOT)
        found |= dict.fromkeys((relative.as_posix(), relative.with_suffix(".cu").as_posix()), exercise_page(each))
    for path in quiz.files().values():
        found[path.relative_to(ROOT).as_posix()] = quiz_page(path.parent.name, quiz.PARTS[0])
    return found


def relinked(text: str, file: Path, here: str, copied: Callable[[Path], str], language: str = "en") -> str:
    """The Markdown of a file as the page `here` of the book in `language` has it.

    Links go to pages. If a file has no page, the link goes to a copy of the file: `copied` makes it and says where. A
    link to a folder without a page, or to nothing, becomes its words. English names no heading of a page that is shown
    in Chinese.
    """
    foreign = language != "en" and not file.name.endswith(_TRANSLATED)

    def one(found: re.Match[str]) -> str:
        image, words, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        where, _, anchor = target.partition("#")
        path = Path(posixpath.normpath((file.parent / where).as_posix()))
        if not path.exists() or not path.is_relative_to(ROOT):
            return words
        if path.is_dir():
            path = path / "README.md"
        english = path.with_name(path.name.replace(_TRANSLATED, ".md"))
        name = pages().get(english.relative_to(ROOT).as_posix())
        if name and not image:
            if foreign and english.with_name(f"{english.stem}{_TRANSLATED}").exists():
                anchor = ""
            if anchor and language != "en" and english.is_relative_to(REPORTS):
                return f'<a href="{relative(name, here)}.html#{anchor}">{words}</a>'  # its headings are translated
            if name == COURSE and not anchor:
                name = HOME
            return f"[{words}]({relative(name, here)}.md{'#' + anchor if anchor else ''})"
        if not path.is_file():
            return words
        return f"{image}[{words}]({relative(copied(path), here)})"

    def shown(found: re.Match[str]) -> str:
        return f'{found[1]}{relative(copied((file.parent / found[2]).resolve()), here)}"'

    pieces = _CODE.split(text)
    pieces[::2] = [_IMAGE.sub(shown, _LINK.sub(one, piece)) for piece in pieces[::2]]
    return "".join(pieces)


def without_language(text: str) -> str:
    """A guide without its link to the other language, which each page of the book has at its top."""
    return _OTHER.sub("", text, count=1)


def relative(target: str, here: str) -> str:
    """A page or file of the book as seen from a page."""
    return posixpath.relpath(target, posixpath.dirname(here) or ".")
