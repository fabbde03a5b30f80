"""Rows as the data of an interactive chart: JSON in the page, which static/chart.js draws."""

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lessonkit.base import chips
from lessonkit.base.words import translated
from lessonkit.lesson import Lesson, shape_name
from lessonkit.measure import rows
from lessonkit.measure.rows import Row
from lessonkit.pages import pivots, predictions, shares
from lessonkit.pages.results import BOUNDS, bound, intensity, ladder, measured, operator, place
from lessonkit.web.places import lesson_page, relative

FIELDS = ("rung", "kind", "shape", "dtype", "ms_p50", "tb_per_s", "tflop_per_s", "percent_of_limit", "bytes",
          "ratio_to_best_peer", "date", "commit")  # fmt: skip


def of_lesson(lesson: Lesson, name: str, folders: Iterable[Path]) -> dict[str, Any] | None:
    """The rows of a lesson on each GPU, with what was predicted for them."""
    found = {folder.name: _declared(lesson, rows.read(folder / f"{name}.csv")) for folder in folders}
    return _chart(found, [(lesson, found.get(rows.MACHINE, []))])


def of_operator(lessons: Sequence[tuple[str, Lesson, Sequence[Row]]], device: str) -> dict[str, Any] | None:
    """The rows of all lessons of an operator on one GPU."""
    everything = _peers_last([row for _, _, found in lessons for row in found if rows.ELSEWHERE not in row.rung])
    said = [(lesson, found) for _, lesson, found in lessons] if device == rows.MACHINE else []
    return _chart({device: everything}, said)


def _peers_last(found: Sequence[Row]) -> list[Row]:
    """Rungs in the order of their lessons, then each peer once at a shape: its fastest row of all lessons."""
    fastest = dict[tuple[str, str, str], Row]()
    for row in sorted((row for row in found if row.kind != "rung"), key=lambda row: row.ms_p50):
        fastest.setdefault((row.rung, row.shape, row.dtype), row)
    return [row for row in found if row.kind == "rung"] + list(fastest.values())


def _declared(lesson: Lesson, found: Sequence[Row]) -> list[Row]:
    """The rows of what the lesson still has, in its order."""
    order = [rung.__name__ for rung in lesson.rungs] + list(lesson.peers) + ["copy"]
    shapes = [shape_name(shape) for shape in lesson.benches]
    kept = [row for row in found if row.rung in order and row.shape in shapes]
    return sorted(kept, key=lambda row: (order.index(row.rung), shapes.index(row.shape)))


def _chart(found: dict[str, list[Row]], said: Iterable[tuple[Lesson, Sequence[Row]]]) -> dict[str, Any] | None:
    everything = [row for rows_ in found.values() for row in rows_]
    if not everything:
        return None
    predicted = [
        {"rung": pair.row.rung, "shape": pair.row.shape, "dtype": pair.row.dtype, "how": pair.how.replace("`", ""),
         "ms": [_round(pair.least_ms), _round(pair.most_ms)], "why": pair.said.why}
        for lesson, mine in said
        for pair in predictions.compared(lesson, mine)
    ]  # fmt: skip
    return {
        "unit": pivots.unit(everything),
        "fields": list(FIELDS),
        "devices": {name: [[_field(row, field) for field in FIELDS] for row in mine]
                    for name, mine in found.items() if mine},
        "predicted": predicted,
    }  # fmt: skip


def _field(row: Row, field: str) -> object:
    """A copy is the limit: beside matmuls, which need other than bytes, it has no share of it."""
    if field != "percent_of_limit":
        return getattr(row, field)
    if row.kind == "limit":
        return row.percent_of_limit if row.percent_of_limit <= 100 else 0
    return round(shares.percent(row), 1)


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def of_roofline(folder: Path) -> dict[str, Any] | None:
    """Each lesson's first and fastest rung at the last rung's shape with the most FLOPs, and the roofs.

    The roofs are the copy of the rows, and the fastest rate of each kind of arithmetic.
    """
    points, copy, roofs = list[dict[str, Any]](), 0.0, dict[str, float]()
    for name, lesson, found in measured(folder):
        for row in found:
            if row.kind == "limit":
                copy = max(copy, row.tb_per_s)
            elif row.tflop_per_s:
                rate = chips.RATES.get(row.dtype, "fp32")
                roofs[rate] = max(roofs.get(rate, 0.0), row.tflop_per_s)
        last = (row for row in found if row.rung == lesson.rungs[-1].__name__)
        most = max(last, key=lambda row: row.tflop_per_s * row.ms_p50, default=None)
        if most is None or not most.tflop_per_s:
            continue
        rungs = ladder(lesson, found, *place(most))
        first, row = rungs[0], min(rungs, key=lambda row: row.ms_p50)
        points.append({
            "lesson": name.partition(".")[2], "rung": row.rung, "operator": operator(name), "shape": row.shape,
            "dtype": row.dtype, "x": _round(intensity(row)), "y": row.tflop_per_s, "first": first.tflop_per_s,
            "percent": round(shares.percent(row), 1), "share": shares.of_limit(row), "bound": bound(row),
            "href": relative(lesson_page(name), "roofline") + ".html",
        })  # fmt: skip
    return {"points": points, "copy": copy, "roofs": roofs} if points else None


def figure(kind: str, data: dict[str, Any], caption: str, language: str) -> str:
    """The place of a chart in a page. kind: "rows" or "roofline"."""
    without = translated("The chart needs JavaScript; the tables below hold the same rows.", language)
    return (
        f'<figure class="chart" data-kind="{kind}"><figcaption>{html.escape(caption)}</figcaption>\n'
        f'<script type="application/json" class="chart-data">{_json(data)}</script>\n'
        f'<script type="application/json" class="chart-words">{_json(_words(language))}</script>\n'
        f"<noscript>{html.escape(without)}</noscript></figure>\n"
    )


def _json(data: object) -> str:
    """JSON that may stand inside of a script element."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")


def _words(language: str) -> dict[str, object]:
    return {
        "gpu": translated("GPU", language),
        "dtype": translated("dtype", language),
        "shape": translated("shape", language),
        "all": translated("all shapes", language),
        "y": translated("show", language),
        "rate": translated("rate", language),
        "ms": translated("time, ms", language),
        "percent": translated("% of the limit", language),
        "beyond": translated(shares.ANY, language),
        "logx": translated("log x", language),
        "logy": translated("log y", language),
        "bytes": translated("least bytes to move, MB", language),
        "predicted": translated("predicted", language),
        "measured": translated("measured", language),
        "why": translated("why it differs", language),
        "ratio": translated("ratio to the best peer", language),
        "date": translated("measured on", language),
        "intensity": translated("FLOPs for each byte", language),
        "bound": translated("bound by", language),
        "bounds": {each: translated(each, language) for each in BOUNDS},
        "first": translated("first rung", language),
        "hint": translated("Point at a mark, or go through the marks by Tab, to see its row.", language),
    }
