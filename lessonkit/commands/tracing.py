"""python -m lessonkit trace: a rung step by step in the terminal, or as a page."""

from collections.abc import Sequence
from pathlib import Path

from lessonkit.base.files import write_atomically
from lessonkit.base.words import language, later, said
from lessonkit.commands import show
from lessonkit.judge import trace
from lessonkit.judge.trace import Step
from lessonkit.lesson import Lesson, shape_name
from lessonkit.pages import trace_page

from rich.text import Text

FIRST, LAST = 36, 12  # steps of a long trace that the terminal shows
LEGEND = later(
    "program: its ids; line: of the code below; access: in the tensor's own indices, a:b ends before b; "
    "masked: elements that the mask leaves out, of how many; sect: the most sectors of {sector} bytes that "
    "{warp} neighbouring elements (a warp with one element per thread) lie in; bytes: asked for by the program"
)


def traced(lesson: Lesson, rung: str, words: Sequence[str]) -> tuple[str, list[Step]]:
    """What is traced, in words, and its steps. Raises ValueError."""
    run = trace.rung(lesson, rung)
    at = trace.shape(lesson, words)
    return f"{rung}, {shape_name(at)}, {lesson.bench_dtype}".replace("torch.", ""), trace.trace(lesson, run, at)


def print_steps(heading: str, steps: Sequence[Step]) -> None:
    """Tables that fit into 80 columns: the steps, their lines of code, what each argument cost."""
    cut = len(steps) > FIRST + LAST
    shown = [*enumerate(steps, 1)]
    shown = [*shown[:FIRST], *shown[-LAST:]] if cut else shown
    kernel, body = "", list[list[object]]()
    several = len({file for file, _ in trace.lines(steps)}) > 1

    def flush() -> None:
        if body:
            titles = [said("step"), "program", said("line"), said("access"), said("masked"), said("sect")]
            show.table(kernel, [*titles, said("bytes")], body)
            body.clear()

    for nth, step in shown:
        if cut and nth == len(steps) - LAST + 1:
            flush()
            words = said("... {count} steps left out; {option} shows all")
            show.console.print(words.format(count=len(steps) - FIRST - LAST, option="--page FILE"))
        words = said("{heading}: launch {number}, {kernel}")
        if kernel != (launched := words.format(heading=heading, number=step.launch, kernel=step.kernel)):
            flush()
            kernel = launched
        access = f"{step.kind} {step.tensor.argument}[{step.where}]"
        program = ", ".join(map(str, step.program))
        body.append([nth, program, step.line, access, f"{step.masked}/{step.lanes}", step.sectors, step.bytes])
    flush()
    show.console.print(said(LEGEND).format(sector=trace.SECTOR, warp=trace.WARP), style="dim", highlight=False)
    show.console.print()
    for (file, number), source in trace.lines(steps).items():
        where = f"{file}:{number}" if several else str(number)
        show.console.print(Text(f"{where:>5}  {source}", overflow="ellipsis", no_wrap=True))
    show.console.print()
    show.table(
        said("in all"),
        ["kernel", said("argument"), said("loads"), said("stores"), said("bytes"), said("in sectors")],
        (
            [kernel, argument, t.reads, t.writes, t.asked, t.fetched]
            for (kernel, argument), t in trace.totals(steps).items()
        ),
    )
    words = said("in sectors: the bytes of all sectors that the warps ask for, each warp by itself")
    show.console.print(words, style="dim")


def write_page(file: Path, heading: str, steps: Sequence[Step]) -> None:
    write_atomically(file, trace_page.page(heading, steps, language()))
    show.console.print(said("wrote {file}: open it in a browser").format(file=file))
