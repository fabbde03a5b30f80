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
