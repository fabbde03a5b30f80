"""What the compiler made of a rung, for any GPU and without one.

`python -m lessonkit compile LESSON` runs each rung once with meta tensors (shapes, no data) under a driver that
names a target and launches nothing: Triton specialises and compiles exactly what a launch would. From the machine
code come registers, spills, shared memory, the occupancy they allow, and the instructions that a rung may claim.
"""

import ast
import hashlib
import json
import os
import re
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

from lessonkit.base import chips, eviction, files
from lessonkit.base.chips import TARGETS, Target
from lessonkit.base.errors import Missing, Unsupported
from lessonkit.base.files import ROOT
from lessonkit.base.words import later
from lessonkit.cuda import sass, toolchain
from lessonkit.cuda.sass import WGMMA, Kernel, as_file, functions, occupancy, opcodes, resident, row, tool
from lessonkit.lesson import Broken, Lesson, Rung, discover, suits
from lessonkit.modes.compile_server import call_in_compiler

# What AMD's compiler says, and what it means.
NOT_ON_AMD = (
    (
        # The assembler's words, or those of AMD's pipeliner in Triton 3.7 when it meets the instruction in a loop.
        r"error: invalid instruction|error: unknown token|error: not a valid operand|"
        r"elementwise_inline_asm' op pipeliner doesn't know how to predicate",
        later("has inline PTX, NVIDIA's assembly"),
    ),
    (r"launch_pdl", later("is launched early (programmatic dependent launch), which NVIDIA alone has")),
    (
        r"raw\.ptr\.buffer\.atomic\.exch",
        later("exchanges atomically, which LLVM has not in the form that Triton asks for"),
    ),
)
NEEDS_IT, NEEDS_AT_LEAST = later("needs {what}: sm_{target} alone"), later("needs {what}: sm_{target} or newer")
# What rows say of rungs that a target does not get (words.retold), and what rungs need (lesson.needs).
UNFIT = (NEEDS_IT, NEEDS_AT_LEAST, later("fp8 needs compute capability {least}, the GPU has {has}: use bf16"))
NEEDED = (later("TMA and wgmma"), later("TMA and tensor memory"), later("fp8 tensor cores"), later("fp8 conversions"),
          later("thread block clusters"))  # fmt: skip
COURSE_OPS = "course_ops"  # takes the place of a lesson's name: every operator, forward and backward


@dataclass(frozen=True)
class Unfit:
    """A rung that a target does not get, and in one line why."""

    rung: str
    target: Target
    why: str


@dataclass(frozen=True)
class Count:
    """How many kernels a target gets of a lesson, and rungs it does not. failed: what nothing here explains."""

    kernels: int
    unfit: int
    failed: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of the rungs of a lesson for one target. failed: what nothing here explains."""

    kernels: tuple[Kernel, ...]
    unfit: tuple[Unfit, ...]
    failed: tuple[str, ...]


def second_target(name: str) -> int:
    """The target, 80 or 100, that a test compiles a lesson for beside 90. It depends on the lesson's name alone."""
    return (80, 100)[zlib.crc32(name.encode()) % 2]


def inspect(rung: str, compiled: Any, target: Target) -> Kernel:
    """The row of a kernel that Triton has compiled."""
    meta = compiled.metadata
    if chips.is_amd(target):
        return _amd_row(rung, meta.name, target, compiled.asm["amdgcn"], meta.num_warps)
    ops, registers = _machine_code(compiled.asm["cubin"], target)
    return row(
        rung,
        meta.name,
        target,
        ops,
        warps=meta.num_warps,
        registers=registers,
        shared=meta.shared,
        tensor_columns=meta.tmem_size or 0,
    )


