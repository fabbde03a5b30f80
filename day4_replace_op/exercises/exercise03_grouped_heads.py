"""Grouped heads: one head of K and V, read once for all that share it
===================================================================
In decoding, one query of each sequence meets a cache of S keys. So the bytes of the cache decide the time. With grouped
heads (GQA) H query heads share H_kv heads of K and V. Query head h uses head h // (H / H_kv), so neighbours share. If
every query head has a program of its own, the programs load K and V H / H_kv times. If the heads of a group are rows of
one tile, its program loads them once. A tensor core's tile has 16 rows anyway. The cache is [B, S, H_kv, D]. Its
strides may be any, and the strides of K and V may differ.

Predict: how many bytes does a token take in a layer's cache, in bf16 at H = 32, D = 128 and H_kv = 8? And at H_kv = 32?

Source: Ainslie et al., "GQA: training generalized multi-query transformer models", 2023.
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl


@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr,  # [B, H, D], [B, S, H_kv, D] twice, [B, H, D]; q and o are contiguous
    k_b, k_s, k_h, v_b, v_s, v_h,  # strides of k and v between sequences, keys and heads; columns have stride 1
    scale, H, S, D, GROUP, TOGETHER: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # A program owns TOGETHER neighbouring query heads of one sequence. TOGETHER divides GROUP = H / H_kv.
    owner = tl.program_id(0).to(tl.int64)  # int64 before any stride: a cache may have more than 2^31 elements
    # TODO(1): the sequence, the first of these query heads, and the head of K and V that they share.
    # stub: b, h, h_kv = 0, 0, 0
    b = owner // (H // TOGETHER)
    h = owner % (H // TOGETHER) * TOGETHER
    h_kv = h // GROUP
    # END(1)
    cols = tl.arange(0, BLOCK_D)
    lines = (b * H + h + tl.arange(0, ROWS))[:, None] * D + cols[None, :]
    live = (tl.arange(0, ROWS) < TOGETHER)[:, None] & (cols < D)[None, :]
    q = tl.load(q_ptr + lines, mask=live, other=0.0)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    m = tl.full([ROWS], -float("inf"), tl.float32)
    for start in range(0, S, BLOCK_N):
        keys = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        inside = (keys < S)[:, None] & (cols < D)[None, :]
        # TODO(2): the addresses [BLOCK_N, BLOCK_D] of these keys in K, and in V.
        # stub: k_ptrs = k_ptr + 0 * keys[:, None] + cols[None, :]
        # stub: v_ptrs = v_ptr + 0 * keys[:, None] + cols[None, :]
        k_ptrs = k_ptr + b * k_b + h_kv * k_h + keys[:, None] * k_s + cols[None, :]
        v_ptrs = v_ptr + b * v_b + h_kv * v_h + keys[:, None] * v_s + cols[None, :]
        # END(2)
        k = tl.load(k_ptrs, mask=inside, other=0.0)
        v = tl.load(v_ptrs, mask=inside, other=0.0)
        s = tl.where((keys < S)[None, :], tl.dot(q, k.T) * scale, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp(s - m_new[:, None])
        old = tl.exp(m - m_new)
        acc = tl.dot(p.to(v.dtype), v, acc * old[:, None])
        total = total * old + tl.sum(p, axis=1)
        m = m_new
    tl.store(o_ptr + lines, acc / total[:, None], mask=live)


def decode(q, k, v):
    """q [B, H, D] contiguous, k and v [B, S, H_kv, D] with columns side by side, 16-bit, S > 0 -> o [B, H, D]."""
    expect(q=q, k=k, v=v, same_dtype=True, unit_stride=True, dtypes=[torch.float16, torch.bfloat16])
    (B, H, D), (_, S, H_kv, _) = q.shape, k.shape
    o = torch.empty_like(q)
    # TODO(3): how many query heads a program takes, so that each number of K and V is read once.
    # stub: together = 1
    together = H // H_kv
    # END(3)
    if o.numel():
        decode_kernel[(B * H // together,)](
            q, k, v, o, *k.stride()[:3], *v.stride()[:3], D**-0.5, H, S, D, H // H_kv, TOGETHER=together,
            ROWS=max(16, triton.next_power_of_2(together)), BLOCK_N=32, BLOCK_D=max(16, triton.next_power_of_2(D)),
        )  # fmt: skip
    return o


# The learner's file ends here.
from lessonkit import DEVICE, case
from lessonkit.exercise import Exercise, Wrong


def inputs(B, H, H_kv, S, D, layout="cache", dtype=torch.float16):
    # A head has a mean of its own, so that another head's keys and values show.
    mean = torch.linspace(-1, 1, H_kv, device=DEVICE)[:, None]
    k, v = ((torch.randn(B, S, H_kv, D, device=DEVICE) + mean).to(dtype) for _ in range(2))
    if layout == "apart":  # K as [B, H_kv, S, D], V as a longer cache of which S keys are in use
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
        v = torch.cat([v, torch.full_like(v, torch.nan)], 1)[:, :S]
    return torch.randn(B, H, D, device=DEVICE).to(dtype), k, v


def reference(q, k, v):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[2], 2) for t in (k, v))
    p = torch.softmax(torch.einsum("bhd,bshd->bhs", q, k) * q.shape[-1] ** -0.5, -1)
    return torch.einsum("bhs,bshd->bhd", p, v)


EXERCISE = Exercise(
    op=decode,
    reference=reference,
    inputs=inputs,
    dtypes=(torch.float16, torch.bfloat16),
    cases=(
        case("no sequences", B=0, H=2, H_kv=1, S=4, D=16),
        case("one head of K and V for all (MQA)", B=1, H=4, H_kv=1, S=32, D=16),
        case("a head for each (MHA), two sequences", B=2, H=3, H_kv=3, S=20, D=16),
        case("groups of four, a tail of keys, D no power of two", B=2, H=8, H_kv=2, S=45, D=24),
        case("K and V lie differently, as caches do", B=2, H=4, H_kv=2, S=40, D=16, layout="apart"),
        case("a group of 20: more than 16 rows", B=1, H=20, H_kv=1, S=33, D=16),
        case("groups of four, on which bytes are counted", B=1, H=8, H_kv=2, S=128, D=32),
    ),
    hints=(
        "Programs are numbered sequence by sequence, and in a sequence group by group: quotient and remainder. "
        "Neighbouring query heads share a head of K and V.",
        "A sequence has H // TOGETHER programs. The first head of program i of them is i * TOGETHER; that // GROUP is "
        "its head of K and V. An address is the base, plus each index times its own tensor's stride.",
        "b = owner // (H // TOGETHER); h = owner % (H // TOGETHER) * TOGETHER; h_kv = h // GROUP; k_ptr + b * k_b + "
        "h_kv * k_h + keys[:, None] * k_s + cols[None, :]; together = H // H_kv.",
    ),
    predicted="4096 bytes with 8 heads of K and V: 2 * 8 * 128 * 2. With 32 heads it is 16,384.",
    wrong=(
        Wrong("heads are dealt out in turn: h % H_kv", "h_kv = h // GROUP", "h_kv = h % (H // GROUP)"),
        Wrong(
            "the first head of a program is its number",
            "% (H // TOGETHER) * TOGETHER",
            "% (H // TOGETHER)",
            "unwritten",
        ),
        Wrong(
            "sequence and group are exchanged",
            "b = owner // (H // TOGETHER)",
            "b = owner % (H // TOGETHER)",
            "out of bounds",
        ),
        Wrong(
            "V is addressed with K's strides",
            "b * v_b + h_kv * v_h + keys[:, None] * v_s",
            "b * k_b + h_kv * k_h + keys[:, None] * k_s",
            "nan",
        ),
        Wrong(
            "heads and keys are exchanged in K",
            "h_kv * k_h + keys[:, None] * k_s",
            "h_kv * k_s + keys[:, None] * k_h",
        ),
        Wrong("K has a head for each query head", "b * k_b + h_kv * k_h", "b * k_b + h * k_h", "out of bounds"),
        Wrong("the sequence is forgotten in V", "v_ptr + b * v_b + h_kv", "v_ptr + h_kv"),
        Wrong(
            "a program a query head: right, and K and V are read once for each",
            "together = H // H_kv",
            "together = 1",
            "traffic",
        ),
        Wrong("all heads in one program: they do not share K and V", "together = H // H_kv", "together = H"),
    ),
)
