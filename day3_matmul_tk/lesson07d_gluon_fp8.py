"""fp8 in Gluon: the same ring, twice the FLOPs, and a tile's end under somebody else's products
=============================================================================================
Lesson 7b's kernel with numbers of 8 bits. A row of a stage is 128 bytes again, 128 numbers, and tensor cores multiply
4096 pairs a cycle instead of 2048: a step of a tile of 128 x 256 is 1024 cycles and 48 KB as before. But K is walked
through twice as fast, and what is not a step weighs twice as much. At K = 4096 a tile has 32 steps; at its end each
warpgroup waits for its last product, multiplies 128 sums a thread by their scales (lesson 5: a row's and a column's),
rounds and stores them: 1000 cycles or more of 33,000 in which the tensor cores stand still.

You will learn: what 8 bits change in a Hopper kernel, and how two warpgroups can do their ends at different times.
Lesson 7e goes on with scales that change with k. Needs a Hopper GPU to run; without one the rungs are compiled, and a
slow twin of the barriers runs, whose partitions take turns in any order.
Run it:    python day3_matmul_tk/lesson07d_gluon_fp8.py
Check it:  python -m lessonkit check lesson07d_gluon_fp8
Time it:   python -m lessonkit bench lesson07d_gluon_fp8
"""

import math

from lessonkit import Lesson, Mutant, Unsupported, case, needs, num_sms, tma_takes

import torch
import torch.nn.functional as F
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from day3_matmul_tk import lesson05_matmul_fp8 as plain
from day3_matmul_tk import lesson07_gluon_matmul as first
from day3_matmul_tk.lesson01_matmul import predicted_cycles
from day3_matmul_tk.lesson05_matmul_fp8 import _expect as scheme_of
from day3_matmul_tk.lesson05_matmul_fp8 import _spread as spread
from day3_matmul_tk.lesson05_matmul_fp8 import inputs, reference
from day3_matmul_tk.lesson07b_gluon_persistent import Barrier, fill, in_any_order, slot

BLOCK_M, BLOCK_K, BEHIND = 128, 128, 2


# What this lesson and 7e share. One warp asks for everything, as in 7b; for 7e also for a step's scales of A.
@gluon.jit
def load_partition(descs, ring, sizes, GROUP: gl.constexpr, SCALES: gl.constexpr):
    a_desc, b_desc, scale_desc = descs
    a_smem, b_smem, scale_smem, full, empty = ring
    tiles_m, tiles_n, steps, M, _ = sizes
    BLOCK_M: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    BYTES: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = first.place(tile, tiles_m, tiles_n, GROUP)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        for step in range(steps):
            stage, parity = slot(turn, full.shape[0])
            mbarrier.wait(empty.index(stage), parity ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, BYTES + (scale_desc.block_type.nbytes if SCALES else 0))
            tma.async_copy_global_to_shared(a_desc, [row, step * BLOCK_K], bar, a_smem.index(stage))
            tma.async_copy_global_to_shared(b_desc, [col, step * BLOCK_K], bar, b_smem.index(stage))
            if SCALES:
                tma.async_copy_global_to_shared(scale_desc, [step * M + row], bar, scale_smem.index(stage))
            turn += 1


