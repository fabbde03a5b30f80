"""The prose of a file: which paragraphs are messages, and how a file looks in other words."""

import re
import textwrap

from lessonkit.base import prose

import pytest

LESSON = '''
"""Softmax: five passes become two
===============================
softmax(x) reads MN elements and writes MN. The floor on an H200 is 0.064 ms,
whatever the kernel does.

    one kernel       x is read once, y is written once    2MN
                     and nothing else
    y = exp(x - m) / s
    [ 1    3    2 ] --> [ block 0 ]

New words (GLOSSARY.md): warp, lane.
Check it:  python3 course.py check lesson05_softmax

- the first of two items, which goes
  on in the next line
- the second
"""

import torch  # noqa: F401


# ---- Rungs -----------------------------------------------
# Rung 1. New: a block owns
# a row of x.
def rung(x):  # [M, N] -> [M, N]
    """[M, N] -> [M, N], a row each program."""
    y = x + 1  # the row of this program
    # [M, N]
    return y  # y


LESSON = Lesson(
    predicted=(Prediction(rung=rung, why="The caches hold it, "
                          "so it is faster."),),
    wrong=(Mutant("no maximum is subtracted", "a", "b"),),
    checks=(case("one past a block", n=5),),
)
'''

NOTED = """
def step():
    note = (
        "Sorted by time, "
        "the slowest first."
    )
    note = f"{note} more"
    other = "these words are for nobody"
    return Table("x", rows, note)
"""

PROGRAM = """
// Vector add: three ways to load
// ==============================
//
// z = x + y over n floats reads 8n bytes
// and writes 4n.
#include "course.cuh"

constexpr int THREADS = 256;  // a block; 8 of them fill an SM
const char* url = "http://x";  // New
__global__ void f(float* z) { z[0] = 1; }  // [n]
#endif  // COURSE_EXTENSION
"""


def test_messages_of_a_lesson():
    assert prose.messages(LESSON, ".py") == [
        "Softmax: five passes become two",
        "softmax(x) reads MN elements and writes MN. The floor on an H200 is 0.064 ms, whatever the kernel does.",
        "one kernel",
        "x is read once, y is written once and nothing else",
        "Check it:",
        "the first of two items, which goes on in the next line",
        "the second",
        "Rungs",
        "Rung 1. New: a block owns a row of x.",
        "[M, N] -> [M, N], a row each program.",
        "the row of this program",
        "The caches hold it, so it is faster.",
        "one past a block",
    ]


def test_the_note_of_a_table_is_a_message():
    assert prose.messages(NOTED, ".py") == ["Sorted by time, the slowest first."]
    read = prose.read_as(NOTED, ".py", lambda message: "按时间排序。")
    assert 'note = (\n        "按时间排序。"\n    )' in read


def test_messages_of_a_program():
    assert prose.messages(PROGRAM, ".cu") == [
        "Vector add: three ways to load",
        "z = x + y over n floats reads 8n bytes and writes 4n.",
        "a block; 8 of them fill an SM",
        "New",
    ]


@pytest.mark.parametrize(("text", "suffix"), [(LESSON, ".py"), (PROGRAM, ".cu")])
def test_other_line_breaks_change_no_message(text, suffix):
    paragraph = {".py": "# Rung 1. New: a block owns\n# a row of x.", ".cu": "reads 8n bytes\n// and writes 4n."}[
        suffix
    ]
    mark = {".py": "# ", ".cu": "// "}[suffix]
    words = paragraph.replace(f"\n{mark}", " ")
    other = words.replace(" New: ", f"\n{mark}New: ").replace(" 8n ", f"\n{mark}8n ")
    assert other != paragraph
    assert prose.messages(text.replace(paragraph, other), suffix) == prose.messages(text, suffix)


def test_a_file_in_the_same_words_is_the_same_file():
    assert prose.read_as(LESSON, ".py", lambda message: message) == LESSON


def test_a_file_in_chinese():
    words = {
        "Softmax: five passes become two": "Softmax：五遍变两遍",
        "x is read once, y is written once and nothing else": "x 读一次，y 写一次",
        "Check it:": "检查：",
        "Rung 1. New: a block owns a row of x.": "第 1 级。新：一个块负责 x 的一行。",
        "The caches hold it, so it is faster.": '缓存里有，"所以"更快。',
    }
    read = prose.read_as(LESSON, ".py", lambda message: words.get(message, message))
    assert '"""Softmax：五遍变两遍\n===================\n' in read
    assert "    one kernel       x 读一次，y 写一次                   2MN\n    y = exp" in read
    assert "检查：     python3 course.py check lesson05_softmax" in read
    assert "# 第 1 级。新：一个块负责 x 的一行。\ndef rung" in read
    assert 'why="缓存里有，\\"所以\\"更快。"),' in read


