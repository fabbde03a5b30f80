"""Predict: what a tile costs
==========================
C = A B in bf16 with M = N = K = 4096, in tiles of 128 x 256 with BLOCK_K = 64, on an H200. It has 132 SMs, 227 KB of
shared memory for a program, and by its datasheet 989 TFLOP/s and 4.8 TB/s. Compute these six figures before you tune
any configuration.
"""

# TODO(1): KB (1024 bytes) of shared memory that one stage takes: a block of A and one of B.
# stub: STAGE_KB = None
STAGE_KB = (128 * 64 + 64 * 256) * 2 / 1024
# END(1)

# TODO(2): stages that fit into 227 KB.
# stub: STAGES = None
STAGES = 227 // 48
# END(2)

# TODO(3): 32-bit registers of each thread for the fp32 accumulator, with 8 warps.
# stub: REGISTERS = None
REGISTERS = 128 * 256 / (8 * 32)
# END(3)

# TODO(4): FLOPs for each byte that a step loads from L2 or memory into shared memory.
# stub: INTENSITY = None
INTENSITY = 2 * 128 * 256 * 64 / ((128 * 64 + 64 * 256) * 2)
# END(4)

# TODO(5): tiles of C, and rounds (waves) in which 132 SMs do them, one each.
# stub: TILES, WAVES = None, None
TILES, WAVES = 32 * 16, 4
# END(5)

# TODO(6): the share of 132 SMs times all rounds that does work: an upper bound of the speed (within 1%).
# stub: USED = None
USED = 512 / (4 * 132)
# END(6)


# The learner's file ends here.
from lessonkit.exercise import Exercise, Wrong, number

import torch

A, B = torch.empty(128, 64, dtype=torch.bfloat16), torch.empty(64, 256, dtype=torch.bfloat16)


def stage():
    """Both blocks, two bytes per element."""
    number("KB a stage", STAGE_KB, (A.nbytes + B.nbytes) / 1024, 0)


def stages():
    """Whole stages only."""
    number("stages", STAGES, 227 * 1024 // (A.nbytes + B.nbytes), 0)


def registers():
    """Spread over the threads of the program."""
    number("registers a thread", REGISTERS, (A @ B).numel() // 256, 0)


def intensity():
    """A tile twice as large in both directions has twice the intensity: this is why tiles are large."""
    number("FLOPs a byte", INTENSITY, 2 * A.numel() * B.shape[1] / (A.nbytes + B.nbytes), 0.01)


def waves():
    """Tiles in rounds of 132, the last one not full."""
    tiles = [(m, n) for m in range(0, 4096, 128) for n in range(0, 4096, 256)]
    number("tiles", TILES, len(tiles), 0)
    number("waves", WAVES, len(range(0, len(tiles), 132)), 0)


def used():
    """SMs that are idle in the last round are lost."""
    number("the share used", USED, 512 / (4 * 132), 0.01)


EXERCISE = Exercise(
    claims=(stage, stages, registers, intensity, waves, used),
    by_task=True,
    hints=(
        "A block of A is BLOCK_M x BLOCK_K, of B BLOCK_K x BLOCK_N. The accumulator is BLOCK_M x BLOCK_N.",
        "A step does 2 * BLOCK_M * BLOCK_N * BLOCK_K FLOPs. A round has 132 tiles; round up.",
        "48 KB; 227 // 48; 32768 / 256; 4194304 / 49152; 32 * 16 tiles in ceil(512 / 132) rounds.",
    ),
    wrong=(
        Wrong("A only", "STAGE_KB = (128 * 64 + 64 * 256)", "STAGE_KB = (128 * 64)", "stage"),
        Wrong("rounded up: the last stage does not fit", "227 // 48", "5", "stages"),
        Wrong("threads of one warpgroup, but there are two", "(8 * 32)", "(4 * 32)", "registers"),
        Wrong("a multiply-add is one FLOP", "INTENSITY = 2 * 128", "INTENSITY = 128", "intensity"),
        Wrong("rounded down: the tiles that are left need a round too", "32 * 16, 4", "32 * 16, 3", "waves"),
        Wrong("tiles of 128 x 128", "32 * 16, 4", "32 * 32, 4", "waves"),
        Wrong("the last round is thought to be full", "USED = 512 / (4 * 132)", "USED = 1.0", "used"),
    ),
)
