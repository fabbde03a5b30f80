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
1.94 times as fast, masking only the edge saves two of 5.5 instructions a score (lesson 3: 256 of 3904 cycles, 7%), and
starting the longest programs first spares the SMs a last round in which only long ones run.

You will learn: loop bounds that replace masks, alignment of unequal lengths, empty rows, an order for uneven programs.
Run it:    python day4_replace_op/lesson04_flash_options.py
Check it:  python -m lessonkit check lesson04_flash_options
Time it:   python -m lessonkit bench lesson04_flash_options
"""

import math

from lessonkit import DEVICE, Lesson, Mutant, Unsupported, case, device, tma_takes

import torch
import triton
import triton.language as tl

from day3_matmul_tk.lesson01_matmul import precision
from day4_replace_op import heads
from day4_replace_op.heads import LN2, LOG2E, LOWEST, inputs, load_tile, reference, seen, store_tile


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
    """Take the keys of some blocks into acc [BLOCK_M, BLOCK_D], total and m [BLOCK_M]; m in powers of 2 (lesson 3)."""
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


# Rung 5. New: descriptors, where the tensors allow, as in lesson 3: four dimensions, so that strides are the TMA's
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
    scale = heads.expect_heads(q, k, v, causal, window, scale)
    (B, H, S_q, D), (_, H_kv, S_k, _) = q.shape, k.shape
    o, lse = torch.empty_like(q), torch.empty(B, H, S_q, device=q.device)
    if not o.numel():
        return o, lse
    tma = features > 3 and device.architecture() >= 90 and tma_takes(q, k, v, o)
    (block_m, block_n, warps, stages), block_d = _tile(q), max(16, triton.next_power_of_2(D))
    group = H // H_kv
    at_once = min(B * H, group * heads.at_once(2 * S_k * block_d * q.element_size()))
    attention_kernel[(B * H * triton.cdiv(S_q, block_m),)](
        *heads.tiled((q, k, v, o), (block_m, block_n, block_n, block_m), tma), lse,
        q.stride(), k.stride(), v.stride(), o.stride(), scale * LOG2E.value, window or 0,
        B, H, S_q, S_k, D, group, at_once, causal, window is not None,
        features > 0, features > 1, features > 2 and causal, tma, block_m, block_n, block_d, precision(),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return o, lse


def _tile(q):
    """Queries, keys, warps and stages: the scores and O in registers, the stages in shared memory."""
    if q.element_size() == 4:
        return (64, 64, 8, 1) if q.shape[-1] <= 128 else (32, 32, 4, 1)
    if q.shape[-1] > 128:
        return (128, 64, 8, 2) if device.architecture() >= 90 else (64, 32, 4, 2)
    return (128, 128, 8, 2) if device.architecture() >= 90 else (128, 64, 4 if q.shape[-1] <= 64 else 8, 2)


def only_seen_blocks_cost(rung):
    """FLOPs and bytes read are those of the blocks in which somebody sees something, counted from the mask."""
    if not device.INTERPRETED:
        raise Unsupported("FLOPs and bytes are counted in the interpreter")
    for S, S_k, causal, window in ((256, 512, False, None), (300, 600, True, None), (520, 520, True, 100)):
        args = inputs(1, 1, S, 16, S_k=S_k, causal=causal, window=window, dtype=torch.float16)
        block_m, block_n, *_ = _tile(args[0])
        mask = heads.visible(S, S_k, causal, window, DEVICE)
        blocks = [b.any() for rows in mask.split(block_m) for b in rows.split(block_n, dim=1)]
        visited = len(blocks) if rung is masked else int(sum(blocks))
        flops, read = heads.counted(lambda args=args: rung(*args))
        assert flops == 4 * visited * block_m * block_n * 16
        assert read <= (S + 2 * visited * block_n) * 16 * 2  # a tail is read only as far as it goes


def what_is_not_seen_does_not_matter(rung):
    """Causal: other keys from 200 on leave rows before 200 as they are, to the bit; with a window of 50 so do keys
    before 100 for rows from 150 on."""
    q, k, v, *_ = inputs(1, 1, 300, 16, dtype=torch.float16)
    for window, rows, changed in ((None, slice(200), slice(200, 300)), (50, slice(150, 300), slice(100))):
        before = rung(q, k, v, True, window)[0]
        other = k.clone(), v.clone()
        for t in other:
            t[:, :, changed] += 3
        assert torch.equal(rung(q, *other, True, window)[0][:, :, rows], before[:, :, rows])
        assert not torch.equal(rung(q, *other, True, window)[0], before)


def no_key_no_nan(rung):
    """Queries that see no key: zeros and -inf, as documented; also where there is no key at all."""
    for S, S_k in ((200, 70), (3, 0)):
        out, lse = rung(*inputs(1, 2, S, 16, S_k=S_k, causal=True))
        assert (out[:, :, : S - S_k] == 0).all()
        assert (lse[:, :, : S - S_k] == -math.inf).all()
        assert lse[:, :, S - S_k :].isfinite().all()


def _bench(D, S, causal=True, H_kv=None, window=None, H=None):
    return {"B": 16384 // S, "H": H or 2048 // D, "S": S, "D": D, "H_kv": H_kv, "causal": causal, "window": window}


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

CHECKS = (
    case("no queries: an empty grid is an error in CUDA", B=1, H=2, S=0, D=16),
    case("no keys: zeros and -inf", B=1, H=2, S=3, D=16, S_k=0),
    case("one query of a long cache, heads in groups of two", B=2, H=4, S=1, D=16, S_k=131, H_kv=2, causal=True),
    case("more queries than keys: the first 33 see nothing", B=1, H=1, S=70, D=16, S_k=37, causal=True),
    case(
        "one key past a tile, D of 96 in a tile of 128, as a projection leaves it", B=1, H=2, S=129, D=96, layout="bshd"
    ),
    case("primes, causal, one K and V for all heads", B=1, H=3, S=131, D=24, H_kv=1, causal=True),
    case("a window that begins within a block and ends before the tail", B=1, H=1, S=300, D=16, causal=True, window=77),
    case("a window of one: o is v", B=1, H=1, S=67, D=16, S_k=90, causal=True, window=1),
    case("every second number; a scale of one's own", B=1, H=1, S=65, D=40, layout="wide", scale=0.3, causal=True),
    case("D = 256, and fewer queries than keys", B=1, H=1, S=40, D=256, S_k=70, causal=True),
    case("three heads, of which two at once fit into the interpreter's L2", B=1, H=3, S=100, D=16, causal=True),
    case("rows past 2^31 numbers", gib=70, B=1, H=8200, S=2100, D=128, layout="bshd", H_kv=410, causal=True),
    case("keys past 2^31 numbers", gib=70, B=1, H=8200, S=1, D=128, S_k=2100),
    case("the bytes are counted here: 6 of 9 blocks of 128 by 128", B=1, H=1, S=384, D=16, causal=True),
)

LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    rungs=(masked, skipped, edges, longest_first, attention),
    checks=CHECKS,
    benches=(
        *(_bench(D, S) for D, S in ((128, 512), (128, 2048), (128, 4096), (128, 16384), (64, 2048), (64, 16384))),
        *(_bench(D, 4096, causal=False) for D in (64, 128)),
        *(_bench(128, 4096, H=32, H_kv=8), _bench(128, 16384, window=1024), _bench(96, 4096, H=16), _bench(256, 4096)),
    ),
    work=heads.work,
    wrong=WRONG,
    peers=heads.PEERS,
    claims={masked: ("wgmma",), edges: ("wgmma", "cp.async"), attention: ("wgmma", "tma")},
    # Four parts: Q and O, and K and V 3 times, or 6 of 9 blocks of them; lse is 1/33 of it all.
    passes={masked: (2 + 6 + 0.125) / 4.125, edges: (2 + 4 + 0.125) / 4.125, attention: (2 + 4 + 0.125) / 4.125},
    properties=(only_seen_blocks_cost, what_is_not_seen_does_not_matter, no_key_no_nan),
    refuses=heads.REFUSES,
)

if __name__ == "__main__":
    LESSON.main()
