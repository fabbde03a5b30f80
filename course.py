#!/usr/bin/env python3
"""The course's two commands, on a machine with nothing but Python 3.11 or newer:

    python3 course.py run     make .venv, install what is missing, run every lesson in order
    python3 course.py test    the same environment, then lint, format, types and the tests of each push
    python3 course.py test --all       each night's tests too; nothing is taken from earlier runs
    python3 course.py test --release   what a release needs as well

Words after `test` go to pytest. Any other words go to `python -m lessonkit` inside the environment (doctor, list,
check, bench, report, ...). Repeating a command is safe; an environment that is already complete is used as it is.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = Path(os.environ.get("COURSE_VENV", ROOT / ".venv"))
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
REQUIREMENTS = ROOT / "requirements"  # written by `python -m lessonkit lock`
# Nothing but the files whose hashes are listed: what must be built is built with what is installed. Compiling every
# installed module to bytecode would take longer than unpacking it; Python compiles what it imports.
HASHED = ("--no-deps", "--require-hashes", "--no-build-isolation", "--no-compile")
BROWSERS = ("chromium", "google-chrome")
LINT = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",))
# A worker that has nothing left takes from the other: the slow tests of a lesson stand one behind the other.
SUITE = ("pytest", "-n", "auto", "--dist", "worksteal")


def variables() -> dict[str, str]:
    """The environment variables of all that is started here.

    Where Python is told to write no bytecode, each process would compile PyTorch anew. It goes into VENV then.
    """
    env = dict(os.environ)
    if env.pop("PYTHONDONTWRITEBYTECODE", ""):
        env.setdefault("PYTHONPYCACHEPREFIX", str(VENV / "bytecode"))
    return env | {"PYTHONUTF8": "1"} if os.name == "nt" else env  # Windows reads files in a code page of its own


def lists() -> list[Path]:
    """What to install: the course's packages and its tests' tools, the book's, the CUDA compiler if there is none."""
    folders = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    found = shutil.which("nvcc") or any(Path(folder, "bin", "nvcc").exists() for folder in folders if folder)
    return [REQUIREMENTS / name for name in ("course.txt", "web.txt", *(() if found else ("nvcc.txt",)))]


def make_venv() -> None:
    """Make the virtual environment if it is not there. On a failure, files that were there before stay as they were."""
    if PYTHON.exists() and (VENV / "pyvenv.cfg").exists():
        return
    there_before = VENV.exists()
    if there_before and (not VENV.is_dir() or any(VENV.iterdir())):
        sys.exit(
            f"{VENV} exists and is not a complete virtual environment. Nothing in it was changed. "
            "Move it away, or set COURSE_VENV to a folder that does not exist yet; then repeat the command."
        )
    try:
        venv.create(VENV, with_pip=True)
    except BaseException as why:  # half an environment would be taken for a whole one next time
        for path in list(VENV.iterdir()) if there_before else [VENV]:  # VENV was empty
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.exists() or path.is_symlink():
                path.unlink()
        if isinstance(why, subprocess.CalledProcessError):  # Debian has ensurepip in a package of its own
            sys.exit("No virtual environment can be made here: apt install python3-venv, then repeat the command.")
        raise


def environment() -> None:
    """Make the virtual environment and install the course into it, once for each version of what it needs."""
    needed = [*lists(), REQUIREMENTS / "torch_cpu.txt", REQUIREMENTS / "torch.txt"]
    wanted = "".join(path.read_text() for path in (ROOT / "pyproject.toml", *needed))
    stamp = VENV / "course_installed.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"installing the course into {VENV} (some minutes the first time)", flush=True)
    make_venv()
    *others, without_cuda, usual = needed
    for path in others:
        pip("install", *HASHED, "--requirement", str(path))
    # Without a GPU PyTorch's build for CPUs will do, 3 GB smaller, where pip's settings name a place that has it.
    if shutil.which("nvidia-smi") or not pip("install", *HASHED, "--requirement", str(without_cuda), must=False):
        pip("install", *HASHED, "--requirement", str(usual))
    # The course itself is built with what is installed: pip would fetch setuptools anew, and compare no hash.
    pip("install", "--no-deps", "--no-build-isolation", "--no-compile", "--editable", str(ROOT))
    if sys.platform == "linux":
        pip("check")
    else:
        interpreter_of_triton()
    stamp.write_text(wanted)


def browser() -> str:
    """The path of the first of BROWSERS that is here, or ""."""
    return next(filter(None, map(shutil.which, BROWSERS)), "")


