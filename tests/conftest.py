"""One pytest suite over every lesson: what to test is read off the lessons. Here: tiers, kept verdicts, order, turns.

pytest            the tier of each push; what has passed before with the same code and tools is taken, not run again
pytest --all      each night's too, and nothing is taken
pytest --release  also what a release needs: rows of today's kernels, whole weeks, translations

Where a test stands; the first line of each file says what it holds (tests/test_repo.py compares this list):

lessons         lessons day* flash_hopper* last_rungs streams trace minutes glossary paths quiz pictures prose
exercises       exercise* readers_answers evidence
one operator    course_ops_* attention_* norm_backward_hopper matmul_plan found_on_a_gpu
all operators   kernels_of_operators mutants_of_operators operator_cases fuzz* operators dependents
machine code    wgmma ptx_order unset_registers targets launches fingerprint libtriton
modes           interpreter gluon emulator arena cuda builds cpp_text
the judge       check lessonkit verdicts gpu_mutants beside sanitize ncu yardstick
rows and pages  rows peers renew pages final_report shipped catalogues browser web other_words
commands        command_line terminal course course_run doctor new versions lock
the repository  repo rooms shared_files
"""

import fcntl
import os
import time
from collections import Counter
from contextlib import ExitStack
from functools import cache

# Each worker has one core's worth of work; torch's own threads would only fight over it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["COURSE_LANG"] = "en"  # what commands say is compared with English
os.environ.pop("COLUMNS", None)  # what tables say is compared where nothing says how wide they may be
os.environ.pop("FORCE_COLOR", None)  # and as plain text: Typer and Rich colour it where one of these three is set
os.environ.pop("PY_COLORS", None)
os.environ.pop("GITHUB_ACTIONS", None)

from lessonkit import device
from lessonkit.base.files import ROOT
from lessonkit.cuda.extension import Extension
from lessonkit.exercise.source import Source
from lessonkit.judge import verdicts
from lessonkit.judge.verify import Question

import pytest
import torch

TIERS = ("push", "night", "release")
TAKEN = "taken"
READ_BY_FIXTURES = {}  # the beginning of tests' ids -> files


