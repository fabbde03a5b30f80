"""Matmul on Hopper, rung 3: one MMA in flight.

wgmma is asynchronous: it is issued in a few cycles and runs on. New against ring.py: an MMA is issued before the MMA of
the step before has ended, so the tensor cores always have work queued. A stage is refilled one step later.

    TMA             0000 1111 2222 3333 4444 5555 6666    7777           a digit is a step
    tensor cores         0000000011111111222222223333333344444444
    warps                i0  i1..i2......i3......i4......                i = issue; . = wait for the MMA before

Predicted: MMAs follow each other, 1024 cycles per step, or 1260 when all SMs load from L2 at the same time. A tile's
two ends remain: 1500 cycles to fill the ring and 3000 to write C, 5% to 7% at K = 4096.
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

from course_ops.hopper import aggregate, async_load, async_store, tensor_descriptor
from problems.matmul import empty_product

BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 64  # 64 elements of 16 bits are 128 bytes, the widest swizzle
GROUP, STAGES = 16, 4  # 4 stages of 48 KB and 32 KB for C: 224 of the 227 KB that a CTA may have


@gluon.jit
def tile_at(index, tiles_m, tiles_n, GROUP: gl.constexpr):
    """The tile (row, column) that comes index-th: down GROUP rows of tiles, then to the next column of tiles."""
    first = index // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)  # the last group may be lower
    within = index % (GROUP * tiles_n)
    return first + within % height, within // height


@gluon.jit
def allocate_stages(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT blocks of a descriptor, in the layout in which TMA writes them."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT mbarriers. A phase of one completes after ARRIVALS arrivals and all bytes that were announced to it."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    fence_async_shared()  # TMA, which counts the bytes there, must see the initial value
    return bars


@gluon.jit
def ring_slot(step, STAGES: gl.constexpr):
    """The stage that a step uses, and the parity of its round: that of the phase of `full` to wait for."""
    return step % STAGES, step // STAGES & 1


@aggregate
class Ring:
    """Stages for blocks of A and B in shared memory, and for each stage an mbarrier that says they have arrived."""

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    a_smem: gl.shared_memory_descriptor  # [STAGES, BLOCK_M, BLOCK_K]
    b_smem: gl.shared_memory_descriptor  # [STAGES, BLOCK_K, BLOCK_N]
    full: gl.shared_memory_descriptor  # [STAGES, 1]

    # One thread does all of it. Past the end of a matrix TMA writes zeros, and they count as arrived bytes.
    @gluon.jit
    def load(self, step, row, col, k, pred):  # pred: whether there is such a step
        """Announce the bytes of both blocks to the stage's mbarrier, and start their copies."""
        stage, _ = ring_slot(step, self.full.shape[0])
        full = self.full.index(stage)
        mbarrier.expect(full, self.a_desc.block_type.nbytes + self.b_desc.block_type.nbytes, pred)
        async_load(self.a_desc, [row, k], full, self.a_smem.index(stage), pred)
        async_load(self.b_desc, [k, col], full, self.b_smem.index(stage), pred)

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


# LAYOUT is how wgmma leaves the accumulator in registers: 8 warps, one below the other, each with 16 rows of all
# columns. That is 128 fp32 registers per thread.
@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def matmul_kernel(a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, GROUP: gl.constexpr, STAGES: gl.constexpr):
    M: gl.constexpr = a_desc.block_type.shape[0]
    K: gl.constexpr = a_desc.block_type.shape[1]
    N: gl.constexpr = b_desc.block_type.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, N, 16])
    c_smem = allocate_stages(c_desc, 2)
    ring = Ring(
        a_desc=a_desc,
        b_desc=b_desc,
        a_smem=allocate_stages(a_desc, STAGES),
        b_smem=allocate_stages(b_desc, STAGES),
        full=allocate_barriers(STAGES, 1),  # one arrival, that of `expect`
    )
    tile_m, tile_n = tile_at(gl.program_id(0), tiles_m, tiles_n, GROUP)
    row, col = tile_m * M, tile_n * N
    acc = gl.zeros((M, N), gl.float32, LAYOUT)
    for step in gl.static_range(STAGES):  # prologue
        ring.load(step, row, col, step * K, step < steps)
    for step in range(steps):
        stage = ring.wait_full(step)
        acc = warpgroup_mma(ring.a_smem.index(stage), ring.b_smem.index(stage), acc, is_async=True)  # New
        acc = warpgroup_mma_wait(1, deps=(acc,))  # New: at most one MMA still runs, this step's
        later = step - 1 + STAGES  # New: its operands go to the stage of the step before, now free
        ring.load(later, row, col, later * K, (step > 0) & (later < steps))
    acc = warpgroup_mma_wait(0, deps=(acc,))  # New
    store_tile(c_desc, c_smem, acc, row, col, 0)
    tma.store_wait(0)  # shared memory is gone when the CTA ends


@needs(90, "TMA and wgmma", only=True)
def async_wgmma(a, b):
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
        a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, GROUP, STAGES, num_warps=8
    )  # fmt: skip
    return c
