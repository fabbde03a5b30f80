"""`python -m lessonkit`: the commands, in the order in which `--help` shows them, and how the process ends.

Exit codes: 0 all well, 1 something failed, 2 the command line is wrong, 130 a run was stopped.
"""

import sys

from lessonkit.command_line import authors, environments, fuzz, judged, learner, lessons, measured, predicted, start
from lessonkit.command_line.panels import LEARN
from lessonkit.commands import exercises, languages
from lessonkit.exercise import progress

import typer

app = typer.Typer(
    cls=languages.Spoken,
    no_args_is_help=True,
    add_completion=False,
    help="A GPU-kernel course: run, check, time and report its lessons. `--lang zh` says all in Chinese.",
)
for part in (start, lessons, learner, predicted, measured, judged, authors, fuzz, environments):
    app.add_typer(part.app)
app.add_typer(exercises.app, name="exercise", rich_help_panel=LEARN)


if __name__ == "__main__":
    try:
        app(prog_name=exercises.COURSE)
    except progress.Damaged as error:
        sys.exit(str(error))
    except OSError as error:
        if not error.filename:
            raise
        sys.exit(f"{error.filename}: {error.strerror}")
