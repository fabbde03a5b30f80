"""Argmax: a reduction that carries two numbers
=============================================
argmax of x [M, N] along the rows reads MN elements and writes M indices. On an H200, at 4.2 TB/s, 8192 x 8192 in bf16
(134 MB) takes at least 0.032 ms. Two things make it more than a maximum:

- The rule. The first of equal maxima wins. NaN counts as the maximum, and the first NaN wins. -0 equals +0.
- Arithmetic. At 4.2 TB/s and 1.75 GHz each of 132 SMs receives about 9 bf16 elements per cycle. It executes
  comparisons and selects for 64 threads per cycle. So an element has time for about 7 such instructions.

You will be able to: reduce a value and its index together, with PyTorch's rules for ties and NaN, and turn a float into
an integer of the same order.
You need: lesson 5 (a row in registers, a loop over a row), lesson 4 (atomics). Rungs 3 and 4 are advanced.
Run it:    python3 course.py run lesson07_argmax
Check it:  python3 course.py check lesson07_argmax
Time it:   python3 course.py bench lesson07_argmax

Answer before you read on. What is the argmax of a row that is all -inf? Each lane keeps its best value and the step it
came from: why is the leftmost of the best lanes not always the first index?
"""

from lessonkit import About, Lesson, Mutant, Prediction, Unsupported, expect, num_sms

import torch
import triton
import triton.language as tl

from problems.argmax import PROBLEM


# A float as an integer of the same order, called its key. Read as an integer, the bits of a float >= 0 grow with its
# value. Those of a negative float grow with its distance from zero, so all bits but the sign are flipped. Before that
# -0 becomes +0, because the two are equal and their bits are not. NaN becomes the largest integer.
#
# Every comparison with a float NaN is false. So on a GPU tl.argmax of floats finds a NaN in some places of the row and
# misses it in others. In the interpreter it always finds it, because NumPy does. Keys have no such case.
@triton.jit
def order_key(x):
    x = tl.where(x == 0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


# Rung 1. A row in one block, in registers, and tl.argmax, which prefers the left of two equals. Padding is -inf. A 0
# there would win in a row of negative numbers. A row of -inf ties with the padding and wins, because it stands further
# left.
# Predicted: the least bytes. But every element pays 6 instructions for its key, and each comparison moves a pair.
@triton.jit
def argmax_block_kernel(x_ptr, y_ptr, N, stride, BLOCK_N: tl.constexpr):  # x [M, N], y [M]
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < N, other=-float("inf")).to(tl.float32)
    tl.store(y_ptr + row, tl.argmax(order_key(x), axis=0))


def argmax_block(x):
    """[M, N] -> [M] int64, one program per row, N up to 65,536."""
    y = _prepare(x)
    if x.shape[1] > 65536:
        raise Unsupported("a row longer than 65,536 does not fit into one SM's registers")
    if y.numel():
        block = triton.next_power_of_2(x.shape[1])
        argmax_block_kernel[(x.shape[0],)](x, y, x.shape[1], x.stride(0), block, num_warps=8)
    return y


# Rung 2. New: a loop over the row. A lane keeps its best value and the step that it came from: a conversion, two
# comparisons and two selects per element. Keys and the reduction come at the end, for one value per lane. The lanes
# hold candidates of different steps then, so the leftmost lane need not have the first index:
#
#     row = 5 7 9 1 | 9 0 2 3        lane     0    1    2    3
#     BLOCK = 4                      best     9    7    9    3
#                                    step     1    0    0    1
#     index = step * 4 + lane        index    4    1    2    7
#
# So a second reduction takes the smallest index among the lanes that have the maximum: here 2, and not 4.
# Predicted: the least bytes at any N, if there are enough rows for all SMs.
@triton.jit
def keep_better(x, step, best, at):
    # "Not smaller or equal" is "larger, or NaN". best == best: the first NaN stays.
    better = ~(x <= best) & (best == best)
    return tl.where(better, x, best), tl.where(better, step, at).to(tl.int32)


@triton.jit
def argmax_online_kernel(x_ptr, y_ptr, N, stride, BLOCK: tl.constexpr):  # x [M, N], y [M]
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)  # a row of -inf never finds better: step 0, lane 0 is its answer
    for step in range(tl.cdiv(N, BLOCK)):
        cols = step * BLOCK + lanes
        x = tl.load(x_ptr + row * stride + cols, mask=cols < N, other=-float("inf")).to(tl.float32)
        best, at = keep_better(x, step, best, at)
    key = order_key(best)
    index = at.to(tl.int64) * BLOCK + lanes
    tl.store(y_ptr + row, tl.min(tl.where(key == tl.max(key), index, N)))


def argmax_online(x):
    """[M, N] -> [M] int64, one program per row, 2048 columns per step."""
    y = _prepare(x)
    if y.numel():
        argmax_online_kernel[(x.shape[0],)](x, y, x.shape[1], x.stride(0), BLOCK=2048, num_warps=4)
    return y


