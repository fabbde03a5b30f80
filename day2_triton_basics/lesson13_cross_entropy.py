"""Cross-entropy: read the logits once, write almost nothing
========================================================
loss = log(sum_j exp(x_j)) - x_target for each row of logits [M, V], the scores of V classes. It reads MV elements and
writes two per row.

    two kernels    the logits are read three times, the log-softmax is written in fp32    10 bytes per element in bf16
    one kernel     the row is reduced, and the target's logit is loaded with it            2 bytes per element

On an H200, at 4.2 TB/s, 8192 x 128,256 in bf16 (2.1 GB, Llama 3's vocabulary) takes at least 0.5 ms.

The loss is fp32 for every dtype of the logits, as under autocast: in bf16 a loss would have 8 significant bits. The
second result, lse = log(sum_j exp(x_j)), is all that the backward needs (lesson 14). A target is a class, or -100,
which means that the row is ignored and its loss is 0. Any other target raises in PyTorch on the CPU. On a GPU it is a
device-side assert, after which every CUDA call of the process fails. Here its loss is NaN.

New words (GLOSSARY.md): lse.
You will be able to: fuse a gather (a load at an index that is data) into a reduction, and keep the statistics of an
online loop per lane.
You need: lesson 5 (softmax and its online loop). course_ops.cross_entropy has the kernels for odd and for few rows.
Source of rung 3: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
Run it:    python3 course.py run lesson13_cross_entropy
Check it:  python3 course.py check lesson13_cross_entropy
Time it:   python3 course.py bench lesson13_cross_entropy

Answer before you read on. Logits near 1000: how many digits of log(sum exp) - x_target does fp32 keep? How many
exponentials per element does the online loop of lesson 5 need, if every lane has its own maximum?
"""

import math

from lessonkit import About, Lesson, Mutant, Prediction, Unsupported, case, expect

import torch
import triton
import triton.language as tl

from problems.cross_entropy import PROBLEM

IGNORE = tl.constexpr(-100)
LOG2E = tl.constexpr(math.log2(math.e))
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of fp32


# Rung 1. As PyTorch does it: a kernel writes the log-softmax, and a second one picks one element of each row. m is
# subtracted because exp overflows fp32 past 88.7.
# Predicted: three reads of 2 bytes and a write of 4 per element, 10 bytes where 2 suffice: a fifth of a copy's speed.
# Caches may serve the second and third read of a short row.
@triton.jit
def log_softmax_kernel(x_ptr, log_p_ptr, lse_ptr, V, stride_x, BLOCK: tl.constexpr):  # x, log_p: [M, V], lse: [M]
    row = tl.program_id(0).to(tl.int64)  # int64 before the multiplication: M * V may be past 2^31
    x_ptr += row * stride_x
    lanes = tl.arange(0, BLOCK)
    m = LOWEST  # not -inf: -inf - -inf is NaN
    for i in range(0, V, BLOCK):
        # Padding lanes hold -inf: a 0 there would be the maximum of every negative row.
        x = tl.load(x_ptr + i + lanes, mask=i + lanes < V, other=-float("inf")).to(tl.float32)
        m = tl.maximum(m, tl.max(x, axis=0))
    s = 0.0
    for i in range(0, V, BLOCK):
        x = tl.load(x_ptr + i + lanes, mask=i + lanes < V, other=-float("inf")).to(tl.float32)
        s += tl.sum(tl.exp(x - m), axis=0)
    log_s = log_of_sum(s)
    tl.store(lse_ptr + row, m + log_s)
    for i in range(0, V, BLOCK):
        x = tl.load(x_ptr + i + lanes, mask=i + lanes < V).to(tl.float32)
        tl.store(log_p_ptr + row * V + i + lanes, x - m - log_s, mask=i + lanes < V)


@triton.jit
def log_of_sum(s):
    # s = 0 only if the whole row is -inf: PyTorch's softmax divides 0 by 0 there.
    return tl.where(s > 0, tl.log(s), float("nan"))


@triton.jit
def pick_kernel(log_p_ptr, targets_ptr, loss_ptr, M, V, BLOCK: tl.constexpr):  # [M, V], [M], [M]
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target, log_p = target_value(log_p_ptr, targets_ptr, rows, M, V, V)
    tl.store(loss_ptr + rows, tl.where(target == IGNORE, 0.0, -log_p), mask=rows < M)


@triton.jit
def target_value(x_ptr, targets_ptr, row, M, V, stride_x):
    """The target of a row (or of several) and x there. A target that is no class gives NaN and no load."""
    target = tl.load(targets_ptr + row, mask=row < M, other=IGNORE)
    inside = (target >= 0) & (target < V)
    x = tl.load(x_ptr + row.to(tl.int64) * stride_x + target, mask=inside, other=float("nan"))
    return target, x.to(tl.float32)


