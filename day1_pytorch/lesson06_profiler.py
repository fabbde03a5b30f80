"""Profiling: what takes the time, and which limit it meets
=======================================================
A transformer block of width D, on T tokens, needs 24 D^2 FLOPs per token in its linear layers and 4 T D in attention.
At T = D attention has a seventh of the FLOPs. But naive attention moves a [T, T] matrix for each head four times, which
is more than half of the bytes. A profiler shows which operators take the time. Only counted FLOPs and bytes explain it:
an operator cannot be faster than its roof, max(FLOPs / FLOP rate, bytes / bandwidth), and the larger of the two is its
limit. They are equal at the ridge, where FLOPs / bytes is FLOP rate / bandwidth.

You will learn: to read torch.profiler (record_function, self and total time, schedules, traces), and to count FLOPs and
bytes. You will test a roofline verdict by experiment, and know the first commands of Nsight Systems and Nsight Compute.
Run it:    python3 course.py run lesson06_profiler
Trace:     reports/traces/<device>.json (ui.perfetto.dev, chrome://tracing)
"""

import csv
import json
import shutil
import subprocess
import sys
from collections import Counter

from lessonkit import DEVICE, About, Steps, Table, device, timing
from lessonkit.base.files import ROOT

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode, flop_registry

GPU = DEVICE.type == "cuda"
# On a GPU every activation (134 MB and more) is larger than the L2 cache, so that bytes counted are bytes moved.
B, T, D, H = (16, 2048, 2048, 16) if GPU else (1, 512, 256, 8)
STEPS = 5
DTYPE = torch.bfloat16 if GPU else torch.float32
ACTIVITIES = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * GPU


class _Block(nn.Module):
    """x [B, T, D] -> [B, T, D]: attention with H heads, then an MLP, each added to its input."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.project = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.widen, self.narrow = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        with record_function("attention"):  # a name in every table and trace; costs a microsecond
            x = x + self.project(self.attention(self.norm1(x)))
        with record_function("mlp"):
            return x + self.narrow(F.gelu(self.widen(self.norm2(x))))

    def attention(self, x):
        q, k, v = self.qkv(x).view(B, T, 3, H, D // H).permute(2, 0, 3, 1, 4).reshape(3, B * H, T, D // H)
        scores = (q * (D // H) ** -0.5) @ k.transpose(1, 2)  # [B * H, T, T], written; then read and written
        return (scores.softmax(-1) @ v).view(B, H, T, D // H).transpose(1, 2).reshape(B, T, D)  # and read again


def _block():
    torch.manual_seed(0)
    with DEVICE:  # what is made here is made there
        return _Block().to(DTYPE), torch.randn(B, T, D).to(DTYPE)


def _profile():
    """The profile of STEPS forwards after a warm-up."""
    block, x = _block()
    with torch.no_grad():
        block(x)  # the first call loads kernels and plans matmuls
        with profile(activities=ACTIVITIES) as seen:
            for _ in range(STEPS):
                block(x)
            if GPU:
                torch.cuda.synchronize()  # a GPU works on after the last call has returned
    return seen


def _host_events(seen):
    """The calls, with the host's time; the GPU's work is in other events."""
    return [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CPU]


def nesting():
    """An operator's total time holds its callees', so totals count twice; self times add up to the whole, once."""
    events = _host_events(_profile())
    outermost = sum(e.cpu_time_total for e in events if e.cpu_parent is None)
    assert abs(sum(e.self_cpu_time_total for e in events) - outermost) < 0.01 * outermost
    # A linear alone is three deep (linear, t, addmm), so the inner calls are counted again and again.
    assert sum(e.cpu_time_total for e in events) > 1.1 * outermost
    count = Counter(e.name for e in events)
    assert count["attention"] == count["mlp"] == STEPS
    assert count["aten::addmm"] == 4 * STEPS, "every linear ends in one addmm"


def scheduled():
    """schedule(wait, warmup, active) records 2 of 6 steps: it profiles the middle of a long training at low cost."""
    block, x = _block()
    ready = []
    plan = schedule(
        wait=1, warmup=1, active=2, repeat=1
    )  # warmup: profiling is on but thrown away, since it starts slow
    with torch.no_grad(), profile(activities=ACTIVITIES, schedule=plan, on_trace_ready=ready.append) as seen:
        for _ in range(6):
            block(x)
            seen.step()  # tells the schedule that a step is over
    assert len(ready) == 1
    assert Counter(e.name for e in _host_events(seen))["mlp"] == 2


def trace():
    """A trace is JSON with a start and a length for every call: operators lie inside the label that ran them."""
    seen = _profile()
    path = ROOT / "reports" / "traces" / f"{device.name()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # profile(..., with_stack=True) also records the line of Python behind each operator, at more time on the host.
    seen.export_chrome_trace(str(path))
    spans = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    label = next(e for e in spans if e["name"] == "mlp" and e["cat"] == "user_annotation")
    inside = [e["name"] for e in spans if label["ts"] <= e["ts"] <= e["ts"] + e["dur"] <= label["ts"] + label["dur"]]
    assert "aten::gelu" in inside
    assert "aten::bmm" not in inside, "that is attention's"
    assert any(e.get("cat") == "kernel" for e in spans) == GPU  # a second row, later than the calls: the GPU's own time
    print(f"  {len(spans)} spans in {path}: open it in ui.perfetto.dev")


# ---- Why: FLOPs, bytes, and the roof ------------------------------------------------------------------------------


def _bytes(tensors):
    """What an operator must move: each tensor once; a dimension of stride 0 was repeated for free."""
    return sum(
        t.element_size() * torch.Size(n for n, s in zip(t.shape, t.stride(), strict=True) if s).numel()
        for t in tensors
        if isinstance(t, torch.Tensor)
    )


class _Counter(TorchDispatchMode):
    """Work of every operator by the profiler's name for it; views and allocations do none."""

    namespaces = ("aten",)

    def __init__(self, flop_rate, bandwidth):
        super().__init__()
        self.flop_rate, self.bandwidth, self.work = flop_rate, bandwidth, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace in self.namespaces and not func.is_view and func._opname not in ("empty", "_unsafe_view"):
            # Only matmuls count FLOPs here: an exp takes time too, but elementwise operators wait for their bytes.
            count = flop_registry.get(func._overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
            moved = _bytes(tree_leaves((args, kwargs, out)))
            roof = max(flops / self.flop_rate, moved / self.bandwidth)  # seconds
            self.work.setdefault(func._schema.name, Counter()).update(calls=1, flops=flops, bytes=moved, roof=roof)
        return out


def _counted(flop_rate=1.0, bandwidth=1.0):
    block, x = _block()
    with torch.no_grad(), _Counter(flop_rate, bandwidth) as counter:
        block(x)
    return counter.work


def counting():
    """FLOPs are as the formula says; the T x T scores are under 30% of them and over half of the bytes."""
    block, x = _block()
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        block(x)
    # qkv 6 D^2, project 2 D^2, widen and narrow 8 D^2 each; QK^T and PV 2 T D each: all for B T tokens.
    assert flops.get_total_flops() == B * T * (24 * D * D + 4 * T * D)
    work = _counted()
    assert sum(w["flops"] for w in work.values()) == flops.get_total_flops()
    scores = 4 * B * H * T * T * DTYPE.itemsize
    assert scores > sum(w["bytes"] for w in work.values()) / 2
    assert work["aten::bmm"]["flops"] < 0.3 * flops.get_total_flops()
    # So attention's time is that of the matrix's bytes. The result does not need the matrix: day 4 never writes it.


def _seconds(statement, **names):
    timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=0.1).times)


