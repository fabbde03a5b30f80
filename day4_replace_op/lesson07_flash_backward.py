"""Flash attention, backward: dK and dV by blocks of keys, and the op that a model calls
====================================================================================
dV = P^T dO and dK = scale dS^T Q, with P and dS as in lesson 6, are sums over queries. So a program owns a block of
keys: it keeps K and V, sweeps the queries that see them, and computes P and dS a second time.

    P and dS of one causal head in blocks: x computed, m computed and masked, . not visible to any query

                 keys ->                                    keys ->
    query    row 0   m . . .                   query    row 0   m . . .
             row 1   x m . .   a program of             row 1   x m . .   a program of dkdv_kernel owns a column:
             row 2   x x m .   dq_kernel owns a row:    row 2   x x m .   it sweeps queries, downwards from the
             row 3   x x x m   it sweeps keys ->        row 3   x x x m   diagonal, and adds to dK and dV

Budget. One kernel could do dQ too, with five matmuls in all, 10 S^2 D FLOPs per head. But then the programs of all keys
add to the same dQ, by atomics, in another order each time. Here each sum has one owner, which adds in one order, and
two runs agree to the bit. The price is seven matmuls, three in dq_kernel and four in dkdv_kernel. The rate counts five,
as is customary: at cuBLAS's 790 TFLOP/s these two kernels reach at most 5/7 of it, 564. HBM traffic does not decide: at
S = 512 there are 320 FLOPs for each byte of the eight tensors, at longer S more, and 190 keep the tensor cores busy. A
block of 128 x 128 scores at D = 128, in cycles of an SM:

    seven matmuls                                 7 * 1024
    exponentials, in both kernels                 2 * 1024
    three instructions per score, lesson 6, twice   2 * 384      9984 with nothing overlapped, for 5120 that count:
                                                               790 * 5120 / 9984 = 405 TFLOP/s

Each rung is a complete file in flash_backward/, and its new lines are marked `# New:`; `diff` two neighbours.

    masked.py               every block of scores is computed and masked
    skipped.py              causal: blocks that no query sees are skipped. Predicted: of 32 blocks per row at S = 4096
                            16.5 are left, 1.94 times as fast
    transposed.py           dkdv_kernel computes K Q^T and V dO^T, which are [keys, queries], so that P^T and dS^T lie
                            in registers where the next wgmma reads its left operand. Before, 128 x 64 elements went
                            through shared memory twice a step, written and read: 64 KB, 500 cycles at 128 bytes a
                            cycle, beside 2048 of matmuls. Predicted: a fifth less time
    attention_backward.py   TMA: one thread issues the copies. Predicted: between the two rates above

Grouped heads need no atomics either: dK and dV are sums over the heads of a group, and the program visits these heads
one after the other. Refused, since course_ops.attention takes it: windows, other lengths and head sizes, strides.

Before you read on: in which order do programs of dkdv_kernel start, so that the long ones come first? Which of the two
kernels needs more registers per thread, and for what?

You will learn: which program owns a sum, operands that need no transpose, a differentiable op, why a second derivative
has to be refused.
Source: Dao 2023, FlashAttention-2, algorithm 2, its loop over key blocks without the update of dQ.
Run it:    python3 course.py run lesson07_flash_backward
Check it:  python3 course.py check lesson07_flash_backward
Time it:   python3 course.py bench lesson07_flash_backward
Compare:   diff day4_replace_op/flash_backward/skipped.py day4_replace_op/flash_backward/transposed.py
"""

from lessonkit import About, Grad, Lesson, Mutant, Prediction, Refusal, Unsupported, case, device

import torch
from torch.autograd.function import once_differentiable

from course_ops import attention_forward
from day4_replace_op.flash_backward.attention_backward import attention_backward
from day4_replace_op.flash_backward.masked import masked
from day4_replace_op.flash_backward.skipped import skipped
from day4_replace_op.flash_backward.transposed import transposed
from problems.attention import PROBLEM, PROBLEM_BACKWARD, inputs, inputs_backward


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, window, scale):
        out, lse = attention_forward(q, k, v, causal=causal, window=window, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)  # S^2 probabilities are not saved: lse is 4 bytes per query
        ctx.options = causal, window, scale
        return out

    @staticmethod
    @once_differentiable  # a second derivative would silently leave out what these kernels depend on: an error instead
    def backward(ctx, grad_out):
        rung = attention_backward if device.architecture() >= 90 else transposed
        return *rung(grad_out.contiguous(), *ctx.saved_tensors, *ctx.options), None, None, None


