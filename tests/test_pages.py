"""Pages of rows: predictions beside measurements, operators, lengths. Each is made of fields and rows alone."""

import codecs
import dataclasses
import re
import sys

from lessonkit import Prediction
from lessonkit.base import words
from lessonkit.base.errors import Misdeclared
from lessonkit.base.files import REPORTS
from lessonkit.commands import show
from lessonkit.judge import verify
from lessonkit.lesson import Table, discover, kernels, shape_name, title
from lessonkit.measure import fuzz_runs, operator_rows, rows
from lessonkit.measure.stale import Today, device_folders
from lessonkit.pages import (
    checked,
    compared,
    final,
    final_report,
    lengths,
    limits,
    operator_pages,
    pivots,
    plots,
    predictions,
    report,
    results,
    shares,
    shipped,
)
from lessonkit.pages import stored as stored_words

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ADD = "day2_triton_basics.lesson01_vector_add"
FOLDERS = device_folders()
N = {"n": 98432}


def a_row(**changes):
    """2 ms at 4 TB/s, the speed of the copy."""
    values = {field.name: field.type(1) for field in dataclasses.fields(rows.Row)}
    values |= {"lesson": ADD, "rung": "add_wide", "kind": "rung", "shape": "n=98432", "ms_p50": 2.0, "tb_per_s": 4.0}
    return rows.Row(**(values | {"percent_of_limit": 100.0} | changes))


@pytest.fixture
def lesson():
    return dict(discover("lesson01_vector_add"))[ADD]


# ---- Predictions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "ratio", "how"),
    [
        ({"ms": 3.0}, 1.5, "3 ms"),
        ({"tb_per_s": 2.0}, 2.0, "2 TB/s"),
        ({"percent_of_limit": 50}, 2.0, "50% of the limit"),
        ({"ms": (1.0, 1.6)}, 0.8, "1 to 1.6 ms"),
        ({"tb_per_s": (1.0, 2.0)}, 2.0, "1 to 2 TB/s"),
        ({"times": 2, "over": "add_block"}, 2.5, "2 times `add_block`"),
    ],
)
def test_a_prediction_stands_beside_what_was_measured_in_one_unit(lesson, said, ratio, how):
    """Of 2 ms, 4 TB/s, 100% of the limit; the rung before took 10 ms."""
    first, second = lesson.rungs[1:]
    said |= {"over": first} if "over" in said else {}
    lesson = dataclasses.replace(lesson, predicted=(Prediction(rung=second, at=N, **said, why="Because."),))
    found = [a_row(), a_row(rung="add_block", ms_p50=10.0, tb_per_s=0.8)]
    rate = {"1 to 1.6 ms": "5 to 8", "1 to 2 TB/s": "1 to 2"}.get(how, f"{4 / ratio:.3g}")
    (pair,) = predictions.compared(lesson, found)
    assert pair.ratio == pytest.approx(ratio)
    line = predictions.section(lesson, found, lambda row: "!").splitlines()[-1]
    measured = "4!, 5 times" if "over" in said else "4!"
    assert line == f"| **add_wide** | n=98432 | {how} | {rate} | {measured} | {ratio:.2f} | Because. |"


def test_a_prediction_for_another_card_stands_beside_its_rows_alone(lesson):
    said = Prediction(rung=lesson.rungs[2], at=N, ms=1.0, card="b200")
    lesson = dataclasses.replace(lesson, predicted=(said,))
    assert not list(predictions.compared(lesson, [a_row(gpu="NVIDIA H200")]))
    assert len(list(predictions.compared(lesson, [a_row(gpu="NVIDIA B200")]))) == 1
    assert not predictions.complaints(ADD, lesson, []), "rows of that card may be missing"
    page = predictions.not_measured(ADD, lesson)
    assert page.splitlines()[-1] == "| `add_wide` | n=98432 | B200 | 1 ms |"
    assert not predictions.not_measured(ADD, dataclasses.replace(lesson, predicted=()))
    with pytest.raises(Misdeclared, match="card='b300'"):
        Prediction(rung=said.rung, at=N, ms=1.0, card="b300")


def test_a_prediction_that_is_off_wants_a_reason_and_one_that_is_not_wants_none(lesson):
    def complaints(percent, why, found):
        said = Prediction(rung=lesson.rungs[2], at=N, percent_of_limit=percent, why=why)
        return predictions.complaints(ADD, dataclasses.replace(lesson, predicted=(said,)), found)

    found = [a_row()]
    assert not complaints(90, "", found)
    assert not complaints((60, 90), "", found)
    assert "say in `why`" in complaints((60, 80), "", found)[0]
    assert not complaints(80, "A reason.", found)
    assert "say in `why`" in complaints(80, "", found)[0]
    assert "take `why` away" in complaints(90, "A reason.", found)[0]
    assert "no row was measured" in complaints(90, "", [])[0]


@pytest.mark.parametrize(("times", "off"), [(1.4, True), (1.25, False), (1.15, False), (1.07, True), (1.0, False)])
def test_a_gain_that_is_off_by_more_than_half_wants_a_reason(lesson, times, off):
    """Measured: 1.15 times as fast as the rung before, which is within 15% of each rate but one."""
    first, second = lesson.rungs[1:]
    found = [a_row(), a_row(rung="add_block", ms_p50=2.3)]
    said = Prediction(rung=second, at=N, times=times, over=first)
    wrong = predictions.complaints(ADD, dataclasses.replace(lesson, predicted=(said,)), found)
    assert bool(wrong) == off
    reasoned = dataclasses.replace(lesson, predicted=(dataclasses.replace(said, why="Because."),))
    assert bool(predictions.complaints(ADD, reasoned, found)) == (not off)


