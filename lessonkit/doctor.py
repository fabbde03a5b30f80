"""What this machine has, what that allows, and the command that mends what is wrong or missing.

look() asks the machine and judges nothing; judge() is a pure function of what was seen, so that a test can take any
piece away; environment() is both, and a self-test of every lane.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from lessonkit.device import HAS_GPU

ROOT = Path(__file__).resolve().parent.parent
NEEDS = {"torch": (2, 9), "triton": (3, 6), "numpy": (2,), "pybind11": (2, 13), "ninja": (1, 11), "pytest": (8,)}
NEEDS |= {"matplotlib": (3, 9), "scikit-learn": (1, 5), "rich": (13,), "typer": (0, 15)}
NVCC = "pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl"
BUILD = "install the torch build for the driver's CUDA (selector on pytorch.org)"
KITTENS = "git clone https://github.com/HazyResearch/ThunderKittens && export THUNDERKITTENS_ROOT=$PWD/ThunderKittens"


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `required` and not `ok`: the course cannot go on before `mend` is done."""

    name: str
    value: str
    ok: bool
    meaning: str
    mend: str = ""
    required: bool = False


@dataclass(frozen=True)
class Machine:
    """What was seen; empty or 0 where there is nothing."""

    python: str = ""
    packages: tuple[tuple[str, str], ...] = ()
    torch_cuda: str = ""  # the CUDA that torch was built for
    smi: str = ""  # what nvidia-smi printed
    gpu: str = ""
    capability: int = 0
    gpu_free_gb: float = 0
    nvcc: str = ""
    gxx: str = ""
    python_h: bool = False
    disk_gb: float = 0
    memory_gb: float = 0
    kittens: bool = False


def version(text: str) -> tuple[int, ...]:
    """The leading numbers, to compare: '2.11.0+cu130' -> (2, 11, 0); nothing -> (0,)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else (0,)


def printed(*command: str) -> str:
    """What a command prints; empty where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def find_nvcc() -> str:
    """nvcc on PATH, in CUDA_HOME, in the usual folder or in the pip packages; empty if nowhere."""
    pip = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*"))
    folders = [f"{home}/bin" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda", *pip) if home]
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(folders)) or ""


def look() -> Machine:
    installed = {d.name.lower(): d.version for d in metadata.distributions() if d.name}
    gpu = torch.cuda.get_device_properties(0) if HAS_GPU else None
    meminfo = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    return Machine(
        python=".".join(map(str, sys.version_info[:3])),
        packages=tuple((name, installed.get(name, "")) for name in NEEDS),
        torch_cuda=torch.version.cuda or "",
        smi=printed("nvidia-smi"),
        gpu=f"{gpu.name}, {gpu.multi_processor_count} SMs, {gpu.L2_cache_size >> 20} MB L2" if gpu else "",
        capability=10 * gpu.major + gpu.minor if gpu else 0,
        gpu_free_gb=torch.cuda.mem_get_info()[0] / 1e9 if gpu else 0,
        nvcc="".join(re.findall(r"release ([\d.]+)", printed(find_nvcc() or "nvcc", "--version"))),
        gxx="".join(re.findall(r"\d+\.\d+\.\d+", printed("g++", "--version"))[:1]),
        python_h=Path(sysconfig.get_path("include"), "Python.h").exists(),
        disk_gb=shutil.disk_usage(ROOT).free / 1e9,
        memory_gb=sum(int(kb) / 1e6 for kb in re.findall(r"MemAvailable:\s+(\d+)", meminfo)),
        kittens=Path(os.environ.get("THUNDERKITTENS_ROOT", "-"), "include/kittens.cuh").exists(),
    )


