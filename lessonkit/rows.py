"""Measured rows: what one is, which code it came from, and how it is kept."""

import ast
import csv
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lessonkit import device
from lessonkit.lesson import ROOT

REPORTS = ROOT / "reports"


@dataclass(frozen=True)
class Row:
    """One contender at one shape. Key: lesson, rung, shape, dtype, gpu; measuring again replaces."""

    lesson: str
    rung: str
    kind: str  # rung, peer, or limit (a copy of the same number of bytes)
    shape: str
    dtype: str
    ms_p20: float
    ms_p50: float
    ms_p80: float
    bytes: int  # the least the op must move
    tb_per_s: float
    tflop_per_s: float
    percent_of_limit: float
    ratio_to_best_peer: float  # above 1: faster than the best peer
    gpu: str
    driver: str
    torch: str
    triton: str
    cuda: str
    commit: str
    date: str
    code: str  # fingerprint of the rung's source and of the kernels it launches

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

    @property
    def key(self) -> tuple[str, ...]:
        return self.lesson, self.rung, self.shape, self.dtype, self.gpu


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
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def read(path: Path) -> list[Row]:
    types: dict[str, Any] = {f.name: f.type for f in fields(Row)}
    return [Row(**{name: types[name](value) for name, value in raw.items()}) for raw in read_csv(path)]


def save(rows: list[Row]) -> Path:
    """Merge rows of one lesson into its file."""
    path = REPORTS / device.name() / f"{rows[0].lesson}.csv"
    merged = {row.key: row for row in read(path)} | {row.key: row for row in rows}
    write_atomically(path, to_csv(asdict(row) for row in merged.values()))
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
        "commit": os.environ.get("LESSONKIT_COMMIT")
        or _output("git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD")
        or "unknown",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""


def fingerprint(module: str, function: str) -> str:
    """Hash of a function's code and of all that it reaches in its file, and in the .cu beside it.

    Comments, docstrings and the layout of C++ do not count.
    """
    path = Path(sys.modules[module].__file__ or "")
    tree = ast.parse(path.read_text())
    named: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            named[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named[node.targets[0].id] = node
    reached: dict[str, str] = {}
    todo = [function]
    while todo:
        name = todo.pop()
        if name in named and name not in reached and name != "LESSON":
            words = list(_words(named[name]))
            reached[name] = " ".join(words)
            todo += words
    if (program := path.with_suffix(".cu")).exists():
        from lessonkit.cuda import build, source

        files = [file for file in build.local_files(program) if file.name not in build.SHARED]
        named_here = {word for code in reached.values() for word in code.split()}
        reached |= {f"C++ {name}": code for name, code in source.reached(files, named_here).items()}
    return hashlib.sha256("\n".join(reached[n] for n in sorted(reached)).encode()).hexdigest()[:10]


def _words(node: ast.AST) -> Iterator[str]:
    """The code under a node in order, the same on every Python version: node types, names, constants; no docstrings."""
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant):
                continue
            if isinstance(item, ast.AST):
                yield from _words(item)
            elif item is not None and name not in ("kind", "type_comment", "ctx"):
                yield str(item)
