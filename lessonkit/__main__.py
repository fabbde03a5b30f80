"""lessonkit: doctor, list, path, run, check, mutants, exercise, bench, fuzz, compile, versions, report, ...

Exit codes: 0 all well, 1 something failed, 2 the command line is wrong, 130 a run was stopped.
"""

import difflib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, NoReturn

from lessonkit.base import chips, device, renames
from lessonkit.base.cpp_text import definitions, reached
from lessonkit.base.errors import Misdeclared, Missing
from lessonkit.base.files import REPORTS, ROOT, environment
from lessonkit.commands import course_run, exercises, new, show, tracing, versions
from lessonkit.commands.doctor import findings
from lessonkit.commands.parallel import run_scripts
from lessonkit.cuda import build, sass, toolchain
from lessonkit.exercise import progress
from lessonkit.judge import counters, fuzz, verify
from lessonkit.lesson import Broken, Lesson, Steps, discover, kernels, names, title
from lessonkit.measure import dependents, fuzzing, gpu_mutants, ncu, operator_bench, operator_rows, rows, stale
from lessonkit.modes import compiled
from lessonkit.pages import final_report, glossary, paths, report, targets, trace_page

import typer

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="A GPU-kernel course: run, check, time and report its lessons."
)
app.add_typer(exercises.app, name="exercise")
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # what Ctrl-C, kill, and a closed terminal send
Which = Annotated[
    str,
    typer.Argument(
        help="A day (day2, cuda), a lesson (lesson05_softmax, 02_vector_add), a part of names (softmax), or all."
    ),
]


def _chosen(which: str) -> list[tuple[str, Lesson | Steps | Broken]]:
    found = list(discover("" if which == "all" else which))
    if not found and (now := renames.meant("lessons", which)):
        show.console.print(f"lesson {which} is now called {now}")
        found = list(discover(now))
    if not found:
        close = ", ".join(_closest(which))
        raise typer.BadParameter(f"no lesson matches {which!r}. The closest: {close}. All: {exercises.COURSE} list")
    return found


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
            failed.append(f"{name}: cannot be imported: {lesson.error}")
        elif isinstance(lesson, Lesson):
            yield name, lesson
    if all(isinstance(lesson, Steps) for _, lesson in chosen):
        show.console.print(f"Steps without rungs; running them checks what they claim: {exercises.COURSE} run {which}")


def _warn(routes: Iterable[paths.Route]) -> None:
    for line in (line for route in routes for line in route.warnings):
        show.console.print(f"warning: {line}", style="yellow")


def _end(failed: list[str]) -> NoReturn:
    for line in failed:
        show.console.print(line, style="red")
    raise typer.Exit(int(bool(failed)))


@app.command()
def doctor() -> None:
    """Say what this machine has, what it can run, and the command that mends what is missing."""
    found = findings()
    show.table(
        "this machine",
        ["", "", "found", "what to do"],
        ([("ok" if f.ok else "--"), f.name, f.value, "" if f.ok else f.mend] for f in found),
    )
    raise typer.Exit(int(any(f.required and not f.ok for f in found)))


@app.command(name="list")
def list_lessons(which: Which = "") -> None:
    """List lessons and their rungs in reading order."""
    body = []
    for name, lesson in _chosen(which):
        if isinstance(lesson, Broken):
            body.append([name, f"cannot be imported: {lesson.error}", ""])
            continue
        parts = lesson.rungs if isinstance(lesson, Lesson) else lesson.steps
        body.append([name, title(name), " > ".join(p.__name__ for p in parts)])
    show.table("lessons", ["name", "about", "rungs or steps"], body)


