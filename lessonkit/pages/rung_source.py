"""The code of one rung: the function that launches it, and the kernels that it launches."""

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

from lessonkit.base.cpp_text import definitions, reached
from lessonkit.base.files import ROOT
from lessonkit.cuda import build


def lines(lesson: str, rung: str) -> list[str]:
    """Of a lesson that is imported. Raises AttributeError if its file binds no such name."""
    module, folder = sys.modules[lesson], lesson.partition(".")[0]
    launcher = getattr(module, rung)
    if (own := Path(inspect.getfile(inspect.unwrap(launcher)))).parent.parent == ROOT / folder:
        return own.read_text().splitlines()  # a rung of a ladder is a file
    wrapper = inspect.getsource(launcher)
    if (program := Path(module.__file__ or "").with_suffix(".cu")).exists():
        used = list(reached(build.local_files(program)[:1], set(re.findall(r"\w+", wrapper))))
        code = program.read_text()
        parts = [code[d.start : d.stop] for d in definitions(code) if d.name in used]
        return "\n\n".join([*parts, wrapper]).splitlines()
    kernels = [k for k, v in vars(module).items() if k.endswith("_kernel") and hasattr(v, "fn") and k in wrapper]
    found = [line for kernel in kernels for line in _kernel(module, kernel)]
    return found + wrapper.splitlines()


def _kernel(module: ModuleType, name: str) -> list[str]:
    text = Path(module.__file__ or "").read_text().splitlines()
    at = (i for i, line in enumerate(text) if line.startswith((f"def {name}(", f"{name} = ")))
    if (start := next(at, None)) is None:  # another file's
        fn = getattr(module, name)
        while hasattr(fn, "fn"):  # what tunes or compiles a function holds it so
            fn = fn.fn
        return inspect.getsource(fn).splitlines()
    stop = next((i for i in range(start + 1, len(text)) if text[i] and text[i][0] not in " )#"), len(text))
    return text[start:stop]
