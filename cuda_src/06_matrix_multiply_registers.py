"""Matrix multiply in CUDA C++: register tiles, 16-byte loads, warp tiles, cp.async, to the speed of cuBLAS
=======================================================================================================
The kernels and their predictions are in 06_matrix_multiply_registers.cu. This file wraps them as functions of tensors
and checks them against PyTorch. On a GPU nvcc builds the kernels. Elsewhere g++ builds them, and the emulator watches
every address, barrier and race.

Run it:    python3 course.py run 06_matrix_multiply_registers
Check it:  python3 course.py check 06_matrix_multiply_registers
Time it:   python3 course.py bench 06_matrix_multiply_registers
"""

from lessonkit import About, Lesson, Mutant, Prediction, Unsupported, case, cuda, expect

import torch

from problems.matmul import PROBLEM_FP32

kernels = cuda.extension(__file__)  # 06_matrix_multiply_registers.cu, built at the first call


def multiply_square(a, b):
    """[M, K] @ [K, N] -> [M, N] float32, 8 x 8 elements per thread."""
    return _launch("multiply_square", a, b)


def multiply_vectorized(a, b):
    """[M, K] @ [K, N] -> [M, N] float32, 16 bytes per load; N and K are multiples of 4."""
    return _launch("multiply_vectorized", a, b, quads=True)


def multiply_warp_tiles(a, b):
    """[M, K] @ [K, N] -> [M, N] float32, a compact 32 x 64 per warp; N and K are multiples of 4."""
    return _launch("multiply_warp_tiles", a, b, quads=True)


def multiply_pipelined(a, b):
    """[M, K] @ [K, N] -> [M, N] float32, the next tile on its way by cp.async."""
    return _launch("multiply_pipelined", a, b)


def multiply_wide(a, b):
    """[M, K] @ [K, N] -> [M, N] float32, 16 x 8 elements per thread."""
    return _launch("multiply_wide", a, b)


def multiply_one_block(a, b):
    """[M, K] @ [K, N] -> [M, N] float32, 128 x 256 per block, one block an SM."""
    return _launch("multiply_one_block", a, b)


def _launch(name, a, b, quads=False):
    expect(a=a, ndim=2, dtypes=[torch.float32], contiguous=True)
    expect(b=b, ndim=2, dtypes=[torch.float32], contiguous=True)
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"b has {b.shape[0]} rows, expected as many as a has columns: {a.shape[1]}")
    (m, k), n = a.shape, b.shape[1]
    if quads and (n % 4 or k % 4 or a.data_ptr() % 16 or b.data_ptr() % 16):
        raise Unsupported("16 bytes a load: N and K must be multiples of 4, a and b begin at such of 16 bytes")
    c = a.new_empty(m, n)
    getattr(kernels, name)(a, b, c, m, n, k)
    return c


LARGE = {"M": 8192, "N": 8192, "K": 8192}

