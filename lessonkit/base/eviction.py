"""What nobody has used for 30 days leaves the cache; its time of use is the time of its folder (or file)."""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lessonkit.base import files

DAY = 24 * 3600
UNUSED = 30 * DAY
# Folders of things that need no lock: they are written at once, or by one process at a time.
PARTS = ("lessonkit_mutants", "lessonkit_answers", "opcodes", "verdicts", "compiled", "versions", "web")
WHOLE = ("pyodide-*",)  # folders that are one thing each


def used(path: Path) -> None:
    """Keep this for another 30 days, if it is there."""
    with suppress(FileNotFoundError):
        os.utime(path)


def evict(cache: Path) -> None:
    """Remove what is unused, at most once a day, and never what another process is building.

    The cache may be a folder with other things in it: only what looks like the course's own is touched.
    """
    stamp = cache / "evicted"
    if stamp.exists() and not _older(stamp, DAY):
        return
    stamp.touch()
    builds = (path for path in cache.iterdir() if re.search(r"-[0-9a-f]{16}$", path.name) and (path / "lock").exists())
    for path in filter(_unused, builds):
        with suppress(OSError), (path / "lock").open() as lock:  # another process holds it, or has removed it
            files.lock(lock, wait=False)
            if _unused(path):
                _remove(path)
    for path in filter(_unused, _entries(cache)):
        _remove(path)


def _entries(cache: Path) -> Iterator[Path]:
    for part in PARTS:
        with suppress(FileNotFoundError):
            yield from list((cache / part).iterdir())
    for pattern in WHOLE:
        yield from list(cache.glob(pattern))


def _older(path: Path, seconds: float) -> bool:
    with suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime > seconds
    return False


def _unused(path: Path) -> bool:
    return _older(path, UNUSED)


def _remove(path: Path) -> None:
    """At once for who looks for it, so that nobody finds half of a folder."""
    with suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        shutil.move(path, folder)
