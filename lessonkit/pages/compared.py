"""What a sweep's rows say: ranking against measurement, three configurations discussed, heat maps."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lessonkit.lesson import Table
from lessonkit.measure.sweeps import Sweep, figures, rank_correlation, read, show, sizes


def comparisons(sweep: Sweep) -> tuple[Callable[[Path], Table | None], ...]:
    """The tables of `Steps.compares`: of the rows that one GPU measured, with today's model beside them."""

    def ranking(folder: Path) -> Table | None:
        return _ranking(sweep, read(folder, sweep.module))

    def discussed(folder: Path) -> Table | None:
        return _discussed(sweep, read(folder, sweep.module))

    def heat_maps(folder: Path) -> Table | None:
        return _heat_maps(sweep, read(folder, sweep.module))

    return ranking, discussed, heat_maps


def _error(sweep: Sweep, row: Mapping[str, Any]) -> float:
    return sweep.predicted(row)[0] / float(row["us"]) - 1


def _ranking(sweep: Sweep, found: list[dict[str, str]]) -> Table | None:
    """For each size: how well the order was predicted, how far off times are, and what trusting the model costs."""
    table = []
    for size in sizes(found):
        mine = [row for row in found if row["size"] == size]
        measured = [float(row["us"]) for row in mine]
        chosen = min(mine, key=lambda row: sweep.predicted(row)[0])
        best = min(mine, key=lambda row: float(row["us"]))
        table.append({
            "size": size, "configurations": len(mine),
            "rank correlation": f"{rank_correlation([sweep.predicted(row)[0] for row in mine], measured):.2f}",
            "median error of the time": f"{median(abs(_error(sweep, row)) for row in mine):.0%}",
            "best, measured": show(sweep, best), "us": best["us"], "best, predicted": show(sweep, chosen),
            "its us": chosen["us"], "costs": f"{float(chosen['us']) / float(best['us']) - 1:.1%}",
            "worst over best": f"{max(measured) / min(measured):.1f}x",
        })  # fmt: skip
    note = "Rank correlation: Spearman's, 1 is the measured order. Costs: the predicted best over the measured best."
    return Table("ranking", table, note) if table else None


def _discussed(sweep: Sweep, found: list[dict[str, str]]) -> Table | None:
    """For each size the best, the one the model would have taken, the one it is most wrong about, and the slowest."""
    table = []
    for size in sizes(found):
        mine = [row for row in found if row["size"] == size]
        picks = {
            "measured best": min(mine, key=lambda row: float(row["us"])),
            "predicted best": min(mine, key=lambda row: sweep.predicted(row)[0]),
            "worst predicted": max(mine, key=lambda row: abs(_error(sweep, row))),
            "slowest": max(mine, key=lambda row: float(row["us"])),
        }
        for what, row in picks.items():
            us, limit = sweep.predicted(row)
            table.append({
                "size": size, "": what, "configuration": show(sweep, row), "registers": row["registers"],
                "spills": row["spills"], "shared": row["shared"], "programs an SM": figures(row).resident,
                "us": row["us"], "predicted": f"{us:.1f}", "error": f"{_error(sweep, row):+.0%}", "limit": limit,
            })  # fmt: skip
    note = "Limit: which term of the model is the largest, and so what to change next."
    return Table("discussed", table, note) if table else None


def _heat_maps(sweep: Sweep, found: list[dict[str, str]]) -> Table | None:
    """Predicted and measured time over the best, side by side, and one against the other; a line for each size."""
    table: list[dict[str, Any]] = []
    for row in found:
        y, x = sweep.axes(sweep.config(row))
        table.append({"size": row["size"], "y": y, "x": x, "us": float(row["us"]),
                      "predicted": round(sweep.predicted(row)[0], 2)})  # fmt: skip

    def draw(figure: Any) -> None:
        names = list(dict.fromkeys(row["size"] for row in table))
        figure.set_size_inches(15, 4 * len(names))
        axes = figure.subplots(len(names), 3, squeeze=False)
        for line, size in zip(axes, names, strict=True):
            mine = [row for row in table if row["size"] == size]
            for what, panel in (("predicted", line[0]), ("us", line[1])):
                _heat(figure, panel, mine, what, f"{size}: {'measured' if what == 'us' else what}, times the best")
            _scatter(line[2], mine)

    note = "Darker is slower; a number is the time over the best's. Right: a point a configuration."
    return Table("heat maps", table, note, draw=draw) if table else None


def _heat(figure: Any, axes: Any, mine: Sequence[Mapping[str, Any]], what: str, title: str) -> None:
    ys, xs = (list(dict.fromkeys(row[key] for row in mine)) for key in ("y", "x"))
    best = min(row[what] for row in mine)
    grid = [[float("nan")] * len(xs) for _ in ys]
    for row in mine:
        grid[ys.index(row["y"])][xs.index(row["x"])] = row[what] / best
    drawn = axes.imshow(grid, cmap="YlOrBr", vmin=1, vmax=3, aspect="auto")
    for i, line in enumerate(grid):
        for j, value in enumerate(line):
            if value == value:
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color="w" if value > 2 else "k")
    axes.set_xticks(range(len(xs)), xs, rotation=40, ha="right", fontsize=7)
    axes.set_yticks(range(len(ys)), ys, fontsize=7)
    axes.set_title(title, fontsize=9)
    figure.colorbar(drawn, ax=axes, shrink=0.8)


def _scatter(axes: Any, mine: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import LogLocator

    x, y = [row["predicted"] for row in mine], [row["us"] for row in mine]
    axes.plot(x, y, "o", markersize=4)
    ends = [min(x + y), max(x + y)]
    axes.plot(ends, ends, ":k")
    axes.set(xscale="log", yscale="log", xlabel="predicted us", ylabel="measured us")
    for axis in (axes.xaxis, axes.yaxis):  # 10, 20, 50, 100: more would stand on each other
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
        axis.set_tick_params(labelsize=7)
    axes.set_title(f"rank correlation {rank_correlation(x, y):.2f}", fontsize=9)
    axes.grid(alpha=0.3)
