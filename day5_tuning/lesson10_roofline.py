"""Roofline: every kernel of the course on one plot
================================================
A kernel's roof is the lower of two: bandwidth times its FLOPs a byte, and the machine's FLOP rate. An H200 does about
800 TFLOP/s in bf16 on 4.2 TB/s: the two meet at 190 FLOPs a byte, in fp32 (51 TFLOP/s) at 12. From the work that each
lesson declares (the least bytes, the FLOPs) it is known before any run under which roof it stands:

    softmax     5 FLOPs on 4 bytes                1.25        memory
    matmul n    2 n^3 FLOPs on 6 n^2 bytes        n / 3       memory below n = 570, compute above
    matvec      2 n^2 on 2 n^2 bytes              1           memory, whatever n is
    attention   4 S^2 D on 8 S D bytes            S / 2       compute from S = 380 on

Where it then is tells four stories. At half of its roof or more it is bound by memory or by compute, and only fewer
bytes or FLOPs help; far below both it waits (for a neighbour, a barrier, an atomic, too few bytes in flight): bound by
latency; and where even its limit is less than 8 us, starting it is what takes the time: bound by launches.

You will learn: to place a kernel before you write it, to read what is left to win, to check counts against counters.
Run it:    python day5_tuning/lesson10_roofline.py      (no kernel runs; the plot is reports/<device>/*roofline*.png)
Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009.
"""

from collections import Counter

from lessonkit import About, Steps, Table, report
from lessonkit.lesson import kernels, shape_name
from lessonkit.measure import ncu
from lessonkit.pages.results import measured
from lessonkit.pages.roofline import roofline

import torch

RIDGE = {torch.float32: 12, torch.float8_e4m3fn: 360}  # FLOPs a byte; 190 in 16 bits


def placed_before_any_run():
    """Most of the course is bound by memory: only products of large matrices and attention have FLOPs enough."""
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
    """No committed row beats a copy of its bytes, or cuBLAS's rate, by more than measuring is off by."""
    checked = 0
    for folder in report.device_folders():
        for _, _, found in measured(folder):
            for row in found:
                # Small tensors stay in L2 whatever is flushed: what a kernel wrote is read back by nobody.
                if row.kind != "limit" and row.bytes > 2**27 and row.limited_by_math is False:
                    assert row.percent_of_limit < 115, f"{row.lesson} {row.rung} {row.shape}: {row.percent_of_limit}%"
                    checked += 1
    print(f"  {checked} rows of more than 128 MB, none above its roof" if checked else "  no rows of a GPU yet")


def counters_beside_counts(folder):
    """What Nsight Compute read from the GPU's counters, beside what the emulator counted without one, by metric."""
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
    ),
    steps=(placed_before_any_run, nothing_is_above_its_roof),
    compares=(roofline, counters_beside_counts),
)

if __name__ == "__main__":
    LESSON.main()
