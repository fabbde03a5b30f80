"""What is asked of course_ops' rms_norm, and mutants of its kernels."""

from lessonkit import Lesson, Mutant, case

from course_ops.kernels._rows import Rows, choose
from course_ops.rms_norm import BACKWARD as BACKWARDS
from course_ops.rms_norm import FORWARD as FORWARDS
from problems.rms_norm import PROBLEM, PROBLEM_BACKWARD


def rms_norm(x, w, eps):
    """The kernel that course_ops chooses; the operator itself would compute CPU tensors with PyTorch."""
    return choose(FORWARDS, Rows.of(x))(x, w, eps)


def rms_norm_backward(dy, x, w, rstd):
    return choose(BACKWARDS, Rows.of(x, dy))(dy, x, w, rstd)


# Machine code is looked at where 8 divides the length of a row and 16 does not: there the compiler has to be told.
EIGHTS = tuple({"M": 4096, "N": n} for n in (131080, 50264, 9000, 3000, 1000))

# fmt: off
FORWARD = Lesson(
    problem=PROBLEM,
    benches=EIGHTS,
    rungs=(rms_norm,),
    checks=(
        *PROBLEM.checks,
        case("4 divides the length and the distance of rows, 8 does not", M=5, N=1012, pad=4),
        case("16 KB in bf16, 32 KB in fp32: the other two counts of bytes a thread", M=3, N=8000),
        case("in fp32 nine programs share a row, the last with one column", M=5, N=16385, strange=True),
        case("in every dtype programs share two rows, of which the last pair has one", M=3, N=32770),
        case("too many parts for the interpreter's 4 SMs, in fp32: two passes", M=2, N=65537),
        case("more programs than fit at once", gib=0.4, M=200, N=33000),
        case("in 16 bits parts of 64 KB, in fp32 too large for an SM", gib=0.4, M=3, N=700_000),
        case("row offsets past 2^31, in parts", gib=13, M=3, N=40000, pad=2**30),
        case("rows of an odd length, at each of the eight places between two multiples of 16 bytes", M=9, N=2051),
        case("bytes are counted here: in bf16 four rows a program, the last with three", M=203, N=1000),
    ),
    wrong=(
        Mutant("x read as if contiguous", "rms_norm_packed_kernel", "rows[:, None] * stride_x", "rows[:, None] * N",
               "rms_norm"),
        Mutant("rows overlap", "rms_norm_packed_kernel", "to(tl.int64) * ROWS", "to(tl.int64)", "rms_norm", "nan"),
        Mutant("a row too many", "rms_norm_packed_kernel", "(rows < M)[:", "(rows <= M)[:", "rms_norm",
               "out of bounds"),
        Mutant("one part's sum", "rms_norm_split_kernel", "tl.sum((words -", "PARTS * tl.max((words -", "rms_norm"),
        Mutant("the mean of a part", "rms_norm_split_kernel", "axis=1) / N", "axis=1) / BLOCK_N", "rms_norm"),
        Mutant("parts overlap", "rms_norm_split_kernel", "stride_y + cols", "stride_y + 0 * cols", "rms_norm", "nan"),
        Mutant("only the last chunk's squares", "rms_norm_chunks_kernel", "squares += wide", "squares = wide",
               "rms_norm"),
        Mutant("every chunk has the first one's w", "rms_norm_chunks_kernel", "w_ptr + cols, mask=cols",
               "w_ptr + lanes, mask=cols", "rms_norm"),
        Mutant("columns past the last", "rms_norm_chunks_kernel", "chunk * BLOCK + lanes < N", "lanes < N", "rms_norm",
               "out of bounds"),
        Mutant("the sides' squares are not in the sum", "rms_norm_shifted_kernel",
               " + tl.sum(edge * edge, axis=0)", "", "rms_norm"),
        Mutant("w from the start of a chunk", "beside_chunks", "before = before_chunks(begin, WIDTH)",
               "before = 0 * part", "rms_norm"),
        Mutant("w a column off in every second row", "beside_chunks", "before & 1 == 0", "before & 8 == 0", "rms_norm"),
        Mutant("w of the next chunk, past the end", "beside_chunks", "WIDTH * i + tl", "WIDTH * i + WIDTH + tl",
               "rms_norm", "value or out of bounds"),
        Mutant("only the last block's squares", "rstd_kernel", "squares, latest, step", "squares, 0 * latest, step",
               "rms_norm"),
        Mutant("w of the first block in each", "scale_kernel", "w_ptr + cols,", "w_ptr + cols - start,", "rms_norm"),
        Mutant("64 blocks are forgotten", "add_step", "outer + tl.where(full, inner, 0.0)", "outer", "rms_norm"),
    ),
    # In rms_norm_split_kernel some words spill: that is cheaper than a program less on the SM.
    claims={rms_norm: (
        "rms_norm_packed_kernel: 16-byte loads", "rms_norm_packed_kernel: 16-byte stores",
        "rms_norm_packed_kernel: no spills",
        "rms_norm_chunks_kernel: 16-byte loads", "rms_norm_chunks_kernel: 16-byte stores",
        "rms_norm_chunks_kernel: no spills",
        "rms_norm_split_kernel: 16-byte loads", "rms_norm_split_kernel: 16-byte stores",
    )},
    passes={rms_norm: 1.125},
)

