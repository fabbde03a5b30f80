"""The code of one rung: the function that launches it, and the kernels that it launches."""

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

from lessonkit.base.cpp_text import definitions, reached_in
from lessonkit.base.files import ROOT
from lessonkit.base.prose import Translate, read_as


def lines(lesson: str, rung: str, translate: Translate) -> list[str]:
    """Of a lesson that is imported, with its comments translated. Raises AttributeError if it binds no such name."""
    return [line for text, suffix in _pieces(lesson, rung) for line in read_as(text, suffix, translate).splitlines()]


def _pieces(lesson: str, rung: str) -> list[tuple[str, str]]:
    """Texts, and the suffix of a file of their language."""
    module, folder = sys.modules[lesson], lesson.partition(".")[0]
    launcher = getattr(module, rung)
    if (own := Path(inspect.getfile(inspect.unwrap(launcher)))).parent.parent == ROOT / folder:
        return [(own.read_text(), ".py")]  # a rung of a ladder is a file
    wrapper = inspect.getsource(launcher)
    if (program := Path(module.__file__ or "").with_suffix(".cu")).exists():
        code = program.read_text()
        used = reached_in([code], re.findall(r"\w+", wrapper))
        parts = [code[d.start : d.stop] + "\n\n" for d in definitions(code) if d.name in used]
        return [*((part, ".cu") for part in parts), (wrapper, ".py")]
    kernels = [k for k, v in vars(module).items() if k.endswith("_kernel") and hasattr(v, "fn") and k in wrapper]
    return [*((_kernel(module, kernel), ".py") for kernel in kernels), (wrapper, ".py")]


def _kernel(module: ModuleType, name: str) -> str:
    text = Path(module.__file__ or "").read_text().splitlines()
    at = (i for i, line in enumerate(text) if line.startswith((f"def {name}(", f"{name} = ")))
    if (start := next(at, None)) is None:  # another file's
        fn = getattr(module, name)
        while hasattr(fn, "fn"):  # what tunes or compiles a function holds it so
            fn = fn.fn
        return inspect.getsource(fn)
    stop = next((i for i in range(start + 1, len(text)) if text[i] and text[i][0] not in " )#"), len(text))
    return "\n".join(text[start:stop])
