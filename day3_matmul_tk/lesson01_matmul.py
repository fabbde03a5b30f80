"""Matmul: tiles, their order, their pipeline, their size
======================================================
C = A B, A [M, K], B [K, N]: 2MNK FLOPs on (MK + KN + MN) elements. At M = N = K = 8192 in bf16 that is 1.1 TFLOP on
403 MB, 2731 FLOPs per byte. An H200 (about 800 TFLOP/s, 4.2 TB/s) does 190 FLOPs in the time of one byte. So
arithmetic is the limit, if each element comes from HBM once. But the operands do not fit on chip, so every element of A
and B is loaded many times.

A program computes a tile of C, BLOCK_M x BLOCK_N, in steps of 64 along K. In each step it loads a block of A and one of
B, and tl.dot multiplies them on the tensor cores. For each k that is BLOCK_M + BLOCK_N elements, and BLOCK_M * BLOCK_N
multiply-adds:

    tile        FLOPs per byte   bytes from L2 at 8192   cycles of a step of 64: multiply   load at 39 bytes per cycle
    64 x 64     32               34.4 GB                  128                                420
    128 x 128   64               17.2 GB                  512                                840
    128 x 256   85               12.9 GB                 1024                               1260

A Hopper SM does 2048 multiply-adds per cycle in 16 bits. L2 gives all 132 SMs together about 5120 bytes per cycle, 39
each. So the load takes longer: L2 is the limit, and a larger tile asks less of it. Predicted: 61% of the tensor cores'
peak for tiles of 128 x 128, and 81% for 128 x 256. For the peak we take 800 TFLOP/s, about what cuBLAS sustains.

New words (GLOSSARY.md): wave, FLOP, arithmetic intensity, autotuning, tensor core, MMA, accumulator.
You will be able to: write a tiled matmul, and say which tile, order and pipeline it needs.
You need: day 2, lessons 0 (blocks of two dimensions), 1 (bytes in flight) and 4 (a pipelined loop).
Run it:    python3 course.py run lesson01_matmul
Check it:  python3 course.py check lesson01_matmul
Time it:   python3 course.py bench lesson01_matmul
"""

import math

from lessonkit import About, Lesson, Mutant, Prediction, Unsupported, case, compiled, device, num_sms, shared_memory

import triton
import triton.language as tl

from problems.matmul import PROBLEM, empty_product, precision


