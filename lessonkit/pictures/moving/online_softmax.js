const figure = {
  model({ block }, { values }) {
    const steps = [];
    let m = -Infinity, s = 0;
    for (let start = 0; start < values.length; start += block) {
      const part = values.slice(start, start + block), larger = Math.max(m, ...part);
      const alpha = m === -Infinity ? 0 : Math.exp(m - larger);
      s = s * alpha + part.reduce((sum, x) => sum + Math.exp(x - larger), 0);
      m = larger;
      steps.push({ m, alpha, s });
    }
    return steps;
  },
  draw(pen, steps, { block, step }, { values }, words) {
    const cell = 344 / values.length, now = Math.min(step, steps.length) - 1, high = Math.max(...values);
    values.forEach((value, i) => {
      const mine = Math.floor(i / block), kind = mine > now ? "none" : mine === now ? "b" : "a", tall = 10 + (60 * value) / high;
      pen.box(8 + i * cell, 80 - tall, cell - 3, tall, kind, String(value), 10);
    });
    const at = steps[now], level = 80 - (10 + (60 * at.m) / high);
    pen.line(8, level, 8 + Math.min((now + 1) * block, values.length) * cell, level);
    ["m", "alpha", "s"].forEach((name, i) => {
      pen.text(8, 100 + 24 * i, name, 11);
      pen.box(60, 90 + 24 * i, 90, 20, "cdb"[i], name === "m" ? String(at.m) : at[name].toFixed(4));
    });
  },
  say: (steps, { step }, data, words) => {
    const at = steps[Math.min(step, steps.length) - 1];
    return fill(words.said, { block: Math.min(step, steps.length) - 1, m: at.m, alpha: at.alpha.toFixed(4), s: at.s.toFixed(4) });
  },
};
