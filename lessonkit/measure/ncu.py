"""The emulator's counts beside the GPU's own: the same rungs on the same checks, counted by Nsight Compute (ncu).

One ncu process runs a small driver (this module as a script) that calls every rung of every lesson once. Before each it
launches a kernel that everybody has, as a mark in ncu's list, and writes down whose turn it is.
"""

import csv
import faulthandler
import importlib
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lessonkit.base import device
from lessonkit.base.errors import Unsupported
from lessonkit.base.files import ROOT, changing, write_atomically
from lessonkit.base.process import output
from lessonkit.base.tables import read_csv, to_csv
from lessonkit.base.words import later, said
from lessonkit.cuda import build, toolchain
from lessonkit.judge import check, counters
from lessonkit.lesson import Lesson, Rung, discover
from lessonkit.measure import rows

import torch

find = toolchain.find_tool  # as day 4 and day 5 call it and `output`: another name would make their tables old

# The emulator's name for a count -> the GPU's; where there are two they are added. A copy by cp.async (ldgsts) is a
# global load to the emulator and a counter of its own to the GPU.
COUNTERS = {
    "global_load_requests": (
        "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
        "l1tex__t_requests_pipe_lsu_mem_global_op_ldgsts.sum",
    ),
    "global_load_sectors": (
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts.sum",
    ),
    "global_store_requests": ("l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",),
    "global_store_sectors": ("l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",),
    "shared_load_requests": ("smsp__inst_executed_op_shared_ld.sum",),
    "shared_load_wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",),
    "shared_store_requests": ("smsp__inst_executed_op_shared_st.sum",),
    "shared_store_wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",),
}
PLAIN = ("launches", "loads", "stores", "shared loads", "shared stores")
RATIOS = {  # what one access costs, and how many there are: a column of reports/emulated that weighs it
    "sectors a load": "loads",
    "sectors a store": "stores",
    "wavefronts a shared load": "shared loads",
    "wavefronts a shared store": "shared stores",
}
ONLY_NCU = later("only ncu")
MARK = "spin_kernel"  # torch.cuda._sleep's
SECONDS, RUNG_SECONDS = 240, 40  # a hung kernel must not hang the command: the driver ends itself before ncu is ended


def lacks() -> str:
    """The one line that says why nothing can be counted here, or an empty string."""
    if not device.HAS_GPU:
        words = said("No GPU was found, so there is nothing that ncu could count: {command} emulates.")
        return words.format(command="python -m lessonkit count")
    if not toolchain.find_tool("ncu"):
        return said(
            "no ncu, so the GPU's counters cannot be read: install Nsight Compute (it comes with the CUDA toolkit)"
        )
    return toolchain.lacks("nvcc", "g++", "Python.h", "ninja")


def base(kernel: str) -> str:
    """`void <unnamed>::add_kernel<float>(...)` -> add_kernel; empty for what is no kernel of the course."""
    found = re.search(r"\b(\w+_kernel)\b", kernel)
    return found[1] if found and "at::" not in kernel[: found.start()] else ""


def path(folder: Path) -> Path:
    return folder / "ncu.csv"


def count(names: Sequence[str]) -> list[str]:
    """Run the rungs of these lessons under ncu, keep what it counted, and return what there is to say about it."""
    lessons = {name: lesson for name, lesson in discover() if name in names and isinstance(lesson, Lesson)}
    build.build(build.extension(lesson.extension.source) for lesson in lessons.values() if lesson.extension)
    metrics, said = _known(), list[str]()
    found, done = _profile(list(lessons), metrics, said)
    # A rung that ends the process takes the lessons after it along: each of those gets another chance by itself.
    for name in [name for name in lessons if name not in done] if found else []:
        again, _ = _profile([name], metrics, said)
        found = [row for row in found if row["lesson"] != name] + again
    if found:
        place = path(rows.REPORTS / device.name())
        fresh = {row["lesson"] for row in found}
        release = re.findall(r"Version\s+([\d.]+)", output([toolchain.find_tool("ncu"), "--version"], 30)[1])
        about = {**rows.machine(), "ncu": f"ncu {release[0] if release else ''}".strip()}
        with changing(place):
            kept = [row for row in read_csv(place) if row["lesson"] not in fresh]
            merged = to_csv(sorted([*kept, *found], key=lambda row: str(row["lesson"])))
            write_atomically(place, f"# {json.dumps(about)}\n{merged}")
        said.append(f"{len(found)} kernels of {len(fresh)} lessons counted: {place.relative_to(ROOT)}")
    return said


