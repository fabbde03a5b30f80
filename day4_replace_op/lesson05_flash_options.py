"""Flash attention for models: causal, windows, grouped heads, any length, width and stride
=======================================================================================
What a model asks of attention beside softmax(Q K^T) V, and what each of it should cost:

    causal              query i of S_q sees keys j <= i + S_k - S_q: aligned at the lower right corner, so that the last
                        query sees all keys, as with a cache of keys (flash-attn since 2.1 does so too; PyTorch's
                        is_causal aligns at the upper left, which is the same only if S_q = S_k). Half of the FLOPs.
    window              at most the last `window` keys up to one's own position: S window FLOPs instead of S^2 / 2
    grouped heads       H query heads share H_kv heads of K and V (GQA; MQA if H_kv = 1): less K and V to read and keep
    any S_q, S_k, D     tails masked; D up to 256, padded to a power of two on the chip, never in memory
    any strides         [B, S, H, D] as a projection leaves it, seen through transpose(1, 2), without a copy
    lse                 [B, H, S_q] in fp32, natural logarithm: what the backward (5), split keys (7) and rings (8) need

A query that sees no key (S_q > S_k, causal) gets zeros and lse = -inf, not NaN: an empty sum is 0.

Masks are cheap only where there are none. For S = 4096, tiles of 128 x 128 and causal, a program visits 32 blocks if it
masks all of them, 16.5 on average if it skips those wholly in the future, and masks 1 of these. Predicted: skipping
1.94 times as fast, masking only the edge saves two of 5.5 instructions a score (lesson 4: 256 of 3904 cycles, 7%), and
starting the longest programs first spares the SMs a last round in which only long ones run.

The tile is not chosen by timing, as lesson 4's is, but fixed: 128 x 128 in three stages, which at D = 128 fill shared
memory (Q 32 KB, K and V 3 * 64 KB). With two stages the loads of a block start only when the block before the last one
is done with its stage. Lesson 4's `tma` has two, its `flash_v2` three: day 5's lesson 8 shows what that costs.

You will learn: loop bounds that replace masks, alignment of unequal lengths, empty rows, an order for uneven programs.
Run it:    python day4_replace_op/lesson05_flash_options.py
Check it:  python -m lessonkit check lesson05_flash_options
Time it:   python -m lessonkit bench lesson05_flash_options
"""

import math
from unittest import mock

