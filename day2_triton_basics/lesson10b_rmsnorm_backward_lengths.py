"""RMSNorm backward at every row length, and the differentiable op
===============================================================
Lesson 10's last rung has three tiles of x and dy in shared memory, so its rows end at 16 KB. Here the next row waits in
registers instead, which carries it to 32 KB, and past that programs share a row, as in lesson 9. But for dw they stay:
each keeps its columns' sums. Read once, a row costs 3MN in all; if the sums need a launch of their own, 5MN. `rms_norm`
is differentiable: PyTorch forward, this lesson backward. The op with kernels in both directions, which also takes
lesson 10's kernel for rows up to 16 KB, is course_ops.rms_norm.

You will learn: what programs that walk together must tell each other, and a torch.autograd.Function over kernels.
Source: lessons 9 and 10.
Run it:    python day2_triton_basics/lesson10b_rmsnorm_backward_lengths.py
Check it:  python -m lessonkit check lesson10b_rmsnorm_backward_lengths
Time it:   python -m lessonkit bench lesson10b_rmsnorm_backward_lengths
"""

from lessonkit import About, Grad, Lesson, Mutant, case, expect, num_sms, opaque
from lessonkit.base.device import INTERPRETED

import torch
import triton
import triton.language as tl

from problems.rms_norm import PROBLEM, PROBLEM_BACKWARD


# Rung 1. The next row in registers, as 16 bits until it is needed (`opaque`, lesson 9). Up to 32 KB a row is one
# program's, all 32 warps of it. Past that a team of programs walks over the rows, each in its own 8 KB of columns, of
# which it keeps w and dw. dx needs one sum a row: a first launch leaves each part's share of it as a note, a second
# one reads the notes. Predicted: 3MN up to 32 KB a row, 5MN past that; 8N bytes a team for dw.
@triton.jit
def _dot(dy, x, w, rstd_ptr, row, M):
    rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)
    return tl.sum(dy.to(tl.float32) * w.to(tl.float32) * (x.to(tl.float32) * rstd), axis=0)


