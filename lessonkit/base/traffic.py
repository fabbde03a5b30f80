"""What kernels ask memory for while they are watched: the interpreter and the emulator of CUDA both add to it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Traffic:
    """Bytes that the kernels asked memory for while being watched. A GPU's caches may serve some of them."""

    read: int = 0
    written: int = 0
    launches: list[str] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)  # CUDA C++: the emulator's counters, see counters


watching: list[Traffic] = []


def count(kernels: Sequence[dict[str, Any]]) -> None:
    """Add what the CUDA emulator counted to the traffic that is being watched, if any is."""
    for traffic in watching[-1:]:
        for k in kernels:
            traffic.read += k["global_load_bytes"]
            traffic.written += k["global_store_bytes"] + k["global_atomic_bytes"]
            traffic.launches += [k["kernel"]] * k["launches"]
        traffic.kernels += kernels
