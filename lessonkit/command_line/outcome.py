"""How a command ends: its warnings, the files that it wrote, what failed, and the exit code."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from lessonkit.base.files import ROOT
from lessonkit.base.words import listed, said
from lessonkit.commands import show
from lessonkit.pages import paths

import typer


def warn(routes: Iterable[paths.Route]) -> None:
    for line in (line for route in routes for line in route.warnings):
        show.console.print(said("warning: {line}").format(line=line), style="yellow")


def say_written(files: Sequence[Path]) -> None:
    """One line that names the first three files that a command has changed; nothing if there are none."""
    if files:
        shown = listed(str(path.relative_to(ROOT)) for path in files[:3])
        more = said(" (and {count} more)").format(count=len(files) - 3) if len(files) > 3 else ""
        show.console.print(said("wrote {path}").format(path=shown + more), style="dim", highlight=False)


def list_written(files: Iterable[Path]) -> None:
    for path in files:
        show.console.print(said("wrote {path}").format(path=path.relative_to(ROOT)))


@contextmanager
def mistakes(before: str = "") -> Iterator[None]:
    """A ValueError inside is a mistake on the command line (exit code 2), and is said behind the words `before`."""
    try:
        yield
    except ValueError as why:
        raise typer.BadParameter(f"{before}{why}") from None


def end(failed: list[str]) -> NoReturn:
    """Say what failed. The exit code is 1 if anything did, else 0."""
    for line in failed:
        show.console.print(line, style="red")
    raise typer.Exit(int(bool(failed)))
