"""predict, quiz and progress: what a learner says before looking, and what became of it."""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lessonkit.base.files import write_atomically
from lessonkit.base.words import counted, said
from lessonkit.commands import course_run, exercises, show
from lessonkit.exercise import progress, quiz, source
from lessonkit.exercise.progress import Guess
from lessonkit.lesson import Lesson
from lessonkit.measure import facts
from lessonkit.pages import learned

from rich.syntax import Syntax


def can_ask() -> bool:
    """Whether there is a terminal to ask in; a CI has none."""
    return sys.stdin.isatty() and sys.stdout.isatty() and not os.environ.get("CI")


# ---- predict --------------------------------------------------------------------------------------------------------


def predict(name: str, lesson: Lesson, rung: str, words: Sequence[str]) -> None:
    """Keep a prediction: `words` are sizes (n=300) and one figure. Without a figure ask for it. Raises ValueError."""
    figures = [word for word in words if "=" not in word]
    if len(figures) > 1:
        raise ValueError(said("{words} are several predictions, expected one").format(words=" ".join(figures)))
    known = [each.__name__ for each in lesson.rungs]
    if rung and rung not in known:
        words_ = said("there is no rung {name}; there are {names}")
        raise ValueError(words_.format(name=repr(rung), names=", ".join(known)))
    if figures:
        keep(name, lesson, rung, [word for word in words if "=" in word], figures[0])
        return
    if not can_ask():
        raise ValueError(said("write a prediction behind the rung, as 1.2ms or x1.5: there is no terminal to ask in"))
    ask(name, lesson, [rung] if rung else known, [word for word in words if "=" in word])


def keep(name: str, lesson: Lesson, rung: str, words: Sequence[str], figure: str) -> None:
    _, unit = learned.parsed(figure)
    at = "" if unit == "least" else learned.shape(name, lesson, rung, words)
    guess = Guess(name, rung, at, figure.replace(" ", ""), time.time(), _has_run(name))
    again = [g for g in progress.guesses() if (g.lesson, g.rung, g.shape) == (name, rung, at)]
    progress.add("predictions", guess)
    where = f" ({at})" if at else ""
    kept = said("kept: {rung}{where}: {figure}").format(rung=rung, where=where, figure=figure)
    show.console.print(kept, highlight=False)
    if again:
        words_ = said("You have predicted this before ({figure}): the first prediction counts.")
        show.console.print(words_.format(figure=again[0].said), highlight=False)


def _has_run(name: str) -> bool:
    """Whether the lesson has come to an end here before: it prints what was measured."""
    return name in course_run.load().seconds


def ask(name: str, lesson: Lesson, rungs: Sequence[str], words: Sequence[str] = ()) -> None:
    """Ask for a prediction of each rung that has stored times; an empty line ends it."""
    _, found = learned.stored(name)
    there = [rung for rung in rungs if any(row.rung == rung for row in found)]
    for nth, rung in enumerate(there):
        at = learned.shape(name, lesson, rung, words)
        hint = said("a time or rate, as 0.4ms or 3TB/s") if not nth else said("or x2: twice as fast as the rung before")
        words_ = said("{rung} at {shape} on an H200? Write {hint}; Enter: none")
        show.console.print(words_.format(rung=rung, shape=at, hint=hint), highlight=False)
        while figure := input(said("{rung}, your prediction: ").format(rung=rung)).strip():
            try:
                keep(name, lesson, rung, words or at.split(), figure)
                break
            except ValueError as why:
                show.console.print(str(why), style="yellow", highlight=False)
        if not figure:
            return


def ask_before_run(name: str, lesson: object) -> None:
    """Before one lesson runs: ask once for predictions, if there is a terminal."""
    if not isinstance(lesson, Lesson) or not can_ask() or name in progress.asked():
        return
    progress.add("asked", name)
    if not [g for g in progress.guesses() if g.lesson == name]:
        words = said("Before it runs: what do you expect? This is asked once a lesson; `progress` compares.")
        show.console.print(words, highlight=False)
        ask(name, lesson, [rung.__name__ for rung in lesson.rungs])


def after_run(name: str) -> None:
    """What was predicted of a lesson that has just run, beside what was measured."""
    if mine := [guess for guess in progress.guesses() if guess.lesson == name]:
        _predictions(learned.all_answered(mine))


# ---- quiz -----------------------------------------------------------------------------------------------------------


