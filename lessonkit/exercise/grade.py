"""Grade an answer: everything the lessons' checker sees, said so that the learner knows what to do next."""

import ast
import inspect
import math
import multiprocessing
import os
import re
import signal
import tempfile
import textwrap
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lessonkit.base import device
from lessonkit.base.errors import BlockAsCondition, BuildError, Fault, OutOfBounds, Rejected, Unsupported
from lessonkit.base.words import listed, said
from lessonkit.exercise import Exercise, compile_check
from lessonkit.exercise.source import Source, build
from lessonkit.judge import check, counters
from lessonkit.lesson import Case, Lesson

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MARK = -7776  # exact in every floating type, and no kernel of an exercise computes it
LIMIT = 60.0  # seconds, of the clock and of a processor: an answer that takes longer does not end
WAITING = 10  # times LIMIT by the clock: an answer that only waits has not ended either
MEMORY = 4 * 2**30  # bytes of address space that an answer, or a process that it starts, may take beside the grader's
PROCESSES = 64  # at a time: a build has about a dozen
PATIENCE = 2.0  # seconds for naming the mistake: the verdict should not wait long for that


@dataclass(frozen=True)
class Verdict:
    """What became of an answer: refused by a property, or right (`caught_by` is empty)."""

    held: tuple[str, ...] = ()  # the claims and cases that it passed
    caught_by: str = ""
    why: str = ""
    on: str = ""  # the case or claim
    passed_in: str = ""  # the wider dtype in which this case passed, where only the values of a narrower one are wrong
    mistake: str = ""  # the known wrong answer that fails in just this way
    is_own: bool = False  # it fails by what the learner has written: what is still to be written would fail later
    score: str = ""  # reads and writes against the ideal
    predicted: str = ""  # the answer to what the task lets the learner predict, if it is right
    compiled: str = ""  # for which targets, or why not; empty where there is no kernel

    @property
    def right(self) -> bool:
        return not self.caught_by


class _Marked(TorchDispatchMode):
    """Inside, new memory holds a mark of its own where `check` leaves NaN: only what nobody wrote still has it.

    Of its own, since what is computed from another's unwritten memory may well be that one's mark.
    """

    def __init__(self) -> None:
        super().__init__()
        self.marks: dict[int, float] = {}  # by address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "empty" in func.name() and out.is_floating_point():
            self.marks[out.data_ptr()] = MARK / 2 ** (len(self.marks) % 8)
            out.fill_(self.marks[out.data_ptr()])
        return out


def grade(source: Source, answer: str, *, seed: int = 0) -> Verdict:
    """Grade in this process. `seed` makes the inputs."""
    held: list[str] = []
    passed_in = ""
    on = said("importing your file")
    try:
        with _in_words(""):
            module = build(source, answer)
        exercise: Exercise = module.EXERCISE
        for number, claim in enumerate(exercise.claims):
            on = holds = said((claim.__doc__ or claim.__name__).strip().splitlines()[0])
            if exercise.by_task:
                on = f"TODO({source.regions[number].number}): {said(source.regions[number].task)}"
            torch.manual_seed(seed)
            with _in_words(claim.__name__):
                claim()
            held.append(holds)
        score = ""
        if exercise.op:
            lesson = exercise.lesson()
            for case in exercise.cases:
                first, *others = check.dtypes(lesson, case)
                # Once more with other inputs and other garbage: luck with the first is not enough.
                for dtype, turn in ((first, 0), *((other, 0) for other in others), (first, 1)):
                    name = str(dtype).removeprefix("torch.")
                    on = said("{why} ({case}, {dtype})").format(why=said(case.why), case=case, dtype=name)
                    passed_in = "" if dtype == first else str(first).removeprefix("torch.")
                    with _in_words("error"):
                        _check(lesson, case, dtype, seed + turn, turn)
                held.append(said(case.why))
            on = said("the bytes moved ({case})").format(case=exercise.cases[-1])
            score = _score(exercise, lesson, seed)
            if exercise.grad:
                for case in exercise.cases:
                    on = said("the gradient: {why} ({case})").format(why=said(case.why), case=case)
                    with _in_words("error"):
                        _check_grad(lesson, case, seed)
                held.append(said("gradients"))
    except Rejected as rejected:
        why = str(rejected).removeprefix(f"{rejected.caught_by}: ")
        passed_in = passed_in if rejected.caught_by == "value" else ""
        return Verdict(tuple(held), rejected.caught_by, _readable(why), on, passed_in=passed_in)
    return Verdict(tuple(held), score=score, predicted=exercise.predicted)


