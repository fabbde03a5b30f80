"""Which tile, and how tiles are dealt out: a model of a 16-bit matmul's cycles on Hopper, for any M, N and K.

The model estimates the cycles of each plan and takes the plan with the fewest. Two questions decide.

How long does a step take? Each SM has one CTA, which multiplies tiles of C by steps of 64 along K. The MMAs of a step
and the copies of its rows of A and B from L2 run at the same time, so the longer of the two counts. A row of a block is
64 elements, 128 bytes. L2 reads sectors of 32 bytes: 4 for the row, or 5 if it does not begin at a multiple of 32
bytes. Its copy then takes 1.7 times as long. A tile of 192 x 256 copies 22% fewer rows per multiply-add than one of 128
x 256. Where the rows of both matrices need 5 sectors, that decides between MMA-bound and L2-bound.

How full is the machine? Whole tiles run in waves, one tile per SM, and the last wave may be nearly empty. Stream-K
(Osama et al. 2023, section 5.2) has no such last wave. It deals out the steps of the first tiles, more than one wave
and less than two, in equal shares:

    five tiles on three SMs; a digit is the tile that an SM multiplies, . is idle

    whole tiles   SM 0  000000000333333333      Stream-K   SM 0  000000000111111
                  SM 1  111111111444444444                 SM 1  111222222222333
                  SM 2  222222222.........                 SM 2  333333444444444

A tile whose steps have two owners costs a trip of fp32 sums through L2.

The constants are fits to the times of all plans at 76 shapes on an H200. Then 37 other shapes were chosen at random.
There the chosen plan was 1.5% slower than the best of the eight in the mean, and 28% at worst (8664 x 552 x 1872). It
was 3% faster in the mean than the better of two tiles by waves alone. So the model ranks plans; it does not predict a
kernel's time.
"""

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from torch import Tensor

STEP = 64  # elements of K in a block: 128 bytes, the widest swizzle
SECTOR = 32  # bytes of L2 that are read together
TILES = ((128, 256), (192, 256), (128, 128), (192, 128))  # 64 rows for each consumer warpgroup
# Tiles of matmul_tiles_hopper, which computes only whole tiles. Each has two consumers, and its columns may be in two
# parts (parts_of). Shared memory holds three stages of each. Of 256 x 192 it holds two, so that tile is absent: a copy
# would wait for the MMAs of the step before. On an H200 8192 x 8192 x 28672 took 9.65 ms in tiles of 256 x 192, and
# 5.49 ms in tiles of 192 x 256.
OTHER_TILES = ((128, 64), (128, 96), (128, 160), (128, 192), (128, 288), (128, 320), (256, 128), (256, 160))
NO_EPILOGUE = ((192, 256), (192, 128))  # three consumers

MMA = 2048 * 0.95  # multiply-adds a cycle that an SM sustains
HANDOVER, OWN_LOADS = 40, 60  # cycles to hand over a stage; cycles more where a consumer starts its loads
ROW, SHIFTED_ROW = 2.27, 3.84  # cycles to copy a row of a block that begins at a sector, and one that does not
ENDS, STORE = 500, 64  # cycles of a tile in which no MMA runs; bytes of C that are stored in a cycle
MEETING, SUMS = 1500, 24  # cycles to wait for another CTA; bytes of fp32 sums a cycle, each way
# DRIFT and APART stand for bytes that L2 no longer has when a CTA copies them.
DRIFT = 0.001  # each step of a tile adds this share of the copies' cycles, since CTAs drift apart
LEAD = 0.97  # a tile outside TILES, for which the constants are fitted, has to take less than this share of the cycles
SHIFTED_OTHER = 1.13  # times the cycles of OTHER_TILES where rows begin within a sector: measured at three shapes, H200
# What copies cost: bytes a cycle that they read and write, and cycles of their launch. Both are fits to the time that
# copies save on an H200. It is 23 us at 5000 x 5000 x 5000, 9 us at 5000 x 5000 x 5056, and nothing at 3000 x 3000 x
# 3000. A copy is faster than that, but the plans after copies take 7% longer than estimated.
COPY, LAUNCH = 1400, 12_000
COPIES = 0.975  # copies and the plan after them have to take less than this share of the cycles without copies
# Cycles in which a bias is added and GELU applied, while no MMA runs.
TMA_EPILOGUE = 5200  # a tile of linear's tma_kernel, of 128 columns or 256: a fit to 32 shapes on an H200
TILES_EPILOGUE = 0.11  # an element of a tile of matmul_tiles_hopper: estimated from its instructions
APART = 0.007  # as DRIFT, of a shared step's copies: its CTAs are at different places along K


