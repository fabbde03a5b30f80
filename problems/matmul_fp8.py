"""Matmul in fp8: a [M, K], b [K, N] in e4m3 with fp32 scales -> [M, N] in bf16. b lies as [N, K].

The scales' shapes say the scheme: per tensor [1, 1], [1, 1]; row-wise [M, 1], [1, N]; blockwise [M, K/128],
[K/128, N/128], rounded up.
"""

from lessonkit import DEVICE, Problem, Refusal, Work, case, expect

import torch
import triton

FP8 = torch.float8_e4m3fn
GROUP = 128  # of K, and of N in B: the blocks of the blockwise scheme


def reference(a, b, scale_a, scale_b):
    """The product of what the fp8 numbers stand for. Quantisation is not judged here: day 3's lesson 7 does."""
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    product = _spread(a, scale_a, wide) @ _spread(b, scale_b, wide)
    return product if a.dtype == torch.float64 else product.bfloat16()


def _spread(q, scale, dtype):
    """q * scale, each scale over the block of q that it belongs to: [128 or all, 128 or all or 1]."""
    for dim, n in enumerate(q.shape):
        if 1 < scale.shape[dim] < n:
            scale = scale.repeat_interleave(GROUP, dim)[(slice(None),) * dim + (slice(n),)]
    return q.to(dtype) * scale.to(dtype)


