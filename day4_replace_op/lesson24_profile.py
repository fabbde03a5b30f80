"""The profiling report: before and after, and what each kernel waits for
=====================================================================
Four views of one training step, with PyTorch's operators and with ours. Each answers another question:

    kernels        what ran, how often, for how long                torch.profiler's averages
    roofline       how long it had to take, from FLOPs and bytes    lesson 16's count, the machine's measured limits
    counters       what it waited for                               Nsight Compute: HBM traffic, and how busy memory
                                                                    and arithmetic were
    time and       in which part of the model, and when memory      lesson 25: trace, flame graph, memory timeline
    memory

Predicted with the fused operators: each one that waits for memory reaches 70% of its roof or more. No kernel in the
list only casts or copies an [M, V] or adds to an [M, D]. Above 5% of the time remain matmuls, attention and AdamW.

The roofline (Williams, Waterman and Patterson, 2009): an operator of F FLOPs on B bytes takes at least max(F / rate,
B / bandwidth). A kernel that waits for memory may count its FLOPs in several ways. With log axes another count moves it
along the slanted roof, and its distance to the roof stays the same. So such kernels count one FLOP for four bytes here.

New words (GLOSSARY.md): roofline.
You will learn: to combine four views, a roofline of a whole step, Nsight Compute on the command line.
Run it:    python3 course.py run lesson24_profile
Without a GPU all times are a CPU's, and ours are the interpreter's: they show the views, not the speed.
"""

import csv
import re
import sys
from collections import defaultdict
from dataclasses import replace

from lessonkit import About, Steps, Table, Unsupported, device, plots, rows
from lessonkit.base.tables import digits
from lessonkit.measure import ncu
from lessonkit.measure.profiled_operators import ACTIVITIES, limit, limits, operators

import torch
from torch.profiler import profile

from course_ops.testing import kernels as run_kernels
from workloads.gpt import CONFIG, GPU, SMALL, batches, make, stepper, variant

COMPARED = ("PyTorch", "fused")


def each_variant(config=CONFIG, names=COMPARED):
    """(name, run()) for a training step with PyTorch's operators and with ours, each after a warm-up."""
    batch = next(batches(config, 1))
    for name in names:
        model = make(config)
        with run_kernels(), variant(model, name):
            step = stepper(model)
            step(*batch)
            yield name, lambda step=step: step(*batch)
        del model, step


def kernels():
    """Fused, a step launches fewer kernels; each kernel by its time, before and after."""
    table, launches = [], {}
    for name, run in each_variant():
        with profile(activities=ACTIVITIES) as seen:
            run()
            if GPU:
                torch.cuda.synchronize()
        kind = torch.autograd.DeviceType.CUDA if GPU else torch.autograd.DeviceType.CPU
        ms = {
            e.key: ((e.self_device_time_total if GPU else e.self_cpu_time_total) * 1e-3, e.count)
            for e in seen.key_averages()
            if e.device_type == kind and not e.is_user_annotation
        }
        launches[name], total = sum(count for _, count in ms.values()), sum(t for t, _ in ms.values())
        for key, (t, count) in sorted(ms.items(), key=lambda item: -item[1][0])[:15]:
            row = {"where": device.name(), "operators": name, "kernel": _short(key), "launches": count}
            table.append(row | {"ms": round(t, 3), "time": f"{t / total:.1%}"})
    assert not GPU or launches["fused"] < launches["PyTorch"]
    note = "Kernels of a GPU" if GPU else "No GPU: the CPU's time in operators; ours are interpreted, so it is Python's"
    return Table("kernels", table, f"{note}. In all {launches['PyTorch']} calls before, {launches['fused']} after.")


def _short(kernel):
    """A kernel's name without namespaces and arguments; PyTorch's keep the template arguments that tell them apart."""
    bare = re.sub(r"\b(at|native|cuda)::|\(anonymous namespace\)::|^void ", "", kernel)
    return bare.partition("(")[0].translate(str.maketrans("<>|", "[]/"))[:80]


def roofline():
    """Every operator's counted FLOPs and bytes, its measured time, its limit, and the share of that limit."""
    rate, bandwidth = limits()
    table = []
    for name, run in each_variant():
        for row in operators(run, steps=3 if GPU else 1)[:14]:
            flops, moved, ms = row["GFLOP"] * 1e9, row["MB"] * 1e6, row["ms"]
            if not (moved and ms):
                continue
            new = {
                "where": row["where"],
                "operators": name,
                "operator": row["operator"],
                "calls": row["calls"],
                "ms": ms,
            }
            new |= {"FLOP/byte": digits(max(flops, moved / 4) / moved), "TB/s": digits(moved / ms * 1e-9)}
            new |= {"TFLOP/s": digits(flops / ms * 1e-9), "limit": limit(flops, moved, rate, bandwidth)}
            table.append(new | {"of roof": f"{row['roof ms'] / ms:.0%}"})
    picture = f"{__name__}.roofline_of_operators.png"
    rows.write_atomically(rows.REPORTS / device.name() / picture, _drawn(table, rate, bandwidth))
    note = (
        f"Roofs of this machine: {rate / 1e12:.3g} TFLOP/s, {bandwidth / 1e12:.3g} TB/s. Of PyTorch's "
        "attention masked FLOPs are counted too, so it may stand at twice its place; of what is made of several "
        "kernels (the loss) only "
        "what goes in and comes out is counted. Past 100%: L2 still held what the operator before had written.\n\n"
        f"![roofline of the step]({picture})"
    )
    return Table("roofline", table, note)


