"""The whole book: its sources as MyST, one build of Sphinx for each language, and the files of a static site."""

import hashlib
import json
import multiprocessing
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lessonkit.base import eviction
from lessonkit.base.errors import Missing
from lessonkit.base.files import CACHE, ROOT, changing, need_private, write_atomically
from lessonkit.base.markdown import markdown
from lessonkit.base.words import later, said, translated
from lessonkit.exercise import quiz
from lessonkit.lesson import discover, names
from lessonkit.measure.stale import device_folders
from lessonkit.pages import operator_pages, paths, report, shares
from lessonkit.pictures import all_pictures
from lessonkit.web import LANGUAGES, charts, exercise_pages, lesson_pages, places, quiz_pages, start, style
from lessonkit.web.page import pack

OWN = Path(__file__).parent
ACCENT = "green"
LABELS = (later("Menu"), later("Show table of contents"), later("Close Table of Contents"), later("Close left sidebar"))
PACKAGES = ("sphinx", "myst_parser", "shibuya", "jieba")


class Sources:
    """The MyST files of one language below `folder`, which keeps the modification times of files that stay the same."""

    def __init__(self, folder: Path, language: str, only: Iterable[str] = (), python: float = 0) -> None:
        self.folder, self.language, self.only, self.python = folder, language, frozenset(only), python
        self.written = set[Path]()
        self.copies = dict[str, Path]()

    def write(self) -> None:
        """Write all of them, and remove what an earlier build left."""
        guides = self._guides()
        if self._wanted(places.HOME):
            self._put(places.HOME, start.text(self.language) + self._toctree(places.HOME, guides))
        for name in names():
            if self._wanted(page := places.lesson_page(name)):
                lesson = dict(discover(name))[name]
                for each, text in lesson_pages.Page(name, lesson, self.language, self.copied).pages().items():
                    self._put(each, text)
        for source in places.exercises():
            if self._wanted(page := places.exercise_page(source)):
                self._put(page, exercise_pages.Page(source, self.language, self._python(source.folder)).text())
        for folder in dict.fromkeys(source.folder for source in places.exercises()):
            if self._wanted(page := f"{folder}/exercises/index"):
                self._put(page, exercise_pages.index(folder, self.language, self._python(folder)))
        for name, path in quiz.files().items():
            for part in quiz.PARTS:
                if self._wanted(page := places.quiz_page(path.parent.name, part)):
                    self._put(page, quiz_pages.Page(name, part, self.language).text())
        self._roofline()
        for relative, path in self.copies.items():
            self._file(relative, path.read_bytes())
        if self.folder.exists():
            for path in self.folder.rglob("*"):
                if path.is_file() and path not in self.written:
                    path.unlink()

    def copied(self, path: Path) -> str:
        """The place of a copy of a file that has no page. A browser shows text, so source files get that ending."""
        relative = path.relative_to(ROOT)
        picture = path.suffix in (".png", ".svg", ".pdf")
        name = f"files/{relative.as_posix()}" + ("" if picture else ".txt")
        self.copies[name] = path
        return name

    def _python(self, folder: str) -> float:
        return self.python if folder == pack.FOLDER else 0

    def _wanted(self, page: str) -> bool:
        return not self.only or page in self.only

    def _put(self, page: str, text: str) -> None:
        self._file(f"{page}.md", text.encode())

    def _file(self, relative: str, content: bytes) -> None:
        path = self.folder / relative
        self.written.add(path)
        if not path.exists() or path.read_bytes() != content:
            write_atomically(path, content)

    def _guides(self) -> list[str]:
        """Write the guides; which pages they are."""
        by_page = {places.page(path): path for path in places.guides()}
        charted = {
            folder.name: {operator_pages.file_name(ladder.name): ladder for ladder in operator_pages.ladders(folder)}
            for folder in device_folders()
        }
        for page, english in by_page.items():
            if not self._wanted(page):
                continue
            path = english
            if self.language == "zh" and (translation := english.with_name(f"{english.stem}.zh-CN.md")).exists():
                path = translation
            text = report.text(path, self.language)
            ladder = charted.get(english.parent.name, {}).get(english.name)
            text = re.sub(r"^(\s*- )\[ \] ", r"\1☐ ", places.without_language(text), flags=re.MULTILINE)
            text = places.relinked(text, path, page, self.copied, self.language)
            if page == places.COURSE:
                text = re.sub("^# .*", f"# {translated('About this course', self.language)}", text, count=1)
            if ladder and (data := charts.of_operator(ladder.lessons, english.parent.name)):
                figure = charts.figure(
                    "rows", data, translated("The rows of all its lessons", self.language), self.language
                )
                head, _, rest = text.partition("\n")
                text = f"{head}\n\n{figure}\n{re.sub(r'^!.*png.*$', '', rest, flags=re.MULTILINE)}"
            folder = page.removesuffix("/index")
            if folder in quiz_pages.folders():
                head, _, rest = text.partition("\n")
                text = f"{head}\n\n{quiz_pages.links(folder, self.language)}\n{rest}"
            self._put(page, text + self._toctree(page, list(by_page)))
        return list(by_page)

    def _roofline(self) -> None:
        said = [f"# {translated('Roofline', self.language)}"]
        said.append(translated(
            "Each mark is the fastest rung of a lesson, at the largest shape of its last rung. The line below it "
            "begins at the first rung. The sloped roof is the copy of the same rows. The flat roofs are the fastest "
            "kernel of each data type.", self.language,
        ))  # fmt: skip
        for folder in device_folders():
            if data := charts.of_roofline(folder):
                said += [f"## {folder.name}", charts.figure("roofline", data, folder.name, self.language)]
                english = (later("lesson, rung"), "FLOP/B", "TFLOP/s", later("% of the limit"), later("bound by"))
                heads = [translated(head, self.language) for head in english]
                said.append(markdown(heads, map(self._point, data["points"])))
                if any(shares.BEYOND in point["share"] for point in data["points"]):
                    said.append(translated(shares.ANY, self.language))
        own = next(picture for picture in all_pictures() if picture.name == "roofline").moving(self.language)
        said += [
            f"## {translated('Your own GPU', self.language)}",
            translated("The roofs of a card by its data sheet: choose yours and a data type.", self.language),
            f'``````{{raw}} html\n<figure class="picture">{own}</figure>\n``````',
        ]
        if self._wanted("roofline"):
            self._put("roofline", "\n\n".join(said) + "\n")

    def _point(self, point: dict[str, Any]) -> list[str]:
        lesson = f"[{point['lesson']}]({point['href'].removesuffix('.html')}.md) `{point['rung']}`"
        bound = translated(point["bound"], self.language)
        intensity, rate = (f"{float(f'{point[each]:.3g}'):g}" for each in ("x", "y"))  # 5460, not 5.46e+03
        return [lesson, intensity, rate, point["share"], bound]

    def _toctree(self, page: str, guides: list[str]) -> str:
        """The pages below this one, for the book's contents and for previous and next."""
        if page == places.HOME:
            days = dict.fromkeys(name.partition(".")[0] for name in names())
            order = ["paths", *(f"{day}/index" for day in days), "course_ops/index", "roofline", "reports/index"]
            order += ["glossary", places.COURSE, "syllabus", "contributing", "lessonkit/index", "changelog"]
            below = [p for each in order for p in self._section(each, guides)]
        elif page.endswith("/index"):
            folder = page.removesuffix("/index")
            below = [p for p in guides if p != page and p.startswith(f"{folder}/")]
            lessons_here = [places.lesson_page(name) for name in names(f"{folder}.") if name.startswith(f"{folder}.")]
            exercised = any(source.folder == folder for source in places.exercises())
            before, after = ([places.quiz_page(folder, part)] * (folder in quiz_pages.folders()) for part in quiz.PARTS)
            below = [*before, *lessons_here, *([f"{folder}/exercises/index"] if exercised else []), *after, *below]
        else:
            return ""
        here = [places.relative(p, page) for p in below if self._wanted(p)]
        return f"\n\n```{{toctree}}\n:hidden:\n:maxdepth: 1\n\n{chr(10).join(here)}\n```\n" if here else ""

    @staticmethod
    def _section(name: str, guides: list[str]) -> list[str]:
        if name == "paths":
            return [f"paths/{route.name}" for route in paths.routes()]
        return [name] if name in guides or name == "roofline" else []


