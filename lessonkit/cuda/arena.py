"""Where the tensors of an emulated launch lie: far apart, and at the same distances each time.

On the heap a tensor may end where another one begins. An access past its end is then no fault at all, or one beside the
other tensor, as it happens; on another day it is found. So a launch gets copies in an arena of their own.
"""

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

GUARD = 2**20  # bytes between two tensors: the emulator looks as far for the tensor that a wrong address is nearest to
ALIGNED = 512  # bytes, as the GPU's allocator aligns storages


def raw_argument(value: Any) -> Any:
    """What a launcher takes: a tensor's address, 0 for None, any other value as it is."""
    if value is None:
        return 0
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@contextmanager
def apart(args: Sequence[Any]) -> Iterator[list[Any]]:
    """The raw arguments; of CPU tensors, addresses of copies. What a kernel wrote is copied back at the end.

    Tensors that overlap stay together. A copy is as far from a multiple of 512 bytes as the tensor in its storage.
    """
    spans = []
    for nth, tensor in enumerate(args):
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            low = tensor.data_ptr()
            spans.append((low, low + span(tensor), low - tensor.untyped_storage().data_ptr(), nth))
    merged: list[tuple[int, int, int, int]] = []  # first byte, end, offset in the storage, number of the argument
    for low, high, offset, nth in sorted(spans):
        if merged and low < merged[-1][1]:
            first, end, offset, other = merged.pop()
            low, high, nth = first, max(end, high), min(other, nth)
        merged.append((low, high, offset, nth))
    arena = mmap.mmap(-1, GUARD + sum(high - low + GUARD + 2 * ALIGNED for low, high, _, _ in merged))
    free = ctypes.addressof(ctypes.c_char.from_buffer(arena)) + GUARD
    copies = []
    for low, high, offset, _ in sorted(merged, key=lambda part: part[3]):  # not in the heap's order either
        place = -(-free // ALIGNED) * ALIGNED + offset % ALIGNED
        ctypes.memmove(place, low, high - low)
        copies.append((low, high, place))
        free = place + high - low + GUARD

    def moved(value: Any) -> Any:
        raw = raw_argument(value)
        if isinstance(value, torch.Tensor):
            raw = next((place + raw - low for low, high, place in copies if low <= raw < high), raw)
        return raw

    try:
        yield [moved(value) for value in args]
    finally:
        for low, high, place in copies:
            ctypes.memmove(low, place, high - low)
