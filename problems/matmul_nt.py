"""Matmul with both operands by rows of K: x [M, K], w [N, K] -> x w^T [M, N] in bf16, accumulated in fp32.

w lies as nn.Linear keeps its weight; BLAS calls the case NT (not transposed, transposed).
"""

from lessonkit import DEVICE, Problem, Refusal, Work, case

import torch

from problems.quack_search import fastest_of_six


def reference(x, w):
    return x @ w.T  # reads MK + NK, writes MN, multiplies MNK times


def inputs(M, N, K, start=0, dtype=torch.bfloat16):
    # Means other than 0, and not the same: products that are left out or counted twice then move every sum. `start`: so
    # many elements into an allocation.
    x, w = torch.randn(start + M * K, device=DEVICE) + 0.5, torch.randn(start + N * K, device=DEVICE) - 0.25
    return x.to(dtype)[start:].view(M, K), w.to(dtype)[start:].view(N, K)


def a_permutation_moves_columns(rung):
    """x times a permutation has x's columns in another order, to the bit: one in a wrong place shows as itself."""
    x, _ = inputs(40, 48, 48)
    order = torch.randperm(48, device=DEVICE)
    assert torch.equal(rung(x, torch.eye(48, device=DEVICE, dtype=x.dtype)[order]), x[:, order])


def _quack(x, w):
    from quack.gemm_interface import gemm

    return gemm(x, w.T, tuned=False)  # as it comes; its own search compiles for minutes


def _quack_searched(x, w):
    return fastest_of_six(x, w.T)


PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=lambda M, N, K, dtype, start=0: Work(bytes=(M * K + N * K + M * N) * dtype.itemsize, flops=2 * M * N * K),
    checks=(
        case("no rows: an empty grid is an error in CUDA", M=0, N=5, K=8),
        case("no columns", M=5, N=0, K=8),
        case("nothing to add: zeros, and they must be written", M=33, N=10, K=0),
        case("one product, and seven columns that are not there", M=1, N=1, K=1),
        case("a row times a matrix", M=1, N=67, K=40),
        case("nothing is a multiple of anything: N odd, K padded", M=67, N=37, K=41),
        case("one past a tile of 128 and a step of 64", M=129, N=17, K=72),
        case("a step of 64 and no more, one short of a tile", M=31, N=127, K=64),
        case("three steps: the ring of two is used again", M=20, N=24, K=136),
        case("x and w begin where 16 bytes may not be loaded", M=9, N=16, K=24, start=1),
        case("whole tiles, on which accesses are counted", M=128, N=128, K=64),
        case("more steps than stages, more tiles than one, tails everywhere", gib=1, M=391, N=777, K=1111),
        case("K so long that the parities turn often", gib=1, M=257, N=513, K=8200),
        case("offsets past 2^31", gib=60, M=2**16 + 1, N=2**15 + 8, K=72),
    ),
    benches=tuple({"M": n, "N": n, "K": n} for n in (4096, 8192)),
    peers={"torch": reference, "quack": _quack, "quack, fastest of six": _quack_searched},  # torch is cuBLAS
    properties=(a_permutation_moves_columns,),
    refuses=(
        Refusal("K differs", lambda f: f(inputs(8, 8, 8)[0], inputs(8, 8, 16)[1]), ValueError, "w has 16 columns"),
        Refusal("not bfloat16", lambda f: f(*(t.half() for t in inputs(8, 8, 8))), TypeError, "x is torch.float16"),
        Refusal("a batch", lambda f: f(*(t[None] for t in inputs(8, 8, 8))), ValueError, "3 dimension"),
        Refusal("transposed", lambda f: f(*(t.T for t in inputs(8, 8, 16))), ValueError, "contiguous"),
        Refusal(
            "gradient lost", lambda f: f(inputs(8, 8, 8)[0].requires_grad_(), inputs(8, 8, 8)[1]), ValueError, "grad"
        ),
    ),
    dtypes=(torch.bfloat16,),
)
