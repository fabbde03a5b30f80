"""fp8 in Gluon, second half: one warpgroup adds up while the other multiplies
===========================================================================
Scales that change with k (lesson 5: A in 1 x 128 blocks, B in 128 x 128) end the tensor cores' sums every 128 of K, and
each is promoted: multiplied by its two scales and added to a sum in fp32 registers. Triton's loop does that in turn,
all warps together: a product, a wait for its end, a promotion. For a tile of 128 x 128 and 128 of K an SM has to do

    on its tensor cores    512 cycles    2,097,152 pairs, 4096 a cycle
    with its FMA units     128           16,384 multiply-adds, 128 a cycle
    besides                100           notice a product's end, meet, ask for the next one

so that a loop in turn has at most 70% of the tensor cores. None of the three needs what the others use: all that is
missing is somebody else's product at that time. Lesson 7b's two warpgroups have sums of their own, so one can promote
while the other multiplies, if they do not begin and end together (rung 3). On an H200 that is 1.5 times as fast as
lesson 5 at 8192, and behind PyTorch's by 2% at 4096 and 7% at 8192: rung 3 says what to try next.

You will learn: what a promotion costs and where to hide it, to part two warpgroups, registers as a limit of tiles.
Sources: DeepSeek-V3, section 3.3.2, for the scales and why to promote; DeepGEMM has two such warpgroups, without turns.
Needs a Hopper GPU to run; without one the rungs are compiled, and a slow twin of the barriers runs, whose partitions
take turns in any order.
Run it:    python day3_matmul_tk/lesson07e_gluon_fp8_blocks.py
Check it:  python -m lessonkit check lesson07e_gluon_fp8_blocks
Time it:   python -m lessonkit bench lesson07e_gluon_fp8_blocks
"""

import math

from lessonkit import Lesson, Mutant, Unsupported, case, needs

import torch
import torch.nn.functional as F
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from day3_matmul_tk import lesson05_matmul_fp8 as plain
from day3_matmul_tk import lesson07_gluon_matmul as first
from day3_matmul_tk import lesson07d_gluon_fp8 as sums
from day3_matmul_tk.lesson05_matmul_fp8 import inputs, reference, scheme_of, spread
from day3_matmul_tk.lesson07b_gluon_persistent import FREE, Barrier, ask_for, in_any_order, slot
from day3_matmul_tk.lesson07d_gluon_fp8 import launch, load_partition


# Rung 1. New: promotion. A product of [64, 128] has registers of its own, 64 a thread beside the sums. It is asked for
# as two, of 64 of K each, so that its half can be waited for (rung 3). Scales of A come as tiles do: TMA copies 128
# numbers of this step's column into the stage, so no thread keeps addresses or waits for memory. A column of [M, K/128]
# need not begin at 16 bytes, but for TMA all columns together are one row of numbers, which may be entered anywhere.
@gluon.jit
def promote(acc, a, b, scale_smem, scale_b, full, parity, order, wave, WHICH: gl.constexpr, TURNS: gl.constexpr):
    """acc + a @ b * scale_a * scale_b; a [64, 128], b [128, 128], both in shared memory, a scale of A for each row."""
    K: gl.constexpr = a.shape[1] // 2
    b = b.permute((1, 0))
    mbarrier.wait(full, parity)
    if TURNS:
        mbarrier.wait(order.index(WHICH), wave & 1)
    p = warpgroup_mma(a.slice(0, K, dim=1), b.slice(0, K), gl.zeros_like(acc), use_acc=False, is_async=True)
    p = warpgroup_mma(a.slice(K, K, dim=1), b.slice(K, K), p, is_async=True)
    scale = scale_smem.load(gl.SliceLayout(1, acc.type.layout)) * scale_b
    p = warpgroup_mma_wait(1, deps=(p,))
    if TURNS:
        mbarrier.arrive(order.index(1 - WHICH))
    p = warpgroup_mma_wait(0, deps=(p,))
    acc += p * scale[:, None]
    # Waits for nothing. But the compiler may not leave additions for later that have to be done here: it would, and the
    # next product, which takes the registers of this one, would find them in use.
    return warpgroup_mma_wait(0, deps=(acc,))


