"""A short test before and after a day: FOLDER/quiz.toml says the questions, and no answer stands in it.

Each skill is asked twice, before the day and after it, with other figures, code or kernels. Answers come from the
lessons. A number is computed, and a choice follows from a fact. The wrong line of a kernel is that of one of the
lesson's mutants, which the lesson's own checks refuse. The words `{n}` in a text are figures of the part.

    [[skill]]
    name = "programs of a grid"          as a teacher's summary has it
    lesson = "lesson01_vector_add"       of the folder; it teaches the skill
    rung = "add_wide"                    or a step of it
    asks = "n = {n:,}: how many programs?"
    because = "why the answer is right"
    before = { n = 98432 }               and `after`; each may say any field of the skill instead of it

    A number:   answer = "cdiv(n, 1024)", within = 0.02;  wrong = [{ answer = "n // 1024", why = "..." }]
    A choice:   fact = "expression", choices = [{ says = "...", when = value of the fact, why = "if it is chosen" }]
                or without a fact, check = "expression that is true of the right choice" in place of `when`
                code is shown, and runs before anything is computed
    A bug:      mutant = "its `why` in the lesson", wrong = [{ line = "a part of it", why = "..." }]
    A repair:   mutant = "...", fixes = [{ new = "in place of the mutant's text", why = "..." }]
"""

import ast
import hashlib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lessonkit.base.cpp_text import definitions
from lessonkit.base.errors import Misdeclared
from lessonkit.base.files import ROOT
from lessonkit.base.prose import is_prose
from lessonkit.base.words import said
from lessonkit.lesson import Mutant

PARTS = ("before", "after")
FILE = "quiz.toml"
BLANK = "____"  # where a repair belongs
TEXTS = ("name", "asks", "because", "says", "why")  # the fields that are translated
Compute = Callable[[str, str, Mapping[str, Any]], Any]  # (expression, code that runs before it, its names)


@dataclass(frozen=True)
class Choice:
    """One answer that a learner may choose. why: why it is wrong; "" of the right one."""

    says: str
    right: bool
    why: str = ""


@dataclass(frozen=True)
class Question:
    """One question of one part of a quiz, in English and with its figures filled in where it is shown."""

    quiz: str
    part: str
    skill: str
    lesson: str
    rung: str
    fields: Mapping[str, Any] = field(hash=False)

    @property
    def kind(self) -> str:
        kinds = {"answer": "number", "choices": "choice", "fixes": "fix", "mutant": "bug"}
        return next(kind for key, kind in kinds.items() if key in self.fields)

    @property
    def is_cuda(self) -> bool:
        return _path(self.lesson).with_suffix(".cu").exists()

    @property
    def asks(self) -> str:
        return self._text("asks")

    @property
    def because(self) -> str:
        return self._text("because")

    def _text(self, key: str) -> str:
        return said(self.fields.get(key, "")).format(**self.fields)

    # ---- A number ----

    def number(self, compute: Compute) -> float:
        return float(compute(self.fields["answer"], self.fields.get("code", ""), self.fields))

    def wrong_numbers(self, compute: Compute) -> list[tuple[float, str]]:
        """The values that known mistakes lead to, and what is wrong with each."""
        code = self.fields.get("code", "")
        wrong = self.fields.get("wrong", ())
        return [(float(compute(w["answer"], code, self.fields)), said(w["why"]).format(**self.fields)) for w in wrong]

    @property
    def within(self) -> float:
        """How far off a number may be, as a share of it."""
        return float(self.fields.get("within", 0.02))

    # ---- A choice ----

    def choices(self, compute: Compute) -> list[Choice]:
        """What can be chosen, in an order that says nothing."""
        if self.kind == "fix":
            right = self.mutant().old
            found = [Choice(f["new"], f["new"] == right, said(f.get("why", ""))) for f in self.fields["fixes"]]
        else:
            found = []
            for choice in self.fields["choices"]:
                holds = self._holds(choice, compute)
                why = "" if holds else said(choice.get("why", "")).format(**self.fields)
                found.append(Choice(said(choice["says"]).format(**self.fields), holds, why))
        return sorted(found, key=lambda c: hashlib.sha256(f"{self.part} {c.says}".encode()).hexdigest())

    def _holds(self, choice: Mapping[str, Any], compute: Compute) -> bool:
        code = self.fields.get("code", "")
        if "check" in choice:
            return bool(compute(choice["check"], code, self.fields))
        fact = compute(self.fields["fact"], code, self.fields)
        return type(fact) is type(choice["when"]) and bool(fact == choice["when"])

    # ---- A kernel that is shown ----

    def mutant(self) -> Mutant:
        """The lesson's mutant of this name. Raises Misdeclared if there is none."""
        found = {each.why: each for each in _mutants(self.lesson)}
        if self.fields["mutant"] not in found:
            raise Misdeclared(f"{self}: {self.lesson} has no mutant {self.fields['mutant']!r}: {', '.join(found)}")
        return found[self.fields["mutant"]]

    def code(self) -> str:
        """What is shown: code of the question's own, or the function with the mutant's line in it; "" for none."""
        if self.kind == "fix":
            return self.shown(BLANK)[0]
        return self.shown()[0] if self.kind == "bug" else str(self.fields.get("code", "")).strip()

    def shown(self, new: str | None = None) -> tuple[str, int]:
        """The function with the mutant in it (or another text in its place), and the number of the changed line."""
        mutant = self.mutant()
        text = _function(self.lesson, mutant)
        at = text.index(mutant.old)
        return text.replace(mutant.old, mutant.new if new is None else new), text.count("\n", 0, at) + 1

    def line_of(self, part: str) -> int:
        """The number of the shown line that has this text. Raises Misdeclared unless there is one."""
        found = [n for n, line in enumerate(self.code().splitlines(), 1) if part in line]
        if len(found) != 1:
            raise Misdeclared(f"{self}: {part!r} stands in {len(found)} lines of the shown code, expected one")
        return found[0]

    def __str__(self) -> str:
        return f"{self.quiz} {self.part}: {self.skill}"