@app.command(name="path")
def show_path(name: Annotated[str, typer.Argument(help="30min, 1h, ...; nothing: what there is.")] = "") -> None:
    """Show a path for the time that you have: its parts, and how many of their exercises have passed."""
    routes = {route.name: route for route in paths.routes()}
    if name not in ("", *routes):
        raise typer.BadParameter(f"no path is called {name!r}; there are {', '.join(routes)}")
    _warn(routes[word] for word in ([name] if name else routes))
    if not name:
        body = [[r.name, r.ends["en"], f"paths/{r.name}.md"] for r in routes.values()]
        return show.table("paths", ["name", "at the end", "page"], body)
    route, body = routes[name], []
    passed = {name for name, record in progress.load().items() if record.passed}
    for part in route.parts:
        asked = [exercise.name for item in part.items for exercise in item.exercises]
        time_ = f"{part.minutes / 60:.3g} h" if route.hours else f"{part.minutes:g} min"
        body.append([part.title["en"], time_, f"{len(passed.intersection(asked))} of {len(asked)}" if asked else ""])
    show.table(f"{route.title['en']}: paths/{name}.md", ["part", "time", "exercises passed"], body)
    if waiting := next((exercise for exercise in route.exercises if exercise.name not in passed), None):
        show.console.print(f"Next exercise: {exercises.COURSE} exercise next {waiting.short}")


@app.command()
def run(
    which: Which = "",
    again: Annotated[bool, typer.Option("--again", help="Start over, also where a stopped run has been.")] = False,
) -> None:
    """Run lessons in order, each as its own script, and say what ran, what was left out and why.

    A run that was stopped goes on where it was. Ctrl-C ends the lessons that run; the exit code is then 130.
    """
    chosen = [name for name, _ in _chosen(which)]
    kept, marks = course_run.load(), course_run.marks(chosen)
    stopped_run = kept.run_of(chosen)
    before = [] if again else stopped_run.unchanged(marks)
    if before:
        many, since = f"{len(before)} lesson{'s' * (len(before) > 1)}", max(0.0, time.time() - stopped_run.at)
        since_then = course_run.roughly(since)
        show.console.print(f"going on after {many} of a run that was stopped {since_then} ago; --again starts over")
    ended = dict.fromkeys(before, (0, ""))
    this = course_run.Run(chosen, {name: marks[name] for name in before})
    course_run.keep(this, {})
    todo = [name for name in chosen if name not in ended]
    at_once = 1 if device.HAS_GPU else min(8, os.cpu_count() or 1)
    watch = course_run.Watch(chosen, todo, kept.seconds, at_once, live=not device.HAS_GPU)
    stopped = False
    handlers = {number: signal.signal(number, _stop) for number in STOPS}
    try:
        with watch, closing(_scripts(todo, at_once, watch.began)) as running:
            for name, code, seconds, printed in running:
                ended[name] = code, f"{seconds:.0f} s"
                if code == 0:
                    this.done[name] = marks[name]
                    course_run.keep(this, {name: seconds})
                watch.end(name, code, seconds, printed)
        this.done = {}
        course_run.keep(this, {})
    except KeyboardInterrupt:
        stopped = True
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    summary = [
        [name, "ok, before" if name in before else course_run.verdict(ended[name][0]), ended[name][1]]
        for name in chosen
        if name in ended
    ]
    show.table(f"{len(summary)} lessons, {show.MODES[device.DEVICE.type]}", ["lesson", "", "time"], summary)
    if stopped:
        show.console.print(
            f"Stopped after {len(summary)} of {len(chosen)} lessons. The same command goes on; --again starts over."
        )
        raise typer.Exit(130)
    if device.HAS_GPU:
        report.write()
        show.console.print("reports and plots: reports/README.md")
    else:
        show.console.print(
            "No GPU: kernels were interpreted and compiled, not timed. Committed measurements: reports/README.md"
        )
    raise typer.Exit(int(any(code for code, _ in ended.values())))


def _stop(number: int, frame: object) -> NoReturn:
    """End a run in order; whoever presses Ctrl-C twice does not disturb that."""
    for each in STOPS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _scripts(names: list[str], at_once: int, began: Callable[[str], None]) -> Generator[tuple[str, int, float, bytes]]:
    """Run lessons' scripts; (name, exit code, seconds, what it printed) of each when it ends.

    On a GPU one after the other, or each would time the others too, and each prints by itself.
    """
    scripts = [ROOT / f"{name.replace('.', '/')}.py" for name in names]
    if device.HAS_GPU:
        for name, script in zip(names, scripts, strict=True):
            began(name)
            start = time.monotonic()
            done = subprocess.run([sys.executable, str(script)], env=environment())
            yield name, done.returncode, time.monotonic() - start, b""
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": str(show.console.width)}
    os.environ |= {"FORCE_COLOR": "1"} if show.console.is_terminal else {}
    with closing(run_scripts(scripts, at_once, lambda nth: began(names[nth]))) as running:
        for ended in running:
            yield names[ended.nth], ended.code, ended.seconds, ended.printed


