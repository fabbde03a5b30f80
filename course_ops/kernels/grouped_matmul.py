"""y[rows of e] = x[rows of e] @ w[e] in one launch: programs find their group by a search in the offsets."""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from course_ops._common import architecture, fitting_stages, fp32_precision, num_sms, roomy, tma_takes
from course_ops.kernels._tiles import multiply_tile, swizzled_tile


@triton.jit
def bounds(offsets_ptr, expert, T):
    """The group's first row and the row after its last, within 0 to T whatever the offsets are."""
    begin, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    return tl.minimum(tl.maximum(begin, 0), T), tl.minimum(tl.maximum(end, 0), T)


# The host, which does not know the offsets, cannot refuse rows of no group. Usually there are none, and this is two
# loads and a branch; clearing all of y before would be 2 T N bytes more.
@triton.jit
def zero_rows_of_no_group(y_ptr, offsets_ptr, T, N, E):
    """Zero rows 0 to offsets[0] and offsets[E] to T of y; programs of the grid's first axis stride over them."""
    begin, _ = bounds(offsets_ptr, 0, T)
    _, end = bounds(offsets_ptr, E - 1, T)
    before, count = begin.to(tl.int64) * N, (begin + T - end).to(tl.int64) * N  # elements: rows of y are contiguous
    for start in range(tl.program_id(0).to(tl.int64) * 1024, count, tl.num_programs(0) * 1024):
        elements = start + tl.arange(0, 1024)
        elements = tl.where(elements < before, elements, elements + (end - begin).to(tl.int64) * N)
        tl.store(y_ptr + elements, 0.0, mask=start + tl.arange(0, 1024) < count)


@triton.jit
def tile_ends(offsets_ptr, T, N, E, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MOST: tl.constexpr):
    """[MOST], a power of two no less than E: how many tiles the groups up to this one have."""
    experts = tl.arange(0, MOST)
    begin = tl.load(offsets_ptr + experts, mask=experts < E, other=0)
    end = tl.load(offsets_ptr + experts + 1, mask=experts < E, other=0)
    size = tl.maximum(tl.minimum(end, T) - tl.maximum(begin, 0), 0)
    return tl.cumsum(tl.cdiv(size, BLOCK_M) * tl.cdiv(N, BLOCK_N))


