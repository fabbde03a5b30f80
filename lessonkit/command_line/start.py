"""doctor, path, list: what this machine and the course have, and where to begin."""

from functools import partial
from typing import Annotated

from lessonkit.base.words import language, said
from lessonkit.command_line import choice
from lessonkit.command_line.outcome import warn
from lessonkit.command_line.panels import LEARN, Which
from lessonkit.commands import exercises, show
from lessonkit.commands.doctor import findings
from lessonkit.exercise import progress
from lessonkit.lesson import Broken, Lesson, title
from lessonkit.pages import guides, paths

import typer

app = typer.Typer()
learn = partial(app.command, rich_help_panel=LEARN)


@learn()
def doctor() -> None:
    """Say what this machine has, what it can run, and the command that mends what is missing."""
    found = findings()
    show.table(
        said("this machine"),
        ["", "", said("found"), said("what to do")],
        ([("ok" if f.ok else "--"), f.name, f.value, "" if f.ok else f.mend] for f in found),
    )
    raise typer.Exit(int(any(f.required and not f.ok for f in found)))


@learn(name="path")
def show_path(name: Annotated[str, typer.Argument(help="30min, 1h, ...; nothing: what there is.")] = "") -> None:
    """Show a path for the time that you have: its parts, and how many of their exercises have passed."""
    routes = {route.name: route for route in paths.routes()}
    if name not in ("", *routes):
        words = said("no path is called {name}; there are {known}")
        raise typer.BadParameter(words.format(name=repr(name), known=", ".join(routes)))
    warn(routes[word] for word in ([name] if name else routes))
    page = guides.GUIDES[language()].removeprefix("README")
    if not name:
        body = [[r.name, r.ends[language()], f"paths/{r.name}{page}"] for r in routes.values()]
        return show.table(said("paths"), [said("name"), said("at the end"), said("page")], body)
    route, body = routes[name], []
    passed = {name for name, record in progress.load().items() if record.passed}
    for part in route.parts:
        asked = [exercise.name for item in part.items for exercise in item.exercises]
        time_ = said("{count} h").format(count=f"{part.minutes / 60:.3g}")
        if not route.hours:
            time_ = said("{count} min").format(count=f"{part.minutes:g}")
        words = said("{done} of {count}")
        done = words.format(done=len(passed.intersection(asked)), count=len(asked)) if asked else ""
        body.append([part.title[language()], time_, done])
    heading = said("{name}: {page}").format(name=route.title[language()], page=f"paths/{name}{page}")
    show.table(heading, [said("part"), said("time"), said("exercises passed")], body)
    if waiting := next((exercise for exercise in route.exercises if exercise.name not in passed), None):
        command = f"{exercises.COURSE} exercise next {waiting.short}"
        show.console.print(said("Next exercise: {command}").format(command=command))


@learn(name="list")
def list_lessons(which: Which = "") -> None:
    """List lessons and their rungs in reading order."""
    body = []
    for name, lesson in choice.lessons(which):
        if isinstance(lesson, Broken):
            body.append([name, choice.not_imported(name, lesson), ""])
            continue
        parts = lesson.rungs if isinstance(lesson, Lesson) else lesson.steps
        body.append([name, said(title(name)), " > ".join(p.__name__ for p in parts)])
    show.table(said("lessons"), [said("name"), said("about"), said("rungs or steps")], body)
