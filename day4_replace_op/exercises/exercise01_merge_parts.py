"""Merge parts of attention that have not seen each other
======================================================
Flash decoding divides the keys of a cache among programs, and ring attention divides them among GPUs. From its own keys
each part computes o, the mean of v weighted by the softmax, and lse, the logarithm of the softmax's sum. The whole
answer is the mean of these o with weights exp(lse), and its lse is the logarithm of the weights' sum. Parts are merged
one after another, so the state is again a maximum, a sum and an accumulator. A part without a key has o = 0 and
lse = -inf. The first part may have no key, or all parts may have none, and -inf - -inf is NaN.

Predict: for one query of 8192 keys and D = 128, bytes of 16 parts in fp32 over bytes of K and V in bf16.

Source: Milakov and Gimelshein, 2018, section 3.1; Dao, Haziza, Massa and Sizov, "Flash-Decoding", 2023.
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    parts_ptr,  # [P, M, D]
    part_lse_ptr,  # [P, M] fp32
    o_ptr,  # [M, D]
    lse_ptr,  # [M] fp32; all contiguous
    P,
    M,
    D,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # A program owns ROWS rows and walks along the parts once.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    live = rows < M
    inside = live[:, None] & (cols < D)[None, :]
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)  # of exp(lse - m)
    m = tl.full([ROWS], -float("inf"), tl.float32)  # the largest lse so far
    for part in range(P):
        at = part * M + rows
        o = tl.load(parts_ptr + at[:, None] * D + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        lse = tl.load(part_lse_ptr + at, mask=live, other=0.0)
        # TODO(1): take (o, lse) into acc [ROWS, BLOCK_D], total and m [ROWS]. Both lse and m may be -inf.
        # stub: acc, total, m = acc + o, total + 1.0, tl.maximum(m, lse)
        larger = tl.maximum(m, lse)
        finite = tl.where(larger == -float("inf"), 0.0, larger)
        old, new = tl.exp(m - finite), tl.exp(lse - finite)
        acc = acc * old[:, None] + o * new[:, None]
        total = total * old + new
        m = larger
        # END(1)
    # TODO(2): the merged o and lse. They are 0 and -inf for a row of which no part has seen a key.
    # stub: o, lse = acc / total[:, None], m
    o = acc / tl.where(total == 0, 1.0, total)[:, None]
    lse = m + tl.log(total)
    # END(2)
    tl.store(o_ptr + rows[:, None] * D + cols[None, :], o, mask=inside)
    tl.store(lse_ptr + rows, lse, mask=live)


def merge(parts, part_lse):
    """parts [P, M, D], part_lse [P, M] fp32, contiguous, P > 0 -> o [M, D] in parts' dtype, lse [M] fp32."""
    expect(parts=parts, ndim=3, contiguous=True)
    expect(part_lse=part_lse, ndim=2, dtypes=[torch.float32], contiguous=True)
    P, M, D = parts.shape
    o, lse = torch.empty_like(parts[0]), torch.empty_like(part_lse[0])
    if o.numel():
        merge_kernel[(triton.cdiv(M, 16),)](
            parts, part_lse, o, lse, P, M, D, ROWS=16, BLOCK_D=triton.next_power_of_2(D)
        )
    return o, lse


# The learner's file ends here.
from lessonkit import DEVICE, case
from lessonkit.exercise import Exercise, Wrong


def inputs(P, M, D, spread=1.0, empty="", dtype=torch.float32):
    # Means that differ from part to part, so that each has to count as much as it should.
    parts = (torch.randn(P, M, D, device=DEVICE) + torch.arange(P, device=DEVICE)[:, None, None]).to(dtype)
    lse = 5 + spread * torch.randn(P, M, device=DEVICE)  # near 0 a logarithm has few right digits
    for part in {"": (), "first": [0], "middle": [1], "all": range(P)}[empty]:
        parts[part, ::2], lse[part, ::2] = 0, -torch.inf
    return parts, lse


def reference(parts, part_lse):
    weights = torch.softmax(part_lse, 0).nan_to_num()  # of a row without keys it is 0 / 0
    return (weights[..., None] * parts).sum(0).to(parts.dtype), torch.logsumexp(part_lse, 0)


EXERCISE = Exercise(
    op=merge,
    reference=reference,
    inputs=inputs,
    cases=(
        case("no rows", P=2, M=0, D=8),
        case("one part: it is the answer", P=1, M=5, D=16),
        case("three parts, rows and columns that fill no block", P=3, M=21, D=24),
        case("lse to 300, where exp of it overflows", P=4, M=16, D=16, spread=100.0),
        case("every second row has no key in the second part", P=3, M=9, D=16, empty="middle"),
        case("nor in the first one, before there is a maximum", P=3, M=9, D=16, empty="first"),
        case("nor in any: zeros and -inf", P=2, M=9, D=16, empty="all"),
        case("many parts, on which bytes are counted", P=8, M=32, D=32),
    ),
    hints=(
        "A part weighs exp(lse). Weights may have any common factor: make it exp(-m), and correct what you have when m "
        "grows, as in the online softmax.",
        "old = exp(m - larger), new = exp(lse - larger), with larger = maximum(m, lse). Where both are -inf, subtract "
        "something finite instead: exp(-inf - 0) is 0, and that is what an empty part weighs.",
        "acc = acc * old[:, None] + o * new[:, None]; total = total * old + new; m = larger. At the end divide by "
        "`tl.where(total == 0, 1.0, total)`, and lse = m + log(total): -inf where there is nothing.",
    ),
    predicted="0.2%: 16 * (128 + 1) * 4 bytes over 2 * 8192 * 128 * 2 bytes.",
    wrong=(
        Wrong("what was added before is not brought to the new maximum", "acc * old[:, None] + o", "acc + o"),
        Wrong("the sum is not brought to the new maximum", "total * old + new", "total + new"),
        Wrong("all parts weigh the same", "tl.exp(lse - finite)", "tl.exp(0.0 * finite)"),
        Wrong("o is added without its weight", "o * new[:, None]", "o"),
        Wrong(
            "no maximum is subtracted: exp overflows",
            "larger = tl.maximum(m, lse)",
            "larger = tl.zeros([ROWS], tl.float32)",
            "nan",
        ),
        Wrong(
            "-inf - -inf, before any part has a key", 'tl.where(larger == -float("inf"), 0.0, larger)', "larger", "nan"
        ),
        Wrong("0 / 0 where no part has a key", "tl.where(total == 0, 1.0, total)[:, None]", "total[:, None]", "nan"),
        Wrong("the maximum is not added back to lse", "m + tl.log(total)", "tl.log(total)"),
        Wrong("the logarithm is to base 2", "m + tl.log(total)", "m + tl.log2(total)"),
    ),
)
