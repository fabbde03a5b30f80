"""The environment check: what this machine has, and what it will be able to do
===========================================================================
Every kernel of this course runs in up to three lanes: *interpreted* (Triton's interpreter, no GPU), *compiled* (for
sm_80, sm_90 and sm_100, no GPU either) and *run* (on a GPU). This lesson finds out which of them work here, what is
missing, and the command that mends it. It writes reports/<device>/day1_env_check.md, the first deliverable.

You will learn: how to read nvidia-smi, which versions must fit each other, and which day needs what.
Run it:     python day1_pytorch/lesson01_env_check.py
In brief:   python -m lessonkit doctor
"""

from dataclasses import replace
from functools import cache

from lessonkit import Steps, Table, device
from lessonkit.doctor import Machine, environment, judge, look, needs, printed, version
from lessonkit.report import markdown
from lessonkit.rows import REPORTS, machine, write_atomically

import torch

# The questions to nvidia-smi that matter here, and how to read the answers.
SMI = {
    "name": "the model; H100 and H200 have the same cores, the H200 more and faster memory",
    "driver_version": "the kernel module's version; it fixes the newest CUDA that can run",
    "compute_cap": "9.0 is Hopper (sm_90): TMA and wgmma exist; 8.x is Ampere and Ada",
    "memory.used": "above a few hundred MiB before you start: somebody else is on this card",
    "memory.total": "weights, activations and every temporary have to fit",
    "utilization.gpu": "share of time in which *any* kernel ran: one busy SM of 132 also reads 100 %",
    "pstate": "P0 is full speed, P8 is asleep; an idle card takes milliseconds to wake, so warm up before timing",
    "clocks.sm": "MHz now; idle cards clock down, and a matmul at the power limit does too",
    "power.draw": "at the limit the clock falls, so the same kernel times differently an hour later",
    "power.limit": "two cards of one model with different limits are different machines",
    "temperature.gpu": "above about 85 C the clock falls too",
    "mig.mode.current": "Enabled: you see a slice of the card, with fewer SMs and less bandwidth",
}

# A machine with nothing wrong: each trap below takes one piece away from it.
WHOLE = Machine(
    python="3.12.3",
    packages=dict.fromkeys(needs(), "99.0"),
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
    kittens=True,
)
NO_GPU = replace(WHOLE, smi="", gpu="", capability=0, gpu_free_gb=0, kittens=False)
OLD_PAIR = {**WHOLE.packages, "triton": "3.6.0", "numpy": "2.4.1"}

# What is wrong, the machine, the finding that must say so, what its mend must name, and whether it stops the course.
TRAPS = (
    ("Python is too old", replace(WHOLE, python="3.10.12"), "Python", "python3.12", True),
    ("no Triton", replace(WHOLE, packages={**WHOLE.packages, "triton": ""}), "triton", "pip install", True),
    ("Triton 3.6 interprets with numpy 2.4", replace(NO_GPU, packages=OLD_PAIR), "triton + numpy", "numpy<2.4", True),
    ("the same, but a GPU runs the kernels", replace(WHOLE, packages=OLD_PAIR), "triton + numpy", "numpy<2.4", False),
    ("torch's CPU build beside a GPU", replace(WHOLE, gpu="", torch_cuda=""), "GPU", "torch build", False),
    ("a driver older than torch's CUDA", replace(WHOLE, gpu="", smi="CUDA Version: 12.4"), "GPU", "update", False),
    ("a GPU that the process may not see", replace(WHOLE, gpu=""), "GPU", "CUDA_VISIBLE_DEVICES", False),
    ("a GPU before Ampere", replace(WHOLE, capability=75), "GPU", "not supported", False),
    ("no compiler for Triton's launcher", replace(WHOLE, gxx=""), "C++", "apt install g++", True),
    ("no Python headers for it", replace(WHOLE, python_h=False), "C++", "python3-dev", True),
    ("nvcc too old for ThunderKittens", replace(WHOLE, nvcc="12.4"), "nvcc", "nvidia-cuda-nvcc", False),
    ("a full disk", replace(WHOLE, disk_gb=0.5), "disk", "triton/cache", True),
    ("Hopper without ThunderKittens", replace(WHOLE, kittens=False), "ThunderKittens", "git clone", False),
)


