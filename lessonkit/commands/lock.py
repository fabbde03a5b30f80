"""The files of requirements/: every package that `course.py` installs, with its version and the hashes of its files.

uv resolves pyproject.toml within constraints.txt, once for all platforms and versions of Python. pip then takes no file
with another hash (`--require-hashes`).
"""

import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

from lessonkit.base.errors import Missing
from lessonkit.base.files import ROOT, write_atomically

FOLDER = ROOT / "requirements"
EXTRAS = ("test", "notebook", "models")  # what course.py installs everywhere
PYTHON = "3.11"  # the oldest that the course supports
AGAIN = "python -m lessonkit lock"
UV = "no uv, which resolves the versions: {} -m pip install uv"
CUDA = ("nvidia-", "cuda-")  # how the packages of CUDA's own libraries and compilers begin
_PIN = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)


def pins(text: str) -> dict[str, str]:
    """Package -> version. A package with one version for each of several Pythons has the last."""
    return dict(_PIN.findall(text))


def hashes(text: str) -> dict[str, set[str]]:
    """Package -> the hashes of the files that pip may take for it."""
    found: dict[str, set[str]] = {}
    for block in re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE):
        if pin := _PIN.match(block):
            found.setdefault(pin[1], set()).update(re.findall(r"--hash=sha256:([0-9a-f]{64})\b", block))
    return found


def lock(upgrade: bool) -> list[Path]:
    """Write the files; `upgrade` takes the newest versions in place of those that the files have. Raises Missing."""
    uv = shutil.which("uv", path=sysconfig.get_path("scripts")) or shutil.which("uv")
    if not uv:
        raise Missing(UV.format(sys.executable))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = settings["project"]
    nvcc, web, browser = (project["optional-dependencies"][extra] for extra in ("nvcc", "web", "browser"))
    course = [*project["dependencies"], *settings["build-system"]["requires"]]
    course += [need for extra in EXTRAS for need in project["optional-dependencies"][extra]]
    before = "" if upgrade else "".join(path.read_text() for path in sorted(FOLDER.glob("*.txt")))
    pinned = [f"{name}=={version}" for name, version in pins((ROOT / "constraints.txt").read_text()).items()]
    whole = _compiled(uv, [*course, *nvcc, *web, *browser], pinned, before)
    ours = [name for name in pins(whole) if not name.startswith(CUDA)]
    without = [name for name in pins(whole) if name == "torch" or name.startswith(CUDA)]
    torch = f"torch=={pins(whole)['torch']}"
    written = {
        "course.txt": _compiled(uv, course, pinned, whole, without),
        "torch.txt": _compiled(uv, [torch], [], whole, [name for name in ours if name != "torch"]),
        "torch_cpu.txt": _of_cpu(f"{torch}+cpu"),
        "nvcc.txt": _compiled(uv, nvcc, [], whole),
        "web.txt": _compiled(uv, web, pinned, whole),
        "browser.txt": _compiled(uv, browser, pinned, whole),
    }
    for name, text in written.items():
        write_atomically(FOLDER / name, text)
    return [FOLDER / name for name in written]


def _compiled(uv: str, needs: list[str], pinned: list[str], before: str, without: list[str] | None = None) -> str:
    """What uv makes of these needs, with the versions that `before` has where they still fit."""
    with tempfile.TemporaryDirectory() as folder:
        needed, within, out = (Path(folder, name) for name in ("in.txt", "constraints.txt", "out.txt"))
        for path, lines in ((needed, needs), (within, pinned)):
            path.write_text("\n".join(lines) + "\n")
        out.write_text(before)
        command = [uv, "pip", "compile", "--quiet", "--universal", "--python-version", PYTHON, "--generate-hashes"]
        command += ["--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--custom-compile-command", AGAIN]
        command += [word for name in without or () for word in ("--no-emit-package", name)]
        subprocess.run([*command, "--constraints", within, needed, "--output-file", out], check=True)
        return out.read_text()


def _of_cpu(pin: str) -> str:
    """PyTorch's build without CUDA: the hashes that its list has, and that of the wheel which pip finds here.

    No index that uv asks has this build. Each machine that runs `lock` sees the wheel of its own Python and platform.
    """
    path = FOLDER / "torch_cpu.txt"
    known = hashes(path.read_text()).get("torch", set()) if path.exists() and f"{pin} \\" in path.read_text() else set()
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", folder]
        subprocess.run([*pip, pin], check=False, stderr=subprocess.DEVNULL)
        known |= {hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in Path(folder).glob("*.whl")}
    lines = [pin, *(f"    --hash=sha256:{each}" for each in sorted(known))]
    return f"# Written by {AGAIN}\n" + " \\\n".join(lines) + "\n"
