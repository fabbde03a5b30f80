"""Predict: what a tuning session will find
========================================
Eight figures on the back of an envelope, before anything is compiled or timed. An H200 as the course measures it:

    132 SMs, 4.2 TB/s, 800 TFLOP/s in bf16
    65,536 registers of 32 bits an SM; a warp gets them in units of 256

For 6: all tiles of 128 x 256 of a matmul of 8192, bf16, run 132 at a time, in groups of 8 rows of tiles. Operands that
tiles of one wave share are read once, and nothing is kept for the next wave. For 8: 18 configurations, 1 s to compile
and 1/8 s to time each. The key is a length, rounded up to a power of 2; lengths range from 100 to 8000.
"""

# TODO(1): softmax, a row a program: 4 warps, 72 registers per thread. Programs per SM, and waves of 8192 rows.
# stub: RESIDENT, WAVES = None, None
RESIDENT, WAVES = 65536 // (72 * 32) // 4, 9
# END(1)

# TODO(2): the share of the last of these waves that has a row (within 1%).
# stub: LAST_WAVE = None
LAST_WAVE = (8192 - 8 * 7 * 132) / (7 * 132)
# END(2)

# TODO(3): n from which a product of two n x n matrices in bf16 is bound by compute (within 1%).
# stub: RIDGE_N = None
RIDGE_N = 3 * 800e12 / 4.2e12
# END(3)

# TODO(4): a tile of 128 x 256, steps of 64 of K, 8 warps: wgmma instructions (64 x 256 x 16) of each warpgroup a step.
# stub: WGMMA = None
WGMMA = 64 // 16
# END(4)

# TODO(5): the same step loaded by cp.async of 16 bytes instead of the TMA: instructions of each thread.
# stub: COPIES = None
COPIES = (128 * 64 + 64 * 256) * 2 / 16 / 256
# END(5)

# TODO(6): GB (1e9 bytes) that this product reads and writes (within 8%).
# stub: MOVED_GB = None
MOVED_GB = (16 * 2 * 8192 * (8 * 128 + 132 / 8 * 256) + 2 * 8192 * 8192) / 1e9
# END(6)

# TODO(7): 360 kernels of 5 us each; a launch takes the host 8 us. Milliseconds in all, and as one graph (within 2%).
# stub: EAGER_MS, GRAPH_MS = None, None
EAGER_MS, GRAPH_MS = 360 * 8 / 1000, 360 * 5 / 1000
# END(7)

# TODO(8): seconds that a process spends on autotune, if each key compiles its configurations (within 1%).
# stub: AUTOTUNE_S = None
AUTOTUNE_S = 7 * 18 * (1 + 1 / 8)
# END(8)


# The learner's file ends here.
from lessonkit import compiled
from lessonkit.exercise import Exercise, Wrong, number
from lessonkit.measure import sweeps


def programs_and_waves():
    """Whole programs on an SM, whole waves on the GPU."""
    held = compiled.resident(90, 4, 72, 0)
    number("programs an SM", RESIDENT, held, 0)
    number("waves", WAVES, sweeps.waves(8192, held, sweeps.H200.sms), 0)


def last_wave():
    """The rows left over, in a wave that has room for all of them."""
    room = compiled.resident(90, 4, 72, 0) * 132
    rows = list(range(8192))
    while len(rows) > room:
        rows = rows[room:]
    number("the share", LAST_WAVE, len(rows) / room, 0.01)


def ridge():
    """Three matrices of 2 bytes per element; a multiply and an add for each of n^3."""
    n = 1
    while 2 * n**3 / 800e12 < 3 * n * n * 2 / 4.2e12:
        n += 1
    number("n", RIDGE_N, n, 0.01)


