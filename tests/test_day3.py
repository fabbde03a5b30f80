"""Day 3, beside its lessons: what a grouped matmul does with offsets that no host can refuse."""

from lessonkit.judge import check

import pytest
import torch

from day3_matmul_tk import lesson06_grouped_matmul
from problems import grouped_matmul

pytestmark = pytest.mark.kept


@pytest.mark.parametrize("rung", lesson06_grouped_matmul.LESSON.rungs, ids=lambda rung: rung.__name__)
@pytest.mark.parametrize("ends", [[-9, 20, 60, 90], [5, 30, 10, 40], [40, 0, 0, 0], [50, 60, 70, 80]], ids=str)
def test_wrong_offsets_of_groups_lead_nowhere_else(rung, ends):
    """The host does not know the offsets, so it cannot refuse them. The result is undefined; no access is outside."""
    x, w, _ = grouped_matmul.inputs(40, 3, 24, 16)
    y, _ = check.answer(rung, (x, w, torch.tensor(ends, dtype=torch.int32, device=x.device)))
    assert y.shape == (40, 16)