def test_a_prediction_says_one_thing_of_a_rung_at_a_bench(lesson):
    rung = lesson.rungs[2]
    for wrong in ({}, {"ms": 1.0, "tb_per_s": 1.0}, {"times": 2}, {"ms": 1.0, "over": rung}):
        with pytest.raises(Misdeclared, match="give one of ms"):
            Prediction(rung=rung, at=N, **wrong)
    for said, says in (
        (Prediction(rung=rung, at={"n": 7}, ms=1.0), "n=7 is no bench"),
        (Prediction(rung=lesson.reference, at=N, ms=1.0), "no rung"),
        (Prediction(rung=rung, at=N, times=2, over=lesson.reference), "no rung"),
    ):
        with pytest.raises(AssertionError, match=says):
            verify.declared(ADD, dataclasses.replace(lesson, predicted=(said,)))


def stored(lesson, found, monkeypatch):
    """What `run` prints of rows where there is no GPU."""
    monkeypatch.setattr(show.rows, "read", lambda path: found)
    monkeypatch.setattr(show.Today, "why_old", lambda self, row: "changed" if row.rung == "add_wide" else "")
    with show.console.capture() as printed:
        show.stored(ADD, lesson)
    return printed.get()


def test_run_without_a_gpu_shows_the_stored_times_beside_the_predictions(lesson, monkeypatch):
    rungs = lesson.rungs
    said = (
        Prediction(rung=rungs[1], at=N, percent_of_limit=40),
        Prediction(rung=rungs[2], at=N, tb_per_s=8.0, why="Why."),
    )
    lesson = dataclasses.replace(lesson, predicted=said)
    found = [
        a_row(gpu=rows.MACHINE, rung="add_element", ms_p50=20.0, tb_per_s=0.4, percent_of_limit=10),
        a_row(gpu=rows.MACHINE, rung="add_block", ms_p50=5.0, tb_per_s=1.6, percent_of_limit=40),
        a_row(gpu=rows.MACHINE),
        a_row(rung="torch", kind="peer"),
        a_row(rung="add_block", shape="n=7", bytes=10**9),
    ]
    printed = stored(lesson, found, monkeypatch)
    assert "reports/nvidia-h200, n=98432" in printed
    assert "torch" not in printed
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    assert cells == [
        ["add_element", "20", "", "0.40 TB/s", "10%", "8%", "", ""],
        ["add_block", "5", "4x", "1.60 TB/s", "40%", "33%", "40% of the limit", "1.00"],
        ["add_wide", "2*", "2.5x", "4.00 TB/s", "100%", "83%", "8 TB/s", "0.50"],
    ]
    assert "* measured before" in printed
    assert "add_wide, why it differs: Why." in printed
    unsaid = dataclasses.replace(lesson, predicted=())
    assert "reports/nvidia-h200, n=7" in stored(unsaid, found, monkeypatch)  # the one with most bytes
    assert not stored(lesson, [], monkeypatch)


def test_the_stored_table_of_a_step_stands_above_its_note(monkeypatch):
    monkeypatch.setattr(show.console, "_width", 1000)
    with show.console.capture() as printed:
        show.from_a_gpu("day1_pytorch.lesson05_gpu_by_measurement", "lanes")
    note = stored_words.told(report.committed_note("day1_pytorch.lesson05_gpu_by_measurement", "lanes"))
    assert note
    assert printed.get().splitlines()[-1] == note


@pytest.mark.release
def test_predictions_that_failed_say_why():
    folder = REPORTS / rows.MACHINE
    wrong = [
        w for name, each in kernels() for w in predictions.complaints(name, each, rows.read(folder / f"{name}.csv"))
    ]
    assert not wrong, "\n".join(wrong)


# ---- A line for each shape ------------------------------------------------------------------------------------------


def test_shapes_are_lines_and_the_fastest_of_each_is_bold():
    found = [a_row(rung="slow", ms_p50=3.0), a_row(rung="fast"), a_row(rung="torch", kind="peer", ms_p50=2.5)]
    table = pivots.pivot(found, lambda row: f"{row.ms_p50:g}")
    assert table.splitlines()[0] == "| shape | `slow` | `fast` | torch |"
    assert table.splitlines()[2] == f"| {found[0].shape} | 3 | **2** | 2.5 |"


def test_an_option_that_is_off_is_no_other_shape():
    assert results.place(a_row(shape="S=4 causal=False")) == results.place(a_row(shape="S=4"))
    assert results.place(a_row(shape="S=4 causal=True")) != results.place(a_row(shape="S=4"))


# ---- Operators ------------------------------------------------------------------------------------------------------


def test_every_lesson_with_kernels_names_its_operator_and_no_two_share_a_page():
    lessons = [name for name, _ in kernels() if name != "cuda_src.05_stream_overlap"]  # copies, and no kernel of note
    named = {results.operator(name) for name in lessons}
    assert not {name for name in lessons if results.operator(name) == name.split(".")[1]}
    assert len({operator_pages.file_name(name) for name in named}) == len(named)
    assert operator_pages.file_name("attention, dQ alone") == "attention_dq_alone.md"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_an_operators_page_has_every_rung_of_all_its_lessons(folder):
    today = Today(kernels())
    pages = operator_pages.pages(folder, today)
    for ladder in operator_pages.ladders(folder):
        page = pages[folder / operator_pages.file_name(ladder.name)]
        for name, lesson, found in ladder.lessons:
            assert f"({name}.md)" in page
            measured = {row.rung for row in found}
            assert all(f"`{rung.__name__}`" in page for rung in lesson.rungs if rung.__name__ in measured), name
            for peer in {row.rung for row in found if row.kind == "peer" and row.ratio_to_best_peer == 1}:
                assert peer in page
        old = any(today.why_old(row) for _, _, found in ladder.lessons for row in found if row.kind != "limit")
        assert (operator_pages.ABOUT in page) == old, ladder.name


