"""What commands print at 80 columns: no row is wider, and no cell is cut in the middle of a word without a mark."""

import itertools
import re
import warnings

import lessonkit.__main__ as cli
from lessonkit import device
from lessonkit.base.prose import breaks, columns
from lessonkit.base.words import said
from lessonkit.commands import course_run, evidence, exercises, running, show
from lessonkit.exercise import progress
from lessonkit.judge import verify
from lessonkit.lesson import discover
from lessonkit.pages import report, shares

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

WIDTH = 80
NAME = "day2_triton_basics.lesson05_softmax"
COMMANDS = [
    "list", "list day2", "path", "path 1h", "path 5d", "path 11w", "words", "words SM", "words lesson05_softmax",
    "chip", "chip h100 lesson05_softmax", "exercise list", "exercise list day2", "progress", "quiz", "stale",
    "count 02_vector_add", "depends softmax_row", "trace lesson01_vector_add add_block n=300",
    "compile lesson05_softmax", "check lesson01_vector_add", "doctor",
]  # fmt: skip
SLOW = ("count", "compile", "doctor")  # builds, compilers
MISTAKES = [
    "check lesson99", "run day99", "trace lesson01_vector_add nope", "predict lesson01_vector_add nope x2", "path 3h",
    "quiz day9", "chip nonsense", "words nonsense", "depends nothing", "diff lesson01_vector_add a b", "fuzz nothing",
    "picture lesson01_env_check", "report nothing", "versions --torch 9", "exercise hint nope", "mutants day2",
    "sanitize day2", "bench lesson01_vector_add", "trace lesson01_vector_add add_block 300",
    "trace lesson01_vector_add add_block m=3", "trace lesson01_vector_add add_block n=0",
    "trace 02_vector_add add_one", "sanitize day2 --shape x", "report final --operator nothing",
]  # fmt: skip
NAMES = sorted(get_command(cli.app).commands) + [
    f"exercise {name}" for name in sorted(get_command(exercises.app).commands)
]


@pytest.fixture(params=["en", "zh"])
def terminal(request, tmp_path, monkeypatch):
    """A terminal of 80 columns, in each language; returns (run a command, the cells of its tables)."""
    monkeypatch.setenv("COURSE_LANG", request.param)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("COURSE_ANSWERS", str(tmp_path))
    monkeypatch.setattr(course_run, "FILE", tmp_path / "run.json")
    monkeypatch.setattr(show.console, "_width", WIDTH)
    monkeypatch.setattr(report, "write", list)
    monkeypatch.setattr(report, "save_compiled", lambda name: [])
    monkeypatch.setattr(report, "save_emulated", lambda name, lines: [])
    cells = []
    table = show.table

    def recorded(heading, columns, body, legend=""):
        body = [list(map(str, line)) for line in body]
        heads = " ".join(columns)
        unknown = [name for name in re.findall(r"(?:^|[;；、] ?)([^;；、:：,，]+)[:：]", legend) if name not in heads]
        assert not unknown, f"the legend explains {unknown}, the columns are {heads}"
        cells.extend(cell for line in [list(columns)[1:], *body] for cell in line)
        table(heading, columns, body, legend)

    monkeypatch.setattr(show, "table", recorded)

    def run(command):
        app = exercises.app if command.startswith("exercise ") else cli.app
        with show.console.capture() as printed:
            done = CliRunner().invoke(app, command.removeprefix("exercise ").split())
        if isinstance(done.exception, AssertionError):
            raise done.exception
        return printed.get() + done.output

    return run, cells


def words(text):
    """What a reader sees, without frames and white space."""
    return re.sub(r"[\s│┃━─┏┓┗┛┡┩┳┻╇└┘┴┬├┤]+", "", text)


@pytest.mark.parametrize(
    "command",
    [pytest.param(each, marks=[pytest.mark.night] * each.startswith(SLOW)) for each in COMMANDS],
)
def test_a_command_fits_into_80_columns(command, terminal):
    run, cells = terminal
    progress.add("predictions", progress.Guess(NAME, "softmax_row", "M=8192 N=8192", "x2"))
    printed = run(command)
    assert printed.strip(), "it prints something"
    assert not [line for line in printed.splitlines() if columns(line.rstrip()) > WIDTH]
    seen = words(printed)
    cut = [piece for cell in cells for piece in show._parts(cell) if words(piece) not in seen]
    assert not cut or show.CUT in printed, cut


@pytest.mark.parametrize("command", MISTAKES)
def test_what_is_said_of_a_mistake_fits_into_80_columns(command, terminal):
    if device.HAS_GPU and command in ("sanitize day2", "bench lesson01_vector_add"):
        pytest.skip("with a GPU this is no mistake")
    run, _ = terminal
    printed = run(command)
    assert printed.strip(), "it prints something"
    assert not [line for line in printed.splitlines() if columns(line.rstrip()) > WIDTH]
    assert show.CUT not in printed


def test_help_fits_into_80_columns_and_says_all(terminal):
    run, _ = terminal
    for command in ["", *NAMES]:
        printed = run(f"{command} --help")
        assert not [line for line in printed.splitlines() if columns(line.rstrip()) > WIDTH], command
        assert not re.search(rf"{show.CUT} *│", printed), command
    shown = words(run("--help"))
    assert not [name for name in get_command(cli.app).commands if name not in shown]