def grade_and_compile(
    source: Source, answer: str, *, seed: int = 0, targets: Sequence[int] = compile_check.TARGETS
) -> Verdict:
    """Grade in this process; what is right in values is compiled, too."""
    with compile_check.recorded() as launches:
        verdict = grade(source, answer, seed=seed)
    if not verdict.right:
        return verdict
    try:
        return replace(verdict, compiled=compile_check.compile_answer(source, answer, [*launches.values()], targets))
    except Rejected as rejected:
        why = str(rejected).removeprefix(f"{rejected.caught_by}: ")
        return Verdict(verdict.held, rejected.caught_by, _readable(why), said("compiling your file"))


def _check(lesson: Lesson, case: Case, dtype: torch.dtype, seed: int, poison: int) -> None:
    op = lesson.rungs[0]
    question = check.truth(lesson, case.shape, dtype, seed=seed)
    result, _ = check.answer(op, question.args, poison=poison)
    if result is None:
        raise Rejected("shape", said("the function returned None"))
    try:
        check.compare(question, result)
    except Rejected as rejected:
        if rejected.caught_by == "nan":
            _say_if_unwritten(op, question.args, result)
        why = str(rejected).removeprefix(f"{rejected.caught_by}: ")
        raise Rejected(rejected.caught_by, _named(why, _returned(op))) from None


def _say_if_unwritten(op: Any, args: tuple[Any, ...], nans: Any) -> None:
    with _Marked() as memory:
        marked = op(*args)
    for result, before in zip(check.tensors(marked), check.tensors(nans), strict=True):
        unwritten = (result == memory.marks.get(result.data_ptr(), torch.nan)) & before.isnan()
        if bool(unwritten.any()):
            first = tuple(int(i) for i in unwritten.nonzero()[0])
            words = said("{count} of {all} elements are never written, first {first}")
            count = int(unwritten.sum())
            raise Rejected("unwritten", words.format(count=count, all=unwritten.numel(), first=first)) from None


def _check_grad(lesson: Lesson, case: Case, seed: int) -> None:
    try:
        check.check_grad(lesson, case.shape, lesson.dtypes[0], seed=seed)
    except Rejected as rejected:
        why = _with_names(str(rejected).removeprefix("value: "), lesson, case)
        raise Rejected("gradient", why) from None


def _with_names(why: str, lesson: Lesson, case: Case) -> str:
    """Call the results of check_grad, which are the op's results and then its inputs' gradients, by their names."""
    if not re.match(r"result \d+: ", why):
        return why
    assert lesson.grad is not None
    args = (lesson.grad.inputs or lesson.inputs)(dtype=lesson.dtypes[0], **case.shape)
    outs = check.tensors((lesson.grad.reference or lesson.reference)(*args))
    called = _returned(lesson.grad.op) or [said("the forward's result")] * len(outs)
    for name, arg in zip(inspect.signature(lesson.grad.op).parameters, args, strict=False):
        if isinstance(arg, torch.Tensor) and arg.is_floating_point():
            called.append(said("the gradient of {name}").format(name=name))
    return _named(why, called)


def _named(why: str, names: Sequence[str]) -> str:
    """A message about `result 1` with the name of that result."""
    numbered = re.match(r"result (\d+): ", why)
    if not numbered or int(numbered[1]) >= len(names):
        return why
    return f"{names[int(numbered[1])]}: {why[numbered.end() :]}"


