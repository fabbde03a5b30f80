"""fp8 matmul on Hopper: block scales, promoted under another warpgroup's MMA
==========================================================================
Block scales (lesson 6: A in 1 x 128 blocks, B in 128 x 128) change every 128 of K. The tensor cores' sum must end there
and be *promoted*: multiplied by its two scales and added to an accumulator in fp32 registers.

You will be able to: say what a promotion costs and where it is hidden, and choose a tile by registers.
You need: lesson 9 (warp specialization), lesson 6 (block scales), lesson 11.
Sources: DeepSeek-V3, section 3.3.2, for the scales and why to promote; DeepGEMM has two such consumers.
A Hopper GPU runs the rungs. Without one they are compiled; the barriers are lesson 9's, and so is their CPU model.
Run it:    python3 course.py run lesson12_matmul_fp8_blocks
Check it:  python3 course.py check lesson12_matmul_fp8_blocks
Time it:   python3 course.py bench lesson12_matmul_fp8_blocks

Budget of one SM, for a tile of 128 x 128 and 128 of K:

    unit            work                            cycles
    tensor cores    2,097,152 pairs, 4096 a cycle   512
    FMA units       16,384 promotions, 128 a cycle  128
    waiting         notice the MMA's end,           100
                    synchronise, issue the next

Triton's loop does these in sequence, all warps together, so it reaches at most 70% of the tensor cores' rate. But the
units can overlap: while one consumer promotes, another's MMA can run. The two consumers get out of step by themselves,
since a consumer that waits for the tensor cores falls behind:

    consumer 0      MMMMMMMM..pp....MMMMMMMM..pp....         M = its MMA runs, p = promote, . = wait
    consumer 1      pp......MMMMMMMM..pp....MMMMMMMM         the tensor cores never wait
    one of three    MMMMMMMM..pp............MMMMMMMM         one multiplies, one promotes, one waits

    tile             acc + MMA's sum, registers per thread    bytes per step    MMA    L2 delivers them in
    128 x 128, two   64 + 64                                32 KB           512    840     61% of the peak
    128 x 256, two   128 + 64: the MMA comes in halves      48 KB           1024   1260    81%
    192 x 128, three 64 + 64 of 160                         40 KB           768    1050    73%, no pause between MMAs

At the peak a step takes its MMA's cycles and no more. The page in reports/ takes cuBLAS's fp8 rate at a size of 8192
for the peak.

The launcher takes the tile for which the busiest SM computes the smallest area of C: rounds of the grid times the
tile's area. At equal areas it takes 128 x 256. So the launcher takes the wide tile where it needs at most half the
rounds of 128 x 128, and at most three quarters of those of 192 x 128. The smallest such C on 132 SMs has one row of
tiles and 133 columns of 128:

    C of 72 x 16904    tiles    rounds of 132 SMs    area of the busiest SM
    128 x 128          133      2                    2 * 16,384 = 32,768
    192 x 128          133      2                    2 * 24,576 = 49,152
    128 x 256           67      1                    1 * 32,768             taken: as small as 128 x 128, fewer bytes

Questions before you read on. Of 192 x 128 and 128 x 256, which reads fewer bytes for a FLOP, and which leaves more
SMs idle in the last round at 4096 and at 8192? Which line of `promote` waits for nothing, and why is it there?
"""

from lessonkit import About, Lesson, Mutant, Prediction, Unsupported, case, needs, num_sms, tma_takes

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from course_ops.hopper import aggregate, allocate_barriers, allocate_stages, async_load, async_store, ring_slot
from course_ops.matmul_fp8 import kernel_for
from problems.matmul_fp8 import FP8, PROBLEM, scheme_of

BLOCK_K = 128


@gluon.jit
def tile_at(index, tiles_m, tiles_n, GROUP: gl.constexpr):
    """The tile (row, column) that comes index-th: down GROUP rows of tiles, then to the next column of tiles."""
    first = index // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)  # the last group may be lower
    within = index % (GROUP * tiles_n)
    return first + within % height, within // height


