"""python -m lessonkit trace: a rung step by step in the terminal, or as a page."""

from collections.abc import Sequence
from pathlib import Path

from lessonkit.base.files import write_atomically
from lessonkit.base.words import language
from lessonkit.commands import show
from lessonkit.judge import trace
from lessonkit.judge.trace import Step
from lessonkit.lesson import Lesson, shape_name
from lessonkit.pages import trace_page

from rich.text import Text

FIRST, LAST = 36, 12  # steps of a long trace that the terminal shows
LEGEND = (
    "program: its ids; line: of the code below; access: in the tensor's own indices, a:b ends before b; "
    f"off: elements that the mask leaves out, of how many; sect: the most sectors of {trace.SECTOR} bytes that "
    f"{trace.WARP} neighbouring elements (a warp with one element per thread) lie in; bytes: asked for by the program"
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
            show.table(kernel, ["step", "program", "line", "access", "off", "sect", "bytes"], body)
            body.clear()

    for nth, step in shown:
        if cut and nth == len(steps) - LAST + 1:
            flush()
            show.console.print(f"... {len(steps) - FIRST - LAST} steps left out; --page FILE shows all")
        if kernel != (launched := f"{heading}: launch {step.launch}, {step.kernel}"):
            flush()
            kernel = launched
        access = f"{step.kind} {step.tensor.argument}[{step.where}]"
        program = ", ".join(map(str, step.program))
        body.append([nth, program, step.line, access, f"{step.masked}/{step.lanes}", step.sectors, step.bytes])
    flush()
    show.console.print(LEGEND, style="dim", highlight=False)
    show.console.print()
    for (file, number), source in trace.lines(steps).items():
        where = f"{file}:{number}" if several else str(number)
        show.console.print(Text(f"{where:>5}  {source}", overflow="ellipsis", no_wrap=True))
    show.console.print()
    show.table(
        "in all",
        ["kernel", "argument", "loads", "stores", "bytes", "in sectors"],
        (
            [kernel, argument, t.reads, t.writes, t.asked, t.fetched]
            for (kernel, argument), t in trace.totals(steps).items()
        ),
    )
    show.console.print("in sectors: the bytes of all sectors that the warps ask for, each warp by itself", style="dim")


def write_page(file: Path, heading: str, steps: Sequence[Step]) -> None:
    write_atomically(file, trace_page.page(heading, steps, language()))
    show.console.print(f"wrote {file}: open it in a browser")
