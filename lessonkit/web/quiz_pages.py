"""The pages of a day's quiz, before it and after it: questions, what can be chosen, and folded answers.

Answers are computed while the page is made (lessonkit/exercise/quiz.py). A page marks by itself; where the course's
own server gave it, what was answered is kept with the terminal's.
"""

import html
from pathlib import Path

from lessonkit.base.words import said, speaking
from lessonkit.exercise import quiz
from lessonkit.exercise.quiz import Question
from lessonkit.measure import facts
from lessonkit.web import exercise_pages, myst, places

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name


class Page:
    """One part of a quiz in one language."""

    def __init__(self, name: str, part: str, language: str) -> None:
        self.name, self.part, self.language = name, part, language
        self.folder = quiz.files()[name].parent.name
        self.here = places.quiz_page(self.folder, part)

    def text(self) -> str:
        with speaking(self.language):
            questions = quiz.load(self.name, self.part)
            made = [self._question(q, nth, len(questions)) for nth, q in enumerate(questions, 1)]
            words = exercise_pages.attribute(self._words())
            shown = [
                f"# {myst.escaped(title(self.folder, self.part, self.language))}",
                f"[{said('The guide of this day')}](index.md)",
                self._intro(),
                f'<div class="quiz" data-quiz="{self.name}" data-part="{self.part}" data-words="{words}">',
                *made,
                '<p class="quiz-result" role="status"></p>\n</div>',
            ]
        return "\n\n".join(shown) + "\n"

    def _intro(self) -> str:
        if self.part == "before":
            return said(
                "Answer before you read, and guess where you do not know. The quiz after the day asks the same skills "
                "with other figures and kernels, so the two show what the day has taught. Explanations are folded: "
                "they are better read after the day."
            )
        return said(
            "The same skills as before the day, with other figures and kernels. Each answer is explained once you "
            "have checked yours."
        )

    def _words(self) -> dict[str, object]:
        """What static/quiz.js says."""
        return {
            "right": said("right"),
            "wrong": said("wrong"),
            "number": said("Write a number first."),
            "choose": said("Choose an answer first."),
            "result": said("{right} of {count} right."),
            "kept": said("It is kept in {file}. `progress` shows before and after side by side.").replace("`", ""),
            "again": said("You have taken this quiz before: the first time counts."),
            "taken": said("You have taken this quiz on {day}: {right} of {count} right."),
            "alone": said("This page keeps nothing. The terminal does: {command}").format(
                command=f"{exercise_pages.COURSE} quiz {self.name} {self.part}"
            ),
            "status": exercise_pages.status_words(self.language),
        }

    # ---- One question ----

    def _question(self, question: Question, nth: int, count: int) -> str:
        marks = exercise_pages.attribute(_marks(question))
        shown = [
            f'<fieldset class="quiz-question" data-kind="{question.kind}" data-marks="{marks}">\n'
            f"<legend>{nth} / {count} · {html.escape(said(question.skill))}</legend>",
            myst.escaped(question.asks),
        ]
        if question.kind != "bug" and (code := question.code()):
            shown.append(myst.code(code, ".cu" if question.is_cuda else ".py"))
        shown += [
            _inputs(question, nth),
            f'<p class="exercise-buttons"><button type="button" class="quiz-check" hidden>{said("Check")}</button></p>'
            '\n<div class="quiz-said" role="status"></div>',
            f'<details class="fold quiz-answer"><summary>{said("The answer, and why")}</summary>',
            f"{_answer(question)} {myst.escaped(question.because)}",
            f"{self._taught(question)}",
            "</details>\n</fieldset>",
        ]
        return "\n\n".join(shown)

    def _taught(self, question: Question) -> str:
        lesson = places.relative(places.lesson_page(question.lesson), self.here)
        link = f"[{question.lesson.partition('.')[2]}]({lesson}.md)"
        return said("Taught in {where}").format(where=link + (f", `{question.rung}`" if question.rung else ""))


