"""Softmax: five passes over memory become two
===========================================
softmax(x)_j = exp(x_j - m) / s with m = max(x), s = sum(exp(x - m)) along a row. It reads MN elements and writes MN.
As three kernels it moves 5MN: the max reads all; the exponentials read and write all; so does the division. Predicted
gain of fusing them: 2.5 times. At 4.2 TB/s, 8192 x 8192 in bf16 (268 MB in and out) cannot take less than 0.064 ms.

You will learn: why m is subtracted, a reduction inside a program, an online reduction, which rows fit where.
Source of rung 3: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
Run it:    python day2_triton_basics/lesson03_softmax.py
Check it:  python -m lessonkit check lesson03_softmax
Time it:   python -m lessonkit bench lesson03_softmax
"""

import math

from lessonkit import DEVICE, About, Lesson, Mutant, Unsupported, case, expect, num_sms, opaque

import torch
import triton
import triton.language as tl

from problems.softmax import PROBLEM

# Where a maximum starts. Not -inf: after a block that is all -inf, exp(-inf - -inf) makes the sum NaN for good.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LOG2E = tl.constexpr(math.log2(math.e))  # exp(a) = 2^(a log2(e)), and powers of 2 are what the hardware computes


# Rung 1. A kernel for each step, each with the whole matrix through memory. m is subtracted because exp overflows:
# past 88.7 in fp32 the quotient is inf / inf. Less m, the largest exponential is exp(0) = 1, and so s >= 1.
# Predicted: 5MN elements where 2MN would do, 2.5 times the time.
@triton.jit
def step_kernel(a_ptr, b_ptr, m_ptr, s_ptr, N, stride_a, stride_b, STEP: tl.constexpr, BLOCK_N: tl.constexpr):
    # a, b: [M, N]; m, s: [M] in fp32. A program takes a row of a through one step and leaves b, m or s.
    row = tl.program_id(0).to(tl.int64)
    m = -float("inf") if STEP == "max" else tl.load(m_ptr + row)
    s = tl.load(s_ptr + row) if STEP == "divide" else 0.0
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        # Lanes past the end must not win: a 0 there would be the maximum of every negative row.
        a = tl.load(a_ptr + row * stride_a + cols, mask=cols < N, other=-float("inf")).to(tl.float32)
        if STEP == "max":
            m = tl.maximum(m, tl.max(a, axis=0))
        else:
            b = tl.exp(a - m) if STEP == "exp" else a / s
            tl.store(b_ptr + row * stride_b + cols, b, mask=cols < N)
            if STEP == "exp":
                s += tl.sum(b, axis=0)
    tl.store(m_ptr + row, m)
    tl.store(s_ptr + row, s)


def softmax_unfused(x):
    """[M, N] -> [M, N], three kernels with one program a row."""
    y, (M, N) = _prepare(x), x.shape
    if y.numel():
        m, s = torch.empty(2, M, dtype=torch.float32, device=x.device)
        for step, a in (("max", x), ("exp", x), ("divide", y)):
            step_kernel[(M,)](a, y, m, s, N, a.stride(0), y.stride(0), step, BLOCK_N=1024)
    return y


# Rung 2. New: the row stays in the registers of one program between the steps, so it is read once and written once.
# A block is a power of two: 12,672 columns take 16,384 lanes, the rest masked. Predicted: 2MN, 2.5 times faster.
@triton.jit
def softmax_row_kernel(x_ptr, y_ptr, N, stride_x, stride_y, BLOCK_N: tl.constexpr):  # x, y: [M, N]
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * stride_y + cols, e / tl.sum(e, axis=0), mask=cols < N)


def softmax_row(x):
    """[M, N] -> [M, N], one program a row of at most 65,536; about 16 elements a thread, so more warps for more."""
    y, (M, N) = _prepare(x), x.shape
    if N > 65536:
        raise Unsupported("rows past 65,536: 1024 threads with 64 fp32 elements each are the whole register file")
    if y.numel():
        block = triton.next_power_of_2(N)
        softmax_row_kernel[(M,)](x, y, N, x.stride(0), y.stride(0), block, num_warps=max(1, min(32, block // 512)))
    return y


# Rung 3. New: rows of any length, in two passes instead of three. m and s are kept while the row goes by; when m
# grows, s is rescaled to it. The row is then read again from its end: what was read last is what the caches still
# hold. Predicted: 3MN by count, 1.5 times the least; in time less, as far as the caches serve the second read.
@triton.jit
def softmax_online_kernel(x_ptr, y_ptr, N, stride_x, stride_y, BLOCK_N: tl.constexpr):  # x, y: [M, N]
    row = tl.program_id(0).to(tl.int64)
    m = LOWEST
    s = 0.0
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, axis=0))
        s = s * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), axis=0)
        m = m_new
    blocks = tl.cdiv(N, BLOCK_N)
    for i in range(blocks):
        cols = (blocks - 1 - i) * BLOCK_N + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N).to(tl.float32)
        tl.store(y_ptr + row * stride_y + cols, tl.exp(x - m) / s, mask=cols < N)


