"""The page of a lesson: its prose, its code folded by rung, what changes between rungs, its rows and its exercises."""

import ast
import difflib
import html
import inspect
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from lessonkit import pictures
from lessonkit.base.cpp_text import definitions
from lessonkit.base.files import REPORTS, ROOT
from lessonkit.base.prose import read_as
from lessonkit.base.words import translated
from lessonkit.exercise.source import Source
from lessonkit.lesson import Broken, Lesson, Steps
from lessonkit.measure.stale import device_folders
from lessonkit.pages import glossary, guides, paths, report, rung_source
from lessonkit.pictures.draw import WIDTH
from lessonkit.web import charts, myst, places

_NEW_WORDS = re.compile(rf"^{re.escape(glossary.HEAD)}[^.]*\.\n", re.MULTILINE)  # no term has a dot
LEGIBLE = 11  # pixels
Declared = Lesson | Steps | Broken


class Page:
    """One lesson in one language. copied: makes a copy of a file that has no page, and says where (places.relinked)."""

    def __init__(self, name: str, lesson: Declared, language: str, copied: Callable[[Path], str]) -> None:
        self.name, self.lesson, self.language, self.copied = name, lesson, language, copied
        self.here = places.lesson_page(name)
        self.rungs = [rung.__name__ for rung in lesson.rungs] if isinstance(lesson, Lesson) else []
        self.diffs = dict(self._diffs())

    def say(self, english: str) -> str:
        return translated(english, self.language)

    def pages(self) -> dict[str, str]:
        """The lesson's page, and one for each file of its ladder, which would make a single page too long."""
        own, *others = glossary.files(self.name)
        program = own.with_suffix(".cu")
        ladder = sorted((path for path in others if path != program), key=self._place)
        first, *more = [program, own] if program in others else [own]
        said = [self._file(first, top=True), *(self._file(path, top=False) for path in more)]
        below = {}
        for path in ladder:
            self.here = f"{places.lesson_page(self.name)}/{path.stem}"
            below[self.here] = self._file(path, top=False).replace("## ", "# ", 1) + "\n"
        self.here = places.lesson_page(self.name)
        if ladder:
            said += [f"## {translated('The files of its rungs', self.language)}", self._contents(list(below))]
        if self.diffs:
            said += [f"## {translated('What changes between rungs', self.language)}", *self._rest()]
        said += [*self._pictures(), *self._measured(), *self._compiled(), *self._exercises()]
        return {self.here: "\n\n".join(part for part in said if part) + "\n"} | below

    def _place(self, path: Path) -> tuple[int, bool]:
        """The place of a ladder's file: a rung's own, behind them what rungs use, last the CPU model and mutants."""
        rungs = self.lesson.rungs if isinstance(self.lesson, Lesson) else ()
        order = [Path(inspect.getfile(inspect.unwrap(rung))) for rung in rungs]
        return order.index(path) if path in order else len(order), path.stem in ("cpu_model", "mutants")

    def _contents(self, pages: list[str]) -> str:
        listed = "\n".join(places.relative(page, self.here) for page in pages)
        return f"```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```"

    # ---- The file ----

    def _file(self, path: Path, *, top: bool) -> str:
        text = read_as(path.read_text(), path.suffix, lambda message: translated(message, self.language))
        said, number = list[str](), ""
        wrapper = path.suffix == ".py" and path.with_suffix(".cu").exists()
        for i, part in enumerate(myst.parts(text, path.suffix)):
            if part.kind == myst.CODE:
                said.append(self._code(part.text, path, number))
                continue
            words = _NEW_WORDS.sub(lambda line: f"\n{' '.join(line[0].split())}\n\n", part.text)
            if i == 0:
                title, words = myst.title(words)
                said += (
                    self._head(title, path) if top else [self._heading(title or myst.sentence(words), path, wrapper)]
                )
            if found := myst.rung(words):
                if number:
                    said.append(self.diffs.pop(self._named(number), ""))
                number, more, words = found
                said.append(self._rung_heading(number, more))
            said.append(self._linked(myst.markdown(words)))
        if number or path.stem in self.rungs:
            said.append(self.diffs.pop(self._named(number) if number else path.stem, ""))
        return "\n\n".join(part for part in said if part)

    def _head(self, title: str, path: Path) -> list[str]:
        about = guides.about(self.name)
        facts = [f"{about.hours:g} h", about.language, *([about.operator] if about.operator else [])]
        teaches = places.relinked(self.say(about.teaches), path, self.here, self.copied, self.language)
        file = places.relative(self.copied(path), self.here)
        source = f"[{path.relative_to(ROOT)}]({file})"
        return [f"# {myst.escaped(title or self.name)}", f"**{teaches}**" if "]" not in teaches else teaches,
                f"{' · '.join(facts)} · {source}"]  # fmt: skip

    def _heading(self, title: str, path: Path, wrapper: bool) -> str:
        if wrapper:
            return f"## {translated('The program as functions of tensors', self.language)}"
        return f"## {myst.escaped(title)}" + (f" (`{path.stem}`)" if path.stem in self.rungs else "")

    def _named(self, number: str) -> str:
        at = int(number) if number.isdecimal() else 0
        return self.rungs[at - 1] if 0 < at <= len(self.rungs) else ""

    def _rung_heading(self, number: str, more: str) -> str:
        name = self._named(number)
        said = translated("Rung {number}", self.language).format(number=number) + (
            f", {myst.escaped(more)}" if more else ""
        )
        named = translated("{name}: {text}", self.language).format(name=said, text=f"`{name}`")
        return f"## {named if name else said}"

    def _code(self, text: str, path: Path, number: str) -> str:
        names = list(_defined(text, path.suffix))
        declares = re.search(r"^LESSON = ", text, re.MULTILINE) is not None
        if declares and not names[:-1]:
            summary = translated("The declaration: predictions, wrong kernels, claims", self.language)
        elif names:
            summary = ", ".join(f"<code>{html.escape(name)}</code>" for name in names[:6])
            summary += " …" * (len(names) > 6)
        elif re.search(r"^(?:import|from|#include)", text, re.MULTILINE):
            summary = translated("Imports", self.language)
        else:
            summary = f"<code>{html.escape(text.splitlines()[0][:80])}</code>"
        unfolded = isinstance(self.lesson, Steps) and bool(names) and not declares
        return myst.folded(summary, myst.code(text, path.suffix), "code", unfolded=unfolded)

    def _linked(self, markdown: str) -> str:
        """The list of new words with links to the glossary."""
        if "New words" not in markdown:
            return markdown
        target = places.relative("glossary", self.here)

        def one(found: re.Match[str]) -> str:
            by = {term.term: term for term in glossary.terms()}
            words = [w.strip() for w in found[2].replace("\\", "").replace("`", "").split(",")]
            linked = [
                f"[{myst.escaped(glossary.heading(by[w], self.language))}]"
                f"({target}.md#{glossary.anchor(by[w], self.language)})"
                if w in by
                else myst.escaped(w)
                for w in words
            ]
            colon, comma, stop = ("：", "、", "。") if self.language == "zh" else (": ", ", ", ".")
            return f"**{translated('New words', self.language)}**{colon}{comma.join(linked)}{stop}\n"

        return re.sub(r"^(New words \(GLOSSARY\.md\)): (.*)\.\n", one, markdown, flags=re.MULTILINE)

    # ---- What changes between rungs ----

    def _diffs(self) -> Iterator[tuple[str, str]]:
        """Rung -> the view of what changes from the one before it."""
        for old, new in pairwise(self.rungs):
            before, after = (rung_source.lines(self.name, rung, self.say) for rung in (old, new))
            changed = list(difflib.unified_diff(before, after, old, new, lineterm="", n=2))
            if changed:
                summary = translated("Diff: {old} to {new}", self.language).format(old=old, new=new)
                yield new, myst.folded(html.escape(summary), myst.fence("diff", "\n".join(changed)), "diff")

    def _rest(self) -> Iterator[str]:
        while self.diffs:
            yield self.diffs.pop(next(iter(self.diffs)))

    # ---- Pictures ----

    def _pictures(self) -> Iterator[str]:
        if isinstance(self.lesson, Broken) or not (drawn := pictures.of(self.name)):
            return
        yield f"## {translated('Pictures', self.language)}"
        for picture in drawn:
            moving = picture.moving(self.language)
            figure = f'<figure class="picture">{_scrolling(picture.svg(self.language))}{moving}</figure>'
            yield f"``````{{raw}} html\n{figure}\n``````"

    # ---- Rows ----

    def _measured(self) -> Iterator[str]:
        folders = device_folders()
        data = charts.of_lesson(self.lesson, self.name, folders) if isinstance(self.lesson, Lesson) else None
        pages = [page for folder in folders if (page := folder / f"{self.name}.md").exists()]
        if not (data or pages):
            return
        yield f"## {translated('Predicted and measured', self.language)}"
        if data:
            caption = translated("Measured rows; a short bar is a prediction", self.language)
            yield charts.figure("rows", data, caption, self.language)
        for page in pages:
            shown = self._report(page, plots=data is None)
            summary = translated("All rows of {device} as tables", self.language).format(device=page.parent.name)
            yield myst.folded(html.escape(summary), shown, "tables", unfolded=data is None)

    def _compiled(self) -> Iterator[str]:
        compiled = translated("Compiled for each target", self.language)
        emulated = translated("Counted by the emulator", self.language)
        for folder, heading in (("compiled", compiled), ("emulated", emulated)):
            if (page := REPORTS / folder / f"{self.name}.md").exists():
                yield f"## {heading}"
                summary = html.escape(translated("Table", self.language))
                yield myst.folded(summary, self._report(page, plots=False), "tables")

    def _report(self, page: Path, *, plots: bool) -> str:
        """A page of reports/ as a part of this one."""
        text = re.sub(r"^# .*\n", "", report.text(page, self.language), count=1)
        text = re.sub(r"^##", "###", text, flags=re.MULTILINE)
        if not plots:
            text = re.sub(r"^!\[.*\n", "", text, flags=re.MULTILINE)
        return places.relinked(text, page, self.here, self.copied, self.language)

    # ---- Exercises ----

    def _exercises(self) -> Iterator[str]:
        mine, others = exercises_of(self.name)
        if not (mine or others):
            return
        yield f"## {translated('Exercises', self.language)}"
        for source in mine:
            yield f"- **[{myst.escaped(self.say(source.title))}]({self._to(source)})**"
        if others:
            yield translated("Of the same day:", self.language)
            yield "\n".join(f"- [{myst.escaped(self.say(source.title))}]({self._to(source)})" for source in others)

    def _to(self, source: Source) -> str:
        return places.relative(places.exercise_page(source), self.here) + ".md"


