"""The command line, the rows and the compile lane."""

import dataclasses

import lessonkit.__main__ as cli
import lessonkit.device as device
from lessonkit import bench, compiled, doctor, lesson, mutants, report, rows, timing
from lessonkit.lesson import Broken, Mutant, discover

import pytest
from typer.testing import CliRunner

invoke = CliRunner().invoke
ADD = "day2_triton_basics.lesson01_vector_add"


def a_row(**changes) -> rows.Row:
    values = {f.name: f.type(1) for f in dataclasses.fields(rows.Row)}
    return rows.Row(**(values | {"lesson": ADD, "rung": "add_wide", "kind": "rung", "shape": "n=98432"} | changes))


def test_list_names_every_lesson():
    result = invoke(cli.app, ["list"])
    assert result.exit_code == 0
    assert "add_element" in result.output


def test_unknown_lesson_says_which_there_are():
    result = invoke(cli.app, ["check", "lesson99"])
    assert result.exit_code == 2
    assert "lesson01_vector_add" in result.output


@pytest.mark.alone  # all its cases, on a GPU the long ones too
def test_check_passes_and_shows_mutants():
    result = invoke(cli.app, ["check", "lesson01_vector_add"])
    assert result.exit_code == 0, result.output
    assert "NOT REJECTED" not in result.output


def test_check_fails_on_a_broken_lesson(monkeypatch):
    monkeypatch.setattr(cli, "discover", lambda which="": iter([("day9.lesson01", Broken(SyntaxError("no")))]))
    assert invoke(cli.app, ["check"]).exit_code == 1


@pytest.mark.skipif(device.HAS_GPU, reason="this machine can time")
def test_bench_without_a_gpu_writes_nothing(monkeypatch):
    monkeypatch.setattr(rows, "save", lambda found: pytest.fail("wrote rows"))
    result = invoke(cli.app, ["bench"])
    assert result.exit_code == 0
    assert "No GPU" in result.output


def test_diff_shows_the_idea():
    result = invoke(cli.app, ["diff", "lesson01_vector_add", "add_element", "add_block"])
    assert result.exit_code == 0
    assert "+    mask = offsets < n" in result.output
    assert invoke(cli.app, ["diff", "lesson01_vector_add", "add_element", "nothing"]).exit_code == 2


def test_doctor_says_what_is_missing(monkeypatch):
    assert doctor.environment()
    assert invoke(cli.app, ["doctor"]).exit_code in (0, 1)


