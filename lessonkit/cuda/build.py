"""Build a program of cuda_src in any of the forms the course needs, each once for what it is made of.

A built file is named by a hash of its source, of every file that it includes, of the command and of the versions of the
compilers and libraries. So nothing is ever out of date: what is there is right, what is missing ninja builds, several
at a time. The hash holds no folders: another clone or virtual environment finds the same files. Two processes that want
the same file wait for each other.
"""

import hashlib
import platform
import re
import shlex
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lessonkit.base import cpp_text, eviction, files
from lessonkit.base.errors import BuildError
from lessonkit.base.files import ROOT, write_atomically
from lessonkit.cuda import rewrite, toolchain

SOURCES = ROOT / "cuda_src"
INCLUDE = SOURCES / "include"  # what programs share; beside a program lie headers of its own
EMULATOR = SOURCES / "emulator"
DEFINE = "-DCOURSE_EXTENSION"
# ThreadSanitizer's compiler pass makes a call of every access; the emulator has its own functions behind those calls.
HOOKS = (
    *("-fsanitize=thread", "--param=tsan-distinguish-volatile=1", "--param=tsan-instrument-func-entry-exit=0"),
    *("-O1", "-g1", "-gdwarf-4"),  # binutils' addr2line names wrong files in DWARF 5 after #line
)
# A mutant runs once, so what its compiler takes is what it costs, and nobody reads in which line its fault is.
QUICK = (*HOOKS[:3], "-O0")
MUTANTS = files.CACHE / "lessonkit_mutants"  # executed, so not where other users may write
# {a mutant's program: the (program, rung) of every mutant of its lesson}, which are built as one.
TOGETHER: dict[Path, tuple[tuple[Path, str], ...]] = {}
# Null pointers and the sizes of objects are AddressSanitizer's too, and there is no vptr: a fifth of compiling time.
SANITIZERS = (
    *("-fsanitize=address,undefined", "-fno-sanitize=null,object-size,vptr", "-fno-sanitize-recover=undefined"),
    *("-O0", "-g1"),
)
SHARED = ("course.cuh", "binding.h")  # headers without kernels: nothing in them is to be rewritten
EMULATED = ("-std=c++20", "-fPIC", "-DCOURSE_EMULATED", f"-I{EMULATOR}", f"-I{INCLUDE}", "-Wno-unknown-pragmas")
PREFIX = "#include <course.cuh>\n"  # compiled once, so that a program takes a second


# Absolute folders in a command say where a file is, not what it is.
_FOLDERS = re.compile(r"(?<=^-I)/.*|/(?:[^/\s,:]+/)+")


@dataclass(frozen=True)
class Product:
    """One file to build. Its commands write `$out` in a folder of its own, named by all that goes into it."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    reads: tuple[Path, ...] = ()  # what the commands read beside the texts
    texts: tuple[tuple[str, str], ...] = ()  # (file name, text) to be put into the folder first: `$folder/name`
    after: tuple["Product", ...] = ()  # built before
    versions: tuple[str, ...] = ()  # of what the commands read that is not in `reads`: libraries, a compiler's compiler

    @cached_property
    def folder(self) -> Path:
        commands = [[_FOLDERS.sub("", word) for word in command] for command in self.commands]
        after = [p.folder.name for p in self.after]
        digest = hashlib.sha256(repr((commands, self.texts, after, self.versions)).encode())
        for compiler in sorted({command[0] for command in self.commands}):
            digest.update(toolchain.version(compiler).encode())
        for path in self.reads:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return files.CACHE / f"{self.name.rpartition('.')[0]}-{digest.hexdigest()[:16]}"

    @property
    def path(self) -> Path:
        return self.folder / self.name


def local_files(source: Path) -> list[Path]:
    """The program and the headers of the course that it includes, directly or not."""
    return cpp_text.local_files(source, INCLUDE)


def _shown(path: Path) -> str:
    """What errors and faults call a file: the same in every clone."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def binding(level: str = "-O0") -> Product:
    """The Python module that every extension is linked with; for the emulator as fast as it compiles."""
    toolchain.need("g++", "Python.h")
    import pybind11

    includes = (f"-I{INCLUDE}", f"-I{sysconfig.get_path('include')}", f"-I{pybind11.get_include()}")
    compiled = ("-std=c++20", level, "-fPIC", "-fvisibility=hidden", *includes)
    source = SOURCES / "binding.cpp"
    command = (toolchain.find_gxx(), *compiled, "-c", str(source), "-o", "$out")
    versions = (f"Python {platform.python_version()} {sysconfig.get_config_var('SOABI')}", pybind11.__version__)
    return Product("binding.o", (command,), (source, INCLUDE / "binding.h"), versions=versions)