@pytest.mark.parametrize("gpu", ["nvidia-h200", "nvidia-unknown"])
def test_an_operators_page_says_the_share_of_the_data_sheet(lesson, monkeypatch, gpu):
    """4 of 4.8 TB/s, all of the limit; 67 TFLOP/s is what a vector add's dtype could have."""
    monkeypatch.setattr(
        operator_pages, "ladders", lambda folder: [operator_pages.Ladder("add", ((ADD, lesson, (row,)),))]
    )
    row = a_row(gpu=gpu, dtype="float32")
    (page,) = (page for page in operator_pages.pages(REPORTS / gpu, Today(kernels())).values() if isinstance(page, str))
    known = gpu == "nvidia-h200"
    assert ("for the H200 SXM, 4.8 TB/s, 67 TFLOP/s (fp32). Nothing exceeds it." in page) == known
    assert f"| 4.00 TB/s | 100% | {'83%' if known else ''} |" in page
    monkeypatch.setattr(operator_pages, "device_folders", lambda: [REPORTS / gpu])
    assert f"4.00 TB/s, 100%{' (83%)' if known else ''} {operator_pages.MARK} (" in operator_pages.cards(
        Today(kernels())
    )


def test_the_fastest_at_a_shape_stands_beside_the_peer_of_its_own_rounds(lesson):
    slow = (a_row(rung="add_block", ms_p50=4.0), a_row(rung="torch", kind="peer", ms_p50=1.0))
    fast = (a_row(rung="add_wide", ms_p50=2.0), a_row(rung="torch", kind="peer", ms_p50=3.0))
    (best,) = operator_pages.Ladder("add", (("a", lesson, slow), ("b", lesson, fast))).fastest()
    assert (best.row, best.peer) == fast


def test_a_peer_that_another_lesson_timed_is_the_best_where_it_is_faster(lesson):
    """CUB stands in two of four lessons on the scan: what the others reach is held against it too, with a mark."""

    def timed(rung, ms, shape, *peers):
        rung = a_row(rung=rung, ms_p50=ms, shape=shape, ratio_to_best_peer=min(p for _, p in peers) / ms)
        return [rung, *(a_row(rung=p, kind="peer", ms_p50=t, shape=shape) for p, t in peers)]

    fast = timed("add_wide", 2.0, "n=1", ("torch", 4.0)) + timed("add_wide", 2.0, "n=2", ("torch", 2.2))
    other = timed("add_block", 4.0, "n=1", ("torch", 3.9), ("CUB", 3.0))
    other += timed("add_block", 4.0, "n=2", ("CUB", 2.4))
    found = results.beside([("a", lesson, fast), ("b", lesson, other)])
    first, second = operator_pages.Ladder("add", tuple(found)).fastest()
    assert (first.peer.rung, first.row.ratio_to_best_peer) == ("CUB §", 1.5)
    assert (second.peer.rung, second.row.ratio_to_best_peer) == ("torch", 1.1)
    assert found[1][2][:3] == other[:3], "its own peer is its best"
    incomplete = [dataclasses.replace(row, ratio_to_best_peer=0.0) for row in fast]
    ((_, _, rows_), _) = results.beside([("a", lesson, incomplete), ("b", lesson, other)])
    assert {row.ratio_to_best_peer for row in rows_ if row.kind == "rung"} == {0}, "a peer's version is missing"


def test_a_peer_of_other_rounds_is_old_when_its_own_row_is():
    today = Today(kernels())
    row = a_row(rung="torch", kind="peer")
    marked = dataclasses.replace(row, rung="torch §")
    assert today.why_old(marked) == today.why_old(row) != "no such peer"


@pytest.mark.skipif(not FOLDERS, reason="no rows of a GPU")
def test_scan_is_held_against_cub_on_every_page():
    folder, today = REPORTS / rows.MACHINE, Today(kernels())
    scan = next(ladder for ladder in operator_pages.ladders(folder) if ladder.name == "scan").main()
    assert scan.peer.rung.startswith("CUB")
    elsewhere = scan.peer.rung.endswith("§")
    cell = f"CUB § | {scan.ratio} |" if elsewhere else f"CUB | {scan.ratio} |"
    contest = next(c for c in results.contests(folder) if c.name == "scan")
    for text in (operator_pages.overview("en", today), final.as_markdown("", final_report.build(folder)[1])):
        assert cell in text
        assert operator_pages.FROM_ELSEWHERE in text or not elsewhere
    assert (contest.peer.rung, f"{contest.best.ratio_to_best_peer:.2f}") == (scan.peer.rung, scan.ratio)


@pytest.mark.skipif(not FOLDERS, reason="no rows of a GPU")
@pytest.mark.parametrize(("peers", "said"), [([], False), ([("scan", "CUB")], True)])
def test_the_operators_table_names_the_peers_of_lessons_alone(monkeypatch, peers, said):
    monkeypatch.setattr(shipped, "further_peers", lambda: peers)
    text = shipped.from_rows(FOLDERS[0], "en")
    assert ("Not among the peers of this table" in text) == ("CUB (`scan`)" in text) == said


def test_no_lesson_has_a_peer_that_the_operators_lack():
    assert ("scan", "CUB") not in shipped.further_peers()


def test_a_missing_ratio_of_a_steps_table_is_marked():
    line = {"operator": "add", "best peer, ms": "2 (quack)", "over its peers": ""}
    assert operator_pages.marked(line)["over its peers"] == "‡"
    assert operator_pages.marked(line | {"best peer, ms": ""})["over its peers"] == ""
    assert operator_pages.marked(line | {"over its peers": "1.00"})["over its peers"] == "1.00"


@pytest.mark.parametrize(("ratio", "peer", "cell"), [(0.0, "quack", "‡"), (0.5, "quack", "0.50"), (0.0, "", "")])
def test_an_incomplete_row_is_marked_on_every_page(lesson, monkeypatch, ratio, peer, cell):
    """A blank would look as if it had no peer."""
    found = (a_row(ratio_to_best_peer=ratio), *([a_row(rung=peer, kind="peer")] if peer else []))
    monkeypatch.setattr(
        operator_pages, "ladders", lambda folder: [operator_pages.Ladder("add", ((ADD, lesson, found),))]
    )
    monkeypatch.setattr(Today, "why_old", lambda self, row: "")
    today = Today(kernels())
    (page,) = (page for page in operator_pages.pages(REPORTS / rows.MACHINE, today).values() if isinstance(page, str))
    readme, cards = operator_pages.overview("en", today), operator_pages.cards(today)
    assert f"| {peer} | {'2' if peer else ''} | {cell} |" in page
    assert f"| {peer} | {cell} | {cell} |" in readme
    assert (", ‡ of" if cell == "‡" else f"{cell} of") in cards or not peer
    for text in (page, readme, cards):
        assert (operator_pages.INCOMPLETE in text) == ("‡" in text) == (cell == "‡")