def test_long_chinese_is_wrapped_by_its_width():
    text = "每个 program 读一行，" * 30 + "见 `tl.load(x_ptr + offsets)`。"
    lines = prose.wrapped(text, 60, 40)
    assert prose.columns(lines[0]) <= 40
    assert all(50 < prose.columns(line) <= 60 for line in lines[1:-1])
    assert not any(line.startswith(("，", "。")) for line in lines)
    assert re.sub(r"\s", "", "".join(lines)) == re.sub(r"\s", "", text)
    kept = prose.wrapped(text, 60, 60, keep_spaces=True)
    assert "".join(kept) == text


@pytest.mark.parametrize("mark", ["-", "*", "+", "3.", "12)"])
def test_a_line_that_is_broken_anew_begins_no_list(mark):
    """Of `x - m` the page of a lesson made a paragraph and an item."""
    text = f"令 s = sum(exp(x {mark} m)) 为这一行的和{mark} n，"
    for width in range(24, 60):
        lines = prose.wrapped(text, width, width)
        assert not [line for line in lines if line.startswith(f"{mark} ")], (width, lines)
        assert all(prose.columns(line) <= width for line in lines)
    assert prose.wrapped(f"{mark} 一项", 8, 8)[0].startswith(f"{mark} ")


def test_a_docstring_keeps_its_margin():
    text = textwrap.dedent('''
        class A:
            def f(self):
                """What it does, in words that are
                long enough for two lines.
                """
    ''')
    read = prose.read_as(text, ".py", lambda message: "它做什么，" * 30)
    inside = read.split('"""')[1].splitlines()
    assert len(inside) > 3
    assert all(
        line.startswith("        它") or line.startswith("        做") or line[8] in "什么，" for line in inside[1:-1]
    )
    compile(read, "a.py", "exec")


TABLES = '''
"""Where the time goes.

    unit           work                                  cycles
    tensor cores   128 * 64 multiply-adds, 2048 a cycle  1024
    latency        until a load's first bytes arrive     600 to 1000
    4% fewer       warps = 4 * n                         python -m a b
    ring           [ a part ]                            stage 3

    order.py       programs start in the order of their number.
                   The last one has the longest tile. At
                   S = 16 and 4 heads this tile has 128 blocks, and 16 * 8256 / 132 = 1000 in
                   all: 12% more time.

1. The first item takes one line.
2. The second one takes two lines.
   It goes on here.
"""

ring = 1


def test(x):
    return x  # right for every x


# The learner's file ends here.
def inputs():
    # Scores grow along the keys.
    return 0  # of a row without keys
'''


def test_words_in_the_cells_of_a_table_are_messages():
    found = prose.messages(TABLES, ".py")
    assert found[1:10] == [
        "unit",
        "work",
        "cycles",
        "tensor cores",
        "128 * 64 multiply-adds, 2048 a cycle",
        "latency",
        "until a load's first bytes arrive",
        "4% fewer",
        "programs start in the order of their number. The last one has the longest tile. At S = 16 and 4 heads this "
        "tile has 128 blocks, and 16 * 8256 / 132 = 1000 in all: 12% more time.",
    ]


def test_a_table_in_chinese_keeps_its_columns():
    words = {"unit": "单元", "work": "工作", "latency": "延迟", "until a load's first bytes arrive": "到头几个字节到达"}
    read = prose.read_as(TABLES, ".py", lambda message: words.get(message, message))
    lines = [line for line in read.splitlines() if line.startswith("    ")]
    assert [prose.columns(lines[0][: lines[0].index(word)]) for word in ("工作", "cycles")] == [19, 57]
    assert [prose.columns(lines[2][: lines[2].index(word)]) for word in ("到头", "600")] == [19, 57]


def test_a_wide_cell_moves_the_column_of_every_row():
    words = {"tensor cores": "张量核心（矩阵乘的单元）", "unit": "单元", "work": "工作"}
    read = prose.read_as(TABLES, ".py", lambda message: words.get(message, message))
    lines = [line for line in read.splitlines() if line.startswith("    ")]
    for row, cells in enumerate((("工作", "cycles"), ("128 *", "1024"), ("until", "600"), ("warps", "python"))):
        assert [prose.columns(lines[row][: lines[row].index(cell)]) for cell in cells] == [30, 68]
    assert lines[4] == "    ring                      [ a part ]                            stage 3"


def test_a_line_below_a_command_is_a_paragraph():
    """`Run it:` is no cell that goes on in the next line."""
    text = '"""The title.\n\nRun it:    python a.py\nWithout a GPU it is slow.\nNo GPU:    b\n"""\n'
    assert prose.messages(text, ".py") == ["The title.", "Run it:", "Without a GPU it is slow.", "No GPU:"]
    read = prose.read_as(text, ".py", lambda message: {"Run it:": "运行：", "No GPU:": "无"}.get(message, message))
    assert "\n运行：     python a.py\nWithout a GPU it is slow.\n无         b\n" in read


def test_items_of_one_line_are_a_list():
    assert prose.messages(TABLES, ".py")[10:12] == [
        "The first item takes one line.",
        "The second one takes two lines. It goes on here.",
    ]


def test_comments_of_an_exercises_checks_are_messages():
    assert prose.messages(TABLES, ".py")[-2:] == ["Scores grow along the keys.", "of a row without keys"]