def _limits():
    """(FLOP/s, bytes/s) of this machine at its best. A CPU's caches hold these tensors, so it copies one as large."""
    if GPU:
        limits = timing.limits()
        return limits.matmul["bf16"], limits.copy
    a, b, large = torch.randn(512, 512), torch.randn(512, 512), torch.randn(H * T * T)
    copy = _seconds("y.copy_(x)", x=large, y=torch.empty_like(large))
    return 2 * 512**3 / _seconds("a @ b", a=a, b=b), 2 * large.nbytes / copy


def _limit(flops, moved, flop_rate, bandwidth):
    """The roofline's verdict: which of the two limits takes longer."""
    return "compute" if flops / flop_rate > moved / bandwidth else "memory"


def roofline():
    """No operator is far above its roof; on a GPU each with 5% of the time or more reaches 30% of its roof."""
    limits = flop_rate, bandwidth = _limits()
    print(f"  {flop_rate / 1e12:.3g} TFLOP/s, {bandwidth / 1e12:.3g} TB/s: ridge {flop_rate / bandwidth:.3g} FLOP/byte")
    work, seen = _counted(*limits), _host_events(_profile())
    seconds = {}
    for name, w in work.items():
        times = [e.device_time_total if GPU else e.cpu_time_total for e in seen if e.name == name]
        assert len(times) == STEPS * w["calls"], f"{name}: what was counted is not what was profiled"
        # The best step: a disturbance can only make a step slower.
        seconds[name] = min(map(sum, zip(*[iter(times)] * w["calls"], strict=True))) * 1e-6
    rows = []
    for name in sorted(work, key=seconds.get, reverse=True):
        s, (calls, flops, moved, roof) = seconds[name], (work[name][k] for k in ("calls", "flops", "bytes", "roof"))
        share = s / sum(seconds.values())
        row = {"where": device.name(), "operator": name, "calls": calls, "ms": f"{s * 1e3:.3g}", "time": f"{share:.0%}"}
        row |= {"MFLOP": round(flops / 1e6), "MB": f"{moved / 1e6:.1f}", "FLOP/byte": f"{flops / moved:.3g}"}
        rows.append(row | {"limit": _limit(flops, moved, *limits), "of roof": f"{roof / s:.0%}"})
        if GPU:  # a CPU's cores are shared, so its times are shown and not asserted
            assert roof < 1.5 * s, row  # 1.5: some of an input may still lie in the L2
            assert roof > 0.3 * s or share < 0.05, row  # every operator with 5% of the time is near its limit
    note = (
        "Sorted by time. limit: the larger of FLOPs / FLOP rate and bytes / bandwidth; of roof: that over the time. "
        "What waits for memory gains from fusion and smaller dtypes, what computes from tensor cores and fewer "
        "FLOPs, and what is far from its roof from a better kernel or more work at once."
    )
    return Table("operators", rows, note)