def test_a_range_is_of_the_shapes_that_the_fastest_lesson_timed(lesson, monkeypatch):
    """At another shape its kernel did not take part. Of those that it timed, the judged ones are counted."""
    shapes = [f"n={n}" for n in (1, 2, 3, 4)]
    ratios = dict(zip(shapes, (1.5, 1.25, 0.0, 0.25), strict=True))

    def timed(rung, ms, at):
        mine = [a_row(rung=rung, lesson=rung, ms_p50=ms, shape=n, ratio_to_best_peer=ratios[n]) for n in at]
        return *mine, *(a_row(rung="torch", kind="peer", shape=n) for n in at)

    fast, slow = timed("add_wide", 1.0, shapes[:3]), timed("add_block", 3.0, shapes)
    ladder = operator_pages.Ladder("add", (("add_block", lesson, slow), ("add_wide", lesson, fast)))
    monkeypatch.setattr(results, "main_size", lambda lessons: (shapes[0], fast[0].dtype))
    assert [best.row.shape for best in ladder.fastest()] == shapes
    assert ladder.contested() == ladder.fastest()[:3]
    monkeypatch.setattr(operator_pages, "ladders", lambda folder: [ladder])
    monkeypatch.setattr(results, "language", lambda lesson: "Triton")
    assert "| 1.25 to 1.50 (2 of 3 shapes) |" in operator_pages.overview("en", Today(kernels()))
    monkeypatch.setattr(final_report, "EVEN", 2)
    ((_, worst),) = final_report._behind(final_report._slower([ladder], []))
    assert worst.row.ratio_to_best_peer == 1.25


def test_each_lesson_of_a_ladder_starts_over(lesson):
    found = [a_row(rung=rung.__name__, ms_p50=ms) for rung, ms in zip(lesson.rungs, (4.0, 2.0, 1.0), strict=False)]
    ladder = operator_pages.Ladder("add", (("day.a", lesson, found), ("day.b", lesson, found)))
    table = operator_pages._rungs(ladder, results.place(found[0]), lambda row: "")
    over = [line.split("|")[-3].strip() for line in table.splitlines() if line.startswith("| [")]
    assert over == ["", "2.00", "2.00"] * 2


@pytest.mark.parametrize("language", words.NAMES)
def test_readme_has_a_line_for_each_operator(language):
    lines = operator_pages.overview(language, Today(kernels())).splitlines()
    for folder in FOLDERS:
        said = lines[lines.index(f"### {folder.name}") + 2]
        for ladder in operator_pages.ladders(folder):
            assert all(
                f"torch {b.row.torch.partition('+')[0]}, Triton {b.row.triton}" in said for b in ladder.fastest()
            )
            mine = [x for x in lines if f"(reports/{folder.name}/{operator_pages.file_name(ladder.name)})" in x]
            assert len(mine) == 1, ladder.name
        for contest in results.contests(folder):
            assert any(x.startswith(f"| [{contest.name}]") and f"| {contest.best.rate} |" in x for x in lines)


def test_the_index_begins_with_how_fast_it_is():
    """Then the lessons under their titles by day; what needs no GPU is folded."""
    folder = REPORTS / rows.MACHINE
    own = ("final_report.md", "gelu.md", "ncu.md", f"{ADD}.md", "day3_matmul_tk.lesson01_matmul.md",
           "day5_tuning.lesson10_roofline.roofline.png")  # fmt: skip
    made = [folder / name for name in own] + [REPORTS / name / f"{ADD}.md" for name in ("compiled", "emulated")]
    text = report._index([*made, REPORTS / "compiled/targets.md"])
    order = ["## How fast is it?", "final_report.md)", f"[GELU]({folder.name}/gelu.md)", "by lesson",
             "### day2_triton_basics", f"[{title(ADD)}]({folder.name}/{ADD}.md)", "### day3_matmul_tk", "## compiled",
             "targets.md)", "<details>", "## emulated", f"Nsight Compute: {folder.name}]", "</details>"]  # fmt: skip
    places = [text.rindex(words) if words == "</details>" else text.index(words) for words in order]
    assert places == sorted(places)
    assert "[ncu]" not in text
    assert all(text.count(str(path.relative_to(REPORTS))) == 1 for path in made)


def test_a_table_of_kernels_has_units_and_no_column_that_says_one_thing():
    first = {
        "rung": "a",
        "kernel": "k",
        "target": "80",
        "occupancy": "0.125",
        "shared": "8",
        "tma": "0",
        "loads": "2.0",
    }
    table, same = report._lean([first, first | {"rung": "b", "target": "gfx942", "loads": "2.5"}]).split("\n\n")
    assert table.splitlines() == [
        "| rung | kernel | target | loads |", "|---|---|---|---|",
        "| a | k | sm_80 | 2 |", "| b | k | gfx942 | 2.5 |",
    ]  # fmt: skip
    assert same == "The same in every line: occupancy 12.5%, shared (bytes a program) 8. Zero in every line: tma.\n"
    assert report._lean([first]).splitlines()[2] == "| a | k | sm_80 | 12.5% | 8 | 2 |"


# ---- Over the sequence length ---------------------------------------------------------------------------------------


def attention(rung, S, rate, **of):
    B = 16384 // S
    return a_row(rung=rung, shape=f"B={B} H=16 S={S} D=128 causal=True", tflop_per_s=rate, **of)


