"""Time a lesson's rungs beside its peers, on a GPU, and turn the times into rows."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

from lessonkit.base.errors import Unsupported
from lessonkit.base.files import ROOT
from lessonkit.cuda import build
from lessonkit.judge import check
from lessonkit.lesson import Lesson, Rung, Shape, Table, budget_of, is_stepwise, shape_name
from lessonkit.measure import fingerprint, launches, rows, timing
from lessonkit.measure.answers import Answers, another

import torch

TOO_SMALL = "this GPU has too little free memory"


def bench(name: str, lesson: Lesson, say: Callable[[str], None]) -> list[rows.Row]:
    """Check and time every rung and peer at every bench shape; every answer that is timed is compared.

    `say` gets a line for each one left out, and for each whose times were disturbed.
    """
    measured: list[rows.Row] = []
    for shape in lesson.benches:
        # Dynamo compiles a function for eight shapes and runs it uncompiled at all others. Lessons share their peers.
        torch._dynamo.reset()
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
    absent: dict[str, str] = {}  # peer -> why it is not timed
    rungs = {rung.__name__: rung for rung in lesson.rungs}
    incomplete = False  # a peer that belongs here has no time: what is left is no measure of the best

    def judge(label: str, answer: Any) -> str:
        try:
            _verify(lesson, question, answer, rungs.get(label))
        except check.Rejected as wrong:
            return str(wrong)
        return ""

    answers = Answers(question.args, judge)

    def enter(label: str, kind: str, fn: Callable[..., Any]) -> None:
        """Let a contender take part if it is here, takes the shape, and is right. Its first call also compiles it."""
        nonlocal incomplete
        call = partial(fn, *question.args)
        unfit = "left out" if kind == "peer" else "NOT TIMED"  # a peer that computes something else is none here
        try:
            with check.left_alone(question.args):
                wrong = answers.enter(label, call)
        except (ImportError, Unsupported) as why:
            said = f"left out, {why}"
            incomplete |= kind == "peer" and isinstance(why, ImportError)
        except torch.OutOfMemoryError:
            said = f"left out, {TOO_SMALL}"
        except Exception as error:
            words = f"{type(error).__name__}: {str(error)[:300]}"
            refused = kind == "peer" and not isinstance(error, check.Rejected)  # the peer's own error
            said = f"{unfit}, it refuses: {words}" if refused else f"{unfit}, {words}"
        else:
            if not wrong:
                contenders[label], kinds[label] = call, kind
                return
            said = f"{unfit}, Rejected: {wrong[:300]}"
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
    times = timing.measure(contenders, answers=answers)
    refused = answers.wrong_in_rounds()
    refused |= {label: why for label, why in impossible(lesson, shape, times, kinds).items() if label not in refused}
    for label, kind in kinds.items():
        where, time = f"{label} at {shape_name(shape)}", times[label]
        if rows.far_apart(time.p20, time.p80):
            say(f"{where}: between {time.p20:.4g} and {time.p80:.4g} ms, does something else use this GPU?")
        if label in refused:
            say(f"{where}: NOT TIMED, {refused[label]}")
            del times[label]
            if kind == "peer":
                absent[label], incomplete = refused[label], True
    if "copy" not in times:  # no row of this shape has a limit
        return []
    return _rows(name, lesson, shape, times, kinds, complete=not incomplete) + _absent(name, lesson, shape, absent)


def impossible(lesson: Lesson, shape: Shape, times: dict[str, timing.Timing], kinds: dict[str, str]) -> dict[str, str]:
    """Contender -> what is wrong with its time: no kernel can be faster than this machine moves and multiplies."""
    work, dtype = lesson.work(dtype=lesson.bench_dtype, **shape), str(lesson.bench_dtype).removeprefix("torch.")
    found = {}
    for label, time in times.items():
        flops = 0 if kinds[label] == "limit" else work.flops  # the copy moves the bytes and computes nothing
        if time.p50 < (least := timing.least_ms(work.bytes, flops, dtype)):
            found[label] = (
                f"{time.p50:.4f} ms is a measuring error, for this machine cannot be faster than {least:.4f} ms"
            )
    return found


def _rate(lesson: Lesson) -> float:
    """FLOP/s of matmuls in the dtype that is timed."""
    return timing.limits().rate(str(lesson.bench_dtype).removeprefix("torch."))


def _verify(lesson: Lesson, question: check.Truth, answer: Any, rung: Rung | None) -> None:
    """Raise Rejected if the answer of a rung or a peer is wrong. A result of a peer that is None is not compared."""
    if rung:
        check.compare(question, answer, slack=budget_of(rung), stepwise=is_stepwise(rung))
    elif not lesson.peers_differ:
        if why := another(question, answer):
            raise check.Rejected("value", why)
    elif [(t.shape, t.dtype) for t in check.tensors(answer)] != [(t.shape, t.dtype) for t in question.usual]:
        raise check.Rejected("shape", "the peer computes something else")


def _rows(
    name: str,
    lesson: Lesson,
    shape: Shape,
    times: dict[str, timing.Timing],
    kinds: dict[str, str],
    *,
    complete: bool = True,
) -> list[rows.Row]:
    """complete: every peer that computes this at this shape is here. Without one no ratio to the best is given."""
    work = lesson.work(dtype=lesson.bench_dtype, **shape)
    dtype = str(lesson.bench_dtype).removeprefix("torch.")
    # The floor at this size: a copy of as many bytes, timed in the same rounds; or the FLOPs at the matmul rate.
    floor = max(times["copy"].p50, work.flops / _rate(lesson) * 1e3)
    peers = [t.p50 for label, t in times.items() if kinds[label] == "peer" and complete]
    machine = rows.machine()
    measured = []
    for label, t in times.items():
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
                peer_version=_versions(name, label, lesson.peers[label]) if kinds[label] == "peer" else "",
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


def _versions(name: str, label: str, peer: Rung) -> str:
    """`quack-kernels 0.6.5`: the packages that a peer comes from; those of the course have columns of their own."""
    found = metadata.packages_distributions()
    known = {d for package in fingerprint.packages(ROOT, name, label, peer) for d in found.get(package, [])}
    return ", ".join(f"{d} {metadata.version(d)}" for d in sorted(known - {"torch", "triton"}))
