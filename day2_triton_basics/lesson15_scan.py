"""Scan: waiting for a neighbour without a deadlock
================================================
y[i] = x[0] + ... + x[i] (torch.cumsum) looks serial: every element needs the one before it. On an H200, at 4.2 TB/s,
n = 2^28 in fp32 (2.15 GB read and written) takes at least 0.51 ms.

    three kernels    x is read for the sums of the blocks; the sums are scanned; x is read again, y is written    3n
    one kernel       x is read, y is written; programs wait for sums of the programs before them                  2n

The second is decoupled look-back (Merrill and Garland 2016). Predicted gain over three kernels: 1.5 times.

New words (GLOSSARY.md): barrier, mutant.
You will be able to: scan inside a program, publish a value and its status as one word, and say why programs that wait
for each other cannot deadlock here.
You need: lesson 4 (sums of several programs, atomics). Rung 3 is advanced.
Run it:    python3 course.py run lesson15_scan
Check it:  python3 course.py check lesson15_scan
Time it:   python3 course.py bench lesson15_scan

Answer before you read on. Which y depends on the last element of x, and which on the first? Of 1000 programs 600 run at
once, and each waits for the one before it: what happens if program 900 starts before program 1?
"""

import random

from lessonkit import DEVICE, About, Grad, Lesson, Mutant, Prediction, Unsupported, case, device, expect

import torch
import triton
import triton.language as tl

from problems.scan import PROBLEM, inputs, reference


# Rung 1. One program takes a block at a time. A register carries the sum of all blocks before it. tl.cumsum scans
# inside the block: each thread its own elements, then lanes by shuffles, then warps through shared memory. Sums are
# fp32 for 16-bit x too.
# Predicted: the least bytes, at the speed of one of 132 SMs.
@triton.jit
def scan_sequential_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # [n] each
    carry = 0.0
    for block in range(tl.cdiv(n, BLOCK)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)  # n past 2^31 has 64 bits, and block has n's type: no overflow
        mask = offsets < n
        x = tl.load(x_ptr + offsets, mask=mask, other=0).to(tl.float32)
        tl.store(y_ptr + offsets, tl.cumsum(x) + carry, mask=mask)
        carry += tl.sum(x)


def scan_sequential(x):
    """[n] -> [n], one program."""
    y = _prepare(x)
    if x.numel():
        scan_sequential_kernel[(1,)](x, y, x.numel(), BLOCK=4096, num_warps=8)
    return y


# Rung 2. New: three kernels, so that all SMs work.
#
#     the blocks of x  [ 1 2 3 ]   [ 4 5 6 ]   [ 7 8 9 ]
#     sums             6           15          24              kernel 1: one program per block
#     ends             6           21          45              kernel 2: rung 1 on the sums, 1/4096 of the data
#     y                [ 1 3 6 ]   [10 15 21 ] [28 36 45 ]     kernel 3: each block adds the end of the block before it
#
# Triton has no other barrier between all programs than the end of a kernel. Registers do not survive it, so x is read
# twice.
# Predicted: 3n, 1.5 times the least time.
@triton.jit
def block_sums_kernel(x_ptr, sums_ptr, n, BLOCK: tl.constexpr):  # x [n], sums [blocks]
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0).to(tl.float32)
    tl.store(sums_ptr + block, tl.sum(x))


@triton.jit
def scan_blocks_kernel(x_ptr, y_ptr, ends_ptr, n, BLOCK: tl.constexpr):  # x, y [n], ends [blocks]
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0).to(tl.float32)
    before = tl.load(ends_ptr + block - 1, mask=block > 0, other=0)  # block 0 has nothing before it
    tl.store(y_ptr + offsets, tl.cumsum(x) + before, mask=mask)


