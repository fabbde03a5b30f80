"""Pairs of PyTorch and Triton: environments, rows, the table, the bounds that follow. Nothing is installed."""

import json
import re
import sys
import tomllib
from types import SimpleNamespace

from lessonkit import __main__ as command_line
from lessonkit.base import device, eviction
from lessonkit.base.files import ROOT
from lessonkit.base.tables import read_csv
from lessonkit.commands import versions
from lessonkit.lesson import Broken
from lessonkit.pages import targets

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from typer.testing import CliRunner

LESSON = "day2_triton_basics.lesson01_vector_add"
CAPPED = """Collecting triton==3.9.0
ERROR: Cannot install torch==2.15.0 because these package versions have conflicting dependencies.

The conflict is caused by:
    The user requested torch==2.15.0
    The user requested (constraint) torch<=2.14.1

ERROR: ResolutionImpossible: for help visit https://pip.pypa.io/en/latest/
"""
ABSENT = "ERROR: No matching distribution found for torch==2.10.0"


@pytest.fixture
def table(monkeypatch, tmp_path):
    """The rows that are in the table, which is a new one."""
    monkeypatch.setattr(versions, "TABLE", tmp_path / "versions.csv")
    monkeypatch.setattr(targets, "REPORTS", tmp_path)
    return lambda: [(row["torch"], row["triton"], row["target"]) for row in read_csv(versions.TABLE)]


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """What pip was asked for; it installs nothing. `pip.says = words` makes it fail."""
    monkeypatch.setattr(versions, "CACHE", tmp_path)
    monkeypatch.setattr(versions.venv, "create", lambda folder, **more: folder.mkdir(parents=True, exist_ok=True))
    monkeypatch.setattr(versions.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**40))
    asked = SimpleNamespace(commands=[], says="")

    def run(command, **more):
        asked.commands.append(command)
        return SimpleNamespace(returncode=int(bool(asked.says)), stdout=asked.says)

    monkeypatch.setattr(versions.subprocess, "run", run)
    return asked


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (CAPPED, "the machine's pip is constrained to torch<=2.14.1"),
        (ABSENT, "pip finds no wheel of it for this machine"),
        ("Collecting\nERROR: gone: https://a.b/c\nWARNING: x", "ERROR: gone: ..."),
        ("killed", "killed"),
        ("", "pip says nothing"),
    ],
)
def test_why_pip_did_not_install(said, why):
    assert versions.reason(said) == why


def test_an_environment_is_made_once_with_the_triton_that_pytorch_asks_for(pip):
    made = [versions.python("2.14.1") for _ in range(2)]
    (command,) = pip.commands
    assert [command[0]] * 2 == [*map(str, made)]
    assert {"torch==2.14.1", "triton==3.8.0", "numpy>=2"} <= {*command}
    assert sum(word.startswith(("torch", "triton")) for word in command) == 2, "no bounds beside them"
    versions.python("2.11.0")
    assert "numpy<2.4" in pip.commands[-1], "Triton 3.6 cannot interpret with newer ones"


def test_another_triton_lies_alone_and_goes_first(pip, monkeypatch):
    monkeypatch.setattr(versions, "here", lambda: ("2.13.0", "3.7.1"))
    _, env = versions._process(("2.14.1", "3.9.0"))
    command, folder = pip.commands[-1], versions.CACHE / "versions" / "triton-3.9.0"
    assert command[command.index("--target") + 1] == str(folder)
    assert "--no-deps" in command
    assert env["PYTHONPATH"].endswith(str(folder))
    _, own = versions._process(("2.14.1", "3.8.0"))
    assert "triton-" not in own["PYTHONPATH"]
    for setting in ("COURSE_CACHE", "TRITON_CACHE_DIR"):
        assert own[setting] != env[setting]
    assert "versions" in eviction.PARTS, "gigabytes that nobody uses have to go"


def test_the_running_pair_needs_no_environment(pip, monkeypatch):
    monkeypatch.setattr(versions, "here", lambda: ("2.14.1", "3.9.0"))
    executable, env = versions._process(("2.14.1", "3.9.0"))
    assert str(executable) == sys.executable
    assert not pip.commands
    assert env["CUDA_VISIBLE_DEVICES"] == ""


