"""What is asked of course_ops' softmax, and mutants of its kernels."""

from lessonkit import Lesson, Mutant, case

from course_ops.kernels._rows import Rows, choose
from course_ops.softmax import BACKWARD as BACKWARDS
from course_ops.softmax import FORWARD as FORWARDS
from problems.softmax import PROBLEM, PROBLEM_BACKWARD


def softmax(x):
    """The kernel that course_ops chooses; the operator itself would compute CPU tensors with PyTorch."""
    return choose(FORWARDS, Rows.of(x))(x)


def softmax_backward(y, dy):
    return choose(BACKWARDS, Rows.of(y, dy))(y, dy)


WIDE = ("16-byte loads", "16-byte stores", "no spills")

# Machine code is looked at where 8 divides the length of a row and 16 does not: there the compiler has to be told.
EIGHTS = tuple({"M": 4096, "N": n} for n in (131080, 50264, 9000, 3000, 1000))

# fmt: off
FORWARD = Lesson(
    problem=PROBLEM,
    benches=EIGHTS,
    rungs=(softmax,),
    checks=(
        *PROBLEM.checks,
        case("4 divides the length, 8 does not", M=5, N=1012),
        case("several tiles, the last one hanging over", M=9, N=1000),
        case("chunks, of which the last is ragged; rows of -inf and NaN", M=5, N=9001, strange=True),
        case("past the registers of the interpreter's 4 SMs: two passes", M=1, N=262145),
        case("bytes are counted here: rows past 64 KB are split; half a row of -inf", M=3, N=32769, strange=True),
    ),
    wrong=(
        Mutant("y's stride for x", "softmax_packed_kernel", "rows * stride_x", "rows * stride_y", "softmax"),
        Mutant("no row mask", "softmax_packed_kernel", "(rows < M) & ", "", "softmax", "out of bounds"),
        Mutant("m subtracted after scaling", "softmax_packed_kernel", "- m) * LOG2E - tl", "* LOG2E - m * LOG2E) - tl",
               "softmax"),
        Mutant("only the last chunk's sum", "softmax_chunks_kernel", "lane_l += tl.exp2", "lane_l = tl.exp2",
               "softmax"),
        Mutant("the first chunk's maximum alone", "softmax_chunks_kernel", "tl.maximum(lane_m, chunks[chunk])",
               "lane_m", "softmax", "nan"),
        Mutant("columns past the last, in chunks", "softmax_chunks_kernel", "chunk * BLOCK + lanes < N", "lanes < N",
               "softmax", "out of bounds"),
        Mutant("parts keep their maxima", "softmax_split_kernel", "y = tl.exp2((opaque(x).to(tl.float32) - m)",
               "y = tl.exp2((opaque(x).to(tl.float32) - tl.max(x, axis=0).to(tl.float32))", "softmax", "nan"),
        Mutant("parts not rescaled", "of_all_parts", " * tl.exp2((ms - m) * LOG2E)", "", "softmax"),
        Mutant("a part of -inf", "softmax_split_kernel", "to(tl.float32), LOWEST)", 'to(tl.float32), -float("inf"))',
               "softmax", "nan"),
        Mutant("every part publishes in the first part's slot", "of_all_parts", "partials_ptr + part",
               "partials_ptr + 0 * part", "softmax", "hang"),
        Mutant("chunks from the row's start on", "whole_chunks", "first = (begin + WIDTH - 1) // WIDTH",
               "first = begin // WIDTH", "softmax", "value or nan"),
        Mutant("every part takes the sides", "sides", "(part == 0) & (column", "(part >= 0) & (column", "softmax"),
        Mutant("the sides are not in the sum", "softmax_shifted_kernel",
               "l += tl.sum(tl.exp2((edge - m) * LOG2E), axis=0)", "l += 0.0", "softmax"),
        Mutant("the sides are not stored", "softmax_shifted_kernel", "- log_l), mask=mine)",
               "- log_l), mask=mine & (edge < m - 1000))", "softmax", "nan"),
        Mutant("sum not rescaled", "softmax_two_pass_kernel", "l * less, latest * less", "l, latest", "softmax"),
    ),
    claims={softmax: tuple(f"softmax_{k}_kernel: {claim}" for k in ("packed", "chunks", "split") for claim in WIDE)},
    passes={softmax: 2.0},  # interpreted, rows are split in two launches, of which the first only publishes
)

BACKWARD = Lesson(
    problem=PROBLEM_BACKWARD,
    benches=EIGHTS,
    rungs=(softmax_backward,),
    checks=(
        *PROBLEM_BACKWARD.checks,
        case("chunks, of which the last is ragged; rows of y lie further apart than those of dy", M=5, N=9001, pad=3),
        case("shifted: the shortest such rows, where the elements beside the whole chunks count most", M=5, N=2049),
        case("past the registers of the interpreter's 4 SMs: two passes", M=1, N=131073),
        case("several tiles, the last one hanging over", M=9, N=1000),
        case("bytes are counted here: rows past 64 KB are split", M=2, N=32769),
    ),
    wrong=(
        Mutant("only the last block's delta", "softmax_backward_two_pass_kernel", "add_step(delta, latest,",
               "add_step(delta, 0.0,", "softmax_backward"),
        Mutant("dy's stride for y", "softmax_backward_packed_kernel", "rows * stride_y", "rows * stride_dy",
               "softmax_backward"),
        Mutant("no row mask", "softmax_backward_packed_kernel", "(rows < M) & ", "", "softmax_backward",
               "out of bounds"),
        Mutant("one delta for all rows", "softmax_backward_packed_kernel", ", axis=1, keep_dims=True", "",
               "softmax_backward"),
        Mutant("only the last chunk's share", "softmax_backward_chunks_kernel", "shares += opaque", "shares = opaque",
               "softmax_backward"),
        Mutant("y's stride for dy, in chunks", "softmax_backward_chunks_kernel", "row * stride_dy", "row * stride_y",
               "softmax_backward", "out of bounds"),
        Mutant("the sides' share without y", "softmax_backward_shifted_kernel",
               "delta += tl.sum(edge_y * edge_dy, axis=0)", "delta += tl.sum(edge_dy, axis=0)", "softmax_backward"),
        Mutant("parts overlap", "softmax_backward_split_kernel", "dx_ptr + row * stride_dx + cols",
               "dx_ptr + row * stride_dx + cols - part * BLOCK_N", "softmax_backward", "nan"),
        Mutant("one share too few", "sum_of_shares", "return tl.sum", "return tl.max", "softmax_backward"),
    ),
    claims={softmax_backward: tuple(
        f"softmax_backward_{k}_kernel: {claim}" for k in ("packed", "chunks", "split") for claim in WIDE
    )},
    passes={softmax_backward: 2.0},
)
# fmt: on
