"""What lessons 6d and 6e share: rows' numbers before, which tile comes when, the warp that loads, dQ and its sum.

A program's 9 warps share a tile of 128 keys of a head of K and V: two warpgroups own 64 each, one warp asks TMA for
what they need. Shared memory: K and V as [2, 1, 1, 64, D], blocks of Q and dO as [STAGES, 1, 1, ROWS, D], their rows'
numbers as [STAGES, 1, ROWS], dS as [2 * 2, 64, ROWS], by the step's parity and by who wrote it. dQ's sum in memory is
fp32, as parts of 64 x 64: whole rows of parts for a head, and one of a step's two parts for each warpgroup.
"""

from importlib import import_module

from lessonkit import Unsupported, case

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from day3_matmul_tk.lesson07b_gluon_persistent import slot
from day4_replace_op import heads
from day4_replace_op import lesson04b_flash_backward_queries as queries
from day4_replace_op.heads import load_tile
from day4_replace_op.hopper import describe, draw, matrix, num_sms, refuse_others, tell, zero

KEYS, STAGES = 64, 2  # keys of a warpgroup, blocks of Q and dO at a time


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


# A product adds to what its registers hold. They may begin with -lse (as a score) or -delta of each query, not with 0:
# then P = 2^(scale S') and dS = P dP', and 2 numbers a query need no registers while S^T and dP^T have theirs.
@gluon.jit
def ask_scores(keys, queries, numbers, LAYOUT: gl.constexpr):
    """S^T = K Q^T or dP^T = V dO^T [keys, queries], less the queries' numbers, if there are any."""
    KEYS: gl.constexpr = keys.shape[0]
    ROWS: gl.constexpr = queries.shape[0]
    start = gl.zeros((KEYS, ROWS), gl.float32, LAYOUT)
    if numbers is not None:
        start = numbers.load(LAYOUT).broadcast_to((KEYS, ROWS))
    return warpgroup_mma(keys, queries.permute((1, 0)), start, use_acc=numbers is not None, is_async=True)


# A zero that the compiler cannot know. Without it the places of K and V in shared memory, 16 registers of wgmma's
# descriptors, are computed before the loop and kept.
@gluon.jit
def hidden_zero(x):
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], gl.int32, False, 1)


# What both warpgroups' dQ needs of this one. Two buffers by turns: who has come to a step's meeting has multiplied the
# dS of the step before, so nobody reads what is overwritten after it. (If dQ is a step late, three.)
@gluon.jit
def share(ds, ds_smem, at, met, WHICH: gl.constexpr):
    ds_smem.index(at + WHICH).store(ds)
    fence_async_shared()
    mbarrier.arrive(met)