def test_an_import_error_is_one_lessons_failure(tmp_path, monkeypatch):
    day = tmp_path / "day8_broken"
    day.mkdir()
    (day / "lesson01_broken.py").write_text("raise ImportError('not here')")
    monkeypatch.setattr(lesson, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    ((name, found),) = discover()
    assert name == "day8_broken.lesson01_broken"
    assert isinstance(found, Broken)


def test_rows_survive_a_round_trip_and_a_second_run_replaces(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "REPORTS", tmp_path)
    rows.save([a_row(ms_p50=2.0), a_row(rung="add_block")])
    path = rows.save([a_row(ms_p50=1.0)])
    found = rows.read(path)
    assert [r.rung for r in found] == ["add_wide", "add_block"]
    assert found[0] == a_row(ms_p50=1.0)


def test_a_stopped_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.md"
    rows.write_atomically(path, "old")
    monkeypatch.setattr(rows.os, "replace", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        rows.write_atomically(path, "new")
    assert path.read_text() == "old"


def test_fingerprint_sees_code_and_not_comments(tmp_path, monkeypatch):
    def mark(source):
        (tmp_path / "some_lesson.py").write_text(source)
        module = __import__("types").ModuleType("some_lesson")
        module.__file__ = str(tmp_path / "some_lesson.py")
        monkeypatch.setitem(__import__("sys").modules, "some_lesson", module)
        return rows.fingerprint("some_lesson", "f")

    code = "W = 4\ndef g(x):\n    return x + W\ndef f(x):\n    return g(x)\n"
    assert mark(code) == mark(code.replace("    return g", "    # why\n    return g"))
    assert mark(code) == mark(code.replace("def f(x):\n", 'def f(x):\n    """Doc."""\n'))
    assert mark(code) != mark(code.replace("x + W", "x - W"))
    assert mark(code) != mark(code.replace("W = 4", "W = 8"))


def test_every_generated_page_is_made_from_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "REPORTS", tmp_path)
    monkeypatch.setattr(report, "REPORTS", tmp_path)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    rows.write_atomically(tmp_path / "some-gpu" / f"{ADD}.csv", rows.to_csv([dataclasses.asdict(a_row())]))
    table = lesson.Table("sizes", [{"n": 1, "ms": 2.0}, {"n": 2, "ms": 3.0}], note="larger is slower", x="n", y="ms")
    report.save_table("day2_triton_basics.lesson15_common_errors", table, "some-gpu")
    report.write()
    assert "larger is slower" in (tmp_path / "some-gpu" / "day2_triton_basics.lesson15_common_errors.md").read_text()
    assert "add_wide" in (tmp_path / "some-gpu" / f"{ADD}.md").read_text()
    assert "some-gpu" in (tmp_path / "README.md").read_text()
    assert not report.write(), "a second run changes nothing"
    assert report.stale_rows(), "code 1 is no fingerprint"
    rows.write_atomically(tmp_path / "some-gpu" / f"{ADD}.csv", rows.to_csv([dataclasses.asdict(a_row(tb_per_s=2.0))]))
    assert tmp_path / "some-gpu" / f"{ADD}.png" in report.write(), "a plot of other data is stale"


def test_a_mutant_that_no_longer_applies_is_an_error():
    found = dict(discover("lesson01_vector_add"))[ADD]
    gone = Mutant("gone", "add_block_kernel", "no such text", "", "add_block")
    with pytest.raises(ValueError, match="stands 0 times"):
        mutants.build(ADD, gone)
    with pytest.raises(ValueError, match="no function"):
        mutants.build(ADD, dataclasses.replace(gone, where="nowhere"))
    assert mutants.first_rejection(found, found.rungs[-1]) is None, "the right rung passes"


@pytest.mark.parametrize(
    ("target", "warps", "registers", "shared", "expected"),
    [
        (90, 4, 32, 0, 1.0),  # 16 blocks of 4 warps
        (90, 4, 255, 0, 0.125),  # 65536 / (256 * 32) = 8 warps
        (90, 8, 64, 100_000, 0.25),  # two blocks of 100 KB fit in 228 KB
        (80, 8, 64, 100_000, 0.125),  # one does in 164 KB
        (90, 1, 16, 0, 0.5),  # 32 blocks at most
    ],
)
def test_occupancy(target, warps, registers, shared, expected):
    assert compiled.occupancy(target, warps, registers, shared) == expected


def test_claims_can_fail():
    kernel = compiled.Kernel("r", "k", 90, 4, 32, 3, 0, 1.0, 4, 4, 0, 0, 0, 0, 0, 99)
    broken = compiled.broken_claims("l", {"r": tuple(compiled.CLAIMS)}, [kernel])
    assert len(broken) == len(compiled.CLAIMS) - 2, "on sm_90 neither cp.async nor shared memory is at fault"
    assert compiled.broken_claims("l", {"r": ["k: no spills"]}, [kernel])
    assert compiled.broken_claims("l", {"r": ["other: no shared memory"]}, [kernel]) == ["l.r launches no other"]
    assert not compiled.broken_claims("l", {"r": ["k: no shared memory"]}, [kernel])


def test_a_lesson_that_does_not_compile_says_so(monkeypatch):
    with pytest.raises(RuntimeError, match="KeyError"):
        compiled.kernels("day2_triton_basics.no_such_lesson", (90,))


def test_median_must_settle():
    assert timing._settled([1.0 + 0.0001 * (i % 5) for i in range(50)])
    assert not timing._settled([1.0 + 0.1 * (i % 5) for i in range(50)])


def test_an_impossible_time_is_refused(monkeypatch):
    found = dict(discover("lesson01_vector_add"))[ADD]
    monkeypatch.setattr(timing, "limits", lambda: timing.Limits(4e12, {"bf16": 7e14}, 0.002))
    fast = timing.Timing(1e-5, 1e-5, 1e-5, 20)
    with pytest.raises(RuntimeError, match="measuring error"):
        bench._rows(ADD, found, {"n": 2**28}, {"add_wide": fast, "copy": fast}, {"add_wide": "rung", "copy": "limit"})


def test_what_a_program_prints_becomes_rows():
    text = "v1    right: 10 values\n\n10 floats: in 1.2 ms\nlimit 1.2 ms\nv1 pinned      3.30 ms   40% of   it\n"
    text += "  v2    2 ms  x\nB\nv3  1 ms  y\n"
    table = bench.timed_lines(text, "note")
    assert [tuple(row.values()) for row in table.rows] == [
        ("10 floats: in 1.2 ms; limit 1.2 ms", "v1 pinned", "3.30", "40% of it"),
        ("", "v2", "2", "x"),
        ("B", "v3", "1", "y"),
    ]
    assert bench.timed_lines("v1    right: 10 values\n", "note") is None
