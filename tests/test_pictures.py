"""Pictures of lessons: drawn from the lessons' numbers, without overlaps, and scripts that compute what Python does."""

import importlib
import itertools
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from functools import cache, partial

from lessonkit import pictures
from lessonkit.__main__ import app
from lessonkit.base import words
from lessonkit.base.chips import CHIPS
from lessonkit.base.errors import Misdeclared
from lessonkit.base.files import ROOT
from lessonkit.lesson import names
from lessonkit.pages import readme_pictures
from lessonkit.pictures import figures, models, numbers, registry
from lessonkit.pictures.draw import WIDTH, Canvas, text_width, wrapped
from lessonkit.pictures.moving import FOLDER

import pytest
from typer.testing import CliRunner

LANGUAGES = ("en", "zh")
pytestmark = pytest.mark.kept(
    "assets/**/*", "course_ops/**/*.py", "cuda_src/**/*", "day*/**/*", "lessonkit/**/*", "locale/**/*", "problems/*.py",
    "README*.md", "workloads/*.py",
)  # fmt: skip


@cache
def every() -> tuple[pictures.Picture, ...]:
    """The pictures of all lessons; to import these takes seconds."""
    return tuple(pictures.all_pictures())


def test_every_picture_belongs_to_a_lesson():
    assert {each.name for each in every()} == set(registry.kinds())
    assert {each.lesson for each in every()} <= set(names())


@pytest.mark.parametrize("language", LANGUAGES)
def test_labels_neither_overlap_nor_leave_the_picture(language):
    wrong = []
    for each in every():
        canvas = each.canvas(language)
        at = f"{each.lesson} {each.name}"
        wrong += [
            f"{at}: {a.text!r} and {b.text!r}" for a, b in itertools.combinations(canvas.labels, 2) if a.overlaps(b)
        ]
        wrong += [f"{at}: {label!r} is wider than its box" for label in canvas.cramped]
        wrong += [
            f"{at}: {label.text!r} is cut off"
            for label in canvas.labels
            if label.left < 0 or label.right > WIDTH or label.top < 0 or label.bottom > canvas.height
        ]
    assert not wrong, "\n".join(wrong)


def test_every_field_of_a_label_has_a_value():
    assert not [label for each in every() for label in each.canvas().labels if re.search(r"{\w*}", label.text)]


