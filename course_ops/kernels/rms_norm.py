"""RMSNorm of the rows of a matrix, and its gradients. Statistics and sums are fp32; w may be, too."""

import math

import torch
import triton
import triton.language as tl

from course_ops.kernels._norm_backward import norm_backward_group, norm_backward_walk, sum_partials
from course_ops.kernels._norm_backward_shifted import norm_backward_shifted
from course_ops.kernels._rows import (
    Rows,
    Split,
    add_step,
    beside_chunks,
    common_multiple_of,
    in_chunks,
    launch_shifted,
    load_bytes,
    look,
    multiple,
    opaque,
    publish,
    shifted,
    sides,
    split,
    wait,
    waits,
    whole_chunks,
    widen,
)


@triton.jit
def rms_norm_packed_kernel(
    x_ptr, w_ptr,  # [M, N] rows stride_x elements apart, [N]
    y_ptr, rstd_ptr,  # [M, N], [M] in fp32
    M, N, stride_x, stride_y, eps, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_x, stride_y = multiple(N, MULTIPLE), multiple(stride_x, MULTIPLE), multiple(stride_y, MULTIPLE)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask=mask, other=0.0)
    wide = opaque(x).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, axis=1) / N + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    w = tl.load(w_ptr + cols, mask=cols < N, eviction_policy="evict_last")
    y = opaque(x).to(tl.float32) * rstd[:, None] * w.to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * stride_y + cols[None, :], y, mask=mask)


