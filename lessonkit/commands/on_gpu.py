"""`mutants`, `sanitize`, `beside` and `bench ops` on a GPU: each says what it finds, and returns what is wrong."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace

from lessonkit.base import device
from lessonkit.base.errors import Missing
from lessonkit.base.files import REPORTS
from lessonkit.base.words import counted, said
from lessonkit.commands import show
from lessonkit.lesson import Lesson
from lessonkit.measure import beside, gpu_mutants, operator_bench, operator_cases, operator_rows, rows, sanitize

Lessons = Sequence[tuple[str, Lesson]]


def judged(lessons: Lessons, again: bool, workers: int) -> list[str]:
    """Judge the mutants of rungs that this kind of GPU alone runs; `again`: also those with a verdict of today."""
    failed: list[str] = []
    folder = REPORTS / device.name()
    todo = [
        (name, mutant)
        for name, mutant in gpu_mutants.of_one_gpu(lessons, device.capability())
        if again or not gpu_mutants.fresh(folder, name, mutant)
    ]
    left = [(name, mutant, why) for name, mutant in todo if (why := gpu_mutants.lacks(name, mutant))]
    for name, mutant, why in left:
        todo.remove((name, mutant))
        show.console.print(said("{name}: left out: {why}").format(name=f"{name}: {mutant.why}", why=why))
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
    heading = counted(len(body), said("1 mutant judged"), said("{count} mutants judged"))
    show.table(heading, [said("lesson"), said("rung"), said("wrong in"), said("caught by"), said("on")], body)
    return [*failed, *gpu_mutants.contradicted(lessons)]


def sanitized(lessons: Lessons, tools: Sequence[str], part: sanitize.Part) -> list[str]:
    """Run lessons and operators under each tool; what it reports without an argument is wrong."""
    failed: list[str] = []
    known_reports = sanitize.argued()
    for each in tools:
        if why := sanitize.lacks(each):
            show.console.print(said("{name}: left out: {why}").format(name=each, why=why))
            continue
        for name, lesson in lessons:
            direction = lesson.rungs[0].__name__ if operator_cases.is_operator(name) else part.rung
            if part.rung not in ("", direction):
                continue
            this = replace(part, rung=direction)
            try:
                found, errors = sanitize.watched(REPORTS / device.name(), name, each, this, known_reports)
            except sanitize.NotUnderstood as error:
                failed.append(str(error))
                continue
            words = said("{name}, {tool}: {argued} argued, {errors} not")
            counts = {"argued": len(found) - len(errors), "errors": len(errors)}
            show.console.print(words.format(name=f"{name} {this}".strip(), tool=each, **counts))
            failed += [f"{name}, {each}: {report.kernel}: {report.what}" for report in errors]
    return failed


def repeated(lessons: Lessons, seconds: float, rung: str, alone: bool) -> list[str]:
    """Repeat rungs and operators alone and beside another process, and keep what was counted."""
    failed: list[str] = []
    found: list[beside.Repeated] = []
    try:
        for whole in beside.measured(lessons, seconds, rung, alone=alone):
            found += whole
            for each in whole:
                where = said("beside another process") if each.neighbour else said("alone")
                words = said("{rung}, {where}: {differ} of {calls} answers differ")
                which_rung = f"{each.lesson}.{each.rung}" + f" {each.case}" * (len(whole) > 1)
                show.console.print(words.format(rung=which_rung, where=where, differ=each.differ, calls=each.calls))
            if whole[0].neighbour:  # now, in case that the command is stopped before its end
                key = whole[0].lesson, whole[0].rung
                beside.save(REPORTS / device.name(), [each for each in found if (each.lesson, each.rung) == key])
    except Missing as missing:
        failed.append(str(missing))
    failed += filter(None, map(beside.wrong, beside.by_case(found)))
    return failed


def timed(names: list[str], minutes: float, workers: int) -> None:
    """Time the shapes of operators that have no row of today's code, or are behind a peer by one timing alone."""
    path = rows.REPORTS / device.name() / operator_rows.FILE
    todo = operator_rows.pending(operator_rows.read(path), operator_rows.cases(names))
    with operator_bench.Processes(workers, minutes) as processes:
        done = operator_bench.run(
            todo, processes.timed, path, minutes, ahead=processes.ahead,
            turn=max(1, operator_bench.AHEAD * workers), say=lambda line: print(line, flush=True),
        )  # fmt: skip
    words = said("{done} of {count} shapes timed, rows in {path}")
    show.console.print(words.format(done=done, count=len(todo), path=path))
    show.operators(operator_rows.read(path))
