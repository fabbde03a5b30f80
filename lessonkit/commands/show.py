"""What a lesson prints when it runs: its checks, what its rungs cost, and on a GPU how fast they are."""

import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lessonkit.base import chips, device
from lessonkit.base.errors import Misdeclared, Missing, Unsupported
from lessonkit.base.files import REPORTS, ROOT
from lessonkit.base.printed import Reader, retelling
from lessonkit.base.prose import atoms, breaks, normal, wrapped
from lessonkit.base.prose import columns as columns_of
from lessonkit.base.words import language, later, listed, said
from lessonkit.judge import counters
from lessonkit.judge.sentences import told
from lessonkit.judge.verify import (
    LeftOut,
    Question,
    first_target,
    grad_checks,
    moves_otherwise,
    refused_without_advice,
    rung_checks,
)
from lessonkit.lesson import Lesson, Steps, title
from lessonkit.measure import bench, ncu, operator_bench, operator_rows, rows
from lessonkit.measure.rows import MACHINE
from lessonkit.measure.stale import Today, released
from lessonkit.modes import compiled
from lessonkit.pages import learned, predictions, report, shares
from lessonkit.pages import stored as stored_words

import rich.text
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as RichTable
from rich.text import Text

_divide: Callable[[str, int, bool], list[int]] = vars(rich.text)["divide_line"]


def _divided(text: str, width: int, fold: bool = True) -> list[int]:
    """Where rich breaks a line. It takes Chinese without spaces for one word, and cuts it off in the help."""
    return _divide(text, width, fold) if text.isascii() else breaks(text, width)


vars(rich.text)["divide_line"] = _divided
# An overflow in an interpreted kernel is what a check is about: NumPy's word on it would stand between the tables.
warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.")
warnings.filterwarnings("ignore", r"var_mean\(\): degrees of freedom", UserWarning)  # rows of no columns: NaN is right
# What is printed is data: [x^2] is no markup, [0:x:2] no emoji. As wide as the terminal or as COLUMNS says.
console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 150, markup=False, emoji=False)
COMPILED = later(
    "regs: registers per thread; spills: bytes of registers kept in memory; shared: bytes of shared memory "
    "per program; occ: occupancy, the share of an SM's warps; ld, st: bytes of the widest load and store of a thread"
)
# The kinds of questions that `checks` asks, each on all of its cases and dtypes.
CHECKED = ("rung", "other-dtypes", "gradients", "gradients-in-other-dtypes")
CUT = "…"  # behind a piece of a word that is longer than a line
MODES = {
    "cuda": later("run on the GPU"),
    "cpu": later("interpreted: no GPU was found"),
    "emulated": later("emulated: no GPU was found"),
    "meta": later("compiled only"),
}


def table(heading: str, columns: Iterable[str], body: Iterable[Iterable[Any]], legend: str = "") -> None:
    """Print a table as wide as the terminal: cells wrap between words, and names behind a `_`, `.`, `/` or `=`.

    Where even these pieces do not fit side by side, each line becomes a block of its own, `column: cell`.
    legend: what abbreviations mean, one line below the table.
    """
    columns, lines = list(columns), [list(map(str, line)) for line in body]
    for split, frame in ((_words, True), (_words, False), (_parts, True), (_parts, False)):
        room = console.width - (3 * len(columns) + 1 if frame else 2 * len(columns) - 2)
        if widths := _widths([columns, *lines], room, split):
            _grid(heading, [columns, *lines], widths, split, frame)
            break
    else:
        _blocks(heading, columns, lines)
    if legend:
        console.print(legend, style="dim", highlight=False)


def _words(text: str) -> list[str]:
    return [piece for line in text.split("\n") for piece in atoms(line)]


def _parts(text: str) -> list[str]:
    """Words, and the parts of a name: softmax_, online_, kernel. A number such as 0.1808 is one part."""
    behind_a_mark = r"(?<=[_./=])(?![_./=])(?!(?<=\d\.)(?=\d))"
    return [part for word in _words(text) for part in re.split(behind_a_mark, word) if part]


