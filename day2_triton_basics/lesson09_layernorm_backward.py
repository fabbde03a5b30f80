"""LayerNorm backward: one sum along the row, one down the column
=============================================================
The forward is x_hat = (x - mean) * rstd, y = x_hat * w + b. So g = dy * w is the gradient of x_hat. An x_j changes
its own x_hat_j, and through mean and rstd all others of the row (1[i = j] is 1 if i = j, and 0 elsewhere):

    dx_hat_i/dx_j = rstd (1[i = j] - 1/N - x_hat_i x_hat_j / N)       from x, from the mean, from rstd
    dx_j = sum_i g_i dx_hat_i/dx_j = rstd (g_j - c2 - x_hat_j c1)     c1 = mean(g * x_hat), c2 = mean(g) over the row

    dx = rstd * (g - x_hat * c1 - c2)     along a row: a program per row
    dw = sum over rows of dy * x_hat      down a column
    db = sum over rows of dy              down a column

    two kernels    each reads dy and x; one writes dx, the other dw and db    5MN elements
    one kernel     dy and x are read once, dx is written                      3MN elements

Predicted gain of one kernel: 5/3. On an H200, at 4.2 TB/s, 8192 x 8192 in bf16 (403 MB) takes at least 0.096 ms.

You will be able to: keep sums over many rows in registers, say what atomics cost, and add partial sums in a fixed
order.
You need: lesson 8 (LayerNorm), lesson 4 (atomics, persistent grids). course_ops.layer_norm has the kernels for longer
rows. Rung 3 is advanced.
Run it:    python3 course.py run lesson09_layernorm_backward
Check it:  python3 course.py check lesson09_layernorm_backward
Time it:   python3 course.py bench lesson09_layernorm_backward

Answer before you read on. Why is the sum of dx 0 in every row? How many bytes of registers do dw and db take at
N = 8192?
"""

from lessonkit import About, Grad, Lesson, Mutant, Prediction, Unsupported, case, expect, num_sms

import torch
import triton
import triton.language as tl

from problems.layer_norm import PROBLEM, PROBLEM_BACKWARD


