"""Matmul on Blackwell, rung 2: a ring of stages whose release is a commit.

New against tma.py: four stages, filled three steps ahead. An MMA is issued as soon as its blocks have arrived, behind
the MMA before it. Each has a commit to the mbarrier `empty` of its stage, so a stage is refilled when the tensor cores
have read it, and the warps wait for that alone.

    TMA             0000 1111 2222 3333      4444    5555               a digit is a step
    tensor cores         00001111222233334444....5555                   ....  = waiting for the load
    empty                    ^   ^   ^   ^   ^                          ^ the commit of a step arrives

After the loop one more commit, to `done`, completes when all MMAs before it have. It says that C is ready.

Predicted for a B200, not measured: a step costs the larger of 512 cycles of MMA and its L2 time, 1260 at Hopper's rate.
A tile's two ends remain: 1500 cycles to fill the ring and 3000 to write C.
"""

from lessonkit import Unsupported, needs, runs_on, tma_takes

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from course_ops.hopper import (
    aggregate,
    allocate_barriers,
    allocate_stages,
    async_load,
    async_store,
    ring_slot,
    tensor_descriptor,
)
from course_ops.versions import load_tensor_memory, tensor_memory_layout
from problems.matmul import empty_product

BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 64  # 64 elements of 16 bits are 128 bytes, the widest swizzle
GROUP, STAGES = 16, 4


@gluon.jit
def tile_at(index, tiles_m, tiles_n, GROUP: gl.constexpr):
    """The tile (row, column) that comes index-th: down GROUP rows of tiles, then to the next column of tiles."""
    first = index // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)  # the last group may be lower
    within = index % (GROUP * tiles_n)
    return first + within % height, within // height


@aggregate
class Ring:
    """Stages for blocks of A and B in shared memory. Two mbarriers each: blocks have arrived, have been read."""

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    a_smem: gl.shared_memory_descriptor  # [STAGES, BLOCK_M, BLOCK_K]
    b_smem: gl.shared_memory_descriptor  # [STAGES, BLOCK_K, BLOCK_N]
    full: gl.shared_memory_descriptor  # [STAGES, 1]
    empty: gl.shared_memory_descriptor

    # One thread does all of it. Past the end of a matrix TMA writes zeros, and they count as arrived bytes.
    @gluon.jit
    def load(self, step, row, col, k, pred):  # pred: whether there is such a step
        """When the stage is empty, announce the bytes of both blocks to it, and start their copies."""
        stage, parity = ring_slot(step, self.full.shape[0])
        # In the first round parity ^ 1 names the phase before the first, which counts as complete.
        mbarrier.wait(self.empty.index(stage), parity ^ 1, pred)
        full = self.full.index(stage)
        mbarrier.expect(full, self.a_desc.block_type.nbytes + self.b_desc.block_type.nbytes, pred)
        async_load(self.a_desc, [row, k], full, self.a_smem.index(stage), pred)
        async_load(self.b_desc, [k, col], full, self.b_smem.index(stage), pred)

    @gluon.jit
    def multiply(self, step, acc, use_acc):
        """When the blocks of a step have arrived, issue acc += A B; the stage is empty when that is complete."""
        stage, parity = ring_slot(step, self.full.shape[0])
        mbarrier.wait(self.full.index(stage), parity)
        a, b = self.a_smem.index(stage), self.b_smem.index(stage)
        tcgen05_mma(a, b, acc, use_acc=use_acc, mbarriers=[self.empty.index(stage)])


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
def matmul_kernel(a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, GROUP: gl.constexpr, STAGES: gl.constexpr):
    M: gl.constexpr = a_desc.block_type.shape[0]
    K: gl.constexpr = a_desc.block_type.shape[1]
    N: gl.constexpr = b_desc.block_type.shape[1]
    c_smem = allocate_stages(c_desc, 2)
    full, empty = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 1)  # arrivals: `expect`, a commit
    ring = Ring(
        a_desc=a_desc,
        b_desc=b_desc,
        a_smem=allocate_stages(a_desc, STAGES),
        b_smem=allocate_stages(b_desc, STAGES),
        full=full,
        empty=empty,
    )
    done = allocate_barriers(1, 1).index(0)
    acc = allocate_tensor_memory(gl.float32, [M, N], tensor_memory_layout(M, N))
    tile_m, tile_n = tile_at(gl.program_id(0), tiles_m, tiles_n, GROUP)
    row, col = tile_m * M, tile_n * N
    for step in gl.static_range(STAGES - 1):
        ring.load(step, row, col, step * K, step < steps)
    for step in range(steps):
        ring.multiply(step, acc, step > 0)
        ahead = step + STAGES - 1  # into the stage of step - 1, whose MMA runs before this step's
        ring.load(ahead, row, col, ahead * K, ahead < steps)
    tcgen05_commit(done)  # completes when every MMA issued before it has
    mbarrier.wait(done, 0)
    store_tile(c_desc, c_smem, acc, row, col)
    tma.store_wait(0)


@needs(100, "TMA and tensor memory", only=True, interpreted=True)
def ring(a, b):
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
        a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, GROUP, STAGES, num_warps=4
    )  # fmt: skip
    return c
