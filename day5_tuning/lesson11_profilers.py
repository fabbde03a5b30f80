"""Profilers: four of them, one kernel
====================================
Each tool answers another question, at another price. All look at the same work here: softmax of 8192 x 8192 in bf16,
ten times, 268 MB each, about 67 us (predicted in lesson06_tuning).

    tool             answers                                    sees                           price
    torch.profiler   which operator of my model takes the time  operators, kernels, memory     some % of the host's time
    Nsight Systems   do host and GPU wait for each other        host, copies, kernels, gaps    a few %; needs nsys
    Nsight Compute   why is this kernel slow                    every counter of one kernel    replays it some 40 times
    Proton           which part of my Triton code               kernels by your own scopes     a few %; Triton has it

None of them knows the least time that a kernel could take. Compare their figures with bytes and FLOPs that you count.

You will learn: which profiler to use first, the commands, and to read a figure from each without opening a window. The
order is torch.profiler, then Systems for gaps, then Compute for one kernel.
Run it:    python3 course.py run lesson11_profilers
By hand:   nsys profile --trace cuda,nvtx --output softmax .venv/bin/python day5_tuning/lesson11_profilers.py work
           ncu --set full --kernel-name regex:softmax --launch-count 1 --export softmax python ... work
           proton --name softmax day5_tuning/lesson11_profilers.py work; proton-viewer -m time/ns,count softmax.hatchet
"""

import csv
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from lessonkit import DEVICE, About, Steps, Table, specimen
from lessonkit.base.device import HAS_GPU
from lessonkit.base.files import environment
from lessonkit.measure import ncu

import torch
from torch.profiler import ProfilerActivity, profile, record_function

softmax_packed = specimen("day2_triton_basics.lesson16_rows_of_any_length", "softmax_packed")
M, N, CALLS = (8192, 8192, 10) if HAS_GPU else (32, 64, 3)
MOVED = 2 * M * N * 2  # bytes: in and out, bf16
SELF = "from day5_tuning import lesson11_profilers as lesson; lesson."


def _softmax_calls():
    """The work that all four profile, under a label for the tools that show labels."""
    x = torch.randn(M, N, device=DEVICE).bfloat16()
    softmax_packed(x)  # compiles: an eleventh call, which a profiler of the whole function counts too
    with record_function("ten softmaxes"):
        for _ in range(CALLS):
            softmax_packed(x)
    if HAS_GPU:
        torch.cuda.synchronize()


def _run(*command):
    """The output of another process, which runs in a folder of its own and can import this course."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=folder, timeout=240)
        files = {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.suffix == ".hatchet"}
    return done, files


def torch_profiler():
    """torch.profiler: operators and labels on the host; a Triton kernel only where it runs, on a GPU, by its name."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * HAS_GPU
    with profile(activities=activities) as seen:
        _softmax_calls()
    events = {e.key: e for e in seen.key_averages()}
    assert events["ten softmaxes"].count == 1
    assert events["aten::empty"].count >= CALLS  # the outputs, which the wrapper allocates on the host
    kernels = [e for e in events.values() if "softmax_packed_kernel" in e.key]
    assert bool(kernels) == HAS_GPU  # an interpreted kernel runs in NumPy, which PyTorch's profiler does not see
    if not kernels:
        print(f"  {len(events)} kinds of events, none of them a kernel: no GPU ran one")
        return None
    us = kernels[0].device_time_total / kernels[0].count
    return _said("torch profiler", us, f"{kernels[0].count} calls of {kernels[0].key}; no counters")


def _said(tool, us, what):
    rate = f"{MOVED / us * 1e-6:.2f}" if us else ""
    return Table(tool, [{"tool": tool, "us a call": round(us, 1), "TB/s of counted bytes": rate, "also": what}])


def proton():
    """Proton: kernels under the scopes that you open, with the bytes and FLOPs that you give them."""
    if not HAS_GPU:
        print("  needs a GPU: Proton listens to CUDA's own tracing (CUPTI). Its scopes and metrics are in the source.")
        return None
    done, files = _run(sys.executable, "-c", f"{SELF}_under_proton()")
    if done.returncode or not files:
        print(f"  Proton did not run here: {(done.stderr or done.stdout).strip()[-300:]}")
        return None
    (tree,) = (json.loads(content) for content in files.values())
    found = [node for node in _nodes(tree[0]) if "softmax" in node["frame"]["name"]]
    metrics = next((node["metrics"] for node in found if "time (ns)" in node["metrics"]), None)
    if not metrics:
        print(f"  Proton saw no kernel: {str(tree)[:300]}")
        return None
    us = metrics["time (ns)"] / metrics["count"] / 1e3
    return _said("Proton", us, f"{metrics['count']} calls, under the scope 'softmax' with its bytes")


