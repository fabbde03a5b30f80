"""What needs NVIDIA's tools: the programs under compute-sanitizer, the emulator's counts beside ncu's."""

import os
import sys

import lessonkit.base.device as device
from lessonkit.base import process
from lessonkit.base.tables import read_csv, to_csv
from lessonkit.cuda import build, toolchain
from lessonkit.judge import counters
from lessonkit.lesson import kernels
from lessonkit.measure import ncu, rows, sanitize
from lessonkit.pages import report

import pytest

PROGRAMS = [pytest.param(name, lesson.extension, id=name) for name, lesson in kernels() if lesson.extension]
SANITIZER = toolchain.find_tool("compute-sanitizer")
NO_SANITIZER = "" if device.HAS_GPU and SANITIZER else "needs a GPU and compute-sanitizer"
# (tool, the program's name) -> what of it the tool cannot judge.
BEYOND = {
    ("initcheck", "23_hopper_matmul_persistent"): "initcheck does not see what the copy engine (TMA) writes to memory",
    ("synccheck", "lesson14_thunderkittens_matmul"): "the library's template meets at one barrier from several places",
}


@pytest.mark.skipif(bool(NO_SANITIZER), reason=NO_SANITIZER or "here")
@pytest.mark.parametrize(("name", "extension"), PROGRAMS)
@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_program_is_clean_under_compute_sanitizer(tool, name, extension):
    """Its main, on small sizes, on one GPU: kernels of several that wait for one another would not run together."""
    if why := extension.lacks() or BEYOND.get((tool, extension.source.stem)):
        pytest.skip(why)
    (program,) = build.build([build.program(extension.source)])
    one = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    around = [SANITIZER, "--tool", tool, *sanitize.TOOLS[tool], "--error-exitcode", "86", "--print-limit", "5"]
    command = [*around, str(program)]
    code, out, err = process.output(command, 120, COURSE_SMALL="1", CUDA_VISIBLE_DEVICES=one)
    assert code == 0, f"{tool}, exit code {code}:\n{out[-6000:]}\n{err[-2000:]}"
    assert "right" in out, out[-6000:] + err[-2000:]


PRINTED = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","spin_kernel(long)","smsp__inst_executed_op_shared_ld.sum","inst","0"
"0","7","spin_kernel(long)","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","sector","0"
"1","7","<unnamed>::row_kernel<float, (int)4>(T1 *)","smsp__inst_executed_op_shared_ld.sum","inst","32"
"1","7","<unnamed>::row_kernel<float, (int)4>(T1 *)","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","","1,000"
"1","7","<unnamed>::row_kernel<float, (int)4>(T1 *)","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","","4,000"
"2","7","<unnamed>::row_kernel<float, (int)8>(T1 *)","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","","1,000"
"2","7","<unnamed>::row_kernel<float, (int)8>(T1 *)","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","","8,000"
"2","7","<unnamed>::row_kernel<float, (int)8>(T1 *)","l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum","","n/a"
"3","7","void at::native::elementwise_kernel<(int)4>(int)","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","","9"
"4","7","spin_kernel(long)","smsp__inst_executed_op_shared_ld.sum","inst","0"
"5","7","add_kernel(const float *)","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","","5"
"5","7","add_kernel(const float *)","l1tex__t_requests_pipe_lsu_mem_global_op_ldgsts.sum","","2"
"""
TURNS = [{"lesson": "cuda_src.some", "rung": rung, "case": "n=1"} for rung in ("first", "second")]


def test_what_ncu_prints_is_summed_for_each_rung_and_kernel():
    first, second = ncu._parsed(PRINTED, TURNS)
    assert (first["rung"], first["kernel"], first["launches"]) == ("first", "row_kernel", "2")
    assert (first["global_load_requests"], first["global_load_sectors"]) == ("2000", "12000")
    assert (first["shared_load_requests"], first["global_store_sectors"]) == ("32", "")
    assert (second["rung"], second["kernel"], second["global_load_requests"]) == ("second", "add_kernel", "7")


def test_both_counts_are_compared_by_rung_and_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "REPORTS", tmp_path)
    metrics = dict.fromkeys((*counters.METRICS, *counters.PLAIN), 0.0)
    emulated = [
        {"rung": "first", "kernel": "void row_kernel<float, 4>"} | metrics | {"loads": 100, "sectors a load": 4},
        {"rung": "first", "kernel": "row_kernel<T, N>"} | metrics | {"loads": 300, "sectors a load": 8},
        {"rung": "second", "kernel": "other_kernel"} | metrics,
    ]
    rows.write_atomically(tmp_path / "emulated" / "cuda_src.some.csv", to_csv(emulated))
    place = ncu.path(tmp_path / "some-gpu")
    rows.write_atomically(place, "# {}\n" + to_csv(ncu._parsed(PRINTED, TURNS)))
    found = {row["metric"]: (row["emulated"], row["ncu"], row["ratio"]) for row in ncu.compared(place)}
    assert found["loads"] == ("400", "2000", "5.00")
    assert found["sectors a load"] == ("7", "6", "0.86")
    assert found["launches"] == ("0", "2", "only ncu")
    assert found["shared loads"] == ("0", "32", "only ncu")
    assert "stores" not in found, "ncu has no figure"
    assert ncu.compared(place, ["cuda_src.other"]) == []


NCU = """#!/bin/sh
case "$*" in
*--query-metrics*) echo "l1tex__t_requests_pipe_lsu_mem_global_op_ld   Counter   request   loads"; exit 0;;
*--version*) echo "Version 2025.3.1.0 (build 1)"; exit 0;;
*op_st*) echo "==ERROR== asked for what was not listed"; exit 1;;
esac
while [ "$1" != lessonkit.measure.ncu ]; do shift; done
say() {
    echo "{'what': '$1', 'lesson': 'cuda_src.$2', 'rung': '$3', 'case': 'n=1'}" | tr "'" '"' >> "$turns"
}
turns="$2"
echo '"ID","Kernel Name","Metric Name","Metric Value"'
if [ "$3" = cuda_src.02_vector_add ]; then
    say turn 02_vector_add add_one; say done 02_vector_add
    echo '"0","spin_kernel(long)","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","0"'
    echo '"1","add_one_kernel(int)","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","256"'
