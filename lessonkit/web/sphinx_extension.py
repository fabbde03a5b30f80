"""What Sphinx does for this book beside its own work: marks English in Chinese pages, links the other language."""

import re
from itertools import pairwise
from typing import Any

from lessonkit.base.prose import unwrapped
from lessonkit.base.words import translated
from lessonkit.web import LANGUAGES
from lessonkit.web.search import HAN, Chinese, English

from docutils import nodes
from sphinx.application import Sphinx

SHORT = 5  # characters of a cell that stays on one line
_WORDS = re.compile(r"\b[A-Za-z][a-z'-]+\b")
_DRAWING = re.compile(r'(?<=<div class="highlight-text notranslate">)(.*?<pre>)(.*?)(?=</pre>)', re.DOTALL)
_WIDE = re.compile(r"[\u2e80-\u9fff\uf900-\ufaff\uff01-\uff60]+")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("book_language", "en", "env", str)
    app.add_config_value("book_code", "", "env", str)  # another value: Sphinx reads all pages again
    for language in (English, Chinese):
        app.add_search_language(language)
    app.connect("doctree-read", _mark_english)
    app.connect("doctree-read", _unwrap)
    app.connect("doctree-read", _keep_together)
    app.connect("html-page-context", _widen)
    app.connect("html-page-context", _languages)
    app.connect("html-page-context", _scripts)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _mark_english(app: Sphinx, doctree: nodes.document) -> None:
    """In a Chinese page, `lang="en"` on each text that is shown in English: Docutils makes it of a class."""
    if app.config.book_language == "en":
        return
    for node in doctree.findall(lambda n: isinstance(n, nodes.paragraph | nodes.title)):
        assert isinstance(node, nodes.Element)
        text = node.astext()
        if not HAN.search(text) and len(_WORDS.findall(text)) > 2:
            node["classes"].append("language-en")


def _unwrap(app: Sphinx, doctree: nodes.document) -> None:
    """A line that ends between two Chinese characters leaves no space there: it would part a word."""
    for node in list(doctree.findall(lambda n: isinstance(n, nodes.paragraph | nodes.title))):
        before = ""
        for text, following in pairwise([*node.findall(nodes.Text), nodes.Text("")]):
            after = following.astext()[:1].strip()
            said = unwrapped(f"{before}{text.astext()}{after}").removeprefix(before).removesuffix(after)
            text.parent.replace(text, nodes.Text(said))
            before = said[-1:] or before


def _keep_together(app: Sphinx, doctree: nodes.document) -> None:
    """A line may end after any Chinese character: a narrow column would have one of them a line.

    A short cell is one line (class `short`), and a longer head is no narrower than a few characters (`long-head`).
    """
    for entry in doctree.findall(nodes.entry):
        text = entry.astext()
        if HAN.search(text) and len(text) <= SHORT:
            entry["classes"].append("short")
        elif HAN.search(text) and isinstance(entry.parent.parent, nodes.thead):
            entry["classes"].append("long-head")


def _widen(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if app.config.book_language != "en" and "body" in context:
        context["body"] = widened(context["body"])


def widened(body: str) -> str:
    """In drawings and tables of plain text a Chinese character is as wide as two others, whatever the font."""

    def run(found: re.Match[str]) -> str:
        return f'<span class="wide" style="width:{2 * len(found[0])}ch">{found[0]}</span>'

    return _DRAWING.sub(lambda found: found[1] + _WIDE.sub(run, found[2]), body)


def _languages(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """The same page in each language, as a relative address: it opens from files too. And what the theme says."""
    up = "../" * (page.count("/") + 1)
    here = app.config.book_language
    context["made_with"] = translated("Made with the Shibuya theme", here)
    context["other_languages"] = [
        (name, code, f"{up}{code}/{page}.html") for code, name in LANGUAGES.items() if code != here
    ]


def _scripts(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """The scripts that only some pages have a use for."""
    if "data-python=" in context.get("body", ""):
        app.add_js_file("python.js", loading_method="defer")
    if "/exercises/" in page:
        app.add_js_file("exercise.js", loading_method="defer")
    if 'class="quiz"' in context.get("body", ""):
        app.add_js_file("quiz.js", loading_method="defer")
    if 'class="race"' in context.get("body", ""):
        app.add_js_file("start.js", loading_method="defer")
    if 'class="chart"' in context.get("body", ""):
        app.add_js_file("chart.js", loading_method="defer")