def flash_attention(q, k, v, causal=False, window=None, scale=None):
    """q [B, H, S, D], k, v [B, H_kv, S, D] -> out [B, H, S, D], differentiable once, for what the rungs take."""
    return _Attention.apply(q, k, v, causal, window, scale)


def usual(q, k, v, causal=False, window=None, scale=None):
    return PROBLEM.reference(q, k, v, causal, window, scale)[0]


def same_each_time(rung):
    """Two runs agree to the bit: every sum has one owner, which adds in one order. (Atomics on dq would not.)"""
    args = inputs_backward(1, 4, 128, 16, H_kv=1, causal=True, dtype=torch.float16)
    assert all(torch.equal(a, b) for a, b in zip(rung(*args), rung(*args), strict=True))


def what_is_not_seen_has_no_gradient(rung):
    """P's rows sum to 1, so dV sums to what dO sums to. Causal: if only queries up to 99 have a gradient, keys from 100
    on have none."""
    grad_out, *rest = inputs_backward(1, 2, 256, 16, causal=True)
    torch.testing.assert_close(rung(grad_out, *rest)[2].sum(2), grad_out.sum(2), rtol=1e-4, atol=1e-4)
    grad_out[:, :, 100:] = 0
    dk, dv = rung(grad_out, *rest)[1:]
    assert [int((t != 0).any(-1).nonzero()[:, -1].max()) for t in (dk, dv)] == [99, 99]


def the_second_derivative_is_refused(rung):
    """Asked for one, autograd raises an error, and does not answer without the part that these kernels depend on."""
    q, k, v, *_ = inputs(1, 1, 128, 16)
    loss = flash_attention(q.requires_grad_(), k, v).square().sum()
    (dq,) = torch.autograd.grad(loss, q, create_graph=True)
    said = ""
    try:
        dq.sum().backward()
    except RuntimeError as error:
        said = str(error)
    assert "once_differentiable" in said


# fmt: off
WRONG = (
    Mutant("delta left out", "dkdv_kernel", "- delta[:, None]", "- 0 * delta[:, None]", "masked"),
    Mutant("no scale", "dkdv_kernel", "dk * scale", "dk", "masked"),
    Mutant("P where dS belongs", "dkdv_kernel", "v, do.T, input_precision=PRECISION) - delta[None, :])  # New\n"
           "            dv", "v, do.T, input_precision=PRECISION) * 0 + 1)\n            dv", "transposed"),
    Mutant("lse past the end is read", "dkdv_kernel", "lse_ptr + head + rows", "lse_ptr + head + 1 + rows", "masked",
           "out of bounds"),
    Mutant("the diagonal is not masked", "dkdv_kernel", "keys[None, :] <= rows[:, None]", "keys[None, :] <= S",
           "skipped"),
    Mutant("a block of queries too few", "dkdv_kernel", "range(key + KEYS if", "range(key + KEYS + QUERIES if",
           "skipped"),
    Mutant("one head for its whole group", "dkdv_kernel", "range(GROUP)", "range(1)", "transposed"),
    Mutant("the last group as large as the others", "dkdv_kernel",
           "tl.minimum(HEADS, tl.num_programs(0) // tiles - group * HEADS)", "HEADS", "skipped", "out of bounds"),
    Mutant("the diagonal's queries are those after it", "dkdv_kernel", "range(key, key + KEYS, QUERIES)",
           "range(key + QUERIES, key + KEYS, QUERIES)", "attention_backward"),
    Mutant("each head has keys of its own", "dq_kernel", "head // GROUP * S", "head * S", "masked", "out of bounds"),
    Mutant("dQ's diagonal is left out", "dq_kernel", "range(row, row + QUERIES, KEYS)", "range(row, row, KEYS)",
           "skipped"),
    Mutant("delta of dO alone", "delta_kernel", "o.to(tl.float32) * do", "do", "masked"),
)
CHECKS = (
    case("one block of keys", B=1, H=2, S=128, D=16),
    case("heads in groups of two, a scale", B=2, H=4, S=128, D=16, H_kv=2, causal=True, scale=0.3),
    case("three heads, of which two at once fit into the interpreter's L2 in 16 bits: a last group of one",
         B=1, H=3, S=256, D=16, causal=True),
    case("one K and V for all heads, all keys", B=1, H=3, S=256, D=32, H_kv=1),
    case("D = 64, causal", B=1, H=1, S=128, D=64, causal=True),
    case("D = 128, several tiles", B=1, H=1, S=256, D=128, causal=True),
    case("three tiles and more for each SM", gib=0.9, B=2, H=34, S=1024, D=128, H_kv=17, causal=True),
    case("the bytes are counted here: the diagonal and whole tiles", B=1, H=1, S=256, D=16, causal=True),
)
# fmt: on