@dataclass(frozen=True)
class Marked:
    """An answer: is it right, and what is to be said of it."""

    right: bool
    why: str = ""


def mark(question: Question, answer: str, compute: Compute) -> Marked:
    """Judge what a learner wrote. Raises ValueError if it is no answer to this kind of question."""
    answer = answer.strip().lower()
    if question.kind == "number":
        try:
            value = float(answer.replace(",", "").replace("_", ""))
        except ValueError:
            raise ValueError(said("write a number, not {answer}").format(answer=repr(answer))) from None
        if _close(value, question.number(compute), question.within):
            return Marked(True)
        why = (text for wrong, text in question.wrong_numbers(compute) if _close(value, wrong, question.within))
        return Marked(False, next(why, ""))
    if question.kind == "bug":
        lines = question.code().count("\n") + 1
        if not answer.isdigit() or not 1 <= int(answer) <= lines:
            raise ValueError(said("write the number of a line, 1 to {lines}").format(lines=lines))
        _, right = question.shown()
        named = {question.line_of(w["line"]): said(w["why"]) for w in question.fields.get("wrong", ())}
        return Marked(int(answer) == right, named.get(int(answer), ""))
    choices = question.choices(compute)
    letters = letter_range(len(choices))
    if answer not in letters:
        raise ValueError(said("write one of the letters {letters}").format(letters=", ".join(letters)))
    chosen = choices[letters.index(answer)]
    return Marked(chosen.right, chosen.why)


def answer_of(question: Question, compute: Compute) -> str:
    """The right answer as a learner writes it."""
    if question.kind == "number":
        return f"{question.number(compute):.6g}"
    if question.kind == "bug":
        return str(question.shown()[1])
    choices = question.choices(compute)
    return next(letter for letter, c in zip(letter_range(len(choices)), choices, strict=True) if c.right)


def letter_range(count: int) -> list[str]:
    return [chr(ord("a") + nth) for nth in range(count)]


def _close(value: float, exact: float, within: float) -> bool:
    return abs(value - exact) <= within * abs(exact)


# ---- The files ------------------------------------------------------------------------------------------------------


def files() -> dict[str, Path]:
    """Quiz -> its file: day1 ... day5, cuda."""
    found = [*sorted(ROOT.glob(f"day*/{FILE}")), *ROOT.glob(f"cuda_src/{FILE}")]
    return {path.parent.name.partition("_")[0]: path for path in found}


def load(quiz: str, part: str) -> list[Question]:
    """The questions of a part, in their order. Raises ValueError if there is no such quiz or part."""
    there = files()
    if quiz not in there:
        raise ValueError(said("there is no quiz {quiz}; there are {known}").format(quiz=quiz, known=", ".join(there)))
    if part not in PARTS:
        raise ValueError(said("a quiz has the parts before and after, not {part}").format(part=repr(part)))
    folder = there[quiz].parent.name
    found = []
    for skill in tomllib.loads(there[quiz].read_text())["skill"]:
        shared = {key: value for key, value in skill.items() if key not in PARTS}
        fields = shared | skill[part]
        lesson = f"{folder}.{fields['lesson']}"
        found.append(Question(quiz, part, skill["name"], lesson, fields["rung"], fields))
    return found


def messages(path: Path) -> Iterator[str]:
    """What of a quiz's file is translated."""

    def walk(value: Any, key: str = "") -> Iterator[str]:
        if isinstance(value, dict):
            for inner, each in value.items():
                yield from walk(each, inner)
        elif isinstance(value, list):
            for each in value:
                yield from walk(each, key)
        elif key in TEXTS and is_prose(str(value)):  # a choice may be code
            yield str(value)

    yield from dict.fromkeys(walk(tomllib.loads(path.read_text())))


# ---- Mutants and functions, read from the text: importing a lesson takes seconds ------------------------------------


@cache
def _mutants(lesson: str) -> tuple[Mutant, ...]:
    tree = ast.parse(_path(lesson).read_text())
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Mutant")
    found = []
    for call in calls:
        given = [ast.literal_eval(argument) for argument in call.args]
        found.append(Mutant(*given, **{str(k.arg): ast.literal_eval(k.value) for k in call.keywords}))
    return tuple(found)


@cache
def _function(lesson: str, mutant: Mutant) -> str:
    """The function of the lesson, or of its program in CUDA C++, that has the mutant's text; comments are left out."""
    path = _path(lesson)
    if (program := path.with_suffix(".cu")).exists():
        text = program.read_text()
        found = [text[d.start : d.stop] for d in definitions(text) if d.name == mutant.where]
        comment = "//"
    else:
        text, comment = path.read_text(), "#"
        lines = text.splitlines()
        found = [
            "\n".join(lines[node.lineno - 1 : node.end_lineno])
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef) and node.name == mutant.where
        ]
    for function in found:
        shown = "\n".join(filter(str.strip, (_code(line, comment) for line in function.splitlines())))
        if shown.count(mutant.old) == 1:
            return shown
    raise Misdeclared(f"{lesson}: {mutant.old!r} stands in no line of {mutant.where} that can be shown")


def _code(line: str, comment: str) -> str:
    """The line without its comment, which may tell what is wrong with it. No shown line has the mark in a string."""
    return line.partition(comment)[0].rstrip()


def _path(lesson: str) -> Path:
    return ROOT / f"{lesson.replace('.', '/')}.py"