else
    say turn 03_matrix_multiply multiply_naive; say done 03_matrix_multiply
    echo '"0","spin_kernel(long)","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","0"'
    echo '"1","naive_kernel(int)","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","7"'
fi
[ "$#" = 3 ] || { echo "==ERROR== The application returned an error code (1)."; exit 1; }
"""


def test_count_asks_again_for_the_lessons_behind_a_crash(tmp_path, monkeypatch):
    (tmp_path / "ncu").write_text(NCU)
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setattr(ncu.toolchain, "find_tool", lambda tool: str(tmp_path / tool))
    monkeypatch.setattr(ncu.build, "build", lambda products: [])
    monkeypatch.setattr(ncu, "ROOT", tmp_path)
    monkeypatch.setattr(rows, "REPORTS", tmp_path / "reports")
    monkeypatch.setattr(device, "name", lambda: "some-gpu")
    said = ncu.count(["cuda_src.02_vector_add", "cuda_src.03_matrix_multiply"])
    assert ["application returned" in said[0], len(said)] == [True, 2], said
    kept = read_csv(ncu.path(tmp_path / "reports" / "some-gpu"))
    assert [(row["kernel"], row["global_load_requests"]) for row in kept] == [
        ("add_one_kernel", "256"),
        ("naive_kernel", "7"),
    ]
    ncu.count(["cuda_src.03_matrix_multiply"])
    assert read_csv(ncu.path(tmp_path / "reports" / "some-gpu")) == kept, "merged"


def test_the_counts_page_is_made_from_its_rows():
    """That they are fresh the tests of reports see."""
    places = [ncu.path(folder) for folder in report.device_folders()]
    assert any(place.exists() for place in places)
    for place in places:
        assert place.exists() == place.with_suffix(".md").exists()
        if place.exists():
            assert ncu.compared(place), "no kernel of ncu's is in reports/emulated: python -m lessonkit count"


def test_a_tool_that_hangs_is_ended_with_its_children():
    hangs = ["sh", "-c", f"echo begun; {sys.executable} -c 'import time; time.sleep(1000)'"]
    for seconds in (3, 30, 300):  # on a busy machine it begins late
        code, out, err = process.output(hangs, seconds)
        assert code == 124
        assert f"ended after {seconds} s" in err
        if out:
            break
    assert out == "begun\n"


def test_without_gpu_or_ncu_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "HAS_GPU", False)
    assert "No GPU" in ncu.lacks()
    monkeypatch.setattr(device, "HAS_GPU", True)
    monkeypatch.setattr(toolchain, "USUAL", str(tmp_path))
    monkeypatch.setattr(toolchain.shutil, "which", lambda *args, **kwargs: None)
    assert "install Nsight Compute" in ncu.lacks()
    assert "\n" not in ncu.lacks()
