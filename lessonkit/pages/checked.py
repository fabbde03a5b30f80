"""How results were checked, for the final report: cases, wrong kernels, random calls, sanitizers, counted from rows."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from lessonkit.base.words import listed, said
from lessonkit.lesson import Lesson, kernels
from lessonkit.measure import fuzz_runs, gpu_mutants, operator_rows, sanitize
from lessonkit.pages import results, watched


def lines(folder: Path) -> list[str]:
    """A line for each kind of check; those that this machine has no rows of are left out."""
    lessons = list(kernels())
    return list(chain(_by_values(folder), _wrong_kernels(folder, lessons), _random_calls(folder), _tools(folder)))


def _by_values(folder: Path) -> Iterator[str]:
    """Of the lessons that were timed here."""
    timed = [lesson for _, lesson, _ in results.measured(folder)]
    words = said(
        "Values: {lessons} lessons compare their {rungs} rungs with PyTorch in {cases} cases. The allowance is a "
        "multiple of PyTorch's own error against float64. Outputs are filled with NaN first, and timed answers are "
        "compared too."
    )
    rungs, cases = (sum(map(len, each)) for each in zip(*((x.rungs, x.checks) for x in timed), strict=True))
    yield words.format(lessons=len(timed), rungs=rungs, cases=cases)


def _wrong_kernels(folder: Path, lessons: Sequence[tuple[str, Lesson]]) -> Iterator[str]:
    """What checks the checks. Judged here: those that no machine without such a GPU can judge."""
    judged = [
        bool(found and found.caught_by)
        for name, mutant in gpu_mutants.of_one_gpu(lessons, 90)
        for found in [gpu_mutants.fresh(folder, name, mutant)]
    ]
    words = said(
        "Wrong on purpose: the checks have to refuse {wrong} kernels, each with one bug. {of_one} of them need such a "
        "GPU; of these {refused} were refused here, with today's code."
    )
    if any(judged):
        wrong = sum(len(lesson.wrong) for _, lesson in lessons)
        yield words.format(wrong=wrong, of_one=len(judged), refused=sum(judged))


def _random_calls(folder: Path) -> Iterator[str]:
    """Of today's code. A case that failed is kept, and the tests run it again."""
    codes = {op.name: operator_rows.code(op.name) for op in operator_rows.operators()}
    counts = [c for c in fuzz_runs.counts().values() if c.mode == "gpu" and c.device == folder.name]
    today = [count for count in counts if count.code == codes.get(count.operator)]
    words = said(
        "Random calls of `course_ops`: {cases} of today's code, with {wrong} answers judged wrong, {crashes} crashes "
        "and {alarms} legal calls refused{where}. Each such call is kept, and the tests run it: of {kept} from all "
        "runs {open} still fail."
    )
    if today:
        kept = [each for each in fuzz_runs.found() if each.mode == "gpu"]
        faulty = [f"`{c.operator}` {c.direction}" for c in today if c.wrong + c.crashes + c.false_alarms]
        yield words.format(
            cases=f"{sum(c.cases for c in today):,}", wrong=sum(c.wrong for c in today),
            crashes=sum(c.crashes for c in today), alarms=sum(c.false_alarms for c in today),
            where=f" ({listed(faulty)})" * bool(faulty), kept=len(kept), open=sum(bool(each.open) for each in kept),
        )  # fmt: skip


def _tools(folder: Path) -> Iterator[str]:
    if (folder / sanitize.NAME).exists():
        words = said("Sanitizers ([what each watches, and where]({page})). {counts}")
        counts = watched.counts(watched.cells(folder, dict(kernels())))
        yield words.format(page=Path(sanitize.NAME).with_suffix(".md"), counts=counts)
