"""Roofline: every kernel of the course on one plot
================================================
A kernel's roof is the lower of two: bandwidth times its FLOPs per byte, and the machine's FLOP rate. An H200 does about
800 TFLOP/s in bf16 on 4.2 TB/s, so the two meet at 190 FLOPs per byte, in fp32 (51 TFLOP/s) at 12. Each lesson declares
its work, the least bytes and the FLOPs. So its roof is known before any run:

    softmax     5 FLOPs on 4 bytes                1.25        memory
    matmul n    2 n^3 FLOPs on 6 n^2 bytes        n / 3       memory below n = 570, compute above
    matvec      2 n^2 on 2 n^2 bytes              1           memory, whatever n is
    attention   4 S^2 D on 8 S D bytes            S / 2       compute from S = 380 on

A row is bound in one of four ways:

    memory, compute    at half of its roof or more: only fewer bytes or FLOPs help
    latency            far below both roofs: it waits for a barrier, an atomic, or has too few bytes in flight
    launches           its limit is less than 8 us, so the launch is a large part of the time

New words (GLOSSARY.md): emulated.
You will learn: to place a kernel before you write it, to read how much it can gain, to check counts against counters.
Run it:    python3 course.py run lesson10_roofline      (no kernel runs; the plot is reports/<device>/*roofline*.png)
Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009.
"""

from collections import Counter

from lessonkit import About, Steps, Table, report
from lessonkit.lesson import kernels, shape_name
from lessonkit.measure import ncu
from lessonkit.pages.results import measured
from lessonkit.pages.roofline import roofline

import torch

RIDGE = {torch.float32: 12, torch.float8_e4m3fn: 360}  # FLOPs per byte; 190 in 16 bits


def placed_before_any_run():
    """Most of the course is bound by memory: only large matmuls and attention have enough FLOPs per byte."""
    sides = Counter()
    table = []
    for name, lesson in kernels():
        if not lesson.benches:  # a lesson of traps is not timed
            continue
        shape = lesson.benches[0]
        work = lesson.work(dtype=lesson.bench_dtype, **shape)
        flops_a_byte = work.flops / max(1, work.bytes)
        side = "compute" if flops_a_byte > RIDGE.get(lesson.bench_dtype, 190) else "memory"
        sides[side] += 1
        table.append({"lesson": name.split(".")[1], "shape": shape_name(shape), "MB": round(work.bytes / 1e6, 1),
                      "FLOPs a byte": round(flops_a_byte, 2), "roof": side})  # fmt: skip
    by = {row["lesson"]: row for row in table}
    assert by["lesson05_softmax"]["FLOPs a byte"] == 1.25
    assert by["lesson05_softmax"]["roof"] == "memory"
    assert sides["memory"] > sides["compute"] > 0
    print(f"  {sides['memory']} lessons under the roof of memory, {sides['compute']} under that of arithmetic")
    return Table("placed", table, "From the declared work at the first bench shape; nothing was measured.")


def nothing_is_above_its_roof():
    """No committed row beats a copy of its bytes, or cuBLAS's rate, by more than the error of measurement."""
    checked = 0
    for folder in report.device_folders():
        for _, _, found in measured(folder):
            for row in found:
                # Small outputs stay in L2, although it is flushed before the kernel, so their rows are left out.
                if row.kind != "limit" and row.bytes > 2**27 and row.limited_by_math is False:
                    assert row.percent_of_limit < 115, f"{row.lesson} {row.rung} {row.shape}: {row.percent_of_limit}%"
                    checked += 1
    print(f"  {checked} rows of more than 128 MB, none above its roof" if checked else "  no rows of a GPU yet")


def counters_beside_counts(folder):
    """Nsight Compute's counters beside the emulator's counts without a GPU, by metric."""
    found = ncu.compared(ncu.path(folder))
    table = []
    for metric in dict.fromkeys(row["metric"] for row in found):
        ratios = sorted(float(row["ratio"]) for row in found if row["metric"] == metric and row["ratio"][0].isdigit())
        if ratios:
            same = sum(abs(ratio - 1) <= 0.005 for ratio in ratios)
            table.append({"metric": metric, "kernels": len(ratios), "the same": same,
                          "median ratio": f"{ratios[len(ratios) // 2]:.2f}", "least": f"{ratios[0]:.2f}",
                          "most": f"{ratios[-1]:.2f}"})  # fmt: skip
    note = "ncu over the emulator; each kernel, and why some differ, on the page [ncu.md](ncu.md)."
    return Table("counters beside counts", table, note) if table else None


LESSON = Steps(
    about=About(
        teaches="every kernel of the course under both roofs; bound by memory, compute, latency or launches; "
        "counters beside counts",
        hours=0.5,
        star=True,
        pictures=("roofline",),
    ),
    steps=(placed_before_any_run, nothing_is_above_its_roof),
    compares=(roofline, counters_beside_counts),
)

if __name__ == "__main__":
    LESSON.main()
