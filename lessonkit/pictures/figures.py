"""The figures that move: their controls, their words, and the data that they take from lessons and chips."""

from collections.abc import Mapping
from typing import Any

from lessonkit.base.chips import CHIPS
from lessonkit.pictures import models
from lessonkit.pictures.draw import say
from lessonkit.pictures.moving import Control, Figure
from lessonkit.pictures.numbers import number, stated

SOFTMAX_ROW = (1.0, 3.0, 2.0, 5.0, 4.0, 2.0, 6.0, 1.0)
FLASH = "day4_replace_op/flash_hopper/warp_specialized.py"
BUDGET = "day4_replace_op/lesson08_flash_hopper.py"
PLAIN_MATMUL = "day3_matmul_tk/lesson01_matmul.py"
RING_OF_STAGES = "day3_matmul_tk/matmul_hopper/ring.py"
PROGRAM_AND_BLOCK = "day2_triton_basics/lesson00_program_and_block.py"
_PLAY = (("play", say("Play")), ("stop", say("Stop")))


def attention_cycles(D: int) -> dict[str, int]:
    """Of one consumer and one block of keys, in cycles of an SM, by the rates that the lesson's budget states."""
    rows, keys = number(FLASH, "ROWS"), number(FLASH, "KEYS")
    flops = stated(BUDGET, r"4 \* 128 \* 128 \* D FLOPs, (\d+) a cycle")
    exps = stated(BUDGET, r"128 \* 128, (\d+) a cycle")
    instructions = stated(BUDGET, r"([\d.]+) and [\d.]+ other" if D == 128 else r"[\d.]+ and ([\d.]+) other")
    lanes = stated(BUDGET, r"other instructions per score, (\d+) lanes")
    bytes_ = stated(BUDGET, r"512 \* D bytes, (\d+) a cycle")
    return {
        "matmul": round(2 * rows * keys * D / flops),
        "exps": round(rows * keys / exps),
        "others": round(instructions * rows * keys / lanes),
        "load": round(2 * keys * D / bytes_),
    }


def attention_stages(D: int) -> int:
    return int(number(FLASH, "stages", inside="warp_specialized", D=D))


def ten_elements() -> tuple[int, int]:
    """n and BLOCK of the first lesson's example."""
    n = stated(PROGRAM_AND_BLOCK, r"owner_kernel\[\(programs,\)\]\(offsets, mask, (\d+)")
    return int(n), number(PROGRAM_AND_BLOCK, "BLOCK")


