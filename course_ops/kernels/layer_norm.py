"""LayerNorm of the rows of a matrix, and its gradients. Statistics and sums are fp32; w and b may be, too."""

import math

import torch
import triton
import triton.language as tl

from course_ops.kernels._norm_backward import norm_backward_group, norm_backward_walk, partial_sums, sum_partials
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
    mean_by_division,
    mean_of,
    multiple,
    opaque,
    pack_pair,
    publish,
    shifted,
    sides,
    unpack_pair,
    waits,
    whole_chunks,
    widen,
)


@triton.jit
def normalize(x, mean, rstd, w_ptr, b_ptr, cols, mask):
    # Every row asks for w and b, so they should outlive the streams of x and y in the caches.
    w = tl.load(w_ptr + cols, mask=mask, eviction_policy="evict_last").to(tl.float32)
    if b_ptr is not None:
        b = tl.load(b_ptr + cols, mask=mask, eviction_policy="evict_last").to(tl.float32)
        y = (x.to(tl.float32) - mean) * rstd * w + b
    else:
        y = (x.to(tl.float32) - mean) * rstd * w
    return y


@triton.jit
def layer_norm_packed_kernel(
    x_ptr,  # [M, N], rows stride_x elements apart
    w_ptr, b_ptr,  # [N] each; b_ptr may be None, here and below
    y_ptr,  # [M, N]
    mean_ptr, rstd_ptr,  # [M] each, fp32
    M, N, stride_x, eps, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, OPAQUE: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_x = multiple(N, MULTIPLE), multiple(stride_x, MULTIPLE)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0)
    mean = mean_of(tl.sum(x.to(tl.float32), axis=1, keep_dims=True), N)
    x = opaque(x) if OPAQUE else x
    centred = tl.where(cols < N, x.to(tl.float32) - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / N + eps)
    x = opaque(x) if OPAQUE else x
    tl.store(y_ptr + rows * N + cols, normalize(x, mean, rstd, w_ptr, b_ptr, cols, cols < N), mask=mask)
    tl.store(mean_ptr + rows, mean, mask=rows < M)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)


