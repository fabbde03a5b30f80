"""What is asked of course_ops' add_norm, and mutants of its kernels."""

from lessonkit import Lesson, Mutant, case

from course_ops.add_norm import BACKWARD as BACKWARDS
from course_ops.add_norm import FORWARD as FORWARDS
from course_ops.kernels._rows import Rows, choose
from problems.add_norm import EPS, PROBLEM, PROBLEM_BACKWARD


def add_norm(x, delta, w, b, eps=EPS):
    """The kernel that course_ops chooses; the operator itself would compute CPU tensors with PyTorch."""
    y, total, mean, rstd = choose(FORWARDS, Rows.of(delta, x))(delta, x, w, b, eps)
    return total, y, mean, rstd


def add_norm_backward(dtotal, dy, total, w, mean, rstd):
    dx, dresidual, dw, db = choose(BACKWARDS, Rows.of(total, dy, dtotal))(dy, dtotal, total, w, mean, rstd, True)
    return dresidual, dx, dw, db


# Machine code is looked at where 8 divides the length of a row and 16 does not: there the compiler has to be told.
EIGHTS = tuple({"M": 4096, "N": n, "stream": True} for n in (50264, 9000, 3000, 1000))

# fmt: off
FORWARD = Lesson(
    problem=PROBLEM,
    benches=EIGHTS,
    rungs=(add_norm,),
    checks=(
        *PROBLEM.checks,
        case("a list of chunks, rows 3 elements apart", M=3, N=9001, pad=3),
        case("and beside a stream in fp32", M=3, N=9001, pad=3, stream=True),
        case("several programs a row, rows 3 elements apart", M=2, N=20001, pad=3, stream=True),
        case("a row of an odd length starts at any place between two multiples of 16 bytes", M=9, N=7003, stream=True),
        case("and the stream's rows are 8 elements further apart", M=9, N=4097, pad=8),
        case("more parts than fit on the interpreter's 4 SMs: an addition of its own", M=2, N=32769),
        case("the bytes are counted here", M=40, N=768, stream=True),
    ),
    wrong=(
        Mutant("the branch is not added", "add_norm_kernel", "(residual + x).to", "(residual + 0 * x).to", "add_norm"),
        Mutant("rows of the stream taken to be N apart", "add_norm_kernel", "rows * stride_residual", "rows * N",
               "add_norm", "value or nan"),
        Mutant("the tile's last rows are not there", "add_norm_kernel", "(rows < M) & (cols < N)",
               "(rows < M + 1) & (cols < N)", "add_norm", "out of bounds"),
        Mutant("rows of the stream taken to be N apart, in chunks", "layer_norm_chunks_kernel", "row * stride_residual",
               "row * N", "add_norm", "value or nan"),
        Mutant("the branch alone is normalised", "layer_norm_chunks_kernel",
               "added(branch[chunk], residuals[chunk])", "added(branch[chunk], 0 * residuals[chunk])", "add_norm"),
        Mutant("the sum of every chunk in the first one's place", "layer_norm_chunks_kernel",
               "total_ptr + row * N + cols", "total_ptr + row * N + lanes", "add_norm", "nan"),
        Mutant("rows of the stream taken to be N apart, in parts", "layer_norm_split_kernel",
               "rows[:, None] * stride_residual", "rows[:, None] * N", "add_norm", "value or nan"),
        Mutant("rows of the stream taken to be N apart, from any place on", "layer_norm_shifted_kernel",
               "whole_chunks(row * stride_residual,", "whole_chunks(row * N,", "add_norm", "value or nan"),
        Mutant("the sides alone are not added", "layer_norm_shifted_kernel",
               "edge = added(edge, ", "edge = added(edge, 0 * ", "add_norm"),
        Mutant("w four columns off, in fp32", "beside_chunks", "before & 4, 4, 11", "0 * before, 4, 11", "add_norm"),
        Mutant("a part's sum in the first one's place", "layer_norm_split_kernel",
               "total_ptr + rows[:, None] * N + cols[None, :]",
               "total_ptr + rows[:, None] * N + cols[None, :] - part * BLOCK_N", "add_norm", "nan"),
    ),
    claims={add_norm: (
        "add_norm_kernel: 16-byte loads", "add_norm_kernel: 16-byte stores", "add_norm_kernel: no spills",
        "layer_norm_chunks_kernel: 16-byte loads", "layer_norm_chunks_kernel: 16-byte stores",
        "layer_norm_chunks_kernel: no spills",
    )},
    passes={add_norm: 1.31},  # a program asks for w and b once for 2 rows; the interpreter counts that too
)

BACKWARD = Lesson(
    problem=PROBLEM_BACKWARD,
    benches=EIGHTS,
    rungs=(add_norm_backward,),
    checks=(
        *PROBLEM_BACKWARD.checks,
        case("several rows a program, 3 elements apart", M=23, N=5001, pad=3, stream=True),
        case("several programs a row, rows 3 elements apart", M=7, N=9001, pad=3, stream=True),
        case("more parts than run at once: partial sums in a launch of their own", M=3, N=32776),
        case("rows that start at any address, 8 elements apart", M=19, N=2049, pad=8),
        case("and several programs a row", M=9, N=9003, pad=8, stream=True),
        case("the bytes are counted here", M=64, N=768, stream=True),
    ),
    wrong=(
        Mutant("the stream's gradient forgotten", "add_norm_backward_kernel", "dtotal + rstd", "rstd",
               "add_norm_backward"),
        Mutant("dw of the last tile only", "add_norm_backward_kernel", "dw += dy * x_hat", "dw = dy * x_hat",
               "add_norm_backward"),
        Mutant("rows of the stream's gradient N apart", "norm_backward_walk_kernel", "row * stride_dtotal", "row * N",
               "add_norm_backward"),
        Mutant("the stream's gradient forgotten in the stream", "norm_backward_walk_kernel",
               "tl.store(dresidual_ptr + row * N + cols, dx,", "tl.store(dresidual_ptr + row * N + cols, 0 * dx,",
               "add_norm_backward"),
        Mutant("rows of the stream's gradient N apart, in parts", "norm_backward_group_kernel", "row * stride_dtotal",
               "row * N", "add_norm_backward"),
        Mutant("the next row's gradient of the stream", "norm_backward_group_kernel",
               "dtotal_ptr + row * stride_dtotal + cols, mask=cols < N",
               "dtotal_ptr + after * stride_dtotal + cols, mask=(cols < N) & (after < M)", "add_norm_backward"),
        Mutant("the sides of the stream's gradient N apart", "norm_backward_shifted_walk_kernel",
               "row * stride_dtotal + side", "row * N + side", "add_norm_backward", "value or nan"),
        Mutant("the sides of the stream's gradient forgotten, in parts", "norm_backward_shifted_group_kernel",
               "dx_side += tl.load(", "dx_side += 0 * tl.load(", "add_norm_backward"),
    ),
    claims={add_norm_backward: (
        "add_norm_backward_kernel: no spills", "norm_backward_walk_kernel: no spills",
        "norm_backward_group_kernel: no spills",
    )},
    passes={add_norm_backward: 1.39},
)
# fmt: on
