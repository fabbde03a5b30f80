"""What nvcc made of a program's kernels, for any GPU and without one: the same rows as Triton's kernels have.

A kernel that names no __launch_bounds__ is taken to have blocks of 256 threads, as most of the course's have; shared
memory that the launch asks for is not known here, so an occupancy says what registers and static shared memory allow.
"""

import re
import subprocess
from collections.abc import Container
from pathlib import Path

from lessonkit.base.cpp_text import codes
from lessonkit.cuda import build
from lessonkit.modes import compiled

TARGETS = (80, 90)  # 90 is sm_90a
THREADS = 256
RESERVED = 1024  # bytes of each block's shared memory that the system takes, from sm_90 on counted in the cubin


def kernels(source: Path, targets: Container[int] = TARGETS) -> tuple[compiled.Kernel, ...]:
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


def _inspect(cubin: Path, target: int) -> list[compiled.Kernel]:
    usage = compiled.tool("cuobjdump", "-res-usage", str(cubin))
    # Only kernels have parameters in constant bank 0; functions that were not inlined have none.
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:\d+ SHARED:(\d+) LOCAL:\d+ CONSTANT\[0\]", usage)
    names = demangled([name for name, _, _ in found])
    threads = _most_threads(cubin)
    code = compiled.functions(cubin.read_bytes())
    ops = dict(zip(code, compiled.opcodes(code.values(), target), strict=True))
    rows = []
    for mangled, registers, shared in sorted(found, key=lambda each: names[each[0]]):
        kernel = names[mangled]
        if re.match(r"(cub|thrust)::", kernel):  # a peer's
            continue
        own = max(0, int(shared) - RESERVED) if target >= 90 else int(shared)
        rows.append(
            compiled.row(
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
    for part in re.split(r"^\.nv\.info\.", compiled.tool("cuobjdump", "-elf", str(cubin)), flags=re.MULTILINE)[1:]:
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
