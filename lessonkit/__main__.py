"""lessonkit: doctor, list, path, run, check, mutants, exercise, bench, fuzz, compile, versions, report, ...

Exit codes: 0 all well, 1 something failed, 2 the command line is wrong, 130 a run was stopped.
"""

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

from lessonkit import pictures
from lessonkit.base import chips, device, renames
from lessonkit.base.errors import Misdeclared, Missing
from lessonkit.base.files import ROOT, write_atomically
from lessonkit.base.words import counted, language, later, listed, retold, said
from lessonkit.commands import (
    evidence,
    exercises,
    languages,
    lock,
    new,
    on_gpu,
    renew,
    running,
    show,
    tracing,
    versions,
    web,
)
from lessonkit.commands.doctor import findings
from lessonkit.cuda import sass, toolchain
from lessonkit.exercise import progress
from lessonkit.judge import counters, fuzz_cases, trace, verify
from lessonkit.judge.sentences import told
from lessonkit.lesson import Broken, Lesson, Steps, discover, kernels, names, title
from lessonkit.measure import (
    dependents,
    fuzz_pool,
    fuzz_runs,
    gpu_mutants,
    ncu,
    operator_cases,
    operator_rows,
    sanitize,
    stale,
)
from lessonkit.modes import compiled
from lessonkit.pages import card, final_report, glossary, guides, paths, report, rung_source, targets

import typer

app = typer.Typer(
    cls=languages.Spoken,
    no_args_is_help=True,
    add_completion=False,
    help="A GPU-kernel course: run, check, time and report its lessons. `--lang zh` says all in Chinese.",
)
# `--help` shows the commands in three panels, each in the order of this file: that in which a learner meets them.
LEARN, MEASURE = later("Learn"), later("Predict and measure")
learn = partial(app.command, rich_help_panel=LEARN)
measure = partial(app.command, rich_help_panel=MEASURE)
write = partial(app.command, rich_help_panel=later("Write lessons, maintain the course"))
app.add_typer(exercises.app, name="exercise", rich_help_panel=LEARN)
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


def _chosen(which: str) -> list[tuple[str, Lesson | Steps | Broken]]:
    return list(discover(_meant(which)))


def _meant(which: str) -> str:
    """What `names` takes for this word: "" of all, today's name of an old one. A word of no lesson is a mistake."""
    which = "" if which == "all" else which
    if names(which):
        return which
    if now := renames.meant("lessons", which):
        show.console.print(said("lesson {old} is now called {new}").format(old=which, new=now))
        return now
    close = ", ".join(_closest(which))
    words = said("no lesson matches {which}. Days: day1 to day5, cuda. The closest: {close}. All: {command}")
    raise typer.BadParameter(words.format(which=repr(which), close=close, command=f"{exercises.COURSE} list"))


def _watched(which: str, rung: str) -> str:
    """As _meant, of operators too: course_ops, or course_ops.softmax. A rung that none of these has is a mistake."""
    operators = which.partition(".")[0] == compiled.COURSE_OPS
    which = which if operators else _meant(which)
    found = operator_cases.lessons(which)
    if operators and not found:
        known = sorted({operator.name for operator in operator_rows.operators()})
        words = said("course_ops has no {wrong}. It has {known}")
        raise typer.BadParameter(words.format(wrong=which.partition(".")[2], known=", ".join(known)))
    lessons = () if operators or not rung else kernels(which)
    if rung and not any(rung == each.__name__ for _, lesson in (*found, *lessons) for each in lesson.rungs):
        none, here = (
            said("{option}: no lesson has a rung of that name"),
            said("{option}: {which} has no rung of that name"),
        )
        raise typer.BadParameter((here if which else none).format(option=f"--rung {rung}", which=which))
    return which


def _closest(which: str) -> list[str]:
    """The three lessons whose names are most like this one."""

    def likeness(name: str) -> float:
        stem = name.partition(".")[2]
        spelt = (name, stem, stem.partition("_")[2])
        return max(difflib.SequenceMatcher(None, which, each).ratio() for each in spelt)

    return sorted(names(), key=likeness, reverse=True)[:3]


def _with_kernels(which: str, failed: list[str]) -> Iterator[tuple[str, Lesson]]:
    """The lessons chosen that have rungs. One that cannot be imported is a failure, steps alone are said to be such."""
    chosen = _chosen(which)
    for name, lesson in chosen:
        if isinstance(lesson, Broken):
            failed.append(_not_imported(name, lesson))
        elif isinstance(lesson, Lesson):
            yield name, lesson
    if all(isinstance(lesson, Steps) for _, lesson in chosen):
        words = said("Steps without rungs; running them checks what they claim: {command}")
        show.console.print(words.format(command=f"{exercises.COURSE} run {which}"))


