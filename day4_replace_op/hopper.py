"""What lessons 6, 6b, 6c, 6f, 6g share: which tile comes when, the warp that loads, products, the way to memory.

A program's warpgroups, two, in 6c and 6f also three, have 64 queries each of a tile; one warp asks TMA for what they
need. Shared memory: Q and O as [WGS, 1, 1, 64, D], K and V as [STAGES, 1, 1, KEYS, D], as 4-dimensional descriptors
have it.
"""

from functools import cache

from lessonkit import Unsupported, case, device, num_sms, tma_takes

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from course_ops.hopper import ring_slot as slot
from day4_replace_op import heads
from day4_replace_op.heads import LN2
from problems.attention import CHECKS as ALL_CHECKS
from problems.attention import expect_heads

ROWS, KEYS = 64, 128  # queries of a warpgroup, keys of a block


# What all partitions agree on. Causal: the longest tiles first, of as many heads as fit into L2 (lesson 4, rung 4).
@gluon.jit
def place(nth, sizes, CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """Of the nth tile: batch, head, the first of its ROWS queries, and how many blocks of keys they see."""
    tiles, heads, all_heads, at_once, S_q, S_k = sizes
    if CAUSAL:
        first = nth // (at_once * tiles) * at_once
        width, within = min(at_once, all_heads - first), nth % (at_once * tiles)
        each, tile = first + within % width, tiles - 1 - within // width
        end = min(S_k, max(0, (tile + 1) * ROWS + S_k - S_q))
    else:
        each, tile, end = nth // tiles, nth % tiles, S_k
    return each // heads, each % heads, tile * ROWS, (end + KEYS - 1) // KEYS


# A program's tiles: every num_programs-th; or, from a queue (lesson 6c), whichever comes next when it is free. Then the
# warp that loads draws numbers from a counter that all programs share, and tells the others. Nobody has to say that he
# has heard: two numbers are kept, and before a third one comes all have given back the Q of the first.
@gluon.jit
def tell(nth, count, queue):
    numbers, told, _ = queue
    numbers.index(count % 2).store(gl.full((1,), nth, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(told.index(count % 2))


# As late as can be. There are as many draws as tiles, and the last one leaves the counter as it was.
@gluon.jit
def draw(nth, queue, sizes, QUEUE: gl.constexpr):
    drawn = nth
    if QUEUE:
        drawn = gl.atomic_add(queue[2], 1)
        gl.store(queue[2], 0, mask=drawn == sizes[0] * sizes[2] - 1)
    return drawn + gl.num_programs(0)


@gluon.jit
def hear(count, queue, QUEUE: gl.constexpr):
    """The number of the program's tile number `count`; past the last tile's there is nothing left to do."""
    nth = gl.program_id(0) + count * gl.num_programs(0)
    if QUEUE:
        numbers, told, _ = queue
        stage, parity = slot(count, 2)
        mbarrier.wait(told.index(stage), parity)
        nth = gl.max(numbers.index(stage).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)
    return nth


# Blocks come last first: those that need a mask, the tail and the diagonal, are then the first of a loop.
@gluon.jit
def load_partition(descs, smem, bars, queue, sizes, GROUP: gl.constexpr, CAUSAL: gl.constexpr, QUEUE: gl.constexpr):
    q_desc, k_desc, v_desc, _ = descs
    q_smem, k_smem, v_smem, _ = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = bars
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    WGS: gl.constexpr = q_full.shape[0]
    STAGES: gl.constexpr = k_full.shape[0]
    turn, count, nth = 0, 0, gl.program_id(0)
    while nth < sizes[0] * sizes[2]:
        if QUEUE:
            tell(nth, count, queue)
        batch, head, row, steps = place(nth, sizes, CAUSAL, WGS * ROWS, KEYS)
        for which in gl.static_range(WGS):
            mbarrier.wait(q_empty.index(which), count & 1 ^ 1)
            load(q_desc, q_smem, q_full, which, batch, head, row + which * ROWS)
        for step in range(steps + 1):  # K of a block, then V of the one before: the order in which they are needed
            if step < steps:
                stage, parity = slot(turn + step, STAGES)
                mbarrier.wait(k_empty.index(stage), parity ^ 1)
                load(k_desc, k_smem, k_full, stage, batch, head // GROUP, (steps - 1 - step) * KEYS)
            if step > 0:
                stage, parity = slot(turn + step - 1, STAGES)
                mbarrier.wait(v_empty.index(stage), parity ^ 1)
                load(v_desc, v_smem, v_full, stage, batch, head // GROUP, (steps - step) * KEYS)
        turn += steps
        count += 1
        nth = draw(nth, queue, sizes, QUEUE)
    if QUEUE:
        tell(nth, count, queue)


@gluon.jit
def load(desc, smem, full, index, batch, head, row):  # rows past the last one of a head come as zeros
    mbarrier.expect(full.index(index), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [batch, head, row, 0], full.index(index), smem.index(index))


@gluon.jit
def matrix(smem):  # [1, 1, rows, D], as TMA knows it -> [rows, D]
    return smem.reshape((smem.shape[2], smem.shape[3]))


@gluon.jit
def ask_scores(q, k_smem, k_full, turn, LAYOUT: gl.constexpr):
    """S = Q K^T [rows, keys] of a block's first keys, all or as many as the layout has; it runs until it is awaited."""
    stage, parity = slot(turn, k_full.shape[0])
    mbarrier.wait(k_full.index(stage), parity)
    ROWS: gl.constexpr = q.shape[0]
    KEYS: gl.constexpr = LAYOUT.instr_shape[1]
    nothing = gl.zeros((ROWS, KEYS), gl.float32, LAYOUT)
    k = first_rows(matrix(k_smem.index(stage)), KEYS)
    return warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def ask_values(p, o, v_smem, v_full, turn):
    """O += P V of a block, or of as many of its first keys as P has. P comes from registers, O stays there."""
    stage, parity = slot(turn, v_full.shape[0])
    mbarrier.wait(v_full.index(stage), parity)
    return warpgroup_mma(p, first_rows(matrix(v_smem.index(stage)), p.shape[1]), o, is_async=True)


@gluon.jit
def first_rows(tile, ROWS: gl.constexpr):
    return tile.slice(0, ROWS, dim=0) if tile.shape[0] > ROWS else tile


# Turns, which lesson 6b takes: a barrier for each warpgroup; its phase ends when the other has asked for its products.
@gluon.jit
def await_turn(order, WHICH: gl.constexpr, turn, TURNS: gl.constexpr):
    if TURNS:
        mbarrier.wait(order.index(WHICH), turn & 1)


@gluon.jit
def pass_turn(order, WHICH: gl.constexpr, TURNS: gl.constexpr):
    if TURNS:
        mbarrier.arrive(order.index(1 - WHICH))


@gluon.jit
def skip(bars, turn):
    """Give a block back unread; not before it has come, or this would count for the block that was there before."""
    _, _, k_full, k_empty, v_full, v_empty, _ = bars
    stage, parity = slot(turn, k_full.shape[0])
    mbarrier.wait(k_full.index(stage), parity)
    mbarrier.arrive(k_empty.index(stage))
    mbarrier.wait(v_full.index(stage), parity)
    mbarrier.arrive(v_empty.index(stage))


@gluon.jit
def exp2(x):  # without the instructions that Triton's exp2 spends on results below 2^-126
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def left(p, o, dtype: gl.constexpr):  # P as the left side of O += P V: rounded, and already in the right threads
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    return gl.convert_layout(p.to(dtype), LAYOUT)


# Lesson 6f's, as assembly, because the compiler must not merge the conversions of both ways through a block into one
# behind them: 64 numbers would lie in registers where 32 do, and three warpgroups do not have them.
@gluon.jit
def packed(p, o, dtype: gl.constexpr):
    """As left."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    if dtype == gl.bfloat16:
        p = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [p], gl.bfloat16, True, 2)
    else:
        p = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [p], gl.float16, True, 2)
    return gl.convert_layout(p, LAYOUT)


# A thread has columns 8 j + 2 (lane % 4) + {0, 1}. Of a column, keys & ~6 is a constant of the register that holds it,
# keys & 6 the thread's own, so that a comparison is one instruction, with a constant.
@gluon.jit
def hide(s, row, key, sizes, CAUSAL: gl.constexpr):
    """-inf where a query does not see a key; row, key: the block's first ones."""
    S_q, S_k = sizes[4], sizes[5]
    rows = row + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, s.type.layout))
    keys = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    last = rows * 0 + (S_k - 1 - key)
    if CAUSAL:
        last = gl.minimum(last, rows + (S_k - S_q - key))
    return gl.where((keys & ~6)[None, :] <= last[:, None] - (keys & 6)[None, :], s, float("-inf"))


@gluon.jit
def times(o, factor):  # O [rows, D] by a number a row: both have a row in the same threads, so nothing moves
    return o * gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout))[:, None]


# O by TMA, from a place of its own, as the next tile's Q has come to this one's. Who sees no key gets 0, and -inf.
@gluon.jit
def leave(o, m, total, descs, smem, lse_ptr, which: gl.constexpr, batch, head, row, sizes):
    H, S_q = sizes[1], sizes[4]
    total = gl.convert_layout(gl.sum(total, axis=1), m.type.layout)
    empty = total == 0
    rows = row + gl.arange(0, m.shape[0], layout=m.type.layout)
    lse = gl.where(empty, -float("inf"), (m + gl.log2(total)) * LN2)
    gl.store(lse_ptr + (batch * H + head).to(gl.int64) * S_q + rows, lse, mask=rows < S_q)
    out = smem[3].index(which)
    tma.store_wait(0)  # of the last tile: it has had this whole tile's time
    matrix(out).store(times(o, 1 / gl.where(empty, 1.0, total)).to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(descs[3], [batch, head, row, 0], out)


def refuse_others(window, widest, *tensors):
    """Unsupported where these kernels cannot help; widest: D of the longest row that registers hold."""
    if device.INTERPRETED or device.architecture() != 90:
        raise Unsupported("wgmma is an instruction of Hopper (sm_90a), and of no other GPU")
    if window or tensors[0].element_size() != 2 or tensors[0].shape[-1] > widest or not tma_takes(*tensors):
        raise Unsupported(f"for 16 bits, D up to {widest}, rows that TMA can copy and at least one, without a window")


def launch(kernel, q, k, v, causal, window, scale, *, STAYS=False, QUEUE=False, WGS=2, DEPTH=3, AT_ONCE=None, **more):
    """Check the arguments, describe the tensors, and start a program a tile, or one an SM that stays."""
    scale = expect_heads(q, k, v, causal, window, scale)
    (B, H, S_q, D), (_, H_kv, S_k, _) = q.shape, k.shape
    o, lse = torch.empty_like(q), torch.empty(B, H, S_q, device=q.device)
    refuse_others(window, {2: 128, 3: 64}[WGS], q, k, v, o)  # o lies close together where q has gaps
    width, stages = (64, DEPTH) if D <= 64 else (128, 2)  # what fits beside Q and O
    descs = [describe(t, rows, width) for t, rows in ((q, ROWS), (k, KEYS), (v, KEYS), (o, ROWS))]
    tiles, group = triton.cdiv(S_q, WGS * ROWS), H // H_kv
    at_once = min(B * H, group * heads.at_once(4 * S_k * D) if AT_ONCE is None else max(1, AT_ONCE))
    programs = min(tiles * B * H, num_sms()) if STAYS or QUEUE else tiles * B * H
    counter = zero(q) if QUEUE else lse
    kernel[(programs,)](
        *descs, lse, counter, scale * heads.LOG2E.value, tiles, H, B * H, at_once, S_q, S_k, group, causal, stages,
        WGS, QUEUE, num_warps=4, **more,
    )  # fmt: skip
    return o, lse


def zero(q):
    """A counter that each launch leaves at 0, so that the stream's next launch finds it there; a CUDA graph, which may
    be replayed before anything else has run, records a zero of its own."""
    if q.is_cuda and not torch.cuda.is_current_stream_capturing():
        return _kept(torch.cuda.current_stream(q.device))
    return torch.zeros(1, dtype=torch.int32, device=q.device)


@cache
def _kept(stream):
    return torch.zeros(1, dtype=torch.int32, device=stream.device)


def describe(t, rows, width):
    """What TMA must know of a [B, H, S, D] tensor to copy [rows, width] of a head; past S and D there are zeros."""
    block = [1, 1, rows, width]
    dtype = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[t.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block, layout)


CHECKS = (
    *(c for c in ALL_CHECKS if not c.shape.get("window") and c.gib < 1),
    case("the grid comes round: three tiles and more for each SM", gib=0.5, B=4, H=34, S=400, D=64, S_k=300),
    case("so causal, with keys that nobody of a tile sees", gib=0.5, B=4, H=34, S=400, D=128, S_k=300, causal=True),
    case("rows past 2^31 numbers", gib=70, B=1, H=8200, S=2100, D=128, layout="bshd", H_kv=410, causal=True),
)
BENCHES = tuple(
    {"B": 16384 // S, "H": H or 2048 // D, "S": S, "D": D, "H_kv": H_kv, "causal": causal}
    for D, S, causal, H, H_kv in (
        *((128, S, causal, None, None) for S in (512, 2048, 4096, 16384) for causal in (False, True)),
        *((64, S, causal, None, None) for S in (2048, 4096, 16384) for causal in (False, True)),
        (128, 4096, True, 32, 8),
    )
)
