"""`python course.py web`: build the book and serve it, or write it to a folder."""

from pathlib import Path

from lessonkit.base import eviction
from lessonkit.base.errors import Missing
from lessonkit.base.files import CACHE
from lessonkit.base.words import said
from lessonkit.commands import show


def run(build: Path | None, port: int) -> int:
    """The exit code."""
    from lessonkit.web import serve, site  # Sphinx, which no other command needs

    out = build or CACHE / "web" / "book"
    if not build:
        eviction.used(out)
    if build and build.exists() and any(build.iterdir()) and not (build / ".nojekyll").exists():
        show.console.print(
            said("{path} holds other files: name a new folder, or one of an earlier build.").format(path=build)
        )
        return 2
    try:
        site.build(out, say=show.console.print, alone=bool(build))
    except Missing as why:
        show.console.print(str(why), style="red")
        return 1
    if build:
        show.console.print(said("Open {path}").format(path=out / "index.html"))
        return 0
    try:
        serve.serve(
            out, port, lambda address: show.console.print(said("{address}   Ctrl-C ends it.").format(address=address))
        )
    except KeyboardInterrupt:
        return 0
    except OSError as why:
        show.console.print(
            said("Port {port} cannot be used ({why}): choose another by --port.").format(port=port, why=why)
        )
        return 1
    return 0
