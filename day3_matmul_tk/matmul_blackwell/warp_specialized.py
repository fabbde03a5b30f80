"""Matmul on Blackwell, rung 3: warp specialization.

New against ring.py: each kind of work has warps of its own. They synchronise only through mbarriers.

    producer, 1 warp    wait empty -> TMA -> (bytes arrive: full)
    mma, 1 warp         wait full -> MMA -> (commit: empty); after the last step (commit: ready)
    epilogue, 4 warps   wait ready -> tensor memory to registers -> shared memory -> TMA to C

                 bytes                 commit
    producer ----- full[stage] ----> mma ----- ready ----> epilogue
             <---- empty[stage] ----
                 commit

On Hopper the accumulator's registers made the consumers large: two warpgroups of 232 registers per thread. Here one
thread of one warp issues every MMA. The epilogue has four warps because each of them can read one quarter of tensor
memory's 128 rows.

Predicted for a B200, not measured: as ring.py, or 2% faster, since a step's issue waits for nothing but its blocks.
"""

from lessonkit import Unsupported, needs, runs_on, tma_takes

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
    tensor_memory_descriptor,
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
    def load(self, step, row, col, k):
        """When the stage is empty, announce the bytes of both blocks to it, and start their copies."""
        stage, parity = ring_slot(step, self.full.shape[0])
        # In the first round parity ^ 1 names the phase before the first, which counts as complete.
        mbarrier.wait(self.empty.index(stage), parity ^ 1)
        full = self.full.index(stage)
        mbarrier.expect(full, self.a_desc.block_type.nbytes + self.b_desc.block_type.nbytes)
        async_load(self.a_desc, [row, k], full, self.a_smem.index(stage))
        async_load(self.b_desc, [k, col], full, self.b_smem.index(stage))

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


@aggregate
class PartitionArgs:  # New
    """What the warps of a CTA share."""

    ring: Ring
    c_desc: tma.tensor_descriptor
    c_smem: gl.shared_memory_descriptor  # [2, BLOCK_M, 64]: panels of C
    acc: tensor_memory_descriptor  # [BLOCK_M, BLOCK_N]
    ready: gl.shared_memory_descriptor  # a commit: the accumulator is complete
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    steps: gl.tensor
    GROUP: gl.constexpr


@gluon.jit
def producer(args):  # New
    ring = args.ring
    M: gl.constexpr = ring.a_desc.block_type.shape[0]
    K: gl.constexpr = ring.a_desc.block_type.shape[1]
    N: gl.constexpr = ring.b_desc.block_type.shape[1]
    tile_m, tile_n = tile_at(gl.program_id(0), args.tiles_m, args.tiles_n, args.GROUP)
    for step in range(args.steps):
        ring.load(step, tile_m * M, tile_n * N, step * K)


@gluon.jit
def mma(args):  # New
    for step in range(args.steps):
        args.ring.multiply(step, args.acc, step > 0)
    tcgen05_commit(args.ready)


@gluon.jit
def epilogue(args):  # New
    ring = args.ring
    M: gl.constexpr = ring.a_desc.block_type.shape[0]
    N: gl.constexpr = ring.b_desc.block_type.shape[1]
    tile_m, tile_n = tile_at(gl.program_id(0), args.tiles_m, args.tiles_n, args.GROUP)
    mbarrier.wait(args.ready, 0)
    store_tile(args.c_desc, args.c_smem, args.acc, tile_m * M, tile_n * N)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def matmul_kernel(a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, GROUP: gl.constexpr, STAGES: gl.constexpr):
    M: gl.constexpr = a_desc.block_type.shape[0]
    N: gl.constexpr = b_desc.block_type.shape[1]
    full, empty = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 1)  # arrivals: `expect`, a commit
    ring = Ring(
        a_desc=a_desc,
        b_desc=b_desc,
        a_smem=allocate_stages(a_desc, STAGES),
        b_smem=allocate_stages(b_desc, STAGES),
        full=full,
        empty=empty,
    )
    args = PartitionArgs(
        ring=ring,
        c_desc=c_desc,
        c_smem=allocate_stages(c_desc, 2),
        acc=allocate_tensor_memory(gl.float32, [M, N], tensor_memory_layout(M, N)),
        ready=allocate_barriers(1, 1).index(0),
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        steps=steps,
        GROUP=GROUP,
    )
    # The first partition runs in the kernel's own 4 warps. Each of them reads a quarter of tensor memory's rows.
    gl.warp_specialize([(epilogue, (args,)), (producer, (args,)), (mma, (args,))], [1, 1], [40, 40])


@needs(100, "TMA and tensor memory", only=True, interpreted=True)
def warp_specialized(a, b):
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
