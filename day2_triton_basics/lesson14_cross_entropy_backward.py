"""Cross-entropy backward: recompute the softmax, do not keep it
=============================================================
The forward is loss = lse - x_target with lse = log(sum_j exp(x_j)), for each row x of logits [M, V]. So:

    dloss/dx_j = exp(x_j) / sum_i exp(x_i) - 1[j = target] = exp(x_j - lse) - 1[j = target]

where 1[j = target] is 1 at the target and 0 elsewhere. The first term is the softmax. Times the gradient that autograd
passes in, that is dlogits: MV elements to read, MV to write. The forward may save one of two things:

    what the forward saves     memory         the backward does
    the softmax, in fp32       4MV bytes      reads it
    lse, one value per row     4M bytes       reads x, and computes softmax(x) = exp(x - lse) again

The second costs one exponential per element and no memory. On an H200, at 4.2 TB/s, 8192 x 128,256 in bf16 (4.2 GB read
and written) takes at least 1.0 ms.

You will be able to: say what to save for a backward, and make an op with a gradient. Rung 3 is advanced: 16-byte
accesses in rows that start at odd addresses.
You need: lesson 13 (cross-entropy and lse).
Run it:    python3 course.py run lesson14_cross_entropy_backward
Check it:  python3 course.py check lesson14_cross_entropy_backward
Time it:   python3 course.py bench lesson14_cross_entropy_backward

Answer before you read on. What is the sum of a row of dlogits? V = 50,257 in bf16 (GPT-2): which rows start at a
multiple of 16 bytes?
"""

from lessonkit import About, Grad, Lesson, Mutant, Prediction, case, expect

import torch
import triton
import triton.language as tl

from problems.cross_entropy import PROBLEM, PROBLEM_BACKWARD, inputs_backward, logits_and_targets

IGNORE = tl.constexpr(-100)


# Rung 1. The softmax goes through memory: one kernel writes it (in a training step the forward would), a second one
# reads it and makes the gradient. It is kept in fp32, because p - 1, the target's gradient, has no digits left if p is
# near 1 and rounded to 16 bits.
# Predicted: 2 + 4 + 4 + 2 bytes per element in bf16 where 2 + 2 suffice, 3 times the least; and 4MV bytes of memory.
@triton.jit
def softmax_kernel(x_ptr, lse_ptr, p_ptr, V, stride_x, BLOCK: tl.constexpr):  # [M, V], [M], [M, V]
    row = tl.program_id(0).to(tl.int64)  # int64 before the multiplication: M * V may be past 2^31
    lse = tl.load(lse_ptr + row)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < V).to(tl.float32)
        tl.store(p_ptr + row * V + cols, tl.exp(x - lse), mask=cols < V)


@triton.jit
def gradient_kernel(p_ptr, targets_ptr, dloss_ptr, dx_ptr, V, stride_dx, BLOCK: tl.constexpr):  # p, dx: [M, V]
    row = tl.program_id(0).to(tl.int64)
    target, scale = target_and_scale(targets_ptr, dloss_ptr, row, V)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        p = tl.load(p_ptr + row * V + cols, mask=cols < V)
        tl.store(dx_ptr + row * stride_dx + cols, (p - (cols == target)) * scale, mask=cols < V)


@triton.jit
def target_and_scale(targets_ptr, dloss_ptr, row, V):
    """A row's target and dloss: 0 if the row is ignored, NaN if the target is no class, like the loss (lesson 13)."""
    target = tl.load(targets_ptr + row)
    dloss = tl.where((target >= 0) & (target < V), tl.load(dloss_ptr + row), float("nan"))
    return target, tl.where(target == IGNORE, 0.0, dloss)


def backward_saved(dloss, logits, targets, lse):
    """[M], [M, V], [M], [M] -> dlogits [M, V]; the softmax is written and read again."""
    dlogits, M, V = _prepare(dloss, logits, targets, lse)
    if dlogits.numel():
        p = torch.empty((M, V), dtype=torch.float32, device=logits.device)
        softmax_kernel[(M,)](logits, lse, p, V, logits.stride(0), BLOCK=4096, num_warps=8)
        gradient_kernel[(M,)](p, targets, dloss, dlogits, V, dlogits.stride(0), BLOCK=4096, num_warps=8)
    return dlogits


# Rung 2. New: the softmax is computed again where it is used.
# Predicted: 2MV elements, a third of the time in 16 bits, and no memory for p.
@triton.jit
def recompute_kernel(
    dloss_ptr, x_ptr, targets_ptr, lse_ptr, dx_ptr,  # [M], [M, V], [M], [M], [M, V]
    V, stride_x, stride_dx, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target, scale = target_and_scale(targets_ptr, dloss_ptr, row, V)
    lse = tl.load(lse_ptr + row)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < V).to(tl.float32)
        tl.store(dx_ptr + row * stride_dx + cols, (tl.exp(x - lse) - (cols == target)) * scale, mask=cols < V)


