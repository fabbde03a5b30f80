"""The gradient of the scores, from one number a row
=================================================
The backward of attention does not keep P. It has q, k, v, the output O, its gradient dO, and lse, and makes P again.
O = P V with P = softmax(S), so dP = dO V^T, and through the softmax dS = P * (dP - rowsum(P * dP)). That sum runs over
all keys, which no block has at once; but it is rowsum(dO * O), one number a query, delta, known before the first block.
Then dQ = scale dS K, added up over blocks of keys.

Predict: bytes of lse and delta a query, over those of a row of P in bf16 at S = 4096.

Source: Dao, Fu, Ermon, Rudra and Re, "FlashAttention", 2022, section 3.1 and appendix B.2.
"""

from lessonkit import expect

import torch
import triton
import triton.language as tl


@triton.jit
def dq_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,  # [S_q, D] twice, [S_k, D] twice, [S_q, D], [S_q] fp32
    delta_ptr, dq_ptr,  # [S_q] fp32, [S_q, D]; all contiguous
    scale, S_q, S_k, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # A program owns BLOCK_M queries, and dQ of these; it walks over all keys.
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = rows[:, None] * D + tl.arange(0, D)[None, :]
    live = rows < S_q
    q = tl.load(q_ptr + tile, mask=live[:, None], other=0.0)
    do = tl.load(do_ptr + tile, mask=live[:, None], other=0.0)
    o = tl.load(o_ptr + tile, mask=live[:, None], other=0.0)
    lse = tl.load(lse_ptr + rows, mask=live, other=0.0)  # the logarithm of the sum of exp(scale q k^T), base e
    # TODO(1): delta [BLOCK_M], in fp32.
    # stub: delta = tl.zeros([BLOCK_M], tl.float32)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
    # END(1)
    tl.store(delta_ptr + rows, delta, mask=live)
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, S_k, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        block = keys[:, None] * D + tl.arange(0, D)[None, :]
        k = tl.load(k_ptr + block, mask=keys[:, None] < S_k, other=0.0)
        v = tl.load(v_ptr + block, mask=keys[:, None] < S_k, other=0.0)
        # TODO(2): P of this block again, [BLOCK_M, BLOCK_N]: no maximum, no sum.
        # stub: p = tl.dot(q, k.T) * scale
        p = tl.exp(tl.dot(q, k.T) * scale - lse[:, None])
        # END(2)
        # TODO(3): dP, then dS.
        # stub: ds = p
        dp = tl.dot(do, v.T)
        ds = p * (dp - delta[:, None])
        # END(3)
        # TODO(4): what this block adds to dQ; the product takes 16-bit operands, the sum stays in fp32.
        dq = tl.dot(ds.to(k.dtype), k, dq)
        # END(4)
    # Keys past S_k had k = 0, so that whatever P was there, they have added nothing: no mask.
    # TODO(5): store dQ.
    tl.store(dq_ptr + tile, dq * scale, mask=live[:, None])
    # END(5)


def backward_queries(do, q, k, v, o, lse):
    """do, q, o [S_q, D], k, v [S_k, D], 16-bit, contiguous, D 16 to 128, a power of two; lse [S_q] fp32.
    -> delta [S_q] fp32, dq [S_q, D]."""
    expect(do=do, q=q, k=k, v=v, o=o, ndim=2, same_dtype=True, contiguous=True, dtypes=[torch.float16, torch.bfloat16])
    (S_q, D), S_k = q.shape, len(k)
    delta, dq = torch.empty_like(lse), torch.empty_like(q)
    if dq.numel():
        dq_kernel[(triton.cdiv(S_q, 32),)](do, q, k, v, o, lse, delta, dq, D**-0.5, S_q, S_k, D, BLOCK_M=32, BLOCK_N=32)
    return delta, dq


# The learner's file ends here.
from lessonkit import DEVICE, case
from lessonkit.exercise import Exercise, Wrong