def parts_of(block_n: int) -> tuple[int, int]:
    """A tile's columns as those of its left and its right part: powers of two, the right one 0, 32 or 64."""
    left = 2 ** (block_n.bit_length() - 1)
    return left, block_n - left


class Plan(NamedTuple):
    """A tile, and how many tiles, from the first on, are dealt out by steps; the others are dealt out whole."""

    block_m: int
    block_n: int
    shared_tiles: int
    cycles: float

    @property
    def other(self) -> bool:
        """Whether matmul_tiles_hopper alone has this tile."""
        return (self.block_m, self.block_n) not in TILES


def mma_cycles(block_m: int, block_n: int) -> float:
    """Cycles of a step's MMAs. One of 64 x n x 16 takes n / 2, or the time to read 2 KB and 32 n bytes, 128 a cycle."""
    cycles = sum(max(n / 2, 16 + n / 4) for n in parts_of(block_n) if n)
    return block_m / 64 * STEP / 16 * cycles * 2048 / MMA


def plans(M: int, N: int, K: int, a_aligned: bool, b_aligned: bool, sms: int) -> Iterator[Plan]:
    """Every plan for C [M, N] with its estimated cycles. a_aligned, b_aligned: rows begin at sectors."""
    steps = math.ceil(K / STEP)
    for block_m, block_n in TILES + OTHER_TILES:
        tiles = math.ceil(M / block_m) * math.ceil(N / block_n)
        copies = block_m * (ROW if a_aligned else SHIFTED_ROW) + block_n * (ROW if b_aligned else SHIFTED_ROW)
        copies *= 1 + DRIFT * steps
        step = HANDOVER + OWN_LOADS * (block_m == 192) + max(mma_cycles(block_m, block_n), copies)
        ends = ENDS + 2 * block_m * block_n / STORE
        waves = math.ceil(tiles / sms)
        cycles = waves * (steps * step + ends)
        if (block_m, block_n) in OTHER_TILES:
            yield Plan(block_m, block_n, 0, cycles if a_aligned and b_aligned else SHIFTED_OTHER * cycles)
            continue
        yield Plan(block_m, block_n, 0, cycles)
        # Less than half a wave: the split-K kernel divides the tiles. At most eight steps a CTA: nothing to divide.
        shared_tiles = tiles if tiles < sms else tiles % sms + sms
        if 2 * tiles >= sms and tiles % sms and shared_tiles * steps >= 8 * sms:
            meeting = MEETING + 2 * 4 * block_m * block_n / SUMS
            share, whole = math.ceil(shared_tiles * steps / sms), (tiles - shared_tiles) // sms * steps
            apart = share * copies * APART * steps
            yield Plan(block_m, block_n, shared_tiles, (share + whole) * step + apart + (waves + 1) * ends + meeting)


@lru_cache(maxsize=4096)  # the host's time of a call is part of it
def best_plan(M: int, N: int, K: int, a_aligned: bool, b_aligned: bool, sms: int, whole_tiles_of: int = 0) -> Plan:
    """The plan of the fewest estimated cycles. whole_tiles_of: of whole tiles in TILES with that many rows."""
    choices = list(plans(M, N, K, a_aligned, b_aligned, sms))
    fitted = [each for each in choices if not each.other]
    if whole_tiles_of:
        return fastest(each for each in fitted if each.block_m == whole_tiles_of and not each.shared_tiles)
    best, of_fitted = fastest(choices), fastest(fitted)
    return best if best.cycles < LEAD * of_fitted.cycles else of_fitted


def fastest(choices: Iterable[Plan]) -> Plan:
    return min(choices, key=lambda each: each.cycles)


@lru_cache(maxsize=4096)
def best_epilogue_plan(M: int, N: int, K: int, a_aligned: bool, b_aligned: bool, sms: int) -> Plan:
    """The best of epilogue_plans."""
    return fastest(epilogue_plans(M, N, K, a_aligned, b_aligned, sms))