# Rung 1. New against 7b: the dtype, and scales, which do not change with k and so may wait for the sums. They are asked
# for before the last product is waited for, and come under it. Predicted against lesson 5's matmul_fp8: what 7b gains
# on lesson 2, 1% to 2%. On an H200 it is ahead of PyTorch's by 3% and 4% per tensor, level with it row-wise at 4096,
# and 2% behind at 8192, where power sets the clocks and each byte that is moved twice has its price in power.
@gluon.jit
def sum_partition(
    c_desc, c_smem, ring, ahead, scales, sizes, WHICH: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    BEHIND: gl.constexpr,
):  # fmt: skip
    a_smem, b_smem, _, full, empty = ring
    tiles_m, tiles_n, steps, M, N = sizes
    scale_a_ptr, scale_b_ptr = scales
    HALF: gl.constexpr = c_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = b_smem.shape[1]
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32])
    acc = gl.zeros((HALF, BLOCK_N), gl.float32, sums)
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = first.place(tile, tiles_m, tiles_n, GROUP)
        row, col = (tile_m * 2 + WHICH) * HALF, tile_n * BLOCK_N
        before = 0
        if BEHIND and WHICH == 1:
            mbarrier.wait(ahead.index(0), tile // gl.num_programs(0) & 1, pred=steps >= full.shape[0])
        for step in range(steps):
            stage, parity = slot(turn, full.shape[0])
            mbarrier.wait(full.index(stage), parity)
            a, b = a_smem.index(stage).slice(WHICH * HALF, HALF), b_smem.index(stage).permute((1, 0))
            acc = warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before), pred=step > 0)
            if BEHIND and WHICH == 0:
                mbarrier.arrive(ahead.index(0), pred=(step == BEHIND) & (steps >= full.shape[0]))
            before = stage
            turn += 1
        scale_a, scale_b = gl.load(scale_a_ptr), gl.load(scale_b_ptr)
        if ROWS:
            rows = row + gl.arange(0, HALF, gl.SliceLayout(1, sums))
            cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, sums))
            scale_a = gl.load(scale_a_ptr + rows, mask=rows < M, other=0.0)[:, None]
            scale_b = gl.load(scale_b_ptr + cols, mask=cols < N, other=0.0)[None, :]
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before))
        first.store_tile(c_desc, c_smem, acc * (scale_a * scale_b), row, col, 2 * WHICH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def sum_kernel(
    a_desc, b_desc, c_desc, scale_desc, scale_a_ptr, scale_b_ptr, tiles_m, tiles_n, steps, M, N, STAGES: gl.constexpr,
    GROUP: gl.constexpr, ROWS: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    c_smem = first.stages(c_desc, 4)
    full, empty, ahead = first.barriers(STAGES, 1), first.barriers(STAGES, 2), first.barriers(1, 1)
    ring = first.stages(a_desc, STAGES), first.stages(b_desc, STAGES), first.stages(scale_desc, 1), full, empty
    sizes, scales = (tiles_m, tiles_n, steps, M, N), (scale_a_ptr, scale_b_ptr)
    gl.warp_specialize(
        [
            (sum_partition, (c_desc, c_smem, ring, ahead, scales, sizes, 0, GROUP, ROWS, BEHIND)),
            (sum_partition, (c_desc, c_smem, ring, ahead, scales, sizes, 1, GROUP, ROWS, BEHIND)),
            (load_partition, ((a_desc, b_desc, scale_desc), ring, sizes, GROUP, False)),
        ],
        [4, 1],
        [232, 40],
    )


@needs(90, "TMA and wgmma", only=True)
def summed(a, b, scale_a, scale_b):
    """a [M, K], b [K, N] (b.t() contiguous) in e4m3, fp32 scales [1, 1] or [M, 1] and [1, N] -> [M, N] in bf16.

    Rows of a, b.t() and the result begin at multiples of 16 bytes. TypeError, ValueError for what is not so;
    Unsupported for other scales and rows.
    """
    return _sum(a, b, scale_a, scale_b)


# Rung 2. New: the second warpgroup begins each tile two steps after the first, and since the tensor cores serve both
# alike it stays behind. Its last two steps, 1024 cycles for its half, run under the first one's end, and the next two
# of the first under its own. In its third step of a tile the first says that the second may begin. It must not say so
# of two tiles before the second has heard of one: where a tile has as many steps as the ring has stages, it cannot, for
# then the ring is full; where it has fewer nobody waits. Predicted: the 1000 cycles of each tile, 3% at K = 4096. On an
# H200 nothing is gained, and up to 1.5% lost. The ends may have been apart before, for nobody made the two keep step;
# and whoever is two of four stages ahead has loads on their way for two steps alone, not for four.
@needs(90, "TMA and wgmma", only=True)
def apart(a, b, scale_a, scale_b):
    """As summed."""
    return _sum(a, b, scale_a, scale_b, BEHIND=BEHIND)


# Rung 3. New: tiles of 128 x 128 where 128 x 256 would leave SMs idle; lesson 5's kernel for everything else.
@needs(90, "TMA and wgmma", only=True)
def matmul_fp8(a, b, scale_a, scale_b):
    """As lesson 5's fp8_blocks: all scales, any strides, but promoted only where scales change with k."""
    try:
        return _sum(a, b, scale_a, scale_b, widths=(256, 128), BEHIND=BEHIND)
    except Unsupported:
        return plain.fp8_blocks(a, b, scale_a, scale_b)


def _sum(a, b, scale_a, scale_b, widths=(256,), BEHIND=0):
    if (scheme := scheme_of(a, b, scale_a, scale_b)) == "blocks":
        raise Unsupported("the tensor cores add up over all of K: scales that change with k come in lesson 7e")
    return launch(sum_kernel, a, b, scale_a, scale_b, widths, ROWS=scheme == "rows", BEHIND=BEHIND)


def launch(kernel, a, b, scale_a, scale_b, widths, group=16, **options):
    """Describe operands that scheme_of takes and start a program an SM; Unsupported for what TMA cannot copy."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=torch.bfloat16, device=a.device)
    # One after the other as [K/128 or 1, M or 1] and [N/128 or N or 1, K/128 or 1]: how PyTorch wants them to lie.
    scale_a, scale_b = (scale.t().contiguous().view(-1) for scale in (scale_a, scale_b))
    if not tma_takes(a, b.t(), c, scale_a):
        raise Unsupported(f"strides {a.stride()}, {b.stride()}, {c.stride()}: TMA wants rows at multiples of 16 bytes")
    # In bytes a step is one of 64 numbers of 16 bits, and takes as long.
    block_n = min(widths, key=lambda n: predicted_cycles(M, N, K / 2, BLOCK_M, n, BLOCK_K / 2))
    a_desc, b_desc = _describe(a, BLOCK_M, BLOCK_K), _describe(b.t(), block_n, BLOCK_K)
    c_desc, scale_desc = _describe(c, BLOCK_M // 2, 64), _describe(scale_a, BLOCK_M)
    tiles_m, tiles_n, steps = triton.cdiv(M, BLOCK_M), triton.cdiv(N, block_n), triton.cdiv(K, BLOCK_K)
    programs = triton.cdiv(tiles_m * tiles_n, triton.cdiv(tiles_m * tiles_n, num_sms()))
    kernel[(programs,)](
        a_desc, b_desc, c_desc, scale_desc, scale_a, scale_b, tiles_m, tiles_n, steps, M, N,
        4 if block_n == 256 else 5, group, num_warps=4, **options,
    )  # fmt: skip
    return c


def _describe(t, *block):
    """What TMA must know of a tensor to copy blocks of it; rows of 128 bytes are swizzled, scales are not."""
    dtype = {plain.FP8: gl.float8e4nv, torch.bfloat16: gl.bfloat16}.get(t.dtype)
    if dtype:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    else:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor.from_tensor(t, list(block), layout)


# The slow twin, as lesson 7b's (small: 32 x 48 x 16, 3 stages, 4 programs), with the second warpgroup 2 steps behind.
def twin(a, b, scale_a, scale_b):
    """As apart, for any shape, scales and dtype: sum_kernel's loops and barriers, one wait at a time."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.zeros((M, N), dtype=torch.bfloat16, device=a.device)
    x = F.pad(spread(a, scale_a, torch.float32).cpu(), (0, -K % 16, 0, -M % 32))
    w = F.pad(spread(b, scale_b, torch.float32).cpu(), (0, -N % 48, 0, -K % 16))
    out = torch.zeros(x.shape[0], w.shape[1])
    for program in range(4 if c.numel() and K else 0):
        _program(program, x, w, out)
    return c.copy_(out[:M, :N])


def _program(program, x, w, out, behind=2):
    tiles_m, tiles_n, steps = x.shape[0] // 32, w.shape[1] // 48, w.shape[0] // 16
    tiles = [first.place.fn(tile, tiles_m, tiles_n, 2) for tile in range(program, tiles_m * tiles_n, 4)]
    a_smem, b_smem = torch.full((3, 32, 16), math.nan), torch.full((3, 16, 48), math.nan)
    full, empty, ahead = [Barrier(1) for _ in range(3)], [Barrier(2) for _ in range(3)], Barrier(1)
    copies = []  # on their way

    def sum_partition(which):
        half, turn = slice(16 * which, 16 * which + 16), 0
        for count, (tile_m, tile_n) in enumerate(tiles):
            acc, before = torch.zeros(16, 48), 0
            if which == 1 and steps >= 3:
                yield ahead, count & 1
            for step in range(steps):
                stage, parity = slot.fn(turn, 3)
                yield full[stage], parity
                if step > 0:
                    acc += a_smem[before, half] @ b_smem[before]
                    empty[before].arrive()
                if which == 0 and step == behind and steps >= 3:
                    ahead.arrive()
                before, turn = stage, turn + 1
            acc += a_smem[before, half] @ b_smem[before]
            empty[before].arrive()
            out[32 * tile_m :, 48 * tile_n :][half, :48] = acc

    loads = fill(tiles, x, w, a_smem, b_smem, full, empty, copies)
    in_any_order([sum_partition(0), sum_partition(1), loads], copies)


LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    rungs=(summed, apart, matmul_fp8),
    checks=(
        *plain.LESSON.checks,
        case("the ring goes round within a tile, and two rounds of tiles", M=200, N=136, K=1040, scheme="rows"),
        case("two rounds of the grid, tiles of fewer steps than stages", gib=0.1, M=1544, N=6152, K=144, scheme="rows"),
        case("four rounds of 6 steps; two groups of 16 rows of tiles", gib=1.5, M=4096, N=4096, K=656, scheme="rows"),
    ),
    benches=tuple({"M": n, "N": n, "K": n, "scheme": s} for s in ("tensor", "rows") for n in (4096, 8192)),
    work=plain.LESSON.work,
    twin=twin,
    wrong=(
        Mutant("short tiles wait too", "_program", "which == 1 and steps >= 3", "which == 1", "twin", "barrier"),
        Mutant("as far behind as the ring is long", "_program", "behind=2", "behind=3", "twin", "barrier"),
        Mutant("one row's scale for all", "sum_partition", "scale_a_ptr + rows,", "scale_a_ptr + rows * 0,", "summed"),
        Mutant("the first columns' scales for all", "sum_partition", "_ptr + cols,", "_ptr + cols % 8,", "summed"),
        Mutant("the tile before is added", "sum_partition", "step > 0, is", "True, is", "apart"),
        Mutant("one half twice", "sum_partition", "slice(WHICH * HALF, HALF)", "slice(HALF, HALF)", "matmul_fp8"),
    ),
    peers=plain.LESSON.peers,
    claims=dict.fromkeys((summed, apart, matmul_fp8), ("wgmma", "tma", "no spills")),
    properties=plain.LESSON.properties,
    refuses=plain.LESSON.refuses,
    dtypes=(plain.FP8,),
    bench_dtype=plain.FP8,
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
