"""What the arguments in sanitize.toml say of PTX and machine code is so: barriers, and how memory is written."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module

from lessonkit import DEVICE
from lessonkit.base.errors import Unsupported
from lessonkit.base.files import ROOT
from lessonkit.cuda import sass
from lessonkit.measure import operator_cases, sanitize
from lessonkit.modes import compiled
from lessonkit.modes.compile_server import call_in_compiler

import pytest
import torch

from tests import ptx_order

WITHOUT_MAILBOX = (
    "day3_matmul_tk.lesson02_matmul_persistent",
    "day3_matmul_tk.lesson09_matmul_hopper",
    "day3_matmul_tk.lesson10_matmul_small_outputs",
    "day3_matmul_tk.lesson11_matmul_fp8_hopper",
    "day3_matmul_tk.lesson12_matmul_fp8_blocks",
)
FORWARD, BACKWARD = "day4_replace_op.lesson08_flash_hopper", "day4_replace_op.lesson09_flash_hopper_backward"
WITH_MAILBOX = (FORWARD, BACKWARD, compiled.COURSE_OPS, f"{compiled.COURSE_OPS}.attention backward")


# ---- In the process that compiles ----------------------------------------------------------------------------------


def kernels(name: str, rungs: list[str]) -> list[tuple[str, str, list[int]]]:
    """Of each kernel with partitions at each timed shape: rung and name, PTX, warps of the partitions.

    name: a lesson, course_ops, or an operator and its direction: then at each case that the sanitizers watch.
    """
    found = []
    with compiled.compiling(90) as made, import_module("course_ops.testing").launchers():
        for rung, launches in _launches(name, rungs):
            for launch in launches:
                made.clear()
                with suppress(Unsupported):  # a rung need not take every timed shape
                    launch()
                for kernel, each in made.items():
                    parts = re.findall(r"partition\d+\(.*\) num_warps\((\d+)\)", each.asm["ttgir"])
                    if parts:
                        own = re.findall(r'"ttg.num-warps" = (\d+)', each.asm["ttgir"])
                        found.append((f"{rung} {kernel}", each.asm["ptx"], list(map(int, own + parts))))
    return found


def _launches(name: str, rungs: list[str]) -> Iterator[tuple[str, list[Callable[[], object]]]]:
    operator, _, direction = name.partition(" ")
    if not direction:
        yield from ((rung, launches) for rung, without, launches in compiled._calls(name, 90, rungs) if not without)
        return
    (lesson,) = (each for _, each in operator_cases.lessons(operator) if each.rungs[0].__name__ == direction)
    for case in operator_cases.chosen(operator, direction, large=False):
        given = lesson.inputs(dtype=getattr(torch, case.dtype), **case.shape)
        yield str(case), [partial(lesson.rungs[0], *given)]


def verdicts(name: str) -> list[tuple[str, int, list[str]]]:
    """Of each kernel: rung and name, how many accesses to a mailbox there are, and what breaks a rule."""
    return [
        (kernel, len(ptx_order.mailbox(ptx, warps)), ptx_order.broken(ptx, warps))
        for kernel, ptx, warps in kernels(name, [])
    ]


def of_day3(rung: str) -> list[str]:
    """PTX and machine code of the kernel that makes its descriptors itself."""
    lesson = import_module("day3_matmul_tk.lesson02_matmul_persistent")
    with compiled.compiling(90) as made:
        getattr(lesson, rung)(*(torch.empty(1024, 1024, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)))
        kernel = made["tma_device_kernel"]
    with sass.as_file(kernel.asm["cubin"]) as path:
        return [kernel.asm["ptx"], sass.tool("nvdisasm", "-c", path)]


def of_tiles() -> str:
    """PTX of the kernel that writes linear_cross_entropy's logits, here called for matmul."""
    with compiled.compiling(90) as made:
        import_module("course_ops.testing").calls()["matmul M=3200 bfloat16"]()
        return made["tiles_kernel"].asm["ptx"]


def of_tma() -> list[str]:
    """PTX of the kernel whose result matmul_tma copies to rows of 131 elements, in each 16-bit dtype."""
    matmul = import_module("course_ops.kernels.matmul")
    found = []
    for dtype in (torch.float16, torch.bfloat16):
        with compiled.compiling(90) as made:
            matmul.matmul_tma(*(torch.empty(*shape, dtype=dtype, device=DEVICE) for shape in ((129, 65), (65, 131))))
            found.append(made["tma_kernel"].asm["ptx"])
    return found


