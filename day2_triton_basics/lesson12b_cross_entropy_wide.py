"""Cross-entropy at the speed of memory: any width, any number of rows
===================================================================
Lesson 12's online kernel reads each logit once and still waits for other things than memory: two exponentials an
element; 2-byte loads where V is odd (GPT-2's is 50,257); too few programs where rows are few, too large ones where
rows are short. Here each of them goes.
The bytes stay the same: at 4.2 TB/s, 4096 x 50,257 in bf16 (412 MB) cannot take less than 0.098 ms.

You will learn: aligned loads of rows that start at odd addresses, loads ahead of use, fitting programs to the shape.
Run it:    python day2_triton_basics/lesson12b_cross_entropy_wide.py
Check it:  python -m lessonkit check lesson12b_cross_entropy_wide
Time it:   python -m lessonkit bench lesson12b_cross_entropy_wide
"""

import math

from lessonkit import About, Lesson, Mutant, case, expect, num_sms

import torch
import triton
import triton.language as tl

from problems.cross_entropy import PROBLEM

IGNORE = tl.constexpr(-100)
LOG2E = tl.constexpr(math.log2(math.e))
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of fp32


# Rung 1. New, against lesson 12's online kernel:
# - A lane owns W neighbours, 16 bytes, and takes their maximum first: 1 + 1/W exponentials an element instead of 2.
# - Chunks of W are counted from the start of the tensor and not of the row. With an odd V most rows start where the
#   hardware has no wide load. Here the chunks wholly inside a row are loaded whole (their offset is W times an integer,
#   so the compiler sees that they are aligned), and the few elements on either side of them singly.
# - num_stages=3: while one step's chunks are added up, those of the next two are on their way to shared memory.
# Predicted: the speed of memory at every V, odd ones too, where rows are many and long. Where they are not, a program's
# first and last moments count: nothing is under way yet, or 8 warps meet to make one sum of theirs.
@triton.jit
def wide_kernel(
    x_ptr, targets_ptr, loss_ptr, lse_ptr,  # [M, V] at a multiple of W elements, [M], [M], [M]
    notes_ptr,  # [2, M, PARTS], if PARTS > 1 (rung 2): m and s of each part of a row
    M, V, stride_x, PARTS: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    if PARTS == 1:
        target, logit = target_value(x_ptr, targets_ptr, row, M, V, stride_x)
    begin = row.to(tl.int64) * stride_x
    end = begin + V
    first = (begin + W - 1) // W  # of the chunks wholly inside the row, and `after` the last
    after = end // W
    each = tl.cdiv(tl.maximum(after - first, 0), PARTS).to(tl.int32)
    n = tl.minimum(each, (after - first).to(tl.int32) - part * each)
    lanes = tl.arange(0, LANES)[:, None]
    chunks_ptr = x_ptr + (first + part * each) * W + lanes * W + tl.arange(0, W)[None, :]
    # The W elements before the chunks and those after; in a row that lies within one chunk these are not the same.
    side = tl.arange(0, 2 * W)
    side = tl.where(side < W, (first - 1) * W, (tl.maximum(first, after) - 1) * W) + side
    mine = (side >= tl.where(part == 0, begin, end)) & (side < end)  # part 0 takes them, once
    edge = tl.load(x_ptr + side, mask=mine, other=-float("inf")).to(tl.float32)
    m = tl.full([LANES], LOWEST, tl.float32)
    s = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, n, LANES, num_stages=STAGES):
        x = tl.load(chunks_ptr + start * W, mask=start + lanes < n, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, axis=1))
        s = s * tl.exp2((m - m_new) * LOG2E) + tl.sum(tl.exp2((x - m_new[:, None]) * LOG2E), axis=1)
        m = m_new
    top = tl.maximum(tl.max(m, axis=0), tl.max(edge, axis=0))
    total = tl.sum(s * tl.exp(m - top), axis=0) + tl.sum(tl.exp(edge - top), axis=0)
    if PARTS == 1:
        finish(top, total, target, logit, loss_ptr, lse_ptr, row, M)
    else:
        tl.store(notes_ptr + tl.program_id(0), top)
        tl.store(notes_ptr + M * PARTS + tl.program_id(0), total)


