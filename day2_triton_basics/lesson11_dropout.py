"""Dropout: random numbers computed instead of stored
=====================================================
y = x / (1 - p) where a random number says keep, 0 elsewhere. At least n elements are read and n written. A mask kept
in memory for the backward adds n written and n read, twice the traffic; a mask that any element can recompute from
(seed, position) adds nothing. Then arithmetic decides: at 4.2 TB/s in bf16 each of 132 SMs handles 4.5 elements per
clock, and one call of the generator costs about 80 instructions where an SM issues 128 lanes of them per clock.

You will learn: counter-based random numbers, an oracle that is exact to the bit, and when arithmetic is not free.
Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 4.3 (Philox).
Run it:    python day2_triton_basics/lesson11_dropout.py
Check it:  python -m lessonkit check lesson11_dropout
Time it:   python -m lessonkit bench lesson11_dropout
"""

import math

from lessonkit import DEVICE, Grad, Lesson, Mutant, Refusal, Work, by_inductor, case, expect

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

LOW = 0xFFFFFFFF  # the low 32 bits of an int64


def _philox_oracle(counter, key):
    """Philox4x32-10: four int64 tensors and two ints, all below 2^32 -> four int64 tensors below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # 64-bit products: int64 wraps, its bits are still right
        c0, c1, c2, c3 = (b >> 32) & LOW ^ c1 ^ k0, b & LOW, (a >> 32) & LOW ^ c3 ^ k1, a & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3


def _keep_mask(n, p, seed, device):
    """[n] bool. Element i is kept if word i % 4 of Philox(counter i // 4, key seed) is at least p * 2^32."""
    kept = []
    for call in torch.arange(triton.cdiv(n, 4), device=device).split(2**24):  # in parts: int64 is 4 times the output
        counter = (call & LOW, call >> 32, call * 0, call * 0)
        words = torch.stack(_philox_oracle(counter, (seed & LOW, seed >> 32)), dim=-1)
        kept.append(words.flatten() >= round(p * 2**32))
    return torch.cat(kept)[:n] if kept else torch.empty(0, dtype=torch.bool, device=device)


def reference(x, p, seed):
    # torch.dropout multiplies by a 0/1 mask, so a dropped inf turns into NaN; here a dropped element is 0.
    return torch.where(_keep_mask(x.numel(), p, seed, x.device).view(x.shape), x / (1 - p) if p < 1 else x, 0.0)


# Rung 1. A mask in memory, as noise = empty_like(x).bernoulli_(1 - p); y = x * noise does it.
# Predicted: writes n, reads 2n, writes n: twice the minimum; and n elements more to keep until the backward.
@triton.jit
def random_word(i, seed):
    w0, w1, w2, w3 = tl.randint4x(seed, i // 4)
    return tl.where(i % 4 < 2, tl.where(i % 4 == 0, w0, w1), tl.where(i % 4 == 2, w2, w3)).to(tl.uint32, bitcast=True)


# seed and drop are numbers, not sizes: without do_not_specialize, seed 1 and seed 16 would each be compiled anew.
@triton.jit(do_not_specialize=["seed", "drop"])
def draw_kernel(mask_ptr, n, seed, drop, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(mask_ptr + i, random_word(i, seed) >= drop.to(tl.uint32), mask=i < n)


@triton.jit
def apply_kernel(x_ptr, mask_ptr, y_ptr, n, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    # A choice, not a product: 0 * inf is NaN.
    tl.store(y_ptr + i, tl.where(tl.load(mask_ptr + i, mask=i < n) != 0, x * scale, 0.0), mask=i < n)


def stored_mask(x, p, seed):
    """[...] -> [...], the mask written to memory in x's dtype and read back."""
    drop, scale = _prepare(x, p, seed)
    if drop > LOW:
        return torch.zeros_like(x)
    y, mask, n = torch.empty_like(x), torch.empty_like(x), x.numel()
    if n:
        draw_kernel[(triton.cdiv(n, 1024),)](mask, n, seed, drop, BLOCK=1024)
        apply_kernel[(triton.cdiv(n, 1024),)](x, mask, y, n, scale, BLOCK=1024)
    return y


# Rung 2. New: no mask in memory. The word is a function of (seed, i), so whoever needs it computes it.
# Predicted: the minimum of 2n, but 80 instructions an element, three times what an SM can issue. It turns out better: a
# thread owns 8 neighbours, the compiler sees that i // 4 is the same for four of them, and makes 2 calls, not 8. The
# machine code has 27 instructions an element; 4.5 elements a clock make 120, just under 128, so both limits are close.
@triton.jit(do_not_specialize=["seed", "drop"])
def seeded_kernel(x_ptr, y_ptr, n, seed, drop, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    keep = random_word(i, seed) >= drop.to(tl.uint32)
    tl.store(y_ptr + i, tl.where(keep, x * scale, 0.0), mask=i < n)


def seeded(x, p, seed):
    """[...] -> [...], one Philox call an element."""
    return _launch(x, p, seed, seeded_kernel, 1, 1024, 4)


# Rung 3. New: all four words of a call are used, by design and not by the compiler's luck. A row of the [CALLS, 4] tile
# is one call; join interleaves the words inside each thread, so no data moves. Element i still gets word i % 4 of call
# i // 4, whatever the block size: a mask that changed with the tuning could not be recomputed by another backward.
# Predicted: little, for rung 2 was lucky: only the choice of one word in four goes, 24 instructions for 27.
@triton.jit(do_not_specialize=["seed", "drop"])
def four_words_kernel(x_ptr, y_ptr, n, seed, drop, scale, CALLS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * CALLS  # 64 bits once; what each thread adds fits in 32
    call = tl.arange(0, CALLS)
    i = call[:, None] * 4 + tl.arange(0, 4)[None, :]
    mask = i < tl.minimum(n - first * 4, CALLS * 4).to(tl.int32)
    x = tl.load(x_ptr + first * 4 + i, mask=mask).to(tl.float32)  # before the arithmetic, which hides its latency
    w0, w1, w2, w3 = tl.randint4x(seed, first + call)
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (CALLS, 4))
    keep = word.to(tl.uint32, bitcast=True) >= drop.to(tl.uint32)
    tl.store(y_ptr + first * 4 + i, tl.where(keep, x * scale, 0.0), mask=mask)


def four_words(x, p, seed):
    """[...] -> [...], one Philox call for four elements."""
    return _launch(x, p, seed, four_words_kernel, 4, 512, 4)


# Rung 4. New: a 32 x 32 -> 64-bit product gives both halves (IMAD.WIDE), where tl.randint4x multiplies twice. A row of
# the tile is two calls, 8 elements: 16-byte accesses in bf16. Where there are many programs they have one warp, so that
# they begin and end one by one. Predicted: half the multiplications, nearest to copy speed where n is large.
@triton.jit
def philox(call, seed):
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


@triton.jit(do_not_specialize=["seed", "drop"])
def two_calls_kernel(x_ptr, y_ptr, n, seed, drop, scale, PAIRS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * PAIRS
    pair = tl.arange(0, PAIRS)
    i = pair[:, None] * 8 + tl.arange(0, 8)[None, :]
    mask = i < tl.minimum(n - first * 8, PAIRS * 8).to(tl.int32)
    x = tl.load(x_ptr + first * 8 + i, mask=mask).to(tl.float32)
    u0, u1, u2, u3 = philox((first + pair) * 2, seed)
    v0, v1, v2, v3 = philox((first + pair) * 2 + 1, seed)
    even, odd = tl.join(tl.join(u0, v0), tl.join(u2, v2)), tl.join(tl.join(u1, v1), tl.join(u3, v3))
    keep = tl.reshape(tl.join(even, odd), (PAIRS, 8)) >= drop.to(tl.uint32)
    tl.store(y_ptr + first * 8 + i, tl.where(keep, x * scale, 0.0), mask=mask)


def wide_product(x, p, seed):
    """[...] -> [...], one Philox call for four elements, one multiplication for two halves."""
    return _launch(x, p, seed, two_calls_kernel, 8, *((128, 1) if x.numel() >= 2**25 else (512, 8)))


def _launch(x, p, seed, kernel, width, rows, warps):
    drop, scale = _prepare(x, p, seed)
    if drop > LOW:
        return torch.zeros_like(x)
    y, n = torch.empty_like(x), x.numel()
    if n:
        kernel[(triton.cdiv(n, rows * width),)](x, y, n, seed, drop, scale, rows, num_warps=warps)
    return y


def _prepare(x, p, seed):
    """Check the arguments; return the threshold below which a word drops its element, and the scale."""
    expect(x=x, contiguous=True)
    if not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise ValueError(f"p is {p!r}, expected a probability from 0 to 1")
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed!r}, expected an int from 0 to 2^63 - 1")
    # p = 1 has no scale, and its threshold 2^32 does not fit 32 bits: callers answer it without a kernel.
    return round(p * 2**32), 1 / (1 - p) if p < 1 else 0.0


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, seed):
        ctx.p, ctx.seed = p, seed  # all that the backward needs: 16 bytes instead of a mask
        return wide_product(x, p, seed)

    @staticmethod
    def backward(ctx, dy):
        return wide_product(dy.contiguous(), ctx.p, ctx.seed), None, None


def dropout(x, p, seed):
    """Dropout with a gradient: dx is dropout of dy, from the same seed."""
    return _Dropout.apply(x, p, seed)


def inputs(n, p=0.3, seed=1234, dtype=torch.float32):
    # |x| >= 1, so that a dropped element differs from a kept one; 0.3, so that keep and drop cannot be exchanged.
    x = torch.randn(n, device=DEVICE)
    return (x + x.sign() + (x == 0)).to(dtype), p, seed


def _kept(rung, n, p, seed):
    return rung(torch.ones(n, device=DEVICE), p, seed) != 0


def _near(count, n, q):
    """A count of n draws with probability q is within 5 standard deviations of its mean."""
    assert abs(count - n * q) <= 5 * math.sqrt(n * q * (1 - q)), f"{count} of {n}, expected about {n * q:.0f}"


def known_answers(rung):
    """The oracle gives the published vectors (Random123, kat_vectors: philox4x32 10), and the rung its mask."""
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    for counter, key, answer in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((LOW, LOW, LOW, LOW), (LOW, LOW), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (*pi, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        assert tuple(int(w) for w in _philox_oracle(tuple(torch.tensor(c) for c in counter), key)) == answer
    large = DEVICE.type == "cuda" and torch.cuda.mem_get_info()[1] > 60 * 2**30
    for n in (5000, 2**31 + 5) if large else (5000,):
        assert torch.equal(_kept(rung, n, 0.4, 7), _keep_mask(n, 0.4, 7, DEVICE))


def statistics(rung):
    """The share kept, the mean, and no correlation between seeds or between neighbours."""
    n, p = 2**15, 0.3
    kept = _kept(rung, n, p, 1)
    assert torch.equal(kept, _kept(rung, n, p, 1)), "the same seed gave another mask"
    _near(int(kept.sum()), n, 1 - p)
    for other in (2, 1 + 2**32):
        _near(int((kept == _kept(rung, n, p, other)).sum()), n, p * p + (1 - p) ** 2)
    for lag in (1, 2, 3, 4, 1024):
        _near(int((kept[lag:] == kept[:-lag]).sum()), n - lag, p * p + (1 - p) ** 2)
    mean = float(rung(torch.ones(n, device=DEVICE), p, 1).mean())
    assert abs(mean - 1) < 5 * math.sqrt(p / (1 - p) / n), f"mean {mean}, expected 1"


def extremes(rung):
    """p = 0 is the identity and p = 1 all zeros, also where x is inf or NaN."""
    x = torch.tensor([1.5, -math.inf, math.nan, 3.0, -2.0], device=DEVICE)
    assert torch.equal(rung(x, 0.0, 3).nan_to_num(7.0), x.nan_to_num(7.0))
    assert torch.equal(rung(x, 1.0, 3), torch.zeros_like(x))


LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    rungs=(stored_mask, seeded, four_words, wide_product),
    checks=(
        case("nothing to do", n=0),
        case("one element, three words of its call unused", n=1),
        case("p = 0: everything kept, the scale is 1", n=130, p=0),
        case("p = 1: everything dropped, 1 / (1 - p) is no number", n=130, p=1),
        case("p a hair under 1: the threshold must not wrap to 0", n=130, p=1 - 2.0**-40),
        case("seed 1: Triton would make it a constant", n=129, seed=1),
        case("a seed of more than 32 bits: its high half is the second key", n=1021, seed=2**40 + 5),
        case("two blocks and a ragged end: a counter that restarts in each block shows", n=4099, p=0.5),
    ),
    benches=tuple({"n": n} for n in (2**20, 2**24, 2**26, 2**28)),
    work=lambda n, dtype, **_: Work(bytes=2 * n * dtype.itemsize),
    wrong=(
        Mutant("blocks start anew", "two_calls_kernel", "first + pair) * 2,", "first * 0 + pair) * 2,", "wide_product"),
        Mutant("words 1 and 2 exchanged", "four_words_kernel", "(w0, w2)", "(w0, w1)", "four_words"),
        Mutant("9 rounds: as random, not this mask", "philox", "static_range(10)", "static_range(9)", "wide_product"),
        Mutant("the seed's high half lost", "philox", "tl.uint64) >> 32)", "tl.uint64) >> 63)", "wide_product"),
        Mutant("kept elements not scaled up", "seeded_kernel", "x * scale", "x", "seeded"),
        Mutant("a product, not a choice", "_launch", "torch.zeros_like(x)", "x * torch.inf * 0", "four_words", "nan"),
        Mutant("mask too wide", "two_calls_kernel", "n - first", "n + 8 - first", "wide_product", "out of bounds"),
        Mutant("the threshold wraps to 0", "_launch", "drop > LOW", "p == 1", "wide_product"),
    ),
    peers={
        "torch": lambda x, p, seed: F.dropout(x, p),
        "torch.compile": by_inductor(lambda x, p, seed: F.dropout(x, p)),
    },
    peers_differ="they draw other random numbers",
    claims={wide_product: ("16-byte loads", "16-byte stores", "no spills")},
    passes={stored_mask: 2.0, seeded: 1.0, four_words: 1.0, wide_product: 1.0},
    properties=(known_answers, statistics, extremes),
    refuses=(
        Refusal("no probability", lambda f: f(inputs(8)[0], 1.5, 0), ValueError, "p is 1.5"),
        Refusal("p is NaN", lambda f: f(inputs(8)[0], math.nan, 0), ValueError, "p is nan"),
        Refusal("negative seed", lambda f: f(inputs(8)[0], 0.5, -1), ValueError, "seed is -1"),
        Refusal("a float for a seed", lambda f: f(inputs(8)[0], 0.5, 1.0), ValueError, "seed is 1.0"),
        Refusal("not a float", lambda f: f(inputs(8)[0].long(), 0.5, 1), TypeError, "x is torch.int64"),
        Refusal("every second element", lambda f: f(inputs(8)[0][::2], 0.5, 1), ValueError, "contiguous"),
        Refusal("gradient lost", lambda f: f(inputs(8)[0].requires_grad_(), 0.5, 1), ValueError, "requires grad"),
    ),
    grad=Grad(dropout),
)

if __name__ == "__main__":
    LESSON.main()