def of_split() -> str:
    """PTX of the kernel whose warps look twice for the other parts' words."""
    module = import_module("course_ops.kernels.rms_norm")
    x, w = (torch.empty(*shape, dtype=torch.bfloat16, device=DEVICE) for shape in ((4, 131072), (131072,)))
    with compiled.compiling(90) as made:
        module.rms_norm_split(x, w, 1e-5)
        return made["rms_norm_split_kernel"].asm["ptx"]


# ---- The tests -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scheduler() -> tuple[str, list[int]]:
    """PTX and warps of the rung that deals tiles out through a mailbox."""
    (_, ptx, warps), *_ = call_in_compiler("tests.test_ptx_order", "kernels", FORWARD, ["persistent_scheduler"])
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
@pytest.mark.parametrize("name", [*WITHOUT_MAILBOX, *WITH_MAILBOX])
def test_no_kernel_breaks_a_rule(name):
    found = call_in_compiler("tests.test_ptx_order", "verdicts", name)
    assert found
    assert not [each for each in found if each[2]]
    mailboxes = {kernel.split()[-1]: count for kernel, count, _ in found if count}
    assert set(mailboxes.values()) <= {6, 8}, "two consumers or three, one producer"
    assert bool(mailboxes) == (name in WITH_MAILBOX)


@pytest.mark.parametrize("rung", ["tma_device", "warp_specialized"])
def test_the_only_read_of_a_descriptors_memory_is_dropped(rung):
    """initcheck reports it."""
    ptx, code = call_in_compiler("tests.test_ptx_order", "of_day3", rung)
    assert "tensormap.cp_fenceproxy" in ptx
    assert "ld.global" not in ptx
    exchanged = re.findall(r"\bATOMG?\S*EXCH\S* \w+, (\w+),", code)
    assert len(exchanged) == ptx.count("tensormap.cp_fenceproxy")
    assert set(exchanged) == {"RZ"}
    assert not re.search(r"\bLDG?\.E|\bLD\.E", code)


def test_logits_leave_by_tma_alone():
    """initcheck takes them for memory that nothing has written."""
    ptx = call_in_compiler("tests.test_ptx_order", "of_tiles")
    assert re.search(r"cp\.async\.bulk\.tensor\S*\.global\.shared", ptx)
    assert "st.global" not in ptx


def test_what_is_copied_to_rows_of_any_length_left_by_tma_alone():
    """initcheck reports the copy."""
    for ptx in call_in_compiler("tests.test_ptx_order", "of_tma"):
        assert re.search(r"cp\.async\.bulk\.tensor\S*\.global\.shared", ptx)
        assert "st.global" not in ptx


def test_every_argued_race_is_of_a_kernel_that_is_read_here():
    """An argument that names barriers is true as long as they are there."""
    texts = [path.read_text() for name in (*WITHOUT_MAILBOX, FORWARD, BACKWARD) for path in _files(name)]
    texts += [path.read_text() for path in (ROOT / "course_ops/kernels").glob("*.py")]
    argued = [kernel for entry in sanitize.argued() if entry.tool == "racecheck" for kernel in entry.kernels]
    assert argued
    for kernel in argued:
        if kernel.startswith("nvjet_"):  # cuBLAS's
            continue
        assert any(f"def {kernel}(" in text for text in texts), kernel


def _files(lesson: str) -> list:
    day, name = lesson.split(".")
    file = ROOT / day / f"{name}.py"
    folders = set(re.findall(rf"{day}\.(\w+)\.", file.read_text()))
    return [file, *(path for folder in folders for path in (ROOT / day / folder).glob("*.py"))]


def test_the_words_of_other_parts_are_read_again_behind_a_barrier():
    """racecheck reports the flags that say whether all words are there: two warps store a row's, at different times."""
    ptx = call_in_compiler("tests.test_ptx_order", "of_split")
    seen = re.findall(r"^\s*(?:@!?%p\d+ )?(bar\.sync|ld\.volatile\.global|(?:st|ld)\.shared|bra)", ptx, re.MULTILINE)
    assert seen.count("ld.volatile.global") == 3, "the first look, in the loop, and behind it"
    again = len(seen) - 1 - seen[::-1].index("ld.volatile.global")
    assert seen[again - 2 : again + 2] == ["bra", "bar.sync", "ld.volatile.global", "st.shared"]
