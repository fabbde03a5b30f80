"""What lessons 6d and 6e do around their walk: rows' numbers and a sum of zeros before, dQ added up, dQ written.

dQ's sum in memory is fp32, as parts of 64 x 64: whole rows of parts for a head, and one of a step's two parts for each
warpgroup.
"""

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from day4_replace_op.heads import load_tile


# A row's two numbers, negative because they are added: lse, in units of what it is added to, and delta. A row that
# sees nothing, or is past the last one, begins so low that its P are 0. This kernel and the last one go from the last
# head to the first: what was written last is what L2 still has. The next kernel's programs may come as soon as there is
# room (programmatic dependent launch), and wait for this one's results themselves.
@triton.jit
def prepare_kernel(
    out, do, lse_ptr, starts_ptr, deltas_ptr, sum_ptr,  # [B, H, S_q, D] twice, [B, H, S_q]; [B H, rows] twice, dQ's sum
    out_strides, do_strides, unit, H, S_q, rows, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    tiles, nth = rows // BLOCK_M, tl.num_programs(0) - 1 - tl.program_id(0)
    head, row = (nth // tiles).to(tl.int64), nth % tiles * BLOCK_M
    o_tile = load_tile(out, out_strides, head // H, head % H, row, S_q, D, BLOCK_M, BLOCK_D, False)
    do_tile = load_tile(do, do_strides, head // H, head % H, row, S_q, D, BLOCK_M, BLOCK_D, False)
    at = row + tl.arange(0, BLOCK_M)
    lse = tl.load(lse_ptr + head * S_q + at, mask=at < S_q, other=float("-inf"))
    tl.store(starts_ptr + head * rows + at, tl.where(lse == float("-inf"), -1e30, -lse / unit))
    tl.store(deltas_ptr + head * rows + at, -tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), axis=1))
    tl.store(
        sum_ptr + (head * rows + row) * BLOCK_D + tl.arange(0, BLOCK_M * BLOCK_D),
        tl.zeros([BLOCK_M * BLOCK_D], tl.float32),
    )


# A part of the sum lies as a warpgroup's registers have it, so that adding is contiguous: first which warp has a
# number (4), then which of 8 column blocks (8), which thread (8 x 4), then the 4 that a thread has there: 2 rows that
# are 8 apart, 2 columns.
@triton.jit
def finish_kernel(
    dq, sum_ptr, dq_strides, scale, H, S_q, rows, D, BLOCK_D: tl.constexpr
):  # fmt: skip
    gdc_wait()
    parts, nth = rows // 64 * (BLOCK_D // 64), tl.num_programs(0) - 1 - tl.program_id(0)
    head, part = (nth // parts).to(tl.int64), nth % parts
    x = tl.load(sum_ptr + (head * parts + part) * 4096 + tl.arange(0, 4096)).reshape(4, 8, 8, 4, 2, 2)
    x = x.permute(0, 4, 2, 1, 3, 5).reshape(64, 64) * scale
    at = part // (BLOCK_D // 64) * 64 + tl.arange(0, 64)[:, None]
    cols = part % (BLOCK_D // 64) * 64 + tl.arange(0, 64)[None, :]
    ptrs = dq + head // H * dq_strides[0] + head % H * dq_strides[1] + at.to(tl.int64) * dq_strides[2]
    tl.store(ptrs + cols.to(tl.int64) * dq_strides[3], x.to(dq.dtype.element_ty), mask=(at < S_q) & (cols < D))


# By the threads, 4 numbers at a time (red.global.add.v4), or by TMA from shared memory (lesson 6e).
@gluon.jit
def add_dq(dq, part, total, WHICH: gl.constexpr):
    sum_desc, sum_ptr, sum_smem = total
    x = dq.reshape((4, 2, 8, 8, 4, 2)).permute((0, 3, 2, 4, 1, 5))
    if sum_smem is None:
        x = x.reshape((4096,))
        numbers = part.to(gl.int64) * 4096 + gl.arange(0, 4096, layout=x.type.layout)
        gl.atomic_add(sum_ptr + numbers, x, sem="relaxed")
    else:
        tma.store_wait(0)  # it has read what it added a step ago
        sum_smem.index(WHICH).store(x.reshape((64, 64)))
        fence_async_shared()
        tma_add(sum_desc, [part * 64, 0], sum_smem.index(WHICH))


# Gluon's compiler has the operation, its language no name for it yet.
@builtin
def tma_add(desc, coord, smem, _semantic=None):
    """Add a block of shared memory to memory, as tma.async_copy_shared_to_global stores it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, smem.handle)
