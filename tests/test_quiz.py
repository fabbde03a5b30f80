"""Quizzes before and after a day: every answer is right because it is computed, and every link leads somewhere."""

import dataclasses

import lessonkit.__main__ as cli
from lessonkit.base.errors import Misdeclared
from lessonkit.commands import evidence, show
from lessonkit.cuda import toolchain
from lessonkit.exercise import progress, quiz
from lessonkit.judge import mutants
from lessonkit.lesson import Lesson, discover, names
from lessonkit.measure import facts
from lessonkit.pages import catalogues

import pytest
from typer.testing import CliRunner

QUESTIONS = [q for name in quiz.files() for part in quiz.PARTS for q in quiz.load(name, part)]
FIXES = [q for q in QUESTIONS if q.kind == "fix"]
LACKS = toolchain.lacks("g++", "Python.h", "ninja")
every = pytest.mark.parametrize("question", QUESTIONS, ids=str)


@pytest.fixture
def answers(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_ANSWERS", str(tmp_path))
    monkeypatch.setattr(show.console, "_width", 100)


def run(*words):
    with show.console.capture() as printed:
        done = CliRunner().invoke(cli.app, ["quiz", *words], env={"TERMINAL_WIDTH": "1000"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, printed.get() + done.output


def test_every_day_has_a_quiz_of_five_to_eight_questions():
    assert list(quiz.files()) == ["day1", "day2", "day3", "day4", "day5", "cuda"]
    for name in quiz.files():
        before, after = (quiz.load(name, part) for part in quiz.PARTS)
        assert 5 <= len(before) == len(after) <= 8
        assert [q.skill for q in before] == [q.skill for q in after]
        assert len({q.skill for q in before}) == len(before)
        assert len({q.kind for q in before}) >= 2, "more than one kind of question"


def test_before_and_after_ask_other_questions():
    for name in quiz.files():
        for pair in zip(*(quiz.load(name, part) for part in quiz.PARTS), strict=True):
            one, two = ((q.asks, q.code(), [c.says for c in _choices(q)]) for q in pair)
            assert one != two, pair


def _choices(question):
    return question.choices(facts.compute) if question.kind in ("choice", "fix") else []


@every
def test_a_question_links_to_a_rung_that_there_is(question):
    assert question.lesson in names()
    if question.rung:
        ((_, found),) = discover(question.lesson)
        known = [each.__name__ for each in (found.rungs if isinstance(found, Lesson) else found.steps)]
        program = quiz._path(question.lesson).with_suffix(".cu")  # a program without rungs has functions
        assert question.rung in known or (program.exists() and f" {question.rung}(" in program.read_text())
    assert question.asks
    assert question.because


@every
def test_its_answer_is_computed_and_taken(question):
    right = quiz.answer_of(question, facts.compute)
    assert quiz.mark(question, right, facts.compute) == quiz.Marked(True)


@every
def test_wrong_answers_are_wrong_and_say_why(question):
    if question.kind == "number":
        wrong = question.wrong_numbers(facts.compute)
        assert len(wrong) >= 2
        for value, why in wrong:
            marked = quiz.mark(question, repr(value), facts.compute)
            assert (marked.right, marked.why) == (False, why)
    elif question.kind == "bug":
        lines = [question.line_of(each["line"]) for each in question.fields["wrong"]]
        assert len({*lines, question.shown()[1]}) == len(lines) + 1 >= 3
        assert all(quiz.mark(question, str(line), facts.compute).why for line in lines)
    else:
        choices = question.choices(facts.compute)
        assert sum(choice.right for choice in choices) == 1
        assert len(choices) >= 3
        assert all(choice.why for choice in choices if not choice.right)


@every
def test_what_is_shown_does_not_tell(question):
    if question.kind in ("bug", "fix"):
        ((_, found),) = discover(question.lesson)
        mutant = question.mutant()
        assert mutant in found.wrong, "the lesson's checks refuse it"
        assert question.rung in (mutant.rung, *(rung.__name__ for rung in found.rungs))
        assert not [line for line in question.code().splitlines() if line.strip().startswith(("# ", "//"))]
        assert (quiz.BLANK in question.code()) == (question.kind == "fix")


@pytest.mark.parametrize("question", FIXES, ids=str)
def test_a_wrong_repair_is_refused_by_the_lessons_checks(question):
    """Each repair that may be chosen is put into the kernel and run through the lesson's checks."""
    if question.is_cuda:
        pytest.skip("built and run by the night's test")
    _only_one_passes(question)


@pytest.mark.night
@pytest.mark.skipif(bool(LACKS), reason=LACKS)
@pytest.mark.parametrize("question", [q for q in FIXES if q.is_cuda], ids=str)
def test_a_wrong_repair_of_a_cuda_program_is_refused(question):
    _only_one_passes(question)


def _only_one_passes(question):
    ((name, found),) = discover(question.lesson)
    mutant = question.mutant()
    for fix in question.fields["fixes"]:
        rung = mutants.build(name, dataclasses.replace(mutant, new=fix["new"]))
        refused = mutants.first_rejection(found, rung)
        assert (refused is None) == (fix["new"] == mutant.old), (fix["new"], refused)


def test_answers_are_kept_and_compared(answers):
    right = [quiz.answer_of(q, facts.compute) for q in quiz.load("day2", "before")]
    wrong = ["1", *right[1:]]
    code, text = run("day2", "before", "--answers", ",".join(wrong))
    assert code == 0, text
    assert f"{len(right) - 1} of {len(right)} right" in text
    assert "day2_triton_basics/lesson01_vector_add.py, add_wide" in text
    assert "Right is" not in text, "before the day only the place is said"
    assert "the first time counts" in run("day2", "before", "--answers", ",".join(right))[1]
    after = [quiz.answer_of(q, facts.compute) for q in quiz.load("day2", "after")]
    _, text = run("day2", "after", "--answers", ",".join(["244", *after[1:]]))
    assert "Rounded down" in text
    assert "Right is 245" in text
    assert [(s.part, s.right) for s in progress.sittings()] == [("before", 5), ("before", 6), ("after", 5)]
    assert "5 / 6" in run()[1]


def test_questions_are_asked_at_a_terminal(answers, monkeypatch):
    asked = iter([a for q in quiz.load("day5", "before") for a in ("?", quiz.answer_of(q, facts.compute))])
    monkeypatch.setattr(evidence, "can_ask", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: next(asked))
    code, text = run("day5", "before")
    assert code == 0, text
    assert "6 of 6 right" in text
    assert "write one of the letters a, b, c" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["day2", "before"], "no terminal to ask in"),
        (["day2", "before", "--answers", "1,2"], "has 2 answers, expected 6"),
        (["day2", "later", "--show"], "before and after"),
        (["day9"], "there are day1, day2"),
        (["day2", "before", "--answers", "1,2,3,4,x,a"], "write the number of a line"),
    ],
)
def test_what_cannot_be_taken_says_why(answers, words, says):
    code, text = run(*words)
    assert code == 2
    assert says in " ".join(text.replace("│", " ").split())
    assert not progress.sittings()


def test_a_quiz_is_shown_without_being_asked(answers):
    code, text = run("day3", "after", "--show")
    assert code == 0
    assert "256 x 64" in text
    assert quiz.BLANK in text
    assert not progress.sittings()


def test_a_mutant_that_is_gone_is_named():
    (question,) = [q for q in quiz.load("day2", "before") if q.kind == "bug"]
    gone = dataclasses.replace(question, fields={**question.fields, "mutant": "no such"})
    with pytest.raises(Misdeclared, match="has no mutant 'no such'"):
        gone.code()


def test_a_row_that_is_gone_is_named():
    with pytest.raises(Misdeclared, match="no row of softmax_row at M=3"):
        facts.ms("day2_triton_basics.lesson05_softmax", "softmax_row", "M=3")


def test_questions_are_translated_with_their_day():
    found = catalogues.today()
    for name, path in quiz.files().items():
        for message in quiz.messages(path):
            rooms = [room for room, said in found.items() if message in said]
            assert len(rooms) == 1, message
            assert rooms[0] in (name, "course", "kit", *list(found)[: list(found).index(name)])
