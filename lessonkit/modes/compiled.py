"""What the compiler made of a rung, for any GPU and without one.

`python -m lessonkit compile LESSON` runs each rung once with meta tensors (shapes, no data) under a driver that
names a target and launches nothing: Triton specialises and compiles exactly what a launch would. From the machine
code come registers, spills, shared memory, the occupancy they allow, and the instructions that a rung may claim.
"""

import hashlib
import json
import re
import struct
import subprocess
import tempfile
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

from lessonkit.measure.rows import write_atomically
from lessonkit.modes.compile_server import call_in_compiler

TARGETS = (80, 90, 100)
# Per SM: registers, shared memory in bytes, warps, blocks (CUDA programming guide, compute capabilities table).
SM_LIMITS = {80: (65536, 167936, 64, 32), 90: (65536, 233472, 64, 32), 100: (65536, 233472, 64, 32)}


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel of a rung. Bytes and counts are for one program (block)."""

    rung: str
    kernel: str
    target: int
    warps: int
    registers: int  # a thread
    spills: int  # local-memory loads and stores in the machine code
    shared: int
    occupancy: float  # resident warps over the SM's most, by registers, shared memory and blocks
    load_bytes: int  # widest global load a thread makes
    store_bytes: int
    wgmma: int
    mma: int
    tma: int
    cp_async: int
    barriers: int
    instructions: int


CLAIMS: dict[str, Callable[[Kernel], bool]] = {
    "no spills": lambda k: k.spills == 0,
    "16-byte loads": lambda k: k.load_bytes == 16,
    "16-byte stores": lambda k: k.store_bytes == 16,
    "mma": lambda k: k.mma > 0,
    "wgmma": lambda k: k.target != 90 or k.wgmma > 0,
    "tma": lambda k: k.target < 90 or k.tma > 0,
    "cp.async": lambda k: k.target != 80 or k.cp_async > 0,
    "no shared memory": lambda k: k.shared == 0,
}


def second_target(name: str) -> int:
    """The target, 80 or 100, that a test compiles a lesson for beside 90. It depends on the lesson's name alone."""
    return (80, 100)[zlib.crc32(name.encode()) % 2]


