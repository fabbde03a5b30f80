"""The GPU by measurement: lanes, warps, programs and registers
============================================================
Five terms, from the smallest to the largest:

    lane        CUDA's thread; it computes
    warp        32 lanes that share each instruction
    program     CUDA's block: several warps on one SM, with values in its registers; they communicate through the SM's
                shared memory
    SM          a processor with four schedulers; a GPU has about a hundred
    grid        the programs of a launch, which the GPU distributes over its SMs

Each step makes one of these visible as a measured figure. On an H200 a cycle takes about 0.5 ns. A scheduler issues one
instruction of a warp in a cycle, and the result of a multiply-add is ready 4 cycles later: that is its latency. A lane
that waits for each result uses one cycle in four. So a scheduler needs 4 independent multiply-adds in flight, from one
warp or from several, and an SM with its four schedulers needs 16. With fewer, latency limits the time; with more,
arithmetic does.

    cycle       0  1  2  3  4  5  6  7
    1 chain     a  .  .  .  a  .  .  .      the next multiply-add waits for the last one's result
    4 chains    a  b  c  d  a  b  c  d      an instruction in each cycle

The kernels are in Triton, which day 2 teaches. Here the comment above each one is enough.

New words (GLOSSARY.md): occupancy.
You will learn: why a block is a multiple of 32, why a grid is a multiple of the SMs, what a barrier and a launch cost.
Run it:    python3 course.py run lesson05_gpu_by_measurement
Without a GPU every kernel is checked in the interpreter, and the committed figures of a GPU are shown.
Memory is measured in lesson09_memory_by_measurement.
"""

import time
from functools import partial

from lessonkit import DEVICE, About, Steps, Table, compiled, device, num_sms
from lessonkit.commands.show import from_a_gpu
from lessonkit.measure.timing import copy_of, measure

import torch
import triton
import triton.language as tl

ADD = "day2_triton_basics.lesson01_vector_add"


def seconds(contenders, flush=False):
    """{key: median seconds on the GPU}. The kernels loop so long that the time of their launch is negligible."""
    for fn in contenders.values():
        fn()  # compiles
    return {key: t.p50 * 1e-3 for key, t in measure(contenders, flush=flush, rounds=20).items()}


# A chain of multiply-adds for each element, in registers only. A program owns BLOCK elements and spreads them over its
# 32 * num_warps lanes. Below one element a lane some lanes only repeat the work of others, so they are as good as idle.
# Above it a lane has several independent chains.
@triton.jit
def chain_kernel(out_ptr, rounds, BLOCK: tl.constexpr):
    x = tl.arange(0, BLOCK).to(tl.float32)
    for _ in range(rounds):
        x = x * 0.5 + 1.0
    tl.store(out_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), x)


def _chains(programs, elements, rounds, warps):
    """Run the kernel; out: [programs * elements] fp32."""
    out = torch.empty(programs * elements, device=DEVICE)
    chain_kernel[(programs,)](out, rounds, BLOCK=elements, num_warps=warps)
    return out