@app.command()
def check(which: Which = "") -> None:
    """Ask all that the tests ask of a lesson: rungs against PyTorch, mutants, machine code, guides."""
    failed: list[str] = []
    for name, lesson in _with_kernels(which, failed):
        show.console.rule(title(name))
        try:
            wrong = show.checks(lesson)
        except (Misdeclared, NotImplementedError) as mistake:  # the latter: begun by `new`, and not written yet
            failed.append(str(mistake))
            continue
        if wrong:
            failed.append(f"{name}: {wrong} checks failed")
        failed += show.questions(q for q in verify.questions(name, lesson) if q.kind not in ("rung", "gradients"))
    _end(failed)


@app.command(name="mutants")
def judge_mutants(
    which: Which = "",
    again: Annotated[bool, typer.Option("--again", help="Judge also those that have a verdict of today.")] = False,
    workers: Annotated[int, typer.Option(help="So many at a time, each in a process of its own.")] = 4,
) -> None:
    """Judge wrong kernels that only this kind of GPU runs, each in a process of its own, and keep the verdicts."""
    if not device.HAS_GPU:
        show.console.print("No GPU was found: these mutants are of kernels that run on one kind of GPU only.")
        return
    failed: list[str] = []
    folder = REPORTS / device.name()
    lessons = list(_with_kernels(which, failed))
    todo = [
        (name, mutant)
        for name, mutant in gpu_mutants.of_one_gpu(lessons, device.capability())
        if again or not gpu_mutants.fresh(folder, name, mutant)
    ]
    body = []
    with ThreadPoolExecutor(workers) as pool:
        for done in as_completed([pool.submit(gpu_mutants.judge, *each) for each in todo]):
            try:
                judged = done.result()
            except RuntimeError as why:
                failed.append(str(why))
                continue
            gpu_mutants.save(folder, judged)
            line = [judged.lesson, judged.rung, judged.mutant, judged.caught_by or "ACCEPTED", judged.case]
            show.console.print(": ".join(line[:4]))
            body.append(line)
    show.table(f"{len(body)} mutants judged", ["lesson", "rung", "wrong in", "caught by", "on"], body)
    _end([*failed, *gpu_mutants.contradicted(lessons)])


@app.command()
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
        raise typer.BadParameter(f"{' '.join(operators)}: one name of lessons; operators are named after `bench ops`")
    if not device.HAS_GPU:
        show.console.print("No GPU was found: interpreter timings say nothing about speed, so nothing is written.")
        return
    failed: list[str] = []
    for name, lesson in _with_kernels(which, failed):
        if wrong := show.timed(name, lesson):
            failed.append(f"{name}: {wrong} NOT TIMED")
    report.write()
    _end(failed)


def _bench_operators(names: list[str], minutes: float, workers: int, release: bool) -> None:
    """Time what of course_ops has no row of today's code, or with `release` list it and fail if there is any."""
    known = {operator.name for operator in operator_rows.operators()}
    if wrong := sorted(set(names) - known):
        raise typer.BadParameter(f"course_ops has no {', '.join(wrong)} to be timed. It has {', '.join(sorted(known))}")
    if release:
        lines = show.missing_operators(names)
        _end(lines)
    if not device.HAS_GPU:
        show.console.print("No GPU was found: nothing is timed. `bench ops --release` lists what has no row.")
        return
    path = rows.REPORTS / device.name() / operator_rows.FILE
    todo = operator_rows.missing(operator_rows.read(path), operator_rows.cases(names))
    with operator_bench.Processes(workers, minutes) as processes:
        done = operator_bench.run(
            todo, processes.timed, path, minutes, ahead=processes.ahead,
            turn=max(1, operator_bench.AHEAD * workers), say=lambda line: print(line, flush=True),
        )  # fmt: skip
    show.console.print(f"{done} of {len(todo)} shapes timed, rows in {path}")
    show.operators(operator_rows.read(path))