def _lessons_and_operators(which: str, failed: list[str]) -> list[tuple[str, Lesson]]:
    """The lessons chosen that have rungs, and the operators: each direction of one as a lesson of one rung."""
    lessons = () if which.partition(".")[0] == compiled.COURSE_OPS else _with_kernels(which, failed)
    return [*lessons, *operator_cases.lessons(which)]


def _one(which: str) -> tuple[str, Lesson | Steps]:
    """The one lesson that is named."""
    (name, found), *more = _chosen(which)
    if more:
        several = ", ".join([name, *(other for other, _ in more)])
        words = said("{which} names {count} lessons, expected one: {several}")
        raise typer.BadParameter(words.format(which=repr(which), count=len(more) + 1, several=several))
    if isinstance(found, Broken):
        _end([_not_imported(name, found)])
    return name, found


def _not_imported(name: str, lesson: Broken) -> str:
    return said("{name}: cannot be imported: {error}").format(name=name, error=lesson.error)


def _card(name: str) -> chips.Chip | None:
    """The card of this name, if it is one. What the table does not have is said in the words of the command line."""
    try:
        return chips.find(name) if name else None
    except ValueError as why:
        raise typer.BadParameter(str(why)) from None


def _warn(routes: Iterable[paths.Route]) -> None:
    for line in (line for route in routes for line in route.warnings):
        show.console.print(said("warning: {line}").format(line=line), style="yellow")


def _say_written(files: Sequence[Path]) -> None:
    """One line that names the first three files that a command has changed; nothing if there are none."""
    if files:
        shown = listed(str(path.relative_to(ROOT)) for path in files[:3])
        more = said(" (and {count} more)").format(count=len(files) - 3) if len(files) > 3 else ""
        show.console.print(said("wrote {path}").format(path=shown + more), style="dim", highlight=False)


def _end(failed: list[str]) -> NoReturn:
    for line in failed:
        show.console.print(line, style="red")
    raise typer.Exit(int(bool(failed)))


# ---- Learn ----------------------------------------------------------------------------------------------------------


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
    _warn(routes[word] for word in ([name] if name else routes))
    if not name:
        page = guides.GUIDES[language()].removeprefix("README")
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
    page = f"paths/{name}{guides.GUIDES[language()].removeprefix('README')}"
    heading = said("{name}: {page}").format(name=route.title[language()], page=page)
    show.table(heading, [said("part"), said("time"), said("exercises passed")], body)
    if waiting := next((exercise for exercise in route.exercises if exercise.name not in passed), None):
        command = f"{exercises.COURSE} exercise next {waiting.short}"
        show.console.print(said("Next exercise: {command}").format(command=command))


@learn(name="list")
def list_lessons(which: Which = "") -> None:
    """List lessons and their rungs in reading order."""
    body = []
    for name, lesson in _chosen(which):
        if isinstance(lesson, Broken):
            body.append([name, _not_imported(name, lesson), ""])
            continue
        parts = lesson.rungs if isinstance(lesson, Lesson) else lesson.steps
        body.append([name, said(title(name)), " > ".join(p.__name__ for p in parts)])
    show.table(said("lessons"), [said("name"), said("about"), said("rungs or steps")], body)


learn()(languages.read)


@learn()
def run(
    which: Which = "",
    again: Annotated[bool, typer.Option("--again", help="Start over, also where a stopped run has been.")] = False,
) -> None:
    """Run lessons in order, each as its own script, and say what ran, what was left out and why.

    A run that was stopped goes on where it was. Ctrl-C ends the lessons that run; the exit code is then 130.
    """
    running.run(which, _chosen(which), again)


@learn()
def check(which: Which = "") -> None:
    """Ask all that the tests ask of a lesson: rungs against PyTorch, mutants, machine code, guides."""
    failed: list[str] = []
    for name, lesson in _with_kernels(which, failed):
        show.console.rule(said(title(name)))
        try:
            wrong = show.checks(lesson)
        except Exception as error:  # of a rung, of a reference that is not written yet, of a compiler
            said_by = "" if isinstance(error, Misdeclared) else f"{name}: "
            failed.append(f"{said_by}{show.raised(error)}")
            asked = [q for q in verify.questions(name, lesson) if q.kind in ("listed", "declared")]
            failed += show.questions(asked)
            continue
        if wrong:
            failed.append(said("{name}: checks failed: {count}").format(name=name, count=wrong))
        failed += show.questions(q for q in verify.questions(name, lesson) if q.kind not in show.CHECKED)
    _end(failed)


