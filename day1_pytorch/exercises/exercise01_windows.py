"""Every window of a signal, without a copy
========================================
[n] -> [count, width]: row i is x[i * step : i * step + width]. Copying 2^20 elements in windows of 256 at step 1 moves
256 times as many bytes. Strides (lesson02_tensors) move none: two of them give the place of element [i, j].

Predict: the strides of the answer, and how many windows contain x[0] and an element in the middle (their gradients).
"""

import torch


def windows(x: torch.Tensor, width: int, step: int) -> torch.Tensor:
    """[n] -> [(n - width) // step + 1, width], a view of x, which may itself be strided."""
    # TODO(1): how many windows fit, and how far apart do [i, j] and its neighbours lie in x's storage?
    # stub: return x
    count = (x.numel() - width) // step + 1
    stride = x.stride(0)
    return x.as_strided((count, width), (step * stride, stride), x.storage_offset())
    # END(1)


# The learner's file ends here.
from lessonkit.exercise import Exercise, Wrong, same


def shape_and_values():
    """Row i holds `width` elements of x, from i * step on; the elements left over at the end are dropped."""
    for n, width, step in ((10, 3, 1), (11, 4, 3), (7, 7, 2), (1, 1, 1), (101, 10, 10)):
        x = torch.randn(n)
        rows = [x[i : i + width] for i in range(0, n - width + 1, step)]
        same(f"n={n} width={width} step={step}", windows(x, width, step), torch.stack(rows))


def any_stride():
    """x may be every third element of something larger, or its end."""
    for x in (torch.randn(100), torch.randn(300)[::3], torch.randn(400)[100:]):
        what = f"row 7 of an x with stride {x.stride(0)} and offset {x.storage_offset()}, width=5 step=2"
        same(what, windows(x, 5, 2)[7], x[14:19])


def moves_no_bytes():
    """The answer is a view of x's own storage."""
    x = torch.randn(100)
    assert windows(x, 5, 2).untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), "this is a copy"


def gradient_counts_the_windows():
    """The gradient of the sum counts the windows that contain an element: overlaps add up."""
    x = torch.zeros(8, requires_grad=True)
    total = windows(x, 3, 1).sum()
    assert total.requires_grad, "the answer has no history: was it detached?"
    total.backward()
    same("the gradient for n=8 width=3 step=1", x.grad, torch.tensor([1.0, 2, 3, 3, 3, 3, 2, 1]))


EXERCISE = Exercise(
    claims=(shape_and_values, any_stride, moves_no_bytes, gradient_counts_the_windows),
    hints=(
        "Element [i, j] is x[i * step + j]. What do i and j each add to the address?",
        "`torch.as_strided(x, size, stride, storage_offset)` takes those two numbers, counted in the storage: x may "
        "have a stride and an offset of its own. The last window starts at n - width at the latest.",
        "count = (n - width) // step + 1; strides (step * s, s) with s = x.stride(0); offset x.storage_offset().",
    ),
    predicted=(
        "The strides are (step * s, s), where s is the stride of x. x[0] is in 1 window. An element in the "
        "middle is in width / step windows, rounded up or down."
    ),
    wrong=(
        Wrong("one window too few", "numel() - width) // step + 1", "numel() - width) // step", "shape_and_values"),
        Wrong("x's own stride is forgotten", "stride = x.stride(0)", "stride = 1", "any_stride"),
        Wrong("x's own offset is forgotten", "x.storage_offset()", "0", "any_stride"),
        Wrong("the windows are copied", "x.storage_offset())", "x.storage_offset()).clone()", "moves_no_bytes"),
        Wrong("the history is cut", "return x.as", "return x.detach().as", "gradient_counts_the_windows"),
    ),
)
