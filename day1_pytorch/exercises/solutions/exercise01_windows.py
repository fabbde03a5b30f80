"""Exercise 1: every window of a signal, without a copy
====================================================
[n] -> [count, width]: row i is x[i * step : i * step + width]. Copied, 2^20 elements in windows of 256 at step 1 are
256 times as many bytes. Written as strides (lesson02_tensors), they are none: two numbers say where element [i, j] is.

Predict: the strides of the answer, and how often x[0] and an element in the middle are seen (their gradients).
Run it:    python day1_pytorch/exercises/exercise01_windows.py
Hints:     in the day's README. A solution: solutions/exercise01_windows.py
"""

from lessonkit import Steps, show

import torch


def windows(x, width, step):
    """[n] -> [(n - width) // step + 1, width], a view of x, which may itself be strided."""
    # Yours:
    count = (x.numel() - width) // step + 1
    stride = x.stride(0)
    return x.as_strided((count, width), (step * stride, stride), x.storage_offset())
    # End of yours.


def shape_and_values():
    """Row i holds `width` elements of x, from i * step on; what is left over at the end is dropped."""
    for n, width, step in ((10, 3, 1), (11, 4, 3), (7, 7, 2), (1, 1, 1), (101, 10, 10)):
        x = torch.randn(n)
        got = windows(x, width, step)
        rows = [x[i : i + width] for i in range(0, n - width + 1, step)]
        assert got.shape == (len(rows), width), f"n={n} width={width} step={step}: shape {tuple(got.shape)}"
        assert torch.equal(got, torch.stack(rows)), f"n={n} width={width} step={step}: wrong values"


def moves_no_bytes():
    """The answer lives in x's own storage, also when x is every third element of something larger."""
    for x in (torch.randn(100), torch.randn(300)[::3], torch.randn(400)[100:]):
        got = windows(x, 5, 2)
        assert torch.equal(got[7], x[14:19]), f"wrong for an x with stride {x.stride(0)}, offset {x.storage_offset()}"
        assert got.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), "this is a copy"


def gradient_counts_the_windows():
    """The gradient of the sum counts the windows that see an element: overlaps add up."""
    x = torch.zeros(8, requires_grad=True)
    windows(x, 3, 1).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 2, 3, 3, 3, 3, 2, 1]


EXERCISE = Steps(steps=(shape_and_values, moves_no_bytes, gradient_counts_the_windows))

if __name__ == "__main__":
    show.steps("__main__", EXERCISE)