@learn(name="words")
def explain_words(
    which: Annotated[str, typer.Argument(help="A word, or a lesson for all words of its text; nothing: all.")] = "",
) -> None:
    """Explain the words of the course: `words SM`, `words lesson05_softmax`."""
    if not (found := list(glossary.explained(which))):
        words = said("{which} is no word of the glossary and no lesson: `words` lists the words")
        _end([words.format(which=repr(which))])
    first = {term: lesson for lesson, terms in glossary.new().items() for term in terms}
    body = ([*dict.fromkeys([said(t.term), t.term])] for t in found)
    named = (" ".join(each) for each in body)
    lines = ([name, said(t.says), first.get(t, "").partition(".")[2]] for name, t in zip(named, found, strict=True))
    show.table(said("words of the course"), [said("word"), said("what it means"), said("first in")], lines)


@learn(name="trace")
def trace_rung(
    lesson: Annotated[str, typer.Argument(help="lesson01_vector_add")],
    rung: Annotated[str, typer.Argument(help="One of its rungs: add_block; without it they are listed.")] = "",
    shape: Annotated[list[str] | None, typer.Argument(help="Sizes: n=300; others as in the smallest check.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write an HTML page with a slider over the steps here.")] = None,
) -> None:
    """Show step by step which program of a rung reads and writes what, in the interpreter: `n=300` says how much."""
    exercises.without_gpu()
    name, found = _one(lesson)
    if isinstance(found, Steps):
        raise typer.BadParameter(said("{name} has steps and no rungs: there is nothing to trace").format(name=name))
    try:
        heading, steps = tracing.traced(found, rung, shape or [])
    except ValueError as why:
        raise typer.BadParameter(f"{name}: {why}") from None
    if page:
        return tracing.write_page(page, heading, steps)
    tracing.print_steps(heading, steps)


@learn()
def diff(
    lesson: Annotated[str, typer.Argument(help="lesson01_vector_add")],
    old: Annotated[str, typer.Argument(help="One of its rungs: add_element; without it they are listed.")] = "",
    new: Annotated[str, typer.Argument(help="The rung to compare it with: add_block.")] = "",
) -> None:
    """Show what changes from one rung to another: the wrapper and the kernels that it launches."""
    name, found = _one(lesson)
    if isinstance(found, Steps):
        raise typer.BadParameter(said("{name} has steps and no rungs: there is nothing to compare").format(name=name))

    def source(rung: str) -> list[str]:
        try:
            return rung_source.lines(name, trace.rung(found, rung).__name__, said)
        except ValueError as why:
            raise typer.BadParameter(f"{name}: {why}") from None

    for line in difflib.unified_diff(source(old), source(new), old, new, lineterm="", n=2):
        show.console.print(
            line, style="green" if line[0] == "+" else "red" if line[0] == "-" else None, highlight=False
        )


@learn()
def picture(
    which: Which,
    out: Annotated[Path, typer.Option("--out", help="The folder that gets one SVG a picture.")] = Path("pictures"),
) -> None:
    """Draw the explanatory pictures of lessons as SVG files: `picture lesson05_softmax --lang zh`."""
    drawn = [each for name, _ in _chosen(which) for each in pictures.of(name)]
    for each in drawn:
        path = out / f"{each.lesson.partition('.')[2]}.{each.name}.svg"
        write_atomically(path, each.svg(language()))
        show.console.print(f"{path}: {each.title(language())}")
    if not drawn:
        _end(
            [
                said("no lesson of {which} names a picture: a lesson does so by `pictures` of its `about`").format(
                    which=repr(which)
                )
            ]
        )


@learn()
def predict(
    lesson: Annotated[str, typer.Argument(help="lesson05_softmax")],
    rung: Annotated[str, typer.Argument(help="One of its rungs; nothing: you are asked for each.")] = "",
    words: Annotated[
        list[str] | None, typer.Argument(help="1.2ms, 3TB/s, 85%, x1.5, 2least; before it sizes: M=4096.")
    ] = None,
) -> None:
    """Write down what you expect of a rung before you look: `predict lesson05_softmax softmax_row x2`.

    ms, us, TB/s, TFLOP/s, % of the limit, x: times as fast as the rung before, least: times the least bytes.
    """
    name, found = _one(lesson)
    if isinstance(found, Steps):
        raise typer.BadParameter(said("{name} has steps and no rungs: there is nothing to predict").format(name=name))
    try:
        evidence.predict(name, found, rung, words or [])
    except ValueError as why:
        raise typer.BadParameter(f"{name}: {why}") from None


