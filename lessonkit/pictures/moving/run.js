// Runs one figure: `figure.model(p, data)` computes, `figure.draw(pen, m, p, data, words)` draws, `figure.say` speaks.
// Controls are inputs of the page, so the keyboard moves them; what a figure says is read aloud after a change.
function run(root, figure) {
  const { data, controls, words } = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
  const still = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
  const p = {}, bar = document.createElement("div"), said = document.createElement("p");
  const space = "http://www.w3.org/2000/svg", svg = document.createElementNS(space, "svg");
  const scroll = document.createElement("div");
  let smallest = 11;
  scroll.className = "lk-scroll";
  scroll.tabIndex = 0; // the keyboard scrolls it where the page is narrow
  scroll.append(svg);
  bar.className = "lk-controls";
  said.className = "lk-said";
  said.setAttribute("aria-live", "polite");
  svg.setAttribute("class", "lk-picture");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", root.getAttribute("aria-label"));
  const make = (name, attributes, text) => {
    const element = document.createElementNS(space, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (text !== undefined) smallest = Math.min(smallest, attributes["font-size"]);
    if (text !== undefined) element.textContent = text;
    svg.appendChild(element);
  };
  const redraw = () => {
    svg.replaceChildren();
    const pen = penOn(make), m = figure.model(p, data);
    figure.draw(pen, m, p, data, words);
    svg.setAttribute("viewBox", `0 0 360 ${Math.ceil(pen.lowest + 8)}`);
    svg.style.minWidth = `${(11 * 360) / smallest}px`; // no letter smaller than 11 pixels
    said.textContent = figure.say(m, p, data, words);
  };
  for (const control of controls) {
    const label = document.createElement("label"), shown = document.createElement("output");
    const name = document.createElement("span");
    name.textContent = control.label;
    p[control.name] = control.value;
    let input;
    if (control.choices.length) {
      input = document.createElement("select");
      for (const [value, text] of control.choices) input.add(new Option(text, String(value), false, value === control.value));
      input.onchange = () => {
        p[control.name] = control.choices[input.selectedIndex][0];
        redraw();
      };
    } else {
      input = document.createElement("input");
      Object.assign(input, { type: "range", min: control.min, max: control.max, step: control.step });
      input.value = control.value;
      const show = figure.shown?.[control.name] || String;
      input.oninput = () => {
        p[control.name] = Number(input.value);
        shown.textContent = show(p[control.name]);
        input.setAttribute("aria-valuetext", shown.textContent);
        redraw();
      };
      shown.textContent = show(control.value);
      name.append(" ", shown);
    }
    label.append(name, input);
    bar.appendChild(label);
    if (control.name === "step") bar.appendChild(player(input, words, still));
  }
  root.append(bar, scroll, said);
  redraw();
}

// A button that moves the slider of steps once a second; a reader who wants no motion moves the slider by hand.
function player(input, words, still) {
  const button = document.createElement("button");
  let timer = 0;
  const stop = () => {
    clearInterval(timer);
    timer = 0;
    button.textContent = words.play;
  };
  button.type = "button";
  button.hidden = still;
  button.onclick = () => {
    if (timer) return stop();
    if (Number(input.value) >= Number(input.max)) input.value = input.min;
    button.textContent = words.stop;
    timer = setInterval(() => {
      if (Number(input.value) >= Number(input.max)) return stop();
      input.value = Number(input.value) + Number(input.step);
      input.dispatchEvent(new Event("input"));
    }, 1000);
  };
  button.textContent = words.play;
  return button;
}

function penOn(make) {
  const pen = {
    lowest: 0,
    box(x, y, w, h, kind, label, size) {
      const thin = Math.min(w, h) < 6 ? " thin" : ""; // an outline would hide so small a colour
      make("rect", { class: `k-${kind}${thin}`, x, y, width: Math.max(w, 0.5), height: h, rx: Math.min(2, w / 4) });
      if (label) pen.text(x + w / 2, y + h / 2, label, size || 10, "middle");
      pen.lowest = Math.max(pen.lowest, y + h);
    },
    text(x, y, words, size, anchor, kind) {
      const attributes = { x, y: y + 0.36 * size, "font-size": size, "text-anchor": anchor || "start", class: kind || "ink" };
      make("text", attributes, words);
      pen.lowest = Math.max(pen.lowest, y + size / 2);
    },
    line(x1, y1, x2, y2) {
      make("path", { class: "line", d: `M${x1} ${y1}L${x2} ${y2}` });
      pen.lowest = Math.max(pen.lowest, y1, y2);
    },
    // A legend: [[kind, words], ...] in one column of its own line each.
    legend(y, entries) {
      entries.forEach(([kind, words], i) => {
        pen.box(8, y + 15 * i, 11, 11, kind);
        pen.text(23, y + 15 * i + 5.5, words, 10);
      });
    },
  };
  return pen;
}

// "{count} sectors" with {count: 4}
function fill(words, values) {
  return words.replace(/\{(\w+)\}/g, (_, name) => values[name]);
}