def _attention(q, k, v):
    s = q @ k.T * q.shape[1] ** -0.5
    return s.softmax(1) @ v, torch.logsumexp(s, 1)


def inputs(S_q, S_k, D, dtype=torch.float16):
    # dO and V have a mean, so that delta is large.
    q, k, v, do = (torch.randn(S, D, device=DEVICE).to(dtype) for S in (S_q, S_k, S_k, S_q))
    v, do = v + 0.5, do + 0.5
    o, lse = _attention(*(t.double() for t in (q, k, v)))
    return do, q, k, v, o.to(dtype), lse.float()


def reference(do, q, k, v, o, lse):
    """dQ by autograd, which knows nothing of delta or lse."""
    with torch.enable_grad():
        q = q.detach().requires_grad_()
        (dq,) = torch.autograd.grad(_attention(q, k, v)[0], q, do)
    return (do.to(lse.dtype) * o).sum(1), dq


EXERCISE = Exercise(
    op=backward_queries,
    reference=reference,
    inputs=inputs,
    dtypes=(torch.float16, torch.bfloat16),
    factor=2,  # delta sees O as it was rounded to 16 bits, which autograd's own backward does not
    cases=(
        case("no queries", S_q=0, S_k=5, D=16),
        case("one key: P is 1 whatever q is, so dQ is 0", S_q=3, S_k=1, D=16),
        case("one block", S_q=32, S_k=32, D=32),
        case("three blocks of keys, tails of both", S_q=41, S_k=75, D=16),
        case("twice two blocks, on which bytes are counted", S_q=64, S_k=64, D=32),
    ),
    reads=(3 * 64 * 32 + 2 * 64 * 2 + 2 * 2 * 64 * 32) / (5 * 64 * 32 + 2 * 64),  # K and V for each block of queries
    hints=(
        "Write the softmax's gradient for one row: a score moves its own P up and, through the sum, all others down. "
        "What is subtracted is the same for the whole row.",
        "P = exp(scale q k^T - lse). dP = dO V^T. dS = P * (dP - delta), delta = rowsum(dO * O). The scale is the "
        "derivative of scale * x: dQ = scale dS K, once at the end.",
        "delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1); ds = p * (tl.dot(do, v.T) - delta[:, None]); "
        "dq = tl.dot(ds.to(k.dtype), k, dq); store dq * scale under live[:, None].",
    ),
    predicted="1/1024: two numbers in fp32 are 8 bytes, and a row of P is 8192 bytes.",
    wrong=(
        Wrong("delta is left out: rows of dS do not sum to 0", "dp - delta[:, None]", "dp"),
        Wrong(
            "the products of delta are rounded to 16 bits",
            "tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)",
            "tl.sum(o * do, axis=1)",
        ),
        Wrong(
            "delta of dO alone",
            "tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)",
            "tl.sum(do.to(tl.float32), axis=1)",
        ),
        Wrong("delta is taken from P * dP instead of from dP", "p * (dp - delta[:, None])", "p * dp - delta[:, None]"),
        Wrong("lse is scaled too", "tl.dot(q, k.T) * scale - lse[:, None]", "(tl.dot(q, k.T) - lse[:, None]) * scale"),
        Wrong("P with powers of 2, and lse to base e", "tl.exp(tl.dot", "tl.exp2(tl.dot"),
        Wrong("P is not normalised", "* scale - lse[:, None])", "* scale)"),
        Wrong("dP from K: P was multiplied with V, so dP is dO V^T", "tl.dot(do, v.T)", "tl.dot(do, k.T)"),
        Wrong("P where dS belongs", "tl.dot(ds.to(k.dtype), k, dq)", "tl.dot(p.to(k.dtype), k, dq)"),
        Wrong("only the last block's part is kept", "tl.dot(ds.to(k.dtype), k, dq)", "tl.dot(ds.to(k.dtype), k)"),
        Wrong("no scale in dQ", "dq * scale, mask", "dq, mask"),
    ),
)
