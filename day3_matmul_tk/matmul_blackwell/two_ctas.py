"""Matmul on Blackwell, rung 6: two CTAs share B.

New against warp_specialized.py: a cluster of two CTAs, on two SMs, computes 256 x 256. Each loads its own 128 rows of A
and one half of B's columns. The first CTA issues one MMA for both. It reads A and B from both shared memories, and
writes the rows of each CTA to that CTA's tensor memory.

                    B, left half    B, right half
                    in CTA 0        in CTA 1           bytes per step and SM      L2 -> shared memory
    A, upper half   C of CTA 0 .................       one CTA, 128 x 256       16 KB of A + 32 KB of B
    in CTA 0                                           a pair, 256 x 256        16 KB of A + 16 KB of B
    A, lower half   C of CTA 1 .................
    in CTA 1                                           so 6 stages fit where 4 did

The pair has one `full` a stage, in the first CTA: both halves of B must be there before the MMA. `empty` and `ready`
stand in each CTA, and the commit arrives in both.

Predicted for a B200, not measured: with a third fewer bytes L2 needs 840 cycles a step at Hopper's rate, where it
needed 1260. A tile's ends are those of warp_specialized.py.

A pair that walks over many tiles needs Triton 3.8. In 3.7 `mbarrier.arrive` reaches an mbarrier of its own CTA alone,
so the first CTA cannot learn that the second one has drained its rows.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from course_ops.hopper import (
    DTYPES,
    aggregate,
    allocate_stages,
    async_load,
    async_store,
    ring_slot,
)
from course_ops.versions import HAS_PAIRS, cluster_init, load_tensor_memory, tensor_memory_layout
from problems.matmul import empty_product

BLOCK_M, BLOCK_N, BLOCK_K = 256, 256, 64  # New: of a pair. 64 elements of 16 bits are 128 bytes, the widest swizzle
GROUP, STAGES = 8, 6


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
    full: gl.shared_memory_descriptor  # [STAGES, 1], of the pair
    empty: gl.shared_memory_descriptor  # [STAGES, 2], one in each CTA

    # One thread does all of it. Past the end of a matrix TMA writes zeros, and they count as arrived bytes.
    @gluon.jit
    def load(self, step, row, col, k):
        """When the stage is empty, announce the bytes of this CTA's halves to it, and start their copies."""
        stage, parity = ring_slot(step, self.full.shape[0])
        # In the first round parity ^ 1 names the phase before the first, which counts as complete.
        mbarrier.wait(self.empty.index(stage), parity ^ 1)
        full = self.full.index(stage)
        mbarrier.expect(full, self.a_desc.nbytes_per_cta + self.b_desc.nbytes_per_cta)
        async_load(self.a_desc, [row, k], full, self.a_smem.index(stage))
        async_load(self.b_desc, [k, col], full, self.b_smem.index(stage))

    @gluon.jit
    def multiply(self, step, acc, use_acc):
        """When the blocks of both CTAs have arrived, the first issues acc += A B. Its commit arrives in both."""
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
class PartitionArgs:
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
def producer(args):
    ring = args.ring
    M: gl.constexpr = ring.a_desc.block_type.shape[0]
    K: gl.constexpr = ring.a_desc.block_type.shape[1]
    N: gl.constexpr = ring.b_desc.block_type.shape[1]
    tile_m, tile_n = tile_at(gl.program_id(0), args.tiles_m, args.tiles_n, args.GROUP)
    for step in range(args.steps):
        ring.load(step, tile_m * M, tile_n * N, step * K)


@gluon.jit
def mma(args):
    for step in range(args.steps):
        args.ring.multiply(step, args.acc, step > 0)
    tcgen05_commit(args.ready)


@gluon.jit
def epilogue(args):
    ring = args.ring
    M: gl.constexpr = ring.a_desc.block_type.shape[0]
    N: gl.constexpr = ring.b_desc.block_type.shape[1]
    tile_m, tile_n = tile_at(gl.program_id(0), args.tiles_m, args.tiles_n, args.GROUP)
    mbarrier.wait(args.ready, 0)
    store_tile(args.c_desc, args.c_smem, args.acc, tile_m * M, tile_n * N)
    tma.store_wait(0)


@gluon.jit
def allocate_pair_barriers(COUNT: gl.constexpr, ONE: gl.constexpr):  # New
    """COUNT mbarriers with one arrival a phase. ONE: the pair has one of each, in its first CTA; else each CTA has."""
    bars = mbarrier.allocate_mbarrier(batch=COUNT, two_ctas=ONE)
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def matmul_kernel(a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, GROUP: gl.constexpr, STAGES: gl.constexpr):
    M: gl.constexpr = a_desc.block_type.shape[0]
    N: gl.constexpr = b_desc.block_type.shape[1]
    full, empty = allocate_pair_barriers(STAGES, True), allocate_pair_barriers(STAGES, False)
    ready = allocate_pair_barriers(1, False).index(0)
    cluster_init()  # a commit or a copy of the other CTA must find them initialised
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
        acc=allocate_tensor_memory(gl.float32, [M, N], tensor_memory_layout(M // 2, N, two_ctas=True)),
        ready=ready,
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        steps=steps,
        GROUP=GROUP,
    )
    # The first partition runs in the kernel's own 4 warps. Each of them reads a quarter of tensor memory's rows.
    gl.warp_specialize([(epilogue, (args,)), (producer, (args,)), (mma, (args,))], [1, 1], [40, 40])


def pair_descriptor(t, block_shape, dim):  # New
    """What TMA needs to copy blocks of a pair. Each CTA copies its half of them along `dim`; CTA 0 has the first."""
    split = [[int(dim == 0), int(dim == 1)]]
    layout = gl.NVMMASharedLayout.get_default_for(block_shape, DTYPES[t.dtype], cga_layout=split)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block_shape, layout)


@needs(100, "TMA and tensor memory", only=True, interpreted=HAS_PAIRS)
def two_ctas(a, b):
    """[M, K], [K, N] -> [M, N], fp16 or bf16. Rows are contiguous and begin at multiples of 16 bytes."""
    runs_on(100, "tensor memory")
    c = empty_product(a, b)
    if not c.numel() or not a.shape[1]:
        return c.zero_()
    if not HAS_PAIRS:
        raise Unsupported("Gluon has pairs of CTAs from Triton 3.7 on; course_ops.matmul needs none")
    if a.element_size() != 2 or not tma_takes(a, b, c):
        raise Unsupported("it takes fp16 or bf16 in contiguous rows of whole 16 bytes; course_ops.matmul takes all")
    a_desc = pair_descriptor(a, [BLOCK_M, BLOCK_K], 0)  # New: CTA 0 has the upper half of the rows
    b_desc = pair_descriptor(b, [BLOCK_K, BLOCK_N], 1)  # New: CTA 0 has the left half of the columns
    c_desc = pair_descriptor(c, [BLOCK_M, 64], 0)
    tiles_m, tiles_n = triton.cdiv(a.shape[0], BLOCK_M), triton.cdiv(b.shape[1], BLOCK_N)
    steps = triton.cdiv(a.shape[1], BLOCK_K)
    matmul_kernel[(tiles_m * tiles_n,)](
        a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, GROUP, STAGES, num_warps=4, num_ctas=2
    )  # fmt: skip
    return c
