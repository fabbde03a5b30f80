"""Shares of a stream with the same mix of reads and writes, on a made-up table."""

from dataclasses import replace

from lessonkit.base.files import REPORTS
from lessonkit.base.tables import to_csv, with_head
from lessonkit.lesson import kernels
from lessonkit.measure import operator_rows, rows, yardstick
from lessonkit.measure.stale import Today
from lessonkit.pages import final_report, operator_pages, shares

import pytest

FOLDER = REPORTS / rows.MACHINE
MB = 2**20
# 1 us to start, 4 bytes of reads and 2 of writes a ns.
TABLE = [
    {"reads": reads, "writes": writes, "MB": size, "GB_per_s": size * MB / (1000 + size * MB * a_byte)}
    for reads, writes, a_byte in ((1, 0, 1 / 4), (1, 1, 3 / 8), (0, 1, 1 / 2))
    for size in (16, 256, 1024)
]


@pytest.fixture
def folder(tmp_path):
    """A GPU's folder with the table and the operators' rows."""
    found = tmp_path / rows.MACHINE
    found.mkdir()
    (found / yardstick.FILE).write_text(with_head({"note": ""}, to_csv(TABLE)))
    return found


def ns(table, size, written):
    return table.seconds(size, written * size) * 1e9


def test_a_stream_lies_between_those_that_were_timed(folder):
    """The time is a straight line over the size and over the share of writes, as the table's is."""
    table = yardstick.streams(folder)
    for size in (16 * MB, 100 * MB, 1024 * MB):
        for written in (0.0, 0.1, 0.5, 0.9, 1.0):
            assert ns(table, size, written) == pytest.approx(1000 + size * (0.25 + written / 4))
    assert ns(table, 4096 * MB, 0.5) == pytest.approx(4 * ns(table, 1024 * MB, 0.5)), "past the largest its rate stays"
    assert ns(table, 15 * MB, 0.5) == 0, "smaller than all that were timed"
    assert table.percent(2e-6 * ns(table, 64 * MB, 0.25), 64 * MB, 16 * MB) == pytest.approx(50)
    assert table.percent(1.0, 64 * MB, None) == 0
    assert yardstick.streams(folder.parent) is None


@pytest.mark.parametrize(
    ("operator", "direction", "share"),
    [
        ("softmax", "forward", 1 / 2),
        ("softmax", "backward", 1 / 3),
        ("cross_entropy", "forward", 0),
        ("rms_norm", "backward", 1 / 3),
        ("dropout", "forward", 1 / 2),
        ("attention", "decoding", 0),
        ("attention_paged", "forward", 0),
    ],
)
def test_what_is_written_are_the_results(operator, direction, share):
    """At the operator's largest shape, where rows' statistics and weights are a thousandth of the bytes."""
    found = [case for case in operator_rows.cases([operator]) if case.operator.direction == direction]
    case = max((case for case in found if case.operator.data == "random"), key=lambda case: case.work().bytes)
    assert yardstick.of_operator(case.key) / case.work().bytes == pytest.approx(share, abs=0.01)


def test_a_batch_writes_so_many_times_what_one_sequence_does():
    key = "attention", "decoding", "B={} H=32 S_k=1024 D=128 H_kv=8", "bfloat16", "random"
    op = next(op for op in operator_rows.operators() if (op.name, op.direction) == key[:2])
    shape = {"H": 4, "S_k": 256, "D": 128, "H_kv": 2}
    one, six = (operator_rows.Case(op, shape | {"B": B}) for B in (1, 6))
    written = [
        yardstick._written(case.operator.inputs, (op.problem.reference,), case.dtype, case.shape) for case in (one, six)
    ]
    assert written == [4 * (128 * 2 + 4), 6 * 4 * (128 * 2 + 4)]


def test_no_row_writes_more_than_it_moves():
    """One row of each operator; where the results' shapes depend on data nothing is known."""
    unknown = {"grouped_matmul", "attention_varlen"}
    timed = (row for row in operator_rows.read(FOLDER / operator_rows.FILE) if row.ms and row.operator != "attention")
    by_memory = (row for row in timed if not rows.limited_by_math(row.flops, row.bytes, row.dtype))
    found = {(row.operator, row.direction): row for row in by_memory}
    assert len(found) > 20
    for row in found.values():
        written = yardstick.of_operator(row.key)
        assert (written is not None and 0 < written <= row.bytes) or (written is None and row.operator in unknown), row


def test_rows_under_the_bar_are_listed(folder):
    """Norms' backward has a bar of its own; a small row, one that arithmetic limits, and a fast one are not listed."""
    of = {(row.operator, row.direction, row.shape): row for row in operator_rows.read(FOLDER / operator_rows.FILE)}
    names = (
        ("softmax", "forward", "M=8192 N=8192"),
        ("softmax", "backward", "M=8192 N=8192"),
        ("rms_norm", "backward", "M=8192 N=8192"),
        ("softmax", "forward", "M=333 N=8192"),
        ("matmul", "forward", "M=8192 N=8192 K=8192"),
    )
    table = yardstick.streams(folder)
    for percent, listed in ((91, names[:2]), (84, names[:3]), (93, ())):
        with_share = []
        for name in names:
            row = of[name]
            ms = table.seconds(max(row.bytes, 16 * MB), yardstick.of_operator(row.key) or 0) * 1e5 / percent
            with_share.append(replace(row, ms=ms))
        (folder / operator_rows.FILE).write_text(operator_rows.as_csv(with_share))
        found = yardstick.under_the_bar(folder)
        assert {(row.operator, row.direction, row.shape) for row, _ in found} == set(listed)
        assert all(share == pytest.approx(percent, abs=0.1) for _, share in found)
    with pytest.raises(FileNotFoundError, match=r"streams\.csv"):
        yardstick.under_the_bar(folder.parent)


@pytest.mark.parametrize("module", [operator_pages, final_report])
def test_pages_show_the_share_of_a_stream_once_there_is_a_table(folder, monkeypatch, module):
    table = yardstick.streams(folder)

    def page():
        if module is final_report:
            return next(
                text for path, text in final_report.pages(FOLDER, Today(kernels())).items() if path.suffix == ".md"
            )
        return operator_pages.pages(FOLDER, Today(kernels()))[FOLDER / "softmax.md"]

    monkeypatch.setattr(*((yardstick, "streams") if module is operator_pages else (module, "streams")), lambda _: None)
    assert "of a stream" not in page()
    monkeypatch.setattr(*((yardstick, "streams") if module is operator_pages else (module, "streams")), lambda _: table)
    column = "| of a stream |" if module is operator_pages else "The limit is a stream of the least bytes"
    assert column in (shown := page())
    assert "more than 100% of a stream" in shown.lower(), "the made-up memory is slower than that of an H200"


def test_a_share_of_a_stream_is_of_rungs_that_memory_limits(folder):
    table = yardstick.streams(folder)
    row = next(row for row in rows.read(FOLDER / "day2_triton_basics.lesson05_softmax.csv") if row.kind == "rung")
    half = table.seconds(row.bytes, row.bytes / 2) * 1e3 * 2
    assert shares.of_stream(replace(row, ms_p50=half), table) == "50%"
    assert shares.of_stream(replace(row, ms_p50=half / 2.2), table) == "110% †"
    assert shares.of_stream(replace(row, ms_p50=half, kind="limit"), table) == ""
    assert shares.of_stream(replace(row, ms_p50=half, tflop_per_s=900.0), table) == ""
    assert shares.of_stream(replace(row, ms_p50=half, shape="M=1 N=1"), table) == ""