def lacking() -> list[str]:
    """The packages that a build needs and this environment does not have."""
    from importlib.util import find_spec

    return [name for name in PACKAGES if find_spec(name) is None]


def build(out: Path, only: Iterable[str] = (), say: Callable[[str], None] = print, *, alone: bool = False) -> None:
    """Write the book below `out`: a folder a language and an index. only: pages, for a quick look.

    alone: for a host that is not the course's own server. Pages of exercises then have Python, if it can be had.
    Raises Missing if Sphinx or its theme is not installed.
    """
    if wanting := lacking():
        words = said("the web edition needs {packages}: {command}, or `python course.py web`")
        raise Missing(words.format(packages=", ".join(wanting), command="pip install -e '.[web]'"))
    only = frozenset(only)
    work = _sources_of(only)
    out.mkdir(parents=True, exist_ok=True)
    # Marks a folder of ours, so it comes first: a build that was stopped can be repeated. GitHub's pages leave out
    # folders that begin with _ without it.
    (out / ".nojekyll").touch()
    python = 0.0
    if alone:
        try:
            python = pack.write(out)
        except Missing as why:
            say(str(why))
    # Sphinx reads one language while the sources of the next are written. Who builds the same pages meanwhile waits.
    say(said("Building the book in {count} languages. The first build takes 2 to 10 minutes.").format(
        count=len(LANGUAGES)
    ))  # fmt: skip
    spawn, built = multiprocessing.get_context("spawn"), dict[Future[str], str]()
    with changing(work / "en"), ProcessPoolExecutor(len(LANGUAGES), mp_context=spawn) as pool:
        for language in LANGUAGES:
            sources = Sources(work / language, language, only, python)
            sources.write()
            count = sum(path.suffix == ".md" for path in sources.written)
            say(said("{language}: Sphinx builds {count} pages").format(language=language, count=count))
            built[pool.submit(_sphinx, (language, str(sources.folder), str(out / language)))] = language
        for warnings in as_completed(built):
            for line in warnings.result().splitlines():
                say(line)
            say(said("{language}: done").format(language=built[warnings]))
    order = json.dumps(lesson_pages.order(names()), ensure_ascii=False)
    for language in LANGUAGES:
        write_atomically(out / language / "_static" / "paths.js", f"window.COURSE_PATHS = {order};\n")
    write_atomically(out / "index.html", _FRONT)