@app.command(name="fuzz")
def fuzz_operators(
    operators: Annotated[list[str] | None, typer.Argument(help="Of course_ops (softmax); nothing: all.")] = None,
    cases: Annotated[int, typer.Option(help="So many of this commit, for each operator, direction and mode.")] = 500,
    seconds: Annotated[float, typer.Option(help="Stop after so many; the same command goes on.")] = 600.0,
    mode: Annotated[
        list[str] | None, typer.Option(help="cpu (PyTorch computes), interpreted or gpu; nothing: what there is.")
    ] = None,
    replay: Annotated[str, typer.Option(help="Run this case, as JSON, and draw none.")] = "",
) -> None:
    """Ask course_ops what hypothesis draws: shapes, strides, dtypes, values, options, and calls to be refused.

    Counts are added to reports/fuzz.csv. Each fault's smallest case is added to tests/fuzz/found.jsonl.
    """
    names, modes = operators or [], mode or (["gpu"] if device.HAS_GPU else ["cpu", "interpreted"])
    known = fuzz.questions()
    if wrong := sorted(set(names) - set(known)):
        raise typer.BadParameter(f"course_ops has no {', '.join(wrong)}. It has {', '.join(sorted(known))}")
    if wrong := sorted(set(modes) - set(fuzz.MODES)):
        raise typer.BadParameter(f"{', '.join(wrong)} is no mode: {', '.join(fuzz.MODES)}")
    if "gpu" in modes and not device.HAS_GPU:
        raise typer.BadParameter("mode gpu needs a GPU, and none was found")
    failed: list[str] = []
    if replay:
        for each in modes:
            with fuzzing.Worker(each) as worker:
                outcome = worker.ask(json.loads(replay))
            print(f"{each}: {outcome.kind} {outcome.said}", flush=True)
            failed += [] if outcome.well else [f"{each}: {outcome.kind}"]
        _end(failed)
    try:
        failures = fuzzing.run(names, modes, cases, seconds, lambda line: print(line, flush=True))
    except Missing as missing:
        _end([str(missing)])
    title = ["operator", "direction", "mode", "cases", "refused", "wrong", "crashes", "false alarms", "seconds"]
    here = [count for count in fuzzing.counts().values() if count.mode in modes and count.operator in (names or known)]
    today = rows.this_commit()
    fuzzed = [[c.operator, c.direction, c.mode, c.cases, c.refused, c.wrong, c.crashes, c.false_alarms, c.seconds]
              for c in here if c.commit == today]  # fmt: skip
    show.table("cases of this commit", title, fuzzed)
    _end([f"{each.case['operator']}: {each.fault}" for each in failures])


@app.command(name="compile")
def compile_lessons(which: Which = "") -> None:
    """Compile every rung for NVIDIA and AMD (no GPU needed), test its claims, and write reports/compiled.

    All lessons, and `course_ops`: the operators too. With COURSE_GPU, for that card alone, and nothing is written.
    """
    broken: list[str] = []
    mine = _card()
    wanted = (mine.target,) if mine else compiled.TARGETS
    chosen = [] if which == compiled.COURSE_OPS else list(_with_kernels(which, broken))
    names = [name for name, lesson in chosen if not lesson.extension]
    if which in ("", "all", compiled.COURSE_OPS):
        names.insert(0, compiled.COURSE_OPS)  # takes longest
    with show.console.status("compiling"):
        compiled.compile_ahead(names, wanted)
    claimed = {name: lesson.claimed() for name, lesson in chosen}
    for name in dict.fromkeys([*claimed, *names]):
        try:
            show.resources(name, wanted)
        except RuntimeError as why:
            broken.append(str(why))
            continue
        with suppress(Missing):  # show.resources has said what
            broken += sass.broken_claims(name, claimed.get(name, {}), compiled.kernels(name, wanted))
            if not mine:
                report.save_compiled(name)
    if not mine:
        report.write()
    _end(broken)


def _card() -> chips.Chip | None:
    try:
        return chips.chosen()
    except ValueError as why:
        raise typer.BadParameter(str(why)) from None