# A warpgroup has the upper or lower half of a tile, and of that first the left and then the right half (rung 2). Scales
# of B are two numbers a step; those of the next are on their way under this one. A stage is given back when both halves
# have been multiplied.
@gluon.jit
def promote_partition(
    c_desc, c_smem, ring, order, scale_b_ptr, sizes, WHICH: gl.constexpr, GROUP: gl.constexpr, TURNS: gl.constexpr
):
    a_smem, b_smem, scale_smem, full, empty = ring
    tiles_m, tiles_n, steps, _, N = sizes
    HALF: gl.constexpr = c_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = b_smem.shape[1]
    WIDE: gl.constexpr = BLOCK_N == 256
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = first.place(tile, tiles_m, tiles_n, GROUP)
        row, col = (tile_m * 2 + WHICH) * HALF, tile_n * BLOCK_N
        left_ptr = scale_b_ptr + col // 128 * steps
        right_ptr = left_ptr + (steps if col + 128 < N else 0)  # past N nothing is right, and nothing is stored
        scale_left, scale_right = gl.load(left_ptr), gl.load(right_ptr)
        left = gl.zeros((HALF, 128), gl.float32, sums)
        right = left
        for step in range(steps):
            later = gl.minimum(step + 1, steps - 1)
            next_left, next_right = gl.load(left_ptr + later), gl.load(right_ptr + later)
            stage, parity = slot(turn, full.shape[0])
            bar, wave = full.index(stage), turn * (BLOCK_N // 128)
            a, b = a_smem.index(stage).slice(WHICH * HALF, HALF), b_smem.index(stage)
            scale_a = scale_smem.index(stage).slice(WHICH * HALF, HALF)
            left = promote(left, a, b.slice(0, 128), scale_a, scale_left, bar, parity, order, wave, WHICH, TURNS)
            if WIDE:
                b = b.slice(128, 128)
                right = promote(right, a, b, scale_a, scale_right, bar, parity, order, wave + 1, WHICH, TURNS)
            mbarrier.arrive(empty.index(stage))
            scale_left, scale_right = next_left, next_right
            turn += 1
        first.store_tile(c_desc, c_smem, left, row, col, 2 * WHICH)
        if WIDE:
            first.store_tile(c_desc, c_smem, right, row, col + 128, 2 * WHICH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def promote_kernel(
    a_desc, b_desc, c_desc, scale_desc, scale_a_ptr, scale_b_ptr, tiles_m, tiles_n, steps, M, N, STAGES: gl.constexpr,
    GROUP: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    c_smem = first.stages(c_desc, 4)
    full, empty, order = first.barriers(STAGES, 1), first.barriers(STAGES, 2), first.barriers(2, 1)
    if TURNS:
        mbarrier.arrive(order.index(0))  # the first turn
    ring = first.stages(a_desc, STAGES), first.stages(b_desc, STAGES), first.stages(scale_desc, STAGES), full, empty
    sizes = (tiles_m, tiles_n, steps, M, N)
    gl.warp_specialize(
        [
            (promote_partition, (c_desc, c_smem, ring, order, scale_b_ptr, sizes, 0, GROUP, TURNS)),
            (promote_partition, (c_desc, c_smem, ring, order, scale_b_ptr, sizes, 1, GROUP, TURNS)),
            (load_partition, ((a_desc, b_desc, scale_desc), ring, sizes, GROUP, True)),
        ],
        [4, 1],
        [232, 40],
    )


@needs(90, "TMA and wgmma", only=True)
def promoted(a, b, scale_a, scale_b):
    """a [M, K], b [K, N] (b.t() contiguous) in e4m3, fp32 scales [M, K/128] and [K/128, N/128] -> [M, N] in bf16.

    K/128 and N/128 are rounded up. TypeError, ValueError for what is not so; Unsupported for other scales, and where
    rows of a, b.t() or the result do not begin at multiples of 16 bytes.
    """
    return _promote(a, b, scale_a, scale_b, widths=(128,))


# Rung 2. New: 128 x 256, whose bytes serve a third more products. 64 x 256 sums take 128 registers a thread, and
# as many again for their product would be more than there are: it comes in halves, 128 + 64 of 232. Predicted: rung 1
# asks for 32 KB in 512 cycles, and L2 takes 840 to bring them, 61% of the peak; now 48 KB in 1024, and L2 takes 1260.
# On an H200 1% to 3%, where L2 alone would have given a third: it was not L2 that rung 1 waited for.
@needs(90, "TMA and wgmma", only=True)
def wide(a, b, scale_a, scale_b):
    """As promoted."""
    return _promote(a, b, scale_a, scale_b, widths=(256,))


# Rung 3. New: turns. If the tensor cores take an instruction of one warpgroup, then one of the other, two products that
# begin together take 512 cycles and end together, and then both promote while the tensor cores stand still: 100 cycles
# of 612. So a warpgroup asks for a product when half of the other's is over, and the other promotes under the second
# half of this one. Predicted: 16% where L2 brings the tiles in time. On an H200 9% at 4096, 11% at 8192. That need not
# be the reason, though: a half that can be waited for has its price too, which rungs 1 and 2 pay and gain nothing by,
# and trials that asked for each product as one, without turns, were no slower than this. So try that (no slices, one
# warpgroup_mma), alone and with turns that are passed as soon as a product has been asked for (day 4's lesson 6b), and
# see how much of the 11% is hidden promotion, and how much a pause between the parts of a product.
@needs(90, "TMA and wgmma", only=True)
def turns(a, b, scale_a, scale_b):
    """As promoted."""
    return _promote(a, b, scale_a, scale_b, widths=(256,), TURNS=True)


# Rung 4. New: the tile follows the shape, and each scheme has its kernel.
@needs(90, "TMA and wgmma", only=True)
def matmul_fp8(a, b, scale_a, scale_b):
    """As promoted, and all that lesson 5's fp8_blocks takes: per tensor and row-wise as in lesson 7d."""
    try:
        return _promote(a, b, scale_a, scale_b, widths=(256, 128), TURNS=True)
    except Unsupported:
        return sums.matmul_fp8(a, b, scale_a, scale_b)


def _promote(a, b, scale_a, scale_b, widths, TURNS=False):
    if (scheme := scheme_of(a, b, scale_a, scale_b)) != "blocks":
        raise Unsupported(f"what has the scales of {scheme} need not be promoted: lesson 7d is faster")
    return launch(promote_kernel, a, b, scale_a, scale_b, widths, TURNS=TURNS)


# The slow twin: what lies between the barriers is PyTorch, small (16 x 256, 3 stages, 4 programs), with whole blocks of
# 128. Partitions are generators that yield (barrier, parity) where the kernel waits for a barrier, and FREE where it
# waits for a product, which until then reads its tiles. Lesson 7b's in_any_order runs any that need not wait.
def twin(a, b, scale_a, scale_b):
    """As turns, for any shape, scales and dtype: promote_kernel's loops and barriers, one wait at a time."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.zeros((M, N), dtype=torch.bfloat16)
    x, w = (F.pad(t.cpu().float(), (0, -K % 128, 0, -t.shape[0] % n)) for t, n in ((a, 16), (b.t(), 256)))
    scale_a = F.pad(spread(torch.ones_like(a), scale_a, torch.float32).cpu()[:, ::128], (0, 0, 0, -M % 16))
    scale_b = F.pad(spread(torch.ones_like(b), scale_b, torch.float32).cpu()[::128], (0, -N % 256))
    out = torch.zeros(x.shape[0], w.shape[0])
    for program in range(4 if c.numel() else 0):
        _program(program, x, w, scale_a, scale_b, out)
    return c.copy_(out[:M, :N]).to(a.device)


def _program(program, x, w, scale_a, scale_b, out):
    tiles_m, tiles_n, steps = x.shape[0] // 16, w.shape[0] // 256, x.shape[1] // 128
    tiles = [first.place.fn(tile, tiles_m, tiles_n, 2) for tile in range(program, tiles_m * tiles_n, 4)]
    a_smem, b_smem = torch.full((3, 16, 128), math.nan), torch.full((3, 256, 128), math.nan)
    scale_smem = torch.full((3, 16), math.nan)
    full, empty = [Barrier(1) for _ in range(3)], [Barrier(2) for _ in range(3)]
    order = [Barrier(1), Barrier(1)]
    order[0].arrive()
    copies = []  # on their way

    def load_partition():
        turn = 0
        for tile_m, tile_n in tiles:
            rows, cols = slice(16 * tile_m, 16 * tile_m + 16), slice(256 * tile_n, 256 * tile_n + 256)
            for step in range(steps):
                stage, parity = slot.fn(turn, 3)
                yield empty[stage], parity ^ 1
                ks = slice(128 * step, 128 * step + 128)
                boxes = (a_smem, x[rows, ks]), (b_smem, w[cols, ks]), (scale_smem, scale_a[rows, step])
                ask_for(copies, full[stage], *((smem[stage], box) for smem, box in boxes))
                turn += 1

    def promote_partition(which):
        half, turn = slice(8 * which, 8 * which + 8), 0
        for tile_m, tile_n in tiles:
            acc = torch.zeros(8, 256)
            for step in range(steps):
                stage, parity = slot.fn(turn, 3)
                yield full[stage], parity
                scale = scale_smem[stage, half, None] * scale_b[step, 256 * tile_n :][:256]
                for wave, cols in (2 * turn, slice(128)), (2 * turn + 1, slice(128, 256)):
                    yield order[which], wave & 1
                    yield FREE
                    p = a_smem[stage, half, :64] @ b_smem[stage, cols, :64].T
                    order[1 - which].arrive()
                    yield FREE
                    p += a_smem[stage, half, 64:] @ b_smem[stage, cols, 64:].T
                    acc[:, cols] += p * scale[:, cols]
                empty[stage].arrive()
                turn += 1
            out[16 * tile_m :, 256 * tile_n :][half, :256] = acc

    in_any_order([promote_partition(0), promote_partition(1), load_partition()], copies)


LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    rungs=(promoted, wide, turns, matmul_fp8),
    checks=(
        *plain.LESSON.checks,
        case("the ring goes round within a tile, and so does the grid", M=200, N=520, K=1040, scheme="blocks"),
        case("three rounds of the grid, the second half of the last tiles cut", gib=0.1, M=1544, N=6280, K=272,
             scheme="blocks"),
        case("four rounds of 6 steps; two groups of 16 rows of tiles", gib=1.5, M=4096, N=4096, K=656, scheme="blocks"),
    ),
    benches=tuple({"M": n, "N": n, "K": n, "scheme": s} for s in ("tensor", "rows", "blocks") for n in (4096, 8192)),
    work=plain.LESSON.work,
    twin=twin,
    wrong=(
        Mutant("nobody has the first turn", "_program", "order[0].arrive()", "order[0]", "twin", "barrier"),
        Mutant("always the same turn", "_program", "wave & 1", "0", "twin", "barrier"),
        Mutant("read before it has come", "_program", "yield full[stage], parity", "yield FREE", "twin", "nan"),
        Mutant("given back while it is multiplied", "_program", "yield FREE\n                    p += a",
               "yield empty[stage].arrive() or FREE\n                    p += a", "twin", "nan"),
        Mutant("the first scales of K for all", "promote_partition", "left_ptr + later)", "left_ptr)", "promoted"),
        Mutant("the left half's scales for both", "promote_partition", "scale_a, scale_right", "scale_a, scale_left",
               "wide"),
        Mutant("a scale on all sums before", "promote", "acc += p * scale[:, None]", "acc = (acc + p) * scale[:, None]",
               "turns"),
        Mutant("half of a product", "promote", "b.slice(K, K), p,", "b.slice(0, K), p,", "matmul_fp8"),
    ),
    peers=plain.LESSON.peers,
    claims=dict.fromkeys((promoted, wide, turns, matmul_fp8), ("wgmma", "tma", "no spills")),
    properties=plain.LESSON.properties,
    refuses=plain.LESSON.refuses,
    dtypes=(plain.FP8,),
    bench_dtype=plain.FP8,
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
