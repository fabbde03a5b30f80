"""LayerNorm backward at every row length, and the differentiable op
==================================================================
Lesson 8's last rung keeps dw and db, 8 bytes a column, in the registers of one program. An SM has 256 KB of them: at
32768 columns nothing is left, and from 8192 on too little for x and dy. This lesson splits such rows by columns, and
ties both directions together: `layernorm` runs lesson 7b forward and this lesson backward.

You will learn: what two programs of one row must tell each other, and a torch.autograd.Function over Triton kernels.
Run it:    python day2_triton_basics/lesson08b_layernorm_backward_lengths.py
Check it:  python -m lessonkit check lesson08b_layernorm_backward_lengths
Time it:   python -m lessonkit bench lesson08b_layernorm_backward_lengths
"""

from lessonkit import Grad, Lesson, Mutant, case, num_sms

import torch
import triton
import triton.language as tl

from day2_triton_basics.lesson07_layernorm import inputs as forward_inputs
from day2_triton_basics.lesson07b_layernorm_lengths import layernorm_forward
from day2_triton_basics.lesson08_layernorm_backward import (
    PEERS,
    REFUSES,
    add_partials,
    dx_is_orthogonal,
    inputs,
    layernorm_backward_persistent,
    load_rows,
    prepare,
    reference,
    work,
)


# Rung 1. Rows too long for one program's registers (dw and db of 32768 columns are 256 KB, all that an SM has) are
# split by columns. A program owns a strip of columns, keeps its dw and db, and leaves its share of every row's c1 and
# c2; a second kernel adds the shares up and writes dx. Predicted: 5MN as in
# lesson 8's rung 1, but for any N and by programs
# that are all alike: the sums along the row are the only thing that two strips need to tell each other.
@triton.jit
def strip_sums_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, shares_ptr, partial_dw_ptr, partial_db_ptr, M, N, stride_dy, stride_x,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    strip, program, programs = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    cols = strip * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    dw = tl.zeros((ROWS, BLOCK_N), tl.float32)
    db = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for tile in range(program, tl.cdiv(M, ROWS), programs):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        dy, x_hat = load_rows(dy_ptr, x_ptr, mean_ptr, rstd_ptr, rows, cols, M, N, stride_dy, stride_x)
        dw += dy * x_hat
        db += dy
        share_ptr = shares_ptr + strip.to(tl.int64) * 2 * M + rows  # shares [strips, 2, M]
        tl.store(share_ptr, tl.sum(dy * w * x_hat, axis=1, keep_dims=True), mask=rows < M)
        tl.store(share_ptr + M, tl.sum(dy * w, axis=1, keep_dims=True), mask=rows < M)
    tl.store(partial_dw_ptr + program * N + cols, tl.sum(dw, axis=0, keep_dims=True), mask=cols < N)
    tl.store(partial_db_ptr + program * N + cols, tl.sum(db, axis=0, keep_dims=True), mask=cols < N)


@triton.jit
def strip_dx_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, shares_ptr, dx_ptr, M, N, stride_dy, stride_x, strips,
    SHARES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The last rows were read last, so they are the likeliest to be in L2 still: begin with them.
    row = M - 1 - tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    share = tl.arange(0, SHARES)
    share_ptr = shares_ptr + share.to(tl.int64) * 2 * M + row
    c1 = tl.sum(tl.load(share_ptr, mask=share < strips, other=0.0), axis=0) / N
    c2 = tl.sum(tl.load(share_ptr + M, mask=share < strips, other=0.0), axis=0) / N
    rstd = tl.load(rstd_ptr + row)
    x_hat = (
        tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32) - tl.load(mean_ptr + row)
    ) * rstd
    dy = tl.load(dy_ptr + row * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
    g = dy * tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + row * N + cols, rstd * (g - x_hat * c1 - c2), mask=mask)


def layernorm_backward_strips(dy, x, w, mean, rstd):
    """dy [M, N], x [M, N], w [N], mean [M], rstd [M] (fp32) -> dx [M, N], dw [N], db [N]; any N, two passes over x."""
    M, N, dx, dw, db = prepare(dy, x, w, mean, rstd)
    if dx.numel():
        strips, strides = triton.cdiv(N, 1024), (dy.stride(0), x.stride(0))
        programs = min(triton.cdiv(M, 4), max(1, num_sms() * 4 // strips))
        shares = torch.empty((strips, 2, M), dtype=torch.float32, device=x.device)
        partial_dw, partial_db = torch.empty((2, programs, N), dtype=torch.float32, device=x.device)
        strip_sums_kernel[(strips, programs)](
            dy, x, w, mean, rstd, shares, partial_dw, partial_db, M, N, *strides, ROWS=4, BLOCK_N=1024, num_warps=8
        )
        strip_dx_kernel[(triton.cdiv(N, 4096), M)](
            dy, x, w, mean, rstd, shares, dx, M, N, *strides, strips, triton.next_power_of_2(strips), 4096, num_warps=8
        )
        add_partials(partial_dw, partial_db, dw, db)
    return dx, dw, db


# Rung 2. New: no kernel, the choice: what fits one program's registers goes lesson 8's way, 3MN.
def layernorm_backward(dy, x, w, mean, rstd):
    """As layernorm_backward_strips, in one pass over x where a row fits one program."""
    fits = x.shape[-1] <= 8192
    return (layernorm_backward_persistent if fits else layernorm_backward_strips)(dy, x, w, mean, rstd)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        y, mean, rstd = layernorm_forward(x, w, b)
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
    Mutant("one strip's share taken for the row's sum", "strip_dx_kernel", "tl.load(share_ptr + M, mask=share < strips",
           "tl.load(share_ptr + M, mask=share < 1", "layernorm_backward_strips"),
    Mutant("both shares of one strip in one place", "strip_sums_kernel", "tl.store(share_ptr + M", "tl.store(share_ptr",
           "layernorm_backward_strips", "nan"),
    Mutant("every program writes its partial sums to the first row", "strip_sums_kernel",
           "partial_dw_ptr + program * N", "partial_dw_ptr + 0 * N", "layernorm_backward_strips", "nan"),
    Mutant("a row too many", "strip_dx_kernel", "M - 1 - tl", "M - tl", "layernorm_backward", "out of bounds"),
)
# fmt: on

LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    rungs=(layernorm_backward_strips, layernorm_backward),
    checks=(
        case("no rows: dw and db are 0", M=0, N=5),
        case("rows of nothing", M=3, N=0),
        case("one element a row", M=2, N=1),
        case("a prime, and 37 rows leave the last tile of 4 hanging over", M=37, N=101),
        case("rows 3 elements apart, so that most are not aligned", M=5, N=1025, pad=3),
        case("9 strips, the last of one column", M=7, N=8193),
        case("a row past element 2^31", gib=40, M=3, N=5, pad=2**30),
        case("the bytes are counted here", M=64, N=3072),
    ),
    benches=tuple({"M": m, "N": n} for m, n in ((8192, 8192), (4096, 12672), (4096, 32768), (2048, 131072))),
    work=work,
    wrong=WRONG,
    peers=PEERS,
    claims={layernorm_backward_strips: ("16-byte loads", "no spills")},
    passes={layernorm_backward_strips: 2.17},
    properties=(dx_is_orthogonal,),
    refuses=REFUSES,
    grad=Grad(layernorm, layernorm_torch, forward_inputs),
)

if __name__ == "__main__":
    LESSON.main()
