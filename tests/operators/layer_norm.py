"""What is asked of course_ops' layer_norm, and mutants of its kernels."""

from lessonkit import Lesson, Mutant, case

from course_ops.kernels._rows import Rows, choose
from course_ops.layer_norm import BACKWARD as BACKWARDS
from course_ops.layer_norm import FORWARD as FORWARDS
from problems.layer_norm import EPS, PROBLEM, PROBLEM_BACKWARD


def layer_norm(x, w, b, eps=EPS):
    """The kernel that course_ops chooses; the operator itself would compute CPU tensors with PyTorch."""
    return choose(FORWARDS, Rows.of(x))(x, w, b, eps)


def layer_norm_backward(dy, x, w, mean, rstd):
    return choose(BACKWARDS, Rows.of(x, dy))(dy, x, w, mean, rstd, True)


# Machine code is looked at where 8 divides the length of a row and 16 does not: there the compiler has to be told.
EIGHTS = tuple({"M": 4096, "N": n} for n in (131080, 50264, 9000, 3000, 1000))

# fmt: off
FORWARD = Lesson(
    problem=PROBLEM,
    benches=EIGHTS,
    rungs=(layer_norm,),
    checks=(
        *PROBLEM.checks,
        case("4 divides the length and the distance of rows, 8 does not", M=5, N=1012, pad=4),
        case("37 rows leave the fifth tile of 8 hanging over", M=37, N=101),
        case("one past a power of two: half the lanes of a row of one program are padding", M=4, N=4097),
        case("five programs share a row, the last has one element", M=3, N=16385, pad=7),
        case("in 16 bits four parts share a row of an odd length", M=9, N=7003),
        case("more parts than fit on the interpreter's 4 SMs: two passes", M=2, N=32769),
        case("more parts than fit on a GPU", gib=1, M=2, N=2_000_000),
        case("a row past element 2^31, in chunks", gib=13, M=3, N=8195, pad=2**30),
        case("and split", gib=13, M=3, N=16387, pad=2**30),
        case("whole tiles: the bytes are counted here", M=64, N=512),
    ),
    wrong=(
        Mutant("the tile's last rows are not there", "layer_norm_packed_kernel", "(rows < M) & (cols < N)",
               "(rows < M + 1) & (cols < N)", "layer_norm", "out of bounds"),
        Mutant("rows taken to be N apart", "layer_norm_packed_kernel", "rows * stride_x", "rows * N", "layer_norm",
               "value or nan"),
        Mutant("variance by N - 1", "layer_norm_packed_kernel", "keep_dims=True) / N + eps",
               "keep_dims=True) / tl.maximum(N - 1, 1) + eps", "layer_norm"),
        Mutant("lanes with no element count as zeros", "layer_norm_chunks_kernel",
               "tl.where(there, last_mean, lane_mean)", "last_mean", "layer_norm"),
        Mutant("lanes merged as if their means were equal", "layer_norm_chunks_kernel",
               "lane_m2 + delta * delta * lane_count", "lane_m2", "layer_norm"),
        Mutant("Welford with the new mean twice", "welford", "m2 + delta * (x.to(tl.float32) - mean)",
               "m2 + (x.to(tl.float32) - mean) * (x.to(tl.float32) - mean)", "layer_norm"),
        Mutant("parts merged as if their means were equal", "layer_norm_split_kernel", "m2s + delta", "m2s + 0 * delta",
               "layer_norm"),
        Mutant("a ragged part weighs as much as a full one", "layer_norm_split_kernel",
               "tl.minimum(tl.maximum(N - slots * BLOCK_N, 0), BLOCK_N)", "tl.where(slots < PARTS, BLOCK_N, 0)",
               "layer_norm"),
        Mutant("the sides are not centred", "layer_norm_shifted_kernel", "tl.where(mine, edge - mean, 0.0)",
               "tl.where(mine, edge, 0.0)", "layer_norm"),
        Mutant("the sides do not count", "layer_norm_shifted_kernel",
               "tl.where(part == 0, N - whole * WIDTH, 0)", "0", "layer_norm"),
        Mutant("shifted parts merged as if their means were equal", "layer_norm_shifted_kernel", "m2s + delta",
               "m2s + 0 * delta", "layer_norm"),
        Mutant("b two columns off", "beside_chunks", "before & 2, 1, 5", "0 * before, 1, 5", "layer_norm"),
        Mutant("blocks merged as if their means were equal", "layer_norm_two_pass_kernel", "axis=0) + apart", "axis=0)",
               "layer_norm"),
    ),
    claims={
        layer_norm: (
            "16-byte loads", "16-byte stores", "layer_norm_chunks_kernel: no spills",
        ),
    },
    passes={layer_norm: 1.475},  # a program asks for w and b once for 2 rows; the interpreter counts that too
)

