"""Plots of measured rows. A PNG carries a hash of the data it shows: whether it is stale is seen without drawing it."""

import hashlib
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lessonkit.base.words import said
from lessonkit.lesson import Table
from lessonkit.measure.rows import Row
from lessonkit.pages import pivots, results, stored


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


def speed(title: str, rows: list[Row], rungs: Sequence[str]) -> Picture | None:
    """TB/s against the least bytes of the op, or TFLOP/s if those limit it; rungs solid, peers dashed, copy dotted.

    Attention has the same bytes at every length: its TFLOP/s stand over the length instead. None for a single size,
    which has no line. rungs: the names of the lesson's, in its order.
    """
    flops = max(rows, key=lambda r: (r.kind == "rung", r.bytes)).limited_by_math
    rows = [r for r in rows if not (flops and r.kind == "limit")]
    if flops and (found := over_length(title, [(r.rung, r) for r in rows], ours=rungs)):
        return found
    if len({r.bytes for r in rows}) == 1:
        return None
    data = [(r.rung, r.kind, r.bytes, r.tflop_per_s if flops else r.tb_per_s) for r in rows]

    def draw(axes: Any) -> None:
        for name in dict.fromkeys(r.rung for r in rows):
            mine = sorted((r for r in rows if r.rung == name), key=lambda r: r.bytes)
            style = {"rung": "-o", "peer": "--s", "limit": ":k"}[mine[0].kind]
            height = [r.tflop_per_s if flops else r.tb_per_s for r in mine]
            axes.plot([r.bytes / 1e6 for r in mine], height, style, label=name, markersize=4)
        unit = "TFLOP/s" if flops else "TB/s of least bytes"
        axes.set(xscale="log", xlabel="least bytes to move, MB", ylabel=unit, title=title)
        highest = {kind: max((rate for _, k, _, rate in data if k == kind), default=0.0) for kind in ("rung", "limit")}
        if highest["limit"] > CRUSHED * highest["rung"]:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))

    return plot(draw, data)


def alt(what: str, rows: Sequence[Row]) -> str:
    """A plot of rates in words: the fastest rung, the fastest peer and the copy at the largest size."""
    unit = pivots.unit(rows)
    rated = pivots.rated(rows, unit)
    shape = max(rated, key=lambda r: (r.bytes, r.tflop_per_s * r.ms_p50)).shape
    slowest_first = sorted((r for r in rated if r.shape == shape), key=lambda r: -r.ms_p50)
    fastest = {r.kind: f"{r.rung} {pivots.rate(r, unit)}" for r in slowest_first}
    figures = ", ".join(fastest[kind] for kind in ("rung", "peer", "limit") if kind in fastest)
    words = said("{what}, {gpu}: {unit} by size. At {shape}: {figures}.")
    return words.format(what=what, gpu=rows[0].gpu, unit=unit, shape=shape, figures=figures)


def over_length(title: str, rows: Sequence[tuple[str, Row]], ours: Sequence[str]) -> Picture | None:
    """TFLOP/s over the sequence length of named rows, a panel for each head size and mask; None without such shapes.

    ours: a name has one style in all panels, by its place here.
    """
    panels: dict[tuple[str, int], dict[str, dict[int, float]]] = {}
    for name, row in rows:
        shape = dict(word.split("=") for word in results.place(row)[0].split())
        if "S" not in shape or "S_k" in shape:
            return None
        panel = " ".join(f"{key}={value}" for key, value in shape.items() if key not in ("B", "H", "S"))
        heads = math.prod(int(shape[key]) for key in ("B", "H", "S"))  # a line is of one amount of work for each key
        panels.setdefault((panel, heads), {}).setdefault(name, {})[int(shape["S"])] = row.tflop_per_s
    most = sorted(panels.items(), key=lambda item: (len(set().union(*item[1].values())), item[0][1]))
    several = {panel: lines for (panel, _), lines in most if len(set().union(*lines.values())) > 1}
    if not several:
        return None

    def draw(figure: Any) -> None:
        high = math.ceil(len(several) / 2)
        figure.set_size_inches(11, 0.5 + 3.8 * high)
        figure.suptitle(title, fontsize=11)
        for i, (panel, lines) in enumerate(sorted(several.items())):
            axes = figure.add_subplot(high, min(2, len(several)), i + 1)
            draw_lines(axes, lines, ours)
            axes.set(xlabel="S", ylabel="TFLOP/s")
            axes.set_title(panel, fontsize=9)

    return Picture(draw, sorted((p, n, *point) for p, lines in several.items() for n, line in lines.items()
                                for point in line.items()))  # fmt: skip