def judge(m: Machine) -> list[Finding]:
    """What the pieces mean together, in the order in which to mend them."""
    found = [Finding("Python", m.python, version(m.python) >= (3, 11), "3.11 or newer", "python3.12 -m venv .venv", True)]
    have = dict(m.packages)
    for name, least in NEEDS.items():
        wanted, mend = ".".join(map(str, least)), f'pip install "{name}>={".".join(map(str, least))}"'
        mend += " (wheels are for Linux: on Windows use WSL 2)" if name == "triton" else ""
        found.append(Finding(name, have[name] or "missing", version(have[name]) >= least, f"{wanted} or newer", mend, True))
    if (3, 6) <= version(have["triton"]) < (3, 7) and version(have["numpy"]) >= (2, 4):
        why = "Triton 3.6's interpreter fails with numpy 2.4 and newer; kernels on a GPU do not mind"
        found.append(Finding("triton + numpy", "do not fit", False, why, 'pip install "numpy<2.4"', required=not m.gpu))
    found += [_gpu(m)]
    if m.gpu:
        free = "room for the largest checks (60 GB); smaller cards skip those by themselves"
        found.append(Finding("GPU memory", f"{m.gpu_free_gb:.0f} GB free", m.gpu_free_gb > 4, free, "end what nvidia-smi lists"))
    wants_tk = m.capability == 90
    return [
        *found,
        Finding("nvcc", m.nvcc or "none", version(m.nvcc) >= (12, 8), "compiles cuda_src/; without it g++ emulates it", NVCC),
        Finding("g++", m.gxx or "none", bool(m.gxx), "Triton's launcher, torch.compile, cuda_src/ on a CPU", "apt install g++", bool(m.gpu)),
        Finding("Python.h", "found" if m.python_h else "none", m.python_h, "the same need it", "apt install python3-dev", bool(m.gpu)),
        Finding("disk", f"{m.disk_gb:.0f} GB free", m.disk_gb > 2, "compiled kernels and reports", "rm -r ~/.triton/cache", True),
        Finding("memory", f"{m.memory_gb:.0f} GB free", m.memory_gb > 3, "the largest interpreted check", "end other programs"),
        Finding("ThunderKittens", "found" if m.kittens else "none", m.kittens or not wants_tk, "day 3's last rungs, on Hopper only", KITTENS),
    ]


def _gpu(m: Machine) -> Finding:
    """Is there a GPU, and if torch does not use it, which of the usual three reasons is it?"""
    if m.gpu:
        return Finding("GPU", f"{m.gpu}, sm_{m.capability}", m.capability >= 80, "sm_80 (Ampere) or newer", "a newer GPU")
    if not m.smi:
        return Finding("GPU", "none: no nvidia-smi", True, "kernels are interpreted and compiled here, not run")
    driver = "".join(re.findall(r"CUDA Version\s*:\s*([\d.]+)", m.smi))
    if not m.torch_cuda:
        return Finding("GPU", "unused: torch is a CPU build", False, f"nvidia-smi sees a GPU (CUDA {driver})", BUILD)
    if version(driver)[0] < version(m.torch_cuda)[0]:
        value = f"unused: torch wants CUDA {m.torch_cuda}, the driver takes {driver}"
        return Finding("GPU", value, False, "a driver runs its own CUDA and older ones", f"update the driver, or {BUILD}")
    mend = "unset CUDA_VISIBLE_DEVICES; start a container with --gpus all"
    return Finding("GPU", "unused: torch cannot reach it", False, "driver and build fit each other", mend)


def self_test(lane: str) -> Finding:
    """Add two vectors in one lane, in a process of its own, since a process is one lane."""
    test = {"compiled": f"compiled.kernels({FIRST!r}, (90,))"}.get(lane, "check.check(first, first.rungs[-1], {'n': 1021}, torch.float32)")
    code = f"from lessonkit import *; from lessonkit import check, compiled; import torch; ((_, first),) = discover({FIRST!r}); {test}"
    env = os.environ | {"PYTHONPATH": str(ROOT)} | ({"CUDA_VISIBLE_DEVICES": ""} if lane == "interpreted" else {})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    value = "works" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
    return Finding(f"{lane} lane", value, not done.returncode, LANES[lane], "mend what is named above, then: python -m lessonkit check", lane==...)


def environment() -> list[Finding]:
    """Everything that `python -m lessonkit doctor` prints. Takes some seconds: each lane is tried."""
    machine = look()
    return [*judge(machine), *(self_test(lane) for lane in LANES if lane != "run" or machine.gpu)]
