"""Warp-specialized kernels on a CPU: mbarriers, copies by TMA, and partitions that run in any order.

A CPU model writes a partition as a generator that yields (barrier, parity) wherever the kernel waits. Any partition
that need not wait may run next, and a copy may arrive at any time; until then its place in shared memory holds NaN.
The order is random and the same each time. A deadlock raises Fault("barrier").
"""

import math
import random
from collections.abc import Generator, Sequence

from lessonkit.base.errors import Fault

import torch


class Barrier:
    """An mbarrier that `count` arrivals complete. Its phase flips each time that it completes."""

    def __init__(self, count: int) -> None:
        self.count, self.missing, self.phase = count, count, 0

    def arrive(self, expect: int = 0) -> None:
        """One arrival. expect: copies that will arrive too, where the kernel counts bytes."""
        self.missing += expect - 1
        if self.missing == 0:
            self.missing, self.phase = self.count, self.phase ^ 1

    def over(self, parity: int) -> bool:
        """Whether the phase of this parity is complete."""
        return self.phase != parity


Wait = tuple[Barrier, int]  # a barrier, and the parity of the phase that has to be complete
Copy = tuple[torch.Tensor, torch.Tensor, Barrier]  # where to, what, and the barrier that hears of it
FREE: Wait = (Barrier(1), 1)  # a wait that is over at once, though another partition may run before


def ask_for(copies: list[Copy], full: Barrier, *boxes: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Start a copy of each box, (where to, what), and arrive at `full`, which completes when all have come."""
    full.arrive(expect=len(boxes))
    for smem, box in boxes:
        smem.fill_(math.nan)
        copies.append((smem, box, full))


def in_any_order(partitions: Sequence[Generator[Wait]], copies: list[Copy]) -> None:
    """Run partitions and copies, one wait at a time, until all have ended. Raises Fault if all wait for each other."""
    chance = random.Random(0)
    waiting = {p: next(p, None) for p in partitions}
    while copies or any(waiting.values()):
        ready = [p for p, wait in waiting.items() if wait and wait[0].over(wait[1])]
        if not ready and not copies:
            raise Fault("barrier", "the partitions wait for each other, for ever")
        i = chance.randrange(len(ready) + len(copies))
        if i < len(ready):
            waiting[ready[i]] = next(ready[i], None)
        else:
            smem, box, full = copies.pop(i - len(ready))
            smem.copy_(box)
            full.arrive()
