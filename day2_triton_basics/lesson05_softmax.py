"""Softmax: five passes over memory become two
===========================================
x is a matrix of M rows and N columns. Each row is taken for itself: softmax(x)_j = exp(x_j - m) / s, with the row's
maximum m = max(x) and the row's sum s = sum(exp(x - m)). This reads MN elements and writes MN.

    three kernels    the maximum reads x; the exponentials read x and write y; the division reads y and writes y    5MN
    one kernel       x is read once, y is written once                                                              2MN

Predicted gain of one kernel: 2.5 times. On an H200, at 4.2 TB/s, 8192 x 8192 in bf16 (268 MB read and written) takes at
least 0.064 ms.

New words (GLOSSARY.md): online softmax.
You will be able to: say why m is subtracted; reduce inside a program; write a loop that rescales its running sum.
You need: lesson 1 (programs, offsets, masks), lesson 3 (fusing), lesson 4 (tl.sum, the sum inside a program).
lesson16_rows_of_any_length goes on from here.
Source of rung 3: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
Run it:    python3 course.py run lesson05_softmax
Check it:  python3 course.py check lesson05_softmax
Time it:   python3 course.py bench lesson05_softmax

Answer before you read on. x = [1000, 1001]: what does exp(x) / sum(exp(x)) give in fp32? A row has 5 elements and a
block 8 lanes: what must the other 3 lanes hold for the maximum, and what for the sum?
"""

from lessonkit import About, Lesson, Mutant, Prediction, Unsupported, case, expect

import torch
import triton
import triton.language as tl

from problems.softmax import PROBLEM


# Rung 1. A kernel for each of the three steps, and the whole matrix goes through memory in each. One source serves all
# three: STEP is a constexpr, so Triton compiles a kernel of its own for each value, with that value's branches only.
#
# m is subtracted because exp(x) overflows fp32 where x is past 88.7. It is inf there, and inf / inf is NaN. With m
# subtracted, the largest exponential is 1.
# Predicted: 5MN elements, 2.5 times the least time.
@triton.jit
def step_kernel(a_ptr, b_ptr, m_ptr, s_ptr, N, stride_a, stride_b, STEP: tl.constexpr, BLOCK_N: tl.constexpr):
    # a, b: [M, N]; m, s: [M] in fp32. A program takes one row of a through one step. The steps "exp" and "divide" write
    # b. Each step also writes m and s, whether they are new or not: 8 bytes per row, which do not count.
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
    """[M, N] -> [M, N], three kernels with one program per row."""
    y, (M, N) = _prepare(x), x.shape
    if y.numel():
        m, s = torch.empty(2, M, dtype=torch.float32, device=x.device)
        for step, a in (("max", x), ("exp", x), ("divide", y)):
            step_kernel[(M,)](a, y, m, s, N, a.stride(0), y.stride(0), step, BLOCK_N=1024)
    return y


# Rung 2. New: one program holds its row in registers through all three steps. The row is read once and written once.
# A block is a power of two, so 12,672 columns take 16,384 lanes. The lanes past the end are padding. They hold -inf,
# which is never the maximum, and exp(-inf) = 0 adds nothing to the sum:
#
#     N = 5, 8 lanes     [ 1    3    2    5    4    -inf -inf -inf ]      m = 5
#     exp(x - m)         [ 0.02 0.14 0.05 1    0.37 0    0    0    ]      s = 1.57
#
# A thread holds 16 elements: in bf16 that is two loads of 16 bytes in flight.
# Predicted: 2MN elements, 2.5 times as fast as rung 1.
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


