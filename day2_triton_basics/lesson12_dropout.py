"""Dropout: random numbers computed instead of stored
=====================================================
y = x / (1 - p) where a random number says keep, 0 elsewhere.

    a mask in memory              written, then read for the result    4n elements
    a mask from (seed, index)     computed where it is needed          2n elements

The second is a counter-based generator: the random number of element i is a function of the seed and i. The backward
computes the same number again, so nothing is stored. Then arithmetic decides. On an H200, at 4.2 TB/s in bf16 and 1.75
GHz, each of 132 SMs has to finish 4.5 elements per cycle. It issues 4 warp instructions per cycle, one for each of 128
threads. That leaves 28 instructions per element, and one call of the generator has about 80.

You will be able to: use counter-based random numbers, and count the instructions that an element may cost.
You need: lesson 1 (programs, masks), lesson 3 (fusing). Rung 4 is advanced.
Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 4.3 (Philox).
Run it:    python3 course.py run lesson12_dropout
Check it:  python3 course.py check lesson12_dropout
Time it:   python3 course.py bench lesson12_dropout

Answer before you read on. x is inf and its element is dropped: what does x * 0 give? Why must the number of element i
not depend on the block size?
"""

from lessonkit import About, Grad, Lesson, Mutant, Prediction, expect

import torch
import triton
import triton.language as tl

from problems.dropout import LOW, PROBLEM


