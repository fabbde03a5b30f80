"""Softmax in CUDA C++: three reads of a row, then two
===================================================
The kernels and what they predict are in 09_softmax.cu; here they are functions of tensors, checked against PyTorch.
09b_softmax_lengths goes on from here and reads a row once.

Run it:    python cuda_src/09_softmax.py
Check it:  python -m lessonkit check 09_softmax
Time it:   python -m lessonkit bench 09_softmax
"""

import math
from importlib import import_module

from lessonkit import DEVICE, Lesson, Mutant, Refusal, Work, by_inductor, case, cuda, expect

import torch

kernels = cuda.extension(__file__)  # 09_softmax.cu, built at the first call
DTYPES = (torch.float32, torch.bfloat16)


def reference(x):
    return torch.softmax(x, dim=-1)  # reads MN, writes MN


def softmax_naive(x):
    """[M, N] -> [M, N] float32 or bfloat16, one thread a row, three reads."""
    return _launch(kernels, "softmax_naive", x)


def softmax_block(x):
    """[M, N] -> [M, N] float32 or bfloat16, one block a row, three reads."""
    return _launch(kernels, "softmax_block", x)


def softmax_online(x):
    """[M, N] -> [M, N] float32 or bfloat16, one block a row, two reads (Milakov and Gimelshein 2018, algorithm 3)."""
    return _launch(kernels, "softmax_online", x)


def _launch(module, name, x):
    expect(x=x, ndim=2, dtypes=DTYPES, contiguous=True)
    y = torch.empty_like(x)
    getattr(module, f"{name}_{str(x.dtype).removeprefix('torch.')}")(x, y, *x.shape)
    return y


def inputs(M, N, strange=False, dtype=torch.float32):
    # Centred at -5: a lane past the end that counts as 0 would win. Rows that lie at 1000 overflow without the maximum.
    # strange: a first half of -inf, so that parts of a row have no maximum.
    x = torch.randn(M, N, device=DEVICE) * 3 - 5
    x[1::3] += 1000
    if strange:
        x[2::3, : N // 2] = -math.inf
    return (x.to(dtype),)


def sums_and_shifts(rung):
    """Rows sum to one, and softmax(x + 64) = softmax(x); x is rounded so that adding 64 is exact."""
    for N in (67, 500):
        x = (torch.randn(3, N, device=DEVICE) * 64).round() / 16
        torch.testing.assert_close(rung(x).sum(-1), torch.ones(3, device=DEVICE), rtol=1e-5, atol=0)
        torch.testing.assert_close(rung(x + 64), rung(x), rtol=1e-6, atol=0)


def strange_numbers(rung):
    """One NaN or +inf makes its row NaN, a row of -inf is 0 / 0 = NaN; the rows beside them do not notice."""
    for N in (40, 500):
        x = inputs(6, N, strange=True)[0]
        x[0, 7], x[2, N - 1], x[3], x[4, :-1] = math.nan, math.inf, -math.inf, -math.inf
        torch.testing.assert_close(rung(x), reference(x), rtol=2e-5, atol=1e-8, equal_nan=True)


SHAPES = ((2048, 131072), (4096, 32768), (4096, 12672), (8192, 8192), (4096, 4096), (32768, 1024), (32768, 256))
PEERS = {
    "torch": reference,
    "torch.compile": by_inductor(reference),
    "liger": lambda x: import_module("liger_kernel.ops.softmax")._softmax_forward(x)[0],  # rows to 65,536
    "quack": lambda x: import_module("quack.softmax").softmax_fwd(x),
}
REFUSES = (
    Refusal("a transposed matrix", lambda f: f(inputs(8, 7)[0].t()), ValueError, "contiguous"),
    Refusal("half precision", lambda f: f(inputs(2, 8)[0].half()), TypeError, "x is torch.float16"),
    Refusal("gradient lost", lambda f: f(inputs(2, 8)[0].requires_grad_()), ValueError, "requires grad"),
)


def _work(M, N, dtype, strange=False):
    return Work(bytes=2 * M * N * dtype.itemsize, flops=5 * M * N)


# fmt: off
LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    extension=kernels,
    rungs=(softmax_naive, softmax_block, softmax_online),
    checks=(
        case("no rows: an empty grid is an error in CUDA", M=0, N=5),
        case("no columns: torch answers with an empty tensor", M=5, N=0),
        case("a row of one is 1; most threads have nothing", M=17, N=1),
        case("a prime width", M=7, N=127),
        case("one past a block, and half a row of -inf: threads whose maximum is -inf", M=3, N=257, strange=True),
        case("several turns of each thread, the last one ragged", M=3, N=781),
        case("row offsets past 2^31", gib=120, M=65537, N=32769),
        case("whole warps, on which bytes and requests are counted", M=64, N=256),
    ),
    benches=tuple({"M": m, "N": n} for m, n in SHAPES),
    work=_work,
    wrong=(
        Mutant("no maximum subtracted", "softmax_naive_kernel", "m = fmaxf(m, widen(x[j]))", "m = 0",
               "softmax_naive", "nan"),
        Mutant("a row too many", "softmax_naive_kernel", "row >= M", "row > M", "softmax_naive", "out of bounds"),
        Mutant("halves added without waiting", "block_reduce", "        __syncthreads();\n        if", "        if",
               "softmax_block", "race"),
        Mutant("the next reduction begins too early", "block_reduce", "    __syncthreads();  // the next",
               "    // the next", "softmax_block", "race"),
        Mutant("sum not rescaled", "softmax_online_kernel", "pair.s * exp_(pair.m - m)", "pair.s", "softmax_online"),
        Mutant("starts at -inf", "softmax_online_kernel", "{LOWEST, 0}", "{-INFINITY, 0}", "softmax_online", "nan"),
        Mutant("pairs read before they are there", "softmax_online_kernel", "    __syncthreads();\n", "",
               "softmax_online", "race"),
    ),
    peers=PEERS,
    claims={"softmax_block_kernel": ("no spills",), "softmax_online_kernel": ("no spills",)},
    passes={softmax_naive: 2, softmax_block: 2, softmax_online: 1.5},
    counts={
        softmax_naive: {"sectors a request": 32},
        softmax_block: {"sectors a request": 4, "wavefronts a shared access": 1},
        softmax_online: {"sectors a request": 4},
    },
    properties=(sums_and_shifts, strange_numbers),
    refuses=REFUSES,
    dtypes=DTYPES,
)
# fmt: on

if __name__ == "__main__":
    LESSON.main()
