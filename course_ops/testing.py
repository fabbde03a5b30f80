"""For tests without a GPU: run the operators' kernels in Triton's interpreter instead of computing with PyTorch."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from course_ops import _common


def interpreted() -> AbstractContextManager[None]:
    """Inside `with interpreted():` CPU tensors are computed by the kernels, one program after another, slowly.

    Raises RuntimeError unless TRITON_INTERPRET=1 was set before Triton was imported.
    """
    if not _common.triton_interprets():
        raise RuntimeError("Triton decides at import: set TRITON_INTERPRET=1 in the environment, then start Python")
    return _common.interpreting()


@contextmanager
def kernels() -> Iterator[None]:
    """Inside `with kernels():`, or below `@kernels()`, kernels run: on a GPU, and interpreted where there is none.

    Raises RuntimeError without a GPU unless TRITON_INTERPRET=1 was set before Triton was imported.
    """
    if torch.cuda.is_available() and not _common.triton_interprets():
        yield
    else:
        with interpreted():
            yield
