"""versions, lock: what the course runs on, tried and pinned."""

import subprocess
from functools import partial
from typing import Annotated

from lessonkit.base.errors import Missing
from lessonkit.base.files import ROOT
from lessonkit.base.words import language, retold, said
from lessonkit.command_line import choice
from lessonkit.command_line.outcome import end, say_written
from lessonkit.command_line.panels import WRITE, Which
from lessonkit.commands import lock, show, versions
from lessonkit.cuda import toolchain
from lessonkit.judge.sentences import told
from lessonkit.modes import compiled
from lessonkit.pages import report, targets

import typer

app = typer.Typer()
write = partial(app.command, rich_help_panel=WRITE)


@write(name="versions")
def try_versions(
    which: Which = "",
    torch: Annotated[list[str] | None, typer.Option(help="Only this PyTorch, 2.14.1; may be repeated.")] = None,
    triton: Annotated[list[str] | None, typer.Option(help="Only this Triton, 3.9.0; may be repeated.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="Only this target, 90 or gfx942; may be repeated.")] = None,
    checks: Annotated[bool, typer.Option(help="Run the interpreted checks too.")] = True,
) -> None:
    """Check every kernel interpreted, and compile it, with each PyTorch and Triton; write reports/versions.csv.

    Makes an environment of 6 GB for each PyTorch in the cache; a pair that cannot be installed gets a row that says
    why. Needs no GPU. A stopped run goes on where it was. For named lessons nothing is written.
    Triton 3.10 will switch fused multiply-add off by default: last bits and speed of kernels may then change.
    """
    which = choice.meant(which)
    pairs = [p for p in versions.PAIRS if (not torch or p[0] in torch) and (not triton or p[1] in triton)]
    wanted = [t for t in compiled.TARGETS if not target or str(t) in target]
    if not pairs or len(wanted) < len({*(target or ())}):
        known = "; ".join([*map(versions.label, versions.PAIRS), ", ".join(map(str, compiled.TARGETS))])
        what = said("{a}, {b} or {c}").format(a="--torch", b="--triton", c="--target")
        raise typer.BadParameter(said("{what}: there are {known}").format(what=what, known=known))
    if why := toolchain.lacks("Triton"):
        end([told(why)])
    failed: list[str] = []
    for pair in pairs:
        rows: list[versions.Tried] = []
        try:
            with show.console.status(versions.label(pair)):
                for row, words in versions.tried(pair, which, wanted, checks):
                    rows.append(row)
                    failed += [f"{versions.label(pair)}: {line}" for line in words]
                    if not which:
                        versions.save([row])
        except versions.NotInstalled as why:
            sentence = said("{pair} was not tried: {why}")
            line = sentence.format(pair=versions.label(pair), why=retold(str(why), targets.UNTRIED, language()))
            show.console.print(line, style="yellow")
            if not which:
                versions.save([versions.not_tried(pair, str(why))])
        except versions.Failed as why:
            failed.append(f"{versions.label(pair)}: {why}")
        if rows:
            show.table(versions.label(pair), list(vars(rows[0])), (vars(row).values() for row in rows))
    if not which:
        say_written(report.write())
    end(failed)


@write(name="lock")
def lock_requirements(
    upgrade: Annotated[bool, typer.Option(help="Take the newest versions that fit, not those of the lists.")] = False,
) -> None:
    """Write requirements/, the versions and hashes of all that course.py installs, from pyproject.toml. Needs uv."""
    try:
        for path in lock.lock(upgrade):
            show.console.print(str(path.relative_to(ROOT)))
    except (Missing, subprocess.CalledProcessError) as why:
        end([str(why)])
