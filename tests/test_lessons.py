"""Every rung of every lesson against PyTorch, every mutant against the checks, every claim against the machine code."""

import ast
import inspect
import sys
from functools import cache

import lessonkit.device as device
from lessonkit import check, compiled, mutants, report, rows, show
from lessonkit.arguments import Unsupported
from lessonkit.cuda import build, counters, machine_code, toolchain
from lessonkit.lesson import Broken, Lesson, Steps, discover, kernels, suits

import pytest
import torch

from day3_matmul_tk import lesson06_grouped_matmul

ALL = list(discover())
KERNELS = kernels()
RUNGS = [pytest.param(n, lesson, r, id=f"{n}-{r.__name__}") for n, lesson in KERNELS for r in lesson.rungs]
LESSONS = [pytest.param(n, lesson, id=n) for n, lesson in KERNELS]
PROGRAMS = [p for p in LESSONS if p.values[1].extension]


@pytest.fixture(scope="session")
def extensions():
    """Every CUDA program, built at once and several at a time; whoever comes second waits and finds them there."""
    found = [lesson.extension for _, lesson in KERNELS if lesson.extension and not lesson.extension.lacks()]
    try:
        build.build(extension.product() for extension in found)
    except build.BuildError as failed:
        print(failed)  # each is its own lesson's failure, below


@pytest.fixture(autouse=True)
def built(request):
    """A test of a CUDA lesson waits for the extensions."""
    lesson = request.node.callspec.params.get("lesson") if hasattr(request.node, "callspec") else None
    if isinstance(lesson, Lesson) and lesson.extension:
        request.getfixturevalue("extensions")


def skip_what_cannot_run(lesson, rung):
    if why := check.cannot_run(lesson, rung, lesson.checks[0], lesson.dtypes[0]):
        pytest.skip(why)


def in_turn(test):
    """What may fill a GPU's memory runs with nothing beside it."""
    return pytest.mark.alone(test) if device.HAS_GPU else test


def test_there_are_lessons():
    assert KERNELS


@pytest.mark.parametrize(("name", "lesson"), [pytest.param(*found, id=found[0]) for found in ALL])
def test_imports(name, lesson):
    assert not isinstance(lesson, Broken), lesson


@pytest.mark.parametrize(("name", "lesson", "rung"), RUNGS)
def test_rung_is_right(name, lesson, rung):
    """On every small case and dtype; all failures are shown at once. The last rung refuses nothing, and without a GPU
    the bytes that were counted on the way are those that the lesson says."""
    found = show.rung_checks(lesson, rung, show.small(lesson.checks))
    assert not found.wrong, "\n".join(found.wrong)
    assert rung is not lesson.rungs[-1] or not found.refused, f"the last rung refuses: {'; '.join(found.refused)}"
    if not found.passed:
        pytest.skip("; ".join(found.left_out | found.refused))
    if device.INTERPRETED and rung in lesson.passes:
        expected = pytest.approx(lesson.passes[rung], rel=0.06)
        assert found.moved == expected, f"{rung.__name__} moves {found.moved:.3f} times the least"


@pytest.mark.skipif(not device.HAS_GPU, reason="cases of many GiB need a GPU")
@in_turn
@pytest.mark.parametrize(("name", "lesson", "rung"), [p for p in RUNGS if any(c.gib > 1 for c in p.values[1].checks)])
def test_rung_is_right_where_offsets_are_long(name, lesson, rung):
    """The cases that take many GiB, one after the other."""
    found = show.rung_checks(lesson, rung, [case for case in lesson.checks if case.gib > 1])
    torch.cuda.empty_cache()
    assert not found.wrong, "\n".join(found.wrong)
    if not found.passed:
        pytest.skip("; ".join(found.left_out | found.refused))


@in_turn
@pytest.mark.parametrize(("name", "lesson", "rung"), RUNGS)
def test_properties_hold(name, lesson, rung):
    skip_what_cannot_run(lesson, rung)
    for holds in lesson.properties:
        try:
            holds(rung)
        except Unsupported:
            continue


@pytest.mark.parametrize("rung", lesson06_grouped_matmul.LESSON.rungs, ids=lambda rung: rung.__name__)
@pytest.mark.parametrize("ends", [[-9, 20, 60, 90], [5, 30, 10, 40], [40, 0, 0, 0], [50, 60, 70, 80]], ids=str)
def test_wrong_offsets_of_groups_lead_nowhere_else(rung, ends):
    """The host cannot refuse offsets that it does not know. What comes out is undefined, but no access is outside."""
    x, w, _ = lesson06_grouped_matmul.inputs(40, 3, 24, 16)
    y, _ = check.answer(rung, (x, w, torch.tensor(ends, dtype=torch.int32, device=x.device)))
    assert y.shape == (40, 16)


@pytest.mark.parametrize(("name", "lesson"), [p for p in LESSONS if p.values[1].grad])
def test_gradients(name, lesson):
    if lesson.extension and (why := lesson.extension.lacks()):
        pytest.skip(why)
    assert not (wrong := show.grad_checks(lesson)), "\n".join(wrong)


@pytest.mark.parametrize(("name", "lesson"), [p for p in LESSONS if p.values[1].twin])
def test_slow_twin(name, lesson):
    for case in show.small(lesson.checks):
        check.check(lesson, lesson.twin, case.shape, torch.float32)


@pytest.mark.parametrize(
    ("name", "lesson", "mutant"),
    [pytest.param(n, lesson, m, id=f"{n}-{m.why}") for n, lesson in KERNELS for m in lesson.wrong],
)
def test_mutant_is_rejected(name, lesson, mutant):
    wrong = mutants.build(name, mutant)
    if why := mutants.cannot_judge(lesson, wrong, mutant):
        pytest.skip(why)
    found = mutants.first_rejection(lesson, wrong)
    assert found is not None, f"the checks accept: {mutant.why}"
    assert found[0].caught_by == mutant.caught_by, found[0]


