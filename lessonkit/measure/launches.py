"""What the GPU is given by one call of a rung: machine code, grids and arguments, as one hash and without a GPU.

In a process of the `compiled` mode (see compile_server) tensors have shapes but no data, and a launch only compiles.
There a call is recorded: every operator of PyTorch that is more than a view, and every kernel's machine code for sm_90,
with its grid, warps, shared memory, scalars and the layouts of its tensors. Two versions of a rung with the same
record and the same compiler give the GPU the same work, whatever their source looks like. The inputs and the work are
recorded too.

A call of an operator of course_ops is recorded likewise. Its launcher runs without PyTorch's dispatcher, so that the
operators of PyTorch inside it are seen (cuBLAS is aten.mm). Only what gives the GPU something to do counts, so
allocations do not. What the launcher does for CUDA tensors alone is not seen.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from lessonkit.base import cpp_text
from lessonkit.base.files import ROOT
from lessonkit.cuda import build, sass, toolchain
from lessonkit.cuda.extension import Extension
from lessonkit.lesson import shape_name
from lessonkit.measure import fingerprint, operator_rows
from lessonkit.measure.operator_rows import Case, Key
from lessonkit.modes import compiled
from lessonkit.modes.compile_server import call_in_compiler

TARGET = 90
ANSWER = 1  # stands for what a launcher answers, which is not known here; the code that computes it is recorded

ALLOCATES = re.compile(r"aten\.(?:new_)?empty")

Event = tuple[Any, ...]
_log = logging.getLogger(__name__)


def marks(name: str, wanted: Sequence[tuple[str, bool, str]]) -> list[str]:
    """The records of contenders of a lesson, each (label, is it a peer, shape as in its row).

    One is "triton-3.7.1=0123456789ab", with the compiler that it is of. It is "" if the call cannot be recorded here: a
    package or a compiler is missing, or the host needs a tensor's data.
    """
    return list(call_in_compiler(__name__, "_marks_here", name, list(wanted)))


def _marks_here(name: str, wanted: Sequence[tuple[str, bool, str]]) -> list[str]:
    """As `marks`, in a process whose mode is `compiled`."""
    with recording() as events:
        lesson = import_module(name).LESSON
        shapes = {shape_name(shape): shape for shape in lesson.benches}
        rungs = {rung.__name__: rung for rung in lesson.rungs}
        found = []
        for label, peer, shape in wanted:
            fn = (lesson.peers if peer else rungs).get(label)
            found.append(_mark(lesson, fn, shapes[shape], events) if fn and shape in shapes else "")
    return found


def _mark(lesson: Any, fn: Callable[..., Any], shape: dict[str, Any], events: list[Event]) -> str:
    events.clear()
    try:
        work = lesson.work(dtype=lesson.bench_dtype, **shape)
        args = lesson.inputs(dtype=lesson.bench_dtype, **shape)
        events.append(("work", work.bytes, work.flops, *map(_described, args)))
        fn(*args)
    except Exception as error:  # whatever stops it here, what the GPU would be given is not known
        _log.info("%s at %s: %s", getattr(fn, "__name__", fn), shape_name(shape), str(error)[:200])
        return ""
    return _named(events)


def marks_of_operators(wanted: Sequence[Key]) -> list[str]:
    """The records of calls of course_ops, each the key of a case; "" if the call cannot be recorded, as in `marks`.

    Inputs are no part of it, but what kernels are specialised on: the row's fingerprint names them.
    """
    names = list(dict.fromkeys(key[:2] for key in wanted))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # each thread has a process that compiles
        asked = [[key for key in wanted if key[:2] == name] for name in names]
        found = pool.map(lambda keys: call_in_compiler(__name__, "_operators_here", keys), asked)
        known = {
            key: mark for keys, marks in zip(asked, found, strict=True) for key, mark in zip(keys, marks, strict=True)
        }
    return [known[key] for key in wanted]


def _operators_here(wanted: Sequence[Sequence[str]]) -> list[str]:
    """As `marks_of_operators`, in a process whose mode is `compiled`."""
    cases = operator_rows.by_key()
    with recording() as events, import_module("course_ops.testing").launchers():
        return [_mark_of(case, events) if (case := cases.get((*key,))) else "" for key in wanted]  # type: ignore[arg-type]


def _mark_of(case: Case, events: list[Event]) -> str:
    try:
        args = case.inputs()
        case.operator.call(*args)  # makes what later calls find, as a counter at 0: those are timed
        events.clear()
        case.operator.call(*args)
    except Exception as error:  # whatever stops it here, what the GPU would be given is not known
        _log.info("%s: %s", " ".join(case.key), str(error)[:200])
        return ""
    return _named([event for event in events if not ALLOCATES.match(event[0])])


def _named(events: Sequence[Event]) -> str:
    """The hash of what was recorded, behind the compilers that made it."""
    compilers = sorted({event[1] for event in events if event[0] in ("kernel", "launcher")}) or [_release("torch")]
    digest = hashlib.sha256("\n".join(map(repr, events)).encode()).hexdigest()[:16]
    return f"{'+'.join(compilers)}={digest}"


def compilers() -> list[str]:
    """What a mark made on this machine may begin with: triton-3.7.1, torch-2.13.0, nvcc-13.0.88."""
    return [_release("triton"), _release("torch"), f"nvcc-{toolchain.release()}"]


def _release(package: str) -> str:
    return f"{package}-{import_module(package).__version__.partition('+')[0]}"


@contextmanager
def recording() -> Iterator[list[Event]]:
    """Inside, whatever is launched or computed is compiled and recorded only. In a process of the `compiled` mode."""
    import torch
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    events: list[Event] = []
    launch, tune = JITFunction.run, Autotuner.run

    def launched(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = launch(self, *args, grid=grid, warmup=True, **options)
        named = {p.name: p.default for p in self.params if p.has_default} | dict(
            zip(self.arg_names, args, strict=False)
        )
        named |= {name: value for name, value in options.items() if name in self.arg_names}
        meta = made.metadata
        events.append(
            (
                *("kernel", _release("triton"), sass.normalised(made.asm["cubin"])),
                tuple(grid(named) if callable(grid) else grid),
                *(meta.num_warps, meta.shared, meta.num_ctas, getattr(meta, "launch_pdl", False)),
                *(_described(named.get(p.name)) for p in self.params if not p.is_constexpr),
            )
        )
        return made

    def tuned(self: Any, *args: Any, **options: Any) -> Any:
        named = dict(zip(self.arg_names, args, strict=False)) | options
        hooks = (self.early_config_prune, self.perf_model, *(c.pre_hook for c in self.configs))
        code = [fingerprint.source(ROOT, h.__module__, h.__qualname__) for h in dict.fromkeys(hooks) if h]
        key = [(k, _described(named.get(k))) for k in self.keys]
        events.append(("tuner", [str(c) for c in self.configs], key, self.configs_top_k, code))
        return tune(self, *args, **options)

    def bound(self: Any, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any) -> int:
            events.append(("launcher", *_launcher(self.source, name), *map(_described, args)))
            return ANSWER

        return call

    def compile_(function: Any = None, **options: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            events.append(("torch.compile", sorted(options.items())))
            return function(*args, **more)

        return call if function else lambda f: compile_(f, **options)

    with (
        compiled.compiling(TARGET),
        mock.patch.object(JITFunction, "run", launched),
        mock.patch.object(Autotuner, "run", tuned),
        mock.patch.object(Extension, "__getattr__", bound),
        mock.patch.object(torch, "compile", compile_),
        _operators(events),
    ):
        yield events


def _operators(events: list[Event]) -> Any:
    """A mode in which PyTorch's operators are recorded; views are not, for they give the GPU nothing to do."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns):
                more = {k: v for k, v in (kwargs or {}).items() if k not in ("device", "pin_memory", "layout")}
                events.append((str(func), _described(args), _described(more)))
            return func(*args, **(kwargs or {}))

    return Operators()


