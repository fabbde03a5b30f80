"""RMSNorm: what is loaded once, and who waits for whom
=======================================================
y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps) of each row. At least MN elements are read and MN written;
statistics and scale in two kernels read x twice, 3MN, so one pass promises a factor of 1.5. And each row asks for all
of w: MN elements more, from the L2 cache, which has about twice the bandwidth of memory: free it is not. A program
that stays and walks over rows loads w once, and can load its next row while it works on this one.

You will learn: persistent programs, loads ahead of use, and programs that share a row and wait for each other.
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019, section 4.
Run it:    python day2_triton_basics/lesson09_rmsnorm.py
Check it:  python -m lessonkit check lesson09_rmsnorm
Time it:   python -m lessonkit bench lesson09_rmsnorm
"""

import math

from lessonkit import DEVICE, Lesson, Mutant, Refusal, Unsupported, Work, case, expect, num_sms
from lessonkit.device import INTERPRETED

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


def reference(x, w, eps):
    wide = x if x.dtype == torch.float64 else x.float()
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)  # reads MN, writes M; the backward needs it
    return F.rms_norm(x, x.shape[-1:], w, eps), rstd  # reads MN and N, writes MN


# Rung 1. Two kernels, the second of which reads x again. The row goes by in blocks, so any N will do.
# Predicted: 3MN through memory where 2MN would do, and w from the L2 for each row.
@triton.jit
def rstd_kernel(x_ptr, rstd_ptr, N, stride, eps, BLOCK_N: tl.constexpr):  # x: [M, N], rstd: [M]
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2^31
    squares = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < N, other=0.0).to(tl.float32)
        squares += x * x
    tl.store(rstd_ptr + row, tl.rsqrt(tl.sum(squares, axis=0) / N + eps))


@triton.jit
def scale_kernel(x_ptr, w_ptr, y_ptr, rstd_ptr, N, stride, BLOCK_N: tl.constexpr):  # y: [M, N]
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < N).to(tl.float32)
        w = tl.load(w_ptr + cols, mask=cols < N).to(tl.float32)
        tl.store(y_ptr + row * N + cols, x * rstd * w, mask=cols < N)


def unfused(x, w, eps):
    """x [M, N], w [N] -> y [M, N], rstd [M] fp32; two kernels, one program a row in each."""
    y, rstd, (M, N) = _prepare(x, w)
    if M:
        rstd_kernel[(M,)](x, rstd, N, x.stride(0), eps, BLOCK_N=1024)
        scale_kernel[(M,)](x, w, y, rstd, N, x.stride(0), BLOCK_N=1024)
    return y, rstd


# Rung 2. New: the row in one block, so x waits in registers between the sum and the scaling.
# Predicted: 2MN through memory, 1.5 times faster; of the 3MN asked for, the MN of w come from the L2.
@triton.jit
def row_kernel(x_ptr, w_ptr, y_ptr, rstd_ptr, N, stride, eps, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < N, other=0.0).to(tl.float32)  # a lane past N adds no square
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    w = tl.load(w_ptr + cols, mask=cols < N).to(tl.float32)
    tl.store(y_ptr + row * N + cols, x * rstd * w, mask=cols < N)
    tl.store(rstd_ptr + row, rstd)


def one_row(x, w, eps):
    """x [M, N], w [N] -> y [M, N], rstd [M] fp32; one program a row of at most 32,768, 32 elements a thread."""
    y, rstd, (M, N) = _prepare(x, w)
    block = triton.next_power_of_2(max(N, 1))
    if N > 32768:
        raise Unsupported("rows past 32,768: a block has at most 1024 threads, and 64 elements for each would spill")
    if M:
        warps = max(1, block // 1024)
        row_kernel[(M,)](x, w, y, rstd, N, x.stride(0), eps, BLOCK_N=block, num_warps=warps)
    return y, rstd


# Rung 3. New: a fixed grid of programs, each of which walks over tiles of rows and keeps w. The loop is pipelined:
# `num_stages` tiles are on their way to shared memory while one is worked on, so memory never waits for a reduction.
# Predicted: 2MN asked for and moved. A tile is 8192 elements: several short rows, or one long one.
@triton.jit
def walk_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr, M, N, stride, eps,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_N)
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0)[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / N + eps)
        tl.store(y_ptr + rows[:, None] * N + cols[None, :], x * rstd[:, None] * w.to(tl.float32), mask=mask)
        tl.store(rstd_ptr + rows, rstd, mask=rows < M)


