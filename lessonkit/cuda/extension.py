"""A program's launchers as functions of tensors: built by nvcc for the GPU that is here, else emulated and watched."""

import ctypes
import importlib.machinery
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

from lessonkit.base import device, traffic
from lessonkit.base.errors import BuildError, Fault, Unsupported
from lessonkit.cuda import build, rewrite, toolchain
from lessonkit.cuda.arena import apart, raw_argument, span

import torch


class Extension:
    """The launchers of one .cu, built when the first is called: `kernels.add(x, y, z, n)`.

    A tensor becomes its address (None: a null pointer), a number stays, and the current stream comes last. Who calls
    has checked the tensors (see `expect`): the launcher trusts its addresses.
    """

    def __init__(self, source: Path) -> None:
        self.source = source

    def __repr__(self) -> str:
        return f"cuda.extension({self.source.name})"

    def lacks(self) -> str:
        """The one line that says why this machine cannot run the launchers, or an empty string."""
        needs = toolchain.comment_line(self.source, "Needs")
        return toolchain.lacks(*needs, *(("nvcc",) if device.HAS_GPU else ()), "g++", "Python.h", "ninja")

    def product(self) -> build.Product:
        return build.extension(self.source) if device.HAS_GPU else build.emulated_extension(self.source)

    @cached_property
    def module(self) -> Any:
        return _load(self.product())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        if build.MUTANTS in self.source.parents and not device.HAS_GPU:  # few of its launchers are ever called
            function = _of_a_mutant(self.source, name)
        else:
            function = getattr(self.module, name, None)
        if function is None and not device.HAS_GPU and re.search(rf'"{name}"', self.source.read_text()):
            raise Unsupported(f"{name} is not emulated: it needs a GPU")
        if function is None:
            raise AttributeError(f"{self.source.name} binds no {name!r}: add it to COURSE_MODULE")
        call = self._on_gpu(function) if device.HAS_GPU else self._emulated(name, function)
        self.__dict__[name] = call  # found at once the next time
        return call

    def _on_gpu(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            return function(*map(raw_argument, args), torch.cuda.current_stream().cuda_stream)

        return call

    def _emulated(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        emulator = _emulator(build.build([build.runtime()])[0])
        parameters = re.search(rf"\b{name}\(([^)]*)\)\s*\{{", self.source.read_text())
        names = [words.split()[-1].lstrip("*&") for words in parameters[1].split(",")] if parameters else []

        def call(*args: Any) -> Any:
            emulator.emu_begin()
            with apart(args) as raw:
                for i, tensor in enumerate(args):
                    if isinstance(tensor, torch.Tensor) and tensor.numel():
                        known = names[i] if i < len(names) else f"argument {i}"
                        emulator.emu_register(raw[i], span(tensor), _describe(known, tensor).encode(), 1)
                try:
                    return function(*raw, 0)
                except RuntimeError as error:
                    kind, text = emulator.emu_fault_kind().decode(), emulator.emu_fault_text().decode()
                    if str(error) != f"{kind}: {text}":
                        raise
                    raise Fault(kind, text) from None
                finally:
                    traffic.count(json.loads(emulator.emu_end()))

        return call


def extension(file: str) -> Extension:
    """The launchers of the .cu beside a lesson's file: `kernels = cuda.extension(__file__)`."""
    return Extension(Path(file).with_suffix(".cu").resolve())


@contextmanager
def together(blocks: int = 7) -> Iterator[None]:
    """Emulated, blocks run one after the other unless told otherwise: here several at once, so that some must wait."""
    before = os.environ.get("COURSE_EMU_BLOCKS")
    os.environ["COURSE_EMU_BLOCKS"] = str(blocks)
    try:
        yield
    finally:
        del os.environ["COURSE_EMU_BLOCKS"]
        if before is not None:
            os.environ["COURSE_EMU_BLOCKS"] = before


def _load(product: build.Product) -> Any:
    (path,) = build.build([product])
    name = f"{path.parent.name}.kernels"  # its own: pybind11 hands out one module a name
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _of_a_mutant(source: Path, name: str) -> Callable[..., Any] | None:
    """The launcher, from one build of all mutants of the lesson; if that does not compile, from a build of its own.

    One that is named after the mutant's rung (the same or with a type behind it) stands for those of the others' rungs.
    """
    together = build.TOGETHER.get(source, ())
    rung = dict(together).get(source, "")
    own = rung and (name == rung or name.startswith(f"{rung}_"))
    launchers = tuple((program, other + name.removeprefix(rung) if own else name) for program, other in together)
    if module := _all_mutants(launchers):
        at = launchers.index((source, name))
        if function := getattr(module, f"m{at}_{name}", None):
            return cast(Callable[..., Any], function)
    return getattr(_load(build.emulated_extension(source, name)), name, None)


@cache
def _all_mutants(launchers: tuple[tuple[Path, str], ...]) -> Any:
    """Their module, or None: one of them does not compile, or there are none."""
    with suppress(BuildError, rewrite.RewriteError):
        return _load(build.emulated_mutants("mutants", launchers)) if launchers else None


def _describe(name: str, tensor: torch.Tensor) -> str:
    return f"{name} [{' x '.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')}]"


def _emulator(path: Path) -> ctypes.CDLL:
    """The library that the extensions are linked with: the same one, since it has the same path."""
    library = ctypes.CDLL(str(path))
    library.emu_register.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_int]
    for name in ("emu_end", "emu_fault_kind", "emu_fault_text"):
        getattr(library, name).restype = ctypes.c_char_p
    return library
