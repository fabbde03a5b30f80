"""fp8 in Gluon: the same ring, twice the FLOPs
============================================
Lesson 7b's kernel with numbers of 8 bits. A row of a stage is 128 bytes again, 128 numbers, and tensor cores multiply
4096 pairs a cycle instead of 2048: a step of a tile of 128 x 256 is 1024 cycles and 48 KB as before. But K is walked
through twice as fast, and what is not a step weighs twice as much. At K = 4096 a tile has 32 steps; at its end each
warpgroup waits for its last product, multiplies 128 sums a thread by their scales (lesson 5: a row's and a column's),
rounds and stores them: 1000 cycles or more beside 33,000, if nobody multiplies meanwhile.

You will learn: what 8 bits change in a Hopper kernel, and what they leave as it was.
Lesson 7e goes on with scales that change with k.
Needs a Hopper GPU to run; without one the rungs are compiled. The barriers are lesson 7b's, and so is their CPU model.
Run it:    python day3_matmul_tk/lesson07d_gluon_fp8.py
Check it:  python -m lessonkit check lesson07d_gluon_fp8
Time it:   python -m lessonkit bench lesson07d_gluon_fp8
"""

import math

from lessonkit import About, Lesson, Mutant, Unsupported, case, needs, num_sms, tma_takes

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

import course_ops
from course_ops.hopper import allocate_barriers, allocate_stages, ring_slot
from problems.matmul_fp8 import FP8, PROBLEM, scheme_of

BLOCK_K = 128


# The order of tiles, and the way of C to memory: lesson 7's.
@gluon.jit
def place(program, tiles_m, tiles_n, GROUP: gl.constexpr):
    """The tile (row, column) that comes `program`-th: in groups of GROUP rows of tiles, each column by column."""
    first = program // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)  # the last group may be lower
    within = program % (GROUP * tiles_n)
    return first + within % height, within // height


@gluon.jit
def halves(x):  # [M, N] -> the left and the right [M, N / 2]: a thread holds numbers of both, so nothing moves
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()


