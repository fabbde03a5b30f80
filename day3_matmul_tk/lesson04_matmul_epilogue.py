"""Matmul with an epilogue: bias, GELU and residual while the tile is in registers
================================================================================
y = gelu(x W^T + bias) + residual. x is [M, K], and W is [N, K] as in nn.Linear: half of a transformer's MLP. The matmul
is 2MNK FLOPs. The operations after it are a few FLOPs for each of MN elements, so they cost HBM traffic only. One pass
is MN elements read or written once. Each kernel after the matmul reads what the kernel before wrote:

    rung               matmul   bias   gelu   residual     passes (without residual)
    unfused            1        2      2      3            8 (5)
    bias_fused         1               2      3            6 (3), as torch: cuBLASLt adds the bias
    gelu_fused         1                      3            4 (1)
    residual_fused     2                                   2 (1), the least

A pass is 2MN bytes in bf16 at 4.2 TB/s, and the matmul is 2MNK FLOPs at about 700 TFLOP/s: their quotient is 167/K. So
without residual PyTorch's two kernels take 1 + 2 * 167/K of gelu_fused's time: 1.33 at K = 1024, 1.16 at 2048, 1.08 at
4096.

You will learn: what an epilogue may hold, what its arithmetic costs, when fusing pays. Lesson 5 is the backward.
Run it:    python3 course.py run lesson04_matmul_epilogue
Check it:  python3 course.py check lesson04_matmul_epilogue
Time it:   python3 course.py bench lesson04_matmul_epilogue
"""

import math

from lessonkit import About, Lesson, Mutant, Prediction, case, device, expect, num_sms, tma_takes
from lessonkit.modes.opaque import INTERPRETED

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from problems.linear import PROBLEM, SEARCHED

# gelu(z) = z / (1 + exp2(LINEAR z + CUBIC z^3)): the tanh form with its constants folded (day 2, lesson 3).
LINEAR = tl.constexpr(-2 * math.sqrt(2 / math.pi) * math.log2(math.e))
CUBIC = tl.constexpr(LINEAR.value * 0.044715)


