"""Everything that is asked of one lesson. `lessonkit check` and the tests ask the same questions.

A question passes, or raises AssertionError with what is wrong, or LeftOut with why this machine cannot answer it. What
it returns is worth a reader's look: by what a wrong version was rejected.
Its tier says when it is asked: at each `push`, or each `night` (what an unchanged push would hardly ever find).
"""

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from lessonkit.base import device
from lessonkit.base.errors import Missing, Unsupported
from lessonkit.base.files import REPORTS, ROOT, WHOLE_COURSE
from lessonkit.base.markdown import markdown
from lessonkit.base.tables import read_csv
from lessonkit.base.words import heads, later
from lessonkit.cuda import sass
from lessonkit.judge import apart, check, counters, mutants
from lessonkit.lesson import Broken, Case, Lesson, Mutant, Refusal, Rung, Steps, discover, shape_name, suits
from lessonkit.modes import compiled

import torch

PUSH, NIGHT = "push", "night"
TIERS = later("question | each push | each night also")
PASSES_APART = 0.06  # of `passes`: so far from it the bytes that are counted may be
PLACEHOLDERS = (  # what `new` leaves to be written
    "the idea in the field's words",
    "What the operator computes, and the budget: bytes and FLOPs, and the time that they cannot beat.",
    "You will learn: ...",
    "The idea in two or three sentences. Predicted: a figure",
    "what the lesson settles, in one line",
    "what is computed, in one line",
    "raise NotImplementedError",
)


class LeftOut(Exception):
    """This machine cannot answer; the text says what it lacks."""


@dataclass(frozen=True)
class Question:
    """One thing asked of a lesson: `ask()` passes and may say more, raises AssertionError, or raises LeftOut.

    alone: nothing else may run beside it, since it measures time or fills a GPU's memory.
    kept: its verdict depends on the lesson's code alone; else on every file of the course (see verdicts).
    """

    lesson: str
    kind: str
    subject: str
    ask: Callable[[], str | None] = field(compare=False)
    tier: str = PUSH
    alone: bool = False
    kept: bool = True

    def __str__(self) -> str:
        return f"{self.lesson}-{self.kind}" + f"-{self.subject}" * bool(self.subject)


def questions(name: str, lesson: Lesson | Steps | Broken) -> list[Question]:
    """All questions of a lesson, in the order in which a reader wants the answers."""

    def one(kind: str, ask: Callable[..., str | None], *args: Any, subject: str = "", **more: Any) -> Question:
        return Question(name, kind, subject, partial(ask, name, lesson, *args), **more)

    found = [one("import", imports, kept=False)]
    if isinstance(lesson, Broken):
        return found
    found.append(one("listed", listed, kept=False))
    if isinstance(lesson, Steps):
        return found + [
            one("step", step, s, subject=s.__name__, alone=lesson.alone, tier=NIGHT if s in lesson.nightly else PUSH)
            for s in lesson.steps
        ]
    for rung in lesson.rungs:
        found.append(one("rung", right, rung, subject=rung.__name__))
        if any(others(lesson, case) for case in small(lesson.checks)):
            found.append(one("other-dtypes", right_in_other_dtypes, rung, subject=rung.__name__, tier=NIGHT))
        if lesson.properties:
            tier = PUSH if rung in _best(lesson) else NIGHT
            found.append(one("holds", properties, rung, subject=rung.__name__, alone=device.HAS_GPU, tier=tier))
        if device.HAS_GPU and any(case.gib > 1 for case in lesson.checks):
            found.append(one("long-offsets", right_where_offsets_are_long, rung, subject=rung.__name__, alone=True))
    if lesson.grad:
        found.append(one("gradients", gradients))
        if any(others(lesson, case) for case in small(lesson.checks)):
            found.append(one("gradients-in-other-dtypes", gradients, others, tier=NIGHT))
    if lesson.cpu_model:
        found.append(one("cpu-model", cpu_model))
    each_kernel = mutants.one_of_each(lesson.wrong)
    for each in lesson.wrong:  # a mutant of the CPU model says nothing of the kernel's checks
        of_the_model = lesson.cpu_model is not None and each.rung == lesson.cpu_model.__name__
        a_process = device.HAS_GPU and mutants.is_of_one_gpu(name, each)
        tier = PUSH if each in each_kernel and not a_process else NIGHT
        found.append(one("cpu-model-mutant" if of_the_model else "mutant", mutant, each, subject=each.why, tier=tier))
    found.append(one("checks-can-tell", checks_can_tell))
    found.append(one("refuses", refusals))
    found.append(one("declared", declared, kept=False))
    if lesson.extension and not device.HAS_GPU:
        found.append(one("counts", counts))
    if lesson.extension:  # nvcc takes minutes
        found.append(one("machine-code", claims, tier=NIGHT))
    else:
        last = tuple(rung.__name__ for rung in lesson.rungs if rung.__name__ in lesson.claimed())[-1:]
        found += [one("machine-code", claims, last)] * bool(last)
        found += [one("machine-code-of-all", claims, tier=NIGHT)] * (len(last) < len(lesson.rungs))
    if second_targets(name, lesson):
        found.append(one("machine-code-elsewhere", claims_elsewhere, tier=NIGHT))
    return found


