"""Softmax of the rows of a matrix, and its gradient."""

import math

import torch
import triton
import triton.language as tl

from course_ops.kernels._rows import (
    Rows,
    Split,
    add_step,
    common_multiple_of,
    in_chunks,
    launch_shifted,
    multiple,
    opaque,
    pack_pair,
    publish,
    shifted,
    sides,
    split,
    unpack_pair,
    wait,
    waits,
    whole_chunks,
)

# Where a maximum starts. Not -inf: after a block that is all -inf, exp(-inf - -inf) makes the sum NaN for good.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LOG2E = tl.constexpr(math.log2(math.e))  # exp(a) = 2^(a log2(e)), and powers of 2 are what the hardware computes


# x - m comes before the scaling by log2(e): it is exact. x log2(e) would be off by 0.00006 at 1000.
@triton.jit
def softmax_packed_kernel(
    x_ptr, y_ptr,  # [M, N] each, rows stride_x and stride_y elements apart
    M, N, stride_x, stride_y, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_x, stride_y = multiple(N, MULTIPLE), multiple(stride_x, MULTIPLE), multiple(stride_y, MULTIPLE)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=-float("inf"))
    m = tl.max(x, axis=1, keep_dims=True).to(tl.float32)
    l = tl.sum(tl.exp2((opaque(x).to(tl.float32) - m) * LOG2E), axis=1, keep_dims=True)  # noqa: E741
    y = tl.exp2((opaque(x).to(tl.float32) - m) * LOG2E - tl.log2(l))
    tl.store(y_ptr + rows * stride_y + cols, y, mask=mask)


