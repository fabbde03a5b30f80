"""A trace as one HTML page: a slider over the steps, each tensor as a map of its elements. It loads nothing else."""

import html
import json
from collections.abc import Sequence

from lessonkit.base.words import later, translated
from lessonkit.judge.trace import SECTOR, WARP, Step, Touched

WORDS = {
    "step": later("step"),
    "program": later("program"),
    "load": later("reads"),
    "store": later("writes"),
    "update": later("updates"),
    "masked": later("masked elements"),
    "sectors": later("sectors of {sector} bytes for {warp} neighbouring elements, at most"),
    "bytes": later("bytes asked for"),
    "legend": later("Colour: this step. Dark grey: read before. Striped: written before. Arrow keys move by one step."),
}


def page(title: str, steps: Sequence[Step], language: str) -> str:
    """The page's text, in "en" or "zh"."""
    words = {key: translated(english, language) for key, english in WORDS.items()}
    words["sectors"] = words["sectors"].format(sector=SECTOR, warp=WARP)
    tensors: dict[tuple[int, Touched], int] = {}
    told = []
    for step in steps:
        nth = tensors.setdefault((step.launch, step.tensor), len(tensors))
        told.append(
            {
                "kind": step.kind,
                "kernel": step.kernel,
                "program": ", ".join(map(str, step.program)),
                "line": step.line,
                "source": step.source,
                "tensor": nth,
                "where": step.where,
                "runs": runs(step.elements),
                "masked": f"{step.masked} / {step.lanes}",
                "sectors": step.sectors,
                "bytes": step.bytes,
            }
        )
    drawn = [
        {"name": t.argument, "launch": launch, "shape": t.shape, "columns": t.shape[-1] if t.shape else 1}
        for launch, t in tensors
    ]
    data = json.dumps({"steps": told, "tensors": drawn, "words": words}, ensure_ascii=False).replace("<", "\\u003c")
    return (
        PAGE.replace("@LANG", {"en": "en", "zh": "zh-CN"}[language])
        .replace("@TITLE", html.escape(title))
        .replace("@LEGEND", html.escape(words["legend"]))
        .replace("@LAST", str(len(steps) - 1))
        .replace("@DATA", data)
    )


def runs(elements: Sequence[int]) -> list[tuple[int, int]]:
    """Elements in their order as (first, how many) of each stretch without a gap."""
    found: list[tuple[int, int]] = []
    for element in sorted(set(elements)):
        if found and sum(found[-1]) == element:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((element, 1))
    return found


PAGE = """<!doctype html>
<html lang="@LANG">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>@TITLE</title>
<style>
:root { color-scheme: light dark; --ground: #fff; --ink: #222; --faint: #e4e4e4; --old: #999; --now: #d9480f; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #181818; --ink: #ddd; --faint: #333; --old: #888; --now: #ff922b; }
}
body { font: 16px/1.5 system-ui, sans-serif; margin: 1em auto; max-width: 60em; padding: 0 1em;
  background: var(--ground); color: var(--ink); }
input { width: 100%; }
pre { white-space: pre-wrap; border-left: 3px solid var(--now); padding-left: .8em; min-height: 1.5em; }
canvas { display: block; max-width: 100%; image-rendering: pixelated; }
</style>
<h1>@TITLE</h1>
<input id="at" type="range" min="0" max="@LAST" value="0" autofocus aria-label="@TITLE">
<p id="said" aria-live="polite"></p>
<pre id="source"></pre>
<div id="tensors"></div>
<p>@LEGEND</p>
<script type="application/json" id="data">@DATA</script>
<script>
const { steps, tensors, words } = JSON.parse(document.getElementById("data").textContent);
const at = document.getElementById("at"), said = document.getElementById("said");
const WIDE = 128;  // cells of a row of the picture; a longer row of a tensor goes on in the next
for (const t of tensors) {
  const count = t.shape.reduce((a, b) => a * b, 1);
  t.columns = Math.max(1, Math.min(t.columns, WIDE));
  t.cell = Math.max(3, Math.min(24, Math.floor(900 / t.columns)));
  t.perRow = t.shape.length ? t.shape[t.shape.length - 1] : 1;
  t.linesPerRow = Math.max(1, Math.ceil(t.perRow / t.columns));
  t.count = count;
  t.label = document.createElement("p");
  t.canvas = document.createElement("canvas");
  t.canvas.width = t.columns * t.cell;
  t.canvas.height = Math.ceil(count / Math.max(1, t.perRow)) * t.linesPerRow * t.cell;
  document.getElementById("tensors").append(t.label, t.canvas);
}
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name);
function paint(t, runs, how) {
  const g = t.canvas.getContext("2d"), c = t.cell;
  for (const [first, many] of runs) for (let e = first; e < first + many; e++) {
    const row = Math.floor(e / t.perRow), column = e % t.perRow;
    const x = (column % t.columns) * c, y = (row * t.linesPerRow + Math.floor(column / t.columns)) * c;
    g.fillStyle = colour(how === "now" ? "--now" : how === "faint" ? "--faint" : "--old");
    g.fillRect(x, y, c - 1, c - 1);
    if (how === "written") {
      g.fillStyle = colour("--ground");
      g.fillRect(x, y + Math.floor(c / 3), c - 1, Math.max(1, Math.floor(c / 4)));
    }
  }
}
function show() {
  const n = Number(at.value), now = steps[n];
  for (const t of tensors) {
    t.canvas.getContext("2d").clearRect(0, 0, t.canvas.width, t.canvas.height);
    paint(t, [[0, t.count]], "faint");
    t.label.textContent = `${t.name} [${t.shape.join(", ")}]`;
  }
  for (const s of steps.slice(0, n)) paint(tensors[s.tensor], s.runs, s.kind === "load" ? "read" : "written");
  const t = tensors[now.tensor];
  paint(t, now.runs, "now");
  t.label.textContent += `   ${words[now.kind]} [${now.where}]`;
  said.textContent = `${words.step} ${n + 1} / ${steps.length}: ${now.kernel}, ${words.program} ${now.program}, `
    + `${words[now.kind]} ${t.name}[${now.where}]. ${words.masked}: ${now.masked}. `
    + `${words.sectors}: ${now.sectors}. ${words.bytes}: ${now.bytes}.`;
  document.getElementById("source").textContent = `${now.line}  ${now.source}`;
}
at.addEventListener("input", show);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
show();
</script>
</html>
"""
