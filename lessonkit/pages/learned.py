"""What a learner's predictions, tries and quizzes say: one learner's evidence, and the summary of a class.

A prediction is a figure with a unit: `1.2ms`, `350us`, `3.9TB/s`, `600TFLOP/s`, or `85%` of the limit. `x1.5` is so
many times as fast as the rung before, `2least` so many times the least bytes. It is held against a stored row.
"""

import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from statistics import mean, median
from typing import Any

from lessonkit.base import device
from lessonkit.base.files import REPORTS
from lessonkit.base.words import said
from lessonkit.exercise import progress, quiz, source
from lessonkit.exercise.progress import Guess, Record, Sitting
from lessonkit.exercise.quiz import Marked, Question
from lessonkit.lesson import Lesson, discover, shape_name
from lessonkit.measure import facts, rows, yardstick
from lessonkit.measure.rows import MACHINE, Row

VERSION = 1  # of the file that a learner hands to a teacher
UNITS = ("ms", "us", "TB/s", "TFLOP/s", "%", "x", "least")
_WRITTEN = re.compile(r"(?P<times>x?)(?P<value>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*(?P<unit>[A-Za-z/%]*)")
SHOWN = {unit.lower(): unit for unit in UNITS}


def parsed(text: str) -> tuple[float, str]:
    """A prediction's value and unit. Raises ValueError, which says how to write one."""
    found = _WRITTEN.fullmatch(text.strip())
    unit = "x" if found and found["times"] and not found["unit"] else found["unit"].lower() if found else ""
    if not found or unit not in SHOWN or (found["times"] and unit != "x") or not float(found["value"]):
        raise ValueError(
            said("{text} is no prediction: write a number with a unit, as {examples}").format(
                text=repr(text), examples="1.2ms, 350us, 3.9TB/s, 600TFLOP/s, 85%, x1.5, 2least"
            )
        )
    return float(found["value"]), SHOWN[unit]


def written(value: float, unit: str) -> str:
    return f"x{value:.3g}" if unit == "x" else f"{value:.3g}{' ' * (unit not in '%')}{unit}"


# ---- What was measured ----------------------------------------------------------------------------------------------


def stored(lesson: str) -> tuple[str, list[Row]]:
    """The rungs' rows of this machine's own card where it has any, else of the card that the reports are about."""
    folders = [device.name()] * device.HAS_GPU + [MACHINE]
    for folder in folders:
        if found := [row for row in rows.read(REPORTS / folder / f"{lesson}.csv") if row.kind == "rung"]:
            return folder, found
    return folders[0], []


def shown_shapes(lesson: Lesson, found: Sequence[Row]) -> list[str]:
    """The shapes that `run` shows: those of the lesson's predictions, else the one that moves most bytes."""
    asked = list(dict.fromkeys(shape_name(each.at) for each in lesson.predicted))
    return asked or [max(found, key=lambda row: row.bytes).shape] if found else asked


def shape(name: str, lesson: Lesson, rung: str, words: Sequence[str]) -> str:
    """The stored shape of a rung that has these words (`N=4096`); without words one that `run` shows.

    Raises ValueError, which lists the shapes.
    """
    _, found = stored(name)
    there = list(dict.fromkeys(row.shape for row in found if row.rung == rung))
    if not there:
        return " ".join(words)
    fit = [each for each in there if set(words) <= set(each.split())]
    if not words:
        fit = [each for each in shown_shapes(lesson, found) if each in there][:1] or there[-1:]
    if " ".join(words) in there:
        fit = [" ".join(words)]
    if len(fit) != 1:
        words_ = said("{shape} names {count} shapes of {rung}, expected one of: {shapes}")
        raise ValueError(words_.format(shape=" ".join(words), count=len(fit), rung=rung, shapes="; ".join(there)))
    return fit[0]


