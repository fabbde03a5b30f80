"""Rows: kept whole, tied to what they were computed from, and carried along by renames."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from lessonkit.__main__ import app
from lessonkit.base import device, renames
from lessonkit.base.files import ROOT
from lessonkit.base.tables import head, read_csv, seal, to_csv
from lessonkit.exercise import progress
from lessonkit.exercise.source import discover as exercises
from lessonkit.lesson import kernels, shape_name
from lessonkit.measure import fingerprint, launches, rows, stale
from lessonkit.pages import operator_pages, report

import pytest
from typer.testing import CliRunner

ADD = "day2_triton_basics.lesson01_vector_add"
OLD = "day2_triton_basics.lesson99_first"
LESSONS = dict(kernels())
DEVICE = "nvidia-h200"
MEASURED = sorted(path for folder in stale.device_folders() for path in folder.glob("*.csv") if path.stem in LESSONS)


def a_row(**changes):
    values = {f.name: f.type(1) for f in dataclasses.fields(rows.Row)}
    return rows.Row(**(values | {"lesson": ADD, "rung": "add_wide", "kind": "rung", "shape": "n=98432"} | changes))


def faults(path):
    """What in a file of rows does not fit the rest: each figure that can be computed from others is."""
    lesson = LESSONS[path.stem]
    shapes = {shape_name(shape): shape for shape in lesson.benches}
    by_shape: dict[str, list[rows.Row]] = {}
    for row in rows.read_all(path):
        by_shape.setdefault(row.shape, []).append(row)
    found = []
    missing = report.absent(path, lesson)
    for shape, everything in by_shape.items():
        timed = [row for row in everything if row.kind != rows.ABSENT]
        where = {(r.gpu, r.driver, r.torch, r.triton, r.cuda, r.commit) for r in everything}
        found += [f"{shape}: rows of {len(where)} machines, versions or commits"] * (len(where) > 1)
        here = {row.rung for row in timed}
        lacks = [peer for peer in lesson.peers if peer not in here and (peer, shape) not in missing]
        found += [f"{shape}: {peer} has no row" for peer in lacks]
        peers = [row.ms_p50 for row in timed if row.kind == "peer"]
        copy = next((row.ms_p50 for row in timed if row.kind == "limit"), 0.0)
        incomplete = any(row.kind == rows.ABSENT for row in everything)
        if shape in shapes:
            work = lesson.work(dtype=lesson.bench_dtype, **shapes[shape])
            expect = {"bytes": (work.bytes, 0), "tb_per_s": (work.bytes, 1e-4), "tflop_per_s": (work.flops, 1e-3)}
        else:  # no longer timed
            expect = {"tb_per_s": (timed[0].bytes, 1e-4)}
        floors = [row.percent_of_limit * row.ms_p50 / 100 for row in timed]
        for row in everything:
            at = f"{shape}: {row.rung}"
            found += [f"{at}: the seal does not fit"] * (row.sealed() != row)
            found += [f"{at}: dtype {row.dtype}"] * (row.dtype != str(lesson.bench_dtype).removeprefix("torch."))
            if row.kind == rows.ABSENT:
                continue
            off = 1e-5 / row.ms_p50  # times have five decimals
            found += [f"{at}: p20, p50, p80 are out of order"] * (not row.ms_p20 <= row.ms_p50 <= row.ms_p80)
            for column, (amount, rounding) in expect.items():
                right = amount if column == "bytes" else amount / row.ms_p50 * 1e-9
                if abs(getattr(row, column) - right) > rounding + off * right:
                    found.append(f"{at}: {column} is {getattr(row, column)}, not {right:.4f}")
            ratio = min(peers) / row.ms_p50 if peers else 0.0
            allowed = incomplete and row.ratio_to_best_peer == 0
            if not allowed and abs(row.ratio_to_best_peer - ratio) > 1e-3 + 2 * off * ratio:
                found.append(f"{at}: ratio_to_best_peer is {row.ratio_to_best_peer}, not {ratio:.3f}")
            floor = row.percent_of_limit * row.ms_p50 / 100
            # The same limit for all: the copy, or the FLOPs at a rate that the file does not hold.
            slack = 0.06 * row.ms_p50 / 100 + 1e-5 + max(0.06 * r.ms_p50 / 100 for r in timed)
            if floor < copy - slack or abs(floor - min(floors, key=lambda f: abs(f - floor))) > slack:
                found.append(f"{at}: percent_of_limit is {row.percent_of_limit}")
            if max(floors) - min(floors) > 2 * slack:
                found.append(f"{at}: percent_of_limit is not of the same limit as that of others")
    return found


def doubts(path):
    """What in a file of rows leaves open where they come from: machine, versions, commit, code, absent peers."""
    found = [f"{path.parent.name} is no name that `bench` gives"] * (not re.fullmatch("[a-z0-9-]+", path.parent.name))
    for row in rows.read_all(path):
        at = f"{path.name}, {row.shape}: {row.rung}"
        code = row.kind in ("rung", "peer")
        wrong = {
            f"a row of {row.gpu} among those of {path.parent.name}": row.gpu != path.parent.name,
            f"a row of {row.lesson}": row.lesson != path.stem,
            f"driver {row.driver}": not re.fullmatch(r"\d[\d.]+", row.driver),
            f"CUDA {row.cuda}": not re.fullmatch(r"\d+\.\d+", row.cuda),
            f"torch {row.torch} with Triton {row.triton}": not (row.torch[:1].isdigit() and row.triton[:1].isdigit()),
            f"commit {row.commit}: measure what is committed": not re.fullmatch("[0-9a-f]{7,40}", row.commit),
            f"date {row.date}": not re.fullmatch(r"20\d\d-\d\d-\d\d", row.date),
            "no fingerprint of its code": code and not re.match(r"[0-9a-f]{8}\.[0-9a-f]{8}\.[0-9a-f]{8}\b", row.source),
            "absent, and not said why": row.kind == rows.ABSENT and not row.reason,
        }
        found += [f"{at}: {what}" for what, is_so in wrong.items() if is_so]
    return found


def test_a_peer_of_no_version_leaves_its_shape_without_a_ratio(tmp_path):
    """Libraries have versions of their own; PyTorch's functions and CUB have that of a column of the row."""
    found = [
        a_row(kind="rung", ratio_to_best_peer=1.5, shape=shape, peer_version="") for shape in ("n=1", "n=2", "n=3")
    ]
    found += [a_row(rung="quack", kind="peer", shape="n=1", peer_version="")]
    found += [a_row(rung="quack", kind="peer", shape="n=2", peer_version="quack-kernels 0.6.5")]
    found += [a_row(rung="torch.compile", kind="peer", shape="n=3", peer_version="")]
    path = tmp_path / f"{ADD}.csv"
    path.write_text(rows.as_csv(found))
    assert [row.ratio_to_best_peer for row in rows.read(path)[:3]] == [0, 1.5, 1.5]
    assert "Incomplete at n=1: no row says which version of quack was measured" in report._without(rows.read(path), {})


