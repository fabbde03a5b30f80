"""C = (A scale_a) (B scale_b) in e4m3 on Hopper: scales at the end of a tile, or promoted every 128 of K."""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from course_ops._common import cdiv, num_sms, tma_takes
from course_ops.hopper import allocate_barriers, allocate_stages, ring_slot
from course_ops.kernels._matmul_hopper import store_tile, swizzled_tile
from course_ops.kernels._tiles import predicted_cycles
from course_ops.kernels.matmul_fp8 import FP8
from course_ops.versions import async_load

BLOCK_K = 128


# One warp loads everything: B's block, 64 rows of A for each consumer and, if scales change with k, their scales.
@gluon.jit
def producer(descs, ring, sizes, GROUP: gl.constexpr):
    a_desc, b_desc, scale_desc = descs
    a_smem, b_smem, scale_smem, full, empty = ring
    tiles_m, tiles_n, steps, _, _ = sizes
    CONSUMERS: gl.constexpr = a_smem.shape[0] // full.shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    OF_A: gl.constexpr = a_desc.block_type.nbytes + (scale_desc.block_type.nbytes if scale_desc is not None else 0)
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = swizzled_tile(tile, tiles_m, tiles_n, GROUP)
        for step in range(steps):
            stage, parity = ring_slot(count, full.shape[0])
            mbarrier.wait(empty.index(stage), parity ^ 1)
            bar, k = full.index(stage), step * BLOCK_K
            mbarrier.expect(bar, CONSUMERS * OF_A + b_desc.block_type.nbytes)
            async_load(b_desc, [tile_n * BLOCK_N, k], bar, b_smem.index(stage))
            for which in gl.static_range(CONSUMERS):
                row, place = (tile_m * CONSUMERS + which) * 64, stage * CONSUMERS + which
                async_load(a_desc, [row, k], bar, a_smem.index(place))
                if scale_desc is not None:
                    async_load(scale_desc, [step, row], bar, scale_smem.index(place))
            count += 1


