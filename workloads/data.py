"""Training data that is at hand: handwritten digits, which come with scikit-learn."""

from typing import NamedTuple

import torch
from torch import Tensor


class Data(NamedTuple):
    """Images to learn from, and others to be judged by."""

    train_x: Tensor  # [N, C, H, W] fp32 in 0..1
    train_y: Tensor  # [N] int64, classes
    test_x: Tensor
    test_y: Tensor


def digits() -> Data:
    """1,437 handwritten digits of 8 x 8 pixels, and 360 for the test; on the CPU, in the same order every time."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x, y = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(raw.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    learn, test = order[360:], order[:360]
    return Data(x[learn], y[learn], x[test], y[test])
