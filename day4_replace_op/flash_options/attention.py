"""Rung 5: TMA where the strides allow it, else pointers. A descriptor has four dimensions, so TMA applies the strides
and pads D.
"""

import math

from lessonkit import device, tma_takes

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from problems.attention import expect_heads, precision

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
# Where a maximum starts. Not -inf: as long as a row has seen no key, -inf - -inf would make it NaN for good.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def load_tile(source, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    """ROWS rows of a head of a [B, H, S, D] tensor; zeros past S and D, which add nothing to a matmul."""
    if TMA:  # New
        return source.load([b, h, row, 0]).reshape(ROWS, BLOCK_D)
    else:
        ptrs, inside = tile_ptrs(source, strides, b, h, row, S, D, ROWS, BLOCK_D)
        return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def store_tile(target, x, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    if TMA:  # New
        target.store([b, h, row, 0], x.to(target.dtype).reshape(1, 1, ROWS, BLOCK_D))
    else:
        ptrs, inside = tile_ptrs(target, strides, b, h, row, S, D, ROWS, BLOCK_D)
        tl.store(ptrs, x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def tile_ptrs(base, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to ROWS rows of a head of a [B, H, S, D] tensor, and which of them are inside of it."""
    rows, cols = row + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    # int64 before each stride: any of these may pass 2^31
    head = base + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    ptrs = head + rows.to(tl.int64) * strides[2] + cols.to(tl.int64) * strides[3]
    return ptrs, (rows < S) & (cols < D)


@triton.jit
def visible(rows, keys, S_k, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether each query of rows [:, None] sees each key of keys [None, :]."""
    ahead = keys - (rows + offset)
    mask = keys < S_k
    if CAUSAL:
        mask = mask & (ahead <= 0)
    if WINDOW:
        mask = mask & (ahead > -window)
    return mask


@triton.jit
def bounds(
    row, S_q, S_k, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(begin, first, last, end): keys from begin to end are seen by a query of the tile, those from first to last, in
    whole blocks, by all of them."""
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


# A program owns BLOCK_M queries of a head. GROUP heads of Q share a head of K and V. HEADS heads of Q are worked on at
# a time; `group` numbers these sets of HEADS heads.
@triton.jit
def attention_kernel(
    q_source, k_source, v_source, o_target,  # [B, H, S_q, D], twice [B, H_kv, S_k, D]: descriptors, or pointers
    lse_ptr,  # [B, H, S_q] in fp32
    q_strides, k_strides, v_strides, o_strides,
    scale_log2, window, B, H, S_q, S_k, D, GROUP, HEADS, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S_q, BLOCK_M)
    program = tl.program_id(0)
    if CAUSAL:  # the last tiles of HEADS heads, then the tiles before these; then the next heads
        group = program // (HEADS * tiles)
        within = program - group * HEADS * tiles
        width = tl.minimum(HEADS, B * H - group * HEADS)
        head, nth = group * HEADS + within % width, tiles - 1 - within // width
    else:
        head, nth = program // tiles, program % tiles
    b, h, row = head // H, head % H, nth * BLOCK_M
    rows = row + tl.arange(0, BLOCK_M)
    offset = S_k - S_q
    limits = bounds(row, S_q, S_k, offset, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    q = load_tile(q_source, q_strides, b, h, row, S_q, D, BLOCK_M, BLOCK_D, TMA)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    h_kv = h // GROUP
    # 0 the window's edge, 1 the blocks that every query sees, which need no mask, 2 the diagonal and the tail
    for part in tl.static_range(3):
        if part > 0 or WINDOW:
            for start in range(limits[part], tl.minimum(limits[part + 1], limits[3]), BLOCK_N):
                k = load_tile(k_source, k_strides, b, h_kv, start, S_k, D, BLOCK_N, BLOCK_D, TMA)
                s = tl.dot(q, k.T, input_precision=PRECISION)
                if part != 1:
                    keys = start + tl.arange(0, BLOCK_N)
                    mask = visible(rows[:, None], keys[None, :], S_k, offset, window, CAUSAL, WINDOW)
                    s = tl.where(mask, s, -float("inf"))
                m_new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
                p = tl.exp2(s * scale_log2 - m_new[:, None])
                alpha = tl.exp2(m - m_new)
                v = load_tile(v_source, v_strides, b, h_kv, start, S_k, D, BLOCK_N, BLOCK_D, TMA)
                acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
                l = l * alpha + tl.sum(p, axis=1)
                m = m_new
    empty = l == 0
    o = acc / tl.where(empty, 1.0, l)[:, None]
    store_tile(o_target, o, o_strides, b, h, row, S_q, D, BLOCK_M, BLOCK_D, TMA)
    lse = tl.where(empty, -float("inf"), (m + tl.log2(l)) * LN2)
    tl.store(lse_ptr + (tl.cast(b, tl.int64) * H + h) * S_q + rows, lse, mask=rows < S_q)


def attention(q, k, v, causal=False, window=None, scale=None):
    """softmax(scale q k^T) v, and the logsumexp of each row.

    q [B, H, S_q, D], k and v [B, H_kv, S_k, D] in fp32, fp16 or bf16, any strides, D up to 256, H a multiple of H_kv.

    - causal: query i sees keys up to i + S_k - S_q.
    - window: of these keys a query sees only the last `window`. It needs causal=True.
    - scale: positive. None stands for 1 / sqrt(D).

    A query that sees no key gets zeros, and -inf as lse. Returns o [B, H, S_q, D] in q's dtype, and, if they are dense,
    in the order of q's strides; lse [B, H, S_q] in fp32, natural logarithm. Raises TypeError or ValueError for an
    argument that is not as said here.
    """
    scale = expect_heads(q, k, v, causal, window, scale)
    (B, H, S_q, D), (H_kv, S_k) = q.shape, k.shape[1:3]
    o, lse = torch.empty_like(q), torch.empty(B, H, S_q, device=q.device)
    if not o.numel():
        return o, lse
    (block_m, block_n, warps, stages), block_d = tile(q), max(16, triton.next_power_of_2(D))
    group, tma = H // H_kv, device.architecture() >= 90 and tma_takes(q, k, v, o)
    heads = min(B * H, group * at_once(2 * S_k * block_d * q.element_size()))
    attention_kernel[(B * H * triton.cdiv(S_q, block_m),)](
        *_descriptors((q, k, v, o), (block_m, block_n, block_n, block_m), tma), lse,
        q.stride(), k.stride(), v.stride(), o.stride(), scale * LOG2E.value, window or 0, B, H, S_q, S_k, D, group,
        heads, causal, window is not None, tma, block_m, block_n, block_d, precision(), num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    return o, lse


def _descriptors(tensors, rows, tma):
    """New: what TMA has to know of each [B, H, S, D] tensor and of a tile of so many rows; the tensors without TMA."""
    if not tma:
        return tensors
    block_d = max(16, triton.next_power_of_2(tensors[0].shape[-1]))
    return [TensorDescriptor.from_tensor(t, [1, 1, n, block_d]) for t, n in zip(tensors, rows, strict=True)]


def at_once(bytes_a_head):
    """How many K heads to work on at a time, so that their K and V, bytes_a_head each, fill half of L2."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size if device.HAS_GPU else 2**16 if device.INTERPRETED else 2**26
    return max(1, l2 // 2 // max(1, bytes_a_head))


def tile(q):
    """Queries, keys, warps and stages: the scores and O in registers, the stages in shared memory."""
    if q.element_size() == 4:
        return (64, 64, 8, 1) if q.shape[-1] <= 128 else (32, 32, 4, 1)
    if q.shape[-1] > 128:
        return (128, 64, 8, 2) if device.roomy() else (64, 32, 4, 2)
    return (128, 128, 8, 3) if device.roomy() else (128, 64, 4 if q.shape[-1] <= 64 else 8, 2)
