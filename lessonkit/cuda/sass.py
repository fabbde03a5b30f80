"""Machine code: what is in a cubin, of Triton or of nvcc, and what a kernel's row says of it.

A kernel of CUDA C++ that names no __launch_bounds__ is taken to have blocks of 256 threads, as most of the course's
have. Shared memory that the launch asks for is not known here, so an occupancy says what registers and static shared
memory allow.
"""

import hashlib
import json
import re
import struct
import subprocess
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

from lessonkit.base import chips, eviction, files
from lessonkit.base.cpp_text import codes
from lessonkit.base.words import later
from lessonkit.cuda import build, toolchain

TARGETS = (80, 90)  # 90 is sm_90a
THREADS = 256
RESERVED = 1024  # bytes of each block's shared memory that the system takes, from sm_90 on counted in the cubin
WGMMA = 90  # the target that has it
CLAIMED = (80, 90, 100)  # the targets whose machine code is asked what a lesson claims


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel of a rung. Bytes and counts are for one program (block).

    On AMD shared is LDS, a spill is one of a VGPR, mma counts MFMA, cp_async loads that go to LDS directly.
    """

    rung: str
    kernel: str
    target: chips.Target
    warps: int
    registers: int  # a thread
    spills: int  # local-memory loads and stores in the machine code
    shared: int
    occupancy: float  # resident warps over the SM's most, by registers, shared memory and blocks
    load_bytes: int  # widest global load a thread makes
    store_bytes: int
    wgmma: int
    waits: int  # for wgmma; ptxas makes as many as there are wgmma where it serializes them (see `serialized`)
    mma: int
    tma: int
    cp_async: int
    barriers: int
    instructions: int
    tcgen05: int = 0  # MMAs into tensor memory
    pairs: int = 0  # of them, those of two CTAs
    commits: int = 0  # arrivals on an mbarrier when MMAs are complete
    tensor_loads: int = 0  # from tensor memory to registers
    tensor_columns: int = 0  # of tensor memory, of which an SM has 512
    mbarriers: int = 0  # instructions that set, wait for or arrive on one


SERIALIZED = later("serialized wgmma")  # a claim that excuses a rung: without it such a kernel is a failure
CLAIMS: dict[str, Callable[[Kernel], bool]] = {
    later("no spills"): lambda k: k.spills == 0,
    later("16-byte loads"): lambda k: k.load_bytes == 16,
    later("16-byte stores"): lambda k: k.store_bytes == 16,
    "mma": lambda k: k.mma > 0,
    "wgmma": lambda k: k.target != 90 or k.wgmma > 0,
    "tma": lambda k: k.target == 80 or k.tma > 0,
    "mbarriers": lambda k: k.mbarriers > 0,
    "cp.async": lambda k: k.target != 80 or k.cp_async > 0,
    later("no shared memory"): lambda k: k.shared == 0,
    SERIALIZED: lambda k: True,  # at some shape: the row shows one shape alone
}

COUNTED = {  # "4 tcgen05.mma" is a claim, too
    "tcgen05.mma": "tcgen05",
    later("tcgen05.mma of two CTAs"): "pairs",
    "tcgen05.commit": "commits",
    "tcgen05.ld": "tensor_loads",
    later("columns of tensor memory"): "tensor_columns",
}


def predicate(said: str) -> Callable[[Kernel], bool] | None:
    """Whether a kernel shows what is claimed; None for what is no claim."""
    number, _, what = said.partition(" ")
    if number.isdigit() and what in COUNTED:
        return lambda k: bool(getattr(k, COUNTED[what]) == int(number))
    return CLAIMS.get(said)


def serialized(kernel: Kernel) -> bool:
    """Whether each wgmma is waited for before the next begins, so that tensor cores idle in between.

    ptxas does so to a whole kernel if it lacks registers, or if other instructions write an accumulator while wgmma are
    in flight. It says so in its remarks C7510 to C7515, which Triton does not show. The results are right.
    """
    return 1 < kernel.wgmma <= kernel.waits


def resident(target: chips.Target, warps: int, registers: int, shared: int) -> int:
    """Programs that an SM of the target's card holds at a time."""
    return chips.of(target).resident(warps, registers, shared)


