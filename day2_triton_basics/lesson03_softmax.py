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
from importlib import import_module

from lessonkit import DEVICE, Lesson, Mutant, Refusal, Unsupported, Work, case, expect, num_sms

import torch
import triton
import triton.language as tl

# Where a maximum starts. Not -inf: after a block that is all -inf, exp(-inf - -inf) makes the sum NaN for good.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


def reference(x):
    return torch.softmax(x, dim=-1)  # reads MN, writes MN


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
        warps = max(1, min(32, block // 512))
        softmax_row_kernel[(M,)](x, y, N, x.stride(0), y.stride(0), BLOCK_N=block, num_warps=warps)
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


# Rung 4. New: every program holds 4096 elements or more, so several short rows; 32 elements a thread, so four 16-byte
# loads in flight in bf16, and a row of 256 within a warp, whose reduction needs no barrier. One reciprocal a row
# instead of a division an element. Predicted: the same 2MN; 256 columns gain most, one row there being 512 bytes.
@triton.jit
def softmax_packed_kernel(x_ptr, y_ptr, M, N, stride_x, stride_y, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
    y = e * (1 / tl.sum(e, axis=1, keep_dims=True))
    tl.store(y_ptr + rows * stride_y + cols, y, mask=mask)


def softmax_packed(x):
    """[M, N] -> [M, N], one row or several a program, of at most 32,768 columns."""
    y, (M, N) = _prepare(x), x.shape
    if N > 32768:
        raise Unsupported("rows past 32,768: at 32 elements a thread they want more than 1024 threads")
    if y.numel():
        block = triton.next_power_of_2(N)
        rows = max(1, 4096 // block)
        softmax_packed_kernel[(triton.cdiv(M, rows),)](
            x, y, M, N, x.stride(0), y.stride(0), ROWS=rows, BLOCK_N=block, num_warps=rows * block // 1024
        )
    return y


# Rung 5. New: a long row is shared by several programs, so that an SM holds parts of several rows and reads one while
# it writes another. The (m, s) of two parts combine as in the online sum. A part leaves its pair as one 8-byte note
# (written and read whole, so no fence is needed) and waits for the others. Predicted: 2MN at any length.
@triton.jit
def softmax_shared_kernel(
    x_ptr, y_ptr, notes_ptr,  # [M, N], [M, N], [M * PARTS + 1]: zeros, of which the last one counts tickets
    M, N, stride_x, stride_y, PARTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    # A ticket, not program_id: whoever holds ticket t knows that 0..t-1 have started, so nobody waits for a program
    # that finds no room to start. CUDA promises no order of starting.
    ticket = tl.atomic_add(notes_ptr + M.to(tl.int64) * PARTS, 1, sem="relaxed")
    row = ticket // PARTS % M
    part = ticket % PARTS
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=-float("inf")).to(tl.float32)
    m = tl.maximum(tl.max(x, axis=0), LOWEST)
    e = tl.exp(x - m)
    s = tl.sum(e, axis=0)
    # m in the high half, s in the low one. Never 0, which means "not yet": if m is 0.0, its own exp(0) is in s.
    note = (m.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (s.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    notes_ptr += row * PARTS
    tl.atomic_xchg(notes_ptr + part, note, sem="relaxed")
    slots = tl.arange(0, SLOTS)
    # volatile: each look goes to the L2, where the other SMs' notes arrive, and not to this SM's L1.
    notes = tl.load(notes_ptr + slots, mask=slots < PARTS, other=-1, volatile=True)
    if WAIT:
        while tl.min((notes != 0).to(tl.int32), axis=0) == 0:
            notes = tl.load(notes_ptr + slots, mask=slots < PARTS, other=-1, volatile=True)
    mine = slots < PARTS
    ms = tl.where(mine, (notes >> 32).to(tl.int32).to(tl.float32, bitcast=True), LOWEST)
    ss = tl.where(mine, notes.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    top = tl.max(ms, axis=0)
    scale = tl.exp(m - top) / tl.sum(ss * tl.exp(ms - top), axis=0)
    tl.store(y_ptr + row * stride_y + cols, e * scale, mask=cols < N)


def softmax_shared(x):
    """[M, N] -> [M, N] for every M, N: packed up to 16,384 columns, then parts of 8192, then online."""
    expect(x=x, ndim=2, unit_stride=True)
    (M, N), parts = x.shape, triton.cdiv(x.shape[1], 8192)
    if N <= 16384:
        return softmax_packed(x)
    if parts > num_sms():  # all parts of a row must run at once, and an SM has room for one at least
        return softmax_online(x)
    y = _prepare(x)
    if M:
        notes = torch.zeros(M * parts + 1, dtype=torch.int64, device=x.device)
        # The interpreter runs programs in turn, where a wait would never end: a first round leaves all the notes.
        for wait in (False, True) if DEVICE.type == "cpu" else (True,):
            softmax_shared_kernel[(M * parts,)](
                x, y, notes, M, N, x.stride(0), y.stride(0), parts, triton.next_power_of_2(parts),
                BLOCK_N=8192, WAIT=wait, num_warps=8,
            )  # fmt: skip
    return y


def _prepare(x):
    expect(x=x, ndim=2, unit_stride=True)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def inputs(M, N, pad=0, dtype=torch.float32):
    # Centred at -5: a lane past the end that counts as 0 would be the largest of its row. Rows that lie at 1000
    # overflow without the maximum; a first half of -inf breaks a running maximum of -inf. pad: stride(0) is not N.
    x = torch.randn(M, N + pad, device=DEVICE) * 3 - 5
    x[1::3] += 1000
    x[2::3, : N // 2] = -math.inf
    return (x.to(dtype)[:, :N],)


def rows_sum_to_one(rung):
    """In fp32 to rounding; without the rescaling, or with one part's sum, they do not."""
    sums = rung(inputs(3, 16500)[0]).sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=1e-5, atol=0)


def shift_invariance(rung):
    """softmax(x + 64) = softmax(x); x is rounded so that adding 64 is exact."""
    x = (torch.randn(3, 781, device=DEVICE) * 64).round() / 16
    torch.testing.assert_close(rung(x + 64), rung(x), rtol=1e-6, atol=0)


def strange_numbers(rung):
    """One NaN or +inf makes its row NaN, a row of -inf is 0 / 0 = NaN; the rows beside them do not notice."""
    for N in (40, 16500):
        x = inputs(6, N)[0]
        x[0, 7], x[2, N - 1], x[3], x[4, :-1] = math.nan, math.inf, -math.inf, -math.inf
        torch.testing.assert_close(rung(x), reference(x), rtol=2e-5, atol=1e-8, equal_nan=True)


def _liger(x):
    return import_module("liger_kernel.ops.softmax")._softmax_forward(x)[0]  # refuses rows past 65,536


SHAPES = ((4096, 4096), (4096, 12672), (8192, 8192), (4096, 32768), (2048, 131072), (32768, 256), (32768, 1024))
LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    rungs=(softmax_unfused, softmax_row, softmax_online, softmax_packed, softmax_shared),
    checks=(
        case("no rows", M=0, N=5),
        case("no columns: torch answers with an empty tensor", M=5, N=0),
        case("a row of one is 1; 17 rows leave most of a tile empty", M=17, N=1),
        case("a prime width and a row stride that is not N", M=7, N=127, pad=3),
        case("three programs share a row; online, the first blocks of row 2 are all -inf", M=4, N=16385),
        case("more parts than the interpreter's 4 SMs: the last rung goes online", M=3, N=32769),
        case("row offsets past 2^31", gib=120, M=65537, N=32769),
        case("bytes are counted here: several tiles, the last one hanging over", M=9, N=1000),
    ),
    benches=tuple({"M": m, "N": n} for m, n in SHAPES),
    work=lambda M, N, dtype, pad=0: Work(bytes=2 * M * N * dtype.itemsize, flops=5 * M * N),
    wrong=(
        Mutant("padding counts as 0", "softmax_row_kernel", '-float("inf")', "0.0", "softmax_row"),
        Mutant("no maximum subtracted", "softmax_row_kernel", "x - tl.max(x, axis=0)", "x", "softmax_row", "nan"),
        Mutant("sum not rescaled", "softmax_online_kernel", "s * tl.exp(m - m_new)", "s", "softmax_online"),
        Mutant("starts at -inf", "softmax_online_kernel", "m = LOWEST", 'm = -float("inf")', "softmax_online", "nan"),
        Mutant("y's stride for x", "softmax_packed_kernel", "rows * stride_x", "rows * stride_y", "softmax_packed"),
        Mutant("no row mask", "softmax_packed_kernel", "(rows < M) & ", "", "softmax_packed", "out of bounds"),
        Mutant("parts keep their maxima", "softmax_shared_kernel", "tl.exp(m - top) /", "1 /", "softmax_shared"),
        Mutant("sums not rescaled", "softmax_shared_kernel", "ss * tl.exp(ms - top)", "ss", "softmax_shared"),
    ),
    peers={
        "torch": reference,
        "torch.compile": torch.compile(reference, dynamic=False),
        "liger": _liger,
        "quack": lambda x: import_module("quack.softmax").softmax_fwd(x),
    },
    claims=dict.fromkeys((softmax_online, softmax_packed), ("16-byte loads", "16-byte stores", "no spills")),
    passes={softmax_unfused: 2.5, softmax_row: 1, softmax_online: 1.5, softmax_packed: 1, softmax_shared: 1},
    properties=(rows_sum_to_one, shift_invariance, strange_numbers),
    refuses=(
        Refusal("a transposed matrix", lambda f: f(inputs(8, 8)[0].t()), ValueError, "stride 8 in its last dimension"),
        Refusal("not a float", lambda f: f(torch.ones(2, 8, device=DEVICE).long()), TypeError, "x is torch.int64"),
        Refusal("gradient lost", lambda f: f(inputs(2, 8)[0].requires_grad_()), ValueError, "requires grad"),
    ),
    twin=online_twin,
)

if __name__ == "__main__":
    LESSON.main()