def test_peers_whose_version_a_column_names_come_from_no_other_package():
    found = (row for path in MEASURED for row in rows.read(path))
    unsaid = {(row.lesson, row.rung) for row in found if row.kind == "peer" and not row.peer_version}
    for lesson, peer in unsaid:
        if peer.startswith(rows.OWN_VERSION):
            function = import_module(lesson).LESSON.peers[peer]
            others = fingerprint.packages(ROOT, lesson, peer, function) - sys.stdlib_module_names - {"torch", "triton"}
            assert not others, f"{lesson}: {peer}"


def test_a_peer_has_the_version_of_its_own_package():
    """A comprehension makes all peers of decoding; one is FlashAttention's."""
    name = "day4_replace_op.lesson10_flash_decoding"
    peers = import_module(name).LESSON.peers
    of = {label: "flash_attn" in fingerprint.packages(ROOT, name, label, peer) for label, peer in peers.items()}
    assert of == {"SDPA flash": False, "SDPA cuDNN": False, "FA4": True}


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_no_peer_of_pytorch_has_the_version_of_another_package(path):
    theirs = [row for row in rows.read_all(path) if row.kind == "peer" and row.rung.startswith(rows.OWN_VERSION)]
    assert not [(row.rung, row.shape, row.peer_version) for row in theirs if row.peer_version]


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_figure_follows_from_the_times(path):
    assert not faults(path)
    assert not doubts(path)


