"""Gluon: TMA, barriers and wgmma by hand
======================================
The same C = A B, written one floor below Triton. In Gluon (triton.experimental.gluon) the language is still Python and
a program still owns a tile, but what Triton's compiler decided is now in the source: which thread holds which number
(layouts), what lies in shared memory and how it is swizzled, who waits for whom, which instruction multiplies.

Three of Hopper's parts do the work, and none of them is a thread:
    TMA       copies a box of a matrix between memory and shared memory; one thread asks, none carries
    mbarrier  64 bits of shared memory that count arrivals and bytes; when both are complete, a phase ends
    wgmma     4 warps together multiply 64 x 256 x 16 straight from shared memory, while they go on
One step of K for a tile of 128 x 256 are (128 + 256) * 64 * 2 = 48 KB and 2.1 million products, 1024 cycles of an SM's
tensor cores (2048 products a cycle). 39 bytes a cycle, an SM's share of L2, bring them in 1260 cycles at worst, and
after 600 to 1000 cycles at first. The three rungs differ in one thing: how much of that time lies under the products.

You will learn: layouts, TMA descriptors, barriers and their phases, a ring of stages, products in flight.
Needs a Hopper GPU to run (wgmma is in no other); without one the rungs are compiled and their machine code is read.
Run it:    python day3_matmul_tk/lesson07_gluon_matmul.py
Check it:  python -m lessonkit check lesson07_gluon_matmul
Time it:   python -m lessonkit bench lesson07_gluon_matmul
"""

from lessonkit import About, Lesson, Mutant, Unsupported, case, needs

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
from problems.matmul import PROBLEM, TMA_CHECKS, empty_product

BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 64  # 64 numbers of 16 bits are 128 bytes, the longest row that a swizzle knows


# What the rungs share: room and barriers, the order of tiles (lesson 1), one step's copies, the way of C to memory.
@gluon.jit
def stages(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT blocks, laid out and swizzled as TMA writes them."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers whose phase ends when ARRIVALS have come, and all bytes that they announced."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    fence_async_shared()  # TMA, which will count bytes there, sees it too
    return bars


@gluon.jit
def place(program, tiles_m, tiles_n, GROUP: gl.constexpr):
    """The tile (row, column) that comes `program`-th: in groups of GROUP rows of tiles, each column by column."""
    first = program // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)  # the last group may be lower
    within = program % (GROUP * tiles_n)
    return first + within % height, within // height


# One thread tells the barrier how many bytes will come, and asks for them. Past the end of a matrix TMA writes zeros,
# on both sides of a product, and counts them as come: the bytes are always those of whole tiles. A matrix whose
# columns are contiguous (a transposed one) is described and copied as it lies, and turned by whoever reads it.
@gluon.jit
def load_step(a_desc, b_desc, a_smem, b_smem, full, row, col, k, A_T: gl.constexpr, B_T: gl.constexpr, pred=True):
    mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes, pred)
    tma.async_copy_global_to_shared(a_desc, [k, row] if A_T else [row, k], full, a_smem, pred)
    tma.async_copy_global_to_shared(b_desc, [col, k] if B_T else [k, col], full, b_smem, pred)


# Turning is free: wgmma reads 16-bit tiles of shared memory by rows or by columns, and its descriptor says which.
@gluon.jit
def turned(smem, T: gl.constexpr):
    return smem.permute((1, 0)) if T else smem


@gluon.jit
def halves(x):  # [M, N] -> the left and the right [M, N / 2]: a thread holds numbers of both, so nothing moves
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()


# Registers -> 16 bits -> shared memory (stmatrix, swizzled) -> TMA, in panels of 64 columns, two buffers by turns. TMA
# clips what lies outside of C. store_wait(1): all panels but the last have been read, so this one's buffer may be
# written (one thread waits, the compiler lets the others wait for it). fence_async_shared: what threads have written
# goes another way to shared memory than TMA's reads, and could be there later.
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


