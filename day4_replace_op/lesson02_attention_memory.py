"""Attention's memory and time against length: fitted exponents
============================================================
Naive attention keeps S x S scores and S x S weights for every head. Its memory is a S^2 + b S, with a from those
matrices and b from Q, K, V and O. Flash attention keeps b S. Both do S^2 work, since each query needs each key. On
log-log axes a power of S is a straight line, and its slope is the exponent. Where two powers add, the slope between two
lengths says which of them dominates there. With D = 128 a matrix outweighs O from S = 128 on. At S = 16384, with 16
heads in bf16:

    naive, an operator a step      two of scores, scaled scores and weights alive at once: 17 GB
    naive, softmax in place        one: 8.6 GB
    flash                          O: 67 MB, and lse: 1 MB

Predict before you run: the slopes of all lines of both plots, and at which S an 80 GB GPU runs out of memory.
New words (GLOSSARY.md): flash attention.
You will learn: to measure peak memory on a GPU and without one, to fit an exponent, and to read a slope.
Run it:    python3 course.py run lesson02_attention_memory
"""

import math
import statistics

from lessonkit import DEVICE, About, Steps, Table, device, memory, specimen

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

attention_fused_softmax = specimen("day4_replace_op.lesson01_attention", "attention_fused_softmax")
attention_recomputed = specimen("day4_replace_op.lesson01_attention", "attention_recomputed")
attention = specimen("day4_replace_op.lesson05_flash_options", "attention")

GPU = DEVICE.type == "cuda"
# Without a GPU our kernels are interpreted, and S = 512 would take seconds: so the lengths are smaller there.
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384) if GPU else (64, 128, 256)
H, D = (16, 128) if GPU else (1, 16)
DTYPE = torch.bfloat16 if GPU else torch.float32


def _by_hand(q, k, v):
    return ((q @ k.mT) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def _sdpa(q, k, v):
    """PyTorch's fused attention: FlashAttention or cuDNN on a GPU, its own flash kernel on a CPU."""
    return F.scaled_dot_product_attention(q, k, v)


def _sdpa_math(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


QUADRATIC = {"PyTorch by hand": _by_hand, "SDPA math": _sdpa_math, "lesson 1, fused softmax": attention_fused_softmax}
LINEAR = {"lesson 1, recomputed": attention_recomputed, "lesson 5, flash": attention, "SDPA": _sdpa}
ALL = QUADRATIC | LINEAR


def _inputs(S):
    torch.manual_seed(0)
    return [torch.randn(1, H, S, D, device=DEVICE).to(DTYPE) for _ in range(3)]


def _slope(xs, ys):
    """The exponent e of y = c x^e, by least squares through the logarithms."""
    return statistics.linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys]).slope


def _fits(S):
    """Whether S x S matrices of all heads fit into memory four times over."""
    return not GPU or 4 * H * S * S * DTYPE.itemsize < torch.cuda.mem_get_info()[0]


def _measured(measure):
    """A line for each implementation: {name: {S: measure(call)}}."""
    found = {name: {} for name in ALL}
    for S in LENGTHS:
        args = _inputs(S)
        for name, fn in ALL.items():
            if name in LINEAR or _fits(S):
                fn(*args)  # the first call compiles, and makes workspaces that stay
                found[name][S] = measure(lambda fn=fn, args=args: fn(*args))
    return found


def _table(name, unit, found, note):
    rows = []
    for implementation, line in found.items():
        for S, value in line.items():
            rows.append({"where": device.name(), "attention": implementation, "S": S, unit: f"{value:.4g}"})
    return Table(name, rows, note, x="S", y=unit, by="attention")


def peak_memory():
    """Doubling S takes four times the memory with an S x S matrix, twice without: exponents 2 and 1, to 0.1, 0.05."""
    found = _measured(memory.peak_bytes)
    for name, line in found.items():
        # From the last two lengths, where the S^2 term dominates if there is one, without O, which is linear in S.
        long = {S: peak - (S * H * D * DTYPE.itemsize if name in QUADRATIC else 0) for S, peak in line.items()}
        exponent = _slope([*long][-2:], [*long.values()][-2:])
        print(f"  {name:24} peak at S = {max(line)}: {line[max(line)] / 1e6:.4g} MB, exponent {exponent:.3f}")
        assert abs(exponent - 2) < 0.1 if name in QUADRATIC else abs(exponent - 1) < 0.05, (name, line)
    note = (
        f"Beyond Q, K, V; {H} heads of D = {D}, batch 1, {DTYPE}. Each line is a power of S: its slope is the exponent."
    )
    return _table("peak memory", "MB", {n: {S: v / 1e6 for S, v in f.items()} for n, f in found.items()}, note)


def to_the_byte():
    """Flash keeps O and lse and nothing else: S H (D itemsize + 4) bytes, so not one S x S matrix."""
    for S in LENGTHS:
        args = _inputs(S)
        attention(*args)
        counted = H * S * (D * DTYPE.itemsize + 4)
        peak = memory.peak_bytes(lambda args=args: attention(*args))
        assert counted <= peak <= counted + 2048, (S, peak, counted)  # CUDA's allocator rounds up to 512


def time():
    """Time goes up with S^2 for all, once the GPU is full: exponents 1.7 to 2.2 from S = 2048 on."""
    if not GPU:
        print("  needs a GPU: the interpreter's times say nothing. FLOPs do: 4 H S^2 D for each, whoever computes them")
        return None
    from lessonkit import timing

    found = {name: {} for name in ALL}
    for S in LENGTHS:
        args = _inputs(S)
        calls = {name: (lambda fn=fn, args=args: fn(*args)) for name, fn in ALL.items()
                 if name in LINEAR or _fits(S)}  # fmt: skip
        for call in calls.values():
            call()
        for name, t in timing.measure(calls, budget_s=1).items():
            found[name][S] = t.p50
    for name, line in found.items():
        exponent = _slope([*line][2:], [*line.values()][2:])  # PyTorch's softmax has other kernels for other lengths
        print(f"  {name:24} {line[max(line)]:.4g} ms at S = {max(line)}, exponent {exponent:.2f}")
        assert 1.7 < exponent < 2.2, (name, line)
    note = "Below S of about 2048 the GPU is not full, and time grows more slowly than the work."
    return _table("time", "ms", found, note)


# The answers: peak memory has slope 2 at long S with an S x S matrix, and 1 without. Time has slope 2 for all, once
# the GPU is full. With 16 heads in bf16 two matrices are 64 S^2 bytes and fill 80 GB at S = 35,000. One matrix does
# so at 50,000.
LESSON = Steps(
    (peak_memory, to_the_byte, time),
    about=About(teaches="peak memory and time against S, on a GPU and without one; exponents fitted", hours=0.5),
    alone=GPU,
)

if __name__ == "__main__":
    LESSON.main()
