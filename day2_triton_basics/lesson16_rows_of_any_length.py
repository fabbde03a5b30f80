"""Rows of any length: registers, tiles, a loop, and programs that share a row
============================================================================
Advanced. Softmax, LayerNorm, RMSNorm and their backwards read a row, reduce it, and use the row again. The fastest
kernel reads it once and keeps it on the chip in between. Where it can stay depends on its length. So this lesson has
four kernels for one operator, softmax. course_ops uses the same four for the others (course_ops/kernels/_rows.py).

    row of N elements     what holds it                       rung             elements moved
    256                   a program holds several rows        softmax_packed   2MN
    8,192                 a program holds one row             softmax_row      2MN
    32,768                one program, as 16-bit data         softmax_packed   2MN
    131,072               64 programs in bf16, 4 KB each      softmax_shared   2MN
    10,000,000            does not fit: read twice            softmax_online   3MN

    softmax_packed     one program    [ row 0 ] [ row 1 ] [ row 2 ] [ row 3 ]          a tile of short rows
    softmax_row        one program    [ row 0 ............................. ]          a row in registers
    softmax_shared     program 0      [ row 0, part 0 ] ---+
                       program 1      [ row 0, part 1 ] ---+--> (m, s) of the row      parts exchange statistics
                       program 2      [ row 0, part 2 ] ---+
    softmax_online     one program    [ block 0 ] -> [ block 1 ] -> [ block 2 ]        m and s go from block to block

The budget of an H200: 132 SMs, each with 256 KB of registers (65,536 of 32 bits) and up to 2048 threads. By Little's
law (bytes in flight = bandwidth * latency), 4.2 TB/s at about 800 ns needs 3.4 MB of loads in flight, 25 KB on each SM.
At 4.2 TB/s, a matrix of 2048 x 131,072 in bf16 (1.07 GB read and written) takes at least 0.26 ms.

New words (GLOSSARY.md): spill.
You will be able to: say which of the four kernels a row needs, from N, the dtype and the registers, and write it.
You need: lesson 5 (softmax, and the loop with a rescaled sum), lesson 4 (sums of several programs).
Source of rung 3: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
Run it:    python3 course.py run lesson16_rows_of_any_length
Check it:  python3 course.py check lesson16_rows_of_any_length
Time it:   python3 course.py bench lesson16_rows_of_any_length

Answer before you read on. How many registers does a row of 32,768 columns take in fp32, and how many in bf16? Eight
programs share a row, and only seven fit on the GPU at once: what happens?
"""

import math

from lessonkit import DEVICE, About, Lesson, Mutant, Prediction, Unsupported, case, expect, num_sms, opaque

import torch
import triton
import triton.language as tl

from problems.softmax import PROBLEM

# Where a maximum starts. Not at -inf: after a block of -inf alone, exp(-inf - -inf) makes the sum NaN for good.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LOG2E = tl.constexpr(math.log2(math.e))  # exp(a) = 2^(a log2(e)), and the hardware computes powers of 2


# Rung 1. One program holds one row in registers, as fp32. The row is read once and written once.
#
#     program 0   [ row 0 .......................... | padding ]     the block is the next power of 2
#     program 1   [ row 1 .......................... | padding ]
#
# Both ends are slow. A row of 256 is 512 bytes, which is too little work for a program. A row of 32,768 is 128 KB in
# fp32, half of an SM's registers, so only one such program fits there. While it reduces, that SM has no loads in
# flight. At 65,536 the row alone is all 256 KB, so the compiler has to spill what else it needs to memory.
# Predicted: 2MN. The time of a copy from 1,024 to 8,192 columns, where an SM holds several rows; more at 32,768.
@triton.jit
def softmax_row_kernel(x_ptr, y_ptr, N, stride_x, stride_y, BLOCK_N: tl.constexpr):  # x, y: [M, N]
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * stride_y + cols, e / tl.sum(e, axis=0), mask=cols < N)


