"""What the attention kernels share: tiles of [B, H, S, D] tensors, which keys a query sees, the order of programs."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from course_ops._common import runs_gluon, tma_takes, triton_interprets

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
# Where a row maximum starts. -inf would make -inf - -inf = NaN of a row that has seen no key yet.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


def tile_descriptors(tensors, tiles, tma):
    """Descriptors of [B, H, S, D] tensors for tiles of so many (rows, columns) each if tma, else the tensors."""
    if not tma:
        return tensors
    return [TensorDescriptor.from_tensor(t, [1, 1, *tile]) for t, tile in zip(tensors, tiles, strict=True)]


def tile_width(D: int) -> int:
    """Columns of a tile that holds rows of D: a power of two, and at least 16 for tensor cores."""
    return max(16, triton.next_power_of_2(D))


def tile_widths(k: Tensor, v: Tensor) -> tuple[int, int]:
    """Columns of a tile of K and of a tile of V. In 16 bits unequal ones are 64 or more: rows of 128 bytes or more.

    wgmma reads narrower rows in another layout of shared memory. Loads that are not asynchronous put both tiles at one
    place, one after the other. If the layouts differ, ptxas 12.8 loses V's address: it reads a register that nothing
    has written.
    """
    widths = tile_width(k.shape[-1]), tile_width(v.shape[-1])
    if widths[0] == widths[1] or k.element_size() > 2:
        return widths
    return max(64, widths[0]), max(64, widths[1])


def heads_in_l2(bytes_per_head: int, device: torch.device) -> int:
    """How many heads to work on at a time, so that the bytes that their programs share fill half of L2."""
    if device.type == "cuda":
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
    else:
        l2 = 2**16 if triton_interprets() else 2**26
    return max(1, l2 // 2 // max(1, bytes_per_head))


def even_groups(heads: int, most: int) -> int:
    """How many heads to work on at a time: in no more groups than with `most` at a time, and in groups of about one
    size. After a small last group the GPU would have too few tiles at the end, and these would be the longest."""
    return triton.cdiv(heads, max(1, triton.cdiv(heads, most)))


def score_scales(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """(a, None) if the exponent of a score s is a s, in powers of 2; (a, b) if it is a tanh(b s), with a softcap."""
    if softcap is None:
        return scale * LOG2E.value, None
    return softcap * LOG2E.value, scale / softcap


def empty_out(q: Tensor, D_v: int) -> Tensor:
    """out [B, H, S_q, D_v] in the order of q's strides."""
    B, H, S_q, D = q.shape
    if D_v == D:
        return torch.empty_like(q)
    if q.stride(1) < q.stride(2):  # heads beside each other in memory, as a projection leaves them
        return q.new_empty(B, S_q, H, D_v).transpose(1, 2)
    return q.new_empty(B, H, S_q, D_v)


def empty_results(q: Tensor, D_v: int) -> tuple[Tensor, Tensor]:
    """out as empty_out has it, and lse [B, H, S_q] in fp32."""
    return empty_out(q, D_v), torch.empty(q.shape[:-1], device=q.device)


def hopper_takes(longest: int, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> bool:
    """Hopper, 16 bits, D and D_v multiples of 8 and at most `longest`, at least one row, strides that TMA takes."""
    D, D_v = q.shape[-1], v.shape[-1]  # each other tensor has rows of one of them
    fits = q.element_size() == 2 and max(D, D_v) <= longest and D % 8 == D_v % 8 == 0
    return runs_gluon(q) and fits and tma_takes(q, k, v, *others)


@triton.jit
def tanh(x):
    """In fp32. Below 0.3 by its series, since there 1 - exp(-2 x) has lost digits."""
    y, e = x * x, tl.exp2(tl.abs(x) * (-2 * LOG2E))
    series = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    large = (1 - e) / (1 + e)
    return tl.where(y < 0.09, series, tl.where(x < 0, -large, large))


@triton.jit
def capped(s, cap_scale):
    """Scores, or with a softcap their tanh, see score_scales."""
    if cap_scale is not None:
        s = tanh(s * cap_scale)
    return s


@triton.jit
def online_softmax(s, m, scale_log2):
    """P of a block's scores, the rows' new maximum in powers of 2, and alpha, by which sums so far are multiplied."""
    m_new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
    p = tl.exp2(s * scale_log2 - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    return p, m_new, alpha


@triton.jit
def tile_ptrs(base, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers [ROWS, BLOCK_D] to rows of a head of a [B, H, S, D] tensor, and which of them are inside."""
    rows, cols = row + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    # int64 before each stride: any of these may pass 2^31
    head = base + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    ptrs = head + rows.to(tl.int64) * strides[2] + cols.to(tl.int64) * strides[3]
    return ptrs, (rows < S) & (cols < D)


@triton.jit
def load_tile(source, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    """Rows from `row` on of a head of a [B, H, S, D] tensor; zeros past S and D, which add nothing to a matmul."""
    if TMA:
        return source.load([b, h, row, 0]).reshape(ROWS, BLOCK_D)
    else:
        ptrs, inside = tile_ptrs(source, strides, b, h, row, S, D, ROWS, BLOCK_D)
        return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def store_tile(target, x, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    """Write x [ROWS, BLOCK_D] to rows from `row` on of a head, as far as S and D go."""
    if TMA:
        target.store([b, h, row, 0], x.to(target.dtype).reshape(1, 1, ROWS, BLOCK_D))
    else:
        ptrs, inside = tile_ptrs(target, strides, b, h, row, S, D, ROWS, BLOCK_D)
        tl.store(ptrs, x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def visible(rows, keys, S_k, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether a query sees a key. rows [:, None] and keys [None, :], or transposed; offset = S_k - S_q."""
    ahead = keys - (rows + offset)
    mask = keys < S_k
    if CAUSAL:
        mask = mask & (ahead <= 0)
    if WINDOW:
        mask = mask & (ahead > -window)
    return mask


@triton.jit
def tile_of_program(B, H, S, HEADS_AT_ONCE, ROWS: tl.constexpr, LONGEST_FIRST: tl.constexpr):
    """The batch, the head and the first row of a program's tile. Programs start in the order of their numbers."""
    tiles = tl.cdiv(S, ROWS)
    program = tl.program_id(0)
    if LONGEST_FIRST:
        group = program // (HEADS_AT_ONCE * tiles)
        within = program - group * HEADS_AT_ONCE * tiles
        heads = tl.minimum(HEADS_AT_ONCE, B * H - group * HEADS_AT_ONCE)  # the last group may have fewer
        head, tile = group * HEADS_AT_ONCE + within % heads, tiles - 1 - within // heads
    else:
        head, tile = program // tiles, program % tiles
    return head // H, head % H, tile * ROWS


@triton.jit
def key_bounds(
    row, S_q, S_k, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(begin, first, last, end): some query of the tile sees keys begin to end; all see first to last, whole blocks."""
    begin, end = 0, S_k
    if CAUSAL:
        end = tl.minimum(S_k, tl.minimum(row + BLOCK_M, S_q) + offset)  # what the last query of the tile sees
    if WINDOW:
        begin = tl.maximum(0, row + offset - window + 1) // BLOCK_N * BLOCK_N  # what the first one sees
    first = begin
    last = (tl.minimum(S_k, tl.maximum(0, row + offset + 1)) if CAUSAL else S_k) // BLOCK_N * BLOCK_N
    if WINDOW:
        first = tl.cdiv(tl.maximum(0, row + BLOCK_M + offset - window), BLOCK_N) * BLOCK_N
        last = tl.maximum(first, last)
    return begin, first, last, end