# Rung 1. In turn: ask, wait, multiply. The layout of the sums is wgmma's own: 8 warps, one above the other, each with
# 16 rows of 256 columns, 128 fp32 numbers a thread. The barrier's phase ends at every step, so the parity to wait for
# is that of the step. TMA overwrites nothing that is still multiplied: a synchronous product is over when its warpgroup
# goes on, and where shared memory is read and then written the compiler lets all warps meet (bar.sync). Predicted: a
# step waits for L2 and then multiplies, 600 to 1000 + 1260 + 1024 cycles: a third of the peak.
@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def synchronous_kernel(
    a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, STAGES: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = c_desc.block_type.shape[0]
    K: gl.constexpr = a_desc.block_type.shape[0 if A_T else 1]
    N: gl.constexpr = b_desc.block_type.shape[0 if B_T else 1]
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, N, 16])
    a_smem, b_smem, c_smem = stages(a_desc, 1).index(0), stages(b_desc, 1).index(0), stages(c_desc, 2)
    full = barriers(1, 1).index(0)  # one arrival: that of mbarrier.expect
    tile_m, tile_n = place(gl.program_id(0), tiles_m, tiles_n, 8)
    acc = gl.zeros((M, N), gl.float32, sums)
    for step in range(steps):
        load_step(a_desc, b_desc, a_smem, b_smem, full, tile_m * M, tile_n * N, step * K, A_T, B_T)
        mbarrier.wait(full, step & 1)
        acc = warpgroup_mma(turned(a_smem, A_T), turned(b_smem, B_T), acc)
    store_tile(c_desc, c_smem, acc, tile_m * M, tile_n * N, 0)
    tma.store_wait(0)  # shared memory goes when the program ends


@needs(90, "TMA and wgmma", only=True)
def synchronous(a, b):
    """[M, K], [K, N] -> [M, N], fp16 or bf16; rows or columns contiguous and 16 bytes aligned."""
    return _run(synchronous_kernel, a, b, depth=1)


# Rung 2. New: a ring of STAGES tiles, each with a barrier. Before the loop all are asked for; a step waits for its own,
# multiplies, and asks for the tiles of STAGES steps later, which go where its own lay. Stage and parity come from the
# step: its place in the round, and the number of the round. 4 * 48 = 192 KB, and 32 for C: 224 of the 227 that a block
# may have. Predicted: 3 steps' time for each tile to come, so no waiting; but between two products all warps meet,
# one thread asks for the next tiles and the next product is issued, 100 to 200 cycles of 1024 in which the tensor
# cores have nothing to do.
@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def ring_kernel(
    a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, STAGES: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
    IN_FLIGHT: gl.constexpr = 0,
):  # fmt: skip
    M: gl.constexpr = c_desc.block_type.shape[0]
    K: gl.constexpr = a_desc.block_type.shape[0 if A_T else 1]
    N: gl.constexpr = b_desc.block_type.shape[0 if B_T else 1]
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, N, 16])
    a_smem, b_smem, c_smem = stages(a_desc, STAGES), stages(b_desc, STAGES), stages(c_desc, 2)
    full = barriers(STAGES, 1)
    tile_m, tile_n = place(gl.program_id(0), tiles_m, tiles_n, 8)
    row, col = tile_m * M, tile_n * N
    for i in gl.static_range(STAGES):  # New
        load_step(a_desc, b_desc, a_smem.index(i), b_smem.index(i), full.index(i), row, col, i * K, A_T, B_T, i < steps)
    acc = gl.zeros((M, N), gl.float32, sums)
    for step in range(steps):
        stage, parity = step % STAGES, step // STAGES & 1  # New
        mbarrier.wait(full.index(stage), parity)
        a, b = turned(a_smem.index(stage), A_T), turned(b_smem.index(stage), B_T)
        acc = warpgroup_mma(a, b, acc, is_async=True)
        # Rung 3: the product before this one is over, and its tiles are free; rung 2: this one is.
        acc = warpgroup_mma_wait(IN_FLIGHT, deps=(acc,))
        done = step - IN_FLIGHT
        free, later = (done + STAGES) % STAGES, done + STAGES
        load_step(
            a_desc, b_desc, a_smem.index(free), b_smem.index(free), full.index(free), row, col, later * K, A_T, B_T,
            (done >= 0) & (later < steps),
        )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=(acc,))
    store_tile(c_desc, c_smem, acc, row, col, 0)
    tma.store_wait(0)


@needs(90, "TMA and wgmma", only=True)
def ring(a, b):
    """As synchronous, four stages deep."""
    return _run(ring_kernel, a, b)


