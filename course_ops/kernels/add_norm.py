"""Residual addition and LayerNorm in one kernel, and both gradients in one.

The residual stream may be fp32 while the branch that is added to it, and the norm's result, have 16 bits.
"""

import torch
import triton
import triton.language as tl

from course_ops.kernels._norm_backward import norm_backward_group, norm_backward_walk, partial_sums, sum_partials
from course_ops.kernels._norm_backward_shifted import norm_backward_shifted
from course_ops.kernels._rows import Rows, common_multiple_of, mean_by_division, multiple
from course_ops.kernels.layer_norm import layer_norm_chunks, layer_norm_shifted, layer_norm_split, normalize, row_sums


@triton.jit
def add_norm_kernel(
    residual_ptr, x_ptr, w_ptr, b_ptr,  # [M, N] twice, rows stride_residual and stride_x apart, [N], [N] or None
    total_ptr, y_ptr, mean_ptr, rstd_ptr,  # [M, N], [M, N], [M] and [M] in fp32
    M, N, stride_residual, stride_x, eps, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_x = multiple(N, MULTIPLE), multiple(stride_x, MULTIPLE)
    stride_residual = multiple(stride_residual, MULTIPLE)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    residual = tl.load(residual_ptr + rows * stride_residual + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    # Rounded to the stream's dtype before it is normalised: forward and backward see the same values.
    total = (residual + x).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + rows * N + cols, total, mask=mask)
    mean = mean_by_division(tl.sum(total.to(tl.float32), axis=1, keep_dims=True), N)
    centred = tl.where(cols < N, total.to(tl.float32) - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / N + eps)
    y = normalize(total, mean, rstd, w_ptr, b_ptr, cols, cols < N)
    tl.store(y_ptr + rows * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + rows, mean, mask=rows < M)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)


