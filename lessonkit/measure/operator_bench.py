"""Time course_ops beside its peers at the shapes of the zoo, a row at a time; a run goes on where the last one stopped.

Shapes are timed one by one in a process of their own, so that a kernel that hangs or breaks the CUDA context costs one
row. While nothing is timed, other processes compile what the next shapes need: their caches lie on disk.

Near a bar every contender is timed until its median is known to 0.5%. The bars lie between ratios of 0.85 and 1.1.
Elsewhere this is asked of what the ratio and the limit are made of: ours, the copy, and peers within 10% of the best.
Slower peers then have 20 rounds at least. A peer whose first answer is wrong is not timed. One whose answer is wrong in
a round has no time, and leaves the ratio empty. Between two shapes the search for garbage passes over the objects that
earlier ones have left, PyTorch's modules above all.
"""

import gc
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from importlib import metadata
from multiprocessing.pool import Pool
from pathlib import Path
from types import TracebackType
from typing import Any

from lessonkit.base.errors import Unsupported
from lessonkit.judge import check
from lessonkit.measure import memory, operator_rows, rows, timing, yardstick
from lessonkit.measure.answers import Answers, another
from lessonkit.measure.operator_rows import BETWEEN, TIMES, Case, Key, Row

import torch

PATIENCE_S = 150  # for one shape: compiling for all peers takes up to a minute
COMPILE_S = 120  # for the shapes of one turn
ENDING_S = 30  # what a shape may take beyond the minutes that were given
AHEAD = 3  # shapes that each compiling process gets in a turn
AHEAD_BYTES = 2**31  # shapes that move more are compiled where they are timed, or the processes fill the GPU
NEAR = 0.85, 1.1  # ratios between these are near a bar: 0.97, 1, and what a summary calls behind
CLOSE = 1.1  # times the best peer's median: so slow a peer may still turn out to be the best
SAMPLE = 2**22  # elements of a result that are compared
PACKAGES = ("torch", "triton", "quack-kernels", "liger-kernel", "flash-attn-4", "nvidia-cudnn-cu13", "nvidia-cublas")
# What a peer keeps of its compiler between processes, and no threads of Inductor beside ours.
ENVIRONMENT = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

Say = Callable[[str], None]


# ---- The run ------------------------------------------------------------------------------------------------------


def run(
    pending: Sequence[Case],
    timed: Callable[[Case], Row | None],
    path: Path,
    minutes: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    ahead: Callable[[Sequence[Case]], None] = lambda cases: None,
    turn: int = 1,
    say: Say = print,
) -> int:
    """Time cases in order until the minutes are over, each row kept as soon as it is there; return how many.

    timed: the row of a case, None if the time ran out over it. A shape that is behind is timed again (in_the_middle).
    ahead: compiles the next `turn` cases before they are
    timed. No case is begun after the last minute, so that the run ends some seconds after it at most.
    """
    end, done = clock() + 60 * minutes, 0
    for start in range(0, len(pending), turn):
        if clock() >= end:
            break
        ahead(pending[start : start + turn])
        for case in pending[start : start + turn]:
            if clock() >= end:
                break
            row = timed(case)
            if row is None:
                return done
            row = in_the_middle(row, partial(timed, case))
            operator_rows.keep(path, row)
            done += 1
            say(f"{done} of {len(pending)}: {said(row)}")
    return done


