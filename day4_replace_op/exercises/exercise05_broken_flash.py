"""Debug: flash attention that was right on the author's machine
=============================================================
o = softmax(q k^T / sqrt(D)) v, a head a row of the grid, blocks of keys walked once with an online softmax. The author
tried S = 32 and D = 64 with torch.randn, and it agreed with PyTorch. It is wrong in three ways that this input cannot
show. For each, say which S, D or scores show it; then mend it. `check` shows one at a time.
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl


@triton.jit
def flash_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr,  # [B, S, D] each, contiguous
    scale, S, D, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * S * D
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    inside = (rows < S)[:, None] & (cols < D)[None, :]
    tile = head + rows[:, None] * D + cols[None, :]
    q = tl.load(q_ptr + tile, mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    for start in range(0, S, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        block = head + keys[:, None] * D + cols[None, :]
        there = (keys < S)[:, None] & (cols < D)[None, :]
        k = tl.load(k_ptr + block, mask=there, other=0.0)
        v = tl.load(v_ptr + block, mask=there, other=0.0)
        s = tl.dot(q, k.T) * scale
        s = tl.where((keys < S)[None, :], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp(s - m_new[:, None])
        old = tl.exp(m - m_new)
        m = m_new
        total = total * old + tl.sum(p, axis=1)
        acc = acc * old[:, None] + tl.dot(p.to(v.dtype), v)
    tl.store(o_ptr + tile, acc / total[:, None], mask=inside)


def flash(q, k, v):
    """q, k, v [B, S, D], 16-bit, contiguous, D up to 128 -> [B, S, D]."""
    expect(q=q, k=k, v=v, ndim=3, same_shape=True, same_dtype=True, contiguous=True,
           dtypes=[torch.float16, torch.bfloat16])  # fmt: skip
    B, S, D = q.shape
    o = torch.empty_like(q)
    if o.numel():
        block_d = max(16, triton.next_power_of_2(D))
        flash_kernel[(triton.cdiv(S, 32), B)](q, k, v, o, D**-0.5, S, D, BLOCK_M=32, BLOCK_N=32, BLOCK_D=block_d)
    return o


# The learner's file ends here.
from lessonkit import DEVICE, case
from lessonkit.exercise import Exercise, Wrong


def inputs(B, S, D, rising=0.0, mean=0.0, dtype=torch.float16):
    # rising: scores grow along the keys by about so much. mean: of all scores, about.
    q = torch.randn(B, S, D, device=DEVICE) + 1
    k = torch.randn(B, S, D, device=DEVICE) + (torch.linspace(0, rising, S, device=DEVICE)[:, None] + mean) * D**-0.5
    return q.to(dtype), k.to(dtype), torch.randn(B, S, D, device=DEVICE).to(dtype)


EXERCISE = Exercise(
    op=flash,
    reference=lambda q, k, v: (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1) @ v,
    inputs=inputs,
    dtypes=(torch.float16, torch.bfloat16),
    cases=(
        case("no tokens", B=1, S=0, D=16),
        case("the author's: one block of keys, a D that fills the tile", B=1, S=32, D=64),
        case("a D that does not fill the tile", B=1, S=32, D=40),
        case("two blocks of keys", B=2, S=64, D=16),
        case("three, and scores that grow from block to block", B=1, S=96, D=16, rising=20.0),
        case("five keys past a block", B=2, S=37, D=16),
        case("scores around -200: exp of them is 0", B=1, S=40, D=16, mean=-200.0),
        case("two blocks by two, on which bytes are counted", B=1, S=64, D=32),
    ),
    reads=(1 + 2 * 2) / 3,
    hints=(
        "What do S = 32 and D = 64 each hide? All that only matters from the second block on, and all that is padding.",
        "By which number are scores divided where the tile is wider than D? In which order are the maximum and the "
        "factor for what was summed before renewed? A key past S was loaded as 0: which score has it, and what does it "
        "weigh?",
        "scale is 1 / sqrt(D); old = exp(m - m_new) has to be computed before m = m_new; scores of keys past S become "
        "-inf before the maximum.",
    ),
    wrong=(
        Wrong(
            "scores are divided by the root of the tile's width",
            "v, o, D**-0.5, S",
            "v, o, block_d**-0.5, S",
            planted=True,
        ),
        Wrong(
            "the maximum is renewed too early: the factor of what was summed before is always 1",
            "        old = tl.exp(m - m_new)\n        m = m_new\n",
            "        m = m_new\n        old = tl.exp(m - m_new)\n",
            planted=True,
        ),
        Wrong(
            "keys past the end have a score of 0 and count",
            '        s = tl.where((keys < S)[None, :], s, -float("inf"))\n',
            "",
            planted=True,
        ),
        Wrong(
            "the maximum begins at 0, which lower scores never reach",
            'm = tl.full([BLOCK_M], -float("inf")',
            "m = tl.full([BLOCK_M], 0.0",
            "nan",
        ),
        Wrong("the sum is not brought to the new maximum", "total = total * old +", "total = total +"),
        Wrong("every head reads the first one's keys", "block = head + keys", "block = keys"),
        Wrong(
            "V is read past the end of the last head",
            "tl.load(v_ptr + block, mask=there, other=0.0)",
            "tl.load(v_ptr + block, mask=(cols < D)[None, :], other=0.0)",
            "out of bounds",
        ),
    ),
)