@learn(name="quiz")
def take_quiz(
    name: Annotated[str, typer.Argument(help="day1 to day5, cuda; nothing: which there are.")] = "",
    part: Annotated[str, typer.Argument(help="before or after: the same skills, other questions.")] = "before",
    answers: Annotated[str, typer.Option(help='One a question, with commas: "1, 2, 3, a". Nothing is asked.')] = "",
    only_show: Annotated[bool, typer.Option("--show", help="Print the questions and ask nothing.")] = False,
) -> None:
    """Take the short test of a day, before it and after it: predict a number, find the bug, choose the repair.

    Answers are judged by the lessons' own numbers and kernels. `progress` shows before and after side by side.
    """
    try:
        if not name:
            return evidence.quizzes()
        if only_show:
            return evidence.show_questions(name, part)
        evidence.take(name, part, answers)
    except ValueError as why:
        raise typer.BadParameter(str(why)) from None


@learn(name="progress")
def show_progress(
    files: Annotated[list[Path] | None, typer.Argument(help="Files of learners: a summary of the class.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is kept as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write it to this file, for your teacher.")] = None,
    name: Annotated[str, typer.Option(help="Your name in that file.")] = "",
) -> None:
    """Show your predictions against what was measured, tries and hints of exercises, and quizzes before and after."""
    if files:
        try:
            return evidence.of_class(files)
        except ValueError as why:
            raise typer.BadParameter(str(why)) from None
    if as_json or out:
        return evidence.write(name, out)
    evidence.mine()


@learn(name="web")
def web_edition(
    build: Annotated[Path | None, typer.Option(help="Write the book to this folder instead of serving it.")] = None,
    port: Annotated[int, typer.Option(help="Serve on this port of the loopback address; 0: any free one.")] = 0,
) -> None:
    """Build the course as a book in English and Chinese, and serve it on this machine."""
    raise typer.Exit(web.run(build, port))


# ---- Predict and measure --------------------------------------------------------------------------------------------


@measure()
def chip(
    name: Annotated[
        str, typer.Argument(help='Your card, "RTX 4090"; nothing: COURSE_GPU\'s, this GPU, or the table.')
    ] = "",
    which: Which = "",
) -> None:
    """Show what the lessons predict for a card, by its data sheet: its limits, its roofline, and each rung's time."""
    mine = _card(name or os.environ.get(chips.CHOICE, "") or (device.name() if device.HAS_GPU else ""))
    legend = said(
        "TB/s of memory; L2 in MB; fp32 to fp8 in TFLOP/s; shared: bytes of shared memory, of a block and of an SM; "
        "registers and threads of an SM; all from the data sheets"
    )
    titles = [*map(said, targets.CARD_TITLES)]
    show.table(said("cards"), titles, targets.cards([mine] if mine else chips.CHIPS.values(), language()), legend)
    if not mine:
        words = said("What is predicted for one of them: {command}")
        show.console.print(words.format(command=f'{exercises.COURSE} chip "RTX 4090"'))
        return
    failed: list[str] = []
    lessons = list(_with_kernels(which, failed))
    titles = [said("lesson"), said("largest shape"), said("FLOPs per byte"), said("TFLOP/s at most")]
    titles += [said("us at least"), said("bound by")]
    show.table(said("{card}: roofline").format(card=mine.name), titles, targets.roofline(mine, lessons, language()))
    for lesson, each in lessons:
        if body := [rung.line for rung in card.rungs(mine, lesson, each)]:
            heading = said("{card}, predicted, not measured: {lesson}").format(card=mine.name, lesson=lesson)
            show.table(heading, [*map(said, card.TITLES)], body)
    show.console.print(
        said(
            "A prediction is a share of the data sheet's rate, as the lesson says it of an H200; what `bench` measures "
            "on your card is held against a copy, or cuBLAS, in the same rounds."
        )
    )
    if not mine.compiled:
        words = said("Nothing is compiled for {target}: no registers and no occupancy.")
        show.console.print(words.format(target=chips.label(mine.target)))
    _end(failed)


@measure(name="compile")
def compile_lessons(which: Which = "") -> None:
    """Compile every rung for NVIDIA and AMD (no GPU needed), test its claims, and write reports/compiled.

    All lessons, and `course_ops`: the operators too. With COURSE_GPU, for that card alone, and nothing is written.
    """
    broken: list[str] = []
    mine = _card(os.environ.get(chips.CHOICE, ""))
    if mine and not mine.compiled:
        words = said("{card}: nothing is compiled for {target}")
        raise typer.BadParameter(words.format(card=f"{chips.CHOICE}={mine.name}", target=chips.label(mine.target)))
    wanted = (mine.target,) if mine else compiled.TARGETS
    chosen = [] if which == compiled.COURSE_OPS else list(_with_kernels(which, broken))
    names = [name for name, lesson in chosen if not lesson.extension]
    if which in ("", "all", compiled.COURSE_OPS):
        names.insert(0, compiled.COURSE_OPS)  # takes longest
    with show.console.status(said("compiling")):
        compiled.compile_ahead(names, wanted)
    claimed = {name: lesson.claimed() for name, lesson in chosen}
    written: list[Path] = []
    for name in dict.fromkeys([*claimed, *names]):
        try:
            show.resources(name, wanted)
        except RuntimeError as why:
            broken.append(str(why))
            continue
        with suppress(Missing):  # show.resources has said what
            broken += sass.broken_claims(name, claimed.get(name, {}), compiled.kernels(name, wanted))
            if not mine:
                written += report.save_compiled(name)
    if not mine:
        _say_written([*written, *report.write()])
    _end(broken)


