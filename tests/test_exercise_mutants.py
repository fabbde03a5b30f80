"""The grader refuses small slips in an exercise's solution, but for those whose survival is explained.

Each push asks a sample of each exercise's mutants, each night all of them.
"""

import tomllib
from collections import Counter
from pathlib import Path

from lessonkit import device
from lessonkit.exercise import grade, source

import exercise_mutation
import pytest

SURVIVORS = Path(__file__).with_name("exercise_survivors.toml")
SAMPLE, SAMPLE_OF_CUDA = 3, 1  # a push has minutes for all tests, and g++ takes seconds for each mutant

pytestmark = [
    pytest.mark.kept("tests/exercise_mutation.py", "tests/exercise_survivors.toml"),
    pytest.mark.skipif(device.HAS_GPU, reason="exercises are graded where every address is watched"),
]
ALL = source.discover()
each = pytest.mark.parametrize("exercise", ALL, ids=lambda e: e.name)


def survivors(exercise):
    """{what the slip is: why it is none}, of one exercise."""
    known = tomllib.loads(SURVIVORS.read_text())["survivor"]
    return {each["mutation"]: each["why"] for each in known if each["exercise"] == exercise.name}


def refuses(exercise, slips, monkeypatch):
    monkeypatch.setattr(grade, "recognised", lambda *asked: "")
    monkeypatch.setattr(grade, "LIMIT", 10.0)  # a slip in a loop's step never ends
    if (extension := exercise.exercise.extension) and (why := extension.lacks()):
        pytest.skip(why)
    grade.grade(exercise, exercise.solution, seed=3)  # what is imported late is imported here, not once for each slip
    explained, accepted, refused = survivors(exercise), [], []
    for slip in slips:
        verdict = grade.grade_apart(exercise, slip.text, seed=3)
        if verdict.caught_by == "time" and slip.said in explained:  # it does end: the machine is busy
            with monkeypatch.context() as patient:
                patient.setattr(grade, "LIMIT", 300.0)
                verdict = grade.grade_apart(exercise, slip.text, seed=3)
        if verdict.right and slip.said not in explained:
            accepted.append(slip.said)
        if not verdict.right and slip.said in explained:
            refused.append(slip.said)
    assert not accepted, "these slips pass: ask for more in the exercise's cases, or say in the list why they are right"
    assert not refused, "these are refused and stand in the list of survivors"


@each
def test_a_sample_of_slips_is_refused(exercise, monkeypatch):
    """As many besides those that are explained."""
    explained = survivors(exercise)
    asked = [slip for slip in exercise_mutation.slips(exercise) if slip.said not in explained]
    refuses(exercise, asked[: SAMPLE_OF_CUDA if exercise.is_cuda else SAMPLE], monkeypatch)


@pytest.mark.night
@each
def test_every_slip_is_refused_or_explained(exercise, monkeypatch):
    refuses(exercise, exercise_mutation.slips(exercise), monkeypatch)


@each
def test_survivors_are_slips_of_today(exercise):
    said = {slip.said for slip in exercise_mutation.slips(exercise)}
    assert survivors(exercise).keys() <= said, "the exercise has changed: remove what is no slip of it any more"


@pytest.mark.kept("tests/exercise_survivors.toml", "*/exercises/*")
def test_the_list_of_survivors_is_in_order():
    known = tomllib.loads(SURVIVORS.read_text())["survivor"]
    twice = [key for key, times in Counter((k["exercise"], k["mutation"]) for k in known).items() if times > 1]
    assert not twice
    assert {k["exercise"] for k in known} <= {exercise.name for exercise in ALL}
    assert all(k["why"] for k in known)


@each
def test_ten_slips_or_more_are_drawn_and_the_same_each_time(exercise):
    """Ten of each exercise that the grader must refuse: those that are explained do not count."""
    slips = exercise_mutation.slips(exercise)
    assert slips == exercise_mutation.slips(exercise)
    assert len(slips) - len(survivors(exercise)) >= exercise_mutation.ENOUGH
    assert exercise.solution not in {slip.text for slip in slips}
