"""Matmul on Hopper, rung 4: warp specialization.

New against async_wgmma.py: each warp has one role. Roles synchronise only through mbarriers, two for each stage. Before
an arrive Gluon adds a barrier of the warpgroup's own four warps.

    1 producer warp         wait empty -> TMA -> (bytes arrive: full)                40 registers per thread
    2 consumer warpgroups   wait full -> wgmma, 64 x 256 each -> arrive on empty    232 registers per thread, 128 of acc

                 expect + bytes               2 arrivals
    producer ---------- full[stage] ----------> consumers
             <--------- empty[stage] ----------

Predicted: 0 to 2% over async_wgmma. In both a step costs its MMA and nothing else. But here the two warpgroups need not
be at the same step, so one may issue or wait while the other's MMA runs.
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
    warpgroup_mma_wait,
)

from course_ops.hopper import (
    aggregate,
    allocate_barriers,
    allocate_stages,
    async_load,
    async_store,
    ring_slot,
    tensor_descriptor,
)
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
    empty: gl.shared_memory_descriptor  # New

    # One thread does all of it. Past the end of a matrix TMA writes zeros, and they count as arrived bytes.
    @gluon.jit
    def load(self, step, row, col, k):
        """When the stage is empty, announce the bytes of both blocks to it, and start their copies."""
        stage, parity = ring_slot(step, self.full.shape[0])
        # New. In the first round parity ^ 1 names the phase before the first, which counts as complete.
        mbarrier.wait(self.empty.index(stage), parity ^ 1)
        full = self.full.index(stage)
        mbarrier.expect(full, self.a_desc.block_type.nbytes + self.b_desc.block_type.nbytes)
        async_load(self.a_desc, [row, k], full, self.a_smem.index(stage))
        async_load(self.b_desc, [k, col], full, self.b_smem.index(stage))

    @gluon.jit
    def wait_full(self, step):
        """The stage of a step, when its blocks have arrived."""
        stage, parity = ring_slot(step, self.full.shape[0])
        mbarrier.wait(self.full.index(stage), parity)
        return stage


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


@aggregate
class PartitionArgs:  # New
    """What the warps of a CTA share."""

    ring: Ring
    c_desc: tma.tensor_descriptor
    c_smem: gl.shared_memory_descriptor  # [4, 64, 64]: panels of C, two for each consumer
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


# New. A consumer owns the upper (WHICH = 0) or lower 64 rows of the tile. It releases a stage one step late: after the
# next MMA has been issued, and the wait says that the one before is complete.
@gluon.jit
def consumer(args, WHICH: gl.constexpr):
    ring = args.ring
    HALF: gl.constexpr = args.c_desc.block_type.shape[0]
    N: gl.constexpr = ring.b_desc.block_type.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    acc = gl.zeros((HALF, N), gl.float32, LAYOUT)
    tile_m, tile_n = tile_at(gl.program_id(0), args.tiles_m, args.tiles_n, args.GROUP)
    previous = 0
    for step in range(args.steps):
        stage = ring.wait_full(step)
        a = ring.a_smem.index(stage).slice(WHICH * HALF, HALF)
        acc = warpgroup_mma(a, ring.b_smem.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(ring.empty.index(previous), pred=step > 0)
        previous = stage
    acc = warpgroup_mma_wait(0, deps=(acc,))
    store_tile(args.c_desc, args.c_smem, acc, (tile_m * 2 + WHICH) * HALF, tile_n * N, 2 * WHICH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def matmul_kernel(a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, GROUP: gl.constexpr, STAGES: gl.constexpr):
    c_smem = allocate_stages(c_desc, 4)
    full, empty = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 2)  # `expect` arrives; both consumers arrive
    ring = Ring(
        a_desc=a_desc,
        b_desc=b_desc,
        a_smem=allocate_stages(a_desc, STAGES),
        b_smem=allocate_stages(b_desc, STAGES),
        full=full,
        empty=empty,
    )
    args = PartitionArgs(
        ring=ring, c_desc=c_desc, c_smem=c_smem, tiles_m=tiles_m, tiles_n=tiles_n, steps=steps, GROUP=GROUP
    )
    # The first partition runs in the kernel's own 4 warps. An SM has 65,536 registers: 232 per thread for each
    # consumer, 40 for the producer warp. The first partition takes what the others leave.
    gl.warp_specialize([(consumer, (args, 0)), (consumer, (args, 1)), (producer, (args,))], [4, 1], [232, 40])


@needs(90, "TMA and wgmma", only=True)
def warp_specialized(a, b):
    """[M, K], [K, N] -> [M, N], fp16 or bf16. Rows are contiguous and begin at multiples of 16 bytes."""
    c = empty_product(a, b)
    if not c.numel() or not a.shape[1]:
        return c.zero_()
    if a.element_size() != 2 or not tma_takes(a, b, c):
        raise Unsupported("this kernel takes fp16 or bf16 with contiguous rows that begin at multiples of 16 bytes")
    a_desc, b_desc = tensor_descriptor(a, [BLOCK_M, BLOCK_K]), tensor_descriptor(b, [BLOCK_K, BLOCK_N])
    c_desc = tensor_descriptor(c, [BLOCK_M // 2, 64])
    tiles_m, tiles_n = triton.cdiv(a.shape[0], BLOCK_M), triton.cdiv(b.shape[1], BLOCK_N)
    steps = triton.cdiv(a.shape[1], BLOCK_K)
    matmul_kernel[(tiles_m * tiles_n,)](
        a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, GROUP, STAGES, num_warps=4
    )  # fmt: skip
    return c