def softmax_packed(x):
    """[M, N] -> [M, N], rows of at most 64 KB in the registers of a program."""
    y, rows = _empty(x), Rows.of(x)
    if y.numel():
        row = rows.block * rows.itemsize
        tile = max(1, 2048 // row)
        warps = max(min(2, tile * row // 2048), row // 4096)  # 64 bytes of a row a thread, then 128
        softmax_packed_kernel[(triton.cdiv(rows.M, tile),)](
            x, y, rows.M, rows.N, x.stride(0), y.stride(0), tile, rows.block,
            common_multiple_of(rows.N, x.stride(0), y.stride(0)), num_warps=warps, maxnreg=64 if warps > 2 else 72,
        )  # fmt: skip
    return y


@triton.jit
def softmax_chunks_kernel(
    x_ptr, y_ptr, N, stride_x, stride_y,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,  # CHUNKS of BLOCK columns, of which the last may be ragged
    MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_x, stride_y = multiple(N, MULTIPLE), multiple(stride_x, MULTIPLE), multiple(stride_y, MULTIPLE)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        at = x_ptr + row * stride_x + chunk * BLOCK + lanes
        mask = chunk * BLOCK + lanes < N
        chunks = chunks + (tl.load(at, mask=mask, other=-float("inf")),)  # noqa: RUF005
    lane_m = chunks[0]
    for chunk in tl.static_range(1, CHUNKS):
        lane_m = tl.maximum(lane_m, chunks[chunk])
    m = tl.max(lane_m, axis=0).to(tl.float32)
    lane_l = tl.zeros((BLOCK,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        lane_l += tl.exp2((opaque(chunks[chunk]).to(tl.float32) - m) * LOG2E)
    log_l = tl.log2(tl.sum(lane_l, axis=0))
    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK + lanes
        y = tl.exp2((opaque(chunks[chunk]).to(tl.float32) - m) * LOG2E - log_l)
        tl.store(y_ptr + row * stride_y + cols, y, mask=cols < N)


def softmax_chunks(x):
    """As softmax_packed; a row is a list of chunks of 16 bytes per thread, all of them loaded before the first use."""
    y, rows = _empty(x), Rows.of(x)
    if y.numel():
        plan = in_chunks(rows.N, rows.itemsize)
        softmax_chunks_kernel[(rows.M,)](
            x, y, rows.N, x.stride(0), y.stride(0), plan.count, plan.block,
            common_multiple_of(rows.N, x.stride(0), y.stride(0)), num_warps=plan.warps,
        )  # fmt: skip
    return y


@triton.jit
def of_all_parts(m, l, partials_ptr, part, PARTS: tl.constexpr, SLOTS: tl.constexpr, WAIT: tl.constexpr):  # noqa: E741
    """m and l of a row whose partials are at partials_ptr, from those of this part."""
    publish(partials_ptr + part, pack_pair(m, l))  # never 0: if m is 0.0, its own 2^0 is in l
    slots = tl.arange(0, SLOTS)
    there = slots < PARTS
    partials = tl.zeros([SLOTS], tl.int64)
    if WAIT:
        partials = wait(partials, partials_ptr + slots, there, -1)
    ms, ls = unpack_pair(partials)
    ms = tl.where(there, ms, LOWEST)
    ls = tl.where(there, ls, 0.0)
    m = tl.max(ms, axis=0)
    return m, tl.sum(ls * tl.exp2((ms - m) * LOG2E), axis=0)


@triton.jit
def softmax_split_kernel(
    x_ptr, y_ptr,  # [M, N] each, rows stride_x and stride_y elements apart
    partials_ptr,  # [M, PARTS] int64 zeros; then m of a part in the high half and l in the low
    N, stride_x, stride_y, PARTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, WAIT: tl.constexpr,
    MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_x, stride_y = multiple(N, MULTIPLE), multiple(stride_x, MULTIPLE), multiple(stride_y, MULTIPLE)
    row = tl.program_id(0).to(tl.int64) // PARTS
    part = tl.program_id(0) % PARTS
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=-float("inf"))
    m = tl.maximum(tl.max(x, axis=0).to(tl.float32), LOWEST)
    l = tl.sum(tl.exp2((opaque(x).to(tl.float32) - m) * LOG2E), axis=0)  # noqa: E741
    m, l = of_all_parts(m, l, partials_ptr + row * PARTS, part, PARTS, SLOTS, WAIT)  # noqa: E741
    y = tl.exp2((opaque(x).to(tl.float32) - m) * LOG2E - tl.log2(l))
    tl.store(y_ptr + row * stride_y + cols, y, mask=cols < N)


def softmax_parts(rows: Rows) -> Split:
    """A warp for 4 KB, so that a program waits at no barrier."""
    return split(rows, part_bytes=4096, most_parts=128, warp_bytes=4096)


def softmax_split(x):
    """[M, N] -> [M, N], a row shared by programs that all run at once: 28 warps an SM at 72 registers per thread."""
    y, rows = _empty(x), Rows.of(x)
    parts = softmax_parts(rows)
    if y.numel():
        partials = torch.zeros(rows.M, parts.parts, dtype=torch.int64, device=x.device)
        for blocking in waits():
            softmax_split_kernel[(rows.M * parts.parts,)](
                x, y, partials, rows.N, x.stride(0), y.stride(0),
                parts.parts, max(32 * parts.warps, parts.slots), parts.block, blocking,
                common_multiple_of(rows.N, x.stride(0), y.stride(0)), num_warps=parts.warps, maxnreg=72,
            )  # fmt: skip
    return y


@triton.jit
def softmax_shifted_kernel(
    x_ptr, y_ptr, partials_ptr,  # as above; partials_ptr is not used by one part
    N, stride_x, stride_y, PARTS: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) // PARTS
    part = tl.program_id(0) % PARTS
    begin = row * stride_x
    at, inside = whole_chunks(begin, N, part, LANES, WIDTH)
    side, mine = sides(begin, N, part, WIDTH)
    x = tl.load(x_ptr + at, mask=inside, other=-float("inf"))
    edge = tl.load(x_ptr + side, mask=mine, other=-float("inf")).to(tl.float32)
    m = tl.maximum(tl.max(tl.max(x, axis=1), axis=0).to(tl.float32), tl.maximum(tl.max(edge, axis=0), LOWEST))
    l = tl.sum(tl.sum(tl.exp2((opaque(x).to(tl.float32) - m) * LOG2E), axis=1), axis=0)  # noqa: E741
    l += tl.sum(tl.exp2((edge - m) * LOG2E), axis=0)  # noqa: E741
    if PARTS > 1:
        m, l = of_all_parts(m, l, partials_ptr + row * PARTS, part, PARTS, SLOTS, WAIT)  # noqa: E741
    log_l = tl.log2(l)
    to, _ = whole_chunks(row * stride_y, N, part, LANES, WIDTH)
    tl.store(y_ptr + to, tl.exp2((opaque(x).to(tl.float32) - m) * LOG2E - log_l), mask=inside)
    tl.store(y_ptr + row * stride_y + (side - begin), tl.exp2((edge - m) * LOG2E - log_l), mask=mine)


def softmax_shifted_parts(rows: Rows) -> Split:
    return shifted(rows, thread_bytes=128, most_warps=2)


def softmax_shifted(x):
    """As softmax_split, or one program a row, for an odd number of 16-bit elements: see `whole_chunks`."""
    y, rows = _empty(x), Rows.of(x)
    parts = softmax_shifted_parts(rows)
    if y.numel():
        strides = x.stride(0), y.stride(0)
        launch_shifted(softmax_shifted_kernel, rows, parts, 0, torch.int64, (x, y), strides)
    return y


# The second pass runs backwards: what was read last is what the caches still hold.
@triton.jit
def softmax_two_pass_kernel(
    x_ptr, y_ptr, N, stride_x, stride_y, BLOCK_N: tl.constexpr, MULTIPLE: tl.constexpr
):  # x, y: [M, N]
    N, stride_x, stride_y = multiple(N, MULTIPLE), multiple(stride_x, MULTIPLE), multiple(stride_y, MULTIPLE)
    row = tl.program_id(0).to(tl.int64)
    m = LOWEST
    l, latest = 0.0, 0.0  # noqa: E741
    blocks = tl.cdiv(N, BLOCK_N)
    for step in range(blocks):
        cols = step * BLOCK_N + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, axis=0))
        less = tl.exp(m - m_new)
        l, latest = add_step(l * less, latest * less, step, tl.sum(tl.exp(x - m_new), axis=0))  # noqa: E741
        m = m_new
    l += latest  # noqa: E741
    for i in range(blocks):
        cols = (blocks - 1 - i) * BLOCK_N + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N).to(tl.float32)
        tl.store(y_ptr + row * stride_y + cols, tl.exp(x - m) / l, mask=cols < N)


def softmax_two_pass(x):
    """[M, N] -> [M, N], a program a row of any length, 16 elements a thread at a time."""
    y, rows = _empty(x), Rows.of(x)
    if y.numel():
        block = min(4096, rows.block)
        softmax_two_pass_kernel[(rows.M,)](
            x, y, rows.N, x.stride(0), y.stride(0), block, common_multiple_of(rows.N, x.stride(0), y.stride(0)),
            num_warps=max(1, block // 512),
        )  # fmt: skip
    return y


@triton.jit
def softmax_backward_packed_kernel(
    y_ptr, dy_ptr, dx_ptr,  # [M, N] each
    M, N, stride_y, stride_dy, stride_dx, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_y = multiple(N, MULTIPLE), multiple(stride_y, MULTIPLE)
    stride_dy, stride_dx = multiple(stride_dy, MULTIPLE), multiple(stride_dx, MULTIPLE)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    y = tl.load(y_ptr + rows * stride_y + cols, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0)
    delta = tl.sum(opaque(y).to(tl.float32) * opaque(dy).to(tl.float32), axis=1, keep_dims=True)
    dx = opaque(y).to(tl.float32) * (opaque(dy).to(tl.float32) - delta)
    tl.store(dx_ptr + rows * stride_dx + cols, dx, mask=mask)


def softmax_backward_packed(y, dy):
    """[M, N], [M, N] -> dx [M, N], rows of at most 64 KB in the registers of a program."""
    dx, rows = _empty(y), Rows.of(y)
    if dx.numel():
        row = rows.block * rows.itemsize
        tile = max(1, 4096 // row)
        softmax_backward_packed_kernel[(triton.cdiv(rows.M, tile),)](
            y, dy, dx, rows.M, rows.N, y.stride(0), dy.stride(0), dx.stride(0), tile, rows.block,
            common_multiple_of(rows.N, y.stride(0), dy.stride(0), dx.stride(0)),
            num_warps=max(4, row // 4096), maxnreg=128,
        )  # fmt: skip
    return dx


@triton.jit
def softmax_backward_chunks_kernel(
    y_ptr, dy_ptr, dx_ptr, N, stride_y, stride_dy, stride_dx,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_y = multiple(N, MULTIPLE), multiple(stride_y, MULTIPLE)
    stride_dy, stride_dx = multiple(stride_dy, MULTIPLE), multiple(stride_dx, MULTIPLE)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    y = ()
    dy = ()
    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK + lanes
        y = y + (tl.load(y_ptr + row * stride_y + cols, mask=cols < N, other=0.0),)  # noqa: RUF005
        dy = dy + (tl.load(dy_ptr + row * stride_dy + cols, mask=cols < N, other=0.0),)  # noqa: RUF005
    shares = tl.zeros((BLOCK,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        shares += opaque(y[chunk]).to(tl.float32) * opaque(dy[chunk]).to(tl.float32)
    delta = tl.sum(shares, axis=0)
    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK + lanes
        dx = opaque(y[chunk]).to(tl.float32) * (opaque(dy[chunk]).to(tl.float32) - delta)
        tl.store(dx_ptr + row * stride_dx + cols, dx, mask=cols < N)


def softmax_backward_chunks(y, dy):
    """As softmax_backward_packed, in chunks as softmax_chunks."""
    dx, rows = _empty(y), Rows.of(y)
    if dx.numel():
        plan = in_chunks(rows.N, rows.itemsize)
        softmax_backward_chunks_kernel[(rows.M,)](
            y, dy, dx, rows.N, y.stride(0), dy.stride(0), dx.stride(0), plan.count, plan.block,
            common_multiple_of(rows.N, y.stride(0), dy.stride(0), dx.stride(0)), num_warps=plan.warps,
        )  # fmt: skip
    return dx


@triton.jit
def sum_of_shares(share, partials_ptr, part, PARTS: tl.constexpr, SLOTS: tl.constexpr, WAIT: tl.constexpr):
    """delta of a row whose partials are at partials_ptr, from the share of this part."""
    # A share of delta may be 0.0, so the high half of its word is 1: a word of 0 means "not yet".
    word = (share.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (1 << 32)
    publish(partials_ptr + part, word)
    slots = tl.arange(0, SLOTS)
    partials = tl.zeros([SLOTS], tl.int64)
    if WAIT:  # a slot beyond PARTS: a share of 0.0
        partials = wait(partials, partials_ptr + slots, slots < PARTS, 1 << 32)
    return tl.sum(partials.to(tl.int32).to(tl.float32, bitcast=True), axis=0)


@triton.jit
def softmax_backward_split_kernel(
    y_ptr, dy_ptr, dx_ptr,  # [M, N] each
    partials_ptr,  # [M, PARTS] int64 zeros; then a part's share of delta in the low half and 1 in the high
    N, stride_y, stride_dy, stride_dx,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, WAIT: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_y = multiple(N, MULTIPLE), multiple(stride_y, MULTIPLE)
    stride_dy, stride_dx = multiple(stride_dy, MULTIPLE), multiple(stride_dx, MULTIPLE)
    row = tl.program_id(0).to(tl.int64) // PARTS
    part = tl.program_id(0) % PARTS
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.load(y_ptr + row * stride_y + cols, mask=cols < N, other=0.0)
    dy = tl.load(dy_ptr + row * stride_dy + cols, mask=cols < N, other=0.0)
    share = tl.sum(opaque(y).to(tl.float32) * opaque(dy).to(tl.float32), axis=0)
    delta = sum_of_shares(share, partials_ptr + row * PARTS, part, PARTS, SLOTS, WAIT)
    dx = opaque(y).to(tl.float32) * (opaque(dy).to(tl.float32) - delta)
    tl.store(dx_ptr + row * stride_dx + cols, dx, mask=cols < N)


def softmax_backward_parts(rows: Rows) -> Split:
    """Two warps for 8 KB of y and of dy."""
    return split(rows, part_bytes=8192, most_parts=128, warp_bytes=4096)


def softmax_backward_split(y, dy):
    """[M, N], [M, N] -> dx [M, N], a row shared by programs that all run at once: 16 warps per SM."""
    dx, rows = _empty(y), Rows.of(y)
    parts = softmax_backward_parts(rows)
    if dx.numel():
        partials = torch.zeros(rows.M, parts.parts, dtype=torch.int64, device=y.device)
        for blocking in waits():
            softmax_backward_split_kernel[(rows.M * parts.parts,)](
                y, dy, dx, partials, rows.N, y.stride(0), dy.stride(0), dx.stride(0),
                parts.parts, max(32 * parts.warps, parts.slots), parts.block, blocking,
                common_multiple_of(rows.N, y.stride(0), dy.stride(0), dx.stride(0)),
                num_warps=parts.warps, maxnreg=128,
            )  # fmt: skip
    return dx


@triton.jit
def softmax_backward_shifted_kernel(
    y_ptr, dy_ptr, dx_ptr, partials_ptr,  # as above; partials_ptr is not used by one part
    N, stride_y, stride_dy, stride_dx,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) // PARTS
    part = tl.program_id(0) % PARTS
    begin = row * stride_y
    at, inside = whole_chunks(begin, N, part, LANES, WIDTH)
    at_dy, _ = whole_chunks(row * stride_dy, N, part, LANES, WIDTH)
    side, mine = sides(begin, N, part, WIDTH)
    y = tl.load(y_ptr + at, mask=inside, other=0.0)
    dy = tl.load(dy_ptr + at_dy, mask=inside, other=0.0)
    edge_y = tl.load(y_ptr + side, mask=mine, other=0.0).to(tl.float32)
    edge_dy = tl.load(dy_ptr + row * stride_dy + (side - begin), mask=mine, other=0.0).to(tl.float32)
    delta = tl.sum(tl.sum(opaque(y).to(tl.float32) * opaque(dy).to(tl.float32), axis=1), axis=0)
    delta += tl.sum(edge_y * edge_dy, axis=0)
    if PARTS > 1:
        delta = sum_of_shares(delta, partials_ptr + row * PARTS, part, PARTS, SLOTS, WAIT)
    at_dx, _ = whole_chunks(row * stride_dx, N, part, LANES, WIDTH)
    tl.store(dx_ptr + at_dx, opaque(y).to(tl.float32) * (opaque(dy).to(tl.float32) - delta), mask=inside)
    tl.store(dx_ptr + row * stride_dx + (side - begin), edge_y * (edge_dy - delta), mask=mine)


def softmax_backward_shifted_parts(rows: Rows) -> Split:
    return shifted(rows, thread_bytes=64, most_warps=4)


def softmax_backward_shifted(y, dy):
    """As softmax_backward_split, or one program a row, for an odd number of 16-bit elements: see `whole_chunks`."""
    dx, rows = _empty(y), Rows.of(y)
    parts = softmax_backward_shifted_parts(rows)
    if dx.numel():
        strides = y.stride(0), dy.stride(0), dx.stride(0)
        launch_shifted(softmax_backward_shifted_kernel, rows, parts, 0, torch.int64, (y, dy, dx), strides)
    return dx


@triton.jit
def softmax_backward_two_pass_kernel(
    y_ptr, dy_ptr, dx_ptr,  # [M, N] each
    N, stride_y, stride_dy, stride_dx, BLOCK_N: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_y = multiple(N, MULTIPLE), multiple(stride_y, MULTIPLE)
    stride_dy, stride_dx = multiple(stride_dy, MULTIPLE), multiple(stride_dx, MULTIPLE)
    row = tl.program_id(0).to(tl.int64)
    delta, latest = 0.0, 0.0
    blocks = tl.cdiv(N, BLOCK_N)
    for step in range(blocks):
        cols = step * BLOCK_N + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + row * stride_y + cols, mask=cols < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * stride_dy + cols, mask=cols < N, other=0.0).to(tl.float32)
        delta, latest = add_step(delta, latest, step, tl.sum(y * dy, axis=0))
    delta += latest
    for i in range(blocks):
        cols = (blocks - 1 - i) * BLOCK_N + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + row * stride_y + cols, mask=cols < N).to(tl.float32)
        dy = tl.load(dy_ptr + row * stride_dy + cols, mask=cols < N).to(tl.float32)
        tl.store(dx_ptr + row * stride_dx + cols, y * (dy - delta), mask=cols < N)


def softmax_backward_two_pass(y, dy):
    """[M, N], [M, N] -> dx [M, N], a program a row of any length."""
    dx, rows = _empty(y), Rows.of(y)
    if dx.numel():
        block = min(4096, rows.block)
        softmax_backward_two_pass_kernel[(rows.M,)](
            y, dy, dx, rows.N, y.stride(0), dy.stride(0), dx.stride(0), block,
            common_multiple_of(rows.N, y.stride(0), dy.stride(0), dx.stride(0)), num_warps=max(1, block // 256),
        )  # fmt: skip
    return dx


def _empty(x):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
