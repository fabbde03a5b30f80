"""The doctor's judgement: a whole machine passes, and each piece taken away is named with the command that mends it."""

import subprocess
import sys
from dataclasses import replace

from lessonkit.commands import doctor
from lessonkit.commands.doctor import Machine, judge, needs, version
from lessonkit.cuda.toolchain import COMMANDS, KITTENS_TRIED, MEND
from lessonkit.judge.sentences import told

import pytest

from day1_pytorch.lesson01_env_check import what_each_day_can_do

WHOLE = Machine(
    python="3.12.3",
    packages={name: least for name, (least, _) in needs().items()},
    torch_cuda="13.0",
    smi="Driver Version: 580.1   CUDA Version: 13.0",
    gpu="H200, 132 SMs, 60 MB L2",
    capability=90,
    gpu_free_gb=140,
    nvcc="13.0",
    gxx="13.2.0",
    python_h=True,
    disk_gb=100,
    memory_gb=100,
    kittens=KITTENS_TRIED[:10],
)
NO_GPU = replace(WHOLE, torch_cuda="", smi="", gpu="", capability=0, gpu_free_gb=0, kittens="")


def without(package, machine=WHOLE, **found):
    """The machine with one package gone, or in the version given."""
    packages = {name: v for name, v in machine.packages.items() if name != package}
    return replace(machine, packages=packages | found)


OLD_PAIR = {"triton": "3.6.0", "numpy": "2.4.1"}

# What is wrong, the machine, the finding that must say so, what its mend must name, whether it stops the course.
BROKEN = [
    ("Python is too old", replace(WHOLE, python="3.10.12"), "Python", "python3.12", True),
    ("no Triton", without("triton"), "triton", f'{sys.executable} -m pip install "triton>=3.6,<3.10"', True),
    ("torch is too old", without("", torch="2.6.0+cu124"), "torch", 'pip install "torch>=2.10,<2.16"', True),
    ("torch is too new", without("", torch="2.16.0"), "torch", 'pip install "torch>=2.10,<2.16"', True),
    ("Triton is too new", without("", triton="3.10.0"), "triton", 'pip install "triton>=3.6,<3.10"', True),
    ("3.10 is newer than 3.9, 3.8 is not", without("", matplotlib="3.8.4"), "matplotlib", "matplotlib>=3.9", True),
    ("numpy 2.4, Triton 3.6, no GPU", without("", NO_GPU, **OLD_PAIR), "triton + numpy", "numpy<2.4", True),
    ("numpy 2.4, Triton 3.6, a GPU", without("", **OLD_PAIR), "triton + numpy", "numpy<2.4", False),
    ("a CPU build beside a GPU", replace(WHOLE, gpu="", torch_cuda=""), "GPU", "torch build", False),
    ("a driver older than torch's CUDA", replace(WHOLE, gpu="", smi="CUDA Version: 12.4"), "GPU", "update", False),
    ("a GPU that the process may not see", replace(WHOLE, gpu=""), "GPU", "CUDA_VISIBLE_DEVICES", False),
    ("nvidia-smi says no CUDA version", replace(WHOLE, gpu="", smi="Driver 580"), "GPU", "--gpus all", False),
    ("a GPU, and no compiler of Triton's", replace(WHOLE, gpu="", compiler=False), "GPU", "WSL2", False),
    ("a GPU before Ampere", replace(WHOLE, capability=75), "GPU", "CUDA_VISIBLE_DEVICES= ", False),
    ("no g++, and a GPU to launch on", replace(WHOLE, gxx=""), "C++", "apt install g++", True),
    ("no g++, interpreted only", replace(NO_GPU, gxx=""), "C++", "apt install g++", False),
    ("no Python headers", replace(WHOLE, python_h=False), "C++", "python3-dev", True),
    ("nvcc too old for ThunderKittens", replace(WHOLE, nvcc="12.4"), "nvcc", "nvidia-cuda-nvcc", False),
    ("no nvcc", replace(WHOLE, nvcc=""), "nvcc", "nvidia-cuda-nvcc", False),
    ("a full disk", replace(WHOLE, disk_gb=0.5), "disk", "triton/cache", True),
    ("little memory", replace(WHOLE, memory_gb=1), "main memory", "end other programs", False),
    ("Hopper without ThunderKittens", replace(WHOLE, kittens=""), "ThunderKittens", "git clone", False),
]


MAC = replace(NO_GPU, compiler=False, memory_gb=0)


@pytest.mark.parametrize("machine", [WHOLE, NO_GPU, MAC, replace(WHOLE, capability=80, kittens="")])
def test_a_whole_machine_passes(machine):
    """A machine without a GPU is no broken machine, nor is an Ampere GPU without ThunderKittens."""
    assert all(f.ok for f in judge(machine)), [f for f in judge(machine) if not f.ok]