# Rung 3. New: one product in flight. wgmma is asynchronous: issuing takes few cycles, and what follows runs beside it.
# The loop waits until all products but the last one issued are over (IN_FLIGHT = 1), so the next is queued before the
# tensor cores are done, and the tiles that become free are those of the step before. `deps` tells the compiler that the
# sums are not to be touched until then. Predicted: products follow each other, 1024 cycles a step, or L2's 1260 if all
# SMs ask for most; and a tile's ends, 1500 cycles to fill the ring and 3000 to write C: 5% to 7% at K = 4096.
@needs(90, "TMA and wgmma", only=True)
def in_flight(a, b):
    """As ring, a product in flight; what TMA cannot read (rows not 16-byte aligned, fp32) goes to course_ops.matmul."""
    try:
        return _run(ring_kernel, a, b, IN_FLIGHT=1)
    except Unsupported:
        return course_ops.matmul(a, b)


def _run(kernel, a, b, depth=4, **options):
    c = empty_product(a, b)
    if not c.numel() or not a.shape[1]:
        return c.zero_()
    _check_operands(a=a, b=b, c=c)
    (a_desc, a_t), (b_desc, b_t) = _describe(a, BLOCK_M, BLOCK_K), _describe(b, BLOCK_K, BLOCK_N)
    c_desc, _ = _describe(c, BLOCK_M, 64)
    tiles_m, tiles_n = triton.cdiv(c.shape[0], BLOCK_M), triton.cdiv(c.shape[1], BLOCK_N)
    steps = triton.cdiv(a.shape[1], BLOCK_K)
    kernel[(tiles_m * tiles_n,)](
        a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, depth, a_t, b_t, **options, num_warps=8
    )  # fmt: skip
    return c


def _check_operands(**matrices):
    """Raise Unsupported if one of them is none that TMA can copy and wgmma multiply as it lies."""
    for name, t in matrices.items():
        if t.element_size() != 2:
            raise Unsupported(f"{name} is {t.dtype}: this wgmma multiplies numbers of 16 bits")
        if 1 not in t.stride() or max(t.stride()) % 8 or t.data_ptr() % 16:
            raise Unsupported(
                f"{name} begins at {t.data_ptr() % 16} past 16 bytes and has strides {t.stride()}: "
                "TMA wants one to be 1 and the other and the address multiples of 16 bytes"
            )


def _describe(t, rows, cols):
    """What TMA must know of a matrix to copy blocks of rows x cols, and whether it lies transposed."""
    transposed = t.stride(1) != 1
    if transposed:
        t, rows, cols = t.t(), cols, rows
    layout = gl.NVMMASharedLayout.get_default_for([rows, cols], gl.bfloat16)  # or any 16 bits: swizzled by 128 bytes
    return TensorDescriptor.from_tensor(t, [rows, cols], layout), transposed


LESSON = Lesson(
    about=About(
        teaches="layouts, TMA, barriers and their phases, a ring of stages, products in flight, all in the source",
        hours=1,
        star=True,
        operator="matmul",
        language="Gluon",
    ),
    problem=PROBLEM,
    rungs=(synchronous, ring, in_flight),
    checks=(
        *PROBLEM.checks,
        *TMA_CHECKS,
        case("9 tiles down: a group of 8 and one of 1", gib=0.1, M=1030, N=520, K=520),
        case("offsets past 2^31", gib=60, M=70_001, N=32_000, K=32_000),
    ),
    benches=tuple({"M": n, "N": n, "K": n} for n in (4096, 8192)),
    wrong=(
        Mutant("K's tail left out", "_run", "triton.cdiv(a.shape[1], BLOCK_K)", "a.shape[1] // BLOCK_K", "ring"),
        Mutant("sums start anew each step", "ring_kernel", "acc, is_async", "acc, use_acc=False, is_async", "ring"),
        Mutant("all panels in one place", "store_tile", "col + 64 * p", "col", "in_flight", "nan"),
        Mutant("the last group as high as the others", "place", "within % height", "within % GROUP", "ring", "nan"),
        Mutant("every stage asked for the same step", "ring_kernel", "row, col, i * K", "row, col, 0", "in_flight"),
        Mutant("the left half twice", "store_tile", "halves(parts[1])", "halves(parts[0])", "synchronous"),
    ),
    claims={
        synchronous: ("wgmma", "tma", "no spills"),
        ring: ("wgmma", "tma", "no spills"),
        in_flight: ("wgmma", "tma", "no spills"),
    },
    dtypes=(torch.float16, torch.bfloat16),
)

if __name__ == "__main__":
    LESSON.main()
