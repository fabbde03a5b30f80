"""The three panels of `--help`, and arguments that several commands take."""

from typing import Annotated

from lessonkit.base.words import later

import typer

# `--help` shows the commands in three panels, each in the order of __main__: that in which a learner meets them.
LEARN, MEASURE, WRITE = later("Learn"), later("Predict and measure"), later("Write lessons, maintain the course")
Which = Annotated[
    str,
    typer.Argument(
        help="A day (day2, cuda), a lesson (lesson05_softmax, 02_vector_add), a part of names (softmax), or all."
    ),
]
LessonOrOperator = Annotated[
    str,
    typer.Argument(help="As for `check`, or an operator (course_ops.softmax), or course_ops; nothing: all of both."),
]