def walk(x, w, eps):
    """x [M, N], w [N] -> y [M, N], rstd [M] fp32; 16 warps on each SM walk over rows of at most 16,384."""
    y, rstd, (M, N) = _prepare(x, w)
    if N > 16384:
        raise Unsupported("rows past 16,384: the tiles on their way would not fit in shared memory")
    if M:
        rows, block, warps = _tile(N, 8192)
        programs = min(triton.cdiv(M, rows), max(1, 16 // warps) * num_sms())  # no more than fit: nobody starts late
        walk_kernel[(programs,)](x, w, y, rstd, M, N, x.stride(0), eps, rows, block, STAGES=3, num_warps=warps)
    return y, rstd


# Rung 4. New: a row of any length, shared by programs that own a slice of the columns each and keep that slice of w.
# A program leaves the sum of its slice as a note and waits for its neighbours' notes, and meanwhile its next tile is
# on the way, so the wait costs nothing. Predicted: 2MN moved at any N; the notes are one word for 8192 elements.
@triton.jit
def shared_row_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr,
    notes_ptr,  # [M, SLICES] int32 zeros
    M, N, stride, eps, width,
    SLICES: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    LEAVE: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % SLICES
    walkers = tl.num_programs(0) // SLICES
    first = tl.program_id(0) // SLICES
    cols = part * width + tl.arange(0, BLOCK_N)
    own = (tl.arange(0, BLOCK_N) < width) & (cols < N)
    w = tl.load(w_ptr + cols, mask=own, other=0.0)[None, :]
    slots = tl.arange(0, SLOTS)[None, :]
    rows = first.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (rows < M)[:, None] & own[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    for _ in range(first, tl.cdiv(M, ROWS), walkers):
        if LEAVE:
            total = tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
            # Memory of zeros means "not yet", and a sum may be 0.0: hence its bits plus one. They are one 4-byte
            # word, written whole, so that a reader sees all of the sum or nothing, without a fence.
            tl.store(notes_ptr + rows * SLICES + part, total.to(tl.int32, bitcast=True) + 1, mask=rows < M)
        now, now_mask, xs = rows, mask, x.to(tl.float32)
        rows += walkers * ROWS
        mask = (rows < M)[:, None] & own[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)
        if FINISH:
            notes_at = notes_ptr + now[:, None] * SLICES + slots
            expected = (now < M)[:, None] & (slots < SLICES)
            # volatile: each look goes to the L2, where the other SMs' notes arrive, and not to this SM's L1.
            notes = tl.load(notes_at, mask=expected, other=1, volatile=True)
            if LEAVE:
                while tl.min(tl.min((notes != 0).to(tl.int32), axis=1), axis=0) == 0:
                    notes = tl.load(notes_at, mask=expected, other=1, volatile=True)
            total = tl.sum((notes - 1).to(tl.float32, bitcast=True), axis=1)
            rstd = tl.rsqrt(total / N + eps)
            y = xs * rstd[:, None] * w.to(tl.float32)
            tl.store(y_ptr + now[:, None] * N + cols[None, :], y, mask=now_mask)
            if part == 0:  # one of the programs speaks for the row
                tl.store(rstd_ptr + now, rstd, mask=now < M)


def shared_row(x, w, eps):
    """x [M, N], w [N] -> y [M, N], rstd [M] fp32, for every M and N: walk up to 16,384 columns, then slices of 8192."""
    y, rstd, (M, N) = _prepare(x, w)
    if N <= 16384:
        return walk(x, w, eps)
    slices = triton.cdiv(N, 8192)
    if M:
        width = triton.cdiv(triton.cdiv(N, slices), 16) * 16  # a multiple of 16, so that each slice begins aligned
        notes = torch.zeros((M, slices), dtype=torch.int32, device=x.device)
        walkers = min(M, max(1, 2 * num_sms() // slices))
        # One launch if the programs that share a row all run at once. The interpreter runs them in turn, where a wait
        # would never end, and so could more slices than there is room for: then all notes are left in a launch before.
        at_once = not INTERPRETED and slices <= 2 * num_sms()
        for leave, finish in ((True, True),) if at_once else ((True, False), (False, True)):
            shared_row_kernel[(walkers * slices,)](
                x, w, y, rstd, notes, M, N, x.stride(0), eps, width, SLICES=slices,
                SLOTS=triton.next_power_of_2(slices), ROWS=1, BLOCK_N=8192, LEAVE=leave, FINISH=finish,
                # 256 threads of 128 registers: two programs fit on an SM. A cooperative launch is refused if they
                # do not all fit at once, where an ordinary one would wait forever for a program that cannot start.
                num_warps=8, maxnreg=128, launch_cooperative_grid=at_once,
            )  # fmt: skip
    return y, rstd


def _tile(N, elements):
    """Rows, columns (a power of two) and warps of a tile of about `elements` elements, 32 for each thread."""
    block = triton.next_power_of_2(max(N, 1))
    rows = max(1, elements // block)
    return rows, block, max(1, rows * block // 1024)


def _prepare(x, w, differentiable=False):
    expect(x=x, ndim=2, unit_stride=True, differentiable=differentiable)
    expect(x=x, w=w, same_dtype=True, unit_stride=True, differentiable=differentiable)
    if w.shape != x.shape[1:]:
        raise ValueError(f"w has shape {tuple(w.shape)}, expected {tuple(x.shape[1:])}, one weight a column of x")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, torch.empty(x.shape[0], dtype=torch.float32, device=x.device), x.shape


def inputs(M, N, pad=0, eps=1e-3, strange=False, dtype=torch.float32):
    # A mean of 1, or taking off the mean as layernorm does would change little; rows of sizes 0.03 to 30, so that
    # another row's rstd is far off, and eps counts in the small ones. Rows are slices of a matrix `pad` wider.
    size = 10 ** torch.linspace(-1.5, 1.5, M, device=DEVICE)[torch.randperm(M, device=DEVICE)]
    x = torch.full((M, N + pad), 7.0, dtype=dtype, device=DEVICE)[:, :N]
    x.copy_((torch.randn(M, N, device=DEVICE) + 1) * size[:, None])
    if strange:
        x[0, N // 2], x[1, N - 1], x[2, 0], x[3] = math.nan, math.inf, -math.inf, 0.0
    return x, (torch.randn(N, device=DEVICE) * 0.5 + 1).to(dtype), eps


def scale_invariance(rung):
    """Without eps, 4x gives the same y and a quarter of rstd, exactly: powers of two do not round."""
    for M, N in ((5, 781), (2, 16400)):
        x, w, _ = inputs(M, N)
        (y, rstd), (y4, rstd4) = rung(x, w, 0.0), rung(4 * x, w, 0.0)
        torch.testing.assert_close(y4, y, rtol=1e-6, atol=0)
        torch.testing.assert_close(4 * rstd4, rstd, rtol=1e-6, atol=0)


def _torch(x, w, eps):
    y, rstd = torch.ops.aten._fused_rms_norm(x, x.shape[-1:], w, eps)
    return y, rstd.flatten()


def _liger(x, w, eps):
    from liger_kernel.ops.rms_norm import rms_norm_forward

    # "gemma" is the mode that multiplies by w before it rounds, as PyTorch does.
    y, _, rstd, *_ = rms_norm_forward(x, w, eps, 0.0, "gemma", None)
    return y, rstd


def _quack(x, w, eps):
    from quack.rmsnorm import rmsnorm_fwd

    y, _, rstd = rmsnorm_fwd(x, w, eps=eps, store_rstd=True)
    return y, rstd


# The longest rows first: a rung is compiled for the first shape it takes, and this one makes the last rung share.
SHAPES = ((2048, 131072), (4096, 32768), (4096, 12672), (8192, 8192), (4096, 4096), (32768, 1024), (32768, 256))
LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    rungs=(unfused, one_row, walk, shared_row),
    checks=(
        case("no rows", M=0, N=5),
        case("no columns: the mean of nothing is NaN", M=5, N=0),
        case("rows of one: y is about the sign of x times w", M=17, N=1),
        case("a prime width, a row stride that is not N, a tile that hangs over", M=70, N=127, pad=3),
        case("NaN, inf and a row of zeros, whose rstd is eps alone", M=5, N=1025, strange=True),
        case("no eps", M=3, N=64, eps=0.0),
        case("one past 16,384: three slices, the last one shorter", M=5, N=16385, strange=True),
        case("more slices than run at once: notes in a launch of their own", gib=1, M=2, N=3_000_000),
        case("row offsets past 2^31, in a walk", gib=20, M=3, N=1000, pad=2**30),
        case("row offsets past 2^31, in slices", gib=20, M=3, N=40000, pad=2**30),
        case("bytes are counted here: enough rows for each program to walk", M=203, N=1000),
    ),
    benches=tuple({"M": m, "N": n} for m, n in SHAPES),
    work=lambda M, N, dtype, **_: Work(bytes=(2 * M * N + N) * dtype.itemsize + 4 * M, flops=4 * M * N),
    wrong=(
        Mutant("the sum, not the mean", "row_kernel", "axis=0) / N + eps", "axis=0) + eps", "one_row"),
        Mutant("divided by the padded width", "row_kernel", "axis=0) / N", "axis=0) / BLOCK_N", "one_row"),
        Mutant("eps added after the root", "row_kernel", "/ N + eps)", "/ N) + eps", "one_row"),
        Mutant("only the last block's squares", "rstd_kernel", "squares += x * x", "squares = x * x", "unfused"),
        Mutant("x read as if contiguous", "walk_kernel", "rows[:, None] * stride", "rows[:, None] * N", "walk"),
        Mutant("a step too long", "walk_kernel", "num_programs(0), num", "num_programs(0) + 1, num", "walk", "nan"),
        Mutant("a row too many", "walk_kernel", "(rows < M)[:", "(rows <= M)[:", "walk", "out of bounds"),
        # No mutant may lose a note: on a GPU the others would wait for it forever.
        Mutant("one slice's sum for all", "shared_row_kernel", "SLICES + slots", "SLICES + slots * 0", "shared_row"),
        Mutant("the tile ahead in this tile's place", "shared_row_kernel", "y = xs *", "y = x *", "shared_row"),
    ),
    peers={"torch": _torch, "torch.compile": torch.compile(reference, dynamic=False), "liger": _liger, "quack": _quack},
    claims={
        one_row: ("16-byte loads", "16-byte stores", "no spills"),
        walk: ("cp.async", "16-byte stores", "no spills"),
        shared_row: ("16-byte stores", "no spills"),
    },
    passes={unfused: 2.0, one_row: 1.5, walk: 1.0, shared_row: 1.0},
    properties=(scale_invariance,),
    refuses=(
        Refusal("one weight too few", lambda f: f(inputs(2, 8)[0], inputs(2, 7)[1], 0.1), ValueError, "w has shape"),
        Refusal("dtypes differ", lambda f: f(inputs(2, 8)[0], inputs(2, 8)[1].half(), 0.1), TypeError, "w is"),
        Refusal("not a matrix", lambda f: f(inputs(2, 8)[0][0], inputs(2, 8)[1], 0.1), ValueError, "dimension"),
        Refusal("columns apart", lambda f: f(inputs(9, 8)[0].T, inputs(8, 9)[1], 0.1), ValueError, "contiguous"),
        Refusal("not a float", lambda f: f(*(t.long() for t in inputs(2, 8)[:2]), 0.1), TypeError, "torch.int64"),
        Refusal("gradient lost", lambda f: f(inputs(2, 8)[0].requires_grad_(), *inputs(2, 8)[1:]), ValueError, "grad"),
    ),
)

if __name__ == "__main__":
    LESSON.main()
