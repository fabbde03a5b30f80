"""Matmul: C = A B, A [M, K], B [K, N] -> C [M, N] in their dtype, accumulated in fp32. Any strides.

fp32 is exact (IEEE) unless torch.set_float32_matmul_precision allows TF32. PROBLEM_FP32 is the same question for
programs that take contiguous fp32 matrices and nothing else, PROBLEM_BF16 for those that take contiguous bf16 ones.
"""

import math

from lessonkit import DEVICE, Problem, Refusal, Work, case, expect

import torch
import torch.nn.functional as F

from problems.quack_search import fastest_of_six

SQUARE = (1024, 2048, 4096, 8192, 16384)
LAYERS = ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192))  # N, K of models with 4096 and 8192 features
LLM = tuple((m, n, k) for m in (1, 16, 128, 4096) for n, k in LAYERS)  # M: tokens


def reference(a, b):
    return torch.matmul(a, b)  # reads MK + KN, writes MN, multiplies MNK times


def empty_product(a, b):
    """Check the operands of a matmul; return C, not yet written."""
    expect(a=a, b=b, ndim=2, same_dtype=True)
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a has {a.shape[1]} columns and b {b.shape[0]} rows, expected as many: is one transposed?")
    return a.new_empty(a.shape[0], b.shape[1])


def precision():
    """How tl.dot multiplies fp32: exactly, or in TF32 (10 bits, on tensor cores) if PyTorch's users allow it."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def inputs(M, N, K, dtype=torch.float32, transposed="", pad=0):
    # Random: a swapped row, or a lost or doubled step of K, moves sums by as much as they are, about 1 for every K.
    # What `transposed` names, a, b or both ("ab"), is the .t() of a tensor with rows. There are `pad` elements between
    # a row and the next.
    def matrix(name, rows, cols):
        if name in transposed:
            return torch.randn(cols, rows + pad, device=DEVICE).to(dtype)[:, :rows].t()
        return torch.randn(rows, cols + pad, device=DEVICE).to(dtype)[:, :cols]

    return matrix("a", M, K), matrix("b", K, N).mul_(max(K, 1) ** -0.5)


def work(M, N, K, dtype, **_):
    return Work(bytes=(M * K + K * N + M * N) * dtype.itemsize, flops=2 * M * N * K)


def strange_numbers(rung):
    """inf and NaN spoil their own row and column of C; what lies past M, N and K spoils nothing."""
    a, b = inputs(16, 24, 40)
    a[1, 39], b[1, 4] = math.inf, math.nan
    torch.testing.assert_close(rung(a, b), reference(a, b), equal_nan=True)


def products_of_a_permutation(rung):
    """a times a permutation has a's columns in another order, to the bit: one in a wrong place shows as itself."""
    a, _ = inputs(136, 8, 264, dtype=torch.bfloat16)
    order = torch.randperm(264, device=DEVICE)
    assert torch.equal(rung(a, torch.eye(264, device=DEVICE, dtype=a.dtype)[order].t().contiguous()), a[:, order])


def _quack(a, b):
    from quack.gemm_interface import gemm

    return gemm(a, b, tuned=False)  # as it comes; its own search compiles for minutes


