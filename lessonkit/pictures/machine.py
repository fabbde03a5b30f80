"""Pictures of the machine: roofline, what fits on an SM, storage, launches, barriers, rounds, two programs."""

import math

from lessonkit.base.chips import CHIPS
from lessonkit.pictures import figures, models
from lessonkit.pictures.draw import MARGIN, WIDTH, Canvas, Span, say
from lessonkit.pictures.numbers import number, stated
from lessonkit.pictures.registry import caption, picture

_CHIP = CHIPS["h200"]


@picture(
    "The roofline: FLOPs per byte decide which limit counts",
    "A plot with logarithmic axes: FLOPs for each byte to the right, TFLOP/s upwards. The sloped roof is the memory's "
    "bandwidth, the flat one the arithmetic. They meet at the ridge.",
    figures.ROOFLINE,
)
def roofline(c: Canvas, lesson: str) -> None:
    left, bottom, wide, tall = 44, c.y + 190, 300, 170
    low, high = -2, 12

    def x(log2: float) -> float:
        return left + (log2 - low) / (high - low) * wide

    def y(flops: float) -> float:
        return bottom - (math.log10(flops) - 12) / 3.4 * tall

    for log2 in range(low, high + 1, 2):
        c.text(x(log2), bottom + 8, f"1/{2**-log2}" if log2 < 0 else str(2**log2), 9, "middle")
    for power in (12, 13, 14, 15):
        c.text(left - 4, y(10**power), str(10 ** (power - 12)), 9, "end")
        c.line(left, y(10**power), left + 3, y(10**power))
    c.line(left, bottom, left + wide, bottom)
    c.line(left, bottom - tall, left, bottom)
    for rate in ("fp32", "bf16", "fp8"):
        found = models.roofline(_CHIP, rate, 1.0)
        ridge, top = math.log2(found["ridge"]), _CHIP.flops[rate]
        c.line(x(ridge), y(top), x(high), y(top))
        c.text(x(high), y(top) - 8, f"{rate}: {top / 1e12:.0f}", 10, "end")
    first = math.log2(1e12 / _CHIP.bandwidth)
    last = math.log2(models.roofline(_CHIP, "fp8", 1.0)["ridge"])
    c.line(x(first), y(1e12), x(last), y(_CHIP.flops["fp8"]))
    c.text(MARGIN, bottom - tall - 8, "TFLOP/s", 9)
    c.text(x(2.6), y(8e13), f"{_CHIP.bandwidth / 1e12:g} TB/s", 10, "end")
    c.text(left + wide, bottom + 21, say("FLOPs for each byte"), 9, "end")
    c.y = bottom + 32
    caption(
        c,
        "{chip}, data sheet. In bf16 the roofs meet at {ridge:.0f} FLOPs per byte: an operator with fewer "
        "is bound by memory.",
        chip=_CHIP.name, ridge=models.roofline(_CHIP, 'bf16', 1.0)['ridge'],
    )  # fmt: skip


