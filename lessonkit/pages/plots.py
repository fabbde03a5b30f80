"""Plots of measured rows. A PNG carries a hash of the data it shows: whether it is stale is seen without drawing it."""

import hashlib
import io
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lessonkit.lesson import Table
from lessonkit.measure.rows import Row
from lessonkit.pages import results


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
    """TB/s against the least bytes of the op, or TFLOP/s if those limit it; rungs solid, peers dashed, copy dotted.

    Attention has the same bytes at every length: its TFLOP/s stand over the length instead.
    """
    flops = max(rows, key=lambda r: (r.kind == "rung", r.bytes)).limited_by_math
    rows = [r for r in rows if not (flops and r.kind == "limit")]
    rungs = tuple(dict.fromkeys(r.rung for r in rows if r.kind == "rung"))
    if flops and (found := over_length(title, [(r.rung, r) for r in rows], ours=rungs)):
        return found
    data = [(r.rung, r.kind, r.bytes, r.tflop_per_s if flops else r.tb_per_s) for r in rows]

    def draw(axes: Any) -> None:
        for name in dict.fromkeys(r.rung for r in rows):
            mine = sorted((r for r in rows if r.rung == name), key=lambda r: r.bytes)
            style = {"rung": "-o", "peer": "--s", "limit": ":k"}[mine[0].kind]
            height = [r.tflop_per_s if flops else r.tb_per_s for r in mine]
            axes.plot([r.bytes / 1e6 for r in mine], height, style, label=name, markersize=4)
        unit = "TFLOP/s" if flops else "TB/s of least bytes"
        axes.set(xscale="log", xlabel="least bytes to move, MB", ylabel=unit, title=title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))

    return plot(draw, data)


def over_length(title: str, rows: Sequence[tuple[str, Row]], ours: Collection[str]) -> Picture | None:
    """TFLOP/s over the sequence length of named rows, a panel for each head size and mask; None without such shapes."""
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


PEERS = {
    "flash-attn 4": "tab:red",
    "FA4": "tab:red",
    "cuDNN": "tab:green",
    "FlexAttention": "tab:orange",
    "SDPA flash": "tab:purple",
}
OURS = ("navy", "tab:blue", "deepskyblue", "teal", "slateblue", "steelblue")


def draw_lines(axes: Any, lines: Mapping[str, Mapping[int, float]], ours: Collection[str]) -> None:
    """Ours thick and blue, the strongest peers each in its colour, the others thin and grey; each named at its end.

    Names that would stand on each other are moved apart.
    """
    top = max(value for line in lines.values() for value in line.values())
    blue = {name: OURS[i % len(OURS)] for i, name in enumerate(reversed([n for n in lines if n in ours]))}
    ends: list[tuple[float, int, str, str]] = []
    for name, line in lines.items():
        colour = blue.get(name) or next((c for peer, c in PEERS.items() if peer in name), "0.6")
        points = sorted(line.items())
        axes.plot([x for x, _ in points], [y for _, y in points], "-o", color=colour, markersize=3,
                  linewidth=2.2 if name in ours else 1.2, zorder=3 if name in ours else 2)  # fmt: skip
        ends.append((points[-1][1], points[-1][0], name, colour))
    axes.set_xscale("log", base=2)
    lengths = sorted(set().union(*lines.values()))
    axes.set_xticks(lengths, [str(s) for s in lengths], fontsize=8)
    axes.set_xlim(right=lengths[-1] * 2 ** (0.55 * math.log2(lengths[-1] / lengths[0]) if len(lengths) > 1 else 1))
    axes.set_ylim(0, 1.2 * top)
    last = dict.fromkeys(lengths, -math.inf)
    for y, x, name, colour in sorted(ends):
        last[x] = max(y, last[x] + 0.05 * top)
        axes.annotate(name, (x, last[x]), textcoords="offset points", xytext=(6, -3), fontsize=7, color=colour)
    axes.grid(alpha=0.3)


def roofline(device: str, rows: list[Row]) -> Picture:
    """Each lesson's fastest rung at its largest shape: FLOP/s against FLOPs for each byte, under the card's roofs.

    The roofs are the data sheet's: its bandwidth, and its rate of each dtype; of a card that is in no table the copy.
    """
    points, dtypes = [], set()
    for name in dict.fromkeys(r.lesson for r in rows):
        rungs = [r for r in rows if r.lesson == name and r.kind == "rung" and r.tflop_per_s > 0]
        if rungs:
            big = max(r.bytes for r in rungs)
            best = max((r for r in rungs if r.bytes == big), key=lambda r: r.tflop_per_s)
            points.append((name.split(".")[-1], best.tflop_per_s / best.tb_per_s, best.tflop_per_s))
            dtypes.add(best.dtype)
    chip = next(filter(None, map(results.card, rows)), None)
    roof = chip.bandwidth / 1e12 if chip else max((r.tb_per_s for r in rows if r.kind == "limit"), default=1.0)
    ceilings = results.roofs(chip, dtypes) if chip else {"fastest": max((rate for _, _, rate in points), default=0.0)}

    def draw(axes: Any) -> None:
        for i, (name, ceiling) in enumerate(ceilings.items()):
            span = [0.05, ceiling / roof, 10_000.0]
            label = f"{roof:.2f} TB/s; {name} {ceiling:.0f} TFLOP/s"
            axes.plot(span, [min(x * roof, ceiling) for x in span], linestyle=":", color=f"C{i}", label=label)
        for name, intensity, rate in points:
            axes.plot(intensity, rate, "o")
            axes.annotate(name, (intensity, rate), textcoords="offset points", xytext=(5, -3), fontsize=7)
        axes.set(
            xscale="log", yscale="log", xlabel="FLOPs for each byte", ylabel="TFLOP/s", title=f"Roofline, {device}"
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)

    return plot(draw, (points, roof, ceilings))


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