def occupancy(target: chips.Target, warps: int, registers: int, shared: int) -> float:
    """Resident warps over the most of an SM of the target's card."""
    return chips.of(target).occupancy(warps, registers, shared)


def tool(name: str, *args: str) -> str:
    """Output of one of the binary tools that Triton's package carries."""
    import triton

    toolchain.need("Triton")
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


@dataclass(frozen=True)
class Code:
    """What the machine code of a function shows.

    opcodes  how often each (LDG.E.128, HGMMA.64x256x16.F32.BF16) is there
    unset    uniform registers that are read where nothing has set them (see `unset_registers`); asked of sm_90 alone
    """

    opcodes: Counter[str]
    unset: tuple[str, ...]


def read(codes: Iterable[bytes], target: chips.Target) -> list[Code]:
    """What the machine code of each of these functions shows.

    Kept on disk. What is new is disassembled by one process, as nvdisasm takes 0.4 s to start and no time for the rest.
    """
    codes = list(codes)
    files.need_private(files.CACHE / "opcodes")
    kept = [_kept(code, target) for code in codes]
    new = [i for i, file in enumerate(kept) if not file.exists()]
    architecture = f"SM{target}{'a' * (int(target) >= 90)}"
    lines: list[list[re.Match[str]]] = [[] for _ in new]
    if new:
        with as_file(b"".join(codes[i] for i in new)) as together:
            text = tool("nvdisasm", "-b", architecture, "-ndf", together)
        ends = list(accumulate(len(codes[i]) for i in new))
        for found in INSTRUCTION.finditer(text):
            lines[bisect_right(ends, int(found["address"], 16))].append(found)
    for i, own in zip(new, lines, strict=True):
        unset = unset_registers("\n".join(line[0] for line in own)) if target == WGMMA else []
        files.write_atomically(kept[i], json.dumps([Counter(line["op"] for line in own), unset]))
    for file in kept:
        eviction.used(file)
    return [Code(Counter(ops), tuple(unset)) for ops, unset in (json.loads(file.read_text()) for file in kept)]


def opcodes(codes: Iterable[bytes], target: chips.Target) -> list[Counter[str]]:
    """How often each opcode is in the machine code of each of these functions."""
    return [code.opcodes for code in read(codes, target)]


def _kept(code: bytes, target: chips.Target) -> Path:
    """Where is kept what this file reads in machine code."""
    import triton

    said = toolchain.version(triton.knobs.nvidia.nvdisasm.path) + _own_words()
    return files.CACHE / "opcodes" / f"{hashlib.sha256(code + f'{target} {said}'.encode()).hexdigest()[:32]}.json"


@cache
def _own_words() -> str:
    return Path(__file__).read_text()


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


def row(
    rung: str,
    kernel: str,
    target: chips.Target,
    ops: Iterable[str],
    *,
    warps: int,
    registers: int,
    shared: int,
    tensor_columns: int = 0,
) -> Kernel:
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
        waits=count("WARPGROUP.DEPBAR"),
        mma=count("HMMA", "IMMA", "UTCHMMA", "UTCQMMA"),
        tma=count("UTMALDG", "UTMASTG", "UBLKCP"),
        cp_async=count("LDGSTS"),
        barriers=count("BAR"),
        instructions=ops.total() - ops["NOP"],
        tcgen05=count("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA"),
        pairs=sum(times for op, times in ops.items() if re.match(r"UTC.MMA.*\.2CTA", op)),
        commits=count("UTCBAR"),
        tensor_loads=count("LDTM"),
        tensor_columns=tensor_columns,
        mbarriers=count("SYNCS"),
    )


# ---- Registers that nothing has written ----------------------------------------------------------------------------

