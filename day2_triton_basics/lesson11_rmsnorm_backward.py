"""RMSNorm backward: one pass, and a sum over rows that is the same each time
============================================================================
The forward is n = x * rstd, y = n * w. So g = dy * w is the gradient of n. An x_j changes its own n_j, and through rstd
all others of the row. With d rstd / dx_j = -rstd^3 x_j / N = -rstd^2 n_j / N, and 1[i = j] = 1 if i = j, else 0:

    dn_i/dx_j = rstd (1[i = j] - n_i n_j / N)
    dx_j = sum_i g_i dn_i/dx_j = rstd (g_j - n_j mean(g * n))

    dx = rstd * (g - n * mean(g * n))     a program per row has all that it needs
    dw = sum over rows of dy * n          a program per column would have all that it needs

    two kernels    each reads dy and x; one writes dx, the other dw    5MN elements
    one kernel     dy and x are read once, dx is written               3MN elements

Predicted gain of one kernel: 5/3. The difficulty is dw, because M rows add to the same N sums.

You will be able to: sum over rows by atomics or by partial sums, and say which of the two gives the same bits each
time.
You need: lesson 10 (RMSNorm), lesson 4 (atomics, persistent grids). course_ops.rms_norm has the kernels for longer
rows. Rung 3 is advanced.
Run it:    python3 course.py run lesson11_rmsnorm_backward
Check it:  python3 course.py check lesson11_rmsnorm_backward
Time it:   python3 course.py bench lesson11_rmsnorm_backward

Answer before you read on. 4096 programs add to one address: does the order matter for the result?
How many bytes are the partial sums of 132 programs for 4096 columns in fp32, and how many are dy, x and dx of
4096 x 4096 in bf16?
"""

from lessonkit import About, Grad, Lesson, Mutant, Prediction, Unsupported, case, expect, num_sms

import torch
import triton
import triton.language as tl

from problems.rms_norm import PROBLEM, PROBLEM_BACKWARD, same_each_time


# Rung 1. Two kernels: a program per row for dx, then a program per 64 columns that walks down all rows for dw.
# Predicted: dy and x are read twice, 5MN elements, 5/3 of the least. N / 64 programs for dw are few if N is small.
@triton.jit
def row_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, sums_ptr,  # [M, N], [M, N], [N], [M], [M, N], [N] for rung 2
    N, dy_stride, x_stride, BLOCK_N: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2^31
    cols = tl.arange(0, BLOCK_N)
    dy = tl.load(dy_ptr + row * dy_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row)
    n = x * rstd
    g = dy * tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(dx_ptr + row * N + cols, rstd * (g - n * (tl.sum(g * n, axis=0) / N)), mask=cols < N)
    if ADD:  # rung 2
        tl.atomic_add(sums_ptr + cols, dy * n, mask=cols < N, sem="relaxed")


@triton.jit
def dw_kernel(dy_ptr, x_ptr, rstd_ptr, dw_ptr, M, N, dy_stride, x_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    sums = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, M, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        sums += dy * (x * tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)[:, None])
    tl.store(dw_ptr + cols, tl.sum(sums, axis=0), mask=cols < N)


def two_reads(dy, x, w, rstd):
    """dy [M, N], x [M, N], w [N], rstd [M] fp32 -> dx [M, N], dw [N]; rows of at most 16,384."""
    dx, (M, N) = _prepare(dy, x, w, rstd), x.shape
    dw = torch.empty_like(w)
    _launch_rows(dy, x, w, rstd, dx, dw, add=False)
    if N:
        dw_kernel[(triton.cdiv(N, 64),)](dy, x, rstd, dw, M, N, dy.stride(0), x.stride(0), ROWS=32, COLS=64)
    return dx, dw