def _amd_row(rung: str, kernel: str, target: Target, assembly: str, warps: int) -> Kernel:
    """The row of a kernel by its AMD assembly, which says at its end what the kernel takes."""
    said = {key: int(n) for key, n in re.findall(r"^\s+\.(\w+): +(\d+)$", assembly, re.MULTILINE)}
    ops = Counter(re.findall(r"^\t([a-z]\w+)", assembly, re.MULTILINE))

    def count(pattern: str) -> int:
        return sum(times for op, times in ops.items() if re.match(pattern, op))

    def widest(pattern: str) -> int:
        units = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "short": 2, "ushort": 2, "byte": 1, "ubyte": 1}
        units |= {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}
        found = [units.get(m[1], 4) for op in ops if (m := re.match(pattern, op))]
        return max(found, default=0)

    registers, shared = said["vgpr_count"], said["group_segment_fixed_size"]
    return Kernel(
        rung=rung,
        kernel=kernel,
        target=target,
        warps=warps,
        registers=registers,
        spills=said["vgpr_spill_count"],
        shared=shared,
        occupancy=round(occupancy(target, warps, registers, shared), 3),
        load_bytes=widest(r"(?:global|buffer)_load_(?:lds_)?([a-z]+(?:x?\d+)?)"),
        store_bytes=widest(r"(?:global|buffer)_store_([a-z]+(?:x?\d+)?)"),
        wgmma=0,
        waits=0,
        mma=count(r"v_s?mfma"),
        tma=0,
        cp_async=count(r"(?:global|buffer)_load_lds")
        + len(re.findall(r"^\tbuffer_load\S* .* lds$", assembly, re.MULTILINE)),
        barriers=count(r"s_barrier"),
        instructions=ops.total() - ops["s_nop"],
    )


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
def _machine_code(binary: bytes, target: Target) -> tuple[Counter[str], int]:
    """The opcodes of a cubin with one kernel, and the registers of a thread."""
    with as_file(binary) as cubin:
        usage = tool("cuobjdump", "-res-usage", cubin)
    return sum(opcodes(functions(binary).values(), target), Counter()), int(re.findall(r"REG:(\d+)", usage)[0])


@contextmanager
def compiling(target: Target) -> Iterator[dict[str, Any]]:
    """Inside, a launch compiles for the target and starts nothing. Only in a process whose mode is `compiled`.

    Yields {kernel's name: what Triton compiled}, which holds the first launch of each kernel until it is cleared.
    """
    from triton import runtime
    from triton.backends.compiler import GPUTarget
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    class Driver:
        """Says which GPU to compile for; there is none to launch on."""

        def __init__(self) -> None:
            self.target = GPUTarget("hip" if chip.amd else "cuda", target, chip.warp_size)
            self.utils = self

        def get_current_target(self) -> GPUTarget:
            return self.target

        def get_current_device(self) -> int:
            return TARGETS.index(target)  # JITFunction caches by device, so each target is one

        def get_device_properties(self, device: int) -> dict[str, int]:
            return {"multiprocessor_count": chip.sms, "max_shared_mem": chip.shared_block, "warpSize": chip.warp_size}

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("meta")

    chip = chips.of(target)
    made: dict[str, Any] = {}
    launch, tune = JITFunction.run, Autotuner.run

    def tune_anew(self: Any, *args: Any, **options: Any) -> Any:
        self.cache.clear()  # a tile is kept by shape and dtype alone: another target's may not fit this one
        return tune(self, *args, **options)

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if self.__name__ in made:
            return
        if chip.amd:  # has no such options
            options = {key: value for key, value in options.items() if key != "maxnreg"}
            if not options.get("launch_pdl", True):
                del options["launch_pdl"]
        with _errors_with_words():
            made[self.__name__] = launch(self, *args, grid=grid, warmup=True, **options)

    with mock.patch.object(JITFunction, "run", compile_only), mock.patch.object(Autotuner, "run", tune_anew):
        runtime.driver.set_active(Driver())
        yield made


@contextmanager
def _errors_with_words() -> Iterator[None]:
    """An error from inside carries as a note what the compiler's libraries, which know no Python, wrote to stderr."""
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as words:
        os.dup2(words.fileno(), 2)
        try:
            yield
        except Exception as error:
            words.seek(0)
            error.add_note(words.read().decode(errors="replace"))
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)