def _known() -> list[str]:
    """Those counters that this GPU has, as far as ncu lists them."""
    listed = output([toolchain.find_tool("ncu"), "--query-metrics"], 60)[1]
    wanted = [name for names in COUNTERS.values() for name in names]
    here = [name for name in wanted if re.search(rf"^\s*{name.removesuffix('.sum')}\b", listed, re.MULTILINE)]
    return here or [names[0] for names in COUNTERS.values()]


def _profile(names: list[str], metrics: list[str], said: list[str]) -> tuple[list[dict[str, Any]], set[str]]:
    """A row for each kernel of each rung, and the lessons that came to their end."""
    with tempfile.TemporaryDirectory() as folder:
        turns = Path(folder) / "turns"
        turns.touch()
        command = [
            toolchain.find_tool("ncu"),
            "--csv",
            "--print-units",
            "base",
            "--clock-control",
            "none",
            "--cache-control",
            "none",
        ]
        command += ["--profile-from-start", "off", "--kernel-name", "regex:_kernel", "--metrics", ",".join(metrics)]
        command += [sys.executable, "-m", "lessonkit.measure.ncu", str(turns), *names]
        code, out, err = output(command, SECONDS)
        log = [json.loads(line) for line in turns.read_text().splitlines()]
    found = _parsed(out, [line for line in log if line["what"] == "turn"])
    said += [f"{line['lesson']}.{line['rung']}: {line['why']}" for line in log if line["what"] == "left out"]
    if code or not found:
        lines = [line for line in (out + err).splitlines() if line.startswith(("==ERROR", "==WARNING", "Error"))]
        why = " ".join(lines[:5]) or (out + err)[-600:]
        said.append(f"ncu: exit code {code}, {len(found)} kernels (counters are often an administrator's right): {why}")
    return found, {line["lesson"] for line in log if line["what"] == "done"}


