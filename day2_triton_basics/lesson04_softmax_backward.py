"""Softmax backward: a dot product and a subtraction
==================================================
y = softmax(x) has the Jacobian dy_i/dx_j = y_i (1[i = j] - y_j), so the gradient of a row needs no N x N matrix:
    dx = y * (dy - d),  d = sum(y * dy) along the row
It reads 2MN elements (y and dy; x is not needed) and writes MN. Kept apart, the product, its sum and the rest move up
to 3 times as much. At 4.2 TB/s, 8192 x 8192 in bf16 (403 MB) cannot take less than 0.096 ms.

You will learn: deriving a backward kernel, what a row costs in registers with two inputs, an autograd Function.
Run it:    python day2_triton_basics/lesson04_softmax_backward.py
Check it:  python -m lessonkit check lesson04_softmax_backward
Time it:   python -m lessonkit bench lesson04_softmax_backward
"""

from lessonkit import DEVICE, About, Grad, Lesson, Mutant, Unsupported, case, expect, num_sms, opaque

import torch
import triton
import triton.language as tl

from problems.softmax import PROBLEM, PROBLEM_BACKWARD, logits


# Rung 1. A kernel for each step, each with whole matrices through memory: the product y * dy, its sum, the rest. The
# product is kept in fp32: rounded to 16 bits, its error would survive in dy - d, where the large parts cancel.
# Predicted: 7MN elements for fp32, 2.33 times the least; for 16-bit inputs, with the product twice as wide, 3 times.
@triton.jit
def step_kernel(
    y_ptr, dy_ptr, dx_ptr, p_ptr, d_ptr, N, stride_y, stride_dy, stride_dx, STEP: tl.constexpr, BLOCK_N: tl.constexpr
):  # y, dy, dx, p (contiguous, fp32): [M, N]; d (fp32): [M]
    row = tl.program_id(0).to(tl.int64)
    d = tl.load(d_ptr + row) if STEP == "finish" else 0.0
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < N
        if STEP == "sum":
            # A sum must not count the lanes past the end: 0, not whatever lies there.
            d += tl.sum(tl.load(p_ptr + row * N + cols, mask=mask, other=0.0), axis=0)
        else:
            y = tl.load(y_ptr + row * stride_y + cols, mask=mask).to(tl.float32)
            dy = tl.load(dy_ptr + row * stride_dy + cols, mask=mask).to(tl.float32)
            if STEP == "multiply":
                tl.store(p_ptr + row * N + cols, y * dy, mask=mask)
            else:
                tl.store(dx_ptr + row * stride_dx + cols, y * (dy - d), mask=mask)
    if STEP == "sum":
        tl.store(d_ptr + row, d)


def backward_unfused(y, dy):
    """[M, N], [M, N] -> [M, N], three kernels with one program a row."""
    (dx, strides), (M, N) = _prepare(y, dy), y.shape
    if dx.numel():
        p, d = torch.empty(M, N, dtype=torch.float32, device=y.device), torch.empty(M, device=y.device)
        for step in ("multiply", "sum", "finish"):
            step_kernel[(M,)](y, dy, dx, p, d, N, *strides, step, BLOCK_N=1024)
    return dx


# Rung 2. New: fused; y and dy of a row stay in the registers of one program. Predicted: 3MN. Two inputs take twice
# the registers of the forward, so 8 elements of each a thread where lesson 3 had 16.
@triton.jit
def backward_row_kernel(y_ptr, dy_ptr, dx_ptr, N, stride_y, stride_dy, stride_dx, BLOCK_N: tl.constexpr):  # [M, N] each
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    y = tl.load(y_ptr + row * stride_y + cols, mask=cols < N, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * stride_dy + cols, mask=cols < N, other=0.0).to(tl.float32)
    d = tl.sum(y * dy, axis=0)
    tl.store(dx_ptr + row * stride_dx + cols, y * (dy - d), mask=cols < N)


