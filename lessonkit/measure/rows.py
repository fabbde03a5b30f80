"""Measured rows: what one is, which code it came from, and how it is kept."""

import hashlib
import os
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from lessonkit.base import device, renames
from lessonkit.base.files import REPORTS, ROOT, changing, write_atomically
from lessonkit.base.tables import dicts, read_csv, to_csv
from lessonkit.base.words import later

ABSENT = "absent"
NOT_INSTALLED = later("not installed")  # a reason in absent.csv
WRONG_IN_A_ROUND = "wrong in a round"  # a reason: the first answer was right, a later one was not
# What rows say of a peer that was not timed (words.retold).
REASONS = (
    NOT_INSTALLED,
    later("refused the shape, or gave another answer"),
    later("it refuses: {error}"),
    later("wrong in a round: {error}"),
    later("groups differ in size"),
    later("quack's rows start at multiples of 16 bytes"),
    later("cuDNN's backend in PyTorch has no window"),
    later("Rejected: value: result {result}: {wrong} of {all} wrong, the first at {first}: expected {expected}, got "
          "{got}, more off than {off}"),
    later("Rejected: value: result {result}: {wrong} of {all} wrong, all in {where}, the first at {first}: expected "
          "{expected}, got {got}, more off than {off}"),
    later("Rejected: value: result {result} is off by {error} in the mean, PyTorch's by {usual}"),
)  # fmt: skip
OWN_VERSION = ("torch", "SDPA", "cuBLASLt", "CUB")  # peers that begin so come with what the columns torch and cuda name
ELSEWHERE = " §"  # behind the name of a peer that only another lesson of the operator timed (results.beside)
MACHINE = "nvidia-h200"  # the folder of reports/ that predictions are about, and of which a release wants every row
PROVENANCE = ("source", "machine", "seal")  # columns that say which code a row is of; the others are what was measured
DISTURBED = 1.5  # the middle three fifths of a contender's times differ by a few percent, if it has the GPU to itself
CODE = ("*.py", "*.cu", "*.cuh", "*.h", "*.cpp")


def far_apart(p20: float, p80: float) -> bool:
    """Whether the middle three fifths of a contender's times spread over more than DISTURBED allows."""
    return p80 > DISTURBED * p20


def may_be_the_best(why: str) -> bool:
    """Whether a peer that has no time for this reason may be the best one: the ratio to the best is then empty.

    Not one whose first answer is wrong, or that refuses the shape: it computes something else.
    """
    return why.startswith((NOT_INSTALLED, WRONG_IN_A_ROUND))


@dataclass(frozen=True)
class Row:
    """One contender at one shape. A shape that is measured again replaces all of its rows."""

    lesson: str
    rung: str
    kind: str  # rung, peer, limit (a copy of the same number of bytes), or absent (a peer that was not timed)
    shape: str
    dtype: str
    ms_p20: float
    ms_p50: float
    ms_p80: float
    bytes: int  # the least the op must move
    tb_per_s: float
    tflop_per_s: float
    percent_of_limit: float  # as timed: of the copy, or of cuBLAS's rate at 8192; pages show yardstick.share
    ratio_to_best_peer: float  # above 1: faster than the best peer; 0 (empty in the file) without peers
    gpu: str
    driver: str
    torch: str
    triton: str
    cuda: str
    commit: str  # "+" behind it: the code was changed and not committed
    date: str
    source: str  # fingerprint.contender; behind it "=..." for each later source whose machine code was shown equal
    machine: str = ""  # launches.marks, one for each version of a compiler
    peer_version: str = ""  # the packages that a peer comes from
    reason: str = ""  # why a peer is absent
    seal: str = ""  # a hash of what was measured: a figure that is changed by accident no longer fits it

    def sealed(self) -> "Row":
        """The row with the seal that fits it."""
        measured = {name: value for name, value in asdict(self).items() if name not in PROVENANCE}
        return replace(self, seal=hashlib.sha256("|".join(map(str, measured.values())).encode()).hexdigest()[:10])

    def is_of(self, source: str) -> bool:
        """Whether the row was measured with this source, or with one that gives the GPU the same."""
        return source in self.source.replace("=", "").split()

    @property
    def disturbed(self) -> bool:
        """Whether the times of its calls lie far apart: another process used the GPU, or the call itself varies."""
        return far_apart(self.ms_p20, self.ms_p80)

    @property
    def of_no_version(self) -> bool:
        """Whether this is a peer from a package whose version the row does not say."""
        return self.kind == "peer" and not self.peer_version and not self.rung.startswith(OWN_VERSION)

    @property
    def rate(self) -> str:
        """What the row's time means, in the unit of what limits the op at this shape; a copy has only bytes."""
        if self.limited_by_math and self.kind != "limit":
            return f"{self.tflop_per_s:{'.0f' if self.tflop_per_s >= 100 else '.3g'}} TFLOP/s"
        return f"{self.tb_per_s:{'.2f' if self.tb_per_s >= 0.1 else '.3g'}} TB/s"

    @property
    def limited_by_math(self) -> bool:
        return limited_by_math(self.tflop_per_s, self.tb_per_s, self.dtype)