def _sources_of(only: frozenset[str]) -> Path:
    """Where the sources of these pages are kept for the next build: a folder for each choice of pages."""
    choice = hashlib.sha256(" ".join(sorted(only)).encode()).hexdigest()[:12] if only else "all"
    need_private(CACHE / "web")  # Sphinx unpickles what it has kept there
    eviction.used(CACHE / "web" / choice)
    eviction.evict(CACHE)
    return CACHE / "web" / choice


_FRONT = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>GPU kernels in five days</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="en/_static/icon.svg">
<script>location.replace((/^zh/.test(navigator.language) ? "zh" : "en") + "/index.html")</script></head>
<body><main><h1>GPU kernels in five days</h1>
<p><a href="en/index.html">{LANGUAGES["en"]}</a> ·
<a href="zh/index.html" lang="zh">{LANGUAGES["zh"]}</a></p></main></body></html>
"""


def _sphinx(job: tuple[str, str, str]) -> str:
    """Build one language in a process of its own; what Sphinx warns of."""
    import io
    import logging

    import jieba
    from sphinx.application import Sphinx

    jieba.setLogLevel(logging.WARNING)  # it says on stderr that it reads its dictionary

    language, source, out = job
    warnings = io.StringIO()
    app = Sphinx(
        source, None, out, f"{source}.doctrees", "html", confoverrides=_settings(language), status=None,
        warning=warnings, parallel=1,
    )  # fmt: skip
    app.build()
    if (files := Path(source) / "files").exists():
        shutil.copytree(files, Path(out) / "files", dirs_exist_ok=True)
    _own(Path(out) / "_static")
    _label(Path(out), language)
    style.trim(Path(out))
    return re.sub(r"\x1b\[[\d;]*m", "", warnings.getvalue())


def _own(static: Path) -> None:
    """Take out of the theme's files what a page must not do, and colours that no page has.

    A page must not load a font from another host or evaluate a string. No page needs other accents, nor colours for
    screens of a wider gamut.
    """
    css, translations = static / "shibuya.css", static / "translations.js"
    text = re.sub(r"@font-face\{[^{}]*url\(https?:[^{}]*\}", "", css.read_text())
    text = re.sub(
        r"@supports \(color:color\(display-p3[^{]*\{@media \(color-gamut:p3\)\{(?:[^{}]*\{[^{}]*\})+\}\}", "", text
    )
    css.write_text(re.sub(rf"\[data-accent-color=(?!{ACCENT}\])\w+\]\{{[^{{}}]*\}}", "", text))
    if translations.exists():  # `addTranslations` evaluates the rule for plurals; Chinese has one form
        assign = (
            "((catalog) => { Object.assign(Documentation.TRANSLATIONS, catalog.messages); "
            "Documentation.LOCALE = catalog.locale; Documentation.PLURAL_EXPR = () => 0; })("
        )
        translations.write_text(translations.read_text().replace("Documentation.addTranslations(", assign))


def _label(out: Path, language: str) -> None:
    """The labels that stand in the theme's templates in English."""
    said = {f'aria-label="{label}"': f'aria-label="{translated(label, language)}"' for label in LABELS}
    pattern = re.compile("|".join(map(re.escape, said)))
    for path in out.rglob("*.html") if language != "en" else ():
        path.write_text(pattern.sub(lambda found: said[found[0]], path.read_text()))


