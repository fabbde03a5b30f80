const figure = {
  model({ stride, offset, size }, { sector, lanes }) {
    const touched = new Set();
    for (let lane = 0; lane < lanes; lane++) {
      const first = (offset + lane * stride) * size;
      for (let s = Math.floor(first / sector); s <= Math.floor((first + size - 1) / sector); s++) touched.add(s);
    }
    const sectors = [...touched].sort((a, b) => a - b), used = stride ? lanes * size : size;
    return { sectors, count: sectors.length, percent: (100 * used) / (sectors.length * sector) };
  },
  draw(pen, m, { stride, offset, size }, { sector, lanes }, words) {
    const cell = 344 / lanes, across = 16, wide = 344 / across;
    for (let lane = 0; lane < lanes; lane++) pen.box(8 + lane * cell, 20, cell - 1, 14, lane % 2 ? "a" : "b");
    pen.text(8, 10, words.lanes, 10);
    pen.text(8, 48, words.sectors, 10);
    m.sectors.forEach((s, i) => {
      const x = 8 + (i % across) * wide, y = 58 + Math.floor(i / across) * 34;
      pen.box(x, y, wide - 2, 18, "off");
      for (let lane = 0; lane < lanes; lane++) {
        const first = (offset + lane * stride) * size - s * sector;
        const from = Math.max(0, first), to = Math.min(sector, first + size), unit = (wide - 2) / sector;
        if (to > from) pen.box(x + from * unit, y, (to - from) * unit, 18, lane % 2 ? "a" : "b");
      }
      pen.text(x + wide / 2 - 1, y + 24, String(s), 8, "middle", "faint");
    });
  },
  say: (m, p, data, words) => fill(words.said, { count: m.count, percent: m.percent.toFixed(0) }),
};
