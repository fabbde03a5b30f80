"""Strides in your head
====================
A tensor is a storage, an offset and a stride for each dimension: element [i, j] lies at offset + i * s0 + j * s1. The
operations transpose, slicing, expand and view change those numbers and move nothing. contiguous() copies everything, if
it must.

x = torch.empty(1024, 768) in float32, row-major. Answer without running anything; PyTorch checks each answer.
"""

# TODO(1): the strides, in elements, of x.T[::2], as a tuple.
# stub: STRIDES_T = None
STRIDES_T = (2, 768)
# END(1)

# TODO(2): at which element of the storage does x[3:, 5:] begin, and its transpose x[3:, 5:].T?
# stub: OFFSET, OFFSET_T = None, None
OFFSET, OFFSET_T = 3 * 768 + 5, 3 * 768 + 5
# END(2)

# TODO(3): bytes of new memory that x[:, :1].expand(1024, 768) takes, and bytes that .contiguous() of it then writes.
# stub: BYTES_EXPAND, BYTES_CONTIGUOUS = None, None
BYTES_EXPAND, BYTES_CONTIGUOUS = 0, 1024 * 768 * 4
# END(3)

# TODO(4): the set of those that copy: 1 x.T.reshape(-1), 2 x[:, ::2].reshape(1024, 2, 192), 3 x[::2].reshape(-1).
# stub: COPIES = None
COPIES = {1, 3}
# END(4)


# The learner's file ends here.
from lessonkit.exercise import Exercise, Wrong

import torch

X = torch.empty(1024, 768)


def transpose():
    """x.T exchanges the strides; a step of 2 doubles the one of its dimension."""
    assert X.T[::2].stride() == STRIDES_T, f"{STRIDES_T} are not the strides of x.T[::2]"


def offsets():
    """A slice moves the beginning by start * stride; a transpose moves nothing."""
    assert X[3:, 5:].storage_offset() == OFFSET, (
        f"{OFFSET} is not where x[3:, 5:] begins: row 3 begins after three whole rows"
    )
    assert X[3:, 5:].T.storage_offset() == OFFSET_T, f"{OFFSET_T} is not where its transpose begins"


def expand():
    """expand is a stride of 0, so many indices are one element; contiguous() writes each of them out."""
    wide = X[:, :1].expand(1024, 768)
    assert wide.untyped_storage().data_ptr() == X.untyped_storage().data_ptr()
    assert BYTES_EXPAND == 0, f"expand takes no new memory, you say {BYTES_EXPAND}"
    assert wide.contiguous().nbytes == BYTES_CONTIGUOUS, f"{BYTES_CONTIGUOUS} is not what contiguous() writes"


def reshapes():
    """reshape is a view if one stride for each new dimension can reach every element."""
    made = (X.T.reshape(-1), X[:, ::2].reshape(1024, 2, 192), X[::2].reshape(-1))
    copies = {i for i, t in enumerate(made, 1) if t.untyped_storage().data_ptr() != X.untyped_storage().data_ptr()}
    assert isinstance(COPIES, set), f"a set of numbers, got {COPIES!r}"
    wrong = sorted(COPIES ^ copies)
    assert not wrong, f"number {wrong[0]} is wrong: can one stride for each new dimension reach every element?"


EXERCISE = Exercise(
    claims=(transpose, offsets, expand, reshapes),
    hints=(
        "Write the address of [i, j] as offset + i * s0 + j * s1 before and after each operation.",
        "x has strides (768, 1). A slice start:stop:step adds start * stride to the offset and multiplies the stride "
        "by step. A dimension that is expanded has stride 0.",
        "Splitting a dimension of stride s and size ab into (a, b) gives strides (b s, s): always a view. Merging two "
        "of strides (p, q) and sizes (a, b) is one only if p = b q.",
    ),
    wrong=(
        Wrong("the transpose's strides are not exchanged", "(2, 768)", "(1536, 1)", "transpose"),
        Wrong("the step is on the wrong dimension", "(2, 768)", "(1, 1536)", "transpose"),
        Wrong(
            "rows are counted by the number of rows", "3 * 768 + 5, 3 * 768 + 5", "3 * 1024 + 5, 3 * 768 + 5", "offsets"
        ),
        Wrong(
            "the transpose exchanges the offsets too", "3 * 768 + 5, 3 * 768 + 5", "3 * 768 + 5, 5 * 768 + 3", "offsets"
        ),
        Wrong("expand is thought to copy", "0, 1024", "1024 * 768 * 4, 1024", "expand"),
        Wrong("elements instead of bytes", "0, 1024 * 768 * 4", "0, 1024 * 768", "expand"),
        Wrong("a split needs no copy", "{1, 3}", "{1, 2, 3}", "reshapes"),
        Wrong("every second row cannot be merged", "{1, 3}", "{1}", "reshapes"),
    ),
)
