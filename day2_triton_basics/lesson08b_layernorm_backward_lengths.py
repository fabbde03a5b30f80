"""LayerNorm backward at every row length, and the differentiable op
==================================================================
Lesson 8's last rung keeps dw and db, 8 bytes a column, in the registers of one program, and the next row beside them.
An SM has 256 KB of registers: at 8192 columns one program is all that runs there, and whatever it waits for, nobody
else works meanwhile; at 32768 nothing is left for x and dy. This lesson first moves what is on its way out of the
registers, then splits rows by columns. `layernorm` is differentiable: PyTorch forward, this lesson backward. The op
with kernels in both directions, which also takes lesson 8's kernel for rows up to 2048, is course_ops.layer_norm.

You will learn: asynchronous copies by num_stages, programs that share a row and tell each other its sums, when all
programs must be resident at once, and a torch.autograd.Function over Triton kernels.
Run it:    python day2_triton_basics/lesson08b_layernorm_backward_lengths.py
Check it:  python -m lessonkit check lesson08b_layernorm_backward_lengths
Time it:   python -m lessonkit bench lesson08b_layernorm_backward_lengths
"""

from lessonkit import DEVICE, About, Grad, Lesson, Mutant, Unsupported, case, expect, num_sms

import torch
import triton
import triton.language as tl

from problems.layer_norm import PROBLEM, PROBLEM_BACKWARD


# Rung 1. Lesson 8's persistent kernel with the rows that come next in shared memory instead of registers: num_stages=3
# makes the compiler turn the loads of the loop into cp.async, which copies from memory to shared memory while the
# threads do something else, two rows ahead. Predicted: 3MN as before; twice the bytes on the way, most gained at 8192.
# Rows of 256 lose: a tile of many short rows has as many means and rstds to copy, four bytes at a time.
@triton.jit
def staged_kernel(
    dy_ptr, x_ptr,  # [M, N] each, rows stride_dy and stride_x elements apart
    w_ptr,  # [N]
    mean_ptr, rstd_ptr,  # [M] each, fp32
    dx_ptr,  # [M, N]
    partial_dw_ptr, partial_db_ptr,  # [programs, N] each, fp32
    M, N, stride_dy, stride_x, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    cols = tl.arange(0, BLOCK_N)[None, :]
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0)
    dw = tl.zeros((ROWS, BLOCK_N), tl.float32)
    db = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for tile in tl.range(program, tl.cdiv(M, ROWS), programs, num_stages=3):
        rows = tile * ROWS + tl.arange(0, ROWS)[:, None]  # int64, as program is
        dy, x_hat = load_rows(dy_ptr, x_ptr, mean_ptr, rstd_ptr, rows, cols, M, N, stride_dy, stride_x)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        g = dy * w.to(tl.float32)
        c1, c2 = row_sums(g, x_hat)
        dx = rstd * (g - x_hat * (c1 / N) - c2 / N)
        tl.store(dx_ptr + rows * N + cols, dx, mask=(rows < M) & (cols < N))
        dw += dy * x_hat
        db += dy
    tl.store(partial_dw_ptr + program * N + cols, tl.sum(dw, axis=0, keep_dims=True), mask=cols < N)
    tl.store(partial_db_ptr + program * N + cols, tl.sum(db, axis=0, keep_dims=True), mask=cols < N)


@triton.jit
def load_rows(dy_ptr, x_ptr, mean_ptr, rstd_ptr, rows, cols, M, N, stride_dy, stride_x):
    """dy and x_hat of a tile in fp32; both are 0 in rows past M, and dy is 0 in columns past N."""
    mask = (rows < M) & (cols < N)
    dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
    return dy, (x - mean) * rstd


@triton.jit
def row_sums(g, x_hat):
    c1, c2 = tl.split(tl.sum(tl.join(g * x_hat, g), axis=1))  # [ROWS, BLOCK_N, 2] -> [ROWS] each
    return c1[:, None], c2[:, None]


