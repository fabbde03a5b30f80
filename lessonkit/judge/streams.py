"""What a program asked of its streams: what a GPU may reorder, whether that is right, and how long it takes.

The emulator does all work at once, in the order of the calls, and logs it: copies, kernels with the addresses that they
touched, events, waits. Three things follow from the log: the order that streams and events promise, the races (pairs of
calls that nothing orders and that touch the same bytes), and the time on a model of a GPU. The model has an engine for
copies in, one for copies out, and SMs that one kernel fills. Each takes what can start first. To free memory is not to
wait, though a driver may.
"""

import ctypes
import json
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from lessonkit.cuda import build
from lessonkit.cuda.extension import _emulator

Range = tuple[int, int]  # addresses: first, behind the last
ENGINES = {"copy in": "in", "copy out": "out", "kernel": "SMs", "memset": "SMs", "copy": "SMs"}


@dataclass(frozen=True)
class Machine:
    """link: bytes a second, each way. kernels: bytes that they write a second. call: seconds of the host for a call.

    Pageable memory is first copied by the host into memory that the engine reaches: half the rate, and the host waits.
    """

    link: float
    kernels: float
    call: float = 0.0

    def seconds(self, call: "Call") -> float:
        if call.what == "kernel":
            return call.bytes / self.kernels
        return call.bytes / self.link * (2 if call.pageable else 1) if call.what in ("copy in", "copy out") else 0.0


@dataclass(frozen=True)
class Call:
    """One call of the host. `name` counts calls of its kind from 0: "copy in 3". bytes: of a kernel, those written."""

    what: str
    name: str
    stream: int
    blocking: bool  # the stream waits for the legacy default stream (0), and that for it
    event: int
    bytes: int
    pageable: bool
    reads: tuple[Range, ...]
    writes: tuple[Range, ...]

    @property
    def is_work(self) -> bool:
        return self.what in ENGINES

    def conflicts(self, other: "Call") -> bool:
        """One of the two writes what the other touches."""
        pairs = ((self.writes, other.reads + other.writes), (self.reads, other.writes))
        return any(a[0] < b[1] and b[0] < a[1] for mine, theirs in pairs for a in mine for b in theirs)


def asked() -> list[Call]:
    """What the last launcher that ran emulated asked."""
    library = _emulator(build.build([build.runtime()])[0])
    library.emu_streams.restype = ctypes.c_char_p
    return calls(json.loads(library.emu_streams()))


def calls(log: list[dict[str, Any]]) -> list[Call]:
    """From the emulator's log. Streams count from 1 in the order in which they were made; 0 is the default stream."""
    seen = Counter[str]()
    made = sorted({0, *(entry["stream"] for entry in log)})
    found = []
    for entry in log:
        about: dict[str, Any] = {key: tuple(map(tuple, entry[key])) for key in ("reads", "writes")}
        about |= {"stream": made.index(entry["stream"]), "name": f"{entry['what']} {seen[entry['what']]}"}
        found.append(Call(**entry | about))
        seen[entry["what"]] += 1
    return found


@dataclass(frozen=True)
class Order:
    """What is promised: for each call the set of calls (bits) that are done before it starts.

    known: those that the host knows to be done when it makes each call, and at last when the launcher returns.
    """

    calls: list[Call]
    before: list[int]
    known: list[int]

    def hazards(self) -> list[tuple[Call, Call]]:
        """Pairs that touch the same bytes, one of them writing, and that may run in either order or at once."""
        work = [i for i, call in enumerate(self.calls) if call.is_work]
        return [
            (self.calls[i], self.calls[j])
            for i, j in combinations(work, 2)
            if not self.before[j] >> i & 1 and self.calls[i].conflicts(self.calls[j])
        ]

    def unfinished(self) -> list[Call]:
        """Work that may still run when the launcher has returned."""
        return [call for i, call in enumerate(self.calls) if call.is_work and not self.known[-1] >> i & 1]


def order(asked: list[Call]) -> Order:
    last: dict[int, int] = {}  # of each stream: what its next call comes after
    blocking = {call.stream for call in asked if call.blocking}
    events: dict[int, int] = {}
    host, before, known = 0, [], []
    for i, call in enumerate(asked):
        known.append(host)
        others = blocking if call.stream == 0 else {0} if call.blocking else set()
        done = last.get(call.stream, 0)
        if call.is_work or call.what == "record":
            for other in others:
                done |= last.get(other, 0)
        before.append(done | host)
        if call.is_work:
            last[call.stream] = done | host | 1 << i
        elif call.what == "record":
            events[call.event] = done
        elif call.what == "wait":  # for an event that was never recorded: for nothing
            last[call.stream] = done | events.get(call.event, 0)
        elif call.what == "synchronise":
            host |= done
        elif call.what == "synchronise event":
            host |= events.get(call.event, 0)
        elif call.what == "synchronise all":
            host |= (1 << i) - 1
        if call.pageable and call.what == "copy out":
            host |= last[call.stream]
    return Order(asked, before, [*known, host])


def schedule(asked: list[Call], machine: Machine) -> dict[str, tuple[float, float]]:
    """(start, end) of each piece of work by its name, in seconds from the first call."""
    promised = order(asked)
    ends: dict[int, float] = {}
    issued: dict[int, float] = {}
    free = dict.fromkeys(ENGINES.values(), 0.0)
    found: dict[str, tuple[float, float]] = {}
    host, at = 0.0, 0

    def done(mask: int) -> float | None:
        """When all of a set are done; None: some have no time yet."""
        members = [i for i in range(mask.bit_length()) if mask >> i & 1 and asked[i].is_work]
        return max((ends[i] for i in members), default=0.0) if all(i in ends for i in members) else None

    while at < len(asked) or len(ends) < len(issued):
        while at < len(asked):  # the host goes on to the first call that has to wait for work without a time
            call = asked[at]
            if call.is_work:
                issued.setdefault(at, host + machine.call)
            waits_for = promised.known[at + 1] | (1 << at if call.pageable else 0)
            if (until := done(waits_for)) is None:
                break
            host = max(host + machine.call, until)
            at += 1
        ready = []
        for i in issued.keys() - ends.keys():
            if (after := done(promised.before[i])) is not None:
                ready.append((max(issued[i], after, free[ENGINES[asked[i].what]]), i))
        if ready:
            start, i = min(ready)
            ends[i] = free[ENGINES[asked[i].what]] = start + machine.seconds(asked[i])
            found[asked[i].name] = (start, ends[i])
    return found


def seconds(asked: list[Call], machine: Machine) -> float:
    """From the first call until all work is done."""
    return max((end for _, end in schedule(asked, machine).values()), default=0.0)
