"""y = gelu(x W^T + bias) + residual with the epilogue in the matmul's registers, and what its backward adds."""

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from course_ops._common import (
    architecture,
    cdiv,
    fitting_stages,
    num_sms,
    roomy,
    starts_early,
    tma_takes,
    triton_interprets,
)
from course_ops._launch import describing, launcher
from course_ops.kernels import matmul_skinny
from course_ops.kernels._matmul_plan import aligned_rows, tma_plan
from course_ops.kernels._tiles import swizzled_tile

# gelu(z) = z / (1 + exp2(LINEAR z + CUBIC z^3)): the tanh form with its constants folded.
LINEAR = tl.constexpr(-2 * math.sqrt(2 / math.pi) * math.log2(math.e))
CUBIC = tl.constexpr(LINEAR.value * 0.044715)
LN2 = tl.constexpr(math.log(2))
INTERPRETED = tl.constexpr(triton_interprets())


@triton.jit
def gelu(z):
    return z / (1 + tl.exp2(z * (z * z * CUBIC + LINEAR)))  # far below 0 exp2 is inf, and z / inf is -0


@triton.jit
def gelu_16_bits(z):
    """By one special function, tanh itself, to 11 bits: enough for a result in 16 bits. The interpreter has no PTX."""
    if INTERPRETED:
        return gelu(z)
    u = z * (z * z * 0.0356774081 + 0.7978845608)  # sqrt(2 / pi) (z + 0.044715 z^3)
    t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1)
    return 0.5 * z * t + 0.5 * z


# gelu(z) = z s with s = 1 / (1 + exp2(g)), g = LINEAR z + CUBIC z^3; ds/dz = -s (1 - s) ln(2) dg/dz.
@triton.jit
def gelu_slope(z):
    s = 1 / (1 + tl.exp2(z * (z * z * CUBIC + LINEAR)))
    return s - z * s * (1 - s) * (z * z * (3 * CUBIC) + LINEAR) * LN2


# A program a tile. Sum, bias and residual meet in fp32, and the result is rounded once. SAVE: z for the backward.
@triton.jit
def pointers_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, z_ptr,  # [M, K], [N, K], [N], [M, N] each
    M, N, K, stride_x, stride_w, stride_r,
    BIAS: tl.constexpr, GELU: tl.constexpr, RESIDUAL: tl.constexpr, SAVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = swizzled_tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, 8)
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + rows * stride_x + ks, mask=(rows < M) & (ks < K), other=0.0)
        w = tl.load(w_ptr + cols * stride_w + ks[:, None], mask=(cols < N) & (ks[:, None] < K), other=0.0)
        z = tl.dot(x, w, z, input_precision="ieee")  # exact fp32, also where PyTorch may take TF32
    mask = (rows < M) & (cols < N)
    if BIAS:
        z += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    if SAVE:
        tl.store(z_ptr + rows * N + cols, z.to(z_ptr.dtype.element_ty), mask=mask)
    if GELU:
        z = gelu(z)
    if RESIDUAL:
        z += tl.load(residual_ptr + rows * stride_r + cols, mask=mask).to(tl.float32)
    tl.store(y_ptr + rows * N + cols, z.to(y_ptr.dtype.element_ty), mask=mask)


