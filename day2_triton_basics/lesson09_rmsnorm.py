"""RMSNorm: one read, one write, and rows of any length
=====================================================
y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps) of each row. At least MN elements are read and MN written;
statistics and scale in two kernels read x twice, 3MN, so one pass promises a factor of 1.5. What remains is to keep
memory busy at every length: a row of 256 is 512 bytes and soon done, one of 131,072 is more than a program can hold,
and while a program waits for its sum, others on the same SM have to read or write. So registers are what counts.

You will learn: how many programs registers leave room for, a row in 16 bits, programs that share a row.
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019, section 4.
Run it:    python day2_triton_basics/lesson09_rmsnorm.py
Check it:  python -m lessonkit check lesson09_rmsnorm
Time it:   python -m lessonkit bench lesson09_rmsnorm
"""

from lessonkit import About, Lesson, Mutant, Unsupported, case, expect, num_sms, opaque
from lessonkit.base.device import INTERPRETED

import torch
import triton
import triton.language as tl

from problems.rms_norm import PROBLEM


# Rung 1. Two kernels, the second of which reads x again, in blocks, so any N will do. Predicted: 3MN through memory
# where 2MN would do; each row also asks for all of w, which the L2 holds.
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


# Rung 3. New: 16 bits stay 16 bits. x is used twice, and in between rung 2 holds it in fp32; `opaque` keeps what was
# loaded and widens it anew, at half the registers, so that more rows are in flight on an SM. w is loaded when needed,
# and a program takes several short rows. Predicted: 2MN as before, of w only MN / ROWS out of the L2, and no waiting.
@triton.jit
def packed_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr, M, N, stride_x, stride_y, eps, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask=mask, other=0.0)
    wide = opaque(x).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, axis=1) / N + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    w = tl.load(w_ptr + cols, mask=cols < N, eviction_policy="evict_last")
    y = opaque(x).to(tl.float32) * rstd[:, None] * w.to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * stride_y + cols[None, :], y, mask=mask)


def packed(x, w, eps):
    """x [M, N], w [N] -> y [M, N], rstd [M] fp32; rows of at most 64 KB."""
    y, rstd, (M, N) = _prepare(x, w)
    block = triton.next_power_of_2(max(N, 1))
    row = block * x.element_size()
    if row > 65536:
        raise Unsupported("rows past 64 KB: a quarter of an SM's registers, and nothing to do while one waits")
    # Rows of a program, and bytes of x a thread. Two 16-byte loads a thread do while four rows of so many threads fit
    # on an SM, up to 16 KB; past that 8 warps hold the row, as a sum waits for the slowest. Short rows: 8 KB, 2 warps.
    rows, thread = (8192 // row, 128) if row <= 2048 else (1, 32) if row <= 16384 else (1, row // 256)
    if M:
        grid, warps = (triton.cdiv(M, rows),), max(1, rows * row // (32 * thread))
        packed_kernel[grid](x, w, y, rstd, M, N, x.stride(0), y.stride(0), eps, rows, block, num_warps=warps)
    return y, rstd


# Rung 4. New: a longer row is shared by programs that take 8 KB of it (a 32nd if that is more), and of the next row
# too, so that w is asked for once for both. An SM holds several, so it reads some while it writes others. A program
# leaves its sums as notes and waits for the others'. That it ends: GPUs start programs in the order of their ids, so
# the parts of the oldest unfinished rows all run or start next; they wait for nobody else, hence those rows end, and
# then the ones after. CUDA does not promise it, but CUB's one-pass scan relies on it too. PARTS programs must fit on
# the GPU. Predicted: 2MN through memory at any length, and MN / 2 of w out of the L2.
@triton.jit
def shared_rows_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr,
    notes_ptr,  # [M, PARTS] int32 zeros
    M, N, stride_x, stride_y, eps,
    ROWS: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) // PARTS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(0) % PARTS
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask=mask, other=0.0)
    wide = opaque(x).to(tl.float32)
    # Zeros mean "not yet", and a sum may be 0.0: hence its bits plus one, a word that is there or not: no fence.
    note = tl.sum(wide * wide, axis=1).to(tl.int32, bitcast=True) + 1
    tl.atomic_xchg(notes_ptr + rows * PARTS + part, note, mask=rows < M, sem="relaxed")
    slots = tl.arange(0, SLOTS)
    at = notes_ptr + rows[:, None] * PARTS + slots[None, :]
    there = (rows < M)[:, None] & (slots < PARTS)[None, :]
    # volatile: each look goes to the L2, where the other SMs' notes arrive, and not to this SM's L1.
    notes = tl.load(at, mask=there, other=1, volatile=True)
    if WAIT:
        while tl.min(tl.min((notes != 0).to(tl.int32), axis=1), axis=0) == 0:
            notes = tl.load(at, mask=there, other=1, volatile=True)
        # Two warps may hold the same note, of which one looked too early: once more, now that all have been seen.
        tl.debug_barrier()
        notes = tl.load(at, mask=there, other=1, volatile=True)
    rstd = tl.rsqrt(tl.sum((notes - 1).to(tl.float32, bitcast=True), axis=1) / N + eps)
    if part == 0:  # one of them speaks for the rows
        tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    w = tl.load(w_ptr + cols, mask=cols < N, eviction_policy="evict_last")
    y = opaque(x).to(tl.float32) * rstd[:, None] * w.to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * stride_y + cols[None, :], y, mask=mask)