@measure()
def count(
    which: Which = "cuda",
    by_ncu: Annotated[
        bool, typer.Option("--ncu", help="On a GPU: ask its counters by Nsight Compute instead.")
    ] = False,
) -> None:
    """Count what emulated CUDA kernels ask of memory, test what lessons say of it, and write reports/emulated."""
    broken: list[str] = []
    chosen = [(name, lesson) for name, lesson in _with_kernels(which, broken) if lesson.extension]
    if not chosen and not broken:
        raise typer.BadParameter(said("no CUDA C++ lesson matches {which}").format(which=repr(which)))
    if by_ncu:
        if why := ncu.lacks():
            show.console.print(told(why))
            return
        if not show.counted_by_ncu([name for name, _ in chosen]):
            broken.append(said("ncu counted nothing"))
        _say_written(report.write())
        _end(broken)
    why = said("On this machine kernels run on the GPU; with CUDA_VISIBLE_DEVICES= they are emulated and counted.")
    if device.HAS_GPU or (why := toolchain.lacks("g++", "Python.h", "ninja")):
        show.console.print(told(why))
        return
    written: list[Path] = []
    for name, lesson in chosen:
        found = counters.traffic(lesson)
        broken += counters.broken_counts(name, lesson, found)
        show.counted(lines := counters.rows(found))
        written += report.save_emulated(name, lines)
    _say_written([*written, *report.write()])
    _end(broken)


