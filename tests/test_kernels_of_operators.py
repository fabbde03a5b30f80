"""The operators of course_ops on every case of their problems, and mutants of their kernels.

tests/operators/NAME.py says what is asked of course_ops/kernels/NAME.py. The kernels run on the GPU if there is one,
otherwise in the interpreter, which has 4 SMs: so a long row there is longer than they hold.
"""

from lessonkit import device
from lessonkit.base.errors import Misdeclared
from lessonkit.base.files import ROOT
from lessonkit.judge import operator_mutants, verify
from lessonkit.lesson import Mutant

import pytest

MODULES = [f"tests.operators.{path.stem}" for path in sorted(ROOT.glob("tests/operators/[a-z]*.py"))]
QUICK = ("cross_entropy",)  # its mutants are judged at each push, the others' each night
ASKED = [(f"{module}.{key}", asked) for module in MODULES for key, asked in operator_mutants.declared(module).items()]

pytestmark = pytest.mark.kept("tests/operators/*.py", "course_ops/*.py", "course_ops/kernels/*.py")
each = pytest.mark.parametrize(("name", "asked"), [pytest.param(*pair, id=pair[0]) for pair in ASKED])


@each
def test_it_answers_every_case(name, asked):
    for rung in asked.rungs:
        verify.right(name, asked, rung)


@pytest.mark.night
@each
def test_it_answers_every_case_in_other_dtypes(name, asked):
    for rung in asked.rungs:
        verify.right_in_other_dtypes(name, asked, rung)


@pytest.mark.skipif(not device.HAS_GPU, reason="rows that lie past element 2^31 take many GiB")
@pytest.mark.alone
@each
def test_it_answers_where_offsets_are_long(name, asked):
    try:
        for rung in asked.rungs:
            verify.right_where_offsets_are_long(name, asked, rung)
    except verify.LeftOut as why:
        pytest.skip(str(why))


@each
def test_properties_hold(name, asked):
    for rung in asked.rungs:
        verify.properties(name, asked, rung)


@each
def test_the_machine_code_shows_what_is_claimed(name, asked):
    verify.claims(name, asked)


@pytest.mark.skipif(device.HAS_GPU, reason="mutants are interpreted, as without a GPU")
@pytest.mark.parametrize(
    "module", [pytest.param(m, marks=[pytest.mark.night] * (m.rpartition(".")[2] not in QUICK)) for m in MODULES]
)
def test_mutants_are_rejected(module):
    """Each by the property that it names, or by one of the two."""
    found = operator_mutants.verdicts(module)
    wanted = {
        (key, m.why): m.caught_by for key, asked in operator_mutants.declared(module).items() for m in asked.wrong
    }
    wrong = {
        which: f"{found[which]}, expected {caught_by!r}"
        for which, caught_by in wanted.items()
        if found[which].caught_by not in caught_by.split(" or ")
    }
    assert not wrong, "\n".join(f"{which}: {said}" for which, said in wrong.items())


def test_a_mutant_of_a_line_that_is_gone_is_an_error(tmp_path):
    gone = Mutant("gone", "softmax_packed_kernel", "no such line", "", "softmax")
    with pytest.raises(Misdeclared, match="stands 0 times in softmax_packed_kernel"):
        operator_mutants.write(tmp_path, "tests.operators.softmax", gone)


def test_no_case_of_a_problem_is_left_out():
    """So a lesson may refuse one of them, and name the operator."""
    for name, asked in ASKED:
        assert set(map(str, asked.problem.checks)) <= set(map(str, asked.checks)), name