def quizzes() -> None:
    """Which quizzes there are, and what was right in them."""
    sat = learned.sat(progress.sittings())
    body = []
    for name in quiz.files():
        body.append([name, *(score or said("not yet") for score in _scores(sat.get(name, {})))])
    show.table(said("quizzes: right answers"), [said("quiz"), said("before"), said("after")], body)
    show.console.print(said("Then:  {command}").format(command=f"{exercises.COURSE} quiz day2 before"), highlight=False)


def _scores(sat: Mapping[str, progress.Sitting]) -> list[str]:
    """Of each part of a quiz how many answers were right, and of how many; "" of one that was not sat."""
    return [f"{s.right} / {len(s.answers)}" if (s := sat.get(part)) else "" for part in quiz.PARTS]


def take(name: str, part: str, given: str) -> None:
    """Ask the questions of a quiz, or take the answers that are given; judge and keep them. Raises ValueError."""
    questions = quiz.load(name, part)
    answers = [each.strip() for each in given.split(",")] if given else []
    if given and len(answers) != len(questions):
        words = said("--answers has {given} answers, expected {count}, with commas between")
        raise ValueError(words.format(given=len(answers), count=len(questions)))
    if not given and not can_ask():
        words = said("no terminal to ask in: give --answers, {count} with commas between; --show prints the questions")
        raise ValueError(words.format(count=len(questions)))
    for nth, question in enumerate([] if given else questions, 1):
        _print_question(question, nth, len(questions))
        answers.append(_asked(question))
    again = part in learned.sat(progress.sittings()).get(name, {})
    marks = learned.sit(questions, answers)
    _print_marks(list(zip(questions, answers, marks, strict=True)), part)
    if again:
        show.console.print(said("You have taken this quiz before: the first time counts."), highlight=False)


def show_questions(name: str, part: str) -> None:
    questions = quiz.load(name, part)
    for nth, question in enumerate(questions, 1):
        _print_question(question, nth, len(questions))


def _print_question(question: quiz.Question, nth: int, count: int) -> None:
    console = show.console
    console.print(f"\n{nth} / {count}  {said(question.skill)}", style="bold", highlight=False)
    console.print(question.asks, highlight=False)
    if code := question.code():
        lexer = "cpp" if question.is_cuda else "python"
        console.print(
            Syntax(code, lexer, line_numbers=question.kind == "bug", background_color="default", word_wrap=True)
        )
    if question.kind in ("choice", "fix"):
        choices = question.choices(facts.compute)
        for letter, choice in zip(quiz.letter_range(len(choices)), choices, strict=True):
            console.print(f"  {letter}) {choice.says}", highlight=False)


def _asked(question: quiz.Question) -> str:
    prompts = {"number": said("a number"), "bug": said("the number of a line")}
    prompt = prompts.get(question.kind, said("a letter"))
    while True:
        answer = input(f"{prompt}: ")
        try:
            quiz.mark(question, answer, facts.compute)
        except ValueError as why:
            show.console.print(str(why), style="yellow", highlight=False)
        else:
            return answer.strip()


def _print_marks(marked: Sequence[tuple[quiz.Question, str, quiz.Marked]], part: str) -> None:
    """What is right, and where it is taught. Reasons come after the day alone: before it they would be the lesson."""
    console = show.console
    console.print()
    for question, answer, mark in marked:
        style, word = ("green", said("right")) if mark.right else ("red", said("wrong"))
        line = said("{verdict}: {skill}: {answer}").format(verdict=word, skill=said(question.skill), answer=answer)
        console.print(line, style=style, highlight=False)
        if not mark.right and part == "after":
            console.print(f"  {mark.why}" * bool(mark.why), highlight=False)
            right = quiz.answer_of(question, facts.compute)
            words = said("Right is {answer}. {because}").format(answer=right, because=question.because)
            console.print(f"  {words}", highlight=False)
        if not mark.right:
            where = f"{question.lesson.replace('.', '/')}.py" + (f", {question.rung}" if question.rung else "")
            console.print(f"  {said('Taught in {where}').format(where=where)}", highlight=False)
    words = said("{right} of {count} right; `progress` shows before and after side by side.")
    count = sum(mark.right for _, _, mark in marked)
    console.print("\n" + words.format(right=count, count=len(marked)), style="bold", highlight=False)


# ---- progress -------------------------------------------------------------------------------------------------------