@picture(
    "Occupancy: what fits on an SM at a time",
    "The warps that an SM can hold, as cells. Those of resident programs are coloured. Bars below say how many "
    "programs registers, shared memory and warps would allow; the smallest counts.",
    figures.OCCUPANCY,
)
def occupancy(c: Canvas, lesson: str) -> None:
    warps, registers, shared = 8, 96, 48
    found = models.occupancy(_CHIP, warps, registers, shared * 1024)
    across = 16
    cell = (WIDTH - 2 * MARGIN) / across
    for w in range(_CHIP.warps):
        kind = "abcd"[w // warps % 4] if w // warps < found["resident"] else "none"
        c.box(MARGIN + w % across * cell, c.y + w // across * 16, cell - 1, 14, kind)
    c.y += -(-_CHIP.warps // across) * 16 + 8
    names = {
        "registers": say("registers allow"), "shared": say("shared memory allows"), "warps": say("warps allow"),
        "programs": say("programs at most"),
    }  # fmt: skip
    for name, limit in found["limits"].items():
        c.text(MARGIN, c.y + 9, names[name], 10)
        long = limit / _CHIP.blocks * 160
        c.box(160, c.y, long, 18, "e" if limit == found["resident"] else "off")
        c.text(166 + long, c.y + 9, str(limit), 10)
        c.y += 22
    caption(
        c,
        "{chip}: programs of {warps} warps, {registers} registers per thread, {shared} KB of shared "
        "memory. {n} fit: {percent:.0f}% of the warps.",
        chip=_CHIP.name, warps=warps, registers=registers, shared=shared, n=found['resident'],
        percent=found['percent'],
    )  # fmt: skip


@picture(
    "Bytes in flight: what memory's latency asks of an SM",
    "Bars of bytes in flight on one SM: for a full SM whose threads each have one load of 2, 4, 8 or 16 bytes on the "
    "way. A line shows what the bandwidth times the latency asks for.",
)
def bytes_in_flight(c: Canvas, lesson: str) -> None:
    path = "day1_pytorch/lesson09_memory_by_measurement.py"
    bandwidth, latency = stated(path, r"HBM has ([\d.]+) TB/s") * 1e12, stated(path, r"about (\d+) ns under") * 1e-9
    needed = bandwidth * latency / _CHIP.sms
    threads = _CHIP.warps * _CHIP.warp_size
    scale, top = 200 / (threads * 16), c.y
    for size in (2, 4, 8, 16):
        flying = threads * size
        c.text(MARGIN, c.y + 9, say("{bytes} bytes per thread", bytes=size), 10)
        c.box(112, c.y, flying * scale, 18, "c" if flying >= needed else "b")
        c.text(WIDTH - MARGIN, c.y + 9, f"{flying / 1024:.0f} KB", 10, "end")
        c.y += 24
    c.line(112 + needed * scale, top - 2, 112 + needed * scale, c.y, dashed=True)
    c.text(112 + needed * scale, c.y + 8, say("needed: {kb:.0f} KB", kb=needed / 1000), 10, "middle")
    c.y += 18
    caption(
        c,
        "Little's law: {bandwidth:g} TB/s times {latency:.0f} ns is {total:.1f} MB in flight, on {sms} "
        "SMs. A full SM has {threads} threads; with two loads each the bars are twice as long.",
        bandwidth=bandwidth / 1000000000000.0, latency=latency * 1000000000.0, total=bandwidth * latency / 1000000.0,
        sms=_CHIP.sms, threads=threads,
    )  # fmt: skip


@picture(
    "One storage, three tensors: offset, shape and strides",
    "A row of storage cells with numbers. Below it three tensors that share it: x, its transpose, and a slice. Each "
    "shows which cells its first row reads, and its strides.",
)
def views(c: Canvas, lesson: str) -> None:
    path = "day1_pytorch/lesson02_tensors.py"
    rows, columns = int(stated(path, r"x \[(\d+), \d+\], strides")), int(stated(path, r"x \[\d+, (\d+)\], strides"))
    n = rows * columns
    cell = (WIDTH - 2 * MARGIN) / n
    shown = (
        ("x", rows, columns, columns, 1, 0), ("x.T", columns, rows, 1, columns, 0),
        ("x[1:, 2:]", rows - 1, columns - 2, columns, 1, columns + 2),
    )  # fmt: skip
    for name, down, across, s0, s1, offset in shown:
        c.text(MARGIN, c.y + 7, name, 11, kind="bold")
        c.text(
            WIDTH - MARGIN, c.y + 7,
            say("shape ({down}, {across}), strides ({s0}, {s1}), offset {offset}", down=down, across=across, s0=s0,
                s1=s1, offset=offset), 10, "end",
        )  # fmt: skip
        first = {offset + j * s1 for j in range(across)}
        second = {offset + s0 + j * s1 for j in range(across)}
        kinds = ["a" if i in first else "b" if i in second else "off" for i in range(n)]
        c.grid(MARGIN, c.y + 16, (cell, 20), [kinds], [[str(i) for i in range(n)]])
        c.y += 46
    c.legend([("a", say("its row 0")), ("b", say("its row 1")), ("off", say("other elements of the storage"))])
    caption(
        c,
        "The storage has {n} elements and is never copied. Element [i, j] lies at offset + i * {first} + j * {second} "
        "of x, and at other strides of its views.",
        n=n, first=columns, second=1,
    )  # fmt: skip


@picture(
    "A training step over time: the host launches ahead, or the GPU waits",
    "Three timelines. On a CPU each operator is computed before the next is called. With a small batch a GPU waits for "
    "the host, whose launches are longer than the kernels. With a large batch the kernels are longer, and the "
    "host is ahead.",
)
def launch_ahead(c: Canvas, lesson: str) -> None:
    path = "day1_pytorch/lesson10_step_time.py"
    kernels, low = int(stated(path, r"launches about (\d+) kernels")), int(stated(path, r"At (\d+) to \d+ us per"))
    high = int(stated(path, r"At \d+ to (\d+) us per"))
    launch, shown = 24, 6
    c.text(MARGIN, c.y + 7, say("CPU: one after the other"), 10, kind="bold")
    c.y += 15
    both = [
        (i * (launch + 20) + at, n, kind, "")
        for i in range(shown)
        for at, n, kind in ((0, launch, "b"), (launch, 20, "c"))
    ]
    c.lane("CPU", both, 1)
    for words, work in (
        (say("GPU, small batch: launches are the limit"), 8),
        (say("GPU, large batch: kernels are"), 40),
    ):
        c.gap(4)
        c.text(MARGIN, c.y + 7, words, 10, kind="bold")
        c.y += 15
        c.lane(say("host"), [(i * launch, launch, "b", "") for i in range(shown)], 1)
        spans, free = [], 0
        for i in range(shown):
            begin = max(free, (i + 1) * launch)
            spans.append((begin, work, "c", ""))
            free = begin + work
        c.lane("GPU", spans, 1)
    c.gap(2)
    c.legend([("b", say("a launch or call")), ("c", say("the operator's work"))])
    caption(
        c,
        "A step has about {kernels} launches of {low} to {high} us: {least} to {most} us, whatever the batch. Drawn: "
        "{shown} of them.",
        kernels=kernels, low=low, high=high, least=kernels * low, most=kernels * high, shown=shown,
    )  # fmt: skip


@picture(
    "An unused mbarrier and data at the same bytes of shared memory",
    "Two rows of bytes of shared memory. Above, the two barriers that are initialised and never used. Below, the data "
    "that the compiler puts at the same place. The first bytes overlap.",
)
def unused_barrier(c: Canvas, lesson: str) -> None:
    path = "day5_tuning/lesson04_neighbours.py"
    values, barriers, size = number(path, "NUMBERS"), 2, 8
    left, word = 100, 28
    shown = barriers * size // 4 + 3
    for b in range(barriers + 1):
        c.text(left + b * 2 * word, c.y + 7, str(b * size), 9, "middle")
    c.text(left + shown * word + 34, c.y + 7, str(4 * values), 9, "middle")
    c.text(MARGIN, c.y + 7, say("byte"), 10)
    c.y += 16
    c.text(MARGIN, c.y + 10, say("initialised"), 10)
    for b in range(barriers):
        c.box(left + b * 2 * word, c.y, 2 * word - 1, 20, "e", say("barrier {b}", b=b), 10)
    c.y += 24
    c.text(MARGIN, c.y + 10, say("data"), 10)
    for i in range(shown):
        c.box(left + i * word, c.y, word - 1, 20, "b" if i < barriers * size // 4 else "a", f"x{i}", 10)
    c.text(left + shown * word + 4, c.y + 10, f"... x{values - 1}", 9)
    c.y += 28
    c.legend([("e", say("the hardware expects a barrier here")), ("b", say("data at risk")), ("a", say("data"))])
    caption(
        c,
        "The last use of a barrier that is only initialised is its own mbarrier.init, so its bytes are free for the "
        "data: {risk} of {values} values lie under the {barriers} barriers.",
        risk=barriers * size // 4, values=values, barriers=barriers,
    )  # fmt: skip


@picture(
    "Timing in rounds: flush, then one call; the kernels in turns",
    "Three timelines of calls of two kernels, A and B. Without a flush the second call finds its data in L2 and is "
    "short. First all of A, then all of B: the slower clock falls on B. In turns, with a flush before each, both meet "
    "the same conditions.",
)
def timed_rounds(c: Canvas, lesson: str) -> None:
    moved = stated("day5_tuning/lesson05_benchmark_traps.py", r"\(([\d.]+) MB in and out\)")
    cold, warm, flush = 40, 18, 26
    c.text(MARGIN, c.y + 7, say("no flush: only the first call reads memory"), 10, kind="bold")
    c.y += 15
    c.lane("", [(0, cold, "a", "A")] + [(cold + 4 + i * (warm + 4), warm, "e", "A") for i in range(9)], 1, left=MARGIN)
    c.gap(4)
    c.text(MARGIN, c.y + 7, say("one kernel after the other, while the clock falls"), 10, kind="bold")
    c.y += 15
    spans, at = [], 0.0
    for i in range(7):
        long = cold * (1 + 0.04 * i)
        spans.append((at, long - 3, "ab"[i >= 4], "AB"[i >= 4]))
        at += long
    c.lane("", spans, 1, left=MARGIN)
    c.gap(4)
    c.text(MARGIN, c.y + 7, say("in turns, L2 flushed before each call"), 10, kind="bold")
    c.y += 15
    spans, at = [], 0.0
    for i in range(5):
        spans += [(at, flush - 2, "off", ""), (at + flush, cold - 3, "ab"[i % 2], "AB"[i % 2])]
        at += flush + cold
    c.lane("", spans, 1, left=MARGIN)
    c.gap(2)
    c.legend([("a", say("kernel A")), ("b", say("kernel B")), ("e", say("from L2")), ("off", say("flush, not timed"))])
    caption(
        c,
        "{moved:g} MB fit into the {l2} MB of an {chip}'s L2, so a call that is repeated does not read memory.",
        moved=moved, l2=_CHIP.l2, chip=_CHIP.name,
    )  # fmt: skip


@picture(
    "One program on an SM, and two: matmuls and exponentials over time",
    "For D = 128 and D = 64 two timelines with a line each for loads, tensor cores and exponentials. One program alone "
    "multiplies and exponentiates in turn. Two programs overlap, and each loads K and V for itself.",
)
def two_programs(c: Canvas, lesson: str) -> None:
    path = "day5_tuning/lesson08_tuning_attention.py"
    alone = int(stated(path, r"(\d+) x 128 on 8 warps is alone"))
    together = int(stated(path, r"(\d+) queries on 4 warps fit twice"))
    a_cycle = {
        "flops": stated(path, r"4 BLOCK_M BLOCK_N D / (\d+)"), "exps": stated(path, r"BLOCK_M BLOCK_N / (\d+), and"),
        "instructions": stated(path, r"and ([\d.]+) instructions per score"),
        "lanes": stated(path, r"an element of O, at (\d+)"), "bytes": stated(path, r"of K and V, at (\d+) a cycle"),
    }  # fmt: skip
    shares = []
    for D in (128, 64):
        shown = 0.0
        for programs, tile in ((1, alone), (2, together)):
            cycles = _step(tile, D, a_cycle)
            shown = shown or 2 * (cycles["matmuls"] + cycles["exponentials"])
            words = say("D = {D}: one program, {tile} x {tile}", D=D, tile=tile)
            if programs == 2:
                words = say("D = {D}: two programs, {tile} x {tile} each", D=D, tile=tile)
            c.text(MARGIN, c.y + 8, words, 11, kind="bold")
            c.y += 17
            spans = _alternate(programs, cycles, shown)
            scale = (WIDTH - MARGIN - 96) / shown
            for name, key in (
                (say("loads"), "loads"), (say("tensor cores"), "matmuls"), (say("exponentials"), "exponentials"),
            ):  # fmt: skip
                c.lane(name, spans[key], scale, left=96, height=15)
            c.gap(4)
            own = cycles["matmuls"] + cycles["exponentials"]
            step = max(own, *(programs * each for each in cycles.values()))
            shares.append(100 * programs * cycles["matmuls"] / step)
    c.legend([("a", say("program 0")), ("b", say("program 1"))])
    caption(
        c,
        "Computed from the lesson's rates, without any wait. The tensor cores are busy for "
        "{first:.0f}% (one program) and {second:.0f}% (two) at D = 128, for {third:.0f}% and {fourth:.0f}% at D = 64. "
        "A kernel reaches less. With tiles half as tall, K and V are loaded twice as often.",
        first=shares[0], second=shares[1], third=shares[2], fourth=shares[3],
    )  # fmt: skip


def _step(tile: int, D: int, a_cycle: dict[str, float]) -> dict[str, float]:
    """Cycles of an SM for a step of one program, tile x tile."""
    others = a_cycle["instructions"] * tile * tile + tile * D
    return {
        "loads": 4 * tile * D / a_cycle["bytes"],
        "matmuls": 4 * tile * tile * D / a_cycle["flops"],
        "exponentials": tile * tile / a_cycle["exps"] + others / a_cycle["lanes"],
    }


def _alternate(programs: int, cycles: dict[str, float], end: float) -> dict[str, list[Span]]:
    """Programs on one SM up to `end`: a step's load, matmuls, exponentials. Each unit serves one after the other.

    A program has two stages: the load of a step begins when the step before the last has been multiplied.
    """
    free = dict.fromkeys(cycles, 0.0)
    loaded = [
        [0.0] for _ in range(programs)
    ]  # when the K and V of each step are there; the first is before the drawing
    ready = [0.0] * programs  # when the program's own chain goes on
    spans: dict[str, list[Span]] = {unit: [] for unit in cycles}

    def serve(unit: str, program: int, earliest: float) -> float:
        begin = max(free[unit], earliest)
        free[unit] = begin + cycles[unit]
        if begin < end:
            spans[unit].append((begin, min(cycles[unit], end - begin), "ab"[program], ""))
        return free[unit]

    for p in range(programs):
        loaded[p].append(serve("loads", p, 0))
    while min(ready) < end:
        p = ready.index(min(ready))
        multiplied = serve("matmuls", p, max(ready[p], loaded[p].pop(0)))
        loaded[p].append(serve("loads", p, multiplied))
        ready[p] = serve("exponentials", p, multiplied)
    return spans
