"""What a rung's accesses look like to the memory system, as the emulator counted them: coalescing and bank conflicts.

A request is one access of a warp. In global memory it takes a sector for each 32 bytes that it touches; 4 is the least
for 32 words. In shared memory it takes a wavefront for each time that the 32 banks must answer; 1 is the least.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from lessonkit.base.errors import Unsupported
from lessonkit.base.traffic import Traffic
from lessonkit.base.words import later
from lessonkit.judge import check
from lessonkit.lesson import Case, Lesson, Rung

GLOBAL, SHARED = ("global_load", "global_store"), ("shared_load", "shared_store")
# What `Lesson.counts` may name: (what is counted, for each of what), summed over these prefixes.
METRICS = {
    later("sectors a request"): (GLOBAL, "sectors", "requests"),
    later("sectors a load"): (GLOBAL[:1], "sectors", "requests"),
    later("sectors a store"): (GLOBAL[1:], "sectors", "requests"),
    later("bytes used of a sector"): (GLOBAL, "bytes", "sectors"),
    later("wavefronts a shared access"): (SHARED, "wavefronts", "requests"),
    later("wavefronts a shared load"): (SHARED[:1], "wavefronts", "requests"),
    later("wavefronts a shared store"): (SHARED[1:], "wavefronts", "requests"),
    later("sectors an atomic"): (("global_atomic",), "sectors", "requests"),
    later("wavefronts a shared atomic"): (("shared_atomic",), "wavefronts", "requests"),
}
PLAIN = {
    later("loads"): "global_load_requests",
    later("stores"): "global_store_requests",
    later("shared loads"): "shared_load_requests",
    later("shared stores"): "shared_store_requests",
    later("atomics"): "global_atomic_requests",
    later("shared atomics"): "shared_atomic_requests",
    later("barriers"): "barriers",
    later("launches"): "launches",
}


def measured(kernels: Iterable[Mapping[str, Any]], name: str) -> float:
    """One metric over the kernels of a rung; "row_kernel: sectors a load" is that of one kernel. 0 where there is none.

    Raises ValueError for a metric that does not exist.
    """
    only, _, metric = name.rpartition(": ")
    chosen = [k for k in kernels if only in ("", k["kernel"], k["kernel"].split("<")[0])]
    if metric in PLAIN:
        return float(sum(k[PLAIN[metric]] for k in chosen))
    if metric not in METRICS:
        raise ValueError(f"a count is one of {', '.join(map(repr, (*METRICS, *PLAIN)))}, not {metric!r}")
    prefixes, above, below = METRICS[metric]
    each = sum(k[f"{prefix}_{below}"] for k in chosen for prefix in prefixes)
    return sum(k[f"{prefix}_{above}"] for k in chosen for prefix in prefixes) / each if each else 0.0


def countable(lesson: Lesson, rung: Rung) -> list[Case]:
    """The checks on which a rung may be counted, the last first: those that need no GPU's memory."""
    fits = (case for case in reversed(lesson.checks) if not case.gib)
    return [case for case in fits if not check.cannot_run(lesson, rung, case, lesson.dtypes[0])]


def on_last_check(lesson: Lesson, rung: Rung) -> Traffic | None:
    """The traffic of a rung on the last check that it takes without a GPU, in the lesson's first dtype."""
    for case in countable(lesson, rung):
        try:
            traffic = check.check(lesson, rung, case.shape, lesson.dtypes[0])
        except Unsupported:
            continue
        if traffic.kernels:
            return traffic
    return None


def traffic(lesson: Lesson) -> dict[Rung, Traffic]:
    """What each rung asks of memory on the last check that it takes; without those that cannot be emulated."""
    found = {rung: on_last_check(lesson, rung) for rung in lesson.rungs}
    return {rung: counted for rung, counted in found.items() if counted}


def rows(found: Mapping[Rung, Traffic]) -> list[dict[str, Any]]:
    """A row for each kernel of each rung: what `reports/emulated` holds."""
    lines = []
    for rung, counted in found.items():
        kernels: dict[str, list[dict[str, Any]]] = {}
        for each in counted.kernels:
            kernels.setdefault(each["kernel"], []).append(each)
        for kernel, parts in kernels.items():
            about: dict[str, Any] = {"rung": rung.__name__, "kernel": kernel}
            for key in ("blocks", "global_load_bytes", "global_store_bytes"):
                about[key] = sum(part[key] for part in parts)
            about |= {metric: round(measured(parts, metric), 3) for metric in (*METRICS, *PLAIN)}
            lines.append(about)
    return lines


def broken_counts(name: str, lesson: Lesson, found: Mapping[Rung, Traffic]) -> list[str]:
    """What the lesson says of its rungs' accesses and the emulator does not find."""
    broken = []
    for rung, wanted in lesson.counts.items():
        for metric, expected in wanted.items() if rung in found else ():
            try:
                value = measured(found[rung].kernels, metric)
            except ValueError as unknown:
                broken.append(f"{name}.{rung.__name__}: {unknown}")
                continue
            if abs(value - expected) > 0.02 * abs(expected):
                broken.append(f"{name}.{rung.__name__}: {value:.3f} {metric}, expected {expected:g}")
    return broken