BACKWARD = Lesson(
    problem=PROBLEM_BACKWARD,
    benches=EIGHTS,
    rungs=(layer_norm_backward,),
    checks=(
        *PROBLEM_BACKWARD.checks,
        case("past the longest row whose successor waits in registers", M=23, N=2056),
        case("three programs a row, the last with fewer columns; 7 rows for 2 groups", M=7, N=10248),
        case("more parts than fit on the interpreter's 4 SMs", M=3, N=32776),
        case("rows that start at any address, several of them a program", M=23, N=2049),
        case("and several programs a row", M=11, N=10243),
        case("more parts than fit on a GPU", gib=1, M=2, N=1_200_000),
        case("more tiles than a GPU has programs", gib=0.9, M=9001, N=1000),
        case("more rows than a GPU has groups", gib=0.5, M=300, N=9001),
        case("a row past element 2^31, by one program", gib=25, M=3, N=4099, pad=2**30),
        case("and by groups", gib=25, M=3, N=16387, pad=2**30),
        case("the bytes are counted here: by groups, and interpreted in two launches", M=64, N=10256),
    ),
    wrong=(
        Mutant("rows past the last", "layer_norm_backward_kernel", "rows * stride_dy + cols, mask=(rows < M) & (cols",
               "rows * stride_dy + cols, mask=(cols", "layer_norm_backward", "out of bounds"),
        Mutant("dw of the last row only", "norm_backward_walk_kernel", "before_dw[chunk] + wide", "wide",
               "layer_norm_backward"),
        Mutant("db of the last row only", "norm_backward_walk_kernel", "before_db[chunk] + wide", "wide",
               "layer_norm_backward"),
        Mutant("columns past the last", "norm_backward_walk_kernel", "dy_ptr + row * stride_dy + cols, mask=cols < N",
               "dy_ptr + row * stride_dy + cols, mask=cols < N + 1", "layer_norm_backward", "out of bounds"),
        Mutant("the mean of g not taken off", "norm_backward_walk_kernel", "x_hat * c1 - c2)", "x_hat * c1)",
               "layer_norm_backward"),
        Mutant("one part's share taken for the row's sum", "norm_backward_group_kernel", "tl.sum(c1, axis=0)",
               "tl.sum(tl.where(slots == part, c1, 0), axis=0)", "layer_norm_backward"),
        Mutant("the two sums in each other's place", "norm_backward_group_kernel",
               "x_hat * c1 - c2)", "x_hat * c2 - c1)", "layer_norm_backward"),
        Mutant("parts overlap", "norm_backward_group_kernel", "part * ((CHUNKS - 1) * BLOCK + LAST)",
               "part * LAST",
               "layer_norm_backward", "nan"),
        Mutant("every group writes its partial sums to the first row", "norm_backward_group_kernel",
               "group * N, begin", "0 * N, begin", "layer_norm_backward", "nan"),
        Mutant("a part's sums of the next row are not published", "norm_backward_group_kernel",
               "sums_ptr + after * PARTS + part", "sums_ptr + after * PARTS + 0 * part", "layer_norm_backward", "nan"),
        Mutant("of many parts the largest sum alone", "norm_backward_group", ".sum(1)", ".amax(1)",
               "layer_norm_backward"),
        Mutant("dw of the last row's sides only", "norm_backward_shifted_walk_kernel", "dw_side += dy_side",
               "dw_side = dy_side", "layer_norm_backward"),
        Mutant("w as if all rows started at a multiple of 16 bytes", "norm_backward_shifted_walk_kernel",
               "w_ptr + before + cols", "w_ptr + cols", "layer_norm_backward"),
        Mutant("a whole word too many", "norm_backward_shifted_walk_kernel", "(N // WIDTH - 1) * WIDTH",
               "N // WIDTH * WIDTH", "layer_norm_backward", "value or out of bounds"),
        Mutant("the sides are not in the mean of g", "sums_with_sides", "lanes_g = g_side", "lanes_g = 0 * g_side",
               "layer_norm_backward"),
        Mutant("every part has the sides", "norm_backward_shifted_group_kernel", "& (part == 0)", "& (part >= 0)",
               "layer_norm_backward"),
        Mutant("the sides of the next row", "norm_backward_shifted_group_kernel", "rstd * (g_side",
               "rstd * (next_g_side", "layer_norm_backward"),
        Mutant("rows of one group start at different places", "spread",
               "max(resident // parts // period, 1) * period", "max(resident // parts, 1)",
               "layer_norm_backward", "value or nan or out of bounds"),
        Mutant("sums of all programs taken to start at the same place", "sum_shifted_kernel",
               "- before_chunks(p * N, WIDTH)", "", "layer_norm_backward", "value or nan"),
    ),
    claims={layer_norm_backward: (
        "layer_norm_backward_kernel: 16-byte loads", "norm_backward_walk_kernel: no spills",
        "norm_backward_group_kernel: no spills",
    )},
    passes={layer_norm_backward: 1.76},
)
# fmt: on