# Colours that readers with any colour vision tell apart (Okabe and Ito); the line's style where they run out.
PEERS = {
    "flash-attn 4": "#d55e00",
    "FA4": "#d55e00",
    "cuDNN": "#cc79a7",
    "FlexAttention": "#e69f00",
    "SDPA flash": "0.3",
}
OURS = tuple((colour, style) for style in ("-", "--", ":") for colour in ("navy", "#0072b2", "#56b4e9", "#009e73"))
CRUSHED = 8  # times the fastest rung's rate: a copy that is higher would press all rungs onto zero


def draw_lines(axes: Any, lines: Mapping[str, Mapping[int, float]], ours: Sequence[str]) -> None:
    """Ours thick, blue and green; the strongest peers each in its colour, the others thin and grey; named at the ends.

    The last of ours is dark blue; the name of a line with dashes is in italics. Names do not stand on each other.
    """
    top = max(value for line in lines.values() for value in line.values())
    styles = {name: OURS[i % len(OURS)] for i, name in enumerate(reversed(ours))}
    ends: list[tuple[float, int, str, str]] = []
    for name, line in lines.items():
        theirs = next((c for peer, c in PEERS.items() if peer in name), "0.6"), "-"
        colour, style = styles.get(name, theirs)
        points = sorted(line.items())
        axes.plot([x for x, _ in points], [y for _, y in points], style, color=colour, markersize=3,
                  marker="o" if name in ours else "s", linewidth=2.2 if name in ours else 1.2,
                  zorder=3 if name in ours else 2)  # fmt: skip
        ends.append((points[-1][1], points[-1][0], name, colour))
    axes.set_xscale("log", base=2)
    lengths = sorted(set().union(*lines.values()))
    axes.set_xticks(lengths, [str(s) for s in lengths], fontsize=8)
    axes.set_xlim(right=lengths[-1] * 2 ** (0.55 * math.log2(lengths[-1] / lengths[0]) if len(lengths) > 1 else 1))
    axes.set_ylim(0, 1.2 * top)
    last = dict.fromkeys(lengths, -math.inf)
    for y, x, name, colour in sorted(ends):
        last[x] = max(y, last[x] + 0.05 * top)
        axes.annotate(name, (x, last[x]), textcoords="offset points", xytext=(6, -3), fontsize=7, color=colour,
                      style="normal" if styles.get(name, theirs)[1] == "-" else "italic")  # fmt: skip
    axes.grid(alpha=0.3)


def of_table(table: Table) -> Picture:
    """The plot that a table asks for: one of its own, or lines."""
    if table.draw:
        return Picture(table.draw, [tuple(map(str, row.values())) for row in table.rows])
    return lines(table.name, table.rows, table.x, table.y, table.by)


def alt_of_table(table: Table) -> str:
    """A table's plot in words: what lines go from and to; of a plot of its own what the note says."""
    if table.draw:
        return f"{stored.told(table.name)}: {stored.told(table.note)}"
    name, x, y = map(stored.told, (table.name, table.x, table.y))
    values = sorted((row[table.y] for row in table.rows if row[table.y] != ""), key=float)
    words = said("{name}: {y} from {low} to {high}, over {x} from {first} to {last}.")
    ends = {"low": values[0], "high": values[-1], "first": table.rows[0][table.x], "last": table.rows[-1][table.x]}
    return words.format(name=name, x=x, y=y, **ends)


def lines(title: str, rows: list[dict[str, Any]], x: str, y: str, by: str) -> Picture:
    """A table as lines: `y` against the numbers `x`, a line for each value of `by`; against names it is points.

    A name's colour is that of its first word, which says the lesson.
    """
    places = {str(r[x]): i for i, r in enumerate({str(r[x]): r for r in rows}.values())}
    names = not all(re.fullmatch(r"[\d.e+-]+%?", place) for place in places)
    groups = list(dict.fromkeys(place.split()[0] for place in places))

    def draw(axes: Any) -> None:
        for i, value in enumerate(dict.fromkeys(str(r.get(by, "")) for r in rows)):
            mine = [(str(r[x]), float(r[y])) for r in rows if str(r.get(by, "")) == value and r[y] != ""]
            height = [rate for _, rate in mine]
            if names:
                colours = [f"C{groups.index(place.split()[0])}" for place, _ in mine]
                axes.scatter([places[place] for place, _ in mine], height, 22, colours, "ovs^"[i % 4], label=value)
            else:
                axes.plot([float(place.rstrip("%")) for place, _ in mine], height, "-o", label=value, markersize=4)
        axes.set(xlabel=x, ylabel=y, title=title)
        if names:
            axes.set_xticks(range(len(places)), list(places), rotation=60, ha="right", fontsize=7)
        elif any(place.endswith("%") for place in places):
            axes.xaxis.set_major_formatter("{x:g}%")
        else:
            axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if by:
            for mark in axes.legend(fontsize=7).legend_handles if names else ():
                mark.set_color("0.3")  # the colours are the lessons'

    return plot(draw, [tuple(map(str, r.values())) for r in rows])