BACKWARD = Lesson(
    problem=PROBLEM_BACKWARD,
    benches=EIGHTS,
    rungs=(rms_norm_backward,),
    checks=(
        *PROBLEM_BACKWARD.checks,
        case("16 KB in fp32: one row a tile", M=9, N=4096),
        case("several tiles a program", M=203, N=1000),
        case("no rows of more than 16 KB", M=0, N=9000),
        case("several rows a program", M=23, N=5000),
        case("five programs a row, the last part shorter", M=9, N=9008, strange=True),
        case("rows that start at any address, several of them a program", M=19, N=2049, strange=True),
        case("and several programs a row", M=9, N=12003),
        case("several tiles a program on a GPU too", gib=0.5, M=4100, N=1000),
        case("several rows, and a row for several programs, on a GPU too", gib=0.5, M=301, N=9001),
        case("groups on a GPU", gib=0.5, M=150, N=20000),
        case("more parts than run at once: partial sums in a launch of their own", gib=0.5, M=2, N=3_000_000),
        case("row offsets past 2^31", gib=25, M=3, N=9000, pad=2**30),
        case("and in groups", gib=25, M=3, N=40000, pad=2**30),
        case("bytes are counted here: groups in every dtype, interpreted in two launches", M=23, N=16500, pad=2),
    ),
    wrong=(
        Mutant("only the last row's dw", "norm_backward_walk_kernel", "before_dw[chunk] + wide", "wide",
               "rms_norm_backward"),
        Mutant("the mean of a chunk", "norm_backward_walk_kernel", "c1 / N, c2 / N", "c1 / BLOCK, c2 / BLOCK",
               "rms_norm_backward"),
        Mutant("columns past the last", "norm_backward_walk_kernel", "x_ptr + row * stride_x + cols, mask=cols < N",
               "x_ptr + row * stride_x + cols, mask=cols < N + 1", "rms_norm_backward", "out of bounds"),
        Mutant("only the last chunk's sum", "centred_sums", "lanes_gx += in_threads", "lanes_gx = in_threads",
               "rms_norm_backward"),
        Mutant("w forgotten in the mean", "centred_sums", "g = dy[chunk] * w[chunk]", "g = dy[chunk]",
               "rms_norm_backward"),
        Mutant("only the last row's dw, in parts", "norm_backward_group_kernel", "before_dw[chunk] + wide", "wide",
               "rms_norm_backward"),
        Mutant("the next row in this row's place", "norm_backward_group_kernel", "unpack_columns(x[chunk]",
               "unpack_columns(next_x[chunk]", "rms_norm_backward"),
        Mutant("the mean of a part", "norm_backward_group_kernel", "tl.sum(c1, axis=0) / N",
               "tl.sum(c1, axis=0) / BLOCK", "rms_norm_backward"),
        Mutant("one part's sum", "norm_backward_group_kernel", "tl.sum(c1, axis=0)", "PARTS * tl.max(c1, axis=0)",
               "rms_norm_backward"),
        Mutant("the sides do not count", "sums_with_sides", "lanes_gx = gx_side", "lanes_gx = 0 * gx_side",
               "rms_norm_backward"),
        Mutant("only the last row's dw, of rows that start anywhere", "norm_backward_shifted_walk_kernel",
               "before_dw[chunk] + wide", "wide", "rms_norm_backward"),
        Mutant("and in parts", "norm_backward_shifted_group_kernel", "before_dw[chunk] + wide", "wide",
               "rms_norm_backward"),
        Mutant("the sides' dw of the last row", "norm_backward_shifted_group_kernel", "dw_side += dy_side",
               "dw_side = dy_side", "rms_norm_backward"),
        Mutant("one partial sum too few", "sum_partials_kernel", "(p < P) & (cols < N)", "(p < P - 1) & (cols < N)",
               "rms_norm_backward"),
        Mutant("only the last tile's dw", "rms_norm_backward_persistent_kernel", "dw += dy", "dw = dy",
               "rms_norm_backward"),
    ),
    # In norm_backward_group_kernel one value may spill, at 40 columns a thread.
    claims={rms_norm_backward: ("norm_backward_walk_kernel: no spills",)},
    passes={rms_norm_backward: 1.72},
)
# fmt: on
