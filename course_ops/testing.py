"""For tests without a GPU: run the operators' kernels in Triton's interpreter instead of computing with PyTorch."""

from contextlib import AbstractContextManager

from course_ops import _common


def interpreted() -> AbstractContextManager[None]:
    """Inside `with interpreted():` CPU tensors are computed by the kernels, one program after another, slowly.

    Raises RuntimeError unless TRITON_INTERPRET=1 was set before Triton was imported.
    """
    if not _common.triton_interprets():
        raise RuntimeError("Triton decides at import: set TRITON_INTERPRET=1 in the environment, then start Python")
    return _common.interpreting()