@triton.jit
def team_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr,
    shares_ptr, notes_ptr,  # [teams, N] fp32, [M, PARTS] int32 zeros
    M, N, dy_stride, x_stride, width, PARTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr,
    LEAVE: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % PARTS
    team = (tl.program_id(0) // PARTS).to(tl.int64)  # int64, and so are the rows: row * stride passes 2^31
    teams = tl.num_programs(0) // PARTS
    cols = part * width + tl.arange(0, BLOCK_N)
    own = (tl.arange(0, BLOCK_N) < width) & (cols < N)
    slots = tl.arange(0, SLOTS)
    w = tl.load(w_ptr + cols, mask=own, other=0.0)
    dw = tl.zeros([BLOCK_N], tl.float32)
    dy = tl.load(dy_ptr + team * dy_stride + cols, mask=own, other=0.0)
    x = tl.load(x_ptr + team * x_stride + cols, mask=own, other=0.0)
    if PARTS > 1 and LEAVE:  # 0 is "not yet", so the bits of the sum plus one; see lesson 9
        bits = _dot(dy, x, w, rstd_ptr, team, M).to(tl.int32, bitcast=True)
        tl.atomic_xchg(notes_ptr + team * PARTS + part, bits + 1, sem="relaxed")
    for row in tl.range(team, M, teams, num_stages=1):
        after = row + teams
        there = own & (after < M)
        rstd = tl.load(rstd_ptr + row)
        if PARTS == 1:  # before the next row arrives: 1024 threads have 64 registers each
            dot = _dot(dy, x, w, rstd_ptr, row, M)
            dw += dy.to(tl.float32) * (x.to(tl.float32) * rstd)
        next_dy = tl.load(dy_ptr + after * dy_stride + cols, mask=there, other=0.0)
        next_x = tl.load(x_ptr + after * x_stride + cols, mask=there, other=0.0)
        if PARTS > 1:
            if LEAVE:
                bits = _dot(opaque(next_dy), opaque(next_x), opaque(w), rstd_ptr, after, M).to(tl.int32, bitcast=True)
                tl.atomic_xchg(notes_ptr + after * PARTS + part, bits + 1, mask=after < M, sem="relaxed")
            at = notes_ptr + row * PARTS + slots
            notes = tl.load(at, mask=slots < PARTS, other=1, volatile=True)
            if LEAVE and FINISH:
                while tl.min((notes != 0).to(tl.int32), axis=0) == 0:
                    notes = tl.load(at, mask=slots < PARTS, other=1, volatile=True)
            dot = tl.sum((notes - 1).to(tl.float32, bitcast=True), axis=0)
        if FINISH:
            n = opaque(x).to(tl.float32) * rstd
            wide = opaque(dy).to(tl.float32)
            if PARTS > 1:
                dw += wide * n
            dx = rstd * (wide * opaque(w).to(tl.float32) - n * (dot / N))
            tl.store(dx_ptr + row * N + cols, dx, mask=own)
        dy, x = next_dy, next_x
    if FINISH:
        tl.store(shares_ptr + team * N + cols, dw, mask=own)


def _walk_team(dy, x, w, rstd, apart):
    dx, (M, N), size = _prepare(dy, x, w, rstd), x.shape, x.element_size()
    row = triton.next_power_of_2(max(N, 1)) * size
    if dx.numel() == 0:
        return dx, torch.zeros_like(w)
    parts = 1 if row <= 32768 else triton.cdiv(N * size, 8192)
    width = triton.cdiv(triton.cdiv(N, parts), 16) * 16  # a multiple of 16, so that each part begins aligned
    block = max(row, 1024) // size if parts == 1 else 8192 // size  # a warp has 1 KB, or `opaque` has nothing to pack
    room = num_sms() if parts == 1 else 2 * num_sms()  # 256 threads of 128 registers fit twice on an SM
    teams = min(M, max(1, room // parts))
    shares = torch.empty((teams, N), dtype=torch.float32, device=x.device)
    notes = torch.zeros((M, parts), dtype=torch.int32, device=x.device)
    # In the interpreter programs run in turn, where a wait would never end, and more parts than there is room for would
    # wait forever too: all the notes first.
    at_once = parts == 1 or not (apart or INTERPRETED or parts > room)
    for leave, finish in ((True, True),) if at_once else ((True, False), (False, True)):
        team_kernel[(teams * parts,)](
            dy, x, w, rstd, dx, shares, notes, M, N, dy.stride(0), x.stride(0), width, PARTS=parts,
            SLOTS=triton.next_power_of_2(parts), BLOCK_N=block, LEAVE=leave, FINISH=finish,
            # 32 bytes of a row a thread. A cooperative launch is refused if not all programs fit at once.
            num_warps=max(1, block * size // 1024), maxnreg=128 if parts > 1 else None,
            launch_cooperative_grid=parts > 1 and at_once,
        )  # fmt: skip
    return dx, _add_shares(shares, w.dtype)


def apart(dy, x, w, rstd):
    """dy [M, N], x [M, N], w [N], rstd [M] fp32 -> dx [M, N], dw [N], for every M and N; rows past 32 KB read twice."""
    return _walk_team(dy, x, w, rstd, apart=True)


# Rung 2. New: one launch, in which a team keeps in step. Row r + 1's note is left before row r's notes are read, which
# so have had the time of a row to arrive, and the row itself is still in registers. All programs have to run at once;
# a cooperative launch sees to that. Predicted: 3MN at any length, 5/3 times faster if nobody has to wait.
def team(dy, x, w, rstd):
    """dy [M, N], x [M, N], w [N], rstd [M] fp32 -> dx [M, N], dw [N], for every M and N; rows are read once."""
    return _walk_team(dy, x, w, rstd, apart=False)


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


def _prepare(dy, x, w, rstd):
    """The checks of every rung; returns an empty dx."""
    expect(dy=dy, x=x, ndim=2, same_shape=True, same_dtype=True, unit_stride=True)
    expect(x=x, w=w, same_dtype=True, unit_stride=True)
    expect(rstd=rstd, dtypes=(torch.float32,), unit_stride=True)
    if w.shape != x.shape[1:]:
        raise ValueError(f"w has shape {tuple(w.shape)}, expected {tuple(x.shape[1:])}, one weight a column of x")
    if rstd.shape != x.shape[:1]:
        raise ValueError(f"rstd has shape {tuple(rstd.shape)}, expected {tuple(x.shape[:1])}, one a row of x")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        y, rstd = PROBLEM.reference(x, w, eps)
        ctx.save_for_backward(x, w, rstd)  # 4 bytes a row beside the inputs, and the sum of squares is not done again
        return y

    @staticmethod
    def backward(ctx, dy):
        return *team(dy.contiguous(), *ctx.saved_tensors), None  # dy may have any strides, even 0


def rms_norm(x, w, eps):
    """x [M, N], w [N] -> y [M, N], differentiable: as torch.nn.functional.rms_norm."""
    return _RMSNorm.apply(x, w, eps)


LESSON = Lesson(
    about=About(
        teaches="the same past one program: a team of programs for each row, and both directions as one "
        "differentiable op",
        hours=0.5,
        operator="rmsnorm backward",
    ),
    problem=PROBLEM_BACKWARD,
    rungs=(apart, team),
    checks=(
        *PROBLEM_BACKWARD.checks,
        case("no rows of more than 16 KB", M=0, N=9000),
        case("in fp32 a program a row, several rows each", M=9, N=5000),
        case("in bf16 a program a row, in fp32 teams of five, the last part shorter", M=9, N=9001, strange=True),
        case("several rows, and a row for several programs, on a GPU too", gib=0.5, M=301, N=9001),
        case("teams on a GPU", gib=0.5, M=150, N=20000),
        case("more parts than run at once: notes in a launch of their own", gib=0.5, M=2, N=3_000_000),
        case("row offsets past 2^31", gib=25, M=3, N=9000, pad=2**30),
        case("and in teams", gib=25, M=3, N=40000, pad=2**30),
        case("bytes are counted here: teams in every dtype; in the interpreter always apart", M=23, N=16500, pad=2),
    ),
    benches=tuple(shape for shape in PROBLEM_BACKWARD.benches if shape["N"] > 8192),
    wrong=(
        Mutant("only the last row's dw", "team_kernel", "dw += wide", "dw = wide", "team"),
        Mutant("the next row in this row's place", "team_kernel", "opaque(x).to", "opaque(next_x).to", "team"),
        Mutant("the mean of a part", "team_kernel", "(dot / N)", "(dot / width)", "team"),
        Mutant("w forgotten in the mean", "_dot", "dy.to(tl.float32) * w.to(tl.float32)", "dy.to(tl.float32)", "team"),
        Mutant("a part too wide", "team_kernel", "(tl.arange(0, BLOCK_N) < width) & ", "", "team"),
        # No mutant may lose a note: on a GPU the others would wait for it forever.
        Mutant("one part's sum", "team_kernel", "tl.sum((notes - 1)", "PARTS * tl.max((notes - 1)", "team"),
    ),
    claims={team: ("16-byte loads", "team_kernel: 16-byte stores", "no spills")},
    passes={apart: 1.72, team: 1.72},
    grad=Grad(rms_norm, lambda x, w, eps: PROBLEM.reference(x, w, eps)[0], PROBLEM.inputs),
)

if __name__ == "__main__":
    LESSON.main()