def title(folder: str, part: str, language: str) -> str:
    """As its page and the links to it have it: "Day 2: the quiz before"."""
    heading = places.heading(folder, language)
    with speaking(language):
        words = said("{day}: the quiz before") if part == "before" else said("{day}: the quiz after")
    return words.format(day=heading)


def links(folder: str, language: str) -> str:
    """The line at the head of a day's guide: its quizzes and its exercises."""
    with speaking(language):
        shown = [f"[{said('Quiz before')}](quiz_before.md)", f"[{said('Exercises')}](exercises/index.md)",
                 f"[{said('Quiz after')}](quiz_after.md)"]  # fmt: skip
    return " · ".join(shown)


def folders() -> dict[str, Path]:
    """Folder -> its quiz's file."""
    return {path.parent.name: path for path in quiz.files().values()}


def _marks(question: Question) -> dict[str, object]:
    """What a page marks an answer by, as quiz.mark does: the right one, and what is said of known mistakes."""
    if question.kind == "number":
        wrong: object = question.wrong_numbers(facts.compute)
        return {"right": question.number(facts.compute), "within": question.within, "wrong": wrong}
    right = quiz.answer_of(question, facts.compute)
    values = quiz.letter_range(len(_choices(question))) if question.kind != "bug" else _lines(question)
    marked = {value: quiz.mark(question, value, facts.compute) for value in values}
    return {"right": right, "wrong": [(value, mark.why) for value, mark in marked.items() if mark.why]}


def _choices(question: Question) -> list[quiz.Choice]:
    return question.choices(facts.compute)


def _lines(question: Question) -> list[str]:
    return [str(n) for n in range(1, question.code().count("\n") + 2)]


def _inputs(question: Question, nth: int) -> str:
    """Where an answer is given: a field for a number, a line of the kernel or a choice to mark."""
    name = f"q{nth}"
    if question.kind == "number":
        label = f"{said('Your answer')} "
        field = f'<input type="text" inputmode="decimal" autocomplete="off" name="{name}">'
        return f'<p class="quiz-number"><label>{label}{field}</label></p>'
    if question.kind == "bug":
        lexer = get_lexer_by_name("cuda" if question.is_cuda else "python")
        drawn = highlight(question.code(), lexer, HtmlFormatter(nowrap=True)).rstrip("\n").split("\n")
        rows = [
            f'<label class="quiz-line"><input type="radio" name="{name}" value="{n}"><span class="quiz-at">{n}</span>'
            f"<code>{line}</code></label>"
            for n, line in enumerate(drawn, 1)
        ]
        return f'<div class="quiz-lines highlight">\n{chr(10).join(rows)}\n</div>'
    choices = _choices(question)
    code = question.kind == "fix"
    rows = []
    for letter, choice in zip(quiz.letter_range(len(choices)), choices, strict=True):
        says = html.escape(choice.says)
        shown = f"<code>{says}</code>" if code else f"<span>{says}</span>"
        rows.append(
            f'<label class="quiz-choice"><input type="radio" name="{name}" value="{letter}"><span>{letter})</span> '
            f"{shown}</label>"
        )
    return f'<div class="quiz-choices">\n{chr(10).join(rows)}\n</div>'


def _answer(question: Question) -> str:
    """The right answer, as the fold shows it."""
    right = quiz.answer_of(question, facts.compute)
    if question.kind == "number":
        return f"**{right}.**"
    if question.kind == "bug":
        line = question.code().splitlines()[int(right) - 1].strip()
        return f"**{said('Line {number}').format(number=right)}:** `{line}`."
    chosen = next(choice for choice in _choices(question) if choice.right)
    says = f"`{chosen.says}`" if question.kind == "fix" else myst.escaped(chosen.says)
    return f"**{right})** {says}{'' if chosen.says.endswith(('.', '。')) else '.'}"
