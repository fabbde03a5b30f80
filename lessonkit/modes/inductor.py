"""torch.compile as a peer, made when it is first called."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def by_inductor(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile(function), but to import Inductor takes seconds, and who only checks a lesson does not call it."""

    @cache
    def compiled() -> Any:
        return torch.compile(function, dynamic=False)

    return lambda *args: compiled()(*args)


def by_search(function: Callable[..., Any]) -> Callable[..., Any]:
    """As by_inductor with mode max-autotune: for each shape Inductor times cuBLAS and its templates and keeps the best.

    Without CUDA graphs, which would copy every argument in each call. Each process searches anew. What another process
    found beside others that used the same GPU is not taken from the disk; the compiled kernels are.
    """

    @cache
    def compiled() -> Any:
        from torch._inductor import list_mode_options

        options = list_mode_options("max-autotune-no-cudagraphs")
        options |= {"autotune_local_cache": False, "fx_graph_cache": False}
        return torch.compile(function, dynamic=False, options=options)

    return lambda *args: compiled()(*args)
