"""The one table of chips: data-sheet figures, and the limits of one SM or CU that decide what fits and how often.

COURSE_GPU names your card (`COURSE_GPU=rtx4090`). Without a GPU, tiles, occupancy and predictions are then that card's.
Rates are dense, with fp32 accumulation, from the document that stands behind each card. Limits of an SM are from CUDA's
programming guide (table of compute capabilities), those of a CU from AMD's instruction-set documents.
"""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lessonkit.base.words import later, said

Target = int | str  # 90 for sm_90, "gfx942"
CHOICE = "COURSE_GPU"


@dataclass(frozen=True)
class Chip:
    """One card. Bytes, counts and warps are of one SM (a CU on AMD) unless the name says otherwise."""

    name: str
    target: Target
    sms: int
    bandwidth: float  # bytes/s of its memory
    flops: Mapping[str, float]  # FLOP/s: fp32, and on matrix units tf32, bf16, fp8 where it has them
    shared_block: int  # most shared memory (LDS) of one program
    shared: int
    warps: int
    blocks: int
    l2: int  # MB of the whole card; on AMD of all its dies
    source: str
    registers: int = 65536  # of 32 bits
    warp_size: int = 32
    reserved: int = 1024  # bytes of shared memory that the system takes for each program
    compiled: bool = True  # `compile` makes code for its target

    @property
    def amd(self) -> bool:
        return is_amd(self.target)

    def resident(self, warps: int, registers: int, shared: int) -> int:
        """Programs that an SM holds at a time. registers: of a thread; a warp gets them in units of 8 a thread."""
        a_warp = -(-registers // 8) * 8 * self.warp_size
        by_registers = self.registers // a_warp // warps if registers else self.blocks
        return min(by_registers, self.shared // max(shared + self.reserved, 1), self.blocks, self.warps // warps)

    def occupancy(self, warps: int, registers: int, shared: int) -> float:
        """Resident warps over the SM's most."""
        return self.resident(warps, registers, shared) * warps / self.warps

    def seconds(self, moved: float, flops: float, rate: str) -> tuple[float, str]:
        """The least time of an op, and what sets it: "memory" or "compute". A rate that it lacks is that of fp32."""
        by_memory, by_compute = moved / self.bandwidth, flops / self.flops.get(rate, self.flops["fp32"])
        return (by_compute, later("compute")) if by_compute > by_memory else (by_memory, later("memory"))


# At which of a card's rates a dtype is computed; others have no rate of their own.
RATES = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16", "float8_e4m3fn": "fp8"}


def of_gpu(name: str) -> Chip | None:
    """The card of a folder of reports/, if the table has it: nvidia-h200 is `h200`."""
    return CHIPS.get(name.rpartition("-")[2])


def is_amd(target: Target) -> bool:
    return isinstance(target, str)


def _rates(fp32: float, tf32: float, bf16: float, fp8: float = 0) -> dict[str, float]:
    return {key: t * 1e12 for key, t in {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp8": fp8}.items() if t}


_HOPPER: dict[str, Any] = {"target": 90, "shared_block": 232448, "shared": 233472, "warps": 64, "blocks": 32}
_GEFORCE: dict[str, Any] = {"shared_block": 101376, "shared": 102400, "warps": 48}
_CDNA: dict[str, Any] = {"warps": 32, "blocks": 32, "registers": 131072, "warp_size": 64, "reserved": 0}
_RDNA: dict[str, Any] = {"warps": 32, "blocks": 32, "registers": 98304, "reserved": 0, "compiled": False}
_ADA, _BLACKWELL = "Ada GPU architecture, white paper", "RTX Blackwell GPU architecture, white paper"
# fmt: off
# The first card of a target is the one that its tables are made for.
CHIPS = {
    "a100": Chip("A100 SXM 80 GB", 80, 108, 2.039e12, _rates(19.5, 156, 312), 166912, 167936, 64, 32,
                 l2=40, source="A100 data sheet"),
    "rtx3090": Chip("RTX 3090", 86, 82, 0.936e12, _rates(35.6, 35.6, 71), blocks=16,
                    l2=6, source="Ampere GA102 GPU architecture, white paper", **_GEFORCE),
    "rtx4090": Chip("RTX 4090", 89, 128, 1.008e12, _rates(82.6, 82.6, 165.2, 330.3), blocks=24,
                    l2=72, source=_ADA, **_GEFORCE),
    "rtx4080": Chip("RTX 4080", 89, 76, 0.7168e12, _rates(48.7, 48.7, 97.5, 194.9), blocks=24,
                    l2=64, source=_ADA, **_GEFORCE),
    "rtx4070": Chip("RTX 4070", 89, 46, 0.504e12, _rates(29.1, 29.1, 58.3, 116.6), blocks=24,
                    l2=36, source=f"product page: SMs and clock; rates of an SM: {_ADA}", **_GEFORCE),
    "l4": Chip("L4", 89, 58, 0.3e12, _rates(30.3, 60, 121, 242.5), blocks=24,
               l2=48, source="L4 data sheet", **_GEFORCE),
    "l40s": Chip("L40S", 89, 142, 0.864e12, _rates(91.6, 183, 362, 733), blocks=24,
                 l2=96, source="L40S data sheet", **_GEFORCE),
    "h200": Chip("H200 SXM", sms=132, bandwidth=4.8e12, flops=_rates(67, 494.7, 989.4, 1978.9),
                 l2=60, source="H200 data sheet; L2 as the driver says", **_HOPPER),
    "h100": Chip("H100 SXM", sms=132, bandwidth=3.35e12, flops=_rates(67, 494.7, 989.4, 1978.9),
                 l2=50, source="H100 GPU architecture, white paper", **_HOPPER),
    "b200": Chip("B200", 100, 148, 8e12, _rates(75, 1100, 2250, 4500), 232448, 233472, 64, 32,
                 l2=126, source="HGX B200 data sheet; L2 as the driver says"),
    "rtx5090": Chip("RTX 5090", 120, 170, 1.792e12, _rates(104.8, 104.8, 209.5, 419), blocks=24,
                    l2=96, source=_BLACKWELL, **_GEFORCE),
    "rtx5080": Chip("RTX 5080", 120, 84, 0.96e12, _rates(56.3, 56.3, 112.6, 225.1), blocks=24,
                    l2=64, source=_BLACKWELL, **_GEFORCE),
    "mi300x": Chip("MI300X", "gfx942", 304, 5.3e12, _rates(163.4, 653.7, 1307.4, 2614.9), 65536, 65536,
                   l2=32, source="MI300X data sheet", **_CDNA),
    "mi350x": Chip("MI350X", "gfx950", 256, 8e12, _rates(144.2, 0, 2306.9, 4613.7), 163840, 163840,
                   l2=32, source="MI350X data sheet", **_CDNA),
    "mi355x": Chip("MI355X", "gfx950", 256, 8e12, _rates(157.3, 0, 2516.6, 5033.2), 163840, 163840,
                   l2=32, source="MI355X data sheet", **_CDNA),
    "rx7900xtx": Chip("RX 7900 XTX", "gfx1100", 96, 0.96e12, _rates(61.4, 0, 122.8), 65536, 65536,
                      l2=6, source="product page; RDNA 3 instruction set", **_RDNA),
}
# fmt: on
TARGETS: tuple[Target, ...] = tuple(dict.fromkeys(chip.target for chip in CHIPS.values() if chip.compiled))


def find(name: str) -> Chip:
    """The card of a name: "rtx4090", "RTX 4090", or what PyTorch calls it, "NVIDIA GeForce RTX 4090".

    Raises ValueError with the nearest names. A card with another memory or slot than the table's is another card.
    """
    known = {_plain(chip.name): chip for chip in CHIPS.values()} | CHIPS
    if (plain := _plain(name)) in known:
        return known[plain]
    near = difflib.get_close_matches(plain, CHIPS, n=4, cutoff=0.4)
    words = said("no card is called {name}. The table has {names}; add yours to lessonkit/base/chips.py")
    if near:
        words = said(
            "no card is called {name}. The closest: {near}. The table has {names}; add yours to lessonkit/base/chips.py"
        )
    closest = ", ".join(CHIPS[key].name for key in near)
    raise ValueError(words.format(name=repr(name), near=closest, names=", ".join(CHIPS)))


def _plain(name: str) -> str:
    """The model alone: a100, rtx4090."""
    words = re.sub(r"nvidia|geforce|amd|instinct|radeon|sxm\d?|hbm\d?e?", " ", name.lower())
    return re.sub(r"(^a100|^h100)80gb$|(^h200)141gb$", r"\1\2", re.sub(r"[^a-z0-9]", "", words))


def chosen() -> Chip | None:
    """The card that COURSE_GPU names, if it is set. Raises ValueError if the table does not have it."""
    name = os.environ.get(CHOICE, "")
    try:
        return find(name) if name else None
    except ValueError as why:
        raise ValueError(f"{CHOICE}={name}: {why}") from None


def of(target: Target) -> Chip:
    """The card that code for this target is judged for: the chosen one if that is its target, else the table's first.

    Raises ValueError for a target or a name that the table does not have.
    """
    mine = chosen()
    return mine if mine and mine.target == target else first(target)


def first(target: Target) -> Chip:
    """The table's first card with this target, whatever card is chosen. Raises ValueError if there is none."""
    for chip in CHIPS.values():
        if chip.target == target:
            return chip
    raise ValueError(f"no card has target {target!r}: the table has {', '.join(map(str, TARGETS))}")


def label(target: Target) -> str:
    """sm_90, gfx942."""
    return target if isinstance(target, str) else f"sm_{target}"
