"""One file, many answers: the right one, the stub, each wrong one and the learner's, all under one grader's part."""

import hashlib
import importlib.util
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType

from lessonkit.base import files
from lessonkit.base.files import ROOT, write_atomically
from lessonkit.base.prose import Translate, read_as
from lessonkit.base.words import LANGUAGES, said, translated
from lessonkit.exercise import Exercise, Wrong

CUT = "# The learner's file ends here."
TODO = re.compile(r"(?P<indent>\s*)(?P<mark>#|//) TODO\((?P<number>\d+)\): (?P<task>.+)")


@dataclass(frozen=True)
class Region:
    """What the learner writes: lines [start, stop) between the TODO line and the END line."""

    number: int
    task: str
    start: int
    stop: int
    stub: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """An exercise's file. `name` is folder.stem: day2_triton_basics.exercise01_mul."""

    path: Path

    @property
    def folder(self) -> str:
        """The day's folder: day2_triton_basics."""
        return self.path.parent.parent.name

    @property
    def name(self) -> str:
        return f"{self.folder}.{self.path.stem}"

    @property
    def short(self) -> str:
        """What the commands take: mul."""
        return self.path.stem.partition("_")[2]

    @property
    def is_cuda(self) -> bool:
        return self.path.with_suffix(".cu").exists()

    @property
    def answer_name(self) -> str:
        """The learner's file, in a folder of answers: day2_triton_basics/exercise01_mul.py."""
        return f"{self.folder}/{self.path.stem}{'.cu' if self.is_cuda else '.py'}"

    @cached_property
    def _parts(self) -> tuple[str, str]:
        text = self.path.read_text()
        if self.is_cuda:
            return self.path.with_suffix(".cu").read_text(), text
        learners, cut, graders = text.partition(CUT)
        if not cut:
            raise ValueError(f"{self.path}: the line {CUT!r} is missing")
        return learners.rstrip() + "\n", graders

    @property
    def with_marks(self) -> str:
        """The learner's part as it stands in the file, `stub:` lines included."""
        return self._parts[0]

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        return tuple(_regions(self.with_marks, self.path))

    @cached_property
    def solution(self) -> str:
        return self.right_elsewhere(())

    @cached_property
    def stub(self) -> str:
        """What the learner starts from."""
        text = self.right_elsewhere(self.regions)
        for wrong in self.exercise.wrong if not self.regions else ():
            if wrong.planted:
                text = _replaced(self, text, wrong)
        return text

    def read(self, text: str, translate: Translate = said) -> str:
        """One of its texts, with the comments in the reader's language."""
        return read_as(text, ".cu" if self.is_cuda else ".py", translate)

    def is_stub(self, text: str) -> bool:
        """Whether it is what a learner starts from, in whichever language it was begun."""
        known = (self.read(self.stub, partial(translated, language=each)) for each in ("en", *LANGUAGES))
        return any(text == each for each in known)

    @cached_property
    def exercise(self) -> Exercise:
        found = build(self, self.solution).EXERCISE
        assert isinstance(found, Exercise)
        return found

    @cached_property
    def title(self) -> str:
        """The first line of the task."""
        first = next(line for line in self.with_marks.splitlines() if line.strip('/" '))
        return first.strip('/" ')

    def wrong(self, wrong: Wrong) -> str:
        """The text of a wrong answer. Raises ValueError where the right one has moved on and the wrong one has not."""
        return _replaced(self, self.solution, wrong)

    def right_elsewhere(self, regions: Collection[Region]) -> str:
        """The right answer, with these regions as the stub has them."""
        lines = self.with_marks.splitlines(True)
        for region in reversed(self.regions):
            if region in regions:
                lines[region.start : region.stop] = region.stub
        return "".join(line for line in lines if not re.match(r"\s*(#|//) stub:", line))

    def untouched(self, answer: str) -> list[Region]:
        """The regions that an answer has as the stub does."""
        ours, theirs = _blocks(self.stub), _blocks(answer)
        return [r for r in self.regions if r.number in theirs and ours[r.number] == theirs[r.number]]


def _replaced(source: Source, text: str, wrong: Wrong) -> str:
    if text.count(wrong.old) != 1:
        raise ValueError(f"{source.name}: {wrong.old!r} stands {text.count(wrong.old)} times in the answer, not once")
    return text.replace(wrong.old, wrong.new)


def _regions(text: str, path: Path) -> Iterator[Region]:
    lines = text.splitlines(True)
    for at, line in enumerate(lines):
        if not (todo := TODO.match(line)):
            continue
        end = f"{todo['mark']} END({todo['number']})"
        stop = next((i for i in range(at, len(lines)) if lines[i].strip() == end), None)
        if stop is None:
            raise ValueError(f"{path}: TODO({todo['number']}) has no line {end!r}")
        head = f"{todo['mark']} stub: "
        stub = [todo["indent"] + s.split(head, 1)[1] for s in lines[at + 1 : stop] if s.strip().startswith(head)]
        if not stub and todo["mark"] == "#":
            stub = [f"{todo['indent']}pass\n"]
        yield Region(int(todo["number"]), todo["task"].strip(), at + 1, stop, tuple(stub))


def _blocks(text: str) -> dict[int, str]:
    """The code in each region: a comment may be in any language, and no task is done by one."""
    text = re.sub(r"^ *(?:#|//) (?!TODO\(|END\().*\n", "", text, flags=re.MULTILINE)
    found = re.finditer(r"(?:#|//) TODO\((\d+)\):[^\n]*\n(.*?)(?:#|//) END\(\1\)", text, re.DOTALL)
    return {int(m[1]): re.sub(r"\s+", " ", m[2]) for m in found}


def build(source: Source, answer: str) -> ModuleType:
    """Import an answer under the grader's part. Triton reads a kernel's source from its file, so it gets one.

    Raises SyntaxError, or whatever the answer itself raises while it is imported.
    """
    grader = source._parts[1]
    stem = f"answer_{hashlib.sha256((source.name + answer + grader).encode()).hexdigest()[:16]}"
    if stem in sys.modules:
        return sys.modules[stem]
    answers = files.CACHE / "lessonkit_answers"
    files.need_private(answers)
    folder = answers / stem
    if source.is_cuda:
        write_atomically(folder / f"{stem}.cu", answer)
        write_atomically(folder / f"{stem}.py", grader)
    else:
        write_atomically(folder / f"{stem}.py", answer + grader)
    spec = importlib.util.spec_from_file_location(stem, folder / f"{stem}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[stem]
        raise
    return module


def discover() -> list[Source]:
    """Every exercise in reading order; the folders are the only list there is."""
    days = sorted(ROOT.glob("day*_*/exercises/exercise*.py"))
    return [Source(path) for path in [*days, *sorted(ROOT.glob("cuda_src/exercises/exercise*.py"))]]


def find(which: str) -> list[Source]:
    """Exercises by their name, or a part of it: mul, exercise01_mul, day2, day2_triton_basics.exercise01_mul."""
    found = discover()
    exact = [s for s in found if which in (s.name, s.path.stem, s.short)]
    return exact or [s for s in found if s.name.startswith(which) or which in s.path.stem]