def pytest_addoption(parser):
    group = parser.getgroup("course")
    group.addoption("--all", action="store_true", help="each night's tier: all but a release's, no kept verdict")
    group.addoption("--release", action="store_true", help="a release's tier: all there is, no kept verdict")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """`-n auto`: a worker a core, and on a GPU no more than have 4 GiB of it each."""
    cores = os.cpu_count() or 1
    return min(cores, max(1, torch.cuda.mem_get_info()[0] // 2**32)) if device.HAS_GPU else cores


def tier(item):
    return next((name for name in reversed(TIERS) if item.get_closest_marker(name)), TIERS[0])


def lesson_of(item):
    """The lesson, exercise or program that a test is about; empty for the others."""
    for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
        if isinstance(value, Question):
            return value.lesson
        if isinstance(value, Source):
            return value.name
        if isinstance(value, Extension):
            return f"cuda_src.{value.source.stem}"
    return ""


def pytest_collection_modifyitems(config, items):
    """Leave other tiers out; put together what is of one lesson, so that a worker meets its builds and answers again;
    then what has to be alone; look up what has passed before."""
    last = TIERS.index("release" if config.option.release else "night" if config.option.all else "push")
    left = [item for item in items if TIERS.index(tier(item)) > last]
    chosen = [item for item in items if TIERS.index(tier(item)) <= last]
    chosen.sort(key=lambda item: (bool(item.get_closest_marker("alone")), lesson_of(item)))
    items[:] = chosen
    if left:
        config.hook.pytest_deselected(items=left)
    for nth, item in enumerate([] if device.HAS_GPU else chosen):
        if files := depends_on(item):
            item.verdict = verdicts.key(item.nodeid, files)
            if not last and verdicts.find(item.verdict):
                items[nth] = Taken.of(item)


class Taken(pytest.Item):
    """In place of a test that has passed before: it needs no fixture."""

    @classmethod
    def of(cls, item):
        taken = cls.from_parent(item.parent, name=item.name)
        taken.own_markers = item.own_markers
        taken.keywords.update(item.keywords)
        taken.user_properties.append((TAKEN, True))
        return taken

    def runtest(self):
        pass


def depends_on(item):
    """The files whose code decides a test: its own, those it names in `kept`, and its lesson's; without `kept` all."""
    marker = item.get_closest_marker("kept")
    if marker is None:
        return verdicts.everything()
    files = [item.path, *(path for pattern in marker.args for path in matching(pattern))]
    for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
        if isinstance(value, Question):
            if not value.kept:
                return verdicts.everything()
            files.append(ROOT / f"{value.lesson.replace('.', '/')}.py")
        elif isinstance(value, Source):
            files += [p for p in (value.path, value.path.with_suffix(".cu")) if p.exists()]
        elif isinstance(value, Extension):
            files.append(value.source)
    if any(path.name == "report.py" for path in verdicts.closure(frozenset(files[1:]))):  # it reads rows, once
        files += matching("reports/*/*.csv")
    return files


@pytest.fixture(autouse=True)
def no_other_program(monkeypatch):
    """With a GPU some commands start anew without it, in place of this process, which has other tests to run."""
    if device.HAS_GPU:
        monkeypatch.setattr(os, "execve", lambda *_: pytest.skip("with a GPU this command starts anew without it"))


@cache
def matching(pattern):
    """Files of the course: no bytecode and no environment that lies beside it, which change while tests run."""
    ours = verdicts.everything()
    found = (path for path in ROOT.glob(pattern) if path.is_file() and "__pycache__" not in path.parts)
    return sorted(path for path in found if path in ours or not ours)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A test that has to be alone waits for the others, which wait for it: a lock that they share and it has.

    Of many workers one comes to such tests early. It lets the others pass by for some time, since all would wait.
    """
    folder = item.config.rootpath / ".pytest_cache"
    folder.mkdir(exist_ok=True)
    alone = bool(item.get_closest_marker("alone"))
    until = time.monotonic() + 4 * max(0, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) - 2)
    with ExitStack() as held:
        door, room = (held.enter_context((folder / f"{name}.lock").open("w")) for name in ("door", "room"))
        mine = False
        while alone and not mine and time.monotonic() < until:
            try:
                fcntl.flock(room, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = True
            except BlockingIOError:
                time.sleep(0.05)
        if not mine:
            fcntl.flock(door, fcntl.LOCK_EX)  # who waits for the room keeps the door, so that nobody passes by
            fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(door, fcntl.LOCK_UN)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """What a fixture reads counts for each test of its file: one of a wider scope is made for the first of them."""
    with verdicts.watching() as read:
        result = yield
    READ_BY_FIXTURES.setdefault(fixturedef.baseid, set()).update(read)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if not hasattr(item, "verdict"):
        return (yield)
    with verdicts.watching() as item.read:
        result = yield
    item.has_passed = True
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """A verdict is kept when the test has put back what it changed, be it os.replace."""
    result = yield
    if getattr(item, "has_passed", False):
        read = item.read.union(*(seen for base, seen in READ_BY_FIXTURES.items() if item.nodeid.startswith(base)))
        read = (path for path in read if path.is_relative_to(verdicts.ROOT))  # a test may have had a root of its own
        verdicts.keep(item.verdict, item.nodeid, read)
    return result


def pytest_report_teststatus(report):
    if report.when == "call" and report.passed and any(name == TAKEN for name, _ in report.user_properties):
        return TAKEN, "", "TAKEN"
    return None


def pytest_terminal_summary(terminalreporter):
    """What ran, what was taken from an earlier run, and what this machine cannot answer, by reason."""
    stats = terminalreporter.stats
    why = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in stats.get("skipped", []))
    for reason, count in why.most_common():
        terminalreporter.write_line(f"left out {count:4}: {reason}")
    ran = sum(len(stats.get(outcome, [])) for outcome in ("passed", "failed", "error"))
    terminalreporter.write_line(f"{ran} ran, {len(stats.get(TAKEN, []))} taken from earlier runs with the same code")
