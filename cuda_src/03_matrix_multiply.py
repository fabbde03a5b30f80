"""Matrix multiply in CUDA C++: naive, coalesced, shared-memory tiles, a column of C a thread
==========================================================================================
The kernels and their predictions are in 03_matrix_multiply.cu. This file wraps them as functions of tensors and checks
them against PyTorch. On a GPU nvcc builds the kernels. Elsewhere g++ builds them, and the emulator watches every
address, barrier and race. `twin_shared` is v3 in NumPy, loop for loop and name for name, for a debugger.

Run it:    python3 course.py run 03_matrix_multiply
Check it:  python3 course.py check 03_matrix_multiply
Time it:   python3 course.py bench 03_matrix_multiply
"""

from lessonkit import About, Lesson, Mutant, Prediction, case, cuda, expect

import numpy as np
import torch

from problems.matmul import PROBLEM_FP32

kernels = cuda.extension(__file__)  # 03_matrix_multiply.cu, built at the first call


def multiply_naive(a, b):
    """[M, K] @ [K, N] -> [M, N] float32, an element a thread, a warp's threads in 32 rows."""
    return _launch("multiply_naive", a, b)


def multiply_coalesced(a, b):
    """[M, K] @ [K, N] -> [M, N] float32, an element a thread, a warp's threads in 32 columns."""
    return _launch("multiply_coalesced", a, b)


def multiply_shared(a, b):
    """[M, K] @ [K, N] -> [M, N] float32, an element a thread, tiles of 32 x 32 in shared memory."""
    return _launch("multiply_shared", a, b)


def multiply_column(a, b):
    """[M, K] @ [K, N] -> [M, N] float32, eight rows of a column a thread."""
    return _launch("multiply_column", a, b)


def _launch(name, a, b):
    expect(a=a, ndim=2, dtypes=[torch.float32], contiguous=True)
    expect(b=b, ndim=2, dtypes=[torch.float32], contiguous=True)
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"b has {b.shape[0]} rows, expected as many as a has columns: {a.shape[1]}")
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(m, n)
    getattr(kernels, name)(a, b, c, m, n, k)
    return c


TILE = 32


def twin_shared(a, b):
    """shared_kernel on the CPU: [M, K] @ [K, N] -> [M, N] float32.

    The two outer loops are the blocks. What the block's 32 x 32 threads do between two barriers is one line each, since
    y and x are arrays of all of them.
    """
    (m, k), n = a.shape, b.shape[1]
    device, a, b, c = a.device, a.cpu().numpy(), b.cpu().numpy(), np.full((m, n), np.nan, np.float32)
    y, x = np.mgrid[:TILE, :TILE]
    for row0 in range(0, m, TILE):
        for column0 in range(0, n, TILE):
            row, column = row0 + y, column0 + x
            total = np.zeros((TILE, TILE), np.float32)
            for k0 in range(0, k, TILE):
                a_tile = _masked(a, row, k0 + x)
                b_tile = _masked(b, k0 + y, column)
                # __syncthreads(): the tiles are whole
                for i in range(TILE):
                    total += a_tile[y, i] * b_tile[i, x]
                # __syncthreads(): everyone has multiplied
            inside = (row < m) & (column < n)
            c[row[inside], column[inside]] = total[inside]
    return torch.from_numpy(c).to(device)


def _masked(matrix, row, column):
    """matrix[row, column], and 0 where there is no such element."""
    inside = (row < matrix.shape[0]) & (column < matrix.shape[1])
    tile = np.zeros(row.shape, np.float32)
    tile[inside] = matrix[row[inside], column[inside]]
    return tile


LARGE = {"M": 4096, "N": 4096, "K": 4096}

LESSON = Lesson(
    about=About(
        teaches="naive against shared-memory tiles; what one FMA may cost in wavefronts; a column of results a thread",
        hours=1.25,
        star=True,
        operator="fp32 matmul",
        language="CUDA C++",
        pictures=("tile_of_c",),
    ),
    problem=PROBLEM_FP32,
    extension=kernels,
    rungs=(multiply_naive, multiply_coalesced, multiply_shared, multiply_column),
    predicted=(
        Prediction(rung=multiply_naive, at=LARGE, tflop_per_s=0.5),
        Prediction(
            rung=multiply_coalesced,
            at=LARGE,
            tflop_per_s=8,
            why="The ceiling counts wavefronts alone; every load also waits for L1 or L2, and no thread has more "
            "than two of them under way.",
        ),
        Prediction(
            rung=multiply_shared,
            at=LARGE,
            tflop_per_s=13,
            why="The ceiling counts wavefronts alone; the block also waits for each tile, and at two barriers.",
        ),
        Prediction(
            rung=multiply_column,
            at=LARGE,
            times=3,
            over=multiply_shared,
            why="64 registers per thread leave room for two blocks of 512 on an SM: half as many warps to cover the "
            "waits at each tile.",
        ),
    ),
    cpu_model=twin_shared,
    checks=(
        *PROBLEM_FP32.checks,
        case("more tiles down than 65,535, the end of a grid's second dimension", gib=1, M=2**22 + 1, N=2, K=2),
        case("offsets past 2^31", gib=60, M=2**16 + 1, N=2**15, K=9),
        case("whole tiles, on which requests are counted", M=64, N=64, K=32),
    ),
    benches=({"M": 512, "N": 512, "K": 512}, *PROBLEM_FP32.benches),
    wrong=(
        Mutant("a row too many", "naive_kernel", "row >= m", "row > m", "multiply_naive", "out of bounds"),
        Mutant("A is transposed", "naive_kernel", "a[row * k + i]", "a[i * m + row]", "multiply_naive"),
        Mutant("the last product is left out", "coalesced_kernel", "i < k", "i < k - 1", "multiply_coalesced"),
        Mutant(
            "multiplied before the tiles are there",
            "shared_kernel",
            "__syncthreads();  // New: the tiles",
            "//",
            "multiply_shared",
            "race",
        ),
        Mutant(
            "overwritten while others multiply",
            "shared_kernel",
            "__syncthreads();  // New: everyone",
            "//",
            "multiply_shared",
            "race",
        ),
        Mutant(
            "A's last tile reads on behind the row",
            "shared_kernel",
            "row < m && k0 + x < k",
            "row < m",
            "multiply_shared",
            "out of bounds",
        ),
        Mutant("only the last step counts", "column_kernel", "sum[r] +=", "sum[r] =", "multiply_column"),
        Mutant(
            "rows behind the last are stored",
            "column_kernel",
            "row0 + y + r < m && ",
            "",
            "multiply_column",
            "out of bounds",
        ),
    ),
    claims={
        "naive_kernel": ("no spills", "no shared memory"),
        "coalesced_kernel": ("no spills", "no shared memory"),
        "shared_kernel": ("no spills",),
        "column_kernel": ("no spills",),
    },
    counts={
        # Loads of A and of B, as many of each.
        multiply_naive: {"sectors a load": (32 + 1) / 2, "sectors a store": 32},
        multiply_coalesced: {"sectors a load": (1 + 4) / 2, "sectors a store": 4},
        multiply_shared: {"sectors a request": 4, "wavefronts a shared access": 1},
        multiply_column: {"sectors a request": 4, "wavefronts a shared access": 1},
    },
)

if __name__ == "__main__":
    LESSON.main()
