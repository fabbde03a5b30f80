"""Memory by measurement: latency, bandwidth and bytes in flight
=============================================================
A load goes through three levels, and each has a size, a latency and a bandwidth:

    registers  ---  L1, one per SM  ---  L2, for all SMs  ---  device memory (HBM)

In an SM, L1 and shared memory are one memory.

Little's law connects them: bytes in flight = bandwidth * latency. HBM has 4.2 TB/s, and about 800 ns under full
load, more than twice the 340 ns of a single load. So 3.4 MB must be in flight, 25 KB for each of 132 SMs. With fewer
the kernel does not reach HBM's bandwidth.

You will learn: how large and how fast each level is, and when to keep data in it. Also to predict a kernel's bandwidth
from the loads that it has in flight and the sectors that it touches.
Run it:    python3 course.py run lesson09_memory_by_measurement
Without a GPU every kernel is checked in the interpreter, and the committed figures of a GPU are shown.
"""

from functools import partial

from lessonkit import DEVICE, About, Steps, Table, device, num_sms
from lessonkit.commands.show import from_a_gpu
from lessonkit.measure.timing import copy_of, measure

import torch
import triton
import triton.language as tl


def seconds(contenders, flush=False):
    """{key: median seconds on the GPU}. The kernels loop so long that the time of their launch is negligible."""
    for fn in contenders.values():
        fn()  # compiles
    return {key: t.p50 * 1e-3 for key, t in measure(contenders, flush=flush, rounds=20).items()}


# One program, one load at a time: each gives the address of the next, so nothing overlaps. The position is kept between
# launches, so a second launch continues and does not find the first one's cells in the caches.
@triton.jit
def chase_kernel(next_ptr, at_ptr, steps):
    at = tl.load(at_ptr)
    for _ in range(steps):
        at = tl.load(next_ptr + at)
    tl.store(at_ptr, at)


def _ring(cells):
    """Cells of 128 bytes (a cache line), each holding the index of another one, in one cycle of random order."""
    order = torch.randperm(cells, device=DEVICE) * 32
    links = torch.zeros(cells * 32, dtype=torch.int32, device=DEVICE)
    links[order] = order.roll(-1).int()
    return links


