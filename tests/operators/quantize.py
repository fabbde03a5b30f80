"""What is asked of course_ops' quantize, and mutants of its kernels."""

from lessonkit import Lesson, Mutant, case

import torch

from course_ops.kernels import quantize as kernels
from problems.quantize import PROBLEM, group_counts


def quantize(x, scheme):
    """By the kernels; the operator itself would compute CPU tensors with PyTorch.

    In an empty x the problem counts groups otherwise: course_ops has as many scales as rows, and as many as columns.
    """
    q, scale = kernels.quantize(x, scheme)
    return q.view(torch.uint8), scale if x.numel() else scale.new_ones(group_counts(x, scheme))


# fmt: off
FORWARD = Lesson(
    problem=PROBLEM,
    benches=tuple({"M": 4096, "K": k, "scheme": s} for k in (1000, 3000, 14344) for s in ("tensor", "rows", "blocks")),
    rungs=(quantize,),
    checks=(
        *PROBLEM.checks,
        case("rows of several tiles", M=3, K=3000, scheme="rows", pad=8),
        case("the longest row of one program", M=2, K=16384, scheme="rows"),
        case("a square of four tiles, the second row of squares cut", M=200, K=256, scheme="squares"),
        case("parts of one group, across and down", M=9, K=3000, scheme="tensor", pad=8),
        case("the bytes are counted here: x is read once", M=64, K=512),
    ),
    wrong=(
        Mutant("the largest is 240", "scale_of", "448.0", "240.0", "quantize"),
        Mutant("magnitudes with their sign", "magnitude", "tl.abs(x.to(tl.float32))", "x.to(tl.float32)", "quantize"),
        Mutant("the first tile's maximum", "quantize_kernel", "tl.maximum(bits, magnitude(tiles[chunk]))", "bits",
               "quantize"),
        Mutant("the first tile's scale", "quantize_kernel", "if not SHARED and chunk > 0", "if SHARED and chunk > 0",
               "quantize"),
        Mutant("the first tile's scales alone are kept", "quantize_kernel", "if not SHARED or chunk == 0",
               "if chunk == 0", "quantize", "nan"),
        Mutant("rows past the last", "quantize_kernel", "(row < M) & (k < K), other", "(k < K), other", "quantize",
               "out of bounds"),
        Mutant("the last program's maximum", "largest_kernel", "tl.atomic_max", "tl.atomic_xchg", "quantize"),
        Mutant("each part has a maximum of its own", "largest_kernel", "tl.program_id(1) * BLOCK_K // GROUP_K",
               "tl.program_id(1)", "quantize", "out of bounds"),
        Mutant("rows taken to be K apart", "divide_kernel", "rows * stride_x", "rows * K", "quantize"),
    ),
    claims={quantize: (
        "quantize_kernel: 16-byte loads", "quantize_kernel: no spills", "largest_kernel: 16-byte loads",
        "divide_kernel: 16-byte loads",
    )},
)
# fmt: on