def _compile_here(name: str, target: Target, rungs: Sequence[str]) -> dict[str, Any]:
    """Compile every rung of a lesson. Only in a process whose mode is `compiled` (see compile_server)."""
    found, unfit, failed = _launched(name, target, rungs)
    if not chips.is_amd(target):
        _disassemble(found, target)
    kernels: dict[tuple[str, str], Kernel] = {}
    for rung, compiled in found:
        kernel = inspect(rung, compiled, target)
        failed += _wrong(rung, target, compiled, kernel.shared)
        kernels[kernel.rung, kernel.kernel] = kernel
    return asdict(Outcome(tuple(kernels.values()), tuple(unfit), tuple(failed)))


def _disassemble(found: Sequence[tuple[str, Any]], target: Target) -> None:
    """All at once, so that the disassembler starts once for a target. What it says is kept."""
    sass.read((code for _, compiled in found for code in functions(compiled.asm["cubin"]).values()), target)


def _count_here(name: str, target: Target) -> dict[str, Any]:
    """As _compile_here, without rows: a tenth of the time is the disassembler's, which looks at Hopper's code alone."""
    found, unfit, failed = _launched(name, target, ())
    if target == WGMMA:
        _disassemble(found, target)
    for rung, compiled in found:
        failed += _wrong(rung, target, compiled, compiled.metadata.shared)
    return asdict(Count(len({(rung, compiled.metadata.name) for rung, compiled in found}), len(unfit), tuple(failed)))


def _launched(name: str, target: Target, rungs: Sequence[str]) -> tuple[list[tuple[str, Any]], list[Unfit], list[str]]:
    """Launch every rung of a lesson: (rung, what Triton compiled of it), rungs left out, and what failed."""
    unfit, failed, found = list[Unfit](), list[str](), list[tuple[str, Any]]()
    # course_ops, which knows nothing of the kit, refuses by an error of its own.
    refusals = (import_module(COURSE_OPS).Unsupported if name == COURSE_OPS else Unsupported,)
    with compiling(target) as made:
        for rung, whats_wrong, calls in _calls(name, target, rungs):
            if whats_wrong:
                unfit.append(Unfit(rung, target, whats_wrong))
                continue
            made.clear()
            refused = []
            try:
                for call in calls:
                    try:
                        call()
                    except refusals as why:
                        refused.append(str(why))
            except Exception as error:
                lacks = _why_not_amd(error) if chips.is_amd(target) else ""
                if lacks:
                    unfit.append(Unfit(rung, target, lacks))
                else:
                    said = " | ".join(line.strip() for line in str(error).splitlines() if line.strip())
                    words = said[:150] + said[150:][-250:]
                    failed.append(f"{rung} for {chips.label(target)}: {type(error).__name__}: {words}")
                continue
            if refused and not made:
                unfit.append(Unfit(rung, target, refused[0].splitlines()[0]))
            found += [(rung, compiled) for compiled in made.values()]
    return found, unfit, failed


def _calls(name: str, target: Target, rungs: Sequence[str]) -> Iterator[tuple[str, str, list[Callable[[], object]]]]:
    """(rung, why this target does not get it or "", its calls), one of each bench shape."""
    if name == COURSE_OPS:
        for call, launch in import_module("course_ops.testing").calls().items():
            yield call, "", [launch]
        return
    lesson = dict(discover(name)).get(name)
    if lesson is None:  # what is asked of a shipped operator: tests.operators.softmax.FORWARD
        module, _, attribute = name.rpartition(".")
        lesson = vars(import_module(module))[attribute]
    if isinstance(lesson, Broken):
        raise lesson.error
    assert isinstance(lesson, Lesson)
    capability = 0 if isinstance(target, str) else target
    for rung in lesson.rungs:
        if rungs and rung.__name__ not in rungs:
            continue
        why = "" if suits(rung, capability) else requirement(rung)
        inputs = partial(lesson.inputs, dtype=lesson.bench_dtype)
        yield rung.__name__, why, [partial(_call, rung, inputs, shape) for shape in lesson.benches]


