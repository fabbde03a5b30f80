"""Plots of measured rows. A PNG carries a hash of the data it shows: whether it is stale is seen without drawing it."""

import hashlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lessonkit.lesson import Table
from lessonkit.measure.rows import Row


@dataclass(frozen=True)
class Picture:
    """What `draw(figure)` draws, which may set the figure's size; `data` is all that it shows."""

    draw: Callable[[Any], None]
    data: object

    def png(self) -> bytes:
        """Half a second."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        self.draw(figure)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=110, metadata={"Comment": f"data:{self._hash()}"})
        return out.getvalue()

    def is_in(self, png: bytes) -> bool:
        """Whether this PNG shows the same data."""
        found = re.search(rb"data:([0-9a-f]{16})", png)
        return found is not None and found[1].decode() == self._hash()

    def _hash(self) -> str:
        return hashlib.sha256(repr(self.data).encode()).hexdigest()[:16]


def plot(draw: Callable[[Any], None], data: object) -> Picture:
    """What `draw(axes)` draws."""
    return Picture(partial(_alone, draw), data)


def _alone(draw: Callable[[Any], None], figure: Any) -> None:
    draw(figure.add_subplot())


def speed(title: str, rows: list[Row]) -> Picture:
    """TB/s against the least bytes of the op, or TFLOP/s if those limit it; rungs solid, peers dashed, copy dotted."""
    math = max(rows, key=lambda r: (r.kind == "rung", r.bytes)).limited_by_math
    rows = [r for r in rows if not (math and r.kind == "limit")]
    data = [(r.rung, r.kind, r.bytes, r.tflop_per_s if math else r.tb_per_s) for r in rows]

    def draw(axes: Any) -> None:
        for name in dict.fromkeys(r.rung for r in rows):
            mine = sorted((r for r in rows if r.rung == name), key=lambda r: r.bytes)
            style = {"rung": "-o", "peer": "--s", "limit": ":k"}[mine[0].kind]
            height = [r.tflop_per_s if math else r.tb_per_s for r in mine]
            axes.plot([r.bytes / 1e6 for r in mine], height, style, label=name, markersize=4)
        unit = "TFLOP/s" if math else "TB/s of least bytes"
        axes.set(xscale="log", xlabel="least bytes to move, MB", ylabel=unit, title=title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))

    return plot(draw, data)


def roofline(device: str, rows: list[Row]) -> Picture:
    """Each lesson's fastest rung at its largest shape: FLOP/s against FLOPs for each byte, under both roofs."""
    points = []
    for name in dict.fromkeys(r.lesson for r in rows):
        rungs = [r for r in rows if r.lesson == name and r.kind == "rung" and r.tflop_per_s > 0]
        if rungs:
            big = max(r.bytes for r in rungs)
            best = max((r for r in rungs if r.bytes == big), key=lambda r: r.tflop_per_s)
            points.append((name.split(".")[-1], best.tflop_per_s / best.tb_per_s, best.tflop_per_s))
    roof = max((r.tb_per_s for r in rows if r.kind == "limit"), default=1.0)
    ceiling = max((rate for _, _, rate in points), default=0.0)

    def draw(axes: Any) -> None:
        span = [0.05, ceiling / roof, 10_000.0]
        label = f"copy: {roof:.2f} TB/s; fastest matmul: {ceiling:.0f} TFLOP/s"
        axes.plot(span, [min(x * roof, ceiling) for x in span], ":k", label=label)
        for name, intensity, rate in points:
            axes.plot(intensity, rate, "o")
            axes.annotate(name, (intensity, rate), textcoords="offset points", xytext=(5, -3), fontsize=7)
        axes.set(
            xscale="log", yscale="log", xlabel="FLOPs for each byte", ylabel="TFLOP/s", title=f"Roofline, {device}"
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)

    return plot(draw, (points, roof, ceiling))


def of_table(table: Table) -> Picture:
    """The plot that a table asks for: one of its own, or lines."""
    if table.draw:
        return Picture(table.draw, [tuple(map(str, row.values())) for row in table.rows])
    return lines(table.name, table.rows, table.x, table.y, table.by)


def lines(title: str, rows: list[dict[str, Any]], x: str, y: str, by: str) -> Picture:
    """A table as lines: `y` against `x` (numbers, or names in the table's order), a line for each value of `by`."""
    places = {str(r[x]): i for i, r in enumerate({str(r[x]): r for r in rows}.values())}
    names = not all(re.fullmatch(r"[\d.e+-]+", place) for place in places)

    def draw(axes: Any) -> None:
        for value in dict.fromkeys(str(r.get(by, "")) for r in rows):
            mine = [r for r in rows if str(r.get(by, "")) == value and r[y] != ""]
            at = [places[str(r[x])] if names else float(r[x]) for r in mine]
            axes.plot(at, [float(r[y]) for r in mine], "-o", label=value, markersize=4)
        axes.set(xlabel=x, ylabel=y, title=title)
        if names:
            axes.set_xticks(range(len(places)), list(places), rotation=60, ha="right", fontsize=7)
        else:
            axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if by:
            axes.legend(fontsize=7)

    return plot(draw, [tuple(map(str, r.values())) for r in rows])
