"""Exercise 3: say what limits a layer before you time it
======================================================
An op needs at least bytes / bandwidth and at least FLOPs / rate; the larger one is its floor. Where both are equal
lies the ridge: an H200's datasheet says 4.8 TB/s and 989 TFLOP/s of dense bf16, so about 206 FLOPs for each byte.
y[m, n] = x[m, k] @ w[n, k].T is limited by memory while m is small, since all of w is read for a few rows.

Predict: the batch m at which a 4096 x 4096 layer in bf16 stops being limited by memory. Then compute it.
Run it:    python day1_pytorch/exercises/exercise03_roofline.py
Hints:     in the day's README. A solution: solutions/exercise03_roofline.py
"""

import math

from lessonkit import Steps, show

import torch
from torch.utils.flop_counter import FlopCounterMode

BANDWIDTH, RATE = 4.8e12, 989e12  # H200 SXM, datasheet: bytes/s and dense bf16 FLOP/s


def linear_cost(m, k, n, itemsize):
    """Return (bytes, flops) of y[m, n] = x[m, k] @ w[n, k].T: inputs read once, the output written once."""
    # Yours:
    return 0, 0
    # End of yours.


def floor_seconds(bytes_moved, flops):
    """The least time that this machine can need."""
    # Yours:
    return 0.0
    # End of yours.


def first_compute_bound_batch(k, n, itemsize):
    """The smallest m at which the FLOPs of the layer take at least as long as its bytes; None if there is none."""
    # Yours:
    return math.inf
    # End of yours.


def counts():
    """Bytes are those of the three tensors; FLOPs are what PyTorch's own counter says: a multiply and an add each."""
    for m, k, n, dtype in ((1, 64, 32, torch.bfloat16), (16, 8, 8, torch.float32), (5, 7, 3, torch.float32)):
        x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        with FlopCounterMode(display=False) as counter:
            y = x @ w.T
        moved, flops = linear_cost(m, k, n, dtype.itemsize)
        assert flops == counter.get_total_flops(), f"m={m} k={k} n={n}: {flops} FLOPs"
        assert moved == x.nbytes + w.nbytes + y.nbytes, f"m={m} k={k} n={n}: {moved} bytes"


def floors():
    """4.8 TB take a second at least, and so do 989 TFLOP; both at once take no longer than the slower one."""
    assert floor_seconds(4.8e12, 0) == 1
    assert floor_seconds(0, 989e12) == 1
    assert floor_seconds(2.4e12, 989e12) == 1
    assert floor_seconds(9.6e12, 989e12) == 2


def ridge():
    """Below this batch a larger one is nearly free; the narrower the layer, the larger it is, and at last none is."""
    for k, n in ((4096, 4096), (4096, 1024), (512, 2048)):
        m = first_compute_bound_batch(k, n, 2)
        assert m is not None, f"k={k} n={n}: there is one"
        for batch, bound in ((m - 1, "bytes"), (m, "flops")):
            moved, flops = linear_cost(batch, k, n, 2)
            slower = "bytes" if moved / BANDWIDTH > flops / RATE else "flops"
            assert slower == bound, f"k={k} n={n}: at m={batch} the {slower} take longer"
    assert first_compute_bound_batch(64, 64, 2) is None, "64 x 64: x and y alone take longer than the FLOPs at any m"


EXERCISE = Steps(steps=(counts, floors, ridge))

if __name__ == "__main__":
    show.steps("__main__", EXERCISE)
