"""Copies of a module of kernels with one change, for tests that a wrong kernel is found."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from lessonkit.base.errors import Fault
from lessonkit.modes import gluon as emulated

import pytest


def changed(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """The module with `new` in place of `old`, which stands in it once. folder: for the copy's file."""
    text = Path(module.__file__).read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times: write the line as it is now"
    return written(module, text.replace(old, new), folder)


def same(module: ModuleType, folder: Path) -> ModuleType:
    """The module once more, without a change."""
    return written(module, Path(module.__file__).read_text(), folder)


def written(module: ModuleType, text: str, folder: Path) -> ModuleType:
    path = folder / f"mutant_of_{Path(module.__file__).name}"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def caught_by(run: Callable[[], object], orders: int = 1) -> str:
    """What gives an emulated kernel away, in one of so many orders of the hardware: a kind of Fault, "value", or "".

    run: raises AssertionError if the values are wrong.
    """
    for seed in range(orders):
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(emulated, "SEED", seed)
                run()
        except Fault as fault:
            return fault.kind
        except AssertionError:
            return "value"
    return ""
