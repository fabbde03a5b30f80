"""Cross-entropy of the rows of a matrix of logits, and its gradient. The loss is fp32, a logsumexp two fp32.

The first of the two is the logsumexp rounded, the second what the rounding lost. A maximum of 1e8 is rounded to a
multiple of 8. Without the second value the backward would take each of V equal logits for the only one.
"""

import math

import torch
import triton
import triton.language as tl

from course_ops.kernels._rows import Rows, common_multiple_of, multiple

LOG2E = tl.constexpr(math.log2(math.e))
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)  # where a maximum starts: -inf - -inf would be NaN


@triton.jit
def load_target(targets_ptr, row, M, IGNORE: tl.constexpr):
    """The target of a row, or of several."""
    outside: tl.constexpr = IGNORE if IGNORE < 0 else -1
    return tl.load(targets_ptr + row, mask=row < M, other=outside)


@triton.jit
def logit_of(target, x_ptr, row, V, stride_x):
    """x at a row's target; NaN if that is no class, for it is never used as an address.

    Its address waits for the target, and a warp issues its loads in order. So the row's own loads come before this one.
    """
    inside = (target >= 0) & (target < V)
    return tl.load(x_ptr + row.to(tl.int64) * stride_x + target, mask=inside, other=float("nan")).to(tl.float32)


@triton.jit
def store_loss(m, l, target, logit, loss_ptr, lse_ptr, row, M, IGNORE: tl.constexpr):  # noqa: E741
    # l = 0 only if the whole row is -inf: PyTorch's softmax divides 0 by 0 there.
    log_l = tl.where(l > 0, tl.log(l), float("nan"))
    lse = m + log_l
    of_log_l = lse - m  # what of it the sum holds; Knuth's TwoSum: the rounding error of m + log_l, exactly
    pair_ptr = lse_ptr + 2 * row.to(tl.int64)
    tl.store(pair_ptr, lse, mask=row < M)
    tl.store(pair_ptr + 1, (m - (lse - of_log_l)) + (log_l - of_log_l), mask=row < M)
    # Not lse - logit: of the difference of two values near 1000 fp32 keeps 4 digits.
    tl.store(loss_ptr + row, tl.where(target == IGNORE, 0.0, log_l - (logit - m)), mask=row < M)


