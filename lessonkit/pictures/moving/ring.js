const figure = {
  model({ stages, load, multiply }, { steps }) {
    const done = [];
    for (let step = 0; step < steps; step++) {
      const before = done[step - 1], ready = before ? before.full : 0;
      const begin = Math.max(ready, step >= stages ? done[step - stages].released : 0), full = begin + load;
      const use = Math.max(full, before ? before.released : 0);
      done.push({ stage: step % stages, parity: Math.floor(step / stages) & 1, load: begin, full, use, released: use + multiply });
    }
    return done;
  },
  draw(pen, done, { stages, step }, { steps }, words) {
    const end = done[done.length - 1].released, scale = 300 / end, now = (end * step) / 24;
    for (let stage = 0; stage < stages; stage++) {
      const y = 14 + stage * 34;
      pen.text(4, y + 9, fill(words.stage, { stage }), 8);
      done.forEach((d, i) => {
        if (d.stage !== stage) return;
        pen.box(52 + d.load * scale, y, (d.full - d.load) * scale, 18, "a", String(i), 8);
        pen.box(52 + d.full * scale, y, (d.use - d.full) * scale, 18, "off");
        pen.box(52 + d.use * scale, y, (d.released - d.use) * scale, 18, "c", String(i), 8);
      });
      // A phase completes when a step's bytes have arrived; the parity of the phase under way flips then.
      const parity = done.filter((d) => d.stage === stage && d.full <= now).length & 1;
      pen.text(52, y + 24, fill(words.parity, { parity }), 8, "start", "faint");
    }
    pen.line(52 + now * scale, 8, 52 + now * scale, 10 + stages * 34);
    pen.legend(16 + stages * 34, [["a", words.loading], ["off", words.full], ["c", words.reading]]);
  },
  say: (done, p, data, words) => {
    const last = done[done.length - 1], busy = done.reduce((sum, d) => sum + d.released - d.use, 0);
    return fill(words.said, { cycles: last.released, percent: ((100 * busy) / last.released).toFixed(0) });
  },
};