def _described(value: Any) -> Any:
    """An argument without its data: what a kernel is specialised on, and what a reader could tell apart."""
    import torch

    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), tuple(value.stride())
    if isinstance(value, tuple | list):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((key, _described(item)) for key, item in value.items())
    if isinstance(value, bool | int | float | str | torch.dtype) or value is None:
        return repr(value)
    if hasattr(value, "block_shape"):  # a descriptor for TMA
        parts = (getattr(value, name, None) for name in ("base", "shape", "strides", "block_shape", "padding"))
        return tuple(map(_described, parts))
    return type(value).__name__


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _launcher(program: Path, name: str) -> tuple[str, str, str]:
    """nvcc's version, the host code of a launcher, and the machine code of the kernels that it names, as hashes."""
    files = build.local_files(program)
    known = {defined for file in files for defined in cpp_text.codes(file.read_text())}
    # A macro may write softmax_bfloat16 around the template softmax: then the template is what is launched.
    stems = [d for d in known if name == d or name.startswith(f"{d}_")]
    found = cpp_text.reached(files, {max(stems, key=len)} if stems else known)
    host = {code for code in found.values() if not re.search(r"\b__(?:global|device)__", code)}
    kernels = {kernel for kernel, code in found.items() if "__global__" in code}
    code = _cubin(build.build([build.cubin(program, TARGET)])[0])
    used = sorted(text for kernel, text in code if kernel in kernels)
    return f"nvcc-{toolchain.release()}", _hash("\n".join(sorted(host))), _hash("\n".join(used))


@cache
def _cubin(path: Path) -> list[tuple[str, str]]:
    """(a kernel's plain name, the hash of its machine code and of the program's constants) of each instance."""
    binary = path.read_bytes()
    constants = [
        content.hex() for name, content in sass.sections(binary) if re.match(r"\.nv\.(constant[1-9]|global)", name)
    ]
    found = sass.functions(binary)
    names = sass.demangled(list(found))
    return [
        (re.split("<", names[mangled])[0].rpartition("::")[2], _hash("\n".join([code.hex(), *sorted(constants)])))
        for mangled, code in found.items()
    ]


def shown_equal(recorded: str, now: str) -> bool:
    """Whether the record of a row has the same hash as today's for the same compiler. Several stand in one cell."""
    with suppress(ValueError):
        version, digest = now.split("=")
        return (version, digest) in {tuple(each.split("=")) for each in recorded.split()}
    return False
