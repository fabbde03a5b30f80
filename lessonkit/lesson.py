"""What a lesson declares about itself. Tests, benchmarks and reports all walk `discover()`; there is no second list."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from lessonkit.base.chips import CHIPS
from lessonkit.base.errors import Misdeclared
from lessonkit.base.files import ROOT
from lessonkit.validate import FLOATS

import torch

Rung = Callable[..., Any]
Shape = dict[str, Any]
Figure = float | tuple[float, float]  # one, or from and to


class Launchers(Protocol):
    """The launchers of a .cu (cuda.extension makes them): what a declaration and its checks need of them."""

    source: Path

    def lacks(self) -> str:
        """The one line that says why this machine cannot run the launchers, or an empty string."""


@dataclass(frozen=True)
class Case:
    """One small input to check, and the bug that it would show."""

    why: str
    shape: Shape
    gib: float = 0  # GPU memory that the check needs; such a case is not interpreted, and past 1 GiB runs by itself

    def __str__(self) -> str:
        return shape_name(self.shape)


def case(why: str, *, gib: float = 0, **shape: Any) -> Case:
    """`case("a prime width: the tail mask is live", M=3, N=127)`."""
    return Case(why, shape, gib)


def shape_name(shape: Mapping[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in shape.items() if v is not None)  # None: an option that is not used


@dataclass(frozen=True, kw_only=True)
class About:
    """What a reader wants to know before the lesson; tables, paths and reports are made of it (pages.guides).

    teaches    what the lesson settles, in one line of English; its Chinese stands in locale/
    hours      for a reader who does the lesson from beginning to end
    star       it belongs to the short way through its day
    operator   what the kernels compute, as reports group lessons: "softmax", "attention backward"
    language   what the kernels are written in
    pictures   explanatory pictures, by the names that lessonkit/pictures gives them
    """

    teaches: str
    hours: float
    star: bool = False
    operator: str = ""
    language: str = "Triton"
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Work:
    """The least an op can do: bytes through device memory (each input read once, each output written once), FLOPs."""

    bytes: int
    flops: int = 0


@dataclass(frozen=True)
class Mutant:
    """A wrong kernel: the lesson with `old` replaced by `new` inside function `where`, run through `rung`.

    The checks must reject it, by the property that `caught_by` names:

    - value, nan, unwritten, dtype, shape, changed input, out of bounds, traffic
    - "value or nan": either, where what the kernel reads has not been written
    - in Gluon also race and barrier (a deadlock)
    - in CUDA C++ these too, misaligned and uninitialised; `where` is then in the .cu
    - of a rung that `needs` a GPU also hang (the kernel does not end) and fault (it ends in an error)
    """

    why: str
    where: str
    old: str
    new: str
    rung: str
    caught_by: str = "value"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a rung should reach on a card at one bench shape, said before it is timed; a report shows both.

    card: a name of the table of chips (base.chips).
    One of `ms`, `tflop_per_s`, `tb_per_s`, `percent_of_limit`, or `times`: so many times as fast as the rung `over`.
    Each is a figure, or two: from and to.
    why: one sentence, where what was measured is more than 15% off, or a gain by more than half; nowhere else.
    """

    rung: Rung
    at: Shape
    ms: Figure = 0
    tflop_per_s: Figure = 0
    tb_per_s: Figure = 0
    percent_of_limit: Figure = 0
    times: Figure = 0
    over: Rung | None = None
    why: str = ""
    card: str = "h200"

    def __post_init__(self) -> None:
        said = [name for name in ("ms", "tflop_per_s", "tb_per_s", "percent_of_limit", "times") if getattr(self, name)]
        if len(said) != 1 or (said == ["times"]) != (self.over is not None):
            raise Misdeclared(
                f"the prediction of {self.rung.__name__} says {' and '.join(said) or 'nothing'}: give one of ms, "
                "tflop_per_s, tb_per_s, percent_of_limit, or times with the rung that it is `over`"
            )
        if self.card not in CHIPS:
            raise Misdeclared(
                f"the prediction of {self.rung.__name__} says card={self.card!r}: the table has {', '.join(CHIPS)}"
            )