def backward_row(y, dy):
    """[M, N], [M, N] -> [M, N], one program a row of at most 32,768."""
    (dx, strides), (M, N) = _prepare(y, dy), y.shape
    if N > 32768:
        raise Unsupported("rows past 32,768: 1024 threads with 2 x 32 fp32 elements each are the whole register file")
    if dx.numel():
        block = triton.next_power_of_2(N)
        backward_row_kernel[(M,)](y, dy, dx, N, *strides, block, num_warps=max(1, min(32, block // 256)))
    return dx


# Rung 3. New: rows of any length, in two passes; the second runs backwards, over what the caches hold already.
# Predicted: 5MN by count, 1.67 times the least; in time less, as far as the caches serve.
@triton.jit
def backward_two_pass_kernel(y_ptr, dy_ptr, dx_ptr, N, stride_y, stride_dy, stride_dx, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = 0.0
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + row * stride_y + cols, mask=cols < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * stride_dy + cols, mask=cols < N, other=0.0).to(tl.float32)
        d += tl.sum(y * dy, axis=0)
    blocks = tl.cdiv(N, BLOCK_N)
    for i in range(blocks):
        cols = (blocks - 1 - i) * BLOCK_N + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + row * stride_y + cols, mask=cols < N).to(tl.float32)
        dy = tl.load(dy_ptr + row * stride_dy + cols, mask=cols < N).to(tl.float32)
        tl.store(dx_ptr + row * stride_dx + cols, y * (dy - d), mask=cols < N)


def backward_two_pass(y, dy):
    """[M, N], [M, N] -> [M, N], one program a row of any length."""
    (dx, strides), (M, N) = _prepare(y, dy), y.shape
    if dx.numel():
        block = min(4096, triton.next_power_of_2(N))
        backward_two_pass_kernel[(M,)](y, dy, dx, N, *strides, block, num_warps=max(1, block // 256))
    return dx


# Rung 4. New: a thread keeps y and dy as the 16 bits that it loaded and widens them anew (lesson 3): 128 bytes of each
# fit into 128 registers, so rows of 32,768 columns take 16 warps, not 32 full of fp32. Short rows share a program of 4
# warps. Predicted: 3MN as before, in less time where rung 2 had too little in flight, from 12,672 columns on.
@triton.jit
def backward_packed_kernel(
    y_ptr, dy_ptr, dx_ptr, M, N, stride_y, stride_dy, stride_dx, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):  # [M, N] each
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    y = tl.load(y_ptr + rows * stride_y + cols, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + rows * stride_dy + cols, mask=mask, other=0.0)
    d = tl.sum(opaque(y).to(tl.float32) * opaque(dy).to(tl.float32), axis=1, keep_dims=True)
    tl.store(dx_ptr + rows * stride_dx + cols, opaque(y).to(tl.float32) * (opaque(dy).to(tl.float32) - d), mask=mask)


def backward_packed(y, dy):
    """[M, N], [M, N] -> [M, N], rows of at most 64 KB: 32,768 columns of 16 bits, 16,384 of fp32."""
    (dx, strides), (M, N), size = _prepare(y, dy), y.shape, y.element_size()
    if N * size > 65536:
        raise Unsupported("rows past 64 KB: 16 warps at 128 registers a thread are the whole register file")
    if dx.numel():
        block = triton.next_power_of_2(N)
        rows = max(1, 4096 // (block * size))
        backward_packed_kernel[(triton.cdiv(M, rows),)](
            y, dy, dx, M, N, *strides, rows, block, num_warps=max(4, block * size // 4096), maxnreg=128
        )
    return dx


# Rung 5. New: a long row is shared by several programs, as in lesson 3; the note is a part's share of d. Two warps take
# 8 KB of y and of dy. Predicted: 3MN for any row that the registers of all SMs hold.
@triton.jit
def backward_shared_kernel(
    y_ptr, dy_ptr, dx_ptr, notes_ptr,  # [M, N] three times, [M, PARTS] of zeros
    N, stride_y, stride_dy, stride_dx,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, NOTE_ONLY: tl.constexpr,
):  # fmt: skip
    # No wait is for ever, since programs start in order of their id: lesson 3 says why, and who promises it.
    row = tl.program_id(0).to(tl.int64) // PARTS
    part = tl.program_id(0) % PARTS
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.load(y_ptr + row * stride_y + cols, mask=cols < N, other=0.0)
    dy = tl.load(dy_ptr + row * stride_dy + cols, mask=cols < N, other=0.0)
    share = tl.sum(opaque(y).to(tl.float32) * opaque(dy).to(tl.float32), axis=0)
    # A share of d may be 0, so the high half of its note is 1: a note of 0 means "not yet".
    note = (share.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (1 << 32)
    notes_ptr += row * PARTS
    tl.atomic_xchg(notes_ptr + part, note, sem="relaxed")
    if NOTE_ONLY:
        return
    slots = tl.arange(0, SLOTS)
    notes = tl.zeros([SLOTS], tl.int64)
    while tl.min((notes != 0).to(tl.int32), axis=0) == 0:
        # volatile: each look goes to the L2, where the other SMs' notes arrive. A slot beyond PARTS: a share of 0.0.
        notes = tl.load(notes_ptr + slots, mask=slots < PARTS, other=1 << 32, volatile=True)
    d = tl.sum(notes.to(tl.int32).to(tl.float32, bitcast=True), axis=0)
    tl.store(dx_ptr + row * stride_dx + cols, opaque(y).to(tl.float32) * (opaque(dy).to(tl.float32) - d), mask=cols < N)


def backward_shared(y, dy):
    """[M, N], [M, N] -> [M, N] for every M, N: packed up to 64 KB a row, then shared, two passes past 64 KB an SM."""
    (dx, strides), (M, N), size = _prepare(y, dy), y.shape, y.element_size()
    if N * size <= 65536:
        return backward_packed(y, dy)
    block = max(8192 // size, triton.next_power_of_2(triton.cdiv(N, 128)))
    parts, warps = triton.cdiv(N, block), block * size // 4096
    if parts > 16 // warps * num_sms():  # all parts of a row must run at once, and an SM has room for 16 warps
        return backward_two_pass(y, dy)
    if M:
        notes = torch.zeros(M, parts, dtype=torch.int64, device=y.device)
        slots = max(32 * warps, triton.next_power_of_2(parts))  # two warps on one note may not see it at the same time
        # Interpreted, programs run in turn and a wait would never end: a first round leaves the notes (5/3 in passes).
        for note_only in (True, False) if DEVICE.type == "cpu" else (False,):
            backward_shared_kernel[(M * parts,)](
                y, dy, dx, notes, N, *strides, parts, slots, block, note_only, num_warps=warps, maxnreg=128
            )
    return dx


def _prepare(y, dy):
    expect(y=y, dy=dy, ndim=2, same_shape=True, same_dtype=True, unit_stride=True)
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    return dx, (y.stride(0), dy.stride(0), dx.stride(0))


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.softmax(x, -1)  # course_ops.softmax has kernels for both directions
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        # The gradient of y.sum() is one number with strides of 0: kernels here want neighbours to be neighbours.
        return backward_shared(y, dy if dy.stride(-1) == 1 else dy.contiguous())


def softmax(x):
    """Softmax over the last dimension of [M, N], with a gradient. Saves y alone for the backward."""
    return _Softmax.apply(x)


LESSON = Lesson(
    about=About(
        teaches="two inputs, one row sum: dx = y (dy - sum(dy y))",
        hours=0.75,
        star=True,
        operator="softmax backward",
    ),
    problem=PROBLEM_BACKWARD,
    rungs=(backward_unfused, backward_row, backward_two_pass, backward_packed, backward_shared),
    checks=(
        *PROBLEM_BACKWARD.checks,
        case("past the registers of the interpreter's 4 SMs: the last rung takes two passes", M=1, N=131073),
        case("several tiles, the last one hanging over; bytes of rungs 2 and 4 are counted here", M=9, N=1000),
        case("bytes are counted here: rows past 64 KB are shared", M=2, N=32769),
    ),
    wrong=(
        Mutant("d left out", "backward_row_kernel", "(dy - d)", "dy", "backward_row"),
        Mutant("d of y alone", "backward_row_kernel", "y * dy, axis=0", "y, axis=0", "backward_row"),
        Mutant("only the last block's d", "backward_two_pass_kernel", "d +=", "d =", "backward_two_pass"),
        Mutant("dy's stride for y", "backward_packed_kernel", "rows * stride_y", "rows * stride_dy", "backward_packed"),
        Mutant("no row mask", "backward_packed_kernel", "(rows < M) & ", "", "backward_packed", "out of bounds"),
        Mutant("one d for all rows", "backward_packed_kernel", ", axis=1, keep_dims=True", "", "backward_packed"),
        Mutant("one share too few", "backward_shared_kernel", "d = tl.sum", "d = tl.max", "backward_shared"),
    ),
    claims=dict.fromkeys((backward_packed, backward_shared), ("16-byte loads", "16-byte stores", "no spills")),
    passes={backward_unfused: 3, backward_row: 1, backward_two_pass: 5 / 3, backward_packed: 1, backward_shared: 5 / 3},
    grad=Grad(softmax, reference=PROBLEM.reference, inputs=logits),
)

if __name__ == "__main__":
    LESSON.main()