def _returned(op: Any) -> list[str]:
    """What a function's last line returns, if these are variables: ["o", "lse"] of `return o, lse`."""
    try:
        last = ast.parse(textwrap.dedent(inspect.getsource(op))).body[0].body[-1]  # type: ignore[attr-defined]
    except (OSError, TypeError, SyntaxError, AttributeError):
        return []
    values = last.value.elts if isinstance(last, ast.Return) and isinstance(last.value, ast.Tuple) else []
    return [each.id for each in values if isinstance(each, ast.Name)]


def _score(exercise: Exercise, lesson: Lesson, seed: int) -> str:
    """Judge the bytes moved on the last case, and say them against the ideal. On a GPU nobody counts."""
    if not device.INTERPRETED:
        return ""
    last = exercise.cases[-1]
    question = check.truth(lesson, last.shape, lesson.dtypes[0], seed=seed)
    _, traffic = check.answer(lesson.rungs[0], question.args)
    if not traffic.launches:
        raise Rejected("traffic", said("no kernel was launched: the answer has to come from one"))
    read = sum(t.numel() * t.element_size() for t in question.args if isinstance(t, torch.Tensor))
    written = sum(t.numel() * t.element_size() for t in question.usual)
    lines = []
    for what, moved, least, allowed in (
        (said("reads"), traffic.read, read, exercise.reads),
        (said("writes"), traffic.written, written, exercise.writes),
    ):
        figures = {"what": what, "moved": f"{moved:,}", "times": f"{moved / least:.2f}", "allowed": f"{allowed:g}"}
        if moved > 1.01 * allowed * least:
            words = said(
                "{what} {moved} bytes on {case}, {times} times the tensors' own {least}; {allowed} times will do"
            )
            raise Rejected("traffic", words.format(case=last, least=f"{least:,}", **figures))
        lines.append(said("{what} {moved} bytes, {times} times the tensors' own (ideal {allowed})").format(**figures))
    for metric, most in exercise.counts.items():
        counted = counters.measured(traffic.kernels, metric)
        if counted > 1.001 * most:
            words = said("{counted} on {case}, {most} will do")
            raise Rejected(metric, words.format(counted=f"{counted:.2f}", case=last, most=f"{most:g}"))
        words = said("{metric}: {counted} (ideal {most})")
        lines.append(words.format(metric=metric, counted=f"{counted:.2f}", most=f"{most:g}"))
    return listed(lines, ";")


@contextmanager
def _in_words(property_: str) -> Iterator[None]:
    """Turn whatever an answer raises into a Rejected that says where and what; a false claim is its own property."""
    try:
        yield
    except (Rejected, Unsupported):
        raise
    except OutOfBounds as error:
        raise Rejected("out of bounds", str(error)) from error
    except BlockAsCondition as error:
        raise Rejected("error", str(error)) from error
    except Fault as fault:
        raise Rejected(fault.kind, str(fault)) from fault
    except BuildError as error:
        raise Rejected("error", said("it does not compile:") + f"\n{error}") from error
    except SyntaxError as error:
        line = said("line {number}").format(number=error.lineno)
        raise Rejected("error", f"{line}: {error.msg}: {(error.text or '').strip()}") from error
    except AssertionError as error:
        why = str(error) or said("does not hold")
        raise Rejected(property_ or "error", why.strip()) from error
    except Exception as error:
        if isinstance(error, MemoryError) or re.search("can't allocate memory|std::bad_alloc", str(error)):
            words = said("an answer may have {size} GiB: {where}")
            why = words.format(size=f"{MEMORY / 2**30:.0f}", where=_where(error))
            raise Rejected("memory", why) from error
        raise Rejected("error", _where(error)) from error


