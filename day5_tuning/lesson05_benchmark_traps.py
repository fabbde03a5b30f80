"""Benchmark traps: eight ways to time something else
===================================================
A time means little unless the other conditions were held constant. Each step here times one thing twice, once with a
mistake that is common in published tables, and asserts how large the effect is. Some steps need no GPU: they use the
noise of the rows under reports/, bits, or the host's own clock. The others run on a GPU; elsewhere they print their
committed table, or one line that says what is missing.

Predict before you run: an H200 has 60 MB of L2 and 4.2 TB/s of memory. By what factor does softmax of 4096 x 1024 in
bf16 (16.8 MB in and out) look faster if you forget to flush? How many timings does a difference of 1% need? How much
faster is a matmul of zeros? (Single launches, queues and graphs are in day1_pytorch/lesson05_gpu_by_measurement. A
launch without a synchronisation is in day2_triton_basics/lesson17_green_but_wrong.)
You will learn: to flush, to interleave, to repeat until the median is stable, to use random data, and to report the
clock. All of it stands in lessonkit/measure/timing.py, one short file.
Run it:    python3 course.py run lesson05_benchmark_traps
"""

import math
import statistics
import subprocess
import time

from lessonkit import DEVICE, About, Steps, Table, expect, report, rows, specimen, timing
from lessonkit.base.device import HAS_GPU
from lessonkit.commands.show import from_a_gpu

import torch
import triton

softmax_shared = specimen("day2_triton_basics.lesson16_rows_of_any_length", "softmax_shared")


def too_few_repeats():
    """Two kernels 1% apart, timings that scatter by s: n timings tell them apart when 1.25 s sqrt(2 / n) < 1% / 2.

    The median of n has a deviation of 1.25 s / sqrt(n). The step takes s from the committed rows, where p20 and p80 are
    1.68 s apart. It simulates timings with that s, and counts how often the ranking is wrong.
    """
    spread = _spread()
    torch.manual_seed(0)
    table = []
    for n in (1, 5, 20, 100):
        timed = [torch.randn(4000, n, dtype=torch.float64) * spread + mean for mean in (1.0, 1.01)]
        fast, slow = (t.quantile(0.5, dim=1) for t in timed)
        wrong = (fast > slow).double().mean().item()
        # The chance that a normal difference of mean 1% is below zero.
        sigma = math.sqrt(2) * (spread if n == 1 else 1.2533 * spread / math.sqrt(n))
        predicted = 0.5 * math.erfc(0.01 / sigma / math.sqrt(2))
        assert abs(wrong - predicted) < 0.05
        table.append({"timings": n, "wrong winner, predicted": f"{predicted:.1%}", "counted": f"{wrong:.1%}"})
    needed = math.ceil(2 * (2 * 1.2533 * spread / 0.01) ** 2)
    note = (
        f"Scatter of the committed rows: {spread:.2%}, the largest tenth of them. For 1% at two deviations: {needed}."
    )
    return Table("too few repeats", table, note)