def scan_three_phase(x):
    """[n] -> [n], three kernels. Deterministic."""
    y = _prepare(x)
    blocks = triton.cdiv(x.numel(), 4096)
    if blocks:
        sums, ends = torch.empty(2, blocks, dtype=torch.float32, device=x.device).unbind()
        block_sums_kernel[(blocks,)](x, sums, x.numel(), BLOCK=4096, num_warps=8)
        scan_sequential_kernel[(1,)](sums, ends, blocks, BLOCK=4096, num_warps=8)
        scan_blocks_kernel[(blocks,)](x, y, ends, x.numel(), BLOCK=4096, num_warps=8)
    return y


# Rung 3, advanced. New: decoupled look-back. A program keeps its tile of x in registers and publishes a word of 64
# bits. First it is (AGGREGATE, sum of this tile), later (PREFIX, sum of x up to the tile's end). To find the sum before
# its tile, it adds up aggregates backwards until it meets a prefix:
#
#     tile        0           1           2              3              4
#     word        PREFIX 6    PREFIX 21   AGGREGATE 24   AGGREGATE 33   looks back: 33 + 24 + 21 = 78
#
# So it waits until the programs before it have started, and not until they have finished. Four traps:
#
# - Starts. A program that waits for one that has no SM to start on waits forever. Here programs wait for lower ids
#   only. GPUs start programs in the order of their ids, so those have started. CUDA does not promise this order, but
#   CUB's scan relies on it too.
# - Status and value. In two words, one could be seen without the other, unless fences order the writes. In one aligned
#   64-bit word they arrive together, and relaxed accesses are enough.
# - The words must be zero (EMPTY) at the start. That is a memset of 8 bytes per tile, 1/8192 of the traffic, and a
#   launch.
# - Registers. A waiting program holds its tile, so the bytes in flight per SM are those in registers. So the scan comes
#   after the look-back: before it, x and its scan would both be held. Full tiles take a branch without masks. A thread
#   has about 96 registers then, 64 of them data: 5 programs of 32 KB on an SM.
#
# Predicted: 2n, 1.5 times the speed of rung 2. The order of additions varies from run to run, and so does the last bit.
TILE = 8192  # 64 elements per thread
EMPTY, AGGREGATE, PREFIX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def publish(word_ptr, state, value):
    # The mask drops the sign, which would spread over the state above it.
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.atomic_xchg(word_ptr, (state.to(tl.int64) << 32) | bits, sem="relaxed", scope="gpu")


@triton.jit
def look_back(words_ptr, tile, WINDOW: tl.constexpr):  # words [tiles]
    """The sum of all tiles before this one, WINDOW predecessors at a time, the nearest in lane 0."""
    lanes = tl.arange(0, WINDOW)
    before = 0.0
    nearest = tile - 1
    while nearest >= 0:
        ids = nearest - lanes
        # volatile: load from memory in each round. Lanes before tile 0 stay EMPTY; tile 0 always stops the search.
        words = tl.load(words_ptr + ids, mask=ids >= 0, other=0, volatile=True)
        state = words >> 32
        value = words.to(tl.int32).to(tl.float32, bitcast=True)
        known = tl.min(tl.where(state == EMPTY, lanes, WINDOW))  # this many neighbours have published a word
        stop = tl.min(tl.where(state == PREFIX, lanes, WINDOW))
        found = stop < known
        take = tl.where(found, stop + 1, known)
        before += tl.sum(tl.where(lanes < take, value, 0.0))
        nearest = tl.where(found, -1, nearest - take)  # take = 0: the nearest word is still EMPTY, so look again
    return before