@triton.jit
def find(tile, ends, offsets_ptr, T, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whose tile is it? -> expert, first and last row of the group, tile (row, column) within the group."""
    before = ends <= tile
    expert = tl.sum(before.to(tl.int32))
    begin, end = bounds(offsets_ptr, expert, T)
    tile_m, tile_n = swizzled_tile(tile - tl.max(tl.where(before, ends, 0)), end - begin, N, BLOCK_M, BLOCK_N, 8)
    return expert, begin, end, tile_m, tile_n


@triton.jit
def multiply_group(
    x_ptr, w_ptr, y_ptr, expert, begin, end, tile_m, tile_n, N, K, strides,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    stride_xt, stride_xk, stride_we, stride_wk, stride_wn = strides
    multiply_tile(
        x_ptr + begin.to(tl.int64) * stride_xt, w_ptr + expert.to(tl.int64) * stride_we, y_ptr + begin.to(tl.int64) * N,
        tile_m, tile_n, end - begin, N, K, stride_xt, stride_xk, stride_wk, stride_wn, N,
        BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip


# Persistent: programs stride over the tiles of all groups, by pointers.
@triton.jit
def pointers_kernel(
    x_ptr, w_ptr, offsets_ptr, y_ptr,  # [T, K], [E, K, N], [E + 1], [T, N]
    T, N, K, strides, E,  # strides of x along T and K, of w along E, K and N
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    zero_rows_of_no_group(y_ptr, offsets_ptr, T, N, E)
    ends = tile_ends(offsets_ptr, T, N, E, BLOCK_M, BLOCK_N, MOST)
    for tile in range(tl.program_id(0), tl.max(ends), tl.num_programs(0)):
        found = find(tile, ends, offsets_ptr, T, N, BLOCK_M, BLOCK_N)
        multiply_group(x_ptr, w_ptr, y_ptr, *found, N, K, strides, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)


# A tile of x may run into the next group: harmless, since a row of y depends on its own row of x. The store must stop
# at the group's end, so it has a mask and no TMA.
@triton.jit
def tma_kernel(
    x_desc, w_desc, offsets_ptr, y_ptr, T, N, K, E, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    MOST: tl.constexpr, W_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    zero_rows_of_no_group(y_ptr, offsets_ptr, T, N, E)
    ends = tile_ends(offsets_ptr, T, N, E, BLOCK_M, BLOCK_N, MOST)
    for tile in tl.range(tl.program_id(0), tl.max(ends), tl.num_programs(0), flatten=True):
        expert, begin, end, tile_m, tile_n = find(tile, ends, offsets_ptr, T, N, BLOCK_M, BLOCK_N)
        row, column = begin + tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            x = x_desc.load([row, k])
            if W_TRANSPOSED:  # [E, N, K] in memory
                w = w_desc.load([expert, column, k]).reshape(BLOCK_N, BLOCK_K).T
            else:
                w = w_desc.load([expert, k, column]).reshape(BLOCK_K, BLOCK_N)
            acc = tl.dot(x, w, acc)
        rows = row + tl.arange(0, BLOCK_M)[:, None]
        columns = column + tl.arange(0, BLOCK_N)[None, :]
        mask = (rows < end) & (columns < N)
        tl.store(y_ptr + rows.to(tl.int64) * N + columns, acc.to(y_ptr.dtype.element_ty), mask=mask)


def grouped_pointers(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """x [T, K], w [E, K, N], any strides, offsets [E + 1] int32 -> y [T, N]; rows of no group are zeros."""
    (T, K), (E, _, N), y = x.shape, w.shape, x.new_empty(x.shape[0], w.shape[2])
    block_m, block_n, block_k, warps = _tile(x, E)
    # Two programs fit on an SM of Hopper if the compiler is told to take 128 registers; elsewhere it would spill.
    options = {"maxnreg": 128} if architecture(x.device) == 90 else {}
    pointers_kernel[(min(2 * num_sms(x.device), _most_tiles(T, E, N, block_m, block_n)),)](
        x, w, offsets, y, T, N, K, x.stride() + w.stride(), E, block_m, block_n, block_k, fp32_precision(),
        triton.next_power_of_2(E), num_warps=warps, num_stages=3, **options,
    )  # fmt: skip
    return y


def grouped_tma(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """As grouped_pointers, for what tma_fits()."""
    (T, K), (E, _, N), y = x.shape, w.shape, x.new_empty(x.shape[0], w.shape[2])
    block_m, block_n, block_k, warps = _tile(x, E)
    block_n = 256 if block_m == 128 and roomy(x.device) else block_n  # without addresses in registers it fits there
    transposed = _transposed(w)
    x_desc = TensorDescriptor.from_tensor(x, [block_m, block_k])
    w_desc = TensorDescriptor.from_tensor(
        w.transpose(1, 2) if transposed else w, [1, block_n, block_k] if transposed else [1, block_k, block_n]
    )
    programs = num_sms(x.device) * (1 if block_m >= 64 else 2)
    tma_kernel[(min(programs, _most_tiles(T, E, N, block_m, block_n)),)](
        x_desc, w_desc, offsets, y, T, N, K, E, block_m, block_n, block_k,
        triton.next_power_of_2(E), transposed, num_warps=warps,
        num_stages=fitting_stages(4, 2 * (block_m + block_n) * block_k, x.device),
    )  # fmt: skip
    return y


def tma_fits(x: Tensor, w: Tensor) -> bool:
    """16 bits, TMA, and x and w (or its transpose) with rows at multiples of 16 bytes."""
    stored = w.transpose(1, 2) if _transposed(w) else w
    return x.element_size() == 2 and architecture(x.device) >= 90 and tma_takes(x, stored)


def _transposed(w: Tensor) -> bool:
    return w.stride(1) == 1 and w.stride(2) != 1


def _most_tiles(T: int, E: int, N: int, block_m: int, block_n: int) -> int:
    """Each group wastes less than one tile, so so many are enough for whatever the offsets are."""
    return (T // block_m + E) * triton.cdiv(N, block_n)


def _tile(x: Tensor, E: int) -> tuple[int, int, int, int]:
    """block_m, block_n, block_k, warps: as high as an average group, from 16 to 128 rows."""
    if x.element_size() == 4:  # no tensor cores: sums and operands take more registers
        return 64, 64, 32, 8
    block_m = min(128, max(16, triton.next_power_of_2(x.shape[0] // max(E, 1))))
    return block_m, 128, 64, 8 if block_m == 128 else 4
