"""Time a lesson's rungs beside its peers, on a GPU, and turn the times into rows."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any

from lessonkit.base.errors import Unsupported
from lessonkit.base.files import ROOT
from lessonkit.cuda import build
from lessonkit.judge import check
from lessonkit.lesson import Lesson, Shape, Table, shape_name
from lessonkit.measure import fingerprint, launches, rows, timing

import torch

DISTURBED = 1.5  # the middle three fifths of a contender's times differ by a few percent, if it has the GPU to itself
TOO_SMALL = "this GPU has too little free memory"
PEER_SLACK = 8  # a peer may round more often than PyTorch; it is here for its speed, but it must compute the same thing


def bench(name: str, lesson: Lesson, say: Callable[[str], None] = print) -> list[rows.Row]:
    """Check, time and re-check every rung and peer at every bench shape.

    `say` gets a line for each one left out, and for each whose times were disturbed.
    """
    measured: list[rows.Row] = []
    for shape in lesson.benches:
        try:
            timing.limits()  # once, before a shape takes the memory
            measured += _one_shape(name, lesson, shape, say)
        except torch.OutOfMemoryError:
            say(f"{shape_name(shape)}: left out, {TOO_SMALL}")
        torch.cuda.empty_cache()
    timed = [row for row in measured if row.kind in ("rung", "peer")]
    marks = launches.marks(name, [(row.rung, row.kind == "peer", row.shape) for row in timed]) if timed else []
    known = {(row.rung, row.shape): mark for row, mark in zip(timed, marks, strict=True)}
    return [replace(row, machine=known.get((row.rung, row.shape), "")) for row in measured]


def printed(lesson: Lesson) -> Table | None:
    """The times that a program prints when it runs by itself, where rungs cannot show what it measures."""
    if not (lesson.prints and lesson.extension):
        return None
    (program,) = build.build([build.program(lesson.extension.source)])
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{lesson.extension.source.name}: {done.stdout[-500:]}{done.stderr[-500:]}")
    return timed_lines(done.stdout, lesson.prints)


def timed_lines(text: str, note: str) -> Table | None:
    """`what   1.23 ms   the rest` becomes a row, headed by lines above it that are none; None if nothing was timed."""
    found: list[dict[str, str]] = []
    about: list[str] = []
    for line in text.splitlines():
        if row := re.fullmatch(r"\s*(\S.*?)\s{2,}([\d.]+) ms\s+(\S.*)", line):
            what, ms, rest = row.groups()
            heading, rest = "; ".join(about), re.sub(r"\s+", " ", rest)
            found.append({"measured": heading, "version": what, "ms": ms, "that is": rest})
            about = []
        elif line and " right: " not in line:
            about.append(line)
    return Table("program", found, note) if found else None


def _one_shape(name: str, lesson: Lesson, shape: Shape, say: Callable[[str], None]) -> list[rows.Row]:
    question = check.truth(lesson, shape, lesson.bench_dtype)
    contenders: dict[str, Callable[[], Any]] = {}
    kinds: dict[str, str] = {}
    last: dict[str, Any] = {}
    absent: dict[str, str] = {}  # peer -> why it is not timed
    incomplete = False  # a peer that belongs here is not: what is left is no measure of the best

    def enter(label: str, kind: str, fn: Callable[..., Any]) -> None:
        """Let a contender take part if it is here, takes the shape, and is right. Its first call also compiles it."""
        nonlocal incomplete

        def call() -> None:
            last[label] = fn(*question.args)

        try:
            call()
            _verify(lesson, question, last[label], kind)
        except (ImportError, Unsupported) as why:
            said = f"left out, {why}"
            incomplete |= kind == "peer" and isinstance(why, ImportError)
        except torch.OutOfMemoryError:
            said = f"left out, {TOO_SMALL}"
        except Exception as error:
            words = f"{type(error).__name__}: {str(error)[:300]}"
            refused = kind == "peer" and not isinstance(error, check.Rejected)  # the peer's own error
            said = f"left out, it refuses: {words}" if refused else f"NOT TIMED, {words}"
            incomplete |= kind == "peer" and not refused
        else:
            contenders[label], kinds[label] = call, kind
            return
        say(f"{label} at {shape_name(shape)}: {said}")
        if kind == "peer":
            absent[label] = said.partition(", ")[2]

    for rung in lesson.rungs:
        if why := check.cannot_run(lesson, rung, lesson.checks[0], lesson.bench_dtype):
            say(f"{rung.__name__}: left out, {why}")
        else:
            enter(rung.__name__, "rung", rung)
    if not contenders:
        return []
    for label, peer in lesson.peers.items():
        enter(label, "peer", peer)
    work = lesson.work(dtype=lesson.bench_dtype, **shape)
    contenders["copy"], kinds["copy"] = timing.copy_of(work.bytes), "limit"
    contenders["copy"]()
    times = timing.measure(contenders)
    for label, kind in kinds.items():
        where, time = f"{label} at {shape_name(shape)}", times[label]
        if time.p80 > DISTURBED * time.p20:
            say(f"{where}: between {time.p20:.4g} and {time.p80:.4g} ms, does something else use this GPU?")
        try:
            if kind != "limit":
                _verify(lesson, question, last[label], kind)
        except check.Rejected as wrong:
            say(f"{where}: NOT TIMED, wrong after the rounds: {wrong}")
            del times[label]
            if kind == "peer":
                absent[label], incomplete = f"wrong after the rounds: {wrong}", True
    return _rows(name, lesson, shape, times, kinds, complete=not incomplete) + _absent(name, lesson, shape, absent)


def _verify(lesson: Lesson, question: check.Truth, answer: Any, kind: str) -> None:
    if kind == "peer" and lesson.peers_differ:
        if [(t.shape, t.dtype) for t in check.tensors(answer)] != [(t.shape, t.dtype) for t in question.usual]:
            raise check.Rejected("shape", "the peer computes something else")
        return
    slack = PEER_SLACK if kind == "peer" else 1
    check.compare(check.Truth(question.args, question.exact, question.usual, question.factor * slack), answer)


def _rows(
    name: str,
    lesson: Lesson,
    shape: Shape,
    times: dict[str, timing.Timing],
    kinds: dict[str, str],
    *,
    complete: bool = True,
) -> list[rows.Row]:
    """complete: every peer that takes the shape is here. Without one of them no ratio to the best is given."""
    work = lesson.work(dtype=lesson.bench_dtype, **shape)
    dtype = str(lesson.bench_dtype).removeprefix("torch.")
    best = timing.limits()
    rate = best.matmul[{"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}.get(dtype, "fp32")]
    # The floor at this size: a copy of as many bytes, timed in the same rounds; or the FLOPs at the matmul rate.
    floor = max(times["copy"].p50, work.flops / rate * 1e3)
    possible = {  # milliseconds that nobody can beat; the copy moves the bytes and computes nothing
        kind: max(work.bytes / best.copy, 0 if kind == "limit" else work.flops / rate) * 1e3 / timing.IMPOSSIBLE
        for kind in set(kinds.values())
    }
    peers = [t.p50 for label, t in times.items() if kinds[label] == "peer" and complete]
    machine = rows.machine()
    measured = []
    for label, t in times.items():
        if t.p50 < possible[kinds[label]]:
            raise RuntimeError(
                f"{name} {label} at {shape_name(shape)}: {t.p50:.4f} ms is a measuring error, "
                f"for this machine cannot be faster than {possible[kinds[label]]:.4f} ms"
            )
        measured.append(
            rows.Row(
                lesson=name,
                rung=label,
                kind=kinds[label],
                shape=shape_name(shape),
                dtype=dtype,
                ms_p20=round(t.p20, 5),
                ms_p50=round(t.p50, 5),
                ms_p80=round(t.p80, 5),
                bytes=work.bytes,
                tb_per_s=round(work.bytes / t.p50 * 1e-9, 4),
                tflop_per_s=round(work.flops / t.p50 * 1e-9, 3),
                percent_of_limit=round(100 * floor / t.p50, 1),
                ratio_to_best_peer=round(min(peers) / t.p50, 3) if peers else 0.0,
                source=_source(name, label, kinds[label]),
                peer_version=_versions(name, label) if kinds[label] == "peer" else "",
                **machine,
            )
        )
    return measured


def _absent(name: str, lesson: Lesson, shape: Shape, absent: dict[str, str]) -> list[rows.Row]:
    """A row for each peer that was not timed, with the reason."""
    machine = rows.machine() if absent else {}
    return [
        rows.Row(
            lesson=name,
            rung=label,
            kind=rows.ABSENT,
            shape=shape_name(shape),
            dtype=str(lesson.bench_dtype).removeprefix("torch."),
            ms_p20=0.0,
            ms_p50=0.0,
            ms_p80=0.0,
            bytes=lesson.work(dtype=lesson.bench_dtype, **shape).bytes,
            tb_per_s=0.0,
            tflop_per_s=0.0,
            percent_of_limit=0.0,
            ratio_to_best_peer=0.0,
            source=_source(name, label, "peer"),
            reason=why.splitlines()[0][:200] if why else "",
            **machine,
        )
        for label, why in absent.items()
    ]


def _source(name: str, label: str, kind: str) -> str:
    return "" if kind == "limit" else fingerprint.contender(ROOT, name, label, peer=kind == "peer")


def _versions(name: str, label: str) -> str:
    """`quack-kernels 0.6.5`: the packages that a peer comes from; those of the course have columns of their own."""
    found = metadata.packages_distributions()
    known = {d for package in fingerprint.packages(ROOT, name, label) for d in found.get(package, [])}
    return ", ".join(f"{d} {metadata.version(d)}" for d in sorted(known - {"torch", "triton"}))
