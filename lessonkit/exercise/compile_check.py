"""Compile an answer whose values are right: the interpreter takes more Python than the compiler does.

While an answer is graded its launches are written down. A process of the `compiled` mode then compiles each kernel
for every target with the same arguments: tensors without data, the numbers, the constants. nvcc compiles CUDA C++.
"""

import hashlib
import inspect
import json
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lessonkit.base import chips, device, eviction, files
from lessonkit.base.errors import BuildError, Rejected
from lessonkit.base.words import said
from lessonkit.cuda import build as programs
from lessonkit.cuda import toolchain
from lessonkit.exercise.source import Source, build
from lessonkit.judge.sentences import told
from lessonkit.modes.compile_server import call_in_compiler
from lessonkit.modes.compiled import compiling

import torch

TARGETS = (80, 90, 100)


@dataclass(frozen=True)
class Launch:
    """A launch as another process can repeat it. given: by the argument's name, as `_written` says."""

    kernel: str
    given: dict[str, list[Any]]

    @property
    def kind(self) -> str:
        """Launches of one kind take the same branches: only sizes, strides and dtypes differ."""
        flags = {name: value for name, (what, *value) in self.given.items() if what in ("bool", "str", "NoneType")}
        return f"{self.kernel} {sorted(flags.items())}"


@contextmanager
def recorded() -> Iterator[dict[str, Launch]]:
    """Write down the last launch of each kind inside. Where nothing is interpreted there are none."""
    launches: dict[str, Launch] = {}
    if not device.INTERPRETED:
        yield launches
        return
    from triton.runtime import interpreter

    native = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **options: Any) -> Any:
        given = dict(zip(self.arg_names, args, strict=False)) | options
        launch = Launch(self.fn.__name__, {name: _written(value) for name, value in given.items()})
        launches[launch.kind] = launch
        return native(self, *args, **options)

    interpreter.GridExecutor.__call__ = call
    try:
        yield launches
    finally:
        interpreter.GridExecutor.__call__ = native


def _written(value: Any) -> list[Any]:
    """An argument as JSON: its kind, then what makes it again."""
    from triton import language as tl

    value = value.value if isinstance(value, tl.constexpr) else value
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype).removeprefix("torch."), [*value.shape], [*value.stride()]]
    if isinstance(value, tl.dtype):
        return ["dtype", value.name]
    if isinstance(value, bool | int | float | str | type(None)):
        return [type(value).__name__, value]
    return ["unknown", type(value).__name__]


def _again(kind: str, *parts: Any) -> Any:
    """The argument that `_written` wrote."""
    from triton import language as tl

    if kind == "tensor":
        dtype, shape, stride = parts
        return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="meta")
    if kind == "dtype":
        return next(known for known in vars(tl).values() if isinstance(known, tl.dtype) and known.name == parts[0])
    if kind == "unknown":
        raise TypeError(f"an argument of type {parts[0]} cannot be handed to another process")
    return parts[0]


def compile_answer(source: Source, answer: str, launches: Sequence[Launch], targets: Sequence[int] = TARGETS) -> str:
    """Say for which targets an answer was compiled, or why it was not; "" where it has no kernel.

    Raises Rejected with the compiler's words and the learner's line.
    """
    if source.is_cuda:
        why = toolchain.lacks("nvcc", "g++", "ninja")
        if not why:
            _compile_program(source, answer, targets)
    elif not launches:
        return ""
    else:
        why = lacks_compiler()
        if not why:
            _compile_kernels(source, answer, launches, targets)
    if why:
        return said("right in values, not compiled here: {why}").format(why=told(why))
    return said("compiled for {targets}").format(targets=_listed(targets))


def lacks_compiler() -> str:
    """Why Triton does not compile for these targets here, or ""."""
    import triton

    try:
        path = Path(triton.knobs.nvidia.ptxas.path)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "" if path.exists() else f"Triton's package has no {path.name}"


def _listed(targets: Sequence[int]) -> str:
    return ", ".join(chips.label(target) for target in targets)


def _compile_program(source: Source, answer: str, targets: Sequence[int]) -> None:
    written = Path(str(build(source, answer).__file__)).with_suffix(".cu")
    try:
        programs.build([programs.cubin(written, target) for target in targets])
    except BuildError as error:
        raise Rejected("compiler", f"nvcc refuses what the emulator's compiler takes:\n{error}") from error


def _compile_kernels(source: Source, answer: str, launches: Sequence[Launch], targets: Sequence[int]) -> None:
    import triton

    words = [source.name, answer, triton.__version__, Path(__file__).read_text(), repr(targets), repr(launches)]
    kept = files.CACHE / "compiled" / f"{hashlib.sha256(chr(0).join(words).encode()).hexdigest()[:32]}.json"
    if not kept.exists():
        asked = [asdict(launch) for launch in launches]
        refused = call_in_compiler(__name__, "_compile_here", str(source.path), answer, asked, list(targets))
        files.write_atomically(kept, json.dumps(refused))
    eviction.used(kept)
    if refused := json.loads(kept.read_text()):
        raise Rejected("compiler", refused)


def _compile_here(path: str, answer: str, launches: Sequence[dict[str, Any]], targets: Sequence[int]) -> str:
    """Why the compiler refuses one of the launches, or "". Only in a process whose mode is `compiled`."""
    module = build(Source(Path(path)), answer)
    for target in targets:
        with compiling(target) as made:
            for launch in (Launch(**each) for each in launches):
                made.clear()
                kernel = getattr(module, launch.kernel)
                while hasattr(kernel, "fn") and not inspect.isfunction(kernel.fn):  # autotune and heuristics
                    kernel = kernel.fn
                given = {name: _again(*written) for name, written in launch.given.items()}
                where = f"{launch.kernel} for {chips.label(target)}"
                try:
                    kernel.run(grid=(1, 1, 1), warmup=True, **given)
                except Exception as error:
                    return f"{where}: {_words(error, answer)}"
                asked, most = made[launch.kernel].metadata.shared, chips.of(target).shared_block
                if asked > most:
                    return f"{where}: it asks for {asked:,} bytes of shared memory a block, the chip has {most:,}"
    return ""


def _words(error: BaseException, answer: str) -> str:
    """The compiler's sentence and the learner's line that it is about."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    messages = (getattr(each, "error_message", None) for each in reversed(chain))
    said = next(filter(None, messages), str(chain[-1]).strip() or type(chain[-1]).__name__)
    notes = "\n".join(note for e in chain for note in getattr(e, "__notes__", ()))
    said += "".join(f"\n{line}" for line in re.findall(r"^.*\berror\b.*$", notes, re.MULTILINE)[:3])
    for each in reversed(chain):
        source, nth = getattr(each, "src", None), getattr(getattr(each, "node", None), "lineno", None)
        if source and nth and (at := answer.find(source.strip())) >= 0:
            line = answer[:at].count("\n") + nth
            return f"{said} in line {line}: {answer.splitlines()[line - 1].strip()}"
    frames = [f for e in chain for f in traceback.extract_tb(e.__traceback__) if "lessonkit_answers" in f.filename]
    return said + (f" in line {frames[-1].lineno}: {frames[-1].line}" if frames else "")