def what_each_day_can_do(m: Machine, gpus: int) -> list[dict[str, str]]:
    """What a machine can do with the lessons of each day, and what it would need to do more."""
    kernels = "run" if m.gpu else "interpreted, and compiled for sm_80, sm_90, sm_100"
    hopper = "run" if m.capability == 90 else "compiled only: TMA and wgmma need a Hopper GPU (sm_90)"
    lacks = [
        *([] if m.capability == 90 else ["a Hopper GPU"]),
        *([] if version(m.nvcc) >= (12, 8) else ["nvcc 12.8 or newer"]),
        *([] if m.kittens else ["THUNDERKITTENS_ROOT"]),
    ]
    if m.nvcc:
        cuda = "run" if m.gpu else "compiled by nvcc; run by g++ in an emulator of threads, warps and barriers"
    else:
        cuda = "run by g++ in an emulator of threads, warps and barriers; not compiled: no nvcc"
    cuda = cuda if m.nvcc or m.gxx else "no: neither nvcc nor g++"
    return [
        {"day": "1", "part": "PyTorch, autograd, torch.compile", "here": "on the GPU" if m.gpu else "on the CPU"},
        {"day": "1", "part": "two processes", "here": f"NCCL, {gpus} GPUs" if gpus > 1 else "gloo, on the CPU"},
        {"day": "1", "part": "the GPU by measurement", "here": "measured" if m.gpu else "predicted; committed figures"},
        {"day": "2", "part": "Triton kernels", "here": kernels},
        {"day": "3", "part": "matmul in Triton", "here": kernels},
        {"day": "3", "part": "TMA and wgmma rungs", "here": hopper},
        {"day": "3", "part": "ThunderKittens", "here": f"no: needs {', '.join(lacks)}" if lacks else "run"},
        {"day": "4", "part": "attention, and a model with the op replaced", "here": kernels},
        {"day": "5", "part": "tuning, roofline, comparison", "here": "measured" if m.gpu else "from compiled code"},
        {"day": "all", "part": "cuda_src/", "here": cuda},
    ]


@cache
def _found():
    """This machine, and everything the doctor says of it."""
    return look(), environment()


def pieces() -> Table:
    """Every required piece is here, and each lane was tried with the course's first kernel."""
    _, findings = _found()
    broken = [f"{f.name}: {f.value} ({f.meaning}). Mend it: {f.mend}" for f in findings if f.required and not f.ok]
    assert not broken, "\n".join(["this machine lacks something that every lesson needs:", *broken])
    rows = [
        {
            "ok": "ok" if f.ok else "--",
            "piece": f.name,
            "found": f.value,
            "why": f.meaning,
            "mend": "" if f.ok else f.mend,
        }
        for f in findings
    ]
    return Table("pieces", rows, "A line that is not ok limits what can run here; its mend is the command to type.")


def nvidia_smi() -> Table:
    """Twelve fields of nvidia-smi say whether this card is the machine that you think it is."""
    # The "CUDA Version" in nvidia-smi's header is the newest CUDA that the driver can run. It is neither the toolkit
    # (nvcc --version) nor what torch was built for (torch.version.cuda), which must not be newer by a whole number.
    answer = printed(".+", "nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader", "--id=0")
    values = [v.strip() for v in answer.split(",")] if answer else ["(no nvidia-smi here)"] * len(SMI)
    assert len(values) == len(SMI), f"nvidia-smi answered {answer!r}"
    rows = [{"field": f, "here": v, "how to read it": SMI[f]} for f, v in zip(SMI, values, strict=True)]
    return Table("nvidia_smi", rows, f"nvidia-smi --query-gpu={','.join(SMI)} --format=csv")


def traps() -> Table:
    """Thirteen broken machines are told apart, and each gets the command that mends it."""
    assert all(f.ok for f in judge(WHOLE)), "a whole machine must pass"
    assert all(f.ok for f in judge(NO_GPU)), "a machine without a GPU is no broken machine"
    rows = []
    for wrong, broken, name, mend, required in TRAPS:
        bad = [f for f in judge(broken) if not f.ok]
        assert [f.name for f in bad] == [name], f"{wrong}: expected one complaint about {name}, got {bad}"
        assert mend in bad[0].mend, f"{wrong}: {bad[0].mend!r} does not say {mend!r}"
        assert bad[0].required == required, wrong
        rows.append({"wrong": wrong, "the doctor says": bad[0].value, "mend": bad[0].mend, "stops": required})
    return Table("traps", rows, "Each was made by taking one piece from a whole machine; nothing here was broken.")


def days() -> Table:
    """What each day does on this machine; what it cannot run it still explains, and says why."""
    assert not any(row["here"].startswith(("no", "compiled only")) for row in what_each_day_can_do(WHOLE, 2))
    bare = {row["part"]: row["here"] for row in what_each_day_can_do(replace(NO_GPU, nvcc=""), 0)}
    assert "emulator" in bare["cuda_src/"]
    assert bare["ThunderKittens"].count(",") == 2, "a Hopper GPU, nvcc and the sources are missing"
    m, _ = _found()
    rows = what_each_day_can_do(m, torch.cuda.device_count() if device.HAS_GPU else 0)
    return Table("days", rows, "The same commands work everywhere; only the lane differs.")


def deliverable() -> None:
    """The report day1_env_check.md holds all of it, replaced in one step so that a stopped run leaves the old one."""
    about = machine()
    parts = [f"# Environment check: {about['gpu']}\n", f"{about['date']}, commit {about['commit']}.\n"]
    for table in (pieces(), nvidia_smi(), days()):
        parts += [
            f"## {table.name}\n",
            markdown(table.rows[0], (row.values() for row in table.rows)),
            table.note + "\n",
        ]
    path = REPORTS / device.name() / "day1_env_check.md"
    write_atomically(path, "\n".join(parts))
    text = path.read_text()
    assert all(f.name in text for f in _found()[1]), "every finding is in the report"
    assert text.count("\n## ") == 3
    print(f"wrote {path.relative_to(REPORTS.parent)}")


LESSON = Steps(steps=(pieces, nvidia_smi, traps, days, deliverable))

if __name__ == "__main__":
    LESSON.main()