# Persistent: a program an SM walks over tiles; TMA brings operands and residual and takes y and z, in halves of a tile.
@triton.jit
def tma_kernel(
    x_desc, w_desc, bias_ptr, residual_desc, y_desc, z_desc, M, N, K,
    BIAS: tl.constexpr, GELU: tl.constexpr, RESIDUAL: tl.constexpr, SAVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = swizzled_tile(tile, M, N, BLOCK_M, BLOCK_N, 8)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(x_desc.load([row, k]), w_desc.load([col, k]).T, acc)
        halves = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        for half in tl.static_range(2):
            start = col + half * (BLOCK_N // 2)
            cols = start + tl.arange(0, BLOCK_N // 2)
            z = halves[half]
            if BIAS:
                z += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
            if SAVE:
                z_desc.store([row, start], z.to(z_desc.dtype))
            if GELU:
                z = gelu_16_bits(z)
            if RESIDUAL:
                z += residual_desc.load([row, start]).to(tl.float32)
            y_desc.store([row, start], z.to(y_desc.dtype))


@triton.jit
def epilogue_kernel(
    x_ptr, bias_ptr, residual_ptr, y_ptr, z_ptr, M, N, stride_r,  # [M, N] fp32, [N], [M, N] each
    BIAS: tl.constexpr, GELU: tl.constexpr, RESIDUAL: tl.constexpr, SAVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
    tiles_n = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * N + cols, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    if SAVE:
        tl.store(z_ptr + rows * N + cols, x.to(z_ptr.dtype.element_ty), mask=mask)
    if GELU:
        x = gelu(x)
    if RESIDUAL:
        x += tl.load(residual_ptr + rows * stride_r + cols, mask=mask).to(tl.float32)
    tl.store(y_ptr + rows * N + cols, x, mask=mask)


Run = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]  # x, w, bias, residual, z to y


def prepare_pointers(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, z: Tensor | None, gelu: bool
) -> Run:
    """x [M, K], w [N, K], bias [N], residual [M, N] -> y [M, N]; x W^T + bias goes to z, a contiguous [M, N].

    The last stride of each is 1. Returns a function of tensors that lie as these do.
    """
    (M, K), N = x.shape, w.shape[0]
    if not M or not N:
        return lambda x, *_: x.new_empty(M, N)
    # 128 bytes of K a step; 3 stages of 32 KB, so that two programs fit on an SM of Hopper.
    go = launcher(pointers_kernel, (cdiv(M, 128) * cdiv(N, 128),), num_warps=8, num_stages=3)
    sizes = M, N, K, x.stride(0), w.stride(0), 0 if residual is None else residual.stride(0)
    sizes += *_parts(bias, residual, z, gelu), 128, 128, 128 // x.element_size()

    def run(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, z: Tensor | None) -> Tensor:
        y = x.new_empty(M, N)
        go(x, w, bias, residual, y, z, *sizes)
        return y

    return run


def prepare_tma(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, z: Tensor | None, gelu: bool
) -> Run:
    """As prepare_pointers, in 16 bits, for what tma_fits()."""
    (M, K), N, sms = x.shape, w.shape[0], num_sms(x.device)
    block_n = tile_width(x, w)
    stages = 3 if block_n == 256 else 4
    stored = 1 + (residual is not None) + (z is not None)
    stages = fitting_stages(stages, 2 * (128 + block_n) * 64, x.device, beside=stored * 128 * block_n)
    grid = (min(sms, cdiv(M, 128) * cdiv(N, block_n)),)
    go = launcher(tma_kernel, grid, num_warps=8, num_stages=stages)
    sizes = M, N, K, *_parts(bias, residual, z, gelu), 128, block_n, 64
    of_x, of_w = (
        describing(TensorDescriptor, (M, K), x.stride(), [128, 64]),
        describing(TensorDescriptor, (N, K), w.stride(), [block_n, 64]),
    )
    half = [128, block_n // 2]
    of_y = describing(TensorDescriptor, (M, N), (N, 1), half)
    of_residual = of_y if residual is None else describing(TensorDescriptor, (M, N), residual.stride(), half)

    def run(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, z: Tensor | None) -> Tensor:
        y = x.new_empty(M, N)
        outer = of_residual(y if residual is None else residual), of_y(y), of_y(y if z is None else z)
        go(of_x(x), of_w(w), bias, *outer, *sizes)
        return y

    return run


def _parts(bias: Tensor | None, residual: Tensor | None, z: Tensor | None, gelu: bool) -> tuple[bool, bool, bool, bool]:
    """The kernels' BIAS, GELU, RESIDUAL and SAVE."""
    return bias is not None, gelu, residual is not None, z is not None


def tile_width(x: Tensor, w: Tensor) -> int:
    """Columns of tma_kernel's tile, which has 128 rows.

    128 x 256 needs the fewest bytes from L2, and twice as many tiles of 128 x 128 use more SMs: the model decides.
    """
    if not roomy(x.device):
        return 128
    return tma_plan(len(x), len(w), x.shape[1], aligned_rows(x), aligned_rows(w), num_sms(x.device)).block_n


def tma_fits(x: Tensor, w: Tensor, residual: Tensor | None) -> bool:
    """Whether tma_kernel takes them: 16 bits, TMA, and rows that begin at multiples of 16 bytes, of y too."""
    tensors = (x, w) if residual is None else (x, w, residual)
    return (
        x.element_size() == 2
        and architecture(x.device) >= 90
        and len(w) % 8 == 0
        and len(w) > 0
        and tma_takes(*tensors)
    )


def prepare_few_rows(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, z: Tensor | None, gelu: bool
) -> Run:
    """As prepare_pointers, by matmul_skinny and a kernel for the epilogue, which is cheap for few rows."""
    M, N = x.shape[0], w.shape[0]
    product = matmul_skinny.prepare(x, w.t(), torch.float32)  # z is rounded once, as in the other kernels
    if not M or not N:
        return lambda x, *_: x.new_empty(M, N)
    early = starts_early(x.device)
    go = launcher(epilogue_kernel, (cdiv(M, 8) * cdiv(N, 512),), launch_pdl=early)
    sizes = M, N, 0 if residual is None else residual.stride(0), *_parts(bias, residual, z, gelu), 8, 512, early

    def run(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, z: Tensor | None) -> Tensor:
        y = x.new_empty(M, N)
        go(product(x, w), bias, residual, y, z, *sizes)
        return y

    return run


# A program walks down its columns and adds up dz while it has it in registers. The sums are of values that were never
# rounded to 16 bits, and in the same order every time: no atomics. EARLY_SUM: the kernel that adds up the partial sums
# starts now, and waits for this one's end.
@triton.jit
def dz_and_sums_kernel(
    dy_ptr, z_ptr, dz_ptr, partial_ptr, M, N, stride_dy,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EARLY_SUM: tl.constexpr,
):  # fmt: skip
    # dy, z, dz [M, N]; partial [programs, N] in fp32: the sums over every row that a program visits
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(tl.program_id(1) * BLOCK_M, M, tl.num_programs(1) * BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
        mask = (rows < M) & (cols < N)
        z = tl.load(z_ptr + rows * N + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        dz = dy * gelu_slope(z)
        tl.store(dz_ptr + rows * N + cols, dz, mask=mask)
        total += dz
    if EARLY_SUM:
        gdc_launch_dependents()
    partial = partial_ptr + tl.program_id(1) * N + cols
    tl.store(partial, tl.sum(total, axis=0, keep_dims=True), mask=cols < N)


@triton.jit
def column_sums_kernel(
    dz_ptr, partial_ptr, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EARLY_SUM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # dz [M, N]; partial [programs, N] in fp32, as above
    if EARLY:
        gdc_wait()
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(tl.program_id(1) * BLOCK_M, M, tl.num_programs(1) * BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
        total += tl.load(dz_ptr + rows * N + cols, mask=(rows < M) & (cols < N), other=0.0).to(tl.float32)
    if EARLY_SUM:
        gdc_launch_dependents()
    partial = partial_ptr + tl.program_id(1) * N + cols
    tl.store(partial, tl.sum(total, axis=0, keep_dims=True), mask=cols < N)


# For few rows: dW is written while dz is in registers. A program owns BLOCK_N rows of dW, and one of every
# tl.num_programs(1) blocks of their columns. Programs of the same rows compute the same dz, and the first stores it.
@triton.jit
def dz_sums_and_dw_kernel(
    x_desc, dw_desc, dy_ptr, z_ptr, dz_ptr, sums_ptr,  # [M, K], [N, K], [M, N] three times, [N]; z, dz may be None
    M, N, K, stride_dy, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    rows, cols = tl.arange(0, BLOCK_M)[:, None].to(tl.int64), first + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    dz = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
    if z_ptr is not None:
        dz *= gelu_slope(tl.load(z_ptr + rows * N + cols, mask=mask, other=0.0).to(tl.float32))
    if tl.program_id(1) == 0:
        if z_ptr is not None:
            tl.store(dz_ptr + rows * N + cols, dz, mask=mask)
        tl.store(sums_ptr + cols, tl.sum(dz, axis=0, keep_dims=True), mask=cols < N)
    dz = dz.to(dw_desc.dtype).T
    for k in range(tl.program_id(1) * BLOCK_K, K, tl.num_programs(1) * BLOCK_K):
        dw_desc.store([first, k], tl.dot(dz, x_desc.load([0, k])).to(dw_desc.dtype))


def outer_fits(x: Tensor, weight: Tensor) -> bool:
    """Whether prepare_outer takes them: 16 bits, TMA, and few rows of x."""
    return (
        len(x) <= 128
        and min(*x.shape, len(weight)) > 0
        and x.element_size() == 2
        and architecture(x.device) >= 90
        and tma_takes(x)
        and x.shape[1] % 8 == 0
    )


def prepare_outer(
    dy: Tensor, x: Tensor, z: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]:
    """As prepare_gelu_backward with dW = dz^T x in the same launch, for what outer_fits(): dz, its sums and dW.

    Without z, dz is dy. Returns a function of tensors that lie as dy, x and z do.
    """
    (M, N), K = dy.shape, x.shape[1]
    block_m, block_n, block_k = max(16, triton.next_power_of_2(M)), 64, 128
    down, across = cdiv(N, block_n), cdiv(K, block_k)
    parts = min(across, cdiv(4 * num_sms(x.device), down))  # about four programs an SM: one stores while others load
    sizes = M, N, K, dy.stride(0), block_m, block_n, block_k
    go = launcher(dz_sums_and_dw_kernel, (down, parts), num_stages=2)
    of_x = describing(TensorDescriptor, (M, K), x.stride(), [block_m, block_k])
    of_dw = describing(TensorDescriptor, (N, K), (K, 1), [block_n, block_k])

    def run(dy: Tensor, x: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        dz, sums, dw = None if z is None else x.new_empty(M, N), x.new_empty(N), x.new_empty(N, K)
        go(of_x(x), of_dw(dw), dy, z, dz, sums, *sizes)
        return dy if dz is None else dz, sums, dw

    return run


def prepare_gelu_backward(dy: Tensor, z: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """dy [M, N] with unit last stride, z [M, N] contiguous -> dz = dy gelu'(z) and its sums over rows, in z's dtype.

    Returns a function of tensors that lie as these do.
    """
    M, N = z.shape
    if not z.numel():
        return lambda dy, z: (torch.empty_like(z), z.new_zeros(N))
    block_m, block_n, warps = _block(M, N, num_sms(z.device))
    rows = _partial_rows(z, block_m)
    sizes = M, N, dy.stride(0), block_m, block_n, rows > 1 and starts_early(z.device)
    go = launcher(dz_and_sums_kernel, (cdiv(N, block_n), rows), num_warps=warps)
    partial, total = _prepare_sums(z, rows)

    def run(dy: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        dz, sums = z.new_empty(M, N), partial(z)
        go(dy, z, dz, sums, *sizes)
        return dz, total(sums)

    return run


def prepare_column_sums(dz: Tensor) -> Callable[[Tensor], Tensor]:
    """The sums over the rows of a contiguous [M, N], added in fp32, in its dtype: a function of what lies as dz."""
    M, N = dz.shape
    if not dz.numel():
        return lambda dz: dz.new_zeros(N)
    block_m, block_n, warps = _block(M, N, num_sms(dz.device))
    rows = _partial_rows(dz, block_m)
    sizes = M, N, block_m, block_n, rows > 1 and starts_early(dz.device), False
    go = launcher(column_sums_kernel, (cdiv(N, block_n), rows), num_warps=warps)
    partial, total = _prepare_sums(dz, rows)

    def run(dz: Tensor) -> Tensor:
        sums = partial(dz)
        go(dz, sums, *sizes)
        return total(sums)

    return run


def _block(M: int, N: int, sms: int) -> tuple[int, int, int]:
    """Rows and columns of a step, and warps.

    Up to 128 rows one program has all rows of its columns. Narrow steps then make more programs, down to 32 columns.
    Up to 512 rows too, if the matrix is small: a second launch that adds partial sums would take longer than its reads.
    """
    if 128 < M <= 512 and cdiv(N, 16) <= 2 * sms:
        return (256, 16, 4) if M <= 256 else (512, 16, 8)
    return (128, 32, 4) if M <= 128 and cdiv(N, 128) < sms else (32, 128, 4)


def _partial_rows(z: Tensor, block_m: int) -> int:
    """How many programs add up a column: about 8 programs an SM in all, each with a row of partial sums.

    Up to 128 rows, or as many as a block has, one program walks down each column: to add up a few rows takes longer
    than to read them.
    """
    M, N = z.shape
    most = 1 if max(128, block_m) >= M else 8 * num_sms(z.device) // max(1, cdiv(N, 128))
    return max(1, min(cdiv(M, 32), most))


def _prepare_sums(z: Tensor, rows: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """What makes room for partial sums [rows, N], and what adds them up. A single row is the result."""
    N, dtype = z.shape[1], z.dtype
    if rows == 1:
        return lambda z: z.new_empty(N), lambda sums: sums
    early = starts_early(z.device)
    go, sizes = launcher(column_sums_kernel, (cdiv(N, 32), 1), launch_pdl=early), (rows, N, 128, 32, False, early)

    def total(sums: Tensor) -> Tensor:
        result = sums.new_empty(N, dtype=dtype)
        go(sums, result, *sizes)
        return result

    return lambda z: z.new_empty(rows, N, dtype=torch.float32), total