def softmax_row(x):
    """[M, N] -> [M, N], one program per row of at most 65,536 columns, 16 elements per thread up to 16,384."""
    y, (M, N) = _prepare(x), x.shape
    if N > 65536:
        raise Unsupported("rows past 65,536: 1024 threads with 64 fp32 elements each are the whole register file")
    if y.numel():
        block = triton.next_power_of_2(N)
        softmax_row_kernel[(M,)](x, y, N, x.stride(0), y.stride(0), block, num_warps=max(1, min(32, block // 512)))
    return y


# Rung 2. New: two changes, one for each end.
# Short rows: a program takes a tile of several rows. A reduction inside one warp needs no barrier.
#
#     program 0   [ row 0 .. | padding ]      2 KB of x per program at least
#                 [ row 1 .. | padding ]
#                 [ row 2 .. | padding ]
#
# Long rows: the row stays in registers as the 16 bits that were loaded. It is widened to fp32 three times: for the
# maximum, the sum, the result. `opaque` stops the compiler from keeping the fp32 values instead. A row of 32,768 takes
# 64 KB in bf16, so with 16 warps of 64 registers two such rows fit on an SM.
#
# x - m comes before the scaling by log2(e), because the difference is exact. x log2(e) is off by 0.00006 at x = 1000.
# Predicted: 2MN at the speed of a copy, at both ends. It is faster at 256 columns, where a program of rung 1 has too
# little work, and from 12,672 on, where too few loads are in flight. In between nothing changes: the second exponential
# of each element is computed while other programs on the SM load.
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
    """[M, N] -> [M, N], rows of at most 64 KB: 32,768 columns in 16 bits, 16,384 in fp32."""
    y, (M, N), size = _prepare(x), x.shape, x.element_size()
    if N * size > 65536:
        raise Unsupported("rows past 64 KB: they want more than 16 warps, of which an SM holds only one program")
    if y.numel():
        block = triton.next_power_of_2(N)
        rows = max(1, 2048 // (block * size))
        warps = max(min(2, rows * block * size // 2048), block * size // 4096)  # 64 bytes per thread, then 128
        softmax_packed_kernel[(triton.cdiv(M, rows),)](
            x, y, M, N, x.stride(0), y.stride(0), rows, block, num_warps=warps, maxnreg=64 if warps > 2 else 72
        )
    return y


# Rung 3. New: a loop over the row in blocks, so any length will do. The loop carries the statistics of the blocks so
# far: m, the maximum, and s, the sum of exp(x - m). When m grows to m_new, each term changes by the same factor:
#
#     exp(x - m_new) = exp(x - m) exp(m - m_new)        for each x of the blocks so far
#     s_new          = s exp(m - m_new) + sum(exp(block - m_new))
#
# The row is not kept, so it is read again for the result. The second pass goes backwards: the caches still hold what
# was read last.
# Predicted: 3MN elements, 2/3 of a copy's speed, more where the caches serve part of the second read. Rungs 1 and 2
# stay faster wherever they fit.
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
    """[M, N] -> [M, N], one program per row of any length, 16 elements per thread in each step."""
    y, (M, N) = _prepare(x), x.shape
    if y.numel():
        block = min(4096, triton.next_power_of_2(N))
        softmax_online_kernel[(M,)](x, y, N, x.stride(0), y.stride(0), block, num_warps=max(1, block // 512))
    return y


def online_model(x, block_n=16):
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


# Rung 4. New: several programs share a row, 4 KB each, and all of it is read once. (m, s) of two parts combine as in
# rung 3. Each part publishes its pair, waits until the pairs of all parts are there, and combines them.
#
#     program 0   [ part 0 ] -- (m, s) --> partials[row, 0] --+
#     program 1   [ part 1 ] -- (m, s) --> partials[row, 1] --+--> every part loads all words: m and s of the row
#     program 2   [ part 2 ] -- (m, s) --> partials[row, 2] --+
#
# A pair is one word of 8 bytes, and the GPU writes and reads such a word whole. So no fence is needed. (A fence orders
# two writes of a program as other programs see them.)
#
# Does every wait end? GPUs start programs in the order of their ids. So every part of the oldest unfinished row has
# started or starts next, if PARTS programs fit on the GPU at once. The host checks that. CUDA does not promise the
# order, but CUB's single-pass scan relies on it too. An atomic counter of starts would make it certain.
#
# A part is one warp, so it has no barrier. An SM holds parts of several rows: one loads while another stores.
# Predicted: 2MN at every length that the registers of all SMs hold: 1.5 times rung 3's speed at 131,072 columns.
@triton.jit
def softmax_shared_kernel(
    x_ptr, y_ptr, partials_ptr,  # [M, N], [M, N], [M, PARTS] int64 zeros
    N, stride_x, stride_y,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, PUBLISH_ONLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) // PARTS
    part = tl.program_id(0) % PARTS
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=-float("inf"))
    m = tl.maximum(tl.max(x, axis=0).to(tl.float32), LOWEST)
    s = tl.sum(tl.exp2((opaque(x).to(tl.float32) - m) * LOG2E), axis=0)
    # m in the high half, s in the low. 0 means "not published", and no pair is 0: if m is 0.0, s is at least 2^0 = 1.
    word = (m.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (s.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    partials_ptr += row * PARTS
    tl.atomic_xchg(partials_ptr + part, word, sem="relaxed")
    if PUBLISH_ONLY:
        return
    slots = tl.arange(0, SLOTS)
    mine = slots < PARTS
    partials = tl.zeros([SLOTS], tl.int64)
    while tl.min((partials != 0).to(tl.int32), axis=0) == 0:
        # volatile: every load goes to L2, where the words of other SMs arrive. L1 could hold older ones.
        partials = tl.load(partials_ptr + slots, mask=mine, other=-1, volatile=True)
    ms = tl.where(mine, (partials >> 32).to(tl.int32).to(tl.float32, bitcast=True), LOWEST)
    ss = tl.where(mine, partials.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    top = tl.max(ms, axis=0)
    total = tl.sum(ss * tl.exp2((ms - top) * LOG2E), axis=0)
    y = tl.exp2((opaque(x).to(tl.float32) - top) * LOG2E - tl.log2(total))
    tl.store(y_ptr + row * stride_y + cols, y, mask=cols < N)


def softmax_shared(x):
    """[M, N] -> [M, N], every M and N: rung 2 up to 64 KB per row, then shared; rung 3 where parts do not fit."""
    y, (M, N), size = _prepare(x), x.shape, x.element_size()
    if N * size <= 65536:
        return softmax_packed(x)
    block = max(4096 // size, triton.next_power_of_2(triton.cdiv(N, 128)))  # at most 128 words per row
    parts, warps = triton.cdiv(N, block), block * size // 4096
    if parts > 28 // warps * num_sms():  # at 72 registers per thread an SM holds 28 warps
        return softmax_online(x)
    if M:
        partials = torch.zeros(M, parts, dtype=torch.int64, device=x.device)
        slots = max(32 * warps, triton.next_power_of_2(parts))  # with fewer, two warps would load the same word
        # Interpreted programs run one after another, so a wait would not end: a first launch publishes all words.
        for publish_only in (True, False) if DEVICE.type == "cpu" else (False,):
            softmax_shared_kernel[(M * parts,)](
                x, y, partials, N, x.stride(0), y.stride(0), parts, slots, block, publish_only,
                num_warps=warps, maxnreg=72,
            )  # fmt: skip
    return y


def _prepare(x):
    expect(x=x, ndim=2, unit_stride=True)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


# The answers: the row takes 32,768 registers in fp32 and 16,384 in bf16, of an SM's 65,536. Seven programs would wait
# for ever for the eighth, which finds no place. So the host takes softmax_online there.
LESSON = Lesson(
    about=About(
        teaches="a row in registers, several rows per program, a loop over a row, programs that share a row",
        hours=1.5,
        operator="softmax",
        pictures=("shared_row", "traffic"),
    ),
    problem=PROBLEM,
    rungs=(softmax_row, softmax_packed, softmax_online, softmax_shared),
    predicted=(
        Prediction(rung=softmax_row, at={"M": 8192, "N": 8192}, percent_of_limit=100),
        Prediction(rung=softmax_packed, at={"M": 32768, "N": 256}, percent_of_limit=100),
        Prediction(rung=softmax_packed, at={"M": 4096, "N": 32768}, percent_of_limit=100),
        Prediction(rung=softmax_online, at={"M": 2048, "N": 131072}, percent_of_limit=67),
        Prediction(rung=softmax_shared, at={"M": 2048, "N": 131072}, times=1.5, over=softmax_online),
    ),
    checks=(
        *PROBLEM.checks,
        case("past the registers of the interpreter's 4 SMs: the last rung goes online", M=1, N=262145),
        case("several tiles, the last one hanging over; bytes of rung 2 are counted here", M=9, N=1000),
        case("bytes are counted here: rows past 64 KB are shared; half a row of -inf", M=3, N=32769, strange=True),
    ),
    wrong=(
        Mutant("padding counts as 0", "softmax_row_kernel", '-float("inf")', "0.0", "softmax_row"),
        Mutant("y's stride for x", "softmax_packed_kernel", "rows * stride_x", "rows * stride_y", "softmax_packed"),
        Mutant("no row mask", "softmax_packed_kernel", "(rows < M) & ", "", "softmax_packed", "out of bounds"),
        Mutant("- m too late", "softmax_packed_kernel", "- m) * LOG2E -", "* LOG2E - m * LOG2E) -", "softmax_packed"),
        Mutant("sum not rescaled", "softmax_online_kernel", "s * tl.exp(m - m_new)", "s", "softmax_online"),
        Mutant("starts at -inf", "softmax_online_kernel", "m = LOWEST", 'm = -float("inf")', "softmax_online", "nan"),
        Mutant("parts keep their maxima", "softmax_shared_kernel", "float32) - top", "float32) - m", "softmax_shared"),
        Mutant("parts not rescaled", "softmax_shared_kernel", " * tl.exp2((ms - top) * LOG2E)", "", "softmax_shared"),
        Mutant("part of -inf", "softmax_shared_kernel", "32), LOWEST", '32), -float("inf")', "softmax_shared", "nan"),
    ),
    claims=dict.fromkeys((softmax_packed, softmax_shared), ("16-byte loads", "16-byte stores", "no spills")),
    passes={softmax_row: 1, softmax_packed: 1, softmax_online: 1.5, softmax_shared: 1.5},
    passes_why="Interpreted, rung 4 loads its rows in two launches, one of which only publishes: 1.5 instead of 1.",
    cpu_model=online_model,
)

if __name__ == "__main__":
    LESSON.main()
