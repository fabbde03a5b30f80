"""Every question of every lesson (lessonkit.judge.verify says which): rungs against PyTorch, mutants against checks,
claims against the machine code. `pytest -k "lesson05_softmax and mutant"` asks a part of them."""

from lessonkit.judge.verify import NIGHT, LeftOut, every_question
from lessonkit.lesson import kernels

import pytest

pytestmark = pytest.mark.kept


def asked(question):
    marks = [pytest.mark.night] * (question.tier == NIGHT) + [pytest.mark.alone] * question.alone
    return pytest.param(question, id=str(question), marks=marks)


def test_there_are_lessons():
    assert kernels()


@pytest.mark.parametrize("question", map(asked, every_question()))
def test_lesson(question):
    try:
        question.ask()
    except LeftOut as why:
        pytest.skip(str(why))
