"""Figures that move: a page's fragment of data and script, without a framework and without the network."""

import html
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lessonkit.pictures.draw import STYLE, Say

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Figure:
    """A figure that moves. script: its file here, which computes `model(p, data)` and draws it.

    - data: what Python writes for it, from the lessons' own numbers
    - start: where controls begin, if a lesson's number says it
    - controls: the sliders and choices that a reader moves, in order
    - words: what it says, by the name that the script uses
    """

    script: str
    data: Callable[[], Mapping[str, Any]]
    controls: tuple["Control", ...]
    words: tuple[tuple[str, Say], ...]
    start: Callable[[], Mapping[str, Any]] = dict

    def payload(self, language: str) -> dict[str, Any]:
        start = self.start()
        return {
            "script": self.script,
            "data": dict(self.data()),
            "controls": [control.written(language) | _begin(start, control.name) for control in self.controls],
            "words": {name: words.to(language) for name, words in self.words},
        }

    def fragment(self, title: str, language: str) -> str:
        """<div> with an empty figure, then its data as JSON and the scripts. Several may stand in one page."""
        text = json.dumps(self.payload(language), ensure_ascii=False).replace("</", "<\\/")
        scripts = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in ("run.js", f"{self.script}.js"))
        return (
            f'<div class="lk-moving" role="group" aria-label="{html.escape(title)}" lang="'
            f'{"zh-CN" if language == "zh" else "en"}"><style>{STYLE}{PAGE}</style>'
            f'<script type="application/json">{text}</script>\n'
            f"<script>(function () {{\n{scripts}\nrun(document.currentScript.parentElement, figure);\n}})();</script>"
            "</div>\n"
        )

    def says(self) -> list[Say]:
        """All its words, for the catalogues."""
        return [
            *(words for _, words in self.words),
            *(control.label for control in self.controls if isinstance(control.label, Say)),
            *(words for control in self.controls for _, words in control.choices if isinstance(words, Say)),
        ]


def _begin(start: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {"value": start[name]} if name in start else {}


@dataclass(frozen=True)
class Control:
    """A slider from `least` to `most`, or choices of (value, words)."""

    name: str
    label: Say | str
    value: float | str
    least: float = 0
    most: float = 0
    step: float = 1
    choices: tuple[tuple[float | str, Say | str], ...] = ()

    def written(self, language: str) -> dict[str, Any]:
        chosen = [[value, _to(words, language)] for value, words in self.choices]
        return {
            "name": self.name, "label": _to(self.label, language), "value": self.value, "min": self.least,
            "max": self.most, "step": self.step, "choices": chosen,
        }  # fmt: skip


def _to(words: Say | str, language: str) -> str:
    return words if isinstance(words, str) else words.to(language)


PAGE = (
    ".lk-moving{max-width:720px}.lk-moving .lk-controls{display:flex;flex-wrap:wrap;gap:.5em 1.2em;margin:.4em 0}"
    ".lk-moving label{display:flex;flex-direction:column;font-size:.9em;min-width:9em}"
    ".lk-moving output{font-variant-numeric:tabular-nums}.lk-moving svg{display:block;width:100%;height:auto}"
    ".lk-scroll{overflow-x:auto}.lk-moving .lk-said{min-height:2.6em;margin:.3em 0}"
)