def softmax_online(x):
    """[M, N] -> [M, N], one program a row of any length, 16 elements a thread at a time."""
    y, (M, N) = _prepare(x), x.shape
    if y.numel():
        block = min(4096, triton.next_power_of_2(N))
        softmax_online_kernel[(M,)](x, y, N, x.stride(0), y.stride(0), block, num_warps=max(1, block // 512))
    return y


def online_twin(x, block_n=16):
    """[M, N] -> [M, N], the loops of softmax_online_kernel in plain PyTorch, to step through in a debugger."""
    y, (M, N) = torch.empty_like(x), x.shape
    for row in range(M):
        m, s = torch.finfo(torch.float32).min * x.new_ones(()), x.new_zeros(())
        for start in range(0, N, block_n):
            block = x[row, start : start + block_n]
            m_new = torch.maximum(m, block.max())
            s = s * torch.exp(m - m_new) + torch.exp(block - m_new).sum()
            m = m_new
        for start in reversed(range(0, N, block_n)):
            y[row, start : start + block_n] = torch.exp(x[row, start : start + block_n] - m) / s
    return y


# Rung 4. New: a thread keeps the 16 bits that it loaded and widens them anew (lessonkit.opaque) for maximum, sum
# and result: 128 bytes fit into 64 registers (72 in small programs, by trial), so an SM holds 112 KB of rows or
# more. Short rows share a warp, whose reductions need no barrier. Predicted: 2MN as before, in less time where rung 2
# had too little in flight, from 12,672 columns on; the second exponential costs less than that memory. x - m comes
# before the scaling by log2(e): it is exact; x log2(e) would be off by 0.00006 at 1000, and overflow at 3e38.
@triton.jit
def softmax_packed_kernel(x_ptr, y_ptr, M, N, stride_x, stride_y, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=-float("inf"))
    m = tl.max(x, axis=1, keep_dims=True).to(tl.float32)
    s = tl.sum(tl.exp2((opaque(x).to(tl.float32) - m) * LOG2E), axis=1, keep_dims=True)
    y = tl.exp2((opaque(x).to(tl.float32) - m) * LOG2E - tl.log2(s))
    tl.store(y_ptr + rows * stride_y + cols, y, mask=mask)


def softmax_packed(x):
    """[M, N] -> [M, N], rows of at most 64 KB: 32,768 columns of 16 bits, 16,384 of fp32."""
    y, (M, N), size = _prepare(x), x.shape, x.element_size()
    if N * size > 65536:
        raise Unsupported("rows past 64 KB: they want more than 16 warps, of which an SM holds only one program")
    if y.numel():
        block = triton.next_power_of_2(N)
        rows = max(1, 2048 // (block * size))
        warps = max(min(2, rows * block * size // 2048), block * size // 4096)  # 64 bytes a thread, then 128
        softmax_packed_kernel[(triton.cdiv(M, rows),)](
            x, y, M, N, x.stride(0), y.stride(0), rows, block, num_warps=warps, maxnreg=64 if warps > 2 else 72
        )
    return y


# Rung 5. New: a long row is shared by programs of one warp, 4 KB each, without a barrier; an SM holds parts of several
# rows and reads one while it writes another. Two parts' (m, s) combine as in the online sum. A part leaves its pair as
# one 8-byte note (written whole, so no fence is needed) and waits for the others. Predicted: 2MN for any
# row that the registers of all SMs hold.
@triton.jit
def softmax_shared_kernel(
    x_ptr, y_ptr, notes_ptr,  # [M, N], [M, N], [M, PARTS] of zeros
    N, stride_x, stride_y, PARTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, NOTE_ONLY: tl.constexpr,
):  # fmt: skip
    # No wait is for ever: of the oldest unfinished row, all parts have started or start next, and PARTS programs fit on
    # the GPU. This takes programs to start in order of their id, which CUDA does not promise, but every GPU does; CUB's
    # single-pass scan rests on it too. To be certain, count starts with an atomic: one more trip to the L2 a program.
    row = tl.program_id(0).to(tl.int64) // PARTS
    part = tl.program_id(0) % PARTS
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=-float("inf"))
    m = tl.maximum(tl.max(x, axis=0).to(tl.float32), LOWEST)
    s = tl.sum(tl.exp2((opaque(x).to(tl.float32) - m) * LOG2E), axis=0)
    # m in the high half, s in the low. Never 0, which means "not yet": if m is 0.0, its own 2^0 is in s.
    note = (m.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (s.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    notes_ptr += row * PARTS
    tl.atomic_xchg(notes_ptr + part, note, sem="relaxed")
    if NOTE_ONLY:
        return
    slots = tl.arange(0, SLOTS)
    mine = slots < PARTS
    notes = tl.zeros([SLOTS], tl.int64)
    while tl.min((notes != 0).to(tl.int32), axis=0) == 0:
        # volatile: each look goes to the L2, where the other SMs' notes arrive, and not to this SM's L1.
        notes = tl.load(notes_ptr + slots, mask=mine, other=-1, volatile=True)
    ms = tl.where(mine, (notes >> 32).to(tl.int32).to(tl.float32, bitcast=True), LOWEST)
    ss = tl.where(mine, notes.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    top = tl.max(ms, axis=0)
    total = tl.sum(ss * tl.exp2((ms - top) * LOG2E), axis=0)
    y = tl.exp2((opaque(x).to(tl.float32) - top) * LOG2E - tl.log2(total))
    tl.store(y_ptr + row * stride_y + cols, y, mask=cols < N)


def softmax_shared(x):
    """[M, N] -> [M, N] for every M, N: packed up to 64 KB a row, then shared, and online past about 100 KB an SM."""
    y, (M, N), size = _prepare(x), x.shape, x.element_size()
    if N * size <= 65536:
        return softmax_packed(x)
    block = max(4096 // size, triton.next_power_of_2(triton.cdiv(N, 128)))  # more than 128 notes take long to read
    parts, warps = triton.cdiv(N, block), block * size // 4096
    if parts > 28 // warps * num_sms():  # all parts of a row must run at once: 28 warps an SM, at 72 registers a thread
        return softmax_online(x)
    if M:
        notes = torch.zeros(M, parts, dtype=torch.int64, device=x.device)
        slots = max(32 * warps, triton.next_power_of_2(parts))  # two warps on one note may not see it at the same time
        # Interpreted, programs run in turn and a wait would never end: a first round leaves the notes (1.5 in passes).
        for note_only in (True, False) if DEVICE.type == "cpu" else (False,):
            softmax_shared_kernel[(M * parts,)](
                x, y, notes, N, x.stride(0), y.stride(0), parts, slots, block, note_only, num_warps=warps, maxnreg=72
            )
    return y


def _prepare(x):
    expect(x=x, ndim=2, unit_stride=True)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


LESSON = Lesson(
    about=About(
        teaches="a reduction inside a program; five passes become two; online softmax; which rows fit where",
        hours=1.25,
        star=True,
        operator="softmax",
    ),
    problem=PROBLEM,
    rungs=(softmax_unfused, softmax_row, softmax_online, softmax_packed, softmax_shared),
    checks=(
        *PROBLEM.checks,
        case("past the registers of the interpreter's 4 SMs: the last rung goes online", M=1, N=262145),
        case("several tiles, the last one hanging over; bytes of rung 4 are counted here", M=9, N=1000),
        case("bytes are counted here: rows past 64 KB are shared; half a row of -inf", M=3, N=32769, strange=True),
    ),
    wrong=(
        Mutant("padding counts as 0", "softmax_row_kernel", '-float("inf")', "0.0", "softmax_row"),
        Mutant("no maximum subtracted", "softmax_row_kernel", "x - tl.max(x, axis=0)", "x", "softmax_row", "nan"),
        Mutant("sum not rescaled", "softmax_online_kernel", "s * tl.exp(m - m_new)", "s", "softmax_online"),
        Mutant("starts at -inf", "softmax_online_kernel", "m = LOWEST", 'm = -float("inf")', "softmax_online", "nan"),
        Mutant("y's stride for x", "softmax_packed_kernel", "rows * stride_x", "rows * stride_y", "softmax_packed"),
        Mutant("no row mask", "softmax_packed_kernel", "(rows < M) & ", "", "softmax_packed", "out of bounds"),
        Mutant("- m too late", "softmax_packed_kernel", "- m) * LOG2E -", "* LOG2E - m * LOG2E) -", "softmax_packed"),
        Mutant("parts keep their maxima", "softmax_shared_kernel", "float32) - top", "float32) - m", "softmax_shared"),
        Mutant("parts not rescaled", "softmax_shared_kernel", " * tl.exp2((ms - top) * LOG2E)", "", "softmax_shared"),
        Mutant("part of -inf", "softmax_shared_kernel", "32), LOWEST", '32), -float("inf")', "softmax_shared", "nan"),
    ),
    claims=dict.fromkeys((softmax_packed, softmax_shared), ("16-byte loads", "16-byte stores", "no spills")),
    passes={softmax_unfused: 2.5, softmax_row: 1, softmax_online: 1.5, softmax_packed: 1, softmax_shared: 1.5},
    cpu_model=online_twin,
)

if __name__ == "__main__":
    LESSON.main()