def _best(lesson: Lesson) -> list[Rung]:
    """The last rung, and the last that needs no GPU."""
    anywhere = [rung for rung in lesson.rungs if suits(rung, 0) or getattr(rung, "interpreted", False)]
    return [lesson.rungs[-1], *anywhere[-1:]]


# ---- Rungs ----------------------------------------------------------------------------------------------------------


@dataclass
class Checked:
    """How a rung did on some cases and dtypes."""

    passed: int = 0
    left_out: dict[str, None] = field(default_factory=dict)  # why this machine cannot check
    refused: dict[str, None] = field(default_factory=dict)  # what the rung itself does not take
    wrong: list[str] = field(default_factory=list)
    moved: float = 0.0  # bytes over the least, on the last case that launched anything


Dtypes = Callable[[Lesson, Case], Sequence[torch.dtype]]


def in_turn(lesson: Lesson, case: Case) -> Sequence[torch.dtype]:
    """What a push asks: interpreted, each case in one dtype, the dtypes in turn; the last case in the last of them."""
    every = check.dtypes(lesson, case)
    if device.HAS_GPU:
        return every
    if case is small(lesson.checks)[-1]:  # where bytes are counted
        return every[-1:]
    return (every[min(lesson.checks.index(case) % 3, len(every) - 1)],)


def others(lesson: Lesson, case: Case) -> Sequence[torch.dtype]:
    """What is left for the night."""
    return [dtype for dtype in check.dtypes(lesson, case) if dtype not in in_turn(lesson, case)]


def rung_checks(
    lesson: Lesson, rung: Rung, cases: Iterable[Case] | None = None, dtypes: Dtypes = check.dtypes
) -> Checked:
    found = Checked()
    for case in lesson.checks if cases is None else cases:
        for dtype in dtypes(lesson, case):
            if why := check.cannot_run(lesson, rung, case, dtype):
                found.left_out[why] = None
                continue
            try:
                traffic = check.check(lesson, rung, case.shape, dtype)
            except Unsupported as refused:
                found.refused[str(refused)] = None
            except check.Rejected as rejected:
                found.wrong.append(f"{case} {dtype}: {rejected}")
            else:
                found.passed += 1
                if traffic.launches and (least := lesson.work(dtype=dtype, **case.shape).bytes):
                    found.moved = (traffic.read + traffic.written) / least
    return found


def grad_checks(lesson: Lesson, dtypes: Dtypes = check.dtypes) -> list[str]:
    wrong = []
    for case in small(lesson.checks):
        for dtype in dtypes(lesson, case):
            try:
                check.check_grad(lesson, case.shape, dtype)
            except check.Rejected as rejected:
                wrong.append(f"{case} {dtype}: {rejected}")
    return wrong


def small(cases: tuple[Case, ...]) -> list[Case]:
    """The cases for every day: all that this machine can run, but those of more than 1 GiB."""
    return [case for case in cases if case.gib <= (1 if device.HAS_GPU else 0)]


def imports(name: str, lesson: Lesson | Steps | Broken) -> None:
    assert not isinstance(lesson, Broken), f"{name} cannot be imported: {lesson.error!r}"


def right(name: str, lesson: Lesson, rung: Rung) -> None:
    """On every small case; the bytes counted are what `passes` says.

    The last rung refuses a case only if it says which operator of course_ops takes it: tests/operators has the case.
    """
    found = _right_on_small_cases(lesson, rung, in_turn)
    assert not (off := moves_otherwise(lesson, rung, found)), off


def moves_otherwise(lesson: Lesson, rung: Rung, found: Checked) -> str:
    """What is wrong if a rung moves other bytes than `passes` says, or an empty string. A GPU counts no bytes."""
    if not (device.INTERPRETED and rung in lesson.passes):
        return ""
    says = lesson.passes[rung]
    if abs(found.moved - says) <= PASSES_APART * says:
        return ""
    return f"{rung.__name__} moves {found.moved:.3f} times the least bytes on the last check; `passes` says {says}"


