"""Day 3, beside its lessons: offsets of a grouped matmul that no host can refuse, the files of the Hopper ladder, and
a mutant of the kernel that `autotuned` launches."""

import ast
import inspect
from pathlib import Path

from lessonkit import Mutant
from lessonkit.base.files import ROOT
from lessonkit.judge import check, verify

import pytest
import torch

from day3_matmul_tk import lesson01_matmul, lesson08_grouped_matmul, lesson09_matmul_hopper
from problems import grouped_matmul

pytestmark = pytest.mark.kept

# Not in the lesson: day 5's sweep of its kernel counts all that the lesson declares, and would have to be timed anew.
AUTOTUNED = Mutant("tiles transposed", "grouped_kernel", "tile_m, tile_n, M", "tile_n, tile_m, M", "autotuned", "nan")


def test_a_mutant_of_the_autotuned_kernel_is_rejected():
    assert verify.mutant(lesson01_matmul.__name__, lesson01_matmul.LESSON, AUTOTUNED)


@pytest.mark.parametrize("rung", lesson08_grouped_matmul.LESSON.rungs, ids=lambda rung: rung.__name__)
@pytest.mark.parametrize("ends", [[-9, 20, 60, 90], [5, 30, 10, 40], [40, 0, 0, 0], [50, 60, 70, 80]], ids=str)
def test_wrong_offsets_of_groups_lead_nowhere_else(rung, ends):
    """The host does not know the offsets, so it cannot refuse them. The result is undefined; no access is outside."""
    x, w, _ = grouped_matmul.inputs(40, 3, 24, 16)
    y, _ = check.answer(rung, (x, w, torch.tensor(ends, dtype=torch.int32, device=x.device)))
    assert y.shape == (40, 16)


def test_each_rung_of_the_hopper_ladder_has_mutants_of_its_own():
    """A CPU model's mutants say nothing of a kernel. Each rung has one that hangs or reads too early."""
    rungs = {rung.__name__ for rung in lesson09_matmul_hopper.LESSON.rungs}
    wrong = [mutant for mutant in lesson09_matmul_hopper.LESSON.wrong if mutant.rung in rungs]
    assert {rung: sum(m.rung == rung for m in wrong) >= 3 for rung in rungs} == dict.fromkeys(rungs, True)
    assert {m.rung for m in wrong if {"hang", "nan"} & set(m.caught_by.split(" or "))} == rungs


def test_rungs_of_the_hopper_ladder_share_no_main_loop():
    """Each file is complete: it imports the vocabulary, its problem and the kit, and no other file of its folder."""
    folder = ROOT / "day3_matmul_tk" / "matmul_hopper"
    for rung in lesson09_matmul_hopper.LESSON.rungs:
        path = Path(inspect.getfile(rung))
        assert path.parent == folder
        allowed = {"lessonkit", "math", "triton", "course_ops", "problems"}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                name = str(node.module) if isinstance(node, ast.ImportFrom) else node.names[0].name
                assert name.partition(".")[0] in allowed, f"{path.name} imports {name}"