def _launch_rows(dy, x, w, rstd, dx, sums, add):
    M, N = x.shape
    if N > 16384:
        raise Unsupported("rows past 16,384 do not fit into registers: course_ops.rms_norm takes them")
    if dx.numel():
        block = triton.next_power_of_2(N)
        warps = max(1, block // 1024)
        row_kernel[(M,)](dy, x, w, rstd, dx, sums, N, dy.stride(0), x.stride(0), block, add, num_warps=warps)


# Rung 2. New: one pass. The program that holds a row of dy and x adds its share of dw to a common sum in fp32.
# Predicted: 6 bytes per element through HBM in bf16, and 4 bytes in L2 for an fp32 atomic. Rung 1 moves 10 bytes too.
# So there is no gain. The order of the additions matters, because each one rounds: the last bits of dw differ from run
# to run.
def atomics(dy, x, w, rstd):
    """dy [M, N], x [M, N], w [N], rstd [M] fp32 -> dx [M, N], dw [N]; rows of at most 16,384."""
    dx = _prepare(dy, x, w, rstd)
    sums = torch.zeros(w.shape, dtype=torch.float32, device=w.device)
    _launch_rows(dy, x, w, rstd, dx, sums, add=True)
    return dx, sums.to(w.dtype)


# Rung 3, advanced. New: a persistent grid. One program per SM walks over tiles of rows. It keeps w and its share of dw
# in registers, and writes that share once. A second kernel adds the shares in a fixed order.
#
#     program 0    tile 0, tile 132, tile 264, ...    -> shares[0, :]  --+
#     program 1    tile 1, tile 133, tile 265, ...    -> shares[1, :]  --+--> dw, in the order 0, 1, 2, ...
#
# The loop is pipelined (num_stages): loads of two tiles are in flight to shared memory while one is computed.
# Predicted: 3MN elements, the speed of a copy. A share is 4N bytes, written once and read once, and stays in L2. The
# bits are the same in each run.
@triton.jit
def walk_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, shares_ptr,  # shares: [walkers, N] fp32
    M, N, dy_stride, x_stride, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_N)
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0)[None, :]
    dw = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)[:, None]
        n = x * rstd
        g = dy * w.to(tl.float32)
        dw += dy * n
        dx = rstd * (g - n * (tl.sum(g * n, axis=1) / N)[:, None])
        tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx, mask=mask)
    tl.store(shares_ptr + tl.program_id(0).to(tl.int64) * N + cols, tl.sum(dw, axis=0), mask=cols < N)


@triton.jit
def add_shares_kernel(shares_ptr, dw_ptr, walkers, N, ROWS: tl.constexpr, COLS: tl.constexpr):  # [walkers, N], [N]
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    sums = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, walkers, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < walkers)[:, None] & (cols < N)[None, :]
        sums += tl.load(shares_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(sums, axis=0), mask=cols < N)


def _add_shares(shares, dtype):
    """shares [walkers, N] fp32 -> their sum [N]."""
    walkers, N = shares.shape
    dw = torch.empty(N, dtype=dtype, device=shares.device)
    add_shares_kernel[(triton.cdiv(N, 32),)](shares, dw, walkers, N, ROWS=32, COLS=32)
    return dw


def walk(dy, x, w, rstd):
    """dy, x [M, N], w [N], rstd [M] fp32 -> dx [M, N], dw [N]; rows of at most 16 KB."""
    dx, (M, N) = _prepare(dy, x, w, rstd), x.shape
    block = triton.next_power_of_2(max(N, 1))
    rows = 16384 // (block * x.element_size())
    if rows == 0:
        raise Unsupported("three tiles of rows past 16 KB exceed shared memory: course_ops.rms_norm takes them")
    if dx.numel() == 0:
        return dx, torch.zeros_like(w)
    walkers = min(triton.cdiv(M, rows), num_sms())
    shares = torch.empty((walkers, N), dtype=torch.float32, device=x.device)
    walk_kernel[(walkers,)](
        dy, x, w, rstd, dx, shares, M, N, dy.stride(0), x.stride(0), rows, block, STAGES=3, num_warps=8
    )  # fmt: skip
    return dx, _add_shares(shares, w.dtype)


def _prepare(dy, x, w, rstd):
    """The checks of every rung; returns an empty dx."""
    expect(dy=dy, x=x, ndim=2, same_shape=True, same_dtype=True, unit_stride=True)
    expect(x=x, w=w, same_dtype=True, unit_stride=True)
    expect(rstd=rstd, dtypes=(torch.float32,), unit_stride=True)
    if w.shape != x.shape[1:]:
        raise ValueError(f"w has shape {tuple(w.shape)}, expected {tuple(x.shape[1:])}, one weight per column of x")
    if rstd.shape != x.shape[:1]:
        raise ValueError(f"rstd has shape {tuple(rstd.shape)}, expected {tuple(x.shape[:1])}, one per row of x")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        y, rstd = PROBLEM.reference(x, w, eps)  # course_ops.rms_norm has kernels for both directions
        ctx.save_for_backward(x, w, rstd)  # 4 bytes per row more than the inputs
        return y

    @staticmethod
    def backward(ctx, dy):
        return *walk(dy.contiguous(), *ctx.saved_tensors), None  # dy may have any strides, even 0