def _scrolling(svg: str) -> str:
    """A picture in a frame that scrolls where the page is too narrow to show its letters in LEGIBLE pixels."""
    smallest = min((float(size) for size in re.findall(r'font-size="([\d.]+)"', svg)), default=LEGIBLE)
    return f'<div class="lk-scroll" tabindex="0" style="--least: {LEGIBLE * WIDTH / smallest:.0f}px">{svg}</div>'


def exercises_of(lesson: str) -> tuple[list[Source], list[Source]]:
    """The exercises that name the lesson, or are named like it; the others of its folder."""
    folder, _, stem = lesson.partition(".")
    here = [source for source in places.exercises() if source.folder == folder]
    mine = [s for s in here if stem in s.path.read_text() or f"_{s.short}" in f"_{stem.partition('_')[2]}"]
    return mine, [s for s in here if s not in mine]


def order(names: list[str]) -> dict[str, dict[str, object]]:
    """Each path through the course for the pages' own navigation: its title in each language, its lessons' pages."""
    found: dict[str, dict[str, object]] = {}
    for route in paths.routes():
        pages = list(dict.fromkeys(places.lesson_page(name) for name in route.lessons if name in names))
        found[route.name] = {"title": route.title, "pages": pages}
    return found


def _defined(text: str, suffix: str) -> Iterator[str]:
    """The names that a piece of a file defines at its margin."""
    if suffix != ".py":
        yield from dict.fromkeys(d.name for d in definitions(text))
        return
    try:
        body = ast.parse(text).body
    except SyntaxError:  # a comment at the margin parts a statement
        yield from re.findall(r"^(?:def|class) (\w+)", text, re.MULTILINE)
        return
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id
