"""The rows of one GPU under the roofs of its data sheet: bandwidth, and the arithmetic of each dtype."""

from collections import Counter
from pathlib import Path
from typing import Any

from lessonkit.base.chips import Chip
from lessonkit.base.words import listed, said, sentences
from lessonkit.lesson import Table
from lessonkit.pages import shares
from lessonkit.pages.results import LAUNCH_US, bound, card, intensity, largest, measured, of_sheet, operator, roofs


def roofline(folder: Path) -> Table | None:
    """Every lesson's first and last rung at its largest shape, under the data sheet's roofs, and what bounds the last.

    None where nothing was measured, or the table of cards lacks this one.
    """
    table, chip = list[dict[str, Any]](), None
    for name, lesson, found in measured(folder):
        row = largest(found, lesson.rungs[-1].__name__)
        if row is None:
            continue
        small = min((r for r in found if r.rung == row.rung), key=lambda r: r.bytes)
        first = next((r for r in found if r.rung == lesson.rungs[0].__name__ and r.shape == row.shape), None)
        chip = card(row)
        table.append({
            "operator": operator(name), "last rung": f"{name.split('.')[1]}: {row.rung}",
            "shape": row.shape,
            "dtype": row.dtype,
            "FLOPs a byte": f"{intensity(row):.3g}", "TFLOP/s": f"{row.tflop_per_s:.3g}",
            "first rung's": f"{first.tflop_per_s:.3g}" if first else "", "rate": row.rate,
            "% of its limit": f"{shares.percent(row):.0f}", "% of the data sheet": f"{of_sheet(row):.0f}",
            "bound by": bound(row),
            "at its smallest": bound(small),
        })  # fmt: skip
    if not table or chip is None:
        return None
    lines = said("A vertical line goes from a lesson's first rung to its last.")

    def draw(figure: Any) -> None:
        figure.set_size_inches(11, 7)
        draw_roofline(figure.add_subplot(), table, chip)

    return Table("roofline", table, sentences(in_words(table), lines), draw=draw)


def in_words(table: list[dict[str, Any]]) -> str:
    """How many of the rows of `roofline` each limit binds, and what that means."""
    bounds = Counter(row["bound by"] for row in table)
    by = listed(said("{count} by {what}").format(count=count, what=said(what)) for what, count in bounds.most_common())
    launched = sum(row["at its smallest"] == "launch" for row in table)
    return said(
        "Last rungs of {count} lessons at their largest shape: bound {bounds}; at their smallest {launched} by "
        "launches. A rung is bound by memory or compute if it reaches half of that limit, and by latency if it does "
        "not. It is bound by launches where the limit itself is less than {us} us."
    ).format(count=len(table), bounds=by, launched=launched, us=LAUNCH_US)


def draw_roofline(axes: Any, table: list[dict[str, Any]], chip: Chip) -> None:
    """The rows of `roofline` under the card's bandwidth, and under its rate of each dtype."""
    roof = chip.bandwidth / 1e12
    ceilings = roofs(chip, {row["dtype"] for row in table})
    top, right = max(ceilings.values()), 10_000.0
    axes.plot([0.05, top / roof], [0.05 * roof, top], ":k")
    axes.annotate(f"{roof:.2f} TB/s", (0.6, 0.6 * roof), fontsize=7, textcoords="offset points", xytext=(-46, 4))
    for dtype, ceiling in ceilings.items():
        axes.plot([ceiling / roof, right], [ceiling, ceiling], ":k")
        axes.annotate(
            f"{dtype} {ceiling:.0f} TFLOP/s",
            (right, ceiling),
            fontsize=6,
            textcoords="offset points",
            xytext=(0, 2),
            ha="right",
        )
    colours = {"memory": "tab:blue", "compute": "tab:red", "latency": "tab:orange", "launch": "tab:gray"}
    for what, colour in colours.items():
        mine = [row for row in table if row["bound by"] == what and float(row["FLOPs a byte"])]
        for row in mine:
            x, y = float(row["FLOPs a byte"]), float(row["TFLOP/s"])
            if row["first rung's"]:
                axes.plot([x, x], [float(row["first rung's"]), y], "-", color=colour, alpha=0.35, linewidth=1)
        if mine:
            axes.plot([float(r["FLOPs a byte"]) for r in mine], [float(r["TFLOP/s"]) for r in mine], "o", color=colour,
                      markersize=4, label=f"bound by {what}")  # fmt: skip
    best: dict[str, tuple[float, float]] = {}
    for row in table:  # one number an operator, at its fastest
        if float(row["FLOPs a byte"]) and float(row["TFLOP/s"]) > best.get(row["operator"], (0, 0))[1]:
            best[row["operator"]] = float(row["FLOPs a byte"]), float(row["TFLOP/s"])
    for i, (x, y) in enumerate(best.values()):  # neighbours' numbers go to different sides
        axes.annotate(
            str(i + 1), (x, y), textcoords="offset points", xytext=((4, -9)[i % 2], (3, -8)[i // 2 % 2]), fontsize=6
        )
    names = [f"{i + 1} {op}" for i, op in enumerate(best)]
    axes.text(1.01, 1, "\n".join(names), transform=axes.transAxes, va="top", fontsize=5.5)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs for each byte", ylabel="TFLOP/s")
    axes.set_ylim(top=3 * top)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="lower right")
