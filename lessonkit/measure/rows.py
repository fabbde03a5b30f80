"""Measured rows: what one is, which code it came from, and how it is kept."""

import csv
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from lessonkit.base import device, renames
from lessonkit.lesson import ROOT

REPORTS = ROOT / "reports"


ABSENT = "absent"
PROVENANCE = ("source", "machine", "seal")  # columns that say which code a row is of; the others are what was measured
CODE = ("*.py", "*.cu", "*.cuh", "*.h", "*.cpp")


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
    percent_of_limit: float
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
    def rate(self) -> str:
        """What the row's time means, in the unit of what limits the op at this shape; a copy has only bytes."""
        if self.limited_by_math and self.kind != "limit":
            return f"{self.tflop_per_s:.0f} TFLOP/s"
        return f"{self.tb_per_s:.2f} TB/s"

    @property
    def limited_by_math(self) -> bool:
        """More FLOPs a byte than a GPU has time for: its tensor cores do 100 to 200 in 16 bits, its fp32 units 12."""
        return self.tflop_per_s > self.tb_per_s * (12 if self.dtype == "float32" else 190)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file in one step: a stopped run leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
        try:
            part.write(content.encode() if isinstance(content, str) else content)
            part.flush()
            os.chmod(part.name, 0o644)
            os.replace(part.name, path)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise


def to_csv(rows: Iterable[dict[str, Any]]) -> str:
    rows = list(rows)
    with tempfile.TemporaryFile("w+", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        out.seek(0)
        return out.read()


def read_csv(path: Path) -> list[dict[str, str]]:
    return _dicts(path.read_text()) if path.exists() else []


def _dicts(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def with_head(about: dict[str, Any], csv_text: str) -> str:
    """A file whose first line, skipped by `read_csv`, says what its rows come from."""
    return f"# {json.dumps(about, ensure_ascii=False)}\n{csv_text}"


def head(path: Path) -> dict[str, Any]:
    """What the first line of such a file says; {} where there is none."""
    first = path.read_text().partition("\n")[0] if path.exists() else ""
    return dict(json.loads(first.removeprefix("# "))) if first.startswith("# {") else {}


def seal(rows: Iterable[dict[str, Any]], commit: str) -> str:
    """A hash of a table and of the commit that it was measured at."""
    return hashlib.sha256(f"{commit}\n{to_csv(rows)}".encode()).hexdigest()[:10]


def read(path: Path) -> list[Row]:
    """What was timed. A renamed lesson's rows are found under its old name and have the new ones."""
    return [row for row in read_all(path) if row.kind != ABSENT]


def read_all(path: Path) -> list[Row]:
    """As `read`, and the peers that were absent."""
    place = renames.place(path)
    return list(_parsed(place.read_text(), renames.text())) if place.exists() else []


@lru_cache(512)
def _parsed(text: str, names: str) -> tuple[Row, ...]:
    """The rows of a file under the names of today (`names`: the map of them)."""
    return tuple(_renamed(_row(raw)) for raw in _dicts(text))


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
        "commit": os.environ.get("LESSONKIT_COMMIT") or commit(ROOT),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


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