def _where(error: BaseException) -> str:
    """The innermost cause and the learner's line that led to it."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    frames = [f for e in chain for f in traceback.extract_tb(e.__traceback__) if "lessonkit_answers" in f.filename]
    at = ""
    if frames:
        at = said(" in line {number}: {code}").format(number=frames[-1].lineno, code=frames[-1].line)
    cause = chain[-1]
    return f"{type(cause).__name__}: {cause}{at}"


def _readable(why: str) -> str:
    """Without the paths of the copy that was graded."""
    return re.sub(r"(?:\S*lessonkit_answers/answer_\w+/)?answer_[0-9a-f]{16}\.(?:py|cpp|cu)\b", "your file", why)


def grade_apart(source: Source, answer: str, *, seed: int) -> Verdict:
    """Grade in a process of its own, which may loop or crash; a refused answer is compared with the known mistakes."""
    with tempfile.NamedTemporaryFile(prefix="lessonkit_traces_") as traces:
        return _grade_apart(source, answer, seed, Path(traces.name))


def _grade_apart(source: Source, answer: str, seed: int, traces: Path) -> Verdict:
    """traces: a file that says where the worker is when its time is over."""
    context: Any = multiprocessing.get_context("fork" if device.FORKS else "spawn")
    here, there = context.Pipe(duplex=False)
    # Without what it has found out of its file, which is a module of this process.
    worker = context.Process(target=_grade_there, args=(Source(source.path), answer, seed, there, traces))
    worker.start()
    assert worker.pid is not None
    there.close()
    verdict, own, mistake, died = Verdict(), False, "", False
    try:
        if _has_said(here, worker.pid):
            verdict = here.recv()
            own, mistake = here.recv() if here.poll(PATIENCE) else (False, "")
        else:
            why = said("it has not ended after {seconds} s: which loop never ends?").format(seconds=f"{LIMIT:.0f}")
            at = _interrupted(worker.pid, traces, answer)
            verdict = Verdict(caught_by="time", why=why + at, on=said("running your file"))
    except TooManyProcesses as many:
        verdict = Verdict(caught_by="processes", why=str(many), on=said("running your file"))
    except EOFError:
        died = True
    finally:
        # Ninja is to hear of it: its compilers have groups of their own, and would write on while another builds.
        # Before the worker is joined: its number may be another process's then.
        with suppress(ProcessLookupError, AttributeError):  # Windows has no groups of processes
            os.killpg(worker.pid, signal.SIGTERM)
        if verdict.caught_by == "processes":
            _end_session(worker.pid)
        worker.kill()
        worker.join()
    if died:
        code = worker.exitcode or 0
        what = signal.Signals(-code).name if code < 0 else said("exit code {code}").format(code=code)
        why = said("the process that ran it died ({what})").format(what=what)
        verdict = Verdict(caught_by="crash", why=why, on=said("running your file"))
    return replace(verdict, mistake=mistake, is_own=own)


def _interrupted(worker: int, traces: Path, answer: str) -> str:
    """Where in the learner's file the process is that does not end; "" if it is somewhere else, or does not say."""
    end = time.monotonic() + PATIENCE
    if not hasattr(signal, "SIGUSR1"):  # on Windows
        return ""
    with suppress(ProcessLookupError):
        os.kill(worker, signal.SIGUSR1)
    while not (text := traces.read_text()).endswith("\n") and time.monotonic() < end:
        time.sleep(0.05)
    code = answer.splitlines()
    for number in map(int, re.findall(r'^  File "[^"]*lessonkit_answers[^"]*", line (\d+)', text, re.MULTILINE)):
        if number <= len(code):  # below it stands the grader's part
            words = said("\nWhen it was stopped it was in line {number}: {code}")
            return words.format(number=number, code=code[number - 1].strip())
    return ""


class TooManyProcesses(RuntimeError):
    """An answer has started more processes than PROCESSES."""


def _has_said(here: Connection, session: int) -> bool:
    """Wait for a verdict, LIMIT seconds, or longer where other work keeps the processors busy. Raises TooManyProcesses.

    Processes are counted from outside: RLIMIT_NPROC counts all that its user has running, and does not hold for root.
    """
    began = time.monotonic()
    end = began + LIMIT
    while not here.poll(min(0.05, max(0.0, end - time.monotonic()))):
        if time.monotonic() >= end:
            if _processor_seconds(session) >= LIMIT or time.monotonic() >= began + WAITING * LIMIT:
                return False
            end = time.monotonic() + 1.0
        if len(_session(session)) > PROCESSES:
            words = said("it has started more than {most} processes: an answer needs none")
            raise TooManyProcesses(words.format(most=PROCESSES))
    return True


