"""Pictures of the machine: the roofline, and what fits on an SM."""

import math

from lessonkit.base.chips import CHIPS
from lessonkit.pictures import figures, models
from lessonkit.pictures.draw import MARGIN, WIDTH, Canvas, say
from lessonkit.pictures.numbers import stated
from lessonkit.pictures.registry import caption, picture

_CHIP = CHIPS["h200"]


@picture(
    "The roofline: FLOPs a byte decide which limit counts",
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
        "{chip}, data sheet. In bf16 the roofs meet at {ridge:.0f} FLOPs a byte: an operator with fewer "
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
        "{chip}: programs of {warps} warps, {registers} registers a thread, {shared} KB of shared "
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
    bandwidth, latency = stated(path, r"HBM has ([\d.]+) TB/s") * 1e12, stated(path, r"and (\d+) ns") * 1e-9
    needed = bandwidth * latency / _CHIP.sms
    threads = _CHIP.warps * _CHIP.warp_size
    scale, top = 200 / (threads * 16), c.y
    for size in (2, 4, 8, 16):
        flying = threads * size
        c.text(MARGIN, c.y + 9, say("{bytes} bytes a thread", bytes=size), 10)
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
