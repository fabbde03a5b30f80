"""Traps: kernels broken on purpose, the tool that finds each, and the line that mends it
=====================================================================================
The kernels are in 24_traps.cu, each in two forms that differ in one line. Each step runs both: the fixed form is right,
and the broken one is caught. Without a GPU the emulator catches it, in whatever order the threads run; on a GPU
compute-sanitizer does, if it has a tool for the bug. It has none for two traps, and one trap may hang a GPU: the broken
forms of these three are caught on a CPU alone.

Predict before you run: which of the broken kernels stop with an error, and which print a wrong number, or a right one?
You will learn: what each error looks like, which tool finds it, and the words it says.
Run it:    python3 course.py run 24_traps
By hand:   the compile line at the top of 24_traps.cu, then `./traps past_the_end_broken`, alone and under a tool
"""

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from lessonkit import About, Steps, device
from lessonkit.cuda import build, toolchain

SOURCE = Path(__file__).with_suffix(".cu")
SEEDS = range(4)  # orders in which the emulator runs the threads


@cache
def _program(sanitized=False):
    """The built 24_traps.cu: for the GPU that is here, else emulated (or under AddressSanitizer and UBSan)."""
    product = build.program(SOURCE) if device.HAS_GPU else build.emulated_program(SOURCE, sanitized)
    return str(build.build([product])[0])


def _run(*command, **environment):
    # A form that may hang is never started on a GPU; should one hang all the same, the step fails, and does not wait.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def _find_sanitizer():
    """compute-sanitizer on PATH or in the toolkit; None if nowhere."""
    beside = [str(Path(nvcc).resolve().parent) for nvcc in [toolchain.find_nvcc()] if nvcc]
    folders = [*beside, f"{toolchain.USUAL}/bin", f"{toolchain.USUAL}/compute-sanitizer"]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def _trap(name, kind, tool=None, says=""):
    """Run both forms. kind: the emulator's fault; tool: compute-sanitizer's, whose text matches the regex `says`."""
    if why := toolchain.lacks(*["nvcc"] * device.HAS_GPU, "g++", "ninja"):
        print(f"  left out: {why}")
    elif device.HAS_GPU:
        _on_gpu(name, tool, says)
    else:
        _emulated(name, kind)


def _emulated(name, kind):
    for seed in SEEDS:
        fixed = _run(_program(), f"{name}_fixed", COURSE_EMU_SEED=str(seed))
        assert (fixed.returncode, fixed.stderr) == (0, ""), fixed.stderr
        assert "right" in fixed.stdout
        broken = _run(_program(), f"{name}_broken", COURSE_EMU_SEED=str(seed))
        assert broken.returncode == 1, f"seed {seed}: not caught: {broken.stdout}"
        assert broken.stderr.startswith(f"{kind}: "), broken.stderr
        assert f"{SOURCE.name}:" in broken.stderr, "the fault names the line"
    print(f"  {broken.stderr.strip()}")


def _on_gpu(name, tool, says):
    fixed = _run(_program(), f"{name}_fixed")
    assert fixed.returncode == 0, fixed.stderr
    assert "right" in fixed.stdout
    sanitizer = _find_sanitizer()
    if not tool or not sanitizer:
        print(f"  fixed: right. {'No tool finds the broken form' if sanitizer else 'No compute-sanitizer'} on a GPU.")
        return
    clean = _run(sanitizer, "--tool", tool, _program(), f"{name}_fixed").stdout
    if "Device not supported" in clean:  # some virtual machines hide what the tools need
        print("  compute-sanitizer does not work on this machine: Device not supported")
        return
    assert re.search(r"SUMMARY: 0 (errors|hazards)", clean), clean
    found = _run(sanitizer, "--tool", tool, _program(), f"{name}_broken").stdout
    assert re.search(r"SUMMARY: [1-9]\d* (errors?|hazards?)", found), f"{tool} reports nothing: {found}"
    line = next((line for line in found.splitlines() if re.search(says, line)), None)
    assert line, f"{tool} never says {says!r}: {found}"
    alone = _run(_program(), f"{name}_broken")
    print(f"  {tool}: {line.lstrip('= ')}\n  without a tool: {(alone.stdout + alone.stderr).strip()}")


