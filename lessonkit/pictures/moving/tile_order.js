const figure = {
  place(index, m, n, group) {
    const first = Math.floor(index / (group * n)) * group, height = Math.min(m - first, group), within = index % (group * n);
    return [first + (within % height), Math.floor(within / height)];
  },
  model({ tiles_m, tiles_n, group, sms }) {
    const order = [], strips = [];
    for (let i = 0; i < tiles_m * tiles_n; i++) order.push(figure.place(i, tiles_m, tiles_n, group));
    for (let i = 0; i < order.length; i += sms) {
      const wave = order.slice(i, i + sms);
      strips.push(new Set(wave.map((t) => t[0])).size + new Set(wave.map((t) => t[1])).size);
    }
    const sum = strips.reduce((a, b) => a + b, 0);
    return { order, first: strips[0], strips: sum, hits: 100 * (1 - sum / (2 * order.length)) };
  },
  draw(pen, m, { tiles_m, tiles_n, sms }, data, words) {
    const cell = Math.min(20, 320 / tiles_n, 320 / tiles_m), wave = m.order.slice(0, sms);
    const rows = new Set(wave.map((t) => t[0])), columns = new Set(wave.map((t) => t[1]));
    for (let c = 0; c < tiles_n; c++) pen.box(28 + c * cell, 8, cell - 1, 10, columns.has(c) ? "b" : "none");
    for (let r = 0; r < tiles_m; r++) pen.box(8, 24 + r * cell, 10, cell - 1, rows.has(r) ? "a" : "none");
    m.order.forEach(([r, c], i) => {
      const kind = i < sms ? "c" : Math.floor(i / sms) % 2 ? "off" : "none";
      pen.box(28 + c * cell, 24 + r * cell, cell - 1, cell - 1, kind, cell >= 16 ? String(i) : "", 8);
    });
    pen.legend(34 + tiles_m * cell, [["c", words.wave], ["a", words.rows], ["b", words.columns]]);
  },
  say: (m, p, data, words) => fill(words.said, { first: m.first, strips: m.strips, hits: m.hits.toFixed(0) }),
};