def test_labels_are_compared_by_their_boxes():
    canvas = Canvas()
    canvas.text(10, 10, "a long label")
    canvas.text(30, 12, "another")
    canvas.text(10, 40, "below")
    first, second, third = canvas.labels
    assert first.overlaps(second)
    assert not first.overlaps(third)
    canvas.box(10, 60, 40, 20, "a", "fits")
    canvas.box(10, 90, 40, 20, "a", "much too long for it")
    assert canvas.cramped == ["much too long for it"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_picture_is_well_formed_and_speaks(language):
    for each in every():
        root = ElementTree.fromstring(each.svg(language))
        space = "{http://www.w3.org/2000/svg}"
        assert root.find(f"{space}title").text == each.title(language), each.name
        assert len(root.find(f"{space}desc").text) > 40 or language == "zh", each.name
        assert "prefers-color-scheme:dark" in root.find(f"{space}style").text
        assert root.get("viewBox").split()[2] == str(WIDTH)
        smallest = min(float(text.get("font-size")) for text in root.iter(f"{space}text"))
        assert smallest >= 8, f"{each.name}: a label of {smallest} units cannot be read on a phone"


def test_an_id_stands_once_in_a_page():
    """A lesson's page has all its pictures in it, and each draws its arrows with its own head."""
    for lesson in {each.lesson for each in every()}:
        drawn = [each.svg() for each in every() if each.lesson == lesson]
        ids = [re.findall(r' id="([^"]+)"', svg) for svg in drawn]
        assert len({*itertools.chain(*ids)}) == sum(map(len, ids)), lesson
        for svg, own in zip(drawn, ids, strict=True):
            assert {*re.findall(r"url\(#([^)]+)\)", svg)} <= {*own}, lesson


def drawn(lesson, name):
    return next(each for each in every() if (each.lesson, each.name) == (lesson, name)).canvas()


def test_the_timeline_of_hopper_has_each_letter_that_its_caption_explains():
    labels = [label.text for label in drawn("day4_replace_op.lesson08_flash_hopper", "hopper_timeline").labels]
    assert any(label.startswith("Q: QK of a block, P: PV") for label in labels)
    assert {"Q", "P", "K", "V"} <= {*labels}


def test_the_bytes_of_a_rung_say_that_no_cache_serves_them():
    """Those that w and b cost are in them, and the lesson says what remains without; the line at 1 crosses no name."""
    canvas = drawn("day2_triton_basics.lesson08_layernorm", "traffic")
    labels = " ".join(label.text for label in canvas.labels)
    assert "where no cache serves a load" in labels
    assert "Without them the three rungs move 2, 1 and 1.5 times the least" in labels
    lines = re.findall(r'd="M([\d.]+) ([\d.]+)L[\d.]+ ([\d.]+)"', "".join(canvas.parts))
    assert len(lines) == 3
    for x, top, bottom in (map(float, line) for line in lines):
        assert not [a for a in canvas.labels if a.left < x < a.right and a.top < bottom and top < a.bottom]
    figures = {label.text for label in drawn("day4_replace_op.lesson03_flash_v1", "traffic").labels}
    assert {"11.8", "2.8"} <= figures


def test_words_are_wrapped_to_a_width():
    english = "Programs cannot wait for each other in one launch, but the second launch begins after the first."
    for text in (english, "同一次启动里的 program 不能互相等待，但第二次启动在第一次结束之后才开始。"):
        lines = wrapped(text, 10, 150)
        assert len(lines) > 2
        assert all(text_width(line, 10) <= 150 for line in lines)
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")
        assert not any(line[0] in "，。" for line in lines)


@pytest.mark.parametrize(
    ("lesson", "name", "path", "old", "new", "shows"),
    [
        ("day2_triton_basics.lesson00_program_and_block", "grid_and_mask", "", "BLOCK=4", "BLOCK=8", "BLOCK = 8"),
        ("day2_triton_basics.lesson01_vector_add", "warp_sectors", "", "BLOCK=1024", "BLOCK=512", "8 bytes per lane"),
        ("day2_triton_basics.lesson15_scan", "look_back", "", "TILE = 8192", "TILE = 4096", "4096"),
    ],
)
def test_a_changed_number_changes_the_picture(monkeypatch, lesson, name, path, old, new, shows):
    """The lesson's text with another number: the picture shows that one."""
    source = path or f"{lesson.replace('.', '/')}.py"
    picture = next(each for each in pictures.of(lesson) if each.name == name)
    before, read = picture.svg(), numbers.text
    assert old in read(source)
    monkeypatch.setattr(numbers, "text", lambda path: read(path).replace(old, new) if path == source else read(path))
    after = picture.svg()
    assert after != before
    assert shows in "".join(ElementTree.fromstring(after).itertext())


READERS = [importlib.import_module(f"lessonkit.pictures.{name}") for name in (*registry.MODULES, "figures")]


class Reads:
    """Stands for `number` and `stated`: counts what a drawing reads, and doubles one of the figures."""

    def __init__(self, monkeypatch, doubled=-1):
        self.doubled, self.read = doubled, []
        for module in READERS:
            for name in ("number", "stated"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, partial(self.value, getattr(numbers, name)))

    def value(self, read, path, what, **more):
        found = read(path, what, **more)
        self.read.append((path, what))
        return self.twice(found) if len(self.read) - 1 == self.doubled else found

    def twice(self, found):
        if isinstance(found, dict):
            return {key: self.twice(value) for key, value in found.items()}
        return tuple(map(self.twice, found)) if isinstance(found, tuple) else 2 * found


@pytest.mark.parametrize("kind", sorted(registry.kinds()))
def test_a_picture_shows_each_number_that_it_reads(monkeypatch, kind):
    """Each number in turn is doubled where it is read; the drawing is another one."""
    for each in (each for each in every() if each.name == kind):
        before = each.svg()
        with monkeypatch.context() as patched:
            counted = Reads(patched)
            each.svg()
        for nth, (path, what) in enumerate(counted.read):
            with monkeypatch.context() as patched:
                Reads(patched, nth)
                assert each.svg() != before, f"{each.lesson} {kind} reads {what} of {path} and does not show it"


def test_a_number_that_is_gone_is_named():
    with pytest.raises(Misdeclared, match=r"lesson01_vector_add.py in add_block binds no number to WIDTH"):
        numbers.number("day2_triton_basics/lesson01_vector_add.py", "WIDTH", inside="add_block")
    with pytest.raises(Misdeclared, match=r"13_transpose.cu has no `constexpr int SIDE`"):
        numbers.number("cuda_src/13_transpose.cu", "SIDE")
    with pytest.raises(Misdeclared, match=r"lesson99.py, which does not exist"):
        numbers.number("day2_triton_basics/lesson99.py", "BLOCK")
    with pytest.raises(Misdeclared, match="no longer states"):
        numbers.stated("README.md", r"(\d+) wheels")


def test_numbers_are_read_where_they_stand(tmp_path, monkeypatch):
    text = """
SIDE, (ROWS, COLUMNS) = 4, (8, 2 * 8)
WIDE = gl.constexpr(SIDE * 16)
def launch(x, D, warps=4):
    stages = 4 if D == 64 else 2
    kernel[(1,)](x, BLOCK=triton.next_power_of_2(100), SIDE=SIDE)
CONFIG = Config({"GROUP": 8})
"""
    monkeypatch.setattr(numbers, "text", lambda path: "constexpr int A = 4, B = A * 8;" if path == "x.cu" else text)
    assert numbers.number("x.py", "COLUMNS") == 16
    assert numbers.number("x.py", "WIDE") == 64
    assert numbers.number("x.py", "stages", inside="launch", D=128) == 2
    assert numbers.number("x.py", "BLOCK", inside="launch") == 128
    assert numbers.number("x.py", "warps", inside="launch") == 4
    assert numbers.number("x.py", "GROUP") == 8
    assert numbers.number("x.py", "SIDE", inside="launch") == 4
    assert numbers.number("x.cu", "B") == 32


def test_a_lesson_that_names_no_picture_of_ours_is_told(monkeypatch):
    with pytest.raises(Misdeclared, match="there is no lesson 'lesson99'"):
        pictures.of("lesson99")
    registry.kinds()
    monkeypatch.delitem(registry._KINDS, "warp_sectors")
    with pytest.raises(Misdeclared, match="names the picture 'warp_sectors'; there are"):
        pictures.of("day2_triton_basics.lesson01_vector_add")


# ---- Figures that move ----

CASES = {
    "block_mask": (
        figures.BLOCK_MASK, models.block_mask, [{"n": n, "block": b} for n in (1, 10, 64) for b in (1, 4, 8)],
    ),
    "sectors": (figures.SECTORS, models.sectors, [
        {"stride": stride, "offset": offset, "size": size}
        for stride in (0, 1, 2, 3, 33) for offset in (0, 1, 7) for size in (1, 2, 4, 16)
    ]),
    "banks": (
        figures.BANKS, lambda **p: models.banks(figures.BANKS.data()["tile"], **p),
        [{"pad": p, "swizzle": s, "column": c} for p in range(5) for s in (0, 1) for c in (0, 5)],
    ),
    "online_softmax": (
        figures.ONLINE_SOFTMAX, lambda block, step: models.online_softmax(figures.SOFTMAX_ROW, block),
        [{"block": b, "step": 1} for b in (1, 2, 4, 8)],
    ),
    "tile_order": (figures.TILE_ORDER, models.tile_order, [
        {"tiles_m": m, "tiles_n": n, "group": g, "sms": s} for m, n in ((12, 12), (5, 9)) for g in (1, 4, 16)
        for s in (7, 16, 132)
    ]),
    "occupancy": (
        figures.OCCUPANCY,
        lambda chip, warps, registers, shared: models.occupancy(CHIPS[chip], warps, registers, shared * 1024),
        [{"chip": c, "warps": w, "registers": r, "shared": s} for c in CHIPS for w in (1, 4, 16)
         for r in (8, 72, 168, 248) for s in (0, 16, 60, 227)],
    ),
    "ring": (
        figures.RING, lambda stages, load, multiply, step: models.ring(stages, load, multiply, 9),
        [{"stages": s, "load": ld, "multiply": 1024, "step": 0} for s in (1, 2, 4) for ld in (300, 900, 2000)],
    ),
    "attention": (
        figures.ATTENTION,
        lambda D, stages, order: models.attention(order, **figures.attention_cycles(int(D)), stages=stages, blocks=8),
        [{"D": D, "stages": s, "order": o} for D in ("64", "128") for s in (1, 2, 4) for o in models.ORDERS],
    ),
    "causal": (figures.CAUSAL, models.causal, [
        {"queries": q, "keys": k, "rows": r, "columns": c}
        for q, k in ((1024, 1024), (192, 448), (448, 192)) for r in (64, 128) for c in (64, 256)
    ]),
    "roofline": (
        figures.ROOFLINE, lambda chip, rate, log2: models.roofline(CHIPS[chip], rate, 2.0**log2),
        [{"chip": c, "rate": r, "log2": i} for c in CHIPS for r in ("fp32", "bf16", "fp8") for i in (-4, 3.5, 12)],
    ),
}  # fmt: skip

PEN = """
const calls = [];
const pen = new Proxy({ lowest: 0 }, { get: (pen, name) => name in pen ? pen[name] : (...args) => {
  for (const each of args.flat(2)) {
    if (each === undefined || Number.isNaN(each)) throw new Error(`${String(name)}(${args}): ${each}`);
  }
  calls.push([name, ...args]);
} });
function fill(words, values) {
  return words.replace(/\\{(\\w+)\\}/g, (_, name) => {
    if (values[name] === undefined) throw new Error(`${words}: no ${name}`);
    return values[name];
  });
}
"""


def test_every_figure_is_compared():
    assert {figure.script for figure in figures.FIGURES} == set(CASES)
    assert {path.stem for path in FOLDER.glob("*.js")} == {"run", *CASES}
    shown = {each.figure.script for each in every() if each.figure}
    assert shown == set(CASES), "a figure that no lesson's picture has"


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed: the figures' scripts cannot run")
@pytest.mark.parametrize("script", CASES)
def test_script_and_python_compute_the_same(script):
    """model() of the script for each case, and a drawing that gives the pen no undefined value."""
    figure, model, cases = CASES[script]
    payload = figure.payload("en")
    text = (FOLDER / f"{script}.js").read_text() + PEN
    text += f"const {{ data, words }} = {json.dumps(payload)};\n"
    text += f"const out = {json.dumps(cases)}.map((p) => {{ const m = figure.model(p, data);"
    text += "figure.draw(pen, m, p, data, words); return { m, said: figure.say(m, p, data, words) }; });\n"
    text += "console.log(JSON.stringify({ out, drawn: calls.length }));"
    done = subprocess.run(["node", "-"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["drawn"] > len(cases)
    for case, result in zip(cases, found["out"], strict=True):
        same(result["m"], json.loads(json.dumps(model(**case))), f"{script} {case}")
        assert not re.search(r"NaN|undefined|Infinity|\{", result["said"]), result["said"]


def same(found, wanted, at):
    if isinstance(wanted, dict):
        assert set(found) == set(wanted), at
        for key in wanted:
            same(found[key], wanted[key], f"{at}: {key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), at
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            same(one, other, f"{at}[{i}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-9), at
    else:
        assert found == wanted, at


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_fragment_stands_alone(language):
    for figure in figures.FIGURES:
        text = figure.fragment("A title", language)
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), f"{figure.script} asks the network"
        stored = json.loads(re.search(r'<script type="application/json">(.*?)</script>', text, re.S)[1])
        assert stored == json.loads(json.dumps(figure.payload(language)))
        values = {control["name"]: control["value"] for control in stored["controls"]}
        assert set(values) == set(CASES[figure.script][2][0]), "the test's cases and the controls have the same names"
        for control in stored["controls"]:
            if control["choices"]:
                assert control["value"] in [value for value, _ in control["choices"]], control["name"]
            else:
                assert control["min"] <= control["value"] <= control["max"], control["name"]


def test_models_agree_with_what_is_known():
    assert models.sectors(1, 0, 4)["count"] == 4
    assert models.sectors(8, 0, 4)["count"] == 32
    assert models.sectors(1, 1, 4)["count"] == 5
    assert models.banks(32, 0, False, 3)["wavefronts"] == 32
    assert models.banks(32, 1, False, 3)["wavefronts"] == 1
    assert models.banks(32, 0, True, 3)["wavefronts"] == 1
    assert [step["stage"] for step in models.ring(3, 100, 100, 5)] == [0, 1, 2, 0, 1]
    assert [step["parity"] for step in models.ring(2, 100, 100, 5)] == [0, 0, 1, 1, 0]
    one, four = models.ring(1, 900, 1024, 9)[-1]["released"], models.ring(4, 900, 1024, 9)[-1]["released"]
    assert one == 9 * (900 + 1024)
    assert four == 900 + 9 * 1024
    order = models.tile_order(12, 12, 4, 16)
    assert order["first"] == 8
    assert models.tile_order(12, 12, 1, 16)["first"] == 14
    assert sorted(order["order"]) == [[r, c] for r in range(12) for c in range(12)]
    assert models.causal(256, 256, 128, 128) == [["masked", "skipped"], ["whole", "masked"]]
    assert models.causal(128, 256, 128, 128) == [["whole", "masked"]]


def test_the_dynamic_schedule_is_the_most_even():
    plans = models.schedules(8, 5, 7)
    assert {sum(plan) for plan in plans.values()} == {5 * 8 * 9 // 2}
    assert max(plans["dynamic"]) <= min(max(plans["in order"]), max(plans["longest first"]))
    assert models.schedules(2, 1, 2)["in order"] == [1, 2]


def test_overlap_beats_one_after_the_other():
    cycles = {
        order: models.attention(order, **figures.attention_cycles(64), stages=2, blocks=12)["cycles"]
        for order in models.ORDERS
    }
    matmuls = 4 * figures.attention_cycles(64)["matmul"]
    assert matmuls <= cycles["overlap"] < cycles["serial"]
    starved = models.attention("overlap", **figures.attention_cycles(64), stages=1, blocks=12)
    assert starved["cycles"] > cycles["overlap"], "with one stage the loads are no longer ahead"


# ---- Words ----


def said() -> set[str]:
    """The English of every picture and figure."""
    found = {words.english for figure in figures.FIGURES for words in figure.says()}
    for each in every():
        found |= {words.english for words in each.canvas().said} | {each.heading.english, each.description.english}
    return found


@pytest.mark.release
def test_every_word_has_its_chinese():
    missing = words.missing(sorted(said()), "zh")
    assert not missing, f"{words.CATALOGUES['zh']} lacks:\n" + "\n".join(missing)


def test_chinese_fills_the_same_fields():
    for english in said():
        fields = set(re.findall(r"\{(\w+)[:}]", english))
        assert set(re.findall(r"\{(\w+)[:}]", words.translated(english, "zh"))) == fields, english


# ---- The READMEs' pictures, and the command ----


def test_readmes_show_what_the_code_draws():
    shown = readme_pictures.pages()
    assert len(shown) == 4
    assert set(shown) == set(ROOT.glob("assets/**/*.svg")), "a file that no README shows, or one that is missing"
    for path, drawing in shown.items():
        assert path.read_text() == drawing, f"{path} is old: python -m lessonkit report"


def test_a_readme_that_shows_no_picture_is_told(monkeypatch, tmp_path):
    (tmp_path / "README.md").write_text('<img src="assets/en/lesson01_vector_add.grid.svg">')
    (tmp_path / "README.zh-CN.md").write_text("")
    monkeypatch.setattr(readme_pictures, "ROOT", tmp_path)
    with pytest.raises(Misdeclared, match="lesson01_vector_add names no picture grid"):
        readme_pictures.pages()


def test_the_command_writes_svg(tmp_path):
    runner = CliRunner()
    done = runner.invoke(app, ["picture", "lesson05_softmax", "--lang", "zh", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(written) == {"lesson05_softmax.online_softmax.svg", "lesson05_softmax.traffic.svg"}
    assert "只走一遍" in written["lesson05_softmax.online_softmax.svg"]
    assert runner.invoke(app, ["picture", "lesson05_softmax", "--lang", "fr"]).exit_code == 2
    none = runner.invoke(app, ["picture", "lesson01_env_check", "--out", str(tmp_path)])
    assert none.exit_code == 1
    assert "names a picture" in none.output
