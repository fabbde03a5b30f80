"""Say what limits a layer before you time it
==========================================
An op takes at least bytes / bandwidth and at least FLOPs / rate; the larger one is its floor. Both are equal at the
ridge. An H200's datasheet says 4.8 TB/s and 989 TFLOP/s of dense bf16, so its ridge is at about 206 FLOPs per byte. For
small m, y[m, n] = x[m, k] @ w[n, k].T is limited by memory, since all of w is read for a few rows.

Predict: the batch m at which a 4096 x 4096 layer in bf16 stops being limited by memory. Then compute it.
"""

import math

BANDWIDTH, RATE = 4.8e12, 989e12  # H200 SXM, datasheet: bytes/s and dense bf16 FLOP/s


def linear_cost(m: int, k: int, n: int, itemsize: int) -> tuple[int, int]:
    """Return (bytes, flops) of y[m, n] = x[m, k] @ w[n, k].T: inputs read once, the output written once."""
    # TODO(1): bytes of three tensors; a multiply and an add for each product.
    # stub: return 0, 0
    return (m * k + n * k + m * n) * itemsize, 2 * m * k * n
    # END(1)


def floor_seconds(bytes_moved: float, flops: float) -> float:
    """The least time on this machine."""
    # TODO(2): memory and arithmetic work at the same time.
    # stub: return 0.0
    return max(bytes_moved / BANDWIDTH, flops / RATE)
    # END(2)


def first_compute_bound_batch(k: int, n: int, itemsize: int) -> int | None:
    """The smallest m at which the FLOPs of the layer take at least as long as its bytes; None if there is none."""
    # TODO(3): set both times equal and solve for m.
    # stub: return math.inf
    # (m (k + n) + k n) itemsize / BANDWIDTH <= 2 m k n / RATE, solved for m. Where the bytes of x and y grow faster
    # with m than the FLOPs do, no batch is large enough.
    gained = 2 * k * n / RATE - (k + n) * itemsize / BANDWIDTH
    return None if gained <= 0 else math.ceil(k * n * itemsize / BANDWIDTH / gained)
    # END(3)


# The learner's file ends here.
from lessonkit.exercise import Exercise, Wrong, same

import torch
from torch.utils.flop_counter import FlopCounterMode


def counts():
    """Bytes are those of the three tensors; FLOPs are what PyTorch's own counter says: a multiply and an add each."""
    for m, k, n, dtype in ((1, 64, 32, torch.bfloat16), (16, 8, 8, torch.float32), (5, 7, 3, torch.float32)):
        x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        with FlopCounterMode(display=False) as counter:
            y = x @ w.T
        moved, flops = linear_cost(m, k, n, dtype.itemsize)
        same(f"FLOPs of m={m} k={k} n={n}", flops, counter.get_total_flops())
        same(f"bytes of m={m} k={k} n={n} in {dtype}", moved, x.nbytes + w.nbytes + y.nbytes)


def floors():
    """4.8 TB take a second at least, and so do 989 TFLOP; both at once take no longer than the slower one."""
    for moved, flops, expected in ((4.8e12, 0, 1), (0, 989e12, 1), (2.4e12, 989e12, 1), (9.6e12, 989e12, 2)):
        same(f"seconds for {moved:g} bytes and {flops:g} FLOPs", floor_seconds(moved, flops), expected)


def ridge():
    """Below this batch a larger one takes hardly longer. It grows as the layer gets narrower; a narrow one has none."""
    for k, n in ((4096, 4096), (4096, 1024), (512, 2048)):
        m = first_compute_bound_batch(k, n, 2)
        assert isinstance(m, int), f"k={k} n={n}: there is one, and it is whole; got {m!r}"
        for batch, bound in ((m - 1, "bytes"), (m, "FLOPs")):
            moved, flops = linear_cost(batch, k, n, 2)
            slower = "bytes" if moved / BANDWIDTH > flops / RATE else "FLOPs"
            assert slower == bound, f"k={k} n={n}: you say m={m}, but at m={batch} the {slower} take longer"
    none = first_compute_bound_batch(64, 64, 2)
    assert none is None, f"64 x 64: x and y alone take longer than the FLOPs at any m; got {none!r}"


EXERCISE = Exercise(
    claims=(counts, floors, ridge),
    hints=(
        "A multiply and an add are two FLOPs; x, w and y are m k, n k and m n elements.",
        "Set bytes / bandwidth equal to FLOPs / rate: the equation is linear in m.",
        "Both sides grow with m: m (2 k n / RATE - (k + n) itemsize / BANDWIDTH) = k n itemsize / BANDWIDTH. "
        "If the bracket is not positive, no m is large enough.",
    ),
    predicted="m = 230. The ridge of 206 FLOPs per byte is not enough, because x and y move bytes as well.",
    wrong=(
        Wrong("a multiply-add counted as one FLOP", "2 * m * k * n", "m * k * n", "counts"),
        Wrong("the output's bytes are forgotten", " + m * n) * itemsize", ") * itemsize", "counts"),
        Wrong(
            "the times are added: memory and arithmetic overlap",
            "max(bytes_moved / BANDWIDTH, flops / RATE)",
            "bytes_moved / BANDWIDTH + flops / RATE",
            "floors",
        ),
        Wrong(
            "x and y are left out of the bytes",
            "gained = 2 * k * n / RATE - (k + n) * itemsize / BANDWIDTH",
            "gained = 2 * k * n / RATE",
            "ridge",
        ),
        Wrong("rounded down: at that m the bytes still take longer", "math.ceil(", "math.floor(", "ridge"),
        Wrong("a small layer has a negative batch", "None if gained <= 0 else ", "", "ridge"),
    ),
)