@pytest.mark.parametrize(("name", "lesson"), LESSONS)
def test_enough_mutants(name, lesson):
    assert len(lesson.wrong) >= 3


@pytest.mark.parametrize(("name", "lesson"), LESSONS)
def test_checks_can_tell(name, lesson):
    """On every case: zeros, NaN, a wrong dtype, a wrong shape and 10% off are refused, the right answer is not."""
    for case in show.small(lesson.checks):
        for dtype in lesson.dtypes:
            question = check.truth(lesson, case.shape, dtype)
            check.compare(question, question.usual)
            for i, usual in enumerate(question.usual):
                if usual.numel() == 0:
                    continue

                def refused(fake, question=question, i=i):
                    answers = [*question.usual]
                    answers[i] = fake
                    with pytest.raises(check.Rejected):
                        check.compare(question, answers)

                refused(usual.to(torch.complex64))
                refused(usual.unsqueeze(0))
                if usual.is_floating_point() and usual.isfinite().any():
                    refused(torch.full_like(usual, torch.nan))
                    if (usual[usual.isfinite()].abs() > 1e-3).any():
                        refused(torch.zeros_like(usual))
                        refused((usual.double() * 1.1).to(usual.dtype))


@pytest.mark.parametrize(("name", "lesson"), LESSONS)
def test_bad_calls_are_refused(name, lesson):
    assert lesson.refuses, "say which calls are refused, and how"
    for bad in lesson.refuses:
        for rung in lesson.rungs:
            with pytest.raises(bad.error, match=bad.says):
                bad.call(rung)


@pytest.mark.skipif(device.HAS_GPU, reason="accesses are counted by the emulator")
@pytest.mark.parametrize(("name", "lesson"), PROGRAMS)
def test_counts_are_as_said(name, lesson):
    if why := lesson.extension.lacks():
        pytest.skip(why)
    assert not (broken := counters.broken_counts(name, lesson)), "\n".join(broken)
    if kept := rows.read_csv(report.REPORTS / "emulated" / f"{name}.csv"):
        now = [{key: str(value) for key, value in row.items()} for row in counters.rows(lesson)]
        assert kept == now, f"the report is older than the program: python -m lessonkit count {name}"


@pytest.mark.parametrize(("name", "lesson"), LESSONS)
def test_compiled_claims(name, lesson):
    """The machine code shows what is claimed. Every rung compiles for sm_90; for one of the other targets, in turns, a
    lesson's last rung and what claims cp.async, sm_80's way to copy (`lessonkit compile` makes its reports for all)."""
    copies = {key for key, claims in lesson.claimed().items() if any("cp.async" in claim for claim in claims)}
    names = [rung.__name__ for rung in lesson.rungs]
    claimed = tuple(n for n in names if n in lesson.claimed() and (n in copies or n == names[-1]))
    others = (80,) if copies or [n for n, _ in KERNELS].index(name) % 2 else (100,)
    if lesson.extension:
        others = (80,) if copies else ()
    try:
        found = compiled.kernels(name, (*others, 90) if lesson.extension else (90,))
        if claimed and not lesson.extension:
            found += compiled.kernels(name, others, claimed)
    except toolchain.Missing as missing:  # nvcc, or the library that a program is written on
        pytest.skip(str(missing))
    if lesson.extension:
        assert {k.target for k in found} == {t for t in machine_code.TARGETS if t in (*others, 90)}
    for rung in () if lesson.extension else lesson.rungs:
        targets = {k.target for k in found if k.rung == rung.__name__}
        wanted = (*others, 90) if rung.__name__ in claimed else (90,)
        assert targets == {t for t in wanted if suits(rung, t)}, rung.__name__
    broken = compiled.broken_claims(name, lesson.claimed(), found)
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(("name", "lesson"), LESSONS)
def test_every_public_function_is_declared(name, lesson):
    """A rung that was written and never declared would be tested by nobody."""
    module = sys.modules[name]
    public = {
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == name and not key.startswith("_")
    }
    declared = [lesson.reference, lesson.inputs, *lesson.rungs, *lesson.properties, lesson.twin]
    declared += [lesson.grad.op, lesson.grad.reference, lesson.grad.inputs] if lesson.grad else []
    undeclared = {f for f in public - {f.__name__ for f in declared if f} if (name, f) not in imported()}
    assert not undeclared, f"declare, or name with an underscore: {sorted(undeclared)}"
    assert {*lesson.passes} <= {*lesson.rungs}, "bytes are counted of rungs alone"


@cache
def imported() -> set[tuple[str, str]]:
    """(lesson, what some other lesson imports from it): documented parts, not forgotten rungs."""
    trees = [ast.parse(inspect.getsource(sys.modules[name])) for name, _ in ALL]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {(str(node.module), alias.name) for node in imports for alias in node.names}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        pytest.param(n, s, id=f"{n}-{s.__name__}", marks=[pytest.mark.alone] * x.alone)
        for n, x in ALL
        if isinstance(x, Steps)
        for s in x.steps
    ],
)
def test_step_holds(name, step):
    assert step.__doc__, "a step's docstring is its claim"
    try:
        step()
    except Unsupported as why:
        pytest.skip(str(why))


@pytest.mark.parametrize(("name", "lesson"), [pytest.param(*found, id=found[0]) for found in ALL])
def test_lesson_is_short(name, lesson):
    assert len(inspect.getsource(sys.modules[name]).splitlines()) <= 300
    assert isinstance(lesson, Lesson | Steps)