AT = {"B": 4, "H": 16, "S": 4096, "D": 128, "causal": True}
LONG = {"B": 1, "H": 16, "S": 16384, "D": 128, "causal": True}

# The answers: in the order of their keys, since the first keys are seen by most queries. dkdv_kernel needs more
# registers. It keeps two sums, dK and dV, and dq_kernel keeps dQ alone.
LESSON = Lesson(
    about=About(
        teaches="dK and dV, whose owner is a block of keys; no atomics, no transposes; the differentiable op",
        hours=1.75,
        star=True,
        operator="attention backward",
        pictures=("backward_sweeps",),
    ),
    problem=PROBLEM_BACKWARD,
    rungs=(masked, skipped, transposed, attention_backward),
    predicted=(
        Prediction(
            rung=skipped,
            at=AT,
            times=1.94,
            over=masked,
            why="The mask itself is dear: all keys at S = 2048 take 3.6 ms, so twice as many blocks 7.3 ms, but masked "
            "they take 8.2.",
        ),
        Prediction(
            rung=transposed,
            at=AT,
            times=1.25,
            over=skipped,
            why="The transposes also cost registers: on sm_90 dkdv_kernel spills 227 of them in `skipped`, and 4 here.",
        ),
        Prediction(
            rung=attention_backward,
            at=LONG,
            tflop_per_s=(405, 564),  # 405 if nothing overlaps, 564 if everything does
        ),
    ),
    checks=CHECKS,
    wrong=WRONG,
    refuses=(
        *PROBLEM_BACKWARD.refuses,
        Refusal(
            "a window",
            lambda f: f(*inputs_backward(1, 1, 128, 16, causal=True, window=9)),
            Unsupported,
            "course_ops.attention",
        ),
        Refusal("an odd length", lambda f: f(*inputs_backward(1, 1, 100, 16)), Unsupported, "S a multiple of 128"),
    ),
    claims={
        # At D = 64, where GROUP = 1 leaves no loop over heads. `skipped` at D = 128 too, for want of registers.
        masked: ("dkdv_kernel: serialized wgmma",),
        skipped: ("dkdv_kernel: serialized wgmma",),
        transposed: ("dkdv_kernel: wgmma", "dq_kernel: wgmma"),
        attention_backward: ("dkdv_kernel: wgmma", "dkdv_kernel: tma"),
    },
    # Parts of S D elements: lesson 6's 9 or 8 and its rows; K, V, dK and dV, and Q and dO for both blocks of keys or
    # 1.5 times, with their two values per row. Of 8 parts and lse.
    passes={
        masked: (9 + 3 / 8 + 4 + 4 + 4 / 8) / 8.125,
        skipped: (8 + 3 / 8 + 4 + 3 + 3 / 8) / 8.125,
        attention_backward: (8 + 3 / 8 + 4 + 3 + 3 / 8) / 8.125,
    },
    properties=(same_each_time, what_is_not_seen_has_no_gradient, the_second_derivative_is_refused),
    grad=Grad(flash_attention, usual, inputs, factor=1.25),  # 2.3 times the usual budget was seen on a GPU
)

if __name__ == "__main__":
    LESSON.main()