@triton.jit
def scan_look_back_kernel(x_ptr, y_ptr, words_ptr, n, BLOCK: tl.constexpr, WINDOW: tl.constexpr, REVERSE: tl.constexpr):
    # x, y [n], words [tiles] of int64, EMPTY at first. REVERSE scans from the end to the start: the backward.
    tile = tl.program_id(0)
    place = tl.num_programs(0) - 1 - tile if REVERSE else tile
    start = place.to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    size = tl.minimum(n - start, BLOCK).to(tl.int32)
    if size == BLOCK:
        x = tl.load(x_ptr + start + lanes).to(tl.float32)
    else:
        x = tl.load(x_ptr + start + lanes, mask=lanes < size, other=0).to(tl.float32)
    total = tl.sum(x)
    # Published before the scan below, because other programs wait for it. Tile 0's sum is a prefix at once.
    publish(words_ptr + tile, tl.where(tile == 0, PREFIX, AGGREGATE), total)
    before = look_back(words_ptr, tile, WINDOW)
    publish(words_ptr + tile, tl.full((), PREFIX, tl.int32), before + total)
    y = tl.cumsum(x, reverse=REVERSE) + before
    if size == BLOCK:
        tl.store(y_ptr + start + lanes, y)
    else:
        tl.store(y_ptr + start + lanes, y, mask=lanes < size)


def scan_look_back(x):
    """[n] -> [n] in one pass. Runs agree to rounding, not to the bit."""
    return _look_back(x)


def _look_back(x, reverse=False):
    y = _prepare(x)
    tiles = triton.cdiv(x.numel(), TILE)
    if tiles:
        words = torch.zeros(tiles, dtype=torch.int64, device=x.device)
        # WINDOW is 128 for 128 threads. In a smaller one several warps would load the same word at different times, and
        # could see different values.
        scan_look_back_kernel[(tiles,)](x, y, words, x.numel(), TILE, 128, reverse, num_warps=4)
    return y


