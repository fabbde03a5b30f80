"""The sanitizers' reports: read from the tools' words, matched with the argued list, and an error where unknown."""

import importlib
import json
from collections import Counter

import lessonkit
import lessonkit.__main__ as main
from lessonkit.base import device
from lessonkit.base.cpp_text import definitions
from lessonkit.base.files import ROOT
from lessonkit.base.tables import dicts, read_csv
from lessonkit.commands import on_gpu
from lessonkit.measure import sanitize
from lessonkit.measure.sanitize import Argued, NotUnderstood, Report

import pytest
from typer.testing import CliRunner

MEMCHECK = """\
========= COMPUTE-SANITIZER
add: right
========= Invalid __global__ read of size 4 bytes
=========     at add_kernel+0x160 in /course/lesson01_vector_add.py:61
=========     by thread (96,0,0) in block (3,0,0)
=========     Address 0x7f5d0c600190 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f5d0c600000 of size 400 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========     Host Frame: [0x2e1ae3] in libcuda.so.1
=========
========= Invalid __global__ read of size 4 bytes
=========     at add_kernel+0x160 in /course/lesson01_vector_add.py:61
=========     by thread (97,0,0) in block (3,0,0)
=========     Address 0x7f5d0c600194 is out of bounds
=========     and is 5 bytes after the nearest allocation at 0x7f5d0c600000 of size 400 bytes
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on CUDA API call to
=========
========= ERROR SUMMARY: 3 errors
"""
OLDER = """\
========= Invalid __shared__ write of size 4 bytes
=========     at 0x70 in traps.cu:34:void <unnamed>::tile_kernel<float>(float *, int)
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x10 is misaligned
=========
========= ERROR SUMMARY: 1 error
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at matmul_persistent_kernel+0x8c0 in /course/matmul.py:88
=========     and Read access at matmul_persistent_kernel+0xb10 in /course/matmul.py:97 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
INITCHECK = """\
========= Uninitialized __global__ memory read of size 4 bytes
=========     at sum_kernel(float *)+0x110 in sum.cu:9
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f0
=========
========= ERROR SUMMARY: 1 error
"""
HOST = """\
========= Host API memory access error at host access to 0x7fafa880de00 of size 35,632 bytes
=========     Uninitialized access to 0x7fafa880de00 on access by cudaMemcpy source
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: cudaMemcpyAsync [0x70eec] in libcudart.so.13
=========
========= Host API memory access error at host access to 0x7fafa8816d30 of size 35,632 bytes
=========     Uninitialized access to 0x7fafa8816d30 on access by cudaMemcpy source
=========
========= ERROR SUMMARY: 2 errors
"""
SYNCCHECK = """\
========= Barrier error detected. Divergent thread(s) in block.
=========     at branch_kernel(int *)+0x90 in traps.cu:98
=========     by thread (32,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
CLEAN = "========= COMPUTE-SANITIZER\nevery rung ran\n========= ERROR SUMMARY: 0 errors\n"
CONSAN = (
    "/course/matmul.py:88: matmul_kernel: block: [0,0,0], thread: [0,0,0] Assertion `Buffer being accessed has "
    "outstanding writes.` failed.\n"
) * 2


def test_a_race_names_the_lines_of_code_and_not_their_numbers():
    """Two lines of a file of the course; a file that is not here is not named."""
    file = ROOT / "day3_matmul_tk/matmul_hopper/warp_specialized.py"
    lines = file.read_text().splitlines()
    nth = next(i for i, line in enumerate(lines, 1) if "gl.warp_specialize(" in line)
    said = (
        f"========= Error: Race reported between Read access at matmul_kernel+0x110 in {file}:{nth}\n"
        "=========     and Write access at matmul_kernel+0x28b0 in nowhere.py:1 [7 hazards]\n"
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    )
    (report,) = sanitize.parsed("racecheck", said)
    words = f"Race reported between Read access in `{lines[nth - 1].strip()[:60]}` and Write access"
    assert report == Report("racecheck", "matmul_kernel", words)


@pytest.mark.parametrize(
    ("tool", "said", "found"),
    [
        ("memcheck", OLDER, {Report("memcheck", "tile_kernel", "Invalid __shared__ write of size 4 bytes"): 1}),
        (
            "racecheck",
            RACECHECK,
            {Report("racecheck", "matmul_persistent_kernel", "Race reported between Write access and Read access"): 1},
        ),
        (
            "initcheck",
            HOST,
            {Report("initcheck", "cudaMemcpy", "Host API memory access error at host access"): 2},
        ),
        (
            "initcheck",
            INITCHECK,
            {Report("initcheck", "sum_kernel", "Uninitialized __global__ memory read of size 4 bytes"): 1},
        ),
        (
            "synccheck",
            SYNCCHECK,
            {Report("synccheck", "branch_kernel", "Barrier error detected. Divergent thread(s) in block."): 1},
        ),
        ("memcheck", CLEAN, {}),
        ("consan", CONSAN, {Report("consan", "matmul_kernel", "Buffer being accessed has outstanding writes."): 2}),
        ("iisan", "every rung ran\n", {}),
    ],
)
def test_reports_are_read_from_the_words(tool, said, found):
    assert sanitize.parsed(tool, said) == Counter(found)


def test_the_same_report_of_several_threads_is_one():
    """Threads, addresses and distances differ; an error of the API has no kernel."""
    found = sanitize.parsed("memcheck", MEMCHECK)
    assert sorted(found.values()) == [1, 2]
    assert {report.kernel for report in found} == {"add_kernel", ""}
    (mine,) = [report for report in found if report.kernel]
    assert mine.what == "Invalid __global__ read of size 4 bytes"
    assert any("cudaErrorLaunchFailure" in report.what for report in found)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("Error: Device not supported\n", "did not come to its end: Error: Device not supported"),
        ("", "it says nothing"),
        ("========= Some new words\n=========\n========= ERROR SUMMARY: 2 errors\n", "counts 2 errors and none is"),
    ],
)
def test_what_cannot_be_read_is_no_clean_bill(said, why):
    with pytest.raises(NotUnderstood, match=why):
        sanitize.parsed("memcheck", said)