# The scales are loaded before the last MMA is waited for, so that they arrive under it.
@gluon.jit
def sum_consumer(c_desc, c_smem, ring, scales, sizes, WHICH: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr):
    a_smem, b_smem, _, full, empty = ring
    tiles_m, tiles_n, steps, M, N = sizes
    scale_a_ptr, scale_b_ptr = scales
    BLOCK_N: gl.constexpr = b_smem.shape[1]
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32]
    )
    acc = gl.zeros((64, BLOCK_N), gl.float32, acc_layout)
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = swizzled_tile(tile, tiles_m, tiles_n, GROUP)
        row, col = (tile_m * 2 + WHICH) * 64, tile_n * BLOCK_N
        previous = 0
        for step in range(steps):
            stage, parity = ring_slot(count, full.shape[0])
            mbarrier.wait(full.index(stage), parity)
            a, b = a_smem.index(stage * 2 + WHICH), b_smem.index(stage).permute((1, 0))
            acc = warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(previous), pred=step > 0)
            previous = stage
            count += 1
        scale_a, scale_b = gl.load(scale_a_ptr), gl.load(scale_b_ptr)
        if ROWS:
            rows = row + gl.arange(0, 64, gl.SliceLayout(1, acc_layout))
            cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, acc_layout))
            scale_a = gl.load(scale_a_ptr + rows, mask=rows < M, other=0.0)[:, None]
            scale_b = gl.load(scale_b_ptr + cols, mask=cols < N, other=0.0)[None, :]
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(previous))
        store_tile(c_desc, c_smem, acc * (scale_a * scale_b), row, col, 2 * WHICH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def sum_kernel(
    a_desc, b_desc, c_desc, scale_desc, scale_a_ptr, scale_b_ptr, tiles_m, tiles_n, steps, M, N, STAGES: gl.constexpr,
    GROUP: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    c_smem = allocate_stages(c_desc, 4)
    full, empty = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 2)
    ring = allocate_stages(a_desc, 2 * STAGES), allocate_stages(b_desc, STAGES), None, full, empty
    sizes, scales = (tiles_m, tiles_n, steps, M, N), (scale_a_ptr, scale_b_ptr)
    gl.warp_specialize(
        [
            (sum_consumer, (c_desc, c_smem, ring, scales, sizes, 0, GROUP, ROWS)),
            (sum_consumer, (c_desc, c_smem, ring, scales, sizes, 1, GROUP, ROWS)),
            (producer, ((a_desc, b_desc, scale_desc), ring, sizes, GROUP)),
        ],
        [4, 1],
        [232, 40],
    )


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


# A consumer owns 64 rows of a tile: first their left, then their right 128 columns. While it promotes, another
# multiplies. The scales of B for the next step are loaded under this one.
@gluon.jit
def promote_consumer(c_desc, c_smem, ring, scale_b_ptr, sizes, WHICH: gl.constexpr, GROUP: gl.constexpr):
    a_smem, b_smem, scale_smem, full, empty = ring
    tiles_m, tiles_n, steps, _, N = sizes
    CONSUMERS: gl.constexpr = a_smem.shape[0] // full.shape[0]
    BLOCK_N: gl.constexpr = b_smem.shape[1]
    WIDE: gl.constexpr = BLOCK_N == 256
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]
    )
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = swizzled_tile(tile, tiles_m, tiles_n, GROUP)
        row, col = (tile_m * CONSUMERS + WHICH) * 64, tile_n * BLOCK_N
        left_ptr = scale_b_ptr + col // 128 * steps
        right_ptr = left_ptr + (steps if col + 128 < N else 0)  # past N any scale will do: nothing is stored
        scale_left, scale_right = gl.load(left_ptr), gl.load(right_ptr)
        left = gl.zeros((64, 128), gl.float32, acc_layout)
        right = left
        for step in range(steps):
            later = gl.minimum(step + 1, steps - 1)
            next_left, next_right = gl.load(left_ptr + later), gl.load(right_ptr + later)
            stage, parity = ring_slot(count, full.shape[0])
            bar = full.index(stage)
            a, b = a_smem.index(stage * CONSUMERS + WHICH), b_smem.index(stage)
            scale_a = scale_smem.index(stage * CONSUMERS + WHICH).reshape((64,))
            left = promote(left, a, b.slice(0, 128), scale_a, scale_left, bar, parity)
            if WIDE:
                right = promote(right, a, b.slice(128, 128), scale_a, scale_right, bar, parity)
            mbarrier.arrive(empty.index(stage))
            scale_left, scale_right = next_left, next_right
            count += 1
        store_tile(c_desc, c_smem, left, row, col, 2 * WHICH)
        if WIDE:
            store_tile(c_desc, c_smem, right, row, col + 128, 2 * WHICH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def promote_kernel(
    a_desc, b_desc, c_desc, scale_desc, scale_a_ptr, scale_b_ptr, tiles_m, tiles_n, steps, M, N, STAGES: gl.constexpr,
    GROUP: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    c_smem = allocate_stages(c_desc, 2 * CONSUMERS)
    full, empty = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, CONSUMERS)
    a_smem, scale_smem = allocate_stages(a_desc, STAGES * CONSUMERS), allocate_stages(scale_desc, STAGES * CONSUMERS)
    ring = a_smem, allocate_stages(b_desc, STAGES), scale_smem, full, empty
    sizes = (tiles_m, tiles_n, steps, M, N)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (promote_consumer, (c_desc, c_smem, ring, scale_b_ptr, sizes, 0, GROUP)),
            (promote_consumer, (c_desc, c_smem, ring, scale_b_ptr, sizes, 1, GROUP)),
            (producer, ((a_desc, b_desc, scale_desc), ring, sizes, GROUP)),
        ], [4, 1], [232, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (promote_consumer, (c_desc, c_smem, ring, scale_b_ptr, sizes, 0, GROUP)),
            (promote_consumer, (c_desc, c_smem, ring, scale_b_ptr, sizes, 1, GROUP)),
            (promote_consumer, (c_desc, c_smem, ring, scale_b_ptr, sizes, 2, GROUP)),
            (producer, ((a_desc, b_desc, scale_desc), ring, sizes, GROUP)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip


def fp8_sum_hopper(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, scheme: str) -> Tensor:
    """a [M, K], b [K, N] with b.t() in rows, scales of "tensor" or "rows" -> [M, N] in bf16. Fast accumulation.

    Rows of a, b.t() and the result begin at multiples of 16 bytes.
    """
    (M, K), N, sms = a.shape, b.shape[1], num_sms(a.device)
    # In bytes a step is one of 64 elements of 16 bits, and takes as long.
    width = min((256, 128), key=lambda n: predicted_cycles(M, N, K / 2, 128, n, BLOCK_K / 2, sms))
    return _launch(sum_kernel, a, b, scale_a.t().contiguous(), scale_b, (128, width), None, ROWS=scheme == "rows")


PROMOTE_TILES = ((128, 256), (192, 128), (128, 128))


def fp8_promote_hopper(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, scheme: str) -> Tensor:
    """As fp8_sum_hopper for "blocks": scales [M, K/128] and [K/128, N/128], rounded up; summed in fp32."""
    sms = num_sms(a.device)

    def area_of_an_sm(tile: tuple[int, int]) -> int:
        tiles = cdiv(a.shape[0], tile[0]) * cdiv(b.shape[1], tile[1])
        return cdiv(tiles, sms) * tile[0] * tile[1]

    tile = min(PROMOTE_TILES, key=area_of_an_sm)
    scale_a = _aligned_rows(scale_a.t())
    scale_desc = _describe(scale_a, 1, 64)
    return _launch(promote_kernel, a, b, scale_a, scale_b, tile, scale_desc, CONSUMERS=tile[0] // 64)


def _launch(kernel, a, b, scale_a, scale_b, tile, scale_desc, group=16, **options):
    """A program an SM. tile: rows and columns of C, 64 rows for each consumer. scale_a lies as [K/128 or 1, M]."""
    (M, K), N, sms = a.shape, b.shape[1], num_sms(a.device)
    c = torch.empty((M, N), dtype=torch.bfloat16, device=a.device)
    block_m, block_n = tile
    a_desc, b_desc, c_desc = _describe(a, 64, BLOCK_K), _describe(b.t(), block_n, BLOCK_K), _describe(c, 64, 64)
    scale_b = scale_b.t().contiguous()  # rows [N/128 or N or 1, K/128 or 1], as PyTorch wants scales to lie
    tiles_m, tiles_n, steps = cdiv(M, block_m), cdiv(N, block_n), cdiv(K, BLOCK_K)
    programs = cdiv(tiles_m * tiles_n, cdiv(tiles_m * tiles_n, sms))
    kernel[(programs,)](
        a_desc, b_desc, c_desc, scale_desc, scale_a, scale_b, tiles_m, tiles_n, steps, M, N,
        5 if tile == (128, 128) else 4, group, num_warps=4, **options,
    )  # fmt: skip
    return c


def _describe(t: Tensor, *block: int) -> TensorDescriptor:
    """A TMA descriptor for blocks of a matrix; rows of 128 bytes are swizzled, scales are not."""
    dtype = {FP8: gl.float8e4nv, torch.bfloat16: gl.bfloat16}.get(t.dtype)
    if dtype:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    else:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor.from_tensor(t, list(block), layout)


def _aligned_rows(scales: Tensor) -> Tensor:
    """fp32 scales [K/128, M] if TMA can copy them in place, else a copy with rows at multiples of 16 bytes."""
    if tma_takes(scales):
        return scales
    steps, M = scales.shape
    return scales.new_empty(steps, cdiv(M, 4) * 4)[:, :M].copy_(scales)