@triton.jit
def place(program, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """The tile (row, column) that a program computes."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = program // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)  # the last group may be lower
    within = program % (GROUP * tiles_n)
    return first + within % height, within // height


# The matmul of rungs 1 to 4: one program for each tile, in groups of 8 rows of tiles (lesson 1), then the operations
# that the flags name. Accumulator, bias and residual are added in fp32, and the result is rounded once. SAVE: z is
# stored for the backward (lesson 5).
@triton.jit
def matmul_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, z_ptr,  # [M, K], [N, K], [N], [M, N] each
    M, N, K, stride_x, stride_w, stride_r,
    BIAS: tl.constexpr, GELU: tl.constexpr, RESIDUAL: tl.constexpr, SAVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = place(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, 8)
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + rows * stride_x + ks, mask=(rows < M) & (ks < K), other=0.0)
        w = tl.load(w_ptr + cols * stride_w + ks[:, None], mask=(cols < N) & (ks[:, None] < K), other=0.0)
        z = tl.dot(x, w, z, input_precision="ieee")  # of fp32: no TF32, as in PyTorch
    mask = (rows < M) & (cols < N)
    if BIAS:
        z += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    if SAVE:
        tl.store(z_ptr + rows * N + cols, z.to(z_ptr.dtype.element_ty), mask=mask)
    if GELU:
        z = gelu(z)
    if RESIDUAL:
        z += tl.load(residual_ptr + rows * stride_r + cols, mask=mask).to(tl.float32)
    tl.store(y_ptr + rows * N + cols, z.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gelu(z):
    # Far below 0 exp2 is inf, and z / inf is -0. There are 2 special functions per element, and an SM does 16 per
    # cycle: 4096 cycles for 128 x 256.
    return z / (1 + tl.exp2(z * (z * z * CUBIC + LINEAR)))


@triton.jit
def gelu_in_one(z):
    # One special function, tanh, exact to 11 bits: enough for a result in 16 bits. The interpreter has no PTX.
    if INTERPRETED:
        return gelu(z)
    u = z * (z * z * 0.0356774081 + 0.7978845608)  # sqrt(2 / pi) (z + 0.044715 z^3)
    t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1)
    return 0.5 * z * t + 0.5 * z


@triton.jit
def pointwise_kernel(
    x_ptr, bias_ptr, residual_ptr, y_ptr, M, N, stride_r,  # [M, N], [N], [M, N], [M, N]
    BIAS: tl.constexpr, GELU: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * N + cols, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    if GELU:
        x = gelu(x)
    if RESIDUAL:
        x += tl.load(residual_ptr + rows * stride_r + cols, mask=mask).to(tl.float32)
    tl.store(y_ptr + rows * N + cols, x, mask=mask)


# Rung 1. A kernel for every operation. Predicted: 8 passes over MN, each 167/K of the matmul's time; without residual 4
# after the matmul's own, at K = 2048 700 / (1 + 4 * 0.08) = 528 TFLOP/s.
def unfused(x, w, bias, residual=None):
    """x [M, K], w [N, K], bias [N], residual [M, N] or None -> y [M, N]. ValueError, TypeError for other arguments."""
    _expect(x, w, bias, residual)
    return _pointwise(_pointwise(_pointwise(_tiles(x, w), bias=bias), gelu=True), residual=residual)


# Rung 2. New: the bias is added to the accumulator before it is stored. A tile reads one row of it, which is nothing.
# Two passes fewer, and z is rounded to 16 bits once, not twice.
def bias_fused(x, w, bias, residual=None):
    """As unfused."""
    _expect(x, w, bias, residual)
    return _pointwise(_pointwise(_tiles(x, w, bias), gelu=True), residual=residual)


# Rung 3. New: GELU in registers. Two passes fewer, 2 * 167/K of the matmul's time. But the tensor cores wait during a
# tile's GELU, unless another program on the SM multiplies.
def gelu_fused(x, w, bias, residual=None):
    """As unfused."""
    _expect(x, w, bias, residual)
    return _pointwise(_tiles(x, w, bias, gelu=True), residual=residual)


# Rung 4. New: the residual is loaded in the epilogue. Two passes fewer: y is neither written before nor read again.
def residual_fused(x, w, bias, residual=None):
    """As unfused."""
    _expect(x, w, bias, residual)
    return _tiles(x, w, bias, residual, gelu=True)


def _tiles(x, w, bias=None, residual=None, gelu=False, save=None):
    M, N, y = len(x), len(w), torch.empty((len(x), len(w)), dtype=x.dtype, device=x.device)
    if y.numel():
        # 128 bytes of K a step. 3 stages take 3 * (128 + 128) * 128 bytes, 96 KB, so two programs fit on a Hopper SM.
        matmul_kernel[(triton.cdiv(M, 128) * triton.cdiv(N, 128),)](
            x, w, bias, residual, y, save, M, N, x.shape[1],
            x.stride(0), w.stride(0), 0 if residual is None else residual.stride(0),
            bias is not None, gelu, residual is not None, save is not None,
            BLOCK_M=128, BLOCK_N=128, BLOCK_K=128 // x.element_size(), num_warps=8, num_stages=3,
        )  # fmt: skip
    return y


def _pointwise(x, bias=None, residual=None, gelu=False):
    if bias is residual is None and not gelu:  # nothing to do
        return x
    (M, N), y = x.shape, torch.empty_like(x)
    if y.numel():
        pointwise_kernel[(triton.cdiv(M, 8) * triton.cdiv(N, 512),)](
            x, bias, residual, y, M, N, 0 if residual is None else residual.stride(0),
            bias is not None, gelu, residual is not None, BLOCK_M=8, BLOCK_N=512,
        )  # fmt: skip
    return y


# Rung 5. New: lesson 2's persistent matmul. TMA loads operands and residual and stores y, in halves of a tile, since a
# whole one would need a stage's shared memory. It masks what lies outside. It wants rows that begin at multiples of 16
# bytes. Otherwise, before Hopper, and in fp32, rung 4's pointers are used. And a cheaper GELU, since the tensor cores
# are idle while it computes.
# Predicted at K = 2048: a tile multiplies for 32,768 cycles, and 2048 of GELU come on top: 700 / 1.06 = 660 TFLOP/s.
@triton.jit
def persistent_kernel(
    x_desc, w_desc, bias_ptr, residual_desc, y_desc, z_desc, M, N, K, RESIDUAL: tl.constexpr, SAVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = place(tile, M, N, BLOCK_M, BLOCK_N, 8)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(x_desc.load([row, k]), w_desc.load([col, k]).T, acc)
        halves = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        for half in tl.static_range(2):
            start = col + half * (BLOCK_N // 2)
            cols = start + tl.arange(0, BLOCK_N // 2)
            z = halves[half] + tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
            if SAVE:
                z_desc.store([row, start], z.to(z_desc.dtype))
            z = gelu_in_one(z)
            if RESIDUAL:
                z += residual_desc.load([row, start]).to(tl.float32)
            y_desc.store([row, start], z.to(y_desc.dtype))


def linear_gelu(x, w, bias, residual=None, save=None):
    """As unfused, at every shape. x W^T + bias is written to `save`, a contiguous [M, N], if it is given."""
    _expect(x, w, bias, residual)
    M, N, y = len(x), len(w), torch.empty((len(x), len(w)), dtype=x.dtype, device=x.device)
    outer = [y if t is None else t for t in (residual, y, save)]
    if x.element_size() != 2 or device.architecture() < 90 or not tma_takes(x, w, *outer):
        return _tiles(x, w, bias, residual, True, save)
    # 128 x 256 needs the fewest bytes from L2 (lesson 1). If that is less than one tile for each SM, halve the tile.
    wide = device.roomy() and triton.cdiv(M, 128) * triton.cdiv(N, 256) >= num_sms()
    block_n, stages = (256, 3) if wide else (128, 4)
    beside = 128 * block_n * (1 + (residual is not None) + (save is not None))
    x_desc, w_desc = (TensorDescriptor.from_tensor(t, [rows, 64]) for t, rows in ((x, 128), (w, block_n)))
    outer = (TensorDescriptor.from_tensor(t, [128, block_n // 2]) for t in outer)
    persistent_kernel[(min(num_sms(), triton.cdiv(M, 128) * triton.cdiv(N, block_n)),)](
        x_desc, w_desc, bias, *outer, M, N, x.shape[1], residual is not None, save is not None,
        BLOCK_M=128, BLOCK_N=block_n, BLOCK_K=64, num_warps=8,
        num_stages=device.fitting_stages(stages, 2 * (128 + block_n) * 64, beside),
    )  # fmt: skip
    return y


def _expect(x, w, bias, residual):
    matrices = {"x": x, "w": w} | ({} if residual is None else {"residual": residual})
    expect(**matrices, ndim=2, same_dtype=True, unit_stride=True)
    expect(x=x, bias=bias, same_dtype=True)
    expect(bias=bias, ndim=1, contiguous=True)
    (M, K), N = x.shape, len(w)
    if (w.shape[1], *bias.shape) != (K, N) or (residual is not None and residual.shape != (M, N)):
        shapes = {name: tuple(t.shape) for name, t in {**matrices, "bias": bias}.items()}
        raise ValueError(f"shapes {shapes}, expected x [M, K], w [N, K] as nn.Linear has it, bias [N], residual [M, N]")


# fmt: off
WRONG = (
    Mutant("bias by row", "matmul_kernel", "ptr + cols, mask=cols", "ptr + rows, mask=rows", "residual_fused"),
    Mutant("the bias after the GELU", "unfused", "_tiles(x, w), bias=bias), gelu=True)",
           "_tiles(x, w), gelu=True), bias=bias)", "unfused"),
    Mutant("the residual's rows N apart", "pointwise_kernel", "rows * stride_r", "rows * N", "unfused"),
    Mutant("the bias forgotten", "bias_fused", "_tiles(x, w, bias)", "_tiles(x, w)", "bias_fused"),
    Mutant("no bias in the last column", "matmul_kernel", "mask=cols < N,", "mask=cols < N - 1,", "bias_fused"),
    Mutant("sums rounded", "matmul_kernel", "gelu(z)", "gelu(z.to(tl.float16).to(tl.float32))", "gelu_fused"),
    Mutant("the residual inside the GELU", "persistent_kernel", "z += residual_desc.load([row, start]).to(tl.float32)",
           "z = gelu(z + residual_desc.load([row, start]).to(tl.float32))", "linear_gelu"),
    Mutant("both halves to the left", "persistent_kernel", "col + half *", "col + 0 *", "linear_gelu", "nan"),
    Mutant("half the tiles", "persistent_kernel", "tl.num_programs(0)", "tl.num_programs(0) * 2", "linear_gelu", "nan"),
    Mutant("bias past its end", "persistent_kernel", "cols < N", "cols < N + 9", "linear_gelu", "out of bounds"),
)
# fmt: on

PLAIN = {"M": 8192, "N": 8192, "K": 2048, "residual": False}

LESSON = Lesson(
    about=About(
        teaches="bias, GELU and residual in registers; what fusing gains and what it costs",
        hours=0.75,
        operator="epilogue",
        pictures=("traffic",),
    ),
    problem=PROBLEM,
    rungs=(unfused, bias_fused, gelu_fused, residual_fused, linear_gelu),
    predicted=(
        Prediction(rung=unfused, at=PLAIN, tflop_per_s=528),
        Prediction(rung=bias_fused, at=PLAIN, times=1.14, over=unfused),
        Prediction(
            rung=gelu_fused,
            at=PLAIN,
            times=1.16,
            over=bias_fused,
            why="The tensor cores wait during a tile's GELU: 148 registers per thread leave room for one program on "
            "an SM, so no other multiplies meanwhile.",
        ),
        Prediction(
            rung=residual_fused,
            at={"M": 8192, "N": 4096, "K": 4096, "residual": True},
            times=1.08,
            over=gelu_fused,
            why="The cause is not known.",
        ),
        Prediction(rung=linear_gelu, at=PLAIN, tflop_per_s=660),
    ),
    checks=(
        *PROBLEM.checks,
        case("the residual's rows are longer than used; bytes are counted", M=128, N=128, K=16, residual=True, pad=8),
    ),
    wrong=WRONG,
    peers=PROBLEM.peers | SEARCHED,
    claims={residual_fused: ("wgmma", "cp.async", "no spills"), linear_gelu: ("wgmma", "tma", "no spills")},
    passes={unfused: 3.66, bias_fused: 2.77, gelu_fused: 1.89, residual_fused: 1.0, linear_gelu: 1.0},
)

if __name__ == "__main__":
    LESSON.main()