@triton.jit
def cross_entropy_packed_kernel(
    x_ptr, targets_ptr, loss_ptr, lse_ptr,  # [M, V], [M], [M], [M, 2]
    M, V, stride_x, ROWS: tl.constexpr, BLOCK: tl.constexpr, IGNORE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    target = load_target(targets_ptr, rows, M, IGNORE)
    mask = (rows < M)[:, None] & (cols < V)[None, :]
    offsets = rows.to(tl.int64)[:, None] * stride_x + cols[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=-float("inf")).to(tl.float32)
    logit = logit_of(target, x_ptr, rows, V, stride_x)
    m = tl.maximum(tl.max(x, axis=1), LOWEST)
    # tl.exp takes care of results below 1e-38, which next to the maximum's 1 are as good as 0; tl.exp2 does not.
    l = tl.sum(tl.exp2((x - m[:, None]) * LOG2E), axis=1)  # noqa: E741
    store_loss(m, l, target, logit, loss_ptr, lse_ptr, rows, M, IGNORE)


def cross_entropy_packed(logits, targets, ignore_index):
    """logits [M, V], targets [M] -> loss [M], lse [M, 2]; a program holds several rows, two of 1024 classes a warp."""
    loss, lse, rows = _results(logits)
    if rows.M:
        tile = max(1, 2048 // rows.block)
        cross_entropy_packed_kernel[(triton.cdiv(rows.M, tile),)](
            logits, targets, loss, lse, rows.M, rows.N, logits.stride(0), tile, rows.block, ignore_index,
            num_warps=max(1, min(32, rows.block // 1024)),
        )  # fmt: skip
    return loss, lse


@triton.jit
def cross_entropy_registers_kernel(
    x_ptr, targets_ptr, loss_ptr, lse_ptr,  # [M, V], [M], [M], [M, 2]
    M, V, stride_x,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,  # CHUNKS of BLOCK columns, of which the last may be ragged
    MULTIPLE: tl.constexpr, IGNORE: tl.constexpr,
):  # fmt: skip
    V, stride_x = multiple(V, MULTIPLE), multiple(stride_x, MULTIPLE)
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK + lanes
        at = x_ptr + row.to(tl.int64) * stride_x + cols
        chunks = chunks + (tl.load(at, mask=cols < V, other=-float("inf")),)  # noqa: RUF005
    lane_m = chunks[0]
    for chunk in tl.static_range(1, CHUNKS):
        lane_m = tl.maximum(lane_m, chunks[chunk])
    target = load_target(targets_ptr, row, M, IGNORE)
    m = tl.maximum(tl.max(lane_m, axis=0).to(tl.float32), LOWEST)
    logit = logit_of(target, x_ptr, row, V, stride_x)
    lane_l = tl.zeros((BLOCK,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        lane_l += tl.exp2((chunks[chunk].to(tl.float32) - m) * LOG2E)
    store_loss(m, tl.sum(lane_l, axis=0), target, logit, loss_ptr, lse_ptr, row, M, IGNORE)


def cross_entropy_registers(logits, targets, ignore_index):
    """As cross_entropy_packed, a warp per row of up to 4608 bytes: nine loads per thread, under way together."""
    loss, lse, rows = _results(logits)
    if rows.M:
        block = 512 // rows.itemsize  # 16 bytes a thread
        cross_entropy_registers_kernel[(rows.M,)](
            logits, targets, loss, lse, rows.M, rows.N, logits.stride(0), triton.cdiv(rows.N, block), block,
            common_multiple_of(rows.N, logits.stride(0)), ignore_index, num_warps=1,
        )  # fmt: skip
    return loss, lse


# A lane owns W neighbours, 16 bytes, and takes their maximum first: 1 + 1/W exponentials an element instead of 2.
# Chunks of W are counted from the start of the tensor and not of the row. With an odd V most rows start where the
# hardware has no wide load: chunks wholly inside a row are loaded whole, the elements on either side of them singly.
@triton.jit
def cross_entropy_chunks_kernel(
    x_ptr, targets_ptr, loss_ptr, lse_ptr,  # [M, V] at a multiple of W elements, [M], [M], [M, 2]
    partials_ptr,  # [2, M, PARTS], if PARTS > 1: m and l of each part of a row
    M, V, stride_x, PARTS: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
    IGNORE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    if PARTS == 1:
        target = load_target(targets_ptr, row, M, IGNORE)
    begin = row.to(tl.int64) * stride_x
    end = begin + V
    first = (begin + W - 1) // W  # of the chunks wholly inside the row, and `after` the last
    after = end // W
    each = tl.cdiv(tl.maximum(after - first, 0), PARTS).to(tl.int32)
    n = tl.minimum(each, (after - first).to(tl.int32) - part * each)
    lanes = tl.arange(0, LANES)[:, None]
    chunks_ptr = x_ptr + (first + part * each) * W + lanes * W + tl.arange(0, W)[None, :]
    # The W elements before the chunks and those after; in a row that lies within one chunk these are not the same.
    side = tl.arange(0, 2 * W)
    side = tl.where(side < W, (first - 1) * W, (tl.maximum(first, after) - 1) * W) + side
    mine = (side >= tl.where(part == 0, begin, end)) & (side < end)  # part 0 takes them, once
    edge = tl.load(x_ptr + side, mask=mine, other=-float("inf")).to(tl.float32)
    m = tl.full([LANES], LOWEST, tl.float32)
    l = tl.zeros([LANES], tl.float32)  # noqa: E741
    for start in tl.range(0, n, LANES, num_stages=STAGES):
        x = tl.load(chunks_ptr + start * W, mask=start + lanes < n, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, axis=1))
        l = l * tl.exp2((m - m_new) * LOG2E) + tl.sum(tl.exp2((x - m_new[:, None]) * LOG2E), axis=1)  # noqa: E741
        m = m_new
    if PARTS == 1:
        logit = logit_of(target, x_ptr, row, V, stride_x)
    top = tl.maximum(tl.max(m, axis=0), tl.max(edge, axis=0))
    total = tl.sum(l * tl.exp(m - top), axis=0) + tl.sum(tl.exp(edge - top), axis=0)
    if PARTS == 1:
        store_loss(top, total, target, logit, loss_ptr, lse_ptr, row, M, IGNORE)
    else:
        tl.store(partials_ptr + tl.program_id(0), top)
        tl.store(partials_ptr + M * PARTS + tl.program_id(0), total)


@triton.jit
def merge_kernel(
    x_ptr, targets_ptr, loss_ptr, lse_ptr, partials_ptr,
    M, V, stride_x, PARTS: tl.constexpr, SLOTS: tl.constexpr, IGNORE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    target = load_target(targets_ptr, row, M, IGNORE)
    slots = tl.arange(0, SLOTS)
    m = tl.load(partials_ptr + row * PARTS + slots, mask=slots < PARTS, other=LOWEST)
    l = tl.load(partials_ptr + (M + row) * PARTS + slots, mask=slots < PARTS, other=0.0)  # noqa: E741
    logit = logit_of(target, x_ptr, row, V, stride_x)
    top = tl.max(m, axis=0)
    store_loss(top, tl.sum(l * tl.exp(m - top), axis=0), target, logit, loss_ptr, lse_ptr, row, M, IGNORE)


def cross_entropy_warp(logits, targets, ignore_index):
    """As cross_entropy_packed, a warp a row: it waits for no other warp, and many rows hide each other's latency."""
    return _chunks(logits, targets, ignore_index, parts=1, warps=1)


def cross_entropy_split(logits, targets, ignore_index):
    """As cross_entropy_packed for rows of any length: 8 warps per program, and few rows have several programs each."""
    rows = Rows.of(logits)
    parts = max(1, min(4 * rows.sms // max(rows.M, 1), rows.N // 4096))  # 4 programs for every SM in all
    return _chunks(logits, targets, ignore_index, parts=parts, warps=8)


def _chunks(logits, targets, ignore_index, parts, warps):
    loss, lse, rows = _results(logits)
    lanes, stages = (128, 1) if warps == 1 else (64 * warps, 3)  # 4 chunks per thread, or 2 and 4 under way
    w = 16 // logits.element_size()
    if logits.data_ptr() % 16:
        w = 1  # no chunk is aligned, so a chunk is one element: slow, and right
    if rows.M:
        partials = torch.empty((2, rows.M, parts) if parts > 1 else 0, dtype=torch.float32, device=logits.device)
        args = logits, targets, loss, lse, partials, rows.M, rows.N, logits.stride(0), parts
        cross_entropy_chunks_kernel[(rows.M * parts,)](*args, lanes, w, stages, ignore_index, num_warps=warps)
        if parts > 1:
            merge_kernel[(rows.M,)](*args, triton.next_power_of_2(parts), ignore_index, num_warps=1)
    return loss, lse


def _results(logits):
    rows = Rows.of(logits)
    loss, lse = (torch.empty(shape, dtype=torch.float32, device=logits.device) for shape in (rows.M, (rows.M, 2)))
    return loss, lse, rows


# No loop: nothing is carried along a row, so it is cut into blocks that any SM may take. Chunks as in the forward; a
# chunk that was written whole across two rows would overwrite what another program wrote.
@triton.jit
def cross_entropy_backward_kernel(
    dloss_ptr, x_ptr, targets_ptr, lse_ptr, dx_ptr,  # [M], [M, V], [M], [M, 2], [M, V]; x, dx: at multiples of W
    V, stride_x, stride_dx, BLOCKS, LANES: tl.constexpr, W: tl.constexpr, IGNORE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    target, scale = target_and_scale(targets_ptr, dloss_ptr, row, V, IGNORE)
    lse, rest = tl.load(lse_ptr + 2 * row), tl.load(lse_ptr + 2 * row + 1)
    begin = row * stride_x
    first = (begin + W - 1) // W  # of the chunks wholly inside the row, and `after` the last
    after = (begin + V) // W
    # The same chunk in dx: the rows of both start at the same place within a chunk, which the host has seen to.
    first_dx = (row * stride_dx + W - 1) // W
    chunks = block * LANES + tl.arange(0, LANES)[:, None]
    offsets = chunks * W + tl.arange(0, W)[None, :]
    inside = chunks < after - first
    x = tl.load(x_ptr + first * W + offsets, mask=inside).to(tl.float32)
    hit = offsets == (target - (first * W - begin)).to(tl.int32)
    tl.store(dx_ptr + first_dx * W + offsets, (tl.exp(x - lse - rest) - hit) * scale, mask=inside)
    if block == 0:
        # The elements before the chunks and those after; in a row that lies within one chunk these are not the same.
        side = tl.arange(0, 2 * W)
        cols = tl.where(side < W, (first - 1) * W, (tl.maximum(first, after) - 1) * W) + side - begin
        mine = (cols >= 0) & (cols < V)
        edge = tl.load(x_ptr + begin + cols, mask=mine).to(tl.float32)
        tl.store(dx_ptr + row * stride_dx + cols, (tl.exp(edge - lse - rest) - (cols == target)) * scale, mask=mine)


@triton.jit
def target_and_scale(targets_ptr, dloss_ptr, row, V, IGNORE: tl.constexpr):
    """A row's target and dloss: 0 if the row is ignored, NaN if the target is no class, like the loss."""
    target = tl.load(targets_ptr + row)
    dloss = tl.where((target >= 0) & (target < V), tl.load(dloss_ptr + row), float("nan"))
    return target, tl.where(target == IGNORE, 0.0, dloss)


def cross_entropy_backward(dloss, logits, targets, lse, ignore_index, dlogits):
    """dloss [M], logits [M, V], targets [M], lse [M, 2] -> dlogits [M, V], filled; it may be the logits themselves."""
    rows = Rows.of(logits)
    if dlogits.numel():
        w = 16 // logits.element_size()
        if logits.data_ptr() % 16 or dlogits.data_ptr() % 16 or (logits.stride(0) - dlogits.stride(0)) % w:
            w = 1  # no chunk is aligned in both, so a chunk is one element: slow, and right
        lanes, blocks = 128, triton.cdiv(rows.N, 128 * w)  # four chunks a thread of one warp
        cross_entropy_backward_kernel[(rows.M * blocks,)](
            dloss, logits, targets, lse, dlogits, rows.N, logits.stride(0), dlogits.stride(0), blocks, lanes, w,
            ignore_index, num_warps=1,
        )  # fmt: skip
    return dlogits