@dataclass(frozen=True)
class Answered:
    """A prediction beside what was measured.

    measured  in the prediction's unit; None where there is no row
    card      the folder of the row; "bytes" where bytes were counted without a GPU
    off       predicted over measured, as times or bytes: 2 is twice too long, 0.5 twice too short
    """

    guess: Guess
    measured: float | None = None
    card: str = ""
    off: float | None = None

    @property
    def factor(self) -> float | None:
        """How far off, either way: 1 is right."""
        return max(self.off, 1 / self.off) if self.off else None

    @property
    def shown(self) -> str:
        """What was measured, in the prediction's unit."""
        return written(self.measured, parsed(self.guess.said)[1]) if self.measured else ""

    @property
    def verdict(self) -> str:
        if self.off is None or self.factor is None:
            return said("not measured")
        if self.factor < 1.15:
            return said("right")
        words = said("{times}x too slow") if self.off > 1 else said("{times}x too fast")
        if self.card == "bytes":
            words = said("{times}x too many") if self.off > 1 else said("{times}x too few")
        return words.format(times=f"{self.factor:.2g}")


def answered(guess: Guess, lesson: Lesson) -> Answered:
    """Hold a prediction against the stored row of its rung and shape, or against the bytes that the tests count."""
    value, unit = parsed(guess.said)
    if unit == "least":
        moved = {rung.__name__: times for rung, times in lesson.passes.items()}.get(guess.rung)
        return Answered(guess, moved, "bytes", value / moved) if moved else Answered(guess)
    folder, found = stored(guess.lesson)
    at = {row.rung: row for row in found if row.shape == guess.shape}
    order = [rung.__name__ for rung in lesson.rungs if rung.__name__ in at]
    row = at.get(guess.rung)
    if row is None:
        return Answered(guess)
    position = order.index(guess.rung) if guess.rung in order else 0
    before = at[order[position - 1]] if position else None
    rate = {"TB/s": row.tb_per_s, "TFLOP/s": row.tflop_per_s, "%": yardstick.share(row).percent}
    if unit in ("ms", "us"):
        measured = row.ms_p50 * (1000 if unit == "us" else 1)
        return Answered(guess, measured, folder, value / measured)
    faster = before.ms_p50 / row.ms_p50 if unit == "x" and before else rate.get(unit, 0)
    return Answered(guess, faster, folder, faster / value) if faster else Answered(guess)


def first(guesses: Iterable[Guess]) -> list[Guess]:
    """The first prediction of each rung, shape and kind of unit: later ones may know the answer."""
    found: dict[tuple[str, str, str, bool], Guess] = {}
    for guess in guesses:
        found.setdefault((guess.lesson, guess.rung, guess.shape, guess.said.endswith("least")), guess)
    return list(found.values())


def all_answered(guesses: Iterable[Guess]) -> list[Answered]:
    """The first predictions beside what was measured; one of a lesson that cannot be imported stays without."""
    lessons: dict[str, Any] = {}
    found = []
    for guess in first(guesses):
        if guess.lesson not in lessons:
            lessons[guess.lesson] = next((each for _, each in discover(guess.lesson)), None)
        lesson = lessons[guess.lesson]
        found.append(answered(guess, lesson) if isinstance(lesson, Lesson) else Answered(guess))
    return found


# ---- One learner's evidence -----------------------------------------------------------------------------------------


def evidence(name: str) -> dict[str, Any]:
    """What a learner hands to a teacher, as JSON: predictions, exercises and quizzes."""
    records = progress.load()
    return {
        "course": "gpu-kernels",
        "version": VERSION,
        "learner": name,
        "day": date.today().isoformat(),
        "python": sys.version.split()[0],
        "card": device.name(),
        "predictions": [
            asdict(each.guess) | {"measured": each.measured, "card": each.card, "off": each.off}
            for each in all_answered(progress.guesses())
        ],
        "exercises": {s.name: asdict(records[s.name]) for s in source.discover() if s.name in records},
        "quizzes": [asdict(sitting) for sitting in progress.sittings()],
    }


def sat(sittings: Iterable[Sitting]) -> dict[str, dict[str, Sitting]]:
    """Quiz -> part -> the first sitting of it."""
    found: dict[str, dict[str, Sitting]] = {}
    for sitting in sittings:
        found.setdefault(sitting.quiz, {}).setdefault(sitting.part, sitting)
    return found