def right_in_other_dtypes(name: str, lesson: Lesson, rung: Rung) -> None:
    """On every small case, in the dtypes that a push has left out: with a GPU it leaves none out."""
    if any(others(lesson, case) for case in small(lesson.checks)):
        _right_on_small_cases(lesson, rung, others)


def _right_on_small_cases(lesson: Lesson, rung: Rung, dtypes: Dtypes) -> Checked:
    found = rung_checks(lesson, rung, small(lesson.checks), dtypes)
    assert not found.wrong, "\n".join(found.wrong)
    lost = refused_without_advice(lesson, rung, found)
    assert not lost, lost
    if not found.passed:
        raise LeftOut("; ".join(found.left_out | found.refused))
    return found


def refused_without_advice(lesson: Lesson, rung: Rung, found: Checked) -> str:
    """What is wrong if the last rung refuses a case and does not say which operator takes it; or an empty string."""
    lost = [words for words in found.refused if not _names_operator(words)]
    if rung is not lesson.rungs[-1] or not lost:
        return ""
    return f"the last rung refuses, and names no operator: {'; '.join(lost)}"


def _names_operator(words: str) -> bool:
    """Whether a refusal says what takes the case: "rows past 32,768: course_ops.softmax takes every length"."""
    return any((ROOT / "course_ops" / f"{name}.py").exists() for name in re.findall(r"course_ops\.(\w+)", words))


def right_where_offsets_are_long(name: str, lesson: Lesson, rung: Rung) -> None:
    """The cases that take many GiB, one after the other."""
    found = rung_checks(lesson, rung, [case for case in lesson.checks if case.gib > 1])
    torch.cuda.empty_cache()
    assert not found.wrong, "\n".join(found.wrong)
    if not found.passed:
        raise LeftOut("; ".join(found.left_out | found.refused))


def properties(name: str, lesson: Lesson, rung: Rung) -> None:
    if why := check.cannot_run(lesson, rung, lesson.checks[0], lesson.dtypes[0]):
        raise LeftOut(why)
    lacks = ""
    for holds in lesson.properties:
        try:
            holds(rung)
        except Unsupported:
            continue
        except Missing as missing:
            lacks = str(missing)
    if lacks:
        raise LeftOut(lacks)


def gradients(name: str, lesson: Lesson, dtypes: Dtypes = in_turn) -> None:
    if lesson.extension and (why := lesson.extension.lacks()):
        raise LeftOut(why)
    assert not (wrong := grad_checks(lesson, dtypes)), "\n".join(wrong)


def cpu_model(name: str, lesson: Lesson) -> None:
    assert lesson.cpu_model
    for case in small(lesson.checks):
        check.check(lesson, lesson.cpu_model, case.shape, torch.float32)


# ---- The checks are checked -----------------------------------------------------------------------------------------


def mutant(name: str, lesson: Lesson, mutant: Mutant) -> str:
    """The checks reject the wrong version, and for the property that it names."""
    wrong = mutants.build(name, mutant)
    if why := mutants.cannot_judge(lesson, wrong, mutant):
        raise LeftOut(why)
    if device.HAS_GPU and mutants.is_of_one_gpu(name, mutant):
        verdict = apart.judged(name, mutant)
    else:
        verdict = apart.Verdict.of(mutants.first_rejection(lesson, wrong))
    assert verdict.caught_by, f"the checks accept a wrong version: {mutant.why}"
    assert verdict.is_as_declared(mutant), (
        f"{mutant.why}: rejected by {verdict.caught_by!r} on {verdict.where}, the lesson says {mutant.caught_by!r}. "
        f"If this is the mistake that you meant, write caught_by={verdict.caught_by!r} in its Mutant. {verdict.said}"
    )
    return f"rejected by {verdict.caught_by}, on {verdict.where}"


def checks_can_tell(name: str, lesson: Lesson) -> None:
    """On every case: zeros, NaN, a wrong dtype, a wrong shape and 10% off are refused, the right answer is not."""
    for case in small(lesson.checks):
        for dtype in lesson.dtypes:
            question = check.truth(lesson, case.shape, dtype)
            check.compare(question, question.usual)
            for i, usual in enumerate(question.usual):
                for fake in _fakes(usual):
                    answers = [*question.usual]
                    answers[i] = fake
                    try:
                        check.compare(question, answers)
                    except check.Rejected:
                        continue
                    raise AssertionError(f"{case} {dtype}: a wrong result {i} passes: {fake}")