def needs(capability: int, what: str, *, only: bool = False, interpreted: bool = False) -> Callable[[Rung], Rung]:
    """`@needs(90, "TMA")`: this rung runs on a GPU from sm_90 on and nowhere else; it is compiled everywhere.

    With only=True it runs on GPUs of this capability alone, and is compiled for no other: wgmma is in sm_90 and in
    nothing later. With interpreted=True the interpreter, or modes.gluon, can run it too, so it is checked without a
    GPU.
    """

    def mark(rung: Rung) -> Rung:
        vars(rung).update(needs=capability, needs_what=what, needs_only=only, interpreted=interpreted)
        return rung

    return mark


def stepwise(rung: Rung) -> Rung:
    """Mark a rung that rounds the result of each step to the inputs' dtype, as a chain of kernels does.

    Its error budget has such a rounding for each operation of the reference; other rungs round once, at the end.
    """
    vars(rung).update(stepwise=True)
    return rung


def is_stepwise(rung: Rung) -> bool:
    return getattr(rung, "stepwise", False)


def budget(times: float, why: str) -> Callable[[Rung], Rung]:
    """`@budget(4, "a row is added up in order")`: this rung may be off by so many times the lesson's error budget."""

    def mark(rung: Rung) -> Rung:
        vars(rung).update(budget=times, budget_why=why)
        return rung

    return mark


def budget_of(rung: Rung) -> float:
    return getattr(rung, "budget", 1.0)


def suits(rung: Rung, capability: int) -> bool:
    """Whether a GPU of this capability is one that the rung was written for."""
    least = getattr(rung, "needs", 0)
    return capability == least if getattr(rung, "needs_only", False) else capability >= least


@dataclass(frozen=True)
class Grad:
    """The differentiable op that the lesson ends in, and what autograd must agree with (default: the lesson's own).

    factor: widens the error budget of its gradients, as the lesson's does of all, for a stated reason
    """

    op: Rung
    reference: Rung | None = None
    inputs: Callable[..., tuple[Any, ...]] | None = None
    factor: float = 1


