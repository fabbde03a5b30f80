"""A ladder's last rung is the plain case of the kernel that course_ops ships: the same answer, resources and time.

The files differ, since the shipped one has all options. `pytest -s tests/test_last_rungs.py` prints the diff.
"""

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module

from lessonkit import check, device
from lessonkit.measure import timing
from lessonkit.modes import compiled
from lessonkit.modes.compile_server import call_in_compiler

import pytest
import torch

from problems import attention, matmul, matmul_fp8
from problems.matmul_fp8 import scheme_of

APART = 0.03  # of the time: rounds of one process differ by less


@dataclass(frozen=True)
class Ladder:
    """Names of the last rung and of the shipped kernel's launcher, and what a call takes of the plain case."""

    rung: str
    shipped: str
    inputs: Callable[..., tuple]
    sizes: tuple[dict, ...]
    options: Callable[..., tuple] = lambda *args: args  # a call's arguments -> those of the launcher
    # Which of the results are the same to the bit each time.
    repeats: slice = field(default_factory=lambda: slice(None))
    dtype: torch.dtype = torch.bfloat16

    @property
    def names(self):
        return self.rung, self.shipped


def of_forward(q, k, v, causal, window, scale):
    return q, k, v, causal, window, scale or k.shape[-1] ** -0.5


def of_backward(*args):
    *tensors, causal, _, scale = args  # its backward takes no window
    return *tensors, causal, scale or tensors[1].shape[-1] ** -0.5


def of_fp8(*args):
    return *args, scheme_of(*args)


FP8_SIZES = {scheme: {"M": 4096, "N": 4096, "K": 4096, "scheme": scheme} for scheme in ("tensor", "rows", "blocks")}


LADDERS = {
    "flash attention": Ladder(  # tests/test_flash_hopper.py: the instructions are the same
        rung="day4_replace_op.flash_hopper.causal_diagonal.causal_diagonal",
        shipped="course_ops.kernels.attention_forward_hopper.attention_forward",
        inputs=attention.inputs,
        options=of_forward,
        repeats=slice(0, 2),
        sizes=(
            {"B": 4, "H": 16, "S": 4096, "D": 128, "causal": True},
            {"B": 1, "H": 16, "S": 16384, "D": 128, "causal": False},
        ),
    ),
    "flash attention backward": Ladder(
        rung="day4_replace_op.flash_hopper_backward.causal_skip.causal_skip",
        shipped="course_ops.kernels.attention_backward_hopper.attention_backward",
        inputs=attention.inputs_backward,
        options=of_backward,
        repeats=slice(1, 3),  # dK and dV
        sizes=(
            {"B": 4, "H": 16, "S": 4096, "D": 128, "causal": True},
            {"B": 1, "H": 16, "S": 16384, "D": 128, "causal": False},
        ),
    ),
    "matmul": Ladder(  # tests/test_course_ops_matmul.py: of these three the machine code is the same
        rung="day3_matmul_tk.matmul_hopper.tile_choice.tile_choice",
        shipped="course_ops.kernels.matmul_hopper.matmul_hopper",
        inputs=matmul.inputs,
        sizes=({"M": 4096, "N": 4096, "K": 4096}, {"M": 1024, "N": 1024, "K": 1024}),
    ),
    "fp8 matmul": Ladder(
        rung="day3_matmul_tk.lesson11_matmul_fp8_hopper.matmul_fp8",
        shipped="course_ops.kernels.matmul_fp8_hopper.fp8_sum_hopper",
        inputs=matmul_fp8.inputs,
        options=of_fp8,
        dtype=matmul_fp8.FP8,
        sizes=(FP8_SIZES["tensor"], FP8_SIZES["rows"]),
    ),
    "fp8 matmul, block scales": Ladder(
        rung="day3_matmul_tk.lesson12_matmul_fp8_blocks.matmul_fp8",
        shipped="course_ops.kernels.matmul_fp8_hopper.fp8_promote_hopper",
        inputs=matmul_fp8.inputs,
        options=of_fp8,
        dtype=matmul_fp8.FP8,
        sizes=(FP8_SIZES["blocks"], FP8_SIZES["blocks"] | {"M": 8192, "N": 8192, "K": 8192}),
    ),
}


def module_of(function):
    return function.rpartition(".")[0]


def both(name):
    """The last rung and the shipped kernel's launcher, called alike."""
    ladder = LADDERS[name]
    rung, shipped = (getattr(import_module(module_of(each)), each.rpartition(".")[2]) for each in ladder.names)

    def operator(*args):
        return shipped(*ladder.options(*args))

    return rung, operator


def resources(name, sizes):
    """What the compiler gives the Gluon kernel of each for sm_90. Runs in a process that compiles."""
    ladder, found = LADDERS[name], []
    for fn in both(name):
        with compiled.compiling(90) as made:
            made.clear()
            fn(*ladder.inputs(**sizes, dtype=ladder.dtype))
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
    modules = [*map(module_of, ladder.names)]
    before, after = (inspect.getsource(import_module(module)).splitlines() for module in modules)
    print("\n".join(difflib.unified_diff(before, after, *modules, lineterm="", n=0)))
    for sizes in ladder.sizes:
        args = ladder.inputs(**sizes, dtype=ladder.dtype)
        answers = [check.tensors(fn(*args))[ladder.repeats] for fn in (rung, operator)]
        for ours, theirs in zip(*answers, strict=True):
            assert torch.equal(ours, theirs), sizes
        times = timing.measure({"rung": lambda a=args: rung(*a), "shipped": lambda a=args: operator(*a)})
        ratio = times["rung"].p50 / times["shipped"].p50
        print(f"{name} {sizes}: rung {times['rung'].p50:.4f} ms, shipped {times['shipped'].p50:.4f} ms, {ratio:.3f}")
        assert abs(ratio - 1) <= APART, (sizes, times)