@aggregate
class PartitionArgs:
    """What the warps of a CTA share."""

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor  # of b.t(), whose rows are contiguous
    c_desc: tma.tensor_descriptor
    scale_desc: tma.tensor_descriptor  # of A's scales, [K/128, M]
    a_smem: gl.shared_memory_descriptor  # [STAGES * CONSUMERS, 64, BLOCK_K]: each consumer's rows by themselves
    b_smem: gl.shared_memory_descriptor  # [STAGES, BLOCK_N, BLOCK_K]
    c_smem: gl.shared_memory_descriptor  # [2 * CONSUMERS, 64, 64]
    scale_smem: gl.shared_memory_descriptor  # [STAGES * CONSUMERS, 1, 64]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    scale_b_ptr: gl.tensor  # [N/128, K/128]
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    steps: gl.tensor
    N: gl.tensor
    GROUP: gl.constexpr
    CONSUMERS: gl.constexpr


@gluon.jit
def split_columns(x):
    """[M, N] -> the left and the right [M, N / 2]. A thread holds columns of both, so nothing moves."""
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()


@gluon.jit
def store_tile(c_desc, c_smem, acc, row, col, FIRST: gl.constexpr):
    """acc to C in 16 bits, in panels of 64 columns, through buffers FIRST and FIRST + 1 of c_smem in turn."""
    panels = split_columns(acc)  # even, so a tile's last panel and the next tile's first use different buffers
    if acc.shape[1] == 256:
        panels = split_columns(panels[0]) + split_columns(panels[1])
    for p in gl.static_range(len(panels)):
        panel = c_smem.index(FIRST + p % 2)
        tma.store_wait(1)
        panel.store(panels[p].to(c_desc.dtype))
        fence_async_shared()
        async_store(c_desc, [row, col + 64 * p], panel)


