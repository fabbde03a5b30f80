"""Dropout with a mask that is computed from (seed, position) and never stored.

Element i is kept if word i % 4 of Philox4x32-10(counter i // 4, key seed) is at least p 2^32 (Salmon et al., "Parallel
Random Numbers: As Easy as 1, 2, 3", SC 2011, section 4.3). The mask does not depend on block sizes, so the backward and
any other implementation computes the same one.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def philox(call, seed):
    """The four 32-bit words of a call. A 32 x 32 -> 64-bit product gives both halves in one instruction."""
    c0, c1 = call.to(tl.uint32), (call >> 32).to(tl.uint32)
    c2, c3 = c0 * 0, c0 * 0
    k0, k1 = seed.to(tl.uint32), (seed.to(tl.uint64) >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = a.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


# A row of the tile is two calls, 8 elements: 16-byte accesses in 16 bits. The word join interleaves the values inside
# each thread. Without do_not_specialize, seed 1 and seed 16 would each be compiled anew, as if they were sizes.
@triton.jit(do_not_specialize=["seed", "drop"])
def dropout_kernel(x_ptr, y_ptr, n, seed, drop, scale, PAIRS: tl.constexpr):  # [n] each
    first = tl.program_id(0).to(tl.int64) * PAIRS  # 64 bits once; what each thread adds fits in 32
    pair = tl.arange(0, PAIRS)
    i = pair[:, None] * 8 + tl.arange(0, 8)[None, :]
    mask = i < tl.minimum(n - first * 8, PAIRS * 8).to(tl.int32)
    x = tl.load(x_ptr + first * 8 + i, mask=mask).to(tl.float32)  # before the arithmetic, which hides its latency
    u0, u1, u2, u3 = philox((first + pair) * 2, seed)
    v0, v1, v2, v3 = philox((first + pair) * 2 + 1, seed)
    even, odd = tl.join(tl.join(u0, v0), tl.join(u2, v2)), tl.join(tl.join(u1, v1), tl.join(u3, v3))
    keep = tl.reshape(tl.join(even, odd), (PAIRS, 8)) >= drop.to(tl.uint32)
    # A choice, not a product: 0 * inf is NaN.
    tl.store(y_ptr + first * 8 + i, tl.where(keep, x * scale, 0.0), mask=mask)


def dropout(x, p, seed):
    """x, contiguous, of any shape; 0 <= p <= 1, 0 <= seed < 2^63 -> y as x."""
    drop = round(p * 2**32)
    if drop >= 2**32:  # p = 1 has no scale, and its threshold does not fit 32 bits
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    y, n = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.numel()
    if n:
        # Where there are many programs they have one warp, so that they begin and end one by one.
        pairs, warps = (128, 1) if n >= 2**23 else (256, 8)
        dropout_kernel[(triton.cdiv(n, 8 * pairs),)](x, y, n, seed, drop, 1 / (1 - p), pairs, num_warps=warps)
    return y