def lanes():
    """One warp takes as long for 32 elements as for 1, and for 128 too, since a multiply-add has 4 cycles' latency.

    A round takes more than these 4 cycles (2 ns), because the loop's own instructions, such as its branch, come on top.
    """
    start = torch.arange(8.0, device=DEVICE)
    torch.testing.assert_close(_chains(1, 8, 2, 1), (start * 0.5 + 1) * 0.5 + 1)
    if not device.HAS_GPU:
        return from_a_gpu(__name__, "lanes")
    rounds, rows = 2**17, []
    sizes = (1, 8, 32, 64, 128, 256, 512, 1024)
    took = seconds({n: partial(_chains, 1, n, rounds, 1) for n in sizes})
    ns = {n: took[n] / rounds * 1e9 for n in sizes}
    for n in sizes:
        row = {"elements": n, "a lane": max(1, n // 32), "ns_a_round": round(ns[n], 2)}
        rows.append(row | {"elements an ns": round(n / ns[n], 1)})
    assert ns[32] < 1.2 * ns[1], "a warp issues one instruction for all of its lanes"
    assert ns[128] < 1.6 * ns[32], "4 chains a lane fill the 4 cycles of one"
    assert ns[1024] > 3 * ns[32], "32 chains a lane keep the arithmetic unit busy, so here time is work"
    note = (
        "One warp. Flat to 32: lanes without an element idle. Nearly flat to 4 elements a lane: the next chain's "
        "instruction is issued while the last one's result is on its way. From there on time is proportional to work. "
        "So a block should be a multiple of 32, and several elements a lane are better than one."
    )
    return Table("lanes", rows, note, x="elements", y="ns_a_round")


def programs():
    """A program runs on one SM: 1 program takes as long as one on every SM, and one more than that doubles the time."""
    parts = _chains(3, 8, 2, 1).view(3, 8)
    assert parts.eq(parts[0]).all()
    if not device.HAS_GPU:
        return from_a_gpu(__name__, "programs")
    sms = num_sms()
    counts = (1, sms // 2, sms, sms + 1, 2 * sms, 2 * sms + 1, 4 * sms, 4 * sms + 1)
    # 8 warps with 4 chains per lane: one such program alone keeps all four schedulers of its SM busy.
    took = seconds({n: partial(_chains, n, 1024, 2**16, 8) for n in counts})
    rows = []
    for n in counts:
        row = {"programs": n, "on the busiest SM": -(-n // sms), "ms": round(took[n] * 1e3, 3)}
        rows.append(row | {"programs a ms": round(n / took[n] * 1e-3)})
    assert took[sms] < 1.3 * took[1]
    assert took[sms + 1] > 1.3 * took[sms], "the last program shares an SM with another one"
    note = (
        f"{sms} SMs. Time follows the busiest SM, so {sms + 1} programs cost what {2 * sms} do: a grid that just "
        "overruns a multiple wastes nearly a whole round (wave quantization). With many rounds the waste is small."
    )
    return Table("programs", rows, note, x="programs", y="ms")


# One program owns all of x. The mean needs every element, so every round gathers from all lanes: by shuffles within a
# warp (a lane reads a register of another lane), by shared memory and barriers between warps. With one element a lane
# nearly all of the time is the exchange.
@triton.jit
def center_kernel(x_ptr, rounds, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    for _ in range(rounds):
        x = x - tl.sum(x) * (1.0 / BLOCK)
    tl.store(x_ptr + tl.arange(0, BLOCK), x)


def _centered(x, rounds):
    """Subtract the mean from x in place, `rounds` times; returns the compiled kernel."""
    return center_kernel[(1,)](x, rounds, BLOCK=x.numel(), num_warps=x.numel() // 32)


def exchange():
    """Lanes of a warp exchange through registers; warps need shared memory and a barrier, which take longer."""
    x = torch.rand(64, device=DEVICE) + 3
    right = x - x.mean()
    _centered(x, 3)
    torch.testing.assert_close(x, right, atol=1e-5, rtol=0)
    if not device.HAS_GPU:
        return from_a_gpu(__name__, "exchange")
    rounds, rows = 2**15, []
    vectors = {warps: torch.rand(32 * warps, device=DEVICE) for warps in (1, 2, 4, 8, 16, 32)}
    took = seconds({warps: partial(_centered, v, rounds) for warps, v in vectors.items()})
    for warps, v in vectors.items():
        shared = _centered(v, 1).metadata.shared  # a launch returns the compiled kernel
        rows.append({"warps": warps, "shared_bytes": shared, "ns_a_sum": round(took[warps] / rounds * 1e9, 1)})
    assert rows[0]["shared_bytes"] == 0
    assert rows[2]["shared_bytes"] > 0
    assert rows[2]["ns_a_sum"] > rows[0]["ns_a_sum"]
    note = (
        "A sum over 32 * warps lanes. One warp: five shuffles, no shared memory. More: each warp's sum goes through "
        "shared memory and all wait at a barrier. A row that one warp can hold is cheapest reduced by one warp."
    )
    return Table("exchange", rows, note, x="warps", y="ns_a_sum")


def launches():
    """A launch takes microseconds of the host, and even in a CUDA graph a microsecond of the GPU."""
    x = torch.zeros(1, device=DEVICE)
    for _ in range(5):
        chain_kernel[(1,)](x, 0, BLOCK=1, num_warps=1)
        x.add_(1)
    assert x.item() == 1, "each kernel waits for the one before: the store of 0, then the addition"
    if not device.HAS_GPU:
        return from_a_gpu(__name__, "launches")
    count, us = 500, {}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            x.add_(1)
    ways = {
        "a Triton kernel": (count, lambda: chain_kernel[(1,)](x, 0, BLOCK=1, num_warps=1)),
        "a torch operator": (count, lambda: x.add_(1)),
        "the same in a CUDA graph": (1, graph.replay),
    }
    for way, (calls, fn) in ways.items():
        best = float("inf")
        for _ in range(5):  # the best of five: an interruption of the host can only make it slower
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                fn()
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        us[way] = best / count * 1e6
    assert us["the same in a CUDA graph"] < us["a torch operator"]
    copy = 2**30 / seconds({"copy": copy_of(2**30)}, flush=True)["copy"]
    rows = [{"way": w, "us": round(t, 2), "MB a copy moves": round(copy * t * 1e-12, 2)} for w, t in us.items()]
    note = "An operator on fewer MB than that is paid for by the launch: fuse it with its neighbours, or use a graph."
    return Table("launches", rows, note)


def occupancy():
    """An SM has 65,536 registers: 32 per thread let all 64 warps in, 64 half of them, 255 an eighth.

    The share of the 64 warps is called occupancy. An SM also holds at most 32 programs, so add_element, whose programs
    have one warp, reaches a half. The table in_flight, of which the note speaks, is in lesson 9.
    """
    rows = []
    for registers in (32, 40, 48, 64, 96, 128, 168, 255):
        part = compiled.occupancy(90, 4, registers, 0)
        rows.append({"kernel": "any, 4 warps a program", "registers": registers, "shared": 0, "occupancy": part})
    assert [row["occupancy"] for row in rows if row["registers"] in (32, 64, 255)] == [1, 0.5, 0.125]
    assert compiled.occupancy(90, 4, 32, 100_000) == 2 * 4 / 64, "shared memory bounds it too: 2 * 100 KB of 228 KB"
    for k in compiled.kernels(ADD, (90,)):
        row = {"kernel": f"{k.rung}, {k.warps} warps", "registers": k.registers, "shared": k.shared}
        rows.append(row | {"occupancy": k.occupancy})
    note = (
        "Share of an sm_90 SM's 64 warps that can be resident; the last rows are day 2's first kernels, compiled here. "
        "Low occupancy is no fault in itself: the table in_flight shows what it is needed for, and what replaces it."
    )
    return Table("occupancy", rows, note)


LESSON = Steps(
    (lanes, programs, exchange, launches, occupancy),
    about=About(
        teaches="lanes, warps, programs, registers, barriers and launches, each made visible as a number",
        hours=1,
        pictures=("occupancy",),
    ),
    alone=device.HAS_GPU,
)

if __name__ == "__main__":
    LESSON.main()
