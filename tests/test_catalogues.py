"""Translations: what is found in the sources, what catalogues have, and that a lesson read in other words stays one."""

import ast
import inspect
import re

from lessonkit import __main__
from lessonkit.base import printed, prose, words
from lessonkit.base.cpp_text import tokens, without_comments
from lessonkit.base.files import ROOT
from lessonkit.commands import exercises, languages, show
from lessonkit.judge import sentences
from lessonkit.lesson import names
from lessonkit.measure import rows, stale
from lessonkit.pages import catalogues, report

import pytest
from typer.testing import CliRunner

ROOMS = tuple(catalogues.ROOMS)
MARK = "译文："
WORDS = "把每个元素都读一次，再写一次；"


def foreign(message):
    """Other words for a message, of about its length, with all that a translation keeps."""
    return MARK + re.sub(r"(?<= )[a-z]{4,}(?= )", "一个词", message) + WORDS


def assert_same_python(text, read):
    """Node by node the same, but for docstrings and strings that were translated."""
    docstrings = set()
    for old, new in zip(*(list(ast.walk(ast.parse(each))) for each in (text, read)), strict=True):
        assert type(old) is type(new)
        if isinstance(new, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(new) is not None:
            docstrings.add(new.body[0].value)
        simple = {name: value for name, value in vars(old).items() if isinstance(value, str | int | float | bool)}
        is_prose = new in docstrings or (isinstance(new, ast.Constant) and str(new.value).startswith(MARK))
        for name in simple.keys() - {"lineno", "col_offset", "end_lineno", "end_col_offset"}:
            assert is_prose or vars(new)[name] == simple[name], f"line {old.lineno}: {simple[name]}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_file_in_other_words_has_the_same_code(room):
    for path in catalogues.sources(room):
        text = path.read_text()
        read = prose.read_as(text, path.suffix, foreign)
        if path.suffix == ".py":
            assert_same_python(text, read)
        else:
            assert tokens(without_comments(read)) == tokens(without_comments(text)), path


def test_every_catalogue_has_the_messages_of_today():
    wrong = catalogues.outdated("zh")
    assert not wrong, f"python -m lessonkit translate brings them up to date: {wrong}"


@pytest.mark.parametrize("name", words.CATALOGUES)
def test_a_translation_keeps_code_numbers_and_links(name):
    found = {}
    for message in catalogues.load(name, "zh"):
        if message.id and message.string and not message.fuzzy:
            found[message.id] = catalogues.faults(message.id, message.string)
    assert not (bad := {english: lost for english, lost in found.items() if lost}), bad


# Files with Chinese words -> why these are no sentences of a catalogue. Marks such as 、 do not count.
WITH_CHINESE = {
    "lessonkit/base/words.py": "what the language calls itself",
    "lessonkit/exercise/desk.py": "a pattern that finds the line number in an error",
    "lessonkit/web/myst.py": "patterns that find the labels of a lesson's prose",
    "lessonkit/web/places.py": "a pattern that finds a page's line about its other language",
}


def test_chinese_stands_in_the_catalogues_alone():
    found = (path for path in sorted(ROOT.rglob("*.py")) if not {"tests", ".venv"} & set(path.relative_to(ROOT).parts))
    with_chinese = {path.relative_to(ROOT).as_posix() for path in found if re.search(HAN, path.read_text())}
    assert with_chinese == WITH_CHINESE.keys(), "said() or later() marks the English; `translate` asks for the Chinese"


STEP = """
print(f"  loss {losses[0]:.2f} -> {losses[-1]:.4f}")
print(f"  loss {start:.2f} -> {losses[0]:.2f} (epoch 1) -> {len(done)}, {'no test' if x else reached}")
print("  left out", file=sys.stderr) if x else print(f"  z = {z}")
print("a set {of} braces")
lines = [f"  {name} is absent: {why}"]
raise Unsupported("no GPU")
"""


def test_what_a_step_prints_is_read_from_its_source():
    assert printed.templates(STEP) == [
        "loss {losses} -> {losses2}",
        "loss {start} -> {losses} (epoch 1) -> {done}, {reached}",
        "no test",
        "left out",
        "{name} is absent: {why}",
        "no GPU",
    ]
    assert printed.templates(STEP.replace("print", "show")) == []


def test_what_a_step_prints_is_said_in_the_readers_language(tmp_path, monkeypatch, capsys):
    path = tmp_path / "lesson.py"
    path.write_text(STEP)
    chinese = {"loss {losses} -> {losses2}": "甲 {losses} 乙 {losses2}", "no test": "丙", "no GPU": "戊"}
    chinese["{name} is absent: {why}"] = "{name} 己 {why}"
    chinese["loss {start} -> {losses} (epoch 1) -> {done}, {reached}"] = "丁 {reached}、{start}、{losses}、{done}"
    monkeypatch.setattr(words, "_catalogues", lambda language: iter([chinese]))
    english = ["  loss 2.31 -> 0.0006", "  loss 2.31 -> 1.94 (epoch 1) -> 8, no test", "  z = 1"]
    english += ["  a is absent: Unsupported: no GPU\n  b is absent: x: y"]
    told = ["  甲 2.31 乙 0.0006", "  丁 丙、2.31、1.94、8", "  z = 1", "  a 己 Unsupported: 戊\n  b 己 x: y"]
    for language, expected in (("en", english), ("zh", told)):
        with words.speaking(language), printed.retelling(printed.Reader(path)):
            for line in english:
                print(line)
        assert capsys.readouterr().out == "".join(f"{line}\n" for line in expected)


def test_each_line_that_a_step_prints_is_found_again():
    for name in names():
        lines = printed.templates((ROOT / f"{name.replace('.', '/')}.py").read_text())
        for line in lines:
            filled = re.sub(r"\{\w+\}", "0.5", line)
            assert words.retold(filled, [line], "zh") == re.sub(r"\{\w+\}", "0.5", words.translated(line, "zh"))


# An English term -> its forms in Chinese: one word, beside it the glossary's heading or the name that code has.
TERMS = {
    "accumulators?": "累加器",
    "barriers?": "barrier",
    "bank conflicts?": "bank 冲突|bank conflict|存储体冲突",
    "consumers?": "消费者",
    "data sheets?": "数据手册",
    "copy speed|speed of a copy": "拷贝速度",
    "emulator": "模拟器",
    "events?": "事件|event",
    "epilogues?": "epilogue",
    "error budgets?": "误差上限",
    "fences?": "fence",
    "gradients?": "梯度",
    "interpreter": "解释器",
    "lanes?": "lane|通道",
    "lazy rescaling": "延迟缩放",
    "(a|the) loss": "loss",
    "masks?": "掩|mask",
    "mutants?": "错误版本",
    "occupancy": "占用率",
    "page-locked": "锁页",
    "panels": "条带|panel",
    "persistent": "常驻|persistent",
    "producers?": "生产者",
    "prologues?": "prologue",
    "sectors?": "sector|扇区",
    "shared memory": "共享内存",
    "spills": "溢出|spill",
    "streams": "流|stream",
    "strides": "步长|strides",
    "swizzl(e|ed|ing)": "swizzle|重排",
    "tensor cores?": "tensor core|张量核心",
    "tensor memory": "tensor memory|张量内存",
    "warps": "warp|线程束",
    "warp specialization": "warp 专门化",
    "warpgroups?": "warp 组",
}


def unlike(english, chinese):
    """The terms of TERMS that a translation says in another word. Code, quotations and names do not count."""
    prose_of = re.sub(r'`[^`]*`|"[^"]*"|\{[^}]*\}', "", english)
    said = (re.search(rf"(?<![\w./-])(?:{term})(?![\w-])", prose_of) for term in TERMS)
    return [term for term, found in zip(TERMS, said, strict=True) if found and not re.search(TERMS[term], chinese)]


def test_one_term_has_one_translation():
    loaded = [message for name in words.CATALOGUES for message in catalogues.load(name, "zh")]
    ready = {message.id: message.string for message in loaded if message.id and message.string and not message.fuzzy}
    other = {english: bad for english, chinese in ready.items() if (bad := unlike(english, chinese))}
    assert not other, f"use the words of TERMS: {other}"


def test_another_word_for_a_term_is_found():
    assert unlike("a barrier for the warpgroup", "warp 组的屏障") == ["barriers?"]
    assert unlike('"Shared memory" and `barrier`', "无") == []


# What is wrong of a Chinese text wherever it stands. A bracket behind / or * is one of a formula.
HAN, WIDE = "[\u4e00-\u9fff]", "[，。；：！？（）、“”]"
COUNT = r"(?:[\d.^]+|[A-Z]+|[两三四五六七八九十百]+)"
ILL = {
    "a space between Chinese words": rf"{HAN} +{HAN}",
    "no space between Chinese and Latin": rf"{HAN}[A-Za-z0-9`]|[A-Za-z0-9`%]{HAN}",
    "a space beside full-width punctuation": rf" {WIDE}|{WIDE} (?=\S)",
    "half-width punctuation beside Chinese": rf"{HAN}[,;:!?]|[,;!?] *{HAN}|{HAN}\.(?=\s|$)",
    "half-width quotes beside Chinese": rf'{HAN}"|"{HAN}',
    "half-width brackets around Chinese": rf"(?<![/*] )\([^()]*{HAN}[^()]*\)",
    "a mark or a word twice": r"，，|。。|、、|；；|的的|了了",
    # Chinese says that one is 1/3 of the other, or 3 times as fast. "3 times less" and "3 times faster" are unclear.
    "less or faster by so many times": rf"(?:(?<!至)[少小低短减降]|[快慢])了? ?{COUNT}[\d. 至到]*倍",
}


def ill_written(chinese):
    """What is wrong with the punctuation of a translation. The addresses of links do not count."""
    bare = re.sub(r"\]\([^)]*\)", "]()", chinese)
    return [what for what, pattern in ILL.items() if re.search(pattern, bare)]


@pytest.mark.parametrize("name", words.CATALOGUES)
def test_translations_are_punctuated_as_chinese_is(name):
    ready = [m.string for m in catalogues.load(name, "zh") if m.id and m.string and not m.fuzzy]
    assert not (bad := {chinese: what for chinese in ready if (what := ill_written(chinese))}), bad


def test_the_guides_are_punctuated_as_chinese_is():
    bad = []
    for path in (each for depth in ("", "*/", "*/*/") for each in ROOT.glob(f"{depth}*.zh-CN.md")):
        text = re.sub(r"```.*?```|<!--.*?-->|<[^>]*>|^    [^\n]*$", "", path.read_text(), flags=re.S | re.M)
        cells = (re.sub(r"`[^`]*`", "`c`", cell).strip() for line in text.splitlines() for cell in line.split("|"))
        bad += [f"{path.name}: {what}: {cell}" for cell in cells for what in ill_written(cell)]
    assert not bad


@pytest.mark.parametrize(
    ("chinese", "wrong"),
    [
        ("每个 warp 读 `x[i]`，再写一次（见 [指南](a/README.md)）。", []),
        ("最多 2048 / (寄存器数 x 32)", []),
        ("默认 关闭", ["a space between Chinese words"]),
        ("view的步长", ["no space between Chinese and Latin"]),
        ("读 ，再写", ["a space beside full-width punctuation"]),
        ("读,再写", ["half-width punctuation beside Chinese"]),
        ("读 (两次)", ["half-width brackets around Chinese"]),
        ('叫做"块"', ["half-width quotes beside Chinese"]),
        ("块的的大小", ["a mark or a word twice"]),
        ("至少 3 倍，快到 1.5 至 2 倍，快一倍，最多 2.5 倍", []),
        ("比最大值小 2^15 倍", ["less or faster by so many times"]),
        ("program 少了 GROUP 倍", ["less or faster by so many times"]),
        ("预测：快 1.5 至 2.5 倍", ["less or faster by so many times"]),
        ("最多快三倍", ["less or faster by so many times"]),
    ],
)
def test_wrong_punctuation_is_found(chinese, wrong):
    assert ill_written(chinese) == wrong


# English in words that Chinese keeps: terms, a program's own text, and words between others.
KEPT = (
    " and ",
    "flash attention",
    "tensor cores",
    "the prologue",
    "the softmax, in fp32",
    "for each K, V block:",
    "for each Q block:",
    "with course_ops.patch(model) as patched:",
    'with gpt.variant(model, "fused") as patched:',
)


def is_english(english, chinese):
    """Whether a translation of two words or more has no Chinese. Code, quotations and names do not count."""
    prose_of = re.sub(r'`[^`]*`|"[^"]*"|\{[^}]*\}|\[[^]]*\]|\w+ in \w+', "", english)
    return bool(re.search(r"\b[a-z]{2,} [a-z]{2,}\b", prose_of)) and not re.search(HAN, chinese)


@pytest.mark.parametrize("name", words.CATALOGUES)
def test_no_translation_is_english(name):
    ready = [(m.id, m.string) for m in catalogues.load(name, "zh") if m.id and m.string and not m.fuzzy]
    assert not (same := [each for each, chinese in ready if each not in KEPT and is_english(each, chinese)]), same


def test_english_left_over_is_found():
    assert is_english("two tensors of one shape", "two tensors of one shape")
    assert not is_english("GPU `a few words`", "GPU `a few words`")


def shapes(text):
    """The brackets of a text that hold names and numbers alone: [M, N]."""
    return {
        each.replace(" ", "") for each in re.findall(r"\[[\w ,.*+/:-]*\]", text) if not re.search(r"[a-z]{3}|or ", each)
    }


@pytest.mark.parametrize("name", words.CATALOGUES)
def test_a_translation_keeps_shapes(name):
    ready = [m for m in catalogues.load(name, "zh") if m.id and m.string and not m.fuzzy]
    assert not (lost := {m.id: found for m in ready if (found := shapes(m.id) - shapes(m.string))}), lost


@pytest.mark.release
@pytest.mark.parametrize("name", words.CATALOGUES)
def test_a_release_has_every_translation(name):
    waiting = catalogues.waiting(name, "zh")
    assert not waiting, f"{name}: {len(waiting)} messages: python -m lessonkit translate --missing lists them"


# ---- Labels and tables of the lessons ----


def test_a_label_has_its_line_for_itself():
    """A command stands behind `Run it:`, and what is below belongs to neither of them."""
    label = re.compile(r"(?:\w+ it|As ranks|Check|Compile|Link|No GPU|Run|Written): *\S")
    found = {message for room in ROOMS for path in catalogues.sources(room) for message in catalogues.messages(path)}
    assert not sorted(filter(label.match, found))


def starts(text, passage, shown):
    """The columns at which the cells of a passage begin, line by line; lines of one cell are left out."""
    before = " " * (passage.start - text.rfind("\n", 0, passage.start) - 1)
    first, *rest = shown.splitlines()
    bare = [before + first, *(re.sub(r"^ *(?:#|//) ", lambda mark: " " * len(mark[0]), line) for line in rest)]
    found = ([prose.columns(line[: cell.start()]) for cell in re.finditer(r"\S+(?: \S+)*", line)] for line in bare)
    return [row for row in found if len(row) > 1]


@pytest.mark.parametrize("room", ROOMS)
def test_columns_of_a_table_are_straight_in_chinese(room):
    """Cells that begin in one column of the English table begin in one column of the Chinese one."""
    bent = []
    for path in catalogues.sources(room):
        text = path.read_text()
        for passage in prose.passages(text, path.suffix):
            english = text[passage.start : passage.stop]
            chinese = passage.render(lambda message: words.translated(message, "zh"))
            if not (rows := starts(text, passage, english)):
                continue
            made = starts(text, passage, chinese)
            pairs = [pair for row in zip(rows, made, strict=True) for pair in zip(*row, strict=True)]
            if len({old for old, new in pairs}) != len(set(pairs)):
                bent.append(f"{path.name}\n{chinese}")
    assert not bent, "\n".join(bent)


# ---- Bringing catalogues up to date ----


@pytest.fixture
def catalogue(tmp_path, monkeypatch):
    """Sets what sources say, {catalogue: messages}, and what is translated; returns what the catalogues then have."""
    monkeypatch.setattr(words, "catalogue", lambda name, language: tmp_path / f"{name}.po")
    monkeypatch.setattr(catalogues, "catalogue", words.catalogue)

    def update(**sources):
        found = {name: dict.fromkeys(sources.get(name, ()), f"{name}.py") for name in words.CATALOGUES}
        monkeypatch.setattr(catalogues, "today", lambda: found)
        catalogues.update("zh")
        return {name: {m.id: m for m in catalogues.load(name, "zh") if m.id} for name in words.CATALOGUES}

    def translate(name, filled):
        loaded = catalogues.load(name, "zh")
        for english, chinese in filled.items():
            loaded[english].string = chinese
        (tmp_path / f"{name}.po").write_text(catalogues.written(loaded))
        words._known.cache_clear()

    yield update, translate
    words._known.cache_clear()


def test_a_changed_message_keeps_its_translation_as_a_draft(catalogue):
    update, translate = catalogue
    old, new = (f"the grid has {n} programs, {'which the launch asks for, ' * 9}and no more" for n in ("four", "five"))
    update(day1=[old, "nothing else"])
    translate("day1", {old: "网格有四个 program", "nothing else": "别无其他"})
    found = update(day1=[new])["day1"]
    assert list(found) == [new]
    assert (found[new].fuzzy, found[new].string) == (True, "网格有四个 program")
    assert " ".join(found[new].auto_comments) == f"before: {old}"
    assert words.translated(new, "zh") == new
    assert [message.id for message in catalogues.waiting("day1", "zh")] == [new]
    text = words.catalogue("day1", "zh").read_text()
    update(day1=[new])
    assert words.catalogue("day1", "zh").read_text() == text


def test_a_translation_goes_with_its_message(catalogue):
    update, translate = catalogue
    update(day2=["one element"])
    translate("day2", {"one element": "一个元素"})
    found = update(day1=["one element"])
    assert not found["day2"]
    assert found["day1"]["one element"].string == "一个元素"
    assert words.translated("one element", "zh") == "一个元素"


def test_what_is_missing_and_what_is_over_is_named(catalogue, monkeypatch):
    update, _ = catalogue
    update(day1=["one element", "two elements"])
    monkeypatch.setattr(catalogues, "today", lambda: {"day1": dict.fromkeys(["two elements", "three"], "a.py")})
    assert catalogues.outdated("zh") == {"day1": (["three"], ["one element"])}


@pytest.mark.parametrize(
    ("english", "chinese", "lost"),
    [
        ("reads `x[i]` twice", "读 `x[i]` 两遍", []),
        ("reads `x[i]` twice", "读两遍", ["the code `x[i]` is missing"]),
        ("{count} passed", "通过", ["the placeholder {count} is missing"]),
        ("rows of 65,536 on an H200", "H200 上每行 65536", ["the number 65,536 is missing"]),
        ("see [the guide](a/README.md)", "见[指南](a/README.zh-CN.md)", []),
        ("softmax_row is faster", "更快", ["the name softmax_row is missing"]),
    ],
)
def test_faults_of_a_translation(english, chinese, lost):
    assert catalogues.faults(english, chinese) == lost


# ---- The language of a command ----


def run(*line):
    with show.console.capture() as printed:
        done = CliRunner().invoke(__main__.app, line)
    return done.exit_code, printed.get() + done.output


@pytest.mark.parametrize("line", [("--lang", "zh", "path"), ("path", "--lang=zh"), ("path", "--lang", "zh")])
def test_a_command_speaks_the_language_asked_for(line):
    code, text = run(*line)
    assert code == 0
    assert "paths/1h.zh-CN.md" in text
    assert words.language() == "en"


def test_the_systems_language_counts(monkeypatch):
    monkeypatch.delenv("COURSE_LANG")
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.delenv("LC_MESSAGES", raising=False)
    for value, language in (("zh_CN.UTF-8", "zh"), ("en_US.UTF-8", "en"), ("C", "en"), ("", "en")):
        monkeypatch.setenv("LANG", value)
        assert words.language() == language


def test_an_unknown_language_is_refused():
    code, text = run("path", "--lang", "fr")
    assert code == 2
    assert "en, zh" in text


def test_help_is_translated(catalogue):
    update, translate = catalogue
    english = "Explain the words of the course: `words SM`, `words lesson05_softmax`."
    update(kit=[english])
    translate("kit", {english: "解释课程的用语。"})
    assert "解释课程的用语。" in run("words", "--help", "--lang", "zh")[1]
    assert "Explain the words" in run("words", "--help")[1]


def test_the_help_of_every_command_is_in_the_catalogue():
    known = {message.id for message in catalogues.load("kit", "zh")}
    apps = [group.typer_instance for group in __main__.app.registered_groups]
    assert exercises.app in apps
    callbacks = [command.callback for app in (__main__.app, *apps) for command in app.registered_commands]
    help_of = [text for callback in callbacks for text in catalogues.help_paragraphs(inspect.getdoc(callback) or "")]
    assert len(callbacks) > 20
    assert not set(help_of) - known


def test_typers_own_words_are_translated():
    code, text = run("bench", "--help", "--lang", "zh")
    assert code == 0
    for english in ("Usage", "Options", "Arguments", "Show this", "default"):
        assert english not in text
        assert english in run("bench", "--help")[1]


def test_an_error_is_a_sentence_in_chinese():
    code, text = run("chip", "--lang", "zh", "rtx4090", "no_such_lesson")
    assert code == 2
    assert "没有课匹配" in text
    assert "Invalid value" not in text
    assert "Invalid value" in run("chip", "rtx4090", "no_such_lesson")[1]


@pytest.mark.parametrize(
    ("line", "english", "chinese"),
    [
        ("chek", "Did you mean 'check'?", "没有 'chek' 这条命令。是不是 'check'？"),
        ("exercise shw", "No such command 'shw'", "没有 'shw' 这条命令"),
        ("run --agai", "No such option: --agai", "没有 --agai 这个选项（可能是 --again）"),
        ("run --bogus", "No such option: --bogus", "没有 --bogus 这个选项"),
        ("trace", "Missing argument 'lesson'", "缺少参数 'lesson'。"),
        ("words a b", "unexpected extra argument", "多出的参数：b"),
    ],
)
def test_words_that_no_command_takes_are_refused_in_the_readers_language(line, english, chinese):
    assert english in run(*line.split())[1]
    code, text = run(*line.split(), "--lang", "zh")
    assert code == 2
    assert chinese in text
    assert english not in text


def test_a_rung_that_is_not_there_is_refused_with_the_lesson_named_once():
    text = re.sub(r"[│\s]+", " ", run("predict", "lesson01_vector_add", "nope", "x2")[1])  # in a box, on lines of 80
    assert "there is no rung 'nope'" in text
    assert text.count("lesson01_vector_add") == 1


def test_words_of_tables_are_translated_and_names_are_not(monkeypatch):
    monkeypatch.setenv("COURSE_LANG", "zh")
    cells = ["row-major", "transposed", "all", "softmax_row", "no: needs a Hopper GPU, THUNDERKITTENS_ROOT"]
    told = ["行优先", "转置", "全部", "softmax_row", "不能：需要 Hopper GPU 与 THUNDERKITTENS_ROOT"]
    assert [report.cell(cell) for cell in cells] == told
    assert sentences.told("rejected by nan, on n=1 torch.float32") == "拒绝它的检查：nan；用例：n=1 torch.float32"


@pytest.mark.parametrize("line", [("chip", "rtx4090", "lesson05_softmax"), ("stale",), ("depends", "ring_slot")])
def test_tables_have_no_english_heading(line, monkeypatch):
    row = rows.read_all(rows.REPORTS / rows.MACHINE / "day2_triton_basics.lesson01_vector_add.csv")[0]
    monkeypatch.setattr(stale, "old", lambda *_: [stale.Old(rows.MACHINE, row, "")])  # as if this row was old
    monkeypatch.setattr(stale, "show_equal", lambda: 0)
    code, text = run(*line, "--lang", "zh")
    assert code == 0
    headings = "\n".join(line for line in text.splitlines() if "┃" in line)
    assert headings
    assert not re.search(r"\b(lesson|rung|shape|why|rows|bound by|predicted)\b", headings)


def test_a_heading_of_a_notebook_stays_a_line(catalogue):
    update, translate = catalogue
    update(day4=["Baseline", "Written out."])
    translate("day4", {"Baseline": "基线", "Written out.": "逐步写出。"})
    text = "# %% [markdown]\n# ## Baseline\n# Written out.\n"
    read = prose.read_as(text, ".py", lambda message: words.translated(message, "zh"))
    assert read == "# %% [markdown]\n# ## 基线\n# 逐步写出。\n"


def test_read_prints_the_file_in_chinese(catalogue):
    update, translate = catalogue
    update(day2=["one past a block"])
    translate("day2", {"one past a block": "比一块多一个"})
    path = ROOT / "day2_triton_basics/exercises/exercise01_mul.py"
    assert run("read", "exercise01_mul") == (0, path.read_text())
    code, text = run("read", "exercise01_mul", "--lang", "zh")
    assert code == 0
    assert 'case("比一块多一个", n=1025)' in text
    assert "paragraphs have no translation yet" in text


def test_what_changes_between_rungs_is_said_in_chinese():
    code, text = run("diff", "lesson01_vector_add", "add_element", "add_block", "--lang", "zh")
    assert code == 0
    assert "+def add_block(x, y):" in text
    assert "每个 program 128 个元素" in text


def test_the_list_of_new_words_is_made_from_its_terms():
    assert (
        languages.in_words("New words (GLOSSARY.md): warp, sector.", "zh")
        == "新词（见 GLOSSARY.zh-CN.md）：warp、扇区 sector。"
    )


def test_a_file_that_is_not_one_is_refused():
    code, text = run("read", "lesson0")
    assert code == 2
    assert "expected one" in text
    assert run("read", "../etc/passwd")[0] == 2
