"""What the data sheet of a card predicts for lessons and their rungs. Nothing here is measured."""

from collections.abc import Iterator
from dataclasses import dataclass

from lessonkit.base import chips
from lessonkit.base.chips import Chip
from lessonkit.base.tables import head, read_csv
from lessonkit.base.words import language, later, said
from lessonkit.lesson import Lesson, Prediction, Rung, Shape, Work, shape_name, suits
from lessonkit.measure import rows
from lessonkit.modes import compiled
from lessonkit.pages import predictions, targets

Share = tuple[float, float]  # of the rate at which an op's floor is reached: from and to
H200 = chips.find(rows.MACHINE)  # the card that the lessons' predictions are about
TITLES = [later("rung"), later("shape"), later("us at least"), later("bound by"), later("us predicted"),
          later("of that rate"), later("occupancy"), later("predicted by")]  # fmt: skip


@dataclass(frozen=True)
class Predicted:
    """A rung at a shape on a card. floor: its least seconds. share: none where nothing is predicted. why: by what."""

    rung: str
    shape: str
    floor: float
    bound: str
    share: Share | None
    why: str
    occupancy: float | None  # the least of its kernels

    @property
    def line(self) -> list[str]:
        times = shares = ""
        if self.share:
            least, most = self.share
            shares = _from_to(f"{least:.0%}", f"{most:.0%}")
            times = _from_to(*(f"{self.floor * 1e6 / share:.4g}" for share in (most, least)))
        taken = "" if self.occupancy is None else f"{self.occupancy:.0%}"
        return [self.rung, self.shape, f"{self.floor * 1e6:.4g}", said(self.bound), times, shares, taken, self.why]


def _from_to(least: str, most: str) -> str:
    return least if least == most else said("{low} to {high}").format(low=least, high=most)


def rungs(chip: Chip, name: str, lesson: Lesson) -> Iterator[Predicted]:
    """What the lesson predicts for an H200, carried over to a card: the same share of the card's own rate.

    A rung of which it predicts nothing takes as long as the bytes that it moves, if the lesson counts them.
    """
    unfit, taken = _unfit(chip, name, lesson), _occupancies(chip, name)
    largest = max(lesson.benches, key=lambda shape: _work(lesson, shape).bytes, default=None)
    if largest is None or not _floor(chip, lesson, largest)[0]:  # what moves and computes nothing has no floor
        return
    for rung in lesson.rungs:
        mine = [each for each in lesson.predicted if each.rung is rung]
        found = [(each.at, _share(lesson, each), predictions.how(each, language())) for each in mine]
        if why := unfit.get(rung.__name__):
            found = [(largest, None, said("no kernel: {why}").format(why=why))]
        elif not found:
            share = _share_of_bytes(chip, lesson, rung, largest)
            words = (
                said("moves {times} times the least bytes").format(times=f"{lesson.passes[rung]:.3g}") if share else ""
            )
            found = [(largest, share, words)]
        for shape, share, words in found:
            floor = _floor(chip, lesson, shape)
            yield Predicted(rung.__name__, shape_name(shape), *floor, share, words, taken.get(rung.__name__))


def _unfit(chip: Chip, name: str, lesson: Lesson) -> dict[str, str]:
    """The rungs that the card's target does not get, and why."""
    if not lesson.extension:
        rows = head(targets.FOLDER / f"{name}.csv").get("unfit", ())
        return {rung: why for rung, target, why in rows if target == chip.target}
    if isinstance(chip.target, str):
        return {rung.__name__: "CUDA C++, which NVIDIA alone has" for rung in lesson.rungs}
    return {rung.__name__: compiled.requirement(rung) for rung in lesson.rungs if not suits(rung, chip.target)}


def _occupancies(chip: Chip, name: str) -> dict[str, float]:
    """Of each rung that was compiled for the card's target: the least occupancy of its kernels."""
    found = dict[str, float]()
    for row in read_csv(targets.FOLDER / f"{name}.csv"):
        if row["target"] == str(chip.target):
            one = chip.occupancy(int(row["warps"]), int(row["registers"]), int(row["shared"]))
            found[row["rung"]] = min(one, found.get(row["rung"], 1.0))
    return found


def _work(lesson: Lesson, shape: Shape) -> Work:
    return lesson.work(dtype=lesson.bench_dtype, **shape)


def _floor(chip: Chip, lesson: Lesson, shape: Shape, passes: float = 1.0) -> tuple[float, str]:
    """The least time of an op, or of one that moves so many times its bytes, and what bounds it."""
    work = _work(lesson, shape)
    return chip.seconds(passes * work.bytes, work.flops, targets.rate(lesson))


def _share_of_bytes(chip: Chip, lesson: Lesson, rung: Rung, shape: Shape) -> Share | None:
    if rung not in lesson.passes:
        return None
    share = _floor(chip, lesson, shape)[0] / _floor(chip, lesson, shape, lesson.passes[rung])[0]
    return share, share


def _share(lesson: Lesson, said: Prediction) -> Share | None:
    """The share that a prediction asks of an H200; none if it says "twice as fast" of a rung with no prediction."""
    work, (floor, _) = _work(lesson, said.at), _floor(H200, lesson, said.at)
    if said.over:
        earlier = [each for each in lesson.predicted if each.rung is said.over and each.at == said.at]
        before = _share(lesson, earlier[0]) if earlier else _share_of_bytes(H200, lesson, said.over, said.at)
        times = predictions.both(said.times)
        return (before[0] * times[0], before[1] * times[1]) if before else None
    if said.ms:
        least, most = predictions.both(said.ms)
        return 1e3 * floor / most, 1e3 * floor / least
    whole = {  # each figure, and what it is where the floor is reached
        said.percent_of_limit: 100.0,
        said.tflop_per_s: work.flops / floor / 1e12,
        said.tb_per_s: work.bytes / floor / 1e12,
    }
    figure, unit = next((figure, unit) for figure, unit in whole.items() if figure)
    least, most = predictions.both(figure)
    return least / unit, most / unit