def _fakes(usual: torch.Tensor) -> Iterator[torch.Tensor]:
    """Answers that no check may take for this one."""
    if usual.numel() == 0:
        return
    yield usual.to(torch.complex64)
    yield usual.unsqueeze(0)
    if usual.is_floating_point() and usual.isfinite().any():
        yield torch.full_like(usual, torch.nan)
        if (usual[usual.isfinite()].abs() > 1e-3).any():
            yield torch.zeros_like(usual)
            yield (usual.double() * 1.1).to(usual.dtype)


def refusals(name: str, lesson: Lesson) -> None:
    """Each bad call meets its error, in words that say what is wrong; a rung of another GPU refuses every call."""
    rungs = [rung for rung in lesson.rungs if not device.HAS_GPU or suits(rung, device.capability())]
    wrong = [said for bad in lesson.refuses for rung in rungs if (said := _not_refused(bad, rung))]
    assert not wrong, "\n".join(wrong)


def _not_refused(bad: Refusal, rung: Rung) -> str:
    call = f"{rung.__name__}, {bad.why}"
    try:
        bad.call(rung)
    except bad.error as error:
        said = str(error)
        return (
            "" if re.search(bad.says, said) else f"{call}: the error says {said!r}, which does not match {bad.says!r}"
        )
    except Exception as error:
        return f"{call}: {type(error).__name__} where {bad.error.__name__} is wanted: {error}"
    return f"{call}: not refused"


# ---- What is declared -----------------------------------------------------------------------------------------------


def declared(name: str, lesson: Lesson) -> None:
    """Mutants and refusals are there; and a rung that was written and never declared would be checked by nothing."""
    lacks = list[str]()
    if len(lesson.wrong) < 3:
        lacks.append(f"{name} has {len(lesson.wrong)} mutants: write at least three")
    if not lesson.refuses:
        lacks.append(f"{name}: say in `refuses` which calls are refused, and how")
    module = sys.modules[name]
    public = {
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == name and not key.startswith("_")
    }
    known = [lesson.reference, lesson.inputs, *lesson.rungs, *lesson.properties, lesson.cpu_model]
    known += [lesson.grad.op, lesson.grad.reference, lesson.grad.inputs] if lesson.grad else []
    undeclared = {f for f in public - {f.__name__ for f in known if f} if (name, f) not in _imported()}
    if undeclared:
        lacks.append(f"declare, or name with an underscore: {sorted(undeclared)}")
    if not {*lesson.passes} <= {*lesson.rungs}:
        lacks.append("`passes` names a function that is no rung")
    for p in lesson.predicted:
        if not {p.rung, *([p.over] if p.over else [])} <= {*lesson.rungs}:
            lacks.append(f"`predicted` names a function that is no rung: {p.rung.__name__}")
        if p.at not in lesson.benches:
            lacks.append(f"`predicted` of {p.rung.__name__}: {shape_name(p.at)} is no bench")
    assert not lacks, "\n".join(lacks)


@cache
def _imported() -> frozenset[tuple[str, str]]:
    """(module, what some lesson imports from it): documented parts, not forgotten rungs."""
    trees = [
        ast.parse(path.read_text()) for path in sorted(ROOT.glob("day*_*/*.py")) + sorted(ROOT.glob("cuda_src/*.py"))
    ]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return frozenset((str(node.module), alias.name) for node in imports for alias in node.names)


def listed(name: str, lesson: Lesson | Steps) -> None:
    """It says what it teaches, of which tables are made; the path of the whole course has it; no line is `new`'s."""
    assert lesson.about, f'{name} does not say what it teaches: add about=About(teaches="...", hours=1) to its LESSON'
    assert f'"{name}"' in (ROOT / WHOLE_COURSE).read_text(), f'{WHOLE_COURSE} does not have "{name}": add it to a week'
    assert not (left := unwritten(name, lesson)), "\n".join(["write what `new` left open:", *left])


def unwritten(name: str, lesson: Lesson | Steps) -> list[str]:
    """The lines of a lesson and of its problem that still are as `new` wrote them, with their places."""
    files = {ROOT / f"{name.replace('.', '/')}.py"}
    if isinstance(lesson, Lesson):
        files.add(Path(inspect.getfile(lesson.reference)))
        files |= {lesson.extension.source} if lesson.extension else set()
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(files)
        if path.is_relative_to(ROOT)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if any(words in line for words in PLACEHOLDERS)
    ]


# ---- What the emulator counts, and the machine code -----------------------------------------------------------------


