"""The gradients of a norm of long 16-bit rows on Hopper, as _norm_backward has them. TMA copies rows to shared memory.

A row stays in shared memory until dx is computed: it is read there twice, once for c1 and c2, and once for dx. So a
thread's registers hold little but dw and db of its columns, and an SM takes rows of 12672 columns whole.

PARTS = 1: a program owns whole rows. PARTS > 1: so many programs share a row. Each of them works one row ahead, as in
norm_backward_group_kernel: it publishes its share of c1 and c2 of the next row before it needs those of this row.

A stage of the ring is a row of dy and x: FULL blocks of BLOCK columns, and one of LAST columns.
"""

import math
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from course_ops._common import cdiv, num_sms, runs_gluon, shared_memory, starts_early, tma_takes
from course_ops._launch import describing
from course_ops.hopper import allocate_barriers, allocate_stages, ring_slot
from course_ops.kernels._matmul_hopper import block_barrier
from course_ops.kernels._norm_backward import Load, Plan, partial_sums, sum_partials
from course_ops.kernels._rows import POLL, waits
from course_ops.versions import async_load, reinterpret


@gluon.jit
def start_row(descs, ring, row, begin, stage):
    """TMA begins to copy a row of dy and x. Past the row's end it fills in zeros."""
    dy_desc, dy_last_desc, x_desc, x_last_desc = descs
    dy_smem, dy_last_smem, x_smem, x_last_smem, full, _empty, w_smem, _w_last_smem = ring
    WIDTH: gl.constexpr = dy_desc.block_type.shape[2]
    HEIGHT: gl.constexpr = dy_desc.block_type.shape[1]
    FULL: gl.constexpr = w_smem.shape[0]
    BYTES: gl.constexpr = 2 * (FULL * dy_desc.block_type.nbytes + dy_last_desc.block_type.nbytes)
    bar = full.index(stage)
    mbarrier.expect(bar, BYTES)
    for chunk in gl.static_range(FULL):
        at = begin // WIDTH + chunk * HEIGHT
        async_load(dy_desc, [row, at, 0], bar, dy_smem.index(stage * FULL + chunk))
        async_load(x_desc, [row, at, 0], bar, x_smem.index(stage * FULL + chunk))
    at = begin + FULL * HEIGHT * WIDTH
    async_load(dy_last_desc, [row, at], bar, dy_last_smem.index(stage))
    async_load(x_last_desc, [row, at], bar, x_last_smem.index(stage))


@gluon.jit
def in_threads(x, THREADS: gl.constexpr):
    """[1, columns] -> [THREADS]: the sum of what each thread holds."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [THREADS // 32], [0])
    each = gl.sum(x.reshape((THREADS, x.shape[1] // THREADS)), axis=1)
    return gl.convert_layout(each, LANES, assert_trivial=True)


@gluon.jit
def add_products(dy_smem, x_smem, w_smem, mean, lanes_gx, lanes_g, CENTRED: gl.constexpr, WARPS: gl.constexpr):
    """Of a block's columns: g (x - mean), and g if CENTRED, added to the sums of each thread."""
    SIZE: gl.constexpr = dy_smem.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, SIZE // (32 * WARPS)], [1, 32], [1, WARPS], [1, 0])
    g = dy_smem.load(LAYOUT).to(gl.float32) * w_smem.load(LAYOUT).to(gl.float32)
    x = x_smem.load(LAYOUT).to(gl.float32)
    if CENTRED:
        lanes_gx += in_threads(g * (x - mean), 32 * WARPS)
        lanes_g += in_threads(g, 32 * WARPS)
    else:
        lanes_gx += in_threads(g * x, 32 * WARPS)
    return lanes_gx, lanes_g


@gluon.jit
def sums_of_row(ring, stage, mean, CENTRED: gl.constexpr, WARPS: gl.constexpr):
    """The program's sums of g (x - mean), and of g if CENTRED, otherwise 0."""
    dy_smem, dy_last_smem, x_smem, x_last_smem, _full, _empty, w_smem, w_last_smem = ring
    FULL: gl.constexpr = w_smem.shape[0]
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    gx = gl.zeros((32 * WARPS,), gl.float32, LANES)
    g = gl.zeros((32 * WARPS,), gl.float32, LANES)
    for chunk in gl.static_range(FULL):
        slot = stage * FULL + chunk
        gx, g = add_products(dy_smem.index(slot), x_smem.index(slot), w_smem.index(chunk), mean, gx, g, CENTRED, WARPS)
    gx, g = add_products(
        dy_last_smem.index(stage), x_last_smem.index(stage), w_last_smem.index(0), mean, gx, g, CENTRED, WARPS
    )
    return gl.sum(gl.join(gx, g), axis=0).split()  # in one reduction, so that the warps meet once