# Rung 3, advanced. New: few long rows leave SMs idle, so several programs share a row, and an atomic maximum combines
# their answers. Value and index must change together, so both are in one word of 64 bits: the key in the upper half,
# the inverted index in the lower. Inverted, because of two equal keys the smaller index must be the larger word. A
# maximum does not depend on the order, so the result is deterministic.
# Predicted: 64 rows fill the GPU, so the speed of memory. But there are three more launches: one sets the words up, two
# take them apart.
@triton.jit
def argmax_atomic_kernel(x_ptr, words_ptr, N, stride, steps, BLOCK: tl.constexpr):  # x [M, N], words [M] int64
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * steps  # int64, so step is too, and step * BLOCK cannot overflow
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32) + first.to(tl.int32)
    for step in range(first, first + steps):
        cols = step * BLOCK + lanes
        x = tl.load(x_ptr + row * stride + cols, mask=cols < N, other=-float("inf")).to(tl.float32)
        best, at = keep_better(x, step, best, at)
    index = at.to(tl.int64) * BLOCK + lanes
    word = (order_key(best).to(tl.int64) << 32) | (0xFFFFFFFF - index)
    tl.atomic_max(words_ptr + row, tl.max(word), sem="relaxed")


def argmax_atomic(x):
    """[M, N] -> [M] int64, as many programs per row as fill the GPU, N below 2^32."""
    y = _prepare(x)
    M, N = x.shape
    if N >= 2**32:
        raise Unsupported("the index has 32 bits of the word")
    if M == 0:
        return y
    steps = triton.cdiv(N, 2048)
    each = triton.cdiv(steps, min(steps, triton.cdiv(8 * num_sms(), M)))
    # Below every key: with 0 instead a row of negative numbers would lose to the start.
    words = torch.full((M,), -(2**63), dtype=torch.int64, device=x.device)
    argmax_atomic_kernel[(M, triton.cdiv(steps, each))](x, words, N, x.stride(0), each, BLOCK=2048, num_warps=4)
    return 0xFFFFFFFF - (words & 0xFFFFFFFF)


