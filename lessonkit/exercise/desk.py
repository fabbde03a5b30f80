"""What a learner asks of an exercise, in the terminal or in the page: to check an answer, a hint, the stub again."""

import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lessonkit.base.errors import BuildError, Missing
from lessonkit.base.words import counted, later, said
from lessonkit.cuda import build
from lessonkit.exercise import progress
from lessonkit.exercise.grade import Verdict, grade_apart
from lessonkit.exercise.source import Source
from lessonkit.judge.sentences import told

MEANS = {
    "out of bounds": later(
        "A lane reads or writes memory that belongs to no tensor. On a GPU this may crash, or quietly work."
    ),
    "unwritten": later("The output was filled with NaN before the launch, and no program stored there."),
    "nan": later(
        "NaN comes out where PyTorch has a number: inf - inf, 0 / 0, 0 * inf, or a lane that was never loaded."
    ),
    "value": later(
        "The budget is a few times PyTorch's own error in this dtype, so this is a mistake and no rounding."
    ),
    "dtype": later("The result has to have the dtype that PyTorch's has."),
    "shape": later("The result has to have the shape that PyTorch's has."),
    "changed input": later("An input was overwritten; the caller still needs it."),
    "traffic": later("The answer is right; what is asked now is how many bytes your kernel moves for it."),
    "memory": later("An allocation failed. How large are the tensors, and what grows from step to step?"),
    "processes": later("A fork that is never waited for, or that forks again, would take the machine down."),
    "compiler": later(
        "The values are right in the interpreter, which runs a kernel as Python. A GPU needs it compiled."
    ),
    "gradient": later(
        "The forward is right; the backward is compared with float64 autograd, for a random upstream gradient."
    ),
    "race": later(
        "Two threads touch one address with no barrier between, and one of them writes: any order may happen."
    ),
    "barrier": later("Some threads of the block wait at a barrier that others never reach."),
    "crash": later("Usual causes: an index far outside of every tensor, or a loop that takes memory and does not end."),
    "uninitialised": later("Shared memory is read before any thread wrote it."),
}


@dataclass(frozen=True)
class Line:
    """A line of what the grader says. kind: held, refused, why, means, help, right."""

    kind: str
    text: str


def task(source: Source) -> str:
    """The docstring, or in CUDA C++ the comment, that the file begins with."""
    text = source.read(source.with_marks)
    if source.is_cuda:
        lines = [line.removeprefix("//").removeprefix(" ") for line in text.split("\n\n")[0].splitlines()]
        return "\n".join(line for line in lines[2:] if not line.startswith("#"))
    return "\n".join(text.split('"""')[1].splitlines()[2:])


def check(source: Source, say: Callable[[str], None] = lambda words: None) -> tuple[Verdict, list[Line]]:
    """Grade the learner's file and note it in their progress. say: what takes long, while it does."""
    answer, record = progress.start(source).read_text(), progress.of(source)
    seed = random.SystemRandom().randrange(2**31) if record.seed is None else record.seed
    if source.is_cuda:
        _build_emulator(source, say)
    began = time.monotonic()
    verdict = grade_apart(source, answer, seed=seed)
    took = time.monotonic() - began
    event = "right" if verdict.right else verdict.caught_by
    progress.update(source, event, checks=record.checks + 1, seed=None if verdict.right else seed)
    lines = [Line("held", held) for held in verdict.held]
    if not verdict.right:
        return verdict, [*lines, *_explained(source, answer, verdict)]
    lines += [Line("held", words) for words in (verdict.score, verdict.compiled) if words]
    if not record.passed:
        progress.update(source, passed=progress.today())
    checks = counted(record.checks + 1, said("1 check"), said("{count} checks"))
    hints = counted(record.hints, said("1 hint"), said("{count} hints"))
    if verdict.predicted:
        lines.append(Line("means", said("The prediction: {words}").format(words=said(verdict.predicted))))
    words = said("Right, after {checks} and {hints} ({seconds} s). One solution:")
    return verdict, [*lines, Line("right", words.format(checks=checks, hints=hints, seconds=f"{took:.1f}"))]


def _build_emulator(source: Source, say: Callable[[str], None]) -> None:
    """Build what every answer is compiled and linked with: grading, whose time is limited, is not to wait for it."""
    with suppress(Missing, BuildError):  # the verdict says so
        products = build.emulated_extension(source.path.with_suffix(".cu")).after
        if not all(product.path.exists() for product in products):
            say(said("The emulator is built first; this happens once and takes about half a minute."))
            build.build(products)


def _explained(source: Source, answer: str, verdict: Verdict) -> Iterator[Line]:
    yield Line("refused", verdict.on)
    yield Line("why", f"{verdict.caught_by}: {told(verdict.why)}")
    if re.search(r"line \d+: .*\b\w+_ptr *\[|第 \d+ 行：.*\b\w+_ptr *\[", verdict.why):
        words = said("A pointer takes no brackets: {load} reads, {store} writes.")
        yield Line("help", words.format(load="tl.load(x_ptr + offsets)", store="tl.store(z_ptr + offsets, value)"))
    if "incompatible dimensions" in verdict.why:
        words = said(
            "Dimensions are matched from the last one on: beside a block [M, N], {column} spreads a block [M]."
        )
        yield Line("help", words.format(column="row_sum[:, None]"))
    if verdict.caught_by in MEANS:
        yield Line("means", said(MEANS[verdict.caught_by]))
    if verdict.passed_in:
        words = said("In {dtype} this case passes: which value is rounded to a narrower dtype on its way?")
        yield Line("help", words.format(dtype=verdict.passed_in))
    if (todo := source.untouched(answer)) and not verdict.on.startswith(f"TODO({todo[0].number})"):
        more = said(" (and {count} more)").format(count=len(todo) - 1) if len(todo) > 1 else ""
        if verdict.is_own:
            words = said("This comes from what you have written. TODO({number}) is still to be done{more}: {task}")
        else:
            words = said("TODO({number}) is as it was{more}: {task}")
        yield Line("help", words.format(number=todo[0].number, more=more, task=said(todo[0].task)))
    if verdict.mistake:
        words = said("Others who saw exactly this had made this mistake: {mistake}.")
        yield Line("help", words.format(mistake=said(verdict.mistake)))


def solution(source: Source) -> str:
    """The regions of the right answer; all of it where the exercise was to find a mistake."""
    text = source.read(source.solution)
    if not source.regions:
        return text
    parts = re.findall(r"^ *(?:#|//) TODO\(.*?(?=^ *(?:#|//) END\()", text, re.DOTALL | re.MULTILINE)
    return "\n".join(parts)


def hints(source: Source, *, more: bool) -> list[str]:
    """The hints that the learner has taken; more: and one that they take now."""
    given = progress.of(source).hints
    if not (given or more):
        return []  # without its grader's part, which in CUDA C++ has to be compiled
    known = source.exercise.hints
    if more and given < len(known):
        given += 1
        progress.update(source, f"hint {given}", hints=given)
    words = said("hint {number} of {count}: {text}")
    return [words.format(number=n, count=len(known), text=said(text)) for n, text in enumerate(known[:given], 1)]


def reset(source: Source) -> Path | None:
    """Put the stub back; where what the learner had is now, if that was another text."""
    path, old = progress.answer_file(source), None
    if path.exists() and source.is_stub(path.read_text()):
        path.unlink()  # it may be in another language
    elif path.exists():
        old = path.with_name(path.name + ".old")
        shutil.move(path, old)
    progress.start(source)
    progress.update(source, passed="", seed=None)
    return old