def cross_entropy_unfused(logits, targets):
    """[M, V], [M] -> loss [M], lse [M]; two kernels, and an fp32 [M, V] between them."""
    loss, lse, M, V = _prepare(logits, targets)
    if M:
        log_p = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        log_softmax_kernel[(M,)](logits, log_p, lse, V, logits.stride(0), BLOCK=1024)
        pick_kernel[(triton.cdiv(M, 128),)](log_p, targets, loss, M, V, BLOCK=128)
    return loss, lse


# Rung 2. New: the row stays in registers. The target's logit is one element more to load. Its load is issued first, so
# it arrives along with the row.
# Predicted: MV elements, a fifth of the bytes and of the time. Rows end at 65,536 columns.
@triton.jit
def row_kernel(
    x_ptr, targets_ptr, loss_ptr, lse_ptr,  # [M, V], [M], [M], [M]
    M, V, stride_x, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    target, logit = target_value(x_ptr, targets_ptr, rows, M, V, stride_x)
    mask = (rows < M)[:, None] & (cols < V)[None, :]
    offsets = rows.to(tl.int64)[:, None] * stride_x + cols[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=-float("inf")).to(tl.float32)
    m = tl.maximum(tl.max(x, axis=1), LOWEST)
    # tl.exp takes extra instructions for results below 1e-38. Beside the maximum's 1 these count as 0: tl.exp2 will do.
    s = tl.sum(tl.exp2((x - m[:, None]) * LOG2E), axis=1)
    finish(m, s, target, logit, loss_ptr, lse_ptr, rows, M)


@triton.jit
def finish(m, s, target, logit, loss_ptr, lse_ptr, row, M):
    log_s = log_of_sum(s)
    tl.store(lse_ptr + row, m + log_s, mask=row < M)
    # Not lse - logit: the difference of two fp32 values near 1000 has 4 digits.
    tl.store(loss_ptr + row, tl.where(target == IGNORE, 0.0, log_s - (logit - m)), mask=row < M)


def cross_entropy_row(logits, targets, *, rows=1):
    """[M, V], [M] -> loss [M], lse [M]; a program holds whole rows of at most 65,536 columns."""
    loss, lse, M, V = _prepare(logits, targets)
    if V > 65536:
        raise Unsupported("rows past 65,536: 1024 threads with 64 fp32 elements each are the whole register file")
    if M:
        block = triton.next_power_of_2(V)
        grid, warps = (triton.cdiv(M, rows),), max(1, min(32, block // 1024))
        row_kernel[grid](logits, targets, loss, lse, M, V, logits.stride(0), rows, block, num_warps=warps)
    return loss, lse


# Rung 3. New: any V, in one pass, by the online loop of lesson 5: it keeps m and s, and rescales s when m grows. Here
# every lane keeps its own m and s. With one maximum per block, all warps would wait for each other in every step.
#
#     step 0    [ x0   x1   x2   x3 ]      lane i has seen x_i                        m_i, s_i
#     step 1    [ x4   x5   x6   x7 ]      lane i has seen x_i and x_(i+4)            m_i, s_i
#     the end   m = max(m_i)               s = sum of s_i exp(m_i - m)                one pair for the row
#
# The pairs may be merged in any order, so once at the end is enough.
# Predicted: MV elements at any V, but 2 exponentials per element. An SM computes 16 per cycle. At 4.2 TB/s and 1.75 GHz
# memory brings it 9 bf16 elements per cycle, which need 18. So 16/18, 89% of memory speed.
@triton.jit
def online_kernel(x_ptr, targets_ptr, loss_ptr, lse_ptr, M, V, stride_x, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    target, logit = target_value(x_ptr, targets_ptr, row, M, V, stride_x)
    m = tl.full([BLOCK], LOWEST, tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row.to(tl.int64) * stride_x + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, x)
        s = s * tl.exp(m - m_new) + tl.exp(x - m_new)
        m = m_new
    top = tl.max(m, axis=0)
    finish(top, tl.sum(s * tl.exp(m - top), axis=0), target, logit, loss_ptr, lse_ptr, row, M)


def cross_entropy_online(logits, targets):
    """[M, V], [M] -> loss [M], lse [M]; one program per row of any length, 16 elements per thread in each step."""
    loss, lse, M, V = _prepare(logits, targets)
    if M:
        block = min(4096, triton.next_power_of_2(V))
        warps = max(1, block // 512)
        online_kernel[(M,)](logits, targets, loss, lse, M, V, logits.stride(0), block, num_warps=warps)
    return loss, lse


def online_model(logits, targets, block=16):
    """[M, V], [M] -> loss [M], lse [M]: the loop of online_kernel in plain PyTorch, to step through in a debugger."""
    M, V = logits.shape
    loss, lse = logits.new_empty(2, M, dtype=torch.float32)
    for row in range(M):
        m = lse.new_full([block], LOWEST.value)
        s = lse.new_zeros(block)
        for start in range(0, V, block):
            x = lse.new_full([block], -math.inf)
            x[: V - start] = logits[row, start : start + block].float()
            m_new = torch.maximum(m, x)
            s = s * torch.exp(m - m_new) + torch.exp(x - m_new)
            m = m_new
        top = m.max()
        log_s = (s * torch.exp(m - top)).sum().log()
        lse[row] = top + log_s
        loss[row] = 0.0 if targets[row] == IGNORE.value else log_s - (logits[row, targets[row]].float() - top)
    return loss, lse


def _prepare(logits, targets):
    """Check the arguments; return loss [M], lse [M], both to be filled, and M, V."""
    expect(logits=logits, ndim=2, unit_stride=True)
    expect(targets=targets, ndim=1, dtypes=(torch.int64,), contiguous=True)
    M, V = logits.shape
    if len(targets) != M:
        raise ValueError(f"targets has {len(targets)} rows, but logits has {M}: pass one target per row")
    if M and not V:
        raise ValueError("logits has no classes (0 columns): pass one at least")
    loss, lse = torch.empty(2, M, dtype=torch.float32, device=logits.device)
    return loss, lse, M, V


_WRONG = (
    Mutant("no maximum: exp overflows", "row_kernel", "x - m[:, None]", "x", "cross_entropy_row"),
    Mutant("the last targets are not picked", "cross_entropy_unfused", "triton.cdiv(M, 128)", "M // 128",
           "cross_entropy_unfused", "nan"),
    Mutant("lse without the maximum", "log_softmax_kernel", "m + log_s", "log_s", "cross_entropy_unfused"),
    Mutant("lanes past the end count as 0", "row_kernel", 'other=-float("inf")', "other=0.0", "cross_entropy_row"),
    Mutant("an ignored row has a loss", "finish", "target == IGNORE", "target == 100", "cross_entropy_row", "nan"),
    Mutant("two large numbers subtracted", "finish", "log_s - (logit - m)", "m + log_s - logit", "cross_entropy_row"),
    Mutant("s not rescaled", "online_kernel", "s * tl.exp(m - m_new)", "s", "cross_entropy_online"),
    Mutant("lanes merged as if they agreed", "online_kernel", "s * tl.exp(m - top)", "s", "cross_entropy_online"),
)  # fmt: skip

# The answers: fp32 keeps 4 digits of the difference of two values near 1000. With a maximum for every lane an element
# needs two exponentials: one of x, one that rescales s.
LESSON = Lesson(
    about=About(
        teaches="a pick fused into a reduction: read the logits once, write almost nothing",
        hours=0.75,
        operator="cross-entropy",
        pictures=("online_softmax", "traffic"),
    ),
    problem=PROBLEM,
    rungs=(cross_entropy_unfused, cross_entropy_row, cross_entropy_online),
    predicted=(
        Prediction(rung=cross_entropy_unfused, at={"M": 4096, "V": 32768}, percent_of_limit=20),
        Prediction(
            rung=cross_entropy_row,
            at={"M": 4096, "V": 32768},
            times=5,
            over=cross_entropy_unfused,
            why="An SM holds one such program, 32 warps of 52 registers, so it loads nothing while it computes. It "
            "needs 2.1 us for a row's bytes at its share of 4.2 TB/s, and 1.7 us to issue 390 instructions in each "
            "warp.",
        ),
        Prediction(
            rung=cross_entropy_online,
            at={"M": 8192, "V": 128256},
            percent_of_limit=89,
            why="The loop has 18 instructions per element on sm_90, so an SM issues enough for 7.1 elements per cycle "
            "and not for 9: 79% of memory speed before any wait.",
        ),
    ),
    checks=(
        *PROBLEM.checks,
        case("five blocks, and a stride that is not V", M=3, V=20480, pad=3, strange=True),
    ),
    wrong=_WRONG,
    claims={cross_entropy_online: ("no spills",)},
    passes={cross_entropy_unfused: 5.0, cross_entropy_row: 1.0, cross_entropy_online: 1.0},
    cpu_model=online_model,
)

if __name__ == "__main__":
    LESSON.main()
