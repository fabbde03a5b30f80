"""Tiles: a small library of our own, and a matmul written in it
=============================================================
Lesson 1's kernel says `tl.dot(a, b, acc)` of whole tiles, cuda_src/13 spells out every lane. In between lies the idea
on which ThunderKittens and CuTe are built: C++ types for tiles, whose layout is the type's business. tiles.cuh is such
a library in 170 lines, made from four instructions; lesson08_tiles.cu is a matmul in it, 12 lines long, next to the
same loop by hand. Predicted: as many copies, ldmatrix, products and stores, so the same time. On an H200 it is the same
to 2048; at 4096, 8192 and 16384 the library takes 5, 7 and 8% more. The library is read, not run.

Read tiles.cuh first. Ask of each function: who calls it (a lane, a warp, the block)? which line would have to change
for another layout? what can it not know? Then v1 and v2 side by side, then what v3 and v4 change.

You will learn: register tiles, shared tiles, fragments; that an abstraction whose sizes are known costs no
instruction, and what it may cost all the same; what stays outside of it, the waiting.
Run it:    python day3_matmul_tk/lesson08_tiles.py
Check it:  python -m lessonkit check lesson08_tiles
Compare:   python -m lessonkit compile lesson08_tiles     tiles_kernel and by_hand_kernel, line by line
"""

from lessonkit import Lesson, Mutant, Refusal, Unsupported, case, compiled, cuda, expect
from lessonkit.cuda import toolchain

import torch
import torch.nn.functional as F

from day3_matmul_tk.lesson01_matmul import PEERS, SQUARE, inputs, reference, work

kernels = cuda.extension(__file__)  # lesson08_tiles.cu, built at the first call
PIECE = 8  # elements: 16 bytes


def matmul_tiles(a, b):
    """[M, K], [K, N] -> [M, N] bfloat16, both contiguous: a plain loop over tiles."""
    return multiply_padded(kernels, "matmul_tiles", a, b, PIECE, PIECE)


def matmul_by_hand(a, b):
    """As matmul_tiles, without the library."""
    return multiply_padded(kernels, "matmul_by_hand", a, b, PIECE, PIECE)


def matmul_pipelined(a, b):
    """As matmul_tiles, with a ring of three stages."""
    return multiply_padded(kernels, "matmul_pipelined", a, b, PIECE, PIECE)


def matmul_wide(a, b):
    """As matmul_pipelined, 128 x 256 a block and 64 x 64 a warp, stored in pieces of 16 bytes."""
    return multiply_padded(kernels, "matmul_wide", a, b, PIECE, PIECE)


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
    _, b = inputs(1, 40, 72, dtype=torch.bfloat16)
    order = torch.randperm(72, device=b.device)
    assert torch.equal(rung(torch.eye(72, device=b.device, dtype=b.dtype)[order], b), b[order])


def the_library_costs_nothing(rung):
    """nvcc makes of v1 and of v2 equally many copies, ldmatrix, mma, barriers and stores, and registers within 4."""
    if why := toolchain.lacks("nvcc"):
        raise Unsupported(why)
    rows = [k for k in compiled.kernels(__name__) if k.rung in ("tiles_kernel", "by_hand_kernel")]
    for target in {row.target for row in rows}:
        one, two = (row for row in rows if row.target == target)
        for what in ("mma", "cp_async", "barriers", "spills", "shared", "load_bytes", "store_bytes"):
            assert getattr(one, what) == getattr(two, what), f"{what} on sm_{target}: {one} {two}"
        assert one.mma == 64, "4 x 4 products of 16 x 8 x 16 in each of 4 steps"
        assert abs(one.registers - two.registers) <= 4, f"{one.registers} and {two.registers} registers"


LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    extension=kernels,
    rungs=(matmul_tiles, matmul_by_hand, matmul_pipelined, matmul_wide),
    checks=(
        case("no rows: an empty grid is an error in CUDA", M=0, N=5, K=8),
        case("nothing to add: zeros", M=33, N=10, K=0),
        case("one product; seven columns of padding", M=1, N=1, K=1),
        case("nothing is a multiple of anything, K one past a step of 64", M=37, N=41, K=65),
        case("one past a tile down; K one piece short of a step", M=129, N=24, K=56),
        case("one piece past a tile across; as many steps as stages and one", M=20, N=136, K=200),
        case("whole tiles, on which accesses are counted", M=128, N=128, K=64),
        case("10 tiles down: a group of 8 and one of 2; two across", gib=1, M=1200, N=300, K=328),
        case("K so long that the ring turns often", gib=1, M=257, N=513, K=8200),
        case("offsets past 2^31", gib=60, M=2**16 + 1, N=2**15 + 64, K=64),
    ),
    benches=tuple({"M": n, "N": n, "K": n} for n in SQUARE),
    work=work,
    wrong=(
        Mutant("eight rows of B twice, eight never", "right", "lane % 16", "lane % 8", "matmul_wide"),
        Mutant(
            "read before all copies are there", "tiles_kernel", "__syncthreads();  // all", "//", "matmul_tiles", "race"
        ),
        Mutant(
            "the copy is not waited for",
            "pipelined_kernel",
            "tiles::wait<STAGES - 2>()",
            "tiles::wait<STAGES - 1>()",
            "matmul_pipelined",
            "uninitialised",
        ),
        Mutant("rows past the end", "Matrix", "row < rows && ", "", "matmul_tiles", "out of bounds"),
        Mutant(
            "C is laid down while others read the ring",
            "pipelined_kernel",
            "__syncthreads();  // nobody",
            "//",
            "matmul_wide",
            "race",
        ),
        Mutant(
            "left and right eight columns of A change places", "left", "lane / 16", "1 - lane / 16", "matmul_pipelined"
        ),
    ),
    properties=(a_permutation_moves_rows, the_library_costs_nothing),
    peers=PEERS,
    claims={
        "tiles_kernel": ("mma", "cp.async", "no spills"),
        "by_hand_kernel": ("mma", "cp.async", "no spills"),
        "pipelined_kernel": ("mma", "cp.async", "no spills"),
    },
    counts={rung: {"wavefronts a shared load": 1} for rung in (matmul_tiles, matmul_by_hand, matmul_pipelined)},
    refuses=(
        Refusal("K differs", lambda f: f(_bf16(8, 8), _bf16(16, 8)), ValueError, "b 16 rows"),
        Refusal("not bfloat16", lambda f: f(_bf16(8, 8).half(), _bf16(8, 8)), TypeError, "a is torch.float16"),
        Refusal("a batch", lambda f: f(_bf16(8, 8)[None], _bf16(8, 8)), ValueError, "3 dimension"),
        Refusal("transposed", lambda f: f(_bf16(8, 16).T, _bf16(8, 8)), ValueError, "contiguous"),
    ),
    dtypes=(torch.bfloat16,),
)


def _bf16(rows, columns):
    return inputs(rows, columns, columns, dtype=torch.bfloat16)[0]


if __name__ == "__main__":
    LESSON.main()