@gluon.jit
def gradients(dy_smem, x_smem, w_smem, dx_ptr, begin, N, mean, rstd, a, b, dw, db, WARPS: gl.constexpr):
    """dx of a block's columns is stored: dy w rstd + (x - mean) a + b. dw and db, of the rows before, are returned."""
    SIZE: gl.constexpr = dy_smem.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, SIZE // (32 * WARPS)], [1, 32], [1, WARPS], [1, 0])
    dy = dy_smem.load(LAYOUT).to(gl.float32)
    centred = x_smem.load(LAYOUT).to(gl.float32) - mean
    scaled = dy * rstd
    dx = scaled * w_smem.load(LAYOUT).to(gl.float32) + (centred * a + b)
    cols = begin + gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)
    return dw + scaled * centred, db + dy


@gluon.jit
def settled(words, ptrs):
    """Words of 64 bits, loaded again from their ptrs until none of them is -1."""
    return gl.inline_asm_elementwise(
        POLL,
        "=l,l,l",
        [words, ptrs],
        gl.int64,
        False,
        1,
    )


@gluon.jit
def pack_pair(high, low):
    """Two fp32 values in one 64-bit word, which is written and read whole."""
    return (high.to(gl.int32, bitcast=True).to(gl.int64) << 32) | (
        low.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    )


@gluon.jit
def put_weights(w_ptr, smem, begin, N, WARPS: gl.constexpr):
    SIZE: gl.constexpr = smem.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, SIZE // (32 * WARPS)], [1, 32], [1, WARPS], [1, 0])
    cols = begin + gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))[None, :]
    smem.store(gl.load(w_ptr + cols, mask=cols < N, other=0.0))
    return gl.zeros((1, SIZE), gl.float32, LAYOUT)


@gluon.jit
def put_partials(partial_ptr, begin, N, x, WARPS: gl.constexpr):
    SIZE: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, SIZE // (32 * WARPS)], [1, 32], [1, WARPS], [1, 0])
    cols = begin + gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(partial_ptr + cols, x, mask=cols < N)