# What a program does for one tile of C, the same in all rungs of this lesson. The fp32 accumulator stays in registers:
# 128 x 128 on 8 warps takes 64 of a thread's 255.
@triton.jit
def multiply_tile(
    a_ptr, b_ptr, c_ptr,  # [M, K], [K, N], [M, N]
    tile_m, tile_n, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # int64 before any stride: a row index times a stride passes 2^31 as soon as the matrix has 2^31 elements.
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + ks[None, :].to(tl.int64) * stride_ak
    b_ptrs = b_ptr + ks[:, None].to(tl.int64) * stride_bk + cols[None, :] * stride_bn
    a_step = tl.full([], BLOCK_K, tl.int64) * stride_ak
    b_step = tl.full([], BLOCK_K, tl.int64) * stride_bk
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        # Past K both operands are 0. One alone would not do, since 0 * inf is NaN.
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & (ks[None, :] < K - k), other=0)
        b = tl.load(b_ptrs, mask=(ks[:, None] < K - k) & (cols[None, :] < N), other=0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += a_step
        b_ptrs += b_step
    c_ptrs = c_ptr + rows[:, None] * stride_cm + cols[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


# Rung 1. One program for each tile, on a 2D grid. Programs start in the order of axis 0, here along a row of tiles.
# From L2: MK * N/128 + KN * M/128 elements. From HBM, at 8192: two programs fit on an SM, so a wave is 264 of the 4096
# tiles, four rows and a bit. They need all columns of B: 134 MB, and L2 holds 60. So each of the 16 waves reads
# B from HBM: 2.1 GB, 0.5 ms, where the multiplication takes 1.4 ms.
#
# num_stages=1: load, wait, multiply, one after the other. Predicted for one program alone: 600 to 1000 cycles until its
# loads arrive, then 512 of MMA, so 34% to 46% of the peak, 270 to 370 TFLOP/s. The second program can use the waits,
# but L2 allows 61%, 490 TFLOP/s, at most.
@triton.jit
def tiles_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    multiply_tile(
        a_ptr, b_ptr, c_ptr, tl.program_id(1), tl.program_id(0), M, N, K,
        stride_am, stride_ak, stride_bk, stride_bn, stride_cm, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip


def tiles(a, b):
    """[M, K], [K, N] -> [M, N], any strides. In fp32 TF32 only if torch.set_float32_matmul_precision allows it."""
    c, args, block = _prepare(a, b)
    grid = triton.cdiv(c.shape[1], block[1]), triton.cdiv(c.shape[0], block[0])
    if grid[1] > 65535:
        raise Unsupported("a grid has at most 65,535 programs along its second axis: 8.4 million rows of C")
    if c.numel():
        tiles_kernel[grid](*args, *block, precision(), num_warps=8, num_stages=1)
    return c


# Rung 2. New: the grouped order. Program ids go down GROUP rows of tiles before they go to the next column of tiles.
# The 264 tiles that run together are then 8 x 33 and not 4 x 64. For GROUP = 3, 5 rows of tiles and 4 columns:
#
# |   row by row        in groups            a wave of 6 programs, ids 0 to 5, reads
# |    0  1  2  3        0  3  6  9          row by row: 2 rows of tiles of A, 4 columns of tiles of B
# |    4  5  6  7        1  4  7 10          in groups:  3 rows of tiles of A, 2 columns of tiles of B
# |    8  9 10 11        2  5  8 11
# |   12 13 14 15       12 14 16 18          the last group is lower: 2 rows
# |   16 17 18 19       13 15 17 19
#
# From L2: the same bytes. From HBM, at 8192: (8 + 33) * 128 rows and columns of 8192 elements for each wave of 264
# tiles, 86 MB instead of 143. The 15.5 waves read 1.3 GB instead of 2.2 GB. At 4.2 TB/s that saves at most 0.21 ms of
# rung 1's 2.2 to 4.1 ms, so 1.1 times. If only one program fits on an SM, a wave is 132 tiles. Then 1.6 GB instead of
# 4.3 GB save up to 0.64 ms of 3.0 to 4.1 ms: 1.2 times.
# Predicted: no gain where rung 1's waits for HBM overlap with MMAs of the other program, up to 1.2 times where they do
# not.
@triton.jit
def place(program, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """The tile (row, column) that a program computes."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = program // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)  # the last group may be lower
    within = program % (GROUP * tiles_n)
    return first + within % height, within // height


@triton.jit
def grouped_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = place(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)  # New
    multiply_tile(
        a_ptr, b_ptr, c_ptr, tile_m, tile_n, M, N, K,
        stride_am, stride_ak, stride_bk, stride_bn, stride_cm, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip


def grouped(a, b, stages=1):
    """As tiles, in groups of 8 rows of tiles."""
    c, args, block = _prepare(a, b)
    grid = (triton.cdiv(c.shape[0], block[0]) * triton.cdiv(c.shape[1], block[1]),)
    if c.numel():
        grouped_kernel[grid](*args, *block, precision(), 8, num_warps=8, num_stages=stages)
    return c


# Rung 3. New: num_stages=4, and nothing else. The compiler pipelines the loop: it loads the blocks of step k+3 while it
# multiplies those of step k. The loads are cp.async, which copies from global to shared memory without registers, and
# the thread goes on. The price is shared memory: 4 * (128 + 128) * 64 * 2 bytes = 128 KB of an SM's 227, so one program
# fits on an SM where two did.
#
# |   num_stages=1   LLLLLLMMMLLLLLLMMMLLLLLLMMM             L: a step's load runs, M: its MMA runs
# |
# |   num_stages=4   LLLLLLMMM
# |                  LLLLLL...MMM                            a line for each step; . = loaded, waits for its turn
# |                  LLLLLL......MMM
# |                  LLLLLL.........MMM
# |                           LLLLLL...MMM                   step 4 takes step 0's stage, three steps ahead
#
# Predicted: 840 cycles per step, as the table says: 61% of the peak, 490 TFLOP/s.
def pipelined(a, b):
    """As grouped, with four stages, or three on a GPU with 99 KB for a block."""
    return grouped(a, b, stages=min(4, shared_memory() // ((128 + 128) * 64 * 2)))


# Rung 4. New: triton.autotune chooses the tile. For a new shape it runs the kernel with several configurations (tile,
# warps, stages), and keeps the fastest. No tile is best everywhere. At 1024, tiles of 128 x 256 are 32 programs for 132
# SMs. At 8192, tiles of 64 x 64 ask too much of L2. To time all 54 configurations would take minutes of compilation for
# each new shape. So `_prune` drops those that cannot run, the arithmetic of the table ranks the rest, and the best 5
# are timed (`cache_results` keeps the times on disk). Predicted at 8192: 128 x 256, 81% of the peak, 650 TFLOP/s.
#
# Answer before you read on. A tile of 256 x 256 would do 128 FLOPs per byte. How many accumulators would a thread hold,
# in a program of 8 warps? Which of the rungs reads fewer bytes from HBM than the one before, and which from L2?
def _predicted_cycles(M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, **_):
    """Cycles of a 16-bit matmul on Hopper if only tensor cores and L2 cost time. For ranking tiles, not for timing."""
    tiles = math.ceil(M / BLOCK_M) * math.ceil(N / BLOCK_N)
    share = min(64, 5120 / min(tiles, num_sms()))  # bytes per cycle from L2; an SM takes no more than 64
    step = max(BLOCK_M * BLOCK_N * BLOCK_K / 2048, 2 * (BLOCK_M + BLOCK_N) * BLOCK_K / share)
    step += 300  # wait for a stage and issue its MMA: why steps should not be short
    ends = 1500 + 2 * BLOCK_M * BLOCK_N / share  # until the first operands arrive, and to write C
    return math.ceil(tiles / num_sms()) * (math.ceil(K / BLOCK_K) * step + ends)


def _prune(configs, named, **_):
    """Keep configurations that fit and can be fast, and only the best of them if the matmul takes microseconds."""
    size = named["a_ptr"].element_size()
    shape = {name: named[name] for name in "MNK"}
    least, most = (32, 128) if size == 2 else (16, 32)  # accumulators a thread; fp32 operands take registers too

    def fits(c):
        m, n, k = (c.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
        return c.num_stages * (m + n) * k * size <= shared_memory() and least <= m * n // (32 * c.num_warps) <= most

    fitting = sorted(filter(fits, configs), key=lambda c: _predicted_cycles(**shape, **c.kwargs))
    return fitting if device.HAS_GPU and math.prod(shape.values()) >= 2**27 else fitting[:1]


def _time(call, quantiles):  # without a GPU there is nothing to time, and one configuration to choose from
    return triton.testing.do_bench(call, quantiles=quantiles) if device.HAS_GPU else [0, 0, 0]


CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": 8}, num_warps=warps, num_stages=stages)
    for m in (64, 128, 256) for n in (64, 128, 256) for k, stages in ((64, 4), (64, 3), (128, 3)) for warps in (4, 8)
]  # fmt: skip
tuned_kernel = triton.autotune(
    CONFIGS,
    key=["M", "N", "K", "stride_ak", "stride_bn"],  # and the dtypes, which Triton adds
    prune_configs_by={"early_config_prune": _prune, "perf_model": _predicted_cycles, "top_k": 5},
    do_bench=_time, cache_results=True,
)(grouped_kernel)  # fmt: skip


def autotuned(a, b):
    """As pipelined; the first call of a shape times up to five tiles and keeps the fastest."""
    c, args, _ = _prepare(a, b)
    if c.numel():
        tuned_kernel[lambda x: (triton.cdiv(c.shape[0], x["BLOCK_M"]) * triton.cdiv(c.shape[1], x["BLOCK_N"]),)](
            *args, PRECISION=precision()
        )
    return c


def _prepare(a, b):
    """The output, the arguments that every kernel starts with, and the tile of rungs 1 to 3."""
    c = empty_product(a, b)
    block = (128, 128, 64) if a.element_size() == 2 else (64, 64, 32)  # fp32 operands take more registers
    return c, (a, b, c, *c.shape, a.shape[1], *a.stride(), *b.stride(), c.stride(0)), block


def stages_are_paid_for(rung):
    """For sm_90, shared memory is the stages, to the byte."""
    stages = {tiles: 1, grouped: 1, pipelined: 4}.get(rung)  # autotuned's are not known
    found = [k.shared for k in compiled.kernels(__name__, (90,)) if k.rung == rung.__name__]
    assert not stages or found == [stages * (128 + 128) * 64 * 2]


# The answers: 256 * 256 / 256 threads are 256 accumulators, and a thread has at most 255 registers. Rung 2 reads fewer
# bytes from HBM. Rung 4 reads fewer from L2, since its tile is larger.
LARGE = {"M": 8192, "N": 8192, "K": 8192}

LESSON = Lesson(
    about=About(
        teaches="`tl.dot`, tiles counted in bytes and cycles, an order that keeps L2 useful, stages, autotuning "
        "of few candidates",
        hours=1.25,
        star=True,
        operator="matmul",
        pictures=("tile_of_c", "grouped_order"),
    ),
    problem=PROBLEM,
    rungs=(tiles, grouped, pipelined, autotuned),
    predicted=(
        Prediction(rung=tiles, at=LARGE, tflop_per_s=(270, 490)),
        Prediction(rung=grouped, at=LARGE, times=(1, 1.2), over=tiles),
        Prediction(
            rung=pipelined,
            at=LARGE,
            tflop_per_s=490,
            why="There are two possible causes, and the rows, which record no clock, cannot tell them apart. 490 takes "
            "800 TFLOP/s for the peak, the tensor cores' rate at 1.48 GHz. Below its power limit an H200 runs at up to "
            "1.98 GHz, where 840 cycles per step are 653 TFLOP/s. Or L2 gives an SM more than 39 bytes per cycle.",
        ),
        Prediction(
            rung=autotuned,
            at=LARGE,
            tflop_per_s=650,
            why="As for `pipelined`: at 1.98 GHz 81% of the peak are 870 TFLOP/s. That is more than cuBLAS reaches at "
            "the power limit, so the tensor cores and their power are the limit.",
        ),
    ),
    checks=(
        *PROBLEM.checks,
        case("large enough to be autotuned", gib=0.1, M=520, N=600, K=520),
        case("offsets past 2^31 in a", gib=40, M=70_001, N=8, K=32_000),
        case("offsets past 2^31 in b, transposed", gib=40, M=8, N=70_001, K=32_000, transposed="b"),
        case("offsets past 2^31 in c", gib=40, M=70_001, N=32_000, K=8),
        case("9 tiles down, a group of 8 and one of 1; two across: a is read twice, b 9 times", M=1030, N=150, K=40),
    ),
    wrong=(
        Mutant("last step left out", "multiply_tile", "range(0, K,", "range(0, K - BLOCK_K + 1,", "tiles"),
        Mutant("sums start anew each step", "multiply_tile", "b, acc, input", "b, input", "grouped"),
        Mutant("a column too many", "multiply_tile", "< N))", "<= N))", "tiles", "out of bounds"),
        Mutant("past K, whatever follows", "multiply_tile", "(ks[:, None] < K - k) & ", "", "tiles", "out of bounds"),
        Mutant("steps of b as long as a's", "multiply_tile", "b_ptrs += b_step", "b_ptrs += a_step", "pipelined"),
        Mutant("all groups as high", "place", "within % height", "within % GROUP", "grouped", "nan"),
        Mutant("as many columns of tiles as rows", "autotuned", "c.shape[1], x", "c.shape[0], x", "autotuned", "nan"),
    ),
    claims={tiles: ("wgmma", "16-byte loads"), pipelined: ("wgmma", "cp.async", "16-byte stores", "no spills")},
    passes={tiles: 1.44, grouped: 1.44, pipelined: 1.44},
    properties=(*PROBLEM.properties, stages_are_paid_for),
)

if __name__ == "__main__":
    LESSON.main()