def runtime(sanitized: bool = False) -> Product:
    """The emulator itself: a library that every emulated program shares."""
    toolchain.need("g++")
    flags = SANITIZERS if sanitized else ("-O2",)
    gxx, reads = toolchain.find_gxx(), tuple(emulator_files())
    compiled = ("-std=c++20", *flags, "-fPIC", f"-I{EMULATOR}")
    prefix = _prefix(compiled, "#include <runtime/machine.h>\n#include <algorithm>\n")
    compile_part = (gxx, *compiled, "-include", str(prefix.folder / "prefix.h"), "-o", "$out", "-c")
    parts = tuple(
        Product(f"{file.stem}.o", ((*compile_part, str(file)),), reads, after=(prefix,))
        for file in sorted((EMULATOR / "runtime").glob("*.cpp"))
    )
    link = (gxx, *flags, "-shared", "-Wl,-Bsymbolic", *(str(part.path) for part in parts), "-o", "$out", "-ldl")
    return Product("libemu.so", (link,), after=parts)


def emulator_files() -> list[Path]:
    return sorted(p for p in EMULATOR.rglob("*") if p.is_file() and p.suffix != ".md")


def _prefix(flags: tuple[str, ...], text: str = PREFIX) -> Product:
    """A header that is compiled once for all files that begin with it."""
    reads = (*emulator_files(), *(INCLUDE / name for name in SHARED))
    compile_header = (toolchain.find_gxx(), *flags, "-x", "c++-header", "$folder/prefix.h", "-o", "$out")
    return Product("prefix.h.gch", (compile_header,), reads, (("prefix.h", text),))


def _bound_alone(text: str, launcher: str) -> str:
    """The program without the `bind` lines of other launchers, whose templates are then not instantiated.

    A line that binds several, `bind_all<float>(m, "float32")`, names the end of theirs; one that is called for several
    types, `bind(m, ("add_" + type).c_str(), ...)`, the beginning.
    """

    def keep(found: re.Match[str]) -> str:
        bound = launcher.startswith(found[1]) if found[2] else launcher.endswith(found[1])
        return found[0] if bound else ""

    return re.sub(r'^ *bind\w*(?:<\w+>)?\(m, \(?"(\w+)"( \+)?.*\);$', keep, text, flags=re.MULTILINE)


def _emulated(
    source: Path,
    name: str,
    flags: tuple[str, ...],
    link: tuple[str, ...],
    libraries: tuple[Product, ...],
    launcher: str = "",
) -> Product:
    toolchain.need("g++")
    files = [path for path in local_files(source) if path.name not in SHARED]
    wanted = {path: path.read_text() for path in files}
    if launcher:
        wanted[source] = _bound_alone(wanted[source], launcher)
    texts = tuple(
        (path.name if path != source else f"{source.stem}.cpp", rewrite.rewrite(text, _shown(path)))
        for path, text in wanted.items()
    )
    return _from_texts(name, texts, f"{source.stem}.cpp", flags, link, libraries)


def _from_texts(
    name: str,
    texts: tuple[tuple[str, str], ...],
    main: str,
    flags: tuple[str, ...],
    link: tuple[str, ...],
    libraries: tuple[Product, ...],
) -> Product:
    """Texts that g++ can read, compiled and linked; `main` is the one that includes the others."""
    gxx, prefix = toolchain.find_gxx(), _prefix(flags)
    begin = ("-include", str(prefix.folder / "prefix.h"))
    compiled = (gxx, *flags, *begin, "-c", f"$folder/{main}", "-o", "$folder/program.o")
    linked = (gxx, *link, "$folder/program.o", *(str(p.path) for p in libraries), "-o", "$out")
    linked = (*linked, f"-Wl,-rpath,{libraries[0].folder}")
    reads = (*(INCLUDE / name for name in SHARED), *emulator_files())
    return Product(name, (compiled, linked), reads, texts, (*libraries, prefix))


