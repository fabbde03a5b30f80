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


# ---- Shares ---------------------------------------------------------------------------------------------------------


def lesson_row(folder, name, **changes):
    """A rung of a lesson at its first shape, with all of its limit; made-up streams stand in the folder."""
    row = next(row for row in rows.read(FOLDER / f"{name}.csv") if row.kind == "rung")
    return replace(row, **({"percent_of_limit": 100.0} | changes))


@pytest.fixture
def softmax(folder, monkeypatch):
    """A row of softmax, and the milliseconds of its stream."""
    monkeypatch.setattr(rows, "REPORTS", folder.parent)
    row = lesson_row(folder, "day2_triton_basics.lesson05_softmax")
    return row, yardstick.streams(folder).seconds(row.bytes, row.bytes / 2) * 1e3


def test_where_memory_limits_the_limit_is_the_faster_of_copy_and_stream(softmax, folder):
    row, stream = softmax
    for stored, share in ((60.0, 50.0), (40.0, 40.0), (100.0, 50.0)):
        found = yardstick.share(replace(row, ms_p50=2 * stream, percent_of_limit=stored))
        assert (found.percent, found.of) == (pytest.approx(share), "stream"), stored
    assert shares.of_limit(replace(row, ms_p50=stream / 1.1, percent_of_limit=130.0)) == "110% †"
    (folder / yardstick.FILE).unlink()
    assert yardstick.share(row) == yardstick.Share(100.0, "copy")


def test_where_no_stream_is_known_the_limit_is_the_copy(softmax):
    row, _ = softmax
    assert yardstick.share(replace(row, bytes=15 * MB)) == yardstick.Share(100.0, "few"), "less than the smallest"
    assert yardstick.share(replace(row, shape="M=1 N=1")) == yardstick.Share(100.0, "copy"), "what is written?"
    assert yardstick.share(replace(row, gpu="nvidia-other")) == yardstick.Share(100.0, "copy"), "no table"


def test_where_arithmetic_limits_it_is_cublas_at_8192_or_in_the_same_rounds(folder, monkeypatch):
    """The rung reaches 102% of the rate at 8192. cuBLAS at its shape is faster still; other peers are no limit."""
    monkeypatch.setattr(rows, "REPORTS", folder.parent)
    row = lesson_row(folder, name := "day3_matmul_tk.lesson01_matmul", ms_p50=1.0, tflop_per_s=800.0, tb_per_s=0.1)
    row = replace(row, percent_of_limit=102.0)

    def beside(**peers):
        found = [replace(row, rung=name, kind="peer", ms_p50=ms) for name, ms in peers.items()]
        (folder / f"{name}.csv").write_text(rows.as_csv([row, *(each.sealed() for each in found)]))
        yardstick._fastest_cublas.cache_clear()
        return yardstick.share(row)

    assert beside() == yardstick.Share(102.0, "cuBLAS")
    assert beside(quack=0.5) == yardstick.Share(102.0, "cuBLAS")
    assert beside(quack=0.5, torch=0.9).percent == pytest.approx(90)
    assert beside(torch=1.5).percent == 102, "slower than at 8192"


def test_an_operators_row_is_held_against_the_same(folder, monkeypatch):
    """One rule for both files: a stream of the row's mix, or cuBLAS among its peers."""
    monkeypatch.setattr(rows, "REPORTS", folder.parent)
    found = operator_rows.read(FOLDER / operator_rows.FILE)
    of = {(row.operator, row.shape): row for row in found if row.direction == "forward"}
    row = of["softmax", "M=8192 N=8192"]
    stream = yardstick.streams(folder).seconds(row.bytes, row.bytes / 2) * 1e3
    found = yardstick.share_of_operator(replace(row, ms=stream / 0.8, percent_of_limit=99.0))
    assert (found.percent, found.of) == (pytest.approx(80), "stream")
    row = replace(of["matmul", "M=8192 N=8192 K=8192"], ms=1.0, percent_of_limit=103.0)
    for peers, share in (("torch 0.95 | quack 0.5", 95), ("quack 0.5", 103), ("", 103)):
        assert yardstick.share_of_operator(replace(row, peers=peers)) == yardstick.Share(pytest.approx(share), "cuBLAS")


@pytest.mark.parametrize("module", [operator_pages, final_report])
def test_pages_divide_by_the_stream(softmax, monkeypatch, module):
    """Their figures are those of `yardstick.share`, and not the column of the file."""
    monkeypatch.setattr(yardstick, "share", lambda row: yardstick.Share(77.0, "stream"))
    if module is final_report:
        monkeypatch.setattr(rows, "REPORTS", REPORTS)
        _, blocks = final_report.build(FOLDER, today=Today(kernels()))
        assert {line["of limit, sheet"].partition(",")[0] for line in blocks[-1].table} == {"77%"}
    else:
        page = operator_pages.pages(FOLDER, Today(kernels()))[FOLDER / "softmax.md"]
        assert "| 77% | 79% |" in page
        assert "of a stream" not in page