def epilogue_plans(M: int, N: int, K: int, a_aligned: bool, b_aligned: bool, sms: int) -> list[Plan]:
    """Those of matmul_tiles_hopper that have registers for an epilogue: whole tiles for two consumers."""
    choices = plans(M, N, K, a_aligned, b_aligned, sms)
    return [each for each in choices if not each.shared_tiles and each[:2] not in NO_EPILOGUE]


@lru_cache(maxsize=4096)
def linear_plan(M: int, N: int, K: int, a_aligned: bool, b_aligned: bool, sms: int) -> Plan:
    """The best of epilogue_plans with the cycles of linear's epilogue."""
    choices = epilogue_plans(M, N, K, a_aligned, b_aligned, sms)
    return fastest(with_epilogue(each, TILES_EPILOGUE * each.block_m * each.block_n, M, N, sms) for each in choices)


@lru_cache(maxsize=4096)
def tma_plan(M: int, N: int, K: int, a_aligned: bool, b_aligned: bool, sms: int) -> Plan:
    """The better of the tiles of linear's tma_kernel, 128 x 128 and 128 x 256, with its epilogue."""
    shape = M, N, K, a_aligned, b_aligned, sms
    tiles = (Plan(128, block_n, 0, cycles_of((128, block_n), *shape)) for block_n in (128, 256))
    return fastest(with_epilogue(each, TMA_EPILOGUE, M, N, sms) for each in tiles)


def with_epilogue(plan: Plan, a_tile: float, M: int, N: int, sms: int) -> Plan:
    """A plan of whole tiles with the cycles of each tile's epilogue."""
    waves = math.ceil(math.ceil(M / plan.block_m) * math.ceil(N / plan.block_n) / sms)
    return plan._replace(cycles=plan.cycles + waves * a_tile)


@lru_cache(maxsize=4096)
def cycles_of(tile: tuple[int, int], M: int, N: int, K: int, a_aligned: bool, b_aligned: bool, sms: int) -> float:
    """Estimated cycles of whole tiles of a given size."""
    return next(each.cycles for each in plans(M, N, K, a_aligned, b_aligned, sms) if each[:3] == (*tile, 0))


@lru_cache(maxsize=4096)
def plan_pays(block_n: int, splits: int, M: int, N: int, K: int, a_aligned: bool, b_aligned: bool, sms: int) -> bool:
    """Whether the best plan beats one wave of tiles of 128 x block_n. Not if the wave splits K, or has few steps."""
    if splits > 1 or K < 8 * STEP:
        return False
    shape = M, N, K, a_aligned, b_aligned, sms
    return best_plan(*shape).cycles < LEAD * cycles_of((128, block_n), *shape)


@lru_cache(maxsize=4096)
def copies_that_pay(M: int, N: int, K: int, a_aligned: bool, b_aligned: bool, sms: int) -> tuple[bool, bool]:
    """Whether to copy A, and B, to rows that begin at sectors before they are multiplied."""

    def cycles(copy_a: bool, copy_b: bool) -> float:
        copies = 2 * 2 * K * (M * copy_a + N * copy_b) / COPY + LAUNCH * (copy_a or copy_b)
        return copies + best_plan(M, N, K, a_aligned or copy_a, b_aligned or copy_b, sms).cycles

    best = min(product((False, not a_aligned), (False, not b_aligned)), key=lambda which: cycles(*which))
    return best if cycles(*best) < COPIES * cycles(False, False) else (False, False)


def aligned_rows(t: Tensor) -> bool:
    """Whether each row or, if it lies transposed, each column begins at a sector of L2."""
    return t.data_ptr() % SECTOR == 0 and max(t.stride()) * t.element_size() % SECTOR == 0


def plan_of(a: Tensor, b: Tensor, sms: int, whole_tiles_of: int = 0) -> Plan:
    """The best plan for a [M, K] times b [K, N]; whole_tiles_of as best_plan has it."""
    shape = a.shape[0], b.shape[1], a.shape[1]
    return best_plan(*shape, aligned_rows(a), aligned_rows(b), sms, whole_tiles_of)


def group_of(tiles_m: int, block_m: int, block_n: int, sms: int) -> int:
    """Rows of tiles in a group: those of a wave form about a square, which has the fewest rows of A and B to read.

    All groups are about equally high: 27 rows of tiles are 14 and 13, not 13, 13 and 1.
    """
    square = max(1.0, math.sqrt(sms * block_n / block_m))
    return math.ceil(tiles_m / max(1, round(tiles_m / square)))