def limited_by_math(flops: float, moved: float, dtype: str) -> bool:
    """More FLOPs a byte than a GPU has time for: its tensor cores do 100 to 200 in 16 bits, its fp32 units 12.

    Both numbers are a call's, or both are rates.
    """
    return flops > moved * (12 if dtype == "float32" else 190)


def read(path: Path) -> list[Row]:
    """What was timed. A renamed lesson's rows are found under its old name and have the new ones.

    Rows from before peers had to be there, with their versions, keep their ratio in the file, and show none. absent.csv
    beside them knows which peers were absent.
    """
    lacking = {
        line["shape"]
        for line in read_csv(path.with_name("absent.csv"))
        if line["reason"] == NOT_INSTALLED and renames.lesson(line["lesson"]) == renames.lesson(path.stem)
    }
    timed = [row for row in read_all(path) if row.kind != ABSENT]
    lacking |= {row.shape for row in timed if row.of_no_version}
    return [replace(row, ratio_to_best_peer=0.0) if row.shape in lacking else row for row in timed]


def read_all(path: Path) -> list[Row]:
    """What the file holds: also the peers that were absent, and all ratios."""
    place = renames.place(path)
    return list(_parsed(place.read_text(), renames.text())) if place.exists() else []


@lru_cache(512)
def _parsed(text: str, names: str) -> tuple[Row, ...]:
    """The rows of a file under the names of today (`names`: the map of them)."""
    return tuple(_renamed(_row(raw)) for raw in dicts(text))


def _row(raw: dict[str, str]) -> Row:
    types: dict[str, Any] = {f.name: f.type for f in fields(Row)}
    return Row(**{name: types[name](value or (0 if types[name] is float else "")) for name, value in raw.items()})


def _renamed(row: Row) -> Row:
    lesson, rung = renames.lesson(row.lesson), renames.rung(row.lesson, row.rung)
    new = replace(row, lesson=lesson, rung=rung)
    return new.sealed() if new != row and row.sealed() == row else new


def as_csv(rows: Iterable[Row]) -> str:
    """The file of these rows: a ratio that there is not is left empty."""
    return to_csv(asdict(row) | {"ratio_to_best_peer": row.ratio_to_best_peer or ""} for row in rows)


def save(rows: list[Row]) -> Path:
    """Keep rows of one lesson. All that was there of the same shapes and GPU goes: ratios are of one run."""
    path = REPORTS / device.name() / f"{rows[0].lesson}.csv"
    with changing(path):
        before = read_all(path)
        anew = {(row.shape, row.gpu) for row in rows}
        kept = [row for row in before if (row.shape, row.gpu) not in anew]
        order = list(dict.fromkeys(row.shape for row in [*before, *rows]))
        merged = sorted([*kept, *(row.sealed() for row in rows)], key=lambda row: order.index(row.shape))
        write_atomically(path, as_csv(merged))
    return path


def machine() -> dict[str, str]:
    """The columns that say where a row was measured."""
    import torch
    import triton

    return {
        "gpu": device.name(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or "none",
        "commit": this_commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def this_commit() -> str:
    """The commit of this checkout; LESSONKIT_COMMIT says it of a copy that came without git."""
    return os.environ.get("LESSONKIT_COMMIT") or commit(ROOT)


def commit(root: Path) -> str:
    """The commit that a checkout is at, with "+" behind it if code was changed since; "unknown" without git."""
    found = _output("git", "-C", str(root), "rev-parse", "--short=10", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--", *CODE)
    return f"{found}{'+' if changed else ''}" if found else "unknown"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""


# What lessons, and what their fingerprints count (sweeps), name here beside rows' own.
__all__ = ["MACHINE", "REPORTS", "Row", "read", "read_csv", "write_atomically"]