def look_back_in_slow_motion(x, BLOCK=256, WINDOW=4, resident=8):
    """scan_look_back as Python generators: a few are resident at once, and a random one of them takes the next step."""
    n, y, words = x.numel(), torch.empty_like(x), {}

    def program(tile):
        part = x[tile * BLOCK : (tile + 1) * BLOCK].float()
        total, before, nearest = part.sum(), 0.0, tile - 1
        words[tile] = ("PREFIX" if tile == 0 else "AGGREGATE", total)
        while nearest >= 0:
            yield  # other programs run here: between two looks any word may be published
            for _lane in range(WINDOW):
                state, value = words.get(nearest, ("EMPTY", 0.0))
                if state == "EMPTY":
                    break
                before += value
                nearest = -1 if state == "PREFIX" else nearest - 1
        words[tile] = ("PREFIX", before + total)
        y[tile * BLOCK : (tile + 1) * BLOCK] = part.cumsum(0) + before

    turns, alive = random.Random(0), [program(tile) for tile in range(-(-n // BLOCK))]
    while alive:
        turn = turns.choice(alive[:resident])  # a generator starts at its first step: in order, as programs do
        if next(turn, "ended") == "ended":
            alive.remove(turn)
    return y


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _look_back(x)

    @staticmethod
    def backward(ctx, dy):
        # x[i] is a term of y[i], y[i + 1], ... So dx[i] = dy[i] + dy[i + 1] + ..., a scan from the other end.
        return _look_back(dy.contiguous(), reverse=True)


def scan(x):
    """torch.cumsum(x, 0) of a vector, with a gradient."""
    return _Scan.apply(x)


def _prepare(x):
    expect(x=x, ndim=1, contiguous=True)
    return torch.empty_like(x)


@triton.jit
def look_back_probe_kernel(words_ptr, values_ptr, before_ptr, tile, prefix, WINDOW: tl.constexpr):
    for i in range(tile):
        publish(words_ptr + i, tl.where((i == 0) | (i == prefix), PREFIX, AGGREGATE), tl.load(values_ptr + i))
    tl.store(before_ptr, look_back(words_ptr, tile, WINDOW))


def any_mixture_of_words(rung):
    """Aggregates in one to three windows before a prefix. Interpreted programs run in order and never meet that."""
    if rung is not scan_look_back:
        raise Unsupported("no look-back in this rung")
    values = torch.randn(300, device=DEVICE)
    for prefix in (0, 37, 200, 298, 299):
        words, before = torch.zeros(300, dtype=torch.int64, device=DEVICE), torch.zeros((), device=DEVICE)
        look_back_probe_kernel[(1,)](words, values, before, 300, prefix, WINDOW=128, num_warps=4)
        torch.testing.assert_close(before, values[prefix:].sum(), rtol=1e-5, atol=1e-5)


def offsets_past_2_31(rung):
    """Zeros, then a scan across element 2^31; a case of that length would not leave room for its float64 answer."""
    if not device.HAS_GPU:
        raise Unsupported("8 GiB: on a GPU only")
    x = torch.zeros(2**31 + 4999, dtype=torch.bfloat16, device=DEVICE)
    x[-9000:] = tail = inputs(9000, dtype=torch.bfloat16)[0]
    y = rung(x)
    torch.testing.assert_close(y[-9000:], reference(tail))
    assert not y[:-9000].any(), "something before the first number"


LARGE = {"n": 2**28}

# The answers: the last element of x changes the last y alone, the first element changes all of y. Program 900 would
# hold its place and wait. If 600 programs started before program 1 and waited for it, program 1 would find no place:
# a deadlock.
LESSON = Lesson(
    about=About(
        teaches="cumsum in one pass: programs that wait for a neighbour without a deadlock",
        hours=1,
        operator="scan",
        pictures=("look_back", "traffic"),
    ),
    problem=PROBLEM,
    rungs=(scan_sequential, scan_three_phase, scan_look_back),
    predicted=(
        Prediction(
            rung=scan_sequential,
            at=LARGE,
            percent_of_limit=0.76,
            why="The one program loads nothing while it scans a block, so its SM does not keep memory busy.",
        ),
        Prediction(rung=scan_three_phase, at=LARGE, percent_of_limit=67),
        Prediction(rung=scan_look_back, at=LARGE, times=1.5, over=scan_three_phase),
    ),
    checks=(
        *PROBLEM.checks,
        case("exactly one tile", n=TILE),
        case("several tiles, the last one short", n=9 * TILE + 1234),
    ),
    benches=tuple({"n": n} for n in (2**20, 2**24, 2**26, 2**28)),
    wrong=(
        Mutant("the carry forgets", "scan_sequential_kernel", "carry +=", "carry =", "scan_sequential"),
        Mutant("the carry includes this block", "scan_blocks_kernel", "block - 1", "block", "scan_three_phase"),
        Mutant("sums of blocks in 16 bits", "scan_three_phase", "float32", "bfloat16", "scan_three_phase"),
        Mutant("the prefix itself is left out", "look_back", "stop + 1", "stop", "scan_look_back"),
        # Wrong in every order of programs. A mutant that is wrong in some orders only could pass by luck.
        Mutant("a tile counts itself", "look_back", "nearest = tile - 1", "nearest = tile", "scan_look_back"),
        Mutant("a sum converted, not its bits", "publish", "int32, bitcast=True", "int32", "scan_look_back", "nan"),
        Mutant("a lane too many", "scan_look_back_kernel", "size, o", "size + 1, o", "scan_look_back", "out of bounds"),
    ),
    claims={scan_look_back: ("16-byte loads", "16-byte stores", "no spills")},
    passes={scan_sequential: 1.0, scan_three_phase: 1.5, scan_look_back: 1.0},
    properties=(*PROBLEM.properties, any_mixture_of_words, offsets_past_2_31),
    grad=Grad(scan),
    # The budget is 16 times PyTorch's own error. On a CPU that error is one rounding, because it accumulates in
    # float64. k additions in a row in fp32 give about sqrt(k) / 2 roundings. The interpreter scans a tile in order, so
    # about 32.
    factor=4,
    cpu_model=look_back_in_slow_motion,
)

if __name__ == "__main__":
    LESSON.main()
