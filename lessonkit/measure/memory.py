"""Peak memory of a call: what the GPU's allocator counted, or without a GPU what operators returned and kept alive."""

import weakref
from collections.abc import Callable
from typing import Any

from lessonkit.base.device import DEVICE

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Alive(TorchDispatchMode):
    """Bytes of the tensors that operators return, as long as anything holds them; their own scratch is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.holders = dict[int, int]()  # storage -> tensors that hold it
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            storage = t.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in given and key not in self.holders:
                continue  # a view of what was there before
            if key not in self.holders:
                self.now += size
                self.peak = max(self.peak, self.now)
            self.holders[key] = self.holders.get(key, 0) + 1
            weakref.finalize(t, self._release, key, size)
        return out

    def _release(self, key: int, size: int) -> None:
        self.holders[key] -= 1
        if not self.holders[key]:
            del self.holders[key]
            self.now -= size


def peak_bytes(call: Callable[[], object]) -> int:
    """Bytes alive at the worst moment of a call, beyond those alive before it."""
    if DEVICE.type != "cuda":
        alive = _Alive()
        with alive:
            call()
        return alive.peak
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)