def latency():
    """One load after another: the time of each is that of the level in which the data fits, L1, L2 or device memory."""
    links, at = _ring(8), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    visited = []
    for _ in range(8):
        chase_kernel[(1,)](links, at, 1, num_warps=1)
        visited.append(at.item() // 32)
    assert sorted(visited) == list(range(8)), "one cycle visits every cell"
    chase_kernel[(1,)](links, at, 13, num_warps=1)
    assert at.item() // 32 == visited[(7 + 13) % 8]
    if not device.HAS_GPU:
        return from_a_gpu(__name__, "latency")
    steps, rows, ns = 2**13, [], {}
    for size in (2**p for p in range(13, 31)):
        links, at = _ring(size // 128), torch.zeros(1, dtype=torch.int32, device=DEVICE)
        links.sum()  # loads it into the L2, as far as it fits
        took = seconds({size: partial(chase_kernel[(1,)], links, at, steps, num_warps=1)})
        ns[size] = took[size] / steps * 1e9
        rows.append({"KB": size // 1024, "ns_a_load": round(ns[size], 1)})
    assert ns[2**22] > 2 * ns[2**13], "L2 is further than L1"
    assert ns[2**30] > 1.3 * ns[2**22], "device memory is further than L2"
    note = (
        f"L2: {torch.cuda.get_device_properties(0).L2_cache_size >> 20} MB. Two steps: where the ring outgrows the "
        "L1 of its SM, and where it outgrows the L2 (in halves: each half of the SMs is nearer to one half of it)."
    )
    return Table("latency", rows, note, x="KB", y="ns_a_load")


# Reads the same n elements `passes` times, each program always the same blocks. With ".cg" a load looks in L2 only,
# with the default ".ca" in the SM's L1 first. Since n is a multiple of BLOCK, no block needs a mask.
@triton.jit
def read_kernel(x_ptr, out_ptr, n, passes, CACHE: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(passes):
        for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
            total += tl.load(x_ptr + start + tl.arange(0, BLOCK), cache_modifier=CACHE)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


def bandwidth():
    """Data that is read again comes from the nearest level it fits in: faster than memory up to the L2's size."""
    x, out = torch.rand(7 * 16, device=DEVICE), torch.empty(3, device=DEVICE)
    read_kernel[(3,)](x, out, x.numel(), 2, CACHE=".cg", BLOCK=16)
    torch.testing.assert_close(out.sum(), 2 * x.sum())
    if not device.HAS_GPU:
        return from_a_gpu(__name__, "bandwidth")
    grid, rows, rate = (2 * num_sms(),), [], {}
    out = torch.empty(grid, device=DEVICE)
    for cache, path in ((".ca", "L1, then L2"), (".cg", "L2 only")):
        for size in (2**p for p in range(22, 32)):
            x, passes = torch.rand(size // 4, device=DEVICE), 2**32 // size
            read = partial(read_kernel[grid], x, out, x.numel(), passes, CACHE=cache, BLOCK=4096, num_warps=8)
            rate[cache, size] = 2**32 / seconds({"": read})[""] * 1e-12
            rows.append({"MB": size >> 20, "path": path, "TB_per_s": round(rate[cache, size], 2)})
    assert rate[".cg", 2**24] > 1.1 * rate[".cg", 2**31], "16 MB stay in the L2"
    assert rate[".ca", 2**23] > 1.1 * rate[".cg", 2**23], "8 MB over all SMs stay in their L1s"
    note = (
        "4 GiB read in all, as one pass over much or many passes over little. A tile that is used again should fit in "
        "the level that is to serve it; a benchmark that does not flush the L2 reports the left side of this plot."
    )
    return Table("bandwidth", rows, note, x="MB", y="TB_per_s", by="path")


# Every lane adds the value that it loaded to its next offset. All values are zero here, but the compiler cannot know
# that. So a lane's next loads wait for its last ones, and exactly BLOCK * 4 bytes per program are in flight. Nor does
# the compiler know that neighbouring offsets stay neighbours; the hint lets a lane load 16 bytes at once.
@triton.jit
def in_flight_kernel(x_ptr, out_ptr, rounds, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(rounds):
        here = tl.max_contiguous(tl.multiple_of(x_ptr + offsets, 16), 4)
        offsets += tl.num_programs(0) * BLOCK + tl.load(here)
    tl.store(out_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), offsets)


def _walk(x, out, programs, loads):
    """A walk over x, `loads` loads of 16 bytes per lane, 128 lanes per program; returns (rounds, the call)."""
    block = 512 * loads
    rounds = min(2048, x.numel() // (programs * block))
    return rounds, partial(in_flight_kernel[(programs,)], x, out, rounds, BLOCK=block, num_warps=4)


def in_flight():
    """Little's law: bandwidth is bytes in flight over latency, whether many warps have them in flight or few."""
    x, out = torch.zeros(96, dtype=torch.int32, device=DEVICE), torch.empty(32, dtype=torch.int32, device=DEVICE)
    in_flight_kernel[(2,)](x, out, 3, BLOCK=16)
    assert out.tolist() == [96 + i for i in range(32)]
    if not device.HAS_GPU:
        return from_a_gpu(__name__, "in_flight")
    x = torch.zeros(2**28, dtype=torch.int32, device=DEVICE)
    out = torch.empty(2**21, dtype=torch.int32, device=DEVICE)
    walks = {(1, 1): _walk(x, out, 1, 1)}  # (programs, loads a lane): a lone program shares memory with no other
    for loads, shares in ((1, (0.125, 0.25, 0.5, 1, 2, 4, 8)), (4, (0.125, 0.25, 0.5, 1, 2, 4))):
        walks |= {(n, loads): _walk(x, out, n, loads) for n in (int(num_sms() * share) for share in shares)}
    took = seconds({key: run for key, (_, run) in walks.items()} | {"copy": copy_of(2**30)}, flush=True)
    alone, copy, rows = took[1, 1] / walks[1, 1][0], 2**30 / took["copy"], []
    for (programs, loads), (rounds, _) in walks.items():
        # In the machine code four loads are issued two by two: the second pair reuses the first one's registers.
        moved, flying = programs * loads * 2048, programs * min(loads, 2) * 2048
        row = {"loads a lane": loads, "warps an SM": round(4 * programs / num_sms(), 2)}
        row |= {"KB_in_flight": flying // 1024, "TB_per_s": round(moved * rounds / took[programs, loads] * 1e-12, 4)}
        rows.append(row | {"predicted": round(min(flying / alone, copy) * 1e-12, 4)})
    assert all(0.7 < row["TB_per_s"] / row["predicted"] < 1.3 for row in rows)
    note = (
        f"Predicted: bytes in flight over the {alone * 1e9:.0f} ns that a lone program takes a round, at most a copy's "
        "rate. Occupancy is one way to have bytes in flight, independent loads are the other: 4 loads a lane lie on "
        "the line of twice the warps with one, not 4 times, for the compiler issues them two by two and waits in "
        "between (in the machine code: two LDG, their use, two LDG). Near the top loads queue, and latency grows."
    )
    return Table("in_flight", rows, note, x="KB_in_flight", y="TB_per_s", by="loads a lane")


# Reads every `stride`-th element; a program owns BLOCK of them. Memory is fetched in sectors of 32 bytes, 8 of these
# elements.
@triton.jit
def strided_kernel(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + i * stride)))


def coalescing():
    """Stride 2 uses half of each 32-byte sector, stride 8 an eighth: useful bandwidth falls by as much."""
    x, out = torch.rand(4 * 16 * 3, device=DEVICE), torch.empty(4, device=DEVICE)
    strided_kernel[(4,)](x, out, 3, BLOCK=16)
    torch.testing.assert_close(out, x[::3].view(4, 16).sum(1))
    if not device.HAS_GPU:
        return from_a_gpu(__name__, "coalescing")
    n, block, rows = 2**26, 2048, []
    x, out = torch.rand(16 * n, device=DEVICE), torch.empty(n // block, device=DEVICE)
    run = partial(strided_kernel[(n // block,)], x, out, BLOCK=block)
    took = seconds({s: partial(run, stride=s) for s in (1, 2, 4, 8, 16)}, flush=True)
    rate = {s: 4 * n / t * 1e-12 for s, t in took.items()}
    for s in rate:
        row = {"stride": s, "useful_TB_per_s": round(rate[s], 3)}
        rows.append(row | {"predicted": round(rate[1] / min(s, 8), 3)})
    assert rate[2] < 0.7 * rate[1]
    assert rate[8] < 0.25 * rate[1]
    note = (
        "Predicted: stride 1 over min(stride, 8). Below it past 8, memory itself fetches more than one sector at a "
        "time. Make neighbouring lanes read neighbouring addresses; where a transpose forbids it, use shared memory."
    )
    return Table("coalescing", rows, note, x="stride", y="useful_TB_per_s")


# Every array has n elements, and a program owns one block of each: it loads READS blocks and stores WRITES. What it
# stores depends on the offset too, so that arrays hold no constant. The compiler drops a load without a use: without
# an array to write, each program stores the sum of what it has read, 4 bytes.
@triton.jit
def stream_kernel(x_ptr, y_ptr, n, READS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = i.to(tl.int32) * 40503
    for r in tl.static_range(READS):
        total += tl.load(x_ptr + r * n + i)
    for w in tl.static_range(WRITES):
        tl.store(y_ptr + w * n + i, total + w)
    if WRITES == 0:
        tl.store(y_ptr + tl.program_id(0), tl.sum(total))


MIXES = (1, 0), (4, 1), (2, 1), (1, 1), (1, 2), (0, 1)  # arrays that are read, and written
TILES = (1024, 4), (2048, 4), (4096, 8), (8192, 8)  # elements and warps of a program: the fastest counts


def _stream(x, y, size, reads, writes, block, warps):
    """(bytes moved, the call) of a stream over at most `size` bytes, in whole blocks."""
    n = size // 4 // (reads + writes) // block * block
    call = partial(stream_kernel[(n // block,)], x, y, n, READS=reads, WRITES=writes, BLOCK=block, num_warps=warps)
    return 4 * n * (reads + writes), call


def streams():
    """Is reading as fast as writing? A kernel's limit is a stream with the same mix of reads and writes.

    Predicted for an H200: 5 us to start, then 4530 GB/s of reads and 4020 GB/s of writes. A byte that is read and one
    that is written take the sum of both times, so a copy reaches 4260 GB/s.

    Measured, of 1024 MB: 4368 GB/s for reads alone where 4436 was predicted, 4184 for a copy (4177), and 4626 for
    writes alone (3946). The last prediction failed: writes alone are the fastest of all, at each size. A kernel that
    writes ends when its last bytes are in the L2 cache, and one that reads waits for its first bytes from DRAM. So up
    to 256 MB a copy, half of which is writes, is faster than reads alone. Of more bytes it is slower than either alone,
    probably because DRAM loses cycles each time it turns from reading to writing; no counter here shows that.
    """
    x, y = torch.arange(4 * 16, dtype=torch.int32, device=DEVICE), torch.zeros(32, dtype=torch.int32, device=DEVICE)
    _stream(x, y, 6 * 4 * 16, 4, 2, 16, 1)[1]()
    first = torch.arange(16, dtype=torch.int32, device=DEVICE) * 40503 + x.view(4, 16).sum(0, dtype=torch.int32)
    assert torch.equal(y.view(2, 16), torch.stack((first, first + 1)))
    _stream(x, y, 2 * 4 * 16, 1, 0, 16, 1)[1]()
    assert y[0] == x[:16].sum() + 40503 * 120, "what is only read is added up"
    if not device.HAS_GPU:
        return from_a_gpu(__name__, "streams")
    sizes = [2**p for p in range(24, 33) if 2**p <= torch.cuda.mem_get_info()[0] // 4]
    x, y = (torch.empty(sizes[-1] // 4, dtype=torch.int32, device=DEVICE).random_() for _ in range(2))
    every = {(*mix, size, tile): _stream(x, y, size, *mix, *tile) for mix in MIXES for size in sizes for tile in TILES}
    took, rows = seconds({key: call for key, (_, call) in every.items()}, flush=True), []
    for reads, writes in MIXES:
        for size in sizes:
            each = {tile: every[reads, writes, size, tile][0] / took[reads, writes, size, tile] for tile in TILES}
            rate = max(each.values())
            a_byte = (reads / 4530e9 + writes / 4020e9) / (reads + writes)
            row = {"reads": reads, "writes": writes, "MB": size >> 20, "GB_per_s": round(rate * 1e-9)}
            rows.append(row | {"predicted": round(size / (5e-6 + size * a_byte) * 1e-9)})
    note = (
        "The L2 is written over before each stream, as before each rung of a benchmark; the fastest of four block "
        "sizes. Hold a kernel against the line of its own mix and its own size."
    )
    return Table("streams", rows, note)


LESSON = Steps(
    (latency, bandwidth, in_flight, coalescing, streams),
    about=About(
        teaches="latency, bandwidth, bytes in flight, sectors, reads and writes",
        hours=0.75,
        pictures=("bytes_in_flight",),
    ),
    alone=device.HAS_GPU,
)

if __name__ == "__main__":
    LESSON.main()