def _spread():
    """The relative deviation of a timing that a tenth of all committed rows exceeds; 1% without rows."""
    found = [row for folder in report.device_folders() for path in folder.glob("*.csv") for row in _rows(path)]
    scatter = sorted((row.ms_p80 - row.ms_p20) / 1.683 / row.ms_p50 for row in found)
    return scatter[len(scatter) * 9 // 10] if scatter else 0.01


def _rows(path):
    head = path.read_text().split("\n", 1)[0]
    return rows.read(path) if head.startswith("lesson,rung,kind,") else []


def the_best_of_many():
    """The minimum of n noisy timings falls with n: a table of minima compares numbers of repetitions."""
    torch.manual_seed(0)
    noise = torch.randn(2000, 1000, dtype=torch.float64) * 0.01 + 1
    least = {n: noise[:, :n].amin(1).mean().item() for n in (10, 100, 1000)}
    for n, value in least.items():  # the least of n normal numbers: about sqrt(2 ln n) deviations below the mean
        print(f"  the least of {n}: {value - 1:+.2%} of the mean, with a scatter of 1%")
    assert least[1000] < least[100] < least[10] < 0.99
    assert abs(noise[:, :10].quantile(0.5, dim=1).mean().item() - 1) < 0.001  # a median has no such trend


def bits_that_do_not_change():
    """Bits that flip cost power. From one random bf16 to the next 6 of 16 flip; from zero to zero, none.

    A GPU at its power limit lowers its clock. With constant data it need not, and a matmul is faster than it is on
    real data.
    """
    torch.manual_seed(0)
    flips = {}
    for name, x in {"zeros": torch.zeros(4096), "ones": torch.ones(4096), "0 to 9": torch.arange(4096.0) % 10,
                    "random": torch.randn(4096)}.items():  # fmt: skip
        bits = x.bfloat16().view(torch.int16).int()
        changed = (bits[1:] ^ bits[:-1]) & 0xFFFF
        flips[name] = sum(((changed >> i) & 1).sum().item() for i in range(16)) / len(changed)
        print(f"  {name}: {flips[name]:.1f} of 16 bits flip from one number to the next")
    assert flips["zeros"] == flips["ones"] == 0
    assert 5 < flips["random"] < 8
    assert flips["0 to 9"] < flips["random"]


def constant_data():
    """The same matmul of 8192 on zeros, ones and random numbers, interleaved: only random data is like real data."""
    if not HAS_GPU:
        return from_a_gpu(__name__, "constant data")
    n = 8192
    make = {"zeros": torch.zeros, "ones": torch.ones, "random": torch.randn}
    data = {name: [fn(n, n, device=DEVICE).bfloat16() for _ in range(2)] for name, fn in make.items()}
    ms = _times({name: lambda pair=pair: torch.matmul(*pair) for name, pair in data.items()})
    assert ms["random"] > 1.02 * ms["zeros"]
    table = [{"data": k, "ms": f"{t:.3f}", "TFLOP/s": round(2 * n**3 / t * 1e-9)} for k, t in ms.items()]
    return Table("constant data", table, "bf16, 8192 x 8192 x 8192, interleaved in one process.")


def _times(contenders, flush=True):
    """{name: median ms}"""
    for fn in contenders.values():
        fn()
    return {name: t.p50 for name, t in timing.measure(contenders, flush=flush, rounds=40).items()}


def cold_and_warm_l2():
    """Without a flush a tensor that fits into L2 is not read from memory: times below the floor of the bytes."""
    if not HAS_GPU:
        return from_a_gpu(__name__, "cold and warm L2")
    table, roof = [], timing.limits().copy
    for columns in (512, 1024, 2048, 8192, 32768):
        x = torch.randn(4096, columns, device=DEVICE).bfloat16()
        cold = _times({"softmax": lambda x=x: softmax_shared(x)})["softmax"]
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):  # back to back, so that the host is not timed
            for _ in range(10):
                softmax_shared(x)
        warm = _times({"softmax": graph.replay}, flush=False)["softmax"] / 10
        floor = 2 * x.nbytes / roof * 1e3
        table.append({"columns": columns, "MB in and out": round(2 * x.nbytes / 1e6, 1),
                      "cold us": round(cold * 1e3, 1),
                      "warm us": round(warm * 1e3, 1), "cold / warm": round(cold / warm, 2),
                      "warm over the floor": round(warm / floor, 2)})  # fmt: skip
    assert table[1]["cold / warm"] > 1.1 > table[-1]["cold / warm"]
    note = "Softmax, [4096, columns] in bf16. Below 1 over the floor: faster than memory is, so not from memory."
    return Table("cold and warm L2", table, note, x="MB in and out", y="cold / warm")


def clocks_and_power():
    """A matmul's speed in the first 50 ms and after 3 s, and the clock: a cool card runs faster than a warm one."""
    if not HAS_GPU:
        return from_a_gpu(__name__, "clocks and power")
    n, table = 8192, []
    a, b = (torch.randn(n, n, device=DEVICE).bfloat16() for _ in range(2))
    a @ b
    torch.cuda.synchronize()
    time.sleep(2)  # cool
    begun = time.perf_counter()
    for after in (0.0, 0.5, 1.0, 2.0, 3.0):
        while time.perf_counter() - begun < after:
            for _ in range(20):
                a @ b
            torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(30):
            a @ b
        end.record()
        fields = ("--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader,nounits")
        done = subprocess.run(["nvidia-smi", *fields], capture_output=True, text=True)  # while it is still busy
        torch.cuda.synchronize()
        clock, power, warmth = (done.stdout.strip().splitlines() or ["?, ?, ?"])[0].split(", ")
        rate = 30 * 2 * n**3 / start.elapsed_time(end) * 1e-9
        table.append({"after s": after, "TFLOP/s": round(rate), "SM MHz": clock, "W": power, "degrees C": warmth})
    note = "bf16, 8192 x 8192 x 8192, after two idle seconds. Compare in turns, A B A B: both then have the same clock."
    return Table("clocks and power", table, note)