def test_the_tables_of_steps_fit_their_seals():
    tables = [path for folder in stale.device_folders() for path in folder.glob("*.*.*.csv")]
    assert tables
    for path in tables:
        about = head(path)
        assert about["seal"] == seal(read_csv(path), about["commit"]), path
        assert about["source"], path
        assert about["gpu"] == path.parent.name, path


# ---- A card that somebody else has measured -------------------------------------------------------------------------

CARD = "nvidia-geforce-rtx-4090"


@pytest.fixture
def a_card(tmp_path, monkeypatch):
    """reports/ with the rows of vector add, as `bench` keeps them on a made-up card: three times as slow as an H200."""
    shutil.copytree(ROOT / "reports" / DEVICE, tmp_path / DEVICE, ignore=shutil.ignore_patterns("*.md", "*.png"))
    slow = []
    for row in rows.read_all(ROOT / "reports" / DEVICE / f"{ADD}.csv"):
        rates = {key: round(getattr(row, key) / 3, 4) for key in ("tb_per_s", "tflop_per_s")}
        times = {key: round(getattr(row, key) * 3, 5) for key in ("ms_p20", "ms_p50", "ms_p80")}
        slow.append(dataclasses.replace(row, gpu=CARD, driver="580.95.05", torch="2.13.0+cu130", **rates, **times))
    monkeypatch.setattr(rows, "REPORTS", tmp_path)
    monkeypatch.setattr(device, "name", lambda: CARD)
    return rows.save(slow)


def test_rows_of_another_card_are_checked_as_ours(a_card):
    assert a_card.parent.name == CARD
    assert not faults(a_card)
    assert not doubts(a_card)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpu": DEVICE}, f"a row of {DEVICE} among those of {CARD}"),
        ({"lesson": "day2_triton_basics.lesson03_gelu"}, "a row of day2_triton_basics.lesson03_gelu"),
        ({"commit": "0123456789+"}, "measure what is committed"),
        ({"commit": "unknown"}, "measure what is committed"),
        ({"driver": "unknown"}, "driver unknown"),
        ({"cuda": "none"}, "CUDA none"),
        ({"triton": ""}, "with Triton"),
        ({"source": ""}, "no fingerprint"),
        ({"kind": rows.ABSENT, "rung": "quack"}, "not said why"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_rows_that_leave_open_where_they_come_from_are_found(a_card, change, says):
    first, *others = rows.read_all(a_card)
    a_card.write_text(rows.as_csv([dataclasses.replace(first, **change).sealed(), *others]))
    found = doubts(a_card)
    assert any(says in doubt for doubt in found), found


def test_pages_grow_a_column_for_a_card(a_card):
    """At the same shape as ours; and its own pages, and a section of the README."""
    today = stale.Today(kernels())
    assert [folder.name for folder in stale.device_folders()] == [DEVICE, CARD], "ours are read where there are two"
    header, _, *lines = [line for line in operator_pages.cards(today).splitlines() if line.startswith("|")]
    assert header == f"| operator | shape | {DEVICE} | {CARD} |"
    (add,) = [line for line in lines if line.startswith("| vector add |")]
    ours, theirs = (float(rate) for rate in re.findall(r"([\d.]+) TB/s", add))
    assert ours == pytest.approx(3 * theirs, rel=0.02)
    assert sum(not line.endswith("|  |") for line in lines) == 1, "what was not measured on it is left empty"
    made = operator_pages.pages(a_card.parent, today)
    assert [path.name for path in made] == ["vector_add.md"]
    assert f"### {CARD}" in operator_pages.overview("en", today)


def test_another_card_is_no_part_of_a_release(a_card):
    """Nobody here can measure it again."""
    found = [dataclasses.replace(row, source="0.0.0") if row.source else row for row in rows.read_all(a_card)]
    a_card.write_text(rows.as_csv(found))
    old = stale.old()
    assert {each.device for each in old} >= {CARD}
    assert CARD not in {each.device for each in stale.old(stale.released())}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda row: row | {"ms_p50": str(float(row["ms_p50"]) * 0.98)}, "seal does not fit"),
        (lambda row: row | {"ms_p50": str(float(row["ms_p50"]) * 0.5)}, "ratio_to_best_peer is"),
        (lambda row: row | {"ratio_to_best_peer": "9.99"}, "ratio_to_best_peer is 9.99"),
        (lambda row: row | {"tb_per_s": "4.2"}, "tb_per_s is 4.2"),
        (lambda row: row | {"bytes": str(int(row["bytes"]) * 2)}, "bytes is"),
        (lambda row: row | {"percent_of_limit": "99.9"}, "percent_of_limit"),
        (lambda row: row | {"triton": "9.9"}, "rows of 2 machines, versions or commits"),
        (lambda row: row | {"dtype": "float32"}, "dtype float32"),
        (lambda row: row | {"ms_p20": row["ms_p80"], "ms_p80": row["ms_p20"]}, "out of order"),
    ],
)
def test_a_changed_figure_is_found(tmp_path, change, says):
    name = "day2_triton_basics.lesson05_softmax"
    path = tmp_path / f"{name}.csv"
    found = read_csv(ROOT / "reports" / DEVICE / path.name)
    path.write_text(to_csv([change(found[0]), *found[1:]]))
    assert any(says in fault for fault in faults(path)), faults(path)
    assert any("seal" in fault for fault in faults(path)), "whatever was measured is sealed"