# The searched quack is a peer where matmuls of Hopper's size are the subject: there are too many shapes for all.
SEARCHED = {"quack, fastest of six": fastest_of_six}
PEERS = {"torch": torch.matmul, "quack": _quack}  # torch is cuBLAS; so is torch.compile, unless it searches for minutes
CHECKS = (
    case("no rows: an empty grid is an error in CUDA", M=0, N=3, K=4),
    case("nothing to add up: zeros", M=3, N=5, K=0),
    case("one of each", M=1, N=1, K=1),
    case("primes: every mask is live", M=13, N=37, K=71),
    case("one past a tile each way, rows apart", M=129, N=131, K=65, pad=3),
    case("a transposed", M=40, N=72, K=80, transposed="a"),
    case("b transposed", M=72, N=40, K=80, transposed="b"),
    case("both transposed, odd", M=33, N=35, K=37, transposed="ab", pad=1),
)
TMA_CHECKS = (  # rows of whole 16 bytes, as kernels need them that load by TMA
    case("one row, 8 columns: the rest of the tile is not there", M=1, N=8, K=8),
    case("nothing divides anything but 8", M=67, N=40, K=72),
    case("one past a tile down, 8 past one across and in K", M=129, N=264, K=136),
    case("a ring of four stages goes round four times", M=40, N=72, K=1000),
    case("rows apart: what lies between them is no zero", M=40, N=72, K=80, pad=8),
    case("a by columns", M=136, N=72, K=80, transposed="a"),
    case("b by columns", M=72, N=136, K=80, transposed="b"),
    case("both by columns", M=136, N=136, K=200, transposed="ab", pad=8),
)
REFUSES = (
    Refusal("lengths differ", lambda f: f(inputs(4, 4, 4)[0], inputs(4, 4, 5)[1]), ValueError, "a has 4 columns"),
    Refusal("a batch", lambda f: f(*(t[None] for t in inputs(8, 8, 8))), ValueError, "3 dimension"),
    Refusal("two dtypes", lambda f: f(inputs(4, 4, 4)[0], inputs(4, 4, 4)[1].half()), TypeError, "b is torch.fl"),
    Refusal("gradient lost", lambda f: f(*(t.requires_grad_() for t in inputs(4, 4, 4))), ValueError, "requires"),
)
PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=work,
    checks=CHECKS,
    benches=tuple({"M": n, "N": n, "K": n} for n in SQUARE),
    peers=PEERS,
    properties=(strange_numbers, products_of_a_permutation),
    refuses=REFUSES,
)


def rows_of_fp32(M, N, K, start=0, dtype=torch.float32):
    # Means other than 0, and not the same: products that are left out or counted twice then move every sum.
    # `start`: so many floats into an allocation, where no 16 bytes may be loaded at once.
    a, b = torch.randn(start + M * K, device=DEVICE) + 1, torch.randn(start + K * N, device=DEVICE) - 0.5
    return a[start:].view(M, K), b[start:].view(K, N)


def rows_past_the_end_stay_out(rung):
    """NaN and inf in one row of A and one column of B reach that row and column of C and nothing else."""
    a, b = rows_of_fp32(132, 136, 12)
    a[130, 3], b[5, 134] = float("nan"), float("inf")
    finite = torch.isfinite(rung(a, b))
    assert not finite[130].any(), "NaN in A vanished"
    assert not finite[:, 134].any(), "inf in B vanished"
    finite[130], finite[:, 134] = True, True
    assert finite.all(), "NaN or inf went where it does not belong"


PROBLEM_FP32 = Problem(
    reference=reference,
    inputs=rows_of_fp32,
    work=lambda M, N, K, dtype, start=0: Work(bytes=(M * K + K * N + M * N) * dtype.itemsize, flops=2 * M * N * K),
    checks=(
        case("no rows: an empty grid is an error in CUDA", M=0, N=5, K=3),
        case("no columns", M=5, N=0, K=3),
        case("nothing to add: zeros, and they must be written", M=33, N=2, K=0),
        case("one product", M=1, N=1, K=1),
        case("a row times a matrix", M=1, N=67, K=33),
        case("an outer product: one step in a tile of 32", M=35, N=34, K=1),
        case("nothing is a multiple of anything, M, N and K differ", M=67, N=37, K=41),
        case("multiples of 4 where no 16 bytes may be loaded at once", M=20, N=24, K=12, start=1),
        case("one past a tile each way", M=65, N=65, K=33),
        case("one past a tile of 128 each way, rows of odd length", M=129, N=129, K=17),
    ),
    benches=tuple({"M": n, "N": n, "K": n} for n in (1024, 2048, 4096)),
    peers={"torch": torch.mm},  # cuBLAS; without TF32 unless torch.backends.cuda.matmul.allow_tf32 is set
    properties=(rows_past_the_end_stay_out,),
    refuses=(
        Refusal(
            "inner sizes differ",
            lambda f: f(rows_of_fp32(2, 3, 4)[0], rows_of_fp32(2, 3, 5)[1]),
            ValueError,
            "b has 5 rows",
        ),
        Refusal("not float32", lambda f: f(*(t.half() for t in rows_of_fp32(2, 3, 4))), TypeError, "a is torch.float"),
        Refusal("a vector", lambda f: f(rows_of_fp32(1, 3, 4)[0][0], rows_of_fp32(1, 3, 4)[1]), ValueError, "a has"),
        Refusal(
            "transposed view",
            lambda f: f(rows_of_fp32(4, 3, 4)[0].T, rows_of_fp32(4, 3, 4)[1]),
            ValueError,
            "contiguous",
        ),
    ),
    dtypes=(torch.float32,),
    bench_dtype=torch.float32,
)


