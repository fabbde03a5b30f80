"""C = A B on Hopper: persistent and warp-specialized. One producer warp loads, two consumer warpgroups multiply."""

from collections.abc import Callable

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from course_ops._common import cdiv, num_sms, runs_gluon
from course_ops._launch import launcher
from course_ops.hopper import allocate_barriers, allocate_stages, ring_slot
from course_ops.kernels._matmul_hopper import (
    as_operand,
    describer,
    load_stage,
    store_tile,
    swizzled_tile,
    wgmma_takes,
)
from course_ops.kernels._matmul_plan import plan_of

BLOCK_M, BLOCK_K, STAGES, GROUP = 128, 64, 4, 16


# In the first round every stage is empty: parity ^ 1 names the phase before the first, which counts as complete.
@gluon.jit
def producer(descs, ring, sizes, GROUP: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr):
    a_desc, b_desc = descs
    a_smem, b_smem, full, empty = ring
    tiles_m, tiles_n, steps = sizes
    M: gl.constexpr = a_desc.block_type.shape[1 if A_T else 0]
    K: gl.constexpr = a_desc.block_type.shape[0 if A_T else 1]
    N: gl.constexpr = b_desc.block_type.shape[0 if B_T else 1]
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = swizzled_tile(tile, tiles_m, tiles_n, GROUP)
        for step in range(steps):
            stage, parity = ring_slot(count, full.shape[0])
            mbarrier.wait(empty.index(stage), parity ^ 1)
            a_to, b_to, bar = a_smem.index(stage), b_smem.index(stage), full.index(stage)
            load_stage(a_desc, b_desc, a_to, b_to, bar, tile_m * M, tile_n * N, step * K, A_T, B_T)
            count += 1


# A consumer owns the upper (WHICH = 0) or lower 64 rows of the tile. It releases a stage one step late: after the next
# MMA has been issued and the wait says that the one before is complete.
@gluon.jit
def consumer(
    c_desc, c_smem, ring, sizes, WHICH: gl.constexpr, GROUP: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr
):
    a_smem, b_smem, full, empty = ring
    tiles_m, tiles_n, steps = sizes
    HALF: gl.constexpr = c_desc.block_type.shape[0]
    N: gl.constexpr = b_smem.shape[1 if B_T else 2]
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    acc = gl.zeros((HALF, N), gl.float32, acc_layout)
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = swizzled_tile(tile, tiles_m, tiles_n, GROUP)
        previous = 0
        for step in range(steps):
            stage, parity = ring_slot(count, full.shape[0])
            mbarrier.wait(full.index(stage), parity)
            a = as_operand(a_smem.index(stage), A_T).slice(WHICH * HALF, HALF)
            b = as_operand(b_smem.index(stage), B_T)
            # A tile's first MMA does not accumulate: no registers to zero, and nothing of the last tile.
            acc = warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(previous), pred=step > 0)
            previous = stage
            count += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(previous))
        # The last two panels of 64 x 64 are still being stored while the next tile is multiplied.
        store_tile(c_desc, c_smem, acc, (tile_m * 2 + WHICH) * HALF, tile_n * N, 2 * WHICH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def persistent_kernel(
    a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, STAGES: gl.constexpr, GROUP: gl.constexpr,
    A_T: gl.constexpr, B_T: gl.constexpr,
):  # fmt: skip
    c_smem = allocate_stages(c_desc, 4)  # panels of 64 x 64, two for each consumer
    full, empty = (
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 2),
    )  # the producer arrives; both consumers arrive
    ring = allocate_stages(a_desc, STAGES), allocate_stages(b_desc, STAGES), full, empty
    sizes = (tiles_m, tiles_n, steps)
    # Registers per thread: 232 for each consumer, 40 for the producer. The first partition takes what is left.
    gl.warp_specialize(
        [
            (consumer, (c_desc, c_smem, ring, sizes, 0, GROUP, A_T, B_T)),
            (consumer, (c_desc, c_smem, ring, sizes, 1, GROUP, A_T, B_T)),
            (producer, ((a_desc, b_desc), ring, sizes, GROUP, A_T, B_T)),
        ],
        [4, 1],
        [232, 40],
    )


def matmul_hopper(a: Tensor, b: Tensor) -> Tensor:
    """[M, K], [K, N] -> [M, N] in 16 bits, K > 0; rows or columns contiguous and 16-byte aligned (takes)."""
    return prepare(a, b)(a, b)


def prepare(a: Tensor, b: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """matmul_hopper for operands that lie as a and b do."""
    (M, K), N, sms = a.shape, b.shape[1], num_sms(a.device)
    block_n = plan_of(a, b, sms, whole_tiles_of=BLOCK_M).block_n
    (of_a, a_t), (of_b, b_t) = describer(a, BLOCK_M, BLOCK_K), describer(b, BLOCK_K, block_n)
    of_c, _ = describer(a.new_empty(M, N, device="meta"), BLOCK_M // 2, 64)
    tiles_m, tiles_n, steps = cdiv(M, BLOCK_M), cdiv(N, block_n), cdiv(K, BLOCK_K)
    tiles = tiles_m * tiles_n
    programs = cdiv(tiles, cdiv(tiles, sms))  # as few as make as many rounds as all SMs would
    sizes = tiles_m, tiles_n, steps, STAGES, GROUP, a_t, b_t
    go = launcher(persistent_kernel, (programs,), num_warps=4)

    def run(a: Tensor, b: Tensor) -> Tensor:
        c = a.new_empty(M, N)
        go(of_a(a), of_b(b), of_c(c), *sizes)
        return c

    return run


def takes(a: Tensor, b: Tensor) -> bool:
    """Whether this GPU and these operands suit the Hopper kernels: wgmma, TMA, and rows of C at 16 bytes."""
    return runs_gluon(a) and wgmma_takes(a, b) and b.shape[1] % 8 == 0
