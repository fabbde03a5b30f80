"""Tables as CSV files; the first line of one may say what its rows come from."""

import csv
import hashlib
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def to_csv(rows: Iterable[dict[str, Any]]) -> str:
    """A file's text: a line of heads, those of the first row, and a line for each row."""
    rows, out = list(rows), io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def read_csv(path: Path) -> list[dict[str, str]]:
    return dicts(path.read_text()) if path.exists() else []


def dicts(text: str) -> list[dict[str, str]]:
    """The rows of a file's text. Lines that begin with # are none."""
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


def digits(value: float) -> float:
    """A figure with four significant digits, at any size."""
    return float(f"{value:.4g}")
