"""The PTX of kernels with gl.warp_specialize has the barriers that the arguments in sanitize.toml name."""

import re
from contextlib import suppress

from lessonkit.base.errors import Unsupported
from lessonkit.base.files import ROOT
from lessonkit.measure import sanitize
from lessonkit.modes import compiled
from lessonkit.modes.compile_server import call_in_compiler

import pytest

from tests import ptx_order

LESSONS = (
    "day3_matmul_tk.lesson09_matmul_hopper",
    "day3_matmul_tk.lesson10_matmul_small_outputs",
    "day3_matmul_tk.lesson11_matmul_fp8_hopper",
    "day3_matmul_tk.lesson12_matmul_fp8_blocks",
    "day4_replace_op.lesson08_flash_hopper",
    "day4_replace_op.lesson09_flash_hopper_backward",
)


# ---- In the process that compiles ----------------------------------------------------------------------------------


def kernels(name: str, rungs: list[str]) -> list[tuple[str, str, list[int]]]:
    """Of each kernel with partitions at each timed shape: rung and name, PTX, warps of the partitions."""
    found = []
    with compiled.compiling(90) as made:
        for rung, without, launches in compiled._calls(name, 90, rungs):
            for launch in () if without else launches:
                made.clear()
                with suppress(Unsupported):  # a rung need not take every timed shape
                    launch()
                for kernel, each in made.items():
                    parts = re.findall(r"partition\d+\(.*\) num_warps\((\d+)\)", each.asm["ttgir"])
                    if parts:
                        own = re.findall(r'"ttg.num-warps" = (\d+)', each.asm["ttgir"])
                        found.append((f"{rung} {kernel}", each.asm["ptx"], list(map(int, own + parts))))
    return found


def verdicts(name: str) -> list[tuple[str, int, list[str]]]:
    """Of each kernel: rung and name, how many accesses to a mailbox there are, and what breaks a rule."""
    return [
        (kernel, len(ptx_order.mailbox(ptx, warps)), ptx_order.broken(ptx, warps))
        for kernel, ptx, warps in kernels(name, [])
    ]


# ---- The tests -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scheduler() -> tuple[str, list[int]]:
    """PTX and warps of the rung that deals tiles out through a mailbox."""
    (_, ptx, warps), *_ = call_in_compiler("tests.test_ptx_order", "kernels", LESSONS[4], ["persistent_scheduler"])
    return ptx, warps


def test_the_mailbox_is_read_and_written_between_barriers(scheduler):
    """Two consumers read it at two places each; the producer warp writes it at two."""
    assert ptx_order.broken(*scheduler) == []
    assert len(ptx_order.mailbox(*scheduler)) == 6


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (r"bar\.sync\s+\d+, 128;", "mbarrier.arrive"),
        (r"bar\.warp\.sync\s+-1;", "mbarrier.arrive"),
        (r"mbarrier\.try_wait", "the mailbox is read without a wait"),
    ],
)
def test_a_kernel_without_its_barriers_is_noticed(scheduler, words, says):
    ptx, warps = scheduler
    assert any(says in line for line in ptx_order.broken(re.sub(words, "//", ptx), warps))


def test_each_barrier_of_all_warps_is_needed(scheduler):
    ptx, warps = scheduler
    places = [found.start() for found in re.finditer(r"barrier\.sync\s+1;", ptx)]
    assert len(places) > 8
    for at in places:
        assert ptx_order.broken(f"{ptx[:at]}//{ptx[at:]}", warps), ptx[:at].count("\n")


@pytest.mark.night
@pytest.mark.kept("course_ops/*.py", "course_ops/kernels/*.py")
@pytest.mark.parametrize("name", [*LESSONS, compiled.COURSE_OPS])
def test_no_kernel_breaks_a_rule(name):
    found = call_in_compiler("tests.test_ptx_order", "verdicts", name)
    assert found
    assert not [each for each in found if each[2]]
    mailboxes = {kernel.split()[-1]: count for kernel, count, _ in found if count}
    assert set(mailboxes.values()) <= {6, 8}, "two consumers or three, one producer"
    assert bool(mailboxes) == (name in (*LESSONS[4:], compiled.COURSE_OPS))


def test_every_argued_race_is_of_a_kernel_that_is_read_here():
    """An argument that names barriers is true as long as they are there."""
    texts = [path.read_text() for name in LESSONS for path in _files(name)]
    argued = [kernel for entry in sanitize.argued() if entry.tool == "racecheck" for kernel in entry.kernels]
    assert argued
    for kernel in argued:
        assert any(f"def {kernel}(" in text for text in texts), kernel


def _files(lesson: str) -> list:
    day, name = lesson.split(".")
    file = ROOT / day / f"{name}.py"
    folders = set(re.findall(rf"{day}\.(\w+)\.", file.read_text()))
    return [file, *(path for folder in folders for path in (ROOT / day / folder).glob("*.py"))]