def test_a_dropped_peer_is_found(tmp_path):
    name = "day2_triton_basics.lesson05_softmax"
    path = tmp_path / f"{name}.csv"
    found = read_csv(ROOT / "reports" / DEVICE / path.name)
    shutil.copy(ROOT / "reports" / DEVICE / "absent.csv", tmp_path)
    path.write_text(to_csv(found))
    assert not faults(path)
    path.write_text(to_csv(row for row in found if row["rung"] != "quack"))
    assert f"{found[0]['shape']}: quack has no row" in faults(path)


def test_the_list_of_absent_peers_only_shrinks():
    """A row of today says itself which peer it lacks; what is listed here is of rows from before."""
    listed = read_csv(ROOT / "reports" / DEVICE / "absent.csv")
    assert len(listed) <= 1
    for line in listed:
        have = {(row.rung, row.shape) for row in rows.read_all(ROOT / "reports" / DEVICE / f"{line['lesson']}.csv")}
        assert (line["peer"], line["shape"]) not in have, f"{line} has a row: take it from the list"


def test_no_page_shows_a_ratio_that_lacks_a_peer(tmp_path):
    """A peer that was not installed, at that shape. One that refuses the shape leaves the ratio to the others."""
    name = "day2_triton_basics.lesson13_cross_entropy"
    shutil.copy(ROOT / "reports" / DEVICE / f"{name}.csv", tmp_path)
    first, second = list(dict.fromkeys(row.shape for row in rows.read(tmp_path / f"{name}.csv")))[:2]
    about = {"lesson": name, "peer": "quack"}
    lines = [
        about | {"shape": first, "reason": rows.NOT_INSTALLED},
        about | {"shape": second, "reason": "it refuses the shape"},
    ]
    (tmp_path / "absent.csv").write_text(to_csv(lines))
    found = [row for row in rows.read(tmp_path / f"{name}.csv") if row.kind == "rung"]
    assert not any(row.ratio_to_best_peer for row in found if row.shape == first)
    assert all(row.ratio_to_best_peer for row in found if row.shape == second)


def test_a_shape_that_is_measured_again_loses_all_of_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "REPORTS", tmp_path)
    rows.save([a_row(ms_p50=2.0), a_row(rung="add_block"), a_row(rung="quack", kind="peer"), a_row(shape="n=7")])
    path = rows.save([a_row(ms_p50=1.0), a_row(rung="add_element")])
    found = rows.read(path)
    assert [(r.rung, r.shape) for r in found] == [
        ("add_wide", "n=98432"), ("add_element", "n=98432"), ("add_wide", "n=7")
    ]  # fmt: skip
    assert found[0] == a_row(ms_p50=1.0).sealed()