def _under_proton():
    import triton.profiler as proton_of_triton

    x = torch.randn(M, N, device=DEVICE).bfloat16()
    softmax_packed(x)
    proton_of_triton.start("softmax", hook="triton")
    for _ in range(CALLS):
        with proton_of_triton.scope("softmax", {"bytes": MOVED, "flops": 5 * M * N}):
            softmax_packed(x)
    torch.cuda.synchronize()
    proton_of_triton.finalize()  # writes softmax.hatchet: a tree of frames as JSON


def _nodes(node):
    yield node
    for child in node.get("children", []):
        yield from _nodes(child)


COUNTERS = {
    "gpu__time_duration.sum": "ns",
    "dram__bytes_read.sum": "bytes from memory",
    "dram__bytes_write.sum": "bytes to memory",
    "lts__t_bytes.sum": "bytes through L2",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "% of warps resident",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "% of the SMs' peak",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "% of memory's peak",
}


def nsight_compute():
    """Nsight Compute, the counters of one launch: 134 MB read, as counted; less written, since L2 keeps some.

    --clock-control none keeps the clocks as they are; by default ncu lowers them, and times are longer than yours.
    """
    binary = ncu.find("ncu")
    if not (HAS_GPU and binary):
        print("  needs a GPU and ncu; the command is at the top of this file")
        return None
    command = [binary, "--csv", "--print-units", "base", "--clock-control", "none", "--metrics", ",".join(COUNTERS)]
    command += ["--kernel-name", "regex:softmax_packed", "--launch-skip", "1", "--launch-count", "1"]
    done, _ = _run(*command, sys.executable, "-c", f"{SELF}_softmax_calls()")
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or len(lines) < 2:
        print(f"  ncu could not count (counters are often an administrator's right): {done.stdout[-300:]}")
        return None
    found = {row["Metric Name"]: float(row["Metric Value"].replace(",", "")) for row in csv.DictReader(lines)}
    assert abs(found["dram__bytes_read.sum"] / (MOVED / 2) - 1) < 0.05
    table = [{"counter": name, "value": f"{found[name]:.4g}", "which is": what} for name, what in COUNTERS.items()]
    return Table("Nsight Compute", table, f"One launch; counted by hand: {MOVED / 2:.4g} bytes each way.")


def nsight_systems():
    """Nsight Systems: one timeline of host and GPU; it alone shows gaps between kernels, which are the host's time."""
    nsys = ncu.find("nsys")
    if not (HAS_GPU and nsys):
        print("  needs a GPU and nsys; the command is at the top of this file")
        return None
    command = [
        nsys,
        "profile",
        "--trace",
        "cuda,nvtx",
        "--stats",
        "true",
        "--force-overwrite",
        "true",
        "--output",
        "out",
    ]
    done, _ = _run(*command, sys.executable, "-c", f"{SELF}_softmax_calls()")
    line = next((line for line in done.stdout.splitlines() if "softmax_packed" in line), "")
    numbers = re.findall(r"[\d,.]+", line)
    if len(numbers) < 4:
        print(f"  nsys said nothing of the kernel: {(done.stderr or done.stdout).strip()[-300:]}")
        return None
    share, total, count, mean = (float(n.replace(",", "")) for n in numbers[:4])
    return _said(
        "Nsight Systems", mean / 1e3, f"{count:.0f} calls, {share:.0f}% of the kernels' time, {total / 1e6:.2f} ms"
    )


def what_they_need():
    """Which of the four are installed, and the command of each."""
    by_hand = (__doc__ or "").split("By hand:")[1]
    binaries = {"torch.profiler": "", "Nsight Systems": "nsys", "Nsight Compute": "ncu", "Proton": "proton"}
    table = []
    for tool, binary in binaries.items():
        assert binary in by_hand
        here = bool(ncu.find(binary)) if binary in ("nsys", "ncu") else True
        table.append({"tool": tool, "command": binary or "-", "here": "yes" if here else "no"})
    return Table("tools", table, "Nsight comes with the CUDA toolkit, Proton with Triton (viewer: llnl-hatchet).")


LESSON = Steps(
    about=About(
        teaches="torch.profiler, Nsight Systems, Nsight Compute, Proton on one kernel: what each can see",
        hours=0.75,
    ),
    steps=(torch_profiler, proton, nsight_compute, nsight_systems, what_they_need),
    alone=HAS_GPU,
)

if __name__ == "__main__":
    _softmax_calls() if sys.argv[1:] == ["work"] else LESSON.main()