def missing_barrier():
    """Written by one thread, read by another: a barrier between, or it is a race, whatever today's answer."""
    _trap("missing_barrier", "race", "racecheck", "Race reported|hazard")


def missing_second_barrier():
    """A loop that fills a tile and reads it wants two barriers a turn: written before read, read before overwritten."""
    _trap("missing_second_barrier", "race", "racecheck", "Race reported|hazard")


def shared_counter():
    """`bins[b] += 1` by many threads loses counts: an addition that others take part in is atomicAdd."""
    _trap("shared_counter", "race", "racecheck", "Race reported|hazard")


def global_counter():
    """The same race between blocks is in no tool's reach on a GPU; the emulator sees it."""
    _trap("global_counter", "race")


def missing_syncwarp():
    """Lanes of one warp are not in step by themselves: what passes between them through memory wants __syncwarp()."""
    _trap("missing_syncwarp", "race", "racecheck", "Race reported|hazard")


def barrier_in_a_branch():
    """A barrier is for every thread of the block that has not returned, never for one side of a branch alone."""
    _trap("barrier_in_a_branch", "barrier", "synccheck", "Barrier error|Divergent")


def absent_lane():
    """A mask names the lanes that take part: one that never comes is waited for. On a GPU a hang, so not run there."""
    _trap("absent_lane", "barrier")


def past_the_end():
    """One element too many: on a GPU mostly silent, as allocations are padded; memcheck knows where each one ends."""
    _trap("past_the_end", "out of bounds", "memcheck", "Invalid __global__ (read|write) of size 4")


def index_overflow():
    """int * int wraps at 2^31 even where the index that it leads to is small: int64 before the product."""
    _trap("index_overflow", "out of bounds", "memcheck", "Invalid __global__ read of size 4")


def the_cause_of_an_overflow():
    """UBSan names the product that wrapped; a tool that watches addresses, only where it led."""
    if not device.HAS_GPU and not toolchain.lacks("g++", "ninja"):
        assert _run(_program(sanitized=True), "index_overflow_fixed").returncode == 0
        broken = _run(_program(sanitized=True), "index_overflow_broken")
        assert broken.returncode != 0
        assert "signed integer overflow" in broken.stderr, broken.stderr


def misaligned_vector():
    """16 bytes at once lie at a multiple of 16 bytes: pad the rows, or load one by one."""
    _trap("misaligned_vector", "misaligned", "memcheck", "misaligned")


def unset_sum():
    """cudaMalloc and torch.empty set nothing: what is added to has to be zeroed. A fresh process hides it."""
    _trap("unset_sum", "uninitialised", "initcheck", "Uninitialized __global__ memory read")


def unwritten_tail():
    """Shared memory holds what the last block left there, and initcheck does not look: pad the tail of a tile."""
    _trap("unwritten_tail", "uninitialised")


def forgotten_wait():
    """A copy by cp.async has begun, not happened: each thread waits for its own, then a barrier tells the others."""
    _trap("forgotten_wait", "uninitialised", "racecheck", "Race reported|hazard")


LESSON = Steps(
    about=About(
        teaches="kernels broken on purpose: race, missing barrier, out of bounds, misaligned, uninitialised; the "
        "tool that finds each",
        hours=1.5,
        star=True,
    ),
    steps=(
        missing_barrier,
        missing_second_barrier,
        shared_counter,
        global_counter,
        missing_syncwarp,
        barrier_in_a_branch,
        absent_lane,
        past_the_end,
        index_overflow,
        the_cause_of_an_overflow,
        misaligned_vector,
        unset_sum,
        unwritten_tail,
        forgotten_wait,
    ),
    nightly=(the_cause_of_an_overflow,),  # a build under both sanitizers
)

if __name__ == "__main__":
    LESSON.main()
