const figure = {
  model({ chip, warps, registers, shared }, { chips }) {
    const c = chips[chip], unit = Math.ceil(registers / 8) * 8 * c.warp_size, bytes = shared * 1024 + c.reserved;
    const limits = {
      registers: Math.floor(Math.floor(c.registers / unit) / warps),
      shared: bytes ? Math.floor(c.shared / bytes) : c.blocks,
      warps: Math.floor(c.warps / warps),
      programs: c.blocks,
    };
    const fits = shared * 1024 <= c.shared_block, resident = fits ? Math.min(...Object.values(limits)) : 0;
    return { resident, percent: (100 * resident * warps) / c.warps, limits };
  },
  draw(pen, m, { chip, warps }, { chips }, words) {
    const slots = chips[chip].warps, across = 16, cell = 344 / across;
    for (let w = 0; w < slots; w++) {
      const program = Math.floor(w / warps), kind = program < m.resident ? "abcd"[program % 4] : "none";
      pen.box(8 + (w % across) * cell, 8 + Math.floor(w / across) * 16, cell - 1, 14, kind);
    }
    const top = 20 + Math.ceil(slots / across) * 16;
    Object.entries(m.limits).forEach(([name, limit], i) => {
      pen.text(8, top + 9 + 22 * i, words[name], 10);
      const most = chips[chip].blocks;
      pen.box(150, top + 22 * i, (Math.min(limit, most) / most) * 160, 18, limit === m.resident ? "e" : "off");
      pen.text(156 + (Math.min(limit, most) / most) * 160, top + 9 + 22 * i, String(limit), 10);
    });
  },
  say: (m, p, data, words) => fill(words.said, { resident: m.resident, percent: m.percent.toFixed(0) }),
};