# New against lesson 11: a step's scales of A come with it, 64 for each consumer.
@gluon.jit
def producer(args):
    CONSUMERS: gl.constexpr = args.CONSUMERS
    BLOCK_N: gl.constexpr = args.b_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = args.a_desc.block_type.shape[1]
    OF_A: gl.constexpr = args.a_desc.block_type.nbytes + args.scale_desc.block_type.nbytes
    count = 0
    for tile in range(gl.program_id(0), args.tiles_m * args.tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_at(tile, args.tiles_m, args.tiles_n, args.GROUP)
        for step in range(args.steps):
            stage, parity = ring_slot(count, args.full.shape[0])
            mbarrier.wait(args.empty.index(stage), parity ^ 1)
            full, k = args.full.index(stage), step * BLOCK_K
            mbarrier.expect(full, CONSUMERS * OF_A + args.b_desc.block_type.nbytes)
            async_load(args.b_desc, [tile_n * BLOCK_N, k], full, args.b_smem.index(stage))
            for which in gl.static_range(CONSUMERS):
                row, own = (tile_m * CONSUMERS + which) * 64, stage * CONSUMERS + which
                async_load(args.a_desc, [row, k], full, args.a_smem.index(own))
                async_load(args.scale_desc, [step, row], full, args.scale_smem.index(own))
            count += 1


# Rung 1. New: promotion. The MMA's sum of [64, 128] has registers of its own, 64 per thread beside the accumulator. A's
# scales come through shared memory, so no thread keeps addresses or waits for global memory. TMA needs rows [K/128, M]
# at multiples of 16 bytes. Where M is no multiple of 4, the launcher copies the scales to such rows.
# Predicted: 61% of the peak, as in the table.
@gluon.jit
def promote(acc, a, b, scale_smem, scale_b, full, parity):
    """acc + a @ b * scale_a * scale_b; a [64, 128], b [128, 128], both in shared memory, a scale of A for each row."""
    mbarrier.wait(full, parity)  # before each half: a completed wait is free, and keeps the halves apart
    p = warpgroup_mma(a, b.permute((1, 0)), gl.zeros_like(acc), use_acc=False, is_async=True)
    scale = scale_smem.load(gl.SliceLayout(1, acc.type.layout)) * scale_b
    p = warpgroup_mma_wait(0, deps=(p,))
    acc += p * scale[:, None]
    # Waits for nothing, but keeps the compiler from delaying the additions: the next MMA takes p's registers.
    return warpgroup_mma_wait(0, deps=(acc,))


# A consumer owns 64 rows of a tile. In rung 2 it multiplies their left 128 columns first, then the right 128. It loads
# B's scales for the next step during this one. It releases a stage when all of it has been multiplied.
@gluon.jit
def consumer(args, WHICH: gl.constexpr):
    CONSUMERS: gl.constexpr = args.CONSUMERS
    BLOCK_N: gl.constexpr = args.b_smem.shape[1]
    WIDE: gl.constexpr = BLOCK_N == 256
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    count = 0
    for tile in range(gl.program_id(0), args.tiles_m * args.tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_at(tile, args.tiles_m, args.tiles_n, args.GROUP)
        row, col = (tile_m * CONSUMERS + WHICH) * 64, tile_n * BLOCK_N
        left_ptr = args.scale_b_ptr + col // 128 * args.steps
        right_ptr = left_ptr + (args.steps if col + 128 < args.N else 0)  # past N nothing is stored: any scale will do
        scale_left, scale_right = gl.load(left_ptr), gl.load(right_ptr)
        left = gl.zeros((64, 128), gl.float32, LAYOUT)
        right = left
        for step in range(args.steps):
            later = gl.minimum(step + 1, args.steps - 1)
            next_left, next_right = gl.load(left_ptr + later), gl.load(right_ptr + later)
            stage, parity = ring_slot(count, args.full.shape[0])
            full = args.full.index(stage)
            a, b = args.a_smem.index(stage * CONSUMERS + WHICH), args.b_smem.index(stage)
            scale_a = args.scale_smem.index(stage * CONSUMERS + WHICH).reshape((64,))
            left = promote(left, a, b.slice(0, 128), scale_a, scale_left, full, parity)
            if WIDE:
                right = promote(right, a, b.slice(128, 128), scale_a, scale_right, full, parity)
            mbarrier.arrive(args.empty.index(stage))
            scale_left, scale_right = next_left, next_right
            count += 1
        store_tile(args.c_desc, args.c_smem, left, row, col, 2 * WHICH)
        if WIDE:
            store_tile(args.c_desc, args.c_smem, right, row, col + 128, 2 * WHICH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def promote_kernel(
    a_desc, b_desc, c_desc, scale_desc, scale_a_ptr, scale_b_ptr, tiles_m, tiles_n, steps, M, N, STAGES: gl.constexpr,
    GROUP: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    c_smem = allocate_stages(c_desc, 2 * CONSUMERS)
    full, empty = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, CONSUMERS)
    a_smem, scale_smem = allocate_stages(a_desc, STAGES * CONSUMERS), allocate_stages(scale_desc, STAGES * CONSUMERS)
    args = PartitionArgs(
        a_desc=a_desc, b_desc=b_desc, c_desc=c_desc, scale_desc=scale_desc,
        a_smem=a_smem, b_smem=allocate_stages(b_desc, STAGES), c_smem=c_smem, scale_smem=scale_smem,
        full=full, empty=empty, scale_b_ptr=scale_b_ptr,
        tiles_m=tiles_m, tiles_n=tiles_n, steps=steps, N=N, GROUP=GROUP, CONSUMERS=CONSUMERS,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize([(consumer, (args, 0)), (consumer, (args, 1)), (producer, (args,))], [4, 1], [232, 40])
    else:
        gl.warp_specialize(
            [(consumer, (args, 0)), (consumer, (args, 1)), (consumer, (args, 2)), (producer, (args,))],
            [4, 4, 1],
            [160, 160, 32],
        )


@needs(90, "TMA and wgmma", only=True)
def promoted(a, b, scale_a, scale_b):
    """a [M, K], b [K, N] (b.t() contiguous) in e4m3, fp32 scales [M, K/128] and [K/128, N/128] -> [M, N] in bf16.

    K/128 and N/128 are rounded up. TypeError or ValueError for other arguments. Unsupported for other scales, and where
    rows of a, b.t() or the result do not begin at multiples of 16 bytes.
    """
    return _promote(a, b, scale_a, scale_b, (128, 128))


# Rung 2. New: 128 x 256, which does a third more FLOPs for each byte. An accumulator of 64 x 256 takes 128 registers a
# thread, and another 128 for the MMA's sum do not fit. So the MMA comes in halves: 128 + 64 of 232 registers.
# Predicted: 81% of the peak after 61%, as in the table.
@needs(90, "TMA and wgmma", only=True)
def wide(a, b, scale_a, scale_b):
    """As promoted."""
    return _promote(a, b, scale_a, scale_b, (128, 256))


# Rung 3. New: three consumers, 192 x 128. Two may both promote at a time, and then the tensor cores are idle. Of three,
# one promotes while one multiplies and one waits for the tensor cores.
# Predicted at 8192: up to 1.2 times rung 2. That is if rung 2 loses 100 cycles of waiting for each MMA of 512 and this
# rung loses none. The tenth more bytes a cycle may cost some of it. At 4096 704 tiles are 6 rounds of 132 SMs, an area
# of 147,456 for the busiest one. Rung 2's 512 tiles are 4 rounds and 131,072: 0.89 of its speed.
@needs(90, "TMA and wgmma", only=True)
def three_warpgroups(a, b, scale_a, scale_b):
    """As promoted."""
    return _promote(a, b, scale_a, scale_b, (192, 128))


# Rung 4. New: the tile follows the shape, by the rule at the top, and each scheme has its kernel.
# Predicted: the better of rungs 2 and 3.
@needs(90, "TMA and wgmma", only=True)
def matmul_fp8(a, b, scale_a, scale_b):
    """As promoted, and every input of lesson 6's fp8_blocks: course_ops has the kernels of lessons 11 and 6."""
    try:
        return _promote(a, b, scale_a, scale_b, (128, 256), (192, 128), (128, 128))
    except Unsupported:
        scheme = scheme_of(a, b, scale_a, scale_b)
        return kernel_for(a, b, scheme).launch(a, b, scale_a, scale_b, scheme)


def _promote(a, b, scale_a, scale_b, *tiles):
    if (scheme := scheme_of(a, b, scale_a, scale_b)) != "blocks":
        raise Unsupported(f"what has the scales of {scheme} need not be promoted: lesson 11 is faster")

    def area_of_an_sm(tile):
        count = triton.cdiv(a.shape[0], tile[0]) * triton.cdiv(b.shape[1], tile[1])
        return triton.cdiv(count, num_sms()) * tile[0] * tile[1]

    tile = min(tiles, key=area_of_an_sm)
    return _launch(promote_kernel, a, b, scale_a, scale_b, tile, CONSUMERS=tile[0] // 64)


def _launch(kernel, a, b, scale_a, scale_b, tile, group=16, **options):
    """Describe operands that scheme_of takes and start one program for each SM; Unsupported for what TMA cannot copy.

    tile: rows and columns of C, 64 rows for each consumer.
    """
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=torch.bfloat16, device=a.device)
    if not tma_takes(a, b.t(), c):
        raise Unsupported(f"strides {a.stride()}, {b.stride()}, {c.stride()}: TMA wants rows at multiples of 16 bytes")
    block_m, block_n = tile
    a_desc, b_desc = _describe(a, 64, BLOCK_K), _describe(b.t(), block_n, BLOCK_K)
    # As rows, [K/128, M] and [N/128, K/128]: PyTorch's layout of scales.
    scale_a, scale_b = _aligned_rows(scale_a.t()), scale_b.t().contiguous()
    c_desc, scale_desc = _describe(c, 64, 64), _describe(scale_a, 1, 64)
    tiles_m, tiles_n, steps = triton.cdiv(M, block_m), triton.cdiv(N, block_n), triton.cdiv(K, BLOCK_K)
    programs = triton.cdiv(tiles_m * tiles_n, triton.cdiv(tiles_m * tiles_n, num_sms()))
    kernel[(programs,)](
        a_desc, b_desc, c_desc, scale_desc, scale_a, scale_b, tiles_m, tiles_n, steps, M, N,
        5 if tile == (128, 128) else 4, group, num_warps=4, **options,
    )  # fmt: skip
    return c


def _describe(t, *block):
    """A TMA descriptor for blocks of a matrix; rows of 128 bytes are swizzled, scales are not."""
    dtype = {FP8: gl.float8e4nv, torch.bfloat16: gl.bfloat16}.get(t.dtype)
    if dtype:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    else:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor.from_tensor(t, list(block), layout)


def _aligned_rows(scales):
    """fp32 scales [K/128, M] if TMA can copy them in place, else a copy whose rows begin at multiples of 16 bytes.

    A box of TMA must begin there too. So one long row, with a box that begins at step * M, would not do.
    """
    if tma_takes(scales):
        return scales
    steps, M = scales.shape
    return scales.new_empty(steps, triton.cdiv(M, 4) * 4)[:, :M].copy_(scales)


MIDDLE, LARGE = ({"M": n, "N": n, "K": n, "scheme": "blocks"} for n in (4096, 8192))

# The answers: 128 x 256 reads 48 bytes for a cycle of MMA, and 192 x 128 reads 53. At 4096 192 x 128 leaves more SMs
# idle in the last round: 704 tiles, 88 SMs, where 128 x 256 has 512 tiles and leaves 16. At 8192 it is 2752 tiles and
# 20 SMs against 2048 tiles and 64. The last line of `promote` waits, though its consumer has no MMA in flight.
# Without it the compiler delays the additions, which read p's registers, and the next MMA needs these. In `wide` the
# second half's wait for `full` passes at once, too: it keeps the halves apart.
LESSON = Lesson(
    about=About(
        teaches="block scales: promotion under another warpgroup's MMA, with two consumers and with three",
        hours=0.75,
        operator="fp8 matmul",
        language="Gluon",
        pictures=("promotion", "quantisation_blocks"),
    ),
    problem=PROBLEM,
    rungs=(promoted, wide, three_warpgroups, matmul_fp8),
    predicted=(
        Prediction(
            rung=promoted,
            at=LARGE,
            percent_of_limit=61,
            why="As in lesson 1. The limit, cuBLAS's rate, counted as 512 cycles per step is a clock of 1.4 GHz, and "
            "this rung's step then takes 670 cycles, not 840. At 1.76 GHz it takes 840. So the clock is higher, or L2 "
            "gives an SM more than 39 bytes per cycle.",
        ),
        Prediction(rung=wide, at=LARGE, percent_of_limit=81),
        Prediction(rung=three_warpgroups, at=LARGE, times=(1, 1.2), over=wide),
        Prediction(rung=three_warpgroups, at=MIDDLE, times=0.89, over=wide),
        Prediction(rung=matmul_fp8, at=LARGE, times=1, over=three_warpgroups),
        Prediction(rung=matmul_fp8, at=MIDDLE, times=1, over=wide),
    ),
    checks=(
        *PROBLEM.checks,
        case("the ring goes round within a tile, and so does the grid", M=200, N=520, K=1040, scheme="blocks"),
        case(
            "three rounds of the grid, the second half of the last tiles cut",
            gib=0.1,
            M=1544,
            N=6280,
            K=272,
            scheme="blocks",
        ),
        case(
            "one round of 128 x 256 where 128 x 128 is two: the launcher takes the wide tile",
            gib=0.1,
            M=72,
            N=16904,
            K=144,
            scheme="blocks",
        ),
        case("four rounds of 6 steps; two groups of 16 rows of tiles", gib=1.5, M=4096, N=4096, K=656, scheme="blocks"),
    ),
    benches=tuple({"M": n, "N": n, "K": n, "scheme": s} for s in ("tensor", "rows", "blocks") for n in (4096, 8192)),
    wrong=(
        Mutant("the first scales of K for all", "consumer", "left_ptr + later)", "left_ptr)", "promoted"),
        Mutant("the left half's scales for both", "consumer", "scale_a, scale_right", "scale_a, scale_left", "wide"),
        Mutant(
            "a scale on all sums before",
            "promote",
            "acc += p * scale[:, None]",
            "acc = (acc + p) * scale[:, None]",
            "wide",
        ),
        Mutant(
            "two have the same rows of A",
            "consumer",
            "a_smem.index(stage * CONSUMERS + WHICH)",
            "a_smem.index(stage * CONSUMERS + WHICH // 2)",
            "three_warpgroups",
        ),
        Mutant(
            "given back when one of all has read",
            "promote_kernel",
            "allocate_barriers(STAGES, CONSUMERS)",
            "allocate_barriers(STAGES, 1)",
            "three_warpgroups",
        ),
        Mutant(
            "more bytes announced than come", "producer", "CONSUMERS * OF_A", "CONSUMERS * 2 * OF_A", "promoted", "hang"
        ),
        Mutant(
            "one of two releases a stage",
            "consumer",
            "mbarrier.arrive(args.empty.index(stage))",
            "mbarrier.arrive(args.empty.index(stage), pred=WHICH > 0)",
            "wide",
            "hang",
        ),
        Mutant("at first nothing is empty", "producer", "parity ^ 1", "parity", "three_warpgroups", "hang"),
        Mutant("the right half is not stored", "consumer", "row, col + 128, 2", "row, col, 2", "matmul_fp8", "nan"),
    ),
    claims=dict.fromkeys((promoted, wide, three_warpgroups, matmul_fp8), ("wgmma", "tma", "no spills")),
)

if __name__ == "__main__":
    LESSON.main()