# Both warpgroups' dS, times all 128 keys, for a half of the step's dQ: 64 queries x 64 columns of D if D is 128, else
# 64 of 128 queries. wgmma reads dS [keys, queries] as its transpose.
@gluon.jit
def ask_dq(ds_smem, at, k_smem, zero, WHICH: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    dq = gl.zeros((64, 64), gl.float32, LAYOUT)
    for half in gl.static_range(2):
        ds, k = ds_smem.index(at + half), matrix(k_smem.index(half + zero))
        if k.shape[1] == 128:
            k = k.slice(WHICH * 64, 64, dim=1)
        else:
            ds = ds.slice(WHICH * 64, 64, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=half > 0, is_async=True)
    return dq


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


# What all partitions agree on. Causal: the first keys, which most queries see, first; lesson 4's order of heads.
@gluon.jit
def place(nth, sizes, CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """Of the nth tile: batch, head, the first of its 2 KEYS keys; of its queries' blocks the first that sees one of
    these, the first of those that need no mask, and the end."""
    tiles, heads, all_heads, at_once, S_q, S_k = sizes
    blocks = (S_q + ROWS - 1) // ROWS
    if CAUSAL:
        first = nth // (at_once * tiles) * at_once
        width, within = min(at_once, all_heads - first), nth % (at_once * tiles)
        each, key = first + within % width, within // width * 2 * KEYS
        begin = min(blocks, max(0, key + S_q - S_k) // ROWS)
        whole = min(blocks, (max(0, key + 2 * KEYS - 1 + S_q - S_k) + ROWS - 1) // ROWS)
    else:
        each, key, begin = nth // tiles, nth % tiles * 2 * KEYS, 0
        whole = blocks if key + 2 * KEYS > S_k else 0
    return each // heads, each % heads, key, begin, whole, blocks


# The owner walks over the queries of all heads of a group, so these share a ring. This warp stores, too: what it knows
# of addresses would cost the others registers that they do not have. A tile's K and V come into the place from which
# the one before it is stored, but its first block of queries need not wait for that.
@gluon.jit
def load_partition(descs, smem, bars, queue, sizes, GROUP: gl.constexpr, CAUSAL: gl.constexpr, QUEUE: gl.constexpr):
    q_desc, do_desc, start_desc, delta_desc, k_desc, v_desc, _, _ = descs
    q_smem, do_smem, start_smem, delta_smem, k_smem, v_smem, _ = smem
    q_full, do_full, empty, k_full, v_full, _, _, stored, _ = bars
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    gdc_wait()
    gdc_launch_dependents()
    turn, count, nth = 0, 0, gl.program_id(0)
    before = 0, 0, 0
    while nth < sizes[0] * sizes[2]:
        if QUEUE:
            tell(nth, count, queue)
        batch, head_kv, key, begin, _whole, blocks = place(nth, sizes, CAUSAL, ROWS, KEYS)
        first = turn
        for head in range(head_kv * GROUP, head_kv * GROUP + GROUP):
            row = batch * sizes[1] * GROUP + head
            for block in range(begin, blocks):
                stage, parity = slot(turn, q_full.shape[0])
                mbarrier.wait(empty.index(stage), parity ^ 1)
                load_block(q_desc, q_smem, start_desc, start_smem, q_full, stage, batch, head, row, block * ROWS)
                load_block(do_desc, do_smem, delta_desc, delta_smem, do_full, stage, batch, head, row, block * ROWS)
                if turn == first:
                    if count > 0:
                        store_tile(descs, smem, stored, count - 1, before)
                    load_halves(k_desc, k_smem, k_full.index(0), batch, head_kv, key)
                    load_halves(v_desc, v_smem, v_full.index(0), batch, head_kv, key)
                turn += 1
        before = batch, head_kv, key
        count += 1
        nth = draw(nth, queue, sizes, QUEUE)
    if QUEUE:
        tell(nth, count, queue)
    store_tile(descs, smem, stored, count - 1, before)


@gluon.jit
def store_tile(descs, smem, stored, count, where):
    _, _, _, _, _, _, dk_desc, dv_desc = descs
    _, _, _, _, k_smem, v_smem, _ = smem
    batch, head_kv, key = where
    mbarrier.wait(stored.index(0), count & 1)
    for half in gl.static_range(2):
        coord = [batch, head_kv, key + half * k_smem.shape[3], 0]
        tma.async_copy_shared_to_global(dk_desc, coord, k_smem.index(half))
        tma.async_copy_shared_to_global(dv_desc, coord, v_smem.index(half))
    tma.store_wait(0)


@gluon.jit
def load_halves(desc, smem, full, batch, head, row):
    mbarrier.expect(full, 2 * desc.block_type.nbytes)
    for half in gl.static_range(2):
        coord = [batch, head, row + half * desc.block_type.shape[2], 0]
        tma.async_copy_global_to_shared(desc, coord, full, smem.index(half))


@gluon.jit
def load_block(desc, smem, numbers_desc, numbers_smem, full, stage, batch, head, row, first):
    mbarrier.expect(full.index(stage), desc.block_type.nbytes + numbers_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [batch, head, first, 0], full.index(stage), smem.index(stage))
    tma.async_copy_global_to_shared(numbers_desc, [row, first], full.index(stage), numbers_smem.index(stage))


def launch(kernel, grad_out, q, k, v, out, lse, causal, window, scale, *, QUEUE=False, LATE=False, **options):
    """Check the arguments, prepare, walk, finish."""
    scale = queries.expect_gradient(grad_out, q, k, v, out, lse, causal, window, scale)
    (B, H, S_q, D), (_, H_kv, S_k, _) = q.shape, k.shape
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    refuse_others(window, 128, q, k, v, grad_out, dk, dv)
    width = 64 if D <= 64 else 128
    block = 8192 // width  # queries of a step: 64 x 64 numbers of dQ for each warpgroup
    rows, tiles, group = triton.cdiv(S_q, block) * block, triton.cdiv(S_k, 2 * KEYS), H // H_kv
    starts, deltas, total = (torch.empty(B * H, rows * n, device=q.device) for n in (1, 1, width))
    unit = heads.LN2.value if LATE else scale  # added to scaled scores, as powers of 2; or to scores
    prepare_kernel[(B * H * rows // 32,)](
        out, grad_out, lse, starts, deltas, total, out.stride(), grad_out.stride(), unit, H, S_q, rows, D, 32, width
    )
    # Q, dO and twice as much of dQ are what a head's programs share. But a group of heads ends with its short tiles and
    # the next begins with long ones: of less than 8 heads these are too few for 132 SMs, and last longest in the end.
    at_once = min(B * H_kv, max(8, heads.at_once(8 * group * S_q * width)))
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    programs = min(tiles * B * H_kv, num_sms()) if QUEUE else tiles * B * H_kv
    kernel[(programs,)](
        describe(q, block, width), describe(grad_out, block, width),
        *(TensorDescriptor(t, list(t.shape), list(t.stride()), [1, block], plain) for t in (starts, deltas)),
        *(describe(t, KEYS, width) for t in (k, v, dk, dv)),
        TensorDescriptor.from_tensor(total.view(-1, 64), [64, 64], plain), total, zero(q) if QUEUE else total,
        scale * heads.LOG2E.value, tiles, H_kv, B * H_kv, at_once, S_q, S_k, group, causal, STAGES, QUEUE, LATE,
        num_warps=4, launch_pdl=True, **options,
    )  # fmt: skip
    finish_kernel[(B * H * rows * width // 4096,)](
        dq, total, dq.stride(), scale, H, S_q, rows, D, width, launch_pdl=True
    )
    return dq, dk, dv


def _fa4(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """FlashAttention in CuTe's Python, as of 2026; the package is flash-attn-4."""
    if window:
        raise Unsupported("timed without a window")
    q, k, v, out, grad_out = (t.transpose(1, 2) for t in (q, k, v, out, grad_out))
    backward = import_module("flash_attn.cute.interface")._flash_attn_bwd
    gradients = backward(q, k, v, out, grad_out, lse, softmax_scale=scale, causal=causal)
    return tuple(t.transpose(1, 2) for t in gradients[:3])


PEERS = {**heads.BACKWARD_PEERS, "FA4": _fa4}
CHECKS = (
    *(c for c in queries.CHECKS if not c.shape.get("window")),
    case("grouped heads, odd lengths, several heads' steps in one ring", B=1, H=6, S=77, D=64, S_k=150, H_kv=2),
    case("keys of two tiles, queries of one block", B=1, H=2, S=20, D=32, S_k=160, H_kv=1, causal=True),
    case("three programs and more for each SM", gib=0.6, B=4, H=34, S=400, D=64, S_k=300),
    case("so causal", gib=0.6, B=4, H=34, S=400, D=128, S_k=500, causal=True),
    case("so in groups, the keys fewer", gib=0.6, B=2, H=64, S=500, D=128, S_k=400, H_kv=16, causal=True),
)
