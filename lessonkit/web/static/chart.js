// Charts of measured rows, drawn as SVG from the JSON that stands in the page. No library.
(() => {
  "use strict";
  const NS = "http://www.w3.org/2000/svg";
  const W = 760, H = 380, LEFT = 64, RIGHT = 16, TOP = 14, BOTTOM = 50;
  const CROWD = 12; // contenders
  const NAME = 110; // the width of a roof's name
  const RUNG = 0, PEER = 4; // colours

  const make = (tag, attributes, parent, text) => {
    const node = document.createElementNS(NS, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  };
  const html = (tag, attributes, parent, text) => {
    const node = document.createElement(tag);
    Object.assign(node, attributes);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  };
  const short = (x) => (x === 0 ? "0" : Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3 ? x.toExponential(0) : String(+x.toPrecision(3)));

  // More than 100% of a limit is explained where it is shown.
  const share = (percent, words) => `${Math.round(percent)}${words.percent}` + (Math.round(percent) > 100 ? ` (${words.beyond})` : "");

  // A scale from values to pixels; its ticks.
  const scale = (values, log, from, to) => {
    let low = Math.min(...values), high = Math.max(...values);
    if (log) { low = Math.log10(low); high = Math.log10(high); } else low = 0;
    if (high - low < 1e-9) { low -= log ? 0.5 : 0; high += log ? 0.5 : 1; }
    if (log) { const pad = 0.04 * (high - low); low -= pad; }
    high += 0.06 * (high - low);
    const at = (v) => from + (((log ? Math.log10(v) : v) - low) / (high - low)) * (to - from);
    const ticks = [];
    if (log) {
      const few = high - low < 1.6;
      for (let e = Math.floor(low); e <= Math.ceil(high); e++)
        for (const m of few ? [1, 2, 5] : [1]) {
          const v = m * 10 ** e;
          if (Math.log10(v) >= low && Math.log10(v) <= high) ticks.push(v);
        }
    } else {
      const rough = high / 5, power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
      for (let v = 0; v <= high; v += step) ticks.push(v);
    }
    return { at, ticks };
  };

  const frame = (svg, x, y, xLabel, yLabel) => {
    for (const v of x.ticks) {
      make("line", { x1: x.at(v), x2: x.at(v), y1: TOP, y2: H - BOTTOM, class: "grid" }, svg);
      make("text", { x: x.at(v), y: H - BOTTOM + 17, "text-anchor": "middle" }, svg, short(v));
    }
    for (const v of y.ticks) {
      make("line", { x1: LEFT, x2: W - RIGHT, y1: y.at(v), y2: y.at(v), class: "grid" }, svg);
      make("text", { x: LEFT - 7, y: y.at(v) + 4, "text-anchor": "end" }, svg, short(v));
    }
    make("text", { x: (LEFT + W - RIGHT) / 2, y: H - 10, "text-anchor": "middle", class: "label" }, svg, xLabel);
    make("text", { x: 0, y: 0, transform: `translate(15 ${(TOP + H - BOTTOM) / 2}) rotate(-90)`, "text-anchor": "middle", class: "label" }, svg, yLabel);
  };

  const MARKS = [
    (x, y) => ["circle", { cx: x, cy: y, r: 5 }],
    (x, y) => ["rect", { x: x - 4.5, y: y - 4.5, width: 9, height: 9 }],
    (x, y) => ["path", { d: `M${x} ${y - 6}L${x + 6} ${y + 5}L${x - 6} ${y + 5}Z` }],
    (x, y) => ["path", { d: `M${x} ${y - 6}L${x + 6} ${y}L${x} ${y + 6}L${x - 6} ${y}Z` }],
  ];

  const mark = (svg, x, y, nth, colour, said, show, href) => {
    const parent = href ? make("a", { href }, svg) : svg;
    const [tag, place] = MARKS[nth % MARKS.length](x, y);
    const node = make(tag, { ...place, fill: colour, class: "mark" }, parent);
    (href ? parent : node).setAttribute("aria-label", said);
    if (!href) { node.setAttribute("tabindex", "0"); node.setAttribute("role", "img"); }
    for (const event of ["mouseenter", "focus", "click"]) (href ? parent : node).addEventListener(event, () => show(said));
  };
  const colour = (nth) => `var(--chart-${nth % 8})`;

  const select = (parent, label, options, chosen, change) => {
    const wrap = html("label", { className: "chart-control" }, parent, label + " ");
    const node = html("select", {}, wrap);
    for (const [value, text] of options) html("option", { value, selected: value === chosen }, node, text);
    node.addEventListener("change", () => change(node.value));
    return wrap;
  };
  const box = (parent, label, checked, change) => {
    const wrap = html("label", { className: "chart-control" }, parent);
    const node = html("input", { type: "checkbox", checked }, wrap);
    wrap.append(" " + label);
    node.addEventListener("change", () => change(node.checked));
  };

  const drawRows = (figure, data, words) => {
    const rowsOf = (device) => data.devices[device].map((line) => Object.fromEntries(data.fields.map((f, i) => [f, line[i]])));
    const state = { device: Object.keys(data.devices)[0], dtype: "", shape: "", y: "rate", logx: true, logy: false };
    // So many lines hide each other: such a chart begins with one shape, that which most contenders have.
    const first = rowsOf(state.device).filter((r, _, [{ dtype }]) => r.dtype === dtype);
    if (new Set(first.map((r) => r.rung)).size > CROWD) {
      const count = (shape) => first.filter((r) => r.shape === shape).length;
      state.shape = first.map((r) => r.shape).reduce((a, b) => (count(b) > count(a) ? b : a));
    }
    const controls = html("div", { className: "chart-controls" }, figure);
    const scroll = html("div", { className: "chart-scroll" }, figure);
    const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "group" }, scroll);
    const legend = html("ul", { className: "chart-legend" }, figure);
    const readout = html("p", { className: "chart-readout" }, figure, words.hint);
    readout.setAttribute("aria-live", "polite");
    const hidden = new Set();
    const value = (row) => state.y === "ms" ? row.ms_p50 : state.y === "percent" ? row.percent_of_limit
      : data.unit === "TB/s" ? row.tb_per_s : row.kind === "limit" ? 0 : row.tflop_per_s;

    const menus = () => {
      controls.replaceChildren();
      const rows = rowsOf(state.device);
      const dtypes = [...new Set(rows.map((r) => r.dtype))];
      if (!dtypes.includes(state.dtype)) state.dtype = dtypes[0];
      const shapes = [...new Set(rows.filter((r) => r.dtype === state.dtype).map((r) => r.shape))];
      if (!shapes.includes(state.shape)) state.shape = "";
      const set = (key) => (v) => { state[key] = v; menus(); draw(); };
      select(controls, words.gpu, Object.keys(data.devices).map((d) => [d, d]), state.device, set("device"));
      select(controls, words.dtype, dtypes.map((d) => [d, d]), state.dtype, set("dtype"));
      select(controls, words.shape, [["", words.all], ...shapes.map((s) => [s, s])], state.shape, set("shape"));
      select(controls, words.y, [["rate", `${words.rate}, ${data.unit}`], ["ms", words.ms], ["percent", words.percent]], state.y, set("y"));
      if (!state.shape) box(controls, words.logx, state.logx, set("logx"));
      box(controls, words.logy, state.logy, set("logy"));
    };

    const describe = (row) => {
      const said = [`${row.rung}, ${row.shape}, ${row.dtype}: ${short(row.ms_p50)} ms`, `${row.tb_per_s.toPrecision(3)} TB/s`];
      if (row.tflop_per_s && row.kind !== "limit") said.push(`${short(row.tflop_per_s)} TFLOP/s`);
      if (row.percent_of_limit) said.push(share(row.percent_of_limit, words));
      if (row.ratio_to_best_peer && row.kind !== "limit") said.push(`${words.ratio} ${row.ratio_to_best_peer.toFixed(2)}`);
      const p = data.predicted.find((each) => each.rung === row.rung && each.shape === row.shape && each.dtype === row.dtype);
      if (p) said.push(`${words.predicted}: ${p.how}` + (p.why ? `; ${words.why}: ${p.why}` : ""));
      return said.join("; ") + ` (${words.date} ${row.date}, ${row.commit})`;
    };

    const draw = () => {
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
      const all = rowsOf(state.device).filter((r) => r.dtype === state.dtype && (!state.shape || r.shape === state.shape) && value(r) > 0);
      const names = [...new Set(rowsOf(state.device).map((r) => r.rung))];
      const rows = all.filter((r) => state.shape || !hidden.has(r.rung)); // only lines are hidden
      legend.replaceChildren();
      if (!state.shape) names.forEach((name, nth) => {
        if (!all.some((r) => r.rung === name)) return;
        const item = html("li", {}, legend);
        const button = html("button", { type: "button" }, item);
        button.setAttribute("aria-pressed", String(!hidden.has(name)));
        const icon = make("svg", { viewBox: "0 0 16 16", width: 14, height: 14, "aria-hidden": "true" }, button);
        const [tag, place] = MARKS[nth % MARKS.length](8, 8);
        make(tag, { ...place, fill: colour(nth) }, icon);
        button.append(" " + name);
        button.addEventListener("click", () => { hidden.has(name) ? hidden.delete(name) : hidden.add(name); draw(); });
      });
      if (!rows.length) return;
      const unit = state.y === "rate" ? data.unit : state.y === "ms" ? "ms" : words.percent;
      const predicted = (row) => {
        const p = data.predicted.find((each) => each.rung === row.rung && each.shape === row.shape && each.dtype === row.dtype);
        return p ? p.ms.map((ms) => (state.y === "ms" ? ms : (value(row) * row.ms_p50) / ms)) : [];
      };
      const y = scale(rows.flatMap((r) => [value(r), ...predicted(r)]), state.logy, H - BOTTOM, TOP);
      if (state.shape) return bars(rows, y, unit, predicted);
      const x = scale(rows.map((r) => r.bytes / 1e6), state.logx, LEFT, W - RIGHT);
      svg.setAttribute("aria-label", `${unit}; ${words.bytes}`);
      frame(svg, x, y, words.bytes, unit);
      names.forEach((name, nth) => {
        const mine = rows.filter((r) => r.rung === name).sort((a, b) => a.bytes - b.bytes);
        if (!mine.length) return;
        const points = mine.map((r) => `${x.at(r.bytes / 1e6)},${y.at(value(r))}`).join(" ");
        make("polyline", { points, class: `line line-${mine[0].kind}`, stroke: colour(nth) }, svg);
      });
      names.forEach((name, nth) => rows.filter((r) => r.rung === name).forEach((row) => {
        for (const p of predicted(row))
          make("line", { x1: x.at(row.bytes / 1e6) - 8, x2: x.at(row.bytes / 1e6) + 8, y1: y.at(p), y2: y.at(p), class: "predicted", stroke: colour(nth) }, svg);
        mark(svg, x.at(row.bytes / 1e6), y.at(value(row)), nth, colour(nth), describe(row), (t) => { readout.textContent = t; });
      }));
    };

    // One shape: a column with its name for each contender, in the order of the lesson; peers and limits are grey.
    const bars = (rows, y, unit, predicted) => {
      svg.setAttribute("aria-label", `${unit}; ${state.shape}`);
      const step = (W - LEFT - RIGHT) / rows.length, slanted = rows.length > CROWD;
      svg.setAttribute("viewBox", `0 0 ${W} ${H + (slanted ? 70 : 0)}`);
      frame(svg, { at: () => 0, ticks: [] }, y, slanted ? "" : state.shape, unit);
      rows.forEach((row, i) => {
        const nth = row.kind === "rung" ? RUNG : PEER, at = LEFT + step * (i + 0.5), top = y.at(value(row));
        const bar = make("rect", { x: at - step * 0.36, width: step * 0.72, y: top, height: Math.max(1, H - BOTTOM - top), fill: colour(nth), class: "mark", tabindex: 0, role: "img", "aria-label": describe(row) }, svg);
        for (const event of ["mouseenter", "focus", "click"]) bar.addEventListener(event, () => { readout.textContent = describe(row); });
        for (const p of predicted(row)) make("line", { x1: at - step * 0.45, x2: at + step * 0.45, y1: y.at(p), y2: y.at(p), class: "predicted", stroke: "currentColor" }, svg);
        if (slanted) {
          const x = at + 3, low = H - BOTTOM + 12;
          make("text", { x, y: low, "text-anchor": "end", transform: `rotate(-50 ${x} ${low})`, "aria-hidden": "true" }, svg, row.rung);
          return;
        }
        const room = Math.max(4, Math.floor(step / 6));
        make("text", { x: at, y: H - BOTTOM + 17, "text-anchor": "middle", "aria-hidden": "true" }, svg, row.rung.length > room ? row.rung.slice(0, room - 1) + "…" : row.rung);
      });
    };
    menus();
    draw();
  };

  const drawRoofline = (figure, data, words) => {
    const scroll = html("div", { className: "chart-scroll" }, figure);
    const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "group", "aria-label": `TFLOP/s; ${words.intensity}` }, scroll);
    const legend = html("ul", { className: "chart-legend" }, figure);
    const readout = html("p", { className: "chart-readout" }, figure, words.hint);
    readout.setAttribute("aria-live", "polite");
    const points = data.points.filter((p) => p.x > 0);
    const roofs = Object.entries(data.roofs), top = Math.max(...roofs.map(([, rate]) => rate));
    const right = 1.3 * Math.max(...points.map((p) => p.x), top / data.copy);
    const left = Math.min(...points.map((p) => p.x));
    const x = scale([left, right], true, LEFT, W - RIGHT - NAME);
    const y = scale([...points.flatMap((p) => [p.y, p.first]), top], true, H - BOTTOM, TOP);
    frame(svg, x, y, words.intensity, "TFLOP/s");
    const line = (...ends) => make("polyline", { points: ends.map(([a, b]) => `${x.at(a)},${y.at(b)}`).join(" "), class: "line line-limit", stroke: "currentColor" }, svg);
    line([left, left * data.copy], [top / data.copy, top]);
    for (const [name, rate] of roofs) {
      line([rate / data.copy, rate], [right, rate]);
      make("text", { x: x.at(right) + 4, y: y.at(rate) + 4 }, svg, `${name} ${short(rate)} TFLOP/s`);
    }
    const kinds = [...new Set(points.map((p) => p.bound))];
    kinds.forEach((kind, nth) => {
      const item = html("li", {}, legend);
      const icon = make("svg", { viewBox: "0 0 16 16", width: 14, height: 14, "aria-hidden": "true" }, item);
      const [tag, place] = MARKS[nth % MARKS.length](8, 8);
      make(tag, { ...place, fill: colour(nth) }, icon);
      item.append(` ${words.bound}: ${words.bounds[kind]}`);
    });
    for (const p of points) {
      const nth = kinds.indexOf(p.bound);
      make("line", { x1: x.at(p.x), x2: x.at(p.x), y1: y.at(p.first), y2: y.at(p.y), stroke: colour(nth), class: "rise" }, svg);
      const said = `${p.operator}: ${p.lesson}, ${p.rung}, ${p.shape}, ${p.dtype}: ${short(p.y)} TFLOP/s, ${share(p.percent, words)}; ${words.first} ${short(p.first)} TFLOP/s; ${words.bound}: ${words.bounds[p.bound]}`;
      mark(svg, x.at(p.x), y.at(p.y), nth, colour(nth), said, (t) => { readout.textContent = t; }, p.href);
    }
  };

  for (const figure of document.querySelectorAll("figure.chart")) {
    const read = (name) => JSON.parse(figure.querySelector(`script.${name}`).textContent);
    const draw = { rows: drawRows, roofline: drawRoofline }[figure.dataset.kind];
    draw(figure, read("chart-data"), read("chart-words"));
  }
})();