@triton.jit
def target_value(x_ptr, targets_ptr, row, M, V, stride_x):
    """The target of a row (or of several) and x there; NaN if it is no class, for it is never used as an address."""
    target = tl.load(targets_ptr + row, mask=row < M, other=IGNORE)
    inside = (target >= 0) & (target < V)
    x = tl.load(x_ptr + row.to(tl.int64) * stride_x + target, mask=inside, other=float("nan"))
    return target, x.to(tl.float32)


@triton.jit
def finish(m, s, target, logit, loss_ptr, lse_ptr, row, M):
    log_s = log_of_sum(s)
    tl.store(lse_ptr + row, m + log_s, mask=row < M)
    # Not lse - logit: of the difference of two numbers near 1000 fp32 keeps 4 digits.
    tl.store(loss_ptr + row, tl.where(target == IGNORE, 0.0, log_s - (logit - m)), mask=row < M)


@triton.jit
def log_of_sum(s):
    # s = 0 only if the whole row is -inf: PyTorch's softmax divides 0 by 0 there.
    return tl.where(s > 0, tl.log(s), float("nan"))


def cross_entropy_chunks(logits, targets):
    """[M, V], [M] -> loss [M], lse [M]; one program a row."""
    return _wide(logits, targets, parts=1)


# Rung 2. New: the work is cut to fit the machine.
# - Few long rows have several programs each, 4 for every SM in all; their (m, s) combine like those of the lanes, in a
#   second kernel. Predicted: 32 x 131,072 gains most: 32 programs cannot keep 132 SMs busy.
# - Rows that are many and not so long have a warp each. It waits for no other warp, and of the 16 or more on an SM each
#   begins and ends when the others are in the middle: no need for loads ahead. Four chunks a thread and 16 warps are
#   32 KB, and memory needs 26 (lesson 1). Predicted: 32,768 x 4096 gains most, a row is one step of rung 1's 8 warps.
# - Rows up to 1024 do not need a loop at all: lesson 12's row_kernel, with two rows of 1024 a warp.
@triton.jit
def merge_kernel(
    x_ptr, targets_ptr, loss_ptr, lse_ptr, notes_ptr,
    M, V, stride_x, PARTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    target, logit = target_value(x_ptr, targets_ptr, row, M, V, stride_x)
    slots = tl.arange(0, SLOTS)
    m = tl.load(notes_ptr + row * PARTS + slots, mask=slots < PARTS, other=LOWEST)
    s = tl.load(notes_ptr + (M + row) * PARTS + slots, mask=slots < PARTS, other=0.0)
    top = tl.max(m, axis=0)
    finish(top, tl.sum(s * tl.exp(m - top), axis=0), target, logit, loss_ptr, lse_ptr, row, M)


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
    # tl.exp takes care of results below 1e-38, which next to the maximum's 1 are as good as 0; tl.exp2 does not.
    s = tl.sum(tl.exp2((x - m[:, None]) * LOG2E), axis=1)
    finish(m, s, target, logit, loss_ptr, lse_ptr, rows, M)


def _cross_entropy_row(logits, targets, rows):
    """[M, V], [M] -> loss [M], lse [M]; a warp holds whole rows of at most 1024."""
    loss, lse, M, V = _prepare(logits, targets)
    if M:
        block = triton.next_power_of_2(V)
        grid = (triton.cdiv(M, rows),)
        row_kernel[grid](logits, targets, loss, lse, M, V, logits.stride(0), rows, block, num_warps=1)
    return loss, lse


def cross_entropy_split(logits, targets):
    """[M, V], [M] -> loss [M], lse [M]; a program owns a part of a row, a row, or several rows."""
    _, _, M, V = _prepare(logits, targets)
    if V <= 1024:
        return _cross_entropy_row(logits, targets, rows=2048 // triton.next_power_of_2(max(V, 1)))
    if V <= 65536 and M // num_sms() >= 16:
        return _wide(logits, targets, parts=1, warps=1)
    return _wide(logits, targets, parts=max(1, min(4 * num_sms() // max(M, 1), V // 4096)))


def _wide(logits, targets, parts, warps=8):
    loss, lse, M, V = _prepare(logits, targets)
    lanes, stages = (128, 1) if warps == 1 else (64 * warps, 3)  # 4 chunks a thread, or 2 and 4 under way
    w = 16 // logits.element_size()
    if logits.data_ptr() % 16:
        w = 1  # no chunk is aligned, so a chunk is one element: slow, and right
    if M:
        notes = torch.empty((2, M, parts) if parts > 1 else 0, dtype=torch.float32, device=logits.device)
        args = logits, targets, loss, lse, notes, M, V, logits.stride(0), parts
        wide_kernel[(M * parts,)](*args, lanes, w, stages, num_warps=warps)
        if parts > 1:
            merge_kernel[(M,)](*args, triton.next_power_of_2(parts), num_warps=1)
    return loss, lse


def _prepare(logits, targets):
    """Check the arguments; return loss [M], lse [M], both to be filled, and M, V."""
    expect(logits=logits, ndim=2, unit_stride=True)
    expect(targets=targets, ndim=1, dtypes=(torch.int64,), contiguous=True)
    M, V = logits.shape
    if len(targets) != M:
        raise ValueError(f"targets has {len(targets)} rows, but logits has {M}: pass one target a row")
    if M and not V:
        raise ValueError("logits has no classes (0 columns): pass one at least")
    loss, lse = torch.empty(2, M, dtype=torch.float32, device=logits.device)
    return loss, lse, M, V


_WRONG = (
    Mutant("neighbours not rescaled", "wide_kernel", "s * tl.exp2((m - m_new) * LOG2E)", "s", "cross_entropy_chunks"),
    Mutant("head of the row dropped", "wide_kernel", "== 0, begin", "== 0, first * W", "cross_entropy_chunks", "nan"),
    Mutant("a chunk too many", "wide_kernel", "end // W", "end // W + 1", "cross_entropy_chunks", "out of bounds"),
    Mutant("last step of a row lost", "wide_kernel", "(0, n, ", "(0, n - LANES + 1, ", "cross_entropy_chunks", "nan"),
    Mutant("edges added by every part", "wide_kernel", "part == 0, begin", "True, begin", "cross_entropy_split"),
    Mutant("parts rounded down", "wide_kernel", "- first, 0), P", "- first - PARTS + 1, 0), P", "cross_entropy_split"),
    Mutant("last part lost", "merge_kernel", "< PARTS, other=0", "< PARTS - 1, other=0", "cross_entropy_split"),
)  # fmt: skip

LESSON = Lesson(
    about=About(
        teaches="odd row lengths, few rows: splitting a row over programs",
        hours=0.5,
        operator="cross-entropy",
    ),
    problem=PROBLEM,
    rungs=(cross_entropy_chunks, cross_entropy_split),
    checks=(
        *PROBLEM.checks,
        case("many rows: a warp each", M=16 * num_sms() + 1, V=1153, strange=True),
        case("few long rows: several programs each", M=2, V=16411, strange=True),
        case("a stride that is not V; the last program of a row is not full", M=3, V=20480, pad=3, strange=True),
    ),
    # The odd width first: that is where the claim of 16-byte loads is examined.
    benches=(
        {"M": 4096, "V": 50257},
        *(b for b in PROBLEM.benches if b["V"] != 50257),
        *({"M": M, "V": V} for M, V in ((32768, 4096), (32, 131072))),
    ),
    wrong=_WRONG,
    claims={
        cross_entropy_chunks: ("16-byte loads", "no spills"),
        cross_entropy_split: ("wide_kernel: 16-byte loads", "no spills"),
    },
    passes={cross_entropy_chunks: 1.0, cross_entropy_split: 1.0},
)

if __name__ == "__main__":
    LESSON.main()