def test_a_row_keeps_an_edited_seal_when_others_are_measured(tmp_path, monkeypatch):
    """Or an edited time would be sealed by the next run."""
    monkeypatch.setattr(rows, "REPORTS", tmp_path)
    path = rows.save([a_row(shape="n=7")])
    path.write_text(rows.as_csv(dataclasses.replace(row, ms_p50=0.5) for row in rows.read_all(path)))
    rows.save([a_row()])
    assert [row.sealed() == row for row in rows.read_all(path)] == [False, True]


def test_a_changed_tree_is_marked_in_the_commit(tmp_path):
    def git(*words):
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)

    assert rows.commit(tmp_path) == "unknown"
    git("init", "-q")
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "rows.csv").write_text("1\n")
    git("add", ".")
    git("commit", "-qm", "first")
    clean = rows.commit(tmp_path)
    assert len(clean) == 10
    (tmp_path / "rows.csv").write_text("2\n")
    assert rows.commit(tmp_path) == clean, "rows that are being written do not change the code"
    (tmp_path / "a.py").write_text("x = 2\n")
    assert rows.commit(tmp_path) == f"{clean}+"


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A device with one row, of today's code; put(**changes) changes it."""
    monkeypatch.setattr(rows, "REPORTS", tmp_path)
    now = stale.Today(LESSONS.items()).source(a_row())

    def put(**changes):
        row = a_row(**({"source": now, "machine": "triton-1=aa"} | changes)).sealed()
        rows.write_atomically(tmp_path / DEVICE / f"{ADD}.csv", rows.as_csv([row]))
        return now

    put()
    return put


def test_a_row_is_old_when_its_source_has_changed(measured):
    assert not stale.old()
    now = measured()
    code, inputs, work = now.split(".")
    measured(source=f"0.{inputs}.{work}")
    (old,) = stale.old()
    assert old.why == "code changed"
    measured(source=f"{code}.0.0")
    assert stale.old()[0].why == "inputs and work changed"
    measured(source=f"0.0.0 ={now}")
    assert not stale.old(), "shown equal"
    measured(rung="nobody")
    assert stale.old()[0].why == "no such rung"
    measured(shape="n=1")
    assert stale.old()[0].why == "this shape is no longer timed"


def test_a_row_is_to_be_measured_again_when_a_peer_was_added(measured):
    """A ratio says nothing of a peer that was not timed. One that says why it has no time is no reason."""
    now = measured()
    found = [a_row(source=now, gpu=DEVICE), *(a_row(rung=peer, kind="peer", gpu=DEVICE) for peer in LESSONS[ADD].peers)]
    path = rows.REPORTS / DEVICE / f"{ADD}.csv"

    def whys(kept):
        rows.write_atomically(path, rows.as_csv([row.sealed() for row in kept]))
        return [each.why for each in stale.old() if each.named[1] == "add_wide"]

    assert whys(found) == []
    assert whys(found[:-1]) == ["a peer was added"]
    assert stale.show_equal() == 0, "machine code that is equal does not make up for it"
    absent = dataclasses.replace(found[-1], kind=rows.ABSENT, reason="not installed")
    assert whys([*found[:-1], absent]) == []
    line = {"lesson": ADD, "peer": found[-1].rung, "shape": "n=98432", "reason": "not installed"}
    rows.write_atomically(path.with_name("absent.csv"), to_csv([line]))
    assert whys(found[:-1]) == []


@pytest.mark.parametrize(("peer", "version", "why"), [
    ("quack", "", ["a peer's version is missing"]), ("quack", "quack-kernels 0.6.5", []), ("torch", "", []),
])  # fmt: skip
def test_a_peer_of_no_version_is_to_be_measured_again(measured, monkeypatch, peer, version, why):
    """As `renew` does with all that is listed; nothing has changed, so no page says that it did."""
    monkeypatch.setattr(stale.Today, "why_old", lambda self, row: "")
    measured(rung=peer, kind="peer", peer_version=version)
    assert [(each.why, stale.in_words(each.why)) for each in stale.old()] == [(said, said) for said in why]