HAZARD = next(iter(sanitize.parsed("racecheck", RACECHECK)))
KNOWN = Argued((HAZARD.kernel,), "racecheck", ("Write access", "Read access"), "The mbarrier of the stage orders them.")


@pytest.mark.parametrize(
    ("changes", "covered"),
    [
        ({}, True),
        ({"kernels": ("matmul_kernel",)}, False),
        ({"kernels": ("matmul_kernel", HAZARD.kernel)}, True),
        ({"tool": "memcheck"}, False),
        ({"reports": ("Write access",)}, False),
        ({"reports": ("Race reported",)}, False),
        ({"reports": ("Barrier error", " access")}, True),
    ],
)
def test_a_report_is_argued_by_its_kernel_tool_and_words(changes, covered):
    entry = Argued(**(vars(KNOWN) | changes))
    assert (sanitize.unargued([HAZARD], [entry]) == []) == covered


ONE, OTHER = "day2_triton_basics.lesson05_softmax", "day2_triton_basics.lesson08_layernorm"


def test_an_argument_about_one_lesson_is_none_about_another(tmp_path):
    """PyTorch's kernels are called by all of them."""
    entry = Argued(**(vars(KNOWN) | {"lessons": (ONE, "two")}))
    assert not sanitize.unargued([HAZARD], [entry], "two")
    assert sanitize.unargued([HAZARD], [entry], OTHER) == sanitize.unargued([HAZARD], [entry]) == [HAZARD]
    for lesson in (ONE, OTHER):
        sanitize.save(tmp_path, lesson, "racecheck", Counter([HAZARD]), [entry])
    argued = [row["argued"] for row in read_csv(tmp_path / sanitize.NAME)]
    again = dicts(sanitize.marked(tmp_path, [entry]))
    assert argued == [row["argued"] for row in again] == ["yes", ""]


def test_an_argued_access_that_meets_another_is_no_argued_report():
    """The two accesses of the mailbox are in order. A third one that meets them is not."""
    entry = Argued(("k",), "racecheck", ("Write access in `a.store(", "Read access in `a.load("), "By its mbarrier.")
    two = "Race reported between Write access in `a.store(x)` and Read access in `a.load()`"
    assert entry.covers(Report("racecheck", "k", two))
    assert not entry.covers(Report("racecheck", "k", f"{two} and Write access in `b.store(x)`"))


def test_an_access_without_a_line_is_no_access_with_one():
    entry = Argued(("k",), "racecheck", ("Write access",), "Warps that hold the same row.")
    assert entry.covers(Report("racecheck", "k", "Race reported between Write access and Write access"))
    one = "Race reported between Write access and Write access in `a.store(x)`"
    assert not entry.covers(Report("racecheck", "k", one))