def resident(target: int, warps: int, registers: int, shared: int) -> int:
    """Programs that an SM holds at a time. Registers come in units of 256 a warp, shared memory with 1 KB a program."""
    all_registers, all_shared, max_warps, max_blocks = SM_LIMITS[target]
    by_registers = all_registers // (-(-registers * 32 // 256) * 256) // warps if registers else max_blocks
    return min(by_registers, all_shared // (shared + 1024), max_blocks, max_warps // warps)


def occupancy(target: int, warps: int, registers: int, shared: int) -> float:
    """Resident warps over the SM's most."""
    return resident(target, warps, registers, shared) * warps / SM_LIMITS[target][2]


def tool(name: str, *args: str) -> str:
    """Output of one of the binary tools that Triton's package carries."""
    import triton

    path = getattr(triton.knobs.nvidia, name).path
    return subprocess.run([path, *args], capture_output=True, text=True, check=True).stdout


@contextmanager
def as_file(binary: bytes) -> Iterator[str]:
    """The path of a cubin, for the tools, which read files."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(binary)
        cubin.flush()
        yield cubin.name


def sections(binary: bytes) -> list[tuple[str, bytes]]:
    """Name and content of each section of a cubin, which is a 64-bit ELF file; no content where the file has none."""
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    count, names = struct.unpack_from("<HH", binary, 0x3C)
    # An entry: the name's offset, type (8: nothing in the file), flags, address, offset, size, ...
    entries = [struct.unpack_from("<IIQQQQ", binary, table + 64 * i) for i in range(count)]
    strings = entries[names][4]

    def name(offset: int) -> str:
        return binary[strings + offset : binary.index(b"\0", strings + offset)].decode()

    return [(name(e[0]), b"" if e[1] == 8 else binary[e[4] : e[4] + e[5]]) for e in entries]


def functions(binary: bytes) -> dict[str, bytes]:
    """The machine code of each function in a cubin."""
    return {name.removeprefix(".text."): code for name, code in sections(binary) if name.startswith(".text.")}


def opcodes(codes: Iterable[bytes], target: int) -> list[Counter[str]]:
    """How often each opcode (LDG.E.128, HGMMA.64x256x16.F32.BF16) is in the machine code of these functions.

    Kept on disk. What is new is disassembled by one process, as nvdisasm takes 0.4 s to start and no time for the rest.
    """
    from lessonkit.base import eviction

    codes = list(codes)
    files = [_kept(code, target) for code in codes]
    new = [i for i, file in enumerate(files) if not file.exists()]
    architecture = f"SM{target}{'a' * (target >= 90)}"
    found: list[Counter[str]] = [Counter() for _ in new]
    if new:
        with as_file(b"".join(codes[i] for i in new)) as together:
            text = tool("nvdisasm", "-b", architecture, "-ndf", together)
        ends = list(accumulate(len(codes[i]) for i in new))
        for address, op in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text, re.MULTILINE):
            found[bisect_right(ends, int(address, 16))][op] += 1
    for i, ops in zip(new, found, strict=True):
        write_atomically(files[i], json.dumps(ops))
    for file in files:
        eviction.used(file)
    return [Counter(json.loads(file.read_text())) for file in files]


def _kept(code: bytes, target: int) -> Path:
    """Where the opcodes of machine code are kept."""
    from lessonkit.cuda import build, toolchain

    import triton

    said = toolchain.version(triton.knobs.nvidia.nvdisasm.path)
    return build.CACHE / "opcodes" / f"{hashlib.sha256(code + f'{target} {said}'.encode()).hexdigest()[:32]}.json"


@cache
def normalised(binary: bytes) -> str:
    """What a cubin does, as 16 hex digits: its instructions with their operands, its constants, and what it occupies.

    Names, files, lines and the order of functions do not count: the same kernel under another name is the same.
    """
    with as_file(binary) as cubin:
        usage = dict(re.findall(r"Function (\S+):\s+(.*)", tool("cuobjdump", "-res-usage", cubin)))
    parts = []
    for name, content in sections(binary):
        plain = name.removeprefix(".rela")
        if not (kind := re.match(r"\.(text|nv\.constant[1-9]\d*|nv\.global)", plain)):
            continue
        if plain != name:  # each entry: where, symbol's number << 32 | how, what is added
            content = repr(
                [(at, how & 0xFFFFFFFF, add) for at, how, add in struct.iter_unpack("<QQq", content)]
            ).encode()
        parts.append(repr((kind[1], plain == name, content, usage.get(plain.removeprefix(".text."), ""))))
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:16]


def row(rung: str, kernel: str, target: int, ops: Iterable[str], *, warps: int, registers: int, shared: int) -> Kernel:
    """A kernel's row: what is known of it, and what its instructions (a list, or how many of each) show."""
    ops = Counter(ops)

    def count(*prefixes: str) -> int:
        return sum(times for op, times in ops.items() if op.startswith(prefixes))

    def widest(prefix: str) -> int:
        widths = [
            int(m[1]) // 8 if (m := re.search(r"\.[US]?(8|16|64|128|256)\b", op)) else 4
            for op in ops
            if op.startswith(prefix)
        ]
        return max(widths, default=0)

    return Kernel(
        rung=rung,
        kernel=kernel,
        target=target,
        warps=warps,
        registers=registers,
        spills=count("LDL", "STL"),
        shared=shared,
        occupancy=round(occupancy(target, warps, registers, shared), 3),
        load_bytes=widest("LDG"),
        store_bytes=max(widest("STG"), *(4 * int(m[1]) for op in ops if (m := re.match(r"REDG.*\.F32x(\d)", op))), 0),
        wgmma=count("HGMMA", "QGMMA", "IGMMA"),
        mma=count("HMMA", "IMMA", "UTCHMMA", "UTCQMMA"),
        tma=count("UTMALDG", "UTMASTG", "UBLKCP"),
        cp_async=count("LDGSTS"),
        barriers=count("BAR"),
        instructions=ops.total() - ops["NOP"],
    )


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
    """Inside, a launch compiles for the target and starts nothing. Only in a process whose lane is `compiled`.

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
    """Compile every rung of a lesson. Only in a process whose lane is `compiled` (see compile_server)."""
    from lessonkit.lesson import Broken, Lesson, discover, suits
    from lessonkit.validate import Unsupported

    lesson = dict(discover(name))[name]
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
    from lessonkit.cuda import sass
    from lessonkit.lesson import ROOT

    if (program := ROOT / f"{name.replace('.', '/')}.cu").exists():
        return sass.kernels(program, targets)
    try:
        return tuple(Kernel(**row) for row in call_in_compiler(__name__, "_compile_here", name, targets, rungs))
    except RuntimeError as error:
        raise RuntimeError(f"{name} does not compile: {error}") from None


def broken_claims(name: str, claims: Mapping[str, Sequence[str]], found: Iterable[Kernel]) -> list[str]:
    """What a lesson claims of its rungs ({rung: claims}) and the machine code does not show.

    "no spills" is meant of every kernel that the rung launches, "row_kernel: no spills" of that one. A claim that is
    not in CLAIMS is broken, and the line lists those that are.
    """
    broken, everything = [], list(found)
    for rung, wanted in claims.items():
        for claim in wanted:
            only, _, what = claim.rpartition(": ")
            if what not in CLAIMS:
                broken.append(f"{name}.{rung} claims {what!r}; a claim is one of {', '.join(map(repr, CLAIMS))}")
                continue
            kernels = [k for k in everything if k.rung == rung and only in ("", k.kernel)]
            broken += [f"{name}.{rung} launches no {only or 'kernel'}"] * (not kernels)
            broken += [
                f"{name}.{rung}: {k.kernel} for sm_{k.target} lacks {what!r}: {k}"
                for k in kernels
                if not CLAIMS[what](k)
            ]
    return broken