def test_chinese_is_broken_between_characters_and_loses_none():
    text = "用这么多进程成批运行共享 kernel 的用例，在 GPU 上。softmax_online_kernel_of_a_long_name"
    assert breaks(text, 40) == [text.index("在"), text.index("soft")]
    for width in (8, 20, 40):
        ends = [0, *breaks(text, width), len(text)]
        lines = [text[a:b] for a, b in itertools.pairwise(ends)]
        assert "".join(lines) == text
        assert all(0 < columns(line.rstrip()) <= width for line in lines)
        assert not any(line[0] in "，。" for line in lines)


def test_counted_bytes_stand_beside_their_prediction_and_its_reason(terminal, monkeypatch):
    ((_, lesson),) = discover("day2_triton_basics.lesson08_layernorm")
    moved = {rung: times * 0.975 for rung, times in lesson.passes.items()}  # near enough
    monkeypatch.setattr(show, "rung_checks", lambda _, rung: verify.Checked(passed=1, moved=moved.get(rung, 1.0)))
    with show.console.capture() as printed:
        assert not show.checks(lesson)
    text = " ".join(printed.get().split())
    assert re.search(r"layernorm_row .* 1\.95 . 2\.00 ", text)
    assert words(said(lesson.passes_why)) in words(text)


def test_what_pytorch_says_of_an_empty_row_is_no_warning():
    with warnings.catch_warnings(record=True) as seen:
        torch.var_mean(torch.empty(2, 0), dim=1, correction=0)
    assert not seen


def test_a_question_fits_into_80_columns(terminal, monkeypatch):
    prompts = []
    monkeypatch.setattr("builtins.input", lambda prompt: prompts.append(prompt) or "")
    monkeypatch.setattr(evidence, "can_ask", lambda: True)
    run, _ = terminal
    printed = run("predict lesson01_vector_add add_element")
    assert re.search(r"add_element(，| at )n=", printed)
    assert max(map(columns, [*prompts, *printed.splitlines()])) <= WIDTH


@pytest.mark.skipif(device.HAS_GPU, reason="it shows stored rows")
@pytest.mark.parametrize("name", ["day2_triton_basics.lesson05_softmax", "day3_matmul_tk.lesson01_matmul"])
def test_stored_times_fit_into_80_columns(name, terminal):
    ((_, lesson),) = discover(name)
    with show.console.capture() as printed:
        show.stored(name, lesson)
    lines = printed.get().splitlines()
    assert max(map(columns, map(str.rstrip, lines))) <= WIDTH
    assert words(said(shares.LIMIT)) in words(printed.get())


@pytest.mark.parametrize("width", [24, 40, 80, 200])
def test_a_table_is_cut_between_words_or_behind_the_joints_of_a_name(width, monkeypatch):
    monkeypatch.setattr(show.console, "_width", width)
    body = [["softmax_online_kernel", "several words that need a line or two of their own", "12"], ["x", "", "1,234"]]
    with show.console.capture() as printed:
        show.table("heading", ["name", "what it is", "count"], body, "count: how many")
    text = printed.get()
    assert max(map(columns, map(str.rstrip, text.splitlines()))) <= width
    pieces = [piece.strip() for line in body for cell in line for piece in show._parts(cell)]
    assert all(piece in text for piece in pieces)
    assert "count: how many" in text
    assert ("┏" in text) == (width >= 80)


@pytest.mark.parametrize(("letter", "shown"), [("x", 19), ("“", 19), ("…", 19), ("、", 9)])
def test_a_word_longer_than_the_terminal_is_cut_with_a_mark(letter, shown, monkeypatch):
    monkeypatch.setattr(show.console, "_width", 20)
    with show.console.capture() as printed:
        show.table("", ["a", "b"], [[letter * 30, "y"]])
    assert f"{letter * shown}{show.CUT}" in printed.get()
    assert max(map(columns, printed.get().splitlines())) <= 20


def test_chinese_cells_are_as_wide_as_they_look(monkeypatch):
    monkeypatch.setattr(show.console, "_width", 40)
    with show.console.capture() as printed:
        show.table("表", ["词", "意思"], [["流", "在显卡上按次序执行的一串操作，不同的流可以同时进行。" * 2]])
    assert max(map(columns, map(str.rstrip, printed.get().splitlines()))) <= 40


def test_a_name_that_several_lessons_have_says_which(terminal, monkeypatch):
    monkeypatch.setattr(running, "_scripts", lambda names, at_once, began: (x for x in ()))
    run, _ = terminal
    text = words(run("run lesson01"))
    all_run = "lessons,andallofthemrun:|课，全部都会运行："
    assert re.search(rf"lesson01(names|指)\d({all_run})day1_pytorch\.lesson01_env_check,day2", text)
    assert re.search("Onealone:|只运行一课：", text)
    assert not re.search("names|指", run("run day2"))


def test_an_overflow_of_an_interpreted_kernel_is_no_warning():
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn_explicit("overflow", RuntimeWarning, "interpreter.py", 1, module="triton.runtime.interpreter")
    assert not seen