def mine() -> None:
    """The learner's own evidence, as tables."""
    found = learned.all_answered(progress.guesses())
    _predictions(found)
    records = progress.load()
    body = []
    for each in source.discover():
        record = records.get(each.name, progress.Record())
        if record.checks or record.hints or record.passed:
            body.append([each.short, record.checks, record.hints, record.passed, learned.refusals(record)])
    if body:
        columns = [said("exercise"), said("checks"), said("hints"), said("passed"), said("tries refused by")]
        show.table(said("exercises"), columns, body)
    lines = [[name, *_scores(parts)] for name, parts in sorted(learned.sat(progress.sittings()).items())]
    if lines:
        show.table(said("quizzes: right answers"), [said("quiz"), said("before"), said("after")], lines)
    if not (found or body or lines):
        words = said("Nothing is kept yet. `predict`, `exercise` and `quiz` write it down.")
        show.console.print(words, highlight=False)


def _predictions(found: list[learned.Answered]) -> None:
    lessons = dict.fromkeys(each.guess.lesson for each in found)
    for lesson in lessons:
        of_lesson = [each for each in found if each.guess.lesson == lesson]
        cards = "; ".join(sorted({each.card for each in of_lesson if each.card and each.card != "bytes"}))
        heading = said("predicted and measured: {lesson}").format(lesson=lesson.partition(".")[2])
        body = [[e.guess.rung + "*" * e.guess.seen, e.guess.shape, e.guess.said, e.shown, e.verdict] for e in of_lesson]
        columns = [said("rung"), said("shape"), said("predicted"), said("measured"), said("the prediction is")]
        if cards:
            heading = said("{heading} ({cards})").format(heading=heading, cards=cards)
        show.table(heading, columns, body)
    if any(each.guess.seen for each in found):
        show.console.print(said("* written after the lesson had run here"), style="dim", highlight=False)
    fresh = [each.off for each in found if not each.guess.seen and each.off]
    if (factor := learned.typical(fresh)) is not None:
        one = said("Your prediction is within {factor}x of what was measured.")
        many = said("Of {count} predictions, half are within {factor}x of what was measured.")
        words = (one if len(fresh) == 1 else many).format(count=len(fresh), factor=f"{factor:.2f}")
        show.console.print(words, highlight=False)


def write(name: str, out: Path | None) -> None:
    """The learner's evidence as JSON: to a file, or printed."""
    text = json.dumps(learned.evidence(name), indent=1, ensure_ascii=False) + "\n"
    if out is None:
        print(text, end="")
        return
    write_atomically(out, text)
    words = said("wrote {file}: your predictions, tries, hints and quizzes, for your teacher")
    show.console.print(words.format(file=out), highlight=False)


def of_class(files: Sequence[Path]) -> None:
    """Tables over the files of several learners. Raises ValueError for a file that is none of a learner."""
    learners = []
    for file in files:
        try:
            data = json.loads(file.read_text())
        except (OSError, ValueError) as why:
            words = said("{file} cannot be read: {why}")
            raise ValueError(words.format(file=file, why=why)) from None
        learners.append(learned.Learner.of(data, file.stem))
    words = counted(len(learners), said("1 learner"), said("{count} learners"))
    show.console.print(f"{words}: {', '.join(learner.name for learner in learners)}", highlight=False)
    if lines := learned.quizzes(learners):
        body = [
            [quiz, skill or said("all questions"), count, f"{before:.0%}", f"{after:.0%}", f"{after - before:+.0%}"]
            for quiz, skill, count, before, after in lines
        ]
        columns = [said("quiz"), said("skill"), said("learners"), said("before"), said("after"), said("change")]
        show.table(said("quizzes: share of right answers, of learners who took both"), columns, body)
    if lines := learned.predictions(learners):
        body = [[day, who, count, f"{factor:.2f}x" if factor else ""] for day, who, count, factor in lines]
        columns = [said("day"), said("learners"), said("predictions"), said("half are within")]
        show.table(said("predictions, written before the lesson ran"), columns, body)
    if lines := learned.exercises(learners):
        body = [
            [name, begun, passed, f"{checks:g}", f"{hints:g}", what]
            for name, begun, passed, checks, hints, what in lines
        ]
        columns = [said("exercise"), said("begun"), said("passed"), said("checks"), said("hints"), said("refused by")]
        show.table(said("exercises: medians of those who began"), columns, body)