def test_attention_is_drawn_over_the_length():
    """Its least bytes are the same at each; shapes with other work are left out."""
    found = [("ours", attention("ours", S, rate)) for S, rate in ((512, 300.0), (4096, 700.0))]
    found.append(("ours", a_row(rung="ours", shape="B=1 H=1 S=4096 D=128 causal=True", tflop_per_s=1.0)))
    picture = plots.over_length("attention", found, ours=("ours",))
    assert picture.data == [("D=128 causal=True", "ours", 512, 300.0), ("D=128 causal=True", "ours", 4096, 700.0)]
    assert picture.is_in(picture.png())
    assert plots.over_length("softmax", [("ours", a_row())], ours=("ours",)) is None
    assert plots.over_length("one length", found[:1], ours=("ours",)) is None


def figure_of(picture):
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    picture.draw(figure)
    return figure


def test_a_rung_looks_the_same_in_all_panels_and_unlike_the_others():
    """More rungs than colours; the first is not in each panel."""
    rungs = [f"rung{i}" for i in range(9)]
    found = [
        (rung, a_row(rung=rung, shape=f"B={16384 // S} H=16 S={S} D={D}", tflop_per_s=10.0 * S))
        for D, those in ((64, rungs), (128, rungs[1:]))
        for rung in those
        for S in (512, 4096)
    ]
    fewer, more = (
        {name: (line.get_color(), line.get_linestyle()) for name, line in zip(those, axes.lines, strict=True)}
        for axes, those in zip(figure_of(plots.over_length("", found, rungs)).axes, (rungs[1:], rungs), strict=True)
    )
    assert fewer == {rung: more[rung] for rung in fewer}
    assert len({*more.values()}) == 9


def test_a_copy_that_presses_all_rungs_onto_zero_makes_a_logarithmic_axis():
    def scale(rate):
        sizes = [{"shape": f"n={n}", "bytes": n} for n in (1, 1000)]
        found = [a_row(**size, tb_per_s=rate) for size in sizes]
        found += [a_row(**size, rung="copy", kind="limit", tb_per_s=4.0) for size in sizes]
        return figure_of(plots.speed("sort", found, ["add_wide"])).axes[0].get_yscale()

    assert (scale(0.1), scale(3.0)) == ("log", "linear")


def test_a_lesson_with_one_size_has_no_plot():
    found = [a_row(), a_row(rung="copy", kind="limit")]
    assert plots.speed("one size", found, ["add_wide"]) is None


def test_what_stands_over_names_is_not_joined():
    """A colour for each lesson, and a mark for each value of the third column."""
    cells = [("01 tiles", 40), ("01 grouped", 50), ("02 fma", 1)]
    table = [{"rung": rung, "%": share + more, "size": size} for rung, share in cells
             for size, more in ((4096, 0), (8192, 1))]  # fmt: skip
    (axes,) = figure_of(plots.lines("percent", table, "rung", "%", "size")).axes
    assert not axes.lines
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["4096", "8192"]
    for points in axes.collections:
        first, second, third = map(tuple, points.get_facecolors())
        assert first == second != third
    steps = [{"step": f"{n}%", "MB": n} for n in (0, 50, 100)]
    (line,) = figure_of(plots.lines("memory", steps, "step", "MB", "")).axes[0].lines
    assert list(line.get_xdata()) == [0, 50, 100]


@pytest.mark.parametrize("ends", [(1050, 1880), (27, 290), (1500, 14000), (9, 150)])
def test_ticks_of_times_do_not_stand_on_each_other(ends):
    figure = Figure(figsize=(15, 12), layout="constrained")
    axes = figure.subplots(3, 3)[0][2]
    compared._scatter(axes, [{"predicted": end, "us": end} for end in ends])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    low, high = axes.get_xlim()
    shown = [
        text for text in axes.get_xticklabels(which="both") if text.get_text() and low <= text.get_position()[0] <= high
    ]
    boxes = [text.get_window_extent() for text in shown]
    assert len(boxes) > 1
    assert not [1 for i, box in enumerate(boxes) for other in boxes[:i] if box.overlaps(other)]


def test_a_plot_is_told_in_words():
    big = {"shape": "n=1000", "bytes": 1000, "gpu": "nvidia-h200"}
    found = [a_row(gpu="nvidia-h200"), a_row(**big, ms_p50=1.0, tb_per_s=3.87), a_row(**big, rung="slow")]
    found.append(a_row(**big, rung="copy", kind="limit", tb_per_s=4.004))
    assert plots.alt("Softmax", found) == "Softmax, nvidia-h200: TB/s by size. At n=1000: add_wide 3.87, copy 4."
    table = Table("loss", [{"step": 1, "loss": "10.9"}, {"step": 9, "loss": "4.6"}], "", x="step", y="loss")
    assert plots.alt_of_table(table) == "loss: loss from 4.6 to 10.9, over step from 1 to 9."


def test_a_table_over_the_length_becomes_a_pivot_with_ratios_and_a_sentence(monkeypatch):
    def row(name, S, rate, peak):
        return {"attention": name, "S": str(S), "TFLOP/s": str(rate), "peak MB": str(peak)}

    kept = [row("mine", 512, 100, 7), row("mine", 1024, 300, 7), row("older", 1024, 90, 7), row("A", 512, 200, 10),
            row("A", 1024, 200, 40), row("B", 512, 50, 7), row("B", 1024, 250, 7)]  # fmt: skip
    monkeypatch.setattr(report, "kept_table", lambda *of: kept)
    table = lengths.compared("some.lesson", "forward", ("A", "B", "C"))(REPORTS)
    assert [tuple(line.values()) for line in table.rows] == [
        ("**mine**", "100", "**300**"),
        ("B", "50", "250"),
        ("A", "**200**", "200"),
        ("**older**", "", "90"),
        (f"**{lengths.OURS}**", "**0.50**", "**1.20**"),
    ]
    assert table.note == (
        "The course's fastest runs at 0.50 to 1.20 times the best peer, which is A at S = 512; B at S = 1024. "
        "Not timed here: C."
    )
    assert plots.of_table(table).png()
    memory = lengths.memory("some.lesson", ("forward",))(REPORTS)
    assert memory.note.startswith("With S grow A:")
    monkeypatch.setattr(report, "kept_table", lambda *of: [])
    assert lengths.compared("some.lesson", "forward", ("A",))(REPORTS) is None
    assert lengths.memory("some.lesson", ("forward",))(REPORTS) is None


