"""Idioms that the Hopper matmuls share, in Gluon: a ring of stages with mbarriers, TMA loads, C by TMA in panels."""

from collections.abc import Callable
from functools import cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import constexpr_function

from course_ops._common import tma_takes
from course_ops._launch import describing
from course_ops.hopper import allocate_barriers
from course_ops.versions import allocate_mbarrier, async_load, async_store

block_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # all threads of a partition; renamed in Triton 3.7


@gluon.jit
def swizzled_tile(index, tiles_m, tiles_n, GROUP: gl.constexpr):
    """The tile (row, column) that comes index-th: down GROUP rows of tiles, then to the next column of tiles."""
    first = index // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)  # the last group may be lower
    within = index % (GROUP * tiles_n)
    return first + within % height, within // height


# Past the end of A or B, TMA fills the block with zeros and counts them as arrived bytes. A transposed matrix is copied
# in the order of memory; as_operand permutes the block.
@gluon.jit
def load_stage(a_desc, b_desc, a_smem, b_smem, full, row, col, k, A_T: gl.constexpr, B_T: gl.constexpr, pred=True):
    """One step's blocks of A and B into a stage; `full` completes when their bytes have arrived."""
    mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes, pred)
    async_load(a_desc, [k, row] if A_T else [row, k], full, a_smem, pred)
    async_load(b_desc, [col, k] if B_T else [k, col], full, b_smem, pred)


@gluon.jit
def as_operand(smem, TRANSPOSED: gl.constexpr):
    """A block as wgmma multiplies it; free, since wgmma reads 16-bit blocks by rows or by columns."""
    return smem.permute((1, 0)) if TRANSPOSED else smem


@gluon.jit
def split_columns(x):
    """[M, N] -> the left and the right [M, N / 2]. A thread holds columns of both, so nothing moves."""
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()


# store_wait(1): all panels but the last have left shared memory, so this one's buffer may be overwritten. The fence
# orders the threads' writes before TMA's reads.
@gluon.jit
def store_tile(c_desc, c_smem, acc, row, col, FIRST: gl.constexpr):
    """acc to C in panels of 64 columns, through buffers FIRST and FIRST + 1 of c_smem by turns."""
    panels = split_columns(acc)
    if acc.shape[1] == 256:
        panels = split_columns(panels[0]) + split_columns(panels[1])
    # Even, or a tile's last panel and the next tile's first would share a buffer.
    gl.static_assert(len(panels) % 2 == 0)
    for p in gl.static_range(len(panels)):
        panel = c_smem.index(FIRST + p % 2)
        tma.store_wait(1)
        panel.store(panels[p].to(c_desc.dtype))
        fence_async_shared()
        async_store(c_desc, [row, col + 64 * p], panel)


@constexpr_function
def accumulator(columns, ctas):
    """The layout of a consumer's accumulator, of `columns` columns. Of a pair each CTA has half of the rows."""
    of_ctas = {"cga_layout": [[1, 0]]} if ctas == 2 else {}
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16], **of_ctas)


# ---- A pair of CTAs on two SMs: two tiles one above the other, which have the same block of B -----------------------


# CTA 0 issues the copy of B's block, which TMA writes to both CTAs (multicast). So it waits until the consumers of both
# have read the stage. CTA 1 arrives on those mbarriers and does not wait for them. The compiler lets both CTAs see each
# other's mbarriers initialised before either uses them.
@gluon.jit
def ring_barriers(STAGES: gl.constexpr, CONSUMERS: gl.constexpr, CTAS: gl.constexpr):
    """mbarriers of a ring: full and empty, in each CTA; both_empty, in CTA 0 of a pair."""
    if CTAS == 2:
        full, empty = allocate_mbarrier(batch=STAGES), allocate_mbarrier(batch=STAGES)
        both_empty = allocate_mbarrier(batch=STAGES, two_ctas=True)
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=CONSUMERS)
            mbarrier.init(both_empty.index(i), count=CONSUMERS)  # of each CTA
    else:
        full, empty = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, CONSUMERS)
        both_empty = empty
    return full, empty, both_empty


@gluon.jit
def wait_until_read(args, stage, parity):
    """The producer waits until consumers have read the stage: its own, and CTA 0 of a pair until those of both have."""
    mbarrier.wait(args.empty.index(stage), parity)
    if args.CTAS == 2:
        mbarrier.wait(args.both_empty.index(stage), parity)


@gluon.jit
def release(args, stage, pred):
    """A consumer has read a stage."""
    mbarrier.arrive(args.empty.index(stage), pred=pred)
    if args.CTAS == 2:
        mbarrier.arrive(args.both_empty.index(stage), pred=pred)


@gluon.jit
def load_for_both(desc, at, full, smem, CTAS: gl.constexpr):
    """Copy a block that all CTAs of a cluster need. Its bytes complete `full` in each of them."""
    if CTAS == 2:
        async_load(desc, at, full, smem, multicast=True)
    else:
        async_load(desc, at, full, smem)


def describer(
    t: Tensor, rows: int, cols: int, pair: tuple[int, int] | None = None
) -> tuple[Callable[[Tensor], TensorDescriptor], bool]:
    """A function that describes to TMA what lies as the 16-bit matrix t, in blocks; whether t lies transposed.

    pair: blocks are of two CTAs. (1, 0): each has half of the rows; (0, 0): each has all of the block.
    """
    shape, strides, transposed = t.shape, t.stride(), t.stride(1) != 1
    if transposed:
        shape, strides, rows, cols, pair = shape[::-1], strides[::-1], cols, rows, pair and pair[::-1]
    layout = layout_of(rows, cols, pair)
    return describing(TensorDescriptor, shape, strides, [rows, cols], layout=layout), transposed


@cache
def layout_of(rows: int, cols: int, pair: tuple[int, int] | None = None) -> gl.NVMMASharedLayout:
    """How a block of any 16-bit dtype lies in shared memory for wgmma: a swizzle of 128 bytes, or of a shorter row."""
    of_ctas = {"cga_layout": [list(pair)]} if pair else {}
    return gl.NVMMASharedLayout.get_default_for([rows, cols], gl.bfloat16, **of_ctas)


def wgmma_takes(*matrices: Tensor) -> bool:
    """Whether each is a 16-bit matrix that TMA can copy by its rows or by its columns."""
    return all(t.element_size() == 2 and (tma_takes(t) or tma_takes(t.t())) for t in matrices)
