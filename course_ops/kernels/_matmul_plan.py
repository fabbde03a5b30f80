"""Which tile, and how tiles are dealt out: a model of a 16-bit matmul's cycles on Hopper, for any M, N and K.

The model estimates the cycles of each plan and takes the plan with the fewest. Three questions decide.

How long does a step take? Each SM has one CTA, which multiplies tiles of C by steps of 64 along K. The MMAs of a step
and the copies of its rows of A and B from L2 run at the same time, so the longer of the two counts. A row of a block is
64 elements, 128 bytes. L2 reads sectors of 32 bytes: 4 for the row, or 5 if it does not begin at a multiple of 32
bytes. Its copy then takes 1.7 times as long. A tile of 192 x 256 copies 22% fewer rows per multiply-add than one of 128
x 256. Where the rows of both matrices need 5 sectors, that decides between MMA-bound and L2-bound.

Who else needs the block of B? Two tiles, one above the other, have the same. From Triton 3.8 on, two CTAs can be a
pair, on two SMs. Then one copy from L2 writes B's block to both (multicast), so each CTA reads half of B's rows:

    CTA 0   | 128 rows of A |  x  | B: 256 columns, |        rows from L2 for each step of a CTA
    CTA 1   | 128 rows of A |  x  | read once       |        alone 128 + 256, in a pair 128 + 128

So the tensor cores stay the limit where rows begin within a sector. A stage is free for the next copy when the
consumers of both CTAs have read it, which takes longer.

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
was 3% faster in the mean than the better of two tiles by waves alone. The constants of pairs are fits to the times of
all plans at 68 more shapes. There the choice is 0.7% slower than the best plan in the mean, 5.6% at worst, and 7%
faster than the choice without pairs. So the model ranks plans; it does not predict a kernel's time.
"""

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from torch import Tensor

from course_ops.versions import HAS_REMOTE_ARRIVE

STEP = 64  # elements of K in a block: 128 bytes, the widest swizzle
SECTOR = 32  # bytes of L2 that are read together
TILES = ((128, 256), (192, 256), (128, 128), (192, 128))  # 64 rows for each consumer warpgroup
# Tiles of matmul_tiles_hopper, which computes only whole tiles. Each has two consumers, and its columns may be in two
# parts (parts_of). Shared memory holds three stages of each. Of 256 x 192 it holds two, so that tile is absent: a copy
# would wait for the MMAs of the step before. On an H200 8192 x 8192 x 28672 took 9.65 ms in tiles of 256 x 192, and
# 5.49 ms in tiles of 192 x 256.
OTHER_TILES = ((128, 64), (128, 96), (128, 160), (128, 192), (128, 288), (128, 320), (256, 128), (256, 160))
NO_EPILOGUE = ((192, 256), (192, 128))  # three consumers, which load themselves: so not in pairs either
MMA = 2048 * 0.95  # multiply-adds a cycle that an SM sustains
HANDOVER, OWN_LOADS = 40, 60  # cycles to hand over a stage; cycles more where a consumer starts its loads
OF_PAIR = 30  # cycles more to hand over a stage that the consumers of two CTAs have to read
WIDE = 1.04  # times the cycles of a step of more than 256 columns: a fit
ROW, SHIFTED_ROW = 2.27, 3.84  # cycles to copy a row of a block that begins at a sector, and one that does not
ENDS, STORE = 500, 64  # cycles of a tile in which no MMA runs; bytes of C that are stored in a cycle
MEETING, SUMS = 1500, 24  # cycles to wait for another CTA; bytes of fp32 sums a cycle, each way
STARTS = 2500  # cycles that a pair starts later than split_k_kernel: between what two shapes of one wave show, H200
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
APART = 0.007, 0.0025  # as DRIFT, of a shared step's copies: CTAs are at different places along K. Alone; in pairs


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
    ctas: int = 1  # 2: a pair of CTAs, each with a tile; shared_tiles counts pairs of tiles then

    @property
    def other(self) -> bool:
        """Whether matmul_tiles_hopper alone has this tile."""
        return (self.block_m, self.block_n) not in TILES

    @property
    def rows_apart(self) -> tuple[int, int] | None:
        """How a pair has a block of A or C, for describer: each CTA half of its rows."""
        return (1, 0) if self.ctas == 2 else None

    @property
    def same(self) -> tuple[int, int] | None:
        """How a pair has a block of B, for describer: each CTA all of it."""
        return (0, 0) if self.ctas == 2 else None


def mma_cycles(block_m: int, block_n: int) -> float:
    """Cycles of a step's MMAs. One of 64 x n x 16 takes n / 2, or the time to read 2 KB and 32 n bytes, 128 a cycle."""
    cycles = sum(max(n / 2, 16 + n / 4) for n in parts_of(block_n) if n)
    return block_m / 64 * STEP / 16 * cycles * 2048 / MMA


def step_cycles(block_m: int, block_n: int, copies: float, ctas: int) -> float:
    """Cycles of a step, whose copies take so many."""
    cycles = HANDOVER + OWN_LOADS * (block_m == 192) + OF_PAIR * (ctas == 2) + max(mma_cycles(block_m, block_n), copies)
    return WIDE * cycles if block_n > 256 else cycles