def test_a_comparison_stands_in_place_of_the_table_of_its_name():
    """The long tables of the comparison of attention, as pivots."""
    text = (REPORTS / rows.MACHINE / "day4_replace_op.lesson14_compare_attention.md").read_text()
    names = re.findall(r"^## (\w+ \d+(?: causal)?)$", text, re.MULTILINE)
    assert len(names) == 8
    assert names[0].startswith("forward")
    assert text.count(lengths.OURS) == 8
    assert "| S | ms |" not in text


def test_tables_of_steps_stand_in_the_order_of_the_lesson():
    """With heads that say the unit in words."""
    folder = REPORTS / rows.MACHINE
    pages = report._step_pages(folder, {})
    for name in ("day1_pytorch.lesson05_gpu_by_measurement", "day1_pytorch.lesson09_memory_by_measurement"):
        text = pages[folder / f"{name}.md"]
        steps = [step.__name__.replace("_", " ") for step in dict(discover())[name].steps]
        found = re.findall("^## (.*)$", text, re.MULTILINE)
        assert found
        assert found == [step for step in steps if step in found]
        assert not re.findall(r"^\|.*_per_|^\|.*_a_", text, re.MULTILINE)


# ---- The yardstick --------------------------------------------------------------------------------------------------


ROWS = [row for folder in FOLDERS for path in sorted(folder.glob("*.csv")) if path.stem in dict(kernels())
        for row in rows.read(path)]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({"tb_per_s": 2.4, "tflop_per_s": 1.0, "dtype": "float32"}, 50),
        ({"tb_per_s": 0.1, "tflop_per_s": 494.7, "dtype": "bfloat16"}, 50),
        ({"tb_per_s": 0.1, "tflop_per_s": 494.7, "dtype": "float16"}, 50),
        ({"tb_per_s": 0.1, "tflop_per_s": 494.7, "dtype": "float8_e4m3fn"}, 25),
        ({"tb_per_s": 0.1, "tflop_per_s": 33.5, "dtype": "float32"}, 50),
        ({"tb_per_s": 2.4, "tflop_per_s": 999.0, "dtype": "bfloat16", "kind": "limit"}, 50),
        ({"tb_per_s": 2.4, "tflop_per_s": 1.0, "gpu": "nvidia-unknown"}, 0),
    ],
)
def test_the_share_of_the_data_sheet_is_of_the_rate_that_the_dtype_has(changes, share):
    """An H200: 4.8 TB/s; 989.4 TFLOP/s in 16 bits, 1978.9 in 8, 67 in fp32. A copy computes nothing."""
    assert results.of_sheet(a_row(**{"gpu": "nvidia-h200"} | changes)) == pytest.approx(share, abs=0.1)


@pytest.mark.skipif(not ROWS, reason="no rows of a GPU")
def test_no_row_is_above_the_data_sheet():
    """A time that is better than the card's own figures is a measuring error, or the work is counted wrong."""
    above = [f"{row.lesson} {row.rung} {row.shape}: {results.of_sheet(row):.0f}%" for row in ROWS
             if results.of_sheet(row) > 100]  # fmt: skip
    above += [f"{each.who} {each.shape}: {each.of_sheet:.0f}%" for folder in FOLDERS for each in limits.timed(folder)
              if not 0 < each.of_sheet <= 100]  # fmt: skip
    assert not above, above
    assert all(results.card(row) for row in ROWS)


@pytest.mark.skipif(not FOLDERS, reason="no rows of a GPU")
def test_each_share_above_100_percent_is_counted_under_one_cause():
    """The page of a GPU: its table adds up, its list has each such row once, and no share is above the stored one."""
    for folder in FOLDERS:
        every = list(limits.timed(folder))
        above = [row for row in every if row.above]
        assert all(row.share.percent <= row.stored for row in every)
        text = limits.page(folder)
        counts = {cells[2]: list(map(int, cells[3:6])) for cells in (line.split("|") for line in text.splitlines())
                  if len(cells) == 8 and cells[3].strip().isdigit()}  # fmt: skip
        total = counts.pop(" in all ")
        stored, timed = counts.pop(" more than 100% of the stored limit "), counts.pop(" rows with a time ")
        assert total == [sum(row.kind == kind for row in above) for kind in limits.KINDS]
        assert [sum(column) for column in zip(*counts.values(), strict=True)] == total
        assert {row.cause for row in above} == {head.strip() for head in counts}
        assert sum(stored) > sum(total)
        assert sum(timed) == len(every)
        listed = text[text.index(f"## {limits.EVERY}") :].splitlines()[4 : 4 + len(above)]
        assert sorted(line.split("|")[1:3] for line in listed) == sorted([f" {r.who} ", f" {r.shape} "] for r in above)


@pytest.mark.parametrize(
    ("of", "moved", "cause"),
    [
        ("cuBLAS", 10**9, "CUBLAS"),
        ("few", 10**6, "FEW"),
        ("stream", 6 * 10**7, "SMALL"),
        ("copy", 6 * 10**7, "SMALL"),
        ("stream", 7 * 10**7, "LARGE"),
        ("copy", 7 * 10**7, "COPY"),
    ],
)
def test_a_share_above_100_percent_has_the_cause_that_fits(of, moved, cause):
    assert shares.cause(of, moved, "nvidia-h200").startswith(getattr(shares, cause).partition("{")[0])