def multiply_padded(kernels, name, a, b, inner, columns):
    """a [M, K] @ b [K, N], contiguous bfloat16, by a launcher that takes K in multiples of `inner`, N of `columns`.

    The zeros that fill up add nothing to a product. Both begin at 16 bytes afterwards, as TMA and cp.async want it.
    """
    expect(a=a, b=b, ndim=2, dtypes=[torch.bfloat16], contiguous=True)
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a has {a.shape[1]} columns and b {b.shape[0]} rows, expected as many: is one transposed?")
    (m, k), n = a.shape, b.shape[1]
    if 0 in (m, n, k):
        return a.new_zeros(m, n)
    more_n, more_k = -n % columns, -k % inner
    a, b = _padded(a, 0, more_k), _padded(b, more_k, more_n)
    c = a.new_empty(m, n + more_n)
    getattr(kernels, name)(a, b, c, m, n + more_n, k + more_k)
    return c[:, :n].contiguous()  # itself if nothing was padded


def _padded(t, rows, columns):
    if rows or columns:
        return F.pad(t, (0, columns, 0, rows))
    return t.clone() if t.data_ptr() % 16 else t


def a_permutation_moves_rows(rung):
    """A permutation times b has b's rows in another order, to the bit: one in a wrong place shows as itself."""
    _, b = inputs(1, 136, 300, dtype=torch.bfloat16)
    order = torch.randperm(300, device=b.device)
    assert torch.equal(rung(torch.eye(300, device=b.device, dtype=b.dtype)[order], b), b[order])


def a_view_that_begins_anywhere(rung):
    """A matrix that begins two bytes into an allocation, where the copy engine may not read."""
    a, b = inputs(70, 64, 128, dtype=torch.bfloat16)
    shifted = a.new_empty(a.numel() + 1)[1:].view(a.shape).copy_(a)
    assert torch.equal(rung(shifted, b), rung(a, b))


def _bf16(rows, columns):
    return inputs(rows, columns, columns, dtype=torch.bfloat16)[0]


PROBLEM_BF16 = Problem(
    reference=reference,
    inputs=inputs,
    work=work,
    checks=(
        case("no rows: an empty grid is an error in CUDA", M=0, N=5, K=8),
        case("no columns", M=5, N=0, K=8),
        case("nothing to add: zeros, and they must be written", M=33, N=10, K=0),
        case("one product; all else is padding", M=1, N=1, K=1),
        case("K so long that the parities turn often", gib=1, M=257, N=513, K=8200),
        case("offsets past 2^31", gib=60, M=2**16 + 1, N=2**15 + 64, K=64),
    ),
    benches=PROBLEM.benches,
    peers=PEERS,
    properties=(a_permutation_moves_rows, a_view_that_begins_anywhere),
    refuses=(
        Refusal("K differs", lambda f: f(_bf16(8, 8), _bf16(16, 8)), ValueError, "b 16 rows"),
        Refusal("not bfloat16", lambda f: f(_bf16(8, 8).half(), _bf16(8, 8)), TypeError, "a is torch.float16"),
        Refusal("a batch", lambda f: f(_bf16(8, 8)[None], _bf16(8, 8)), ValueError, "3 dimension"),
        Refusal("transposed", lambda f: f(_bf16(8, 16).T, _bf16(8, 8)), ValueError, "contiguous"),
    ),
    dtypes=(torch.bfloat16,),
)


def reference_backward(dc, a, b):
    return dc @ b.t(), a.t() @ dc


def inputs_backward(M, N, K, dtype=torch.float32, transposed="", pad=0):
    a, b = inputs(M, N, K, dtype, transposed, pad)
    return torch.randn(M, N, device=DEVICE).to(dtype), a, b


def _quack_backward(dc, a, b):
    return _quack(dc, b.t()), _quack(a.t(), dc)


# Two matmuls of transposed views. Asked of course_ops alone; its tests hold the small cases.
PROBLEM_BACKWARD = Problem(
    reference=reference_backward,
    inputs=inputs_backward,
    work=lambda M, N, K, dtype, **_: Work(bytes=2 * (M * K + K * N + M * N) * dtype.itemsize, flops=4 * M * N * K),
    peers={"torch": reference_backward, "quack": _quack_backward},
)