def host_time():
    """A check takes 1 to 2 us of the host, a whole call more. If the GPU needs less, the user waits for the host."""
    x = torch.randn(64, 64, device=DEVICE)
    ways = {"expect, one tensor": lambda: expect(x=x, ndim=2, unit_stride=True),
            "empty_like": lambda: torch.empty_like(x), "triton.cdiv": lambda: triton.cdiv(4097, 64)}  # fmt: skip
    if HAS_GPU:
        ways |= {"softmax_shared, all of it": lambda: softmax_shared(x), "torch.softmax": lambda: torch.softmax(x, -1)}
    table = []
    for name, fn in ways.items():
        fn()
        each = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(200):
                fn()
            each.append((time.perf_counter() - start) / 200 * 1e6)
        if HAS_GPU:
            torch.cuda.synchronize()
        table.append({"call": name, "us of the host": round(statistics.median(each), 2)})
    if HAS_GPU:
        busy = {n: c for n, c in ways.items() if "softmax" in n}
        for name, ms in _times(busy).items():
            next(row for row in table if row["call"] == name)["us between events"] = round(ms * 1e3, 2)
        table = [{"us between events": ""} | row for row in table]
        table = [{k: row[k] for k in ("call", "us of the host", "us between events")} for row in table]
    note = "Events see the GPU alone, if the host is ahead of it (it gets ahead while timing.measure flushes the L2)."
    return Table("host time", table, note)


def launches_in_a_row():
    """One small kernel timed in four ways: the host's clock sees launches, a graph hides them, and keeps L2 warm."""
    if not HAS_GPU:
        return from_a_gpu(__name__, "launches in a row")
    x = torch.randn(256, 1024, device=DEVICE).bfloat16()
    calls = 200

    def host():
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            softmax_shared(x)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls * 1e6

    softmax_shared(x)
    us = {"host's clock, launches in a row": min(host() for _ in range(5)),
          "events, L2 flushed": _times({"softmax": lambda: softmax_shared(x)})["softmax"] * 1e3,
          "triton do_bench": triton.testing.do_bench(lambda: softmax_shared(x), return_mode="median") * 1e3,
          "do_bench_cudagraph, warm L2": triton.testing.do_bench_cudagraph(lambda: softmax_shared(x)) * 1e3,
         }  # fmt: skip
    assert us["do_bench_cudagraph, warm L2"] < us["host's clock, launches in a row"]
    table = [{"way": way, "us": round(t, 2)} for way, t in us.items()]
    return Table(
        "launches in a row", table, "Softmax of 256 x 1024 in bf16: 1 MB, a quarter of a microsecond of memory."
    )


def a_graph_keeps_its_addresses():
    """A graph replays addresses: it ignores a new tensor, and a benchmark that replays always has the same answer."""
    if not HAS_GPU:
        print("  GPU only: there are no graphs to replay elsewhere.")
        return
    x = torch.randn(64, 256, device=DEVICE)
    softmax_shared(x)  # compiled and warm before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax_shared(x)
    graph.replay()
    old = y.clone()
    new = torch.randn_like(x)
    x_was, x = x, new  # the name is new, the graph's address is not
    graph.replay()
    assert torch.equal(y, old)
    x_was.copy_(x)  # new data, at the address that the graph reads
    graph.replay()
    torch.testing.assert_close(y, torch.softmax(new, -1), rtol=1e-5, atol=1e-7)


# The answers for an H200, whose tables stand on the lesson's page: without a flush that softmax looks about twice as
# fast. At the scatter of the committed rows a difference of 1% needs some 150 timings. A matmul of zeros is 9% faster.
LESSON = Steps(
    about=About(
        teaches="repeats, minima, data, L2, clocks, the host, graphs: eight ways to time something else",
        hours=0.75,
        star=True,
        pictures=("timed_rounds",),
    ),
    steps=(
        too_few_repeats,
        the_best_of_many,
        bits_that_do_not_change,
        constant_data,
        cold_and_warm_l2,
        clocks_and_power,
        host_time,
        launches_in_a_row,
        a_graph_keeps_its_addresses,
    ),
    alone=HAS_GPU,
)

if __name__ == "__main__":
    LESSON.main()