def test_a_roof_for_each_dtype():
    chip = results.card(a_row(gpu="nvidia-h200"))
    assert results.roofs(chip, {"bfloat16", "float32"}) == {"bf16": 989.4, "fp32": 67.0}
    assert results.roofs(chip, {"float8_e4m3fn"}) == {"fp8": 1978.9}


def contest(name, **changes):
    row = a_row(gpu=rows.MACHINE, **changes)
    return results.Contest(name, row.shape, row.dtype, ((ADD, dict(kernels())[ADD], [row, a_row(kind="peer")]),))


def test_the_final_report_counts_what_it_shows():
    """0.996 is shown as 1.00; 89.9 with the decimal that says why it is below 90. What has no ratio is named."""
    known = {"even": (0.996, 89.94), "lost": (0.964, 90.04), "just": (0.966, 100.4), "blank": (0, 12.3)}
    found = [contest(name, ratio_to_best_peer=r, percent_of_limit=p) for name, (r, p) in known.items()]
    libraries, machine = final_report._findings(found, [], [], [])
    assert "of 3 operators 1 are at least as fast" in libraries
    assert "and 1 are behind by no more" in libraries
    assert "Slower: lost 0.96." in libraries
    assert libraries.endswith("missing: blank.")
    assert "2 of 4 reach 90%" in machine
    assert machine.endswith("Below: blank 12%, even 89.9%.")
    libraries, machine = final_report._findings([contest("sort", percent_of_limit=10.0)], ["hash"], [], [])
    assert libraries.endswith("No library has hash.")
    assert "which no algorithm of sort reaches" in machine
    lines = [final_report._line(c, Today(kernels())) for c in found]
    assert [line["of limit, sheet"].partition(",")[0] for line in lines] == ["89.9%", "90.0%", "100%", "12%"]
    assert [line["over it"] for line in lines] == ["1.00", "**0.96**", "0.97", "‡"]


def test_the_final_report_marks_what_was_measured_before_the_code_changed(monkeypatch):
    monkeypatch.setattr(Today, "why_old", lambda self, row: "code changed" * (row.kind == "peer"))
    line = final_report._line(contest("add"), Today(kernels()))
    assert line["rate"].endswith(" \\*")
    assert line["of limit, sheet"] == "100%, 83%"
    block = final.Block(text="About \\*", table=({"rate": line["rate"], "over": "**0.9** \\*"},))
    assert "\\" not in final.as_html("", [block], {})
    assert operator_pages.ABOUT in final_report.build(REPORTS / rows.MACHINE)[1][-1].items[0]


def test_the_final_report_says_a_prediction_in_the_unit_of_its_result(lesson):
    """Predicted 1 ms, measured 2 ms at 4 TB/s."""
    lesson = dataclasses.replace(lesson, predicted=(Prediction(rung=lesson.rungs[2], at=N, ms=1.0),))
    (pair,) = predictions.compared(lesson, [a_row()])
    assert ": predicted 8 TB/s, measured 4, a ratio of 0.50." in final_report._failed(pair)


@pytest.mark.skipif(not FOLDERS, reason="no rows of a GPU")
def test_the_final_report_divides_by_the_peer_that_it_names():
    """One of other rounds, which had another clock, is marked. Without a declared peer, no ratio."""
    for folder in FOLDERS:
        for contest in results.contests(folder):
            if contest.best.ratio_to_best_peer:
                ratio = contest.peer.ms_p50 / contest.best.ms_p50
                assert contest.best.ratio_to_best_peer == pytest.approx(ratio, rel=1e-3, abs=6e-4), contest.name
            if contest.peer:
                assert (contest.peer.lesson == contest.best.lesson) != contest.peer.rung.endswith("§")


def test_the_next_hour_is_no_gap_that_what_ships_has_closed(lesson):
    """At the first shape the operator reaches the library, at the second neither does."""
    rows_ = [a_row(ms_p50=ms, ratio_to_best_peer=0.5) for ms in (4.0, 2.0, 1.0)]
    best = [operator_pages.Fastest(row, None, (row,)) for row in rows_]
    slower = [("add", best[0], 1.2), ("add", best[1], 0.9), ("sum", best[2], 0.966)]
    assert final_report._behind(slower) == [("add", best[1])]
    (said,) = final_report._left_out(slower)
    assert said.startswith("Left out: 2 shapes at which")
    assert "add 1.20, sum 0.97" in said
    assert not list(final_report._left_out(slower[1:2]))


def test_an_operator_is_found_by_the_problem_that_a_lesson_asks():
    """Not by its name; a lesson that asks for a part of the problem has none."""
    known = dict(kernels())
    folder = REPORTS / rows.MACHINE
    ships = operator_rows.read(folder / operator_rows.FILE)
    for name, operator in (("day2_triton_basics.lesson15_scan", "scan"), (ADD, None),
                           ("day4_replace_op.lesson06_flash_backward_queries", None)):  # fmt: skip
        each = known[name]
        dtype = str(each.bench_dtype).removeprefix("torch.")
        found = {operator_rows.of_lessons([each], shape_name(shape), dtype, ships) for shape in each.benches}
        assert {row and row.operator for row in found} == {operator}, name


# ---- Shares of a limit ----------------------------------------------------------------------------------------------


LIMIT = re.compile("%.*limit|极限.*%|%.*极限")  # heads of columns


def unexplained(text):
    """The lines of a page with a share above 100% that has no mark, or whose mark its section does not explain."""
    found = []
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
        explained = re.search(r"† (More than|超过) ?100%", section)
        names: list[str] = []
        for line in section.splitlines():
            cells = [cell.strip(" *|") for cell in line.split(" | ")] if line.startswith("|") else []
            names = (names or cells) if cells else []
            held = [cell for name, cell in zip(names, cells, strict=False) if LIMIT.search(name)]
            bare = [int(figure) for cell in held for figure in re.findall(r"\b(\d+)\b(?!%| †)(?=,|$)", cell)]
            percent = [int(figure) for figure in re.findall(r"(?<![\d.])(\d+)(?:\.\d+)?%(?! †)", line)]
            if max([*bare, *percent, 0]) > 100 or (re.search(r"\d%? †", line) and not explained):
                found.append(line)
    return found