@gluon.jit
def store_tile(c_desc, c_smem, acc, row, col, FIRST: gl.constexpr):
    parts = halves(acc)
    if acc.shape[1] == 256:
        parts = halves(parts[0]) + halves(parts[1])
    # An even number: or the last panel of a tile and the first of the next would be the same buffer.
    gl.static_assert(len(parts) % 2 == 0)
    for p in gl.static_range(len(parts)):
        panel = c_smem.index(FIRST + p % 2)
        tma.store_wait(1)
        panel.store(parts[p].to(c_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(c_desc, [row, col + 64 * p], panel)


# One warp asks for everything, as in 7b, but for each warpgroup's 64 rows of A by themselves.
@gluon.jit
def load_partition(descs, ring, sizes, GROUP: gl.constexpr):
    a_desc, b_desc = descs
    a_smem, b_smem, full, empty = ring
    tiles_m, tiles_n, steps, _, _ = sizes
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
        for step in range(steps):
            stage, parity = ring_slot(turn, full.shape[0])
            mbarrier.wait(empty.index(stage), parity ^ 1)
            bar, k = full.index(stage), step * BLOCK_K
            mbarrier.expect(bar, 2 * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(b_desc, [tile_n * BLOCK_N, k], bar, b_smem.index(stage))
            for which in gl.static_range(2):
                row, half = (tile_m * 2 + which) * 64, stage * 2 + which
                tma.async_copy_global_to_shared(a_desc, [row, k], bar, a_smem.index(half))
            turn += 1


# Rung 1. New against 7b: the dtype, and scales, which do not change with k and so may wait for the sums. They are asked
# for before the last product is waited for, and come under it. Predicted against lesson 5's matmul_fp8: what 7b gains
# on lesson 2, 1% to 2%. On an H200 that is what comes: level with PyTorch's row-wise, 2% ahead per tensor. Tried and
# dropped: a barrier that keeps the second warpgroup two steps behind, so that its products run under the first one's
# end and the other way round. Nobody makes the two keep step, so their ends lay apart without it; and a stage that the
# second still reads is one that nothing can be loaded into.
@gluon.jit
def sum_partition(c_desc, c_smem, ring, scales, sizes, WHICH: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr):
    a_smem, b_smem, full, empty = ring
    tiles_m, tiles_n, steps, M, N = sizes
    scale_a_ptr, scale_b_ptr = scales
    BLOCK_N: gl.constexpr = b_smem.shape[1]
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32])
    acc = gl.zeros((64, BLOCK_N), gl.float32, sums)
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
        row, col = (tile_m * 2 + WHICH) * 64, tile_n * BLOCK_N
        before = 0
        for step in range(steps):
            stage, parity = ring_slot(turn, full.shape[0])
            mbarrier.wait(full.index(stage), parity)
            a, b = a_smem.index(stage * 2 + WHICH), b_smem.index(stage).permute((1, 0))
            acc = warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before), pred=step > 0)
            before = stage
            turn += 1
        scale_a, scale_b = gl.load(scale_a_ptr), gl.load(scale_b_ptr)
        if ROWS:
            rows = row + gl.arange(0, 64, gl.SliceLayout(1, sums))
            cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, sums))
            scale_a = gl.load(scale_a_ptr + rows, mask=rows < M, other=0.0)[:, None]
            scale_b = gl.load(scale_b_ptr + cols, mask=cols < N, other=0.0)[None, :]
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before))
        store_tile(c_desc, c_smem, acc * (scale_a * scale_b), row, col, 2 * WHICH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def sum_kernel(
    a_desc, b_desc, c_desc, scale_a_ptr, scale_b_ptr, tiles_m, tiles_n, steps, M, N, STAGES: gl.constexpr,
    GROUP: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    c_smem = allocate_stages(c_desc, 4)
    full, empty = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 2)
    ring = allocate_stages(a_desc, 2 * STAGES), allocate_stages(b_desc, STAGES), full, empty
    sizes, scales = (tiles_m, tiles_n, steps, M, N), (scale_a_ptr, scale_b_ptr)
    gl.warp_specialize(
        [
            (sum_partition, (c_desc, c_smem, ring, scales, sizes, 0, GROUP, ROWS)),
            (sum_partition, (c_desc, c_smem, ring, scales, sizes, 1, GROUP, ROWS)),
            (load_partition, ((a_desc, b_desc), ring, sizes, GROUP)),
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


# Rung 2. New: tiles of 128 x 128 where 128 x 256 would leave SMs idle; course_ops.matmul_fp8 for everything else.
@needs(90, "TMA and wgmma", only=True)
def matmul_fp8(a, b, scale_a, scale_b):
    """As lesson 5's fp8_blocks: all scales, any strides, but promoted only where scales change with k."""
    try:
        return _sum(a, b, scale_a, scale_b, widths=(256, 128))
    except Unsupported:
        return course_ops.matmul_fp8(a, scale_a, b, scale_b)


def _predicted_cycles(M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, **_):
    """Cycles of a matmul in 16 bits on a Hopper GPU, if nothing but tensor cores and L2 were slow: to compare tiles."""
    tiles = math.ceil(M / BLOCK_M) * math.ceil(N / BLOCK_N)
    share = min(64, 5120 / min(tiles, num_sms()))  # bytes a cycle; an SM takes no more than 64, whoever else is idle
    step = max(BLOCK_M * BLOCK_N * BLOCK_K / 2048, 2 * (BLOCK_M + BLOCK_N) * BLOCK_K / share)
    step += 300  # to wait for a stage, and to start on it: why steps should not be short
    ends = 1500 + 2 * BLOCK_M * BLOCK_N / share  # until the first tiles are there, and to write C
    return math.ceil(tiles / num_sms()) * (math.ceil(K / BLOCK_K) * step + ends)


def _sum(a, b, scale_a, scale_b, widths=(256,)):
    if (scheme := scheme_of(a, b, scale_a, scale_b)) == "blocks":
        raise Unsupported("the tensor cores add up over all of K: scales that change with k come in lesson 7e")
    # In bytes a step is one of 64 numbers of 16 bits, and takes as long.
    (M, K), N = a.shape, b.shape[1]
    width = min(widths, key=lambda n: _predicted_cycles(max(1, M), max(1, N), K / 2, 128, n, BLOCK_K / 2))
    return _launch(sum_kernel, a, b, scale_a, scale_b, width, ROWS=scheme == "rows")


def _launch(kernel, a, b, scale_a, scale_b, width, group=16, **options):
    """Describe operands that scheme_of takes and start a program an SM; Unsupported for what TMA cannot copy."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=torch.bfloat16, device=a.device)
    if not tma_takes(a, b.t(), c):
        raise Unsupported(f"strides {a.stride()}, {b.stride()}, {c.stride()}: TMA wants rows at multiples of 16 bytes")
    a_desc, b_desc, c_desc = _describe(a, 64, BLOCK_K), _describe(b.t(), width, BLOCK_K), _describe(c, 64, 64)
    # As rows, [1, M or 1] and [N or 1, 1]: how PyTorch wants scales to lie.
    scale_a, scale_b = scale_a.t().contiguous(), scale_b.t().contiguous()
    tiles_m, tiles_n, steps = triton.cdiv(M, 128), triton.cdiv(N, width), triton.cdiv(K, BLOCK_K)
    programs = triton.cdiv(tiles_m * tiles_n, triton.cdiv(tiles_m * tiles_n, num_sms()))
    kernel[(programs,)](
        a_desc, b_desc, c_desc, scale_a, scale_b, tiles_m, tiles_n, steps, M, N,
        5 if width == 128 else 4, group, num_warps=4, **options,
    )  # fmt: skip
    return c


def _describe(t, *block):
    """What TMA must know of a matrix to copy blocks of it; their rows of 128 bytes are swizzled."""
    dtype = {FP8: gl.float8e4nv, torch.bfloat16: gl.bfloat16}[t.dtype]
    return TensorDescriptor.from_tensor(t, list(block), gl.NVMMASharedLayout.get_default_for(list(block), dtype))


LESSON = Lesson(
    about=About(teaches="the same ring in fp8", hours=0.5, operator="fp8 matmul", language="Gluon"),
    problem=PROBLEM,
    rungs=(summed, matmul_fp8),
    checks=(
        *PROBLEM.checks,
        case("the ring goes round within a tile, and two rounds of tiles", M=200, N=136, K=1040, scheme="rows"),
        case("two rounds of the grid, tiles of fewer steps than stages", gib=0.1, M=1544, N=6152, K=144, scheme="rows"),
        case("four rounds of 6 steps; two groups of 16 rows of tiles", gib=1.5, M=4096, N=4096, K=656, scheme="rows"),
    ),
    benches=tuple({"M": n, "N": n, "K": n, "scheme": s} for s in ("tensor", "rows") for n in (4096, 8192)),
    wrong=(
        Mutant("one row's scale for all", "sum_partition", "scale_a_ptr + rows,", "scale_a_ptr + rows * 0,", "summed"),
        Mutant("the first columns' scales for all", "sum_partition", "_ptr + cols,", "_ptr + cols % 8,", "summed"),
        Mutant("the tile before is added", "sum_partition", "step > 0, is", "True, is", "summed"),
        Mutant("one half twice", "sum_partition", "stage * 2 + WHICH", "stage * 2 + 1", "matmul_fp8"),
    ),
    claims=dict.fromkeys((summed, matmul_fp8), ("wgmma", "tma", "no spills")),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