def _drawn(table, rate, bandwidth):
    """The roofline as PNG: operators by FLOP/byte and FLOP/s, PyTorch's as crosses, ours as dots."""

    def draw(axes):
        span = [0.1, rate / bandwidth, 1e4]
        axes.plot(span, [min(x * bandwidth, rate) / 1e12 for x in span], ":k", label="roof")
        for name, mark in zip(COMPARED, "xo", strict=True):
            mine = [row for row in table if row["operators"] == name]
            at = [(row["FLOP/byte"], max(row["TFLOP/s"], row["TB/s"] / 4)) for row in mine]
            axes.plot(*zip(*at, strict=True), mark, label=name, alpha=0.7)
            for row, place in zip(mine[:8], at, strict=False):
                label = row["operator"].split("::")[1][:24]
                axes.annotate(label, place, textcoords="offset points", xytext=(4, -3), fontsize=6)
        axes.set(xscale="log", yscale="log", xlabel="FLOPs for each byte", ylabel="TFLOP/s", title=device.name())
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)

    return plots.plot(draw, table).png()


# ---- Nsight Compute -----------------------------------------------------------------------------------------------
# By hand, for one kernel and all of ncu's sections:
#     ncu --set full --kernel-name regex:add_norm --launch-count 1 --export add_norm \
#         .venv/bin/python -m day4_replace_op.lesson24_profile fused
METRICS = {
    "gpu__time_duration.sum": "ns",
    "dram__bytes_read.sum": "MB read",
    "dram__bytes_write.sum": "MB written",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory %",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "SM %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps %",
}


def read_ncu(printed):
    """ncu's CSV, a line for each launch and metric -> a row for each kernel: sums, and shares weighed by time."""
    launches = defaultdict(dict)
    for line in csv.DictReader(line for line in printed.splitlines() if line.startswith('"')):
        if (name := METRICS.get(line["Metric Name"])) and line["Metric Value"] != "n/a":
            launches[line["ID"], _short(line["Kernel Name"])][name] = float(line["Metric Value"].replace(",", ""))
    found = defaultdict(list)
    for (_, kernel), values in launches.items():
        if len(values) == len(METRICS):
            found[kernel].append(values)
    table = []
    for kernel, parts in found.items():
        time = sum(p["ns"] for p in parts)
        row = {"kernel": kernel, "launches": len(parts), "us": round(time / 1e3, 1)}
        row |= {name: round(sum(p[name] for p in parts) / 1e6, 1) for name in ("MB read", "MB written")}
        row |= {n: round(sum(p[n] * p["ns"] for p in parts) / time, 1) for n in ("memory %", "SM %", "warps %")}
        table.append(row | {"waits for": verdict(row["memory %"], row["SM %"])})
    return sorted(table, key=lambda row: -row["us"])


def verdict(memory, arithmetic):
    """What a kernel waits for: memory or the SMs, whichever is busier in % of its peak, or neither."""
    if max(memory, arithmetic) < 60:
        return "latency: neither is busy; more bytes or products in flight"
    return "memory" if memory >= arithmetic else "compute"


def counters():
    """Nsight Compute's verdict on each kernel of a step of one layer of GPT-2 small: memory, compute, or neither."""
    if not GPU or not ncu.find("ncu"):
        raise Unsupported("counters need a GPU and Nsight Compute (ncu, with the CUDA toolkit); committed: reports/")
    table = []
    for name in COMPARED:
        command = [ncu.find("ncu"), "--csv", "--print-units", "base", "--clock-control", "none"]
        command += ["--cache-control", "none", "--profile-from-start", "off", "--metrics", ",".join(METRICS)]
        code, out, err = ncu.output([*command, sys.executable, "-m", __name__, name], 240)
        found = read_ncu(out)
        if code or not found:
            raise Unsupported(f"ncu says {(out + err)[-300:]!r}: reading counters is often an administrator's right")
        total = sum(row["us"] for row in found)
        table += [{"operators": name, **row, "time": f"{row['us'] / total:.1%}"} for row in found[:16]]
    note = (
        "One layer of GPT-2 small, 32 x 1024 tokens. Read us first, then what it waits for; MB beside the count above: "
        "more is data read twice, less was still in the L2 cache. The SMs' share counts their busiest unit."
    )
    return Table("counters", table, note)


def _step_for_ncu(name):
    for _, run in each_variant(replace(SMALL, layers=1), (name,)):
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


# The answers, from the rows of an H200: the fused norms reach 92% and 97% of their roof. PyTorch's `stack`, `clone`,
# `sum` and `_to_copy` are left, at 25% to 40%. Above 5% of the time are matmuls, attention, and the stack of dq, dk and
# dv (5.6%), which the prediction forgot. AdamW takes 1.6%.
LESSON = Steps(
    (kernels, roofline, counters),
    about=About(
        teaches="kernels before and after, a roofline of the whole step, Nsight Compute's verdict",
        hours=1,
        star=True,
    ),
    alone=GPU,
)

if __name__ == "__main__":
    _step_for_ncu(sys.argv[1]) if len(sys.argv) > 1 else LESSON.main()