def rms_norm_packed(x, w, eps):
    """x [M, N], w [N] -> y [M, N], rstd [M] in fp32; rows of at most 64 KB in the registers of a program."""
    y, rstd, rows = _results(x)
    if y.numel():
        row = rows.block * rows.itemsize
        # Rows of a program, and bytes of x a thread. Two 16-byte loads a thread are enough while four rows of so many
        # threads fit on an SM: up to 16 KB. Past that 8 warps hold the row, since a sum waits for the slowest warp.
        tile, thread = (8192 // row, 128) if row <= 2048 else (1, 32) if row <= 16384 else (1, row // 256)
        rms_norm_packed_kernel[(triton.cdiv(rows.M, tile),)](
            x, w, y, rstd, rows.M, rows.N, x.stride(0), y.stride(0), eps, tile, rows.block,
            common_multiple_of(rows.N, x.stride(0), y.stride(0)), num_warps=max(1, tile * row // (32 * thread)),
        )  # fmt: skip
    return y, rstd


@triton.jit
def rms_norm_chunks_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr, N, stride_x, eps, sixteen,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,  # CHUNKS of BLOCK columns, of which the last may be ragged
    MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_x = multiple(N, MULTIPLE), multiple(stride_x, MULTIPLE)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        at = x_ptr + row * stride_x + chunk * BLOCK + lanes
        mask = chunk * BLOCK + lanes < N
        chunks = chunks + (tl.load(at, mask=mask, other=0.0),)  # noqa: RUF005
    squares = tl.zeros((BLOCK,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        wide = chunks[chunk].to(tl.float32)
        squares += wide * wide
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / N + eps)
    tl.store(rstd_ptr + row, rstd)
    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK + lanes
        w = tl.load(w_ptr + cols, mask=cols < N, eviction_policy="evict_last").to(tl.float32)
        tl.store(y_ptr + row * N + cols, widen(chunks[chunk], sixteen) * rstd * w, mask=cols < N)


def rms_norm_chunks(x, w, eps):
    """As rms_norm_packed; a row is a list of chunks of one load per thread, all under way before the first use."""
    y, rstd, rows = _results(x)
    if y.numel():
        plan = in_chunks(rows.N, rows.itemsize, load_bytes(rows.itemsize, rows.N, x.stride(0)))
        rms_norm_chunks_kernel[(rows.M,)](
            x, w, y, rstd, rows.N, x.stride(0), eps, 16, plan.count, plan.block,
            common_multiple_of(rows.N, x.stride(0)), num_warps=plan.warps,
        )  # fmt: skip
    return y, rstd


@triton.jit
def rms_norm_split_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr,
    partials_ptr,  # [M, PARTS] int32 zeros; then the bits of a part's sum of squares, plus one
    M, N, stride_x, stride_y, eps,
    ROWS: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, WAIT: tl.constexpr,
    MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_x, stride_y = multiple(N, MULTIPLE), multiple(stride_x, MULTIPLE), multiple(stride_y, MULTIPLE)
    rows = (tl.program_id(0) // PARTS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(0) % PARTS
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask=mask, other=0.0)
    wide = opaque(x).to(tl.float32)
    # 0 means "not yet", and a sum may be 0.0: hence its bits plus one.
    word = tl.sum(wide * wide, axis=1).to(tl.int32, bitcast=True) + 1
    publish(partials_ptr + rows * PARTS + part, word, mask=rows < M)
    slots = tl.arange(0, SLOTS)
    at = partials_ptr + rows[:, None] * PARTS + slots[None, :]
    there = (rows < M)[:, None] & (slots < PARTS)[None, :]
    words = look(at, there, 1)
    if WAIT:
        words = wait(words, at, there, 1)
        # Two warps may hold the same word, and one of them looked too early. All words are there now, so look again.
        tl.debug_barrier()
        words = look(at, there, 1)
    rstd = tl.rsqrt(tl.sum((words - 1).to(tl.float32, bitcast=True), axis=1) / N + eps)
    if part == 0:
        tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    w = tl.load(w_ptr + cols, mask=cols < N, eviction_policy="evict_last")
    y = opaque(x).to(tl.float32) * rstd[:, None] * w.to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * stride_y + cols[None, :], y, mask=mask)


def rms_norm_parts(rows: Rows) -> Split:
    """Four warps for 8 KB."""
    return split(rows, part_bytes=8192, most_parts=32, warp_bytes=2048)


def rms_norm_split(x, w, eps):
    """As rms_norm_packed; two rows are shared by programs that run at once, 32 warps per SM, so w is loaded once."""
    y, rstd, rows = _results(x)
    parts = rms_norm_parts(rows)
    if y.numel():
        partials = torch.zeros((rows.M, parts.parts), dtype=torch.int32, device=x.device)
        for blocking in waits():
            rms_norm_split_kernel[(triton.cdiv(rows.M, 2) * parts.parts,)](
                x, w, y, rstd, partials, rows.M, rows.N, x.stride(0), y.stride(0), eps, ROWS=2, PARTS=parts.parts,
                SLOTS=triton.next_power_of_2(parts.parts), BLOCK_N=parts.block, WAIT=blocking,
                MULTIPLE=common_multiple_of(rows.N, x.stride(0), y.stride(0)),
                num_warps=parts.warps, maxnreg=64,
            )  # fmt: skip
    return y, rstd


@triton.jit
def rms_norm_shifted_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr, partials_ptr,  # as above; partials_ptr is not used by one part
    N, stride_x, stride_y, eps, PARTS: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) // PARTS
    part = tl.program_id(0) % PARTS
    begin = row * stride_x
    at, inside = whole_chunks(begin, N, part, LANES, WIDTH)
    side, mine = sides(begin, N, part, WIDTH)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    edge = tl.load(x_ptr + side, mask=mine, other=0.0).to(tl.float32)
    wide = opaque(x).to(tl.float32)
    squares = tl.sum(tl.sum(wide * wide, axis=1), axis=0) + tl.sum(edge * edge, axis=0)
    if PARTS > 1:
        # 0 means "not yet", and a sum may be 0.0: hence its bits plus one.
        publish(partials_ptr + row * PARTS + part, squares.to(tl.int32, bitcast=True) + 1)
        slots = tl.arange(0, SLOTS)
        words = tl.zeros([SLOTS], tl.int32) + 1
        if WAIT:
            words = wait(words - 1, partials_ptr + row * PARTS + slots, slots < PARTS, 1)
        squares = tl.sum((words - 1).to(tl.float32, bitcast=True), axis=0)
    rstd = tl.rsqrt(squares / N + eps)
    if part == 0:
        tl.store(rstd_ptr + row, rstd)
    w = beside_chunks(w_ptr, begin, part, inside, LANES, WIDTH)
    to, _ = whole_chunks(row * stride_y, N, part, LANES, WIDTH)
    tl.store(y_ptr + to, opaque(x).to(tl.float32) * rstd * w, mask=inside)
    edge_w = tl.load(w_ptr + (side - begin), mask=mine, eviction_policy="evict_last").to(tl.float32)
    tl.store(y_ptr + row * stride_y + (side - begin), edge * rstd * edge_w, mask=mine)


def rms_norm_shifted_parts(rows: Rows) -> Split:
    return shifted(rows, thread_bytes=64, most_warps=2)


def rms_norm_shifted(x, w, eps):
    """As rms_norm_split, or one program a row, for an odd number of 16-bit elements: see `whole_chunks`."""
    y, rstd, rows = _results(x)
    parts = rms_norm_shifted_parts(rows)
    if y.numel():
        numbers = x.stride(0), y.stride(0), eps
        launch_shifted(rms_norm_shifted_kernel, rows, parts, 0, torch.int32, (x, w, y, rstd), numbers)
    return y, rstd


@triton.jit
def rstd_kernel(x_ptr, rstd_ptr, N, stride, eps, BLOCK_N: tl.constexpr, MULTIPLE: tl.constexpr):  # x: [M, N], rstd: [M]
    N, stride = multiple(N, MULTIPLE), multiple(stride, MULTIPLE)
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK_N], tl.float32)
    latest = tl.zeros([BLOCK_N], tl.float32)
    for step in range(tl.cdiv(N, BLOCK_N)):
        cols = step * BLOCK_N + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < N, other=0.0).to(tl.float32)
        squares, latest = add_step(squares, latest, step, x * x)
    tl.store(rstd_ptr + row, tl.rsqrt(tl.sum(squares + latest, axis=0) / N + eps))