LESSON = Lesson(
    about=About(
        teaches="register tiles, vector loads, warp tiles, cp.async and double buffering, to the speed of cuBLAS",
        hours=1.5,
        operator="fp32 matmul",
        language="CUDA C++",
        pictures=("register_tile",),
    ),
    problem=PROBLEM_FP32,
    extension=kernels,
    rungs=(
        multiply_square,
        multiply_vectorized,
        multiply_warp_tiles,
        multiply_pipelined,
        multiply_wide,
        multiply_one_block,
    ),
    predicted=(
        Prediction(rung=multiply_square, at=LARGE, tflop_per_s=22),
        Prediction(
            rung=multiply_vectorized,
            at=LARGE,
            tflop_per_s=45,
            why="The ceiling has no waits: here every tile waits for memory and at two barriers.",
        ),
        Prediction(
            rung=multiply_warp_tiles,
            at=LARGE,
            tflop_per_s=58,
            why="As above: the waits are what is left, and the next rung takes them away.",
        ),
        Prediction(rung=multiply_pipelined, at=LARGE, tflop_per_s=58),
        Prediction(
            rung=multiply_wide,
            at=LARGE,
            times=1.03,
            over=multiply_pipelined,
            why="Loads are no limit any more, and a scheduler has two warps, half of `multiply_pipelined`'s.",
        ),
        Prediction(rung=multiply_one_block, at=LARGE, tflop_per_s=54),
    ),
    checks=(
        *PROBLEM_FP32.checks,
        case("fewer steps than a tile has, all multiples of 4", M=5, N=8, K=4),
        case("multiples of 4 that hang over every edge, more tiles of K than are in flight", M=130, N=132, K=68),
        case("more tiles down than 65,535, the end of a grid's second dimension", gib=2, M=2**24 + 1, N=4, K=4),
        case("offsets past 2^31", gib=60, M=2**16 + 1, N=2**15, K=20),
        case("offsets of A past 2^31", gib=40, M=2**19 + 32, N=4, K=2**12 + 4),
        case("offsets of B past 2^31", gib=40, M=4, N=2**19 + 32, K=2**12 + 4),
        case("whole tiles, on which accesses are counted", M=128, N=256, K=32),
    ),
    benches=(
        *PROBLEM_FP32.benches,
        {"M": 8192, "N": 8192, "K": 8192},
        {"M": 4096, "N": 4095, "K": 4097},  # rows of B at any multiple of 4 bytes
    ),
    wrong=(
        Mutant(
            "B's last tile reads on behind the matrix",
            "square_kernel",
            "row < k && column < n",
            "column < n",
            "multiply_square",
            "out of bounds",
        ),
        Mutant("one of four is stored twice", "vectorized_kernel", "= four.w", "= four.z", "multiply_vectorized"),
        Mutant(
            "rows of A taken to be k - 1 apart",
            "multiply_one_block",
            "m, n, k, stream",
            "m, n, k - 1, stream",
            "multiply_one_block",
        ),
        Mutant(
            "a thread's columns side by side",
            "pipelined_kernel",
            "at.column + x + 8 * s",
            "at.column + x + s",
            "multiply_one_block",
            "race",
        ),
        Mutant(
            "the second four rows begin too early",
            "vectorized_kernel",
            "WARP_TILES ? 16 : 4",
            "WARP_TILES ? 12 : 4",
            "multiply_warp_tiles",
            "race",
        ),
        Mutant(
            "the next tile is not waited for",
            "pipelined_kernel",
            "__pipeline_wait_prior(STAGES - 2);",
            "",
            "multiply_pipelined",
            "uninitialised",
        ),
        Mutant(
            "only my part of the next tile is waited for",
            "pipelined_kernel",
            "__syncthreads();                    // everyone's",
            "// everyone's",
            "multiply_pipelined",
            "race",
        ),
        Mutant(
            "A's last tile reads on behind the row",
            "pipelined_kernel",
            "a_step + step < k_left",
            "a_step + step < k_left + 1",
            "multiply_wide",
            "out of bounds",
        ),
        Mutant(
            "B's columns are not counted",
            "pipelined_kernel",
            "b_inside && b_row + p < k_left",
            "b_row + p < k_left",
            "multiply_wide",
            "out of bounds",
        ),
        Mutant(
            "the fragments are a step too late",
            "pipelined_kernel",
            "b_rmem[i % 2][s]",
            "b_rmem[(i + 1) % 2][s]",
            "multiply_pipelined",
        ),
    ),
    claims={
        "square_kernel": ("no spills",),
        "vectorized_kernel": ("no spills", "16-byte loads", "16-byte stores"),
        "pipelined_kernel": ("no spills", "cp.async"),
    },
    counts={
        # 4 bytes a load: 8 of A in 2 wavefronts each, 8 of B in 4. Then 16 bytes: 2 of A in 4, 2 of B in 8 and then 4.
        multiply_square: {"wavefronts a shared load": 3},
        multiply_vectorized: {"wavefronts a shared load": 6, "sectors a store": 32},
        multiply_warp_tiles: {"wavefronts a shared load": 4, "sectors a store": 16},
        multiply_pipelined: {"wavefronts a shared load": 4, "sectors a store": 16},
        multiply_wide: {"wavefronts a shared load": 4, "sectors a store": 16},
        multiply_one_block: {"wavefronts a shared load": 4, "sectors a store": 16},
    },
)

if __name__ == "__main__":
    LESSON.main()
