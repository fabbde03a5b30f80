"""What this machine has, what that allows, and the command that mends what is wrong or missing.

look() asks and judges nothing; judge() is a pure function of what was seen, so that a test can take any piece away.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lessonkit.base.device import HAS_COMPILER, HAS_GPU
from lessonkit.base.files import ROOT
from lessonkit.base.words import later, listed, said
from lessonkit.cuda.toolchain import KITTENS, KITTENS_TRIED, MEND, NVCC_PACKAGES, PIP, find_kittens, find_nvcc
from lessonkit.modes import compiled

import torch

FIRST = "day2_triton_basics.lesson01_vector_add"
FIRST_CUDA = "cuda_src.02_vector_add"
HANGS = 900  # seconds; a first build on a busy machine of two cores has taken minutes
NVCC = f"{PIP} {NVCC_PACKAGES}"
MODES = {
    "interpreted": later("mode: interpreted"),
    "emulated": later("mode: emulated"),
    "compiled": later("mode: compiled"),
    "run": later("mode: run"),
}
BUILD = later("install the torch build for the driver's CUDA (selector on pytorch.org)")


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

    python: str
    packages: dict[str, str]
    torch_cuda: str  # the CUDA that torch was built for
    smi: str  # what nvidia-smi printed
    gpu: str
    capability: int
    gpu_free_gb: float
    nvcc: str
    gxx: str
    python_h: bool  # Python's headers, which a C++ extension includes
    disk_gb: float
    memory_gb: float
    kittens: str  # ThunderKittens' commit
    compiler: bool = True  # Triton's: macOS and Windows have its Python files alone


def version(text: str) -> tuple[int, ...]:
    """The leading numbers, to compare: '2.11.0+cu130' -> (2, 11, 0); nothing -> (0,)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else (0,)


def needs() -> dict[str, tuple[str, str]]:
    """The packages of pyproject.toml: the oldest version of each that will do, and the first too new one or ''."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.findall(r'^ +"([\w-]+)>=([\d.]+)(?:,<([\d.]+))?', text, re.MULTILINE)
    return {name: (least, below) for name, least, below in found}


def printed(pattern: str, *command: str) -> str:
    """The first match in what a command prints; empty where it is missing, fails or says something else."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(re.findall(pattern, done.stdout, re.DOTALL)), "")


def commit(clone: Path) -> str:
    """The commit that a clone is at; of a copy without its history nobody knows."""
    return printed(r"\w+", "git", "--git-dir", str(clone / ".git"), "log", "-1", "--format=%h") or said(
        "found, of some commit"
    )


def look() -> Machine:
    gpu = torch.cuda.get_device_properties(0) if HAS_GPU else None
    return Machine(
        python=".".join(map(str, sys.version_info[:3])),
        packages={d.name.lower(): d.version for d in metadata.distributions() if d.name},
        torch_cuda=torch.version.cuda or "",
        smi=printed(".+", "nvidia-smi"),
        gpu=f"{gpu.name}, {gpu.multi_processor_count} SMs, {gpu.L2_cache_size >> 20} MB L2" if gpu else "",
        capability=10 * gpu.major + gpu.minor if gpu else 0,
        gpu_free_gb=torch.cuda.mem_get_info()[0] / 1e9 if gpu else 0,
        nvcc=printed(r"release ([\d.]+)", find_nvcc() or "nvcc", "--version"),
        gxx=printed(r"\d+\.\d+\.\d+", "g++", "--version"),
        python_h=Path(sysconfig.get_path("include"), "Python.h").exists(),
        disk_gb=shutil.disk_usage(ROOT).free / 1e9,
        memory_gb=int(printed(r"MemAvailable:\s+(\d+)", "cat", "/proc/meminfo") or 0) / 1e6,
        kittens=commit(root) if (root := find_kittens()) else "",
        compiler=HAS_COMPILER,
    )