def experiment():
    """The clock agrees: 4 times the rows take a compute-bound linear 4 times as long, a memory-bound one no longer."""
    n, few, many = (8192, 2, 4096) if GPU else (2048, 2, 256)
    weight, limits, growth = torch.randn(n, n, device=DEVICE).to(DTYPE), _limits(), {}
    for rows in (few, many):
        x = torch.randn(4 * rows, n, device=DEVICE).to(DTYPE)
        times = [[_seconds("F.linear(x, w)", F=F, x=part, w=weight) for part in (x[:rows], x)] for _ in range(3)]
        once, four = map(min, zip(*times, strict=True))
        growth[rows] = four / once
        counted = _limit(2 * 4 * rows * n * n, _bytes([x, weight, x]), *limits)
        print(f"  {rows} -> {4 * rows} rows: {growth[rows]:.2f} times, counted as {counted}-bound")
        # This measures times and counts nothing. (A CPU core is balanced near 1 FLOP per byte: 8 rows make 4.)
        assert not GPU or counted == ("compute" if growth[rows] > 2.5 else "memory")
    assert not GPU or growth[few] < growth[many]


# ---- Deeper: Nsight -----------------------------------------------------------------------------------------------
# Nsight Systems shows the whole program on one timeline. In gaps between kernels the GPU waits for the host. NVTX adds
# labels:
#     with torch.autograd.profiler.emit_nvtx(): ...
#     nsys profile --trace cuda,nvtx,osrt --output block python SCRIPT.py    then open block.nsys-rep
# Nsight Compute replays one kernel some 40 times to read every counter.
#     ncu --set full --kernel-name regex:gelu --launch-count 1 --export gelu python SCRIPT.py
# Read its sections in this order:
# - Speed of Light: memory or compute, in % of peak.
# - Memory Workload: the bytes, against those that you counted. Sectors per request: 4 is perfect for a warp's 4-byte
#   loads.
# - Warp State: what warps wait for. "Long scoreboard": memory. "Math pipe throttle": busy arithmetic units. "Barrier":
#   other warps.
# - Occupancy: whether registers or shared memory limit it.
# - Source: which line.
COUNTERS = (
    "dram__bytes_read.sum",  # the kernel's own traffic, to compare with the count
    "dram__bytes_write.sum",  # less than the count: the last megabytes are still in L2 when the kernel ends
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",  # 80 and more: memory-bound
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",  # 80 and more: compute-bound
)
GELU = "import torch; torch.nn.functional.gelu(torch.randn(2**26, device='cuda', dtype=torch.bfloat16))"


def hardware_counters():
    """The memory controllers agree with our count: GELU of 2^26 bf16 reads 134.2 MB. The SMs are busy as well.

    PyTorch's exact GELU computes erf in about 20 instructions, which no FLOP count shows.
    """
    command = ["ncu", "--csv", "--print-units", "base", "--clock-control", "none", "--metrics", ",".join(COUNTERS)]
    command += ["--kernel-name", "regex:vectorized_elementwise", "--launch-count", "1", sys.executable, "-c", GELU]
    if not (GPU and shutil.which("ncu")):
        print("  needs a GPU and Nsight Compute (ncu); the command is in the source")
        return
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or len(lines) < 2:
        print(f"  ncu could not count (counters are often an administrator's right): {done.stdout[-300:]}")
        return
    found = {row["Metric Name"]: float(row["Metric Value"].replace(",", "")) for row in csv.DictReader(lines)}
    read, _, memory, compute = (found[name] for name in COUNTERS)
    print(f"  read {read / 1e6:.1f} MB; memory at {memory:.0f}% of its peak, arithmetic at {compute:.0f}%")
    assert abs(read / (2 * 2**26) - 1) < 0.05
    assert max(memory, compute) > 50  # at least one unit is the limit


LESSON = Steps(
    (nesting, scheduled, trace, counting, roofline, experiment, hardware_counters),
    about=About(
        teaches="`torch.profiler`: which operators take the time, and which limit each of them meets; traces; on "
        "to Nsight",
        hours=0.75,
        pictures=("roofline",),
    ),
    alone=GPU,
)

if __name__ == "__main__":
    LESSON.main()
