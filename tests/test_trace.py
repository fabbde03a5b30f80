"""`trace`: which program reads and writes what, held against what the kernels' own formulas say."""

import html.parser
import itertools
import json
import re

import lessonkit.__main__ as cli
from lessonkit import device
from lessonkit.commands import show
from lessonkit.judge import trace
from lessonkit.lesson import kernels
from lessonkit.pages import trace_page

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

pytestmark = pytest.mark.skipif(not device.INTERPRETED, reason="this machine has a GPU: nothing is interpreted")
invoke = CliRunner().invoke
ADD = "day2_triton_basics.lesson01_vector_add"


def steps_of(which, rung, *words):
    ((_, lesson),) = kernels(which)
    return trace.trace(lesson, trace.rung(lesson, rung), trace.shape(lesson, words))


def test_blocks_of_a_vector():
    n, block = 300, 128
    found = steps_of(ADD, "add_block", f"n={n}")
    expected = [
        (p, kind, name, f"{p * block}:{min(n, (p + 1) * block)}", max(0, (p + 1) * block - n))
        for p in range(3)
        for kind, name in (("load", "x_ptr"), ("load", "y_ptr"), ("store", "z_ptr"))
    ]
    assert [(s.program[0], s.kind, s.tensor.argument, s.where, s.masked) for s in found] == expected
    assert {s.sectors for s in found} == {32 * 2 // trace.SECTOR}  # bf16
    assert found[0].source == "x = tl.load(x_ptr + offsets, mask=mask)"
    assert sum(s.bytes for s in found) == 3 * n * 2


def test_one_element_a_program_fetches_a_sector_for_each():
    totals = trace.totals(steps_of(ADD, "add_element", "n=5"))
    assert {t.asked for t in totals.values()} == {5 * 2}
    assert {t.fetched for t in totals.values()} == {5 * trace.SECTOR}


def test_every_element_of_the_result_is_written_once():
    """Rows with padding between: indices are the tensor's, whatever its strides."""
    found = steps_of("day2_triton_basics.lesson05_softmax", "softmax_row", "M=3", "N=5", "pad=2")
    written = [e for s in found if s.kind == "store" for e in s.elements]
    read = [e for s in found if s.kind == "load" for e in s.elements]
    assert sorted(written) == sorted(read) == list(range(15))
    assert [s.where for s in found if s.kind == "store"] == ["0, 0:5", "1, 0:5", "2, 0:5"]


@pytest.mark.parametrize("strides", [(12, 4, 1), (1, 2, 6), (40, 10, 2)])
def test_coordinates_invert_strides(strides):
    shape = (2, 3, 4)
    index = np.array(list(itertools.product(*map(range, shape))))
    if strides == (1, 2, 6):
        assert torch.empty(4, 3, 2).permute(2, 1, 0).stride() == strides
    at = trace.coordinates(index @ strides, shape, strides)
    assert (np.stack(at, axis=1) == index).all()


def test_ranges_say_steps_and_single_indices():
    assert trace.ranges((np.array([2, 2]), np.array([0, 4]), np.array([5, 6]))) == ["2", "0:5:4", "5:7"]


def in_one_line(text):
    """What a box of a terminal says, however wide the terminal is."""
    return " ".join(re.sub("[╭─╮│╰╯]", " ", text).split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["add_blok"], "there are add_element, add_block, add_wide"),
        (["add_block", "m=3"], "they take n"),
        (["add_block", "300"], "write NAME=VALUE, with a name of n"),
        (["add_block", "n=many"], "n='many' is no size: write a whole number"),
        (["add_block", "n=3.5"], "n=3.5 is no size"),
        (["add_block", "n=-3"], "the inputs cannot be made from"),
        (["add_element", "n=100000"], "choose a smaller shape"),
        (["add_block", "n=0"], "there is nothing to trace"),
        (["add_block", "--lang", "fr"], "--lang takes one of en, zh"),
    ],
)
def test_what_cannot_be_traced_is_said(words, says):
    result = invoke(cli.app, ["trace", ADD, *words])
    assert result.exit_code == 2, result.output
    assert says in in_one_line(result.output)


def test_several_lessons_are_named():
    result = invoke(cli.app, ["trace", "vector_add", "add_block"])
    assert result.exit_code == 2
    assert "cuda_src.02_vector_add" in in_one_line(result.output)


def test_the_terminal_has_80_columns(monkeypatch):
    monkeypatch.setattr(show.console, "_width", 80)
    result = invoke(cli.app, ["trace", ADD, "add_element", "n=40"])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert "steps left out" in result.output
    assert "│ 120 " in result.output  # the last step
    assert "│ 60 " not in result.output


@pytest.mark.parametrize(("lang", "reads"), [("en", "reads"), ("zh", "读取")])
def test_the_page_holds_every_step_and_loads_nothing(lang, reads, tmp_path):
    file = tmp_path / "new" / "trace.html"
    result = invoke(cli.app, ["trace", ADD, "add_block", "n=300", "--page", str(file), "--lang", lang])
    assert result.exit_code == 0, result.output
    text = file.read_text()
    assert not any(word in text for word in ("http:", "https:", "src=", "@import", "@DATA", "@LANG"))
    found = {}

    class Parser(html.parser.HTMLParser):
        at = None

        def handle_starttag(self, tag, attrs):
            self.at = dict(attrs).get("id")
            if self.at == "at":
                found["last"] = int(dict(attrs)["max"])

        def handle_data(self, data):
            if self.at == "data" and data.strip():
                found.setdefault("data", data)

    Parser().feed(text)
    told = json.loads(found["data"])
    assert len(told["steps"]) == found["last"] + 1 == 9
    assert told["steps"][-1]["runs"] == [[256, 44]]
    assert [t["name"] for t in told["tensors"]] == ["x_ptr", "y_ptr", "z_ptr"]
    assert told["words"]["load"] == reads


def test_runs_join_neighbours():
    assert trace_page.runs([5, 1, 2, 2, 6, 9]) == [(1, 2), (5, 2), (9, 1)]
