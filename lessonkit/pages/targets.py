"""What the compilers made of the course for every target, and what the data sheets predict for every card."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lessonkit.base import chips
from lessonkit.base.chips import CHIPS, TARGETS, Chip
from lessonkit.base.files import REPORTS
from lessonkit.base.markdown import markdown
from lessonkit.base.tables import head, read_csv
from lessonkit.base.words import language as spoken
from lessonkit.base.words import later, retold, said, translated
from lessonkit.lesson import Lesson, shape_name
from lessonkit.modes import compiled
from lessonkit.modes.compiled import COURSE_OPS

import torch

FOLDER = REPORTS / "compiled"
INTERPRETED = "interpreted"  # in reports/versions.csv, where another row names a target
NOT_TRIED = "not tried"  # likewise
# Why a pair was not tried, in reports/versions.csv; other reasons are pip's own words.
NO_ROOM = later("an environment takes {needed} GiB; {free} are free on the cache's disk")
CONSTRAINED = later("the machine's pip is constrained to {bound}")
NO_WHEEL = later("pip finds no wheel of it for this machine")
SILENT = later("pip says nothing")
UNTRIED = (NO_ROOM, CONSTRAINED, NO_WHEEL, SILENT)
FEWER = later(
    "- Some totals are lower than others of their column. These pairs were tried before checks or kernels were added, "
    "or their Triton lacks what some need."
)
EMPTY = later("- An empty cell was not tried.")
LEFT_OUT = later("- torch {torch} with Triton {triton} was not tried: {why}.")
CARDS = tuple(map(chips.first, TARGETS))  # the columns of floors
RATES = {torch.float32: "fp32", torch.float8_e4m3fn: "fp8"}  # other dtypes are computed at the rate of bf16


def rate(lesson: Lesson) -> str:
    """At which of a chip's rates the timed dtype of a lesson is computed: "fp32", "bf16" or "fp8"."""
    return "fp8" if "fp8" in lesson.inputs.__module__ else RATES.get(lesson.bench_dtype, "bf16")


def floors(lesson: Lesson) -> list[list[Any]]:
    """A line for each bench shape: its name, MB, and the least time in us on the first card of each target."""
    lines = []
    for shape in lesson.benches:
        work = lesson.work(dtype=lesson.bench_dtype, **shape)
        at = (chip.seconds(work.bytes, work.flops, rate(lesson))[0] * 1e6 for chip in CARDS)
        lines.append([shape_name(shape), f"{work.bytes / 1e6:.4g}", *(f"{us:.4g}" for us in at)])
    return lines


def roofline(chip: Chip, lessons: Iterable[tuple[str, Lesson]], language: str = "en") -> list[list[str]]:
    """A line for each lesson at its largest shape: FLOPs a byte, the roof over them on a card, the least time."""
    lines = []
    for name, lesson in lessons:
        works = [(lesson.work(dtype=lesson.bench_dtype, **shape), shape) for shape in lesson.benches]
        if not works:
            continue
        work, shape = max(works, key=lambda each: each[0].bytes)
        seconds, bound = chip.seconds(work.bytes, work.flops, rate(lesson))
        if not seconds:
            continue
        intensity = work.flops / work.bytes if work.bytes else 0.0
        roof = f"{work.flops / seconds / 1e12:.4g}" if work.flops else ""
        lines.append(
            [name, shape_name(shape), f"{intensity:.3g}", roof, f"{seconds * 1e6:.4g}", translated(bound, language)]
        )
    return lines


CARD_TITLES = [later("name"), later("card"), later("target"), later("SMs"), "TB/s", "L2", "fp32", "tf32", "bf16", "fp8",
               later("shared a block"), later("shared"), later("registers"), later("threads")]  # fmt: skip


def cards(which: Iterable[Chip], language: str = "en") -> list[list[Any]]:
    """A line for each card: TB/s, MB, TFLOP/s, and the limits of an SM."""
    keys = {chip.name: key for key, chip in CHIPS.items()}
    without = translated(", not compiled", language)
    return [
        [keys[c.name], c.name, chips.label(c.target) + without * (not c.compiled), c.sms,
         f"{c.bandwidth / 1e12:.3g}", c.l2,
         *(f"{c.flops[r] / 1e12:.4g}" if r in c.flops else "" for r in ("fp32", "tf32", "bf16", "fp8")),
         f"{c.shared_block:,}", f"{c.shared:,}", f"{c.registers:,}", c.warps * c.warp_size]
        for c in which
    ]  # fmt: skip


def reasons(path: Path) -> str:
    """The part of a page that says which rungs a target does not get, and why."""
    grouped = defaultdict[tuple[str, str], list[str]](list)
    for rung, target, why in head(path).get("unfit", ()):
        grouped[rung, why].append(chips.label(target))
    lines = [[f"`{rung}`", ", ".join(where), _why_not(why)] for (rung, why), where in grouped.items()]
    if not lines:
        return ""
    return f"\n## {said('Targets without a kernel')}\n\n" + markdown(map(said, ("rung", "target", "why")), lines)