@measure()
def bench(
    which: Which = "",
    operators: Annotated[
        list[str] | None, typer.Argument(help="After `ops`: operators of course_ops (softmax), or all.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="`ops` stops after so many; the same command goes on.")] = 60.0,
    workers: Annotated[int, typer.Option(help="`ops`: processes that compile ahead of what is timed.")] = 0,
    release: Annotated[
        bool, typer.Option("--release", help="`ops`: list the shapes without a row of this code.")
    ] = False,
) -> None:
    """Time rungs beside their peers and write rows, pages and plots; `bench ops`: course_ops at the shapes of models.

    Without a GPU it says so and writes nothing.
    """
    if which == "ops":
        return _bench_operators(operators or [], minutes, workers, release)
    if operators:
        words = said("{names}: one name of lessons; operators are named after `bench ops`")
        raise typer.BadParameter(words.format(names=" ".join(operators)))
    which = _meant(which)
    if not device.HAS_GPU:
        show.console.print(
            said("No GPU was found: interpreter timings say nothing about speed, so nothing is written.")
        )
        return
    failed: list[str] = []
    for name, lesson in _with_kernels(which, failed):
        if wrong := show.timed(name, lesson):
            failed.append(f"{name}: {wrong} NOT TIMED")
    _say_written(report.write())
    _end(failed)


def _bench_operators(names: list[str], minutes: float, workers: int, release: bool) -> None:
    """Time what of course_ops has no row of today's code, or with `release` list it and fail if there is any."""
    known = {operator.name for operator in operator_rows.operators()}
    if wrong := sorted(set(names) - known):
        words = said("course_ops has no {wrong} to be timed. It has {known}")
        raise typer.BadParameter(words.format(wrong=", ".join(wrong), known=", ".join(sorted(known))))
    if release:
        lines = show.missing_operators(names)
        _end(lines)
    if not device.HAS_GPU:
        show.console.print(said("No GPU was found: nothing is timed. `bench ops --release` lists what has no row."))
        return
    on_gpu.timed(names, minutes, workers)


@measure(name="report")
def write_report(
    which: Annotated[str, typer.Argument(help="Nothing, or `final`: the report that day 5 ends with.")] = "",
    operator: Annotated[str, typer.Option(help="The operator that the final report is about.")] = "",
) -> None:
    """Rebuild every page, plot and results block from the rows; `report final`: the final report."""
    if which not in ("", "final"):
        words = said("{which}: there is `report`, and `report final`")
        raise typer.BadParameter(words.format(which=repr(which)))
    if which:
        try:
            made = final_report.write_report(operator)
        except ValueError as why:
            raise typer.BadParameter(str(why)) from None
        for path in made:
            show.console.print(said("wrote {path}").format(path=path.relative_to(ROOT)))
        return
    with show.console.status(said("making pages")):
        changed = report.write()
    for path in changed:
        show.console.print(said("wrote {path}").format(path=path.relative_to(ROOT)))
    _warn(paths.routes())
    if old := stale.old():
        words = said("{count} rows are to be measured again; the pages mark them, `stale` says why.")
        show.console.print(words.format(count=len(old)), style="yellow")


@measure(name="stale")
def list_stale(
    release: Annotated[
        bool, typer.Option("--release", help="Of the GPU that a release is measured on; old rows are exit code 1.")
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Add what this machine's compilers make of the rows.")
    ] = False,
) -> None:
    """List measured rows whose code has changed or which lack a peer's version; machine code is compared first."""
    if shown := stale.show_equal():
        words = said("{count} rows: machine code shown to be equal, and kept so in their files")
        show.console.print(words.format(count=shown))
        _say_written(report.write())
    if record:
        words = said("{count} rows: what the compilers of this machine make of them, added")
        show.console.print(words.format(count=stale.record()))
    folders = stale.released() if release else stale.device_folders()
    old = stale.old(folders)
    body = ([each.device, *each.named, stale.in_words(each.why), each.row.commit] for each in old)
    titles = [said("device"), said("lesson"), said("rung"), said("shape"), said("why"), said("measured at")]
    show.table(counted(len(old), said("1 row to measure again"), said("{count} rows to measure again")), titles, body)
    tables = stale.old_tables(folders)
    for line in tables:
        show.console.print(said("old table: {line}").format(line=line))
    verdicts = list(gpu_mutants.old(kernels()))
    for line in verdicts:
        show.console.print(said("no verdict of today on a mutant: {line}").format(line=line))
    raise typer.Exit(int(release and bool(old or tables or verdicts)))


@measure(name="renew")
def measure_again(
    minutes: Annotated[float, typer.Option(help="Stop after so many; the same command goes on.")] = 25.0,
    workers: Annotated[int, typer.Option(help="So many processes call and draw at a time; 0: one a core.")] = 0,
    share: Annotated[
        str, typer.Option(help="2/3: the second third, where CUDA_VISIBLE_DEVICES gives each run a GPU of its own.")
    ] = "1/1",
) -> None:
    """Measure again on this GPU what `stale` lists: rows, tables, mutants, operators; then draw random cases.

    What has to be compiled is called first, many at a time. Of the time left before the random cases, a fifth goes to
    sanitizers and neighbours that were not run on today's code. The cheapest come first. Each gets at most a quarter of
    that fifth. Afterwards: `report`, and `stale --record`.
    """
    nth, _, of = share.partition("/")
    if not (nth.isdecimal() and of.isdecimal() and 1 <= int(nth) <= int(of)):
        raise typer.BadParameter(said("--share is {share}, expected 1/2 for the first of two").format(share=share))
    if not device.HAS_GPU:
        show.console.print(said("No GPU was found: nothing is measured. `stale` lists what is old."))
        return
    workers = workers or max(1, len(os.sched_getaffinity(0)) // int(of))
    _end(renew.run(minutes, workers, partial(print, flush=True), int(nth), int(of)))


@measure(name="mutants")
def judge_mutants(
    which: Which = "",
    again: Annotated[bool, typer.Option("--again", help="Judge also those that have a verdict of today.")] = False,
    workers: Annotated[int, typer.Option(help="So many at a time, each in a process of its own.")] = 4,
) -> None:
    """Judge wrong kernels that only this kind of GPU runs, each in a process of its own, and keep the verdicts.

    `check` judges all others, on any machine.
    """
    which = _meant(which)
    if not device.HAS_GPU:
        show.console.print(said("No GPU was found: these mutants are of kernels that run on one kind of GPU only."))
        return
    failed: list[str] = []
    lessons = list(_with_kernels(which, failed))
    _end([*failed, *on_gpu.judged(lessons, again, workers)])


@measure(name="sanitize")
def run_sanitizers(
    which: LessonOrOperator = "",
    tool: Annotated[list[str] | None, typer.Option(help=f"Only this: {', '.join(sanitize.ALL)}.")] = None,
    rung: Annotated[
        str, typer.Option(help="Only this rung of the lesson, or this direction of the operator: forward, backward.")
    ] = "",
    shape: Annotated[
        str, typer.Option(help="One case in place of the checks: 'B=1 H=3 S=384 D=128 causal=True'.")
    ] = "",
    sms: Annotated[
        int, typer.Option(help="Fill so many SMs: with few, a small shape gives a persistent program several tiles.")
    ] = 0,
) -> None:
    """Run every kernel under compute-sanitizer's tools and Triton's own; a report needs a reason in sanitize.toml.

    Lessons by their checks, operators by small cases that launch each kernel of their dispatch. Rows are kept.
    """
    tools = tool or [*sanitize.ALL]
    if unknown := [each for each in tools if each not in sanitize.ALL]:
        known = ", ".join(sanitize.ALL)
        raise typer.BadParameter(said("{what}: there are {known}").format(what=f"--tool {unknown[0]}", known=known))
    which = _watched(which, rung)
    try:
        part = sanitize.Part(rung, sanitize.shape_of(shape), sms)
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from None
    if not device.HAS_GPU:
        show.console.print(sanitize.lacks(tools[0]))
        return
    failed: list[str] = []
    lessons = _lessons_and_operators(which, failed)
    _end([*failed, *on_gpu.sanitized(lessons, tools, part)])


@measure(name="beside")
def repeat_beside(
    which: LessonOrOperator = "",
    seconds: Annotated[float, typer.Option(help="For each rung, alone and again beside the other process.")] = 5.0,
    rung: Annotated[
        str, typer.Option(help="Only this rung of the lesson, or this direction of the operator: forward, backward.")
    ] = "",
    alone: Annotated[
        bool, typer.Option(help="Count alone first. On a GPU that others use meanwhile nobody is alone.")
    ] = True,
) -> None:
    """Repeat rungs with barriers, spinning or early launch beside a process that uses the same GPU; write rows.

    Operators too, by large cases that launch each kernel of their dispatch.
    """
    which = _watched(which, rung)
    if not device.HAS_GPU:
        show.console.print(said("No GPU was found: there is nothing that two processes could share."))
        return
    failed: list[str] = []
    lessons = _lessons_and_operators(which, failed)
    _end([*failed, *on_gpu.repeated(lessons, seconds, rung, alone)])


# ---- Write lessons, maintain the course -----------------------------------------------------------------------------


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
    try:
        made = new.lesson(name, problem, _one(after)[0])
    except ValueError as why:
        raise typer.BadParameter(str(why)) from None
    for path in made:
        show.console.print(said("wrote {path}").format(path=path.relative_to(ROOT)))
    stem = name.partition(".")[2]
    command = f"{exercises.COURSE} check {stem}"
    show.console.print(said("What it still lacks says: {command}").format(command=command))
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
        _end([words.format(function=function)])
    if inside := dependents.functions_of(function):
        words = said("{module} is a module: name one of its functions, {functions}")
        _end([words.format(module=function, functions=", ".join(inside))])
    with show.console.status(said("reading what lessons and operators reach")):
        found = dependents.dependents(function)
        places = [] if found else dependents.defined(function)
        close = [] if found or places else dependents.closest(function)
    if places:
        words = said("no lesson and no operator reaches {function} of {files}")
        _end([words.format(function=function, files=", ".join(map(str, places)))])
    if not found:
        words = said("there is no function {function}. The closest: {close}")
        _end([words.format(function=function, close=", ".join(close) or said("none"))])
    body = []
    for each in found:
        through = ", ".join(said(part) for part in each.through)
        count = f"{each.rows} ({operator_rows.FILE})" if each.is_operator and each.rows else each.rows or ""
        body.append([each.function, each.lesson, through, count])
    measured = {each.lesson: (each.is_operator, each.rows) for each in found}
    operators, lines = (sum(column) for column in zip(*measured.values(), strict=True))
    lessons = len(measured) - operators
    parts = [
        counted(lessons, said("1 lesson"), said("{count} lessons")),
        counted(operators, said("1 operator"), said("{count} operators")),
        counted(lines, said("1 row"), said("{count} rows")),
    ]
    heading = said("what depends on {function}: {what}").format(function=function, what=listed(parts))
    show.table(heading, [said("function"), said("lesson or operator"), said("through"), said("rows")], body)


write()(languages.translate)


@write(name="fuzz")
def fuzz_operators(
    operators: Annotated[list[str] | None, typer.Argument(help="Of course_ops (softmax); nothing: all.")] = None,
    cases: Annotated[
        int, typer.Option(help="For each operator, direction and mode; earlier runs of the same code count.")
    ] = 500,
    seconds: Annotated[float, typer.Option(help="Stop after so many; the same command goes on.")] = 600.0,
    workers: Annotated[
        int,
        typer.Option(
            help="Processes that run cases in bursts; 0: one case after another; -1: one a core, without a GPU 0."
        ),
    ] = -1,
    mode: Annotated[
        list[str] | None, typer.Option(help="cpu (PyTorch computes), interpreted or gpu; nothing: what there is.")
    ] = None,
    replay: Annotated[str, typer.Option(help="Run this case, as JSON, and draw none.")] = "",
) -> None:
    """Call course_ops with random cases: shapes, strides, dtypes, values, options, and calls that must be refused.

    Counts are added to reports/fuzz.csv. Each fault's smallest case is added to tests/fuzz/found.jsonl.
    """
    case = _case(replay) if replay else None
    names, modes = operators or [], mode or (["gpu"] if device.HAS_GPU else ["cpu", "interpreted"])
    known = fuzz_cases.questions()
    if wrong := sorted({*names, *([case["operator"]] if case else [])} - set(known)):
        words = said("course_ops has no {wrong}. It has {known}")
        raise typer.BadParameter(words.format(wrong=", ".join(wrong), known=", ".join(sorted(known))))
    if wrong := sorted(set(modes) - set(fuzz_cases.MODES)):
        words = said("{wrong} is no mode: {known}")
        raise typer.BadParameter(words.format(wrong=", ".join(wrong), known=", ".join(fuzz_cases.MODES)))
    if "gpu" in modes and not device.HAS_GPU:
        raise typer.BadParameter(said("mode gpu needs a GPU, and none was found"))
    failed: list[str] = []
    if case:
        for each in modes:
            with fuzz_runs.Worker(each) as worker:
                outcome = worker.ask(case)
            print(f"{each}: {outcome.kind} {outcome.said}", flush=True)
            failed += [] if outcome.well else [f"{each}: {outcome.kind}"]
        _end(failed)
    try:
        workers = (len(os.sched_getaffinity(0)) if device.HAS_GPU else 0) if workers < 0 else workers
        say = partial(print, flush=True)
        if workers:
            failures = fuzz_pool.run(names, modes, cases, seconds, workers, say)
        else:
            failures = fuzz_runs.run(names, modes, cases, seconds, say)
    except Missing as missing:
        _end([str(missing)])
    title = [said("operator"), said("direction"), said("mode"), said("cases"), said("of older code"), said("shapes")]
    title += [said("kernels"), said("refused"), said("wrong"), said("crashes"), said("false alarms"), said("seconds")]
    fuzzed = [[c.operator, c.direction, c.mode, c.cases, older, c.shapes, c.kernels, c.refused, c.wrong, c.crashes,
               c.false_alarms, c.seconds] for c, older in fuzz_runs.table(fuzz_runs.asked(names, modes))]  # fmt: skip
    show.table(said("cases of today's code"), title, fuzzed)
    _end([f"{each.case['operator']}: {each.fault}" for each in failures])


def _case(text: str) -> fuzz_cases.Case:
    """The case that `--replay` names. What is no case is said in the words of the command line."""
    try:
        case: fuzz_cases.Case = json.loads(text)
    except ValueError as why:
        raise typer.BadParameter(said("--replay takes a case as JSON: {why}").format(why=why)) from None
    if not isinstance(case, dict) or (lacks := [key for key in fuzz_cases.KEYS if key not in case]):
        words = said("--replay takes a case as tests/fuzz/found.jsonl has it; this one lacks {keys}")
        raise typer.BadParameter(words.format(keys=", ".join(lacks if isinstance(case, dict) else fuzz_cases.KEYS)))
    if case["direction"] not in fuzz_cases.DIRECTIONS:
        words = said("{wrong} is no direction: {known}")
        raise typer.BadParameter(words.format(wrong=repr(case["direction"]), known=", ".join(fuzz_cases.DIRECTIONS)))
    return case


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
    which = _meant(which)
    pairs = [p for p in versions.PAIRS if (not torch or p[0] in torch) and (not triton or p[1] in triton)]
    wanted = [t for t in compiled.TARGETS if not target or str(t) in target]
    if not pairs or len(wanted) < len({*(target or ())}):
        known = "; ".join([*map(versions.label, versions.PAIRS), ", ".join(map(str, compiled.TARGETS))])
        what = said("{a}, {b} or {c}").format(a="--torch", b="--triton", c="--target")
        raise typer.BadParameter(said("{what}: there are {known}").format(what=what, known=known))
    if why := toolchain.lacks("Triton"):
        _end([told(why)])
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
        _say_written(report.write())
    _end(failed)


@write(name="lock")
def lock_requirements(
    upgrade: Annotated[bool, typer.Option(help="Take the newest versions that fit, not those of the lists.")] = False,
) -> None:
    """Write requirements/, the versions and hashes of all that course.py installs, from pyproject.toml. Needs uv."""
    try:
        for path in lock.lock(upgrade):
            show.console.print(str(path.relative_to(ROOT)))
    except (Missing, subprocess.CalledProcessError) as why:
        _end([str(why)])


if __name__ == "__main__":
    try:
        app(prog_name=exercises.COURSE)
    except progress.Damaged as error:
        sys.exit(str(error))
    except OSError as error:
        if not error.filename:
            raise
        sys.exit(f"{error.filename}: {error.strerror}")