def shared_rows(x, w, eps):
    """x [M, N], w [N] -> y [M, N], rstd [M] fp32, for every M and N: packed to 64 KB a row, shared, or read twice."""
    y, rstd, (M, N) = _prepare(x, w)
    if triton.next_power_of_2(max(N, 1)) * x.element_size() <= 65536:
        return packed(x, w, eps)
    block = max(8192 // x.element_size(), triton.next_power_of_2(triton.cdiv(N, 32)))  # at most 32 notes for each
    parts, warps = triton.cdiv(N, block), block * x.element_size() // 2048
    if parts > 32 // warps * num_sms():  # at 64 registers a thread an SM has room for 32 warps
        return unfused(x, w, eps)
    if M:
        notes = torch.zeros((M, parts), dtype=torch.int32, device=x.device)
        # The interpreter runs programs in turn, where a wait would never end: a first round leaves all the notes.
        for wait in (False, True) if INTERPRETED else (True,):
            shared_rows_kernel[(triton.cdiv(M, 2) * parts,)](
                x, w, y, rstd, notes, M, N, x.stride(0), y.stride(0), eps, ROWS=2, PARTS=parts,
                SLOTS=triton.next_power_of_2(parts), BLOCK_N=block, WAIT=wait, num_warps=warps, maxnreg=64,
            )  # fmt: skip
    return y, rstd


def _prepare(x, w, differentiable=False):
    expect(x=x, ndim=2, unit_stride=True, differentiable=differentiable)
    expect(x=x, w=w, same_dtype=True, unit_stride=True, differentiable=differentiable)
    if w.shape != x.shape[1:]:
        raise ValueError(f"w has shape {tuple(w.shape)}, expected {tuple(x.shape[1:])}, one weight a column of x")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, torch.empty(x.shape[0], dtype=torch.float32, device=x.device), x.shape


LESSON = Lesson(
    about=About(
        teaches="which rows fit where: 16 bits kept as 16 bits, registers counted, programs that share a row",
        hours=0.75,
        operator="rmsnorm",
    ),
    problem=PROBLEM,
    rungs=(unfused, one_row, packed, shared_rows),
    checks=(
        *PROBLEM.checks,
        case("16 KB in bf16, 32 KB in fp32: the other two counts of bytes a thread", M=3, N=8000),
        case("in fp32 nine programs share a row, the last with one column", M=5, N=16385, strange=True),
        case("in every dtype programs share two rows, of which the last pair has one", M=3, N=32770),
        case("too many parts for the interpreter's 4 SMs, in fp32: read twice", M=2, N=65537),
        case("more programs than fit at once", gib=0.4, M=200, N=33000),
        case("in 16 bits parts of 64 KB, in fp32 too large for an SM", gib=0.4, M=3, N=700_000),
        case("row offsets past 2^31, in parts", gib=13, M=3, N=40000, pad=2**30),
        case("bytes are counted here: in bf16 four rows a program, the last with three", M=203, N=1000),
    ),
    wrong=(
        Mutant("the sum, not the mean", "row_kernel", "axis=0) / N + eps", "axis=0) + eps", "one_row"),
        Mutant("divided by the padded width", "row_kernel", "axis=0) / N", "axis=0) / BLOCK_N", "one_row"),
        Mutant("eps added after the root", "row_kernel", "/ N + eps)", "/ N) + eps", "one_row"),
        Mutant("only the last block's squares", "rstd_kernel", "squares += x * x", "squares = x * x", "unfused"),
        Mutant("x read as if contiguous", "packed_kernel", "rows[:, None] * stride_x", "rows[:, None] * N", "packed"),
        Mutant("rows overlap", "packed_kernel", "to(tl.int64) * ROWS", "to(tl.int64)", "packed", "nan"),
        Mutant("a row too many", "packed_kernel", "(rows < M)[:", "(rows <= M)[:", "packed", "out of bounds"),
        # No mutant may lose a note: on a GPU the others would wait for it forever.
        Mutant("one part's sum", "shared_rows_kernel", "tl.sum((notes -", "PARTS * tl.max((notes -", "shared_rows"),
        Mutant("the mean of a part", "shared_rows_kernel", "axis=1) / N", "axis=1) / BLOCK_N", "shared_rows"),
        Mutant("parts overlap", "shared_rows_kernel", "stride_y + cols", "stride_y + 0 * cols", "shared_rows", "nan"),
    ),
    # In shared_rows some words spill: that is cheaper than a program less on the SM.
    claims=dict.fromkeys((one_row, packed), ("16-byte loads", "16-byte stores", "no spills"))
    | {shared_rows: ("16-byte loads", "16-byte stores")},
    passes={unfused: 2.0, one_row: 1.5, packed: 1.125, shared_rows: 1.125},
)

if __name__ == "__main__":
    LESSON.main()