def add_norm_packed(x, residual, w, b, eps):
    """x, residual [M, N], w and b [N] -> y as x, residual + x as residual, mean and rstd [M] in fp32; N <= 8192."""
    rows = Rows.of(x)
    total, y = (torch.empty(x.shape, dtype=t.dtype, device=x.device) for t in (residual, x))
    mean, rstd = (torch.empty(rows.M, dtype=torch.float32, device=x.device) for _ in range(2))
    if y.numel():
        tile = max(1, 2048 // rows.block)  # 16 elements per thread, two rows of 768 for 4 warps
        add_norm_kernel[(triton.cdiv(rows.M, tile),)](
            residual, x, w, b, total, y, mean, rstd, rows.M, rows.N, residual.stride(0), x.stride(0), eps,
            tile, rows.block, common_multiple_of(rows.N, residual.stride(0), x.stride(0)),
            num_warps=tile * rows.block // 512,
        )  # fmt: skip
    elif rows.M:
        mean.fill_(torch.nan), rstd.fill_(torch.nan)  # the mean of nothing
    return y, total, mean, rstd


def add_norm_chunks(x, residual, w, b, eps):
    """As add_norm_packed: a row is a list of chunks of a program's threads. N <= 16384."""
    y, mean, rstd, total = layer_norm_chunks(x, w, b, eps, residual)
    return y, total, mean, rstd


def add_norm_split(x, residual, w, b, eps):
    """As add_norm_packed, a row shared by programs that all run at once."""
    y, mean, rstd, total = layer_norm_split(x, w, b, eps, residual)
    return y, total, mean, rstd


def add_norm_shifted(x, residual, w, b, eps):
    """As add_norm_split, or one program a row, for an odd number of elements, of 16 bits in x: see `whole_chunks`."""
    y, mean, rstd, total = layer_norm_shifted(x, w, b, eps, residual)
    return y, total, mean, rstd


# dresidual = dtotal + rstd (g - x_hat mean(g x_hat) - mean(g)), g = dy w: dtotal is read where this is made, and it
# leaves in both dtypes. Otherwise the LayerNorm's backward: programs that walk over rows, dw and db in registers.
@triton.jit
def add_norm_backward_kernel(
    dtotal_ptr, dy_ptr, total_ptr, w_ptr, mean_ptr, rstd_ptr,  # [M, N] three times, [N], [M], [M]
    dresidual_ptr, dx_ptr, partial_dw_ptr, partial_db_ptr,  # [M, N], [M, N], [programs, N] twice, fp32
    M, N, stride_dtotal, stride_dy, stride_total,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_dtotal = multiple(N, MULTIPLE), multiple(stride_dtotal, MULTIPLE)
    stride_dy, stride_total = multiple(stride_dy, MULTIPLE), multiple(stride_total, MULTIPLE)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    cols = tl.arange(0, BLOCK_N)[None, :]
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    dw = tl.zeros((ROWS, BLOCK_N), tl.float32)
    db = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for tile in tl.range(program, tl.cdiv(M, ROWS), programs, num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)[:, None]  # int64, as program is
        mask = (rows < M) & (cols < N)
        dtotal = tl.load(dtotal_ptr + rows * stride_dtotal + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        total = tl.load(total_ptr + rows * stride_total + cols, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        x_hat = (total - mean) * rstd  # in the padding dy is 0, and so is every product below
        g = dy * w
        c1, c2 = row_sums(g, x_hat)
        dx = dtotal + rstd * (g - x_hat * (c1 / N) - c2 / N)
        tl.store(dresidual_ptr + rows * N + cols, dx.to(dresidual_ptr.dtype.element_ty), mask=mask)
        tl.store(dx_ptr + rows * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += dy * x_hat
        db += dy
    tl.store(partial_dw_ptr + program * N + cols, tl.sum(dw, axis=0, keep_dims=True), mask=cols < N)
    if partial_db_ptr is not None:
        tl.store(partial_db_ptr + program * N + cols, tl.sum(db, axis=0, keep_dims=True), mask=cols < N)


def add_norm_backward_packed(dy, dtotal, total, w, mean, rstd, bias):
    """dy as x, dtotal and total as residual, all [M, N] -> dx, dresidual, dw, db (None without bias); N <= 2048."""
    rows = Rows.of(total)
    dx, dresidual = (torch.empty(total.shape, dtype=t.dtype, device=total.device) for t in (dy, total))
    dw, db = (torch.zeros_like(w) if rows.M == 0 else torch.empty_like(w) for _ in range(2))
    db = db if bias else None
    if dx.numel():
        tile = max(1, 1024 // rows.block)
        # 8 elements per thread: dw and db are 16 of its registers, and 96 in all leave room for 20 warps on an SM.
        warps = tile * rows.block // 256
        programs = min(triton.cdiv(rows.M, tile), rows.sms * (20 // warps))
        partial_dw, partial_db = partial_sums(programs, total, bias)
        add_norm_backward_kernel[(programs,)](
            dtotal, dy, total, w, mean, rstd, dresidual, dx, partial_dw, partial_db, rows.M, rows.N,
            dtotal.stride(0), dy.stride(0), total.stride(0), tile, rows.block, 3,
            common_multiple_of(rows.N, dtotal.stride(0), dy.stride(0), total.stride(0)),
            num_warps=warps, maxnreg=96,
        )  # fmt: skip
        sum_partials(partial_dw, partial_db, dw, db)
    return dx, dresidual, dw, db


def add_norm_backward_walk(dy, dtotal, total, w, mean, rstd, bias):
    """As add_norm_backward_packed, up to 8192 columns: a list of chunks has few idle lanes."""
    return norm_backward_walk(dy, total, w, mean, rstd, bias, dtotal)


def add_norm_backward_group(dy, dtotal, total, w, mean, rstd, bias):
    """As add_norm_backward_packed for rows of any length, in one launch where all parts of a row run at once."""
    return norm_backward_group(dy, total, w, mean, rstd, bias, dtotal)


def add_norm_backward_shifted(dy, dtotal, total, w, mean, rstd, bias):
    """As add_norm_backward_walk and add_norm_backward_group, with 16-byte loads of rows that start anywhere."""
    return norm_backward_shifted(dy, total, w, mean, rstd, bias, dtotal)
