const figure = {
  model({ n, block }) {
    const programs = Math.ceil(n / block), kept = [];
    for (let p = 0; p < programs; p++) kept.push(Math.min(block, n - p * block));
    return { programs, kept, masked: programs * block - n };
  },
  draw(pen, m, { n, block }) {
    const lanes = m.programs * block, across = 16, cell = 344 / across;
    for (let i = 0; i < lanes; i++) {
      const x = 8 + (i % across) * cell, y = 8 + Math.floor(i / across) * 30, program = Math.floor(i / block);
      pen.box(x, y, cell - 1, 16, i < n ? "abcd"[program % 4] : "none", String(i), 9);
      if (i % block === 0) pen.text(x + 1, y + 22, "p" + program, 8, "start", "faint");
    }
  },
  say: (m, p, data, words) => fill(words.said, { programs: m.programs, masked: m.masked }),
};