from lessonkit import DEVICE, About, Lesson, Mutant, Unsupported, device, tma_takes
from lessonkit.modes.interpreter import watched

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from problems.attention import PROBLEM, expect_heads, inputs, precision, visible

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
# Where a maximum starts. Not -inf: as long as a row has seen no key, -inf - -inf would make it NaN for good.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def load_tile(source, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    """Rows from `row` on of a head of a [B, H, S, D] tensor; zeros past S and D, which add nothing to a product."""
    if TMA:
        return source.load([b, h, row, 0]).reshape(ROWS, BLOCK_D)
    else:
        ptrs, inside = tile_ptrs(source, strides, b, h, row, S, D, ROWS, BLOCK_D)
        return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def store_tile(target, x, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        target.store([b, h, row, 0], x.to(target.dtype).reshape(1, 1, ROWS, BLOCK_D))
    else:
        ptrs, inside = tile_ptrs(target, strides, b, h, row, S, D, ROWS, BLOCK_D)
        tl.store(ptrs, x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def tile_ptrs(base, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    rows, cols = row + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    # int64 before each stride: any of these may pass 2^31
    head = base + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    ptrs = head + rows.to(tl.int64) * strides[2] + cols.to(tl.int64) * strides[3]
    return ptrs, (rows < S) & (cols < D)


@triton.jit
def seen(rows, keys, S_k, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether this key is one of this query's, of rows [:, None] and keys [None, :] or the other way round."""
    ahead = keys - (rows + offset)
    mask = keys < S_k
    if CAUSAL:
        mask = mask & (ahead <= 0)
    if WINDOW:
        mask = mask & (ahead > -window)
    return mask


@triton.jit
def place(B, H, S_q, HEADS, BLOCK_M: tl.constexpr, LONGEST_FIRST: tl.constexpr):
    """The batch, the head and the first query of a program."""
    tiles = tl.cdiv(S_q, BLOCK_M)
    program = tl.program_id(0)
    if LONGEST_FIRST:
        group = program // (HEADS * tiles)
        within = program - group * HEADS * tiles
        heads = tl.minimum(HEADS, B * H - group * HEADS)
        head, tile = group * HEADS + within % heads, tiles - 1 - within // heads
    else:
        head, tile = program // tiles, program % tiles
    return head // H, head % H, tile * BLOCK_M


@triton.jit
def attend(
    acc, total, m, q_tile, k, v, k_strides, v_strides, b, h_kv, rows, start_at, stop_at, S_k, D, offset, window,
    scale_log2, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys of some blocks into acc [BLOCK_M, BLOCK_D], total and m [BLOCK_M]; m in powers of 2 (lesson 4)."""
    for start in range(start_at, stop_at, BLOCK_N):
        k_tile = load_tile(k, k_strides, b, h_kv, start, S_k, D, BLOCK_N, BLOCK_D, TMA)
        s = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
        if MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            s = tl.where(seen(rows[:, None], keys[None, :], S_k, offset, window, CAUSAL, WINDOW), s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
        p = tl.exp2(s * scale_log2 - m_new[:, None])
        old = tl.exp2(m - m_new)
        v_tile = load_tile(v, v_strides, b, h_kv, start, S_k, D, BLOCK_N, BLOCK_D, TMA)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * old[:, None], input_precision=PRECISION)
        total = total * old + tl.sum(p, axis=1)
        m = m_new
    return acc, total, m


@triton.jit
def bounds(
    row, S_q, S_k, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SKIP: tl.constexpr, EDGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(begin, first, last, end): keys from begin to end are seen by a query of the tile, those from first to last, in
    whole blocks, by all of them."""
    begin, end = 0, S_k
    if SKIP and CAUSAL:
        end = tl.minimum(S_k, tl.minimum(row + BLOCK_M, S_q) + offset)  # what the last query of the tile sees
    if SKIP and WINDOW:
        begin = tl.maximum(0, row + offset - window + 1) // BLOCK_N * BLOCK_N  # what the first one sees
    first, last = begin, begin
    if EDGES:
        last = (tl.minimum(S_k, tl.maximum(0, row + offset + 1)) if CAUSAL else S_k) // BLOCK_N * BLOCK_N
    if EDGES and WINDOW:
        first = tl.cdiv(tl.maximum(0, row + BLOCK_M + offset - window), BLOCK_N) * BLOCK_N
        last = tl.maximum(first, last)
    return begin, first, last, end


# The kernel of all rungs; SKIP, EDGES, LONGEST_FIRST and TMA are what rungs 2, 3, 4 and 5 switch on.
@triton.jit
def attention_kernel(
    q, k, v, o,  # [B, H, S_q, D], twice [B, H_kv, S_k, D], [B, H, S_q, D]: pointers, or descriptors if TMA
    lse_ptr,  # [B, H, S_q] in fp32
    q_strides, k_strides, v_strides, o_strides,
    scale_log2, window, B, H, S_q, S_k, D, GROUP, HEADS, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SKIP: tl.constexpr, EDGES: tl.constexpr, LONGEST_FIRST: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b, h, row = place(B, H, S_q, HEADS, BLOCK_M, LONGEST_FIRST)
    rows = row + tl.arange(0, BLOCK_M)
    offset = S_k - S_q
    edges = bounds(row, S_q, S_k, offset, window, CAUSAL, WINDOW, SKIP, EDGES, BLOCK_M, BLOCK_N)
    q_tile = load_tile(q, q_strides, b, h, row, S_q, D, BLOCK_M, BLOCK_D, TMA)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for part in tl.static_range(3):  # the window's edge, the blocks without masks, the diagonal and the tail
        if part == 2 or (EDGES and (part == 1 or WINDOW)):
            acc, total, m = attend(
                acc, total, m, q_tile, k, v, k_strides, v_strides, b, h // GROUP, rows,
                edges[part], tl.minimum(edges[part + 1], edges[3]), S_k, D, offset, window, scale_log2,
                CAUSAL, WINDOW, part != 1, TMA, BLOCK_N, BLOCK_D, PRECISION,
            )  # fmt: skip
    empty = total == 0
    store_tile(o, acc / tl.where(empty, 1.0, total)[:, None], o_strides, b, h, row, S_q, D, BLOCK_M, BLOCK_D, TMA)
    lse = tl.where(empty, -float("inf"), (m + tl.log2(total)) * LN2)
    tl.store(lse_ptr + (tl.cast(b, tl.int64) * H + h) * S_q + rows, lse, mask=rows < S_q)


# Rung 1. Every block of keys is visited and masked. Predicted: causal attention costs as much as full attention.
def masked(q, k, v, causal=False, window=None, scale=None):
    """q [B, H, S_q, D], k and v [B, H_kv, S_k, D], any strides -> o as q, lse [B, H, S_q] in fp32."""
    return _run(q, k, v, causal, window, scale, 0)


# Rung 2. New: bounds of the loop from the tile's first and last query. Predicted: of 32 blocks at S = 4096 16.5 are
# left; with a window of 1024 9 at most.
def skipped(q, k, v, causal=False, window=None, scale=None):
    """As masked."""
    return _run(q, k, v, causal, window, scale, 1)


# Rung 3. New: the loop in three, of which the middle one, nearly all blocks, has no mask. Predicted: 7% less.
def edges(q, k, v, causal=False, window=None, scale=None):
    """As masked."""
    return _run(q, k, v, causal, window, scale, 2)


# Rung 4. New: programs start in the order of their number, so numbers go to the longest ones first. In rung 3 the last
# tile of the last head, the longest, starts when all others have ended or are about to: at S = 16384 and 16 heads that
# is 128 blocks beside 8256 / 132 * 16 = 1000 for each SM, 12%. Longest first, what comes last is one block. But all
# heads at once would not fit into L2: as many as do.
def longest_first(q, k, v, causal=False, window=None, scale=None):
    """As masked."""
    return _run(q, k, v, causal, window, scale, 3)


# Rung 5. New: descriptors, where the tensors allow, as in lesson 4: four dimensions, so that strides are the TMA's
# business, and so is the padding of D.
def attention(q, k, v, causal=False, window=None, scale=None):
    """softmax(scale q k^T) v, and the logsumexp of each row.

    q [B, H, S_q, D], k and v [B, H_kv, S_k, D] in fp32, fp16 or bf16, any strides, D up to 256, H a multiple of H_kv.
    causal: query i sees keys up to i + S_k - S_q. window: of these only the last `window`; needs causal.
    scale: positive; 1 / sqrt(D) if None. A query that sees no key gets zeros, and -inf as lse.
    Returns o [B, H, S_q, D] in q's dtype and, where they are dense, in the order of its strides; lse [B, H, S_q] in
    fp32, natural logarithm. Raises TypeError, ValueError for what is not so.
    """
    return _run(q, k, v, causal, window, scale, 4)


def _run(q, k, v, causal, window, scale, features):
    scale = expect_heads(q, k, v, causal, window, scale)
    (B, H, S_q, D), (_, H_kv, S_k, _) = q.shape, k.shape
    o, lse = torch.empty_like(q), torch.empty(B, H, S_q, device=q.device)
    if not o.numel():
        return o, lse
    tma = features > 3 and device.architecture() >= 90 and tma_takes(q, k, v, o)
    (block_m, block_n, warps, stages), block_d = _tile(q), max(16, triton.next_power_of_2(D))
    group = H // H_kv
    at_once = min(B * H, group * _at_once(2 * S_k * block_d * q.element_size()))
    attention_kernel[(B * H * triton.cdiv(S_q, block_m),)](
        *_tiled((q, k, v, o), (block_m, block_n, block_n, block_m), tma), lse,
        q.stride(), k.stride(), v.stride(), o.stride(), scale * LOG2E.value, window or 0,
        B, H, S_q, S_k, D, group, at_once, causal, window is not None,
        features > 0, features > 1, features > 2 and causal, tma, block_m, block_n, block_d, precision(),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return o, lse


def _tiled(tensors, rows, tma):
    """Descriptors of [B, H, S, D] tensors for tiles of so many rows each, or the tensors."""
    if not tma:
        return tensors
    block_d = max(16, triton.next_power_of_2(tensors[0].shape[-1]))
    return [TensorDescriptor.from_tensor(t, [1, 1, n, block_d]) for t, n in zip(tensors, rows, strict=True)]


def _at_once(bytes_a_head):
    """How many heads to work on at a time, so that what their programs share, bytes_a_head each, fills half of L2."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size if device.HAS_GPU else 2**16 if device.INTERPRETED else 2**26
    return max(1, l2 // 2 // max(1, bytes_a_head))


def _tile(q):
    """Queries, keys, warps and stages: the scores and O in registers, the stages in shared memory."""
    if q.element_size() == 4:
        return (64, 64, 8, 1) if q.shape[-1] <= 128 else (32, 32, 4, 1)
    if q.shape[-1] > 128:
        return (128, 64, 8, 2) if device.roomy() else (64, 32, 4, 2)
    return (128, 128, 8, 3) if device.roomy() else (128, 64, 4 if q.shape[-1] <= 64 else 8, 2)


def only_seen_blocks_cost(rung):
    """FLOPs and bytes read are those of the blocks in which somebody sees something, counted from the mask."""
    if not device.INTERPRETED:
        raise Unsupported("FLOPs and bytes are counted in the interpreter")
    for S, S_k, causal, window in ((256, 512, False, None), (300, 600, True, None), (520, 520, True, 100)):
        args = inputs(1, 1, S, 16, S_k=S_k, causal=causal, window=window, dtype=torch.float16)
        block_m, block_n, *_ = _tile(args[0])
        mask = visible(S, S_k, causal, window, DEVICE)
        blocks = [b.any() for rows in mask.split(block_m) for b in rows.split(block_n, dim=1)]
        visited = len(blocks) if rung is masked else int(sum(blocks))
        flops, read = _counted(lambda args=args: rung(*args))
        assert flops == 4 * visited * block_m * block_n * 16
        assert read <= (S + 2 * visited * block_n) * 16 * 2  # a tail is read only as far as it goes


def _counted(call):
    """(FLOPs of the products, bytes read) of a call, in the interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder

    native, flops = InterpreterBuilder.create_dot, 0

    def create_dot(self, a, b, *rest):
        nonlocal flops
        flops += 2 * math.prod(a.data.shape) * b.data.shape[1]
        return native(self, a, b, *rest)

    with mock.patch.object(InterpreterBuilder, "create_dot", create_dot), watched() as traffic:
        call()
    return flops, traffic.read


# fmt: off
WRONG = (
    Mutant("aligned at the upper left", "attention_kernel", "offset = S_k - S_q", "offset = 0 * S_k", "attention"),
    Mutant("the window's first block left out", "bounds", "row + offset - window + 1", "row + offset", "edges"),
    Mutant("the window's edge is not masked", "bounds", "row + BLOCK_M + offset - window",
           "row + offset - window", "edges"),
    Mutant("the diagonal is not masked", "bounds", "row + offset + 1", "row + BLOCK_M + offset", "edges"),
    Mutant("a block too few", "bounds", "row + BLOCK_M, S_q) + offset", "row + BLOCK_M, S_q) + offset - 1",
           "skipped"),
    Mutant("a maximum that begins at -inf", "attention_kernel", "LOWEST, tl", '-float("inf"), tl', "masked", "nan"),
    Mutant("heads dealt out in turn", "attention_kernel", "h // GROUP, rows", "h % (H // GROUP), rows",
           "attention"),
    Mutant("the last group as large as the others", "place", "tl.minimum(HEADS, B * H - group * HEADS)", "HEADS",
           "longest_first", "out of bounds"),
)
# fmt: on

LESSON = Lesson(
    about=About(
        teaches="causal, windows, grouped heads, D to 256, any length and stride, lse; blocks skipped, edges "
        "masked, order",
        hours=1.5,
        star=True,
        operator="attention",
    ),
    problem=PROBLEM,
    rungs=(masked, skipped, edges, longest_first, attention),
    wrong=WRONG,
    claims={masked: ("wgmma",), edges: ("wgmma", "cp.async"), attention: ("wgmma", "tma")},
    # Four parts: Q and O, and K and V 3 times, or 6 of 9 blocks of them; lse is 1/33 of it all.
    passes={masked: (2 + 6 + 0.125) / 4.125, edges: (2 + 4 + 0.125) / 4.125, attention: (2 + 4 + 0.125) / 4.125},
    properties=(only_seen_blocks_cost, *PROBLEM.properties),
)

if __name__ == "__main__":
    LESSON.main()