@pytest.mark.parametrize(
    ("recorded", "today", "equal"),
    [
        ("triton-1=aa", "triton-1=aa", True),
        ("triton-1=aa", "triton-1=bb", False),
        ("triton-1=aa", "triton-2=aa", False),
        ("triton-1=aa triton-2=bb", "triton-2=bb", True),
        ("triton-1=aa", "", False),
        ("", "", False),
    ],
)
def test_equal_machine_code_of_one_compiler_saves_a_row(measured, monkeypatch, recorded, today, equal):
    monkeypatch.setattr(launches, "marks", lambda name, wanted: [today] * len(wanted))
    now = measured(source="0.0.0", machine=recorded)
    assert stale.show_equal() == equal
    assert bool(stale.old()) != equal
    (row,) = rows.read(rows.REPORTS / DEVICE / f"{ADD}.csv")
    assert row.source == ("0.0.0 =" + now if equal else "0.0.0"), "what it was measured with stays"
    assert row.sealed() == row


def test_a_record_gains_the_compilers_of_this_machine(measured, monkeypatch):
    """Of rows of today's code only: for others it would not be what was measured."""
    monkeypatch.setattr(launches, "compilers", lambda: ["triton-2"])
    monkeypatch.setattr(launches, "marks", lambda name, wanted: ["triton-2=bb"] * len(wanted))
    measured(source="0.0.0")
    assert stale.record() == 0
    measured()
    assert stale.record() == 1
    (row,) = rows.read(rows.REPORTS / DEVICE / f"{ADD}.csv")
    assert row.machine == "triton-1=aa triton-2=bb"
    assert stale.record() == 0


def test_old_rows_fail_a_release_only(measured, monkeypatch):
    monkeypatch.setattr(launches, "marks", lambda name, wanted: [""] * len(wanted))
    run = CliRunner()
    assert run.invoke(app, ["stale", "--release"]).exit_code == 0
    measured(source="0.0.0")
    said = run.invoke(app, ["stale"])
    assert said.exit_code == 0
    assert "add_wide" in said.output
    assert run.invoke(app, ["stale", "--release"]).exit_code == 1


@pytest.fixture
def renamed(tmp_path, monkeypatch):
    """renames.toml in another place: renamed(lessons={old: new})."""
    monkeypatch.setattr(renames, "FILE", tmp_path / "renames.toml")

    def write(**kinds):
        lines = (f"[{kind}]\n" + "".join(f"{json.dumps(a)} = {json.dumps(b)}\n" for a, b in names.items())
                 for kind, names in kinds.items())  # fmt: skip
        renames.FILE.write_text("".join(lines))

    return write


def test_rows_follow_a_renamed_lesson(tmp_path, monkeypatch, renamed):
    folder = tmp_path / "reports" / DEVICE
    shutil.copytree(ROOT / "reports" / DEVICE, folder)
    before = rows.read(folder / f"{ADD}.csv")
    text = (folder / f"{ADD}.csv").read_text().replace(ADD, OLD).replace("add_wide", "add_vector")
    (folder / f"{OLD}.csv").write_text(text)
    (folder / f"{ADD}.csv").unlink()
    assert not rows.read(folder / f"{ADD}.csv")
    middle = "day2_triton_basics.lesson98_second"
    renamed(lessons={OLD: middle, middle: ADD}, rungs={f"{ADD}: add_vector": "add_wide"})
    found = rows.read(folder / f"{ADD}.csv")
    assert [(r.lesson, r.rung, r.ms_p50) for r in found] == [(r.lesson, r.rung, r.ms_p50) for r in before]
    monkeypatch.setattr(rows, "REPORTS", tmp_path / "reports")
    monkeypatch.setattr(rows.device, "name", lambda: DEVICE)
    path = rows.save([a_row(gpu=DEVICE)])
    assert {row.lesson for row in rows.read(path)} == {ADD}
    assert len(rows.read(path)) == len(before) - len([r for r in before if r.shape == "n=98432"]) + 1