def test_a_share_above_100_percent_is_seen():
    """What `unexplained` finds, so that the test of the pages can fail."""
    reason = "\n† More than 100%: because.\n"
    assert unexplained("| a |\n|---|\n| 1 (103%, 80%) |\n" + reason)
    assert unexplained("| a |\n|---|\n| 1 (103% †, 80%) |\n\n## next\n" + reason)
    assert unexplained("| % of the limit | b |\n|---|---|\n| 103 | x |\n" + reason)
    assert not unexplained("| % of the limit | b |\n|---|---|\n| 103 † | x |\n| 1 (104% †, 80%) |\n" + reason)
    assert not unexplained("| a |\n|---|\n| 1 (100%, 80%) |\n")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_pages_explain_each_share_above_100_percent(language):
    """No share of a limit exceeds 100% without the mark, and a sentence in its section that says why."""
    pages = [path for folder in device_folders() for path in folder.glob("*.md")] + [REPORTS / "cards.md"]
    texts = {path: report.text(path, language) for path in sorted(pages)}
    assert sum("†" in text for text in texts.values()) > 20
    assert {path.name: found for path, text in texts.items() if (found := unexplained(text))} == {}


def test_a_copy_has_no_share_of_itself():
    """Beside a matmul its bytes take a twentieth of the time, which is no share of a limit."""
    assert shares.of_limit(a_row(kind="limit", percent_of_limit=2033.9)) == "-"
    assert shares.of_limit(a_row(percent_of_limit=100.4)) == "100%"
    assert shares.of_limit(a_row(percent_of_limit=100.6)) == "101% †"
    assert pivots.rated([a_row(kind="limit")], "TFLOP/s") == []


def test_times_that_lie_far_apart_are_named():
    """A median hides them: one call in five took half as long again."""
    calm, apart = a_row(ms_p20=0.10, ms_p80=0.12), a_row(rung="atomics", ms_p20=0.10, ms_p80=0.16)
    copy = a_row(rung="copy", kind="limit", ms_p20=0.10, ms_p80=0.16)
    assert report._disturbed([calm, copy]) == ""
    assert "`atomics`" in (line := report._disturbed([calm, apart, copy]))
    assert "from 0.1 to 0.16 ms" in line


class OtherWords(dict):
    """A catalogue that has every text, in words that no reader knows. Fields, code, links and figures stay."""

    kept = re.compile(r"(\{[^}]*\}|`[^`]*`|\[[^\]]*\]\([^)]*\)|\d[\d,.]*)")

    def __contains__(self, text):
        return True

    def __missing__(self, text):
        parts = enumerate(self.kept.split(text))  # every second one is kept
        return "".join(part if nth % 2 else codecs.encode(part, "rot13") for nth, part in parts)


def facts(text):
    """The cells of a page's tables that are figures, by line."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line if re.fullmatch(r"[\s\d.,%*+-]*\d[\s\d.,%*+-]*", cell)] for line in lines]


def test_prose_in_other_words_changes_no_table_of_facts(monkeypatch):
    lessons = dict(kernels("softmax"))
    today = Today(lessons.items())
    before = report.of_rows(lessons, today)
    monkeypatch.setattr(words, "_catalogues", lambda language: iter([OtherWords()]))
    for name in lessons:
        monkeypatch.setattr(sys.modules[name], "__doc__", "Other words\n====\nstand here.")
    with words.speaking("zh"):
        after = report.of_rows(lessons, today)
    pages = [path for path, text in before.items() if isinstance(text, str)]
    assert any(codecs.encode("of the limit", "rot13") in after[path] for path in pages)
    for path in pages:
        assert facts(after[path]) == facts(before[path]), path


def test_columns_keep_the_order_of_the_lesson():
    """The first shape lacks a rung, which stands in its place all the same; options that are off are left out."""
    found = [
        a_row(rung="late", shape="n=1"),
        a_row(rung="early", shape="n=2 b="),
        a_row(rung="other", shape="n=2 c=False"),
    ]
    table = pivots.pivot(found, lambda row: "x", order=["early", "late"])
    assert table.splitlines()[0] == "| shape | `early` | `late` | `other` |"
    assert table.splitlines()[2:] == ["| n=1 |  | **x** |  |", "| n=2 | **x** |  | x |"]


@pytest.mark.skipif(not FOLDERS, reason="no rows of a GPU")
def test_how_it_was_checked_is_counted_from_rows(tmp_path, monkeypatch):
    """Random calls of today's code on this machine alone; what a machine has no rows of is left out."""
    code = operator_rows.code("softmax")
    known = {"operator": "softmax", "direction": "forward", "mode": "gpu", "device": "a", "versions": "", "commit": ""}
    counts = [
        fuzz_runs.Count(**known, code=code, cases=1200, wrong=1),
        fuzz_runs.Count(**known, code="older", cases=7),
        fuzz_runs.Count(**known | {"device": "b"}, code=code, cases=9),
    ]
    monkeypatch.setattr(fuzz_runs, "counts", lambda: dict(enumerate(counts)))
    kept = [
        fuzz_runs.Found(*each)
        for each in (("gpu", {}, "wrong", ""), ("gpu", {}, "wrong", "", "why"), ("cpu", {}, "wrong", ""))
    ]
    monkeypatch.setattr(fuzz_runs, "found", lambda: kept)
    (line,) = checked._random_calls(tmp_path / "a")
    assert "1,200 of today's code, with 1 answers judged wrong, 0 crashes" in line
    assert "(`softmax` forward)" in line
    assert "of 2 from all runs 1 still fail" in line
    assert not list(checked._random_calls(tmp_path / "c"))
    assert not list(checked._tools(tmp_path / "a"))
    assert not list(checked._wrong_kernels(tmp_path / "a", [(ADD, dict(kernels())[ADD])]))