def layernorm_backward_staged(dy, x, w, mean, rstd):
    """dy [M, N], x [M, N], w [N], mean [M], rstd [M] (fp32) -> dx [M, N], dw [N], db [N]; N up to 8192."""
    M, N, dx, dw, db = _prepare(dy, x, w, mean, rstd, longest=8192)
    if N * x.element_size() > 16384:
        raise Unsupported(f"rows of {N * x.element_size()} bytes: three stages of dy and x are more than some SMs have")
    if dx.numel():
        block = triton.next_power_of_2(N)
        rows = max(1, 4096 // block * 2 // x.element_size())
        warps = max(1, rows * block // 512)
        programs = min(triton.cdiv(M, rows), num_sms() * max(1, 16 // warps))
        partial_dw, partial_db = torch.empty((2, programs, N), dtype=torch.float32, device=x.device)
        staged_kernel[(programs,)](
            dy, x, w, mean, rstd, dx, partial_dw, partial_db, M, N, dy.stride(0), x.stride(0), rows, block,
            num_warps=warps, maxnreg=128,
        )  # fmt: skip
        _add_partials(partial_dw, partial_db, dw, db)
    return dx, dw, db


# Rung 2. New: rows too long for one program are split by columns, at most 4096 for each of PARTS programs, a team. A
# program keeps the dw and db of its columns; c1 and c2 are all that the team has to tell each other. Two launches: the
# first leaves every program's share of every row's sums as a note of 8 bytes, the second adds a row's notes up and
# finishes. Predicted: 5MN, as lesson 8's rung 1, but for any N and by programs that are all alike.
@triton.jit
def team_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_dw_ptr, partial_db_ptr,  # partial [teams, N]
    notes_ptr,  # [M, PARTS], all -1 at first: two NaNs with every bit set, which arithmetic on a GPU never makes
    M, N, stride_dy, stride_x, width, teams,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, POST: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % PARTS
    team = (tl.program_id(0) // PARTS).to(tl.int64)
    offsets = tl.arange(0, BLOCK_N)
    cols = part * width + offsets
    mask = (offsets < width) & (cols < N)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0)
    dw = tl.zeros((BLOCK_N,), tl.float32)
    db = tl.zeros((BLOCK_N,), tl.float32)
    slots = tl.arange(0, SLOTS)
    dy = tl.load(dy_ptr + team * stride_dy + cols, mask=mask & (team < M), other=0.0)
    x = tl.load(x_ptr + team * stride_x + cols, mask=mask & (team < M), other=0.0)
    if POST:
        post(dy, x, w, mean_ptr, rstd_ptr, notes_ptr, team, M, part, PARTS)
    for row in tl.range(team, M, teams, num_stages=1):
        # The next row is loaded and its note left before this row's notes are waited for: the others' notes for this
        # row were left a whole step ago, so in step nobody waits for long.
        after = row + teams
        next_dy = tl.load(dy_ptr + after * stride_dy + cols, mask=mask & (after < M), other=0.0)
        next_x = tl.load(x_ptr + after * stride_x + cols, mask=mask & (after < M), other=0.0)
        if POST:
            post(next_dy, next_x, w, mean_ptr, rstd_ptr, notes_ptr, after, M, part, PARTS)
        if FINISH:
            rstd = tl.load(rstd_ptr + row)
            x_hat = (x.to(tl.float32) - tl.load(mean_ptr + row)) * rstd
            notes = tl.load(notes_ptr + row * PARTS + slots, mask=slots < PARTS, other=0, volatile=True)
            while tl.max((notes == -1).to(tl.int32), axis=0) == 1:
                notes = tl.load(notes_ptr + row * PARTS + slots, mask=slots < PARTS, other=0, volatile=True)
            c1 = tl.sum((notes >> 32).to(tl.int32).to(tl.float32, bitcast=True), axis=0) / N
            c2 = tl.sum(notes.to(tl.int32).to(tl.float32, bitcast=True), axis=0) / N
            g = dy.to(tl.float32) * w.to(tl.float32)
            tl.store(dx_ptr + row * N + cols, rstd * (g - x_hat * c1 - c2), mask=mask)
            dw += dy.to(tl.float32) * x_hat
            db += dy.to(tl.float32)
        dy, x = next_dy, next_x
    if FINISH:
        tl.store(partial_dw_ptr + team * N + cols, dw, mask=mask)
        tl.store(partial_db_ptr + team * N + cols, db, mask=mask)


@triton.jit
def post(dy, x, w, mean_ptr, rstd_ptr, notes_ptr, row, M, part, PARTS: tl.constexpr):
    mean = tl.load(mean_ptr + row, mask=row < M, other=0.0)
    rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)
    g = dy.to(tl.float32) * w.to(tl.float32)
    c1 = tl.sum(g * ((x.to(tl.float32) - mean) * rstd), axis=0)
    c2 = tl.sum(g, axis=0)
    # Both sums in one word, written whole: who sees one sees both, and no fence is needed.
    note = (c1.to(tl.int32, bitcast=True).to(tl.int64) << 32) | c2.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(notes_ptr + row * PARTS + part, note, mask=row < M, sem="relaxed")


def layernorm_backward_split(dy, x, w, mean, rstd):
    """As layernorm_backward_staged for every N, in two passes over x and dy."""
    return _teams(dy, x, w, mean, rstd, passes=({"POST": True, "FINISH": False}, {"POST": False, "FINISH": True}))


def _teams(dy, x, w, mean, rstd, passes, **options):
    M, N, dx, dw, db = _prepare(dy, x, w, mean, rstd)
    if dx.numel():
        parts = triton.cdiv(N, 4096)
        width = triton.cdiv(triton.cdiv(N, parts), 16) * 16  # equal shares, which begin at whole 16-byte words
        parts = triton.cdiv(N, width)
        teams = max(1, min(M, 2 * num_sms() // parts))  # 256 threads at no more than 128 registers: two on each SM
        notes = torch.full((M, parts), -1, dtype=torch.int64, device=x.device)
        partial_dw, partial_db = torch.empty((2, teams, N), dtype=torch.float32, device=x.device)
        for steps in passes:
            team_kernel[(teams * parts,)](
                dy, x, w, mean, rstd, dx, partial_dw, partial_db, notes, M, N, dy.stride(0), x.stride(0), width, teams,
                parts, _slots_for(parts, warps=8), BLOCK_N=4096, **steps, num_warps=8, maxnreg=128, **options,
            )  # fmt: skip
        _add_partials(partial_dw, partial_db, dw, db)
    return dx, dw, db


# Rung 3. New: the two launches of rung 2 in one, POST and FINISH together, where all teams fit on the GPU at once. They
# must: a program that waits for a note holds its place, so the one to write it has to have a place as well, and a
# cooperative launch fails where it would not. Predicted: 3MN; above rung 1's time, for a team goes at the pace of its
# slowest program, step by step.
def layernorm_backward(dy, x, w, mean, rstd):
    """As layernorm_backward_staged for every N, in one pass over x and dy up to a million columns."""
    N = x.shape[-1]
    if N * x.element_size() <= 16384:
        return layernorm_backward_staged(dy, x, w, mean, rstd)
    # The interpreter runs programs in turn, where a wait would never end.
    if triton.cdiv(N, 4096) > 2 * num_sms() or DEVICE.type == "cpu":
        return layernorm_backward_split(dy, x, w, mean, rstd)
    both = ({"POST": True, "FINISH": True},)
    return _teams(dy, x, w, mean, rstd, both, launch_cooperative_grid=True)


def _slots_for(parts, warps):
    """Lanes to look at `parts` notes with: a power of two that is either within one warp or fills all of them.

    In between, several warps would hold the same note and look at it at different moments, and the sum over the notes
    could take the look that came too early.
    """
    slots = triton.next_power_of_2(parts)
    return slots if slots <= 32 else max(slots, 32 * warps)


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
        raise Unsupported(f"a row of {N} does not fit one program: at most {longest}")
    dx = torch.empty((M, N), dtype=x.dtype, device=x.device)
    dw, db = (torch.empty if M else torch.zeros)((2, N), dtype=w.dtype, device=x.device)  # a sum of no rows is 0
    return M, N, dx, dw, db


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        y, mean, rstd = PROBLEM.reference(x, w, b)
        ctx.save_for_backward(x, w, mean, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, mean, rstd = ctx.saved_tensors
        return layernorm_backward(dy.contiguous(), x, w, mean, rstd)


def layernorm(x, w, b):
    """x [M, N], w [N], b [N] -> LayerNorm of x with a gradient. Saves x, w and 8 bytes a row."""
    return _LayerNorm.apply(x, w, b)


def layernorm_torch(x, w, b):
    return torch.nn.functional.layer_norm(x, w.shape, w, b)


# fmt: off
WRONG = (
    Mutant("dw of the last tile only", "staged_kernel", "dw += dy * x_hat", "dw = dy * x_hat",
           "layernorm_backward_staged"),
    Mutant("rows past the last", "staged_kernel", "mask=(rows < M) & (cols < N)", "mask=cols < N",
           "layernorm_backward_staged", "out of bounds"),
    Mutant("one part's share taken for the row's sum", "team_kernel", "tl.sum((notes >> 32)",
           "tl.sum(tl.where(slots == part, notes >> 32, 0)", "layernorm_backward_split"),
    Mutant("the two sums in each other's place", "team_kernel", "rstd * (g - x_hat * c1 - c2)",
           "rstd * (g - x_hat * c2 - c1)", "layernorm_backward"),
    Mutant("a part's columns counted from 4096", "team_kernel", "part * width + offsets", "part * BLOCK_N + offsets",
           "layernorm_backward_split", "nan"),
    Mutant("every team writes its partial sums to the first row", "team_kernel", "partial_dw_ptr + team * N",
           "partial_dw_ptr + 0 * N", "layernorm_backward", "nan"),
)
# fmt: on

LESSON = Lesson(
    about=About(
        teaches="the same at every row length, and both directions as one differentiable op",
        hours=0.5,
        operator="layernorm backward",
    ),
    problem=PROBLEM_BACKWARD,
    rungs=(layernorm_backward_staged, layernorm_backward_split, layernorm_backward),
    checks=(
        *PROBLEM_BACKWARD.checks,
        case("one past the shortest row that is staged", M=23, N=2049),
        case("three programs a row, the last with fewer columns; 7 rows for 2 teams", M=7, N=8193),
        case("more parts than fit on the interpreter's 4 SMs", M=3, N=32769),
        case("more parts than fit on a GPU", gib=1, M=2, N=1_200_000),
        case("more tiles than a GPU has programs", gib=0.9, M=9001, N=1000),
        case("more rows than a GPU has teams", gib=0.5, M=300, N=9001),
        case("a row past element 2^31, staged", gib=25, M=3, N=4099, pad=2**30),
        case("and by teams", gib=25, M=3, N=16387, pad=2**30),
        case("the bytes are counted here", M=64, N=3072),
    ),
    benches=tuple({"M": m, "N": n} for m, n in ((8192, 8192), (4096, 12672), (4096, 32768), (2048, 131072))),
    wrong=WRONG,
    claims={layernorm_backward_staged: ("16-byte loads",), layernorm_backward: ("16-byte loads",)},
    # The interpreter counts w for every program, and 8 teams' partial sums, out and back.
    passes={layernorm_backward_split: 2.06},
    grad=Grad(layernorm, layernorm_torch, PROBLEM.inputs),
)

if __name__ == "__main__":
    LESSON.main()
