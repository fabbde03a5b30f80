"""Matmul on Hopper, rung 1: TMA and wgmma, one after the other.

A CTA of 8 warps computes one tile of C, 128 x 256. For each step of K it loads, waits and multiplies:

    TMA             LLLLLLLL          LLLLLLLL          LLLLLLLL         L = loading 48 KB
    tensor cores            MMMMMMMM          MMMMMMMM          MMMM     M = multiplying, 1024 cycles

Predicted per step: 600 to 1000 cycles of latency + up to 1260 of L2 + 1024 of MMA: about a third of the peak.
"""

from lessonkit import Unsupported, needs, tma_takes

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from course_ops.hopper import aggregate, async_load, async_store, tensor_descriptor
from problems.matmul import empty_product

BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 64  # 64 elements of 16 bits are 128 bytes, the widest swizzle
GROUP = 16


@gluon.jit
def tile_at(index, tiles_m, tiles_n, GROUP: gl.constexpr):
    """The tile (row, column) that comes index-th: down GROUP rows of tiles, then to the next column of tiles."""
    first = index // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)  # the last group may be lower
    within = index % (GROUP * tiles_n)
    return first + within % height, within // height


@aggregate
class Stage:
    """One step's blocks of A and B in shared memory, and the mbarrier that completes when they have arrived."""

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    a_smem: gl.shared_memory_descriptor  # [BLOCK_M, BLOCK_K]
    b_smem: gl.shared_memory_descriptor  # [BLOCK_K, BLOCK_N]
    full: gl.shared_memory_descriptor

    # One thread does all of it. Past the end of a matrix TMA writes zeros, and they count as arrived bytes.
    @gluon.jit
    def load(self, row, col, k):
        """Announce the bytes of both blocks to the mbarrier, and start their copies."""
        mbarrier.expect(self.full, self.a_desc.block_type.nbytes + self.b_desc.block_type.nbytes)
        async_load(self.a_desc, [row, k], self.full, self.a_smem)
        async_load(self.b_desc, [k, col], self.full, self.b_smem)


@gluon.jit
def split_columns(x):
    """[M, N] -> the left and the right [M, N / 2]. A thread holds columns of both, so nothing moves."""
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()


# store_wait(1): all panels but the last have left shared memory, so this one's buffer may be overwritten. The fence
# orders the threads' writes before TMA's reads. TMA writes nothing outside of C.
@gluon.jit
def store_tile(c_desc, c_smem, acc, row, col, FIRST: gl.constexpr):
    """acc to C in 16 bits, in panels of 64 columns, through buffers FIRST and FIRST + 1 of c_smem in turn."""
    panels = split_columns(acc)
    if acc.shape[1] == 256:
        panels = split_columns(panels[0]) + split_columns(panels[1])
    for p in gl.static_range(len(panels)):
        panel = c_smem.index(FIRST + p % 2)
        tma.store_wait(1)
        panel.store(panels[p].to(c_desc.dtype))
        fence_async_shared()
        async_store(c_desc, [row, col + 64 * p], panel)


# LAYOUT is how wgmma leaves the accumulator in registers: 8 warps, one below the other, each with 16 rows of all
# columns. That is 128 fp32 registers per thread.
@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def matmul_kernel(a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, GROUP: gl.constexpr):
    M: gl.constexpr = a_desc.block_type.shape[0]
    K: gl.constexpr = a_desc.block_type.shape[1]
    N: gl.constexpr = b_desc.block_type.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, N, 16])
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [2] + c_desc.block_type.shape, c_desc.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)  # a phase completes after one arrival, that of `expect`, and all bytes announced
    fence_async_shared()  # TMA, which counts the bytes there, must see the initial value
    stage = Stage(
        a_desc=a_desc,
        b_desc=b_desc,
        a_smem=gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout),
        b_smem=gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout),
        full=full,
    )
    tile_m, tile_n = tile_at(gl.program_id(0), tiles_m, tiles_n, GROUP)
    row, col = tile_m * M, tile_n * N
    acc = gl.zeros((M, N), gl.float32, LAYOUT)
    for step in range(steps):
        stage.load(row, col, step * K)
        mbarrier.wait(stage.full, step & 1)  # one phase per step: the phases are numbered as the steps are
        # This waits until the MMA is complete. So the stage has been read when the next load begins: no mbarrier has to
        # say that it is empty.
        acc = warpgroup_mma(stage.a_smem, stage.b_smem, acc)
    store_tile(c_desc, c_smem, acc, row, col, 0)
    tma.store_wait(0)  # shared memory is gone when the CTA ends


@needs(90, "TMA and wgmma", only=True)
def tma_and_wgmma(a, b):
    """[M, K], [K, N] -> [M, N], fp16 or bf16. Rows are contiguous and begin at multiples of 16 bytes."""
    c = empty_product(a, b)
    if not c.numel() or not a.shape[1]:
        return c.zero_()
    if a.element_size() != 2 or not tma_takes(a, b, c):
        raise Unsupported("this kernel takes fp16 or bf16 with contiguous rows that begin at multiples of 16 bytes")
    a_desc, b_desc = tensor_descriptor(a, [BLOCK_M, BLOCK_K]), tensor_descriptor(b, [BLOCK_K, BLOCK_N])
    c_desc = tensor_descriptor(c, [BLOCK_M, 64])
    tiles_m, tiles_n = triton.cdiv(a.shape[0], BLOCK_M), triton.cdiv(b.shape[1], BLOCK_N)
    steps = triton.cdiv(a.shape[1], BLOCK_K)
    matmul_kernel[(tiles_m * tiles_n,)](
        a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, GROUP, num_warps=8
    )  # fmt: skip
    return c