def _widths(lines: Sequence[Sequence[str]], room: int, split: Callable[[str], list[str]]) -> list[int]:
    """A width for each column, at least its longest piece and at most its longest cell; [] if pieces do not fit."""
    cells = [[line[nth] for line in lines] for nth in range(len(lines[0]))]
    least = [
        max((columns_of(piece.strip()) for cell in column for piece in split(cell)), default=0) for column in cells
    ]
    most = [max(columns_of(line) for cell in column for line in cell.split("\n")) for column in cells]
    if sum(least) > room:
        return []
    widths, spare = list(least), room - sum(least)
    wishes = sorted(range(len(least)), key=lambda nth: most[nth] - least[nth])
    for left, nth in zip(range(len(wishes), 0, -1), wishes, strict=True):  # short cells first: they need not wrap
        more = max(0, min(most[nth] - least[nth], spare // left))
        widths[nth] += more
        spare -= more
    return widths


def _grid(
    heading: str, lines: Sequence[Sequence[str]], widths: list[int], split: Callable[[str], list[str]], frame: bool
) -> None:
    grid = RichTable(title=heading, title_justify="left", title_style="bold")
    if not frame:
        grid.box, grid.padding, grid.pad_edge = None, (0, 2, 0, 0), False
    first, *others = (
        [_wrapped(cell, width, split) for cell, width in zip(line, widths, strict=True)] for line in lines
    )
    for column, width in zip(first, widths, strict=True):
        grid.add_column(column, no_wrap=True, min_width=width)
    for line in others:
        grid.add_row(*line)
    console.print(grid)


def _wrapped(cell: str, width: int, split: Callable[[str], list[str]]) -> str:
    lines = []
    for text in cell.split("\n"):
        line = ""
        for piece in split(text):
            if line and columns_of(line + piece.rstrip()) > width:
                lines.append(line.rstrip())
                line = ""
            line += piece if line or piece.strip() else ""
        lines.append(line.rstrip())
    return "\n".join(lines)


def _blocks(heading: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Each line of a table by itself: its first cell, and below it the others that say something."""
    console.print(heading, style="bold", highlight=False)
    for first, *others in lines:
        console.print(Text(_marked(first, console.width)), highlight=False)
        for column, cell in zip(columns[1:], others, strict=True):
            if cell:
                name = f"{column}: " if column else ""
                for nth, line in enumerate(wrapped(name + cell, console.width - 6, console.width - 4)):
                    indent = "      " if nth else "    "
                    console.print(Text(_marked(indent + line, console.width)), highlight=False)


def _marked(line: str, width: int) -> str:
    """A line cut where it must be, with a mark that the word goes on."""
    pieces = []
    while columns_of(line) > width:
        end = next(end for end in range(len(line), 0, -1) if columns_of(line[:end]) < width)
        pieces.append(line[:end] + CUT)
        line = "      " + line[end:]
    return "\n".join([*pieces, line])


def _rule(name: str, where: str) -> None:
    console.rule(Text.assemble((said(title(name)), "bold"), said(" ({where})").format(where=where)))


def lesson(name: str, lesson: Lesson) -> None:
    """Run a kernel lesson as far as this machine can; exit code 1 if a rung is wrong."""
    mode = device.DEVICE.type
    _rule(name, said(MODES["emulated" if lesson.extension and mode == "cpu" else mode]))
    if checks(lesson):
        raise SystemExit(1)
    if device.HAS_GPU:
        timed(name, lesson)
    else:
        if lesson.extension:
            counted(counters.rows(counters.traffic(lesson)))
        resources(name, (first_target(lesson),))  # the rest takes twice as long: `compile` shows it
        stored(name, lesson)


def checks(lesson: Lesson) -> int:
    """Check every rung on every case, the bytes that it moves, and gradients; a line a rung; return how many failed."""
    body, failures = [], 0
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(said("checking"), total=len(lesson.rungs))
        for rung in lesson.rungs:
            found = rung_checks(lesson, rung)
            if advice := refused_without_advice(lesson, rung, found):
                found.wrong.append(advice)
            if found.passed and not found.wrong and (off := moves_otherwise(lesson, rung, found)):
                found.wrong.append(off)
            failures += len(found.wrong)
            least = f"{found.moved:.2f}" if found.moved else ""
            predicted = f"{lesson.passes[rung]:.2f}" if found.moved and rung in lesson.passes else ""
            more = said("(and {count} more)").format(count=len(found.wrong) - 1) if len(found.wrong) > 1 else ""
            words = listed(map(told, found.left_out | found.refused), ";")
            if found.wrong:
                words = f"{told(found.wrong[0])} {more}"
            passed = said("{count} passed").format(count=found.passed)
            body.append([rung.__name__, passed, words.strip(), least, predicted])
            progress.advance(task)
    wrong_or_left = said("wrong") if failures else said("left out")
    columns = [said("rung"), said("cases"), wrong_or_left, said("bytes / least"), said("predicted")]
    legend = said("bytes / least: bytes that the rung moves, as a multiple of the least that the operator needs")
    counted = any(line[3] for line in body)
    table(said("checked against PyTorch"), columns, body, legend if counted else "")
    if counted and lesson.passes_why:
        console.print(said(lesson.passes_why), style="dim", highlight=False)
    if lesson.grad and not failures:
        wrong = grad_checks(lesson)
        failures += len(wrong)
        agree = listed(map(told, wrong), ";") or said("agree with float64 autograd")
        console.print(said("gradients of {op}: {verdict}").format(op=lesson.grad.op.__name__, verdict=agree))
    return failures


def questions(asked: Iterable[Question]) -> list[str]:
    """Ask them in turn, print a line for each, and return the names of those that are not answered well."""
    body, failed = [], []
    with Progress(console=console, transient=True) as progress:
        todo = list(asked)
        task = progress.add_task(said("asking"), total=len(todo))
        for question in todo:
            progress.update(task, advance=1, description=f"{question.kind} {question.subject}"[:60])
            try:
                answer = "ok", told(question.ask() or "")
            except LeftOut as why:
                answer = said("left out"), told(str(why))
            except Exception as wrong:
                answer = said("WRONG"), raised(wrong)
                failed.append(f"{question}: {said('WRONG')}")
            body.append([question.kind, question.subject, *answer])
    table(said("also asked"), [said("question"), said("of"), "", ""], body)
    return failed


def raised(error: Exception) -> str:
    """What an error says: the kit's own words; of another error its type too, and the line of the course it is from."""
    if isinstance(error, AssertionError | Misdeclared | NotImplementedError):
        return "\n".join(map(told, str(error).splitlines()))
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    course = [(path.relative_to(ROOT), line) for path, line in frames if path.is_relative_to(ROOT)]
    places = [f" ({path}:{line})" for path, line in course if path.parts[0] not in (".venv", "lessonkit")]
    return f"{type(error).__name__}: {str(error).strip()}{places[-1] if places else ''}"


def timed(name: str, lesson: Lesson) -> int:
    """Time the lesson beside its peers and keep the rows; return how many contenders failed."""
    lines: list[str] = []
    with console.status(said("timing rungs and peers")):
        found = bench.bench(name, lesson, lines.append)
    for line in lines:
        console.print(line, style="dim")
    kept = rows.save(found) if found else None  # a share may be of a peer of the same rounds, which the file has
    body = [
        [r.shape, r.rung, f"{r.ms_p50:.4g}", r.rate, shares.of_limit(r), shares.of_sheet(r), r.ratio_to_best_peer or ""]
        for r in found
        if r.kind != rows.ABSENT
    ]
    columns = [said("shape"), "", "ms", said("rate"), said("of the limit"), said("of the data sheet")]
    columns.append(said("over best peer"))
    table(said("measured"), columns, body, shares.why(found))
    if kept:
        console.print(said("rows in {path}").format(path=kept), style="dim")
    if printed := bench.printed(lesson):
        table(said("measured by the program itself"), printed.rows[0], (row.values() for row in printed.rows))
        path = report.save_table(name, printed, device.name())
        console.print(said("rows in {path}").format(path=path), style="dim")
    return sum("NOT TIMED" in line for line in lines)


def stored(name: str, lesson: Lesson) -> None:
    """What an H200 measured for the rungs, beside what the lesson predicts, for a reader without a GPU.

    At the shapes of the predictions; where there are none, at the shape that moves most bytes.
    """
    found = [row for row in rows.read(REPORTS / MACHINE / f"{name}.csv") if row.kind == "rung"]
    if not found:
        return
    shapes = learned.shown_shapes(lesson, found)
    pairs = {(pair.row.rung, pair.row.shape): pair for pair in predictions.compared(lesson, found)}
    at = {(row.rung, row.shape): row for row in found}
    today = Today([(name, lesson)])
    body, old, shown = list[list[str]](), False, list[rows.Row]()
    for shape in shapes:
        before = None
        for rung in lesson.rungs:
            if (row := at.get((rung.__name__, shape))) is None:
                continue
            pair, mark = pairs.get((row.rung, shape)), "*" if today.why_old(row) else ""
            old |= bool(mark)
            times = f"{before.ms_p50 / row.ms_p50:.3g}x" if before else ""
            predicted = [predictions.how(pair.said, language()), f"{pair.ratio:.2f}"] if pair else ["", ""]
            ms = f"{row.ms_p50:.4g}{mark}"
            body.append([shape, row.rung, ms, times, row.rate, shares.of_limit(row), shares.of_sheet(row), *predicted])
            shown.append(row)
            before = row
    columns = [said("shape"), said("rung"), "ms", said("over rung before"), said("rate"), said("of the limit")]
    columns += [said("of the data sheet"), said("predicted"), said("measured / predicted")]
    heading = said("stored from a GPU (none here): {path}").format(path=f"reports/{MACHINE}")
    if len(shapes) == 1:  # it stands above the table, which is then narrower
        heading, columns, body = f"{heading}, {shapes[0]}", columns[1:], [line[1:] for line in body]
    table(heading, columns, body, "\n".join(filter(None, [said(shares.LIMIT), shares.why(shown)])))
    for (name_of, shape), pair in pairs.items():
        if pair.said.why and shape in shapes:
            which = name_of if len(shapes) == 1 else f"{name_of} {shape}"
            words = said("{rung}, why it differs: {why}")
            console.print(words.format(rung=which, why=said(pair.said.why)), highlight=False)
    if old:
        console.print(said("* measured before the code of this rung changed"), style="dim")


def missing_operators(names: list[str]) -> list[str]:
    """A line for each shape of course_ops' operators of which a release lacks a row of today's code, or its ratio."""
    asked, lines = operator_rows.cases(names), list[str]()
    for folder in released():
        found = operator_rows.read(folder / operator_rows.FILE)
        missing = operator_rows.missing(found, asked)
        words = said("{which}: no row of this code")
        lines += [words.format(which=f"{folder.name}: {' '.join(case.key)}") for case in missing]
        known = {case.key for case in asked} - {case.key for case in missing}
        lines += [f"{folder.name}: {operator_bench.said(row)}" for row in found if row.key in known and not row.ratio]
    return lines


def operators(found: list[operator_rows.Row]) -> None:
    """What the rows of course_ops' operators say."""
    body = [
        [
            f"{s.operator} {s.direction}",
            s.shapes,
            s.failed or "",
            f"{s.mean:.2f}" if s.shapes else "",
            f"{s.worst.ratio:.2f} {s.worst.shape}" if s.worst else "",
            f"{s.share_behind:.0%}",
        ]
        for s in operator_rows.summaries(found)
    ]
    titles = ["", said("shapes"), said("failed"), said("mean"), said("worst"), said("under 0.97")]
    table(said("course_ops over its best peer"), titles, body)


def resources(name: str, targets: tuple[chips.Target, ...]) -> None:
    """What the compiler made of the rungs: nothing here needs a GPU."""
    with console.status(said("compiling")):
        try:
            found = compiled.kernels(name, targets)
        except Missing as missing:
            return console.print(told(str(missing)), style="yellow")
    columns = {
        said("rung"): "rung",
        "kernel": "kernel",
        said("target"): "target",
        "warps": "warps",
        "regs": "registers",
        "spills": "spills",
        "shared": "shared",
        "occ": "occupancy",
        "ld": "load_bytes",
        "st": "store_bytes",
    }
    body = [[getattr(k, field) for field in columns.values()] for k in found]
    for line, kernel in zip(body, found, strict=True):
        line[2] = chips.label(kernel.target)
    table(said("compiled (no GPU needed)"), columns, body, said(COMPILED))
    if without := compiled.unfit(name, targets):
        table(
            said("no kernel"), [said("rung"), said("target"), said("why")], ([u.rung, u.target, u.why] for u in without)
        )


def counted(found: list[dict[str, Any]]) -> None:
    """What emulated CUDA kernels ask of memory (counters.rows)."""
    if found:
        columns = [c for c in found[0] if any(row[c] for row in found)]
        table(said("counted on the last check"), columns, ([row[c] for c in columns] for row in found))


def counted_by_ncu(names: list[str]) -> bool:
    """What the GPU's counters say of CUDA kernels, beside what the emulator said; False if they say nothing."""
    with console.status(said("running every rung under ncu")):
        lines = ncu.count(names)
    for line in lines:
        console.print(line, style="dim")
    body = ncu.compared(ncu.path(rows.REPORTS / device.name()), names)
    if body:
        apart = [row for row in body if row["ratio"] != "1.00"]
        heading = said("{count} figures; not the same:").format(count=len(body))
        table(heading, body[0], (row.values() for row in apart))
    return bool(body)


def steps(name: str, lesson: Steps) -> None:
    """Run a lesson of steps; a failed assertion ends it with a traceback and exit code 1."""
    _rule(name, said("tensors on {device}").format(device=device.DEVICE))
    reader = Reader(ROOT / f"{name.replace('.', '/')}.py", lambda part: said(told(part)))
    for step in lesson.steps:
        claim = normal((step.__doc__ or step.__name__).strip().partition("\n\n")[0])
        console.print(f"\n{step.__name__}: {stored_words.told(said(claim))}", style="bold", highlight=False)
        try:
            with retelling(reader):
                measured = step()
        except (Missing, Unsupported) as why:  # here, for want of a package or a compiler
            console.print(f"  {said('left out')}: {told(reader.told(str(why)))}", highlight=False)
            continue
        if measured is not None and measured.rows:
            _step_table(measured.name, measured.rows)
            console.print(stored_words.told(measured.note), highlight=False)
            report.save_table(name, measured, device.name(), step.__name__)
    for folder in report.device_folders():
        for compare in lesson.compares:
            if found := compare(folder):
                _step_table(found.name, found.rows, f"{folder.name}: ")
                console.print(stored_words.told(found.note), highlight=False)


def _step_table(name: str, rows: Sequence[dict[str, Any]], where: str = "") -> None:
    body = (map(report.cell, row.values()) for row in rows)
    table(where + stored_words.told(name), map(stored_words.head, rows[0]), body)


def from_a_gpu(lesson: str, name: str) -> None:
    """Print a step's table as a GPU measured it, on a machine that has none."""
    if found := report.committed(lesson, name):
        heading = said("{name}, as committed from a GPU (none here)").format(name=stored_words.told(name))
        _step_table(heading, found)
        console.print(stored_words.told(report.committed_note(lesson, name)), highlight=False)
    else:
        words = said("checked in the interpreter; no GPU here, and no figures of one are committed yet for {name}")
        print(f"  {words.format(name=repr(stored_words.told(name)))}")