def test_what_cannot_be_installed_leaves_nothing_but_its_reason(pip, monkeypatch):
    pip.says = CAPPED
    with pytest.raises(versions.NotInstalled, match=r"constrained to torch<=2\.14\.1"):
        versions.python("2.15.0")
    with pytest.raises(versions.NotInstalled):
        versions.overlay("3.9.0")
    assert not list((versions.CACHE / "versions").iterdir())
    monkeypatch.setattr(versions.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    with pytest.raises(versions.NotInstalled, match=r"takes 7 GiB; 1\.0 are free"):
        versions.python("2.15.0")


def rows_of(monkeypatch, program):
    monkeypatch.setattr(versions, "_process", lambda pair: (sys.executable, {"PYTHONPATH": str(program.parent)}))
    monkeypatch.setattr(versions, "__name__", program.stem)
    return versions.tried(("2.14.1", "3.9.0"), "", [90], True)


def test_rows_come_as_they_are_found(monkeypatch, tmp_path):
    """A pair that dies after its first row keeps that row."""
    program, row = tmp_path / "a_pair.py", versions.Tried("2.14.1", "3.9.0", "90", 1, 2, 1)
    program.write_text(
        f"print({json.dumps([vars(row), ['wrong']])!r}, flush=True)\nraise SystemExit('a compiler died')\n"
    )
    found = rows_of(monkeypatch, program)
    assert next(found) == (row, ["wrong"])
    with pytest.raises(versions.Failed, match="a compiler died"):
        next(found)


def test_rows_are_of_the_pair_that_was_asked_for(monkeypatch, tmp_path):
    program = tmp_path / "a_pair.py"
    program.write_text(f"print({json.dumps([vars(versions.Tried('2.14.1', '3.8.0', '90', 1, 2, 1)), []])!r})\n")
    with pytest.raises(versions.Failed, match=r"has torch 2\.14\.1 with Triton 3\.8\.0"):
        next(rows_of(monkeypatch, program))


def test_a_lesson_that_cannot_be_imported_is_a_failure(monkeypatch):
    monkeypatch.setattr(versions, "discover", lambda which: [("day2.lost", Broken(ImportError("no tma")))])
    ((row, words),) = versions._here("lost", [], True)
    assert (row.passed, row.failed, words) == (0, 1, ["day2.lost: cannot be imported: no tma"])


@pytest.mark.night
def test_a_pair_is_tried():
    """The running one, with one lesson: its process, its checks and its kernels."""
    (checks, _), (kernels, _) = versions.tried(versions.here(), LESSON, [90], True)
    assert (checks.target, checks.failed, kernels.target, kernels.failed) == (targets.INTERPRETED, 0, "90", 0)
    assert checks.passed >= 2 <= kernels.passed


def test_rows_replace_their_own(table):
    versions.save(
        [versions.Tried("2.15.0", "3.9.0", "90", 1, 2, 3), versions.Tried("2.9.1", "3.5.1", "gfx942", 1, 0, 0)]
    )
    versions.save(
        [versions.Tried("2.15.0", "3.9.0", "90", 4, 0, 0), versions.Tried("2.15.0", "3.9.0", "interpreted", 5, 0, 0)]
    )
    versions.save([versions.Tried("2.15.0", "3.10.0", "90", 4, 0, 0)])
    assert table() == [
        ("2.9.1", "3.5.1", "gfx942"),
        ("2.15.0", "3.9.0", "90"),
        ("2.15.0", "3.9.0", "interpreted"),
        ("2.15.0", "3.10.0", "90"),
    ]
    assert [row["passed"] for row in read_csv(versions.TABLE)] == ["1", "4", "5", "4"]


def test_a_pair_that_was_tried_needs_no_reason(table):
    pair = "2.15.0", "3.9.0"
    versions.save([versions.not_tried(pair, "no\nroom")])
    assert table() == [(*pair, targets.NOT_TRIED)]
    assert targets.versions("en").endswith("\n- torch 2.15.0 with Triton 3.9.0 was not tried: no room.\n")
    versions.save([versions.Tried(*pair, "90", 272, 0, 1)])
    versions.save([versions.not_tried(pair, "no room")])
    assert table() == [(*pair, "90")]
    assert targets.versions("en").endswith("| 2.15.0 | 3.9.0 | 272 of 273 |\n")
    versions.save([versions.Tried("2.14.1", "3.8.0", "interpreted", 5, 0, 0)])
    *_, first, second, _, empty, last = targets.versions("en").split("\n")
    assert (first, second) == ("| 2.14.1 | 3.8.0 | 5 of 5 |  |", "| 2.15.0 | 3.9.0 |  | 272 of 273 |")
    assert (empty, last) == ("- An empty cell was not tried.", "")
    assert targets.FEWER not in targets.versions("en")
    versions.save([versions.Tried("2.14.1", "3.8.0", "90", 271, 0, 0)])
    assert targets.FEWER in targets.versions("en")


@pytest.mark.parametrize(
    ("why", "chinese"),
    [
        (versions.reason(CAPPED), "本机的 pip 限定为 torch<=2.14.1"),
        (versions.reason(ABSENT), "pip 找不到适合本机的 wheel"),
        (versions.reason(""), "pip 没有给出原因"),
        (targets.NO_ROOM.format(needed=7, free="1.0"), "一个环境占 7 GiB，缓存所在的磁盘只剩 1.0 GiB"),
        ("ERROR: gone: ...", "ERROR: gone: ..."),
    ],
)
def test_the_chinese_page_says_why_in_chinese(why, chinese, table):
    versions.save([versions.not_tried(("2.15.0", "3.9.0"), why)])
    assert targets.versions("zh").endswith(f"\n- 未试 torch 2.15.0 与 Triton 3.9.0：{chinese}。\n")
    assert targets.versions("en").endswith(f" was not tried: {why}.\n")


def test_the_command_line_knows_its_pairs_and_targets():
    for words in (["--torch", "2.9.1"], ["--torch", "2.10.0", "--triton", "3.9.0"], ["--target", "75"]):
        ended = CliRunner().invoke(command_line.app, ["versions", *words])
        assert ended.exit_code == 2
        assert "2.14.1 with Triton 3.9.0" in re.sub(r"\s*│?\s*\n\s*│?\s*", " ", ended.output)


def test_without_a_compiler_nothing_is_tried(monkeypatch):
    """On macOS and Windows a row would count each kernel as a failure."""
    monkeypatch.setattr(device, "HAS_COMPILER", False)
    monkeypatch.setattr(versions, "tried", lambda *asked: pytest.fail("asked of a compiler that is not there"))
    ended = CliRunner().invoke(command_line.app, ["versions", LESSON])
    assert ended.exit_code == 1
    assert "not compiled here" in " ".join(ended.output.split())


def test_the_newest_triton_is_tried_wherever_its_pytorch_is_not():
    newest = max((triton for _, triton in versions.PAIRS), key=Version)
    assert sum(triton == newest for _, triton in versions.PAIRS) == 2
    assert {*versions.OWN.items()} < {*versions.PAIRS}
    assert versions.OWN["2.14.1"] == "3.8.0"


def test_bounds_are_what_was_tried():
    """pyproject.toml admits each pair that passes, and no minor version beyond the newest of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {need.name: need.specifier for need in map(Requirement, project["dependencies"])}
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    rows = [row for row in read_csv(versions.TABLE) if row["target"] != targets.NOT_TRIED]
    wrong = {(row["torch"], row["triton"]) for row in rows if int(row["failed"])}
    right = {(row["torch"], row["triton"]) for row in rows} - wrong
    assert (pinned["torch"], pinned["triton"]) in right
    for at, name in enumerate(("torch", "triton")):
        passed = [pair[at] for pair in right]
        newest = Version(max(passed, key=Version))
        for version in passed:
            assert needed[name].contains(version), f"{name} {version}"
        assert not needed[name].contains(f"{newest.major}.{newest.minor + 1}.0"), name