def sit(questions: Sequence[Question], answers: Sequence[str]) -> list[Marked]:
    """Judge the answers to all questions of a part, in their order, and keep the sitting.

    Raises ValueError if there are more or fewer answers, or one is no answer to its question.
    """
    if len(answers) != len(questions):
        words = said("there are {given} answers, expected {count}")
        raise ValueError(words.format(given=len(answers), count=len(questions)))
    marks = [quiz.mark(q, answer, facts.compute) for q, answer in zip(questions, answers, strict=True)]
    kept = {q.skill: [a.strip(), m.right] for q, a, m in zip(questions, answers, marks, strict=True)}
    progress.add("quizzes", Sitting(questions[0].quiz, questions[0].part, kept, time.time()))
    return marks


def refusals(record: Record) -> str:
    """What refused the tries of an exercise, the most frequent first: `value 3, out of bounds 1`."""
    whats = [str(what) for _, what in record.events]
    tries = [what for what in whats if what != "right" and not what.startswith("hint ")]
    return ", ".join(f"{what} {tries.count(what)}" for what in sorted(set(tries), key=lambda w: -tries.count(w)))


# ---- A class --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learner:
    """One learner's file. Raises ValueError where it is none."""

    name: str
    guesses: list[Mapping[str, Any]]
    records: dict[str, Record]
    sittings: list[Sitting]

    @classmethod
    def of(cls, data: Any, file: str) -> "Learner":
        try:
            if data["course"] != "gpu-kernels" or data["version"] != VERSION:
                raise ValueError(f"version {data['version']}")
            return cls(
                data["learner"] or file,
                [{"lesson": str(g["lesson"]), "off": g["off"], "seen": bool(g["seen"])} for g in data["predictions"]],
                {name: Record(**record) for name, record in data["exercises"].items()},
                [Sitting(**sitting) for sitting in data["quizzes"]],
            )
        except (KeyError, TypeError, AttributeError, ValueError) as why:
            words = said("{file} is no file of a learner ({why}): `progress --out {file}` writes one")
            raise ValueError(words.format(file=file, why=f"{type(why).__name__}: {why}")) from None


def typical(factors: Iterable[float | None]) -> float | None:
    """The median factor by which predictions are off, either way; None without any."""
    found = [max(off, 1 / off) for off in factors if off]
    return median(found) if found else None


def quizzes(learners: Sequence[Learner]) -> list[list[Any]]:
    """quiz, skill (empty: all of them), learners with both parts, share right before, and after.

    Only learners who sat both parts count, so that both shares are of the same people.
    """
    lines = []
    both: dict[str, list[tuple[Sitting, Sitting]]] = {}
    for learner in learners:
        for name, parts in sat(learner.sittings).items():
            if "before" in parts and "after" in parts:
                both.setdefault(name, []).append((parts["before"], parts["after"]))
    for name, pairs in sorted(both.items()):
        share = [mean(s.right / max(1, len(s.answers)) for s in part) for part in zip(*pairs, strict=True)]
        lines.append([name, "", len(pairs), *share])
        for skill in dict.fromkeys(skill for pair in pairs for s in pair for skill in s.answers):
            asked = [[s.answers[skill][1] for s in part if skill in s.answers] for part in zip(*pairs, strict=True)]
            if all(asked):
                lines.append([name, skill, len(pairs), *(mean(map(bool, each)) for each in asked)])
    return lines


def exercises(learners: Sequence[Learner]) -> list[list[Any]]:
    """exercise, begun by, passed by, checks and hints of those who began (medians), what refused most tries."""
    lines = []
    for each in source.discover():
        records = [learner.records[each.name] for learner in learners if each.name in learner.records]
        if begun := [r for r in records if r.checks or r.hints]:
            what = refusals(Record(events=[event for r in begun for event in r.events])).partition(",")[0]
            checks, hints = median(r.checks for r in begun), median(r.hints for r in begun)
            lines.append([each.name, len(begun), sum(bool(r.passed) for r in begun), checks, hints, what])
    return lines


def predictions(learners: Sequence[Learner]) -> list[list[Any]]:
    """day, learners who predicted, predictions, the median factor off; only what was written before a run counts."""
    lines = []
    unseen = [(learner.name, g) for learner in learners for g in learner.guesses if not g["seen"]]
    for day in sorted({g["lesson"].partition(".")[0] for _, g in unseen}):
        of_day = [(name, g["off"]) for name, g in unseen if g["lesson"].startswith(f"{day}.")]
        lines.append([day, len({name for name, _ in of_day}), len(of_day), typical(off for _, off in of_day)])
    return lines