LISTS = "kernels, reports, lessons are lists"


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ('kernels = ["a"]\ntool = "racecheck"\nreports = ["Race"]', "give kernels, tool, reports, argument"),
        ('kernels = ["a"]\ntool = "racecheck"\nreports = ["Race"]\nargument = " "', "give kernels, tool, reports, arg"),
        ('kernels = ["a"]\ntool = "racecheck"\nreports = []\nargument = "b"', "give kernels, tool, reports, argument"),
        ('kernels = "a"\ntool = "racecheck"\nreports = ["Race"]\nargument = "b"', LISTS),
        (
            'kernels = ["a"]\ntool = "racecheck"\nreports = ["R", " "]\nargument = "b"',
            LISTS,
        ),
        ('kernels = ["a"]\ntool = "racecheck"\nreports = ["R"]\nargument = "b"\nlessons = []', "and nothing else"),
        ('kernels = ["a"]\ntool = "tsan"\nreports = ["Race"]\nargument = "b"', "tool='tsan': there are memcheck"),
        ('kernels = ["a"]\ntool = "consan"\nreports = ["R"]\nargument = "b"\nmore = 1', "and nothing else"),
    ],
)
def test_a_list_with_a_hole_is_refused(tmp_path, entry, says):
    (path := tmp_path / "list.toml").write_text(f"[[argued]]\n{entry}\n")
    with pytest.raises(ValueError, match=says):
        sanitize.argued(path)


def test_the_list_names_kernels_that_are_there():
    """And argues in more than a few words."""
    sources = [path.read_text() for folder in ("day*_*", "course_ops") for path in ROOT.glob(f"{folder}/**/*.py")]
    programs = [path.read_text() for path in ROOT.glob("*/**/*.cu")]
    known = {d.name for text in programs for d in definitions(text)}
    entries = sanitize.argued()
    assert len({entry.argument for entry in entries}) == len(entries)  # one reason stands once
    for entry in entries:
        for kernel in entry.kernels:
            ours = kernel in known or any(f"def {kernel}(" in text for text in sources)
            assert ours or (kernel.startswith(("at::", "nvjet_")) and entry.lessons), entry
        assert len(entry.argument.split()) >= 15, entry


@pytest.fixture
def sources(monkeypatch):
    """What today's code is, by lesson; a test may change it."""
    known = {}
    monkeypatch.setattr(sanitize.operator_cases, "source", lambda name, rung: known.get(name, "code.inputs"))
    return known


def test_what_was_said_is_kept_by_lesson_and_tool(tmp_path, sources):
    sanitize.save(tmp_path, "day3.a", "racecheck", Counter({HAZARD: 3}), [KNOWN])
    sanitize.save(tmp_path, "day3.b", "racecheck", Counter({HAZARD: 1}), [])
    sanitize.save(tmp_path, "day3.a", "memcheck", Counter(), [])
    sanitize.save(tmp_path, "day3.b", "racecheck", Counter(), [])
    kept = read_csv(tmp_path / sanitize.NAME)
    assert [(r["lesson"], r["tool"], r["kernel"], r["count"], r["argued"]) for r in kept] == [
        ("day3.a", "racecheck", HAZARD.kernel, "3", "yes"),
        ("day3.a", "memcheck", "", "0", ""),
        ("day3.b", "racecheck", "", "0", ""),
    ]


@pytest.mark.parametrize("known", [[KNOWN], []])
def test_kept_rows_are_marked_by_todays_list(tmp_path, known, sources):
    """A new argument marks them, and one that is taken back no longer does; the rest stays to the byte."""
    for before in ([KNOWN], []):
        sanitize.save(tmp_path, "day3.a", "racecheck", Counter({HAZARD: 3}), before)
        sanitize.save(tmp_path, "day3.b", "memcheck", Counter(), before)
        path = tmp_path / sanitize.NAME
        path.write_text(sanitize.marked(tmp_path, known))
        again = sanitize.marked(tmp_path, known)
        assert path.read_text() == again
        assert [row["argued"] for row in read_csv(path)] == ["yes" if known else "", ""]
        assert [row["count"] for row in read_csv(path)] == ["3", "0"]