@triton.jit
def scale_kernel(x_ptr, w_ptr, y_ptr, rstd_ptr, N, stride, BLOCK_N: tl.constexpr, MULTIPLE: tl.constexpr):  # y: [M, N]
    N, stride = multiple(N, MULTIPLE), multiple(stride, MULTIPLE)
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < N).to(tl.float32)
        w = tl.load(w_ptr + cols, mask=cols < N).to(tl.float32)
        tl.store(y_ptr + row * N + cols, x * rstd * w, mask=cols < N)


def rms_norm_two_pass(x, w, eps):
    """As rms_norm_packed for rows of any length: one kernel for rstd, one that reads x again."""
    y, rstd, rows = _results(x)
    if y.numel():
        known = common_multiple_of(rows.N, x.stride(0))
        rstd_kernel[(rows.M,)](x, rstd, rows.N, x.stride(0), eps, BLOCK_N=1024, MULTIPLE=known)
        scale_kernel[(rows.M,)](x, w, y, rstd, rows.N, x.stride(0), BLOCK_N=1024, MULTIPLE=known)
    return y, rstd


def _results(x):
    rows = Rows.of(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows.M, dtype=torch.float32, device=x.device)
    return y, rstd if rows.N else rstd.fill_(math.nan), rows  # the mean of nothing


# Backward. With n = x rstd and g = dy w:    dx = rstd (g - n mean(g n))    dw = sum over rows of dy n
#
# As many programs as the GPU runs at once walk over the rows; dw of all their rows stays in fp32 registers.


@triton.jit
def rms_norm_backward_persistent_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, partial_dw_ptr,  # partial_dw: [programs, N] in fp32
    M, N, dy_stride, x_stride, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, dy_stride, x_stride = multiple(N, MULTIPLE), multiple(dy_stride, MULTIPLE), multiple(x_stride, MULTIPLE)
    cols = tl.arange(0, BLOCK_N)
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0)[None, :]
    dw = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)[:, None]
        n = x * rstd
        g = dy * w.to(tl.float32)
        dw += dy * n
        dx = rstd * (g - n * (tl.sum(g * n, axis=1) / N)[:, None])
        tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx, mask=mask)
    tl.store(partial_dw_ptr + tl.program_id(0).to(tl.int64) * N + cols, tl.sum(dw, axis=0), mask=cols < N)


def rms_norm_backward_persistent(dy, x, w, rstd):
    """dy, x [M, N], w [N], rstd [M] -> dx [M, N], dw [N]; three tiles of 16 KB of dy and of x in shared memory."""
    dx, dw, rows = _gradients(x, w)
    if dx.numel():
        tile = 16384 // (rows.block * rows.itemsize)
        programs = min(triton.cdiv(rows.M, tile), rows.sms)
        partial_dw = torch.empty((programs, rows.N), dtype=torch.float32, device=x.device)
        rms_norm_backward_persistent_kernel[(programs,)](
            dy, x, w, rstd, dx, partial_dw, rows.M, rows.N, dy.stride(0), x.stride(0), tile, rows.block, STAGES=3,
            MULTIPLE=common_multiple_of(rows.N, dy.stride(0), x.stride(0)), num_warps=8,
        )  # fmt: skip
        sum_partials(partial_dw, None, dw, None)
    return dx, dw


def rms_norm_backward_walk(dy, x, w, rstd):
    """As rms_norm_backward_persistent for longer rows, up to 8192 columns: a list of chunks has few idle lanes."""
    dx, _, dw, _ = norm_backward_walk(dy, x, w, None, rstd)
    return dx, dw


def rms_norm_backward_group(dy, x, w, rstd):
    """As rms_norm_backward_persistent for rows of any length, in one launch where all parts of a row run at once."""
    dx, _, dw, _ = norm_backward_group(dy, x, w, None, rstd)
    return dx, dw


def rms_norm_backward_shifted(dy, x, w, rstd):
    """As rms_norm_backward_walk and rms_norm_backward_group, with 16-byte loads of rows that start anywhere."""
    dx, _, dw, _ = norm_backward_shifted(dy, x, w, None, rstd)
    return dx, dw


def _gradients(x, w):
    rows = Rows.of(x)
    dw = torch.zeros_like(w) if rows.M == 0 else torch.empty_like(w)  # a sum of no rows is 0
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), dw, rows
