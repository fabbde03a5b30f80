"""RMSNorm backward: one pass, and a sum over rows that is the same each time
============================================================================
With n = x * rstd, y = n * w and g = dy * w:    dx = rstd * (g - n * mean(g * n)),    dw = sum over rows of dy * n.
dx needs whole rows, dw whole columns. One kernel for each reads dy and x twice, 4MN read and MN written where 2MN and
MN would do, so one pass promises a factor of 5/3. What stands in its way is dw: M rows add to the same N sums.

You will learn: sums over rows by atomics and by partial sums, why the order of an addition matters, and Autograd.
Source: lesson 9; chain rule through rstd: d rstd / dx = -rstd^3 * x / N.
Run it:    python day2_triton_basics/lesson10_rmsnorm_backward.py
Check it:  python -m lessonkit check lesson10_rmsnorm_backward
Time it:   python -m lessonkit bench lesson10_rmsnorm_backward
"""

from lessonkit import DEVICE, Grad, Lesson, Mutant, Refusal, Unsupported, Work, case, expect, num_sms
from lessonkit.device import INTERPRETED

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from day2_triton_basics import lesson09_rmsnorm as lesson09


def reference(dy, x, w, rstd):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    n = x.to(wide) * rstd[:, None]  # each of these lines reads and writes MN of fp32, or two of them
    g = dy.to(wide) * w.to(wide)
    dx = rstd[:, None] * (g - n * (g * n).mean(-1, keepdim=True))
    dw = (dy.to(wide) * n).sum(0)
    return dx.to(x.dtype), dw.to(w.dtype)


# Rung 1. Two kernels: a program a row for dx, then a program for 64 columns that walks down all rows for dw.
# Predicted: dy and x read twice, 5MN moved, 5/3 of the least; and N / 64 programs for dw are few if N is small.
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
    if ADD:  # New in rung 2.
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
        raise Unsupported("rows past 16,384: dy and x of one row do not fit in the registers of one program")
    if dx.numel():
        block = triton.next_power_of_2(N)
        warps = max(1, block // 1024)
        row_kernel[(M,)](dy, x, w, rstd, dx, sums, N, dy.stride(0), x.stride(0), block, add, num_warps=warps)


# Rung 2. New: one pass. The program that has a row of dy and x adds its share of dw to a common fp32 sum.
# Predicted: 3MN through memory, but MN additions in the L2 too, M of them to each address: slower than reading twice.
# And fp32 additions round, so their order matters: dw differs in its last bits from run to run.
def atomics(dy, x, w, rstd):
    """dy [M, N], x [M, N], w [N], rstd [M] fp32 -> dx [M, N], dw [N]; rows of at most 16,384."""
    dx = _prepare(dy, x, w, rstd)
    sums = torch.zeros(w.shape, dtype=torch.float32, device=w.device)
    _launch_rows(dy, x, w, rstd, dx, sums, add=True)
    return dx, sums.to(w.dtype)


# Rung 3. New: programs that stay, as in lesson 9. Each walks over its own rows, keeps w and its share of dw in
# registers, and writes that share once; a second kernel adds the shares in a fixed order. Rows past 8192 are shared by
# programs that own 8192 columns each and leave each other notes. Predicted: 3MN, and 8N bytes a walker for the
# shares, which stay in the L2: at 4096 x 4096 in bf16 264 walkers make 9% more. The same bits in each run.
@triton.jit
def partial_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr,
    shares_ptr, notes_ptr,  # [walkers, N] fp32, [M, SLICES] int32 zeros
    M, N, dy_stride, x_stride, width, SLICES: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, LEAVE: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % SLICES
    walkers = tl.num_programs(0) // SLICES
    first = tl.program_id(0) // SLICES
    cols = part * width + tl.arange(0, BLOCK_N)
    own = (tl.arange(0, BLOCK_N) < width) & (cols < N)
    w = tl.load(w_ptr + cols, mask=own, other=0.0)[None, :]
    slots = tl.arange(0, SLOTS)[None, :]
    dw = tl.zeros([ROWS, BLOCK_N], tl.float32)
    rows = first.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (rows < M)[:, None] & own[None, :]
    dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0)
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
    for _ in range(first, tl.cdiv(M, ROWS), walkers):
        now, now_mask = rows, mask
        rstd = tl.load(rstd_ptr + now, mask=now < M, other=0.0)[:, None]
        n = x.to(tl.float32) * rstd
        g = dy.to(tl.float32) * w.to(tl.float32)
        dw += dy.to(tl.float32) * n
        dot = tl.sum(g * n, axis=1)
        if SLICES > 1 and LEAVE:
            # 0 is "not yet", so the bits of the sum plus one; see lesson 9.
            tl.store(notes_ptr + now * SLICES + part, dot.to(tl.int32, bitcast=True) + 1, mask=now < M)
        rows += walkers * ROWS
        mask = (rows < M)[:, None] & own[None, :]
        # The next tile's loads go out before this one waits, for notes or for anything else.
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0)
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
        if FINISH:
            if SLICES > 1:
                notes_at = notes_ptr + now[:, None] * SLICES + slots
                expected = (now < M)[:, None] & (slots < SLICES)
                notes = tl.load(notes_at, mask=expected, other=1, volatile=True)
                if LEAVE:
                    while tl.min(tl.min((notes != 0).to(tl.int32), axis=1), axis=0) == 0:
                        notes = tl.load(notes_at, mask=expected, other=1, volatile=True)
                dot = tl.sum((notes - 1).to(tl.float32, bitcast=True), axis=1)
            dx = rstd * (g - n * (dot / N)[:, None])
            tl.store(dx_ptr + now[:, None] * N + cols[None, :], dx, mask=now_mask)
    if FINISH:
        tl.store(shares_ptr + first.to(tl.int64) * N + cols, tl.sum(dw, axis=0), mask=own)