def _call(rung: Rung, inputs: Callable[..., tuple[Any, ...]], shape: dict[str, Any]) -> object:
    return rung(*inputs(**shape))


def requirement(rung: Rung) -> str:
    """What a rung needs that not every target has, in words."""
    needed: Any = rung
    words = NEEDS_IT if needed.needs_only else NEEDS_AT_LEAST
    return words.format(what=needed.needs_what, target=needed.needs)


def _why_not_amd(error: Exception) -> str:
    """What of NVIDIA a kernel has that AMD's compiler stopped at, or "" where that is not why."""
    said = "\n".join([str(error), *getattr(error, "__notes__", ())])
    return next((why for pattern, why in NOT_ON_AMD if re.search(pattern, said)), "")


def _wrong(rung: str, target: Target, compiled: Any, shared: int) -> list[str]:
    """What must be in no kernel."""
    at = f"{rung} for {chips.label(target)}: {compiled.metadata.name}"
    most = chips.of(target).shared_block
    wrong = []
    if shared > most:
        wrong.append(f"{at} asks for {shared} bytes of shared memory a block; the chip has {most}")
    # Only Gluon's, as Triton's own warp specialization makes some, too.
    if compiled.src.fn.is_gluon() and (idle := idle_barriers(compiled.asm["ttgir"])):
        wrong.append(
            f"{at} never uses {', '.join(idle)}: barriers that nobody needs must not be made, for their memory is "
            "given to others"
        )
    if maps := one_dimensional_maps(compiled.asm["ttgir"]):
        wrong.append(
            f"{at} has a tensor map of {', '.join(maps)}: describe it in two dimensions, rows at multiples of "
            "16 bytes, or TMA may enter it between two of them"
        )
    shown = sass.read(functions(compiled.asm["cubin"]).values(), WGMMA) if target == WGMMA else []
    if unset := [register for code in shown for register in code.unset]:
        wrong.append(
            f"{at} reads {', '.join(unset)}, which nothing has set: ptxas has lost a copy, and wgmma gets a garbage "
            "address"
        )
    return wrong


def outcome(name: str, target: Target, rungs: tuple[str, ...] = ()) -> Outcome:
    """What became of a lesson's rungs for a target, compiled in a process of its own (this one may be interpreting).

    name: a Triton lesson, or COURSE_OPS. rungs: only these, or all. Kept on disk by what the kernels depend on.
    """
    found = _once("_compile_here", name, target, rungs)
    return Outcome(
        tuple(Kernel(**row) for row in found["kernels"]),
        tuple(Unfit(**each) for each in found["unfit"]),
        tuple(found["failed"]),
    )


def count(name: str, target: Target) -> Count:
    """How many kernels `outcome` would show, in less time: only Hopper's machine code is disassembled."""
    found = _once("_count_here", name, target)
    return Count(found["kernels"], found["unfit"], tuple(found["failed"]))


def _once(function: str, *asked: Any) -> Any:
    """What a function of this module says in the process that compiles; kept on disk."""
    toolchain.need("Triton")
    kept = _kept(function, *asked)
    files.need_private(kept.parent)
    if not kept.exists():
        files.write_atomically(kept, json.dumps(call_in_compiler(__name__, function, *asked)))
    eviction.used(kept)
    return json.loads(kept.read_text())


def compile_ahead(names: Sequence[str], targets: Sequence[Target] = TARGETS) -> None:
    """Have `outcome` of all these kept, by a process a core. What fails says so when it is asked."""

    def compile_(asked: tuple[str, Target]) -> None:
        with suppress(RuntimeError):
            outcome(*asked)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_, product(names, targets)))


# What of the kit decides a row, beside the lesson and what it imports of the rest of the course.
KIT = ("base/chips.py", "base/device.py", "validate.py", "cuda/sass.py", "modes/compiled.py", "modes/opaque.py")