INSTRUCTION = re.compile(
    r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<predicate>!?U?P\w+)\s+)?(?P<op>[A-Z][\w.]*) *(?P<operands>[^;\n]*)",
    re.MULTILINE,
)
UNIFORM = re.compile(r"(g?desc\[)?\bUR(\d+)\b")
# Instructions that read their first operand; all others write it, or what follows predicates that they write.
FIRST_IS_READ = re.compile(r"BRA|BRX|JM|CALL|BAR|NANOSLEEP|WARPSYNC|UR2UP|UCGABAR|USETMAXREG")
PREDICATES_ALONE = re.compile(r"SETP|VOTE")  # are written, or one register that comes first
INDIRECT = ("BRX", "BRXU", "JMX", "JMXU")  # jumps to an address in a register
ENDS = ("EXIT", "RET", "KILL")
UPPER_HALF = re.compile(r"UR\d+, UR(\d+), (-?0x[0-9a-f]+), URZ, UP\d, !UPT")
ZERO, URZ = 256, 255


def unset_registers(listing: str) -> list[str]:
    """The uniform registers that a function reads where some way leads that has not set them: ["UR34", ...].

    There must be none. Triton 3.6 and 3.7 bring along ptxas 12.8.93, which loses a copy in some kernels for Hopper. Two
    operands of wgmma use one place in shared memory there: attention's K, then V, where neither is loaded ahead. The
    second one's descriptor is made from two registers that the copy should have written. So its address is garbage.

    A register is not set where nothing has written it. It is not set either where a constant upper half is added to one
    that is not 0: that is a value from before (`UIADD3.X UR15, UR15, -0x3ffffff0, ...`). Other lost copies are not
    found.

    listing: nvdisasm's lines of a function for sm_90; tcgen05 writes registers in ways that are not known here. Calls
    are taken to set all registers, as some give a result in one. A jump to an address in a register may lead to
    whatever follows no instruction and no jump.
    """
    lines = [found.groupdict(default="") for found in INSTRUCTION.finditer(listing)]
    effects = [_effect(line) for line in lines]
    after = _successors(lines)
    known: list[int | None] = [None] * len(lines)  # what holds on every way there; None: no way leads there
    if lines:
        known[0] = 0
    todo = [0] * len(lines[:1])
    while todo:
        here = todo.pop()
        now = effects[here].after(known[here] or 0)
        for there in after[here]:
            before = known[there]
            both = now if before is None else now & before
            if both != before:
                known[there] = both
                todo.append(there)
    has_wgmma = any("GMMA" in line["op"] for line in lines)
    unset = 0
    for effect, before in zip(effects, known, strict=True):
        if before is not None:
            unset |= effect.reads & ~before
            unset |= effect.upper & ~(before >> ZERO) if has_wgmma else 0
    return [f"UR{i}" for i in range(unset.bit_length()) if unset >> i & 1]


@dataclass(frozen=True)
class _Effect:
    """What an instruction does with uniform registers: bit 4 is UR4.

    calls   it calls a function, which may set any register
    copies  the register whose value it writes, or URZ; None for a value that is not known
    sure    it has no predicate
    upper   registers to which it adds the upper half of a descriptor
    """

    reads: int
    writes: int
    calls: bool
    copies: int | None
    sure: bool
    upper: int

    def after(self, known: int) -> int:
        """What holds after it: registers that are written, and above bit ZERO those that are 0."""
        if self.calls:
            return (1 << 2 * ZERO) - 1
        zero = self.copies is not None and (self.copies == URZ or known >> ZERO + self.copies & 1)
        if not zero:
            known &= ~(self.writes << ZERO)
        elif self.sure:
            known |= self.writes << ZERO
        return known | self.writes


def _effect(line: Mapping[str, str]) -> _Effect:
    op, operands = line["op"], line["operands"].strip()
    reads, writes = _reads_and_writes(op, operands)
    copied = re.fullmatch(r"UR\d+, UR(Z|\d+)", operands) if op == "UMOV" else None
    copies = None if copied is None else URZ if copied[1] == "Z" else int(copied[1])
    added = UPPER_HALF.fullmatch(operands) if op == "UIADD3.X" else None
    upper = 0
    if added:
        word = int(added[2], 16) & 0xFFFFFFFF  # 2 bits of the swizzle, 14 of the stride
        upper = _registers(int(added[1]), 1) if word >> 30 and word & 0x3FFF and not word & 0x3FFFC000 else 0
    return _Effect(reads, writes, op.startswith("CALL"), copies, not line["predicate"], upper)


