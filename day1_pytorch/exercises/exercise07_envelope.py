"""Predict: numbers before measurements
====================================
Six figures that a kernel engineer knows by heart or computes on the back of an envelope. Each is checked to a
tolerance, and the message about a wrong one does not give the answer. H200: 4.8 TB/s and 989 TFLOP/s (dense bf16) by
its datasheet, 132 SMs; with memory busy a load takes about 800 ns.
"""

# TODO(1): microseconds to add two bf16 tensors of 2^26 elements into a third, at 4.8 TB/s (within 3%).
# stub: ADD_US = None
ADD_US = 3 * 2**26 * 2 / 4.8e12 * 1e6
# END(1)

# TODO(2): KB (1000 bytes) that each SM must have in flight, always, to reach 4.8 TB/s at 800 ns (within 5%).
# stub: IN_FLIGHT_KB = None
IN_FLIGHT_KB = 4.8e12 * 800e-9 / 132 / 1000
# END(2)

# TODO(3): milliseconds of a bf16 matmul of two 8192 x 8192 matrices at 989 TFLOP/s (within 3%).
# stub: MATMUL_MS = None
MATMUL_MS = 2 * 8192**3 / 989e12 * 1e3
# END(3)

# TODO(4): FLOPs of that matmul for each byte of its three matrices (within 3%).
# stub: INTENSITY = None
INTENSITY = 2 * 8192**3 / (3 * 8192**2 * 2)
# END(4)

# TODO(5): eight GPUs all-reduce a gradient by a ring: what each sends, as a multiple of the gradient (within 1%).
# stub: RING = None
RING = 2 * 7 / 8
# END(5)

# TODO(6): ones are added one by one in bf16 (8 bits of significand). Where does the sum stop growing?
# stub: STOPS_AT = None
STOPS_AT = 256
# END(6)


# The learner's file ends here.
from lessonkit.exercise import Exercise, Wrong, number

import torch


def add():
    """Two tensors are read, one is written, two bytes per element."""
    x = torch.empty(2**26, dtype=torch.bfloat16, device="meta")
    number("microseconds", ADD_US, 3 * x.nbytes / 4.8e12 * 1e6, 0.03)


def little():
    """Little's law: bytes in flight = bandwidth times latency, shared by the SMs."""
    number("KB an SM", IN_FLIGHT_KB, 4.8e12 * 800e-9 / 132 / 1e3, 0.05)


def product():
    """A multiply and an add for each of n^3 products."""
    number("milliseconds", MATMUL_MS, 2 * 8192**3 / 989e12 * 1e3, 0.03)


def intensity():
    """n^3 work on n^2 data: it grows with n."""
    number("FLOPs a byte", INTENSITY, 2 * 8192**3 / (3 * 2 * 8192**2), 0.03)


def ring():
    """A reduce-scatter and an all-gather, 7 pieces of an eighth each; counted here by simulation."""
    sent = 0.0
    for _ in ("reduce-scatter", "all-gather"):
        for _ in range(8 - 1):
            sent += 1 / 8
    number("times the gradient", RING, sent, 0.01)


def bfloat16():
    """By computing it: the next bf16 after it is two further on, and half of that rounds to even."""
    total, one = torch.zeros((), dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16)
    while total + one > total:
        total = total + one
    number("the sum", STOPS_AT, total.item(), 0)


EXERCISE = Exercise(
    claims=(add, little, product, intensity, ring, bfloat16),
    by_task=True,
    hints=(
        "Bytes / bandwidth, FLOPs / rate. What is read, what is written, how many bytes is an element?",
        "Little's law: concurrency = throughput times latency. A ring sends pieces of 1/8, in two rounds of 7 steps.",
        "3 * 2^26 * 2 / 4.8e12; 4.8e12 * 800e-9 / 132; 2 * 8192^3 / 989e12; 8192 / 3; 14 / 8; with 8 bits, integers "
        "are "
        "exact to 2^8.",
    ),
    wrong=(
        Wrong("the output is not counted", "3 * 2**26 * 2 /", "2 * 2**26 * 2 /", "add"),
        Wrong("four bytes per element", "3 * 2**26 * 2 /", "3 * 2**26 * 4 /", "add"),
        Wrong("for the whole chip, not an SM", "800e-9 / 132 / 1000", "800e-9 / 1000", "little"),
        Wrong("a multiply-add is one FLOP", "MATMUL_MS = 2 *", "MATMUL_MS =", "product"),
        Wrong("elements instead of bytes", "(3 * 8192**2 * 2)", "(3 * 8192**2)", "intensity"),
        Wrong("one round only", "RING = 2 * 7 / 8", "RING = 7 / 8", "ring"),
        Wrong("everybody sends to everybody", "RING = 2 * 7 / 8", "RING = 7", "ring"),
        Wrong("8 bits behind the leading one, not with it", "STOPS_AT = 256", "STOPS_AT = 512", "bfloat16"),
    ),
)
