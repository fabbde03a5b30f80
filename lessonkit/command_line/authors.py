"""new, depends, translate: begin a lesson, change a function, bring its words up to date."""

from functools import partial
from typing import Annotated

from lessonkit.base.words import counted, listed, said
from lessonkit.command_line import choice
from lessonkit.command_line.outcome import end, list_written, mistakes
from lessonkit.command_line.panels import WRITE
from lessonkit.commands import exercises, languages, new, show
from lessonkit.measure import dependents, operator_rows

import typer

app = typer.Typer()
write = partial(app.command, rich_help_panel=WRITE)


@write(name="new")
def new_lesson(
    name: Annotated[str, typer.Argument(help="In full: day2_triton_basics.lesson18_silu, cuda_src.25_silu.")],
    problem: Annotated[str, typer.Option(help="The file of problems/ that it answers; a new one is begun.")],
    after: Annotated[str, typer.Option(help="The lesson that stands before it in the whole course.")],
) -> None:
    """Begin a lesson: its file, its problem if that is new, and its line in the path of the whole course.

    In Triton, `new day2_triton_basics.lesson18_silu --problem silu --after lesson03_gelu`; in CUDA C++, where it has
    a program too, `new cuda_src.25_silu --problem silu --after 02_vector_add`.
    """
    with mistakes():
        made = new.lesson(name, problem, choice.one(after)[0])
    list_written(made)
    stem = name.partition(".")[2]
    command = f"{exercises.COURSE} check {stem}"
    show.console.print(said("This command says what it still lacks: {command}").format(command=command))
    made_by = [f"compile {stem}", *[f"count {stem}"] * (made[1].suffix == ".cu"), "translate", "report"]
    words = said("When that passes, these make its compiled figures, its messages and its pages: {commands}")
    show.console.print(words.format(commands="; ".join(f"{exercises.COURSE} {each}" for each in made_by)))


@write()
def depends(
    function: Annotated[
        str, typer.Argument(help="ring_slot, problems.gelu.inputs, or cuda_src/02_vector_add.cu:add_one.")
    ],
) -> None:
    """Say which lessons, operators and rows depend on a function, a kernel or a constant: `depends softmax_row_kernel`.

    These rows become old when its code changes. Where several have that name, all are listed. A block size is often
    an argument: ask then of the function that launches the kernel.
    """
    if dependents.is_of_the_kit(function):
        words = said("{function} judges lessons: no row depends on it, and every lesson's checks may")
        end([words.format(function=function)])
    if inside := dependents.functions_of(function):
        words = said("{module} is a module: name one of its functions, {functions}")
        end([words.format(module=function, functions=", ".join(inside))])
    with show.console.status(said("reading what lessons and operators reach")):
        found = dependents.dependents(function)
        places = [] if found else dependents.defined(function)
        close = [] if found or places else dependents.closest(function)
    if places:
        words = said("no lesson and no operator reaches {function} of {files}")
        end([words.format(function=function, files=", ".join(map(str, places)))])
    if not found:
        words = said("there is no function {function}. The closest: {close}")
        end([words.format(function=function, close=", ".join(close) or said("none"))])
    body = []
    for each in found:
        through = ", ".join(said(part) for part in each.through)
        count = f"{each.rows} ({operator_rows.FILE})" if each.is_operator and each.rows else each.rows or ""
        body.append([each.function, each.lesson, through, count])
    operators = {each.lesson for each in found if each.is_operator}
    lessons = {each.lesson for each in found} - operators
    parts = [
        counted(len(lessons), said("1 lesson"), said("{count} lessons")),
        counted(len(operators), said("1 operator"), said("{count} operators")),
        counted(dependents.all_rows(found), said("1 row"), said("{count} rows")),
    ]
    heading = said("what depends on {function}: {what}").format(function=function, what=listed(parts))
    show.table(heading, [said("function"), said("lesson or operator"), said("through"), said("rows")], body)


write()(languages.translate)
