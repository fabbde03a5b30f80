"""A ladder's last rung is the plain case of the kernel that course_ops ships: the same answer, resources and time.

The files differ, since the shipped one has all options. `pytest -s tests/test_last_rungs.py` prints the diff.
"""

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from lessonkit import device
from lessonkit.measure import timing
from lessonkit.modes import compiled
from lessonkit.modes.compile_server import call_in_compiler

import pytest
import torch

from problems.attention import inputs, inputs_backward

APART = 0.03  # of the time: rounds of one process differ by less


@dataclass(frozen=True)
class Ladder:
    """Modules of the last rung and of the shipped kernel; what a call takes and makes of the plain case."""

    rung: str
    shipped: str
    function: str
    inputs: Callable[..., tuple]
    repeats: slice  # which of the results are the same to the bit each time
    sizes: tuple[dict, ...]


LADDERS = {
    "flash attention": Ladder(  # tests/test_flash_hopper.py: the instructions are the same
        rung="day4_replace_op.flash_hopper.causal_diagonal",
        shipped="course_ops.kernels.attention_forward_hopper",
        function="attention_forward",
        inputs=inputs,
        repeats=slice(0, 2),
        sizes=(
            {"B": 4, "H": 16, "S": 4096, "D": 128, "causal": True},
            {"B": 1, "H": 16, "S": 16384, "D": 128, "causal": False},
        ),
    ),
    "flash attention backward": Ladder(
        rung="day4_replace_op.flash_hopper_backward.causal_skip",
        shipped="course_ops.kernels.attention_backward_hopper",
        function="attention_backward",
        inputs=inputs_backward,
        repeats=slice(1, 3),  # dK and dV
        sizes=(
            {"B": 4, "H": 16, "S": 4096, "D": 128, "causal": True},
            {"B": 1, "H": 16, "S": 16384, "D": 128, "causal": False},
        ),
    ),
}


def both(name):
    """The last rung and the shipped kernel's launcher, called alike."""
    ladder = LADDERS[name]
    shipped, rung = import_module(ladder.shipped), import_module(ladder.rung)

    def operator(*args):
        *tensors, causal, window, scale = args
        options = (causal, window) if name == "flash attention" else (causal,)  # its backward takes no window
        return getattr(shipped, ladder.function)(*tensors, *options, scale or tensors[1].shape[-1] ** -0.5)

    return getattr(rung, ladder.rung.rpartition(".")[2]), operator


def resources(name, sizes):
    """What the compiler gives the Gluon kernel of each for sm_90. Runs in a process that compiles."""
    ladder, found = LADDERS[name], []
    for fn in both(name):
        with compiled.compiling(90) as made:
            made.clear()
            fn(*ladder.inputs(**sizes, dtype=torch.bfloat16))
            kernels = [kernel for kernel in made.values() if kernel.src.fn.is_gluon()]
        row = compiled.inspect(fn.__name__, kernels[0], 90)
        found.append({"warps": row.warps, "registers": row.registers, "shared": row.shared, "kernels": len(made)})
    return found


@pytest.mark.kept("lessonkit/**/*.py", "course_ops/**/*.py")
@pytest.mark.parametrize("name", LADDERS)
def test_both_are_given_the_same_resources(name):
    rung, shipped = call_in_compiler("tests.test_last_rungs", "resources", name, LADDERS[name].sizes[0])
    assert rung == shipped


@pytest.mark.alone
@pytest.mark.skipif(not device.HAS_GPU or device.architecture() != 90, reason="wgmma needs a Hopper GPU")
@pytest.mark.parametrize("name", LADDERS)
def test_both_take_the_same_time_and_answer_alike(name):
    """Timed in the same rounds. What differs in the files is printed, and is the first place to look if this fails."""
    ladder, (rung, operator) = LADDERS[name], both(name)
    before, after = (inspect.getsource(import_module(m)).splitlines() for m in (ladder.rung, ladder.shipped))
    print("\n".join(difflib.unified_diff(before, after, ladder.rung, ladder.shipped, lineterm="", n=0)))
    for sizes in ladder.sizes:
        args = ladder.inputs(**sizes, dtype=torch.bfloat16)
        for ours, theirs in zip(rung(*args)[ladder.repeats], operator(*args)[ladder.repeats], strict=True):
            assert torch.equal(ours, theirs), sizes
        times = timing.measure({"rung": lambda a=args: rung(*a), "shipped": lambda a=args: operator(*a)})
        ratio = times["rung"].p50 / times["shipped"].p50
        print(f"{name} {sizes}: rung {times['rung'].p50:.4f} ms, shipped {times['shipped'].p50:.4f} ms, {ratio:.3f}")
        assert abs(ratio - 1) <= APART, (sizes, times)