def _session(leader: int) -> list[int]:
    """The processes of a session, by /proc; none where there is no /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            # pid (name) state parent group session ...; the name may have spaces and parentheses
            if int(stat.read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(stat.parent.name))
    return found


def _processor_seconds(leader: int) -> float:
    """What a session's processes have used, with those that have ended; infinite where there is no /proc."""
    if not Path("/proc/self/stat").exists():
        return math.inf
    ticks = 0
    for pid in _session(leader):
        with suppress(OSError):  # it has ended meanwhile
            # From the state on, user and system time are the fields 12 and 13; of children that have ended, 14 and 15.
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _end_session(leader: int) -> None:
    """Kill what is left of a session, which may start more while it is killed."""
    while left := _session(leader):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if left == [leader]:  # it stays in /proc until it is waited for
            return
        time.sleep(0.01)


def _limit_memory() -> None:
    """Let this process, and each that it starts, have MEMORY more of address space than this one has now."""
    with suppress(FileNotFoundError, ImportError):  # no /proc; Windows has no such limits
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


def _grade_there(source: Source, answer: str, seed: int, line: Any, traces: Path) -> None:
    """The life of the process that grades: the verdict, then whose it is and the mistake that it recognises.

    traces: a file, for where it is when SIGUSR1 comes.
    """
    if hasattr(signal, "SIGUSR1"):
        import faulthandler

        faulthandler.register(signal.SIGUSR1, file=os.open(traces, os.O_WRONLY), all_threads=False)
    if hasattr(os, "setsid"):
        os.setsid()  # a process group with all that it starts
        signal.alarm(int(WAITING * LIMIT + PATIENCE) + 1)  # the end, should nobody be left to end it
    _limit_memory()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of an overflow that the verdict is about
    verdict = grade_and_compile(source, answer, seed=seed)
    line.send(verdict)
    own = not verdict.right and is_own(source, answer, verdict, seed)
    line.send((own, recognised(source, verdict, seed) if own else ""))


def is_own(source: Source, answer: str, verdict: Verdict, seed: int) -> bool:
    """Whether an answer is refused for what the learner has written, and not for what is still to be written."""
    if source.is_stub(answer):
        return False
    todo = source.untouched(answer)
    if not todo:
        return True
    if len(todo) == len(source.regions):
        return False
    later = grade(source, source.right_elsewhere(todo), seed=seed)
    return (later.caught_by, later.on, _without_lines(later.why)) != (
        verdict.caught_by,
        verdict.on,
        _without_lines(verdict.why),
    )


def recognised(source: Source, verdict: Verdict, seed: int, within: float = math.inf) -> str:
    """Name the mistake if a known wrong answer fails in exactly this way, on this very input.

    Of an address or a line of the file the numbers may differ, if no other wrong answer fails like that. After `within`
    seconds no further wrong answer is tried, and nothing is said.
    """
    alike = []
    end = time.monotonic() + within
    for wrong in source.exercise.wrong:
        if time.monotonic() > end:
            return ""
        if wrong.caught_by != verdict.caught_by:
            continue
        found = grade(source, source.wrong(wrong), seed=seed)
        if (found.caught_by, found.on) != (verdict.caught_by, verdict.on):
            continue
        if _without_lines(found.why) == _without_lines(verdict.why):
            return wrong.why
        if re.search("outside|your file", found.why) and _without_numbers(found.why) == _without_numbers(verdict.why):
            alike.append(wrong.why)
    return alike[0] if len(alike) == 1 else ""


def _without_lines(why: str) -> str:
    return re.sub(r"your file:\d+", "your file", why)


def _without_numbers(why: str) -> str:
    return re.sub(r"-?\d+", "", why)
