"""What the compiler made of a rung, for any GPU and without one.

`python -m lessonkit compile LESSON` runs each rung once with meta tensors (shapes, no data) under a driver that
names a target and launches nothing: Triton specialises and compiles exactly what a launch would. From the machine
code come registers, spills, shared memory, the occupancy they allow, and the instructions that a rung may claim.
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from importlib import import_module
from typing import Any
from unittest import mock

from lessonkit.base.errors import Unsupported
from lessonkit.base.files import ROOT
from lessonkit.cuda import sass
from lessonkit.cuda.sass import SM_LIMITS, Kernel, as_file, functions, occupancy, opcodes, resident, row, tool
from lessonkit.lesson import Broken, Lesson, discover, suits
from lessonkit.modes.compile_server import call_in_compiler

TARGETS = (80, 90, 100)


def second_target(name: str) -> int:
    """The target, 80 or 100, that a test compiles a lesson for beside 90. It depends on the lesson's name alone."""
    return (80, 100)[zlib.crc32(name.encode()) % 2]


def inspect(rung: str, compiled: Any, target: int) -> Kernel:
    """The row of a kernel that Triton has compiled."""
    meta = compiled.metadata
    ops, registers = _machine_code(compiled.asm["cubin"], target)
    return row(rung, meta.name, target, ops, warps=meta.num_warps, registers=registers, shared=meta.shared)


def idle_barriers(ttgir: str) -> list[str]:
    """Barriers in shared memory that a kernel makes ready and never uses.

    The compiler takes their place for free as soon as they are ready, and may give it to data. But bytes that hold a
    barrier are no ordinary memory until mbarrier.inval (PTX ISA, mbarrier.init): data there is damaged now and then.
    """
    # A partition's values are numbered anew: of two with one name, the kernel's own comes first.
    arrays = dict(reversed(re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)", ttgir)))
    made = [arrays.get(name, name) for name in re.findall(r"ttng\.init_barrier (%\w+)", ttgir)]
    others = re.sub(r"^.*(?:local_alloc|memdesc_index|init_barrier).*$", "", ttgir, flags=re.MULTILINE)
    used = {arrays.get(name, name) for name in re.findall(r"%\w+", others)}
    return [array for array in dict.fromkeys(made) if array not in used]


def one_dimensional_maps(ttgir: str) -> list[str]:
    """The types of tensor maps of one dimension in a kernel.

    Hopper's TMA dies ("illegal instruction") if it enters one at an address that is no multiple of 16 bytes. A second
    dimension has a stride, which TensorDescriptor checks.
    """
    return list(dict.fromkeys(re.findall(r"!tt\.tensordesc<(?:tensor<)?(\d+x[a-z]\w*)", ttgir)))


@cache  # rungs share kernels
def _machine_code(binary: bytes, target: int) -> tuple[Counter[str], int]:
    """The opcodes of a cubin with one kernel, and the registers of a thread."""
    with as_file(binary) as cubin:
        usage = tool("cuobjdump", "-res-usage", cubin)
    return sum(opcodes(functions(binary).values(), target), Counter()), int(re.findall(r"REG:(\d+)", usage)[0])


@contextmanager
def compiling(target: int) -> Iterator[dict[str, Any]]:
    """Inside, a launch compiles for the target and starts nothing. Only in a process whose mode is `compiled`.

    Yields {kernel's name: what Triton compiled}, which holds the first launch of each kernel until it is cleared.
    """
    from triton import runtime
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Driver:
        """Says which GPU to compile for; there is none to launch on."""

        def __init__(self, capability: int) -> None:
            self.target = GPUTarget("cuda", capability, 32)

        def get_current_target(self) -> GPUTarget:
            return self.target

        def get_current_device(self) -> int:
            return int(self.target.arch)  # JITFunction caches by device, so each target is one

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("meta")

    made: dict[str, Any] = {}
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if self.__name__ not in made:
            made[self.__name__] = launch(self, *args, grid=grid, warmup=True, **options)

    with mock.patch.object(JITFunction, "run", compile_only):
        runtime.driver.set_active(Driver(target))
        yield made


def _compile_here(name: str, targets: Iterable[int], rungs: Sequence[str]) -> list[dict[str, Any]]:
    """Compile every rung of a lesson. Only in a process whose mode is `compiled` (see compile_server)."""

    lesson = dict(discover(name)).get(name)
    if lesson is None:  # what is asked of a shipped operator: tests.operators.softmax.FORWARD
        module, _, attribute = name.rpartition(".")
        lesson = vars(import_module(module))[attribute]
    if isinstance(lesson, Broken):
        raise lesson.error
    assert isinstance(lesson, Lesson)
    kernels: dict[tuple[str, str, int], Kernel] = {}
    for target in targets:
        found: list[tuple[str, Any]] = []
        with compiling(target) as made:
            for rung in (r for r in lesson.rungs if suits(r, target) and (not rungs or r.__name__ in rungs)):
                made.clear()
                for shape in lesson.benches:
                    with suppress(Unsupported):
                        rung(*lesson.inputs(dtype=lesson.bench_dtype, **shape))
                found += [(rung.__name__, compiled) for compiled in made.values()]
        # All at once: the disassembler starts once for a target.
        opcodes((code for _, compiled in found for code in functions(compiled.asm["cubin"]).values()), target)
        for name_of_rung, compiled in found:
            kernel = inspect(name_of_rung, compiled, target)
            # Only Gluon's, as Triton's own warp specialization makes some, too.
            if compiled.src.fn.is_gluon() and (idle := idle_barriers(compiled.asm["ttgir"])):
                raise RuntimeError(
                    f"{kernel.rung}: {kernel.kernel} never uses {', '.join(idle)}: barriers that nobody needs "
                    "must not be made, for their memory is given to others"
                )
            if maps := one_dimensional_maps(compiled.asm["ttgir"]):
                raise RuntimeError(
                    f"{kernel.rung}: {kernel.kernel} has a tensor map of {', '.join(maps)}: describe it in "
                    "two dimensions, rows at multiples of 16 bytes, or TMA may enter it between two of them"
                )
            kernels[kernel.rung, kernel.kernel, target] = kernel
    return [asdict(k) for k in kernels.values()]


@cache
def kernels(name: str, targets: tuple[int, ...] = TARGETS, rungs: tuple[str, ...] = ()) -> tuple[Kernel, ...]:
    """Compile the rungs of a lesson in a process of its own (this one may be interpreting).

    rungs: only these, or all. Each kernel is compiled for the first bench shape at which the rung launches it; of CUDA
    C++ every kernel that the program instantiates. Raises RuntimeError with the compiler's words, or the line that says
    which one is missing.
    """

    if (program := ROOT / f"{name.replace('.', '/')}.cu").exists():
        return sass.kernels(program, targets)
    try:
        return tuple(Kernel(**row) for row in call_in_compiler(__name__, "_compile_here", name, targets, rungs))
    except RuntimeError as error:
        raise RuntimeError(f"{name} does not compile: {error}") from None


__all__ = [
    "SM_LIMITS",
    "TARGETS",
    "Kernel",
    "as_file",
    "compiling",
    "idle_barriers",
    "inspect",
    "kernels",
    "occupancy",
    "one_dimensional_maps",
    "resident",
    "row",
    "second_target",
    "tool",
]