def plans(
    M: int, N: int, K: int, a_aligned: bool, b_aligned: bool, sms: int, pairs: bool = HAS_REMOTE_ARRIVE
) -> Iterator[Plan]:
    """Every plan for C [M, N] with its estimated cycles. a_aligned, b_aligned: rows begin at sectors."""
    steps = math.ceil(K / STEP)
    for ctas, (block_m, block_n) in product((1, 2) if pairs else (1,), TILES + OTHER_TILES):
        if ctas == 2 and (block_m, block_n) in NO_EPILOGUE:
            continue
        clusters = sms // ctas
        tiles = math.ceil(M / (ctas * block_m)) * math.ceil(N / block_n)
        copies = block_m * (ROW if a_aligned else SHIFTED_ROW) + block_n / ctas * (ROW if b_aligned else SHIFTED_ROW)
        copies *= 1 + DRIFT * steps
        step = step_cycles(block_m, block_n, copies, ctas)
        ends = ENDS + 2 * block_m * block_n / STORE
        waves = math.ceil(tiles / clusters)
        cycles = waves * (steps * step + ends)
        if (block_m, block_n) in OTHER_TILES:
            shifted = ctas == 1 and not (a_aligned and b_aligned)
            yield Plan(block_m, block_n, 0, SHIFTED_OTHER * cycles if shifted else cycles, ctas)
            continue
        yield Plan(block_m, block_n, 0, cycles, ctas)
        # Less than half a wave: the split-K kernel divides the tiles. At most eight steps a CTA: nothing to divide.
        shared_tiles = tiles if tiles < clusters else tiles % clusters + clusters
        if 2 * tiles >= clusters and tiles % clusters and shared_tiles * steps >= 8 * clusters:
            meeting = MEETING + 2 * 4 * block_m * block_n / SUMS
            share, whole = math.ceil(shared_tiles * steps / clusters), (tiles - shared_tiles) // clusters * steps
            apart = share * copies * APART[ctas - 1] * steps
            cycles = (share + whole) * step + apart + (waves + 1) * ends + meeting
            yield Plan(block_m, block_n, shared_tiles, cycles, ctas)


@lru_cache(maxsize=4096)  # the host's time of a call is part of it
def best_plan(
    M: int, N: int, K: int, a_aligned: bool, b_aligned: bool, sms: int, whole_tiles_of: int = 0,
    pairs: bool = HAS_REMOTE_ARRIVE,
) -> Plan:  # fmt: skip
    """The plan of the fewest estimated cycles. whole_tiles_of: of one CTA's whole tiles in TILES with so many rows."""
    choices = list(plans(M, N, K, a_aligned, b_aligned, sms, pairs))
    fitted = [each for each in choices if not each.other]
    if whole_tiles_of:
        alone = (each for each in fitted if each.ctas == 1 and not each.shared_tiles)
        return fastest(each for each in alone if each.block_m == whole_tiles_of)
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
    tiles = math.ceil(M / (plan.ctas * plan.block_m)) * math.ceil(N / plan.block_n)
    waves = math.ceil(tiles / (sms // plan.ctas))
    return plan._replace(cycles=plan.cycles + waves * a_tile)


@lru_cache(maxsize=4096)
def cycles_of(tile: tuple[int, int], M: int, N: int, K: int, a_aligned: bool, b_aligned: bool, sms: int) -> float:
    """Estimated cycles of whole tiles of a given size, of one CTA each."""
    choices = plans(M, N, K, a_aligned, b_aligned, sms, pairs=False)
    return next(each.cycles for each in choices if each[:3] == (*tile, 0))


@lru_cache(maxsize=4096)
def plan_pays(
    block_n: int, splits: int, M: int, N: int, K: int, a_aligned: bool, b_aligned: bool, sms: int,
    pairs: bool = HAS_REMOTE_ARRIVE,
) -> bool:  # fmt: skip
    """Whether the best plan beats one wave of tiles of 128 x block_n. Not if the wave splits K, or has few steps."""
    if splits > 1 or K < 8 * STEP:
        return False
    shape = M, N, K, a_aligned, b_aligned, sms
    best = best_plan(*shape, pairs=pairs)
    return best.cycles + STARTS * (best.ctas == 2) < LEAD * cycles_of((128, block_n), *shape)


@lru_cache(maxsize=4096)
def copies_that_pay(
    M: int, N: int, K: int, a_aligned: bool, b_aligned: bool, sms: int, pairs: bool = HAS_REMOTE_ARRIVE
) -> tuple[bool, bool]:
    """Whether to copy A, and B, to rows that begin at sectors before they are multiplied."""

    def cycles(copy_a: bool, copy_b: bool) -> float:
        copies = 2 * 2 * K * (M * copy_a + N * copy_b) / COPY + LAUNCH * (copy_a or copy_b)
        return copies + best_plan(M, N, K, a_aligned or copy_a, b_aligned or copy_b, sms, pairs=pairs).cycles

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