def _parsed(printed: str, turns: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """ncu's list (a line for each kernel and counter, in the order of launches), summed for each turn and kernel."""
    sums: dict[tuple[int, str], dict[str, float]] = {}
    meaning = {name: count for count, names in COUNTERS.items() for name in names}
    turn, last = -1, ""
    for line in csv.DictReader(line for line in printed.splitlines() if line.startswith('"')):
        kernel, new = line["Kernel Name"], line["ID"] != last
        last = line["ID"]
        if MARK in kernel:
            turn += new
        elif (name := base(kernel)) and 0 <= turn < len(turns):
            parts = sums.setdefault((turn, name), {"launches": 0.0})
            parts["launches"] += new
            with suppress(ValueError):  # n/a
                key = meaning[line["Metric Name"]]
                parts[key] = parts.get(key, 0.0) + float(line["Metric Value"].replace(",", ""))
    found = []
    for (at, kernel), parts in sums.items():
        about: dict[str, Any] = {key: turns[at][key] for key in ("lesson", "rung", "case")} | {"kernel": kernel}
        numbers = {key: f"{parts[key]:.0f}" if key in parts else "" for key in ("launches", *COUNTERS)}
        found.append(about | numbers)
    return found


def about() -> str:
    """What the page says above its table."""
    reasons = (
        said(
            "How many loads, stores and launches there are. Grids are as large as the machine, and the emulated one "
            "has 4 SMs. Tiles are smaller in the emulator where a thread costs too much there (11, 12). nvcc merges "
            "loads, hoists them out of a loop or makes them wider, and g++ does not. Waiting loops (09, 12) read as "
            "often as the wait is long."
        ),
        said(
            "Accesses in a short `if` (04). nvcc makes predicated instructions of it. ncu counts one in every warp, "
            "and a wavefront only where a lane takes part. The emulator counts warps in which a lane takes part."
        ),
        said(
            "Wavefronts of shared accesses of 8 and 16 bytes. The emulator serves half and quarter warps one after the "
            "other. The hardware may serve lanes together that want the same words. Shared loads by ldmatrix and "
            "stores by cp.async have counters of their own."
        ),
        said(
            "Sectors where addresses are not multiples of 32 bytes or depend on random inputs: other addresses, other "
            "sectors."
        ),
    )
    head = said(
        "Each rung ran once under Nsight Compute on the check that reports/emulated counts it on, with inputs from "
        "the same distribution. Sums over all launches of a kernel in a rung; ratio: ncu's figure over the "
        "emulator's. What may differ:"
    )
    tail = said("Caches change none of it: a request that the L1 cache answers is counted as any other.")
    return f"{head}\n\n" + "".join(f"- {reason}\n" for reason in reasons) + f"\n{tail}"


def compared(place: Path, only: Sequence[str] = ()) -> list[dict[str, str]]:
    """ncu's rows beside reports/emulated, a line for each lesson, rung, kernel and metric; `only`: of these lessons."""
    found = []
    emulated: dict[str, dict[tuple[str, str], list[dict[str, str]]]] = {}
    for row in read_csv(place):
        name = row["lesson"]
        if only and name not in only:
            continue
        if name not in emulated:
            emulated[name] = {}
            for line in read_csv(rows.REPORTS / "emulated" / f"{name}.csv"):
                emulated[name].setdefault((line["rung"], base(line["kernel"])), []).append(line)
        parts = emulated[name].get((row["rung"], row["kernel"]), [])
        for metric, ours, theirs in _figures(parts, row):
            about = {"lesson": name.rpartition(".")[2], "rung": row["rung"], "kernel": row["kernel"], "metric": metric}
            ratio = f"{theirs / ours:.2f}" if ours else ONLY_NCU
            found.append(about | {"emulated": f"{ours:.6g}", "ncu": f"{theirs:.6g}", "ratio": ratio})
    return found


def _figures(parts: list[dict[str, str]], row: dict[str, str]) -> Iterable[tuple[str, float, float]]:
    """(metric, emulated, ncu) for all that either has counted and both could."""
    if not parts or "loads" not in parts[0]:
        return
    for metric in (*PLAIN, *RATIOS):
        if metric in RATIOS:
            prefixes, above, below = counters.METRICS[metric]
            needed = [f"{prefix}_{end}" for prefix in prefixes for end in (above, below)]
        else:
            needed = [counters.PLAIN[metric]]
        if not all(row[key] for key in needed):
            continue
        weights = [float(part[RATIOS.get(metric, metric)]) for part in parts]
        values = [float(part[metric]) if metric in RATIOS else 1.0 for part in parts]
        total = sum(weights) or 1.0
        ours = sum(w * v for w, v in zip(weights, values, strict=True)) / (total if metric in RATIOS else 1.0)
        numbers = {key: float(row[key]) for key in needed}
        theirs = counters.measured([{"kernel": "", **numbers}], metric)
        if ours or theirs:
            yield metric, ours, theirs


# ---- The driver, run by ncu -----------------------------------------------------------------------------------------


def _arguments(lesson: Lesson, rung: Rung) -> tuple[str, tuple[Any, ...]] | None:
    """The last check that the rung takes. Running it here also builds, loads and sets what is set only once."""
    for case in counters.countable(lesson, rung):
        args = check.truth(lesson, case.shape, lesson.dtypes[0]).args
        try:
            rung(*args)
        except Unsupported:
            continue
        torch.cuda.synchronize()
        return str(case), args
    return None


def _turn(arguments: tuple[Any, ...], rung: Rung) -> None:
    torch.cuda.profiler.start()
    try:
        torch.cuda._sleep(1)  # the mark
        rung(*arguments)
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()


def main(turns: str, *names: str) -> None:
    with Path(turns).open("a", buffering=1) as log:

        def say(what: str, lesson: str, **more: str) -> None:
            log.write(json.dumps({"what": what, "lesson": lesson, **more}) + "\n")

        for name in names:
            lesson: Lesson = importlib.import_module(name).LESSON
            for rung in lesson.rungs:
                faulthandler.dump_traceback_later(RUNG_SECONDS, exit=True)
                try:
                    if found := _arguments(lesson, rung):
                        say("turn", name, rung=rung.__name__, case=found[0])
                        _turn(found[1], rung)
                except Exception as error:  # said, and the others still run
                    say("left out", name, rung=rung.__name__, why=f"{type(error).__name__}: {error}")
                torch.cuda.synchronize()  # after a fault of the GPU nothing runs in this process any more
            say("done", name)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
