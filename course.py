#!/usr/bin/env python3
"""The course's two commands, on a machine with nothing but Python 3.11 or newer:

    python3 course.py run     make .venv, install what is missing, run every lesson in order
    python3 course.py test    the same environment, then lint, format, types and all tests

Any other words go to `python -m lessonkit` inside the environment (doctor, list, check, bench, report, ...).
Repeating a command is safe; an environment that is already complete is used as it is.
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = Path(os.environ.get("COURSE_VENV", ROOT / ".venv"))
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
    # A worker that has nothing left takes from the other: the slow tests of a file stand one behind the other.
    ("pytest", "-m", "not alone", "-n", "auto", "--dist", "worksteal"),
    ("pytest", "-m", "alone"),
)


def extras() -> str:
    """What to install beside the course: its tests' tools, what day 4 runs, the CUDA compiler if there is none."""
    folders = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    found = shutil.which("nvcc") or any(Path(folder, "bin", "nvcc").exists() for folder in folders if folder)
    return "test,notebook,models" if found else "test,notebook,models,nvcc"


def environment() -> None:
    """Make the virtual environment and install the course into it, once for each version of what it needs."""
    wanted = (ROOT / "pyproject.toml").read_text() + (ROOT / "constraints.txt").read_text() + extras()
    stamp = VENV / "course_installed.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"installing the course into {VENV} (some minutes the first time)", flush=True)
    if not PYTHON.exists():
        try:
            venv.create(VENV, with_pip=True)
        except BaseException as why:  # half of one would be taken for a whole one next time
            shutil.rmtree(VENV, ignore_errors=True)
            if isinstance(why, subprocess.CalledProcessError):  # Debian keeps what puts pip there in a package apart
                sys.exit("No virtual environment can be made here: apt install python3-venv, then repeat the command.")
            raise
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--constraint", str(ROOT / "constraints.txt"), "--editable", f"{ROOT}[{extras()}]"], check=True
    )
    stamp.write_text(wanted)


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - an older Python reads this file, and should say what is wrong
        print(f"The course needs Python 3.11 or newer, this is {sys.version.split()[0]}: run it with a newer python3.")
        return 2
    try:
        environment()
    except subprocess.CalledProcessError as failed:
        print(f"The installation failed (pip's words are above); mend it and repeat the command, or remove {VENV}.")
        return failed.returncode
    words = sys.argv[1:] or ["run"]
    if words[0] != "test":
        env = os.environ | {"COURSE_PY": "1"}  # so that what it advises can be typed as it stands
        os.chdir(ROOT)
        sys.stdout.flush()
        # In place of this process: Ctrl-C and kill reach the run, which ends its lessons and says how far it came.
        os.execve(PYTHON, [str(PYTHON), "-m", "lessonkit", *words], env)
    codes = [subprocess.run([str(PYTHON), "-m", *check], cwd=ROOT).returncode for check in CHECKS]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