def layer_norm_tile(x, w, b, eps):
    """x [M, N], w and b [N] -> y [M, N], mean and rstd [M] in fp32; N <= 2048. A warp holds 1024 elements.

    Four warps would share two rows of 1024: 670 instructions of a warp for each row instead of 510, and 5 barriers.
    """
    y, mean, rstd, rows, _, _ = _results(x)
    if y.numel():
        tile = max(1, 1024 // rows.block)
        layer_norm_packed_kernel[(triton.cdiv(rows.M, tile),)](
            x, w, b, y, mean, rstd, rows.M, rows.N, x.stride(0), eps, tile, rows.block, OPAQUE=False,
            MULTIPLE=common_multiple_of(rows.N, x.stride(0)), num_warps=1 if rows.block <= 1024 else 4,
        )  # fmt: skip
    return y, mean, rstd


def layer_norm_packed(x, w, b, eps):
    """As layer_norm_tile, for longer rows: 64 bytes per thread, four rows of 8192 on an SM."""
    y, mean, rstd, rows, _, _ = _results(x)
    if y.numel():
        tile = max(1, 2048 // rows.block)
        layer_norm_packed_kernel[(triton.cdiv(rows.M, tile),)](
            x, w, b, y, mean, rstd, rows.M, rows.N, x.stride(0), eps, tile, rows.block, OPAQUE=True,
            MULTIPLE=common_multiple_of(rows.N, x.stride(0)),
            num_warps=max(1, tile * rows.block * rows.itemsize // 2048), maxnreg=64,
        )  # fmt: skip
    return y, mean, rstd


@triton.jit
def layer_norm_chunks_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,
    residual_ptr, total_ptr,  # [M, N] each; None, or x is added to residual first, and total is what is normalised
    N, stride_x, stride_residual, eps, sixteen,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,  # CHUNKS of BLOCK columns, of which the last may be ragged
    MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_x = multiple(N, MULTIPLE), multiple(stride_x, MULTIPLE)
    stride_residual = multiple(stride_residual, MULTIPLE)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    y_ptr += row * N
    lanes = tl.arange(0, BLOCK)
    chunks = ()
    residuals = ()
    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK + lanes
        chunks = chunks + (tl.load(x_ptr + cols, mask=cols < N, other=0.0),)  # noqa: RUF005
        if residual_ptr is not None:
            at = residual_ptr + row * stride_residual + cols
            residuals = residuals + (tl.load(at, mask=cols < N, other=0.0),)  # noqa: RUF005
    if residual_ptr is not None:  # in a loop of its own: no load passes a store
        branch = chunks
        chunks = ()
        for chunk in tl.static_range(CHUNKS):
            cols = chunk * BLOCK + lanes
            chunks = chunks + (added(branch[chunk], residuals[chunk]),)  # noqa: RUF005
            tl.store(total_ptr + row * N + cols, chunks[chunk], mask=cols < N)
    lane_mean = tl.zeros((BLOCK,), tl.float32)
    lane_m2 = tl.zeros((BLOCK,), tl.float32)
    for chunk in tl.static_range(CHUNKS - 1):
        lane_mean, lane_m2 = welford(chunks[chunk], chunk, lane_mean, lane_m2)
    there = (CHUNKS - 1) * BLOCK + lanes < N  # lanes beyond the end have one element less
    last_mean, last_m2 = welford(chunks[CHUNKS - 1], CHUNKS - 1, lane_mean, lane_m2)
    lane_mean = tl.where(there, last_mean, lane_mean)
    lane_m2 = tl.where(there, last_m2, lane_m2)
    lane_count = (CHUNKS - 1) + there.to(tl.float32)
    mean = mean_by_division(tl.sum(lane_mean * lane_count, axis=0), N)
    delta = lane_mean - mean
    rstd = tl.rsqrt(tl.sum(lane_m2 + delta * delta * lane_count, axis=0) / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK + lanes
        y = normalize(widen(chunks[chunk], sixteen), mean, rstd, w_ptr, b_ptr, cols, cols < N)
        tl.store(y_ptr + cols, y, mask=cols < N)


@triton.jit
def added(x, residual):
    """Rounded to the stream's dtype before it is normalised: forward and backward see the same values."""
    return (residual.to(tl.float32) + x.to(tl.float32)).to(residual.dtype)


@triton.jit
def welford(x, count, mean, m2):
    """One more element in every lane. No digits are lost: only differences from the running mean are squared."""
    delta = x.to(tl.float32) - mean
    mean += delta * (1.0 / (count + 1.0))
    return mean, m2 + delta * (x.to(tl.float32) - mean)


def layer_norm_chunks(x, w, b, eps, residual=None):
    """As layer_norm_tile; a row is a list of chunks of one load per thread, all under way before the first use.

    With residual [M, N]: of residual + x, which is a fourth result.
    """
    y, mean, rstd, rows, total, stride = _results(x, residual)
    if y.numel():
        itemsize = max(x.element_size(), 0 if total is None else total.element_size())
        plan = in_chunks(rows.N, itemsize, load_bytes(itemsize, rows.N, x.stride(0), stride))
        layer_norm_chunks_kernel[(rows.M,)](
            x, w, b, y, mean, rstd, residual, total, rows.N, x.stride(0), stride, eps, 16, plan.count, plan.block,
            common_multiple_of(rows.N, x.stride(0), stride), num_warps=plan.warps,
        )  # fmt: skip
    return (y, mean, rstd) if total is None else (y, mean, rstd, total)


@triton.jit
def layer_norm_split_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, residual_ptr, total_ptr,
    partials_ptr,  # [M, PARTS], -1 at first: two NaNs with every bit set, which arithmetic on a GPU never makes
    M, N, stride_x, stride_residual, stride_y, eps,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, WAIT: tl.constexpr,
    MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_x, stride_y = multiple(N, MULTIPLE), multiple(stride_x, MULTIPLE), multiple(stride_y, MULTIPLE)
    stride_residual = multiple(stride_residual, MULTIPLE)
    part = tl.program_id(0) % PARTS
    # A tile of one row, whose mask says that the row is there, as it always is: so the compiler takes fewer registers.
    rows = (tl.program_id(0) // PARTS).to(tl.int64) + tl.arange(0, 1)
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + rows[:, None] * stride_residual + cols[None, :], mask=mask, other=0.0)
        x = added(x, residual)
        tl.store(total_ptr + rows[:, None] * N + cols[None, :], x, mask=mask)
    count = tl.minimum(N - part * BLOCK_N, BLOCK_N).to(tl.float32)
    mean = mean_of(tl.sum(x.to(tl.float32), axis=1), count)
    x = opaque(x)
    centred = tl.where((cols < N)[None, :], x.to(tl.float32) - mean[:, None], 0.0)
    m2 = tl.sum(centred * centred, axis=1)
    publish(partials_ptr + rows * PARTS + part, pack_pair(mean, m2), mask=rows < M)
    slots = tl.arange(0, SLOTS)
    at = partials_ptr + rows[:, None] * PARTS + slots[None, :]
    there = (rows < M)[:, None] & (slots < PARTS)[None, :]
    partials = look(at, there, 0)
    if WAIT:
        while tl.max(tl.max((partials == -1).to(tl.int32), axis=1), axis=0) == 1:
            partials = look(at, there, 0)
    # Parts are merged by Chan, Golub and LeVeque (1979), eq. 1.5; a slot past the last part counts nothing.
    counts = tl.minimum(tl.maximum(N - slots * BLOCK_N, 0), BLOCK_N).to(tl.float32)
    means, m2s = unpack_pair(partials)
    mean = mean_of(tl.sum(means * counts[None, :], axis=1), N)
    delta = means - mean[:, None]
    rstd = tl.rsqrt(tl.sum(m2s + delta * delta * counts[None, :], axis=1) / N + eps)
    w = tl.load(w_ptr + cols, mask=cols < N, eviction_policy="evict_last").to(tl.float32)[None, :]
    if b_ptr is not None:
        b = tl.load(b_ptr + cols, mask=cols < N, eviction_policy="evict_last").to(tl.float32)[None, :]
        y = (opaque(x).to(tl.float32) - mean[:, None]) * rstd[:, None] * w + b
    else:
        y = (opaque(x).to(tl.float32) - mean[:, None]) * rstd[:, None] * w
    tl.store(y_ptr + rows[:, None] * stride_y + cols[None, :], y, mask=mask)
    if part == 0:
        tl.store(mean_ptr + rows, mean, mask=rows < M)
        tl.store(rstd_ptr + rows, rstd, mask=rows < M)


def layer_norm_parts(rows: Rows) -> Split:
    """4096 columns for 128 threads: an SM holds parts of several rows, and one loads while another stores."""
    return Split(triton.cdiv(rows.N, 4096), 4096, 4)


def layer_norm_split(x, w, b, eps, residual=None):
    """As layer_norm_chunks, a row shared by programs that all run at once: two on each SM, however many registers."""
    y, mean, rstd, rows, total, stride = _results(x, residual)
    parts = layer_norm_parts(rows)
    if y.numel():
        partials = torch.full((rows.M, parts.parts), -1, dtype=torch.int64, device=x.device)
        for blocking in waits():
            layer_norm_split_kernel[(rows.M * parts.parts,)](
                x, w, b, y, mean, rstd, residual, total, partials, rows.M, rows.N, x.stride(0), stride, y.stride(0),
                eps, parts.parts, parts.slots, parts.block, blocking,
                common_multiple_of(rows.N, x.stride(0), stride, y.stride(0)), num_warps=parts.warps,
            )  # fmt: skip
    return (y, mean, rstd) if total is None else (y, mean, rstd, total)


@triton.jit
def layer_norm_shifted_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, residual_ptr, total_ptr,  # as above
    partials_ptr,  # as above; not used by one part
    N, stride_x, stride_residual, stride_y, eps,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) // PARTS
    part = tl.program_id(0) % PARTS
    begin = row * stride_x
    at, inside = whole_chunks(begin, N, part, LANES, WIDTH)
    side, mine = sides(begin, N, part, WIDTH)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    edge = tl.load(x_ptr + side, mask=mine, other=0.0)
    to, _ = whole_chunks(row * stride_y, N, part, LANES, WIDTH)
    to_side = row * stride_y + (side - begin)
    if residual_ptr is not None:
        residual_at, _ = whole_chunks(row * stride_residual, N, part, LANES, WIDTH)
        x = added(x, tl.load(residual_ptr + residual_at, mask=inside, other=0.0))
        residual_side = row * stride_residual + (side - begin)
        edge = added(edge, tl.load(residual_ptr + residual_side, mask=mine, other=0.0))
        tl.store(total_ptr + to, x, mask=inside)
        tl.store(total_ptr + to_side, edge, mask=mine)
    edge = edge.to(tl.float32)
    whole = tl.maximum(N // WIDTH - 1, 0)
    here = tl.minimum(tl.maximum(whole - part * LANES, 0), LANES) * WIDTH
    count = tl.maximum(here + tl.where(part == 0, N - whole * WIDTH, 0), 1).to(tl.float32)
    mean = mean_of(tl.sum(tl.sum(x.to(tl.float32), axis=1), axis=0) + tl.sum(edge, axis=0), count)
    centred = opaque(x).to(tl.float32) - mean
    squares = tl.where(inside, tl.sum(centred * centred, axis=1, keep_dims=True), 0.0)  # a chunk is inside as a whole
    beside = tl.where(mine, edge - mean, 0.0)
    m2 = tl.sum(tl.sum(squares, axis=1), axis=0) + tl.sum(beside * beside, axis=0)
    if PARTS > 1:
        publish(partials_ptr + row * PARTS + part, pack_pair(mean, m2))
        slots = tl.arange(0, SLOTS)
        partials = tl.zeros([SLOTS], tl.int64) - 1
        if WAIT:
            while tl.max((partials == -1).to(tl.int32), axis=0) == 1:
                partials = look(partials_ptr + row * PARTS + slots, slots < PARTS, 0)
        # Parts are merged by Chan, Golub and LeVeque (1979), eq. 1.5; a slot past the last part counts nothing.
        counts = tl.minimum(tl.maximum(whole - slots * LANES, 0), LANES) * WIDTH
        counts = (counts + tl.where(slots == 0, N - whole * WIDTH, 0)).to(tl.float32)
        means, m2s = unpack_pair(partials)
        mean = mean_of(tl.sum(means * counts, axis=0), N)
        delta = means - mean
        m2 = tl.sum(m2s + delta * delta * counts, axis=0)
    rstd = tl.rsqrt(m2 / N + eps)
    if part == 0:
        tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)
    y = (opaque(x).to(tl.float32) - mean) * rstd * beside_chunks(w_ptr, begin, part, inside, LANES, WIDTH)
    if b_ptr is not None:
        y += beside_chunks(b_ptr, begin, part, inside, LANES, WIDTH)
    tl.store(y_ptr + to, y, mask=inside)
    tl.store(y_ptr + to_side, normalize(edge, mean, rstd, w_ptr, b_ptr, side - begin, mine), mask=mine)


def layer_norm_shifted_parts(rows: Rows) -> Split:
    """64 bytes of x a thread: beside w and b in fp32 it takes 152 registers, with which an SM has room for 12 warps."""
    return shifted(rows, thread_bytes=64, most_warps=2)


def layer_norm_shifted(x, w, b, eps, residual=None):
    """As layer_norm_split, or one program a row, for an odd number of 16-bit elements: see `whole_chunks`."""
    y, mean, rstd, rows, total, stride = _results(x, residual)
    parts = layer_norm_shifted_parts(rows)
    if y.numel():
        tensors = x, w, b, y, mean, rstd, residual, total
        numbers = x.stride(0), stride, y.stride(0), eps
        launch_shifted(layer_norm_shifted_kernel, rows, parts, -1, torch.int64, tensors, numbers)
    return (y, mean, rstd) if total is None else (y, mean, rstd, total)


@triton.jit
def layer_norm_two_pass_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, N, stride_x, eps, BLOCK: tl.constexpr, MULTIPLE: tl.constexpr
):  # shapes as above
    N, stride_x = multiple(N, MULTIPLE), multiple(stride_x, MULTIPLE)
    row = tl.program_id(0).to(tl.int64)
    # Distances from the first element: a running mean of 50 would round away what 500 chunks add to it.
    first = tl.load(x_ptr + row * stride_x).to(tl.float32)
    count, mean, m2, latest = 0.0, 0.0, 0.0, 0.0
    for step in range(tl.cdiv(N, BLOCK)):
        cols = step * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=0.0).to(tl.float32) - first
        chunk_count = tl.minimum(N - step * BLOCK, BLOCK).to(tl.float32)
        chunk_mean = tl.sum(tl.where(cols < N, x, 0.0), axis=0) / chunk_count
        centred = tl.where(cols < N, x - chunk_mean, 0.0)
        delta = chunk_mean - mean
        apart = delta * delta * (count * chunk_count / (count + chunk_count))
        m2, latest = add_step(m2, latest, step, tl.sum(centred * centred, axis=0) + apart)
        count += chunk_count
        mean += delta * (chunk_count / count)
    mean += first
    rstd = tl.rsqrt((m2 + latest) / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N)
        tl.store(y_ptr + row * N + cols, normalize(x, mean, rstd, w_ptr, b_ptr, cols, cols < N), mask=cols < N)


def layer_norm_two_pass(x, w, b, eps):
    """As layer_norm_tile, a program a row of any length."""
    y, mean, rstd, rows, _, _ = _results(x)
    if y.numel():
        layer_norm_two_pass_kernel[(rows.M,)](
            x, w, b, y, mean, rstd, rows.N, x.stride(0), eps, BLOCK=4096,
            MULTIPLE=common_multiple_of(rows.N, x.stride(0)), num_warps=8,
        )  # fmt: skip
    return y, mean, rstd


def _results(x, residual=None):
    """y, mean, rstd, rows; and of a sum that is normalised: total, and the distance of residual's rows."""
    rows = Rows.of(x)
    total = None if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(rows.M, dtype=torch.float32, device=x.device) for _ in range(2))
    if not rows.N:  # the mean of nothing
        mean.fill_(math.nan), rstd.fill_(math.nan)
    return y, mean, rstd, rows, total, 0 if residual is None else residual.stride(0)