def _why_not(why: str) -> str:
    """Why a target has no kernel of a rung. Rows keep it in English."""
    return retold(why, compiled.UNFIT, spoken())


def page(lessons: Mapping[str, Lesson]) -> str:
    """reports/compiled/targets.md: a line for each target, and a line for each reason that keeps a rung from it."""
    found = [(name, FOLDER / f"{name}.csv") for name in (*lessons, COURSE_OPS)]
    kernels = [
        row for name, path in found for row in read_csv(path) if name not in lessons or not lessons[name].extension
    ]
    whys = [(str(target), why) for _, path in found for _, target, why in head(path).get("unfit", ())]
    table = []
    for target in chips.TARGETS:
        chip, mine = chips.first(target), [row for row in kernels if row["target"] == str(target)]
        over = sum(int(row["shared"]) > chip.shared_block for row in mine)
        spills = sum(int(row["spills"]) > 0 for row in mine)
        matrix = sum(int(row["mma"]) + int(row["wgmma"]) > 0 for row in mine)
        without = sum(at == str(target) for at, _ in whys)
        table.append(
            [chips.label(target), chip.name, len(mine), matrix, spills, f"{chip.shared_block:,}", over, without]
        )
    counted = Counter(whys)
    lines = [[chips.label(_target(target)), count, _why_not(why)] for (target, why), count in sorted(counted.items())]
    every = tuple(CHIPS.values())
    titles = [said("target"), said("card"), said("kernels"), said("with matrix instructions"), said("with spills"),
              said("most shared bytes"), said("over it"), said("rungs without a kernel")]  # fmt: skip
    about = said(
        "`python -m lessonkit compile all` compiles every Triton and Gluon rung and every operator of `course_ops` for "
        "these targets, without a GPU. On AMD the option `maxnreg`, which its compiler lacks, is left out."
    )
    figures = said(
        "Data-sheet figures: TB/s, MB of L2, dense TFLOP/s, and the limits of an SM (a CU on AMD). "
        '`python -m lessonkit chip "RTX 4090"` shows what the lessons predict for a card, and its roofline; '
        "`chip rtx4090 softmax` for one lesson. `{choice}=rtx4090` before a command names your card: without a GPU "
        "tiles, occupancy and predictions are then of that card."
    ).format(choice=chips.CHOICE)
    here = "" if spoken() == "en" else '<a id="cards"></a>\n\n'  # guides link to the English heading
    sources = ([*line, c.source] for line, c in zip(cards(every, spoken()), every, strict=True))
    return (
        f"# {said('Compiled for every target')}\n\n{about}\n\n"
        + markdown(titles, table)
        + f"\n## {said('Why a rung has no kernel for a target')}\n\n"
        + markdown([said("target"), said("rungs"), said("why")], lines)
        + f"\n{here}## {said('Cards')}\n\n{figures}\n\n"
        + markdown([*map(said, CARD_TITLES), said("source")], sources)
    )


def versions(language: str) -> str:
    """A table of reports/versions.csv: a line for each pair, a column for each target and for interpreted checks.

    Below it, what was not tried.
    """
    rows = read_csv(REPORTS / "versions.csv")
    found = {(row["torch"], row["triton"], row["target"]): row for row in rows if row["target"] != NOT_TRIED}
    columns = [each for each in (INTERPRETED, *map(str, chips.TARGETS)) if each in {target for _, _, target in found}]

    def cell(pair: tuple[str, str], target: str) -> str:
        row = found.get((*pair, target))
        if row is None:
            return ""
        total = int(row["passed"]) + int(row["failed"])
        return translated("{passed} of {total}", language).format(passed=row["passed"], total=total)

    pairs = dict.fromkeys(key[:2] for key in found)
    checks = {INTERPRETED: translated("checks interpreted", language)}
    titles = [checks.get(each) or chips.label(_target(each)) for each in columns]
    table = markdown(["torch", "Triton", *titles], ([*pair, *(cell(pair, each) for each in columns)] for pair in pairs))
    lines = [translated(EMPTY, language)] * (len(found) < len(pairs) * len(columns))
    totals = [{int(row["passed"]) + int(row["failed"]) for key, row in found.items() if key[2] == at} for at in columns]
    lines += [translated(FEWER, language)] * any(len(each) > 1 for each in totals)
    left_out = [row | {"why": retold(row["why"], UNTRIED, language)} for row in rows if row["target"] == NOT_TRIED]
    lines += [translated(LEFT_OUT, language).format(**row) for row in left_out]
    return "\n".join([table, *lines, ""]) if lines else table


def _target(text: str) -> chips.Target:
    return int(text) if text.isdigit() else text
