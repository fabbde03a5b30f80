"""Tables of many contenders over the sequence length, as pivots: the ratio of ours to the best peer, and a sentence.

Their rows are those that a step measured: contender ("attention"), S, TFLOP/s, peak MB.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from lessonkit.lesson import Table
from lessonkit.pages import plots, report

Lines = dict[str, dict[int, dict[str, str]]]  # contender -> S -> row
OURS = "the course's fastest over the best peer"


def by_length(found: Iterable[dict[str, str]]) -> Lines:
    """The rows by contender and length, the fastest at the longest length first."""
    lines: Lines = {}
    for row in found:
        lines.setdefault(row["attention"], {})[int(row["S"])] = row
    return dict(sorted(lines.items(), key=lambda item: -_rate(item[1][max(item[1])])))


def compared(lesson: str, name: str, peers: Collection[str]) -> Callable[[Path], Table | None]:
    """In place of a step's table: TFLOP/s, a line for each contender, a column for each S; all but `peers` are ours."""

    def compare(folder: Path) -> Table | None:
        lines = by_length(report.kept_table(folder, lesson, name))
        theirs, ours = [n for n in lines if n in peers], [n for n in lines if n not in peers]
        if not (theirs and ours):
            return None
        rates = {n: {S: _rate(row) for S, row in line.items()} for n, line in lines.items()}
        lengths = sorted({S for line in rates.values() for S in line})
        best = {S: _fastest(rates, S, theirs) for S in lengths}
        ratios = {S: rates[_fastest(rates, S, ours)][S] / rates[best[S]][S] for S in lengths}
        table = [_line(n, rates, lengths, bold=n in ours) for n in lines]
        table.append({"TFLOP/s": f"**{OURS}**"} | {f"S = {S}": f"**{ratio:.2f}**" for S, ratio in ratios.items()})

        def draw(figure: Any) -> None:
            figure.set_size_inches(12, 5)
            fastest = _fastest(rates, lengths[-1], ours)
            axes = figure.add_subplot(1, 2, 1)
            plots.draw_lines(axes, rates, (fastest,))
            axes.set(xlabel="S", ylabel="TFLOP/s", title=name)
            over = {n: {S: x / rates[best[S]][S] for S, x in rates[n].items()} for n in [*theirs, fastest]}
            axes = figure.add_subplot(1, 2, 2)
            plots.draw_lines(axes, {n: line for n, line in over.items() if max(line.values()) > 0.4}, (fastest,))
            axes.set(xlabel="S", title="over the best peer of each S")

        return Table(name, table, _said(best, ratios, [p for p in peers if p not in lines]), draw=draw)

    return compare


def memory(lesson: str, names: Collection[str]) -> Callable[[Path], Table | None]:
    """Peak memory of these tables at the shortest, the middle and the longest S, and what grows with S."""

    def peak_memory(folder: Path) -> Table | None:
        found: dict[str, dict[str, str]] = {}
        columns, grow = list[str](), dict[str, None]()
        for name in names:
            lines = by_length(report.kept_table(folder, lesson, name))
            lengths = sorted({S for line in lines.values() for S in line})
            for S in lengths[:: max(1, len(lengths) // 2)] + lengths[-1:]:
                columns += [f"{name}, S = {S}"] * (f"{name}, S = {S}" not in columns)
                for who, line in lines.items():
                    peak = float(line[S]["peak MB"]) if S in line else 0
                    found.setdefault(who, {})[f"{name}, S = {S}"] = f"{peak:.0f}" if peak else ""
                    if peak > 1.5 * float(line[min(line)]["peak MB"]):
                        grow[who] = None
        table = [{"peak MB": who} | {key: row.get(key, "") for key in columns} for who, row in found.items()]
        note = (
            f"With S grow {', '.join(grow)}: they keep scores in memory. The others keep O and a number or two a row."
        )
        return Table("peak memory", table, note) if table else None

    return peak_memory


def _rate(row: Mapping[str, str]) -> float:
    return float(row["TFLOP/s"])


def _fastest(rates: Mapping[str, Mapping[int, float]], S: int, names: Iterable[str]) -> str:
    return max((name for name in names if S in rates[name]), key=lambda name: rates[name][S])


def _line(name: str, rates: Mapping[str, Mapping[int, float]], lengths: Iterable[int], *, bold: bool) -> dict[str, str]:
    """One contender: ours in bold, and the fastest of each length."""
    line = {"TFLOP/s": f"**{name}**" if bold else name}
    for S in lengths:
        text = f"{rates[name][S]:.0f}" if S in rates[name] else ""
        line[f"S = {S}"] = f"**{text}**" if text and name == _fastest(rates, S, rates) else text
    return line


def _said(best: Mapping[int, str], ratios: Mapping[int, float], absent: Collection[str]) -> str:
    """One sentence on a table: the ratios, the best peer of each length; and who is not in it."""
    runs = [(name, list(run)) for name, run in groupby(best, key=lambda S: best[S])]
    who = "; ".join(f"{name} at S = {run[0]}" + f" to {run[-1]}" * (len(run) > 1) for name, run in runs)
    said = (
        f"The course's fastest runs at {min(ratios.values()):.2f} to {max(ratios.values()):.2f} times the best peer, "
    )
    return f"{said}which is {who}." + f" Not timed here: {', '.join(absent)}." * bool(absent)
