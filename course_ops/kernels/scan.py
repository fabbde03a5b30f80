"""Prefix sums: one pass by decoupled look-back (Merrill and Garland 2016), and three deterministic phases."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 8192  # 64 elements per thread
EMPTY, AGGREGATE, PREFIX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def publish(word_ptr, state, value):
    """State and value in one aligned 64-bit word arrive together, so relaxed accesses are enough."""
    # The mask drops the sign, which would spread over the state above it.
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.atomic_xchg(word_ptr, (state.to(tl.int64) << 32) | bits, sem="relaxed", scope="gpu")


@triton.jit
def look_back(words_ptr, tile, WINDOW: tl.constexpr):  # words [tiles]
    """The sum of all tiles before this one, WINDOW predecessors at a time, the nearest in element 0."""
    lanes = tl.arange(0, WINDOW)
    before = 0.0
    nearest = tile - 1
    while nearest >= 0:
        ids = nearest - lanes
        # volatile: read memory each time. Elements before tile 0 stay EMPTY; tile 0 always stops the search.
        words = tl.load(words_ptr + ids, mask=ids >= 0, other=0, volatile=True)
        state = words >> 32
        value = words.to(tl.int32).to(tl.float32, bitcast=True)
        known = tl.min(tl.where(state == EMPTY, lanes, WINDOW))  # so many neighbours have published something
        stop = tl.min(tl.where(state == PREFIX, lanes, WINDOW))
        found = stop < known
        take = tl.where(found, stop + 1, known)
        before += tl.sum(tl.where(lanes < take, value, 0.0))
        nearest = tl.where(found, -1, nearest - take)  # take 0: the next one is not there yet, so look again
    return before


# A program keeps its tile in registers and publishes first (AGGREGATE, its sum), then (PREFIX, the sum up to its end).
# Programs wait for lower ids only, and GPUs start programs in the order of their ids, so waiting ends. The scan comes
# after the look-back: otherwise x and its scan would both occupy registers through the wait.
@triton.jit
def look_back_kernel(x_ptr, y_ptr, words_ptr, n, BLOCK: tl.constexpr, WINDOW: tl.constexpr, REVERSE: tl.constexpr):
    # x, y [n], words [tiles] of int64, EMPTY at first. REVERSE scans from the end to the start.
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
    # Published before the scan below, for others wait for it. Tile 0 has nothing before it: its sum is a prefix.
    publish(words_ptr + tile, tl.where(tile == 0, PREFIX, AGGREGATE), total)
    before = look_back(words_ptr, tile, WINDOW)
    publish(words_ptr + tile, tl.full((), PREFIX, tl.int32), before + total)
    y = tl.cumsum(x, reverse=REVERSE) + before
    if size == BLOCK:
        tl.store(y_ptr + start + lanes, y)
    else:
        tl.store(y_ptr + start + lanes, y, mask=lanes < size)


def scan_look_back(x: Tensor, reverse: bool = False) -> Tensor:
    """[n] contiguous -> [n] in one pass, summed in fp32. Runs agree to rounding, not to the bit."""
    y, tiles = torch.empty_like(x), triton.cdiv(x.numel(), TILE)
    if tiles:
        words = torch.zeros(tiles, dtype=torch.int64, device=x.device)
        # WINDOW 128 for 128 threads: in a smaller one several warps would load the same word, and at times disagree.
        look_back_kernel[(tiles,)](x, y, words, x.numel(), TILE, 128, reverse, num_warps=4)
    return y


@triton.jit
def block_sums_kernel(x_ptr, sums_ptr, n, BLOCK: tl.constexpr):  # x [n], sums [blocks]
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0).to(tl.float32)
    tl.store(sums_ptr + block, tl.sum(x))


@triton.jit
def scan_sequential_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # [n] each, by one program
    carry = 0.0
    for block in range(tl.cdiv(n, BLOCK)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)  # block has n's width, 64 bits past 2^31: no overflow
        mask = offsets < n
        x = tl.load(x_ptr + offsets, mask=mask, other=0).to(tl.float32)
        tl.store(y_ptr + offsets, tl.cumsum(x) + carry, mask=mask)
        carry += tl.sum(x)


@triton.jit
def scan_blocks_kernel(x_ptr, y_ptr, ends_ptr, n, BLOCK: tl.constexpr):  # x, y [n], ends [blocks]
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0).to(tl.float32)
    before = tl.load(ends_ptr + block - 1, mask=block > 0, other=0)  # block 0 has nothing before it
    tl.store(y_ptr + offsets, tl.cumsum(x) + before, mask=mask)


def scan_three_phase(x: Tensor, reverse: bool = False) -> Tensor:
    """As scan_look_back, by three kernels that read x twice: the same bits in every run."""
    if reverse:
        return scan_three_phase(x.flip(0)).flip(0)
    y, blocks = torch.empty_like(x), triton.cdiv(x.numel(), 4096)
    if blocks:
        sums, ends = torch.empty(2, blocks, dtype=torch.float32, device=x.device).unbind()
        block_sums_kernel[(blocks,)](x, sums, x.numel(), BLOCK=4096, num_warps=8)
        scan_sequential_kernel[(1,)](sums, ends, blocks, BLOCK=4096, num_warps=8)
        scan_blocks_kernel[(blocks,)](x, y, ends, x.numel(), BLOCK=4096, num_warps=8)
    return y