@pytest.mark.parametrize(("machine", "name", "mend", "required"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_one_piece_taken_away(machine, name, mend, required):
    (bad,) = [f for f in judge(machine) if not f.ok]  # one complaint, about that piece
    assert bad.name == name
    assert mend in bad.mend
    assert bad.required == required
    assert bad.meaning


def test_reasons_for_an_unused_gpu_differ():
    hidden = [m for why, m, *_ in BROKEN if m.smi and not m.gpu]
    said = {next(f for f in judge(m) if f.name == "GPU").value for m in hidden}
    assert len(hidden) == 5
    assert len(said) == 4, "no compiler, a CPU build, an old driver, or not reachable (whatever nvidia-smi says)"


def test_thunderkittens_by_its_commit(tmp_path, monkeypatch):
    def said(machine):
        return judge(machine)[-1].value

    assert said(WHOLE) == KITTENS_TRIED[:10]
    assert said(replace(WHOLE, kittens=f"{KITTENS_TRIED[:10]}+")) == f"{KITTENS_TRIED[:10]}+"
    assert said(replace(WHOLE, kittens="1234567")) == f"1234567 (the course was tried with {KITTENS_TRIED[:10]})"
    (tmp_path / "include").mkdir()
    (tmp_path / "include/kittens.cuh").touch()
    monkeypatch.setenv("THUNDERKITTENS_ROOT", str(tmp_path))
    assert doctor.look().kittens == "found, of some commit"
    for words in ("init", "add .", "-c user.name=a -c user.email=b commit -m c"):
        subprocess.run(["git", "-C", str(tmp_path), *words.split()], check=True, capture_output=True)
    assert len(doctor.look().kittens) >= 7
    monkeypatch.setenv("THUNDERKITTENS_ROOT", str(tmp_path / "include"))
    assert doctor.look().kittens == ""


def test_needs_are_those_of_pyproject():
    assert {"torch", "triton", "numpy", "pytest"} <= set(needs())
    assert "torchvision" not in needs(), "optional packages are not missed"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.11.0+cu130", (2, 11, 0)), ("3.10", (3, 10)), ("13.0rc1", (13, 0)), ("", (0,)), ("?", (0,))],
)
def test_version(text, numbers):
    assert version(text) == numbers


def test_a_command_that_is_missing_or_fails_prints_nothing():
    assert doctor.printed("(.+)", "no-such-command") == ""
    assert doctor.printed("(.+)", "false") == ""
    assert doctor.printed(r"a(\d)", "echo", "a1 a2") == "1"


def test_look_finds_this_machine():
    seen = doctor.look()
    assert seen.packages["torch"]
    assert seen.disk_gb > 0
    assert all(f.ok for f in judge(seen) if f.name in needs()), "or these tests would not run"


def test_a_lane_that_hangs_is_a_finding(monkeypatch):
    def hang(*args, timeout, **kwargs):
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(doctor.subprocess, "run", hang)
    found = doctor.self_test("interpreted")
    assert not found.ok
    assert f"{doctor.HANGS} seconds" in found.value


def test_a_lane_that_fails_shows_its_last_line(monkeypatch):
    failed = subprocess.CompletedProcess("", 1, "", "Traceback\nImportError: no numpy\n")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *args, **kwargs: failed)
    assert doctor.self_test("interpreted").value == "ImportError: no numpy"


def test_what_each_day_can_do():
    assert not any(row["here"].startswith(("no", "compiled only")) for row in what_each_day_can_do(WHOLE, 2))
    bare = {row["part"]: row["here"] for row in what_each_day_can_do(replace(NO_GPU, nvcc=""), 0)}
    assert "emulator" in bare["cuda_src/"]
    assert bare["ThunderKittens"].count(",") == 2, "a Hopper GPU, nvcc and the sources are missing"
    assert "interpreted" in bare["Triton kernels"]
    nothing = {row["part"]: row["here"] for row in what_each_day_can_do(replace(NO_GPU, nvcc="", gxx=""), 0)}
    assert nothing["cuda_src/"].startswith("no:")


@pytest.mark.parametrize("piece", MEND)
def test_what_is_missing_is_said_in_the_readers_language(piece, monkeypatch):
    """Raised in English, with the command as it is. Each line that a command shows goes through `told`."""
    says = MEND[piece].format(command=COMMANDS.get(piece, ""))
    assert told(says) == says
    monkeypatch.setenv("COURSE_LANG", "zh")
    chinese = told(says)
    assert chinese != says
    assert chinese.endswith(COMMANDS.get(piece, ""))


def test_a_mode_is_named_in_the_readers_language(monkeypatch):
    monkeypatch.setattr(doctor.compiled, "kernels", lambda *_: ())
    assert doctor.self_test("compiled").name == "mode: compiled"
    monkeypatch.setenv("COURSE_LANG", "zh")
    assert doctor.self_test("compiled").name == "模式：编译"


def test_a_gpu_that_is_missing_is_said_in_the_readers_language(monkeypatch):
    monkeypatch.setenv("COURSE_LANG", "zh")
    assert told("needs sm_90: TMA and wgmma") == "需要 sm_90：TMA 与 wgmma"
    assert told("needs sm_90") == "需要 sm_90"