@dataclass(frozen=True)
class Refusal:
    """A bad call and the error it must meet: `call(rung)` raises `error`, whose text matches the regex `says`."""

    why: str
    call: Callable[[Rung], Any]
    error: type[Exception]
    says: str


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is asked of an operator, once for every lesson, program and exercise that answers it (problems/).

    reference   readable PyTorch, the only definition of "right"; called with float64 inputs for the exact answer
    inputs      inputs(dtype=..., **shape) -> tuple of arguments on DEVICE
    work        work(dtype=..., **shape) -> Work: the floor that "% of limit" divides by
    checks      small awkward shapes, each in all `dtypes`; `benches`: large ones, timed on a GPU in `bench_dtype`
    peers       what a user would call instead; one whose package is missing is passed over
    peers_differ  why peers rightly answer something else (random numbers), if so: only shapes and dtypes are compared
    properties  property(rung) asserts what must hold for the op beside its values
    refuses     bad calls, and the error that each must meet
    factor      widens the error budget, for a stated reason
    """

    reference: Rung
    inputs: Callable[..., tuple[Any, ...]]
    work: Callable[..., Work]
    checks: tuple[Case, ...] = ()
    benches: tuple[Shape, ...] = ()
    peers: Mapping[str, Rung] = field(default_factory=dict)
    peers_differ: str = ""
    properties: tuple[Callable[[Rung], None], ...] = ()
    refuses: tuple[Refusal, ...] = ()
    dtypes: tuple[torch.dtype, ...] = FLOATS
    bench_dtype: torch.dtype = torch.bfloat16
    factor: float = 1


@dataclass(frozen=True, kw_only=True)
class Operator:
    """How a shipped operator answers a problem, and where it is timed (problems/operators.py).

    name        the public function, as users call it; direction: forward, backward, or a use with peers of its own
    problem     what is asked; `inputs` and `work` replace the problem's where they are given, `peers` go beside them
    call        call(*inputs) answers like the problem's reference; a function at the top of its module
    shapes      in the words of `inputs`, the most important first; some of them may be refused
    data        the distribution of the inputs, as a word
    dtype       of the inputs; the problem's bench_dtype if it is None
    """

    name: str
    direction: str
    problem: Problem
    call: Rung
    shapes: tuple[Shape, ...]
    data: str = "random"
    dtype: torch.dtype | None = None
    inputs: Rung | None = None
    work: Callable[..., Work] | None = None
    peers: Mapping[str, Rung] = field(default_factory=dict)


_THE_PROBLEMS: Any = None  # a field that a lesson takes from its problem, unless it says otherwise


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """The rungs that answer a problem: plain functions that all take the tensors that the problem's `inputs` makes.

    about       what tables and paths say of the lesson
    problem     what is asked; each of its fields may be given here instead, where a lesson asks something of its own
    rungs       slowest first; the name is the idea; where the last one refuses a case, it names the operator of
                course_ops that takes it
    wrong       mutants, each of which the checks must reject
    claims      rung -> what its compiled code must show (cuda.sass.broken_claims); in CUDA C++ kernel's name -> that
    passes      rung -> bytes it moves, as a multiple of Work.bytes, counted without a GPU on the last check
    passes_why  why `passes` is not what the lesson's text predicts, where it is not: the interpreter has no cache
    grad        the differentiable op that the lesson ends in; its gradients are checked too
    cpu_model   the kernel's order of work step by step in PyTorch, for any machine: right on the same checks
    extension   the launchers of the .cu that the rungs call, if the kernels are CUDA C++
    prints      what the program's own main measures and rungs cannot: `bench` keeps the lines that it prints
    counts      rung -> what its accesses look like: {"sectors a request": 4}, counted as `passes` (judge.counters)
    predicted   what rungs should reach; the lesson's page shows it beside what was measured (pages.predictions)
    """

    about: About | None = None
    problem: Problem | None = None
    rungs: tuple[Rung, ...]
    wrong: tuple[Mutant, ...]
    reference: Rung = _THE_PROBLEMS
    inputs: Callable[..., tuple[Any, ...]] = _THE_PROBLEMS
    work: Callable[..., Work] = _THE_PROBLEMS
    checks: tuple[Case, ...] = _THE_PROBLEMS
    benches: tuple[Shape, ...] = _THE_PROBLEMS
    peers: Mapping[str, Rung] = _THE_PROBLEMS
    peers_differ: str = _THE_PROBLEMS
    properties: tuple[Callable[[Rung], None], ...] = _THE_PROBLEMS
    refuses: tuple[Refusal, ...] = _THE_PROBLEMS
    dtypes: tuple[torch.dtype, ...] = _THE_PROBLEMS
    bench_dtype: torch.dtype = _THE_PROBLEMS
    factor: float = _THE_PROBLEMS
    claims: Mapping[Any, tuple[str, ...]] = field(default_factory=dict)
    passes: Mapping[Rung, float] = field(default_factory=dict)
    passes_why: str = ""
    grad: Grad | None = None
    cpu_model: Rung | None = None
    extension: Launchers | None = None
    prints: str = ""
    counts: Mapping[Rung, Mapping[str, float]] = field(default_factory=dict)
    predicted: tuple[Prediction, ...] = ()

    def __post_init__(self) -> None:
        for each in fields(Problem):
            if getattr(self, each.name) is None:
                object.__setattr__(self, each.name, self._asked(each))

    def _asked(self, asked: Field[Any]) -> Any:
        """What the problem says of a field; without a problem the field's default."""
        if self.problem is not None:
            return getattr(self.problem, asked.name)
        if asked.default_factory is not MISSING:
            return asked.default_factory()
        if asked.default is MISSING:
            raise Misdeclared(f"this lesson says no `{asked.name}`: give it, or the `problem` that has it")
        return asked.default

    def claimed(self) -> dict[str, tuple[str, ...]]:
        """The claims by the name of the rung, or of the kernel in CUDA C++."""
        return {key if isinstance(key, str) else key.__name__: claims for key, claims in self.claims.items()}

    def main(self) -> None:
        """Run the lesson as a script: check every rung, then show what each costs on this machine."""
        try:
            _show().lesson(*_running())
        except Misdeclared as why:
            sys.exit(str(why))