def _code() -> str:
    """A digest of what makes a page of its source: Sphinx keeps pages that it has read, by its own code's version."""
    files = [*sorted(OWN.glob("*.py")), ROOT / "lessonkit" / "base" / "prose.py"]
    versions = " ".join(f"{name} {version(name.replace('_', '-'))}" for name in (*PACKAGES, "docutils"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files) + versions.encode()).hexdigest()


def _settings(language: str) -> dict[str, object]:
    return {
        "project": translated("GPU kernels in five days", language),
        "language": {"en": "en", "zh": "zh_CN"}[language],
        "book_language": language,
        "book_code": _code(),
        "extensions": ["myst_parser", "lessonkit.web.sphinx_extension"],
        "source_suffix": {".md": "markdown"},
        "exclude_patterns": ["files"],
        "myst_heading_anchors": 4,
        "myst_enable_extensions": ["colon_fence"],
        "myst_links_external_new_tab": False,
        "smartquotes": False,
        "suppress_warnings": ["misc.highlighting_failure", "myst.header", "toc.not_included"],
        "html_theme": "shibuya",
        "html_theme_options": {"accent_color": ACCENT, "show_ai_links": False, "toctree_collapse": True},
        "html_static_path": [str(OWN / "static")],
        "templates_path": [str(OWN / "templates")],
        "html_favicon": str(OWN / "static" / "icon.svg"),
        "html_css_files": ["course.css"],
        "html_js_files": ["paths.js", "course.js"],
        "html_copy_source": False,
        "html_show_sphinx": False,
        "html_title": translated("GPU kernels in five days", language),
        "html_sidebars": {"**": ["sidebars/localtoc.html"]},
        "pygments_style": "github-light-default",
    }