@triton.jit
def add_shares_kernel(shares_ptr, dw_ptr, walkers, N, ROWS: tl.constexpr, COLS: tl.constexpr):  # [walkers, N], [N]
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    sums = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, walkers, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < walkers)[:, None] & (cols < N)[None, :]
        sums += tl.load(shares_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(sums, axis=0), mask=cols < N)


def partial_sums(dy, x, w, rstd):
    """dy [M, N], x [M, N], w [N], rstd [M] fp32 -> dx [M, N], dw [N], for every M and N."""
    dx, (M, N) = _prepare(dy, x, w, rstd), x.shape
    if dx.numel() == 0:
        return dx, torch.zeros_like(w)
    slices = triton.cdiv(N, 8192)
    width = triton.cdiv(triton.cdiv(N, slices), 16) * 16  # a multiple of 16, so that each slice begins aligned
    block = triton.next_power_of_2(width)
    rows = max(1, 4096 // block)
    warps = max(1, rows * block // 512)
    walkers = min(triton.cdiv(M, rows), max(1, 16 // warps * num_sms() // slices))
    shares = torch.empty((walkers, N), dtype=torch.float32, device=x.device)
    notes = torch.zeros((M, slices), dtype=torch.int32, device=x.device) if slices > 1 else shares
    # One launch if the programs that share a row all run at once, else a launch before leaves all the notes.
    at_once = slices == 1 or (not INTERPRETED and slices <= num_sms())
    for leave, finish in ((True, True),) if at_once else ((True, False), (False, True)):
        partial_kernel[(walkers * slices,)](
            dy, x, w, rstd, dx, shares, notes, M, N, dy.stride(0), x.stride(0), width, SLICES=slices,
            SLOTS=triton.next_power_of_2(slices), ROWS=rows, BLOCK_N=block, LEAVE=leave, FINISH=finish,
            # 512 threads of 128 registers fill an SM. A cooperative launch is refused if not all programs fit at once.
            num_warps=warps, maxnreg=128, launch_cooperative_grid=slices > 1 and at_once,
        )  # fmt: skip
    dw = torch.empty_like(w)
    add_shares_kernel[(triton.cdiv(N, 32),)](shares, dw, walkers, N, ROWS=32, COLS=32)
    return dx, dw


def _prepare(dy, x, w, rstd):
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
        y, rstd = lesson09.shared_row(x, w, eps)
        ctx.save_for_backward(x, w, rstd)  # 4 bytes a row beside the inputs, and the sum of squares is not done again
        return y

    @staticmethod
    def backward(ctx, dy):
        return *partial_sums(dy.contiguous(), *ctx.saved_tensors), None  # dy may have any strides, even 0


def rms_norm(x, w, eps):
    """x [M, N], w [N] -> y [M, N], differentiable: torch.nn.functional.rms_norm from lessons 9 and 10."""
    return _RMSNorm.apply(x, w, eps)


def inputs(M, N, pad=0, strange=False, dtype=torch.float32):
    # dy has a mean along rows and along columns, as n does: then the mean of g * n, which dx takes off, and dw, a sum
    # of M products, are large, and leaving one out or adding one twice shows. Its row stride is not that of x.
    x, w, eps = lesson09.inputs(M, N, pad, strange=strange, dtype=dtype)
    dy = torch.full((M, N + pad + min(pad, 5)), 7.0, dtype=dtype, device=DEVICE)[:, :N]
    dy.copy_(torch.randn(M, N, device=DEVICE) + 0.5)
    if strange:
        dy[4, 0] = -torch.inf
    return dy, x, w, torch.rsqrt(x.float().square().mean(-1) + eps)


def same_each_time(rung):
    """Two runs agree to the bit; with atomics the order of the additions, and so the last bits, are chance."""
    if rung.__name__ == "atomics":
        raise Unsupported("atomics add in any order")
    args = inputs(133, 781)
    for first, second in zip(rung(*args), rung(*args), strict=True):
        assert torch.equal(first, second)


def _torch(dy, x, w, rstd):
    return torch.ops.aten._fused_rms_norm_backward(dy, x, x.shape[-1:], rstd[:, None], w, [True, True])


def _liger(dy, x, w, rstd):
    from liger_kernel.ops.rms_norm import rms_norm_backward
    from liger_kernel.ops.utils import calculate_settings

    # Casting mode 1 is "gemma", which multiplies by w before it rounds, as PyTorch does; not in place of dy.
    return rms_norm_backward(dy, x, w, rstd, 0.0, 1, *calculate_settings(x.shape[1]), False, None)


def _quack(dy, x, w, rstd):
    from quack.rmsnorm import rmsnorm_bwd

    return rmsnorm_bwd(x, w, dy, rstd)[:2]


LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    rungs=(two_reads, atomics, partial_sums),
    checks=(
        case("no rows: dw is a sum of nothing, zero", M=0, N=5),
        case("no columns", M=5, N=0),
        case("rows of one", M=17, N=1),
        case("a prime width, a row stride that is not N, a tile that hangs over", M=70, N=127, pad=3),
        case("NaN and inf in x, -inf in dy: whole rows of dx, single columns of dw", M=5, N=1025, strange=True),
        case("three slices, the last one shorter", M=5, N=16385, strange=True),
        case("more slices than run at once: notes in a launch of their own", gib=1, M=2, N=3_000_000),
        case("row offsets past 2^31", gib=40, M=3, N=1000, pad=2**30),
        case("and in slices", gib=40, M=3, N=40000, pad=2**30),
        case("bytes are counted here: enough rows for each program to walk", M=203, N=1000),
    ),
    benches=tuple({"M": m, "N": n} for m, n in lesson09.SHAPES),
    work=lambda M, N, dtype, **_: Work(bytes=(3 * M * N + 2 * N) * dtype.itemsize + 4 * M, flops=9 * M * N),
    wrong=(
        Mutant("no mean taken off", "row_kernel", "g - n * (tl.sum(g * n, axis=0) / N)", "g", "two_reads"),
        Mutant("the mean of the padded width", "row_kernel", "axis=0) / N", "axis=0) / BLOCK_N", "two_reads"),
        Mutant("w forgotten in the mean", "row_kernel", "tl.sum(g * n", "tl.sum(dy * n", "atomics"),
        Mutant("dw of g instead of dy", "row_kernel", "cols, dy * n", "cols, g * n", "atomics"),
        Mutant("dw of x instead of n", "dw_kernel", "(x * tl", "(x + 0 * tl", "two_reads"),
        Mutant("dy read with x's stride", "dw_kernel", "None] * dy_stride", "None] * x_stride", "two_reads"),
        Mutant("only the last tile's dw", "partial_kernel", "dw += dy", "dw = dy", "partial_sums"),
        Mutant("a share too many", "add_shares_kernel", "(rows < w", "(rows <= w", "partial_sums", "out of bounds"),
        # No mutant may lose a note: on a GPU the others would wait for it forever.
        Mutant("one slice's sum for all", "partial_kernel", "SLICES + slots", "SLICES + slots * 0", "partial_sums"),
    ),
    peers={"torch": _torch, "torch.compile": torch.compile(reference, dynamic=False), "liger": _liger, "quack": _quack},
    claims={two_reads: ("16-byte loads", "no spills"), partial_sums: ("16-byte loads",)},
    passes={two_reads: 2.0, atomics: 2.0, partial_sums: 1.06},
    properties=(same_each_time,),
    refuses=(
        Refusal("dy of another shape", lambda f: f(inputs(2, 9)[0], *inputs(2, 8)[1:]), ValueError, "x has shape"),
        Refusal("one rstd too few", lambda f: f(*inputs(3, 8)[:3], inputs(2, 8)[3]), ValueError, "rstd has shape"),
        Refusal("rstd in 16 bits", lambda f: f(*inputs(3, 8)[:3], inputs(3, 8)[3].half()), TypeError, "rstd is"),
        Refusal("strided", lambda f: f(*(t.T for t in inputs(9, 8)[:2]), *inputs(8, 9)[2:]), ValueError, "stride"),
        Refusal("not a float", lambda f: f(*(t.long() for t in inputs(2, 8))), TypeError, "torch.int64"),
        Refusal("gradient lost", lambda f: f(inputs(2, 8)[0].requires_grad_(), *inputs(2, 8)[1:]), ValueError, "grad"),
    ),
    grad=Grad(rms_norm, lambda x, w, eps: F.rms_norm(x, x.shape[-1:], w, eps), lesson09.inputs),
)

if __name__ == "__main__":
    LESSON.main()