# Rung 1. A mask in memory, as `noise = empty_like(x).bernoulli_(1 - p); y = x * noise` makes one in PyTorch.
# Predicted: the mask is written, x and the mask are read, y is written: 4n, twice the least. And the mask has to be
# kept until the backward.
@triton.jit
def random_word(i, seed):
    w0, w1, w2, w3 = tl.randint4x(seed, i // 4)
    return tl.where(i % 4 < 2, tl.where(i % 4 == 0, w0, w1), tl.where(i % 4 == 2, w2, w3)).to(tl.uint32, bitcast=True)


# One program owns BLOCK elements, here and in apply_kernel. Triton compiles anew for an integer argument that is 1 or a
# multiple of 16. For these two arguments do_not_specialize stops it.
@triton.jit(do_not_specialize=["seed", "drop"])
def draw_kernel(mask_ptr, n, seed, drop, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(mask_ptr + i, random_word(i, seed) >= drop.to(tl.uint32), mask=i < n)


@triton.jit
def apply_kernel(x_ptr, mask_ptr, y_ptr, n, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    # tl.where, because a product with the mask would make NaN of inf * 0.
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


# Rung 2. New: no mask in memory. The random word is a function of (seed, i), so each kernel that needs it computes it.
# Predicted: 2n, but 80 instructions per element, three times what an SM can issue at a copy's speed. Count the calls in
# the machine code before you believe it.
@triton.jit(do_not_specialize=["seed", "drop"])
def seeded_kernel(x_ptr, y_ptr, n, seed, drop, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    keep = random_word(i, seed) >= drop.to(tl.uint32)
    tl.store(y_ptr + i, tl.where(keep, x * scale, 0.0), mask=i < n)


def seeded(x, p, seed):
    """[...] -> [...], one Philox call per element."""
    return _launch(x, p, seed, seeded_kernel, 1, 1024, 4)


# Rung 3. New: the source uses all four words of a call, and does not rely on the compiler for it. A row of the [CALLS,
# 4] tile is one call. tl.join interleaves the words inside each thread, so no data moves between threads. Element i
# still gets word i % 4 of call i // 4 for every block size. A mask that changes with the block size could not be
# computed again by a backward with other blocks.
# Predicted: 1.12 times as fast. The compiler has merged the calls of rung 2 already: it needs 27 instructions per
# element. Only the choice of one word in four is saved, 3 of them.
@triton.jit(do_not_specialize=["seed", "drop"])
def four_words_kernel(x_ptr, y_ptr, n, seed, drop, scale, CALLS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * CALLS  # 64 bits once; what each thread adds fits in 32
    call = tl.arange(0, CALLS)
    i = call[:, None] * 4 + tl.arange(0, 4)[None, :]
    mask = i < tl.minimum(n - first * 4, CALLS * 4).to(tl.int32)
    x = tl.load(x_ptr + first * 4 + i, mask=mask).to(tl.float32)  # in flight while the arithmetic below runs
    w0, w1, w2, w3 = tl.randint4x(seed, first + call)
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (CALLS, 4))
    keep = word.to(tl.uint32, bitcast=True) >= drop.to(tl.uint32)
    tl.store(y_ptr + first * 4 + i, tl.where(keep, x * scale, 0.0), mask=mask)


def four_words(x, p, seed):
    """[...] -> [...], one Philox call for four elements."""
    return _launch(x, p, seed, four_words_kernel, 4, 512, 4)


# Rung 4, advanced. New: a 32 x 32 -> 64-bit product gives both halves at once (the instruction IMAD.WIDE), where
# tl.randint4x multiplies twice. A row of the tile is two calls, 8 elements: 16-byte accesses in bf16. Where there are
# many programs they have one warp each, so that they start and end at different times.
# Predicted: half the multiplications, and the speed of a copy where n is large.
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
        ctx.p, ctx.seed = p, seed  # all that the backward needs: 16 bytes, and no mask
        return wide_product(x, p, seed)

    @staticmethod
    def backward(ctx, dy):
        return wide_product(dy.contiguous(), ctx.p, ctx.seed), None, None


def dropout(x, p, seed):
    """Dropout with a gradient: dx is dropout of dy, from the same seed."""
    return _Dropout.apply(x, p, seed)


LARGE = {"n": 2**28}

# The answers: inf * 0 is NaN, so a dropped element needs tl.where. The backward computes the numbers again, perhaps
# with other blocks, and has to find the same ones.
LESSON = Lesson(
    about=About(
        teaches="random numbers computed instead of stored", hours=0.75, operator="dropout", pictures=("traffic",)
    ),
    problem=PROBLEM,
    rungs=(stored_mask, seeded, four_words, wide_product),
    predicted=(
        Prediction(
            rung=stored_mask,
            at=LARGE,
            percent_of_limit=50,
            why="The kernel that makes the mask waits for arithmetic. The compiler merges its calls, 2 for 8 elements, "
            "so it needs 22 instructions per element. It only writes, and at 4.2 TB/s 2 bytes leave time for 14.",
        ),
        Prediction(
            rung=seeded,
            at=LARGE,
            percent_of_limit=33,
            why="A thread owns 8 neighbours, and i // 4 is the same for four of them. So the compiler makes 2 calls "
            "for 8 elements: 27 instructions per element, just under what an SM issues.",
        ),
        Prediction(
            rung=four_words,
            at=LARGE,
            times=1.12,
            over=seeded,
            why="`seeded` makes no more calls: the compiler has merged them. Only the choice of a word is saved.",
        ),
        Prediction(rung=wide_product, at=LARGE, percent_of_limit=100),
    ),
    wrong=(
        Mutant("blocks start anew", "two_calls_kernel", "first + pair) * 2,", "first * 0 + pair) * 2,", "wide_product"),
        Mutant("words 1 and 2 exchanged", "four_words_kernel", "(w0, w2)", "(w0, w1)", "four_words"),
        Mutant("9 rounds: as random, not this mask", "philox", "static_range(10)", "static_range(9)", "wide_product"),
        Mutant("the seed's high half lost", "philox", "tl.uint64) >> 32)", "tl.uint64) >> 63)", "wide_product"),
        Mutant("kept elements not scaled up", "seeded_kernel", "x * scale", "x", "seeded"),
        Mutant("the stored mask's elements not scaled up", "stored_mask", "y, n, scale", "y, n, 1.0", "stored_mask"),
        Mutant("a mask of what is dropped", "draw_kernel", ">= drop", "< drop", "stored_mask"),
        Mutant("a product, not a choice", "_launch", "torch.zeros_like(x)", "x * torch.inf * 0", "four_words", "nan"),
        Mutant("mask too wide", "two_calls_kernel", "n - first", "n + 8 - first", "wide_product", "out of bounds"),
        Mutant("the threshold wraps to 0", "_launch", "drop > LOW", "p == 1", "wide_product"),
    ),
    claims={wide_product: ("16-byte loads", "16-byte stores", "no spills")},
    passes={stored_mask: 2.0, seeded: 1.0, four_words: 1.0, wide_product: 1.0},
    grad=Grad(dropout),
)

if __name__ == "__main__":
    LESSON.main()