def counts(name: str, lesson: Lesson) -> None:
    assert lesson.extension
    if why := lesson.extension.lacks():
        raise LeftOut(why)
    found = counters.traffic(lesson)
    assert not (broken := counters.broken_counts(name, lesson, found)), "\n".join(broken)
    if kept := read_csv(REPORTS / "emulated" / f"{name}.csv"):
        now = [{key: str(value) for key, value in row.items()} for row in counters.rows(found)]
        assert kept == now, f"the report is older than the program: python -m lessonkit count {name}"


def second_targets(name: str, lesson: Lesson) -> tuple[int, ...]:
    """Beside sm_90: sm_80 for what claims cp.async, sm_80's way to copy; else of Triton's sm_80 or sm_100 in turns."""
    if any("cp.async" in claim for claims in lesson.claimed().values() for claim in claims):
        return (80,)
    if lesson.extension:
        return ()
    return (compiled.second_target(name),) if lesson.rungs[-1].__name__ in lesson.claimed() else ()


def first_target(lesson: Lesson) -> int:
    """sm_90; for rungs that another target alone has, that one."""
    last = lesson.rungs[-1] if lesson.rungs else None
    return 90 if last is None or suits(last, 90) or not getattr(last, "needs_only", False) else int(vars(last)["needs"])


def claims(name: str, lesson: Lesson, rungs: tuple[str, ...] = ()) -> None:
    """These rungs, or all, compile for their first target, and the machine code shows what is claimed.

    One that refuses its own target, as it needs a newer Triton, is left out. (The report has a row of every rung.)
    """
    target = first_target(lesson)
    found = _compiled(name, (target,), rungs)
    fitting = {rung.__name__ for rung in lesson.rungs if suits(rung, target)}
    unfit = () if lesson.extension else compiled.outcome(name, target, rungs).unfit
    refused = {each.rung: each.why for each in unfit if each.rung in fitting}
    if lesson.extension:
        assert {k.target for k in found} == {90}
    else:
        for rung in lesson.rungs:
            targets = {k.target for k in found if k.rung == rung.__name__}
            wanted = suits(rung, target) and (not rungs or rung.__name__ in rungs) and rung.__name__ not in refused
            assert targets == ({target} if wanted else set()), rung.__name__
    if rungs and {*rungs} <= {*refused}:
        raise LeftOut("; ".join(refused.values()))
    asked = {key: said for key, said in lesson.claimed().items() if (not rungs or key in rungs) and key not in refused}
    broken = sass.broken_claims(name, asked, found)
    assert not broken, "\n".join(broken)


def claims_elsewhere(name: str, lesson: Lesson) -> None:
    """The same for another target: the last rung, and what claims cp.async (`compile` makes its reports for all)."""
    targets = second_targets(name, lesson)
    copies = {key for key, claims in lesson.claimed().items() if any("cp.async" in claim for claim in claims)}
    names = [rung.__name__ for rung in lesson.rungs]
    wanted = {n: c for n, c in lesson.claimed().items() if lesson.extension or n in copies or n == names[-1]}
    found = _compiled(name, targets, () if lesson.extension else tuple(n for n in names if n in wanted))
    if lesson.extension:
        assert {k.target for k in found} == {t for t in sass.TARGETS if t in targets}
    for rung in () if lesson.extension else lesson.rungs:
        if rung.__name__ in wanted:
            assert {k.target for k in found if k.rung == rung.__name__} == {t for t in targets if suits(rung, t)}
            if not any(suits(rung, t) for t in targets):
                del wanted[rung.__name__]
    broken = sass.broken_claims(name, wanted, found)
    assert not broken, "\n".join(broken)


def _compiled(name: str, targets: tuple[int, ...], rungs: tuple[str, ...] = ()) -> tuple[sass.Kernel, ...]:
    try:
        return compiled.kernels(name, targets, rungs)
    except Missing as missing:  # nvcc, or the library that a program is written on
        raise LeftOut(str(missing)) from None


# ---- Lessons of steps -----------------------------------------------------------------------------------------------


def step(name: str, lesson: Steps, step: Callable[[], Any]) -> None:
    assert step.__doc__, f"{name}.{step.__name__} has no docstring: it is the claim that the body asserts"
    try:
        step()
    except (Missing, Unsupported) as why:
        raise LeftOut(str(why)) from None


def tiers(language: str) -> str:
    """A table: how many questions of each kind are asked in which tier."""
    asked = Counter((question.kind, question.tier) for question in every_question())
    kinds = dict.fromkeys(kind for kind, _ in asked)
    return markdown(
        heads(TIERS, language), ([f"`{kind}`", asked[kind, PUSH] or "", asked[kind, NIGHT] or ""] for kind in kinds)
    )


def every_question() -> list[Question]:
    return [question for name, lesson in discover() for question in questions(name, lesson)]