# Rung 3. New: a loop over the row in blocks, so any length will do, and two passes in place of three.
#
#     pass 1, forwards     [ block 0 ] --> [ block 1 ] --> [ block 2 | padding ]      each step updates m and s
#     pass 2, backwards    [ block 0 ] <-- [ block 1 ] <-- [ block 2 | padding ]      y = exp(x - m) / s
#
# The first pass keeps m, the maximum of the blocks so far, and s, the sum of exp(x - m) over them. When m grows to
# m_new, each term changes by the same factor, so their sum does too:
#
#     exp(x - m_new) = exp(x - m) exp(m - m_new)        for each x of the blocks so far
#     s_new          = s exp(m - m_new) + sum(exp(block - m_new))
#
#     block      m   s
#     [1, 3]     3   exp(1 - 3) + exp(3 - 3)                     = 1.135
#     [2, 5]     5   1.135 exp(3 - 5) + exp(2 - 5) + exp(5 - 5)  = 1.203    the sum of all four, with m = 5
#
# m starts at the lowest finite value. With -inf, a first block of -inf alone would give exp(-inf - -inf), which is NaN.
#
# The second pass reads the row again. It goes backwards, because the caches still hold what was read last.
# Predicted: 3MN elements are moved, 1.5 times rung 2's. L2 has 60 MB. A program has 8 warps and an SM room for 64, so 8
# programs run on an SM and 1056 on the GPU. At N = 8192 their rows are 17 MB. So L2 serves the second read, and the
# time is that of a copy. At N = 131,072 the rows are 277 MB, so both reads go through HBM: 2/3 of a copy's speed.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)  # a kernel may use a global name only if it is a tl.constexpr


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


def _prepare(x):
    expect(x=x, ndim=2, unit_stride=True)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


# The answers: exp(1000) and exp(1001) are inf in fp32, and inf / inf is NaN for both elements. The other 3 lanes hold
# -inf for the maximum. For the sum they hold 0, which is what exp makes of -inf.
LESSON = Lesson(
    about=About(
        teaches="a reduction inside a program; five passes become two; online softmax",
        hours=1,
        star=True,
        operator="softmax",
        pictures=("online_softmax", "traffic"),
    ),
    problem=PROBLEM,
    rungs=(softmax_unfused, softmax_row, softmax_online),
    predicted=(
        Prediction(rung=softmax_unfused, at={"M": 8192, "N": 8192}, percent_of_limit=40),
        Prediction(rung=softmax_row, at={"M": 8192, "N": 8192}, times=2.5, over=softmax_unfused),
        Prediction(
            rung=softmax_online,
            at={"M": 8192, "N": 8192},
            percent_of_limit=100,
            why="The two loops take 28 instructions per element on sm_90. An SM issues them for 4.5 elements per "
            "cycle, which is no more than a copy moves. So each wait at a barrier is lost time.",
        ),
        Prediction(rung=softmax_online, at={"M": 2048, "N": 131072}, percent_of_limit=67),
    ),
    checks=(
        *PROBLEM.checks,
        case("several blocks, the last one hanging over; half a row of -inf", M=3, N=32769, strange=True),
        case("bytes are counted here", M=9, N=1000),
    ),
    wrong=(
        Mutant("padding counts as 0", "softmax_row_kernel", '-float("inf")', "0.0", "softmax_row"),
        Mutant("no maximum subtracted", "softmax_row_kernel", "x - tl.max(x, axis=0)", "x", "softmax_row", "nan"),
        Mutant("sum not rescaled", "softmax_online_kernel", "s * tl.exp(m - m_new)", "s", "softmax_online"),
        Mutant("starts at -inf", "softmax_online_kernel", "m = LOWEST", 'm = -float("inf")', "softmax_online", "nan"),
        Mutant("x divided, not exp(x - m)", "softmax_unfused", '("divide", y)', '("divide", x)', "softmax_unfused"),
        Mutant("the sum of the last block alone", "step_kernel", "s += tl.sum", "s = tl.sum", "softmax_unfused"),
    ),
    claims={softmax_row: ("16-byte loads", "16-byte stores")},
    passes={softmax_unfused: 2.5, softmax_row: 1, softmax_online: 1.5},
    cpu_model=online_model,
)

if __name__ == "__main__":
    LESSON.main()