def rms_norm(x, w, eps):
    """x [M, N], w [N] -> y [M, N], differentiable, as torch.nn.functional.rms_norm; rows of at most 16 KB."""
    return _RMSNorm.apply(x, w, eps)


def fixed_order(rung):
    """Two runs agree to the bit. Atomics add in any order, so their last bits differ."""
    if rung is atomics:
        raise Unsupported("atomics add in any order")
    same_each_time(rung)


# The answers: the order matters, because each addition rounds. The partial sums are 132 * 4096 * 4 bytes, 2.2 MB. dy,
# x and dx are 3 * 4096 * 4096 * 2 bytes, 101 MB.
LESSON = Lesson(
    about=About(
        teaches="dx and dw in one pass; sums over rows by atomics and by partial sums; a differentiable op",
        hours=0.5,
        operator="rmsnorm backward",
        pictures=("partial_gradients", "traffic"),
    ),
    problem=PROBLEM_BACKWARD,
    rungs=(two_reads, atomics, walk),
    checks=(
        *PROBLEM_BACKWARD.checks,
        case("16 KB in fp32: one row per tile", M=9, N=4096),
        case("several tiles per program on a GPU too", gib=0.5, M=4100, N=1000),
        case("bytes are counted here: several tiles per program", M=203, N=1000),
    ),
    benches=tuple(shape for shape in PROBLEM_BACKWARD.benches if shape["N"] <= 8192),
    predicted=(
        Prediction(
            rung=two_reads,
            at={"M": 4096, "N": 4096},
            percent_of_limit=60,
            why="The 64 programs for dw leave half of the SMs idle. Each has one tile of dy and one of x in flight, "
            "8 KB together. That is 0.5 MB in all, where Little's law asks for 3.4 MB.",
        ),
        Prediction(
            rung=atomics,
            at={"M": 4096, "N": 4096},
            times=1,
            over=two_reads,
            why="Rung 1 misses its own prediction by more: its second kernel has 64 programs, and this one has 4096.",
        ),
        Prediction(
            rung=walk,
            at={"M": 4096, "N": 4096},
            percent_of_limit=100,
            why="The time beyond a copy's is nearly the same at N = 256, 1024 and 4096. So it is a fixed cost. The "
            "second kernel's wait for the first is part of it.",
        ),
        Prediction(rung=walk, at={"M": 8192, "N": 8192}, percent_of_limit=100),
    ),
    wrong=(
        Mutant("no mean taken off", "row_kernel", "g - n * (tl.sum(g * n, axis=0) / N)", "g", "two_reads"),
        Mutant("the mean of the padded width", "row_kernel", "axis=0) / N", "axis=0) / BLOCK_N", "two_reads"),
        Mutant("w forgotten in the mean", "row_kernel", "tl.sum(g * n", "tl.sum(dy * n", "atomics"),
        Mutant("dw of g instead of dy", "row_kernel", "cols, dy * n", "cols, g * n", "atomics"),
        Mutant("dw of x instead of n", "dw_kernel", "(x * tl", "(x + 0 * tl", "two_reads"),
        Mutant("dy read with x's stride", "dw_kernel", "None] * dy_stride", "None] * x_stride", "two_reads"),
        Mutant("only the last tile's dw", "walk_kernel", "dw += dy", "dw = dy", "walk"),
        Mutant("a share too many", "add_shares_kernel", "(rows < w", "(rows <= w", "walk", "out of bounds"),
    ),
    claims={
        two_reads: ("16-byte loads", "no spills"),
        walk: ("walk_kernel: cp.async", "walk_kernel: 16-byte stores", "no spills"),
    },
    passes={two_reads: 2.0, atomics: 2.0, walk: 1.03},
    properties=(fixed_order,),
    grad=Grad(rms_norm, lambda x, w, eps: PROBLEM.reference(x, w, eps)[0], PROBLEM.inputs),
)

if __name__ == "__main__":
    LESSON.main()
