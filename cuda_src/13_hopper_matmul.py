"""Matmul on Hopper, first half: FMA, mma.sync, TMA and wgmma, specialised warps
=============================================================================
x @ w.T in bf16 with fp32 sums. The kernels and what they predict are in 13_hopper_matmul.cu; here they are functions of
tensors, checked against PyTorch: on a GPU as nvcc built them; without one FMA and mma.sync as g++ did, with every
address, every barrier and every race watched (what only Hopper has is compiled then, and its machine code read).

Run it:    python cuda_src/13_hopper_matmul.py
Check it:  python -m lessonkit check 13_hopper_matmul
Time it:   python -m lessonkit bench 13_hopper_matmul
"""

from lessonkit import DEVICE, Lesson, Mutant, Refusal, Unsupported, Work, case, cuda, expect, needs

import torch
import torch.nn.functional as F

kernels = cuda.extension(__file__)  # 13_hopper_matmul.cu, built at the first call


def reference(x, w):
    return x @ w.T  # reads MK + NK, writes MN, multiplies MNK times


def matmul_fma(x, w):
    """[M, K], [N, K] -> [M, N] bfloat16, tiles of 32 x 32 in shared memory, no tensor cores."""
    if x.ndim == w.ndim == 2 and x.shape[0] * w.numel() > 2**37:
        raise Unsupported("this rung would take seconds: it has no tensor cores")
    return _run("matmul_fma", x, w, 1)


def matmul_mma(x, w):
    """[M, K], [N, K] -> [M, N] bfloat16 by mma.sync; x and w are copied where K is no multiple of 8."""
    return _run("matmul_mma", x, w)


@needs(90, "TMA and wgmma", only=True)
def matmul_wgmma(x, w):
    """As matmul_mma, by TMA and wgmma, a block loading and multiplying in turn."""
    return _run("matmul_wgmma", x, w)


@needs(90, "TMA and wgmma", only=True)
def matmul_specialized(x, w):
    """As matmul_wgmma, with a producer warp and two consumer warpgroups around a ring of 4 stages."""
    return _run("matmul_specialized", x, w)


def _run(name, x, w, multiple=8):
    _expect(x, w)
    k = x.shape[1]
    x, w = (_aligned(t, multiple) for t in (x, w))
    c = x.new_empty(x.shape[0], w.shape[0])
    getattr(kernels, name)(x, w, c, *c.shape, k + -k % multiple)
    return c


def _expect(x, w):
    """The checks of every rung."""
    expect(x=x, w=w, ndim=2, dtypes=[torch.bfloat16], contiguous=True)
    if x.shape[1] != w.shape[1]:
        raise ValueError(
            f"w has {w.shape[1]} columns, expected as many as x has: {x.shape[1]}; it is [N, K], not [K, N]"
        )


def _aligned(t, multiple):
    """The matrix, or a copy whose rows begin at multiples of 16 bytes: 16-byte copies and TMA know no others."""
    if t.shape[1] % multiple:
        return F.pad(t, (0, -t.shape[1] % multiple))  # zeros add nothing to a product
    return t.clone() if t.data_ptr() % (2 * multiple) else t


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


LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    extension=kernels,
    rungs=(matmul_fma, matmul_mma, matmul_wgmma, matmul_specialized),
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
    work=lambda M, N, K, dtype, start=0: Work(bytes=(M * K + N * K + M * N) * dtype.itemsize, flops=2 * M * N * K),
    wrong=(
        Mutant(
            "multiplied before the tiles are whole",
            "matmul_fma_kernel",
            "__syncthreads();  // the tiles",
            "//",
            "matmul_fma",
            "race",
        ),
        Mutant(
            "overwritten while others multiply",
            "matmul_fma_kernel",
            "__syncthreads();  // and read",
            "//",
            "matmul_fma",
            "race",
        ),
        Mutant(
            "A's rows past the end", "matmul_fma_kernel", "row0 + i < m &&", "true &&", "matmul_fma", "out of bounds"
        ),
        Mutant(
            "the last column is nobody's",
            "matmul_fma_kernel",
            "col0 + x < n)",
            "col0 + x < n - 1)",
            "matmul_fma",
            "nan",
        ),
        Mutant("only the last tile counts", "matmul_fma_kernel", "sum[i] +=", "sum[i] =", "matmul_fma"),
        Mutant(
            "read before the copy has come",
            "matmul_mma_kernel",
            "__pipeline_wait_prior(1)",
            "__pipeline_wait_prior(2)",
            "matmul_mma",
            "uninitialised",
        ),
        Mutant(
            "the next copy into tiles in use",
            "matmul_mma_kernel",
            "__syncthreads();  // before",
            "//",
            "matmul_mma",
            "race",
        ),
        Mutant("K's tail from the next row", "copy_tile", "&& k0 + piece * 8 < k", "", "matmul_mma", "out of bounds"),
        Mutant("an odd row's pairs", "store_pair", "n % 2 == 0", "true", "matmul_mma", "out of bounds"),
    ),
    properties=(a_permutation_moves_columns,),
    peers={"torch": reference},  # cuBLAS
    claims={
        "matmul_fma_kernel": ("no spills",),
        "matmul_mma_kernel": ("mma", "cp.async", "no spills"),
        "matmul_wgmma_kernel": ("wgmma", "tma", "no spills"),
        "matmul_specialized_kernel": ("wgmma", "tma", "no spills"),
    },
    counts={matmul_fma: {"wavefronts a shared access": 1.0}, matmul_mma: {"wavefronts a shared load": 1.0}},
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

if __name__ == "__main__":
    LESSON.main()
