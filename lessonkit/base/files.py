"""Where things lie, and how a file is written: the checkout, its reports, the cache."""

import os
import shlex
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "reports"
WHOLE_COURSE = Path("paths", "11w.toml")  # the path that has every lesson
CACHE = Path(os.environ.get("COURSE_CACHE") or Path.home() / ".cache" / "gpu-kernel-course").resolve()
# Modules that lessons name without their group, `from lessonkit import timing`; each is loaded when it is first named.
BY_NAME = {
    "check": "judge",
    "compiled": "modes",
    "memory": "measure",
    "plots": "pages",
    "report": "pages",
    "rows": "measure",
    "timing": "measure",
}


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file in one step: a stopped run leaves the old one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = tempfile.NamedTemporaryFile(dir=path.parent, delete=False)  # noqa: SIM115 - closed below
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # the file's name, not the part's
    with begun as part:
        try:
            part.write(content.encode() if isinstance(content, str) else content)
            part.close()  # Windows moves no open file
            os.chmod(part.name, 0o644)
            os.replace(part.name, path)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise


def lock(file: IO[Any] | int, wait: bool = True) -> None:
    """Hold an open file's lock until it is closed. OSError if another process holds it and this one shall not wait.

    On Windows it does nothing: the CUDA C++ programs, which need it, are not built there.
    """
    if fcntl:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Hold this around the reading, the changing and the writing of a file: another process waits at its own.

    The lock is the folder's, so that no file is left behind, and one folder is changed by one process at a time.
    On Windows, which cannot lock a folder, it does nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not fcntl:
        yield
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        lock(folder)
        yield
    finally:
        os.close(folder)


def need_private(*folders: Path) -> None:
    """Make these folders of the cache. PermissionError if other users may write to one, or to the cache itself.

    What lies there is executed, or believed. One's own group may write: many systems give every user a group with no
    one else in it. Windows has no such modes: there a user's folder is the user's alone.
    """
    me = os.getuid() if hasattr(os, "getuid") else None
    mend = "(or set COURSE_CACHE to a folder of your own): files in it are executed"
    for folder in (CACHE, *folders):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if me is None:
            continue
        there, what = folder.stat(), "the cache" if folder == CACHE else "the cache's"
        if there.st_uid != me:
            raise PermissionError(f"{what} {folder} belongs to user {there.st_uid}, not to you: remove it {mend}")
        if there.st_mode & stat.S_IWOTH or (there.st_mode & stat.S_IWGRP and there.st_gid != os.getgid()):
            raise PermissionError(f"other users may write to {what} {folder}: rm -r {shlex.quote(str(folder))} {mend}")


def environment(**more: str) -> dict[str, str]:
    """For a process that settles for itself whether it interprets, and finds this course from any folder."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))} | more