def backward_recomputed(dloss, logits, targets, lse):
    """[M], [M, V], [M], [M] -> dlogits [M, V]; one program per row."""
    dlogits, M, V = _prepare(dloss, logits, targets, lse)
    if dlogits.numel():
        recompute_kernel[(M,)](
            dloss, logits, targets, lse, dlogits, V, logits.stride(0), dlogits.stride(0), BLOCK=4096, num_warps=8
        )
    return dlogits


# Rung 3, advanced. New: 16-byte accesses in every row. With V = 50,257 only every eighth row starts at a multiple of 16
# bytes. So chunks of W elements are counted from the start of the tensor, not from the start of the row:
#
#     chunks of the tensor    | 24 .. 31 | 32 .. 39 | 40 .. 47 | 48 .. 55 |      W = 8 elements in bf16
#     row 1 of V = 27             27 .. 31 | 32 .. 39 | 40 .. 47 | 48 .. 53
#                                  singly    16 bytes   16 bytes   singly
#
# A chunk that lies across two rows is written element by element, because its other part belongs to another program.
#
# And there is no loop. Nothing is carried along a row, so it is cut into blocks. A block is one warp with 4 chunks per
# thread, 1024 elements in bf16. At 72 registers per thread an SM holds 28 such programs, with 56 KB in flight. By
# Little's law 25 KB are enough.
# Predicted: copy speed at every V, odd and short ones too.
@triton.jit
def wide_kernel(
    dloss_ptr, x_ptr, targets_ptr, lse_ptr, dx_ptr,  # x and dx lie at multiples of W elements
    V, stride_x, stride_dx, BLOCKS, LANES: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    target, scale = target_and_scale(targets_ptr, dloss_ptr, row, V)
    lse = tl.load(lse_ptr + row)
    begin = row * stride_x
    first = (begin + W - 1) // W  # of the chunks wholly inside the row, and `after` the last
    after = (begin + V) // W
    # The same chunk in dx: the host lets the rows of both start at the same place within a chunk.
    first_dx = (row * stride_dx + W - 1) // W
    chunks = block * LANES + tl.arange(0, LANES)[:, None]
    offsets = chunks * W + tl.arange(0, W)[None, :]
    inside = chunks < after - first
    x = tl.load(x_ptr + first * W + offsets, mask=inside).to(tl.float32)
    hit = offsets == (target - (first * W - begin)).to(tl.int32)
    tl.store(dx_ptr + first_dx * W + offsets, (tl.exp(x - lse) - hit) * scale, mask=inside)
    if block == 0:
        # The elements before the first chunk and those after the last. tl.maximum: in a row that lies within one chunk
        # these must not be the same.
        side = tl.arange(0, 2 * W)
        cols = tl.where(side < W, (first - 1) * W, (tl.maximum(first, after) - 1) * W) + side - begin
        mine = (cols >= 0) & (cols < V)
        edge = tl.load(x_ptr + begin + cols, mask=mine).to(tl.float32)
        tl.store(dx_ptr + row * stride_dx + cols, (tl.exp(edge - lse) - (cols == target)) * scale, mask=mine)


def backward_wide(dloss, logits, targets, lse, *, in_place=False):
    """[M], [M, V], [M], [M] -> dlogits [M, V]; in_place=True: over the logits, which are lost."""
    dlogits, M, V = _prepare(dloss, logits, targets, lse, in_place)
    if dlogits.numel():
        w = 16 // logits.element_size()
        if logits.data_ptr() % 16 or dlogits.data_ptr() % 16 or (logits.stride(0) - dlogits.stride(0)) % w:
            w = 1  # no chunk is aligned in both: a chunk is one element, slow and right
        lanes, blocks = 128, triton.cdiv(V, 128 * w)  # four chunks per thread of one warp
        args = dloss, logits, targets, lse, dlogits, V, logits.stride(0), dlogits.stride(0), blocks
        wide_kernel[(M * blocks,)](*args, lanes, w, num_warps=1)
    return dlogits


def _prepare(dloss, logits, targets, lse, in_place=False):
    expect(logits=logits, ndim=2, unit_stride=True)
    expect(dloss=dloss, lse=lse, ndim=1, dtypes=(torch.float32,), contiguous=True)
    expect(targets=targets, ndim=1, dtypes=(torch.int64,), contiguous=True)
    M, V = logits.shape
    for name, t in (("dloss", dloss), ("targets", targets), ("lse", lse)):
        if len(t) != M:
            raise ValueError(f"{name} has {len(t)} rows, but logits has {M}: pass one {name} per row")
    overlap = M > 1 and logits.stride(0) < V  # an expanded tensor: its rows share memory
    if in_place and overlap:
        raise ValueError("logits has rows that share memory, and cannot be overwritten: pass logits.contiguous()")
    if in_place:
        return logits, M, V
    # Rows as far apart as those of the logits, so that both start at the same place within a chunk.
    stride = V if overlap else logits.stride(0)
    return torch.empty_strided((M, V), (stride, 1), dtype=logits.dtype, device=logits.device), M, V


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, in_place):
        loss, lse = PROBLEM.reference(logits, targets)  # in PyTorch: course_ops.cross_entropy has kernels for both
        ctx.save_for_backward(logits, targets, lse)
        ctx.in_place = in_place
        return loss

    @staticmethod
    def backward(ctx, dloss):
        logits, targets, lse = ctx.saved_tensors
        return backward_wide(dloss.contiguous(), logits.detach(), targets, lse, in_place=ctx.in_place), None, None