def on_hopper(a, b, scale_a, scale_b):
    """What Hopper's FP8 tensor cores make of it, for PyTorch's `_scaled_mm` as for any kernel.

    An instruction multiplies 32 of K, and adds the products to its accumulator. Addends are aligned to the largest of
    them, and what lies below its first 14 bits is cut off (DeepSeek-V3, section 3.3.2). A product counts as large as
    its factors' exponents say: 1.5 * 1.5 as 1, though it is 2.25. All that is exact in fp32.
    Each 128 of K the accumulator goes into an fp32 register where scales or rows that TMA cannot read ask for it.
    """
    (M, K), N = a.shape, b.shape[1]
    promoted = scale_a.shape[1] > 1 or scale_b.shape[0] > 1 or K % 16 != 0 or N % 8 != 0
    total = acc = torch.zeros(M, N, dtype=torch.float32, device=a.device)
    for start in range(0, K if total.numel() else 0, 32):
        left, right = a[:, start : start + 32].float()[:, :, None], b[start : start + 32].float()
        addends = torch.cat((left * right, acc[:, None]), 1)
        # A mantissa of frexp begins with 0.1, and their product with 0.1 or 0.01: hence the 1.
        sizes = torch.frexp(left).exponent + torch.frexp(right).exponent - 1
        sizes = torch.cat((sizes, torch.frexp(acc).exponent[:, None]), 1)
        cut = sizes.where(addends != 0, -40).amax(1, keepdim=True) - 14
        acc = torch.ldexp(torch.ldexp(addends, -cut).trunc(), cut).sum(1)
        if start + 32 >= K or (promoted and (start + 32) % GROUP == 0):
            total, acc = total + acc * _scales_of(start // GROUP, scale_a, scale_b, N), torch.zeros_like(acc)
    return total.bfloat16()


def _scales_of(k, scale_a, scale_b, N):
    """Of the products of block k of K, [M or 1, N or 1]."""
    of_b = scale_b[min(k, scale_b.shape[0] - 1)]
    of_b = of_b.repeat_interleave(GROUP)[:N] if 1 < len(of_b) < N else of_b
    return scale_a[:, min(k, scale_a.shape[1] - 1), None] * of_b


def scheme_of(a, b, scale_a, scale_b):
    """The scheme that the scales' shapes are of."""
    expect(a=a, b=b, ndim=2, dtypes=(FP8,))
    expect(scale_a=scale_a, scale_b=scale_b, ndim=2, dtypes=(torch.float32,))
    expect(a=a, dtypes=(FP8,), unit_stride=True)
    (M, K), N = a.shape, b.shape[1]
    if b.shape[0] != K:
        raise ValueError(f"b has {b.shape[0]} rows, but a has {K} columns: make them equal")
    if K > 1 and b.stride(0) != 1:
        raise ValueError(f"b has strides {b.stride()}, expected columns that lie together: pass w.t() of w [N, K]")
    k, n = triton.cdiv(K, GROUP), triton.cdiv(N, GROUP)
    shapes = {"tensor": ((1, 1), (1, 1)), "rows": ((M, 1), (1, N)), "blocks": ((M, k), (k, n))}
    for scheme, shape in shapes.items():
        if (scale_a.shape, scale_b.shape) == shape:
            return scheme
    raise ValueError(f"scales {tuple(scale_a.shape)}, {tuple(scale_b.shape)}: expected one of {shapes}")


def inputs(M, N, K, scheme="tensor", dtype=FP8, pad=0):
    # The scale of each group is another, so that one taken from a neighbour is wrong by a factor. Strides of the scales
    # as torch._scaled_mm wants them.
    def matrix(rows, square):
        q = (torch.randn(rows, K + pad, device=DEVICE) * 60).clamp(-448, 448).to(dtype)[:, :K]
        blocks = triton.cdiv(rows, GROUP) if square else rows, triton.cdiv(K, GROUP)
        shape = {"tensor": (1, 1), "rows": (rows, 1), "blocks": blocks}[scheme]
        scale = torch.rand(*shape, 2 if pad else 1, device=DEVICE).mul(3).exp2() / 448
        return q, scale[..., 0]  # pad: not side by side either

    (a, scale_a), (w, scale_w) = matrix(M, False), matrix(N, True)
    return a, w.t(), scale_a if pad else scale_a.t().contiguous().t(), scale_w.t()


def promoted_sums_keep_their_digits(rung):
    """Positive numbers, K = 4096: off by bf16's rounding and four cuts, where registers add up. (See rung 3.)"""
    a, w = ((torch.rand(16, 4096, device=DEVICE) + 0.5).to(FP8) for _ in range(2))
    scales = torch.rand(16, 32, device=DEVICE) + 1, torch.rand(32, 1, device=DEVICE) + 1
    c = rung(a, w.t(), *scales)  # Unsupported by the rungs that do not promote
    exact = reference(a.double(), w.t().double(), *scales)
    assert ((c.double() - exact).abs() <= (2**-8 + 4 * 2**-13) * exact).all()


def _peer(fast):
    return lambda a, b, sa, sb: torch._scaled_mm(a, b, sa, sb, out_dtype=torch.bfloat16, use_fast_accum=fast)


def _work(M, N, K, dtype, scheme="tensor", pad=0):
    k = triton.cdiv(K, GROUP)
    scales = {"tensor": 2, "rows": M + N, "blocks": M * k + k * triton.cdiv(N, GROUP)}[scheme]
    return Work(bytes=M * K + N * K + 2 * M * N + 4 * scales, flops=2 * M * N * K)


# fmt: off
REFUSES = (
    Refusal("K differs", lambda f: f(inputs(2, 8, 16)[0], *inputs(2, 8, 32)[1:]), ValueError, "b has 32 rows"),
    Refusal("b in rows", lambda f: f(inputs(8, 8, 8)[0], inputs(8, 8, 8)[0], *inputs(8, 8, 8)[2:]), ValueError, "w.t"),
    Refusal("bf16", lambda f: f(inputs(2, 8, 16)[0].bfloat16(), *inputs(2, 8, 16)[1:]), TypeError, "a is torch.bfl"),
    Refusal("scales", lambda f: f(*inputs(2, 8, 16)[:3], inputs(2, 7, 16, "rows")[3]), ValueError, "expected one of"),
)
# fmt: on

PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=_work,
    checks=(
        case("no rows", M=0, N=5, K=16, scheme="rows"),
        case("nothing to add: zeros", M=3, N=5, K=0),
        case("one of each", M=1, N=1, K=1),
        case("primes: every mask is live, no row begins at 16 bytes", M=37, N=131, K=71, scheme="rows"),
        case("rows longer than used; TMA; two steps, the second cut", M=131, N=136, K=144, scheme="rows", pad=16),
        case("wide tiles, more of them than programs", M=136, N=776, K=16),
        case("blocks cut in K and N, without TMA", M=5, N=133, K=135, scheme="blocks"),
        case("blocks, the last of M a few rows", M=136, N=264, K=400, scheme="blocks"),
        case("blocks, one row: a step's scale of A is 4 bytes", M=1, N=256, K=512, scheme="blocks"),
        case("blocks, two rows: 8 bytes", M=2, N=256, K=512, scheme="blocks"),
        case("blocks, two tiles: 260 bytes, no multiple of TMA's 16", M=65, N=256, K=512, scheme="blocks"),
        case("a row of C past element 2^31", gib=80, M=2**19 + 3, N=4104, K=16, scheme="rows"),
        case("the bytes are counted here", M=128, N=128, K=128),
    ),
    benches=tuple(
        {"M": n, "N": n, "K": n, "scheme": s}
        for s, n in (("tensor", 4096), ("tensor", 8192), ("rows", 8192), ("blocks", 8192))
    ),
    peers={"torch": _peer(False), "torch, fast accumulation": _peer(True)},
    properties=(promoted_sums_keep_their_digits,),
    refuses=REFUSES,
    dtypes=(FP8,),
    bench_dtype=FP8,
)