def instructions():
    """A warpgroup is four warps, and has half of the rows; an instruction takes 16 of K."""
    pieces = [(m, n, k) for m in range(0, 128, 64) for n in range(0, 256, 256) for k in range(0, 64, 16)]
    number("wgmma of a warpgroup", WGMMA, len(pieces) // 2, 0)


def copies():
    """Both blocks, shared by all threads of the program."""
    elements = sum(1 for _ in range(0, 128 * 64 + 64 * 256, 8))
    number("cp.async of a thread", COPIES, elements / (8 * 32), 0)


def moved():
    """By simulation: each wave reads its distinct block rows and block columns once; C is written once."""
    order = [(g + m, n) for g in range(0, 64, 8) for n in range(32) for m in range(8)]
    total = 2 * 8192 * 8192
    for first in range(0, len(order), 132):
        wave = order[first : first + 132]
        total += 2 * 8192 * (128 * len({m for m, _ in wave}) + 256 * len({n for _, n in wave}))
    number("GB", MOVED_GB, total / 1e9, 0.08)


def launches():
    """The longer of the host's launches and the GPU's work; a graph is launched once."""
    host, gpu = 0.0, 0.0
    for _ in range(360):
        host += 8
        gpu = max(gpu, host) + 5
    number("milliseconds, eager", EAGER_MS, gpu / 1000, 0.02)
    number("milliseconds, as a graph", GRAPH_MS, 360 * 5 / 1000, 0.02)


def autotune():
    """Every key is tuned anew."""
    keys = {1 << (length - 1).bit_length() for length in range(100, 8001)}
    number("seconds", AUTOTUNE_S, len(keys) * 18 * 1.125, 0.01)


EXERCISE = Exercise(
    claims=(programs_and_waves, last_wave, ridge, instructions, copies, moved, launches, autotune),
    by_task=True,
    hints=(
        "Everything that is handed out is handed out whole: programs, waves, keys. The host and the GPU work at the "
        "same time, so the slower of them is what takes the time.",
        "A warp takes 72 * 32 = 2304 registers, a program four times that. n / 3 FLOPs per byte against 800 / 4.2. A "
        "wave of 132 tiles in groups of 8 is 8 rows of tiles and 132 / 8 columns. Keys: 128, 256, ... 8192.",
        "7 and 9; 800 of 924; 3 * 190.5; 64 / 16; 48 KB / 16 / 256; 16 waves * 2 * 8192 * (8 * 128 + 16.5 * 256) bytes "
        "and C; 360 * 8 us and 360 * 5 us; 7 keys * 18 * 1.125 s.",
    ),
    wrong=(
        Wrong("warps that fit, not programs", "65536 // (72 * 32) // 4, 9", "65536 // (72 * 32), 9",
              "programs_and_waves"),
        Wrong("waves rounded down", "// 4, 9", "// 4, 8", "programs_and_waves"),
        Wrong("one program on an SM at a time", "// 4, 9", "// 4, 63", "programs_and_waves"),
        Wrong("the last wave is thought to be full", "LAST_WAVE = (8192 - 8 * 7 * 132) / (7 * 132)", "LAST_WAVE = 1.0",
              "last_wave"),
        Wrong("the share of all waves, not of the last", "(8192 - 8 * 7 * 132) / (7 * 132)", "8192 / (9 * 7 * 132)",
              "last_wave"),
        Wrong("FLOPs a byte are taken for n", "RIDGE_N = 3 *", "RIDGE_N =", "ridge"),
        Wrong("both warpgroups' instructions", "WGMMA = 64 // 16", "WGMMA = 2 * 64 // 16", "instructions"),
        Wrong("elements instead of bytes", "(128 * 64 + 64 * 256) * 2 / 16", "(128 * 64 + 64 * 256) / 16", "copies"),
        Wrong("every tile reads all that it needs itself", "16 * 2 * 8192 * (8 * 128 + 132 / 8 * 256)",
              "2048 * 2 * 8192 * (128 + 256)", "moved"),
        Wrong("in order of rows: a wave has 4 rows of tiles and all columns", "(8 * 128 + 132 / 8 * 256)",
              "(4 * 128 + 32 * 256)", "moved"),
        Wrong("host and GPU in turn", "360 * 8 / 1000,", "360 * (8 + 5) / 1000,", "launches"),
        Wrong("a graph of which every kernel is still launched by the host", "360 * 5 / 1000\n",
              "360 * 8 / 1000\n", "launches"),
        Wrong("one key for all lengths", "AUTOTUNE_S = 7 * 18", "AUTOTUNE_S = 18", "autotune"),
        Wrong("a key for every length", "AUTOTUNE_S = 7 * 18", "AUTOTUNE_S = 7901 * 18", "autotune"),
    ),
)  # fmt: skip
