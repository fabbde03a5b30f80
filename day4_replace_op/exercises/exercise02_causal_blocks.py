"""Causal: which blocks of keys a block of queries visits
======================================================
Query i of S_q sees keys j <= i + S_k - S_q: the last query sees all. A program owns BLOCK_M queries and walks over
blocks of keys. All its queries see all keys of the first blocks, so these need no mask. Then come some blocks on the
diagonal, which need one. No query sees the rest, and a program that visits them does twice the work. Two numbers
describe the three kinds of blocks. S_q need not be S_k: with a cache of keys it is less. If it is more, the first
queries see nothing.

Predict: for S_q = S_k = 8192 and blocks of 128 x 128, blocks visited over blocks there are.

Source: Dao, "FlashAttention-2", 2023, section 3.1, causal masking.
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl


@triton.jit
def bounds(row, S_q, S_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(whole, end) for the queries row <= i < row + BLOCK_M that exist, of S_q.

    end    one past the last key that any of them sees; 0 if they see none
    whole  the largest multiple of BLOCK_N such that each of them sees all keys before it
    """
    # TODO(1): compute end: which of these queries sees the most keys?
    # stub: end = S_k
    end = tl.maximum(0, tl.minimum(row + BLOCK_M, S_q) + S_k - S_q)
    # END(1)
    # TODO(2): compute whole: which of these queries sees the fewest keys?
    # stub: whole = 0
    whole = tl.maximum(0, row + 1 + S_k - S_q) // BLOCK_N * BLOCK_N
    # END(2)
    return whole, end


