"""Predict: what a launch does
===========================
Count first, run later. x has n = 98,432 elements in bf16, and the block is 1024. A matrix is 8192 x 8192 in bf16.
Memory gives 4.2 TB/s. Each answer is checked against a count made by the grader.

TODO(2) is about softmax over [M, N] in three kernels that store no exponentials, unlike lesson 5's: (1) the maximum m
of each row, (2) s, the sum of exp(x - m), (3) exp(x - m) / s, with exp(x - m) computed again.
"""

# TODO(1): programs of the launch over x, and lanes of the last one that have no element.
# stub: PROGRAMS, IDLE_LANES = None, None
PROGRAMS, IDLE_LANES = 97, 97 * 1024 - 98_432
# END(1)

# TODO(2): elements that softmax moves in the three kernels above, as a multiple of MN.
# stub: THREE_KERNELS = None
THREE_KERNELS = 1 + 1 + 1 + 1
# END(2)

# TODO(3): milliseconds of the softmax in one kernel whose rows stay in registers, at least (within 3%).
# stub: FUSED_MS = None
FUSED_MS = 2 * 8192 * 8192 * 2 / 4.2e12 * 1e3
# END(3)

# TODO(4): a program reads one column of the matrix. Which share of the bytes moved does it use (32-byte sectors)?
# stub: WANTED = None
WANTED = 2 / 32
# END(4)

# TODO(5): 8 warps hold a row of 4096 in fp32 in registers: how many 32-bit registers of each thread is that?
# stub: REGISTERS = None
REGISTERS = 4096 / (8 * 32)
# END(5)


# The learner's file ends here.
from lessonkit.exercise import Exercise, Wrong, number


def programs():
    """Blocks are rounded up; the last hangs over the end."""
    starts = range(0, 98_432, 1024)
    number("programs", PROGRAMS, len(starts), 0)
    number("idle lanes", IDLE_LANES, sum(i >= 98_432 for i in range(starts[-1], starts[-1] + 1024)), 0)


def three_kernels():
    """The first reads x, the second reads x, the third reads x and writes y. Vectors of M elements are not counted."""
    number("times MN", THREE_KERNELS, sum((1, 1, 1 + 1)), 0)


def fused():
    """Read once, written once, two bytes per element."""
    number("milliseconds", FUSED_MS, 2 * 8192**2 * 2 / 4.2e12 * 1e3, 0.03)


def column():
    """Neighbours in a column are a row apart, so each brings a sector of its own."""
    sectors = {row * 8192 * 2 // 32 for row in range(8192)}
    number("the share", WANTED, 8192 * 2 / (len(sectors) * 32), 0.01)


def registers():
    """The row is spread over all threads of the program."""
    number("registers per thread", REGISTERS, 4096 // (8 * 32), 0)


EXERCISE = Exercise(
    claims=(programs, three_kernels, fused, column, registers),
    by_task=True,
    hints=(
        "Round up for programs. For traffic count only what is as large as the matrix.",
        "A warp has 32 threads. A sector of 32 bytes holds 16 bf16 of one row.",
        "97 programs; 1 + 1 + 2; 4 bytes per element over 4.2e12; 2 of 32 bytes; 4096 / 256.",
    ),
    wrong=(
        Wrong("rounded down", "= 97, 97 * 1024", "= 96, 97 * 1024", "programs"),
        Wrong("the lanes that have one", "97 * 1024 - 98_432", "98_432 - 96 * 1024", "programs"),
        Wrong("the exponentials are thought to be stored", "1 + 1 + 1 + 1", "1 + 2 + 2", "three_kernels"),
        Wrong("read only", "FUSED_MS = 2 * 8192", "FUSED_MS = 8192", "fused"),
        Wrong("all that is loaded is used", "WANTED = 2 / 32", "WANTED = 1.0", "column"),
        Wrong("threads of one warp only", "(8 * 32)", "32", "registers"),
    ),
)