ADD = "day2_triton_basics.lesson01_vector_add"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with a GPU and the tools, whose words are given: said[tool]."""
    said = dict.fromkeys(sanitize.TOOLS, CLEAN) | dict.fromkeys(sanitize.INSTRUMENTED, "every rung ran\n")
    commands = []

    def output(command, seconds, **env):
        tool = env.get("TRITON_INSTRUMENTATION_MODE") or command[command.index("--tool") + 1]
        commands.append((tool, command, env))
        return 0, said[tool] if "every rung ran" in said[tool] else f"every rung ran\n{said[tool]}", ""

    monkeypatch.setattr(on_gpu, "REPORTS", tmp_path)
    monkeypatch.setattr(device, "HAS_GPU", True)
    monkeypatch.setattr(device, "name", lambda: "some-gpu")
    monkeypatch.setattr(sanitize.toolchain, "find_tool", lambda tool: f"/bin/{tool}")
    monkeypatch.setattr(sanitize.process, "output", output)
    monkeypatch.setattr(sanitize.rows, "machine", lambda: {"gpu": "some-gpu"})
    monkeypatch.setattr(sanitize, "argued", lambda: [KNOWN])
    return said, commands


def test_every_tool_is_put_around_every_lesson(gpu, tmp_path):
    _, commands = gpu
    done = CliRunner().invoke(main.app, ["sanitize", ADD])
    assert done.exit_code == 0, done.output
    assert [tool for tool, _, _ in commands] == [*sanitize.TOOLS, *sanitize.instrumented()]
    assert {tuple(command[-3:]) for _, command, _ in commands} == {(ADD, json.dumps(vars(sanitize.Part())), "[]")}
    assert all(env["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1" for _, _, env in commands)
    assert len(read_csv(tmp_path / "some-gpu" / sanitize.NAME)) == len(commands)


@pytest.mark.parametrize(
    ("tool", "words", "status"), [("racecheck", RACECHECK, 0), ("synccheck", SYNCCHECK, 1), ("memcheck", "killed", 1)]
)
def test_a_report_that_is_not_argued_is_an_error(gpu, tool, words, status):
    said, _ = gpu
    said[tool] = words
    done = CliRunner().invoke(main.app, ["sanitize", ADD, "--tool", tool])
    assert done.exit_code == status, done.output
    assert {"racecheck": "1 argued", "synccheck": "branch_kernel: Barrier error", "memcheck": "did not come to"}[
        tool
    ] in done.output


def test_a_tool_may_watch_one_rung_at_one_shape(gpu, tmp_path):
    """Its row stands beside that of the whole lesson."""
    _, commands = gpu
    about = ["--tool", "racecheck", "--rung", "add_block", "--shape", "n=300 layout=odd", "--sms", "2"]
    for options in (about, about, about[:2]):
        done = CliRunner().invoke(main.app, ["sanitize", ADD, *options])
        assert done.exit_code == 0, done.output
    part = sanitize.Part(**json.loads(commands[0][1][-2]))
    assert part == sanitize.Part("add_block", {"n": 300, "layout": "odd"}, 2)
    rows = read_csv(tmp_path / "some-gpu" / sanitize.NAME)
    assert [row["part"] for row in rows] == ["add_block n=300 layout=odd sms=2", ""]
    assert sanitize.Part.of(rows[0]["part"]) == part
    assert sanitize.Part.of(rows[1]["part"]) == sanitize.Part()
    assert len({row["source"] for row in rows}) == 2, "of a rung, and of all"


@pytest.mark.parametrize(
    ("options", "says"), [(["--rung", "add_blok"], "has no rung"), (["--shape", "n300"], "'n300' is no size")]
)
def test_a_part_that_there_is_not_is_refused(gpu, options, says):
    done = CliRunner().invoke(main.app, ["sanitize", ADD, *options])
    assert done.exit_code == 2
    assert says in " ".join(done.output.replace("│", " ").split())


def test_a_rung_that_no_lesson_has_is_refused_in_plain_words(gpu):
    done = CliRunner().invoke(main.app, ["sanitize", "--rung", "add_blok"])
    assert done.exit_code == 2
    assert "no lesson has a rung of that name" in " ".join(done.output.replace("│", " ").split())


@pytest.mark.skipif(device.HAS_GPU, reason="a machine without a GPU")
def test_the_driver_runs_the_part_and_says_so(monkeypatch, capsys):
    """One rung, its inputs alone (the reference's kernels would be watched too), and the SMs that it is told."""
    asked = []
    rung = next(rung for rung in importlib.import_module(ADD).LESSON.rungs if rung.__name__ == "add_block")
    monkeypatch.setattr(sanitize.torch.cuda, "synchronize", lambda: asked.append(lessonkit.num_sms()))
    monkeypatch.setattr(sanitize.check, "judge", lambda *args: pytest.fail("the reference was asked"))
    monkeypatch.setattr(lessonkit, "num_sms", lambda: 132)
    monkeypatch.setattr(sanitize.faulthandler, "dump_traceback_later", lambda *args, **more: None)
    sanitize.main(ADD, sanitize.Part(rung.__name__, {"n": 300}, 2))
    assert asked == [2]
    assert sanitize.DONE in capsys.readouterr().out
    sanitize.main(ADD, sanitize.Part("no_such_rung"))
    assert sanitize.DONE not in capsys.readouterr().out


@pytest.mark.skipif(device.HAS_GPU, reason="a machine without a GPU")
def test_without_a_gpu_one_line_says_so():
    done = CliRunner().invoke(main.app, ["sanitize"])
    assert done.exit_code == 0
    assert "No GPU was found" in done.output
    assert CliRunner().invoke(main.app, ["sanitize", "--tool", "helgrind"]).exit_code == 2


def test_the_modes_of_this_triton_are_asked_of_its_compiler():
    assert set(sanitize.instrumented()) <= set(sanitize.INSTRUMENTED)