@gluon.jit
def producer(descs, ring, sizes, PARTS: gl.constexpr):
    """Of the program's rows, one after the other, as stages become empty. At first all are: parity ^ 1 is over."""
    M, _N, groups, begin = sizes
    full, empty = ring[4], ring[5]
    count = 0
    for row in range(gl.program_id(0) // PARTS, M, groups):
        stage, parity = ring_slot(count, full.shape[0])
        mbarrier.wait(empty.index(stage), parity ^ 1)
        start_row(descs, ring, row, begin, stage)
        count += 1  # noqa: SIM113  device code has no enumerate


@gluon.jit
def consumer(
    ring, tensors, sums_ptr, sizes, PARTS: gl.constexpr, WAIT: gl.constexpr, CENTRED: gl.constexpr,
    BIAS: gl.constexpr, EARLY_SUM: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    w_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_dw_ptr, partial_db_ptr = tensors
    dy_smem, dy_last_smem, x_smem, x_last_smem, full, empty, w_smem, w_last_smem = ring
    M, N, groups, begin = sizes
    STAGES: gl.constexpr = full.shape[0]
    FULL: gl.constexpr = w_smem.shape[0]
    BLOCK: gl.constexpr = w_smem.shape[2]
    AHEAD: gl.constexpr = 1 if PARTS > 1 else 0  # rows whose sums are made before this row's are used
    part = gl.program_id(0) % PARTS
    group = gl.program_id(0) // PARTS
    dw = ()
    for chunk in gl.static_range(FULL):
        dw = dw + (put_weights(w_ptr, w_smem.index(chunk), begin + chunk * BLOCK, N, WARPS),)  # noqa: RUF005
    dw = dw + (put_weights(w_ptr, w_last_smem.index(0), begin + FULL * BLOCK, N, WARPS),)  # noqa: RUF005
    db = dw
    next_rstd = gl.load(rstd_ptr + group)
    next_mean = gl.load(mean_ptr + group) if CENTRED else 0.0
    if AHEAD:
        mbarrier.wait(full.index(0), 0)
        first_c1, first_c2 = sums_of_row(ring, 0, next_mean, CENTRED, WARPS)
        gl.atomic_xchg(sums_ptr + group * PARTS + part, pack_pair(first_c1, first_c2), sem="relaxed")
    SLOTS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    slots = gl.arange(0, 32, SLOTS)
    count = 0
    for row in range(group, M, groups):
        rstd = next_rstd
        mean = next_mean
        after = gl.minimum(row + groups, M - 1)  # the last row again, where none follows: nothing uses it
        next_rstd = gl.load(rstd_ptr + after)
        next_mean = gl.load(mean_ptr + after) if CENTRED else 0.0
        stage, _parity = ring_slot(count, STAGES)
        ahead_stage, ahead_parity = ring_slot(count + AHEAD, STAGES)
        there = row + AHEAD * groups < M
        if PARTS > 1:
            at = sums_ptr + row * PARTS + gl.minimum(slots, PARTS - 1)
            words = gl.load(at, volatile=True)
        mbarrier.wait(full.index(ahead_stage), ahead_parity, there)
        c1, c2 = sums_of_row(ring, ahead_stage, next_mean if AHEAD else mean, CENTRED, WARPS)
        if PARTS > 1:
            gl.atomic_xchg(sums_ptr + after * PARTS + part, pack_pair(c1, c2), mask=there, sem="relaxed")
            if WAIT:
                words = settled(words, at)
            c1 = gl.sum(gl.where(slots < PARTS, (words >> 32).to(gl.int32).to(gl.float32, bitcast=True), 0.0), axis=0)
            c2 = gl.sum(gl.where(slots < PARTS, words.to(gl.int32).to(gl.float32, bitcast=True), 0.0), axis=0)
        a = -(c1 / N) * rstd * rstd * rstd
        b = -(c2 / N) * rstd
        before_dw = dw
        before_db = db
        dw = ()
        db = ()
        dx = dx_ptr + gl.cast(row, gl.int64) * N
        for chunk in gl.static_range(FULL):
            slot = stage * FULL + chunk
            new_dw, new_db = gradients(
                dy_smem.index(slot), x_smem.index(slot), w_smem.index(chunk), dx, begin + chunk * BLOCK, N,
                mean, rstd, a, b, before_dw[chunk], before_db[chunk], WARPS,
            )  # fmt: skip
            dw = dw + (new_dw,)  # noqa: RUF005
            db = db + (new_db,)  # noqa: RUF005
        new_dw, new_db = gradients(
            dy_last_smem.index(stage), x_last_smem.index(stage), w_last_smem.index(0), dx, begin + FULL * BLOCK, N,
            mean, rstd, a, b, before_dw[FULL], before_db[FULL], WARPS,
        )  # fmt: skip
        dw = dw + (new_dw,)  # noqa: RUF005
        db = db + (new_db,)  # noqa: RUF005
        block_barrier()  # all warps have read the stage
        mbarrier.arrive(empty.index(stage))
        count += 1  # noqa: SIM113  device code has no enumerate
    if EARLY_SUM:
        gdc_launch_dependents()
    start = gl.cast(group, gl.int64) * N
    for chunk in gl.static_range(FULL + 1):
        put_partials(partial_dw_ptr + start, begin + chunk * BLOCK, N, dw[chunk], WARPS)
        if BIAS:
            put_partials(partial_db_ptr + start, begin + chunk * BLOCK, N, db[chunk], WARPS)


@gluon.jit(do_not_specialize=["M", "groups"])
def norm_backward_hopper_kernel(
    # dy and x, [M, N], each as [M, N / WIDTH, WIDTH] in blocks of BLOCK columns, and in blocks of LAST columns
    dy_desc, dy_last_desc, x_desc, x_last_desc,
    w_ptr, mean_ptr, rstd_ptr, dx_ptr,  # [N], [M] twice, [M, N]; without CENTRED nothing reads mean_ptr
    partial_dw_ptr, partial_db_ptr,  # [groups, N] each, fp32; without BIAS nothing writes partial_db_ptr
    sums_ptr,  # [M, PARTS], -1 at first; then a part's share of c1 in the high half and of c2 in the low
    M, N, groups, PARTS: gl.constexpr, FULL: gl.constexpr, STAGES: gl.constexpr, WAIT: gl.constexpr,
    CENTRED: gl.constexpr, BIAS: gl.constexpr, EARLY_SUM: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    N = N // 8 * 8  # which it is: so the compiler stores 16 bytes at once
    BLOCK: gl.constexpr = dy_desc.block_type.shape[1] * dy_desc.block_type.shape[2]
    LAST: gl.constexpr = dy_last_desc.block_type.shape[1]
    W_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    dy_smem = allocate_stages(dy_desc, STAGES * FULL)
    x_smem = allocate_stages(x_desc, STAGES * FULL)
    ring = (
        dy_smem, allocate_stages(dy_last_desc, STAGES), x_smem, allocate_stages(x_last_desc, STAGES),
        allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 1),
        gl.allocate_shared_memory(w_ptr.dtype.element_ty, [FULL, 1, BLOCK], W_LAYOUT),
        gl.allocate_shared_memory(w_ptr.dtype.element_ty, [1, 1, LAST], W_LAYOUT),
    )  # fmt: skip
    # As the consumer reads them: a block is one row.
    ROWS: gl.constexpr = [STAGES * FULL, 1, BLOCK]
    as_rows = (
        reinterpret(dy_smem, dy_desc.dtype, ROWS, dy_last_desc.layout), ring[1],
        reinterpret(x_smem, x_desc.dtype, ROWS, x_last_desc.layout), ring[3], ring[4], ring[5], ring[6], ring[7],
    )  # fmt: skip
    descs = (dy_desc, dy_last_desc, x_desc, x_last_desc)
    tensors = (w_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_dw_ptr, partial_db_ptr)
    sizes = (M, N, groups, gl.program_id(0) % PARTS * (FULL * BLOCK + LAST))
    gl.warp_specialize(
        [
            (consumer, (as_rows, tensors, sums_ptr, sizes, PARTS, WAIT, CENTRED, BIAS, EARLY_SUM, WARPS)),
            (producer, (descs, ring, sizes, PARTS)),
        ],
        [1],
        [32],
    )


def programs_of(N: int, bias: bool) -> tuple[int, int] | None:
    """Programs that share a row, and their warps; None for lengths at which the kernels of _norm_backward are faster.

    16 warps hide more latency than 8, but leave 112 registers a thread: too few for the longest parts.
    """
    if bias:
        return (1, 16) if 10240 < N <= 13312 else (2, 8) if 16384 < N < 20480 else None
    return (1, 16) if 13312 < N <= 16384 else (cdiv(N, 11264), 8) if 16384 < N <= 3 * 11264 else None


def stages_of(plan: Plan, w_bytes: int, shared: int) -> int:
    """Rows in the ring, beside w: one is in use, or two where parts work ahead; the others are on their way."""
    return min(6, (shared - 4096 - plan.columns * w_bytes) // (4 * plan.columns))


def norm_backward_hopper(dy, x, w, mean, rstd, bias=False):
    """As norm_backward_walk, of rows that norm_backward_hopper_takes -> dx, dw, db."""
    (M, N), centred, sms = x.shape, mean is not None, num_sms(x.device)
    parts, warps = programs_of(N, bias)
    plan = Load(8, 8).plan(cdiv(N, parts), warps, 1)
    groups = max(1, min(M, sms // parts))
    dx, dw = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(w)
    db = torch.empty_like(w) if bias else None
    sums = torch.full((M, parts), -1, dtype=torch.int64, device=x.device) if parts > 1 else rstd  # which nothing reads
    partial_dw, partial_db = partial_sums(groups, x, bias)
    for wait in waits() if parts > 1 else (True,):
        norm_backward_hopper_kernel[(groups * parts,)](
            *_blocks(dy, plan), *_blocks(x, plan), w, mean if centred else rstd, rstd, dx, partial_dw,
            partial_db if bias else partial_dw, sums, M, N, groups, parts, plan.chunks - 1,
            stages_of(plan, w.element_size(), shared_memory(x.device)), wait, centred, bias,
            starts_early(x.device), warps, num_warps=warps, launch_cooperative_grid=parts > 1,
        )  # fmt: skip
    sum_partials(partial_dw, partial_db, dw, db)
    return dx, dw, db


def _blocks(t: Tensor, plan: Plan) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of a matrix for full chunks and for the last one. One TMA instruction copies 256 elements of a dimension or less.

    So a long row is seen as a matrix, and a full chunk takes one instruction.
    """
    (M, N), (stride, _) = t.shape, t.stride()
    width = math.gcd(N, 256)
    full, last = [1, plan.block // width, width], [1, plan.last]
    return (
        describing(TensorDescriptor, (M, N // width, width), (stride, width, 1), full, layout=_row_by_row(3))(t),
        describing(TensorDescriptor, (M, N), (stride, 1), last, layout=_row_by_row(2))(t),
    )


@cache
def _row_by_row(rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=rank)


def norm_backward_hopper_takes(dy: Tensor, x: Tensor, bias: bool) -> bool:
    """Whether this GPU, and these rows, suit norm_backward_hopper: TMA, 16 bits, and four rows of a program or more."""
    M, N = x.shape
    if not (runs_gluon(x) and x.element_size() == 2 and dy.dtype == x.dtype and N % 64 == 0 and tma_takes(dy, x)):
        return False
    programs = programs_of(N, bias)
    return programs is not None and 4 * (num_sms(x.device) // programs[0]) <= M
