"""What a lesson predicted for its rungs beside what was measured, in the unit of the lesson's report.

Predictions are for an H200 unless they name another card. Each may be given in another way: milliseconds, a share of
the limit, so many times as fast as an earlier rung. The table brings all of them to one rate.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lessonkit.base import chips
from lessonkit.base.files import REPORTS
from lessonkit.base.markdown import markdown
from lessonkit.base.words import language, said, translated
from lessonkit.lesson import Figure, Lesson, Prediction, shape_name
from lessonkit.measure import yardstick
from lessonkit.measure.rows import Row
from lessonkit.pages import pivots

CARD = "h200"  # of MACHINE, in the table of chips
TOLERANCE = 0.15  # a measured rate further off than this wants a reason
NOISE = 0.03  # of a gain: two rows of the same code differ by less


@dataclass(frozen=True)
class Compared:
    """A prediction and the row that answers it."""

    said: Prediction
    row: Row
    least_ms: float  # the prediction, as times; both are the same unless it is from one figure to another
    most_ms: float
    times: float = 0  # as fast as the rung that the prediction is `over`, measured

    @property
    def ratio(self) -> float:
        """The measured rate over the nearest predicted one: above 1 the rung is faster than predicted."""
        return min(max(self.row.ms_p50, self.least_ms), self.most_ms) / self.row.ms_p50

    @property
    def off(self) -> bool:
        return abs(self.ratio - 1) > TOLERANCE

    @property
    def gain_off(self) -> bool:
        """Of a predicted gain over an earlier rung: whether the measured one differs by more than half of it."""
        nearest = min(max(self.times, both(self.said.times)[0]), both(self.said.times)[1])
        return nearest > 1 and abs(self.times - nearest) > max((nearest - 1) / 2, NOISE)

    @property
    def how(self) -> str:
        return how(self.said, language())

    def rate(self, measured: float) -> str:
        """The predicted rate, in the unit of the measured one."""
        all_of_it = measured * self.row.ms_p50
        return _shown((all_of_it / self.most_ms, all_of_it / self.least_ms), language())


def how(given: Prediction, language: str = "en") -> str:
    """A prediction as the lesson gives it."""
    if given.over:
        words = translated("{times} times `{rung}`", language)
        return words.format(times=_shown(given.times, language), rung=given.over.__name__)
    figures = {
        "{figure} ms": given.ms,
        "{figure} TFLOP/s": given.tflop_per_s,
        "{figure} TB/s": given.tb_per_s,
        translated("{figure}% of the limit", language): given.percent_of_limit,
    }
    return next(words.format(figure=_shown(value, language)) for words, value in figures.items() if value)


def both(value: Figure) -> tuple[float, float]:
    return value if isinstance(value, tuple) else (value, value)


def _shown(value: Figure, language: str = "en") -> str:
    low, high = (f"{x:.0f}" if x >= 1000 else f"{x:.3g}" for x in both(value))
    return low if low == high else translated("{low} to {high}", language).format(low=low, high=high)


def compared(lesson: Lesson, found: Sequence[Row]) -> Iterator[Compared]:
    """Each prediction whose rung, and whose earlier rung, was measured at its shape."""
    at = {(row.rung, row.shape): row for row in found if row.kind == "rung"}
    for each in lesson.predicted:
        shape = shape_name(each.at)
        row = at.get((each.rung.__name__, shape))
        before = at.get((each.over.__name__, shape)) if each.over else row
        if row and before and (each.card == CARD or each.card in row.gpu.lower()):
            times = before.ms_p50 / row.ms_p50 if each.over else 0
            least, most = sorted(_milliseconds(each, row, before))
            yield Compared(each, row, least, most, times)


def _milliseconds(said: Prediction, row: Row, before: Row) -> Iterator[float]:
    """The times that a prediction is."""
    yield from both(said.ms) if said.ms else ()
    rates = [(said.tflop_per_s, row.tflop_per_s), (said.tb_per_s, row.tb_per_s)]
    for predicted, measured in [*rates, (said.percent_of_limit, yardstick.share(row).percent)]:
        yield from (row.ms_p50 * measured / value for value in both(predicted) if value)
    yield from (before.ms_p50 / value for value in both(said.times) if value)


def section(lesson: Lesson, found: Sequence[Row], mark: Callable[[Row], str]) -> str:
    """The part of a lesson's page; "" where nothing was predicted. mark: what stands behind an old row's figure."""
    pairs = list(compared(lesson, found))
    if not pairs:
        return ""
    unit = pivots.unit(found)
    body = []
    for pair in pairs:
        rate = pair.row.tflop_per_s if unit == "TFLOP/s" else pair.row.tb_per_s
        line = [f"**{pair.row.rung}**", pair.row.shape, how(pair.said, language()), pair.rate(rate)]
        measured = f"{rate:.3g}{mark(pair.row)}"
        if pair.said.over:
            measured = said("{rate}, {times} times").format(rate=measured, times=f"{pair.times:.3g}")
        body.append([*line, measured, f"{pair.ratio:.2f}", said(pair.said.why)])
    units = said("that is {unit}").format(unit=unit), said("measured {unit}").format(unit=unit)
    header = ["", said("shape"), said("predicted"), *units, said("measured / predicted"), said("why it differs")]
    return f"## {said('Predicted and measured')}\n\n" + markdown(header, body)


def not_measured(name: str, lesson: Lesson) -> str:
    """The part of a compiled page with what is predicted for cards on which nothing was timed; "" if there is none."""
    left = [p for p in lesson.predicted if not (REPORTS / f"nvidia-{p.card}" / f"{name}.csv").exists()]
    lines = [[f"`{p.rung.__name__}`", shape_name(p.at), chips.CHIPS[p.card].name, how(p, language())] for p in left]
    if not lines:
        return ""
    heads = [said("rung"), said("shape"), said("card"), said("predicted")]
    return f"\n## {said('Predicted, not measured')}\n\n" + markdown(heads, lines)


def complaints(name: str, lesson: Lesson, found: Sequence[Row]) -> list[str]:
    """What is wrong: a row or a gain that is off without a reason, a reason where neither is, nothing measured."""
    pairs = {id(pair.said): pair for pair in compared(lesson, found)}
    wrong = []
    for each in (p for p in lesson.predicted if p.card == CARD):
        where = f"{name} {each.rung.__name__} at {shape_name(each.at)}"
        if (pair := pairs.get(id(each))) is None:
            wrong.append(f"{where}: predicted, and no row was measured: run `python -m lessonkit bench` on an H200")
        elif pair.off and not each.why:
            wrong.append(f"{where}: {pair.ratio:.2f} of what was predicted: say in `why` what the prediction missed")
        elif pair.gain_off and not each.why:
            wrong.append(f"{where}: {pair.times:.3g} times as fast, not {how(each)}: say in `why` why the gain differs")
        elif each.why and not (pair.off or pair.gain_off):
            wrong.append(
                f"{where}: {pair.ratio:.2f} of what was predicted: take `why` away, nothing is to be explained"
            )
    return wrong