@app.command(name="versions")
def try_versions(
    which: Which = "",
    torch: Annotated[list[str] | None, typer.Option(help="Only this PyTorch, 2.14.1; may be repeated.")] = None,
    triton: Annotated[list[str] | None, typer.Option(help="Only this Triton, 3.9.0; may be repeated.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="Only this target, 90 or gfx942; may be repeated.")] = None,
    checks: Annotated[bool, typer.Option(help="Run the interpreted checks too.")] = True,
) -> None:
    """Check every kernel interpreted, and compile it, with each PyTorch and Triton; write reports/versions.csv.

    Makes an environment of 6 GB for each PyTorch in the cache; a pair that cannot be installed gets a row that says
    why. Needs no GPU. A stopped run goes on where it was. Of some lessons nothing is written.
    Triton 3.10 will switch fused multiply-add off by default: last bits and speed of kernels may then change.
    """
    if which := "" if which == "all" else renames.meant("lessons", which) or which:
        _chosen(which)  # or it is not there
    pairs = [p for p in versions.PAIRS if (not torch or p[0] in torch) and (not triton or p[1] in triton)]
    targets = [t for t in compiled.TARGETS if not target or str(t) in target]
    if not pairs or len(targets) < len({*(target or ())}):
        known = f"{'; '.join(map(versions.label, versions.PAIRS))}; targets {', '.join(map(str, compiled.TARGETS))}"
        raise typer.BadParameter(f"--torch, --triton or --target: there are {known}")
    failed: list[str] = []
    for pair in pairs:
        rows: list[versions.Tried] = []
        try:
            with show.console.status(versions.label(pair)):
                for row, words in versions.tried(pair, which, targets, checks):
                    rows.append(row)
                    failed += [f"{versions.label(pair)}: {line}" for line in words]
                    if not which:
                        versions.save([row])
        except versions.NotInstalled as why:
            show.console.print(f"{versions.label(pair)} was not tried: {why}", style="yellow")
            if not which:
                versions.save([versions.not_tried(pair, str(why))])
        except versions.Failed as why:
            failed.append(f"{versions.label(pair)}: {why}")
        if rows:
            show.table(versions.label(pair), list(vars(rows[0])), (vars(row).values() for row in rows))
    if not which:
        report.write()
    _end(failed)


@app.command()
def card(which: Which = "") -> None:
    """Show a card's limits and its roofline over the lessons, by its data sheet: COURSE_GPU names it, or an H200's."""
    chip = _card() or chips.of(90)
    show.table(
        f"{chip.name}: {chips.label(chip.target)}",
        ["SMs", "TB/s", *(f"{rate} TFLOP/s" for rate in chip.flops), "shared a block", "an SM", "registers", "threads"],
        [[chip.sms, f"{chip.bandwidth / 1e12:.3g}", *(f"{f / 1e12:.4g}" for f in chip.flops.values()),
          chip.shared_block, chip.shared, chip.registers, chip.warps * chip.warp_size]],
    )  # fmt: skip
    failed: list[str] = []
    titles = ["lesson", "largest shape", "FLOPs a byte", "TFLOP/s at most", "us at least", "bound by"]
    show.table("predicted, not measured", titles, targets.roofline(chip, _with_kernels(which, failed)))
    _end(failed)


@app.command()
def count(
    which: Which = "cuda",
    by_ncu: Annotated[
        bool, typer.Option("--ncu", help="On a GPU: ask its counters by Nsight Compute instead.")
    ] = False,
) -> None:
    """Count what emulated CUDA kernels ask of memory, test what lessons say of it, and write reports/emulated."""
    broken: list[str] = []
    chosen = [(name, lesson) for name, lesson in _with_kernels(which, broken) if lesson.extension]
    if by_ncu:
        if why := ncu.lacks():
            show.console.print(why)
            return
        if not show.counted_by_ncu([name for name, _ in chosen]):
            broken.append("ncu counted nothing")
        report.write()
        _end(broken)
    why = "On this machine kernels run on the GPU; with CUDA_VISIBLE_DEVICES= they are emulated and counted."
    if device.HAS_GPU or (why := toolchain.lacks("g++", "Python.h", "ninja")):
        show.console.print(why)
        return
    for name, lesson in chosen:
        found = counters.traffic(lesson)
        broken += counters.broken_counts(name, lesson, found)
        show.counted(lines := counters.rows(found))
        report.save_emulated(name, lines)
    report.write()
    _end(broken)


@app.command(name="report")
def write_report(
    which: Annotated[str, typer.Argument(help="Nothing, or `final`: the report that day 5 ends with.")] = "",
    operator: Annotated[str, typer.Option(help="Whose story the final report tells.")] = "",
) -> None:
    """Rebuild every page, plot and results block from the rows; `report final`: the final report."""
    if which not in ("", "final"):
        raise typer.BadParameter(f"{which!r}: there is `report`, and `report final`")
    if which:
        try:
            made = final_report.write_report(operator)
        except ValueError as why:
            raise typer.BadParameter(str(why)) from None
        for path in made:
            show.console.print(f"wrote {path.relative_to(ROOT)}")
        return
    for path in report.write():
        show.console.print(f"wrote {path.relative_to(ROOT)}")
    _warn(paths.routes())
    if old := stale.old():
        show.console.print(
            f"{len(old)} rows were measured before their code changed; the pages mark them, `stale` lists them.",
            style="yellow",
        )


@app.command(name="stale")
def list_stale(
    release: Annotated[bool, typer.Option("--release", help="Old rows are a failure: exit code 1.")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Add what this machine's compilers make of the rows.")
    ] = False,
) -> None:
    """List measured rows whose code has changed since, after comparing machine code where this machine can."""
    if shown := stale.show_equal():
        show.console.print(f"{shown} rows: machine code shown to be equal, and kept so in their files")
        report.write()
    if record:
        show.console.print(f"{stale.record()} rows: what the compilers of this machine make of them, added")
    old = stale.old()
    body = ([each.device, each.row.lesson, each.row.rung, each.row.shape, each.why, each.row.commit] for each in old)
    show.table(f"{len(old)} old rows", ["device", "lesson", "rung", "shape", "why", "measured at"], body)
    tables = stale.old_tables()
    for line in tables:
        show.console.print(f"old table: {line}")
    verdicts = list(gpu_mutants.old(kernels()))
    for line in verdicts:
        show.console.print(f"no verdict of today on a mutant: {line}")
    raise typer.Exit(int(release and bool(old or tables or verdicts)))


@app.command(name="new")
def new_lesson(
    name: Annotated[str, typer.Argument(help="Its name in full: day2_triton_basics.lesson18_silu.")],
    problem: Annotated[str, typer.Option(help="The file of problems/ that it answers; a new one is begun.")],
    after: Annotated[str, typer.Option(help="The lesson, in full, that stands before it in the whole course.")],
) -> None:
    """Begin a lesson: its file, its problem if that is new, and its line in the path of the whole course."""
    try:
        made = new.lesson(name, problem, after)
    except ValueError as why:
        raise typer.BadParameter(str(why)) from None
    for path in made:
        show.console.print(f"wrote {path.relative_to(ROOT)}")
    show.console.print(f"What it still lacks says: {exercises.COURSE} check {name.partition('.')[2]}")


@app.command()
def depends(function: str) -> None:
    """Which lessons and rows depend on a function: `ring_slot`, `problems.softmax.inputs`, `cuda_src/a.cu:kernel`."""
    found = dependents.dependents(function)
    if not found:
        if dependents.is_of_the_kit(function):
            _end([f"{function} judges lessons: no row depends on it, and every lesson's checks may"])
        _end([f"no lesson's rungs, inputs or work reach {function}"])
    body = ([each.function, each.lesson, ", ".join(each.through), each.rows or ""] for each in found)
    measured = {each.lesson: each.rows for each in found}
    title = f"{len(measured)} lessons and {sum(measured.values())} rows depend on {function}"
    show.table(title, ["function", "lesson", "through", "rows"], body)


@app.command(name="words")
def explain_words(
    which: Annotated[str, typer.Argument(help="A word, or a lesson for all words of its text; nothing: all.")] = "",
) -> None:
    """Explain the words of the course: `words SM`, `words lesson05_softmax`."""
    if not (found := list(glossary.explained(which))):
        _end([f"{which!r} is no word of the glossary and no lesson: `words` lists the words"])
    first = {term: lesson for lesson, terms in glossary.new().items() for term in terms}
    body = ([term.term, term.says, first.get(term, "").partition(".")[2]] for term in found)
    show.table("words", ["word", "what it means", "first in"], body)


def _one(which: str) -> tuple[str, Lesson | Steps]:
    """The one lesson that is named."""
    (name, found), *more = _chosen(which)
    if more:
        several = ", ".join([name, *(other for other, _ in more)])
        raise typer.BadParameter(f"{which!r} names {len(more) + 1} lessons, expected one: {several}")
    if isinstance(found, Broken):
        _end([f"{name}: cannot be imported: {found.error}"])
    return name, found


@app.command(name="trace")
def trace_rung(
    lesson: Annotated[str, typer.Argument(help="lesson01_vector_add")],
    rung: Annotated[str, typer.Argument(help="One of its rungs: add_block; `list` shows them.")],
    shape: Annotated[list[str] | None, typer.Argument(help="Sizes: n=300; others as in the smallest check.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write an HTML page with a slider over the steps here.")] = None,
    lang: Annotated[str, typer.Option(help=f"Of the page: {', '.join(trace_page.LANGUAGES)}.")] = "en",
) -> None:
    """Show step by step which program of a rung reads and writes what, in the interpreter: `n=300` says how much."""
    exercises.without_gpu()
    name, found = _one(lesson)
    if lang not in trace_page.LANGUAGES:
        raise typer.BadParameter(f"--lang {lang!r}: there are {', '.join(trace_page.LANGUAGES)}")
    if isinstance(found, Steps):
        raise typer.BadParameter(f"{name} has steps and no rungs: there is nothing to trace")
    try:
        heading, steps = tracing.traced(found, rung, shape or [])
    except ValueError as why:
        raise typer.BadParameter(f"{name}: {why}") from None
    if page:
        return tracing.write_page(page, heading, steps, lang)
    tracing.print_steps(heading, steps)


@app.command()
def diff(lesson: str, old: str, new: str) -> None:
    """Show what changes from one rung to another: the wrapper and the kernels that it launches."""
    name, _ = _one(lesson)
    module, folder = sys.modules[name], name.partition(".")[0]

    def source(rung: str) -> list[str]:
        if not hasattr(module, rung):
            raise typer.BadParameter(f"{name} has no function {rung!r}")
        if (own := Path(inspect.getfile(inspect.unwrap(getattr(module, rung))))).parent.parent == ROOT / folder:
            return own.read_text().splitlines()  # a rung of a ladder is a file
        wrapper = inspect.getsource(getattr(module, rung))
        if (program := Path(module.__file__ or "").with_suffix(".cu")).exists():
            used = list(reached(build.local_files(program)[:1], set(re.findall(r"\w+", wrapper))))
            code = program.read_text()
            parts = [code[d.start : d.stop] for d in definitions(code) if d.name in used]
            return "\n\n".join([*parts, wrapper]).splitlines()
        used = [k for k, v in vars(module).items() if k.endswith("_kernel") and hasattr(v, "fn") and k in wrapper]
        text = Path(module.__file__ or "").read_text().splitlines()
        lines: list[str] = []
        for kernel in used:
            at = (i for i, line in enumerate(text) if line.startswith((f"def {kernel}(", f"{kernel} = ")))
            if (start := next(at, None)) is None:  # another lesson's
                fn = getattr(module, kernel)
                while hasattr(fn, "fn"):  # what tunes or compiles a function holds it so
                    fn = fn.fn
                lines += inspect.getsource(fn).splitlines()
                continue
            stop = next((i for i in range(start + 1, len(text)) if text[i] and text[i][0] not in " )#"), len(text))
            lines += [*text[start:stop]]
        return lines + wrapper.splitlines()

    for line in difflib.unified_diff(source(old), source(new), old, new, lineterm="", n=2):
        show.console.print(
            line, style="green" if line[0] == "+" else "red" if line[0] == "-" else None, highlight=False
        )


if __name__ == "__main__":
    try:
        app()
    except progress.Damaged as error:
        sys.exit(str(error))