def _kept(function: str, name: str, target: Target, rungs: tuple[str, ...] = ()) -> Path:
    """Where an answer is kept, by the names and the words of all that it depends on."""
    said = [function, name, str(target), *rungs, *_compilers(), repr(chips.of(target))]
    said += [(ROOT / "lessonkit" / path).read_text() for path in KIT]
    said += [path.read_text() for path in _sources(name)]
    return files.CACHE / "compiled" / f"{hashlib.sha256(chr(0).join(said).encode()).hexdigest()[:32]}.json"


def _compilers() -> list[str]:
    """What turns a kernel into machine code: Triton, its ptxas, what computes its arguments, and Triton's settings."""
    import torch
    import triton

    tools = (getattr(triton.knobs.nvidia, name, None) for name in ("ptxas", "ptxas_blackwell"))  # Triton 3.6 has one
    known = [tool.path for tool in tools if tool]
    apart = ("TRITON_CACHE_DIR", "TRITON_INTERPRET")  # the process that compiles interprets nothing
    settings = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("TRITON_") and k not in apart]
    return [triton.__version__, torch.__version__, sys.version, *map(toolchain.version, known), *settings]


@cache
def _sources(name: str) -> tuple[Path, ...]:
    """A lesson's file, or course_ops' calls, and every file of the course but the kit that it imports."""
    # What is asked of an operator is an attribute of a module; names that are no files are passed over.
    todo = [name, name.rpartition(".")[0]] if name != COURSE_OPS else [f"{COURSE_OPS}.testing"]
    found: dict[str, Path] = {}
    while todo:
        module = todo.pop()
        if not module or module in found or module.split(".")[0] == "lessonkit":
            continue
        if path := _file(module):
            found[module] = path
            todo += _imported(path)
    return tuple(found[module] for module in sorted(found))


@cache
def _imported(path: Path) -> tuple[str, ...]:
    """The full names of what may be modules in a file's imports."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = [f"{node.module}.{alias.name}" for alias in node.names]
            # Where all are modules of a package, what else the package imports decides nothing.
            names += parts if all(map(_file, parts)) else [node.module, *parts]
    return tuple(names)


def _file(module: str) -> Path | None:
    """The file of a module of the course, or None: another name may be a function's, or of a package elsewhere."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    return next((each for each in (path, path.with_suffix("") / "__init__.py") if each.is_file()), None)


@cache
def kernels(name: str, targets: tuple[Target, ...] = TARGETS, rungs: tuple[str, ...] = ()) -> tuple[Kernel, ...]:
    """Compile the rungs of a lesson in a process of its own (this one may be interpreting).

    rungs: only these, or all. Each kernel is compiled for the first bench shape at which the rung launches it; of CUDA
    C++ every kernel that the program instantiates. Raises RuntimeError with the compiler's words, or the line that says
    which one is missing.
    """
    if (program := ROOT / f"{name.replace('.', '/')}.cu").exists():
        return sass.kernels(program, targets)
    try:
        found = [outcome(name, target, rungs) for target in targets]
    except Missing:
        raise
    except RuntimeError as error:
        raise RuntimeError(f"{name} does not compile: {error}") from None
    if failed := [line for each in found for line in each.failed]:
        raise RuntimeError(f"{name} does not compile: {'; '.join(failed)}")
    return tuple(kernel for each in found for kernel in each.kernels)


def unfit(name: str, targets: tuple[Target, ...] = TARGETS) -> tuple[Unfit, ...]:
    """The rungs that these targets do not get, each with its reason; none of CUDA C++, which names its targets."""
    if (ROOT / f"{name.replace('.', '/')}.cu").exists():
        return ()
    return tuple(each for target in targets for each in outcome(name, target).unfit)


__all__ = [
    "TARGETS",
    "Kernel",
    "as_file",
    "compiling",
    "idle_barriers",
    "inspect",
    "kernels",
    "occupancy",
    "one_dimensional_maps",
    "requirement",
    "resident",
    "row",
    "second_target",
    "tool",
]