def judge(m: Machine) -> list[Finding]:
    """What the pieces mean together, in the order in which to mend them."""
    newer = said("{version} or newer")
    fits = version(m.python) >= (3, 11)
    found = [Finding("Python", m.python, fits, newer.format(version="3.11"), said("use python3.12"), True)]
    for name, (least, below) in needs().items():
        have = m.packages.get(name, "")
        fits = version(have) >= version(least) and (not below or version(have) < version(below))
        why = newer.format(version=least) + (said(", older than {version}").format(version=below) if below else "")
        mend = f'{PIP} "{name}>={least}' + (f',<{below}"' if below else '"')
        found += [Finding(name, have or said("missing"), fits, why, mend, True)]
    if version(m.packages.get("triton", ""))[:2] == (3, 6) and version(m.packages.get("numpy", "")) >= (2, 4):
        why = said("Triton 3.6's interpreter fails with numpy 2.4 and newer; kernels on a GPU do not mind")
        found += [Finding("triton + numpy", said("do not fit"), False, why, f'{PIP} "numpy<2.4"', not m.gpu)]
    header = said("Python.h found") if m.python_h else said("Python.h missing")
    cpp = listed((f"g++ {m.gxx or said('missing')}", header))
    builds = said("Triton's launcher and torch.compile are built with it; cuda_src/ too, on a CPU")
    none, free = said("none"), said("{size} GB free")
    kittens = m.kittens or (none if m.capability == 90 else said("none, not needed here"))
    if m.kittens and not KITTENS_TRIED.startswith(m.kittens.removesuffix("+")):
        kittens += said(" (the course was tried with {commit})").format(commit=KITTENS_TRIED[:10])
    return [
        *found,
        _gpu(m),
        Finding("C++", cpp, bool(m.gxx and m.python_h), builds, "apt install g++ python3-dev", bool(m.gpu)),
        Finding(
            "nvcc", m.nvcc or none, version(m.nvcc) >= (12, 8), said("cuda_src/; without it g++ emulates a GPU"), NVCC
        ),
        Finding(
            said("disk"),
            free.format(size=f"{m.disk_gb:.0f}"),
            m.disk_gb > 2,
            said("compiled kernels"),
            "rm -r ~/.triton/cache",
            True,
        ),
        _memory(m),
        Finding("ThunderKittens", kittens, kittens != none, said("the last rungs of day 3, on Hopper"), KITTENS),
    ]


def _memory(m: Machine) -> Finding:
    if not m.memory_gb:
        return Finding(said("main memory"), said("not known"), True, said("Linux alone says what is free"))
    free = said("{size} GB free").format(size=f"{m.memory_gb:.0f}")
    return Finding(said("main memory"), free, m.memory_gb > 3, said("interpreted checks"), said("end other programs"))


def _gpu(m: Machine) -> Finding:
    """Is there a GPU? If it is not used: which of the usual four reasons is it?"""
    if not m.compiler:
        value, mend = said("unused: Triton has no compiler for this system"), said("use Linux or WSL2")
        return Finding("GPU", value if m.smi else said("none"), not m.smi, said(MEND["Triton"]), mend)
    if m.gpu:
        free = said("{size} GB free").format(size=f"{m.gpu_free_gb:.0f}")
        value = f"{m.gpu}, sm_{m.capability}, {free}"
        mend = said(
            "older ones are not supported: begin commands with CUDA_VISIBLE_DEVICES= and kernels are interpreted"
        )
        return Finding("GPU", value, m.capability >= 80, said("{version} or newer").format(version="sm_80"), mend)
    if not m.smi:
        why = said("kernels are interpreted and compiled here, not run")
        return Finding("GPU", said("none (no nvidia-smi)"), True, why)
    driver = "".join(re.findall(r"CUDA Version\s*:\s*([\d.]+)", m.smi)[:1])
    value, why = said("torch cannot reach it"), said("its driver is new enough for torch")
    mend = said("unset CUDA_VISIBLE_DEVICES; start a container with --gpus all")
    if not m.torch_cuda:
        why = said("nvidia-smi sees a GPU and a driver for CUDA {version}").format(version=driver)
        value, mend = said("torch is a CPU build"), said(BUILD)
    elif driver and version(driver)[0] < version(m.torch_cuda)[0]:
        value = said("torch wants CUDA {wants}, the driver takes {takes}").format(wants=m.torch_cuda, takes=driver)
        why = said("a driver runs no newer CUDA")
        mend = said("update the driver, or {otherwise}").format(otherwise=said(BUILD))
    return Finding("GPU", said("unused: {why}").format(why=value), False, why, mend)


def self_test(mode: str) -> Finding:
    """Add two vectors in one mode, in a process of its own, since a process is one mode."""
    if mode == "compiled":
        error = ""
        try:
            compiled.kernels(FIRST, (90,))
        except RuntimeError as failed:
            error = str(failed)
    else:
        first = FIRST_CUDA if mode == "emulated" else FIRST
        test = f"((_, l),) = discover({first!r}); check(l, l.rungs[-1], {{'n': 9}}, FLOATS[0])"
        code = f"from lessonkit import *; from lessonkit.judge.check import check; {test}"
        env = {**os.environ, "PYTHONPATH": str(ROOT)} | ({} if mode == "run" else {"CUDA_VISIBLE_DEVICES": ""})
        try:
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS, env=env)
            error = done.stderr if done.returncode else ""
        except subprocess.TimeoutExpired as hung:
            error = str(hung)
    value = error.strip().splitlines()[-1][:100] if error else said("works")
    required = mode == ("run" if HAS_GPU else "interpreted")
    mend = said("read {lesson}").format(lesson=FIRST_CUDA if mode == "emulated" else FIRST)
    return Finding(said(MODES[mode]), value, not error, said("vector add was tried"), mend, required)


def findings() -> list[Finding]:
    """Everything that `python -m lessonkit doctor` prints. Each mode is tried, which takes some seconds."""
    machine = look()
    with ThreadPoolExecutor() as pool:
        has = {"interpreted": True, "emulated": machine.gxx, "compiled": machine.compiler, "run": machine.gpu}
        modes = [mode for mode, there in has.items() if there]
        return [*judge(machine), *pool.map(self_test, modes)]