def cross_entropy(logits, targets, in_place=False):
    """[M, V], [M] -> loss [M] in fp32, with a gradient.

    in_place: the backward writes dlogits over the logits, which saves MV elements of memory. Only for the last op of a
    model and for one backward: afterwards the logits are lost, and autograd does not notice.
    """
    return _CrossEntropy.apply(logits, targets, in_place)


def usual(logits, targets):
    """What autograd is compared with. In fp32, the loss's dtype here."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(x, targets, reduction="none")


def in_place_is_the_same(rung):
    """With in_place=True the answer lies where the logits were."""
    if rung is backward_wide:
        dloss, x, targets, lse = inputs_backward(5, 1153)
        expected = rung(dloss, x, targets, lse)
        assert rung(dloss, x, targets, lse, in_place=True).data_ptr() == x.data_ptr()
        assert torch.equal(x, expected)


_WRONG = (
    Mutant("target one column off", "gradient_kernel", "cols == target", "cols == target + 1", "backward_saved"),
    Mutant("lse forgotten", "recompute_kernel", "x - lse", "x", "backward_recomputed"),
    Mutant("dloss not applied to the target", "recompute_kernel", "(tl.exp(x - lse) - (cols == target)) * scale",
           "tl.exp(x - lse) * scale - (cols == target)", "backward_recomputed"),
    Mutant("ignored rows have a gradient", "target_and_scale", "IGNORE, 0.0", "IGNORE, 1.0", "backward_recomputed"),
    Mutant("row tail unwritten", "recompute_kernel", "(0, V, ", "(0, V - BLOCK + 1, ", "backward_recomputed", "nan"),
    Mutant("edges unwritten", "wide_kernel", "block == 0", "block == 1", "backward_wide", "nan"),
    Mutant("head counted from the chunk", "wide_kernel", "target - (first * W - begin)", "target", "backward_wide"),
    Mutant("a chunk too many", "wide_kernel", "chunks < after", "chunks <= after", "backward_wide", "out of bounds"),
    Mutant("writes over its input", "backward_wide", "lse, in_place)", "lse, True)", "backward_wide", "changed input"),
)  # fmt: skip

# The answers: a row of dlogits sums to 0, since the softmax sums to 1 and the target takes 1 away. Every eighth row
# starts at a multiple of 16 bytes: a row is 100,514 bytes, 2 more than such a multiple.
LESSON = Lesson(
    about=About(
        teaches="the softmax computed again from the logits and one value per row; rows that start at odd addresses",
        hours=0.75,
        operator="cross-entropy backward",
        pictures=("traffic",),
    ),
    problem=PROBLEM_BACKWARD,
    rungs=(backward_saved, backward_recomputed, backward_wide),
    predicted=(
        Prediction(rung=backward_saved, at={"M": 8192, "V": 128256}, percent_of_limit=33),
        Prediction(rung=backward_recomputed, at={"M": 8192, "V": 128256}, times=3, over=backward_saved),
        Prediction(rung=backward_wide, at={"M": 4096, "V": 50257}, percent_of_limit=100),
        Prediction(rung=backward_wide, at={"M": 32768, "V": 1024}, percent_of_limit=100),
    ),
    checks=(
        *PROBLEM_BACKWARD.checks,
        case("several blocks, and a stride that is not V", M=3, V=9001, pad=3),
    ),
    wrong=_WRONG,
    claims={backward_wide: ("16-byte loads", "16-byte stores", "no spills", "no shared memory")},
    passes={backward_saved: 3.0, backward_recomputed: 1.0, backward_wide: 1.0},
    properties=(*PROBLEM_BACKWARD.properties, in_place_is_the_same),
    grad=Grad(cross_entropy, usual, logits_and_targets),
)

if __name__ == "__main__":
    LESSON.main()