def ring_stages(path: str) -> tuple[int, int]:
    """A ring's stages, and the cycles of a step's matmul by the rate that the lessons state."""
    if "fp8" in path:
        m, n = (int(stated(path, pattern)) for pattern in (r"tile of (\d+) x", r"tile of \d+ x (\d+)"))
        stages, k = number(path, "stages", inside="_run", width=n), number(path, "BLOCK_K")
        a_cycle = stated(path, r"multiply (\d+) pairs per cycle")
    else:
        names, k_in = ("TILE_M", "TILE_N", "BK"), "cuda_src/include/matmul.cuh"
        if path.endswith(".py"):
            names, k_in = ("BLOCK_M", "BLOCK_N", "BLOCK_K"), path
        stages, m, n = (number(path, name) for name in ("STAGES", *names[:2]))
        k, a_cycle = number(k_in, names[2]), stated(PLAIN_MATMUL, r"does (\d+) multiply-adds per cycle")
    return stages, int(m * n * k // a_cycle)


def _chips() -> Mapping[str, Any]:
    names = ("warps", "blocks", "registers", "shared", "shared_block", "warp_size", "reserved", "bandwidth")
    return {key: {name: getattr(chip, name) for name in names} | {"flops": dict(chip.flops)}
            for key, chip in CHIPS.items()}  # fmt: skip


_CHIP = Control("chip", "GPU", "h200", choices=tuple((key, chip.name) for key, chip in CHIPS.items()))

BLOCK_MASK = Figure(
    "block_mask", dict,
    (Control("n", say("n, elements"), 10, 1, 80), Control("block", "BLOCK", 4, choices=tuple(
        (2**i, str(2**i)) for i in range(6)))),
    (("said", say("Programs: {programs}. Lanes without an element: {masked}.")),),
    lambda: dict(zip(("n", "block"), ten_elements(), strict=True)),
)  # fmt: skip
SECTORS = Figure(
    "sectors", lambda: {"sector": models.SECTOR, "lanes": models.LANES},
    (
        Control("stride", say("stride, elements"), 1, 0, 33),
        Control("offset", say("offset, elements"), 0, 0, 32),
        Control("size", say("bytes per element"), 4, choices=tuple((2**i, str(2**i)) for i in range(5))),
    ),
    (
        ("lanes", say("32 lanes of a warp")),
        ("sectors", say("sectors of 32 bytes that the load touches")),
        ("said", say("Sectors: {count}. Of their bytes {percent}% are used.")),
    ),
)  # fmt: skip
BANKS = Figure(
    "banks",
    lambda: {"tile": number("cuda_src/13_transpose.cu", "TILE"), "lanes": models.LANES, "banks": models.BANKS},
    (
        Control("pad", say("padding, words"), 0, 0, 4),
        Control("swizzle", say("swizzle"), 0, choices=((0, say("off")), (1, say("column xor row")))),
        Control("column", say("column read"), 0, 0, 31),
    ),
    (
        ("banks", say("Banks 0 to 31 across, lanes of the warp downwards")),
        ("lanes", say("A red cell: the bank that the lane reads")),
        ("said", say("Wavefronts for this access: {wavefronts}.")),
    ),
)  # fmt: skip
ONLINE_SOFTMAX = Figure(
    "online_softmax", lambda: {"values": SOFTMAX_ROW},
    (
        Control("block", say("elements of a block"), 2, choices=((1, "1"), (2, "2"), (4, "4"), (8, "8"))),
        Control("step", say("blocks read"), 1, 1, len(SOFTMAX_ROW)),
    ),
    (*_PLAY, ("said", say("After block {block}: m = {m}, alpha = {alpha}, s = {s}."))),
)  # fmt: skip
TILE_ORDER = Figure(
    "tile_order", dict,
    (
        Control("tiles_m", say("rows of tiles"), 12, 1, 32),
        Control("tiles_n", say("columns of tiles"), 12, 1, 32),
        Control("group", "GROUP", 4, 1, 16),
        Control("sms", say("programs at a time"), 16, 1, 132),
    ),
    (
        ("wave", say("tiles of the first wave")), ("rows", say("rows of A that it reads")),
        ("columns", say("columns of B that it reads")),
        ("said", say("The first wave reads {first} strips of A and B. All waves read {strips}; L2 serves {hits}% "
                     "of the reads.")),
    ),
)  # fmt: skip
OCCUPANCY = Figure(
    "occupancy", lambda: {"chips": _chips()},
    (
        _CHIP,
        Control("warps", say("warps per program"), 4, choices=tuple((2**i, str(2**i)) for i in range(5))),
        Control("registers", say("registers per thread"), 64, 8, 248, 8),
        Control("shared", say("shared memory, KB"), 16, 0, 227),
    ),
    (
        ("registers", say("registers allow")), ("shared", say("shared memory allows")), ("warps", say("warps allow")),
        ("programs", say("programs at most")),
        ("said", say("Programs on an SM: {resident}. Occupancy: {percent}%.")),
    ),
)  # fmt: skip
RING = Figure(
    "ring", lambda: {"steps": 9},
    (
        Control("stages", say("stages"), 4, 1, 6),
        Control("load", say("cycles of a load"), 900, 100, 2000, 100),
        Control("multiply", say("cycles of a matmul"), 1024, 128, 2048, 128),
        Control("step", say("time"), 0, 0, 24),
    ),
    (
        *_PLAY, ("stage", say("stage {stage}")), ("parity", say("full: phase of parity {parity} under way")),
        ("loading", say("TMA writes the stage")), ("full", say("full, waits for the tensor cores")),
        ("reading", say("the tensor cores read it")),
        ("said", say("All steps take {cycles} cycles; the tensor cores are busy for {percent}%.")),
    ),
    lambda: dict(zip(("stages", "multiply"), ring_stages(RING_OF_STAGES), strict=True)),
)  # fmt: skip
ATTENTION = Figure(
    "attention", lambda: {"cycles": {str(D): attention_cycles(D) for D in (64, 128)}, "blocks": 8},
    (
        Control("D", "D", "128", choices=(("64", "64"), ("128", "128"))),
        Control("stages", say("stages of each ring"), 2, 1, 4),
        Control("order", say("order"), "overlap", choices=(
            ("serial", say("one after the other")), ("overlap", say("QK of the next block before PV")),
            ("ping-pong", say("the same, in turns")),
        )),
    ),
    (
        ("loads", say("loads")), ("tensor", say("tensor cores")), ("softmax0", say("softmax 0")),
        ("softmax1", say("softmax 1")), ("first", say("consumer 0")), ("second", say("consumer 1")),
        ("said", say("A block takes {cycles} cycles; the tensor cores are busy for {percent}% of them.")),
    ),
    lambda: {"stages": attention_stages(128)},
)  # fmt: skip
CAUSAL = Figure(
    "causal", dict,
    (
        Control("queries", say("queries"), 1024, 64, 2048, 64),
        Control("keys", say("keys"), 1024, 64, 2048, 64),
        Control("rows", say("queries of a block"), 128, choices=((64, "64"), (128, "128"), (256, "256"))),
        Control("columns", say("keys of a block"), 128, choices=((64, "64"), (128, "128"), (256, "256"))),
    ),
    (
        ("keys", say("keys across, queries downwards")), ("whole", say("whole: no mask")),
        ("masked", say("masked: the diagonal crosses it")), ("skipped", say("skipped")),
        ("said", say("Whole: {whole}, masked: {masked}, skipped: {skipped}.")),
    ),
    lambda: {"rows": number(FLASH, "ROWS") * number(FLASH, "CONSUMERS"), "columns": number(FLASH, "KEYS")},
)  # fmt: skip
ROOFLINE = Figure(
    "roofline", lambda: {"chips": _chips()},
    (
        _CHIP,
        Control("rate", say("data type"), "bf16", choices=(("fp32", "fp32"), ("tf32", "tf32"), ("bf16", "bf16"),
                                                           ("fp8", "fp8"))),
        Control("log2", say("FLOPs for each byte"), 0, -4, 12, 0.5),
    ),
    (
        ("across", say("FLOPs for each byte")), ("memory", say("memory")), ("compute", say("arithmetic")),
        ("said", say("At most {flops} TFLOP/s, bound by {bound}. The roofs meet at {ridge} FLOPs per byte.")),
    ),
)  # fmt: skip
FIGURES = (BLOCK_MASK, SECTORS, BANKS, ONLINE_SOFTMAX, TILE_ORDER, OCCUPANCY, RING, ATTENTION, CAUSAL, ROOFLINE)