def emulated_extension(source: Path, launcher: str = "") -> Product:
    """A Python module of the program's launchers, in the emulator; or of this one alone, built quickly for one run."""
    flags = (*EMULATED, *(QUICK if launcher else HOOKS), DEFINE, "-fvisibility=hidden")
    return _emulated(source, f"{source.stem}.so", flags, ("-shared",), (runtime(), binding()), launcher)


def emulated_mutants(name: str, mutants: Iterable[tuple[Path, str]]) -> Product:
    """One Python module of variants of a program, from each (program, launcher) its launcher as m0_add, m1_add, ...

    Most of what g++ does for a program it does for the C++ library and the emulator, so all together take little more
    than one. Each has a namespace of its own. Raises RewriteError.
    """
    toolchain.need("g++")
    texts = ["#undef COURSE_MODULE\n#define COURSE_MODULE(m) void bind_own(course::Module& m)\n"]
    calls = []
    for i, (source, launcher) in enumerate(mutants):
        # What lies in the global namespace is included there, and no macro is left to the next variant.
        text = re.sub(
            r"^\s*#\s*include\s*<.*$", rf"}}\n\g<0>\nnamespace mutant_{i} {{", _in_one(source, launcher), flags=re.M
        )
        macros = dict.fromkeys(re.findall(r"^\s*#\s*define\s+(\w+)", text, re.MULTILINE))
        texts += [f"namespace mutant_{i} {{\n{text}\n}}\n", *(f"#undef {macro}\n" for macro in macros)]
        calls.append(f'    add("m{i}_", mutant_{i}::bind_own);\n')
    text = "".join([*texts, "void course_module(course::Module& m) {\n", _ADD, *calls, "}\n"])
    flags = (*EMULATED, *QUICK, DEFINE, "-fvisibility=hidden")
    return _from_texts(
        f"{name}.so", (("mutants.cpp", text),), "mutants.cpp", flags, ("-shared",), (runtime(), binding())
    )


_ADD = """    const auto add = [&](const char* prefix, void (*bind_own)(course::Module&)) {
        course::Module own;
        bind_own(own);
        for (const course::Function& f : own.functions) m.functions.push_back({prefix + f.name, f.types, f.call});
    };
"""


def _in_one(source: Path, launcher: str) -> str:
    """The program as g++ reads it, with one launcher bound and its own headers in the place where they are included."""
    files = {path.name: path for path in local_files(source)}
    done = {*SHARED}

    def text(path: Path) -> str:
        done.add(path.name)
        lines = _bound_alone(path.read_text(), launcher) if path == source else path.read_text()
        lines = re.sub(r"^\s*#\s*pragma\s+once.*$", "", rewrite.rewrite(lines, _shown(path)), flags=re.MULTILINE)
        return re.sub(r'^\s*#\s*include\s+"([^"]+)".*$', included, lines, flags=re.MULTILINE)

    def included(found: re.Match[str]) -> str:
        name = Path(found[1]).name
        if name in done:
            return ""
        return text(files[name]) if name in files else found[0]

    return text(source)


def emulated_program(source: Path, sanitized: bool = False) -> Product:
    """The program itself, its kernels watched by the emulator, or by AddressSanitizer and UBSan."""
    flags, link = (SANITIZERS, SANITIZERS) if sanitized else (HOOKS, ())
    return _emulated(source, f"{source.stem}.run", (*EMULATED, *flags), link, (runtime(sanitized),))


def _nvcc(source: Path, name: str, flags: tuple[str, ...], after: tuple[Product, ...] = (), target: int = 0) -> Product:
    toolchain.need("nvcc", "g++")  # which nvcc calls
    reads = local_files(source)
    if "ThunderKittens" in toolchain.comment_line(source, "Needs"):
        flags = (*flags, *toolchain.kittens_flags(target))
        reads += toolchain.kittens_files()
    nvcc = toolchain.find_nvcc()
    command = (nvcc, "-std=c++20", "-O3", "-lineinfo", f"-I{INCLUDE}", *flags, str(source.resolve()), "-o", "$out")
    return Product(name, (command,), tuple(reads), after=after, versions=(toolchain.version(toolchain.find_gxx()),))