# Backward. With x_hat = (x - mean) rstd, g = dy w, and c1, c2 the means over the row of g x_hat and of g:
#     dx = rstd (g - x_hat c1 - c2)      dw = sum over rows of dy x_hat      db = sum over rows of dy
#
# As many programs as the GPU runs at once walk over the rows; dw and db of all their rows stay in fp32 registers.


@triton.jit
def layer_norm_backward_kernel(
    dy_ptr, x_ptr,  # [M, N] each, rows stride_dy and stride_x elements apart
    w_ptr,  # [N]
    mean_ptr, rstd_ptr,  # [M] each, fp32
    dx_ptr,  # [M, N]
    partial_dw_ptr, partial_db_ptr,  # [programs, N] each, fp32; partial_db_ptr is None without a bias, here and below
    M, N, stride_dy, stride_x, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_dy, stride_x = multiple(N, MULTIPLE), multiple(stride_dy, MULTIPLE), multiple(stride_x, MULTIPLE)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    cols = tl.arange(0, BLOCK_N)[None, :]
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0)
    dw = tl.zeros((ROWS, BLOCK_N), tl.float32)
    db = tl.zeros((ROWS, BLOCK_N), tl.float32)
    rows = program * ROWS + tl.arange(0, ROWS)[:, None]
    next_dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=(rows < M) & (cols < N), other=0.0)
    next_x = tl.load(x_ptr + rows * stride_x + cols, mask=(rows < M) & (cols < N), other=0.0)
    for _ in range(program, tl.cdiv(M, ROWS), programs):
        mask = (rows < M) & (cols < N)
        dy, x = next_dy.to(tl.float32), next_x.to(tl.float32)
        after = rows + programs * ROWS
        next_dy = tl.load(dy_ptr + after * stride_dy + cols, mask=(after < M) & (cols < N), other=0.0)
        next_x = tl.load(x_ptr + after * stride_x + cols, mask=(after < M) & (cols < N), other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        x_hat = (x - tl.load(mean_ptr + rows, mask=rows < M, other=0.0)) * rstd
        g = dy * w.to(tl.float32)
        c1, c2 = row_sums(g, x_hat)
        tl.store(dx_ptr + rows * N + cols, rstd * (g - x_hat * (c1 / N) - c2 / N), mask=mask)
        dw += dy * x_hat
        db += dy
        rows = after
    tl.store(partial_dw_ptr + program * N + cols, tl.sum(dw, axis=0, keep_dims=True), mask=cols < N)
    if partial_db_ptr is not None:
        tl.store(partial_db_ptr + program * N + cols, tl.sum(db, axis=0, keep_dims=True), mask=cols < N)


@triton.jit
def row_sums(g, x_hat):
    """Both sums of a row in one reduction, so that the warps meet once."""
    c1, c2 = tl.split(tl.sum(tl.join(g * x_hat, g), axis=1))  # [ROWS, BLOCK_N, 2] -> [ROWS] each
    return c1[:, None], c2[:, None]


def layer_norm_backward_registers(dy, x, w, mean, rstd, bias):
    """dy, x [M, N], w [N], mean, rstd [M] -> dx, dw, db (None without bias); the next rows wait in registers."""
    dx, dw, db, rows = _gradients(x, w, bias)
    if dx.numel():
        # 16 elements per thread: dw and db take 32 of its registers; 128 in all leave room for 512 threads on an SM.
        # If rows are short, few programs add up the partial sums: fewer of these, from one program of twice the size.
        tile = max(1, (4096 if rows.N <= 512 else 2048) // rows.block)
        warps = tile * rows.block // 512
        programs = min(triton.cdiv(rows.M, tile), rows.sms * (1 if rows.N <= 512 else max(1, 16 // warps)))
        partial_dw, partial_db = partial_sums(programs, x, bias)
        layer_norm_backward_kernel[(programs,)](
            dy, x, w, mean, rstd, dx, partial_dw, partial_db, rows.M, rows.N, dy.stride(0), x.stride(0),
            tile, rows.block, common_multiple_of(rows.N, dy.stride(0), x.stride(0)), num_warps=warps, maxnreg=128,
        )  # fmt: skip
        sum_partials(partial_dw, partial_db, dw, db)
    return dx, dw, db


def layer_norm_backward_walk(dy, x, w, mean, rstd, bias):
    """As layer_norm_backward_registers; the next rows are on their way to shared memory. N <= 8192."""
    dx, _, dw, db = norm_backward_walk(dy, x, w, mean, rstd, bias)
    return dx, dw, db


def layer_norm_backward_group(dy, x, w, mean, rstd, bias):
    """As layer_norm_backward_walk for rows of any length, in one launch where all parts of a row run at once."""
    dx, _, dw, db = norm_backward_group(dy, x, w, mean, rstd, bias)
    return dx, dw, db


def layer_norm_backward_shifted(dy, x, w, mean, rstd, bias):
    """As layer_norm_backward_walk and layer_norm_backward_group, with 16-byte loads of rows that start anywhere."""
    dx, _, dw, db = norm_backward_shifted(dy, x, w, mean, rstd, bias)
    return dx, dw, db


def _gradients(x, w, bias):
    rows = Rows.of(x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw, db = (torch.zeros_like(w) if rows.M == 0 else torch.empty_like(w) for _ in range(2))  # a sum of no rows is 0
    return dx, dw, db if bias else None, rows