def in_the_middle(row: Row, timed: Callable[[], Row | None]) -> Row:
    """Of a shape that is behind the row with the middle ratio, timed TIMES times; the row itself if time runs out."""
    rows = [row]
    while row.behind and len(rows) < TIMES and (another := timed()) is not None and another.judged:
        rows.append(another)
    if len(rows) < TIMES:
        return row
    middle = sorted(rows, key=lambda each: each.ratio)[TIMES // 2]
    ratios = BETWEEN.join(str(each.ratio) for each in rows)
    return replace(middle, ratios=ratios, first_call_s=row.first_call_s)


def said(row: Row) -> str:
    """A row in one line."""
    if row.error:
        return f"{' '.join(row.key)}: {row.error}"
    than = f"{row.ratio:.2f} of {row.best_peer}" if row.ratio else f"no ratio, {row.absent or 'no peer'}"
    apart = f"; between {row.p20:.4g} and {row.p80:.4g} ms" if row.disturbed else ""
    share = yardstick.share_of_operator(row).percent
    return f"{' '.join(row.key)}: {row.ms:.4g} ms, {than}, {share:.0f}% of the limit{apart}"


class Processes:
    """The process that times, and those that compile ahead of it. All are started anew after one of them hung."""

    def __init__(self, workers: int, minutes: float) -> None:
        os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
        self.workers, self.end = workers, time.monotonic() + 60 * minutes
        self.first_calls: dict[Key, float] = {}
        self.timer: Pool | None = None
        self.compilers: Pool | None = None

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pool in (self.timer, self.compilers):
            if pool:
                pool.terminate()

    def timed(self, case: Case) -> Row | None:
        left = self.end + ENDING_S - time.monotonic()
        self.timer = self.timer or _pool(1)
        asked = self.timer.apply_async(_timed_here, (case.key, self.first_calls.get(case.key, 0.0)))
        try:
            row, alive = asked.get(min(PATIENCE_S, max(left, 1.0)))
        except multiprocessing.TimeoutError:
            self.timer.terminate()
            self.timer = None
            if left < PATIENCE_S:
                return None
            return replace(_empty(case), error=f"no answer within {PATIENCE_S} s: it hangs, or its process died")
        if not alive:
            self.timer.terminate()
            self.timer = None
        return row

    def ahead(self, cases: Sequence[Case]) -> None:
        """Call every contender of each case once, many cases at a time; nothing is timed meanwhile."""
        small = [case.key for case in cases if case.work().bytes <= AHEAD_BYTES]
        if not self.workers or not small:
            return
        self.compilers = self.compilers or _pool(self.workers)
        left = min(COMPILE_S, max(1.0, (self.end - time.monotonic()) / 2))
        until = time.monotonic() + left
        answers = [self.compilers.apply_async(_called_here, (key,)) for key in small]
        for key, answer in zip(small, answers, strict=True):
            try:
                self.first_calls[key] = answer.get(max(0.0, until - time.monotonic()))
            except multiprocessing.TimeoutError:
                self.compilers.terminate()  # or what it still compiles would disturb what is timed
                self.compilers = None
                return


def _pool(workers: int) -> Pool:
    return multiprocessing.get_context("spawn").Pool(workers)


# ---- In a process that times ------------------------------------------------------------------------------------


@cache
def _by_key() -> Mapping[Key, Case]:
    return operator_rows.by_key()


def _timed_here(key: Key, first_call: float) -> tuple[Row, bool]:
    """The row of a case, and whether this process can time another."""
    case, alive = _by_key()[key], True
    try:
        row = time_case(case)
    except torch.OutOfMemoryError:
        row = replace(_empty(case), error="this GPU has too little free memory")
    except Exception as error:
        row = replace(_empty(case), error=_words(error))
    if first_call:
        row = replace(row, first_call_s=round(first_call, 3))
    try:
        _cleared()
    except Exception:  # a fault of a kernel leaves a CUDA context that answers nothing more
        alive = False
    return row, alive


def _called_here(key: Key) -> float:
    """Call ours and every peer once, so that caches on disk have their kernels; seconds of ours, 0 if it fails."""
    case, seconds = _by_key()[key], 0.0
    try:
        seconds = _call_all(case)
    except Exception as error:
        print(f"{' '.join(key)}: not compiled ahead, {_words(error)}", flush=True)
    with suppress(Exception):  # what is wrong with the GPU shows where the case is timed
        _cleared()
    return seconds


@torch.no_grad()
def _call_all(case: Case) -> float:
    args = _inputs(case)
    seconds = _first_call(case, args)
    for peer in case.peers.values():
        _attempt(peer, args)
    return seconds


def _cleared() -> None:
    torch._dynamo.reset()  # or it would give up on torch.compile's function after eight shapes
    gc.collect()
    gc.freeze()  # what is left lives on: the next search takes 0.2 s less
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _inputs(case: Case) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return case.inputs()


def _first_call(case: Case, args: tuple[Any, ...]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    case.operator.call(*args)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _attempt(peer: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Why a peer cannot be timed, or an empty string."""
    try:
        peer(*args)
        torch.cuda.synchronize()
    except ImportError as why:
        return f"{rows.NOT_INSTALLED}, {_words(why)}"
    except Unsupported as why:
        return _words(why, name=False)
    except torch.OutOfMemoryError:
        return "this GPU has too little free memory"
    except Exception as error:
        return f"refuses, {_words(error)}"
    return ""


def _words(error: BaseException, *, name: bool = True) -> str:
    said = re.sub(r"\x1b\[[0-9;]*m| at 0x[0-9a-f]+", "", str(error))  # colours of a terminal, addresses
    text = " ".join(said.split())[:160].replace(BETWEEN.strip(), "/")
    return f"{type(error).__name__}: {text}" if name else text


def time_case(case: Case) -> Row:
    """Call, compare and time in turns one operator and its peers at one shape; what is timed is compared too."""
    timing.limits()  # once, before a shape takes the memory
    with torch.no_grad():
        args, work, absent = _inputs(case), case.work(), dict[str, str]()
        first_call = _first_call(case, args)
        contenders: dict[str, Callable[[], Any]] = {"ours": partial(case.operator.call, *args)}
        for name, peer in case.peers.items():
            if why := _attempt(peer, args):
                absent[name] = why
            else:
                contenders[name] = partial(peer, *args)
        answers = asked(case, args, contenders)
        for name in answers.wrong.keys() - {"ours"}:
            del contenders[name]  # it has no row, so it takes no rounds
        peak = memory.peak_bytes(contenders["ours"])
        contenders["copy"] = timing.copy_of(work.bytes)
        contenders["copy"]()
        times = timing.measure(contenders, answers=answers, needed=_needed)
        wrong = answers.wrong | answers.wrong_in_rounds()
        error = wrong.pop("ours", "")
        error = f"wrong: {error}" if error and "ours" not in answers.wrong_in_rounds() else error
        for name, why in wrong.items():
            absent[name] = why
            times.pop(name, None)
    return row_of(case, times, absent, first_call_s=first_call, peak_memory=peak, error=error)


def _needed(ms: Mapping[str, float]) -> Collection[str]:
    """The contenders whose medians must be known to 0.5%, by the medians so far: all of them near a bar."""
    peers = {name: t for name, t in ms.items() if name not in ("ours", "copy")}
    best = min(peers.values(), default=0.0)
    if NEAR[0] < best / ms["ours"] < NEAR[1]:
        return ms.keys()
    return ["ours", "copy", *(name for name, t in peers.items() if t <= CLOSE * best)]


def row_of(case: Case, times: Mapping[str, timing.Timing], absent: Mapping[str, str], **more: Any) -> Row:
    """The row of a case from the times of "ours", "copy" and the peers."""
    ours, work = times["ours"], case.work()
    rate = timing.limits().rate(case.key[3])
    limit = max(times["copy"].p50, work.flops / rate * 1e3)
    peers = {name: round(t.p50, 5) for name, t in times.items() if name not in ("ours", "copy")}
    name = min(peers, key=lambda n: peers[n], default="")
    row = replace(
        _empty(case),
        ms=round(ours.p50, 5),
        p20=round(ours.p20, 5),
        p80=round(ours.p80, 5),
        best_peer=name,
        best_peer_ms=peers.get(name, 0.0),
        limit_ms=round(limit, 5),
        peers=BETWEEN.join(f"{peer} {ms}" for peer, ms in peers.items()),
        absent=BETWEEN.join(f"{peer}: {why}" for peer, why in absent.items()),
        first_call_s=round(more.pop("first_call_s"), 3),
        **more,
    )
    for contender, t in times.items():  # the copy computes nothing
        least = timing.least_ms(work.bytes, 0 if contender == "copy" else work.flops, case.key[3])
        if not row.error and t.p50 < least:
            of = "" if contender == "ours" else f" of {contender}"
            row = replace(row, error=f"a measuring error{of}: this machine cannot be faster than {least:.4f} ms")
    percent = round(100 * row.limit_ms / row.ms, 1) if row.ms else 0.0
    return replace(row, percent_of_limit=percent, ratio=operator_rows.ratio(row))


def _empty(case: Case) -> Row:
    """A row without a time."""
    operator, direction, shape, dtype, data = case.key
    work, where = case.work(), _machine()
    return Row(
        operator=operator,
        direction=direction,
        shape=shape,
        dtype=dtype,
        data=data,
        bytes=work.bytes,
        flops=work.flops,
        versions=where["versions"],
        device=where["gpu"],
        commit=where["commit"],
        date=where["date"],
        fingerprint=operator_rows.today(case),
    )


@cache
def _machine() -> dict[str, str]:
    found = rows.machine()
    return found | {"versions": ", ".join([*_versions(), f"cuda {found['cuda']}", f"driver {found['driver']}"])}


def _versions() -> Iterator[str]:
    for package in PACKAGES:
        try:
            yield f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue


# ---- Are the timed answers right? -----------------------------------------------------------------------------------


def asked(case: Case, args: tuple[Any, ...], contenders: Mapping[str, Callable[[], Any]]) -> Answers:
    """The answers of contenders, judged once, to be compared with what is timed; of a large result a sample of rows.

    Ours is held to the lessons' budget against PyTorch in float64, its result's memory filled with NaN before the
    call. Peers must compute the same thing, as far as they give it.
    """
    problem = case.operator.problem

    def reference(*args: Any) -> tuple[Any, ...]:
        return _sampled(problem.reference(*args))

    try:
        truth = check.Truth(args, reference(*map(check.in_float64, args)), reference(*args), problem.factor, reference)
    except torch.OutOfMemoryError:  # the shape is timed and not compared; smaller ones are
        return Answers(args, lambda name, answer: "")

    def judge(name: str, answer: Any) -> str:
        if name == "ours":
            try:
                check.compare(truth, answer)
            except check.Rejected as rejected:
                return _words(rejected, name=False)
        elif not problem.peers_differ and (why := another(truth, answer)):
            return f"gives another answer, {why}"
        return ""

    answers = Answers(args, judge, _sampled)
    for name, call in contenders.items():
        answers.enter(name, call)
    return answers


def _sampled(answer: Any) -> tuple[Any, ...]:
    """Each result with at most SAMPLE elements: rows of it at random, the same rows in each call of this function."""
    return tuple(map(_rows_of, check.tensors(answer)))


def _rows_of(t: torch.Tensor | None) -> torch.Tensor | None:
    if t is None or t.numel() <= SAMPLE:
        return t if t is None else t.clone()
    flat = t.reshape(-1, t.shape[-1]) if t.ndim > 1 else t
    count = max(1, SAMPLE // flat[0].numel())
    return flat[_picked(len(flat), count, t.device)]


@lru_cache(maxsize=16)
def _picked(among: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.randint(among, (count,), generator=torch.Generator().manual_seed(0)).to(device)