def cubin(source: Path, target: int) -> Product:
    """Machine code for one architecture: no GPU and no linker needed."""
    flags = "-cubin", f"-arch={toolchain.architecture(target)}"
    return _nvcc(source, f"{source.stem}.sm{target}.cubin", flags, target=target)


def _linked(source: Path) -> tuple[str, ...]:
    libraries = toolchain.link_flags(toolchain.find_nvcc(), toolchain.comment_line(source, "Link"))
    machine = toolchain.architecture()  # -arch alone would add PTX for compute_90, which has no wgmma
    return f"-gencode=arch={machine.replace('sm', 'compute')},code={machine}", *libraries


def extension(source: Path) -> Product:
    """A Python module of the program's launchers, for the present GPU."""
    door = binding("-O2")
    flags = ("-shared", "-Xcompiler=-fPIC,-fvisibility=hidden", DEFINE, *_linked(source), str(door.path))
    return _nvcc(source, f"{source.stem}.so", flags, (door,))


def program(source: Path) -> Product:
    """The program itself, for the present GPU."""
    return _nvcc(source, f"{source.stem}.run", _linked(source))


def build(products: Iterable[Product]) -> list[Path]:
    """Build what is not there yet, several at a time. Raises BuildError with the words of each that fails."""
    toolchain.need("ninja")
    wanted = list(dict.fromkeys(products))
    if before := [first for product in wanted for first in product.after]:
        build(before)
    files.need_private(*(product.folder for product in wanted))
    for product in wanted:
        eviction.used(product.folder)
    said = ""
    with _locked(p for p in wanted if not p.path.exists()) as missing:
        if missing:
            said = _ninja(missing)
            eviction.evict(files.CACHE)
    failed = [p for p in wanted if not p.path.exists()]
    if failed:
        raise BuildError("\n".join(f"{p.name}:\n{(_words(p) or said)[-4000:]}" for p in failed))
    return [p.path for p in wanted]


@contextmanager
def _locked(products: Iterable[Product]) -> Iterator[list[Product]]:
    """Hold the locks of these products, taken in one order by all; yield those that nobody has built meanwhile."""
    ordered = sorted(products, key=lambda p: p.folder)
    with ExitStack() as held:
        for product in ordered:
            product.folder.mkdir(mode=0o700, exist_ok=True)  # another process may have evicted it
            lock = held.enter_context((product.folder / "lock").open("w"))
            files.lock(lock)
        yield [p for p in ordered if not p.path.exists()]


def _words(product: Product) -> str:
    """What the compilers said; nothing if they were not even started, or ended by a signal."""
    words = product.folder / "words.txt"
    return words.read_text() if words.exists() else ""


def _ninja(products: list[Product]) -> str:
    """Build these, and return ninja's own words."""
    lines = ["rule run", "  command = $do"]
    for product in products:
        for name, text in product.texts:
            write_atomically(product.folder / name, text)
        words = shlex.quote(str(product.folder / "words.txt"))
        part, whole = shlex.quote(f"{product.path}.part"), shlex.quote(str(product.path))
        do = f"( {_shell(product)} ) > {words} 2>&1 && mv {part} {whole}"
        lines += [f"build {_escaped(product.path)}: run", f"  do = {do.replace('$', '$$')}"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "build.ninja").write_text("\n".join(lines) + "\n")
        command = [toolchain.find_ninja(), "-C", folder, "-k", "0", "--quiet"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return done.stdout.decode(errors="replace")


def _shell(product: Product) -> str:
    """The commands one after the other, with what `$out` and `$folder` stand for."""
    places = {"$out": f"{product.path}.part", "$folder": str(product.folder)}

    def filled(word: str) -> str:
        return re.sub(r"\$(?:out|folder)", lambda found: places[found[0]], word)

    return " && ".join(shlex.join(map(filled, command)) for command in product.commands)


def _escaped(path: Path) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))
