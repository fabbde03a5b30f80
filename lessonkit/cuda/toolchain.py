"""Which C++ and CUDA compilers this machine has, and the one line that says what is missing and how to mend it."""

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from functools import cache
from pathlib import Path

from lessonkit.base import device
from lessonkit.base.errors import Missing
from lessonkit.base.words import later

USUAL = "/usr/local/cuda"
PIP = f"{shlex.quote(sys.executable)} -m pip install"  # the shell's pip may be another Python's
NVCC_PARTS = ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")
NVCC_PACKAGES = " ".join(f"'nvidia-{part}==13.0.*'" for part in NVCC_PARTS)  # as in pyproject.toml
KITTENS_PARTS = ("include", "prototype")
# 2026-04-25, version 2.0: the commit that the course was written and measured with. A whole hash is of one content.
KITTENS_TRIED = "0b55588d2769dde0c7a9a606ffc015b0ca7a9551"
KITTENS = (
    "git clone https://github.com/HazyResearch/ThunderKittens; "
    f"git -C ThunderKittens checkout {KITTENS_TRIED}; export THUNDERKITTENS_ROOT=$PWD/ThunderKittens"
)
MEND = {  # what is said of each piece that is missing; judge.sentences shows it in the reader's language
    "Triton": later("Triton has no compiler for this system: right in values; not compiled here"),
    "nvcc": later("no nvcc, so CUDA C++ is not compiled for GPUs: {command}"),
    "g++": later("no g++, so CUDA C++ is neither compiled nor emulated: {command}"),
    "ninja": later("no ninja, so CUDA C++ is not built: {command}"),
    "Python.h": later("no Python.h, so CUDA C++ cannot become a Python module: {command}"),
    "ThunderKittens": later("no ThunderKittens in THUNDERKITTENS_ROOT: {command}"),
    "Hopper": later("no Hopper GPU (sm_90): what is written on ThunderKittens runs on no other"),
}
COMMANDS = {
    "nvcc": f"{PIP} {NVCC_PACKAGES}",
    "g++": "apt install g++ python3-dev",
    "ninja": f"{PIP} ninja",
    "Python.h": "apt install python3-dev",
    "ThunderKittens": KITTENS,
}


def find_nvcc() -> str:
    """nvcc on PATH, in CUDA_HOME, in the usual folder or in pip's packages; empty if nowhere."""
    pip = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*"))
    folders = [f"{home}/bin" for home in (os.environ.get("CUDA_HOME"), USUAL, *pip) if home]
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(folders)) or ""


def find_tool(tool: str) -> str:
    """ncu or compute-sanitizer: on PATH, in CUDA_HOME, in the toolkit's folder; empty if nowhere."""
    homes = [os.environ.get("CUDA_HOME"), USUAL]
    folders = [f"{home}/bin" for home in homes if home] + [str(p) for p in Path("/opt/nvidia").glob("nsight-compute/*")]
    return shutil.which(tool) or shutil.which(tool, path=os.pathsep.join(folders)) or ""


def find_gxx() -> str:
    return shutil.which(os.environ.get("CXX", "g++")) or ""


def find_ninja() -> str:
    """pip's ninja or the system's."""
    with suppress(ImportError):
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    return shutil.which("ninja") or ""


def find_kittens() -> Path | None:
    """The clone of ThunderKittens that THUNDERKITTENS_ROOT names, if it is one."""
    root = Path(os.environ.get("THUNDERKITTENS_ROOT") or "-").expanduser().resolve()
    return root if (root / "include/kittens.cuh").exists() else None


def kittens_flags(target: int = 0) -> tuple[str, ...]:
    """What nvcc has to be told for a program on ThunderKittens' headers. Of its own flags only those that they need."""
    need("ThunderKittens")
    generation = "HOPPER" if (target or device.capability() or 90) >= 90 else "AMPERE"
    words = ("--expt-extended-lambda", "--expt-relaxed-constexpr", "--use_fast_math", "-DNDEBUG")
    return (f"-DKITTENS_{generation}", *(f"-I{find_kittens()}/{part}" for part in KITTENS_PARTS), *words)


def kittens_files() -> list[Path]:
    """The headers of ThunderKittens, any of which a program on it may include."""
    root = find_kittens()
    return sorted(p for part in KITTENS_PARTS if root for p in (root / part).rglob("*") if p.is_file())


def lacks(*pieces: str) -> str:
    """The line about the first of these pieces (a key of MEND) that is not here, or an empty string."""
    found = {
        "Triton": lambda: device.HAS_COMPILER,
        "nvcc": find_nvcc,
        "g++": find_gxx,
        "ninja": find_ninja,
        "Python.h": lambda: Path(sysconfig.get_path("include"), "Python.h").exists(),
        "ThunderKittens": find_kittens,
        "Hopper": lambda: device.capability() // 10 == 9,
    }
    missing = next((piece for piece in pieces if not found[piece]()), "")
    return MEND[missing].format(command=COMMANDS.get(missing, "")) if missing else ""


def need(*pieces: str) -> None:
    """Raise Missing for the first of these pieces that is not here."""
    if why := lacks(*pieces):
        raise Missing(why)


@cache
def version(compiler: str) -> str:
    """The compiler's own words about itself, and which headers it brings: part of what a built file is known by."""
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    return "\n".join(
        [said, *platform.libc_ver(), *(f"{path.name} {_hash(path)}" for path in _version_headers(compiler))]
    )


# CUDA's runtime and its C++ libraries come in packages of their own, and can change under the same nvcc.
VERSION_HEADERS = ("cuda.h", "cuda_runtime_api.h", "cub/version.cuh", "cuda/std/__cccl/version.h")


def _version_headers(compiler: str) -> list[Path]:
    """The headers that say which version of CUDA's libraries this nvcc includes; none for another compiler."""
    if "nvcc" not in Path(compiler).name:
        return []
    asked = [compiler, "--dryrun", "-E", "-x", "cu", os.devnull]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stderr
    folders = re.findall(r'"(?:-I|-isystem" ")([^"]+)"', said)
    return [path for folder in folders for name in VERSION_HEADERS if (path := Path(folder, name)).is_file()]


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def release() -> str:
    """nvcc's version, 13.0.88; empty where there is none."""
    found = re.search(r"V([\d.]+)", version(find_nvcc())) if find_nvcc() else None
    return found[1] if found else ""


def link_flags(nvcc: str, names: list[str]) -> list[str]:
    """`-l` for each library that is here: a program does without one whose header is not (`__has_include`)."""
    home = Path(nvcc).resolve().parent.parent
    pip = home / "lib" if "nvidia" in home.parts else None  # a toolkit knows its own place, pip's has to be told
    usual = (Path(USUAL, "lib64"), home / "lib64", pip, *Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib64"))
    folders = [folder for folder in usual if folder and folder.is_dir()]
    here = [name for name in names if any((folder / f"lib{name}.so").exists() for folder in folders)]
    return [*([f"-L{pip}"] if pip else []), *(f"-l{name}" for name in here)]


def architecture(capability: int = 0) -> str:
    """sm_80, or with what Hopper has of its own sm_90a; default: the present GPU's, else Hopper's."""
    capability = capability or device.capability() or 90
    return f"sm_{capability}{'a' * (capability >= 90)}"


def comment_line(source: Path, key: str) -> list[str]:
    """The words after `// Key:` in a program's comments: `// Link: cublas nccl`, `// Needs: ThunderKittens Hopper`."""
    found = re.findall(rf"^// {key}:\s*(.+)$", source.read_text(), re.MULTILINE)
    return [word for line in found for word in line.split()]