# Rung 4, advanced. New: three changes.
#
# Groups: the 8 elements of a 16-byte load (4 in fp32) are reduced to their maximum. Only the maximum is compared and
# kept. At the end, the best group of the row is loaded again to find its place among the 8. A conversion, 7/8 of a
# maximum and 4/8 of comparing and selecting are 2.4 instructions per element, where rung 2 has 5.
#
# Loads: each thread issues UNROLL loads of 16 bytes before the first comparison needs one.
#
# Splits, where rows are few: several programs share a row. Each writes its own word, so nothing has to be set up, and a
# small kernel takes the maximum. The index in a word counts from the start of its split, so rows can have any length.
#
# Predicted: rung 2's bytes, and faster than rung 2 at every shape. The gain is largest where rows are short (two rows
# share a program) or few.
@triton.jit
def fold(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, 2 * WIDTH] -> [ROWS, WIDTH]: the larger of two neighbours. NaN wins, which tl.maximum alone drops."""
    a, b = tl.split(tl.reshape(x, [ROWS, WIDTH, 2]))
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def argmax_groups_kernel(
    x_ptr, out_ptr,  # [M, N]; [M] indices, or [M, splits] words
    M, N, stride,
    steps,  # of a split, a multiple of UNROLL
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, UNROLL: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    # A program owns one split of ROWS rows: `steps` steps of BLOCK columns from step `first` on.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    first = tl.program_id(1).to(tl.int64) * steps
    lanes = tl.arange(0, BLOCK)[None, :]
    best = tl.full([ROWS, BLOCK // GROUP], -float("inf"), tl.float32)
    at = tl.zeros([ROWS, BLOCK // GROUP], tl.int32)
    for step in range(0, steps, UNROLL):
        for u in tl.static_range(UNROLL):
            cols = (first + step + u) * BLOCK + lanes
            mask = (rows < M) & (cols < N)
            x = tl.load(x_ptr + rows * stride + cols, mask=mask, other=-float("inf")).to(tl.float32)
            x = fold(fold(x, ROWS, BLOCK // 2), ROWS, BLOCK // 4)
            if GROUP == 8:
                x = fold(x, ROWS, BLOCK // 8)
            best, at = keep_better(x, step + u, best, at)
    key = order_key(best)
    top = tl.max(key, axis=1, keep_dims=True)
    starts = at * BLOCK + tl.arange(0, BLOCK // GROUP)[None, :] * GROUP
    start = tl.min(tl.where(key == top, starts, 0x7FFFFFFF), axis=1, keep_dims=True)
    # Load the first group that has the maximum again, and take its first place with that maximum.
    place = tl.arange(0, GROUP)[None, :]
    cols = first * BLOCK + start + place
    group = tl.load(x_ptr + rows * stride + cols, mask=(rows < M) & (cols < N), other=-float("inf")).to(tl.float32)
    place = tl.min(tl.where(order_key(group) == top, place, GROUP), axis=1, keep_dims=True)
    index = (start + place).to(tl.int64)
    if SPLIT:
        word = (top.to(tl.int64) << 32) | (0xFFFFFFFF - index)
        tl.store(out_ptr + rows * tl.num_programs(1) + tl.program_id(1), word, mask=rows < M)
    else:
        tl.store(out_ptr + rows, index, mask=rows < M)


@triton.jit
def best_word_kernel(words_ptr, y_ptr, splits, columns, SPLITS: tl.constexpr):  # words [M, splits], y [M]
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, SPLITS)
    # Padding repeats the last split. It ties with that split and has a larger index, so it never wins.
    words = tl.load(words_ptr + row * splits + tl.minimum(ids, splits - 1))
    key = words >> 32
    index = ids.to(tl.int64) * columns + (0xFFFFFFFF - (words & 0xFFFFFFFF))
    tl.store(y_ptr + row, tl.min(tl.where(key == tl.max(key), index, 0x7FFFFFFFFFFFFFFF)))


def argmax_groups(x):
    """[M, N] -> [M] int64, any shape. Deterministic."""
    y = _prepare(x)
    M, N = x.shape
    if M == 0:
        return y
    group = 16 // x.element_size()
    rows, warps = (2, 4) if N <= 2048 else (1, 8)
    block = 32 * warps // rows * group
    steps = triton.cdiv(N, block)
    unroll = min(4, triton.next_power_of_2(steps))
    programs = triton.cdiv(M, rows)
    # Eight programs of 8 warps fill an SM. A split has at least UNROLL steps, so that its loads outweigh its word. It
    # has at most 2^31 columns, because the index counts in 32 bits.
    splits = max(1, min(8 * num_sms() // programs, steps // unroll), triton.cdiv(N, 2**30))
    each = triton.cdiv(triton.cdiv(steps, splits), unroll) * unroll
    splits = triton.cdiv(steps, each)
    out = torch.empty(M, splits, dtype=torch.int64, device=x.device) if splits > 1 else y
    shape = {"ROWS": rows, "BLOCK": block, "GROUP": group, "UNROLL": unroll, "SPLIT": splits > 1}
    argmax_groups_kernel[(programs, splits)](x, out, M, N, x.stride(0), each, **shape, num_warps=warps)
    if splits > 1:
        best_word_kernel[(M,)](out, y, splits, each * block, SPLITS=triton.next_power_of_2(splits), num_warps=1)
    return y


def _prepare(x):
    # An index has no gradient, so x may require one.
    expect(x=x, ndim=2, unit_stride=True, differentiable=True)
    if x.shape[1] == 0:
        raise ValueError("x has no columns: the maximum of nothing has no index, so give it at least one")
    return torch.empty(x.shape[0], dtype=torch.int64, device=x.device)


# The answers: the argmax of a row of -inf is 0, the first of equal elements. A lane further right may have found the
# same value in an earlier step, at a smaller index.
LESSON = Lesson(
    about=About(
        teaches="a reduction that carries two numbers: ties and NaN as in PyTorch, floats as sortable integers",
        hours=0.75,
        operator="argmax",
        pictures=("argmax_lanes", "argmax_word"),
    ),
    problem=PROBLEM,
    rungs=(argmax_block, argmax_online, argmax_atomic, argmax_groups),
    predicted=(
        Prediction(rung=argmax_online, at={"M": 2048, "N": 131072}, percent_of_limit=100),
        Prediction(
            rung=argmax_atomic,
            at={"M": 64, "N": 1048576},
            percent_of_limit=100,
            why="Three more launches cost 8 us: so much longer than `argmax_online` it takes at 4096 x 4096. The other "
            "13 us may be too few loads in flight: 1088 programs are 8 for each SM, half of what `argmax_online` has "
            "at 2048 rows.",
        ),
        Prediction(rung=argmax_groups, at={"M": 4096, "N": 32768}, percent_of_limit=100),
    ),
    wrong=(
        Mutant("padding with 0", "argmax_block_kernel", '-float("inf")', "0.0", "argmax_block"),
        Mutant("negatives not flipped", "order_key", "bits ^ ((bits >> 31) & 0x7FFFFFFF)", "bits", "argmax_block"),
        Mutant("the last of equals wins", "keep_better", "~(x <= best)", "~(x < best)", "argmax_online"),
        Mutant("a lane too many", "argmax_online_kernel", "cols < N", "cols <= N", "argmax_online", "out of bounds"),
        Mutant("words start at 0", "argmax_atomic", "-(2**63)", "0", "argmax_atomic"),
        Mutant("index not inverted", "argmax_atomic_kernel", "(0xFFFFFFFF - index)", "index", "argmax_atomic"),
        Mutant("a group's first is its maximum", "argmax_groups_kernel", "(start + place)", "start", "argmax_groups"),
        Mutant("splits all start at column 0", "best_word_kernel", "ids.to(tl.int64) * columns", "0", "argmax_groups"),
    ),
    claims={argmax_groups: ("argmax_groups_kernel: 16-byte loads", "no spills")},
    passes={argmax_block: 1.0, argmax_online: 1.0, argmax_atomic: 1.0, argmax_groups: 1.0},
)

if __name__ == "__main__":
    LESSON.main()