@dataclass(frozen=True)
class Table:
    """Rows that a step measured. `x`, `y` and `by` (a line for each value) ask for a plot; the note: what to see.

    draw: draw(figure) where lines do not do; of a table that `compares` makes, for only rows are kept.
    """

    name: str
    rows: list[dict[str, Any]]
    note: str = ""
    x: str = ""
    y: str = ""
    by: str = ""
    draw: Callable[[Any], None] | None = None


@dataclass(frozen=True)
class Steps:
    """A lesson without kernels: functions whose docstring is a claim that the body asserts; one may return a Table.

    alone: the claims are about time, so the suite runs the steps with nothing beside them
    nightly: those that take long and that hardly a change breaks; the suite runs them each night, not at each push
    compares: compare(folder) -> Table (or None) made of the rows of one GPU, reports/<device>: kept fresh by `report`;
        one with the name of a step's table stands on the page in its place
    """

    steps: tuple[Callable[[], Table | None], ...]
    about: About | None = field(default=None, kw_only=True)
    compares: tuple[Callable[[Path], Table | None], ...] = ()
    alone: bool = False
    nightly: tuple[Callable[[], Table | None], ...] = ()

    def main(self) -> None:
        _show().steps(*_running())


def _show() -> Any:
    """What prints is loaded by the script that needs it, by its name: a declaration depends on none of it."""
    return importlib.import_module("lessonkit.commands.show")


def _running() -> tuple[str, Any]:
    """The lesson's name when its file runs as a script; re-imported, so that mutants and reports see a module."""
    path = Path(sys.modules["__main__"].__file__ or "").resolve()
    name = f"{path.parent.name}.{path.stem}"
    return name, importlib.import_module(name).LESSON


@dataclass(frozen=True)
class Broken:
    """A lesson that could not be imported: it fails by itself and does not stop the others."""

    error: Exception


def names(which: str = "") -> list[str]:
    """The lessons' names in reading order; the folders are the only list there is.

    What `which` may be, in this order: a lesson's name (lesson05_softmax, day2_triton_basics.lesson05_softmax), the
    beginning of names (day2, cuda, 02_vector), a part of names without their folder (softmax). "" is all.
    """
    paths = [*sorted(ROOT.glob("day*_*/lesson*.py")), *sorted(ROOT.glob("cuda_src/[0-9]*.py"))]
    found = {f"{path.parent.name}.{path.stem}": path.stem for path in paths}
    return (
        [name for name, stem in found.items() if which in (name, stem)]
        or [name for name, stem in found.items() if name.startswith(which) or stem.startswith(which)]
        or [name for name, stem in found.items() if which in stem]
    )


def discover(which: str = "") -> Iterator[tuple[str, Lesson | Steps | Broken]]:
    """Yield (name, lesson) of `names(which)`, in reading order."""
    for name in names(which):
        try:
            yield name, importlib.import_module(name).LESSON
        except Exception as error:
            yield name, Broken(error)


def specimen(lesson: str, name: str) -> Any:
    """What another lesson's file binds to a name: `specimen("day4_replace_op.lesson03_flash_v1", "flash_v1")`.

    For lessons that measure or inspect kernels of others and have no rungs of their own. The only way to load a lesson.
    Raises Misdeclared if there is no such lesson, or if its file binds no such name.
    """
    if lesson not in names():
        raise Misdeclared(f"there is no lesson {lesson!r}: name one in full, as `python -m lessonkit list` does")
    module = importlib.import_module(lesson)
    if not hasattr(module, name):
        raise Misdeclared(f"{lesson} binds no {name!r}: take a rung, a kernel or a constant of its file")
    return getattr(module, name)


def kernels(which: str = "") -> list[tuple[str, Lesson]]:
    return [(name, lesson) for name, lesson in discover(which) if isinstance(lesson, Lesson)]


def title(name: str) -> str:
    """The first line of the lesson's docstring; of one that cannot be imported its name."""
    return (getattr(sys.modules.get(name), "__doc__", None) or name).strip().splitlines()[0]
