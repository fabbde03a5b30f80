"""The one table of chips: data-sheet figures, and the limits of one SM or CU that decide what fits and how often.

COURSE_GPU names your card (`COURSE_GPU=rtx4090`). Without a GPU, tiles, occupancy and predictions are then that card's.
Rates are dense, with fp32 accumulation, from the makers' data sheets. Limits of an SM are from CUDA's programming guide
(table of compute capabilities), those of a CU from AMD's CDNA 3 and CDNA 4 instruction-set documents.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

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
    registers: int = 65536  # of 32 bits
    warp_size: int = 32
    reserved: int = 1024  # bytes of shared memory that the system takes for each program

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
        return (by_compute, "compute") if by_compute > by_memory else (by_memory, "memory")


def is_amd(target: Target) -> bool:
    return isinstance(target, str)


def _rates(fp32: float, tf32: float, bf16: float, fp8: float = 0) -> dict[str, float]:
    return {key: t * 1e12 for key, t in {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp8": fp8}.items() if t}


# fmt: off
_HOPPER = {"target": 90, "shared_block": 232448, "shared": 233472, "warps": 64, "blocks": 32}
_GEFORCE = {"shared_block": 101376, "shared": 102400, "warps": 48}
_CDNA = {"warps": 32, "blocks": 32, "registers": 131072, "warp_size": 64, "reserved": 0}
CHIPS = {
    "a100": Chip("A100 SXM 80 GB", 80, 108, 2.039e12, _rates(19.5, 156, 312), 166912, 167936, 64, 32),
    "rtx3090": Chip("RTX 3090", 86, 82, 0.936e12, _rates(35.6, 35.6, 71), blocks=16, **_GEFORCE),
    "rtx4090": Chip("RTX 4090", 89, 128, 1.008e12, _rates(82.6, 82.6, 165.2, 330.3), blocks=24, **_GEFORCE),
    "l40s": Chip("L40S", 89, 142, 0.864e12, _rates(91.6, 183, 362, 733), blocks=24, **_GEFORCE),
    "h200": Chip("H200 SXM", sms=132, bandwidth=4.8e12, flops=_rates(67, 494.7, 989.4, 1978.9), **_HOPPER),
    "h100": Chip("H100 SXM", sms=132, bandwidth=3.35e12, flops=_rates(67, 494.7, 989.4, 1978.9), **_HOPPER),
    "b200": Chip("B200", 100, 148, 8e12, _rates(75, 1100, 2250, 4500), 232448, 233472, 64, 32),
    "rtx5090": Chip("RTX 5090", 120, 170, 1.792e12, _rates(104.8, 104.8, 209.5, 419), blocks=24, **_GEFORCE),
    "mi300x": Chip("MI300X", "gfx942", 304, 5.3e12, _rates(163.4, 653.7, 1307.4, 2614.9), 65536, 65536, **_CDNA),
    "mi350x": Chip("MI350X", "gfx950", 256, 8e12, _rates(144.2, 0, 2306.9, 4613.7), 163840, 163840, **_CDNA),
}
# fmt: on
TARGETS: tuple[Target, ...] = tuple(dict.fromkeys(chip.target for chip in CHIPS.values()))


def chosen() -> Chip | None:
    """The card that COURSE_GPU names, if it is set. Raises ValueError if the table does not have it."""
    name = os.environ.get(CHOICE, "")
    if not name:
        return None
    if name not in CHIPS:
        raise ValueError(f"{CHOICE}={name}: the table has {', '.join(CHIPS)}; add yours to lessonkit/base/chips.py")
    return CHIPS[name]


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
