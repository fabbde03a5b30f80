"""The environment check: what this machine has, and which modes work on it
========================================================================
Every kernel of this course runs in up to three modes: *interpreted* (Triton's interpreter, no GPU), *compiled* (no GPU
either) and *run* (on a GPU). Kernels are compiled for sm_80, sm_90 and sm_100: NVIDIA's generations Ampere, Hopper and
Blackwell. This lesson finds out which modes work here, what is missing, and which command installs it. It writes
day1_pytorch/day1_env_check.md, the first deliverable, which git ignores. tests/test_doctor.py takes away one part of a
machine at a time and shows the message.

You will learn: how to read nvidia-smi, which versions must fit each other, and which day needs what.
Run it:     python3 course.py run lesson01_env_check
In brief:   python3 course.py doctor
"""

from functools import cache

from lessonkit import About, Steps, Table, device
from lessonkit.base.files import ROOT
from lessonkit.base.markdown import markdown
from lessonkit.commands.doctor import Machine, findings, look, printed, version
from lessonkit.pages.sections import write_sections

import torch

REPORT = ROOT / "day1_pytorch" / "day1_env_check.md"

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
    """This machine, and the doctor's findings."""
    return look(), findings()


def pieces() -> Table:
    """Every required piece is here, and the course's first kernel tests each mode."""
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
    values = [v.strip() for v in answer.split(",")] if answer else ["none here"] * len(SMI)
    assert len(values) == len(SMI), f"nvidia-smi answered {answer!r}"
    rows = [{"field": f, "here": v, "how to read it": SMI[f]} for f, v in zip(SMI, values, strict=True)]
    return Table("nvidia_smi", rows, f"nvidia-smi --query-gpu={','.join(SMI)} --format=csv")


def days() -> Table:
    """What each day does on this machine; a lesson that cannot run here is still explained, and says why."""
    m, _ = _found()
    rows = what_each_day_can_do(m, torch.cuda.device_count() if device.HAS_GPU else 0)
    assert {row["day"] for row in rows} == {"1", "2", "3", "4", "5", "all"}
    assert m.gpu or not any(row["here"] in ("run", "measured") for row in rows), "no GPU, so nothing runs on one"
    return Table("days", rows, "The same commands work everywhere; only the mode differs.")


def deliverable() -> None:
    """day1_env_check.md holds all of it; the last lesson of the day adds the training times of CPU and GPU."""
    code = "torch.cuda.is_available()"
    parts = {"torch": f"`{code}` is {torch.cuda.is_available()}, torch {torch.__version__}"}
    for table in (pieces(), nvidia_smi(), days()):
        parts[table.name] = markdown(table.rows[0], (row.values() for row in table.rows)) + f"\n{table.note}"
    text = write_sections(REPORT, "Environment check", parts)
    print(f"  wrote {REPORT}")
    assert all(f.name in text for f in _found()[1]), "every finding is in the report"
    assert all(text.count(f"\n## {name}\n") == 1 for name in parts), "a second run replaces, it does not append"


LESSON = Steps(
    about=About(
        teaches="what this machine has, what it will be able to run, how to read `nvidia-smi`; begins "
        "`day1_env_check.md`",
        hours=0.5,
    ),
    steps=(pieces, nvidia_smi, days, deliverable),
    nightly=(pieces, days, deliverable),  # each mode in a process of its own
)

if __name__ == "__main__":
    LESSON.main()