def _reads_and_writes(op: str, operands: str) -> tuple[int, int]:
    """The uniform registers that an instruction reads, and those that it writes."""
    reads = writes = 0
    parts = [part.strip() for part in operands.split(",")]
    leading = 0
    if not PREDICATES_ALONE.search(op):
        leading = next((i for i, part in enumerate(parts) if not re.fullmatch(r"U?P\w", part)), 0)
    first = re.fullmatch(r"UR(\d+)", parts[leading])
    if first and not FIRST_IS_READ.match(op):
        wide = re.search(r"\.(64|128|256)\b", op)
        writes = _registers(int(first[1]), int(wide[1]) // 32 if wide else 1 + (".WIDE" in op))
        del parts[leading]
    for kind, number in UNIFORM.findall(",".join(parts)):
        n = int(number)
        if kind == "gdesc[" and re.match(r"[HIQ]GMMA", op):  # two descriptors of 64 bits; A in registers has none
            reads |= _registers(n + 2, 2) if parts[1].startswith("R") else _registers(n, 4)
        else:
            reads |= _registers(n, 2 if kind or op == "UIADD3.64" else 1)
    return reads, writes


def _registers(first: int, count: int) -> int:
    return ((1 << count) - 1) << first


def _successors(lines: Sequence[Mapping[str, str]]) -> list[list[int]]:
    """The places of the instructions that may run after each."""
    at = {int(line["address"], 16): i for i, line in enumerate(lines)}
    last = [line["operands"].rpartition(",")[2].strip() for line in lines]
    targets = [at.get(int(word, 16)) if re.fullmatch("0x[0-9a-f]+", word) else None for word in last]
    joins: dict[str, set[int]] = {}  # where the threads that wait at BSYNC B0 go on together
    for line, target in zip(lines, targets, strict=True):
        if line["op"].startswith("BSSY") and target is not None:
            joins.setdefault(line["operands"].partition(",")[0], set()).add(target)
    after, indirect = list[list[int]](), list[int]()
    for i, (line, target) in enumerate(zip(lines, targets, strict=True)):
        op = line["op"].partition(".")[0]
        following = [i + 1] * (i + 1 < len(lines))
        jump = [] if target is None else [target]
        always = not line["predicate"]
        if op in ("BRA", "JMP"):
            after.append(jump if always and "," not in line["operands"] else jump + following)
        elif op in ENDS or op in INDIRECT:
            after.append([] if always else following)
            indirect += [i] * (op in INDIRECT)
        elif op == "BSYNC" and (ends := joins.get(line["operands"].strip(), set())) and i + 1 not in ends:
            after.append([*ends, *([] if always else following)])
        else:
            after.append(following + jump * (op == "CALL"))
    if indirect:
        known = {0}.union(*after)
        anywhere = [i for i in range(len(lines)) if i not in known]
        for i in indirect:
            after[i] += anywhere
    return after


# ---- Programs of CUDA C++, compiled by nvcc ------------------------------------------------------------------------


def kernels(source: Path, targets: Container[chips.Target] = TARGETS) -> tuple[Kernel, ...]:
    """Compile a program for these; a row for each instance of each kernel, `rung` being the kernel's plain name.

    Raises toolchain.Missing without nvcc or g++, build.BuildError with nvcc's words.
    """
    wanted = [target for target in TARGETS if target in targets]
    cubins = build.build(build.cubin(source, target) for target in wanted)
    return tuple(k for cubin, target in zip(cubins, wanted, strict=True) for k in _inspect(cubin, target))


def declared(source: Path) -> set[str]:
    """The plain names of the kernels that a program and its headers define."""
    return {
        name
        for file in build.local_files(source)
        for name, found in codes(file.read_text()).items()
        if any("__global__" in code.partition("{")[0] for code in found)
    }


def _inspect(cubin: Path, target: int) -> list[Kernel]:
    usage = tool("cuobjdump", "-res-usage", str(cubin))
    # Only kernels have parameters in constant bank 0; functions that were not inlined have none.
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:\d+ SHARED:(\d+) LOCAL:\d+ CONSTANT\[0\]", usage)
    names = demangled([name for name, _, _ in found])
    threads = _most_threads(cubin)
    code = functions(cubin.read_bytes())
    ops = dict(zip(code, opcodes(code.values(), target), strict=True))
    rows = []
    for mangled, registers, shared in sorted(found, key=lambda each: names[each[0]]):
        kernel = names[mangled]
        if re.match(r"(cub|thrust)::", kernel):  # a peer's
            continue
        own = max(0, int(shared) - RESERVED) if target >= 90 else int(shared)
        rows.append(
            row(
                re.split("<", kernel)[0].rpartition("::")[2],
                kernel,
                target,
                ops[mangled],
                warps=-(-threads.get(mangled, THREADS) // 32),
                registers=int(registers),
                shared=own,
            )
        )
    return rows


def _most_threads(cubin: Path) -> dict[str, int]:
    """The __launch_bounds__ of each kernel that has them."""
    found = {}
    for part in re.split(r"^\.nv\.info\.", tool("cuobjdump", "-elf", str(cubin)), flags=re.MULTILINE)[1:]:
        if most := re.search(r"EIATTR_MAX_THREADS\s+Format:\s+\S+\s+Value:\s+0x(\w+) 0x(\w+) 0x(\w+)", part):
            x, y, z = (int(n, 16) for n in most.groups())
            found[part.split()[0]] = x * y * z
    return found


def demangled(names: list[str]) -> dict[str, str]:
    """Mangled -> `foo_kernel<float, 4>`: no return type, no parameters, no anonymous namespace."""
    words = subprocess.run(["c++filt", *names], capture_output=True, text=True, check=True).stdout.splitlines()
    plain = {}
    for mangled, said in zip(names, words, strict=True):
        text = said.replace("(anonymous namespace)::", "").removeprefix("void ")
        depth, end = 0, len(text)
        for at, letter in enumerate(text):
            depth += (letter == "<") - (letter == ">")
            if letter == "(" and depth == 0:
                end = at
                break
        plain[mangled] = text[:end]
    return plain


def broken_claims(name: str, claims: Mapping[str, Sequence[str]], found: Iterable[Kernel]) -> list[str]:
    """What a lesson claims of its rungs ({rung: claims}) and the machine code does not show.

    "no spills" is meant of every kernel that the rung launches, "row_kernel: no spills" of that one. A claim that is
    not in CLAIMS is broken, and the line lists those that are. So is a kernel whose wgmma are serialized, unless its
    rung claims that.
    """
    broken, everything = [], list(found)
    broken += [
        f"{name}.{k.rung}: ptxas serializes the wgmma of {k.kernel} ({k.waits} waits for {k.wgmma}): use a smaller "
        f"tile or more warps, or claim {f'{k.kernel}: {SERIALIZED}'!r}"
        for k in everything
        if serialized(k) and not {SERIALIZED, f"{k.kernel}: {SERIALIZED}"} & {*claims.get(k.rung, ())}
    ]
    for rung, wanted in claims.items():
        for claim in wanted:
            only, _, what = claim.rpartition(": ")
            if (holds := predicate(what)) is None:
                known = f"{', '.join(map(repr, CLAIMS))}, or a number of {', '.join(COUNTED)}"
                broken.append(f"{name}.{rung} claims {what!r}; a claim is one of {known}")
                continue
            kernels = [k for k in everything if k.rung == rung and only in ("", k.kernel)]
            broken += [f"{name}.{rung} launches no {only or 'kernel'}"] * (not kernels)
            broken += [
                f"{name}.{rung}: {k.kernel} for {chips.label(k.target)} lacks {what!r}: {k}"
                for k in kernels
                if k.target in CLAIMED and not holds(k)
            ]
    return broken
