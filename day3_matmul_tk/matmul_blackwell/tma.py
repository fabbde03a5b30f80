"""Matmul on Blackwell, rung 1: TMA and tcgen05, one after the other.

A CTA of 4 warps computes one tile of C, 128 x 256. For each step of K it loads, waits, multiplies, and waits:

    TMA             LLLLLLLL        LLLLLLLL        LLLLLLLL          L = loading 48 KB
    tensor cores            MMMM            MMMM            MMMM      M = multiplying, 512 cycles
    tensor memory   acc, 128 rows x 256 columns, from the first MMA to the epilogue

New against the Hopper ladder's tma.py: the accumulator lies in tensor memory, so the epilogue needs 64 registers of C a
thread, where the whole kernel had 128. One thread issues an MMA for the CTA. When it is complete, the tensor cores
arrive on an mbarrier. That arrival is called a commit, and it takes the place of `warpgroup_mma_wait`.

Predicted for a B200, not measured: 800 cycles of latency + up to 1260 of L2 + 512 of MMA a step.
"""

from lessonkit import Unsupported, needs, runs_on, tma_takes

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    allocate_tensor_memory,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from course_ops.hopper import (
    allocate_barriers,
    allocate_stages,
    async_load,
    async_store,
    tensor_descriptor,
)
from course_ops.versions import load_tensor_memory, tensor_memory_layout
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


@gluon.jit
def load(a_desc, b_desc, a_smem, b_smem, full, row, col, k):
    """Announce the bytes of both blocks to the mbarrier, and start their copies. One thread does all of it."""
    mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    async_load(a_desc, [row, k], full, a_smem)  # past the end of a matrix TMA writes zeros
    async_load(b_desc, [k, col], full, b_smem)


# store_wait(1): all panels but the last have left shared memory, so this one's buffer may be overwritten. The fence
# orders the threads' writes before TMA's reads. TMA writes nothing outside of C.
@gluon.jit
def store_tile(c_desc, c_smem, acc, row, col):
    """An accumulator in tensor memory to C in 16 bits, in panels of 64 columns, through two buffers of c_smem in turn.

    A thread holds one row of a panel: 64 fp32 registers. All 256 columns at once would not fit.
    """
    for p in gl.static_range(acc.shape[1] // 64):
        values = load_tensor_memory(acc.slice(64 * p, 64)).to(c_desc.dtype)
        panel = c_smem.index(p % 2)
        tma.store_wait(1)
        panel.store(values)
        fence_async_shared()
        async_store(c_desc, [row, col + 64 * p], panel)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def matmul_kernel(a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, GROUP: gl.constexpr):
    M: gl.constexpr = a_desc.block_type.shape[0]
    K: gl.constexpr = a_desc.block_type.shape[1]
    N: gl.constexpr = b_desc.block_type.shape[1]
    a_smem, b_smem, c_smem = allocate_stages(a_desc, 1), allocate_stages(b_desc, 1), allocate_stages(c_desc, 2)
    a_smem, b_smem = a_smem.index(0), b_smem.index(0)
    full, done = allocate_barriers(1, 1).index(0), allocate_barriers(1, 1).index(0)  # arrivals: `expect`, a commit
    acc = allocate_tensor_memory(gl.float32, [M, N], tensor_memory_layout(M, N))
    tile_m, tile_n = tile_at(gl.program_id(0), tiles_m, tiles_n, GROUP)
    row, col = tile_m * M, tile_n * N
    for step in range(steps):
        parity = step & 1  # a phase a step
        load(a_desc, b_desc, a_smem, b_smem, full, row, col, step * K)
        mbarrier.wait(full, parity)
        tcgen05_mma(a_smem, b_smem, acc, use_acc=step > 0, mbarriers=[done])
        mbarrier.wait(done, parity)
    store_tile(c_desc, c_smem, acc, row, col)
    tma.store_wait(0)  # shared memory is gone when the CTA ends


@needs(100, "TMA and tensor memory", only=True, interpreted=True)
def tma_and_tcgen05(a, b):
    """[M, K], [K, N] -> [M, N], fp16 or bf16. Rows are contiguous and begin at multiples of 16 bytes."""
    runs_on(100, "tensor memory")
    c = empty_product(a, b)
    if not c.numel() or not a.shape[1]:
        return c.zero_()
    if a.element_size() != 2 or not tma_takes(a, b, c):
        raise Unsupported("it takes fp16 or bf16 in contiguous rows of whole 16 bytes; course_ops.matmul takes all")
    a_desc, b_desc = tensor_descriptor(a, [BLOCK_M, BLOCK_K]), tensor_descriptor(b, [BLOCK_K, BLOCK_N])
    c_desc = tensor_descriptor(c, [BLOCK_M, 64])
    tiles_m, tiles_n = triton.cdiv(a.shape[0], BLOCK_M), triton.cdiv(b.shape[1], BLOCK_N)
    steps = triton.cdiv(a.shape[1], BLOCK_K)
    matmul_kernel[(tiles_m * tiles_n,)](
        a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, GROUP, num_warps=4
    )  # fmt: skip
    return c