@triton.jit
def attend(
    acc, total, m, q, k_ptr, v_ptr, rows, start_at, stop_at, scale, S_q, S_k,
    D: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Take the keys from start_at to stop_at into acc [BLOCK_M, D], total and m [BLOCK_M]."""
    for start in range(start_at, stop_at, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        tile = keys[:, None] * D + tl.arange(0, D)[None, :]
        k = tl.load(k_ptr + tile, mask=keys[:, None] < S_k, other=0.0)
        v = tl.load(v_ptr + tile, mask=keys[:, None] < S_k, other=0.0)
        s = tl.dot(q, k.T) * scale
        if MASKED:
            # TODO(3): which key [None, :] each query [:, None] sees.
            # stub: seen = (keys < S_k)[None, :]
            seen = keys[None, :] <= rows[:, None] + S_k - S_q
            # END(3)
            s = tl.where(seen, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp(s - m_new[:, None])
        old = tl.exp(m - m_new)
        acc = tl.dot(p.to(v.dtype), v, acc * old[:, None])
        total = total * old + tl.sum(p, axis=1)
        m = m_new
    return acc, total, m


@triton.jit
def causal_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr,  # [S_q, D], [S_k, D] twice, [S_q, D]; all contiguous
    scale, S_q, S_k, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M
    rows = row + tl.arange(0, BLOCK_M)
    tile = rows[:, None] * D + tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + tile, mask=rows[:, None] < S_q, other=0.0)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], -3.0e38, tl.float32)  # finite: -inf - -inf would be NaN where a query sees nothing
    whole, end = bounds(row, S_q, S_k, BLOCK_M, BLOCK_N)
    acc, total, m = attend(acc, total, m, q, k_ptr, v_ptr, rows, 0, whole, scale, S_q, S_k, D, False, BLOCK_N)
    acc, total, m = attend(acc, total, m, q, k_ptr, v_ptr, rows, whole, end, scale, S_q, S_k, D, True, BLOCK_N)
    tl.store(o_ptr + tile, acc / tl.where(total == 0, 1.0, total)[:, None], mask=rows[:, None] < S_q)


def causal_attention(q, k, v):
    """q [S_q, D], k and v [S_k, D], 16-bit, contiguous, D 16, 32, 64 or 128 -> [S_q, D]; 0 where nothing is seen."""
    expect(q=q, k=k, v=v, ndim=2, same_dtype=True, contiguous=True, dtypes=[torch.float16, torch.bfloat16])
    (S_q, D), S_k = q.shape, len(k)
    o = torch.empty_like(q)
    if o.numel():
        causal_kernel[(triton.cdiv(S_q, 32),)](q, k, v, o, D**-0.5, S_q, S_k, D, BLOCK_M=32, BLOCK_N=16)
    return o


# The learner's file ends here.
from lessonkit import DEVICE, case
from lessonkit.exercise import Exercise, Wrong, same

SIZES = ((96, 96), (40, 40), (1, 33), (37, 70), (70, 37), (50, 10), (64, 0))


def _seen(S_q, S_k):
    """The definition: [S_q, S_k]."""
    return torch.arange(S_k) <= torch.arange(S_q)[:, None] + S_k - S_q


@triton.jit
def probe_kernel(found_ptr, S_q, S_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    whole, end = bounds(tl.program_id(0) * BLOCK_M, S_q, S_k, BLOCK_M, BLOCK_N)
    tl.store(found_ptr + 2 * tl.program_id(0), whole)
    tl.store(found_ptr + 2 * tl.program_id(0) + 1, end)


def _judge(which, expected):
    for S_q, S_k in SIZES:
        for block_m, block_n in ((32, 16), (16, 32)):
            blocks = _seen(S_q, S_k).split(block_m)
            found = torch.zeros(len(blocks), 2, dtype=torch.int32, device=DEVICE)
            probe_kernel[(len(blocks),)](found, S_q, S_k, block_m, block_n)
            what = f"{('whole', 'end')[which]} by blocks of queries, {S_q=} {S_k=} BLOCK_M={block_m} BLOCK_N={block_n}"
            same(what, found[:, which].tolist(), [expected(seen, block_n) for seen in blocks])


def ends():
    """The walk ends where no query of the block sees any further key."""
    _judge(1, lambda seen, block_n: int(seen.any(0).sum()))


def wholes():
    """The blocks without a mask are all those that every query of the block sees, and no others."""
    _judge(0, lambda seen, block_n: int(seen.all(0).sum()) // block_n * block_n)


def inputs(S_q, S_k, D, dtype=torch.float16):
    # Scores grow along the keys, so that one key too many is the one that counts.
    q, k, v = (torch.randn(S, D, device=DEVICE) for S in (S_q, S_k, S_k))
    return (q + 1).to(dtype), (k + torch.linspace(-1, 1, S_k, device=DEVICE)[:, None]).to(dtype), v.to(dtype)


def reference(q, k, v):
    seen = _seen(len(q), len(k)).to(q.device)
    s = (q @ k.T * q.shape[1] ** -0.5).masked_fill(~seen, -torch.inf)
    return s.softmax(1).nan_to_num() @ v  # of a query that sees nothing it is 0 / 0


EXERCISE = Exercise(
    claims=(ends, wholes),
    op=causal_attention,
    reference=reference,
    inputs=inputs,
    dtypes=(torch.float16, torch.bfloat16),
    cases=(
        case("no queries", S_q=0, S_k=5, D=16),
        case("as many queries as keys", S_q=64, S_k=64, D=16),
        case("tails of both", S_q=41, S_k=41, D=32),
        case("one query of a cache: no mask at all", S_q=1, S_k=48, D=16),
        case("more queries than keys: the first 13 see nothing", S_q=50, S_k=37, D=16),
        case("the first query sees all of a block but its last key", S_q=40, S_k=54, D=16),
        case("96 and 128 of 128 keys, on which bytes are counted", S_q=64, S_k=128, D=16),
    ),
    reads=(64 + 2 * (96 + 128)) / (64 + 2 * 128),
    hints=(
        "The last query of the block sees furthest, the first one least: end belongs to the one, whole to the other.",
        "Query i sees i + 1 + S_k - S_q keys. The last query that exists is min(row + BLOCK_M, S_q) - 1. Either number "
        "may be negative: clamp before you divide, since a negative quotient is rounded up on a GPU.",
        "end = max(0, min(row + BLOCK_M, S_q) + S_k - S_q); whole = max(0, row + 1 + S_k - S_q) // BLOCK_N * BLOCK_N; "
        "seen: keys[None, :] <= rows[:, None] + S_k - S_q.",
    ),
    predicted="65/128, a little more than a half: row i of the 64 rows of blocks visits i + 1 of 64.",
    wrong=(
        Wrong(
            "aligned at the upper left: right only for S_q = S_k",
            "BLOCK_M, S_q) + S_k - S_q)",
            "BLOCK_M, S_k))",
            "ends",
        ),
        Wrong(
            "queries past S_q are thought to see keys past S_k",
            "tl.minimum(row + BLOCK_M, S_q)",
            "(row + BLOCK_M)",
            "ends",
        ),
        Wrong("the first query's end: later ones miss keys", "tl.minimum(row + BLOCK_M, S_q) +", "row + 1 +", "ends"),
        Wrong(
            "the end may be negative",
            "end = tl.maximum(0, tl.minimum(row + BLOCK_M, S_q) + S_k - S_q)",
            "end = tl.minimum(row + BLOCK_M, S_q) + S_k - S_q",
            "ends",
        ),
        Wrong(
            "every block visited",
            "end = tl.maximum(0, tl.minimum(row + BLOCK_M, S_q) + S_k - S_q)",
            "end = S_k",
            "ends",
        ),
        Wrong(
            "a block that only the last query sees is called whole", "row + 1 + S_k", "row + BLOCK_M + S_k", "wholes"
        ),
        Wrong(
            "rounded up: the diagonal's block has no mask",
            "row + 1 + S_k - S_q) // BLOCK_N * BLOCK_N",
            "row + BLOCK_N + S_k - S_q) // BLOCK_N * BLOCK_N",
            "wholes",
        ),
        Wrong("a query does not see its own key", "keys[None, :] <= rows", "keys[None, :] < rows"),
        Wrong("the mask is aligned at the upper left", "rows[:, None] + S_k - S_q", "rows[:, None]"),
    ),
)