def test_progress_and_answers_follow_a_renamed_exercise(tmp_path, monkeypatch, renamed):
    monkeypatch.setenv("COURSE_ANSWERS", str(tmp_path))
    source = next(s for s in exercises() if not s.is_cuda)
    old = f"{source.name.partition('.')[0]}.exercise99_before"
    (tmp_path / "progress.json").write_text(json.dumps({old: {"checks": 3, "passed": "2026-01-01", "at": 5.0}}))
    (tmp_path / source.name.partition(".")[0]).mkdir()
    answer = tmp_path / f"{old.replace('.', '/')}.py"
    answer.write_text("my answer")
    renamed(exercises={old: source.name})
    assert progress.of(source).checks == 3
    assert progress.start(source).read_text() == "my answer"
    assert not answer.exists()


def test_links_follow(renamed):
    day2 = ROOT / "day2_triton_basics"
    task = next(s for s in exercises() if not s.is_cuda and s.name.startswith("day2"))
    renamed(lessons={OLD: ADD}, exercises={"day2_triton_basics.exercise99_x": task.name}, reports={"counts": "ncu"})
    text = "[a](lesson99_first.py) [b](../reports/nvidia-h200/day2_triton_basics.lesson99_first.md) "
    text += "[c](https://a.b/lesson99_first.py) [d](lesson03_gelu.py) [e](exercises/exercise99_x.py) "
    text += "[f](../reports/nvidia-h200/counts.md) [g](README.zh-CN.md)"
    assert renames.relinked(day2 / "README.md", text) == (
        f"[a](lesson01_vector_add.py) [b](../reports/nvidia-h200/{ADD}.md) [c](https://a.b/lesson99_first.py) "
        f"[d](lesson03_gelu.py) [e](exercises/{task.path.name}) [f](../reports/nvidia-h200/ncu.md) [g](README.zh-CN.md)"
    )
    assert renames.link(ROOT / "paths" / "5d.md", "../day2_triton_basics/lesson99_first.py") == (
        "../day2_triton_basics/lesson01_vector_add.py"
    )
    page = ROOT / "reports" / "nvidia-h200" / f"{ADD}.md"
    assert renames.link(page, f"{OLD}.sizes.png") == f"{ADD}.sizes.png", (
        "a picture of a step has a name after the lesson's"
    )
    assert renames.link(day2 / "README.md", "README.zh-CN.md") == "README.zh-CN.md", "a dot is part of a file's name"


def test_commands_answer_an_old_name(renamed):
    renamed(lessons={OLD: ADD})
    for name in (OLD, "lesson99_first"):
        said = CliRunner().invoke(app, ["list", name])
        assert said.exit_code == 0
        assert f"lesson {name} is now called {ADD}" in said.output.replace("\n", " ")
    assert CliRunner().invoke(app, ["list", "lesson99_nobody"]).exit_code == 2


def test_the_exercise_commands_answer_an_old_name(renamed, tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_ANSWERS", str(tmp_path))
    task = exercises()[0]
    renamed(exercises={"day2_triton_basics.exercise99_before": task.name})
    said = CliRunner().invoke(app, ["exercise", "list", "exercise99_before"])
    assert said.exit_code == 0
    assert f"exercise exercise99_before is now called {task.name}" in said.output


def test_a_rung_stands_under_any_name_of_its_lesson(renamed):
    renamed(lessons={OLD: ADD}, rungs={f"{OLD}: first": "second", f"{ADD}: second": "add_wide"})
    assert renames.rung(OLD, "first") == renames.rung(ADD, "first") == "add_wide"
    assert renames.rung("day2_triton_basics.lesson05_softmax", "first") == "first"


def test_a_circle_of_names_is_an_error(renamed):
    renamed(lessons={"a": "b", "b": "c", "c": "a"}, rungs={"x: f": "g", "x: g": "f"})
    with pytest.raises(renames.Circle, match="a -> b -> c -> a"):
        renames.lesson("a")
    with pytest.raises(renames.Circle, match="f -> g -> f"):
        renames.rung("x", "f")
    renamed(lesons={"a": "b"})
    with pytest.raises(ValueError, match="lesons is none of lessons, rungs"):
        renames.lesson("a")


def test_the_map_leads_to_what_there_is():
    for old, new in renames._known()["lessons"].items():
        assert not Path(ROOT / f"{old.replace('.', '/')}.py").exists(), f"{old} is renamed and still there"
        assert Path(ROOT / f"{renames.lesson(new).replace('.', '/')}.py").exists(), new