# Rung 1. A kernel for each direction: a program per row for dx, a program per 64 columns for dw and db.
# Predicted: dy and x are read twice, 5MN elements, 5/3 of the least. At N = 4096 there are only 64 programs for dw.
@triton.jit
def dx_kernel(
    dy_ptr, x_ptr,  # [M, N] each, rows stride_dy and stride_x elements apart
    w_ptr,  # [N]
    mean_ptr, rstd_ptr,  # [M] each, fp32
    dx_ptr,  # [M, N]
    dw_ptr, db_ptr,  # [N] each, fp32; used by rung 2
    N, stride_dy, stride_x, ATOMIC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    dy = tl.load(dy_ptr + row * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row)
    x_hat = (x - tl.load(mean_ptr + row)) * rstd  # in the padding dy is 0, so every product with it below is 0
    c1 = tl.sum(dy * w * x_hat, axis=0) / N
    c2 = tl.sum(dy * w, axis=0) / N
    tl.store(dx_ptr + row * N + cols, rstd * (dy * w - x_hat * c1 - c2), mask=mask)
    if ATOMIC:
        tl.atomic_add(dw_ptr + cols, dy * x_hat, mask=mask, sem="relaxed")
        tl.atomic_add(db_ptr + cols, dy, mask=mask, sem="relaxed")


@triton.jit
def dw_db_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, dw_ptr, db_ptr, M, N, stride_dy, stride_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, M, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
        dy, x_hat = load_rows(dy_ptr, x_ptr, mean_ptr, rstd_ptr, rows, cols, M, N, stride_dy, stride_x)
        dw += dy * x_hat
        db += dy
    tl.store(dw_ptr + cols, tl.sum(dw, axis=0, keep_dims=True), mask=cols < N)
    tl.store(db_ptr + cols, tl.sum(db, axis=0, keep_dims=True), mask=cols < N)


@triton.jit
def load_rows(dy_ptr, x_ptr, mean_ptr, rstd_ptr, rows, cols, M, N, stride_dy, stride_x):
    """dy and x_hat of a tile in fp32; both are 0 in rows past M, and dy is 0 in columns past N."""
    mask = (rows < M) & (cols < N)
    dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
    return dy, (x - mean) * rstd


def layernorm_backward_naive(dy, x, w, mean, rstd):
    """dy [M, N], x [M, N], w [N], mean [M], rstd [M] (fp32) -> dx [M, N], dw [N], db [N]; N up to 32768."""
    M, N, dx, dw, db = _prepare(dy, x, w, mean, rstd, longest=32768)
    if dx.numel():
        strides, block = (dy.stride(0), x.stride(0)), triton.next_power_of_2(N)
        warps = min(32, max(1, block // 512))
        dx_kernel[(M,)](dy, x, w, mean, rstd, dx, dw, db, N, *strides, ATOMIC=False, BLOCK_N=block, num_warps=warps)
        dw_db_kernel[(triton.cdiv(N, 64),)](dy, x, mean, rstd, dw, db, M, N, *strides, BLOCK_M=32, BLOCK_N=64)
    return dx, dw, db


# Rung 2. New: one kernel. The program that computes dx has dy and x_hat in registers, so it adds its row to dw and db
# by atomics. (Triton's layer-norm tutorial takes locks for groups of rows instead.)
# Predicted: x and dy are read once, 6 bytes per element through HBM in bf16. But each element costs two fp32 atomics, 8
# bytes in L2: 14 bytes where rung 1 moves 10, so 0.71 times its speed. M atomics go to each address, and L2 does these
# one after another. Their order is not fixed, so two runs on the same input may differ in the last digits.
def layernorm_backward_atomic(dy, x, w, mean, rstd):
    """As layernorm_backward_naive, one kernel; dw and db differ from run to run."""
    M, N, dx, _, _ = _prepare(dy, x, w, mean, rstd, longest=32768)
    dw, db = torch.zeros((2, N), dtype=torch.float32, device=x.device)
    if dx.numel():
        block = triton.next_power_of_2(N)
        warps = min(32, max(1, block // 512))
        dx_kernel[(M,)](dy, x, w, mean, rstd, dx, dw, db, N, dy.stride(0), x.stride(0), True, block, num_warps=warps)
    return dx, dw.to(w.dtype), db.to(w.dtype)


# Rung 3, advanced. New: a persistent grid, as many programs as the GPU runs at once. Each walks over many rows and
# keeps dw and db in fp32 registers from its first row to its last. It writes them once, and a second kernel adds them
# in a fixed order:
#
#     program 0    rows 0, 264, 528, ...    -> partial_dw[0, :], partial_db[0, :]  --+
#     program 1    rows 1, 265, 529, ...    -> partial_dw[1, :], partial_db[1, :]  --+--> dw, db
#
# With two programs on an SM, few loads are in flight while one of them computes. So each program loads its next rows
# before it works on the present ones. Both sums of a row are one reduction, so the warps wait for each other once per
# row.
# Predicted: 3MN elements, the speed of a copy. At N = 4096 the partial sums of 264 programs are 8.7 MB, which L2 holds.
@triton.jit
def layernorm_backward_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_dw_ptr, partial_db_ptr, M, N, stride_dy, stride_x,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    cols = tl.arange(0, BLOCK_N)[None, :]
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0)
    dw = tl.zeros((ROWS, BLOCK_N), tl.float32)
    db = tl.zeros((ROWS, BLOCK_N), tl.float32)
    rows = program * ROWS + tl.arange(0, ROWS)[:, None]
    next_dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=(rows < M) & (cols < N), other=0.0)
    next_x = tl.load(x_ptr + rows * stride_x + cols, mask=(rows < M) & (cols < N), other=0.0)
    for _ in range(program, tl.cdiv(M, ROWS), programs):
        mask = (rows < M) & (cols < N)
        dy, x = next_dy.to(tl.float32), next_x.to(tl.float32)
        after = rows + programs * ROWS
        next_dy = tl.load(dy_ptr + after * stride_dy + cols, mask=(after < M) & (cols < N), other=0.0)
        next_x = tl.load(x_ptr + after * stride_x + cols, mask=(after < M) & (cols < N), other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        x_hat = (x - tl.load(mean_ptr + rows, mask=rows < M, other=0.0)) * rstd
        g = dy * w.to(tl.float32)
        c1, c2 = row_sums(g, x_hat)
        tl.store(dx_ptr + rows * N + cols, rstd * (g - x_hat * (c1 / N) - c2 / N), mask=mask)
        dw += dy * x_hat
        db += dy
        rows = after
    tl.store(partial_dw_ptr + program * N + cols, tl.sum(dw, axis=0, keep_dims=True), mask=cols < N)
    tl.store(partial_db_ptr + program * N + cols, tl.sum(db, axis=0, keep_dims=True), mask=cols < N)


@triton.jit
def row_sums(g, x_hat):
    c1, c2 = tl.split(tl.sum(tl.join(g * x_hat, g), axis=1))  # [ROWS, BLOCK_N, 2] -> [ROWS] each
    return c1[:, None], c2[:, None]


@triton.jit
def add_partials_kernel(
    partial_dw_ptr, partial_db_ptr, dw_ptr, db_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):  # partial [P, N] in fp32 -> [N]
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    dw = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P).to(tl.int64)[:, None]
        mask = (p < P) & (cols < N)
        dw += tl.load(partial_dw_ptr + p * N + cols, mask=mask, other=0.0)
        db += tl.load(partial_db_ptr + p * N + cols, mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(dw, axis=0, keep_dims=True), mask=cols < N)
    tl.store(db_ptr + cols, tl.sum(db, axis=0, keep_dims=True), mask=cols < N)


def layernorm_backward_persistent(dy, x, w, mean, rstd):
    """As layernorm_backward_naive, dw and db in a fixed order; N up to 8192."""
    M, N, dx, dw, db = _prepare(dy, x, w, mean, rstd, longest=8192)
    if dx.numel():
        block = triton.next_power_of_2(N)
        # 16 elements per thread: dw and db take 32 registers, and at 128 registers an SM holds 512 threads.
        # At N <= 512 few programs add up the partial sums. So half as many programs of twice the size write them.
        rows = max(1, (4096 if N <= 512 else 2048) // block)
        warps = rows * block // 512
        programs = min(triton.cdiv(M, rows), num_sms() * (1 if N <= 512 else max(1, 16 // warps)))
        partial_dw, partial_db = torch.empty((2, programs, N), dtype=torch.float32, device=x.device)
        layernorm_backward_kernel[(programs,)](
            dy, x, w, mean, rstd, dx, partial_dw, partial_db, M, N, dy.stride(0), x.stride(0), rows, block,
            num_warps=warps, maxnreg=128,
        )  # fmt: skip
        _add_partials(partial_dw, partial_db, dw, db)
    return dx, dw, db


def _add_partials(partial_dw, partial_db, dw, db):
    P, N = partial_dw.shape
    add_partials_kernel[(triton.cdiv(N, 32),)](partial_dw, partial_db, dw, db, P, N, BLOCK_P=64, BLOCK_N=32)


def _prepare(dy, x, w, mean, rstd, longest=2**31 - 1):
    expect(dy=dy, x=x, ndim=2, same_shape=True, same_dtype=True, unit_stride=True)
    expect(x=x, w=w, same_dtype=True)
    expect(mean=mean, rstd=rstd, ndim=1, same_shape=True, contiguous=True, dtypes=(torch.float32,))
    M, N = x.shape
    if w.shape != (N,) or mean.shape != (M,):
        raise ValueError(f"w {tuple(w.shape)}, mean {tuple(mean.shape)}: expected ({N},), ({M},) for x {M} x {N}")
    if longest < N:
        raise Unsupported(f"rows past {longest} do not fit one program: course_ops.layer_norm takes them")
    dx = torch.empty((M, N), dtype=x.dtype, device=x.device)
    dw, db = (torch.empty if M else torch.zeros)((2, N), dtype=w.dtype, device=x.device)  # a sum of no rows is 0
    return M, N, dx, dw, db


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        y, mean, rstd = PROBLEM.reference(x, w, b)  # course_ops.layer_norm has kernels for both directions
        ctx.save_for_backward(x, w, mean, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        return layernorm_backward_persistent(dy.contiguous(), *ctx.saved_tensors)


def layernorm(x, w, b):
    """x [M, N], w [N], b [N] -> LayerNorm of x, differentiable. Saves x, w and 8 bytes per row; N up to 8192."""
    return _LayerNorm.apply(x, w, b)


def layernorm_torch(x, w, b):
    return torch.nn.functional.layer_norm(x, w.shape, w, b)


# fmt: off
WRONG = (
    Mutant("the mean of g forgotten", "dx_kernel", "- x_hat * c1 - c2", "- x_hat * c1", "layernorm_backward_naive"),
    Mutant("dw of the raw x", "load_rows", "dy, (x - mean) * rstd", "dy, x * rstd", "layernorm_backward_naive"),
    Mutant("sums that start at nothing", "layernorm_backward_atomic", "torch.zeros((2, N)", "torch.empty((2, N)",
           "layernorm_backward_atomic", "nan"),
    Mutant("rows replace each other's db", "dx_kernel", 'tl.atomic_add(db_ptr + cols, dy, mask=mask, sem="relaxed")',
           "tl.store(db_ptr + cols, dy, mask=mask)", "layernorm_backward_atomic"),
    Mutant("partial dw kept in half precision", "layernorm_backward_kernel", "dw += dy * x_hat",
           "dw = (dw + dy * x_hat).to(tl.float16).to(tl.float32)", "layernorm_backward_persistent"),
    Mutant("every second tile of rows skipped", "layernorm_backward_kernel", "rows + programs * ROWS",
           "rows + 2 * programs * ROWS", "layernorm_backward_persistent", "nan"),
    Mutant("the last partial sums left out", "add_partials_kernel", "(p < P)", "(p < P - 1)",
           "layernorm_backward_persistent"),
)
# fmt: on

# The answers: c2 is the mean of g, and x_hat sums to 0 in a row, so g - x_hat c1 - c2 sums to 0. (To add one value to
# all of x changes no y.) At N = 8192 dw and db are 2 * 8192 fp32 sums, 64 KB of registers in each program.
LESSON = Lesson(
    about=About(
        teaches="dx per row, dw and db over all rows, from one read of x and dy; a differentiable op",
        hours=0.75,
        operator="layernorm backward",
        pictures=("partial_gradients", "traffic"),
    ),
    problem=PROBLEM_BACKWARD,
    rungs=(layernorm_backward_naive, layernorm_backward_atomic, layernorm_backward_persistent),
    checks=(
        *PROBLEM_BACKWARD.checks,
        case("more tiles than programs, so that each walks", M=301, N=128),
        case("the widest block, one lane of it padding", M=5, N=8191),
        case("the same on a GPU, which has more programs", gib=0.9, M=9001, N=1000),
        case("the bytes are counted here", M=128, N=4096),
    ),
    benches=tuple({"M": m, "N": n} for m, n in ((32768, 256), (32768, 1024), (4096, 4096), (8192, 8192))),
    predicted=(
        Prediction(
            rung=layernorm_backward_naive,
            at={"M": 4096, "N": 4096},
            percent_of_limit=60,
            why="The 64 programs for dw and db leave half of the SMs idle. Each has one tile of dy and one of x in "
            "flight, 8 KB together. That is 0.5 MB in all, where Little's law asks for 3.4 MB.",
        ),
        Prediction(
            rung=layernorm_backward_atomic,
            at={"M": 4096, "N": 4096},
            times=0.71,
            over=layernorm_backward_naive,
            why="Rung 1 misses its own prediction by more: its second kernel has 64 programs, and this one has 4096.",
        ),
        Prediction(
            rung=layernorm_backward_persistent,
            at={"M": 4096, "N": 4096},
            percent_of_limit=100,
            why="The time beyond a copy's is nearly the same at N = 256, 1024 and 4096. So it is a fixed cost. The "
            "second kernel's wait for the first is part of it.",
        ),
    ),
    wrong=WRONG,
    claims={layernorm_backward_persistent: ("16-byte loads",)},
    passes={layernorm_backward_naive: 2.0, layernorm_backward_atomic: 2.65, layernorm_backward_persistent: 1.18},
    passes_why="In bf16, and the interpreter has no cache. Rung 1: 5/3, and w for every row. Rung 2: also 8 bytes of "
    "atomics per element. Rung 3: also the partial sums of 8 programs, written and read, beside only 128 rows.",
    grad=Grad(layernorm, layernorm_torch, PROBLEM.inputs),
)

if __name__ == "__main__":
    LESSON.main()