def browsers_tests() -> None:
    """What the book's tests in a browser need, where there is one. Without it they are skipped, and say so."""
    needed, stamp = (REQUIREMENTS / "browser.txt").read_text(), VENV / "browser_installed.txt"
    if not browser() or (stamp.exists() and stamp.read_text() == needed):
        return
    if pip("install", *HASHED, "--requirement", str(REQUIREMENTS / "browser.txt"), must=False):
        stamp.write_text(needed)


def pip(*words: str, must: bool = True) -> bool:
    """Whether pip could. If it must, raises CalledProcessError, and pip's words are shown.

    Where it can, its warnings are not shown: they speak of the machine's other packages and of pip's settings.
    """
    command = [str(PYTHON), "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode and must:
        print(done.stdout, end="", file=sys.stderr, flush=True)
        done.check_returncode()
    return not done.returncode


def interpreter_of_triton() -> None:
    """Unpack the Python files of Triton's Linux wheel, 200 MB, where it has no other: kernels are interpreted by them.

    lessonkit/base/libtriton.py takes the place of the compiled part.
    """
    locked = (REQUIREMENTS / "course.txt").read_text()
    listed = re.search(r"^(triton==\S+)[^\\]*((?:\\\n +--hash=\S+ ?)+)", locked, re.MULTILINE)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([str(PYTHON), "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory(dir=VENV) as folder:
        which = ["--no-deps", "--only-binary=:all:", "--platform=manylinux_2_28_x86_64", "--python-version=3.11"]
        anywhere = Path(folder, "triton.txt")  # the list says that it is for Linux
        anywhere.write_text(" ".join(listed.groups()))
        pip("download", *which, "--require-hashes", f"--dest={folder}", "--requirement", str(anywhere))
        (wheel,) = Path(folder).glob("triton-*.whl")
        for old in [Path(packages, "triton"), *Path(packages).glob("triton-*.dist-info")]:
            shutil.rmtree(old, ignore_errors=True)
        with zipfile.ZipFile(wheel) as files:
            named = [name for name in files.namelist() if name.endswith(".py") or ".dist-info/" in name]
            files.extractall(packages, [name for name in named if not name.endswith("/RECORD")])


def exit_status(*codes: int) -> int:
    """The first return code that is not 0, or 0. A process that signal n ended has code -n, which becomes 128 + n."""
    failed = next((code for code in codes if code), 0)
    return failed if failed >= 0 else 128 - failed


def test(words: list[str]) -> int:
    """The suite, and beside it lint, format and types, whose words are printed when all have ended."""

    def lint(check: tuple[str, ...]) -> subprocess.CompletedProcess:
        command = [str(PYTHON), "-m", *check]
        # mypy knows files by their content: another clone and environment take what was found of PyTorch's.
        cache = Path(os.environ.get("COURSE_CACHE") or Path.home() / ".cache" / "gpu-kernel-course", "mypy")
        env = {"MYPY_CACHE_DIR": str(cache)} | variables()
        return subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    with ThreadPoolExecutor(1) as beside:
        linted = [beside.submit(lint, check) for check in LINT]
        suite = subprocess.run([str(PYTHON), "-m", *SUITE, *words], cwd=ROOT, env=variables())
        done = [each.result() for each in linted]
    for check, said in zip(LINT, done, strict=True):
        print(f"{' '.join(check)}: {said.stdout.strip() or 'ok'}")
    return exit_status(suite.returncode, *(said.returncode for said in done))


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - an older Python reads this file, and should say what is wrong
        print(f"The course needs Python 3.11 or newer, this is {sys.version.split()[0]}: run it with a newer python3.")
        return 2
    try:
        environment()
    except subprocess.CalledProcessError as failed:
        print(f"The installation failed (pip's words are above); mend it and repeat the command, or remove {VENV}.")
        return exit_status(failed.returncode)
    words = sys.argv[1:] or ["run"]
    if words[0] != "test":
        env = variables() | {"COURSE_PY": "1"}  # so that what it advises can be typed as it stands
        os.chdir(ROOT)
        sys.stdout.flush()
        if os.name == "nt":
            return subprocess.run([str(PYTHON), "-m", "lessonkit", *words], env=env).returncode
        # In place of this process: Ctrl-C and kill reach the run, which ends its lessons and says how far it came.
        os.execve(PYTHON, [str(PYTHON), "-m", "lessonkit", *words], env)
    browsers_tests()
    return test(words[1:])


if __name__ == "__main__":
    sys.exit(main())
