"""How fast, in a way that can be believed: interleaved, L2 flushed, repeated until the median holds still.

A card's power state drifts by 10% and more within a minute. So contenders are timed in one process, interleaved: their
ratio is the result, the absolute figure is orientation. It also matters which kernel ran before. In a fixed order A B C
A B C the same kernel differed by 6% with its place in the round, flushed L2 or not. So each round has an order of its
own. GPU only.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from lessonkit.base import chips, device
from lessonkit.measure.answers import Answers

import torch

FLUSH_BYTES = 2**30  # evicts any L2 (60 MB on an H200), and takes the GPU 300 us, in which the host gets ahead of it
LEAST_ROUNDS = 20
MOST_FLUSHES = 8  # a contender that waits for the GPU cannot be hidden
IMPOSSIBLE = 1.08  # times the machine's own best copy and matmul: more is an error on a card without a data sheet


@dataclass(frozen=True)
class Timing:
    """Milliseconds."""

    p20: float
    p50: float
    p80: float


@dataclass(frozen=True)
class Limits:
    """What this machine does at best, measured. Rates in bytes/s and FLOP/s."""

    copy: float
    matmul: Mapping[str, float]

    def rate(self, dtype: str) -> float:
        """FLOP/s of matmuls in a dtype, as rows name it: bfloat16."""
        return self.matmul[{"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}.get(dtype, "fp32")]


def measure(
    contenders: Mapping[str, Callable[[], Any]],
    *,
    flush: bool = True,
    rounds: int = 100,
    budget_s: float = 2.0,
    answers: Answers | None = None,
    needed: Callable[[Mapping[str, float]], Iterable[str]] = tuple,
) -> dict[str, Timing]:
    """Time each contender once a round until every median is known to 0.5% (or `rounds`, or the time, run out).

    flush: write over the L2 before each call, so that inputs come from memory; what a stream of other kernels
    leaves behind is dirty lines, and so does the flush. Where a call takes the host long, the flush is repeated until
    the GPU has as much to do: the host's time is not timed. Call them once before: compilation is not timed either.
    answers: gets what each call returns, outside of what is timed.
    needed: the contenders whose medians have to be known so well, by the medians so far; without it all of them.
    Returns {name: Timing}.
    """
    scratch = torch.empty(FLUSH_BYTES if flush else 1, dtype=torch.int8, device="cuda")
    repeats = flushes(_host_ms(contenders), _flush_ms(scratch)) if flush else 1
    times: dict[str, list[float]] = {name: [] for name in contenders}
    spent, order = 0.0, random.Random(0)
    for done in range(1, rounds + 1):
        events = {}
        for name, fn in order.sample(list(contenders.items()), len(contenders)):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(repeats):
                scratch.zero_()
            start.record()
            answer = fn()
            end.record()
            events[name] = start, end
            if answers:
                answers.called(name, answer)
            del answer  # the next contender gets its memory
        torch.cuda.synchronize()
        if answers:
            answers.round_over()
        for name, (start, end) in events.items():
            times[name].append(start.elapsed_time(end))
            spent += times[name][-1] * 1e-3
        if done >= LEAST_ROUNDS:
            medians = {name: statistics.median(t) for name, t in times.items()}
            if spent > budget_s or all(_settled(times[name]) for name in needed(medians)):
                break
    return {name: _summary(t) for name, t in times.items()}


def flushes(host_ms: float, flush_ms: float) -> int:
    """So many flushes take the GPU twice as long as a call takes the host."""
    return min(MOST_FLUSHES, max(1, math.ceil(2 * host_ms / flush_ms)))


def _host_ms(contenders: Mapping[str, Callable[[], Any]]) -> float:
    """The time until a call returns, of the slowest contender; the median of three calls."""

    def once(fn: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        fn()
        return (time.perf_counter() - began) * 1e3

    return max(statistics.median(once(fn) for _ in range(3)) for fn in contenders.values())


def _flush_ms(scratch: torch.Tensor) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    scratch.zero_()  # the GPU is busy before the clock starts
    events[0].record()
    scratch.zero_()
    events[1].record()
    events[1].synchronize()
    return float(events[0].elapsed_time(events[1]))


def _settled(times: list[float]) -> bool:
    """Is the median known to 0.5%? Its 95% interval lies between the order statistics n/2 -+ 0.98 sqrt(n)."""
    ordered, n = sorted(times), len(times)
    half = 0.98 * n**0.5
    low, high = ordered[int(n / 2 - half)], ordered[min(n - 1, int(n / 2 + half))]
    return high - low < 0.01 * ordered[n // 2]


def _summary(times: list[float]) -> Timing:
    p20, _, _, p80 = statistics.quantiles(times, n=5)
    return Timing(p20, statistics.median(times), p80)


def copy_of(bytes_moved: int) -> Callable[[], Any]:
    """A device-to-device copy that reads and writes `bytes_moved` in all: the limit of any op that moves as much."""
    source = torch.empty(max(1, bytes_moved // 2), dtype=torch.int8, device="cuda").random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


@cache
def limits() -> Limits:
    """Measure the machine once a run: copying 2 GiB, less if less is free; dense matmuls of 8192 on random data."""
    torch.cuda.empty_cache()
    moved = min(2**32, torch.cuda.mem_get_info()[0] // 4)
    work: dict[str, Callable[[], Any]] = {"copy": copy_of(moved)}
    n = 8192
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
        work[name] = partial(torch.matmul, a, b)
    if torch.cuda.get_device_capability() >= (8, 9):
        a8, b8 = (torch.randn(n, n, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device="cuda")
        work["fp8"] = lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    for fn in work.values():
        fn()
    found = measure(work, rounds=30)
    copy = moved / (found.pop("copy").p50 * 1e-3)
    return Limits(copy, {name: 2 * n**3 / (t.p50 * 1e-3) for name, t in found.items()})


def least_ms(moved: int, flops: int, dtype: str) -> float:
    """A shorter time is a measuring error, and no fast kernel: less than by the card's data sheet.

    The table may lack the card. Then it is less than this machine's own best allows, by more than IMPOSSIBLE. A stream
    of reads is faster than a copy, and some matmuls than cuBLAS's of 8192, so the longer of both would refuse kernels.
    """
    best, chip = limits(), chips.of_gpu(device.name())
    own = max(moved / best.copy, flops / best.rate(dtype)) / IMPOSSIBLE
    by_sheet = chip.seconds(moved, flops, chips.RATES.get(dtype, "fp32"))[0] if chip else own
    return 1e3 * min(own, by_sheet)
